"""The memory of a training step on the host, and the loops that run in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import check_memory, for_kernels
from ..execution.calls import Calls
from ..execution.sharing import even_slices
from ..kernels.cpu.copies import add_range, copy_into, fill_with
from ..kernels.cpu.tiles import TILE_ROWS, TILE_VECTORS
from .definition import Layers
from .host_sizes import Extent, HostSizes
from .loops import callers, sharing, sums
from .loops import sequences as kernels
from .loops.pauses import STRICT
from .loops.sequences import Caller, Sequence
from .loops.sums import Gates, Sums
from .memory import Memory, has_reset_states
from .packing import Direction, Product, Weights

Array = NDArray[Any]

_TASK_ROWS = 256  # rows of a sparse weight per gradient task


class HostMemory(HostSizes, Memory):
    """The memory on the host, for all samples and for the groups of samples that threads share.

    A recorder can record its calls of kernels, and the calls that take memory.
    """

    def __init__(
        self, network: Layers, directions: list[Direction], extent: Extent, calls: Calls
    ) -> None:
        super().__init__(network, directions, extent)
        self.calls, self.groups = calls, list[_Group]()
        self._samples_of: dict[int, Sequence] = {}
        self._row_orders = [each.row_order(self.group) for each in directions]
        self._grad_orders = [each.grad_orders for each in directions]
        self._sum_tables = [each.sum_table for each in directions]
        none = np.empty(0, self.dtype)
        self.no_caller = Caller(none, self.widths[0], none, False, none, np.empty(0, np.int64))

    def weights(self, params: list[list[Array]]) -> list[Weights]:
        """Return a packed copy of each direction's parameters; the next call overwrites it."""
        about = zip(self.directions, self.packed, params, self._row_orders, strict=True)
        for k, (one, room, own, order) in enumerate(about):
            flat = [_flat(param) for param in own]
            one.pack(self.calls, room, flat, order, self.has_backward)
            if any(derived.value is not None for derived in one.program.derived):
                self.calls.launch(kernels.prepare, self.groups[0].sequence(k, (0, 0)))
        return self.packed

    def allocate(self) -> None:
        """Take the memory."""
        check_memory(f"{self.steps} steps of {self.batch} samples", self.nbytes)
        arrays: dict[str, list[Array]] = {"cells": [], "grads": [], "part": []}
        for name, count in self._sizes():
            take = self.calls.zeros if name == "zeros" else self.calls.room
            arrays.setdefault(name, []).append(take(count, self.dtype))
        none = np.zeros(0, self.dtype)
        self.states, self.cells = arrays["states"], [none, *arrays["cells"]]
        # The states that the next step reads, and which samples are reset before each step.
        self.befores, self.before_cells = self.states, self.cells
        self.resets: NDArray[np.uint8] = np.zeros(0, np.uint8)
        if self._has_resets:
            self.befores = [none, *arrays["states before"]]
            self.before_cells = [none, *arrays["cells before"]]
            self.resets = self.calls.zeros((self.steps + 1) * self.padded, np.uint8)
        (self.lengths,), (self.zeros,) = arrays["lengths"], arrays["zeros"]
        self._grads, self._parts = arrays["grads"], arrays["part"]
        (self._above,) = arrays.get("above", [none])
        (self.further,) = arrays.get("further", [none])
        self._ones = self.calls.room(2 * self.group, self.dtype)
        self.calls.launch(fill_with, self._ones, 1)
        gates = arrays["gates"]
        self.gates = [gates[k % len(gates)] for k in range(len(self.directions))]
        flags = [self.calls.room(self.padded * self.segment, np.uint8) for _ in gates]
        self.has_grads = [flags[k % len(flags)] for k in range(len(self.directions))]
        # One per direction of a layer, since other threads may run it.
        self.ends = [self.calls.room(self.padded, np.int64) for _ in range(self.per_layer)]
        self.carries = arrays["carries"]
        count = self.per_layer * len(self._spans()) if self.helpers else 0
        size = sharing.words_of(self.helpers)
        self.help = [self.calls.room(size, np.int64) for _ in range(count)]
        own = {name: iter(arrays[name]) for name in ("products", "parts", "block", "row_grads")}
        self.groups = []
        for first, count in self._spans():
            self.groups.append(_Group(self, first, count, own))
        self.row_sums = [
            self.calls.room(self.padded * one.rows * one.units, float) for one in self.directions
        ]
        self.packed = []
        for one in self.directions:
            room, places = one.room(self.calls, self.group, self.has_backward), self._places_of(one)
            both = (each._replace(places=places) for each in (room.forward, room.back))
            forward, back = both
            self.packed.append(room._replace(forward=forward, back=back))

    def help_of(self, group: int, one: Direction) -> NDArray[np.int64]:
        """Return the words that a leader, of a group and direction, shares with its helpers."""
        none: NDArray[np.int64] = self.ends[0][:0]
        return self.help[group * self.per_layer + one.back] if self.helpers else none

    def plane_of(self, arrays: list[Array], one: Direction) -> Array:
        """Return the memory from a direction's first states on, or from its other states on."""
        is_first = arrays is self.states or arrays is self.befores
        planes = 1 if is_first else one.states - 1
        return arrays[one.layer][one.back * planes * self.plane :]

    # -- The caller's arrays ----------------------------------------------------------------------

    def _state_parts(self, k: int, *, before: bool = False) -> list[Array]:
        """Return the arrays of a direction's states, or of the states that the next step reads."""
        one = self.directions[k]
        states, cells = (self.befores, self.before_cells) if before else (self.states, self.cells)
        others = self.cells_of(one, cells)
        first = self.plane_of(states, one)
        return [first, *(others[n * self.plane :] for n in range(one.states - 1))]

    def _carry_parts(self, k: int, *, of_resets: bool = False) -> list[Array]:
        """Return the arrays of gradients in a direction's states, or in the states of resets."""
        count = self.directions[k].states
        places = range(of_resets * count, (1 + of_resets) * count)
        return [self.carries[k][n * self.carry_step :] for n in places]

    def _read_states(self, place: int, parts: list[Array], slot: int, states: list[Array]) -> None:
        """Copy the caller's states to a slot; write zeros if the caller passed none.

        The caller has all states in one array, or one array per state.
        """
        for part, (array, *where) in zip(parts, self._rows_of(place, states), strict=True):
            self.calls.launch(callers.state_in, self._all_samples(0), part, slot, array, *where)

    def _write_states(self, place: int, parts: list[Array], slot: int, states: list[Array]) -> None:
        """Copy the states in a direction's slot to the caller's array."""
        for part, (array, *where) in zip(parts, self._rows_of(place, states), strict=True):
            self.calls.launch(callers.state_out, self._all_samples(0), part, slot, array, *where)

    def _rows_of(self, place: int, states: list[Array]) -> Iterator[tuple[Array, int, int]]:
        """Yield, for each state, the caller's array, the start of its rows, and their length."""
        count = self.directions[0].states
        row = count // len(states) * self.units
        for n in range(count):
            column = n * self.units if len(states) == 1 else 0
            yield states[n % len(states)].reshape(-1), place * self.batch * row + column, row

    def _states_of_caller(self, name: str, places: int) -> list[Array]:
        count = self.directions[0].states
        names = [f"{name} {n}" for n in range(count)] if self._states_apart else [name]
        shape = places, self.batch, count // len(names) * self.units
        return [self.calls.result(each, shape, self.dtype) for each in names]

    def read(
        self,
        x: Array,
        state: Array | list[Array] | None,
        lengths: NDArray[np.int64] | None,
        resets: NDArray[np.uint8] | None = None,
    ) -> None:
        """Read inputs, initial states (zeros by default), lengths and resets.

        If states are a list, it has one array per state of a cell, and so do their gradients. If
        there are twice as many initial states as directions, they include the states that resets
        set: see :func:`~sparsescan.recurrent.memory.beside`.
        """
        self._x, self._is_shorter = x.reshape(-1), lengths is not None
        self._has_reset_states = has_reset_states(state, len(self.directions))
        self._states_apart = isinstance(state, list)
        states = _listed(np.zeros(0, self.dtype) if state is None else state)
        for k, one in enumerate(self.directions):
            place, slot = self._place(k), self.steps + 1 if one.back else 0
            self._read_states(place, self._state_parts(k), slot, states)
            if self._has_resets:
                parts, end = self._state_parts(k, before=True), self.steps + 1 - slot
                anew = states if self._has_reset_states else [self.no_caller.x]
                self._read_states(place + 1, parts, end, anew)
        counts = np.zeros(0, np.int64) if lengths is None else lengths
        self.calls.launch(callers.lengths_in, self._all_samples(0), self.lengths, counts)
        if resets is not None:
            where = self._all_samples(0), self.resets, resets.reshape(-1), counts
            self._for_steps(partial(self.calls.launch, callers.resets_in, *where))
        if not self.has_sample_lanes or self.per_layer > 1:
            caller = self.no_caller._replace(x=self._x, is_shorter=self._is_shorter)
            about = caller, self._all_samples(0), self._cols, self.states[0]
            self._for_steps(partial(self.calls.launch, callers.turn_in, *about))

    def _place(self, k: int) -> int:
        """Return the place of a direction's initial states among the caller's."""
        return k * (1 + self._has_reset_states)

    def caller(self, one: Direction) -> Caller:
        """Return the caller's arrays that a direction reads and writes directly.

        It reads inputs directly if the directions do not share them.
        """
        caller = self.no_caller._replace(is_shorter=self._is_shorter)
        if one.further:
            caller = caller._replace(further=self._x)
        if self.has_sample_lanes and one.layer == 1 and self.per_layer == 1:
            caller = caller._replace(x=self._x)
        if self._writes_output(one):
            caller = caller._replace(output=self._output.reshape(-1))
        return caller

    def _all_samples(self, k: int) -> Sequence:
        """Return a direction with all samples, for kernels that only read or write slots."""
        if k not in self._samples_of:
            every = self.groups[0].sequence(k, (0, 0))
            self._samples_of[k] = every._replace(first=0, count=self.padded)
        return self._samples_of[k]

    def _for_steps(self, call: Callable[[int, int], None]) -> None:
        """Call a function for parts of the steps, with the first step and the end."""
        spans = even_slices(self.steps, self.threads) if self.batch else ()
        self.call_all([partial(call, span.start, span.stop) for span in spans])

    def _turn_out(self, start: int, stop: int) -> None:
        """Write the outputs of some steps for both directions, which share cache lines."""
        out, count = self._output[start:].reshape(-1), len(self.directions)
        first = 0 if self._returns_layers else count - self.per_layer
        for k in range(first, count):
            width, column, step = self.columns_of(self.directions[k])
            for n, states in enumerate(self._state_parts(k)[: self._outputs]):
                where = start + 1, stop + 1, out, width, column + n * step
                self.calls.launch(callers.turn_out, states, self._all_samples(k), *where)

    def results(self, lengths: NDArray[np.int64] | None) -> tuple[Array, Array]:
        """Return outputs and last states."""
        output = self._output
        del self._output, self._x
        if lengths is not None:
            about = output.reshape(-1), lengths, self.widths[-1]
            self._for_steps(partial(self.calls.launch, callers.clear_outputs, *about))
        last = self._states_of_caller("last", len(self.directions))
        for k, one in enumerate(self.directions):
            self._write_states(k, self._state_parts(k), 1 if one.back else self.steps, last)
        return output, last[0]

    # -- Threads ----------------------------------------------------------------------------------

    def for_each_group(self, ks: range, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function for each group of samples and each direction of a layer."""
        tasks: list[Callable[[], None]] = [
            partial(call, *task, *arguments) for task in product(self.groups, ks)
        ]
        self.call_all(self._with_helpers(tasks) if self.helpers else tasks)

    def _with_helpers(self, tasks: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """Return tasks of leaders, and those of their helpers."""
        like, parts = np.empty(0, self.dtype), self.helpers + 1

        def lead(task: Callable[[], None], words: Array) -> None:
            task()
            self.calls.launch(sharing.end_help, words)

        leaders, others = [], list[Callable[[], None]]()
        for task, words in zip(tasks, self.help, strict=True):
            self.calls.launch(fill_with, words, 0)
            leaders.append(partial(lead, task, words))
            help_out = partial(self.calls.launch, sharing.help_out, words)
            others += [partial(help_out, part, parts, like) for part in range(1, parts)]
        return leaders + others

    def call_all(self, tasks: list[Callable[[], None]]) -> None:
        """Run tasks, with other threads if that pays."""

        def do_all() -> None:
            for task in tasks:
                task()

        self.calls.together(tasks if self.threads > 1 else [do_all])

    # -- States and gradients ---------------------------------------------------------------------

    def run(self, ks: range, weights: list[Weights]) -> None:
        """Compute all states of the directions of a layer, and the gates of the last segment."""
        last = self.directions[ks.start]
        is_last = last.layer == len(self.widths) - 1
        if is_last:
            shape = self.steps, self.batch, self.widths[-1]
            self._output = self.calls.result("output", shape, self.dtype)
        segment = self.segment if self.has_backward else max(1, self.steps)
        for start in range(0, self.steps, segment):
            span = start, min(start + segment, self.steps)
            self.for_each_group(ks, _run, weights, span)
        if is_last and not self._writes_output(last):
            self._for_steps(self._turn_out)

    def read_carry(self, carry: Array | list[Array]) -> None:
        """Read the gradients in the last states."""
        self.in_further = self.no_caller.x
        for k in range(len(self.directions)):
            self._read_states(k, self._carry_parts(k), -1, _listed(carry))
            if self._has_resets:
                parts = self._carry_parts(k, of_resets=True)
                self._read_states(k, parts, -1, [self.no_caller.x])

    def state_grad(self) -> Array:
        """Return the gradients in the initial states, and in the states that resets set, if any."""
        states = self._states_of_caller("state", self._place(len(self.directions)))
        for k in range(len(self.directions)):
            self._write_states(self._place(k), self._carry_parts(k), -1, states)
            if self._has_reset_states:
                parts = self._carry_parts(k, of_resets=True)
                self._write_states(self._place(k) + 1, parts, -1, states)
        return states[0]

    def input_grad(self) -> Array:
        """Return a new array for the gradients in the input."""
        in_all = self.calls.result("input", (self.steps, self.batch, self.widths[0]), self.dtype)
        if self.widths[0] > self.inputs:
            self.in_further = in_all.reshape(-1)
        if not self.directions[0].reads_input:
            self.calls.launch(fill_with, in_all.reshape(-1), 0)
        return in_all

    def below(self, k: int) -> Array:
        """Return the array for the gradients in the input of a direction's layer."""
        layer = self.directions[k].layer - 1
        shape = self.steps, self.batch, self.widths[layer]
        below: Array = self._grads[layer % len(self._grads)][: math.prod(shape)].reshape(shape)
        return below

    def above(self, ks: range, above: Array, below: Array) -> Array:
        """Return the gradients in the outputs of the layer below one, including the caller's."""
        if not self._adds_above:
            return below
        total = self._above[: self.steps * self.batch * self.widths[-1]]
        if ks.stop == len(self.directions):  # the caller's array is not changed
            first = (copy_into, total, above.reshape(-1)) if above.size else (fill_with, total, 0)
            self.calls.launch(*first)
        part = below.reshape(-1), self.batch, self.per_layer * self.units
        for one in self.directions[ks.start - self.per_layer : ks.start]:
            width, column, _ = self.columns_of(one)
            about = *part, one.back * self.units, self.units, total, width, column
            self._for_steps(partial(self.calls.launch, callers.add_columns, *about))
        return total

    def back(
        self, ks: range, weights: list[Weights], above: Array, below: Array | None
    ) -> list[dict[str, Array]]:
        """Return the gradients in the parameters of each direction of a layer.

        `above` holds the gradients in its outputs; `below` gets those in its inputs. If samples are
        kept apart, it returns the factors of the products in place of their sums.
        """
        parts = self._input_parts(below)
        lots = 1 if self._keeps_samples else -(-self.padded // self.lot)
        sums_of = {k: self._zero_sums(k, lots) for k in ks}
        for k in ks:
            self.calls.launch(fill_with, self.row_sums[k], 0)
            # Layers above may have written gradients after the input of the first direction.
            if parts and k > 0 and not self.directions[k].reads_input:
                self.calls.launch(fill_with, parts[self.directions[k].back].reshape(-1), 0)
        for start in reversed(range(0, self.steps, self.segment)) if self.batch else ():
            span = start, min(start + self.segment, self.steps)
            self.for_each_group(ks, _back, weights, sums_of, above, parts, span)
            if not self._keeps_samples:
                self._sum_up(ks, sums_of, span)
        for part in parts[1:]:
            self._for_steps(partial(self._add_steps, self.directions[ks.start], parts[0], part))
        if self._keeps_samples:
            return [self._factors(k) for k in ks]
        return [self._param_grads(k, sums_of[k], lots) for k in ks]

    def _zero_sums(self, k: int, lots: int) -> _SumsOf:
        """Return the initial sums of a direction's parameter gradients."""
        one = self.directions[k]
        table, size = self._sum_tables[k]
        if self._keeps_samples:
            table, size = table[:0], 0
        # If units are lanes and all steps are summed at once, zeros are not needed.
        begins = not self.has_sample_lanes and self.keeps_gates and self.batch > 0 < self.steps
        out = (self.calls.room if begins else self.calls.zeros)(lots * size, float)
        row_sums = self.calls.zeros(lots * one.sum_stride, float)
        entries = [self.calls.zeros(each.forward.size, float) for each in one.sparse]
        rows = 0 if self._keeps_samples else one.products
        biased = min(rows, one.biased)
        about = rows, one.sum_stride, biased, table, self.lot, out, size
        return _SumsOf(Sums(*about, row_sums, self._ones, begins), entries)

    def _param_grads(self, k: int, sums_of: _SumsOf, lots: int) -> dict[str, Array]:
        one, whole = self.directions[k], sums_of.dense
        sizes = {
            "out": (whole.out, lots, whole.size),
            "rows": (whole.row_sums, lots, one.sum_stride),
            "units": (self.row_sums[k], self.batch, one.rows * one.units),
        }
        return one.param_grads(self.calls, k, self._grad_orders[k], sizes, sums_of.entries)

    def _factors(self, k: int) -> dict[str, Array]:
        """Return the factors whose summed products are a direction's parameter gradients.

        For each step and sample these are the gradients in the slots (``products``), and the
        vectors that they multiply: the ``states`` before the step, the ``arguments`` of later
        stages and, above the first layer, the ``input``. Gradients in ``rows`` of parameters are
        summed over the steps of a sample. Empty factors are left out.
        """
        one, samples = self.directions[k], self._all_samples(k)
        factors: dict[str, Array] = {}

        def take(name: str, width: int, steps: int = self.steps) -> Array:
            shape = steps, self.batch, width
            factors[name] = self.calls.result(f"{name} {k}", shape, self.dtype)
            return factors[name].reshape(-1)

        for name, first, count in (
            ("products", 0, one.slots),
            ("arguments", one.slots, one.record - one.slots),
        ):
            if count:
                width = count * one.units
                about = samples, self._gates(k, (0, self.steps), first), width, take(name, width)
                self._for_steps(partial(self.calls.launch, callers.gates_out, *about))
        parts, width = self._state_parts(k, before=True), len(one.multiplied) * one.units
        out = take("states", width) if width else self.no_caller.x
        for place, state in enumerate(one.multiplied):
            where = 2 * one.back, 2 * one.back + self.steps, out, width, place * one.units
            self.calls.launch(callers.turn_out, parts[state], samples, *where)
        if one.layer > 1:
            width = self.widths[one.layer - 1]
            out = take("input", width)
            for below in self.directions:
                if below.layer == one.layer - 1:
                    states, column = self.plane_of(self.states, below), below.back * self.units
                    into = 1, self.steps + 1, out, width, column
                    self.calls.launch(callers.turn_out, states, samples, *into)
        if one.rows:
            out = take("rows", one.rows * one.units, 1)
            self.calls.launch(callers.take_over, self.row_sums[k][: out.size], out, 0)
        return factors

    def _add_steps(self, one: Direction, total: Array, part: Array, start: int, stop: int) -> None:
        """Add one direction's gradients in some steps' inputs to another direction's."""
        width, flat = total.shape[2], (total.reshape(-1), part.reshape(-1))
        if width == one.inputs:
            row = math.prod(total.shape[1:])
            self.calls.launch(add_range, *flat, start * row, stop * row)
            return
        where = flat[1], self.batch, width, 0, one.inputs, flat[0], width, 0
        self.calls.launch(callers.add_columns, *where, start, stop)

    def _sum_up(self, ks: range, sums_of: dict[int, _SumsOf], span: tuple[int, int]) -> None:
        """Add the parameter gradients of steps that the backward pass has not added itself."""
        tasks: list[Callable[[], None]] = []
        for k in ks:
            one, lanes = self.directions[k], self.lanes
            vectors = -(-one.summed // lanes)
            parts = even_slices(vectors, min(vectors, 2 * self.threads)) if vectors else []
            for part in () if self.has_sample_lanes else parts:
                rows = part.start * lanes, min(part.stop * lanes, one.summed)
                tasks.append(partial(self.add_grads, k, sums_of[k].dense, rows, span))
            for each, entries in zip(one.sparse, sums_of[k].entries, strict=True):
                for row in range(0, each.forward.rows, _TASK_ROWS):
                    rows = row, min(row + _TASK_ROWS, each.forward.rows)
                    tasks.append(partial(self.add_sparse_grads, k, each, entries, rows, span))
        if tasks:
            self.call_all(tasks)

    def _input_parts(self, below: Array | None) -> list[Array]:
        """Return one array per direction; their sum will be `below`, which is the first."""
        if below is None:
            return []
        return [below, *(part[: below.size].reshape(below.shape) for part in self._parts)]

    def _gates(self, k: int, span: tuple[int, int], slot: int) -> Gates:
        """Return the gradients in the slots from one on, over some steps."""
        one = self.directions[k]
        t = self.times(one, span) - self.first_gates(one, span)
        about = self.gates[k], self.segment, self.step_rows(one), one.units, self.group
        return Gates(*about, t, self.grads_first(one) + slot, self.has_grads[k])

    def add_grads(self, k: int, into: Sums, rows: tuple[int, int], span: tuple[int, int]) -> None:
        """Add gradients over some steps to rows of the sums of a direction."""
        one, terms = self.directions[k], max(self.batch, sums.BLOCK)
        x_at, at = self._places_of_factors(one, span)
        count = ((terms + TILE_ROWS + 1) * TILE_VECTORS + 1) * self.lanes
        count += terms * one.units + self.lanes
        room = self.calls.borrow(count, self.dtype)
        self.calls.launch(fill_with, room[: TILE_VECTORS * self.lanes], 0)
        states, cells = self.plane_of(self.befores, one), self.cells_of(one, self.before_cells)
        self.calls.launch(
            sums.sum_products,
            *(self._gates(k, span, 0), into),
            *(self.states[one.layer - 1], x_at, one.block, self.plane),
            *(states, cells, self.plane, at),
            *(self.batch, span[1] - span[0], room, *rows),
        )
        self.calls.give_back(room)

    def cells_of(self, one: Direction, cells: list[Array]) -> Array:
        """Return a direction's states after the first; there may be none."""
        return self.plane_of(cells, one) if one.states > 1 else cells[0]

    def add_sparse_grads(
        self, k: int, each: Product, entries: Array, rows: tuple[int, int], span: tuple[int, int]
    ) -> None:
        """Add gradients over some steps to the entries of some rows of a sparse matrix."""
        one, packing = self.directions[k], each.forward
        gates = self._gates(k, span, each.slot)
        x_at, at = self._places_of_factors(one, span)
        # The start of the first sample, and the distances between samples and between steps.
        if each.source == 0:
            b, begin, width = self.states[one.layer - 1], x_at, packing.block
        elif each.source == 1:
            b, begin, width = self.plane_of(self.befores, one), at, one.units
        else:
            b, width = self.cells_of(one, self.before_cells), one.units
            begin = (each.source - 2) * self.plane + at
        group, step = (self.steps + 2) * width, self.group * width
        if each.source < 0:
            b, step = self.gates[k], gates.kept * one.units * self.group
            group = gates.steps * gates.kept * one.units
            row = self.grads_first(one) + one.slots - 1 - each.source
            begin = gates.step * step + row * one.units * self.group
        begin += each.first * self.group
        stride = max(self.padded, sums.BLOCK) + 2 * self.lanes
        room = self.calls.borrow((rows[1] - rows[0] + packing.cols) * stride, self.dtype)
        self.calls.launch(
            sums.sum_sparse_products,
            *(gates, b, begin, group, step, packing.cols, packing.block, self.plane),
            *(self.padded, span[1] - span[0], each.first),
            *(packing.indptr, packing.indices, room, entries, *rows),
        )
        self.calls.give_back(room)


class StreamMemory(HostMemory):
    """The memory of a network whose states stay in it from one block of steps to the next.

    The first slot has the states before a block, and the steps of the memory are the most that a
    block has. Layers have one direction.
    """

    def begin(self, further: list[float]) -> None:
        """Take the memory, in which every sample has all steps, and further inputs are numbers."""
        self.allocate()
        none = np.zeros(0, np.int64)
        self.calls.launch(callers.lengths_in, self._all_samples(0), self.lengths, none)
        for k, value in enumerate(further):
            plane = self.further[k * self.plane : (k + 1) * self.plane]
            values = np.array([value], self.dtype)
            self.calls.launch(callers.place, values, np.zeros(self.plane, np.int64), plane)

    def advance(self, calls: Calls, x: Array, output: Array) -> None:
        """Compute the outputs of a block of steps, and keep the states behind the last one.

        Rows of the inputs may be longer than what this network reads.
        """
        self.calls, steps = calls, len(x)
        for ks in self.layers:
            caller = self.no_caller
            if ks.start == 0:
                caller = caller._replace(x=x.reshape(-1), cols=x.shape[2])
            if ks.stop == len(self.directions):
                caller = caller._replace(output=output.reshape(-1))
            self.for_each_group(ks, self._advance, caller, steps)

    def _advance(self, group: _Group, k: int, caller: Caller, steps: int) -> None:
        below = self.states[self.directions[k].layer - 1]
        about = group.sequence(k, (0, steps)), self.packed[k].forward, below
        self.calls.launch(kernels.advance, *about, caller, steps)

    def write_states(self, states: Array) -> None:
        """Write the states before the next block to an array of the caller's."""
        for k in range(len(self.directions)):
            self._write_states(k, self._state_parts(k), 0, [states])

    def read_states(self, states: Array) -> None:
        """Take over the states before the next block."""
        for k in range(len(self.directions)):
            self._read_states(k, self._state_parts(k), 0, [states])


class _SumsOf(NamedTuple):
    """Sums of a direction's parameter gradients: dense sums, and entries of sparse matrices."""

    dense: Sums
    entries: list[Array]


class _Group:
    """Some neighbouring samples, on which one thread at a time works."""

    def __init__(
        self, memory: HostMemory, first: int, samples: int, own: dict[str, Iterator[Array]]
    ) -> None:
        self.memory, self.first, self.samples = memory, first, samples
        self._number = len(memory.groups)
        self._scratch = [tuple(map(next, own.values())) for _ in memory.directions]

    def sequence(self, k: int, span: tuple[int, int]) -> Sequence:
        """Return this group's part of a direction for kernels, with the gates of some steps."""
        memory, one, weights = self.memory, self.memory.directions[k], self.memory.packed[k]
        products, parts, block, row_grads = self._scratch[k]
        step, renderer = memory.grad_step(one), one.renderer
        width, _, next_output = memory.columns_of(one)
        return Sequence(
            steps=memory.steps,
            back=one.back,
            units=one.units,
            batch=memory.padded,
            given=memory.batch,
            first=self.first,
            count=self.samples,
            samples=max(1, min(self.samples, memory.group)),
            sample_lanes=memory.has_sample_lanes,
            pairs=one.sample_rows == 2,
            lengths=memory.lengths,
            states=memory.plane_of(memory.states, one),
            width=width,
            next_output=next_output,
            inputs=one.inputs,
            cols=one.cols,
            block=one.block,
            jump=memory.plane,
            below_width=memory.widths[0] if one.layer == 1 else one.inputs,
            further=memory.further[k * one.further * memory.plane :],
            further_rows=np.array(renderer.further_rows, np.int64),
            further_width=memory.widths[0],
            further_column=memory.inputs + k * one.further * one.units,
            cells=memory.cells_of(one, memory.cells),
            cell_plane=memory.plane,
            others=one.states - 1,
            befores=memory.plane_of(memory.befores, one),
            before_cells=memory.cells_of(one, memory.before_cells),
            resets=memory.resets,
            gates=memory.gates[k],
            segment=memory.segment,
            begin=memory.first_gates(one, span),
            kept=memory.step_rows(one),
            gate_step=memory.gate_step(one, min(self.samples, memory.group)),
            grads=block if step else memory.gates[k],
            grad_step=step,
            grads_first=memory.grads_first(one),
            has_grads=memory.has_grads[k],
            products=products,
            stride=one.stride,
            spare=one.spare,
            parts=parts,
            zeros=memory.zeros,
            bias=weights.bias,
            rows=weights.rows,
            row_step=one.row_step(memory.group),
            row_grads=row_grads,
            row_sums=memory.row_sums[k],
            row_count=one.rows,
            carry=memory.carries[k],
            carry_step=memory.carry_step,
            forward=one.code.forward,
            backward=one.code.backward,
            stages=one.program.stages,
            slots=one.slots,
            begun=one.program.begun,
            multiplied=one.multiplied,
            state_row=min(renderer.state_rows.values(), default=0),
            kept_count=one.kept,
            kept_whole=sum(each not in one.program.uniform for each in one.program.kept),
            record=one.record,
            input_row=-1 if renderer.input_row is None else renderer.input_row,
            has_derived=any(each.grads for each in one.program.derived),
            helpers=memory.helpers,
            help=memory.help_of(self._number, one),
            # After a reset, a finite state does not show that earlier states are finite.
            pauses=min(one.pauses, STRICT) if len(memory.resets) else one.pauses,
        )


def _run(
    group: _Group,
    k: int,
    all_weights: list[Weights],
    span: tuple[int, int],
    *,
    is_again: bool = False,
) -> None:
    """Compute some states of one direction, in its order, and their gates."""
    memory, weights = group.memory, all_weights[k]
    one = memory.directions[k]
    memory.calls.launch(
        kernels.run,
        *(group.sequence(k, span), weights.forward, memory.states[one.layer - 1]),
        memory.no_caller._replace(ends=memory.ends[one.back]) if is_again else memory.caller(one),
        *span,
    )


def _back(
    group: _Group,
    k: int,
    all_weights: list[Weights],
    sums_of: dict[int, _SumsOf],
    above: Array,
    parts: list[Array],
    span: tuple[int, int],
) -> None:
    """Compute the gradients in slots and inputs of some steps of one direction."""
    memory = group.memory
    one, weights = memory.directions[k], all_weights[k]
    has_below = bool(parts) and one.reads_input
    below = parts[one.back].reshape(-1) if has_below else memory.no_caller.x
    about = group.sequence(k, span), weights.back, memory.states[one.layer - 1]
    flat = above.reshape(-1)[memory.columns_of(one)[1] :]
    if one.kept and not memory.keeps_gates:
        memory.calls.launch(kernels.find_ends, *about, flat, memory.ends[one.back], *span)
        _run(group, k, all_weights, span, is_again=True)
    gradients = flat, below, memory.in_further
    memory.calls.launch(kernels.back, *about, sums_of[k].dense, *gradients, *span)


def _listed(states: Array | list[Array]) -> list[Array]:
    return states if isinstance(states, list) else [states]


def _flat(param: Array) -> Array:
    """Return the numbers of a parameter."""
    flat: Array = for_kernels(param.reshape(-1), param.dtype)
    return flat
