"""TrainingStep: a recurrent network forward and backward, in compiled whole-sequence kernels."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays import streams
from ..arrays.arrays import (
    check_memory,
    check_one_place,
    device_of,
    for_kernels,
    host_array,
    load_cupy,
    namespace,
    read_array,
)
from ..errors import Allocating, InputError, InputTypeError, MemoryLimitError, short
from ..execution.calls import LINE, Calls
from ..execution.replays import Replays
from ..execution.sharing import even_slices, quiet
from ..execution.threads import thread_count
from ..formatting import exact_bytes, format_bytes
from ..kernels.cpu.copies import add_range, fill_with
from ..kernels.cpu.lanes import SAMPLE_VECTORS, SUM_ROWS, TILE_ROWS, TILE_VECTORS, sample_lanes
from ..kernels.cpu.lanes import lanes as lanes_of
from ..symbolic.schedule import check_flag
from .cell import Cell
from .loops import callers
from .loops import sequences as kernels
from .loops.sequences import Caller, Gates, Matrix, Sequence, Sums
from .memory import Memory

__all__ = ["Gradients", "TrainingStep", "memory_on_host", "unroll"]

Array = NDArray[Any]

_SPARSE = 0.25  # share of the weights that are kept, below which only those are stored
# Units up to which samples are lanes where vectors of units would be no faster: in any case, and
# where there is a group of samples for each core of the machine.
_FEW_UNITS, _MOST_UNITS = 32, 128
_SEGMENT = 256  # steps whose gates are computed at once where those of all are not kept
_LOTS, _LOT_STEPS = 16, 16  # sums of gradients that are kept apart, and the least steps of each
_TASK_ROWS = 256  # rows of a sparse weight whose gradient is a task
_SMALL = 1 << 22  # multiply-adds of a direction below which other threads would come too late
# Forward passes before kernel calls are recorded, which takes as long as some, and multiply-adds
# beside which what calls kernels takes no time.
_DIRECT, _LARGE = 8, 1 << 30


class Layers(Protocol):
    """Layers of cells, as memory is taken for them."""

    cells: tuple[tuple[Cell, ...], ...]
    input_size: int


class RecurrentLike(Layers, Protocol):
    """A :class:`Recurrent`, as far as a training step reads it."""

    state_size: int

    @property
    def params(self) -> dict[str, Array]: ...

    def name_of(self, parameter: str, layer: int, back: int) -> str: ...


class Gradients(NamedTuple):
    """Gradients of a loss, as :meth:`TrainingStep.backward` returns them.

    Attributes
    ----------
    input : ndarray or None, shape of the input
        In the input; None if it was not asked for.
    state : ndarray, shape (layers · directions, [batch,] state_size)
        In the initial state.
    params : dict of str to ndarray
        In each parameter, summed over steps and samples.
    """

    input: Array | None
    state: Array
    params: dict[str, Array]


class TrainingStep:
    """Compute a recurrent network and all of its gradients, again and again.

    A call of :meth:`forward` and one of :meth:`backward` are a whole training step but for the loss
    and the optimiser. Both run compiled loops over all steps, and their memory is kept from one
    training step to the next, so one thread at a time may call them. Made by
    :meth:`Recurrent.training_step`.

    The states of all steps are kept for the backward pass, and, if `memory_limit` allows, the gates
    of all steps; otherwise the backward pass computes the gates again, 256 steps at a time.

    With arrays of CuPy, parameters among them, all runs on their device, on the current stream, and
    results are CuPy's. The products with inputs, and the gradients of parameters, are matrix
    products over all steps; all else of a layer is one launch forward and one backward.

    Parameters
    ----------
    network : Recurrent
        The network. Its parameters are read by each :meth:`forward`.
    memory_limit : int, optional
        Bytes to take, beside the caller's arrays; by default what the machine, or the device, has.

    Attributes
    ----------
    nbytes : int
        Bytes that are kept for inputs of the last shape.
    keeps_gates : bool
        Whether the gates of all steps are kept for inputs of the last shape.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import GRU
    >>> step = GRU(12, 20, rng=0).training_step()
    >>> x = np.random.default_rng(0).standard_normal((50, 16, 12), np.float32)
    >>> output, state = step.forward(x)
    >>> output.shape, state.shape
    ((50, 16, 20), (1, 16, 20))
    >>> grads = step.backward(output)  # of the loss (output²).sum() / 2
    >>> grads.params["weight_hh_l0"].shape
    (60, 20)
    """

    def __init__(self, network: RecurrentLike, memory_limit: int | None = None) -> None:
        self.network, self.memory_limit = network, memory_limit
        self._count = len(network.cells) * len(network.cells[0])
        self._shapes = [
            {network.name_of(own, layer, back): shape for own, shape in cell._shapes.items()}
            for layer, cells in enumerate(network.cells)
            for back, cell in enumerate(cells)
        ]
        self._directions: list[Any] = []
        self._made_for: tuple[np.dtype[Any], bool, int] | None = None
        self._memory: Memory | None = None
        self._is_forward = False
        self._is_batched = True

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles take: no memory, whose views would lose their arrays."""
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
        self, x: ArrayLike, state: ArrayLike | None = None, lengths: ArrayLike | None = None
    ) -> tuple[Array, Array]:
        """Compute the outputs and the last states.

        Parameters
        ----------
        x : array_like of float32 or float64, shape (T, batch, input_size) or (T, input_size)
            The inputs, of NumPy or CuPy.
        state : array_like, shape (layers · directions, [batch,] state_size), optional
            The initial states, by default zeros: layer by layer, and in each forward in time before
            backward. That of an LSTM is ``[h, c]``.
        lengths : array_like of int, shape (batch,), optional
            How many steps each sample has, from 0 to T, in host memory; by default all have T.

        Returns
        -------
        output : ndarray, shape (T, [batch,] directions · hidden_size)
            The outputs ``h_t`` of the last layer, 0 in steps that a sample does not have.
        state : ndarray, shape (layers · directions, [batch,] state_size)
            The states after the last step of each sample.

        Raises
        ------
        InputError, InputTypeError
            If a shape, a dtype or a length is wrong; or if there are more units than a GPU's
            kernels take, in float32 at least 1,228 of an LSTM, in float64 half as many.
        DeviceError
            If arrays and parameters are not in one place.
        MemoryLimitError
            If the states take more memory than `memory_limit`, or than there is.
        """
        return self._forward(self.network.params, x, state, lengths)

    @Allocating("a training step")
    @quiet
    def _forward(
        self, given: Mapping[str, Array], x: Any, state: Any, lengths: Any
    ) -> tuple[Array, Array]:
        """Compute what :meth:`forward` does, with parameters that may be another network's."""
        self._is_forward = False
        x = read_array("x", x)
        with streams.place("x", x, None, None):
            params = [_read_params(given, shapes) for shapes in self._shapes]
            x, state, lengths = self._read(x, state, lengths, params)
            memory = self._memory
            if memory is None or not memory.fits(x):
                self._memory = None  # before there is another
                memory = self._memory = self._allocate(x)
            with memory.here():
                output, last = memory.forward(params, x, state, lengths)
        self._is_forward = True
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
        """Return the gradients of the loss, once after each :meth:`forward`.

        Parameters
        ----------
        grad_output, grad_state : array_like, optional
            Gradients in both results of :meth:`forward`; by default zeros.
        needs_input_grad : bool, default True
            Whether gradients in the input are computed.

        Returns
        -------
        Gradients
            Those in the input, in the initial states, and in the parameters.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            If a shape or a dtype is wrong, or an array is elsewhere than the input was; or if there
            was no forward pass, or another backward pass, which has used what was kept.
        """
        needs_input_grad = check_flag("needs_input_grad", needs_input_grad)
        memory = self._memory
        if memory is None or not self._is_forward:
            raise InputError("backward was called without a forward pass before it")
        with memory.here():
            above, carry = self._read_grads(memory, grad_output, grad_state)
            self._is_forward = False
            input_grad, state_grad, params = memory.backward(above, carry, needs_input_grad)
        # The names that a cell has for its parameters are in the order of the network's.
        named = {
            name: grad
            for shapes, grads in zip(self._shapes, params, strict=True)
            for name, grad in zip(shapes, grads.values(), strict=True)
        }
        return Gradients(
            None if input_grad is None else self._as_given(input_grad),
            self._as_given(state_grad),
            named,
        )

    # -- Input ------------------------------------------------------------------------------------

    def _allocate(self, x: Array) -> Memory:
        """Return memory that keeps the gates of all steps if the limit allows."""
        steps, batch, _ = x.shape
        on_host = device_of(x) is None
        key = x.dtype, on_host, _sample_rows(self.network, x) if on_host else 0
        if self._made_for != key:
            self._made_for, self._directions = key, _directions_of(self.network, x)
        for segment in dict.fromkeys((max(steps, 1), max(1, min(steps, _SEGMENT)))):
            memory = _memory_for(self.network, self._directions, x, segment)
            if self.memory_limit is None or memory.nbytes <= self.memory_limit:
                break
        if self.memory_limit is not None and memory.nbytes > self.memory_limit:
            raise MemoryLimitError(
                f"memory_limit is {exact_bytes(self.memory_limit)}; {steps} steps of {batch} "
                f"samples need {exact_bytes(memory.nbytes)}"
            )
        memory.allocate()
        return memory

    def _read(
        self, x: Any, state: Any, lengths: Any, params: list[list[Array]]
    ) -> tuple[Array, Array | None, NDArray[np.int64] | None]:
        """Return the input with an axis of samples, the states, and the lengths.

        Input and states have the dtype to which they and the parameters promote. States that are
        not given are None, and so are lengths if each sample has all steps.
        """
        net = self.network
        if x.ndim not in (2, 3) or x.shape[-1] != net.input_size:
            raise InputError(
                f"x has shape {x.shape}; expected (T, batch, {net.input_size}) or "
                f"(T, {net.input_size})"
            )
        self._is_batched = x.ndim == 3
        steps, batch = x.shape[0], x.shape[1] if x.ndim == 3 else 1
        lead = (self._count, *x.shape[1:-1])
        expected = (*lead, net.state_size)
        state = None if state is None else read_array("state", state)
        every = [param for own in params for param in own]
        namespace(x, *every, state)  # which raises if they are not in one place
        if state is not None and state.shape != expected:
            raise InputError(
                f"state has shape {state.shape}; expected {expected}, as x has shape {x.shape}"
            )
        arrays = [x, *every, *([] if state is None else [state])]
        dtype = np.result_type(*{array.dtype for array in arrays})
        x = for_kernels(x.reshape(steps, batch, net.input_size), dtype)
        if state is not None:
            state = for_kernels(state.reshape(self._count, batch, net.state_size), dtype)
        return x, state, None if lengths is None else _read_lengths(lengths, steps, batch)

    def _read_grads(self, memory: Memory, output: Any, state: Any) -> tuple[Array, Array]:
        """Return the gradients in both results of the forward pass, with an axis of samples."""
        xp, checked = np if memory.device is None else load_cupy(), []
        for name, grad, shape in (
            ("grad_output", output, (memory.steps, memory.batch, memory.widths[-1])),
            ("grad_state", state, (self._count, memory.batch, self.network.state_size)),
        ):
            if grad is None:
                # On the host nothing stands for zeros.
                checked.append(xp.zeros(shape if xp is not np else 0, memory.dtype))
                continue
            array = read_array(name, grad)
            check_one_place(name, device_of(array), "x", memory.device)
            expected = shape if self._is_batched else (shape[0], shape[2])
            if array.shape != expected:
                raise InputError(f"{name} has shape {array.shape}; expected {expected}")
            checked.append(for_kernels(array.reshape(shape), memory.dtype))
        return checked[0], checked[1]

    def _as_given(self, array: Array) -> Array:
        """Return a result with an axis of samples if the input had one."""
        return array if self._is_batched else array[:, 0]


def _read_params(given: Mapping[str, Array], shapes: dict[str, tuple[int, ...]]) -> list[Array]:
    """Return the parameters of a direction."""
    params = []
    for name, shape in shapes.items():
        array = read_array(name, given[name])
        if array.shape != shape:
            raise InputError(f"{name} has shape {array.shape}; expected {shape}")
        params.append(array)
    return params


def _read_lengths(lengths: Any, steps: int, batch: int) -> NDArray[np.int64] | None:
    """Return the steps that each sample has; None if each has all."""
    array = host_array("lengths", lengths)
    # NumPy makes float64 of an empty list.
    is_empty_list = array.shape == (0,) and isinstance(lengths, (list, tuple))
    if array.dtype.kind not in "iu" and not is_empty_list:
        raise InputTypeError(f"lengths is {short(lengths)}; expected integers")
    if array.shape != (batch,):
        raise InputError(f"lengths has shape {array.shape}; expected {(batch,)}, one for a sample")
    # A copy, made before it is checked.
    array = np.array(array)
    if batch and not (array.min() >= 0 and array.max() <= steps):
        raise InputError(f"lengths is {short(lengths)}; expected integers from 0 to {steps}")
    return None if (array == steps).all() else array.astype(np.int64)


class _OneCell:
    """A network of one cell."""

    cells: tuple[tuple[Cell, ...], ...]

    def __init__(self, cell: Cell) -> None:
        self.cells, self.input_size = ((cell,),), cell.input_size


def unroll(cell: Cell, x: Array, state: Array) -> Array:
    """Return the states ``s_0, …, s_T`` of a cell, ``(T + 1, batch, state_size)``.

    The inputs are ``(T, batch, input_size)``, in the dtype of the result, as is the state.
    """
    steps = len(x)
    with streams.place("x", x, None, None):
        network = _OneCell(cell)
        segment = max(1, min(steps, _SEGMENT))
        memory = _memory_for(network, _directions_of(network, x), x, segment)
        memory.allocate()
        with memory.here():
            memory.read(x, state[None], None)
            params = [cell.read_parameter(name) for name in cell.parameter_names]
            memory.run(range(1), memory.weights([params]))
            return memory.every_state()


def _directions_of(network: Layers, x: Array) -> list[Any]:
    """Return all directions of all layers, with their weights packed for where `x` is."""
    kind: Any = _Direction
    if device_of(x) is not None:
        # Which imports Numba's CUDA target.
        from .device import DeviceDirection

        kind = DeviceDirection
    else:
        kind = partial(_Direction, sample_rows=_sample_rows(network, x))
    return [
        kind(cell, layer, back, x.dtype)
        for layer, cells in enumerate(network.cells, start=1)
        for back, cell in enumerate(cells)
    ]


def _sample_rows(network: Layers, x: Array) -> int:
    """Return how many rows' samples are the lanes of a vector; 0 if lanes are units.

    Lanes are samples where these fill vectors that do not leave threads without work, or where
    weights are sparse.
    """
    cells = [cell for layer in network.cells for cell in layer]
    masks = [cell._masks[name] for cell in cells for name in ("weight_ih", "weight_hh")]
    if any(mask is not None and _is_sparse(mask.on(np)) for mask in masks):
        return 1
    # Without AVX-512 there are too few registers for a tile, and units fill the shorter vectors.
    lanes, batch, units = sample_lanes(x.dtype), x.shape[1], cells[0].hidden_size
    if batch <= lanes or lanes_of(x.dtype) == lanes:
        return 0
    if units % 2:
        # Vectors of units are twice as wide, and faster unless many of their lanes are empty.
        return int(units <= lanes_of(x.dtype) * 5 // 4)
    # Not the cores that this process may use: the bits of results would depend on their number.
    fills_machine = -(-batch // lanes) >= (os.cpu_count() or 1)
    return 2 if units <= (_MOST_UNITS if fills_machine else _FEW_UNITS) else 0


def _is_sparse(kept: NDArray[np.bool_]) -> bool:
    """Return whether only the entries of a weight are stored."""
    return bool(np.count_nonzero(kept) < _SPARSE * kept.size)


def _memory_for(network: Layers, directions: list[Any], x: Array, segment: int) -> Memory:
    """Return memory for inputs like `x`, which keeps the gates of `segment` steps."""
    steps, batch, _ = x.shape
    if device_of(x) is None:
        return _Memory(network, directions, steps, batch, segment, Calls())
    from .device import DeviceMemory

    return DeviceMemory(directions, network.input_size, steps, batch, segment)


def memory_on_host(
    network: Layers, x: Array, calls: Calls, *, keeps_gates: bool, keeps_samples: bool = False
) -> _Memory:
    """Return memory for inputs like `x`, and calls of kernels that others may make, or note.

    If it `keeps_samples`, a backward pass returns what gradients of parameters are sums of.
    """
    steps, batch, _ = x.shape
    segment = max(1, steps if keeps_gates else min(steps, _SEGMENT))
    directions = _directions_of(network, x)
    memory = _Memory(network, directions, steps, batch, segment, calls, keeps_samples)
    memory.allocate()
    return memory


def _run(
    group: _Group,
    k: int,
    all_weights: list[_Weights],
    span: tuple[int, int],
    *,
    is_again: bool = False,
) -> None:
    """Compute some states of one direction, in its order, and their gates."""
    memory, weights = group.memory, all_weights[k]
    one = memory.directions[k]
    memory.calls.launch(
        one.cell._run_kernel,
        group.sequence(k, span),
        weights.w_in,
        weights.w_hidden,
        weights.bias,
        memory.states[one.layer - 1],
        memory.no_caller._replace(ends=memory.ends[one.back]) if is_again else memory.caller(one),
        one.is_relu,
        *span,
    )


def _back(
    group: _Group,
    k: int,
    all_weights: list[_Weights],
    sums: dict[int, _Sums],
    above: Array,
    parts: list[Array],
    span: tuple[int, int],
) -> None:
    """Compute the gradients in products and inputs of some steps of one direction."""
    memory = group.memory
    one, weights = memory.directions[k], all_weights[k]
    carry, w_in, below = memory.carries[k], weights.w_in_back._replace(rows=0), above
    if parts:
        w_in, below = weights.w_in_back, parts[one.back]
    sequence, x = group.sequence(k, span), memory.states[one.layer - 1]
    given = sequence, weights.w_back, w_in, weights.bias, x
    grads = carry[0], carry[-1]
    if one.cell._writes_gates and not memory.keeps_gates:
        about = *given, above.reshape(-1), *grads, memory.ends[one.back]
        memory.calls.launch(kernels.find_ends, *about, one.is_relu, *span)
        _run(group, k, all_weights, span, is_again=True)
    memory.calls.launch(
        one.cell._back_kernel,
        *given,
        memory.sums(one, sums[k]),
        above.reshape(-1),
        below.reshape(-1),
        *grads,
        one.is_relu,
        *span,
    )


# -- Weights --------------------------------------------------------------------------------------


def _flat(param: Array) -> Array:
    """Return the numbers of a parameter."""
    flat: Array = for_kernels(param.reshape(-1), param.dtype)
    return flat


class _Packing:
    """How a weight of a cell, or its transpose, is put in the order in which kernels read it.

    Rows are put in the order of the products of a step. A weight of which little is kept is stored
    by its entries.

    Parameters
    ----------
    places : ndarray of int, shape (rows, cols)
        Where the entries are in the weight of the cell.
    kept : ndarray of bool, same shape
        Which of them are not pruned.
    lanes : int
        Rows in a vector.
    block : int
        Columns that read neighbours.
    sample_rows : int
        How many rows' samples are the lanes of a vector; 0 if lanes are units.
    first, whole : int
        Which row of all products of a step is the first one here, and how many those are.
    """

    def __init__(
        self,
        places: NDArray[np.int64],
        kept: NDArray[np.bool_],
        lanes: int,
        block: int,
        sample_rows: int,
        first: int,
        whole: int,
    ) -> None:
        self.rows, cols = places.shape
        # A vector of two columns' samples, the last of which may be no column.
        self.cols = cols + cols % 2 if sample_rows == 2 else cols
        self.first, self.stride = first, -(-whole // lanes) * lanes
        self._lanes, self.block = lanes, block or self.cols
        self.is_sparse = _is_sparse(kept)
        self.tile = size = TILE_VECTORS * lanes
        if sample_rows:
            # Few rows that fill up the last tile, and few tiles.
            heights = range(4, SAMPLE_VECTORS + 1, 4)
            vectors = -(-self.rows // sample_rows)
            best = min(heights, key=lambda height: -(-vectors // height) * (height + 2))
            self.tile = size = sample_rows * best
        if self.is_sparse:
            self.order = places[kept]
            # Not with gaps, for which other kernels would be compiled.
            self.indices = np.ascontiguousarray(np.nonzero(kept)[1])
            self.indptr = np.concatenate([[0], kept.sum(axis=1).cumsum()])
            return
        # Where an entry is pruned, or fills up a vector, a zero behind the weight.
        filled = np.full((-(-self.rows // size) * size, self.cols), places.size)
        filled[: self.rows, :cols] = np.where(kept, places, places.size)
        tiles = [filled[row : row + size].T.reshape(-1) for row in range(0, len(filled), size)]
        self.order = np.concatenate(tiles)
        self.indices = self.indptr = np.zeros(0, np.int64)
        # Where the sum of each entry of the weight is; nowhere if that is pruned.
        sums = np.arange(self.cols * self.stride).reshape(self.cols, -1)
        sums = sums[:cols, first : first + self.rows].T
        self._sums = sums.reshape(-1)[np.argsort(places.reshape(-1))]
        self._sums[places[~kept]] = -1

    def matrix(self, values: Array) -> Matrix:
        """Return the matrix of values that are in this order."""
        return Matrix(
            self.is_sparse,
            self.rows,
            self.cols,
            -(-self.rows // self._lanes),
            self.cols // self.block,
            self.block,
            self.tile,
            values,
            self.indices,
            self.indptr,
        )

    def unpack(self, calls: Calls, sums: Array, out: Array) -> None:
        """Write the gradient of the weight from the sums, 0 where it is pruned."""
        if self.is_sparse:
            calls.launch(callers.put_grads, sums, self.order, out)
        else:
            count = self.cols * self.stride
            calls.launch(callers.total_grads, sums, len(sums) // count, count, self._sums, out)


class _Weights(NamedTuple):
    """The parameters of a cell, as kernels multiply by them."""

    w_in: Matrix
    w_hidden: Matrix
    bias: Array
    w_in_back: Matrix
    w_back: Matrix


# Sums over steps and samples, for the weights of input and state: of their entries, and of all
# products of a step, which both have in common if they are dense; of each lot of samples.
_Sums = tuple[tuple[Array, Array], tuple[Array, Array]]


class _Direction:
    """One direction of one layer: a cell, and how its weights are packed for a dtype."""

    def __init__(
        self, cell: Cell, layer: int, back: int, dtype: np.dtype[Any], *, sample_rows: int
    ) -> None:
        self.cell, self.layer, self.back, self.dtype = cell, layer, back, dtype
        self.sample_rows = sample_rows
        self.is_relu = cell.kind == "relu"
        self.lanes = lanes_of(dtype)
        self.units = cell.hidden_size
        self.products = (max(cell._hh) + 1) * self.units
        self.kept = cell._kept_gates
        # The products that read the input come first, and those that read the state last.
        gates = np.arange(len(cell._ih))
        self.first_hidden = self.products - len(gates) * self.units
        # The input of a layer above the first is the states of each direction of the one below.
        block = self.units if layer > 1 else 0
        order = np.argsort(cell._ih)
        self.in_packing, self._in_back = self._packings("weight_ih", order, 0, block)
        self.hidden_packing, self._hidden_back = self._packings(
            "weight_hh", gates, self.first_hidden, 0
        )
        self.packings = self.in_packing, self.hidden_packing
        # Where the biases of all gates are among the products of a step.
        units, products = np.arange(self.units), (cell._ih, cell._hh)
        self._bias_places = [
            np.add.outer(self.units * np.array(k), units).ravel() for k in products
        ]
        self.is_dense = not (self.in_packing.is_sparse and self.hidden_packing.is_sparse)
        # From the products of a sample to those of the next: each fills whole vectors.
        vectors = -(-max(self.hidden_packing.rows, self.units) // self.lanes)
        ends = self.first_hidden + vectors * self.lanes, self.products, self._in_back.rows
        self.stride = (-(-max(ends) // self.lanes) + 1) * self.lanes
        self._biases = self._bias_orders()

    def _packings(
        self, name: str, order: NDArray[np.int64], first: int, block: int
    ) -> tuple[_Packing, _Packing]:
        shape, mask = self.cell._shapes[name], self.cell._masks[name]
        places = np.arange(math.prod(shape)).reshape(len(order), self.units, shape[1])
        places = places[order].reshape(shape)
        kept = np.ones(shape, bool) if mask is None else mask.on(np)
        kept = kept.reshape(-1)[places]
        rows = self.sample_rows
        return (
            _Packing(places, kept, self.lanes, block, rows, first, self.products),
            _Packing(places.T, kept.T, self.lanes, self.units, rows, 0, shape[1]),
        )

    def _bias_orders(self) -> list[NDArray[np.int64]]:
        """Return where the bias of each product is in both of the cell's, or that it has none."""
        # Whole vectors or tiles are read, and what is too much is not used.
        copies, rows, more = 1, 1, 2 * self.lanes
        if self.sample_rows:
            copies, rows = sample_lanes(self.dtype), self.sample_rows
            more = rows * SAMPLE_VECTORS
        orders = []
        for products in (self.cell._ih, self.cell._hh):
            count = len(products) * self.units
            order = np.full((self.products // self.units, self.units), count)
            order[list(products)] = np.arange(count).reshape(-1, self.units)
            padded = np.append(order, np.full(more, count))
            orders.append(padded.reshape(-1, 1, rows).repeat(copies, axis=1).ravel())
        return orders

    def room(self, calls: Calls) -> _Weights:
        """Take memory for the parameters, as kernels read them."""
        packings = self.in_packing, self.hidden_packing, self._in_back, self._hidden_back
        w_in, w_hidden, w_in_back, w_back = (
            each.matrix(calls.room(len(each.order), self.dtype)) for each in packings
        )
        bias = calls.room(len(self._biases[0]), self.dtype)
        return _Weights(w_in, w_hidden, bias, w_in_back, w_back)

    def pack(self, calls: Calls, room: _Weights, params: list[Array]) -> None:
        """Write the parameters of the cell to memory that :meth:`room` has taken."""
        w_ih, w_hh, *biases = params
        packings = (self.in_packing, self._in_back), (self.hidden_packing, self._hidden_back)
        matrices = (room.w_in, room.w_in_back), (room.w_hidden, room.w_back)
        for param, orders, places in zip((w_ih, w_hh), packings, matrices, strict=True):
            for packing, matrix in zip(orders, places, strict=True):
                calls.launch(callers.place, param, packing.order, matrix.values)
        if not biases:
            calls.launch(fill_with, room.bias, 0)
            return
        calls.launch(callers.place, biases[0], self._biases[0], room.bias)
        calls.launch(callers.add_placed, biases[1], self._biases[1], room.bias)

    def zeros(self, calls: Calls, lots: int) -> _Sums:
        """Return what sums of gradients of the parameters begin with."""
        x_cols, h_cols = (0 if each.is_sparse else each.cols for each in self.packings)
        count = lots * self.in_packing.stride
        room = calls.zeros(count * (1 + x_cols + h_cols), float)
        end = count * (1 + x_cols)
        in_x, in_h = (
            (calls.zeros(len(each.order), float), calls.zeros(each.stride, float))
            if each.is_sparse
            else (part, room[:count])
            for each, part in zip(self.packings, (room[count:end], room[end:]), strict=True)
        )
        return in_x, in_h

    def param_grads(self, calls: Calls, k: int, sums: _Sums) -> dict[str, Array]:
        """Return the gradients of the parameters by their names, as results of direction `k`."""
        grads = {
            name: calls.result(f"{name} {k}", shape, self.dtype)
            for name, shape in self.cell._shapes.items()
        }
        for name, packing, (entries, _) in zip(grads, self.packings, sums, strict=False):
            packing.unpack(calls, entries, grads[name].reshape(-1))
        if self.cell.bias:
            parts = zip(("bias_ih", "bias_hh"), self.packings, self._bias_places, sums, strict=True)
            for name, packing, places, (_, rows) in parts:
                count = packing.stride
                about = rows, len(rows) // count, count, places
                calls.launch(callers.total_grads, *about, grads[name])
        return grads


# -- Memory ---------------------------------------------------------------------------------------


class _Memory(Memory):
    """The memory on the host: for all samples, and for the groups of them that threads share.

    There is a slot for the states of each step, one before the first step, and one behind the last;
    layer 0 is the input. Those of one direction of a layer are together: two threads write them.
    """

    directions: list[_Direction]
    device: int | None = None

    def __init__(
        self,
        network: Layers,
        directions: list[_Direction],
        steps: int,
        batch: int,
        segment: int,
        calls: Calls,
        keeps_samples: bool = False,
    ) -> None:
        self.directions, self.per_layer, self.calls = directions, len(network.cells[0]), calls
        self._keeps_samples = keeps_samples
        self.steps, self.batch, self.segment = steps, batch, segment
        self.keeps_gates = segment >= steps
        # Directions that have gates of their own: where not all are kept, layers take turns.
        self._gates_count = len(directions) if self.keeps_gates else self.per_layer
        one = directions[0]
        self.units, self.dtype, self.lanes = one.units, one.dtype, one.lanes
        self.widths = [network.input_size, *(len(c) * c[0].hidden_size for c in network.cells)]
        self._all_threads = thread_count()
        work = steps * batch * one.products * (one.in_packing.cols + one.units)
        self.threads = 1 if work < _SMALL else self._all_threads
        parts = max(1, self.threads // self.per_layer)
        self.has_sample_lanes, self._rows = one.sample_rows > 0, max(1, one.sample_rows)
        # Length of a row of the inputs here.
        self._cols = one.in_packing.cols
        if self.has_sample_lanes:
            # Samples are in groups, and these in lots whose sums of gradients are kept apart. Both
            # are as they are whatever the threads.
            self.group = sample_lanes(self.dtype)
            groups = -(-batch // self.group)
            lots = max(1, min(groups, _LOTS, steps * groups // _LOT_STEPS))
            self.padded, self.lot = groups * self.group, max(1, -(-groups // lots)) * self.group
            self._samples = max(1, -(-self.padded // (parts * self.lot))) * self.lot
        else:
            # A product takes half a tile at least.
            fewest = TILE_ROWS // 2
            self._samples = max(1, -(-batch // (parts * fewest))) * fewest
            self.padded, self.group, self.lot = batch, self._samples, max(1, batch)
        # From the states of one direction to those of the other: whole groups, and cache lines.
        line = LINE // self.dtype.itemsize
        self.plane = -(-self.padded * (steps + 2) * self.units // line) * line
        self.groups: list[_Group] = []
        self._forwards, self._replays = 0, Replays(self)
        # Calls that are noted anyway are not recorded.
        self._may_replay = type(calls) is Calls and work * len(directions) < _LARGE
        self._sparse_places = {
            k: self._places_of(each)
            for k, each in enumerate(directions)
            if each.in_packing.is_sparse and each.in_packing.block < each.in_packing.cols
        }
        self.nbytes = sum(self.dtype.itemsize * count + LINE for _, count in self._sizes())
        self.nbytes += self._gates_count * (self.padded * segment + LINE)
        self.nbytes += self.per_layer * (8 * self.padded + LINE)
        none = np.empty(0, self.dtype)
        self.no_caller = Caller(none, self.widths[0], False, none, np.empty(0, np.int64))

    def fits(self, x: Array) -> bool:
        """Return whether this is the memory for inputs like `x`."""
        wanted = *x.shape[:2], x.dtype, thread_count(), device_of(x)
        return (self.steps, self.batch, self.dtype, self._all_threads, None) == wanted

    def here(self) -> AbstractContextManager[None]:
        """Return a context for work on this memory."""
        return nullcontext()

    def weights(self, params: list[list[Array]]) -> list[_Weights]:
        """Return a copy of the parameters of each direction, which the next call overwrites."""
        for one, room, own in zip(self.directions, self._weights, params, strict=True):
            one.pack(self.calls, room, [_flat(param) for param in own])
        return self._weights

    # -- Passes -----------------------------------------------------------------------------------

    def forward(
        self,
        params: list[list[Array]],
        x: Array,
        state: Array | None,
        lengths: NDArray[np.int64] | None,
    ) -> tuple[Array, Array]:
        """Return outputs and last states."""
        self._forwards += 1
        if not self._is_replayed():
            return super().forward(params, x, state, lengths)

        def call(x: Array, state: Array, lengths: Array, *flat: Array) -> None:
            self._all_steps, each = False, iter(flat)
            super(_Memory, self).forward(
                [[*islice(each, len(p))] for p in params], x, state, lengths
            )

        given = [x, state, lengths, *(_flat(param) for own in params for param in own)]
        results = self._replays.run(("forward",), given, call)
        self._packed = self._weights
        return results["output"], results["last"]

    def backward(
        self, above: Array, carry: Array, needs_input_grad: bool
    ) -> tuple[Array | None, Array, list[dict[str, Array]]]:
        """Return gradients in the input, in the initial states, and in each direction's parameters.

        An empty array stands for zeros.
        """
        if not self._is_replayed():
            return super().backward(above, carry, needs_input_grad)

        def call(above: Array, carry: Array) -> None:
            super(_Memory, self).backward(above, carry, needs_input_grad)

        results = self._replays.run(("backward", needs_input_grad), [above, carry], call)
        params = [
            {name: results[f"{name} {k}"] for name in one.cell._shapes}
            for k, one in enumerate(self.directions)
        ]
        return results.get("input"), results["state"], params

    def _is_replayed(self) -> bool:
        """Return whether passes are made by recordings."""
        return self._may_replay and self._forwards > _DIRECT

    def _places_of(self, one: _Direction) -> NDArray[np.int64]:
        """Return where the numbers of an input are that the entries of a sparse weight multiply."""
        block, column = np.divmod(one.in_packing.indices, one.in_packing.block)
        return block * (self.plane // self.group) + column

    def _spans(self) -> list[tuple[int, int]]:
        """Return the first of each group of samples, and how many they are."""
        size, count = self._samples, self.padded
        return [(k, min(size, count - k)) for k in range(0, max(count, 1), size)]

    def _sizes(self) -> list[tuple[str, int]]:
        """Return, for each array, what it holds, and how many numbers.

        Kernels read some rows more than there are, and do not use them.
        """
        rows, has_cells = self.padded * (self.steps + 2), self.directions[0].cell._parts == 2
        if self.has_sample_lanes:
            tile = self._rows * SAMPLE_VECTORS
            more, zeros = 0, (max(self.units, *self.widths[:-1]) + tile) * self.group
        else:
            more, zeros = self.lanes + 1, max(one.stride for one in self.directions)
        count = self.padded * self.units + self.lanes
        parts = sum(one.cell._parts for one in self.directions)
        sizes = [("lengths", count), ("zeros", zeros), *[("carries", count)] * parts]
        own = self.per_layer * self.plane + more * self.units
        sizes += [("states", (rows + more) * self._cols)]
        for name, count in (("states", own), ("cells", own * has_cells)):
            sizes += [(name, count)] * (len(self.widths) - 1)
        sizes = [(name, count + self.lanes) for name, count in sizes]
        gates = [
            self.segment * self.padded * one.units * one.kept if self._has_gates(one) else 0
            for one in self.directions
        ]
        rest = SUM_ROWS * self.group if self.has_sample_lanes else (more + 1) * self.units
        gates = [count + rest for count in gates]
        some = gates if self.keeps_gates else [max(gates)] * self._gates_count
        sizes += [("gates", count + self.lanes) for count in some]
        inner = max(self.widths[1:-1], default=0)
        sizes += [("grads", self.steps * self.batch * inner)] * min(2, len(self.widths) - 2)
        if self.per_layer > 1:
            sizes += [("part", self.steps * self.batch * max(self.widths[:-1]))]
        for _, count in self._spans():
            for one in self.directions:
                if self.has_sample_lanes:
                    products = zeros
                    parts = (one.products + one.units + tile) * self.group + self.lanes
                else:
                    part = (-(-count * one.units // self.lanes) + 2) * self.lanes
                    products = (count + self.lanes) * one.stride
                    parts = (one.products // one.units + 1) * part
                grads = kernels.STEPS * self.grad_step(one)
                sizes += [("products", products), ("parts", parts), ("block", grads)]
        return sizes

    def allocate(self) -> None:
        """Take the memory."""
        check_memory(f"{self.steps} steps of {self.batch} samples", self.nbytes)
        arrays: dict[str, list[Array]] = {"cells": [], "grads": [], "part": []}
        for name, count in self._sizes():
            take = self.calls.zeros if name == "zeros" else self.calls.room
            arrays.setdefault(name, []).append(take(count, self.dtype))
        self.states, self.cells = arrays["states"], [np.zeros(0, self.dtype), *arrays["cells"]]
        (self.lengths,), (self.zeros,) = arrays["lengths"], arrays["zeros"]
        self._grads, self._parts = arrays["grads"], arrays["part"]
        self._ones = self.calls.room(2 * self.group, self.dtype)
        self.calls.launch(fill_with, self._ones, 1)
        gates = arrays["gates"]
        self.gates = [gates[k % len(gates)] for k in range(len(self.directions))]
        flags = [self.calls.room(self.padded * self.segment, np.uint8) for _ in gates]
        self.has_grads = [flags[k % len(flags)] for k in range(len(self.directions))]
        # Of each direction of a layer, which other threads may run.
        self.ends = [self.calls.room(self.padded, np.int64) for _ in range(self.per_layer)]
        carries = iter(arrays["carries"])
        self.carries = [[next(carries) for _ in range(one.cell._parts)] for one in self.directions]
        own = {name: iter(arrays.get(name, ())) for name in ("products", "parts", "block")}
        self.groups = [_Group(self, first, count, own) for first, count in self._spans()]
        self._weights = [one.room(self.calls) for one in self.directions]
        for k, places in self._sparse_places.items():
            w_in = self._weights[k].w_in._replace(indices=places)
            self._weights[k] = self._weights[k]._replace(w_in=w_in)
        self._all_steps = False

    def plane_of(self, arrays: list[Array], one: _Direction) -> Array:
        """Return the states of a direction, and all behind them."""
        return arrays[one.layer][one.back * self.plane :]

    # -- The caller's arrays ----------------------------------------------------------------------

    def _row(self) -> int:
        """Return how many numbers a sample has in states of the caller."""
        return self.directions[0].cell._parts * self.units

    def _state_parts(self, k: int) -> list[tuple[Array, int]]:
        """Return the states of a direction, and of an LSTM the cell states, with their columns."""
        one = self.directions[k]
        parts = [self.states, self.cells][: one.cell._parts]
        return [(self.plane_of(each, one), part * self.units) for part, each in enumerate(parts)]

    def _carry_parts(self, k: int) -> list[tuple[Array, int]]:
        """Return the gradients in the states of a direction likewise."""
        return [(carry, part * self.units) for part, carry in enumerate(self.carries[k])]

    def _read_states(
        self, k: int, parts: list[tuple[Array, int]], slot: int, states: Array
    ) -> None:
        """Write what the caller has for a direction to a slot; zeros if that has nothing."""
        for array, column in parts:
            at = k * self.batch * self._row() + column
            about = array, slot, states, at, self._row()
            self.calls.launch(callers.state_in, self._all_samples(k), *about)

    def _write_states(
        self, k: int, parts: list[tuple[Array, int]], slot: int, states: Array
    ) -> None:
        """Write what a direction has in a slot as the caller has it."""
        for array, column in parts:
            at = k * self.batch * self._row() + column
            about = array, slot, states.reshape(-1), at, self._row()
            self.calls.launch(callers.state_out, self._all_samples(k), *about)

    def _states_of_caller(self, name: str) -> Array:
        shape = len(self.directions), self.batch, self._row()
        return self.calls.result(name, shape, self.dtype)

    def read(self, x: Array, state: Array | None, lengths: NDArray[np.int64] | None) -> None:
        """Take over inputs, initial states, which are zeros by default, and lengths."""
        self._x, self._is_shorter = x.reshape(-1), lengths is not None
        states = np.zeros(0, self.dtype) if state is None else state.reshape(-1)
        for k, one in enumerate(self.directions):
            self._read_states(k, self._state_parts(k), self.steps + 1 if one.back else 0, states)
        if lengths is not None or not self._all_steps:
            counts = np.zeros(0, np.int64) if lengths is None else lengths
            self.calls.launch(callers.lengths_in, self._all_samples(0), self.lengths, counts)
        self._all_steps = lengths is None
        if not self.has_sample_lanes or self.per_layer > 1:
            caller = self.no_caller._replace(x=self._x, is_shorter=self._is_shorter)
            about = caller, self._all_samples(0), self._cols, self.states[0]
            self._for_steps(partial(self.calls.launch, callers.turn_in, *about))

    def caller(self, one: _Direction) -> Caller:
        """Return the caller's arrays, as far as a direction reads and writes them itself.

        The inputs are where both directions do not share them.
        """
        caller = self.no_caller
        if self.has_sample_lanes and one.layer == 1 and self.per_layer == 1:
            caller = caller._replace(x=self._x, is_shorter=self._is_shorter)
        if self._writes_output(one) and self.per_layer == 1:
            caller = caller._replace(output=self._output.reshape(-1))
        return caller

    def _writes_output(self, one: _Direction) -> bool:
        """Return whether the states of a direction are outputs, and have samples as lanes."""
        return self.has_sample_lanes and one.layer == len(self.widths) - 1

    def _all_samples(self, k: int) -> Sequence:
        """Return a direction of all samples for kernels that only read or write their slots."""
        return self.groups[0].sequence(k, (0, 0))._replace(first=0, count=self.padded)

    def _for_steps(self, call: Callable[[int, int], None]) -> None:
        """Call a function for parts of the steps: from one of them, and before which it stops."""
        spans = even_slices(self.steps, self.threads) if self.batch else ()
        self.call_all([partial(call, span.start, span.stop) for span in spans])

    def _turn_out(self, start: int, stop: int) -> None:
        """Write the outputs of some steps, of both directions, which share cache lines."""
        out = self._output[start:].reshape(-1)
        first = len(self.directions) - self.per_layer
        for k, one in enumerate(self.directions[first:], first):
            where = start + 1, stop + 1, out, self.widths[-1], one.back * self.units
            states = self.plane_of(self.states, one)
            self.calls.launch(callers.turn_out, states, self._all_samples(k), *where)

    def results(self, lengths: NDArray[np.int64] | None) -> tuple[Array, Array]:
        """Return outputs and last states."""
        output = self._output
        del self._output, self._x
        if lengths is not None:
            about = output.reshape(-1), lengths, self.widths[-1]
            self._for_steps(partial(self.calls.launch, callers.clear_outputs, *about))
        last = self._states_of_caller("last")
        for k, one in enumerate(self.directions):
            self._write_states(k, self._state_parts(k), 1 if one.back else self.steps, last)
        return output, last

    # -- Threads ----------------------------------------------------------------------------------

    def for_each_group(self, ks: range, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function for each group of samples and each direction of a layer."""
        self.call_all([partial(call, *task, *arguments) for task in product(self.groups, ks)])

    def call_all(self, tasks: list[Callable[[], None]]) -> None:
        """Do some tasks, with other threads if that is worth it."""

        def do_all() -> None:
            for task in tasks:
                task()

        self.calls.together(tasks if self.threads > 1 else [do_all])

    # -- States and gradients ---------------------------------------------------------------------

    def run(self, ks: range, weights: list[_Weights]) -> None:
        """Compute all states of the directions of a layer, and the gates of the last segment."""
        if self.directions[ks.start].layer == len(self.widths) - 1:
            shape = self.steps, self.batch, self.widths[-1]
            self._output = self.calls.result("output", shape, self.dtype)
        for start in range(0, self.steps, self.segment):
            span = start, min(start + self.segment, self.steps)
            self.for_each_group(ks, _run, weights, span)
        is_last = self.directions[ks.start].layer == len(self.widths) - 1
        if is_last and not (self.has_sample_lanes and self.per_layer == 1):
            self._for_steps(self._turn_out)

    def every_state(self) -> Array:
        """Return the states of the only direction: before the first step, and after each."""
        states = np.empty((self.steps + 1, self.batch, self._row()), self.dtype)
        for array, column in self._state_parts(0):
            where = 0, self.steps + 1, states.reshape(-1), self._row(), column
            self.calls.launch(callers.turn_out, array, self._all_samples(0), *where)
        return states

    def read_carry(self, carry: Array) -> None:
        """Take over the gradients in the last states."""
        for k in range(len(self.directions)):
            self._read_states(k, self._carry_parts(k), -1, carry.reshape(-1))

    def state_grad(self) -> Array:
        """Return the gradients in the initial states."""
        states = self._states_of_caller("state")
        for k in range(len(self.directions)):
            self._write_states(k, self._carry_parts(k), -1, states)
        return states

    def input_grad(self) -> Array:
        """Return a new array for the gradients in the input."""
        return self.calls.result("input", (self.steps, self.batch, self.widths[0]), self.dtype)

    def below(self, k: int) -> Array:
        """Return the array for the gradients in the input of the layer of a direction."""
        layer = self.directions[k].layer - 1
        shape = self.steps, self.batch, self.widths[layer]
        below: Array = self._grads[layer % len(self._grads)][: math.prod(shape)].reshape(shape)
        return below

    def back(
        self, ks: range, weights: list[_Weights], above: Array, below: Array | None
    ) -> list[dict[str, Array]]:
        """Return the gradients in the parameters of each direction of a layer.

        `above` holds the gradients in its outputs, and `below` gets those in its inputs. If samples
        are kept apart, it is the factors whose products would be summed up that are returned.
        """
        parts = self._input_parts(below)
        lots = 1 if self._keeps_samples else -(-self.padded // self.lot)
        sums = {k: self.directions[k].zeros(self.calls, lots) for k in ks}
        for start in reversed(range(0, self.steps, self.segment)) if self.batch else ():
            span = start, min(start + self.segment, self.steps)
            self.for_each_group(ks, _back, weights, sums, above, parts, span)
            if not self._keeps_samples:
                self._sum_up(ks, sums, span)
        for part in parts[1:]:
            self._for_steps(partial(self._add_steps, parts[0], part))
        if self._keeps_samples:
            return [self._factors(k) for k in ks]
        return [self.directions[k].param_grads(self.calls, k, sums[k]) for k in ks]

    def _factors(self, k: int) -> dict[str, Array]:
        """Return what the gradients of the parameters of a direction are sums of products of.

        Of each step and sample they are the gradients in the ``products``, the ``state`` before the
        step and, above the first layer, the ``input``.
        """
        one, samples = self.directions[k], self._all_samples(k)
        factors = {
            name: self.calls.result(f"{name} {k}", (self.steps, self.batch, width), self.dtype)
            for name, width in (("products", one.products), ("state", one.units))
        }
        gates, _ = self._terms(k, (0, self.steps), 0)
        about = samples, gates, one.products, factors["products"].reshape(-1)
        self._for_steps(partial(self.calls.launch, callers.products_out, *about))
        own, out = self.plane_of(self.states, one), factors["state"].reshape(-1)
        where = 2 * one.back, 2 * one.back + self.steps
        self.calls.launch(callers.turn_out, own, samples, *where, out, one.units, 0)
        if one.layer > 1:
            width = self.widths[one.layer - 1]
            shape = self.steps, self.batch, width
            factors["input"] = self.calls.result(f"input {k}", shape, self.dtype)
            for below in self.directions:
                if below.layer == one.layer - 1:
                    states, column = self.plane_of(self.states, below), below.back * self.units
                    into = 1, self.steps + 1, factors["input"].reshape(-1), width, column
                    self.calls.launch(callers.turn_out, states, samples, *into)
        return factors

    def _add_steps(self, total: Array, part: Array, start: int, stop: int) -> None:
        """Add some steps of an array to those of another."""
        row = math.prod(total.shape[1:])
        flat = total.reshape(-1), part.reshape(-1)
        self.calls.launch(add_range, *flat, start * row, stop * row)

    def _sum_up(self, ks: range, sums: dict[int, _Sums], span: tuple[int, int]) -> None:
        """Add the gradients of the parameters over some steps that the backward pass has not."""
        tasks: list[Callable[[], None]] = []
        for k in ks:
            one, lanes = self.directions[k], self.lanes
            vectors = -(-one.products // lanes)
            parts = even_slices(vectors, min(vectors, 2 * self.threads))
            for part in () if self.has_sample_lanes else parts:
                rows = part.start * lanes, min(part.stop * lanes, one.products)
                tasks.append(partial(self.add_grads, k, sums[k], rows, span))
            for which, packing in enumerate(one.packings):
                for row in range(0, packing.rows, _TASK_ROWS) if packing.is_sparse else ():
                    rows = row, min(row + _TASK_ROWS, packing.rows)
                    tasks.append(partial(self.add_sparse_grads, k, which, sums[k], rows, span))
        if tasks:
            self.call_all(tasks)

    def _input_parts(self, below: Array | None) -> list[Array]:
        """Return an array for each direction, whose sum `below` will be; it is the first."""
        if below is None:
            return []
        return [below, *(part[: below.size].reshape(below.shape) for part in self._parts)]

    def times(self, one: _Direction, span: tuple[int, int]) -> int:
        """Return the first in time of some steps, which are given in the order of a direction."""
        return self.steps - span[1] if one.back else span[0]

    def first_gates(self, one: _Direction, span: tuple[int, int]) -> int:
        """Return the step whose gates come first while some steps are worked on."""
        return 0 if self.keeps_gates else self.times(one, span)

    def _terms(
        self, k: int, span: tuple[int, int], first: int
    ) -> tuple[Gates, list[tuple[Array, int]]]:
        """Return what gradients of a direction are products of, over some steps.

        The gates from row `first` on; and of the inputs and of the states before the array, and
        where those of the first step begin.
        """
        one = self.directions[k]
        t = self.times(one, span)
        gates = Gates(
            *(self.gates[k], self.segment, one.kept, one.units, self.group),
            *(t - self.first_gates(one, span), first // one.units, self.has_grads[k]),
        )
        slot = self.group if self.has_sample_lanes else self.padded
        return gates, [
            (self.states[one.layer - 1], (t + 1) * slot * one.in_packing.block),
            (self.plane_of(self.states, one), (t + 2 * one.back) * slot * one.units),
        ]

    def grad_step(self, one: _Direction) -> int:
        """Return the numbers from a step's gradients in products to the next's.

        They are kept for a block of steps; 0 if for all, in the place of the gates.
        """
        is_sparse = any(packing.is_sparse for packing in one.packings)
        if not self.has_sample_lanes or is_sparse or self._keeps_samples:
            return 0
        # No power of two, which caches are slow at.
        return (-(-one.kept * one.units // SUM_ROWS) * SUM_ROWS + 2) * self.group

    def _has_gates(self, one: _Direction) -> bool:
        """Return whether there are gates, or gradients in their place."""
        return one.cell._writes_gates or self.grad_step(one) == 0

    def sums(self, one: _Direction, sums: _Sums) -> Sums:
        """Return the sums that the backward pass adds up where samples are lanes."""
        (x_out, x_rows), (h_out, h_rows) = sums
        x_cols, h_cols = (0 if each.is_sparse else each.cols for each in one.packings)
        return Sums(
            one.products if one.is_dense and not self._keeps_samples else 0,
            *(one.in_packing.stride, x_cols, one.in_packing.rows, h_cols),
            *(one.first_hidden, self.lot),
            *(x_out, h_out, x_rows if x_cols else h_rows, self._ones),
        )

    def add_grads(self, k: int, sums: _Sums, rows: tuple[int, int], span: tuple[int, int]) -> None:
        """Add gradients over some steps to rows of the sums of a direction."""
        one, terms = self.directions[k], max(self.batch, kernels.BLOCK)
        gates, ((x, x_at), (h, h_at)) = self._terms(k, span, 0)
        (x_out, row_sums), (h_out, _) = sums
        count = ((terms + TILE_ROWS + 1) * TILE_VECTORS + 1) * self.lanes
        room = self.calls.borrow(count, self.dtype)
        self.calls.launch(fill_with, room[: TILE_VECTORS * self.lanes], 0)
        self.calls.launch(
            kernels.sum_products,
            *(gates, x, x_at, one.in_packing.cols, one.in_packing.block, self.plane),
            *(one.in_packing.rows, x_out),
            *(h, h_at, one.hidden_packing.cols, one.first_hidden, h_out),
            row_sums,
            *(self.batch, span[1] - span[0], room, *rows),
        )
        self.calls.give_back(room)

    def add_sparse_grads(
        self, k: int, which: int, sums: _Sums, rows: tuple[int, int], span: tuple[int, int]
    ) -> None:
        """Add gradients over some steps to rows of one of the sums of a direction."""
        packing = self.directions[k].packings[which]
        gates, factors = self._terms(k, span, packing.first)
        entries, row_sums = sums[which]
        stride = max(self.padded, kernels.BLOCK) + 2 * self.lanes
        room = self.calls.borrow((rows[1] - rows[0] + packing.cols) * stride, self.dtype)
        self.calls.launch(
            kernels.sum_sparse_products,
            *(gates, *factors[which], packing.cols, packing.block, self.plane),
            *(self.steps + 2, self.padded, span[1] - span[0]),
            *(packing.indptr, packing.indices, room),
            *(entries, row_sums[packing.first :], *rows),
        )
        self.calls.give_back(room)


class _Group:
    """Some neighbouring samples, with which one thread at a time works."""

    def __init__(
        self, memory: _Memory, first: int, samples: int, own: dict[str, Iterator[Array]]
    ) -> None:
        self.memory, self.first, self.samples = memory, first, samples
        self._scratch = [tuple(map(next, own.values())) for _ in memory.directions]

    def sequence(self, k: int, span: tuple[int, int]) -> Sequence:
        """Return a direction for the kernels, with the gates of some steps."""
        memory, one = self.memory, self.memory.directions[k]
        products, parts, block = self._scratch[k]
        step = memory.grad_step(one)
        return Sequence(
            memory.steps,
            one.back,
            one.units,
            memory.padded,
            memory.batch,
            self.first,
            self.samples,
            max(1, min(self.samples, memory.group)),
            memory.has_sample_lanes,
            one.sample_rows == 2,
            memory.lengths,
            memory.plane_of(memory.states, one),
            memory.widths[one.layer],
            one.in_packing.cols,
            one.in_packing.block,
            memory.plane,
            memory.plane_of(memory.cells, one) if one.cell._parts == 2 else memory.cells[0],
            memory.gates[k],
            memory.segment,
            memory.first_gates(one, span),
            one.kept,
            block if step else memory.gates[k],
            step,
            memory.has_grads[k],
            products,
            one.stride,
            parts,
            memory.zeros,
        )
