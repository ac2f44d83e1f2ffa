"""
Train a GRU on long sequences, versus PyTorch
=============================================

``sparsescan.torch.GRU`` takes the place of ``torch.nn.GRU``: it has the same parameters, arguments
and results, and computes forward and backward passes in compiled loops over all steps. Here both
learn to predict the next pixel of photographs, from the same parameters and on the same batches.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_sample_images

import sparsescan.torch

# %%
# The data
# --------
# A sequence is a row of one of scikit-learn's two photographs, 640 pixels long. At each pixel the
# network reads its colour, and that of the pixel above the next one, and predicts how the next one
# differs: 639 steps, with a loss at each.

inputs, targets = [], []
for image in load_sample_images().images:
    pixels = image.astype(np.float32) / 255 - 0.5
    here, above, following = pixels[1:, :-1], pixels[:-1, 1:], pixels[1:, 1:]
    inputs.append(np.concatenate([here, above], axis=2))
    targets.append(following - here)
inputs = torch.from_numpy(np.concatenate(inputs)).transpose(0, 1).contiguous()
targets = torch.from_numpy(np.concatenate(targets)).transpose(0, 1).contiguous()
targets /= targets.std()
print(f"{inputs.shape[1]} sequences of {len(inputs)} steps, {inputs.shape[2]} numbers each")

# %%
# Training
# --------
# One function trains either network for three seconds. Nothing but the class of the recurrent
# module differs. The loss is the mean squared error, relative to that of repeating the last pixel.

SECONDS, BATCH, HIDDEN = 3.0, 16, 20
torch.set_num_threads(1)  # both are given one; PyTorch is no faster with two for steps this small


def train(kind):
    """Return the loss of each batch, and the seconds that had passed after it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    gru, head = kind(inputs.shape[2], HIDDEN), torch.nn.Linear(HIDDEN, 3)
    optimiser = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-2)

    def step():
        rows = rng.choice(inputs.shape[1], BATCH, replace=False)
        x, y = inputs[:, rows], targets[:, rows]
        loss = (head(gru(x)[0]) - y).square().mean() / y.square().mean()
        optimiser.zero_grad()
        loss.backward()
        return loss.item()

    for _ in range(8):  # loads compiled code, and prepares calls, which is not timed
        step()
    losses, seconds, start = [], [], time.perf_counter()
    while not seconds or seconds[-1] < SECONDS:
        losses.append(step())
        optimiser.step()
        seconds.append(time.perf_counter() - start)
    return np.array(losses), np.array(seconds)


runs = {"PyTorch": train(torch.nn.GRU), "sparsescan": train(sparsescan.torch.GRU)}
for name, (losses, _) in runs.items():
    print(f"{name:<11}{len(losses):>4} batches, loss {losses[0]:.3f} to {losses[-1]:.3f}")

# %%
# While both train, both have the same losses, up to rounding. Only the clock differs.

(theirs, their_seconds), (ours, our_seconds) = runs.values()
both = min(len(ours), len(theirs), 20)  # rounding grows slowly
np.testing.assert_allclose(ours[:both], theirs[:both], rtol=1e-3)
assert ours[-10:].mean() < 0.9 * ours[0]

ratio = np.median(np.diff(their_seconds)) / np.median(np.diff(our_seconds))
fig, (over_time, over_batches) = plt.subplots(
    1, 2, figsize=(9, 3.8), sharey=True, layout="constrained"
)
styles = {"PyTorch": ("#0072b2", "o-", 5), "sparsescan": ("#d55e00", ".-", 4)}
for name, (losses, seconds) in runs.items():
    color, marker, size = styles[name]
    style = {"color": color, "ms": size, "lw": 1.2, "label": name}
    over_time.plot(seconds, losses, marker, **style)
    over_batches.plot(1 + np.arange(len(losses)), losses, marker, **style)
over_time.set(
    xlabel="seconds of training",
    ylabel="squared error, relative to\nrepeating the last pixel",
    title=f"A batch takes PyTorch {ratio:.0f} times as long,",
)
over_time.set_xlim(0, None)
over_batches.set(xscale="log", xlabel="batch", title="and gives the same loss")
for axes in (over_time, over_batches):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
over_batches.legend(frameon=False, loc="lower left")
plt.show()
