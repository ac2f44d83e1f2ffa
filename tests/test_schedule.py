"""A schedule is right when it gives the linear scan's answer in any monoid; strings are free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import pytest

from sparsescan import InputError, InputTypeError, Schedule

LENGTHS = range(201)


def letters(n: int) -> str:
    """`n` different characters, so that an interval of elements is one substring."""
    return "".join(chr(0x4E00 + k) for k in range(n))


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
@pytest.mark.parametrize("order", [1, -1], ids=["first run first", "last run first"])
def test_runs_of_a_level_do_not_depend_on_each_other(family, order):
    for n in LENGTHS:
        text = letters(n)
        for schedule in members(family, n):
            nodes = {(k, k + 1): text[k] for k in range(n)}
            for level in schedule.levels:
                assert level.runs[0] == 0
                assert level.runs[-1] == len(level.ops)
                runs = [level.ops[a:b].tolist() for a, b in zip(level.runs, level.runs[1:])]  # noqa: B905
                assert all(runs), f"{schedule} has an empty run"
                for run in runs[::order]:
                    for start, mid, stop in run:
                        nodes[start, stop] = nodes[start, mid] + nodes[mid, stop]
            assert [nodes[0, k] for k in range(1, n + 1)] == [text[:k] for k in range(1, n + 1)]


@FAMILIES
def test_every_prefix_is_made_once_and_every_product_is_used(family):
    for n in LENGTHS:
        for schedule in members(family, n):
            ops = operations(schedule)
            made = [(start, stop) for start, _, stop in ops]
            assert len(set(made)) == len(made), schedule
            assert {stop for start, stop in made if start == 0} == set(range(2, n + 1)), schedule
            read = {(start, mid) for start, mid, _ in ops} | {(mid, stop) for _, mid, stop in ops}
            assert {node for node in made if node[0] > 0} <= read, schedule
            assert schedule.operations == len(ops)


@FAMILIES
def test_operands_are_neighbours_and_the_last_element_stays_out(family):
    """No interval is empty, so the identity is never multiplied; none holds element ``n``.

    An interval that starts at 0 is a vector times matrices: its left operand starts at 0 too.
    """
    for n in LENGTHS:
        for schedule in members(family, n):
            for start, mid, stop in operations(schedule):
                assert 0 <= start < mid < stop <= n, schedule


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


def test_blelloch_does_linear_work():
    for n in LENGTHS:
        assert Schedule.blelloch(n).operations <= 2 * n


def test_depth_of_chunked_is_two_chunks_and_the_boundaries():
    for n in LENGTHS:
        for chunks in {1, 2, 3, 7, n // 3, n // 2, n - 1, n} & set(range(1, n + 1)):
            size = math.ceil(n / chunks)
            assert Schedule.chunked(n, chunks).depth <= 2 * size + chunks


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


def test_tables_are_int64():
    for schedule in (Schedule.blelloch(9), Schedule.chunked(9, 3), Schedule.linear(9)):
        assert all(level.ops.dtype == level.runs.dtype == np.int64 for level in schedule.levels)


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


@pytest.mark.parametrize("bad", [2.0, "3", None, [4]])
def test_counts_that_are_no_integers_are_refused(bad):
    for make in (
        lambda: Schedule.linear(bad),
        lambda: Schedule.blelloch(bad),
        lambda: Schedule.truncated(5, bad),
        lambda: Schedule.chunked(bad, 2),
        lambda: Schedule.chunked(5, bad),
    ):
        with pytest.raises(InputTypeError, match="expected an integer"):
            make()


def test_numpy_integers_are_counts():
    assert Schedule.linear(np.int32(4)) == Schedule.linear(4)


def test_scan_wants_enough_items():
    with pytest.raises(InputError, match="items has 2 elements; expected at least 3"):
        Schedule.linear(3).scan("ab", str.__add__)
