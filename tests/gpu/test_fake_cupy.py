"""The stand-in for CuPy is as strict as CuPy about devices, streams, graphs and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_cupy import state


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_cupy.install(monkeypatch)


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
