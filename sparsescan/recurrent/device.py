"""Memory and kernels of a recurrent training step on a GPU, in CuPy arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arrays.addresses import kernel_address
from ..arrays.arrays import Mirrored, device_of, is_same_stream, load_cupy
from ..arrays.cuda import current
from ..arrays.streams import place
from ..errors import InputError
from ..execution.cuda.chunks import multiprocessors_of
from ..formatting import format_bytes
from ..graph.operations import Reduction
from ..kernels.cuda import device as _device
from ..parameters.parametrised import masked
from .definition import CellLike, bias_name, declared
from .heads import parts_of, whole_of
from .loops.cuda.kernels import SequenceKernels, sequence_kernels
from .loops.cuda.layout import LoopLayout, layout_of, packing_order, samples_of
from .loops.cuda.parts import sequence_source
from .memory import Memory, beside, has_reset_states
from .program import CellProgram, Term
from .render.cuda import cuda_program

Array = Any  # cupy.ndarray
Shape = tuple[int, ...]
Span = tuple[int, int]
Places = NDArray[np.int64]


def fits(program: CellProgram, units: int, dtype: DTypeLike) -> bool:
    """Return whether kernels exist: they need vectors that fit the shared memory of a block.

    There are none yet for maxima over several units, nor for further inputs.
    """
    if _has_maximum(program) or program.further_grads:
        return False
    code, exact = cuda_program(program), np.dtype(dtype)
    layout, most = layout_of(len(code.blocks), units, exact), multiprocessors_of(load_cupy()).block
    return samples_of(code, layout, exact, 1, 1, 1, most) > 0


def source_of(cell: CellLike, dtype: DTypeLike, *, is_backward: bool) -> str:
    """Return the text of the device functions of a cell, for one sample of a block."""
    if cell.program.further_grads:
        raise InputError(f"{cell!r} has further inputs, which kernels of a GPU do not read yet")
    _check_maximum(cell, "target is 'cuda'", "another target")
    code, exact = cuda_program(cell.program), np.dtype(dtype)
    layout = layout_of(len(code.blocks), cell.hidden_size, exact)
    return sequence_source(code, layout, exact, 1, back=is_backward)


def _has_maximum(program: CellProgram) -> bool:
    return not all(each.is_linear for each in program.reductions)


def _check_maximum(cell: CellLike, given: str, expected: str) -> None:
    """Raise if a cell has a maximum over units, which only kernels in host memory compute."""
    if _has_maximum(cell.program):
        raise InputError(
            f"{type(cell).__name__} has a maximum over units (np.max, softmax or logsumexp), and "
            f"{given}; expected {expected}: there are no kernels of a GPU for these"
        )


class _Weights(NamedTuple):
    """The parameters of a layer, in the orders that products and kernels read.

    Attributes
    ----------
    w_in : list of ndarray, shape (slots · units, input_size)
        The weights of the input of each direction, 0 where they are pruned.
    forward, back : ndarray
        The weights of states and arguments of both directions, packed, and their transposes.
    bias : ndarray
        The terms added to each slot of both directions: biases and vectors of parameters.
    rows : ndarray
        The parameters that elementwise operations read, per unit of both directions.
    """

    w_in: list[Array]
    forward: Array
    back: Array
    bias: Array
    rows: Array


class _Job(NamedTuple):
    """A matrix product of the gradients in some slots and the vectors that matrices multiply.

    Attributes
    ----------
    is_input : bool
        Whether the slots are those with products of the input.
    slots : tuple of int
        Their first and last-plus-one.
    reads : tuple of (str, int)
        What is multiplied: ``("input", 0)``, a state or an argument, in the order of kernels.
    """

    is_input: bool
    slots: tuple[int, int]
    reads: tuple[str, int]


class _Part(NamedTuple):
    """The gradient in a block of a parameter, or a part of it.

    Attributes
    ----------
    result, block : int
        The number of a result, and which block of its rows.
    is_transposed : bool
        Whether it is the gradient in the transpose.
    """

    result: int
    block: int
    is_transposed: bool


class DeviceDirection:
    """One direction of one layer: a cell, and the order in which kernels read its weights."""

    def __init__(self, cell: CellLike, layer: int, back: int, dtype: np.dtype[Any]) -> None:
        self.cell, self.layer, self.back, self.dtype = cell, layer, back, dtype
        _check_maximum(cell, "x is on a device", "arrays in host memory")
        self.code = code = cuda_program(cell.program)
        self.layout: LoopLayout = layout_of(len(code.blocks), cell.hidden_size, dtype)
        most = multiprocessors_of(load_cupy()).block
        if samples_of(code, self.layout, dtype, 1, 1, 1, most) == 0:
            raise InputError(
                f"hidden_size is {cell.hidden_size}; in {dtype} the vectors of a sample that "
                f"threads share do not fit the {format_bytes(most)} of shared memory that a block "
                "may have on this GPU"
            )
        self._declared: dict[str, Any] = dict(declared(type(cell)))
        self._reductions = sorted(cell.program.reductions)
        self._orders = [Mirrored(order) for order in self._find_orders()]
        self.jobs = self._find_jobs()
        self._parts = self._find_parts()

    # -- Parameters -------------------------------------------------------------------------------

    def _find_orders(self) -> list[Places]:
        """Return the place in the flat parameters of each number that products and kernels read.

        The numbers are sums over the first axis. A pruned weight is the zero after the last.
        """
        cell, code = self.cell, self.code
        ends = np.cumsum([0, *(math.prod(shape) for shape in cell.shapes.values())])
        nothing, places = int(ends[-1]), dict[str | Reduction, Places]()
        for (name, shape), begin in zip(cell.shapes.items(), ends, strict=False):
            own = np.arange(begin, begin + math.prod(shape)).reshape(shape)
            mask = cell.masks.get(name)
            places[name] = own if mask is None else np.where(mask.on(np), own, nothing)
            if name in cell.program.partial:
                gates = places[name].reshape(self._declared[name].blocks, -1, shape[1])
                heads = cell.program.heads_of(name)
                places[name] = whole_of(np, gates, heads, cell.hidden_size, nothing)
        units, slots = cell.hidden_size, cell.program.slots
        # Reductions are products with constants, which follow the zero.
        for k, reduction in enumerate(self._reductions):
            places[reduction] = np.where(reduction.matrix(units) > 0, nothing + 1 + k, nothing)
        weights = [
            self._block(places, block.matrix, block.gate, block.is_transposed)
            for block in code.blocks
        ]
        stacked = np.array(weights, np.int64).reshape(-1, units, units)
        inputs, biases = [], []
        for slot in slots:
            read = [term for term in slot.terms if term.argument.operation == "input"]
            inputs.append([self._block(places, *term[:3]) for term in read])
            added = [self._bias_of(places, term) for term in slot.terms]
            added += [self._block(places, name, gate) for name, gate in slot.vectors]
            biases.append([each for each in added if each is not None])
        rows = [
            self._block(places, *row.details)
            if row.operation == "vector"
            else np.broadcast_to(places[row.details[0]], units)
            for row in cell.program.rows[: code.leaves]
        ]
        about = code, self.layout, stacked, nothing, self.dtype
        orders = [
            _summed(inputs[: code.inputs], (units, cell.input_size), nothing),
            packing_order(*about, back=False)[None],
            packing_order(*about, back=True)[None],
            _summed(biases, (units,), nothing),
            _summed([[row] for row in rows], (units,), nothing),
        ]
        # int32 takes half the memory, if it can count all numbers.
        kind = np.int32 if nothing < 1 << 31 else np.int64
        return [order.astype(kind) for order in orders]

    def _block(
        self, places: dict[Any, Any], name: Any, gate: int, is_transposed: bool = False
    ) -> Any:
        """Return the numbers of a gate of a parameter, or of a reduction."""
        whole = places[name]
        if isinstance(name, Reduction):
            return whole
        if name in self.cell.program.partial:
            return whole[gate].T if is_transposed else whole[gate]
        gates = whole.reshape(self._declared[name].blocks, -1, *whole.shape[1:])
        return gates[gate].T if is_transposed else gates[gate]

    def _bias_of(self, places: dict[Any, Any], term: Term) -> Any:
        """Return the numbers of the bias of a product, or None."""
        place = self._bias_place(term)
        if place is None:
            return None
        return places[place[0]].reshape(-1, self.cell.hidden_size)[place[1]]

    def _bias_place(self, term: Term) -> tuple[str, int] | None:
        """Return the name of the bias of a product, and which block of it, or None."""
        if isinstance(term.matrix, Reduction):
            return None
        name, biased = bias_name(term.matrix), self._declared[term.matrix].biased
        if term.is_transposed or term.gate not in biased or name not in self.cell.shapes:
            return None
        return name, biased.index(term.gate)

    def weights(self, xp: Any, params: list[Array]) -> _Weights:
        """Return a copy of the parameters, as :class:`_Weights` of one direction."""
        flat = [param.reshape(-1).astype(self.dtype, copy=False) for param in params]
        constants = [0.0, *(each.matrix(self.cell.hidden_size).max() for each in self._reductions)]
        whole = xp.concatenate([*flat, xp.asarray(constants, self.dtype)])
        w_in, *others = (_taken(whole, order.on(xp)) for order in self._orders)
        return _Weights([w_in.reshape(-1, self.cell.input_size)], *others)

    # -- Gradients --------------------------------------------------------------------------------

    def _find_jobs(self) -> list[_Job]:
        """Return the matrix products that gradients of matrices are parts of."""
        code, slots = self.code, self.cell.program.slots
        readers: dict[tuple[str, int], list[int]] = {}
        for k, slot in enumerate(slots):
            for term in slot.weighed:
                own = readers.setdefault(self._read_by(term), [])
                if k not in own:
                    own.append(k)
        jobs = []
        for reads, those in sorted(readers.items()):
            for is_input, begin, end in ((True, 0, code.inputs), (False, code.inputs, code.slots)):
                own = [k for k in those if begin <= k < end]
                if not own:
                    continue
                # CuPy copies columns before it multiplies by them, so all are equally fast.
                first, last = min(own), max(own) + 1
                whole = (begin, end) if 2 * len(own) >= end - begin else (first, last)
                jobs.append(_Job(is_input, whole, reads))
        return jobs

    def _read_by(self, term: Term) -> tuple[str, int]:
        """Return what a product reads."""
        argument = term.argument
        if argument.operation == "input":
            return "input", 0
        if argument.operation == "state":
            return "state", self.code.states.index(argument.details[0])
        return "argument", self.code.arguments.index(self.cell.program.arguments.index(argument))

    def _find_parts(self) -> dict[str, list[list[_Part]]]:
        """Return for each parameter the parts of the gradient in each of its blocks.

        Results are the matrix products, then the gradients in slots summed over steps (slots with
        products of the input, then others), then gradients in rows of parameters.
        """
        code, program, cell = self.code, self.cell.program, self.cell
        parts: dict[str, list[list[_Part]]] = {}
        for name, shape in cell.shapes.items():
            declaration = self._declared.get(name)
            blocks = shape[0] // cell.hidden_size if declaration is None else declaration.blocks
            parts[name] = [[] for _ in range(blocks)]
        for k, slot in enumerate(program.slots):
            is_input = k < code.inputs
            of_sums = len(self.jobs) + (not is_input), k - (0 if is_input else code.inputs)
            for term in slot.weighed:
                reads = self._read_by(term)
                (number,) = (
                    i
                    for i, job in enumerate(self.jobs)
                    if job.reads == reads and job.slots[0] <= k < job.slots[1]
                )
                block = k - self.jobs[number].slots[0]
                parts[term.matrix][term.gate].append(_Part(number, block, term.is_transposed))
                place = self._bias_place(term)
                if place is not None:
                    parts[place[0]][place[1]].append(_Part(*of_sums, False))
            for name, gate in slot.vectors:
                parts[name][gate].append(_Part(*of_sums, False))
        for r, row in enumerate(program.rows[: code.leaves]):
            name, gate = row.details
            parts[name][gate].append(_Part(len(self.jobs) + 2, r, False))
        return parts

    def param_grads(self, xp: Any, results: list[Array] | None) -> dict[str, Array]:
        """Return the gradients in the parameters by their names, 0 where a weight is pruned."""
        cell, grads, taken = self.cell, dict[str, Array](), set[tuple[int, int]]()
        for name, shape in cell.shapes.items():
            if results is None:
                grads[name] = xp.zeros(shape, self.dtype)
                continue
            parts, whole, units = self._parts[name], shape, cell.hidden_size
            if name in cell.program.partial:
                whole = len(parts) * units, units
            places = {part[:2] for own in parts for part in own}
            grad = self._joined(results, parts, whole) if taken.isdisjoint(places) else None
            if grad is None:
                grad = self._built(xp, results, parts, whole)
            else:
                taken |= places
            if name in cell.program.partial:
                about = cell.program.heads_of(name), shape[0] // len(parts), shape[1]
                grad = parts_of(xp, grad.reshape(-1, units, units), *about).reshape(shape)
            grads[name] = masked(xp, grad, cell.masks.get(name))
        return grads

    def _joined(self, results: list[Array], parts: list[list[_Part]], shape: Shape) -> Array | None:
        """Return a gradient that is a part of one result, or None."""
        if not shape or not parts[0] or parts[0][0].is_transposed:
            return None
        first = parts[0][0]
        if parts != [[first._replace(block=first.block + k)] for k in range(len(parts))]:
            return None
        units = self.cell.hidden_size
        whole: Array = results[first.result]
        return whole[first.block * units : (first.block + len(parts)) * units]

    def _built(
        self, xp: Any, results: list[Array], parts: list[list[_Part]], shape: Shape
    ) -> Array:
        """Return a gradient assembled from parts of results."""
        units, blocks = self.cell.hidden_size, []
        for own in parts:
            block = None
            for part in own:
                each = results[part.result][part.block * units : (part.block + 1) * units]
                each = each.T if part.is_transposed else each
                block = each if block is None else block + each
            if block is None:
                block = xp.zeros((units, *shape[1:]), self.dtype)
            blocks.append(block)
        # A copy, even of one part: another gradient may share it.
        return xp.concatenate(blocks) if shape else blocks[0].sum()


def _summed(parts: list[list[Places]], shape: Shape, nothing: int) -> Places:
    """Return places concatenated, each padded to the longest sum."""
    most = max([1, *map(len, parts)])
    filled = np.full((most, len(parts), *shape), nothing, np.int64)
    for k, own in enumerate(parts):
        for i, each in enumerate(own):
            filled[i, k] = each
    return filled.reshape(most, -1)


def _taken(whole: Array, order: Array) -> Array:
    """Return the numbers at some places, summed over the first axis of the places."""
    taken = whole.take(order)
    return taken[0] if len(taken) == 1 else taken.sum(axis=0)


class DeviceMemory(Memory):
    """The memory for all samples, on the device of the input; see :class:`HostMemory` for the host.

    Work on it waits for the previous call's work, on any stream.
    """

    def __init__(
        self,
        directions: list[DeviceDirection],
        input_size: int,
        steps: int,
        batch: int,
        segment: int,
        has_resets: bool = False,
    ) -> None:
        self._xp = load_cupy()
        self._has_resets, self._is_reset, self._has_reset_states = has_resets, False, False
        self.directions = directions
        one = directions[0]
        self.steps, self.batch, self.segment, self.dtype = steps, batch, segment, one.dtype
        self.keeps_gates = segment >= steps
        self._code, self._units = one.code, one.cell.hidden_size
        self.per_layer = sum(each.layer == 1 for each in directions)
        layers = len(directions) // self.per_layer
        self.widths = [input_size, *[self.per_layer * self._units] * layers]
        gpu = multiprocessors_of(self._xp)
        about = one.code, one.layout, self.dtype, batch, self.per_layer
        samples = samples_of(*about, gpu.number, gpu.block)
        self._about_kernels = one.code, one.layout, self.dtype, samples
        # Rows after those of slots: other kept vectors, then arguments.
        self._extra = one.code.extra(one.layout.rounds == 1)
        self.device: int | None = self._xp.cuda.Device().id
        self._state_shape = len(directions), batch, len(self._code.states) * self._units
        self.nbytes = self.dtype.itemsize * sum(math.prod(shape) for _, shape in self._shapes())
        self.nbytes += 8 * self._flag_words

    @property
    def _flag_words(self) -> int:
        """Words for resets, four per word: a row per step, and one more."""
        return -(-(self.steps + 1) * self.batch // 4) if self._has_resets else 0

    @property
    def _kernels(self) -> SequenceKernels:
        return sequence_kernels(*self._about_kernels, self._is_reset)

    def fits(self, x: Array, has_resets: bool) -> bool:
        """Return whether this is the memory for inputs like `x`, with or without resets."""
        wanted = *x.shape[:2], x.dtype, device_of(x)
        own = self.steps, self.batch, self.dtype, self.device
        return own == wanted and self._has_resets >= has_resets

    def _shapes(self) -> list[tuple[str, Shape]]:
        """Return the name and the shape of each array."""
        code, units = self._code, self._units
        of_samples, segment = (self.steps, self.batch), (self.segment, self.batch)
        shapes: list[tuple[str, Shape]] = [("inputs", (*of_samples, self.widths[0]))]
        # With resets there are states that steps write, and states that steps read.
        planes = len(code.states) * (1 + self._has_resets)
        for width in self.widths[1:]:
            shapes += [("states", (planes, self.steps + 2, self.batch, width))]
        # If not all are kept, layers take turns.
        for _ in self.widths[1:] if self.keeps_gates else [None]:
            shapes += [
                ("products", (self.per_layer, *segment, code.inputs * units)),
                ("rest", (self.per_layer, *segment, (code.slots - code.inputs) * units)),
                ("more", (self.per_layer, self._extra, *segment, units)),
            ]
        shapes += [("grads", (*of_samples, self.widths[-1]))] * min(2, len(self.widths) - 2)
        if code.has_input_grad:
            shapes += [("direct", (self.per_layer, *segment, units))]
        if code.leaves:
            shapes += [("summed", (self.per_layer, code.leaves, self.batch, units))]
        ones = 1, min(self.segment, self.steps) * self.batch
        # With resets there are also gradients in the states that they set.
        carries = len(self.directions), 1 + self._has_resets, *self._state_shape[1:]
        return [*shapes, ("carries", carries), ("ones", ones)]

    def allocate(self) -> None:
        """Take the memory, on the current stream."""
        nothing = [self._xp.empty(0, self.dtype)]
        arrays: dict[str, list[Array]] = {"grads": []}
        for name, shape in self._shapes():
            arrays.setdefault(name, []).append(self._xp.empty(shape, self.dtype))
        (self._inputs,), (self._carries,) = arrays["inputs"], arrays["carries"]
        self._states, self._grads = arrays["states"], arrays["grads"]
        self._products, self._rest, self._more = (
            arrays[name] for name in ("products", "rest", "more")
        )
        (self._direct,), (self._summed,) = (
            arrays.get(name, nothing) for name in ("direct", "summed")
        )
        (self._ones,) = arrays["ones"]  # whose products with rows add them up
        self._ones.fill(1)
        ahead, behind = self.steps, self.steps + 1
        self._firsts, self._lasts = self._state_places(0, behind), self._state_places(ahead, 1)
        self._ends = self._state_places(behind, 0)  # what resets set is where no step reads
        # The stream that this memory is made on, that of the latest call, and the event of its end.
        self._home = self._latest = self._xp.cuda.get_current_stream()
        self._done = self._xp.cuda.Event(disable_timing=True)
        self._done.record(self._home)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let the block work on this memory, on the current stream of its device."""
        device: int = self._carries.data.device_id
        with place("the states", self._carries, None, None) as stream, current(device):
            if not is_same_stream(stream, self._latest):
                stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)
                # CuPy reuses freed memory on the stream that it was made on: this memory on the
                # first stream, weights on that of the forward pass.
                others = [self._home]
                if not is_same_stream(self._latest, self._home):
                    others.append(self._latest)
                for other in others:
                    if not (is_same_stream(other, stream) or other.is_capturing()):
                        other.wait_event(self._done)
                self._latest = stream

    # -- Input and results ------------------------------------------------------------------------

    def weights(self, params: list[list[Array]]) -> list[_Weights]:
        """Return a copy of the parameters of each layer."""
        xp, width, packed_weights = self._xp, self.per_layer, []
        pairs = zip(self.directions, params, strict=True)
        each = [one.weights(xp, own) for one, own in pairs]
        for k in range(0, len(each), width):
            w_in, *packed = zip(*each[k : k + width], strict=True)
            joined = [parts[0] if width == 1 else xp.concatenate(parts) for parts in packed]
            packed_weights.append(_Weights([w for (w,) in w_in], *joined))
        return packed_weights

    def read(
        self,
        x: Array,
        state: Array | None,
        lengths: NDArray[np.int64] | None,
        resets: NDArray[np.uint8] | None = None,
    ) -> None:
        """Copy inputs, initial states (by default zeros), lengths and resets."""
        xp, anew = self._xp, None
        self._is_reset = resets is not None
        self._has_reset_states = has_reset_states(state, len(self.directions))
        if state is not None and self._has_reset_states:
            state, anew = state[::2], state[1::2]
        self._lengths, self._has = xp.full(self.batch, self.steps, np.int64), None
        if lengths is not None:
            self._lengths = xp.asarray(lengths)
            self._has = xp.arange(self.steps)[:, None, None] < self._lengths[:, None]
        # Shorter sequences are often padded with NaN, and 0·NaN is not 0.
        self._inputs[...] = x if self._has is None else xp.where(self._has, x, self.dtype.type(0))
        for k, columns, where, read in self._firsts:
            where[...] = 0 if state is None else state[k, :, columns]
            if read is not None and self._is_reset:
                read[...] = where
        for k, columns, _, read in self._ends:
            if read is not None and self._is_reset:
                read[...] = 0 if anew is None else anew[k, :, columns]
        if resets is not None:
            flags = xp.asarray(resets) != 0
            if self._has is not None:
                flags &= self._has[..., 0]
            self._take_resets(flags)

    def _take_resets(self, flags: Array) -> None:
        """Put resets after the lengths, and the states that they set in place of initial states."""
        xp, count = self._xp, self.steps * self.batch
        whole = xp.zeros(self.batch + self._flag_words, np.int64)
        whole[: self.batch] = self._lengths
        whole[self.batch :].view(np.uint16)[:count] = flags.reshape(-1)
        self._lengths = whole
        for (k, _, _, read), (*_, end) in zip(self._firsts, self._ends, strict=True):
            if read is not None and self.steps and not self.directions[k].back:
                read[...] = xp.where(flags[0, :, None], end, read)

    def results(self, lengths: NDArray[np.int64] | None) -> tuple[Array, Array]:
        """Return outputs and last states."""
        xp, output = self._xp, self._outputs(-1)[1:-1]
        if self._has is None:
            output = output.copy()
        else:
            output = xp.where(self._has, output, self.dtype.type(0))
        last = xp.empty(self._state_shape, self.dtype)
        for k, columns, where, _ in self._lasts:
            last[k, :, columns] = where
        return output, last

    def every_state(self) -> Array:
        """Return the states of the only direction: before the first step, and after each step."""
        (states,) = self._states
        order = self._code.states
        return self._xp.concatenate(
            [states[order.index(k)][:-1] for k in range(len(order))], axis=-1
        )

    def _outputs(self, layer: int) -> Array:
        """Return the outputs of a layer, from a slot before the first step on."""
        return self._states[layer][self._code.output]

    def _state_places(
        self, slot: int, slot_back: int
    ) -> list[tuple[int, slice, Array, Array | None]]:
        """Return, for each part of the states in a slot, its direction, columns and slots.

        These are the states written, and the states read if they differ. In directions that run
        backward in time the slot is `slot_back`.
        """
        units, places, parts = self._units, [], len(self._code.states)
        for k, one in enumerate(self.directions):
            columns = slice(one.back * units, (one.back + 1) * units)
            slots = self._states[one.layer - 1][:, slot_back if one.back else slot, :, columns]
            for number, part in enumerate(self._code.states):
                own = slice(part * units, (part + 1) * units)
                read = slots[parts + number] if self._has_resets else None
                places.append((k, own, slots[number], read))
        return places

    def read_carry(self, carry: Array) -> None:
        """Copy the gradients in the last states."""
        self._move_states(self._carry, carry, self._code.states)
        if self._is_reset:
            self._carries[:, 1] = 0

    def state_grad(self) -> Array:
        """Return the gradients in the initial states, and in those that resets set if given."""
        order, grads = self._code.states, []
        for carry in [self._carry, *([self._carries[:, 1]] if self._has_reset_states else [])]:
            grads.append(self._xp.empty(self._state_shape, self.dtype))
            self._move_states(grads[-1], carry, [order.index(k) for k in range(len(order))])
        return beside(self._xp, *grads) if self._has_reset_states else grads[0]

    @property
    def _carry(self) -> Array:
        """The gradients in the states before the remaining steps."""
        if self._is_reset:
            return self._carries[:, 0]
        flat = self._carries.reshape(-1)[: math.prod(self._state_shape)]
        return flat.reshape(self._state_shape)

    def _move_states(self, to: Array, given: Array, order: Sequence[int]) -> None:
        """Copy gradients in states, in another order."""
        if list(order) == sorted(order):
            to[...] = given
            return
        shape = (*self._state_shape[:2], len(order), self._units)
        to, given = to.reshape(shape), given.reshape(shape)
        for k, other in enumerate(order):
            to[:, :, k] = given[:, :, other]

    def input_grad(self) -> Array:
        """Return a new array for the gradients in the input."""
        return self._xp.empty((self.steps, self.batch, self.widths[0]), self.dtype)

    def below(self, k: int) -> Array:
        """Return the array for the gradients in the input of the layer of a direction."""
        return self._grads[self.directions[k].layer % len(self._grads)]

    # -- Steps ------------------------------------------------------------------------------------

    def _spans(self) -> list[Span]:
        """Return the spans of steps whose gates are computed at once."""
        steps = self.steps if self.batch else 0
        return [(at, min(at + self.segment, steps)) for at in range(0, steps, self.segment)]

    def _times(self, back: int, span: Span) -> slice:
        """Return some steps of a direction, from its own order to the order of time."""
        begin, end = (self.steps - span[1], self.steps - span[0]) if back else span
        return slice(begin, end)

    def _rows_of(self, array: Array, times: slice) -> Array:
        """Return rows for all samples of some steps."""
        times = times if self.keeps_gates else slice(0, times.stop - times.start)
        rows = array[times]
        return rows.reshape(len(rows) * self.batch, array.shape[-1])

    def _of_layer(self, arrays: list[Array], layer: int) -> Array:
        return arrays[layer % len(arrays)]

    def _inputs_of(self, layer: int, times: slice) -> Array:
        """Return the inputs of a layer, a row per step and sample."""
        rows = self._layer_input(layer)[times]
        return rows.reshape(-1, rows.shape[-1])

    def _layer_input(self, layer: int) -> Array:
        """Return the inputs of a layer, of all steps."""
        return self._outputs(layer - 1)[1:-1] if layer else self._inputs

    def run(self, ks: range, weights: list[_Weights]) -> None:
        """Compute all states of the directions of a layer, and the gates of the last segment."""
        for span in self._spans():
            self._run(self.directions[ks.start].layer - 1, weights, span)

    def _run(self, layer: int, all_weights: list[_Weights], span: Span) -> None:
        """Compute some states of a layer, and their gates."""
        weights = all_weights[layer]
        for back, w_in in enumerate(weights.w_in if self._code.inputs else ()):
            times = self._times(back, span)
            products = self._rows_of(self._of_layer(self._products, layer)[back], times)
            self._xp.matmul(self._inputs_of(layer, times), w_in.T, out=products)
        before = weights.forward, weights.bias, weights.rows
        self._launch(self._kernels.run, layer, before, (), span)

    def _launch(
        self,
        kernel: Any,
        layer: int,
        before: tuple[Array, ...],
        behind: tuple[Array, ...],
        span: Span,
    ) -> None:
        """Start a kernel of a layer, with the arrays that both kernels take in between."""
        rows = (self._of_layer(each, layer) for each in (self._products, self._rest, self._more))
        arrays = *before, *rows, self._states[layer], self._layer_input(layer), self._lengths
        width = self.widths[-1], self.widths[layer]
        counts = self.steps, self.batch, *width, self.segment, *span
        _device.launch(
            *(kernel, self._kernels.blocks(self.batch, self.per_layer), self._kernels.threads),
            self._xp.cuda.get_current_stream().ptr,
            *(kernel_address(array) for array in (*arrays, *behind)),
            *counts,
        )

    # -- Gradients --------------------------------------------------------------------------------

    def back(
        self, ks: range, weights: list[_Weights], above: Array, below: Array | None
    ) -> list[dict[str, Array]]:
        """Return the gradients in the parameters of each direction of a layer.

        `above` holds the gradients in its outputs, and `below` gets those in its inputs.
        """
        xp, code, layer = self._xp, self._code, self.directions[ks.start].layer - 1
        carry = (self._carries if self._is_reset else self._carry)[ks.start : ks.stop]
        results: list[list[Array] | None] = [None for _ in ks]
        is_sum = self.per_layer > 1 or code.has_input_grad or not code.inputs
        if below is not None and is_sum:
            below.fill(0)
        self._summed.fill(0)
        for span in reversed(self._spans()):
            if code.keeps and not self.keeps_gates:
                self._run(layer, weights, span)
            before = weights[layer].back, weights[layer].rows
            behind = above, carry, self._direct, self._summed
            self._launch(self._kernels.back, layer, before, behind, span)
            for back, w_in in enumerate(weights[layer].w_in):
                own = self._products_of(ks[back], span)
                earlier = results[back]
                if earlier:
                    own = [a + b for a, b in zip(earlier, own, strict=True)]
                results[back] = own
                if below is None:
                    continue
                times = self._times(back, span)
                rows = below[times].reshape(-1, below.shape[-1])
                if code.has_input_grad:
                    rows += self._rows_of(self._direct[back], times)
                if not code.inputs:
                    continue
                grads = self._rows_of(self._of_layer(self._products, layer)[back], times)
                if is_sum:
                    rows += xp.matmul(grads, w_in)
                else:
                    xp.matmul(grads, w_in, out=rows)
        if code.leaves:
            for each, summed in zip(results, self._summed, strict=True):
                if each is not None:
                    each.append(summed.sum(axis=1).reshape(-1))
        pairs = zip(ks, results, strict=True)
        return [self.directions[k].param_grads(xp, each) for k, each in pairs]

    def _products_of(self, k: int, span: Span) -> list[Array]:
        """Return the results that make up a direction's parameter gradients, over some steps."""
        xp, code, one = self._xp, self._code, self.directions[k]
        layer, back, units = one.layer - 1, one.back, self._units
        times = self._times(back, span)
        parts = [
            self._rows_of(self._of_layer(arrays, layer)[back], times)
            for arrays in (self._products, self._rest)
        ]
        results = []
        for job in one.jobs:
            first = 0 if job.is_input else code.inputs
            begin, end = ((k - first) * units for k in job.slots)
            grads = parts[not job.is_input][:, begin:end]
            results.append(xp.matmul(grads.T, self._read_by(job.reads, layer, back, times)))
        # Without slots, nothing is summed.
        ones = self._ones[:, : len(parts[0])]
        sums = [xp.matmul(ones, part)[0] if part.shape[1] else part[0] for part in parts]
        return [*results, *sums]

    def _read_by(self, reads: tuple[str, int], layer: int, back: int, times: slice) -> Array:
        """Return what matrices multiply in some steps of a direction, a row per step and sample."""
        kind, number = reads
        if kind == "input":
            return self._inputs_of(layer, times)
        units, begin = self._units, times.start + 2 * back
        if kind == "state" and self._is_reset:
            number += len(self._code.states)
        if kind == "argument":
            state = self._code.argument_states[number]
            if state is None:
                row = self._code.argument_row(number, self.directions[0].layout.rounds == 1)
                return self._rows_of(self._of_layer(self._more, layer)[back, row], times)
            number, begin = state, times.start + 1
        states = self._states[layer][number][begin : begin + times.stop - times.start]
        return states[..., back * units : (back + 1) * units].reshape(-1, units)
