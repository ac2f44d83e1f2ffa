"""The one door to ``numba.cuda``; in its simulator with ``NUMBA_ENABLE_CUDASIM=1``.

A kernel is made in one way for tests and for devices: NVVM makes its PTX, which tests run on the
CPU, and ptxas its machine code, whose registers and spills they count. Numba would let nvJitLink
make machine code. With link-time optimisation, its default, that is made of other PTX than tests
run. Without, kernels are assembled as parts of larger programs, and take more registers, up to
twice as many for 7.5, where some spill. Numba launches so only where ptxas is not installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda, int64, void

from ..errors import DeviceError

SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]

if not (SIMULATED or hasattr(np, "row_stack")):
    # numba-cuda, of which no later version is to come, asks NumPy for it before it compiles
    # anything. NumPy 2.5 has it no more.
    vars(np)["row_stack"] = np.vstack
    try:
        with suppress(ImportError):  # Numba's own CUDA target, which does not ask
            importlib.import_module("numba.cuda.np.arrayobj")
    finally:
        del vars(np)["row_stack"]

# From this compute capability on Numba compiles for that very one.
_OWN_CODE = (9, 0)
# Bytes of shared memory that a kernel may declare. Launches that ask for more are given more.
_DECLARED = 48 * 1024
_SHARED_ARRAY = re.compile(r"^\.visible \.shared (\.align \d+ \.b8 [\w$]+)\[(\d+)\];$", re.M)
# Registers of a multiprocessor, of which a block's warps take as if they were a multiple of these.
_REGISTERS, _WARPS = 1 << 16, 4
_checked: set[int] = set()


def current(device: int) -> AbstractContextManager[Any]:
    """Return a context in which Numba works on a device, which CuPy does not tell it.

    Numba compiles, loads and launches kernels in it. The launch of a graph needs none.

    Raises
    ------
    DeviceError
        If Numba's compiler has no code for such a device.
    """
    if SIMULATED:
        return nullcontext()
    there: AbstractContextManager[Any] = cuda.gpus[device]
    if device not in _checked:
        _check_capability(device, tuple(there.compute_capability))  # type: ignore[attr-defined]
        _checked.add(device)
    return there


class MachineCode(NamedTuple):
    """A kernel for devices of one architecture: an ELF file, and the kernel's name in it.

    A block has so many bytes of `shared` memory that a launch has to ask for.
    """

    cubin: bytes
    name: str
    shared: int = 0


def for_block(kernel: Any, threads: int) -> Any:
    """Return a kernel, after noting of how many threads its blocks are.

    Its machine code takes no more registers than a multiprocessor has for such a block, without
    which a launch fails.
    """
    kernel.py_func.block_threads = threads
    return kernel


def most_registers(threads: int) -> int:
    """Return how many registers each thread of a block may have."""
    warps = -(-threads // (32 * _WARPS)) * _WARPS
    return min(_REGISTERS // (32 * warps) // 8 * 8, 255)


def with_threads(ptx: str, kernel: Any) -> str:
    """Return the PTX of a kernel with the threads of a block, for :func:`assemble`."""
    threads = getattr(kernel.py_func, "block_threads", None)
    return ptx if threads is None else f"// {threads} threads of a block\n{ptx}"


def compile_to_ptx(kernel: Any, count: int, capability: tuple[int, int]) -> str:
    """Return the PTX of a kernel of `count` int64, for devices of a compute capability."""
    suffix = ("a",) if capability >= _OWN_CODE else ()
    ptx, _ = cuda.compile(  # type: ignore[attr-defined]
        kernel.py_func,
        void(*[int64] * count),
        cc=(*capability, *suffix),
        device=False,
        abi="numba",
        output="ptx",
        # Whatever the environment asks for, as what is made is kept.
        debug=False,
        opt=True,
    )
    return with_threads(str(ptx), kernel)


def assemble(ptx: str) -> MachineCode:
    """Return the machine code of PTX with one kernel, for the devices that it is for.

    Raises
    ------
    RuntimeError
        If there is no ptxas, or it refuses the PTX.
    """
    (target,) = re.findall(r"^\s*\.target\s+(sm_\w+)", ptx, flags=re.MULTILINE)
    (name,) = re.findall(r"\.entry\s+([\w$]+)", ptx)
    ptx, shared = _with_asked_memory(ptx)
    code, registers = _assembled(ptx, target)
    threads = re.match(r"// (\d+) threads of a block\n", ptx)
    if threads is not None and registers > (most := most_registers(int(threads[1]))):
        code, _ = _assembled(with_most_registers(ptx, most), target)
    return MachineCode(code, name, shared)


def _with_asked_memory(ptx: str) -> tuple[str, int]:
    """Return PTX whose largest array is what a launch asks for, and its bytes; 0 if all fit."""
    arrays = {match: int(match[2]) for match in _SHARED_ARRAY.finditer(ptx)}
    if sum(arrays.values()) <= _DECLARED:
        return ptx, 0
    largest, size = max(arrays.items(), key=lambda item: item[1])
    return ptx.replace(largest[0], f".extern .shared {largest[1]}[];"), size


def with_most_registers(ptx: str, most: int) -> str:
    """Return the PTX of one kernel that takes no more registers for each thread."""
    start = ptx.index("{", ptx.index(".entry"))
    return f"{ptx[:start]}.maxnreg {most}\n{ptx[start:]}"


def _assembled(ptx: str, target: str) -> tuple[bytes, int]:
    """Return machine code, and how many registers a thread has."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [_ptxas(), f"-arch={target}", "-v", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas ended with {done.returncode}: {done.stderr}")
        (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
        return made.read_bytes(), int(registers)


@cache
def _ptxas() -> str:
    """Return the path of the assembler of the wheel, or of a CUDA toolkit.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    path = None
    # It raises an error if it does not know the name, as before version 1.8.1.
    with suppress(Exception):
        from cuda.pathfinder import find_nvidia_binary_utility

        path = find_nvidia_binary_utility("ptxas")
    if path is None:
        toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
        folders = [os.path.join(toolkit, "bin") for toolkit in toolkits if toolkit]
        path = shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join(folders))
    if path is None:
        raise RuntimeError("there is no ptxas (the nvidia-cuda-nvcc wheel, or a CUDA toolkit)")
    return str(path)


@cache
def compilers() -> str:
    """Return the versions of what makes PTX of kernels, and machine code of that."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numba-cuda", "llvmlite")]
    # To ask it for its version would take as long as to load many kernels.
    about = os.stat(_ptxas())
    return ", ".join([*versions, f"ptxas of {about.st_size} bytes, {about.st_mtime_ns}"])


def _check_capability(device: int, capability: tuple[int, ...]) -> None:
    try:
        from numba.cuda.cudadrv.nvrtc import get_supported_ccs  # type: ignore[attr-defined]
    except ImportError:  # Numba's own CUDA target, which compiles for the nearest older one
        return
    known = sorted(map(tuple, get_supported_ccs()))
    if capability in known or known[0] < capability < _OWN_CODE:
        return
    first, last = (f"{major}.{minor}" for major, minor in (known[0], known[-1]))
    hint = (
        "sparsescan[cuda12] may have a compiler for it"
        if capability < known[0]
        else "a newer nvidia-cuda-nvrtc, or CUDA toolkit, may support it"
    )
    raise DeviceError(
        f"device {device} has compute capability {'.'.join(map(str, capability))}, which the "
        f"compiler of Numba's CUDA target does not support: it supports {first} to {last}; {hint}"
    )
