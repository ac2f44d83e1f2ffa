"""Simulations as functions of JAX."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, InputTypeError, short
from ..simulate import ImplicitSteps, TimeSteps
from ..simulate.arguments import refuse_unknown
from ..simulate.params import Leaves, read_array
from ..simulate.run import Run
from .ffi.calls import FLOATS, check_platform
from .ffi.host import call_host

# Keywords of ``sim.forward`` that a compiled program supports.
_OPTIONS = "t0", "rtol", "atol", "memory_limit"
_OF_LENGTHS = "until", "error", "max_dt", "t_eval"


def simulate(
    sim: ImplicitSteps | TimeSteps,
    u0: Any,
    params: Any = None,
    *,
    steps: int | None = None,
    dt: Any,
    last: bool = False,
    **options: Any,
) -> Any:
    """Return the states of a simulation, differentiable in the initial state, parameters and steps.

    This is :meth:`sparsescan.simulate.TimeSteps.forward` under ``jax.jit``, ``jax.grad`` (first
    gradients, in reverse mode) and ``jax.vmap``, which runs one simulation after the other. States
    are computed in float64 on the host, whether or not JAX has float64 enabled. Python numbers and
    NumPy arrays keep full precision. There are no second derivatives and no forward mode. With
    ``until=`` the number of steps is not known to JAX: only the last state or those at `t_eval` are
    returned, and the backward pass takes the steps again.

    The simulation's functions are NumPy functions. JAX functions, with ``derivatives="jax"``, work
    only outside ``jax.jit`` and ``jax.vmap``: a compiled program would wait for them on the threads
    that they need.

    Parameters
    ----------
    sim : ImplicitSteps or TimeSteps
        The simulation.
    u0 : array_like, shape (n,) or (batch, n)
        The initial state, or one for each sample.
    params : array_like, dict, tuple or None
        Parameters; a dict or a tuple holds arrays or numbers.
    steps : int, optional
        The number of steps; by default the number of lengths in `dt`.
    dt : array_like, shape () or (steps,)
        The length of all steps, or of each step. With ``until=`` it is the first length to try, and
        its gradient is zero.
    last : bool, default False
        Whether to return only the last state. `memory_limit` needs this, and ``until=`` without
        `t_eval`.
    **options
        Those of ``sim.forward``, except `check` and `progress`. With ``t_eval=`` only the states at
        these times are returned.

    Returns
    -------
    jax.Array, shape (steps + 1, n) or (n,)
        The states, the initial one first, or those at `t_eval`; or the last state. If `u0` has an
        axis of samples, so has the result, before the last axis. The dtype is that of `u0`.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong, if a simulation with a JAX function is compiled or mapped, or for
        second derivatives.
    DeviceError
        If JAX does not compute on the CPU.
    NewtonError, MemoryLimitError
        As ``sim.forward``. In a compiled program, an error of JAX has their message.

    See Also
    --------
    sparsescan.torch.simulate : The function for PyTorch.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from sparsescan.jax import simulate
    >>> from sparsescan.simulate import TimeSteps
    >>> sim = TimeSteps(lambda u, t, p: -p * u, np.eye(2))
    >>> def loss(decay):
    ...     return simulate(sim, jnp.ones(2), decay, steps=10, dt=0.1)[-1].sum()
    >>> bool(jnp.isclose(jax.jit(jax.grad(loss))(0.5), -2 * 1.05**-11))
    True
    """
    if not isinstance(sim, ImplicitSteps | TimeSteps):
        raise InputTypeError(f"sim is {short(sim)}; expected ImplicitSteps or TimeSteps")
    refuse_unknown("simulate", options, ["steps", "dt", "last", *_OPTIONS, *_OF_LENGTHS])
    options = {name: each for name, each in options.items() if each is not None}
    if "until" not in options:
        if lone := [name for name in _OF_LENGTHS if name in options]:
            raise InputError(f"{lone[0]} is given without until; expected both, or neither")
    elif "t_eval" not in options and not last:
        raise InputError(
            "until is given, which chooses the number of steps; expected last=True, or the times "
            "of states in t_eval"
        )
    for name, option in options.items():
        if isinstance(option, jax.core.Tracer):
            raise InputTypeError(f"{name} is traced; expected a number known at compilation")
    if not isinstance(u0, jax.Array) and read_array("u0", u0).dtype.kind not in "fiub":
        raise InputTypeError(f"u0 is {short(u0)}; expected real numbers")
    check_platform()
    own = Leaves.of(params)
    leaves = [u0, dt, *own.leaves]
    traced = {}
    for k, (name, leaf) in enumerate(zip(["u0", "dt", *own.titles], leaves, strict=True)):
        if not isinstance(leaf, jax.Array):
            if leaf is not None:
                array = read_array(name, leaf)
                leaves[k] = array if array.ndim else leaf
            continue
        if leaf.dtype not in FLOATS:
            raise InputTypeError(f"{name} has dtype {leaf.dtype}; expected {' or '.join(FLOATS)}")
        traced[k], leaves[k] = leaf, np.ones(leaf.shape)
    dtype = jnp.result_type(jnp.asarray(u0), jnp.float32)
    about = sim, own._replace(leaves=[]), leaves, list(traced)
    return _simulate(_Call(*about, steps, last, options, dtype), list(traced.values()))


class _Call:
    """A simulation and all its arguments except JAX arrays, for fixed shapes of these.

    Two calls are equal if they compute the same function.

    Parameters
    ----------
    sim : ImplicitSteps or TimeSteps
        The simulation.
    structure : Leaves
        The structure of the parameters.
    leaves : list
        The initial state, lengths of steps and parameters; JAX arrays are replaced by any numbers.
    places : list of int
        The places of the JAX arrays among the leaves.
    steps, last, options
        As for :func:`simulate`.
    dtype : dtype
        The dtype of the returned states.

    Attributes
    ----------
    kinds : tuple of jax.ShapeDtypeStruct
        The types of the states and of what is kept.
    uses_jax : bool
        Whether the simulation has functions of JAX.
    """

    def __init__(
        self,
        sim: ImplicitSteps | TimeSteps,
        structure: Leaves,
        leaves: list[Any],
        places: list[int],
        steps: int | None,
        last: bool,
        options: Mapping[str, Any],
        dtype: Any,
    ) -> None:
        self.uses_jax = sim.uses_jax
        self._sim, self._structure, self._leaves, self._places = sim, structure, leaves, places
        self._steps, self._last, self._options = steps, last, dict(options)
        self._chooses = "until" in options
        self._key = (
            *(sim, structure.kind, tuple(structure.names), tuple(places), steps, last, dtype),
            *(tuple(sorted(options)), tuple(map(_identity, [*options.values(), *leaves]))),
        )
        # A run only for shapes and early errors.
        run = self._prepare(())
        if run.states is None and not last:
            raise InputError("last is False; expected True: memory_limit keeps no other state")
        count = np.size(options["t_eval"]) if self._chooses and not last else run.planned + 1
        shape = run.last.shape if last else (count, *run.last.shape)
        kept = () if self._chooses else run.kept
        words = (((*each.shape[:-1], 2 * each.shape[-1]), np.uint32) for each in kept)
        kinds = (shape, dtype), *words
        self.kinds = tuple(jax.ShapeDtypeStruct(*each) for each in kinds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _given(self, arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the initial state, the parameters and the lengths of steps."""
        leaves = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=False):
            leaves[place] = np.asarray(array, np.float64)[()]
        u0, dt, *own = leaves
        return u0, self._structure.joined(own), dt

    def _prepare(self, arrays: Sequence[Any]) -> Run:
        """Return a run before its first step; of one step where the run chooses lengths."""
        u0, params, dt = self._given(arrays)
        options = {name: self._options[name] for name in _OPTIONS if name in self._options}
        steps = 1 if self._chooses and np.ndim(dt) == 0 else self._steps
        return self._sim.prepare(u0, params, steps=steps, dt=dt, **options)

    def _march(self, arrays: Sequence[Any]) -> Run:
        """Return a run that chose the lengths of its steps."""
        u0, params, dt = self._given(arrays)
        return self._sim.forward(u0, params, steps=self._steps, dt=dt, **self._options)

    def states(self, *arrays: Any) -> list[Any]:
        """Return the states, or the last state."""
        return self.passed(*arrays)[:1]

    def passed(self, *arrays: Any) -> list[Any]:
        """Return the states, or the last state, and what the backward pass needs, as words."""
        if self._chooses:
            run = self._march(arrays)
            return [run.last if self._last else _states(run)[run.evaluated]]
        run = self._prepare(arrays)
        run.march(None)
        return [run.last if self._last else run.states, *map(_words, run.kept)]

    def grads(self, above: Any, *both: Any) -> list[Any]:
        """Return gradients in arrays, from the gradient in states, the arrays and what was kept."""
        count = len(self._places)
        if self._chooses:
            run = self._march(both)
            if not self._last:
                some, above = above, np.zeros_like(_states(run))
                above[run.evaluated] = some
        else:
            run = self._prepare(both[:count])
            run.restore([np.ascontiguousarray(each).view(np.float64) for each in both[count:]])
        found = run.backward(**{"grad_last" if self._last else "grad_states": above})
        in_dt = np.zeros(()) if self._chooses else found.dt
        leaves = [found.u0, in_dt, *Leaves.of(found.params).leaves]
        return [leaves[place] for place in self._places]


def _identity(leaf: Any) -> tuple[Any, ...]:
    """Return a comparable form of numbers: copies, and whether they are Python numbers."""
    array = np.asarray(leaf)
    return type(leaf), array.shape, array.dtype.str, array.tobytes()


def _states(run: Run) -> Any:
    """Return the states of a run that chose the lengths of its steps."""
    if run.states is None:
        raise InputError("last is False; expected True: memory_limit keeps no other state")
    return run.states


def _words(array: Any) -> Any:
    """Return float64 numbers as integer words, which JAX has even without float64."""
    return np.ascontiguousarray(array).view(np.uint32)


@functools.cache
def _same(call: _Call) -> _Call:
    """Return the first of equal calls, since programs may be compiled for it."""
    return call


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _computed(call: _Call, name: str, kinds: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return the result of a call's method, at once or in a JAX program."""
    if any(isinstance(each, jax.core.Tracer) for each in arrays):
        if call.uses_jax:
            raise InputTypeError(
                "sim has derivatives='jax'; expected functions of NumPy within jax.jit and jax.vmap"
            )
        return call_host(getattr(_same(call), name), arrays, kinds)
    found = getattr(call, name)(*map(np.asarray, arrays))
    return [jnp.asarray(each, kind.dtype) for each, kind in zip(found, kinds, strict=True)]


@_computed.defjvp
def _differentiated(*_: Any) -> Any:
    raise InputError(
        "gradients of a simulation of sparsescan were differentiated once more; expected jax.grad, "
        "jax.vjp or jax.jacrev once: differences of gradients have second derivatives"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _simulate(call: _Call, arrays: Sequence[Any]) -> Any:
    return _computed(call, "states", call.kinds[:1], arrays)[0]


def _forward(call: _Call, arrays: Sequence[Any]) -> Any:
    states, *kept = _computed(call, "passed", call.kinds, arrays)
    return states, (arrays, kept)


def _backward(call: _Call, held: Any, above: Any) -> Any:
    arrays, kept = held
    kinds = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays)
    return (_computed(call, "grads", kinds, [above, *arrays, *kept]),)


_simulate.defvjp(_forward, _backward)
