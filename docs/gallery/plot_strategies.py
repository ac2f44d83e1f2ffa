"""
Which way to parallelise?
=========================

Several workers can share a training step in many ways: each takes some of the samples, some of the
channels, some of the layers, or they scan. :mod:`sparsescan.strategies` predicts what each takes,
layer by layer, from the arithmetic, the messages and a model of a worker. All times here are
predictions.
"""

import matplotlib.pyplot as plt

from sparsescan.strategies import Machine, compare

# %%
# One comparison
# --------------
# Sixteen V100 GPUs train VGG-16 on 256 images a step. Pipelines, for which the search takes longer,
# are left out here; without a list :func:`~sparsescan.strategies.compare` takes all strategies.

chosen = ["per layer", "integrated", "batch", "domain", "model", "scan"]
machine = Machine.load("v100")
comparison = compare("vgg16", machine, workers=16, batch=256, chosen=chosen)
print(comparison)

# %%
# Over the number of workers
# --------------------------
# A strategy that chooses for each layer cannot be worse than one with the same choice for all
# layers. The stack on the right shows where the time of a step goes with sixteen workers.

shown = {
    "per layer": ("#d55e00", "o"),
    "batch": ("#0072b2", "s"),
    "domain": ("#009e73", "^"),
    "model": ("#cc79a7", "D"),
    "scan": ("#e69f00", "P"),
}
counts = [4, 8, 16]
network = comparison.network
times = {name: [] for name in shown}
for workers in counts:
    each = comparison if workers == 16 else compare(network, machine, workers, 256, chosen)
    for one in each.predictions:
        if one.strategy in shown:
            times[one.strategy].append(one.total / 1e6)
assert all(ours <= theirs for ours, theirs in zip(times["per layer"], times["batch"], strict=True))
assert comparison.predictions[0].strategy in ("per layer", "integrated")

fig, (over, parts) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, (color, marker) in shown.items():
    over.plot(counts, times[name], marker=marker, color=color, label=name)
alone = comparison.single.total / 1e6
over.axhline(alone, color="black", ls="--", lw=1)
over.text(counts[-1], 0.95 * alone, "one worker", ha="right", va="top")
over.set(
    xscale="log",
    yscale="log",
    xlabel="workers",
    ylabel="predicted time of a step, ms",
    title="VGG-16, 256 images a step, V100",
)
over.set_xticks(counts, [str(count) for count in counts])
over.minorticks_off()
over.legend(frameon=False, fontsize="small")

by_name = {one.strategy: one for one in comparison.predictions}
groups = {
    "forward, backward, parameters": ("forward", "backward", "parameters", "Jacobians", "scan"),
    "activations and halos are sent": ("activations", "halo"),
    "weights are sent": ("weights",),
    "waiting": ("idle", "loss"),
}
bars = ["per layer", "batch", "domain"]
left = [0.0] * len(bars)
for (label, names), color in zip(
    groups.items(), ("#56b4e9", "#e69f00", "#d55e00", "#999999"), strict=True
):
    widths = [sum(by_name[bar].nanoseconds.get(name, 0) for name in names) / 1e6 for bar in bars]
    parts.barh(bars, widths, left=left, color=color, label=label)
    left = [start + width for start, width in zip(left, widths, strict=True)]
parts.invert_yaxis()
parts.set(xlabel="predicted time of a step, ms", title="Where the time goes: 16 workers")
parts.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2)
for axes in (over, parts):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()
