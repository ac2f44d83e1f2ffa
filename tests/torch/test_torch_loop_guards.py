"""Ways in which a loop could change unseen between calls, or do more than return tensors."""

from __future__ import annotations

import array
import contextvars
import cProfile
import datetime
import functools
import itertools
import os
import queue
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from looping import INPUTS, UNITS, Gru, Wild, sequence
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from sparsescan.torch import explain, loop
from sparsescan.torch.loops.loop import state_of

STEPS = 20


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    torch.manual_seed(5)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def is_captured(target: Any) -> bool:
    """Return whether kernels ran the last call."""
    state = state_of(target)
    assert state is not None
    return state.report.is_captured


def twins(kind: Any, *args: Any) -> tuple[Any, Any]:
    """Return a module that loops by kernels, and one like it."""
    ours, theirs = loop(kind(*args)), kind(*args)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


# -- What a late step reads, and what may change it ------------------------------------------------


class Late(Gru):
    """A loop that differs in one late step; a function says which."""

    def __init__(self, late: Callable[[], Any]) -> None:
        super().__init__()
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            states.append(h * 0.5 if t == self.late() else h)
        return torch.stack(states)


class Labelled(dict[str, int]):
    late = 99


class Holder:
    late = 99


other = types.ModuleType("other")
exec("table = {'late': 99}\nlate = 99\ndef of_module():\n    return late", vars(other))
context: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=99)
holder, labelled, numbers = Holder(), Labelled(), array.array("d", [99.0])
weight = nn.Parameter(torch.zeros(1))


def of_function() -> int:
    late: int = of_function.__dict__.setdefault("late", 99)
    return late


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "dict of a module": (lambda: other.table["late"], lambda t: other.table.update(late=t)),
    "global of a module": (lambda: other.of_module(), lambda t: setattr(other, "late", t)),
    "attribute of a dict": (lambda: labelled.late, lambda t: setattr(labelled, "late", t)),
    "attribute of a function": (of_function, lambda t: setattr(of_function, "late", t)),
    "array": (lambda: numbers[0], lambda t: numbers.__setitem__(0, t)),
    "weak reference": (
        functools.partial(lambda ref: ref().late, weakref.ref(holder)),
        lambda t: setattr(holder, "late", t),
    ),
    "environment": (
        lambda: int(os.environ.get("SPARSESCAN_LATE", "99")),
        lambda t: os.environ.update(SPARSESCAN_LATE=str(t)),
    ),
    "context": (lambda: context.get(), lambda t: context.set(t)),
    "attribute of a parameter": (
        lambda: getattr(weight, "late", 99),
        lambda t: setattr(weight, "late", t),
    ),
}


@pytest.mark.parametrize(("read", "change"), CHANGES.values(), ids=CHANGES)
def test_what_a_late_step_reads_is_seen_to_change(read: Any, change: Any) -> None:
    change(99)
    ours, theirs = twins(Late, read)
    (x,) = sequence(STEPS)
    for late in (99, 99, 12, 12, 99):
        change(late)
        torch.testing.assert_close(ours(x), theirs(x))
        assert not (is_captured(ours) and late == 12)
    change(99)


def test_what_arguments_carry_is_seen_to_change() -> None:
    class Tagged(Gru):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.begin(x)
            for t in range(x.shape[0]):
                h = self.cell(x[t] if x is y else y[t] * 2, h)
                h = h * 0.5 if t == getattr(x, "late", 99) else h
            return h

    ours, theirs = twins(Tagged)
    (x,), (y,) = sequence(STEPS), sequence(STEPS)
    for own in (y, y, x, x, y):
        torch.testing.assert_close(ours(x, own), theirs(x, own))
        assert is_captured(ours)
    x.late = 12  # type: ignore[attr-defined]
    torch.testing.assert_close(ours(x, y), theirs(x, y))


def test_a_view_may_begin_anywhere_in_memory() -> None:
    class Windows(Gru):
        def forward(self, x: Tensor) -> Tensor:
            shape = (x.shape[0] - 1, *x.shape[1:])
            rows, h = x.as_strided(shape, x.stride(), x.storage_offset()), self.begin(x)
            for t in range(rows.shape[0]):
                h = self.cell(rows[t] + x[t + 1], h)
            return h

    ours, theirs = twins(Windows)
    (x,) = sequence(40)
    for k in (0, 0, 5, 5):
        torch.testing.assert_close(ours(x[k : k + 20]), theirs(x[k : k + 20]))


# -- Numbers that say nothing ----------------------------------------------------------------------


class TwoBiases(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Parameter(torch.zeros(UNITS)), nn.Parameter(torch.zeros(UNITS))

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t], h) + (self.early if t < 10 else self.late)


class LastRowStays(Gru):
    def forward(self, x: Tensor) -> Tensor:
        h, rows = self.begin(x), self.rows(x)
        for t in range(len(rows)):
            h = self.cell(rows[min(t, 12)], h)
        return h

    def rows(self, x: Tensor) -> Any:
        return x.unbind(0)


class LastWordStays(LastRowStays):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, INPUTS)

    def rows(self, x: Tensor) -> Any:
        return [self.words(each) for each in x.unbind(0)]


def test_tensors_that_are_alike_are_told_apart() -> None:
    """A first call with zeros, or whose parameters are zeros, agrees with any loop."""
    cases: list[tuple[Any, Any]] = [
        (LastRowStays, torch.zeros(STEPS, 2, INPUTS)),
        (LastWordStays, torch.zeros(STEPS, 2, dtype=torch.int64)),
        (TwoBiases, torch.randn(STEPS, 2, INPUTS)),
    ]
    for kind, first in cases:
        ours, theirs = twins(kind)
        with torch.no_grad():
            ours(first)
            for net in (ours, theirs):
                for k, each in enumerate(net.parameters()):
                    each.copy_(torch.linspace(-1, 1 + k, each.numel()).reshape(each.shape))
            is_integer = first.dtype == torch.int64
            x = torch.randint(0, 7, first.shape) if is_integer else torch.randn(first.shape)
            for _ in range(2):
                torch.testing.assert_close(ours(x), theirs(x))


def test_words_that_are_all_alike_wait_for_others() -> None:
    class Words(LastWordStays):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(2, UNITS)
            for row in x:
                h = self.cell(self.words(row), h)
            return h

    ours, theirs = twins(Words)
    for x, runs in ((torch.zeros(STEPS, 2).long(), False), (torch.randint(0, 7, (STEPS, 2)), True)):
        for _ in range(2):
            torch.testing.assert_close(ours(x), theirs(x))
            assert is_captured(ours) is runs


# -- What a call does besides returning tensors ----------------------------------------------------


queued: queue.SimpleQueue[int] = queue.SimpleQueue()
counted = bytearray(1)
draws = np.random.default_rng(0)
vars(other)["numbers_of_module"] = draws


def counting() -> int:
    counting.__dict__["count"] = counting.__dict__.get("count", 0) + 1
    return counting.__dict__["count"]


class Does(Wild):
    """A loop each of whose steps does something."""

    def __init__(self, effect: Callable[[], Any]) -> None:
        super().__init__()
        self.effect = effect

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        self.effect()
        return self.cell(x[t], h)


def _count() -> None:
    counted[0] = (counted[0] + 1) % 251


EFFECTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "queue": (lambda: queued.put(1), queued.qsize),
    "attribute of a function": (counting, lambda: counting.__dict__.get("count", 0)),
    "bytes": (_count, lambda: counted[0]),
    "generator of a module": (
        lambda: other.numbers_of_module.random(),
        lambda: str(draws.bit_generator.state),
    ),
}


@pytest.mark.parametrize(("effect", "state"), EFFECTS.values(), ids=EFFECTS)
def test_effects_happen_in_each_step(effect: Any, state: Any) -> None:
    ours = loop(Does(effect))
    (x,) = sequence(STEPS)
    for _ in range(3):
        begun = state()
        ours(x)
        after = state()
        assert begun != after
        if isinstance(begun, int):
            assert after - begun == STEPS
        else:
            bits: Any = draws.bit_generator
            moved = bits.state
            bits.advance(-STEPS)
            assert str(bits.state) == begun
            bits.state = moved


class Lists(Gru):
    def forward(self, x: Tensor, states: Any) -> Tensor:
        h = self.begin(x)
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            if isinstance(states, list):
                states.append(h)
            else:
                states["last"] = h
        return h


def test_lists_and_dicts_of_the_caller_are_filled() -> None:
    for kind in (list, dict):
        ours, theirs = twins(Lists)
        (x,) = sequence(STEPS)
        for _ in range(3):
            found, expected = kind(), kind()
            torch.testing.assert_close(ours(x, found), theirs(x, expected))
            torch.testing.assert_close(found, expected)


def test_iterators_clocks_and_streams_stay_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    effects: list[Any] = [
        itertools.count().__next__,
        datetime.datetime.now,
        lambda: os.getpid(),
        lambda: sys.stderr.write("."),
    ]
    for effect in effects:
        ours = loop(Does(effect))
        for _ in range(3):
            ours(*sequence(STEPS))
            assert not is_captured(ours)
    assert capsys.readouterr().err == "." * STEPS * 3


def test_arrays_that_a_trace_changes_are_put_back() -> None:
    counts = np.zeros(3, int)

    def count() -> None:
        counts[1] += 1

    ours = loop(Does(count))
    ours(*sequence(STEPS))
    assert counts.tolist() == [0, STEPS, 0]


@functools.lru_cache
def begin(batch: int) -> Tensor:
    return torch.zeros(batch, UNITS)


class Remembers(Gru):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(type(self), "steps"):
            type(self).steps = len(x)  # type: ignore[attr-defined]
        h = begin(x.shape[1])
        for t in range(x.shape[0]):
            h = self.cell(x[t], h) / type(self).steps  # type: ignore[attr-defined]
        return h


def test_nothing_is_remembered_from_traces() -> None:
    ours, (x,) = loop(Remembers()), sequence(STEPS)
    for k in range(3):
        found = ours(x)
        assert is_captured(ours) is (k > 0)
        assert Remembers.steps == STEPS  # type: ignore[attr-defined]
        begin.cache_clear()
        h = torch.zeros(2, UNITS)
        for row in x:
            h = ours.cell(row, h) / STEPS
        torch.testing.assert_close(found, h)
        begin(2)
    normed = Gru()
    parametrizations.weight_norm(normed.cell, "weight_hh")

    def run(x: Tensor) -> Tensor:
        h = torch.zeros(2, UNITS)
        for row in x:
            h = normed.cell(row, h)
        return h

    run_ours = loop(run)
    for _ in range(2):
        with parametrize.cached():
            torch.testing.assert_close(run_ours(x), run(x))


def test_assignments_to_tensors_and_errors_that_a_step_catches() -> None:
    class Sets(Wild):
        def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
            x.requires_grad = True
            return self.cell(x[t], h)

    class Catches(Wild):
        def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
            h = self.cell(x[t], h)
            try:
                return h * (0.5 if torch.equal(h > 9, h > 8) else 0.1)
            except RuntimeError:  # there are no numbers in a trace
                return h * 0.5

    ours = loop(Sets())
    with torch.no_grad():
        for _ in range(3):
            (x,) = sequence(STEPS)
            ours(x)
            assert x.requires_grad
    ours, theirs = twins(Catches)
    (x,) = sequence(STEPS)
    for _ in range(2):
        torch.testing.assert_close(ours(x), theirs(x))
    assert not is_captured(ours)


def test_profilers_stay() -> None:
    ours, profiler = loop(LastRowStays()), cProfile.Profile()
    begun = sys.getprofile()
    profiler.enable()
    ours(*sequence(12))
    assert not is_captured(ours)
    profiler.disable()
    assert sys.getprofile() is begun
    assert explain(ours, *sequence(12)).is_captured is (begun is None)


FIRST = """
import torch
from sparsescan.torch import explain, loop
cell = torch.nn.GRUCell(3, 4)
def run(x):
    h = torch.zeros(2, 4)
    for row in x:
        h = cell(row, h)
    return h
print(explain(loop(run), torch.randn(20, 2, 3)))
"""


def test_imports_of_pytorch_are_no_effects() -> None:
    """Its tracer is imported at the first call of a process, and reads the number of that."""
    found = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert "kernels run the carries" in found.stdout, found
