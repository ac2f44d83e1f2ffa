"""A plan and a run of it take the memory that the plan says, beside Jacobians and gradients."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from oracles import random_patterns
from sampling import slow
from trees import any_schedule

import sparsescan
from sparsescan import MemoryLimitError, Pattern, ScanPlan, Schedule
from sparsescan.arrays import arrays
from sparsescan.jacobians import Conv2d
from sparsescan.symbolic import pattern as patterns_of
from sparsescan.symbolic.pattern import of_mask

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


class Case:
    """A chain with values, local gradients or none, and how to scan it."""

    def __init__(
        self,
        rng: np.random.Generator,
        patterns: Sequence[Pattern],
        schedule: Schedule | str,
        *,
        shared: bool | None = None,
    ) -> None:
        self.patterns, self.schedule = patterns, schedule
        self.batch, self.dtype = int(rng.choice([1, 3])), rng.choice([F4, F8])
        batch, dtype = self.batch, self.dtype
        shared = rng.random() < 0.3 if shared is None else shared
        # Products of large values leave the range.
        scale = rng.choice([1, 1e20])
        self.values = [
            (rng.standard_normal((batch, pattern.nnz)[shared:]) * scale).astype(dtype)
            for pattern in patterns
        ]
        sizes = [patterns[0].shape[1], *(pattern.shape[0] for pattern in patterns[:-1])]
        self.grad = rng.standard_normal((batch, sizes[0])).astype(dtype)
        self.local = None
        if rng.random() < 0.5:
            self.local = [rng.standard_normal((batch, size)).astype(dtype) for size in sizes]

    def plan(self) -> ScanPlan:
        return sparsescan.plan(
            self.patterns, schedule=self.schedule, batch=self.batch, dtype=self.dtype
        )

    def run(self, plan: ScanPlan) -> Sequence[Any]:
        return plan.exclusive_scan(self.grad, self.values, local_grads=self.local)

    def peak(self) -> tuple[int, ScanPlan]:
        """Bytes that making a plan and running it once take at most, beside the gradients.

        Memory that kernels allocate for themselves is not seen.
        """
        gc.collect()
        tracemalloc.start()
        try:
            plan = self.plan()
            planned = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            grads = self.run(plan)
            ran = tracemalloc.get_traced_memory()[1] - sum(array.nbytes for array in grads)
        finally:
            tracemalloc.stop()
        return max(planned, ran), plan


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Compile all kernels, and import what is imported late: loading is slow when it is traced."""
    rng = np.random.default_rng(0)
    for schedule in ("linear", "blelloch", "auto"):
        for _ in range(12):
            case = Case(rng, random_patterns(rng, 6, 3, 9), schedule)
            case.run(case.plan())


@pytest.fixture(params=[4, *slow(1)])
def threads(request: Any, with_threads: Any) -> int:
    """So many, with work cut into the smallest pieces, of which there are then the most."""
    with_threads(request.param)
    return int(request.param)


def test_short_chains_of_small_steps(threads: int, seeds: Callable[..., range]) -> None:
    for seed in seeds(10, 16, 60):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 40))
        case = Case(rng, random_patterns(rng, n, 1, 30), any_schedule(rng, n))
        case.run(case.plan())  # loads kernels that no case before has met
        peak, plan = case.peak()
        assert peak <= plan.workspace_bytes, (seed, case.schedule)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diagonal", "permutation", "sparse"])
def test_long_chains_of_small_steps(threads: int, structure: str) -> None:
    """Where all is tables and objects."""
    rng = np.random.default_rng(0)
    n = int(rng.integers(300, 700))
    patterns = random_patterns(rng, n, 10, 10, [structure])
    for schedule in (any_schedule(rng, n), any_schedule(rng, n), Schedule.blelloch(n)):
        peak, plan = Case(rng, patterns, schedule).peak()
        assert peak <= plan.workspace_bytes, schedule


@pytest.mark.slow
def test_megabytes_of_products(threads: int) -> None:
    """No more than said; and, with one thread, not much less where all Jacobians differ."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(16, 40))
        patterns = random_patterns(rng, n, 60, 150)
        for schedule in (Schedule.blelloch(n), Schedule.chunked(n, 4), Schedule.truncated(n, 2)):
            peak, plan = Case(rng, patterns, schedule, shared=False).peak()
            assert peak <= plan.workspace_bytes
            if threads == 1 and peak > 1 << 20:
                assert plan.workspace_bytes <= 2 * peak


def test_one_product_of_small_steps_beside_a_large_one() -> None:
    """Scratch is counted for what is multiplied, not for what is only applied."""
    small, large = Pattern.dense((10, 10)), Pattern.dense((1000, 10))
    patterns = [small, small, small, small, large, Pattern.dense((10, 1000))]
    rng = np.random.default_rng(0)
    levels = [("pair", [[(2, 3, 4)]]), ("linear", [[(0, 1, 2), (0, 2, 4), (0, 4, 5), (0, 5, 6)]])]
    schedule = Schedule.from_levels(6, [*levels, ("middle", [[(0, 2, 3)]])])
    without = sparsescan.plan([small] * 6, schedule=schedule).workspace_bytes
    assert sparsescan.plan(patterns, schedule=schedule).workspace_bytes <= 2 * without
    peak, plan = Case(rng, patterns, schedule).peak()
    assert peak <= plan.workspace_bytes


@pytest.mark.parametrize("share", [4, *slow(1.5, 20)])
def test_planning_keeps_to_the_limit_too(as_if: Any, share: float) -> None:
    """The products of all schedules that are looked at, in so many times what linear needs."""
    rng = np.random.default_rng(0)
    orders = [of_mask(np.eye(1024, dtype=bool)[rng.permutation(1024)]) for _ in range(200)]
    as_if(16)
    linear = sparsescan.plan(orders, batch=1, dtype=F8, schedule="linear").workspace_bytes
    limit = int(share * linear)
    sparsescan.plan(orders, batch=1, dtype=F8, memory_limit=limit)  # all kernels are loaded
    gc.collect()
    tracemalloc.start()
    plan = sparsescan.plan(orders, batch=1, dtype=F8, memory_limit=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.workspace_bytes <= limit
    assert peak <= limit


def test_more_steps_than_memory_holds_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast array of them takes no memory itself."""
    steps = np.broadcast_to(np.eye(1), (1 << 26, 1, 1))
    monkeypatch.setattr(arrays, "memory_left", lambda: 20 << 30)
    for call in (
        lambda: sparsescan.plan(steps),
        lambda: sparsescan.exclusive_scan(np.ones(1), steps),
    ):
        start = time.process_time()
        with pytest.raises(MemoryLimitError, match="a chain of 67108864 steps would take 24 GiB"):
            call()
        assert time.process_time() - start < 0.5


def test_products_that_no_memory_holds_are_refused_when_they_are_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrays, "memory_left", lambda: 100 << 30)
    patterns = [sparsescan.Pattern.dense((60_000, 60_000))] * 4
    with pytest.raises(MemoryLimitError, match=r"100 GiB .*left; .*blelloch\(4\) needs \d+ GiB"):
        sparsescan.plan(patterns, schedule="blelloch")
    assert "linear" in str(sparsescan.plan(patterns).schedule)


def test_gradients_that_no_memory_holds_are_refused_when_they_are_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the limit, which does not count them."""
    monkeypatch.setattr(arrays, "memory_left", lambda: 100 << 30)
    patterns = [Pattern.diagonal(2000)] * 1000
    for limit in (None, 1 << 50):
        message = (
            r"^this machine has 100 GiB .* left; Schedule\.linear\(1000\) needs 119 GiB .* with "
            r"119 GiB .* of gradients of 8000 samples, and the least, Schedule\.linear\(1000\), 11"
        )
        with pytest.raises(MemoryLimitError, match=message):
            sparsescan.plan(patterns, batch=8000, memory_limit=limit)
        sparsescan.plan(patterns, batch=8000, dtype=F4, memory_limit=limit)
        sparsescan.plan(patterns, batch=6000, memory_limit=limit)


def test_a_limit_above_what_the_machine_has_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = [Pattern.dense((100, 100))] * 8
    options: dict[str, Any] = {"schedule": "blelloch", "batch": 64}
    need = sparsescan.plan(patterns, **options).workspace_bytes
    gradients = 8 * 64 * 8 * 100
    monkeypatch.setattr(arrays, "_SMALL", 0)
    monkeypatch.setattr(arrays, "memory_left", lambda: need + gradients - 1)
    for limit in (None, need, 1 << 50):
        with pytest.raises(
            MemoryLimitError, match=r"^this machine has .*; Schedule\.blelloch\(8\)"
        ):
            sparsescan.plan(patterns, memory_limit=limit, **options)
    with pytest.raises(MemoryLimitError, match=r"^memory_limit is "):
        sparsescan.plan(patterns, memory_limit=need - 1, **options)
    monkeypatch.setattr(arrays, "memory_left", lambda: need + gradients)
    assert sparsescan.plan(patterns, **options).workspace_bytes == need


def test_values_that_a_linear_scan_writes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of implicit steps, which come as a few weights."""
    step = Conv2d(2, 2, 3, padding=1, input_shape=(2, 32, 32), rng=0).implicit_pattern
    written = 8 * 50 * step.indexed[0].distinct  # type: ignore[union-attr]
    gradients = 8 * 50 * 2 * 32 * 32
    monkeypatch.setattr(arrays, "_SMALL", 0)
    for missing in (0, 1):
        left = written + gradients - missing
        monkeypatch.setattr(arrays, "memory_left", lambda left=left: left)
        with pytest.raises(MemoryLimitError) if missing else nullcontext():
            sparsescan.plan([step] * 50, schedule="linear")


def test_a_pattern_that_no_memory_holds_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named schedule is refused before the product of patterns is worked out, "auto" is not."""
    rng = np.random.default_rng(0)
    steps = [of_mask(rng.random((400, 400)) < 0.03) for _ in range(4)]
    monkeypatch.setattr(patterns_of, "_EXACT", 1000)
    monkeypatch.setattr(arrays, "_SMALL", 0)
    monkeypatch.setattr(arrays, "memory_left", lambda: 150_000)
    monkeypatch.setattr(patterns_of, "product", None)
    with pytest.raises(MemoryLimitError, match=r"^the pattern of the product of Pattern\(\(400"):
        sparsescan.plan(steps, schedule="blelloch")
    assert sparsescan.plan(steps).schedule == Schedule.linear(4)
