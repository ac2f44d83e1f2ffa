"""TrainingStep: a recurrent network forward and backward, in compiled whole-sequence kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays import streams
from ..arrays.arrays import (
    check_one_place,
    device_of,
    for_kernels,
    host_array,
    is_cupy,
    load_cupy,
    namespace,
    read_array,
)
from ..checks import check_flag, check_has_shape
from ..errors import Allocating, InputError, MemoryLimitError
from ..execution.sharing import quiet
from ..formatting import exact_bytes, format_bytes
from . import arguments
from .definition import CellLike, begins_of, width_of
from .further import check_known, of_network, parted, widened
from .host_sizes import Extent
from .initial import Begins, add_initial_grads, initial_states
from .memory import Memory, beside
from .packing import Direction
from .passes import RecordedMemory, RecurrentLike, directions_of, rows_of_lanes
from .short import cut, filled, short_of
from .truncated import TruncatedMemory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .device import DeviceMemory

Array = NDArray[Any]

_SEGMENT = 256  # the least steps of a segment of gates if not all are kept


AnyMemory: TypeAlias = "DeviceMemory | RecordedMemory | TruncatedMemory"


class Gradients(NamedTuple):
    """Gradients of a loss, which :meth:`TrainingStep.backward` returns.

    Attributes
    ----------
    input : ndarray or None, shape of the input
        The gradient in the input; None if it was not asked for.
    state : ndarray, shape (layers · directions, [batch,] state_size)
        The gradient in the initial state.
    params : dict of str to ndarray
        The gradient in each parameter, summed over steps and samples.
    reset_states : ndarray or None, shape (layers · directions, [batch,] state_size)
        The gradient in the states that resets set, summed over the resets of each sample; None if
        the call had no `reset_states`.
    further : dict of str to ndarray, or None
        The gradient in each further input that the call passed, in its shape. None if `input` is
        None, or if cells have no further inputs.
    """

    input: Array | None
    state: Array
    params: dict[str, Array]
    reset_states: Array | None = None
    further: dict[str, Array] | None = None


class TrainingStep:
    """Run a recurrent network forward and backward, again and again.

    A call of :meth:`forward` and a call of :meth:`backward` are a whole training step, except for
    the loss and the optimiser. Both run compiled loops over all steps. They reuse their memory in
    the next training step, so only one thread at a time may call them.
    :meth:`.Recurrent.training_step` makes a training step, or :meth:`.Cell.training_step` for one
    cell.

    With `truncate`, gradients flow at most to the previous segment. The steps are cut into segments
    ``s = 0, 1, …`` of ``k = truncate`` steps. The loss ``L = Σ L_s`` is split likewise: ``L_s``
    reads the outputs of segment ``s``; a loss of a sample's last state belongs to its last segment.
    Gradients are

        Σ_s ∂L_s/∂θ, with the state before segment ``s - 1`` taken as a constant,

    and likewise for inputs and, from the losses of the first two segments, for initial states. The
    gradient of a loss reaches ``k`` to ``2·k - 1`` steps back (Williams and Peng, 1990, "BPTT(2k;
    k)"). Outputs do not change. Gradients are biased, since they leave out the effect of earlier
    steps: dependencies over more than ``2·k`` steps are learned only if shorter ones lead there. In
    return the forward pass keeps only the inputs and the state before each segment. The backward
    pass recomputes windows of two segments, as samples of one batch. Up to ``2·k`` steps, gradients
    are complete. `truncate` works for networks of one direction, in host memory.

    Without `truncate`, the forward pass keeps the states of all steps for the backward pass and, if
    `memory_limit` allows, the gates of all steps. Otherwise the backward pass recomputes the gates
    in segments, of 256 steps or more. The training step also keeps the memory of two results of
    each kind, and reuses it once the caller has dropped them.

    If all arrays, parameters included, are CuPy's, everything runs on their device, on the current
    stream, and results are CuPy's. Products with inputs and gradients of parameters are matrix
    products over all steps. The rest of a layer is one kernel launch forward and one backward.

    Parameters
    ----------
    network : Recurrent
        The network. Each :meth:`forward` reads its parameters.
    **options
        Any of these:

        - `memory_limit`, an int: the most bytes to take, without the caller's arrays and results;
          by default what the machine or the device has.
        - `truncate`, an int: the number of steps of a segment; by default gradients flow through
          all steps.
        - `return_states`, a bool or ``"layers"``: if True, outputs are all states of the last
          layer, such as ``[h, c]`` of an LSTM; with ``"layers"``, all states of each direction of
          all layers. By default outputs are the first state of the last layer.

    Raises
    ------
    InputError, InputTypeError
        If `memory_limit`, `truncate` or `return_states` is wrong, or if `truncate` is given and the
        network has two directions.

    Attributes
    ----------
    nbytes : int
        Bytes that are kept for inputs of the last shape, without results.
    keeps_gates : bool
        Whether the gates of all steps are kept for inputs of the last shape.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import GRU
    >>> step = GRU(12, 20, rng=0).training_step()
    >>> x = np.random.default_rng(0).standard_normal((50, 16, 12), np.float32)
    >>> output, state = step.forward(x)
    >>> output.shape, state.shape
    ((50, 16, 20), (1, 16, 20))
    >>> grads = step.backward(output)  # of the loss (output²).sum() / 2
    >>> grads.params["weight_hh_l0"].shape
    (60, 20)
    """

    def __init__(self, network: RecurrentLike, **options: Unpack[arguments.OptionsDict]) -> None:
        self.network, self._short = network, short_of(network)
        # The cells as kernels run them.
        self._inner: RecurrentLike = network if self._short is None else self._short.network
        self.options = arguments.Options.read(network, options)
        self._count = len(network.cells) * len(network.cells[0])
        self._shapes = [
            {network.name_of(own, layer, back): shape for own, shape in cell.shapes.items()}
            for layer, cells in enumerate(self._inner.cells)
            for back, cell in enumerate(cells)
        ]
        self._further = of_network(network) if width_of(network) > network.input_size else []
        one = network.cells[0][0]
        self._units, self._states = one.hidden_size, one.program.states
        self._begins: Begins = begins_of(type(one), self._states)
        # Whether parameters served as initial states, and as the states that resets set.
        self._has_begun = False, False
        # Shapes of further inputs passed by name; None if they are columns of the input.
        self._given_shapes: dict[str, tuple[int, ...]] | None = None
        self._directions: list[Direction] = []
        self._made_for: tuple[np.dtype[Any], int] | None = None
        self._memory: AnyMemory | None = None
        self._is_forward = False
        self._is_batched = True
        self._has_reset_states = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without memory: its views would break."""
        none = dict.fromkeys(("_made_for", "_memory"))
        return vars(self) | none | {"_directions": [], "_is_forward": False}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for inputs of the last shape."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def keeps_gates(self) -> bool:
        """Whether the gates of all steps are kept for inputs of the last shape."""
        return self._memory is not None and self._memory.keeps_gates

    def __repr__(self) -> str:
        memory = self._memory
        if memory is None:
            return f"TrainingStep({self.network!r})"
        kept = "states and gates" if memory.keeps_gates else "states"
        return (
            f"TrainingStep({self.network!r}): {memory.steps} steps of {memory.batch} samples, "
            f"{kept} kept in {format_bytes(memory.nbytes)}"
        )

    # -- Forward ----------------------------------------------------------------------------------

    def forward(
        self,
        x: ArrayLike,
        state: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        resets: ArrayLike | None = None,
        reset_states: ArrayLike | None = None,
        *,
        rng: np.random.Generator | int | None = None,
        **further: ArrayLike,
    ) -> tuple[Array, Array]:
        """Compute the outputs and the last states.

        Parameters
        ----------
        x : array_like of float32 or float64, shape (T, batch, input_size) or (T, input_size)
            The inputs, of NumPy or CuPy.
        state : array_like, shape (layers · directions, [batch,] state_size), optional
            The initial states, layer by layer; in each layer the forward direction comes first. The
            default is zeros, or the parameters of cells that declare an :class:`.Initial`. The
            state of an LSTM is ``[h, c]``.
        lengths : array_like of int, shape (batch,), optional
            The number of steps of each sample, from 0 to T, in host memory; by default T.
        resets : array_like of bool, shape (T[, batch][, 1]), optional
            True at a step before which the state of a sample is set to zero, or to `reset_states`,
            such as the first step of an episode. In host memory, or where the input is. A direction
            that runs backward in time sets its state between such a step and the step before it, so
            that episodes do not affect each other. ``resets[0]`` replaces the initial state of the
            forward direction. Resets beyond the length of a sample have no effect.
        reset_states : array_like, shape (layers · directions, [batch,] state_size), optional
            The states that `resets` set; the defaults are those of `state`. All resets of a sample
            set the same states.
        rng : numpy.random.Generator or int, optional
            Source of the random masks of cells that declare a :class:`.Mask`. By default each mask
            is its expectation, as in inference.
        **further : array_like
            The further inputs that cells declare (:class:`.Given`). Names are formed like those of
            parameters: ``drive_l0``, or ``drive`` for one cell. Each has a shape that broadcasts to
            ``(T, [batch,] hidden_size)``. A mask that is passed here is not drawn.

        Returns
        -------
        output : ndarray, shape (T, [batch,] directions · hidden_size)
            The outputs ``h_t`` of the last layer, 0 after the last step of a sample. With
            `return_states` the last axis is ``states · directions · hidden_size``, one state after
            the other: ``[h, c]`` of an LSTM. With ``"layers"`` the shape is
            ``(T, [batch,] layers · directions, state_size)``: ``output[..., k, :]`` are the states
            whose last is ``state[k]``.
        state : ndarray, shape (layers · directions, [batch,] state_size)
            The states after the last step of each sample.

        Raises
        ------
        InputError, InputTypeError
            If a shape, a dtype or a length is wrong; if there are `reset_states` without `resets`;
            or if there are more units than the kernels of a GPU take. That limit is at least 1,228
            units of an LSTM in float32, half as many in float64.
        DeviceError
            If arrays and parameters are not all on one device.
        MemoryLimitError
            If the states take more memory than `memory_limit`, or than there is.
        """
        check_known(self._further, further)
        if not self._further and not self._begins and self._short is None:
            return self._forward(self.network.params, x, state, lengths, resets, reset_states)
        given: Array = read_array("x", x)
        arguments.check_input("x", given, self.network.input_size, "T, batch", "T")
        has_begun, short, params = (False, False), self._short, self.network.params
        if short is not None:
            xp, shape = namespace(given), (self._count, *given.shape[1:-1], sum(short.sizes))
            state = self._filled("state", state, shape, short.sizes)
            reset_states = self._filled("reset_states", reset_states, shape, short.sizes)
            params = short.params(xp, params)
        if self._begins:
            has_begun = state is None, resets is not None and reset_states is None
            by_cell = [cell.params for cells in self.network.cells for cell in cells]
            about = self._begins, self._states, by_cell, (*given.shape[1:-1], self._units)
            begin = initial_states(namespace(given), *about)
            state = begin if has_begun[0] else state
            reset_states = begin if has_begun[1] else reset_states
        arrays = {name: read_array(name, each) for name, each in further.items()}
        if self._further:
            _check_on_host(self.network, given)
            given = widened(self._further, given, self._units, arrays, rng)
        output, last = self._forward(params, given, state, lengths, resets, reset_states)
        if short is not None:
            parts = short.outputs(self.options.return_states)
            output = cut(xp, output, parts, self._units)
            last = cut(xp, last, short.sizes, self._units)
        self._has_begun = has_begun
        self._given_shapes = {name: each.shape for name, each in arrays.items()}
        return output, last

    def _filled(self, name: str, array: Any, shape: tuple[int, ...], sizes: list[int]) -> Any:
        """Return the caller's short states, padded with zeros to all units."""
        if array is None:
            return None
        array = read_array(name, array)
        check_has_shape(name, array, shape)
        return filled(namespace(array), array, sizes, self._units)

    @Allocating("a training step")
    @quiet
    def _forward(
        self,
        given: Mapping[str, Array],
        x: Any,
        state: Any,
        lengths: Any,
        resets: Any = None,
        reset_states: Any = None,
    ) -> tuple[Array, Array]:
        """Do :meth:`forward`, with parameters that may be another network's."""
        self._is_forward, self._given_shapes, self._has_begun = False, None, (False, False)
        x = read_array("x", x)
        if reset_states is not None:
            arguments.check_has_resets(resets)
        with streams.place("x", x, None, None):
            params = [_read_params(given, shapes) for shapes in self._shapes]
            x, state, lengths = self._read(x, state, reset_states, lengths, params)
            memory, has_resets = self._memory, resets is not None
            if has_resets:
                resets = _read_resets(resets, x, self._is_batched)
            self._has_reset_states = reset_states is not None
            if self._has_reset_states and resets is None:
                resets = np.zeros(x.shape[:2], np.uint8)  # without resets their gradients are 0
            if memory is None or not memory.fits(x, has_resets):
                self._memory = None  # before there is another
                memory = self._memory = self._allocate(x, has_resets)
            with memory.here():
                output, last = memory.forward(params, x, state, lengths, resets)
        self._is_forward = True
        output = output.reshape(self._output_shape(output.shape))
        return self._as_given(output), self._as_given(last)

    # -- Backward ---------------------------------------------------------------------------------

    @Allocating("the gradients of a training step")
    @quiet
    def backward(
        self,
        grad_output: ArrayLike | None = None,
        grad_state: ArrayLike | None = None,
        *,
        needs_input_grad: bool = True,
    ) -> Gradients:
        """Return the gradients of the loss; call it once after each :meth:`forward`.

        Parameters
        ----------
        grad_output, grad_state : array_like, optional
            Gradients in the two results of :meth:`forward`; by default zeros.
        needs_input_grad : bool, default True
            Whether to compute the gradient in the input.

        Returns
        -------
        Gradients
            The gradients in the input, the initial states, the states that resets set, and the
            parameters.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            If a shape or a dtype is wrong, an array is on another device than the input was, or no
            forward pass came before: each backward pass uses up its forward pass.
        """
        needs_input_grad = check_flag("needs_input_grad", needs_input_grad)
        memory = self._memory
        if memory is None or not self._is_forward:
            raise InputError("backward was called without a forward pass before it")
        short = self._short
        if short is not None:
            parts = short.outputs(self.options.return_states)
            layers = (self._count,) if self.options.return_states == "layers" else ()
            batch = (memory.batch,) if self._is_batched else ()
            shape = memory.steps, *batch, *layers, sum(parts)
            grad_output = self._filled("grad_output", grad_output, shape, parts)
            shape = self._count, *batch, sum(short.sizes)
            grad_state = self._filled("grad_state", grad_state, shape, short.sizes)
        with memory.here():
            above, carry = self._read_grads(memory, grad_output, grad_state)
            self._is_forward = False
            input_grad, state_grad, params = memory.backward(above, carry, needs_input_grad)
        # A cell's names of parameters are in the order of the network's.
        named = {
            name: grad
            for shapes, grads in zip(self._shapes, params, strict=True)
            for name, grad in zip(shapes, grads.values(), strict=True)
        }
        in_resets = None
        if self._has_reset_states:
            state_grad, anew = state_grad[::2].copy(), state_grad[1::2].copy()
            if self._has_begun[1]:
                add_initial_grads(self._begins, params, anew, self._units)
            else:
                in_resets = self._as_given(anew)
        if self._has_begun[0]:
            add_initial_grads(self._begins, params, state_grad, self._units)
        in_x, further = None if input_grad is None else self._as_given(input_grad), None
        if in_x is not None and self._given_shapes is not None:
            about = self.network.input_size, self._given_shapes
            in_x, further = parted(self._further, in_x, *about)
        if short is not None:
            xp, sizes = namespace(state_grad), (short.sizes, self._units)
            named, state_grad = short.params(xp, named, back=True), cut(xp, state_grad, *sizes)
            in_resets = None if in_resets is None else cut(xp, in_resets, *sizes)
        return Gradients(in_x, self._as_given(state_grad), named, in_resets, further)

    # -- Input ------------------------------------------------------------------------------------

    def _allocate(self, x: Array, has_resets: bool) -> AnyMemory:
        """Return memory that keeps the gates of all steps if the limit allows."""
        steps, batch, _ = x.shape
        memory: AnyMemory
        limit, truncate, return_states = options = self.options
        is_on_device = device_of(x) is not None
        if is_on_device and (truncate is not None or return_states):
            raise InputError(
                f"truncate is {truncate} and return_states is {return_states}, and x is on a "
                "device; expected None and False, or arrays in host memory"
            )

        def make(steps: int, batch: int, segment: int) -> RecordedMemory:
            extent = Extent(steps, batch, segment, False, has_resets, options)
            return RecordedMemory(
                self._inner, x.dtype, extent, self._directions_for(x.dtype, batch)
            )

        if truncate is not None and steps > 2 * truncate:
            own = truncate, segments(2 * truncate), limit
            memory = TruncatedMemory(make, steps, batch, *own)
            check_limit(limit, memory.nbytes, steps, batch)
            memory.allocate()
            return memory
        for segment in segments(steps):
            if is_on_device:
                memory = _on_device(self._inner, x, segment, has_resets)
            else:
                memory = make(steps, batch, segment)
            if limit is None or memory.nbytes <= limit:
                break
        check_limit(limit, memory.nbytes, steps, batch)
        if isinstance(memory, Memory):
            memory.allocate()
        return memory

    def _directions_for(self, dtype: np.dtype[Any], batch: int) -> list[Direction]:
        """Return all directions on the host, with weights packed for this number of samples."""
        key = dtype, rows_of_lanes(self._inner, dtype, batch)
        if self._made_for != key:
            self._made_for, self._directions = key, directions_of(self._inner, *key)
        return self._directions

    def _read(
        self, x: Any, state: Any, reset_states: Any, lengths: Any, params: list[list[Array]]
    ) -> tuple[Array, Array | None, NDArray[np.int64] | None]:
        """Return the input with an axis of samples, the states, and the lengths.

        Input and states have the dtype to which they and the parameters promote. States that the
        caller did not pass are None, and so are lengths if each sample has all steps. The states
        that resets set are stored :func:`~sparsescan.recurrent.memory.beside` the initial ones.
        """
        net = self._inner
        arguments.check_input("x", x, width_of(net), "T, batch", "T")
        self._is_batched = x.ndim == 3
        steps, batch = x.shape[0], x.shape[1] if x.ndim == 3 else 1
        named = {"state": state, "reset_states": reset_states}
        states = {k: read_array(k, each) for k, each in named.items() if each is not None}
        every = [param for own in params for param in own]
        xp = namespace(x, *every, *states.values())  # raises if they are on different devices
        for name, each in states.items():
            arguments.check_state(each, (self._count, *x.shape[1:-1], net.state_size), x, name)
        dtype = np.result_type(*{array.dtype for array in (x, *every, *states.values())})
        x = for_kernels(x.reshape(steps, batch, width_of(net)), dtype)
        rows = self._count, batch, net.state_size
        states = {k: for_kernels(each.reshape(rows), dtype) for k, each in states.items()}
        state = states.get("state")
        if reset_states is not None:
            anew = states["reset_states"]
            state = beside(xp, xp.zeros_like(anew) if state is None else state, anew)
        return x, state, None if lengths is None else _read_lengths(lengths, steps, batch)

    def _read_grads(self, memory: AnyMemory, output: Any, state: Any) -> tuple[Array, Array]:
        """Return the gradients in both results of the forward pass, with an axis of samples."""
        xp, checked = np if memory.device is None else load_cupy(), []
        whole = memory.steps, memory.batch, memory.widths[-1]
        rows = self._count, memory.batch, self._inner.state_size
        for name, grad, shape, expected in (
            ("grad_output", output, whole, self._output_shape(whole)),
            ("grad_state", state, rows, rows),
        ):
            if grad is None:
                # On the host, an empty array means zeros.
                checked.append(xp.zeros(shape if xp is not np else 0, memory.dtype))
                continue
            array = read_array(name, grad)
            check_one_place(name, device_of(array), "x", memory.device)
            given = expected if self._is_batched else (expected[0], *expected[2:])
            check_has_shape(name, array, given)
            checked.append(for_kernels(array.reshape(shape), memory.dtype))
        return checked[0], checked[1]

    def _output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of outputs, with an axis of directions if they are of all layers."""
        if self.options.return_states != "layers":
            return shape
        return *shape[:2], self._count, self._inner.state_size

    def _as_given(self, array: Array) -> Array:
        """Return a result with an axis of samples only if the input had one."""
        return array if self._is_batched else array[:, 0]


def _read_params(given: Mapping[str, Array], shapes: dict[str, tuple[int, ...]]) -> list[Array]:
    """Return the parameters of a direction."""
    params = []
    for name, shape in shapes.items():
        array = read_array(name, given[name])
        check_has_shape(name, array, shape)
        params.append(array)
    return params


def _read_lengths(lengths: Any, steps: int, batch: int) -> NDArray[np.int64] | None:
    """Return the steps that each sample has; None if each has all."""
    array = host_array("lengths", lengths)
    # A copy, made before it is checked. NumPy makes float64 of an empty list.
    is_empty_list = array.shape == (0,) and isinstance(lengths, (list, tuple))
    array = np.array(array, np.int64 if is_empty_list else None)
    arguments.check_lengths(array, (batch,))
    arguments.check_length_range(array, steps)
    return None if (array == steps).all() else array.astype(np.int64)


def _read_resets(resets: Any, x: Array, is_batched: bool) -> NDArray[np.uint8] | None:
    """Return where states are reset, in the form of kernels; None if they never are."""
    is_on_device = is_cupy(resets)
    if is_on_device:
        check_one_place("resets", device_of(resets), "x", device_of(x))
    array = resets if is_on_device else host_array("resets", resets)
    if array.size == 0 and isinstance(resets, (list, tuple)):
        array = array.astype(bool)  # NumPy makes float64 of an empty list
    array = arguments.check_resets(array, x if is_batched else x[:, 0])
    if is_on_device:
        # Only the device knows whether any is True.
        whole: NDArray[np.uint8] = array.reshape(x.shape[:2])
        return whole
    # A copy, which is checked before use.
    flags = np.array(array, bool, order="C").view(np.uint8).reshape(x.shape[:2])
    return flags if flags.any() else None


class OneCell:
    """A network of one cell; its parameters have the names of the cell's."""

    def __init__(self, cell: CellLike) -> None:
        self.cells: tuple[tuple[CellLike, ...], ...] = ((cell,),)
        self.input_size = cell.input_size
        self.state_size = cell.state_size

    @property
    def params(self) -> dict[str, Array]:
        """The parameters by their names, not copied."""
        return self.cells[0][0].params

    @staticmethod
    def name_of(parameter: str, layer: int, back: int) -> str:
        """Return the name of a parameter."""
        return parameter

    def __repr__(self) -> str:
        return repr(self.cells[0][0])


def segments(steps: int) -> list[int]:
    """Return sizes of segments of gates to try: all steps, then fewer and fewer."""
    found = [max(steps, 1)]
    while found[-1] > _SEGMENT:
        found.append(max(found[-1] // 2, _SEGMENT))
    return found


def check_limit(limit: int | None, nbytes: int, steps: int, batch: int) -> None:
    """Raise if a training step exceeds its limit of bytes."""
    if limit is not None and nbytes > limit:
        raise MemoryLimitError(
            f"memory_limit is {exact_bytes(limit)}; {steps} steps of {batch} samples need "
            f"{exact_bytes(nbytes)}"
        )


def unroll(cell: CellLike, x: Array, state: Array) -> Array:
    """Return the states ``s_0, …, s_T`` of a cell, ``(T + 1, batch, state_size)``.

    The inputs are ``(T, batch, input_size)``. Inputs and state have the dtype of the result.
    """
    steps, batch, _ = x.shape
    with streams.place("x", x, None, None):
        network, params = OneCell(cell), [_read_params(cell.params, cell.shapes)]
        if device_of(x) is None:
            directions = directions_of(network, x.dtype, rows_of_lanes(network, x.dtype, batch))
            extent = Extent(steps, batch, 0, options=arguments.Options(return_states=True))
            run = RecordedMemory(network, x.dtype, extent, directions)
            states, _ = run.forward(params, x, state[None], None)
            return np.concatenate([state[None], states])
        memory = _on_device(network, x, segments(steps)[-1])
        memory.allocate()
        with memory.here():
            memory.read(x, state[None], None)
            memory.run(range(1), memory.weights(params))
            every: Array = memory.every_state()
            return every


def _check_on_host(network: RecurrentLike, x: Any) -> None:
    """Raise if an input is on a device and a step reads further inputs."""
    if device_of(x) is not None and width_of(network) > network.input_size:
        raise InputError(
            f"x is on a device, and cells of {network!r} have further inputs or masks; expected "
            "arrays in host memory"
        )


def _on_device(
    network: RecurrentLike, x: Array, segment: int, has_resets: bool = False
) -> DeviceMemory:
    """Return memory for inputs like `x` on their device, with the gates of `segment` steps."""
    _check_on_host(network, x)
    # Imported here: it imports Numba's CUDA target.
    from .device import DeviceDirection, DeviceMemory

    directions = [
        DeviceDirection(cell, layer, back, x.dtype)
        for layer, cells in enumerate(network.cells, start=1)
        for back, cell in enumerate(cells)
    ]
    steps, batch, _ = x.shape
    return DeviceMemory(directions, network.input_size, steps, batch, segment, has_resets)
