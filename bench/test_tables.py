"""Every table: its contenders compute the same, and a quick run makes a file and a page."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sparsescan.torch
from sparsescan import BatchedCSR
from sparsescan.recurrent import catalogue
from sparsescan.strategies import build

from . import (
    attention,
    cell_contenders,
    cell_scan,
    cells,
    contests,
    doors,
    gru,
    lenet5,
    loops,
    networks,
    onnx,
    peers,
    pipeline,
    ppo,
    races,
    recurrent,
    report,
    rnn,
    scaling,
    simulate,
    statespace,
    step,
    vgg11,
)
from .cliff_steps import QUICK_STEPS, RANDOM, STEPS, inputs
from .experiment import NAMES, Results, load, run
from .map_races import INFERENCE, KINDS, TRAINING, Affine, InJax, Point, Recurrent, Stack

# With several stages, transposes, states that are not read, and spikes.
SOME_CELLS = ("MGU", "AntisymmetricRNN", "TGRU", "Leaky")
# And those of other peers. Each measurement of a cell compares it, too.
OTHER_CELLS = ("sLSTM", "LayerNormGRU", "ZoneoutLSTM", "ProjectedLSTM", "SCRN")
FAST = ("wide", "intrinsics", "grid")


@pytest.fixture(autouse=True)
def _few_variants_and_no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX takes seconds to compile a loop that is unrolled; and nobody looks at the times."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("bench.timing.PAUSE", 0)
    monkeypatch.setattr(step, "_UNROLLS", (1,))
    monkeypatch.setattr(cell_contenders, "UNROLLS", (1,))
    yield
    torch.set_num_threads(threads)


def slow_but(fast: Any, every: Any) -> list[Any]:
    return [pytest.param(one, marks=() if one in fast else pytest.mark.slow) for one in every]


# -- Runs -----------------------------------------------------------------------------------------


def _named(case: Any) -> str:
    """Return what a case is called, in any process."""
    return str(case.name)


@pytest.mark.parametrize("name", slow_but(FAST, NAMES))
def test_a_quick_run_makes_a_file_and_a_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping_ranks: None
) -> None:
    """Of some pieces, without JAX, which compiles for seconds."""
    if name == "scaling":
        if why := scaling.missing():
            pytest.skip(why)
        monkeypatch.setattr("bench.scaling.RANKS", (2,))
        (cache := tmp_path / "cache").mkdir()
        # Costs are those of a table: measuring takes minutes.
        monkeypatch.setattr(scaling, "_calibrated", lambda: nullcontext(cache))
    # Few entries, so that products of Jacobians take no seconds.
    monkeypatch.setattr("bench.vgg11.PRUNED", 0.999)
    if name == "lenet5":
        few = lenet5.Images(*(each[:64] for each in lenet5.load_digits()))
        monkeypatch.setattr(lenet5, "load_digits", lambda: few)

    def missing() -> Any:
        raise peers.MissingPeerError("left out")

    monkeypatch.setattr(peers, "load_jax", missing)
    monkeypatch.setattr("bench.cells.measure_start", lambda kind, rounds: {"seconds": {}})
    monkeypatch.setattr("bench.machine.commit", lambda: ("0123456789abcdef", False))
    experiment = load(name)
    quick, full = (list(experiment.pieces(is_quick)) for is_quick in (True, False))
    keys = [piece.key for piece in full]
    assert len(keys) == len(set(keys)) >= len(quick)
    some = [quick[k] for k in sorted({0, len(quick) // 2, len(quick) - 1})]
    path = run(replace(experiment, pieces=lambda _: some), True, tmp_path)
    results: Results = json.loads(path.read_text())
    assert list(results["pieces"]) == [piece.key for piece in some]
    shown = [row for table in experiment.tables(results) for row in table.rows]
    shown += experiment.rows(results)
    lacks = [piece for piece in results["pieces"].values() if piece.get("missing")]
    assert shown or experiment.drawings(results) or lacks
    text = report.write(tmp_path, tmp_path / "page.html").read_text()
    assert "cannot be shown" not in text
    assert path.name in text
    none = results | {"pieces": {}}
    assert experiment.rows(none) == experiment.drawings(none) == []
    assert not [row for table in experiment.tables(none) for row in table.rows[1:]]


# -- Contenders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but(SOME_CELLS, SOME_CELLS + OTHER_CELLS))
def test_cells_of_peers_compute_what_ours_do(kind: str) -> None:
    pytest.importorskip("jax")
    tasks = {task.peer: task.case for task in cells.TASKS if task.case.kind == kind}
    for peer, case in tasks.items():
        hidden = 8 if "heads" in case.options else 5
        given = replace(case, hidden=hidden, inputs=3, batch=2, steps=7).given()
        ours = next(iter(cell_contenders.ours(given).values()))
        if peer == races.JAX:
            forms = (False, True) if kind in SOME_CELLS else (True,)
            theirs = [cell_contenders.jitted(given, 2, is_packed) for is_packed in forms]
        elif peer == cells.XLSTM:
            continue
        else:
            theirs = [*cells._MAKERS[peer](given).values()]
        for one in theirs:
            apart = cells.differences(given, ours, one)
            assert {"output", "input", *given.cell.params} <= apart.keys()


POINTS = [
    *(Recurrent(kind, mode, 5, 3, 7) for kind in KINDS for mode in (TRAINING, INFERENCE)),
    Recurrent("LSTM", TRAINING, 5, 3, 7, both=True),
    *(Stack((20, 30, 10), 0.1, mode, 4) for mode in (TRAINING, INFERENCE)),
    *(Affine(is_diagonal, 3, TRAINING, 2, 5) for is_diagonal in (True, False)),
    *(InJax(kind, TRAINING, 5, 3, 7) for kind in ("RNN", "GRU", "LSTM")),
    *(onnx.Sequence(kind, 3, 5, 2, 1, onnx.RUNTIME, 4) for kind in onnx._KINDS),
]


@pytest.mark.parametrize(
    "point", slow_but([POINTS[2], *POINTS[10:11], *POINTS[12:15]], POINTS), ids=_named
)
def test_points_of_the_map_are_races_of_equals(point: Point) -> None:
    results = []
    try:
        race = point.race()
    except peers.MissingPeerError as missing:
        pytest.skip(str(missing))
    for contender in (race.ours, race.theirs):
        *_, way = contender.ways.values()
        with way.within():
            for _ in range(2):  # gradients are None before a call
                way.clear()
                output = way.call()
            results.append(contender.read(output))
    assert results[0].keys() == results[1].keys()
    assert max(races.apart(*results).values()) < 1e-4
    assert getattr(race.explained(), "kernel", "sparsescan") in ("sparsescan", "pytorch")


CASES = [
    *step.Case("GRU", 2, 5, 3, 7).both(),
    step.Case("LSTM", 2, 5, 3, 7, kept=0.1),
    networks.NetworkCase("LeNet-5", 3, None, 1),
    networks.NetworkCase("MLP", 2, 0.02, 1),
    networks.NetworkCase("ResNet-20", 2, 0.05, 1),
]


@pytest.mark.parametrize("case", slow_but(CASES[:1], CASES), ids=_named)
def test_training_steps_are_compared(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = step.measure(case, True)
    assert set(piece["wanted"]) <= piece["samples"].keys() | piece["missing"].keys()
    peers_there = {name.split(", ", 1)[1] for name in piece["differences"]}
    assert peers_there == piece["samples"].keys() - {races.OURS}
    race = type(case).race(case)
    (ours,) = race.ours().values()
    result = {name: 1.5 * np.asarray(each) for name, each in ours().items()}
    monkeypatch.setattr(type(race), "ours", lambda race: {"wrong": lambda: result})
    with pytest.raises(AssertionError, match="the relative difference is"):
        step.measure(case, True)


@pytest.mark.filterwarnings("default")  # peers warn of each other
@pytest.mark.parametrize("race", slow_but(simulate.RACES[:1], simulate.RACES), ids=_named)
def test_simulations_are_compared(race: simulate.Race) -> None:
    piece = race.measure(True)
    assert set(race.wanted) <= piece["samples"].keys() | piece["missing"].keys()
    compared = {what.split(", ", 1)[1] for what in piece["differences"]}
    assert compared == piece["samples"].keys() - {races.OURS}
    assert max(piece["differences"].values(), default=0) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("model", [rnn._MODEL, recurrent.Model("GRU", 38, 11, 1e-3)])
def test_the_scan_gives_autograds_gradients(model: Any) -> None:
    data = rnn.bitstreams(9, 4) if model.kind == "RNN" else gru.clips("S", 2)
    piece = recurrent.measure(model, *data, True)
    assert {"weight_hh_l0", "bias_ih_l0"} <= piece["differences"].keys()
    ours, theirs = (model.classifier(data[0].shape[:2]), model.classifier())
    for one in (ours, theirs):
        nn.functional.cross_entropy(one(data[0]), data[1]).backward()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_one_call_with_resets_computes_what_the_loop_of_ppo_does(kind: str) -> None:
    torch.manual_seed(0)
    theirs = nn.LSTM(3, 5) if kind == "LSTM" else ppo._AsLSTM(3, 5)
    ours = copy.deepcopy(theirs)
    sparsescan.torch.convert(ours.gru if kind == "GRU" else ours)
    features, states = torch.randn(4 * 9, 3), tuple(torch.randn(2, 1, 4, 5))
    starts = torch.zeros(4, 9)
    starts[1:3, 0] = starts[0, 4] = starts[1, 7] = starts[3, 8] = 1
    found, _ = ppo.with_resets(features, states, starts.flatten(), ours)
    outputs, now = [], states
    for x, start in zip(features.reshape(4, 9, 3).swapaxes(0, 1), starts.T, strict=True):
        kept = (1 - start).view(1, 4, 1)
        output, now = theirs(x[None], tuple(kept * state for state in now))
        outputs.append(output)
    torch.testing.assert_close(found, torch.cat(outputs).transpose(0, 1).flatten(0, 1))
    with pytest.raises(AssertionError, match="an episode starts inside a sequence"):
        ppo.at_starts(features, states, starts.flatten(), theirs)


DOORS = [
    doors.Selective(2, 3, 2, 5, {}),
    *(doors.Recurrence(9, 3, 2, is_diagonal, {}) for is_diagonal in (True, False)),
    *(attention.Model(each.kind, each.trains, 2, 2, 3, 9) for each in attention.MODELS[:3]),
    statespace.Model(3, 2, 9, 2),
    statespace.Hidden(3, 9),
    *(loops.Loop(kind, 5, 1, 7, 3, 2) for kind in ("MGU", "LayerNorm-GRU", "scalars")),
]


@pytest.mark.parametrize("case", slow_but(DOORS[:2], DOORS), ids=_named)
def test_scans_of_doors_are_compared(case: Any) -> None:
    """With loops of PyTorch, or those of JAX."""
    if not isinstance(case, doors.Selective):
        pytest.importorskip("jax")
    piece = case.measure(True)
    compared = {what.split(", ", 1)[1] for what in piece["differences"]}
    assert compared == piece["samples"].keys() - {races.OURS}
    assert max(piece["differences"].values()) < 1e-4


@pytest.mark.parametrize("changes", [False, True])
def test_filters_of_doors_have_all_gradients(changes: bool) -> None:
    one = doors.Filter(2, changes, {}, batch=3, steps=7)
    b, a, x, _ = one.tensors()
    for call in one.ours().values():
        assert [each.shape for each in call()] == [b.shape, a.shape, x.shape]
    for make in (one.torchlpc, one.philtorch, one.torchaudio):
        with suppress(peers.MissingPeerError):  # each compares its results with ours
            make()


@pytest.mark.parametrize(
    "given_step", slow_but([*QUICK_STEPS.values()], STEPS.values()), ids=_named
)
def test_special_inputs_have_the_shapes_of_random_ones(given_step: Any) -> None:
    def arrays(numbers: Any) -> list[Any]:
        every = [numbers.x, numbers.initial, numbers.grads, *numbers.params.values()]
        return [each for each in every if each is not None]

    given = inputs(given_step)
    random = arrays(given[RANDOM])
    assert all(np.isfinite(array).all() for array in random)
    for again, array in zip(arrays(given_step.numbers()), random, strict=True):
        np.testing.assert_array_equal(again, array)  # nothing has changed them
    tiny = np.finfo(given[RANDOM].dtype).tiny
    for name, numbers in given.items():
        for array, like in zip(arrays(numbers), random, strict=True):
            assert (array.shape, array.dtype) == (like.shape, like.dtype), name
    assert (np.abs(given["subnormal"].grads) < tiny).all()
    assert not given["zeros"].grads.any()
    spoilt = given["NaN in a weight"].params.items()
    assert all(np.isnan(array.sum()) == ("bias" not in name) for name, array in spoilt)
    if "loss at the last step" in given:
        last = given["loss at the last step"].grads
        assert last[-1].all()
        assert not last[:-1].any()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_wrong_gradient_of_the_engine_is_noticed(batch: int) -> None:
    work = contests.vgg11(batch)(True)
    for contender, make in work.contenders.items():
        for call in make().values():
            work.check(contender, call())
    right = work.contenders[races.OURS]()["plan"]()
    for k, gradient in enumerate(right):
        wrong = [*right]
        # One entry, by a thousandth of the largest.
        wrong[k] = gradient.copy()
        wrong[k].flat[-1] += 1e-3 * np.abs(gradient).max()
        with pytest.raises(AssertionError, match="sparsescan is wrong"):
            work.check(races.OURS, wrong)


def test_loops_of_scipy_are_back_propagation() -> None:
    rng = np.random.default_rng()
    grad = rng.standard_normal((3, 4), np.float32)
    values = rng.standard_normal((4, 3, 4), np.float32)
    diagonal = [BatchedCSR(each, np.arange(4), np.arange(5), (4, 4)) for each in values]
    expected = [grad, values[0] * grad, values[1] * values[0] * grad, values[2] * values[1]]
    expected[3] = values[2] * expected[2]
    for name, call in peers.scipy_batch_loops(grad, diagonal).items():
        call()
        for own, right in zip(call(), expected, strict=True):
            by_sample = np.stack(own) if isinstance(own, list) else own.T
            np.testing.assert_allclose(by_sample, right, rtol=1e-5, err_msg=name)


def test_networks_are_those_of_the_papers() -> None:
    for name, module in (
        ("lenet5", lenet5.lenet5(pipeline.TANH)),
        ("resnet-20", pipeline.resnet20(0)),
    ):
        assert sum(p.numel() for p in module.parameters()) == build(name).weights
    assert len(vgg11.network()) == vgg11.STEPS
    assert len(vgg11.operators(vgg11.network())) == vgg11.STEPS
    parts = pipeline.folds(lenet5.load_digits(), 3)
    assert sum(len(part.test) for part in parts) == len(parts[0].train) + len(parts[0].test)


def test_sums_of_one_vector_are_one_product_in_jax() -> None:
    """As ``W h - Wᵀ h``, for which JAX gets one matrix."""
    jax = pytest.importorskip("jax")
    cell = catalogue.AntisymmetricRNN(3, 5, rng=0)
    made = cell_scan._Step(jax, cell, dict(cell.params), False)
    assert sorted(weights.shape for _, weights in made.weights.values()) == [(3, 5), (5, 5)]


def test_first_steps_of_all_cells_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With no more than other cells compiled, and then again; of inputs that the cell takes."""
    called: list[int] = []

    def start(kinds: Any, folder: str, name: str = "New", inputs: int = 12) -> tuple[float, float]:
        called.append(inputs)
        return 0.5, float(len(called))

    monkeypatch.setattr(cells, "_start", start)
    monkeypatch.setattr(cells, "_library", lambda: str(tmp_path))
    found = cells.measure_start("IndRNN", 1, has_empty=False)
    assert found["seconds"] == {cells.LIBRARY: [1.0], cells.KEPT: [2.0], cells.IMPORT: [0.5, 0.5]}
    keys = {piece.key for piece in cells.EXPERIMENT.pieces(False)}
    assert keys.issuperset(f"first step of {kind}" for kind in catalogue.__all__)
    (table,) = [
        each
        for each in cells.EXPERIMENT.tables({"pieces": {"first step of IndRNN": found}})
        if each.rows
    ]
    assert [row[2:] for row in table.rows] == [["8", "1.00"], ["0.2", "2.00"], ["", "0.50"]]
