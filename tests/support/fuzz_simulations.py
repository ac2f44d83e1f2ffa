"""Random small simulations on scales from 1e-15 to 1e15, whose gradients are right or refused.

A simulation has one to three unknowns, each with a scale of its own, and rates that are sums of
terms: powers, absolute values, Michaelis and Menten's, stiff walls, jumps, branches that are
entered later. Each term has its derivatives by hand. The oracle is the adjoint of the discrete
steps with these, dense, at the states that the simulation has found. These states solve the
steps: what is left of each equation, in higher precision, asks for corrections of the states that
the tolerances allow. "No solution" of a smooth one means that shorter steps lead to none; "missed a
solution" that Newton's method has stopped where they lead to one.

``python tests/support/fuzz_simulations.py 20000`` runs so many. Simulation `i` depends on the seed
and `i` alone: ``--seed 0 --only 1234`` runs that one, and says what it is.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsescan import GradientError, NewtonError
from sparsescan.simulate import ImplicitSteps, TimeSteps

Rng = np.random.Generator

# What a gradient may be off by, beside the sum of the sizes of what it is a sum of; and what a
# relative change of a number may move a row by, beside the row.
CLOSE, HIDDEN = 1e-5, 2.0**-34
# An entry that a pattern lacks is seen if it moves its row by a larger share of its terms.
UNSEEN = 2e-5
# Errors of states, in tolerances: a tenth is asked for, as far as corrections show their own.
UNSOLVED = 10
FAULTS = "wrong", "not solved", "failed"
# States so close to a kink, in their scale, have no gradient that is expected.
KINK = 1e-5


def _linear(u: Any, p: Any, t: Any, a: float) -> Any:
    return p * u


def _linear_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return p, u, 0.0


def _drag(u: Any, p: Any, t: Any, a: float) -> Any:
    return p * abs(u) * u


def _drag_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return 2 * p * abs(u), abs(u) * u, 0.0


def _size(u: Any, p: Any, t: Any, a: float) -> Any:
    return p * np.abs(u)


def _size_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return p * float(np.sign(u)), abs(u), 0.0


def _size_of_param(u: Any, p: Any, t: Any, a: float) -> Any:
    return -abs(p) * u


def _size_of_param_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return -abs(p), -float(np.sign(p)) * u, 0.0


def _real(u: Any, p: Any, t: Any, a: float) -> Any:
    return p * np.real(u)


def _cube(u: Any, p: Any, t: Any, a: float) -> Any:
    return p * (u / a) ** 3


def _cube_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return 3 * p * (u / a) ** 2 / a, (u / a) ** 3, 0.0


def _enzyme(u: Any, p: Any, t: Any, a: float) -> Any:
    return p * u * u / (a * a + u * u)


def _enzyme_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    x = u / a
    return p * 2 * x / a / (1 + x * x) ** 2, x * x / (1 + x * x), 0.0


def _saturation(u: Any, p: Any, t: Any, a: float) -> Any:
    return u * p / (p + a)


def _saturation_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return p / (p + a), u * a / (p + a) ** 2, 0.0


def _wall(u: Any, p: Any, t: Any, a: float) -> Any:
    return -p * np.maximum(u - a, 0)


def _wall_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return (-p, a - u, 0.0) if u > a else (0.0, 0.0, 0.0)


def _late_drag(u: Any, p: Any, t: Any, a: float) -> Any:
    return np.where(u > a, -p * np.abs(u - a) * (u - a), 0 * u)


def _late_drag_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return (-2 * p * (u - a), -((u - a) ** 2), 0.0) if u > a else (0.0, 0.0, 0.0)


def _late(u: Any, p: Any, t: Any, a: float) -> Any:
    return -p * abs(u) if t > a else -p * u


def _late_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return (-p * float(np.sign(u)), -abs(u), 0.0) if t > a else (-p, -u, 0.0)


def _switch(u: Any, p: Any, t: Any, a: float) -> Any:
    return np.where(t > a, p, -p) + 0 * u


def _switch_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return 0.0, 1.0 if t > a else -1.0, 0.0


def _wave(u: Any, p: Any, t: Any, a: float) -> Any:
    return p * np.sin(3 * t) + 0 * u


def _wave_slopes(u: float, p: float, t: float, a: float) -> tuple[float, float, float]:
    return 0.0, float(np.sin(3 * t)), 3 * p * float(np.cos(3 * t))


@dataclass(frozen=True)
class Kind:
    """A term ``φ(u, p, t, a)``, its derivatives in ``u``, ``p`` and ``t``, and what `a` is.

    `a` is a scale of ``u``, a place of a kink in ``u`` or in ``t``, or a scale of ``p``; `power` is
    that of ``u`` in the term, for a parameter of the right scale.
    """

    value: Callable[..., Any]
    slopes: Callable[..., tuple[float, float, float]]
    a: str = "scale"
    power: int = 1
    is_smooth: bool = True
    kinks: tuple[str, ...] = ()


KINDS = (
    Kind(_linear, _linear_slopes),
    Kind(_cube, _cube_slopes, power=0),
    Kind(_enzyme, _enzyme_slopes, power=0),
    Kind(_saturation, _saturation_slopes, "param"),
    Kind(_wave, _wave_slopes, power=0),
    Kind(_drag, _drag_slopes, power=2, is_smooth=False),
    Kind(_size, _size_slopes, is_smooth=False, kinks=("0",)),
    Kind(_size_of_param, _size_of_param_slopes, is_smooth=False),
    Kind(_real, _linear_slopes, is_smooth=False),
    Kind(_wall, _wall_slopes, "place", is_smooth=False, kinks=("a",)),
    Kind(_late_drag, _late_drag_slopes, "place", power=2, is_smooth=False, kinks=("a",)),
    Kind(_late, _late_slopes, "time", is_smooth=False, kinks=("0",)),
    Kind(_switch, _switch_slopes, "time", power=0, is_smooth=False, kinks=("t",)),
)
SMOOTH = [kind for kind in KINDS if kind.is_smooth]


@dataclass(frozen=True)
class Term:
    kind: Kind
    row: int
    column: int
    param: int
    a: float


@dataclass
class System:
    """Rates as sums of terms, for NumPy; and the same by hand.

    Attributes
    ----------
    size : ndarray
        The scale of each unknown.
    is_smooth : bool
        Whether all terms have derivatives everywhere, and complex steps.
    lost : tuple of int or None
        A row and a column that the pattern lacks.
    """

    rng: Rng
    terms: list[Term] = field(default_factory=list)
    lost: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        rng = self.rng
        self.n = n = int(rng.integers(1, 4))
        spread = rng.choice([0.0, 3.0, 15.0], p=[0.4, 0.3, 0.3])
        self.scale = np.clip(
            10.0 ** (rng.uniform(-15, 15) + spread * rng.uniform(-1, 1, n)), 1e-15, 1e15
        )
        self.is_smooth = bool(rng.random() < 0.4)
        self.steps, self.dt = int(rng.integers(2, 9)), float(rng.uniform(0.02, 0.1))
        params: list[float] = []
        for row in range(n):
            for _ in range(int(rng.integers(1, 4))):
                kind: Any = rng.choice(SMOOTH if self.is_smooth else KINDS)  # type: ignore[arg-type]
                column = row if rng.random() < 0.6 else int(rng.integers(n))
                s = self.scale[column]
                strength = 10.0 ** rng.uniform(-2, 1) * rng.choice([-1, 1], p=[0.8, 0.2])
                param = strength * self.scale[row] / s**kind.power
                a = s * rng.uniform(0.3, 2.0)
                if kind.a == "param":
                    param = a = 10.0 ** rng.uniform(-15, 15)
                    a *= 10.0 ** rng.uniform(-1, 1)
                elif kind.a == "place":
                    param = abs(param) * 10.0 ** rng.uniform(0, 3)
                elif kind.a == "time":
                    a = self.steps * self.dt * rng.uniform(0, 1)
                self.terms.append(Term(kind, row, column, len(params), a))
                params.append(param)
        self.params = np.array(params)
        self.u0 = self.scale * rng.choice([-1, 1], n) * rng.uniform(0.1, 2.0, n)
        if rng.random() < 0.1:
            self.u0[rng.integers(n)] = 0
        self.pattern = np.eye(n)
        for term in self.terms:
            self.pattern[term.row, term.column] = 1
        others = [term for term in self.terms if term.row != term.column]
        if others and rng.random() < 0.1:
            term = others[int(rng.integers(len(others)))]
            self.lost = term.row, term.column
            self.pattern[self.lost] = 0

    def __call__(self, u: Any, t: Any, p: Any) -> Any:
        rows: list[Any] = [0 * u[row] for row in range(self.n)]
        for term in self.terms:
            moved = term.kind.value(u[term.column], p[term.param], t, term.a)
            rows[term.row] = rows[term.row] + moved
        return np.stack(rows)

    def by_hand(self, u: Any, t: float) -> tuple[Any, ...]:
        """Return the rate, its derivatives in ``u``, ``p`` and ``t``, and the size of terms."""
        n = self.n
        rate, size, in_t = np.zeros(n), np.zeros(n), np.zeros(n)
        in_u, in_p = np.zeros((n, n)), np.zeros((n, len(self.params)))
        for term in self.terms:
            own = float(u[term.column]), float(self.params[term.param]), t, term.a
            value = float(term.kind.value(*own))
            slopes = term.kind.slopes(*own)
            rate[term.row] += value
            size[term.row] += abs(value)
            in_u[term.row, term.column] += slopes[0]
            in_p[term.row, term.param] += slopes[1]
            in_t[term.row] += slopes[2]
        return rate, in_u, in_p, in_t, size

    def is_at_kink(self, u: Any, t: float) -> bool:
        """Return whether a state is so close to a kink or jump that either side is right."""
        for term in self.terms:
            x, s = u[term.column], self.scale[term.column]
            for kink in term.kind.kinks:
                distance = {"0": x / s, "a": (x - term.a) / s, "t": t - term.a}[kink]
                if abs(distance) < KINK:
                    return True
            if term.kind.a == "time" and abs(t - term.a) < KINK:
                return True
        return False


def inverted(matrix: Any, scale: Any) -> Any:
    """Return an inverse, whose pivots are chosen in the scale of each unknown."""
    return scale[:, None] * np.linalg.inv(matrix / scale[:, None] * scale) / scale


def oracle(system: System, states: Any, theta: float, weights: Any) -> tuple[Any, ...]:
    """Return gradients of ``weights · states[-1]``, and what each may be off by.

    Steps are ``u_new - u = Δ ((1 - θ) f(u) + θ f(u_new))``. An entry that a pattern lacks is seen
    if it moves its row by more than a share of `CLOSE`.
    """
    dt, steps = system.dt, len(states) - 1
    at = [system.by_hand(state, k * dt) for k, state in enumerate(states)]
    eye, s = np.eye(system.n), system.scale
    above, sizes = weights.copy(), np.abs(weights)
    params, in_dt = np.zeros(len(system.params)), 0.0
    off_params, off_dt = np.zeros(len(system.params)), 0.0
    hidden = np.zeros(system.n)
    for k in reversed(range(steps)):
        old, new = at[k], at[k + 1]
        inverse = inverted(eye - theta * dt * new[1], s)
        found = inverse.T @ above
        reach = np.abs(inverse).T @ sizes
        mixed = [(1 - theta) * a + theta * b for a, b in zip(old, new, strict=True)]
        params += dt * mixed[2].T @ found
        off_params += dt * ((1 - theta) * np.abs(old[2]) + theta * np.abs(new[2])).T @ reach
        in_time = (1 - theta) * k * old[3] + theta * (k + 1) * new[3]
        in_dt += found @ mixed[0] + dt * found @ in_time
        late = (1 - theta) * k * np.abs(old[3]) + theta * (k + 1) * np.abs(new[3])
        off_dt += reach @ mixed[4] + dt * reach @ late
        row = dt * (reach @ mixed[4])
        hidden = hidden + row / np.minimum(s, np.maximum(np.abs(states[k]), 1e-3 * s))
        above = found + dt * (1 - theta) * old[1].T @ found
        sizes = reach + dt * (1 - theta) * np.abs(old[1]).T @ reach
    # Where a change of a number says nothing beside the rounding of the rates, nor does a gradient.
    rows = hidden @ s
    off_params = CLOSE * off_params + 1e-13 * rows / np.abs(system.params)
    unseen = HIDDEN if system.lost is None else CLOSE
    bounds = CLOSE * sizes + unseen * hidden, off_params, CLOSE * off_dt
    return (above, params, in_dt), bounds


def share_of_lost(system: System, states: Any) -> float:
    """Return how much an entry that the pattern lacks moves its row, beside the terms of that."""
    assert system.lost is not None
    row, column = system.lost
    shares = [0.0]
    for k, state in enumerate(states):
        _, in_u, _, _, size = system.by_hand(state, k * system.dt)
        shares.append(abs(in_u[row, column] * state[column]) / max(size[row], 1e-300))
    return max(shares)


def is_solved(system: System, states: Any, theta: float, tolerance: tuple[float, float]) -> bool:
    """Return whether states solve their steps, up to the tolerances and to rounding."""
    rtol, atol = tolerance
    dt, exact, rounding = system.dt, np.longdouble, 64 * float(np.finfo(float).eps)
    params, s = system.params.astype(exact), system.scale
    for k, (old, new) in enumerate(itertools.pairwise(states)):
        ends = [system(u.astype(exact), t * dt, params) for u, t in ((old, k), (new, k + 1))]
        rest = new.astype(exact) - old - exact(dt) * ((1 - theta) * ends[0] + theta * ends[1])
        sizes = [system.by_hand(u, t * dt)[4] for u, t in ((old, k), (new, k + 1))]
        rounded = np.abs(new) + np.abs(old) + dt * ((1 - theta) * sizes[0] + theta * sizes[1])
        inverse = inverted(np.eye(system.n) - theta * dt * system.by_hand(new, (k + 1) * dt)[1], s)
        allowed = UNSOLVED * (rtol * np.abs(new) + atol) + rounding * np.abs(inverse) @ rounded
        if np.any(~(np.abs(inverse @ rest.astype(float)) <= allowed)):
            return False
    return True


def has_solution(system: System, old: Any, k: int, theta: float) -> bool:
    """Return whether a step has a solution that shorter ones lead to, without a fold between."""
    dt, scale, eye = system.dt, system.scale, np.eye(system.n)
    before, state, done, more = system.by_hand(old, k * dt)[0], old, 0.0, 1 / 32
    while done < 1:
        more = min(more, 1 - done)
        if more < 1e-7:
            return False
        length, new, is_found = (done + more) * dt, state, False
        for iteration in range(12):
            rate, in_u, *_ = system.by_hand(new, (k + 1) * dt)
            matrix = eye - length * theta * in_u
            rest = new - old - length * ((1 - theta) * before + theta * rate)
            correction = np.linalg.solve(matrix, rest)
            new, size = new - correction, np.abs(correction)
            if not (size <= 0.2 * np.abs(new) + 0.05 * scale).all() and not iteration:
                break
            is_found = bool((size <= 1e-11 * np.abs(new) + 1e-13 * scale).all())
            if is_found:
                break
        if is_found and np.linalg.det(matrix) > 0:
            state, done, more = new, done + more, 1.5 * more
        else:
            more /= 3
    return True


METHODS = {"backward_euler": 1.0, "crank_nicolson": 0.5, "euler": 0.0, "residual": 1.0}


def simulate(seed: int, index: int, says: Callable[[str], None] | None = None) -> str:
    """Run a simulation; return what came of it: "right", a fault, or why it was not compared."""
    rng = np.random.default_rng([seed, index])
    system = System(rng)
    method = str(rng.choice(list(METHODS)))
    how: Any = rng.choice([None, "forward", "complex"], p=[0.7, 0.15, 0.15])
    weights = rng.choice([-1, 1], system.n) / system.scale
    if method == "residual":

        def residual(u: Any, u_old: Any, t: Any, dt: Any, p: Any) -> Any:
            return u - u_old - dt * system(u, t, p)

        sim: Any = ImplicitSteps(residual, system.pattern, np.eye(system.n), derivatives=how)
    else:
        sim = TimeSteps(system, system.pattern, method, derivatives=how)
    kind = "smooth" if system.is_smooth else f"not smooth, derivatives={how!r}"
    if system.lost is not None:
        kind = "pattern lacks an entry"
    if says is not None:
        terms = [(t.kind.value.__name__, t.row, t.column, t.a) for t in system.terms]
        says(f"{method}, {kind}, without {system.lost}, {system.steps} steps of {system.dt}")
        says(f"u0={system.u0}, params={system.params}, scale={system.scale}, {terms}")
    about = {"steps": system.steps, "dt": system.dt}
    try:
        tolerance = 1e-12, 1e-13 * float(system.scale.min())
        rtol, atol = tolerance
        run = sim.forward(system.u0, system.params, rtol=rtol, atol=atol, **about)
        if not np.isfinite(run.states).all() or (np.abs(run.states) > 1e6 * system.scale).any():
            return "grows"
        grads = run.backward(grad_last=weights)
    except NewtonError as error:
        if says is not None:
            says(str(error))
        run = error.run  # type: ignore[attr-defined]
        if system.is_smooth and has_solution(system, run.states[-1], run.steps, METHODS[method]):
            return "missed a solution"
        return f"{kind}: no solution"
    except GradientError as error:
        if says is not None:
            says(str(error))
        return f"{kind}: refused"
    states = run.states
    if any(system.is_at_kink(state, k * system.dt) for k, state in enumerate(states)):
        return "at a kink"
    if not is_solved(system, states, METHODS[method], tolerance):
        return "not solved"
    if system.lost is not None and share_of_lost(system, states) < UNSEEN:
        return "pattern lacks an entry that is not seen"
    expected, bounds = oracle(system, states, METHODS[method], weights)
    result = "right"
    found = grads.u0, grads.params, grads.dt
    names = "u0", "params", "dt"
    for name, own, other, bound in zip(names, found, expected, bounds, strict=True):
        if np.any(~(np.abs(np.asarray(own) - other) <= bound)):
            result = "wrong"
            if says is not None:
                says(f"{name}: {own} for {other}, up to {bound}")
    if says is not None:
        says(f"{states[-1]}")
    return result if result == "wrong" else f"{kind}: {result}"


def run(seed: int, indices: Any, until: float = np.inf) -> collections.Counter[str]:
    """Run simulations; return how often what came of them."""
    counts: collections.Counter[str] = collections.Counter()
    for index in indices:
        if time.monotonic() > until:
            break
        try:
            found = simulate(seed, index)
        except Exception:
            traceback.print_exc()
            found = "failed"
        if found in (*FAULTS, "smooth: refused", "missed a solution"):
            print(f"{found}: --seed {seed} --only {index}", flush=True)
        counts[found] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    np.seterr(all="ignore")
    if given.only is not None:
        print(simulate(given.seed, given.only, print))
        return 0
    start = time.monotonic()
    counts = run(given.seed, range(given.number))
    print(f"{given.number:,} simulations in {time.monotonic() - start:.0f} s")
    for name, count in counts.most_common():
        print(f"{count:8,} {name}")
    return 1 if any(counts[each] for each in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
