"""Schemes: the equations of a step, and their adjoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..kernels.cpu.marching import BDF2, RESIDUAL, RUNGE_KUTTA, Trajectory
from ..symbolic.pattern import Pattern, places_in, rows_of, union
from .derivatives import Arguments, Coloured, RenewedError, Source
from .factors import Matrices, Vector
from .methods import Differentiation, Tableau
from .newton import NotSolved, Solver

# The length, as a share of the first step, of the short step that finds the slope before it.
_SHORT = 1e-6


def _half_change(stages: int) -> tuple[tuple[float, ...], ...]:
    """Return the weights of rates by which half their change over a step estimates its error."""
    return ((-0.5, *[0.0] * (stages - 1), 0.5),)


class Place(NamedTuple):
    """A step: the states and parameters it reads, its stages, and its place in time.

    Attributes
    ----------
    states : ndarray
        The states around the step, the newest last: the state before its beginning if there is one,
        its beginning, and, once the step was taken, its end.
    params : ndarray
        The parameters.
    inner : ndarray, shape (stages, n)
        The states of stages, which :meth:`Scheme.advance` writes.
    time : float
        The time of its beginning.
    dt : float
        Its length.
    before : float or None
        The length of the previous step; None for the first.
    """

    states: Vector
    params: Vector
    inner: Vector
    time: float
    dt: float
    before: float | None

    @property
    def end(self) -> float:
        """The time of its end."""
        return self.time + self.dt


def place_of(run: Trajectory, k: int, ends: int, begin: int = 0) -> Place:
    """Return step `k` of a run, with so many states after its beginning.

    The arrays of states are those from step `begin` on.
    """
    at = k - begin
    first = 1 if k == 0 else at
    return Place(
        run.states[first : at + 2 + ends],
        run.params,
        run.inner[at],
        float(run.times[k]),
        float(run.dt[k]),
        float(run.dt[k - 1]) if k else None,
    )


class Grads:
    """Gradients that a backward pass accumulates; the last axis is for losses.

    Attributes
    ----------
    old, older : ndarray, shape (n, losses)
        The gradients in the state before a step, and in the state before that.
    params : ndarray, shape (size, losses)
        The gradients in parameters.
    dt, dt_before, time : ndarray, shape (losses,)
        The gradients in the lengths of a step and of the previous step, and in the step's time.
    """

    def __init__(self, n: int, size: int, losses: int) -> None:
        self.params = np.zeros((size, losses))
        self.old, self.older = np.zeros((n, losses)), np.zeros((n, losses))
        self.dt, self.dt_before, self.time = (np.zeros(losses) for _ in range(3))

    def begin(self) -> None:
        """Reset for another step."""
        self.old, self.older = self.older, np.zeros_like(self.older)
        self.dt, self.dt_before = self.dt_before, np.zeros_like(self.dt)


class Form(NamedTuple):
    """The equations of a step, in the form of compiled loops.

    Attributes
    ----------
    kind : int
        Their kind in `kernels.cpu.marching`.
    a, c : ndarray
        The tableau; for other methods that of backward Euler.
    inner : list of int
        The place where each stage's state is kept in the step; -1 if it is not kept.
    mass : csr_array
        The mass matrix.
    estimates : tuple of tuple of float
        What the rates at the beginning of a step and in its stages are multiplied by to estimate
        its error.
    """

    kind: int
    a: Vector
    c: Vector
    inner: list[int]
    mass: sp.csr_array
    estimates: tuple[tuple[float, ...], ...]


class Scheme(Protocol):
    """The equations of a step, and their adjoint."""

    source: Source  # where derivatives come from
    patterns: list[Coloured]  # of Jacobians in states

    @property
    def form(self) -> Form:
        """The equations, in the form of compiled loops."""

    def arguments(self, place: Place) -> Arguments:
        """Return the arguments of the user's function at the end of a step."""

    @property
    def matrices(self) -> Matrices:
        """The matrices of the linear systems."""

    @property
    def stages(self) -> int:
        """How many states a step has between its ends."""

    def advance(self, solver: Solver, place: Place) -> tuple[Vector, int]:
        """Return the next state, and the number of iterations."""

    @property
    def error_order(self) -> int:
        """The power of the step's length with which the error estimate shrinks."""

    @property
    def growth(self) -> float:
        """The largest ratio of a step's length to the previous one."""

    def error(self, solver: Solver, place: Place) -> Vector:
        """Estimate the error of a step that was taken."""

    def equations(self, place: Place, state: Vector, time: float) -> Vector:
        """Return the user's function at the end of a step."""

    @property
    def algebraic(self) -> NDArray[np.int64]:
        """The algebraic equations, which have no rate of change."""

    def pull_back(self, solver: Solver, place: Place, above: Vector, grads: Grads) -> None:
        """Add the gradients in everything a step has read, from the gradient in its end.

        Raises
        ------
        RenewedError
            If derivatives were wrong: the caller repeats the whole pass.
        """


class ResidualScheme:
    """Steps ``F(u, u_old, t, dt, p) = 0``, where `t` is the time of the step's end."""

    stages = 0
    error_order, growth = 2, 5.0
    algebraic = np.empty(0, np.int64)  # not known

    def __init__(self, source: Source, new: Coloured, old: Coloured) -> None:
        self.source, self.matrices = source, Matrices(new.pattern)
        self._new, self._old = self.patterns = [new, old]

    @property
    def form(self) -> Form:
        none = sp.csr_array(self._new.pattern.shape)
        return Form(RESIDUAL, np.ones((1, 1)), np.ones(1), [-1], none, _half_change(1))

    def arguments(self, place: Place) -> Arguments:
        return place.states[-1], place.states[-2], place.end, place.dt, place.params

    def advance(self, solver: Solver, place: Place) -> tuple[Vector, int]:
        source, rest = self.source, (place.states[-1], place.end, place.dt, place.params)

        def values(u: Vector) -> Vector:
            return near(source, (u, *rest), 0, self._new)

        return solve(solver, lambda u: source.value((u, *rest)), values, place, 1.0)

    def equations(self, place: Place, state: Vector, time: float) -> Vector:
        return self.source.value((state, place.states[0], time, place.dt, place.params))

    def error(self, solver: Solver, place: Place) -> Vector:
        """Return half the change of the slope over a step, as the step passes on an old error.

        The estimate is zero in algebraic unknowns. The slope before the first step comes from a
        step so short that one Newton iteration solves it.
        """
        *older, old, new = place.states
        source, rest = self.source, (place.end, place.dt, place.params)
        if place.before is None:
            dt = _SHORT * place.dt
            first = old, old, place.time + dt, dt, place.params
            solve = self.matrices.factorise(source.jacobian(first, 0, self._new))
            if solve is None:
                raise NotSolved("the Jacobian of a first short step is singular")
            change = -solve(source.value(first), False) / _SHORT
        else:
            change = place.dt / place.before * (old - older[-1])
        change = (new - old - change) / 2
        moved = source.value((new, old + change, *rest)) - source.value((new, old, *rest))
        return -solver.solve_near(moved, lambda: source.jacobian((new, old, *rest), 0, self._new))

    def pull_back(self, solver: Solver, place: Place, above: Vector, grads: Grads) -> None:
        source = self.source
        arguments = self.arguments(place)
        found = solver.transposed(source.jacobian(arguments, 0, self._new), above)
        old = source.jacobian(arguments, 1, self._old)
        grads.old -= self._old.adjoint(old) @ found
        if len(place.params):
            grads.params -= source.in_params(arguments, found)
        in_time, in_dt = (_dot(source.along(arguments, where)[1], found) for where in (2, 3))
        grads.dt -= in_dt + in_time
        grads.time -= in_time
        source.confirm(arguments)


class _Rated:
    """Base of steps of ``M u' = f(u, t, p)``."""

    error_order, growth = 2, 5.0

    def __init__(self, source: Source, coloured: Coloured, mass: sp.csr_array | None) -> None:
        self.source = source
        self._coloured, self._mass, pattern = coloured, mass, coloured.pattern
        self.patterns = [coloured]
        n = pattern.shape[0]
        self._matrix = matrix = sp.eye_array(n, format="csr") if mass is None else mass
        # The matrices M - a J have the union of both patterns.
        own = Pattern(matrix)
        both = union([own, pattern])
        self.matrices = Matrices(both)
        # A slice is faster than places.
        self._into: Any = slice(None) if both is pattern else places_in(both, pattern)
        self._own = np.zeros(both.nnz)
        self._own[places_in(both, own)] = matrix.data
        self.algebraic = np.flatnonzero(np.bincount(rows_of(own), matrix.data != 0, n) == 0)

    def arguments(self, place: Place) -> Arguments:
        return place.states[-1], place.end, place.params

    def equations(self, place: Place, state: Vector, time: float) -> Vector:
        return self.source.value((state, time, place.params))

    def error(self, solver: Solver, place: Place) -> Vector:
        ends = zip(place.states[-2:], (place.time, place.end), strict=True)
        old, new = (self.equations(place, *each) for each in ends)
        return self._filtered(solver, place, place.dt / 2 * (new - old))

    def _filtered(self, solver: Solver, place: Place, error: Vector) -> Vector:
        """Return the change of the state by an error in the rate; stiff unknowns damp it."""
        return solver.solve_near(error, lambda: self._last_matrix(place))

    def _last_matrix(self, place: Place) -> Vector:
        """Return the values of the last matrix with which the step was solved."""
        raise NotImplementedError

    def _weighed(self, x: Vector, *, transposed: bool = False) -> Vector:
        """Return ``M x`` or ``Mᵀ x``."""
        if self._mass is None:
            return x
        found: Vector = (self._mass.T if transposed else self._mass) @ x
        return found

    def _values(
        self,
        arguments: Arguments,
        mass: float,
        rate: float,
        derivative: Callable[..., Vector] | None = None,
    ) -> Vector:
        """Return the values of ``mass M - rate J``."""
        values = mass * self._own
        derivative = derivative or self.source.jacobian
        values[self._into] -= rate * derivative(arguments, 0, self._coloured)
        return values

    def _values_near(self, arguments: Arguments, mass: float, rate: float) -> Vector:
        """Return ``mass M - rate J`` for Newton's method, which tolerates errors in it."""
        return self._values(arguments, mass, rate, partial(near, self.source))

    def _below(self, arguments: Arguments, above: Vector) -> Vector:
        """Return ``Jᵀ above``."""
        values = self.source.jacobian(arguments, 0, self._coloured)
        found: Vector = self._coloured.adjoint(values) @ above
        return found


class RungeKutta(_Rated):
    """Steps of a Runge–Kutta method whose last stage is the next state."""

    def __init__(self, tableau: Tableau, *about: Any) -> None:
        super().__init__(*about)
        self._tableau = tableau
        self.error_order = tableau.order if tableau.estimates else 2
        self._a, self._c = tableau.a, tableau.c
        self._inner = tableau.inner
        self.stages = len(self._inner)

    @property
    def form(self) -> Form:
        kept = {stage: k for k, stage in enumerate(self._inner)}
        inner = [kept.get(i, -1) for i in range(len(self._a))]
        estimates = self._tableau.estimates or _half_change(len(inner))
        return Form(RUNGE_KUTTA, self._a, self._c, inner, self._matrix, estimates)

    def error(self, solver: Solver, place: Place) -> Vector:
        estimates = self._tableau.estimates
        if not estimates:
            return super().error(solver, place)
        times = place.time, *(place.time + float(c) * place.dt for c in self._c)
        states = place.states[-2], *(self._stage(place, i) for i in range(len(self._c)))
        rates = [self.equations(place, *each) for each in zip(states, times, strict=True)]
        columns = [place.dt * _sum(zip(each, rates, strict=True)) for each in estimates]
        if place.before is None and len(self.algebraic):
            # By how far algebraic equations do not hold, which a small weight may hide.
            rest = np.zeros_like(rates[0])
            rest[self.algebraic] = place.dt * rates[0][self.algebraic]
            columns.append(rest)
        return np.asarray(np.abs(self._filtered(solver, place, np.stack(columns, 1))).max(1))

    def _filtered(self, solver: Solver, place: Place, error: Vector) -> Vector:
        return super()._filtered(solver, place, error) if self._tableau.is_implicit else error

    def _last_matrix(self, place: Place) -> Vector:
        return self._values(self.arguments(place), 1.0, place.dt * self._a[-1, -1])

    def _arguments(self, state: Vector, place: Place, stage: int) -> Arguments:
        return state, place.time + float(self._c[stage]) * place.dt, place.params

    def _stage(self, place: Place, i: int) -> Vector:
        """Return the state in a stage of a step that was taken."""
        found: Vector = place.states[-1] if i == len(self._a) - 1 else place.states[-2]
        if i in self._inner:
            found = place.inner[self._inner.index(i)]
        return found

    def advance(self, solver: Solver, place: Place) -> tuple[Vector, int]:
        old, a, dt = place.states[-1], self._a, place.dt
        rates: list[Vector] = []
        iterations, state = 0, old
        for i in range(len(a)):
            added = _sum((a[i, j], rates[j]) for j in range(i) if a[i, j])
            if a[i, i]:

                def residual(u: Vector, i: int = i, added: Vector = added) -> Vector:
                    rate = self.source.value(self._arguments(u, place, i))
                    return np.asarray(self._weighed(u - old) - dt * (added + a[i, i] * rate))

                def values(u: Vector, i: int = i) -> Vector:
                    return self._values_near(self._arguments(u, place, i), 1.0, dt * a[i, i])

                state, more = solve(solver, residual, values, place, float(self._c[i]))
                iterations += more
            else:
                state = old + dt * added if a[i].any() else old
            if i in self._inner:
                place.inner[self._inner.index(i)] = state
            if a[i + 1 :, i].any():
                rates.append(self.source.value(self._arguments(state, place, i)))
            else:
                rates.append(state)  # never read
        return state, iterations

    def pull_back(self, solver: Solver, place: Place, above: Vector, grads: Grads) -> None:
        a, dt = self._a, place.dt
        last = len(a) - 1
        found: list[Vector] = [above] * len(a)
        for i in reversed(range(len(a))):
            arguments = self._arguments(self._stage(place, i), place, i)
            later = [k for k in range(i + 1, len(a)) if a[k, i]]
            through = _sum((dt * a[k, i], found[k]) for k in later)
            own = above if i == last else np.zeros_like(above)
            if later:
                own = own + self._below(arguments, through)
            if a[i, i]:
                found[i] = solver.transposed(self._values(arguments, 1.0, dt * a[i, i]), own, i)
                grads.old += self._weighed(found[i], transposed=True)
                through = through + dt * a[i, i] * found[i]
            else:
                found[i] = own
                grads.old += own
            if not (later or a[i, i]):
                continue
            rate, slope = self.source.along(arguments, 1)
            grads.dt += _dot(rate, through) / dt
            in_time = _dot(slope, through)
            grads.time += in_time
            grads.dt += self._c[i] * in_time
            if len(place.params):
                grads.params += self.source.in_params(arguments, through)
            self.source.confirm(arguments)


class BackwardDifferences(_Rated):
    """Steps of BDF2; the first step is backward Euler."""

    stages = 0
    growth = 2.0  # steps that grow by 1 + √2 or more are unstable

    def _coefficients(self, place: Place) -> Differentiation:
        return Differentiation.of(None if place.before is None else place.dt / place.before)

    @property
    def form(self) -> Form:
        return Form(BDF2, np.ones((1, 1)), np.ones(1), [-1], self._matrix, _half_change(1))

    def _last_matrix(self, place: Place) -> Vector:
        return self._values(self.arguments(place), self._coefficients(place).values[0], place.dt)

    def _older(self, states: Vector, behind: int) -> Vector:
        return states[-behind] if len(states) >= behind else np.zeros_like(states[-1])

    def advance(self, solver: Solver, place: Place) -> tuple[Vector, int]:
        (a, b, c), _ = self._coefficients(place)
        past = b * place.states[-1] + c * self._older(place.states, 2)
        rest = place.end, place.params

        def residual(u: Vector) -> Vector:
            rate = self.source.value((u, *rest))
            return self._weighed(a * u + past) - place.dt * rate

        def values(u: Vector) -> Vector:
            return self._values_near((u, *rest), a, place.dt)

        return solve(solver, residual, values, place, 1.0)

    def pull_back(self, solver: Solver, place: Place, above: Vector, grads: Grads) -> None:
        (a, b, c), slopes = self._coefficients(place)
        states, arguments = place.states, self.arguments(place)
        found = solver.transposed(self._values(arguments, a, place.dt), above)
        weighed = self._weighed(found, transposed=True)
        grads.old -= b * weighed
        grads.older -= c * weighed
        rate, slope = self.source.along(arguments, 1)
        in_time = place.dt * _dot(slope, found)
        grads.dt += _dot(rate, found) + in_time
        grads.time += in_time
        if place.before is not None:
            moved = slopes[0] * states[-1] + slopes[1] * states[-2]
            moved = moved + slopes[2] * self._older(states, 3)
            in_ratio = _dot(moved, weighed)
            grads.dt -= in_ratio / place.before
            grads.dt_before += in_ratio * place.dt / place.before**2
        if len(place.params):
            grads.params += self.source.in_params(arguments, place.dt * found)
        self.source.confirm(arguments)


AnyScheme = TypeVar("AnyScheme", bound=Scheme)


def fresh(scheme: AnyScheme) -> AnyScheme:
    """Return a copy of the equations for another run."""
    found = copy(scheme)
    found.source = scheme.source.fresh()
    return found


def near(source: Source, arguments: Arguments, where: int, coloured: Coloured) -> Vector:
    """Return the values of a Jacobian for Newton's method, which tolerates errors in it."""
    while True:
        values = source.jacobian(arguments, where, coloured, exact=False)
        try:
            source.confirm(arguments, always=True)
        except RenewedError:
            continue
        return values


def solve(
    solver: Solver,
    residual: Callable[[Vector], Vector],
    values: Callable[[Vector], Vector],
    place: Place,
    part: float,
) -> tuple[Vector, int]:
    """Solve for a stage by Newton's method, starting from an extrapolation of the last step."""
    old = place.states[-1]
    if len(place.states) > 1 and place.before is not None:
        guess = old + (part * place.dt / place.before) * (old - place.states[-2])
        try:
            return solver.newton(residual, values, guess)
        except NotSolved:
            solver.forget()
    return solver.newton(residual, values, old)


def _dot(x: Vector, columns: Vector) -> Vector:
    """Return ``xᵀ columns``, summed in a fixed order, on one thread."""
    return np.asarray(np.einsum("i,ij->j", x, columns))


def _sum(terms: Iterable[tuple[float, Vector]]) -> Any:
    """Return a sum of multiples; 0 if there are none."""
    return sum((factor * each for factor, each in terms), 0.0)
