"""How blocks share the operations of a program: by counting alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays.cuda import SIMULATED
from ...kernels.cpu.tables import Op
from ...kernels.cuda import sweeps
from ...kernels.cuda.products import DENSE_ROWS
from ...symbolic.pattern import Pattern
from ...symbolic.program import Program
from .patterns import tiles_of

# Multiply-adds of a product that a block makes at least, where it shares the product with others.
GRAIN = 64 if SIMULATED else 16384
# Tiles of a step above which its rows are shared by blocks, even if each step then takes a launch.
LARGE = 4
# Rows, columns and inner dimension from which on a dense product is cuBLAS's.
BLAS_SIZE = 6 if SIMULATED else 128


class Shares(NamedTuple):
    """How blocks share the operations of a program."""

    blocks: NDArray[np.int64]  # parts of the rows, where an operation is the only one of its run
    large: NDArray[np.bool_]  # whether it is worth more than one block
    blas: NDArray[np.bool_]  # whether cuBLAS multiplies

    @classmethod
    def of(cls, program: Program) -> Shares:
        """Return the launches of `program`, on a device of any size."""
        ops, patterns = program.ops, program.patterns
        product, (_, left, right, out) = ops[:, Op.VECTOR] == 0, ops.T
        tiles = {pattern: len(tiles_of(pattern)) - 1 for pattern in set(patterns)}
        count = np.array([tiles[pattern] for pattern in patterns], np.int64)[right]
        rows = np.array([pattern.shape[0] for pattern in patterns], np.int64)[right]
        large = np.array([is_large(pattern) for pattern in patterns])
        # Some entries of dense operands may be known to be zero, and left out of the product.
        blas = product & large[left] & large[right] & large[np.where(product, out, 0)]
        dense = np.array([pattern.kind == "dense" for pattern in patterns])
        full = product & dense[left] & dense[right] & dense[np.where(product, out, 0)]
        rows = np.where(full, -(-rows // DENSE_ROWS), rows)
        blocks = np.where(product, np.minimum(program.work // GRAIN, rows), count)
        small = np.array([_is_small(pattern) for pattern in patterns])[right]
        many = (count > LARGE) & (product | ~small)
        return cls(np.maximum(blocks, 1), many | blas, blas)


class Sweepable(NamedTuple):
    """Which operations take a gradient through small steps, and can be those of a sweep."""

    small: NDArray[np.bool_]  # which Jacobians
    ops: NDArray[np.bool_]  # matrix-vector products by one of them
    follows: NDArray[np.bool_]  # operations that are applied to what the one before has made
    threads: int  # of a block

    @classmethod
    def of(cls, program: Program) -> Sweepable:
        """Return them for `program`."""
        n, vector, left, right, out = program.n, *program.ops.T
        sizes = np.array([(max(p.shape), p.nnz) for p in program.patterns[:n]], np.int64)
        small = np.array([_is_small(pattern) for pattern in program.patterns[:n]])
        ops = (vector == 1) & (right < n)
        ops[ops] = small[right[ops]]
        rows, entries = sizes[small].max(axis=0, initial=1).tolist()
        threads = min(32, sweeps.THREADS)
        while threads < min(max(rows, entries / sweeps.STAGED), sweeps.THREADS):
            threads *= 2
        return cls(small, ops, np.append(False, left[1:] == out[:-1]), threads)

    def take(self, runs: NDArray[np.int64]) -> bool:
        """Return whether the launch of these runs of a level is a sweep."""
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        if (runs[:, 1] - runs[:, 0]).max() == 1 or not self.ops[first:last].all():
            return False
        follows = self.follows[first:last].copy()
        follows[runs[:, 0] - first] = True
        return bool(follows.all())


def is_large(pattern: Pattern) -> bool:
    """Return whether products of such matrices are cuBLAS's to make."""
    return pattern.kind == "dense" and min(pattern.shape) >= BLAS_SIZE


def _is_small(pattern: Pattern) -> bool:
    """Return whether a sweep can apply such matrices."""
    threads = sweeps.THREADS
    rows, entries = sweeps.ROWS * threads, sweeps.STAGED * threads
    return max(pattern.shape) <= rows and pattern.nnz <= entries
