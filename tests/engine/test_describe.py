"""The text of a plan: a line for each kind of step, and lines that a terminal shows."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.sparse as sp

import sparsescan
from sparsescan import ImplicitPattern, Pattern, Schedule, SolveStep
from sparsescan.symbolic.pattern import of_mask

MOST = 80


def some(seed: int, size: int, *counts: int) -> list[Pattern]:
    """Patterns with so many entries beside the corner's."""
    rng, patterns = np.random.default_rng(seed), []
    for count in counts:
        where = np.zeros(size * size, bool)
        where[rng.choice(size * size, count, replace=False)] = True
        patterns.append(of_mask(where.reshape(size, size)))
    return patterns


def listed(plan: object) -> list[str]:
    """Return the paragraphs about Jacobians."""
    text = re.sub(r"\n {6}", " ", str(plan))
    return [line.strip() for line in text.splitlines() if re.match(r" {4}(\d| *and |none)", line)]


def test_steps_of_one_shape_and_kind_are_one_line() -> None:
    """The most frequent come first; entries and densities have a range."""
    steps = [*[Pattern.dense((6, 6))] * 3, *some(0, 6, 9, 12, 18, 12), Pattern.diagonal(6)]
    assert listed(sparsescan.plan(steps, schedule="linear"))[:3] == [
        "4 × 6×6 general, nnz 9 to 18 (0.25 to 0.5 dense); 4 patterns",
        "3 × 6×6 dense, nnz 36 (1 dense)",
        "1 × 6×6 diagonal, nnz 6 (1 dense)".replace("1 dense", "0.167 dense"),
    ]


def test_kinds_beyond_eight_are_counted() -> None:
    steps = [Pattern.dense((k + 1, k)) for k in range(1, 12)]
    lines = listed(sparsescan.plan(steps, schedule="linear"))
    assert lines[8] == "and 3 of 3 other shapes or kinds"
    assert len(listed(sparsescan.plan(steps[:8], schedule="linear"))) == 8
    assert listed(sparsescan.plan([])) == ["none"]


def plans() -> list[sparsescan.ScanPlan]:
    """Plans with much to say."""
    wide = [Pattern.dense((1000 + k % 3, 1000 + (k - 1) % 3)) for k in range(1, 30)][::-1]
    solved = SolveStep(sp.eye_array(30) + sp.random_array((30, 30), density=0.1, rng=1))
    implicit = ImplicitPattern([Pattern.diagonal(20), Pattern.dense((20, 20))], shared=[1])
    levels = [("a level with a very long name", [[(0, k, k + 1)]]) for k in range(1, 8)]
    return [
        sparsescan.plan(some(2, 20, *range(20, 220)), schedule="blelloch", batch=16),
        sparsescan.plan([implicit] * 300, batch=16, dtype="float32"),
        sparsescan.plan([Pattern.dense((5, 5))] * 8, schedule=Schedule.from_levels(8, levels)),
        sparsescan.plan(wide, reverse=True, schedule="linear"),
        sparsescan.plan([solved, np.eye(30)] * 20),
    ]


@pytest.mark.parametrize("k", range(5))
def test_no_line_is_longer_than_a_terminal_is_wide(k: int) -> None:
    for line in str(plans()[k]).splitlines():
        assert len(line) <= MOST, line
