"""A tree's text says which products are made, and fits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import every_schedule, schedules
from trees import products_of

from sparsescan import Schedule
from sparsescan.symbolic.tree import tree

Interval = tuple[int, int]

EVERYTHING = 10**7


def read(text: str) -> tuple[list[Interval], set[Interval]]:
    """Read the text outside of all parentheses, and the products: the docstring's grammar."""
    tokens = iter(re.findall(r"[()…]|\d+", text))
    products: set[Interval] = set()

    def items() -> Iterator[Interval]:
        rest = False
        stop = 0
        for token in tokens:
            if token == ")":
                return
            if token == "…":
                rest = True
                continue
            start, end = product() if token == "(" else (int(token), int(token) + 1)
            if rest:
                yield from ((k, k + 1) for k in range(stop, start))
            yield start, end
            rest, stop = False, end

    def product() -> Interval:
        inside = items()
        start, stop = next(inside)
        for left, right in inside:
            assert left == stop
            stop = right
            products.add((start, stop))
        return start, stop

    return list(items()), products


def random_products(seed: int, n: int) -> Schedule:
    """Any neighbours joined, whether or not they have been joined with others before."""
    rng = np.random.default_rng(seed)
    nodes = [(k, k + 1) for k in range(1, n)]
    levels = []
    for _ in range(int(rng.integers(0, 2 * n + 1))):
        left = nodes[rng.integers(len(nodes))] if nodes else (0, 0)
        others = [node for node in nodes if node[0] == left[1]]
        if others:
            right = others[rng.integers(len(others))]
            if (left[0], right[1]) not in nodes:
                nodes.append((left[0], right[1]))
                levels.append(("product", [[(*left, right[1])]]))
    sweep = [(0, k, k + 1) for k in range(1, n)]
    return Schedule.from_levels(n, [*levels, ("sweep", [sweep])])


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    n = draw(st.integers(0, 40))
    if draw(st.booleans()):
        return random_products(draw(st.integers(0, 2**32 - 1)), n)
    drawn = draw(schedules(n))
    if isinstance(drawn, Schedule):
        return drawn
    return Schedule.blelloch(n) if drawn == "blelloch" else Schedule.linear(n)


@given(any_schedule())
def test_a_text_has_exactly_the_products(schedule: Schedule) -> None:
    top, products = read(tree(schedule, EVERYTHING))
    assert products == set(products_of(schedule))
    assert {k for start, stop in top for k in range(start, stop)} == set(range(1, schedule.n))
    assert top == sorted(top)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 64, 200])
def test_every_kind_of_schedule_has_exactly_its_products(n: int) -> None:
    for schedule in every_schedule(n, chunks=(2, 5, 30)):
        assert read(tree(schedule, EVERYTHING))[1] == set(products_of(schedule))


@given(any_schedule(), st.integers(1, 80))
def test_a_text_fits_and_shows_nothing_but_products(schedule: Schedule, width: int) -> None:
    text, whole = tree(schedule, width), tree(schedule, EVERYTHING)
    assert len(text) <= width
    if len(whole) <= width:
        assert text == whole
        return
    assert "…" in text
    # Parentheses around numbers alone can be read wherever they stand.
    for text_of_product in re.findall(r"\([\d …]+\)", text):
        assert read(text_of_product)[1] <= set(products_of(schedule))
    if text.count("(") > text.count(")"):
        assert text.endswith("…")


def test_an_ellipsis_is_not_followed_by_another() -> None:
    assert tree(Schedule.linear(100), 6) == "1 … 99"
    assert tree(Schedule.linear(100), 5) == "1 …"
    assert tree(Schedule.linear(100), 2) == "…"
    for width in range(1, 200):
        assert "… …" not in tree(Schedule.truncated(300, 2), width)


def from_products(n: int, *products: tuple[int, int, int]) -> Schedule:
    sweep = [(0, k, k + 1) for k in range(1, n)]
    levels = [("product", [[product]]) for product in products]
    return Schedule.from_levels(n, [*levels, ("sweep", [sweep])])


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Schedule.linear(0), ""),
        (Schedule.linear(1), ""),
        (Schedule.linear(6), "1 … 5"),
        (Schedule.blelloch(4), "1 (2 3)"),
        (Schedule.blelloch(8), "1 (2 3) ((4 5) (6 7))"),
        (Schedule.chunked(15, 3), "1 2 3 4 (5 … 9) 10 … 14"),
        (Schedule.chunked(12, 3), "1 2 3 (4 5 6 7) 8 9 10 11"),
        # Right-grown, and a tree that is continued by an element.
        (from_products(5, (3, 4, 5), (2, 3, 5)), "1 (2 (3 4))"),
        (from_products(6, (1, 2, 3), (3, 4, 5), (1, 3, 5), (1, 5, 6)), "(((1 2) (3 4)) 5)"),
        (from_products(6, (1, 2, 3), (1, 3, 4), (4, 5, 6), (1, 4, 6)), "((1 2 3) (4 5))"),
        # One product in two others, and two that overlap.
        (from_products(5, (1, 2, 3), (1, 3, 4), (3, 4, 5), (1, 3, 5)), "(1 2 3) ((1 2) (3 4))"),
        (from_products(5, (1, 2, 3), (2, 3, 4)), "(1 2) (2 3) 4"),
    ],
)
def test_texts(schedule: Schedule, text: str) -> None:
    assert tree(schedule, 60) == text


def test_neighbours_of_one_shape_are_shortened_where_there_is_no_room() -> None:
    pairs = [(k, k + 1, k + 2) for k in range(1, 13, 2)]
    grown = from_products(13, *pairs, *((1, k, k + 2) for k in range(3, 13, 2)))
    whole = "((1 2) (3 4) (5 6) (7 8) (9 10) (11 12))"
    assert tree(grown, len(whole)) == whole
    assert tree(grown, len(whole) - 1) == "((1 2) … (11 12))"
    assert tree(Schedule.truncated(14, 1), 30) == "1 (2 3) … (12 13)"
    assert tree(from_products(7, (1, 2, 3), (3, 4, 5), (5, 6, 7)), 16) == "(1 2) … (5 6)"
    # Products of more than four are alike, however many they are of.
    assert tree(Schedule.chunked(1000, 32), 60) == "1 … 30 (31 … 61) … (937 … 967) 968 … 999"


def test_neighbours_of_other_shapes_are_not_shortened() -> None:
    rows = from_products(8, (1, 2, 3), (3, 4, 5), (3, 5, 6), (6, 7, 8))
    assert tree(rows, 20) == "(1 2) (3 4 5) (6 7)"
    assert tree(rows, 18) == "(1 2) (3 4 5) (6 …"
    five = [
        [(k, k + 1, k + 2), (k, k + 2, k + 3), (k, k + 3, k + 4), (k, k + 4, k + 5)]
        for k in (6, 11)
    ]
    pairs = [(1, 2, 3), (3, 4, 5), (1, 3, 5), (1, 5, 6)]
    mixed = from_products(16, *pairs, *five[0], *five[1])
    assert tree(mixed, 38) == "(((1 2) (3 4)) 5) (6 … 10) (11 … 15)"
    assert tree(mixed, 35) == "(((1 2) (3 4)) 5) (6 … 10) (11 …"


def test_long_and_deep_schedules_take_no_time() -> None:
    for schedule in every_schedule(30_000, chunks=(2, 32, 3000, 20_000)):
        assert_fast(schedule, 100)
        assert_fast(schedule, EVERYTHING)
    # Nested more deeply than Python's functions may be.
    n = 3000
    triples = [(k, k + 1, k + 2) for k in range(2, n - 1, 3)]
    mixed = [(1, k, k + 1 + (k % 3 == 2)) for k in range(2, n - 1) if k % 3 != 0]
    left = assert_fast(from_products(n, *((1, k, k + 1) for k in range(2, n))), EVERYTHING)
    right = assert_fast(from_products(n, *((k, k + 1, n) for k in range(n - 2, 0, -1))), 10**5)
    both = assert_fast(from_products(n, *triples, *mixed), EVERYTHING)
    assert left == "(1 … 2999)"
    assert right.startswith("(1 (2 (3")
    assert right.endswith(f" (2998 2999{')' * 2998}")
    assert both.startswith("(((")
    assert both.count("(") == both.count(")") > 1000


def assert_fast(schedule: Schedule, width: int) -> str:
    start = time.perf_counter()
    text = tree(schedule, width)
    # Tens of milliseconds; what is quadratic takes minutes.
    assert time.perf_counter() - start < 2, schedule
    assert len(text) <= width
    return text
