"""
A small selective state space model on a CPU
============================================

A state space model keeps what it has read in states that decay. If all steps have one size, states
decay at a fixed rate. In Mamba (Gu and Dao, 2023) each input sets the size of its own step. A large
step stores the input and forgets the old state; a step of size 0 leaves the state unchanged.
``sparsescan.torch.selective_scan`` is that scan, with the arguments of mamba-ssm's
``selective_scan_fn``, for CPUs.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from sparsescan.torch import selective_scan

# %%
# The task
# --------
# Some symbols of a sequence are marked. At each step the answer is the last marked symbol, however
# long ago it came.

SYMBOLS, LENGTH, BATCH = 8, 200, 16
torch.manual_seed(0)


def sequences(batch=BATCH):
    """Return symbols, marks and answers, of shape (batch, length)."""
    symbols = torch.randint(SYMBOLS, (batch, LENGTH))
    marks = torch.rand(batch, LENGTH) < 0.03
    marks[:, 0] = True
    last = torch.where(marks, torch.arange(LENGTH), 0).cummax(1).values
    return symbols, marks, symbols.gather(1, last)


# %%
# The model
# ---------
# The model is one block of Mamba, without its convolution. In the model for comparison, step sizes
# and the matrices ``B`` and ``C`` are parameters: the same for all inputs.

CHANNELS, STATES = 32, 8


class Model(nn.Module):
    """An embedding, a selective scan with its gate, and a linear map to scores of symbols."""

    def __init__(self, selective):
        super().__init__()
        self.selective = selective
        self.symbols, self.marks = nn.Embedding(SYMBOLS, CHANNELS), nn.Embedding(2, CHANNELS)
        self.enter, self.leave = nn.Linear(CHANNELS, 2 * CHANNELS), nn.Linear(CHANNELS, SYMBOLS)
        self.rates = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(CHANNELS, 1))
        self.skip = nn.Parameter(torch.ones(CHANNELS))
        self.bias = nn.Parameter(torch.full((CHANNELS,), -3.0))
        if selective:
            self.choose = nn.Linear(CHANNELS, CHANNELS + 2 * STATES)
        else:
            self.b, self.c = (nn.Parameter(torch.randn(CHANNELS, STATES)) for _ in range(2))

    def forward(self, symbols, marks):
        x = self.symbols(symbols) + self.marks(marks.long())
        u, z = self.enter(x).mT.chunk(2, 1)
        if self.selective:
            sizes = CHANNELS, STATES, STATES
            self.delta, b, c = self.choose(x).mT.split(sizes, 1)
        else:
            self.delta, b, c = torch.zeros_like(u), self.b, self.c
        given = u, self.delta, -self.rates.exp(), b, c, self.skip, z, self.bias
        return self.leave(selective_scan(*given, delta_softplus=True).mT)


# %%
# Training
# --------

models = {"selective": Model(True), "the same for all inputs": Model(False)}
wrong = {name: [] for name in models}
start = time.perf_counter()
for name, model in models.items():
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        symbols, marks, answers = sequences()
        scores = model(symbols, marks)
        optimiser.zero_grad()
        cross_entropy(scores.flatten(0, 1), answers.flatten()).backward()
        optimiser.step()
        wrong[name].append(float((scores.argmax(-1) != answers).float().mean()))
ends = {name: float(np.mean(each[-20:])) for name, each in wrong.items()}
print(f"{time.perf_counter() - start:.1f} s; wrong in the end:", ends)
assert ends["selective"] < 0.1 < ends["the same for all inputs"]

# %%
# What it has learned
# -------------------
# Steps are large where a symbol is marked, and about 0 elsewhere.

model = models["selective"]
with torch.no_grad():
    symbols, marks, _ = sequences(1)
    model(symbols, marks)
    sizes = softplus(model.delta[0] + model.bias[:, None]).mean(0)
fig, (above, below) = plt.subplots(2, 1, figsize=(9, 5.2), layout="constrained")
for (name, each), color in zip(wrong.items(), ("#0072b2", "#e69f00"), strict=True):
    above.plot(each, color=color, lw=1.4, label=name)
above.set(xlabel="step of training", ylabel="wrong answers", xlim=(0, None), ylim=(0, 1))
above.legend(frameon=False, fontsize=9)
below.plot(sizes, color="#0072b2", lw=1.4, label="size of a step, mean over channels")
places = np.flatnonzero(marks[0])
below.plot(places, np.zeros(len(places)), "k|", ms=12, label="marked symbols")
below.set(xlabel="place in a sequence", ylabel="δ", xlim=(-1, LENGTH))
below.legend(frameon=False, fontsize=9)
for ax in (above, below):
    ax.spines[["top", "right"]].set_visible(False)
assert sizes[places].mean() > 3 * sizes.mean()
plt.show()
