"""Link CUDA kernels as numba-cuda does where nvJitLink is there, and read what ptxas says of them.

The linker optimises LLVM IR once more: its code takes other registers than that from plain PTX.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from cuda.core import Linker, LinkerOptions, ObjectCode
from numba.cuda.cudadrv import nvvm
from ptx import lower_kernel
from ptx.kept import keep

__all__ = ["Taken", "taken_by"]


class Taken(NamedTuple):
    """What a kernel takes: registers of a thread, bytes of shared memory of a block."""

    registers: int
    shared: int


def taken_by(kernel: Any, count: int, capability: str = "9.0a") -> Taken:
    """Return what a kernel of `count` int64 takes, with or without link-time optimisation.

    As its options for Numba say, which has it where nvJitLink is there.
    """
    lto = bool(kernel.targetoptions["lto"])

    def link() -> Taken:
        name, lowered = capability.replace(".", ""), lower_kernel(kernel, count)
        if lto:
            options = lowered.options | {"arch": f"compute_{name}", "gen-lto": None}
            code = ObjectCode.from_ltoir(nvvm.compile_ir(lowered.ir, **options))
        else:
            code = ObjectCode.from_ptx(lowered.ptx(capability).encode())
        told = LinkerOptions(
            arch=f"sm_{name}", link_time_optimization=lto or None, ptxas_options=["-v"]
        )
        linker = Linker(code, options=told)
        linker.link("cubin")
        log = linker.get_info_log()
        (registers,) = re.findall(r"Used (\d+) registers", log)
        shared = re.findall(r"(\d+) bytes smem", log)
        return Taken(int(registers), int(*shared))

    return keep(kernel, (count, capability, "linked", lto), link)
