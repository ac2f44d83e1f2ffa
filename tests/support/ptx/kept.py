"""Keep compiled kernels on disk, as Numba keeps those for the CPU.

A kernel has a file beside Numba's, named by what it is made for. It says from which sources, by
which compilers and for which CPU it was made, and is written anew where one of them has changed.
The sources are the kernel's modules, and those that they import from the package: where another
module has changed, the kernel need not be compiled.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from cuda.pathfinder import load_nvidia_dynamic_lib

import sparsescan

_FOLDER = Path(__file__).parent / "__pycache__"
_PACKAGE = sparsescan.__name__
# What loads and launches kernels, and is no part of any.
_LAUNCHES = f"{_PACKAGE}.kernels.cuda.machine_code"
_TRANSLATORS = "kept", "machine", "parse", "runner", "translate"
_COMPILERS = "numba", "numba-cuda", "llvmlite", "numpy", "cuda-core", "cuda-bindings"


def keep(kernel: Any, options: Any, make: Callable[[], Any]) -> Any:
    """Return what `make` returns for a kernel and some options, and keep it.

    A kernel that is not of `sparsescan` is made anew: its sources are not known here.
    """
    if not kernel.py_func.__module__.startswith(f"{_PACKAGE}."):
        return make()
    functions = list(_functions(kernel.py_func))
    origin = _origin(frozenset(each.__module__ for each in functions))
    name = _digest([_described(each) for each in functions], options)
    file = _FOLDER / f"{kernel.py_func.__name__}-{name[:20]}.ptx"
    with suppress(OSError, ValueError, EOFError, pickle.PickleError, zlib.error):
        made_of, content = pickle.loads(file.read_bytes())
        if made_of == origin:
            return pickle.loads(zlib.decompress(content))
    compiled = make()
    content = pickle.dumps((origin, zlib.compress(pickle.dumps(compiled), 1)))
    own = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a folder that is not writable
        _FOLDER.mkdir(exist_ok=True)
        own.write_bytes(content)
        own.replace(file)
    return compiled


@cache
def _origin(modules: frozenset[str]) -> str:
    """Return a digest of all that kernels of these modules are made of and by, but for options."""
    sources = [_path(module) for module in sources_of(modules)]
    sources += [Path(__file__).parent / f"{name}.py" for name in _TRANSLATORS]
    library = Path(load_nvidia_dynamic_lib("nvvm").abs_path)
    return _digest(
        *[file.read_bytes() for file in sources],
        *[importlib.metadata.version(name) for name in _COMPILERS],
        (str(library), library.stat().st_size, library.stat().st_mtime_ns),
        (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()),
    )


def sources_of(modules: Iterable[str]) -> list[str]:
    """Return modules of the package, and those of it that they import, in order."""
    seen: set[str] = set()
    left = set(modules)
    while left:
        seen.add(module := left.pop())
        left |= set(_imports(module)) - seen
    return sorted(seen)


def _path(module: str) -> Path:
    """Return the file of a module of the package, or of its folder."""
    path = Path(sparsescan.__file__).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imports(module: str) -> Iterator[str]:
    """Yield the modules of the package whose names a module takes."""
    path = _path(module)
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            taken = importlib.util.resolve_name(name, folder)
            if f"{taken}.".startswith(f"{_PACKAGE}.") and taken != _LAUNCHES:
                inner = [f"{taken}.{alias.name}" for alias in node.names]
                yield from (each if _path(each).exists() else taken for each in inner)


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _functions(function: Any) -> Iterator[Any]:
    """Yield a function, and all those that it was made with."""
    yield function
    for cell in function.__closure__ or ():
        inner = getattr(cell.cell_contents, "py_func", cell.cell_contents)
        if hasattr(inner, "__closure__"):
            yield from _functions(inner)


def _described(function: Any) -> tuple[Any, ...]:
    """Return the name of a function, and the values that it was made with: constants for Numba."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    plain = [None if hasattr(getattr(v, "py_func", v), "__closure__") else v for v in values]
    # A text that was written by the program is in a file named by all that is in it.
    file = function.__code__.co_filename
    written = [file] if file.startswith("<") else []
    return function.__module__, function.__qualname__, *written, *plain
