"""Derivatives of a function of the user: by complex steps, by differences, or by JAX."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..checks import check_has_shape
from ..errors import GradientError, InputError, InputTypeError, short
from ..locks import cached_property
from ..symbolic.pattern import Pattern, block_diagonal, rows_of
from .factors import Filled, Vector
from .slopes import Slopes, scales, slopes, tried

# The function's arguments, in its order; parameters are the last one, as a vector.
Arguments: TypeAlias = tuple[Any, ...]
Function: TypeAlias = Callable[..., Any]
Value: TypeAlias = Callable[[Arguments], Vector]

_TINY = 1e-100  # a complex step: no difference is taken, so that none can cancel
_STEP = np.complex128(1j * _TINY)  # of NumPy, so that functions may compare it with a number
# Right derivatives are apart from differences by no more than errors of these and a share: complex
# steps are exact, and errors of many steps of a run add; differences are told up to the other one.
_EXACT, CLOSE = 1e-6, 1e-5
# Derivatives in parameters are told if their errors are smaller than this share of all terms.
_UNTOLD = 1e-4
# The first comparison takes a step so long, a shorter one in time, and lets pass what is alike to
# this share, and so much rounding.
_SHORT, _SHORTEST, _ALIKE = 2.0**-25, 2.0**-32, 1e-6
_ROUNDING = 64 * float(np.finfo(np.float64).eps)
# Passes back compare derivatives at the first so many states of a simulation, and then at every
# state of this number. Each pass compares Jacobians at its first and last state, too, and where
# what an entry moves its row by has changed by this share of the row since the comparison before.
_FIRST, _EVERY, _OTHER = 16, 32, 0.25
# Random numbers serve again, begun at so many places; directions of some have this share of all.
_SHIFTS, _SOME = 7, 0.3
_OTHERS = (
    "Pass derivatives='jax' and a function of JAX, or functions that return derivatives (jacobian, "
    "vjp)"
)


class Coloured:
    """The columns of a pattern in groups, no two of which have an entry in one row.

    Groups are found when they are asked for: derivatives that the user gives need none.

    Parameters
    ----------
    pattern : Pattern
        The pattern.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    @cached_property
    def colours(self) -> NDArray[np.int64]:
        """The group of each column: the fullest comes first (Curtis, Powell and Reid, 1974)."""
        return _colours(self.pattern)

    def blocks(self, count: int) -> Coloured:
        """Return so many of these patterns along a diagonal, whose columns have the same groups."""
        if count == 1:
            return self
        found = Coloured(block_diagonal(self.pattern, count))
        found.colours = np.tile(self.colours, count)
        return found

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.colours.max(initial=-1)) + 1

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The row of each entry."""
        return rows_of(self.pattern)

    @cached_property
    def where(self) -> NDArray[np.int64]:
        """For each entry its place among the derivatives in all rows, group by group."""
        return np.asarray(self.colours[self.pattern.indices] * self.pattern.shape[0] + self.rows)

    @cached_property
    def seeds(self) -> NDArray[np.bool_]:
        """Which columns each group has."""
        return np.asarray(np.arange(self.groups)[:, None] == self.colours)

    @cached_property
    def adjoint(self) -> Filled:
        """The transpose of the matrix with some values."""
        return Filled.transposes(self.pattern)

    def product(self, values: Vector, x: Vector) -> Vector:
        """Return the matrix with some values times a vector."""
        weights = values * x[self.pattern.indices]
        return np.asarray(np.bincount(self.rows, weights, self.pattern.shape[0]), np.float64)


def _colours(pattern: Pattern) -> NDArray[np.int64]:
    indptr, indices = pattern.indptr.tolist(), pattern.indices.tolist()
    columns = sp.csr_array(
        (np.ones(pattern.nnz, bool), pattern.indices, pattern.indptr), pattern.shape
    ).tocsc()
    first, rows = columns.indptr.tolist(), columns.indices.tolist()
    colours = [-1] * pattern.shape[1]
    for column in np.argsort(-np.diff(columns.indptr), kind="stable").tolist():
        met = {
            colours[other]
            for row in rows[first[column] : first[column + 1]]
            for other in indices[indptr[row] : indptr[row + 1]]
        }
        colour = 0
        while colour in met:
            colour += 1
        colours[column] = colour
    return np.array(colours, np.int64)


class Source(Protocol):
    """How derivatives of a function are found.

    `where` is the place of an argument among the function's; parameters are a vector there.

    Attributes
    ----------
    origin : str
        Where they come from, as users are told.
    """

    @property
    def origin(self) -> str: ...

    def value(self, arguments: Arguments) -> Vector:
        """Return what the function returns."""

    def jacobian(
        self, arguments: Arguments, where: int, coloured: Coloured, exact: bool = True
    ) -> Vector:
        """Return the values of the Jacobian in an argument, in the order of its pattern.

        With `exact` an error is raised where no way tells an entry. Newton's method needs none.
        """

    def along(self, arguments: Arguments, where: int) -> tuple[Vector, Vector]:
        """Return the value, and its derivative in an argument that is a number."""

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        """Return ``(∂f/∂p)ᵀ above``, for its columns."""

    def confirm(self, arguments: Arguments, always: bool = False) -> None:
        """Compare derivatives that were taken of these arguments with the function.

        This is done at some states, or `always`.

        Raises
        ------
        RenewedError
            If some are wrong, and the next ones will be found in another way.
        GradientError
            If some are wrong, and there is no other way.
        """

    def renew(self, where: int) -> bool:
        """Turn to another way for derivatives in an argument; return whether there is one."""

    def note(self, arguments: Arguments, where: int, coloured: Coloured, values: Vector) -> None:
        """Take note of a Jacobian that a function of the user has returned: it is not compared."""

    def begin(self) -> None:
        """Begin a pass that sums derivatives in parameters."""

    def settle(self) -> None:
        """Raise an error if the sums of this pass are not told."""

    def fresh(self) -> Source:
        """Return a source for another run, which finds out anew what is right for it."""


class RenewedError(Exception):
    """Derivatives were wrong, and are found in another way from now on."""


class Names(NamedTuple):
    """What errors call a function and its arguments.

    Attributes
    ----------
    function : str
        The function.
    patterns : tuple of str
        The patterns of its arguments that are states, which are the first.
    number : callable
        Returns what a number of an argument is called, given the place of both.
    """

    function: str
    patterns: tuple[str, ...]
    number: Callable[[int, int], str]

    def pattern(self, where: int) -> str:
        """Return the name of an argument's pattern."""
        return self.patterns[where] if where < len(self.patterns) else "param_patterns"


class Derivative(NamedTuple):
    """The derivative of a function in one argument.

    Attributes
    ----------
    arguments : tuple
        The function's arguments.
    where : int
        The place of the argument.
    coloured : Coloured or None
        The pattern; None where the argument is a number.
    values : ndarray
        The values of the Jacobian, or the derivative in a number.
    base : ndarray
        The value of the function.
    size : ndarray
        How large the numbers are whose sum is the value, at least.
    origin : str
        Where it comes from: "complex" steps, "differences", or a function that is "given".
    """

    arguments: Arguments
    where: int
    coloured: Coloured | None
    values: Vector
    base: Vector
    size: Vector
    origin: str

    @property
    def x(self) -> Vector:
        """The argument as a vector."""
        return np.atleast_1d(self.arguments[self.where])

    def moved(self, x: Vector) -> Any:
        """Return another argument in the form of this one."""
        return x if np.ndim(self.arguments[self.where]) else float(x[0])

    def along(self, direction: Vector) -> Vector:
        """Return the derivative along a direction."""
        if self.coloured is None:
            return self.values * direction
        return self.coloured.product(self.values, direction)

    def sizes(self, direction: Vector) -> Vector:
        """Return the sums of absolute values, where :meth:`along` has sums."""
        return self._replace(values=np.abs(self.values)).along(np.abs(direction))

    @property
    def shares(self) -> Vector:
        """By how much each entry would have to change to move its row by its own size."""
        assert self.coloured is not None
        sizes, x = self.sizes(self.x), np.abs(self.x)
        with np.errstate(all="ignore"):
            found: Vector = sizes[self.coloured.rows] / x[self.coloured.pattern.indices]
        return found

    def slopes(self, value: Value, directions: Vector) -> Slopes:
        """Return slopes along directions, by differences."""
        return self._slopes(value, directions, None)

    def slopes_of_entries(self, value: Value) -> tuple[Slopes, Vector]:
        """Return slopes of each entry along the scale of its number, and these scales."""
        coloured, x = self.coloured, self.x
        scale = scales(x)
        if coloured is None:
            return self.slopes(value, scale[None]).take(slice(len(self.base))), scale
        columns = coloured.pattern.indices
        numbers = np.full((coloured.groups, len(self.base)), np.inf)
        numbers.reshape(-1)[coloured.where] = np.abs(x)[columns]
        found = self._slopes(value, coloured.seeds * scale, numbers)
        return found.take(coloured.where), scale[columns]

    def _slopes(self, value: Value, directions: Vector, numbers: Vector | None) -> Slopes:

        def function(x: Vector) -> Vector:
            return value(_with(self.arguments, self.where, self.moved(x)))

        return slopes(function, self.x, directions, self.base, self.size, numbers)

    @property
    def _close(self) -> float:
        return _EXACT if self.origin == "complex" else CLOSE

    def compare(self, value: Value, direction: Vector, names: Names) -> int | None:
        """Return a row in which differences along a direction are apart, if there is one.

        Raises
        ------
        GradientError
            If the pattern lacks an entry.
        """
        by_steps, found = self.slopes(value, direction[None]), self.along(direction)
        with np.errstate(all="ignore"):
            is_apart = by_steps.is_apart(found, self._close * self.sizes(direction))[0]
        if not is_apart.any():
            return None
        row = int(np.argmax(is_apart))
        if self.coloured is not None:
            self._search(value, row, direction, names)
        return row

    def compare_entries(self, value: Value, names: Names) -> tuple[int, int] | tuple[None, None]:
        """Return an entry that is apart from differences in its number alone, if there is one.

        Raises
        ------
        GradientError
            If the pattern lacks an entry of that row: columns are differentiated together.
        """
        assert self.coloured is not None
        by_steps, scale = self.slopes_of_entries(value)
        found = self.values * scale
        with np.errstate(all="ignore"):
            is_apart = by_steps.is_apart(found, self._close * np.abs(found))
        if not is_apart.any():
            return None, None
        entry = int(np.argmax(is_apart))
        row = int(self.coloured.rows[entry])
        self._search(value, row, scales(self.x), names)
        return row, int(self.coloured.pattern.indices[entry])

    def _search(self, value: Value, row: int, direction: Vector, names: Names) -> None:
        """Raise an error if a row depends on a number that its pattern lacks."""
        assert self.coloured is not None
        pattern = self.coloured.pattern
        stored = pattern.indices[pattern.indptr[row] : pattern.indptr[row + 1]]
        others = np.setdiff1d(np.arange(pattern.shape[1]), stored)
        size = 0.0
        # Halves of the other columns, down to the one that moves the row most.
        while len(others):
            halves = np.array_split(others, min(2, len(others)))
            directions = np.zeros((len(halves), len(direction)))
            for k, half in enumerate(halves):
                directions[k, half] = direction[half]
            found = self.slopes(value, directions)
            sizes = np.where(
                np.abs(found.values[:, row]) > 8 * found.errors[:, row],
                np.abs(found.values[:, row]),
                0.0,
            )
            best = int(np.argmax(sizes))
            size, others = float(sizes[best]), halves[best]
            if not size:
                return
            if len(others) == 1:
                raise GradientError(
                    f"{names.pattern(self.where)} lacks an entry: equation {row} depends on "
                    f"{names.number(self.where, int(others[0]))}"
                )


class Differences:
    """Derivatives by complex steps, or by differences.

    Complex steps are exact to rounding, but wrong where the function takes absolute values, real
    parts, or logarithms of negative numbers. So they are compared with the function wherever they
    are taken, along a random direction; and number by number at the first call, the second, the
    fourth and so on. If they are wrong, differences take their place for the rest of a run.

    Parameters
    ----------
    function : callable
        A function of arrays and numbers, the last of which is the vector of parameters.
    names : Names
        What errors call it and its arguments.
    how : {"complex", "forward"} or None
        Complex steps or differences alone; None takes complex steps where they are right.
    pattern_of_params : callable
        Returns where parameters take part.
    """

    def __init__(
        self,
        function: Function,
        names: Names,
        how: str | None,
        pattern_of_params: Callable[[], Pattern],
    ) -> None:
        self._function, self._names, self._how = function, names, how
        self._params = cache(lambda: Coloured(pattern_of_params()))
        # How often derivatives in the same arguments were compared, and how many calls for that
        # there were in passes back (the key is an empty tuple), in all runs.
        self._counts: dict[tuple[int, ...], int] = {}
        self._random: dict[int, Vector] = {}
        self._is_complex: dict[int, bool] = {}
        self._taken: dict[int, Derivative] = {}
        # In a pass: the Jacobian at the last comparison and how much it may change, and arguments
        # that had none.
        self._compared: tuple[Vector, Vector] | None = None
        self._left: Arguments | None = None
        self.begin()

    @property
    def origin(self) -> str:
        ways = {"complex": "complex steps", "forward": "differences"}
        return ways.get(self._how or "", "complex steps or differences, which are compared")

    def fresh(self) -> Differences:
        found = copy(self)
        found._is_complex, found._taken = {}, {}
        return found

    def begin(self) -> None:
        self._errors = self._sums = np.zeros((1, 1))
        self._compared, self._left = None, None

    def settle(self) -> None:
        if self._left is not None:
            self._confirm(self._left, 0)
        is_untold = ~(self._errors <= _UNTOLD * self._sums)
        if is_untold.any():
            raise self._untold(None, self._of_params, int(np.argmax(is_untold.any(1))))

    def renew(self, where: int) -> bool:
        was_complex = self._how is None and self._is_complex.get(where, False)
        self._is_complex[where] = False
        return was_complex

    def note(self, arguments: Arguments, where: int, coloured: Coloured, values: Vector) -> None:
        none = np.empty(0)
        self._taken[where] = Derivative(arguments, where, coloured, values, none, none, "given")

    def value(self, arguments: Arguments) -> Vector:
        return returned(self._names.function, self._function(*arguments), arguments[0])

    def jacobian(
        self, arguments: Arguments, where: int, coloured: Coloured, exact: bool = True
    ) -> Vector:
        found = self.by_complex(arguments, where, coloured)
        if found is not None:
            return found
        by_steps, scale, derivative = self._by_differences(arguments, where, coloured)
        is_told = by_steps.told | ~np.isfinite(derivative.base)[coloured.rows]
        if is_told.all():
            self._taken[where] = derivative
            return derivative.values
        if exact:
            entry = int(np.argmin(is_told))
            column = int(coloured.pattern.indices[entry])
            raise self._untold(int(coloured.rows[entry]), where, column)
        return np.asarray(np.where(is_told, derivative.values, by_steps.near / scale))

    def along(self, arguments: Arguments, where: int) -> tuple[Vector, Vector]:
        found = self.by_complex(arguments, where, None)
        if found is None:
            by_steps, _, derivative = self._by_differences(arguments, where, None)
            is_told = by_steps.told | ~np.isfinite(derivative.base)
            if not is_told.all():
                raise self._untold(int(np.argmin(is_told)), where, 0)
            self._taken[where], found = derivative, derivative.values
        return self._taken[where].base, found

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        coloured, where = self._params(), len(arguments) - 1
        values = self.by_complex(arguments, where, coloured)
        if values is None:
            by_steps, scale, derivative = self._by_differences(arguments, where, coloured)
            values, sizes = derivative.values, np.abs(above)
            if by_steps.told.all():
                self._taken[where] = derivative
            # Some rows may say little of a parameter of which others say enough.
            self._of_params = where
            errors = np.where(values == 0, 0.0, by_steps.errors / scale)
            errors[np.flatnonzero(sizes.sum(1)[coloured.rows] == 0)] = 0
            self._errors = self._errors + coloured.adjoint(errors) @ sizes
            self._sums = self._sums + coloured.adjoint(np.abs(values)) @ sizes
        return np.asarray(coloured.adjoint(values) @ above)

    def confirm(self, arguments: Arguments, always: bool = False) -> None:
        if always:
            self._confirm(arguments, 0)
            return
        calls = self._counts[()] = self._counts.get((), 0) + 1
        # Slopes in time or in the length of a step alone are compared at fewer states.
        has_many = any(each.coloured and each.origin != "given" for each in self._taken.values())
        is_turn = calls <= _FIRST or (has_many and self._has_changed())
        self._left = arguments if has_many else None
        if is_turn or not calls % _EVERY:
            self._left = None
            self._confirm(arguments, 0 if is_turn else 1)

    def _has_changed(self) -> bool:
        """Return whether the Jacobian is another one than at the last comparison, if any was."""
        if self._compared is None or 0 not in self._taken:
            return True
        before, limit = self._compared
        return bool((np.abs(self._taken[0].values - before) > limit).any())

    def _confirm(self, arguments: Arguments, some: int) -> None:
        """Compare derivatives along a direction of all numbers, or of `some`."""
        taken = [
            each
            for each in self._taken.values()
            if each.arguments is arguments and each.origin != "given"
        ]
        if not taken:
            return
        places = tuple(each.where for each in taken)
        count = self._counts[places] = self._counts.get(places, 0) + 1
        steps: list[Vector] = []
        moved, base = arguments, taken[0].base
        if 0 in self._taken and any(each.coloured for each in taken):
            jacobian = self._taken[0]
            self._compared = jacobian.values, _OTHER * jacobian.shares
        expected = np.zeros(len(base))
        for each in taken:
            x = each.x
            y = x + (_SHORT if each.coloured else _SHORTEST) * self._direction(x, count, some)
            moved = _with(moved, each.where, each.moved(y))
            steps.append(y - x)
            expected += each.along(steps[-1])
        found = tried(self.value, moved, base)
        off = np.abs(found - base - expected)
        is_off = ~(off <= _ALIKE * np.abs(expected) + _ROUNDING * np.abs(base))
        is_off &= np.isfinite(found) & np.isfinite(base)
        if is_off.any():
            bound = _ROUNDING * self._size(arguments, base)
            bound += _ALIKE * sum(map(Derivative.sizes, taken, steps))
            is_off &= ~(off <= bound)
        in_full = not count & (count - 1)
        if in_full or is_off.any():
            self._compare(taken, count, some, in_full)

    def _compare(self, taken: list[Derivative], count: int, some: int, in_full: bool) -> None:
        """Compare derivatives with differences of many steps, and give up complex steps."""
        is_renewed = False
        for each in taken:
            direction = self._direction(scales(each.x) * (each.x != 0), count, some)
            of_all = each._replace(size=self._size(each.arguments, each.base))
            row, column = of_all.compare(self.value, direction, self._names), None
            is_complex = each.origin == "complex"
            if row is None and in_full and is_complex and each.coloured is not None:
                row, column = of_all.compare_entries(self.value, self._names)
            if row is None:
                continue
            if self.renew(each.where):
                is_renewed = True
                continue
            number = "" if column is None else f" in {self._names.number(each.where, column)}"
            ways = (
                "Complex steps and differences" if is_complex else "Differences in two directions"
            )
            raise GradientError(
                f"{ways} of {self._names.function} are apart in the derivative of equation {row}"
                f"{number}. {_OTHERS}"
            )
        if is_renewed:
            raise RenewedError

    def _untold(self, row: int | None, where: int, column: int) -> GradientError:
        of = "" if row is None else f" of equation {row}"
        return GradientError(
            f"differences of {self._names.function} do not tell the derivative{of} in "
            f"{self._names.number(where, column)}: it jumps there, or rounding hides it. {_OTHERS}"
        )

    def _size(self, arguments: Arguments, base: Vector) -> Vector:
        """Return how large the terms of a value are, as far as derivatives show them."""
        found = np.abs(base)
        for each in self._taken.values():
            if each.arguments is arguments:
                found = found + np.nan_to_num(each.sizes(each.x))
        return found

    def _direction(self, x: Vector, count: int, some: int) -> Vector:
        """Return a random direction of all numbers, or of some, in their scale.

        Numbers that are 0 have none, and stay unless all are.
        """
        pool = self._random.get(len(x))
        if pool is None:
            rng, shape = np.random.default_rng(len(x)), (2, len(x) + _SHIFTS)
            pool = rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.0, shape)
            if len(x) > 1:
                pool[1] *= rng.random(shape[1]) < _SOME
            self._random[len(x)] = pool
        begin = count % _SHIFTS
        if not x.any():
            x = scales(x)
        return np.asarray(pool[some, begin : begin + len(x)] * x)

    def _by_differences(
        self, arguments: Arguments, where: int, coloured: Coloured | None
    ) -> tuple[Slopes, Vector, Derivative]:
        """Return slopes of entries, the scales that they are taken along, and the derivative."""
        self._taken.pop(where, None)
        base = self.value(arguments)
        size = self._size(arguments, base)
        found = Derivative(arguments, where, coloured, base, base, size, "differences")
        by_steps, scale = found.slopes_of_entries(self.value)
        return by_steps, scale, found._replace(values=by_steps.values / scale)

    def base(self, where: int) -> Vector:
        """Return the value at which a derivative in an argument was taken last."""
        return self._taken[where].base

    def by_complex(
        self, arguments: Arguments, where: int, coloured: Coloured | None
    ) -> Vector | None:
        """Return a derivative by complex steps, if the function takes any.

        A complex number of NumPy is compared by its real part, one of Python not at all.
        """
        known = True if self._how == "complex" else self._is_complex.get(where)
        seeds: Any = (1.0,) if coloured is None else coloured.seeds
        if self._how == "forward" or known is False or not len(seeds):
            return None
        found = []
        try:
            with nullcontext() if known else warnings.catch_warnings():
                if not known:
                    warnings.simplefilter("error")
                for seed in seeds:
                    step = arguments[where] + _STEP * seed
                    moved = np.asarray(self._function(*_with(arguments, where, step)))
                    found.append(moved.imag.copy())
            values = found[0] if coloured is None else np.concatenate(found)[coloured.where]
        except Exception:  # what the function raises is its own
            if self._how == "complex":
                raise
            self._is_complex[where] = False
            return None
        self._is_complex[where] = True
        values, base = np.asarray(values / _TINY), moved.real.copy()
        self._taken[where] = Derivative(arguments, where, coloured, values, base, base, "complex")
        return values


class _Exact:
    """Derivatives of another library, which need no comparison."""

    def confirm(self, arguments: Arguments, always: bool = False) -> None:
        """Do nothing: derivatives are exact."""

    def renew(self, where: int) -> bool:
        return False

    def note(self, arguments: Arguments, where: int, coloured: Coloured, values: Vector) -> None:
        pass

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def fresh(self) -> Any:
        return self


class InJax(_Exact):
    """Derivatives of a function of JAX, compiled.

    Parameters
    ----------
    function : callable
        A function of arrays and numbers of JAX, the last of which is the vector of parameters.
    name : str
        What errors call it.
    """

    def __init__(self, function: Function, name: str) -> None:
        import jax

        self._jax, self._function, self._name = jax, function, name
        self._value = jax.jit(function)
        self._jacobians: dict[tuple[int, int], Any] = {}
        self._along: dict[int, Any] = {}
        self._in_params: Any = None

    origin = "JAX"

    def value(self, arguments: Arguments) -> Vector:
        with self._jax.enable_x64(True):
            return returned(self._name, self._value(*arguments), arguments[0])

    def jacobian(
        self, arguments: Arguments, where: int, coloured: Coloured, exact: bool = True
    ) -> Vector:
        jax = self._jax
        key = where, id(coloured.pattern)
        if key not in self._jacobians:
            seeds = coloured.seeds.astype(np.float64)

            def values(*given: Any) -> Any:
                found = jax.vmap(lambda seed: self._jvp(given, where, seed)[1])(seeds)
                return found.reshape(-1)[coloured.where]

            self._jacobians[key] = coloured, jax.jit(values)
        with jax.enable_x64(True):
            return np.asarray(self._jacobians[key][1](*arguments))

    def along(self, arguments: Arguments, where: int) -> tuple[Vector, Vector]:
        jax = self._jax
        if where not in self._along:
            self._along[where] = jax.jit(lambda *given: self._jvp(given, where, 1.0))
        with jax.enable_x64(True):
            given = _with(arguments, where, float(arguments[where]))
            value, slope = self._along[where](*given)
            return np.asarray(value), np.asarray(slope)

    def _jvp(self, given: Arguments, where: int, direction: Any) -> Any:
        """Return the value, and its derivative in an argument along a direction."""

        def of_one(x: Any) -> Any:
            return self._function(*_with(given, where, x))

        return self._jax.jvp(of_one, (given[where],), (direction,))

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        jax = self._jax
        if self._in_params is None:

            def products(*given: Any) -> Any:
                *others, params, columns = given
                _, pull = jax.vjp(lambda p: self._function(*others, p), params)
                return jax.vmap(lambda each: pull(each)[0], 1, 1)(columns)

            self._in_params = jax.jit(products)
        with jax.enable_x64(True):
            return np.asarray(self._in_params(*arguments, above))


class InTorch(_Exact):
    """Derivatives of a function of PyTorch, by forward and reverse mode.

    Parameters
    ----------
    function : callable
        A function of tensors of float64, the last of which is the vector of parameters.
    name : str
        What errors call it.
    """

    origin = "PyTorch"

    def __init__(self, function: Function, name: str) -> None:
        import torch

        self._torch, self._function, self._name = torch, function, name

    def _tensors(self, arguments: Arguments) -> list[Any]:
        return [self._torch.tensor(each, dtype=self._torch.float64) for each in arguments]

    def value(self, arguments: Arguments) -> Vector:
        with self._torch.no_grad():
            found = self._function(*self._tensors(arguments))
        return returned(self._name, found, arguments[0])

    def _slope(self, given: list[Any], where: int, direction: Any) -> tuple[Any, Any]:
        """Return the value, and its derivative in an argument along a direction."""
        forward = self._torch.autograd.forward_ad
        with self._torch.no_grad(), forward.dual_level():
            dual = forward.make_dual(given[where], direction)
            found = forward.unpack_dual(self._function(*_with(given, where, dual)))
            value, slope = found.primal, found.tangent
        slope = self._torch.zeros_like(value) if slope is None else slope
        return value.numpy(), slope.numpy()

    def jacobian(
        self, arguments: Arguments, where: int, coloured: Coloured, exact: bool = True
    ) -> Vector:
        given = self._tensors(arguments)
        seeds = self._torch.tensor(coloured.seeds, dtype=self._torch.float64)
        slopes = [self._slope(given, where, seed)[1] for seed in seeds]
        return np.concatenate([*slopes, np.empty(0)])[coloured.where]

    def along(self, arguments: Arguments, where: int) -> tuple[Vector, Vector]:
        given = self._tensors(arguments)
        return self._slope(given, where, self._torch.ones_like(given[where]))

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        *given, params = self._tensors(arguments)
        params.requires_grad_()
        with self._torch.enable_grad():
            found = self._function(*given, params)
        grads = np.zeros((len(params), above.shape[1]))
        if found.requires_grad:
            for k, column in enumerate(self._torch.tensor(above.T)):
                (grad,) = self._torch.autograd.grad(found, params, column, retain_graph=True)
                grads[:, k] = grad.numpy()
        return grads


def returned(name: str, found: Any, state: Vector) -> Vector:
    """Return what a function returned, if it is a vector of numbers as long as the state."""
    array = np.asarray(found)
    if array.shape != state.shape or array.dtype.kind not in "fiu":
        raise InputError(
            f"{name} returned {short(found)} of shape {array.shape} and dtype {array.dtype}; "
            f"expected {state.shape[0]} real numbers, as many as there are unknowns"
        )
    return array.astype(np.float64)  # a copy: the function may return the same array each time


def read_pattern(name: str, given: Any, shape: tuple[int, int] | None) -> Pattern:
    """Return the pattern of a sparse array, a mask or a pattern."""
    if isinstance(given, Pattern):
        pattern = given
    elif sp.issparse(given):
        matrix = sp.csr_array(given).copy()
        matrix.sum_duplicates()
        pattern = Pattern(matrix)
    else:
        array = np.asarray(given)
        if array.ndim != 2 or array.dtype.kind not in "biuf":
            raise InputTypeError(
                f"{name} is {short(given)}; expected a Pattern, a sparse array, or a mask"
            )
        pattern = Pattern(sp.csr_array(array != 0))
    if shape is not None:
        check_has_shape(name, pattern, shape)
    return pattern


def _with(arguments: Sequence[Any], where: int, value: Any) -> Arguments:
    return *arguments[:where], value, *arguments[where + 1 :]
