"""The launches of a program on a CUDA device, the tables that they read, and where products lie."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays.addresses import kernel_address
from ...chains.chain import Chain
from ...kernels.cpu.tables import SLOTS, Op, Store
from ...kernels.cuda import chunks as cuda_chunks
from ...kernels.cuda import device as _device
from ...kernels.cuda import levels, sweeps
from ...kernels.cuda.levels import THREADS
from ...kernels.cuda.matvec import STAGE
from ...kernels.cuda.products import DENSE_ROWS, WARP
from ...kernels.cuda.tables import EVERY, Mode, Node, Plan, State, Sweep, Terms, Unit
from ...locks import cached_property
from ...symbolic.pattern import Pattern, index_dtype
from ...symbolic.program import Program
from ...symbolic.terms import TermCounts, count_terms, lay_out_terms
from ..workspace import KINDS, Parts, places
from . import chunks as forms
from .chunks import ChunkForm
from .memory import CountedMemory, TakenMemory
from .patterns import tiles_of
from .shares import Shares, Sweepable, is_large

# Blocks for each multiprocessor that share the rows of one step.
_WAVES = 16
# Blocks that bring a product into range, at most.
_RESCALING = 256
# One of the things that a run does in turn, given a stream.
Action = Callable[[Any], None]
# Counts of terms by the product's pattern, then by those of its operands and the longest segment.
_term_counts: weakref.WeakKeyDictionary[Pattern, dict[Any, TermCounts]]
_term_counts = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Matmul:
    """A call of cuBLAS."""

    # The workspace keeps it: a reference back would keep its memory from being freed.
    workspace: Any
    left: Callable[[Chain], Any]
    right: Callable[[Chain], Any]
    out: Any

    def __call__(self, stream: Any) -> None:
        """Make it on CuPy's current stream, which is this."""
        self.workspace.multiply(self.left, self.right, self.out)


class _Chunked(NamedTuple):
    """A chain of small steps: what these are, how many are in a chunk, and what kernels need."""

    form: ChunkForm
    chunk: int
    one: bool  # whether all is one launch
    memory: tuple[int, int, int]  # places of the entries, products, their exponents


class _Planned(NamedTuple):
    """A launch: which kernel runs for how many samples, and which parts of runs its blocks take."""

    kernel: str
    batch: int
    runs: NDArray[np.int64]
    blocks: NDArray[np.int64]  # of each run, for every sample
    part: NDArray[np.int64]  # of the scratch
    mode: NDArray[np.int64]


# The kernel that makes gradients again if a flag is raised, in place of the name of one.
_AGAIN = "again"


class Launches:
    """The launches of a program, and the tables that they read.

    Parameters
    ----------
    program, dtype, batch, batched, whole
        As for a :class:`~.workspace.DeviceWorkspace`.
    local : bool
        Whether there are local gradients.
    memory : TakenMemory or CountedMemory
        Where tables and products are; or what counts their bytes, and makes none.
    """

    def __init__(
        self,
        program: Program,
        dtype: np.dtype[Any],
        batch: int,
        batched: NDArray[np.bool_],
        local: bool,
        whole: bool,
        memory: TakenMemory | CountedMemory,
    ) -> None:
        self._program = program
        self._dtype = dtype
        self._batch = batch
        # The memory keeps the launches: a reference back would keep its memory from being freed.
        self._memory: TakenMemory | CountedMemory = weakref.proxy(memory)
        self._run = memory.run_table
        self._stop = 0  # where the operations of the scan end whose launches are made
        n = program.n
        self._chunked: _Chunked | None = None
        form = forms.form_of(program, dtype)
        if form is not None and (whole or form.terms == 0):
            self._chunked = self._make_room(form)
            return
        self._index_dtype = _index_dtype(program)
        self._kernels = levels.level_kernels(dtype, self._index_dtype)
        self._nodes = nodes = self._table_of_nodes()
        self._nnz = nodes[:, Node.NNZ]
        self._shares, self._sweeps = Shares.of(program), Sweepable.of(program)
        self._is_vector = program.ops[:, Op.VECTOR] == 1
        # Into how many parts the rows of each operation are cut. More parts of a vector only wait
        # for each other; a block goes through several tiles.
        blocks, most = self._shares.blocks, _WAVES * memory.processors
        self._blocks = np.where(self._is_vector, np.minimum(blocks, most), blocks)
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
            Plan.NODES: memory.place(nodes),
            Plan.OFFSETS: memory.place(program.offsets),
        }
        self._plan = self._place_plan(program.ops)
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
        plan = self._common | {Plan.OPS: self._memory.place(ops)}
        return self._memory.place(np.array([plan[k] for k in range(Plan.WIDTH)], np.int64))

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
        for shift in range(1, sweeps.LANES.bit_length()):
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
        return [self._action(each) for each in self._listed(inclusive)]

    def count(self) -> None:
        """Count what the actions of both scans take, in memory that is only counted."""
        program, memory = self._program, self._memory
        assert isinstance(memory, CountedMemory)
        if self._chunked is not None:
            return
        last = len(program.ops) - 1
        # The last operation is one of an inclusive scan alone.
        last_level = self._level(np.array([[last, last + 1]], np.int64))
        for scans, launches in ((2, self._listed(False)), (1, last_level)):
            for planned in launches:
                if isinstance(planned, _Planned):
                    # That of sweeps is placed when it is first asked for.
                    self._plan_of(planned.kernel)
                    memory.count(*[8 * Unit.WIDTH * int(planned.blocks.sum())] * scans)
        # Values that come as weights, and the index that reads them.
        itemsize = self._dtype.itemsize
        memory.count(*(index.nnz * (itemsize + 8) for _, index in program.indexed))

    def _listed(self, inclusive: bool) -> Iterator[_Planned | int]:
        """Yield the launches of a scan, and the operations that cuBLAS does between them."""
        program = self._program
        for _, runs in program.levels:
            yield from self._level(runs)
        if inclusive:
            last = len(program.ops) - 1
            yield from self._level(np.array([[last, last + 1]], np.int64))
        # A program that makes no gradients has none to make again.
        if program.products and program.ops[:-1, Op.VECTOR].any():
            steps = program.n - (not inclusive)
            one, first = np.ones(1, np.int64), np.zeros(1, np.int64)
            runs = np.array([[0, steps]], np.int64)
            yield _Planned(_AGAIN, self._batch, runs, one, first, Mode.ALL + first)

    def _action(self, planned: _Planned | int) -> Action:
        if not isinstance(planned, _Planned):
            return self._matmul(planned)
        name, batch = planned.kernel, planned.batch
        plan, guarded = self._plan_of(name), int(name == _AGAIN)
        if guarded:
            name = "sweep_steps" if self._sweeps.small.all() else "vectors"
        if name == "sweep_steps":
            threads = self._sweeps.threads
        else:
            threads = THREADS if guarded or name == "rescale" else self._threads(planned.runs)
        units = self._units(planned)
        arguments = self._run, plan, self._memory.place(units), batch, guarded
        kernel = getattr(self._kernels, name)
        return partial(_launch, kernel, len(units) * batch, threads, arguments)

    def _plan_of(self, kernel: str) -> int:
        """Return where the plan of a kernel is."""
        if kernel == "sweep_steps":
            return self._sweep_plan
        return self._linear if kernel == _AGAIN else self._plan

    @cached_property
    def _sweep_plan(self) -> int:
        return self._place_plan(self._steps_of(self._program.ops))

    # -- Chunked --------------------------------------------------------------------------------

    def _chunks(self, chunked: _Chunked, steps: int) -> list[Action]:
        """Return the three phases of a chain of small steps, or what does all of them."""
        if steps == 0:
            return []
        form, chunk, one, memory = chunked
        nnz = form.size * form.size if form.terms else form.entries
        kernels = cuda_chunks.chunk_kernels(
            form.size, nnz, self._dtype, terms=form.terms, states=form.states
        )
        phases = cuda_chunks.launches(kernels, self._run, *memory, steps, self._batch, chunk, one)
        return [
            partial(_launch, kernel, blocks, threads, arguments)
            for kernel, blocks, threads, arguments in phases
        ]

    def _make_room(self, form: ChunkForm) -> _Chunked:
        """Take the memory that kernels for chunks need."""
        steps, chunks, memory = self._program.steps, self._program.chunks, self._memory
        assert chunks is not None
        chunk, is_dense = -(-len(steps) // chunks), form.entries == form.size * form.size
        one = forms.in_one_launch(form, self._dtype, len(steps), self._batch, chunk)
        values, exponents = cuda_chunks.scratch(form.size, len(steps), self._batch, chunk, one)
        places = 0
        if form.terms or not is_dense:
            places = memory.place(forms.places_of(steps[0], form))
        columns = memory.room("the products of the chunks", values, self._dtype)
        powers = memory.room("the exponents of the chunks", exponents, np.int32, zeros=one)
        return _Chunked(form, chunk, one, (places, kernel_address(columns), kernel_address(powers)))

    # -- Levels ---------------------------------------------------------------------------------

    def _level(self, level: NDArray[np.int64]) -> Iterator[_Planned | int]:
        """Yield the launches of a level, each of independent runs."""
        ops, shares = self._program.ops, self._shares
        for runs, part in _launched(level, shares.large):
            if self._sweeps.take(runs):
                one, mode = np.ones_like(part), np.full_like(part, Mode.ALL)
                yield _Planned("sweep_steps", self._batch, runs, one, part, mode)
                continue
            only = _only(runs)
            blocks = np.where(only >= 0, self._blocks[only], 1)
            vector = self._is_vector[runs[:, 0]]
            out = ops[runs[:, 1] - 1, Op.OUT]
            batch = self._batch if vector.any() or self._batched[out].any() else 1
            blas = (only >= 0) & shares.blas[only]
            mode = np.where(blas, Mode.CHECK, Mode.ALL)
            kernel = "vectors" if vector.all() else "level"
            yield _Planned(kernel, batch, runs, blocks, part, mode)
            if blas.any():
                yield from only[blas].tolist()
                settle = np.full(blas.sum(), Mode.SETTLE)
                yield _Planned(kernel, batch, runs[blas], blocks[blas], part[blas], settle)
            later = (blocks > 1) & ~vector
            if later.any():
                few = np.minimum(blocks[later], _RESCALING)
                yield _Planned("rescale", batch, runs[later], few, part[later], mode[later])

    def _units(self, planned: _Planned) -> NDArray[np.int64]:
        """Return a unit for each of the blocks of each run."""
        _, _, runs, blocks, part, mode = planned
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
            return np.asarray((len(tiles_of(pattern)) - 1) * parts // blocks)
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
        return Matmul(self._memory, self._matrix(right), self._matrix(left), self._views[out])

    def _matrix(self, node: int) -> Callable[[Chain], Any]:
        """Return a dense node as an array ``(rows, cols)`` or ``(batch, rows, cols)``."""
        if node >= self._program.n:
            view = self._views[node]
            return lambda chain: view
        shape = self._program.patterns[node].shape

        def matrix(chain: Chain) -> Any:
            values = chain.array(node)
            return values.reshape(*values.shape[:-1], *shape)

        return matrix

    # -- Tables ---------------------------------------------------------------------------------

    def _table_of_nodes(self) -> NDArray[np.int64]:
        """Return the node table, as far as patterns and Jacobians go."""
        program, n = self._program, self._program.n
        rows: dict[Pattern, list[int]] = {}
        for pattern in set(program.patterns):
            addresses = self._memory.keep(pattern, self._index_dtype)
            tiles = len(tiles_of(pattern)) - 1
            rows[pattern] = [KINDS[pattern.kind], *pattern.shape, pattern.nnz, *addresses, tiles]
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
            pool, itemsize = self._memory.room(what, int(size), dtype), np.dtype(dtype).itemsize
            products[:, column] = kernel_address(pool) + starts * itemsize
            products[:, column + 1] = np.where(in_scratch, stride, counts) * itemsize
            self._pools.append((pool, np.where(in_scratch, -1, starts), counts))
        widths = np.where(batched, batch, 1)
        # Arrays ``(batch or 1, rows, cols)`` of the large dense products, for cuBLAS.
        values, starts, _ = self._pools[0]
        for k in np.flatnonzero(~in_scratch).tolist():
            pattern, start, width = program.patterns[program.n + k], int(starts[k]), int(widths[k])
            if is_large(pattern):
                view = values[start : start + width * pattern.nnz]
                self._views[program.n + k] = view.reshape(width, *pattern.shape)
        first, total = places(State.WIDTH * widths)
        state = self._memory.room("the state of the products", int(total), np.int32, zeros=True)
        products[:, Node.STATE] = kernel_address(state) + 4 * first

    def _place_terms(self, a: Pattern, x: Pattern, c: Pattern, numbers: list[int]) -> int:
        """Upload the terms of a sparse product, which nodes of these `numbers` are."""
        size = levels.longest_segment(self._dtype)
        if isinstance(self._memory, CountedMemory):
            counts, key = _term_counts.setdefault(c, {}), (a.key, x.key, size)
            if key not in counts:
                counts[key] = count_terms(a, x, c, size)
            self._memory.count(8 * Terms.WIDTH, *counts[key].nbytes(self._index_dtype.itemsize))
            return 0
        terms = lay_out_terms(a, x, c, size, self._index_dtype)
        longest = int(np.diff(terms.starts).max())
        mean = float(terms.counts.mean()) if len(terms.counts) else 0.0
        shift = 2
        while 1 << shift < min(mean, WARP):
            shift += 1
        groups = levels.segments_at_once(self._dtype, longest)
        aligned = terms.aligned - 1 if 1 << shift > terms.aligned else 0
        table = np.zeros(Terms.WIDTH, np.int64)
        table[: Terms.A_STARTS] = len(terms.firsts), shift, groups, longest, aligned
        *arrays, work, _ = terms
        table[Terms.A_STARTS :] = [self._memory.place(array) for array in arrays]
        self._terms |= dict.fromkeys(numbers, np.append(0, np.cumsum(work)))
        self._wanted[numbers] = min(len(terms.firsts), groups) << shift
        return self._memory.place(table)

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
        numbers = np.flatnonzero(length > depth)
        yield runs[numbers, :1] + np.array([depth, depth + 1]), numbers


def _only(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the one operation of each run, or -1 for a run of several."""
    return np.where(runs[:, 1] - runs[:, 0] == 1, runs[:, 0], -1)


def _in_scratch(program: Program) -> NDArray[np.bool_]:
    """Return which products are kept for their run only; but cuBLAS knows no scratch."""
    large = [is_large(pattern) for pattern in program.patterns[program.n :]]
    in_scratch: NDArray[np.bool_] = (program.slots >= 0) & ~np.array(large, bool)
    return in_scratch


def _launch(
    kernel: Any, blocks: int, threads: int, arguments: tuple[int, ...], stream: Any
) -> None:
    _device.launch(kernel, blocks, threads, stream.ptr, *arguments)
