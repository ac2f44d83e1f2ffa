"""Models that change in all ways that people change them, converted and not, side by side."""

from __future__ import annotations

import warnings

import fuzz_lives
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("kind", fuzz_lives.KINDS)
@given(st.integers(0, 2**32 - 1), st.data())
def test_lives(kind: str, seed: int, data: st.DataObject) -> None:
    names = sorted({event.__name__ for event in fuzz_lives.KINDS[kind][1]})
    life = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=8), "events")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_lives.live(kind, seed, life)


@pytest.mark.parametrize("kind", fuzz_lives.KINDS)
def test_each_event_can_be(kind: str) -> None:
    """An event that no model could have would test nothing."""
    for event in set(fuzz_lives.KINDS[kind][1]):
        name = event.__name__
        if kind != "stack" and name == "bool_mask":
            continue
        before = ["share"] if name == "interleave" else ["hook"] if name == "unhook" else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lives = (fuzz_lives.live(kind, seed, [*before, name]) for seed in range(20))
            assert any(count > len(before) for count in lives), name
