"""Recurrent networks over whole sequences, for JAX."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, InputTypeError, short
from ..jacobians import Recurrent, TrainingStep
from ..jacobians.step_pool import StepPool, run_forward
from ._calls import as_float, check_platform

__all__ = ["recurrent"]


def recurrent(
    network: Recurrent, params: Mapping[str, Any], x: Any, state: Any = None, lengths: Any = None
) -> tuple[Any, Any]:
    """Return the outputs and the last states of a recurrent network.

    As :meth:`sparsescan.jacobians.TrainingStep.forward`, for arrays of JAX, under ``jax.jit``,
    ``jax.grad`` (once, in reverse mode) and ``jax.vmap`` (one after the other: samples belong into
    the batch axis). It takes the place of a ``jax.lax.scan`` over a cell.

    Parameters
    ----------
    network : RNN, GRU or LSTM
        A network of :mod:`sparsescan.jacobians`, which says what is computed; its own parameters
        are not used, but ``network.params`` are good to begin with.
    params : dict of str to array_like
        The parameters, by the names that ``network.params`` has.
    x : array_like, shape (T, batch, input_size) or (T, input_size)
        The inputs.
    state : array_like, shape (layers · directions, [batch,] state_size), optional
        The initial states, by default zeros; those of an LSTM are ``[h, c]``.
    lengths : array_like of int, shape (batch,), optional
        How many steps each sample has; by default all have T.

    Returns
    -------
    output : jax.Array, shape (T, [batch,] directions · hidden_size)
        The outputs ``h_t`` of the last layer, 0 in steps that a sample does not have.
    state : jax.Array, shape (layers · directions, [batch,] state_size)
        The states after the last step of each sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong, when it is traced.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Notes
    -----
    The 32 latest forward passes keep what backward needs; where it has gone, the forward pass runs
    again.

    Examples
    --------
    >>> import jax, numpy as np
    >>> from sparsescan.jacobians import GRU
    >>> from sparsescan.jax import recurrent
    >>> net = GRU(12, 20, rng=0)
    >>> x = np.ones((50, 16, 12), np.float32)
    >>> @jax.jit
    ... def loss(params):
    ...     output, _ = recurrent(net, params, x)
    ...     return (output**2).sum()
    >>> grads = jax.grad(loss)(net.params)
    >>> grads["weight_hh_l0"].shape
    (60, 20)
    """
    check_platform()
    if not isinstance(network, Recurrent):
        raise InputTypeError(f"network is {short(network)}; expected an RNN, GRU or LSTM")
    known = network.params
    if not isinstance(params, Mapping) or set(params) != set(known):
        names = sorted(params) if isinstance(params, Mapping) else short(params)
        raise InputError(f"params has {names}; expected {sorted(known)}, as network.params")
    given = {name: as_float(f"params[{name!r}]", params[name]) for name in known}
    for name, param in given.items():
        if param.shape != known[name].shape:
            raise InputError(
                f"params[{name!r}] has shape {param.shape}; expected {known[name].shape}"
            )
    inputs = as_float("x", x)
    begin = None if state is None else as_float("state", state)
    if inputs.ndim not in (2, 3) or inputs.shape[-1] != network.input_size:
        raise InputError(
            f"x has shape {inputs.shape}; expected (T, batch, {network.input_size}) or (T, "
            f"{network.input_size})"
        )
    states = _state_shape(network, inputs.shape)
    if begin is not None and begin.shape != states:
        raise InputError(f"state has shape {begin.shape}; expected {states}")
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != inputs.shape[1:-1]:
            raise InputError(
                f"lengths has shape {lengths.shape} and dtype {lengths.dtype}; expected integers "
                f"of shape {inputs.shape[1:-1]}"
            )
    arrays = [inputs, *given.values(), *([] if begin is None else [begin])]
    dtype = jnp.result_type(*arrays)
    given = {name: param.astype(dtype) for name, param in given.items()}
    begin = jnp.zeros(states, dtype) if begin is None else begin.astype(dtype)
    output, last = _recurrent(network, given, inputs.astype(dtype), begin, lengths)
    return output, last


def _state_shape(network: Recurrent, x: tuple[int, ...]) -> tuple[int, ...]:
    directions = 1 + network.bidirectional
    return (network.num_layers * directions, *x[1:-1], network.state_size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrent(network: Recurrent, params: Any, x: Any, state: Any, lengths: Any) -> Any:
    output, last, _ = _call_forward(network, False, params, x, state, lengths)
    return output, last


def _forward(network: Recurrent, params: Any, x: Any, state: Any, lengths: Any) -> Any:
    given = params, x, state, lengths
    output, last, token = _call_forward(network, True, *given)
    return (output, last), (token, given)


def _backward(network: Recurrent, kept: Any, above: Any) -> Any:
    token, (params, x, state, lengths) = kept
    grads = _gradients(network, above, token, params, x, state, lengths)
    return (*grads, None)


_recurrent.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _call_forward(
    network: Recurrent, keeps: bool, params: Any, x: Any, state: Any, lengths: Any
) -> Any:
    width = network.hidden_size * (1 + network.bidirectional)
    results = (
        jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype),
        jax.ShapeDtypeStruct(state.shape, x.dtype),
        jax.ShapeDtypeStruct((), np.int32),
    )
    return jax.pure_callback(
        partial(_run_forward, network, keeps),
        *(results, params, x, state, lengths),
        vmap_method="sequential",
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    network: Recurrent, above: Any, token: Any, params: Any, x: Any, state: Any, lengths: Any
) -> Any:
    results = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), (params, x, state)
    )
    return jax.pure_callback(
        partial(_run_backward, network),
        *(results, above, token, params, x, state, lengths),
        vmap_method="sequential",
    )


def _no_more(*given: Any) -> Any:
    raise InputError(
        "gradients of a recurrent network of sparsescan were differentiated once more; expected "
        "one derivative: a jax.lax.scan over the cell has second ones"
    )


_call_forward.defjvp(_no_more)
_gradients.defjvp(_no_more)


# -- On the host -----------------------------------------------------------------------------------

# Forward passes whose backward pass may come.
_KEPT = 32
_lock = threading.Lock()
_pools: weakref.WeakKeyDictionary[Recurrent, StepPool[TrainingStep]] = weakref.WeakKeyDictionary()
_waiting: OrderedDict[int, tuple[StepPool[TrainingStep], TrainingStep]] = OrderedDict()
_tokens = itertools.count(1)


def _pool_of(network: Recurrent) -> StepPool[TrainingStep]:
    with _lock:
        pool = _pools.get(network)
        if pool is None:
            own = copy.deepcopy(network)
            pool = _pools[network] = StepPool(lambda: copy.deepcopy(own).training_step())
        return pool


def _arrays(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def _run_forward(
    network: Recurrent, keeps: bool, params: Any, x: Any, state: Any, lengths: Any
) -> Any:
    pool = _pool_of(network)
    params, x, state, lengths = _arrays((params, x, state, lengths))
    step, output, last = run_forward(pool, x, state, lengths, params)
    if not keeps:
        pool.give_back(step)
        return output, last, np.int32(0)
    with _lock:
        token = next(_tokens) % (1 << 31)
        _waiting[token] = pool, step
        late = _waiting.popitem(last=False)[1] if len(_waiting) > _KEPT else None
    if late is not None:
        late[0].give_back(late[1])
    return output, last, np.int32(token)


def _run_backward(
    network: Recurrent, above: Any, token: Any, params: Any, x: Any, state: Any, lengths: Any
) -> Any:
    above, params, x, state, lengths = _arrays((above, params, x, state, lengths))
    with _lock:
        kept = _waiting.pop(int(token), None)
    if kept is None:
        pool = _pool_of(network)
        step, _, _ = run_forward(pool, x, state, lengths, params)
    else:
        pool, step = kept
    grads = step.backward(*above)
    pool.give_back(step)
    return grads.params, grads.input, grads.state
