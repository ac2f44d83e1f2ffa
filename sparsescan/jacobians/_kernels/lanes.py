"""Vectors with one lane for each of several samples, and functions of them.

A kernel with samples as lanes keeps numbers as ``[unit][lane]`` and broadcasts weights, so every
operation is one instruction, whatever the sizes of the layer. Loops over lanes would leave it to
the compiler whether they become such instructions, which it decides anew for every loop.

Vectors are values of compiled functions only; ``+ - * /`` work on them.
"""

from __future__ import annotations

import operator

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model
from numba.np import numpy_support

from ...kernels.compile import njit

__all__ = [
    "add_outer_products",
    "add_products",
    "add_rows",
    "add_totals",
    "fma",
    "keep_less",
    "keep_positive",
    "lane_count",
    "lanes",
    "less_or",
    "load",
    "load_rows",
    "load_square",
    "number",
    "sigmoid",
    "splat",
    "splat_rows",
    "store",
    "store_corner",
    "store_rows",
    "store_square",
    "tanh",
    "total",
    "transpose",
]

# A register: 64 bytes with AVX-512, else 32.
_BYTES = 64 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 32


def lanes(dtype: np.dtype) -> int:
    """Return how many numbers of this dtype a vector has."""
    return _BYTES // np.dtype(dtype).itemsize


class _Lanes(types.Type):
    """A vector of numbers."""

    def __init__(self, dtype):
        self.dtype, self.count = dtype, 8 * _BYTES // dtype.bitwidth
        super().__init__(name=f"Lanes({dtype} x {self.count})")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        element = dmm.lookup(fe_type.dtype).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, fe_type.count))


def lane_count(array):
    """Return how many lanes the vectors of an array have, in compiled functions."""
    return lanes(array.dtype)


@overload(lane_count)
def _lane_count_of(array):
    count = lanes(numpy_support.as_dtype(array.dtype))
    return lambda array: count


# -- Memory ----------------------------------------------------------------------------------------


def _pointer(context, builder, array_type, array, index, vector=None):
    """Return the address of ``array[index]``, of a vector if its type is given."""
    data = context.make_array(array_type)(context, builder, array).data
    place = builder.gep(data, [index])
    return place if vector is None else builder.bitcast(place, vector.as_pointer())


@intrinsic
def load(typingctx, array, index):
    """Return the vector that begins at ``array[index]``."""
    vector = _Lanes(array.dtype)

    def codegen(context, builder, signature, args):
        value = context.get_value_type(vector)
        loaded = builder.load(_pointer(context, builder, signature.args[0], *args, value))
        loaded.align = array.dtype.bitwidth // 8
        return loaded

    return vector(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, vector):
    """Write a vector from ``array[index]`` on."""

    def codegen(context, builder, signature, args):
        place = _pointer(context, builder, signature.args[0], *args[:2], args[2].type)
        builder.store(args[2], place).align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


def _broadcast(builder, value, vector):
    """Return a vector of one number."""
    i32 = ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, i32(0))
    every = ir.Constant(ir.VectorType(i32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, first, every)


@intrinsic
def splat(typingctx, array, index):
    """Return a vector of ``array[index]``."""
    vector = _Lanes(array.dtype)

    def codegen(context, builder, signature, args):
        value = builder.load(_pointer(context, builder, signature.args[0], *args))
        return _broadcast(builder, value, context.get_value_type(vector))

    return vector(array, types.intp), codegen


@intrinsic
def number(typingctx, like, value):
    """Return a vector of one number, of the dtype of an array or a vector."""
    vector = like if isinstance(like, _Lanes) else _Lanes(like.dtype)

    def codegen(context, builder, signature, args):
        cast = context.cast(builder, args[1], signature.args[1], vector.dtype)
        return _broadcast(builder, cast, context.get_value_type(vector))

    return vector(like, value), codegen


@intrinsic
def store_square(typingctx, array, index, step, square, count):
    """Write the first `count` of some vectors, `step` apart from ``array[index]`` on."""

    def codegen(context, builder, signature, args):
        array, index, step, square, count = args
        for k in range(len(signature.args[3])):
            with builder.if_then(builder.icmp_signed("<", count.type(k), count), likely=True):
                vector = builder.extract_value(square, k)
                place = builder.add(index, builder.mul(step, step.type(k)))
                to = _pointer(context, builder, signature.args[0], array, place, vector.type)
                builder.store(vector, to).align = signature.args[0].dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, square, types.intp), codegen


@intrinsic
def store_corner(typingctx, array, index, step, square, count, numbers):
    """Write the first numbers of the first `count` of some vectors."""
    dtype = array.dtype

    def codegen(context, builder, signature, args):
        array, index, step, square, count, numbers = args
        vector, i32 = context.get_value_type(signature.args[3].dtype), ir.IntType(32)
        lanes = ir.VectorType(numbers.type, vector.count)
        masks = ir.VectorType(ir.IntType(1), vector.count)
        store = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [vector, vector.as_pointer(), i32, masks]),
            f"llvm.masked.store.v{vector.count}f{dtype.bitwidth}.p0",
        )
        each = ir.Constant(lanes, list(range(vector.count)))
        mask = builder.icmp_signed("<", each, _broadcast(builder, numbers, lanes))
        for k in range(vector.count):
            with builder.if_then(builder.icmp_signed("<", count.type(k), count), likely=True):
                place = builder.add(index, builder.mul(step, step.type(k)))
                to = _pointer(context, builder, signature.args[0], array, place, vector)
                row = builder.extract_value(square, k)
                builder.call(store, [row, to, i32(dtype.bitwidth // 8), mask])
        return context.get_dummy_value()

    signature = types.void(array, types.intp, types.intp, square, types.intp, types.intp)
    return signature, codegen


@intrinsic
def keep_less(typingctx, a, b, square):
    """Return vectors that have their numbers in the lanes where ``a < b``, else 0."""

    def codegen(context, builder, signature, args):
        less = builder.fcmp_ordered("<", *args[:2])
        zero = ir.Constant(args[0].type, [0.0] * args[0].type.count)
        kept = [
            builder.select(less, builder.extract_value(args[2], k), zero)
            for k in range(len(signature.args[2]))
        ]
        return context.make_tuple(builder, signature.return_type, kept)

    return square(a, b, square), codegen


@intrinsic
def transpose(typingctx, rows):
    """Return as many vectors as one has lanes, transposed."""
    count = len(rows)

    def codegen(context, builder, signature, args):
        vectors = [builder.extract_value(args[0], k) for k in range(count)]
        places = ir.VectorType(ir.IntType(32), count)
        distance = 1
        while distance < count:
            for k in range(count):
                if k & distance:
                    continue
                a, b = vectors[k], vectors[k + distance]
                # Lanes of the second vector are counted on from those of the first.
                low = [n if not n & distance else count + n - distance for n in range(count)]
                high = [n + distance if not n & distance else count + n for n in range(count)]
                vectors[k] = builder.shuffle_vector(a, b, ir.Constant(places, low))
                vectors[k + distance] = builder.shuffle_vector(a, b, ir.Constant(places, high))
            distance *= 2
        return context.make_tuple(builder, signature.return_type, vectors)

    return rows(rows), codegen


def load_square(array, index, step):
    """Return as many vectors as one has lanes, `step` apart from ``array[index]`` on."""


@overload(load_square, inline="always")
def _load_square_of(array, index, step):
    if _BYTES // (array.dtype.bitwidth // 8) == 16:
        return lambda array, index, step: (
            load_rows(array, index, step) + load_rows(array, index + 8 * step, step)
        )
    if _BYTES // (array.dtype.bitwidth // 8) == 8:
        return lambda array, index, step: load_rows(array, index, step)
    return lambda array, index, step: load_rows(array, index, step)[:4]


# -- Arithmetic ------------------------------------------------------------------------------------


def _operation(name):
    """Return an intrinsic of two vectors; a product may be fused with the sum it is part of."""

    @intrinsic
    def operation(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, name)(*args, flags=("contract",))

        return a(a, b), codegen

    return operation


def _overload(function, operation):
    @overload(function)
    def implementation(a, b):
        if isinstance(a, _Lanes) and a == b:
            return lambda a, b: operation(a, b)
        return None


for _function, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _overload(_function, _operation(_name))


def _llvm(builder, name, vector, args):
    """Call one of LLVM's functions of vectors."""
    bits = 32 if isinstance(vector.element, ir.FloatType) else 64
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(vector, [vector] * len(args)),
        f"llvm.{name}.v{vector.count}f{bits}",
    )
    return builder.call(function, args)


@intrinsic
def fma(typingctx, a, b, c):
    """Return ``a·b + c``, rounded once."""

    def codegen(context, builder, signature, args):
        return _llvm(builder, "fma", args[0].type, args)

    return a(a, b, c), codegen


@intrinsic
def _abs(typingctx, x):
    def codegen(context, builder, signature, args):
        return _llvm(builder, "fabs", args[0].type, args)

    return x(x), codegen


@intrinsic
def _negative(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.fneg(args[0])

    return x(x), codegen


@intrinsic
def _copysign(typingctx, x, sign):
    def codegen(context, builder, signature, args):
        return _llvm(builder, "copysign", args[0].type, args)

    return x(x, sign), codegen


def _selection(comparison):
    """Return an intrinsic ``c if a <comparison> b else d``; no NaN compares."""

    @intrinsic
    def selection(typingctx, a, b, c, d):
        def codegen(context, builder, signature, args):
            return builder.select(builder.fcmp_ordered(comparison, *args[:2]), *args[2:])

        return c(a, b, c, d), codegen

    return selection


less_or = _selection("<")


@njit(inline="always")
def keep_positive(x, y):
    """Return `y` where `x` is positive or NaN, else 0."""
    zero = number(x, 0.0)
    return _at_most(x, zero, zero, y)


_at_most = _selection("<=")


@intrinsic
def total(typingctx, x):
    """Return the sum over all lanes, added in pairs."""

    def codegen(context, builder, signature, args):
        parts = args[0]
        count = parts.type.count
        while count > 1:
            count //= 2
            halves = [
                builder.shuffle_vector(
                    parts, parts, ir.Constant(ir.VectorType(ir.IntType(32), count), places)
                )
                for places in (list(range(count)), list(range(count, 2 * count)))
            ]
            parts = builder.fadd(*halves)
        return builder.extract_element(parts, ir.IntType(32)(0))

    return x.dtype(x), codegen


@intrinsic
def add_totals(typingctx, out, index, rows):
    """Add the sums over all lanes of eight vectors to eight float64 from ``out[index]`` on."""

    def codegen(context, builder, signature, args):
        vectors = [builder.extract_value(args[2], k) for k in range(8)]
        # Each vector has parts of equal size, one for each of these rows. Two vectors, and then
        # the halves of each part, are added up.
        owners = [[k] for k in range(8)]
        i32, part = ir.IntType(32), vectors[0].type.count
        while part > 1:
            part //= 2
            many = len(vectors) > 1
            pairs = len(vectors) // 2 if many else 1
            added, owned = [], []
            for k in range(pairs):
                a, b = vectors[k], vectors[k + pairs] if many else vectors[k]
                count = a.type.count * (2 if many else 1)
                starts = range(0, count, 2 * part)
                halves = [
                    [start + first + n for start in starts for n in range(part)]
                    for first in (0, part)
                ]
                masks = [ir.Constant(ir.VectorType(i32, len(half)), half) for half in halves]
                added.append(builder.fadd(*(builder.shuffle_vector(a, b, m) for m in masks)))
                owned.append(owners[k] + owners[k + pairs] if many else owners[k])
            vectors, owners = added, owned
        wide = ir.VectorType(ir.DoubleType(), 8)
        element = vectors[0].type.element
        totals = ir.Constant(ir.VectorType(element, 8), ir.Undefined)
        for vector, rows_of in zip(vectors, owners, strict=True):
            for n, row in enumerate(rows_of):
                number = builder.extract_element(vector, i32(n))
                totals = builder.insert_element(totals, number, i32(row))
        if element != wide.element:
            totals = builder.fpext(totals, wide)
        place = _pointer(context, builder, signature.args[0], *args[:2], wide)
        before = builder.load(place)
        before.align = 8
        builder.store(builder.fadd(before, totals), place).align = 8
        return context.get_dummy_value()

    return types.void(out, types.intp, rows), codegen


@intrinsic
def _power(typingctx, shifted):
    """Return ``2ᵏ`` from ``k + 1.5·2ᵖ``, the last bits of which are those of the integer `k`.

    Any bits at all give a number, so NaN does no harm.
    """
    bits, mantissa = shifted.dtype.bitwidth, 23 if shifted.dtype.bitwidth == 32 else 52

    def codegen(context, builder, signature, args):
        integers = ir.VectorType(ir.IntType(bits), shifted.count)
        bias = (1 << (bits - mantissa - 2)) - 1
        k = builder.add(
            builder.bitcast(args[0], integers), ir.Constant(integers, [bias] * shifted.count)
        )
        k = builder.shl(k, ir.Constant(integers, [mantissa] * shifted.count))
        return builder.bitcast(k, args[0].type)

    return shifted(shifted), codegen


# -- Functions -------------------------------------------------------------------------------------
#
# x = k·ln 2 + r with |r| ≤ ln 2 / 2, and expm1(r) by its Taylor series, whose next term is below a
# quarter of an ulp. The two parts of ln 2 are such that the product of k and the first is exact.


def _shift(x):
    """1.5·2ᵖ, to which adding a number rounds it to an integer."""


@overload(_shift)
def _shift_of(x):
    value = 1.5 * 2.0 ** (23 if x.dtype.bitwidth == 32 else 52)
    return lambda x: number(x, value)


def _series(r):
    """``(expm1(r) - r) / r²``."""


@overload(_series, inline="always")
def _series_of(r):
    if r.dtype.bitwidth == 32:

        def series(r):
            q = fma(number(r, 1 / 5040), r, number(r, 1 / 720))
            q = fma(q, r, number(r, 1 / 120))
            q = fma(q, r, number(r, 1 / 24))
            q = fma(q, r, number(r, 1 / 6))
            return fma(q, r, number(r, 1 / 2))

        return series

    def series(r):
        q = fma(number(r, 1 / 6227020800), r, number(r, 1 / 479001600))
        q = fma(q, r, number(r, 1 / 39916800))
        q = fma(q, r, number(r, 1 / 3628800))
        q = fma(q, r, number(r, 1 / 362880))
        q = fma(q, r, number(r, 1 / 40320))
        q = fma(q, r, number(r, 1 / 5040))
        q = fma(q, r, number(r, 1 / 720))
        q = fma(q, r, number(r, 1 / 120))
        q = fma(q, r, number(r, 1 / 24))
        q = fma(q, r, number(r, 1 / 6))
        return fma(q, r, number(r, 1 / 2))

    return series


def _subtract_logarithms(k, x):
    """``x - k·ln 2``."""


@overload(_subtract_logarithms, inline="always")
def _subtract_logarithms_of(k, x):
    if x.dtype.bitwidth == 32:
        high, low = -0.693145751953125, -1.42860682030941723212e-6
    else:
        high, low = -6.93147180369123816490e-01, -1.90821492927058770002e-10
    return lambda k, x: fma(k, number(x, low), fma(k, number(x, high), x))


@njit(inline="always")
def _expm1(x):
    """Return ``2ᵏ``, ``p`` and an addition to `p` below its last place: ``exp(x) = 2ᵏ·(1 + p)``."""
    shift = _shift(x)
    shifted = fma(x, number(x, 1.4426950408889634), shift)
    r = _subtract_logarithms(shifted - shift, x)
    q, square = _series(r), r * r
    p = fma(q, square, r)
    return _power(shifted), p, fma(q, square, r - p)


def _largest(x):
    """Beyond which tanh is 1 and sigmoid 0 or 1 but for a rounding, or below all normal numbers."""


@overload(_largest)
def _largest_of(x):
    values = (10.0, 87.33) if x.dtype.bitwidth == 32 else (20.0, 708.39)
    return lambda x: values


@njit(inline="always")
def tanh(x):
    """Return ``tanh(x)``, with the sign of `x`.

    That is ``e / (e + 2)`` with ``e = expm1(2|x|)``, corrected by what each rounding left out; and
    ``1 - 2 / (e + 2)`` where `e` is so large that the last subtraction is the only one that counts.
    """
    most, one, two = number(x, _largest(x)[0]), number(x, 1.0), number(x, 2.0)
    # NaN stays.
    a = less_or(most, _abs(x), most, _abs(x))
    power, p, more = _expm1(a + a)
    e = fma(power, p, power - one)
    d = e + two
    y = less_or(e, number(x, 8.0), e, two) / d
    e_more = fma(power, p, (power - one) - e) + power * more
    d_more = (e - (d - two)) + e_more
    rest = fma(_negative(y), d, e) + fma(_negative(y), d_more, e_more)
    # 1 / d = (1 - y) / 2
    corrected = fma(rest, fma(number(x, -0.5), y, number(x, 0.5)), y)
    return _copysign(less_or(e, number(x, 8.0), corrected, one - y), x)


@njit(inline="always")
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``, and 0 where that is below all normal numbers."""
    most = number(x, _largest(x)[1])
    zero, one = number(x, 0.0), number(x, 1.0)
    least = zero - most
    # NaN stays.
    a = less_or(most, x, most, x)
    b = less_or(a, least, least, a)
    power, p, _ = _expm1(zero - b)
    return less_or(a, least, zero, one / (one + fma(power, p, power)))


# -- Eight rows at once ----------------------------------------------------------------------------


@njit(inline="always")
def splat_rows(array, index):
    """Return eight vectors, of eight neighbours from ``array[index]`` on."""
    return (
        splat(array, index),
        splat(array, index + 1),
        splat(array, index + 2),
        splat(array, index + 3),
        splat(array, index + 4),
        splat(array, index + 5),
        splat(array, index + 6),
        splat(array, index + 7),
    )


@njit(inline="always")
def load_rows(array, index, step):
    """Return eight vectors, which begin `step` apart from ``array[index]`` on."""
    return (
        load(array, index),
        load(array, index + step),
        load(array, index + 2 * step),
        load(array, index + 3 * step),
        load(array, index + 4 * step),
        load(array, index + 5 * step),
        load(array, index + 6 * step),
        load(array, index + 7 * step),
    )


@njit(inline="always")
def store_rows(array, index, step, rows, count):
    """Write the first `count` of eight vectors, which begin `step` apart."""
    if count >= 8:
        store(array, index, rows[0])
        store(array, index + step, rows[1])
        store(array, index + 2 * step, rows[2])
        store(array, index + 3 * step, rows[3])
        store(array, index + 4 * step, rows[4])
        store(array, index + 5 * step, rows[5])
        store(array, index + 6 * step, rows[6])
        store(array, index + 7 * step, rows[7])
        return
    store(array, index, rows[0])
    if count > 1:
        store(array, index + step, rows[1])
    if count > 2:
        store(array, index + 2 * step, rows[2])
    if count > 3:
        store(array, index + 3 * step, rows[3])
    if count > 4:
        store(array, index + 4 * step, rows[4])
    if count > 5:
        store(array, index + 5 * step, rows[5])
    if count > 6:
        store(array, index + 6 * step, rows[6])


@njit(inline="always")
def add_products(weights, index, vector, sums):
    """Return eight sums, to each of which one of eight neighbours, times the vector, was added."""
    return (
        fma(splat(weights, index), vector, sums[0]),
        fma(splat(weights, index + 1), vector, sums[1]),
        fma(splat(weights, index + 2), vector, sums[2]),
        fma(splat(weights, index + 3), vector, sums[3]),
        fma(splat(weights, index + 4), vector, sums[4]),
        fma(splat(weights, index + 5), vector, sums[5]),
        fma(splat(weights, index + 6), vector, sums[6]),
        fma(splat(weights, index + 7), vector, sums[7]),
    )


@njit(inline="always")
def add_outer_products(rows, vector, sums):
    """Return eight sums, to each of which one of eight vectors, times another, was added."""
    return (
        fma(rows[0], vector, sums[0]),
        fma(rows[1], vector, sums[1]),
        fma(rows[2], vector, sums[2]),
        fma(rows[3], vector, sums[3]),
        fma(rows[4], vector, sums[4]),
        fma(rows[5], vector, sums[5]),
        fma(rows[6], vector, sums[6]),
        fma(rows[7], vector, sums[7]),
    )


@njit(inline="always")
def add_rows(rows, sums):
    """Return eight sums, to each of which one of eight vectors was added."""
    return (
        rows[0] + sums[0],
        rows[1] + sums[1],
        rows[2] + sums[2],
        rows[3] + sums[3],
        rows[4] + sums[4],
        rows[5] + sums[5],
        rows[6] + sums[6],
        rows[7] + sums[7],
    )
