"""Kernels that write the values of a Jacobian in one pass."""

from __future__ import annotations

import numpy as np

from ...kernels.compile import njit


@njit(nogil=True, cache=True)
def relu(x, out):  # type: ignore[no-untyped-def]
    """Write ``not (x <= 0)``, which is 1 at NaN."""
    for i in range(len(x)):
        out[i] = 0 if x[i] <= 0 else 1


@njit(nogil=True, cache=True)
def shift_rows(indptr, starts, columns, shift, out):  # type: ignore[no-untyped-def]
    """Write the columns of all rows; row `i` has ``columns[starts[i]:] + shift[i]``."""
    for row in range(np.uint64(len(starts))):
        # With unsigned indices, which cannot mean places from the end, this is faster.
        first, last = np.uint64(indptr[row]), np.uint64(indptr[row + np.uint64(1)])
        start = np.uint64(starts[row])
        for q in range(last - first):
            out[first + q] = columns[start + q] + shift[row]


@njit(nogil=True, cache=True)
def transpose(weight, out):  # type: ignore[no-untyped-def]
    """Write the transpose of a matrix, eight rows at a time: those fit the nearest cache."""
    rows, cols = weight.shape
    for first in range(0, rows, 8):
        last = np.uint64(min(first + 8, rows))
        for column in range(np.uint64(cols)):
            for row in range(np.uint64(first), last):
                out[column, row] = weight[row, column]
