"""Layers as implicit steps, against PyTorch's autograd and their explicit Jacobians in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import OPERATORS
from test_network_step import RANDOM_NETS, close, random_mask, run_torch

import sparsescan
from sparsescan import ImplicitPattern, ImplicitStep, MemoryLimitError, Pattern, ScanPlan, Schedule
from sparsescan.jacobians import (
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
    Softmax,
    from_torch,
)
from sparsescan.symbolic.indexed import IndexedPattern

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)
SEEDS = st.integers(0, 2**32 - 1)


def a_schedule(rng: np.random.Generator, n: int) -> Schedule:
    return [
        Schedule.linear(n),
        Schedule.blelloch(n),
        Schedule.truncated(n, 1),
        Schedule.chunked(n, int(rng.integers(1, n + 1))),
    ][rng.integers(4)]


def gradients(net: Sequential, x: np.ndarray, grad: np.ndarray, plan: ScanPlan) -> Any:
    """Return the output, and gradients in input and parameters, by implicit steps."""
    xs = net.activations(x)
    lead = x.shape[: x.ndim - len(net.input_shape)]
    grads = plan.inclusive_scan(grad.reshape(*lead, -1), net.implicit(xs))
    assert len(grads) == len(net) + 1
    return xs[-1], grads[-1].reshape(x.shape), net.param_grads(xs, grads)


def check_params(params: Any, expected: dict[str, np.ndarray], what: Any, scale: float = 1) -> None:
    """Compare the gradients of all layers with those that PyTorch calls by their modules."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, array in expected.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = array
    layers = [layer for layer in params if layer]
    for layer, (module, arrays) in zip(layers, modules.items(), strict=True):
        assert layer.keys() == arrays.keys()
        for name, array in arrays.items():
            close(layer[name], array, (module, name, what), scale)


def check(module: Any, input_shape: tuple[int, ...], batch: int, rng: np.random.Generator) -> None:
    """As PyTorch's, by any schedule, and again with other weights and input."""
    module = module.double()
    for param in module.parameters():
        param.data /= param[0].numel() ** 0.5
    net = Sequential(from_torch(module, input_shape))
    schedule = a_schedule(rng, len(net))
    plan = sparsescan.plan(net.implicit_patterns, schedule=schedule, batch=batch)
    for _ in range(2):
        x, grad = (
            rng.standard_normal((batch, *shape)) for shape in (input_shape, net.output_shape)
        )
        expected = run_torch(module, x, grad)
        y, input_grad, params = gradients(net, x, grad, plan)
        close(y, expected[0], what="output")
        close(input_grad, expected[1], what=schedule)
        # Normalisations of what hardly varies multiply rounding by up to 300, which others follow.
        check_params(params, expected[2], schedule, scale=100)
        with torch.no_grad():
            for param in module.parameters():
                param *= 1.5


# ---------------------------------------------------------------------------------------------
# As PyTorch's autograd
# ---------------------------------------------------------------------------------------------


@RANDOM_NETS
@given(SEEDS)
def test_any_network(made: Any, seed: int) -> None:
    """Of convolutions of any strides, dilations, groups, paddings and masks, and others."""
    rng = np.random.default_rng(seed)
    check(*made(rng), int(rng.integers(1, 20)), rng)


# ---------------------------------------------------------------------------------------------
# As the explicit chain
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_every_layer(name: str) -> None:
    rng = np.random.default_rng(0)
    op = OPERATORS[name](F8)
    x = rng.standard_normal(op.input_shape if "training" in name else (3, *op.input_shape))
    lead = x.shape[: x.ndim - len(op.input_shape)]
    grad = rng.standard_normal((*lead, op.shape[1]))
    expected = sparsescan.inclusive_scan(grad, [op.jacobian(x)])[1]
    for step in (op.implicit(x), op.implicit(x, op.forward(x))):
        if isinstance(op.implicit_pattern, ImplicitPattern):
            assert isinstance(step, ImplicitStep)
            assert step.pattern is op.implicit_pattern
            assert step.pattern.jacobian is op.pattern
        for schedule in ("linear", "blelloch"):
            actual = sparsescan.inclusive_scan(grad, [step], schedule=schedule)[1]
            close(actual, expected)


def a_net(dtype: Any, keep: float = 0.4) -> Sequential:
    rng = np.random.default_rng(0)
    first = rng.random((6, 2, 3, 3)) < keep
    return Sequential(
        [
            Conv2d(
                2, 6, 3, padding=1, input_shape=(2, 8, 8), weight_mask=first, dtype=dtype, rng=0
            ),
            ReLU(input_shape=(6, 8, 8)),
            MaxPool2d(2, input_shape=(6, 8, 8)),
            Residual(
                Conv2d(6, 6, 3, padding=1, input_shape=(6, 4, 4), dtype=dtype, rng=1),
                LayerNorm((4, 4), input_shape=(6, 4, 4), dtype=dtype),
            ),
            ConvTranspose2d(6, 2, 2, stride=2, input_shape=(6, 4, 4), dtype=dtype, rng=2),
            Flatten(input_shape=(2, 8, 8)),
            Linear(128, 12, dtype=dtype, rng=3),
            Softmax(1, input_shape=(12,)),
        ]
    )


def drawn(net: Sequential, dtype: Any, batch: int = 5) -> tuple[list[Any], np.ndarray]:
    rng = np.random.default_rng(1)
    xs = net.activations(rng.standard_normal((batch, *net.input_shape)).astype(dtype))
    return xs, rng.standard_normal((batch, *net.output_shape)).astype(dtype)


@given(SEEDS)
def test_float32_is_no_farther_off_than_explicit_steps(seed: int) -> None:
    """Than ten of their roundings, by the largest gradient, when they are all but exact."""
    rng = np.random.default_rng(seed)
    keep = rng.random()
    small, net = a_net(F4, keep), a_net(F8, keep)
    for narrow, wide in zip(small.layers, net.layers, strict=True):
        for name, param in narrow.params.items():
            setattr(wide, name, param.astype(F8))
    (given, grad), eps = drawn(small, F4), float(np.finfo(F4).eps)
    xs = [x.astype(F8) for x in given]
    exact = sparsescan.exclusive_scan(grad.astype(F8), net.jacobians(xs), schedule="linear")
    schedule = a_schedule(rng, len(net))
    explicit, implicit = (
        sparsescan.exclusive_scan(grad, steps, schedule=schedule)
        for steps in (small.jacobians(given), small.implicit(given))
    )
    for one, other, array in zip(explicit, implicit, exact, strict=True):
        assert other.dtype == F4
        scale = np.abs(array).max()
        errors = [np.abs(gradient - array).max() for gradient in (one, other)]
        assert errors[1] <= 2 * errors[0] + 10 * eps * scale


@given(SEEDS)
def test_convolutions_have_the_bits_of_explicit_ones(seed: int) -> None:
    """Whether rows with equal weights are kept once, or all are written for a product."""
    rng = np.random.default_rng(seed)
    keep, dtype = rng.choice([0.1, 0.5, 1.0]), rng.choice(["f4", "f8"])
    layers: list[Any] = []
    for k, (a, b) in enumerate(((2, 5), (5, 4), (4, 3))):
        kept = rng.random((b, a, 3, 3)) < keep
        layers.append(
            Conv2d(a, b, 3, padding=1, input_shape=(a, 6, 6), weight_mask=kept, dtype=dtype, rng=k)
        )
        layers.append(ReLU(input_shape=(b, 6, 6)))
    net, batch = Sequential(layers), int(rng.choice([1, 2, 3, 8, 19]))
    xs, grad = drawn(net, dtype, batch)
    schedule = a_schedule(rng, len(net))
    expected = net.plan(schedule=schedule).inclusive_scan(grad.reshape(batch, -1), net.values(xs))
    plan = sparsescan.plan(net.implicit_patterns, schedule=schedule)
    for _ in range(2):
        actual = plan.inclusive_scan(grad.reshape(batch, -1), net.implicit(xs))
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["linear", "blelloch"])
def test_bits_do_not_depend_on_threads(schedule: str, threads: int, with_threads: Any) -> None:
    net = a_net(F8)
    (xs, grad), plan = drawn(net, F8, 20), sparsescan.plan(net.implicit_patterns, schedule=schedule)
    with_threads(3)
    expected = plan.exclusive_scan(grad, net.implicit(xs))
    with_threads(threads)
    for gradient, array in zip(plan.exclusive_scan(grad, net.implicit(xs)), expected, strict=True):
        np.testing.assert_array_equal(gradient, array)


def test_a_value_that_is_not_finite_is_decided_by_the_linear_scan() -> None:
    """By the plan that multiplies matrices, too, for which whole convolutions are written."""
    net = a_net(F8)
    xs, grad = drawn(net, F8)
    grad[0, 3] = np.inf
    expected = sparsescan.exclusive_scan(grad, net.jacobians(xs), schedule="linear")
    for schedule in ("linear", "blelloch", "chunked:3"):
        actual = sparsescan.exclusive_scan(grad, net.implicit(xs), schedule=schedule)
        for one, other in zip(actual[4:], expected[4:], strict=True):
            np.testing.assert_array_equal(np.isfinite(one[0]), np.isfinite(other[0]))
            close(one[1:], other[1:])


def test_weights_are_read_when_a_scan_runs() -> None:
    conv = Conv2d(1, 2, 3, input_shape=(1, 6, 6), dtype=F8, rng=0)
    step, grad = conv.implicit(), np.ones(32)
    before = sparsescan.inclusive_scan(grad, [step])[1]
    conv.weight *= 2
    np.testing.assert_array_equal(sparsescan.inclusive_scan(grad, [step])[1], 2 * before)


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def test_a_plan_says_what_is_saved() -> None:
    """The convolution's rows once in place of at every place; the normalisation's sums."""
    conv = Conv2d(4, 8, 3, padding=1, input_shape=(4, 16, 16), rng=0)
    net = Sequential([conv, LayerNorm((16, 16), input_shape=(8, 16, 16))])
    plan = sparsescan.plan(net.implicit_patterns, batch=16, dtype=F4)
    told = plan.to_dict()["implicit"]
    # Along an axis the first place has two taps, the last one too, and all others three.
    index = net.implicit_patterns[1].indexed[0]
    assert index.distinct == 4 * 8 * (2 + 3 + 2) ** 2
    assert told["bytes"] == 4 * (index.distinct + 16 * 6 * 8 * 256)
    assert told["explicit_bytes"] == 4 * (conv.nnz + 16 * 8 * 256 * 256)
    assert told["steps"] == 2
    assert "implicit: 2 of 2; values take" in str(plan)
    assert "288 weights, shared by all samples" in str(plan)


def test_what_a_product_reads_is_written_whole() -> None:
    conv = Conv2d(2, 2, 3, padding=1, input_shape=(2, 8, 8), rng=0)
    patterns = [conv.implicit_pattern] * 8
    linear, tree = (
        sparsescan.plan(patterns, schedule=schedule, dtype=F8)
        for schedule in ("linear", "blelloch")
    )
    index = conv.implicit_pattern.indexed[0]
    assert linear.to_dict()["implicit"]["bytes"] == 8 * 8 * index.distinct
    assert tree.to_dict()["implicit"]["bytes"] > 8 * 8 * index.distinct
    least = linear.workspace_bytes
    with pytest.raises(MemoryLimitError):
        sparsescan.plan(patterns, schedule="linear", dtype=F8, memory_limit=least - 1)
    limited = sparsescan.plan(patterns, dtype=F8, memory_limit=least)
    assert limited.workspace_bytes <= least


def test_a_normalised_batch_is_planned_without_its_jacobian() -> None:
    """Which has 2^30 entries."""
    norm = BatchNorm2d(64, input_shape=(16, 64, 16, 16), training=True)
    conv = Conv2d(64, 4, 1, input_shape=(16, 64, 16, 16), rng=0)
    net = Sequential([norm, conv])
    plan = sparsescan.plan(net.implicit_patterns, dtype=F4)
    told = plan.to_dict()["implicit"]
    assert told["explicit_bytes"] == 4 * (norm.nnz + conv.nnz)
    assert told["bytes"] < told["explicit_bytes"] / 500


def test_steps_stay_explicit_where_factors_save_nothing() -> None:
    rng = np.random.default_rng(0)
    for op in (
        Linear(4, 3, rng=0),
        Linear(40, 30, weight_mask=random_mask(rng, (30, 40)), rng=0),
        Conv2d(4, 4, 3, padding=1, input_shape=(4, 2, 2), rng=0),  # all places are at the border
        LayerNorm(6),
        Softmax(1, input_shape=(4,)),
        ReLU(input_shape=(5,)),
        Residual(Linear(4, 4, rng=0)),
    ):
        assert op.implicit_pattern is op.pattern
    for more in (LayerNorm(7), Softmax(1, input_shape=(5,)), Linear(4, 3, input_shape=(2, 4))):
        assert isinstance(more.implicit_pattern, ImplicitPattern)


# ---------------------------------------------------------------------------------------------
# Indices
# ---------------------------------------------------------------------------------------------


@given(SEEDS)
def test_an_index_is_that_of_every_entry(seed: int) -> None:
    """However rows with equal weights are merged."""
    rng = np.random.default_rng(seed)
    rows, cols, size = (int(n) for n in rng.integers(1, 9, 3))
    where = rng.random((rows, cols)) < rng.random()
    pattern = Pattern(
        np.concatenate([[0], np.cumsum(where.sum(axis=1))]), np.nonzero(where)[1], (rows, cols)
    )
    index = rng.integers(0, size, pattern.nnz)
    if rng.random() < 0.5 and pattern.nnz:
        index = np.nonzero(where)[1] % size
    indexed = IndexedPattern(pattern, index, size)
    np.testing.assert_array_equal(indexed.index, index)
    used = np.split(index, pattern.indptr[1:-1])
    assert indexed.distinct == sum(map(len, {tuple(row) for row in map(np.ndarray.tolist, used)}))
    for other in (copy.deepcopy(indexed), IndexedPattern(pattern, index.astype(np.uint8), size)):
        assert other == indexed
        assert hash(other) == hash(indexed)
