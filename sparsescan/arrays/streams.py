"""Where a scan runs: the device of the data and the caller's stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, InputError, InputTypeError, short
from .arrays import is_on_device, load_cupy, on_device

__all__ = ["check_device", "place", "send"]

# Pinned memory by device and size, the longest used first, and when it may be written again. It
# outlives those who send: a copy may still be on its way.
_pinned: dict[tuple[int, int], deque[tuple[NDArray[np.int64], Any]]] = {}


def check_device(device: Any) -> None:
    """Raise unless this is the name of a kind of device, or None."""
    # Arrays work out equality entry by entry, so types come first.
    if device is not None and (not isinstance(device, str) or device not in ("cpu", "cuda")):
        raise DeviceError(f"device is {short(device)}; expected None, 'cpu' or 'cuda'")


def place(name: str, array: Any, device: str | None, stream: Any) -> AbstractContextManager[Any]:
    """Return a context for work on `stream`, on the device of an array or the current one.

    Raises
    ------
    DeviceError
        If there is no such device, or `device` is ``"cpu"`` and the array on a CUDA device.
    InputError
        If there is a stream, but no CUDA device has work for it.
    """
    there = is_on_device(array)
    if device == "cpu" and there:
        raise DeviceError(
            f"device is 'cpu', but {name} is on a CUDA device; expected arrays in host memory "
            "(cupy.asnumpy)"
        )
    if not there and device != "cuda":
        if stream is not None:
            raise InputError(
                f"stream is {short(stream)}, but {name} is in host memory; expected None"
            )
        return nullcontext()
    array = on_device(array, name) if there else None
    return _on(load_cupy(), array, stream)


def send(numbers: NDArray[np.int64], target: Any) -> None:
    """Copy numbers to an array on the current device, on the current stream.

    The host does not wait, and may change the numbers at once.
    """
    cupy = load_cupy()
    stream = cupy.cuda.get_current_stream()
    used = _pinned.setdefault((cupy.cuda.Device().id, len(numbers)), deque())
    try:
        pinned, ready = used.popleft()
    except IndexError:
        pinned, ready = _new_pinned(cupy, len(numbers))
    else:
        if not ready.done:
            used.appendleft((pinned, ready))
            pinned, ready = _new_pinned(cupy, len(numbers))
    pinned[...] = numbers
    target.data.copy_from_host_async(pinned.ctypes.data, pinned.nbytes, stream)
    ready.record(stream)
    used.append((pinned, ready))


def _new_pinned(cupy: Any, size: int) -> tuple[NDArray[np.int64], Any]:
    import cupyx

    return cupyx.empty_pinned(size, np.int64), cupy.cuda.Event(disable_timing=True)


@contextmanager
def _on(cupy: Any, array: Any, stream: Any) -> Iterator[None]:
    from .cuda import current

    device = cupy.cuda.Device() if array is None else array.device
    chosen = nullcontext() if stream is None else _stream(cupy, stream, device.id)
    with device, current(device.id), chosen:
        if cupy.cuda.get_current_stream().is_capturing():
            raise DeviceError(
                "the stream is capturing a graph, but a scan copies addresses to the device; scan "
                "outside, where a plan's second run is a graph of its own"
            )
        yield


def _stream(cupy: Any, stream: Any, device: int) -> Any:
    """Return a stream of CuPy for one of any library, or its handle.

    It keeps the caller's object, with which the stream may go: memory that was made on a stream is
    given back there, maybe long after the call. A handle keeps nothing.
    """
    if isinstance(stream, cupy.cuda.Stream):
        return stream
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        _, handle = stream.__cuda_stream__()
    elif hasattr(stream, "cuda_stream"):  # PyTorch
        handle = stream.cuda_stream
    elif hasattr(stream, "ptr"):  # CuPy's ExternalStream
        handle = stream.ptr
    if not isinstance(handle, int):
        raise InputTypeError(
            f"stream is a {type(stream).__name__}; expected a stream of CuPy or PyTorch, an object "
            "with __cuda_stream__, or a handle"
        )
    if hasattr(cupy.cuda.Stream, "from_external"):  # since CuPy 14
        # Which keeps what it is made of.
        return cupy.cuda.Stream.from_external(_Handle(handle, stream))
    external = _owned(cupy.cuda.ExternalStream)(handle, device)
    external.owner = stream
    return external


@cache
def _owned(external: type) -> Any:
    """Return CuPy's class of streams that others own, with room for the owner."""
    return type("OwnedStream", (external,), {})


class _Handle:
    """The protocol by which libraries exchange streams, for one that another object owns."""

    def __init__(self, handle: int, owner: Any) -> None:
        self._handle, self.owner = handle, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
