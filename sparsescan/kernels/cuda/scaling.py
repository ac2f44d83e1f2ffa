"""Keep products in range by a power of two for each column."""

from __future__ import annotations

import math

from numba import int32, int64

from ...arrays.cuda import cuda
from ..cpu.tables import Store
from .device import atomic_max, exponent_of, load, scale, store
from .nodes import INT, WORD, column, raise_flag, scaled_by
from .tables import Node
from .vectors import block_size, thread_index

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
def normalise(t, run, matrix, c, e, span):
    """Bring every column with an entry outside the band to the target, and note it in `e`.

    All columns by one power of two, if that will do: what a product is multiplied by then needs
    no more care. `span`, two integers of shared memory, are less than any exponent.
    """
    me, threads, cols = thread_index(), block_size(), matrix.cols
    top, bottom, p = int64(NONE), int64(NONE), me
    while p < matrix.nnz:
        value = load(c, p, t.zero)
        if value != 0:
            own = exponent_of(value)
            top, bottom = max(top, own), max(bottom, -own)
        p += threads
    if top != NONE:
        cuda.atomic.max(span, 0, int32(top))
        cuda.atomic.max(span, 1, int32(bottom))
    flag = load(e, cols, INT)
    cuda.syncthreads()
    top, bottom = int64(span[0]), -int64(span[1])
    if top == NONE:
        return
    together = flag != EACH and bottom - (top - t.target) >= t.low_exponent
    # After the exponents and their flag: the largest exponent of each column, then by how much it
    # is shifted; and whether it has an entry below the band.
    highs, below = e + 4 * (cols + 1), e + 4 * (2 * cols + 1)
    if not together:
        j = me
        while j < cols:
            store(highs, j, int32(NONE), INT)
            store(below, j, INT, INT)
            j += threads
        cuda.syncthreads()
        p = me
        while p < matrix.nnz:
            value = load(c, p, t.zero)
            if value != 0:
                j, own = column(t, matrix, p), exponent_of(value)
                atomic_max(highs, j, int32(own))
                if own < t.low_exponent:
                    atomic_max(below, j, int32(1))
            p += threads
        cuda.syncthreads()
    j = me
    while j < cols:
        shift = top - t.target
        if not together:
            largest, shift = int64(load(highs, j, INT)), int64(0)
            if largest > t.high_exponent or load(below, j, INT) != 0:
                shift = largest - t.target
            store(highs, j, int32(shift), INT)
        store(e, j, int32(load(e, j, INT) + shift), INT)
        j += threads
    cuda.syncthreads()
    p, wide = me, False
    while p < matrix.nnz:
        j, value = column(t, matrix, p), load(c, p, t.zero)
        shift = top - t.target if together else int64(load(highs, j, INT))
        if shift != 0 and value != 0:
            by, own = int64(load(e, j, INT)), exponent_of(value)
            wide |= own - shift < t.low_exponent
            check_bits(t, run, own + by - shift, by)
            store(c, p, scale(value, -shift), t.zero)
        p += threads
    if wide:
        cuda.atomic.max(span, 0, int32(_WIDTH))
    cuda.syncthreads()
    if me == 0:
        flag = ALL if together else EACH
        store(e, cols, int32(_WIDE if span[0] == _WIDTH else flag), INT)


@cuda.jit(device=True)
def range_in(t, values, first, last, step):
    """Return how the range of every `step`-th of ``values[first:last]`` is."""
    worst = IN_BAND
    while first < last:
        worst = max(worst, range_of(t, load(values, first, t.zero)))
        first += step
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
    threads = block_size()
    own = block * threads + thread_index()
    return range_in(t, values, own, load(node, Node.NNZ, WORD), blocks * threads)
