"""Run loops written for ``jax.lax.scan`` by the kernels of recurrent cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex

from ..capture.equations import NotCaptured
from ..capture.loop import Explanation, Plan, plan
from ..capture.run import execute
from .capture.equations import bind, opened
from .capture.run import JaxRunner, body_of

# From this many numbers in a carry on, kernels are faster than loops that XLA compiles.
_FEWEST = {"hidden": 4, "input": 16, "": 256}


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Return the results of ``jax.lax.scan``, by compiled kernels if they support the step.

    It reads the equations of the step as a :class:`sparsescan.recurrent.Cell`, whose kernels run
    all steps and the backward pass. It replaces ``jax.lax.scan`` under ``jax.jit``, ``jax.vmap``
    and all derivatives, also in the values that `f` closes over. A step is cut into three parts.
    Operations that do not wait for a float state run before the loop, for all steps at once if
    possible: products of inputs, random numbers, counters. Kernels run the states. Operations that
    only outputs or sums of losses need run after the loop. A step that kernels do not support runs
    in ``jax.lax.scan``; :func:`explain` says why.

    Parameters
    ----------
    f : callable
        The step, ``carry, y = f(carry, x)``, of any pytrees.
    init : pytree
        The first carry.
    xs : pytree, optional
        The inputs of the steps, along the first axis of each leaf.
    length : int, optional
        The number of steps, if there are no `xs`.
    reverse : bool, default False
        Whether to run from the last step to the first.
    unroll : int or bool, default 1
        How many steps a loop of JAX unrolls; kernels ignore it.

    Returns
    -------
    carry : pytree
        The last carry.
    ys : pytree
        The outputs of all steps, stacked along their first axis.

    Raises
    ------
    TypeError, ValueError
        As ``jax.lax.scan`` raises them; it traces the step.

    See Also
    --------
    explain : Say what runs the loop, and which equation kernels do not support.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sparsescan.jax import scan
    >>> @jax.jit
    ... def loss(weights, x):
    ...     def step(h, x):
    ...         h = jnp.tanh(x + h @ weights)
    ...         return h, h
    ...     _, states = scan(step, jnp.zeros((16, 20)), x)
    ...     return (states**2).sum()
    >>> grad = jax.grad(loss)(jnp.eye(20), jnp.ones((50, 16, 20)))
    >>> grad.shape
    (20, 20)
    """
    results: tuple[Any, Any] = _Loop(f, init, xs, length, reverse, unroll).run()
    return results


def explain(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None
) -> Explanation:
    """Return whether kernels run a loop of :func:`scan`; if not, which equation prevents it.

    Parameters
    ----------
    f, init, xs, length
        As for :func:`scan`. Nothing is computed.

    Returns
    -------
    Explanation
        `is_captured` says whether kernels run the loop. `text` says what they compute, or which
        equation they do not support, with its line in the program.

    Raises
    ------
    TypeError, ValueError
        As :func:`scan`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from sparsescan.jax import explain
    >>> def step(h, x):
    ...     return jnp.tanh(x + h.cumsum(-1)), h
    >>> how = explain(step, jnp.zeros((16, 20)), jnp.ones((50, 16, 20)))
    >>> how.is_captured, "cumsum" in how.text
    (False, True)
    """
    loop = _Loop(f, init, xs, length)
    if loop.plan is None:
        return Explanation(False, f"jax.lax.scan runs the loop: {loop.obstacle}")
    states = ", ".join(each.str_short() for each in loop.plan.states)
    return Explanation(True, f"kernels run the carries {states}:\n{loop.plan.one}")


class _Loop:
    """A loop, as JAX traces it."""

    def __init__(
        self, f: Any, init: Any, xs: Any, length: Any, reverse: Any = False, unroll: Any = 1
    ) -> None:
        def whole(init: Any, xs: Any) -> Any:
            return jax.lax.scan(f, init, xs, length, reverse, unroll)

        self.program, shapes = jax.make_jaxpr(whole, return_shape=True)(init, xs)
        self.given, self.tree = jax.tree.leaves((init, xs)), jax.tree.structure(shapes)
        self.plan: Plan | None = None
        self.obstacle = ""
        try:
            self.plan = self._planned()
        except NotCaptured as error:
            self.obstacle = str(error)

    def _planned(self) -> Plan:
        loops = [each for each in self.program.eqns if each.primitive.name == "scan"]
        if len(loops) != 1:
            raise NotCaptured("no loop is traced")
        sizes = {n for each in loops[0].invars for n in each.aval.shape} | {
            loops[0].params["length"]
        }
        if not all(isinstance(n, int) for n in sizes):
            raise NotCaptured("a size that is no number, but a symbol")
        if loops[0].params["length"] == 0:
            raise NotCaptured("no steps")
        if jax.default_backend() != "cpu":
            raise NotCaptured(f"JAX computes on {jax.default_backend()!r}")
        return plan(body_of(loops[0]), _FEWEST)

    def run(self) -> Any:
        """Return the last carry and the outputs."""
        jaxpr, consts = opened(self.program)
        if self.plan is None:
            leaves = jax.core.eval_jaxpr(jaxpr, consts, *self.given)
            return jax.tree.unflatten(self.tree, leaves)
        arrays = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *self.given], strict=True))

        def read(each: Any) -> Any:
            return each.val if isinstance(each, jex.Literal) else arrays[each]

        for equation in jaxpr.eqns:
            given = [*map(read, equation.invars)]
            if equation.primitive.name == "scan":
                options = equation.params
                about = options["length"], options["reverse"]
                found = execute(JaxRunner, self.plan, given, *about)
            else:
                found = bind(equation, given)
            arrays.update(zip(equation.outvars, found, strict=True))
        leaves = [_typed(read(each), each.aval) for each in jaxpr.outvars]
        return jax.tree.unflatten(self.tree, leaves)


def _typed(array: Any, aval: Any) -> Any:
    """Return an array whose type is weak if that of `aval` is."""
    is_weak = aval.weak_type
    if jax.typeof(array).weak_type == is_weak:
        return array
    return jex.primitives.convert_element_type_p.bind(
        array, new_dtype=aval.dtype, weak_type=is_weak, sharding=None
    )
