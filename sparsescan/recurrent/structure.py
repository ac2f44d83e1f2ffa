"""Places in the arrays and Jacobians of a cell of some size and masks: no values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import Mirrored, check_memory
from ..graph.expressions import topological
from ..graph.known import Known, is_zero, known_of
from ..graph.operations import Node, Reduction, symbol
from ..locks import cached_property
from ..symbolic.implicit import ImplicitPattern
from ..symbolic.pattern import Pattern, keys_of, of_keys, of_mask, product, rows_of
from .heads import whole_of
from .linear import ONE, Factors, Key, factors, key_of
from .program import INPUT, CellProgram, Slot
from .render.numpy import ArrayCode

# From this share of entries on, weights are multiplied as a dense matrix.
DENSE = 0.35
# Sums for slots are computed together, over all columns of rows, if they need at least this share
# of the products.
_TOGETHER = 0.6

Indices = NDArray[np.int64]


class Sum(NamedTuple):
    """The terms that a slot is the sum of.

    Attributes
    ----------
    terms : list of (Key, slice)
        Which matrix multiplies which columns of rows.
    biases : list of (str, int)
        Biases and vectors to add, by name and block.
    runs : list of slice
        All columns of terms, with neighbours joined, and the column of the biases if it is a
        neighbour.
    has_bias_apart : bool
        Whether the column of the biases is not a neighbour.
    """

    terms: list[tuple[Key, slice]]
    biases: list[tuple[str, int]]
    runs: list[slice]
    has_bias_apart: bool


class Group(NamedTuple):
    """A group of neighbouring slots, and the columns of rows that contain all they read."""

    first: int
    last: int
    columns: slice


class Structure:
    """The layout of a cell's arrays and Jacobians.

    Arrays have a row for each step and sample, with everything that products read:
    ``[arguments, x, 1, states]``. A worker may have only some units, which read the whole state.

    Parameters
    ----------
    cell : Cell
        The cell.
    own : slice, optional
        The units to compute from the whole state; all by default.
    """

    def __init__(self, cell: Any, own: slice | None = None) -> None:
        self.program: CellProgram = cell.program
        self.code: ArrayCode = cell._code
        self.linear = self.code.linear
        self.inputs, self.size = cell.input_size, cell.hidden_size
        self.is_part = own is not None
        start, stop, step = (own or slice(None)).indices(self.size)
        self.own = slice(start, stop, step)
        self.units = max(-((start - stop) // step), 0)  # ranges have lengths of 63 bits
        self.state_size = self.program.states * self.size
        self.masks: Mapping[str, Mirrored | None] = cell.masks
        self._blocks = {name: each.blocks for name, each in cell._declared.items()}
        self._biases = {
            (name, gate): (bias, k)
            for name, (bias, gates) in (cell._biases.items() if cell.bias else ())
            for k, gate in enumerate(gates)
        }
        program = self.program
        stages = [program.stage_of(each) for each in program.arguments]
        self.arguments = [
            [each for each, of in zip(program.arguments, stages, strict=True) if of == stage]
            for stage in range(program.stages)
        ]
        self.slots = [
            [k for k, slot in enumerate(program.slots) if slot.stage == stage]
            for stage in range(program.stages)
        ]
        self._lay_out()
        self.sums = [self._sum(slot) for slot in program.slots]

    def _lay_out(self) -> None:
        """Set the place of each vector in a row."""
        program = self.program
        read = {term.argument for slot in program.slots for term in slot.terms}
        # Gradients in parameters are products with these columns.
        grads = [*self.linear.row_grads, self.linear.input_grad]
        given = [each for each in grads if each is not None]
        read.update(each for each in topological(given) if each.operation in ("input", "state"))
        states = [symbol("state", k) for k in range(program.states)]
        widths: list[tuple[Node | None, int]] = [(a, self.units) for a in program.arguments]
        widths += [(INPUT, self.inputs), (None, 1), *((each, self.size) for each in states)]
        self.places: dict[Node, slice] = {}
        self.width = 0
        for each, width in widths:
            if each is None:
                self.one = self.width
            elif each in read:
                self.places[each] = slice(self.width, self.width + width)
            else:
                continue
            self.width += width
        self.copied = [
            (at, None if each is INPUT else slice(k * self.size, (k + 1) * self.size))
            for each, at in self.places.items()
            for k in (each.details[0] if each.operation == "state" else 0,)
            if each is INPUT or each.operation == "state"
        ]

    def _sum(self, slot: Slot) -> Sum:
        """Return what a slot is the sum of."""
        biases = [
            self._biases[term.matrix, term.gate]
            for term in slot.terms
            if not term.is_transposed and (term.matrix, term.gate) in self._biases
        ]
        biases += slot.vectors
        terms = [(key_of(term), self.places[term.argument]) for term in slot.terms]
        parts = {(at.start, at.stop) for _, at in terms}
        if biases:
            parts.add((self.one, self.one + 1))
        runs: list[slice] = []
        for first, last in sorted(parts):
            if runs and runs[-1].stop == first:
                first = runs.pop().start
            runs.append(slice(first, last))
        alone = slice(self.one, self.one + 1)
        return Sum(terms, biases, [run for run in runs if run != alone], alone in runs)

    @cached_property
    def groups(self) -> list[Group]:
        """Groups of slots for gradients of parameters; products use all columns of a group."""
        groups: list[Group] = []
        read: list[int] = []
        for k, each in enumerate(self.sums):
            ones = [slice(self.one, self.one + 1)] * each.has_bias_apart
            ends = [end for run in (*each.runs, *ones) for end in (run.start, run.stop)]
            own, count = slice(min(ends), max(ends)), sum(ends[1::2]) - sum(ends[::2])
            if groups:
                first, _, columns = groups[-1]
                both = slice(min(own.start, columns.start), max(own.stop, columns.stop))
                size = (k + 1 - first) * (both.stop - both.start)
                if count + sum(read[first:]) >= _TOGETHER * size:
                    groups.pop()
                    groups.append(Group(first, k + 1, both))
                    read.append(count)
                    continue
            groups.append(Group(k, k + 1, own))
            read.append(count)
        return groups

    def block(self, name: str, gate: int, array: Any) -> Any:
        """Return a block of a parameter: rows, or numbers, of each unit."""
        units = self.units
        blocks = self._blocks.get(name, -1)
        if name in self.program.partial:
            units = len(array) // blocks
        return array.reshape(blocks, units, *array.shape[1:])[gate]

    # -- Patterns -------------------------------------------------------------------------------

    @cached_property
    def factors(self) -> list[Factors]:
        """The factors of a Jacobian, in the order in which they are applied to a gradient."""
        return factors(self.program, self.linear)

    def _kept(self, key: Key) -> NDArray[np.bool_] | None:
        """Return which weights of a product are kept; None means all."""
        name, gate, is_transposed = key
        if isinstance(name, Reduction):
            return name.matrix(self.units) > 0
        mask, partial = self.masks.get(name), self.program.partial.get(name)
        kept: NDArray[np.bool_]
        if mask is not None:
            kept = self.block(name, gate, mask.on(np))
        elif partial is None:
            return None
        else:
            heads, rows, cols = partial
            kept = np.ones((rows or self.units, cols or self.units // heads), np.bool_)
        if partial is not None:
            kept = whole_of(np, kept, partial[0], self.units)
        return kept.T if is_transposed else kept

    @cached_property
    def _zeros(self) -> list[NDArray[np.bool_]]:
        """The units whose slopes are always zero, for each slope and column."""
        linear = self.linear
        known: dict[Node, Known] = {}
        for slots, arguments in zip(self.slots, self.arguments, strict=True):
            for k in slots:
                if not self.sums[k].biases:
                    zero = ~self._reads_something(self.program.slots[k], known)
                    known[symbol("slot", k)] = Known(zero, np.zeros(self.units))
            known = known_of(arguments, known, self.units)
        known = known_of(linear.slopes, known, self.units)
        known |= {symbol("slope", k): known[each] for k, each in enumerate(linear.slopes)}
        known = known_of(linear.columns, known, self.units)
        return [is_zero(known[each]) for each in (*linear.slopes, *linear.columns)]

    def _reads_something(self, slot: Slot, known: Mapping[Node, Known]) -> NDArray[np.bool_]:
        """Return for which units a slot multiplies anything that may be nonzero."""
        found = np.zeros(self.units, bool)
        for term in slot.terms:
            kept = self._kept(key_of(term))
            left = ~is_zero(known[term.argument]) if term.argument in known else np.bool_(True)
            found |= left.any() if kept is None else (kept & left).any(axis=1)
        return found

    def _slopes_pattern(self, factors: Factors, is_exact: bool) -> Pattern:
        """Return the pattern of a factor of slopes; an exact one leaves out entries that stay 0."""
        rows, columns = [], []
        for b, block in enumerate(factors.blocks):
            for place, which in block.slopes:
                unit = np.arange(self.units)
                if is_exact and which != ONE:
                    unit = unit[~self._zeros[which]]
                rows.append(b * self.units + unit)
                columns.append(place * self.units + unit)
        shape = len(factors.blocks) * self.units, len(factors.given) * self.units
        return _pattern_of(rows, columns, shape)

    def _weights_pattern(self, factors: Factors, is_exact: bool) -> Pattern:
        """Return the pattern of a factor of weights; dense ones are faster per entry."""
        size, units, unit = self.size, self.units, np.arange(self.size)
        shape = len(factors.returned) * size, len(factors.blocks) * units
        if not any(block.is_slot for block in factors.blocks):
            rows = [r * size + unit for block in factors.blocks for r, _ in block.weights]
            return _pattern_of(rows, [b * units + unit for b in range(len(rows))], shape)
        check_memory("the factors of a cell", 17 * shape[0] * shape[1])
        mask = np.zeros((len(factors.returned), size, len(factors.blocks), units), bool)
        for b, block in enumerate(factors.blocks):
            for r, keys in block.weights:
                if not keys:
                    mask[r, unit, b, unit] = True
                for kept in map(self._kept, keys):
                    mask[r, :, b] |= True if kept is None else kept.T
        if not is_exact and mask.mean() > DENSE:
            return Pattern.dense(shape)
        return of_mask(mask.reshape(shape))

    @cached_property
    def implicit_pattern(self) -> ImplicitPattern:
        """The patterns of the factors."""
        found: list[Pattern] = []
        for each in self.factors:
            found += [self._slopes_pattern(each, False), self._weights_pattern(each, False)]
        return ImplicitPattern(found, shared=range(1, len(found), 2))

    @cached_property
    def exact_products(self) -> list[tuple[Pattern, Pattern]]:
        """The patterns of factors without entries that stay 0, and of their partial products."""
        found: list[tuple[Pattern, Pattern]] = []
        for each in self.factors:
            for factor in (self._slopes_pattern(each, True), self._weights_pattern(each, True)):
                found.append((factor, product(factor, found[-1][1]) if found else factor))
        return found

    @cached_property
    def pattern(self) -> Pattern:
        """Where the transposed Jacobian may have nonzeros."""
        if self.is_part:
            return Pattern.dense((self.state_size, self.units))
        return self._plain_pattern() or self.exact_products[-1][1]

    def _plain_pattern(self) -> Pattern | None:
        """Return the pattern of a step of one stage without masks; None for others."""
        if len(self.factors) > 1:
            return None
        blocks: dict[int, list[tuple[int, bool]]] = {}
        for k, j, terms, direct in self.sources:
            numbers = [*(which for _, which in terms), *direct]
            is_masked = any(self._kept(key) is not None for key, _ in terms)
            if is_masked or any(self._zeros[which].any() for which in numbers):
                return None
            blocks.setdefault(k, []).extend([(j, bool(terms))] * bool(numbers))
        size, unit = self.state_size, np.arange(self.size)
        count = self.program.states
        if all(len(own) == count and all(dense for _, dense in own) for own in blocks.values()):
            return Pattern.dense((size, size))
        check_memory(f"the pattern of a cell with {size} states", 17 * size * size)
        mask = np.zeros((count, self.size, count, self.size), bool)
        for k, own in blocks.items():
            for j, is_dense in own:
                if is_dense:
                    mask[k, :, j] = True
                else:
                    mask[k, unit, j, unit] = True
        return of_mask(mask.reshape(size, size))

    # -- Entries of the pattern -----------------------------------------------------------------

    @cached_property
    def sources(self) -> list[tuple[int, int, list[tuple[Key, int]], list[int]]]:
        """The blocks of a Jacobian of one stage.

        By the old and the new state of a block: the products with the numbers of their slopes,
        which the block sums, and the numbers of slopes on its diagonal.
        """
        (only,) = self.factors
        found = []
        for k, j in itertools.product(range(self.program.states), repeat=2):
            terms: list[tuple[Key, int]] = []
            direct: list[int] = []
            for block in only.blocks:
                own = [keys for r, keys in block.weights if r == k]
                for which in (which for place, which in block.slopes if place == j):
                    terms += [(key, which) for keys in own for key in keys]
                    direct += [which for keys in own if not keys]
            found.append((k, j, terms, direct))
        return found

    @cached_property
    def table(self) -> tuple[list[Key], Indices, Indices, Indices] | None:
        """The arguments of :func:`fill_blocks`, weights first; None if it does not fit the pattern.

        It fits patterns whose blocks are those without masks.
        """
        is_part, states = self.is_part, range(self.program.states)
        widths = {
            (k, j): self.units if terms or is_part else len(direct)
            for k, j, terms, direct in self.sources
        }
        lengths = [sum(widths[k, j] for j in states) for k in states]
        if self.size * sum(lengths) != self.pattern.nnz:
            return None
        starts = np.cumsum([0, *lengths]) * self.size
        order: dict[Key, int] = {}
        blocks: list[tuple[int, ...]] = []
        pairs: list[tuple[int, ...]] = []
        diagonals: list[tuple[int, ...]] = []
        for k, j, terms, direct in self.sources:
            start = int(starts[k]) + sum(widths[k, before] for before in range(j))
            is_dense = bool(terms) or is_part
            if is_dense:
                first = len(pairs)
                pairs += [(order.setdefault(key, len(order)), which) for key, which in terms]
                blocks.append((start, lengths[k], first, len(pairs)))
            begin = start + self.own.start * lengths[k]
            diagonals += [(begin, lengths[k] + is_dense, which, is_dense) for which in direct]
        tables = ((blocks, 4), (pairs, 2), (diagonals, 4))
        a, b, c = (np.array(rows, np.int64).reshape(-1, width) for rows, width in tables)
        return list(order), a, b, c

    @cached_property
    def places_of_blocks(self) -> dict[tuple[int, int], Places]:
        """The places of the entries of each block among all entries of a Jacobian."""
        rows, columns = rows_of(self.pattern), self.pattern.indices.astype(np.int64)
        found = {}
        for k, j in itertools.product(range(self.program.states), repeat=2):
            first, last = (int(self.pattern.indptr[end * self.size]) for end in (k, k + 1))
            places = np.flatnonzero(columns[first:last] // self.units == j) + first
            row, unit = rows[places] - k * self.size, columns[places] - j * self.units
            whole = None
            length = (last - first) // self.size
            if len(places) == self.size * self.units:
                offset = int(places[0]) - first
                is_inside = offset + self.units <= length
                if is_inside and np.array_equal(places, first + offset + row * length + unit):
                    whole = first, first + self.size * length, offset
            on = row == unit
            inside, diagonal = Mirrored(row * self.units + unit), places[on]
            steps = None
            if len(diagonal) == self.units and len(set(np.diff(diagonal).tolist())) < 2:
                step = int(diagonal[1] - diagonal[0]) if self.units > 1 else 1
                steps = slice(int(diagonal[0]), int(diagonal[-1]) + 1, step)
            about = Mirrored(diagonal), Mirrored(unit[on]), steps
            found[k, j] = Places(Mirrored(places), inside, *about, whole)
        return found

    @cached_property
    def entries(self) -> Entries:
        """The sources of each entry of the pattern."""
        parts, added = [], []
        ends = self.pattern.indptr[:: self.size].astype(np.int64)
        ranges = np.stack([ends[:-1], ends[1:], np.zeros_like(ends[1:])], axis=1)
        for k, j, terms, direct in self.sources:
            places = self.places_of_blocks[k, j]
            unit = places.inside.on(np) % self.units
            at, inside = places.places.on(np), places.inside.on(np)
            parts += [(n, key, at, inside, unit, which) for n, (key, which) in enumerate(terms)]
            on = places.on_diagonal.on(np), places.units.on(np)
            added += [(*on, which) for which in direct]
            ranges[k, 2] = max(ranges[k, 2], len(terms))
        return Entries(ranges, parts, added)

    @cached_property
    def slope_places(self) -> list[list[tuple[Indices, Indices, int]]]:
        """For each exact factor of slopes, the places of entries, their units, and their slopes."""
        found = []
        for each, (pattern, _) in zip(self.factors, self.exact_products[::2], strict=True):
            columns = pattern.indices.astype(np.int64)
            blocks, given = rows_of(pattern) // self.units, columns // self.units
            parts = []
            for b, block in enumerate(each.blocks):
                for place, which in block.slopes:
                    at = np.flatnonzero((blocks == b) & (given == place))
                    parts.append((at, columns[at] % self.units, which))
            found.append(parts)
        return found

    def weight_places(self, pattern: Pattern) -> Mirrored:
        """Return the places of a factor's entries in a dense matrix, if it is stored densely."""
        if pattern not in self._weight_places:
            self._weight_places[pattern] = Mirrored(keys_of(pattern))
        return self._weight_places[pattern]

    @cached_property
    def _weight_places(self) -> dict[Pattern, Mirrored]:
        return {}


class Places(NamedTuple):
    """The places of a block's entries among all entries of a Jacobian.

    Attributes
    ----------
    places, inside : Mirrored
        Places of entries among all, and in the block.
    on_diagonal, units : Mirrored
        Places of entries on its diagonal, and their units.
    steps : slice or None
        Places of the diagonal's entries as a slice, if the diagonal is complete.
    whole : tuple of int or None
        If the block is complete, where the rows of its state begin and end, and its start in each
        row.
    """

    places: Mirrored
    inside: Mirrored
    on_diagonal: Mirrored
    units: Mirrored
    steps: slice | None
    whole: tuple[int, int, int] | None


class Entries(NamedTuple):
    """The sources of the entries of a one-stage Jacobian.

    Attributes
    ----------
    ranges : ndarray, shape (states, 3)
        For each old state, its range of entries, and the most products that an entry sums.
    parts : list of (int, Key, ndarray, ndarray, ndarray, int)
        For each product: its number among the products of its entries, its matrix, the places of
        the entries, the places of the weights, units, and the number of slopes.
    added : list of (ndarray, ndarray, int)
        Places of entries on diagonals, units, and numbers of slopes.
    """

    ranges: Indices
    parts: list[tuple[int, Key, Indices, Indices, Indices, int]]
    added: list[tuple[Indices, Indices, int]]


def _pattern_of(
    rows: Sequence[Indices], columns: Sequence[Indices], shape: tuple[int, int]
) -> Pattern:
    """Return the pattern of some entries, none of them twice."""
    none = np.empty(0, np.int64)
    row, column = np.concatenate([none, *rows]), np.concatenate([none, *columns])
    return of_keys(np.sort(row * shape[1] + column), shape)
