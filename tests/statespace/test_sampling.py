"""Draws of state spaces and hidden Markov models, beside their moments and probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling import long_run
from scipy.sparse import csr_array
from state_spaces import drawn

from sparsescan import InputError, InputTypeError
from sparsescan.statespace import hmm, kalman_filter, sample

Array = NDArray[Any]

ONE = np.ones((1, 1))
MODEL = {
    "transition": ONE,
    "observation": ONE,
    "transition_covariance": ONE,
    "observation_covariance": ONE,
    "initial_covariance": ONE,
}


def moments(model: dict[str, Array], steps: int) -> tuple[Array, Array]:
    """Return mean and covariance of all states, then all observations, of one series."""

    def at(name: str, t: int) -> Any:
        own = model.get(name)
        if own is None:
            return 0
        own = own[:, 0] if not name.startswith("initial") else own
        return own[min(t, len(own) - 1)]

    size, (observed, _) = len(at("initial_covariance", 0)), at("observation", 0).shape
    # A map from the first state and all noises, which are independent, to all states.
    row, means = [np.eye(size)], [np.zeros(size) + at("initial_mean", 0)]
    whole, noise = np.zeros((2, steps * size, steps * size))
    for t in range(steps):
        here = slice(t * size, (t + 1) * size)
        whole[here, : (t + 1) * size] = np.hstack(row)
        own = at("transition_covariance", t - 1) if t > 0 else at("initial_covariance", 0)
        noise[here, here] = (own + own.T) / 2
        row = [*[at("transition", t) @ each for each in row], np.eye(size)]
        means.append(at("transition", t) @ means[-1] + at("transition_offset", t))
    h, r = np.zeros((steps * observed, steps * size)), np.zeros((steps * observed,) * 2)
    offsets = np.zeros((steps, observed))
    for t in range(steps):
        up = slice(t * observed, (t + 1) * observed)
        h[up, t * size : (t + 1) * size] = at("observation", t)
        own = at("observation_covariance", t)
        r[up, up] = (own + own.T) / 2
        offsets[t] += at("observation_offset", t)
    states = whole @ noise @ whole.T
    both = np.vstack([np.eye(len(states)), h])
    covariance = both @ states @ both.T
    covariance[len(states) :, len(states) :] += r
    m = np.concatenate(means[:steps])
    return np.concatenate([m, h @ m + offsets.ravel()]), covariance


@pytest.mark.parametrize("seed", range(6))
def test_moments_are_those_of_one_gaussian(seed: int) -> None:
    """Of 40,000 series, whose parts change from step to step or not; five deviations apart."""
    rng, count = np.random.default_rng(seed), 40_000
    y, model = drawn(rng, 3)
    del y
    model = {
        name: each[:, :1] if not name.startswith("initial") else each[:1]
        for name, each in model.items()
    }
    before = {name: each.copy() for name, each in model.items()}
    states, observations = sample(3, count, rng=seed, **model)
    for name, each in before.items():
        np.testing.assert_array_equal(each, model[name])
    flat = [np.moveaxis(each, 1, 0).reshape(count, -1) for each in (states, observations)]
    found = np.concatenate(flat, 1)
    mean, covariance = moments(model, 3)
    spread = np.sqrt(np.diag(covariance))
    assert (np.abs(found.mean(0) - mean) < 5.5 * spread / np.sqrt(count)).all()
    ours = np.cov(found.T)
    bound = np.sqrt((covariance**2 + np.outer(spread, spread) ** 2) / count)
    assert (np.abs(ours - covariance) < 5.5 * bound).all()


@settings(max_examples=long_run(200, 20))
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 9))
def test_without_noise_each_series_is_its_recursion(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    y, model = drawn(rng, steps)
    count = y.shape[1]
    model |= {name: 0 * each for name, each in model.items() if name.endswith("covariance")}
    states, observations = sample(steps, count, **model)
    assert observations.shape == y.shape
    for n in range(count):

        def at(name: str, t: int, n: int = n) -> Any:
            own = model.get(name)
            if own is None:
                return 0
            own = own if name.startswith("initial") else own[min(t, len(own) - 1)]
            return own[min(n, len(own) - 1)]

        x = np.zeros(states.shape[2]) + at("initial_mean", 0)
        for t in range(steps):
            np.testing.assert_allclose(states[t, n], x, rtol=1e-10, atol=1e-10)
            right = at("observation", t) @ x + at("observation_offset", t)
            np.testing.assert_allclose(observations[t, n], right, rtol=1e-10, atol=1e-10)
            x = at("transition", t) @ x + at("transition_offset", t)


def test_seeds_axes_and_dtypes() -> None:
    first, second = sample(5, rng=1, **MODEL), sample(5, rng=np.random.default_rng(1), **MODEL)
    assert np.array_equal(first.states, second.states)
    assert first.states.shape == first.observations.shape == (5, 1)
    assert not np.array_equal(sample(5, **MODEL).states, sample(5, **MODEL).states)
    short = {name: each.astype(np.float32) for name, each in MODEL.items()}
    assert sample(5, 2, **short).observations.dtype == np.float32
    assert sample(0, 2, **MODEL).states.shape == (0, 2, 1)
    assert sample(3, 0, **MODEL).states.shape == (3, 0, 1)


def test_forecasts_of_a_filter_are_the_moments_of_what_follows() -> None:
    """Steps without observations at the end have the mean and spread of series drawn from there."""
    y = sample(30, rng=0, **MODEL).observations
    ahead = kalman_filter(np.concatenate([y, np.full((5, 1), np.nan)]), **MODEL)
    begin = {"initial_mean": ahead.means[29], "initial_covariance": ahead.covariances[29]}
    states = sample(6, 40_000, rng=1, **MODEL | begin).states[:, :, 0]
    variance = ahead.covariances[29:, 0, 0]
    apart = np.abs(states.mean(1) - ahead.means[29:, 0])
    assert (apart < 5 * np.sqrt(variance / 40_000)).all()
    np.testing.assert_allclose(states.var(1), variance, rtol=0.04)


@pytest.mark.parametrize(
    ("steps", "change", "kind", "message"),
    [
        (-1, {}, InputError, "steps is -1"),
        (2.5, {}, InputTypeError, "steps is 2.5"),
        (3, {"series": -2}, InputError, "series is -2"),
        (3, {"transition_covariance": -ONE}, InputError, "transition_covariance has an eigenvalue"),
        (3, {"initial_covariance": np.nan * ONE}, InputError, "initial_covariance has numbers"),
        (3, {"transition": np.eye(2)}, InputError, "transition has shape"),
        (3, {"mean": ONE}, TypeError, "sample has no argument 'mean'"),
    ],
)
def test_errors(steps: Any, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        sample(steps, **{**MODEL, **change})


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_paths_have_their_probabilities(is_sparse: bool, changes: bool) -> None:
    """Of all paths of three steps, some of which are impossible; rows do not sum to 1."""
    rng, count = np.random.default_rng(0), 60_000
    initial, a = rng.random(3), rng.random((3, 3, 3) if changes else (3, 3))
    a[..., 0, 2] = a[..., 1, 0] = 0
    given: dict[str, Any] = {"initial": initial, "transition": a}
    if is_sparse and not changes:
        given["transition"] = csr_array(a)
    elif is_sparse:
        pattern = hmm.Pattern(csr_array(a[0]))
        given |= {"transition": a[:, a[0] > 0], "pattern": pattern}
    found = hmm.sample(3, count, rng=1, **given)
    paths = np.zeros((3, 3, 3))
    np.add.at(paths, tuple(found), 1)
    each = a if changes else np.stack([a] * 3)
    each, initial = each / each.sum(-1, keepdims=True), initial / initial.sum()
    right = np.einsum("i,ij,jk->ijk", initial, each[0], each[1])
    assert not paths[right == 0].any()
    spread = np.sqrt(right * (1 - right) / count)
    assert (np.abs(paths / count - right) <= 5 * spread).all()


def test_states_of_one_series_and_none() -> None:
    turn, initial = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([0.0, 1.0])
    assert hmm.sample(4, initial=initial, transition=turn).tolist() == [1, 0, 1, 0]
    assert hmm.sample(0, initial=initial, transition=turn).shape == (0,)
    assert hmm.sample(3, 0, initial=initial, transition=turn).shape == (3, 0)
    with pytest.raises(InputError, match="probabilities of step 1 sum to 0"):
        hmm.sample(3, initial=initial, transition=np.eye(2) * [[1], [0]])
    with pytest.raises(InputError, match="steps is -1"):
        hmm.sample(-1, initial=initial, transition=turn)
    with pytest.raises(InputError, match="initial has -1"):
        hmm.sample(2, initial=-initial, transition=turn)
