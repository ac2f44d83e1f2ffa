"""
A series of half a million steps
================================

Training on one long series takes memory for every step. ``memory_limit`` bounds it: the backward
pass recomputes what does not fit, and gradients stay the same. ``truncate`` lets gradients flow at
most to the previous segment. It keeps hardly anything, and gives up dependencies further back.
"""

import gc
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from sparsescan.torch import GRU

# %%
# The series
# ----------
# Each step has three numbers. The first is noise, except at cues, where it is 1 or -1; the second
# marks the cues. The third asks for a cue, 40 steps after it.

DELAY, PERIOD, HIDDEN = 40, 100, 32
rng = np.random.default_rng(0)


def series(steps, batch=1):
    """Return inputs of shape (T, batch, 3), the steps at which it is asked, and the answers."""
    x, asked = torch.zeros(steps, batch, 3), torch.arange(DELAY, steps, PERIOD)
    cues = torch.tensor(rng.choice([-1, 1], (len(asked), batch))).float()
    x[..., 0] = torch.tensor(rng.normal(size=(steps, batch)))
    x[asked - DELAY, :, 0], x[asked - DELAY, :, 1], x[asked, :, 2] = cues, 1, 1
    return x, asked, (cues > 0).float()


class Answers(torch.nn.Module):
    """A GRU that begins with long memory, and the logits of its answers."""

    def __init__(self, **options):
        super().__init__()
        self.gru, self.head = GRU(3, HIDDEN, **options), torch.nn.Linear(HIDDEN, 1)
        with torch.no_grad():
            self.gru.bias_hh_l0[HIDDEN : 2 * HIDDEN] = 3  # gates that keep 95% of a state

    def forward(self, x, asked):
        """Return a logit for each step at which it is asked."""
        return self.head(self.gru(x)[0][asked])[..., 0]


def right(logits, answers):
    """Return the share of right answers."""
    return ((logits > 0) == (answers > 0)).float().mean().item()


def train(model, given, count):
    """Return the share of right answers in each step of training."""
    x, asked, answers = given
    optimiser, shares = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(count):
        logits = model(x, asked)
        optimiser.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, answers).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        shares.append(right(logits, answers))
    return shares


# %%
# Half a million steps
# --------------------
# A training step computes 500,000 outputs and as many gradients, which take 64 MB each. In addition
# it keeps the states and gates of all steps. With a limit it keeps the states and as many gates as
# fit. With truncated gradients it keeps only the inputs and the state before each segment.

STATUS = Path("/proc/self/status")


def memory(name):
    """Return MB that this process has, ``VmRSS``, or has had at most, ``VmHWM``."""
    (line,) = (each for each in STATUS.read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def measure(**options):
    """Return the seconds that a step of training takes, and the MB that it adds at most."""
    torch.manual_seed(0)
    model = Answers(**options)
    train(model, series(10_000), 1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = memory("VmRSS"), time.perf_counter()
    train(model, long, 1)
    return time.perf_counter() - start, memory("VmHWM") - before


long = series(500_000)
variants = {
    "truncate=1000, 60 MB": {"truncate": 1000, "memory_limit": 60_000_000},
    "memory_limit=100 MB": {"memory_limit": 100_000_000},
    "all is kept": {},
}
measured = {name: measure(**options) for name, options in variants.items()}
for name, (seconds, most) in measured.items():
    print(f"{name:22} {seconds:5.1f} s a step of training, at most {most:5.0f} MB")

# %%
# Gradients within a limit are the gradients without one.

x, asked, _ = series(50_000)
grads = []
for options in ({}, {"memory_limit": 10_000_000}):
    torch.manual_seed(0)
    net = Answers(**options)
    net(x, asked).sum().backward()
    grads.append(net.gru.weight_hh_l0.grad)
torch.testing.assert_close(*grads)

# %%
# What truncation gives up
# ------------------------
# With segments of ``k`` steps, the gradient of an answer reaches that segment and the previous one:
# ``k`` to ``2·k - 1`` steps back. Segments of 40 steps reach each cue, and learn the task like
# complete gradients. Segments of 15 steps reach no cue: 40 steps are further than 29. A model that
# trains with them learns its series by heart, which does not help with a new one. No error says
# why.

short, new = series(2_500, 8), series(20_000)
curves, shares = {}, {}
for name, truncate in (("all steps", None), ("truncate=40", 40), ("truncate=15", 15)):
    torch.manual_seed(0)
    start = time.perf_counter()
    model = Answers(truncate=truncate)
    curves[name] = train(model, short, 120)
    spent = time.perf_counter() - start
    with torch.no_grad():
        shares[name] = right(model(*new[:2]), new[2])
    print(f"{name:12} {shares[name]:4.0%} right in a new series, after {spent:.1f} s of training")
assert shares["truncate=40"] > 0.9 > 0.7 > shares["truncate=15"]

fig, (left, beside) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.barh(list(measured), [most / 1000 for _, most in measured.values()], color="#0072b2")
left.set(xlabel="GB, at most", title="Memory of 500,000 steps")
left.tick_params(axis="y", length=0)
for (name, values), color in zip(curves.items(), ("#0072b2", "#56b4e9", "#d55e00"), strict=True):
    beside.plot(values, color=color, label=name)
beside.set(xlabel="step of training", ylabel="right answers", title="Cues 40 steps before")
beside.legend(frameon=False)
for ax in (left, beside):
    ax.spines[["top", "right"]].set_visible(False)
plt.show()
