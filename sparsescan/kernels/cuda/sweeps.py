"""Sweeps of a gradient through many small steps, by one block for each sample.

Only the gradient depends on the step before. It stays in shared memory; all else is loaded ahead:
values and indices of a step into registers while the block makes the one before, rows of the table
of steps and addresses some steps earlier, and then the values into the L2 cache. Indices are not
loaded again where the next step has the same. A step has two barriers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import from_dtype, int32, int64

from ...arrays.cuda import SIMULATED, cuda
from ..cpu.tables import Kind
from .device import load, prefetch, store
from .nodes import WORD, dtypes_of, raise_flag, unit_and_sample
from .tables import Plan, Run, Sweep, Unit, jacobian_at, local_at
from .vectors import block_size, exchange, get, put, quotient, thread_index

# Threads of a block at most; entries of a step, and rows and columns, for each of them at most; and
# threads that add up a row.
THREADS, STAGED, ROWS, LANES = (16, 8, 4, 4) if SIMULATED else (256, 8, 4, 32)
# How many steps ahead an address is loaded; and rows of the table that are kept, a power of two.
_AHEAD, _RING = 8, 16
# Behind a row of the table: where the step's values are, and its local gradient.
_VALUES, _LOCAL, _SLOT = Sweep.WIDTH, Sweep.WIDTH + 1, Sweep.WIDTH + 2


@cuda.jit(device=True)
def _slot(i):
    """Return where in the ring the row of step `i` begins."""
    return (i & (_RING - 1)) * _SLOT


@cuda.jit(device=True)
def _sum_of_lanes(total, lanes, me, scratch):
    """Return the sum over 1, 2, 4, … 32 neighbouring threads, the first of which is a multiple."""
    if lanes > 16:
        total += exchange(total, 16, me, scratch)
    if lanes > 8:
        total += exchange(total, 8, me, scratch)
    if lanes > 4:
        total += exchange(total, 4, me, scratch)
    if lanes > 2:
        total += exchange(total, 2, me, scratch)
    if lanes > 1:
        total += exchange(total, 1, me, scratch)
    return total


def _loading(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
    """Return device functions that find a step, bring it to the cache, and load it."""
    t = dtypes_of(dtype, index_dtype)
    sector, indices_sector = 32 // dtype.itemsize, 32 // index_dtype.itemsize

    @cuda.jit(device=True)
    def address_of(run, ring, slot, which, sample):
        """Return where the values of a step are, or its local gradient, or 0."""
        number = get(ring, slot + Sweep.JACOBIAN)
        if which == _VALUES:
            return jacobian_at(run, number, sample)
        at = local_at(run, number + 1)
        return at + sample * get(ring, slot + Sweep.ROWS) * t.itemsize if at != 0 else at

    @cuda.jit(device=True)
    def warm(ring, i):
        """Bring the values of step `i` to the L2 cache, and its indices if they are others."""
        slot, me, threads = _slot(i), thread_index(), block_size()
        nnz, address = get(ring, slot + Sweep.NNZ), get(ring, slot + _VALUES)
        p = me * sector
        while p < nnz:
            prefetch(address, p, t.zero)
            p += threads * sector
        indices = get(ring, slot + Sweep.INDICES)
        if indices != 0 and get(ring, slot + Sweep.OTHER) != 0:
            p = me * indices_sector
            while p < nnz:
                prefetch(indices, p, t.no_index)
                p += threads * indices_sector

    @cuda.jit(device=True)
    def fetch(ring, slot, is_other, values, columns, bounds, added):
        """Load what a thread needs of a step; indices, and where rows begin, if they are others."""
        me, threads = thread_index(), block_size()
        nnz, rows = get(ring, slot + Sweep.NNZ), get(ring, slot + Sweep.ROWS)
        cols = get(ring, slot + Sweep.COLS)
        form, address = get(ring, slot + Sweep.KIND), get(ring, slot + _VALUES)
        for k in range(STAGED):
            p = me + k * threads
            if p < nnz:
                values[k] = load(address, p, t.zero)
        if is_other:
            indices, indptr = get(ring, slot + Sweep.INDICES), get(ring, slot + Sweep.INDPTR)
            for k in range(STAGED):
                p = me + k * threads
                if p < nnz:
                    if form == Kind.CSR:
                        columns[k] = int32(load(indices, p, t.no_index))
                    elif form == Kind.DENSE:
                        columns[k] = int32(quotient(p, cols)[1])
                    else:
                        columns[k] = int32(p)
            for r in range(ROWS):
                row = me + r * threads
                if row < rows:
                    if form == Kind.CSR:
                        bounds[r] = int32(load(indptr, row, t.no_index))
                    else:
                        bounds[r] = int32(row * cols if form == Kind.DENSE else row)
        local, shift = get(ring, slot + _LOCAL), get(ring, slot + Sweep.SHIFT)
        for r in range(ROWS):
            added[r] = t.zero
            row = (me >> shift) + r * (threads >> shift)
            if local != 0 and row < rows and me & ((int64(1) << shift) - 1) == 0:
                added[r] = load(local, row, t.zero)

    return address_of, warm, fetch


@cache
def sweep_kernel(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> Any:
    """Return the kernel for values of `dtype` and index arrays of `index_dtype`.

    It takes ``(run, plan, units, batch, guarded)`` as those of :mod:`~.levels` do, but the plan's
    operations are rows of a table of steps, of which the first one is applied to the gradient that
    it says, and every other one to that which the one before it has made.
    """
    kind, t = from_dtype(dtype), dtypes_of(dtype, index_dtype)
    room, entries = ROWS * THREADS, STAGED * THREADS
    both, starts_size = 2 * room, room + 1
    ring_size, scratch_size = _RING * _SLOT, THREADS if SIMULATED else 1

    address_of, warm, fetch = _loading(dtype, index_dtype)

    @cuda.jit
    def sweep_steps(run, plan, units, batch, guarded):
        if guarded != 0 and load(run, Run.FLAG, WORD) == 0:
            return
        terms = cuda.shared.array(entries, kind)
        vectors = cuda.shared.array(both, kind)
        starts = cuda.shared.array(starts_size, int32)
        ring = cuda.shared.array(ring_size, int64)
        scratch = cuda.shared.array(scratch_size, kind)
        values, columns = cuda.local.array(STAGED, kind), cuda.local.array(STAGED, int32)
        bounds, added = cuda.local.array(ROWS, int32), cuda.local.array(ROWS, kind)
        own = cuda.local.array(ROWS, kind)
        me, threads = thread_index(), block_size()
        number, sample = unit_and_sample(batch)
        unit = units + number * Unit.WIDTH * 8
        table, out = load(plan, Plan.OPS, WORD), load(run, Run.OUT, WORD)
        first, last = load(unit, Unit.FIRST, WORD), load(unit, Unit.LAST, WORD)
        # The first rows of the table, then the addresses, then all of the first step.
        for d in range(_AHEAD + 1):
            if me < Sweep.WIDTH and first + d < last:
                put(ring, _slot(first + d) + me, load(table, (first + d) * Sweep.WIDTH + me, WORD))
        cuda.syncthreads()
        for d in range(_AHEAD):
            if _VALUES <= me < _SLOT and first + d < last:
                slot = _slot(first + d)
                put(ring, slot + me, address_of(run, ring, slot, me, sample))
        cuda.syncthreads()
        slot = _slot(first)
        cols = get(ring, slot + Sweep.COLS)
        at = out + (get(ring, slot + Sweep.BEFORE) * batch + sample * cols) * t.itemsize
        for r in range(ROWS):
            if me + r * threads < cols:
                put(vectors, me + r * threads, load(at, me + r * threads, t.zero))
        for d in range(1, _AHEAD - 1):
            if first + d < last:
                warm(ring, first + d)
        is_other = True
        fetch(ring, slot, is_other, values, columns, bounds, added)
        cuda.syncthreads()

        now, then = int64(0), int64(room)
        poison, word, i = t.zero, WORD, first
        while i < last:
            slot = _slot(i)
            if i > first:
                # The step before has loaded these.
                if me < Sweep.WIDTH:
                    put(ring, _slot(i + _AHEAD) + me, word)
                elif me < _SLOT:
                    put(ring, _slot(i + _AHEAD - 1) + me, word)
            nnz, rows = get(ring, slot + Sweep.NNZ), get(ring, slot + Sweep.ROWS)
            for k in range(STAGED):
                p = me + k * threads
                if p < nnz:
                    put(terms, p, values[k] * get(vectors, now + int64(columns[k])))
            if is_other:
                for r in range(ROWS):
                    if me + r * threads < rows:
                        put(starts, me + r * threads, bounds[r])
                if me == 0:
                    put(starts, rows, int32(nnz))
            for r in range(ROWS):
                own[r] = added[r]
            if i + 1 < last:
                after = _slot(i + 1)
                is_other = get(ring, after + Sweep.OTHER) != 0
                fetch(ring, after, is_other, values, columns, bounds, added)
            cuda.syncthreads()
            if me < Sweep.WIDTH:
                if i + _AHEAD + 1 < last:
                    word = load(table, (i + _AHEAD + 1) * Sweep.WIDTH + me, WORD)
            elif me < _SLOT and i + _AHEAD < last:
                word = address_of(run, ring, _slot(i + _AHEAD), me, sample)
            if i + _AHEAD - 1 < last:
                warm(ring, i + _AHEAD - 1)
            at = out + (get(ring, slot + Sweep.AFTER) * batch + sample * rows) * t.itemsize
            shift = get(ring, slot + Sweep.SHIFT)
            lanes = int64(1) << shift
            lane = me & (lanes - 1)
            for r in range(ROWS):
                row, total = (me >> shift) + r * (threads >> shift), t.zero
                if row < rows:
                    p, stop = int64(get(starts, row)) + lane, int64(get(starts, row + 1))
                    while p < stop:
                        total += get(terms, p)
                        p += lanes
                if r == 0:
                    # Several lanes for each row only if there are threads for all rows.
                    total = _sum_of_lanes(total, lanes, me, scratch)
                if lane == 0 and row < rows:
                    total += own[r]
                    put(vectors, then + row, total)
                    store(at, row, total, t.zero)
                    poison += total * t.zero
            cuda.syncthreads()
            now, then = then, now
            i += 1
        if poison != 0:
            raise_flag(run)

    return sweep_steps
