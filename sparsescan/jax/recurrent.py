"""Recurrent networks over whole sequences, for JAX."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ..arrays.arrays import check_no_mask
from ..errors import InputError, InputTypeError, short
from ..recurrent import Cell, Recurrent
from ..recurrent.recorded import Parameters, RecordedStep, parameters_of, program_text, record
from ..recurrent.step import OneCell, RecurrentLike, check_resets
from ._calls import as_float, check_platform, together
from ._programs import Lengths, add, call, key_of

__all__ = ["recurrent"]


def recurrent(
    network: Recurrent | Cell,
    params: Mapping[str, Any],
    x: Any,
    state: Any = None,
    lengths: Any = None,
    resets: Any = None,
) -> tuple[Any, Any]:
    """Return the outputs and the last states of a recurrent network.

    As :meth:`sparsescan.recurrent.TrainingStep.forward`, for arrays of JAX, under ``jax.jit``,
    ``jax.grad`` (once, in reverse mode) and ``jax.vmap``, by which samples become a batch. It takes
    the place of a ``jax.lax.scan`` over a cell.

    Parameters
    ----------
    network : Recurrent or Cell
        A network of :mod:`sparsescan.recurrent`, such as a GRU, or a cell, such as one of a class
        of your own, which says what is computed; its own parameters are not used, but
        ``network.params`` are good to begin with.
    params : dict of str to array_like
        The parameters, by the names that ``network.params`` has.
    x : array_like, shape (T, batch, input_size) or (T, input_size)
        The inputs.
    state : array_like, shape (layers · directions, [batch,] state_size), optional
        The initial states, by default zeros; those of an LSTM are ``[h, c]``. A cell is one layer.
    lengths : array_like of int, shape (batch,), optional
        How many steps each sample has; by default all have T.
    resets : array_like of bool, shape (T[, batch]), optional
        True where the state of a sample begins anew, with zeros, before a step, such as the first
        of an episode. A direction that runs backward in time begins anew when it goes from such a
        step to the one before.

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
    jax.errors.JaxRuntimeError
        If lengths are known only when a program runs, and one of them is not from 0 to T.
    DeviceError
        If JAX computes elsewhere than on the CPU.

    Examples
    --------
    >>> import jax, numpy as np
    >>> from sparsescan.recurrent import GRU
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
    if not isinstance(network, (Recurrent, Cell)):
        raise InputTypeError(
            f"network is {short(network)}; expected an RNN, GRU or LSTM, another Recurrent, or a "
            "Cell"
        )
    net: RecurrentLike = OneCell(network) if isinstance(network, Cell) else network
    known = net.params
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
    if inputs.ndim not in (2, 3) or inputs.shape[-1] != net.input_size:
        raise InputError(
            f"x has shape {inputs.shape}; expected (T, batch, {net.input_size}) or (T, "
            f"{net.input_size})"
        )
    states = _state_shape(net, inputs.shape)
    if begin is not None and begin.shape != states:
        raise InputError(f"state has shape {begin.shape}; expected {states}")
    if lengths is not None:
        lengths = _read_lengths(lengths, inputs.shape)
    if resets is not None:
        resets = _read_resets(resets, inputs.shape)
    arrays = [inputs, *given.values(), *([] if begin is None else [begin])]
    dtype = jnp.result_type(*arrays)
    inputs, own = inputs.astype(dtype), [param.astype(dtype) for param in given.values()]
    begin = jnp.zeros(states, dtype) if begin is None else begin.astype(dtype)
    is_batched = inputs.ndim == 3
    if not is_batched:
        inputs, begin = inputs[:, None], begin[:, None]
        resets = None if resets is None else resets[:, None]
    run = _function(_Network(net))
    output, last = run(*together((own, inputs, begin, lengths, resets)))
    return (output, last) if is_batched else (output[:, 0], last[:, 0])


def _read_lengths(lengths: Any, x: tuple[int, ...]) -> Any:
    """Return lengths as programs take them, which check those that are not known yet."""
    check_no_mask("lengths", lengths)
    # JAX makes floats of an empty list.
    dtype = np.int32 if isinstance(lengths, (list, tuple)) and not lengths else None
    try:
        array = jnp.asarray(lengths, dtype)
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"lengths is {short(lengths)}, no array: {error}") from None
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape != x[1:-1]:
        raise InputError(
            f"lengths has shape {array.shape} and dtype {array.dtype}; expected integers of "
            f"shape {x[1:-1]}"
        )
    if not isinstance(array, jax.core.Tracer):
        known = np.asarray(array)
        if known.size and not (known.min() >= 0 and known.max() <= x[0]):
            raise InputError(f"lengths is {short(known)}; expected integers from 0 to {x[0]}")
    # Numbers that int32 does not hold stay out of range.
    return jnp.clip(array, -1, min(x[0] + 1, _MOST)).astype(np.int32)


def _read_resets(resets: Any, x: tuple[int, ...]) -> Any:
    """Return where states begin anew, as programs take it."""
    check_no_mask("resets", resets)
    # JAX makes floats of an empty list.
    dtype = bool if isinstance(resets, (list, tuple)) and not resets else None
    try:
        array = jnp.asarray(resets, dtype)
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"resets is {short(resets)}, no array: {error}") from None
    check_resets(array, x[:-1])
    return array


def _state_shape(network: RecurrentLike, x: tuple[int, ...]) -> tuple[int, ...]:
    return (sum(map(len, network.cells)), *x[1:-1], network.state_size)


# -- Programs --------------------------------------------------------------------------------------

_MOST = np.iinfo(np.int32).max


class _Network:
    """A network, equal to others that compute the same from the same parameters."""

    def __init__(self, network: RecurrentLike) -> None:
        self.network = network
        self._parameters: dict[str, list[Parameters]] = {}
        self.cells = [cell for layer in network.cells for cell in layer]
        about = [
            (
                *(program_text(type(cell), cell.program), cell.shapes),
                [
                    None if mask is None else np.packbits(mask.on(np)).tobytes()
                    for mask in cell.masks.values()
                ],
            )
            for cell in self.cells
        ]
        self._key = repr((about, len(network.cells), len(network.cells[0])))

    def parameters(self, dtype: str) -> list[Parameters]:
        """Return what gradients of the parameters of each direction are sums of."""
        if dtype not in self._parameters:
            self._parameters[dtype] = parameters_of(self.network, dtype)
        return self._parameters[dtype]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Network) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return self._key


class _Step(NamedTuple):
    """A recorded training step, and the keys of its programs; `backward` is 0 if it has none."""

    recorded: RecordedStep
    forward: int
    backward: int


@functools.lru_cache(maxsize=256)
def _step_of(
    network: _Network,
    steps: int,
    batch: int,
    dtype: str,
    has_lengths: bool,
    has_resets: bool,
    keeps: str,
) -> _Step:
    """Return the programs of a network for inputs of a shape.

    A backward pass will come if `keeps` says whether there are gradients of the parameters for
    ``"all"`` samples, or only what they are sums of, for ``"each"``.
    """
    net = network.network
    recorded = record(
        *(net, steps, batch, dtype),
        lengths=np.int32 if has_lengths else None,
        has_resets=has_resets,
        has_backward=keeps != "",
        keeps_samples=keeps == "each",
    )
    about = network, steps, batch, dtype, has_lengths, has_resets, keeps
    forward, backward = key_of("forward", *about), key_of("backward", *about)
    count = 2 + has_lengths + has_resets + len(net.params)
    # Of the arrays only the memory, and the results behind all others, are results.
    checked = Lengths(2, batch, steps) if has_lengths else None
    add(forward, recorded.forward, [-3, *range(count), -1, -2], checked)
    if recorded.backward is None:
        return _Step(recorded, forward, 0)
    results = len(recorded.backward.results)
    places = [0, -results - 2, 1, 2, *range(-1, -results - 1, -1)]
    add(backward, recorded.backward, places)
    return _Step(recorded, forward, backward)


def _step_for(network: _Network, keeps: str, x: Any, lengths: Any, resets: Any) -> _Step:
    """Return the programs of a network for these arguments."""
    about = x.dtype.name, lengths is not None, resets is not None, keeps
    return _step_of(network, *x.shape[:2], *about)


def _run_forward(
    network: _Network, keeps: str, params: Any, x: Any, state: Any, lengths: Any, resets: Any
) -> tuple[Any, Any, Any]:
    """Return outputs, last states, and the memory that a backward pass needs.

    The memory that is for each sample has an axis for these.
    """
    step = _step_for(network, keeps, x, lengths, resets)
    nbytes = step.recorded.nbytes
    rows = max(x.shape[1], 1)
    memory = (rows, -(-nbytes // rows)) if keeps == "each" else (nbytes,)
    results = [(each.shape, each.dtype) for each in step.recorded.forward.results]
    arrays = [x, state, *(each for each in (lengths, resets) if each is not None), *params]
    output, last, kept = call(step.forward, arrays, [*results, (memory, np.uint8)])
    return output, last, kept


def _run_backward(
    network: _Network, keeps: str, above: Any, kept: Any, x: Any, lengths: Any, resets: Any
) -> dict[str, Any]:
    """Return the results of a backward pass by their names."""
    step = _step_for(network, keeps, x, lengths, resets)
    assert step.recorded.backward is not None
    names = [each.name for each in step.recorded.backward.results]
    results = [(each.shape, each.dtype) for each in step.recorded.backward.results]
    memory = [(kept.shape, np.uint8), ((step.recorded.back_nbytes,), np.uint8)]
    arrays = call(step.backward, [kept, *above], [*results, *memory], {0: len(results)})
    return dict(zip(names, arrays, strict=False))


def _in_order(network: _Network, grads: Mapping[str, Any]) -> list[Any]:
    """Return gradients in the parameters, as a recording names them, in their order."""
    names = [f"{name} {k}" for k, each in enumerate(network.cells) for name in each.shapes]
    return [grads[name] for name in names]


def _sums(network: _Network, factors: Mapping[str, Any], x: Any) -> list[Any]:
    """Return the gradients in the parameters: sums of products over steps and samples."""
    grads = []
    for k, one in enumerate(network.parameters(x.dtype.name)):
        own = {"input": x} | {
            name: factors[f"{name} {k}"]
            for name in ("products", "states", "arguments", "input", "rows")
            if f"{name} {k}" in factors
        }
        rows = {name: each.reshape(-1, each.shape[-1]) for name, each in own.items()}
        parts = []
        for group in one.groups:
            # One product of matrices is faster than several.
            others = [rows[name][:, begin:end] for name, begin, end in group.factors]
            above = rows["products"][:, group.first : group.end]
            product = jnp.matmul(above.T, jnp.concatenate(others, 1), precision="highest")
            parts.append(product.reshape(-1))
        parts += [rows[name].sum(0) for name in ("products", "rows") if name in rows]
        every = jnp.concatenate([*parts, jnp.zeros(1, x.dtype)])
        for name, shape in one.shapes.items():
            grads.append(every[one.orders[name]].sum(-1).reshape(shape))
    return grads


# -- Functions with derivatives --------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _function(network: _Network) -> Any:
    """Return a function of JAX for a network, with derivatives, which maps samples as a batch."""

    @custom_vmap
    def infer(params: Any, x: Any, state: Any, lengths: Any, resets: Any) -> Any:
        return _run_forward(network, "", params, x, state, lengths, resets)[:2]

    @infer.def_vmap
    def _(count: int, mapped: Any, *given: Any) -> Any:
        if any(mapped[0]):
            return _one_by_one(infer, mapped, given), (True, True)
        results = infer(given[0], *_merged(count, mapped[1:], given[1:]))
        return tuple(_parted(each, count) for each in results), (True, True)

    @custom_vmap
    def forward(params: Any, x: Any, state: Any, lengths: Any, resets: Any) -> Any:
        return _run_forward(network, "all", params, x, state, lengths, resets)

    @custom_vmap
    def forward_each(params: Any, x: Any, state: Any, lengths: Any, resets: Any) -> Any:
        return _run_forward(network, "each", params, x, state, lengths, resets)

    def map_forward(function: Any, count: int, mapped: Any, *given: Any) -> Any:
        if any(mapped[0]):
            return _one_by_one(function, mapped, given), (True, True, True)
        *results, kept = forward_each(given[0], *_merged(count, mapped[1:], given[1:]))
        # There is one memory, for the samples of all maps.
        return (*(_parted(each, count) for each in results), kept), (True, True, False)

    forward.def_vmap(functools.partial(map_forward, forward))
    forward_each.def_vmap(functools.partial(map_forward, forward_each))

    @custom_vmap
    def backward(
        above: Any, kept: Any, params: Any, x: Any, state: Any, lengths: Any, resets: Any
    ) -> Any:
        if kept.ndim == 2:  # of all maps, of which this is one
            *_, kept = forward(params, x, state, lengths, resets)
        grads = _run_backward(network, "all", above, kept, x, lengths, resets)
        return _in_order(network, grads), grads["input"], grads["state"]

    @backward.def_vmap
    def _(count: int, mapped: Any, *given: Any) -> Any:
        if any(mapped[2]):
            grads = _one_by_one(backward, mapped, given)
            return grads, jax.tree.map(lambda _: True, grads)
        factors = map_backward(count, mapped, given)
        in_x, in_state = factors.pop("input"), factors.pop("state")
        sums = jax.vmap(functools.partial(_sums, network), (0, 0 if mapped[3] else None))
        grads = sums(factors, given[3]), in_x, in_state
        return grads, jax.tree.map(lambda _: True, grads)

    @custom_vmap
    def backward_each(
        above: Any, kept: Any, params: Any, x: Any, state: Any, lengths: Any, resets: Any
    ) -> Any:
        if kept is None or len(kept) != max(x.shape[1], 1):
            *_, kept = forward_each(params, x, state, lengths, resets)
        return _run_backward(network, "each", above, kept, x, lengths, resets)

    @backward_each.def_vmap
    def _(count: int, mapped: Any, *given: Any) -> Any:
        if any(mapped[2]):
            factors = _one_by_one(backward_each, mapped, given)
        else:
            factors = map_backward(count, mapped, given)
        return factors, jax.tree.map(lambda _: True, factors)

    def map_backward(count: int, mapped: Any, given: Any) -> dict[str, Any]:
        """Return what gradients are sums of, for each map over other arguments than parameters."""
        above, kept, params, *rest = given
        each = zip(above, mapped[0], strict=True)
        above = [_merge(array, flag, count, 1) for array, flag in each]
        # Memory that is mapped, or for all samples at once, may be of other maps than these.
        is_for_each = kept is not None and not mapped[1] and kept.ndim == 2
        kept = kept if is_for_each else None
        factors = backward_each(above, kept, params, *_merged(count, mapped[3:], rest))
        return {name: _parted(array, count) for name, array in factors.items()}

    forward_once, backward_once = jax.custom_jvp(forward), jax.custom_jvp(backward)
    forward_once.defjvp(_no_more)
    backward_once.defjvp(_no_more)

    @jax.custom_vjp
    def run(params: Any, x: Any, state: Any, lengths: Any, resets: Any) -> Any:
        return infer(params, x, state, lengths, resets)

    def run_forward(*given: Any) -> Any:
        output, last, kept = forward_once(*given)
        return (output, last), (kept, given)

    def run_backward(saved: Any, above: Any) -> Any:
        kept, given = saved
        return (*backward_once(above, kept, *given), None, None)

    run.defvjp(run_forward, run_backward)
    return run


def _no_more(*given: Any) -> Any:
    raise InputError(
        "gradients of a recurrent network of sparsescan were differentiated once more; expected "
        "one derivative: a jax.lax.scan over the cell has second ones"
    )


def _one_by_one(function: Any, mapped: Any, given: Any) -> Any:
    """Return the results of a function for each of the mapped arguments."""
    leaves, structure = jax.tree.flatten(given)
    flags = jax.tree.leaves(mapped)

    def call_for(own: list[Any]) -> Any:
        rest = iter(own)
        each = [next(rest) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        return function(*jax.tree.unflatten(structure, each))

    return jax.lax.map(call_for, [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag])


def _merged(count: int, mapped: Any, given: Any) -> list[Any]:
    """Return inputs, states, lengths and resets whose samples are those of all maps."""
    each = zip(given, mapped, (1, 1, 0, 1), strict=True)
    return [_merge(array, flag, count, axis) for array, flag, axis in each]


def _merge(array: Any, is_mapped: Any, count: int, axis: int) -> Any:
    """Return an array whose axis of samples has those of all maps."""
    if array is None:
        return None
    if not is_mapped:
        array = jnp.broadcast_to(array, (count, *array.shape))
    array = jnp.moveaxis(array, 0, axis)
    samples = count * array.shape[axis + 1]
    return array.reshape(*array.shape[:axis], samples, *array.shape[axis + 2 :])


def _parted(array: Any, count: int) -> Any:
    """Return results with an axis of maps before all others."""
    samples = array.shape[1] // count
    apart = array.reshape(array.shape[0], count, samples, *array.shape[2:])
    return jnp.moveaxis(apart, 1, 0)
