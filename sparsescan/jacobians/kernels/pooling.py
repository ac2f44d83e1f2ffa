"""Kernels that mark which input is the largest of each window: see jacobians/pooling.py.

The largest is, as in PyTorch, the last NaN in the order of rows, or else the first maximum.
Indices are unsigned in the inner loops: Numba would test a signed one for wrapping around.
"""

# Numba compiles this, by its own types.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray

from ...kernels.compile import njit
from ...kernels.cpu.lanes import (
    apart,
    lane_count,
    load,
    load_some,
    store,
    store_some,
    together,
)


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

    Both are contiguous. In vectors, since the compiler finds none in a loop over elements of four
    rows in pairs, which takes 2.4 to 3.8 times as long (``python -m bench intrinsics``).
    """
    height, width = images.shape[1:]
    row, top, to, many = width // 2 * 2, 0, 0, lane_count(images)
    whole = row // (2 * many) * (2 * many)
    for _ in range(len(images)):
        for _ in range(height // 2):
            low, low_to = top + width, to + row
            for k in range(0, whole, 2 * many):
                upper = load(images, top + k), load(images, top + k + many)
                lower = load(images, low + k), load(images, low + k + many)
                upper, lower = _marks(upper, lower)
                store(out, to + k, upper[0])
                store(out, to + k + many, upper[1])
                store(out, low_to + k, lower[0])
                store(out, low_to + k + many, lower[1])
            if whole < row:
                k, some, more = whole, row - whole, row - whole - many
                upper = load_some(images, top + k, some), load_some(images, top + k + many, more)
                lower = load_some(images, low + k, some), load_some(images, low + k + many, more)
                upper, lower = _marks(upper, lower)
                store_some(out, to + k, upper[0], some)
                store_some(out, low_to + k, lower[0], some)
                if more > 0:
                    store_some(out, to + k + many, upper[1], more)
                    store_some(out, low_to + k + many, lower[1], more)
            top += 2 * width
            to += 2 * row
        top += height % 2 * width


@njit(_nrt=False, forceinline=True)
def _marks(upper, lower):
    """Return 1 for the largest of each window in two rows of two vectors, 0 for the others."""
    a, b, c, d = _one_hot((*apart(*upper), *apart(*lower)))
    return together(a, b), together(c, d)


@intrinsic
def _one_hot(typingctx, vectors):
    """Return 1 in each lane of the vector that has the largest element, 0 in the others."""

    def codegen(context, builder, signature, args):
        best, *others = (builder.extract_value(args[0], k) for k in range(len(vectors)))
        larger = []
        for vector in others:
            is_nan = builder.fcmp_unordered("uno", vector, vector)
            larger.append(builder.or_(builder.fcmp_ordered(">", vector, best), is_nan))
            best = builder.select(larger[-1], vector, best)
        one, zero = (ir.Constant(best.type, [x] * best.type.count) for x in (1.0, 0.0))
        # A vector has the largest element if it is larger than all before, and none after it is.
        last, marks = ir.Constant(larger[0].type, [1] * best.type.count), []
        for is_larger in reversed(larger):
            marks.append(builder.select(builder.and_(is_larger, last), one, zero))
            last = builder.and_(builder.not_(is_larger), last)
        marks.append(builder.select(last, one, zero))
        return context.make_tuple(builder, signature.return_type, marks[::-1])

    return vectors(vectors), codegen
