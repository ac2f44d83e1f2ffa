"""Runs of a plan on a device: what the host asks for in each, and what it keeps."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
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
from sparsescan.execution.device import DeviceWorkspace  # noqa: E402


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


def workspace_of(plan: ScanPlan) -> DeviceWorkspace:
    """Return the one workspace of a plan that has run."""
    (slot,) = plan._idle
    (workspace,) = slot._workspaces.values()
    return workspace


# -- Captures that fail ---------------------------------------------------------------------------


def test_why_a_capture_failed_is_kept(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = fake_cupy.CUDARuntimeError("cudaErrorStreamCaptureUnsupported: not here")

    def refuse(self: Any, mode: Any = None) -> None:
        raise error

    monkeypatch.setattr(DeviceWorkspace, "captures", Counter())
    plan, chain = linear(), chain_on(cupy)
    expected = plan.exclusive_scan(*chain).get()
    assert workspace_of(plan).capture_error is None
    with monkeypatch.context() as patch:
        patch.setattr(fake_cupy.Stream, "begin_capture", refuse, raising=False)
        for _ in range(3):
            np.testing.assert_array_equal(plan.exclusive_scan(*chain).get(), expected)
    said = "CUDARuntimeError: cudaErrorStreamCaptureUnsupported: not here"
    assert workspace_of(plan).capture_error == said
    assert DeviceWorkspace.captures == {said: 1}
    other = linear()
    for _ in range(3):
        np.testing.assert_array_equal(other.exclusive_scan(*chain).get(), expected)
    assert workspace_of(other).capture_error is None
    assert DeviceWorkspace.captures == {said: 1, "captured": 1}


def test_the_first_reason_is_kept(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a capture that a launch has spoilt only says that it is invalid."""
    plan, chain = linear(), chain_on(cupy)
    plan.exclusive_scan(*chain)

    def spoil(stream: Any) -> None:
        if stream.is_capturing():
            stream.wait_event(cupy.cuda.Event())

    workspace = workspace_of(plan)
    assert workspace._actions[False] is not None
    workspace._actions[False].append(spoil)
    try:
        raise ValueError("of the caller")
    except ValueError:
        plan.exclusive_scan(*chain)
    assert workspace.capture_error is not None
    assert workspace.capture_error.startswith("CUDARuntimeError: cudaErrorStreamCaptureIsolation")


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
