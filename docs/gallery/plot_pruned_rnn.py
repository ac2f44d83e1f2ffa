"""
Prune a recurrent network
=========================

``torch.nn.utils.prune`` sets weights to zero, and PyTorch multiplies by them all the same.
:func:`sparsescan.torch.convert` makes the recurrent modules of a model skip them, forward and
backward, and training goes on with the weights that are kept.
"""

import copy
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.utils import prune

from sparsescan.torch import convert

torch.set_num_threads(1)
torch.manual_seed(0)

# %%
# Digits, four pixels at a time
# -----------------------------
# A GRU reads scikit-learn's handwritten digits, of 64 pixels, in 16 steps, and says at the end
# which digit it has read.

digits = load_digits()
pixels = torch.from_numpy(digits.data / 8 - 1).float()
pixels = pixels.reshape(-1, 16, 4).transpose(0, 1).contiguous()  # (steps, samples, pixels)
labels = torch.from_numpy(digits.target)
train, test = slice(0, 1400), slice(1400, None)


class Reader(torch.nn.Module):
    """A GRU, and a linear layer on its last state."""

    def __init__(self, hidden):
        super().__init__()
        self.gru = torch.nn.GRU(4, hidden)
        self.head = torch.nn.Linear(hidden, 10)

    def forward(self, x):
        """Return the logits of each sequence."""
        return self.head(self.gru(x)[1][0])


model = Reader(64)
print(convert(model))


def accuracy():
    """Return which part of the test digits is right."""
    with torch.no_grad():
        return (model(pixels[:, test]).argmax(1) == labels[test]).float().mean().item()


def epochs(count, rate, batch=50):
    """Train, and return the accuracy after each epoch."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    reached = []
    for _ in range(count):
        for rows in torch.randperm(train.stop).split(batch):
            loss = torch.nn.functional.cross_entropy(model(pixels[:, rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        reached.append(accuracy())
    return reached


before = epochs(6, 5e-3)

# %%
# Pruning
# -------
# The largest tenth of the recurrent weights is kept. The model stays the same object, with the same
# parameters; the mask is a buffer that PyTorch has made.

prune.l1_unstructured(model.gru, "weight_hh_l0", amount=0.9)
pruned = accuracy()
after = epochs(5, 4e-3)
print(f"accuracy {before[-1]:.1%}, {pruned:.1%} once it is pruned, {after[-1]:.1%} trained on")
assert after[-1] > max(0.7, pruned)

# %%
# The gradients are those of PyTorch, which multiplies by zeros: a copy of the pruned model, whose
# GRU is PyTorch's again, computes them.

reference = copy.deepcopy(model)
reference.gru.__class__ = torch.nn.GRU
for each in (model, reference):
    each.zero_grad()
    torch.nn.functional.cross_entropy(each(pixels[:, train]), labels[train]).backward()
for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)

# %%
# Time of a step by density
# -------------------------
# A larger GRU, of 128 units, runs forward and backward over 60 steps of 32 samples. Calls of both
# take turns, on one thread each, and the fastest of each counts.

densities = [0.02, 0.05, 0.1, 0.2, 0.5, 1]
x = torch.randn(60, 32, 2)
modules = {}
for density in densities:
    for name in ("PyTorch", "sparsescan"):
        gru = modules[name, density] = torch.nn.GRU(2, 128)
        if density < 1:
            prune.l1_unstructured(gru, "weight_hh_l0", amount=1 - density)
        if name == "sparsescan":
            convert(gru)
times = {key: [] for key in modules}
for _ in range(5):
    for key, gru in modules.items():
        start = time.perf_counter()
        gru(x)[1].sum().backward()
        times[key].append(time.perf_counter() - start)

fig, (course, mask, speed) = plt.subplots(
    1, 3, figsize=(9, 3.2), width_ratios=[1, 0.6, 1], layout="constrained"
)
done = len(before)
course.plot(1 + np.arange(done), before, "o-", color="#0072b2", label="all weights")
at = done + np.arange(len(after) + 1)
course.plot(at, [pruned, *after], "s-", color="#d55e00", label="a tenth is kept")
course.yaxis.set_major_formatter("{x:.0%}")
course.set(
    xlabel="epoch", ylabel="accuracy on test digits", ylim=(0, 1), title="Pruned, and trained on"
)
course.legend(frameon=False, loc="lower right")
mask.imshow(model.gru.weight_hh_l0_mask.numpy(), cmap="Greys", aspect="auto", interpolation="none")
mask.set(title="What is kept", xlabel="state", ylabel="gates", xticks=[], yticks=[])
for name, style in {"PyTorch": ("o-", "#0072b2"), "sparsescan": ("s-", "#d55e00")}.items():
    fastest = [1e3 * min(times[name, density]) for density in densities]
    speed.plot(densities, fastest, style[0], color=style[1], label=name)
speed.set(
    xscale="log",
    ylim=(0, None),
    xlabel="recurrent weights that are kept",
    ylabel="forward and backward, ms",
    title="Time by what is kept",
)
speed.set_xticks([0.02, 0.1, 0.5], ["2%", "10%", "50%"])
speed.minorticks_off()
speed.legend(frameon=False)
for axes in (course, speed):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()
