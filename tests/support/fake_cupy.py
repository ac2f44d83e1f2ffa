"""A stand-in for CuPy on machines without a GPU: NumPy arrays that refuse what CuPy refuses.

:func:`install` puts it in the place of `cupy` and `cupyx`. It has only functions and arguments that
CuPy 13 to 15 have (CuPy's reference and source), and is stricter than CuPy in a few ways, so that
what runs here runs there:

- No function of NumPy takes an array. CuPy lets ``np.add(x, x)`` through if all are its own.
- NumPy arrays are no indices. CuPy copies them to the device, every time, as it does short lists.
- An index out of bounds is an error. CuPy wraps it around.
- An assignment to one place twice is an error. In CuPy the value is then undefined.
- A call that waits for the device, as ``bool(x)``, ``float(x)`` or ``int(x)``, is an error.
- There is no boolean index, which waits for the device as well.
- Arrays of another device than the current one are an error, except for views and copies. CuPy
  reads them with a warning where the devices can reach each other.
- While the current stream captures, what gives a new array is an error: a graph would write to its
  memory when it has long been given to others. Writes to an array that is there are put off until
  the graph is launched.
- New memory holds no zeros, but NaN and -1.

Where CuPy computes in another way than NumPy, and it matters, so does this: see :class:`_Add` and
:func:`_expit`.

There are :data:`DEVICES` devices, whose memory is the host's; addresses are real, so kernels in
Numba's simulator read and write it. Everything is done at once: streams and events are there, but
nothing shows that work on two streams would not wait for each other. :data:`state` counts what
waits for a device and the bytes of arrays, :func:`watch` lists the launches of kernels, and
:func:`count` counts calls.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import operator
import os
import pkgutil
import sys
import threading
import time
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.special
from cubin import resources_of

DEVICES = 2
# Few, so that small data are several blocks' work; where machine code is made of the kernels that
# tests launch, as many as an H100, or an H200, has: it is to be loaded there.
MULTIPROCESSORS = 132 if "SPARSESCAN_BUILD_KERNELS" in os.environ else 4
# CuPy's memory pool gives multiples of so many bytes, which start at one.
UNIT = 512


# Device, address and bytes of all arrays: some are kept from one test to the next.
_spans: dict[int, tuple[int, int, int]] = {}
_keys = itertools.count()


class State:
    """The state of the devices, which a test can read and set."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.waits = 0  # how often the host has waited for a device
        self.free = [1 << 34] * DEVICES  # bytes that a new array may have
        self.room = [1 << 40] * DEVICES  # bytes that all arrays may have
        self.pooled = True  # whether memory comes from a pool, whose errors are its own
        self.spoilt: set[int] = set()  # streams that did during a capture what none may do
        self.waited: list[tuple[int, int]] = []  # device and stream of each wait for an event
        self.used = [0] * DEVICES  # bytes of all arrays, in units
        self.peak = [0] * DEVICES  # the most that there were; to be set back
        self.captures: dict[int, list[Callable[[], None]]] = {}  # by the handle of the stream
        self.current = _Current()

    def remember(self, array: np.ndarray, owner: np.ndarray, device: int) -> None:
        """Let kernels on a device touch an array as long as the owner of its memory is there."""
        first, last = np.lib.array_utils.byte_bounds(array)
        if last > first:
            key = next(_keys)
            _spans[key] = device, first, last - first
            weakref.finalize(owner, _spans.pop, key, None)

    def memory(self) -> list[tuple[int, int]]:
        """First address and bytes of all arrays on the current device."""
        here = self.current.device
        return [(at, size) for device, at, size in _spans.copy().values() if device == here]

    def wait(self, stream: int) -> None:
        if stream in self.captures:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: waits while capturing")
        self.waits += 1


class _Current(threading.local):
    """The current device, and the streams of each that were made current."""

    def __init__(self) -> None:
        self.device = 0
        self.devices: list[int] = []
        self.streams: list[list[_Stream]] = [[Stream.null] for _ in range(DEVICES)]
        self.entered: list[int] = []


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


# -- Devices, streams, events and graphs ----------------------------------------------------------


class Device:
    def __init__(self, device: Any = None) -> None:
        self.id = state.current.device if device is None else int(device)
        if not 0 <= self.id < DEVICES:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> Device:
        state.current.devices.append(state.current.device)
        state.current.device = self.id
        return self

    def __exit__(self, *_: object) -> None:
        state.current.device = state.current.devices.pop()

    def use(self) -> Device:
        state.current.device = self.id
        return self

    def synchronize(self) -> None:
        state.wait(-1)

    compute_capability = "90"
    attributes = property(lambda self: {"MultiProcessorCount": MULTIPROCESSORS})
    mem_info = property(lambda self: (state.free[self.id], 1 << 35))

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


class _Stream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def _check(self) -> int:
        device = state.current.device
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with "
                f"the current device ({device})"
            )
        return device

    def __enter__(self) -> _Stream:
        device = self._check()
        state.current.entered.append(device)
        state.current.streams[device].append(self)
        return self

    def __exit__(self, *_: object) -> None:
        state.current.streams[state.current.entered.pop()].pop()

    def use(self) -> _Stream:
        state.current.streams[self._check()][-1] = self
        return self

    @property
    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        state.wait(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        if self.ptr in state.captures:
            state.spoilt.add(self.ptr)
            raise CUDARuntimeError("cudaErrorStreamCaptureIsolation: an event of no capture")
        state.waited.append((state.current.device, self.ptr))

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self.ptr in state.captures:
            raise CUDARuntimeError("cudaErrorIllegalState: captures already")
        state.captures[self.ptr] = []

    def end_capture(self) -> Graph:
        if self.ptr in state.spoilt:
            state.captures.pop(self.ptr)
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return Graph(state.captures.pop(self.ptr))

    def is_capturing(self) -> bool:
        return self.ptr in state.captures


class Stream(_Stream):
    null: Any = None
    _handles = itertools.count(0x1000, 16)

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = 0
    ) -> None:
        if null or ptds:
            super().__init__(0 if null else 2, -1)
        else:
            super().__init__(next(self._handles), state.current.device)

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, ptr = obj.__cuda_stream__()
        assert version == 0
        stream = cls.__new__(cls)
        _Stream.__init__(stream, ptr, -1)
        stream._foreign_stream_ref = obj  # it lives as long
        return stream


class ExternalStream(_Stream):
    def __setattr__(self, name: str, value: Any) -> None:
        # As in versions where it is no class of Python, and keeps nothing else.
        if type(self) is ExternalStream and name not in ("ptr", "device_id"):
            raise AttributeError(f"'ExternalStream' object has no attribute '{name}'")
        super().__setattr__(name, value)

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn("ExternalStream is deprecated", DeprecationWarning, stacklevel=2)
        super().__init__(ptr, device_id)


Stream.null = Stream(null=True)


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.timing = not disable_timing
        self._waits = -1

    @property
    def done(self) -> bool:
        """Whether the host has waited for a device since."""
        stream = _current_stream()
        if stream.ptr in state.captures:
            state.spoilt.add(stream.ptr)
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: asks for an event")
        return state.waits > self._waits

    def record(self, stream: _Stream | None = None) -> None:
        assert stream is None or isinstance(stream, _Stream)
        self.at, self._waits = time.perf_counter(), state.waits

    def synchronize(self) -> None:
        state.wait(-1)


def _elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two events."""
    assert start_event.timing
    assert end_event.timing
    return 1e3 * (end_event.at - start_event.at)


class Graph:
    """Work that was put off, to be done at each launch."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self._work = work

    def launch(self, stream: _Stream | None = None) -> None:
        ptr = (_current_stream() if stream is None else stream).ptr
        _log(Launch("graph", 0, 0, ptr, state.current.device, ptr in state.captures))
        if ptr in state.captures:
            state.captures[ptr] += self._work
            return
        for work in self._work:
            work()

    def upload(self, stream: _Stream | None = None) -> None:
        pass


def _current_stream(device_id: int = -1) -> _Stream:
    current = state.current
    return current.streams[current.device if device_id == -1 else device_id][-1]


def _do(work: Callable[[], Any], stream: _Stream | None = None) -> None:
    """Do what writes to an array that is there; at each launch of a graph, if one is captured."""
    ptr = (_current_stream() if stream is None else stream).ptr
    if ptr in state.captures:
        state.captures[ptr].append(work)
    else:
        work()


def _new(array: np.ndarray) -> np.ndarray:
    """Return the array on new memory, if there may be some; it is counted until all views end."""
    if _current_stream().ptr in state.captures:
        raise AssertionError("a new array while the stream captures")
    device, used, peak = state.current.device, state.used, state.peak
    taken = -(-array.nbytes // UNIT) * UNIT
    if array.nbytes > state.free[device] or used[device] + taken > state.room[device]:
        if not state.pooled:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        raise OutOfMemoryError(f"Out of memory allocating {array.nbytes:,} bytes")
    used[device] += taken
    peak[device] = max(peak[device], used[device])

    def give_back() -> None:
        used[device] -= taken

    room = np.empty(array.nbytes + UNIT, np.uint8)
    first, fortran = -room.ctypes.data % UNIT, array.flags.fnc
    aligned = np.ndarray(array.shape, array.dtype, room, first, order="F" if fortran else "C")
    aligned[...] = array
    weakref.finalize(room, give_back)
    state.remember(aligned, room, device)
    return aligned


class Memory:
    """A buffer; CuPy's classes for it differ in who frees it."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = ptr, size, owner
        self.device_id = state.current.device if device_id < 0 else device_id


class MemoryPointer:
    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    device = property(lambda self: Device(self.device_id))

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        _do(lambda: ctypes.memmove(self.ptr, src.ptr, size), stream)

    def copy_from_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        _do(lambda: ctypes.memmove(self.ptr, int(mem), size), stream)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        _do(lambda: ctypes.memset(self.ptr, value, size), stream)


class _Pool:
    def free_bytes(self) -> int:
        return 0

    used_bytes = total_bytes = free_bytes

    def free_all_blocks(self, stream: Any = None) -> None:
        pass


# -- Launches of kernels --------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    kernel: str  # "graph" for a graph
    blocks: int
    threads: int
    stream: int
    device: int
    captured: bool  # whether it was put off until a graph is launched


class CUDADriverError(RuntimeError):
    pass


class Module:
    """Machine code on the device that is the current one when it is loaded."""

    def load(self, cubin: bytes) -> None:
        assert type(cubin) is bytes
        try:
            self.kernels = list(resources_of(cubin))
        except ValueError:
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE") from None
        self.device = state.current.device

    def get_function(self, name: str) -> Function:
        if name not in self.kernels:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND")
        return Function(self, name)


class Function:
    """A kernel of a module, whose launch is a call of `run`."""

    run: Callable[..., None] = staticmethod(lambda name, blocks, threads, *arguments: None)
    asked = 0  # bytes of shared memory of the latest launch

    def __init__(self, module: Module, funcname: str) -> None:
        self._device, self._name = module.device, funcname
        self.ptr, self.most_shared = next(_functions_made), 48 * 1024
        _functions[self.ptr] = self

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        stream: Any = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        if self._device != state.current.device:
            raise CUDADriverError("CUDA_ERROR_INVALID_HANDLE")
        assert shared_mem <= self.most_shared
        Function.asked = shared_mem
        (blocks,), (threads,), device = grid, block, state.current.device
        # Scalars of NumPy would be as wide as they are.
        assert {type(number) for number in (blocks, threads, *args)} == {int}
        stream = _current_stream() if stream is None else stream
        captured = stream.ptr in state.captures
        _log(Launch(self._name, blocks, threads, stream.ptr, device, captured))
        _do(lambda: Function.run(self._name, blocks, threads, *args), stream)


def _set_attribute(function: int, attribute: int, value: int) -> None:
    """Let launches of a function ask for more shared memory; the only attribute of use here."""
    assert (type(value), attribute) == (int, 8)
    if value > 227 * 1024:
        raise CUDADriverError("CUDA_ERROR_INVALID_VALUE")
    _functions[function].most_shared = value


_functions: weakref.WeakValueDictionary[int, Function] = weakref.WeakValueDictionary()
_functions_made = itertools.count(0x100)
_logs: list[list[Launch]] = []


def _log(launch: Launch) -> None:
    for log in _logs:
        log.append(launch)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return a list of all launches from now to the end of the test; they can be captured."""
    import sparsescan.kernels
    from sparsescan.kernels.cuda import device as _device

    original = _device.launch

    def launch(kernel: Any, blocks: int, threads: int, stream: int, *arguments: Any) -> None:
        for number in (blocks, threads, stream, *arguments):
            assert isinstance(number, int | np.integer), "kernels take only integers"
        if blocks <= 0:
            return
        captured = stream in state.captures
        name = kernel.py_func.__name__
        _log(Launch(name, int(blocks), int(threads), stream, state.current.device, captured))
        if captured:
            state.captures[stream].append(lambda: original(kernel, blocks, threads, 0, *arguments))
        else:
            original(kernel, blocks, threads, 0, *arguments)

    # All that launches is imported before, so that none of it keeps the new function.
    for module in pkgutil.walk_packages(sparsescan.kernels.__path__, "sparsescan.kernels."):
        if "cuda" in module.name:
            importlib.import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("sparsescan") and getattr(module, "launch", None) is original:
            monkeypatch.setattr(module, "launch", launch)
    log: list[Launch] = []
    monkeypatch.setattr(sys.modules[__name__], "_logs", [*_logs, log])
    return log


# -- Calls ----------------------------------------------------------------------------------------

_counts: list[Counter[str]] = []


def note(call: str) -> None:
    """Count a call for all that count."""
    for counts in _counts:
        counts[call] += 1


def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a count of what a driver is asked for, from now to the end of the test."""
    counted: dict[Any, tuple[str, ...]] = {
        Device: ("__enter__", "use"),
        _Stream: ("__enter__", "is_capturing", "synchronize", "use", "wait_event"),
        Event: ("__init__", "done", "record", "synchronize"),
        Graph: ("launch",),
        MemoryPointer: ("copy_from_device_async", "copy_from_host_async", "memset_async"),
        ndarray: ("__setitem__", "get", "set"),
        cupy: ("asarray", "empty", "zeros"),
        cupy.cuda: ("get_current_stream",),
        cupy.cuda.runtime: ("getDevice", "getDeviceCount", "setDevice"),
    }
    for owner, names in counted.items():
        kind = owner.__name__.removeprefix("_")
        for name in names:
            title = f"{kind}.{name}"
            original = vars(owner)[name]
            if isinstance(original, property):
                replaced: Any = property(_counting(title, original.fget))
            else:
                replaced = _counting(title, original)
            monkeypatch.setattr(owner, name, replaced)
    counts = Counter[str]()
    monkeypatch.setattr(sys.modules[__name__], "_counts", [*_counts, counts])
    return counts


def _counting(title: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        note(title)
        return function(*args, **kwargs)

    return counting


# -- Arrays ---------------------------------------------------------------------------------------


class Flags:
    """CuPy has no ``writeable`` and no ``aligned``."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous = flags.c_contiguous
        self.f_contiguous = flags.f_contiguous
        self.owndata = flags.owndata


class ndarray:  # noqa: N801
    """An array "on the device": a NumPy array that only this module gets at."""

    # As if NumPy had never heard of it: its ufuncs refuse, and its operators leave it to ours.
    __array_ufunc__ = None
    _array: np.ndarray
    _device: int

    def __new__(
        cls,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> ndarray:
        if memptr is None:
            assert strides is None
            assert order == "C"
            return cupy.empty(shape, dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return _at(memptr.ptr, shape, np.dtype(dtype), strides, memptr.mem, memptr.device_id)

    @classmethod
    def _of(cls, array: np.ndarray, device: int | None = None) -> ndarray:
        """Return the array "on the device", by default the current one, whose memory this is."""
        assert type(array) is np.ndarray
        result = object.__new__(cls)
        result._array = array
        result._device = state.current.device if device is None else device
        return result

    def _view(self, array: np.ndarray) -> ndarray:
        """Return a view; or a copy, where NumPy could not make one."""
        if array.size and not np.may_share_memory(array, self._array):
            _here(self)
            array = _new(array)
        return ndarray._of(array, self._device)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_function__(self, *args: Any) -> Any:
        return NotImplemented

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__ | {"version": 3, "stream": 1}

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> np.ndarray:
        """Return a copy in host memory."""
        stream = _current_stream(self._device) if stream is None else stream
        if blocking:
            state.wait(stream.ptr)
        if out is None:
            return self._array.copy(order)
        assert type(out) is np.ndarray
        assert out.shape == self.shape
        assert out.dtype == self.dtype
        _do(lambda: np.copyto(out, self._array), stream)
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Take the values of an array of the host."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        stream = _current_stream(self._device) if stream is None else stream
        assert stream.ptr not in state.captures, "host memory in a graph"
        self._array[...] = arr

    # -- Attributes -----------------------------------------------------------------------------

    flags = property(lambda self: Flags(self._array.flags))
    device = property(lambda self: Device(self._device))
    T = property(lambda self: self._view(self._array.T))

    @property
    def data(self) -> MemoryPointer:
        # Where there is nothing there is no address.
        ptr = self._array.ctypes.data if self.size else 0
        return MemoryPointer(Memory(ptr, self.nbytes, self._array, self._device), 0)

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"fake_cupy.{self._array!r}"

    def __bool__(self) -> bool:
        raise TypeError("the truth of an array waits for the device")

    # -- Methods --------------------------------------------------------------------------------

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._array.view() if dtype is None else self._array.view(dtype))

    def astype(self, dtype: Any, *, copy: bool = True) -> ndarray:
        with np.errstate(all="ignore"):
            cast = self._array.astype(dtype, copy=copy)
        return self if cast is self._array else _wrap(cast, _here(self))

    def copy(self) -> ndarray:
        """Return a copy on the current device, of an array on any."""
        return _wrap(self._array.copy())

    def fill(self, value: Any) -> None:
        _here(self)
        value = _input(value)
        with np.errstate(all="ignore"):
            _do(lambda: self._array.fill(value))

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> ndarray:  # noqa: A002
        return cupy.clip(self, min, max, out)

    # -- Indices --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> ndarray:
        return self._view(np.asarray(self._array[_key(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        _here(self)
        key, value = _key(key), _input(value)
        if any(isinstance(part, np.ndarray) for part in key):
            places = np.arange(self.size).reshape(self.shape)[key]
            if len(np.unique(places)) < places.size:
                raise IndexError("a place is assigned to more than once: its value is undefined")

        def work() -> None:
            with np.errstate(all="ignore"):
                self._array[key] = value

        _do(work)


def _binary(name: str) -> Callable[[Any, Any], ndarray]:
    return lambda self, other: getattr(cupy, name)(self, other)


def _viewing(name: str) -> Callable[..., ndarray]:
    return lambda self, *args, **kwargs: self._view(getattr(self._array, name)(*args, **kwargs))


def _method(name: str) -> Callable[..., ndarray]:
    return lambda self, *args, **kwargs: getattr(cupy, name)(self, *args, **kwargs)


def _reflected(name: str) -> Callable[[Any, Any], ndarray]:
    return lambda self, other: getattr(cupy, name)(other, self)


def _in_place(name: str) -> Callable[[Any, Any], ndarray]:
    return lambda self, other: getattr(cupy, name)(self, other, out=self)


for _operator, _name in {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}.items():
    setattr(ndarray, f"__{_operator}__", _binary(_name))
    setattr(ndarray, f"__r{_operator}__", _reflected(_name))
    setattr(ndarray, f"__i{_operator}__", _in_place(_name))
for _operator, _name in {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
    "matmul": "matmul",
}.items():
    setattr(ndarray, f"__{_operator}__", _binary(_name))
for _name in ("dtype", "itemsize", "nbytes", "ndim", "shape", "size", "strides"):
    setattr(ndarray, _name, property(lambda self, _name=_name: getattr(self._array, _name)))
for _name in ("ravel", "reshape", "squeeze", "swapaxes", "transpose"):
    setattr(ndarray, _name, _viewing(_name))
for _name in ("all", "any", "argmax", "max", "mean", "min", "sum", "take", "var"):
    setattr(ndarray, _name, _method(_name))
for _operator, _name in {"neg": "negative", "invert": "invert", "abs": "absolute"}.items():
    setattr(ndarray, f"__{_operator}__", lambda self, _name=_name: getattr(cupy, _name)(self))
ndarray.__rmatmul__ = _reflected("matmul")
ndarray.__hash__ = None
ndarray.__module__ = "cupy"


def _here(array: ndarray) -> np.ndarray:
    """Return the array of NumPy, if it is on the current device."""
    if array._device != state.current.device:
        raise ValueError(
            f"The device where the array resides ({array._device}) is different from the current "
            f"device ({state.current.device})"
        )
    return array._array


def _input(value: Any) -> Any:
    """Return what NumPy computes with, for an array of ours or a scalar; refuse anything else."""
    if isinstance(value, ndarray):
        return _here(value)
    if isinstance(value, bool | int | float | np.generic):
        return value
    # In these words ufuncs of CuPy refuse NumPy arrays and lists.
    raise TypeError(f"Unsupported type {type(value)}")


def _output(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, ndarray):
        raise TypeError("Output arguments type must be cupy.ndarray")
    return _here(value)


def _plain(value: Any) -> Any:
    """Return the same, without arrays: a shape, an axis, a dtype, a mode."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_plain(entry) for entry in value)
    if isinstance(value, np.ndarray | ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def _wrap(value: Any, *given: Any) -> ndarray:
    """Return an array of ours, or a view of one that was given; of scalars, too, as CuPy does."""
    array = np.asarray(value)
    if any(isinstance(one, np.ndarray) and np.may_share_memory(array, one) for one in given):
        return ndarray._of(array)
    return ndarray._of(_new(array))


def _at(
    ptr: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: Any, owner: Any, device: int
) -> ndarray:
    """Return the array at an address."""

    class Buffer:
        __array_interface__ = {  # noqa: RUF012
            "shape": shape,
            "typestr": dtype.str,
            "strides": strides,
            "data": (ptr, False),
            "version": 3,
        }
        kept = owner

    if 0 in shape:
        return ndarray._of(np.empty(shape, dtype), device)
    array = np.asarray(Buffer())
    state.remember(array, array, device)
    return ndarray._of(array, device)


def _key(key: Any) -> tuple[Any, ...]:
    """Return an index for NumPy."""
    parts = []
    for part in key if isinstance(key, tuple) else (key,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, ndarray):
            if part.dtype.kind not in "iu":
                raise IndexError(f"an index has dtype {part.dtype}; here it must be of integers")
            parts.append(_here(part))
        elif isinstance(part, list):
            parts.append(np.array([operator.index(entry) for entry in part], np.intp))
        elif isinstance(part, np.ndarray | tuple | bool | np.bool_):
            raise TypeError(f"Unsupported type {type(part)} of an index")
        else:
            parts.append(operator.index(part))
    return tuple(parts)


class _Ufunc:
    """An elementwise function; like those of CuPy, without ``where``."""

    def __init__(self, function: Callable[..., Any], nin: int) -> None:
        self._function = function
        self.nin = nin

    def __call__(self, *args: Any, out: Any = None, dtype: Any = None) -> ndarray:
        if len(args) == self.nin + 1 and out is None:
            *args, out = args
        if len(args) != self.nin:
            raise TypeError(f"{len(args)} arguments; expected {self.nin}")
        kwargs = {} if dtype is None else {"dtype": dtype}
        given, target = [_input(arg) for arg in args], _output(out)

        def work() -> Any:
            # A device gives no warnings.
            with np.errstate(all="ignore"):
                return self._function(*given, out=target, **kwargs)

        if out is None:
            return _wrap(work())
        _do(work)
        return out


class _Add(_Ufunc):
    def at(self, a: ndarray, indices: Any, b: Any) -> None:
        """Add at places that may repeat; in what order is undefined."""
        target, key, terms = _array("a", a), _key(indices), _input(b)
        with np.errstate(all="ignore"):
            _do(lambda: np.add.at(target, key, terms))

    def reduceat(self, array: ndarray, indices: ndarray, axis: int = 0) -> ndarray:
        """Sum parts by differences of ``cumsum``, which cancel, and a NaN or ∞ spreads."""
        axis %= array.ndim
        terms, starts = np.moveaxis(_input(array), axis, -1), _input(indices)
        with np.errstate(all="ignore"):
            upto = np.zeros((*terms.shape[:-1], terms.shape[-1] + 1), terms.dtype)
            np.cumsum(terms, axis=-1, out=upto[..., 1:])
            stops = np.append(starts[1:], terms.shape[-1])
            sums = upto[..., stops] - upto[..., starts]
        sums = np.where(starts >= stops, terms[..., starts], sums)
        return _wrap(np.moveaxis(sums, -1, axis))


def _expit(x: Any, out: Any = None) -> Any:
    """As CuPy computes it."""
    return np.divide(1, 1 + np.exp(-x), out=out)


def _function(function: Callable[..., Any], signature: str) -> Callable[..., ndarray]:
    """Return a function with CuPy's parameters; ``*`` marks arrays or scalars, ``**`` lists."""
    names = signature.replace("*", "").split()
    stars = [name.count("*") for name in signature.split()]

    def call(*args: Any, **kwargs: Any) -> ndarray:
        if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
            raise TypeError(f"CuPy's {function.__name__} takes only {signature}")
        given = dict(zip(names, args, strict=False)) | kwargs
        out = given.get("out")
        for name, star in zip(names, stars, strict=True):
            value = given.get(name)
            if value is None:
                continue
            if name == "out":
                given[name] = _output(value)
            elif star == 2:
                given[name] = [_array(name, entry) for entry in value]
            elif star == 1:
                first = name == names[0]
                given[name] = _array(name, value) if first else _input(value)
            else:
                given[name] = _plain(value)
        # By position, as the names of parameters differ between the libraries.
        positional = []
        for name in names:
            if name not in given:
                break
            positional.append(given.pop(name))

        def work() -> Any:
            with np.errstate(all="ignore"):
                return function(*positional, **given)

        if out is None:
            return _wrap(work(), *positional)
        _do(work)
        return out

    return call


def _array(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, ndarray):
        raise TypeError(f"{name} is a {type(value)}; expected a cupy.ndarray")
    return _here(value)


def _asarray(a: Any, dtype: Any = None) -> ndarray:
    """Return a copy from the host or from another device; or what is on the current one already."""
    if not isinstance(a, ndarray) and hasattr(a, "__cuda_array_interface__"):
        about = a.__cuda_array_interface__
        kind, strides = np.dtype(about["typestr"]), about.get("strides")
        device = getattr(a, "_device", None) if 0 not in about["shape"] else None
        device = state.current.device if device is None else device
        if about.get("stream") is not None:
            state.wait(about["stream"])
        a = _at(about["data"][0], tuple(about["shape"]), kind, strides, a, device)
    if isinstance(a, ndarray):
        a = a if a._device == state.current.device else a.copy()
        return a if dtype is None else a.astype(dtype, copy=False)
    return _wrap(np.array(a, dtype))


def _asnumpy(
    a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True
) -> np.ndarray:
    return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else np.asarray(a)


def _copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    mask = True if where is None else _array("where", where)
    target, source = _array("dst", dst), _input(src)
    with np.errstate(all="ignore"):
        _do(lambda: np.copyto(target, source, casting, mask))


def _empty(shape: Any, dtype: Any = float) -> np.ndarray:
    """Memory with what others left there."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array


def _empty_like(prototype: np.ndarray, dtype: Any = None) -> np.ndarray:
    return _empty(prototype.shape, prototype.dtype if dtype is None else dtype)


def _as_strided(x: ndarray, shape: Any = None, strides: Any = None) -> ndarray:
    """Return a view that does not leave the array, read-only if two elements share a place."""
    whole = _array("x", x)
    view = np.lib.stride_tricks.as_strided(whole, shape, strides)
    if view.size:
        (first, last), (begin, end) = map(np.lib.array_utils.byte_bounds, (view, whole))
        assert begin <= first <= last <= end, "the view leaves its array"
    places = np.zeros((), np.int64)
    for size, stride in zip(view.shape, view.strides, strict=True):
        places = places[..., None] + np.arange(size) * stride
    if len(np.unique(places)) < view.size:
        view.flags.writeable = False
    return ndarray._of(view)


def _sliding_window_view(x: ndarray, window_shape: Any, axis: Any = None) -> ndarray:
    return ndarray._of(
        np.lib.stride_tricks.sliding_window_view(_array("x", x), _plain(window_shape), axis)
    )


class _csr:  # noqa: N801
    """CSR as of CuPy: the arrays are what was given, if their dtypes are right."""

    format = "csr"

    def __init__(self, arg1: Any, shape: Any = None) -> None:
        if not sp.issparse(arg1) and len(arg1) == 3:
            # Since CuPy 14.2: the last row's end is compared with the number of entries.
            state.wait(_current_stream().ptr)
        if sp.issparse(arg1):
            shape = arg1.shape
            arg1 = [cupy.asarray(array) for array in (arg1.data, arg1.indices, arg1.indptr)]
        elif len(arg1) == 2:
            shape, nothing = arg1, np.zeros(0, np.int32)
            arrays = np.zeros(0), nothing, np.zeros(arg1[0] + 1, np.int32)
            arg1 = [cupy.asarray(array) for array in arrays]
        self.data, indices, indptr = arg1
        for array in (self.data, indices, indptr):
            assert isinstance(array, ndarray)
            assert array.ndim == 1
        wide = np.result_type(indices.dtype, indptr.dtype, np.int32)
        self.indices = indices.astype(wide, copy=False)
        self.indptr = indptr.astype(wide, copy=False)
        self._shape = tuple(map(int, shape))

    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self.data.dtype)
    nnz = property(lambda self: self.data.size)

    def get(self) -> sp.csr_array:
        arrays = self.data.get(), self.indices.get(), self.indptr.get()
        return sp.csr_array(arrays, shape=self.shape)


class csr_matrix(_csr):  # noqa: N801
    __module__ = "cupyx.scipy.sparse._csr"


class csr_array(_csr):  # noqa: N801
    """Which older versions of CuPy do not have."""

    __module__ = "cupyx.scipy.sparse._csr"


class coo_matrix:  # noqa: N801
    __module__ = "cupyx.scipy.sparse._coo"
    format = "coo"

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape


class Tensor:
    """An array of another library, such as PyTorch, on a device."""

    def __init__(
        self,
        array: np.ndarray,
        device: int = 0,
        requires_grad: bool = False,
        negated: bool = False,
    ) -> None:
        self._array = array
        self._device = device
        self._requires_grad = requires_grad
        # As PyTorch calls it: whether numbers are those in memory times -1.
        self.is_neg = lambda: negated
        state.remember(array, array, device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")
        about = self._array.__array_interface__
        return {key: about[key] for key in ("shape", "typestr", "data")} | {
            "strides": self._array.strides,
            "version": 2,
        }

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    def __len__(self) -> int:
        return len(self._array)


_UFUNCS = {
    1: (
        "absolute ceil cos exp expm1 floor invert isfinite isinf isnan log log1p logical_not "
        "negative reciprocal sign sin sqrt square tanh"
    ),
    2: (
        "arctan2 bitwise_and bitwise_or bitwise_xor copysign divide equal floor_divide fmax fmin "
        "greater greater_equal less less_equal logaddexp logical_and logical_or logical_xor "
        "maximum minimum multiply not_equal power remainder subtract true_divide"
    ),
}
_FUNCTIONS = {
    "all": "a* axis out* keepdims",
    "any": "a* axis out* keepdims",
    "argmax": "a* axis",
    "argmin": "a* axis",
    "ascontiguousarray": "a* dtype",
    "broadcast_to": "array* shape",
    "clip": "a* a_min* a_max* out*",
    "concatenate": "tup** axis out*",
    "cumsum": "a* axis dtype out*",
    "diagonal": "a* offset axis1 axis2",
    "expand_dims": "a* axis",
    "flip": "a* axis",
    "full_like": "a* fill_value* dtype",
    "max": "a* axis out* keepdims",
    "mean": "a* axis dtype out* keepdims",
    "min": "a* axis out* keepdims",
    "moveaxis": "a* source destination",
    "ones_like": "a* dtype",
    "outer": "a* b* out*",
    "prod": "a* axis dtype out* keepdims",
    "ravel": "a*",
    "repeat": "a* repeats axis",
    "reshape": "a* newshape",
    "squeeze": "a* axis",
    "stack": "tup** axis out*",
    "sum": "a* axis dtype out* keepdims",
    "swapaxes": "a* axis1 axis2",
    # CuPy's has no `mode`.
    "take": "a* indices* axis out*",
    "take_along_axis": "a* indices* axis",
    "tensordot": "a* b* axes",
    "tile": "a* reps",
    "transpose": "a* axes",
    "var": "a* axis dtype out* ddof keepdims",
    "where": "condition* x* y*",
    "zeros_like": "a* dtype",
}
_CREATION = {
    "arange": "start stop step dtype",
    "eye": "N M k dtype",
    "full": "shape fill_value dtype",
    "ones": "shape dtype",
    "zeros": "shape dtype",
}
_SAME = "bool_ float32 float64 inf int32 int64 intp nan newaxis pi result_type"


def _matmul(x1: np.ndarray, x2: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """CuPy 13 takes no `out` of another shape than that of the product; and captures no cuBLAS."""
    if _current_stream().ptr in state.captures:
        raise NotImplementedError("calling cuBLAS while the stream captures")
    if out is not None:
        shape = np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        if out.shape != (*shape, x1.shape[-2], x2.shape[-1]):
            raise ValueError("Output array has an invalid size")
    return np.matmul(x1, x2, out)


def _pointer_attributes(ptr: int) -> types.SimpleNamespace:
    """Return the device that an address lies on; less than 0 for one of the host."""
    devices = [device for device, at, size in _spans.copy().values() if at <= ptr < at + size]
    return types.SimpleNamespace(device=devices[-1] if devices else -2, devicePointer=ptr)


def _einsum(subscripts: str, *operands: ndarray) -> ndarray:
    """CuPy's has no ``out``."""
    return _wrap(np.einsum(subscripts, *(_array("an operand", operand) for operand in operands)))


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


_tricks = _module(
    "cupy.lib.stride_tricks", as_strided=_as_strided, sliding_window_view=_sliding_window_view
)
_lib = _module("cupy.lib", stride_tricks=_tricks)
_runtime = _module(
    "cupy.cuda.runtime",
    CUDARuntimeError=CUDARuntimeError,
    deviceSynchronize=lambda: state.wait(-1),
    getDeviceProperties=lambda device: {"name": b"Stand-in GPU", "l2CacheSize": 1 << 16},
    getDevice=lambda: state.current.device,
    getDeviceCount=lambda: DEVICES,
    memGetInfo=lambda: Device().mem_info,
    pointerGetAttributes=_pointer_attributes,
    setDevice=lambda device: Device(device).use() and None,
    streamSynchronize=lambda ptr: state.wait(ptr),
)
_memory = _module(
    "cupy.cuda.memory",
    MemoryPointer=MemoryPointer,
    OutOfMemoryError=OutOfMemoryError,
    UnownedMemory=Memory,
)
_kernels = _module("cupy.cuda.function", Function=Function, Module=Module)
_cuda = _module(
    "cupy.cuda",
    Device=Device,
    Event=Event,
    ExternalStream=ExternalStream,
    Graph=Graph,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    UnownedMemory=Memory,
    driver=types.SimpleNamespace(funcSetAttribute=_set_attribute),
    function=_kernels,
    get_current_stream=_current_stream,
    get_elapsed_time=_elapsed_time,
    is_available=lambda: True,
    memory=_memory,
    runtime=_runtime,
)
cupy: Any = _module(
    "cupy",
    ndarray=ndarray,
    lib=_lib,
    add=_Add(np.add, 2),
    asarray=_asarray,
    array=_asarray,
    asnumpy=_asnumpy,
    copyto=_copyto,
    cuda=_cuda,
    empty=_function(_empty, "shape dtype"),
    empty_like=_function(_empty_like, "prototype* dtype"),
    get_default_memory_pool=_Pool,
    einsum=_einsum,
    matmul=_function(_matmul, "x1* x2* out*"),
    **{
        name: _Ufunc(getattr(np, name), n) for n, names in _UFUNCS.items() for name in names.split()
    },
    **{name: _function(getattr(np, name), signature) for name, signature in _FUNCTIONS.items()},
    **{name: _function(getattr(np, name), signature) for name, signature in _CREATION.items()},
    **{name: getattr(np, name) for name in _SAME.split()},
)
_special = _module(
    "cupyx.scipy.special",
    expit=_Ufunc(_expit, 1),
    **{name: _Ufunc(getattr(scipy.special, name), 1) for name in ("erf", "erfc", "ndtr")},
)
_sparse = _module(
    "cupyx.scipy.sparse",
    coo_matrix=coo_matrix,
    csr_array=csr_array,
    csr_matrix=csr_matrix,
    issparse=lambda x: isinstance(x, _csr | coo_matrix),
)
_scipy = _module("cupyx.scipy", sparse=_sparse, special=_special)
_cupyx = _module("cupyx", empty_pinned=np.empty, scipy=_scipy, zeros_pinned=np.zeros)
_MODULES = (
    *(cupy, _cuda, _kernels, _lib, _memory, _runtime, _tricks),
    *(_cupyx, _scipy, _sparse, _special),
)
state = State()


def real() -> Any:
    """CuPy itself, if it is there and has a device, or has to have one; else None."""
    try:
        import cupy as module

        is_usable = module.cuda.runtime.getDeviceCount() > 0
    except Exception:
        if "SPARSESCAN_ON_GPU" in os.environ:
            raise
        return None
    return module if is_usable or "SPARSESCAN_ON_GPU" in os.environ else None


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let ``import cupy`` find the stand-in until the test ends, and return it."""
    state.reset()
    for module in _MODULES:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return cupy
