"""Vectors of sixteen numbers, one per sample, in as many registers as needed.

A recurrence of one sample waits for its last result at each step. Sixteen samples fill two to four
registers, whose chains of operations are independent. The steps of a sample are contiguous, so
squares of eight samples and eight steps are transposed in registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector import Lanes, align_of, broadcast, load_at, pointer, shuffle

WIDTH = 16
_SQUARE = 8


def _keep(builder, value, place):
    """Write a vector from a pointer to numbers on."""
    place = builder.bitcast(place, value.type.as_pointer())
    builder.store(value, place, align=align_of(value.type))


@intrinsic
def sixteen(typingctx, array, i):
    """Return row `i` of an array with rows of sixteen; or broadcast number `i` of a flat array."""
    vector = Lanes(array.dtype, WIDTH)

    def codegen(context, builder, signature, args):
        kind, (array_type, _) = context.get_value_type(vector), signature.args
        if array.ndim == 2:
            index = builder.mul(args[1], args[1].type(WIDTH))
            first = pointer(context, builder, array_type, args[0], index.type(0))
            return load_at(builder, first, index, kind)
        return broadcast(builder, builder.load(pointer(context, builder, array_type, *args)), kind)

    return vector(array, types.int64), codegen


@intrinsic
def put(typingctx, array, i, value):
    """Set row `i` of an array with rows of sixteen."""

    def codegen(context, builder, signature, args):
        index = builder.mul(args[1], args[1].type(WIDTH))
        _keep(builder, args[2], pointer(context, builder, signature.args[0], args[0], index))
        return context.get_dummy_value()

    return types.void(array, types.int64, value), codegen


@intrinsic
def zeros_of(typingctx, array):
    """Return sixteen zeros of the dtype of an array."""
    vector = Lanes(array.dtype, WIDTH)

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(vector), [0.0] * WIDTH)

    return vector(array), codegen


@intrinsic
def fused(typingctx, total, a, b):
    """Return ``total + a·b``, rounded once where the processor can."""

    def codegen(context, builder, signature, args):
        product = builder.fmul(args[1], args[2], flags=("contract",))
        return builder.fadd(args[0], product, flags=("contract",))

    return total(total, total, total), codegen


@intrinsic
def times(typingctx, a, b):
    """Return ``a·b``."""

    def codegen(context, builder, signature, args):
        return builder.fmul(*args)

    return a(a, a), codegen


@intrinsic
def minus(typingctx, a):
    """Return ``-a``."""

    def codegen(context, builder, signature, args):
        return builder.fneg(args[0])

    return a(a), codegen


@intrinsic
def reciprocal(typingctx, a):
    """Return ``1/a``."""

    def codegen(context, builder, signature, args):
        return builder.fdiv(ir.Constant(args[0].type, [1.0] * WIDTH), args[0])

    return a(a), codegen


@intrinsic
def transpose_square(typingctx, to, i, to_stride, source, j, stride):
    """Set ``to[i + c·to_stride + r] = source[j + r·stride + c]`` for `r` and `c` below eight.

    Arrays of several axes count as flat.
    """

    def codegen(context, builder, signature, args):
        target, i, to_stride, origin, j, stride = args
        vector = ir.VectorType(context.get_value_type(source.dtype), _SQUARE)

        def place(kind, array, first, step, row):
            index = builder.add(first, builder.mul(step, step.type(row)))
            return pointer(context, builder, kind, array, index)

        rows = [
            load_at(builder, place(signature.args[3], origin, j, stride, row), j.type(0), vector)
            for row in range(_SQUARE)
        ]
        # Blocks off the diagonal change places: of four, of two, of one.
        for block in (4, 2, 1):
            is_left = [column & block == 0 for column in range(_SQUARE)]
            upper = [c if left else _SQUARE + c - block for c, left in enumerate(is_left)]
            lower = [c + block if left else _SQUARE + c for c, left in enumerate(is_left)]
            for row in range(_SQUARE):
                if row & block == 0:
                    pair = rows[row], rows[row + block]
                    rows[row] = shuffle(builder, *pair, upper)
                    rows[row + block] = shuffle(builder, *pair, lower)
        for row, value in enumerate(rows):
            _keep(builder, value, place(signature.args[0], target, i, to_stride, row))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(to, whole, whole, source, whole, whole), codegen
