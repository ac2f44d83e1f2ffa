"""Where activations lie in the memory of a training step, and tables of what weights join."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...symbolic.pattern import indptr_of
from ..shared.checks import Shape
from ..shared.windows import Window

Array = NDArray[Any]
Places = NDArray[np.int64]


class Map:
    """An activation of all samples and its gradient: places with a border of zeros.

    The border lies around the last two axes of a sample, and is as wide as the widest of what reads
    from it.

    Attributes
    ----------
    shape : tuple of int
        Shape of a sample, of at least two axes.
    border : list of list of int
        Zeros before and behind, for both of the last axes; that of the twin, if there is one.
    rectified : bool
        Whether it is 0 where it would be negative, and so is its gradient.
    twin : Map or None
        Another of the same shape, whose gradient is this one's, and in the same memory.
    blocks, room : int
        Blocks of samples, and the numbers of a place in each: one for each sample, and maybe more.
    x, grad : ndarray
        The activation and its gradient, flat, once they are allocated.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = (1,) * (2 - len(shape)) + shape
        self._border = [[0, 0], [0, 0]]
        self.rectified = False
        self.twin: Map | None = None
        self.blocks = self.room = 0
        self.x = self.grad = np.empty(0)

    def widen(self, axis: int, before: int, behind: int) -> None:
        """Make the border at least so wide; axis 0 is the last but one."""
        border = self.border[axis]
        border[:] = max(border[0], before), max(border[1], behind)

    @property
    def border(self) -> list[list[int]]:
        return self._border if self.twin is None else self.twin.border

    def join(self, twin: Map) -> None:
        """Let another map have the same gradient, and both the same border."""
        for axis, border in enumerate(self.border):
            twin.widen(axis, *border)
        self.twin = twin

    @property
    def padded(self) -> Shape:
        """The shape of a sample with its border."""
        sizes = (
            size + sum(border) for size, border in zip(self.shape[-2:], self.border, strict=True)
        )
        return (*self.shape[:-2], *sizes)

    @property
    def size(self) -> int:
        """How many places there are, with the border."""
        return math.prod(self.padded)

    def inner(self, array: Array) -> Array:
        """Return the places of an array without the border: ``(blocks, *shape, room)``."""
        # The numbers behind the last place are only there to be read by vectors.
        whole = array[: self.blocks * self.size * self.room]
        return self._inner(whole.reshape(self.blocks, *self.padded, self.room))

    def numbers(self) -> Places:
        """Return the number of each place without the border."""
        return self._inner(np.arange(self.size).reshape(*self.padded, 1))[..., 0]

    def _inner(self, padded: Array) -> Array:
        y, x = (
            slice(border[0], border[0] + size)
            for size, border in zip(self.shape[-2:], self.border, strict=True)
        )
        return padded[..., y, x, :]


class View(NamedTuple):
    """A map as a layer reads it: ``(blocks, channels, height, width)``, repeated along blocks."""

    map: Map
    sizes: tuple[int, int, int, int]

    def numbers(self) -> Places:
        """Return the number of each place."""
        return self.map.numbers().reshape(self.sizes)

    def begins(
        self, rows: slice = slice(None), columns: slice = slice(None)
    ) -> tuple[Places, Places]:
        """Return where channels begin, and where some of their places lie behind that."""
        numbers = self.numbers()
        behind = numbers[:, 0, rows, columns] - numbers[0, 0, 0, 0]
        return numbers[0, :, 0, 0], behind.reshape(-1)


class TapTable(NamedTuple):
    """The kept weights of a layer, by the channels of the windows.

    Attributes
    ----------
    small, large : ndarray of int
        Channels of the side that has a place for each window, and of the side that windows read.
    y, x : ndarray of int
        Which tap of a window.
    """

    small: Places
    large: Places
    y: Places
    x: Places

    def chosen(self, places: Any) -> TapTable:
        """Return some of them, or all in another order."""
        return TapTable(*(array[places] for array in self))


class PlaceTable(NamedTuple):
    """A table as kernels take it, but for samples; see :mod:`._kernels.places`.

    Attributes
    ----------
    order : ndarray of int
        Which kept weight each entry is.
    read_at, write_at : ndarray of int
        Where runs of positions begin, neighbours in what is read and in what is written.
    run : int
        Positions of a run.
    reach : tuple of int
        Channels that are read, and how far apart the places are that a position reads of each.
    sizes : tuple of int
        Places of the map that is read, and of the one that is written.
    """

    ptr: Places
    offset: Places
    order: Places
    read_at: Places
    row_at: Places
    write_at: Places
    run: int
    reach: tuple[int, int]
    sizes: tuple[int, int]


def gathering(
    taps: TapTable, windows: tuple[Window, Window], small: View, large: View
) -> PlaceTable:
    """Return the table by which a place of each window is the sum of what the window reads.

    Entries have the order of the taps, which are sorted by their small channels.
    """
    (y, x), (_, _, height, width), line = windows, small.sizes, large.map.padded[-1]
    run, every = _run(width, x.stride)
    moved = (np.arange(height)[:, None] * y.stride - y.before) * line
    moved = moved + np.arange(width)[every] * x.stride - x.before
    tap = taps.y * (y.dilation * line) + taps.x * x.dilation
    entries = np.arange(len(taps.small)), taps.small, taps.large, tap
    return _table(large, small, entries, moved, (slice(None), every), run)


def scattering(
    taps: TapTable, windows: tuple[Window, Window], small: View, large: View
) -> Iterator[PlaceTable]:
    """Yield tables by which places that windows read are sums over the windows that read them.

    There is a table for each place within a stride: the same taps reach all of its places.
    """
    (y, x), line = windows, small.map.padded[-1]
    for phase_y, phase_x in product(range(y.stride), range(x.stride)):
        (rows, row), (columns, column) = _phase(y, phase_y), _phase(x, phase_x)
        on_y, on_x = taps.y * y.dilation, taps.x * x.dilation
        chosen = np.flatnonzero((on_y % y.stride == phase_y) & (on_x % x.stride == phase_x))
        chosen = chosen[np.argsort(taps.large[chosen], kind="stable")]
        some = taps.chosen(chosen)
        back = (some.y * y.dilation - phase_y) // y.stride * line
        back += (some.x * x.dilation - phase_x) // x.stride
        run, every = _run(len(column), x.stride)
        moved = row[:, None] * line + column[every]
        written = rows, every if x.stride == 1 else columns
        yield _table(small, large, (chosen, some.large, some.small, -back), moved, written, run)


def _table(
    read: View,
    write: View,
    entries: tuple[Places, Places, Places, Places],
    moved: Places,
    written: tuple[slice, slice],
    run: int,
) -> PlaceTable:
    """Return a table from one view to another.

    Of each entry there are its order, its row, the channel that it reads, and how far its place is
    from that of the position.
    """
    (order, row, channel, offset), numbers = entries, read.numbers()
    return PlaceTable(
        indptr_of(row, write.sizes[1]),
        numbers[0, channel, 0, 0] - numbers[0, 0, 0, 0] + offset,
        order,
        (numbers[:, 0, :1, :1] + moved).reshape(-1),
        *write.begins(*written),
        run,
        (read.sizes[1], int(np.abs(offset).max(initial=0))),
        (read.map.size, write.map.size),
    )


def widen(windows: tuple[Window, Window], small: View, large: View) -> None:
    """Make the borders as wide as both kinds of tables need them."""
    for axis, window in enumerate(windows):
        count = small.sizes[2 + axis]
        reach = (count - 1) * window.stride + (window.kernel - 1) * window.dilation
        behind = reach - window.before - (window.size - 1)
        large.map.widen(axis, window.before, max(0, behind))
        # The window that begins at a place, and the first of those that reach it.
        back = (window.kernel - 1) * window.dilation // window.stride
        last = (window.size - 1 + window.before) // window.stride
        before = back - window.before // window.stride
        small.map.widen(axis, max(0, before), max(0, last - count + 1))


def _run(width: int, stride: int) -> tuple[int, slice]:
    """Return how many positions of a row are neighbours, and with which of them runs begin."""
    return (width, slice(0, 1)) if stride == 1 else (1, slice(None))


def _phase(window: Window, phase: int) -> tuple[slice, Places]:
    """Return the places at that distance behind a window's begin, and which window begins there."""
    first = (phase - window.before) % window.stride
    places = np.arange(first, window.size, window.stride)
    return slice(first, None, window.stride), (places + window.before - phase) // window.stride
