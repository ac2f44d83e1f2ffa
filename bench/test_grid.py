"""The grid of chains and schedules, without the waiting."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sparsescan import Pattern, Schedule
from sparsescan.symbolic.pattern import of_mask

from . import grid


def test_every_chain_can_be_planned() -> None:
    chains = {name: make() for name, make in grid.chains().items() if "VGG" not in name}
    assert len(grid.chains()) >= 30
    for name, (patterns, batch) in chains.items():
        assert batch >= 1, name
        for later, earlier in pairwise(patterns):
            assert later.shape[0] == earlier.shape[1], name


def test_a_run_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grid.machine, "pin", lambda: None)
    assert grid.main(["--rounds", "2", "--only", "T=10, B=1", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "RNN 20, T=10, B=16" in printed
    (path,) = tmp_path.glob("grid-*.json")
    content = json.loads(path.read_text())
    chain = content["chains"]["RNN 20, T=10, B=1"]
    assert chain["auto is"] == "Schedule.linear(10)"
    assert set(chain["samples_seconds"]) == set(chain["predicted_seconds"])
    assert all(len(samples) == 2 for samples in chain["samples_seconds"].values())
    assert 0 <= content["pairs_in_order"][0] <= content["pairs_in_order"][1]


def test_the_best_is_chosen_by_other_turns_than_it_is_measured_by() -> None:
    samples = {
        "auto": [1.0, 1.0, 1.0, 1.0],
        "Schedule.linear(3)": [2.0, 2.0, 2.0, 2.0],
        "lucky": [0.5, 4.0, 0.5, 4.0],
    }
    ratios = grid.ratios(samples)
    assert (ratios["auto/linear"], ratios["auto/best"], ratios["best"]) == (0.5, 0.25, "lucky")


def test_pairs_are_counted_if_they_differ_clearly() -> None:
    result = {
        "median_seconds": {"auto": 9.0, "a": 1.0, "b": 1.1, "c": 2.0},
        "predicted_seconds": {"auto": 0.0, "a": 3.0, "b": 1.0, "c": 2.0},
    }
    # a and b are too close; b before c is right, a before c is not.
    assert grid.ranked(result) == (1, 2)


def test_large_products_are_not_tried() -> None:
    large = [Pattern.dense((1001, 1000)), Pattern.dense((1000, 1001))] * 4
    assert Schedule.blelloch(8) not in grid.schedules(large, 1)
    several = grid.schedules([Pattern.diagonal(4)] * 20, 1)
    assert several[0] == Schedule.linear(20)
    assert len(set(several)) == len(several) >= 7


def test_trees_for_many_threads_are_tried() -> None:
    permutation = of_mask(np.roll(np.eye(1024, dtype=bool), 1, axis=1))
    several = grid.schedules([permutation] * 200, 1)
    assert len(several) > 7
