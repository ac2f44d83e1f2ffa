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

# Keywords of ``sim.forward`` that a compiled program may have.
_OPTIONS = "t0", "rtol", "atol", "memory_limit"


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

    As :meth:`sparsescan.simulate.TimeSteps.forward`, under ``jax.jit``, ``jax.grad`` (once, in
    reverse mode) and ``jax.vmap``, which runs one simulation after the other. States are computed
    in float64 on the host, whether or not JAX has float64. Numbers of Python and arrays of NumPy
    keep all their digits. There are no second derivatives and no forward mode, and `until` is not
    taken: a program of JAX has as many steps whatever its numbers are.

    The functions of the simulation are of NumPy. Those of JAX, with ``derivatives="jax"``, work
    outside of ``jax.jit`` and ``jax.vmap`` alone: a compiled program waits for them on the threads
    that they need.

    Parameters
    ----------
    sim : ImplicitSteps or TimeSteps
        The simulation.
    u0 : array_like, shape (n,) or (batch, n)
        The initial state, or those of samples.
    params : array_like, dict, tuple or None
        Parameters; those in a dict or a tuple are arrays or numbers.
    steps : int, optional
        How many steps; by default as many as `dt` has lengths.
    dt : array_like, shape () or (steps,)
        The length of all steps, or of each.
    last : bool, default False
        Whether to return the last state alone, which `memory_limit` asks for.
    **options
        ``t0``, ``rtol``, ``atol`` and ``memory_limit`` of ``sim.forward``.

    Returns
    -------
    jax.Array, shape (steps + 1, n) or (n,)
        The states, the initial one first; or the last one; with an axis of samples before the last
        if `u0` has one. It has the dtype of `u0`.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong, or a simulation with a function of JAX is compiled or mapped, or
        gradients are differentiated once more.
    DeviceError
        If JAX computes on another device than the CPU.
    NewtonError, MemoryLimitError
        As ``sim.forward``; within a compiled program an error of JAX has their message.

    See Also
    --------
    sparsescan.torch.simulate : The same for PyTorch.

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
    if "until" in options:
        raise InputError(
            "until is given, which chooses the number of steps; expected steps and dt, or dt of "
            "each step, such as np.diff(sim.forward(..., until=...).times)"
        )
    refuse_unknown("simulate", options, ["steps", "dt", "last", *_OPTIONS])
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
    """A simulation with all that is not an array of JAX, for arrays of one shape each.

    It is equal to others that compute the same.

    Parameters
    ----------
    sim : ImplicitSteps or TimeSteps
        The simulation.
    structure : Leaves
        That of parameters.
    leaves : list
        The initial state, lengths of steps and parameters; any numbers for arrays of JAX.
    places : list of int
        The places of arrays of JAX among these.
    steps, last, options
        As those of :func:`simulate`.
    dtype : dtype
        That of the states that are returned.

    Attributes
    ----------
    kinds : tuple of jax.ShapeDtypeStruct
        What the states are, and what is kept of them.
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
        self._key = (
            *(sim, structure.kind, tuple(structure.names), tuple(places), steps, last, dtype),
            *(tuple(sorted(options)), tuple(map(_identity, [*options.values(), *leaves]))),
        )
        # A run for shapes, and for errors before there are numbers.
        run = self._prepare(())
        if run.states is None and not last:
            raise InputError("last is False; expected True: memory_limit keeps no other state")
        shape = run.last.shape if last else (run.planned + 1, *run.last.shape)
        words = (((*each.shape[:-1], 2 * each.shape[-1]), np.uint32) for each in run.kept)
        kinds = (shape, dtype), *words
        self.kinds = tuple(jax.ShapeDtypeStruct(*each) for each in kinds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _prepare(self, arrays: Sequence[Any]) -> Run:
        """Return a run whose steps are not taken yet."""
        leaves = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=False):
            leaves[place] = np.asarray(array, np.float64)[()]
        u0, dt, *own = leaves
        params = self._structure.joined(own)
        return self._sim.prepare(u0, params, steps=self._steps, dt=dt, **self._options)

    def states(self, *arrays: Any) -> list[Any]:
        """Return states, or the last one."""
        return self.passed(*arrays)[:1]

    def passed(self, *arrays: Any) -> list[Any]:
        """Return states, or the last one, and what the backward pass needs, as words."""
        run = self._prepare(arrays)
        run.march(None)
        return [run.last if self._last else run.states, *map(_words, run.kept)]

    def grads(self, above: Any, *both: Any) -> list[Any]:
        """Return gradients in arrays, given that in states, the arrays, and what was kept."""
        count = len(self._places)
        run = self._prepare(both[:count])
        run.restore([np.ascontiguousarray(each).view(np.float64) for each in both[count:]])
        found = run.backward(**{"grad_last" if self._last else "grad_states": above})
        leaves = [found.u0, found.dt, *Leaves.of(found.params).leaves]
        return [leaves[place] for place in self._places]


def _identity(leaf: Any) -> tuple[Any, ...]:
    """Return what tells numbers apart: copies of them, and whether they are numbers of Python."""
    array = np.asarray(leaf)
    return type(leaf), array.shape, array.dtype.str, array.tobytes()


def _words(array: Any) -> Any:
    """Return numbers in float64 as words, which JAX has whether or not it has float64."""
    return np.ascontiguousarray(array).view(np.uint32)


@functools.cache
def _same(call: _Call) -> _Call:
    """Return the first of equal calls, which programs may be compiled for."""
    return call


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _computed(call: _Call, name: str, kinds: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return what a method of a call returns: at once, or in a program of JAX."""
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
