"""Program: patterns × schedule as tables of nodes and operations; Workspace: what it runs in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .kernels import cpu
from .kernels._threads import work
from .kernels.cpu import Book, Kind, Node, Op, Stage, Store, Work
from .pattern import Pattern, Products, multiply_adds
from .schedule import Schedule

__all__ = [
    "KINDS",
    "ROW_GRAIN",
    "RUN_GRAIN",
    "Parts",
    "Program",
    "Workspace",
    "places",
    "stored",
    "table_bytes",
    "workspace_bytes",
]

KINDS = {"dense": Kind.DENSE, "general": Kind.CSR, "diagonal": Kind.DIAGONAL}

# Bytes of tables and objects, at most: of a run, for a step, a product, and a stage.
_RUN_BYTES, _STEP_BYTES, _PRODUCT_BYTES, _STAGE_BYTES = 24_576, 1024, 3072, 128

# Nanoseconds of a multiply-add, by the kind of the matrix that a row is read from; roughly, since
# they only decide how work is cut up.
_NANOSECONDS = {"dense": 0.2, "general": 0.5, "diagonal": 0.5}
# Nanoseconds of work below which more threads cost more than they save: for a run, which has to
# wake them, and for a block of the rows of one operation, after which they meet.
RUN_GRAIN = 200_000
ROW_GRAIN = 10_000
# Bytes of a step below which its samples are not shared out: threads that skip through memory in
# pieces this small take longer than one that reads on (half as fast with pieces of 13 kB, from
# 25 to 75 MB, on the machine of bench/results).
_BLOCK_BYTES = 32_768

# Values, exponents and local gradients of a product, with a row for each sample.
Parts = tuple[NDArray[Any], NDArray[np.int32], NDArray[Any]]


class Program:
    """The nodes and operations of a scan: everything that does not depend on values or batch.

    Parameters
    ----------
    patterns : sequence of Pattern
        The pattern of every Jacobian; at least one.
    schedule : Schedule
        For as many Jacobians.
    dense : collection of tuple, optional
        Products ``(start, stop)`` that are stored densely whatever their patterns. (One by a
        diagonal matrix is stored as the other operand is.)
    products : Products, optional
        Products of patterns that are known already.

    Attributes
    ----------
    patterns : list of Pattern
        What is stored of every node: first the Jacobians, then the products.
    ops : ndarray of int64, shape (m + 1, 4)
        Columns as in :class:`~sparsescan.kernels.cpu.Op`. The last operation is the one more that
        an inclusive scan has.
    work : ndarray of int64, shape (m + 1,)
        Multiply-adds of every operation, for one sample.
    levels : list of tuple
        ``(name, runs)``, with the first and last-plus-one operation of every run.
    slots : ndarray of int64
        For every product -1, or the scratch slot of one that only the next operation reads.
    index_bytes : int
        Bytes of the index arrays that the symbolic phase made for products.
    index_dtype : dtype
        Of index arrays that all kernels of a run read: int64 if any pattern needs it.
    offsets : ndarray of int64, shape (n + 2,)
        Where each gradient starts, and the last one ends, for one sample.
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        schedule: Schedule,
        *,
        dense: Collection[tuple[int, int]] = (),
        products: Products | None = None,
    ) -> None:
        n = len(patterns)
        if schedule.n != n:
            raise InputError(f"schedule is for {schedule.n} Jacobians; expected {n}")
        self.n = n
        self.schedule = schedule
        self.patterns: list[Pattern] = list(patterns)
        self.levels: list[tuple[str, NDArray[np.int64]]] = []
        # Where the entries of every node are: they may be stored among zeros.
        exact: list[Pattern] = list(patterns)
        multiply = products or Products()
        known: dict[tuple[Pattern, Pattern], int] = {}
        nodes: dict[tuple[int, int], int] = {}
        nnz = np.array([pattern.nnz for pattern in patterns], np.int64)
        all_ops, all_work, first = [], [], 0
        for level in schedule.levels:
            start, mid, stop = level.ops.T
            ops = np.empty((len(level.ops), 4), np.int64)
            ops[:, Op.VECTOR] = start == 0
            ops[:, Op.LEFT] = mid - 1
            ops[:, Op.RIGHT] = mid - 1
            ops[:, Op.OUT] = stop - 1
            macs = np.zeros(len(ops), np.int64)
            for i in np.flatnonzero((start > 0) | (stop > mid + 1)):
                a, m, b = level.ops[i].tolist()
                right = m - 1 if b == m + 1 else nodes[m, b]
                ops[i, Op.RIGHT] = right
                if a == 0:
                    macs[i] = self.patterns[right].nnz
                    continue
                left = a - 1 if m == a + 1 else nodes[a, m]
                pair = self.patterns[right], self.patterns[left]
                if pair not in known:
                    known[pair] = multiply_adds(*pair)
                macs[i] = known[pair]
                nodes[a, b] = ops[i, Op.OUT] = len(self.patterns)
                ops[i, Op.LEFT] = left
                exact.append(multiply(exact[right], exact[left]))
                self.patterns.append(stored(*pair, exact[-1], dense=(a, b) in dense))
            leaf = (start == 0) & (stop == mid + 1)
            macs[leaf] = nnz[mid[leaf] - 1]
            all_ops.append(ops)
            all_work.append(macs)
            runs = np.stack([level.runs[:-1], level.runs[1:]], axis=1) + first
            self.levels.append((level.name, runs))
            first += len(ops)
        all_ops.append(np.array([[1, n - 1, n - 1, n]], np.int64))
        all_work.append(nnz[-1:])
        self.ops = np.concatenate(all_ops)
        self.work = np.concatenate(all_work)
        made = {p for p in exact[n:] if p.kind == "general"}.difference(patterns)
        self.index_bytes = sum(p.index_dtype.itemsize * (p.nnz + p.shape[0] + 1) for p in made)
        self.slots = self._scratch_slots()
        wide = any(pattern.index_dtype == np.int64 for pattern in set(self.patterns))
        self.index_dtype = np.dtype(np.int64 if wide else np.int32)
        sizes = [patterns[0].shape[1], *(pattern.shape[0] for pattern in patterns)]
        self.offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    @property
    def products(self) -> int:
        """Number of matrix-matrix products."""
        return len(self.patterns) - self.n

    def batched(self, leaves: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which nodes differ between samples, if these Jacobians do."""
        batched = np.zeros(len(self.patterns), bool)
        batched[: self.n] = leaves
        if leaves.all() or not leaves.any():
            batched[self.n :] = leaves.any()
            return batched
        made = self.ops[self.ops[:, Op.VECTOR] == 0]
        for _, left, right, out in made.tolist():
            batched[out] = batched[left] or batched[right]
        return batched

    def _scratch_slots(self) -> NDArray[np.int64]:
        slots = np.full(self.products, -1, np.int64)
        readers = np.zeros(len(self.patterns), np.int64)
        vector = self.ops[:, Op.VECTOR] == 1
        np.add.at(readers, self.ops[:, Op.RIGHT], 1)
        np.add.at(readers, self.ops[~vector, Op.LEFT], 1)
        for _, runs in self.levels:
            for first, last in runs[runs[:, 1] - runs[:, 0] > 1].tolist():
                for op in range(first, last - 1):
                    out, following = self.ops[op, Op.OUT], self.ops[op + 1]
                    if vector[op]:
                        break
                    if readers[out] == 1 and not vector[op + 1] and following[Op.LEFT] == out:
                        slots[out - self.n] = (op - first) % 2
        return slots


def stored(right: Pattern, left: Pattern, exact: Pattern, *, dense: bool) -> Pattern:
    """What is stored of the product of two nodes with entries at `exact`."""
    if right.kind == "diagonal":
        return left
    if left.kind == "diagonal":
        return right
    return Pattern.dense(exact.shape) if dense else exact


def workspace_bytes(program: Program, dtype: np.dtype[Any], batch: int, threads: int) -> int:
    """Bytes that a program and a run of it take beside Jacobians and gradients, at most.

    As if every Jacobian differed between samples, with local gradients, and with products that
    leave the range of floating point; with the linear scan that is run if a value is not finite.
    """
    n, patterns = program.n, program.patterns
    rows, cols = np.array([pattern.shape for pattern in patterns], np.int64).T
    nnz = np.array([pattern.nnz for pattern in patterns], np.int64)
    kept = n + np.flatnonzero(program.slots < 0)
    scratch = n + np.flatnonzero(program.slots >= 0)
    values = batch * int((nnz[kept] + rows[kept]).sum())
    exponents = batch * int((cols[kept] + 1).sum())
    if len(scratch):
        values += 2 * threads * int(nnz[scratch].max() + batch * rows[scratch].max())
        exponents += 2 * threads * int(cols[scratch].max() + 1)
    if program.products:
        # An accumulator, and both operands and the earlier one again while they are scaled.
        made = program.ops[program.ops[:, Op.VECTOR] == 0]
        read = made[:, [Op.LEFT, Op.RIGHT]]
        largest = int((nnz[read] @ [2, 1]).max() + 2 * cols[read].max())
        values += threads * int(cols[n:].max() + largest)
        exponents += threads * int(cols[read].max() + rows[read].max()) * 6
    interleaved = [p.shape[1] for p in set(patterns) if p.kind != "diagonal"]
    values += threads * 8 * max(interleaved, default=0) * (batch > 2)
    csr = [pattern for pattern in set(patterns) if pattern.kind == "general"]
    copied = [p for p in csr if p.index_dtype != program.index_dtype]
    indices = program.index_bytes + sum(8 * (p.nnz + p.shape[0] + 1) for p in copied)
    tables = table_bytes(n, program.products)
    if threads > 1:
        # Stages of products whose rows are shared: three for each sample.
        tables += _STAGE_BYTES * 3 * batch * program.products
    return dtype.itemsize * values + 4 * exponents + indices + tables


def table_bytes(n: int, products: int) -> int:
    """Bytes of tables and objects, at most, for so many steps and products."""
    return _RUN_BYTES + _STEP_BYTES * n + _PRODUCT_BYTES * products


class Workspace:
    """Memory and tables for running a program on one batch size, kept from run to run.

    Parameters
    ----------
    program : Program
        What to run.
    leaves : ndarray of int64, shape (n, 2)
        The table that a :class:`~sparsescan.chain.Chain` fills before each run.
    dtype : dtype
        float32 or float64.
    batch : int
        Number of samples, at least 1.
    batched : ndarray of bool, shape (n,)
        Which Jacobians differ between samples.
    local : bool
        Whether there will be local gradients.
    threads : int
        Threads that may take part.
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
    ) -> None:
        n = program.n
        self._n, self._batch, self._local = n, batch, local
        self._kept: list[NDArray[Any]] = []  # what the tables point into
        self._arrays: dict[int, NDArray[Any]] = {}  # what the book points to
        node_batched = program.batched(batched)
        widths = np.where(node_batched, batch, 1)
        self._stages = _Stages(program, batch, widths, threads, dtype.itemsize)
        self.threads = min(threads, self._stages.widest)
        self.local_grads = np.zeros(n + 1, np.int64)
        self._kernel = cpu.run if program.products else cpu.run_vectors

        nodes = self._nodes(program)
        nodes[:, Node.BATCHED] = node_batched
        self._book = np.zeros(Book.WIDTH, np.int64)
        exponents = self._place_products(program, nodes, widths, dtype, batch, local)
        # Only where samples share a Jacobian are they interleaved.
        shared = (nodes[:n, Node.KIND] != Kind.DIAGONAL) & (nodes[:n, Node.SINGLE] == 0) & ~batched
        lanes = int(nodes[:n, Node.COLS][shared].max(initial=0)) if batch > 2 else 0
        columns = int(nodes[n:, Node.COLS].max(initial=0))
        self._set(Book.FIRST_UNIT, self._stages.first_unit)
        self._set(Book.STAGES, self._stages.stages)
        self._set(Book.RUNS, self._stages.runs)
        self._set(Book.OPS, program.ops)
        self._set(Book.NODES, nodes)
        self._set(Book.LEAVES, leaves)
        self._set(Book.LOCAL_GRADS, self.local_grads)
        self._set(Book.OFFSETS, program.offsets)
        self._set(Book.ACCUMULATORS, np.zeros((self.threads, columns), dtype))
        self._set(Book.INTERLEAVED, np.empty((self.threads, 8 * lanes), dtype))
        self._book[Book.BATCH], self._book[Book.LOCAL] = batch, local
        # Without products nothing else could be said of a value that is not finite.
        self._book[Book.CHECKED] = program.products > 0
        self._book[Book.ACCUMULATOR], self._book[Book.LANES] = columns, lanes
        self._book[Book.INFINITY : Book.NEGLIGIBLE + 1] = cpu.BAND[dtype]
        self._tables = cpu.Tables(
            book=self._book,
            exponents=np.zeros(exponents, np.int32),
            values=np.empty(0, dtype),
            bits=np.empty(0, np.int32 if dtype == np.float32 else np.int64),
            indices=np.empty(0, program.index_dtype),
        )

    def _set(self, slot: int, array: NDArray[Any]) -> None:
        """Write the address of an array into the book, and keep the array."""
        self._book[slot] = array.ctypes.data
        self._arrays[slot] = array

    def _nodes(self, program: Program) -> NDArray[np.int64]:
        """The node table with what follows from patterns."""
        rows: dict[Pattern, list[int]] = {}
        for pattern in set(program.patterns):
            # No kernel follows the indices of a dense or diagonal node, so they are not made.
            address, single = [0, 0], False
            if pattern.kind == "general":
                for i, array in enumerate((pattern.indptr, pattern.indices)):
                    array = array.astype(program.index_dtype, copy=False)
                    self._kept.append(array)
                    address[i] = array.ctypes.data
                single = bool((np.diff(pattern.indptr) == 1).all())
            rows[pattern] = [KINDS[pattern.kind], *pattern.shape, pattern.nnz, *address, single]
        nodes = np.zeros((len(program.patterns), Node.WIDTH), np.int64)
        nodes[:, : Node.SINGLE + 1] = [rows[pattern] for pattern in program.patterns]
        nodes[: program.n, Node.STORE] = Store.CALLER
        nodes[: program.n, Node.VALUES] = np.arange(program.n)
        return nodes

    def _place_products(
        self,
        program: Program,
        nodes: NDArray[np.int64],
        widths: NDArray[np.int64],
        dtype: np.dtype[Any],
        batch: int,
        local: bool,
    ) -> int:
        """Give every product its place in the pools; the length of the exponents."""
        in_scratch = np.flatnonzero(program.slots >= 0)
        nodes[program.n + in_scratch, Node.STORE] = Store.SCRATCH
        nodes[program.n + in_scratch, Node.VALUES] = program.slots[in_scratch]
        largest = [
            int(nodes[program.n + in_scratch, column].max(initial=0))
            for column in (Node.NNZ, Node.COLS, Node.ROWS)
        ]
        kept = program.n + np.flatnonzero(program.slots < 0)
        width = widths[kept]
        nodes[kept, Node.STORE] = Store.POOL
        nodes[kept, Node.VALUES], values = places(nodes[kept, Node.NNZ] * width)
        nodes[kept, Node.EXPONENTS], exponents = places((nodes[kept, Node.COLS] + 1) * width)
        nodes[kept, Node.LOCAL], local_values = places(nodes[kept, Node.ROWS] * batch * local)
        # The scratch of the threads follows what is kept.
        slots = 2 * self.threads if len(in_scratch) else 0
        nnz, cols, rows = largest
        self._book[Book.SCRATCH_NNZ : Book.SCRATCH_ROWS + 1] = largest
        self._book[Book.SCRATCH_VALUES : Book.SCRATCH_LOCAL + 1] = values, exponents, local_values
        self._set(Book.POOL, np.empty(values + slots * nnz, dtype))
        self._set(Book.LOCAL_POOL, np.empty(local_values + slots * rows * batch * local, dtype))
        return exponents + slots * (cols + 1)

    def product(self, k: int) -> Parts:
        """Values, exponents and local gradients of the `k`-th product, if it is not in scratch.

        Views with a row for each sample; values and exponents have one where all samples share
        them. The last column of the exponents says whether any is not zero. Without local gradients
        there are no rows of them.
        """
        node = self._arrays[Book.NODES][self._n + k]
        width = self._batch if node[Node.BATCHED] else 1

        def rows(pool: NDArray[Any], place: int, count: int, size: int) -> NDArray[Any]:
            return pool[place : place + count * size].reshape(count, size)

        return (
            rows(self._arrays[Book.POOL], node[Node.VALUES], width, node[Node.NNZ]),
            rows(self._tables.exponents, node[Node.EXPONENTS], width, node[Node.COLS] + 1),
            rows(
                self._arrays[Book.LOCAL_POOL],
                node[Node.LOCAL],
                self._batch * self._local,
                node[Node.ROWS],
            ),
        )

    def run(self, out: NDArray[Any], inclusive: bool) -> bool:
        """Fill `out`, whose first gradient is there; False if the linear scan has to decide."""
        book = self._book
        book[: Book.BATCH] = 0
        book[Book.OUT] = out.ctypes.data
        # The last stage is the one more step of an inclusive scan.
        stages = len(self._stages.stages) - (not inclusive)
        book[Book.STAGE_COUNT] = stages
        book[Book.UNITS] = self._stages.first_unit[stages]
        work(self._kernel, self._tables, self.threads)
        return bool(book[Book.STATUS] == cpu.FINISHED)


def places(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Where each of some pieces starts when they lie end to end, and where the last one ends."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return ends - sizes, int(ends[-1]) if len(ends) else 0


class _Stages:
    """How the levels of a program are cut into units for some threads.

    Nothing here changes a result: units only say who computes what.
    """

    def __init__(
        self,
        program: Program,
        batch: int,
        widths: NDArray[np.int64],
        threads: int,
        itemsize: int,
    ) -> None:
        self._program = program
        ops = program.ops
        vector = ops[:, Op.VECTOR] == 1
        self._width = np.where(vector, batch, widths[np.where(vector, 0, ops[:, Op.OUT])])
        # A product in the scratch of a thread is made and read by that thread.
        self._in_scratch = np.zeros(len(ops), bool)
        self._in_scratch[~vector] = program.slots[ops[~vector, Op.OUT] - program.n] >= 0
        self._rows: list[tuple[int, int, int, int]] = []
        self._units: list[int] = []
        self._runs: list[NDArray[np.int64]] = []
        self._run_count = 0
        # What the samples of an operation read that they do not share.
        nnz = np.array([pattern.nnz for pattern in program.patterns], np.int64)
        self._bytes = (nnz * np.where(widths > 1, widths, 0) * itemsize)[ops[:, Op.RIGHT]]
        rate = np.array([_NANOSECONDS[pattern.kind] for pattern in program.patterns])
        cost = program.work * self._width * rate[ops[:, Op.RIGHT]]
        if cost.sum() < RUN_GRAIN:
            threads = 1
        for _, runs in program.levels:
            self._level(runs, cost, threads)
        last = len(ops) - 1
        self._level(np.array([[last, last + 1]], np.int64), cost, threads)
        self.stages = np.array(self._rows, np.int64).reshape(-1, Stage.WIDTH)
        self.first_unit = np.concatenate([[0], np.cumsum(self._units)]).astype(np.int64)
        self.widest = max(self._units)
        self.runs = np.concatenate([np.empty((0, 2), np.int64), *self._runs])

    def _level(self, runs: NDArray[np.int64], cost: NDArray[np.float64], threads: int) -> None:
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        large = cost >= 2 * ROW_GRAIN
        mostly_large = 2 * cost[first:last][large[first:last]].sum() > cost[first:last].sum()
        if (
            threads == 1
            or not mostly_large
            or self._in_scratch[first:last].any()
            or self._balanced(runs, cost, threads)
        ):
            self._add_runs(runs, threads)
            return
        for start, stop in runs.tolist():
            op = start
            while op < stop:
                small = op
                while small < stop and not large[small]:
                    small += 1
                if small > op:
                    self._add_runs(np.array([[op, small]], np.int64), threads)
                    op = small
                else:
                    self._add_rows(op, min(threads, int(cost[op] / ROW_GRAIN)))
                    op += 1

    def _balanced(self, runs: NDArray[np.int64], cost: NDArray[np.float64], threads: int) -> bool:
        """Whether whole runs, cut only between samples, keep all threads about equally busy."""
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        blocks = self._blocks(runs, threads)
        if len(runs) * blocks > 16 * threads:
            return True
        run_cost = np.add.reduceat(cost[first:last], runs[:, 0] - first)
        pieces = np.minimum(self._width[runs[:, 1] - 1], blocks)
        busy = np.zeros(threads)
        for unit in sorted(np.repeat(run_cost / pieces, pieces), reverse=True):
            busy[busy.argmin()] += unit
        return bool(busy.max() <= 1.25 * busy.mean())

    def _blocks(self, runs: NDArray[np.int64], threads: int) -> int:
        """Blocks of samples into which every run of a level is cut."""
        blocks = min(int(self._width[runs[:, 1] - 1].max()), -(-threads // len(runs)))
        read = self._bytes[runs[0, 0] : runs[-1, 1]]
        if blocks > 1 and read.any():
            blocks = min(blocks, int(np.median(read[read > 0])) // _BLOCK_BYTES)
        return max(blocks, 1)

    def _add_runs(self, runs: NDArray[np.int64], threads: int) -> None:
        blocks = self._blocks(runs, threads)
        self._rows.append((Work.RUNS, self._run_count, blocks, 0))
        self._units.append(len(runs) * blocks)
        self._runs.append(runs)
        self._run_count += len(runs)

    def _add_rows(self, op: int, blocks: int) -> None:
        if self._program.ops[op, Op.VECTOR]:
            self._rows.append((Work.VECTOR, op, blocks, 0))
            self._units.append(blocks)
            return
        for sample in range(int(self._width[op])):
            for kind, units in ((Work.CHECK, blocks), (Work.MULTIPLY, blocks), (Work.SETTLE, 1)):
                self._rows.append((kind, op, units, sample))
                self._units.append(units)
