"""Values of the Jacobians of recurrent cells: see recurrent/jacobian.py.

A transposed Jacobian of a step has a block for each state before it and each one after it, which is
``Σ_k weights[k] ∘ slopes[k]``, a slope for each column, plus a diagonal. One pass writes it, since
memory limits the speed.
"""

from __future__ import annotations

import numpy as np

from ...kernels.compile import njit

# Unsigned indices: Numba would test signed ones for wrapping around.
_UINT = np.uint64
# Samples whose values are written block by block, while they are in the cache.
_SAMPLES = 8


@njit
def _terms(terms, first, last):  # type: ignore[no-untyped-def]
    """Return numbers of weights and slopes of up to four terms."""
    a, b, c, d = first, min(first + 1, last), min(first + 2, last), min(first + 3, last)
    return (
        (_UINT(terms[a, 0]), _UINT(terms[b, 0]), _UINT(terms[c, 0]), _UINT(terms[d, 0])),
        (_UINT(terms[a, 1]), _UINT(terms[b, 1]), _UINT(terms[c, 1]), _UINT(terms[d, 1])),
    )


@njit(nogil=True, cache=True)
def fill_blocks(weights, slopes, blocks, terms, diagonals, out):  # type: ignore[no-untyped-def]
    """Write the values of blocks that are dense, or have a diagonal.

    Row ``b`` of `blocks` says where a dense block begins in a sample's values, how far its rows are
    apart, and which of the `terms`, pairs of numbers of weights and of slopes, it is the sum of.
    One of `diagonals` says where it begins, how far its entries are apart, the number of its
    slopes, and whether they are added to entries of a dense block.
    """
    rows, cols = _UINT(weights.shape[1]), _UINT(weights.shape[2])
    samples, size = slopes.shape[1], _UINT(slopes.shape[2])
    for begin in range(0, samples, _SAMPLES):
        some = range(begin, min(begin + _SAMPLES, samples))
        for b in range(len(blocks)):
            start, step = _UINT(blocks[b, 0]), _UINT(blocks[b, 1])
            first, count = blocks[b, 2], blocks[b, 3] - blocks[b, 2]
            if count == 0:
                for n in some:
                    for i in range(rows):
                        for j in range(cols):
                            out[n, start + i * step + j] = 0
                continue
            w, d = _terms(terms, first, blocks[b, 3] - 1)
            if count == 1:
                for n in some:
                    for i in range(rows):
                        for j in range(cols):
                            out[n, start + i * step + j] = weights[w[0], i, j] * slopes[d[0], n, j]
            elif count == 2:
                for n in some:
                    for i in range(rows):
                        for j in range(cols):
                            out[n, start + i * step + j] = (
                                weights[w[0], i, j] * slopes[d[0], n, j]
                                + weights[w[1], i, j] * slopes[d[1], n, j]
                            )
            elif count == 3:
                for n in some:
                    for i in range(rows):
                        for j in range(cols):
                            out[n, start + i * step + j] = (
                                weights[w[0], i, j] * slopes[d[0], n, j]
                                + weights[w[1], i, j] * slopes[d[1], n, j]
                                + weights[w[2], i, j] * slopes[d[2], n, j]
                            )
            else:
                for n in some:
                    for i in range(rows):
                        for j in range(cols):
                            out[n, start + i * step + j] = (
                                weights[w[0], i, j] * slopes[d[0], n, j]
                                + weights[w[1], i, j] * slopes[d[1], n, j]
                                + weights[w[2], i, j] * slopes[d[2], n, j]
                                + weights[w[3], i, j] * slopes[d[3], n, j]
                            )
            for k in range(first + 4, blocks[b, 3]):
                w4, d4 = _UINT(terms[k, 0]), _UINT(terms[k, 1])
                for n in some:
                    for i in range(rows):
                        for j in range(cols):
                            out[n, start + i * step + j] += weights[w4, i, j] * slopes[d4, n, j]
        for b in range(len(diagonals)):
            start, step = _UINT(diagonals[b, 0]), _UINT(diagonals[b, 1])
            which, is_added = _UINT(diagonals[b, 2]), diagonals[b, 3] != 0
            for n in some:
                if is_added:
                    for i in range(size):
                        out[n, start + i * step] += slopes[which, n, i]
                else:
                    for i in range(size):
                        out[n, start + i * step] = slopes[which, n, i]


@njit(nogil=True, cache=True)
def fill_entries(weights, sources, ranges, slopes, size, added, out):  # type: ignore[no-untyped-def]
    """Write the values of any pattern, entry by entry.

    Entry ``p`` of a range ``(first, last, count)`` is the sum of the products ``weights[k, p]`` and
    ``slopes[sources[k, p] + n·size]`` for ``k < count``. A row ``(p, source)`` of `added` is a
    slope that is added to an entry.
    """
    for n in range(len(out)):
        base = _UINT(n * size)
        for r in range(len(ranges)):
            first, last, count = _UINT(ranges[r, 0]), _UINT(ranges[r, 1]), ranges[r, 2]
            if count == 0:
                for p in range(first, last):
                    out[n, p] = 0
                continue
            for p in range(first, last):
                out[n, p] = weights[0, p] * slopes[sources[0, p] + base]
            for k in range(1, count):
                for p in range(first, last):
                    out[n, p] += weights[k, p] * slopes[sources[k, p] + base]
        for r in range(len(added)):
            out[n, added[r, 0]] += slopes[added[r, 1] + base]


@njit(nogil=True, cache=True)
def multiply_rows(  # type: ignore[no-untyped-def]
    a, a_indptr, a_indices, b, b_indptr, b_indices, indptr, indices, room, out
):
    """Write the values of ``A B`` for each sample, whose patterns are known.

    `a` and `b` have a row of values for each sample, or one for all. `room` has a place for each
    column.
    """
    one_a, one_b = len(a) == 1, len(b) == 1
    for n in range(len(out)):
        of_a, of_b = a[0 if one_a else n], b[0 if one_b else n]
        for i in range(len(indptr) - 1):
            for p in range(indptr[i], indptr[i + 1]):
                room[indices[p]] = 0
            for p in range(a_indptr[i], a_indptr[i + 1]):
                k, factor = a_indices[p], of_a[p]
                for q in range(b_indptr[k], b_indptr[k + 1]):
                    room[b_indices[q]] += factor * of_b[q]
            for p in range(indptr[i], indptr[i + 1]):
                out[n, p] = room[indices[p]]


@njit(nogil=True, cache=True)
def put_column(array, out, start, step):  # type: ignore[no-untyped-def]
    """Write ``out[n, start + j·step] = array[n, j]``."""
    first, stride = _UINT(start), _UINT(step)
    for n in range(array.shape[0]):
        for j in range(_UINT(array.shape[1])):
            out[n, first + j * stride] = array[n, j]
