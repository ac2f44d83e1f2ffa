"""The experiment with the pruned VGG-11, on narrow networks and few images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsescan import BatchedCSR, Schedule
from sparsescan.jacobians import Conv2d, Sequential, from_torch
from sparsescan.plan.prediction import predict
from sparsescan.symbolic import pattern as patterns_module
from sparsescan.symbolic.pattern import of_mask
from sparsescan.symbolic.program import Program

from . import vgg11, vgg11_flop, vgg11_timing
from .contests import Work
from .experiment import Options, Results
from .fake_cusparse import FakeCusparse
from .gpu_device import device_of
from .lenet5 import Images
from .machine import Cpu
from .peers import MissingPeerError, load_mkl
from .runs import cut_off, draw, go_on, interrupt
from .test_gpu import Host
from .vgg11_flop import Analysis, Step, baseline, layer_names
from .vgg11_timing import (
    CUSPARSE,
    MKL,
    OURS,
    PARAMETERS,
    REUSE,
    SCIPY,
    TORCH,
    TORCH_PARAMETERS,
    UP_SWEEP,
    VALUES,
    Chain,
    Nodes,
)

QUICK = Options(quick=True, device="cpu")
TINY = vgg11.Settings(narrow=16, epochs=1, retrained=1, rate=2e-3, batch=32)
CACHES = vgg11.trained, vgg11.images_of, vgg11._chain, vgg11._nodes, device_of


def images(count: int, seed: int = 0) -> Images:
    rng = np.random.default_rng(seed)
    x = rng.random((count, 3, 32, 32), np.float32)
    labels = rng.integers(0, 10, count)
    return Images("noise", x, labels, x[:40], labels[:40])


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few images, a narrow network, one round, and a temporary folder of its own."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(vgg11, "load_images", lambda folder: images(64))
    monkeypatch.setattr(vgg11, "_QUICK", TINY)
    monkeypatch.setattr(vgg11, "_QUICK_ROUNDS", 1)
    monkeypatch.setattr(vgg11_timing, "PAUSE", 0)
    monkeypatch.setattr(vgg11_timing, "_SECONDS_A_TURN", 0)
    monkeypatch.setattr(vgg11.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    yield
    for cached in CACHES:
        cached.cache_clear()
    torch.set_num_threads(threads)


def pruned(seed: int, narrow: int = 16) -> nn.Sequential:
    net = vgg11.network(narrow, seed)
    vgg11.prune_convolutions(net)
    return net


def chain(seed: int, batch: int, device: Any = None) -> Chain:
    x = images(batch, seed)
    labels = torch.from_numpy(x.train_labels)
    return Chain(pruned(seed), vgg11.rgb(x.train), labels, device or Cpu())


# -- The network ----------------------------------------------------------------------------------


def test_the_network_is_vgg11() -> None:
    net = Sequential(from_torch(vgg11.network(1)[0], (3, 32, 32)))
    widths = [op.out_channels for op in net.layers if isinstance(op, Conv2d)]
    assert widths == [64, 128, 256, 256, 512, 512, 512, 512]
    assert net.output_shape == (512, 1, 1)
    assert len(net) == vgg11.STEPS
    assert layer_names(net)[:3] == ["pool5", "relu8", "conv8"]
    assert layer_names(net)[-1] == "conv1"


def test_pruning_keeps_the_largest_weights_and_training_keeps_the_others_zero() -> None:
    net = vgg11.network(8, seed=int(np.random.default_rng().integers(1 << 31)))
    before = [layer.weight.detach().clone() for layer in net[0] if isinstance(layer, nn.Conv2d)]
    vgg11.prune_convolutions(net)
    vgg11.fit(net, images(64), 1, 1e-3, 32)
    convs = [layer for layer in net[0] if isinstance(layer, nn.Conv2d)]
    for conv, weight in zip(convs, before, strict=True):
        kept = conv.weight_mask.bool()
        assert abs(kept.sum().item() - 0.03 * weight.numel()) <= 1
        assert weight[kept].abs().min() >= weight[~kept].abs().max()
        assert not conv.weight[~kept].any()
        assert (conv.weight[kept] != weight[kept]).any()  # they went on learning


@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_of_the_pruned_network_are_those_of_autograd(batch: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    net = pruned(seed).double()
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((batch, 3, 32, 32)))
    ops = Sequential(from_torch(net[0], (3, 32, 32)))
    xs = [x]
    for layer in net[0]:
        xs.append(layer(xs[-1]))
    loss = nn.functional.cross_entropy(net[1:](xs[-1]), torch.arange(batch))
    wanted = torch.autograd.grad(loss, [*xs[:0:-1], *net[0].parameters()])
    activations = ops.activations(x.numpy())
    grads = ops.plan().exclusive_scan(wanted[0].reshape(batch, -1).numpy(), ops.values(activations))
    bound = 1e3 * np.finfo(np.float64).eps
    for ours, theirs in zip(grads, wanted, strict=False):
        right = theirs.numpy().reshape(batch, -1)
        assert np.abs(ours - right).max() <= bound * np.abs(right).max()
    params = [grad for layer in ops.param_grads(activations, grads) for grad in layer.values()]
    # PyTorch names the bias first, as pruning has renamed the weight.
    theirs = [g.numpy() for pair in zip(wanted[22::2], wanted[21::2], strict=True) for g in pair]
    for ours, right in zip(params, theirs, strict=True):
        assert np.abs(ours - right).max() <= bound * np.abs(right).max()


def test_a_trained_network_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    net, curves = vgg11.trained(QUICK)
    assert {name: len(part["test accuracy"]) for name, part in curves.items()} == {
        "trained": TINY.epochs,
        "retrained": TINY.retrained,
    }
    vgg11.trained.cache_clear()
    again, curves_again = vgg11.trained(QUICK)
    assert again is not net
    assert curves_again == curves
    for kept, tensor in zip(again.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(kept, tensor)
    x = vgg11.rgb(images(5).train)
    assert torch.equal(again(x), net(x))
    # Other settings are another network.
    vgg11.trained.cache_clear()
    monkeypatch.setattr(vgg11, "_QUICK", vgg11.Settings(16, 1, 2, 2e-3, 32))
    assert len(vgg11.trained(QUICK)[1]["retrained"]["test accuracy"]) == 2


# -- Static analysis ------------------------------------------------------------------------------


def counted(masks: Sequence[np.ndarray], schedule: Schedule) -> dict[tuple[int, ...], int]:
    """FLOP of every operation, from products of matrices of ones that are made."""
    products = {(k, k + 1): sp.csr_array(mask.astype(np.int64)) for k, mask in enumerate(masks, 1)}
    flop = {}
    for start, mid, stop in np.concatenate([level.ops for level in schedule.levels]).tolist():
        right = products[mid, stop]
        if start == 0:
            flop[start, mid, stop] = 2 * right.nnz
            continue
        meetings = right @ products[start, mid]  # how many pairs meet at each entry
        flop[start, mid, stop] = 2 * int(meetings.sum())
        products[start, stop] = sp.csr_array((meetings > 0).astype(np.int64))
    return flop


@st.composite
def sparse_chains(draw: st.DrawFn) -> tuple[list[np.ndarray], Schedule]:
    """Masks from the last layer to the first, some diagonal or full, and a schedule."""
    n = draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cols, masks = draw(st.integers(1, 8)), []
    for _ in range(n):
        kind = draw(st.sampled_from(["sparse", "sparse", "diagonal", "full"]))
        rows = cols if kind == "diagonal" else draw(st.integers(1, 8))
        share = {"sparse": 0.3, "full": 2.0}.get(kind, 0.0)
        mask = np.eye(rows, dtype=bool) if kind == "diagonal" else rng.random((rows, cols)) < share
        masks.append(mask)
        cols = rows
    return masks, Schedule.truncated(n, draw(st.integers(0, 4)))


@given(sparse_chains())
@settings(deadline=None)
def test_flop_are_those_of_products_that_are_made(
    case: tuple[list[np.ndarray], Schedule],
) -> None:
    masks, schedule = case
    analysis = Analysis([of_mask(mask) for mask in masks], [f"layer{k}" for k in range(len(masks))])
    steps = analysis.steps(schedule)
    assert {(s.start, s.mid, s.stop): s.flop for s in steps} == counted(masks, schedule)
    assert not any(step.estimated for step in steps)
    for step in steps:
        rows, inner = masks[step.mid - 1].shape[1], masks[step.stop - 2].shape[0]
        cols = 1 if step.vector else masks[step.start - 1].shape[1]
        assert step.dense_flop == 2 * rows * inner * cols
    # The critical path is what unlimited workers wait for.
    program = Program([of_mask(mask) for mask in masks], schedule)
    critical = sum(step.flop for step in steps if step.critical)
    assert critical == 2 * predict(program, 1000).critical_multiply_adds


@given(sparse_chains())
@settings(deadline=None)
def test_what_counts_as_full_is_marked_and_takes_no_less(
    case: tuple[list[np.ndarray], Schedule],
) -> None:
    masks, schedule = case
    exact = counted(masks, schedule)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (patterns_module, vgg11_flop):
            monkeypatch.setattr(module, "_EXACT", 0)
        steps = Analysis([of_mask(mask) for mask in masks], ["layer"] * len(masks)).steps(schedule)
    for step in steps:
        right = exact[step.start, step.mid, step.stop]
        assert step.flop >= right
        assert step.estimated or step.flop == right


@pytest.mark.slow
def test_a_full_blelloch_scan_is_counted_without_its_products() -> None:
    net = Sequential(from_torch(pruned(0, narrow=1)[0], (3, 32, 32)))
    analysis = Analysis(net.patterns, layer_names(net))
    steps = {step.label: step for step in analysis.steps(Schedule.blelloch(21)) if not step.vector}
    largest = max(steps.values(), key=lambda step: step.flop)
    assert largest.label == "conv3–conv6"
    assert largest.estimated
    assert largest.flop > 10**11
    # 16,384 by 8,192 entries, of which not one was made.
    assert analysis.patterns[8, 12].kind == "dense"
    assert analysis.patterns[8, 12]._indices is None


def test_back_propagation_multiplies_by_pruned_weights() -> None:
    net = Sequential(from_torch(pruned(0)[0], (3, 32, 32)))
    lines = {line["label"]: line for line in baseline(net)}
    assert list(lines) == layer_names(net)[:-1]
    # A convolution of ones counts, for every output, the inputs that it reads.
    count = 0
    for op in net.layers[1:]:
        if isinstance(op, Conv2d):
            ones = torch.ones(1, op.in_channels, *op.input_shape[1:])
            weight = torch.ones(op.out_channels, op.in_channels, 3, 3)
            reads = nn.functional.conv2d(ones, weight, padding=1).sum()
            name = [name for name in lines if name.startswith("conv")][::-1][count]
            assert lines[name]["flop"] == 2 * reads
            count += 1
    assert count == 7
    assert lines["relu1"]["flop"] == 2 * 4 * 32 * 32


# -- What is timed --------------------------------------------------------------------------------


@given(sparse_chains(), st.integers(0, 2**32))
@settings(deadline=None)
def test_values_are_put_where_the_pattern_has_them(
    case: tuple[list[np.ndarray], Schedule], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    mask = case[0][0]
    values = rng.standard_normal(mask.shape) * mask * (rng.random(mask.shape) < 0.5)
    pattern = of_mask(mask)
    placed = vgg11_timing.in_pattern(sp.csr_array(values), pattern)
    matrix = sp.csr_array((placed, pattern.indices, pattern.indptr), shape=mask.shape)
    np.testing.assert_array_equal(matrix.toarray(), values)


def test_values_of_a_tall_matrix_are_put_where_the_pattern_has_them() -> None:
    rng = np.random.default_rng()
    mask = rng.random((600, 7)) < 0.4
    values = mask * (rng.random(mask.shape) < 0.5)
    pattern = of_mask(mask)
    placed = vgg11_timing.in_pattern(sp.csr_array(values.astype(np.float32)), pattern)
    np.testing.assert_array_equal(placed, values[mask])


@given(st.integers(1, 4), st.integers(0, 2**32))
@settings(deadline=None)
def test_an_interleaved_matrix_is_all_samples(batch: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random(rng.integers(1, 6, 2)) < 0.5
    pattern = of_mask(mask)
    jacobian = BatchedCSR.from_pattern(rng.standard_normal((batch, pattern.nnz)), pattern)
    x = rng.standard_normal((mask.shape[1], batch))
    products = (vgg11_timing.interleaved(jacobian) @ x.reshape(-1)).reshape(-1, batch)
    for b in range(batch):
        np.testing.assert_allclose(products[:, b], jacobian[b] @ x[:, b], atol=1e-14)


def test_products_are_sorted_and_in_their_patterns() -> None:
    nodes = Nodes(chain(0, 1), Schedule.blelloch(vgg11.STEPS))
    products = [step for step in nodes.steps if not step.vector]
    assert len(products) == 14
    for step in products:
        interval = step.start, step.stop
        matrix, pattern = nodes.matrix(interval), nodes.patterns[interval]
        assert matrix.has_canonical_format
        values = nodes.values(interval)
        rebuilt = sp.csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape)
        assert abs(rebuilt - matrix).sum() == 0


def timed(device: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every step of all schedules, and the backward pass."""
    nodes = Nodes(
        chain(0, 2, device), *(make(vgg11.STEPS) for make in (Schedule.linear, Schedule.blelloch))
    )
    works = {
        f"{step.label} {step.vector}": vgg11_timing.step_work(nodes, step) for step in nodes.steps
    }
    assert all(nodes.too_large(step) is None for step in nodes.steps)
    steps = vgg11_timing.race(works, device, 1)
    whole = {
        "B=1": vgg11_timing.backward(chain(1, 1, device), Schedule.truncated(vgg11.STEPS, 2)),
        "B=3": vgg11_timing.backward(chain(3, 3, device)),
    }
    return steps, vgg11_timing.race(whole, device, 1)


def test_all_contenders_are_right_on_the_cpu() -> None:
    try:
        load_mkl()
    except MissingPeerError as missing:
        pytest.skip(str(missing))
    steps, whole = timed(Cpu())
    assert steps["missing"] == whole["missing"] == {}
    assert set(steps["works"]["conv8 True"]["median_seconds"]) == {OURS, SCIPY, MKL, TORCH}
    assert set(steps["works"]["conv3–conv6 False"]["median_seconds"]) == {OURS, SCIPY, MKL}
    assert set(steps["works"]["conv3–conv6 True"]["median_seconds"]) == {OURS, SCIPY, MKL}
    # Vectors by 20 layers and by 9 products; 9 + 4 + 1 products.
    kinds = [name.endswith("True") for name in steps["works"]]
    assert (kinds.count(True), kinds.count(False)) == (29, 14)
    contenders = {OURS, VALUES, PARAMETERS, SCIPY, TORCH, TORCH_PARAMETERS}
    assert set(whole["works"]["B=3"]["median_seconds"]) == contenders
    assert set(whole["works"]["B=1"]["median_seconds"]) == contenders | {UP_SWEEP}
    json.dumps([steps, whole])


def test_all_contenders_are_right_on_a_stand_in_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vgg11_timing, "load", FakeCusparse)
    steps, whole = timed(Host())
    assert steps["missing"] == whole["missing"] == {}
    assert set(steps["works"]["conv8 True"]["median_seconds"]) == {OURS, CUSPARSE, TORCH}
    assert set(steps["works"]["conv3–conv6 False"]["median_seconds"]) == {OURS, CUSPARSE, REUSE}
    assert CUSPARSE in whole["works"]["B=1"]["median_seconds"]
    assert CUSPARSE in whole["works"]["B=3"]["median_seconds"]


def test_a_peer_that_is_missing_or_fails_is_named() -> None:
    def missing() -> Any:
        raise MissingPeerError("not installed")

    def failing() -> Any:
        raise RuntimeError("out of memory")

    contenders = {OURS: lambda: {"": lambda: np.ones(1)}, SCIPY: missing, MKL: failing}
    work = Work(contenders=contenders, right=np.ones(1), bytes=8, flops=2)
    times = vgg11_timing.race({"a step": work}, Cpu(), 1)
    assert times["missing"] == {SCIPY: "not installed", MKL: "a step: RuntimeError: out of memory"}
    assert set(times["works"]["a step"]["median_seconds"]) == {OURS}
    broken = Work(contenders={OURS: failing}, right=np.ones(1), bytes=8, flops=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        vgg11_timing.race({"a step": broken}, Cpu(), 1)


@pytest.mark.parametrize("wrong", [1 + 1e-3, np.nan])
def test_a_wrong_result_stops_the_run(wrong: float) -> None:
    contenders = {SCIPY: lambda: {"": lambda: np.array([1.0, wrong])}}
    work = Work(contenders=contenders, right=np.ones(2), bytes=8, flops=2)
    with pytest.raises(AssertionError, match="SciPy is wrong"):
        vgg11_timing.race({"a step": work}, Cpu(), 1)


def test_what_is_too_large_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(chain(0, 1), Schedule.blelloch(vgg11.STEPS))
    products = {step.label: step for step in nodes.steps if not step.vector}
    monkeypatch.setattr(vgg11_timing, "_MOST_WORK", products["pool3–conv6"].flop // 2 - 1)
    reasons = {(step.label, step.vector): nodes.too_large(step) for step in nodes.steps}
    said = f"{products['pool3–conv6'].flop // 2:,} multiply-adds"
    # Steps that read the product are not timed either.
    assert reasons["pool3–conv6", False] == reasons["pool3–conv6", True] == said
    assert reasons["conv3–conv6", False] is not None
    assert reasons["pool3–conv5", False] is None


# -- The experiment -------------------------------------------------------------------------------


def results(pieces: Results) -> Results:
    return {"pieces": pieces, "about": vgg11._about(QUICK)}


@pytest.mark.slow
def test_a_run_that_is_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [piece.key for piece in vgg11.EXPERIMENT.pieces(QUICK)]
    assert keys[:2] == ["training", "flop"]

    file = cut_off(vgg11.EXPERIMENT, QUICK, tmp_path, vgg11_timing, "backward")
    assert file.name.startswith("vgg11-quick-")
    assert list(json.loads(file.read_text())["pieces"]) == keys[:-2]
    vgg11.trained.cache_clear()
    vgg11._chain.cache_clear()
    monkeypatch.setattr(torch.optim, "Adam", interrupt)  # nothing is trained again
    last = go_on(vgg11.EXPERIMENT, QUICK, tmp_path, file)
    assert list(last["pieces"]) == keys
    missing = last["pieces"]["steps: layers"]["missing"]
    assert "--device cuda" in missing[CUSPARSE]

    assert [drawing.title for drawing in draw(vgg11.EXPERIMENT, last, tmp_path)] == [
        "Accuracy before and after pruning",
        "FLOP of every step",
        "Time of every step",
        "The whole backward pass",
    ]
    rows = vgg11.EXPERIMENT.rows(last)
    by_peer = {row.peer: row for row in rows if "B=16" in row.work}
    medians = last["pieces"]["backward, B=16"]["works"]["backward"]["median_seconds"]
    assert by_peer[TORCH].theirs == medians[TORCH]
    assert by_peer[TORCH].ours == medians[VALUES]
    assert by_peer[SCIPY].ours == medians[OURS]


def made_up() -> Results:
    """One of each kind of piece."""
    step = Step("up-sweep 0", 2, 3, 4, "conv8–relu8", 10, 1000, True, True)
    taken = {
        "flop": 10,
        "bytes": 40,
        "floor_seconds": 1e-7,
        "median_seconds": {OURS: 1e-5, CUSPARSE: 2e-5},
        "samples_seconds": {OURS: [1e-5] * 3, CUSPARSE: [2e-5] * 3},
        "variants": {},
    }
    epochs = {"train loss": [1.0, 0.5], "test accuracy": [0.2, 0.7]}
    return {
        "training": {
            "trained": epochs,
            "retrained": epochs,
            "kept weights": [3],
            "weights": [100],
        },
        "flop": {
            "schedules": {"auto": "Schedule.linear(21)"},
            "steps": {"auto": [vars(step)]},
            "back-propagation": [{"label": "conv8", "flop": 100, "dense_flop": 1000}],
        },
        "steps: up-sweep 0": {
            "works": {"conv8–relu8": taken},
            "missing": {},
            "not timed": {"conv3–conv6": "1,000 multiply-adds"},
            "call_seconds": 1e-5,
        },
        "backward, B=1": {"works": {"backward": taken}, "missing": {}},
    }


def test_whatever_pieces_there_are_can_be_drawn(tmp_path: Path) -> None:
    pieces = made_up()
    assert vgg11.EXPERIMENT.drawings(results({})) == []
    assert vgg11.EXPERIMENT.rows(results({})) == []
    for key in pieces:
        assert len(draw(vgg11.EXPERIMENT, results({key: pieces[key]}), tmp_path)) == 1
    assert len(vgg11.EXPERIMENT.drawings(results(pieces))) == len(pieces)
    ratios = [row.theirs / row.ours for row in vgg11.EXPERIMENT.rows(results(pieces))]
    assert ratios == [2.0, 2.0]
    # A group of which nothing could be timed is no picture.
    nothing = {"works": {}, "missing": {}, "not timed": {"conv3–conv6": "9 entries"}}
    assert vgg11.EXPERIMENT.drawings(results({"steps: up-sweep 3": nothing})) == []
