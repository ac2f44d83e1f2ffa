"""Kernels that write the values of a Jacobian, or columns of its pattern, in one pass.

Indices are unsigned in inner loops: Numba would test signed ones for wrapping around.
"""

# Numba compiles this, by its own types.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

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


@njit(nogil=True, cache=True)
def relu(x, out):
    """Write ``not (x <= 0)``, which is 1 at NaN."""
    for i in range(len(x)):
        out[i] = 0 if x[i] <= 0 else 1


@njit(nogil=True, cache=True)
def shift_rows(indptr, starts, columns, shift, out):
    """Write the columns of all rows; row `i` has ``columns[starts[i]:] + shift[i]``."""
    for row in range(np.uint64(len(starts))):
        # With unsigned indices, which cannot mean places from the end, this is faster.
        first, last = np.uint64(indptr[row]), np.uint64(indptr[row + np.uint64(1)])
        start = np.uint64(starts[row])
        for q in range(last - first):
            out[first + q] = columns[start + q] + shift[row]


@njit(nogil=True, cache=True)
def transpose(weight, out):
    """Write the transpose of a matrix, eight rows at a time: those fit the nearest cache."""
    rows, cols = weight.shape
    for first in range(0, rows, 8):
        last = np.uint64(min(first + 8, rows))
        for column in range(np.uint64(cols)):
            for row in range(np.uint64(first), last):
                out[column, row] = weight[row, column]


# -- Pooling ---------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def mark_in_windows(images, ptr, inputs, entries, out):
    """Write a 1 for the largest of each window of contiguous `images`, and 0 elsewhere.

    That is, as in PyTorch, the last NaN in the order of rows, or else the first maximum. No window
    is empty.

    Window `w` has the taps from ``ptr[w]`` to ``ptr[w + 1]``: which place of its image each reads,
    and which entry of the pattern that is.
    """
    size, flat = images.shape[1] * images.shape[2], images.reshape(-1)
    for b in range(len(images)):
        # One image at a time, so that what is cleared is still in the cache when it is marked.
        out[b] = 0
        begin = np.uint64(b * size)
        for w in range(len(ptr) - 1):
            first, last = np.uint64(ptr[w]), np.uint64(ptr[w + 1])
            best, largest, after_nan = flat[begin + np.uint64(inputs[first])], first, np.uint64(0)
            for k in range(first, last):
                value = flat[begin + np.uint64(inputs[k])]
                # Written so that no branch depends on the values: it could not be predicted.
                larger = value > best
                best = value if larger else best
                largest = k if larger else largest
                after_nan = k + np.uint64(1) if value != value else after_nan
            chosen = after_nan - np.uint64(1) if after_nan else largest
            out[b, entries[chosen]] = 1


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
