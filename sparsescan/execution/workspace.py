"""Workspace: the memory and the tables that a program runs in on the CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.addresses import kernel_address
from ..kernels.addresses import address_of
from ..kernels.cpu import run, tables
from ..kernels.cpu.tables import Kind, Node, Op, Run, Stage, Store
from ..symbolic.indexed import IndexedPattern
from ..symbolic.pattern import Pattern
from ..symbolic.program import Program
from .solves import Given, Solves, singular, solves_bytes
from .stages import STAGE_BYTES, Stages
from .sweeps import Sweeps, sweep_bytes
from .threads import work

KINDS = {"dense": Kind.DENSE, "general": Kind.CSR, "diagonal": Kind.DIAGONAL}

# The most bytes of tables and objects: of a run, per step, per product.
_RUN_BYTES, _STEP_BYTES, _PRODUCT_BYTES = 32_768, 1024, 3072

# Values, exponents and local gradients of a product, with a row for each sample.
Parts = tuple[NDArray[Any], NDArray[np.int32], NDArray[Any]]


class WorkspaceMemory(NamedTuple):
    """How much memory a run takes, and the place of every product in it, by counting only.

    Attributes
    ----------
    starts : ndarray of int64, shape (products, 3)
        The starts of the values, exponents and local gradients of each product in a pool.
    slot : tuple of int
        Entries, columns and rows of the largest product in scratch: the size of a slot.
    scratch : tuple of int
        Where the slots of thread 0 start among values, exponents and local gradients.
    sizes : tuple of int
        Elements of the pools, slots included: values, exponents, local gradients.
    accumulator : int
        Columns of the widest product: the size of a thread's accumulator of a row.
    lanes : int
        Columns of the widest Jacobian that samples share; eight samples are interleaved for it.
    """

    starts: NDArray[np.int64]
    slot: tuple[int, ...]
    scratch: tuple[int, ...]
    sizes: tuple[int, ...]
    accumulator: int
    lanes: int

    @classmethod
    def of(
        cls,
        program: Program,
        batch: int,
        batched: NDArray[np.bool_],
        local: bool,
        threads: int,
        shared: Iterable[Pattern],
    ) -> WorkspaceMemory:
        """Return the memory of runs of `batch` samples, of which nodes `batched` differ.

        `shared` are the patterns of Jacobians that the samples share.
        """
        n, patterns = program.n, program.patterns
        counts = np.array([(p.nnz, p.shape[1] + 1, p.shape[0]) for p in patterns[n:]], np.int64)
        counts = counts.reshape(-1, 3)
        kept = program.slots < 0
        widths = np.where(batched[n:], batch, 1)
        samples = np.stack([widths, widths, np.full(len(widths), batch * local)], axis=1)
        starts, totals = places(counts * samples * kept[:, None])
        slots = 0 if kept.all() else tables.SLOTS * threads
        nnz, cols, rows = (int(size) for size in counts[~kept].max(axis=0, initial=0))
        scratch = slots * nnz, slots * cols, slots * rows * batch * local
        sizes = tuple(int(total) + more for total, more in zip(totals, scratch, strict=True))
        wide = [pattern.shape[1] for pattern in shared if pattern.kind != "diagonal"]
        return cls(
            starts,
            slot=(nnz, max(cols - 1, 0), rows),
            scratch=tuple(int(total) for total in totals),
            sizes=sizes,
            accumulator=max((pattern.shape[1] for pattern in patterns[n:]), default=0),
            lanes=max(wide, default=0) if batch > 2 else 0,
        )


def workspace_bytes(program: Program, dtype: np.dtype[Any], batch: int, threads: int) -> int:
    """Return a bound on the bytes of a program and a run, without Jacobians and gradients.

    It assumes that every Jacobian differs between samples, that there are local gradients, and that
    products leave the range of floating point. It includes the linear scan that runs if a value is
    not finite, and the kept factors of matrices to solve with.
    """
    patterns = set(program.patterns)
    batched = np.ones(len(program.patterns), bool)
    memory = WorkspaceMemory.of(program, batch, batched, True, threads, patterns)
    values, exponents, local = memory.sizes
    values += local + threads * (memory.accumulator + 8 * memory.lanes)
    if program.products:
        # Both operands of a product, and a second copy of the earlier one, during scaling.
        rows, cols = np.array([pattern.shape for pattern in program.patterns], np.int64).T
        nnz = np.array([pattern.nnz for pattern in program.patterns], np.int64)
        read = program.ops[program.ops[:, Op.VECTOR] == 0][:, [Op.LEFT, Op.RIGHT]]
        values += threads * int((nnz[read] @ [2, 1]).max() + 2 * cols[read].max())
        exponents += threads * int(cols[read].max() + rows[read].max()) * 6
    copied = [p for p in patterns if p.kind == "general" and p.index_dtype != program.index_dtype]
    indices = program.index_bytes + sum(8 * (p.nnz + p.shape[0] + 1) for p in copied)
    values += program.gathered
    held = table_bytes(program.n, program.products)
    if threads > 1:
        # Stages of products whose rows are shared: three for each sample.
        held += STAGE_BYTES * 3 * batch * program.products
    if program.solved:
        held += STAGE_BYTES * program.n
        held += solves_bytes(program.solved.values(), dtype.itemsize, batch, threads)
        held += sweep_bytes(program.solved.values(), dtype.itemsize, batch)
    return dtype.itemsize * values + 4 * exponents + indices + held


def table_bytes(n: int, products: int) -> int:
    """Return a bound on the bytes of tables and objects for some steps and products."""
    return _RUN_BYTES + _STEP_BYTES * n + _PRODUCT_BYTES * products


class Workspace:
    """Memory and tables for running a program on one batch size, kept from run to run.

    Parameters
    ----------
    program : Program
        The program to run.
    leaves : ndarray of int64, shape (n, 2)
        The table that a :class:`~sparsescan.chains.chain.Chain` fills before each run.
    dtype : dtype
        float32 or float64.
    batch : int
        Number of samples, at least 1.
    batched : ndarray of bool, shape (n,)
        Which Jacobians differ between samples.
    local : bool
        Whether there are local gradients.
    threads : int
        Threads that may take part.
    merged : mapping of int to IndexedPattern, optional
        Jacobians that store only the values of rows that differ.
    """

    def __init__(
        self,
        program: Program,
        leaves: NDArray[np.int64],
        dtype: np.dtype[Any],
        batch: int,
        batched: NDArray[np.bool_],
        local: bool,
        threads: int,
        merged: Mapping[int, IndexedPattern] = MappingProxyType({}),
    ) -> None:
        n = program.n
        self._n, self._batch, self._local = n, batch, local
        self._kept: list[NDArray[Any]] = []  # what the tables point into
        self._arrays: dict[int, NDArray[Any]] = {}  # what the run descriptor points to
        node_batched = program.batched(batched)
        widths = np.where(node_batched, batch, 1)
        self._stages = Stages(program, batch, widths, threads, dtype.itemsize)
        self._solves = Solves(program.solved, leaves, batch, threads)
        self._sweeps = Sweeps(program.solved, len(program.ops), dtype, batch, batched, threads)
        self.threads = max(min(threads, self._stages.widest), self._sweeps.threads)
        self.local_grads = np.zeros(n + 1, np.int64)
        self._kernel = run.run if program.products else run.run_vectors

        nodes = self._nodes(program)
        nodes[:, Node.BATCHED] = node_batched
        for k, index in merged.items():
            starts = index.starts.astype(program.index_dtype, copy=False)
            self._kept.append(starts)
            nodes[k, Node.STARTS], nodes[k, Node.SINGLE] = kernel_address(starts), 0
        self._run = np.zeros(Run.WIDTH, np.int64)
        # Samples are not interleaved for Jacobians with one entry in every row.
        single = nodes[:n, Node.SINGLE] != 0
        shared = set(itertools.compress(program.patterns, ~(batched | single)))
        memory = WorkspaceMemory.of(program, batch, node_batched, local, self.threads, shared)
        self._place_products(program, nodes, memory)
        self._set(Run.FIRST_UNIT, self._stages.first_unit)
        self._set(Run.STAGES, self._stages.stages)
        self._first_unit_at, self._stages_at = self._run[[Run.FIRST_UNIT, Run.STAGES]].tolist()
        self._set(Run.RUNS, self._stages.runs)
        self._set(Run.OPS, program.ops)
        self._set(Run.NODES, nodes)
        self._set(Run.LEAVES, leaves)
        self._set(Run.LOCAL_GRADS, self.local_grads)
        self._set(Run.OFFSETS, program.offsets)
        values, exponents, local_values = memory.sizes
        self._set(Run.POOL, np.empty(values, dtype))
        self._set(Run.LOCAL_POOL, np.empty(local_values, dtype))
        self._set(Run.ACCUMULATORS, np.zeros((self.threads, memory.accumulator), dtype))
        self._set(Run.INTERLEAVED, np.empty((self.threads, 8 * memory.lanes), dtype))
        self._run[Run.BATCH], self._run[Run.LOCAL] = batch, local
        # Without products the run is the linear scan, which defines non-finite results.
        self._run[Run.CHECKED] = program.products > 0
        self._run[Run.ACCUMULATOR], self._run[Run.LANES] = memory.accumulator, memory.lanes
        self._run[Run.INFINITY : Run.NEGLIGIBLE + 1] = tables.BAND[dtype]
        self._tables = tables.Tables(
            run=self._run,
            exponents=np.zeros(exponents, np.int32),
            values=np.empty(0, dtype),
            bits=np.empty(0, np.int32 if dtype == np.float32 else np.int64),
            indices=np.empty(0, program.index_dtype),
        )

    def _set(self, slot: int, array: NDArray[Any]) -> None:
        """Write the address of an array into the run descriptor, and keep the array."""
        self._run[slot] = kernel_address(array)
        self._arrays[slot] = array

    def _nodes(self, program: Program) -> NDArray[np.int64]:
        """Return the node table, filled with everything that follows from patterns."""
        rows: dict[Pattern, list[int]] = {}
        for pattern in set(program.patterns):
            # No kernel follows the indices of a dense or diagonal node, so they are not made.
            address, single = [0, 0], False
            if pattern.kind == "general":
                for i, array in enumerate((pattern.indptr, pattern.indices)):
                    array = array.astype(program.index_dtype, copy=False)
                    self._kept.append(array)
                    address[i] = kernel_address(array)
                single = bool((np.diff(pattern.indptr) == 1).all())
            rows[pattern] = [KINDS[pattern.kind], *pattern.shape, pattern.nnz, *address, single]
        nodes = np.zeros((len(program.patterns), Node.WIDTH), np.int64)
        nodes[:, : Node.SINGLE + 1] = [rows[pattern] for pattern in program.patterns]
        nodes[: program.n, Node.STORE] = Store.CALLER
        nodes[: program.n, Node.VALUES] = np.arange(program.n)
        return nodes

    def _place_products(
        self, program: Program, nodes: NDArray[np.int64], memory: WorkspaceMemory
    ) -> None:
        """Write the place of every product, in a pool or in scratch, into the tables."""
        products, in_scratch = nodes[program.n :], program.slots >= 0
        products[:, Node.STORE] = np.where(in_scratch, Store.SCRATCH, Store.POOL)
        products[:, [Node.VALUES, Node.EXPONENTS, Node.LOCAL]] = memory.starts
        products[in_scratch, Node.VALUES] = program.slots[in_scratch]
        self._run[Run.SCRATCH_NNZ : Run.SCRATCH_ROWS + 1] = memory.slot
        self._run[Run.SCRATCH_VALUES : Run.SCRATCH_LOCAL + 1] = memory.scratch

    def product(self, k: int) -> Parts:
        """Return values, exponents and local gradients of the `k`-th product, if it is in the pool.

        Views with a row for each sample; values and exponents have one where all samples share
        them. The last column of the exponents says whether any is not zero. Without local gradients
        there are no rows of them.
        """
        node = self._arrays[Run.NODES][self._n + k]
        width = self._batch if node[Node.BATCHED] else 1

        def rows(pool: NDArray[Any], place: int, count: int, size: int) -> NDArray[Any]:
            return pool[place : place + count * size].reshape(count, size)

        return (
            rows(self._arrays[Run.POOL], node[Node.VALUES], width, node[Node.NNZ]),
            rows(self._tables.exponents, node[Node.EXPONENTS], width, node[Node.COLS] + 1),
            rows(
                self._arrays[Run.LOCAL_POOL],
                node[Node.LOCAL],
                self._batch * self._local,
                node[Node.ROWS],
            ),
        )

    def run(self, out: NDArray[Any], inclusive: bool, given: Given | None = None) -> bool:
        """Fill `out`, which holds the first gradient; False if the linear scan has to decide.

        `given` is what a program with solves reads.
        """
        if given is not None and self._stages.pieces:
            self._run_around_solves(out, inclusive, given)
            return True
        run = self._run
        run[: Run.BATCH] = 0
        run[Run.STARTED] = time.monotonic_ns()
        run[Run.OUT] = address_of(out)
        # The last stage is the additional step of an inclusive scan.
        stages = len(self._stages.stages) - (not inclusive)
        run[Run.STAGE_COUNT] = stages
        run[Run.UNITS] = self._stages.first_unit[stages]
        work(self._kernel, self._tables, self.threads, self._stages.nanoseconds)
        return bool(run[Run.STATUS] == tables.FINISHED)

    def _run_around_solves(self, out: NDArray[Any], inclusive: bool, given: Given) -> None:
        """Fill `out`, piece by piece. There are no products, so there is nothing to decide."""
        last = self._n - (not inclusive)
        self._sweeps.begin()
        self._solves.begin(inclusive, self._n)
        for piece in self._stages.pieces:
            if piece.first >= last:
                break
            if piece.kind == "stages":
                self.run_stages(out, *piece.stages, self.threads, piece.nanoseconds)
            elif piece.kind == "sweep":
                self._sweep(out, piece.first, min(piece.last, last), piece.nanoseconds, given)
            else:
                self._solve(out, piece.first, given)

    def _sweep(
        self, out: NDArray[Any], first: int, last: int, nanoseconds: float, given: Given
    ) -> None:
        """Make the gradients after Jacobians `first` to ``last - 1`` in compiled code."""
        run = self._run
        run[: Run.BATCH] = 0
        run[Run.OUT] = address_of(out)
        failed = self._sweeps.run(self._tables, first, last, nanoseconds)
        if failed is not None:
            k, sample = failed
            is_one_of_many = self._batch > 1 and self._arrays[Run.LEAVES][k, 1] != 0
            raise singular(given.name(k), sample if is_one_of_many else None)

    def _solve(self, out: NDArray[Any], k: int, given: Given) -> None:
        """Make the gradient after the `k`-th Jacobian, by a solve with SuperLU."""
        offsets = self._arrays[Run.OFFSETS][k : k + 3] * self._batch
        start, middle, stop = offsets.tolist()
        shape = self._batch, -1
        x, y = out[start:middle].reshape(shape), out[middle:stop].reshape(shape)
        with np.errstate(over="ignore", invalid="ignore"):
            self._solves.solve(k, x, y, given)

    def run_stages(
        self, out: NDArray[Any], first: int, last: int, threads: int, nanoseconds: float
    ) -> None:
        """Run stages `first` to ``last - 1`` on at most `threads` threads, in about this time."""
        run, stages = self._run, self._stages
        run[: Run.BATCH] = 0
        run[Run.STARTED] = time.monotonic_ns()
        run[Run.OUT] = address_of(out)
        # Tables begin with the first of these stages; units are counted from the program's start.
        run[Run.FIRST_UNIT] = self._first_unit_at + first * tables.WORD
        run[Run.STAGES] = self._stages_at + first * Stage.WIDTH * tables.WORD
        run[Run.NEXT] = run[Run.DONE] = stages.first_unit[first]
        run[Run.STAGE_COUNT] = last - first
        run[Run.UNITS] = stages.first_unit[last]
        work(self._kernel, self._tables, min(threads, self.threads), nanoseconds)


def places(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts of pieces that are concatenated along the first axis, and the end."""
    ends = np.cumsum(sizes, axis=0, dtype=np.int64)
    return ends - sizes, sizes.sum(axis=0, dtype=np.int64)
