"""The CUDA engine: one launch runs a level of a plan.

A block works on one *unit* for one sample: the operations of a run, one after the other; or a part
of the rows of one operation, if the run has no other. As on the CPU a product of Jacobians is
``M·diag(2^e)``, plain while all its entries are in a band (:mod:`sparsescan.kernels.cpu`). What
leaves the band is found by the blocks that multiply. One that is alone brings it back; what many
have made is brought back by many, in a launch that else ends at once. A value that is not finite
raises a flag, upon which a last launch lets the linear scan decide what it reaches.

Rows of unequal length are balanced by *tiles* (Greathouse and Daga, SC 2014, CSR-Adaptive): rows
with about as many entries in all as a block has room for, or one long row. A row of a sparse
product is added up in shared memory by a warp or some of its lanes, one row of the other operand
after the other, in places that were worked out once (:mod:`sparsescan.symbolic.terms`): so no sum
depends on timing, and no float is added atomically.

A gradient that many blocks take through a large step is a launch, in which they bring the values of
the next step to the L2 cache. Blocks that stayed for all steps would wait for each other after
each: a fence, an atomic operation and a look at it go through that cache, an estimated microsecond,
which is what a graph takes from one launch to the next.

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
from .matvec import STAGE, vector_operation, warm
from .nodes import WORD, Shared, dtypes_of, unit_and_sample
from .products import product, product_together
from .sweeps import sweep_kernel
from .tables import Node, Plan, Run, Unit

# Threads of a block at most; bytes of a segment of a row, and of all segments that a block adds up
# at once. Small in the simulator, so that small rows have several segments.
THREADS, _SEGMENT, _POOL = (8, 32, 128) if SIMULATED else (256, 8192, 32768)


def longest_segment(dtype: np.dtype[Any]) -> int:
    """Return how many values of a row of a product a group of threads adds up at once, at most."""
    return _SEGMENT // dtype.itemsize


def segments_at_once(dtype: np.dtype[Any], longest: int) -> int:
    """Return how many segments of so many values a block has room for."""
    return _POOL // (dtype.itemsize * longest)


class LevelKernels(NamedTuple):
    """Compiled for one dtype of values and one of indices.

    All take ``(run, plan, units, batch, guarded)``, the first three addresses; block ``unit·batch
    + sample`` works on that unit for that sample, with `guarded` only if the flag is raised.

    Attributes
    ----------
    vectors : callable
        Units of matrix-vector products only.
    level : callable
        Any units.
    rescale : callable
        Products that many blocks of `level` have left out of range, if any.
    sweep_steps : callable
        Units that take a gradient through small steps, of which the plan has a table instead of
        operations.
    """

    vectors: Any
    level: Any
    rescale: Any
    sweep_steps: Any


@cache
def level_kernels(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> LevelKernels:
    """Return the kernels for values of `dtype` and index arrays of `index_dtype`."""
    kind, index_kind = from_dtype(dtype), from_dtype(index_dtype)
    t = dtypes_of(dtype, index_dtype)
    pool = _POOL // dtype.itemsize

    @cuda.jit
    def vectors(run, plan, units, batch, guarded):
        if guarded != 0 and load(run, Run.FLAG, WORD) == 0:
            return
        stage = cuda.shared.array(STAGE, kind)
        partial = cuda.shared.array(THREADS, kind)
        tops = cuda.shared.array(THREADS, int32)
        shared = Shared(stage, partial, tops, None, None, None, None)
        number, sample = unit_and_sample(batch)
        unit = units + number * Unit.WIDTH * 8
        ops = load(plan, Plan.OPS, WORD)
        start, stop = load(unit, Unit.START, WORD), load(unit, Unit.STOP, WORD)
        after = load(unit, Unit.NEXT, WORD)
        if after >= 0:
            # The next launch waits for this gradient, but its values do not.
            warm(t, run, plan, ops + after * Op.WIDTH * 8, sample, start, stop)
        for i in range(load(unit, Unit.FIRST, WORD), load(unit, Unit.LAST, WORD)):
            op = ops + i * Op.WIDTH * 8
            vector_operation(t, run, plan, op, int64(0), sample, start, stop, shared)
            cuda.syncthreads()

    @cuda.jit
    def level(run, plan, units, batch, guarded):
        # Shared memory is given to functions: Numba cannot link one that has its own twice.
        columns = cuda.shared.array(pool, kind)
        partial = cuda.shared.array(THREADS, kind)
        tops = cuda.shared.array(THREADS, int32)
        factor = cuda.shared.array(THREADS, kind)
        starts = cuda.shared.array(THREADS, index_kind)
        slot_starts = cuda.shared.array(THREADS, index_kind)
        counts = cuda.shared.array(THREADS, int32)
        shared = Shared(columns, partial, tops, factor, starts, slot_starts, counts)
        number, sample = unit_and_sample(batch)
        unit = units + number * Unit.WIDTH * 8
        ops = load(plan, Plan.OPS, WORD)
        block, blocks = load(unit, Unit.BLOCK, WORD), load(unit, Unit.BLOCKS, WORD)
        start, stop = load(unit, Unit.START, WORD), load(unit, Unit.STOP, WORD)
        part, mode = load(unit, Unit.PART, WORD), load(unit, Unit.MODE, WORD)
        for i in range(load(unit, Unit.FIRST, WORD), load(unit, Unit.LAST, WORD)):
            op = ops + i * Op.WIDTH * 8
            if load(op, Op.VECTOR, WORD) != 0:
                vector_operation(t, run, plan, op, part, sample, start, stop, shared)
            else:
                out = load(op, Op.OUT, WORD) * Node.WIDTH * 8
                node = load(plan, Plan.NODES, WORD) + out
                if sample == 0 or load(node, Node.BATCHED, WORD) != 0:
                    product(
                        t, run, plan, op, part, sample, block, blocks, start, stop, mode, shared
                    )
            cuda.syncthreads()

    @cuda.jit
    def rescale(run, plan, units, batch, guarded):
        stage = cuda.shared.array(STAGE, kind)
        partial = cuda.shared.array(THREADS, kind)
        tops = cuda.shared.array(THREADS, int32)
        shared = Shared(stage, partial, tops, None, None, None, None)
        number, sample = unit_and_sample(batch)
        unit = units + number * Unit.WIDTH * 8
        op = load(plan, Plan.OPS, WORD) + load(unit, Unit.FIRST, WORD) * Op.WIDTH * 8
        node = load(plan, Plan.NODES, WORD) + load(op, Op.OUT, WORD) * Node.WIDTH * 8
        if sample == 0 or load(node, Node.BATCHED, WORD) != 0:
            part, blocks = load(unit, Unit.PART, WORD), load(unit, Unit.BLOCKS, WORD)
            product_together(t, run, plan, op, part, sample, blocks, shared)

    return LevelKernels(vectors, level, rescale, sweep_kernel(dtype, index_dtype))
