"""Small matrices in scratch, whose rows are padded to whole vectors: products and sums.

A matrix or row is the place of its first number in an array of scratch.
"""

from __future__ import annotations

from ..compile import njit
from .lanes import (
    fma,
    lane_count,
    load,
    load_wide,
    number,
    splat,
    splat_wide,
    stay_apart,
    store,
    total,
)


def _tiles(load, splat):
    """Return functions that write four rows of a product, or one, a vector of a width of each."""

    @njit(_nrt=False, forceinline=True)
    def four(room, to, start, a, b, inner, cols):
        first, over, along = a
        zero = number(load(room, b), 0.0)
        s0, s1, s2, s3 = zero, zero, zero, zero
        if start >= 0:
            s0, s1 = load(room, start), load(room, start + cols)
            s2, s3 = load(room, start + 2 * cols), load(room, start + 3 * cols)
        for k in range(inner):
            x, at = load(room, b + k * cols), first + k * along
            s0 = fma(splat(room, at), x, s0)
            s1 = fma(splat(room, at + over), x, s1)
            s2 = fma(splat(room, at + 2 * over), x, s2)
            s3 = fma(splat(room, at + 3 * over), x, s3)
        store(room, to, s0)
        store(room, to + cols, s1)
        store(room, to + 2 * cols, s2)
        store(room, to + 3 * cols, s3)

    @njit(_nrt=False, forceinline=True)
    def one(room, to, start, a, b, inner, cols):
        first, _, along = a
        even = number(load(room, b), 0.0)
        odd = even
        if start >= 0:
            even = load(room, start)
        for k in range(0, inner - 1, 2):
            even = fma(splat(room, first + k * along), load(room, b + k * cols), even)
            odd = fma(splat(room, first + (k + 1) * along), load(room, b + (k + 1) * cols), odd)
        if inner % 2:
            k = inner - 1
            even = fma(splat(room, first + k * along), load(room, b + k * cols), even)
        store(room, to, even + odd)

    return four, one


_four_wide, _one_wide = _tiles(load_wide, splat_wide)
_four, _one = _tiles(load, splat)


@njit(_nrt=False, forceinline=False)
def product(room, to, start, a, b, rows, inner, cols):
    """Write ``start + a·b``, of so many rows and padded columns; without a start if it is -1.

    `a` is where its first number is, and how far it is from there to the next row and column.
    """
    w = lane_count(room)
    first, over, along = a
    stay_apart()
    i = 0
    while i < rows:
        here = (first + i * over, over, along)
        left, j = rows - i, 0
        while j < cols:
            at = to + i * cols + j
            begin = start + i * cols + j if start >= 0 else -1
            if cols - j >= 2 * w:
                if left >= 4:
                    _four_wide(room, at, begin, here, b + j, inner, cols)
                else:
                    _one_wide(room, at, begin, here, b + j, inner, cols)
                j += 2 * w
            else:
                if left >= 4:
                    _four(room, at, begin, here, b + j, inner, cols)
                else:
                    _one(room, at, begin, here, b + j, inner, cols)
                j += w
        i += 4 if left >= 4 else 1


@njit(_nrt=False, forceinline=True)
def dot(room, x, y, count):
    """Return the product of two padded rows."""
    sums = number(room, 0.0)
    for j in range(0, count, lane_count(room)):
        sums = fma(load(room, x + j), load(room, y + j), sums)
    return total(sums)


@njit(_nrt=False, forceinline=True)
def add_scaled(room, to, x, factor, count):
    """Add a multiple of numbers that fill whole vectors."""
    factor = number(room, factor)
    for j in range(0, count, lane_count(room)):
        store(room, to + j, fma(factor, load(room, x + j), load(room, to + j)))


@njit(_nrt=False, forceinline=True)
def copy(room, to, x, count):
    """Copy numbers that fill whole vectors."""
    for j in range(0, count, lane_count(room)):
        store(room, to + j, load(room, x + j))


@njit(_nrt=False)
def clear(room, at, count):
    """Write zeros."""
    for j in range(at, at + count):
        room[j] = 0.0
