"""Filtered and smoothed states, beside one Gaussian of all states, and beside statsmodels."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from dense_gaussian import dense_moments
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax_doubles import double as double
from numpy.typing import NDArray
from sampling import long_run
from state_spaces import NILE, drawn

import sparsescan.jax.statespace as of_jax
import sparsescan.torch.statespace as of_torch
from sparsescan import InputError
from sparsescan.ops import kalman
from sparsescan.statespace import kalman_filter, kalman_smoother, log_likelihood

Array = NDArray[Any]
COVARIANCES = "transition", "observation", "initial"


def tensors(model: dict[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(each, requires_grad=True) for name, each in model.items()}


def close(ours: Any, right: Any, bound: float) -> None:
    for one, other in zip(ours, right, strict=True):
        other = np.asarray(other)
        assert one.shape == other.shape
        scale = 1 + np.max(np.abs(other), initial=0)
        assert np.max(np.abs(np.asarray(one) - other), initial=0) <= bound * scale


@settings(max_examples=long_run(300, 30))
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 8),
    kept=st.sampled_from([1, 1 << 20]),
    scale=st.sampled_from([1, 1e-12, 1e12]),
)
@example(seed=0, steps=1, kept=1, scale=1)
def test_moments(seed: int, steps: int, kept: int, scale: float) -> None:
    """Of any parts that may be missing or shared, in any unit, through NumPy and PyTorch."""
    y, model = drawn(np.random.default_rng(seed), steps)
    filtered, smoothed = dense_moments(torch.tensor(y), **tensors(model))
    right = [each.detach() for each in (*filtered, *smoothed)]
    powers = [2 if name.endswith("covariance") else 1 for name in model]
    powers = [
        0 if name in ("transition", "observation") else k
        for name, k in zip(model, powers, strict=True)
    ]
    scaled = {name: each * scale**k for (name, each), k in zip(model.items(), powers, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kalman, "_KEPT", kept)
        patch.setattr(kalman, "_LEAST", 1 + seed % 3)
        of_numpy = kalman_filter(scale * y, **scaled), kalman_smoother(scale * y, **scaled)
    series = torch.tensor(scale * y)
    own = {name: torch.tensor(each) for name, each in scaled.items()}
    by_torch = of_torch.kalman_filter(series, **own), of_torch.kalman_smoother(series, **own)
    likelihood = log_likelihood(scale * y, **scaled)
    for first, second in (of_numpy, by_torch):
        for each in (first, second):
            np.testing.assert_allclose(each.log_likelihood, likelihood, rtol=1e-10)
        units = np.array([1, 2, 1, 2, 1, 2, 2])
        found = [
            np.asarray(each) / scale**k
            for each, k in zip((*first[1:], *second[1:]), units, strict=True)
        ]
        close(found, right, 1e-9)


def test_moments_at_a_halt() -> None:
    """Of constant matrices, and of the same matrices for each step, which never come to a halt."""
    rng = np.random.default_rng(0)
    y, model = drawn(rng, 700)
    while not all(each.shape[0] == 1 for name, each in model.items() if "initial" not in name):
        y, model = drawn(rng, 700)
    y = rng.standard_normal(y.shape)
    y[400:403] = np.nan
    model["transition"] = 0.9 * model["transition"]
    f = model["transition"]
    each = {**model, "transition": np.broadcast_to(f, (700, *f.shape[1:]))}
    for function in (kalman_filter, kalman_smoother):
        close(function(y, **model), function(y, **each), 1e-11)


def test_the_nile_beside_statsmodels() -> None:
    """A local linear trend, with a gap of twenty years, and a forecast; statsmodels 0.15."""
    y = NILE[:, None].copy()
    y[20:40] = np.nan
    y = np.concatenate([y, [[np.nan]]])
    model = {
        "transition": np.array([[1.0, 1.0], [0.0, 1.0]]),
        "observation": np.array([[1.0, 0.0]]),
        "transition_covariance": np.diag([1469.1, 10.0]),
        "observation_covariance": np.array([[15099.0]]),
        "initial_covariance": 1e6 * np.eye(2),
    }
    filtered, smoothed = kalman_filter(y, **model), kalman_smoother(y, **model)
    assert abs(filtered.log_likelihood - -517.8670440448112) < 1e-9
    right = {
        (30, "means"): [873.0083243223048, -6.40790076823894],
        (0, "means"): [1124.7728210696214, -6.374246296894518],
        (30, "covariances"): [
            [12018.14001901451, -28.37436153631402],
            [-28.374361536313895, 64.31806652541025],
        ],
        (30, "cross_covariances"): [
            [11215.434628452838, -2.2931141790413143],
            [-71.79539033699703, 59.439954415637466],
        ],
    }
    for (t, name), each in right.items():
        np.testing.assert_allclose(getattr(smoothed, name)[t], each, rtol=1e-8)
    np.testing.assert_allclose(filtered.means[30], [946.2858826583102, -5.772983226205991], 1e-10)
    forecast, spread = (
        [774.4482291597918, -6.904578496357802],
        [7081.10772618123, 470.9662162379473],
    )
    for found in (filtered.means, filtered.predicted_means, smoothed.means):
        np.testing.assert_allclose(found[100], forecast, rtol=1e-10)
    for found in (filtered.covariances, smoothed.covariances):
        np.testing.assert_allclose(found[100, 0], spread, rtol=1e-10)


@pytest.mark.parametrize("name", ["kalman_filter", "kalman_smoother"])
def test_doors_have_derivatives_and_maps(name: str) -> None:
    y, model = drawn(np.random.default_rng(3), 4)
    leaves, rng = tensors(model), np.random.default_rng(0)
    fixed = {name: each.detach() for name, each in leaves.items()}
    right = dense_moments(torch.tensor(y), **leaves)[name == "kalman_smoother"]
    weights = [rng.standard_normal(each.shape) for each in right]

    def total(moments: Any, own: Any) -> Any:
        return sum((each * w).sum() for each, w in zip(moments, own, strict=True))

    of_tensors = [torch.tensor(w) for w in weights]
    grads = torch.autograd.grad(total(right, of_tensors), list(leaves.values()), allow_unused=True)
    function = getattr(of_torch, name)
    ours = torch.autograd.grad(
        total(function(torch.tensor(y), **leaves)[1:], of_tensors), list(leaves.values())
    )

    assert not any(each.requires_grad for each in ours)

    def loss(model: dict[str, Array]) -> Any:
        return total(getattr(of_jax, name)(y, **model)[1:], weights)

    by_jax = jax.jit(jax.grad(loss))(model)
    for key, one, other in zip(leaves, ours, grads, strict=True):
        other = np.zeros(one.shape) if other is None else np.nan_to_num(other.numpy())
        close([one, by_jax[key]], [other, other], 1e-9)
    two = np.stack([y, y / 2])
    mapped = jax.vmap(lambda y: getattr(of_jax, name)(y, **model))(two)
    every = torch.func.vmap(lambda y: function(y, **fixed))(torch.tensor(two))
    for k, series in enumerate(two):
        own = {"kalman_filter": kalman_filter, "kalman_smoother": kalman_smoother}[name]
        each = own(series, **model)
        close([part[k] for part in mapped], each, 1e-11)
        close([part[k] for part in every], each, 1e-11)


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps_and_no_axis_of_series(steps: int) -> None:
    one = np.ones((1, 1))
    model = {
        "transition": one,
        "observation": one,
        "transition_covariance": one,
        "observation_covariance": one,
        "initial_covariance": one,
    }
    y = np.ones((steps, 1))
    own = {name: torch.tensor(each) for name, each in model.items()}
    for name, function in (("kalman_filter", kalman_filter), ("kalman_smoother", kalman_smoother)):
        found = function(y, **model)
        shapes = [(), (steps, 1), (steps, 1, 1), (steps, 1), (steps, 1, 1)]
        if name == "kalman_smoother":
            shapes[3:] = [(0, 1, 1)]
        by_torch = getattr(of_torch, name)(torch.tensor(y), **own)
        for door in (found, by_torch, getattr(of_jax, name)(y, **model)):
            assert [tuple(np.shape(each)) for each in door] == shapes
            close(door, found, 1e-14)


def test_float32_and_series_that_cannot_be() -> None:
    one = np.ones((1, 1))
    model = {
        "transition": one,
        "observation": one,
        "transition_covariance": one,
        "observation_covariance": np.array([-2.0, 1.0]).reshape(1, 2, 1, 1),
        "initial_covariance": one,
    }
    y = np.ones((40, 2, 1))
    for function in (kalman_filter, kalman_smoother):
        wide = function(y, **model)
        assert np.isnan(wide.log_likelihood).tolist() == [True, False]
        assert np.isnan(wide.means[:, 0]).all()
        alone = function(y[:, 1], **model | {"observation_covariance": one})
        for each, other in zip(wide[1:], alone[1:], strict=True):
            np.testing.assert_allclose(each[:, 1], other, rtol=1e-14)
        single = {name: each.astype(np.float32) for name, each in model.items()}
        for each, other in zip(function(y.astype(np.float32), **single), wide, strict=True):
            assert each.dtype == np.float32
            np.testing.assert_allclose(each, other, rtol=1e-6)


@pytest.mark.parametrize("function", [kalman_filter, kalman_smoother])
def test_errors(function: Any) -> None:
    one = np.ones((1, 1))
    with pytest.raises(TypeError, match=f"{function.__name__} has no argument 'q'"):
        function(one, q=one)
    with pytest.raises(TypeError, match=f"{function.__name__} needs an argument 'transition'"):
        function(one, observation=one)
    names = "transition", "observation", *(f"{name}_covariance" for name in COVARIANCES)
    with pytest.raises(InputError, match=r"observations has shape \(1,\); expected \(steps"):
        function(one[0], **dict.fromkeys(names, one))
