"""The memory of a training step on the host: its sizes and its layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..execution.calls import LINE
from ..execution.threads import thread_count
from ..kernels.cpu.lanes import sample_lanes
from ..kernels.cpu.tiles import SAMPLE_VECTORS, SUM_ROWS, TILE_ROWS
from .arguments import DEFAULTS, Options
from .definition import Layers, width_of
from .loops import sharing, sums
from .loops.products import COLUMNS
from .packing import Direction

_LOTS, _LOT_STEPS = 16, 16  # separate sums of gradients, and the least steps of each
# Bytes of the weights of a step that fill the cache of a core.
_WIDE = 1 << 20
_SMALL = 1 << 22  # for fewer multiply-adds of a direction, other threads would come too late


class Extent(NamedTuple):
    """The shape of inputs, and the passes, that the memory of a training step is for.

    Attributes
    ----------
    steps, batch : int
        The numbers of steps and samples of the inputs.
    segment : int
        Steps whose gates are kept; 0 if there is no backward pass.
    keeps_samples : bool
        Whether a backward pass returns the factors of parameter gradients instead of their sums.
    has_resets : bool
        Whether there are resets.
    options : Options
        The options of the network, which say which states are outputs.
    is_stream : bool
        Whether a call runs only some of these steps, maybe one.
    """

    steps: int
    batch: int
    segment: int
    keeps_samples: bool = False
    has_resets: bool = False
    options: Options = DEFAULTS
    is_stream: bool = False


class HostSizes:
    """Sizes of all arrays on the host, and the places of steps, samples and slots in them.

    There is a slot for the states of each step, one before the first step, and one after the last;
    layer 0 is the input. The slots of one direction of a layer are contiguous, since two threads
    write the two directions.
    """

    directions: list[Direction]

    def __init__(self, network: Layers, directions: list[Direction], extent: Extent) -> None:
        steps, batch, segment, keeps_samples, has_resets, options, is_stream = extent
        self.directions, self.per_layer = directions, len(network.cells[0])
        self._keeps_samples, self._has_resets = keeps_samples, has_resets
        self.steps, self.batch = steps, batch
        # Without a backward pass, nothing is kept of a step.
        self.has_backward, self.segment = segment > 0, max(segment, 1)
        self.keeps_gates = segment >= steps
        # How many directions have their own gates: if not all gates are kept, layers take turns.
        self._gates_count = len(directions) if self.keeps_gates else self.per_layer
        one = directions[0]
        self.units, self.dtype, self.lanes = one.units, one.dtype, one.lanes
        self.inputs = network.input_size
        self.widths = [width_of(network), *(len(c) * c[0].hidden_size for c in network.cells)]
        # The number of a cell's states that are outputs.
        self._returns_layers = options.return_states == "layers"
        self._outputs = one.states if options.return_states else 1
        self.widths[-1] *= self._outputs * (len(network.cells) if self._returns_layers else 1)
        self._all_threads = thread_count()
        # Multiply-adds of a direction, in a call.
        work = batch * max(one.products, one.units) * (one.cols + one.units)
        work *= 1 if is_stream else steps
        self.threads = 1 if work < _SMALL else self._all_threads
        parts = max(1, self.threads // self.per_layer)
        self.has_sample_lanes, self._rows = one.sample_rows > 0, max(1, one.sample_rows)
        # Length of a row of inputs in this memory.
        self._cols = one.cols
        if self.has_sample_lanes:
            # Samples are in groups, and groups in lots with separate sums of gradients. Neither
            # depends on the number of threads.
            self.group = sample_lanes(self.dtype)
            groups = -(-batch // self.group)
            lots = max(1, min(groups, _LOTS, steps * groups // _LOT_STEPS))
            self.padded, self.lot = groups * self.group, max(1, -(-groups // lots)) * self.group
            self._samples = max(1, -(-self.padded // (parts * self.lot))) * self.lot
        else:
            # A group is at least half a tile; a whole tile if weights fill a core's cache.
            weights = max(one.products, one.units) * (one.cols + one.units) * self.dtype.itemsize
            fewest = TILE_ROWS if weights > _WIDE else TILE_ROWS // 2
            self._samples = max(1, -(-batch // min(parts, max(1, -(-batch // fewest)))))
            self.padded, self.group, self.lot = batch, self._samples, max(1, batch)
        # Threads without samples help with the products of the others.
        leaders = self.per_layer * len(self._spans())
        self.helpers = 0 if self.has_sample_lanes else max(0, self.threads // leaders - 1)
        # The distance between the states of both directions: whole groups and cache lines.
        line = LINE // self.dtype.itemsize
        self.plane = -(-self.padded * (steps + 2) * self.units // line) * line
        self.nbytes = sum(self.dtype.itemsize * count + LINE for _, count in self._sizes())
        self.nbytes += self._gates_count * (self.padded * segment + LINE)
        self.nbytes += self.per_layer * (8 * self.padded + LINE)
        words = leaders * sharing.words_of(self.helpers) if self.helpers else 0
        self.nbytes += 8 * words + LINE * leaders
        self.nbytes += has_resets * ((steps + 1) * self.padded + LINE)

    def _places_of(self, one: Direction) -> NDArray[np.int64]:
        """Return the indices of sparse matrices as places in an input of several directions."""
        places = one.places.copy()
        for row in one.tables[0].reshape(-1, len(COLUMNS)):
            each = dict(zip(COLUMNS, row.tolist(), strict=True))
            if each["is_sparse"] and each["source"] == 0 and each["blocks"] > 1:
                begin, end = each["index_at"], each["indptr_at"]
                block, column = np.divmod(places[begin:end], each["block"])
                places[begin:end] = block * (self.plane // self.group) + column
        return places

    def _spans(self) -> list[tuple[int, int]]:
        """Return the first sample and the number of samples of each group."""
        size, count = self._samples, self.padded
        return [(k, min(size, count - k)) for k in range(0, max(count, 1), size)]

    def _sizes(self) -> list[tuple[str, int]]:
        """Return the name and the number of elements of each array.

        Kernels read a few rows beyond the end, and do not use them.
        """
        rows, others = self.padded * (self.steps + 2), self.directions[0].states - 1
        if self.has_sample_lanes:
            tile = self._rows * SAMPLE_VECTORS
            widest = max(*self.widths[:-1], self.units, *(one.products for one in self.directions))
            more, zeros = 0, (widest + tile) * self.group
        else:
            more, zeros = self.lanes + 1, max(one.stride for one in self.directions)
        count = self.padded * self.units + self.lanes
        sizes = [("lengths", count), ("zeros", zeros)]
        carried = 1 + self._has_resets
        sizes += [("carries", carried * one.states * count) for one in self.directions]
        own = self.per_layer * self.plane + more * self.units
        sizes += [("states", (rows + more) * self._cols)]
        for name, size in (("states", own), ("cells", others * self.per_layer * self.plane + own)):
            size = size if others or name == "states" else 0
            sizes += [(name, size)] * (len(self.widths) - 1)
            if self._has_resets:
                sizes += [(f"{name} before", size)] * (len(self.widths) - 1)
        if self.widths[0] > self.inputs:
            planes = (self.widths[0] - self.inputs) // self.units
            sizes += [("further", planes * self.plane + more * self.units)]
        sizes = [(name, size + self.lanes) for name, size in sizes]
        gates = [
            self.segment * self.padded * one.units * self.step_rows(one) for one in self.directions
        ]
        rest = SUM_ROWS * self.group if self.has_sample_lanes else (more + 1) * self.units
        gates = [size + rest for size in gates]
        some = gates if self.keeps_gates else [max(gates)] * self._gates_count
        sizes += [("gates", size + self.lanes) for size in some]
        inner = max(self.widths[1:-1], default=0)
        sizes += [("grads", self.steps * self.batch * inner)] * min(2, len(self.widths) - 2)
        if self._adds_above:
            sizes += [("above", self.steps * self.batch * self.widths[-1])]
        if self.per_layer > 1:
            sizes += [("part", self.steps * self.batch * max(self.widths[:-1]))]
        for _, samples in self._spans():
            for one in self.directions:
                if self.has_sample_lanes:
                    products, part = zeros, self.group * self.units
                    parts = one.renderer.parts * part + tile * self.group + self.lanes
                else:
                    part = (-(-samples * one.units // self.lanes) + 2) * self.lanes
                    products = max((samples + self.lanes) * one.stride, part)
                    parts = one.renderer.parts * part
                grads = sums.STEPS * self.grad_step(one)
                rows_of = one.rows * one.row_step(self.group) + self.lanes
                sizes += [("products", products), ("parts", parts), ("block", grads)]
                sizes += [("row_grads", rows_of)]
        return sizes

    @property
    def carry_step(self) -> int:
        """The distance between the gradients in one state and in the next."""
        return self.padded * self.units + self.lanes

    @property
    def _adds_above(self) -> bool:
        """Whether gradients in outputs of a layer come from the caller and from the layer above."""
        return self._returns_layers and len(self.widths) > 2 and self.has_backward

    def columns_of(self, one: Direction) -> tuple[int, int, int]:
        """Return the places of a direction's outputs, and their gradients, in a row.

        These are the length of a row, the first column, and the distance between the columns of two
        states, or 0 if only the first state is an output.
        """
        if self._returns_layers:
            k = (one.layer - 1) * self.per_layer + one.back
            return self.widths[-1], k * one.states * self.units, self.units
        is_last = one.layer == len(self.widths) - 1
        step = self.per_layer * self.units if is_last and self._outputs > 1 else 0
        return self.widths[one.layer], one.back * self.units, step

    def _writes_output(self, one: Direction) -> bool:
        """Return whether a direction writes its outputs while it runs."""
        is_last = one.layer == len(self.widths) - 1
        return is_last and self.has_sample_lanes and self.widths[-1] == self.units

    def times(self, one: Direction, span: tuple[int, int]) -> int:
        """Return the first step in time of some steps that are given in a direction's order."""
        return self.steps - span[1] if one.back else span[0]

    def gate_step(self, one: Direction, samples: int) -> int:
        """Return the distance between the gates of two steps, for a number of samples."""
        return samples * self.step_rows(one) * one.units if self.has_backward else 0

    def first_gates(self, one: Direction, span: tuple[int, int]) -> int:
        """Return the step whose gates come first during work on some steps."""
        return 0 if self.keeps_gates else self.times(one, span)

    def grads_first(self, one: Direction) -> int:
        """Return which vector of a step is the first gradient, if all steps have gradients.

        In a cell of one stage, gradients may overwrite what is kept: each is written after that was
        read.
        """
        return one.kept if one.program.stages > 1 else 0

    def step_rows(self, one: Direction) -> int:
        """Return how many vectors of a step are kept, or gradients in their place."""
        if self.grad_step(one) > 0:
            return one.kept
        return max(one.kept, self.grads_first(one) + one.record)

    def grad_step(self, one: Direction) -> int:
        """Return the distance between the gradients in slots of two steps.

        Gradients are kept for a block of steps. If they are kept for all steps, in place of the
        gates, it is 0.
        """
        if not self.has_sample_lanes or one.sparse or self._keeps_samples:
            return 0
        # Not a power of two: caches are slow at these distances.
        return (-(-one.record * one.units // SUM_ROWS) * SUM_ROWS + 2) * self.group

    def _places_of_factors(self, one: Direction, span: tuple[int, int]) -> tuple[int, int]:
        """Return where the inputs of the first of some steps begin, and the states before it."""
        t = self.times(one, span)
        slot = self.group if self.has_sample_lanes else self.padded
        return (t + 1) * slot * one.block, (t + 2 * one.back) * slot * one.units
