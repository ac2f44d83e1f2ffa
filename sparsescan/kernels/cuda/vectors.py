"""Sixteen bytes at a time between memory, shared memory and registers; no index is checked.

Arrays of Numba's take one value at a time, and check for negative indices. A local array is in
registers where all its indices are known to the compiler: as long as loops over it unroll.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from ...arrays.cuda import SIMULATED, cuda
from .device import intrinsic, load

# Type of the same width, bits of the mantissa, and the exponent's offset.
_FIELDS = {np.float32: (np.int32, 23, 127), np.float64: (np.int64, 52, 1023)}

if SIMULATED:

    def _width(array: Any) -> int:
        return 16 // int(array.dtype.itemsize)

    def get(array: Any, i: int) -> Any:
        """Return ``array[i]``."""
        return array[i]

    def put(array: Any, i: int, value: Any) -> None:
        """Set ``array[i] = value``."""
        array[i] = value

    def read_vector(local: Any, i: int, shared: Any, j: int) -> None:
        """Copy 16 bytes of a shared array, aligned, to a local one."""
        assert (j * shared.dtype.itemsize) % 16 == 0
        local[i : i + _width(shared)] = shared[j : j + _width(shared)]

    def write_vector(shared: Any, j: int, local: Any, i: int) -> None:
        """Copy 16 bytes of a local array to a shared one, aligned."""
        assert (j * shared.dtype.itemsize) % 16 == 0
        shared[j : j + _width(shared)] = local[i : i + _width(shared)]

    def load_vector(local: Any, i: int, address: int, j: int) -> None:
        """Copy 16 bytes from element `j` of what is at an address, aligned, to a local array."""
        assert (address + j * local.dtype.itemsize) % 16 == 0
        for k in range(_width(local)):
            local[i + k] = load(address, j + k, local.dtype.type(0))

    def larger(a: Any, b: Any) -> Any:
        """Return the larger one; of a NaN and a number the number."""
        return np.fmax(a, b)

    def exponent_field(value: Any) -> Any:
        """Return ``floor(log2 |value|)`` of a normal number; less for smaller ones."""
        bits, mantissa, most = _FIELDS[type(value)]
        return np.int32((int(value.view(bits)) >> mantissa & 2 * most + 1) - most)

    def power_of_two(exponent: Any, like: Any) -> Any:
        """Return ``2^exponent``, a normal number of the type of the scalar `like`."""
        kind = type(like)
        assert np.finfo(kind).minexp <= exponent < np.finfo(kind).maxexp
        return np.ldexp(kind(1), exponent)

else:
    from llvmlite import ir
    from numba.core import cgutils

    def _element(context, builder, array, value, index):
        return builder.gep(context.make_array(array)(context, builder, value).data, [index])

    def _parts(builder, pointer, count):
        return [builder.gep(pointer, [ir.Constant(ir.IntType(64), k)]) for k in range(count)]

    def _vector(context, array):
        return ir.VectorType(context.get_data_type(array.dtype), 128 // array.dtype.bitwidth)

    def _to_local(context, builder, vector, array, value, index):
        parts = _parts(builder, _element(context, builder, array, value, index), vector.type.count)
        for k, part in enumerate(parts):
            builder.store(builder.extract_element(vector, ir.Constant(ir.IntType(32), k)), part)
        return context.get_dummy_value()

    @intrinsic
    def get(typingctx, array, i):
        """Return ``array[i]``."""

        def codegen(context, builder, signature, args):
            return builder.load(_element(context, builder, array, *args))

        return array.dtype(array, types.int64), codegen

    @intrinsic
    def put(typingctx, array, i, value):
        """Set ``array[i] = value``."""

        def codegen(context, builder, signature, args):
            builder.store(args[2], _element(context, builder, array, args[0], args[1]))
            return context.get_dummy_value()

        return types.void(array, types.int64, array.dtype), codegen

    @intrinsic
    def read_vector(typingctx, local, i, shared, j):
        """Copy 16 bytes of a shared array, aligned, to a local one."""

        def codegen(context, builder, signature, args):
            pointer = _element(context, builder, shared, args[2], args[3])
            pointer = builder.bitcast(pointer, _vector(context, shared).as_pointer())
            vector = builder.load(pointer, align=16)
            return _to_local(context, builder, vector, local, args[0], args[1])

        return types.void(local, types.int64, shared, types.int64), codegen

    @intrinsic
    def write_vector(typingctx, shared, j, local, i):
        """Copy 16 bytes of a local array to a shared one, aligned."""

        def codegen(context, builder, signature, args):
            vector = ir.Constant(_vector(context, shared), ir.Undefined)
            source = _element(context, builder, local, args[2], args[3])
            for k, part in enumerate(_parts(builder, source, vector.type.count)):
                place = ir.Constant(ir.IntType(32), k)
                vector = builder.insert_element(vector, builder.load(part), place)
            pointer = _element(context, builder, shared, args[0], args[1])
            builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=16)
            return context.get_dummy_value()

        return types.void(shared, types.int64, local, types.int64), codegen

    @intrinsic
    def load_vector(typingctx, local, i, address, j):
        """Copy 16 bytes from element `j` of what is at an address, aligned, to a local array."""

        def codegen(context, builder, signature, args):
            # Address space 1 is global memory, which no store to shared memory touches.
            kind = context.get_data_type(local.dtype).as_pointer(1)
            pointer = builder.gep(builder.inttoptr(args[2], kind), [args[3]])
            pointer = builder.bitcast(pointer, _vector(context, local).as_pointer(1))
            vector = builder.load(pointer, align=16)
            return _to_local(context, builder, vector, local, args[0], args[1])

        return types.void(local, types.int64, types.int64, types.int64), codegen

    def _fields(kind):
        _, mantissa, most = _FIELDS[np.float32 if kind.bitwidth == 32 else np.float64]
        integer = ir.IntType(kind.bitwidth)
        return integer, ir.Constant(integer, mantissa), ir.Constant(integer, most)

    @intrinsic
    def exponent_field(typingctx, value):
        """Return ``floor(log2 |value|)`` of a normal number; less for smaller ones."""

        def codegen(context, builder, signature, args):
            integer, mantissa, most = _fields(value)
            bits = builder.lshr(builder.bitcast(args[0], integer), mantissa)
            mask = ir.Constant(integer, 2 * most.constant + 1)
            field = builder.sub(builder.and_(bits, mask), most)
            return builder.trunc(field, ir.IntType(32)) if value.bitwidth == 64 else field

        return types.int32(value), codegen

    @intrinsic
    def power_of_two(typingctx, exponent, like):
        """Return ``2^exponent``, a normal number of the type of the scalar `like`."""

        def codegen(context, builder, signature, args):
            integer, mantissa, most = _fields(like)
            field = builder.sext(args[0], integer) if like.bitwidth == 64 else args[0]
            bits = builder.shl(builder.add(field, most), mantissa)
            return builder.bitcast(bits, context.get_data_type(like))

        return like(types.int32, like), codegen

    @intrinsic
    def larger(typingctx, a, b):
        """Return the larger one; of a NaN and a number the number."""

        def codegen(context, builder, signature, args):
            kind = args[0].type
            name = f"llvm.nvvm.fmax.{'f' if a.bitwidth == 32 else 'd'}"
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(kind, [kind, kind]), name
            )
            return builder.call(function, args)

        return a(a, a), codegen


@cuda.jit(device=True)
def barrier(warp):
    """Wait for the threads of the block, which is one warp if `warp`."""
    if warp and not SIMULATED:
        cuda.syncwarp()
    else:
        cuda.syncthreads()


@cuda.jit(device=True)
def vote(predicate, warp):
    """Wait for the threads of the block; whether the predicate holds for any of them."""
    if warp and not SIMULATED:
        holds = cuda.any_sync(0xFFFFFFFF, predicate)
        cuda.syncwarp()
        return holds
    return cuda.syncthreads_or(np.int32(predicate)) != 0


@cuda.jit(device=True)
def any_of(predicate):
    """Return whether the predicate holds for any thread of the warp, which orders no memory."""
    if SIMULATED:
        return cuda.syncthreads_or(np.int32(predicate)) != 0
    return cuda.any_sync(0xFFFFFFFF, predicate)


@cuda.jit(device=True)
def exchange(value, distance, thread, scratch):
    """Return the value of the thread of the warp whose number differs in the bit `distance`.

    All threads of the block take part. In the simulator the values go through `scratch`, a shared
    array with a place for each thread.
    """
    if SIMULATED:
        put(scratch, thread, value)
        cuda.syncthreads()
        other = get(scratch, thread ^ distance)
        cuda.syncthreads()
        return other
    return cuda.shfl_xor_sync(0xFFFFFFFF, value, distance)


@cuda.jit(device=True)
def thread_index():
    """Return the number of the thread in its block, for the compiler never negative."""
    return np.int64(np.uint32(cuda.threadIdx.x))


@cuda.jit(device=True)
def block_index():
    """Return the number of the block, for the compiler never negative."""
    return np.int64(np.uint32(cuda.blockIdx.x))


@cuda.jit(device=True)
def block_size():
    """Return the number of threads of a block, for the compiler never negative."""
    return np.int64(np.uint32(cuda.blockDim.x))


@cuda.jit(device=True)
def quotient(a, b):
    """Return ``a // b`` and ``a % b`` of a number below 2^16 and a positive one, in 32 bits."""
    divisor = np.uint32(min(b, np.int64(1 << 16)))
    return np.int64(np.uint32(a) // divisor), np.int64(np.uint32(a) % divisor)
