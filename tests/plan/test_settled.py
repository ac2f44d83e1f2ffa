"""A plan never chooses for its input a schedule that is predicted to take longer than linear."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import random_machine, random_patterns, same_bits

import sparsescan
from sparsescan import MemoryLimitError, Pattern, ScanPlan, Schedule
from sparsescan.plan.choice import PlanChoice
from sparsescan.plan.costs.cpu import Cpu, CpuModel, load_cpu
from sparsescan.plan.costs.operations import run_time
from sparsescan.plan.search import Search
from sparsescan.recurrent import GRUCell, LSTMCell, RNNCell
from sparsescan.symbolic.pattern import of_mask
from sparsescan.symbolic.program import Program

chooser = importlib.import_module("sparsescan.plan.search")
scan_plan = importlib.import_module("sparsescan.plan.scan_plan")
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)
BUILT_IN = load_cpu(Path("no such file"))
KINDS = [(batch, dtype) for batch in (1, 16, 64) for dtype in (F4, F8)]


def predicted(program: Program, machine: Cpu, threads: int, differs: Any, kind: Any) -> float:
    """By a model of this file's own, not the plan's."""
    batch, dtype = kind
    return run_time(CpuModel(machine, dtype, batch, threads, differs), program)


def made_up(patterns: Sequence[Pattern], batch: int, dtype: Any, differs: Any) -> list[Any]:
    rng = np.random.default_rng(batch)
    return [
        (rng.random((batch, pattern.nnz) if own else pattern.nnz) / (pattern.nnz + 1)).astype(dtype)
        for pattern, own in zip(patterns, differs, strict=True)
    ]


def run(plan: ScanPlan, batch: int, dtype: Any, differs: Any = None) -> Any:
    differs = np.ones(plan.n, bool) if differs is None else differs
    values = made_up(plan.patterns, batch, dtype, differs)
    return plan.exclusive_scan(np.ones((batch, plan.patterns[0].shape[1]), dtype), values)


def assert_no_slower(plan: ScanPlan, machine: Cpu, threads: int, differs: Any, kind: Any) -> None:
    program = Program(plan.patterns, plan.schedule, dense=plan.dense)
    linear = Program(plan.patterns, Schedule.linear(plan.n))
    time = predicted(program, machine, threads, differs, kind)
    assert time <= predicted(linear, machine, threads, differs, kind), (plan.schedule, kind)
    # It is also what the plan says that it takes.
    said = plan.to_dict()
    assert said["predicted_for"] == {"batch": kind[0], "dtype": kind[1].name}
    levels = sum(level["nanoseconds"] for level in said["levels"])
    assert said["run_nanoseconds"] + levels == pytest.approx(time)


def orders(n: int, size: int = 256) -> list[Pattern]:
    """Permutations, which are worth multiplying where threads are idle."""
    rng = np.random.default_rng(0)
    return [of_mask(np.eye(size, dtype=bool)[rng.permutation(size)]) for _ in range(2)] * (n // 2)


# ---------------------------------------------------------------------------------------------
# Never slower than the linear scan
# ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_on_any_chain_and_machine(small_grains: None, as_if: Any, seed: int) -> None:
    """By one plan, which nobody told what will run: all, some or no Jacobians are shared."""
    rng = np.random.default_rng(seed)
    patterns = random_patterns(rng, int(rng.integers(2, 30)), 4, 30)
    machine, threads = random_machine(rng), int(rng.choice([1, 2, 16, 64]))
    as_if(threads, machine)
    plan = sparsescan.plan(patterns)
    for batch, dtype in rng.permutation(np.array(KINDS, object)):
        differs = rng.random(plan.n) < rng.choice([0, 0.5, 1])
        run(plan, batch, dtype, differs)
        # Nothing differs where there are no values.
        some = np.array([pattern.nnz > 0 for pattern in patterns])
        shown = None if batch == 1 else differs & some
        assert_no_slower(plan, machine, threads, shown, (batch, dtype))


@pytest.mark.parametrize("threads", [2, 64])
@pytest.mark.parametrize("cell", [RNNCell, GRUCell, LSTMCell])
@pytest.mark.parametrize("form", ["explicit", "implicit", "factors"])
def test_on_recurrent_cells(
    small_grains: None, as_if: Any, threads: int, cell: Any, form: str
) -> None:
    """The weights of implicit steps, and of a chain of their factors, are shared by all samples."""
    as_if(threads)
    layer = cell(4, 12, rng=0)
    steps = 40
    patterns: list[Any] = {
        "explicit": [layer.pattern],
        "implicit": [layer.implicit_pattern],
        "factors": [*layer.implicit_pattern.factors],
    }[form] * steps
    plan = sparsescan.plan(patterns)
    differs = np.ones(steps, bool) if form == "explicit" else np.arange(2 * steps) % 2 == 0
    for batch, dtype in KINDS:
        x = np.random.default_rng(0).standard_normal((steps, batch, 4)).astype(dtype)
        states = layer.unroll(x)
        linearized = layer.linearize(x, states[:-1])
        chain: Any = linearized.implicit()
        chain = {"explicit": linearized.values()[::-1], "factors": chain.factors()}.get(form, chain)
        grads = plan.exclusive_scan(states[-1], chain)
        linear = sparsescan.plan(patterns, schedule="linear").exclusive_scan(states[-1], chain)
        for result, expected in zip(grads, linear, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
        shown = None if batch == 1 else differs
        assert_no_slower(plan, BUILT_IN, threads, shown, (batch, dtype))


# ---------------------------------------------------------------------------------------------
# Once for each kind of input
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch, small_grains: None, as_if: Any) -> list[Any]:
    """Collect the batch and the dtype of all choices that are made, on 64 threads."""
    result: list[Any] = []

    class Counting(Search):
        def choose(self, *about: Any) -> PlanChoice:
            result.append((self._model.batch, self._model.dtype))
            return super().choose(*about)

    as_if(64)
    monkeypatch.setattr(chooser, "Search", Counting)
    return result


def test_each_kind_is_chosen_for_once(choices: list[Any]) -> None:
    plan = sparsescan.plan(orders(60))
    assert choices == [(1, F8)]
    schedules = []
    for _ in range(3):
        for batch, dtype in KINDS:
            run(plan, batch, dtype)
            schedules.append(plan.schedule)
    assert sorted(choices, key=str) == sorted(KINDS, key=str)
    assert schedules == schedules[: len(KINDS)] * 3
    assert len(set(schedules)) > 1


def test_the_same_input_has_the_same_bits_whatever_ran_before(choices: list[Any]) -> None:
    fresh = {kind: run(sparsescan.plan(orders(60)), *kind) for kind in KINDS}
    plan = sparsescan.plan(orders(60))
    for kind in [*KINDS, *KINDS[::-1], *KINDS]:
        assert same_bits(run(plan, *kind), fresh[kind])


def test_what_is_asked_for_is_what_a_run_would_choose(choices: list[Any]) -> None:
    plan = sparsescan.plan(orders(60))
    for batch, dtype in KINDS:
        run(plan, batch, dtype)
        asked = sparsescan.plan(orders(60), batch=batch, dtype=dtype)
        assert (plan.schedule, plan.dense, plan.reason) == (
            *(asked.schedule, asked.dense, asked.reason),
        )
        before = len(choices)
        run(asked, batch, dtype)
        assert len(choices) == before


@pytest.mark.slow
def test_threads_run_their_own_kinds(choices: list[Any]) -> None:
    expected = {kind: run(sparsescan.plan(orders(20)), *kind) for kind in KINDS}
    for _ in range(5):
        plan, start = sparsescan.plan(orders(20)), threading.Barrier(len(KINDS))

        def task(kind: Any, plan: ScanPlan = plan, start: threading.Barrier = start) -> list[bool]:
            start.wait()
            return [same_bits(run(plan, *kind), expected[kind]) for _ in range(4)]

        with ThreadPoolExecutor(len(KINDS)) as pool:
            assert all(map(all, pool.map(task, KINDS)))


def test_no_more_choices_are_kept_than_a_few(
    choices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_plan, "_CHOICES", 3)
    plan = sparsescan.plan(orders(20, 16))
    for batch in range(1, 12):
        run(plan, batch, F4)
    assert len(plan._others) <= 3
    assert len(choices) == 12


# ---------------------------------------------------------------------------------------------
# Memory, measured plans, files
# ---------------------------------------------------------------------------------------------


def test_each_choice_keeps_to_the_limit(choices: list[Any]) -> None:
    free = sparsescan.plan(orders(60))
    run(free, 16, F4)
    need = free.workspace_bytes
    least = sparsescan.plan(orders(60), schedule="linear", batch=16, dtype=F4).workspace_bytes
    assert need > least
    for limit in (2 * need, need - 1, least):
        plan = sparsescan.plan(orders(60), memory_limit=limit)
        run(plan, 16, F4)
        assert plan.workspace_bytes <= limit
        assert (plan.schedule == free.schedule) == (limit > need)
    plan = sparsescan.plan(orders(60), memory_limit=least)
    with pytest.raises(MemoryLimitError, match=r"the least, Schedule\.linear\(60\)"):
        run(plan, 64, F8)


def test_a_saved_plan_goes_on_as_it_was(choices: list[Any], tmp_path: Path) -> None:
    plan = sparsescan.plan(orders(60))
    shared = np.arange(60) % 2 == 0
    for batch, dtype, differs in [(1, F8, None), (16, F4, None), (1, F4, None), (3, F4, shared)]:
        result = run(plan, batch, dtype, differs)
        plan.save(tmp_path / "plan")
        loaded = ScanPlan.load(tmp_path / "plan")
        assert str(loaded) == str(plan)
        assert loaded.to_dict() == plan.to_dict()
        before = len(choices)
        assert same_bits(run(loaded, batch, dtype, differs), result)
        assert len(choices) == before
        run(loaded, 64, F8)
        assert len(choices) == before + 1
        assert same_bits(run(loaded, batch, dtype, differs), result)


def test_what_is_printed_and_predicted_is_what_ran(choices: list[Any]) -> None:
    plan = sparsescan.plan(orders(60))
    assert "for one sample of float64" in str(plan)
    run(plan, 16, F4)
    assert "times for a batch of 16" in str(plan)
    assert plan.predict(1000).steps == plan.schedule.depth < 59
    run(plan, 64, F4)
    text = " ".join(str(plan).split())  # lines end at any word
    assert "times for a batch of 64" in text
    assert "for a batch of 64 on 64 threads" in text
    assert "a batch of 64 of float32" in text
    assert plan.schedule == Schedule.linear(60)
    assert plan.predict(1000).steps == 59
    run(plan, 1, F4)
    assert "times for one sample" in str(plan)


# ---------------------------------------------------------------------------------------------
# Really measured
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize(
    "patterns",
    [
        lambda: [*GRUCell(8, 64, rng=0).implicit_pattern.factors] * 1000,
        lambda: [*LSTMCell(8, 20, rng=0).implicit_pattern.factors] * 1000,
        lambda: [RNNCell(8, 20, rng=0).pattern] * 1000,
    ],
)
def test_runs_take_no_longer_than_linear_ones(
    batch: int, patterns: Callable[[], list[Pattern]]
) -> None:
    """The best of rounds in which they take turns, as many as a busy machine needs, and a third."""
    chain = patterns()
    differs = np.arange(len(chain)) % 2 == 0 if chain[0] is not chain[1] else np.ones(1000, bool)
    values = made_up(chain, batch, F4, differs)
    grad = np.ones((batch, chain[0].shape[1]), F4)
    plans = [sparsescan.plan(chain), sparsescan.plan(chain, schedule="linear")]
    best = [np.inf, np.inf]
    for turn in range(60):
        for k, plan in enumerate(plans):
            start = time.perf_counter()
            plan.exclusive_scan(grad, values)
            best[k] = min(best[k], time.perf_counter() - start)
        if turn >= 11 and best[0] <= 1.33 * best[1]:
            break
    assert best[0] <= 1.33 * best[1], best
