"""Sparse matrix-matrix products whose pattern is known."""

from __future__ import annotations

import numpy as np

from ..addresses import data_address
from ..compile import njit
from .memory import array_at
from .nodes import column_of, indices_of, indptr_of, is_stopped, row_bounds
from .scaling import extremes, range_of
from .tables import IN_BAND, ZERO, Kind, Node, Run


@njit(fastmath={"contract"})
def _add_dense_row(row, alpha, b, start, cols):
    for j in range(np.uint64(cols)):
        row[j] += alpha * b[start + j]


@njit(fastmath={"contract"})
def _add_csr_row(row, alpha, b, indices, start, stop):
    for q in range(start, stop):
        row[np.uint64(indices[q])] += alpha * b[q]


@njit
def _add_product_row(t, row, i, a_node, a, b_node, b):
    """Add row `i` of ``A B`` to `row`, neither of them diagonal."""
    a_indices, b_indptr, b_indices = (
        indices_of(t, a_node),
        indptr_of(t, b_node),
        indices_of(t, b_node),
    )
    start, stop = row_bounds(a_node, indptr_of(t, a_node), i)
    cols = np.uint64(b_node[Node.COLS])
    a_dense, b_dense = a_node[Node.KIND] == Kind.DENSE, b_node[Node.KIND] == Kind.DENSE
    for p in range(start, stop):
        k = p - start if a_dense else np.uint64(a_indices[p])
        if b_dense:
            _add_dense_row(row, a[p], b, k * cols, cols)
        else:
            last = np.uint64(b_indptr[k + np.uint64(1)])
            _add_csr_row(row, a[p], b, b_indices, np.uint64(b_indptr[k]), last)


@njit
def multiply(t, a_node, a, b_node, b, c_node, c, c_bits, first, last, thread):
    """Make rows `first` to `last` of ``C = A B``, plainly; return how their range is.

    The pattern of `C` has every entry of the product, so a row needs no hash and no sort. An
    accumulator with a place for every column adds the row up, and `C`'s columns are read from it.
    """
    size = t.run[Run.ACCUMULATOR]
    place = t.run[Run.ACCUMULATORS] + thread * size * t.values.itemsize
    accumulator = array_at(place, size, t.values)
    a_indices, c_indptr, c_indices = (
        indices_of(t, a_node),
        indptr_of(t, c_node),
        indices_of(t, c_node),
    )
    cols = c_node[Node.COLS]
    if first >= last:
        return IN_BAND
    highest, lowest = ZERO, t.run[Run.INFINITY]
    unchecked, stop = row_bounds(c_node, c_indptr, first)
    stop = unchecked
    for i in range(first, last):
        start, stop = row_bounds(c_node, c_indptr, i)
        if a_node[Node.KIND] == Kind.DIAGONAL:
            alpha = a[i]
            for q in range(start, stop):
                c[q] = alpha * b[q]
        elif b_node[Node.KIND] == Kind.DIAGONAL:
            for p in range(start, stop):
                c[p] = a[p] * b[column_of(a_node, a_indices, p)]
        elif c_node[Node.KIND] == Kind.DENSE:
            row = array_at(data_address(c) + np.int64(start) * c.itemsize, cols, t.values)
            for j in range(np.uint64(cols)):
                row[j] = 0
            _add_product_row(t, row, i, a_node, a, b_node, b)
        else:
            _add_product_row(t, accumulator, i, a_node, a, b_node, b)
            for q in range(start, stop):
                j = column_of(c_node, c_indices, q)
                c[q] = accumulator[j]
                accumulator[j] = 0
        # Checked while in the cache, but in pieces that are large enough to vectorise.
        if stop - unchecked > np.uint64(1024):
            highest, lowest = extremes(c_bits, unchecked, stop, highest, lowest)
            unchecked = stop
            if is_stopped(t):
                return IN_BAND
    highest, lowest = extremes(c_bits, unchecked, stop, highest, lowest)
    return range_of(t, highest, lowest)
