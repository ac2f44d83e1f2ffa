"""Costs of scans on the CPU, by the stages of :mod:`~.execution.stages`.

A level takes as long as its threads are busy, or its longest run, whichever is longer; values that
no cache holds come no faster than memory gives them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...execution.solves import is_long
from ...execution.stages import ROW_GRAIN, RUN_GRAIN
from ...formatting import quantity
from ...symbolic.program import Program
from .constants import built_in, machine_file, read_constants, write_constants
from .operations import Operations

# Nanoseconds of factorising a matrix, and of solving for a sample, by the method: of a call, for a
# row, and for a multiply-add; and of a step beside. Not calibrated.
_SOLVING = {
    "tridiagonal": ((400, 11, 0), (100, 9, 0), 1500),
    "banded": ((1000, 41, 0.5), (200, 31, 0.23), 1500),
    "dense": ((600, 230, 0.11), (500, 20, 0.12), 1500),
    "sparse": ((40_000, 430, 1.2), (9000, 17, 1.2), 15_000),
}
# Nanoseconds that a step, and an entry, hardly ever exceed in a linear scan.
_STEP, _ENTRY = 100, 2


@dataclass(frozen=True)
class Cpu:
    """Constants of a CPU.

    Attributes
    ----------
    name : str
        The processor, or where the constants come from.
    families : dict of str to list
        For ``"float32"`` and ``"float64"`` a row ``(a, b, c)`` for each of :data:`FAMILIES`, in
        nanoseconds.
    run : float
        Nanoseconds of a run beside its operations.
    wake, meet : float
        Nanoseconds more where several threads take part; and each time they wait for each other.
    cache : float
        Bytes beyond which values come from memory.
    bandwidth : float
        Bytes a nanosecond that memory gives to one thread.
    memory_threads : float
        How many times as much it gives to many.
    """

    name: str
    families: dict[str, list[list[float]]] = field(repr=False)
    run: float
    wake: float
    meet: float
    cache: float
    bandwidth: float
    memory_threads: float


def load_cpu(path: Path | None = None) -> Cpu:
    """Return the constants that were measured here, or those built in.

    These are of an AMD EPYC with two cores, 2026, in a virtual machine.
    """
    default: Cpu = built_in(Cpu, "cpu.json")
    return read_constants(path or machine_file(), default, ("bandwidth", "memory_threads"))


def save_cpu(machine: Cpu, path: Path | None = None) -> Path:
    """Write constants to a file; the path."""
    return write_constants(machine, path or machine_file())


@dataclass(frozen=True)
class CpuModel:
    """The CPU engine's :class:`Model`, with so many threads."""

    machine: Cpu
    dtype: np.dtype[Any]
    batch: int
    threads: int
    differs: NDArray[np.bool_] | None = None

    @property
    def where(self) -> str:
        """How many threads."""
        return quantity(self.threads, "thread")

    @property
    def workers(self) -> int:
        """Threads for each sample."""
        return max(self.threads // self.batch, 1)

    def leaves_idle(self, steps: int, entries: int) -> bool:
        """Return whether a linear scan of so many steps and entries might leave threads idle.

        One thread does all where that takes less time than to wake the others.
        """
        work = self.batch * (_STEP * steps + _ENTRY * entries)
        return self.workers > 1 and work > RUN_GRAIN

    def step(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time of each where it is the only one of its level."""
        taken = self._taken(operations)
        large = taken >= 2 * ROW_GRAIN
        meet = self.machine.meet if self.threads > 1 else 0.0
        return np.where(large, taken / self.threads + meet, self._piece(taken))

    def share(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time that each adds to a level with work for all workers."""
        return self._taken(operations) / self.threads

    def level_times(self, program: Program) -> tuple[float, list[float]]:
        """Return nanoseconds of an exclusive scan: of the run itself, and of each level."""
        machine, threads = self.machine, self.threads
        operations = Operations.of(program, self.dtype.itemsize, self.batch, self.differs)
        taken = self._taken(operations)
        from_memory = operations.bytes[:-1].sum() > machine.cache
        if taken[:-1].sum() < RUN_GRAIN:
            threads = 1
        times = []
        for _, runs in program.levels:
            first, last = int(runs[0, 0]), int(runs[-1, 1])
            level = taken[first:last]
            time = float(level.sum()) / threads
            if threads > 1:
                large = level >= 2 * ROW_GRAIN
                piece = np.where(large, level / threads, self._piece(level))
                time = max(time, float(np.add.reduceat(piece, runs[:, 0] - first).max()))
                # Threads meet after each operation that they share, unless they share out runs.
                meetings = int(large.sum()) if len(runs) * self.batch < threads else 0
                time += machine.meet * (1 + meetings)
            if from_memory:
                bandwidth = machine.bandwidth * (machine.memory_threads if threads > 1 else 1)
                time = max(time, float(operations.bytes[first:last].sum()) / bandwidth)
            times.append(time + self._solving(program, first, last))
        return machine.run + machine.wake * (threads > 1), times

    def _solving(self, program: Program, first: int, last: int) -> float:
        """Return the time of the solves of some operations, as if no two matrices were equal."""
        total = 0.0
        for k, form in program.solved.items():
            if first <= k < last:
                differs = self.batch > 1 and (self.differs is None or self.differs[k])
                matrices, calls = (self.batch, self.batch) if differs else (1, 1)
                (call, row, macs), (solve, entry, term), step = _SOLVING[form.method]
                threads = self.threads if is_long(form) else 1
                factorising = call + row * form.size + macs * form.multiply_adds
                solving = entry * form.size + term * form.solve_multiply_adds
                total += matrices * factorising / threads + step
                total += calls * solve + self.batch * solving
        return total

    def _taken(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time that each takes one thread, in a cache."""
        return operations.nanoseconds(self.machine.families[self.dtype.name])

    def _piece(self, taken: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time of operations that only their samples divide."""
        return taken / min(self.threads, self.batch)
