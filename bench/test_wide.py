"""Wide cells beside the floor: a reduced run, and what the floor counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import wide
from .experiment import Options, run
from .map_races import INFERENCE, TRAINING


def test_a_reduced_run(tmp_path: Path) -> None:
    path = run(wide.EXPERIMENT, Options(quick=True, device="cpu"), tmp_path)
    results = json.loads(path.read_text())
    assert results["done"]
    (table,) = wide.EXPERIMENT.tables(results)
    assert [row[0] for row in table.rows] == [
        "LSTM, inference, H=128, B=1",
        "LSTM, training, H=128, B=1",
    ]
    assert "ours / floor" in wide.EXPERIMENT.summary(results)


def test_what_the_floor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "bandwidth", lambda size: 1e9)
    monkeypatch.setattr(wide, "flop_rate", lambda dtype: 1e11)
    one = wide.Case("LSTM", INFERENCE, 128, 1, steps=10)
    weights = 4 * 128 * (128 + 32)
    assert wide.floor(one)["seconds"] == pytest.approx(10 * 4 * weights / 1e9)
    assert wide.floor(one._replace(mode=TRAINING))["seconds"] == pytest.approx(
        10 * 8 * weights / 1e9
    )
    many = one._replace(batch=1000)
    assert wide.floor(many)["seconds"] == pytest.approx(10 * 2 * 1000 * weights / 1e11)
    assert wide.floor(many._replace(mode=TRAINING))["seconds"] == pytest.approx(
        3 * wide.floor(many)["seconds"]
    )
