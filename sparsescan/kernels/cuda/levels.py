"""The CUDA engine: one launch runs a level of a plan.

A block works on one *unit* for one sample: the operations of a run, one after the other; or a part
of the rows of one operation, if the run has no other. As on the CPU a product of Jacobians is
``M·diag(2^e)``, plain while all its entries are in a band (:mod:`sparsescan.kernels.cpu`). What
leaves the band is found by the blocks that multiply, and brought back by the last of them to
finish: it is rare, and no launch is spent on it. A value that is not finite raises a flag, upon
which a last launch lets the linear scan decide what it reaches.

Rows of unequal length are balanced by *tiles* (Greathouse and Daga, SC 2014, CSR-Adaptive): rows
with about as many entries in all as a block has room for, or one long row. A row of a product is
added up in shared memory, a column a place, one row of the other operand after the other: so no sum
depends on timing, and no float is added atomically.

A kernel gets addresses and sizes only: see :mod:`sparsescan.kernels.cuda.tables`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int32, int64

from ...arrays.cuda import SIMULATED, cuda
from ..cpu.tables import Op
from .device import load
from .matvec import STAGE, vector_operation
from .nodes import WORD, Shared, dtypes_of
from .products import product
from .tables import Node, Plan, Run, Unit

__all__ = ["STAGE", "THREADS", "LevelKernels", "level_kernels"]

# Threads of a block at most, and bytes of columns that a row is added up in.
# Small in the simulator, so that small matrices have several tiles.
THREADS, _TILE_BYTES = (8, 32) if SIMULATED else (256, 16384)


class LevelKernels(NamedTuple):
    """Compiled for one dtype of values and one of indices.

    Both take ``(run, plan, units, batch, guarded)``, the first three addresses; block ``unit·batch
    + sample`` works on that unit for that sample.

    Attributes
    ----------
    vectors : callable
        Units of matrix-vector products only; with `guarded`, only if the flag is raised.
    level : callable
        Any units.
    """

    vectors: Any
    level: Any


@cache
def level_kernels(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> LevelKernels:
    """Return the kernels for values of `dtype` and index arrays of `index_dtype`."""
    kind, index_kind = from_dtype(dtype), from_dtype(index_dtype)
    t = dtypes_of(dtype, index_dtype, _TILE_BYTES)
    tile_size = t.tile_size

    @cuda.jit
    def vectors(run, plan, units, batch, guarded):
        if guarded != 0 and load(run, Run.FLAG, WORD) == 0:
            return
        stage = cuda.shared.array(STAGE, kind)
        partial = cuda.shared.array(THREADS, kind)
        tops = cuda.shared.array(THREADS, int32)
        shared = Shared(stage, partial, tops, None, None, None)
        number, sample = int64(cuda.blockIdx.x) // batch, int64(cuda.blockIdx.x) % batch
        unit = units + number * Unit.WIDTH * 8
        ops = load(plan, Plan.OPS, WORD)
        block, blocks = load(unit, Unit.BLOCK, WORD), load(unit, Unit.BLOCKS, WORD)
        for i in range(load(unit, Unit.FIRST, WORD), load(unit, Unit.LAST, WORD)):
            op = ops + i * Op.WIDTH * 8
            vector_operation(t, run, plan, op, int64(0), sample, block, blocks, shared)
            cuda.syncthreads()

    @cuda.jit
    def level(run, plan, units, batch, guarded):
        # Shared memory is given to functions: Numba cannot link one that has its own twice.
        columns = cuda.shared.array(tile_size, kind)
        partial = cuda.shared.array(THREADS, kind)
        tops = cuda.shared.array(THREADS, int32)
        factor = cuda.shared.array(THREADS, kind)
        starts = cuda.shared.array(THREADS, index_kind)
        stops = cuda.shared.array(THREADS, index_kind)
        shared = Shared(columns, partial, tops, factor, starts, stops)
        number, sample = int64(cuda.blockIdx.x) // batch, int64(cuda.blockIdx.x) % batch
        unit = units + number * Unit.WIDTH * 8
        ops = load(plan, Plan.OPS, WORD)
        block, blocks = load(unit, Unit.BLOCK, WORD), load(unit, Unit.BLOCKS, WORD)
        part, mode = load(unit, Unit.PART, WORD), load(unit, Unit.MODE, WORD)
        for i in range(load(unit, Unit.FIRST, WORD), load(unit, Unit.LAST, WORD)):
            op = ops + i * Op.WIDTH * 8
            if load(op, Op.VECTOR, WORD) != 0:
                vector_operation(t, run, plan, op, part, sample, block, blocks, shared)
            else:
                out = load(op, Op.OUT, WORD) * Node.WIDTH * 8
                node = load(plan, Plan.NODES, WORD) + out
                if sample == 0 or load(node, Node.BATCHED, WORD) != 0:
                    product(t, run, plan, op, part, sample, block, blocks, mode, shared)
            cuda.syncthreads()

    return LevelKernels(vectors, level)
