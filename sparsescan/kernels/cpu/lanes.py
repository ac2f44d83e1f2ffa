"""Vectors of neighbouring numbers, and functions of them.

Every operation of vectors is one instruction. Loops over numbers would leave it to the compiler
whether they become such instructions, which it decides anew for every loop.

Vectors are values of compiled functions only; ``+ - * /`` work on them. Where a function takes an
array it also takes a pointer, a ``numba.types.CPointer``, from which on it counts.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import (
    intrinsic,
    lower_builtin,
    models,
    overload,
    register_model,
    type_callable,
)
from numba.np import numpy_support

from ..compile import njit

# A register: 64 bytes with AVX-512, else 32.
_BYTES = 64 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 32
# Where samples are lanes, 32: a batch of 16 is enough for two threads. Where they are those of two
# rows, 64: the lanes of a sample, one of each row, are neighbours.
_SAMPLE_BYTES, _PAIR_BYTES = 32, 64


def lanes(dtype: np.dtype) -> int:
    """Return how many numbers of this dtype a vector has."""
    return _BYTES // np.dtype(dtype).itemsize


def sample_lanes(dtype: np.dtype) -> int:
    """Return how many samples are in a vector where samples are lanes."""
    return _SAMPLE_BYTES // np.dtype(dtype).itemsize


class _Lanes(types.Type):
    """A vector of numbers."""

    def __init__(self, dtype, size=_BYTES):
        self.dtype, self.count = dtype, 8 * size // dtype.bitwidth
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


def sample_count(array):
    """Return how many samples are in a vector, in compiled functions."""
    return sample_lanes(array.dtype)


@overload(sample_count)
def _sample_count_of(array):
    count = sample_lanes(numpy_support.as_dtype(array.dtype))
    return lambda array: count


# -- Memory ----------------------------------------------------------------------------------------


def _pointer(context, builder, array_type, array, index, vector=None):
    """Return the address of ``array[index]``, of a vector if its type is given."""
    if isinstance(array_type, types.CPointer):
        data = array
    else:
        data = context.make_array(array_type)(context, builder, array).data
    place = builder.gep(data, [index])
    return place if vector is None else builder.bitcast(place, vector.as_pointer())


def _loading(size):
    """Return an intrinsic of an array and an index: the vector of so many bytes there."""

    @intrinsic
    def load(typingctx, array, index):
        vector = _Lanes(array.dtype, size)

        def codegen(context, builder, signature, args):
            value = context.get_value_type(vector)
            loaded = builder.load(_pointer(context, builder, signature.args[0], *args, value))
            loaded.align = array.dtype.bitwidth // 8
            return loaded

        return vector(array, types.intp), codegen

    return load


load, load_samples = _loading(_BYTES), _loading(_SAMPLE_BYTES)


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


def _splatting(size):
    """Return an intrinsic of an array and an index: a vector of the number there."""

    @intrinsic
    def splat(typingctx, array, index):
        vector = _Lanes(array.dtype, size)

        def codegen(context, builder, signature, args):
            value = builder.load(_pointer(context, builder, signature.args[0], *args))
            return _broadcast(builder, value, context.get_value_type(vector))

        return vector(array, types.intp), codegen

    return splat


splat, splat_samples = _splatting(_BYTES), _splatting(_SAMPLE_BYTES)


@intrinsic
def item(typingctx, array, index):
    """Return ``array[index]`` of an index that is not negative, which Numba would have to ask."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), codegen


@intrinsic
def put_four(typingctx, out, index, array, places):
    """Write the numbers at four places, none of them negative, from ``out[index]`` on."""

    def codegen(context, builder, signature, args):
        out, index, array, places = args
        vector = ir.VectorType(context.get_value_type(signature.args[2].dtype), 4)
        four = ir.Constant(vector, ir.Undefined)
        for k in range(4):
            place = builder.extract_value(places, k)
            number = builder.load(_pointer(context, builder, signature.args[2], array, place))
            four = builder.insert_element(four, number, ir.IntType(32)(k))
        to = _pointer(context, builder, signature.args[0], out, index, vector)
        builder.store(four, to).align = _align(vector)
        return context.get_dummy_value()

    return types.void(out, types.intp, array, places), codegen


@intrinsic
def load_some(typingctx, array, index, count):
    """Return the vector that begins at ``array[index]``, of which only `count` lanes are read."""
    vector = _Lanes(array.dtype)

    def codegen(context, builder, signature, args):
        array, index, count = args
        value = context.get_value_type(vector)
        place = _pointer(context, builder, signature.args[0], array, index, value)
        return _masked_load(builder, place, _first_lanes(builder, count, value))

    return vector(array, types.intp, types.intp), codegen


def _masked_load(builder, place, mask):
    """Return a vector of the lanes in a mask, 0 in the others."""
    value, align = place.type.pointee, ir.IntType(32)
    bits = 8 * _align(value)
    name = f"llvm.masked.load.v{value.count}f{bits}.p0"
    shape = [value.as_pointer(), align, mask.type, value]
    load = cgutils.get_or_insert_function(builder.module, ir.FunctionType(value, shape), name)
    zero = ir.Constant(value, [0.0] * value.count)
    return builder.call(load, [place, align(bits // 8), mask, zero])


@intrinsic
def store_some(typingctx, array, index, vector, count):
    """Write the first `count` lanes of a vector from ``array[index]`` on."""

    def codegen(context, builder, signature, args):
        array, index, vector, count = args
        bits, shape = signature.args[0].dtype.bitwidth, vector.type
        place = _pointer(context, builder, signature.args[0], array, index, shape)
        whole = builder.icmp_signed(">=", count, count.type(shape.count))
        # Memory that was written with a mask is slow to read again at once.
        with builder.if_else(whole, likely=True) as (then, otherwise):
            with then:
                builder.store(vector, place).align = bits // 8
            with otherwise:
                _masked_store(builder, vector, place, _first_lanes(builder, count, shape))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector, types.intp), codegen


@njit(_nrt=False, forceinline=True)
def store_both(first, at, second, to, vector, count, room):
    """Write what :func:`load_either` loads: some lanes to the first, and if not all to the second.

    There are `room` numbers in the second.
    """
    store_some(first, at, vector, count)
    if count < lane_count(second):
        store_some(second, to, vector, room)


@njit(_nrt=False, forceinline=True)
def load_either(first, at, second, to, count):
    """Return a vector from the first, or from the second unless all its lanes are in the first."""
    return load(second, to) if count < lane_count(second) else load(first, at)


def _masked_store(builder, vector, place, mask):
    """Write the lanes of a vector that are in a mask."""
    bytes_, align = _align(vector.type), ir.IntType(32)
    name = f"llvm.masked.store.v{vector.type.count}f{8 * bytes_}.p0"
    kinds = [vector.type, place.type, align, mask.type]
    shape = ir.FunctionType(ir.VoidType(), kinds)
    store = cgutils.get_or_insert_function(builder.module, shape, name)
    builder.call(store, [vector, place, align(bytes_), mask])


def _first_lanes(builder, count, vector):
    """Return a mask of the first `count` lanes, by a comparison of as few bytes as they have."""
    most, short = count.type(vector.count), ir.IntType(32)
    count = builder.select(builder.icmp_signed("<", count, most), count, most)
    lanes = ir.VectorType(short, vector.count)
    each = ir.Constant(lanes, list(range(vector.count)))
    return builder.icmp_signed("<", each, _broadcast(builder, builder.trunc(count, short), lanes))


@intrinsic
def keep_some(typingctx, vector, count):
    """Return a vector with 0 behind its first `count` lanes, whatever is there."""

    def codegen(context, builder, signature, args):
        vector, count = args
        zero = ir.Constant(vector.type, [0.0] * vector.type.count)
        return builder.select(_first_lanes(builder, count, vector.type), vector, zero)

    return vector(vector, types.intp), codegen


@intrinsic
def number(typingctx, like, value):
    """Return a vector of one number, of the dtype of an array or a vector."""
    vector = like if isinstance(like, _Lanes) else _Lanes(like.dtype)

    def codegen(context, builder, signature, args):
        cast = context.cast(builder, args[1], signature.args[1], vector.dtype)
        return _broadcast(builder, cast, context.get_value_type(vector))

    return vector(like, value), codegen


def _square_loading(size, height=_SAMPLE_BYTES):
    """Return an intrinsic that loads as many vectors of a size as numbers have a height, in bytes.

    A vector is meant for each of the samples of one, and in a full square for each of its lanes.
    """

    @intrinsic
    def load_square(typingctx, array, index, step, rows, count):
        """Return vectors that are `step` apart from ``array[index]`` on.

        Only the first `count` lanes of the first `rows` are read, and all others are 0.
        """
        vector = _Lanes(array.dtype, size)
        samples = _Lanes(array.dtype, height).count
        square = types.UniTuple(vector, samples)

        def codegen(context, builder, signature, args):
            array, index, step, rows, count = args
            value = context.get_value_type(vector)
            vectors = [cgutils.alloca_once(builder, value) for _ in range(samples)]
            first = _pointer(context, builder, signature.args[0], array, index)

            def load(k, mask):
                at = builder.mul(step, step.type(k))
                builder.store(_load_at(builder, first, at, value, mask), vectors[k])

            _for_rows(builder, value, samples, rows, count, load)
            return context.make_tuple(builder, square, [builder.load(each) for each in vectors])

        return square(array, *[types.intp] * 4), codegen

    return load_square


load_square, load_pair_square = _square_loading(_SAMPLE_BYTES), _square_loading(_PAIR_BYTES)
load_full_square = _square_loading(_BYTES, _BYTES)


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
            place = _pointer(context, builder, signature.args[0], array, at, value)
            if mask is None:
                builder.store(vectors[k], place).align = _align(value)
            else:
                _masked_store(builder, vectors[k], place, mask)

        _for_rows(builder, value, len(vectors), rows, count, store)
        return context.get_dummy_value()

    array_type = array
    return types.void(array, types.intp, types.intp, square, types.intp, types.intp), codegen


@intrinsic
def add_squares(typingctx, a, b):
    """Return the sums of as many vectors."""

    def codegen(context, builder, signature, args):
        parts = [[builder.extract_value(each, k) for each in args] for k in range(len(a))]
        sums = [builder.fadd(*each) for each in parts]
        return context.make_tuple(builder, signature.return_type, sums)

    return a(a, b), codegen


def _for_rows(builder, vector, most, rows, count, do):
    """Call ``do(k, mask)`` for all rows of a square; the mask is None where all of it is meant."""
    size, lanes = rows.type(most), rows.type(vector.count)
    whole = builder.and_(
        builder.icmp_signed(">=", rows, size), builder.icmp_signed(">=", count, lanes)
    )
    with builder.if_else(whole, likely=True) as (then, otherwise):
        with then:
            for k in range(most):
                do(k, None)
        with otherwise:
            mask = _first_lanes(builder, count, vector)
            none = ir.Constant(mask.type, None)
            for k in range(most):
                do(k, builder.select(builder.icmp_signed(">", rows, size.type(k)), mask, none))


@intrinsic
def transpose(typingctx, rows):
    """Return as many vectors, transposed; lanes of which a vector has more stay neighbours."""
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
                # Lanes of the second vector are counted on from those of the first.
                low = [n if not n & jump else lanes + n - jump for n in range(lanes)]
                high = [n + jump if not n & jump else lanes + n for n in range(lanes)]
                vectors[k] = _shuffle(builder, a, b, low)
                vectors[k + distance] = _shuffle(builder, a, b, high)
            distance *= 2
        return context.make_tuple(builder, signature.return_type, vectors)

    return rows(rows), codegen


# -- Arithmetic ------------------------------------------------------------------------------------


def _operation(function, name):
    """Let an operator work on two vectors; a product may be fused with the sum it is part of."""

    @type_callable(function)
    def typed(context):
        return lambda a, b: a if isinstance(a, _Lanes) and a == b else None

    @lower_builtin(function, _Lanes, _Lanes)
    def operation(context, builder, signature, args):
        return getattr(builder, name)(*args, flags=("contract",))


_operation(operator.add, "fadd")
_operation(operator.sub, "fsub")
_operation(operator.mul, "fmul")
_operation(operator.truediv, "fdiv")


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
def total(typingctx, x):
    """Return the sum over all lanes, added in pairs."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(_totals(builder, args), ir.IntType(32)(0))

    return x.dtype(x), codegen


@intrinsic
def add_to(typingctx, array, index, vector):
    """Add a vector to the numbers from ``array[index]`` on, whose dtype may be a wider one."""

    def codegen(context, builder, signature, args):
        place = _pointer(context, builder, signature.args[0], *args[:2])
        _add_in_place(builder, place, args[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def put_in(typingctx, array, index, vector):
    """Write a vector to the numbers from ``array[index]`` on, whose dtype may be a wider one."""

    def codegen(context, builder, signature, args):
        place = _pointer(context, builder, signature.args[0], *args[:2])
        place, wide = _widened(builder, place, args[2])
        builder.store(wide, place).align = _align(wide.type)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


def _add_in_place(builder, place, vector):
    """Add a vector to the numbers from a pointer on, whose type may be a wider one."""
    place, added = _widened(builder, place, vector)
    before = builder.load(place)
    before.align = _align(added.type)
    builder.store(builder.fadd(before, added), place).align = _align(added.type)


def _widened(builder, place, vector):
    """Return a pointer to vectors of its numbers, and a vector of such."""
    wide = ir.VectorType(place.type.pointee, vector.type.count)
    same = wide == vector.type
    return builder.bitcast(place, wide.as_pointer()), (
        vector if same else builder.fpext(vector, wide)
    )


# -- Functions -------------------------------------------------------------------------------------


class _Term:
    """A vector in a formula: what is done with it is written as code.

    Floats become vectors of them, and comparisons give masks, in which no NaN compares.
    """

    def __init__(self, builder, value):
        self.builder, self.value = builder, value
        self.kind = value.type
        self.is_float = not isinstance(self.kind.element, ir.IntType)

    @property
    def bits(self):
        """Return how many bits a number has."""
        return 8 * _align(self.kind) if self.is_float else self.kind.element.width

    @property
    def mantissa(self):
        """Return how many of these are behind the point."""
        return self.by_size(23, 52)

    @property
    def bias(self):
        """Return what exponents are stored with."""
        return (1 << (self.bits - self.mantissa - 2)) - 1

    def bits_of(self, value):
        """Return the bits of a number, as an integer."""
        floats, integers = self.by_size((np.float32, np.int32), (np.float64, np.int64))
        return int(floats(value).view(integers))

    def by_size(self, single, double):
        """Return one of two, the second for float64."""
        return single if self.bits == 32 else double

    def made(self, value):
        """Return a value that was made of this one."""
        return _Term(self.builder, value)

    def constant(self, value):
        """Return a vector of one number."""
        return ir.Constant(self.kind, [value] * self.kind.count)

    def number(self, value):
        """Return a vector of one number, of the type of this one."""
        return self.made(self.constant(value))

    def called(self, name, *others):
        """Return what a function of LLVM gives."""
        args = [self.value, *map(self._value, others)]
        return self.made(_llvm(self.builder, name, self.kind, args))

    def as_integers(self):
        """Return the bits of each number."""
        kind = ir.VectorType(ir.IntType(self.bits), self.kind.count)
        return self.made(self.builder.bitcast(self.value, kind))

    def as_floats(self):
        """Return the numbers of these bits."""
        element = ir.FloatType() if self.bits == 32 else ir.DoubleType()
        kind = ir.VectorType(element, self.kind.count)
        return self.made(self.builder.bitcast(self.value, kind))

    def _value(self, other):
        return other.value if isinstance(other, _Term) else self.constant(other)

    def _arithmetic(self, name, a, b):
        if self.is_float:
            return self.made(getattr(self.builder, f"f{name}")(a, b, flags=("contract",)))
        return self.made(getattr(self.builder, name)(a, b))

    def __add__(self, other):
        return self._arithmetic("add", self.value, self._value(other))

    __radd__ = __add__

    def __sub__(self, other):
        return self._arithmetic("sub", self.value, self._value(other))

    def __rsub__(self, other):
        return self._arithmetic("sub", self._value(other), self.value)

    def __mul__(self, other):
        return self._arithmetic("mul", self.value, self._value(other))

    def __truediv__(self, other):
        return self._arithmetic("div", self.value, self._value(other))

    def __rtruediv__(self, other):
        return self._arithmetic("div", self._value(other), self.value)

    def __abs__(self):
        return self.called("fabs")

    def __and__(self, other):
        return self.made(self.builder.and_(self.value, self._value(other)))

    def __xor__(self, other):
        return self.made(self.builder.xor(self.value, self._value(other)))

    def __lshift__(self, other):
        return self.made(self.builder.shl(self.value, self._value(other)))

    def __rshift__(self, other):
        return self.made(self.builder.lshr(self.value, self._value(other)))

    def _compared(self, comparison, other):
        compare = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_signed
        return self.made(compare(comparison, self.value, self._value(other)))

    def equals(self, other):
        """Return where the numbers are equal."""
        return self._compared("==", other)

    def __lt__(self, other):
        return self._compared("<", other)

    def __le__(self, other):
        return self._compared("<=", other)

    def __gt__(self, other):
        return self._compared(">", other)

    def __ge__(self, other):
        return self._compared(">=", other)

    def chosen(self, a, b):
        """Return `a` where this mask is set, else `b`; one of both is a vector."""
        like = a if isinstance(a, _Term) else b
        return self.made(self.builder.select(self.value, like._value(a), like._value(b)))


def _fma(a, b, c):
    return a.called("fma", b, c)


def _polynomial(x, *coefficients):
    """Return ``coefficients[0] + coefficients[1]·x + …``."""
    *others, sum_ = coefficients
    sum_ = x.number(sum_)
    for each in reversed(others):
        sum_ = _fma(sum_, x, each)
    return sum_


def _of_vectors(formula):
    """Return an intrinsic of vectors of one type, whose code is written by a formula of terms.

    A module has that code once: it becomes part of the functions that call it when these are
    optimised.
    """
    signature = inspect.signature(formula)

    def write(context, builder, signature, args):
        kind = args[0].type
        name = f"sparsescan.{formula.__name__}.{kind}"
        function = builder.module.globals.get(name)
        if function is None:
            shape = ir.FunctionType(kind, [kind] * len(args))
            function = ir.Function(builder.module, shape, name)
            function.linkage = "internal"
            function.attributes.add("alwaysinline")
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            inner.ret(formula(*(_Term(inner, arg) for arg in function.args)).value)
        return builder.call(function, args)

    def typed(typingctx, x, *others):
        if isinstance(x, _Lanes) and all(other == x for other in others):
            return x(x, *others), write
        return None

    typed.__name__, typed.__doc__ = formula.__name__, formula.__doc__
    first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typed.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
    return intrinsic(typed)


@_of_vectors
def keep_positive(x, y):
    """Return `y` where `x` is positive or NaN, else 0."""
    return (x <= 0.0).chosen(0.0, y)


@_of_vectors
def absolute(x):
    """Return ``|x|``."""
    return abs(x)


@_of_vectors
def sqrt(x):
    """Return the square root, rounded once, and NaN of negative numbers."""
    return x.called("sqrt")


@_of_vectors
def minimum(a, b):
    """Return the lesser of two numbers, and NaN if one of them is NaN."""
    return a.equals(a).chosen((a < b).chosen(a, b), a)


@_of_vectors
def maximum(a, b):
    """Return the greater of two numbers, and NaN if one of them is NaN."""
    return a.equals(a).chosen((a > b).chosen(a, b), a)


@_of_vectors
def less(a, b):
    """Return 1 where ``a < b``, else 0."""
    return (a < b).chosen(a.number(1.0), 0.0)


@_of_vectors
def less_equal(a, b):
    """Return 1 where ``a ≤ b``, else 0."""
    return (a <= b).chosen(a.number(1.0), 0.0)


@_of_vectors
def equal(a, b):
    """Return 1 where ``a = b``, else 0."""
    return a.equals(b).chosen(a.number(1.0), 0.0)


@_of_vectors
def where(c, a, b):
    """Return `a` where `c` is not 0, NaN included, else `b`."""
    return c.equals(0.0).chosen(b, a)


# Exponentials: x = k·ln 2 + r with |r| ≤ ln 2 / 2, and expm1(r) by its Taylor series, whose next
# term is below a quarter of an ulp. The two parts of ln 2 are such that the product of k and the
# first is exact.
_LN_2 = (
    (0.693145751953125, 1.42860682030941723212e-6),
    (6.93147180369123816490e-01, 1.90821492927058770002e-10),
)


def _rounding(x):
    """Return ``1.5·2ᵐ``: a number is rounded by adding this, to an integer in the last bits."""
    return 1.5 * 2.0**x.mantissa


def _expm1(x):
    """Return ``k`` and ``p``: ``exp(x) = 2ᵏ·(1 + p)``; `k` are the last bits of integers."""
    rounded = _fma(x, 1 / math.log(2), _rounding(x))
    k = rounded - _rounding(x)
    high, low = x.by_size(*_LN_2)
    r = _fma(k, -low, _fma(k, -high, x))
    series = _polynomial(r, *(1 / math.factorial(n) for n in range(2, x.by_size(8, 14))))
    return rounded.as_integers(), _fma(series, r * r, r)


def _power_of_two(k):
    """Return ``2ᵏ``; any bits at all give a number, so NaN does no harm."""
    return ((k + k.bias) << k.mantissa).as_floats()


def _exp_of_less(x):
    """Return ``exp(x)`` of numbers that are not too large for it, and anything of others."""
    k, p = _expm1(x)
    e = ((1.0 + p).as_integers() + (k << k.mantissa)).as_floats()
    return (x < x.by_size(-87.33654, -708.3964185322641)).chosen(0.0, e)


@_of_vectors
def exp(x):
    """Return ``exp(x)`` within 1.1 ulps, and 0 where that is below all normal numbers."""
    # The greatest numbers with a finite result. NaN stays.
    is_less = x <= x.by_size(88.72283, 709.782712893384)
    return is_less.chosen(_exp_of_less(x), x + math.inf)


@_of_vectors
def tanh(x):
    """Return ``tanh(x)``, with the sign of `x`: ``e / (e + 2)`` with ``e = expm1(2|x|)``."""
    a = abs(x)
    # NaN stays.
    a = (a > 20.0).chosen(20.0, a)
    k, p = _expm1(a + a)
    power = _power_of_two(k)
    e = _fma(power, p, power - 1.0)
    return (e / (e + 2.0)).called("copysign", x)


@_of_vectors
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``, and 0 where that is below all normal numbers."""
    # Beyond this it is 0 or 1 but for a rounding, or below all normal numbers.
    most = x.by_size(87.33, 708.39)
    # NaN stays.
    a = (x > most).chosen(most, x)
    k, p = _expm1(0.0 - (a < -most).chosen(-most, a))
    power = _power_of_two(k)
    return (a < -most).chosen(0.0, 1.0 / (1.0 + _fma(power, p, power)))


@_of_vectors
def expm1(x):
    """Return ``exp(x) - 1`` within two ulps."""
    # Below these the result is -1. NaN stays.
    least = x.by_size(-30.0, -60.0)
    a = (x < least).chosen(x.number(least), x)
    k, p = _expm1(a)
    power = _power_of_two(k)
    # Beyond 40 it is exp(x).
    is_less = x <= x.by_size(88.72283, 709.782712893384)
    large = is_less.chosen(_exp_of_less(x), x + math.inf)
    return (x <= 40.0).chosen(_fma(power, p, power - 1.0), large).called("copysign", x)


# Logarithms: x = 2ᵏ·(1 + f) with √½ ≤ 1 + f < √2. log(1 + f) is 2·artanh(s) with s = f / (2 + f).
# The first term of that is 2s = f - f²/2 + s·f²/2; the one left out is below a quarter of an ulp.


def _split(x):
    """Return ``k``, with a bias, and ``f``: ``x = 2ᵏ·(1 + f)``, of positive normal numbers."""
    half = x.bits_of(math.sqrt(0.5))
    moved = x.as_integers() + (x.bits_of(1.0) - half)
    f = ((moved & ((1 << x.mantissa) - 1)) + half).as_floats() - 1.0
    return moved >> x.mantissa, f


def _log_of_parts(k, f, rest=None):
    """Return ``log(2ᵏ·(1 + f + rest))``, where `rest` is less than a rounding of `f`."""
    shift = _rounding(f)
    k = (k + f.bits_of(shift)).as_floats() - (shift + k.bias)
    high, low = f.by_size(*_LN_2)
    s = f / (f + 2.0)
    z = s * s
    series = _polynomial(z, *(2 / (2 * n + 3) for n in range(f.by_size(4, 9)))) * z
    half = f * 0.5 * f
    small = s * (half + series) if rest is None else _fma(s, half + series, rest)
    return _fma(k, high, f - (half - _fma(k, low, small)))


def _log1p_of_normal(x):
    """Return ``log(1 + x)`` of finite numbers above -1, of which ``1 + x`` is a normal number."""
    u = x + 1.0
    # x + 1 is the sum of u and its error.
    b = u - 1.0
    error = (x - b) + (1.0 - (u - b))
    k, f = _split(u)
    # 2¹⁻ᵏ may be 0, where the error does not count.
    error = error * (((2 * k.bias + 1 - k) << k.mantissa).as_floats() * 0.5)
    sum_ = f + error
    return _log_of_parts(k, sum_, error - (sum_ - f))


@_of_vectors
def log(x):
    """Return ``log(x)`` within 1.1 ulps; numbers below all normal ones count as 0."""
    # NaN stays.
    y = (x < math.inf).chosen(_log_of_parts(*_split(x)), x)
    tiny = (x < 0.0).chosen(x.number(math.nan), -math.inf)
    return (x < x.by_size(2.0**-126, 2.0**-1022)).chosen(tiny, y)


@_of_vectors
def log1p(x):
    """Return ``log(1 + x)`` within 1.1 ulps, with the sign of `x`."""
    # NaN stays.
    y = (x < math.inf).chosen(_log1p_of_normal(x), x)
    least = (x < -1.0).chosen(x.number(math.nan), -math.inf)
    return (x <= -1.0).chosen(least, y).called("copysign", x)


@_of_vectors
def softplus(x):
    """Return ``log(1 + exp(x))`` within two ulps, and 0 where that is below all normal numbers."""
    # NaN stays.
    return (x < 0.0).chosen(0.0, x) + _log1p_of_normal(_exp_of_less(0.0 - abs(x)))


# Sine and cosine: x = n·π/2 + r with |r| ≤ π/4, and both of r by their Taylor series, whose next
# terms are below a quarter of an ulp. π/2 is the sum of three numbers; that n times the first is
# subtracted from x is exact.
_HALF_PI = (
    (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15),
    (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33),
)
# Up to these n has few enough bits for that.
_FAR = (2.0**15, 2.0**25)


def _sine(x, quarters):
    """Return the sine of so many quarters of a circle and `x`, which is not negative, if near."""
    rounded = _fma(x, 2 / math.pi, _rounding(x))
    n = rounded - _rounding(x)
    r = x
    for part in x.by_size(*_HALF_PI):
        r = _fma(n, -part, r)
    z = r * r
    signed = [(-1) ** (n // 2) / math.factorial(n) for n in range(x.by_size(11, 18))]
    sine = _fma(r * z, _polynomial(z, *signed[3::2]), r)
    cosine = _polynomial(z, *signed[::2])
    n = rounded.as_integers() + quarters
    value = (n & 1).equals(0).chosen(sine, cosine)
    return _flipped(value, (n & 2) << (x.bits - 2))


def _flipped(x, sign):
    """Return a vector with signs changed where the first bits of `sign` are set."""
    return (x.as_integers() ^ sign).as_floats()


def _replaced(x, far, value, name):
    """Return `value`, and where a mask is set, which is rare, what a scalar function of x gives."""
    builder, count = x.builder, x.kind.count
    bits = builder.bitcast(far.value, ir.IntType(count))
    before = builder.block
    with builder.if_then(builder.icmp_unsigned("!=", bits, bits.type(0)), likely=False):
        call = builder.call(_scalars(builder.module, name, x.kind), [x.value])
        replaced = far.chosen(x.made(call), value).value
        there = builder.block
    result = builder.phi(x.kind)
    result.add_incoming(value.value, before)
    result.add_incoming(replaced, there)
    return x.made(result)


def _scalars(module, name, kind):
    """Return a function that calls one of the mathematical library for each lane."""
    own = f"sparsescan.scalars.{name}.{kind}"
    if own not in module.globals:
        function = ir.Function(module, ir.FunctionType(kind, [kind]), own)
        function.linkage = "internal"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        builder.ret(_llvm(builder, name, kind, function.args))
    return module.globals[own]


@_of_vectors
def sin(x):
    """Return ``sin(x)`` within two ulps.

    Beyond 2¹⁵ in float32, and 2²⁵ in float64, it is that of the mathematical library: slow.
    """
    sign = x.as_integers() & -(1 << (x.bits - 1))
    a = abs(x)
    value = _flipped(_sine(a, 0), sign)
    return _replaced(x, a > x.by_size(*_FAR), value, "sin")


@_of_vectors
def cos(x):
    """Return ``cos(x)`` within two ulps.

    Beyond 2¹⁵ in float32, and 2²⁵ in float64, it is that of the mathematical library: slow.
    """
    a = abs(x)
    return _replaced(x, a > x.by_size(*_FAR), _sine(a, 1), "cos")


# -- Products --------------------------------------------------------------------------------------

# A tile of a product is kept in registers: so many vectors for each of so many rows, or fewer.
TILE_VECTORS = 3
TILE_ROWS = 8 if _BYTES == 64 else 4


@intrinsic
def add_tile(
    typingctx,
    out,
    out_at,
    out_step,
    start,
    start_at,
    start_step,
    vectors,
    vectors_at,
    numbers,
    numbers_at,
    numbers_step,
    number_step,
    block_step,
    blocks,
    count,
    part,
    width,
    height,
):
    """Write ``start[n] + Σ numbers[n, k]·vectors[k]`` to the rows ``out[n]`` of a tile.

    Parameters
    ----------
    out, out_at, out_step : array, int, int
        Where the first row begins, and the numbers from one row to the next.
    start, start_at, start_step : array, int, int
        Where the rows of `start` begin, which may be `out`.
    vectors, vectors_at : array, int
        Where ``vectors[0]`` begins, which is as wide as the tile; each has room for `TILE_VECTORS`.
    numbers, numbers_at, numbers_step, number_step, block_step : array, int, int, int, int
        Where ``numbers[0, 0]`` is, and how far it is from there to the next `n`, to the next `k`,
        and to the next block of them.
    blocks, count, part : int
        The `k` are `blocks` blocks of `count`. `part` of a block are summed up before they are
        added to the others, since rounding is least where sums are short.
    width, height : int
        Vectors and rows of the tile; if there are more, only as many as a tile has are taken. The
        rows are filled up to 1, half a tile or a tile.
    """

    def codegen(context, builder, signature, args):
        arrays = {0: args[1], 3: args[4], 6: args[7], 8: args[9]}
        places = [
            _pointer(context, builder, signature.args[k], args[k], at) for k, at in arrays.items()
        ]
        steps = [args[k] for k in (2, 5, 10, 11, 12, 13, 14, 15, 16, 17)]
        vector = context.get_value_type(_Lanes(vectors.dtype))
        builder.call(_tiles(builder.module, vector, steps[0].type), [*places, *steps])
        return context.get_dummy_value()

    places = [types.intp] * 2
    kinds = [out, *places, start, *places, vectors, types.intp, numbers, *[types.intp] * 9]
    return types.void(*kinds), codegen


def _tiles(module, vector, size):
    """Return the function that writes a tile."""

    def write(builder, args, columns, rows):
        steps = _Steps(size(TILE_VECTORS * vector.count), *args[4:])
        _tile(builder, vector, columns, rows, args[:4], steps)

    kinds = [*[vector.element.as_pointer()] * 4, *[size] * 8]
    widths, heights = range(TILE_VECTORS, 0, -1), (TILE_ROWS, TILE_ROWS // 2, 1)
    return _by_shape(module, f"sparsescan.tile.{vector}", kinds, size, widths, heights, write)


def _by_shape(module, name, kinds, size, widths, heights, write):
    """Return a function of arguments, a width and a height, with code for each of both.

    ``write(builder, args, width, height)`` writes that; the height may be more than is needed.
    Inlined it would crowd its callers' registers.
    """
    if name in module.globals:
        return module.globals[name]
    kind = ir.FunctionType(ir.VoidType(), [*kinds, size, size])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    *args, width, height = function.args
    for columns in widths:
        with builder.if_then(builder.icmp_signed(">=", width, size(columns))):
            for rows, fewer in zip(heights, (*heights[1:], 0), strict=True):
                with builder.if_then(builder.icmp_signed(">", height, size(fewer))):
                    write(builder, args, columns, rows)
                    builder.ret_void()
            builder.ret_void()
    builder.ret_void()
    return function


class _Steps(NamedTuple):
    """From each vector, row or number of a tile to the next, and how many numbers there are."""

    vector: ir.Value
    out: ir.Value
    start: ir.Value
    numbers: ir.Value
    number: ir.Value
    block: ir.Value
    blocks: ir.Value
    count: ir.Value
    part: ir.Value


def _tile(builder, vector, columns, rows, places, steps, grain=1):
    """Write a tile of so many vectors and rows.

    With a `grain` of 2 a vector of `vectors` has lanes of two `k` in turn, and one of `out` those
    of two rows.
    """
    out, start, vectors, numbers = places
    count, part = steps.count, steps.part
    size = count.type
    zero = ir.Constant(vector, [0.0] * vector.count)
    sums = [cgutils.alloca_once(builder, vector) for _ in range(rows * columns)]

    firsts = [builder.gep(numbers, [builder.mul(steps.numbers, size(n))]) for n in range(rows)]
    every_block = cgutils.for_range(builder, steps.blocks)
    every_part = cgutils.for_range_slice(builder, size(0), count, part, intp=size, inc=True)
    with every_block as block, every_part as (done, _):
        left = builder.sub(count, done)
        some = builder.select(builder.icmp_signed("<", left, part), left, part)
        before = builder.add(builder.mul(block.index, count), done)
        offset = builder.mul(block.index, steps.block)
        numbers_done = builder.mul(done, size(grain))
        offset = builder.add(offset, builder.mul(numbers_done, steps.number))
        for each in sums:
            builder.store(zero, each)
        with cgutils.for_range(builder, some) as loop:
            k = builder.mul(builder.add(before, loop.index), steps.vector)
            loaded = [
                _load_at(builder, vectors, builder.add(k, size(c * vector.count)), vector)
                for c in range(columns)
            ]
            for part_of in range(grain):
                number = builder.add(builder.mul(loop.index, size(grain)), size(part_of))
                index = builder.add(offset, builder.mul(number, steps.number))
                spread = [_spread(builder, each, part_of, grain) for each in loaded]
                for n, first in enumerate(firsts):
                    factor = _repeat(builder, builder.gep(first, [index]), vector, grain)
                    for c, each in enumerate(spread):
                        to = sums[n * columns + c]
                        added = _llvm(builder, "fma", vector, [factor, each, builder.load(to)])
                        builder.store(added, to)
        begins = builder.icmp_signed("==", before, size(0))
        begin = builder.select(begins, start, out)
        begin_step = builder.select(begins, steps.start, steps.out)
        for n in range(rows):
            for c in range(columns):
                added = builder.load(sums[n * columns + c])
                index = builder.add(builder.mul(begin_step, size(n)), size(c * vector.count))
                added = builder.fadd(_load_at(builder, begin, index, vector), added)
                index = builder.add(builder.mul(steps.out, size(n)), size(c * vector.count))
                place = builder.bitcast(builder.gep(out, [index]), vector.as_pointer())
                builder.store(added, place).align = _align(vector)


def _spread(builder, value, which, grain):
    """Return a vector with the lanes of one of so many rows in the place of those of all."""
    if grain == 1:
        return value
    lanes = [n // grain * grain + which for n in range(value.type.count)]
    return _shuffle(builder, value, value, lanes)


def _repeat(builder, place, vector, grain):
    """Return a vector of so many numbers, from a pointer on, again and again."""
    if grain == 1:
        return _broadcast(builder, builder.load(place), vector)
    some = ir.VectorType(vector.element, grain)
    loaded = builder.load(builder.bitcast(place, some.as_pointer()))
    loaded.align = _align(some)
    return _shuffle(builder, loaded, loaded, [n % grain for n in range(vector.count)])


def _shuffle(builder, a, b, lanes):
    """Return a vector of lanes of two, those of the second counted on from those of the first."""
    places = ir.VectorType(ir.IntType(32), len(lanes))
    return builder.shuffle_vector(a, b, ir.Constant(places, lanes))


# Where samples are lanes, a tile has so many vectors, or fewer by fours.
SAMPLE_VECTORS = 12


def _adding_sample_tile(size, grain):
    """Return an intrinsic of tiles whose vectors have so many bytes, and so many rows."""

    @intrinsic
    def add_sample_tile(
        typingctx, out, out_at, start, start_at, x, x_at, numbers, numbers_at, count, part, height
    ):
        """Write ``start[n] + Σ numbers[n, k]·x[k]`` to the rows of samples ``out[n]`` of a tile.

        Parameters
        ----------
        out, out_at, start, start_at, x, x_at : array, int, array, int, array, int
            Where vectors begin, each of which follows the one before; `start` may be `out`.
        numbers, numbers_at : array, int
            Where ``numbers[0, 0]`` is; ``numbers[:, k]`` are neighbours, one tile at a time.
        count, part : int
            Of so many vectors of `x` so many are summed up before they are added to the others.
        height : int
            Vectors of the tile, a multiple of 4.
        """

        def codegen(context, builder, signature, args):
            places = [
                _pointer(context, builder, signature.args[k], *args[k : k + 2])
                for k in range(0, 8, 2)
            ]
            vector = context.get_value_type(_Lanes(x.dtype, size))
            index = args[-1].type
            step, one = index(vector.count), index(1)

            def write(builder, args, columns, vectors):
                numbers = index(grain), index(grain * vectors)
                steps = _Steps(step, step, step, *numbers, index(0), one, *args[4:])
                _tile(builder, vector, columns, vectors, args[:4], steps, grain)

            kinds = [*[vector.element.as_pointer()] * 4, index, index]
            name, heights = f"sparsescan.samples.{vector}", range(SAMPLE_VECTORS, 0, -4)
            function = _by_shape(builder.module, name, kinds, index, (1,), heights, write)
            builder.call(function, [*places, *args[8:10], one, args[10]])
            return context.get_dummy_value()

        arrays = out, start, x, numbers
        kinds = [kind for array in arrays for kind in (array, types.intp)]
        return types.void(*kinds, *[types.intp] * 3), codegen

    return add_sample_tile


add_sample_tile = _adding_sample_tile(_SAMPLE_BYTES, 1)
add_pair_tile = _adding_sample_tile(_PAIR_BYTES, 2)


# Sums over samples are kept in registers for so many rows and columns, or fewer columns.
SUM_ROWS, SUM_COLUMNS = (8, 3) if _BYTES == 64 else (4, 3)


def _adding_sample_products(size, grain):
    """Return an intrinsic of such sums, of vectors that have so many bytes, and so many rows."""

    @intrinsic
    def add_sample_products(
        typingctx, out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width
    ):
        """Add ``Σ a[t, i]·b[t, j]``, over steps `t` and the samples, to ``out[j, i]``.

        Parameters
        ----------
        out, out_at, out_step : array, int, int
            Where ``out[0, 0]`` is, and how far it is from there to the next `j`; `i` are
            neighbours.
        a, a_at, a_step, b, b_at, b_step : array, int, int, array, int, int
            Where vectors of samples of the first step begin, and how far it is to the next step.
        count, width : int
            How many steps `t` and columns `j` there are, of which as many are taken as vectors of
            `SUM_COLUMNS` have. The rows `i` are `SUM_ROWS`.
        """

        def codegen(context, builder, signature, args):
            places, steps = [], []
            for k in (0, 3, 6):
                places.append(_pointer(context, builder, signature.args[k], *args[k : k + 2]))
                steps.append(args[k + 2])
            vector = context.get_value_type(_Lanes(a.dtype, size))
            index = args[-1].type

            def write(builder, args, columns, rows):
                _sum_products(builder, vector, columns, rows // grain, grain, *args)

            kinds = [*(place.type for place in places), *[index] * 5]
            widths = range(SUM_COLUMNS, 0, -1)
            name = f"sparsescan.sums.{vector}"
            function = _by_shape(builder.module, name, kinds, index, widths, (SUM_ROWS,), write)
            *_, count, width = args
            vectors = builder.sdiv(builder.add(width, index(grain - 1)), index(grain))
            builder.call(function, [*places, *steps, count, width, vectors, index(SUM_ROWS)])
            return context.get_dummy_value()

        kinds = [kind for array in (out, a, b) for kind in (array, types.intp, types.intp)]
        return types.void(*kinds, types.intp, types.intp), codegen

    return add_sample_products


add_sample_products = _adding_sample_products(_SAMPLE_BYTES, 1)
add_pair_products = _adding_sample_products(_PAIR_BYTES, 2)


def _sum_products(
    builder, vector, columns, rows, grain, out, a, b, out_step, a_step, b_step, count, width
):
    """Add the sums for so many vectors of columns and of rows."""
    size = count.type
    zero = ir.Constant(vector, [0.0] * vector.count)
    # For each vector of rows and columns, one with those of the rows in turn.
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * columns * grain)]

    def vectors_at(pointer, step, index, number):
        at = builder.gep(pointer, [builder.mul(step, index)])
        return (_load_at(builder, at, size(k * vector.count), vector) for k in range(number))

    with cgutils.for_range(builder, count) as loop:
        # Turned columns would take more registers than there are.
        loaded = list(vectors_at(b, b_step, loop.index, columns))
        for n, factor in enumerate(vectors_at(a, a_step, loop.index, rows)):
            for turn in range(grain):
                turned = _turned(builder, factor, turn, grain)
                for c, each in enumerate(loaded):
                    to = sums[(n * columns + c) * grain + turn]
                    added = _llvm(builder, "fma", vector, [turned, each, builder.load(to)])
                    builder.store(added, to)
    together = vector.count // grain
    for c in range(columns * grain):
        turn, group = c % grain, c // grain * grain
        first = builder.gep(out, [builder.mul(out_step, size(c))])
        with builder.if_then(builder.icmp_signed(">", width, size(c))):
            for n in range(0, rows, together):
                parts = []
                for m in range(n, min(n + together, rows)):
                    own = [
                        builder.load(sums[m * columns * grain + group + k]) for k in range(grain)
                    ]
                    # For each row `r`, those of its lanes that were multiplied by this column.
                    parts.append(own[0] if grain == 1 else _turn_about(builder, own, turn))
                totals = _totals(builder, parts, grain)
                _add_in_place(builder, builder.gep(first, [size(n * grain)]), totals)


def _turned(builder, value, turn, grain):
    """Return a vector in which each row's lanes are those of the row so many places on."""
    if turn == 0:
        return value
    lanes = [n // grain * grain + (n + turn) % grain for n in range(value.type.count)]
    return _shuffle(builder, value, value, lanes)


def _turn_about(builder, pair, turn):
    """Return the products of one of two columns with two rows in turn.

    A row's are in the first vector if it is the column's own, else in the second, whose rows were
    turned.
    """
    count = pair[0].type.count
    lanes = [n // 2 * 2 + turn + (0 if n % 2 == turn else count) for n in range(count)]
    return _shuffle(builder, *pair, lanes)


def _gathering(places, terms):
    """Return an intrinsic of the sums at so many places, of which so many terms run side by side.

    ``gather(start, x, read_at, weight, offset, a, b)`` is, for each place `p`, ``start + Σ_k
    weight[k]·x[read_at[p] + offset[k]]`` over ``a ≤ k < b``; `read_at` is a tuple. A sum of few
    places would wait for itself after each term.
    """

    @intrinsic
    def gather(typingctx, start, x, read_at, weight, offset, a, b):
        def codegen(context, builder, signature, args):
            start, x, read_at, weight, offset, a, b = args
            vector = start.type
            firsts = [
                _pointer(context, builder, signature.args[1], x, builder.extract_value(read_at, p))
                for p in range(places)
            ]
            sums = _sums([start] * places, terms, builder)

            def add(k, to):
                at = builder.load(_pointer(context, builder, signature.args[4], offset, k))
                number = builder.load(_pointer(context, builder, signature.args[3], weight, k))
                factor = _broadcast(builder, number, vector)
                for first, each in zip(firsts, to, strict=True):
                    args = factor, _load_at(builder, first, at, vector), builder.load(each)
                    builder.store(_llvm(builder, "fma", vector, args), each)

            totals = _add_all(builder, sums, a, b, add)
            return context.make_tuple(builder, signature.return_type, totals)

        kinds = start, x, read_at, weight, offset, types.intp, types.intp
        return types.UniTuple(start, places)(*kinds), codegen

    return gather


gather_8, gather_4, gather_1 = _gathering(8, 1), _gathering(4, 2), _gathering(1, 8)

# Rows that are summed up together where they read the same places.
ROWS = 4


def _gathering_rows(places):
    """Return an intrinsic of the sums of some rows at so many places.

    ``gather(starts, x, read_at, weight, shifts, order, offset, a, b)`` is, for each row `r` and
    each place `p`, ``starts[r] + Σ_k weight[order[k] + shifts[r]]·x[read_at[p] + offset[k]]`` over
    ``a ≤ k < b``; `starts`, `shifts` and `read_at` are tuples. Results of one row are neighbours.
    Each number that is loaded is used for all rows, and for all places.
    """

    @intrinsic
    def gather(typingctx, starts, x, read_at, weight, shifts, order, offset, a, b):
        rows, vector = len(starts), starts.dtype

        def codegen(context, builder, signature, args):
            starts, x, read_at, weight, shifts, order, offset, a, b = args
            kind = context.get_value_type(vector)
            firsts = [
                _pointer(context, builder, signature.args[1], x, builder.extract_value(read_at, p))
                for p in range(places)
            ]
            bases = [
                _pointer(
                    context, builder, signature.args[3], weight, builder.extract_value(shifts, r)
                )
                for r in range(rows)
            ]
            begins = [builder.extract_value(starts, r) for r in range(rows) for _ in range(places)]
            sums = _sums(begins, 1, builder)

            def add(k, to):
                at = builder.load(_pointer(context, builder, signature.args[6], offset, k))
                which = builder.load(_pointer(context, builder, signature.args[5], order, k))
                loaded = [_load_at(builder, first, at, kind) for first in firsts]
                for r, base in enumerate(bases):
                    number = builder.load(builder.gep(base, [which]))
                    factor = _broadcast(builder, number, kind)
                    for p, value in enumerate(loaded):
                        each = to[r * places + p]
                        added = _llvm(builder, "fma", kind, [factor, value, builder.load(each)])
                        builder.store(added, each)

            totals = _add_all(builder, sums, a, b, add)
            return context.make_tuple(builder, signature.return_type, totals)

        kinds = starts, x, read_at, weight, shifts, order, offset, types.intp, types.intp
        return types.UniTuple(vector, rows * places)(*kinds), codegen

    return gather


gather_rows_4, gather_rows_1 = _gathering_rows(4), _gathering_rows(1)


def _load_at(builder, first, index, kind, mask=None):
    """Return a vector that is so many numbers behind an address, or the lanes in a mask."""
    place = builder.bitcast(builder.gep(first, [index]), kind.as_pointer())
    if mask is not None:
        return _masked_load(builder, place, mask)
    loaded = builder.load(place)
    loaded.align = _align(kind)
    return loaded


def _correlating(entries, terms, whole):
    """Return an intrinsic of sums of products with so many entries, so many terms side by side.

    ``correlate(x, grad, offset, read_at, begins, write_at, count, a, b)`` is, for each row `r` and
    each entry `k`, ``Σ_p grad[begins[r] + write_at[p]]·x[read_at[p] + offset[k]]`` over ``a ≤ p <
    b``; `offset` and `begins` are tuples. Results of one row are neighbours. Unless vectors are
    `whole`, only ``count[p]`` lanes are read.
    """

    @intrinsic
    def correlate(typingctx, x, grad, offset, read_at, begins, write_at, count, a, b):
        rows, vector = len(begins), _Lanes(x.dtype)

        def codegen(context, builder, signature, args):
            x, grad, offset, read_at, begins, write_at, count, a, b = args
            kind = context.get_value_type(vector)

            def places(which, array, indices, number):
                return [
                    _pointer(
                        *(context, builder, signature.args[which], array),
                        builder.extract_value(indices, k),
                    )
                    for k in range(number)
                ]

            firsts, above = places(0, x, offset, entries), places(1, grad, begins, rows)
            zero = ir.Constant(kind, [0.0] * kind.count)
            sums = _sums([zero] * (rows * entries), terms, builder)

            def number(place, array, p):
                return builder.load(_pointer(context, builder, signature.args[place], array, p))

            def add(p, to):
                at, there = number(3, read_at, p), number(5, write_at, p)
                mask = None if whole else _first_lanes(builder, number(6, count, p), kind)
                loaded = [_load_at(builder, first, at, kind, mask) for first in firsts]
                for r, base in enumerate(above):
                    factor = _load_at(builder, base, there, kind, mask)
                    for k, value in enumerate(loaded):
                        each = to[r * entries + k]
                        added = _llvm(builder, "fma", kind, [factor, value, builder.load(each)])
                        builder.store(added, each)

            totals = _add_all(builder, sums, a, b, add)
            return context.make_tuple(builder, signature.return_type, totals)

        index = types.intp
        kinds = x, grad, offset, read_at, begins, write_at, count, index, index
        return types.UniTuple(vector, rows * entries)(*kinds), codegen

    return correlate


def _sums(starts, terms, builder):
    """Return variables for so many sums of each number, of which the first begins with it."""
    zero = ir.Constant(starts[0].type, [0.0] * starts[0].type.count)
    return [
        [cgutils.alloca_once_value(builder, zero if term else start) for start in starts]
        for term in range(terms)
    ]


def _add_all(builder, sums, a, b, add):
    """Call ``add(k, to)`` for ``a ≤ k < b``, with sums in turn; return the sums of the sums."""
    size, terms = a.type, len(sums)
    whole = builder.sub(b, builder.srem(builder.sub(b, a), size(terms)))
    with cgutils.for_range_slice(builder, a, whole, size(terms), size, inc=True) as (k, _):
        for term, to in enumerate(sums):
            add(builder.add(k, size(term)), to)
    if terms > 1:
        with cgutils.for_range_slice(builder, whole, b, size(1), size, inc=True) as (k, _):
            add(k, sums[0])
    totals = []
    for each in zip(*sums, strict=True):
        parts = [builder.load(part) for part in each]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [builder.fadd(*pair) for pair in zip(parts[:half], parts[half:], strict=True)]
        totals += parts
    return totals


correlate_8, correlate_some = _correlating(8, 1, True), _correlating(8, 1, False)
correlate_1 = _correlating(1, 4, False)
# These take several rows at once.
correlate_rows_4, correlate_rows_1 = _correlating(4, 1, True), _correlating(1, 1, True)
correlate_some_rows_4, correlate_some_rows_1 = (
    _correlating(entries, 1, False) for entries in (4, 1)
)


@intrinsic
def store_totals(typingctx, array, index, vectors, adds):
    """Write the sum over all lanes of each vector from ``array[index]`` on, or add it."""

    def codegen(context, builder, signature, args):
        array, index, vectors, adds = args
        every = [builder.extract_value(vectors, k) for k in range(len(signature.args[2]))]
        width, align = every[0].type.count, signature.args[0].dtype.bitwidth // 8
        for k in range(0, len(every), width):
            sums = _totals(builder, every[k : k + width])
            at = builder.add(index, index.type(k))
            place = _pointer(context, builder, signature.args[0], array, at, sums.type)
            before = builder.load(place)
            before.align = align
            zero = ir.Constant(sums.type, [0.0] * sums.type.count)
            before = builder.select(adds, before, zero)
            builder.store(builder.fadd(before, sums), place).align = align
        return context.get_dummy_value()

    return types.void(array, types.intp, vectors, types.boolean), codegen


def _totals(builder, parts, grain=1):
    """Return a vector of the sum over all lanes of each of no more vectors than they have lanes.

    With a `grain` of 2 there is a sum of every second lane, and one of the others.
    """
    width = group = parts[0].type.count
    # Two vectors become one, with the sums of one in the first half of every group of lanes, and
    # those of the other in the second.
    while len(parts) > 1:
        half, pairs = group // 2, []
        for a, b in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True):
            low = [n if n % group < half else width + n - half for n in range(width)]
            high = [n + half if n % group < half else width + n for n in range(width)]
            pairs.append(builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high)))
        parts, group = pairs, half
    (sums,) = parts
    while group > grain:
        half = group // 2
        low = [n for n in range(sums.type.count) if n % group < half]
        high = [n + half for n in low]
        halves = (_shuffle(builder, sums, sums, lanes) for lanes in (low, high))
        sums, group = builder.fadd(*halves), half
    return sums


def _align(vector):
    """Return how the numbers of a vector are aligned."""
    return 4 if isinstance(vector.element, ir.FloatType) else 8
