"""Choose lengths of steps that keep an estimated error below a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .factors import Vector
from .newton import NotSolved, Solver, Tolerance
from .schemes import Place, Scheme

# The next length is this share of what the estimate allows, and at least this share of the last.
_SAFE, _LEAST = 0.9, 0.2
# The shortest step: this many spacings of floating-point numbers at its time, which a shorter step
# would hardly change; at time 0, this share of the remaining time.
_DISTANCES, _TINY = 10, 1e-30


class March(NamedTuple):
    """Steps that were taken.

    Attributes
    ----------
    times : list of float
        The times of all states.
    lengths : list of float
        The lengths of steps.
    states : list of ndarray
        The initial state, and the state after each step; only the last two if not all are kept.
    inner : list of ndarray
        The states within each step.
    newton : list of int
        Newton's iterations of each step.
    keeps_all : bool
        Whether all states, and the states within steps, are kept.
    """

    times: list[float]
    lengths: list[float]
    states: list[Vector]
    inner: list[Vector]
    newton: list[int]
    keeps_all: bool

    @classmethod
    def of(cls, t0: float, u0: Vector, keeps_all: bool) -> March:
        """Return a march without steps."""
        return cls([t0], [], [u0], [], [], keeps_all)


class End(NamedTuple):
    """The end of a march, the times it has to meet, and limits for its steps.

    Attributes
    ----------
    stops : list of float
        Ordered times at which steps must end; the last one is the end.
    error : Tolerance
        The error that a step may have.
    max_dt : float
        The greatest length of a step.
    dt : float
        The first length to try; it is negative if time runs backward.
    """

    stops: list[float]
    error: Tolerance
    max_dt: float
    dt: float


def march_until(
    scheme: Scheme,
    solver: Solver,
    params: Vector,
    end: End,
    *,
    found: March,
    watch: Callable[[int], object] | None,
    name: Callable[[str, int], str],
) -> None:
    """March to a time, with steps as long as their errors allow; record them in `found`.

    After each step, `watch` is called with the number of steps. `name` returns the name in errors
    of an equation or an unknown.

    If the error of a step is too large or not a number, or the step is not solved, a shorter step
    is tried. After Hairer, Nørsett and Wanner, "Solving Ordinary Differential Equations I", section
    II.4.
    """
    n, size, ahead = len(found.states[0]), abs(end.dt), np.sign(end.dt)
    cause: Vector | NotSolved | None = None  # this step is repeated
    for stop in end.stops:
        while (time := found.times[-1]) != stop:
            rest = abs(stop - time)
            least = max(_DISTANCES * float(np.spacing(abs(time))), _TINY * rest)
            length = min(max(min(size, end.max_dt), least), rest)
            # Leave no remainder shorter than half a step.
            if 0 < rest - length < 0.5 * length:
                length = rest / 2
            before = found.lengths[-1] if found.lengths else None
            states, inner = np.stack(found.states[-2:]), np.empty((scheme.stages, n))
            place = Place(states, params, inner, time, ahead * length, before)
            solver.turn_to(len(found.lengths))
            off = np.inf
            try:
                state, iterations = scheme.advance(solver, place)
                place = place._replace(states=np.stack([*states, state]))
                error = scheme.error(solver, place)
                if np.isfinite(state).all() and np.isfinite(error).all():
                    off = end.error.size(error, state)
                cause = error if off > 1 else None
            except NotSolved as failure:
                solver.forget()
                # Rounding errors may make very short steps unsolvable.
                if cause is None or failure.equation is not None:
                    cause = failure
            change = _SAFE * off ** (-1 / scheme.error_order) if off > 0 else np.inf
            size = length * min(max(change, _LEAST), scheme.growth)
            if off > 1:
                if length <= least:
                    assert cause is not None
                    why = _reason(scheme, place, states[-1], cause, end.error, name)
                    raise NotSolved(f"{why} (t={time:.6g}, dt={place.dt:.3g})")
                continue
            found.times.append(stop if length == rest else time + place.dt)
            found.lengths.append(place.dt)
            found.newton.append(iterations)
            found.states.append(state)
            if found.keeps_all:
                found.inner.append(inner)
            else:
                del found.states[:-2]
            if watch is not None:
                watch(len(found.lengths))


def _reason(
    scheme: Scheme,
    place: Place,
    old: Vector,
    cause: Vector | NotSolved,
    allowed: Tolerance,
    name: Callable[[str, int], str],
) -> str:
    """Return why no step is short enough."""
    new = place.states[-1]
    for time, state in ((place.time, old), (place.end, old), (place.end, new)):
        for values in (state, scheme.equations(place, state, time)):
            wrong = np.flatnonzero(~np.isfinite(values))
            if len(wrong):
                k = int(wrong[0])
                return f"{name('equation', k)} becomes {values[k]} at t={time:.6g}"
    if isinstance(cause, NotSolved):
        if cause.equation is None:
            return cause.why
        return f"{name('equation', cause.equation)} has no finite value within a step"
    rows = scheme.algebraic
    if place.before is None and len(rows):
        rest = scheme.equations(place, old, place.time)
        k = int(rows[np.argmax(np.abs(rest[rows]))])
        if rest[k]:
            return (
                f"u0 does not satisfy {name('equation', k)}, which is algebraic, since its row of "
                f"mass is zero: its rate is {rest[k]:.6g} there; expected 0"
            )
    off = np.abs(cause) / (allowed.atol + allowed.rtol * np.abs(new))
    k = int(np.argmax(off))
    return (
        f"no step is short enough for the error that is asked for: that of {name('unknown', k)} is "
        f"{off[k]:.3g} times as large"
    )
