"""Operators of PyTorch, by operations of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ...capture.elementwise import powered, real_power
from ...capture.equations import Equation, NotCaptured, Value
from ...graph import functions
from ...graph.operations import Node, apply, as_node, value_of


class Maker(Protocol):
    """Makes equations in place of another one, the reader."""

    reader: Equation

    def __call__(self, name: str, *inputs: Value, **options: Any) -> Value:
        """Return the result of an operation, by its name and options in JAX."""

    def number(self, number: float, like: Value) -> Value:
        """Return a number."""

    def spread(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a value that is broadcast to a shape, behind new axes."""

    def both(self, name: str, a: Value, b: Value) -> Value:
        """Return an operation of two values, which are broadcast."""

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """Return ``x @ weight.T + bias``."""

    def cut(self, value: Value, axis: int, begin: int, end: int) -> Value:
        """Return a slice."""

    def parts(self, value: Value, sizes: Sequence[int], axis: int) -> list[Value]:
        """Return slices one after the other."""


# Operators that are those of JAX, with derivatives.
NAMED = {
    **{name: name for name in ("tanh", "exp", "expm1", "log", "sqrt", "rsqrt", "sin", "cos")},
    **{name: name for name in ("neg", "square", "log1p", "erf", "erfc", "atan", "sinh", "cosh")},
    **{name: name for name in ("round", "floor", "ceil")},
    **dict.fromkeys(("add.Tensor", "add.Scalar"), "add"),
    **dict.fromkeys(("sub.Tensor", "sub.Scalar"), "sub"),
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), "mul"),
    **dict.fromkeys(("div.Tensor", "div.Scalar", "true_divide.Tensor"), "div"),
    **{f"{name}.Tensor": name for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{f"{name}.Scalar": name for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "sigmoid": "logistic",
    "maximum": "max",
    "minimum": "min",
    "detach": "stop_gradient",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    **dict.fromkeys(("bitwise_and.Tensor", "__and__.Tensor"), "and"),
    **dict.fromkeys(("bitwise_or.Tensor", "__or__.Tensor"), "or"),
    "bitwise_not": "not",
}

# Operators that may give what they are given, and whether a call does.
COPIES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "lift_fresh_copy", "view_as", "detach_"), lambda node: True
    ),
    **dict.fromkeys(("to", "type_as", "_to_copy"), lambda node: True),
    "dropout": lambda node: not node.args[2] or node.args[1] == 0,
    "feature_dropout": lambda node: not node.args[2],
}

# Operators whose results have one number, and that number.
FILLED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda node: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda node: 1),
    **dict.fromkeys(("full", "full_like"), lambda node: node.args[1]),
    "new_full": lambda node: node.args[2],
    "scalar_tensor": lambda node: node.args[0],
}


def _clamp(a: Node, low: Any = None, high: Any = None, **bounds: Any) -> Node:
    """Return a number between bounds, at which its derivative is 1; the upper bound is the last."""
    low, high = bounds.get("min", low), bounds.get("max", high)
    if low is not None and high is not None and value_of(as_node(low)) is None:
        low = apply("where", apply("less", low, high), low, apply("stop_gradient", low))
    made = a if low is None else _bounded(apply("less", a, low), a, low)
    return made if high is None else _bounded(apply("less", high, made), made, high)


def _bounded(is_beyond: Node, a: Node, bound: Any) -> Node:
    """Return a number, or its bound where it is beyond that; a bound that is NaN is the result."""
    if value_of(as_node(bound)) is None:
        is_beyond = apply("where", bound <= bound, is_beyond, 1)
    return apply("where", is_beyond, bound, a)


def _lerp(a: Node, b: Node, weight: Any) -> Node:
    """Return ``a + weight·(b - a)``, from the nearer end, which is then exact."""
    near, rest = a + weight * (b - a), b - (b - a) * (1 - weight)
    return apply("where", apply("less", apply("absolute", weight), 0.5), near, rest)


def _power(a: Node, exponent: Any) -> Node:
    power = value_of(as_node(exponent))
    if power is None or power == 0.5 or power.is_integer():
        return powered(a, power)
    return real_power(a, power)


def _softplus(a: Node, beta: Any = 1, threshold: Any = 20) -> Node:
    if value_of(as_node(threshold)) != 20 or value_of(as_node(beta)) == 0:
        raise NotCaptured("softplus: a threshold that is not 20, or no slope")
    found: Node = functions.softplus(beta * a) / beta
    return found


def _sign(a: Node) -> Node:
    """Return 1, -1 or 0 for a sign; NaN has none, which is 0."""
    return apply("where", a > 0, 1, apply("where", a < 0, -1, 0))


def _gelu(a: Node, approximate: str = "none") -> Node:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (a + 0.044715 * a * a * a)
        return 0.5 * a * (1 + apply("tanh", inner))
    found: Node = 0.5 * a * (1 + functions.erf(a / math.sqrt(2)))
    return found


def _elu(a: Node, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Node:
    """Return a scaled number above 0; exponentials are not computed there, which overflow."""
    low = apply("expm1", input_scale * apply("where", a > 0, 0, a))
    return apply("where", a > 0, scale * a, alpha * scale * low)


# Operators of one number a unit.
_CUSTOM: dict[str, Callable[..., Any]] = {
    "relu": functions.relu,
    "leaky_relu": functions.leaky_relu,
    "hardtanh": functions.hardtanh,
    "relu6": lambda a: functions.hardtanh(a, 0, 6),
    "hardswish": lambda a: a * functions.hardtanh(a + 3, 0, 6) / 6,
    "gelu": _gelu,
    "elu": _elu,
    "selu": lambda a: _elu(a, 1.6732632423543772, 1.0507009873554805),
    "celu": lambda a, alpha=1: _elu(a, alpha, 1, 1 / alpha),
    "hardsigmoid": functions.hardsigmoid,
    "silu": functions.silu,
    "softplus": _softplus,
    "log_sigmoid": lambda a: -functions.softplus(-a),
    "abs": lambda a: apply("surrogate", apply("absolute", a), a, _sign(a)),
    **dict.fromkeys(("sign", "sgn"), lambda a: apply("stop_gradient", _sign(a))),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda a, high: _clamp(a, None, high),
    "rsub.Scalar": lambda a, b: b - a,
    "reciprocal": lambda a: 1 / a,
    "pow.Tensor_Scalar": _power,
    "where.self": lambda which, a, b: apply("where", which, a, b),
    "where.ScalarOther": lambda which, a, b: apply("where", which, a, b),
    "where.ScalarSelf": lambda which, a, b: apply("where", which, a, b),
    "masked_fill.Scalar": lambda a, which, b: apply("where", which, b, a),
    "addcmul": lambda a, b, c, value=1: a + value * b * c,
    "addcdiv": lambda a, b, c, value=1: a + value * (b / c),
    **dict.fromkeys(("lerp.Tensor", "lerp.Scalar"), _lerp),
    "add.Tensor": lambda a, b, alpha=1: a + alpha * b,
    "sub.Tensor": lambda a, b, alpha=1: a - alpha * b,
    "tanhshrink": lambda a: a - apply("tanh", a),
    "mish": lambda a: a * apply("tanh", functions.softplus(a)),
}
CUSTOM = {f"aten.{name}": rule for name, rule in _CUSTOM.items()}


# -- Operators of several operations ---------------------------------------------------------------


def _axis(value: Value, axis: int) -> int:
    return axis % max(1, len(value.shape))


def _gates(make: Maker, x: Value, weight: Value, bias: Value | None, count: int) -> list[Value]:
    whole = make.linear(x, weight, bias)
    size = whole.shape[-1] // count
    return make.parts(whole, [size] * count, len(whole.shape) - 1)


def _gru_cell(
    make: Maker, x: Value, h: Value, w_x: Value, w_h: Value, b_x: Any = None, b_h: Any = None
) -> Value:
    a, b = _gates(make, x, w_x, b_x, 3), _gates(make, h, w_h, b_h, 3)
    r, z = (make("logistic", make("add", a[k], b[k])) for k in range(2))
    n = make("tanh", make("add", a[2], make("mul", r, b[2])))
    return make("add", n, make("mul", z, make("sub", h, n)))


def _lstm_cell(
    make: Maker, x: Value, state: Any, w_x: Value, w_h: Value, b_x: Any = None, b_h: Any = None
) -> list[Value]:
    h, c = state
    pairs = zip(_gates(make, x, w_x, b_x, 4), _gates(make, h, w_h, b_h, 4), strict=True)
    i, f, g, o = (make("add", *pair) for pair in pairs)
    i, f, o = (make("logistic", each) for each in (i, f, o))
    c = make("add", make("mul", f, c), make("mul", i, make("tanh", g)))
    return [make("mul", o, make("tanh", c)), c]


def _rnn_cell(name: str) -> Callable[..., Value]:
    def cell(
        make: Maker, x: Value, h: Value, w_x: Value, w_h: Value, b_x: Any = None, b_h: Any = None
    ) -> Value:
        return make(name, make("add", make.linear(x, w_x, b_x), make.linear(h, w_h, b_h)))

    return cell


def _addmm(make: Maker, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if (beta, alpha) != (1, 1):
        raise NotCaptured("addmm: beta and alpha that are not 1")
    return make.both("add", _matmul(make, a, b), bias)


def _matmul(make: Maker, a: Value, b: Value) -> Value:
    if len(b.shape) > 2 and len(a.shape) > 2:
        raise NotCaptured("matmul: products of batches of matrices")
    inner = max(0, len(b.shape) - 2)
    numbers = ((len(a.shape) - 1,), (inner,)), ((), ())
    found = make("dot_general", a, b, dimension_numbers=numbers)
    if len(a.shape) < 2 or len(b.shape) < 3:
        return found
    # Rows of the matrix stand behind the axes of the batch.
    return _permuted(make, found, [*range(1, len(b.shape) - 1), 0, len(b.shape) - 1])


def _permuted(make: Maker, value: Value, order: Sequence[int]) -> Value:
    own = tuple(_axis(value, each) for each in order)
    return make("transpose", value, permutation=own)


def _transposed(make: Maker, value: Value, a: int = 0, b: int = 1) -> Value:
    order = list(range(len(value.shape)))
    if len(order) < 2:
        return value
    a, b = _axis(value, a), _axis(value, b)
    order[a], order[b] = order[b], order[a]
    return _permuted(make, value, order)


def _shaped(make: Maker, value: Value, *about: Any) -> Value:
    return make("reshape", value, new_sizes=make.reader.outputs[0].shape)


def _spread(make: Maker, value: Value, *about: Any, **more: Any) -> Value:
    return make.spread(value, make.reader.outputs[0].shape)


def _parts(make: Maker, value: Value, about: Any, dim: int = 0) -> list[Value]:
    axis = _axis(value, dim)
    return make.parts(value, [each.shape[axis] for each in make.reader.outputs], axis)


def _select(make: Maker, value: Value, dim: int, k: int) -> Value:
    axis = _axis(value, dim)
    k %= value.shape[axis]
    return make("squeeze", make.cut(value, axis, k, k + 1), dimensions=(axis,))


def _unbind(make: Maker, value: Value, dim: int = 0) -> list[Value]:
    return [_select(make, value, dim, k) for k in range(value.shape[_axis(value, dim)])]


def _slice(
    make: Maker, value: Value, dim: int = 0, begin: Any = None, end: Any = None, step: int = 1
) -> Value:
    axis = _axis(value, dim)
    first, last, stride = slice(begin, end, step).indices(value.shape[axis])
    if stride != 1:
        raise NotCaptured("slice: a slice with strides")
    return make.cut(value, axis, first, max(first, last))


def _cat(make: Maker, values: Sequence[Value], dim: int = 0) -> Value:
    return make("concatenate", *values, dimension=_axis(values[0], dim))


def _unsqueezed(make: Maker, value: Value, dim: int) -> Value:
    return make("expand_dims", value, dimensions=(dim % (len(value.shape) + 1),))


def _stack(make: Maker, values: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % (len(values[0].shape) + 1)
    return _cat(make, [_unsqueezed(make, each, axis) for each in values], axis)


def _axes(value: Value, dim: Any) -> tuple[int, ...]:
    axes = range(len(value.shape)) if dim is None or dim == [] else dim
    axes = (axes,) if isinstance(axes, int) else axes
    return tuple(_axis(value, each) for each in axes)


def _sum(make: Maker, value: Value, dim: Any = None, keepdim: bool = False, **more: Any) -> Value:
    if value.aval.dtype.kind != "f" or more:
        raise NotCaptured("sum: of other than floats")
    axes = _axes(value, dim)
    found = make("reduce_sum", value, axes=axes) if axes else value
    if not keepdim:
        return found
    sizes = [1 if k in axes else n for k, n in enumerate(value.shape)]
    return make("reshape", found, new_sizes=tuple(sizes))


def _mean(make: Maker, value: Value, dim: Any = None, keepdim: bool = False, **more: Any) -> Value:
    count = math.prod(value.shape[k] for k in _axes(value, dim))
    total = _sum(make, value, dim, keepdim, **more)
    return make("mul", total, make.number(1 / count, value))


def _softmax(
    make: Maker, value: Value, dim: int, dtype: Any = None, *, is_logarithm: bool = False
) -> Value:
    if dtype not in (None, False):
        raise NotCaptured("softmax: another dtype")
    axis = _axis(value, dim)

    def back(one: Value) -> Value:
        rest = tuple(k for k in range(len(value.shape)) if k != axis)
        return make("broadcast_in_dim", one, shape=value.shape, broadcast_dimensions=rest)

    most = back(make("stop_gradient", make("reduce_max", value, axes=(axis,))))
    below = make("sub", value, most)
    powers = make("exp", below)
    total = make("reduce_sum", powers, axes=(axis,))
    if is_logarithm:
        return make("sub", below, back(make("log", total)))
    return make("div", powers, back(total))


def _glu(make: Maker, value: Value, dim: int = -1) -> Value:
    axis = _axis(value, dim)
    a, b = make.parts(value, [value.shape[axis] // 2] * 2, axis)
    return make("mul", a, make("logistic", b))


def _layer_norm(
    make: Maker,
    value: Value,
    sizes: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *more: Any,
) -> Value:
    if len(sizes) != 1:
        raise NotCaptured("layer_norm: over several axes")

    def mean(one: Value) -> Value:
        return make.spread(_mean(make, one, [-1], True), value.shape)

    centred = make("sub", value, mean(value))
    spread = make("add", mean(make("square", centred)), make.number(eps, value))
    found = make("mul", centred, make("rsqrt", spread))
    found = found if weight is None else make.both("mul", found, weight)
    return found if bias is None else make.both("add", found, bias)


def _rms_norm(
    make: Maker, value: Value, sizes: Sequence[int], weight: Any = None, eps: float | None = None
) -> Value:
    if len(sizes) != 1 or eps is None:
        raise NotCaptured("rms_norm: over several axes, or without eps")
    square = _mean(make, make("square", value), [-1], True)
    scale = make("rsqrt", make("add", square, make.number(eps, value)))
    found = make.both("mul", value, scale)
    return found if weight is None else make.both("mul", found, weight)


_OPENED: dict[str, Callable[..., Any]] = {
    "linear": lambda make, *given: make.linear(*given),
    "addmm": _addmm,
    **dict.fromkeys(("mm", "matmul", "mv"), _matmul),
    "gru_cell": _gru_cell,
    "lstm_cell": _lstm_cell,
    "rnn_tanh_cell": _rnn_cell("tanh"),
    "rnn_relu_cell": _rnn_cell("aten.relu"),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    **dict.fromkeys(("log_softmax", "_log_softmax"), partial(_softmax, is_logarithm=True)),
    "glu": _glu,
    "sum": _sum,
    "mean": _mean,
    "t": _transposed,
    "numpy_T": lambda make, value: _permuted(make, value, range(len(value.shape))[::-1]),
    "transpose": _transposed,
    "permute": _permuted,
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "_unsafe_view", "reshape_as"),
        _shaped,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _spread),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split"), _parts),
    "unbind": _unbind,
    "select": _select,
    "slice": _slice,
    "narrow": lambda make, value, dim, begin, size: _slice(make, value, dim, begin, begin + size),
    "stack": _stack,
    "unsqueeze": _unsqueezed,
}
OPENED = {f"aten.{name}": rule for name, rule in _OPENED.items()}
