"""One launch for a chain of small implicit steps: a single pass over their slopes.

A block keeps the slopes of its chunk in shared memory, makes the products of the chunk's pieces,
waits for the gradient of the chunk before, takes it over the pieces, passes it on, and sweeps
through the pieces: slopes are read once, and gradients written once. Blocks take their chunks by
tickets, in the order of the chain, so that a block waits for blocks alone that have started (the
chained scan of Merrill and Garland, 2016, without its look-back: a block waits for the gradient
itself, and does not make products of other chunks meanwhile).

For an RNN's steps ``J_t = W D_t``, of which each unit has one slope, products need no Jacobians:
``p ← W (D_t p)``, where a column is multiplied by the slopes of the next step when it is stored.
As for the rest, see :mod:`~.chunks`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int32, int64

from ...arrays.cuda import SIMULATED, cuda
from .device import atomic_add, load, store
from .small_steps import (
    NONE,
    ROWS,
    SHARED,
    SMALL,
    carrier,
    local_after,
    peak_finder,
    pitch_of,
    rescaler,
    smaller,
    stacks_of,
    tile_multiplier,
    weights_placer,
)
from .tables import Run, jacobian_at, local_at
from .vectors import barrier, get, put, read_vector, thread_index, vote

# Warps of a block, if there is room for pieces of so many steps each; and columns that a thread
# holds of a product.
_WARPS, _SHORTEST, _MOST_COLUMNS = ((2, 1) if SIMULATED else (4, 2, 1)), 32, 9
# Rows of slopes that a thread loads before it stores them; steps whose local gradients it loads
# ahead.
_TOGETHER, _AHEAD = 8, 4
_WORD, _INT, _ONE = np.int64(0), np.int32(0), np.int32(1)


class Layout(NamedTuple):
    """How a block shares a chunk: each of its `teams` makes the product of a piece.

    Thread ``(g, c)`` of the `stride` threads of a team has rows ``g, g + groups, …`` and columns
    ``c·cols, c·cols + 1, …``. A chunk has at most `longest` steps.
    """

    size: int
    vector: int
    groups: int
    cols: int
    column_groups: int
    stride: int
    teams: int
    pitch: int
    longest: int

    @property
    def threads(self) -> int:
        """Threads of the block."""
        return self.stride * self.teams

    @property
    def span(self) -> int:
        """Columns that there is room for in each team."""
        return self.cols * self.column_groups

    @property
    def room(self) -> int:
        """Values that those of a team take."""
        return self.span * self.pitch

    @property
    def columns(self) -> int:
        """Where columns begin, behind the weights."""
        return ROWS * self.groups * self.pitch

    @property
    def starts(self) -> int:
        """Where the first gradients of pieces begin."""
        return self.columns + self.teams * self.room

    @property
    def slopes(self) -> int:
        """Where slopes begin, which become gradients."""
        return self.starts + self.teams * self.pitch

    @property
    def padded(self) -> int:
        """Entries of a column in whole vectors."""
        return -(-self.size // self.vector) * self.vector

    @property
    def local(self) -> tuple[int, int]:
        """The thread of a row, and its column, that has the column of local gradients."""
        return divmod(self.size, self.cols)

    @property
    def at_once(self) -> int:
        """Rows of slopes that a warp loads at once."""
        return 32 // self.size


@cache
def layout_of(size: int, itemsize: int) -> Layout | None:
    """Return how a block shares a chunk of steps of this size, or None if it cannot."""
    groups, vector = -(-size // ROWS), 16 // itemsize
    pitch = pitch_of(ROWS * groups, vector)
    for warps in _WARPS:
        for teams in (2, 1):
            stride = 32 // teams
            most = stride // groups
            if most == 0 or size + 1 > most * _MOST_COLUMNS:
                continue
            cols = -(-(size + 1) // most)
            column_groups = -(-(size + 1) // cols)
            layout = Layout(
                size, vector, groups, cols, column_groups, stride, warps * teams, pitch, 0
            )
            taken = (layout.slopes + layout.threads + ROWS * groups) * itemsize
            # Exponents, and what lies between arrays.
            taken += 4 * (layout.teams * layout.span + ROWS * groups) + 128
            longest = (SHARED - taken) // (size * itemsize)
            if longest >= _SHORTEST * layout.teams:
                return layout._replace(longest=longest)
            break
    return None


@cache
def chained_kernel(size: int, dtype: np.dtype[Any]) -> Any:
    """Return the kernel, which takes what those of :class:`~.chunks.ChunkKernels` take.

    `exponents` is the address of the tickets that are taken and, for each chunk and sample, of
    whether its last gradient is there: int32, zero before the first run, and left so.
    """
    layout = layout_of(size, dtype.itemsize)
    assert layout is not None
    kind, zero, one, none = from_dtype(dtype), dtype.type(0), dtype.type(1), np.int32(NONE)
    stride, teams, threads, pitch = layout.stride, layout.teams, layout.threads, layout.pitch
    columns_first, starts_at, slopes_at = layout.columns, layout.starts, layout.slopes
    span, room, padded, at_once = layout.span, layout.room, layout.padded, layout.at_once
    pool_size, powers_size = slopes_at + layout.longest * size, teams * span
    padded_powers, width, warp_teams = ROWS * layout.groups, size + 1, 32 // stride
    place_weights = weights_placer(size, 1, 1, dtype, threads, pitch)
    place_slopes = _slopes_placer(layout, dtype)
    multiply_piece = _piece_multiplier(layout, dtype)
    carried = carrier(size, dtype, False)
    sweep_piece = _piece_sweeper(layout, dtype)

    @cuda.jit
    def chained(run, places, columns, exponents, steps, batch, chunk, chunks):
        pool = cuda.shared.array(pool_size, kind, alignment=16)
        leasts = cuda.shared.array(threads, kind)
        powers = cuda.shared.array(powers_size, int32)
        terms = cuda.shared.array(padded, kind, alignment=16)
        term_powers = cuda.shared.array(padded_powers, int32, alignment=16)
        ticket = cuda.shared.array(1, int32)
        ring = cuda.local.array(width, kind)
        thread = thread_index()
        number = _take(exponents, ticket, chunks * batch)
        c, sample = number // batch, number % batch
        flags = exponents + 4
        first = c * chunk
        end = min(first + chunk, steps)
        # The steps of each team, some of which may have none.
        team, piece = thread // stride, (chunk + teams - 1) // teams
        start = min(first + team * piece, end)
        stop = min(start + piece, end)
        stacks = stacks_of(run, sample)

        place_slopes(run, places, pool, stacks, first, end - first, sample)
        put(leasts, thread, place_weights(run, places, pool, 0, thread))
        for m in range(size * pitch + thread, slopes_at, threads):
            put(pool, m, zero)
        for m in range(thread, powers_size, threads):
            put(powers, m, _INT)
        for m in range(thread, padded_powers, threads):
            put(term_powers, m, none)
        for m in range(thread, padded, threads):
            put(terms, m, zero)
        cuda.syncthreads()
        least_weight = one
        for m in range(threads):
            least_weight = smaller(least_weight, get(leasts, m))
        cuda.syncthreads()
        # Nothing is behind the last product of a sample.
        multiplied = stop if stop < steps else start
        bad = multiply_piece(
            run,
            pool,
            powers,
            leasts,
            stacks,
            first,
            start,
            multiplied,
            piece,
            steps,
            sample,
            least_weight,
        )

        if c > 0 and thread == 0:
            while atomic_add(flags, number - batch, _INT) == 0:
                pass
            # Nobody else waits for it: the next run finds zeros.
            atomic_add(flags, number - batch, np.int32(-1))
            cuda.threadfence()
        cuda.syncthreads()
        out, x = load(run, Run.OUT, _WORD), zero
        if thread < size:
            x = load(out, (first * batch + sample) * size + thread, zero)
        p = int64(0)
        while p < teams:
            begin = first + p * piece
            if thread < size:
                put(pool, starts_at + p * pitch + thread, x)
            if begin < end and min(begin + piece, end) < steps:
                if thread < size:
                    for j in range(width):
                        ring[j] = get(pool, columns_first + p * room + j * pitch + thread)
                power = get(powers, p * span + min(thread, int64(size - 1)))
                x, lost = carried(thread, x, ring, 0, power, terms, term_powers)
                if thread < size:
                    bad = bad | (lost + x * zero != zero)
                # The next one changes the terms.
                cuda.syncthreads()
            p += 1
        if end < steps:
            if thread < size:
                store(out, (end * batch + sample) * size + thread, x, zero)
            cuda.syncthreads()
            if thread == 0:
                cuda.threadfence()
                atomic_add(flags, number, _ONE)
        else:
            cuda.syncthreads()

        bad = bad | sweep_piece(run, pool, stacks, first, start, stop, piece, steps, sample)
        barrier(True)
        # A warp writes what its teams have made, which are steps in turn. The last gradient of the
        # chunk is there, unless it is that of the chain.
        u, own = thread % 32 % size, thread % 32 // size
        begin = min(first + thread // 32 * warp_teams * piece, end)
        stop = min(begin + warp_teams * piece, end if end == steps else end - 1)
        step = begin + own
        while own < at_once and step < stop:
            value = get(pool, slopes_at + (step - first) * size + u)
            store(out, ((step + 1) * batch + sample) * size + u, value, zero)
            step += at_once
        if bad:
            store(run, Run.FLAG, np.int64(1), _WORD)

    return chained


@cuda.jit(device=True)
def _take(tickets, ticket, blocks):
    """Return the number of a block in the order in which they start."""
    if thread_index() == 0:
        taken = atomic_add(tickets, 0, _ONE)
        put(ticket, 0, taken)
        if taken == blocks - 1:
            # All are taken: so is the first of the next run.
            atomic_add(tickets, 0, np.int32(-blocks))
    cuda.syncthreads()
    return int64(get(ticket, 0))


def _slopes_placer(layout: Layout, dtype: np.dtype[Any]) -> Any:
    """Return the copy of a chunk's slopes to shared memory."""
    kind, zero = from_dtype(dtype), dtype.type(0)
    size, slopes_at, at_once = layout.size, layout.slopes, layout.at_once
    rows_on = layout.threads // 32 * at_once

    @cuda.jit(device=True)
    def place_slopes(run, places, pool, stacks, first, count, sample):
        """Copy the slopes of a chunk to shared memory, zeros where there are none."""
        held = cuda.local.array(_TOGETHER, kind)
        thread = thread_index()
        own, u = thread % 32 // size, thread % 32 % size
        if own < at_once:
            number = load(places, u, _INT)
            row = thread // 32 * at_once + own
            while row < count:
                for k in range(_TOGETHER):
                    held[k] = zero
                    step = first + row + k * rows_on
                    if step < first + count and number >= 0:
                        if stacks[0] != 0:
                            address = stacks[0] + step * stacks[2]
                        else:
                            address = jacobian_at(run, step, sample)
                        held[k] = load(address, np.int64(number), zero)
                for k in range(_TOGETHER):
                    if row + k * rows_on < count:
                        put(pool, slopes_at + (row + k * rows_on) * size + u, held[k])
                row += _TOGETHER * rows_on

    return place_slopes


def _piece_multiplier(layout: Layout, dtype: np.dtype[Any]) -> Any:
    """Return the product of a piece's steps."""
    kind, real, zero, one = from_dtype(dtype), dtype.type, dtype.type(0), dtype.type(1)
    small_step, least_normal = real(SMALL[dtype][1]), real(np.finfo(dtype).tiny)
    size, groups, cols = layout.size, layout.groups, layout.cols
    column_groups, stride, pitch = layout.column_groups, layout.stride, layout.pitch
    span, room = layout.span, layout.room
    columns_first, slopes_at = layout.columns, layout.slopes
    tile_size = ROWS * cols
    multiply_tile = tile_multiplier(dtype, size, groups, cols, pitch)
    local_group, local_column = layout.local
    find_peaks = peak_finder(dtype, cols, local_column)
    rescale = rescaler(dtype, groups, cols, stride, pitch, local_column, True)

    @cuda.jit(device=True)
    def multiply_piece(
        run, pool, powers, leasts, stacks, first, start, stop, piece, steps, sample, least_weight
    ):
        """Make the product of a team's steps; return whether the linear scan has to decide."""
        tile = cuda.local.array(tile_size, kind)
        peaks = cuda.local.array(cols, kind)
        added = cuda.local.array(ROWS, kind)
        own = cuda.local.array(ROWS, kind)
        thread = thread_index()
        team, lane = thread // stride, thread % stride
        row, mine = lane % groups, lane // groups
        present = start < stop
        busy = present and mine < column_groups
        owner = busy and mine == local_group
        columns_at = columns_first + team * room + mine * cols * pitch
        slopes_now = slopes_at + (start - first) * size
        local, lost = local_at(run, min(start + 1, steps)), False
        if present:
            for c in range(lane, size, stride):
                slope = get(pool, slopes_now + c)
                put(pool, columns_first + team * room + c * pitch + c, slope)
                lost = lost | ((abs(slope) > zero) & (abs(slope) * least_weight < least_normal))
        barrier(True)

        for n_steps in range(1, piece + 1):
            step = start + n_steps
            going, more = busy and step <= stop, step < stop
            outside, step_least = False, one
            if going:
                for r in range(ROWS):
                    added[r], own[r] = zero, one
                    if (r + 1) * groups <= size or row + r * groups < size:
                        if owner and local != 0:
                            added[r] = load(local, sample * size + row + r * groups, zero)
                        if more:
                            # Columns are stored as the next step multiplies them.
                            own[r] = get(pool, slopes_now + n_steps * size + row + r * groups)
                            size_of = abs(own[r])
                            weighted = size_of * least_weight
                            lost = lost | ((size_of > zero) & (weighted < least_normal))
                            outside = outside | ((size_of > zero) & (weighted < small_step))
                            step_least = smaller(step_least, weighted)
                local = local_after(run, stacks, local, step + 1, steps)
                multiply_tile(pool, row * pitch, columns_at, tile)
                for r in range(ROWS):
                    tile[local_column * ROWS + r] += added[r]
                outside = outside | find_peaks(tile, peaks, owner)
            if vote(outside, True):
                threads_of = row, thread, team * stride, going, owner
                columns_of = pool, columns_at, powers, team * span + mine * cols
                rescale(run, columns_of, leasts, tile, peaks, threads_of, step_least)
            if going:
                for n in range(cols):
                    for r in range(ROWS):
                        entry = tile[n * ROWS + r] * own[r]
                        put(pool, columns_at + n * pitch + row + r * groups, entry)
            barrier(True)

        poison = zero
        if busy:
            for n in range(cols):
                if mine * cols + n <= size:
                    for r in range(ROWS):
                        poison += tile[n * ROWS + r] * zero
        return lost | (poison != zero)

    return multiply_piece


def _piece_sweeper(layout: Layout, dtype: np.dtype[Any]) -> Any:
    """Return the sweep through a piece from its first gradient."""
    kind, zero = from_dtype(dtype), dtype.type(0)
    size, vector, stride, pitch = layout.size, layout.vector, layout.stride, layout.pitch
    room, padded, columns_first = layout.room, layout.padded, layout.columns
    starts_at, slopes_at = layout.starts, layout.slopes
    # Rows of a gradient that a thread makes.
    own_rows = -(-size // stride)
    sums_size, added_size = own_rows * vector, _AHEAD * own_rows

    @cuda.jit(device=True)
    def sweep_piece(run, pool, stacks, first, start, stop, piece, steps, sample):
        """Make the gradients of a piece in the place of its slopes; return whether one is bad."""
        left = cuda.local.array(vector, kind)
        right = cuda.local.array(vector, kind)
        sums = cuda.local.array(sums_size, kind)
        entries = cuda.local.array(own_rows, kind)
        added = cuda.local.array(added_size, kind)
        team, lane = thread_index() // stride, thread_index() % stride
        # Two places for what the weights multiply, by turns.
        now = columns_first + team * room
        then = now + pitch
        local, poison = local_at(run, min(start + 1, steps)), zero
        for m in range(lane, 2 * pitch, stride):
            put(pool, now + m, zero)
        for r in range(own_rows):
            entries[r] = zero
            if lane + r * stride < size:
                entries[r] = get(pool, starts_at + team * pitch + lane + r * stride)
        for d in range(_AHEAD):
            for r in range(own_rows):
                added[d * own_rows + r] = zero
                if local != 0 and start + d < stop and lane + r * stride < size:
                    added[d * own_rows + r] = load(local, sample * size + lane + r * stride, zero)
            local = local_after(run, stacks, local, start + d + 2, steps)
        for begin in range(0, piece, _AHEAD):
            for d in range(_AHEAD):
                step = start + begin + d
                slopes_now = slopes_at + (step - first) * size + lane
                if step < stop:
                    for r in range(own_rows):
                        if (r + 1) * stride <= size or lane + r * stride < size:
                            slope = get(pool, slopes_now + r * stride)
                            put(pool, now + lane + r * stride, slope * entries[r])
                barrier(True)
                if step < stop:
                    for m in range(sums_size):
                        sums[m] = zero
                    for k in range(0, padded, vector):
                        read_vector(right, 0, pool, now + k)
                        # As `while`, for the same reason as in `tile_multiplier`.
                        r = 0
                        while r < own_rows:
                            # There is no row behind the last: the first one stands for it.
                            at = lane + r * stride if lane + r * stride < size else int64(0)
                            read_vector(left, 0, pool, at * pitch + k)
                            for v in range(vector):
                                sums[r * vector + v] += left[v] * right[v]
                            r += 1
                    for r in range(own_rows):
                        entry = added[d * own_rows + r]
                        if vector == 4:
                            entry += sums[r * vector + 2] + sums[r * vector + 3]
                        entry += sums[r * vector] + sums[r * vector + 1]
                        entries[r] = entry
                        added[d * own_rows + r] = zero
                        if (r + 1) * stride <= size or lane + r * stride < size:
                            put(pool, slopes_now + r * stride, entry)
                            poison += entry * zero
                            if local != 0 and step + _AHEAD < stop:
                                added[d * own_rows + r] = load(
                                    local, sample * size + lane + r * stride, zero
                                )
                    local = local_after(run, stacks, local, step + _AHEAD + 2, steps)
                now, then = then, now
        return poison != zero

    return sweep_piece
