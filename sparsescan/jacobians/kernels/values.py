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
def copy_rows(of, ptr, array, shift, out):  # type: ignore[no-untyped-def]
    """Write the numbers ``array[ptr[of[i]]:ptr[of[i] + 1]]`` of each row `i`, one after the other.

    To those of row `i` ``shift[i]`` is added, unless `shift` is empty.
    """
    p = np.uint64(0)
    for row in range(len(of)):
        # With unsigned indices, which cannot mean places from the end, this is a memcpy.
        start = np.uint64(ptr[of[row]])
        size = np.uint64(ptr[of[row] + 1]) - start
        if len(shift):
            for q in range(size):
                out[p + q] = array[start + q] + shift[row]
        else:
            for q in range(size):
                out[p + q] = array[start + q]
        p += size


@njit(nogil=True, cache=True)
def gather(weight, sources, out):  # type: ignore[no-untyped-def]
    """Write ``weight[sources]``."""
    for p in range(np.uint64(len(sources))):
        out[p] = weight[np.uint64(sources[p])]


@njit(nogil=True, cache=True)
def transpose(weight, out):  # type: ignore[no-untyped-def]
    """Write the transpose of a matrix, eight rows at a time: those fit the nearest cache."""
    rows, cols = weight.shape
    for first in range(0, rows, 8):
        last = np.uint64(min(first + 8, rows))
        for column in range(np.uint64(cols)):
            for row in range(np.uint64(first), last):
                out[column, row] = weight[row, column]
