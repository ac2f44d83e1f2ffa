"""Models that change in all ways that people change them, converted and not, side by side."""

from __future__ import annotations

import warnings

import fuzz_lives
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsescan.torch import sequential

SEEDS = st.integers(0, 2**32 - 1)


def events(kind: str) -> st.SearchStrategy[list[str]]:
    """Names of events, in any order."""
    names = sorted({event.__name__ for event in fuzz_lives.KINDS[kind][1]})
    return st.lists(st.sampled_from(names), min_size=1, max_size=8)


@given(SEEDS, events("stack"))
def test_lives_of_stacks(seed: int, names: list[str]) -> None:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if seed % 4:  # PyTorch computes small stacks of linear layers
            patch.setattr(sequential, "_is_slower", lambda *_: False)
        fuzz_lives.live("stack", seed, names)


@given(SEEDS, events("alone"))
def test_lives_of_layers_that_stand_alone(seed: int, names: list[str]) -> None:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if seed % 4:
            patch.setattr(sequential, "_is_slower", lambda *_: False)
        fuzz_lives.live("alone", seed, names)


@given(SEEDS, events("recurrent"))
def test_lives_of_recurrent_modules(seed: int, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_lives.live("recurrent", seed, names)


@given(SEEDS, events("derived"))
def test_lives_of_classes_of_users(seed: int, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_lives.live("derived", seed, names)


@given(SEEDS, events("layers"))
def test_lives_of_layers_of_torchrecurrent(seed: int, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_lives.live("layers", seed, names)


@given(SEEDS, events("cells"))
def test_lives_of_modules_of_cells(seed: int, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_lives.live("cells", seed, names)


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
