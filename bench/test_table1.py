"""The experiment of Table 1, on small images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from . import compare, table1
from .contests import OURS
from .experiment import Options, Results, run
from .table1 import AUTOGRAD, BATCHED, CONTESTS, FORGOTTEN, PAPER, SPARSITY, WRITING

QUICK = Options(quick=True, device="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduced data, and one round."""
    contest = compare._contest
    monkeypatch.setattr(compare, "_contest", lambda work, *rest: contest(work, 1, True, 1))
    monkeypatch.setattr(compare, "_WARM_UP", 0)
    monkeypatch.setattr("bench.machine.pin", lambda: None)


@pytest.mark.parametrize("name", PAPER)
def test_the_sparsities_are_the_papers(name: str) -> None:
    op = table1._operator(name, False)
    assert round(1 - op.nnz / (op.shape[0] * op.shape[1]), 5) == SPARSITY[name]


def test_every_contest_is_a_piece_and_a_run_that_is_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    last = CONTESTS[-1]
    broken = type(last)(last.name, last.work, stop, last.required)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(table1, "CONTESTS", (*CONTESTS[:-1], broken))
        with pytest.raises(KeyboardInterrupt):
            run(table1.EXPERIMENT, QUICK, tmp_path)
    (file,) = tmp_path.glob("table1-quick-*.json")
    first = json.loads(file.read_text())
    assert list(first["pieces"]) == [contest.name for contest in CONTESTS[:-1]]
    assert run(table1.EXPERIMENT, QUICK, tmp_path) == file
    results = json.loads(file.read_text())
    assert results["done"]
    assert {key: results["pieces"][key] for key in first["pieces"]} == first["pieces"]
    for contest in CONTESTS:
        piece = results["pieces"][contest.name]
        assert set(piece["samples_seconds"]) == {OURS, AUTOGRAD, FORGOTTEN, BATCHED, WRITING}
        assert piece["missing"] == {}
    (drawing,) = table1.EXPERIMENT.drawings(results)
    drawing.figure.savefig(tmp_path / "picture.png")
    rows = table1.EXPERIMENT.rows(results)
    assert len(rows) == 2 * len(CONTESTS)
    assert {row.paper for row in rows} == {*PAPER.values(), None}


def made_up(**medians: float) -> Results:
    piece = {
        "name": "table1-relu-B=16",
        "work": "ReLU, batch 16",
        "operator": "relu",
        "sparsity": 0.5,
        "median_seconds": medians,
        "samples_seconds": {name: [[taken], [2 * taken]] for name, taken in medians.items()},
        "rounds_that_count": [True, False],
        "missing": {},
    }
    return {"pieces": {piece["name"]: piece}}


def test_whatever_was_measured_can_be_drawn(tmp_path: Path) -> None:
    assert table1.EXPERIMENT.drawings({"pieces": {}}) == []
    assert table1.EXPERIMENT.rows({"pieces": {}}) == []
    without_torch = made_up(**{OURS: 1e-4, WRITING: 5e-5})
    for results in (without_torch, made_up(**{OURS: 1e-4, WRITING: 5e-5, AUTOGRAD: 100.0})):
        (drawing,) = table1.EXPERIMENT.drawings(results)
        drawing.figure.savefig(tmp_path / "picture.png")
        assert "relu 0.50000 (published: 0.99998)" in drawing.caption
    rows = table1.EXPERIMENT.rows(results)
    assert [(row.peer, row.theirs / row.ours, row.paper) for row in rows] == [
        (AUTOGRAD, pytest.approx(1e6), 1.2e6),
        (WRITING, pytest.approx(0.5), None),
    ]
    assert [row.peer for row in table1.EXPERIMENT.rows(without_torch)] == [WRITING]


def test_a_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="run it without --device"):
        table1.EXPERIMENT.pieces(Options(quick=True, device="cuda"))
