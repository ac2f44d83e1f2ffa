"""Weighted sums of places: convolutions and matrix products of which only kept weights are stored.

Samples are lanes: an array of places is ``[place][sample]``, flat. Many samples are filled up to
whole vectors; few are not, and a vector holds those of several places side by side. A place is a
pixel of a channel, or one of a linear layer's features. Convolutions read images with a border of
zeros around them, so that each weight reads its place relative to that of the window, whether it
lies inside of the image or not.

A table has a row for each channel that is written, and an entry for each kept weight. What the
entry reads for the window at position `p` is the vector at ``read_at[p] + offset[entry]``, and what
the row writes begins at ``row_at[row] + write_at[p]``. A position is a vector of samples, of which
``count[p]`` lanes are in use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.compile import njit
from .lanes import (
    correlate_1,
    correlate_8,
    correlate_some,
    equal_or,
    fma,
    gather_1,
    gather_4,
    gather_8,
    item,
    keep_positive,
    keep_some,
    lane_count,
    less_or,
    load,
    load_some,
    number,
    number_or,
    splat,
    store_some,
    store_totals,
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
def sum_places(rows, positions, where, weight, out, x, bias, like, flags):
    """Write ``out[row, p] = bias[row] + Σ weight[entry]·x[p, entry]`` to some rows and positions.

    Parameters
    ----------
    rows, positions : tuple of int
        From which to which.
    where : tuple of ndarray
        The table: ``ptr``, ``offset``, ``read_at``, ``row_at``, ``write_at``, ``count``.
    weight : ndarray
        A number for each entry.
    out, x : ndarray
        Places that are written and read.
    bias : ndarray
        A number for each row, or nothing.
    like : ndarray
        Where these are not positive, `out` is 0; as large as `out`, or nothing.
    flags : tuple of bool
        Whether sums are added to what is there, and whether negative ones become 0.
    """
    ptr, offset, read_at, row_at, write_at, count = where
    first, last = positions
    for row in range(*rows):
        a, b, to = ptr[row], ptr[row + 1], row_at[row]
        start = number(x, 0.0)
        if len(bias):
            start = splat(bias, row)
        p = first
        while p + 8 <= last:
            many = gather_8(start, x, _eight(read_at, p), weight, offset, a, b)
            _write(out, to + item(write_at, p), many[0], item(count, p), like, flags)
            _write(out, to + item(write_at, p + 1), many[1], item(count, p + 1), like, flags)
            _write(out, to + item(write_at, p + 2), many[2], item(count, p + 2), like, flags)
            _write(out, to + item(write_at, p + 3), many[3], item(count, p + 3), like, flags)
            _write(out, to + item(write_at, p + 4), many[4], item(count, p + 4), like, flags)
            _write(out, to + item(write_at, p + 5), many[5], item(count, p + 5), like, flags)
            _write(out, to + item(write_at, p + 6), many[6], item(count, p + 6), like, flags)
            _write(out, to + item(write_at, p + 7), many[7], item(count, p + 7), like, flags)
            p += 8
        while p + 4 <= last:
            some = gather_4(start, x, _four(read_at, p), weight, offset, a, b)
            _write(out, to + item(write_at, p), some[0], item(count, p), like, flags)
            _write(out, to + item(write_at, p + 1), some[1], item(count, p + 1), like, flags)
            _write(out, to + item(write_at, p + 2), some[2], item(count, p + 2), like, flags)
            _write(out, to + item(write_at, p + 3), some[3], item(count, p + 3), like, flags)
            p += 4
        while p < last:
            one = gather_1(start, x, (item(read_at, p),), weight, offset, a, b)
            _write(out, to + item(write_at, p), one[0], item(count, p), like, flags)
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
def _write(out, at, value, count, like, flags):
    """Write or add some lanes of a vector, 0 where another is not positive."""
    adds, rectifies = flags
    if len(like):
        value = keep_positive(load(like, at), value)
    if adds:
        value = value + load(out, at)
    if rectifies:
        value = keep_positive(value, value)
    store_some(out, at, value, count)


@_kernel
def sum_weights(rows, blocks, where, is_whole, out, x, grad):
    """Write ``out[entry] = Σ_p grad[row, p]·x[p, entry]``, summed over samples, for some rows.

    Parameters
    ----------
    rows, blocks : tuple of int, ndarray of int
        From which row to which; and where blocks of positions begin, and the last one ends, which
        are summed up one after the other.
    where : tuple of ndarray
        The table, as :func:`sum_places` takes it.
    is_whole : bool
        Whether all lanes of all positions are in use.
    out : ndarray
        A number for each entry.
    x, grad : ndarray
        Places that are read; `grad` where :func:`sum_places` writes.
    """
    ptr, offset, read_at, row_at, write_at, count = where
    for block in range(len(blocks) - 1):
        first, last, adds = blocks[block], blocks[block + 1], block > 0
        for row in range(*rows):
            to, k, end = row_at[row], ptr[row], ptr[row + 1]
            if is_whole:
                while k + 8 <= end:
                    offsets = _eight(offset, k)
                    many = correlate_8(x, grad, offsets, read_at, to, write_at, count, first, last)
                    store_totals(out, k, many, adds)
                    k += 8
            else:
                while k + 8 <= end:
                    offsets = _eight(offset, k)
                    many = correlate_some(
                        x, grad, offsets, read_at, to, write_at, count, first, last
                    )
                    store_totals(out, k, many, adds)
                    k += 8
            while k < end:
                offsets = (item(offset, k),)
                one = correlate_1(x, grad, offsets, read_at, to, write_at, count, first, last)
                store_totals(out, k, one, adds)
                k += 1


@_kernel
def sum_rows(rows, where, out, grad):
    """Write the sums of `grad` over all positions of some rows of a table."""
    _, _, _, row_at, write_at, count = where
    for row in range(*rows):
        sums = number(grad, 0.0)
        for p in range(len(write_at)):
            at = row_at[row] + item(write_at, p)
            sums = sums + load_some(grad, at, item(count, p))
        out[row] = total(sums)


@_kernel
def take(out, array, places):
    """Write the numbers at some places."""
    for k in range(len(places)):
        out[k] = array[item(places, k)]


@_kernel
def put(entries, out, array, places):
    """Write some numbers to their places."""
    for k in range(*entries):
        out[item(places, k)] = array[k]


@_kernel
def choose_largest(channels, where, samples, out, choice, x):
    """Write the largest of what each window reads, and which of its taps that is.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    where : tuple of ndarray
        ``taps``, ``(windows, taps)``, where each tap reads behind the begin of the channel, or -1
        where there is nothing; ``read_at`` and ``row_at``, where channels begin in `x` and in
        `out`; ``write_at``, where windows lie behind that.
    samples : int
        Samples at each place.
    out, choice, x : ndarray
        Places that are written and read; `choice` is as large as `out`.
    """
    taps, read_at, row_at, write_at = where
    for channel in range(*channels):
        begin = read_at[channel]
        for window in range(len(write_at)):
            to = row_at[channel] + item(write_at, window)
            for sample in range(0, samples, lane_count(x)):
                largest, chosen, first = number(x, -np.inf), number(x, -1.0), True
                for tap in range(taps.shape[1]):
                    at = taps[window, tap]
                    if at < 0:
                        continue
                    value, this = load(x, begin + at + sample), number(x, tap)
                    if first:
                        largest, chosen, first = value, this, False
                        continue
                    chosen = less_or(largest, value, this, chosen)
                    largest = less_or(largest, value, value, largest)
                    # Of all that are no numbers the last one counts.
                    chosen = number_or(value, value, chosen, this)
                    largest = number_or(value, value, largest, value)
                store_some(out, to + sample, largest, samples - sample)
                store_some(choice, to + sample, chosen, samples - sample)


@_kernel
def pass_to_chosen(channels, where, samples, grad, choice, above, like, adds):
    """Write what each window got, `above`, to the place that it has chosen, and 0 to the others.

    Arguments are as for :func:`choose_largest`; where `like` is not positive, it is 0. With `adds`
    all is added to what is there, as it must be where windows overlap.
    """
    taps, read_at, row_at, write_at = where
    for channel in range(*channels):
        begin = read_at[channel]
        for window in range(len(write_at)):
            to = row_at[channel] + item(write_at, window)
            for sample in range(0, samples, lane_count(grad)):
                chosen, value = load(choice, to + sample), load(above, to + sample)
                zero = number(grad, 0.0)
                for tap in range(taps.shape[1]):
                    if taps[window, tap] < 0:
                        continue
                    part = equal_or(chosen, number(grad, tap), value, zero)
                    at = begin + taps[window, tap] + sample
                    _write(grad, at, part, samples - sample, like, (adds, False))


# -- Normalisation ---------------------------------------------------------------------------------

# Places that are summed up before their sum is added to the others, in float64.
_PART = 32


@_kernel
def sum_moments(channels, where, above, samples, out, x, mean, factor, grad):
    """Write ``Σ v`` and ``Σ v·w`` of some channels, over all places and samples.

    `w` is ``factor·(x - mean)``, and `v` is `grad`, or the same as `w` where there is none.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    where, above : tuple of ndarray
        Where channels begin, and where places lie behind that; in `x`, and in `grad`.
    samples : int
        Samples at each place.
    out : ndarray of float64, shape (channels, 2)
        The sums.
    x, mean, factor, grad : ndarray
        Places that are read, and numbers for each channel.
    """
    (rows, places), (grad_rows, grad_places) = where, above
    for channel in range(*channels):
        center, scale = splat(mean, channel), splat(factor, channel)
        out[channel, 0] = out[channel, 1] = 0.0
        for begin in range(0, len(places), _PART):
            first = second = number(x, 0.0)
            for k in range(begin, min(begin + _PART, len(places))):
                for sample in range(0, samples, lane_count(x)):
                    count, at = samples - sample, rows[channel] + item(places, k) + sample
                    w = keep_some((load(x, at) - center) * scale, count)
                    v = w
                    if len(grad):
                        to = grad_rows[channel] + item(grad_places, k) + sample
                        v = load_some(grad, to, count)
                    first, second = first + v, fma(v, w, second)
            out[channel, 0] += total(first)
            out[channel, 1] += total(second)


@_kernel
def scale_channels(channels, where, above, samples, out, x, mean, factor, shift, rectifies):
    """Write ``factor·(x - mean) + shift`` for some channels, 0 where it is negative if asked for.

    Arguments are as for :func:`sum_moments`; `above` is where `out` is written.
    """
    (rows, places), (out_rows, out_places) = where, above
    for channel in range(*channels):
        center, scale, add = splat(mean, channel), splat(factor, channel), splat(shift, channel)
        for k in range(len(places)):
            at, to = rows[channel] + item(places, k), out_rows[channel] + item(out_places, k)
            for sample in range(0, samples, lane_count(x)):
                value = fma(load(x, at + sample) - center, scale, add)
                _write(out, to + sample, value, samples - sample, out[:0], (False, rectifies))


@_kernel
def scale_grads(
    channels, where, above, samples, out, x, mean, factor, shift, grad, slope, like, adds
):
    """Write ``slope·grad + factor·(x - mean) + shift``, the gradient of a normalisation in `x`.

    Arguments are as for :func:`sum_moments`; where `like` is not positive, it is 0, and with `adds`
    it is added to what is there.
    """
    (rows, places), (grad_rows, grad_places) = where, above
    for channel in range(*channels):
        center, scale, add = splat(mean, channel), splat(factor, channel), splat(shift, channel)
        own = splat(slope, channel)
        for k in range(len(places)):
            at, to = rows[channel] + item(places, k), grad_rows[channel] + item(grad_places, k)
            for sample in range(0, samples, lane_count(x)):
                value = fma(load(x, at + sample) - center, scale, add)
                value = fma(own, load(grad, to + sample), value)
                _write(out, at + sample, value, samples - sample, like, (adds, False))
