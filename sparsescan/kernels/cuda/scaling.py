"""Keep products in range by a power of two for each column."""

from __future__ import annotations

import math

from numba import int32, int64

from ...arrays.cuda import cuda
from ..cpu.tables import Store
from .device import atomic_max, exponent_of, load, scale, store
from .nodes import INT, WORD, column, raise_flag, scaled_by
from .tables import Node

__all__ = [
    "ALL",
    "EACH",
    "IN_BAND",
    "NONE",
    "NOT_FINITE",
    "OUT_OF_BAND",
    "UNSCALED",
    "check_bits",
    "normalise",
    "operand_in",
    "range_in",
    "range_of",
]

# How the range of some values is; the worst counts.
IN_BAND, OUT_OF_BAND, NOT_FINITE = 0, 1, 2

# The flag behind the exponents of a product: none; each column its own; all columns one; each its
# own, and a column has entries below the band.
UNSCALED, EACH, ALL, _WIDE = 0, 1, 2, 3

# Less than any exponent, and more.
NONE, _WIDTH = -(1 << 30), 1 << 30


@cuda.jit(device=True)
def range_of(t, value):
    """Return whether a value lies in the band, or is not finite."""
    size = abs(value)
    if value == 0 or t.low <= size <= t.high:
        return IN_BAND
    return OUT_OF_BAND if math.isfinite(value) else NOT_FINITE


@cuda.jit(device=True)
def check_bits(t, run, exponent, by):
    """Raise the flag if an entry that a gradient may show is no normal number times 2^-by."""
    if exponent - by < t.normal and exponent > t.negligible:
        raise_flag(run)


@cuda.jit(device=True)
def normalise(t, run, node, c, e, span):
    """Bring every column with an entry outside the band to the target, and note it in `e`.

    All columns by one power of two, if that will do: what a product is multiplied by then needs
    no more care. `span`, two integers of shared memory, are less than any exponent.
    """
    me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
    nnz, cols = load(node, Node.NNZ, WORD), load(node, Node.COLS, WORD)
    # After the exponents and their flag: the largest exponent of each column, and minus the
    # smallest.
    highs, lows = e + 4 * (cols + 1), e + 4 * (2 * cols + 1)
    for j in range(me, cols, threads):
        store(highs, j, int32(NONE), INT)
        store(lows, j, int32(NONE), INT)
    cuda.syncthreads()
    for p in range(me, nnz, threads):
        value = load(c, p, t.zero)
        if value != 0:
            j, own = column(t, node, p), exponent_of(value)
            atomic_max(highs, j, int32(own))
            atomic_max(lows, j, int32(-own))
    cuda.syncthreads()
    for j in range(me, cols, threads):
        cuda.atomic.max(span, 0, load(highs, j, INT))
        cuda.atomic.max(span, 1, load(lows, j, INT))
    flag = load(e, cols, INT)
    cuda.syncthreads()
    top, bottom = int64(span[0]), -int64(span[1])
    # A thread may note there that a column is wide: all read before.
    cuda.syncthreads()
    if top == NONE:
        return
    together = flag != EACH and bottom - (top - t.target) >= t.low_exponent
    for j in range(me, cols, threads):
        largest, smallest = int64(load(highs, j, INT)), -int64(load(lows, j, INT))
        shift = int64(0)
        if together:
            shift = top - t.target
        elif largest != NONE and (largest > t.high_exponent or smallest < t.low_exponent):
            shift = largest - t.target
            if smallest - shift < t.low_exponent:
                cuda.atomic.max(span, 0, int32(_WIDTH))
        store(e, j, int32(load(e, j, INT) + shift), INT)
        store(highs, j, int32(shift), INT)
    cuda.syncthreads()
    if me == 0:
        flag = ALL if together else EACH
        store(e, cols, int32(_WIDE if span[0] == _WIDTH else flag), INT)
    for p in range(me, nnz, threads):
        j = column(t, node, p)
        shift, value = int64(load(highs, j, INT)), load(c, p, t.zero)
        if shift != 0 and value != 0:
            by = int64(load(e, j, INT))
            check_bits(t, run, exponent_of(value) + by - shift, by)
            store(c, p, scale(value, -shift), t.zero)


@cuda.jit(device=True)
def range_in(t, values, first, last):
    """Return how the range of what this thread reads of ``values[first:last]`` is."""
    worst = IN_BAND
    for p in range(first + cuda.threadIdx.x, last, cuda.blockDim.x):
        worst = max(worst, range_of(t, load(values, p, t.zero)))
    return worst


@cuda.jit(device=True)
def operand_in(t, plan, node, values, part, sample, block, blocks, later):
    """Return how the range of an operand is, as far as this thread sees.

    Entries of products are in the band, unless their flag says otherwise. Exponents count where
    columns meet rows: those of the `later` operand, unless they are all one.
    """
    if load(node, Node.STORE, WORD) != Store.CALLER:
        e = scaled_by(plan, node, part, sample)
        if e == 0:
            return IN_BAND
        flag = load(e, load(node, Node.COLS, WORD), INT)
        return OUT_OF_BAND if flag == _WIDE or (later and flag == EACH) else IN_BAND
    nnz = load(node, Node.NNZ, WORD)
    return range_in(t, values, nnz * block // blocks, nnz * (block + 1) // blocks)
