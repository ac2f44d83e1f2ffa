"""Sweeps through many small steps on a CUDA device, beside SciPy in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import SIMULATED, chain_on, cupy_or_stand_in, jacobians_on, to_host
from oracles import STRUCTURES, assert_within, chains, mask, sequential
from sampling import examples

import sparsescan
from sparsescan import BatchedCSR
from sparsescan.execution.cuda import launches as programs
from sparsescan.kernels.cuda.sweeps import ROWS, STAGED, THREADS
from sparsescan.symbolic.pattern import of_mask


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


@pytest.fixture
def launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All launches, which only the stand-in tells."""
    if not SIMULATED:
        return []
    import fake_cupy

    return fake_cupy.watch(monkeypatch)


def has_swept(launches: list[Any]) -> bool:
    """Whether a sweep was launched, where launches are known."""
    return not SIMULATED or "sweep_steps" in {launch.kernel for launch in launches}


def call(inclusive: bool) -> Any:
    return sparsescan.inclusive_scan if inclusive else sparsescan.exclusive_scan


@pytest.mark.parametrize("wide", [False, True])
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_any_chain_of_small_steps(
    monkeypatch: pytest.MonkeyPatch, cupy: Any, launches: list[Any], wide: bool, data: Any
) -> None:
    """With indices of either width."""
    launches.clear()
    chain = data.draw(chains(max_n=24, max_size=9))
    grad, jacobians, local = chain_on(cupy, chain)
    with monkeypatch.context() as patch:
        if wide:
            patch.setattr(programs, "_index_dtype", lambda program: np.dtype(np.int64))
        gradients = call(chain.inclusive)(grad, jacobians, local_grads=local, schedule="linear")
    assert_within(to_host(gradients), chain.oracle(), chain.dtype)
    assert has_swept(launches) or len(chain.jacobians) < 3 or chain.batch == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_as_large_as_fit(cupy: Any, launches: list[Any], dtype: Any) -> None:
    """Some with as many rows, others with as many entries."""
    rng = np.random.default_rng()
    rows, entries = ROWS * THREADS, STAGED * THREADS
    sizes = [rows, rows, 5, rows - 1, 2, entries // 2, 3]
    sizes = [min(size, rows) for size in sizes]
    masks = [np.zeros((b, a), bool) for a, b in pairwise(sizes)]
    for each in masks:
        many = min(entries, each.size)
        each.ravel()[rng.choice(each.size, many, replace=False)] = True
    steps = [sp.csr_array(each * rng.standard_normal(each.shape)).astype(dtype) for each in masks]
    grad = rng.standard_normal(sizes[0]).astype(dtype)
    gradients = sparsescan.inclusive_scan(
        cupy.asarray(grad), jacobians_on(cupy, steps), schedule="linear"
    )
    wanted = sequential(grad, steps, inclusive=True, dtype=dtype)
    assert_within(to_host(gradients), wanted, dtype)
    assert has_swept(launches)


TALL, FULL = ROWS * THREADS + 1, math.isqrt(STAGED * THREADS) + 1


@pytest.mark.parametrize("sizes", [(2, TALL, 2, 2), (FULL, FULL, FULL)])
def test_steps_that_are_too_large(cupy: Any, launches: list[Any], sizes: tuple[int, ...]) -> None:
    """By their rows, or by entries."""
    rng = np.random.default_rng()
    steps = [sp.csr_array(rng.standard_normal((b, a))) for a, b in pairwise(sizes)]
    grad = rng.standard_normal(sizes[0])
    gradients = sparsescan.inclusive_scan(
        cupy.asarray(grad), jacobians_on(cupy, steps), schedule="linear"
    )
    assert_within(to_host(gradients), sequential(grad, steps, inclusive=True), np.float64)
    assert not SIMULATED or not has_swept(launches)


@pytest.mark.parametrize("steps", [3, 9, 10, 11, 18, 40])
@pytest.mark.parametrize("shared", [False, True])
def test_the_patterns_of_steps_change_or_do_not(cupy: Any, steps: int, shared: bool) -> None:
    """Rows of the table, addresses and values are loaded so many steps ahead, or fewer."""
    rng, size, batch = np.random.default_rng(), 7, 2
    kinds = [str(rng.choice(STRUCTURES)) for _ in range(steps)]
    some = [of_mask(mask(rng, kind, size, size)) for kind in kinds]
    patterns = [some[0]] * steps if shared else some
    jacobians = [
        BatchedCSR.from_pattern(rng.standard_normal((batch, p.nnz)).astype(np.float32), p)
        for p in patterns
    ]
    grad = rng.standard_normal((batch, size)).astype(np.float32)
    local = [rng.standard_normal((batch, size)).astype(np.float32) for _ in range(steps)]
    local[1] = None
    gradients = sparsescan.exclusive_scan(
        cupy.asarray(grad),
        jacobians_on(cupy, jacobians),
        local_grads=[None if x is None else cupy.asarray(x) for x in local],
        schedule="linear",
    )
    assert_within(
        to_host(gradients), sequential(grad, jacobians, local, dtype=np.float32), np.float32
    )


def test_several_lanes_add_up_long_rows(cupy: Any, launches: list[Any]) -> None:
    rng = np.random.default_rng()
    wide = min(ROWS * THREADS, STAGED * THREADS // 2)
    sizes = [1, wide, 1, wide, 2, 1, wide, 1, wide, 2]
    steps = [rng.standard_normal((b, a)) for a, b in pairwise(sizes)]
    grad = rng.standard_normal(1)
    gradients = sparsescan.inclusive_scan(
        cupy.asarray(grad), jacobians_on(cupy, steps), schedule="linear"
    )
    assert_within(to_host(gradients), sequential(grad, steps, inclusive=True), np.float64)
    assert has_swept(launches)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_scanned_again_by_a_sweep(
    cupy: Any, launches: list[Any], bad: float
) -> None:
    rng = np.random.default_rng()
    steps = [
        sp.csr_array(rng.standard_normal((6, 6)) * (rng.random((6, 6)) < 0.5)) for _ in range(8)
    ]
    steps[3].data[0] = bad
    grad = rng.standard_normal(6)
    gradients = sparsescan.exclusive_scan(
        cupy.asarray(grad), jacobians_on(cupy, steps), schedule="blelloch"
    )
    wanted = sequential(grad, steps)
    for actual, exact in zip(to_host(gradients), wanted.exact, strict=True):
        finite = np.isfinite(exact)
        assert (np.isfinite(actual) == finite).all()
        assert np.allclose(actual[finite], exact[finite])
    assert not SIMULATED or launches[-1].kernel == "sweep_steps"
