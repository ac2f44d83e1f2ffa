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
    store,
    store_some,
    store_totals,
    total,
)

__all__ = [
    "add_maps",
    "choose_largest",
    "normalise",
    "pass_back",
    "pass_normalised",
    "pass_to_chosen",
    "put",
    "sum_places",
    "sum_rows",
    "sum_weights",
    "take",
]

Array = Any
_kernel = njit(nogil=True, cache=True, _nrt=False)
_helper = njit(_nrt=False)
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
        Whether sums are added to what is there, whether negative ones become 0, and whether all
        lanes of all positions are in use.
    """
    ptr, offset, read_at, row_at, write_at, count = where
    first, last = positions
    # Nothing is asked of each vector in the case that is met most.
    plain = flags[2] and not flags[0] and not len(like)
    least = number(x, 0.0 if flags[1] else -np.inf)
    for row in range(*rows):
        a, b, to = ptr[row], ptr[row + 1], row_at[row]
        start = number(x, 0.0)
        if len(bias):
            start = splat(bias, row)
        p = first
        while p + 8 <= last:
            many = gather_8(start, x, _eight(read_at, p), weight, offset, a, b)
            if plain:
                _put(out, to + item(write_at, p), many[0], least)
                _put(out, to + item(write_at, p + 1), many[1], least)
                _put(out, to + item(write_at, p + 2), many[2], least)
                _put(out, to + item(write_at, p + 3), many[3], least)
                _put(out, to + item(write_at, p + 4), many[4], least)
                _put(out, to + item(write_at, p + 5), many[5], least)
                _put(out, to + item(write_at, p + 6), many[6], least)
                _put(out, to + item(write_at, p + 7), many[7], least)
            else:
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
def _put(out, at, value, least):
    """Write a vector, and `least` where it is less."""
    store(out, at, less_or(value, least, least, value))


@_inline
def _write(out, at, value, count, like, flags):
    """Write or add some lanes of a vector, 0 where another is not positive."""
    adds, rectifies = flags[:2]
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
def take(entries, out, array, places):
    """Write the numbers at some places, from one entry to another."""
    for k in range(*entries):
        out[k] = item(array, item(places, k))


@_kernel
def put(entries, out, array, places):
    """Write some numbers to their places."""
    for k in range(*entries):
        out[item(places, k)] = item(array, k)


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


# -- Sums of maps ----------------------------------------------------------------------------------


@_kernel
def add_maps(channels, where, samples, out, a, b, flags):
    """Write ``a + b``, or `a` where there is no `b`, for some channels.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    where : tuple of ndarray
        Where channels begin, and where runs of neighbouring places lie behind that; of `out`, `a`
        and `b` in turn.
    samples : int
        Numbers of a run.
    out, a, b : ndarray
        Places that are written and read; `b` may be empty.
    flags : tuple of bool
        As for :func:`sum_places`.
    """
    (rows, places), (a_rows, a_places), (b_rows, b_places) = where
    nothing = out[:0]
    for channel in range(*channels):
        for k in range(len(places)):
            to = rows[channel] + item(places, k)
            at = a_rows[channel] + item(a_places, k)
            beside = 0
            if len(b):
                beside = b_rows[channel] + item(b_places, k)
            for sample in range(0, samples, lane_count(a)):
                value = load(a, at + sample)
                if len(b):
                    value = value + load(b, beside + sample)
                _write(out, to + sample, value, samples - sample, nothing, flags)


@_kernel
def pass_back(channels, where, samples, grad, above, like, adds):
    """Write a map's gradient `above` to a map that it was the sum of, or add it.

    Arguments are as for :func:`add_maps`; where `like` is not positive, it is 0.
    """
    (rows, places), (above_rows, above_places) = where
    for channel in range(*channels):
        for k in range(len(places)):
            to = rows[channel] + item(places, k)
            at = above_rows[channel] + item(above_places, k)
            for sample in range(0, samples, lane_count(grad)):
                value = load(above, at + sample)
                _write(grad, to + sample, value, samples - sample, like, (adds, False))


# -- Normalisation ---------------------------------------------------------------------------------

# Places that are summed up before their sum is added to the others, in float64.
_PART = 32


@_kernel
def normalise(
    channels,
    where,
    above,
    samples,
    out,
    x,
    mean,
    variance,
    inverse,
    eps,
    weight,
    bias,
    is_given,
    rectifies,
):
    """Write ``weight·(x - mean)/√(variance + eps) + bias`` for some channels.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    where, above : tuple of ndarray
        Where channels begin, and where places lie behind that; in `x`, and in `out`.
    samples : int
        Samples at each place.
    out, x : ndarray
        Places that are written and read.
    mean, variance, inverse : ndarray of float64
        Of each channel: given, or written; and ``1/√(variance + eps)``, which is written.
    eps : float
        Added to the variance.
    weight, bias : ndarray
        A number for each channel.
    is_given, rectifies : bool
        Whether mean and variance are given, and whether negative results become 0.
    """
    (rows, places), (out_rows, out_places) = where, above
    count = samples * len(places)
    for channel in range(*channels):
        if not is_given:
            # What is summed up is small beside the spread, or else is summed up once more.
            near = _first_mean(x, rows[channel], places, samples)
            for _ in range(2):
                first, second = _moments(x, rows[channel], places, samples, near)
                mean[channel] = near + first / count
                variance[channel] = max(second / count - (first / count) ** 2, 0.0)
                if not (first / count) ** 2 > variance[channel]:
                    break
                near = mean[channel]
        inverse[channel] = 1 / np.sqrt(variance[channel] + eps)
        center = number(x, mean[channel])
        scale = number(x, weight[channel] * inverse[channel])
        add, least = splat(bias, channel), number(x, 0.0 if rectifies else -np.inf)
        for k in range(len(places)):
            at, to = rows[channel] + item(places, k), out_rows[channel] + item(out_places, k)
            for sample in range(0, samples, lane_count(x)):
                value = fma(load(x, at + sample) - center, scale, add)
                value = less_or(value, least, least, value)
                store_some(out, to + sample, value, samples - sample)


@_helper
def _first_mean(x, row, places, samples):
    """Return the mean over a channel's first places, near which all of it is."""
    sums, count = number(x, 0.0), min(_PART, len(places))
    for k in range(count):
        for sample in range(0, samples, lane_count(x)):
            sums = sums + load_some(x, row + item(places, k) + sample, samples - sample)
    return np.float64(total(sums) / (count * samples))


@_helper
def _moments(x, row, places, samples, near):
    """Return ``Σ v`` and ``Σ v²`` with ``v = x - near`` over a channel."""
    center, sums, squares = number(x, near), 0.0, 0.0
    for begin in range(0, len(places), _PART):
        first = second = number(x, 0.0)
        for k in range(begin, min(begin + _PART, len(places))):
            for sample in range(0, samples, lane_count(x)):
                v = load(x, row + item(places, k) + sample) - center
                v = keep_some(v, samples - sample)
                first, second = first + v, fma(v, v, second)
        sums += total(first)
        squares += total(second)
    return sums, squares


@_kernel
def pass_normalised(
    channels, where, above, samples, out, x, grad, mean, inverse, weight, sums, flags, like
):
    """Write the gradient of :func:`normalise` in `x`, and sums that parameters need.

    Parameters
    ----------
    channels, where, above, samples, weight
        As for :func:`normalise`; `above` is where `grad` lies.
    out, x, grad : ndarray
        Places that are written and read.
    mean, inverse : ndarray of float64
        The mean of each channel, and ``1/√(variance + eps)``.
    sums : ndarray of float64, shape (channels, 2)
        ``Σ grad`` and ``Σ grad·(x - mean)·inverse`` of each channel.
    flags : tuple of bool
        Whether mean and variance are those of `x`; whether `out` is written; and whether it is
        added to what is there.
    like : ndarray
        Where these are not positive, `out` is 0; as large as `out`, or nothing.
    """
    (rows, places), (grad_rows, grad_places) = where, above
    is_own, writes, adds = flags
    count = samples * len(places)
    for channel in range(*channels):
        center, row, grad_row = number(x, mean[channel]), rows[channel], grad_rows[channel]
        sums[channel, 0] = sums[channel, 1] = 0.0
        for begin in range(0, len(places), _PART):
            first = second = number(x, 0.0)
            for k in range(begin, min(begin + _PART, len(places))):
                at, to = row + item(places, k), grad_row + item(grad_places, k)
                for sample in range(0, samples, lane_count(x)):
                    g = load_some(grad, to + sample, samples - sample)
                    v = keep_some(load(x, at + sample) - center, samples - sample)
                    first, second = first + g, fma(g, v, second)
            sums[channel, 0] += total(first)
            sums[channel, 1] += total(second) * inverse[channel]
        if not writes:
            continue
        own = weight[channel] * inverse[channel]
        slope, scale, add = number(x, own), number(x, 0.0), number(x, 0.0)
        if is_own:
            scale = number(x, -own * inverse[channel] * sums[channel, 1] / count)
            add = number(x, -own * sums[channel, 0] / count)
        for k in range(len(places)):
            at, to = row + item(places, k), grad_row + item(grad_places, k)
            for sample in range(0, samples, lane_count(x)):
                value = fma(load(x, at + sample) - center, scale, add)
                value = fma(slope, load(grad, to + sample), value)
                _write(out, at + sample, value, samples - sample, like, (adds, False))
