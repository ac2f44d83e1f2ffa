"""Weighted sums of places: convolutions and matrix products of which only kept weights are stored.

Samples are lanes: an array of places is ``[place][sample]``, flat, its samples filled up to whole
vectors. A place is a pixel of a channel, or one of a linear layer's features. Convolutions read
images with a border of zeros around them, so that each weight reads its place relative to that of
the window, whether it lies inside of the image or not.

A table has a row for each channel that is written, and an entry for each kept weight. What the
entry reads for the window at position `p` is the vector at ``read_at[p] + offset[entry]``, and what
the row writes begins at ``row_at[row] + write_at[p]``. Positions are windows, and vectors of
samples at each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.compile import njit
from .lanes import (
    correlate_1,
    correlate_8,
    equal_or,
    fma,
    gather_1,
    gather_4,
    gather_8,
    item,
    keep_positive,
    lane_count,
    less_or,
    load,
    number,
    number_or,
    splat,
    store,
    total,
)

__all__ = [
    "choose_largest",
    "pass_to_chosen",
    "put",
    "scale_channels",
    "scale_grads",
    "sum_moments",
    "sum_places",
    "sum_rows",
    "sum_weights",
    "take",
]

Array = Any
_kernel = njit(nogil=True, cache=True, _nrt=False)
_inline = njit(_nrt=False, forceinline=True)


@_kernel
def sum_places(
    out, x, rows, positions, ptr, offset, weight, read_at, row_at, write_at, bias, like, flags
):
    """Write ``out[row, p] = bias[row] + Σ weight[entry]·x[p, entry]`` to some rows and positions.

    Parameters
    ----------
    out, x : ndarray
        Places that are written and read.
    rows, positions : tuple of int
        From which to which.
    ptr, offset, weight, read_at, row_at, write_at : ndarray
        The table.
    bias : ndarray
        A number for each row, or nothing.
    like : ndarray
        Where these are not positive, `out` is 0; as large as `out`, or nothing.
    flags : tuple of bool
        Whether sums are added to what is there, and whether negative ones become 0.
    """
    first, last = positions
    for row in range(*rows):
        a, b, to = ptr[row], ptr[row + 1], row_at[row]
        start = number(x, 0.0)
        if len(bias):
            start = splat(bias, row)
        p = first
        while p + 8 <= last:
            many = gather_8(start, x, _eight(read_at, p), weight, offset, a, b)
            _write(out, to + item(write_at, p), many[0], like, flags)
            _write(out, to + item(write_at, p + 1), many[1], like, flags)
            _write(out, to + item(write_at, p + 2), many[2], like, flags)
            _write(out, to + item(write_at, p + 3), many[3], like, flags)
            _write(out, to + item(write_at, p + 4), many[4], like, flags)
            _write(out, to + item(write_at, p + 5), many[5], like, flags)
            _write(out, to + item(write_at, p + 6), many[6], like, flags)
            _write(out, to + item(write_at, p + 7), many[7], like, flags)
            p += 8
        while p + 4 <= last:
            some = gather_4(start, x, _four(read_at, p), weight, offset, a, b)
            _write(out, to + item(write_at, p), some[0], like, flags)
            _write(out, to + item(write_at, p + 1), some[1], like, flags)
            _write(out, to + item(write_at, p + 2), some[2], like, flags)
            _write(out, to + item(write_at, p + 3), some[3], like, flags)
            p += 4
        while p < last:
            one = gather_1(start, x, (item(read_at, p),), weight, offset, a, b)
            _write(out, to + item(write_at, p), one[0], like, flags)
            p += 1


@_inline
def _four(array, k):
    return item(array, k), item(array, k + 1), item(array, k + 2), item(array, k + 3)


@_inline
def _eight(array, k):
    return (
        item(array, k),
        item(array, k + 1),
        item(array, k + 2),
        item(array, k + 3),
        item(array, k + 4),
        item(array, k + 5),
        item(array, k + 6),
        item(array, k + 7),
    )


@_inline
def _write(out, at, value, like, flags):
    """Write or add a vector, 0 where another is not positive."""
    adds, rectifies = flags
    if len(like):
        value = keep_positive(load(like, at), value)
    if adds:
        value = value + load(out, at)
    if rectifies:
        value = keep_positive(value, value)
    store(out, at, value)


@_kernel
def sum_weights(out, x, grad, rows, blocks, ptr, offset, read_at, row_at, write_at):
    """Write ``out[entry] = Σ_p grad[row, p]·x[p, entry]``, summed over samples, for some rows.

    Parameters
    ----------
    out : ndarray
        A number for each entry.
    x, grad : ndarray
        Places that are read; `grad` where :func:`sum_places` writes.
    rows, blocks : tuple of int, ndarray of int
        From which row to which; and where blocks of positions begin, and the last one ends, which
        are summed up one after the other.
    ptr, offset, read_at, row_at, write_at : ndarray
        The table.
    """
    for block in range(len(blocks) - 1):
        first, last, more = blocks[block], blocks[block + 1], block > 0
        for row in range(*rows):
            to, k, end = row_at[row], ptr[row], ptr[row + 1]
            while k + 8 <= end:
                many = correlate_8(x, grad, _eight(offset, k), read_at, to, write_at, first, last)
                _put(out, k, total(many[0]), more)
                _put(out, k + 1, total(many[1]), more)
                _put(out, k + 2, total(many[2]), more)
                _put(out, k + 3, total(many[3]), more)
                _put(out, k + 4, total(many[4]), more)
                _put(out, k + 5, total(many[5]), more)
                _put(out, k + 6, total(many[6]), more)
                _put(out, k + 7, total(many[7]), more)
                k += 8
            while k < end:
                one = correlate_1(x, grad, (offset[k],), read_at, to, write_at, first, last)
                _put(out, k, total(one[0]), more)
                k += 1


@_inline
def _put(out, k, value, adds):
    """Write or add a number."""
    out[k] = out[k] + value if adds else value


@_kernel
def sum_rows(out, grad, rows, places):
    """Write the sums of `grad` over all places behind the begin of each row."""
    for row in range(len(rows)):
        sums = number(grad, 0.0)
        for place in places:
            sums = sums + load(grad, rows[row] + place)
        out[row] = total(sums)


@_kernel
def take(out, array, places):
    """Write the numbers at some places."""
    for k in range(len(places)):
        out[k] = array[places[k]]


@_kernel
def put(out, array, places):
    """Write numbers to some places."""
    for k in range(len(places)):
        out[places[k]] = array[k]


@_kernel
def choose_largest(rows, taps, read_at, row_at, write_at, vectors, out, choice, x):
    """Write the largest of what each window reads, and which of its taps that is.

    Parameters
    ----------
    rows : tuple of int
        From which channel to which.
    taps : ndarray, shape (windows, taps)
        Where each tap reads behind the begin of the channel; -1 where there is nothing.
    read_at, row_at, write_at : ndarray
        Where channels begin in `x` and in `out`, and where windows lie behind that.
    vectors : ndarray
        Where vectors of samples lie behind a place.
    out, choice, x : ndarray
        Places that are written and read; `choice` is as large as `out`.
    """
    for row in range(*rows):
        for window in range(len(write_at)):
            for vector in vectors:
                largest, chosen = number(x, -np.inf), number(x, -1.0)
                first = True
                for tap in range(taps.shape[1]):
                    at = taps[window, tap]
                    if at < 0:
                        continue
                    value, this = load(x, read_at[row] + at + vector), number(x, tap)
                    if first:
                        largest, chosen, first = value, this, False
                        continue
                    chosen = less_or(largest, value, this, chosen)
                    largest = less_or(largest, value, value, largest)
                    # Of all that are no numbers the last one counts.
                    chosen = number_or(value, value, chosen, this)
                    largest = number_or(value, value, largest, value)
                to = row_at[row] + write_at[window] + vector
                store(out, to, largest)
                store(choice, to, chosen)


@_kernel
def pass_to_chosen(rows, taps, read_at, row_at, write_at, vectors, grad, choice, above, like):
    """Add what each window got, `above`, to the place that it has chosen.

    Arguments are as for :func:`choose_largest`; where `like` is not positive, nothing is added.
    """
    for row in range(*rows):
        for window in range(len(write_at)):
            for vector in vectors:
                to = row_at[row] + write_at[window] + vector
                chosen, value = load(choice, to), load(above, to)
                zero = number(grad, 0.0)
                for tap in range(taps.shape[1]):
                    if taps[window, tap] < 0:
                        continue
                    at = read_at[row] + taps[window, tap] + vector
                    part = equal_or(chosen, number(grad, tap), value, zero)
                    if len(like):
                        part = keep_positive(load(like, at), part)
                    store(grad, at, load(grad, at) + part)


# -- Normalisation ---------------------------------------------------------------------------------

# Places that are summed up before their sum is added to the others, in float64.
_PART = 32


@_kernel
def sum_moments(
    channels, rows, places, x, mean, factor, other, other_rows, other_places, valid, out
):
    """Write ``Σ v`` and ``Σ v·w`` of some channels, over all places and valid samples.

    `v` is ``other`` and `w` is ``x - mean``, times `factor`; without `other` both are that.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    rows, places, x, other_rows, other_places, other : ndarray
        Where channels begin, and where places lie behind that, in two arrays.
    mean, factor : ndarray
        A number for each channel.
    valid : ndarray
        For each sample of a place 1, or 0 where there is none.
    out : ndarray of float64, shape (channels, 2)
        The sums.
    """
    lanes = lane_count(x)
    for channel in range(*channels):
        center, scale = splat(mean, channel), splat(factor, channel)
        out[channel, 0] = out[channel, 1] = 0.0
        for begin in range(0, len(places), _PART):
            first = second = number(x, 0.0)
            for k in range(begin, min(begin + _PART, len(places))):
                at, to = rows[channel] + places[k], 0
                if len(other):
                    to = other_rows[channel] + other_places[k]
                for sample in range(0, len(valid), lanes):
                    one = load(valid, sample)
                    w = (load(x, at + sample) - center) * scale * one
                    v = w
                    if len(other):
                        v = load(other, to + sample) * one
                    first, second = first + v, fma(v, w, second)
            out[channel, 0] += total(first)
            out[channel, 1] += total(second)


@_kernel
def scale_channels(
    channels, rows, places, x, mean, factor, shift, room, out_rows, out_places, out, flags
):
    """Write ``factor·(x - mean) + shift`` for some channels; `room` numbers at each place."""
    lanes = lane_count(x)
    nothing = out[:0]
    for channel in range(*channels):
        center, scale, add = splat(mean, channel), splat(factor, channel), splat(shift, channel)
        for k in range(len(places)):
            at, to = rows[channel] + places[k], out_rows[channel] + out_places[k]
            for sample in range(0, room, lanes):
                value = fma(load(x, at + sample) - center, scale, add)
                _write(out, to + sample, value, nothing, flags)


@_kernel
def scale_grads(
    channels,
    rows,
    places,
    x,
    mean,
    factor,
    shift,
    valid,
    grad_rows,
    grad_places,
    grad,
    own,
    out,
    like,
    flags,
):
    """Write ``own·grad + factor·(x - mean) + shift``, the gradient of a normalisation in `x`.

    It is 0 where there is no sample.
    """
    lanes = lane_count(x)
    for channel in range(*channels):
        center, scale, add = splat(mean, channel), splat(factor, channel), splat(shift, channel)
        slope = splat(own, channel)
        for k in range(len(places)):
            at, to = rows[channel] + places[k], grad_rows[channel] + grad_places[k]
            for sample in range(0, len(valid), lanes):
                value = fma(load(x, at + sample) - center, scale, add)
                value = fma(slope, load(grad, to + sample), value) * load(valid, sample)
                _write(out, at + sample, value, like, flags)
