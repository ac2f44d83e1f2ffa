"""
An ensemble with uncertainty
============================

Several networks with different initial parameters agree where there were data, and disagree where
there were none. So their spread says how far to trust a forecast (Lakshminarayanan et al., 2017).
``torch.func.vmap`` over stacked parameters trains all of them in one call: members share no
weights, threads share the members, and there is no loop in Python. PyTorch's own recurrent modules
have no rule for ``vmap``.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

from sparsescan.torch import GRU

# %%
# The data
# --------
# A damped pendulum is pushed, and its angle is measured with noise. Networks learn to forecast the
# angle from the push, in windows that begin at rest. All pushes of the training are weak.

STEPS, BATCH, HIDDEN, MEMBERS = 120, 8, 20, 8
rng = np.random.default_rng(0)


def pendulum(strength, batch=BATCH):
    """Return pushes and angles, of shape (T, batch, 1)."""
    turns = rng.normal(size=(STEPS, batch)).cumsum(0) / 4
    push = strength * np.sin(np.linspace(0, 12, STEPS)[:, None] + turns)
    angle, speed, angles = np.zeros(batch), np.zeros(batch), []
    for now in push:
        speed = speed + 0.2 * (now - np.sin(angle) - 0.2 * speed)
        angle = angle + 0.2 * speed
        angles.append(angle)
    pairs = push, np.array(angles) + 0.02 * rng.normal(size=(STEPS, batch))
    return tuple(torch.tensor(each[..., None], dtype=torch.float32) for each in pairs)


pushes, angles = pendulum(0.4)

# %%
# All members in one call
# -----------------------
# ``stack_module_state`` stacks the parameters of all members, and ``vmap`` maps the gradient of a
# loss over them.

torch.manual_seed(0)


class Forecast(torch.nn.Module):
    """A GRU, and a linear map of its outputs."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = GRU(1, HIDDEN), torch.nn.Linear(HIDDEN, 1)

    def forward(self, push):
        return self.head(self.gru(push)[0])


members = [Forecast() for _ in range(MEMBERS)]
params, _ = stack_module_state(members)
params = {name: each.detach() for name, each in params.items()}


def forecast(params, push):
    """Return the angles that one member forecasts."""
    return functional_call(members[0], params, (push,))


def loss(params, push, angle):
    """Return the squared error of one member."""
    return (forecast(params, push) - angle).square().mean()


slopes = vmap(grad(loss), (0, None, None))
optimiser = torch.optim.Adam(list(params.values()), lr=1e-2)
start = time.perf_counter()
for _ in range(150):
    for name, each in slopes(params, pushes, angles).items():
        params[name].grad = each
    optimiser.step()
spent = time.perf_counter() - start
errors = vmap(loss, (0, None, None))(params, pushes, angles).sqrt()
print(f"{MEMBERS} networks, 150 steps each, in {spent:.1f} s; errors up to {errors.max():.3f}")
assert errors.max() < 0.1

# %%
# The gradients equal those of each network alone, which a loop computes.

for name, each in members[0].named_parameters():
    each.data = params[name][0].clone()
loss_of_one = (members[0](pushes) - angles).square().mean()
own = torch.autograd.grad(loss_of_one, list(members[0].parameters()))
whole = slopes(params, pushes, angles)
for (name, _), one in zip(members[0].named_parameters(), own, strict=True):
    torch.testing.assert_close(whole[name][0], one, rtol=1e-3, atol=1e-6)

# %%
# Where to trust them
# -------------------
# Pushes twice as strong take the pendulum to angles that no member has seen. There the members
# disagree, most of all where they are wrong. The spread does not say how wrong they are.

runs = {"pushed as in training": pendulum(0.4, 1), "pushed twice as hard": pendulum(0.8, 1)}
fig, axes = plt.subplots(2, 1, figsize=(9, 5.2), sharex=True, layout="constrained")
spreads = []
for ax, (name, (push, angle)) in zip(axes, runs.items(), strict=True):
    each = vmap(forecast, (0, None))(params, push)[..., 0, 0]
    mean, spread = each.mean(0), each.std(0)
    spreads.append(float(spread.mean()))
    band = ax.fill_between(
        range(STEPS), mean - 2 * spread, mean + 2 * spread, color="#56b4e9", alpha=0.4
    )
    (line,) = ax.plot(mean, color="#0072b2", lw=1.6)
    (points,) = ax.plot(angle[:, 0, 0], "k.", ms=3)
    ax.set_title(f"A pendulum {name}", loc="left", fontsize=10)
    ax.set_ylabel("angle")
    ax.spines[["top", "right"]].set_visible(False)
names = ["two standard deviations of the members", "their mean", "measured"]
fig.legend(
    [band, line, points], names, frameon=False, ncols=3, fontsize=9, loc="outside upper right"
)
axes[1].set(xlabel="step", xlim=(0, STEPS - 1))
assert spreads[1] > 2 * spreads[0]
plt.show()
