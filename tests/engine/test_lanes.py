"""Functions of vectors with a lane for each sample: tanh and the logistic sigmoid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray
from sampling import examples

from sparsescan.kernels.cpu import lanes

Array = NDArray[Any]


@numba.njit
def write_tanh(x: Array, out: Array) -> None:
    for i in range(0, len(x), lanes.lane_count(x)):
        lanes.store(out, i, lanes.tanh(lanes.load(x, i)))


@numba.njit
def write_sigmoid(x: Array, out: Array) -> None:
    for i in range(0, len(x), lanes.lane_count(x)):
        lanes.store(out, i, lanes.sigmoid(lanes.load(x, i)))


def values(write: Callable[[Array, Array], None], x: Array) -> Array:
    """Return a function of all numbers in `x`, filled up to whole vectors."""
    padded = np.append(x, np.zeros(16, x.dtype))[: -(-len(x) // 16) * 16]
    out = np.full_like(padded, np.nan)
    write(padded, out)
    return out[: len(x)]


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def numbers(request: pytest.FixtureRequest) -> Array:
    """Numbers of all sizes and signs, most where the functions bend, and where they end."""
    rng, count = np.random.default_rng(), examples(40_000)
    limits = np.finfo(request.param)
    parts = [
        rng.uniform(-1, 1, count),
        rng.uniform(-12, 12, count),
        rng.uniform(-100, 100, count),
        rng.uniform(-800, 800, count),
        rng.choice([-1, 1], count) * 10.0 ** rng.uniform(limits.minexp * 0.3, 3, count),
        np.log(2) * (rng.integers(-1500, 1500, count) + rng.choice([0, 0.5], count)) / 2,
        [0.0, -0.0, limits.tiny, -limits.tiny, limits.max, -limits.max, np.inf, -np.inf],
    ]
    return np.concatenate(parts).astype(request.param)


def distance(actual: Array, expected: Array) -> Array:
    """Return the distance in units in the last place; there are none below normal numbers."""
    unit = np.spacing(
        np.maximum(np.abs(expected).astype(actual.dtype), np.finfo(actual.dtype).tiny)
    )
    return np.abs(actual - expected) / unit


def test_tanh(numbers: Array) -> None:
    actual = values(write_tanh, numbers)
    assert np.max(distance(actual, np.tanh(numbers.astype(np.longdouble)))) < 3
    assert np.array_equal(np.signbit(actual), np.signbit(numbers))
    assert np.max(np.abs(actual)) == 1


def test_sigmoid(numbers: Array) -> None:
    actual = values(write_sigmoid, numbers)
    with np.errstate(over="ignore", under="ignore"):
        expected = 1 / (1 + np.exp(-numbers.astype(np.longdouble)))
    tiny = np.finfo(numbers.dtype).tiny
    assert np.max(distance(actual, expected)[expected >= 1.01 * tiny]) < 3
    # Below normal numbers it may be 0.
    assert np.all(np.abs(actual - expected)[expected < 1.01 * tiny] <= 1.01 * tiny)
    assert np.min(actual) == 0
    assert np.max(actual) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("write", [write_tanh, write_sigmoid])
def test_nan_stays(write: Callable[[Array, Array], None], dtype: Any) -> None:
    x = np.random.default_rng().standard_normal(64).astype(dtype)
    x[::3] = np.nan
    assert np.array_equal(np.isnan(values(write, x)), np.isnan(x))
