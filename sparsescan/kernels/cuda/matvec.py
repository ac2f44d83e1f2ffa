"""Products of a node with a vector, by one block."""

from __future__ import annotations

import math

from numba import int64

from ...arrays.cuda import SIMULATED, cuda
from ..cpu.tables import Kind, Op
from .device import exponent_of, load, scale, store
from .nodes import (
    INT,
    WORD,
    column,
    gradient_at,
    local_of,
    raise_flag,
    row_start,
    scaled_by,
    values_of,
)
from .scaling import NONE
from .tables import Node, Plan

__all__ = ["STAGE", "finish", "matvec", "vector_operation"]

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
    me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
    tiles = load(node, Node.TILES, WORD)
    diagonal = load(node, Node.KIND, WORD) == Kind.DIAGONAL
    dense = load(node, Node.KIND, WORD) == Kind.DENSE
    for tile in range(first_tile, last_tile):
        first, last = load(tiles, tile, WORD), load(tiles, tile + 1, WORD)
        if diagonal:
            for i in range(first + me, last, threads):
                if e != 0:
                    top = power(t, run, m, e, x, i, i)
                    total = scale(term(t, m, e, x, i, i, top), top)
                else:
                    total = load(m, i, t.zero) * load(x, i, t.zero)
                finish(t, run, i, total, y, local, checked)
            continue
        # Each row gets as many lanes as there are threads for, and at least one.
        lanes = int64(1)
        while 2 * lanes * (last - first) <= threads:
            lanes *= 2
        lane = me % lanes
        begin, end = row_start(t, node, first), row_start(t, node, last)
        staged = e == 0 and not dense and end - begin <= STAGE
        if staged:
            # Neighbouring threads read neighbouring entries, whatever the lengths of the rows.
            for p in range(begin + me, end, threads):
                stage[p - begin] = load(m, p, t.zero) * load(x, column(t, node, p), t.zero)
            cuda.syncthreads()
        for group in range(first, last, threads // lanes):
            i = group + me // lanes
            start = stop = int64(0)
            if i < last:
                start, stop = row_start(t, node, i), row_start(t, node, i + 1)
            total, top = t.zero, int64(NONE)
            if e != 0:
                for p in range(start + lane, stop, lanes):
                    top = max(top, power(t, run, m, e, x, p, column(t, node, p)))
                tops[me] = top
                cuda.syncthreads()
                half = lanes // 2
                while half > 0:
                    if lane < half:
                        tops[me] = max(tops[me], tops[me + half])
                    cuda.syncthreads()
                    half //= 2
                top = int64(tops[me - lane])
                for p in range(start + lane, stop, lanes):
                    total += term(t, m, e, x, p, column(t, node, p), top)
            elif staged:
                for p in range(start + lane, stop, lanes):
                    total += stage[p - begin]
            elif dense:
                for j in range(lane, stop - start, lanes):
                    total += load(m, start + j, t.zero) * load(x, j, t.zero)
            else:
                for p in range(start + lane, stop, lanes):
                    total += load(m, p, t.zero) * load(x, column(t, node, p), t.zero)
            partial[me] = total
            cuda.syncthreads()
            half = lanes // 2
            while half > 0:
                if lane < half:
                    partial[me] += partial[me + half]
                cuda.syncthreads()
                half //= 2
            if lane == 0 and i < last:
                total = partial[me]
                if total != 0 and e != 0:
                    total = scale(total, top)
                finish(t, run, i, total, y, local, checked)
            cuda.syncthreads()


@cuda.jit(device=True)
def vector_operation(t, run, plan, op, part, sample, block, blocks, shared):
    """Make a part of the rows of one gradient."""
    node = load(plan, Plan.NODES, WORD) + load(op, Op.RIGHT, WORD) * Node.WIDTH * 8
    count = load(node, Node.TILE_COUNT, WORD)
    matvec(
        t,
        run,
        node,
        values_of(run, plan, node, part, sample),
        scaled_by(plan, node, part, sample),
        gradient_at(t, run, plan, load(op, Op.LEFT, WORD), sample),
        gradient_at(t, run, plan, load(op, Op.OUT, WORD), sample),
        local_of(t, run, plan, node, part, sample),
        count * block // blocks,
        count * (block + 1) // blocks,
        int64(1),
        shared,
    )
