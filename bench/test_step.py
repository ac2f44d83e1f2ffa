"""The contest of whole training steps: contenders agree, and what was measured can be shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import step
from .experiment import Options, Results

CASES = {
    kind: step.Case(kind, 2, 5, 3, 7, 1, 1, kept)
    for kind, kept in (("RNN", None), ("GRU", None), ("LSTM", 0.1))
}


NETWORKS = [step.NetworkCase("LeNet-5", 3, None, 1), step.NetworkCase("MLP", 2, 0.02, 1)]


@pytest.mark.slow
def test_all_gradients_of_networks_are_compared() -> None:
    for case in NETWORKS:
        piece = step.measure(case, quick=True)
        names = {name.split(",")[0] for name in piece["differences"]}
        assert {"0.weight", "0.bias"} < names
        assert len(names) == len([*case.race().module.parameters()])
        assert set(piece["samples"]) == {step.OURS, step.PYTORCH}
        assert piece["wanted"] == {step.PYTORCH: 1}


def test_residual_networks_have_our_layers() -> None:
    race = step.NetworkCase("ResNet-20", 2, 0.05, 1).race()
    (ours,) = race.ours().values()
    theirs = next(iter(race.pytorch().values()))()
    assert ours().keys() == theirs.keys()
    assert sum(mask.size for mask in race.kept().values()) > 270_000


@pytest.fixture(scope="module", autouse=True)
def _few_variants() -> Iterator[None]:
    """JAX takes seconds to compile a loop that is unrolled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_UNROLLS", (1,))
        yield


@pytest.fixture(scope="module")
def pieces() -> Results:
    return {case.name: step.measure(case, quick=True) for case in CASES.values()}


def test_all_gradients_are_compared(pieces: Results) -> None:
    for piece in pieces.values():
        names = {name.split(",")[0] for name in piece["differences"]}
        assert {"input", "state", "weight_hh_l0", "bias_ih_l0"} <= names
        assert set(piece["samples"]) | set(piece["missing"]) == {step.OURS, step.PYTORCH, step.JAX}


def test_a_wrong_gradient_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = step._Race.ours

    def wrong(race: step._Race) -> dict[str, step.Call]:
        (call,) = ours(race).values()
        return {"wrong": lambda: {name: 1.01 * grad for name, grad in call().items()}}

    monkeypatch.setattr(step._Race, "ours", wrong)
    with pytest.raises(AssertionError, match=r"the relative difference is 1\.0e-02"):
        step.measure(CASES["GRU"], quick=True)


def test_what_was_measured_can_be_shown(pieces: Results) -> None:
    results = {"pieces": pieces}
    rows = step.EXPERIMENT.rows(results)
    assert [row.peer for row in rows].count(step.PYTORCH) == len(CASES)
    (drawing,) = step.EXPERIMENT.drawings(results)
    (axes,) = drawing.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(pieces)


def test_a_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="step is of the CPU"):
        list(step.EXPERIMENT.pieces(Options(True, "cuda")))


@pytest.mark.slow
def test_memory_and_the_first_step_are_those_of_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "_PROCESSES", 2)
    case = step.Case("RNN", 2, 20, 16, 2000, 1, 1)
    taken = step.measure_memory(case)["bytes"]
    states = 4 * case.steps * case.batch * case.hidden
    assert min(taken.values()) > states
    seconds = step.measure_first_call(CASES["GRU"])["seconds"]
    assert len(seconds) == 2
    assert all(0 < each < 60 for each in seconds)
