"""Pooling layers are those of PyTorch, and so are their Jacobians."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from autodiff import check_operator, entries
from hypothesis import assume, given
from hypothesis import strategies as st

from sparsescan.jacobians.pooling import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from sparsescan.jacobians.shared.windows import Window, slide
from sparsescan.symbolic import pattern

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([np.float32, np.float64])
images = st.tuples(st.integers(1, 2), st.integers(1, 8), st.integers(1, 8))
pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def poolings(draw: st.DrawFn, *, dilated: bool) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Arguments of a pooling layer and an image of at most 8 × 8, such that no window is empty."""
    shape = draw(images)
    kernel = draw(pairs)
    arguments: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": draw(st.none() | pairs),
        "padding": tuple(draw(st.integers(0, size // 2)) for size in kernel),
        "ceil_mode": draw(st.booleans()),
    }
    if dilated:
        arguments["dilation"] = draw(pairs)
    stride, dilation = arguments["stride"] or kernel, arguments.get("dilation", (1, 1))
    for n, k, s, p, d in zip(
        shape[1:], kernel, stride, arguments["padding"], dilation, strict=True
    ):
        window = Window(n, k, s, p, p, d)
        count = window.count(arguments["ceil_mode"])
        assume(count >= 1)
        inputs = window.inputs(count)
        assume(((inputs >= 0) & (inputs < n)).any(axis=1).all())
    return arguments, shape


def with_ties(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Few different numbers, both zeros and both infinities, and in most samples NaN."""
    x = rng.choice([-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf], shape)
    rate = rng.choice([0, 0.1, 0.5], (shape[0],) + (1,) * (len(shape) - 1))
    x[rng.random(shape) < rate] = np.nan
    return x


# -- Max pooling ------------------------------------------------------------------------------


@given(poolings(dilated=True), seeds)
def test_max_pooling(case: tuple[dict[str, Any], tuple[int, ...]], seed: int) -> None:
    arguments, shape = case
    op = MaxPool2d(**arguments, input_shape=shape)
    check_operator(op, torch.nn.MaxPool2d(**arguments), np.random.default_rng(seed), batch=2)


@given(poolings(dilated=True), seeds)
def test_the_first_maximum_counts_or_the_last_nan(
    case: tuple[dict[str, Any], tuple[int, ...]], seed: int
) -> None:
    arguments, shape = case
    op = MaxPool2d(**arguments, input_shape=shape)
    x = with_ties(np.random.default_rng(seed), (5, *shape))
    actual, places = torch.nn.functional.max_pool2d(
        torch.tensor(x), **arguments, return_indices=True
    )
    np.testing.assert_array_equal(op.forward(x), actual.numpy())
    rows, cols = entries(op)
    largest = places.reshape(5, -1).numpy()
    values = op.values(x)
    np.testing.assert_array_equal(values, largest[:, cols] == rows % (shape[1] * shape[2]))


@given(poolings(dilated=True), seeds, dtypes)
def test_devices_mark_what_the_cpu_marks(
    case: tuple[dict[str, Any], tuple[int, ...]], seed: int, dtype: Any
) -> None:
    arguments, shape = case
    op = MaxPool2d(**arguments, input_shape=shape)
    rng = np.random.default_rng(seed)
    for x in (with_ties(rng, (5, *shape)), rng.standard_normal((5, *shape))):
        x = x.astype(dtype)
        values = op.values(x)
        assert values.dtype == dtype
        actual = np.full_like(values, np.nan)
        rows = actual.reshape(-1, op.nnz // shape[0])
        op._fill_by_windows(np, x.reshape(-1, *shape[1:]), rows)
        np.testing.assert_array_equal(actual, values)


@given(
    st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(2, 100)),
    st.sampled_from([2, (2, 2), (2, 1), 3, (1, 3)]),
    seeds,
    dtypes,
)
def test_tiles_of_any_width(shape: tuple[int, ...], kernel: Any, seed: int, dtype: Any) -> None:
    """Windows that do not overlap have one entry for every input, as a gradient of 1 has."""
    tall, wide = np.broadcast_to(kernel, 2)
    assume(tall <= shape[1] and wide <= shape[2])
    op = MaxPool2d(kernel, input_shape=shape)
    rng = np.random.default_rng(seed)
    for draw in (with_ties, lambda rng, shape: rng.standard_normal(shape)):
        x = draw(rng, (4, *shape)).astype(dtype)
        tensor = torch.tensor(x, requires_grad=True)
        torch.nn.functional.max_pool2d(tensor, kernel).sum().backward()
        covered = slice(shape[1] // tall * tall), slice(shape[2] // wide * wide)
        expected = tensor.grad.numpy()[(..., *covered)].reshape(4, -1)
        actual = op.values(x)
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, expected)


def test_max_pooling_of_any_memory_layout_leaves_its_input_alone() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 6, 5))
    for arguments in ((2,), (3, 1, 1)):
        op = MaxPool2d(*arguments, input_shape=(2, 6, 5))
        expected = op.values(x), op.forward(x)
        for layout in (np.asfortranarray(x), x[:, :, ::-1].copy()[:, :, ::-1]):
            before = layout.copy()
            np.testing.assert_array_equal(op.values(layout), expected[0])
            np.testing.assert_array_equal(op.forward(layout), expected[1])
            np.testing.assert_array_equal(layout, before)


@pytest.mark.parametrize(("padding", "dilation", "size"), [((1, 0), (3, 1), 2), (1, 2, 1)])
def test_a_window_without_inputs_has_an_empty_column(
    padding: Any, dilation: Any, size: int
) -> None:
    op = MaxPool2d(2, 1, padding, dilation, input_shape=(1, size, size))
    x = np.ones((1, size, size))
    assert (op.forward(x) == -np.inf).all()
    assert op.nnz == op.pattern.nnz == 0
    assert op.values(x).shape == (0,)


# -- Mean pooling -----------------------------------------------------------------------------


@given(poolings(dilated=False), st.booleans(), st.none() | st.integers(1, 9), seeds)
def test_average_pooling(
    case: tuple[dict[str, Any], tuple[int, ...]],
    count_include_pad: bool,
    divisor_override: int | None,
    seed: int,
) -> None:
    arguments, shape = case
    arguments |= {"count_include_pad": count_include_pad, "divisor_override": divisor_override}
    op = AvgPool2d(**arguments, input_shape=shape)
    check_operator(op, torch.nn.AvgPool2d(**arguments), np.random.default_rng(seed), batch=2)


sizes = st.integers(1, 7)


@given(images, sizes | st.tuples(st.none() | sizes, st.none() | sizes), seeds)
def test_adaptive_average_pooling(shape: tuple[int, ...], output_size: Any, seed: int) -> None:
    op = AdaptiveAvgPool2d(output_size, input_shape=shape)
    module = torch.nn.AdaptiveAvgPool2d(output_size)
    check_operator(op, module, np.random.default_rng(seed), batch=2)


MEANS = [
    (AvgPool2d(3, 2, 1, input_shape=(2, 7, 6)), torch.nn.AvgPool2d(3, 2, 1)),
    (AvgPool2d(2, input_shape=(2, 7, 6)), torch.nn.AvgPool2d(2)),
    (AdaptiveAvgPool2d((3, 4), input_shape=(2, 7, 6)), torch.nn.AdaptiveAvgPool2d((3, 4))),
]


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 5e-324])
@pytest.mark.parametrize(("op", "module"), MEANS)
def test_what_is_not_finite_stays_in_its_windows(op: Any, module: Any, special: float) -> None:
    x = np.ones((1, *op.input_shape))
    x[0, 1, 3, 2] = special
    expected = module(torch.tensor(x)).numpy()
    np.testing.assert_allclose(op.forward(x), expected, rtol=1e-14)


# -- All of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [MaxPool2d, AvgPool2d])
def test_patterns_beyond_32_bits(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = layer(3, 2, 1, input_shape=(2, 5, 6)).pattern
    monkeypatch.setattr(pattern, "INT32_MAX", 20)
    op = layer(3, 2, 1, input_shape=(2, 5, 6))
    assert op.pattern.index_dtype == np.int64
    np.testing.assert_array_equal(op.pattern.indptr, narrow.indptr)
    np.testing.assert_array_equal(op.pattern.indices, narrow.indices)


# -- Windows ----------------------------------------------------------------------------------


@given(poolings(dilated=True), seeds)
def test_windows_are_those_of_unfold(
    case: tuple[dict[str, Any], tuple[int, ...]], seed: int
) -> None:
    arguments, shape = case
    kernel, padding, dilation = (arguments[n] for n in ("kernel_size", "padding", "dilation"))
    stride = arguments["stride"] or kernel
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    by_axis = shape[1:], kernel, stride, padding, padding, dilation
    axes = [Window(*axis) for axis in zip(*by_axis, strict=True)]
    counts = [axis.count() for axis in axes]
    assume(min(counts) >= 1)
    windows = slide(np, x, *axes)
    expected = torch.nn.functional.unfold(torch.tensor(x), kernel, dilation, padding, stride)
    expected = expected.reshape(2, shape[0], *kernel, *counts).permute(0, 1, 4, 5, 2, 3)
    np.testing.assert_array_equal(windows, expected)
    assert np.shares_memory(windows, x) == (not any(padding))


def test_windows_see_the_zeros_around_the_image() -> None:
    x = np.arange(1.0, 5.0).reshape(1, 1, 2, 2)
    windows = slide(np, x, Window(2, 1, 1, 0, 1, 1), Window(2, 3, 1, 1, 3, 1))
    np.testing.assert_array_equal(
        windows[0, 0, :, :, 0],
        [
            [[0, 1, 2], [1, 2, 0], [2, 0, 0], [0, 0, 0]],
            [[0, 3, 4], [3, 4, 0], [4, 0, 0], [0, 0, 0]],
            np.zeros((4, 3)),
        ],
    )
