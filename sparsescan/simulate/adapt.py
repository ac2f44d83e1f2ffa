"""Choose lengths of steps that keep an estimated error below a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..kernels.cpu.marching import LEAST, SAFE, Pace, length_of_step
from .compiled import Loops, Steps
from .factors import Vector
from .newton import NotSolved, Solver, Tolerance
from .schemes import Place, Scheme


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
    found: Steps,
    loops: Loops | None,
    watch: Callable[[int], object] | None,
    name: Callable[[str, int], str],
) -> None:
    """March to a time, with steps as long as their errors allow; record them in `found`.

    After some steps, or after each one without `loops`, `watch` is called with the number of steps.
    `name` returns the name in errors of an equation or an unknown.

    If the error of a step is too large or not a number, or the step is not solved, a shorter step
    is tried. After Hairer, Nørsett and Wanner, "Solving Ordinary Differential Equations I", section
    II.4.
    """
    n, size, ahead = len(found.states[0]), abs(end.dt), float(np.sign(end.dt))
    about = scheme.error_order, scheme.growth
    cause: Vector | NotSolved | None = None  # this step is repeated
    for stop in end.stops:
        while (time := found.times[-1]) != stop:
            if loops is not None and cause is None:
                pace = Pace(stop, *end.error, end.max_dt, ahead, *about, np.array([size]))
                if loops.march(found, pace):
                    size = float(pace.next[0])
                    if watch is not None:
                        watch(len(found.lengths))
                    continue
            length, least = length_of_step(time, stop, min(size, end.max_dt))
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
            change = SAFE * off ** (-1 / scheme.error_order) if off > 0 else np.inf
            size = length * min(max(change, LEAST), scheme.growth)
            if off > 1:
                if length <= least:
                    assert cause is not None
                    why = _reason(scheme, place, states[-1], cause, end.error, name)
                    raise NotSolved(f"{why} (t={time:.6g}, dt={place.dt:.3g})")
                continue
            next_time = stop if length == abs(stop - time) else time + place.dt
            found.add([next_time], [place.dt], [iterations], [state], [inner])
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
