"""The contest of whole training steps: contenders agree, and what was measured can be shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import peers, recurrent, step
from .experiment import Options, Results

CASES = {
    kind: step.Case(kind, 2, 5, 3, 7, 1, 1, kept)
    for kind, kept in (("RNN", None), ("GRU", None), ("LSTM", 0.1))
}
LAST = [case.both(2.0)[1] for case in CASES.values()]
MODES = {step.PYTORCH, step.FLUSHING}


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
def _few_variants_and_no_pauses() -> Iterator[None]:
    """JAX takes seconds to compile a loop that is unrolled; and nobody looks at the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "PAUSE", 0)
        patch.setattr(step, "_UNROLLS", (1,))
        yield


@pytest.fixture(scope="module")
def pieces() -> Results:
    pieces = {case.name: step.measure(case, quick=True) for case in (*CASES.values(), *LAST)}
    backward = {case.name: step.measure_backward(case, 0.5, quick=True) for case in CASES.values()}
    return pieces | {f"{step._BACKWARD}{name}": piece for name, piece in backward.items()}


def test_all_gradients_are_compared(pieces: Results) -> None:
    for case in (*CASES.values(), *LAST):
        piece = pieces[case.name]
        peers_there = {step.PYTORCH, step.JAX} | (MODES if case.last_only else set())
        there = peers_there - set(piece["missing"])
        assert set(piece["samples"]) == there | {step.OURS}
        for peer in there:
            names = {name.split(",")[0] for name in piece["differences"] if name.endswith(peer)}
            assert {"input", "state", "weight_hh_l0", "bias_ih_l0"} <= names
        assert set(piece["wanted"]) == peers_there
        assert piece["wanted"][step.PYTORCH] == (2 if case.last_only else 1)


def test_a_loss_at_the_last_step_has_gradients_of_its_own() -> None:
    for every, last in zip(CASES.values(), LAST, strict=True):
        assert last.name == f"{every.name}, loss at the last step"
        (ours,), (of_every,) = last.race().ours().values(), every.race().ours().values()
        grads, others = ours(), of_every()
        assert all(abs(grads[name] - others[name]).max() > 1e-3 for name in grads)


def test_gradients_that_died_out_are_no_difference() -> None:
    # A thousand steps before the loss there is nothing left but subnormal numbers.
    race = step.Case("RNN", 1, 20, 2, 1000, 1, 1, last_only=True).race()
    (ours,), (theirs, _) = race.ours().values(), race.pytorch().values()
    calls = {step.OURS: ours, step.PYTORCH: theirs}
    assert abs(theirs()["state"]).max() < 1e-37
    assert max(step._differences(race, calls).values()) < 1e-4


def test_pytorch_flushes_in_a_thread_of_its_own() -> None:
    small, threads = torch.full((1 << 20,), 1e-40), torch.get_num_threads()

    def zeros() -> list[bool]:
        # Each thread multiplies a half.
        torch.set_num_threads(2)
        products = (small * 1).numpy().view("int32").reshape(2, -1)
        return [bool((half == 0).all()) for half in products]

    assert zeros() == [False, False]
    assert peers.flushing(zeros)() == [True, True]
    assert zeros() == [False, False]
    torch.set_num_threads(threads)


def test_what_runs_before_a_call_is_not_timed() -> None:
    calls, done = {name: lambda name=name: done.append(name) for name in "ab"}, []
    samples, _ = recurrent.take_turns(calls, 2, 0, 1e-9, before=lambda: done.append("before"))
    assert done[::2] == ["before"] * (len(done) // 2)
    assert done[1::2] == ["a", "a", "b", "b"] * 2
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 2, "b": 2}


def test_backward_passes_follow_a_forward_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    case, done = CASES["GRU"], []
    training_step = step.GRU.training_step

    class Recorded:
        def __init__(self, net: step.GRU) -> None:
            self.step = training_step(net)

        def forward(self, *given: step.Array) -> None:
            done.append("forward")
            self.step.forward(*given)

        def backward(self, grad: step.Array) -> None:
            done.append("last" if not grad[:-1].any() else "every")
            assert grad[-1].any()
            self.step.backward(grad)

    monkeypatch.setattr(step.GRU, "training_step", lambda net: Recorded(net))
    piece = step.measure_backward(case, 0.5, quick=True)
    assert set(done[::2]) == {"forward"}
    assert set(done[1::2]) == {"last", "every"}
    assert piece["wanted"] == {step.EVERY: 2}
    assert set(piece["samples"]) == {step.OURS, step.EVERY}


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
    assert [row.peer in MODES for row in rows].count(True) == len(CASES) + len(LAST)
    assert [row.peer for row in rows].count(step.EVERY) == len(CASES)
    (drawing,) = step.EXPERIMENT.drawings(results)
    (axes,) = drawing.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(pieces)


@pytest.mark.parametrize(("kept", "flushed"), [(4e-3, 3e-3), (2e-3, 3e-3)])
def test_pytorch_is_shown_in_its_faster_mode_and_both_are_in_a_table(
    kept: float, flushed: float
) -> None:
    def piece(**times: float) -> Results:
        return {"samples": {names[who]: [taken] * 3 for who, taken in times.items()}}

    names = {"ours": step.OURS, "kept": step.PYTORCH, "flushed": step.FLUSHING}
    both = piece(ours=1e-3, kept=kept, flushed=flushed)
    results = {"pieces": {"both": both, "memory": {}, "one": piece(ours=1e-3, kept=5e-3)}}
    faster = step.PYTORCH if kept < flushed else step.FLUSHING
    rows = step.rows("Step", results, (step.PYTORCH, step.FLUSHING, step.JAX))
    assert [(row.work, row.peer, row.theirs) for row in rows] == [
        ("Step: both", faster, min(kept, flushed)),
        ("Step: one", step.PYTORCH, 5e-3),
    ]
    (table,) = step.in_both_modes(results)
    assert [(row[0], *map(float, row[1:])) for row in table.rows] == [
        ("both", 1e3 * kept, 1e3 * flushed)
    ]
    del results["pieces"]["both"]
    assert step.in_both_modes(results) == []


def test_every_recurrent_case_is_run_with_both_losses() -> None:
    assert [case.last_only for case in step.CASES] == [False, True] * (len(step.CASES) // 2)
    for every, last in zip(step.CASES[::2], step.CASES[1::2], strict=True):
        assert step.replace(every, last_only=True, pytorch=last.pytorch) == last
    for quick in (False, True):
        names = [piece.key for piece in step.EXPERIMENT.pieces(Options(quick, "cpu"))]
        assert len(names) == len(set(names))
        assert any(name.startswith("backward: LSTM") for name in names)
        assert "LSTM, H=20, B=16, T=1,000, loss at the last step" in names


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
