"""Malformed and odd calls of the whole API: each is refused in plain words, or answered rightly."""

from __future__ import annotations

from collections.abc import Callable

import fuzz_calls


def test_every_call_is_refused_or_right(seeds: Callable[..., range]) -> None:
    numbers = seeds(600, 900, 100_000)
    counts, count = fuzz_calls.run(0, numbers), len(numbers)
    assert counts["wrong"] == 0
    assert counts.total() == count
    # It tests both.
    assert counts["refused"] > count / 2
    assert counts["right"] > count / 10
