"""Runs on a CUDA device: tables, memory, launches and their graph."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import is_same_stream, load_cupy
from ..arrays.cuda import SIMULATED, current
from ..arrays.streams import send
from ..errors import MemoryLimitError
from ..execution import chunk_counts
from ..execution.workspace import KINDS, Parts, places
from ..formatting import format_bytes
from ..kernels.cpu.tables import SLOTS, Op, Store
from ..kernels.cuda import chunks as cuda_chunks
from ..kernels.cuda import device as _device
from ..kernels.cuda import sweeps as cuda_sweeps
from ..kernels.cuda.levels import (
    STAGE,
    THREADS,
    WARP,
    level_kernels,
    longest_segment,
    segments_at_once,
)
from ..kernels.cuda.products import DENSE_ROWS
from ..kernels.cuda.tables import EVERY, Mode, Node, Plan, Run, State, Sweep, Terms, Unit
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.pattern import Pattern, index_dtype, rows_of
from ..symbolic.program import Program
from ..symbolic.terms import TermCounts, count_terms, lay_out_terms

__all__ = [
    "BLAS_SIZE",
    "GRAIN",
    "LARGE",
    "ChunkForm",
    "DeviceWorkspace",
    "Shares",
    "chunk_count",
    "chunk_form",
    "device_bytes",
    "form_of",
    "in_one_launch",
]

# Multiply-adds of a product that a block makes at least, where it shares the product with others.
GRAIN = 64 if SIMULATED else 16384
# Tiles of a step above which its rows are shared by blocks, even if each step then takes a launch.
LARGE = 4
# Blocks for each multiprocessor that share the rows of one step.
_WAVES = 16
# Blocks that bring a product into range, at most.
_RESCALING = 256
# Rows, columns and inner dimension from which on a dense product is cuBLAS's.
BLAS_SIZE = 6 if SIMULATED else 128

# Bytes of which CuPy's memory pool gives a multiple.
_UNIT = 512

# One of the things that a run does in turn, given a stream.
Action = Callable[[Any], None]


class StepValues(Protocol):
    """Values of Jacobians as :class:`~sparsescan.chains.chain.Chain` has them."""

    @property
    def n(self) -> int:
        """Number of Jacobians."""

    @property
    def leaves(self) -> NDArray[np.int64]:
        """Address of the values of each, and bytes from one sample to the next."""

    @property
    def stacks(self) -> list[tuple[int, int, int]]:
        """Address, and bytes to the next Jacobian and sample, of arrays that take turns."""

    @property
    def stack(self) -> tuple[int, int, int] | None:
        """The only one of these, if there is one of all."""

    def array(self, k: int) -> Any:
        """Return the values of the `k`-th."""


class AddedGrads(Protocol):
    """Gradients to add as :class:`~sparsescan.chains.chain.LocalGrads` has them."""

    @property
    def stack(self) -> tuple[int, int] | None:
        """Address, and bytes to the next gradient, of one array of all, if it is one."""

    def fill(self, addresses: NDArray[np.int64]) -> None:
        """Write the address of each gradient, or 0."""


class Kept(NamedTuple):
    """A pattern on a device, and when it is there."""

    indptr: Any
    indices: Any
    tiles: Any
    home: Any  # the stream it was made on
    ready: Any


# Uploaded patterns, by device and index dtype.
_patterns: weakref.WeakKeyDictionary[Pattern, dict[Any, Kept]] = weakref.WeakKeyDictionary()
_tiles: weakref.WeakKeyDictionary[Pattern, NDArray[np.int64]] = weakref.WeakKeyDictionary()
# Forms of steps by their program and dtype.
_forms: weakref.WeakKeyDictionary[Program, dict[Any, ChunkForm | None]] = (
    weakref.WeakKeyDictionary()
)
# Counts of terms by the product's pattern, then by those of its operands and the longest segment.
_term_counts: weakref.WeakKeyDictionary[Pattern, dict[Any, TermCounts]] = (
    weakref.WeakKeyDictionary()
)


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

    @property
    def numbers(self) -> int:
        """Numbers of slopes and weights, or of places of an explicit step's entries."""
        return self.terms * self.size * (1 + self.size // self.states) or self.entries


def chunk_count(patterns: Sequence[Step], batch: int, dtype: np.dtype[Any]) -> int | None:
    """Return into how many chunks the current device would cut a chain."""
    form = chunk_form(patterns, dtype)
    if form is None:
        return None
    processors = chunk_counts.multiprocessors_of(load_cupy())
    return chunk_counts.chunk_count(
        len(patterns),
        batch,
        form.size,
        processors,
        terms=form.terms,
        states=form.states,
        itemsize=dtype.itemsize,
    )


def in_one_launch(
    form: ChunkForm, dtype: np.dtype[Any], steps: int, batch: int, chunk: int
) -> bool:
    """Return whether all phases of a scan in chunks of so many steps are one launch."""
    return chunk_counts.in_one_launch(
        form.size, dtype, steps, batch, chunk, terms=form.terms, states=form.states
    )


def chunk_form(patterns: Sequence[Step], dtype: np.dtype[Any]) -> ChunkForm | None:
    """Return what steps are, if all have one pattern for which there are chunked kernels.

    Implicit ones are those of recurrent cells: a factor that samples share, by one of which each
    row has one entry, or two of one unit, as those of an LSTM have.
    """
    first = patterns[0]
    rows, cols = first.shape
    if rows != cols or rows > cuda_chunks.MAX_SIZE or any(step is not first for step in patterns):
        return None
    form: ChunkForm | None = ChunkForm(rows, first.nnz)
    if isinstance(first, ImplicitPattern):
        form = _implicit_form(first)
    if form is None:
        return None
    kernels = cuda_chunks.takes(rows, dtype, terms=form.terms, states=form.states)
    return form if kernels else None


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


class Shares(NamedTuple):
    """How blocks share the operations of a program."""

    blocks: NDArray[np.int64]  # parts of the rows, where an operation is the only one of its run
    large: NDArray[np.bool_]  # whether it is worth more than one block
    blas: NDArray[np.bool_]  # whether cuBLAS multiplies

    @classmethod
    def of(cls, program: Program) -> Shares:
        """Return the launches of `program`, on a device of any size."""
        ops, patterns = program.ops, program.patterns
        product, (_, left, right, out) = ops[:, Op.VECTOR] == 0, ops.T
        tiles = {pattern: len(_tiles_of(pattern)) - 1 for pattern in set(patterns)}
        count = np.array([tiles[pattern] for pattern in patterns], np.int64)[right]
        rows = np.array([pattern.shape[0] for pattern in patterns], np.int64)[right]
        large = np.array([_is_large(pattern) for pattern in patterns])
        # Some entries of dense operands may be known to be zero, and left out of the product.
        blas = product & large[left] & large[right] & large[np.where(product, out, 0)]
        dense = np.array([pattern.kind == "dense" for pattern in patterns])
        full = product & dense[left] & dense[right] & dense[np.where(product, out, 0)]
        rows = np.where(full, -(-rows // DENSE_ROWS), rows)
        blocks = np.where(product, np.minimum(program.work // GRAIN, rows), count)
        small = np.array([_is_small(pattern) for pattern in patterns])[right]
        many = (count > LARGE) & (product | ~small)
        return cls(np.maximum(blocks, 1), many | blas, blas)


class _Sweeps(NamedTuple):
    """Which operations take a gradient through small steps, and can be those of a sweep."""

    small: NDArray[np.bool_]  # which Jacobians
    ops: NDArray[np.bool_]  # matrix-vector products by one of them
    follows: NDArray[np.bool_]  # operations that are applied to what the one before has made
    threads: int  # of a block

    @classmethod
    def of(cls, program: Program) -> _Sweeps:
        """Return them for `program`."""
        n, vector, left, right, out = program.n, *program.ops.T
        sizes = np.array([(max(p.shape), p.nnz) for p in program.patterns[:n]], np.int64)
        small = np.array([_is_small(pattern) for pattern in program.patterns[:n]])
        ops = (vector == 1) & (right < n)
        ops[ops] = small[right[ops]]
        rows, entries = sizes[small].max(axis=0, initial=1).tolist()
        threads = min(32, cuda_sweeps.THREADS)
        while threads < min(max(rows, entries / cuda_sweeps.STAGED), cuda_sweeps.THREADS):
            threads *= 2
        return cls(small, ops, np.append(False, left[1:] == out[:-1]), threads)

    def take(self, runs: NDArray[np.int64]) -> bool:
        """Return whether the launch of these runs of a level is a sweep."""
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        if (runs[:, 1] - runs[:, 0]).max() == 1 or not self.ops[first:last].all():
            return False
        follows = self.follows[first:last].copy()
        follows[runs[:, 0] - first] = True
        return bool(follows.all())


def device_bytes(program: Program, dtype: np.dtype[Any], batch: int, *, whole: bool = True) -> int:
    """Return the most device memory that scans take beside Jacobians and gradients, in bytes.

    They are those of its products, tables and patterns, once both scans have run: as if all
    Jacobians differed between samples, and with local gradients. Memory that cuBLAS keeps is not
    among them. Implicit steps run `whole`, where there are kernels for them, unless their weights
    differ.
    """
    n, itemsize, form = program.n, dtype.itemsize, form_of(program, dtype)
    if form is not None and form.terms > 0 and not whole:
        form = None
    told = 8 * (Run.WIDTH + 3 * (n if form is None else len(program.steps)) + 1)
    sizes = [told]
    if form is not None and program.chunks is not None:
        steps = len(program.steps)
        chunk = -(-steps // program.chunks)
        one = in_one_launch(form, dtype, steps, batch, chunk)
        values, exponents = cuda_chunks.scratch(form.size, steps, batch, chunk, one)
        sizes += [values * itemsize, exponents * 4, 4 * form.numbers]
    else:
        sizes += [*_product_bytes(program, itemsize, batch), *_pattern_bytes(program)]
        sizes += _term_bytes(program, dtype)
        tables = [Node.WIDTH * len(program.patterns), len(program.offsets), program.ops.size]
        sweeps = _Sweeps.of(program)
        tables += [(Sweep if sweeps.small.all() else Op).WIDTH * n, Plan.WIDTH, Plan.WIDTH]
        if any(sweeps.take(runs) for _, runs in program.levels):
            tables += [Sweep.WIDTH * len(program.ops), Plan.WIDTH]
        sizes += [8 * table for table in tables]
        sizes += [8 * Unit.WIDTH * units for units in _unit_counts(program)]
        # Values that come as weights, and the index that reads them.
        sizes += [index.nnz * (itemsize + 8) for _, index in program.indexed]
    return sum(-(-size // _UNIT) * _UNIT for size in sizes)


class _Pools(NamedTuple):
    """How much memory products take, and where in it each lies: by counting alone.

    The first axis is that of values, exponents and local gradients, which have a pool each.

    Attributes
    ----------
    counts : ndarray of int64, shape (3, products)
        Elements of a sample of each product.
    starts : ndarray of int64, shape (3, products)
        Where each product starts: in the pool, or in the scratch of the first block.
    strides : ndarray of int64, shape (3,)
        Elements of the scratch of a block.
    sizes : ndarray of int64, shape (3,)
        Elements in all.
    """

    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    strides: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, program: Program, batch: int, batched: NDArray[np.bool_], local: bool) -> _Pools:
        """Return the pools of runs of `batch` samples, of which products `batched` differ."""
        products = program.ops[program.ops[:, Op.VECTOR] == 0]
        patterns, n = program.patterns, program.n
        inner = np.zeros(program.products, np.int64)
        inner[products[:, Op.OUT] - n] = [
            patterns[right].shape[1] for right in products[:, Op.RIGHT].tolist()
        ]
        rows, cols, nnz = np.array([(*p.shape, p.nnz) for p in patterns[n:]], np.int64).T
        counts = np.stack([nnz, 3 * cols + 1 + inner, rows * local])
        in_scratch = _in_scratch(program)
        widths = np.where(batched, batch, 1)
        kept = counts * np.stack([widths, widths, np.full_like(widths, batch)]) * ~in_scratch
        starts, totals = places(kept.T)
        slot = counts[:, in_scratch].max(axis=1, initial=0)
        scratch = totals[:, None] + slot[:, None] * program.slots
        blocks = batch * max(len(runs) for _, runs in program.levels)
        starts = np.where(in_scratch, scratch, starts.T)
        return cls(counts, starts, SLOTS * slot, totals + SLOTS * slot * blocks)


def _product_bytes(program: Program, itemsize: int, batch: int) -> list[int]:
    """Return bytes of products and their state, as if all differed between samples."""
    if not program.products:
        return []
    pools = _Pools.of(program, batch, np.ones(program.products, bool), True)
    state = 4 * State.WIDTH * batch * program.products
    return [*(pools.sizes * [itemsize, 4, itemsize]).tolist(), state]


def _pattern_bytes(program: Program) -> list[int]:
    """Return bytes of the tiles of every pattern, and of index arrays."""
    sizes, width = [], _index_dtype(program).itemsize
    for pattern in set(program.patterns):
        sizes.append(8 * len(_tiles_of(pattern)))
        if pattern.kind == "general":
            sizes += [width * (pattern.shape[0] + 1), width * pattern.nnz]
    return sizes


def _term_bytes(program: Program, dtype: np.dtype[Any]) -> list[int]:
    """Return bytes of the terms of every sparse product."""
    longest, width, sizes = longest_segment(dtype), _index_dtype(program).itemsize, []
    for a, x, c in _sparse_products(program):
        known, key = _term_counts.setdefault(c, {}), (a.key, x.key, longest)
        if key not in known:
            known[key] = count_terms(a, x, c, longest)
        sizes += [8 * Terms.WIDTH, *known[key].nbytes(width)]
    return sizes


def _sparse_products(program: Program) -> dict[tuple[Pattern, Pattern, Pattern], list[int]]:
    """Return the nodes of the sparse products ``C = A X``, by the patterns of `A`, `X` and `C`."""
    nodes_of: dict[tuple[Pattern, Pattern, Pattern], list[int]] = {}
    nodes = program.ops[program.ops[:, Op.VECTOR] == 0][:, [Op.RIGHT, Op.LEFT, Op.OUT]]
    for a, x, c in nodes.tolist():
        patterns = program.patterns[a], program.patterns[x], program.patterns[c]
        if patterns[0].kind != "diagonal" and patterns[1].kind == "general" and patterns[2].nnz:
            nodes_of.setdefault(patterns, []).append(c)
    return nodes_of


def _index_dtype(program: Program) -> np.dtype[Any]:
    """Return the dtype of index arrays, which count terms of products as well."""
    terms = int(program.work[program.ops[:, Op.VECTOR] == 0].max(initial=0))
    return np.promote_types(program.index_dtype, index_dtype((0, 0), terms))


def _unit_counts(program: Program) -> list[int]:
    """Return the units of each launch of an exclusive and of an inclusive scan."""
    shares, counts = Shares.of(program), []
    for _, runs in program.levels:
        for together, _ in _launched(runs, shares.large):
            only = _only(together)
            blocks = np.where(only >= 0, shares.blocks[only], 1)
            counts += [int(blocks.sum()), int(blocks[(only >= 0) & shares.blas[only]].sum())]
            later = (blocks > 1) & (program.ops[only, Op.VECTOR] == 0)
            counts.append(int(np.minimum(blocks[later], _RESCALING).sum()))
    guard = 1 if program.products else 0
    return [*counts, guard, *counts, guard, int(shares.blocks[-1])]


def _launched(
    runs: NDArray[np.int64], large: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the runs of each launch of a level, with their numbers in the level.

    A level is one launch; or one for each operation of its longest run, if some are worth more than
    one block.
    """
    length = runs[:, 1] - runs[:, 0]
    if length.max() == 1 or not large[int(runs[0, 0]) : int(runs[-1, 1])].any():
        yield runs, np.arange(len(runs))
        return
    for depth in range(int(length.max())):
        first = runs[length > depth, 0] + depth
        yield np.stack([first, first + 1], axis=1), np.flatnonzero(length > depth)


def _only(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the one operation of each run, or -1 for a run of several."""
    return np.where(runs[:, 1] - runs[:, 0] == 1, runs[:, 0], -1)


def _is_large(pattern: Pattern) -> bool:
    """Return whether products of such matrices are cuBLAS's to make."""
    return pattern.kind == "dense" and min(pattern.shape) >= BLAS_SIZE


def _is_small(pattern: Pattern) -> bool:
    """Return whether a sweep can apply such matrices."""
    threads = cuda_sweeps.THREADS
    rows, entries = cuda_sweeps.ROWS * threads, cuda_sweeps.STAGED * threads
    return max(pattern.shape) <= rows and pattern.nnz <= entries


def _in_scratch(program: Program) -> NDArray[np.bool_]:
    """Return which products are kept for their run only; but cuBLAS knows no scratch."""
    large = [_is_large(pattern) for pattern in program.patterns[program.n :]]
    in_scratch: NDArray[np.bool_] = (program.slots >= 0) & ~np.array(large, bool)
    return in_scratch


class DeviceWorkspace:
    """Memory, tables and launches for a program on the current device, kept from run to run.

    Parameters
    ----------
    program : Program
        The program to run.
    dtype : dtype
        float32 or float64.
    batch : int
        Number of samples, at least 1.
    batched : ndarray of bool, shape (n,)
        Which Jacobians differ between samples.
    stacked : bool
        Whether the Jacobians come as one array.
    local : {None, "list", "stack"}
        Whether there are local gradients, and how they come.
    whole : bool, default False
        Whether to run implicit steps by kernels for chunks, where there are any: all steps share
        their second factor. Gradients and local gradients are then those of steps, and none within.

    Attributes
    ----------
    capture_error : str or None
        Why no graph could be made of the launches, if one was tried: runs then start them one by
        one.
    captures : Counter of str
        How captures have ended in this process, for benchmarks: ``"captured"``, or why they failed.

    Raises
    ------
    MemoryLimitError
        If the device has not enough memory left.
    """

    captures: ClassVar[Counter[str]] = Counter()

    def __init__(
        self,
        program: Program,
        dtype: np.dtype[Any],
        batch: int,
        batched: NDArray[np.bool_],
        stacked: bool,
        local: str | None,
        whole: bool = False,
    ) -> None:
        self._cupy = cupy = load_cupy()
        # The device and the streams that the memory was made on.
        self._device = cupy.cuda.Device()
        self._homes = [cupy.cuda.get_current_stream()]
        # The stream of the latest run, and when that is done: it is noted after each run, since
        # later that stream may have other work, capture a graph or be gone.
        self._latest = self._homes[0]
        self._done = cupy.cuda.Event(disable_timing=True)
        self._done.record(self._latest)
        self._kept: list[Any] = []  # what tables and launches point into
        n = len(program.steps) if whole else program.n
        self._n, self._whole = n, whole
        leaves = 0 if stacked else 2 * n
        self._locals = Run.WIDTH + leaves if local == "list" else 0
        # The run descriptor as the host writes it, and as the device reads it.
        self._told = np.zeros(Run.WIDTH + leaves + (n + 1) * (local == "list"), np.int64)
        self._run = cupy.empty(len(self._told), np.int64)
        self._sent = b""  # what is there, but for the flag
        self._chain: StepValues | None = None
        self._may_capture = True
        self.capture_error: str | None = None
        self._launches = _Launches(program, dtype, batch, batched, local is not None, whole, self)
        # One entry is for exclusive scans, one for inclusive ones; a second run makes a graph.
        self._actions: list[list[Action] | None] = [None, None]
        self._graphs: list[list[Action] | None] = [None, None]

    def __del__(self) -> None:
        # CuPy gives freed memory to others on the stream it was made on; a null stream is that of
        # the current device, which may be another one here. A stream that captures a graph cannot
        # wait for what is not in it. When a process ends CuPy may be gone already, and so is
        # whatever would have to wait.
        with suppress(Exception), self._device:
            for home in {id(home): home for home in self._homes}.values():
                if not home.is_capturing():
                    home.wait_event(self._done)

    @property
    def run_table(self) -> int:
        """Address of the run table."""
        return int(self._run.data.ptr)

    def place(self, array: Any) -> int:
        """Keep an array, uploaded if it is NumPy's; its address."""
        array = self._cupy.asarray(array)
        self._kept.append(array)
        return int(array.data.ptr)

    def room(self, what: str, size: int, dtype: Any, *, zeros: bool = False) -> Any:
        """Keep and return a new array of `size` values, or raise an error if there is no room."""
        array = self._allocated(size, dtype, zeros)
        if array is None:
            # Arrays in cycles of references keep theirs until those are collected.
            gc.collect()
            array = self._allocated(size, dtype, zeros)
        if array is None:
            needed = size * np.dtype(dtype).itemsize
            free = self._cupy.cuda.Device().mem_info[0]
            free += self._cupy.get_default_memory_pool().free_bytes()
            raise MemoryLimitError(
                f"{what} would take {format_bytes(needed)}; "
                f"the device has {format_bytes(free)} left"
            )
        self._kept.append(array)
        return array

    def _allocated(self, size: int, dtype: Any, zeros: bool) -> Any:
        """Return a new array, or None if there is no room."""
        make = self._cupy.zeros if zeros else self._cupy.empty
        try:
            return make(size, dtype)
        except self._cupy.cuda.memory.OutOfMemoryError:
            return None
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            # From the runtime itself, where CuPy has no memory pool (`set_allocator(None)`).
            if "cudaErrorMemoryAllocation" not in str(error):
                raise
            return None

    def product(self, k: int) -> Parts | None:
        """Return the `k`-th product after a run, as :meth:`~.workspace.Workspace.product`.

        It is copied to host memory, which waits for the device. None if a value was not finite.
        """
        if self._run[Run.FLAG : Run.FLAG + 1].get()[0]:
            return None
        return self._launches.product(k)

    def keep(self, kept: Kept) -> None:
        """Keep a pattern, which may have been uploaded on another stream."""
        self._cupy.cuda.get_current_stream().wait_event(kept.ready)
        self._kept.append(kept)
        self._homes.append(kept.home)

    def run(
        self, chain: StepValues, local: AddedGrads, out: Any, *, inclusive: bool, stream: Any = None
    ) -> None:
        """Fill `out`, whose first gradient is there.

        `stream` is CuPy's current one, for callers that have it.
        """
        told = self._told
        told[Run.FLAG], told[Run.OUT] = 0, out.data.ptr
        stack, leaves = chain.stack, chain.leaves
        if self._whole:
            # Slopes and weights take turns.
            told[Run.WEIGHTS] = leaves[1, 0]
            stack, leaves = chain.stacks[0] if chain.stacks else None, leaves[::2]
        if stack is not None:
            told[Run.BASE : Run.SAMPLE + 1] = stack
        else:
            told[Run.WIDTH : Run.WIDTH + 2 * self._n] = leaves.ravel()
        if local.stack is not None:
            told[Run.LOCAL_BASE : Run.LOCAL_STEP + 1] = local.stack
        elif self._locals:
            told[Run.LOCALS] = self._locals
            local.fill(told[self._locals : self._locals + self._n + 1])
        if stream is None:
            stream = self._cupy.cuda.get_current_stream()
        # The memory is in use until the run before is done. Work on one stream is done in turn.
        if not is_same_stream(stream, self._latest):
            stream.wait_event(self._done)
        self._send(stream)
        self._chain = chain
        try:
            self._start(stream, inclusive)
        finally:
            self._chain = None
            self._latest = stream
            self._done.record(stream)

    def _send(self, stream: Any) -> None:
        """Bring the run descriptor to the device: of one that is there only the flag is lowered."""
        told = self._told.tobytes()
        if told == self._sent:
            flag = self._run.data + Run.FLAG * self._told.itemsize
            flag.memset_async(0, self._told.itemsize, stream)
            return
        self._sent = b""
        send(self._told, self._run, stream)
        self._sent = told

    def _start(self, stream: Any, inclusive: bool) -> None:
        graphs = self._graphs[inclusive]
        if graphs is None:
            with current(self._device.id):
                graphs = self._first_runs(stream, inclusive)
        for start in graphs:
            start(stream)

    def _first_runs(self, stream: Any, inclusive: bool) -> list[Action]:
        """Run without a graph, and return none; or return what all later runs start."""
        actions = self._actions[inclusive]
        if actions is None:
            self._homes.append(stream)  # of the tables that launches read
            actions = self._actions[inclusive] = self._launches.actions(inclusive)
        elif self._may_capture:
            # Kernels have been compiled and loaded, which no capture allows.
            graphs = self._graphs[inclusive] = self._captured(actions)
            if graphs is not None:
                return graphs
        for action in actions:
            action(stream)
        return []

    def _captured(self, actions: list[Action]) -> list[Action] | None:
        """Return a graph of all launches, or of those before, between and after calls of cuBLAS.

        CuPy makes none of those while a stream captures. None where no graph can be made.
        """
        graphs: list[Action] = []
        for apart, some in groupby(actions, lambda action: isinstance(action, _Matmul)):
            if apart:
                graphs += some
                continue
            graph = self._capture(list(some))
            if graph is None:
                return None
            graphs.append(graph.launch)
        return graphs

    def _capture(self, actions: list[Action]) -> Any:
        """Return a graph of launches, or None where none can be made."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        try:
            stream.begin_capture()
            try:
                for action in actions:
                    action(stream)
            except Exception as error:
                # The end of this capture may fail, too, and say less.
                self.capture_error = _said(error)
                raise
            finally:
                graph = stream.end_capture()
        except Exception as error:
            # If it was not for the capture, plain launches will raise it again.
            self._may_capture = False
            self.capture_error = self.capture_error or _said(error)
            self.captures[self.capture_error] += 1
            return None
        self.captures["captured"] += 1
        return graph

    def multiply(
        self, left: Callable[[StepValues], Any], right: Callable[[StepValues], Any], out: Any
    ) -> None:
        """Make ``out = left @ right`` by cuBLAS, of arrays that are known when a chain is."""
        assert self._chain is not None
        a, b = left(self._chain), right(self._chain)
        # CuPy 13 writes to arrays of the product's own shape only.
        target = out if max(a.ndim, b.ndim) > 2 else out[0]
        self._cupy.matmul(a, b, out=target)


@dataclass(frozen=True)
class _Matmul:
    """A call of cuBLAS."""

    # The workspace keeps it: a reference back would keep its memory from being freed.
    workspace: DeviceWorkspace
    left: Callable[[StepValues], Any]
    right: Callable[[StepValues], Any]
    out: Any

    def __call__(self, stream: Any) -> None:
        self.workspace.multiply(self.left, self.right, self.out)


class _Chunked(NamedTuple):
    """Kernels for a chain of small steps, the steps of a chunk, and addresses of what they need."""

    kernels: cuda_chunks.ChunkKernels
    chunk: int
    one: bool  # whether all is one launch
    memory: tuple[int, int, int]  # places of the entries, products, their exponents


class _Launches:
    """The launches of a program, and the tables that they read."""

    def __init__(
        self,
        program: Program,
        dtype: np.dtype[Any],
        batch: int,
        batched: NDArray[np.bool_],
        local: bool,
        whole: bool,
        workspace: DeviceWorkspace,
    ) -> None:
        self._program = program
        self._dtype = dtype
        self._batch = batch
        # The workspace keeps the launches: a reference back would keep its memory from being freed.
        self._workspace: DeviceWorkspace = weakref.proxy(workspace)
        self._processors = chunk_counts.multiprocessors_of(load_cupy()).number
        self._run = workspace.run_table
        self._stop = 0  # where the operations of the scan end whose launches are made
        n = program.n
        self._chunked: _Chunked | None = None
        form = form_of(program, dtype)
        if form is not None and (whole or form.terms == 0):
            self._chunked = self._make_room(form)
            return
        self._index_dtype = _index_dtype(program)
        self._kernels = level_kernels(dtype, self._index_dtype)
        self._nodes = nodes = self._table_of_nodes()
        self._nnz = nodes[:, Node.NNZ]
        self._shares, self._sweeps = Shares.of(program), _Sweeps.of(program)
        self._views: dict[int, Any] = {}
        # For values, exponents and local gradients: the pool, where each product has its place in
        # it (-1 in scratch), and what a sample of it takes.
        self._pools: list[tuple[Any, NDArray[np.int64], NDArray[np.int64]]] = []
        self._batched = self._differ(program.batched(batched))
        nodes[:, Node.BATCHED] = self._batched
        self._place_products(nodes, local)
        # For each sparse product, the terms before each segment, and the threads that a block has
        # work for.
        self._terms: dict[int, NDArray[np.int64]] = {}
        self._wanted = np.zeros(len(nodes), np.int64)
        for patterns, numbers in _sparse_products(program).items():
            nodes[numbers, Node.TERMS] = self._place_terms(*patterns, numbers)
        self._common = {
            Plan.BATCH: batch,
            Plan.LOCAL: int(local),
            Plan.NODES: workspace.place(nodes),
            Plan.OFFSETS: workspace.place(program.offsets),
        }
        self._plan, self._sweep_plan = self._place_plan(program.ops), 0
        steps = np.arange(n, dtype=np.int64)
        linear = np.stack([np.ones(n, np.int64), steps, steps, steps + 1], axis=1)
        is_sweep = bool(self._sweeps.small.all())
        self._linear = self._place_plan(self._steps_of(linear) if is_sweep else linear)

    def _differ(self, batched: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which nodes differ between samples: all of a run whose last one does.

        The blocks of a run, one for each sample, do not wait for each other.
        """
        ops = self._program.ops
        for _, runs in self._program.levels:
            for first, last in runs[runs[:, 1] - runs[:, 0] > 1].tolist():
                if not ops[first, Op.VECTOR] and not self._shares.large[first:last].any():
                    products = ops[first:last, Op.OUT]
                    batched[products] |= batched[products[-1]]
        return batched

    def _place_plan(self, ops: NDArray[np.int64]) -> int:
        """Upload a plan of such operations."""
        plan = self._common | {Plan.OPS: self._workspace.place(ops)}
        return self._workspace.place(np.array([plan[k] for k in range(Plan.WIDTH)], np.int64))

    def _steps_of(self, ops: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the table of steps of a sweep; rows of other operations say nothing."""
        vector, left, right, out = ops.T
        is_step = (vector == 1) & (right < self._program.n)
        jacobian, left, out = (np.where(is_step, column, 0) for column in (right, left, out))
        rows = np.zeros((len(ops), Sweep.WIDTH), np.int64)
        rows[:, : Sweep.JACOBIAN] = self._nodes[jacobian, : Node.INDICES + 1]
        rows[:, Sweep.JACOBIAN] = jacobian
        rows[1:, Sweep.OTHER] = (np.diff(rows[:, : Sweep.JACOBIAN], axis=0) != 0).any(axis=1)
        # As many lanes for each row as have two entries on average, and there are threads for.
        size, entries = np.maximum(rows[:, Sweep.ROWS], 1), rows[:, Sweep.NNZ]
        lanes = np.minimum(self._sweeps.threads // size, entries // size // 2)
        for shift in range(1, cuda_sweeps.LANES.bit_length()):
            rows[lanes >= 1 << shift, Sweep.SHIFT] = shift
        offsets = self._program.offsets
        rows[:, Sweep.BEFORE], rows[:, Sweep.AFTER] = offsets[left], offsets[out]
        return rows

    def actions(self, inclusive: bool) -> list[Action]:
        """Return what an exclusive or an inclusive scan does."""
        program = self._program
        self._stop = len(program.ops) - (not inclusive)
        if self._chunked is not None:
            return self._chunks(self._chunked, len(program.steps) - (not inclusive))
        actions = [action for _, runs in program.levels for action in self._level(runs)]
        if inclusive:
            last = len(program.ops) - 1
            actions += self._level(np.array([[last, last + 1]], np.int64))
        # A program that makes no gradients has none to make again.
        if program.products and program.ops[:-1, Op.VECTOR].any():
            # One block for each sample makes them again if the flag is raised.
            steps, one, first = (
                program.n - (not inclusive),
                np.ones(1, np.int64),
                np.zeros(1, np.int64),
            )
            unit = self._units(np.array([[0, steps]]), one, first, Mode.ALL + first)
            kernel, threads = self._kernels.vectors, THREADS
            if self._sweeps.small.all():
                kernel, threads = self._kernels.sweep_steps, self._sweeps.threads
            actions.append(self._launch(kernel, self._batch, threads, self._linear, unit, 1))
        return actions

    def _launch(
        self,
        kernel: Any,
        batch: int,
        threads: int,
        plan: int,
        units: NDArray[np.int64],
        guarded: int,
    ) -> Action:
        arguments = self._run, plan, self._workspace.place(units), batch, guarded
        return partial(_launch, kernel, len(units) * batch, threads, arguments)

    # -- Chunked --------------------------------------------------------------------------------

    def _chunks(self, chunked: _Chunked, steps: int) -> list[Action]:
        """Return the three phases of a chain of small steps, or what does all of them."""
        if steps == 0:
            return []
        kernels, chunk, one, memory = chunked
        phases = cuda_chunks.launches(kernels, self._run, *memory, steps, self._batch, chunk, one)
        return [
            partial(_launch, kernel, blocks, threads, arguments)
            for kernel, blocks, threads, arguments in phases
        ]

    def _make_room(self, form: ChunkForm) -> _Chunked:
        """Prepare the kernels for chunks, and the memory that they need."""
        steps, chunks, workspace = self._program.steps, self._program.chunks, self._workspace
        size, step = form.size, steps[0]
        nnz = size * size if form.terms else form.entries
        kernels = cuda_chunks.chunk_kernels(
            size, nnz, self._dtype, terms=form.terms, states=form.states
        )
        assert chunks is not None
        chunk = -(-len(steps) // chunks)
        one = in_one_launch(form, self._dtype, len(steps), self._batch, chunk)
        values, exponents = cuda_chunks.scratch(size, len(steps), self._batch, chunk, one)
        places = _terms_of(step, form) if isinstance(step, ImplicitPattern) else _places_of(step)
        memory = (
            0 if nnz == size * size and form.terms == 0 else workspace.place(places),
            workspace.room("the products of the chunks", values, self._dtype).data.ptr,
            workspace.room("the exponents of the chunks", exponents, np.int32, zeros=one).data.ptr,
        )
        return _Chunked(kernels, chunk, one, memory)

    # -- Levels ---------------------------------------------------------------------------------

    def _level(self, runs: NDArray[np.int64]) -> list[Action]:
        """Return the launches of a level."""
        return [
            action
            for together, part in _launched(runs, self._shares.large)
            for action in self._together(together, part)
        ]

    def _together(self, runs: NDArray[np.int64], part: NDArray[np.int64]) -> list[Action]:
        """Return a launch of independent runs; `part` numbers them for their scratch."""
        ops = self._program.ops
        only = _only(runs)
        blocks = np.where(only >= 0, self._blocks(only), 1)
        vector = ops[runs[:, 0], Op.VECTOR] == 1
        out = ops[runs[:, 1] - 1, Op.OUT]
        batch = self._batch if vector.any() or self._batched[out].any() else 1
        if self._sweeps.take(runs):
            return [self._sweep(runs, part)]
        blas = (only >= 0) & self._shares.blas[only]
        mode = np.where(blas, Mode.CHECK, Mode.ALL)
        kernel = self._kernels.vectors if vector.all() else self._kernels.level
        threads = self._threads(runs)
        units = self._units(runs, blocks, part, mode)
        actions = [self._launch(kernel, batch, threads, self._plan, units, 0)]
        if blas.any():
            actions += [self._matmul(int(op)) for op in only[blas]]
            settle = np.full(blas.sum(), Mode.SETTLE)
            units = self._units(runs[blas], blocks[blas], part[blas], settle)
            actions.append(self._launch(kernel, batch, threads, self._plan, units, 0))
        later = (blocks > 1) & ~vector
        if later.any():
            few = np.minimum(blocks[later], _RESCALING)
            units = self._units(runs[later], few, part[later], mode[later])
            rescale = self._kernels.rescale
            actions.append(self._launch(rescale, batch, THREADS, self._plan, units, 0))
        return actions

    def _sweep(self, runs: NDArray[np.int64], part: NDArray[np.int64]) -> Action:
        """Return the launch of runs that take a gradient through small steps each."""
        if self._sweep_plan == 0:
            self._sweep_plan = self._place_plan(self._steps_of(self._program.ops))
        units = self._units(runs, np.ones_like(part), part, np.full_like(part, Mode.ALL))
        kernel, threads = self._kernels.sweep_steps, self._sweeps.threads
        return self._launch(kernel, self._batch, threads, self._sweep_plan, units, 0)

    def _blocks(self, ops: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return into how many parts the rows of each operation are cut."""
        blocks, vector = self._shares.blocks[ops], self._program.ops[ops, Op.VECTOR] == 1
        # More of them only wait for each other; a block goes through several tiles.
        return np.where(vector, np.minimum(blocks, _WAVES * self._processors), blocks)

    def _units(
        self,
        runs: NDArray[np.int64],
        blocks: NDArray[np.int64],
        part: NDArray[np.int64],
        mode: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return a unit for each of the `blocks` parts of each run."""
        run, firsts = np.repeat(np.arange(len(runs)), blocks), np.cumsum(blocks) - blocks
        units = np.empty((len(run), Unit.WIDTH), np.int64)
        units[:, [Unit.FIRST, Unit.LAST]] = runs[run]
        units[:, Unit.BLOCK] = np.arange(len(run)) - firsts[run]
        units[:, Unit.BLOCKS] = blocks[run]
        units[:, Unit.START], units[:, Unit.STOP] = 0, EVERY
        units[:, Unit.PART] = part[run]
        units[:, Unit.MODE] = mode[run]
        units[:, Unit.NEXT] = -1
        behind = self._next(runs) if (blocks > 1).any() else ()
        for k in np.flatnonzero(blocks > 1).tolist():
            bounds = self._bounds(int(runs[k, 0]), int(blocks[k]))
            own = slice(firsts[k], firsts[k] + blocks[k])
            units[own, Unit.NEXT] = behind[k]
            units[own, Unit.START], units[own, Unit.STOP] = bounds[:-1], bounds[1:]
        return units

    def _next(self, runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the operation behind each run, or -1 if it is no vector by a like Jacobian.

        Values of two Jacobians with one pattern are read at the same places.
        """
        patterns, ops = self._program.patterns, self._program.ops[: self._stop]
        behind = np.full(len(runs), -1, np.int64)
        for k, (first, stop) in enumerate(runs.tolist()):
            if stop < len(ops) and ops[first, Op.VECTOR] and ops[stop, Op.VECTOR]:
                right, other = ops[[first, stop], Op.RIGHT].tolist()
                if other < self._program.n and patterns[right] is patterns[other]:
                    behind[k] = stop
        return behind

    def _bounds(self, op: int, blocks: int) -> NDArray[np.int64]:
        """Return what comes before each of `blocks` parts of an operation, and all there is.

        That is tiles, or segments or rows with about as many terms or entries in each part.
        """
        vector, _, right, out = self._program.ops[op].tolist()
        pattern, parts = self._program.patterns[right], np.arange(blocks + 1)
        if vector:
            return np.asarray((len(_tiles_of(pattern)) - 1) * parts // blocks)
        if out in self._terms:
            before = self._terms[out]
        elif pattern.kind == "general":
            before = pattern.indptr
        else:
            rows = pattern.shape[0]
            groups = -(-rows // DENSE_ROWS) * parts // blocks
            return np.asarray(np.minimum(groups * DENSE_ROWS, rows))
        bounds = np.searchsorted(before, int(before[-1]) * parts // blocks)
        bounds[-1] = len(before) - 1
        return bounds

    def _threads(self, runs: NDArray[np.int64]) -> int:
        """Return threads of a block: fewer where there would be nothing to do for more."""
        program = self._program
        ops = program.ops[runs[:, 0]]
        right, out = ops[:, Op.RIGHT], np.where(ops[:, Op.VECTOR] == 1, 0, ops[:, Op.OUT])
        # Each thread has a few entries of a tile, or of a product; or a warp, or some lanes of one,
        # have a segment.
        wanted = np.minimum(self._nnz[right] // 4, STAGE // 4)
        sparse = self._wanted[out]
        # More of them than a sparse product has work for only load what they do not need.
        wanted = sparse[sparse > 0] if sparse.any() else wanted
        threads = min(32, THREADS)
        while threads < min(int(np.median(wanted)), THREADS):
            threads *= 2
        return threads

    def _matmul(self, op: int) -> Action:
        left, right, out = self._program.ops[op, [Op.LEFT, Op.RIGHT, Op.OUT]].tolist()
        # A weak reference, as the workspace is here.
        return _Matmul(self._workspace, self._matrix(right), self._matrix(left), self._views[out])

    def _matrix(self, node: int) -> Callable[[StepValues], Any]:
        """Return a dense node as an array ``(rows, cols)`` or ``(batch, rows, cols)``."""
        if node >= self._program.n:
            view = self._views[node]
            return lambda chain: view
        shape = self._program.patterns[node].shape

        def matrix(chain: StepValues) -> Any:
            values = chain.array(node)
            return values.reshape(*values.shape[:-1], *shape)

        return matrix

    # -- Tables ---------------------------------------------------------------------------------

    def _table_of_nodes(self) -> NDArray[np.int64]:
        """Return the node table, as far as patterns and Jacobians go."""
        program, n = self._program, self._program.n
        rows: dict[Pattern, list[int]] = {}
        for pattern in set(program.patterns):
            kept = _keep(pattern, self._index_dtype)
            self._workspace.keep(kept)
            arrays = kept.indptr, kept.indices, kept.tiles
            rows[pattern] = [
                KINDS[pattern.kind],
                *pattern.shape,
                pattern.nnz,
                *(0 if array is None else array.data.ptr for array in arrays),
                len(kept.tiles) - 1,
            ]
        nodes = np.zeros((len(program.patterns), Node.WIDTH), np.int64)
        nodes[:, : Node.TILE_COUNT + 1] = [rows[pattern] for pattern in program.patterns]
        nodes[:n, Node.STORE] = Store.CALLER
        nodes[:n, Node.VALUES] = np.arange(n)
        return nodes

    def _place_products(self, nodes: NDArray[np.int64], local: bool) -> None:
        """Give every product its place: in the pool, or in the scratch of the run that makes it."""
        program, batch = self._program, self._batch
        if not program.products:
            return
        products, in_scratch = nodes[program.n :], _in_scratch(program)
        batched = products[:, Node.BATCHED] == 1
        pools = _Pools.of(program, batch, batched, local)
        products[:, Node.STORE] = np.where(in_scratch, Store.SCRATCH, Store.POOL)
        columns: tuple[tuple[str, int, Any], ...] = (
            ("the products", Node.VALUES, self._dtype),
            ("their exponents", Node.EXPONENTS, np.int32),
            ("their local gradients", Node.LOCAL, self._dtype),
        )
        for counts, starts, stride, size, (what, column, dtype) in zip(
            *pools, columns, strict=True
        ):
            pool, itemsize = self._workspace.room(what, int(size), dtype), np.dtype(dtype).itemsize
            products[:, column] = pool.data.ptr + starts * itemsize
            products[:, column + 1] = np.where(in_scratch, stride, counts) * itemsize
            self._pools.append((pool, np.where(in_scratch, -1, starts), counts))
        kept, widths = np.flatnonzero(~in_scratch), np.where(batched, batch, 1)
        self._view_products(self._pools[0][0], pools.starts[0], kept, widths)
        first, total = places(State.WIDTH * widths)
        state = self._workspace.room("the state of the products", int(total), np.int32, zeros=True)
        products[:, Node.STATE] = state.data.ptr + 4 * first

    def _place_terms(self, a: Pattern, x: Pattern, c: Pattern, numbers: list[int]) -> int:
        """Upload the terms of a sparse product, which nodes of these `numbers` are."""
        terms = lay_out_terms(a, x, c, longest_segment(self._dtype), self._index_dtype)
        longest = int(np.diff(terms.starts).max())
        mean = float(terms.counts.mean()) if len(terms.counts) else 0.0
        shift = 2
        while 1 << shift < min(mean, WARP):
            shift += 1
        groups = segments_at_once(self._dtype, longest)
        aligned = terms.aligned - 1 if 1 << shift > terms.aligned else 0
        table = np.zeros(Terms.WIDTH, np.int64)
        table[: Terms.A_STARTS] = len(terms.firsts), shift, groups, longest, aligned
        *arrays, work, _ = terms
        table[Terms.A_STARTS :] = [self._workspace.place(array) for array in arrays]
        self._terms |= dict.fromkeys(numbers, np.append(0, np.cumsum(work)))
        self._wanted[numbers] = min(len(terms.firsts), groups) << shift
        return self._workspace.place(table)

    def product(self, k: int) -> Parts:
        """Return a product as :meth:`DeviceWorkspace.product` does."""
        pattern = self._program.patterns[self._program.n + k]
        width = self._batch if self._batched[self._program.n + k] else 1

        def rows(column: int, count: int, size: int) -> NDArray[Any]:
            pool, place, step = self._pools[column]
            first, stop = place[k], place[k] + count * step[k]
            array: NDArray[Any] = pool[first:stop].get().reshape(count, step[k])[:, :size]
            return array

        values = rows(0, width, pattern.nnz)
        exponents = rows(1, width, pattern.shape[1] + 1)
        # Kernels do not write the exponents of a product that is in range.
        exponents[exponents[:, -1] == 0] = 0
        exponents[:, -1] = exponents[:, -1] != 0
        return values, exponents, rows(2, self._batch, pattern.shape[0])

    def _view_products(
        self,
        pool: Any,
        first: NDArray[np.int64],
        kept: NDArray[np.int64],
        widths: NDArray[np.int64],
    ) -> None:
        """Make arrays ``(batch or 1, rows, cols)`` of the large dense products, for cuBLAS."""
        n = self._program.n
        for k in kept.tolist():
            pattern, place, width = self._program.patterns[n + k], int(first[k]), int(widths[k])
            if _is_large(pattern):
                values = pool[place : place + width * pattern.nnz]
                self._views[n + k] = values.reshape(width, *pattern.shape)


def _said(error: Exception) -> str:
    """Return the name and the message of an error."""
    return f"{type(error).__name__}: {error}"


def _launch(
    kernel: Any, blocks: int, threads: int, arguments: tuple[int, ...], stream: Any
) -> None:
    _device.launch(kernel, blocks, threads, stream.ptr, *arguments)


def _keep(pattern: Pattern, index_dtype: np.dtype[Any]) -> Kept:
    """Return what kernels read of a pattern, on the current device."""
    cupy = load_cupy()
    known = _patterns.setdefault(pattern, {})
    key = cupy.cuda.Device().id, index_dtype
    if key not in known:
        indptr = indices = None
        if pattern.kind == "general":
            indptr = cupy.asarray(pattern.indptr.astype(index_dtype, copy=False))
            indices = cupy.asarray(pattern.indices.astype(index_dtype, copy=False))
        tiles = cupy.asarray(_tiles_of(pattern))
        home, ready = cupy.cuda.get_current_stream(), cupy.cuda.Event(disable_timing=True)
        ready.record(home)
        known[key] = Kept(indptr, indices, tiles, home, ready)
    return known[key]


def _tiles_of(pattern: Pattern) -> NDArray[np.int64]:
    """Return the first row of every tile, and the number of rows."""
    if pattern not in _tiles:
        _tiles[pattern] = _cut(pattern)
    return _tiles[pattern]


def _cut(pattern: Pattern) -> NDArray[np.int64]:
    rows, cols = pattern.shape
    if pattern.kind != "general":
        step = 4 * THREADS
        if pattern.kind == "dense":
            # A row gets as many threads as have a few entries each, 32 at most.
            lanes = 1
            while lanes < 32 and 8 * lanes <= cols:
                lanes *= 2
            step = max(1, THREADS // lanes)
        return np.append(np.arange(0, rows, step, dtype=np.int64), rows)
    indptr, tiles = pattern.indptr, [0]
    while tiles[-1] < rows:
        first = tiles[-1]
        last = int(np.searchsorted(indptr, int(indptr[first]) + STAGE, side="right")) - 1
        tiles.append(min(max(last, first + 1), first + THREADS, rows))
    return np.array(tiles, np.int64)


def _places_of(pattern: Pattern) -> NDArray[np.int32]:
    """Return ``row·cols + column`` of every entry."""
    rows = rows_of(pattern)
    return (rows * pattern.shape[1] + pattern.indices).astype(np.int32)


def _terms_of(step: ImplicitPattern, form: ChunkForm) -> NDArray[np.int32]:
    """Return the numbers of slopes and weights, as :class:`.ChunkKernels` has them."""
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
