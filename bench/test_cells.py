"""The contest of cells: contenders agree, and what was measured can be shown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsescan.recurrent import catalogue

from . import cell_contenders, cell_history, cell_scan, cell_starts, cells, peers, step
from .cell_contenders import Case
from .cells import JAX, OURS, SNNTORCH, TORCHRECURRENT, Task
from .experiment import Options, Results

# With several stages, transposes, states that are not read, and spikes.
KINDS = ("MGU", "AntisymmetricRNN", "TGRU", "Leaky")


def tiny(kind: str) -> Case:
    return Case(kind, 5, 3, 2, 7)


@pytest.fixture(autouse=True)
def _few_variants_and_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX takes seconds to compile a loop that is unrolled; and nobody looks at the times."""
    monkeypatch.setattr(cells, "PAUSE", 0)
    monkeypatch.setattr(cell_contenders, "UNROLLS", (1,))


def few(kinds: Iterable[str]) -> list[Any]:
    """Mark as slow the tests of most cells, whose kernels are compiled for them."""
    return [pytest.param(each, marks=() if each in KINDS else pytest.mark.slow) for each in kinds]


@pytest.mark.parametrize("kind", few(catalogue.__all__))
def test_the_scan_of_jax_computes_what_we_do(kind: str) -> None:
    pytest.importorskip("jax")
    given = tiny(kind).given()
    ours = next(iter(cell_contenders.ours(given).values()))
    for is_packed in (False, True):
        theirs = cell_contenders._jitted(given, 2, is_packed)
        apart = cells._differences(given, ours, theirs)
        assert {"output", "input", "state", *given.cell.params} == set(apart)


TASKS = {task.case.kind: task for task in cells.TASKS if task.peer in (TORCHRECURRENT, SNNTORCH)}


@pytest.mark.parametrize("kind", few(TASKS))
def test_modules_compute_what_we_do(kind: str) -> None:
    task = TASKS[kind]
    given = replace(task.case, hidden=5, inputs=3, batch=2, steps=7).given()
    ours = next(iter(cell_contenders.ours(given).values()))
    (theirs,) = cells._MAKERS[task.peer](given).values()
    apart = cells._differences(given, ours, theirs)
    assert {"output", "input", *given.cell.params} <= set(apart)
    if given.kind != "JANET":
        assert any(name.startswith("state ") for name in apart)


def measured(kind: str, peer: str) -> Results:
    return cells.measure(Task(tiny(kind), peer, 2), quick=True)


@pytest.mark.parametrize(("kind", "peer"), [("MGU", TORCHRECURRENT), ("Leaky", JAX)])
def test_a_race_has_both_contenders_and_our_forward_pass(kind: str, peer: str) -> None:
    piece = measured(kind, peer)
    there = {peer} - set(piece["missing"])
    assert set(piece["samples"]) == {OURS, cells.FORWARD} | there
    assert set(piece["variants"]) == {OURS} | there
    assert piece["wanted"] == {peer: 2}
    assert all(len(taken) >= 2 for taken in piece["samples"].values())


def test_a_wrong_gradient_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = cell_contenders.ours

    def wrong(given: cell_contenders.Given) -> dict[str, Any]:
        right = next(iter(ours(given).values()))
        return {
            "1 threads": lambda grad=None: {
                name: 1.01 * each if name == "weight_hh" else each
                for name, each in right(grad).items()
            }
        }

    monkeypatch.setattr(cell_contenders, "ours", wrong)
    with pytest.raises(AssertionError, match=r"weight_hh: the relative difference is 1\.0e-02"):
        measured("MGU", TORCHRECURRENT)


def test_a_peer_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(given: Any) -> Any:
        raise peers.MissingPeerError("No module named 'xlstm'")

    monkeypatch.setitem(cells._MAKERS, cells.XLSTM, none)
    piece = measured("sLSTM", cells.XLSTM)
    assert "xlstm" in piece["missing"][cells.XLSTM]
    results = {"pieces": {"sLSTM": piece}}
    assert cells.EXPERIMENT.rows(results) == []
    assert cells.EXPERIMENT.tables(results) == []


def test_a_call_on_one_core_leaves_the_others_to_the_next() -> None:
    before = os.sched_getaffinity(0)
    with cell_contenders.on_one_core(True):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_longer_turns_are_tried_until_they_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {(1, False): 2.0, (1, True): 3.0, (2, False): 1.0, (4, False): 1.2, (8, False): 1.3}
    tried: list[tuple[int, bool]] = []

    def jitted(given: Any, *form: Any) -> Any:
        tried.append(form)
        return form

    monkeypatch.setattr(cell_contenders, "UNROLLS", (1, 2, 4, 8, 16))
    monkeypatch.setattr(cell_contenders, "_jitted", jitted)
    monkeypatch.setattr(cell_contenders, "seconds", lambda form, times: [seconds[form]])
    monkeypatch.setattr(
        cell_contenders, "fastest", lambda forms: min(forms.items(), key=lambda it: seconds[it[1]])
    )
    names = cell_contenders.jax(None)  # type: ignore[arg-type]
    assert names == {"unroll=2": (2, False), "unroll=2, one core": (2, False)}
    assert tried == list(seconds)


def test_every_cell_is_in_the_table() -> None:
    of = {
        peer: [task.case.kind for task in cells.TASKS if task.peer == peer]
        for peer in cells._MAKERS
    }
    assert len(of[TORCHRECURRENT]) == 41
    assert sorted(of[TORCHRECURRENT] + of[SNNTORCH] + [*cells._ALONE]) == sorted(catalogue.__all__)
    assert of[JAX] == catalogue.__all__ * 2
    for quick in (False, True):
        keys = [piece.key for piece in cells.EXPERIMENT.pieces(Options(quick, "cpu"))]
        assert len(keys) == len(set(keys))
    assert sum(key.startswith(cells._HISTORY) for key in keys) == len(step.QUICK)
    with pytest.raises(SystemExit, match="cells is of the CPU"):
        list(cells.EXPERIMENT.pieces(Options(True, "cuda")))


def test_what_is_missed_is_said() -> None:
    def piece(peer: str, wanted: float, ratio: float) -> Results:
        samples = {OURS: [1e-3] * 3, peer: [ratio * 1e-3] * 3}
        return {"samples": samples, "variants": {}, "wanted": {peer: wanted}}

    results = {
        "pieces": {
            "MGU, H=20": piece(JAX, 3, 9),
            "LEM, H=20": piece(JAX, 3, 2),
            "MGU, H=64": piece(JAX, 1.5, 2),
            "Leaky": piece(SNNTORCH, 200, 300),
            "first step of MGU": {"seconds": {cell_starts.KEPT: [0.3, 0.5, 0.6]}},
            "lines of code": {"lines": {"MGU": 8, "LEM": 14}},
        }
    }
    asked, ratios = cells.EXPERIMENT.tables(results)
    said = {row[0]: row[1:] for row in asked.rows if row[0]}
    assert said["every cell, H=20, jax.lax.scan"] == ["3× each", "2.00× (LEM)", "1 of 2 missed"]
    assert said["every cell, H=64, jax.lax.scan"][-1] == "met"
    assert said["first step of MGU, compiled before"] == ["≤ 0.4 s", "0.50 s", "missed"]
    assert said["lines of code of a cell"] == ["median ≤ 12", "11, at most 14", "met"]
    assert [row[-1] for row in ratios.rows] == ["", "missed", "", ""]
    theirs = [row.theirs for row in cells.EXPERIMENT.rows(results)]
    assert theirs == pytest.approx([9e-3, 2e-3, 2e-3, 0.3])
    assert len(cells.EXPERIMENT.drawings(results)) == 2
    assert "1 of 2 missed" in cells.summary(results)


def test_lines_of_code_are_without_texts_about_them() -> None:
    source = '''
class Cell:
    """A text
    of two lines."""

    # A comment.
    weight = Input(
        "f",
    )

    def step(self, x, h):
        """Return a state."""
        return x  # it
'''
    assert cell_starts.lines_of_code(source) == 6


def test_a_first_step_is_that_of_a_new_class(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, bool]] = []

    def run(command: list[str], environment: dict[str, str]) -> str:
        folder = Path(environment["NUMBA_CACHE_DIR"])
        told.append((command[-1], any(folder.iterdir())))
        (folder / "code").write_text("compiled")
        return "0.1 9\n0.5 2\n"

    cell_starts._library.cache_clear()
    monkeypatch.setattr(cell_starts.children, "run", run)
    taken = cell_starts.measure_start("MGU", 2)["seconds"]
    cell_starts._library.cache_clear()
    assert {what: len(each) for what, each in taken.items()} == {
        cell_starts.EMPTY: 1,
        cell_starts.LIBRARY: 2,
        cell_starts.KEPT: 2,
        cell_starts.IMPORT: 3,
    }
    assert taken[cell_starts.KEPT] == [2, 2]
    assert [has_code for _, has_code in told] == [False, True, True, False, True, True]
    for code, _ in told:
        compile(code, "", "exec")


@pytest.mark.slow
def test_two_versions_take_turns_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell_history, "_checked_out", lambda: cell_history._ROOT)
    case = step.Case("LSTM", 2, 5, 3, 7, 1, 1, 0.1)
    piece = cell_history.measure_history(case, 0.95, quick=True)
    assert set(piece["samples"]) == {OURS, cell_history.BEFORE}
    assert piece["wanted"] == {cell_history.BEFORE: 0.95}


def test_a_version_that_git_does_not_have_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cell_history, "COMMIT", "0" * 40)
    monkeypatch.setattr(cell_history.tempfile, "gettempdir", lambda: str(tmp_path))
    piece = cell_history.measure_history(step.CASES[0], 0.95, quick=True)
    assert "00000000" in piece["missing"][cell_history.BEFORE]


def test_sums_of_one_vector_are_one_product() -> None:
    """As ``W h - Wᵀ h``, for which JAX gets one matrix."""
    jax = pytest.importorskip("jax")
    cell = catalogue.AntisymmetricRNN(3, 5, rng=0)
    made = cell_scan._Step(jax, cell, dict(cell.params), False)
    widths = sorted(weights.shape for _, weights in made.weights.values())
    assert widths == [(3, 5), (5, 5)]
    assert np.allclose(
        max((weights for _, weights in made.weights.values()), key=lambda each: each.size),
        (cell.weight_hh - cell.weight_hh.T).T,
    )
