"""The gate through which addresses of arrays go to kernels, which see neither strides nor dtypes.

No other file asks an array of NumPy or CuPy for its address; compiled functions, and calls that
have no time for this, take ``address_of`` of :mod:`sparsescan.kernels.addresses`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def kernel_address(array: Any, strided: int = 0, dtype: DTypeLike | None = None) -> int:
    """Return the address of the first element of an array of NumPy or CuPy, for a kernel.

    Parameters
    ----------
    array : ndarray
        The array.
    strided : int, default 0
        How many leading axes the kernel follows by strides that it is told. The others must be
        contiguous.
    dtype : dtype, optional
        What the kernel reads, if the caller knows it.

    Raises
    ------
    BufferError
        If a kernel would read something else than the array: an error of this package, whose
        callers make copies.
    """
    is_read = dtype is None or array.dtype == dtype
    if not (_is_contiguous(array, strided) and is_aligned(array) and is_read):
        raise BufferError(
            f"a kernel cannot follow an array of shape {array.shape}, strides {array.strides} and "
            f"dtype {array.dtype}: its axes from {strided} on are not one piece of aligned memory, "
            f"or not of dtype {np.dtype(dtype or array.dtype)}"
        )
    return place_of(array)


def _is_contiguous(array: Any, strided: int) -> bool:
    """Return whether the axes behind the first ones are one piece of memory; makes no view."""
    if not strided or not array.size:
        return not array.size or bool(array.flags.c_contiguous)
    expected, last = array.itemsize, strided - 1
    for size, step in zip(array.shape[:last:-1], array.strides[:last:-1], strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def is_aligned(array: Any) -> bool:
    """Return whether the elements of an array of NumPy or CuPy lie at multiples of their size."""
    if isinstance(array, np.ndarray):
        return array.flags.aligned
    steps = array.data.ptr, *array.strides
    return not any(step % array.itemsize for step in steps)


def place_of(array: Any) -> int:
    """Return where an array of any library begins, to compare it with others: not for kernels."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    if hasattr(getattr(array, "data", None), "ptr"):  # CuPy's
        return int(array.data.ptr)
    return int(array.__cuda_array_interface__["data"][0])


class _At:
    """Memory at an address, as NumPy reads it."""

    def __init__(self, interface: dict[str, Any], address: int) -> None:
        self.__array_interface__ = interface | {"data": (address, False)}


def array_at_address(address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a contiguous array at an address, where there need be no memory."""
    interface = {"version": 3, "shape": shape, "typestr": np.dtype(dtype).str}
    return np.asarray(_At(interface, address))


def writeable(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in the memory of one, which can be written."""
    return np.asarray(_At(array.__array_interface__, place_of(array)))
