"""Arrays for kernels, and work on parts of them that threads share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..execution.threads import share

__all__ = [
    "LINE",
    "aligned_empty",
    "aligned_zeros",
    "call_all",
    "even_slices",
    "map_shared",
    "quiet",
]

LINE = 64  # bytes of a cache line, which no vector crosses: two take twice as long to load

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def quiet(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function overflow or divide by 0 without warnings: ∞ and NaN say so, as in PyTorch."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return call


def aligned_zeros(count: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros that begin with a cache line."""
    return _aligned(np.zeros, (count,), dtype)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array that begins with a cache line, so that threads write no line together."""
    return _aligned(np.empty, shape, dtype)


def _aligned(
    create: Callable[..., NDArray[Any]], shape: tuple[int, ...], dtype: DTypeLike
) -> NDArray[Any]:
    size, count = np.dtype(dtype).itemsize, math.prod(shape)
    room = create(count + LINE // size, dtype)
    start = -room.ctypes.data % LINE // size
    return room[start : start + count].reshape(shape)


def even_slices(length: int, count: int) -> list[slice]:
    """Cut `length` elements into `count` slices of almost equal size."""
    ends = [length * k // count for k in range(count + 1)]
    return [slice(*ends[k : k + 2]) for k in range(count)]


def map_shared(call: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """Return the results of `call` for each of the parts, which threads share."""
    results: list[Any] = [None] * len(parts)

    # Each thread has an error state of its own.
    @quiet
    def call_for(k: int) -> None:
        results[k] = call(parts[k])

    share(call_for, len(parts))
    return results


def call_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Call all, on threads that share them."""
    share(lambda k: tasks[k](), len(tasks))
