"""Stages: how the levels of a program are cut into units of work for threads."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.tables import LANES, Op, Stage, Work
from ..symbolic.program import Program
from .sweeps import sweep_nanoseconds

# The most bytes of the tables of a stage.
STAGE_BYTES = 128
# Rough nanoseconds of a multiply-add, by the kind of matrix: they only decide how work is cut.
_NANOSECONDS = {"dense": 0.2, "general": 0.5, "diagonal": 0.5}
# Nanoseconds of a multiply-add for each of the samples that share a matrix.
_SHARED = 0.2
# Nanoseconds of work below which more threads do not pay: for a run, which has to wake them, and
# for a block of rows of one operation, after which they meet.
RUN_GRAIN = 200_000
ROW_GRAIN = 10_000
# Samples of a step with fewer bytes are not divided among threads: threads that skip through memory
# in such small pieces are slower than one thread that reads on (half as fast with pieces of 13 kB,
# from 25 to 75 MB, on the machine of bench/results).
_BLOCK_BYTES = 32_768


class ProgramPiece(NamedTuple):
    """Some operations of a program that solves with Jacobians, in the order of the scan.

    Attributes
    ----------
    kind : {"stages", "sweep", "solve"}
        "stages": threads share a few stages. "sweep": compiled code runs operations one by one.
        "solve": SuperLU solves, for one operation.
    first, last : int
        Number of the first operation, and of the last plus one.
    stages : tuple of int
        Number of the first stage, and of the last plus one.
    nanoseconds : float
        The approximate time on one thread.
    """

    kind: Literal["stages", "sweep", "solve"]
    first: int
    last: int
    stages: tuple[int, int]
    nanoseconds: float


class Stages:
    """How the levels of a program are cut into units for some threads.

    Units only say which thread computes what; they do not change results.

    Attributes
    ----------
    pieces : list of ProgramPiece
        How a program runs that solves with some Jacobians; empty for others.
    """

    def __init__(
        self, program: Program, batch: int, widths: NDArray[np.int64], threads: int, itemsize: int
    ) -> None:
        self._program = program
        ops = program.ops
        vector = ops[:, Op.VECTOR] == 1
        self._width = np.where(vector, batch, widths[np.where(vector, 0, ops[:, Op.OUT])])
        # The thread that makes a product in its scratch also reads it.
        self._in_scratch = np.zeros(len(ops), bool)
        self._in_scratch[~vector] = program.slots[ops[~vector, Op.OUT] - program.n] >= 0
        self._rows: list[tuple[int, int, int, int]] = []
        self._units: list[int] = []
        self._runs: list[NDArray[np.int64]] = []
        self._run_count = 0
        self.pieces: list[ProgramPiece] = []
        # Bytes that each operation reads for every sample.
        nnz = np.array([pattern.nnz for pattern in program.patterns], np.int64)
        self._bytes = (nnz * np.where(widths > 1, widths, 0) * itemsize)[ops[:, Op.RIGHT]]
        rate = np.array([_NANOSECONDS[pattern.kind] for pattern in program.patterns])
        cost = program.work * self._width * rate[ops[:, Op.RIGHT]]
        # A step that samples share is read once for several samples.
        few = np.array([pattern.kind != "diagonal" for pattern in program.patterns])
        few[program.n :] = False
        self._shared = vector & (few & (widths == 1))[ops[:, Op.RIGHT]] & (batch > 2)
        cost[self._shared] *= _SHARED
        cost[list(program.solved)] = 0
        self._cost = cost
        # The predicted time of all threads together.
        self.nanoseconds = float(cost.sum())
        if self.nanoseconds < RUN_GRAIN:
            threads = 1
        last = len(ops) - 1
        if program.solved:
            self._around_solves(widths, batch, threads)
        else:
            for _, runs in [*program.levels, ("", np.array([[last, last + 1]], np.int64))]:
                self._level(runs, threads)
        self.stages = np.array(self._rows, np.int64).reshape(-1, Stage.WIDTH)
        self.first_unit = np.concatenate([[0], np.cumsum(self._units)]).astype(np.int64)
        self.widest = max(self._units, default=1)
        self.runs = np.concatenate([np.empty((0, 2), np.int64), *self._runs])

    def _around_solves(self, widths: NDArray[np.int64], batch: int, threads: int) -> None:
        """Cut a program into pieces, which has one level and no products.

        Threads are woken only for long stretches of Jacobians. The last operation, which only an
        inclusive scan has, gets its own stages.
        """
        solved, time = self._program.solved, self._cost.copy()
        last = len(time) - 1
        for k, form in solved.items():
            time[k] = sweep_nanoseconds(form, int(widths[k]), batch)

        def kind(k: int) -> tuple[str, int]:
            form = solved.get(k)
            if form is None:
                return "stages", k == last
            return ("sweep", 0) if form.is_compiled else ("solve", k)

        for (name, _), group in itertools.groupby(range(len(time)), kind):
            ops = list(group)
            first, stop, total = ops[0], ops[-1] + 1, float(time[ops].sum())
            stages = len(self._rows)
            if name == "solve":
                self.pieces.append(ProgramPiece("solve", first, stop, (0, 0), total))
            elif name == "stages" and total > RUN_GRAIN and threads > 1:
                self._level(np.array([[first, stop]], np.int64), threads)
                self.pieces.append(
                    ProgramPiece("stages", first, stop, (stages, len(self._rows)), total)
                )
            else:
                if self.pieces and self.pieces[-1].kind == "sweep":
                    before = self.pieces.pop()
                    first, total = before.first, before.nanoseconds + total
                self.pieces.append(ProgramPiece("sweep", first, stop, (0, 0), total))

    def _level(self, runs: NDArray[np.int64], threads: int) -> None:
        first, last, cost = int(runs[0, 0]), int(runs[-1, 1]), self._cost
        large = cost >= 2 * ROW_GRAIN
        mostly_large = 2 * cost[first:last][large[first:last]].sum() > cost[first:last].sum()
        if (
            threads == 1
            or not mostly_large
            or self._in_scratch[first:last].any()
            or self._balanced(runs, threads)
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

    def _balanced(self, runs: NDArray[np.int64], threads: int) -> bool:
        """Return whether runs cut only between samples keep all threads about equally busy."""
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        blocks = self._blocks(runs, threads)
        if len(runs) * blocks > 16 * threads:
            return True
        run_cost = np.add.reduceat(self._cost[first:last], runs[:, 0] - first)
        pieces = np.minimum(self._width[runs[:, 1] - 1], blocks)
        busy = np.zeros(threads)
        for unit in sorted(np.repeat(run_cost / pieces, pieces), reverse=True):
            busy[busy.argmin()] += unit
        return bool(busy.max() <= 1.25 * busy.mean())

    def _blocks(self, runs: NDArray[np.int64], threads: int) -> int:
        """Return the blocks of samples into which every run of a level is cut."""
        blocks = min(int(self._width[runs[:, 1] - 1].max()), -(-threads // len(runs)))
        level = slice(runs[0, 0], runs[-1, 1])
        read, cost, shared = self._bytes[level], self._cost[level], self._shared[level]
        if 2 * cost[shared].sum() > cost.sum():
            # Reads for each sample take little of the time, and so many samples share a pass.
            return max(min(blocks, -(-int(self._width[level].max()) // LANES)), 1)
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
