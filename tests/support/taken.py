"""What machine code of CUDA kernels takes of a multiprocessor, as a device gets it."""

from __future__ import annotations

from typing import Any

from cubin import Resources, resources_of
from ptx import lower_kernel
from ptx.kept import keep

from sparsescan.arrays import cuda as door


def taken_by(kernel: Any, count: int, capability: str = "9.0a") -> Resources:
    """Return what a kernel of `count` int64 takes."""

    def take() -> Resources:
        code = door.assemble(lower_kernel(kernel, count).ptx(capability))
        return resources_of(code.cubin)[code.name]

    return keep(kernel, (count, capability, "taken"), take)
