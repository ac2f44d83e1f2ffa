"""Memory for kernels, and calls of them: made at once, or noted by who takes the place of this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..kernels.addresses import address_of
from .threads import share

__all__ = ["LINE", "Calls", "aligned_empty", "aligned_zeros", "call_all"]

Array = NDArray[Any]
Task = Callable[[], None]

LINE = 64  # bytes of a cache line, which no vector crosses: two take twice as long to load


def aligned_zeros(count: int, dtype: DTypeLike) -> Array:
    """Return zeros that begin with a cache line."""
    return _aligned(np.zeros, (count,), dtype)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return an array that begins with a cache line, so that threads write no line together."""
    return _aligned(np.empty, shape, dtype)


def _aligned(create: Callable[..., Array], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    dtype = np.dtype(dtype)
    room = create(math.prod(shape) * dtype.itemsize + LINE, np.uint8)
    return np.ndarray(shape, dtype, room, -address_of(room) % LINE)


def call_all(tasks: Sequence[Task]) -> None:
    """Call all, on threads that share them."""
    share(lambda k: tasks[k](), len(tasks))


class Calls:
    """Give memory to kernels, and call them."""

    def __init__(self) -> None:
        self._rooms: list[Array] = []

    def launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Call a kernel."""
        kernel(*arguments)

    def together(self, tasks: Sequence[Task]) -> None:
        """Call functions that launch kernels, and do not wait for each other."""
        call_all(tasks)

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        """Return zeros that begin with a cache line."""
        return aligned_zeros(count, dtype)

    def room(self, count: int, dtype: DTypeLike) -> Array:
        """Return memory of any content that begins with a cache line."""
        return aligned_zeros(count, dtype)

    def result(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return memory for what the caller gets, by a name that no other result has."""
        return aligned_empty(shape, dtype)

    def borrow(self, count: int, dtype: DTypeLike) -> Array:
        """Return memory of any content for one of the functions that run together."""
        room = self._rooms.pop() if self._rooms else self.room(0, dtype)
        return room if len(room) >= count else self.room(count, dtype)

    def give_back(self, room: Array) -> None:
        """Let others have what was borrowed."""
        self._rooms.append(room)
