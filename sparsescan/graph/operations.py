"""Symbols of vectors, linear maps of them, and the one table of elementwise operations.

A function is traced on symbols; each is a vector with one number per unit. Equal expressions are
one :class:`Node`, so common terms are computed once. A row of `OPERATIONS` defines an operation:
its text for each target, its derivative, and its bounds.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..checks import check_count
from ..errors import short
from ..locks import new_lock
from .tracing import is_tracing, refuse


class Node:
    """A vector with one number per unit, as an operation on other vectors.

    Attributes
    ----------
    operation : str
        A name of `OPERATIONS`, ``number``, ``product`` for a linear map, or the kind of a leaf.
        While a function is traced, also ``joined`` for vectors of units one after the other.
    arguments : tuple of Node
        The vectors that the operation reads.
    details : tuple
        What else identifies the node: the value of a number, the front end's name for a leaf or for
        the matrix of a linear map, or a ``Reduction`` instead of a matrix.
    is_one : bool
        Whether it is one number, the same for all units.
    """

    __slots__ = ("__weakref__", "arguments", "details", "is_one", "operation")

    operation: str
    arguments: tuple[Node, ...]
    details: tuple[Any, ...]
    is_one: bool

    def __add__(self, other: Any) -> Node:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Node:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Node:
        return apply("subtract", self, other)

    def __rsub__(self, other: Any) -> Node:
        return apply("subtract", other, self)

    def __mul__(self, other: Any) -> Node:
        return apply("multiply", self, other)

    def __rmul__(self, other: Any) -> Node:
        return apply("multiply", other, self)

    def __truediv__(self, other: Any) -> Node:
        return apply("divide", self, other)

    def __rtruediv__(self, other: Any) -> Node:
        return apply("divide", other, self)

    def __neg__(self) -> Node:
        return apply("negative", self)

    def __pos__(self) -> Node:
        return self

    def __abs__(self) -> Node:
        return apply("absolute", self)

    def __pow__(self, exponent: Any) -> Node:
        return _power(self, exponent)

    def __lt__(self, other: Any) -> Node:
        return apply("less", self, other)

    def __le__(self, other: Any) -> Node:
        return apply("less_equal", self, other)

    def __gt__(self, other: Any) -> Node:
        return apply("less", other, self)

    def __ge__(self, other: Any) -> Node:
        return apply("less_equal", other, self)

    def __eq__(self, other: object) -> bool:
        if is_tracing():
            refuse("a comparison by == or !=", "<= and >=, such as (a >= b) * (a <= b)")
        return self is other

    __hash__ = object.__hash__

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Node:
        """Return what a function of NumPy of one number a unit is of vectors; refuse others."""
        if ufunc.__name__ == "matmul":
            refuse("@", "matrix")
        if method == "reduce":
            refuse(f"numpy.{ufunc.__name__}.reduce, which is over units", "sums")
        compute = getattr(operator, _OPERATORS.get(ufunc.__name__, ""), None)
        if ufunc.__name__ in NUMPYS:
            compute = functools.partial(apply, ufunc.__name__)
        has_axes = any(getattr(x, "ndim", 0) for x in inputs if not isinstance(x, Node))
        if compute is None or method != "__call__" or options or has_axes:
            refuse("a call of NumPy", "functions")
        result: Node = compute(*(x if isinstance(x, Node) else float(x) for x in inputs))
        return result

    def __array_function__(self, function: Any, _: Any, given: Any, options: Any) -> Any:
        """Return what ``np.where`` and some others are of vectors; refuse other functions."""
        name, is_whole = getattr(function, "__name__", ""), len(given) == 3 and not options
        if name in ("sum", "mean", "norm", "max", "amax"):
            return _reduced(name, *given, **options)
        if name in _JOINING:
            return _JOINING[name](*given, **options)
        if name == "where" and is_whole:
            return apply("where", *given)
        if name != "clip" or not is_whole:
            _refuse_function(function, "a call of NumPy")
        a, low, high = map(as_node, given)
        return apply("where", a <= low, low, apply("where", high <= a, high, a))

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        _refuse_function(function, "a call of PyTorch")

    def sum(self, axis: int | None = None, **options: Any) -> Node:
        """Return the sum over all units, or over those of each of `heads`; each unit gets it."""
        return _reduced("sum", self, axis, **options)

    def mean(self, axis: int | None = None, **options: Any) -> Node:
        """Return the mean over all units, or over those of each of `heads`; each unit gets it."""
        return _reduced("mean", self, axis, **options)

    def max(self, axis: int | None = None, **options: Any) -> Node:
        """Return the largest of all units, or of those of each of `heads`; each unit gets it.

        Where several are the largest, each has as much of the gradient.
        """
        return _reduced("max", self, axis, **options)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Node):
            refuse("@ of two vectors, which is a sum over units", "sums")
        if not callable(other):
            refuse("@", "matrix")
        return NotImplemented  # the matrix's own method says how to call it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _REDUCTIONS:
            refuse(f"the attribute {name!r}, which is over units", "sums")
        refuse(f"the attribute {name!r}", "functions", name)

    def __reduce__(self) -> Any:
        return _unpickled, (self.operation, self.arguments, self.details)

    def __repr__(self) -> str:
        return self._text(_DEPTH)

    def _text(self, depth: int) -> str:
        """Return the expression; what is nested deeper than `depth` is left out."""
        inner = [*map(repr, self.details)]
        inner += [vector._text(depth - 1) if depth else "…" for vector in self.arguments]
        return f"{self.operation}({', '.join(inner)})"


# How deep expressions are shown. The text of a vector that is read twice is there twice, so that
# texts may double with each level.
_DEPTH = 8
# Operations that NumPy has by the same name, elementwise.
NUMPYS = (
    *("absolute", "arctan2", "cos", "exp", "expm1", "log", "log1p", "maximum", "minimum", "sin"),
    *("sqrt", "tanh"),
)
# The functions that NumPy calls for an operator with one of its numbers on the left.
_OPERATORS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "truediv",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
}
# Names of functions of NumPy and PyTorch that reduce all units to one number.
_REDUCTIONS = {
    *("all", "amin", "any", "argmax", "argmin", "cumprod", "cumsum", "dot", "layer_norm"),
    *("logsumexp", "max", "mean", "median", "min", "norm", "prod", "softmax", "std", "sum", "var"),
}
# For each method that symbols refuse: what in a traced function calls it, and what to write
# instead, as a text or as the name of a text of :class:`Front`.
_REFUSED = {
    "bool": ("a branch on a number that only a step has", "np.where(condition, a, b)"),
    "iter": ("a loop over units", "elementwise"),
    "contains": ("a loop over units", "elementwise"),
    "len": ("the length of a vector", "elementwise"),
    "getitem setitem delitem": ("an index of a unit", "elementwise"),
    "float int index complex round trunc floor ceil": ("a conversion to a number", "functions"),
    "format": ("a text of a number that only a step has", "it without"),
    "rmatmul": ("@", "matrix"),
    "rpow": ("a number to the power of a vector", "np.exp(vector * math.log(base))"),
    "and rand or ror xor rxor invert": (
        "& or |, ^, ~",
        "a * b for both of two conditions, np.maximum(a, b) for one of them, 1 - a for none",
    ),
    "mod rmod": (
        "%",
        "np.where(a >= b, a - b, a) to take b off once; np.sin, np.cos need no remainder",
    ),
    "floordiv rfloordiv divmod rdivmod lshift rlshift rshift rrshift": (
        "an operation of integers",
        "+ - * /, or np.where(condition, a, b)",
    ),
    "call": ("a call of a vector", "product"),
    "array": ("a call of NumPy", "functions"),
}


def _refuse_function(function: Any, what: str) -> NoReturn:
    name = getattr(function, "__name__", "")
    if name in _REDUCTIONS:
        refuse(f"{what}, {name}, which is over units", "sums")
    refuse(what, "functions")


def _refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    return lambda *_, **__: refuse(what, instead)


for names, texts in _REFUSED.items():
    for name in names.split():
        setattr(Node, f"__{name}__", _refusing(*texts))


_interned: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
_lock = new_lock()


def node(operation: str, *arguments: Node, details: tuple[Any, ...] = ()) -> Node:
    """Return the one node with this operation, these arguments and details, not simplified."""
    key = operation, arguments, details
    with _lock:
        found = _interned.get(key)
        if found is None:
            found = object.__new__(Node)
            found.operation, found.arguments, found.details = key
            found.is_one = _is_one(found)
            _interned[key] = found
        return found


def _is_one(vector: Node) -> bool:
    if vector.operation == "product":
        return isinstance(vector.details[0], Reduction) and vector.details[0].heads == 1
    if not vector.arguments:
        return vector.operation in ("number", "scalar")
    return vector.operation != "joined" and all(each.is_one for each in vector.arguments)


def symbol(kind: str, *details: Any) -> Node:
    """Return the leaf of a kind, with the details that a front end gives it."""
    return node(kind, details=details)


class Reduction(NamedTuple):
    """A reduction over the units of each head, in the place of a matrix in a ``product``.

    Each unit gets what its head has. All but the maximum are products with a constant matrix, which
    is its own transpose.

    Attributes
    ----------
    operation : str
        ``"sum"``, ``"mean"`` or ``"maximum"``; no gradient passes through the last.
    heads : int
        How many heads there are, with as many units each.
    """

    operation: str
    heads: int

    @property
    def is_linear(self) -> bool:
        """Whether it is a product with a constant matrix."""
        return self.operation != "maximum"

    def __str__(self) -> str:
        return self.operation if self.heads == 1 else f"{self.operation} of {self.heads} heads"

    def matrix(self, units: int) -> NDArray[np.float64]:
        """Return the matrix, for so many units; of a maximum where it reads what."""
        size = units // self.heads
        value = 1 / size if self.operation == "mean" else 1.0
        return np.kron(np.eye(self.heads), np.full((size, size), value))


def reduce_units(operation: str, vector: Any, heads: int) -> Node:
    """Return, for each unit, a reduction over all units of its head."""
    vector, heads = as_node(vector), check_count("heads", heads, 1)
    if vector.operation == "input":
        refuse(f"the {operation} of the input", "it in the inputs, for all steps at once")
    if vector.operation == "joined":
        return _reduce_joined(operation, vector, heads)
    return node("product", vector, details=(Reduction(operation, heads), 0, False))


def _reduced(operation: str, vector: Any, axis: Any = None, **options: Any) -> Node:
    """Return a reduction as NumPy's functions and methods are asked for it: over the last axis."""
    heads, _ = options.pop("heads", 1), options.pop("keepdims", True)
    if options or axis not in (None, -1):
        refuse(f"{operation} with arguments other than axis=-1 and heads", f"{operation}(a)")
    if operation in ("max", "amax"):
        largest = apply("stop_gradient", reduce_units("maximum", vector, heads))
        is_largest = apply("less_equal", largest, vector)
        share = apply("stop_gradient", is_largest / reduce_units("sum", is_largest, heads))
        return apply("surrogate", largest, reduce_units("sum", share * vector, heads), 1)
    if operation != "norm":
        return reduce_units(operation, vector, heads)
    squares = reduce_units("sum", as_node(vector) * vector, heads)
    is_zero = apply("less_equal", squares, 0)
    return apply("where", is_zero, 0, apply("sqrt", apply("where", is_zero, 1, squares)))


# -- Vectors one after the other ------------------------------------------------------------------


def joined(vectors: Sequence[Node]) -> Node:
    """Return vectors of units one after the other, as a vector of several parts.

    What is elementwise is computed part by part, and a reduction over all parts, so that products,
    states and derivatives have vectors of units alone.
    """
    parts = [part for each in vectors for part in _parts(each)]
    return parts[0] if len(parts) == 1 else node("joined", *parts)


def _parts(vector: Node) -> tuple[Node, ...]:
    return vector.arguments if vector.operation == "joined" else (vector,)


def _concatenate(vectors: Sequence[Any], axis: int = 0, **options: Any) -> Node:
    nodes = [*map(as_node, vectors)]
    if options or axis not in (0, -1) or any(value_of(each) is not None for each in nodes):
        refuse("a concatenation of numbers, or with other arguments", "np.concatenate([a, b])")
    return joined(nodes)


def _split(vector: Node, indices_or_sections: Any, axis: int = 0) -> list[Node]:
    """Return equal sections of a vector of several parts; arguments are NumPy's."""
    parts, sections = _parts(vector), indices_or_sections
    count = int(sections) if isinstance(sections, (int, np.integer)) and sections > 0 else 0
    if axis not in (0, -1) or not count or len(parts) % count:
        refuse(
            f"a split, into {short(sections)}, of {len(parts)} times as many numbers as units",
            "np.split(a, n), for a product with n gates or a concatenation of n vectors",
        )
    size = len(parts) // count
    return [joined(parts[k : k + size]) for k in range(0, len(parts), size)]


def _by_parts(compute: Callable[..., Node], vectors: Sequence[Node]) -> Node:
    """Return an operation of vectors of several parts and numbers, part by part."""
    sizes = {len(_parts(each)) for each in vectors if not each.is_one}
    if len(sizes) > 1:
        a, b, *_ = sorted(sizes)
        refuse(
            f"vectors of {a} and of {b} times as many numbers as units",
            "an operation of vectors of one length, or of a vector and a number",
        )
    (count,) = sizes
    rows = [each.arguments if each.operation == "joined" else (each,) * count for each in vectors]
    return node("joined", *(compute(*parts) for parts in zip(*rows, strict=True)))


def _reduce_joined(operation: str, vector: Node, heads: int) -> Node:
    """Return a reduction over all numbers of a vector of several parts; each gets it."""
    if heads > 1:
        refuse(
            f"the {operation} of heads of {len(vector.arguments)} vectors", "it for each of them"
        )
    combine = "maximum" if operation == "maximum" else "add"
    total = functools.reduce(functools.partial(apply, combine), vector.arguments)
    found, count = reduce_units(operation, total, 1), len(vector.arguments)
    return node("joined", *[found / count if operation == "mean" else found] * count)


_JOINING: dict[str, Callable[..., Any]] = {"concatenate": _concatenate, "split": _split}


def linear_map(matrix: Sequence[Any], vector: Node, is_transposed: bool = False) -> Node:
    """Return a product of a vector and a matrix, or its transpose; a front end names the matrix."""
    is_transposed = is_transposed and not isinstance(matrix[0], Reduction)
    return node("product", vector, details=(*matrix, is_transposed))


def _unpickled(operation: str, arguments: tuple[Node, ...], details: tuple[Any, ...]) -> Node:
    return node(operation, *arguments, details=details)


def number(value: float) -> Node:
    """Return the node of a number; 0.0 and -0.0 are two."""
    value = float(value)
    return symbol("number", value, math.copysign(1.0, value))


def value_of(vector: Node) -> float | None:
    """Return the value of a number; None for other nodes."""
    return vector.details[0] if vector.operation == "number" else None


def as_node(value: Any) -> Node:
    """Return a node as it is, and a number as a node."""
    if isinstance(value, Node):
        return value
    try:
        if hasattr(type(value), "__node__"):  # a front end's own symbol
            found: Node = value.__node__()
            return found
        return number(value)
    except Exception:
        refuse(f"{short(value)} among vectors", "vectors and numbers")


def apply(operation: str, *vectors: Any) -> Node:
    """Return an operation of vectors and numbers, simplified."""
    arguments = tuple(map(as_node, vectors))
    if any(each.operation == "joined" for each in arguments):
        return _by_parts(functools.partial(apply, operation), arguments)
    values = [*map(value_of, arguments)]
    fold = OPERATIONS[operation].fold
    if fold is not None and None not in values:
        try:
            return number(fold(*values))
        except (ArithmeticError, ValueError):
            pass  # kernels compute 1 / 0, for example, as IEEE 754 says
    simpler = _simpler(operation, arguments, values)
    return node(operation, *arguments) if simpler is None else simpler


def _simpler(
    operation: str, arguments: tuple[Node, ...], values: list[float | None]
) -> Node | None:
    """Return a simpler node with the same values, also of infinities and NaN; else None."""
    if operation == "negative":
        (a,) = arguments
        return a.arguments[0] if a.operation == "negative" else None
    if operation == "where":
        _, a, b = arguments
        if a is b or values[0] is not None:
            return b if values[0] == 0 else a
        return None
    if operation not in ("add", "subtract", "multiply", "divide"):
        return None
    a, b = arguments
    first, second = values
    if operation == "add":
        if first == 0:
            return b
        if second == 0:
            return a
        if b.operation == "negative":
            return apply("subtract", a, b.arguments[0])
        if a.operation == "negative":
            return apply("subtract", b, a.arguments[0])
    elif operation == "subtract":
        if second == 0:
            return a
        if first == 0:
            return apply("negative", b)
        if b.operation == "negative":
            return apply("add", a, b.arguments[0])
    elif operation == "multiply":
        for other, value in ((b, first), (a, second)):
            if value in (1, -1):
                return other if value == 1 else apply("negative", other)
        if a.operation == "negative":
            return apply("negative", apply("multiply", a.arguments[0], b))
        if b.operation == "negative":
            return apply("negative", apply("multiply", a, b.arguments[0]))
    elif second == 1:
        return a
    return None


def _power(base: Node, exponent: Any) -> Node:
    """Return a power whose exponent is a small integer, or a half."""
    try:
        power = float(exponent) if not isinstance(exponent, Node) else math.nan
    except Exception:
        power = math.nan
    if power == 0.5:
        return apply("sqrt", base)
    if not power.is_integer() or abs(power) > 16:
        refuse(f"the exponent {short(exponent)}", "np.exp(exponent * np.log(base))")
    result, square, left = number(1), base, int(abs(power))
    while left:
        if left & 1:
            result = result * square
        left >>= 1
        square = square * square if left else square
    return result if power >= 0 else 1 / result


# -- The table ------------------------------------------------------------------------------------

Interval: TypeAlias = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)
_Pull: TypeAlias = "Callable[..., tuple[Node | None, ...]]"
_Fold: TypeAlias = "Callable[..., float] | None"
_Bounds: TypeAlias = Callable[..., Interval]


def _anywhere(*_: Interval) -> Interval:
    return ANY


def _within(low: float, high: float) -> _Bounds:
    return lambda *_: (low, high)


def _rising(function: Callable[..., float]) -> _Bounds:
    """Return the bounds of a function that rises with all of its arguments."""
    return lambda *ends: (function(*(a[0] for a in ends)), function(*(a[1] for a in ends)))


def _difference(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _product(a: Interval, b: Interval) -> Interval:
    corners = [0.0 if x == 0 or y == 0 else x * y for x in a for y in b]
    return min(corners), max(corners)


def _positive(a: Interval) -> Interval:
    return 0.0, max(a[1], 0.0)


def _exp(highest: float) -> float:
    return math.exp(highest) if highest < 100 else math.inf


class Operation(NamedTuple):
    """An elementwise operation.

    Attributes
    ----------
    numpy, cpu, cuda, c : str
        Its text for each target, with ``{0}``, ``{1}``, … for the arguments; "" if a CPU or CUDA
        has no such function.
    pull : callable
        ``pull(g, y, *arguments)`` returns the gradient in each argument, from the gradient `g` in
        the result `y`; None for an argument that has no gradient.
    fold : callable or None
        ``fold(*numbers)`` computes the operation of numbers.
    bounds : callable
        ``bounds(*intervals)`` returns an interval of the result, NaN apart, from intervals of the
        arguments.
    is_heavy : bool
        Whether the operation takes as long as some twenty others, so that it is worth a loop of its
        own.
    formula : callable or None
        ``formula(*arguments)`` writes the operation by others, for targets without a text.
    """

    numpy: str
    cpu: str
    cuda: str
    c: str
    pull: _Pull
    fold: _Fold
    bounds: _Bounds
    is_heavy: bool = False
    formula: Callable[..., Node] | None = None


def _everywhere(
    text: str, pull: _Pull, fold: _Fold = None, bounds: _Bounds = _anywhere, **others: Any
) -> Operation:
    """Return an operation with one text for all targets, unless another text is given."""
    texts = dict.fromkeys(("numpy", "cpu", "cuda", "c"), text)
    return Operation(pull=pull, fold=fold, bounds=bounds, **texts | others)


def _infix(sign: str, *others: Any) -> Operation:
    return _everywhere(f"({{0}} {sign} {{1}})", *others)


def _function(name: str, pull: _Pull, bounds: _Bounds, fold: _Fold = None) -> Operation:
    """Return a function of one number, which takes long, and has its name in each target."""
    text = f"{name}({{0}})"
    # Those that fold have the names of Python's and NumPy's functions.
    numpy = text if fold is None else f"xp.{text}"
    return _everywhere(text, pull, fold, bounds, numpy=numpy, c=f"real_{text}", is_heavy=True)


def _none(g: Node, y: Node, *arguments: Node) -> tuple[None, ...]:
    return (None,) * len(arguments)


def _where(condition: Node, a: Any, b: Any) -> Node:
    return apply("where", condition, a, b)


def _chosen(g: Node, is_a: Node, is_b: Node) -> tuple[Node, Node]:
    """Return the gradients in two numbers of which one is chosen: half in each if none is."""
    half = 0.5 * g
    return _where(is_a, g, _where(is_b, 0, half)), _where(is_b, g, _where(is_a, 0, half))


def _arctan2_pull(g: Node, _: Node, a: Node, b: Node) -> tuple[Node, Node]:
    square = a * a + b * b
    share = _where(square <= 0, 0, g / square)  # nothing where there is no angle
    return share * b, -(share * a)


def _arctan2(a: Node, b: Node) -> Node:
    """Return ``arctan2(a, b)`` by other operations, by the series of an angle that is halved twice.

    Zeros have signs, as in IEEE 754.
    """
    large, low = apply("maximum", abs(a), abs(b)), apply("minimum", abs(a), abs(b))
    # Equal ones may be both infinite, or 0.
    tangent = _where(low >= large, _where(large <= 0, 0, 1), low / large)
    for _ in range(2):
        tangent = tangent / (1 + apply("sqrt", 1 + tangent * tangent))
    square, series = tangent * tangent, number(-1 / 23)
    for n in reversed(range(11)):
        series = series * square + (-1) ** n / (2 * n + 1)
    angle = 4 * (tangent * series)
    angle = _where(abs(b) < abs(a), math.pi / 2 - angle, angle)
    angle = _where(_is_negative(b), math.pi - angle, angle)
    return _where(_is_negative(a), -angle, angle)


def _is_negative(a: Node) -> Node:
    return _where(a < 0, 1, 1 / a < 0)


OPERATIONS: dict[str, Operation] = {
    "add": _infix("+", lambda g, y, a, b: (g, g), operator.add, _rising(operator.add)),
    "subtract": _infix("-", lambda g, y, a, b: (g, -g), operator.sub, _difference),
    "multiply": _infix("*", lambda g, y, a, b: (g * b, g * a), operator.mul, _product),
    "divide": _infix("/", lambda g, y, a, b: (g / b, -(g / b * y)), operator.truediv),
    "negative": _everywhere(
        "(-{0})", lambda g, y, a: (-g,), operator.neg, lambda a: (-a[1], -a[0]), cpu="(zero - {0})"
    ),
    "tanh": _function("tanh", lambda g, y, a: (g * (1 - y * y),), _within(-1, 1), math.tanh),
    "sigmoid": _function("sigmoid", lambda g, y, a: (g * (y * (1 - y)),), _within(0, 1)),
    "exp": _function("exp", lambda g, y, a: (g * y,), lambda a: (0.0, _exp(a[1])), math.exp),
    "expm1": _function(
        "expm1", lambda g, y, a: (g * (y + 1),), lambda a: (-1.0, _exp(a[1])), math.expm1
    ),
    "log": _function("log", lambda g, y, a: (g / a,), _anywhere, math.log),
    "log1p": _function("log1p", lambda g, y, a: (g / (1 + a),), _anywhere, math.log1p),
    "softplus": _function(
        "softplus",
        lambda g, y, a: (-(g * apply("expm1", -y)),),
        lambda a: (0.0, max(a[1], 0.0) + 1),
    ),
    "sqrt": _function("sqrt", lambda g, y, a: (0.5 * g / y,), _positive, math.sqrt),
    "sin": _function("sin", lambda g, y, a: (g * apply("cos", a),), _within(-1, 1), math.sin),
    "cos": _function("cos", lambda g, y, a: (-(g * apply("sin", a)),), _within(-1, 1), math.cos),
    "arctan2": Operation(
        "xp.arctan2({0}, {1})",
        *("", "", "real_arctan2({0}, {1})"),
        *(_arctan2_pull, math.atan2, _within(-math.pi, math.pi)),
        is_heavy=True,
        formula=_arctan2,
    ),
    "absolute": _everywhere(
        "absolute({0})",
        lambda g, y, a: (_where(a < 0, -g, _where(a <= 0, 0, g)),),
        abs,
        lambda a: (0.0, max(abs(a[0]), a[1])),
        numpy="xp.absolute({0})",
        c="real_absolute({0})",
    ),
    "relu": _everywhere(
        "relu({0})",
        lambda g, y, a: (_where(y <= 0, 0, g),),
        bounds=_positive,
        numpy="xp.maximum({0}, zero)",
        cpu="keep_positive({0}, {0})",
        c="real_relu({0})",
    ),
    "minimum": _everywhere(
        "minimum({0}, {1})",
        lambda g, y, a, b: _chosen(g, a < b, b < a),
        min,
        _rising(min),
        numpy="xp.minimum({0}, {1})",
        c="real_minimum({0}, {1})",
    ),
    "maximum": _everywhere(
        "maximum({0}, {1})",
        lambda g, y, a, b: _chosen(g, b < a, a < b),
        max,
        _rising(max),
        numpy="xp.maximum({0}, {1})",
        c="real_maximum({0}, {1})",
    ),
    "less": _everywhere(
        "less({0}, {1})",
        _none,
        lambda a, b: float(a < b),
        _within(0, 1),
        numpy="({0} < {1})",
        c="(real)({0} < {1})",
    ),
    "less_equal": _everywhere(
        "less_equal({0}, {1})",
        _none,
        lambda a, b: float(a <= b),
        _within(0, 1),
        numpy="({0} <= {1})",
        c="(real)({0} <= {1})",
    ),
    "where": _everywhere(
        "where({0}, {1}, {2})",
        lambda g, y, c, a, b: (None, _where(c, g, 0), _where(c, 0, g)),
        bounds=lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1])),
        numpy="xp.where({0}, {1}, {2})",
        c="({0} != 0 ? {1} : {2})",
    ),
    # A value, and what it is differentiated as: nothing, or a vector and the slope in it.
    "stop_gradient": _everywhere("{0}", _none, bounds=lambda a: a),
    "surrogate": _everywhere(
        "{0}", lambda g, y, value, a, slope: (None, g * slope, None), bounds=lambda value, *_: value
    ),
}


def formula_of(vector: Node, target: str) -> Callable[..., Node] | None:
    """Return the formula of an operation, if a target has no text for it."""
    operation = OPERATIONS.get(vector.operation)
    return None if operation is None or getattr(operation, target) else operation.formula


def is_heavy(vector: Node) -> bool:
    """Return whether a node is an operation that takes long."""
    return vector.operation in OPERATIONS and OPERATIONS[vector.operation].is_heavy
