"""Tables of int64 on a device, which tell the kernels what to do and where everything is.

The plan table and what it points to are uploaded when a plan first runs on some kind of input; the
run table before every run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays.cuda import cuda
from .device import load

_WORD = np.int64(0)

# The end of a unit that does all rows of each operation.
EVERY = np.iinfo(np.int64).max


class _Run(NamedTuple):
    """Slots of the run table: all that differs between two runs, so a CUDA graph can be replayed.

    After `WIDTH` slots follow the rows ``(address, bytes from one sample to the next)`` of each
    Jacobian, unless they lie `STEP` bytes apart from `BASE` on; then the address of each local
    gradient, or 0, unless those lie `LOCAL_STEP` bytes apart from `LOCAL_BASE` on.
    """

    # It is set once a value is not finite: the linear scan then decides.
    FLAG: int = 0
    # Address of the gradients, which lie one after the other, each (batch, size).
    OUT: int = 1
    # Stacked Jacobians: address of the first (0 if they are not), bytes to the next step and to the
    # next sample.
    BASE: int = 2
    STEP: int = 3
    SAMPLE: int = 4
    # Stacked local gradients (0 if not): that which is added to gradient 0, and bytes to the next.
    LOCAL_BASE: int = 5
    LOCAL_STEP: int = 6
    # First slot of the table of local gradients; 0 if there is none.
    LOCALS: int = 7
    # Address of the weights of implicit steps, of which the Jacobians above are the slopes.
    WEIGHTS: int = 8
    WIDTH: int = 9


Run = _Run()


class _Plan(NamedTuple):
    """Slots of the plan table: the batch, whether there are local gradients, addresses of tables.

    OFFSETS, (n + 2,): where each gradient starts, for one sample.
    """

    BATCH: int = 0
    LOCAL: int = 1
    OPS: int = 2
    NODES: int = 3
    OFFSETS: int = 4
    WIDTH: int = 5


Plan = _Plan()


class _Node(NamedTuple):
    """Columns of the node table: one row for each Jacobian, then one for each product."""

    KIND: int = 0
    ROWS: int = 1
    COLS: int = 2
    NNZ: int = 3
    # addresses; not followed for dense and diagonal nodes
    INDPTR: int = 4
    INDICES: int = 5
    # address of the first row of each tile, and of the one after the last; number of tiles
    TILES: int = 6
    TILE_COUNT: int = 7
    STORE: int = 8
    BATCHED: int = 9
    # the number of a Jacobian; of a product the address of the first sample's values, and bytes to
    # the next
    VALUES: int = 10
    VALUES_STEP: int = 11
    # int32: exponents of the columns, their flag (0 if there are none), room for 2·cols + inner
    EXPONENTS: int = 12
    EXPONENTS_STEP: int = 13
    # what local gradients inside a product add up to
    LOCAL: int = 14
    LOCAL_STEP: int = 15
    # int32, a row of `State` for each sample
    STATE: int = 16
    # address of the terms of a sparse product
    TERMS: int = 17
    WIDTH: int = 18


Node = _Node()


class _Terms(NamedTuple):
    """Slots of the table of a sparse product's terms, :class:`~sparsescan.symbolic.terms.Terms`."""

    # Segments; 2^SHIFT threads make one; at most GROUPS of them at once, in LONGEST values each.
    SEGMENTS: int = 0
    SHIFT: int = 1
    GROUPS: int = 2
    LONGEST: int = 3
    # Values of which threads read an aligned group first, less one: 0 where rows are short.
    ALIGNED: int = 4
    # Addresses of the arrays.
    A_STARTS: int = 5
    FIRSTS: int = 6
    LASTS: int = 7
    X_FIRSTS: int = 8
    STARTS: int = 9
    ENTRIES: int = 10
    SLOT_STARTS: int = 11
    X_STARTS: int = 12
    COUNTS: int = 13
    SLOTS: int = 14
    WIDTH: int = 15


Terms = _Terms()


class _State(NamedTuple):
    """Columns of the state of a product, which is zero between runs."""

    # The worst range of the operands, and of the result; and how many parts are done.
    OPERANDS: int = 0
    RESULT: int = 1
    DONE: int = 2
    # Shares of the work that brings it into range: how many are taken, and how many are done.
    TAKEN: int = 3
    SHARES: int = 4
    # Largest exponents, and largest of those negated, of columns; then of entries. They are raised,
    # so that there are none where these are zero. Then whether a column has entries below the band.
    TOP: int = 5
    BOTTOM: int = 6
    HIGHEST: int = 7
    LOWEST: int = 8
    WIDE: int = 9
    WIDTH: int = 10


State = _State()


class _Sweep(NamedTuple):
    """Columns of the table of a sweep: a row for each matrix-vector product by a Jacobian."""

    # as in the node table
    KIND: int = 0
    ROWS: int = 1
    COLS: int = 2
    NNZ: int = 3
    INDPTR: int = 4
    INDICES: int = 5
    # which Jacobian it is; whether the row before has another pattern
    JACOBIAN: int = 6
    OTHER: int = 7
    # 2^SHIFT threads add up a row
    SHIFT: int = 8
    # where the gradients before and after it start, for one sample
    BEFORE: int = 9
    AFTER: int = 10
    WIDTH: int = 11


Sweep = _Sweep()


class _Unit(NamedTuple):
    """Columns of the unit table: operations, and which `BLOCK` of `BLOCKS` parts of them.

    From `START` on, and before `STOP`, are the tiles of a matrix that is applied to a vector, the
    segments of a sparse product, or the rows of another one. `PART` numbers the units of a level
    that use scratch. Blocks of `NEXT`, another operation, are to have as many tiles of a matrix of
    the same pattern, or there is none: -1.
    """

    FIRST: int = 0
    LAST: int = 1
    BLOCK: int = 2
    BLOCKS: int = 3
    START: int = 4
    STOP: int = 5
    PART: int = 6
    MODE: int = 7
    NEXT: int = 8
    WIDTH: int = 9


Unit = _Unit()


class _Mode(NamedTuple):
    """Phases of a product that a unit does: all, or those before or after cuBLAS multiplies."""

    ALL: int = 0
    CHECK: int = 1
    SETTLE: int = 2


Mode = _Mode()


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
