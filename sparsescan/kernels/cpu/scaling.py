"""Range: the sizes of entries, and scaling of columns by powers of two."""

from __future__ import annotations

import math

import numpy as np

from ..compile import njit
from .nodes import column_of, indices_of, indptr_of, row_bounds
from .tables import EMPTY, IN_BAND, OUT_OF_BAND, UNDECIDED, Node, Run


@njit
def exponent_of(value):
    """Return ``floor(log2 |value|) + 1`` of a finite value other than 0."""
    return np.int64(math.frexp(value)[1])


@njit
def ldexp(value, exponent):
    """Return ``value·2^exponent`` for any exponent."""
    return math.ldexp(value, np.int32(min(max(exponent, -10000), 10000)))


@njit(fastmath={"reassoc"})
def all_finite(x, first, last):
    """Return whether no entry of ``x[first:last]`` is infinite or NaN."""
    poison = x.dtype.type(0)
    for i in range(np.uint64(first), np.uint64(last)):
        poison += x[i] * x.dtype.type(0)
    return poison == 0


@njit
def extremes(bits, start, stop, highest, lowest):
    """Return the bit patterns of the largest magnitude and of the smallest other than 0."""
    mask = 0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF
    for p in range(np.uint64(start), np.uint64(stop)):
        magnitude = np.int64(bits[p]) & mask
        highest = max(highest, magnitude)
        lowest = min(lowest, magnitude if magnitude > 0 else 0x7FFFFFFFFFFFFFFF)
    return highest, lowest


@njit
def range_of(t, highest, lowest):
    """Return the state of the range of entries with these extremes."""
    if highest >= t.run[Run.INFINITY]:
        return UNDECIDED
    if highest > t.run[Run.HIGH] or lowest < t.run[Run.LOW]:
        return OUT_OF_BAND
    return IN_BAND


@njit
def normalise(t, node, values, e):
    """Scale every column with an entry outside the band to the target; record it in `e`.

    Return the exponent of the smallest entry afterwards, and whether an entry lost bits.
    """
    indices = indices_of(t, node)
    cols = node[Node.COLS]
    largest = np.zeros(cols, values.dtype)
    smallest = np.full(cols, np.inf, values.dtype)
    for p in range(node[Node.NNZ]):
        if values[p] != 0:
            j = column_of(node, indices, p)
            largest[j] = max(largest[j], abs(values[p]))
            smallest[j] = min(smallest[j], abs(values[p]))
    shift = np.zeros(cols, np.int64)
    least = t.run[Run.TARGET]
    e[cols] = 0
    for j in range(cols):
        if largest[j] == 0:
            e[j] = 0
            continue
        if (
            exponent_of(largest[j]) > t.run[Run.HIGH_EXPONENT]
            or exponent_of(smallest[j]) < t.run[Run.LOW_EXPONENT]
        ):
            shift[j] = exponent_of(largest[j]) - t.run[Run.TARGET]
        least = min(least, exponent_of(smallest[j]) - shift[j])
        # An entry may still be outside the band, even if the exponents cancel.
        if e[j] != 0 or shift[j] != 0:
            e[cols] = 1
    lost = False
    if e[cols]:
        for p in range(node[Node.NNZ]):
            j = column_of(node, indices, p)
            if shift[j] != 0 and values[p] != 0:
                lost = lost or loses_bits(t, exponent_of(values[p]) + e[j], e[j] + shift[j])
                values[p] = ldexp(values[p], -shift[j])
        for j in range(cols):
            e[j] += shift[j]
    return least, lost


@njit
def loses_bits(t, exponent, by):
    """Return whether scaling by ``2^-by`` loses bits of an entry that may matter to a gradient.

    The result is then subnormal. The entry is less than ``2^exponent``.
    """
    return exponent - by < t.run[Run.NORMAL] and exponent > t.run[Run.NEGLIGIBLE]


@njit
def mark_empty_columns(t, node, values, e):
    """Mark columns that are zero: the rows that they multiply have no effect."""
    indices, cols = indices_of(t, node), node[Node.COLS]
    empty = np.ones(cols, np.bool_)
    for p in range(node[Node.NNZ]):
        if values[p] != 0:
            empty[column_of(node, indices, p)] = False
    for j in range(cols):
        if empty[j]:
            e[j] = EMPTY


@njit
def prescale(t, node, values, e, by):
    """Return ``diag(2^by) M diag(2^e)`` as mantissas, the columns at the target, and exponents.

    Also return the exponent of the smallest mantissa, as it would be without rounding.
    """
    indptr, indices = indptr_of(t, node), indices_of(t, node)
    cols = node[Node.COLS]
    none = -(1 << 60)
    top = np.full(cols, none, np.int64)
    for k in range(node[Node.ROWS]):
        if by[k] == EMPTY:
            continue
        start, stop = row_bounds(node, indptr, k)
        for q in range(start, stop):
            if values[q] != 0:
                j = column_of(node, indices, q)
                top[j] = max(top[j], exponent_of(values[q]) + by[k] - t.run[Run.TARGET])
    scaled = np.zeros_like(values)
    least = t.run[Run.TARGET]
    for k in range(node[Node.ROWS]):
        if by[k] == EMPTY:
            continue
        start, stop = row_bounds(node, indptr, k)
        for q in range(start, stop):
            if values[q] != 0:
                j = column_of(node, indices, q)
                least = min(least, exponent_of(values[q]) + by[k] - top[j])
                scaled[q] = ldexp(values[q], by[k] - top[j])
    scaled_e = e.copy()
    for j in range(cols):
        scaled_e[j] = e[j] + top[j] if top[j] != none else 0
    return scaled, scaled_e, least
