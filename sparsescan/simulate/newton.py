"""Newton's method and linear solves, which reuse factors as long as they are good enough."""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .factors import Matrices, Solve, Vector

# The most iterations of a step, halvings of a correction, and refinements of a linear solve.
MOST, _HALVINGS, _REFINED = 100, 40, 40
# Factors are renewed if a correction is more than SLOW times the one before; or more than OWN
# times, if they were made in this solve.
SLOW, OWN = 0.4, 0.1
# The remaining error must be below this share of the tolerance.
MARGIN = 0.1
# A correction of this many tolerances is never the last, however fast corrections shrink: the first
# two corrections say little about the rate.
FAR = 1000.0
# For each step since it was measured, a rate counts as this many times larger.
_OLDER = 2.0
# A guess saves an iteration if its residual is below this share of the right-hand side.
_NEAR = 0.1
# With another matrix's factors, a linear solve takes at least two refinements, each with a product.
_CHEAP = 3.0
_EPS = float(np.finfo(np.float64).eps)


class Tolerance(NamedTuple):
    """The tolerance of states: an error of ``atol + rtol |u|`` in each unknown."""

    rtol: float
    atol: float

    def allowed(self, state: Vector) -> Vector:
        """Return the tolerance of each unknown."""
        found: Vector = self.atol + self.rtol * np.abs(state)
        return found

    def sizes(self, correction: Vector, state: Vector) -> Vector:
        """Return the correction of each unknown in units of its tolerance."""
        found: Vector = np.abs(correction) / self.allowed(state)
        return found

    def size(self, correction: Vector, state: Vector) -> float:
        """Return the largest of these."""
        return float(np.max(self.sizes(correction, state), initial=0.0))


def is_enough(size: float, rate: float) -> bool:
    """Return whether the remaining error is small, given a correction and the rate of shrinking."""
    if size < MARGIN:
        return True
    return size < FAR and 0 < rate < 1 and size * rate / (1 - rate) < MARGIN


class NotSolved(Exception):  # noqa: N818
    """No solution was found; `why` is the reason, `equation` one without a value, if any."""

    def __init__(self, why: str, equation: int | None = None) -> None:
        super().__init__(why)
        self.why, self.equation = why, equation


class Solver:
    """Solve nonlinear and linear equations whose matrices change slowly.

    Factors belong to the matrix at some earlier state. They are renewed if corrections shrink too
    slowly, or once the extra iterations with old factors have taken as long as a factorisation.

    Parameters
    ----------
    matrices : Matrices
        The matrices of all equations.
    tolerance : Tolerance
        The tolerance of solutions.
    room : int
        Bytes for factors of earlier steps, for the backward pass.

    Attributes
    ----------
    factorisations : int
        How many matrices were factorised.
    """

    def __init__(self, matrices: Matrices, tolerance: Tolerance, room: int) -> None:
        self.matrices, self.factorisations = matrices, 0
        self._tolerance, self._most = tolerance, max(1, room // max(matrices.nbytes, 1))
        self.forget()

    def forget(self) -> None:
        """Drop the factors, so that later results do not depend on earlier calls."""
        self._solve: Solve | None = None
        self._new_factors()
        self._past: dict[int, tuple[Vector, ...]] = {}
        # Factors by the step in which they were made, and these steps in order.
        self._kept: dict[int, Solve] = {}
        self._made: list[int] = []
        self._step = self._of = 0

    def _new_factors(self) -> None:
        """Reset what was measured with the old factors."""
        self._best, self._wasted = np.inf, 0.0
        # How fast refinements shrink, by the number of steps between factors and matrix.
        self._rate = np.inf

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state for :meth:`restore`: everything that later results depend on."""
        kept = dict(self._kept), list(self._made)
        return self._solve, *kept, self._step, self._of

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Restore a snapshot."""
        self._past = {}
        self._new_factors()
        self._solve, kept, made, self._step, self._of = snapshot
        self._kept, self._made = dict(kept), list(made)

    def turn_to(self, step: int) -> None:
        """Go to another step, and to the kept factors that are nearest to it."""
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
        if len(self._made) > self._most:  # the farthest ones
            begin, end = self._made[0], self._made[-1]
            is_first = self._step - begin > end - self._step
            del self._kept[self._made.pop(0 if is_first else -1)]
        return self._solve

    def _count(self, iterations: int) -> None:
        """Count the iterations of a solve, and drop factors that have cost too many."""
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
        """Return a root, and the number of iterations.

        Parameters
        ----------
        residual, values : callable
            The equations at a state, and the values of their Jacobian there.
        guess : ndarray, shape (n,)
            The first iterate.
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
            # How the largest correction has shrunk. Other corrections may vanish after one
            # iteration, so they do not show the rate.
            one = before if sizes_before is None else float(sizes_before[sizes.argmax()])
            if is_enough(size, size / one if one else np.inf):
                self._count(iteration)
                return new, iteration
            new_rest = residual(new)
            is_worse = not size <= 2 * before or not _norm(new_rest) < np.inf
            if is_own and (is_worse or (is_new and size > 1)):
                # The rounding of a large equation must not hide a small one.
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
        """Return ``A⁻¹ right`` approximately, by the current factors of a matrix near ``A``.

        If there are no factors, `values` returns the values of ``A`` to factorise.
        """
        solve = self._factorise(values()) if self._solve is None else self._solve
        return solve(right, False)

    def transposed(self, values: Vector, right: Vector, stage: int = 0) -> Vector:
        """Return ``A⁻ᵀ right`` for the matrix ``A`` with these values, column by column.

        The solution is refined with factors that may belong to another matrix. The first guess
        extrapolates the last four solutions of the same stage. If a factorisation takes little
        longer than a solve, each matrix gets its own factors.
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
        """Return a solution and the number of refinements; None if they do not converge."""
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
            # Each column has its own scale; the slowest column decides.
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
    """Return the 2-norm; infinity if squares overflow."""
    return math.sqrt(np.square(x).sum())  # BLAS would start threads, which wait for busy cores


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
    """Return a shortened correction, the state it leads to, and the residual there.

    That residual is smaller than the one before, with each equation in its own scale.
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
