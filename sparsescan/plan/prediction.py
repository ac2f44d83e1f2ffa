"""The steps and the work of a plan with any number of workers, on paper."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..symbolic.program import Program


@dataclass(frozen=True)
class ScanPrediction:
    """Steps and work of an exclusive scan of one sample by some workers.

    A level's runs do not depend on each other, so workers share them; the levels follow one
    another. The workers are those of a parallel random access machine, as in BPPSA (MLSys 2020),
    section 3.6: they wait for nothing but each other's results.

    Attributes
    ----------
    workers : int
        How many there are.
    steps : int
        Operations from the first to the last, one after the other: the step complexity. For the
        Blelloch scan ``Θ(log n)`` if ``workers > n``, else ``Θ(n/workers + log workers)``: equation
        6 of the paper.
    operations : int
        Operations of all workers: the work complexity, ``Θ(n)``: equation 7.
    critical_multiply_adds : int
        Multiply-adds from the first to the last, one after the other.
    multiply_adds : int
        Multiply-adds of all workers.
    """

    workers: int
    steps: int
    operations: int
    critical_multiply_adds: int
    multiply_adds: int


def predict(program: Program | None, workers: int) -> ScanPrediction:
    """Return steps and work on so many workers, which each take one run after the other."""
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
    """Return when the last of some tasks is done, if whoever is free takes the next."""
    if workers >= len(times):
        return int(times.max(initial=0))
    if times.min() == times.max():
        return int(times[0]) * -(-len(times) // workers)
    busy = [0] * workers
    for time in times.tolist():
        heapq.heapreplace(busy, busy[0] + time)
    return max(busy)
