"""NumPy or CuPy: the library that arrays come from, where they lie, and memory for new ones."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import DeviceError, InputError, InputTypeError, MemoryLimitError

__all__ = [
    "Constant",
    "address_of",
    "beside",
    "check_array",
    "check_memory",
    "check_one_place",
    "contiguous",
    "device_of",
    "is_cupy",
    "is_on_device",
    "load_cupy",
    "namespace",
    "on_device",
    "output",
    "sparse",
    "special",
    "upload",
    "upload_all",
]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
# Arrays smaller than this are made without asking how much memory there is.
_SMALL = 1 << 26
_INSTALL = "pip install 'sparsescan[cuda13]', or [cuda12]"


def is_cupy(array: Any) -> bool:
    """Whether `array` is CuPy's."""
    kind = type(array)
    return kind is not np.ndarray and kind.__module__.partition(".")[0] == "cupy"


def namespace(*arrays: Any) -> Any:
    """The module, ``numpy`` or ``cupy``, whose functions take these arrays; Nones do not count."""
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
    """Whether `array` lies on a CUDA device: CuPy's, PyTorch's, Numba's or another library's."""
    if type(array) is np.ndarray:
        return False
    try:
        return is_cupy(array) or hasattr(array, "__cuda_array_interface__")
    except RuntimeError:
        # PyTorch refuses what requires grad. Only a tensor on a device gets there.
        return True


def on_device(array: Any, name: str = "an array") -> Any:
    """A CuPy array in the memory of another library's array on a CUDA device.

    If that library says on which stream it works, this waits for it.
    """
    if is_cupy(array):
        return array
    kind = f"{type(array).__module__}.{type(array).__name__}"
    try:
        import cupy
    except ImportError:
        raise DeviceError(
            f"{name} is a {kind} on a CUDA device, but CuPy cannot be imported: {_INSTALL}"
        ) from None
    try:
        return cupy.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputTypeError(f"{name} is a {kind} that CuPy cannot read: {error}") from None


def device_of(array: Any) -> int | None:
    """The number of the CUDA device that an array of CuPy lies on; None for one of NumPy."""
    if type(array) is np.ndarray or not is_cupy(array):
        return None
    device: int = array.data.device_id
    return device


def address_of(array: Any) -> int:
    """Address of the first element of an array of NumPy or CuPy."""
    address: int = array.data.ptr if is_cupy(array) else array.ctypes.data
    return address


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
    """With this, CuPy works on the device of `array`; it does nothing for one of NumPy."""
    device: AbstractContextManager[Any] = array.device if is_cupy(array) else nullcontext()
    return device


def contiguous(array: Any, dtype: np.dtype[Any]) -> Any:
    """`array` if it is C-contiguous and of this dtype, else a copy beside it."""
    if type(array) is np.ndarray:
        return np.ascontiguousarray(array, dtype)
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    with beside(array):
        return namespace(array).ascontiguousarray(array, dtype)


def upload(array: Any) -> Any:
    """A copy of a NumPy array on the current device."""
    import cupy

    return cupy.asarray(array)


def upload_all(arrays: Sequence[Any], dtype: np.dtype[Any]) -> list[Any]:
    """Copies of NumPy arrays, converted to `dtype`, by one transfer; None stays None."""
    distinct = {id(array): array for array in arrays if array is not None}
    flat = [np.empty(0, dtype), *(array.reshape(-1) for array in distinct.values())]
    together = upload(np.concatenate(flat, dtype=dtype))
    copies: dict[int, Any] = {}
    start = 0
    for key, array in distinct.items():
        copies[key] = together[start : start + array.size].reshape(array.shape)
        start += array.size
    return [None if array is None else copies[id(array)] for array in arrays]


def load_cupy() -> Any:
    """CuPy, if it, numba-cuda and a device can be used; else an error that says what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CuPy cannot be imported ({error}): {_INSTALL}") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"no CUDA device can be used: {error}") from None
    if count == 0:
        raise DeviceError("no CUDA device can be used: the driver has none")
    try:
        from .kernels import _device  # noqa: F401
    except ImportError as error:
        raise DeviceError(f"Numba's CUDA target cannot be used ({error}): {_INSTALL}") from None
    return cupy


def special(xp: Any) -> Any:
    """The special functions that go with :func:`namespace`."""
    if xp is np:
        import scipy.special

        return scipy.special
    import cupyx.scipy.special

    return cupyx.scipy.special


def sparse(xp: Any) -> Any:
    """The sparse matrices that go with :func:`namespace`."""
    if xp is np:
        import scipy.sparse

        return scipy.sparse
    import cupyx.scipy.sparse

    return cupyx.scipy.sparse


class Constant:
    """A NumPy array, and its copy on every device where one is asked for."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._host = array
        self._device: dict[int | None, Any] | None = None

    def on(self, xp: Any) -> Any:
        """The array as one of `xp`, on the current device."""
        if xp is np:
            return self._host
        if self._device is None:
            self._device = {}
        number = xp.cuda.Device().id if hasattr(xp, "cuda") else None
        if number not in self._device:
            self._device[number] = xp.asarray(self._host)
        return self._device[number]

    def __getstate__(self) -> dict[str, Any]:
        # A copy, maybe in another process, makes its own where it needs one.
        return {"_host": self._host, "_device": None}


def check_array(name: str, array: Any) -> Any:
    """`array` as an array of float32 or float64, of NumPy or CuPy, or an error that names it.

    The byte order is the native one. What another library has on a CUDA device is not copied.
    """
    # The usual case first, since this is done for every step of a chain.
    if type(array) is np.ndarray and array.dtype in _FLOATS and array.dtype.isnative:
        return array
    if not is_on_device(array):
        return _check_on_host(name, array)
    array = on_device(array, name)
    if array.dtype not in _FLOATS:
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected float32 or float64")
    if array.data.ptr % array.itemsize or any(step % array.itemsize for step in array.strides):
        raise InputError(f"{name} is not aligned; expected multiples of {array.itemsize} bytes")
    return array


def _check_on_host(name: str, array: ArrayLike) -> NDArray[np.floating[Any]]:
    try:
        array = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        # RuntimeError is what PyTorch raises for a tensor that requires grad.
        raise InputTypeError(f"{name} is not an array: {error}") from None
    if array.dtype.newbyteorder("=") not in _FLOATS:
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected float32 or float64")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def output(
    xp: Any,
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    what: object = "an array",
    apart: Iterable[Any] = (),
) -> Any:
    """`out` if it is a contiguous array of this shape and dtype, a new one if it is None.

    What is written to it must not change the arrays of NumPy in `apart`, which are read meanwhile.
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
    if needed < _SMALL:
        return
    left = _memory_left()
    if left is not None and needed > left:
        raise MemoryLimitError(
            f"{what} would take {needed:,} bytes; this machine has {left:,} left"
        )


def _memory_left() -> int | None:
    """Bytes that a new array may take, or None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
