"""Vectors of neighbouring numbers: functions of them, and where they are loaded from and stored."""

from __future__ import annotations

import ctypes
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
from sparsescan.kernels.cpu import flushing, functions, gathers, lanes, tiles

Array = NDArray[Any]


# -- Functions -------------------------------------------------------------------------------------


def of_one(function: Any) -> Any:
    """Return a function that writes what one of a vector gives for each number."""

    @numba.njit
    def write(x: Array, out: Array) -> None:
        for i in range(0, len(x), lanes.lane_count(x)):
            lanes.store(out, i, function(lanes.load(x, i)))

    return write


def of_two(function: Any) -> Any:
    """Return a function that writes what one of two vectors gives."""

    @numba.njit
    def write(x: Array, y: Array, out: Array) -> None:
        for i in range(0, len(x), lanes.lane_count(x)):
            lanes.store(out, i, function(lanes.load(x, i), lanes.load(y, i)))

    return write


def of_three(function: Any) -> Any:
    """Return a function that writes what one of three vectors gives."""

    @numba.njit
    def write(x: Array, y: Array, z: Array, out: Array) -> None:
        for i in range(0, len(x), lanes.lane_count(x)):
            lanes.store(out, i, function(lanes.load(x, i), lanes.load(y, i), lanes.load(z, i)))

    return write


def values(write: Any, *arrays: Array, flushes: bool = False) -> Array:
    """Return a function of all numbers in arrays, which are filled up to whole vectors."""
    count = len(arrays[0])
    padded = [np.append(x, np.zeros(16, x.dtype))[: -(-count // 16) * 16] for x in arrays]
    out = np.full_like(padded[0], np.nan)
    before = flushing.mode()
    if flushes:
        flushing.flush()
    write(*padded, out)
    flushing.set_mode(before)
    return out[:count]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))  # type: ignore[no-any-return]


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)  # type: ignore[no-any-return]


# A function of NumPy that gives it with more digits, and how many ulps there may be between both.
FUNCTIONS = {
    "absolute": (np.absolute, 0),
    "cos": (np.cos, 1.6),
    "exp": (np.exp, 1.2),
    "log": (np.log, 1.2),
    "expm1": (np.expm1, 2),
    "log1p": (np.log1p, 1.2),
    "sigmoid": (sigmoid, 3),
    "sin": (np.sin, 1.6),
    "softplus": (softplus, 2),
    "sqrt": (np.sqrt, 0.501),
    "tanh": (np.tanh, 3),
}
WRITERS = {name: of_one(getattr(functions, name)) for name in FUNCTIONS}
EACH: Any = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def numbers(request: pytest.FixtureRequest) -> Array:
    """Numbers of all sizes and signs, most where functions bend, and where they end."""
    rng, count = np.random.default_rng(), examples(40_000)
    limits = np.finfo(request.param)
    powers = 10.0 ** rng.uniform(limits.minexp * 0.3, 0, (3, count))
    parts = [
        rng.uniform(-1, 1, count),
        rng.uniform(-12, 12, count),
        rng.uniform(-100, 100, count),
        rng.uniform(-800, 800, count),
        rng.choice([-1, 1], count) * 10.0 ** rng.uniform(limits.minexp * 0.3, 3, count),
        rng.choice([-1, 1], count) * 10.0 ** rng.uniform(0, limits.maxexp * 0.3, count),
        np.log(2) * (rng.integers(-1500, 1500, count) + rng.choice([0, 0.5], count)) / 2,
        # Where logarithms are small, and where those of 1 + x have no end.
        1 + rng.choice([-1, 1], count) * powers[0] ** rng.uniform(0, 1, count),
        powers[1] ** rng.uniform(0, 0.3, count) - 1,
        # Next to where sine or cosine is 0, and on both sides of where a library is called.
        np.pi / 2 * np.rint(10.0 ** rng.uniform(0, 9, count)),
        2.0 ** rng.uniform(14, 27, count),
        [0.0, -0.0, 1.0, -1.0, limits.tiny, -limits.tiny, limits.max, -limits.max],
        [np.nan, np.inf, -np.inf],
    ]
    # No lane shares its vector with its like.
    return rng.permutation(np.concatenate(parts).astype(request.param))


def check(name: str, x: Array, *, flushes: bool = False) -> None:
    """Compare a function with that of NumPy: infinities, NaN, signs of 0, and all others."""
    oracle, ulps = FUNCTIONS[name]
    limits = np.finfo(x.dtype)
    actual = values(WRITERS[name], x, flushes=flushes)
    with np.errstate(all="ignore"):
        expected = oracle(x.astype(np.longdouble))
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        zero = expected == 0
        np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(expected[zero]))
        # Infinity is as far from the greatest number as that from the one before.
        most = np.longdouble(limits.max) * (1 + limits.eps)
        apart = np.abs(
            np.clip(actual.astype(np.longdouble), -most, most) - expected.clip(-most, most)
        )
        size = np.abs(expected).clip(limits.tiny, limits.max)
        unit = limits.eps * 2.0 ** np.floor(np.log2(size))
        allowed = ulps * unit
        # Below normal numbers it may be 0.
        allowed = np.where(np.abs(expected) < 1.01 * limits.tiny, 1.01 * limits.tiny, allowed)
        wrong = apart > allowed
    assert not np.any(wrong), (x[wrong][:5], actual[wrong][:5], expected[wrong][:5])


@EACH
@pytest.mark.parametrize("flushes", [False, True])
def test_functions(name: str, numbers: Array, flushes: bool) -> None:
    check(name, numbers, flushes=flushes)


@EACH
@given(st.data())
def test_functions_of_odd_numbers(name: str, data: st.DataObject) -> None:
    dtype: Any = data.draw(st.sampled_from([np.float32, np.float64]))
    check(name, np.array(data.draw(st.lists(floats(dtype), min_size=1)), dtype))


def floats(dtype: Any) -> st.SearchStrategy[float]:
    """Return a strategy of numbers of a dtype: any, and often one that others are as well."""
    width: Any = 8 * np.dtype(dtype).itemsize
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]
    return st.sampled_from(special) | st.floats(width=width, allow_subnormal=False)


def test_limits_of_tanh_and_sigmoid(numbers: Array) -> None:
    x = numbers[~np.isnan(numbers)]
    actual = values(WRITERS["tanh"], x)
    assert np.max(np.abs(actual)) == 1
    assert np.array_equal(np.signbit(actual), np.signbit(x))
    actual = values(WRITERS["sigmoid"], x)
    assert np.min(actual) == 0
    assert np.max(actual) == 1


KINDS: Any = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])

PAIRS: dict[str, Any] = {
    "minimum": np.minimum,
    "maximum": np.maximum,
    "less": np.less,
    "less_equal": np.less_equal,
    "equal": np.equal,
}
PAIR_WRITERS = {name: of_two(getattr(functions, name)) for name in PAIRS}
write_where = of_three(functions.where)
write_lesser = of_two(numba.njit(lambda a, b: functions.where(functions.less(a, b), a, b)))


@pytest.mark.parametrize("name", PAIRS)
@given(st.data())
def test_functions_of_two(name: str, data: st.DataObject) -> None:
    dtype: Any = data.draw(st.sampled_from([np.float32, np.float64]))
    pairs = data.draw(st.lists(st.tuples(floats(dtype), floats(dtype)), min_size=1))
    x, y = np.array(pairs, dtype).T.copy()
    np.testing.assert_array_equal(values(PAIR_WRITERS[name], x, y), PAIRS[name](x, y))


@KINDS
@given(st.data())
def test_where(dtype: Any, data: st.DataObject) -> None:
    every = st.tuples(*[floats(dtype)] * 3)
    c, a, b = np.array(data.draw(st.lists(every, min_size=1)), dtype).T.copy()
    np.testing.assert_array_equal(values(write_where, c, a, b), np.where(c != 0, a, b))
    np.testing.assert_array_equal(values(write_lesser, a, b), np.where(a < b, a, b))


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
    sums = gathers.gather_4(some, x, (0, 3, 2, 1), x, places, 0, 7)
    lanes.store_totals(out, begin, sums, False)
    begin += 4
    lanes.put_four(out, begin, x, (5, 3, 8, 0))
    return begin + 4


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


# -- Tiles -----------------------------------------------------------------------------------------


@numba.njit
def write_tile(out: Array, vectors: Array, numbers: Array, width: int, height: int) -> None:
    size, count = tiles.TILE_VECTORS * lanes.lane_count(out), numbers.shape[1]
    flat, start = numbers.reshape(-1), np.zeros(size, out.dtype)
    tiles.add_tile(
        *(out.reshape(-1), 0, size, start, 0, 0, vectors.reshape(-1), 0),
        *(flat, 0, count, 1, 0, 1, count, 5, width, height),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiles_have_as_many_rows_as_there_are(dtype: Any) -> None:
    rng, lane = np.random.default_rng(), lanes.lanes(dtype)
    for height in range(1, tiles.TILE_ROWS + 3):
        for width in range(1, tiles.TILE_VECTORS + 1):
            vectors = rng.standard_normal((13, tiles.TILE_VECTORS * lane)).astype(dtype)
            numbers = rng.standard_normal((tiles.TILE_ROWS + 3, 13)).astype(dtype)
            out = np.full((tiles.TILE_ROWS + 3, vectors.shape[1]), np.nan, dtype)
            write_tile(out, vectors, numbers, width, height)
            rows, columns = min(height, tiles.TILE_ROWS), width * lane
            right = numbers[:rows].astype(float) @ vectors[:, :columns]
            found = out[:rows, :columns]
            np.testing.assert_allclose(found, right, 0, 100 * np.finfo(dtype).eps)
            out[:rows, :columns] = np.nan
            assert np.isnan(out).all()
