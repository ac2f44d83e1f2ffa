"""All steps at once: Newton's method for a whole trajectory, whose iterations are scans."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..api import exclusive_scan
from ..chains.implicit import ImplicitChain
from ..ops.affine import affine_scan
from ..symbolic.implicit import ImplicitPattern
from ..symbolic.pattern import Pattern, rows_of
from .factors import Matrices, Vector
from .newton import NotSolved, Tolerance, is_enough

# Unknowns up to which Jacobians of steps are multiplied out, which takes their cube.
_MOST_DENSE = 16


class Linear(Protocol):
    """Equations of one state and the one before, for all steps as samples of a batch."""

    @property
    def matrices(self) -> Matrices:
        """The matrices of all steps along a diagonal, by which the new states enter."""

    def linearised(
        self, new: Vector, old: Vector, time: Vector, dt: Vector, params: Vector
    ) -> tuple[Vector, Vector, Vector]:
        """Return what is left of the equations, and Jacobians in the new states and the old.

        Jacobians are values in the order of patterns, step after step.
        """

    @property
    def old_pattern(self) -> Pattern:
        """The pattern of the Jacobian in the old states of all steps, along a diagonal."""


class _Recurrence:
    """Corrections of all states, ``A_t δ_t + B_t δ_{t-1} = -F_t`` with ``δ_0 = 0``, by a scan."""

    def __init__(self, new: Pattern, old: Pattern, matrices: Matrices) -> None:
        self._new, self._old, self._matrices = new, old, matrices
        self._n = new.shape[0]

    def solve(self, rest: Vector, new: Vector, old: Vector) -> Vector:
        """Return the corrections, ``(steps, n)``, given values of each step's matrices."""
        if self._n <= _MOST_DENSE:
            return self._multiplied(rest, new, old)
        # A_t δ_t follow each other: z_t = -B_t A_{t-1}⁻¹ z_{t-1} - F_t.
        pattern = ImplicitPattern([self._new, self._old], solved=[0])
        chain = ImplicitChain([new, -np.roll(old, -1, axis=0)], pattern)
        local = -rest
        local[0] = 0.0
        solve = self._matrices.factorise(new.reshape(-1))
        if solve is None:
            raise NotSolved("the Jacobian of a step is singular")
        found = np.asarray(exclusive_scan(-rest[0], chain, local_grads=local))
        return np.asarray(solve(found.reshape(-1), False)).reshape(rest.shape)

    def _multiplied(self, rest: Vector, new: Vector, old: Vector) -> Vector:
        n = self._n
        matrices, right = np.zeros((len(rest), n, n)), np.zeros((len(rest), n, n + 1))
        matrices[:, rows_of(self._new), self._new.indices] = new
        right[:, rows_of(self._old), self._old.indices] = old
        right[:, :, n] = rest
        try:
            both = -np.linalg.solve(matrices, right)
        except np.linalg.LinAlgError:
            raise NotSolved("the Jacobian of a step is singular") from None
        return np.asarray(affine_scan(np.ascontiguousarray(both[:, :, :n]), both[:, :, n]))


def solve_at_once(
    equations: Linear,
    patterns: tuple[Pattern, Pattern],
    states: Vector,
    times: NDArray[np.float64],
    dt: NDArray[np.float64],
    params: Vector,
    tolerance: Tolerance,
    most: int,
) -> int:
    """Replace a guess of all states by those that solve all steps; return the iterations.

    Parameters
    ----------
    equations : Linear
        The equations of all steps.
    patterns : tuple of Pattern
        Those of one step's Jacobians, in the new state and the old one.
    states : ndarray, shape (steps + 1, n)
        The guess, whose first state is the initial one.
    times, dt : ndarray, shape (steps + 1,) and (steps,)
        Times of states, and lengths of steps.
    """
    steps, n = len(dt), states.shape[1]
    recurrence = _Recurrence(*patterns, equations.matrices)
    before = size = np.inf
    for iteration in range(1, most + 1):
        new, old = states[1:].reshape(-1), states[:-1].reshape(-1)
        rest, *values = equations.linearised(new, old, times[:-1], dt, params)
        if not all(np.isfinite(each).all() for each in (rest, *values)):
            raise NotSolved(f"iteration {iteration} came to states whose equations are not finite")
        own = (each.reshape(steps, -1) for each in values)
        correction = recurrence.solve(rest.reshape(steps, n), *own)
        states[1:] += correction
        size = tolerance.size(correction, states[1:])
        if is_enough(size, size / before):
            return iteration
        before = size
    raise NotSolved(
        f"after {most} iterations the correction is {size:.3g} times what the tolerances allow"
    )
