"""Products of a node with a vector, by one block."""

from __future__ import annotations

import math

from numba import int32, int64

from ...arrays.cuda import SIMULATED, cuda
from ..cpu.tables import Kind, Op
from .device import exponent_of, load, prefetch, scale, store
from .nodes import (
    INT,
    WORD,
    gradient_at,
    index_at,
    local_of,
    matrix_at,
    raise_flag,
    row_start,
    scaled_by,
    values_of,
)
from .scaling import NONE
from .tables import Node, Plan
from .vectors import block_size, get, put, thread_index

# Entries of a tile.
STAGE = 4 if SIMULATED else 1024


@cuda.jit(device=True)
def finish(t, run, i, total, y, local, checked):
    """Store an entry of a gradient, with its local gradient added."""
    if local != 0:
        total += load(local, i, t.zero)
    store(y, i, total, t.zero)
    if checked != 0 and not math.isfinite(total):
        raise_flag(run)


@cuda.jit(device=True)
def power(t, run, m, e, x, p, j):
    """Return the exponent of ``m[p]·2^e[j]·x[j]``; one less than any for a term of zero."""
    value, entry = load(m, p, t.zero), load(x, j, t.zero)
    if not math.isfinite(entry):
        raise_flag(run)
    elif value != 0 and entry != 0:
        return exponent_of(value) + exponent_of(entry) + int64(load(e, j, INT))
    return int64(NONE)


@cuda.jit(device=True)
def term(t, m, e, x, p, j, top):
    """Return ``m[p]·2^e[j]·x[j]·2^-top``."""
    value, entry = load(m, p, t.zero), load(x, j, t.zero)
    if value == 0 or entry == 0:
        return t.zero
    own, others = exponent_of(value), exponent_of(entry)
    mantissas = scale(value, -own) * scale(entry, -others)
    return scale(mantissas, own + others + int64(load(e, j, INT)) - top)


@cuda.jit(device=True)
def matvec(t, run, node, m, e, x, y, local, first_tile, last_tile, checked, shared):
    """Make some tiles of the rows of ``y = M diag(2^e) x + local``.

    `e` and `local` may be 0. A row is summed relative to its largest term if there are
    exponents. All threads of the block take part.
    """
    stage, partial, tops = shared.columns, shared.partial, shared.tops
    me, threads = thread_index(), block_size()
    tiles, matrix = load(node, Node.TILES, WORD), matrix_at(node)
    dense = matrix.kind == Kind.DENSE
    for tile in range(first_tile, last_tile):
        first, last = load(tiles, tile, WORD), load(tiles, tile + 1, WORD)
        if matrix.kind == Kind.DIAGONAL:
            i = first + me
            while i < last:
                if e != 0:
                    top = power(t, run, m, e, x, i, i)
                    total = scale(term(t, m, e, x, i, i, top), top)
                else:
                    total = load(m, i, t.zero) * load(x, i, t.zero)
                finish(t, run, i, total, y, local, checked)
                i += threads
            continue
        # Each row gets as many lanes as there are threads for, and at least one.
        lanes, shift = int64(1), 0
        while 2 * lanes * (last - first) <= threads:
            lanes *= 2
            shift += 1
        lane = me & (lanes - 1)
        begin, end = row_start(t, matrix, first), row_start(t, matrix, last)
        staged = e == 0 and not dense and end - begin <= STAGE
        if staged:
            # Neighbouring threads read neighbouring entries, whatever the lengths of the rows.
            p = begin + me
            while p < end:
                j = index_at(t, matrix, p)
                put(stage, p - begin, load(m, p, t.zero) * load(x, j, t.zero))
                p += threads
            cuda.syncthreads()
        group = first
        while group < last:
            i = group + (me >> shift)
            start = stop = int64(0)
            if i < last:
                start, stop = row_start(t, matrix, i), row_start(t, matrix, i + 1)
            total, top, p = t.zero, int64(NONE), start + lane
            if e != 0:
                while p < stop:
                    j = p - start if dense else index_at(t, matrix, p)
                    top = max(top, power(t, run, m, e, x, p, j))
                    p += lanes
                put(tops, me, int32(top))
                cuda.syncthreads()
                half = lanes >> 1
                while half > 0:
                    if lane < half:
                        put(tops, me, max(get(tops, me), get(tops, me + half)))
                    cuda.syncthreads()
                    half >>= 1
                top, p = int64(get(tops, me - lane)), start + lane
                while p < stop:
                    j = p - start if dense else index_at(t, matrix, p)
                    total += term(t, m, e, x, p, j, top)
                    p += lanes
            elif staged:
                while p < stop:
                    total += get(stage, p - begin)
                    p += lanes
            else:
                while p < stop:
                    j = p - start if dense else index_at(t, matrix, p)
                    total += load(m, p, t.zero) * load(x, j, t.zero)
                    p += lanes
            put(partial, me, total)
            cuda.syncthreads()
            half = lanes >> 1
            while half > 0:
                if lane < half:
                    put(partial, me, get(partial, me) + get(partial, me + half))
                cuda.syncthreads()
                half >>= 1
            if lane == 0 and i < last:
                total = get(partial, me)
                if total != 0 and e != 0:
                    total = scale(total, top)
                finish(t, run, i, total, y, local, checked)
            # No other thread reads that place, and all pass a barrier before they use others.
            group += threads >> shift


@cuda.jit(device=True)
def warm(t, run, plan, op, sample, start, stop):
    """Bring the values of some tiles of the matrix that an operation applies to the L2 cache."""
    node = load(plan, Plan.NODES, WORD) + load(op, Op.RIGHT, WORD) * Node.WIDTH * 8
    tiles, matrix = load(node, Node.TILES, WORD), matrix_at(node)
    address, sector = values_of(run, plan, node, int64(0), sample), 32 // t.itemsize
    begin = row_start(t, matrix, load(tiles, start, WORD))
    end = row_start(t, matrix, load(tiles, stop, WORD))
    # From the sector on in which the first one is.
    p = begin - ((address // t.itemsize + begin) & (sector - 1)) + thread_index() * sector
    while p < end:
        prefetch(address, p, t.zero)
        p += block_size() * sector


@cuda.jit(device=True)
def vector_operation(t, run, plan, op, part, sample, start, stop, shared):
    """Make the tiles of one gradient from `start` on, and before `stop`."""
    node = load(plan, Plan.NODES, WORD) + load(op, Op.RIGHT, WORD) * Node.WIDTH * 8
    matvec(
        t,
        run,
        node,
        values_of(run, plan, node, part, sample),
        scaled_by(plan, node, part, sample),
        gradient_at(t, run, plan, load(op, Op.LEFT, WORD), sample),
        gradient_at(t, run, plan, load(op, Op.OUT, WORD), sample),
        local_of(t, run, plan, node, part, sample),
        start,
        min(stop, load(node, Node.TILE_COUNT, WORD)),
        int64(1),
        shared,
    )
