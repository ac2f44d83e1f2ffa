"""Recursive filters of JAX's front door, beside SciPy's, and their arguments."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import scipy.signal
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.jax import lfilter, sosfilt

EPS = np.finfo(np.float64).eps


def near(ours: Any, theirs: Any, factor: float = 1000 * EPS) -> None:
    for one, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.shape == right.shape
        scale = 1 + float(np.abs(right).max(initial=0))
        np.testing.assert_allclose(one, right, rtol=0, atol=factor * scale)


@settings(max_examples=examples(12))
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_as_scipy(b_taps: int, a_taps: int, shape: list[int], has_zi: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(-len(shape), len(shape)))
    shape[axis] = int(rng.choice([0, 3, 300]))
    unit = rng.choice([1, 1j], 2)
    b, a = rng.standard_normal(b_taps) * unit[0], rng.standard_normal(a_taps) / (2 * a_taps)
    a[0] = rng.choice([1.0, -2.0, 0.5])
    x = rng.standard_normal(shape) * (1 + unit[1])
    if rng.random() < 0.3:
        a = a * np.exp(1j * np.arange(a_taps))
    if not has_zi:
        right = scipy.signal.lfilter(b, a, x, axis) if x.size else x.astype(np.result_type(b, a, x))
        found = lfilter(b, a, x, axis)
        assert found.dtype == right.dtype
        near(found, right)
        return
    shape[axis] = max(b_taps, a_taps) - 1
    zi = rng.standard_normal(shape)
    y, zf = lfilter(b, a, x, axis, zi)
    assert (y.shape, zf.shape) == (x.shape, zi.shape)
    if x.size:
        near([y, zf], scipy.signal.lfilter(b, a, x, axis, zi))
    elif not x.shape[axis]:
        near(zf, zi)
    if x.shape[axis]:  # constant coefficients, of each step
        steps = x.shape[axis]
        changing = [np.broadcast_to(each, (steps, len(each))) for each in (b, a)]
        near(lfilter(*changing, x, axis, zi), [y, zf])


def test_numbers_take_the_dtype_of_samples() -> None:
    x = np.ones(3, np.float32)
    for b, a in ((1, 2.0), (0.5, 2)):
        y = lfilter(b, a, x)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, x * (b / a), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.0], [0.0, 1.0], [1.0]), InputError, r"a\[0\] is 0"),
        (([], [1.0], [1.0]), InputError, "b has shape"),
        (([1.0], [1.0], [1.0], 2), InputError, "axis is 2"),
        (([1.0], [[1.0], [1.0]], [1.0]), InputError, "a has coefficients of 2 steps"),
        (([1.0], [1.0, 0.5], [1.0], -1, [0.0, 0.0]), InputError, "zi has shape"),
        (([1.0], [1.0], [1]), InputTypeError, "x has dtype int"),
        (([1.0], [1.0], None), InputTypeError, "x is None"),
        ((None, [1.0], [1.0]), InputTypeError, "b is None"),
        (("no", [1.0], [1.0]), InputTypeError, "b is 'no'"),
    ],
)
def test_errors(arguments: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        lfilter(*arguments)


def test_errors_of_sections(monkeypatch: Any) -> None:
    with pytest.raises(InputError, match="sos has shape"):
        sosfilt(np.ones(6), np.ones(3))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(DeviceError, match="'gpu'"):
        sosfilt(np.ones((1, 6)), np.ones(3))
