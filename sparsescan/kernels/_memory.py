"""What Numba lacks for whole-chain kernels: arrays at an address, and atomics between threads.

A compiled call walks thousands of arrays that Python would take longer to unpack than the kernel
takes to run, so the kernels get tables of addresses. Whoever fills such a table has checked the
sizes and holds a reference to every array until the call is over.
"""

from __future__ import annotations

import os

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["address_of", "array_at", "fetch_add", "load", "relax"]


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
