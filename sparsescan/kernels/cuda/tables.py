"""Tables of int64 on a device, which tell the kernels what to do and where everything is.

The plan table and what it points to are uploaded when a plan first runs on some kind of input; the
run table before every run.
"""

from __future__ import annotations

import numpy as np

from ...arrays.cuda import cuda
from ..numbered import numbered
from .device import load

_WORD = np.int64(0)

# The end of a unit that does all rows of each operation.
EVERY = np.iinfo(np.int64).max

# Slots of the run table: all that differs between two runs, so a CUDA graph can be replayed.
# After `WIDTH` slots follow the rows ``(address, bytes from one sample to the next)`` of each
# Jacobian, unless they lie `STEP` bytes apart from `BASE` on; then the address of each local
# gradient, or 0, unless those lie `LOCAL_STEP` bytes apart from `LOCAL_BASE` on.
Run = numbered(
    "Run",
    # It is set once a value is not finite: the linear scan then decides.
    "FLAG",
    # Address of the gradients, which lie one after the other, each (batch, size).
    "OUT",
    # Stacked Jacobians: address of the first (0 if they are not), bytes to the next step and to the
    # next sample.
    "BASE STEP SAMPLE",
    # Stacked local gradients (0 if not): that which is added to gradient 0, and bytes to the next.
    "LOCAL_BASE LOCAL_STEP",
    # First slot of the table of local gradients; 0 if there is none.
    "LOCALS",
    # Address of the weights of implicit steps, of which the Jacobians above are the slopes.
    "WEIGHTS WIDTH",
)

# Slots of the plan table: the batch, whether there are local gradients, addresses of tables.
# OFFSETS, (n + 2,): where each gradient starts, for one sample.
Plan = numbered("Plan", "BATCH LOCAL OPS NODES OFFSETS WIDTH")

# Columns of the node table: one row for each Jacobian, then one for each product.
Node = numbered(
    "Node",
    "KIND ROWS COLS NNZ",
    # addresses; not followed for dense and diagonal nodes
    "INDPTR INDICES",
    # address of the first row of each tile, and of the one after the last; number of tiles
    "TILES TILE_COUNT STORE BATCHED",
    # the number of a Jacobian; of a product the address of the first sample's values, and bytes to
    # the next
    "VALUES VALUES_STEP",
    # int32: exponents of the columns, their flag (0 if there are none), room for 2·cols + inner
    "EXPONENTS EXPONENTS_STEP",
    # what local gradients inside a product add up to
    "LOCAL LOCAL_STEP",
    # int32, a row of `State` for each sample
    "STATE",
    # address of the terms of a sparse product
    "TERMS WIDTH",
)

# Slots of the table of a sparse product's terms, :class:`~sparsescan.symbolic.terms.Terms`.
Terms = numbered(
    "Terms",
    # Segments; 2^SHIFT threads make one; at most GROUPS of them at once, in LONGEST values each.
    "SEGMENTS SHIFT GROUPS LONGEST",
    # Values of which threads read an aligned group first, less one: 0 where rows are short.
    "ALIGNED",
    # Addresses of the arrays.
    "A_STARTS FIRSTS LASTS X_FIRSTS STARTS ENTRIES SLOT_STARTS X_STARTS COUNTS SLOTS WIDTH",
)

# Columns of the state of a product, which is zero between runs.
State = numbered(
    "State",
    # The worst range of the operands, and of the result; and how many parts are done.
    "OPERANDS RESULT DONE",
    # Shares of the work that brings it into range: how many are taken, and how many are done.
    "TAKEN SHARES",
    # Largest exponents, and largest of those negated, of columns; then of entries. They are raised,
    # so that there are none where these are zero. Then whether a column has entries below the band.
    "TOP BOTTOM HIGHEST LOWEST WIDE WIDTH",
)

# Columns of the table of a sweep: a row for each matrix-vector product by a Jacobian.
Sweep = numbered(
    "Sweep",
    # as in the node table
    "KIND ROWS COLS NNZ INDPTR INDICES",
    # which Jacobian it is; whether the row before has another pattern
    "JACOBIAN OTHER",
    # 2^SHIFT threads add up a row
    "SHIFT",
    # where the gradients before and after it start, for one sample
    "BEFORE AFTER WIDTH",
)

# Columns of the unit table: operations, and which `BLOCK` of `BLOCKS` parts of them.
# From `START` on, and before `STOP`, are the tiles of a matrix that is applied to a vector, the
# segments of a sparse product, or the rows of another one. `PART` numbers the units of a level that
# use scratch. Blocks of `NEXT`, another operation, are to have as many tiles of a matrix of the
# same pattern, or there is none: -1.
Unit = numbered("Unit", "FIRST LAST BLOCK BLOCKS START STOP PART MODE NEXT WIDTH")

# Phases of a product that a unit does: all, or those before or after cuBLAS multiplies.
Mode = numbered("Mode", "ALL CHECK SETTLE")


@cuda.jit(device=True)
def jacobian_at(run, step, sample):
    """Return the address of the values of a Jacobian for a sample."""
    base = load(run, Run.BASE, _WORD)
    if base != 0:
        return base + step * load(run, Run.STEP, _WORD) + sample * load(run, Run.SAMPLE, _WORD)
    row = Run.WIDTH + 2 * step
    return load(run, row, _WORD) + sample * load(run, row + 1, _WORD)


@cuda.jit(device=True)
def local_at(run, k):
    """Return the address of the local gradient `k`, shape ``(batch, size)``; 0 if there is none."""
    base = load(run, Run.LOCAL_BASE, _WORD)
    if base != 0:
        return base + k * load(run, Run.LOCAL_STEP, _WORD)
    first = load(run, Run.LOCALS, _WORD)
    if first == 0:
        return first
    return load(run, first + k, _WORD)
