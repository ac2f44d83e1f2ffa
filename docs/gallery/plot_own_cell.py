"""
Your own cell in six lines
==========================

A recurrent cell is a class that declares its parameters and computes its step in plain arithmetic.
From these follow its Jacobians and gradients, compiled loops over whole sequences, and a module of
PyTorch. Here the cell is the minimal gated unit of `Zhou et al., 2016
<https://arxiv.org/abs/1603.09420>`_, which PyTorch does not have.
"""

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch

from sparsescan.recurrent import Cell, Hidden, Input, sigmoid
from sparsescan.torch import module

# %%
# The cell
# --------
# A gate :math:`f` says for each unit how much of the state :math:`h` is replaced by a candidate
# :math:`n`:
#
# .. math:: f = \sigma(W_f x + U_f h),
#
# .. math:: n = \tanh(W_n x + U_n (f \circ h)),
#
# .. math:: h' = h + f \circ (n - h).
#
# ``Input`` and ``Hidden`` declare the matrices :math:`W` and :math:`U`, in blocks of rows, one for
# each gate; each has a bias. These are the six lines:


class MGU(Cell):
    """Minimal gated unit."""

    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n")

    def step(self, x, h):
        """Return the new state."""
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        n = np.tanh(self.weight_ih.n(x) + self.weight_hh.n(f * h))
        return h + f * (n - h)


# %%
# The step ran once, on symbols, when the class was made. A printed cell shows the result. It has
# two stages, since ``weight_hh.n`` multiplies a vector that the step itself computes. The last
# lines say which numbers the forward pass keeps for the backward pass.

cell = MGU(3, 20, dtype=np.float64, rng=0)
print(cell)

# %%
# Derivatives are computed on symbols too. Both give programs for a CPU and for CUDA, which are
# compiled when they are first called. This is the second stage of the backward pass for a CPU: each
# ``load`` takes a vector of neighbouring numbers, and ``less_or`` leaves out steps that a sequence
# does not have.

text = cell.source("cpu", "backward")
print(text[text.index("    if stage == 1") : text.index("    if stage == 0")].rstrip())

# %%
# Are the gradients right?
# ------------------------
# A loop over PyTorch's own operations, whose gradients are autograd's, is the reference. A training
# step of the cell has the same results, in float64, for 200 steps of 16 samples.


def loop(x, w_ih, w_hh, b_ih, b_hh):
    """Return the states of all steps."""
    u_f, u_n = w_hh.chunk(2)
    c_f, c_n = b_hh.chunk(2)
    h, states = x.new_zeros(x.shape[1], w_hh.shape[1]), []
    for w in x @ w_ih.T + b_ih:  # of each step, for both gates
        w_f, w_n = w.chunk(2, dim=1)
        f = torch.sigmoid(w_f + h @ u_f.T + c_f)
        n = torch.tanh(w_n + (f * h) @ u_n.T + c_n)
        h = h + f * (n - h)
        states.append(h)
    return torch.stack(states)


rng = np.random.default_rng(0)
x = rng.standard_normal((200, 16, 3))
step = cell.training_step()
output, _ = step.forward(x)
grads = step.backward(output)  # of the loss (output²).sum() / 2

params = {name: torch.tensor(each) for name, each in cell.params.items()}
theirs = loop(torch.tensor(x), *(param.requires_grad_() for param in params.values()))
(theirs.square().sum() / 2).backward()
np.testing.assert_allclose(output, theirs.detach(), rtol=1e-10, atol=1e-12)
for name, param in params.items():
    ours = grads.params[name]
    np.testing.assert_allclose(ours, param.grad, rtol=1e-9, atol=1e-9)
    difference = np.abs(ours - param.grad.numpy()).max()
    print(f"{name:<9} differs by at most {difference:.0e}")

# %%
# Training
# --------
# ``module(MGU)`` is a class of PyTorch's modules, with the arguments of ``torch.nn.GRU``. The task
# is to remember: each of three inputs is 0 but for some pulses of 1 or -1, and each of three
# outputs is the last pulse of its input, which may be many steps ago.


def flip_flops(steps, batch):
    """Return pulses, and the last one at each step."""
    pulses = rng.choice([-1, 0, 1], (steps, batch, 3), p=[0.02, 0.96, 0.02])
    pulses[0] = rng.choice([-1, 1], (batch, 3))
    last = np.where(pulses != 0, np.arange(steps)[:, None, None], 0)
    memory = np.take_along_axis(pulses, np.maximum.accumulate(last), axis=0)
    return torch.tensor(pulses).float(), torch.tensor(memory).float()


torch.set_num_threads(1)
torch.manual_seed(0)
net, head = module(MGU)(3, 20), torch.nn.Linear(20, 3)
print(net)
optimiser = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=2e-2)
losses = []
for _ in range(250):
    pulses, memory = flip_flops(steps=200, batch=16)
    loss = (head(net(pulses)[0]) - memory).square().mean()
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimiser.step()
    losses.append(loss.item())

with torch.no_grad():
    pulses, memory = flip_flops(steps=200, batch=100)
    remembered = head(net(pulses)[0])
right = (remembered.sign() == memory).float().mean().item()
print(f"loss {losses[0]:.2f} to {losses[-1]:.3f}; {right:.1%} of all signs are right")
assert right > 0.97

# %%
# Time
# ----
# Forward and backward over 1,000 steps of 16 samples, by the module, by the loop above, and by a
# ``jax.lax.scan`` over the same equations that XLA has compiled: the usual ways to run a cell that
# a framework does not have. Calls take turns, and the fastest of each counts. PyTorch and the
# module have one thread. A scan that is unrolled is no faster here.


@jax.jit
@jax.grad
def scan_grads(weights, x):
    """Return the gradients of the loop's loss, by JAX."""
    w_ih, w_hh, b_ih, b_hh = weights
    (u_f, u_n), (c_f, c_n) = w_hh.reshape(2, -1, w_hh.shape[1]), b_hh.reshape(2, -1)

    def step(h, w):
        w_f, w_n = jnp.split(w, 2, axis=1)
        f = jax.nn.sigmoid(w_f + h @ u_f.T + c_f)
        n = jnp.tanh(w_n + (f * h) @ u_n.T + c_n)
        h = h + f * (n - h)
        return h, h

    first = jnp.zeros((x.shape[1], w_hh.shape[1]), x.dtype)
    return (jax.lax.scan(step, first, x @ w_ih.T + b_ih)[1] ** 2).sum() / 2


x = flip_flops(steps=1000, batch=16)[0]
weights = list(net.parameters())
arrays = [jnp.asarray(weight.detach()) for weight in weights], jnp.asarray(x)
ways = {
    "a loop in PyTorch": lambda: loop(x, *weights).square().sum().backward(),
    "jax.lax.scan, jitted": lambda: jax.block_until_ready(scan_grads(*arrays)),
    "sparsescan": lambda: net(x)[0].square().sum().backward(),
}
seconds = {name: [] for name in ways}
for turn in range(6):
    for name, call in ways.items():
        start = time.perf_counter()
        call()
        if turn:  # the first one compiles
            seconds[name].append(time.perf_counter() - start)
milliseconds = {name: 1e3 * min(each) for name, each in seconds.items()}
assert milliseconds["sparsescan"] < milliseconds["a loop in PyTorch"] / 5

# %%
# The upper panel shows a sequence that was not used for training. Bars are the pulses of each
# input, the line is the output, and the dashed line is the last pulse, the right answer.

fig, axes = plt.subplot_mosaic(
    [["memory", "memory"], ["loss", "time"]],
    figsize=(9, 5.6),
    height_ratios=[1.4, 1],
    layout="constrained",
)
over = axes["memory"]
for k, color in enumerate(["#0072b2", "#d55e00", "#009e73"]):
    (at,) = np.nonzero(pulses[:, 0, k].numpy())
    over.vlines(at, -3 * k, pulses[at, 0, k] - 3 * k, color="0.6", lw=3)
    over.plot(memory[:, 0, k] - 3 * k, "--", color="0.3", lw=1)
    over.plot(remembered[:, 0, k] - 3 * k, color=color, lw=1.5)
over.set_yticks([0, -3, -6], ["first", "second", "third"])
over.set(xlabel="step", ylabel="input and output", xlim=(0, 200))
over.set_title(f"Last pulses, as they are remembered: {right:.1%} of signs are right")
axes["loss"].semilogy(1 + np.arange(len(losses)), losses, color="#0072b2", lw=1.2)
axes["loss"].set(xlabel="batch", ylabel="mean squared error", title="Training")
names = list(milliseconds)[::-1]
bars = axes["time"].barh(
    names, [milliseconds[name] for name in names], color=["#d55e00", "0.6", "0.6"]
)
axes["time"].bar_label(bars, fmt="{:.3g} ms", padding=4)
axes["time"].set(
    xlim=(0, 1.25 * max(milliseconds.values())),
    xlabel="milliseconds",
    title="Forward and backward, 1,000 steps",
)
for each in axes.values():
    each.spines[["top", "right"]].set_visible(False)
plt.show()
