"""Values of the Jacobians of recurrent cells: see recurrent/cells.py.

A transposed Jacobian is ``Σ_g weights[g] ∘ slopes[g]``, the slopes one row for all rows of the
weights, plus the part of the state that is passed on directly. One pass writes it, since memory
limits the speed.
"""

from __future__ import annotations

import numpy as np

from ...kernels.compile import njit

__all__ = ["fill_entries", "fill_gru", "fill_lstm", "fill_rnn", "put_column"]

# Unsigned indices: Numba would test signed ones for wrapping around.
_UINT = np.uint64


@njit(nogil=True, cache=True)
def fill_rnn(weights, slopes, direct, out):  # type: ignore[no-untyped-def]
    """Write ``out[n, i·H + j] = weights[0, i, j]·slopes[0, n, j]``; `direct` is empty."""
    rows, cols = _UINT(weights.shape[1]), _UINT(weights.shape[2])
    for n in range(slopes.shape[1]):
        for i in range(rows):
            for j in range(cols):
                out[n, i * cols + j] = weights[0, i, j] * slopes[0, n, j]


@njit(nogil=True, cache=True)
def fill_gru(weights, slopes, direct, out):  # type: ignore[no-untyped-def]
    """Write the sum over three gates, plus `direct`, shape ``(n, H)``, on the diagonal."""
    rows, cols = _UINT(weights.shape[1]), _UINT(weights.shape[2])
    for n in range(slopes.shape[1]):
        for i in range(rows):
            for j in range(cols):
                out[n, i * cols + j] = (
                    weights[0, i, j] * slopes[0, n, j]
                    + weights[1, i, j] * slopes[1, n, j]
                    + weights[2, i, j] * slopes[2, n, j]
                )
        for i in range(rows):
            out[n, i * cols + i] += direct[n, i]


@njit(nogil=True, cache=True)
def fill_lstm(weights, slopes, direct, out):  # type: ignore[no-untyped-def]
    """Write four gates in H rows of 2H columns, then `direct` in H rows of two entries.

    `direct`, shape ``(n, 2H)``, is given in the order of the columns.
    """
    rows, cols = _UINT(weights.shape[1]), _UINT(weights.shape[2])
    for n in range(slopes.shape[1]):
        for i in range(rows):
            for j in range(cols):
                out[n, i * cols + j] = (
                    weights[0, i, j] * slopes[0, n, j]
                    + weights[1, i, j] * slopes[1, n, j]
                    + weights[2, i, j] * slopes[2, n, j]
                    + weights[3, i, j] * slopes[3, n, j]
                )
        for i in range(rows):
            place = rows * cols + _UINT(2) * i
            out[n, place] = direct[n, i]
            out[n, place + _UINT(1)] = direct[n, rows + i]


@njit(nogil=True, cache=True)
def fill_entries(weights, slopes, columns, direct, place, out):  # type: ignore[no-untyped-def]
    """Write the values of any pattern, entry by entry.

    Entry ``p`` is in column ``columns[p]`` and has the weights ``weights[:, p]``, none of them if
    ``p`` is beyond their end; `direct` is added to the entries at `place`.
    """
    weighted, entries = weights.shape[1], out.shape[1]
    for n in range(slopes.shape[1]):
        for p in range(weighted):
            out[n, p] = weights[0, p] * slopes[0, n, columns[p]]
        for g in range(1, len(weights)):
            for p in range(weighted):
                out[n, p] += weights[g, p] * slopes[g, n, columns[p]]
        for p in range(weighted, entries):
            out[n, p] = 0
        for p in place:
            out[n, p] += direct[n, columns[p]]


@njit(nogil=True, cache=True)
def put_column(array, out, start, step):  # type: ignore[no-untyped-def]
    """Write ``out[n, start + j·step] = array[n, j]``."""
    first, stride = _UINT(start), _UINT(step)
    for n in range(array.shape[0]):
        for j in range(_UINT(array.shape[1])):
            out[n, first + j * stride] = array[n, j]
