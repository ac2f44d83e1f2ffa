"""CUDA kernels against the CPU engine: in Numba's simulator, or on a device where there is one.

Not collected by itself; tests/test_cuda.py runs it in a process with ``NUMBA_ENABLE_CUDASIM=1``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsescan
from sparsescan.kernels.cuda import chunk_kernels


def scan(
    grad: np.ndarray, jacobians: np.ndarray, chunk: int, local_grads: list[Any]
) -> tuple[np.ndarray, bool]:
    """An inclusive scan in three phases, and whether it had to be repaired."""
    steps, batch, size, _ = jacobians.shape
    kernels = chunk_kernels(size, jacobians.dtype)
    first = jacobians.ctypes.data
    leaves = np.array(
        [[first + k * jacobians.strides[0], jacobians.strides[1]] for k in range(steps)], np.int64
    )
    local = np.array([0 if array is None else array.ctypes.data for array in local_grads], np.int64)
    chunks = -(-steps // chunk)
    shape = np.array([steps, batch, chunk], np.int64)
    out = np.full((steps + 1) * batch * size, np.nan, jacobians.dtype)
    out[: batch * size] = grad.ravel()
    columns = np.full(batch * (chunks - 1) * (size + 1) * size, np.nan, jacobians.dtype)
    exponents = np.full(batch * (chunks - 1) * (size + 1), 99, np.int32)
    flag = np.zeros(1, np.int32)
    threads = kernels.threads
    if chunks > 1:
        given = leaves, local, shape, out, columns, exponents, flag
        kernels.multiply[(chunks - 1, batch), threads](*given)
        kernels.carry[batch, threads](*given, chunks - 1)
    kernels.sweep[(chunks, batch), threads](leaves, local, shape, out, flag)
    kernels.repair[batch, threads](leaves, local, shape, out, flag)
    return out.reshape(steps + 1, batch, size), bool(flag[0])


def chain(
    rng: np.random.Generator, steps: int, batch: int, size: int, scale: float, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    grad = rng.standard_normal((batch, size)).astype(dtype)
    return grad, (rng.standard_normal((steps, batch, size, size)) * scale).astype(dtype)


def compare(found: np.ndarray, expected: Any, dtype: Any, steps: int) -> None:
    """Equal up to rounding, at the scale of each gradient of each sample."""
    expected = np.asarray(expected)
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    tiny = np.finfo(dtype).tiny
    assert found.dtype == expected.dtype
    assert (np.abs(found - expected) <= 64 * steps * np.finfo(dtype).eps * scale + tiny).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("steps", "chunk"), [(1, 1), (1, 4), (5, 1), (6, 3), (7, 3), (8, 9)])
@pytest.mark.parametrize("local", [False, True])
def test_chunked(dtype: Any, steps: int, chunk: int, local: bool) -> None:
    rng = np.random.default_rng(steps + 10 * chunk)
    grad, jacobians = chain(rng, steps, 2, 3, 0.8, dtype)
    local_grads: list[Any] = [None] * (steps + 1)
    if local:
        # The first is in the gradient already, when the kernels run; one of the others is missing.
        for k in range(1, steps + 1, 2):
            local_grads[k] = rng.standard_normal((2, 3)).astype(dtype)
    found, repaired = scan(grad, jacobians, chunk, local_grads)
    assert not repaired
    expected = sparsescan.inclusive_scan(grad, jacobians, local_grads=local_grads)
    compare(found, expected, dtype, steps)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.float32, 1e-12), (np.float32, 1e12), (np.float64, 1e-90), (np.float64, 1e90)],
)
def test_products_beyond_the_range_of_a_dtype(dtype: Any, scale: float) -> None:
    rng = np.random.default_rng(3)
    grad, jacobians = chain(rng, 8, 1, 2, 1.0, dtype)
    # Gradients stay in range, the product of a chunk of four does not.
    jacobians[0:3:2] *= scale
    jacobians[1:4:2] *= 1 / scale
    jacobians[4:6] *= scale
    grad *= 1 / np.sqrt(scale)
    found, repaired = scan(grad, jacobians, 4, [None] * 9)
    assert not repaired
    compare(found, sparsescan.inclusive_scan(grad, jacobians), dtype, 8)


def test_columns_may_explode_and_decay_beside_each_other() -> None:
    jacobians = np.zeros((40, 1, 2, 2), np.float32)
    jacobians[:, 0, 0, 0], jacobians[:, 0, 1, 1] = 8.0, 0.125
    grad = np.array([[2.0**-126, 1.0]], np.float32)
    found, repaired = scan(grad, jacobians, 20, [None] * 41)
    assert not repaired
    np.testing.assert_array_equal(found, sparsescan.inclusive_scan(grad, jacobians))


@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_left_to_the_linear_scan(bad: float) -> None:
    grad, jacobians = chain(np.random.default_rng(4), 6, 2, 3, 0.8, np.float64)
    jacobians[2, 1, 0, 1] = bad
    found, repaired = scan(grad, jacobians, 2, [None] * 7)
    assert repaired
    with np.errstate(all="ignore"):
        expected = np.asarray(sparsescan.inclusive_scan(grad, jacobians, schedule="linear"))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-13)


@pytest.mark.parametrize(("size", "dtype"), [(1, np.float32), (33, np.float64), (64, np.float64)])
def test_sizes(size: int, dtype: Any) -> None:
    """One thread; more threads than a warp; what does not fit into shared memory twice."""
    grad, jacobians = chain(np.random.default_rng(5), 2, 1, size, 1 / np.sqrt(size), dtype)
    found, _ = scan(grad, jacobians, 1, [None] * 3)
    compare(found, sparsescan.inclusive_scan(grad, jacobians), dtype, 2 * size)
