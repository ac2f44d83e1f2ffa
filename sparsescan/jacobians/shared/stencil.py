"""Stencil: the sparse matrix of a convolution, stored as the few rows that repeat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays.arrays import Mirrored
from ...locks import cached_property
from ...symbolic.pattern import Pattern, index_dtype, trusted
from ..kernels.stencil import (
    StencilAxis,
    Templates,
    count_templates,
    fill_pattern,
    fill_templates,
    fill_values,
    gather,
)
from .checks import Shape
from .windows import Connections

Array = Any


@dataclass(frozen=True)
class Channels:
    """The channels of a convolution and their sizes.

    Attributes
    ----------
    inputs, outputs : int
        How many there are.
    groups : int
        Groups of channels without connections between them.
    size, size_out, kernel : tuple of int
        ``(height, width)`` of an input channel, an output channel and the kernel.
    """

    inputs: int
    outputs: int
    groups: int
    size: Shape
    size_out: Shape
    kernel: Shape

    @property
    def reached(self) -> int:
        """Output channels that an input channel reaches."""
        return self.outputs // self.groups

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self.inputs * math.prod(self.size), self.outputs * math.prod(self.size_out)


class Stencil:
    """The matrix whose row ``(channel, y, x)`` holds the weights from this input to each output.

    Wherever two places of a channel have the same weights, their rows have the same values, and
    their columns differ by a constant. So a row is a template and a place, and neither pattern nor
    values need more than the templates; there are about as many as weights times borders.

    Parameters
    ----------
    channels : Channels
        The channels.
    y, x : Connections
        The outputs that the places of both spatial axes reach.
    places : ndarray of int
        Where each weight is in the caller's array, flat, in the order
        ``(input channel, output channel, *kernel)``.
    mask : ndarray of bool, or None
        Which weights are kept, in the same order.
    """

    def __init__(
        self,
        channels: Channels,
        y: Connections,
        x: Connections,
        places: NDArray[Any],
        mask: NDArray[np.bool_] | None,
    ) -> None:
        self._channels, self._y, self._x = channels, _classes(y), _classes(x)
        y_classes, x_classes = len(self._y.ptr) - 1, len(self._x.ptr) - 1
        kept = np.empty(0, np.bool_) if mask is None else mask
        sizes = channels.inputs, channels.reached, *channels.kernel
        ptr = np.zeros(channels.inputs * y_classes * x_classes + 1, np.int64)
        count_templates(sizes, self._y, self._x, kept, ptr)
        dtype = index_dtype((0, 0), math.prod(sizes))
        templates = Templates(
            ptr, np.empty(ptr[-1], index_dtype(channels.shape, 0)), np.empty(ptr[-1], dtype)
        )
        fill_templates(sizes, channels.size_out, self._y, self._x, kept, templates)
        # From the caller's weights, of which a pruned layer reads few.
        self._templates = templates._replace(sources=places[templates.sources].astype(dtype))
        rows = np.diff(ptr).reshape(channels.inputs, y_classes, x_classes)
        uses = np.outer(np.bincount(self._y.of), np.bincount(self._x.of))
        self._nnz = int((rows * uses).sum())

    def pattern(self) -> Pattern:
        """Return the pattern of the matrix."""
        channels, shape = self._channels, self._channels.shape
        dtype = index_dtype(shape, self._nnz)
        indptr, indices = np.empty(shape[0] + 1, dtype), np.empty(self._nnz, dtype)
        # The first column of the first output channel that each input channel reaches.
        group = np.arange(channels.inputs) // (channels.inputs // channels.groups)
        place = group * (channels.reached * math.prod(channels.size_out))
        width = channels.size_out[1]
        fill_pattern(place, width, self._y, self._x, self._templates, indptr, indices)
        return trusted(indptr, indices, shape)

    @property
    def sources(self) -> NDArray[Any]:
        """Place in the flattened weight of the entries of all templates."""
        return self._templates.sources

    def starts(self) -> NDArray[np.int64]:
        """Return where the template of each row starts among these."""
        of = np.arange(self._channels.inputs)[:, None, None] * (len(self._y.ptr) - 1)
        of = (of + self._y.of[:, None]) * (len(self._x.ptr) - 1) + self._x.of
        starts: NDArray[np.int64] = self._templates.ptr[of.reshape(-1)]
        return starts

    def fill(self, xp: Any, weight: Array, out: Array) -> None:
        """Write the values of the matrix; the weight is flat."""
        if xp is np:
            values = np.empty(len(self._templates.sources), out.dtype)
            gather(weight, self._templates.sources, values)
            self._copy(values, out)
            return
        out[...] = weight[self._sources.on(xp)]

    @cached_property
    def _sources(self) -> Mirrored:
        """Place in the flattened weight of every entry."""
        sources = np.empty(self._nnz, self._templates.sources.dtype)
        self._copy(self._templates.sources, sources)
        return Mirrored(sources)

    def _copy(self, values: NDArray[Any], out: NDArray[Any]) -> None:
        fill_values(self._channels.inputs, self._y, self._x, self._templates.ptr, values, out)


def _classes(connections: Connections) -> StencilAxis:
    """Return the places of an axis in classes that have the same weights.

    The weights of a place are equally far apart, so the first one and their number tell them all.
    """
    ptr, weight, output = connections
    count = np.diff(ptr)
    start = np.minimum(ptr[:-1], max(len(weight) - 1, 0))
    met = count > 0
    first = np.where(met, output[start], 0) if len(output) else np.zeros_like(count)
    key = np.where(met, weight[start], 0) if len(weight) else np.zeros_like(count)
    key = key * (count.max() + 1) + count
    _, example, of = np.unique(key, return_index=True, return_inverse=True)
    sizes = count[example]
    class_ptr = np.concatenate([[0], np.cumsum(sizes)])
    entry = np.arange(class_ptr[-1]) + np.repeat(ptr[example] - class_ptr[:-1], sizes)
    distance = output[entry] - np.repeat(first[example], sizes)
    return StencilAxis(of.reshape(-1), first, class_ptr, weight[entry], distance)
