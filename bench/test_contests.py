"""The work of the contests, and that nobody is timed for computing something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparsescan import BatchedCSR
from sparsescan.jacobians import Conv2d, MaxPool2d, ReLU

from . import compare, contests, peers, turns, workloads
from .contests import OURS, Contest, Work


def test_vgg11_has_the_layers_of_the_paper() -> None:
    net = workloads.vgg11(0.97)
    convs = [layer for layer in net.layers if isinstance(layer, Conv2d)]
    assert [conv.out_channels for conv in convs] == [64, 128, 256, 256, 512, 512, 512, 512]
    kinds = [type(layer) for layer in net.layers]
    assert [kinds.count(kind) for kind in (Conv2d, ReLU, MaxPool2d)] == [8, 8, 5]
    assert (net.input_shape, net.output_shape) == ((3, 32, 32), (512, 1, 1))
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32), np.float32)
    for x in net.activations(images):
        assert 0.5 < np.sqrt(np.mean(x**2)) < 5


@pytest.mark.parametrize("pruned", [0.0, 0.5, 0.9, 0.97])
def test_pruning_drops_the_smallest_weights(pruned: float) -> None:
    for layer in workloads.vgg11(pruned, narrow=16).layers:
        if isinstance(layer, Conv2d):
            weights = np.abs(layer.weight).ravel()
            kept = np.unique(np.abs(layer.jacobian().data))
            np.testing.assert_array_equal(kept, np.unique(weights[weights >= kept[0]]))
            assert abs(np.mean(weights >= kept[0]) - (1 - pruned)) * weights.size <= 1


@st.composite
def batches(draw: st.DrawFn) -> tuple[NDArray[Any], list[Any], list[NDArray[Any]]]:
    """Return a gradient, Jacobians of which some are shared, and all of them as dense arrays."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(["shared", "own", "diagonal"]), min_size=1, max_size=6))
    cols = draw(st.integers(1, 8))
    grad = rng.standard_normal((batch, cols)).astype(np.float32)
    jacobians: list[Any] = []
    dense: list[NDArray[Any]] = []
    for kind in kinds:
        rows = cols if kind == "diagonal" else draw(st.integers(1, 8))
        place = np.eye(rows, dtype=bool) if kind == "diagonal" else rng.random((rows, cols)) < 0.4
        # A diagonal has explicit zeros, as that of ReLU.
        values = rng.standard_normal((batch, place.sum())) * (rng.random((batch, 1)) < 0.7)
        values = values.astype(np.float32)
        pattern = sp.csr_array(place)
        index = pattern.indices, pattern.indptr
        if kind == "shared":
            values = values[:1]
            jacobians.append(sp.csr_array((values[0], *index), shape=place.shape))
        else:
            jacobians.append(BatchedCSR(values, *index, place.shape))
        dense.append(np.zeros((batch, rows, cols)))
        dense[-1][:, place] = values
        cols = rows
    return grad, jacobians, dense


@given(batches())
@settings(deadline=None)
def test_every_loop_of_scipy_is_back_propagation(
    chain: tuple[NDArray[Any], list[Any], list[NDArray[Any]]],
) -> None:
    grad, jacobians, dense = chain
    expected, bounds = [grad.astype(np.float64)], [np.abs(grad)]
    for jacobian in dense[:-1]:
        expected.append((jacobian @ expected[-1][..., None])[..., 0])
        bounds.append((np.abs(jacobian) @ bounds[-1][..., None])[..., 0])
    for name, call in peers.scipy_batch_loops(grad, jacobians).items():
        call()
        for k, gradient in enumerate(call()):  # the second call: the first one changed nothing
            by_sample = np.stack(gradient) if isinstance(gradient, list) else gradient.T
            assert by_sample.dtype == np.float32, name
            error, eps = np.abs(by_sample - expected[k]), np.finfo(np.float32).eps
            assert np.all(error <= 8 * (k + 1) * eps * bounds[k]), name


@pytest.mark.parametrize("batch", [1, 3])
def test_a_wrong_gradient_of_a_network_is_noticed(batch: int) -> None:
    work = contests.vgg11(batch)(True)
    for contender, make in work.contenders.items():
        for call in make().values():
            work.check(contender, call())
    right = work.contenders[OURS]()["plan"]()
    for k, gradient in enumerate(right):
        wrong = [*right]
        # One entry, by a thousandth of the largest.
        wrong[k] = gradient.copy()
        wrong[k].flat[-1] += 1e-3 * np.abs(gradient).max()
        with pytest.raises(AssertionError, match=f"{OURS} is wrong"):
            work.check(OURS, wrong)
    with pytest.raises(AssertionError, match="is wrong"):
        work.check(OURS, [gradient * np.float32(np.nan) for gradient in right])


def _contest(*variants: Any) -> Contest:
    """Nothing but additions, and a peer with these variants."""
    work = Work(
        contenders={
            OURS: lambda: {"plan": lambda: np.ones(3)},
            "peer": lambda: {f"variant {k}": call for k, call in enumerate(variants)},
        },
        bytes=24,
        flops=3,
        dtype=np.dtype(np.float64),
        right=np.ones(3),
    )
    return Contest("test", "a test", lambda reduced: work, {"peer": 1})


def test_every_variant_is_checked() -> None:
    def slow_and_wrong() -> NDArray[Any]:
        np.linalg.svd(np.ones((200, 200)))
        return np.zeros(3)

    with pytest.raises(AssertionError, match="peer is wrong"):
        turns.measure(_contest(lambda: np.ones(3), slow_and_wrong), 1, True)


def test_what_goes_wrong_after_some_calls_is_noticed() -> None:
    total = np.ones(3)

    def changes_its_operand() -> NDArray[Any]:
        np.multiply(total, 1 - 1e-6, out=total)
        return total

    with pytest.raises(AssertionError, match="peer is wrong"):
        turns.measure(_contest(changes_its_operand), 1, True)


def test_a_reduced_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "_WARM_UP", 0)
    assert compare.main(["--reduced", "--only", "vgg11", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["B=1," in line for line in lines if "SciPy loop" in line] == [True, False]
    assert not list(tmp_path.iterdir())
