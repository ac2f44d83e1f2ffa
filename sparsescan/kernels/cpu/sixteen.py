"""Vectors of sixteen numbers, one of each of sixteen samples, in as many registers as that takes.

A recurrence of one sample waits for its own last result at each step. Sixteen samples side by side
fill two to four registers, whose chains of operations do not wait for each other. Samples come with
their steps end to end, so that squares of eight samples and eight steps are transposed, in
registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

WIDTH = 16
_SQUARE = 8
_INDEX = ir.IntType(32)


class _Sixteen(types.Type):
    """Sixteen numbers."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Sixteen({dtype})")


@register_model(_Sixteen)
class _SixteenModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        element = dmm.lookup(fe_type.dtype).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, WIDTH))


def _place(context, builder, kind, array, index):
    """Return the address of element `index` of an array, of any number of axes."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _load(builder, pointer, vector, size):
    value = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    value.align = size
    return value


def _keep(builder, value, pointer, size):
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=size)


def _shuffled(builder, a, b, order):
    kind = ir.VectorType(_INDEX, len(order))
    return builder.shuffle_vector(a, b, ir.Constant(kind, list(order)))


@intrinsic
def sixteen(typingctx, array, i):
    """Return row `i` of an array with rows of sixteen; of numbers, number `i` sixteen times."""
    vector = _Sixteen(array.dtype)

    def codegen(context, builder, signature, args):
        kind, size = context.get_value_type(vector), array.dtype.bitwidth // 8
        if array.ndim == 2:
            index = builder.mul(args[1], args[1].type(WIDTH))
            place = _place(context, builder, signature.args[0], args[0], index)
            return _load(builder, place, kind, size)
        number = builder.load(_place(context, builder, signature.args[0], args[0], args[1]))
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _INDEX(0))
        return _shuffled(builder, first, first, [0] * WIDTH)

    return vector(array, types.int64), codegen


@intrinsic
def put(typingctx, array, i, value):
    """Set row `i` of an array with rows of sixteen."""

    def codegen(context, builder, signature, args):
        index = builder.mul(args[1], args[1].type(WIDTH))
        place = _place(context, builder, signature.args[0], args[0], index)
        _keep(builder, args[2], place, array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, value), codegen


@intrinsic
def zeros_of(typingctx, array):
    """Return sixteen zeros of the dtype of an array."""
    vector = _Sixteen(array.dtype)

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
def sum_of_sixteen(typingctx, a):
    """Return the sum of all sixteen, by halves."""

    def codegen(context, builder, signature, args):
        total, size = args[0], WIDTH
        while size > 1:
            size //= 2
            low = _shuffled(builder, total, total, range(size))
            high = _shuffled(builder, total, total, range(size, 2 * size))
            total = builder.fadd(low, high)
        return builder.extract_element(total, _INDEX(0))

    return a.dtype(a), codegen


@intrinsic
def transpose_square(typingctx, to, i, to_stride, source, j, stride):
    """Set ``to[i + c·to_stride + r] = source[j + r·stride + c]`` for `r` and `c` below eight.

    Arrays of several axes count as flat.
    """

    def codegen(context, builder, signature, args):
        target, i, to_stride, origin, j, stride = args
        element = context.get_value_type(source.dtype)
        vector, size = ir.VectorType(element, _SQUARE), source.dtype.bitwidth // 8

        def place(kind, array, first, step, row):
            index = builder.add(first, builder.mul(step, step.type(row)))
            return _place(context, builder, kind, array, index)

        rows = [
            _load(builder, place(signature.args[3], origin, j, stride, row), vector, size)
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
                    rows[row] = _shuffled(builder, *pair, upper)
                    rows[row + block] = _shuffled(builder, *pair, lower)
        for row, value in enumerate(rows):
            _keep(builder, value, place(signature.args[0], target, i, to_stride, row), size)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(to, whole, whole, source, whole, whole), codegen
