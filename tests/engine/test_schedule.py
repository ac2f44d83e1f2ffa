"""A schedule is right when it gives the linear scan's answer in any monoid; strings are free."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import Runs, letters, random_levels

import sparsescan
from sparsescan import InputError, InputTypeError, Pattern, Schedule
from sparsescan.symbolic.schedule import Level

LENGTHS = range(201)


def up_levels(n: int) -> int:
    """Levels after which truncated is Blelloch."""
    return max(math.ceil(math.log2(n + 1)) - 1, 0)


def linear(n: int) -> Iterator[Schedule]:
    yield Schedule.linear(n)


def blelloch(n: int) -> Iterator[Schedule]:
    yield Schedule.blelloch(n)


def truncated(n: int) -> Iterator[Schedule]:
    for k in range(up_levels(n) + 3):
        yield Schedule.truncated(n, k)


def chunked(n: int) -> Iterator[Schedule]:
    for chunks in sorted({1, 2, 3, 5, 16, max(n // 2, 1), max(n - 1, 1), max(n, 1), n + 3}):
        yield Schedule.chunked(n, chunks)


FAMILIES = pytest.mark.parametrize("family", [linear, blelloch, truncated, chunked])


@lru_cache(None)
def members(family: Callable[[int], Iterator[Schedule]], n: int) -> list[Schedule]:
    return list(family(n))


@lru_cache(None)
def operations(schedule: Schedule) -> list[tuple[int, int, int]]:
    return [tuple(op) for level in schedule.levels for op in level.ops.tolist()]


@FAMILIES
def test_prefixes_in_the_free_monoid(family):
    for n in LENGTHS:
        text = letters(n)
        for schedule in members(family, n):
            assert schedule.scan(text, str.__add__) == [text[: k + 1] for k in range(n)], schedule


@FAMILIES
def test_every_prefix_is_made_once_and_every_product_is_used(family):
    for n in LENGTHS:
        for schedule in members(family, n):
            ops = operations(schedule)
            products = [(start, stop) for start, _, stop in ops]
            assert len(set(products)) == len(products), schedule
            assert {stop for start, stop in products if start == 0} == set(range(2, n + 1)), (
                schedule
            )
            read = {(start, mid) for start, mid, _ in ops} | {(mid, stop) for _, mid, stop in ops}
            assert {node for node in products if node[0] > 0} <= read, schedule
            assert schedule.operations == len(ops)


def algorithm_1(a: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Algorithm 1 of BPPSA, line by line, in place; and the operands of what must be computed."""
    n = len(a) - 1
    pairs = []
    top = math.ceil(math.log2(n + 1))
    for d in range(top - 1):  # lines 3 to 8
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, r = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            if r < n:  # line 9 overwrites a[n]
                pairs.append((a[left], a[r]))
            a[r] = a[left] + a[r]
    a[n] = ""
    for d in range(top - 1, -1, -1):  # lines 10 to 17
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, r = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            t = a[left]
            a[left] = a[r]
            if a[r] and t:
                pairs.append((a[r], t))
            a[r] = a[r] + t
    return a, pairs


def test_blelloch_is_algorithm_1():
    for n in LENGTHS:
        text = letters(n + 1)
        schedule = Schedule.blelloch(n)
        scanned, pairs = algorithm_1(list(text))
        assert scanned == [text[:k] for k in range(n + 1)]
        mine = [(text[start:mid], text[mid:stop]) for start, mid, stop in operations(schedule)]
        assert Counter(mine) == Counter(pairs), n


def test_depth_of_blelloch_is_logarithmic():
    for n in (*LENGTHS, 1000, 10_000, 2**17 - 1, 2**17, 2**17 + 1):
        assert Schedule.blelloch(n).depth <= max(2 * math.ceil(math.log2(n + 1)) - 1, 0)


def test_ends_of_truncated():
    for n in LENGTHS:
        assert operations(Schedule.truncated(n, 0)) == operations(Schedule.linear(n))
        for beyond in (0, 1, 100):
            whole = Schedule.truncated(n, up_levels(n) + beyond)
            assert operations(whole) == operations(Schedule.blelloch(n))


def test_linear_makes_no_products():
    for n in LENGTHS:
        assert operations(Schedule.linear(n)) == [(0, k, k + 1) for k in range(1, n)]


@FAMILIES
def test_equal_schedules(family):
    first, second = list(family(12)), list(family(12))
    assert first == second
    assert len(set(first) | set(second)) == len(first)
    assert [eval(repr(schedule)) for schedule in first] == first
    assert first[0] != next(family(13))


@pytest.mark.parametrize(
    ("make", "name", "passed"),
    [
        (lambda: Schedule.linear(-1), "n", "-1"),
        (lambda: Schedule.blelloch(-3), "n", "-3"),
        (lambda: Schedule.truncated(-1, 2), "n", "-1"),
        (lambda: Schedule.truncated(4, -2), "up_levels", "-2"),
        (lambda: Schedule.chunked(-1, 2), "n", "-1"),
        (lambda: Schedule.chunked(4, 0), "chunks", "0"),
    ],
)
def test_negative_counts_are_refused(make, name, passed):
    with pytest.raises(InputError, match=f"^{name} is {passed}; expected at least "):
        make()


def test_scan_wants_enough_items():
    with pytest.raises(InputError, match="items has 2 elements; expected at least 3"):
        Schedule.linear(3).scan("ab", str.__add__)


# ---------------------------------------------------------------------------------------------
# From levels
# ---------------------------------------------------------------------------------------------


def is_schedule(n: int, levels: list[tuple[str, Runs]]) -> bool:
    """Apply the definition, one operation after the other."""
    nodes = {(k, k + 1) for k in range(n)}
    read = Counter(
        node
        for _, runs in levels
        for run in runs
        for start, mid, stop in run
        for node in ((start, mid), (mid, stop))
    )
    for _, runs in levels:
        before = set(nodes)
        for run in runs:
            own = set()
            for start, mid, stop in run:
                operands = {(start, mid), (mid, stop)}
                fits = 0 <= start < mid < stop <= n
                if not fits or (start, stop) in nodes or not operands <= before | own:
                    return False
                own.add((start, stop))
                nodes.add((start, stop))
            for (a, _, b), (start, mid, _) in itertools.pairwise(run):
                if (a == 0) != (start == 0):
                    return False
                if a > 0 and ((start, mid) != (a, b) or read[a, b] != 1):
                    return False
    return all((0, k) in nodes for k in range(1, n + 1))


def as_given(levels: tuple[Level, ...]) -> list[tuple[str, Runs]]:
    """Levels as nested lists."""
    return [
        (level.name, [level.ops[a:b].tolist() for a, b in itertools.pairwise(level.runs)])
        for level in levels
    ]


@FAMILIES
def test_every_schedule_can_be_made_from_its_levels(family):
    for n in LENGTHS:
        for schedule in members(family, n):
            again = Schedule.from_levels(n, schedule.levels)
            assert (again.n, again.depth, again.chunks) == (n, schedule.depth, None)
            for actual, level in zip(again.levels, schedule.levels, strict=True):
                assert actual.name == level.name
                assert np.array_equal(actual.ops, level.ops)
                assert np.array_equal(actual.runs, level.runs)


def test_trees_of_other_products_are_other_schedules():
    sweep = "sweep", [[(0, k, k + 1) for k in range(1, 4)]]
    one, other = (
        Schedule.from_levels(4, [("product", [[(k, k + 1, k + 2)]]), sweep]) for k in (1, 2)
    )
    assert one != other


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_any_tree_gives_the_prefixes(seed, n):
    levels = random_levels(np.random.default_rng(seed), n)
    assert is_schedule(n, levels)
    schedule = Schedule.from_levels(n, levels)
    text = letters(n)
    assert schedule.scan(text, str.__add__) == [text[: k + 1] for k in range(n)]
    # Levels and runs without operations are left out; what is left is what was given.
    kept = [(name, [run for run in runs if run]) for name, runs in levels]
    assert as_given(schedule.levels) == [
        (name, [[list(op) for op in run] for run in runs]) for name, runs in kept if runs
    ]


@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_a_tree_with_one_mistake_is_refused_if_it_is_no_schedule(seed, n):
    rng = np.random.default_rng(seed)
    levels = random_levels(rng, n)
    runs = [run for _, all_runs in levels for run in all_runs if run]
    run = runs[rng.integers(len(runs))]
    k = rng.integers(len(run))
    mistake = rng.integers(5)
    if mistake == 0:
        changed = list(run[k])
        changed[rng.integers(3)] += int(rng.choice([-2, -1, 1, 2]))
        run[k] = tuple(changed)
    elif mistake == 1:
        del run[k]
    elif mistake == 2:
        runs[rng.integers(len(runs))].append(run.pop(k))
    elif mistake == 3:
        runs[rng.integers(len(runs))].insert(0, run[k])
    else:
        i, j = rng.integers(len(levels), size=2)
        levels[i], levels[j] = levels[j], levels[i]
    if is_schedule(n, levels):
        Schedule.from_levels(n, levels)
    else:
        with pytest.raises(InputError, match=r"expected|has been made before"):
            Schedule.from_levels(n, levels)


def test_what_is_passed_is_copied():
    ops, runs = np.array([[0, 1, 2], [0, 2, 3]]), np.array([0, 2])
    schedule = Schedule.from_levels(3, [Level("a", ops, runs)])
    ops[:] = runs[:] = 0
    assert as_given(schedule.levels) == [("a", [[[0, 1, 2], [0, 2, 3]]])]
    with pytest.raises(ValueError, match="read-only"):
        schedule.levels[0].ops[0] = 0


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([], r"levels make no \[0, 2\); expected all prefixes, \[0, 2\) to \[0, 5\)"),
        ([[[(0, 1, 2), (0, 2, 3), (0, 3, 5)]]], r"levels make no \[0, 4\)"),
        ([[[(0, 1, 6)]]], r"\(0, 1, 6\); expected 0 <= start < mid < stop <= 5"),
        ([[[(0, 1, 2)], [], [(-1, 1, 6)]]], r"run 2 of levels\[0\] \('a'\) .* \(-1, 1, 6\)"),
        ([[[(0, 1, 2**80)]]], f"operation \\(0, 1, {2**80}\\)"),
        ([np.array([[(0, 1, 2**64 - 1)]], np.uint64)], f"operation \\(0, 1, {2**64 - 1}\\)"),
        ([[[(0, 2, 2)]]], r"operation \(0, 2, 2\)"),
        (
            [[[(0, 1, 2)]], "linear"],
            r"run 0 of levels\[1\] \('b'\) .* \(0, 1, 2\), but \[0, 2\) has",
        ),
        (
            [[[(0, 1, 2), (0, 2, 3), (0, 3, 5)]], [[(3, 4, 5)]], [[(0, 3, 4)]]],
            r"\(0, 3, 5\), which reads \[3, 5\); expected an element",
        ),
        ([[[(0, k, k + 1)] for k in range(1, 5)]], r"run 1 .* \(0, 2, 3\), which reads \[0, 2\)"),
        ([[[(0, k, k + 1) for k in (1, 3, 2, 4)]]], r"\(0, 3, 4\), which reads \[0, 3\)"),
        (
            [[[(0, 1, 2), (2, 3, 4)]], "others"],
            r"\(2, 3, 4\); expected a run to make prefixes only",
        ),
        (
            [[[(2, 3, 4), (0, 1, 2)]], "others"],
            r"\(0, 1, 2\); expected a run to make prefixes only",
        ),
        ([[[(1, 2, 3), (3, 4, 5)]], "linear"], r"\(1, 2, 3\); expected \[1, 3\) to be the left"),
        ([[[(3, 4, 5), (2, 3, 5)]], "linear"], r"\(3, 4, 5\); expected \[3, 5\) to be the left"),
        (
            [[[(1, 2, 3), (1, 3, 4)]], [[(0, 1, 2)], [(0, 1, 3)], [(0, 1, 4)]], [[(0, 4, 5)]]],
            r"\(1, 2, 3\); expected \[1, 3\) .* next operation, and of no other",
        ),
    ],
)
def test_a_mistake_is_named(levels, message):
    usual = {
        "linear": [[(0, k, k + 1) for k in range(1, 5)]],
        "others": [[(0, 2, 3), (0, 3, 4), (0, 4, 5)]],
    }
    named = [
        (name, usual[runs] if isinstance(runs, str) else runs)
        for name, runs in zip("abc", levels, strict=False)
    ]
    with pytest.raises(InputError, match=message):
        Schedule.from_levels(5, named)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (None, "levels is None; expected pairs"),
        ([None], r"levels\[0\] is None; expected \(name, runs\)"),
        ([("a", None)], r"levels\[0\] is \('a', None\); expected \(name, runs\)"),
        ([("a", [None])], r"levels\[0\] is \('a', \[None\]\)"),
        ([("a", [[None]])], "operation None; expected integers"),
        ([("a", [[(0, 1)]])], r"operation \(0, 1\); expected integers"),
        ([("a", [[(0, 1, 2), (0, 1, 2, 3)]])], r"operation \(0, 1, 2, 3\); expected integers"),
        ([("a", [[(0, 1, 2), (0, 2.0, 3)]])], r"operation \(0, 2.0, 3\); expected integers"),
        ([("a", ["bcd"])], "operation 'b'; expected integers"),
        ([(1, [[(0, 1, 2)]])], r"levels\[0\] has the name 1; expected a string"),
    ],
)
def test_levels_of_another_type_are_refused(levels: Any, message: str) -> None:
    with pytest.raises(InputTypeError, match=message):
        Schedule.from_levels(3, levels)


@pytest.mark.parametrize(
    "runs", [[], [0], [1], [0, 1], [0, 2, 1], [1, 2], [0, 3, 2], [[0, 2]], [0.0, 2.0]]
)
def test_the_runs_of_a_level_are_offsets(runs):
    with pytest.raises(
        InputError, match=r"levels\[0\].runs is .*; expected integers that rise from"
    ):
        Schedule.from_levels(3, [Level("a", np.array([[0, 1, 2], [0, 2, 3]]), np.array(runs))])


# ---------------------------------------------------------------------------------------------
# By name
# ---------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(0, 60), st.booleans())
def test_a_name_is_the_schedule_that_its_method_makes(n: int, count: int, inclusive: bool) -> None:
    """In every call that takes one, and with the same gradients."""
    schedules = {
        "linear": Schedule.linear(n),
        "blelloch": Schedule.blelloch(n),
        f"truncated:{count}": Schedule.truncated(n, count),
        f"chunked:{count + 1}": Schedule.chunked(n, count + 1),
    }
    scan = sparsescan.inclusive_scan if inclusive else sparsescan.exclusive_scan
    values = np.random.default_rng(n).standard_normal((n, 2, 2))
    for name, schedule in schedules.items():
        plan = sparsescan.plan([Pattern.dense((2, 2))] * n, schedule=name)
        assert plan.schedule == schedule
        assert plan.reason == "asked for"
        result, expected = (scan([1.0, 2.0], values, schedule=how) for how in (name, schedule))
        np.testing.assert_array_equal(result, expected)


ACCEPTED = r"expected 'auto', 'linear', 'blelloch', 'truncated:K' \(K .*\) or 'chunked:C' \(C .*\)"


@pytest.mark.parametrize(
    "name",
    [
        *("fast", "", "Linear", "linear:2", "truncated", "truncated:", "truncated:-1"),
        *("chunked:2.0", "chunked: 2", "chunked:2\n", "chunked:²", "chunked:٣"),
        *("chunked:" + "9" * 5000, 3, None, b"auto"),
    ],
)
def test_a_name_of_none_is_refused_with_all_that_there_are(name: Any) -> None:
    for call in (
        lambda: sparsescan.plan([Pattern.diagonal(2)] * 3, schedule=name),
        lambda: sparsescan.exclusive_scan(np.ones(2), np.ones((3, 2, 2)), schedule=name),
    ):
        with pytest.raises(InputError, match=f"^schedule is .*; {ACCEPTED}"):
            call()
