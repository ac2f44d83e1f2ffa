"""Calls of the functions that a renderer has written for a cell, by their addresses.

The loops over steps are compiled once, for all cells.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...kernels.addresses import data_of

# Pointers and integers of a function, behind the stage: see ``render.cpu.ARGUMENTS``.
_POINTERS, _COUNTS = 14, 6


def signature(dtype):
    """Return the types of the arguments of a function for numbers of a dtype of Numba."""
    return types.intp, *[types.CPointer(dtype)] * _POINTERS, *[types.intp] * _COUNTS


@intrinsic
def pointer(typingctx, array, index):
    """Return the address of ``array[index]``."""

    def codegen(context, builder, signature, args):
        data = args[0]
        if not isinstance(signature.args[0], types.CPointer):
            data = data_of(context, builder, signature.args[0], data)
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.intp), codegen


@intrinsic
def address(typingctx, place):
    """Return a pointer as a number."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(place), codegen


@intrinsic
def pointer_at(typingctx, number, like):
    """Return the pointer at an address, to numbers as those of an array."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), codegen


@intrinsic
def call_stage(typingctx, code, stage, pointers, counts):
    """Call the function at an address with a stage, pointers and counts, both of them tuples."""

    def codegen(context, builder, signature, args):
        code, stage, pointers, counts = args
        given = [
            builder.extract_value(each, k)
            for each, size in ((pointers, _POINTERS), (counts, _COUNTS))
            for k in range(size)
        ]
        kinds = [stage.type, *(each.type for each in given)]
        function = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        builder.call(builder.inttoptr(code, function), [stage, *given])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, pointers, counts), codegen
