"""
Which channels does an axon have? Conductances from one voltage
===============================================================

An axon is a cable of compartments. Each has a voltage, and channels that open and close with it, by
the equations of Hodgkin and Huxley. The number of channels cannot be measured, but the voltage at
one place can. The gradient of the misfit to it, through all steps of the simulation, finds the
channels.
"""

import matplotlib.pyplot as plt
import numba
import numpy as np
from scipy.optimize import minimize

from sparsescan.simulate import TimeSteps

# %%
# The equations
# -------------
# Voltages :math:`v` are in mV, times in ms, and conductances in mS/cm². Neighbours are coupled, and
# two pulses of current enter the first compartment:
#
# .. math::
#
#    \dot v_i = a (v_{i-1} - 2 v_i + v_{i+1}) + I_i(t)
#      - g_{Na} m_i^3 h_i (v_i - 50) - g_K n_i^4 (v_i + 77) - g_L (v_i + 54.3).
#
# The gates :math:`m`, :math:`h` and :math:`n` of each compartment follow
# :math:`\dot x = \alpha_x(v) (1 - x) - \beta_x(v) x`.
#
# Numba compiles the function. It also takes complex numbers, which is all that exact derivatives
# need. Powers are written as products, since a compiled power of a complex number uses its
# logarithm.

CELLS = 20


@numba.njit
def opening(gate, v):
    """Return the rates at which a gate opens and closes."""
    if gate == 0:
        return 0.1 * (v + 40) / (1 - np.exp(-(v + 40) / 10)), 4 * np.exp(-(v + 65) / 18)
    if gate == 1:
        return 0.07 * np.exp(-(v + 65) / 20), 1 / (1 + np.exp(-(v + 35) / 10))
    return 0.01 * (v + 55) / (1 - np.exp(-(v + 55) / 10)), 0.125 * np.exp(-(v + 65) / 80)


@numba.njit
def rate(u, t, p):
    """Return the change of voltages and gates: of a compartment they are neighbours in ``u``."""
    sodium, potassium, leak, coupling = p
    found = np.zeros_like(u + t * coupling)  # complex if any of them is
    for i in range(CELLS):
        v, m, h, n = u[4 * i], u[4 * i + 1], u[4 * i + 2], u[4 * i + 3]
        found[4 * i] = -sodium * m * m * m * h * (v - 50) - leak * (v + 54.3)
        found[4 * i] -= potassium * n * n * n * n * (v + 77)
        if i > 0:
            found[4 * i] += coupling * (u[4 * i - 4] - v)
        if i < CELLS - 1:
            found[4 * i] += coupling * (u[4 * i + 4] - v)
        for gate in range(3):
            x = u[4 * i + 1 + gate]
            opens, closes = opening(gate, v)
            found[4 * i + 1 + gate] = opens * (1 - x) - closes * x
    if 1 <= t.real < 2 or 12 <= t.real < 13:
        found[0] += 200
    return found


# %%
# The simulation reads the function: a compartment depends on itself, and its voltage on the
# neighbouring voltages. The Jacobian is banded, and a step costs little more than its two calls of
# the function.

sim = TimeSteps(rate)

# %%
# The data
# --------
# The voltage of one compartment over 25 ms, with noise. The axon is at rest before.

STEPS, DT, PLACE, NOISE = 500, 0.05, 4 * 14, 1.0
NAMES = ("sodium", "potassium", "leak", "coupling")
TRUTH = np.array([120.0, 36.0, 0.3, 5.0])
opens, closes = np.array([opening(gate, -65.0) for gate in range(3)]).T
u0 = np.tile([-65.0, *(opens / (opens + closes))], CELLS)

run = sim.forward(u0, tuple(TRUTH.tolist()), steps=STEPS, dt=DT, check=True)
print(run)
rng = np.random.default_rng(0)
data = run.states[:, PLACE] + NOISE * rng.standard_normal(STEPS + 1)

# %%
# The gradient
# ------------
# Parameters are the logarithms of conductances, which are positive.


def objective(logs):
    """Return the mean squared misfit, and its gradient."""
    p = np.exp(logs)
    run = sim.forward(u0, tuple(p.tolist()), steps=STEPS, dt=DT)
    apart = run.states[:, PLACE] - data
    above = np.zeros((STEPS + 1, len(u0)))
    above[:, PLACE] = apart / len(data)
    return np.mean(apart**2) / 2, np.array(run.backward(above).params) * p


first = np.log([90.0, 45.0, 0.5, 3.5])
slopes = objective(first)[1]
for k, name in enumerate(NAMES):
    step = 1e-5 * (np.arange(4) == k)
    difference = (objective(first + step)[0] - objective(first - step)[0]) / 2e-5
    print(f"{name:<9} {slopes[k]:12.6f}, by differences {difference:12.6f}")
    np.testing.assert_allclose(slopes[k], difference, rtol=1e-4, atol=1e-5)

# %%
# The conductances
# ----------------

history = [first]
result = minimize(
    objective,
    first,
    jac=True,
    method="L-BFGS-B",
    bounds=[(each - 1, each + 1) for each in first],
    options={"maxiter": 15},
    callback=lambda intermediate_result: history.append(intermediate_result.x.copy()),
)
learned = np.exp(result.x)
for name, value, true in zip(NAMES, learned, TRUTH, strict=True):
    print(f"{name:<9} {value:8.3f}, in truth {true:g}")
print(f"{result.nfev} gradients; the misfit is {np.sqrt(2 * result.fun):.2f} mV, noise {NOISE} mV")
np.testing.assert_allclose(learned, TRUTH, rtol=0.1)

# %%
# Voltages over time, at one place and everywhere, and the four conductances during the fit.

before, after = (
    sim.forward(u0, tuple(np.exp(each).tolist()), steps=STEPS, dt=DT) for each in (first, result.x)
)
fig, axes = plt.subplot_mosaic(
    [["trace", "trace"], ["cable", "way"]],
    figsize=(9, 5.6),
    height_ratios=[1.2, 1],
    layout="constrained",
)
axes["trace"].plot(after.times, data, ".", color="0.75", ms=4, label="data")
axes["trace"].plot(
    before.times, before.states[:, PLACE], "--", color="#0072b2", lw=1.2, label="first guess"
)
axes["trace"].plot(
    after.times, after.states[:, PLACE], color="#d55e00", lw=1.5, label="learned conductances"
)
axes["trace"].set(xlabel="time, ms", ylabel="voltage, mV", xlim=(0, STEPS * DT))
axes["trace"].set_title("The voltage of one compartment", fontsize="medium")
axes["trace"].legend(frameon=False, fontsize="small")
image = axes["cable"].imshow(
    after.states[:, ::4].T,
    aspect="auto",
    origin="lower",
    cmap="magma",
    extent=(0, STEPS * DT, 0.5, CELLS + 0.5),
)
axes["cable"].set(xlabel="time, ms", ylabel="compartment", yticks=[1, 10, 20])
axes["cable"].set_title("Learned: pulses run along the axon", fontsize="medium")
fig.colorbar(image, ax=axes["cable"], label="voltage, mV")
for name, ratio, color in zip(
    NAMES,
    (np.exp(history) / TRUTH).T,
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    strict=True,
):
    axes["way"].plot(ratio, color=color, lw=1.5, label=name)
axes["way"].axhline(1, color="0.6", lw=0.8, zorder=0)
axes["way"].set(xlabel="iteration of L-BFGS", ylabel="learned / true")
axes["way"].set_title("Conductances", fontsize="medium")
axes["way"].legend(frameon=False, fontsize="small", ncols=2)
for name in ("trace", "way"):
    axes[name].spines[["top", "right"]].set_visible(False)
plt.show()
