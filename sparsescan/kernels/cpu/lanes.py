"""Vectors of neighbouring numbers, and functions of them.

Every operation on vectors is one instruction. With loops over numbers, the compiler would decide
anew for every loop whether to use such instructions.

Vectors exist only in compiled functions; ``+ - * /`` work on them. Each function that takes an
array also takes a pointer, a ``numba.types.CPointer``, and indexes from there.
"""

from __future__ import annotations

import operator

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, overload, type_callable
from numba.np import numpy_support

from ..compile import njit
from .vector import (
    Lanes,
    add_in_place,
    align_of,
    broadcast,
    call_llvm,
    first_lanes,
    lane_sums,
    load_at,
    masked_load,
    masked_store,
    pointer,
    shuffle,
    widened,
)

# A register: 64 bytes with AVX-512, else 32.
BYTES = 64 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 32
# If samples are lanes, 32 bytes: a batch of 16 is enough for two threads. If lanes are the samples
# of two rows, 64: the two lanes of a sample are neighbours.
SAMPLE_BYTES, PAIR_BYTES = 32, 64
# Two registers, for loops that load a broadcast number once for both.
WIDE_BYTES = 2 * BYTES


def vector_of(dtype, size=BYTES):
    """Return the type of vectors with a number of bytes."""
    return Lanes(dtype, 8 * size // dtype.bitwidth)


def lanes(dtype: np.dtype) -> int:
    """Return how many numbers of this dtype a vector has."""
    return BYTES // np.dtype(dtype).itemsize


def sample_lanes(dtype: np.dtype) -> int:
    """Return how many samples a vector holds if samples are lanes."""
    return SAMPLE_BYTES // np.dtype(dtype).itemsize


def lane_count(array):
    """Return how many lanes the vectors of an array have, in compiled functions."""
    return lanes(array.dtype)


@overload(lane_count)
def _lane_count_of(array):
    count = lanes(numpy_support.as_dtype(array.dtype))
    return lambda array: count


def sample_count(array):
    """Return how many samples are in a vector, in compiled functions."""
    return sample_lanes(array.dtype)


@overload(sample_count)
def _sample_count_of(array):
    count = sample_lanes(numpy_support.as_dtype(array.dtype))
    return lambda array: count


def _loading(size):
    """Return an intrinsic that loads the vector at an index of an array."""

    @intrinsic
    def load(typingctx, array, index):
        vector = vector_of(array.dtype, size)

        def codegen(context, builder, signature, args):
            value = context.get_value_type(vector)
            loaded = builder.load(pointer(context, builder, signature.args[0], *args, value))
            loaded.align = array.dtype.bitwidth // 8
            return loaded

        return vector(array, types.intp), codegen

    return load


load, load_samples, load_wide = _loading(BYTES), _loading(SAMPLE_BYTES), _loading(WIDE_BYTES)


@intrinsic
def store(typingctx, array, index, vector):
    """Write a vector from ``array[index]`` on."""

    def codegen(context, builder, signature, args):
        place = pointer(context, builder, signature.args[0], *args[:2], args[2].type)
        builder.store(args[2], place).align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


def _splatting(size):
    """Return an intrinsic that broadcasts the number at an index of an array."""

    @intrinsic
    def splat(typingctx, array, index):
        vector = vector_of(array.dtype, size)

        def codegen(context, builder, signature, args):
            value = builder.load(pointer(context, builder, signature.args[0], *args))
            return broadcast(builder, value, context.get_value_type(vector))

        return vector(array, types.intp), codegen

    return splat


splat, splat_samples = _splatting(BYTES), _splatting(SAMPLE_BYTES)
splat_wide = _splatting(WIDE_BYTES)


@intrinsic
def item(typingctx, array, index):
    """Return ``array[index]`` for a non-negative index, without Numba's check of the sign."""

    def codegen(context, builder, signature, args):
        return builder.load(pointer(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), codegen


@intrinsic
def prefetch(typingctx, array, index):
    """Prefetch the cache line of ``array[index]``; the index may be outside the array."""

    def codegen(context, builder, signature, args):
        i32, place = ir.IntType(32), pointer(context, builder, signature.args[0], *args)
        kind = ir.FunctionType(ir.VoidType(), [place.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, i32(0), i32(2), i32(1)])  # to read, from the second cache
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def stay_apart(typingctx):
    """Keep LLVM from inlining the surrounding function into its many callers."""

    def codegen(context, builder, signature, args):
        # Numba may have asked for inlining, as it does for callees of such functions.
        builder.function.attributes.discard("alwaysinline")
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def put_four(typingctx, out, index, array, places):
    """Write the numbers at four places, none of them negative, from ``out[index]`` on."""

    def codegen(context, builder, signature, args):
        out, index, array, places = args
        vector = ir.VectorType(context.get_value_type(signature.args[2].dtype), 4)
        four = ir.Constant(vector, ir.Undefined)
        for k in range(4):
            place = builder.extract_value(places, k)
            number = builder.load(pointer(context, builder, signature.args[2], array, place))
            four = builder.insert_element(four, number, ir.IntType(32)(k))
        to = pointer(context, builder, signature.args[0], out, index, vector)
        builder.store(four, to).align = align_of(vector)
        return context.get_dummy_value()

    return types.void(out, types.intp, array, places), codegen


@intrinsic
def load_some(typingctx, array, index, count):
    """Return the vector at ``array[index]``; only its first `count` lanes are read."""
    vector = vector_of(array.dtype)

    def codegen(context, builder, signature, args):
        array, index, count = args
        value = context.get_value_type(vector)
        place = pointer(context, builder, signature.args[0], array, index, value)
        return masked_load(builder, place, first_lanes(builder, count, value))

    return vector(array, types.intp, types.intp), codegen


@intrinsic
def store_some(typingctx, array, index, vector, count):
    """Write the first `count` lanes of a vector from ``array[index]`` on."""

    def codegen(context, builder, signature, args):
        array, index, vector, count = args
        bits, shape = signature.args[0].dtype.bitwidth, vector.type
        place = pointer(context, builder, signature.args[0], array, index, shape)
        whole = builder.icmp_signed(">=", count, count.type(shape.count))
        # Memory that was just written with a mask is slow to read.
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                builder.store(vector, place).align = bits // 8
            with otherwise:
                masked_store(builder, vector, place, first_lanes(builder, count, shape))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector, types.intp), codegen


@njit(_nrt=False, forceinline=True)
def store_both(first, at, second, to, vector, count, room):
    """Write a vector for :func:`load_either`: lanes to the first array, and if partial, the second.

    There are `room` numbers in the second.
    """
    store_some(first, at, vector, count)
    if count < lane_count(second):
        store_some(second, to, vector, room)


@njit(_nrt=False, forceinline=True)
def load_either(first, at, second, to, count):
    """Load a vector from the first array if it has all lanes, else from the second."""
    return load(second, to) if count < lane_count(second) else load(first, at)


@intrinsic
def keep_some(typingctx, vector, count):
    """Return a vector with 0 after its first `count` lanes, whatever they held."""

    def codegen(context, builder, signature, args):
        vector, count = args
        zero = ir.Constant(vector.type, [0.0] * vector.type.count)
        return builder.select(first_lanes(builder, count, vector.type), vector, zero)

    return vector(vector, types.intp), codegen


@intrinsic
def number(typingctx, like, value):
    """Return a vector of one number, of the dtype of an array or a vector."""
    vector = like if isinstance(like, Lanes) else vector_of(like.dtype)

    def codegen(context, builder, signature, args):
        cast = context.cast(builder, args[1], signature.args[1], vector.dtype)
        return broadcast(builder, cast, context.get_value_type(vector))

    return vector(like, value), codegen


def _square_loading(size, height=SAMPLE_BYTES):
    """Return an intrinsic that loads a square of vectors.

    It has one vector per sample of a vector; a full square has one per lane.
    """

    @intrinsic
    def load_square(typingctx, array, index, step, rows, count):
        """Return vectors that are `step` apart from ``array[index]`` on.

        Only the first `count` lanes of the first `rows` vectors are read; all others are 0.
        """
        vector = vector_of(array.dtype, size)
        samples = vector_of(array.dtype, height).count
        square = types.UniTuple(vector, samples)

        def codegen(context, builder, signature, args):
            array, index, step, rows, count = args
            value = context.get_value_type(vector)
            vectors = [cgutils.alloca_once(builder, value) for _ in range(samples)]
            first = pointer(context, builder, signature.args[0], array, index)

            def load(k, mask):
                at = builder.mul(step, step.type(k))
                builder.store(load_at(builder, first, at, value, mask), vectors[k])

            _for_rows(builder, value, samples, rows, count, load)
            return context.make_tuple(builder, square, [builder.load(each) for each in vectors])

        return square(array, *[types.intp] * 4), codegen

    return load_square


load_square, load_pair_square = _square_loading(SAMPLE_BYTES), _square_loading(PAIR_BYTES)
load_full_square = _square_loading(BYTES, BYTES)


@intrinsic
def store_square(typingctx, array, index, step, square, rows, count):
    """Write the first `count` lanes of the first `rows` vectors, from ``array[index]`` on.

    They are rounded to the dtype of the array.
    """

    def codegen(context, builder, signature, args):
        array, index, step, square, rows, count = args
        vectors = [builder.extract_value(square, k) for k in range(len(signature.args[3]))]
        value = ir.VectorType(context.get_value_type(array_type.dtype), vectors[0].type.count)
        if value != vectors[0].type:
            vectors = [builder.fptrunc(each, value) for each in vectors]

        def store(k, mask):
            at = builder.add(index, builder.mul(step, step.type(k)))
            place = pointer(context, builder, signature.args[0], array, at, value)
            if mask is None:
                builder.store(vectors[k], place).align = align_of(value)
            else:
                masked_store(builder, vectors[k], place, mask)

        _for_rows(builder, value, len(vectors), rows, count, store)
        return context.get_dummy_value()

    array_type = array
    return types.void(array, types.intp, types.intp, square, types.intp, types.intp), codegen


@intrinsic
def add_squares(typingctx, a, b):
    """Return the sums of two squares, vector by vector."""

    def codegen(context, builder, signature, args):
        parts = [[builder.extract_value(each, k) for each in args] for k in range(len(a))]
        sums = [builder.fadd(*each) for each in parts]
        return context.make_tuple(builder, signature.return_type, sums)

    return a(a, b), codegen


def _for_rows(builder, vector, most, rows, count, do):
    """Call ``do(k, mask)`` for all rows of a square; a mask of None means all lanes."""
    size, lanes = rows.type(most), rows.type(vector.count)
    whole = builder.and_(
        builder.icmp_signed(">=", rows, size), builder.icmp_signed(">=", count, lanes)
    )
    with builder.if_else(whole, likely=True) as (then, otherwise):
        with then:
            for k in range(most):
                do(k, None)
        with otherwise:
            mask = first_lanes(builder, count, vector)
            none = ir.Constant(mask.type, None)
            for k in range(most):
                do(k, builder.select(builder.icmp_signed(">", rows, size.type(k)), mask, none))


@intrinsic
def transpose(typingctx, rows):
    """Transpose a square of vectors; if a vector has more lanes, groups of lanes stay together."""
    count, lanes = len(rows), rows.dtype.count
    grain = lanes // count

    def codegen(context, builder, signature, args):
        vectors = [builder.extract_value(args[0], k) for k in range(count)]
        distance = 1
        while distance < count:
            jump = distance * grain
            for k in range(count):
                if k & distance:
                    continue
                a, b = vectors[k], vectors[k + distance]
                # Lanes of the second vector are numbered after those of the first.
                low = [n if not n & jump else lanes + n - jump for n in range(lanes)]
                high = [n + jump if not n & jump else lanes + n for n in range(lanes)]
                vectors[k] = shuffle(builder, a, b, low)
                vectors[k + distance] = shuffle(builder, a, b, high)
            distance *= 2
        return context.make_tuple(builder, signature.return_type, vectors)

    return rows(rows), codegen


def _mixing(places):
    """Return an intrinsic that shuffles two vectors into two."""

    @intrinsic
    def mix(typingctx, a, b):
        pair = types.UniTuple(a, 2)

        def codegen(context, builder, signature, args):
            parts = [shuffle(builder, *args, part) for part in places(a.count)]
            return context.make_tuple(builder, pair, parts)

        return pair(a, b), codegen

    return mix


# Lanes at even places and those at odd ones, of two neighbouring vectors; and back.
apart = _mixing(lambda n: [list(range(side, 2 * n, 2)) for side in (0, 1)])
together = _mixing(
    lambda n: [[k + side for k in range(at, at + n // 2) for side in (0, n)] for at in (0, n // 2)]
)


def _operation(function, name):
    """Define an operator on two vectors; a product may be fused with its sum."""

    @type_callable(function)
    def typed(context):
        return lambda a, b: a if isinstance(a, Lanes) and a == b else None

    @lower_builtin(function, Lanes, Lanes)
    def operation(context, builder, signature, args):
        return getattr(builder, name)(*args, flags=("contract",))


_operation(operator.add, "fadd")
_operation(operator.sub, "fsub")
_operation(operator.mul, "fmul")
_operation(operator.truediv, "fdiv")


@intrinsic
def fma(typingctx, a, b, c):
    """Return ``a·b + c``, rounded once."""

    def codegen(context, builder, signature, args):
        return call_llvm(builder, "fma", args[0].type, args)

    return a(a, b, c), codegen


def _selection(comparison):
    """Return an intrinsic ``c if a <comparison> b else d``; no NaN compares."""

    @intrinsic
    def selection(typingctx, a, b, c, d):
        def codegen(context, builder, signature, args):
            return builder.select(builder.fcmp_ordered(comparison, *args[:2]), *args[2:])

        return c(a, b, c, d), codegen

    return selection


less_or = _selection("<")
equal_or = _selection("==")
# With `x` twice, this tells whether `x` is NaN.
number_or = _selection("ord")


@intrinsic
def is_zero(typingctx, x):
    """Return whether all lanes are 0; NaN is not."""

    def codegen(context, builder, signature, args):
        vector = args[0].type
        zero = ir.Constant(vector, [0.0] * vector.count)
        others = builder.fcmp_unordered("!=", args[0], zero)
        bits = builder.bitcast(others, ir.IntType(vector.count))
        return builder.icmp_unsigned("==", bits, bits.type(0))

    return types.boolean(x), codegen


@intrinsic
def neighbours(typingctx, x):
    """Return a vector with each pair of lanes exchanged."""

    def codegen(context, builder, signature, args):
        (vector,) = args
        return shuffle(builder, vector, vector, [k ^ 1 for k in range(vector.type.count)])

    return x(x), codegen


@intrinsic
def total(typingctx, x):
    """Return the sum over all lanes, added in pairs."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(lane_sums(builder, args), ir.IntType(32)(0))

    return x.dtype(x), codegen


@intrinsic
def add_to(typingctx, array, index, vector):
    """Add a vector to the numbers from ``array[index]`` on, whose dtype may be wider."""

    def codegen(context, builder, signature, args):
        place = pointer(context, builder, signature.args[0], *args[:2])
        add_in_place(builder, place, args[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def put_in(typingctx, array, index, vector):
    """Write a vector to the numbers from ``array[index]`` on, whose dtype may be wider."""

    def codegen(context, builder, signature, args):
        place = pointer(context, builder, signature.args[0], *args[:2])
        place, wide = widened(builder, place, args[2])
        builder.store(wide, place).align = align_of(wide.type)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def store_totals(typingctx, array, index, vectors, adds):
    """Write the sum over all lanes of each vector from ``array[index]`` on, or add it."""

    def codegen(context, builder, signature, args):
        array, index, vectors, adds = args
        every = [builder.extract_value(vectors, k) for k in range(len(signature.args[2]))]
        width, align = every[0].type.count, signature.args[0].dtype.bitwidth // 8
        for k in range(0, len(every), width):
            sums = lane_sums(builder, every[k : k + width])
            at = builder.add(index, index.type(k))
            place = pointer(context, builder, signature.args[0], array, at, sums.type)
            before = builder.load(place)
            before.align = align
            zero = ir.Constant(sums.type, [0.0] * sums.type.count)
            before = builder.select(adds, before, zero)
            builder.store(builder.fadd(before, sums), place).align = align
        return context.get_dummy_value()

    return types.void(array, types.intp, vectors, types.boolean), codegen
