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
from oracles import assert_within, sequential  # noqa: E402

import sparsescan  # noqa: E402
from sparsescan import Pattern, ScanPlan  # noqa: E402
from sparsescan.execution.cuda.workspace import DeviceWorkspace  # noqa: E402

F64 = np.dtype(np.float64)
# What a replay asks for, whether or not its arrays lie where those of the run before did.
ALWAYS = Counter(
    {
        "cupy.cuda.runtime.getDeviceCount": 1,
        "cupy.cuda.runtime.getDevice": 1,
        "cupy.cuda.get_current_stream": 1,
        "Stream.is_capturing": 1,
        "cupy.empty": 1,
        "ndarray.__setitem__": 1,
        "Graph.launch": 1,
        "Event.record": 1,
    }
)
SAME = ALWAYS + Counter({"MemoryPointer.memset_async": 1})
OTHER = ALWAYS + Counter(
    {"Event.done": 1, "MemoryPointer.copy_from_host_async": 1, "Event.record": 1}
)


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
    (workspace,) = slot.workspaces.values()
    return workspace


# -- What a replay asks for -----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["stack", "list"])
@pytest.mark.parametrize("stream", [None, 0, OfPyTorch(0)], ids=["", "0", "PyTorch's"])
def test_a_replay_asks_for_little(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, form: str, stream: Any
) -> None:
    """No device and no stream is made the current one, and nothing waits."""
    counts = fake_cupy.count(monkeypatch)
    plan, (grad, values) = linear(), chain_on(cupy)
    values = values if form == "stack" else list(values)

    def replay() -> Counter[str]:
        cupy.cuda.Device().synchronize()
        counts.clear()
        results.append(plan.exclusive_scan(grad, values, stream=stream))
        return counts

    results: list[Any] = []
    for k in range(5):
        replay()
        assert k < 2 or counts == OTHER
    room = cupy.empty(4 * 3)
    monkeypatch.setattr(cupy, "empty", lambda shape, dtype: fake_cupy.note("cupy.empty") or room)
    assert replay() == OTHER
    for _ in range(3):
        assert replay() == SAME


def test_numba_works_on_the_device_while_kernels_are_launched(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one in the first run, and into a graph in the second; a graph needs it no more."""
    plan, chain = linear(), chain_on(cupy)
    counts = fake_cupy.count(monkeypatch)
    pushed = []
    for _ in range(4):
        counts.clear()
        plan.exclusive_scan(*chain)
        pushed.append(counts["Numba's context"])
    assert pushed == [1, 1, 0, 0]
    workspace = workspace_of(plan)
    workspace._graphs[False], workspace._may_capture = None, False
    counts.clear()
    plan.exclusive_scan(*chain)
    assert counts["Numba's context"] == 1


def test_another_device_is_made_the_current_one_once(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = linear()
    with cupy.cuda.Device(1):
        chain = chain_on(cupy)
    for _ in range(3):
        plan.exclusive_scan(*chain)
    counts = fake_cupy.count(monkeypatch)
    plan.exclusive_scan(*chain)
    assert counts["Device.__enter__"] == 1
    assert counts["Stream.wait_event"] == 0
    with cupy.cuda.Device(1):
        counts.clear()
        plan.exclusive_scan(*chain)
    assert counts["Device.__enter__"] == 0


def test_a_run_waits_for_that_of_another_stream(cupy: Any) -> None:
    plan, chain = linear(), chain_on(cupy)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    plan.exclusive_scan(*chain, stream=first)
    for stream, waits in (
        *((first, False), (second, True), (second, False)),
        # Objects differ, and the stream does not.
        *((second.ptr, False), (first.ptr, True), (None, True), (None, False)),
    ):
        state.waited.clear()
        plan.exclusive_scan(*chain, stream=stream)
        handle = 0 if stream is None else getattr(stream, "ptr", stream)
        assert state.waited == [(0, handle)] * waits
    # One handle stands for another stream in each thread.
    own = cupy.cuda.Stream(ptds=True)
    for _ in range(3):
        state.waited.clear()
        plan.exclusive_scan(*chain, stream=own)
        assert state.waited == [(0, own.ptr)]


def test_values_change_where_they_are(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent then but that the flag of values that are not finite is lowered."""
    plan = sparsescan.plan([Pattern.dense((3, 3))] * 8, schedule="blelloch")
    rng = np.random.default_rng(0)
    grad, steps = rng.standard_normal(3), rng.standard_normal((8, 3, 3))
    bad = steps.copy()
    bad[2, 1, 1] = np.inf
    there, room = (cupy.asarray(grad), cupy.asarray(steps)), cupy.empty(8 * 3)
    plan.exclusive_scan(*there)
    monkeypatch.setattr(cupy, "empty", lambda shape, dtype: room)
    counts = fake_cupy.count(monkeypatch)
    flags = []
    for given in (steps, bad, steps, bad, bad, steps, steps):
        there[1].set(given)
        result = plan.exclusive_scan(*there).get()
        flags.append(int(workspace_of(plan)._run.get()[0]))
        if given is steps:
            assert_within(result, sequential(grad, steps), F64)
        else:
            assert not np.isfinite(result).all()
    assert flags == [0, 1, 0, 1, 1, 0, 0]
    assert counts["MemoryPointer.copy_from_host_async"] == 1
    assert counts["MemoryPointer.memset_async"] == 6


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
    # Patterns are uploaded once, and keep the stream of that, too: as long as anybody has them.
    first, chain = linear(), chain_on(cupy)
    first.exclusive_scan(*chain)
    plan = linear()
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
