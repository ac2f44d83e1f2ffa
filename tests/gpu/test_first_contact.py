"""CuPy and numba-cuda on a machine with a GPU: what no simulator of kernels shows."""

from __future__ import annotations

import ctypes
import sys
import types
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
from sparsescan import BatchedCSR, DeviceError  # noqa: E402
from sparsescan.arrays import cuda as door  # noqa: E402
from sparsescan.arrays.arrays import Mirrored  # noqa: E402
from sparsescan.kernels.cuda import device  # noqa: E402


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    ptx.stand_in.install(monkeypatch)
    return fake_cupy.install(monkeypatch)


def test_a_table_is_waited_for_by_other_streams(cupy: Any) -> None:
    """Until it is known to be there: it was uploaded on the stream that used it first."""
    table = Mirrored(np.arange(5))
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        copy = table.on(cupy)
        assert table.on(cupy) is copy
    assert state.waited == []
    with second:
        assert table.on(cupy) is copy
        assert table.on(cupy) is copy
    assert state.waited == [(0, second.ptr)] * 2
    first.synchronize()
    with second:
        assert table.on(cupy) is copy
    assert state.waited == [(0, second.ptr)] * 2
    with cupy.cuda.Device(1):
        assert table.on(cupy).device.id == 1


def test_what_a_run_sends_stays_until_it_has_arrived(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run has one copy of its own; memory whose copy is done is used again."""
    monkeypatch.setattr("sparsescan.arrays.streams._pinned", {})
    sent: list[tuple[int, bytes]] = []
    copy = fake_cupy.MemoryPointer.copy_from_host_async

    def watched(self: Any, mem: int, size: int, stream: Any = None) -> None:
        sent.append((mem, ctypes.string_at(mem, size)))
        copy(self, mem, size, stream)

    monkeypatch.setattr(fake_cupy.MemoryPointer, "copy_from_host_async", watched)
    grad, values = cupy.asarray(np.ones(3)), cupy.asarray(np.ones((4, 9)))
    plan = sparsescan.plan([sparsescan.Pattern.dense((3, 3))] * 4, schedule="linear")
    results = [plan.exclusive_scan(grad, values) for _ in range(3)]
    assert len(sent) == len({mem for mem, _ in sent}) == len(results) == 3
    assert [ctypes.string_at(mem, len(data)) for mem, data in sent] == [data for _, data in sent]
    # Addresses of the results differ, and so do the tables.
    assert len({data for _, data in sent}) == 3
    del plan
    plan = sparsescan.plan([sparsescan.Pattern.dense((3, 3))] * 4, schedule="linear")
    results.append(plan.exclusive_scan(grad, values))
    assert len({mem for mem, _ in sent}) == 4
    cupy.cuda.Device().synchronize()
    results += [plan.exclusive_scan(grad, values) for _ in range(4)]
    assert len(sent) == 8
    assert len({mem for mem, _ in sent}) == 4


def test_a_table_in_a_capture(cupy: Any) -> None:
    """A graph cannot wait for an upload that is not in it."""
    table = Mirrored(np.arange(5))
    copy = table.on(cupy)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        assert table.on(cupy) is copy
        stream.end_capture()
    assert state.waited == []


def test_matrices_are_made_without_waiting(cupy: Any) -> None:
    host = np.random.default_rng(0).standard_normal((4, 3))
    batched = BatchedCSR(cupy.asarray(host), [0, 2, 1], [0, 2, 3], (2, 3))
    waits = state.waits
    matrices = [batched[sample] for sample in range(4)]
    assert state.waits == waits
    for values, matrix in zip(host, matrices, strict=True):
        assert (matrix.shape, matrix.dtype, matrix.nnz) == ((2, 3), np.float64, 3)
        expected = [[values[0], 0, values[1]], [0, values[2], 0]]
        np.testing.assert_array_equal(matrix.get().toarray(), expected)


def test_memory_of_the_host_in_place_of_copies_is_refused(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad, steps = np.ones(2), np.ones((3, 2, 2))
    monkeypatch.setattr("sparsescan.arrays.arrays._usable", None)
    monkeypatch.setenv("CUPY_ENABLE_UMP", "1")
    with pytest.raises(DeviceError, match="CUPY_ENABLE_UMP is set"):
        sparsescan.exclusive_scan(grad, steps, device="cuda")


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((7, 5), None),
        ((8, 8), None),
        ((10, 0), None),
        (
            (10, 4),
            "compute capability 10.4, which .* supports 7.5 to 12.0; a newer nvidia-cuda-nvrtc",
        ),
        ((13, 0), "compute capability 13.0, which"),
        ((6, 1), r"compute capability 6.1, .*; sparsescan\[cuda12\] may have"),
    ],
)
def test_compute_capabilities(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], message: str | None
) -> None:
    """Numba compiles for the very one from 9.0 on, for the nearest older one before."""
    from numba.cuda.cudadrv import nvrtc

    known = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    monkeypatch.setattr(nvrtc, "get_supported_ccs", lambda: known)
    suffix = "a" if capability >= (9, 0) else ""
    if message is None:
        assert nvrtc.get_arch_option(*capability, suffix).startswith("compute_")
    else:
        with pytest.raises((ValueError, nvrtc.CCSupportError)):
            nvrtc.get_arch_option(*capability, suffix)
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(door, "cuda", types.SimpleNamespace(gpus=[device]))
    monkeypatch.setattr(door, "_checked", set())
    if message is None:
        assert door.current(0) is device
        return
    with pytest.raises(DeviceError, match=message):
        door.current(0)


def test_launches_on_a_stream_share_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba keeps prepared launches by grid and stream, whose equality is identity."""
    from numba.cuda.cudadrv.driver import Stream

    streams: list[Any] = []

    class Kernel:
        def __getitem__(self, configuration: tuple[Any, ...]) -> Any:
            streams.append(configuration[2])
            return lambda *arguments: None

    fake = types.SimpleNamespace(external_stream=lambda handle: Stream(handle, external=True))
    monkeypatch.setattr(device, "cuda", fake)
    device._stream.cache_clear()
    for handle in (0x1000, 0x1000, 0, 0x2000, 0x1000):
        device.launch(Kernel(), 1, 32, handle)
    device._stream.cache_clear()
    assert streams[0] is streams[1] is streams[4]
    assert streams[2] == 0
    assert streams[3].handle == 0x2000
