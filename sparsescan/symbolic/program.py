"""Program: patterns × schedule as tables of nodes and operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..kernels.cpu.tables import SLOTS, Op
from .factorisation import Factorisation, factorisation_of
from .implicit import (
    ImplicitPattern,
    Step,
    contains,
    factor_starts,
    factors_of,
    indexed_of,
    refine,
    solved_of,
)
from .indexed import IndexedPattern
from .pattern import Pattern, PatternProducts, multiply_adds
from .schedule import Schedule


class Program:
    """The nodes and operations of a scan: everything that does not depend on values or batch.

    Parameters
    ----------
    steps : sequence of Pattern or ImplicitPattern
        The pattern of every step; at least one.
    schedule : Schedule
        A schedule for this number of steps.
    dense : collection of tuple, optional
        Products ``(start, stop)`` to store densely whatever their patterns. (A product by a
        diagonal matrix is stored like the other operand.)
    products : PatternProducts, optional
        Known products of patterns.

    Attributes
    ----------
    n : int
        Number of Jacobians for kernels: explicit steps, and the factors of implicit steps.
    schedule : Schedule
        The schedule for these Jacobians.
    steps : sequence of Pattern or ImplicitPattern
        The steps.
    chunks : int or None
        Number of chunks of steps, of a chunked schedule.
    solved : dict of int to Factorisation
        The Jacobians that are inverses, which a linear schedule solves with, in the order of the
        scan.
    patterns : list of Pattern
        The pattern in which every node is stored: first the Jacobians, then the products.
    ops : ndarray of int64, shape (m + 1, 4)
        Columns as in :class:`~sparsescan.kernels.cpu.tables.Op`. The last operation is the one more
        that an inclusive scan has.
    work : ndarray of int64, shape (m + 1,)
        Multiply-adds of every operation, for one sample; a solve includes its factorisation.
    levels : list of tuple
        ``(name, runs)``, with the first and last-plus-one operation of every run.
    slots : ndarray of int64
        For every product, the scratch slot if only its own run reads it; else -1.
    index_bytes : int
        Bytes of the index arrays that the symbolic phase made for products.
    index_dtype : dtype
        The dtype of index arrays of a run: int64 if any pattern needs it.
    offsets : ndarray of int64, shape (n + 2,)
        Where each gradient starts, and the last one ends, for one sample.
    indexed : list of tuple
        Jacobians that come as weights, and their index.
    multiplied : ndarray of bool, shape (n,)
        Which Jacobians are operands of products, or are solved with.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        schedule: Schedule,
        *,
        dense: Collection[tuple[int, int]] = (),
        products: PatternProducts | None = None,
    ) -> None:
        self.steps, self.chunks = steps, schedule.chunks
        patterns: list[Any] = list(steps)
        indices: list[IndexedPattern | None] = []
        flags: list[bool] = []
        if contains(steps, ImplicitPattern):
            patterns = [factor for step in steps for factor in factors_of(step)]
            indices = [index for step in steps for index in indexed_of(step)]
            flags = [flag for step in steps for flag in solved_of(step)]
            schedule = refine(schedule, factor_starts(steps))
        self.n = n = len(patterns)
        self.indexed = [(k, index) for k, index in enumerate(indices) if index is not None]
        self.schedule = schedule
        self.patterns: list[Pattern] = list(patterns)
        self.levels: list[tuple[str, NDArray[np.int64]]] = []
        # The exact pattern of every node: its entries may be stored among zeros.
        exact: list[Pattern] = list(patterns)
        self.solved: dict[int, Factorisation] = {
            k: factorisation_of(patterns[k]) for k in np.flatnonzero(flags).tolist()
        }
        if self.solved and any(level.ops[:, 0].any() for level in schedule.levels):
            raise InputError(
                f"{schedule} multiplies Jacobians, but some are to be solved with; expected a "
                "schedule that multiplies none"
            )
        multiply = products or PatternProducts()
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
        for k, factorisation in self.solved.items():
            # Nothing is multiplied, so the `k`-th operation is by the `k`-th Jacobian.
            self.work[k] = factorisation.multiply_adds + factorisation.solve_multiply_adds
        self.multiplied = np.zeros(n, bool)
        read = self.ops[self.ops[:, Op.VECTOR] == 0][:, [Op.LEFT, Op.RIGHT]]
        self.multiplied[read[read < n]] = True
        self.multiplied[list(self.solved)] = True
        new = {p for p in exact[n:] if p.kind == "general"}.difference(patterns)
        self.index_bytes = sum(p.index_dtype.itemsize * (p.nnz + p.shape[0] + 1) for p in new)
        self.slots = self._scratch_slots()
        self.index_dtype = _widest_index(self.patterns)
        sizes = [patterns[0].shape[1], *(pattern.shape[0] for pattern in patterns)]
        self.offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    @classmethod
    def from_tables(
        cls,
        n: int,
        patterns: Sequence[Pattern],
        ops: NDArray[np.int64],
        work: NDArray[np.int64],
        levels: Sequence[tuple[str, NDArray[np.int64]]],
        offsets: NDArray[np.int64],
    ) -> Program:
        """Make a program from tables without a schedule; the attributes describe the tables.

        It has `n` Jacobians, and no products in scratch.
        """
        program = cls.__new__(cls)
        program.n, program.solved = n, {}
        program.steps, program.chunks = patterns[:n], None
        program.patterns, program.levels = list(patterns), list(levels)
        program.ops, program.work, program.offsets = ops, work, offsets
        program.slots = np.full(len(patterns) - n, -1, np.int64)
        program.index_bytes = 0
        program.indexed, program.multiplied = [], np.ones(n, bool)
        program.index_dtype = _widest_index(program.patterns)
        return program

    @property
    def gathered(self) -> int:
        """How many values a run on the CPU writes for Jacobians that are given as weights."""
        if self.multiplied.any():
            return sum(self.gathered_of(k, index) for k, index in self.indexed)
        indices = [index for _, index in self.indexed]
        # Among many, few differ; compare them by identity.
        alike, times = dict(zip(map(id, indices), indices, strict=True)), Counter(map(id, indices))
        return sum(times[key] * self.gathered_of(0, index) for key, index in alike.items())

    def gathered_of(self, k: int, index: IndexedPattern) -> int:
        """Return the number for one of them; equal rows count once, unless a product reads it."""
        is_merged = index.pattern.kind == "general" and not self.multiplied[k]
        return index.distinct if is_merged else index.nnz

    @property
    def products(self) -> int:
        """Number of matrix-matrix products."""
        return len(self.patterns) - self.n

    def batched(self, leaves: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which nodes differ between samples, if these Jacobians differ."""
        batched = np.zeros(len(self.patterns), bool)
        batched[: self.n] = leaves
        if leaves.all() or not leaves.any():
            batched[self.n :] = leaves.any()
            return batched
        products = self.ops[self.ops[:, Op.VECTOR] == 0]
        for _, left, right, out in products.tolist():
            batched[out] = batched[left] or batched[right]
        return batched

    def _scratch_slots(self) -> NDArray[np.int64]:
        """Return the slots of intermediate products that only their own run reads."""
        slots = np.full(self.products, -1, np.int64)
        vector = self.ops[:, Op.VECTOR] == 1
        readers = np.zeros(len(self.patterns), np.int64)
        reader = np.zeros(len(self.patterns), np.int64)
        for column, rows in ((Op.RIGHT, slice(None)), (Op.LEFT, ~vector)):
            nodes = self.ops[rows, column]
            np.add.at(readers, nodes, 1)
            reader[nodes] = np.arange(len(self.ops))[rows]
        for _, runs in self.levels:
            for first, last in runs[runs[:, 1] - runs[:, 0] > 1].tolist():
                if vector[first]:
                    continue
                free = set(range(SLOTS))
                for _, left, right, out in self.ops[first:last].tolist():
                    if readers[out] == 1 and first < reader[out] < last and free:
                        slots[out - self.n] = min(free)
                        free.remove(min(free))
                    # Each operand is read here for the last time.
                    read = [node - self.n for node in (left, right) if node >= self.n]
                    free.update(int(slots[node]) for node in read if slots[node] >= 0)
        return slots


def _widest_index(patterns: Sequence[Pattern]) -> np.dtype[Any]:
    """Return the dtype of index arrays that suits all patterns."""
    wide = any(pattern.index_dtype == np.int64 for pattern in set(patterns))
    return np.dtype(np.int64 if wide else np.int32)


def stored(right: Pattern, left: Pattern, exact: Pattern, *, dense: bool) -> Pattern:
    """Return the pattern in which the product of two nodes, with entries `exact`, is stored."""
    if right.kind == "diagonal":
        return left
    if left.kind == "diagonal":
        return right
    return Pattern.dense(exact.shape) if dense else exact
