"""Kernels for Jacobians that hold nothing but weights, most of them in rows that repeat."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.compile import njit


class StencilAxis(NamedTuple):
    """One axis of the input of a convolution: which outputs each place reaches, by which weights.

    Places that have the same weights are of one class; the outputs that they reach lie equally far
    from the first one.

    Attributes
    ----------
    of : ndarray of int64, shape (size,)
        Class of every place.
    first : ndarray of int64, shape (size,)
        The first output it reaches.
    ptr : ndarray of int64, shape (classes + 1,)
        The class ``a`` has its entries from ``ptr[a]`` to ``ptr[a + 1]``.
    weight, output : ndarray of int64
        For each entry, the weight's place in the kernel and the output's distance from the first;
        outputs increase within a class.
    """

    of: NDArray[Any]
    first: NDArray[Any]
    ptr: NDArray[Any]
    weight: NDArray[Any]
    output: NDArray[Any]


class Templates(NamedTuple):
    """Rows without their place: one for each input channel and pair of classes of the axes.

    Attributes
    ----------
    ptr : ndarray of int64, shape (channels * y classes * x classes + 1,)
        Template ``t`` has its entries from ``ptr[t]`` to ``ptr[t + 1]``.
    columns : ndarray of int
        Columns of the entries, less the place of the row.
    sources : ndarray of int
        Place of each entry's value in the flattened weight.
    """

    ptr: NDArray[Any]
    columns: NDArray[Any]
    sources: NDArray[Any]


@njit(nogil=True, cache=True)
def count_templates(sizes, y, x, mask, ptr):  # type: ignore[no-untyped-def]
    """Fill the `ptr` of templates; a `mask` that is not empty says which weights are kept."""
    channels, outputs, height, width = sizes
    t = 0
    for channel in range(channels):
        for a in range(len(y.ptr) - 1):
            for b in range(len(x.ptr) - 1):
                size = (y.ptr[a + 1] - y.ptr[a]) * (x.ptr[b + 1] - x.ptr[b]) * outputs
                if len(mask):
                    size = 0
                    for o in range(outputs):
                        for i in range(y.ptr[a], y.ptr[a + 1]):
                            row = (channel * outputs + o) * height + y.weight[i]
                            for j in range(x.ptr[b], x.ptr[b + 1]):
                                size += mask[row * width + x.weight[j]]
                ptr[t + 1] = ptr[t] + size
                t += 1


@njit(nogil=True, cache=True)
def fill_templates(sizes, size_out, y, x, mask, templates):  # type: ignore[no-untyped-def]
    """Fill columns and sources of templates whose `ptr` is known."""
    channels, outputs, height, width = sizes
    p = 0
    for channel in range(channels):
        for a in range(len(y.ptr) - 1):
            for b in range(len(x.ptr) - 1):
                for o in range(outputs):
                    for i in range(y.ptr[a], y.ptr[a + 1]):
                        row = (channel * outputs + o) * height + y.weight[i]
                        row_out = o * size_out[0] + y.output[i]
                        for j in range(x.ptr[b], x.ptr[b + 1]):
                            source = row * width + x.weight[j]
                            if len(mask) and not mask[source]:
                                continue
                            templates.columns[p] = row_out * size_out[1] + x.output[j]
                            templates.sources[p] = source
                            p += 1


@njit(nogil=True, cache=True)
def fill_pattern(channel_place, width_out, y, x, templates, indptr, indices):  # type: ignore[no-untyped-def]
    """Fill the index arrays; `channel_place` is added to the columns of a channel's rows."""
    row, p = 0, 0
    indptr[0] = 0
    classes = len(x.ptr) - 1
    for channel in range(len(channel_place)):
        for i in range(len(y.of)):
            first = (channel * (len(y.ptr) - 1) + y.of[i]) * classes
            for j in range(len(x.of)):
                place = channel_place[channel] + y.first[i] * width_out + x.first[j]
                start, stop = templates.ptr[first + x.of[j]], templates.ptr[first + x.of[j] + 1]
                for q in range(stop - start):
                    indices[p + q] = templates.columns[start + q] + place
                p += stop - start
                row += 1
                indptr[row] = p


@njit(nogil=True, cache=True)
def fill_values(channels, y, x, ptr, values, out):  # type: ignore[no-untyped-def]
    """Write the `values` of the templates to the row of every place of all channels."""
    p = np.uint64(0)
    classes = len(x.ptr) - 1
    for channel in range(channels):
        for i in range(len(y.of)):
            first = (channel * (len(y.ptr) - 1) + y.of[i]) * classes
            for j in range(len(x.of)):
                start, stop = ptr[first + x.of[j]], ptr[first + x.of[j] + 1]
                # With unsigned indices, which cannot mean places from the end, this is a memcpy.
                start, size = np.uint64(start), np.uint64(stop - start)
                for q in range(size):
                    out[p + q] = values[start + q]
                p += size


@njit(nogil=True, cache=True)
def gather(weight, sources, out):  # type: ignore[no-untyped-def]
    """Write ``weight[sources]``."""
    for p in range(np.uint64(len(sources))):
        out[p] = weight[np.uint64(sources[p])]


@njit(nogil=True, cache=True)
def transpose(weight, out):  # type: ignore[no-untyped-def]
    """Write the transpose of a matrix, eight rows at a time: those fit the nearest cache."""
    rows, cols = weight.shape
    for first in range(0, rows, 8):
        last = np.uint64(min(first + 8, rows))
        for column in range(np.uint64(cols)):
            for row in range(np.uint64(first), last):
                out[column, row] = weight[row, column]
