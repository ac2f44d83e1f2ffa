"""Vectors of neighbouring numbers: functions of them, and where they are loaded from and stored."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import types
from numba.np import numpy_support
from numpy.typing import NDArray
from sampling import examples

from sparsescan.kernels.compile import entry_for_c
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


# -- Pointers --------------------------------------------------------------------------------------


@numba.njit
def scale(x: Array, at: int, out: Array, to: int, count: int) -> float:
    """Write ``2x + x[0]``, and that behind it where whole vectors are stored; return ``x[0]``."""
    width = lanes.lane_count(x)
    whole = count // width * width
    two, first = lanes.number(x, 2), lanes.splat(x, at)
    for i in range(0, whole, width):
        lanes.store(out, to + i, lanes.fma(two, lanes.load(x, at + i), first))
    rest = lanes.load_some(x, at + whole, count - whole)
    lanes.store_some(out, to + whole, lanes.fma(two, rest, first), count - whole)
    return lanes.item(x, at)  # type: ignore[no-any-return]


@numba.njit
def fill(x: Array, places: Array, out: Array) -> int:
    """Write what each of the functions that load or store makes of `x`, one behind the other."""
    width = lanes.sample_count(x)
    some = lanes.load_samples(x, 1) + lanes.splat_samples(x, 2)
    lanes.store(out, 0, some)
    lanes.add_to(out, width // 2, some)
    begin = 2 * width
    square = lanes.transpose(lanes.load_square(x, 3, width + 1, width - 1, width - 2))
    lanes.store_square(out, begin, width, square, width, width - 1)
    begin += width * width
    sums = lanes.gather_4(some, x, (0, 3, 2, 1), x, places, 0, 7)
    lanes.store_totals(out, begin, sums, False)
    begin += 4
    lanes.put_four(out, begin, x, (5, 3, 8, 0))
    return begin + 4


KINDS: Any = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def call(function: Any, *args: Any) -> Any:
    """Call a compiled function from C, with addresses in the place of arrays."""
    arrays = [isinstance(arg, np.ndarray) for arg in args]
    kinds = tuple(
        types.CPointer(numpy_support.from_dtype(arg.dtype)) if is_array else types.intp
        for arg, is_array in zip(args, arrays, strict=True)
    )
    address = entry_for_c(function, kinds)
    result = numpy_support.as_dtype(function.overloads[kinds].signature.return_type)
    in_c = [ctypes.c_void_p if is_array else ctypes.c_ssize_t for is_array in arrays]
    entry = ctypes.CFUNCTYPE(np.ctypeslib.as_ctypes_type(result), *in_c)(address)
    return entry(*(arg.ctypes.data if isinstance(arg, np.ndarray) else arg for arg in args))


@KINDS
@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 70))
def test_pointers_in_the_place_of_arrays(dtype: Any, at: int, to: int, count: int) -> None:
    x = np.random.default_rng().standard_normal(80).astype(dtype)
    out = np.full(80, np.nan, dtype)
    assert call(scale, x, at, out, to, count) == x[at]
    expected = 2 * x[at : at + count] + x[at]
    np.testing.assert_allclose(out[to : to + count], expected, rtol=1e-5, atol=1e-5)
    assert np.all(np.isnan(out[:to]))
    assert np.all(np.isnan(out[to + count :]))


@KINDS
def test_pointers_give_what_arrays_give(dtype: Any) -> None:
    x = np.random.default_rng().standard_normal(120).astype(dtype)
    places = np.random.default_rng().integers(0, 50, 7)
    of_arrays = np.random.default_rng().standard_normal(150).astype(dtype)
    of_pointers = of_arrays.copy()
    written = fill(x, places, of_arrays)
    assert call(fill, x, places, of_pointers) == written
    np.testing.assert_array_equal(of_pointers, of_arrays)
