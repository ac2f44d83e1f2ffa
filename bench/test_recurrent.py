"""The experiments of Sections 4.1 and 4.2: gradients, data, pieces and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from . import audio, gru, recurrent, rnn
from .experiment import Experiment, Options, Results
from .recurrent import AUTOGRAD, OURS, REVERSED, Classifier, LastState, Model, Recurrence
from .runs import cut_off, draw, go_on

EPS = float(np.finfo(np.float64).eps)
EXPERIMENTS = {"rnn": rnn, "gru": gru}
QUICK, FULL = Options(True, "cpu"), Options(False, "cpu")


# -- Gradients ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["RNN", "GRU"]),
    steps=st.integers(1, 30),
    batch=st.integers(1, 4),
    inputs=st.integers(1, 5),
    hidden=st.integers(1, 6),
    bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_gradients_are_autograds(
    kind: str, steps: int, batch: int, inputs: int, hidden: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = getattr(torch.nn, kind)(inputs, hidden, bias=bias).double()
    x = torch.randn(steps, batch, inputs, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(batch, hidden, dtype=torch.float64)
    sources = [x, *layer.parameters()]
    last = LastState.apply(x, Recurrence(layer, steps, batch), *layer.parameters())
    expected = layer(x)[1][0]
    torch.testing.assert_close(last, expected, rtol=0, atol=0)
    pairs = zip(
        torch.autograd.grad(last, sources, grad, retain_graph=True),
        torch.autograd.grad(last, sources, grad),
        torch.autograd.grad(expected, sources, grad),
        strict=True,
    )
    for ours, again, theirs in pairs:
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, again, rtol=0, atol=0)
        # Sums over steps and samples; none of the terms is larger than about one.
        bound = 100 * EPS * steps * batch * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_it_learns_through_a_classifier(kind: Any) -> None:
    """Adam moves the parameters that the scan reads, and an input without gradient gets none."""
    model = Model(kind, 3, 4, 0.05, "cpu")
    ours, theirs = model.trainer((6, 5)), model.trainer()
    ours.threads = theirs.threads = 1  # threads for so little would wait for each other
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((6, 5, 3), np.float32))
    labels = torch.from_numpy(rng.integers(4, size=5))
    losses = [[each.learn(x, labels) for _ in range(30)] for each in (ours, theirs)]
    np.testing.assert_allclose(*losses, atol=1e-5)
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert x.grad is None


def test_parameters_that_change_between_the_passes_are_an_error() -> None:
    classifier = Classifier(torch.nn.RNN(2, 3), 2).by_scan((4, 5))
    loss = classifier(torch.randn(4, 5, 2)).sum()
    with torch.no_grad():
        classifier.layer.weight_hh_l0 *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- Data -----------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_bits_have_the_probabilities_of_equation_8(seed: int) -> None:
    bits, labels = rnn.bitstreams(500, 400, seed)
    assert bits.shape == (500, 400)
    assert bits.dtype == bool
    assert set(labels) == set(range(10))
    for label in range(10):
        p, chosen = 0.05 + 0.1 * label, bits[labels == label]
        # Six standard deviations of a mean, early and late in the streams.
        for bit in np.array_split(chosen, 4, axis=1):
            assert abs(bit.mean() - p) < 6 * np.sqrt(p * (1 - p) / bit.size)


def test_batches_are_the_data_set_time_first() -> None:
    bits, labels = rnn.bitstreams(rnn.SAMPLES, rnn.STEPS)
    batches = rnn._batches(rnn.SAMPLES // rnn.BATCH + 1)
    assert len(batches) == 2001
    seen = [make()[1] for make in batches[:-1]]
    np.testing.assert_array_equal(np.bincount(np.concatenate(seen)), np.bincount(labels))
    x, of = batches[0]()
    assert x.shape == (1000, 16, 1)
    assert x.is_contiguous()
    rows = {row.tobytes(): label for row, label in zip(bits, labels, strict=True)}
    for sample, label in zip(x[:, :, 0].T, of, strict=True):
        assert rows[sample.numpy().astype(bool).tobytes()] == label


# -- What is measured -----------------------------------------------------------------------------


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE", "_TURN", "_QUICK_PAUSE", "_QUICK_TURN"):
        monkeypatch.setattr(recurrent, name, 0)
    monkeypatch.setattr(recurrent.machine, "bandwidth", lambda size: 1e10)
    monkeypatch.setattr(recurrent.machine, "flop_rate", lambda dtype: 1e11)


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_a_size_is_measured(kind: Any) -> None:
    model = Model(kind, 3, 4, 1e-3, "cpu")
    batch = torch.randn(7, 2, 3), torch.tensor([3, 1])
    piece = recurrent.measure(model, batch, quick=True, jax=False)
    assert (piece["steps"], piece["batch"]) == (7, 2)
    assert set(piece["missing"]) == {recurrent.JAX_SCAN, recurrent.JAX_ASSOCIATIVE}
    assert piece["samples"].keys() == piece["variants"].keys()
    for samples in piece["samples"].values():
        assert len(samples) == recurrent._FEW_ROUNDS
        assert min(samples) > 0
    assert max(piece["largest_difference"].values()) < 1e-5
    # Jacobians of 20 × 20 and gradients of 20 are moved, of 4 bytes.
    assert piece["floors"][recurrent.SCAN] == pytest.approx(4 * 14 * (400 + 20) / 1e10)


@pytest.mark.usefixtures("few_samples")
def test_gradients_that_differ_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Recurrence.scan
    monkeypatch.setattr(Recurrence, "scan", lambda self, *given: 1.01 * right(self, *given))
    batch = torch.randn(7, 2, 3), torch.tensor([3, 1])
    with pytest.raises(AssertionError, match="the relative difference is 1"):
        recurrent.measure(Model("RNN", 3, 4, 1e-3, "cpu"), batch, quick=True, jax=False)


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_trainings_see_the_same_batches(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_BLOCK", 4)
    rng = np.random.default_rng(0)
    batches = []

    def batch() -> recurrent.Batch:
        x = torch.from_numpy(rng.standard_normal((9, 3, 2), np.float32))
        batches.append(x)
        return x, torch.from_numpy(rng.integers(4, size=3))

    training = recurrent.train(Model(kind, 2, 4, 1e-2, "cpu"), [batch] * 10, (9, 3))
    assert len(batches) == 10
    assert training["losses"].keys() == {AUTOGRAD, OURS, REVERSED}
    for name, losses in training["losses"].items():
        assert len(losses) == len(training["seconds"][name]) == 10
        np.testing.assert_allclose(losses, training["losses"][AUTOGRAD], rtol=1e-5)
    assert max(training["largest_difference"].values()) < 1e-5


def test_a_training_that_drifts_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Recurrence.scan
    monkeypatch.setattr(Recurrence, "scan", lambda self, *given: 1.5 * right(self, *given))
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((9, 3, 2), np.float32))
    labels = torch.from_numpy(rng.integers(4, size=3))
    # Adam would not see how large a gradient is.
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)
    with pytest.raises(AssertionError, match="losses differ by"):
        recurrent.train(Model("RNN", 2, 4, 1e-2, "cpu"), [lambda: (x, labels)] * 10, (9, 3))


# -- Pieces, tables and pictures ------------------------------------------------------------------


def made_up(steps: int, batch: int) -> Results:
    """Made-up results of :func:`recurrent.measure`; autograd takes 20 times as long."""
    rng = np.random.default_rng(steps + batch)
    ours = (OURS, recurrent.GIVEN, recurrent.VALUES, recurrent.SCAN, recurrent.STEP_OURS)
    theirs = (AUTOGRAD, recurrent.CHAIN, recurrent.STEP)
    names = (*ours, *theirs, recurrent.FORWARD, recurrent.RECORDED, recurrent.JAX_SCAN)
    scales = {name: 20.0 if name in theirs else 1.0 for name in names}
    noise = rng.uniform(0.9, 1.2, 20)
    return {
        "steps": steps,
        "batch": batch,
        "samples": {name: list(1e-6 * steps * k * noise) for name, k in scales.items()},
        "variants": {},
        "missing": {recurrent.JAX_ASSOCIATIVE: "made up"},
        "floors": {OURS: 1e-7 * steps, recurrent.SCAN: 1e-8 * steps},
        "largest_difference": {},
        "cores_others_used": [0.0],
    }


def made_up_training(steps: int, batch: int) -> Results:
    losses = list(np.linspace(2.3, 1.1, 50))
    names = (AUTOGRAD, OURS, REVERSED)
    return {
        "steps": steps,
        "batch": batch,
        "losses": dict.fromkeys(names, losses),
        "seconds": {AUTOGRAD: [0.06] * 50, OURS: [0.02] * 50, REVERSED: [0.06] * 50},
        "largest_difference": {OURS: 2e-7, REVERSED: 1e-7},
    }


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is measured for real; the sizes of what would have been."""
    calls: list[Any] = []

    def measure(model: Model, batch: recurrent.Batch, **options: Any) -> Results:
        x, labels = batch
        assert x.shape == (x.shape[0], len(labels), model.inputs)
        calls.append((x.shape[0], len(labels)))
        return made_up(*calls[-1])

    def train(
        model: Model, batches: list[Callable[[], recurrent.Batch]], sizes: tuple[int, int]
    ) -> Results:
        calls.append(("training", *sizes))
        assert batches[-1]()[0].shape == (*sizes, model.inputs)
        return made_up_training(*sizes)

    def features(folder: Path | None, quick: bool, name: str) -> NDArray[Any]:
        return np.zeros((110, *audio.SETS[name].shape), np.float32)

    for module in EXPERIMENTS.values():
        monkeypatch.setattr(module, "measure", measure)
        monkeypatch.setattr(module, "train", train)
    names = tuple("abcdefghijk")
    recordings = audio.Recordings("made up", names, np.arange(110) % 11, lambda k: np.zeros(0))
    monkeypatch.setattr(gru, "_recordings", lambda *given: recordings)
    monkeypatch.setattr(gru, "_features", features)
    return calls


def whole(name: str, options: Options) -> Results:
    """Return a file of which all pieces have been measured."""
    one: Experiment = EXPERIMENTS[name].EXPERIMENT
    pieces = {piece.key: piece.measure() for piece in one.pieces(options)}
    return {"about": one.about(options), "pieces": pieces, "done": True}


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("options", [QUICK, FULL], ids=["quick", "full"])
def test_a_run_that_is_cut_off_goes_on(
    name: str, options: Options, fakes: list[Any], tmp_path: Path
) -> None:
    one = EXPERIMENTS[name].EXPERIMENT
    wanted = len(list(one.pieces(options)))
    file = cut_off(one, options, tmp_path, EXPERIMENTS[name], "train")
    assert 0 < len(fakes) < wanted
    go_on(one, options, tmp_path, file)
    assert len(fakes) == len(set(fakes)) == wanted
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_the_sweeps_are_the_papers(fakes: list[Any]) -> None:
    for piece in rnn.EXPERIMENT.pieces(FULL):
        piece.measure()
    lengths = [10, 30, 100, 300, 1000, 3000, 10_000, 30_000]
    sizes = {(steps, 16) for steps in lengths} | {(1000, 2**k) for k in range(1, 9)}
    assert set(fakes) == sizes | {("training", 1000, 16)}
    fakes.clear()
    for piece in gru.EXPERIMENT.pieces(FULL):
        piece.measure()
    frames = [259, 517, 1034]
    assert set(fakes) == {(f, b) for f in frames for b in (16, 32, 64)} | {
        ("training", f, 16) for f in frames
    }


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_are_ratios_of_medians(name: str) -> None:
    rows = EXPERIMENTS[name].EXPERIMENT.rows(whole(name, FULL))
    assert {row.paper for row in rows} >= {"rnn": {16, 108, 2.73, 2.75}, "gru": {13.4, 2.36}}[name]
    assert {row.peer for row in rows} >= {AUTOGRAD, recurrent.JAX_SCAN}
    assert recurrent.JAX_ASSOCIATIVE not in {row.peer for row in rows}
    for row in rows:
        expected = 20 if row.peer.startswith(AUTOGRAD) else 1
        assert row.theirs / row.ours == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("options", [QUICK, FULL], ids=["quick", "full"])
def test_whatever_there_is_can_be_drawn(name: str, options: Options, tmp_path: Path) -> None:
    one, results = EXPERIMENTS[name].EXPERIMENT, whole(name, options)
    keys = list(results["pieces"])
    trainings = [key for key in keys if key.startswith("training")]
    sizes = [key for key in keys if key not in trainings]
    drawn, some = {}, [trainings, trainings[-1:], sizes[:1], sizes[-1:], sizes[1:]]
    for which in ([], *([] if options.quick else some), keys):
        partial = results | {"pieces": {key: results["pieces"][key] for key in which}}
        drawings = draw(one, partial, tmp_path)
        assert all(len(drawing.caption) > 100 for drawing in drawings)
        drawn[len(which)] = len(drawings)
        one.rows(partial)
    assert drawn[0] == 0
    assert drawn[len(keys)] == {"rnn": 4, "gru": 3}[name]
