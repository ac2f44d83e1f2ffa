"""Loops of JAX whose carries of floats a cell computes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...capture.elementwise import ELEMENTWISE
from ...capture.equations import Equation, NotCaptured, Value
from ...capture.loop import Body
from ...capture.run import Runner
from ...recurrent import Cell
from ...recurrent.arguments import Options
from ...recurrent.step import OneCell
from ..binder import FUNCTIONS
from ..ffi.calls import together
from ..ffi.primitives import TracedNetwork, run
from .equations import opened, read_equations

# Operations that give the same for all steps at once, beside elementwise ones.
_MAPPED = {
    *ELEMENTWISE,
    *("broadcast_in_dim", "concatenate", "custom_jvp_call", "custom_vjp_call", "dot_general"),
    *("erf", "exp2", "expand_dims", "iota", "is_finite", "log1p", "log_softmax", "pow"),
    *("reduce_max", "reduce_min", "reduce_sum", "reshape", "round", "floor", "ceil", "slice"),
    *("split", "squeeze", "transpose", "argmax", "argmin", "erf_inv", "gather", "pad", "cumsum"),
}


def body_of(equation: Any) -> Body:
    """Return the body of a ``lax.scan``."""
    options = equation.params
    jaxpr, constants = opened(options["jaxpr"])
    if jaxpr.effects:
        raise NotCaptured("effects, such as prints and callbacks")
    if "ft_in" in options:  # from JAX 0.12 on
        consts, count, _ = (len(list(each)) for each in options["ft_in"].unpack())
    else:
        consts, count = options["num_consts"], options["num_carry"]
    outputs = jaxpr.outvars[:count]
    values = []
    for k, each in enumerate(jaxpr.invars):
        carry = k - consts
        is_carry = 0 <= carry < count and outputs[carry] is not each
        carries = frozenset([carry] if is_carry else [])
        values.append(Value(each.aval, carries=carries, is_step=carry >= count))
    _, results = read_equations(jaxpr, constants, values)
    return Body(values, results, consts, count)


@functools.lru_cache(maxsize=256)
def _network_of(cell: Cell) -> TracedNetwork:
    """Return a network of one cell."""
    return TracedNetwork(OneCell(cell))


class JaxRunner(Runner):
    """Runs a loop of JAX."""

    xp = FUNCTIONS

    def is_mapped(self, equation: Equation) -> bool:
        """Return whether an equation gives the same for all steps at once."""
        return equation.name in _MAPPED

    def array(self, given: Any) -> Any:
        """Return an array of the dtype of states."""
        return jnp.asarray(given, self.dtype)

    def as_array(self, given: Any) -> Any:
        """Return an array of its own dtype."""
        return jnp.asarray(given)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Return zeros."""
        return jnp.zeros(shape, self.dtype)

    def loop(self, step: Any, begin: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the last states and stacked outputs of ``state, outputs = step(state, row)``."""
        found: tuple[list[Any], list[Any]] = jax.lax.scan(step, begin, rows, self.length)
        return found

    def over(self, function: Any, rows: list[Any]) -> list[Any]:
        """Return the results of a function of rows, for all of them."""
        found: list[Any] = jax.vmap(function)(*rows)
        return found

    def cell(self, options: Options, params: list[Any], x: Any, state: Any) -> tuple[Any, Any]:
        """Return the outputs and last states of the cell."""
        params, x, state = together((params, x, state))
        network = _network_of(self.own.one)
        return run(network, options, params, x, state, lengths=None, resets=None)
