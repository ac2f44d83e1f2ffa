"""Keep products in range by a power of two for each column."""

from __future__ import annotations

import math

from ...arrays.cuda import cuda
from ..cpu.tables import Store
from .device import load
from .nodes import INT, WORD, raise_flag, scaled_by
from .tables import Node
from .vectors import block_size, thread_index

# How the range of some values is; the worst counts.
IN_BAND, OUT_OF_BAND, NOT_FINITE = 0, 1, 2

# The flag behind the exponents of a product: none; each column its own; all columns one; each its
# own, and a column has entries below the band.
UNSCALED, EACH, ALL, WIDE = 0, 1, 2, 3

# Less than any exponent.
NONE = -(1 << 30)


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
        return OUT_OF_BAND if flag == WIDE or (later and flag == EACH) else IN_BAND
    threads = block_size()
    own = block * threads + thread_index()
    return range_in(t, values, own, load(node, Node.NNZ, WORD), blocks * threads)
