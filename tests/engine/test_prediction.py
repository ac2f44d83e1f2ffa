"""Steps and work on any number of workers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import every_schedule

import sparsescan
from sparsescan import Pattern, Schedule


def plan(n: int, schedule: Schedule, size: int = 3) -> sparsescan.ScanPlan:
    return sparsescan.plan([Pattern.dense((size, size))] * n, schedule=schedule)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 100, 1000, 1023, 1024])
def test_steps_of_the_blelloch_scan(n: int) -> None:
    """Equation 6: Θ(log n) steps for more workers than steps, else Θ(n/p + log p)."""
    scan = plan(n, Schedule.blelloch(n))
    for workers in sorted({1, 2, 3, 10, max(n // 3, 1), n, n + 1, 10 * n}):
        steps = scan.predict(workers).steps
        assert steps >= (n - 1) / workers
        if workers > n:
            assert steps <= 2 * math.ceil(math.log2(n + 1)) - 1
        else:
            # Levels with fewer runs than workers take a step each, of the others rounding takes
            # one at most.
            assert (
                steps <= 2 * n / workers + 2 * math.log2(n / workers) + 2 * math.log2(workers) + 2
            )


@pytest.mark.parametrize("n", [1, 2, 100, 1000, 1024])
def test_work_of_scans(n: int) -> None:
    """Equation 7: Θ(n) operations, whoever does them; twice those of the linear scan at most."""
    for schedule in every_schedule(n):
        scan = plan(n, schedule)
        counts = {scan.predict(workers).operations for workers in (1, 2, n, 2 * n)}
        assert counts == {schedule.operations}
        assert n - 1 <= schedule.operations <= 2 * n


@given(st.integers(0, 60), st.integers(1, 70))
def test_bounds_of_any_schedule(n: int, workers: int) -> None:
    for schedule in every_schedule(n):
        scan = plan(n, schedule)
        result, alone = scan.predict(workers), scan.predict(1)
        assert alone.steps == alone.operations == schedule.operations
        assert alone.critical_multiply_adds == alone.multiply_adds
        unbounded = scan.predict(10**6)
        assert unbounded.steps == schedule.depth
        assert unbounded.steps <= result.steps <= alone.steps
        # Nobody works on more than one thing at a time, and no greedy order is twice the best.
        assert result.steps >= math.ceil(result.operations / workers)
        best = max(unbounded.critical_multiply_adds, alone.multiply_adds / workers)
        assert result.critical_multiply_adds >= best
        together = unbounded.critical_multiply_adds + alone.multiply_adds / workers
        assert result.critical_multiply_adds <= together


def test_multiply_adds_are_those_of_the_matrices() -> None:
    """Up-sweep of four 3×3 steps: one vector, one product; then two vectors one after the other."""
    result = plan(4, Schedule.blelloch(4)).predict(2)
    assert result.multiply_adds == 27 + 3 * 9
    assert result.critical_multiply_adds == 27 + 9 + 9
    assert (result.steps, result.operations) == (3, 4)
