"""Small faults in the Python of a room, and whether a test tells.

``python tests/support/mutants.py plan chains`` draws faults in the functions of these rooms, runs
for each the tests that call its function, until one fails, and prints faults that none tells. Which
test calls which function is traced when tests have changed, and kept in ``build/mutants.json``;
functions that only children of tests call, on ranks or devices, are left out.

A fault is a comparison, an operator or a number that is another one, a condition that is negated, a
statement that is left out, or a result that is None. It stands in memory only: files stay as they
are. Compiled functions are left alone; :mod:`ptx.mutants` is for those of CUDA.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numba  # noqa: F401  # what all tests import is imported once
import numpy as np  # noqa: F401
import pytest
import scipy.sparse  # noqa: F401

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "build" / "mutants.json"
# Bytes of addresses, and seconds, that tests of a fault may take beyond what they take without.
MEMORY, PATIENCE = 24 << 30, 30
QUIET = ["-x", "-q", "-n0", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, And Or, Mult Add, FloorDiv Mult, "
PAIRS += "Div Mult, Mod FloorDiv, LShift RShift, BitOr BitAnd"
NAMES = [pair.split() for pair in PAIRS.split(", ")]
# What each operator becomes; in the first pairs, which are written first, either the other.
OTHER = {getattr(ast, b): getattr(ast, a) for a, b in NAMES[:7]}
OTHER |= {getattr(ast, a): getattr(ast, b) for a, b in NAMES}


class Fault(NamedTuple):
    """The node of a file, by its place in :func:`places`, and the function that it is in."""

    path: str
    number: int
    line: int
    kind: str
    function: str

    def __str__(self) -> str:
        text = (ROOT / self.path).read_text().splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}: {self.kind}: {text}"


def places(tree: ast.Module) -> Iterator[tuple[str, str, ast.AST, Callable[[], None]]]:
    """Yield the function, the kind, the node and the change of each fault that a file can have."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("njit" in ast.unparse(each) for each in function.decorator_list):
            continue
        start = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        for statement in function.body:
            for node in _own(statement):
                yield from ((f":{start}", *each) for each in _changes(node))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function holds itself, but for text."""
    is_inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if is_inner or isinstance(node, ast.JoinedStr | ast.ClassDef | ast.AnnAssign):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _own(child)


def _changes(node: Any) -> Iterator[tuple[str, ast.AST, Callable[[], None]]]:
    if isinstance(node, ast.Compare):
        other = OTHER[type(node.ops[0])]
        yield "comparison", node, lambda: node.ops.__setitem__(0, other())
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OTHER:
        yield "operator", node, lambda: setattr(node, "op", OTHER[type(node.op)]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "number", node, lambda: setattr(node, "value", node.value + 1)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "negated", node, lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield "no result", node, lambda: setattr(node, "value", ast.Constant(None))
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_write = isinstance(node, ast.Assign) and not isinstance(
        node.targets[0], ast.Name | ast.Tuple
    )
    if is_call or is_write or isinstance(node, ast.Raise | ast.AugAssign):
        # `if False` around it: it is neither run nor missed.
        yield "left out", node, lambda: setattr(node, "is_left_out", True)


class _WithoutSome(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        return ast.Pass() if hasattr(node, "is_left_out") else self.generic_visit(node)


def faults_of(room: str) -> list[Fault]:
    """Return all faults that functions of a room, a folder or a file, can have."""
    target = ROOT / "sparsescan" / room
    files = sorted(target.rglob("*.py")) if target.is_dir() else [target.with_suffix(".py")]
    files = [file for file in files if "__pycache__" not in file.parts]
    found = []
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        for number, (function, kind, node, _) in enumerate(places(ast.parse(file.read_text()))):
            found.append(Fault(path, number, getattr(node, "lineno", 0), kind, path + function))
    return found


class _Loader(importlib.machinery.SourceFileLoader):
    """Import one module with a fault."""

    def __init__(self, fault: Fault) -> None:
        name = fault.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(name, str(ROOT / fault.path))
        self.fault = fault

    def find_spec(self, name: str, *_: Any) -> Any:
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)
        return None

    def get_code(self, _: str) -> Any:
        tree = ast.parse(Path(self.path).read_text())
        list(places(tree))[self.fault.number][-1]()
        tree = ast.fix_missing_locations(_WithoutSome().visit(tree))
        return compile(tree, self.path, "exec")


def in_child(run: Callable[[], Any], patience: float) -> int | None:
    """Return the exit status of a process that runs a function, or None if it takes too long."""
    child = os.fork()
    if not child:
        status = 3
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            status = int(run())
        finally:
            os._exit(status)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Tracer:
    """Note which functions each test calls, and how long it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, list[str]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        called, start, own = set(), time.monotonic(), str(ROOT / "sparsescan")

        def trace(frame: Any, *_: Any) -> None:
            code = frame.f_code
            if code.co_filename.startswith(own):
                called.add((code.co_filename, code.co_firstlineno))

        threading.settrace(trace)
        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            names = [f"{os.path.relpath(file, ROOT)}:{line}" for file, line in sorted(called)]
            self.tests[item.nodeid] = time.monotonic() - start, names

    def run(self, folder: Path) -> int:
        status = pytest.main([*QUIET[1:], str(folder)], plugins=[self])
        (TRACE.parent / f"mutants-{folder.name}.json").write_text(json.dumps(self.tests))
        return status


def trace() -> dict[str, list[tuple[float, str]]]:
    """Return the tests that call each function, by its file and line, quick ones first."""
    newest = max(file.stat().st_mtime for file in (ROOT / "tests").rglob("*.py"))
    if not TRACE.exists() or TRACE.stat().st_mtime < newest:
        TRACE.parent.mkdir(exist_ok=True)
        folders = [each for each in sorted((ROOT / "tests").iterdir()) if each.is_dir()]
        left = [
            each for each in folders if each.name not in ("support", "docs", "gpu", "__pycache__")
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: in_child(lambda: Tracer().run(each), 1800), left))
        found = collections.defaultdict(list)
        for folder in left:
            part = TRACE.parent / f"mutants-{folder.name}.json"
            for test, (seconds, functions) in json.loads(part.read_text()).items():
                for function in functions:
                    found[function].append((seconds, test))
        TRACE.write_text(json.dumps({key: sorted(tests) for key, tests in found.items()}))
    return json.loads(TRACE.read_text())


def is_told(fault: Fault, tests: list[tuple[float, str]], seconds: float) -> bool:
    """Return whether a test fails: of the file with the most first, then the quickest of all."""
    files = collections.Counter(name.partition("::")[0] for _, name in tests)
    most = max(files, key=lambda file: files[file])
    own = [test for test in tests if test[1].startswith(most)]
    return any(_fails(fault, some, seconds) for some in (own, tests))


def _fails(fault: Fault, tests: list[tuple[float, str]], seconds: float) -> bool:
    ends = itertools.accumulate(own for own, _ in tests)
    names = [name for end, (_, name) in zip(ends, tests, strict=True) if end <= seconds]

    def run() -> int:
        sys.meta_path.insert(0, _Loader(fault))
        return pytest.main([*QUIET, *(names or [tests[0][1]])])

    return in_child(run, PATIENCE + 2 * seconds) != 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rooms", nargs="+", help="folders or files of sparsescan")
    parser.add_argument("--number", type=int, default=25, help="of faults that are drawn in a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30, help="of tests of a fault")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    tests = trace()
    for room in options.rooms:
        faults = [fault for fault in faults_of(room) if fault.function in tests]
        drawn = random.Random(options.seed).sample(faults, min(options.number, len(faults)))
        with ThreadPoolExecutor(options.processes) as pool:
            told = list(pool.map(lambda x: is_told(x, tests[x.function], options.seconds), drawn))
        for fault, is_known in zip(drawn, told, strict=True):
            if not is_known:
                print(fault)
        print(f"| {room} | {len(drawn)} of {len(faults)} | {sum(told)} |", flush=True)


if __name__ == "__main__":
    main()
