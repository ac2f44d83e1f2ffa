"""Arguments of recursive filters of JAX's front door."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from sparsescan import DeviceError, InputError, InputTypeError
from sparsescan.jax import lfilter, sosfilt


def test_numbers_take_the_dtype_of_samples() -> None:
    x = np.ones(3, np.float32)
    for b, a in ((1, 2.0), (0.5, 2)):
        y = lfilter(b, a, x)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, x * (b / a), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.0], [1.0], [1.0], 2), InputError, "axis is 2"),
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
