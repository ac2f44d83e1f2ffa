"""
Train a spiking network
=======================

A spiking neuron sums up its input until a threshold is reached; then it sends a spike, and begins
anew. :mod:`sparsescan.recurrent.catalogue` has three such neurons, with the equations and the
parameters of snnTorch's. A layer of neurons is a recurrent cell, so compiled loops run it over
whole sequences, forward and backward. Here a network learns to tell patterns of spikes apart, by
their times alone.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import MaxNLocator

from sparsescan.recurrent import Vector
from sparsescan.recurrent.catalogue import Leaky, Synaptic
from sparsescan.torch import module

# sphinx_gallery_thumbnail_number = 3
torch.set_num_threads(1)
torch.manual_seed(0)
rng = np.random.default_rng(0)

# %%
# One neuron
# ----------
# :class:`~sparsescan.recurrent.catalogue.Synaptic` has a current :math:`i`, to which the input
# :math:`x` is added, and a potential :math:`u`, to which the current is added; both decay. In each
# step the output :math:`s` is 1 where the potential is above the threshold :math:`\vartheta`, and
# 0 elsewhere. After a spike the potential is lowered by :math:`\vartheta`:
#
# .. math:: i' = \alpha i + x, \quad u' = \beta u + i' - \vartheta s,
#
# .. math:: s' = 1 \;\text{ where }\; u' > \vartheta.
#
# :meth:`~sparsescan.recurrent.Cell.unroll` returns the states of all steps, here of one neuron.

pulses = np.zeros((100, 1), np.float32)
pulses[[5, 20, 35, 50, 53, 56, 75, 90]] = 0.12
s, i, u = Synaptic(1, 1).unroll(pulses)[1:].T

fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
(given,), (fired,) = np.nonzero(pulses[:, 0]), np.nonzero(s)
axes.plot(i, color="#009e73", lw=1.2, label="current $i$")
axes.plot(u, color="#0072b2", lw=1.5, label="potential $u$")
axes.axhline(1, color="0.5", ls="--", lw=1, label=r"threshold $\vartheta$")
axes.vlines(given, -0.25, -0.1, color="0.4", lw=2, label="input $x$")
axes.vlines(fired, 1.15, 1.35, color="#d55e00", lw=2, label="spike $s$")
axes.set(xlabel="step", ylabel="one neuron", xlim=(0, 100))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %%
# Three pulses in quick succession make the neuron fire, and three that are far apart do not. So its
# output depends on when the input comes, and not only on how much.
#
# The patterns
# ------------
# A pattern has a time for each of 40 channels. In a sequence of 100 steps each channel spikes once,
# near the time that the pattern has for it, and rarely at random. All patterns have the same number
# of spikes, so only their times tell them apart. Channels are in the order of the first pattern,
# and one of two sequences is grey.

STEPS, CHANNELS, PATTERNS, NEURONS = 100, 40, 3, 50
COLORS = "#0072b2", "#d55e00", "#009e73"
patterns = rng.uniform(5, 95, (PATTERNS, CHANNELS))
patterns = patterns[:, patterns[0].argsort()]


def draw(batch):
    """Return spikes ``(steps, batch, channels)``, and the pattern of each sequence."""
    which = rng.integers(PATTERNS, size=batch)
    times = patterns[which] + 4 * rng.standard_normal((batch, CHANNELS))
    times = times.round().clip(0, STEPS - 1).astype(int)
    spikes = rng.random((STEPS, batch, CHANNELS)) < 0.003
    sample, channel = np.indices(times.shape)
    spikes[times, sample, channel] = True
    return torch.from_numpy(spikes).float(), torch.from_numpy(which)


spikes, which = draw(50)
fig, panels = plt.subplots(1, PATTERNS, figsize=(9, 2.6), sharey=True, layout="constrained")
for k, axes in enumerate(panels):
    two = (which == k).nonzero()[:2, 0]
    for row, color in zip(two, (COLORS[k], "0.6"), strict=True):
        axes.plot(*spikes[:, row].nonzero().T, ".", color=color, ms=5)
    axes.set(xlabel="step", title=f"two sequences of pattern {k + 1}", xlim=(0, STEPS))
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("channel")
plt.show()

# %%
# The network
# -----------
# The derivative of a spike is 0 wherever it exists. So the derivative of another function, a
# surrogate, takes its place: by default that of an arctangent,
# :math:`1 / (1 + (\pi (u - \vartheta))^2)`.
#
# Decay rates are trained too. In the catalogue all neurons of a layer share them; a derived class
# can give each neuron its own rate. :func:`sparsescan.torch.module` makes layers of such neurons:
# modules that take whole sequences, where those of snnTorch are called once for each step.


class Synapses(Synaptic):
    """Neurons whose rates of decay differ."""

    alpha = Vector(initial=0.9)
    beta = Vector(initial=0.9)


first = torch.nn.Linear(CHANNELS, NEURONS, bias=False)
hidden = module(Synapses)(NEURONS, NEURONS)
last = torch.nn.Linear(NEURONS, PATTERNS, bias=False)
output = module(Leaky)(PATTERNS, PATTERNS)
network = torch.nn.ModuleList([first, hidden, last, output])


def run(spikes):
    """Return the spikes of hidden neurons, and of those of the output."""
    inside, _ = hidden(first(spikes))
    return inside, output(last(inside))[0]


# %%
# Gradients are those of a loop over PyTorch's own operations. Here is one for the hidden neurons.


class Spike(torch.autograd.Function):
    """A step at 0, and the derivative of its surrogate."""

    @staticmethod
    def forward(ctx, u):
        """Return 1 where `u` is positive, and 0 elsewhere."""
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient in `u`."""
        (u,) = ctx.saved_tensors
        return grad / (1 + (torch.pi * u) ** 2)


def loop(x, alpha, beta, threshold):
    """Return the spikes of all steps."""
    i, u, spikes = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
    for each in x:
        reset = (u > threshold) * threshold
        i = alpha.clamp(0, 1) * i + each
        u = beta.clamp(0, 1) * u + i - reset
        spikes.append(Spike.apply(u - threshold))
    return torch.stack(spikes)


neurons = module(Synapses)(NEURONS, NEURONS, dtype=torch.float64)
params = {name.removesuffix("_l0"): each for name, each in neurons.named_parameters()}
x = torch.randn(STEPS, 64, NEURONS, dtype=torch.float64, requires_grad=True)
weights, wanted = torch.randn_like(x), [x, *params.values()]
ours, theirs = neurons(x)[0], loop(x, **params)
assert torch.equal(ours, theirs)
print(f"{ours.mean():.0%} of all outputs are spikes, the same in both")
for mine, reference in zip(
    torch.autograd.grad((weights * ours).sum(), wanted),
    torch.autograd.grad((weights * theirs).sum(), wanted),
    strict=True,
):
    torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)

# %%
# Training
# --------
# The pattern whose output neuron spikes most is the network's answer. The loss is the cross-entropy
# of these counts, plus a penalty on spikes of hidden neurons, so that there are few.

optimiser = torch.optim.Adam(network.parameters(), lr=2e-3)
losses, rates = [], []
for _ in range(200):
    spikes, which = draw(64)
    inside, outside = run(spikes)
    loss = torch.nn.functional.cross_entropy(outside.sum(0) / 2, which)
    rate = inside.mean()
    optimiser.zero_grad()
    (loss + 8 * rate).backward()
    optimiser.step()
    losses.append(loss.item())
    rates.append(rate.item())

with torch.no_grad():
    spikes, which = draw(500)
    inside, outside = run(spikes)
right = (outside.sum(0).argmax(1) == which).float().mean().item()
print(f"{right:.1%} of new sequences are told apart,")
print(f"with {inside.sum(0).mean():.1f} spikes of a hidden neuron on average")
assert right > 0.95

# %%
# This is the time of the hidden neurons, forward and backward. Calls take turns, and the fastest
# counts.

neurons = module(Synapses)(NEURONS, NEURONS)
params = {name.removesuffix("_l0"): each for name, each in neurons.named_parameters()}
x, weights = x.detach().float(), weights.float()
ways = {"the loop": lambda: loop(x, **params), "the module": lambda: neurons(x)[0]}
seconds = {name: [] for name in ways}
for _ in range(6):
    for name, call in ways.items():
        start = time.perf_counter()
        (weights * call()).sum().backward()
        seconds[name].append(time.perf_counter() - start)
for name, each in seconds.items():
    print(f"{name:<11}{1e3 * min(each):6.2f} ms")
assert min(seconds["the module"]) < min(seconds["the loop"])

# %%
# The panels show sequences that were not used for training: hidden spikes for one sequence of each
# pattern, in the colour of that pattern, and the output's counts for the second one. The right
# panel shows the course of the training.

fig, (raster, counts, course) = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for k, color in enumerate(COLORS):
    row = (which == k).nonzero()[0, 0]
    raster.plot(*inside[:, row].nonzero().T, ".", color=color, ms=4)
    if k == 1:
        for each in range(PATTERNS):
            counted = outside[:, row, each].cumsum(0)
            label = f"pattern {each + 1}"
            counts.step(range(STEPS), counted, where="post", color=COLORS[each], label=label)
raster.set(xlabel="step", ylabel="hidden neuron", title="Hidden spikes", xlim=(0, STEPS))
counts.set(xlabel="step", ylabel="output spikes so far", title="Output", xlim=(0, STEPS))
counts.yaxis.set_major_locator(MaxNLocator(integer=True))
counts.legend(frameon=False)
course.semilogy(1 + np.arange(len(losses)), losses, color="0.3", label="cross-entropy")
course.semilogy(
    1 + np.arange(len(rates)), rates, color="#cc79a7", label="spikes a hidden\nneuron and step"
)
course.set(xlabel="batch", ylabel="loss, and rate of spikes", title="Training", ylim=(None, 30))
course.legend(frameon=False, loc="upper right")
for axes in (raster, counts, course):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()
