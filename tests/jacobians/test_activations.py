"""Activations against PyTorch: slopes, kinks, extremes, and Softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from autodiff import check_operator
from hypothesis import given
from hypothesis import strategies as st

from sparsescan import InputError, Pattern
from sparsescan.jacobians.activations import (
    ELU,
    GELU,
    Hardtanh,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)

nn = torch.nn

# An operator and its module for every elementwise layer, and one of each with unusual arguments.
ELEMENTWISE = {
    "ReLU": (ReLU, nn.ReLU, ()),
    "LeakyReLU": (LeakyReLU, nn.LeakyReLU, ()),
    "LeakyReLU falling": (LeakyReLU, nn.LeakyReLU, (-0.5,)),
    "ELU": (ELU, nn.ELU, ()),
    "ELU falling": (ELU, nn.ELU, (-2.0,)),
    "Tanh": (Tanh, nn.Tanh, ()),
    "Sigmoid": (Sigmoid, nn.Sigmoid, ()),
    "SiLU": (SiLU, nn.SiLU, ()),
    "GELU": (GELU, nn.GELU, ()),
    "GELU tanh": (GELU, nn.GELU, ("tanh",)),
    "Softplus": (Softplus, nn.Softplus, ()),
    "Softplus steep": (Softplus, nn.Softplus, (3.0, 2.0)),
    "Softplus mirrored": (Softplus, nn.Softplus, (-1.5, 1.0)),
    "Hardtanh": (Hardtanh, nn.Hardtanh, ()),
    "Hardtanh skewed": (Hardtanh, nn.Hardtanh, (-0.25, math.inf)),
}
elementwise = pytest.mark.parametrize(
    ("layer", "module", "arguments"), ELEMENTWISE.values(), ids=ELEMENTWISE.keys()
)

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)
slopes = st.floats(-4, 4)


def torch_slope(module: nn.Module, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and slope of an elementwise module."""
    tensor = torch.tensor(x, requires_grad=True)
    y = module(tensor)
    return y.detach().numpy(), torch.autograd.grad(y.sum(), tensor)[0].numpy()


def assert_rounded(actual: np.ndarray, expected: np.ndarray, factor: float) -> None:
    """Compare dtypes, and values up to rounding at the scale of each entry, but at least of 1."""
    assert actual.dtype == expected.dtype
    tolerance = factor * float(np.finfo(expected.dtype).eps)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@elementwise
@given(shape=shapes, seed=seeds)
def test_elementwise_layer_is_that_of_pytorch(layer, module, arguments, shape, seed):
    rng = np.random.default_rng(seed)
    op = layer(*arguments, input_shape=shape)
    assert op.pattern is Pattern.diagonal(math.prod(shape))
    check_operator(op, module(*arguments), rng)


@given(slope=slopes, seed=seeds)
def test_leaky_relu_of_any_slope(slope, seed):
    op = LeakyReLU(slope, input_shape=(5,))
    check_operator(op, nn.LeakyReLU(slope), np.random.default_rng(seed))


@given(alpha=slopes, seed=seeds)
def test_elu_of_any_alpha(alpha, seed):
    check_operator(ELU(alpha, input_shape=(5,)), nn.ELU(alpha), np.random.default_rng(seed))


@given(beta=slopes.filter(lambda beta: abs(beta) > 0.1), threshold=slopes, seed=seeds)
def test_softplus_of_any_beta_and_threshold(beta, threshold, seed):
    op = Softplus(beta, threshold, input_shape=(5,))
    check_operator(op, nn.Softplus(beta, threshold), np.random.default_rng(seed))


@given(low=st.floats(-3, 1), width=st.floats(0.1, 3), seed=seeds)
def test_hardtanh_of_any_bounds(low, width, seed):
    op = Hardtanh(low, low + width, input_shape=(5,))

    def draw(rng, shape):
        return rng.uniform(low - 1, low + width + 1, shape)

    check_operator(op, nn.Hardtanh(low, low + width), np.random.default_rng(seed), draw=draw)


@elementwise
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_input_has_the_slopes_of_pytorch(layer, module, arguments, dtype):
    """At signed zero, subnormals and the largest numbers; what is NaN in PyTorch has no say.

    Nor what overflows there on the way to a finite result.
    """
    info = np.finfo(dtype)
    edges = [0, info.smallest_subnormal, info.tiny, 1, 2, 19, 21, 90, 800, 1e4, 1e12, 1e30]
    x = np.array([*edges, info.max, np.inf], dtype)
    x = np.concatenate([x, -x])
    op = layer(*arguments, input_shape=x.shape)
    y, slope = torch_slope(module(*arguments), x)
    for actual, expected in ((op.forward(x), y), (op.values(x), slope)):
        defined = np.isfinite(expected) | np.isinf(x) & ~np.isnan(expected)
        assert_rounded(actual[defined], expected[defined], 40)
    assert not np.isnan(op.values(x)).any()


@elementwise
def test_slope_at_nan_is_that_of_pytorch(layer, module, arguments):
    # As many as fill a vector register: PyTorch's ELU and Hardtanh differ in what is left over.
    x = np.full(64, np.nan)
    y, slope = torch_slope(module(*arguments), x)
    op = layer(*arguments, input_shape=x.shape)
    np.testing.assert_array_equal(op.forward(x), y)
    np.testing.assert_array_equal(op.values(x), slope)


def test_kinks_have_the_slopes_of_pytorch():
    zero, ones = np.zeros(1), np.ones(1)
    assert ReLU(input_shape=(1,)).values(zero) == 0
    assert LeakyReLU(0.5, input_shape=(1,)).values(zero) == 0.5
    assert ELU(3.0, input_shape=(1,)).values(zero) == 3
    assert Hardtanh(input_shape=(1,)).values(ones) == 0
    assert Hardtanh(input_shape=(1,)).values(-ones) == 0
    assert Softplus(2.0, 2.0, input_shape=(1,)).values(ones) < 1
    assert Softplus(2.0, 1.9, input_shape=(1,)).values(ones) == 1


def test_small_slopes_keep_their_digits():
    """Where y has lost them: ELU at -α, the sigmoid of GELU and SiLU at 0."""
    x = np.array([-30.0])
    elu, silu = ELU(input_shape=(1,)), SiLU(input_shape=(1,))
    np.testing.assert_allclose(elu.values(x, elu.forward(x)), np.exp(x), rtol=1e-15)
    np.testing.assert_allclose(silu.values(x), (1 + x) * np.exp(x), rtol=1e-12)
    x = np.array([-12.0])
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    series = density * (x - 1 / x + 1 / x**3 - 3 / x**5)
    np.testing.assert_allclose(GELU(input_shape=(1,)).values(x), series, rtol=1e-6)


@given(shape=shapes, data=st.data(), seed=seeds)
def test_softmax_is_that_of_pytorch(shape, data, seed):
    axes = len(shape)
    dim = data.draw(st.integers(1, axes) | st.integers(-axes, -1))
    op = Softmax(dim, input_shape=shape)
    check_operator(op, nn.Softmax(dim), np.random.default_rng(seed))


@given(shape=shapes, seed=seeds)
def test_softmax_counts_axes_from_both_ends(shape, seed):
    x = np.random.default_rng(seed).standard_normal(shape)
    for dim in range(1, len(shape) + 1):
        front, back = (Softmax(d, input_shape=shape) for d in (dim, dim - len(shape) - 1))
        assert front.pattern is back.pattern
        np.testing.assert_array_equal(front.values(x), back.values(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_of_extreme_input(dtype):
    big = np.finfo(dtype).max
    rows = [
        [big, 0, -big],
        [big, big, big],
        [-np.inf, 0, 1],
        [1e4, -1e4, 0],
        [np.finfo(dtype).tiny, 0, 0],
        [-np.inf, -np.inf, -np.inf],
        [np.inf, 0, 0],
        [np.nan, 0, 0],
    ]
    op = Softmax(-1, input_shape=(3,))
    for row in rows:
        x = np.array(row, dtype)
        expected = torch.autograd.functional.jacobian(nn.Softmax(0), torch.tensor(x)).numpy()
        y = torch.softmax(torch.tensor(x), 0).numpy()
        assert_rounded(op.forward(x), y, 10)
        assert_rounded(op.values(x).reshape(3, 3), expected.T, 10)


@given(shape=shapes, seed=seeds)
def test_rows_of_softmax_sum_to_zero(shape, seed):
    """Adding a constant along the axis changes nothing."""
    op = Softmax(1, input_shape=shape)
    x = np.random.default_rng(seed).normal(scale=10, size=shape)
    np.testing.assert_allclose(op.jacobian(x).toarray().sum(axis=0), 0, atol=1e-15)


def test_out_has_memory_of_its_own() -> None:
    x = np.linspace(-1, 1, 5)
    for op in (ELU(input_shape=(5,)), ReLU(input_shape=(5,)), Sigmoid(input_shape=(5,))):
        y = op.forward(x)
        for out in (x, y):
            with pytest.raises(InputError, match="out shares memory with the input"):
                op.values(x, y, out=out)
