"""A plan's picture shows what SciPy counts."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import every_schedule, mask
from sampling import examples, slow

from sparsescan import InputError, Pattern, ScanPlan, Schedule
from sparsescan.plan import drawing
from sparsescan.plan.choice import PlanChoice
from sparsescan.plan.drawing import plot_plan
from sparsescan.symbolic.pattern import of_mask

pytest.importorskip("matplotlib")


class Operation(NamedTuple):
    step: int
    kind: str
    flop: int


def planned(patterns: list[Pattern], schedule: Schedule) -> ScanPlan:
    """Return a plan whose products are stored by their own patterns, whatever is faster."""
    return ScanPlan(patterns, PlanChoice(schedule, reason="asked for"))


def drawn(plan: ScanPlan) -> Any:
    """Return the figure that would be written."""
    from matplotlib.figure import Figure

    with mock.patch.object(Figure, "savefig", autospec=True) as save:
        plot_plan(plan, "plan.png")
    (figure, _), _ = save.call_args
    return figure


def operations_of(axes: Any) -> tuple[list[Operation], list[Operation]]:
    """All operations of a panel, and those that are marked as critical, from left to right."""
    everything, critical = [], []
    for line in axes.get_lines():
        kind, _, mark = str(line.get_label()).partition(", ")
        if kind == "critical path":
            continue
        x, y = line.get_data()
        operations = list(
            map(Operation, np.rint(x).astype(int).tolist(), [kind] * len(x), y.tolist())
        )
        everything += operations
        critical += operations if mark else []
    return everything, sorted(critical)


def counted(masks: list[np.ndarray], schedule: Schedule) -> list[list[list[Operation]]]:
    """Levels of runs of operations; FLOP by multiplying matrices of ones."""
    nodes = {(k, k + 1): sp.csr_array(where.astype(np.int64)) for k, where in enumerate(masks, 1)}
    levels, step = [], 1
    for level in schedule.levels:
        runs = []
        for first, last in itertools.pairwise(level.runs.tolist()):
            run = []
            for k, (start, mid, stop) in enumerate(level.ops[first:last].tolist()):
                right = nodes[mid, stop]
                if start == 0:
                    run.append(Operation(step + k, "matrix-vector", 2 * int(right.sum())))
                    continue
                product = right @ nodes[start, mid]
                run.append(Operation(step + k, "matrix-matrix", 2 * int(product.sum())))
                nodes[start, stop] = (product > 0).astype(np.int64)
            runs.append(run)
        levels.append(runs)
        step += level.depth
    return levels


def flop(run: list[Operation]) -> int:
    return sum(operation.flop for operation in run)


def assert_shows(axes: Any, masks: list[np.ndarray], schedule: Schedule) -> None:
    levels = counted(masks, schedule)
    runs = [run for level in levels for run in level]
    result, critical = operations_of(axes)
    assert Counter(result) == Counter(itertools.chain.from_iterable(runs))
    for level in levels:
        # Any of the runs with as many FLOP may be marked.
        marked = [operation for operation in critical if operation.step >= level[0][0].step]
        longest = [run for run in level if flop(run) == max(map(flop, level))]
        assert any(marked[: len(run)] == run for run in longest)
        critical = marked[min(len(run) for run in longest if marked[: len(run)] == run) :]
    assert critical == []


@settings(max_examples=examples(15))
@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_every_operation_is_shown(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 8, n + 1)
    structures = rng.choice(["sparse", "empty rows", "banded", "full", "diagonal"], n)
    masks = [mask(rng, structures[k], sizes[k + 1], sizes[k]) for k in range(n)]
    for schedule in every_schedule(n, chunks=(3,)):
        plan = planned([of_mask(where) for where in masks], schedule)
        figure = drawn(plan)
        assert_shows(figure.axes[0], masks, schedule)
        other = Schedule.blelloch(n) if schedule == Schedule.linear(n) else Schedule.linear(n)
        assert len(figure.axes) == 1 + (n > 2 or schedule != Schedule.linear(n))
        for axes in figure.axes[1:]:
            assert_shows(axes, masks, other)


def test_beside_a_linear_scan_stands_one_whose_products_are_small_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each limit in turn: of all products, of those of one level, and of none."""
    rng = np.random.default_rng(0)
    masks = [rng.random((8, 8)) < 0.4 for _ in range(16)]
    plan = planned(list(map(of_mask, masks)), Schedule.linear(16))
    (neighbours, *_) = counted(masks, Schedule.truncated(16, 1))
    products = [run[0] for run in neighbours if run[0].kind == "matrix-matrix"]
    names = []
    for work in (1e8, flop(products) // 2, 0):
        monkeypatch.setattr(drawing, "_MOST_WORK", work)
        names.append([axes.get_title().partition("\n")[0] for axes in drawn(plan).axes[1:]])
    assert names == [["Schedule.blelloch(16)"], ["Schedule.truncated(16, 1)"], []]


def dense(n: int, size: int = 3) -> list[Pattern]:
    return [Pattern.dense((size, size))] * n


def test_titles_have_the_totals() -> None:
    """One vector, one product, and two vectors one after the other; FLOP are two each."""
    scan, linear = drawn(planned(dense(4), Schedule.blelloch(4))).axes
    assert scan.get_title() == (
        "Schedule.blelloch(4)\n3 steps, 108 FLOP, 90 of them on the critical path"
    )
    assert linear.get_title() == (
        "Schedule.linear(4)\n3 steps, 54 FLOP, 54 of them on the critical path"
    )
    (alone,) = drawn(planned(dense(2), Schedule.linear(2))).axes
    assert "\n1 step, 18 FLOP" in alone.get_title()
    large = drawn(planned(dense(100, 20), Schedule.linear(100))).axes[0]
    assert "79.2k FLOP" in large.get_title()


def test_the_path_joins_the_critical_operations() -> None:
    plan = planned(dense(50), Schedule.chunked(50, 4))
    for axes, program in zip(drawn(plan).axes, (plan.schedule, Schedule.linear(50)), strict=True):
        (path,) = [line for line in axes.get_lines() if line.get_label() == "critical path"]
        x, y = path.get_data()
        assert np.rint(x).tolist() == list(range(1, program.depth + 1))
        assert y.tolist() == [operation.flop for operation in operations_of(axes)[1]]


def test_every_other_phase_is_shaded_and_zeros_have_room() -> None:
    plan = planned(
        [Pattern.diagonal(3), of_mask(np.zeros((3, 3), bool))] * 25, Schedule.blelloch(50)
    )
    axes = drawn(plan).axes[0]
    depths = [
        sum(level.depth for level in levels)
        for _, levels in itertools.groupby(
            plan.schedule.levels, key=lambda level: level.name.split()[0]
        )
    ]
    ends = np.cumsum([0, *depths]) + 0.5
    shades = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    assert [[box.x0, box.x1] for box in shades] == [
        pytest.approx(list(pair)) for pair in list(itertools.pairwise(ends.tolist()))[1::2]
    ]
    # Powers of ten around the least that is positive, and the most.
    low, high = np.log10(np.array(axes.get_ylim()) * [-5, 1])
    assert (low, high) == pytest.approx((round(low), round(high)))


def in_levels_of_their_own(n: int) -> Schedule:
    """Return the linear scan, each operation in a level with another name."""
    return Schedule.from_levels(n, [(f"step {k} of all", [[(0, k, k + 1)]]) for k in range(1, n)])


@pytest.mark.parametrize("n", [3, *slow(2, 12, 100, 2000)])
def test_names_of_levels_do_not_overlap(n: int) -> None:
    for schedule in [*every_schedule(n, chunks=(2, 5, 40)), in_levels_of_their_own(n)]:
        figure = drawn(planned(dense(n), schedule))
        figure.draw_without_rendering()
        for axes in figure.axes:
            (top,) = axes.child_axes
            boxes = sorted(
                (label.get_window_extent() for label in top.get_xticklabels()),
                key=lambda box: box.x0,
            )
            panel = axes.get_window_extent()
            assert len(boxes) >= 1
            assert boxes[0].x0 >= panel.x0 - 5
            assert boxes[-1].x1 <= panel.x1 + 5
            for left, right in itertools.pairwise(boxes):
                assert left.x1 < right.x0
            assert axes.title.get_window_extent().y0 > max(box.y1 for box in boxes)


@pytest.mark.parametrize("n", [0, 1])
def test_a_chain_without_operations_has_no_picture(n: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    with pytest.raises(InputError, match=f"length {n}, .* expected at least 2 Jacobians"):
        plot_plan(planned(dense(n), Schedule.linear(n)), path)
    assert not path.exists()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs matplotlib; .*'sparsescan\[plot\]'"):
        plot_plan(planned(dense(3), Schedule.linear(3)), "plan.png")
