"""Memory for kernels, and calls of kernels: made at once, or recorded by a subclass."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..kernels.addresses import address_of
from .threads import share

Array = NDArray[Any]
Task = Callable[[], None]

LINE = 64  # bytes of a cache line, which no vector crosses: two take twice as long to load
# From this many bytes on, the memory of a result is kept for reuse: the system would take it back
# when it is free, and touching new memory takes as long as a whole pass. And how many results keep
# their memory, in turn.
LARGE, _TURNS = 1 << 16, 2


def aligned_zeros(count: int, dtype: DTypeLike) -> Array:
    """Return zeros that begin with a cache line."""
    return _aligned(np.zeros, (count,), dtype)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return an array that begins with a cache line, so that threads write no line together."""
    return _aligned(np.empty, shape, dtype)


def _aligned(create: Callable[..., Array], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    dtype = np.dtype(dtype)
    return _within(create(math.prod(shape) * dtype.itemsize + LINE, np.uint8), shape, dtype)


def _within(room: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in memory that has a cache line more."""
    return np.ndarray(shape, dtype, room, -address_of(room) % LINE)


def _references(rooms: list[Array], place: int) -> int:
    room = rooms[place]
    return sys.getrefcount(room)


# The reference count of an array that only the list holds.
_ALONE = _references([np.empty(0)], 0)


def call_all(tasks: Sequence[Task]) -> None:
    """Call all, on threads that share them."""
    share(lambda k: tasks[k](), len(tasks))


class Calls:
    """Give memory to kernels, and call them."""

    def __init__(self) -> None:
        self._rooms: list[Array] = []
        self._results: dict[str, list[Array]] = {}

    def launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Call a kernel."""
        kernel(*arguments)

    def together(self, tasks: Sequence[Task]) -> None:
        """Call functions that launch kernels and are independent of each other."""
        call_all(tasks)

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        """Return zeros that begin with a cache line."""
        return aligned_zeros(count, dtype)

    def room(self, count: int, dtype: DTypeLike) -> Array:
        """Return memory of any content that begins with a cache line."""
        return aligned_zeros(count, dtype)

    def result(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return memory for a result of the caller, by a unique name.

        It reuses an earlier result's memory, if nobody holds that result or a view of it.
        """
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize + LINE
        if size < LARGE:
            return aligned_empty(shape, dtype)
        rooms = self._results.setdefault(name, [])
        if rooms and len(rooms[0]) != size:
            rooms.clear()
        free = [k for k in range(len(rooms)) if _references(rooms, k) == _ALONE]
        if not free:
            # From now on only the caller holds the oldest one.
            rooms[:] = [*rooms, np.empty(size, np.uint8)][-_TURNS:]
        return _within(rooms[free[0] if free else -1], shape, dtype)

    def borrow(self, count: int, dtype: DTypeLike) -> Array:
        """Return memory of any content for one of the functions that run together."""
        try:
            room = self._rooms.pop()
        except IndexError:  # other threads may have taken the last one just now
            return self.room(count, dtype)
        return room if len(room) >= count else self.room(count, dtype)

    def give_back(self, room: Array) -> None:
        """Return borrowed memory."""
        self._rooms.append(room)
