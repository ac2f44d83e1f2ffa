"""Where a scan runs: the device of the data and the caller's stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, InputError, InputTypeError, short
from .addresses import kernel_address
from .arrays import device_of, is_on_device, load_cupy, on_device


class _Pinned(NamedTuple):
    """Pinned memory of the host, its address, and when it may be written again."""

    array: NDArray[np.int64]
    address: int
    ready: Any


# Pinned memory by device and size, the longest used first. It outlives those who send: a copy may
# still be on its way.
_pinned: dict[tuple[int, int], deque[_Pinned]] = {}


def check_device(device: Any) -> None:
    """Raise unless this is the name of a kind of device, or None."""
    # Arrays work out equality entry by entry, so types come first.
    if device is not None and (not isinstance(device, str) or device not in ("cpu", "cuda")):
        raise DeviceError(f"device is {short(device)}; expected None, 'cpu' or 'cuda'")


def place(name: str, array: Any, device: str | None, stream: Any) -> AbstractContextManager[Any]:
    """Return a context for work on `stream`, on the device of an array or the current one.

    It gives CuPy's stream, or None where the work is the host's. Device and stream are made the
    current ones of CuPy only if they are not; Numba's are not its business
    (:func:`~sparsescan.arrays.cuda.current`).

    Raises
    ------
    DeviceError
        If there is no such device, or `device` is ``"cpu"`` and the array on a CUDA device, or if
        the stream is capturing a graph.
    InputError
        If there is a stream, but no CUDA device has work for it.
    """
    there = type(array) is not np.ndarray and is_on_device(array)
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
    number = device_of(on_device(array, name)) if there else None
    cupy = load_cupy()
    current: int = cupy.cuda.runtime.getDevice()
    if number is None:
        number = current
    handle = None if stream is None else _handle_of(stream)
    if number == current and not handle:
        here = cupy.cuda.get_current_stream()
        # PyTorch, too, works on the null stream unless it is told otherwise.
        if handle is None or here.ptr == handle:
            return nullcontext(_checked(here))
    return _elsewhere(cupy, None if number == current else number, stream, handle)


def send(numbers: NDArray[np.int64], target: Any, stream: Any) -> None:
    """Copy numbers to an array on the current device, on a stream of it.

    The host does not wait, and may change the numbers at once.
    """
    used = _pinned.setdefault((target.data.device_id, len(numbers)), deque())
    try:
        pinned = used.popleft()
    except IndexError:
        pinned = _new_pinned(len(numbers))
    else:
        if not pinned.ready.done:
            used.appendleft(pinned)
            pinned = _new_pinned(len(numbers))
    pinned.array[...] = numbers
    target.data.copy_from_host_async(pinned.address, numbers.nbytes, stream)
    pinned.ready.record(stream)
    used.append(pinned)


def _new_pinned(size: int) -> _Pinned:
    import cupyx

    array: NDArray[np.int64] = cupyx.empty_pinned(size, np.int64)
    return _Pinned(array, kernel_address(array), load_cupy().cuda.Event(disable_timing=True))


@contextmanager
def _elsewhere(cupy: Any, device: int | None, stream: Any, handle: int | None) -> Iterator[Any]:
    """Work on another device than the current one, or on a stream."""
    with (
        nullcontext() if device is None else cupy.cuda.Device(device),
        # It is made the current one of its own device.
        nullcontext() if handle is None else _stream(cupy, stream, handle),
    ):
        yield _checked(cupy.cuda.get_current_stream())


def _checked(stream: Any) -> Any:
    """Return a stream to work on, or raise an error if it is capturing a graph."""
    if stream.is_capturing():
        raise DeviceError(
            "the stream is capturing a graph, but a scan copies addresses to the device; scan "
            "outside, where a plan's second run is a graph of its own"
        )
    return stream


def _handle_of(stream: Any) -> int:
    """Return the handle of a stream of any library, or the handle that it is."""
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        _, handle = stream.__cuda_stream__()
    elif hasattr(stream, "cuda_stream"):  # PyTorch
        handle = stream.cuda_stream
    elif hasattr(stream, "ptr"):  # CuPy before 14
        handle = stream.ptr
    if not isinstance(handle, int):
        raise InputTypeError(
            f"stream is a {type(stream).__name__}; expected a stream of CuPy or PyTorch, an object "
            "with __cuda_stream__, or a handle"
        )
    return handle


def _stream(cupy: Any, stream: Any, handle: int) -> Any:
    """Return a stream of CuPy, on the current device, for one of any library.

    It keeps the caller's object, with which the stream may go: memory that was made on a stream is
    given back there, maybe long after the call. A handle keeps nothing.
    """
    if isinstance(stream, cupy.cuda.Stream):
        return stream
    if hasattr(cupy.cuda.Stream, "from_external"):  # since CuPy 14
        # Which keeps what it is made of.
        return cupy.cuda.Stream.from_external(_Handle(handle, stream))
    external = _owned(cupy.cuda.ExternalStream)(handle, cupy.cuda.runtime.getDevice())
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
