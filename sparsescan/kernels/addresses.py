"""Addresses of arrays in host memory: the gate of compiled code, and tables that kernels follow."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compile import njit


def data_of(context, builder, kind, array):
    """Return the pointer to the first element of an array, for code that counts elements from it.

    An array that is not contiguous is refused, when a function is compiled for it.
    """
    if kind.layout != "C":
        raise BufferError(f"a kernel cannot follow {kind}: it is not contiguous")
    return context.make_array(kind)(context, builder, array).data


@intrinsic
def data_address(typingctx, array):
    """Return the address of the first element of `array`, in a compiled function."""

    def codegen(context, builder, signature, args):
        data = data_of(context, builder, signature.args[0], args[0])
        return builder.ptrtoint(data, ir.IntType(64))

    return types.uintp(array), codegen


@njit(nogil=True, cache=True)
def address_of(array):
    """Return the address of the first element of `array`, which is contiguous and aligned."""
    address = data_address(array)
    if address % array.itemsize:
        raise BufferError("a kernel cannot follow an array that is not aligned")
    return address


@njit(nogil=True, cache=True)
def row_address_of(array):
    """Return the address of the first element of an array for kernels that walk its last axis.

    They are told the strides of all other axes.
    """
    address = array.ctypes.data
    is_aligned = address % array.itemsize == 0
    for axis in range(array.ndim):
        # No kernel takes a step along an axis of one element.
        is_aligned &= array.shape[axis] <= 1 or array.strides[axis] % array.itemsize == 0
    are_rows = array.shape[-1] <= 1 or array.strides[-1] == array.itemsize
    if array.size and not (is_aligned and are_rows):
        raise BufferError("a kernel cannot follow rows that are not contiguous, or not aligned")
    return address


@njit(nogil=True, cache=True)
def note_if_equal(data, indices, indptr, columns, pointers, leaves, k):
    """Note the address of values that the kernels can walk, if they have this pattern.

    Return the bytes of a value that were looked at, or 0: an array is unpacked once, when the call
    begins, so what is noted here is consistent, whatever other threads do to its attributes.
    """
    nnz = len(columns)
    address = data.ctypes.data
    if len(indptr) != len(pointers) or len(indices) != nnz or len(data) != nnz:
        return 0
    if (nnz > 1 and data.strides[0] != data.itemsize) or address % data.itemsize:
        return 0
    # No early exit: equal is the rule, and the plain loop runs in vectors.
    differ = False
    for i in range(np.uint64(len(indptr))):
        differ |= indptr[i] != pointers[i]
    for p in range(np.uint64(nnz)):
        differ |= indices[p] != columns[p]
    if differ:
        return 0
    leaves[k, 0] = address
    leaves[k, 1] = 0
    return data.itemsize


@njit(nogil=True, cache=True)
def note_values(values, nnz, leaves, k):
    """Note where values ``(nnz,)`` or ``(batch, nnz)`` lie, if the kernels can walk them.

    Return the bytes of a value that were looked at, and 16 times one more than the batch, if there
    is one; or 0. As in :func:`note_if_equal`, what is noted is consistent.
    """
    itemsize, address, step = values.itemsize, values.ctypes.data, values.strides[0]
    if values.shape[-1] != nnz or (nnz > 1 and values.strides[-1] != itemsize):
        return 0
    if address % itemsize or step % itemsize:
        return 0
    leaves[k, 0] = address
    if values.ndim == 1:
        leaves[k, 1] = 0
        return itemsize
    leaves[k, 1] = step
    return itemsize + 16 * (len(values) + 1)
