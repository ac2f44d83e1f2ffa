"""The layout of a cell's parameters and their gradients in memory, for CPU kernels.

All parameters of a cell form one vector. An order says where each of its numbers goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..execution.calls import LINE, Calls
from ..graph.operations import Reduction, symbol
from ..kernels.cpu.copies import fill_with
from ..kernels.cpu.lanes import lanes as lanes_of
from ..kernels.cpu.lanes import sample_lanes
from ..kernels.cpu.tiles import SAMPLE_VECTORS, SUM_ROWS, TILE_VECTORS
from ..locks import cached_property
from .bounds import pauses_of
from .compiled import code_of, renderer_of
from .definition import CellLike, bias_name, declared
from .heads import whole_of
from .loops import callers
from .loops.pauses import STRICT
from .loops.products import MAXIMUM, REDUCTIONS, SUM, Products
from .program import INPUT, CellProgram, Slot, Term

Array = NDArray[Any]
Order = NDArray[np.int64]
_SPARSE = 0.25  # below this share of kept weights, only these are stored
# Samples are lanes if a step has at most this many vectors of products, and groups are at least
# this full. With reductions over units there may be more vectors, since each lane has its own sum.
_FEW_VECTORS, _MANY_VECTORS, _FULL = 8, 128, 0.75


def is_sparse(kept: NDArray[np.bool_]) -> bool:
    """Return whether only the kept entries of a matrix are stored."""
    return bool(kept.sum() < _SPARSE * kept.size)


def sample_rows(program: CellProgram, units: int, dtype: np.dtype[Any], batch: int) -> int:
    """Return how many rows of samples share a vector's lanes; 0 if lanes are units.

    Lanes are samples if a step has few products, so that vectors of units would be partly empty or
    wait for each other, and if samples nearly fill whole groups for each of two threads.
    """
    lanes, group = lanes_of(dtype), sample_lanes(dtype)
    sizes = [units]
    for heads, *sides in program.partial.values():
        sizes += [units // heads, *sides]
    # Without AVX-512 there are too few registers for a tile, and units fill the shorter vectors.
    most = _MANY_VECTORS if program.reductions else _FEW_VECTORS
    if lanes == group or len(program.slots) * units > most * lanes:
        return 0
    whole = -(-batch // (2 * group)) * 2 * group
    # Both rows of a pair belong to one head.
    rows = 1 if any(size % 2 for size in sizes) else 2
    return rows if 0 < _FULL * whole <= batch else 0


def computed_samples(program: CellProgram, units: int, dtype: np.dtype[Any], batch: int) -> int:
    """Return how many samples kernels compute: whole groups if samples are lanes."""
    group = sample_lanes(dtype) if sample_rows(program, units, dtype, batch) else 1
    return -(-batch // group) * group


class Packing:
    """The order in which kernels read a matrix.

    If few of its weights are kept, only these entries are stored.

    Parameters
    ----------
    places : ndarray of int, shape (rows, cols)
        The places of the entries among all parameters of the cell.
    kept : ndarray of bool, same shape
        Which of them are not pruned.
    lanes : int
        Rows in a vector.
    block : int
        How many columns read neighbouring numbers; 0 means all.
    sample_rows : int
        How many rows' samples are the lanes of a vector; 0 if lanes are units.
    none : int
        A place after all parameters, which holds 0.
    """

    def __init__(
        self,
        places: Order,
        kept: NDArray[np.bool_],
        lanes: int,
        block: int,
        sample_rows: int,
        none: int,
    ) -> None:
        self.rows, cols = places.shape
        # A vector holds the samples of two columns; the last one may have one column.
        self.cols = cols + cols % 2 if sample_rows == 2 else cols
        self.block = block or self.cols
        self.vectors = -(-self.rows // lanes)
        # Unless lanes are the samples of one row, a sparse block is padded too.
        self.is_sparse = sample_rows == 1 and is_sparse(kept)
        self.tile = size = TILE_VECTORS * lanes
        if sample_rows:
            # Few rows pad the last tile, and there are few tiles.
            heights = range(4, SAMPLE_VECTORS + 1, 4)
            vectors = -(-self.rows // sample_rows)
            best = min(heights, key=lambda height: -(-vectors // height) * (height + 2))
            self.tile = size = sample_rows * best
        self.indices = self.indptr = np.zeros(0, np.int64)
        self.size = -(-self.rows // size) * size * self.cols
        # Dense blocks of parameters are copied; an order places all other entries.
        self.order: Order | None = None
        if self.is_sparse:
            self.order = places[kept]
            self.indices = np.ascontiguousarray(np.nonzero(kept)[1])
            self.indptr = np.concatenate([[0], kept.sum(axis=1).cumsum()])
            self.size = len(self.order)
        elif not kept.all():
            # Pruned entries and padding read the zero after the parameters.
            filled = np.full((-(-self.rows // size) * size, self.cols), none)
            filled[: self.rows, :cols] = np.where(kept, places, none)
            tiles = [filled[row : row + size].T.reshape(-1) for row in range(0, len(filled), size)]
            self.order = np.concatenate(tiles)
        self._given_cols = cols

    def gaps(self) -> list[list[int]]:
        """Return the padding of tiles, which is 0: its place, count, distance and length.

        The matrix begins with 0.
        """
        gaps, tile = [], self.tile
        tiles, more = -(-self.rows // tile), -self.rows % tile
        if more:
            last = (tiles - 1) * tile * self.cols
            gaps.append([last + tile - more, self.cols, tile, more])
        if self.cols > self._given_cols:
            gaps.append([(self.cols - 1) * tile, tiles, tile * self.cols, tile])
        return gaps

    @property
    def fills(self) -> bool:
        """Whether the matrix pads its own last tile or vector."""
        return bool(self.rows % self.tile == 0)


class Product(NamedTuple):
    """A product of a step, and the packing of its matrix for both passes.

    Attributes
    ----------
    stage : int
        The stage in which it is added to slots.
    source : int
        What it multiplies: 0 the input, 1 + k the state k, -1 - a the argument a.
    slot, slots : int
        The first slot, and the number of slots.
    first : int
        The first unit of its head, if it belongs to one head, whose slots are not neighbours; 0 for
        all units.
    forward, back : Packing
        The matrix, and its transpose.
    places : ndarray of int
        As for `forward`.
    kept : ndarray of bool
        Likewise.
    terms : list of Term
        The blocks of parameters that form its rows, one for each slot.
    """

    stage: int
    source: int
    slot: int
    slots: int
    first: int
    forward: Packing
    back: Packing
    places: Order
    kept: NDArray[np.bool_]
    terms: list[Term]

    @property
    def height(self) -> int:
        """How many units it computes."""
        height: int = self.forward.rows // self.slots
        return height


class Reduced(NamedTuple):
    """A reduction over units, which has no parameters.

    Attributes
    ----------
    stage, source, slot : int
        As of a :class:`Product`.
    kind : int
        Its number among :data:`~sparsescan.recurrent.loops.products.REDUCTIONS`.
    size : int
        Units of a head.
    """

    stage: int
    source: int
    slot: int
    kind: int
    size: int


class Weights(NamedTuple):
    """The parameters of a cell, as kernels read them.

    Attributes
    ----------
    params : ndarray
        All parameters, one after the other.
    forward, back : Products
        The products of both passes, which share one array of values.
    bias : ndarray
        The initial value of each slot.
    rows : ndarray
        Vectors of parameters, repeated for all samples of a group.
    """

    params: Array
    forward: Products
    back: Products
    bias: Array
    rows: Array


class Direction:
    """One direction of one layer: a cell, and how its parameters are packed for a dtype.

    Parameters
    ----------
    cell : Cell
        The cell.
    layer, back : int
        The layer, counted from 1; and 1 if the last step comes first, else 0.
    dtype : dtype
        Dtype of all numbers.
    sample_rows : int
        How many rows' samples are the lanes of a vector; 0 if lanes are units.
    """

    def __init__(
        self, cell: CellLike, layer: int, back: int, dtype: np.dtype[Any], *, sample_rows: int
    ) -> None:
        self.cell, self.layer, self.back, self.dtype = cell, layer, back, dtype
        self.sample_rows, self.program = sample_rows, cell.program
        self.lanes, self.units, self.inputs = lanes_of(dtype), cell.hidden_size, cell.input_size
        self.renderer = renderer_of(self.program)
        self.code = code_of(self.program, type(cell).__name__, dtype)
        self.slots, self.states = len(self.program.slots), self.program.states
        self.rows, self.further = len(self.program.rows), len(self.program.further_grads)
        # Numbers of all slots, and of the inputs with padding.
        self.products = self.slots * self.units
        self.cols = self.inputs + self.inputs % 2 if sample_rows == 2 else self.inputs
        self.kept, self.record = len(self.program.kept), self.slots + len(self.program.arguments)
        # The input of an upper layer is the states of all directions of the layer below.
        self.block = self.units if layer > 1 else self.cols
        self._offsets, self._none = {}, 0
        for name, shape in cell.shapes.items():
            self._offsets[name] = self._none
            self._none += math.prod(shape)
        self._parameters = declared(type(cell))
        self.multiplied = np.array(sorted(self.renderer.state_rows), np.int64)
        # In the order of the forward pass.
        self._products = list(self._find_runs())
        self.runs = [each for each in self._products if isinstance(each, Product)]
        # A NaN does not pass a missing entry of a sparse matrix, or of one with fewer columns.
        self.pauses = pauses_of(self.program)
        if self.sparse or any(any(sides) for _, *sides in self.program.partial.values()):
            self.pauses = min(self.pauses, STRICT)
        self._order_values()
        self._bias_orders = list(self._find_biases())
        # Parameters that are placed number by number.
        self._placed = {name for each in self.runs for name in self._named_in(each)}
        self._placed |= {name for name, shape in cell.shapes.items() if len(shape) < 2}
        # The distance between the products of two samples: each product fills whole vectors, and
        # there is room for one more, which is added later.
        widest = max([each.forward.rows for each in self.runs], default=0)
        whole = -(-max(self.products, self.units, self.inputs) // self.lanes) + 1
        self.spare = whole * self.lanes
        self.stride = self.spare + (-(-widest // self.lanes) + 1) * self.lanes
        # Rows of the sums of gradients: those of slots with biases, and all rows with sums.
        self.biased = max([1 + k for k, _, _ in self._bias_places()], default=0) * self.units
        ends = [(each.slot + each.slots) * self.units for each in self.runs]
        self.summed = max([self.biased, *ends])
        self.sum_stride = -(-self.products // self.lanes) * self.lanes
        if sample_rows:
            self.sum_stride = -(-self.sum_stride // SUM_ROWS) * SUM_ROWS

    @property
    def reads_input(self) -> bool:
        """Whether the step reads the input at all."""
        return self.renderer.input_row is not None or any(not run.source for run in self.runs)

    @property
    def sparse(self) -> list[Product]:
        """The products with matrices that are stored by their entries."""
        return [each for each in self.runs if each.forward.is_sparse]

    # -- Products -----------------------------------------------------------------------------

    def _find_runs(self) -> Iterator[Product | Reduced]:
        """Yield the products of a step in order, each of neighbouring slots with one vector."""
        program = self.program
        terms: dict[Any, dict[int, list[Term]]] = {}
        for k, slot in enumerate(program.slots):
            for term in slot.terms:
                which = self._heads_of(term)
                terms.setdefault((term.argument, which), {}).setdefault(k, []).append(term)
        found = []
        for (argument, _), by_slot in terms.items():
            if argument is INPUT:
                stage, source = 0, 0
            elif argument.operation == "state":
                stage, source = 0, 1 + argument.details[0]
            else:
                stage = 1 + program.stage_of(argument)
                source = -1 - program.arguments.index(argument)
            while by_slot:
                run: list[int] = []
                for k in sorted(by_slot):
                    if run and k != run[-1] + 1:
                        break
                    run.append(k)
                own = [by_slot[k].pop(0) for k in run]
                for k in run:
                    if not by_slot[k]:
                        del by_slot[k]
                found.append((stage, source, run, own))
        # Products with the input come first; the first of them begins with the first slot.
        found.sort(key=lambda each: (each[0], each[1] != 0, each[2][0], each[1]))
        for stage, source, run, own in found:
            reduction = own[0].matrix
            if isinstance(reduction, Reduction):
                kind, size = REDUCTIONS.index(reduction.operation), self.units // reduction.heads
                yield from (Reduced(stage, source, slot, kind, size) for slot in run)
                continue
            block = self.block if source == 0 and self.layer > 1 else 0
            heads, height, _ = self._heads_of(own[0])
            # Each head of a slot, and each partial matrix, has its own product.
            ranges = [(run[0], len(run), own)]
            if heads > 1 or height:
                ranges = [(k, 1, [term]) for k, term in zip(run, own, strict=True)]
            for first_slot, slots, those in ranges:
                parts = [self._places(term) for term in those]
                places, kept = (np.concatenate(each) for each in zip(*parts, strict=True))
                height = len(places) // heads
                for first in range(0, len(places), height):
                    rows = slice(first, first + height)
                    where = stage, source, first_slot, slots, first
                    yield self._product(where, places[rows], kept[rows], those, block)

    def _heads_of(self, term: Term) -> Any:
        """Return heads, rows and columns of a product, or the reduction in its place.

        A matrix that multiplies the input is a whole matrix, with zeros.
        """
        if isinstance(term.matrix, Reduction):
            return term.matrix
        heads, rows, cols = self.program.partial.get(term.matrix, (1, 0, 0))
        if term.argument is INPUT:
            return 1, 0, 0
        return heads, *((cols, rows) if term.is_transposed else (rows, cols))

    def _gate_rows(self, name: str) -> int:
        """Return how many rows a gate of a matrix has."""
        return self.cell.shapes[name][0] // self._parameters[name].blocks

    def _product(
        self,
        about: tuple[int, int, int, int, int],
        places: Order,
        kept: NDArray[np.bool_],
        terms: list[Term],
        block: int,
    ) -> Product:
        """Return a :class:`Product` with these first attributes, of a matrix at some places."""
        height, own = len(places) // about[3], (self.sample_rows, self._none)
        return Product(
            *about,
            Packing(places, kept, self.lanes, block, *own),
            Packing(np.ascontiguousarray(places.T), kept.T, self.lanes, height, *own),
            *(places, kept, terms),
        )

    @staticmethod
    def _named_in(each: Product) -> Iterator[str]:
        """Yield the matrices of a product that are not copied block by block."""
        if each.forward.order is not None or each.back.order is not None:
            for term in each.terms:
                yield term.matrix

    def _places(self, term: Term) -> tuple[Order, NDArray[np.bool_]]:
        """Return the places of a matrix's entries among all parameters, and which are kept."""
        shape, mask = self.cell.shapes[term.matrix], self.cell.masks[term.matrix]
        height = self._gate_rows(term.matrix)
        rows = slice(term.gate * height, (term.gate + 1) * height)
        places = (self._offsets[term.matrix] + np.arange(math.prod(shape)).reshape(shape))[rows]
        kept = np.ones(shape, bool)[rows] if mask is None else mask.on(np)[rows]
        heads = self.program.heads_of(term.matrix)
        if term.matrix in self.program.partial and term.argument is INPUT:
            places = whole_of(np, places, heads, self.units, self._none)
            kept, heads = whole_of(np, kept, heads, self.units), 1
        if not term.is_transposed:
            return places, kept
        own = zip(np.split(places, heads), np.split(kept, heads), strict=True)
        turned = [(place.T, keeps.T) for place, keeps in own]
        places, kept = (np.concatenate(each) for each in zip(*turned, strict=True))
        return places, kept

    def _order_values(self) -> None:
        """Place all matrices of both passes one after the other, each on a new cache line."""
        line = LINE // self.dtype.itemsize
        self._sizes: list[int] = []
        self._orders: list[tuple[int, Order]] = []
        self._gaps: list[list[int]] = []
        self._blocks: dict[tuple[str, bool], list[list[int]]] = {}
        places = []
        tables: tuple[list[list[int]], list[list[int]]] = [], []
        values = indices = 0
        rows_back = self.renderer.parts
        returned: dict[tuple[int, int], Any] = {}
        back = sorted(
            self._products,
            # Products for gradients in arguments, from the last stage on; then in states, then in
            # inputs.
            key=lambda each: (-self._back_stage(each), self._row_back(each) if each.source else 0),
        )
        for which, runs in enumerate((self._products, back)):
            self._sizes.append(values)
            for each in runs:
                stage = self._back_stage(each) if which else each.stage
                to = self._row_back(each) if which and each.source else 0
                source = each.source
                if source < 0:
                    source -= self.slots  # row of the parts
                # All heads of a slot begin together.
                term: Any = each if isinstance(each, Reduced) else each.terms
                begins = returned.setdefault((which, each.source), term) is term
                if isinstance(each, Reduced):
                    # A maximum passes no gradient, so it is 0.
                    kind = SUM if which and each.kind == MAXIMUM else each.kind
                    matrix = [self.units, self.units, 0, 1, each.size, 0, values, indices, indices]
                    begins = begins if which else each.slot >= self.program.begun
                    result = (
                        symbol("back", -1 - each.source) if which else symbol("slot", each.slot)
                    )
                    uniform = each.source < 0 and result in self.program.uniform
                    about = [stage, source, each.slot, to, begins, False, kind, 0, True, uniform]
                    tables[which].append([*about, False, *matrix])
                    continue
                packing = each.back if which else each.forward
                heads = self._heads_of(each.terms[0])[0]
                # The units that follow may belong to the next head.
                height = packing.rows if which else each.height
                has_next = bool(each.source) and each.first + height < self.units
                spills = not packing.fills and (
                    has_next
                    or (
                        to + 1 < rows_back
                        if which
                        else each.stage > 0 or each.slot + each.slots < self.slots
                    )
                )
                if not self.sample_rows:
                    is_read = has_next or not which
                    spills = is_read and packing.rows % self.lanes > 0 and spills
                tables[which].append(
                    [
                        *(stage, source, each.slot, to, begins, spills, 0, each.first),
                        *(each.first + each.height == heads * each.height, False),
                        *(packing.is_sparse, packing.rows, packing.cols, packing.vectors),
                        *(packing.cols // packing.block, packing.block, packing.tile),
                        *(values, indices, indices + len(packing.indices)),
                    ]
                )
                filled = -(-packing.size // line) * line
                self._gaps.append([values + packing.size, 1, 0, filled - packing.size])
                if packing.order is None:
                    self._gaps += [[values + at, *gap] for at, *gap in packing.gaps()]
                    self._find_blocks(each, packing, values)
                else:
                    self._orders.append((values, packing.order))
                values += filled
                places += [packing.indices, packing.indptr]
                indices += len(packing.indices) + len(packing.indptr)
        none = np.zeros(0, np.int64)
        # How many numbers the forward pass has, and how many in all.
        self._sizes = [self._sizes[1], values]
        self._block_tables = [self._tables_of(has_backward) for has_backward in (False, True)]
        self.places: Order = np.concatenate([none, *places])
        self.tables = [np.array(rows, np.int64).reshape(-1) for rows in tables]

    def _find_blocks(self, each: Product, packing: Packing, to: int) -> None:
        """Record the blocks of parameters in a matrix that begins at `to`."""
        height, width, is_back = each.height, each.places.shape[1], packing is each.back
        for k, term in enumerate(each.terms):
            cols = self.cell.shapes[term.matrix][1]
            # In a transposed block, and in the backward pass, rows and columns are exchanged.
            turns = term.is_transposed == is_back
            row, col = (0, k * height) if is_back else (k * height, 0)
            size = (width, height) if is_back else (height, width)
            at = (term.gate * self._gate_rows(term.matrix) + each.first) * cols
            block = [row, col, *size, turns, at, cols]
            rows = self._blocks.setdefault((term.matrix, is_back), [])
            rows.append([*block, to, packing.cols, packing.tile])

    def _back_stage(self, each: Product | Reduced) -> int:
        """Return the stage before whose backward part a product is made; -1 and -2: after all."""
        if each.source < 0:
            return self.program.back_stage_of(symbol("back", -1 - each.source))
        return -1 if each.source else -2

    def _row_back(self, each: Product | Reduced) -> int:
        """Return the row of the parts with the gradient in what a product multiplies."""
        if each.source < 0:
            return -1 - each.source
        return self.renderer.state_rows[each.source - 1]

    # -- Vectors ------------------------------------------------------------------------------

    def _bias_places(self) -> Iterator[tuple[int, str, int]]:
        """Yield each slot, and the parameters of its initial value, by name and gate."""
        for k, slot in enumerate(self.program.slots):
            for name, gate in self._biases_of(slot):
                yield k, name, gate

    def _biases_of(self, slot: Slot) -> Iterator[tuple[str, int]]:
        for term in slot.terms:
            if isinstance(term.matrix, Reduction):
                continue
            biased = self._parameters[term.matrix].biased
            name = bias_name(term.matrix)
            if name in self._offsets and term.gate in biased and not term.is_transposed:
                yield name, biased.index(term.gate)
        yield from slot.vectors

    def _find_biases(self) -> Iterator[Order]:
        """Yield orders whose numbers add up to the initial value of each slot."""
        # Whole vectors or tiles are read; the excess is not used.
        copies, rows, more = 1, 1, 2 * self.lanes
        if self.sample_rows:
            copies, rows = sample_lanes(self.dtype), self.sample_rows
            more = rows * SAMPLE_VECTORS
        by_slot: dict[int, list[tuple[str, int]]] = {}
        for k, name, gate in self._bias_places():
            by_slot.setdefault(k, []).append((name, gate))
        depth = max(map(len, by_slot.values()), default=0)
        for level in range(max(depth, 1)):
            order = np.full((self.slots, self.units), self._none)
            for k, names in by_slot.items():
                if level < len(names):
                    order[k] = self._vector_places(*names[level])
            padded = np.append(order, np.full(more + self.products % rows, self._none))
            yield padded.reshape(-1, 1, rows).repeat(copies, axis=1).ravel()

    def _vector_places(self, name: str, gate: int) -> Order:
        return self._offsets[name] + gate * self.units + np.arange(self.units)

    def row_step(self, group: int) -> int:
        """Return the distance between two rows of parameters, for a number of samples."""
        return (-(-group * self.units // self.lanes) + 1) * self.lanes

    def row_order(self, group: int) -> Order:
        """Return the order of the rows of parameters for all samples of a group."""
        order = np.full((self.rows, self.row_step(group)), self._none)
        for r, row in enumerate(self.program.rows):
            if row.operation == "derived":
                continue
            name, gate = row.details
            if row.operation == "scalar":
                own = np.full(self.units, self._offsets[name])
            else:
                own = self._vector_places(name, gate)
            if self.sample_rows:
                per = self.sample_rows
                own = own.reshape(-1, 1, per).repeat(sample_lanes(self.dtype), axis=1).ravel()
            else:
                own = np.tile(own, group)
            order[r, : len(own)] = own
        return order.ravel()

    # -- Memory -------------------------------------------------------------------------------

    def room(self, calls: Calls, group: int, has_backward: bool) -> Weights:
        """Take memory for the parameters, as kernels read them."""
        values = calls.room(max(1, self._sizes[has_backward]), self.dtype)
        forward, back = (Products(table, values, self.places) for table in self.tables)
        return Weights(
            calls.room(self._none, self.dtype),
            *(forward, back),
            calls.room(len(self._bias_orders[0]), self.dtype),
            calls.room(self.rows * self.row_step(group) + self.lanes, self.dtype),
        )

    def pack(
        self, calls: Calls, room: Weights, params: list[Array], row_order: Order, has_backward: bool
    ) -> None:
        """Write the cell's parameters to the memory of :meth:`room`.

        Without a backward pass, its parts are left out.
        """
        values, size = room.forward.values, self._sizes[has_backward]
        gaps, blocks = self._block_tables[has_backward]
        calls.launch(callers.clear_places, gaps, values)
        for param, (name, at) in zip(params, self._offsets.items(), strict=True):
            own = param
            if name in self._placed or param.dtype != self.dtype:
                own = room.params[at : at + len(param)]
                calls.launch(callers.take_over, param, room.params, at)
            if name in blocks:
                calls.launch(callers.pack, own, blocks[name], values)
        for at, order in self._orders:
            if at < size:
                calls.launch(callers.place, room.params, order, values[at : at + len(order)])
        for k, order in enumerate(self._bias_orders):
            write = callers.add_placed if k else callers.place
            calls.launch(write, room.params, order, room.bias)
        if self.rows:
            calls.launch(callers.place, room.params, row_order, room.rows)

    def _tables_of(self, has_backward: bool) -> tuple[Order, dict[str, Order]]:
        """Return tables of padding and of the blocks of each parameter."""
        size, found = self._sizes[has_backward], dict[str, list[list[int]]]()
        gaps = [each for each in self._gaps if each[0] < size]
        for (name, is_back), rows in self._blocks.items():
            if has_backward or not is_back:
                found.setdefault(name, []).extend(rows)
        tables = {name: np.array(rows, np.int64).reshape(-1) for name, rows in found.items()}
        return np.array(gaps, np.int64).reshape(-1), tables

    # -- Gradients ----------------------------------------------------------------------------

    @cached_property
    def sum_table(self) -> tuple[NDArray[np.int64], int]:
        """Return the table of dense sums for kernels, and their total number of elements."""
        table, size = list[list[int]](), 0
        whole = max(self.lanes, SUM_ROWS)
        for each in self.runs:
            if not each.forward.is_sparse:
                first, cols = each.slot * self.units + each.first, each.forward.cols
                end, at = first + each.forward.rows, size
                # Heads that fill whole vectors have sums in other rows of the same columns.
                is_beside = table and each.height < self.units and each.height % whole == 0
                is_beside = is_beside and end - first == table[-1][1] - table[-1][0]
                if is_beside and table[-1][1] <= first and table[-1][3] == cols:
                    at = table[-1][4]
                else:
                    size += cols * self.sum_stride
                table.append([first, end, each.source, cols, at, each.first])
        return np.array(table, np.int64).reshape(-1, 6), size

    @cached_property
    def grad_orders(self) -> dict[str, list[tuple[str, int, Order]]]:
        """Return the places of each parameter's gradient in the sums.

        The kinds of sums are ``out``, by columns, with places of entries; ``rows`` of all slots;
        ``entries`` of a sparse product, by its number among sparse products; ``units``, for a row
        of parameters; and ``blocks``, with a table that :meth:`_grad_blocks` describes.
        """
        blocks: list[tuple[Product, int]] = []
        found: dict[str, list[tuple[str, int, Order]]] = {name: [] for name in self._offsets}
        table, _ = self.sum_table
        dense = iter(table)
        number = 0
        for each in self.runs:
            if each.forward.is_sparse:
                assert each.forward.order is not None
                for name, own in self._parts_of(each.forward.order):
                    found[name].append(("entries", number, own))
                number += 1
                continue
            first, _, _, _, at, _ = next(dense)
            rows, cols = each.places.shape
            if each.kept.all():
                blocks.append((each, at + first))
                continue
            sums = at + first + np.arange(rows)[:, None] + np.arange(cols) * self.sum_stride
            for name, order in self._orders_of(each, sums):
                found[name].append(("out", 0, order))
        for name, order in self._bias_sums():
            found[name].append(("rows", 0, order))
        for r, row in enumerate(self.program.rows):
            if row.operation != "derived":
                name, gate = row.details
                order = np.full(math.prod(self.cell.shapes[name]), -1)
                if row.operation == "vector":
                    units = np.arange(self.units)
                    order[gate * self.units + units] = r * self.units + units
                found[name].append(("units", r, order))
        for name, levels in self._grad_blocks(blocks).items():
            size = sum(row[3] * row[4] for row in levels[0].values())
            whole = size == math.prod(self.cell.shapes[name])
            if not found[name] and not whole:
                found[name].append(("none", 0, np.zeros(0, np.int64)))
            for level in levels:
                rows_of = np.array(list(level.values()), np.int64).reshape(-1)
                found[name].append(("blocks", 0, rows_of))
        return found

    def _grad_blocks(
        self, products: list[tuple[Product, int]]
    ) -> dict[str, list[dict[tuple[int, int], list[int]]]]:
        """Return, for the matrices of products, tables of blocks by gates and heads.

        Each product comes with the start of its sums. A gate that is used several times has a row
        in as many tables.
        """
        found: dict[str, list[dict[tuple[int, int], list[int]]]] = {}
        for each, at in products:
            for k, term in enumerate(each.terms):
                cols = self.cell.shapes[term.matrix][1]
                steps = (1, cols) if term.is_transposed else (cols, 1)
                sums_at = at + k * each.height
                first = (term.gate * self._gate_rows(term.matrix) + each.first) * cols
                row = [first, *steps, each.height, each.places.shape[1]]
                key, levels = (term.gate, each.first), found.setdefault(term.matrix, [])
                free = [level for level in levels if key not in level]
                if not free:
                    free = [{}]
                    levels += free
                free[0][key] = [*row, sums_at, self.sum_stride]
        return found

    def places_in(self, sums: list[Order], rows: int, units: int) -> dict[str, Order]:
        """Return the places whose numbers add up to the gradient of each parameter.

        Each number of a parameter has equally many places; a negative place means 0.

        Parameters
        ----------
        sums : list of ndarray of int, shape (rows, cols)
            The places of the sums of each product, without gaps.
        rows, units : int
            Where the sums of all slots begin, and those of all rows of parameters.
        """
        found: dict[str, list[Order]] = {name: [] for name in self._offsets}
        for each, places in zip(self.runs, sums, strict=True):
            for name, order in self._orders_of(each, places):
                found[name].append(order)
        for name, order in self._bias_sums():
            found[name].append(np.where(order < 0, -1, rows + order))
        for r, row in enumerate(self.program.rows):
            own = units + r * self.units + np.arange(self.units)
            if row.operation == "vector":
                name, gate = row.details
                order = np.full(math.prod(self.cell.shapes[name]), -1)
                order[gate * self.units : (gate + 1) * self.units] = own
                found[name].append(order)
            elif row.operation == "scalar":
                found[row.details[0]] += list(own[:, None])
        return {
            name: np.stack(orders, 1) if orders else np.zeros((math.prod(shape), 0), np.int64)
            for (name, orders), shape in zip(found.items(), self.cell.shapes.values(), strict=True)
        }

    def _orders_of(self, each: Product, sums: Order) -> Iterator[tuple[str, Order]]:
        """Yield, for the parameters of a product, the places of the sums of entries, or -1."""
        sums = np.where(each.kept, sums, -1)
        rows = len(sums)
        for name, start, count in self._spans(each.places):
            orders: list[Order] = []
            for block in range(0, rows, self.units):
                some = slice(block, block + self.units)
                inside = (each.places[some] >= start) & (each.places[some] < start + count)
                own, to = sums[some][inside], each.places[some][inside] - start
                # A matrix may be used twice.
                free = [order for order in orders if (order[to] < 0).all()]
                if not free:
                    free = [np.full(count, -1)]
                    orders += free
                free[0][to] = own
            for order in orders:
                yield name, order

    def _bias_sums(self) -> Iterator[tuple[str, Order]]:
        """Yield, for each bias and vector that slots begin with, the places of the slots' sums."""
        units = np.arange(self.units)
        for k, name, gate in self._bias_places():
            order = np.full(math.prod(self.cell.shapes[name]), -1)
            order[gate * self.units + units] = k * self.units + units
            yield name, order

    def _spans(self, places: Order) -> Iterator[tuple[str, int, int]]:
        """Yield the parameters that contain places: name, start and length."""
        for name, start in self._offsets.items():
            count = math.prod(self.cell.shapes[name])
            if ((places >= start) & (places < start + count)).any():
                yield name, start, count

    def _parts_of(self, order: Order) -> Iterator[tuple[str, Order]]:
        """Yield, for each parameter that contains entries, their places in it, or -1."""
        for name, start, count in self._spans(order):
            inside = (order >= start) & (order < start + count)
            yield name, np.where(inside, order - start, -1)

    def param_grads(
        self,
        calls: Calls,
        k: int,
        orders: dict[str, list[tuple[str, int, Order]]],
        sums: dict[str, tuple[Array, int, int]],
        entries: list[Array],
    ) -> dict[str, Array]:
        """Return the gradients of the parameters by name, as results of direction `k`.

        For each kind of sums, `sums` has the array, the number of its parts, and their size.
        """
        grads = {}
        for name, shape in self.cell.shapes.items():
            grad = grads[name] = calls.result(f"{name} {k}", shape, self.dtype)
            flat, begins = grad.reshape(-1), True
            for kind, which, order in orders[name]:
                if kind == "none":
                    calls.launch(fill_with, flat, 0)
                elif kind == "blocks":
                    calls.launch(callers.total_blocks, *sums["out"], order, begins, flat)
                elif kind == "entries":
                    calls.launch(callers.put_grads, entries[which], order, begins, flat)
                elif kind == "units" and not shape:
                    about = *sums[kind], which * self.units, self.units
                    calls.launch(callers.total_row, *about, begins, flat)
                else:
                    calls.launch(callers.total_grads, *sums[kind], order, begins, flat)
                begins = False
            if begins:
                calls.launch(fill_with, flat, 0)
        return grads
