"""Subnormal numbers count as 0 while kernels run, and not for the caller before or after."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparsescan
from sparsescan import CSRChain, Pattern
from sparsescan.execution.threads import share, work
from sparsescan.kernels.cpu import flushing
from sparsescan.recurrent import GRU, LSTM, RNN

HAS_MODE = platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64")
pytestmark = pytest.mark.skipif(not HAS_MODE, reason="this processor has no such mode")

SMALL = np.array([1e-40], np.float32)


def counts() -> bool:
    """Return whether subnormal numbers count on this thread."""
    return bool((SMALL * np.ones(1, np.float32))[0] != 0)


@pytest.fixture(params=[True, False], ids=["as usual", "flushed by the caller"])
def before(request: pytest.FixtureRequest) -> Any:
    """Set the mode that the caller has, and return whether subnormal numbers count in it."""
    mode = flushing.mode()
    if not request.param:
        flushing.flush()
    yield request.param
    flushing.set_mode(mode)


def decaying(dtype: Any = np.float32) -> CSRChain:
    return CSRChain.from_pattern(np.full((400, 3), 0.5, dtype), Pattern.diagonal(3))


def train(kind: Any) -> None:
    step = kind(2, 3, rng=0).training_step()
    output, _ = step.forward(np.ones((400, 5, 2), np.float32))
    step.backward(output)


def scan_dense() -> None:
    sparsescan.exclusive_scan(np.ones(3), [np.eye(3) / 2] * 400, schedule="blelloch")


CALLS: dict[str, Callable[[], Any]] = {
    "exclusive_scan": lambda: sparsescan.exclusive_scan(np.ones(3, np.float32), decaying()),
    "a tree": scan_dense,
    "affine_scan": lambda: sparsescan.affine_scan(np.full((400, 3, 3), 0.1), np.ones((400, 3))),
    "RNN": lambda: train(RNN),
    "GRU": lambda: train(GRU),
    "LSTM": lambda: train(LSTM),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_mode_is_back_after_a_call(name: str, before: bool) -> None:
    for _ in range(2):
        CALLS[name]()
        assert counts() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_mode_is_back_after_an_error(error: Any, parts: int, before: bool) -> None:
    def fail(k: int) -> None:
        assert not counts()
        if k == parts - 1:
            raise error

    with pytest.raises(error):
        share(fail, parts)
    assert counts() == before

    def fail_alone(_tables: Any, _thread: int) -> None:
        assert not counts()
        raise error

    with pytest.raises(error):
        work(fail_alone, None, 1)
    assert counts() == before


def test_all_threads_of_a_call() -> None:
    seen: dict[int, bool] = {}
    meet = threading.Barrier(2, timeout=30)

    def look(_k: int) -> None:
        seen[threading.get_ident()] = counts()
        meet.wait()

    share(look, 2)
    assert list(seen.values()) == [False, False]
    assert counts()


@given(st.sampled_from([np.float32, np.float64]), st.booleans())
def test_subnormal_gradients_are_zeros(dtype: Any, is_tree: bool) -> None:
    """From the step on behind which they are no normal numbers, whatever the schedule."""
    steps = 200 if dtype == np.float32 else 1200
    chain = CSRChain.from_pattern(np.full((steps, 2), 0.5, dtype), Pattern.diagonal(2))
    schedule = "blelloch" if is_tree else "linear"
    grads = sparsescan.inclusive_scan(np.ones(2, dtype), chain, schedule=schedule)
    exact = 0.5 ** np.arange(steps + 1.0)
    exact[exact < np.finfo(dtype).tiny] = 0
    assert np.array_equal(grads[:, 0], exact)
