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

    As :meth:`.TrainingStep.forward`, for arrays of JAX, under ``jax.jit``,
    ``jax.vmap``, and all of its derivatives, of any order: ``jax.grad``, ``jvp``, ``jacfwd``,
    ``jacrev``, ``hessian``. A mapped axis becomes samples of a batch; one of parameters becomes
    members of an ensemble, which threads share. It takes the place of a ``jax.lax.scan`` over a
    cell. Forward mode, and derivatives of gradients, are passes of the cell that also computes the
    derivatives of the states.

    Parameters
    ----------
    network : Recurrent or Cell
        A network of :mod:`sparsescan.recurrent`, such as a GRU, or a cell, such as one of a class
        of your own, which defines the computation. Its own parameters are not used, but
        ``network.params`` may be the initial ones.
    params : dict of str to array_like
        The parameters, by the names that ``network.params`` has.
    x : array_like, shape (T, batch, input_size) or (T, input_size)
        The inputs.
    state : array_like, shape (layers · directions, [batch,] state_size), optional
        The initial states, by default zeros, or parameters of cells that declare an
        :class:`.Initial`; those of an LSTM are ``[h, c]``. A cell is one layer.
    lengths : array_like of int, shape (batch,), optional
        How many steps each sample has; by default all have T.
    resets : array_like of bool, shape (T[, batch][, 1]), optional
        True where the state of a sample is set to zero before a step, such as the first of an
        episode. In a direction that runs backward in time, the state is set to zero on the way from
        such a step to the one before it.
    reset_states : array_like, shape (layers · directions, [batch,] state_size), optional
        The states that `resets` set, by default those that a sequence begins with by default.
    key : PRNG key, optional
        Source of the random masks of cells that declare a :class:`.Mask`; by default masks are
        their expectation, as in inference.
    **options
        The further inputs that cells declare (:class:`.Given`), by the names that parameters have,
        such as ``drive_l0``, of any shape that broadcasts to ``(T, [batch,] hidden_size)``; and
        `memory_limit`, `truncate` and `return_states`, as for :class:`.TrainingStep`. Truncated
        gradients are computed in reverse mode alone, and the limit is then that of the windows that
        are computed at once.

    Returns
    -------
    output : jax.Array, shape (T, [batch,] directions · hidden_size)
        The outputs ``h_t`` of the last layer, 0 in steps that a sample does not have. With
        `return_states` there are ``states · directions · hidden_size``, one state after the other.
        With ``"layers"`` the shape is ``(T, [batch,] layers · directions, state_size)``:
        ``output[..., k, :]`` are the states that ``state[k]`` is the last of.
    state : jax.Array, shape (layers · directions, [batch,] state_size)
        The states after the last step of each sample.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong, when it is traced; or if `truncate` is given, and the network has
        two directions.
    MemoryLimitError
        If a backward pass needs more than `memory_limit`, when it is traced.
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
    """Return an input with further inputs behind it."""
    keys: Any = iter(() if key is None else jax.random.split(key, len(inputs)))

    def draw(mask: Mask, p: float, shape: Any) -> Any:
        kept = jax.random.bernoulli(next(keys), 1 - p, shape)
        return jnp.where(kept, mask.values(p)[0], 0).astype(x.dtype)

    shape = *x.shape[:-1], units
    columns = columns_of(FUNCTIONS, x, inputs, given, shape, None if key is None else draw)
    return jnp.concatenate([x, *columns], -1)


def _read_lengths(lengths: Any, x: tuple[int, ...]) -> Any:
    """Return lengths as programs take them, which check those that are not known yet."""
    array = _as_array("lengths", lengths, np.int32)
    arguments.check_lengths(array, x[1:-1])
    if not isinstance(array, jax.core.Tracer):
        arguments.check_length_range(np.asarray(array), x[0])
    # Numbers that int32 does not hold stay out of range; bounds have to be of the dtype.
    known_range = jnp.iinfo(array.dtype)
    low, high = max(-1, int(known_range.min)), min(x[0] + 1, _MOST, int(known_range.max))
    return jnp.clip(array, low, high).astype(np.int32)


def _as_array(name: str, given: Any, dtype: Any) -> Any:
    """Return an array of JAX; an empty list, of which JAX makes floats, has a dtype."""
    check_no_mask(name, given)
    try:
        return jnp.asarray(given, dtype if isinstance(given, (list, tuple)) and not given else None)
    except Exception as error:  # of a caller's own class
        raise InputTypeError(f"{name} is {short(given)}, no array: {error}") from None
