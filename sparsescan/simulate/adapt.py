"""Lengths of steps that keep an estimated error below a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .factors import Vector
from .newton import NotSolved, Solver, Tolerance
from .schemes import Place, Scheme

# The next length is this share of what the estimate allows, and changes by no more than these.
_SAFE, _LEAST, _MOST = 0.9, 0.2, 5.0
# Lengths below this share of the whole time are given up.
_TINY = 1e-12


class March(NamedTuple):
    """Steps that were taken.

    Attributes
    ----------
    lengths : list of float
        Their lengths.
    states : list of ndarray
        The initial state, and that behind each step; the last two if not all are kept.
    inner : list of ndarray
        The states within each step.
    newton : list of int
        Newton's iterations of each step.
    """

    lengths: list[float]
    states: list[Vector]
    inner: list[Vector]
    newton: list[int]


def march_until(
    scheme: Scheme,
    solver: Solver,
    params: Vector,
    *,
    t0: float,
    until: float,
    dt: float,
    error: Tolerance,
    keeps_states: bool,
    found: March,
    watch: Callable[[int], object] | None,
) -> None:
    """March to a time, with steps as long as the error of each allows; note them in `found`.

    After each step `watch` is called with their number.

    A step whose error is too large is taken again, shorter; so is one that is not solved. After
    Hairer, Nørsett and Wanner, "Solving Ordinary Differential Equations I", section II.4.
    """
    time, n = t0, len(found.states[0])
    while time < until:
        length = min(dt, until - time)
        # No rest that is shorter than half a step.
        if until - time - length < 0.5 * length and length < until - time:
            length = (until - time) / 2
        before = found.lengths[-1] if found.lengths else None
        states, inner = np.stack(found.states[-2:]), np.empty((scheme.stages, n))
        place = Place(states, params, inner, time, length, before)
        solver.turn_to(len(found.lengths))
        try:
            state, iterations = scheme.advance(solver, place)
            taken = place._replace(states=np.stack([*states, state]))
            off = error.size(scheme.error(solver, taken), state)
        except NotSolved as failure:
            if length < _TINY * (until - t0):
                raise NotSolved(f"{failure.why} (t={time:.6g}, dt={length:.3g})") from None
            solver.forget()
            dt = length / 4
            continue
        change = _SAFE * off ** (-1 / scheme.error_order) if off > 0 else _MOST
        dt = length * min(max(change, _LEAST), _MOST) if np.isfinite(change) else _LEAST * length
        if not off <= 1:
            if length < _TINY * (until - t0):
                raise NotSolved(
                    f"no step is short enough for the error that is asked for (t={time:.6g}, "
                    f"dt={length:.3g})"
                )
            continue
        found.lengths.append(length)
        found.newton.append(iterations)
        found.states.append(state)
        if keeps_states:
            found.inner.append(inner)
        else:
            del found.states[:-2]
        is_last = until - time <= length * (1 + 1e-12)
        time = until if is_last else time + length
        if watch is not None:
            watch(len(found.lengths))
