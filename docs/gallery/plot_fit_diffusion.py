"""
Where is the ground slow? A field of parameters by the adjoint of a simulation
==============================================================================

A species spreads over an island, faster over meadows than through woods. The data are a few noisy
maps of where it was. The unknowns are the speeds of spreading at 1,024 places. A run of
:class:`sparsescan.simulate.TimeSteps` has the gradient in all of them, for about the cost of
another simulation.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter
from scipy.optimize import minimize

from sparsescan.simulate import TimeSteps

# %%
# The equation
# ------------
# The density ``u`` grows up to 1, and spreads with a coefficient ``c`` that depends on the place:
#
# .. math:: \partial_t u = \nabla \cdot (c \nabla u) + r u (1 - u).
#
# Nothing crosses the border. Parameters are the logarithms of ``c``, so that it is positive.

N, R = 32, 0.3


def rate(u, t, p):
    """Return the change of the density."""
    u, c = u.reshape(N, N), np.exp(p["log c"]).reshape(N, N)
    found = R * u * (1 - u)
    down = (c[1:] + c[:-1]) / 2 * (u[1:] - u[:-1])
    right = (c[:, 1:] + c[:, :-1]) / 2 * (u[:, 1:] - u[:, :-1])
    found[:-1] += down
    found[1:] -= down
    found[:, :-1] += right
    found[:, 1:] -= right
    return found.ravel()


# %%
# The simulation reads the function: its operations, and that each place depends on itself and its
# four neighbours. All derivatives are exact. There is nothing to differentiate by hand.

sim = TimeSteps(rate)

# %%
# The maps
# --------
# The island has a lake in its middle and woods in a corner. There are twelve maps, with noise.

STEPS, DT, EVERY, NOISE = 60, 0.4, 5, 0.03
rng = np.random.default_rng(0)
y, x = np.mgrid[:N, :N] / N
lake = (x - 0.55) ** 2 + 2 * (y - 0.5) ** 2 < 0.04
woods = (x < 0.35) & (y > 0.6)
truth = gaussian_filter(np.where(lake, -2.0, np.where(woods, -1.2, 0.3)), 1.0).ravel()

u0 = np.zeros((N, N))
for place in ((4, 4), (26, 27), (10, 25)):
    u0[place] = 1.0
u0 = gaussian_filter(u0, 1.2).ravel()
u0 *= 0.8 / u0.max()

run = sim.forward(u0, {"log c": truth}, steps=STEPS, dt=DT, check=True)
print(run)
data = run.states[EVERY::EVERY] + NOISE * rng.standard_normal((STEPS // EVERY, N * N))

# %%
# The gradient
# ------------
# The objective is the misfit to the maps, and a penalty on differences of neighbours. The backward
# pass takes the misfit's derivative in each state.

PENALTY = 10.0


def objective(field):
    """Return the objective, and its gradient in the field."""
    run = sim.forward(u0, {"log c": field}, steps=STEPS, dt=DT)
    apart = (run.states[EVERY::EVERY] - data) / NOISE**2
    above = np.zeros((STEPS + 1, N * N))
    above[EVERY::EVERY] = apart
    grad = run.backward(above).params["log c"]
    loss = NOISE**2 * np.sum(apart**2) / 2
    image, rough = field.reshape(N, N), np.zeros((N, N))
    for axis in (0, 1):
        step = np.diff(image, axis=axis)
        loss += PENALTY * np.sum(step**2) / 2
        ends = [(1, 0) if k == axis else (0, 0) for k in (0, 1)]
        starts = [(0, 1) if k == axis else (0, 0) for k in (0, 1)]
        rough += np.pad(step, ends) - np.pad(step, starts)
    return loss, grad + PENALTY * rough.ravel()


field, direction = 0.1 * rng.standard_normal(N * N), rng.standard_normal(N * N)
start = time.perf_counter()
slope = objective(field)[1] @ direction
seconds = time.perf_counter() - start
ends = [objective(field + sign * 1e-4 * direction)[0] for sign in (1, -1)]
difference = (ends[0] - ends[1]) / 2e-4
print(f"slope {slope:.6f}, by differences {difference:.6f}; {seconds:.2f} s for {N * N} numbers")
np.testing.assert_allclose(slope, difference, rtol=1e-5)

# %%
# The field
# ---------
# L-BFGS starts from ground that is the same everywhere.

losses = []
result = minimize(
    objective,
    np.zeros(N * N),
    jac=True,
    method="L-BFGS-B",
    options={"maxiter": 25},
    callback=lambda intermediate_result: losses.append(intermediate_result.fun),
)
found = result.x
correlation = np.corrcoef(found, truth)[0, 1]
print(f"{result.nfev} gradients; correlation with the true field {correlation:.2f}")
assert correlation > 0.85

# %%
# Where the ground is slow, the species arrives late; the lake and the woods are where they should
# be.

fig, panels = plt.subplots(1, 4, figsize=(10, 2.9), layout="constrained")
maps = {f"A map, t = {DT * EVERY * (k + 1):g}": data[k] for k in (2, 6)}
for axes, (name, image) in zip(panels, maps.items(), strict=False):
    density = axes.imshow(image.reshape(N, N), cmap="viridis", vmin=0, vmax=1, origin="lower")
    axes.set_title(name, fontsize="medium")
fig.colorbar(density, ax=panels[:2], label="density u", shrink=0.8)
fields = {"The ground": truth, "As it is found": found}
for axes, (name, image) in zip(panels[2:], fields.items(), strict=True):
    coefficient = axes.imshow(
        np.exp(image).reshape(N, N), cmap="cividis", vmin=0, vmax=1.6, origin="lower"
    )
    axes.set_title(name, fontsize="medium")
fig.colorbar(coefficient, ax=panels[2:], label="coefficient c", shrink=0.8)
for axes in panels:
    axes.set(xticks=[], yticks=[])
plt.show()
