"""The stand-in for CuPy is as strict as CuPy about devices, streams, graphs and memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_cupy import Tensor, state


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_cupy.install(monkeypatch)


def test_arrays_remember_their_device(cupy: Any) -> None:
    x = cupy.ones((2, 3))
    with cupy.cuda.Device(1) as device:
        y = cupy.ones((2, 3))
        assert (device.id, cupy.cuda.Device().id, cupy.cuda.runtime.getDevice()) == (1, 1, 1)
        assert (y + y).device.id == 1
    assert cupy.cuda.Device().id == 0
    assert (x.device.id, x.data.device_id, y.device.id, y.data.device_id) == (0, 0, 1, 1)
    # Views are where they came from, copies where they were made.
    for view in (y[::-1], y.T, y.reshape(3, 2), y.ravel(), y.view(), y.astype(float, copy=False)):
        assert view.device.id == 1
    assert y.copy().device.id == 0
    assert cupy.asarray(x) is x
    # An array on another device than the current one is copied there.
    assert cupy.asarray(y).device.id == 0
    assert cupy.asarray(Tensor(np.ones(3), 1)).device.id == 0
    assert cupy.cuda.runtime.pointerGetAttributes(y[1:].data.ptr).device == 1
    assert cupy.cuda.runtime.pointerGetAttributes(np.ones(3).ctypes.data).device < 0
    with pytest.raises(RuntimeError, match="invalid device"):
        cupy.cuda.Device(fake_cupy.DEVICES)


@pytest.mark.parametrize(
    "use",
    [
        lambda cupy, x, y: x + y,
        lambda cupy, x, y: cupy.sum(y),
        lambda cupy, x, y: cupy.add(x, x, out=y),
        lambda cupy, x, y: cupy.concatenate([x, y]),
        lambda cupy, x, y: y.fill(0),
        lambda cupy, x, y: y.astype(np.float32),
        lambda cupy, x, y: y.T.reshape(6),
        lambda cupy, x, y: x[cupy.asarray([0])].__iadd__(y),
        lambda cupy, x, y: x.__setitem__(0, y[0]),
        lambda cupy, x, y: y.__setitem__(0, 1.0),
        lambda cupy, x, y: y[cupy.asarray([0])],
        lambda cupy, x, y: cupy.copyto(x, y),
        lambda cupy, x, y: cupy.matmul(x, y.T),
        lambda cupy, x, y: cupy.ascontiguousarray(y),
    ],
)
def test_arrays_of_another_device_are_refused(cupy: Any, use: Callable[..., Any]) -> None:
    x = cupy.ones((2, 3))
    with cupy.cuda.Device(1):
        y = cupy.ones((2, 3))
    with pytest.raises(ValueError, match=r"resides \(1\) is different from the current device"):
        use(cupy, x, y)


def test_addresses(cupy: Any) -> None:
    x = cupy.asarray(np.arange(6.0).reshape(2, 3))
    assert x[1:].data.ptr == x.data.ptr + 24
    assert x[::-1].data.ptr == x.data.ptr + 24
    assert x[::-1].strides == (-24, 8)
    assert x[:0].data.ptr == 0
    assert x.nbytes == 48
    again = cupy.ndarray((3,), np.float64, memptr=x.data + 24)
    again[...] = 7
    assert x.get().tolist() == [[0, 1, 2], [7, 7, 7]]
    host = np.arange(3.0)
    tensor = Tensor(host[::-1], 1)
    with cupy.cuda.Device(1):
        there = cupy.asarray(tensor)
        assert (there.device.id, there.strides) == (1, (-8,))
        there[0] = 9
    assert host.tolist() == [0, 1, 9]
    with pytest.raises(RuntimeError, match="requires grad"):
        cupy.asarray(Tensor(host, requires_grad=True))


def test_new_memory_is_aligned_as_that_of_a_pool(cupy: Any) -> None:
    x = cupy.asarray(np.arange(7, dtype=np.float32))
    made = [x, cupy.empty(3, np.int64), x + x, x.copy(), x[cupy.asarray([2, 1])], cupy.stack([x])]
    assert [array.data.ptr % fake_cupy.UNIT for array in made] == [0] * len(made)
    views = [x[1:], cupy.ravel(x)[1:], x[1:].astype(np.float32, copy=False)]
    assert [view.data.ptr - x.data.ptr for view in views] == [4, 4, 4]
    # A kernel may touch what was asked for, and not what the pool gives beyond that.
    sizes = dict(state.memory())
    assert [sizes[array.data.ptr] for array in made] == [array.nbytes for array in made]


def test_new_memory_holds_no_zeros(cupy: Any) -> None:
    assert np.isnan(cupy.empty((2, 2), np.float32).get()).all()
    assert (cupy.empty_like(cupy.zeros(3, np.int64)).get() == -1).all()
    assert np.isnan(cupy.empty(()).get())
    assert cupy.ndarray((0, 3)).shape == (0, 3)


def test_what_waits_is_counted(cupy: Any) -> None:
    x = cupy.asarray(np.ones(3))
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    event.record(stream)
    stream.wait_event(event)
    x.set(np.zeros(3))
    x.get(out=np.empty(3), blocking=False)
    assert state.waits == 0
    for k, wait in enumerate(
        [
            x.get,
            lambda: cupy.asnumpy(x),
            stream.synchronize,
            event.synchronize,
            cupy.cuda.Device().synchronize,
            cupy.cuda.get_current_stream().synchronize,
            cupy.cuda.runtime.deviceSynchronize,
        ]
    ):
        event.record(stream)
        assert not event.done
        wait()
        assert state.waits == k + 1
        assert event.done


def test_calls_are_counted(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, stream, event = cupy.zeros(3), cupy.cuda.Stream(), cupy.cuda.Event()
    counts = fake_cupy.count(monkeypatch)
    with cupy.cuda.Device(1), cupy.cuda.Stream():
        pass
    event.record(stream)
    stream.wait_event(event)
    assert not event.done
    x[...] = 1
    x.data.memset_async(0, 8)
    assert x.get().tolist() == [0, 1, 1]
    assert counts == {
        "Device.__enter__": 1,
        "Stream.__enter__": 1,
        "Event.record": 1,
        "Stream.wait_event": 1,
        "Event.done": 1,
        "ndarray.__setitem__": 1,
        "MemoryPointer.memset_async": 1,
        "ndarray.get": 1,
    }


def test_streams_of_others(cupy: Any) -> None:
    """Since CuPy 14 one keeps what it is made of; that of old versions has no room for it."""
    stream = cupy.cuda.Stream()
    alive = weakref.ref(stream)
    other = cupy.cuda.Stream.from_external(stream)
    del stream
    assert alive() is not None
    with pytest.warns(DeprecationWarning, match="ExternalStream"):
        external = cupy.cuda.ExternalStream(other.ptr)
    with pytest.raises(AttributeError):
        external.owner = other
    del other
    assert alive() is None


def test_matrices_of_arrays_wait_for_the_device(cupy: Any) -> None:
    from cupyx.scipy.sparse import csr_matrix

    data, indices, indptr = (cupy.asarray(np.array(a)) for a in ([1.0, 2], [0, 1], [0, 1, 2]))
    empty = csr_matrix((2, 2))
    empty.data, empty.indices, empty.indptr = data, indices, indptr
    assert state.waits == 0
    full = csr_matrix((data, indices, indptr), shape=(2, 2))
    assert state.waits == 1
    assert (full.get() != empty.get()).nnz == 0
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="waits while capturing"):
            csr_matrix((data, indices, indptr), shape=(2, 2))
        stream.end_capture()


def test_set_refuses_what_cupy_refuses(cupy: Any) -> None:
    x = cupy.zeros((2, 3))
    for wrong in (np.zeros((2, 3), np.float32), np.zeros(6), cupy.zeros((2, 3))):
        with pytest.raises((TypeError, ValueError)):
            x.set(wrong)
    with pytest.raises(RuntimeError, match="non-contiguous"):
        x[:, ::2].set(np.zeros((2, 2)))


def test_streams(cupy: Any) -> None:
    null = cupy.cuda.get_current_stream()
    assert null.ptr == 0
    stream = cupy.cuda.Stream()
    with stream:
        assert cupy.cuda.get_current_stream() == stream
        with cupy.cuda.Device(1):
            assert cupy.cuda.get_current_stream() == null
            with pytest.raises(RuntimeError, match="does not match with the current device"):
                stream.__enter__()
    assert cupy.cuda.get_current_stream() == null
    assert cupy.cuda.Stream.from_external(stream) == stream
    with pytest.warns(DeprecationWarning, match="ExternalStream"):
        assert cupy.cuda.ExternalStream(stream.ptr) == stream


def test_work_is_put_off_while_a_stream_captures(cupy: Any) -> None:
    a, b, out = cupy.ones((2, 2)), cupy.ones((2, 2)), cupy.zeros((2, 2))
    stream = cupy.cuda.Stream(non_blocking=True)
    with pytest.raises(RuntimeError, match="default"):
        cupy.cuda.Stream.null.begin_capture()
    with stream:
        stream.begin_capture()
        assert stream.is_capturing()
        cupy.matmul(a, b, out=out)
        out *= 3
        out[0] = 5
        with pytest.raises(AssertionError, match="a new array"):
            a + b
        with pytest.raises(AssertionError, match="a new array"):
            cupy.asarray(np.ones(3))
        with pytest.raises(AssertionError, match="host memory"):
            a.set(np.ones((2, 2)))
        with pytest.raises(RuntimeError, match="waits while capturing"):
            a.get()
        graph = stream.end_capture()
    assert not stream.is_capturing()
    assert out.get().tolist() == [[0, 0], [0, 0]]
    for factor in (1, 2):
        a.fill(factor)
        graph.launch(stream)
        assert out.get().tolist() == [[5, 5], [6 * factor] * 2]
    # Other streams go on.
    stream.begin_capture()
    assert (a + b).get().tolist() == [[3, 3], [3, 3]]
    stream.end_capture()


def test_memory_is_limited(cupy: Any) -> None:
    state.free[1] = 100
    cupy.zeros(20)
    with cupy.cuda.Device(1):
        assert cupy.cuda.runtime.memGetInfo()[0] == 100
        cupy.zeros(10)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="allocating 160 bytes"):
            cupy.zeros(20)
