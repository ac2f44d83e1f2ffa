"""The experiment of Table 1, on small images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from . import table1, turns
from .contests import OURS
from .experiment import Options, Results
from .runs import cut_off, draw, go_on, interrupt
from .table1 import AUTOGRAD, BATCHED, CONTESTS, EXPERIMENT, FORGOTTEN, PAPER, SPARSITY, WRITING

QUICK = Options(quick=True, device="cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduced data, and one round."""
    measure = turns.measure
    monkeypatch.setattr(turns, "measure", lambda contest, **how: measure(contest, 1, True, 1))
    monkeypatch.setattr(turns, "_WARM_UP", 0)


@pytest.mark.parametrize("name", PAPER)
def test_the_sparsities_are_the_papers(name: str) -> None:
    op = table1._operator(name, False)
    assert round(1 - op.nnz / (op.shape[0] * op.shape[1]), 5) == SPARSITY[name]


@pytest.mark.slow
def test_every_contest_is_a_piece_and_a_run_that_is_cut_off_goes_on(tmp_path: Path) -> None:
    broken = replace(CONTESTS[-1], make=interrupt)
    contests = (*CONTESTS[:-1], broken)
    file = cut_off(EXPERIMENT, QUICK, tmp_path, table1, "CONTESTS", contests)
    assert file.name.startswith("table1-quick-")
    assert list(json.loads(file.read_text())["pieces"]) == [one.name for one in CONTESTS[:-1]]
    results = go_on(EXPERIMENT, QUICK, tmp_path, file)
    for contest in CONTESTS:
        piece = results["pieces"][contest.name]
        assert set(piece["samples_seconds"]) == {OURS, AUTOGRAD, FORGOTTEN, BATCHED, WRITING}
        assert piece["missing"] == {}
    assert len(draw(EXPERIMENT, results, tmp_path)) == 1
    rows = EXPERIMENT.rows(results)
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
    assert EXPERIMENT.drawings({"pieces": {}}) == []
    assert EXPERIMENT.rows({"pieces": {}}) == []
    without_torch = made_up(**{OURS: 1e-4, WRITING: 5e-5})
    for results in (without_torch, made_up(**{OURS: 1e-4, WRITING: 5e-5, AUTOGRAD: 100.0})):
        (drawing,) = draw(EXPERIMENT, results, tmp_path)
        assert "relu 0.50000 (published: 0.99998)" in drawing.caption
    rows = EXPERIMENT.rows(results)
    assert [(row.peer, row.theirs / row.ours, row.paper) for row in rows] == [
        (AUTOGRAD, pytest.approx(1e6), 1.2e6),
        (WRITING, pytest.approx(0.5), None),
    ]
    assert [row.peer for row in EXPERIMENT.rows(without_torch)] == [WRITING]


def test_a_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="run it without --device"):
        EXPERIMENT.pieces(Options(quick=True, device="cuda"))
