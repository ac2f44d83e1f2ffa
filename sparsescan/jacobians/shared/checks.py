"""Arguments of layers, read or refused."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays.arrays import read_array
from ...errors import DeviceError, InputError, InputTypeError, short
from ...symbolic.pattern import check_ordered

Shape = tuple[int, ...]

# Bounds for the elements of an array, so that int64 can count some such arrays, and for its axes.
_MOST, _AXES = int(np.iinfo(np.int64).max) >> 8, 32


def check_sizes(name: str, value: Any, count: int | None = None, least: int = 1) -> Shape:
    """Return `value` as a tuple of integers; one integer stands for `count` of them.

    Raises an error that names it if it is something else, has another length, or has an entry below
    `least`.
    """
    shown = short(value)
    try:
        if count is not None and not hasattr(value, "__len__"):
            sizes = (operator.index(value),) * count
        else:
            check_ordered(value)
            sizes = tuple(operator.index(size) for size in itertools.islice(value, _AXES + 1))
    except Exception:  # a caller's own class may raise any
        wanted = "integers" if count is None else f"an integer or {count} integers"
        raise InputTypeError(f"{name} is {shown}; expected {wanted}") from None
    if count is not None and len(sizes) != count:
        raise InputError(f"{name} is {shown}; expected {count} integers")
    if len(sizes) > _AXES:
        raise InputError(f"{name} is {shown}; expected at most {_AXES} integers")
    if any(size < least for size in sizes):
        raise InputError(f"{name} is {shown}; expected integers of at least {least}")
    if math.prod(sizes) > _MOST:
        raise InputError(f"{name} is {shown}; expected a product of at most {_MOST}")
    return sizes


def check_dim(name: str, dim: Any, shape: tuple[int, ...]) -> int:
    """Return the axis of a sample for `dim`, which counts the batch axis, too."""
    try:
        axis = operator.index(dim)
    except Exception:  # a caller's own class may raise any
        raise InputTypeError(f"{name} is {short(dim)}; expected an integer") from None
    axis += len(shape) + 1 if axis < 0 else 0
    if not 1 <= axis <= len(shape):
        raise InputError(
            f"{name} is {short(dim)}; expected an axis of {batched(shape)} other than the batch"
        )
    return axis - 1


def batched(shape: Shape) -> str:
    """Return how an error message shows the shape of a batch of samples."""
    return f"({', '.join(map(str, ('batch', *shape)))})"


def on_host(name: str, array: Any) -> NDArray[Any]:
    """Return an array that a training step may take, or raise an error that names it."""
    checked = read_array(name, array)
    if type(checked) is not np.ndarray:
        raise DeviceError(f"{name} is on a GPU; expected an array of NumPy, as training steps take")
    return checked
