"""A tree's text says which products are made, and fits."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import schedules
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
