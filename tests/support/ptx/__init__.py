"""Run CUDA kernels, as compiled, on the CPU, and stop where a device would not.

Numba makes PTX of a kernel, which takes no GPU. :mod:`parse` reads it; :mod:`translate` makes LLVM
IR of it, which llvmlite compiles for the host; :mod:`machine` runs its threads, and checks what
they do; :mod:`runner` is the way in, :mod:`kept` keeps what it compiled; :mod:`stand_in` runs
`sparsescan` on it.

A launch has its real blocks and threads. Those of a block run from one barrier to the next, one
after the other in a random order; blocks run one after the other in a random order, as none may
wait for another. Registers and shared memory hold garbage at first. A launch stops, with the
kernel, the line of its PTX and the thread, for

- an address that is not aligned, that lies outside of the memory given, or outside of any shared
  array, between which there are gaps;
- an address made by arithmetic on signed integers that overflowed;
- threads that wait at different barriers, or for one that has left;
- a race, between threads of a block or between blocks: see :mod:`machine`;
- a division by zero, or a loop that goes on for longer than any launch here.

It counts the instructions, the barriers and the bytes of all threads; and, if asked for, the
sectors and the bank conflicts of warps.

Nothing here tells how long a launch takes, nor what another order of memory than that of a CPU
would show, beyond the races that are looked for. Reciprocals and powers of two, which a device
approximates, are exact here. Instructions that no kernel has are refused: calls, shuffles but the
butterfly, accesses to fewer than four bytes, other roundings than kernels have.
"""

from .parse import PtxError
from .runner import FaultError, Program, Together, Traffic, compile_kernel, lower, lower_kernel

__all__ = [
    "FaultError",
    "Program",
    "PtxError",
    "Together",
    "Traffic",
    "compile_kernel",
    "lower",
    "lower_kernel",
]
