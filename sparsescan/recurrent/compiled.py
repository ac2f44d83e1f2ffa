"""Functions of a cell for the CPU: source, machine code, and a cache for later processes."""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import os
import re
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numba
import numpy as np

from ..kernels.compile import cache_folder, entry_for_c, njit
from ..locks import new_lock
from .loops.sequences import run
from .loops.stages import signature
from .program import CellProgram
from .render.cpu import CPURenderer

_lock = new_lock()


class Code(NamedTuple):
    """The functions of a cell for a dtype.

    Attributes
    ----------
    forward, backward : int
        Their addresses.
    """

    forward: int
    backward: int


_HEADER = '''"""{name}: its passes over a step, for vectors on a CPU. Written by sparsescan."""

from sparsescan.kernels.cpu.functions import *
from sparsescan.kernels.cpu.lanes import *


'''


@cache
def _renderers() -> WeakKeyDictionary[CellProgram, CPURenderer]:
    return WeakKeyDictionary()


def renderer_of(program: CellProgram) -> CPURenderer:
    """Return the renderer of the functions of a program."""
    with _lock:
        renderer = _renderers().get(program)
        if renderer is None:
            renderer = _renderers()[program] = CPURenderer(program)
        return renderer


def source_of(program: CellProgram, name: str) -> str:
    """Return the source of both functions of a program; `name` is the cell's."""
    renderer = renderer_of(program)
    return _HEADER.format(name=name) + renderer.forward + "\n\n" + renderer.backward


_codes: dict[tuple[str, str], Code] = {}


def code_of(program: CellProgram, name: str, dtype: np.dtype[Any]) -> Code:
    """Return the compiled functions of a program for a dtype; `name` is the cell's."""
    source = source_of(program, name)
    key = source, dtype.char
    with _lock:
        code = _codes.get(key)
        if code is None:
            module = _module_of(source, name)
            kinds: tuple[Any, ...] = signature(numba.from_dtype(dtype))  # type: ignore[no-untyped-call]
            options: dict[str, Any] = {"nogil": True, "cache": True, "_nrt": False}
            functions = [njit(getattr(module, each), **options) for each in ("forward", "backward")]
            _kept.extend(functions)
            code = _codes[key] = Code(*(entry_for_c(each, kinds) for each in functions))
        return code


# Machine code lives as long as its function.
_kept: list[Any] = []


@cache
def _module_of(source: str, name: str) -> ModuleType:
    """Return a module with this source, from a file if one can be written."""
    digest = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
    title = f"sparsescan_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()}_{digest}"
    path = _file_of(source, title)
    if path is None:
        place = f"<sparsescan cell {title}>"
        module = sys.modules[title] = ModuleType(title)
        linecache.cache[place] = len(source), None, source.splitlines(True), place
        exec(compile(source, place, "exec"), vars(module))
        return module
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None
    assert spec.loader is not None
    # Cached code names its module.
    module = sys.modules[title] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file_of(source: str, title: str) -> Path | None:
    """Return a file with this source, in its own folder next to compiled code."""
    folder = cache_folder(run.py_func)
    if folder is None:
        return None
    path = folder / "cells" / title / "step.py"
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == source:
            return path
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        other = path.with_name(f"step.{os.getpid()}.{threading.get_ident()}")
        other.write_text(source, encoding="utf-8")
        other.replace(path)
        return path
    return None
