"""Block-tridiagonal systems by Gaussian elimination: solutions, determinants, and gradients.

    L_t x_{t-1} + D_t x_t + U_t x_{t+1} = b_t

A step eliminates the unknowns of block `t` from the rows of blocks `t` and `t + 1`, with the pivot
that is the largest of its column in both, as LAPACK's ``gbsv`` does for band matrices. So the rows
that are done reach to block ``t + 2``. Scratch is of float64.

With ``T_t`` what a step multiplies these rows by, and ``R`` the rows that are done, the inverse is
``R⁻¹ T_{N-1} … T_0``. Its blocks on the pattern follow from the last one to the first: ``T_t``
changes columns ``t`` and ``t + 1`` of that product, of which rows ``t`` to ``t + 2`` are computed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..compile import njit
from .lanes import lane_count, load, store
from .padded import add_scaled, clear

Array = Any


class BlockSystem(NamedTuple):
    """Block-tridiagonal systems; arrays are flat, with axes of steps, series, rows, columns.

    Attributes
    ----------
    steps, series, size, columns : int
        Numbers of blocks, of systems, of the rows of a block, and of right sides.
    width : int
        How many numbers a row has in scratch: three blocks and right sides, in whole vectors.
    in_series : tuple of int
        How far it is from a series to the next in `lower`, `diagonal` and `upper`; 0 if they share
        it.
    is_turned : bool
        Whether the matrix is the transpose of what the arrays hold.
    lower, diagonal, upper : ndarray, shape (steps, ..., size, size)
        The blocks; the first of `lower` and the last of `upper` are not read.
    b : ndarray, shape (steps, series, size, columns)
        The right sides.
    """

    steps: int
    series: int
    size: int
    columns: int
    width: int
    in_series: tuple[int, int, int]
    is_turned: bool
    lower: Array
    diagonal: Array
    upper: Array
    b: Array


def scratch_size(s: BlockSystem) -> int:
    """Return how many numbers :func:`solve` needs as scratch: rows of blocks, and solutions."""
    return s.steps * s.size * s.width + (s.steps + 2) * s.size * s.columns


def inverse_scratch_size(s: BlockSystem) -> int:
    """Return how many numbers :func:`inverses` needs: rows, lower rows of ``T_t``, two columns."""
    return s.steps * s.size * (s.width + 2 * s.size) + 12 * s.size * s.size


@njit(_nrt=False, forceinline=True)
def _place(s, t, n, in_series):
    """Return where the block of a step and a series begins."""
    return t * (in_series * s.series or s.size * s.size) + n * in_series


@njit(_nrt=False, forceinline=True)
def _read(array, at, is_turned, size, to, width, room):
    """Copy a block to rows of scratch."""
    down, right = (1, size) if is_turned else (size, 1)
    for i in range(size):
        for j in range(size):
            room[to + i * width + j] = array[at + i * down + j * right]


@njit(_nrt=False)
def _bring(s, n, t, to, room):
    """Copy the rows of a block to scratch, where column 0 is that of block ``t - 1``."""
    size, width, is_turned = s.size, s.width, s.is_turned
    clear(room, to, size * width)
    ahead, here, behind = s.in_series
    below, above, row_below, row_above = s.lower, s.upper, t, t
    if is_turned:  # blocks of the transpose are those of the neighbours
        below, above, row_below, row_above = s.upper, s.lower, t - 1, t + 1
        ahead, behind = behind, ahead
    if t > 0:
        _read(below, _place(s, row_below, n, ahead), is_turned, size, to, width, room)
    if t + 1 < s.steps:
        place = _place(s, row_above, n, behind)
        _read(above, place, is_turned, size, to + 2 * size, width, room)
    _read(s.diagonal, _place(s, t, n, here), is_turned, size, to + size, width, room)
    at = (t * s.series + n) * size * s.columns
    for i in range(size):
        for j in range(s.columns):
            room[to + i * width + 3 * size + j] = s.b[at + i * s.columns + j]


@njit(_nrt=False)
def _eliminate(room, at, rows, size, width):
    """Eliminate the first unknowns of some rows; return the sign of their exchanges.

    It is 0 if an unknown is in no row, and NaN if a pivot is not finite.
    """
    lanes, sign = lane_count(room), 1.0
    for j in range(size):
        pivot, most = at + j * width, abs(room[at + j * width + j])
        best = pivot
        for i in range(j + 1, rows):
            other = abs(room[at + i * width + j])
            if other > most:
                best, most = at + i * width, other
        if not 0 < most < math.inf:
            return 0.0 if most == 0 else math.nan
        begin = j // lanes * lanes
        if best != pivot:
            sign = -sign
            for k in range(begin, width, lanes):
                upper, lower = load(room, pivot + k), load(room, best + k)
                store(room, pivot + k, lower)
                store(room, best + k, upper)
        for i in range(j + 1, rows):
            row = at + i * width
            factor = room[row + j] / room[pivot + j]
            if factor != 0:
                add_scaled(room, row + begin, pivot + begin, -factor, width - begin)
    return sign


@njit(_nrt=False)
def _shift(room, at, size, width):
    """Move what rows have by a block to the left, and right sides not."""
    for i in range(size):
        row = at + i * width
        for k in range(2 * size):
            room[row + k] = room[row + size + k]
        for k in range(2 * size, 3 * size):
            room[row + k] = 0.0


@njit(_nrt=False)
def _substitute(s, room, t, n, solved, out):
    """Write the solution of a block, and to scratch, where those of the two behind it are."""
    size, columns = s.size, s.columns
    to = (t * s.series + n) * size * columns
    for i in range(size - 1, -1, -1):
        row = (t * size + i) * s.width
        for j in range(columns):
            x, at = room[row + 3 * size + j], solved + t * size * columns + j
            for k in range(i + 1, 3 * size):
                x -= room[row + k] * room[at + k * columns]
            x /= room[row + i]
            room[at + i * columns] = x
            out[to + i * columns + j] = x


@njit(_nrt=False)
def _factor(s, n, keeps, room):
    """Eliminate the unknowns of a system; return the sign of exchanges, as :func:`_eliminate`.

    If it `keeps` them, upper rows of ``T_t`` stand behind rows of blocks, lower ones behind all.
    """
    size, width = s.size, s.width
    block, two, sign = size * width, 2 * size, 1.0
    # A row of a block begins with the columns of the block before it, until it is shifted.
    _bring(s, n, 0, 0, room)
    _shift(room, 0, size, width)
    for t in range(s.steps):
        at, rows = t * block, two if t + 1 < s.steps else size
        if t + 1 < s.steps:
            _bring(s, n, t + 1, at + block, room)
        for i in range(rows if keeps else 0):
            for j in range(two):
                room[at + i * width + 3 * size + j] = 1.0 if i == j else 0.0
        sign *= _eliminate(room, at, rows, size, width)
        if not abs(sign) > 0:
            return sign
        if t + 1 < s.steps:
            for i in range(size if keeps else 0):
                to = s.steps * block + (t * size + i) * two
                for j in range(two):
                    room[to + j] = room[at + block + i * width + 3 * size + j]
            _shift(room, at + block, size, width)
    return sign


@njit(nogil=True, cache=True, _nrt=False)
def solve(s, first, last, out, room):
    """Solve systems `first` to ``last - 1``; NaN where a matrix is singular.

    Parameters
    ----------
    s : BlockSystem
        The systems.
    first, last : int
        Which of them.
    out : ndarray, shape (steps, series, size, columns)
        The solutions.
    room : ndarray of float64
        Scratch, of :func:`scratch_size`.
    """
    count, solved = s.size * s.columns, s.steps * s.size * s.width
    for n in range(first, last):
        is_regular = abs(_factor(s, n, False, room)) > 0
        clear(room, solved + s.steps * count, 2 * count)
        for t in range(s.steps - 1, -1, -1):
            if is_regular:
                _substitute(s, room, t, n, solved, out)
                continue
            to = (t * s.series + n) * count
            for k in range(count):
                out[to + k] = math.nan


@njit(nogil=True, cache=True, _nrt=False)
def determinants(s, first, last, logs, signs, room):
    """Write logarithms and signs of the determinants of systems `first` to ``last - 1``.

    A singular matrix has sign 0, and one that is not finite NaN. Scratch is as large as for
    :func:`solve` without columns.
    """
    for n in range(first, last):
        sign = _factor(s, n, False, room)
        log_det = 0.0
        if not abs(sign) > 0:
            log_det = -math.inf if sign == 0 else math.nan
        for row in range(s.steps * s.size if abs(sign) > 0 else 0):
            pivot = room[row * s.width + row % s.size]
            sign = -sign if pivot < 0 else sign
            log_det += math.log(abs(pivot))
        signs[n], logs[n] = sign, log_det


@njit(nogil=True, cache=True, _nrt=False, error_model="numpy")
def inverses(s, first, last, grads, lower, diagonal, upper, room):
    """Write multiples of the transposed inverses of some systems, at the places of blocks.

    Parameters
    ----------
    s : BlockSystem
        The systems, whose rows in scratch have room for two blocks in place of right sides.
    first, last : int
        Which of them.
    grads : ndarray, shape (series,)
        The multiples.
    lower, diagonal, upper : ndarray, shape (steps, series, size, size)
        The results, zeros before; empty if nobody needs them.
    room : ndarray of float64
        Scratch, of :func:`inverse_scratch_size`.
    """
    size, width, two = s.size, s.width, 2 * s.size
    saved = s.steps * size * width
    pair = saved + s.steps * size * two
    out = pair + 3 * size * two
    for n in range(first, last):
        g = grads[n] if abs(_factor(s, n, True, room)) > 0 else math.nan
        clear(room, pair, 3 * size * two)
        for t in range(s.steps - 1, -1, -1):
            # Column t of what is not yet multiplied ends at row t, and below column t + 1 is known.
            for i in range(size - 1, -1, -1):
                row = (t * size + i) * width
                for j in range(two):
                    x = 1.0 if i == j else 0.0
                    for k in range(i + 1, 3 * size):
                        x -= room[row + k] * room[pair + k * two + j]
                    room[pair + i * two + j] = x / room[row + i]
            for i in range(3 * size):
                for j in range(two):
                    x = 0.0
                    for k in range(size):
                        x += room[pair + i * two + k] * room[(t * size + k) * width + 3 * size + j]
                    for k in range(size if t + 1 < s.steps else 0):
                        own = room[pair + i * two + size + k]
                        x += own * room[saved + (t * size + k) * two + j]
                    room[out + i * two + j] = x
            if t + 1 < s.steps:
                _add(s, n, t + 1, g, room, out + size, lower)
                _add(s, n, t + 1, g, room, out + size * two + size, diagonal)
            if t + 2 < s.steps:
                _add(s, n, t + 1, g, room, out + 2 * size * two + size, upper)
            for i in range(two):
                for j in range(size):
                    to = pair + (size + i) * two + j
                    room[to], room[to + size] = 0.0, room[out + i * two + j]
        _add(s, n, 0, g, room, out, diagonal)
        if s.steps > 1:
            _add(s, n, 0, g, room, out + size * two, upper)


@njit(_nrt=False)
def _add(s, n, t, factor, room, place, array):
    """Add a multiple of a transposed block of two columns, if that is needed."""
    at = (t * s.series + n) * s.size * s.size
    for i in range(s.size if array.size > 0 else 0):
        for j in range(s.size):
            array[at + i * s.size + j] += factor * room[place + j * 2 * s.size + i]


@njit(nogil=True, cache=True, _nrt=False)
def outer_products(s, first, last, x, z, lower, diagonal, upper):
    """Write the gradients in the blocks of steps `first` to ``last - 1``: ``-z xᵀ``.

    Parameters
    ----------
    s : BlockSystem
        The systems.
    first, last : int
        Which steps.
    x, z : ndarray, shape (steps, series, size, columns)
        The solutions, and those of the transposed systems with gradients in the solutions.
    lower, diagonal, upper : ndarray, shape (steps, ..., size, size)
        The gradients; an empty one is not written.
    """
    _outer(s, first, last, x, z, -1, s.in_series[0], lower)
    _outer(s, first, last, x, z, 0, s.in_series[1], diagonal)
    _outer(s, first, last, x, z, 1, s.in_series[2], upper)


@njit(_nrt=False)
def _outer(s, first, last, x, z, offset, in_series, out):
    size, columns = s.size, s.columns
    for t in range(first, last if out.size > 0 else first):
        from_t, is_there = t + offset, 0 <= t + offset < s.steps
        for n in range(s.series):
            at = _place(s, t, n, in_series)
            left, right = (t * s.series + n) * size, (from_t * s.series + n) * size
            for i in range(size):
                for j in range(size):
                    total = 0.0
                    for k in range(columns if is_there else 0):
                        total -= z[(left + i) * columns + k] * x[(right + j) * columns + k]
                    if in_series == 0 and n > 0:
                        total += out[at + i * size + j]
                    out[at + i * size + j] = total
