"""Index arrays on a device, checked there before any kernel follows them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...arrays.addresses import kernel_address
from ...arrays.arrays import namespace
from ...arrays.cuda import cuda, current
from .device import atomic_max, launch, load

_THREADS = 256
# Blocks beyond those that fill a device only read on where others left off.
_MAX_BLOCKS = 1024


def is_safe(indptr: Any, indices: Any, cols: int) -> bool:
    """Return whether index arrays of CuPy, on the current device, are safe to follow; waits for it.

    Both must be contiguous, of one dtype, int32 or int64. Rows may be unsorted.
    """
    cupy = namespace(indptr)
    fault = cupy.zeros(1, np.int32)
    # Whole warps, but of few threads for few entries.
    size = max(indptr.size, indices.size)
    threads = min(-(-size // 32) * 32, _THREADS)
    with current(indptr.data.device_id):
        launch(
            check_kernel(indptr.dtype),
            min(-(-size // threads), _MAX_BLOCKS),
            threads,
            cupy.cuda.get_current_stream().ptr,
            *(kernel_address(indptr), indptr.size - 1, kernel_address(indices), indices.size, cols),
            kernel_address(fault),
        )
    return not fault.get()[0]


@cache
def check_kernel(dtype: np.dtype[Any]) -> Any:
    """Return the kernel that checks index arrays of this dtype, for a grid of any size.

    Its arguments are the address of ``indptr``, the number of rows, the address and the length of
    ``indices``, the number of columns, and the address of an int32 that it sets to 1 if ``indptr``
    does not start at 0, falls, or does not end at the length of ``indices``, or if an index is out
    of range.
    """
    zero = dtype.type(0)
    one = np.int32(1)

    @cuda.jit
    def check_indices(indptr, rows, indices, nnz, cols, fault):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        step = cuda.gridDim.x * cuda.blockDim.x
        bad = False
        if first == 0:
            bad = load(indptr, 0, zero) != 0 or load(indptr, rows, zero) != nnz
        row = p = first
        while row < rows:
            bad |= load(indptr, row + 1, zero) < load(indptr, row, zero)
            row += step
        while p < nnz:
            column = load(indices, p, zero)
            bad |= column < 0 or column >= cols
            p += step
        if bad:
            atomic_max(fault, 0, one)

    return check_indices
