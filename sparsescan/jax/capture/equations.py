"""The equations of a body: which read states and inputs of a step, and what they compute."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend import core as jex

_FOLDERS = tuple(str(Path(each).parent) for each in (jax.__file__, np.__file__, __file__))
# Calls whose equations stand in their place, and the parameter that has these.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}

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
    aval : jax.core.ShapedArray
        Its shape and dtype.
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
        with jax.ensure_compile_time_eval():
            (found,) = equation.compute([np.asarray(n, each.aval.dtype) for n, each in pairs])
        return float(found)


class Equation:
    """An equation of a body: an operation of values, and where the caller wrote it."""

    __slots__ = ("callers", "inputs", "name", "options", "outputs", "traced")

    def __init__(self, equation: Any, inputs: Sequence[Value], callers: Sequence[Any]) -> None:
        self.traced, self.inputs, self.callers = equation, tuple(inputs), callers
        self.name: str = equation.primitive.name
        self.options: dict[str, Any] = equation.params
        carries = frozenset[int]().union(*(each.carries for each in inputs))
        is_step = any(each.is_step for each in inputs)
        self.outputs = tuple(
            Value(each.aval, self, None, carries, is_step) for each in equation.outvars
        )

    def refuse(self, why: str) -> NoReturn:
        """Raise an error that says why no kernel runs the equation, and where it is."""
        # Equations of functions of JAX have no lines of the caller's; the calls of these have.
        lines = (_line_of(each.source_info) for each in (self.traced, *reversed(self.callers)))
        raise NotCaptured(f"{self.name}{next(filter(None, lines), '')}: {why}")

    def compute(self, given: Sequence[Any]) -> list[Any]:
        """Return the results for some arrays."""
        return bind(self.traced, given)


def bind(equation: Any, given: Sequence[Any]) -> list[Any]:
    """Return the results of an equation of JAX for some arrays."""
    pairs = zip(equation.invars, given, strict=True)
    arrays = {each: own for each, own in pairs if not isinstance(each, jex.Literal)}
    about = jex.DebugInfo("scan", equation.primitive.name, None, None)
    program = jex.Jaxpr([], [*arrays], equation.outvars, [equation], debug_info=about)
    found: list[Any] = jax.core.eval_jaxpr(program, [], *arrays.values())
    return found


def _line_of(place: Any) -> str:
    """Return the line of the caller's text where an equation was made."""
    trace = getattr(place, "traceback", None)
    for frame in trace.frames if trace is not None else ():
        path, line = frame.file_name, frame.line_num
        if not path.startswith(_FOLDERS) and not path.startswith("<frozen"):
            text = linecache.getline(path, line).strip()
            return f" ({Path(path).name}, line {line}{f': {text!r}' if text else ''})"
    return ""


def constant(array: Any) -> Value:
    """Return a value that is known."""
    return Value(jax.typeof(array), constant=array)


def read_equations(
    jaxpr: Any,
    consts: Iterable[Any],
    arguments: Sequence[Value],
    known: dict[Any, Equation] | None = None,
    callers: Sequence[Any] = (),
) -> tuple[list[Equation], list[Value]]:
    """Return the equations of a program, those that it calls among them, and its results.

    Equal ones are one; `known` are those that were read before, and `callers` the calls of the
    program.
    """
    found: list[Equation] = []
    known = {} if known is None else known
    values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(each: Any) -> Value:
        if isinstance(each, jex.Literal):
            return Value(each.aval, constant=each.val)
        return values[each]

    for each in jaxpr.eqns:
        inputs = [read(one) for one in each.invars]
        called = each.params.get(_CALLS.get(each.primitive.name, ""))
        if called is None:
            key = _key_of(each, inputs)
            equation = known.get(key) or Equation(each, inputs, callers)
            known[key] = equation
            found.append(equation)
            outputs: Sequence[Value] = equation.outputs
        else:
            more, outputs = read_equations(*opened(called), inputs, known, [*callers, each])
            found += more
        values.update(zip(each.outvars, outputs, strict=True))
    return found, [read(each) for each in jaxpr.outvars]


def _key_of(equation: Any, inputs: Sequence[Value]) -> Any:
    """Return what equal equations have in common."""
    about = tuple(sorted(equation.params.items()))
    try:
        hash(about)
    except TypeError:
        about = (id(equation),)
    return equation.primitive.name, about, tuple(map(_identity, inputs))


def _identity(value: Value) -> Any:
    if value.constant is None or value.shape:
        return value
    return value.aval.dtype, value.aval.weak_type, np.asarray(value.constant).tobytes()


def traced(
    function: Callable[..., Any], given: Sequence[Value], reader: Equation
) -> tuple[list[Equation], list[Value]]:
    """Return the equations of a function of values, and its results, in place of another one."""
    made = jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(each.shape, each.aval.dtype) for each in given)
    )
    callers = [*reader.callers, reader.traced]
    return read_equations(made.jaxpr, made.consts, given, None, callers)


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program and its constants."""
    return (program.jaxpr, program.consts) if hasattr(program, "consts") else (program, ())


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
