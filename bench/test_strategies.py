"""Which way to parallelise: predictions and a run of all strategies on one and two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsescan.strategies.compare import strategies as all_strategies

from . import scaling, strategies
from .experiment import RESULTS, Options, run

QUICK = Options(quick=True, device="cpu")
EVERY = len(all_strategies())


@pytest.mark.slow
@pytest.mark.skipif(bool(scaling.missing()), reason=str(scaling.missing()))
@pytest.mark.usefixtures("sleeping_ranks")
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.machine.pin", lambda: None)
    monkeypatch.setattr(strategies, "RANKS", (1, 2))
    path = run(strategies.EXPERIMENT, QUICK, tmp_path / "results")
    results = json.loads(path.read_text())
    assert results["done"]
    pieces = results["pieces"]

    for name in strategies._QUICK_NETWORKS:
        piece = pieces[f"predicted, {name}"]
        counts = [one["workers"] for one in piece["comparisons"]]
        assert counts == list(strategies._QUICK_WORKERS)
        for one in piece["comparisons"]:
            assert len(one["predictions"]) + len(one["reasons"]) == EVERY
            for each in one["predictions"]:
                assert each["total"] == pytest.approx(sum(each["nanoseconds"].values()))
                assert isinstance(each["bytes"], int)
                assert isinstance(each["memory"], int)

    for ranks in (1, 2):
        piece = pieces[f"measured, P={ranks}"]
        assert piece["ranks"] == ranks
        assert [one["network"] for one in piece["runs"]] == [*strategies._QUICK_MEASURED]
        for one in piece["runs"]:
            assert len(one["measured"]) + len(one["reasons"]) == EVERY
            assert "scan" in [each["strategy"] for each in one["measured"]]
            times = [each["measured_nanoseconds"] for each in one["measured"]]
            assert times == sorted(times)
            for each in one["measured"]:
                assert each["bytes"] == each["measured_bytes"]
                # However busy the machine is.
                assert 0.05 < each["total"] / each["measured_nanoseconds"] < 20
            right, pairs = one["pairs"]
            assert 0 <= right <= pairs <= EVERY * (EVERY - 1) / 2

    over, beside = strategies.EXPERIMENT.drawings(results)
    for drawing in (over, beside):
        drawing.figure.savefig(tmp_path / "picture.png")
    cases = sum(len(one["measured"]) for k in (1, 2) for one in pieces[f"measured, P={k}"]["runs"])
    assert f"as predicted in {cases} of {cases} cases" in beside.caption
    assert "P=2: " in beside.caption
    # Two networks for the workers that are shown, and two that were measured on two ranks.
    assert len(strategies.EXPERIMENT.rows(results)) == 2 * len(strategies._SHOWN) + 2
    half = results | {"pieces": {"predicted, lenet5": pieces["predicted, lenet5"]}}
    assert len(strategies.EXPERIMENT.drawings(half)) == 1
    assert strategies.EXPERIMENT.drawings({"pieces": {}}) == []
    assert strategies.EXPERIMENT.rows({"pieces": {}}) == []


def test_the_order_is_said():
    runs = [
        {"pairs": [3, 4], "measured": [{"measured_nanoseconds": 3.0, "total": 2.0}]},
        {"pairs": [1, 1], "measured": [{"measured_nanoseconds": 3.0, "total": 4.0}]},
    ]
    said = strategies._order_said([{"ranks": 2, "runs": runs}])
    assert said.endswith("P=2: 4 of 5 pairs, and 50% off at most.")


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("strategies-*.json")), ids=lambda path: path.stem
)
def test_results_that_are_kept_are_in_the_order_predicted(path: Path):
    """Bytes exactly; times of ranks with a core or a thread of their own, mostly.

    On one rank all do the same arithmetic: there are times to predict, but no order.
    """
    pieces = json.loads(path.read_text())["pieces"]
    for name, piece in pieces.items():
        if not name.startswith("measured"):
            continue
        for run_ in piece["runs"]:
            assert all(one["measured_bytes"] == one["bytes"] for one in run_["measured"])
            if piece["ranks"] <= 2:
                times = [(one["measured_nanoseconds"], one["total"]) for one in run_["measured"]]
                off = sorted(abs(measured / predicted - 1) for measured, predicted in times)
                assert off[len(off) // 2] < 0.2
                assert off[-1] < 0.6
        if piece["ranks"] > 1:
            right, pairs = (sum(run_["pairs"][k] for run_ in piece["runs"]) for k in (0, 1))
            assert right >= 0.9 * pairs


def test_what_cannot_be_run_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.machine.pin", lambda: None)
    monkeypatch.setattr(scaling, "_mpiexec", lambda: None)
    with pytest.raises(SystemExit, match="strategies needs mpi4py and mpiexec: pip install"):
        run(strategies.EXPERIMENT, QUICK, tmp_path)
