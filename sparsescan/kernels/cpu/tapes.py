"""Evaluate a function that was read, by one kernel for all functions, without compiling it.

A tape is an ordered list of operations on vectors. Each operation reads elements of the vector of
all values, and writes its results there. If asked to, it also writes its derivatives. All other
derivatives are sums of products of these, along lists of dependences:

* forward, of results in the unknowns: each element has a tangent for each unknown that it depends
  on, and ``T[i] = Σ ∂[k] T[j]`` over a list of ``(i, k, j)`` without structural zeros;
* in reverse, in all arguments: ``G[j] += ∂[k] G[i]`` over the edges ``(i, k, j)`` of the tape.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compile import njit

# Kernels that allocate nothing count no references.
PLAIN: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


class Tables(NamedTuple):
    """A tape in the form of kernels.

    Attributes
    ----------
    operations : ndarray of uint64, shape (count, 7)
        A code; the start and number of its values; the start in `reads` of the places of each of
        three arguments (for a product with a matrix: of its columns and of its row starts); and the
        start of its derivatives.
    reads : ndarray of uint32
        Places of elements.
    sums : ndarray of uint64
        The start of each tangent's terms; the first tangents are 1 and have no terms.
    terms : ndarray of uint64, shape (count, 3)
        A derivative and a tangent for each term, and whether it belongs to a choice: if its
        derivative is 0, the tangent may have any value.
    entries : ndarray of uint64, shape (count, 2)
        Tangents that are entries of the Jacobian, and their places in a matrix.
    edges : ndarray of uint64, shape (count, 3)
        Elements, derivatives, and elements that are read.
    results, guards : ndarray of uint64
        The elements that the function returns, and those that must have expected values.
    expected : ndarray
        The expected values of guards.
    leaves : ndarray of int64, shape (5, 2)
        The start and length of the state, the old state, the time, the step's length and the
        parameters.
    constant : int
        How many operations, the first ones, depend only on parameters.
    """

    operations: NDArray[np.uint64]
    reads: NDArray[np.uint32]
    sums: NDArray[np.uint64]
    terms: NDArray[np.uint64]
    entries: NDArray[np.uint64]
    edges: NDArray[np.uint64]
    results: NDArray[np.uint64]
    guards: NDArray[np.uint64]
    expected: NDArray[np.float64]
    leaves: NDArray[np.int64]
    constant: int


class Values(NamedTuple):
    """Numbers of a tape.

    Attributes
    ----------
    elements, slopes, tangents, grads : ndarray
        The values of elements, the derivatives of operations, tangents, and gradients of elements.
    """

    elements: NDArray[np.float64]
    slopes: NDArray[np.float64]
    tangents: NDArray[np.float64]
    grads: NDArray[np.float64]


# Codes of operations. Codes before `_RARE` have their own loops.
_NAMES = (
    *("positive", "add", "subtract", "multiply", "divide", "negative", "square", "product"),
    *("exp", "log", "power", "sqrt", "sin", "cos", "tanh", "absolute", "maximum", "minimum"),
    *("where", "reciprocal", "exp2", "expm1", "log2", "log10", "log1p", "cbrt", "tan", "arcsin"),
    *("arccos", "arctan", "sinh", "cosh", "arcsinh", "fmax", "fmin", "hypot", "arctan2"),
    *("copysign", "deg2rad", "rad2deg", "fmod", "remainder", "expit", "erf", "erfc", "logaddexp"),
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "logical_and"),
    *("logical_or", "logical_not", "logical_xor", "isnan", "isfinite", "sign", "floor", "ceil"),
    *("trunc", "rint", "heaviside"),
)
CODES: dict[str, int] = {name: code for code, name in enumerate(_NAMES)}
CODES |= {"float_power": CODES["power"], "fabs": CODES["absolute"]}
CODES |= {"radians": CODES["deg2rad"], "degrees": CODES["rad2deg"]}
_RARE, _PRODUCT = CODES["exp"], CODES["product"]


@njit(**PLAIN)
def _number(is_true: bool) -> float:
    return 1.0 if is_true else 0.0


@njit(**PLAIN)
def _power(x: float, y: float) -> float:
    if y == 2.0:
        return x * x
    if y == 3.0:
        return x * x * x
    if y == 4.0:
        return (x * x) * (x * x)
    if y == 1.0:
        return x
    return math.pow(x, y)


@njit(**PLAIN)
def _value(code: int, x: float, y: float, z: float) -> float:
    """Return the value of a rare operation."""
    if code == 8:
        return math.exp(x)
    if code == 9:
        return np.log(x)
    if code == 10:
        return _power(x, y)
    if code == 11:
        return np.sqrt(x)
    if code == 12:
        return math.sin(x)
    if code == 13:
        return math.cos(x)
    if code == 14:
        return math.tanh(x)
    if code == 15:
        return abs(x)
    if code == 16:
        return x if x >= y or x != x else y
    if code == 17:
        return x if x <= y or x != x else y
    if code == 18:
        return y if x != 0.0 else z
    if code == 19:
        return 1.0 / x
    if code == 20:
        return np.exp2(x)
    if code == 21:
        return math.expm1(x)
    if code == 22:
        return np.log2(x)
    if code == 23:
        return np.log10(x)
    if code == 24:
        return np.log1p(x)
    if code == 25:
        return np.cbrt(x)
    if code == 26:
        return math.tan(x)
    if code == 27:
        return np.arcsin(x)
    if code == 28:
        return np.arccos(x)
    if code == 29:
        return math.atan(x)
    if code == 30:
        return math.sinh(x)
    if code == 31:
        return math.cosh(x)
    if code == 32:
        return math.asinh(x)
    if code == 33:
        return x if x >= y or y != y else y
    if code == 34:
        return x if x <= y or y != y else y
    if code == 35:
        return math.hypot(x, y)
    if code == 36:
        return math.atan2(x, y)
    if code == 37:
        return math.copysign(x, y)
    if code == 38:
        return x * (math.pi / 180)
    if code == 39:
        return x * (180 / math.pi)
    if code == 40:
        return np.fmod(x, y)
    if code == 41:
        return np.remainder(x, y)
    if code == 42:
        return 1.0 / (1.0 + math.exp(-x))
    if code == 43:
        return math.erf(x)
    if code == 44:
        return math.erfc(x)
    if code == 45:
        return np.logaddexp(x, y)
    if code == 46:
        return _number(x < y)
    if code == 47:
        return _number(x <= y)
    if code == 48:
        return _number(x > y)
    if code == 49:
        return _number(x >= y)
    if code == 50:
        return _number(x == y)
    if code == 51:
        return _number(x != y)
    if code == 52:
        return _number(x != 0.0 and y != 0.0)
    if code == 53:
        return _number(x != 0.0 or y != 0.0)
    if code == 54:
        return _number(x == 0.0)
    if code == 55:
        return _number((x != 0.0) != (y != 0.0))
    if code == 56:
        return _number(x != x)
    if code == 57:
        return _number(abs(x) < np.inf)
    if code == 58:
        return np.sign(x)
    if code == 59:
        return np.floor(x)
    if code == 60:
        return np.ceil(x)
    if code == 61:
        return np.trunc(x)
    if code == 62:
        return np.rint(x)
    if code == 63:
        return x if x != x else (0.0 if x < 0.0 else (1.0 if x > 0.0 else y))
    return np.nan


@njit(**PLAIN)
def _derivatives(code: int, v: float, x: float, y: float) -> tuple[float, float, float]:
    """Return the derivatives of a rare operation of value `v` in its arguments."""
    a, b, c = 0.0, 0.0, 0.0
    if code == 8:
        a = v
    elif code == 9:
        a = 1.0 / x
    elif code == 10:
        if y != 0.0:
            a = y * _power(x, y - 1.0)
        if x > 0.0:
            b = v * math.log(x)
        elif not (x == 0.0 and y > 0.0):
            b = np.nan
    elif code == 11:
        a = 0.5 / v
    elif code == 12:
        a = math.cos(x)
    elif code == 13:
        a = -math.sin(x)
    elif code == 14:
        a = 1.0 / math.cosh(min(max(x, -350.0), 350.0)) ** 2
    elif code == 15:
        a = np.sign(x)
    elif code == 16 or code == 33:
        a = _number(x >= y)
        b = 1.0 - a
    elif code == 17 or code == 34:
        a = _number(x <= y)
        b = 1.0 - a
    elif code == 18:
        b = _number(x != 0.0)
        c = 1.0 - b
    elif code == 19:
        a = -v * v
    elif code == 20:
        a = v * math.log(2.0)
    elif code == 21:
        a = v + 1.0
    elif code == 22:
        a = 1.0 / (x * math.log(2.0))
    elif code == 23:
        a = 1.0 / (x * math.log(10.0))
    elif code == 24:
        a = 1.0 / (1.0 + x)
    elif code == 25:
        a = 1.0 / (3.0 * v * v)
    elif code == 26:
        a = 1.0 + v * v
    elif code == 27:
        a = 1.0 / np.sqrt((1.0 - x) * (1.0 + x))
    elif code == 28:
        a = -1.0 / np.sqrt((1.0 - x) * (1.0 + x))
    elif code == 29:
        a = 1.0 / (1.0 + x * x)
    elif code == 30:
        a = math.cosh(x)
    elif code == 31:
        a = math.sinh(x)
    elif code == 32:
        a = 1.0 / math.hypot(1.0, x)
    elif code == 35:
        if v != 0.0:
            a, b = x / v, y / v
    elif code == 36:
        square = x * x + y * y
        if square != 0.0:
            a, b = y / square, -x / square
    elif code == 37:
        if x != 0.0:
            a = v / x
    elif code == 38:
        a = math.pi / 180
    elif code == 39:
        a = 180 / math.pi
    elif code == 40:
        a, b = 1.0, -np.trunc(x / y)
    elif code == 41:
        a, b = 1.0, -np.floor(x / y)
    elif code == 42:
        a = v * (1.0 - v)
    elif code == 43:
        a = 2.0 / math.sqrt(math.pi) * math.exp(-x * x)
    elif code == 44:
        a = -2.0 / math.sqrt(math.pi) * math.exp(-x * x)
    elif code == 45:
        a, b = math.exp(x - v), math.exp(y - v)
    return a, b, c


@njit(**PLAIN)
def _compute(
    operations: Any, reads: Any, v: Any, d: Any, begin: int, end: int, slopes: bool
) -> None:
    # Few arguments and unsigned indices: checks of signs would take longer than most operations.
    for k in range(begin, end):
        code, out, size = operations[k, 0], operations[k, 1], operations[k, 2]
        p, q, at = operations[k, 3], operations[k, 4], operations[k, 6]
        if code == 0:
            for i in range(size):
                v[out + i] = v[reads[p + i]]
        elif code == 1:
            for i in range(size):
                v[out + i] = v[reads[p + i]] + v[reads[q + i]]
        elif code == 2:
            for i in range(size):
                v[out + i] = v[reads[p + i]] - v[reads[q + i]]
        elif code == 3:
            for i in range(size):
                x, y = v[reads[p + i]], v[reads[q + i]]
                v[out + i] = x * y
                if slopes:
                    d[at + i], d[at + size + i] = y, x
        elif code == 4:
            for i in range(size):
                x, y = v[reads[p + i]], v[reads[q + i]]
                v[out + i] = x / y
                if slopes:
                    d[at + i], d[at + size + i] = 1.0 / y, -(x / y) / y
        elif code == 5:
            for i in range(size):
                v[out + i] = -v[reads[p + i]]
        elif code == 6:
            for i in range(size):
                x = v[reads[p + i]]
                v[out + i] = x * x
                if slopes:
                    d[at + i] = 2.0 * x
        elif code == _PRODUCT:
            for i in range(size):
                total = 0.0
                for j in range(reads[q + i], reads[q + i + 1]):
                    total += d[at + j] * v[reads[p + j]]
                v[out + i] = total
        else:
            r, other = operations[k, 5], np.int64(code)
            for i in range(size):
                x, y, z = v[reads[p + i]], v[reads[q + i]], v[reads[r + i]]
                found = _value(other, x, y, z)
                v[out + i] = found
                if slopes:
                    d[at + i], d[at + size + i], d[at + size + size + i] = _derivatives(
                        other, found, x, y
                    )


@njit(**PLAIN)
def evaluate(tables: Any, values: Any, begin: int, end: int, slopes: bool) -> None:
    """Compute some operations, and with `slopes` their derivatives.

    Derivatives of sums and of products with a matrix are constant, and set at the beginning.
    """
    operations, reads = tables.operations, tables.reads
    _compute(operations, reads, values.elements, values.slopes, begin, end, slopes)


@njit(**PLAIN)
def holds(tables: Any, values: Any) -> bool:
    """Return whether all guards are as expected."""
    for k in range(len(tables.guards)):
        if values.elements[tables.guards[k]] != tables.expected[k]:
            return False
    return True


@njit(**PLAIN)
def differentiate(tables: Any, values: Any) -> None:
    """Compute tangents from the derivatives of operations."""
    sums, terms, t, d = tables.sums, tables.terms, values.tangents, values.slopes
    first = len(t) - (len(sums) - 1)
    for i in range(len(sums) - 1):
        total = 0.0
        for j in range(sums[i], sums[i + 1]):
            by, slope = d[terms[j, 0]], t[terms[j, 1]]
            if slope != 0.0 and (by != 0.0 or terms[j, 2] == 0):
                total += by * slope
        t[first + i] = total


@njit(**PLAIN)
def pull_back(tables: Any, values: Any) -> None:
    """Compute gradients of all elements from those of results, which are already set."""
    g, d, edges = values.grads, values.slopes, tables.edges
    for k in range(len(edges) - 1, -1, -1):
        above = g[edges[k, 0]]
        if above != 0.0:
            g[edges[k, 2]] += d[edges[k, 1]] * above
