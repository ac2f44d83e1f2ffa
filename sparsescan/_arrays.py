"""NumPy or CuPy: the library that arrays come from, and memory for new ones."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .containers import check_float
from .errors import DeviceError, InputError, InputTypeError, MemoryLimitError

__all__ = [
    "Constant",
    "check_array",
    "check_memory",
    "is_cupy",
    "namespace",
    "on_device",
    "output",
    "special",
]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
# Arrays smaller than this are made without asking how much memory there is.
_SMALL = 1 << 26


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


def on_device(array: Any) -> Any:
    """A CuPy array in the memory of another library's array on a CUDA device."""
    import cupy

    return cupy.asarray(array)


def special(xp: Any) -> Any:
    """The special functions that go with :func:`namespace`."""
    if xp is np:
        import scipy.special

        return scipy.special
    import cupyx.scipy.special

    return cupyx.scipy.special


class Constant:
    """A NumPy array, and its copy on a device, made when that is first asked for."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._host = array
        self._device: Any = None

    def on(self, xp: Any) -> Any:
        """The array as one of `xp`."""
        if xp is np:
            return self._host
        if self._device is None:
            self._device = xp.asarray(self._host)
        return self._device

    def __getstate__(self) -> dict[str, Any]:
        # A copy, maybe in another process, makes its own where it needs one.
        return {"_host": self._host, "_device": None}


def check_array(name: str, array: Any) -> Any:
    """`array` as an array of float32 or float64, of NumPy or CuPy, or an error that names it."""
    if not is_cupy(array):
        return check_float(name, array)
    if array.dtype not in _FLOATS:
        raise InputTypeError(f"{name} has dtype {array.dtype}; expected float32 or float64")
    return array


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
