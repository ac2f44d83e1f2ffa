"""Chains of small steps on a device: what their steps are, and into how many chunks they are cut.

Products of chunks are made at once, gradients are taken over the chunks one after the other. A step
of a chain takes as long as its instructions depend on each other; or, where a multiprocessor has
many chains, as its warps take to issue theirs, or its shared memory to answer, whichever is longer.

Chunks are counted by estimates in cycles. What is chosen follows from the chain and the device
alone, and from nothing that has been compiled or measured: so results have the same bits in the
first run and in later ones.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays.arrays import load_cupy
from ...kernels.cuda import chunks as kernels
from ...kernels.cuda.chunk_costs import chained_turns, multiply_turns, registers_of, sweep_turns
from ...kernels.cuda.tiles import tiles_of
from ...symbolic.implicit import ImplicitPattern, Step
from ...symbolic.pattern import rows_of
from ...symbolic.program import Program

# Forms of steps by their program and dtype.
_forms: weakref.WeakKeyDictionary[Program, dict[Any, ChunkForm | None]]
_forms = weakref.WeakKeyDictionary()


# -- Forms of steps --------------------------------------------------------------------------------


class ChunkForm(NamedTuple):
    """The shape of a step, as kernels for chunks see it.

    Attributes
    ----------
    size : int
        Rows, and columns.
    entries : int
        Values of a step that a sample has: of an implicit one its slopes.
    terms : int
        The most rows of slopes of a unit, of an implicit step; 0 for an explicit one.
    states : int
        Unknowns of a unit: 2 for an LSTM, of which the second ones are behind all first ones.
    """

    size: int
    entries: int
    terms: int = 0
    states: int = 1


def chunk_form(patterns: Sequence[Step], dtype: np.dtype[Any]) -> ChunkForm | None:
    """Return what steps are, if all have one pattern for which there are chunked kernels.

    Implicit ones are those of recurrent cells: a factor that samples share, by one of which each
    row has one entry, or two of one unit, as those of an LSTM have.
    """
    first = patterns[0]
    rows, cols = first.shape
    if rows != cols or rows > kernels.MAX_SIZE or any(step is not first for step in patterns):
        return None
    form: ChunkForm | None = ChunkForm(rows, first.nnz)
    if isinstance(first, ImplicitPattern):
        form = _implicit_form(first)
    if form is None:
        return None
    is_taken = kernels.takes(rows, dtype, terms=form.terms, states=form.states)
    return form if is_taken else None


def _implicit_form(step: ImplicitPattern) -> ChunkForm | None:
    """Return what an implicit step is, if it is one of a recurrent cell."""
    if len(step.factors) != 2 or not step.shared[1] or any(step.solved) or any(step.indexed):
        return None
    slopes, weights = step.factors
    size, counts = slopes.shape[1], np.diff(slopes.indptr)
    states = int(counts.max(initial=1))
    if counts.min(initial=1) < 1 or states > 2 or size % states:
        return None
    units = size // states
    own = slopes.indices % max(units, 1)
    first = own[slopes.indptr[:-1]]
    if (own != np.repeat(first, counts)).any():
        return None
    terms = np.bincount(first, minlength=units)
    if states == 2:
        # All units have as many rows, and those that kernels pass over have no weights. Kernels
        # look at dense weights themselves.
        if (terms != terms.max(initial=0)).any() or terms.max(initial=0) < 2:
            return None
        rows, term = rows_of(weights), _terms_of_rows(first)[weights.indices]
        light, last = rows >= units, term == terms.max() - 1
        own_weight = last & (rows - units == first[weights.indices])
        if weights.kind != "dense" and np.where(light, ~own_weight, last).any():
            return None
    return ChunkForm(size, slopes.nnz, int(terms.max(initial=0)), states)


def _terms_of_rows(units: NDArray[Any]) -> NDArray[np.int64]:
    """Return of each row of slopes, given its unit, how many of that unit come before."""
    rows = np.argsort(units, kind="stable")
    ordered, terms = units[rows], np.empty(len(rows), np.int64)
    terms[rows] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return terms


def form_of(program: Program, dtype: np.dtype[Any]) -> ChunkForm | None:
    """Return what the steps of a chunked program are, if there are kernels for its chunks."""
    if program.chunks is None:
        return None
    known = _forms.setdefault(program, {})
    if dtype not in known:
        known[dtype] = chunk_form(program.steps, dtype)
    return known[dtype]


def places_of(step: Step, form: ChunkForm) -> NDArray[np.int32]:
    """Return where kernels find what a step has, as :class:`.ChunkKernels` says.

    That is ``row·size + column`` of every entry, or the numbers of slopes and weights.
    """
    if not isinstance(step, ImplicitPattern):
        return (rows_of(step) * form.size + step.indices).astype(np.int32)
    slopes, weights = step.factors
    units = form.size // form.states
    unit = slopes.indices[slopes.indptr[:-1]] % units
    terms, rows = _terms_of_rows(unit), rows_of(slopes)
    number_of = np.full(weights.shape, -1, np.int32)
    number_of[rows_of(weights), weights.indices] = np.arange(weights.nnz)
    slope_numbers = np.full((form.terms, form.size), -1, np.int32)
    slope_numbers[terms[rows], slopes.indices] = np.arange(slopes.nnz)
    weight_numbers = np.full((form.terms, form.size, units), -1, np.int32)
    weight_numbers[terms, :, unit] = number_of.T
    return np.concatenate([slope_numbers.ravel(), weight_numbers.ravel()])


# -- Numbers of chunks -----------------------------------------------------------------------------


class Multiprocessors(NamedTuple):
    """The multiprocessors of a device, and what the blocks of each share.

    Attributes
    ----------
    number : int
        How many there are.
    registers, threads, blocks : int
        The most that one has.
    shared, reserved : int
        Bytes of its shared memory, and of those that every block takes beside its own.
    block : int
        Bytes of shared memory that a block may ask for.
    """

    number: int
    registers: int = 1 << 16
    threads: int = 2048
    blocks: int = 32
    shared: int = 228 * 1024
    reserved: int = 1024
    block: int = 227 * 1024

    def at_once(self, threads: int, registers: int, shared: int) -> int:
        """Return how many blocks of a kernel one multiprocessor runs at once, at least 1.

        A block has so many threads, with registers each, and bytes of shared memory.
        """
        # A warp gets registers by 256, in one of four parts of the multiprocessor.
        warps, of_warp = -(-threads // 32), -(-registers // 8) * 256
        of_block = -(-shared // 128) * 128 + self.reserved
        by_registers = self.registers // 4 // of_warp * 4 // warps
        by_size = min(self.threads // threads, self.shared // of_block)
        return max(min(by_registers, by_size, self.blocks), 1)


# Chains run in one launch or in three on all devices as they do on this one.
H100 = Multiprocessors(132)
_ATTRIBUTES = {
    "number": "MultiProcessorCount",
    "registers": "MaxRegistersPerMultiprocessor",
    "threads": "MaxThreadsPerMultiProcessor",
    "blocks": "MaxBlocksPerMultiprocessor",
    "shared": "MaxSharedMemoryPerMultiprocessor",
    "reserved": "ReservedSharedMemoryPerBlock",
    "block": "MaxSharedMemoryPerBlockOptin",
}
_known: dict[int, Multiprocessors] = {}


def multiprocessors_of(cupy: Any) -> Multiprocessors:
    """Return the multiprocessors of the current device."""
    device = cupy.cuda.Device()
    if device.id not in _known:
        # CuPy asks for all attributes at once, which takes a while; which there are, depends on
        # the version of CUDA.
        about = device.attributes
        asked = {field: int(about[name]) for field, name in _ATTRIBUTES.items() if name in about}
        _known[device.id] = Multiprocessors(**asked)
    return _known[device.id]


class _Cycles:
    """Estimates of how long the scan of a chain takes a GPU, as the code for float32 has it."""

    # Two launches; and to tell another block that a gradient is there.
    LAUNCHES, HOP = 6000, 1500

    def __init__(self, form: ChunkForm, itemsize: int, batch: int, device: Multiprocessors) -> None:
        size, terms = form.size, form.terms
        self._about = about = size, itemsize, terms, form.states
        tiles = tiles_of(size, 4, terms, form.states)
        assert tiles is not None
        self._batch, self._device, self.layout = batch, device, kernels.chained_layout(*about)
        # As if rows were shorter where some are light.
        padded = -(-size // 4) * tiles.dense
        # Cycles from one step to the next where nothing else goes on.
        self.multiply = 8 * tiles.cols * padded + 300
        self.carry, self.sweep = 4 * size + 150, 6 * size + 100
        # Cycles of a multiprocessor for each chain that it has: four instructions each, or a turn
        # of shared memory, or 20 bytes of memory.
        issued = (5 * tiles.cols * padded + 250) * tiles.threads / 32 / tiles.chains / 4
        self.product_work = max(issued, multiply_turns(*about))
        read = (terms or size) * size * 4 / 20
        self.sweep_work = max(read, sweep_turns(*about))
        if self.layout is not None:
            cols, stride = self.layout.cols, self.layout.stride
            issued = (5 * cols * padded + 250) * stride / 32 / 4
            products, sweeps = chained_turns(size, itemsize)
            self.chained_work = max(issued, products), max(read, sweeps)

    @property
    def most(self) -> int:
        """The most chunks whose products a device makes at once."""
        tiles = tiles_of(*self._about)
        assert tiles is not None
        registers = registers_of(*self._about)
        blocks = self._device.at_once(tiles.threads, registers, tiles.shared)
        chains = self._device.number * blocks * tiles.chains // tiles.parts
        return chains // self._batch

    def of_phases(self, steps: int, chunks: int) -> float:
        """Return the cycles of three launches, or of one through all steps."""
        depth, chains = steps / chunks, self._batch * chunks / self._device.number
        swept = depth * max(self.sweep, chains * self.sweep_work)
        if chunks == 1:
            return swept
        products = depth * max(self.multiply, chains * self.product_work)
        return swept + products + chunks * self.carry + self.LAUNCHES

    def of_chained(self, steps: int, chunks: int) -> float:
        """Return the cycles of one launch, which are infinite where slopes do not fit."""
        if self.layout is None or chunks == 1 or -(-steps // chunks) > self.layout.longest:
            return math.inf
        teams, (product_work, sweep_work) = self.layout.teams, self.chained_work
        depth, chains = steps / chunks / teams, self._batch * chunks * teams / self._device.number
        products = depth * max(self.multiply, chains * product_work)
        swept = depth * max(self.sweep, chains * sweep_work)
        behind = chunks * (self.HOP + teams * self.carry)
        return max(products + swept, behind + depth * (self.multiply + self.sweep))

    def of(self, steps: int, chunks: int) -> float:
        """Return the cycles of what takes less."""
        return min(self.of_phases(steps, chunks), self.of_chained(steps, chunks))


def in_one_launch(
    form: ChunkForm, dtype: np.dtype[Any], steps: int, batch: int, chunk: int
) -> bool:
    """Return whether a chain takes less in one launch than in three, if it can be in one.

    It is the same for all devices, so that what is planned is what runs: as for an H100.
    """
    layout = kernels.chained_layout(form.size, dtype.itemsize, form.terms, form.states)
    if layout is None or chunk > layout.longest:
        return False
    cycles, chunks = _Cycles(form, dtype.itemsize, batch, H100), -(-steps // chunk)
    return cycles.of_chained(steps, chunks) < cycles.of_phases(steps, chunks)


def chunks_of(patterns: Sequence[Step], batch: int, dtype: np.dtype[Any]) -> int | None:
    """Return into how many chunks the current device would cut a chain; None if into none."""
    form = chunk_form(patterns, dtype)
    if form is None:
        return None
    return chunk_count(
        len(patterns), batch, form, multiprocessors_of(load_cupy()), itemsize=dtype.itemsize
    )


def chunk_count(
    steps: int, batch: int, form: ChunkForm, device: Multiprocessors, *, itemsize: int = 4
) -> int:
    """Return the number of chunks into which to cut a chain; 1 if products do not pay."""
    cycles = _Cycles(form, itemsize, batch, device)
    # As many chunks as make depth and carries take the same time; but no more than there is room
    # for at once.
    best = math.isqrt(steps * (cycles.multiply + cycles.sweep) // cycles.carry)
    counts = [1, max(min(best, cycles.most, steps), 1)]
    layout = cycles.layout
    if layout is not None and steps > 1:
        # One launch does as much, where chunks are no longer than there is room for.
        behind = layout.teams * (cycles.HOP + layout.teams * cycles.carry)
        best = math.isqrt(steps * (cycles.multiply + cycles.sweep) // behind)
        counts.append(min(max(best, -(-steps // layout.longest), 2), steps))
    return min(counts, key=lambda count: cycles.of(steps, count))
