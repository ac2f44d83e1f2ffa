"""Recurrent networks over whole sequences, for JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays.arrays import check_no_mask
from ..checks import check_has_shape
from ..errors import InputError, InputTypeError, short
from ..recurrent import Cell, Recurrent, arguments
from ..recurrent.definition import Mask, begins_of, width_of
from ..recurrent.further import Further, columns_of, of_network
from ..recurrent.initial import initial_states
from ..recurrent.memory import beside
from ..recurrent.passes import RecurrentLike
from ..recurrent.short import cut, filled, short_of
from ..recurrent.step import OneCell
from .binder import FUNCTIONS
from .ffi.calls import FLOATS, as_arrays, check_platform, together
from .ffi.primitives import TracedNetwork, run
from .ffi.truncated import run_truncated

_MOST = np.iinfo(np.int32).max


def recurrent(
    network: Recurrent | Cell,
    params: Mapping[str, Any],
    x: Any,
    state: Any = None,
    lengths: Any = None,
    resets: Any = None,
    reset_states: Any = None,
    key: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Return the outputs and the last states of a recurrent network.

    This is :meth:`.TrainingStep.forward` for JAX arrays. It replaces a ``jax.lax.scan`` over a
    cell. It works under ``jax.jit``, under ``jax.vmap``, and with all derivatives of any order:
    ``jax.grad``, ``jvp``, ``jacfwd``, ``jacrev``, ``hessian``. A mapped axis becomes samples; a
    mapped axis of parameters becomes members of an ensemble, which threads share. Forward mode and
    derivatives of gradients run a cell that also computes the derivatives of the states.

    Parameters
    ----------
    network : Recurrent or Cell
        A network of :mod:`sparsescan.recurrent`, such as a GRU, or a cell, such as one of your own
        class. It defines the computation. Its own parameters are not used, but you may pass
        ``network.params`` as initial `params`.
    params : dict of str to array_like
        The parameters, by the names in ``network.params``.
    x : array_like, shape (T, batch, input_size) or (T, input_size)
        The inputs.
    state : array_like, shape (layers · directions, [batch,] state_size), optional
        The initial states, ``[h, c]`` for an LSTM. The default is zeros, or the parameters of cells
        that declare an :class:`.Initial`. A cell counts as one layer.
    lengths : array_like of int, shape (batch,), optional
        The number of steps of each sample; by default T.
    resets : array_like of bool, shape (T[, batch][, 1]), optional
        True at a step before which the state of a sample is set to zero, such as the first step of
        an episode. A direction that runs backward in time sets its state to zero between such a
        step and the step before it.
    reset_states : array_like, shape (layers · directions, [batch,] state_size), optional
        The states that `resets` set; the defaults are those of `state`.
    key : PRNG key, optional
        Source of the random masks of cells that declare a :class:`.Mask`. By default each mask is
        its expectation, as in inference.
    **options
        The further inputs that cells declare (:class:`.Given`), of any shape that broadcasts to
        ``(T, [batch,] hidden_size)``. Names are formed like those of parameters, such as
        ``drive_l0``. And `memory_limit`, `truncate` and `return_states`, as for
        :class:`.TrainingStep`. Truncated gradients exist only in reverse mode; `memory_limit` is
        then for the windows that are computed at once.

    Returns
    -------
    output : jax.Array, shape (T, [batch,] directions · hidden_size)
        The outputs ``h_t`` of the last layer, 0 after the last step of a sample. With
        `return_states` the last axis is ``states · directions · hidden_size``, one state after the
        other. With ``"layers"`` the shape is ``(T, [batch,] layers · directions, state_size)``:
        ``output[..., k, :]`` are the states whose last is ``state[k]``.
    state : jax.Array, shape (layers · directions, [batch,] state_size)
        The states after the last step of each sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong, or if `truncate` is given and the network has two directions; it is
        raised during tracing.
    MemoryLimitError
        If a backward pass needs more than `memory_limit`; it is raised during tracing.
    jax.errors.JaxRuntimeError
        If a length is not from 0 to T, and lengths are known only when the program runs.
    DeviceError
        If JAX does not compute on the CPU.

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
    inputs_of = of_network(net) if width_of(net) > net.input_size else []
    further_names = [each.name for each in inputs_of if each.name in options]
    further = {name: options.pop(name) for name in further_names}
    own_options = arguments.Options.read(net, options).of_cells(net.cells[0][0].program.states)
    known = net.params
    if not isinstance(params, Mapping) or set(params) != set(known):
        names = sorted(map(str, params)) if isinstance(params, Mapping) else short(params)
        raise InputError(f"params has {names}; expected {sorted(known)}, as network.params")
    names = [f"params[{name!r}]" for name in known]
    named = dict(zip(names, map(params.__getitem__, known), strict=True))
    about = {**named, "x": x, "state": state, "reset_states": reset_states, **further}
    arrays = dict(zip(about, as_arrays(FLOATS, **about), strict=True))
    own, inputs = [arrays[name] for name in names], arrays["x"]
    begin, anew = arrays["state"], arrays["reset_states"]
    for name, param, like in zip(names, own, known.values(), strict=True):
        check_has_shape(name, param, like.shape)
    arguments.check_input("x", inputs, net.input_size, "T, batch", "T")
    if inputs_of:
        given = {name: arrays[name] for name in further}
        inputs = _widened(inputs, inputs_of, net.cells[0][0].hidden_size, given, key)
    one, narrow = net.cells[0][0], short_of(net)
    state_size, inner = one.state_size, net
    if narrow is not None:
        shape = (sum(map(len, net.cells)), *inputs.shape[1:-1], sum(narrow.sizes))
        for name, each in (("state", begin), ("reset_states", anew)):
            if each is not None:
                arguments.check_state(each, shape, inputs, name)
        about_states = narrow.sizes, narrow.units
        begin = None if begin is None else filled(jnp, begin, *about_states)
        anew = None if anew is None else filled(jnp, anew, *about_states)
        own = [*narrow.params(jnp, dict(zip(known, own, strict=True))).values()]
        inner = narrow.network
    if begins := begins_of(type(one), one.program.states):
        values, cells = iter(own), [cell for cells in net.cells for cell in cells]
        by_cell = [dict(zip(cell.shapes, values, strict=False)) for cell in cells]
        shape = *inputs.shape[1:-1], one.hidden_size
        initial = initial_states(jnp, begins, one.program.states, by_cell, shape)
        begin = initial if begin is None else begin
        anew = initial if anew is None and resets is not None else anew
    states = (sum(map(len, net.cells)), *inputs.shape[1:-1], state_size)
    begin = jnp.zeros(states, inputs.dtype) if begin is None else begin
    arguments.check_state(begin, states, inputs)
    if anew is not None:
        arguments.check_state(anew, states, inputs, "reset_states")
        arguments.check_has_resets(resets)
        begin = beside(jnp, begin, anew)
    if lengths is not None:
        lengths = _read_lengths(lengths, inputs.shape)
    if resets is not None:
        resets = arguments.check_resets(_as_array("resets", resets, bool), inputs)
    is_batched = inputs.ndim == 3
    if not is_batched:
        inputs, begin = inputs[:, None], begin[:, None]
        resets = None if resets is None else resets[:, None]
    numbers = together((own, inputs, begin, lengths, resets))
    truncate = own_options.truncate
    is_cut = truncate is not None and len(inputs) > 2 * truncate and inputs.size > 0
    output, last = (run_truncated if is_cut else run)(TracedNetwork(inner), own_options, *numbers)
    if own_options.return_states == "layers":
        output = output.reshape(*output.shape[:2], len(last), state_size)
    if narrow is not None:
        output = cut(jnp, output, narrow.outputs(own_options.return_states), narrow.units)
        last = cut(jnp, last, *about_states)
    return (output, last) if is_batched else (output[:, 0], last[:, 0])


def _widened(
    x: Any, inputs: Sequence[Further], units: int, given: Mapping[str, Any], key: Any
) -> Any:
    """Return an input with further inputs appended."""
    keys: Any = iter(() if key is None else jax.random.split(key, len(inputs)))

    def draw(mask: Mask, p: float, shape: Any) -> Any:
        kept = jax.random.bernoulli(next(keys), 1 - p, shape)
        return jnp.where(kept, mask.values(p)[0], 0).astype(x.dtype)

    shape = *x.shape[:-1], units
    columns = columns_of(FUNCTIONS, x, inputs, given, shape, None if key is None else draw)
    return jnp.concatenate([x, *columns], -1)


def _read_lengths(lengths: Any, x: tuple[int, ...]) -> Any:
    """Return lengths as programs take them; programs check lengths that are not known yet."""
    array = _as_array("lengths", lengths, np.int32)
    arguments.check_lengths(array, x[1:-1])
    if not isinstance(array, jax.core.Tracer):
        arguments.check_length_range(np.asarray(array), x[0])
    # Numbers beyond int32 stay out of range; the bounds must have the same dtype.
    known_range = jnp.iinfo(array.dtype)
    low, high = max(-1, int(known_range.min)), min(x[0] + 1, _MOST, int(known_range.max))
    return jnp.clip(array, low, high).astype(np.int32)


def _as_array(name: str, given: Any, dtype: Any) -> Any:
    """Return a JAX array; an empty list gets this dtype, since JAX would make it float."""
    check_no_mask(name, given)
    try:
        return jnp.asarray(given, dtype if isinstance(given, (list, tuple)) and not given else None)
    except Exception as error:  # a caller's own class
        raise InputTypeError(f"{name} is {short(given)}, no array: {error}") from None
