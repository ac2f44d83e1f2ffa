"""NumPy or CuPy: the library that arrays come from, where they lie, and memory for new ones."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import Allocating, DeviceError, InputError, InputTypeError, MemoryLimitError
from ..formatting import format_bytes
from .addresses import is_aligned, place_of, writeable

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_FLOATS = (_FLOAT32, _FLOAT64)
_NUMBERS = (*_FLOATS, np.dtype(np.complex64), np.dtype(np.complex128))
# Arrays smaller than this are made without asking how much memory there is.
_SMALL = 1 << 26
_INSTALL = "pip install 'sparsescan[cuda13]', or [cuda12]"
# CuPy, once all has been found that goes with it.
_usable: Any = None
# The handle of the default stream of a thread, which is another stream in each thread.
_PER_THREAD = 2


def is_cupy(array: Any) -> bool:
    """Return whether `array` is CuPy's."""
    kind = type(array)
    return kind is not np.ndarray and kind.__module__.partition(".")[0] == "cupy"


def namespace(*arrays: Any) -> Any:
    """Return the module, ``numpy`` or ``cupy``, whose functions take these arrays or Nones."""
    for array in arrays:
        if type(array) is not np.ndarray and array is not None:
            break
    else:
        return np
    on_device = [is_cupy(array) for array in arrays if array is not None]
    if True not in on_device:
        return np
    if False in on_device:
        raise DeviceError(
            "some arrays are CuPy's and some NumPy's; expected input and parameters in one place"
        )
    import cupy

    return cupy


def is_on_device(array: Any) -> bool:
    """Return whether an array of CuPy, PyTorch, Numba or others lies on a CUDA device."""
    if type(array) is np.ndarray or isinstance(array, type):
        return False
    try:
        return is_cupy(array) or hasattr(array, "__cuda_array_interface__")
    except RuntimeError:
        # PyTorch refuses a tensor on a device that requires grad, and any that is sparse CSR.
        return bool(getattr(array, "is_cuda", True))


def on_device(array: Any, name: str = "an array") -> Any:
    """Return a CuPy array in the memory of another library's array on any CUDA device.

    If that library says on which stream it works, this waits for it.
    """
    if is_cupy(array):
        return array
    _check_dense(name, array)
    kind = f"{type(array).__module__}.{type(array).__name__}"
    try:
        import cupy
    except ImportError:
        raise DeviceError(
            f"{name} is a {kind} on a CUDA device, but CuPy cannot be imported: {_INSTALL}"
        ) from None
    try:
        if getattr(array, "is_neg", bool)():
            raise ValueError("numbers in memory have the other sign; .resolve_neg() copies them")
        # CuPy copies what lies on another device than the current one.
        with _device_under(cupy, place_of(array)):
            return cupy.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputTypeError(f"{name} is a {kind} that CuPy cannot read: {error}") from None


def _device_under(cupy: Any, address: int) -> AbstractContextManager[Any]:
    """Return the device on which an address lies, as a context; an empty one for no address."""
    number = cupy.cuda.runtime.pointerGetAttributes(address).device if address else -1
    device: AbstractContextManager[Any] = cupy.cuda.Device(number) if number >= 0 else nullcontext()
    return device


def device_of(array: Any) -> int | None:
    """Return the number of the CUDA device that an array of CuPy lies on; None for one of NumPy."""
    if type(array) is np.ndarray or not is_cupy(array):
        return None
    device: int = array.data.device_id
    return device


def is_same_stream(stream: Any, other: Any) -> bool:
    """Return whether two streams of CuPy are one of the current device, whose work is in turn."""
    return bool(stream.ptr == other.ptr != _PER_THREAD)


def check_one_place(
    name: str, device: int | None, first_name: str, first_device: int | None
) -> None:
    """Raise, with both arguments named, unless they lie on one device or both in host memory."""
    if device == first_device:
        return
    places = [
        "in host memory" if number is None else f"on device {number}"
        for number in (device, first_device)
    ]
    hint = "" if None not in (device, first_device) else ": cupy.asarray copies there"
    raise DeviceError(
        f"{name} is {places[0]}, {first_name} {places[1]}; expected all on one device{hint}"
    )


def beside(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which CuPy works on the device of `array`; an empty one for NumPy's."""
    device: AbstractContextManager[Any] = array.device if is_cupy(array) else nullcontext()
    return device


def contiguous(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return `array` if it is C-contiguous, aligned and of this dtype, else a copy beside it."""
    if type(array) is np.ndarray:
        array = np.ascontiguousarray(array, dtype)
        return array if array.flags.aligned else array.copy()
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    with beside(array):
        return namespace(array).ascontiguousarray(array, dtype)


def flat(array: Any) -> Any:
    """Return the numbers of an array end to end: its memory, if :func:`contiguous` leaves it."""
    return contiguous(array, array.dtype).reshape(-1)


def for_kernels(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return what :func:`contiguous` does, for kernels that read it.

    Numba compiles other kernels for arrays that cannot be written, if it can: a view of one counts
    as writeable. Only kernels may have it.
    """
    array = contiguous(array, dtype)
    if type(array) is np.ndarray and not array.flags.writeable:
        array = writeable(array)
    return array


def upload(array: Any) -> Any:
    """Return a copy of a NumPy array on the current device."""
    import cupy

    return cupy.asarray(array)


def upload_all(arrays: Sequence[Any], dtype: np.dtype[Any]) -> list[Any]:
    """Return copies of NumPy arrays, converted to `dtype`, by one transfer; None stays None.

    An array that several of them view is sent once.
    """
    keys = [None if array is None else _memory_of(array) for array in arrays]
    distinct = {key: array for key, array in zip(keys, arrays, strict=True) if key is not None}
    flat = [np.empty(0, dtype), *(array.reshape(-1) for array in distinct.values())]
    together = upload(np.concatenate(flat, dtype=dtype))
    copies: dict[Any, Any] = {None: None}
    start = 0
    for key, array in distinct.items():
        copies[key] = together[start : start + array.size].reshape(array.shape)
        start += array.size
    return [copies[key] for key in keys]


def _memory_of(array: NDArray[Any]) -> tuple[Any, ...]:
    """Return what is equal for two arrays that have the same elements of memory."""
    return place_of(array), array.shape, array.strides, array.dtype


def load_cupy() -> Any:
    """Return CuPy if it, numba-cuda and a device can be used; else raise what is missing."""
    global _usable
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"a CUDA device was asked for, but CuPy cannot be imported ({error}): {_INSTALL}"
        ) from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"no CUDA device can be used: {error}") from None
    if count == 0:
        raise DeviceError("no CUDA device can be used: the driver has none")
    if cupy is _usable:
        return cupy
    # CuPy looks when it is imported, too.
    if os.environ.get("CUPY_ENABLE_UMP", "0") not in ("", "0"):
        raise DeviceError(
            "CUPY_ENABLE_UMP is set, which lets CuPy use memory of the host in place of copies on "
            "the device; expected it unset, since a scan changes what it has sent"
        )
    check_numba_cuda()
    _usable = cupy
    return cupy


def check_numba_cuda() -> None:
    """Raise an error that says why kernels for a GPU cannot be written."""
    try:
        from . import cuda  # noqa: F401
    except ImportError as error:
        raise DeviceError(f"Numba's CUDA target cannot be used ({error}): {_INSTALL}") from None


def special(xp: Any) -> Any:
    """Return the special functions that go with :func:`namespace`."""
    if xp is np:
        import scipy.special

        return scipy.special
    import cupyx.scipy.special

    return cupyx.scipy.special


def sparse(xp: Any) -> Any:
    """Return the sparse matrices that go with :func:`namespace`."""
    if xp is np:
        import scipy.sparse

        return scipy.sparse
    import cupyx.scipy.sparse

    return cupyx.scipy.sparse


class Mirrored:
    """A NumPy array, and its copy on every device where one is asked for."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._host = array
        # By device: the copy, the stream that it is made on, and when it is there.
        self._device: dict[int, tuple[Any, Any, Any]] | None = None

    def on(self, xp: Any) -> Any:
        """Return the array as one of `xp`, on the current device, for the current stream."""
        if xp is np:
            return self._host
        if self._device is None:
            self._device = {}
        number, stream = xp.cuda.Device().id, xp.cuda.get_current_stream()
        if number not in self._device:
            ready = xp.cuda.Event(disable_timing=True)
            self._device[number] = xp.asarray(self._host), stream, ready
            ready.record(stream)
        copy, home, ready = self._device[number]
        # A stream that captures a graph can neither wait for what is not in it, nor ask for it.
        if ready is not None and not is_same_stream(stream, home) and not stream.is_capturing():
            if ready.done:
                self._device[number] = copy, home, None
            else:
                stream.wait_event(ready)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        # A copy, maybe in another process, makes its own where it needs one.
        return {"_host": self._host, "_device": None}


def check_array(name: str, array: Any) -> Any:
    """Return `array` as one of NumPy or CuPy, of float32 or float64, or raise an error.

    The byte order is the native one. Memory of another library on a CUDA device is not copied.
    """
    # The usual case first, since this is done for every step of a chain.
    if type(array) is np.ndarray:
        dtype = array.dtype
        if dtype is _FLOAT64 or dtype is _FLOAT32 or (dtype in _FLOATS and dtype.isnative):
            return array
    if not is_on_device(array):
        return _check_on_host(name, array)
    array = on_device(array, name)
    if array.dtype not in _FLOATS:
        raise _unsupported(name, array.dtype)
    if not is_aligned(array):
        raise InputError(f"{name} is not aligned; expected multiples of {array.itemsize} bytes")
    return array


def read_array(name: str, array: Any, *, is_complex: bool = False) -> Any:
    """Return what :func:`check_array` does, as an array whose form nobody else can change.

    Another thread may set shape, strides or dtype of a caller's array, between a check and a kernel
    that trusts it; of a view of NumPy's it cannot. (Its values may change, which harms nothing.)
    With `is_complex`, arrays in host memory may be of complex numbers, too.
    """
    is_own = type(array) is np.ndarray
    array = array.view() if is_own else array
    is_real = is_own and array.dtype in _FLOATS
    if is_complex and not is_real and not is_on_device(array):
        return _check_on_host(name, array, _NUMBERS)
    return check_array(name, array)


def _unsupported(
    name: str, dtype: np.dtype[Any], dtypes: Sequence[np.dtype[Any]] = _FLOATS
) -> InputTypeError:
    """Return the error for numbers of a type that kernels do not compute with."""
    expected = " or ".join([", ".join(map(str, dtypes[:-1])), str(dtypes[-1])])
    hint = ""
    if dtype.kind == "c" and dtypes is _FLOATS:
        hint = (
            ": sparsescan.affine_scan takes complex numbers in host memory; elsewhere write each "
            "a + bi as the block [[a, -b], [b, a]]"
        )
    elif dtype.kind in "biuf":
        hint = ": convert it with .astype(float)"
    return InputTypeError(f"{name} has dtype {dtype}; expected {expected}{hint}")


def _check_on_host(
    name: str, array: ArrayLike, dtypes: Sequence[np.dtype[Any]] = _FLOATS
) -> NDArray[Any]:
    array = host_array(name, array)
    dtype = array.dtype.newbyteorder("=")
    if dtype not in dtypes:
        raise _unsupported(name, array.dtype, dtypes)
    with Allocating(f"a copy of {name}, of shape {array.shape},"):
        return array.astype(dtype, copy=False)


def host_array(name: str, value: Any) -> NDArray[Any]:
    """Return any array in host memory as one of NumPy, or raise an error that names it."""
    _check_no_mask_inside(name, value)
    _check_dense(name, value)
    try:
        with Allocating(name):
            array = np.asarray(value)
    except MemoryLimitError:
        raise
    except Exception as error:
        # NumPy raises it, PyTorch (for a tensor that requires grad), or a caller's own class.
        raise InputTypeError(f"{name} is not an array: {error}") from None
    # It is a view, since a caller's class may have given an array that it keeps.
    return array.view(np.ndarray)


_MASKED = "has a mask, which would be lost; expected an array without one: .filled(value) makes it"


def check_no_mask(name: str, value: Any) -> None:
    """Raise if a value is a masked array, of which NumPy would read what lies under the mask."""
    if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray):
        raise InputTypeError(f"{name} {_MASKED}")


def _check_no_mask_inside(name: str, value: Any) -> None:
    """Raise if lists in lists, which may hold themselves, hold a masked array."""
    left, seen = [value], set()
    while left:
        one = left.pop()
        check_no_mask(name, one)
        if isinstance(one, (list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            left += one


def _check_dense(name: str, value: Any) -> None:
    """Raise, with the way to what is expected, for matrices that are no arrays."""
    module = type(value).__module__
    if module.startswith(("scipy.sparse", "cupyx.scipy.sparse")):
        raise InputTypeError(
            f"{name} is a {type(value).__name__}; expected an array: .toarray() makes one"
        )
    if module.startswith("torch") and "sparse" in str(getattr(value, "layout", None)):
        place = "on a CUDA device" if value.is_cuda else "in host memory"
        raise InputTypeError(
            f"{name} is a sparse tensor of PyTorch {place}; expected an array, or for a Jacobian a "
            "csr_array of SciPy or CuPy made of its values(), col_indices() and crow_indices(), "
            "which .to_sparse_csr() has"
        )


def output(
    xp: Any,
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    what: object = "an array",
    apart: Iterable[Any] = (),
) -> Any:
    """Return a new array if `out` is None, else a view of it, if it is contiguous and of this form.

    It must not overlap the NumPy arrays in `apart`, which are read while it is written.
    """
    if out is None:
        needed = math.prod(shape) * dtype.itemsize
        if xp is np and needed >= _SMALL:
            check_memory(f"an array of shape {shape} for {what}", needed)
        return xp.empty(shape, dtype)
    if not isinstance(out, xp.ndarray):
        raise InputTypeError(
            f"out is a {type(out).__module__}.{type(out).__name__}; expected an array of "
            f"{xp.__name__}"
        )
    if xp is np:
        check_no_mask("out", out)
        # Nobody else can change the form of a view.
        out = out.view(np.ndarray)
    # NumPy's carray: contiguous, aligned and writeable.
    usable = out.flags.carray if xp is np else out.flags.c_contiguous
    if out.shape != shape or out.dtype != dtype or not usable:
        order = "" if usable else ", not contiguous, aligned and writeable"
        raise InputError(
            f"out is an array of shape {out.shape} and dtype {out.dtype}{order}; expected a "
            f"contiguous one of shape {shape} and dtype {dtype}"
        )
    if xp is np:
        for array in apart:
            if np.may_share_memory(out, array):
                raise InputError(
                    "out shares memory with the input, the output or a parameter of the layer; "
                    "expected an array of its own"
                )
    return out


def check_memory(what: str, needed: int) -> None:
    """Raise, with the bytes named, if this machine has not so much memory left."""
    left = left_instead_of(needed)
    if left is not None:
        raise MemoryLimitError(
            f"{what} would take {format_bytes(needed)}; this machine has {format_bytes(left)} left"
        )


def left_instead_of(needed: int) -> int | None:
    """Return the bytes that this machine has left, if they are fewer than these; None if not."""
    if needed < _SMALL:
        return None
    left = memory_left()
    return left if needed > left else None


def memory_left() -> int:
    """Return bytes that a new array may take; more than any system has where it does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        # NumPy would not call it a lack of memory if there were no limit.
        return sys.maxsize
