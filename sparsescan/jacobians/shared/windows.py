"""Windows that slide along an axis, as convolutions and poolings have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays.arrays import check_memory
from ...errors import InputError
from ...symbolic.pattern import indptr_of
from .checks import Shape

Array = Any


class Connections(NamedTuple):
    """The outputs that each place of an axis reaches, increasing, and by which weights.

    Place ``i`` has its connections from ``ptr[i]`` to ``ptr[i + 1]`` of the other two arrays.
    """

    ptr: NDArray[Any]
    weight: NDArray[Any]
    output: NDArray[Any]


@dataclass(frozen=True)
class Window:
    """Windows of one size that slide along an axis at equal distances.

    Attributes
    ----------
    size : int
        Size of the axis.
    kernel : int
        Taps of a window.
    stride : int
        From a window to the next one.
    before, after : int
        Padding at both ends of the axis.
    dilation : int
        From a tap to the next one.
    """

    size: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int

    def count(self, ceil_mode: bool = False) -> int:
        """Return how many windows there are; less than 1 if the axis is too short for one.

        With `ceil_mode`, the last window may reach beyond the padding, if it starts before its end.
        """
        room = self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if not ceil_mode:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        starts_outside = (count - 1) * self.stride >= self.size + self.before
        return count - 1 if starts_outside else count

    def inputs(self, count: int) -> NDArray[Any]:
        """Return the place under each tap, shape ``(count, kernel)``; it may lie in the padding."""
        check_memory("the windows of a layer", 8 * count * self.kernel)
        starts = np.arange(count) * self.stride - self.before
        return starts[:, None] + np.arange(self.kernel) * self.dilation

    def connections(self, count: int, transposed: bool) -> Connections:
        """Return which windows read each place, and by which taps; or what each window reads."""
        inputs = self.inputs(count)
        window, tap = np.nonzero((inputs >= 0) & (inputs < self.size))
        place = inputs[window, tap]
        if transposed:
            return Connections(indptr_of(window, count), tap, place)
        order = np.argsort(place, kind="stable")
        return Connections(indptr_of(place, self.size), tap[order], window[order])


def slide(xp: Any, images: Array, y: Window, x: Window) -> Array:
    """Return every window of every image, ``(m, C, OH, OW, KH, KW)``, to be read only.

    Images have the shape ``(m, C, H, W)``. The result is a view, of a copy if there is padding.
    """
    axes = y, x
    if any(axis.before or axis.after for axis in axes):
        padded = [axis.size + axis.before + axis.after for axis in axes]
        inner = (slice(axis.before, axis.before + axis.size) for axis in axes)
        unpadded = images
        images = xp.zeros((*images.shape[:2], *padded), images.dtype)
        images[(..., *inner)] = unpadded
    strides = images.strides[2:]
    steps = (axis.stride * bytes_ for axis, bytes_ in zip(axes, strides, strict=True))
    taps = (axis.dilation * bytes_ for axis, bytes_ in zip(axes, strides, strict=True))
    return xp.lib.stride_tricks.as_strided(
        images,
        (*images.shape[:2], y.count(), x.count(), y.kernel, x.kernel),
        (*images.strides[:2], *steps, *taps),
    )


def check_output_size(size: Shape, input_shape: Shape, kernel_size: Shape) -> None:
    """Raise if an image is too small for a kernel."""
    if min(size) < 1:
        raise InputError(
            f"input_shape is {input_shape}; too small for kernel_size {kernel_size}: the output "
            f"would be of size {size}"
        )
