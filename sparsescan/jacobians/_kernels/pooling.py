"""Kernels that mark which input is the largest of each window: see jacobians/pooling.py.

The largest is, as in PyTorch, the last NaN in the order of rows, or else the first maximum.
Indices are unsigned in the inner loops: Numba would test a signed one for wrapping around.
"""

# Numba compiles this, by its own types.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.compile import njit

__all__ = ["Windows", "mark_in_tiles", "mark_in_windows"]


class Windows(NamedTuple):
    """One axis: where the windows lie, and where the entries of each input.

    Attributes
    ----------
    low, high : ndarray of int64, shape (size_out,)
        The taps from `low` to `high` of a window lie inside the image.
    inputs : ndarray of int64, shape (size_out, kernel)
        Input of each tap.
    rank : ndarray of int64, shape (size_out, kernel)
        How many windows before this one have the input of the tap.
    ptr : ndarray of int64, shape (size + 1,)
        How many entries come before each input, if there were no other axis.
    dilation : int
        From the input of a tap to that of the next one.
    """

    low: NDArray[Any]
    high: NDArray[Any]
    inputs: NDArray[Any]
    rank: NDArray[Any]
    ptr: NDArray[Any]
    dilation: int


@njit(nogil=True, cache=True)
def mark_in_windows(images, y, x, out):
    """Write a 1 for each window of contiguous `images`, and 0 elsewhere; no window is empty."""
    height, width = images.shape[1:]
    flat = images.reshape(-1)
    for b in range(len(images)):
        # One image at a time, so that what is cleared is still in the cache when it is marked.
        out[b] = 0
        for i in range(len(y.low)):
            rows = y.high[i] - y.low[i]
            for j in range(len(x.low)):
                cols = x.high[j] - x.low[j]
                corner = (b * height + y.inputs[i, y.low[i]]) * width + x.inputs[j, x.low[j]]
                steps = y.dilation * width, x.dilation
                tap = _largest(flat, np.uint64(corner), rows, cols, steps)
                r, c = y.low[i] + tap // cols, x.low[j] + tap % cols
                h, w = y.inputs[i, r], x.inputs[j, c]
                of_row, of_column = y.ptr[h + 1] - y.ptr[h], x.ptr[w + 1] - x.ptr[w]
                start = y.ptr[h] * x.ptr[-1] + of_row * x.ptr[w]
                out[b, start + y.rank[i, r] * of_column + x.rank[j, c]] = 1


@njit(inline="always")
def _largest(flat, corner, rows, cols, steps):
    """Return the number of the largest element in a window that starts at `corner`."""
    one = np.uint64(1)
    best = flat[corner]
    # `after_nan` is one more than the number of the last NaN, or 0.
    tap, largest, after_nan = np.uint64(0), np.uint64(0), np.uint64(0)
    for r in range(np.uint64(rows)):
        at = corner + r * np.uint64(steps[0])
        for _ in range(np.uint64(cols)):
            value = flat[at]
            # Written so that no branch depends on the values: it could not be predicted.
            larger = value > best
            best = value if larger else best
            largest = tap if larger else largest
            tap += one
            after_nan = tap if value != value else after_nan
            at += np.uint64(steps[1])
    return np.int64(after_nan - one if after_nan else largest)


@njit(nogil=True, cache=True)
def mark_in_tiles(images, out):
    """Write 1 or 0 for each input of 2×2 windows beside each other; `out` has only those inputs.

    Both are contiguous.
    """
    height, width = np.uint64(images.shape[1]), np.uint64(images.shape[2])
    flat, marks = images.reshape(-1), out.reshape(-1)
    one, two = np.uint64(1), np.uint64(2)
    row = width & ~one
    top, start = np.uint64(0), np.uint64(0)
    for _ in range(len(images)):
        for _ in range(height >> one):
            for _ in range(row >> one):
                low = top + width
                a, b, c, d = flat[top], flat[top + one], flat[low], flat[low + one]
                # The larger of each row, then of both. No branch depends on the values.
                upper = np.uint64((b > a) | (b != b))
                lower = np.uint64((d > c) | (d != d))
                best_upper = b if upper else a
                best_lower = d if lower else c
                in_lower = (best_lower > best_upper) | (best_lower != best_lower)
                marks[start] = marks[start + one] = 0
                marks[start + row] = marks[start + row + one] = 0
                marks[start + (row + lower if in_lower else upper)] = 1
                top += two
                start += two
            top += width + (width & one)
            start += row
        top += width * (height & one)
