"""Operations of scans: what they do, and the models that say how long that takes.

An operation of a family takes ``a·m + b·o + c`` nanoseconds of one thread, with `m` its
multiply-adds, and `o` the entries that it writes and those of Jacobians whose range it looks at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...execution.workspace import KINDS
from ...kernels.cpu.tables import LANES, Kind, Op
from ...symbolic.pattern import Pattern
from ...symbolic.program import Program

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


class Operands:
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
        matrices = Operands(program.patterns, jacobian, program.batched(batched))
        ops = program.ops.copy()
        # A gradient has the number of a Jacobian, or one more: no matrix.
        ops[np.ix_(ops[:, Op.VECTOR] == 1, [Op.LEFT, Op.OUT])] = 0
        every = cls.count(ops, program.work, matrices, itemsize, batch)
        for k, form in program.solved.items():
            # A solve is timed by itself, not as a product.
            every.counts[k] = 0
            every.bytes[k] += form.nbytes(itemsize) * (batch if batched[k] else 1)
        return every

    @classmethod
    def count(
        cls,
        ops: NDArray[np.int64],
        work: NDArray[np.int64],
        matrices: Operands,
        itemsize: int,
        batch: int,
    ) -> Operations:
        """Return operations on numbered matrices, as a program has them, with their multiply-adds.

        Only the right operand counts for those that make a vector.
        """
        m, vector = matrices, ops[:, Op.VECTOR] == 1
        left, right, out = ops[:, [Op.LEFT, Op.RIGHT, Op.OUT]].T
        csr, diagonal = m.kind == Kind.CSR, m.kind == Kind.DIAGONAL
        shared = vector & m.jacobian[right] & ~diagonal[right] & ~m.differs[right] & (batch > 2)
        both = csr[right] & csr[left]
        # Small arrays: np.select, np.stack take as long as all the rest.
        family = _PRODUCTS + 2 * csr[right] + csr[left] + (both & (m.kind[out] == Kind.DENSE))
        family = np.where(diagonal[left], _OF_DIAGONAL, family)
        family = np.where(diagonal[right], _BY_DIAGONAL, family)
        family = np.where(vector, m.kind[right], family)
        family = np.where(shared, np.where(csr[right], _SHARED, _SHARED_DENSE), family)
        times = np.where(vector | m.differs[out], batch, 1)
        passes = np.where(shared, math.ceil(batch / LANES), times)
        looked_at = m.nnz[left] * m.jacobian[left] + m.nnz[right] * m.jacobian[right]
        entries = np.where(vector, m.rows[right], m.nnz[out] + looked_at)
        counts = np.empty((len(ops), 3))
        counts[:, 0], counts[:, 1], counts[:, 2] = work * passes, entries * times, times
        size = np.where(m.differs, batch, 1) * m.nnz * itemsize + m.index_bytes
        moved = np.where(
            vector, (m.rows + m.cols)[right] * batch * itemsize, size[left] + size[out]
        )
        return cls(family, counts, size[right] + moved)

    def nanoseconds(self, families: list[list[float]]) -> NDArray[np.float64]:
        """Return the time that each takes, by a row ``(a, b, c)`` for each family."""
        taken: NDArray[np.float64] = (np.array(families)[self.family] * self.counts).sum(axis=1)
        return taken


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
