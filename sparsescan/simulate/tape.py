"""A tape of what a user's function computes, element by element, with exact derivatives.

A function that was read once is a list of parts. Each part computes some numbers from others, by an
elementwise NumPy function or a product with a constant sparse matrix. The chain rule gives
derivatives, forward or in reverse (Griewank and Walther, Evaluating Derivatives, 2008, chapter 3).
Each branch of the function that depended on numbers is a guard: if its outcome changes, the
function must be read again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ..locks import cached_property
from ..symbolic.pattern import Pattern

Ids = NDArray[np.int64]  # of elements: their places among all numbers
Vector = NDArray[np.float64]

_EPS = float(np.finfo(np.float64).eps)
# The most parts, elements and seconds for reading a function.
_PARTS, _ELEMENTS, _SECONDS = 200_000, 20_000_000, 5.0


class RefusedError(Exception):
    """A function does something that cannot be read."""


def where(condition: Any, a: Any, b: Any) -> Any:
    """Return ``np.where`` of a condition that is 0 or 1."""
    return np.where(condition != 0, a, b)


def real_part(x: Any) -> Any:
    """Return a number whose real part a function takes, which complex steps do not see."""
    return x


class Table(NamedTuple):
    """``np.interp(x, points, values)`` as a function of `x`.

    Attributes
    ----------
    points, values : tuple of float
        The table.
    """

    points: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, x: Any) -> Any:
        """Interpolate in the table."""
        return np.interp(x, self.points, self.values)

    def slope(self, x: Any) -> Any:
        """Return the derivative; at a point of the table, the right-hand one."""
        points, values = np.array(self.points), np.array(self.values)
        slopes = np.concatenate([[0.0], np.diff(values) / np.diff(points), [0.0]])
        return slopes[np.searchsorted(points, x, "right")]


# -- Derivatives of elementwise functions ----------------------------------------------------------


def _power(y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    in_base = np.where(b == 0, 0.0, b * np.power(a, np.where(b == 0, 1.0, b - 1)))
    is_open = a > 0
    return in_base, np.where(
        is_open, y * np.log(np.where(is_open, a, 1.0)), np.where((a == 0) & (b > 0), 0.0, np.nan)
    )


def _either(is_first: Any) -> tuple[Any, Any]:
    """Return the derivatives of a function that returns one of two numbers."""
    return is_first * 1.0, ~is_first * 1.0


def _angle(y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    square = a * a + b * b
    share = np.where(square == 0, 0.0, 1.0 / square)  # 0 where there is no angle
    return share * b, -share * a


def _share(y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    share = np.exp(a - y)
    return share, np.exp(b - y)


# Maps ``(y, *arguments)`` to the derivative in each argument; None, or no row, if there is none.
PARTIALS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    np.add: lambda y, a, b: (1.0, 1.0),
    np.subtract: lambda y, a, b: (1.0, -1.0),
    np.multiply: lambda y, a, b: (b, a),
    np.divide: lambda y, a, b: (1.0 / b, -y / b),
    np.negative: lambda y, a: (-1.0,),
    np.positive: lambda y, a: (1.0,),
    np.reciprocal: lambda y, a: (-y * y,),
    np.square: lambda y, a: (2.0 * a,),
    np.exp: lambda y, a: (y,),
    np.exp2: lambda y, a: (y * np.log(2.0),),
    np.expm1: lambda y, a: (y + 1.0,),
    np.log: lambda y, a: (1.0 / a,),
    np.log2: lambda y, a: (1.0 / (a * np.log(2.0)),),
    np.log10: lambda y, a: (1.0 / (a * np.log(10.0)),),
    np.log1p: lambda y, a: (1.0 / (1.0 + a),),
    np.sqrt: lambda y, a: (0.5 / y,),
    np.cbrt: lambda y, a: (1.0 / (3.0 * y * y),),
    np.sin: lambda y, a: (np.cos(a),),
    np.cos: lambda y, a: (-np.sin(a),),
    np.tan: lambda y, a: (1.0 + y * y,),
    np.arcsin: lambda y, a: (1.0 / np.sqrt((1.0 - a) * (1.0 + a)),),
    np.arccos: lambda y, a: (-1.0 / np.sqrt((1.0 - a) * (1.0 + a)),),
    np.arctan: lambda y, a: (1.0 / (1.0 + a * a),),
    np.sinh: lambda y, a: (np.cosh(a),),
    np.cosh: lambda y, a: (np.sinh(a),),
    # 1 - tanh² would round to 0 where the derivative is not 0.
    np.tanh: lambda y, a: (np.cosh(np.clip(a, -350.0, 350.0)) ** -2.0,),
    np.arcsinh: lambda y, a: (1.0 / np.hypot(1.0, a),),
    np.power: _power,
    np.float_power: _power,
    np.absolute: lambda y, a: (np.sign(a),),
    np.fabs: lambda y, a: (np.sign(a),),
    np.maximum: lambda y, a, b: _either(a >= b),
    np.fmax: lambda y, a, b: _either(a >= b),
    np.minimum: lambda y, a, b: _either(a <= b),
    np.fmin: lambda y, a, b: _either(a <= b),
    np.hypot: lambda y, a, b: (np.where(y == 0, 0.0, a / y), np.where(y == 0, 0.0, b / y)),
    np.arctan2: _angle,
    np.logaddexp: _share,
    np.copysign: lambda y, a, b: (np.where(a == 0, 0.0, y / a), None),
    np.deg2rad: lambda y, a: (np.pi / 180,),
    np.rad2deg: lambda y, a: (180 / np.pi,),
    np.radians: lambda y, a: (np.pi / 180,),
    np.degrees: lambda y, a: (180 / np.pi,),
    np.fmod: lambda y, a, b: (1.0, -np.trunc(a / b)),
    np.remainder: lambda y, a, b: (1.0, -np.floor(a / b)),
    where: lambda y, condition, a, b: (None, *_either(condition != 0)),
    real_part: lambda y, a: (1.0,),
}
# Functions of scipy.special, by name.
_SPECIAL: dict[str, Callable[..., tuple[Any, ...]]] = {
    "expit": lambda y, a: (y * (1.0 - y),),
    "logit": lambda y, a: (1.0 / (a * (1.0 - a)),),
    "erf": lambda y, a: (2.0 / np.sqrt(np.pi) * np.exp(-a * a),),
    "erfc": lambda y, a: (-2.0 / np.sqrt(np.pi) * np.exp(-a * a),),
    "xlogy": lambda y, a, b: (np.where(a == 0, np.log(b), y / a), a / b),
}
# Functions whose derivative is 0 wherever they have one.
FLAT = {
    *(np.sign, np.floor, np.ceil, np.trunc, np.rint, np.heaviside, np.floor_divide),
    *(np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal),
    *(np.logical_and, np.logical_or, np.logical_not, np.logical_xor),
    *(np.isnan, np.isfinite, np.isinf, np.signbit),
}
# Functions whose results are true or false.
LOGICAL = {each for each in FLAT if each(*[0.5] * each.nin).dtype == bool}
# Functions that depend on only one argument.
SELECTIONS = {where, np.maximum, np.minimum, np.fmax, np.fmin}
# Functions that complex steps differentiate exactly, and whose derivatives are finite.
_ANALYTIC = {
    *(np.add, np.subtract, np.multiply, np.divide, np.negative, np.positive, np.reciprocal),
    *(np.square, np.exp, np.sin, np.cos, np.sinh, np.cosh, np.tanh),
}


def partials(function: Any, y: Vector, arguments: list[Any]) -> tuple[Any, ...]:
    """Return the derivatives of an elementwise function in its arguments."""
    if isinstance(function, Table):
        return (function.slope(arguments[0]),)
    found = PARTIALS.get(function) or _SPECIAL.get(function.__name__)
    return (None,) * len(arguments) if found is None else found(y, *arguments)


def is_known(function: Any) -> bool:
    """Return whether there are derivatives of an elementwise function."""
    is_own = isinstance(function, Table) or function in PARTIALS or function in FLAT
    return is_own or (function.__name__ in _SPECIAL and isinstance(function, np.ufunc))


# -- The tape --------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Some numbers, and what computes them.

    Attributes
    ----------
    function : callable, csr_array, int or None
        An elementwise function, or a matrix; the place of an argument; None for constants.
    inputs : tuple of ndarray of int
        The elements that it reads.
    begin, size : int
        The place of its first number, and how many numbers it has.
    """

    function: Any
    inputs: tuple[Ids, ...]
    begin: int
    size: int

    @property
    def own(self) -> slice:
        """The slice of its numbers."""
        return slice(self.begin, self.begin + self.size)

    @property
    def is_linear(self) -> bool:
        """Whether it is a product with a matrix."""
        return bool(sp.issparse(self.function))

    @property
    def is_leaf(self) -> bool:
        """Whether it reads nothing."""
        return not self.inputs


class Tape:
    """Parts in their order, while a function is read, and the values of all elements.

    Attributes
    ----------
    is_compiled : bool
        Whether Numba compiles the function, or one that it calls.
    """

    is_compiled = False

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.guards: list[tuple[Ids, Vector]] = []
        self.count, self._values = 0, np.empty(1024)
        self._is_constant = np.empty(1024, bool)
        self._numbers: dict[bytes, Ids] = {}
        self._end = time.monotonic() + _SECONDS

    def values(self, ids: Ids) -> Vector:
        """Return the values of elements."""
        return np.asarray(self._values[ids])

    def is_constant(self, ids: Ids) -> bool:
        """Return whether elements depend on no argument."""
        return bool(self._is_constant[ids].all())

    def add(self, function: Any, inputs: tuple[Ids, ...], values: Any) -> Ids:
        """Add a part, and return its elements, in the shape of its values."""
        values = np.asarray(values, np.float64)
        begin, end = self.count, self.count + values.size
        if len(self.parts) >= _PARTS or end > _ELEMENTS or time.monotonic() > self._end:
            raise RefusedError(f"more than {len(self.parts):,} operations")
        if end > len(self._values):
            size = max(end, 2 * len(self._values))
            self._values = np.resize(self._values, size)
            self._is_constant = np.resize(self._is_constant, size)
        self._values[begin:end] = values.reshape(-1)
        self._is_constant[begin:end] = function is None
        inputs = tuple(ids.reshape(-1).copy() for ids in inputs)
        self.parts.append(Part(function, inputs, begin, values.size))
        self.count = end
        return np.arange(begin, end).reshape(values.shape)

    def constant(self, given: Any) -> Ids:
        """Return the elements of a number or an array of numbers."""
        array = np.asarray(given)
        if array.dtype.kind not in "fiub":
            raise RefusedError(f"a constant of dtype {array.dtype}")
        if array.ndim:
            return self.add(None, (), array)
        key = np.float64(array).tobytes()
        if key not in self._numbers:
            self._numbers[key] = self.add(None, (), array)
        return self._numbers[key].copy()

    def guard(self, ids: Ids) -> None:
        """Record that the reading is valid only for these values of elements."""
        if not self.is_constant(ids):
            ids = ids.reshape(-1).copy()
            self.guards.append((ids, self.values(ids)))


class Graph:
    """A function that was read.

    Parameters
    ----------
    tape : Tape
        Its parts.
    results : ndarray of int
        The elements that it returned.

    Attributes
    ----------
    kept : dict
        Cached properties of its Jacobians.
    """

    def __init__(self, tape: Tape, results: Ids) -> None:
        self.parts, order = _grouped(tape.parts)
        self.first = np.empty(tape.count)
        self.first[order] = tape.values(np.arange(tape.count))
        self.results = order[results]
        guards = tape.guards or [(np.empty(0, np.int64), np.empty(0))]
        self.guards = order[np.concatenate([ids for ids, _ in guards])]
        self.expected = np.concatenate([values for _, values in guards])
        self._is_compiled = tape.is_compiled
        self._begins = np.array([part.begin for part in self.parts])
        self._kept: dict[int, tuple[NDArray[np.bool_], Pattern]] = {}
        self.kept: dict[tuple[str, int], Any] = {}

    def is_like(self, other: Graph) -> bool:
        """Return whether two graphs compute the same function."""
        if len(self.parts) != len(other.parts) or len(self.first) != len(other.first):
            return False
        return (
            np.array_equal(self.results, other.results)
            and np.array_equal(self.guards, other.guards)
            and np.array_equal(self.expected, other.expected)
            and all(
                self._is_same(a, b, other) for a, b in zip(self.parts, other.parts, strict=True)
            )
        )

    def _is_same(self, a: Part, b: Part, other: Graph) -> bool:
        if a.begin != b.begin or a.size != b.size or len(a.inputs) != len(b.inputs):
            return False
        if a.is_linear and b.is_linear:
            names = "indptr", "indices", "data"
            pairs = [(getattr(a.function, name), getattr(b.function, name)) for name in names]
            if not all(np.array_equal(x, y) for x, y in pairs):
                return False
        elif a.function is None and b.function is None:
            if self.first[a.own].tobytes() != other.first[b.own].tobytes():
                return False
        elif a.is_linear or b.is_linear or a.function != b.function:
            return False
        return all(np.array_equal(x, y) for x, y in zip(a.inputs, b.inputs, strict=True))

    @cached_property
    def places(self) -> list[list[slice | Ids]]:
        """The places that each part reads, as a slice where possible; one place if all read it."""
        return [[_place(ids) for ids in part.inputs] for part in self.parts]

    @cached_property
    def is_smooth(self) -> bool:
        """Whether complex steps are exact: all parts behind the results are smooth."""
        return all(self._is_smooth(self.parts[k]) for k in self._computing(self.results))

    @cached_property
    def guarding(self) -> list[int]:
        """The numbers of the parts that guards need, in order."""
        return self._computing(self.guards)

    def _computing(self, ids: Ids) -> list[int]:
        """Return the numbers of the parts that compute some elements, in order."""
        is_read = np.zeros(len(self.parts), bool)
        is_read[self.owners(ids)] = True
        for k in range(len(self.parts))[::-1]:
            if is_read[k]:
                for each in self.parts[k].inputs:
                    is_read[self.owners(each)] = True
        return [int(k) for k in np.flatnonzero(is_read)]

    def _is_smooth(self, part: Part) -> bool:
        if part.function is not np.power:
            return part.is_leaf or part.is_linear or part.function in _ANALYTIC
        # Powers with small integers are products, except in functions that Numba compiles.
        exponents = self.first[part.inputs[1]]
        owners = np.unique(self.owners(part.inputs[1]))
        is_constant = all(self.parts[k].function is None for k in owners)
        is_small = bool(np.isin(exponents, np.arange(1, 17)).all())
        return is_constant and is_small and not self._is_compiled

    def owners(self, ids: Ids) -> Ids:
        """Return the part of each element."""
        return np.searchsorted(self._begins, ids, "right") - 1

    def depends(self, where: int) -> NDArray[np.bool_]:
        """Return which parts depend on an argument."""
        return self._of(where)[0]

    def pattern(self, where: int) -> Pattern:
        """Return which results depend on which numbers of an argument."""
        return self._of(where)[1]

    def _of(self, where: int) -> tuple[NDArray[np.bool_], Pattern]:
        if where not in self._kept:
            self._kept[where] = self._dependence(where)
        return self._kept[where]

    def _dependence(self, where: int) -> tuple[NDArray[np.bool_], Pattern]:
        is_argument = [part.is_leaf and part.function == where for part in self.parts]
        size = sum(part.size for part, own in zip(self.parts, is_argument, strict=True) if own)
        rows: list[Any] = []
        for part, own in zip(self.parts, is_argument, strict=True):
            found = sp.csr_array((part.size, size), dtype=np.int8)
            if own:
                found = sp.eye_array(size, dtype=np.int8, format="csr")
            elif part.is_linear or part.function not in FLAT:
                for ids in part.inputs:
                    more = self._rows(rows, ids)
                    if part.is_linear:
                        matrix = part.function
                        about = np.ones(matrix.nnz, np.int8), matrix.indices, matrix.indptr
                        more = sp.csr_array(about, matrix.shape) @ more
                    found = found + more if found.nnz else more
                found.data[:] = 1
            rows.append(found)
        depends = np.array([found.nnz > 0 for found in rows])
        pattern = self._rows(rows, self.results)
        pattern.sort_indices()
        return depends, Pattern(pattern.indptr, pattern.indices, pattern.shape)

    def _rows(self, rows: list[Any], ids: Ids) -> Any:
        """Return a copy of the rows of elements, taken from their parts."""
        owners = self.owners(ids)
        parts = np.unique(owners)
        begins = np.cumsum([0, *(self.parts[k].size for k in parts)])
        places = begins[np.searchsorted(parts, owners)] + ids - self._begins[owners]
        if len(parts) > 1:
            return sp.vstack([rows[k] for k in parts], "csr")[places]
        return rows[parts[0]][places] if len(parts) else sp.csr_array((0, rows[0].shape[1]))


def _grouped(parts: list[Part]) -> tuple[list[Part], Ids]:
    """Join scalars that one function computes from known elements; return the new places.

    So a loop over elements in the user's code is computed at once.
    """
    count = parts[-1].begin + parts[-1].size if parts else 0
    levels = np.zeros(count, np.int64)
    groups: dict[Any, list[Part]] = {}
    for k, part in enumerate(parts):
        level = 1 + max((int(levels[ids].max(initial=0)) for ids in part.inputs), default=-1)
        levels[part.own] = level
        is_scalar = part.size == 1 and not part.is_linear and not isinstance(part.function, int)
        key = (part.function, len(part.inputs)) if is_scalar else k
        groups.setdefault((level, key), []).append(part)
    order, joined, begin = np.empty(count, np.int64), [], 0
    for (_, _), members in sorted(groups.items(), key=lambda item: item[0][0]):
        first = begin
        for part in members:
            order[part.own] = np.arange(begin, begin + part.size)
            begin += part.size
        columns = zip(*(part.inputs for part in members), strict=True)
        inputs = tuple(order[np.concatenate(ids)] for ids in columns)
        joined.append(Part(members[0].function, inputs, first, begin - first))
    return joined, order


# -- Evaluation ------------------------------------------------------------------------------------


class Evaluation:
    """The values of a graph at some arguments, and derivatives there.

    Parameters
    ----------
    graph : Graph
        The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self._values, self._places = graph, graph.first.copy(), graph.places
        self._views = [[self._values[place] for place in each] for each in self._places]
        self._partials: dict[int, tuple[Any, ...]] = {}
        self._sums: dict[tuple[int, int], Any] = {}

    def holds(self, arguments: Sequence[Any]) -> bool:
        """Return whether every guard holds; compute only what guards need."""
        self._compute(self.graph.guarding, arguments)
        return bool((self._values[self.graph.guards] == self.graph.expected).all())

    def at(self, arguments: Sequence[Any]) -> None:
        """Compute all values."""
        self._compute(range(len(self.graph.parts)), arguments)

    def _compute(self, parts: Iterable[int], arguments: Sequence[Any]) -> None:
        self._partials.clear()
        with np.errstate(all="ignore"):
            for k in parts:
                part = self.graph.parts[k]
                out = self._values[part.own]
                if part.is_leaf:
                    if part.function is not None:
                        out[:] = np.ravel(arguments[part.function])
                elif part.is_linear:
                    out[:] = part.function @ self._values[part.inputs[0]]
                elif isinstance(part.function, np.ufunc):
                    part.function(*self._read(k), out=out, casting="unsafe")
                else:
                    out[:] = part.function(*self._read(k))

    def _read(self, k: int) -> list[Vector]:
        """Return the numbers that a part reads."""
        pairs = zip(self._places[k], self._views[k], strict=True)
        return [view if isinstance(place, slice) else self._values[place] for place, view in pairs]

    @property
    def results(self) -> Vector:
        """What the function returned."""
        return np.asarray(self._values[self.graph.results])

    def rounding(self) -> Vector:
        """Return a first-order bound for the rounding errors of the results, over all parts."""
        errors = np.zeros(len(self._values))
        with np.errstate(all="ignore"):
            for k, part in enumerate(self.graph.parts):
                own = _EPS * np.abs(self._values[part.own])
                if part.is_linear:
                    read = np.abs(self._values[part.inputs[0]])
                    counts = np.diff(part.function.indptr)
                    own += abs(part.function) @ errors[part.inputs[0]]
                    own += _EPS * counts * (abs(part.function) @ read)
                elif part.inputs:
                    for place, by in zip(self._places[k], self._slopes(k), strict=True):
                        if by is not None:
                            own += np.nan_to_num(np.abs(by) * errors[place], nan=0.0)
                errors[part.own] = own
        return np.asarray(errors[self.graph.results])

    def _slopes(self, k: int) -> tuple[Any, ...]:
        """Return the derivatives of a part in the numbers it reads."""
        if k not in self._partials:
            part = self.graph.parts[k]
            self._partials[k] = partials(part.function, self._values[part.own], self._read(k))
        return self._partials[k]

    def along(self, where: int, seeds: Any) -> Any:
        """Return derivatives of all results along columns of directions of an argument."""
        graph = self.graph
        slopes = np.zeros((len(self._values), seeds.shape[1]))
        with np.errstate(all="ignore"):
            for k in np.flatnonzero(graph.depends(where)):
                part = graph.parts[k]
                if part.is_leaf:
                    slopes[part.own] = seeds
                elif part.is_linear:
                    slopes[part.own] = part.function @ slopes[part.inputs[0]]
                else:
                    slopes[part.own] = self._along(int(k), slopes)
        return slopes[graph.results]

    def _along(self, k: int, slopes: Any) -> Any:
        """Return derivatives of a part from those of the numbers it reads."""
        found: Any = 0.0
        for place, by in zip(self._places[k], self._slopes(k), strict=True):
            if by is not None:
                more = _weighed(by, slopes[place])
                if self.graph.parts[k].function in SELECTIONS:  # the branch not taken has any value
                    more = np.where(np.reshape(by, (-1, 1)) == 0, 0.0, more)
                found = found + more
        return found

    def back(self, where: int, above: Any) -> Any:
        """Return gradients in an argument, of columns of gradients in the results."""
        graph = self.graph
        grads = np.zeros((len(self._values), above.shape[1]))
        np.add.at(grads, graph.results, above)
        found = np.zeros((0, above.shape[1]))
        with np.errstate(all="ignore"):
            for k in np.flatnonzero(graph.depends(where))[::-1]:
                part = graph.parts[k]
                own = grads[part.own]
                if part.is_leaf:
                    found = own
                elif part.is_linear:
                    self._add_to(grads, k, 0, part.function.T @ own)
                else:
                    for n, by in enumerate(self._slopes(k)):
                        if by is not None:
                            self._add_to(grads, k, n, _weighed(by, own))
        return found

    def _add_to(self, grads: Any, k: int, n: int, more: Any) -> None:
        """Add gradients to those of the elements that a part reads as its `n`-th argument."""
        place, ids = self._places[k][n], self.graph.parts[k].inputs[n]
        if isinstance(place, slice):
            is_one = place.stop - place.start < len(ids)
            grads[place] += more.sum(0, keepdims=True) if is_one else more
            return
        if (k, n) not in self._sums:
            to, places = np.unique(ids, return_inverse=True)
            ones = np.ones(len(ids)), (places.reshape(-1), np.arange(len(ids)))
            self._sums[k, n] = to, sp.csr_array(ones, (len(to), len(ids)))
        to, sums = self._sums[k, n]
        grads[to] += sums @ more


def _weighed(by: Any, slopes: Any) -> Any:
    """Return slopes times a derivative; a slope of 0 gives 0, even times infinity."""
    weights = np.reshape(by, (-1, 1))
    found = weights * slopes
    return found if np.isfinite(weights).all() else np.where(slopes == 0, 0.0, found)


def _place(ids: Ids) -> slice | Ids:
    """Return a slice for consecutive or single elements; otherwise their places."""
    if len(ids):
        if (ids == ids[0]).all():
            return slice(int(ids[0]), int(ids[0]) + 1)
        if (np.diff(ids) == 1).all():
            return slice(int(ids[0]), int(ids[0]) + len(ids))
    return ids
