"""Parts of the kernels for chains of small steps: addresses, weights, ranges, and carries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, int32, int64

from ...arrays.cuda import cuda
from ..cpu.tables import BAND
from .device import exponent_of, load, scale, store
from .tables import Run, jacobian_at, local_at
from .vectors import barrier, exponent_field, get, larger, power_of_two, put, read_vector

# Bytes of shared memory that every block may have.
SHARED = 48 * 1024

# For the largest entry of a column: the band in which it stays, and the exponent to which it is
# brought back. Steps may have entries up to 2^80, or 2^700, which is left of the range.
BANDS = {
    np.dtype(np.float32): (2.0**-20, 2.0**40, 20),
    np.dtype(np.float64): (2.0**-100, 2.0**300, 200),
}
# Entries of columns, and of steps, whose products are normal numbers: those that are as large.
SMALL = {np.dtype(np.float32): (2.0**-80, 2.0**-45), np.dtype(np.float64): (2.0**-620, 2.0**-400)}

# Rows of a product that a thread holds.
ROWS = 4
# Less than any exponent.
NONE = -(1 << 30)
_WORD, _INT = np.int64(0), np.int32(0)


def pitch_of(rows: int, vector: int) -> int:
    """Return values from one row to the next, an odd number of vectors: no bank conflicts."""
    return (-(-rows // vector) | 1) * vector


def weighted_terms(terms: int, states: int) -> int:
    """Return the terms that reach any unit: of two states the last one reaches its own."""
    return terms if states == 1 else terms - 1


@cuda.jit(device=True)
def stacks_of(run, sample):
    """Return where stacked steps start for a sample, and stacked local gradients; 0 if not stacked.

    Then bytes to the next of each, and where the table of local gradients starts.
    """
    base = load(run, Run.BASE, _WORD)
    if base != 0:
        base += sample * load(run, Run.SAMPLE, _WORD)
    return (
        base,
        load(run, Run.LOCAL_BASE, _WORD),
        load(run, Run.STEP, _WORD),
        load(run, Run.LOCAL_STEP, _WORD),
        load(run, Run.LOCALS, _WORD),
    )


@cuda.jit(device=True)
def jacobian_after(run, stacks, address, step, steps, sample):
    """Return the address of a step, given that of the one before; any after the last."""
    if stacks[0] != 0:
        return address + stacks[2]
    return jacobian_at(run, min(step, steps - 1), sample)


@cuda.jit(device=True)
def local_after(run, stacks, address, k, steps):
    """Return the address of what is added to gradient `k`, or 0, given that of the one before."""
    if stacks[1] != 0:
        return address + stacks[3]
    if stacks[4] == 0:
        return stacks[4]
    return local_at(run, min(k, steps))


@cuda.jit(device=True)
def smaller(a, b):
    """Return the smaller of a positive number and a magnitude, which counts unless it is zero."""
    b = abs(b)
    return b if b < a and b > 0 else a


def weights_placer(
    size: int, terms: int, states: int, dtype: np.dtype[Any], threads: int, pitch: int
) -> Any:
    """Return a device function by which the threads of a block copy weights to shared memory."""
    zero, one = dtype.type(0), dtype.type(1)
    units, weighted = size // states, weighted_terms(terms, states)

    @cuda.jit(device=True)
    def place_weights(run, places, pool, base, thread):
        """Copy the weights to shared memory, zeros elsewhere; return the least of a thread."""
        address = load(run, Run.WEIGHTS, _WORD)
        least = one
        for m in range(thread, weighted * units * pitch, threads):
            row, column = m // pitch, m % pitch
            weight = zero
            if column < units:
                # Rows of each term: those of both states.
                row += row // units * (size - units)
                number = load(places, terms * size + row * units + column, _INT)
                if number >= 0:
                    weight = load(address, np.int64(number), zero)
            put(pool, base + m, weight)
            least = smaller(least, weight)
        return least

    return place_weights


def tile_multiplier(
    dtype: np.dtype[Any], size: int, groups: int, cols: int, pitch: int, dense: int = ROWS
) -> Any:
    """Return a device function by which a thread multiplies `dense` rows of a step by columns.

    Rows are `groups` apart, and begin at `rows_at`; columns of the thread at `columns_at`.
    """
    kind, zero, vector = from_dtype(dtype), dtype.type(0), 16 // dtype.itemsize
    padded = -(-size // vector) * vector
    tile_size, left_size, right_size = ROWS * cols, ROWS * vector, cols * vector

    @cuda.jit(device=True)
    def multiply_tile(pool, rows_at, columns_at, tile):
        left = cuda.local.array(left_size, kind)
        right = cuda.local.array(right_size, kind)
        for m in range(tile_size):
            tile[m] = zero
        k = 0
        while k < padded:
            for r in range(dense):
                read_vector(left, r * vector, pool, rows_at + r * groups * pitch + k)
            for n in range(cols):
                read_vector(right, n * vector, pool, columns_at + n * pitch + k)
            # NVVM for 10.0 and 12.0 does not unroll this one as range(), upon which it keeps the
            # tile in memory.
            n = 0
            while n < cols:
                for v in range(vector):
                    for r in range(dense):
                        tile[n * ROWS + r] += left[r * vector + v] * right[n * vector + v]
                n += 1
            k += vector

    return multiply_tile


def peak_finder(dtype: np.dtype[Any], cols: int, local_column: int) -> Any:
    """Return a device function that finds the largest entry of each column of a thread's tile."""
    zero = dtype.type(0)
    low, high = (dtype.type(limit) for limit in BANDS[dtype][:2])
    small = dtype.type(SMALL[dtype][0])

    @cuda.jit(device=True)
    def find_peaks(tile, peaks, owner):
        """Return whether a column is out of its band or has small entries; the owner's is not."""
        outside = False
        for n in range(cols):
            peak, tiny = zero, False
            for r in range(ROWS):
                size_of = abs(tile[n * ROWS + r])
                peak = larger(peak, size_of)
                tiny = tiny | ((size_of < small) & (size_of > zero))
            if n == local_column and owner:
                peak, tiny = zero, False
            peaks[n] = peak
            outside = outside | tiny | (peak > high) | ((peak < low) & (peak > zero))
        return outside

    return find_peaks


def rescaler(
    dtype: np.dtype[Any],
    groups: int,
    cols: int,
    stride: int,
    pitch: int,
    local_column: int,
    warp: bool,
) -> Any:
    """Return a device function that brings columns of a product into their band.

    Threads of a chain hold the columns in tiles, as those of `multiply` do; it is called by all
    threads of a block, or of a warp, once something has left the band or is small.
    """
    real, zero, one = dtype.type, dtype.type(0), dtype.type(1)
    low, high, aim = BANDS[dtype]
    low, high = real(low), real(high)
    normal, negligible = (int(limit) for limit in BAND[dtype][6:])
    most = 100 if dtype.itemsize == 4 else 900
    none, infinity = np.int32(NONE), real(np.inf)

    @cuda.jit(device=True)
    def rescale(run, columns_of, leasts, tile, peaks, threads_of, step_least):
        """Rescale, given where columns and powers are, a thread's row, and those of its chain."""
        pool, columns_at, powers, powers_at = columns_of
        row, thread, first, busy, owner = threads_of
        # The largest of each column, of all who share it, and the smallest, in the place of the
        # column; and the smallest of the next step.
        if busy:
            for n in range(cols):
                least = infinity
                for r in range(ROWS):
                    least = smaller(least, tile[n * ROWS + r])
                if n == local_column and owner:
                    least = infinity
                put(pool, columns_at + n * pitch + row, peaks[n])
                put(pool, columns_at + n * pitch + groups + row, least)
        put(leasts, thread, step_least)
        barrier(warp)
        if busy:
            for m in range(stride):
                step_least = smaller(step_least, get(leasts, first + m))
            for n in range(cols):
                peak, least = zero, infinity
                for r in range(groups):
                    peak = larger(peak, get(pool, columns_at + n * pitch + r))
                    least = smaller(least, get(pool, columns_at + n * pitch + groups + r))
                shift = 0
                if peak > high or (peak < low and peak > zero):
                    shift = min(max(aim - exponent_of(peak), -most), most)
                    factor = scale(one, shift)
                    for r in range(ROWS):
                        tile[n * ROWS + r] *= factor
                if row == 0 and peak > zero:
                    power = int64(get(powers, powers_at + n))
                    put(powers, powers_at + n, np.int32(power - shift))
                    # The smallest entry, as it is kept, and what the next step makes of it.
                    term = exponent_of(least) + shift + exponent_of(step_least) - 1
                    if term < normal and exponent_of(least) + power > negligible:
                        store(run, Run.FLAG, np.int64(1), _WORD)
                elif peak == zero and row == 0:
                    # It stays so, and must not count as the largest.
                    put(powers, powers_at + n, none)
        barrier(warp)

    return rescale


def carrier(size: int, dtype: np.dtype[Any], warp: bool) -> Any:
    """Return a device function that takes a gradient over the product of some steps.

    Its terms are taken relative to the largest, so that none overflows, none that counts is lost.
    """
    kind, zero, infinity = from_dtype(dtype), dtype.type(0), dtype.type(np.inf)
    vector = 16 // dtype.itemsize
    padded, padded_powers = -(-size // vector) * vector, -(-size // 4) * 4

    info = np.finfo(dtype)
    lowest, last = np.int32(info.minexp), np.int32(info.minexp - info.nmant)
    # A sum that no term changes which is no normal number, before or after it is multiplied.
    enough = dtype.type(2.0 ** (info.minexp + 8) * max(BANDS[dtype][1], 2.0**info.nmant))
    # To which exponent the largest term is brought: columns have entries up to `BANDS`.
    none, high = np.int32(NONE), np.int32(60 if dtype.itemsize == 4 else 400)
    most = np.int32(250 if dtype.itemsize == 4 else 2040)

    @cuda.jit(device=True)
    def scaled(value, exponent):
        """Return ``value·2^exponent``, in two steps, of which each can be made."""
        exponent = max(min(exponent, most), np.int32(-most))
        half = np.int32(exponent >> 1)
        value *= power_of_two(half, zero)
        return value * power_of_two(np.int32(exponent - half), zero)

    @cuda.jit(device=True)
    def carried(i, x, ring, at, own_power, terms, powers):
        """Return entry `i` of the gradient behind, and infinity if terms got lost, or zero.

        `x` is that of the gradient before; row `i` of the product, and what local gradients add,
        begin at `at` in `ring`. Shared memory has room for `terms` and `powers`, a vector of each,
        which is filled up with zeros and with the least of all powers.
        """
        some_terms = cuda.local.array(vector, kind)
        some_powers = cuda.local.array(4, int32)
        sums = cuda.local.array(vector, kind)
        lost = zero
        if i < size:
            power = none
            if x != zero:
                power = np.int32(exponent_field(x) + own_power)
            put(powers, i, power)
        barrier(warp)
        top = none
        for j in range(0, padded_powers, 4):
            read_vector(some_powers, 0, powers, j)
            for v in range(4):
                top = max(top, some_powers[v])
        top = np.int32(top - high)
        if i < size:
            put(terms, i, scaled(x, np.int32(own_power - top)))
        barrier(warp)
        if i < size:
            for v in range(vector):
                sums[v] = zero
            for j in range(0, padded, vector):
                read_vector(some_terms, 0, terms, j)
                for v in range(vector):
                    if j + v < size:
                        sums[v] += ring[at + j + v] * some_terms[v]
            total = sums[0] + sums[1]
            if vector == 4:
                total += sums[2] + sums[3]
            x = scaled(total, top) + ring[at + size]
            if abs(total) < enough:
                # Were there terms that got lost beside the largest of other rows?
                for j in range(size):
                    power = get(powers, j)
                    if ring[at + j] != zero and power != none:
                        term = power + exponent_field(ring[at + j])
                        if min(power, term) - top < lowest and term > last - 2:
                            lost = infinity
        return x, lost

    return carried
