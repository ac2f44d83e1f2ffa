"""Log-likelihoods of state spaces and their gradients, beside one Gaussian of all observations."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from dense_gaussian import dense_likelihood
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling import long_run, slow
from state_spaces import NILE, drawn

from sparsescan import InputError, InputTypeError
from sparsescan.ops import kalman
from sparsescan.statespace import log_likelihood, log_likelihood_vjp

Array = NDArray[Any]


def dense(y: Array, model: dict[str, Array], above: Array) -> tuple[Array, dict[str, Array]]:
    """Return what algebra of one Gaussian gives, with gradients in symmetric parts."""
    leaves = {
        name: torch.tensor(each, requires_grad=True)
        for name, each in {"observations": y, **model}.items()
    }
    found = dense_likelihood(**leaves)
    loss = (found * torch.tensor(above)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    pairs = zip(leaves, grads, strict=True)
    return found.detach().numpy(), {name: np.nan_to_num(each.numpy()) for name, each in pairs}


def close(ours: Any, right: Any, bound: float) -> None:
    scale = 1 + np.max(np.abs(right), initial=0)
    assert np.shape(ours) == np.shape(right)
    assert np.max(np.abs(ours - right), initial=0) <= bound * scale


@settings(max_examples=long_run(400, 40))
@given(
    seed=st.integers(0, 2**32), steps=st.integers(0, 20), kept=st.sampled_from([1, 300, 1 << 20])
)
@example(seed=0, steps=0, kept=1)
@example(seed=0, steps=1, kept=1)
def test_likelihoods_and_gradients(seed: int, steps: int, kept: int) -> None:
    """Of any parts that may be missing or shared, and segments of one step or more."""
    rng = np.random.default_rng(seed)
    y, model = drawn(rng, steps)
    copies = {name: each.copy() for name, each in {"y": y, **model}.items()}
    above = rng.standard_normal(y.shape[1])
    right, grads = dense(y, model, above)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kalman, "_KEPT", kept)
        patch.setattr(kalman, "_LEAST", 1 + seed % 3)
        found = log_likelihood(y, **model)
        ours = log_likelihood_vjp(y, grads=above, **model)._asdict()
    close(found, right, 1e-10)
    assert {name for name, each in ours.items() if each is not None} == grads.keys()
    for name, each in grads.items():
        close(ours[name], each, 1e-9)
    for name, each in copies.items():
        np.testing.assert_array_equal(each, model.get(name, y))


def loop(y: Array, model: dict[str, Array]) -> float:
    """Return the log-likelihood of a series by the filter as textbooks have it."""
    f, h = model["transition"], model["observation"]
    mean, p, found = np.zeros(len(f)), model["initial_covariance"], 0.0
    for row in y:
        there = ~np.isnan(row)
        own, r = h[there], model["observation_covariance"][there][:, there]
        s = own @ p @ own.T + r
        v, gain = row[there] - own @ mean, p @ own.T @ np.linalg.inv(s)
        found -= (v @ np.linalg.solve(s, v) + np.linalg.slogdet(2 * math.pi * s)[1]) / 2
        mean, p = f @ (mean + gain @ v), f @ (p - gain @ own @ p) @ f.T
        p = p + model["transition_covariance"]
    return found


def long_model(rng: np.random.Generator, states: int, observed: int) -> dict[str, Array]:
    f = rng.standard_normal((states, states))
    return {
        "transition": 0.95 * f / np.abs(np.linalg.eigvals(f)).max(),
        "observation": rng.standard_normal((observed, states)),
        "transition_covariance": 0.3 * np.eye(states),
        "observation_covariance": 0.5 * np.eye(observed),
        "initial_covariance": 100 * np.eye(states),
    }


@pytest.mark.parametrize("kept", [1, 1 << 20])
@pytest.mark.parametrize("gap", [False, True])
@settings(max_examples=long_run(40, 3))
@given(seed=st.integers(0, 2**32))
def test_covariances_that_come_to_a_halt(kept: int, gap: bool, seed: int) -> None:
    """Of all steps, and of steps before and behind a gap."""
    rng = np.random.default_rng(seed)
    states, observed = int(rng.integers(1, 13)), int(rng.integers(1, 4))
    model, y = long_model(rng, states, observed), rng.standard_normal((700, observed))
    if gap:
        y[350:352] = np.nan
        y[400, 0] = np.nan
    # Shared by all steps, or the same matrix for each of them, which never comes to a halt.
    each = {**model, "transition": np.broadcast_to(model["transition"], (700, states, states))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kalman, "_KEPT", kept)
        close(log_likelihood(y, **model), loop(y, model), 1e-11)
        close(log_likelihood(y, **model), log_likelihood(y, **each), 1e-14)
        ours, right = (log_likelihood_vjp(y, **own)._asdict() for own in (model, each))
    right["transition"] = right["transition"].sum(0)
    for name in ("observations", *model):
        close(ours[name], right[name], 1e-11)


def test_the_nile() -> None:
    """Durbin and Koopman, 2012, section 2: the variances that fit best, and a diffuse start.

    With the first flow as the mean of the first level, which leaves the likelihood of the others.
    """
    y, one = NILE[:, None], np.ones((1, 1))
    model = {
        "transition": one,
        "observation": one,
        "transition_covariance": 1469.1 * one,
        "observation_covariance": 15099.0 * one,
    }
    found = log_likelihood(
        y[1:], **model, initial_mean=y[0], initial_covariance=one * (15099.0 + 1469.1)
    )
    assert len(y) == 100
    assert abs(found - -632.54) < 0.01  # their table 2.1 and section 2.10.1
    found = log_likelihood(y, **model, initial_covariance=1e7 * one)
    assert abs(found - -641.59) < 0.01  # as statsmodels, with its approximate diffuse start
    grads = log_likelihood_vjp(y, **model, initial_covariance=1e7 * one)
    # At the best fit both derivatives in logarithms of variances are 0.
    assert abs(grads.transition_covariance[0, 0]) * 1469.1 < 1e-3
    assert abs(grads.observation_covariance[0, 0]) * 15099.0 < 1e-3


@pytest.mark.parametrize("seed", slow(4))
def test_near_singular_covariances(seed: int) -> None:
    """Observations without noise to speak of, beside arithmetic with 60 digits."""
    rng = np.random.default_rng(seed)
    states, observed, steps = 3, 2, 6
    model = long_model(rng, states, observed)
    model["observation_covariance"] = 1e-12 * np.eye(observed)
    model["transition_covariance"] = np.outer(*[rng.standard_normal(states)] * 2)
    y = rng.standard_normal((steps, observed))
    with mpmath.workdps(60):
        exact = {name: mpmath.matrix(each.tolist()) for name, each in model.items()}
        f, h = exact["transition"], exact["observation"]
        mean, p, right = mpmath.zeros(states, 1), exact["initial_covariance"], mpmath.mpf(0)
        for row in y:
            s = h * p * h.T + exact["observation_covariance"]
            v, inverse = mpmath.matrix(row.tolist()) - h * mean, s**-1
            right -= ((v.T * inverse * v)[0] + mpmath.log((2 * mpmath.pi) ** 2 * mpmath.det(s))) / 2
            gain = p * h.T * inverse
            mean, p = f * (mean + gain * v), f * (p - gain * h * p) * f.T
            p = p + exact["transition_covariance"]
        expected = float(right)
    found = log_likelihood(y, **model)
    # Rounding of the variances of innovations, which are as small as those of observations.
    bound = 16 * np.finfo(float).eps * np.abs(model["initial_covariance"]).max() / 1e-12
    assert abs(found - expected) <= bound * abs(expected)
    assert all(
        np.isfinite(each).all() for each in log_likelihood_vjp(y, **model) if each is not None
    )


def test_exploding_transitions() -> None:
    """States that grow by a half at each step, to 1e70, are observed as they are."""
    rng = np.random.default_rng(0)
    model = long_model(rng, 1, 1) | {"transition": np.full((1, 1), 1.5)}
    y = np.cumprod(np.full((400, 1), 1.5), 0)
    close(log_likelihood(y, **model), loop(y, model), 1e-11)
    assert np.isfinite(log_likelihood_vjp(y, **model).transition).all()
    grads, h, r = log_likelihood_vjp(y[:40], **model), 1e-6, model["observation_covariance"]
    up, down = (
        log_likelihood(y[:40], **model | {"observation_covariance": r + d}) for d in (h, -h)
    )
    close(grads.observation_covariance, np.array([[(up - down) / (2 * h)]]), 1e-5)


def test_singular_innovations_are_nan_and_other_series_are_not() -> None:
    one = np.ones((1, 1))
    model = {
        "transition": one,
        "observation": one,
        "transition_covariance": one,
        "observation_covariance": np.array([-2.0, 1.0]).reshape(1, 2, 1, 1),
        "initial_covariance": one,
    }
    y = np.ones((5, 2, 1))
    found = log_likelihood(y, **model)
    assert np.isnan(found).tolist() == [True, False]
    alone = model | {"observation_covariance": one}
    assert found[1] == log_likelihood(y[:, 1], **alone)


def test_float32_has_results_of_double_precision() -> None:
    rng = np.random.default_rng(0)
    model, y = long_model(rng, 4, 2), rng.standard_normal((300, 2))
    narrow = {name: each.astype(np.float32) for name, each in model.items()}
    wide = {name: each.astype(float) for name, each in narrow.items()}
    single = y.astype(np.float32)
    found, right = log_likelihood(single, **narrow), log_likelihood(single.astype(float), **wide)
    assert found.dtype == np.float32
    assert found == np.float32(right)
    ours, theirs = (
        log_likelihood_vjp(series, **own)
        for series, own in ((single, narrow), (single.astype(float), wide))
    )
    for one, other in zip(ours, theirs, strict=True):
        if one is not None:
            assert one.dtype == np.float32
            close(one, other, 1e-6)


# -- Errors ----------------------------------------------------------------------------------------

MODEL = {
    "transition": np.eye(3),
    "observation": np.ones((2, 3)),
    "transition_covariance": np.eye(3),
    "observation_covariance": np.eye(2),
    "initial_covariance": np.eye(3),
}
Y = np.ones((7, 4, 2))
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "axes": ({"observations": Y[0, 0]}, InputError, r"observations has shape \(2,\); expected"),
    "observed": ({"observations": Y[..., :1]}, InputError, r"shape \(7, 4, 1\); expected 2 as its"),
    "observation": ({"observation": np.ones(3)}, InputError, r"observation has shape \(3,\); exp"),
    "no states": ({"observation": np.ones((2, 0))}, InputError, "none of them 0"),
    "transition": ({"transition": np.eye(2)}, InputError, r"transition has shape \(2, 2\); expe"),
    "steps": ({"transition": np.ones((6, 3, 3))}, InputError, "with 7 steps and 4 series, or 1"),
    "series": ({"initial_mean": np.ones((3, 3))}, InputError, r"or \(series, …\) with 7 steps"),
    "offset": ({"observation_offset": np.ones(3)}, InputError, r"observation_offset .*\(2,\)"),
    "nothing": ({"initial_covariance": None}, InputTypeError, "initial_covariance"),
    "complex": ({"transition": np.eye(3) * 1j}, InputTypeError, "transition has dtype complex"),
    "grads": (
        {"grads": np.ones(3)},
        InputError,
        r"grads has shape \(3,\); expected \(\) or \(4,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    change, kind, message = WRONG[name]
    arguments = {"observations": Y, **MODEL, **change}
    with pytest.raises(kind, match=message):
        log_likelihood_vjp(**arguments)
    if name != "grads":
        with pytest.raises(kind, match=message):
            log_likelihood(**arguments)
