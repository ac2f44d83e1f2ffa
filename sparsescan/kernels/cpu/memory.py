"""Intrinsics that Numba lacks: arrays at an address, vectors, atomics between threads.

A compiled call reads thousands of arrays. Python would take longer to unpack them than the kernel
runs, so kernels get tables of addresses. The code that fills such a table has checked the sizes,
and holds a reference to every array until the call is over.

Atomics and pointers need intrinsics. The sums are written in LLVM's language because Numba's loops
take longer: up to 2.0 times as long for pairs of dense rows, 2.4 to 4.6 times for eight samples at
once, as ``python -m bench intrinsics`` measures.
"""

from __future__ import annotations

import os
import time

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..addresses import data_of
from ..compile import njit
from .vector import Lanes, broadcast, load_at, pointer


@intrinsic
def _pointer(typingctx, address, like):
    """Return `address` as a pointer to the dtype of the array `like`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), codegen


@njit(inline="always")
def array_at(address, size, like):
    """Return `size` elements at `address`, as an array of the dtype of `like`."""
    return carray(_pointer(address, like), np.int64(size))


@njit(inline="always")
def eights_at(address, rows, like):
    """Return `rows` times eight elements at `address`, as an array of the dtype of `like`."""
    return carray(_pointer(address, like), (np.int64(rows), np.int64(8)))


def _element(context, builder, signature, args):
    """Return the pointer to ``array[index]`` from the leading two arguments of an intrinsic."""
    return pointer(context, builder, signature.args[0], *args[:2])


@intrinsic
def fetch_add(typingctx, array, index, value):
    """Add `value` to ``array[index]`` atomically; return the old value."""

    def codegen(context, builder, signature, args):
        place = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", place, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def exchange(typingctx, array, index, before, after):
    """Set ``array[index]`` to `after` if it is `before`, atomically; return whether it was."""

    def codegen(context, builder, signature, args):
        place = _element(context, builder, signature, args)
        result = builder.cmpxchg(place, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), codegen


@intrinsic
def load(typingctx, array, index):
    """Return ``array[index]``, sequentially consistent: other threads' writes are visible."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_element(context, builder, signature, args), "seq_cst", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def dot_two_rows(typingctx, m, start, cols, x, y, i):
    """Set ``y[i], y[i + 1]`` to the products of two rows of a dense matrix with `x`.

    It uses vectors of 32 bytes; the last one is masked. A loop that the compiler vectorises takes
    the last few elements of each row one by one, which are most elements of a short row.
    """

    def codegen(context, builder, signature, args):
        element = context.get_value_type(m.dtype)
        lanes = 256 // m.dtype.bitwidth
        vector, i64 = ir.VectorType(element, lanes), ir.IntType(64)
        zero = ir.Constant(vector, [0.0] * lanes)
        add_up = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(element, [element, vector]),
            f"llvm.vector.reduce.fadd.v{lanes}f{m.dtype.bitwidth}",
        )

        def data(k):
            return data_of(context, builder, signature.args[k], args[k])

        first, x_data, y_data = builder.gep(data(0), [args[1]]), data(3), data(4)
        rows = first, builder.gep(first, [args[2]])
        totals = [cgutils.alloca_once_value(builder, zero) for _ in rows]

        def accumulate(column, read):
            x_part = read(builder.gep(x_data, [column]))
            for row, total in zip(rows, totals, strict=True):
                term = builder.fmul(read(builder.gep(row, [column])), x_part, flags=("contract",))
                total_now = builder.fadd(builder.load(total), term, flags=("contract",))
                builder.store(total_now, total)

        def read_all(address):
            return load_at(builder, address, i64(0), vector)

        whole = builder.and_(args[2], i64(-lanes))
        with cgutils.for_range_slice(builder, i64(0), whole, i64(lanes), intp=i64) as (column, _):
            accumulate(column, read_all)
        rest = builder.sub(args[2], whole)
        with builder.if_then(builder.icmp_unsigned("!=", rest, i64(0))):
            numbers = ir.Constant(ir.VectorType(i64, lanes), list(range(lanes)))
            mask = builder.icmp_unsigned("<", numbers, broadcast(builder, rest, numbers.type))

            def read_rest(address):
                return load_at(builder, address, i64(0), vector, mask)

            accumulate(whole, read_rest)
        for k, total in enumerate(totals):
            dot = builder.call(
                add_up, [ir.Constant(element, -0.0), builder.load(total)], fastmath=("reassoc",)
            )
            builder.store(dot, builder.gep(y_data, [builder.add(args[5], i64(k))]))
        return context.get_dummy_value()

    return types.void(m, types.uint64, types.uint64, x, y, types.uint64), codegen


# ---------------------------------------------------------------------------------------------
# Sums of a number, or of eight numbers at once
# ---------------------------------------------------------------------------------------------


@intrinsic
def zero(typingctx, x):
    """Return a zero like ``x[j]``: a number, or eight numbers if `x` has rows of eight."""
    total = x.dtype if x.ndim == 1 else Lanes(x.dtype, 8)

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(total), 0.0 if x.ndim == 1 else [0.0] * 8)

    return total(x), codegen


@intrinsic
def plus(typingctx, a, b):
    """Return ``a + b``."""

    def codegen(context, builder, signature, args):
        return builder.fadd(*args)

    return a(a, a), codegen


def _add_term(total, m, x, flags):
    """Return signature and code of an intrinsic that adds a product, with these LLVM flags."""

    def codegen(context, builder, signature, args):
        def element(k, index):
            return pointer(context, builder, signature.args[k], args[k], index)

        factor = builder.load(element(1, args[2]))
        if x.ndim == 1:
            value = builder.load(element(3, args[4]))
        else:
            eight, place = context.get_value_type(total), builder.mul(args[4], args[4].type(8))
            value = load_at(builder, element(3, place), place.type(0), eight)
            factor = broadcast(builder, factor, eight)
        product = builder.fmul(factor, value, flags=flags)
        return builder.fadd(args[0], product, flags=flags)

    return total(total, m, types.uint64, x, types.uint64), codegen


@intrinsic
def add_term(typingctx, total, m, p, x, j):
    """Return ``total + m[p]·x[j]``, the product rounded before it is added."""
    return _add_term(total, m, x, ())


@intrinsic
def add_fused_term(typingctx, total, m, p, x, j):
    """Return ``total + m[p]·x[j]``, rounded once where the processor can."""
    return _add_term(total, m, x, ("contract",))


@intrinsic
def store(typingctx, y, i, total, stride, count):
    """Set ``y[i] = total``; of eight numbers the first `count`, `stride` apart from `i` on."""

    def codegen(context, builder, signature, args):
        array, i, value, stride, count = args
        data = data_of(context, builder, y, array)
        if not isinstance(total, Lanes):
            builder.store(value, builder.gep(data, [i]))
            return context.get_dummy_value()
        for lane in range(8):
            with builder.if_then(builder.icmp_unsigned("<", count.type(lane), count)):
                number = builder.extract_element(value, ir.IntType(32)(lane))
                place = builder.add(i, builder.mul(stride, stride.type(lane)))
                builder.store(number, builder.gep(data, [place]))
        return context.get_dummy_value()

    return types.void(y, types.uint64, total, types.uint64, types.uint64), codegen


# Turns of waiting, a few microseconds, before the thread yields.
PATIENCE = 1000

if os.name == "posix":
    _sched_yield = types.ExternalFunction("sched_yield", types.int32())

    @njit(inline="always")
    def relax(spins):
        """Yield to other threads after some turns of waiting."""
        if spins > PATIENCE:
            _sched_yield()

    @intrinsic
    def clock(typingctx):
        """Return nanoseconds, as ``time.monotonic_ns`` does.

        It reads them into this thread's stack. Numba allocates arrays like Python does, where
        `tracemalloc` may observe it; a thread that waits without the GIL must not do that.
        """

        def codegen(context, builder, signature, args):
            i32, i64 = ir.IntType(32), ir.IntType(64)
            told = cgutils.alloca_once(builder, i64, size=2)
            read = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(i32, [i32, told.type]), "clock_gettime"
            )
            builder.call(read, [i32(time.CLOCK_MONOTONIC), told])
            seconds, rest = (builder.load(builder.gep(told, [i32(k)])) for k in range(2))
            return builder.add(builder.mul(seconds, i64(1_000_000_000)), rest)

        return types.int64(), codegen

else:

    @njit(inline="always")
    def relax(spins):
        """Do nothing."""

    @njit(inline="always")
    def clock():
        """Return 0: no wait is timed."""
        return np.int64(0)
