"""The theoretical steps and work of a plan with any number of workers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..symbolic.program import Program


@dataclass(frozen=True)
class ScanPrediction:
    """Steps and work of an exclusive scan of one sample by some workers.

    The runs of a level do not depend on each other, so workers share them. The levels follow one
    another. The model is a parallel random access machine, as in BPPSA (MLSys 2020), section 3.6:
    workers wait only for each other's results.

    Attributes
    ----------
    workers : int
        How many there are.
    steps : int
        Operations on the critical path: the step complexity. For the Blelloch scan it is
        ``Θ(log n)`` if ``workers > n``, else ``Θ(n/workers + log workers)``: equation 6 of the
        paper.
    operations : int
        Operations of all workers: the work complexity, ``Θ(n)``: equation 7.
    critical_multiply_adds : int
        Multiply-adds on the critical path.
    multiply_adds : int
        Multiply-adds of all workers.
    """

    workers: int
    steps: int
    operations: int
    critical_multiply_adds: int
    multiply_adds: int


def predict(program: Program | None, workers: int) -> ScanPrediction:
    """Return steps and work for some workers, each of which takes one run after the other."""
    steps = operations = critical = work = 0
    if program is None:
        return ScanPrediction(workers, 0, 0, 0, 0)
    for _, runs in program.levels:
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        counts = runs[:, 1] - runs[:, 0]
        macs = np.add.reduceat(program.work[first:last], runs[:, 0] - first)
        steps += _makespan(counts, workers)
        critical += _makespan(macs, workers)
        operations += last - first
        work += int(macs.sum())
    return ScanPrediction(workers, steps, operations, critical, work)


def _makespan(times: NDArray[np.int64], workers: int) -> int:
    """Return when the last task is done, if each free worker takes the next task."""
    if workers >= len(times):
        return int(times.max(initial=0))
    if times.min() == times.max():
        return int(times[0]) * -(-len(times) // workers)
    busy = [0] * workers
    for time in times.tolist():
        heapq.heapreplace(busy, busy[0] + time)
    return max(busy)
