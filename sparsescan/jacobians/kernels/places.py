"""Weighted sums of places: convolutions and matrix products that store only kept weights.

Samples are lanes: an array of places is ``[block][place][sample]``, flat. A block has as many
samples as a vector has lanes; a small batch is one block, and a vector holds the samples of several
places side by side. A place is a pixel of a channel, or one of a linear layer's features.
Convolutions read images with a border of zeros around them, so that each weight reads its place
relative to the window, inside the image or not.

A table has a row for each channel that is written, and an entry for each kept weight. For the
window at position `p`, an entry reads the vector at ``read_at[p] + offset[entry]``, and a row
writes from ``row_at[row] + write_at[p]`` on. A position is a vector of samples, of which
``count[p]`` lanes are in use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.compile import njit
from ...kernels.cpu.functions import keep_positive
from ...kernels.cpu.gathers import (
    ROWS,
    correlate_1,
    correlate_8,
    correlate_rows_1,
    correlate_rows_4,
    correlate_some,
    correlate_some_rows_1,
    correlate_some_rows_4,
    gather_1,
    gather_4,
    gather_8,
    gather_rows_1,
    gather_rows_4,
)
from ...kernels.cpu.lanes import (
    equal_or,
    fma,
    item,
    keep_some,
    lane_count,
    less_or,
    load,
    load_some,
    number,
    number_or,
    put_four,
    splat,
    store,
    store_some,
    store_totals,
    total,
)

Array = Any
_kernel = njit(nogil=True, cache=True, _nrt=False)
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)


@_kernel
def sum_places(rows, positions, where, weight, arrays, flags):
    """Write ``out[row, p] = bias[row] + Σ weight[entry]·x[p, entry]`` to some rows and positions.

    Parameters
    ----------
    rows, positions : tuple of int
        From which to which.
    where : tuple of ndarray
        The table: ``ptr``, ``offset``, ``read_at``, ``row_at``, ``write_at``, ``count``.
    weight : ndarray
        A number for each entry.
    arrays : tuple of ndarray
        ``out`` and ``x``: places written and read. ``bias``: a number per row, or empty. ``like``:
        numbers in the shape of `out`, which is set to 0 where they are not positive; or empty.
    flags : tuple of bool
        Whether sums are added to `out`, whether negative sums become 0, and whether all lanes of
        all positions are in use.
    """
    ptr, offset, read_at, row_at, write_at, count = where
    (first, last), (out, x, bias, like) = positions, arrays
    # The most common case has no branch per vector.
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
                _put_four(out, to, write_at, p, many[0:4], least)
                _put_four(out, to, write_at, p + 4, many[4:8], least)
            else:
                _write_four(out, to, write_at, p, many[0:4], count, like, flags)
                _write_four(out, to, write_at, p + 4, many[4:8], count, like, flags)
            p += 8
        while p + 4 <= last:
            some = gather_4(start, x, _four(read_at, p), weight, offset, a, b)
            _write_four(out, to, write_at, p, some, count, like, flags)
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
    return (*_four(array, k), *_four(array, k + 4))


@_inline
def _put_four(out, to, write_at, p, four, least):
    """Write the maximum of vectors and `least`."""
    store(out, to + item(write_at, p), less_or(four[0], least, least, four[0]))
    store(out, to + item(write_at, p + 1), less_or(four[1], least, least, four[1]))
    store(out, to + item(write_at, p + 2), less_or(four[2], least, least, four[2]))
    store(out, to + item(write_at, p + 3), less_or(four[3], least, least, four[3]))


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
            to, k, end = (row_at[row],), ptr[row], ptr[row + 1]
            rest = read_at, to, write_at, count, first, last
            while k + 8 <= end:
                eight = x, grad, _eight(offset, k)
                many = correlate_8(*eight, *rest) if is_whole else correlate_some(*eight, *rest)
                store_totals(out, k, many, adds)
                k += 8
            while k < end:
                one = correlate_1(x, grad, (item(offset, k),), *rest)
                store_totals(out, k, one, adds)
                k += 1


@_kernel
def sum_all_places(rows, positions, where, lists, weight, arrays, flags):
    """Write what :func:`sum_places` does, of rows of which many read the same places.

    Parameters
    ----------
    lists : tuple of ndarray
        ``begin``, ``end``, ``shift``, ``order``: row `r` has the entries from ``begin[r]`` to
        ``end[r]``, and the weight of entry `k` is ``weight[order[k] + shift[r]]``.
    rows, positions, where, weight, arrays, flags
        As for :func:`sum_places`; ``where[0]`` is not used.
    """
    begin, end, shift, order = lists
    _, offset, read_at, row_at, write_at, count = where
    (first, last), (out, x, bias, like) = positions, arrays
    row = rows[0]
    while row < rows[1]:
        height = _height(begin, row, rows[1])
        a, b, each = begin[row], end[row], _rows_from(row, height)
        shifts = shift[each[0]], shift[each[1]], shift[each[2]], shift[each[3]]
        start = number(x, 0.0)
        starts = start, start, start, start
        if len(bias):
            one, two = splat(bias, each[0]), splat(bias, each[1])
            starts = one, two, splat(bias, each[2]), splat(bias, each[3])
        p = first
        while p + 4 <= last:
            many = gather_rows_4(starts, x, _four(read_at, p), weight, shifts, order, offset, a, b)
            _write_four(out, row_at[row], write_at, p, many[0:4], count, like, flags)
            if height > 1:
                _write_four(out, row_at[row + 1], write_at, p, many[4:8], count, like, flags)
            if height > 2:
                _write_four(out, row_at[row + 2], write_at, p, many[8:12], count, like, flags)
            if height > 3:
                _write_four(out, row_at[row + 3], write_at, p, many[12:16], count, like, flags)
            p += 4
        while p < last:
            at, lanes = item(write_at, p), item(count, p)
            some = gather_rows_1(
                starts, x, (item(read_at, p),), weight, shifts, order, offset, a, b
            )
            _write(out, row_at[row] + at, some[0], lanes, like, flags)
            if height > 1:
                _write(out, row_at[row + 1] + at, some[1], lanes, like, flags)
            if height > 2:
                _write(out, row_at[row + 2] + at, some[2], lanes, like, flags)
            if height > 3:
                _write(out, row_at[row + 3] + at, some[3], lanes, like, flags)
            p += 1
        row += height


@_inline
def _height(begin, row, stop):
    """Return how many rows from one on have its entries, at most as many as are taken at once."""
    height = 1
    while height < ROWS and row + height < stop and begin[row + height] == begin[row]:
        height += 1
    return height


@_inline
def _rows_from(row, height):
    """Return as many rows as are taken at once, the last one of some again for what is missing."""
    last = row + height - 1
    return row, min(row + 1, last), min(row + 2, last), min(row + 3, last)


@_inline
def _write_four(out, to, write_at, p, four, count, like, flags):
    _write(out, to + item(write_at, p), four[0], item(count, p), like, flags)
    _write(out, to + item(write_at, p + 1), four[1], item(count, p + 1), like, flags)
    _write(out, to + item(write_at, p + 2), four[2], item(count, p + 2), like, flags)
    _write(out, to + item(write_at, p + 3), four[3], item(count, p + 3), like, flags)


@_kernel
def sum_all_weights(rows, blocks, where, lists, is_whole, out, x, grad):
    """Write what :func:`sum_weights` does, of rows of which many read the same places.

    `lists` are those of :func:`sum_all_places`; the number of entry `k` of row `r` is written to
    ``out[order[k] + shift[r]]``, which are neighbours. Other arguments are as for
    :func:`sum_weights`.
    """
    begin, end, shift, order = lists
    _, offset, read_at, row_at, write_at, count = where
    for block in range(len(blocks) - 1):
        first, last, adds = blocks[block], blocks[block + 1], block > 0
        row = rows[0]
        while row < rows[1]:
            height = _height(begin, row, rows[1])
            each, k, stop = _rows_from(row, height), begin[row], end[row]
            begins = row_at[each[0]], row_at[each[1]], row_at[each[2]], row_at[each[3]]
            rest = read_at, begins, write_at, count, first, last
            while k + 4 <= stop:
                four, at = (x, grad, _four(offset, k)), item(order, k)
                if is_whole:
                    many = correlate_rows_4(*four, *rest)
                else:
                    many = correlate_some_rows_4(*four, *rest)
                rows_of = many[0:4], many[4:8], many[8:12], many[12:16]
                _store_rows(out, at, shift, row, height, rows_of, adds)
                k += 4
            while k < stop:
                one, at = (x, grad, (item(offset, k),)), item(order, k)
                if is_whole:
                    some = correlate_rows_1(*one, *rest)
                else:
                    some = correlate_some_rows_1(*one, *rest)
                rows_of = some[0:1], some[1:2], some[2:3], some[3:4]
                _store_rows(out, at, shift, row, height, rows_of, adds)
                k += 1
            row += height


@_inline
def _store_rows(out, at, shift, row, height, rows_of, adds):
    """Write the totals of as many rows as there are of four."""
    store_totals(out, at + shift[row], rows_of[0], adds)
    if height > 1:
        store_totals(out, at + shift[row + 1], rows_of[1], adds)
    if height > 2:
        store_totals(out, at + shift[row + 2], rows_of[2], adds)
    if height > 3:
        store_totals(out, at + shift[row + 3], rows_of[3], adds)


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


# Rows that are packed at once: what they write lies side by side, and a cache holds what they read.
_PACKED = 16


@_kernel
def pack(rows, out, weight, sizes):
    """Write the weights of each column of a matrix, or of each matrix of one group, side by side.

    ``out[(column, k, n)]`` is weight ``[row, ROWS·column + n, tap]`` with ``k = (row, tap)``.

    Parameters
    ----------
    rows : tuple of int
        From which row to which.
    out, weight : ndarray
        What is written, where columns of a group are filled up to whole `ROWS`; and the weights.
    sizes : tuple of int
        Rows of a group, columns, and taps.
    """
    count, columns, taps = sizes
    together = ROWS * count * taps
    for first in range(rows[0], rows[1], _PACKED):
        for column in range(0, columns, ROWS):
            for row in range(first, min(first + _PACKED, rows[1])):
                group, k = row // count, row % count * taps
                to = (group * -(-columns // ROWS) + column // ROWS) * together + k * ROWS
                at, left = (row * columns + column) * taps, columns - column
                if left >= ROWS:
                    for tap in range(taps):
                        four = at + tap, at + taps + tap, at + 2 * taps + tap, at + 3 * taps + tap
                        put_four(out, to + ROWS * tap, weight, four)
                    continue
                for n in range(left):
                    for tap in range(taps):
                        out[to + tap * ROWS + n] = item(weight, at + n * taps + tap)


@_kernel
def choose_largest(channels, where, lots, out, choice, x):
    """Write the largest of what each window reads, and which of its taps that is.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    where : tuple of ndarray
        ``taps``, ``(windows, taps)``, where each tap reads behind the begin of the channel, or -1
        where there is nothing; ``read_at`` and ``row_at``, where channels begin in `x` and in
        `out`; ``write_at``, where windows lie behind that.
    lots : tuple of int
        Samples, the numbers that a place has room for in a block, and how far blocks are apart in
        `x` and in `out`.
    out, choice, x : ndarray
        Places that are written and read; `choice` is as large as `out`.
    """
    taps, read_at, row_at, write_at = where
    samples, room, x_step, out_step = lots
    for channel in range(*channels):
        for first in range(0, samples, room):
            block = first // room
            begin, behind = read_at[channel] + block * x_step, row_at[channel] + block * out_step
            for window in range(len(write_at)):
                for sample in range(0, room, lane_count(x)):
                    largest, chosen = _largest(x, taps, window, begin + sample)
                    at, left = behind + item(write_at, window) + sample, samples - first - sample
                    store_some(out, at, largest, left)
                    store_some(choice, at, chosen, left)


@_inline
def _largest(x, taps, window, begin):
    """Return the largest of what a window reads, and which of its taps that is."""
    largest, chosen, first = number(x, -np.inf), number(x, -1.0), True
    for tap in range(taps.shape[1]):
        at = taps[window, tap]
        if at < 0:
            continue
        value, this = load(x, begin + at), number(x, tap)
        if first:
            largest, chosen, first = value, this, False
            continue
        chosen = less_or(largest, value, this, chosen)
        largest = less_or(largest, value, value, largest)
        # Where several are NaN, the last one counts.
        chosen = number_or(value, value, chosen, this)
        largest = number_or(value, value, largest, value)
    return largest, chosen


@_kernel
def pass_to_chosen(channels, where, lots, grad, choice, above, like, adds):
    """Write what each window got, `above`, to the place that it has chosen, and 0 to the others.

    Arguments are as for :func:`choose_largest`; where `like` is not positive, it is 0. With `adds`
    all is added to what is there, as it must be where windows overlap.
    """
    taps, read_at, row_at, write_at = where
    samples, room, step, above_step = lots
    for channel in range(*channels):
        for first in range(0, samples, room):
            block = first // room
            begin, behind = read_at[channel] + block * step, row_at[channel] + block * above_step
            for window in range(len(write_at)):
                for sample in range(0, room, lane_count(grad)):
                    to = behind + item(write_at, window) + sample
                    chosen, value, zero = load(choice, to), load(above, to), number(grad, 0.0)
                    for tap in range(taps.shape[1]):
                        if taps[window, tap] < 0:
                            continue
                        part = equal_or(chosen, number(grad, tap), value, zero)
                        at, left = begin + taps[window, tap] + sample, samples - first - sample
                        _write(grad, at, part, left, like, (adds, False))


# -- Sums of maps ----------------------------------------------------------------------------------


@_kernel
def add_maps(channels, where, count, out, a, b, like, flags):
    """Write or add ``a + b``, or `a` where there is no `b`, for some channels.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    where : tuple of ndarray
        Where channels begin, and where runs of neighbouring numbers lie behind that; of `out`, `a`
        and `b` in turn.
    count : int
        Numbers of a run.
    out, a, b : ndarray
        Places that are written and read; `b` may be empty.
    like : ndarray
        Where these are not positive, `out` is 0; as large as `out`, or nothing.
    flags : tuple of bool
        As for :func:`sum_places`.
    """
    (rows, runs), (a_rows, a_runs), (b_rows, b_runs) = where
    for channel in range(*channels):
        for k in range(len(runs)):
            to = rows[channel] + item(runs, k)
            at = a_rows[channel] + item(a_runs, k)
            beside = b_rows[channel] + item(b_runs, k)
            for n in range(0, count, lane_count(a)):
                value = load(a, at + n)
                if len(b):
                    value = value + load(b, beside + n)
                _write(out, to + n, value, count - n, like, flags)


# -- Normalisation ---------------------------------------------------------------------------------

# Places that are summed up before their sum is added to the others, in float64.
_PART = 32


@_kernel
def normalise(channels, where, above, lots, arrays, statistics, affine, flags):
    """Write ``weight·(x - mean)/√(variance + eps) + bias`` for some channels.

    Parameters
    ----------
    channels : tuple of int
        From which to which.
    where, above : tuple of ndarray
        Where channels begin, and where places lie behind that; in `x`, and in `out`.
    lots : tuple of int
        As for :func:`choose_largest`.
    arrays : tuple of ndarray
        Places that are written, `out`, and read, `x`.
    statistics : tuple of ndarray of float64
        Mean and variance of each channel, given, or written; and ``1/√(variance + eps)``, which is
        written.
    affine : tuple
        `eps`, which is added to the variance; weight and bias, a number for each channel.
    flags : tuple of bool
        Whether mean and variance are given, and whether negative results become 0.
    """
    (rows, places), (out_rows, out_places) = where, above
    (out, x), (mean, variance, inverse), (eps, weight, bias) = arrays, statistics, affine
    is_given, rectifies = flags
    samples, room, x_step, out_step = lots
    count = samples * len(places)
    for channel in range(*channels):
        if not is_given:
            # The differences from `near` are small beside the spread, or are summed up once more.
            near = _first_mean(x, rows[channel], places, min(samples, room))
            for _ in range(2):
                own = x[:0], rows[channel], places, 0
                first, second = _moments(x, rows[channel], places, lots, near, own)
                mean[channel] = near + first / count
                variance[channel] = max(second / count - (first / count) ** 2, 0.0)
                if not (first / count) ** 2 > variance[channel]:
                    break
                near = mean[channel]
        inverse[channel] = 1 / np.sqrt(variance[channel] + eps)
        center = number(x, mean[channel])
        scale = number(x, weight[channel] * inverse[channel])
        add, least = splat(bias, channel), number(x, 0.0 if rectifies else -np.inf)
        for done in range(0, samples, room):
            block, left = done // room, samples - done
            row, to = rows[channel] + block * x_step, out_rows[channel] + block * out_step
            for k in range(len(places)):
                for sample in range(0, room, lane_count(x)):
                    value = load(x, row + item(places, k) + sample) - center
                    value = fma(value, scale, add)
                    value = less_or(value, least, least, value)
                    store_some(out, to + item(out_places, k) + sample, value, left - sample)


@_helper
def _first_mean(x, row, places, samples):
    """Return the mean over a channel's first places, near which all of it is."""
    sums, count = number(x, 0.0), min(_PART, len(places))
    for k in range(count):
        for sample in range(0, samples, lane_count(x)):
            sums = sums + load_some(x, row + item(places, k) + sample, samples - sample)
    return np.float64(total(sums) / (count * samples))


@_helper
def _moments(x, row, places, lots, near, other):
    """Return ``Σ g`` and ``Σ g·v`` with ``v = x - near`` over a channel.

    `other` is where `g` is: an array, the row, its places, and how far blocks are apart. Of an
    empty array `g` is `v`.
    """
    center, sums, products = number(x, near), 0.0, 0.0
    samples, room, step, _ = lots
    grad, to, grad_places, grad_step = other
    for done in range(0, samples, room):
        block, left = done // room, samples - done
        at, grad_at = row + block * step, to + block * grad_step
        for begin in range(0, len(places), _PART):
            first = second = number(x, 0.0)
            for k in range(begin, min(begin + _PART, len(places))):
                for sample in range(0, room, lane_count(x)):
                    v = load(x, at + item(places, k) + sample) - center
                    v = g = keep_some(v, left - sample)
                    if len(grad):
                        g = load_some(grad, grad_at + item(grad_places, k) + sample, left - sample)
                    first, second = first + g, fma(g, v, second)
            sums += total(first)
            products += total(second)
    return sums, products


@_kernel
def pass_normalised(channels, where, above, lots, arrays, statistics, weight, flags):
    """Write the gradient of :func:`normalise` in `x`, and sums that parameters need.

    Parameters
    ----------
    channels, where, above, lots, weight
        As for :func:`normalise`; `above` is where `grad` lies.
    arrays : tuple of ndarray
        ``out``, ``x``, ``grad``, ``like``: places that are written and read; and numbers where
        `out` is 0 unless they are positive, as many as it has, or nothing.
    statistics : tuple of ndarray of float64
        The mean of each channel, and ``1/√(variance + eps)``; and ``(channels, 2)``, which are
        written, ``Σ grad`` and ``Σ grad·(x - mean)·inverse`` of each channel.
    flags : tuple of bool
        Whether mean and variance are those of `x`; whether `out` is written; and whether it is
        added to what is there.
    """
    (rows, places), (grad_rows, grad_places) = where, above
    (out, x, grad, like), (mean, inverse, sums) = arrays, statistics
    is_own, writes, adds = flags
    samples, room, x_step, grad_step = lots
    count = samples * len(places)
    for channel in range(*channels):
        center = number(x, mean[channel])
        other = grad, grad_rows[channel], grad_places, grad_step
        first, second = _moments(x, rows[channel], places, lots, mean[channel], other)
        sums[channel, 0], sums[channel, 1] = first, second * inverse[channel]
        if not writes:
            continue
        own = weight[channel] * inverse[channel]
        slope, scale, add = number(x, own), number(x, 0.0), number(x, 0.0)
        if is_own:
            scale = number(x, -own * inverse[channel] * sums[channel, 1] / count)
            add = number(x, -own * sums[channel, 0] / count)
        for done in range(0, samples, room):
            block, left = done // room, samples - done
            row, to = rows[channel] + block * x_step, grad_rows[channel] + block * grad_step
            for k in range(len(places)):
                for sample in range(0, room, lane_count(x)):
                    at = row + item(places, k) + sample
                    value = fma(load(x, at) - center, scale, add)
                    value = fma(slope, load(grad, to + item(grad_places, k) + sample), value)
                    _write(out, at, value, left - sample, like, (adds, False))
