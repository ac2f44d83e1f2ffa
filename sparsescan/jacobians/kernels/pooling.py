"""Kernels that mark which input is the largest of each window: see jacobians/pooling.py.

The largest is, as in PyTorch, the last NaN in the order of rows, or else the first maximum.
Indices are unsigned in the inner loops: Numba would test a signed one for wrapping around.
"""

# Numba compiles this, by its own types.
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ...kernels.addresses import data_of
from ...kernels.compile import njit

# Bits of a vector of window maxima: one register of AVX-512, two of AVX2.
_VECTOR = 512


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
    windows = width >> np.uint64(1)
    row = windows + windows
    top, top_out = np.uint64(0), np.uint64(0)
    for _ in range(len(images)):
        for _ in range(height >> np.uint64(1)):
            _mark_tiles(images, top, top + width, out, top_out, top_out + row, windows)
            top += width + width
            top_out += row + row
        if height & np.uint64(1):
            top += width


@intrinsic
def _mark_tiles(typingctx, images, top, bottom, out, top_out, bottom_out, windows):
    """Mark the largest inputs of `windows` 2×2 windows beside each other.

    The two rows of inputs start at `top` and `bottom`, those of their marks at `top_out` and
    `bottom_out`. In vectors, the last one masked: the compiler finds none in a loop over elements
    of four rows in pairs, which takes 2.4 to 3.8 times as long (``python -m bench intrinsics``).
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = images.dtype.bitwidth
        lanes = _VECTOR // bits
        element, index = context.get_value_type(images.dtype), ir.IntType(64)
        double = ir.VectorType(element, 2 * lanes)

        def row(array: int, start: int) -> Any:
            data = data_of(context, builder, signature.args[array], args[array])
            return builder.gep(data, [args[start]])

        rows, outs = (row(0, 1), row(0, 2)), (row(3, 4), row(3, 5))

        def mark(column: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> None:
            """Mark as many windows as there are lanes."""
            inputs = []
            for start in rows:
                pairs = read(builder.gep(start, [column]))
                inputs += [
                    builder.shuffle_vector(pairs, pairs, _integers(range(side, 2 * lanes, 2)))
                    for side in (0, 1)
                ]
            marks = _one_hot(builder, inputs)
            interleave = _integers([side + lane for lane in range(lanes) for side in (0, lanes)])
            for start, sides in zip(outs, (marks[:2], marks[2:]), strict=True):
                pairs = builder.shuffle_vector(*sides, interleave)
                write(pairs, builder.gep(start, [column]))

        def read_all(address: Any) -> Any:
            pairs = builder.load(builder.bitcast(address, double.as_pointer()))
            pairs.align = bits // 8
            return pairs

        def write_all(pairs: Any, address: Any) -> None:
            builder.store(pairs, builder.bitcast(address, double.as_pointer())).align = bits // 8

        columns = builder.shl(args[6], index(1))
        whole = builder.and_(columns, index(-2 * lanes))
        with cgutils.for_range_slice(builder, index(0), whole, index(2 * lanes), intp=index) as (
            column,
            _,
        ):
            mark(column, read_all, write_all)

        rest = builder.sub(columns, whole)
        with builder.if_then(builder.icmp_unsigned("!=", rest, index(0))):
            wide = ir.VectorType(index, 2 * lanes)
            first = builder.insert_element(ir.Constant(wide, ir.Undefined), rest, ir.IntType(32)(0))
            every = builder.shuffle_vector(first, first, _integers([0] * 2 * lanes))
            numbers = ir.Constant(wide, list(range(2 * lanes)))
            mask = builder.icmp_unsigned("<", numbers, every)
            pointer, align = double.as_pointer(), ir.IntType(32)
            suffix = f"v{2 * lanes}f{bits}.p0"
            load = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(double, [pointer, align, mask.type, double]),
                f"llvm.masked.load.{suffix}",
            )
            store = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [double, pointer, align, mask.type]),
                f"llvm.masked.store.{suffix}",
            )
            zero = ir.Constant(double, [0.0] * 2 * lanes)

            def read_rest(address: Any) -> Any:
                address = builder.bitcast(address, pointer)
                return builder.call(load, [address, align(bits // 8), mask, zero])

            def write_rest(pairs: Any, address: Any) -> None:
                address = builder.bitcast(address, pointer)
                builder.call(store, [pairs, address, align(bits // 8), mask])

            mark(whole, read_rest, write_rest)
        return context.get_dummy_value()

    places = types.uint64, types.uint64
    return types.void(images, *places, out, *places, types.uint64), codegen


def _one_hot(builder: Any, vectors: list[Any]) -> list[Any]:
    """Return 1 in each lane of the vector that has the largest element, 0 in the others."""
    best, larger = vectors[0], [None]
    for vector in vectors[1:]:
        is_nan = builder.fcmp_unordered("uno", vector, vector)
        larger.append(builder.or_(builder.fcmp_ordered(">", vector, best), is_nan))
        best = builder.select(larger[-1], vector, best)
    lanes = best.type.count
    one, zero = (ir.Constant(best.type, [number] * lanes) for number in (1.0, 0.0))
    # A vector has the largest element if it is larger than all before, and none after it is.
    none_after = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [1] * lanes)
    marks = []
    for is_larger in reversed(larger):
        chosen = none_after
        if is_larger is not None:
            chosen = builder.and_(is_larger, none_after)
            none_after = builder.and_(builder.not_(is_larger), none_after)
        marks.append(builder.select(chosen, one, zero))
    return marks[::-1]


def _integers(numbers: Any) -> Any:
    """Return a constant vector of 32-bit integers, such as a shuffle takes."""
    listed = list(numbers)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(listed)), listed)
