"""What scans cost: how long each operation, and each schedule, takes on a machine.

An operation of a family takes ``a·m + b·o + c`` nanoseconds of one thread, with `m` its
multiply-adds, and `o` the entries that it writes and those of Jacobians whose range it looks at.
A level takes as long as its threads are busy, or its longest run, whichever is longer; values that
no cache holds come no faster than memory gives them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels.cpu import Kind, Op
from .program import KINDS, ROW_GRAIN, RUN_GRAIN, Program

__all__ = [
    "FAMILIES",
    "Machine",
    "Operations",
    "level_times",
    "load_machine",
    "machine_file",
    "save_machine",
]

# Products with a vector, by the kind of the matrix; with a CSR matrix that samples share. Products
# of matrices, by the kinds of the later and of the earlier one.
FAMILIES = (
    "dense·x",
    "csr·x",
    "diagonal·x",
    "shared csr·x",
    "diagonal·any",
    "any·diagonal",
    "dense·dense",
    "dense·csr",
    "csr·dense",
    "csr·csr",
)
_SHARED, _BY_DIAGONAL, _OF_DIAGONAL, _PRODUCTS = 3, 4, 5, 6
# Samples that one pass over a shared CSR matrix serves.
_LANES = 8


@dataclass(frozen=True)
class Machine:
    """Constants of a CPU.

    Attributes
    ----------
    name : str
        Of the processor, or where the constants come from.
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


@dataclass(frozen=True)
class Operations:
    """Counts of all operations of a program, for all samples of a batch.

    Attributes
    ----------
    family : ndarray of int64, shape (m,)
        Which of :data:`FAMILIES`.
    counts : ndarray of float64, shape (m, 3)
        What ``(a, b, c)`` are multiplied by.
    bytes : ndarray of float64, shape (m,)
        Values and indices that are read and written.
    """

    family: NDArray[np.int64]
    counts: NDArray[np.float64]
    bytes: NDArray[np.float64]

    @classmethod
    def of(
        cls, program: Program, itemsize: int, batch: int, batched: NDArray[np.bool_]
    ) -> Operations:
        """Those of `program`, if these Jacobians differ between samples."""
        patterns, n, ops = program.patterns, program.n, program.ops
        nnz = np.array([pattern.nnz for pattern in patterns], np.float64)
        rows = np.array([pattern.shape[0] for pattern in patterns], np.float64)
        kind = np.array([KINDS[pattern.kind] for pattern in patterns], np.int64)
        index = np.where(
            kind == Kind.CSR, [pattern.index_dtype.itemsize for pattern in patterns], 0
        )
        differs = program.batched(batched)
        left, right, out = ops[:, Op.LEFT], ops[:, Op.RIGHT], ops[:, Op.OUT]
        vector = ops[:, Op.VECTOR] == 1
        # A gradient has the number of a Jacobian, or one more: no node.
        left, out = np.where(vector, 0, left), np.where(vector, 0, out)
        shared = vector & (right < n) & (kind[right] == Kind.CSR) & ~differs[right] & (batch > 2)
        family = np.select(
            [shared, vector, kind[right] == Kind.DIAGONAL, kind[left] == Kind.DIAGONAL],
            [_SHARED, kind[right], _BY_DIAGONAL, _OF_DIAGONAL],
            _PRODUCTS + 2 * (kind[right] == Kind.CSR) + (kind[left] == Kind.CSR),
        )
        times = np.where(vector | differs[out], float(batch), 1.0)
        passes = np.where(shared, math.ceil(batch / _LANES), times)
        looked_at = nnz[left] * (left < n) + nnz[right] * (right < n)
        entries = np.where(vector, rows[right], nnz[out] + looked_at)
        counts = np.stack([program.work * passes, entries * times, times], axis=1)
        size = itemsize + index
        values = np.where(differs, batch, 1) * nnz * itemsize + nnz * index
        moved = values[right] + np.where(vector, 2 * rows[right] * batch * itemsize, 0)
        moved += np.where(vector, 0, values[left] + (nnz * size)[out] * times)
        return cls(family, counts, moved)

    def nanoseconds(self, machine: Machine, dtype: np.dtype[Any]) -> NDArray[np.float64]:
        """What each takes one thread, in a cache."""
        constants = np.array(machine.families[dtype.name])
        taken: NDArray[np.float64] = (constants[self.family] * self.counts).sum(axis=1)
        return taken


def machine_file() -> Path:
    """Where ``sparsescan calibrate`` keeps this machine's constants: the user's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "sparsescan" / "machine.json"


def load_machine(path: Path | None = None) -> Machine:
    """The constants that were measured, or those built in where none were, or none that can be."""
    try:
        found = json.loads((path or machine_file()).read_text())
        machine = Machine(**found)
        tables = [np.array(machine.families[name], np.float64) for name in _FLOATS]
        scalars = [value for key, value in found.items() if key not in ("name", "families")]
        numbers = np.concatenate([*(table.ravel() for table in tables), np.array(scalars, float)])
        usable = all(table.shape == (len(FAMILIES), 3) for table in tables)
        if usable and np.isfinite(numbers).all() and (numbers >= 0).all() and machine.bandwidth > 0:
            return machine
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return _BUILT_IN


def save_machine(machine: Machine, path: Path | None = None) -> Path:
    """Write constants to a file; the path."""
    path = path or machine_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(machine), indent=1) + "\n")
    return path


_FLOATS = ("float32", "float64")


def level_times(
    program: Program,
    operations: Operations,
    machine: Machine,
    dtype: np.dtype[Any],
    batch: int,
    threads: int,
) -> tuple[float, list[float]]:
    """Nanoseconds of an exclusive scan by the CPU engine: of the run itself, and of each level."""
    taken = operations.nanoseconds(machine, dtype)
    from_memory = operations.bytes[:-1].sum() > machine.cache
    if taken[:-1].sum() < RUN_GRAIN:
        threads = 1
    times = []
    for _, runs in program.levels:
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        level = taken[first:last]
        time = float(level.sum()) / threads
        if threads > 1:
            # Rows of large operations are shared; samples of all others, where there are several.
            large = level >= 2 * ROW_GRAIN
            piece = np.where(large, level / threads, level / min(threads, batch))
            time = max(time, float(np.add.reduceat(piece, runs[:, 0] - first).max()))
            # Threads meet after each operation that they share, unless they share out whole runs.
            meetings = int(large.sum()) if len(runs) * batch < threads else 0
            time += machine.meet * (1 + meetings)
        if from_memory:
            bandwidth = machine.bandwidth * (machine.memory_threads if threads > 1 else 1)
            time = max(time, float(operations.bytes[first:last].sum()) / bandwidth)
        times.append(time)
    return machine.run + machine.wake * (threads > 1), times


# Of an AMD EPYC with two cores, 2026, in a virtual machine.
_BUILT_IN = Machine(
    name="built in",
    families={
        "float32": [
            [0.046, 1.5, 27],
            [0.31, 1.7, 11],
            [0.12, 0.0, 15],
            [1.2, 0.6, 5],
            [0.0, 0.15, 760],
            [1.9, 0.0, 550],
            [0.06, 2.0, 900],
            [0.0, 2.2, 890],
            [0.0, 0.52, 1200],
            [0.46, 2.4, 1100],
        ],
        "float64": [
            [0.099, 0.87, 16],
            [0.37, 1.4, 14],
            [0.32, 0.0, 11],
            [1.4, 0.5, 4],
            [0.0, 0.21, 800],
            [2.5, 0.0, 820],
            [0.12, 2.2, 910],
            [0.0, 2.7, 860],
            [0.0, 0.75, 2200],
            [0.51, 2.6, 1100],
        ],
    },
    run=9000,
    wake=10_000,
    meet=5000,
    cache=3.2e7,
    bandwidth=30,
    memory_threads=1,
)
