"""Whether a machine can compile, launch and capture kernels: asked before anything else."""

from __future__ import annotations

import numpy as np

from sparsescan.arrays.arrays import load_cupy
from sparsescan.arrays.cuda import current
from sparsescan.kernels.cuda import device
from sparsescan.kernels.cuda.checks import check_kernel, is_safe


def preflight() -> str:
    """Run the smallest kernel by itself and in a graph, and multiply by cuBLAS; what was done.

    An exception says which step a machine cannot do.
    """
    cupy = load_cupy()
    indptr, indices = (cupy.asarray(np.array(a, np.int32)) for a in ([0, 1, 2], [0, 1]))
    if not is_safe(indptr, indices, 2) or is_safe(indptr, indices, 1):
        raise AssertionError("a kernel gives a wrong result")
    stream, fault = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1, np.int32)
    cupy.cuda.runtime.deviceSynchronize()
    addresses = indptr.data.ptr, 2, indices.data.ptr, 2, 1, fault.data.ptr
    with current(cupy.cuda.Device().id), stream:
        stream.begin_capture()
        device.launch(check_kernel(indptr.dtype), 1, 32, stream.ptr, *addresses)
        graph = stream.end_capture()
        before = int(fault.get()[0])
        graph.launch(stream)
        if (before, int(fault.get()[0])) != (0, 1):
            raise AssertionError("a graph of a kernel gives a wrong result")
    ones = cupy.ones((2, 2), np.float32)
    if cupy.matmul(ones, ones).get().tolist() != [[2, 2], [2, 2]]:
        raise AssertionError("cuBLAS gives a wrong result")
    return "a kernel compiled, launched and captured; a product by cuBLAS"
