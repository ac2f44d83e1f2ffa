"""The symbolic phase: checks of index arrays, and patterns of products."""

from __future__ import annotations

import numpy as np

from .compile import njit

__all__ = [
    "END",
    "FALL",
    "RANGE",
    "START",
    "count_entries",
    "count_terms",
    "find_fault",
    "is_diagonal",
    "product_indices",
    "product_indptr",
    "unsorted_row",
]

# Faults of index arrays.
START, FALL, END, RANGE = 1, 2, 3, 4


@njit(nogil=True, cache=True)
def find_fault(indptr, indices, cols):
    """Return the kind and the place of the first fault of index arrays; 0 if they are safe."""
    if indptr[0] != 0:
        return START, 0
    for row in range(len(indptr) - 1):
        if indptr[row + 1] < indptr[row]:
            return FALL, row
    if indptr[-1] != len(indices):
        return END, 0
    for p in range(len(indices)):
        if indices[p] < 0 or indices[p] >= cols:
            return RANGE, p
    return 0, 0


@njit(nogil=True, cache=True)
def unsorted_row(indptr, indices):
    """Return the first row whose columns do not increase strictly, or -1."""
    for row in range(len(indptr) - 1):
        for p in range(indptr[row] + 1, indptr[row + 1]):
            if indices[p] <= indices[p - 1]:
                return row
    return -1


@njit(nogil=True, cache=True)
def is_diagonal(indptr, indices):
    """Return whether a square matrix with as many entries as rows is diagonal."""
    for row in range(len(indices)):
        if indptr[row] != row or indices[row] != row:
            return False
    return True


@njit(nogil=True, cache=True)
def product_indptr(a_indptr, a_indices, b_indptr, b_indices, cols):
    """Return the row pointers of ``A @ B``."""
    rows = len(a_indptr) - 1
    indptr = np.zeros(rows + 1, np.int64)
    seen = np.full(cols, -1, np.int64)
    for i in range(rows):
        count = np.int64(0)
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = b_indices[q]
                if seen[j] != i:
                    seen[j] = i
                    count += 1
        indptr[i + 1] = indptr[i] + count
    return indptr


@njit(nogil=True, cache=True)
def count_terms(a_indices, b_indptr):
    """Return how many terms ``A[i, k]·B[k, j]`` the product ``A @ B`` sums."""
    count = np.int64(0)
    for k in a_indices:
        count += b_indptr[k + 1] - b_indptr[k]
    return count


@njit(nogil=True, cache=True)
def count_entries(a_indptr, a_indices, b_indptr, b_indices, cols, rows):
    """Return how many entries these rows of ``A @ B`` have."""
    seen = np.full(cols, -1, np.int64)
    count = np.int64(0)
    for i in rows:
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = b_indices[q]
                if seen[j] != i:
                    seen[j] = i
                    count += 1
    return count


@njit(nogil=True, cache=True)
def product_indices(a_indptr, a_indices, b_indptr, b_indices, cols, indptr, indices):
    """Fill `indices` with the sorted columns of ``A @ B``, whose row pointers are known."""
    rows = len(a_indptr) - 1
    seen = np.full(cols, -1, np.int64)
    for i in range(rows):
        start, stop = indptr[i], indptr[i + 1]
        first, last, out = np.int64(cols), np.int64(-1), start
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = np.int64(b_indices[q])
                if seen[j] != i:
                    seen[j] = i
                    indices[out] = j
                    out += 1
                    first = min(first, j)
                    last = max(last, j)
        # A row that fills a good part of its span is read off the marks; a thin one is sorted.
        if (last - first) < 16 * (stop - start):
            out = start
            for column in range(first, last + 1):
                if seen[column] == i:
                    indices[out] = column
                    out += 1
        else:
            indices[start:stop].sort()
