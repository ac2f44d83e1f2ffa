"""Costs of scans: how long each operation, and each schedule, takes on a machine.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...execution.solves import is_long
from ...execution.stages import ROW_GRAIN, RUN_GRAIN
from ...execution.workspace import KINDS
from ...formatting import quantity
from ...kernels.cpu.tables import LANES, Kind, Op
from ...symbolic.pattern import Pattern
from ...symbolic.program import Program

__all__ = [
    "FAMILIES",
    "Cost",
    "Cpu",
    "CpuModel",
    "Matrices",
    "Model",
    "Operations",
    "level_costs",
    "load_cpu",
    "machine_file",
    "read_constants",
    "run_time",
    "save_cpu",
    "write_constants",
]

# Products with a vector, by the kind of the matrix; with one that samples share. Products of
# matrices, by the kinds of the later and of the earlier one; the last is stored densely.
FAMILIES = (
    "dense·x",
    "csr·x",
    "diagonal·x",
    "shared csr·x",
    "shared dense·x",
    "diagonal·any",
    "any·diagonal",
    "dense·dense",
    "dense·csr",
    "csr·dense",
    "csr·csr",
    "csr·csr, dense",
)
_SHARED, _SHARED_DENSE, _BY_DIAGONAL, _OF_DIAGONAL, _PRODUCTS = 3, 4, 5, 6, 7
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


@dataclass(frozen=True)
class Cost:
    """Counts of a level, for one sample."""

    name: str
    operations: int
    depth: int
    products: int
    multiply_adds: int
    critical: int  # multiply-adds of its longest run
    nnz_in: int  # entries of the operands of its products
    nnz_out: int  # entries of the products
    bytes: int  # that its operations read and write, if nothing stays in a cache


class Matrices:
    """Properties of every matrix that operations read or make, on which their cost depends.

    Parameters
    ----------
    patterns : sequence of Pattern
        Their patterns.
    jacobian : ndarray of bool
        Which are the caller's, and not products.
    differs : ndarray of bool
        Which differ between samples.
    """

    def __init__(
        self, patterns: Sequence[Pattern], jacobian: NDArray[np.bool_], differs: NDArray[np.bool_]
    ) -> None:
        self.kind = np.array([KINDS[pattern.kind] for pattern in patterns], np.int64)
        shapes = np.array([pattern.shape for pattern in patterns], np.int64).reshape(-1, 2)
        self.rows, self.cols = shapes.T
        self.nnz = np.array([pattern.nnz for pattern in patterns], np.int64)
        # Dense and diagonal matrices load no indices.
        index = np.array([pattern.index_dtype.itemsize for pattern in patterns], np.int64)
        self.index_bytes = np.where(self.kind == Kind.CSR, index * (self.nnz + self.rows + 1), 0)
        self.jacobian = jacobian
        self.differs = differs


@dataclass(frozen=True)
class Operations:
    """Counts of operations, for all samples of a batch.

    Attributes
    ----------
    family : ndarray of int64, shape (m,)
        Which of :data:`FAMILIES`.
    counts : ndarray of float64, shape (m, 3)
        The factors of ``(a, b, c)``.
    bytes : ndarray of int64, shape (m,)
        Values, indices and vectors that are read and written.
    """

    family: NDArray[np.int64]
    counts: NDArray[np.float64]
    bytes: NDArray[np.int64]

    @classmethod
    def of(
        cls, program: Program, itemsize: int, batch: int, differs: NDArray[np.bool_] | None
    ) -> Operations:
        """Return operations of `program`, if these Jacobians (None: all) differ between samples."""
        batched = np.full(program.n, batch > 1) if differs is None else differs
        jacobian = np.arange(len(program.patterns)) < program.n
        matrices = Matrices(program.patterns, jacobian, program.batched(batched))
        ops = program.ops
        vector = ops[:, Op.VECTOR] == 1
        # A gradient has the number of a Jacobian, or one more: no matrix.
        left, out = (np.where(vector, 0, ops[:, column]) for column in (Op.LEFT, Op.OUT))
        every = cls.count(
            vector, left, ops[:, Op.RIGHT], out, program.work, matrices, itemsize, batch
        )
        for k, form in program.solved.items():
            # A solve is timed by itself, not as a product.
            every.counts[k] = 0
            every.bytes[k] += form.nbytes(itemsize) * (batch if batched[k] else 1)
        return every

    @classmethod
    def count(
        cls,
        vector: NDArray[np.bool_],
        left: NDArray[np.int64],
        right: NDArray[np.int64],
        out: NDArray[np.int64],
        work: NDArray[np.int64],
        matrices: Matrices,
        itemsize: int,
        batch: int,
    ) -> Operations:
        """Return operations on these numbers of matrices, with these multiply-adds.

        Only `right` counts for operations that make a vector.
        """
        m = matrices
        csr, diagonal = m.kind == Kind.CSR, m.kind == Kind.DIAGONAL
        shared = vector & m.jacobian[right] & ~diagonal[right] & ~m.differs[right] & (batch > 2)
        both = csr[right] & csr[left]
        family = np.select(
            [shared & csr[right], shared, vector, diagonal[right], diagonal[left]],
            [_SHARED, _SHARED_DENSE, m.kind[right], _BY_DIAGONAL, _OF_DIAGONAL],
            _PRODUCTS + 2 * csr[right] + csr[left] + (both & (m.kind[out] == Kind.DENSE)),
        )
        times = np.where(vector | m.differs[out], batch, 1)
        passes = np.where(shared, math.ceil(batch / LANES), times)
        looked_at = m.nnz[left] * m.jacobian[left] + m.nnz[right] * m.jacobian[right]
        entries = np.where(vector, m.rows[right], m.nnz[out] + looked_at)
        counts = np.stack([work * passes, entries * times, times], axis=1).astype(np.float64)
        size = np.where(m.differs, batch, 1) * m.nnz * itemsize + m.index_bytes
        moved = np.where(
            vector, (m.rows + m.cols)[right] * batch * itemsize, size[left] + size[out]
        )
        return cls(family, counts, size[right] + moved)

    def nanoseconds(self, machine: Cpu, dtype: np.dtype[Any]) -> NDArray[np.float64]:
        """Return the time that each takes one thread, in a cache."""
        constants = np.array(machine.families[dtype.name])
        taken: NDArray[np.float64] = (constants[self.family] * self.counts).sum(axis=1)
        return taken


def machine_file() -> Path | None:
    """Return the file of this machine's constants in the user's cache folder; None without one.

    A user without a home, as that of a container may be, has no such folder.
    """
    if sys.platform == "win32":
        named, below = "LOCALAPPDATA", ("AppData", "Local")
    elif sys.platform == "darwin":
        named, below = "", ("Library", "Caches")
    else:
        named, below = "XDG_CACHE_HOME", (".cache",)
    # A relative folder would be another one in each directory. Without a home "~" stays as it is.
    folder = Path(os.environ.get(named, ""))
    if not folder.is_absolute():
        folder = Path(os.path.expanduser("~"), *below)
    return folder / "sparsescan" / "machine.json" if folder.is_absolute() else None


def file_to_write(path: Path | None) -> Path:
    """Return the path of a file for measured constants, whose folder is made.

    Raises
    ------
    InputError
        If the user has no cache folder.
    OSError
        If it cannot be made.
    """
    if path is None:
        variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
        named = "HOME" if sys.platform == "darwin" else variable
        raise InputError(
            "measured constants are kept in the user's cache folder, and this user has no home; "
            f"expected the environment variable {named} to name a folder by its absolute path"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def load_cpu(path: Path | None = None) -> Cpu:
    """Return the constants that were measured, or those built in."""
    tables, positive = {"families": (len(FAMILIES), 3)}, ("bandwidth", "memory_threads")
    return read_constants(path or machine_file(), Cpu, tables, positive) or _BUILT_IN


def save_cpu(machine: Cpu, path: Path | None = None) -> Path:
    """Write constants to a file; the path."""
    return write_constants(machine, path or machine_file())


def read_constants(
    path: Path | None,
    kind: type[_Constants],
    tables: Mapping[str, tuple[int, ...]],
    positive: Sequence[str],
) -> _Constants | None:
    """Return constants from a file, read again only if it has changed; None if there are none.

    Attributes are numbers, but for the name, and for `tables`, with a table of this shape for each
    dtype. Attributes in `positive` are not zero.
    """
    if path is None:
        return None
    try:
        about = path.stat()
    except OSError:
        return None
    written = about.st_mtime_ns, about.st_size
    if _read.get(path, (None, None))[0] != written:
        _read[path] = written, _parse(path, kind, tables, positive)
    constants: _Constants | None = _read[path][1]
    return constants


def _parse(
    path: Path,
    kind: type[_Constants],
    tables: Mapping[str, tuple[int, ...]],
    positive: Sequence[str],
) -> _Constants | None:
    try:
        constants = kind(**json.loads(path.read_text()))
        for key, value in vars(constants).items():
            if key == "name":
                continue
            parts = [value[dtype] for dtype in _FLOATS] if key in tables else [value]
            for numbers in map(np.array, parts):
                usable = numbers.dtype.kind in "if" and numbers.shape == tables.get(key, ())
                if not usable or not (np.isfinite(numbers) & (numbers >= 0)).all():
                    return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return constants if all(getattr(constants, key) > 0 for key in positive) else None


def write_constants(constants: Any, path: Path | None) -> Path:
    """Write constants to a file; the path."""
    path = file_to_write(path)
    path.write_text(json.dumps(asdict(constants), indent=1) + "\n")
    return path


_Constants = TypeVar("_Constants")
# When a file was written, with how many bytes, and what it says.
_read: dict[Path, tuple[tuple[int, int] | None, Any]] = {}
_FLOATS = ("float32", "float64")


def level_costs(program: Program, itemsize: int) -> list[Cost]:
    """Return what every level does, for one sample with values of `itemsize` bytes."""
    nnz = np.array([pattern.nnz for pattern in program.patterns], np.int64)
    moved = Operations.of(program, itemsize, 1, None).bytes
    costs = []
    for name, runs in program.levels:
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        ops, macs = program.ops[first:last], program.work[first:last]
        products = ops[ops[:, Op.VECTOR] == 0]
        cost = Cost(
            name=name,
            operations=last - first,
            depth=int((runs[:, 1] - runs[:, 0]).max()),
            products=len(products),
            multiply_adds=int(macs.sum()),
            critical=int(np.add.reduceat(macs, runs[:, 0] - first).max()),
            nnz_in=int(nnz[products[:, Op.LEFT]].sum() + nnz[products[:, Op.RIGHT]].sum()),
            nnz_out=int(nnz[products[:, Op.OUT]].sum()),
            bytes=int(moved[first:last].sum()),
        )
        costs.append(cost)
    return costs


class Model(Protocol):
    """The time of scans of some batch size and dtype on some hardware."""

    @property
    def batch(self) -> int:
        """Number of samples."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""

    @property
    def differs(self) -> NDArray[np.bool_] | None:
        """Which Jacobians of a chain differ between samples; None if all do."""

    @property
    def where(self) -> str:
        """The name of the hardware, for people."""

    @property
    def workers(self) -> int:
        """Runs of a level that are worked on at once."""

    def leaves_idle(self, steps: int, entries: int) -> bool:
        """Return whether a linear scan of so many steps and entries might leave workers idle."""

    def step(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time of each where it is the only one of its level."""

    def share(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time that each adds to a level with work for all workers."""

    def level_times(self, program: Program) -> tuple[float, list[float]]:
        """Return nanoseconds of an exclusive scan: of the run itself, and of each level."""


def run_time(model: Model, program: Program) -> float:
    """Return nanoseconds of an exclusive scan: of the run itself and of all levels."""
    run, levels = model.level_times(program)
    return run + sum(levels)


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
        taken = operations.nanoseconds(self.machine, self.dtype)
        large = taken >= 2 * ROW_GRAIN
        meet = self.machine.meet if self.threads > 1 else 0.0
        return np.where(large, taken / self.threads + meet, self._piece(taken))

    def share(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time that each adds to a level with work for all workers."""
        return operations.nanoseconds(self.machine, self.dtype) / self.threads

    def level_times(self, program: Program) -> tuple[float, list[float]]:
        """Return nanoseconds of an exclusive scan: of the run itself, and of each level."""
        machine, threads = self.machine, self.threads
        operations = Operations.of(program, self.dtype.itemsize, self.batch, self.differs)
        taken = operations.nanoseconds(machine, self.dtype)
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

    def _piece(self, taken: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time of operations that only their samples divide."""
        return taken / min(self.threads, self.batch)


# Measured on an AMD EPYC with two cores, 2026, in a virtual machine.
_BUILT_IN = Cpu(
    name="built in",
    families={
        "float32": [
            [0.046, 1.5, 27],
            [0.5, 0.0, 11],
            [0.12, 0.0, 15],
            [0.78, 0.4, 4],
            [0.25, 0.7, 8],
            [0.0, 0.15, 760],
            [1.9, 0.0, 550],
            [0.06, 2.0, 900],
            [0.0, 2.2, 890],
            [0.0, 0.52, 1200],
            [0.94, 2.2, 920],
            [0.59, 0.52, 1200],
        ],
        "float64": [
            [0.099, 0.87, 16],
            [0.31, 0.7, 14],
            [0.32, 0.0, 11],
            [0.64, 0.76, 2],
            [0.27, 0.31, 11],
            [0.0, 0.21, 800],
            [2.5, 0.0, 820],
            [0.12, 2.2, 910],
            [0.0, 2.7, 860],
            [0.0, 0.75, 2200],
            [0.75, 1.9, 1300],
            [0.6, 0.8, 1400],
        ],
    },
    run=9000,
    wake=10_000,
    meet=5000,
    cache=3.2e7,
    bandwidth=30,
    memory_threads=1,
)
