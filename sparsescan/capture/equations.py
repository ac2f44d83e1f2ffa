"""The equations of a body: which read states and inputs of a step, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ..graph.operations import Node

# Operations that change no number, but the dtype.
_COPIES = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"}
# Operations that are computed where all of their arguments are known numbers.
_FOLDED = _COPIES | {
    *("abs", "add", "and", "div", "eq", "exp", "ge", "gt", "integer_pow", "le", "log", "lt", "max"),
    *("min", "mul", "ne", "neg", "not", "or", "pow", "rsqrt", "select_n", "sqrt", "sub"),
}


class NotCaptured(Exception):  # noqa: N818
    """A body that no kernel runs, and why."""


class Value:
    """A value of a body.

    Attributes
    ----------
    aval : Any
        Its shape and dtype, that of NumPy, as the framework has them.
    equation : Equation or None
        What computes it; None for an argument of the body, and for a constant that is known.
    constant : array_like or None
        The constant.
    carries : frozenset of int
        The carries that it depends on.
    is_step : bool
        Whether it depends on what is different in each step, carries apart.
    """

    __slots__ = ("aval", "carries", "constant", "equation", "is_step")

    def __init__(
        self,
        aval: Any,
        equation: Equation | None = None,
        constant: Any = None,
        carries: frozenset[int] = frozenset(),
        is_step: bool = False,
    ) -> None:
        self.aval, self.equation, self.constant = aval, equation, constant
        self.carries, self.is_step = carries, is_step

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape: tuple[int, ...] = self.aval.shape
        return shape

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same in all steps."""
        return not self.carries and not self.is_step

    @property
    def number(self) -> float | None:
        """The number that all of it is, if that is known."""
        if self.constant is not None:
            return (
                None if self.shape or self.aval.dtype.kind not in "fiub" else float(self.constant)
            )
        equation = self.equation
        if equation is None or not self.is_fixed or equation.name not in _FOLDED:
            return None
        known = [each.number for each in equation.inputs]
        if None in known:
            return None
        if equation.name in _COPIES:
            return float(np.asarray(known[0]).astype(self.aval.dtype))
        if self.shape:
            return None
        pairs = zip(known, equation.inputs, strict=True)
        return equation.folded([np.asarray(n, each.aval.dtype) for n, each in pairs])


class Equation:
    """An equation of a body: an operation of values, and where the caller wrote it.

    Names and options are those of JAX's primitives. A framework derives its own class, which
    computes.
    """

    __slots__ = ("inputs", "name", "options", "outputs")

    def __init__(
        self, name: str, inputs: Sequence[Value], options: dict[str, Any], avals: Iterable[Any]
    ) -> None:
        self.name, self.inputs, self.options = name, tuple(inputs), options
        carries = frozenset[int]().union(*(each.carries for each in inputs))
        is_step = any(each.is_step for each in inputs)
        self.outputs = tuple(Value(each, self, None, carries, is_step) for each in avals)

    def refuse(self, why: str) -> NoReturn:
        """Raise an error that says why no kernel runs the equation, and where it is."""
        raise NotCaptured(f"{self.name}{self.line()}: {why}")

    def line(self) -> str:
        """Return the line of the caller's text where the equation was made."""
        raise NotImplementedError

    def compute(self, given: Sequence[Any]) -> list[Any]:
        """Return the results for some arrays."""
        raise NotImplementedError

    def folded(self, given: Sequence[Any]) -> float:
        """Return the result for some numbers."""
        raise NotImplementedError

    def derived(self, name: str, inputs: Sequence[Value], **options: Any) -> Value:
        """Return the result of another operation, in place of this one."""
        raise NotImplementedError

    def again(self, inputs: Sequence[Value]) -> Value:
        """Return the result of the same operation of other arguments."""
        raise NotImplementedError

    def strided(self, value: Value, begin: int, end: int, step: int, axis: int) -> Value:
        """Return each so many-th number along an axis of a value."""
        self.refuse("a slice with strides, or of a part of the units")

    def opened(self) -> list[Value] | None:
        """Return results by other operations that compute the same, if there are any."""
        return None

    def custom(self) -> Callable[..., Node] | None:
        """Return a function with derivatives of its own, as an operation of one number a unit."""
        return None


def identity(value: Value) -> Any:
    """Return what equal values have in common."""
    if value.constant is None or value.shape:
        return value
    return value.aval.dtype, value.aval.weak_type, np.asarray(value.constant).tobytes()


def before(roots: Iterable[Value], known: Callable[[Value], bool]) -> list[Equation]:
    """Return the equations that values are computed by, each behind those it reads.

    Those of values that are `known` are left out.
    """
    order: dict[Equation, None] = {}
    stack = [(each.equation, False) for each in roots if not known(each)]
    stack.reverse()
    while stack:
        equation, is_done = stack.pop()
        if equation is None or equation in order:
            continue
        if is_done:
            order[equation] = None
            continue
        stack.append((equation, True))
        stack += [(each.equation, False) for each in reversed(equation.inputs) if not known(each)]
    return list(order)


def compute(roots: Sequence[Value], known: Mapping[Value, Any]) -> list[Any]:
    """Return the arrays of values, from those of known ones."""
    arrays = dict(known)

    def read(each: Value) -> Any:
        return each.constant if each.constant is not None else arrays[each]

    for equation in before(roots, arrays.__contains__):
        arrays.update(
            zip(equation.outputs, equation.compute([*map(read, equation.inputs)]), strict=True)
        )
    return [read(each) for each in roots]


def depends(outputs: Sequence[Value]) -> Iterator[frozenset[int]]:
    """Yield, for each carry, all carries that later values of it depend on."""
    direct = [each.carries for each in outputs]
    for own in direct:
        seen = set(own)
        stack = list(own)
        while stack:
            new = direct[stack.pop()] - seen
            seen |= new
            stack += new
        yield frozenset(seen)
