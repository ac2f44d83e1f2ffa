"""Forks at lines at which a thread holds a lock: the child makes the call that the thread is in."""

from __future__ import annotations

import ast
import importlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sampling

import sparsescan
from sparsescan import locks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]
ROOT = Path(sparsescan.__file__).parent
Work = Callable[[], Any]


def blocks_of(file: str, *functions: str) -> list[range]:
    """Lines of each ``with`` of a lock in a file, and those of functions that it calls there."""
    text = (ROOT / file).read_text()
    tree = ast.parse(text if "new_lock" in text else "")
    names = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "new_lock()"
        for target in node.targets
    }
    return [
        range(node.body[_is_documented(node)].lineno, node.end_lineno + 1)
        for node in ast.walk(tree)
        if (isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr) in names)
        or (isinstance(node, ast.FunctionDef) and node.name in functions)
    ]


def _is_documented(node: ast.With | ast.FunctionDef) -> bool:
    return isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None


def fork_at_lines(file: str, blocks: list[range], work: Work) -> set[int]:
    """Fork when a thread that works comes to such lines for the first time; return these lines.

    The child does the same work. A sample forks at the first line of each block, and some others.
    """
    path, left = str(ROOT / file), {line for block in blocks for line in block}
    if not sampling.is_long:
        some = random.sample(sorted(left), min(len(left), 2 * len(blocks)))
        left = {block[0] for block in blocks} | set(some)
    seen: set[int] = set()
    there, go_on = threading.Semaphore(0), threading.Semaphore(0)
    results: list[Any] = []
    has_ended: list[bool] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != path:
            return None
        if event == "line" and frame.f_lineno in left:
            left.remove(frame.f_lineno)
            seen.add(frame.f_lineno)
            there.release()
            go_on.acquire()
        return trace

    def call() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            results.append(work())
        finally:
            sys.settrace(before)
            has_ended.append(True)
            there.release()

    thread = threading.Thread(target=call)
    thread.start()
    there.acquire()
    found = []
    try:
        while not has_ended:
            found.append(in_child(work))
            go_on.release()
            there.acquire()
    finally:
        left.clear()
        go_on.release()
    thread.join()
    assert found == [repr(results[0])] * len(found)
    return seen


def in_child(work: Work) -> str:
    """Return as text what a child that is forked now finds, within two minutes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)
        try:
            os.write(writer, repr(work()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, "the child hung" if status == -signal.SIGALRM else f"it ended by {status}"
    return text


# -- Work for each file that has locks ------------------------------------------------------------


def compiled(monkeypatch: pytest.MonkeyPatch) -> Work:
    from sparsescan.recurrent import catalogue, compiled

    monkeypatch.setattr(compiled, "_codes", {})
    compiled._renderers().clear()
    program = catalogue.MGU(3, 4).program
    return lambda: bool(compiled.code_of(program, "MGU", np.dtype(np.float32)).forward)


def tangent(monkeypatch: pytest.MonkeyPatch) -> Work:
    from sparsescan.recurrent import catalogue, tangent

    monkeypatch.setattr(tangent, "_tangents", {})
    options = catalogue.MGU(3, 4).options
    return lambda: tangent.tangent_of(catalogue.MGU, options, True).names


def operations(_: pytest.MonkeyPatch) -> Work:
    from sparsescan.graph.operations import node, number

    value = np.random.default_rng().random()
    return lambda: node("tanh", number(value)) is node("tanh", number(value))


def simulation(_: pytest.MonkeyPatch) -> Work:
    from sparsescan.simulate import TimeSteps

    sim = TimeSteps(lambda u, t, p: -p * u**3, np.eye(40))
    u0 = np.random.default_rng().random(40)
    run = sim.forward(u0, 0.5, steps=40, dt=0.1, memory_limit=18_000)
    assert run.states is None
    return lambda: run.backward(grad_last=np.ones(40)).u0.round(6).tolist()


def pattern(_: pytest.MonkeyPatch) -> Work:
    def work() -> list[bool]:
        one, other = (sparsescan.Pattern([0, 1, 3], [1, 0, 2], (2, 3)) for _ in range(2))
        return [one is other, sparsescan.Pattern.diagonal(77) is sparsescan.Pattern.diagonal(77)]

    return work


def programs(monkeypatch: pytest.MonkeyPatch) -> Work:
    pytest.importorskip("jax")
    from sparsescan.jax.ffi import programs
    from sparsescan.jax.ffi.handler import Program, Root

    programs._register()
    monkeypatch.setattr(programs, "_programs", {})
    monkeypatch.setattr(programs, "_tables", [])
    monkeypatch.setattr(programs, "_root", np.zeros(Root.SIZE, np.int64))
    keys = np.random.default_rng().integers(1, 1 << 62, 20).tolist()

    def work() -> list[int]:
        header = np.zeros(1, np.int64)
        for k, key in enumerate(keys):
            about = SimpleNamespace(header=header, words=k, width=1, results=[])
            programs.add(key, about, [0], 0)  # type: ignore[arg-type]
        table = programs._tables[-1]
        assert programs._root[Root.TABLE] == table.ctypes.data
        return [_found(table, key)[Program.WORDS] for key in keys]

    def _found(table: Any, key: int) -> Any:
        import ctypes

        place = key & int(table[0, 0])
        while table[1 + place, 0] != key:
            assert table[1 + place, 0], "a key is missing"
            place = (place + 1) & int(table[0, 0])
        size = ctypes.c_int64 * Program.SIZE
        return list(size.from_address(int(table[1 + place, 1])))

    return work


def helpers(monkeypatch: pytest.MonkeyPatch) -> Work:
    from sparsescan.execution import threads

    monkeypatch.setattr(threads, "_crew", None)

    def work() -> list[int]:
        done: list[int] = []
        crew = threads._helpers()
        crew._start()
        threads.share(done.append, 20)
        return sorted(done)

    return work


def numbers(*tensors: Any) -> list[Any]:
    # PyTorch may compute the first calls.
    return [each.detach().double().flatten().round(decimals=4).tolist() for each in tensors]


def _torch() -> Any:
    torch = pytest.importorskip("torch")
    importlib.import_module("sparsescan.torch")
    return torch


def prepared(_: pytest.MonkeyPatch) -> Work:
    torch = _torch()
    from sparsescan.torch.calls import prepared

    net, x = sparsescan.torch.GRU(3, 5), torch.randn(4, 9, 3)
    prepared._forget()

    def work() -> list[Any]:
        with prepared.only("sparsescan"):
            output, _ = net(x)
            return numbers(output, *torch.autograd.grad(output.sum(), net.parameters()))

    return work


def operators(monkeypatch: pytest.MonkeyPatch) -> Work:
    torch = _torch()
    from collections import OrderedDict

    from sparsescan.torch.calls import recurrent_op

    monkeypatch.setattr(recurrent_op, "_steps", OrderedDict())
    net, x = sparsescan.torch.GRU(3, 5), torch.randn(4, 9, 3)
    resets = torch.rand(4, 9) < 0.5

    def work() -> list[Any]:
        output, _ = net(x, resets=resets)
        found = numbers(output, *torch.autograd.grad(output.sum(), net.parameters()))
        recurrent_op._steps.clear()
        return found

    return work


def transformed(monkeypatch: pytest.MonkeyPatch) -> Work:
    torch = _torch()
    from collections import OrderedDict

    from sparsescan.torch.calls import derivatives

    monkeypatch.setattr(derivatives, "_passes", OrderedDict())
    net, x = sparsescan.torch.GRU(3, 5), torch.randn(2, 4, 9, 3)
    return lambda: numbers(torch.func.vmap(lambda one: net(one)[0])(x))


def affine(monkeypatch: pytest.MonkeyPatch) -> Work:
    torch = _torch()
    from collections import OrderedDict

    from sparsescan.torch import affine

    monkeypatch.setattr(affine, "_known", OrderedDict())
    monkeypatch.setattr(affine, "_MOST", 1)
    a, b, first = torch.rand(7, 9), torch.rand(7, 9), torch.rand(9)

    def work() -> list[Any]:
        found = [sparsescan.torch.affine_scan(a, b) for _ in range(7)]
        return numbers(*found, sparsescan.torch.affine_scan(a[:1], b[:1], first))

    return work


def bound(monkeypatch: pytest.MonkeyPatch) -> Work:
    torch = _torch()
    from sparsescan.torch import binder

    monkeypatch.setattr(binder, "_MOST", 1)
    b, x = torch.rand(2), torch.rand(3, 9)

    def work() -> list[Any]:
        return numbers(*(sparsescan.torch.lfilter(b, 1.0, x[:k]) for k in (3, 2, *[3] * 7)))

    return work


def stacks(monkeypatch: pytest.MonkeyPatch) -> Work:
    torch = _torch()
    from torch.nn.utils import prune

    net = torch.nn.Sequential(*(torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 9)))
    for layer in net[::2]:
        prune.random_unstructured(layer, "weight", 0.9)
    sparsescan.torch.convert(net)
    x = torch.randn(3, 9)
    from sparsescan.torch import sequential

    monkeypatch.setattr(sequential, "_is_slower", lambda *_: False)
    sequential._stacks.clear()
    monkeypatch.setattr(sequential, "_MOST_NEW", 0)
    return lambda: [numbers(net(x)) for _ in range(3)]


def traced(monkeypatch: pytest.MonkeyPatch) -> Work:
    torch = _torch()
    from collections import OrderedDict

    from sparsescan.torch.capture import trace

    monkeypatch.setattr(trace, "_roots", OrderedDict())
    x = torch.randn(3, 9)
    init = torch.zeros(9)

    def work() -> list[Any]:
        trace._roots.clear()
        step = lambda h, x: (torch.tanh(h + x), x * h)  # noqa: E731
        last, ys = sparsescan.torch.scan(step, init, x)
        return numbers(last, ys)

    return work


# Those of CUDA are not there: a child cannot use it in any case.
WORK: dict[str, tuple[Callable[[pytest.MonkeyPatch], Work], tuple[str, ...]]] = {
    "execution/threads.py": (helpers, ()),
    "jax/ffi/programs.py": (programs, ("_publish",)),
    "recurrent/compiled.py": (compiled, ()),
    "graph/operations.py": (operations, ()),
    "recurrent/tangent.py": (tangent, ()),
    "simulate/run.py": (simulation, ("_backward", "_keep")),
    "symbolic/pattern.py": (pattern, ()),
    "torch/affine.py": (affine, ()),
    "torch/binder.py": (bound, ()),
    "torch/calls/derivatives.py": (transformed, ()),
    "torch/calls/prepared.py": (prepared, ()),
    "torch/calls/recurrent_op.py": (operators, ()),
    "torch/capture/trace.py": (traced, ()),
    "torch/sequential.py": (stacks, ()),
}


def test_each_file_with_locks_has_work() -> None:
    files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")}
    with_locks = {file for file in files if blocks_of(file) and "cuda" not in file}
    assert with_locks == set(WORK)


@pytest.mark.parametrize("file", WORK)
def test_a_child_does_what_another_thread_was_about(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, functions = WORK[file]
    make(monkeypatch)()  # kernels may have to be compiled, which takes longer than a child has
    work = make(monkeypatch)
    blocks = blocks_of(file, *functions)
    seen = fork_at_lines(file, blocks, work)
    assert all(seen & set(block) for block in blocks), "a lock was never held"


class Slow:
    """An attribute that takes its time."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    @locks.cached_property
    def number(self) -> int:
        self.begun.set()
        self.end.wait(0 if os.getpid() != HERE else None)
        return 5


HERE = os.getpid()


def test_a_child_reads_an_attribute_that_another_thread_computes() -> None:
    slow = Slow()
    thread = threading.Thread(target=lambda: slow.number)
    thread.start()
    slow.begun.wait()
    assert in_child(lambda: slow.number) == "5"
    slow.end.set()
    thread.join()


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    lock = locks.new_lock()

    def release() -> bool:
        lock.release()
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=1)))
        thread.start()
        thread.join()
        return taken[0]

    with lock:
        assert in_child(release) == "True"
