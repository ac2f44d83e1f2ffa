"""Equations of JAX, which stand in a jaxpr."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from ...capture import loop
from ...capture.elementwise import program, with_slopes
from ...capture.equations import Equation, Value, identity
from ...graph import functions
from ...graph.operations import Node

_FOLDERS = tuple(
    str(Path(each).parent) for each in (jax.__file__, np.__file__, __file__, loop.__file__)
)
# Calls whose equations stand in their place, and the parameter that has these.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
# Within functions that have derivatives of their own, those of others are not read.
_WITHIN = _CALLS | {"custom_jvp_call": "call_jaxpr"}


class Traced(Equation):
    """An equation of JAX; `callers` are the calls of the program that it stands in."""

    __slots__ = ("callers", "traced")

    def __init__(self, equation: Any, inputs: Sequence[Value], callers: Sequence[Any]) -> None:
        self.traced, self.callers = equation, callers
        avals = [each.aval for each in equation.outvars]
        super().__init__(equation.primitive.name, inputs, equation.params, avals)

    def line(self) -> str:
        """Return the line of the caller's text where the equation was made."""
        # Equations of functions of JAX have no lines of the caller's; the calls of these have.
        lines = (_line_of(each.source_info) for each in (self.traced, *reversed(self.callers)))
        return next(filter(None, lines), "")

    def compute(self, given: Sequence[Any]) -> list[Any]:
        """Return the results for some arrays."""
        return bind(self.traced, given)

    def folded(self, given: Sequence[Any]) -> float:
        """Return the result for some numbers."""
        with jax.ensure_compile_time_eval():
            return float(self.compute(given)[0])

    def derived(self, name: str, inputs: Sequence[Value], **options: Any) -> Value:
        """Return the result of another operation, in place of this one."""
        return self._read(lambda *given: _DERIVED[name](*given, **options), inputs)

    def again(self, inputs: Sequence[Value]) -> Value:
        """Return the result of the same operation of other arguments."""
        return self._read(lambda *given: self.compute(given)[0], inputs)

    def strided(self, value: Value, begin: int, end: int, step: int, axis: int) -> Value:
        """Return each so many-th number along an axis of a value."""
        return self._read(lambda a: jax.lax.slice_in_dim(a, begin, end, step, axis), [value])

    def _read(self, function: Callable[..., Any], inputs: Sequence[Value]) -> Value:
        """Return the result of a function, in place of this equation's."""
        shapes = [jax.ShapeDtypeStruct(each.shape, each.aval.dtype) for each in inputs]
        made = jax.make_jaxpr(function)(*shapes)
        callers = [*self.callers, self.traced]
        _, (value,) = read_equations(made.jaxpr, made.consts, inputs, None, callers)
        return value

    def custom(self) -> Callable[..., Node] | None:
        """Return a function with derivatives of its own, as an operation of one number a unit."""
        return custom(self) if self.name in ("custom_jvp_call", "custom_vjp_call") else None


# Operations that others are read as.
_DERIVED: dict[str, Callable[..., Any]] = {
    "add": jax.lax.add,
    "concatenate": lambda *given, dimension: jax.lax.concatenate(given, dimension),
    "dot_general": jax.lax.dot_general,
    "expand_dims": jax.lax.expand_dims,
    "mul": jnp.multiply,
    "reduce_sum": lambda each, axes: jnp.sum(each, axes),
    "reshape": jax.lax.reshape,
    "slice": jax.lax.slice_in_dim,
    "squeeze": jax.lax.squeeze,
}


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
    calls: Mapping[str, str] = _CALLS,
) -> tuple[list[Equation], list[Value]]:
    """Return the equations of a program, those that it calls among them, and its results.

    Equal ones are one; `known` are those that were read before, `callers` the calls of the program,
    and `calls` the names of calls that are read, with the parameters that have their equations.
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
        called = each.params.get(calls.get(each.primitive.name, ""))
        if called is None:
            key = _key_of(each, inputs)
            equation = known.get(key) or Traced(each, inputs, callers)
            known[key] = equation
            found.append(equation)
            outputs: Sequence[Value] = equation.outputs
        else:
            more, outputs = read_equations(*opened(called), inputs, known, [*callers, each], calls)
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
    return equation.primitive.name, about, tuple(map(identity, inputs))


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program and its constants."""
    return (program.jaxpr, program.consts) if hasattr(program, "consts") else (program, ())


# -- Functions with derivatives of their own -------------------------------------------------------


def custom(equation: Traced) -> Callable[..., Node]:
    """Return a function whose derivatives are given, as an operation of one number a unit."""
    if len(equation.outputs) != 1:
        equation.refuse("a function with several results")
    if _is_softplus(equation):
        return lambda a, b: functions.softplus(a)
    shapes = [jax.ShapeDtypeStruct(each.shape, each.aval.dtype) for each in equation.inputs]
    value = _program(equation, *opened(equation.options["call_jaxpr"]))
    places = [
        k
        for k, each in enumerate(equation.inputs)
        if each.number is None and each.aval.dtype != bool
    ]
    return with_slopes(value, [(k, _slope(equation, k, shapes)) for k in places])


def _is_softplus(equation: Traced) -> bool:
    """Return whether an equation is JAX's ``logaddexp(a, 0)``."""
    if equation.name != "custom_jvp_call" or len(equation.inputs) != 2:
        return False
    a, b = equation.inputs
    if b.number != 0 or b.shape or a.aval.dtype not in ("float32", "float64"):
        return False
    return str(equation.options["call_jaxpr"]) == _softplus(a.aval.dtype.name, a.shape)


@functools.lru_cache(maxsize=64)
def _softplus(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the text of JAX's ``logaddexp(a, 0)``."""
    made = jax.make_jaxpr(jax.nn.softplus)(jax.ShapeDtypeStruct(shape, dtype))
    equations, _ = read_equations(made.jaxpr, made.consts, [Value(each) for each in made.in_avals])
    return str(equations[0].options.get("call_jaxpr"))


def _slope(equation: Traced, k: int, shapes: Sequence[Any]) -> Callable[..., Node]:
    """Return the derivative of a function in one of its arguments."""

    def along(given: Sequence[Any]) -> Callable[[Any], Any]:
        return lambda own: equation.compute([*given[:k], own, *given[k + 1 :]])[0]

    if equation.name == "custom_jvp_call":

        def forward(*given: Any) -> Any:
            own = along(given)
            return jax.jvp(own, (given[k],), (jnp.ones_like(given[k]),))[1]

        made = jax.make_jaxpr(forward)(*shapes)
        return _program(equation, made.jaxpr, made.consts)

    def backward(above: Any, *given: Any) -> Any:
        return jax.vjp(along(given), given[k])[1](above)[0]

    result = equation.outputs[0]
    if equation.inputs[k].shape != result.shape:
        equation.refuse("a gradient in a number")
    above = jax.ShapeDtypeStruct(result.shape, result.aval.dtype)
    made = jax.make_jaxpr(backward)(above, *shapes)
    return _program(equation, made.jaxpr, made.consts, is_linear=True)


def _program(
    equation: Traced, jaxpr: Any, consts: Sequence[Any], is_linear: bool = False
) -> Callable[..., Node]:
    """Return a program of one number a unit as an operation."""
    arguments = [Value(each.aval) for each in jaxpr.invars]
    _, results = read_equations(jaxpr, consts, arguments, calls=_WITHIN)
    return program(equation, arguments, results, is_linear)
