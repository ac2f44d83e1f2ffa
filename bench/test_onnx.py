"""Inference beside ONNX Runtime: contenders agree, and what was measured can be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import map as sizes
from . import onnx, peers
from .experiment import Options, Results, run
from .map import OURS, THEIRS
from .onnx import PYTORCH, RUNTIME, Sequence

QUICK = Options(True, "cpu")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait: nobody looks at the times."""
    monkeypatch.setattr(sizes, "_sleep", lambda: None)


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def require(module: str, hint: str) -> Any:
        raise peers.MissingPeerError(f"No module named '{module}': {hint}")

    monkeypatch.setattr(peers, "require", require)


def computed(point: Sequence) -> list[dict[str, Any]]:
    """Return what each way of ours and of the peer computes."""
    race = point.race()
    results = []
    for contender in (race.ours, race.theirs):
        for way in contender.ways.values():
            with way.within():
                results.append(contender.read(way.call()))
    return results


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_onnx_runtime_computes_what_we_do(kind: str) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    for threads in (1, 2):
        ours, *theirs = computed(Sequence(kind, 3, 5, 2, threads, RUNTIME, 7))
        assert len(theirs) == 2  # ways
        for each in theirs:
            assert each["output"].shape == (7, 2, 5)
            assert len(each) == (3 if kind == "LSTM" else 2)
            assert sizes._difference(ours, each) < 1e-5


def test_pytorch_computes_what_we_do() -> None:
    ours, theirs = computed(Sequence("LSTM", 3, 5, 2, 1, PYTORCH, 7))
    assert sizes._difference(ours, theirs) < 1e-5


def test_the_whole_table_is_there() -> None:
    every = list(onnx.groups(False))
    assert len(every) == 2 * 3 * 5 * 2 * 2
    assert {len(group.points) for group in every} == {5}
    for quick in (True, False):
        keys = [piece.key for piece in onnx.EXPERIMENT.pieces(Options(quick, "cpu"))]
        assert len(keys) == len(set(keys))
    assert keys[0] == "LSTM(1, 40), B=1, 1 thread, ONNX Runtime"
    with pytest.raises(SystemExit, match="onnx is of the CPU"):
        list(onnx.EXPERIMENT.pieces(Options(True, "cuda")))


@pytest.mark.usefixtures("_nothing_installed")
def test_a_run_without_onnx_runtime_has_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(onnx, "_QUICK_KINDS", ("GRU",))
    path = run(onnx.EXPERIMENT, QUICK, tmp_path)
    experiment, found = onnx.EXPERIMENT, json.loads(path.read_text())
    missing = [piece for key, piece in found["pieces"].items() if RUNTIME in key]
    assert len(missing) == 2
    for piece in missing:
        assert piece["points"] == {}
        assert "onnxruntime" in piece["missing"]["peer"]
    every = list(onnx.ratios(found))
    assert [each.group.peer for each in every] == [PYTORCH] * 4
    assert "beside PyTorch" in experiment.summary(found)
    (drawn,) = experiment.drawings(found)
    assert drawn.title == "Inference beside PyTorch"


def made_up(ratios: dict[str, float]) -> Results:
    """Return results in which the peer takes so many times as long, by the key of a piece."""
    pieces = {
        group.key: {
            "points": {
                each.name: {
                    "samples": {OURS: [1e-3] * 2, THEIRS: [1e-3 * ratios[group.key]] * 2},
                    "kernel": "sparsescan",
                }
                for each in group.points
            },
            "cores_others_used": [0.0, 0.0],
            "missing": {},
        }
        for group in onnx.groups(True)
        if group.key in ratios
    }
    return {"quick": True, "pieces": pieces}


def test_what_is_missed_is_said() -> None:
    keys = [group.key for group in onnx.groups(True) if group.peer == RUNTIME]
    results = made_up(dict(zip(keys, (0.5, 2.0, 3.0, 4.0), strict=True)))
    asked, medians, worst, whole = onnx.EXPERIMENT.tables(results)
    work = "T ≥ 64, beside ONNX Runtime"
    assert asked.rows == [
        [work, "1× each", "0.50× (LSTM(1, 40), B=1, 1 thread, T=64)", "1 of 4 missed"],
        [work, "median 1.5×", "2.50×", "met"],
    ]
    of = {row[1]: row[2:] for row in medians.rows}
    assert of["all"] == ["2.50", "0.50", "4.00", "2 of 8"]
    assert of["LSTM"] == ["1.25", "0.50", "2.00", "2 of 4"]
    assert of["2 threads"] == ["3.00", "2.00", "4.00", "0 of 4"]
    assert "B=16" not in of
    assert [row[2] for row in worst.rows] == ["0.50", "2.00", "3.00", "4.00"]
    assert whole.heads == ["peer", "call", "T=1", "T=64"]
    (drawn,) = onnx.EXPERIMENT.drawings(results)
    assert "2 of 8 calls are below it" in drawn.caption
    assert "1 of 4 missed" in onnx.summary(results)
    assert onnx.EXPERIMENT.tables({"quick": True, "pieces": {}}) == []


def test_other_outputs_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, named = np.random.default_rng(0), onnx._named

    def wrong(arrays: Any) -> dict[str, Any]:
        return {name: each + rng.random() for name, each in named(arrays).items()}

    monkeypatch.setattr(onnx, "_named", wrong)
    with pytest.raises(AssertionError, match="output: the relative difference"):
        sizes.measure([Sequence("GRU", 3, 5, 2, 1, PYTORCH, 7)], 10**9, quick=True)
