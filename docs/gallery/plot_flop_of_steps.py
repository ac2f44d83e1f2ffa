"""
The FLOP of every step
======================

A scan multiplies Jacobians by Jacobians, which back-propagation never does. Whether that pays is a
question of sparsity: products of Jacobians fill up, level by level. Figure 10 of `BPPSA
<https://arxiv.org/abs/1907.10134>`_ (MLSys 2020) counts it for a pruned VGG-11: the FLOP of each
step, over those that it would take if nothing were sparse. Here it is drawn for a VGG-11 four times
narrower, in three schedules.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp
import torch
from matplotlib.ticker import EngFormatter
from torch.nn.utils import prune

import sparsescan
from sparsescan.jacobians import Sequential, from_torch

# %%
# The network
# -----------
# The convolutional part of a VGG-11 for images of 32 by 32 pixels, from which pruning has taken 97%
# of the weights, the smallest of each layer. Untrained weights will do for counting.

torch.manual_seed(0)
layers, channels = [], 3
for width in (16, "pool", 32, "pool", 64, 64, "pool", 128, 128, "pool", 128, 128):
    if width == "pool":
        layers.append(torch.nn.MaxPool2d(2))
        continue
    conv = torch.nn.Conv2d(channels, width, 3, padding=1)
    prune.l1_unstructured(conv, "weight", amount=0.97)
    layers += [conv, torch.nn.ReLU()]
    channels = width
net = Sequential(from_torch(torch.nn.Sequential(*layers), (3, 32, 32)))
patterns = net.patterns  # from the last layer to the first
print(f"{len(patterns)} layers; the first Jacobian is {patterns[-1]}")

# %%
# Counting
# --------
# A :class:`sparsescan.Schedule` says which neighbours are combined, level by level: an operation
# ``(start, mid, stop)`` combines the elements from ``start`` to ``mid`` with those from ``mid`` to
# ``stop``. Element 0 is the gradient, so a product that starts there is a vector, and any other a
# matrix. SciPy multiplies the patterns.


def steps(schedule):
    """Return of each step: whether it is a matrix-vector product, FLOP, and FLOP if dense."""
    matrices = {(k, k + 1): as_csr(pattern) for k, pattern in enumerate(patterns, 1)}
    rows = []
    for level in schedule.levels:
        for start, mid, stop in level.ops.tolist():
            right = matrices[mid, stop]
            if start == 0:
                rows.append((True, 2 * right.nnz, 2 * np.prod(right.shape)))
                continue
            left = matrices[start, mid]
            multiply_adds = np.diff(left.indptr) @ np.bincount(
                right.indices, minlength=left.shape[0]
            )
            rows.append((False, 2 * multiply_adds, 2 * np.prod(right.shape) * left.shape[1]))
            if (start, stop) not in matrices:
                matrices[start, stop] = right @ left
    return np.array(rows)


def as_csr(pattern):
    """Return a matrix of ones."""
    ones = np.ones(pattern.nnz, np.float32)
    return sp.csr_array((ones, pattern.indices, pattern.indptr), shape=pattern.shape)


n = len(patterns)
schedules = {
    "back-propagation": sparsescan.Schedule.linear(n),
    "the paper's": sparsescan.Schedule.truncated(n, 2),
    "Blelloch's": sparsescan.Schedule.blelloch(n),
}
counted = {name: steps(schedule) for name, schedule in schedules.items()}

# %%
# A plan counts the same, without a matrix of values. From the third level on it may store products
# densely, which takes more FLOP and less time, so the first two are compared.

plan = sparsescan.plan(patterns, schedule="truncated:2")
by_plan = [2 * level["multiply_adds"] for level in plan.to_dict()["levels"]]
first, second = (len(level.ops) for level in plan.schedule.levels[:2])
flop = counted["the paper's"][:, 1]
assert by_plan[:2] == [flop[:first].sum(), flop[first : first + second].sum()]
print(plan)
dearest = {name: rows[:, 1].max() for name, rows in counted.items()}
assert dearest["Blelloch's"] > 100 * dearest["back-propagation"]

# %%
# Products of the first level are as cheap as the steps of back-propagation, and so are most of the
# second. Further up they have filled: the most expensive step of Blelloch's schedule takes hundreds
# of times as much as any step of back-propagation, and saves one step over the paper's schedule.

fig, panels = plt.subplots(1, 3, figsize=(10, 3.8), sharex=True, sharey=True, layout="constrained")
for axes, (name, rows) in zip(panels, counted.items(), strict=True):
    for vector, marker, color, label in (
        (1, "o", "#d55e00", "matrix-vector"),
        (0, "s", "#0072b2", "matrix-matrix"),
    ):
        _, flop, dense = rows[rows[:, 0] == vector].T
        axes.plot(dense, flop, marker, color=color, mec="w", ms=7, label=label)
    depth = schedules[name].depth
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP if nothing were sparse",
        title=f"{name}\n{len(rows)} operations in {depth} steps",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_tick_params(which="minor", length=0, labelsize=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("FLOP of a step, one image")
panels[0].legend(frameon=False, loc="upper left")
plt.show()
