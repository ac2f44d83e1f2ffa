"""Where a scan runs: the device of the data and the caller's stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ._arrays import is_on_device, load_cupy, on_device
from .errors import DeviceError, InputError, InputTypeError

__all__ = ["place"]


def place(grad: Any, device: str | None, stream: Any) -> AbstractContextManager[Any]:
    """A context in which work is on the device of `grad`, or on the current one; and on `stream`.

    Raises
    ------
    DeviceError
        If there is no such device, or `device` is ``"cpu"`` and `grad` on a CUDA device.
    InputError
        If there is a stream, but no CUDA device has work for it.
    """
    there = is_on_device(grad)
    if device == "cpu" and there:
        raise DeviceError(
            "device is 'cpu', but grad is on a CUDA device; expected arrays in host memory "
            "(cupy.asnumpy)"
        )
    if not there and device != "cuda":
        if stream is not None:
            raise InputError(f"stream is {stream!r}, but grad is in host memory; expected None")
        return nullcontext()
    grad = on_device(grad, "grad") if there else None
    return _on(load_cupy(), grad, stream)


@contextmanager
def _on(cupy: Any, grad: Any, stream: Any) -> Iterator[None]:
    from .kernels import _device

    device = cupy.cuda.Device() if grad is None else grad.device
    chosen = nullcontext() if stream is None else _stream(cupy, stream, device.id)
    with device, _device.current(device.id), chosen:
        if cupy.cuda.get_current_stream().is_capturing():
            raise DeviceError(
                "the stream is capturing a graph, but a scan copies addresses to the device; scan "
                "outside, where a plan's second run is a graph of its own"
            )
        yield


def _stream(cupy: Any, stream: Any, device: int) -> Any:
    """A stream of CuPy for one of any library, or its handle."""
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
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)


class _Handle:
    """What libraries exchange streams by."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
