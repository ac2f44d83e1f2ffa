"""Newton's method, and linear solves, with factors that are kept as long as they serve."""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .factors import Matrices, Solve, Vector

# Iterations of a step, halvings of a correction, and refinements of a linear solve, at most.
MOST, _HALVINGS, _REFINED = 100, 40, 40
# Corrections may shrink by this factor from one to the next, with factors of other matrices; and
# with those of the same state, before each iteration has its own.
SLOW, OWN = 0.4, 0.1
# The error that is left is to be this share of the tolerance.
MARGIN = 0.1
# A correction of so many tolerances is not the last one, however fast corrections shrink: the first
# two say little of a rate.
FAR = 1000.0
# A rate that was measured in an earlier step is taken for so many times larger, each time.
_OLDER = 2.0
# A guess is worth an iteration if its residual is smaller than this share of the right-hand side.
_NEAR = 0.1
# Without factors of its own a linear solve takes two refinements or more, each with a product.
_CHEAP = 3.0
_EPS = float(np.finfo(np.float64).eps)


class Tolerance(NamedTuple):
    """How exact the states are: errors of ``atol + rtol |u|`` in each unknown."""

    rtol: float
    atol: float

    def allowed(self, state: Vector) -> Vector:
        """Return the tolerance of each unknown."""
        found: Vector = self.atol + self.rtol * np.abs(state)
        return found

    def sizes(self, correction: Vector, state: Vector) -> Vector:
        """Return how large a correction of each unknown is, in tolerances."""
        found: Vector = np.abs(correction) / self.allowed(state)
        return found

    def size(self, correction: Vector, state: Vector) -> float:
        """Return how large the largest one is."""
        return float(np.max(self.sizes(correction, state), initial=0.0))


def is_enough(size: float, rate: float) -> bool:
    """Return whether a correction, in tolerances, and how they shrink leave a small error."""
    if size < MARGIN:
        return True
    return size < FAR and 0 < rate < 1 and size * rate / (1 - rate) < MARGIN


class NotSolved(Exception):  # noqa: N818
    """No solution was found; `why` says so, and `equation` is one that has no value, if any."""

    def __init__(self, why: str, equation: int | None = None) -> None:
        super().__init__(why)
        self.why, self.equation = why, equation


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
    room : int
        Bytes for factors of earlier steps, which serve on the way back.

    Attributes
    ----------
    factorisations : int
        How many there were.
    """

    def __init__(self, matrices: Matrices, tolerance: Tolerance, room: int) -> None:
        self.matrices, self.factorisations = matrices, 0
        self._tolerance, self._most = tolerance, max(1, room // max(matrices.nbytes, 1))
        self.forget()

    def forget(self) -> None:
        """Drop the factors, so that what comes does not depend on what was before."""
        self._solve: Solve | None = None
        self._new_factors()
        self._past: dict[int, tuple[Vector, ...]] = {}
        # Factors by the steps that they were made in, and these steps in order.
        self._kept: dict[int, Solve] = {}
        self._made: list[int] = []
        self._step = self._of = 0

    def _new_factors(self) -> None:
        """Note that nothing is known of the factors that come."""
        self._best, self._wasted = np.inf, 0.0
        # How refinements with them shrink, for each step between them and the matrix.
        self._rate = np.inf

    def snapshot(self) -> tuple[Any, ...]:
        """Return what :meth:`restore` takes: all that later results depend on."""
        kept = dict(self._kept), list(self._made)
        return self._solve, *kept, self._step, self._of

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Go back to how it was when a snapshot was taken."""
        self._past = {}
        self._new_factors()
        self._solve, kept, made, self._step, self._of = snapshot
        self._kept, self._made = dict(kept), list(made)

    def turn_to(self, step: int) -> None:
        """Go on with another step, and with factors that were made closer to it."""
        self._step = step
        at = bisect(self._made, step)
        for made in self._made[max(at - 1, 0) : at + 1]:
            if abs(made - step) < abs(self._of - step):
                self._of, self._solve = made, self._kept[made]
                self._new_factors()

    def _factors(self, values: Vector) -> Solve:
        self.factorisations += 1
        solve = self.matrices.factorise(values)
        if solve is None:
            if np.isfinite(values).all():
                raise NotSolved("the Jacobian is singular: its factorisation has a pivot of zero")
            raise NotSolved("the Jacobian has entries that are not finite")
        return solve

    def _factorise(self, values: Vector) -> Solve:
        self._new_factors()
        self._solve = self._factors(values)
        self._of = self._step
        if self._of not in self._kept:
            insort(self._made, self._of)
        self._kept[self._of] = self._solve
        if len(self._made) > self._most:  # the farthest is dropped
            begin, end = self._made[0], self._made[-1]
            is_first = self._step - begin > end - self._step
            del self._kept[self._made.pop(0 if is_first else -1)]
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
        state, rest = guess, residual(guess)
        if not _norm(rest) < np.inf:
            wrong = np.flatnonzero(~np.isfinite(rest))
            if len(wrong):
                raise NotSolved("the equations have values that are not finite", int(wrong[0]))
        is_own, size, before, sizes_before = False, np.inf, np.inf, None
        for iteration in range(1, MOST + 1):
            is_new = self._solve is None
            if self._solve is None:
                entries = values(state)
                self._factorise(entries)
                is_own, before, sizes_before = True, np.inf, None
            assert self._solve is not None
            correction = self._solve(rest, False)
            new = state - correction
            sizes = self._tolerance.sizes(correction, new)
            size = float(sizes.max())
            # How the largest correction has shrunk: of others, which one iteration may have found,
            # none tells that.
            one = before if sizes_before is None else float(sizes_before[sizes.argmax()])
            if is_enough(size, size / one if one else np.inf):
                self._count(iteration)
                return new, iteration
            new_rest = residual(new)
            is_worse = not size <= 2 * before or not _norm(new_rest) < np.inf
            if is_own and (is_worse or (is_new and size > 1)):
                # Rounding of a large equation is not to hide a small one.
                allowed = self._tolerance.allowed(np.abs(state) + np.abs(correction))
                scale = self.matrices.row_sizes(entries, allowed)
                is_worse = is_worse or not _largest(new_rest / scale) < _largest(rest / scale)
            if is_worse:
                self._solve = None
                if not is_own:  # the factors are those of another state
                    continue
                correction, new, new_rest = _shorter(residual, scale, state, rest, correction)
                sizes = self._tolerance.sizes(correction, new)
                size = float(sizes.max())
            elif before < np.inf and size > (OWN if is_own else SLOW) * before:
                self._solve = None
            state, rest, before, sizes_before = new, new_rest, size, sizes
        raise NotSolved(
            f"after {MOST} iterations the correction is {size:.3g} times what the tolerances allow"
        )

    def solve_near(self, right: Vector, values: Callable[[], Vector]) -> Vector:
        """Return ``A⁻¹ right`` by the factors that are there, of a matrix near ``A``.

        `values` returns those of ``A``, if there are none.
        """
        solve = self._factorise(values()) if self._solve is None else self._solve
        return solve(right, False)

    def transposed(self, values: Vector, right: Vector, stage: int = 0) -> Vector:
        """Return ``A⁻ᵀ right``, for the matrix ``A`` with these values; a column for each.

        It is refined with factors of a matrix that may be another one, from where the solutions of
        the last four calls for the same stage lead. Where factors take little longer than a solve,
        each matrix has its own.
        """
        if not right.any():
            return np.zeros_like(right)
        if self.matrices.cost < _CHEAP:
            return self._factors(values)(right, True)
        adjoint = self.matrices.adjoint(values)
        past = self._past.get(stage, ())
        if self._solve is None:
            self._factorise(values)
        solution, iterations = self._refined(adjoint, right, past)
        if solution is None:
            self._factorise(values)
            solution, iterations = self._refined(adjoint, right, ())
        if solution is None:
            if np.isfinite(right).all():
                raise NotSolved("the Jacobian is singular to working precision")
            return np.full_like(right, np.nan)
        self._past[stage] = solution, *past[:3]
        self._count(iterations)
        return solution

    def _refined(
        self, adjoint: sp.csc_array, right: Vector, past: tuple[Vector, ...]
    ) -> tuple[Vector | None, int]:
        """Return a solution and how often it was refined; None if that does not converge."""
        assert self._solve is not None
        solution, rest = np.zeros_like(right), right
        if len(past) == 4 and past[0].shape == right.shape:
            guess = 4 * (past[0] + past[2]) - 6 * past[1] - past[3]
            left = right - adjoint @ guess
            if _norm(left) < _NEAR * _norm(right):
                solution, rest = guess, left
        before, wanted = np.inf, MARGIN * self._tolerance.rtol
        for iteration in range(1, _REFINED + 1):
            correction = self._solve(rest, True)
            solution = solution + correction
            size = float(np.max(np.abs(correction)))
            if not size < np.inf:
                return None, iteration
            # Each column has a scale of its own, but all converge as the slowest does.
            scale = float(np.min(np.max(np.abs(solution), axis=0)))
            distance = abs(self._step - self._of)
            if before == np.inf:
                self._rate *= _OLDER
                rate = self._rate * distance
            else:
                rate = size / before
                if distance:
                    self._rate = rate / distance
            if size <= 4 * _EPS * scale or (0 < rate < 1 and size * rate <= wanted * scale):
                return solution, iteration
            if before < np.inf and rate > SLOW:
                return (solution, iteration) if size <= wanted * scale else (None, iteration)
            before = size
            rest = right - adjoint @ solution
        return None, _REFINED


def _norm(x: Vector) -> float:
    """Return the 2-norm; infinity where squares are too large."""
    return math.sqrt(np.square(x).sum())  # threads of BLAS would wait for busy cores


def _largest(x: Vector) -> float:
    """Return the largest absolute value."""
    return float(np.abs(x).max())


def _shorter(
    residual: Callable[[Vector], Vector],
    scale: Vector,
    state: Vector,
    rest: Vector,
    correction: Vector,
) -> tuple[Vector, Vector, Vector]:
    """Return a part of a correction, the state behind it, and the residual there.

    It is smaller than that at the state, each equation in its scale.
    """
    norm = _largest(rest / scale)
    for k in range(1, _HALVINGS + 1):
        part = 0.5**k * correction
        new = state - part
        new_rest = residual(new)
        if _largest(new_rest / scale) < norm:
            return part, new, new_rest
    raise NotSolved(
        f"Newton's direction does not lower the residual, which is {norm:.3g} times what the "
        "tolerances allow: the step may be too long to have a solution, or the residual is not "
        "differentiable there, or its Jacobian is wrong"
    )
