"""What Numba lacks for whole-chain kernels: arrays at an address, and atomics between threads.

A compiled call walks thousands of arrays that Python would take longer to unpack than the kernel
takes to run, so the kernels get tables of addresses. Whoever fills such a table has checked the
sizes and holds a reference to every array until the call is over.
"""

from __future__ import annotations

import os

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["address_of", "array_at", "dot_two_rows", "fetch_add", "load", "relax"]


@njit(nogil=True, cache=True)
def address_of(array):
    """Address of the first element of `array`."""
    return array.ctypes.data


@intrinsic
def _pointer(typingctx, address, like):
    """`address` as a pointer to the dtype of the array `like`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), codegen


@njit(inline="always")
def array_at(address, size, like):
    """`size` elements at `address`, as an array of the dtype of `like`."""
    return carray(_pointer(address, like), np.int64(size))


def _element(context, builder, signature, args):
    """Pointer to ``array[index]`` from the leading two arguments of an intrinsic."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(
        context, builder, signature.args[0], array, [args[1]], wraparound=False
    )


@intrinsic
def fetch_add(typingctx, array, index, value):
    """Add `value` to ``array[index]`` in one step that no thread can split; the old value."""

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def load(typingctx, array, index):
    """``array[index]`` as other threads have left it, with all that they wrote before."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_element(context, builder, signature, args), "seq_cst", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def dot_two_rows(typingctx, m, start, cols, x, y, i):
    """``y[i], y[i + 1] = m[start:start + cols] @ x, m[start + cols:start + 2 cols] @ x``.

    In vectors of 32 bytes, the last one masked. What the compiler makes of the loop falls back to
    single elements for the last few of each row, which are most of a short one.
    """

    def codegen(context, builder, signature, args):
        element = context.get_value_type(m.dtype)
        lanes = 256 // m.dtype.bitwidth
        vector, i64, i32 = ir.VectorType(element, lanes), ir.IntType(64), ir.IntType(32)
        lane_mask = ir.VectorType(ir.IntType(1), lanes)
        pointer, zero = vector.as_pointer(), ir.Constant(vector, [0.0] * lanes)
        suffix = f"v{lanes}f{m.dtype.bitwidth}"
        masked_load = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [pointer, i32, lane_mask, vector]),
            f"llvm.masked.load.{suffix}.p0",
        )
        add_up = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(element, [element, vector]),
            f"llvm.vector.reduce.fadd.{suffix}",
        )

        def data(k):
            return context.make_array(signature.args[k])(context, builder, args[k]).data

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
            part = builder.load(builder.bitcast(address, pointer))
            part.align = m.dtype.bitwidth // 8
            return part

        whole = builder.and_(args[2], i64(-lanes))
        with cgutils.for_range_slice(builder, i64(0), whole, i64(lanes), intp=i64) as (column, _):
            accumulate(column, read_all)
        rest = builder.sub(args[2], whole)
        with builder.if_then(builder.icmp_unsigned("!=", rest, i64(0))):
            one = builder.insert_element(
                ir.Constant(ir.VectorType(i64, lanes), ir.Undefined), rest, i32(0)
            )
            every = builder.shuffle_vector(
                one, one, ir.Constant(ir.VectorType(i32, lanes), [0] * lanes)
            )
            numbers = ir.Constant(ir.VectorType(i64, lanes), list(range(lanes)))
            mask = builder.icmp_unsigned("<", numbers, every)

            def read_rest(address):
                align = i32(m.dtype.bitwidth // 8)
                return builder.call(
                    masked_load, [builder.bitcast(address, pointer), align, mask, zero]
                )

            accumulate(whole, read_rest)
        for k, total in enumerate(totals):
            dot = builder.call(
                add_up, [ir.Constant(element, -0.0), builder.load(total)], fastmath=("reassoc",)
            )
            builder.store(dot, builder.gep(y_data, [builder.add(args[5], i64(k))]))
        return context.get_dummy_value()

    return types.void(m, types.uint64, types.uint64, x, y, types.uint64), codegen


if os.name == "posix":
    _sched_yield = types.ExternalFunction("sched_yield", types.int32())

    @njit(inline="always")
    def relax(spins):
        """What a thread does in its `spins`-th turn of waiting: give way after a while."""
        if spins > 1000:
            _sched_yield()

else:

    @njit(inline="always")
    def relax(spins):
        """What a thread does in its `spins`-th turn of waiting."""
