"""Elementwise functions of cells as compiled, beside PyTorch, also of what is no number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")
torch = pytest.importorskip("torch")

from numba import cuda, int64, void  # noqa: E402
from ptx import Program, lower  # noqa: E402

from sparsescan.kernels.cuda.device import load, store  # noqa: E402
from sparsescan.kernels.cuda.elementwise import elementwise  # noqa: E402

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30, -1e-30]
NUMBERS = np.array([*SPECIAL, *np.linspace(-21, 21, 23), *np.geomspace(1e-8, 3e5, 32)])
UNARY: dict[str, Callable[[Any], Any]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "absolute": torch.abs,
    "relu": torch.relu,
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "less": lambda a, b: 1.0 * (a < b),
    "less_equal": lambda a, b: 1.0 * (a <= b),
}


def run(kernel: Any, *arrays: np.ndarray[Any, Any]) -> None:
    """Run a kernel of some arrays, with a thread for each number."""
    text = lower(kernel.py_func, void(*[int64] * (len(arrays) + 1))).ptx("9.0")
    memory = [(array.ctypes.data, array.nbytes) for array in arrays]
    places = [array.ctypes.data for array in arrays]
    Program(text, kernel.py_func.__name__).launch(1, 64, [*places, len(arrays[0])], memory)


def agree(actual: Any, expected: Any, dtype: Any) -> None:
    bound = 8 * np.finfo(dtype).eps
    with np.errstate(over="ignore"):
        rounded = expected.numpy().astype(dtype)
    np.testing.assert_allclose(actual, rounded, rtol=bound, atol=0)


# For float64 NVVM calls a function where a sine is of a large number, and the runner has no calls.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, d)
        for name in UNARY
        for d in ("f4", "f8")
        if (name, d) not in {("sin", "f8"), ("cos", "f8")}
    ],
)
def test_functions_of_one_number(name: str, dtype: str) -> None:
    functions = elementwise(np.dtype(dtype))
    function, zero = functions[name], functions["zero"]

    @cuda.jit
    def kernel(x, y, n):
        i = int64(cuda.threadIdx.x)
        if i < n:
            store(y, i, function(load(x, i, zero)), zero)

    x = NUMBERS.astype(dtype)
    y = np.full_like(x, np.nan)
    run(kernel, x, y)
    agree(y, UNARY[name](torch.from_numpy(x.astype("f8"))), dtype)


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str) -> None:
    functions = elementwise(np.dtype("f4"))
    function, where, zero = functions[name], functions["where"], functions["zero"]

    @cuda.jit
    def kernel(a, b, y, chosen, n):
        i = int64(cuda.threadIdx.x)
        if i < n:
            value = function(load(a, i, zero), load(b, i, zero))
            store(y, i, value, zero)
            store(chosen, i, where(value, load(a, i, zero), load(b, i, zero)), zero)

    a, b = (
        each.ravel().astype("f4")
        for each in np.meshgrid([*SPECIAL[:5], 1, 2], [*SPECIAL[:5], 2, 1])
    )
    y, chosen = np.full_like(a, 7), np.full_like(a, 7)
    run(kernel, a, b, y, chosen)
    expected = BINARY[name](torch.from_numpy(a), torch.from_numpy(b))
    agree(y, expected, "f4")
    np.testing.assert_array_equal(chosen, np.where(expected.numpy() != 0, a, b))
