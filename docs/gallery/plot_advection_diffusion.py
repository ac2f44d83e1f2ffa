"""
Where does the smoke come from? An adjoint of advection and diffusion
=====================================================================

Smoke rises from unknown places, wind carries it, and a few sensors measure it over time. The
gradient of the misfit in all sources at once takes one solve back in time, the adjoint: a scan over
the transposed matrices of the time steps. The wind turns, so no two steps have the same matrix.

First the steps are explicit, a chain of sparse matrices. Then they are Crank–Nicolson steps, a
chain of solves.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp
from scipy.ndimage import gaussian_filter
from scipy.optimize import minimize
from scipy.sparse.linalg import splu

import sparsescan

# %%
# The equation
# ------------
# The concentration ``c`` in a square of side 1 follows
#
# .. math::
#
#    \partial_t c = \kappa \Delta c - u(t) \cdot \nabla c - \gamma c + q(x),
#
# with ``c = 0`` at the border, a source ``q`` that does not change, and a wind ``u(t)`` that turns
# once. Central differences make it :math:`\dot c = L(t)\, c + q`.

N = 32
h = 1 / (N + 1)
x = h * np.arange(1, N + 1)
ones = np.ones(N)
first = sp.diags_array([-ones[1:], ones[1:]], offsets=[-1, 1]) / (2 * h)
second = sp.diags_array([ones[1:], -2 * ones, ones[1:]], offsets=[-1, 0, 1]) / h**2
eye = sp.eye_array(N)
along_x, along_y = sp.kron(eye, first).tocsr(), sp.kron(first, eye).tocsr()
spread = (0.01 * (sp.kron(eye, second) + sp.kron(second, eye)) - 0.5 * sp.eye_array(N * N)).tocsr()


def wind(t):
    """Return both parts of the wind at a time from 0 to 1."""
    return 0.8 * np.cos(2 * np.pi * t), 0.8 * np.sin(2 * np.pi * t)


def operator(t):
    """Return the matrix L(t)."""
    u, v = wind(t)
    return (spread - u * along_x - v * along_y).tocsr()


# %%
# What the sensors see
# --------------------
# There are 60 sensors at random places, each of which takes 25 readings between time 0 and 1. The
# data come from a finer simulation than those below, and have noise.

rng = np.random.default_rng(0)
sensors = np.sort(rng.choice(N * N, 60, replace=False))
READINGS = 25

source = np.zeros((N, N))
source[6:10, 20:24] = 1
source[18:26, 8:11] = 0.6
source[23:26, 8:18] = 0.6
source = gaussian_filter(source, 0.7)

STEPS = 300  # of the explicit method, which has to take small ones
c, data = np.zeros(N * N), []
for step in range(4 * STEPS):
    dt = 1 / (4 * STEPS)
    c = c + dt * (operator(step * dt) @ c + source.ravel())
    if (step + 1) % (4 * STEPS // READINGS) == 0:
        data.append(c[sensors])
data = np.array(data)
data += 0.02 * data.std() * rng.standard_normal(data.shape)

# %%
# Explicit steps
# --------------
# ``c_t = A_t c_{t-1} + dt q`` with ``A_t = I + dt L(t)``. The adjoint needs the matrices
# ``A_tᵀ``, from the last step to the first, and the gradient of the misfit in each state that is
# read. The gradient in the source is the sum of the gradients in all states, times ``dt``.

dt = 1 / STEPS
explicit = [(sp.eye_array(N * N) + dt * operator(k * dt)).tocsr() for k in range(STEPS)]
transposed = [matrix.T.tocsr() for matrix in explicit[:0:-1]]  # of all steps but the first
explicit_plan = sparsescan.plan(transposed)


def misfit(states, every):
    """Return half the squared difference to the data, and its gradients in the states."""
    grads = np.zeros_like(states)
    difference = states[every - 1 :: every, sensors] - data
    grads[every - 1 :: every, sensors] = difference
    return 0.5 * np.sum(difference**2), grads


def by_explicit_steps(q):
    """Return the misfit of a source, and its gradient."""
    states = np.empty((STEPS, N * N))
    c = np.zeros(N * N)
    for k, matrix in enumerate(explicit):
        c = states[k] = matrix @ c + dt * q
    loss, local = misfit(states, STEPS // READINGS)
    grads = explicit_plan.inclusive_scan(None, transposed, local_grads=list(local[::-1]))
    return loss, dt * np.sum(grads, axis=0)


# %%
# Crank–Nicolson
# --------------
# Implicit steps may be far larger: ``M_t c_t = N_t c_{t-1} + Δ q`` with ``M_t = I - Δ L/2`` and
# ``N_t = I + Δ L/2``, in the middle of the step. Each is two steps of the chain: a
# :class:`sparsescan.SolveStep` with ``M_tᵀ``, and the matrix ``N_tᵀ``. Between them is the adjoint
# state ``λ_t``. The gradient in the source is the sum of all ``λ_t``, times ``Δ``.

FEW = 50
wide = 1 / FEW
halves = [0.5 * wide * operator((k + 0.5) * wide) for k in range(FEW)]
before = [(sp.eye_array(N * N) + half).tocsr() for half in halves]
after = [splu((sp.eye_array(N * N) - half).tocsc()) for half in halves]
chain = []
for half, matrix in zip(halves[::-1], before[::-1], strict=True):
    chain += [sparsescan.SolveStep((sp.eye_array(N * N) - half).T.tocsr()), matrix.T.tocsr()]
chain.pop()  # the gradient in the first state is not needed
solve_plan = sparsescan.plan(chain)
print(solve_plan)


def by_crank_nicolson(q):
    """Return the misfit of a source, and its gradient."""
    states = np.empty((FEW, N * N))
    c = np.zeros(N * N)
    for k in range(FEW):
        c = states[k] = after[k].solve(before[k] @ c + wide * q)
    loss, local = misfit(states, FEW // READINGS)
    local_grads = [None] * (len(chain) + 1)
    local_grads[::2] = local[::-1]
    grads = solve_plan.inclusive_scan(None, chain, local_grads=local_grads)
    return loss, wide * np.sum(grads[1::2], axis=0)


# %%
# Are the gradients right?
# ------------------------
# The misfit is quadratic, so central differences are exact up to rounding.

for function in (by_explicit_steps, by_crank_nicolson):
    q, direction = rng.random(N * N), rng.standard_normal(N * N)
    slope = function(q)[1] @ direction
    difference = (function(q + direction)[0] - function(q - direction)[0]) / 2
    print(f"{function.__name__}: {slope:.12f}, by differences {difference:.12f}")
    np.testing.assert_allclose(slope, difference, rtol=1e-9)

# %%
# The source
# ----------
# A few steps of L-BFGS find the source. Sources are not negative, and a small penalty on their
# square keeps noise out.

PENALTY = 2e-5


def recover(function):
    """Return the source by L-BFGS, and the misfit after each of its steps."""
    losses = []

    def objective(q):
        loss, grad = function(q)
        return loss + 0.5 * PENALTY * q @ q, grad + PENALTY * q

    result = minimize(
        objective,
        np.zeros(N * N),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * (N * N),
        callback=lambda q: losses.append(function(q)[0]),
        options={"maxiter": 25},
    )
    return result.x.reshape(N, N), losses


recovered, losses = {}, {}
for name, function in {
    f"{STEPS} explicit steps": by_explicit_steps,
    f"{FEW} steps of Crank–Nicolson": by_crank_nicolson,
}.items():
    recovered[name], losses[name] = recover(function)
    correlation = np.corrcoef(recovered[name].ravel(), source.ravel())[0, 1]
    print(f"{name}: correlation with the true source {correlation:.2f}")
    assert correlation > 0.8

# %%
fig, panels = plt.subplots(1, 3, figsize=(9, 2.9), layout="constrained")
images = {"The source": source} | {f"By {name}": each for name, each in recovered.items()}
for axes, (name, image) in zip(panels, images.items(), strict=True):
    shown = axes.imshow(image, origin="lower", extent=(0, 1, 0, 1), cmap="magma", vmin=0, vmax=1)
    axes.set(title=name, xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], xlabel="x")
    axes.title.set_fontsize("medium")
panels[0].plot(x[sensors % N], x[sensors // N], "o", mfc="none", mec="w", ms=4, label="sensors")
panels[0].legend(loc="upper right", fontsize="small", labelcolor="white", framealpha=0)
panels[0].set_ylabel("y")
fig.colorbar(shown, ax=panels, label="source q", shrink=0.8)
plt.show()
