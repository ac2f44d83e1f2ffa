"""The type of vectors in compiled functions, and shared code of their operations.

Every operation on vectors is one instruction per register. With loops over numbers, the compiler
would decide anew for every loop whether to use such instructions.

``pointer`` returns an address in an array or after a ``numba.types.CPointer``.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from ..addresses import data_of


class Lanes(types.Type):
    """A vector of numbers."""

    def __init__(self, dtype, count):
        self.dtype, self.count = dtype, count
        super().__init__(name=f"Lanes({dtype} x {self.count})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        element = dmm.lookup(fe_type.dtype).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, fe_type.count))


def pointer(context, builder, array_type, array, index, vector=None):
    """Return the address of ``array[index]``, of a vector if its type is given."""
    if isinstance(array_type, types.CPointer):
        data = array
    else:
        data = data_of(context, builder, array_type, array)
    place = builder.gep(data, [index])
    return place if vector is None else builder.bitcast(place, vector.as_pointer())


def load_at(builder, first, index, kind, mask=None):
    """Load a vector at an offset from an address, or only the lanes in a mask."""
    place = builder.bitcast(builder.gep(first, [index]), kind.as_pointer())
    if mask is not None:
        return masked_load(builder, place, mask)
    loaded = builder.load(place)
    loaded.align = align_of(kind)
    return loaded


def masked_load(builder, place, mask):
    """Return a vector of the lanes in a mask, 0 in the others."""
    value, align = place.type.pointee, ir.IntType(32)
    bits = 8 * align_of(value)
    name = f"llvm.masked.load.v{value.count}f{bits}.p0"
    shape = [value.as_pointer(), align, mask.type, value]
    load = cgutils.get_or_insert_function(builder.module, ir.FunctionType(value, shape), name)
    zero = ir.Constant(value, [0.0] * value.count)
    return builder.call(load, [place, align(bits // 8), mask, zero])


def masked_store(builder, vector, place, mask):
    """Write the lanes of a vector that are in a mask."""
    bytes_, align = align_of(vector.type), ir.IntType(32)
    name = f"llvm.masked.store.v{vector.type.count}f{8 * bytes_}.p0"
    kinds = [vector.type, place.type, align, mask.type]
    shape = ir.FunctionType(ir.VoidType(), kinds)
    store = cgutils.get_or_insert_function(builder.module, shape, name)
    builder.call(store, [vector, place, align(bytes_), mask])


def first_lanes(builder, count, vector):
    """Return a mask of the first `count` lanes, by a comparison of narrow integers."""
    most, short = count.type(vector.count), ir.IntType(32)
    count = builder.select(builder.icmp_signed("<", count, most), count, most)
    lanes = ir.VectorType(short, vector.count)
    each = ir.Constant(lanes, list(range(vector.count)))
    return builder.icmp_signed("<", each, broadcast(builder, builder.trunc(count, short), lanes))


def broadcast(builder, value, vector):
    """Return a vector of one number."""
    i32 = ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, i32(0))
    every = ir.Constant(ir.VectorType(i32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, first, every)


def shuffle(builder, a, b, lanes):
    """Shuffle two vectors; lanes of the second are numbered after those of the first."""
    places = ir.VectorType(ir.IntType(32), len(lanes))
    return builder.shuffle_vector(a, b, ir.Constant(places, lanes))


def lane_sums(builder, parts, grain=1):
    """Return a vector of the sums over all lanes of each of some vectors.

    With a `grain` of 2 there is one sum of the even lanes, and one of the odd lanes.
    """
    width = group = parts[0].type.count
    # Two vectors become one: in every group of lanes, the first half has sums of the first vector,
    # the second half those of the second.
    while len(parts) > 1:
        half, pairs = group // 2, []
        for a, b in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True):
            low = [n if n % group < half else width + n - half for n in range(width)]
            high = [n + half if n % group < half else width + n for n in range(width)]
            pairs.append(builder.fadd(shuffle(builder, a, b, low), shuffle(builder, a, b, high)))
        parts, group = pairs, half
    (sums,) = parts
    while group > grain:
        half = group // 2
        low = [n for n in range(sums.type.count) if n % group < half]
        high = [n + half for n in low]
        halves = (shuffle(builder, sums, sums, lanes) for lanes in (low, high))
        sums, group = builder.fadd(*halves), half
    return sums


def add_in_place(builder, place, vector):
    """Add a vector to the numbers from a pointer on, whose type may be a wider one."""
    place, added = widened(builder, place, vector)
    before = builder.load(place)
    before.align = align_of(added.type)
    builder.store(builder.fadd(before, added), place).align = align_of(added.type)


def widened(builder, place, vector):
    """Return a pointer to vectors of the pointer's numbers, and the vector widened to them."""
    wide = ir.VectorType(place.type.pointee, vector.type.count)
    same = wide == vector.type
    return builder.bitcast(place, wide.as_pointer()), (
        vector if same else builder.fpext(vector, wide)
    )


def call_llvm(builder, name, vector, args):
    """Call one of LLVM's functions of vectors."""
    bits = 32 if isinstance(vector.element, ir.FloatType) else 64
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(vector, [vector] * len(args)),
        f"llvm.{name}.v{vector.count}f{bits}",
    )
    return builder.call(function, args)


def align_of(vector):
    """Return how the numbers of a vector are aligned."""
    return 4 if isinstance(vector.element, ir.FloatType) else 8
