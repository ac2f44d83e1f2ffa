"""Newton's method, and linear solves, with factors that are kept as long as they serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from .factors import Matrices, Solve, Vector

# Iterations of a step, halvings of a correction, and refinements of a linear solve, at most.
_MOST, _HALVINGS, _REFINED = 100, 12, 40
# Corrections may shrink by this factor from one to the next, with factors of other matrices; and
# with those of the same state, before each iteration has its own.
_SLOW, _OWN = 0.4, 0.1
# The error that is left is to be this share of the tolerance.
_MARGIN = 0.1


class Tolerance(NamedTuple):
    """How exact the states are: errors of ``atol + rtol |u|`` in each unknown."""

    rtol: float
    atol: float

    def size(self, correction: Vector, state: Vector) -> float:
        """Return how large a correction is, in tolerances."""
        if not correction.size:
            return 0.0
        return float(np.max(np.abs(correction) / (self.atol + self.rtol * np.abs(state))))


class NotSolved(Exception):  # noqa: N818
    """No solution was found; `why` says so."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Solver:
    """Solutions of nonlinear equations and of linear ones, whose matrices change little by little.

    Factors are of the matrix at some earlier state. They are made anew where corrections shrink too
    slowly, and once the iterations that old ones cost beyond those of new ones have taken as long
    as new factors do.

    Parameters
    ----------
    matrices : Matrices
        The matrices of all equations.
    tolerance : Tolerance
        How exact solutions are.

    Attributes
    ----------
    factorisations : int
        How many there were.
    """

    def __init__(self, matrices: Matrices, tolerance: Tolerance) -> None:
        self.matrices, self.factorisations = matrices, 0
        self._tolerance = tolerance
        self.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of the factors, and of a matrix in two forms."""
        return self.matrices.nbytes

    def forget(self) -> None:
        """Drop the factors, so that what comes does not depend on what was before."""
        self._solve: Solve | None = None
        self._rate = np.inf  # at which corrections have shrunk
        self._best, self._wasted = np.inf, 0.0

    def _factorise(self, values: Vector) -> Solve:
        self.factorisations += 1
        self._best, self._wasted, self._rate = np.inf, 0.0, np.inf
        self._solve = self.matrices.factorise(values)
        if self._solve is None:
            if np.isfinite(values).all():
                raise NotSolved("the Jacobian is singular: its factorisation has a pivot of zero")
            raise NotSolved("the Jacobian has entries that are not finite")
        return self._solve

    def _count(self, iterations: int) -> None:
        """Note how many iterations a solve has taken, and drop factors that have cost too many."""
        self._best = min(self._best, iterations)
        self._wasted += iterations - self._best
        if self._wasted > self.matrices.cost:
            self._solve = None

    def newton(
        self,
        residual: Callable[[Vector], Vector],
        values: Callable[[Vector], Vector],
        guess: Vector,
    ) -> tuple[Vector, int]:
        """Return a root, and after how many iterations.

        Parameters
        ----------
        residual, values : callable
            The equations at a state, and the values of their Jacobian there.
        guess : ndarray, shape (n,)
            Where iterations begin.
        """
        state, is_own = guess, False
        rest = residual(state)
        before = np.inf
        for iteration in range(1, _MOST + 1):
            if self._solve is None:
                self._factorise(values(state))
                is_own, before = True, np.inf
            assert self._solve is not None
            correction = self._solve(rest, False)
            new = state - correction
            size = self._tolerance.size(correction, new)
            if not size < np.inf or size > 2 * before:
                if not is_own:  # the factors are those of another state
                    self._solve = None
                    continue
                new, size = self._shorter(residual, state, rest, correction)
            if before < np.inf:
                self._rate = size / before
            rate = min(self._rate, 1.0)
            state = new
            is_known = self._rate < np.inf
            if size == 0.0 or (is_known and rate < 1 and size * rate / (1 - rate) < _MARGIN):
                self._count(iteration)
                return state, iteration
            rest = residual(state)
            if before < np.inf and rate > (_OWN if is_own else _SLOW):
                self._solve = None
            before = size
        raise NotSolved(
            f"after {_MOST} iterations the correction is {size:.3g} times what the tolerances allow"
        )

    def _shorter(
        self,
        residual: Callable[[Vector], Vector],
        state: Vector,
        rest: Vector,
        correction: Vector,
    ) -> tuple[Vector, float]:
        """Return a state in the direction of a correction, in which the residual is smaller."""
        size = np.linalg.norm(rest)
        for k in range(_HALVINGS):
            part = 0.5**k * correction
            new = state - part
            if np.linalg.norm(residual(new)) < size:
                self._solve = None
                return new, self._tolerance.size(part, new)
        raise NotSolved(
            f"Newton's direction does not lower the residual, whose norm is {size:.3g}: it is not "
            "differentiable there, or its Jacobian is wrong"
        )

    def transposed(self, values: Vector, right: Vector) -> Vector:
        """Return ``A⁻ᵀ right``, for the matrix ``A`` with these values; a column for each.

        It is refined with factors of a matrix that may be another one.
        """
        if not right.any():
            return np.zeros_like(right)
        adjoint = self.matrices.matrix(values).T
        if self._solve is None:
            self._factorise(values)
        solution, iterations = self._refined(adjoint, right)
        if solution is None:
            self._factorise(values)
            solution, iterations = self._refined(adjoint, right)
        if solution is None:
            if np.isfinite(right).all():
                raise NotSolved("the Jacobian is singular to working precision")
            return np.full_like(right, np.nan)
        self._count(iterations)
        return solution

    def _refined(self, adjoint: sp.csc_array, right: Vector) -> tuple[Vector | None, int]:
        """Return a solution and how often it was refined; None if that does not converge."""
        assert self._solve is not None
        solution = self._solve(right, True)
        before = np.inf
        for iteration in range(1, _REFINED + 1):
            correction = self._solve(right - adjoint @ solution, True)
            solution = solution + correction
            size = float(np.max(np.abs(correction)))
            if not np.isfinite(size):
                return None, iteration
            scale = float(np.max(np.abs(solution)))
            rate = size / before if before < np.inf else size / scale if scale else 0.0
            if size <= 4 * np.finfo(float).eps * scale or (
                rate < 1 and size * rate <= self._tolerance.rtol * 1e-3 * scale
            ):
                return solution, iteration
            if before < np.inf and rate > _SLOW:
                return (solution, iteration) if size <= 1e-12 * scale else (None, iteration)
            before = size
        return None, _REFINED
