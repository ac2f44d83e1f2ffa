"""Machine code of kernels: built ahead, or kept on disk; loaded and launched by CuPy.

Numba takes a second or two for a kernel. (Its own cache on disk does not help: it knows a kernel by
what that closes over, and the functions among that by random numbers, which are others in each
process.) Here each kernel has a file, named by the kernel and all that it was made with. It has the
machine code, which tools of CUDA can read; behind that, of which sources and by which compilers it
was made; and a checksum. One that is damaged, or of other sources, counts as missing, and so does
one of other compilers. Only in a folder that the user names, by ``SPARSESCAN_KERNELS``, any
compilers will do: what is there was built ahead, maybe on another machine.

A kernel whose file is missing is compiled, and the file written beside those of kernels for the
CPU. Kernels take int64 alone, so CuPy can launch them, which looks at no types. Where anything of
this fails, Numba compiles and launches the kernel by itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ...arrays import cuda as door
from ...arrays.arrays import load_cupy
from ...arrays.cuda import MachineCode, assemble, compile_to_ptx, compilers
from ...locks import new_lock
from ..compile import cache_folder, read_checked, with_checksum

# The environment variable that names a folder of kernels that were built ahead.
FOLDER = "SPARSESCAN_KERNELS"
_ROOT = Path(__file__).parents[2]
_ERRORS = 20
# What drivers say of code that is not for them, or not for a device. Whatever else they say may
# hold at the moment only.
_REFUSALS = "INVALID_IMAGE", "NO_BINARY_FOR_GPU", "INVALID_PTX", "UNSUPPORTED_PTX", "INVALID_SOURCE"
# An attribute of functions, of CUDA's driver: the most memory that a launch may ask for.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
# What is raised where no file can be written or read, or where a compiler is missing.
_NOT_KEPT = OSError, RuntimeError, ImportError


class Origins(NamedTuple):
    """Where kernels of this process came from: how many from where, and what failed on the way."""

    counts: Counter[str]
    errors: list[str]


_origins = Origins(Counter(), [])
_functions: dict[tuple[int, Any, int], Loaded | None] = {}
_lock = new_lock()


def origins() -> Origins:
    """Return how many kernels were "built ahead", "kept", "compiled" and left "to Numba"."""
    return _origins


def forget() -> None:
    """Load kernels anew from now on, as a new process does."""
    with _lock:
        _functions.clear()
        _origins.counts.clear()
        _origins.errors.clear()
        _device.cache_clear()
        _sources.cache_clear()


@functools.cache
def _device() -> Callable[[], int]:
    """Return what gives the number of the current device."""
    number: Callable[[], int] = load_cupy().cuda.runtime.getDevice
    return number


class Loaded(NamedTuple):
    """A function of CuPy's, and how many bytes of shared memory its launch asks for."""

    function: Callable[..., None]
    shared: int


def load(kernel: Any, count: int) -> Loaded | None:
    """Return a kernel of `count` int64 on the current device.

    None if only Numba can launch it.
    """
    try:
        key = _device()(), kernel, count
        return _functions[key]
    except KeyError:
        pass
    except Exception as error:
        return _left_to_numba(error)
    with _lock:
        if key not in _functions:
            try:
                _functions[key] = _load(kernel, count)
            except _FailedLoadError as failed:
                return _left_to_numba(failed.error)  # this time
        return _functions[key]


class _FailedLoadError(Exception):
    """A driver has not loaded code that may be fit for it, for want of memory for example."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _load(kernel: Any, count: int) -> Loaded | None:
    try:
        cupy = load_cupy()
        digits = cupy.cuda.Device().compute_capability
        capability = int(digits[:-1]), int(digits[-1])
        for origin, folder in _folders(kernel):
            code = read(kernel, count, capability, folder, any_compilers=origin == "built ahead")
            function = None if code is None else _loaded(cupy, code, origin)
            if function is not None:
                return function
        # Numba compiles functions that kernels call for the device that is current for it.
        with door.current(_device()()):
            code = assemble(compile_to_ptx(kernel, count, capability))
        function = _loaded(cupy, code, "compiled")
        for origin, folder in _folders(kernel):
            if origin == "kept" and function is not None:
                with suppress(*_NOT_KEPT):  # a full disk takes time, and nothing else
                    save(kernel, count, capability, folder, code)
    except _FailedLoadError:
        raise
    except Exception as error:
        return _left_to_numba(error)
    return function


def _left_to_numba(error: Exception) -> None:
    """Note why; Numba says itself what is wrong with a kernel that it cannot compile either."""
    _note(error)
    _origins.counts["to Numba"] += 1


def _note(error: Exception) -> None:
    if len(_origins.errors) < _ERRORS:
        _origins.errors.append(f"{type(error).__name__}: {error}")


def _loaded(cupy: Any, code: MachineCode, origin: str) -> Loaded | None:
    """Return the function of machine code; None, after a note, if the driver refuses it."""
    module = cupy.cuda.function.Module()
    try:
        module.load(code.cubin)
        function = module.get_function(code.name)
        if code.shared:
            attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, code.shared)
    except Exception as error:
        if not any(words in str(error) for words in _REFUSALS):
            raise _FailedLoadError(error) from error
        return _note(error)
    _origins.counts[origin] += 1
    return Loaded(function, code.shared)


# -- Files ----------------------------------------------------------------------------------------


def _folders(kernel: Any) -> Iterator[tuple[str, Path]]:
    """Yield the folders that may have the machine code of a kernel."""
    if named := os.environ.get(FOLDER):
        yield "built ahead", Path(named)
    kept = cache_folder(kernel.py_func)
    if kept is not None:
        yield "kept", kept


def read(
    kernel: Any,
    count: int,
    capability: tuple[int, int],
    folder: Path,
    *,
    any_compilers: bool = False,
) -> MachineCode | None:
    """Return the machine code of a kernel that is in a folder, if it is fit for use."""
    name = file_name(kernel, count, capability)
    try:
        content = read_checked(folder / name)
        size = int.from_bytes(content[-4:], "little")
        about = json.loads(content[-4 - size : -4])
        made_of = about["file"], about["sources"]
        if made_of != (name, _sources(_folder_of(kernel))):
            return None
        if not any_compilers and about["compilers"] != compilers():
            return None
        return MachineCode(content[: -4 - size], about["kernel"], about["shared"])
    except (*_NOT_KEPT, ValueError, KeyError, TypeError):
        return None


def save(
    kernel: Any, count: int, capability: tuple[int, int], folder: Path, code: MachineCode
) -> Path:
    """Write the machine code of a kernel, at once; return the file."""
    name = file_name(kernel, count, capability)
    about = {
        "file": name,
        "kernel": code.name,
        "shared": code.shared,
        "sources": _sources(_folder_of(kernel)),
        "compilers": compilers(),
    }
    written = json.dumps(about).encode()
    content = code.cubin + written + len(written).to_bytes(4, "little")
    path = folder / name
    own = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    own.write_bytes(with_checksum(content))
    own.replace(path)
    return path


def file_name(kernel: Any, count: int, capability: tuple[int, int]) -> str:
    """Return the name of the file of a kernel, by all that it was made with but its sources.

    Raises
    ------
    TypeError
        If the kernel closes over something that is not known to compile to the same code in another
        process.
    """
    made_with = repr((_described(kernel), count, capability))
    digest = hashlib.sha256(made_with.encode()).hexdigest()
    return f"{kernel.py_func.__name__}-{digest[:24]}.cubin"


def _described(value: Any) -> Any:
    """Return what is equal, in any process, for values that compile to the same code."""
    if isinstance(value, np.generic):
        return "scalar", value.dtype.str, repr(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, repr(value)
    if isinstance(value, np.dtype):
        return "dtype", value.str
    if isinstance(value, types.Type):
        return "type", str(value)
    if isinstance(value, type):
        return "class", value.__module__, value.__qualname__
    if isinstance(value, tuple):
        return type(value).__name__, *map(_described, value)
    # What kernels call: compiled functions, and those that make instructions.
    function = getattr(value, "py_func", getattr(value, "_defn", value))
    if isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        made_with = map(_described, (*cells, *(function.__defaults__ or ())))
        # A text that was written by the program is in a file named by all that is in it.
        file = function.__code__.co_filename
        written = (file,) if file.startswith("<") else ()
        return "function", function.__module__, function.__qualname__, *written, *made_with
    raise TypeError(f"a kernel closes over {type(value).__name__}, which has no name of its own")


def _folder_of(kernel: Any) -> Path:
    return Path(kernel.py_func.__code__.co_filename).parent


@functools.cache
def _sources(folder: Path) -> str:
    """Return a digest of all sources that kernels of a folder may be made of."""
    files = {*_ROOT.joinpath("kernels").rglob("*.py"), *folder.glob("*.py"), Path(door.__file__)}
    named = {os.path.relpath(file, _ROOT).replace(os.sep, "/"): file for file in files}
    digest = hashlib.sha256()
    for name, file in sorted(named.items()):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
