"""TrainingStep: a recurrent network forward and backward, in compiled whole-sequence kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import check_memory, read_array
from ..errors import Allocating, DeviceError, InputError, InputTypeError, MemoryLimitError, short
from ..execution.threads import share
from ..formatting import exact_bytes, format_bytes
from ._cell import Cell
from ._kernels import sequences as kernels
from ._kernels.lanes import lanes as lanes_of
from ._kernels.sequences import ROWS, Matrix, Rows, Sequence
from ._sharing import quiet

__all__ = ["Gradients", "TrainingStep"]

Array = NDArray[Any]

_LINE = 64  # bytes of a cache line, which no vector crosses
_MORE = 16  # rows behind those of an array: kernels read some at once
_SPARSE = 0.25  # share of the weights that are kept, below which only those are stored
_SEGMENT = 256  # steps whose gates are computed at once where those of all are not kept
_TASK_ROWS = 64  # rows of a weight whose gradient is a task: a multiple of eight
_TASK_STEPS = 256  # steps whose gradients in the input are a task


class Network(Protocol):
    """What a training step takes of a :class:`Recurrent`."""

    cells: tuple[tuple[Cell, ...], ...]
    input_size: int
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

    Parameters
    ----------
    network : Recurrent
        The network. Its parameters are read by each :meth:`forward`.
    memory_limit : int, optional
        Bytes to take, beside the caller's arrays; by default what the machine has.

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

    def __init__(self, network: Network, memory_limit: int | None = None) -> None:
        self.network, self.memory_limit = network, memory_limit
        width = len(network.cells[0])
        self._directions = [
            _Direction(cell, layer, back)
            for layer, cells in enumerate(network.cells, start=1)
            for back, cell in enumerate(cells)
        ]
        self._layers = [range(k, k + width) for k in range(0, len(self._directions), width)]
        self._memory: _Memory | None = None
        self._weights: list[_Weights] | None = None
        self._is_batched = True

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def keeps_gates(self) -> bool:
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

    @Allocating("a training step")
    @quiet
    def forward(
        self, x: ArrayLike, state: ArrayLike | None = None, lengths: ArrayLike | None = None
    ) -> tuple[Array, Array]:
        """Compute the outputs and the last states.

        Parameters
        ----------
        x : array_like of float32 or float64, shape (T, batch, input_size) or (T, input_size)
            The inputs.
        state : array_like, shape (layers · directions, [batch,] state_size), optional
            The initial states, by default zeros: layer by layer, and in each forward in time before
            backward. That of an LSTM is ``[h, c]``.
        lengths : array_like of int, shape (batch,), optional
            How many steps each sample has, from 0 to T; by default all have T.

        Returns
        -------
        output : ndarray, shape (T, [batch,] directions · hidden_size)
            The outputs ``h_t`` of the last layer, 0 in steps that a sample does not have.
        state : ndarray, shape (layers · directions, [batch,] state_size)
            The states after the last step of each sample.

        Raises
        ------
        InputError, InputTypeError
            If a shape, a dtype or a length is wrong.
        DeviceError
            If an array, or a parameter, is on a GPU.
        MemoryLimitError
            If the states take more memory than `memory_limit`, or than there is.
        """
        self._weights = None
        x, state, lengths = self._read(x, state, lengths)
        steps, batch, _ = x.shape
        memory = self._memory
        if memory is None or (memory.steps, memory.batch, memory.dtype) != (steps, batch, x.dtype):
            self._memory = None  # before there is another
            memory = self._memory = self._allocate(steps, batch, x.dtype)
        weights = [one.weights(x.dtype) for one in self._directions]
        groups = memory.groups
        share(lambda i: groups[i].read(x, state, lengths), len(groups))
        for ks in self._layers:
            for start in range(0, steps, memory.segment):
                span = start, min(start + memory.segment, steps)
                _for_each(groups, ks, self._run, weights, span)
        output = np.empty((steps, batch, memory.widths[-1]), x.dtype)
        last = np.empty(state.shape, x.dtype)
        share(lambda i: groups[i].write(output, last), len(groups))
        self._weights = weights
        return self._as_given(output), self._as_given(last)

    def _run(
        self, group: _Group, k: int, all_weights: list[_Weights], span: tuple[int, int]
    ) -> None:
        """Compute some states of one direction, in its order, and their gates."""
        one, weights = self._directions[k], all_weights[k]
        one.cell._run_kernel(
            group.sequence(one, k, span),
            weights.w_in,
            weights.w_hidden,
            weights.bias,
            group.states[one.layer - 1],
            group.scratch[k],
            one.is_relu,
            *span,
        )

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
            If a shape or a dtype is wrong, or an array on a GPU; or if there was no forward pass,
            or another backward pass, which has used what was kept.
        """
        memory, weights = self._memory, self._weights
        if memory is None or weights is None:
            raise InputError("backward was called without a forward pass before it")
        above, carry = self._read_grads(memory, grad_output, grad_state)
        self._weights = None
        groups, steps = memory.groups, memory.steps
        sums = [one.zeros() for one in self._directions]
        share(lambda i: groups[i].read_grads(above, carry), len(groups))
        copies = 1
        for ks in reversed(self._layers):
            for start in reversed(range(0, steps, memory.segment)):
                span = start, min(start + memory.segment, steps)
                _for_each(groups, ks, self._back, weights, span, copies)
                self._sum_up(groups, ks, sums, span)
                if ks.start > 0 or needs_input_grad:
                    self._back_to_input(groups, ks, weights, span)
            copies = len(ks)
            for group in groups:
                group.above, group.below = group.below, group.above
        input_grad = None
        if needs_input_grad:
            input_grad = np.empty((steps, memory.batch, memory.widths[0]), memory.dtype)
            share(lambda i: groups[i].write_input_grad(input_grad, copies), len(groups))
        state_grad = np.empty(carry.shape, carry.dtype)
        share(lambda i: groups[i].write_state_grad(state_grad), len(groups))
        params: dict[str, Array] = {}
        for one, each in zip(self._directions, sums, strict=True):
            for name, grad in one.param_grads(each, memory.dtype).items():
                params[self.network.name_of(name, one.layer - 1, one.back)] = grad
        return Gradients(
            None if input_grad is None else self._as_given(input_grad),
            self._as_given(state_grad),
            params,
        )

    def _back(
        self,
        group: _Group,
        k: int,
        all_weights: list[_Weights],
        span: tuple[int, int],
        copies: int,
    ) -> None:
        """Compute the gradients in the products of some steps of one direction."""
        one, weights = self._directions[k], all_weights[k]
        if one.cell._writes_gates and not group.memory.keeps_gates:
            self._run(group, k, all_weights, span)
        carry = group.carries[k]
        one.cell._back_kernel(
            group.sequence(one, k, span),
            weights.w_back,
            group.part(group.above, one.layer, copies),
            copies,
            carry[0],
            carry[-1],
            one.is_relu,
            *span,
        )

    def _sum_up(
        self, groups: list[_Group], ks: range, sums: list[_Sums], span: tuple[int, int]
    ) -> None:
        """Add the gradients of the parameters over some steps; each task has rows of its own."""
        tasks = [
            (k, which, row)
            for k in ks
            for which, packing in enumerate(self._directions[k].packings)
            for row in range(0, packing.rows, _TASK_ROWS)
        ]

        def add(i: int) -> None:
            k, which, row = tasks[i]
            for group in groups:
                group.add_grads(self._directions[k], k, which, sums[k], row, span)

        share(add, len(tasks))

    def _back_to_input(
        self, groups: list[_Group], ks: range, weights: list[_Weights], span: tuple[int, int]
    ) -> None:
        """Compute the gradients in the inputs of some steps, of each direction in a part."""
        tasks = list(product(groups, ks, range(*span, _TASK_STEPS)))

        def multiply(i: int) -> None:
            group, k, start = tasks[i]
            some = start, min(start + _TASK_STEPS, span[1])
            group.back_to_input(self._directions[k], k, weights[k], span, some)

        share(multiply, len(tasks))

    # -- Input ------------------------------------------------------------------------------------

    def _allocate(self, steps: int, batch: int, dtype: np.dtype[Any]) -> _Memory:
        """Return memory that keeps the gates of all steps if the limit allows."""
        for segment in dict.fromkeys((max(steps, 1), max(1, min(steps, _SEGMENT)))):
            memory = _Memory(self.network, self._directions, steps, batch, dtype, segment)
            if self.memory_limit is None or memory.nbytes <= self.memory_limit:
                break
        if self.memory_limit is not None and memory.nbytes > self.memory_limit:
            raise MemoryLimitError(
                f"memory_limit is {exact_bytes(self.memory_limit)}; {steps} steps of {batch} "
                f"samples need {exact_bytes(memory.nbytes)}"
            )
        check_memory(f"{steps} steps of {batch} samples", memory.nbytes)
        memory.allocate()
        return memory

    def _read(self, x: Any, state: Any, lengths: Any) -> tuple[Array, Array, NDArray[np.int64]]:
        """Return the input with an axis of samples, the states in its dtype, and the lengths."""
        net = self.network
        x = _on_host("x", x)
        if x.ndim not in (2, 3) or x.shape[-1] != net.input_size:
            raise InputError(
                f"x has shape {x.shape}; expected (T, batch, {net.input_size}) or "
                f"(T, {net.input_size})"
            )
        self._is_batched = x.ndim == 3
        params = [_on_host(name, array) for name, array in net.params.items()]
        steps, batch = x.shape[0], x.shape[1] if x.ndim == 3 else 1
        lead = (len(self._directions), *x.shape[1:-1])
        expected = (*lead, net.state_size)
        state = None if state is None else _on_host("state", state)
        if state is not None and state.shape != expected:
            raise InputError(
                f"state has shape {state.shape}; expected {expected}, as x has shape {x.shape}"
            )
        dtype = np.result_type(x, *params, *([] if state is None else [state]))
        inner = (len(self._directions), batch, net.state_size)
        state = np.zeros(inner, dtype) if state is None else state.reshape(inner)
        x = np.ascontiguousarray(x.reshape(steps, batch, net.input_size), dtype)
        return x, np.ascontiguousarray(state, dtype), _read_lengths(lengths, steps, batch)

    def _read_grads(self, memory: _Memory, output: Any, state: Any) -> tuple[Array, Array]:
        """Return the gradients in both results of the forward pass, with an axis of samples."""
        checked = []
        for name, grad, shape in (
            ("grad_output", output, (memory.steps, memory.batch, memory.widths[-1])),
            ("grad_state", state, (len(self._directions), memory.batch, self.network.state_size)),
        ):
            if grad is None:
                checked.append(np.zeros(shape, memory.dtype))
                continue
            array = _on_host(name, grad)
            expected = shape if self._is_batched else (shape[0], shape[2])
            if array.shape != expected:
                raise InputError(f"{name} has shape {array.shape}; expected {expected}")
            checked.append(np.ascontiguousarray(array.reshape(shape), memory.dtype))
        return checked[0], checked[1]

    def _as_given(self, array: Array) -> Array:
        """Return a result with an axis of samples if the input had one."""
        return array if self._is_batched else array[:, 0]


def _for_each(groups: list[_Group], ks: range, call: Callable[..., None], *arguments: Any) -> None:
    """Call a function for each group of samples and each direction of a layer."""
    tasks = list(product(groups, ks))
    share(lambda i: call(*tasks[i], *arguments), len(tasks))


def _on_host(name: str, array: Any) -> Array:
    checked = read_array(name, array)
    if type(checked) is not np.ndarray:
        raise DeviceError(f"{name} is on a GPU; expected an array of NumPy, as training steps take")
    return checked


def _read_lengths(lengths: Any, steps: int, batch: int) -> NDArray[np.int64]:
    if lengths is None:
        return np.full(batch, steps)
    try:
        array = np.array(lengths)
    except Exception:  # a caller's own class may raise any
        array = np.empty(0, object)
    if array.dtype.kind not in "iu":
        raise InputTypeError(f"lengths is {short(lengths)}; expected integers")
    if array.shape != (batch,):
        raise InputError(f"lengths has shape {array.shape}; expected {(batch,)}, one for a sample")
    if batch and not (array.min() >= 0 and array.max() <= steps):
        raise InputError(f"lengths is {short(lengths)}; expected integers from 0 to {steps}")
    return array.astype(np.int64)


# -- Weights --------------------------------------------------------------------------------------


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
    """

    def __init__(self, places: NDArray[np.int64], kept: NDArray[np.bool_]) -> None:
        self.rows, self.cols = places.shape
        self.is_sparse = np.count_nonzero(kept) < _SPARSE * kept.size
        if self.is_sparse:
            self.order = places[kept]
            self.indices = np.nonzero(kept)[1]
            self.indptr = np.concatenate([[0], kept.sum(axis=1).cumsum()])
            return
        # Where an entry is pruned, or fills up eight rows, a zero behind the weight.
        blocks = -(-self.rows // ROWS)
        order = np.full((blocks * ROWS, self.cols), places.size)
        order[: self.rows] = np.where(kept, places, places.size)
        self.order = order.reshape(blocks, ROWS, self.cols).transpose(0, 2, 1).reshape(-1)
        self.indices = self.indptr = np.zeros(0, np.int64)
        # Where the sum of each entry of the weight is.
        sums = np.arange(self.cols * blocks * ROWS).reshape(self.cols, -1)[:, : self.rows].T
        self._sums = sums.reshape(-1)[np.argsort(places.reshape(-1))]
        self._pruned = places[~kept]

    def matrix(self, values: Array) -> Matrix:
        """Return the matrix of values that are in this order."""
        return Matrix(self.rows, self.cols, values, self.indices, self.indptr)

    def zeros(self) -> tuple[Array, Array]:
        """Return what the sums of gradients of the entries, and of the rows, begin with."""
        rows = -(-self.rows // ROWS) * ROWS
        entries = np.zeros(len(self.order) if self.is_sparse else (self.cols, rows))
        return entries, np.zeros(rows)

    def unpack(self, sums: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the gradient of the weight from the sums, 0 where it is pruned."""
        if self.is_sparse:
            grad = np.zeros(math.prod(shape), dtype)
            grad[self.order] = sums
        else:
            grad = sums.reshape(-1).take(self._sums).astype(dtype)
            grad[self._pruned] = 0
        return grad.reshape(shape)


class _Weights(NamedTuple):
    """The parameters of a cell, as kernels multiply by them."""

    w_in: Matrix
    w_hidden: Matrix
    bias: Array
    w_in_back: Matrix
    w_back: Matrix


# Sums over steps and samples, for the weights of input and state: of their entries and rows.
_Sums = tuple[tuple[Array, Array], tuple[Array, Array]]


class _Direction:
    """One direction of one layer: a cell, and how its weights are packed."""

    def __init__(self, cell: Cell, layer: int, back: int) -> None:
        self.cell, self.layer, self.back = cell, layer, back
        self.is_relu = getattr(cell, "nonlinearity", None) == "relu"
        self.units = cell.hidden_size
        self.products = (max(cell._hh) + 1) * self.units
        self.gates = cell._kept_gates * self.units
        # The products that read the input come first, and those that read the state last.
        gates = np.arange(len(cell._ih))
        self.in_packing, self._in_back = self._packings("weight_ih", np.argsort(cell._ih))
        self.hidden_packing, self._hidden_back = self._packings("weight_hh", gates)
        self.first_hidden = self.products - self.hidden_packing.rows
        self.packings = self.in_packing, self.hidden_packing
        self._order = self._whole_order()

    def _packings(self, name: str, order: NDArray[np.int64]) -> tuple[_Packing, _Packing]:
        shape, mask = self.cell._shapes[name], self.cell._masks[name]
        places = np.arange(math.prod(shape)).reshape(len(order), self.units, shape[1])
        places = places[order].reshape(shape)
        kept = np.ones(shape, bool) if mask is None else mask.on(np)
        kept = kept.reshape(-1)[places]
        return _Packing(places, kept), _Packing(places.T, kept.T)

    def _whole_order(self) -> list[NDArray[np.int64]]:
        """Return where all that kernels read is among the parameters, which a zero ends."""
        sizes = [math.prod(self.cell._shapes[name]) for name in ("weight_ih", "weight_hh")]
        biases = [np.full((self.products // self.units, self.units), -1) for _ in range(2)]
        end = sum(sizes)
        if self.cell.bias:
            for bias, places in zip(biases, (self.cell._ih, self.cell._hh), strict=True):
                count = len(places) * self.units
                bias[list(places)] = np.arange(end, end + count).reshape(-1, self.units)
                end += count
        starts, parts = (0, sizes[0]), []
        for packings in (self.packings, (self._in_back, self._hidden_back)):
            for packing, start, size in zip(packings, starts, sizes, strict=True):
                parts.append(np.where(packing.order == size, end, packing.order + start))
        # Rows that are read and not used.
        return parts + [np.append(np.where(b < 0, end, b), np.full(ROWS, end)) for b in biases]

    def weights(self, dtype: np.dtype[Any]) -> _Weights:
        """Return a copy of the parameters."""
        params = [self.cell.read_parameter(name).reshape(-1) for name in self.cell.parameter_names]
        every = np.concatenate([*params, np.zeros(1, dtype)], dtype=dtype)
        w_in, w_hidden, w_in_back, w_back, *biases = map(every.take, self._order)
        return _Weights(
            self.in_packing.matrix(w_in),
            self.hidden_packing.matrix(w_hidden),
            np.add(*biases),
            self._in_back.matrix(w_in_back),
            self._hidden_back.matrix(w_back),
        )

    def zeros(self) -> _Sums:
        """Return what sums of gradients of the parameters begin with."""
        return self.in_packing.zeros(), self.hidden_packing.zeros()

    def param_grads(self, sums: _Sums, dtype: np.dtype[Any]) -> dict[str, Array]:
        """Return the gradients of the parameters by their names."""
        cell = self.cell
        grads = {}
        for name, packing, (entries, rows) in zip(("ih", "hh"), self.packings, sums, strict=True):
            weight = f"weight_{name}"
            grads[weight] = packing.unpack(entries, cell._shapes[weight], dtype)
            grads[f"bias_{name}"] = rows[: packing.rows].astype(dtype)
        products = grads["bias_ih"].reshape(-1, self.units)
        grads["bias_ih"] = products[list(cell._ih)].reshape(-1)
        return {name: grads[name] for name in cell._shapes}


# -- Memory ---------------------------------------------------------------------------------------


class _Memory:
    """What is kept of all samples, group by group."""

    def __init__(
        self,
        network: Network,
        directions: list[_Direction],
        steps: int,
        batch: int,
        dtype: np.dtype[Any],
        segment: int,
    ) -> None:
        self.directions, self._per_layer = directions, len(network.cells[0])
        self.steps, self.batch, self.dtype, self.segment = steps, batch, dtype, segment
        self.keeps_gates = segment >= steps
        self.lanes = lanes_of(dtype)
        self.widths = [network.input_size, *(len(c) * c[0].hidden_size for c in network.cells)]
        self.groups: list[_Group] = []
        rows = [count for _, count in self.rows()]
        size = dtype.itemsize * self.lanes
        self.nbytes = -(-batch // self.lanes) * sum(size * (n + _MORE) + 2 * _LINE for n in rows)

    def rows(self) -> list[tuple[str, int]]:
        """Return, for each array of a group, what it holds, and how many rows of lanes."""
        slots, per_layer = self.steps + 2, self._per_layer
        has_cells = self.directions[0].cell._parts == 2
        rows = [("states", slots * width) for width in self.widths]
        rows += [("cells", slots * width if has_cells else 0) for width in self.widths]
        gates = [self.segment * one.gates for one in self.directions]
        if self.keeps_gates:
            rows += [("gates", count) for count in gates]
        else:
            rows += [("gates", max(gates))] * per_layer  # layers take turns
        rows += [("scratch", one.products) for one in self.directions]
        for one in self.directions:
            rows += [("carries", one.units)] * one.cell._parts
        # In the outputs of a layer, and in its input, in a part for each direction.
        rows += [("grads", per_layer * slots * max(self.widths))] * 2
        return rows

    def allocate(self) -> None:
        """Take the memory."""
        self.groups = [_Group(self, first) for first in range(0, self.batch, self.lanes)]


class _Group:
    """The memory of one group of samples, which are the lanes of its vectors.

    Of each layer, and of the input, the numbers of a step are neighbours; there is a slot for them
    before the first step, and one behind the last.
    """

    def __init__(self, memory: _Memory, first: int) -> None:
        self.memory, self.first = memory, first
        self.lengths = np.zeros(memory.lanes, memory.dtype)
        self._always = np.ones(memory.lanes, memory.dtype)
        arrays: dict[str, list[Array]] = {}
        for name, rows in memory.rows():
            arrays.setdefault(name, []).append(self._aligned(rows))
        self.states, self.cells, self.scratch = arrays["states"], arrays["cells"], arrays["scratch"]
        gates, carries = arrays["gates"], iter(arrays["carries"])
        self.gates = [gates[k % len(gates)] for k in range(len(memory.directions))]
        self.carries = [
            [next(carries) for _ in range(one.cell._parts)] for one in memory.directions
        ]
        self.above, self.below = arrays["grads"]

    def _aligned(self, rows: int) -> Array:
        """Return rows that begin with a cache line, and some more, which are read and not used."""
        itemsize = self.memory.dtype.itemsize
        count = (rows + _MORE) * self.memory.lanes
        room = np.zeros(count + _LINE // itemsize, self.memory.dtype)
        start = -room.ctypes.data % _LINE // itemsize
        return room[start : start + count]

    def _at(self, layer: int, slot: int, row: int = 0) -> int:
        """Return where a row of a slot of a layer begins; layer 0 is the input."""
        return (slot * self.memory.widths[layer] + row) * self.memory.lanes

    def part(self, array: Array, layer: int, copies: int) -> Array:
        """Return the beginning of an array: so many times all slots of a layer."""
        return array[: copies * self._at(layer, self.memory.steps + 2)]

    def sequence(self, one: _Direction, k: int, span: tuple[int, int]) -> Sequence:
        """Return a direction for the kernels, with the gates of some steps."""
        memory = self.memory
        return Sequence(
            memory.steps,
            one.back,
            one.units,
            one.products,
            self.lengths,
            self.states[one.layer],
            memory.widths[one.layer],
            one.back * one.units,
            self.cells[one.layer],
            self.gates[k],
            self._first_gates(one, span),
            one.gates * memory.lanes,
        )

    def _times(self, one: _Direction, span: tuple[int, int]) -> int:
        """Return the first in time of some steps, which are given in the order of a direction."""
        return self.memory.steps - span[1] if one.back else span[0]

    def _first_gates(self, one: _Direction, span: tuple[int, int]) -> int:
        """Return the step whose gates come first while some steps are worked on."""
        return 0 if self.memory.keeps_gates else self._times(one, span)

    # -- Between the caller's arrays and lanes ----------------------------------------------------

    def read(self, x: Array, state: Array, lengths: NDArray[np.int64]) -> None:
        """Take over inputs, initial states and lengths."""
        some = lengths[self.first : self.first + self.memory.lanes]
        self.lengths[:] = 0
        self.lengths[: len(some)] = some
        size = self._at(0, 1)
        kernels.pack(self._rows(x), self.states[0], size, size)
        for k, one in enumerate(self.memory.directions):
            at = self._at(one.layer, (self.memory.steps + 1) * one.back, one.back * one.units)
            for part, arrays in enumerate([self.states, self.cells][: one.cell._parts]):
                kernels.pack(self._part_rows(state, k, part), arrays[one.layer], at, 0)

    def read_grads(self, above: Array, carry: Array) -> None:
        """Take over the gradients in outputs and last states."""
        size = self._at(len(self.memory.widths) - 1, 1)
        kernels.pack(self._rows(above), self.above, size, size)
        for k, carries in enumerate(self.carries):
            for part, array in enumerate(carries):
                kernels.pack(self._part_rows(carry, k, part), array, 0, 0)

    def write(self, output: Array, state: Array) -> None:
        """Write outputs and last states."""
        top = len(self.memory.widths) - 1
        size = self._at(top, 1)
        kernels.unpack(self.states[top], size, size, self.lengths, self._rows(output))
        for k, one in enumerate(self.memory.directions):
            slot = 1 if one.back else self.memory.steps
            at = self._at(one.layer, slot, one.back * one.units)
            for part, arrays in enumerate([self.states, self.cells][: one.cell._parts]):
                rows = self._part_rows(state, k, part)
                kernels.unpack(arrays[one.layer], at, 0, self._always, rows)

    def write_input_grad(self, grad: Array, copies: int) -> None:
        """Write the gradients in the inputs, which are in some parts."""
        size = self._at(0, 1)
        whole, *others = self.part(self.above, 0, copies).reshape(copies, -1)
        for other in others:
            whole += other
        kernels.unpack(whole, size, size, self.lengths, self._rows(grad))

    def write_state_grad(self, grad: Array) -> None:
        """Write the gradients in the initial states."""
        for k, carries in enumerate(self.carries):
            for part, array in enumerate(carries):
                kernels.unpack(array, 0, 0, self._always, self._part_rows(grad, k, part))

    def _part_rows(self, state: Array, k: int, part: int) -> Rows:
        """Return these samples of the states of a direction: ``h``, or ``c`` of an LSTM."""
        units = self.memory.directions[k].units
        return self._rows(state[k : k + 1], part * units, units)

    def _rows(self, array: Array, column: int = 0, size: int | None = None) -> Rows:
        """Return these samples of an array ``(steps, batch, width)``, of some columns or all."""
        steps, batch, width = array.shape
        size = width if size is None else size
        return Rows(array.reshape(-1), steps, batch, width, self.first, column, size)

    # -- Gradients --------------------------------------------------------------------------------

    def add_grads(
        self, one: _Direction, k: int, which: int, sums: _Sums, row: int, span: tuple[int, int]
    ) -> None:
        """Add gradients over some steps to rows of one of the sums."""
        lanes, packing = self.memory.lanes, one.packings[which]
        t, step = self._times(one, span), one.gates * lanes
        at = (t - self._first_gates(one, span)) * step
        if which == 0:
            below = one.layer - 1
            b = self.states[below], self._at(below, t + 1), self._at(below, 1)
        else:
            at += one.first_hidden * lanes
            before = self._at(one.layer, t + 2 * one.back, one.back * one.units)
            b = self.states[one.layer], before, self._at(one.layer, 1)
        vectors = self.gates[k], at, step, *b, span[1] - span[0]
        rows = *sums[which], row, min(row + _TASK_ROWS, packing.rows)
        if packing.is_sparse:
            kernels.sum_sparse_products(*vectors, packing.indptr, packing.indices, *rows)
        else:
            kernels.sum_products(*vectors, packing.cols, *rows)

    def back_to_input(
        self,
        one: _Direction,
        k: int,
        weights: _Weights,
        span: tuple[int, int],
        some: tuple[int, int],
    ) -> None:
        """Write the gradients in the inputs of some of the steps in the gates."""
        layer, step = one.layer - 1, one.gates * self.memory.lanes
        t = self._times(one, some)
        kernels.multiply_steps(
            weights.w_in_back,
            self.gates[k],
            (t - self._first_gates(one, span)) * step,
            step,
            self.below,
            one.back * self._at(layer, self.memory.steps + 2) + self._at(layer, t + 1),
            self._at(layer, 1),
            some[1] - some[0],
        )
