"""Runs of a plan on a device: what the host asks for in each, and what it keeps."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

import fake_cupy  # noqa: E402
import ptx.stand_in  # noqa: E402
from fake_cupy import state  # noqa: E402

import sparsescan  # noqa: E402
from sparsescan import Pattern, ScanPlan  # noqa: E402


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    ptx.stand_in.install(monkeypatch)
    monkeypatch.setattr("sparsescan.arrays.streams._pinned", {})
    fake_cupy.watch(monkeypatch)  # a graph launches what it has captured
    return fake_cupy.install(monkeypatch)


class OfPyTorch:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class OfAnyone:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def linear(steps: int = 4, size: int = 3) -> ScanPlan:
    return sparsescan.plan([Pattern.dense((size, size))] * steps, schedule="linear")


def chain_on(cupy: Any, steps: int = 4, size: int = 3) -> tuple[Any, Any]:
    return cupy.asarray(np.ones(size)), cupy.asarray(np.ones((steps, size, size)))


# -- Streams of others ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated")
@pytest.mark.parametrize("version", [13, 14])
@pytest.mark.parametrize("kind", [OfPyTorch, OfAnyone])
def test_a_stream_lives_as_long_as_memory_that_was_made_on_it(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: Any, version: int
) -> None:
    """A plan that goes lets it wait for the last run."""
    if version < 14:
        monkeypatch.delattr(fake_cupy.Stream, "from_external")
    linear().exclusive_scan(*chain_on(cupy))  # compiles, which may keep frames for a while
    plan, chain = linear(size=5), chain_on(cupy, size=5)
    stream, other = kind(0x7000), kind(0x8000)
    alive = weakref.ref(stream)
    plan.exclusive_scan(*chain, stream=stream)
    plan.exclusive_scan(*chain, stream=other)
    del stream
    gc.collect()
    assert alive() is not None
    state.waited.clear()
    del plan
    gc.collect()
    assert (0, 0x7000) in state.waited
    assert alive() is None
