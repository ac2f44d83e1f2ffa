"""Derivatives of a function of the user: by complex steps, by differences, or by JAX."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..errors import InputError, InputTypeError, short
from ..locks import cached_property
from ..symbolic.pattern import Pattern, rows_of
from .factors import Filled, Vector

# The function's arguments, in its order; parameters are the last one, as a vector.
Arguments: TypeAlias = tuple[Any, ...]
Function: TypeAlias = Callable[..., Any]

_TINY = 1e-100  # a complex step: no difference is taken, so that none can cancel
_STEP = float(np.sqrt(np.finfo(np.float64).eps))
# Complex steps and differences of one direction are apart by no more than this share.
_CLOSE = 1e-3


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
        (rows, columns), shifts = self.pattern.shape, np.arange(count)[:, None]
        starts = self.pattern.indptr[:-1] + shifts * self.pattern.nnz
        indices = self.pattern.indices + shifts * columns
        indptr = np.append(starts.ravel(), count * self.pattern.nnz)
        found = Coloured(Pattern(indptr, indices.ravel(), (count * rows, count * columns)))
        found.colours = np.tile(self.colours, count)
        return found

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.colours.max(initial=-1)) + 1

    @cached_property
    def where(self) -> NDArray[np.int64]:
        """For each entry its place among the derivatives in all rows, group by group."""
        rows = self.pattern.shape[0]
        return np.asarray(self.colours[self.pattern.indices] * rows + rows_of(self.pattern))

    @cached_property
    def seeds(self) -> NDArray[np.bool_]:
        """Which columns each group has."""
        return np.asarray(np.arange(self.groups)[:, None] == self.colours)

    @cached_property
    def adjoint(self) -> Filled:
        """The transpose of the matrix with some values."""
        return Filled.transposes(self.pattern)


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
    """

    def value(self, arguments: Arguments) -> Vector:
        """Return what the function returns."""

    def jacobian(self, arguments: Arguments, where: int, coloured: Coloured) -> Vector:
        """Return the values of the Jacobian in an argument, in the order of its pattern."""

    def along(self, arguments: Arguments, where: int) -> tuple[Vector, Vector]:
        """Return the value, and its derivative in an argument that is a number."""

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        """Return ``(∂f/∂p)ᵀ above``, for its columns."""


class Differences:
    """Derivatives by complex steps, or by forward differences.

    Parameters
    ----------
    function : callable
        A function of arrays and numbers, the last of which is the vector of parameters.
    name : str
        What errors call it.
    how : {"complex", "forward"} or None
        Complex steps are exact to rounding; None takes them where the function has them, which is
        compared with differences once for each argument.
    pattern_of_params : callable
        Returns where parameters take part.
    """

    def __init__(
        self,
        function: Function,
        name: str,
        how: str | None,
        pattern_of_params: Callable[[], Pattern],
    ) -> None:
        self._function, self._name, self._how = function, name, how
        self._known: dict[int, str] = {}
        self._pattern_of_params = pattern_of_params

    def value(self, arguments: Arguments) -> Vector:
        return returned(self._name, self._function(*arguments), arguments[0])

    def jacobian(self, arguments: Arguments, where: int, coloured: Coloured) -> Vector:
        if self._is_complex(arguments, where):
            found = np.empty((coloured.groups, len(arguments[0])))
            for colour, seeds in enumerate(coloured.seeds):
                found[colour] = self._moved(arguments, where, seeds).imag
            return np.asarray(np.take(found, coloured.where) / _TINY)
        x = arguments[where]
        steps = _STEP * np.maximum(1.0, np.abs(x))
        steps = (x + steps) - x  # what is added in fact
        before = self.value(arguments)
        found = np.empty((coloured.groups, len(before)))
        for colour, seeds in enumerate(coloured.seeds):
            moved = _with(arguments, where, np.where(seeds, x + steps, x))
            found[colour] = self.value(moved) - before
        return np.asarray(np.take(found, coloured.where) / steps[coloured.pattern.indices])

    def along(self, arguments: Arguments, where: int) -> tuple[Vector, Vector]:
        if self._is_complex(arguments, where):
            both = self._moved(arguments, where, 1.0)
            return both.real, both.imag / _TINY
        x = arguments[where]
        step = _STEP * max(1.0, abs(x))
        ahead, behind = x + step, x - step
        values = [self.value(_with(arguments, where, at)) for at in (ahead, behind)]
        return self.value(arguments), (values[0] - values[1]) / (ahead - behind)

    @cached_property
    def _params(self) -> Coloured:
        return Coloured(self._pattern_of_params())

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        values = self.jacobian(arguments, len(arguments) - 1, self._params)
        return np.asarray(self._params.adjoint(values) @ above)

    def _moved(self, arguments: Arguments, where: int, direction: Any) -> Any:
        """Return what the function returns a complex step away: its value, and a derivative."""
        # A complex number of NumPy is compared by its real part, one of Python not at all.
        moved = np.add(arguments[where], np.multiply(1j * _TINY, direction))
        return np.asarray(self._function(*_with(arguments, where, moved)))

    def _is_complex(self, arguments: Arguments, where: int) -> bool:
        if self._how is not None:
            return self._how == "complex"
        if where not in self._known:
            self._known[where] = "complex" if self._has_complex(arguments, where) else "forward"
        return self._known[where] == "complex"

    def _has_complex(self, arguments: Arguments, where: int) -> bool:
        """Return whether complex steps are derivatives, which `abs` and others do not have.

        Powers by logarithms, as compiled functions have them, are right where numbers are positive.
        So the argument is tried with the other sign, too, if the function takes it.
        """
        if not self._agrees(arguments, where):
            return False
        mirrored = _with(arguments, where, -arguments[where])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                is_finite = np.isfinite(self.value(mirrored)).all()
        except Exception:
            return True
        return not is_finite or self._agrees(mirrored, where)

    def _agrees(self, arguments: Arguments, where: int) -> bool:
        """Return whether a complex step agrees with differences there."""
        x = arguments[where]
        direction: Any = np.random.default_rng(0).uniform(0.5, 1.0, np.shape(x))
        step = np.cbrt(np.finfo(float).eps) * max(1.0, float(np.max(np.abs(x), initial=0.0)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = self._moved(arguments, where, direction).imag / _TINY
        except Exception:  # what the function raises is its own
            return False
        ahead, behind = (
            self.value(_with(arguments, where, x + sign * step * direction)) for sign in (1, -1)
        )
        expected = (ahead - behind) / (2 * step)
        if found.shape != expected.shape:
            return False
        scale = float(np.max(np.abs(expected), initial=0.0))
        rounding = 1e-9 * float(np.max(np.abs(ahead), initial=0.0)) / step
        return bool(np.all(np.abs(found - expected) <= _CLOSE * scale + rounding * 1e-3 + 1e-300))


class InJax:
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

    def value(self, arguments: Arguments) -> Vector:
        with self._jax.enable_x64(True):
            return returned(self._name, self._value(*arguments), arguments[0])

    def jacobian(self, arguments: Arguments, where: int, coloured: Coloured) -> Vector:
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
    if shape is not None and pattern.shape != shape:
        raise InputError(f"{name} has shape {pattern.shape}; expected {shape}")
    return pattern


def _with(arguments: Sequence[Any], where: int, value: Any) -> Arguments:
    return *arguments[:where], value, *arguments[where + 1 :]
