"""Operations of one number a unit, by operations of cells."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from ..graph import expressions, functions
from ..graph.operations import Node, apply, as_node, symbol, value_of
from .equations import Equation, Value, before

Operation = Callable[..., Node]


def _named(name: str) -> Operation:
    return lambda equation, *given: apply(name, *given)


def _greater(name: str) -> Operation:
    return lambda equation, a, b: apply(name, b, a)


def _compared(operation: Operation) -> Operation:
    """Return a comparison, which is one of numbers."""

    def compare(equation: Equation, a: Node, b: Node) -> Node:
        if equation.inputs[0].aval.dtype == bool:
            equation.refuse("a comparison of truth values")
        return operation(equation, a, b)

    return compare


def _equal(equation: Equation, a: Node, b: Node) -> Node:
    return apply("multiply", a <= b, b <= a)


def _extreme(name: str, worst: float) -> Operation:
    """Return the larger or the smaller of two numbers; nothing is worse than an infinite one."""

    def compute(equation: Equation, a: Node, b: Node) -> Node:
        if value_of(a) == worst:
            return b
        return a if value_of(b) == worst else apply(name, a, b)

    return compute


def _truth(operation: Callable[..., Node]) -> Operation:
    """Return an operation of truth values, which are 0 and 1."""

    def compute(equation: Equation, *given: Node) -> Node:
        if any(each.aval.dtype != bool for each in equation.inputs):
            equation.refuse("an operation of integers")
        return operation(*given)

    return compute


def _select(equation: Equation, which: Node, *cases: Node) -> Node:
    if len(cases) != 2 or equation.inputs[0].aval.dtype != bool:
        equation.refuse("a choice of other than two cases")
    return apply("where", which, cases[1], cases[0])


def is_truth(value: Value) -> bool:
    """Return whether a value is a truth value, maybe as an integer."""
    dtype, equation = value.aval.dtype, value.equation
    if dtype.kind == "i" and equation is not None and equation.name == "convert_element_type":
        return is_truth(equation.inputs[0])
    return bool(dtype.kind == "b")


def _converted(equation: Equation, a: Node) -> Node:
    (given,), new = equation.inputs, equation.outputs[0].aval.dtype
    is_same = given.aval.dtype == new or is_truth(given)
    if not is_same or (new not in ("float32", "float64") and new.kind != "i"):
        equation.refuse(f"a conversion of {given.aval.dtype} to {new}")
    return a


def _power(equation: Equation, a: Node) -> Node:
    if abs(equation.options["y"]) > 16:
        equation.refuse("a large power")
    return powered(a, equation.options["y"])


def powered(a: Node, exponent: float | None) -> Node:
    """Return a power of a number, whose derivative is p·a^(p - 1), also where that is infinite."""
    power: Node = a**exponent
    if exponent is None or exponent >= 0:
        return power
    return apply("surrogate", power, a, exponent * (power / a))


def _real_power(equation: Equation, a: Node, exponent: Node) -> Node:
    power = value_of(exponent)
    if power is None or power.is_integer():
        equation.refuse("an exponent that is no number, or is an integer")
    return real_power(a, power)


def real_power(a: Node, power: float) -> Node:
    """Return a power that is no integer: exp(p·log(a)), whose derivative is p·a^(p - 1)."""

    def raised(power: float) -> Node:
        return apply("exp", power * apply("log", a))

    return apply("surrogate", raised(power), a, power * raised(power - 1))


def _finite(equation: Equation, a: Node) -> Node:
    return apply("absolute", a) <= float(np.finfo(equation.inputs[0].aval.dtype).max)


def _rounded(shift: Callable[[Node, Node], Node], is_even: bool = True) -> Operation:
    """Return a rounding, from the nearest integer: the even one of two."""

    def compute(equation: Equation, a: Node) -> Node:
        if is_even and int(equation.options.get("rounding_method", 1)) != 1:
            equation.refuse("a rounding away from zero")
        # Numbers from this one on are integers; those below it lose their fractions beside it.
        large = float(2 ** np.finfo(equation.inputs[0].aval.dtype).nmant)
        size = apply("absolute", a)
        near = (size + large) - large
        near = apply("where", size < large, apply("where", a < 0, -near, near), a)
        return apply("stop_gradient", shift(a, near))

    return compute


def _half_power(a: Node) -> Node:
    """Return ``exp(a) / 2``, which is finite where ``exp(a)`` is not yet."""
    root = apply("exp", 0.5 * a)
    power = (0.5 * root) * root
    return apply("surrogate", power, a, power)


def _sinh(equation: Equation, a: Node) -> Node:
    size = apply("absolute", a)
    u = apply("expm1", size)
    found = apply("where", u < 1e18, 0.5 * (u + u / (u + 1)), _half_power(size))
    return apply("surrogate", apply("where", a < 0, -found, found), a, _cosh(equation, a))


def _cosh(equation: Equation, a: Node) -> Node:
    return _half_power(a) + _half_power(-a)


def _polynomial(equation: Equation, a: Node, *coefficients: Node) -> Node:
    *others, total = coefficients
    for each in reversed(others):
        total = total * a + each
    return total


def _tan(equation: Equation, a: Node) -> Node:
    return apply("sin", a) / apply("cos", a)


def _angle(equation: Equation, a: Node, b: Node) -> Node:
    """Return an angle, whose derivative at the origin is NaN in JAX."""
    square = a * a + b * b
    angle = apply("surrogate", apply("arctan2", a, b), a, b / square)
    return angle + apply("surrogate", 0, b, -a / square)


def _stopped(equation: Equation, a: Node) -> Node:
    is_value = a.operation in ("surrogate", "stop_gradient")
    return apply("stop_gradient", a.arguments[0] if is_value else a)


def _sign(equation: Equation, a: Node) -> Node:
    sign = apply("where", a > 0, 1, apply("where", a < 0, -1, a))
    return apply("stop_gradient", sign)


def _absolute(equation: Equation, a: Node) -> Node:
    """Return absolute values, whose derivative at 0 is 1 in JAX."""
    return apply("surrogate", apply("absolute", a), a, apply("where", a >= 0, 1, -1))


def _clamp(equation: Equation, low: Node, a: Node, high: Node) -> Node:
    least, most = value_of(low), value_of(high)
    if least is None or most is None or not least <= most:
        equation.refuse("bounds that are no numbers, or of which the lower is above the upper")
    return apply("where", a <= low, low, apply("where", high <= a, high, a))


ELEMENTWISE: dict[str, Operation] = {
    "add": _named("add"),
    "add_any": _named("add"),
    "sub": _named("subtract"),
    "mul": _named("multiply"),
    "div": _named("divide"),
    "neg": _named("negative"),
    "tanh": _named("tanh"),
    "logistic": _named("sigmoid"),
    "exp": _named("exp"),
    "expm1": _named("expm1"),
    "log": _named("log"),
    "log1p": _named("log1p"),
    "exp2": lambda equation, a: apply("exp", a * math.log(2)),
    "erf": lambda equation, a: functions.erf(a),
    "erfc": lambda equation, a: functions.erfc(a),
    "atan2": _angle,
    "atan": lambda equation, a: apply("arctan2", a, 1),
    "tan": _tan,
    "sinh": _sinh,
    "cosh": _cosh,
    "atanh": lambda equation, a: 0.5 * (apply("log1p", a) - apply("log1p", -a)),
    "pow": _real_power,
    "polynomial": _polynomial,
    "is_finite": _finite,
    "round": _rounded(lambda a, near: near),
    "floor": _rounded(lambda a, near: near - (a < near), False),
    "ceil": _rounded(lambda a, near: near + (near < a), False),
    "sqrt": _named("sqrt"),
    "rsqrt": lambda equation, a: 1 / apply("sqrt", a),
    "sin": _named("sin"),
    "cos": _named("cos"),
    "abs": _absolute,
    "square": lambda equation, a: a * a,
    "integer_pow": _power,
    "sign": _sign,
    "max": _extreme("maximum", -np.inf),
    "min": _extreme("minimum", np.inf),
    "clamp": _clamp,
    "lt": _compared(_named("less")),
    "le": _compared(_named("less_equal")),
    "gt": _compared(_greater("less")),
    "ge": _compared(_greater("less_equal")),
    "eq": _compared(_equal),
    "ne": _compared(lambda equation, a, b: 1 - _equal(equation, a, b)),
    "and": _truth(lambda a, b: a * b),
    "or": _truth(lambda a, b: apply("maximum", a, b)),
    "xor": _truth(lambda a, b: abs(a - b)),
    "not": _truth(lambda a: 1 - a),
    "select_n": _select,
    "convert_element_type": _converted,
    "stop_gradient": _stopped,
    "copy": lambda equation, a: a,
    "copy_p": lambda equation, a: a,
}


# -- Programs of one number a unit ----------------------------------------------------------------


def program(
    equation: Equation,
    arguments: Sequence[Value],
    results: Sequence[Value],
    is_linear: bool = False,
) -> Operation:
    """Return a program of one number a unit as an operation.

    If it `is_linear` in its first argument, the operation is what that is multiplied by.
    """
    equations = before(results, arguments.__contains__)
    steps: list[Callable[..., Node]] = []
    dtypes = set()
    for each in equations:
        custom, compute = each.custom(), ELEMENTWISE.get(each.name)
        if compute is not None:
            custom = functools.partial(compute, each)
        elif each.name == "broadcast_in_dim" and not each.inputs[0].shape:
            custom = _same
        if custom is None:
            equation.refuse(f"a derivative or a value with {each.name}, no operation of cells")
        steps.append(custom)
        known = [one for one in each.inputs if one.number is None and not is_truth(one)]
        dtypes |= {one.aval.dtype for one in known}
    if len(dtypes) > 1:
        equation.refuse("a derivative or a value of several dtypes")

    def run(*given: Node) -> Node:
        nodes = dict(zip(arguments, given, strict=True))

        def read(each: Value) -> Node:
            if each.number is not None:
                return as_node(each.number)
            if each not in nodes:
                equation.refuse("a constant that is no number")
            return nodes[each]

        for each, compute in zip(equations, steps, strict=True):
            nodes[each.outputs[0]] = compute(*map(read, each.inputs))
        return read(results[0])

    def slope(*given: Node) -> Node:
        above = symbol("above", 0)
        found = run(above, *given)
        if not expressions.is_linear([found], {"above"}):
            equation.refuse("gradients that are not linear in those of results")
        return expressions.replaced([found], {above: as_node(1)})[0]

    return slope if is_linear else run


def _same(a: Node) -> Node:
    return a


def with_slopes(value: Operation, slopes: Sequence[tuple[int, Operation]]) -> Operation:
    """Return an operation whose derivatives are those in some of its arguments, and no others."""

    def compute(*given: Node) -> Node:
        total = value(*given)
        if not slopes:
            return apply("stop_gradient", total)
        for index, (k, slope) in enumerate(slopes):
            own = apply("surrogate", 0 if index else total, given[k], slope(*given))
            total = total + own if index else own
        return total

    return compute
