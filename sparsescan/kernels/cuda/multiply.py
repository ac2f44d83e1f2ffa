"""Products of the steps of each chunk: ``p ← J p``, each column with an exponent of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, int32

from ...arrays.cuda import cuda
from .device import load, store
from .small_steps import (
    ROWS,
    SMALL,
    local_after,
    peak_finder,
    rescaler,
    smaller,
    stacks_of,
    tile_multiplier,
    weighted_terms,
)
from .staging import copying, making
from .tables import Run, jacobian_at, local_at
from .tiles import Tiles, weights_pitch_of
from .vectors import barrier, block_index, get, put, thread_index, vote

_WORD, _INT = np.int64(0), np.int32(0)


def multiply_kernel(
    size: int, nnz: int, dtype: np.dtype[Any], tiles: Tiles, terms: int, states: int
) -> Any:
    """Return `multiply` of :class:`~.chunks.ChunkKernels`."""
    kind, zero, one = from_dtype(dtype), dtype.type(0), dtype.type(1)
    small_step = dtype.type(SMALL[dtype][1])
    groups, cols, column_groups, width, parts, stride, chains, threads, pitch, *_ = tiles
    warp, units, span = threads == 32, size // states, cols * column_groups
    room, matrix_size = tiles.room, tiles.dense * groups * pitch
    tile_size, powers_size = ROWS * cols, chains * span
    # Behind the chains are weights, and the slopes of a step of each chain.
    weights_at, vector = chains * room, 16 // dtype.itemsize
    weights_pitch = weights_pitch_of(pitch, units, states, vector)
    slopes_at = weights_at + weighted_terms(terms, states) * units * weights_pitch
    pool_size = slopes_at + chains * terms * pitch
    # The thread, of which block, that has the column of local gradients.
    local_part, rest = divmod(size, width)
    local_group, local_column = divmod(rest, cols)
    if terms > 0:
        stages = making(size, terms, states, dtype, tiles, weights_at)
    else:
        stages = copying(size, nnz, dtype, tiles)
    slots, lights, slope_count, stage_size, find, begin, prepare, deliver = stages
    multiply_tile = tile_multiplier(dtype, size, groups, cols, pitch, tiles.dense)
    add_light = _light_adder(units, tiles, dtype)
    find_peaks = peak_finder(dtype, cols, local_column)
    rescale = rescaler(dtype, groups, cols, stride, pitch, local_column, warp)
    finish = _finisher(size, tiles, dtype)

    @cuda.jit
    def multiply(run, places, columns, exponents, steps, batch, chunk, chunks):
        pool = cuda.shared.array(pool_size, kind, alignment=16)
        tile = cuda.local.array(tile_size, kind)
        peaks = cuda.local.array(cols, kind)
        powers = cuda.shared.array(powers_size, int32)
        leasts = cuda.shared.array(threads, kind)
        added = cuda.local.array(ROWS, kind)
        staged = cuda.local.array(stage_size, kind)
        offsets = cuda.local.array(slots, int32)
        sources = cuda.local.array(slots, int32)
        light_sources = cuda.local.array(lights, int32)
        light_weights = cuda.local.array(lights, kind)
        slopes = cuda.local.array(slope_count, kind)
        numbers = cuda.local.array(slope_count, int32)
        held = offsets, sources, light_sources, numbers, light_weights, slopes, staged
        thread, block = thread_index(), block_index()
        group, lane = thread // stride, thread % stride
        part = block % parts
        chain = block // parts * chains + group
        present = group < chains and chain < (chunks - 1) * batch
        if not present:
            chain = 0
        sample = chain % batch
        first = chain // batch * chunk
        last = first + chunk
        row, mine = lane % groups, lane // groups
        busy = present and mine < column_groups
        owner = busy and part == local_part and mine == local_group
        base = group * room
        rows_at = base + row * pitch
        columns_at = base + matrix_size + mine * cols * pitch

        stacks = stacks_of(run, sample)
        steps_of = run, stacks, sample, steps
        where = pool, base, slopes_at + group * terms * pitch, thread, lane, present
        ahead = jacobian_at(run, first, sample)
        local = local_at(run, first + 1)
        for m in range(stage_size):
            staged[m] = zero
        least_weight = find(run, places, where, held, ahead)
        if present:
            for m in range(lane, room, stride):
                put(pool, base + m, zero)
        ahead, lost, least_weight = begin(
            steps_of, where, leasts, held, ahead, first, last, least_weight
        )
        if present:
            for c in range(lane, span, stride):
                put(powers, group * span + c, _INT)
                if c < width and part * width + c < size:
                    put(pool, base + matrix_size + c * pitch + part * width + c, one)
        barrier(warp)

        for step in range(first, last):
            more = present and step + 1 < last
            if more:
                ahead = prepare(steps_of, where, held, ahead, step)
            outside = False
            if busy:
                for r in range(ROWS):
                    added[r] = zero
                if owner and local != 0:
                    for r in range(ROWS):
                        if (r + 1) * groups <= size or row + r * groups < size:
                            added[r] = load(local, sample * size + row + r * groups, zero)
                local = local_after(run, stacks, local, step + 2, steps)
                multiply_tile(pool, rows_at, columns_at, tile)
                add_light(pool, base, columns_at, row, tile)
                for r in range(ROWS):
                    tile[local_column * ROWS + r] += added[r]
                outside = outside | find_peaks(tile, peaks, owner)
            if more:
                for m in range(stage_size):
                    size_of = abs(staged[m])
                    outside = outside | ((size_of < small_step) & (size_of > zero))
            if vote(outside, warp):
                step_least = one
                if more:
                    for m in range(stage_size):
                        step_least = smaller(step_least, staged[m])
                threads_of = row, thread, group * stride, busy, owner
                columns_of = pool, columns_at, powers, group * span + mine * cols
                rescale(run, columns_of, leasts, tile, peaks, threads_of, step_least)
            if busy:
                for n in range(cols):
                    for r in range(ROWS):
                        put(pool, columns_at + n * pitch + row + r * groups, tile[n * ROWS + r])
            if present:
                ahead, lost = deliver(steps_of, where, held, ahead, step, last, least_weight, lost)
            barrier(warp)

        if lost:
            store(run, Run.FLAG, np.int64(1), _WORD)
        finish(run, columns, exponents, pool, powers, tile, (group, lane, part, chain, present))

    return multiply


def _light_adder(units: int, tiles: Tiles, dtype: np.dtype[Any]) -> Any:
    """Return a device function that multiplies by the light rows of a step, of two values each."""
    groups, cols, pitch, light = tiles.groups, tiles.cols, tiles.pitch, tiles.light
    # Rows of a thread from which on some are light, and where the values of those are.
    first_light = units // groups if light else ROWS
    lights_at = (tiles.dense * groups + cols * tiles.column_groups) * pitch

    @cuda.jit(device=True)
    def add_light(pool, base, columns_at, row, tile):
        if light > 0:
            for r in range(first_light, ROWS):
                own = row + r * groups - units
                if 0 <= own < light:
                    for state in range(2):
                        value = get(pool, base + lights_at + 2 * own + state)
                        entry_at = columns_at + state * units + own
                        for n in range(cols):
                            entry = get(pool, entry_at + n * pitch)
                            tile[n * ROWS + r] += value * entry

    return add_light


def _finisher(size: int, tiles: Tiles, dtype: np.dtype[Any]) -> Any:
    """Return a device function that writes the product of a chunk, and raises the flag."""
    zero = dtype.type(0)
    groups, cols, column_groups, width, _, stride, _, _, pitch, *_ = tiles
    room, matrix_size, span = tiles.room, tiles.dense * groups * pitch, cols * column_groups

    @cuda.jit(device=True)
    def finish(run, columns, exponents, pool, powers, tile, who):
        group, lane, part, chain, present = who
        row, mine, base = lane % groups, lane // groups, group * room
        if present and mine < column_groups:
            poison = zero
            for n in range(cols):
                c = mine * cols + n
                j = part * width + c
                if c < width and j <= size:
                    for r in range(ROWS):
                        poison += tile[n * ROWS + r] * zero
                    if row == 0 and j < size:
                        store(exponents, chain * size + j, get(powers, group * span + c), _INT)
            if poison != zero:
                store(run, Run.FLAG, np.int64(1), _WORD)
        if present:
            # The columns, one after the other as they are stored: threads write beside each other.
            place = (chain * (size + 1) + part * width) * size
            m, c, i = lane, lane // size, lane % size
            while c < width and part * width + c <= size:
                entry = get(pool, base + matrix_size + c * pitch + i)
                store(columns, place + m, entry, zero)
                m += stride
                c, i = m // size, m % size

    return finish
