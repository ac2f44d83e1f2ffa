"""Recursive filters over sequences of many samples, and their gradients.

    a_0[t] y[t] = Σ_k b_k[t] x[t-k] - Σ_{k>0} a_k[t] y[t-k] + s[t]

A block of sixteen samples goes through time in tiles of a few dozen steps. Tiles are transposed, so
that samples are lanes, and stay in the nearest caches with everything computed from them. Blocks
are independent. Coefficients that all samples share are read as numbers. If each sample has its
own, they are transposed too. ``a`` enters as ``1/a_0, -a_1/a_0, …``.

With the gradients ``l[t]`` in ``y[t]``, the loop from the last step to the first makes

    κ[t] = l[t] - Σ_{k>0} a_k[t+k]/a_0[t+k] κ[t+k],    λ[t] = κ[t]/a_0[t]

All gradients are products with ``λ``: in ``b_k[t]`` ``λ[t] x[t-k]``, in ``a_k[t]``
``-λ[t] y[t-k]``, in ``x[t]`` ``Σ_k b_k[t+k] λ[t+k]``, and in ``s[t]`` ``λ[t]``.
"""

from __future__ import annotations

from typing import NamedTuple

from ..compile import njit
from .lanes import total as sum_of_lanes
from .memory import plus
from .sixteen import (
    WIDTH,
    fused,
    minus,
    put,
    reciprocal,
    sixteen,
    times,
    transpose_square,
    zeros_of,
)

_SQUARE = 8


class FilterSizes(NamedTuple):
    """Sizes of a filter, all counted in numbers.

    Attributes
    ----------
    samples, steps : int
        How many samples there are, and how many contiguous steps each has.
    tile, before : int
        Steps of a tile, and the steps that coefficients reach back, at most a tile.
    b_taps, a_taps : int
        How many coefficients a step has.
    b_sample, b_step, a_sample, a_step : int
        Distances between the coefficients of samples and of steps; 0 if these share coefficients.
    starts : int
        How many leading steps of each sample have an added term.
    """

    samples: int
    steps: int
    tile: int
    before: int
    b_taps: int
    a_taps: int
    b_sample: int
    b_step: int
    a_sample: int
    a_step: int
    starts: int


class FilterNeeds(NamedTuple):
    """Which gradients to write: 1 for each that is needed, else 0."""

    b: int
    a: int
    x: int
    start: int


class _Coefficients(NamedTuple):
    """Taps and strides of `b` or `a`, rows of sums and of products, and the sign of gradients."""

    taps: int
    sample: int
    step: int
    sums: int
    rows: int
    negative: int


# -- Between samples and lanes ---------------------------------------------------------------------


@njit
def _gather(source, at, stride, count, samples, room, row):
    """Set ``room[row + j, k] = source[at + k·stride + j]`` for `count` steps of samples `k`."""
    whole, lane = count - count % _SQUARE, 0
    while lane + _SQUARE <= samples:
        first = at + lane * stride
        for j in range(0, whole, _SQUARE):
            place = (row + j) * WIDTH + lane
            transpose_square(room, place, WIDTH, source, first + j, stride)
        for sample in range(lane, lane + _SQUARE):
            for j in range(whole, count):
                room[row + j, sample] = source[at + sample * stride + j]
        lane += _SQUARE
    for sample in range(lane, samples):
        for j in range(count):
            room[row + j, sample] = source[at + sample * stride + j]


@njit
def _scatter(room, row, count, samples, to, at, stride):
    """Set ``to[at + k·stride + j] = room[row + j, k]`` for `count` steps of samples `k`."""
    whole, lane = count - count % _SQUARE, 0
    while lane + _SQUARE <= samples:
        first = at + lane * stride
        for j in range(0, whole, _SQUARE):
            transpose_square(to, first + j, stride, room, (row + j) * WIDTH + lane, WIDTH)
        for sample in range(lane, lane + _SQUARE):
            for j in range(whole, count):
                to[at + sample * stride + j] = room[row + j, sample]
        lane += _SQUARE
    for sample in range(lane, samples):
        for j in range(count):
            to[at + sample * stride + j] = room[row + j, sample]


@njit
def _move(room, row, to, count):
    """Copy rows to other rows, which may overlap if they come earlier."""
    for j in range(count):
        put(room, to + j, sixteen(room, row + j))


@njit
def _clear(room, row, count):
    """Set rows to 0."""
    for j in range(count):
        put(room, row + j, zeros_of(room))


@njit
def _normalise(room, row, taps, count):
    """Make ``1/a_0, -a_1/a_0, …`` of the coefficients of some steps."""
    for j in range(count):
        p = row + j * taps
        inverse = reciprocal(sixteen(room, p))
        put(room, p, inverse)
        factor = minus(inverse)
        for k in range(1, taps):
            put(room, p + k, times(sixteen(room, p + k), factor))


# -- Loops over the steps of a tile ----------------------------------------------------------------
# Coefficient k of step j is ``c[at + j·step + k]``: a number, or a row of the room.


@njit
def _add_up(c, at, step, taps, room, x, y, count):
    """Set ``y[j] = Σ_k c_k[j] x[j-k]``."""
    for j in range(count):
        p, total = at + j * step, zeros_of(room)
        for k in range(taps):
            total = fused(total, sixteen(c, p + k), sixteen(room, x + j - k))
        put(room, y + j, total)


@njit
def _add_up_back(c, at, step, taps, room, slope, x, count):
    """Set ``x[j] = Σ_k c_k[j+k] slope[j+k]``."""
    for j in range(count):
        total = zeros_of(room)
        for k in range(taps):
            total = fused(total, sixteen(c, at + (j + k) * step + k), sixteen(room, slope + j + k))
        put(room, x + j, total)


@njit
def _scale(c, at, step, room, y, to, count):
    """Set ``to[j] = c_0[j] y[j]``."""
    for j in range(count):
        put(room, to + j, times(sixteen(c, at + j * step), sixteen(room, y + j)))


@njit
def _recur(c, at, step, taps, room, y, count):
    """Set ``y[j] = c_0[j] y[j] + Σ_{k>0} c_k[j] y[j-k]``, from the first to the last.

    The last two results stay in registers, and are added last.
    """
    if taps == 1:
        _scale(c, at, step, room, y, y, count)
        return
    one = sixteen(room, y - 1)
    if taps == 2:
        for j in range(count):
            p = at + j * step
            total = times(sixteen(c, p), sixteen(room, y + j))
            one = fused(total, sixteen(c, p + 1), one)
            put(room, y + j, one)
        return
    two = sixteen(room, y - 2)
    for j in range(count):
        p = at + j * step
        total = times(sixteen(c, p), sixteen(room, y + j))
        for k in range(taps - 1, 2, -1):
            total = fused(total, sixteen(c, p + k), sixteen(room, y + j - k))
        total = fused(total, sixteen(c, p + 2), two)
        total = fused(total, sixteen(c, p + 1), one)
        put(room, y + j, total)
        two = one
        one = total


@njit
def _recur_back(c, at, step, taps, room, g, count):
    """Set ``g[j] += Σ_{k>0} c_k[j+k] g[j+k]``, from the last to the first."""
    if taps == 1:
        return
    one = sixteen(room, g + count)
    if taps == 2:
        for j in range(count - 1, -1, -1):
            one = fused(sixteen(room, g + j), sixteen(c, at + (j + 1) * step + 1), one)
            put(room, g + j, one)
        return
    two = sixteen(room, g + count + 1)
    for j in range(count - 1, -1, -1):
        total = sixteen(room, g + j)
        for k in range(taps - 1, 2, -1):
            total = fused(total, sixteen(c, at + (j + k) * step + k), sixteen(room, g + j + k))
        total = fused(total, sixteen(c, at + (j + 2) * step + 2), two)
        total = fused(total, sixteen(c, at + (j + 1) * step + 1), one)
        put(room, g + j, total)
        two = one
        one = total


# -- Gradients in coefficients ---------------------------------------------------------------------


@njit
def _correlate(room, slope, x, count, taps, sums):
    """Add ``Σ_j slope[j] x[j-k]`` to row `k` of sums, three at once: none waits for the last."""
    k = 0
    while k + 3 <= taps:
        t0, t1, t2 = zeros_of(room), zeros_of(room), zeros_of(room)
        for j in range(count):
            p, factor = x + j - k, sixteen(room, slope + j)
            t0 = fused(t0, factor, sixteen(room, p))
            t1 = fused(t1, factor, sixteen(room, p - 1))
            t2 = fused(t2, factor, sixteen(room, p - 2))
        put(room, sums + k, plus(sixteen(room, sums + k), t0))
        put(room, sums + k + 1, plus(sixteen(room, sums + k + 1), t1))
        put(room, sums + k + 2, plus(sixteen(room, sums + k + 2), t2))
        k += 3
    while k < taps:
        total = zeros_of(room)
        for j in range(count):
            total = fused(total, sixteen(room, slope + j), sixteen(room, x + j - k))
        put(room, sums + k, plus(sixteen(room, sums + k), total))
        k += 1


@njit
def _multiply(room, slope, x, count, taps, to, negative):
    """Set row ``j·taps + k`` to ``slope[j] x[j-k]``, or to its negative."""
    for j in range(count):
        factor = sixteen(room, slope + j)
        if negative:
            factor = minus(factor)
        for k in range(taps):
            put(room, to + j * taps + k, times(factor, sixteen(room, x + j - k)))


@njit
def _multiply_up(room, slope, x, count, taps, to, at, negative):
    """Set number ``j·taps + k`` to ``slope[j] x[j-k]`` of all samples, or to its negative."""
    for j in range(count):
        factor = sixteen(room, slope + j)
        if negative:
            factor = minus(factor)
        for k in range(taps):
            product = times(factor, sixteen(room, x + j - k))
            to[at + j * taps + k] = sum_of_lanes(product)


@njit
def _write_gradients(s, own, room, slope, x, t, count, first, samples, to):
    """Write gradients in coefficients of a tile; add to the sums of those that steps share."""
    if not own.step:
        _correlate(room, slope, x, count, own.taps, own.sums)
    elif own.sample:
        _multiply(room, slope, x, count, own.taps, own.rows, own.negative)
        place, stride = (first * s.steps + t) * own.taps, s.steps * own.taps
        _scatter(room, own.rows, count * own.taps, samples, to, place, stride)
    else:
        place = (first // WIDTH * s.steps + t) * own.taps
        _multiply_up(room, slope, x, count, own.taps, to, place, own.negative)


@njit
def _write_sums(room, sums, taps, first, samples, to, negative):
    """Write the sums over all steps, for each sample."""
    for lane in range(samples):
        for k in range(taps):
            total = room[sums + k, lane]
            to[(first + lane) * taps + k] = -total if negative else total


# -- Blocks of samples -----------------------------------------------------------------------------


@njit
def _bring_constants(s, b, a, room, bs, as_, first, samples):
    """Copy the constant coefficients of each sample to scratch; those of `a` are normalised."""
    if s.b_sample and not s.b_step:
        _gather(b, first * s.b_sample, s.b_sample, s.b_taps, samples, room, bs)
    if s.a_sample:
        room[as_:] = 1
        if not s.a_step:
            _gather(a, first * s.a_sample, s.a_sample, s.a_taps, samples, room, as_)
            _normalise(room, as_, s.a_taps, 1)


@njit
def _bring_a(s, a, room, as_, first, t, count, samples):
    """Copy the coefficients `a` of each sample and the steps of a tile to scratch, normalised."""
    if s.a_step:
        at = first * s.a_sample + t * s.a_step
        _gather(a, at, s.a_sample, count * s.a_taps, samples, room, as_)
        _normalise(room, as_, s.a_taps, count)


@njit
def _filter_block(s, b, a, x, start, y, room, first):
    """Filter up to sixteen samples."""
    samples, span = min(WIDTH, s.samples - first), s.tile + s.before
    xs, ys = s.before, span + s.before
    bs = 2 * span
    as_ = bs + span * s.b_taps
    room[:] = 0
    _bring_constants(s, b, a, room, bs, as_, first, samples)
    for t in range(0, s.steps, s.tile):
        count, place = min(s.tile, s.steps - t), first * s.steps + t
        _gather(x, place, s.steps, count, samples, room, xs)
        if s.b_sample:
            if s.b_step:
                at = first * s.b_sample + t * s.b_step
                _gather(b, at, s.b_sample, count * s.b_taps, samples, room, bs)
            _add_up(room, bs, s.b_step, s.b_taps, room, xs, ys, count)
        else:
            _add_up(b, t * s.b_step, s.b_step, s.b_taps, room, xs, ys, count)
        for j in range(min(count, s.starts - t)):
            for lane in range(samples):
                room[ys + j, lane] += start[(first + lane) * s.starts + t + j]
        if s.a_sample:
            _bring_a(s, a, room, as_, first, t, count, samples)
            _recur(room, as_, s.a_step, s.a_taps, room, ys, count)
        else:
            _recur(a, t * s.a_step, s.a_step, s.a_taps, room, ys, count)
        _scatter(room, ys, count, samples, y, place, s.steps)
        _move(room, xs + count - s.before, xs - s.before, s.before)
        _move(room, ys + count - s.before, ys - s.before, s.before)


@njit(nogil=True, cache=True, error_model="numpy")
def normalise_into(out, coefficients, taps, divides):
    """Copy the coefficients of steps, normalised if it `divides`, followed by zeros."""
    whole = len(coefficients)
    for p in range(0, whole, taps):
        inverse = 1 / coefficients[p]
        for k in range(taps):
            out[p + k] = coefficients[p + k] * -inverse if divides else coefficients[p + k]
        if divides:
            out[p] = inverse
    for p in range(whole, len(out)):
        out[p] = 0


@njit(nogil=True, cache=True)
def filter_blocks(s, b, a, x, start, y, room, first, last):
    """Filter samples ``16·first`` to ``16·last - 1``.

    Parameters
    ----------
    s : FilterSizes
        Sizes.
    b, a : ndarray
        The coefficients. If samples share `a`, it is normalised.
    x, start : ndarray
        The samples, and the terms that are added in the leading steps.
    y : ndarray
        The results. All arrays are flat.
    room : ndarray
        Rows of sixteen: for each step of a tile and before it two, and as many as it has taps.
    first, last : int
        Blocks of samples.
    """
    for block in range(first, last):
        _filter_block(s, b, a, x, start, y, room, block * WIDTH)


@njit(nogil=True, cache=True)
def filter_complex(s, b, a, x, start, y, first, last):
    """Do :func:`filter_blocks` for complex numbers, without vectors.

    All coefficients of `a` are normalised.
    """
    for sample in range(first * WIDTH, min(last * WIDTH, s.samples)):
        row = sample * s.steps
        for t in range(s.steps):
            p = sample * s.b_sample + t * s.b_step
            total = b[p] * x[row + t]
            for k in range(1, min(s.b_taps, t + 1)):
                total += b[p + k] * x[row + t - k]
            if t < s.starts:
                total += start[sample * s.starts + t]
            p = sample * s.a_sample + t * s.a_step
            total *= a[p]
            for k in range(1, min(s.a_taps, t + 1)):
                total += a[p + k] * y[row + t - k]
            y[row + t] = total


@njit
def _differentiate_block(s, needs, grads, b, a, x, y, in_b, in_a, in_x, in_start, room, first):
    """Write the gradients in all arguments, for up to sixteen samples."""
    samples, span, h = min(WIDTH, s.samples - first), s.tile + s.before, s.before
    kappa, slope, xs, ys, out = 0, span, 2 * span + h, 3 * span + h, 4 * span
    b_sums = 5 * span
    a_sums = b_sums + s.b_taps
    b_rows = a_sums + s.a_taps
    a_rows = b_rows + s.tile * s.b_taps
    bs = a_rows + s.tile * s.a_taps
    as_ = bs + span * s.b_taps
    room[:] = 0
    _bring_constants(s, b, a, room, bs, as_, first, samples)
    t = (s.steps - 1) // s.tile * s.tile
    while t >= 0:
        count, place = min(s.tile, s.steps - t), first * s.steps + t
        _gather(grads, place, s.steps, count, samples, room, kappa)
        if s.a_sample:
            _bring_a(s, a, room, as_, first, t, count, samples)
            _recur_back(room, as_, s.a_step, s.a_taps, room, kappa, count)
            _scale(room, as_, s.a_step, room, kappa, slope, count)
        else:
            _recur_back(a, t * s.a_step, s.a_step, s.a_taps, room, kappa, count)
            _scale(a, t * s.a_step, s.a_step, room, kappa, slope, count)
        early = h if t else 0
        if needs.b:
            _clear(room, xs - h, h)
            _gather(x, place - early, s.steps, count + early, samples, room, xs - early)
            b_own = _Coefficients(s.b_taps, s.b_sample, s.b_step, b_sums, b_rows, 0)
            _write_gradients(s, b_own, room, slope, xs, t, count, first, samples, in_b)
        if needs.a:
            _clear(room, ys - h, h)
            _gather(y, place - early, s.steps, count + early, samples, room, ys - early)
            a_own = _Coefficients(s.a_taps, s.a_sample, s.a_step, a_sums, a_rows, 1)
            _write_gradients(s, a_own, room, slope, ys, t, count, first, samples, in_a)
        if needs.x:
            if s.b_sample:
                if s.b_step:
                    at = first * s.b_sample + t * s.b_step
                    _gather(b, at, s.b_sample, count * s.b_taps, samples, room, bs)
                _add_up_back(room, bs, s.b_step, s.b_taps, room, slope, out, count)
            else:
                _add_up_back(b, t * s.b_step, s.b_step, s.b_taps, room, slope, out, count)
            _scatter(room, out, count, samples, in_x, place, s.steps)
        if needs.start and t < s.starts:
            at = first * s.starts + t
            _scatter(room, slope, min(count, s.starts - t), samples, in_start, at, s.starts)
        # The part of this tile that earlier steps need.
        _move(room, kappa, kappa + s.tile, h)
        _move(room, slope, slope + s.tile, h)
        if s.a_sample and s.a_step:
            _move(room, as_, as_ + s.tile * s.a_taps, h * s.a_taps)
        if s.b_sample and s.b_step and needs.x:
            _move(room, bs, bs + s.tile * s.b_taps, h * s.b_taps)
        t -= s.tile
    if needs.b and not s.b_step:
        _write_sums(room, b_sums, s.b_taps, first, samples, in_b, False)
    if needs.a and not s.a_step:
        _write_sums(room, a_sums, s.a_taps, first, samples, in_a, True)


@njit(nogil=True, cache=True)
def differentiate(s, needs, grads, b, a, x, y, in_b, in_a, in_x, in_start, room, begin, end):
    """Write the needed gradients in the arguments of :func:`filter_blocks`.

    Parameters
    ----------
    s, b, a, x, y, begin, end
        As for :func:`filter_blocks`; blocks are `begin` to ``end - 1``. Coefficients that samples
        share, and that change with the steps, are followed by zeros for as many steps as they reach
        back.
    needs : FilterNeeds
        Which gradients are needed.
    grads : ndarray
        Those in `y`.
    in_b, in_a : ndarray
        The gradients in coefficients: per sample, step and tap; if steps share coefficients, per
        sample and tap; if samples share them, summed over each block, per step and tap.
    in_x, in_start : ndarray
        Those in `x` and in `start`.
    room : ndarray
        Rows of sixteen: for each step of a tile and before it five, and twice as many as it has
        taps; and as many as that once more.
    """
    for block in range(begin, end):
        first = block * WIDTH
        _differentiate_block(s, needs, grads, b, a, x, y, in_b, in_a, in_x, in_start, room, first)
