"""Stencil: the sparse matrix of a convolution, stored as the few rows that repeat."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._arrays import Constant
from ..kernels.stencil import (
    Axis,
    Templates,
    count_templates,
    fill_pattern,
    fill_templates,
    fill_values,
    gather,
)
from ..pattern import Pattern, index_dtype, trusted

__all__ = ["Stencil", "axis"]

Array = Any


class Stencil:
    """The matrix whose row ``(channel, y, x)`` holds the weights that this input meets.

    Wherever two places of a channel meet the same weights, their rows have the same values, and
    their columns differ by a constant. So a row is a template and a place, and neither pattern nor
    values need more than the templates; there are about as many as weights times borders.

    Parameters
    ----------
    y, x : Axis
        The two spatial axes.
    shape : tuple of int
        Shape of the matrix.
    place : ndarray of int64
        For each input channel, the first column of the first output channel that it meets.
    outputs : int
        Output channels that an input channel meets.
    kernel, size_out : tuple of int
        ``(height, width)`` of the kernel and of an output channel.
    mask : ndarray of bool, or None
        Which weights are kept, flat, in the order ``(input channel, output channel, *kernel)``.
    """

    def __init__(
        self,
        y: Axis,
        x: Axis,
        shape: tuple[int, int],
        place: NDArray[np.int64],
        *,
        outputs: int,
        kernel: tuple[int, int],
        size_out: tuple[int, int],
        mask: NDArray[np.bool_] | None,
    ) -> None:
        self._y, self._x, self._shape = y, x, shape
        self._place, self._width_out = place, size_out[1]
        self._channels = len(place)
        kept = np.empty(0, np.bool_) if mask is None else mask
        sizes = self._channels, outputs, *kernel
        ptr = np.zeros(self._channels * (len(y.ptr) - 1) * (len(x.ptr) - 1) + 1, np.int64)
        count_templates(sizes, y, x, kept, ptr)
        self._templates = Templates(
            ptr,
            np.empty(ptr[-1], index_dtype(shape, 0)),
            np.empty(ptr[-1], index_dtype((0, 0), math.prod(sizes))),
        )
        fill_templates(sizes, size_out, y, x, kept, self._templates)
        rows = np.diff(ptr).reshape(self._channels, len(y.ptr) - 1, len(x.ptr) - 1)
        uses = np.outer(np.bincount(y.of), np.bincount(x.of))
        self._nnz = int((rows * uses).sum())

    def pattern(self) -> Pattern:
        """The pattern of the matrix."""
        dtype = index_dtype(self._shape, self._nnz)
        indptr, indices = np.empty(self._shape[0] + 1, dtype), np.empty(self._nnz, dtype)
        fill_pattern(
            self._place, self._width_out, self._y, self._x, self._templates, indptr, indices
        )
        return trusted(indptr, indices, self._shape)

    def fill(self, xp: Any, weight: Array, out: Array) -> None:
        """Write the values of the matrix; the weight is flat, in the order of the mask."""
        if xp is np:
            values = np.empty(len(self._templates.sources), out.dtype)
            gather(weight, self._templates.sources, values)
            self._copy(values, out)
            return
        out[...] = weight[self._sources.on(xp)]

    @cached_property
    def _sources(self) -> Constant:
        """Place in the flattened weight of every entry."""
        sources = np.empty(self._nnz, self._templates.sources.dtype)
        self._copy(self._templates.sources, sources)
        return Constant(sources)

    def _copy(self, values: NDArray[Any], out: NDArray[Any]) -> None:
        fill_values(self._channels, self._y, self._x, self._templates.ptr, values, out)


def axis(ptr: NDArray[Any], weight: NDArray[Any], output: NDArray[Any]) -> Axis:
    """The places of an axis in classes, from the :func:`meetings` of each.

    The weights of a place are equally far apart, so the first one and their number tell them all.
    """
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
    return Axis(of.reshape(-1), first, class_ptr, weight[entry], distance)
