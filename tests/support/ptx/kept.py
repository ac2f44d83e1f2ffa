"""Keep compiled kernels on disk, as Numba keeps those for the CPU.

A kernel has a file beside Numba's, named by what it is made for. It says from which sources, by
which compilers and for which CPU it was made, and is written anew where one of them has changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from cuda.pathfinder import load_nvidia_dynamic_lib

import sparsescan

__all__ = ["keep"]

_FOLDER = Path(__file__).parent / "__pycache__"
_TRANSLATORS = "kept", "machine", "parse", "runner", "translate"
_COMPILERS = "numba", "numba-cuda", "llvmlite", "numpy", "cuda-core", "cuda-bindings"


def keep(kernel: Any, options: Any, make: Callable[[], Any]) -> Any:
    """Return what `make` returns for a kernel and some options, and keep it.

    A kernel that is not of `sparsescan` is made anew: its sources are not known here.
    """
    if not kernel.py_func.__module__.startswith(f"{sparsescan.__name__}."):
        return make()
    name = _digest(_described(kernel.py_func), options)
    file = _FOLDER / f"{kernel.py_func.__name__}-{name[:20]}.ptx"
    with suppress(OSError, ValueError, EOFError, pickle.PickleError, zlib.error):
        origin, content = pickle.loads(file.read_bytes())
        if origin == _origin():
            return pickle.loads(zlib.decompress(content))
    compiled = make()
    content = pickle.dumps((_origin(), zlib.compress(pickle.dumps(compiled), 1)))
    own = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a folder that is not writable
        _FOLDER.mkdir(exist_ok=True)
        own.write_bytes(content)
        own.replace(file)
    return compiled


@cache
def _origin() -> str:
    """Return a digest of all that kernels are made of and by, but for their options."""
    package = Path(sparsescan.__file__).parent
    folders = "kernels/**", "arrays", "jacobians/_kernels"
    sources = [file for folder in folders for file in package.glob(f"{folder}/*.py")]
    sources += [Path(__file__).parent / f"{name}.py" for name in _TRANSLATORS]
    library = Path(load_nvidia_dynamic_lib("nvvm").abs_path)
    return _digest(
        *[file.read_bytes() for file in sorted(sources)],
        *[importlib.metadata.version(name) for name in _COMPILERS],
        (str(library), library.stat().st_size, library.stat().st_mtime_ns),
        (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()),
    )


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _described(function: Any) -> tuple[Any, ...]:
    """Return the name of a function, and the values that it was made with: constants for Numba."""
    return function.__module__, function.__qualname__, *_values(function)


def _values(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner = getattr(value, "py_func", value)
        yield _described(inner) if hasattr(inner, "__closure__") else value
