"""A cable of Hodgkin and Huxley: ours, and Jaxley's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numba
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from sparsescan.simulate import ImplicitSteps, TimeSteps

from . import peers
from .timing import Call

Array = NDArray[Any]


def march(
    sim: TimeSteps | ImplicitSteps,
    u0: Array,
    params: Any,
    above: Array,
    dt: float,
    steps: int,
    limit: int | None = None,
) -> tuple[Any, Any, tuple[float, float]]:
    """Return the last state, all gradients, and the seconds of both passes."""
    start = time.perf_counter()
    run = sim.forward(u0, params, steps=steps, dt=dt, memory_limit=limit)
    middle = time.perf_counter()
    grads = run.backward(grad_last=above)
    return run.last, grads, (middle - start, time.perf_counter() - middle)


# Of Hodgkin and Huxley, in mV, ms and S/cm²; the leak of the first compartments drives it.
_SODIUM, _POTASSIUM, _LEAK, _DRIVEN = 50.0, -77.0, -54.3, 35.0
_CONDUCTANCES = {"gNa": 0.12, "gK": 0.036, "gLeak": 0.0003}
_COUPLING, _CABLE_DT = 10.0, 0.025


@numba.njit
def _vtrap(x: Any, y: Any) -> Any:
    return x / (np.exp(x / y) - 1)


@numba.njit
def _gate(k: Any, x: Any, v: Any, dt: Any) -> Any:
    """Return a gate after a step at a voltage that does not change."""
    if k == 0:
        a, b = 0.1 * _vtrap(-(v + 40), 10), 4 * np.exp(-(v + 65) / 18)
    elif k == 1:
        a, b = 0.07 * np.exp(-(v + 65) / 20), 1 / (np.exp(-(v + 35) / 10) + 1)
    else:
        a, b = 0.01 * _vtrap(-(v + 55), 10), 0.125 * np.exp(-(v + 65) / 80)
    steady = a / (a + b)
    return steady + (x - steady) * np.exp(-dt * (a + b))


@dataclass(frozen=True)
class Cable:
    """A cable in compartments: of each the voltage and three gates are neighbours in the state.

    Gates take exponential steps at the last voltages, and voltages implicit ones, as in Jaxley.
    """

    compartments: int

    @property
    def leaks(self) -> Array:
        return np.where(np.arange(self.compartments) < 10, _DRIVEN, _LEAK)

    @property
    def above(self) -> Array:
        """The derivative of the loss in the last state, which reads voltages."""
        found = np.zeros((self.compartments, 4))
        found[:, 0] = np.random.default_rng(1).standard_normal(self.compartments)
        return found.ravel()

    @property
    def u0(self) -> Array:
        rest = [-65.0, *(float(_gate(k, 0.0, -65.0, 1e6)) for k in range(3))]
        return np.tile(rest, self.compartments)

    @cached_property
    def sim(self) -> ImplicitSteps:
        """The simulation, with functions that Numba compiles, and gates that are computed once."""
        size, leaks, coupling = self.compartments, self.leaks, _COUPLING

        @numba.njit
        def gates(u_old: Any, dt: Any) -> Any:
            found = np.zeros((size, 3)) + 0 * dt  # as complex as the length of a step
            for i in range(size):
                for k in range(3):
                    found[i, k] = _gate(k, u_old[4 * i + 1 + k], u_old[4 * i], dt)
            return found

        kept: list[Any] = [None, None, None]

        def stepped(u_old: Array, dt: Any) -> Array:
            """Return the gates behind a step, which do not depend on its end."""
            if dt != kept[1] or not np.array_equal(u_old, kept[0]):
                kept[:] = u_old.copy(), dt, gates(u_old, dt)
            found: Array = kept[2]
            return found

        @numba.njit
        def balance(u: Any, u_old: Any, dt: Any, p: Any, gates: Any) -> Any:
            found = u - u_old + 0 * dt * p[0]  # as complex as any of them
            for i in range(size):
                v, m, h, n = u[4 * i], gates[i, 0], gates[i, 1], gates[i, 2]
                current = p[0] * m * m * m * h * (v - _SODIUM) + p[2] * (v - leaks[i])
                current += p[1] * n * n * n * n * (v - _POTASSIUM)
                found[4 * i] += dt * 1000 * current
                if i + 1 < size:
                    flow = dt * coupling * (u[4 * i + 4] - v)
                    found[4 * i] -= flow
                    found[4 * i + 4] += flow
                for k in range(3):
                    found[4 * i + 1 + k] = u[4 * i + 1 + k] - gates[i, k]
            return found

        @numba.njit
        def in_new(dt: Any, p: Any, gates: Any) -> Any:
            found = np.ones((size, 6))
            for i in range(size):
                m, h, n = gates[i, 0], gates[i, 1], gates[i, 2]
                beside = (i > 0) + (i < size - 1)
                own = p[0] * m * m * m * h + p[1] * n * n * n * n + p[2]
                found[i, 0] = found[i, 2] = -dt * coupling
                found[i, 1] = 1 + dt * (beside * coupling + 1000 * own)
            return np.concatenate((found.ravel()[1:-4], found[-1, 3:]))

        @numba.njit
        def in_old(u: Any, u_old: Any, dt: Any, p: Any, gates: Any) -> Any:
            found = np.empty((size, 10))
            for i in range(size):
                v, m, h, n = u[4 * i], gates[i, 0], gates[i, 1], gates[i, 2]
                sodium, potassium = p[0] * m * m * (v - _SODIUM), p[1] * n * n * n
                slopes = 3 * h * sodium, m * sodium, 4 * potassium * (v - _POTASSIUM)
                found[i, 0] = -1
                for k in range(3):
                    old = u_old[4 * i]
                    in_v = _gate(k, u_old[4 * i + 1 + k], old + 1e-100j, dt).imag / 1e-100
                    in_x = _gate(k, 1.0, old, dt) - _gate(k, 0.0, old, dt)
                    found[i, 0] += 1000 * dt * slopes[k] * in_v
                    found[i, 1 + k] = 1000 * dt * slopes[k] * in_x
                    found[i, 4 + 2 * k], found[i, 5 + 2 * k] = -in_v, -in_x
            return found.ravel()

        def residual(u: Array, u_old: Array, t: Any, dt: Any, p: Array) -> Any:
            return balance(u, u_old, dt, p, stepped(u_old, dt))

        def jacobian(u: Array, u_old: Array, t: Any, dt: Any, p: Array) -> Any:
            return in_new(dt, p, stepped(u_old, dt))

        def jacobian_old(u: Array, u_old: Array, t: Any, dt: Any, p: Array) -> Any:
            return in_old(u, u_old, dt, p, stepped(u_old, dt))

        def vjp(above: Array, u: Array, u_old: Array, t: Any, dt: float, p: Array) -> Array:
            v, m, h, n = u.reshape(-1, 4).T
            sodium, potassium = m**3 * h * (v - _SODIUM), n**4 * (v - _POTASSIUM)
            return 1000 * dt * np.array([sodium, potassium, v - leaks]) @ above[::4]

        first = 4 * np.arange(size)
        beside = [[at, at + by] for at in first for by in (-4, 0, 4)]
        own = [[at + k, at + k] for at in first for k in (1, 2, 3)]
        old = [[at, at + k] for at in first for k in range(4)]
        old += [[at + k, at + by] for at in first for k in (1, 2, 3) for by in (0, k)]
        pattern, before = (self._pattern(each) for each in (beside + own, old))
        return ImplicitSteps(
            *(residual, pattern, before),
            jacobian=jacobian,
            jacobian_old=jacobian_old,
            vjp=vjp,
            derivatives="complex",  # in lengths of steps; the residual keeps what it computes
        )

    def ours(self, steps: int) -> dict[str, Call]:
        """Return a call with derivatives by functions."""
        about = self.sim, self.u0, np.array([*_CONDUCTANCES.values()]), self.above, _CABLE_DT

        def call() -> dict[str, Any]:
            last, grads, seconds = march(*about, steps)
            own = dict(zip(_CONDUCTANCES, grads.params, strict=True))
            return {"last": last[::4], **own, "seconds": seconds}

        march(*about, 1)  # compiles
        return {"functions": call}

    def _pattern(self, entries: list[list[int]]) -> sp.csr_array:
        n = 4 * self.compartments
        rows, columns = np.array([each for each in entries if 0 <= each[1] < n]).T
        return sp.csr_array((np.ones(len(rows)), (rows, columns)), shape=(n, n))

    def jaxley(self, steps: int) -> dict[str, Call]:
        """Return a call of Jaxley, which keeps some states and computes the others again."""
        peers.load_jax()
        jaxley = peers.require("jaxley", "pip install jaxley")
        channels = peers.require("jaxley.channels", "pip install jaxley")
        with peers.in_float64() as jax:
            cable = jaxley.Branch(jaxley.Compartment(), ncomp=self.compartments)
            cable.insert(channels.HH())
            rest = dict(zip(("v", "HH_m", "HH_h", "HH_n"), self.u0, strict=False))
            for name, value in (rest | {"HH_eLeak": self.leaks}).items():
                cable.set(name, value)
            cable.record("v", verbose=False)
            for name in _CONDUCTANCES:
                cable.make_trainable(f"HH_{name}", verbose=False)
            above = self.above[::4]

            # All states of thousands of steps do not fit into 24 GB.
            parts = next(k for k in range(int(steps**0.5), 0, -1) if steps % k == 0)

            def loss(params: Any) -> Any:
                states = jaxley.integrate(
                    cable,
                    params,
                    t_max=(steps - 0.5) * _CABLE_DT,
                    delta_t=_CABLE_DT,
                    checkpoint_lengths=[parts, steps // parts],
                )
                return above @ states[:, steps], states[:, steps]

            params = cable.get_parameters()
            program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params).compile()

            def call() -> dict[str, Any]:
                with peers.in_float64():
                    (_, last), found = jax.block_until_ready(program(params))
                each = {name[3:]: grad for one in found for name, grad in one.items()}
                return {"last": last, **each}

            return {"states kept at two levels": call}
