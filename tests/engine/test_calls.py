"""Malformed and odd calls of the whole API: each is refused in plain words, or answered rightly."""

from __future__ import annotations

import secrets

import fuzz_calls
import pytest


def test_every_call_is_refused_or_right(pytestconfig: pytest.Config) -> None:
    seed, count = 0, 3000 if pytestconfig.getoption("--all") else 600
    if pytestconfig.getoption("--explore"):
        seed, count = secrets.randbits(32), 100_000
    counts = fuzz_calls.run(seed, range(count))
    assert counts["wrong"] == 0
    assert counts.total() == count
    # It tests both.
    assert counts["refused"] > count / 2
    assert counts["right"] > count / 10


def test_a_call_can_be_made_again() -> None:
    texts = [[fuzz_calls.make(7, i).text.split(" at 0x")[0] for i in range(50)] for _ in range(2)]
    assert texts[0] == texts[1]
