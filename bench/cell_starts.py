"""What a new cell costs: its first training step, each in a process of its own; and its lines."""

from __future__ import annotations

import ast
import inspect
import io
import shutil
import sys
import tempfile
import tokenize
from functools import cache
from statistics import median

from sparsescan.recurrent import catalogue

from . import children
from .experiment import Results

__all__ = ["EMPTY", "IMPORT", "KEPT", "LIBRARY", "lines_of_code", "measure_lines", "measure_start"]

# What is compiled when a process begins.
EMPTY, LIBRARY, KEPT = "nothing is compiled", "other cells are compiled", "compiled before"
IMPORT = "import"

_TIMED = """
import time
begin = time.perf_counter()
import numpy as np
from sparsescan.recurrent import catalogue
imported = time.perf_counter()
for kind in {kinds}:
    class Mine(getattr(catalogue, kind)):
        pass
    Mine.__name__ = Mine.__qualname__ = {name!r} + kind
    x = np.ones((1000, 16, 12), np.float32)
    start = time.perf_counter()
    step = Mine(12, 20, rng=0).training_step()
    output, _ = step.forward(x)
    step.backward(output)
    print(imported - begin, time.perf_counter() - start)
"""
# Cells that are compiled beforehand, with products of the state and with none, in several stages.
_OTHERS = "CFN", "MUT1", "TRNN", "SCRN"


def measure_start(kind: str, rounds: int) -> Results:
    """Return ``seconds`` of first steps of a cell, by what is compiled, and those of imports.

    The cell is a new class with the step of one of the catalogue. Where nothing is compiled, not
    even what all cells share, a step takes about a minute, and is timed once.
    """
    seconds: dict[str, list[float]] = {EMPTY: [], LIBRARY: [], KEPT: [], IMPORT: []}
    with tempfile.TemporaryDirectory() as folder:
        for state in (EMPTY, *(KEPT,) * rounds):
            imported, taken = _start((kind,), folder)
            seconds[state].append(taken)
            seconds[IMPORT].append(imported)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(_library(), folder, dirs_exist_ok=True)
            seconds[LIBRARY].append(_start((kind,), folder)[1])
    return {"seconds": seconds}


@cache
def _library() -> str:
    """Return a folder with the compiled code of other cells."""
    folder = tempfile.mkdtemp()
    _start(_OTHERS, folder, "Other")
    return folder


def _start(kinds: tuple[str, ...], folder: str, name: str = "New") -> tuple[float, float]:
    """Return seconds of the import and of the last of some first steps, in a new process."""
    code = _TIMED.format(kinds=kinds, name=name)
    said = children.run([sys.executable, "-c", code], {"NUMBA_CACHE_DIR": folder})
    imported, taken = map(float, said.splitlines()[-1].split())
    return imported, taken


# -- Lines ----------------------------------------------------------------------------------------


def measure_lines() -> Results:
    """Return the ``lines`` of code of each definition of the catalogue."""
    kinds = [getattr(catalogue, name) for name in catalogue.__all__]
    return {"lines": {kind.__name__: lines_of_code(inspect.getsource(kind)) for kind in kinds}}


def lines_of_code(source: str) -> int:
    """Count lines that have code: no docstrings, no comments, no blank lines."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.Module)
    texts: set[int] = set()
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, documented) and ast.get_docstring(each) is not None:
            text = each.body[0]
            texts.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    nothing = (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        tokenize.ENDMARKER,
    )
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - texts)


def median_lines(lines: dict[str, int]) -> float:
    """Return the median of the lines of all definitions."""
    return median(lines.values())
