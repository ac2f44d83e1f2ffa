"""The CUDA engine: one launch runs a level of a plan.

A block works on one *unit* for one sample: the operations of a run, one after the other; or a part
of the rows of one operation, if the run has no other. As on the CPU a product of Jacobians is
``M·diag(2^e)``, plain while all its entries are in a band (:mod:`sparsescan.kernels.cpu`). What
leaves the band is found by the blocks that multiply, and brought back by the last of them to
finish: it is rare, and no launch is spent on it. A value that is not finite raises a flag, upon
which a last launch lets the linear scan decide what it reaches.

Rows of unequal length are balanced by *tiles* (Greathouse and Daga, SC 2014, CSR-Adaptive): rows
with about as many entries in all as a block has room for, or one long row. A row of a product is
added up in shared memory, a column a place, one row of the other operand after the other: so no sum
depends on timing, and no float is added atomically.

A kernel gets addresses and sizes only: see :mod:`sparsescan.kernels.cuda_tables`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int32, int64

from ._device import SIMULATED, atomic_add, atomic_max, cuda, exponent_of, load, scale, store
from .cpu import BAND, Kind, Op, Store
from .cuda_tables import Book, Mode, Node, Run, Unit, jacobian_at, local_at

__all__ = ["STAGE", "THREADS", "LevelKernels", "level_kernels"]

# Threads of a block at most, entries of a tile, and bytes of columns that a row is added up in.
# Small in the simulator, so that small matrices have several tiles.
THREADS, STAGE, _TILE_BYTES = (8, 4, 32) if SIMULATED else (256, 1024, 16384)

# Rows that are read ahead of being added up.
_AHEAD = 4

# How the range of some values is; the worst counts.
_IN_BAND, _OUT_OF_BAND, _NOT_FINITE = 0, 1, 2

# The flag behind the exponents of a product: none; each column its own; all columns one; each its
# own, and a column has entries below the band.
_UNSCALED, _EACH, _ALL, _WIDE = 0, 1, 2, 3

# Less than any exponent, and more.
_NONE, _WIDTH = -(1 << 30), 1 << 30
# Columns whose largest entries are no more powers of two apart are given one exponent.
_APART = 30
_WORD, _INT = np.int64(0), np.int32(0)


class LevelKernels(NamedTuple):
    """Compiled for one dtype of values and one of indices.

    Both take ``(run, book, units, batch, guarded)``, the first three addresses; block ``unit·batch
    + sample`` works on that unit for that sample.

    Attributes
    ----------
    vectors : callable
        Units of matrix-vector products only; with `guarded`, only if the flag is raised.
    level : callable
        Any units.
    """

    vectors: Any
    level: Any


@cache
def level_kernels(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> LevelKernels:
    """The kernels for values of `dtype` and index arrays of `index_dtype`."""
    kind, index_kind = from_dtype(dtype), from_dtype(index_dtype)
    zero, no_index = dtype.type(0), index_dtype.type(0)
    itemsize = dtype.itemsize
    tile_size = _TILE_BYTES // itemsize
    high_exponent, low_exponent, target, normal, negligible = (int(v) for v in BAND[dtype][3:])
    high, low = dtype.type(2.0**high_exponent), dtype.type(2.0**low_exponent)

    # -- Tables ---------------------------------------------------------------------------------

    @cuda.jit(device=True)
    def row_start(node, i):
        """First entry of row `i`."""
        kind = load(node, Node.KIND, _WORD)
        if kind == Kind.DENSE:
            return i * load(node, Node.COLS, _WORD)
        if kind == Kind.DIAGONAL:
            return i
        return int64(load(load(node, Node.INDPTR, _WORD), i, no_index))

    @cuda.jit(device=True)
    def column(node, p):
        """Column of entry `p`."""
        kind = load(node, Node.KIND, _WORD)
        if kind == Kind.DENSE:
            return p % load(node, Node.COLS, _WORD)
        if kind == Kind.DIAGONAL:
            return p
        return int64(load(load(node, Node.INDICES, _WORD), p, no_index))

    @cuda.jit(device=True)
    def lower_bound(array, first, last, value):
        """Where `value` would stand among sorted indices ``array[first:last]``."""
        while first < last:
            middle = (first + last) // 2
            if int64(load(array, middle, no_index)) < value:
                first = middle + 1
            else:
                last = middle
        return first

    @cuda.jit(device=True)
    def row_of(node, p):
        """Row of entry `p`."""
        kind = load(node, Node.KIND, _WORD)
        if kind == Kind.DENSE:
            return p // load(node, Node.COLS, _WORD)
        if kind == Kind.DIAGONAL:
            return p
        rows = load(node, Node.ROWS, _WORD)
        return lower_bound(load(node, Node.INDPTR, _WORD), int64(0), rows + 1, p + 1) - 1

    @cuda.jit(device=True)
    def seat(node, book, part, sample):
        """Which of the products of its node: by sample in the pool, in scratch by run as well."""
        if load(node, Node.STORE, _WORD) == Store.SCRATCH:
            return part * load(book, Book.BATCH, _WORD) + sample
        return sample

    @cuda.jit(device=True)
    def values_of(run, book, node, part, sample):
        """Address of the values of a node."""
        first = load(node, Node.VALUES, _WORD)
        if load(node, Node.STORE, _WORD) == Store.CALLER:
            return jacobian_at(run, first, sample)
        own = sample * load(node, Node.BATCHED, _WORD)
        return first + seat(node, book, part, own) * load(node, Node.VALUES_STEP, _WORD)

    @cuda.jit(device=True)
    def exponents_of(book, node, part, sample):
        """Address of the exponents of a product."""
        own = sample * load(node, Node.BATCHED, _WORD)
        at = seat(node, book, part, own) * load(node, Node.EXPONENTS_STEP, _WORD)
        return load(node, Node.EXPONENTS, _WORD) + at

    @cuda.jit(device=True)
    def scaled_by(book, node, part, sample):
        """The same if there are any, for any node; else 0."""
        if load(node, Node.STORE, _WORD) == Store.CALLER:
            return int64(0)
        at = exponents_of(book, node, part, sample)
        return at if load(at, load(node, Node.COLS, _WORD), _INT) != 0 else int64(0)

    @cuda.jit(device=True)
    def local_of(run, book, node, part, sample):
        """Address of what the local gradients of a node add up to, or 0."""
        if load(book, Book.LOCAL, _WORD) == 0:
            return int64(0)
        rows = load(node, Node.ROWS, _WORD)
        if load(node, Node.STORE, _WORD) == Store.CALLER:
            at = local_at(run, load(node, Node.VALUES, _WORD) + 1)
            return at + sample * rows * itemsize if at != 0 else at
        at = load(node, Node.LOCAL, _WORD)
        return at + seat(node, book, part, sample) * load(node, Node.LOCAL_STEP, _WORD)

    @cuda.jit(device=True)
    def gradient_at(run, book, k, sample):
        """Address of gradient `k`."""
        offsets = load(book, Book.OFFSETS, _WORD)
        first, last = load(offsets, k, _WORD), load(offsets, k + 1, _WORD)
        place = first * load(book, Book.BATCH, _WORD) + sample * (last - first)
        return load(run, Run.OUT, _WORD) + place * itemsize

    @cuda.jit(device=True)
    def raise_flag(run):
        store(run, Run.FLAG, int64(1), _WORD)

    # -- Matrix-vector products -----------------------------------------------------------------

    @cuda.jit(device=True)
    def finish(run, i, total, y, local, checked):
        """Store an entry of a gradient, with what is added to it."""
        if local != 0:
            total += load(local, i, zero)
        store(y, i, total, zero)
        if checked != 0 and not math.isfinite(total):
            raise_flag(run)

    @cuda.jit(device=True)
    def power(run, m, e, x, p, j):
        """Exponent of ``m[p]·2^e[j]·x[j]``, or less than any."""
        value, entry = load(m, p, zero), load(x, j, zero)
        if not math.isfinite(entry):
            raise_flag(run)
        elif value != 0 and entry != 0:
            return exponent_of(value) + exponent_of(entry) + int64(load(e, j, _INT))
        return int64(_NONE)

    @cuda.jit(device=True)
    def term(m, e, x, p, j, top):
        """``m[p]·2^e[j]·x[j]·2^-top``."""
        value, entry = load(m, p, zero), load(x, j, zero)
        if value == 0 or entry == 0:
            return zero
        own, others = exponent_of(value), exponent_of(entry)
        mantissas = scale(value, -own) * scale(entry, -others)
        return scale(mantissas, own + others + int64(load(e, j, _INT)) - top)

    @cuda.jit(device=True)
    def matvec(run, node, m, e, x, y, local, first_tile, last_tile, checked, shared):
        """Some tiles of the rows of ``y = M diag(2^e) x + local``.

        `e` and `local` may be 0. A row is summed relative to its largest term if there are
        exponents. All threads of the block take part.
        """
        stage, partial, tops = shared
        me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        tiles = load(node, Node.TILES, _WORD)
        diagonal = load(node, Node.KIND, _WORD) == Kind.DIAGONAL
        dense = load(node, Node.KIND, _WORD) == Kind.DENSE
        for tile in range(first_tile, last_tile):
            first, last = load(tiles, tile, _WORD), load(tiles, tile + 1, _WORD)
            if diagonal:
                for i in range(first + me, last, threads):
                    if e != 0:
                        top = power(run, m, e, x, i, i)
                        total = scale(term(m, e, x, i, i, top), top)
                    else:
                        total = load(m, i, zero) * load(x, i, zero)
                    finish(run, i, total, y, local, checked)
                continue
            # As many lanes a row as there are threads for, and a row a thread if there are too few.
            lanes = int64(1)
            while 2 * lanes * (last - first) <= threads:
                lanes *= 2
            lane = me % lanes
            begin, end = row_start(node, first), row_start(node, last)
            staged = e == 0 and not dense and end - begin <= STAGE
            if staged:
                # Neighbouring threads read neighbouring entries, whatever the lengths of the rows.
                for p in range(begin + me, end, threads):
                    stage[p - begin] = load(m, p, zero) * load(x, column(node, p), zero)
                cuda.syncthreads()
            for group in range(first, last, threads // lanes):
                i = group + me // lanes
                start = stop = int64(0)
                if i < last:
                    start, stop = row_start(node, i), row_start(node, i + 1)
                total, top = zero, int64(_NONE)
                if e != 0:
                    for p in range(start + lane, stop, lanes):
                        top = max(top, power(run, m, e, x, p, column(node, p)))
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
                        total += term(m, e, x, p, column(node, p), top)
                elif staged:
                    for p in range(start + lane, stop, lanes):
                        total += stage[p - begin]
                elif dense:
                    for j in range(lane, stop - start, lanes):
                        total += load(m, start + j, zero) * load(x, j, zero)
                else:
                    for p in range(start + lane, stop, lanes):
                        total += load(m, p, zero) * load(x, column(node, p), zero)
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
                    finish(run, i, total, y, local, checked)
                cuda.syncthreads()

    @cuda.jit(device=True)
    def vector_operation(run, book, op, part, sample, block, blocks, shared):
        """A part of the rows of one gradient."""
        node = load(book, Book.NODES, _WORD) + load(op, Op.RIGHT, _WORD) * Node.WIDTH * 8
        count = load(node, Node.TILE_COUNT, _WORD)
        matvec(
            run,
            node,
            values_of(run, book, node, part, sample),
            scaled_by(book, node, part, sample),
            gradient_at(run, book, load(op, Op.LEFT, _WORD), sample),
            gradient_at(run, book, load(op, Op.OUT, _WORD), sample),
            local_of(run, book, node, part, sample),
            count * block // blocks,
            count * (block + 1) // blocks,
            int64(1),
            shared,
        )

    # -- Range ----------------------------------------------------------------------------------

    @cuda.jit(device=True)
    def range_of(value):
        size = abs(value)
        if value == 0 or low <= size <= high:
            return _IN_BAND
        return _OUT_OF_BAND if math.isfinite(value) else _NOT_FINITE

    @cuda.jit(device=True)
    def check_bits(run, exponent, by):
        """Raise the flag if an entry that a gradient may show is no normal number times 2^-by."""
        if exponent - by < normal and exponent > negligible:
            raise_flag(run)

    @cuda.jit(device=True)
    def normalise(run, node, c, e, span):
        """Bring every column with an entry outside the band to the target, and note it in `e`.

        All columns by one power of two, if that will do: what a product is multiplied by then needs
        no more care. `span`, two integers of shared memory, are less than any exponent.
        """
        me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        nnz, cols = load(node, Node.NNZ, _WORD), load(node, Node.COLS, _WORD)
        # After the exponents and their flag: the largest exponent of each column, and minus the
        # smallest.
        highs, lows = e + 4 * (cols + 1), e + 4 * (2 * cols + 1)
        for j in range(me, cols, threads):
            store(highs, j, int32(_NONE), _INT)
            store(lows, j, int32(_NONE), _INT)
        cuda.syncthreads()
        for p in range(me, nnz, threads):
            value = load(c, p, zero)
            if value != 0:
                j, own = column(node, p), exponent_of(value)
                atomic_max(highs, j, int32(own))
                atomic_max(lows, j, int32(-own))
        cuda.syncthreads()
        for j in range(me, cols, threads):
            cuda.atomic.max(span, 0, load(highs, j, _INT))
            cuda.atomic.max(span, 1, load(lows, j, _INT))
        flag = load(e, cols, _INT)
        cuda.syncthreads()
        top, bottom = int64(span[0]), -int64(span[1])
        if top == _NONE:
            return
        together = flag != _EACH and bottom - (top - target) >= low_exponent
        for j in range(me, cols, threads):
            largest, smallest = int64(load(highs, j, _INT)), -int64(load(lows, j, _INT))
            shift = int64(0)
            if together:
                shift = top - target
            elif largest != _NONE and (largest > high_exponent or smallest < low_exponent):
                shift = largest - target
                if smallest - shift < low_exponent:
                    cuda.atomic.max(span, 0, int32(_WIDTH))
            store(e, j, int32(load(e, j, _INT) + shift), _INT)
            store(highs, j, int32(shift), _INT)
        cuda.syncthreads()
        if me == 0:
            flag = _ALL if together else _EACH
            store(e, cols, int32(_WIDE if span[0] == _WIDTH else flag), _INT)
        for p in range(me, nnz, threads):
            j = column(node, p)
            shift, value = int64(load(highs, j, _INT)), load(c, p, zero)
            if shift != 0 and value != 0:
                by = int64(load(e, j, _INT))
                check_bits(run, exponent_of(value) + by - shift, by)
                store(c, p, scale(value, -shift), zero)

    @cuda.jit(device=True)
    def entry_of(node, k, j):
        """Entry ``(k, j)`` of a node, or -1."""
        start, stop = row_start(node, k), row_start(node, k + 1)
        kind = load(node, Node.KIND, _WORD)
        if kind == Kind.DENSE:
            return start + j
        if kind == Kind.DIAGONAL:
            return start if k == j else int64(-1)
        indices = load(node, Node.INDICES, _WORD)
        p = lower_bound(indices, start, stop, j)
        if p < stop and int64(load(indices, p, no_index)) == j:
            return p
        return int64(-1)

    @cuda.jit(device=True)
    def multiply_scaled(run, a_node, a, a_e, x_node, x, x_e, c_node, c, e, span):
        """``C diag(2^e) = A diag(2^a_e) X diag(2^x_e)`` for operands of any range, by one block.

        An entry is summed relative to its largest term.
        `span` is as for `normalise`, and again so afterwards.
        """
        me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        inner, cols = load(a_node, Node.COLS, _WORD), load(c_node, Node.COLS, _WORD)
        # The largest exponent of every column of A, and of every column of what it is applied to
        # when those are taken out of A.
        tops, powers = e + 4 * (cols + 1), e + 4 * (3 * cols + 1)
        for k in range(me, inner, threads):
            store(powers, k, int32(_NONE), _INT)
        for j in range(me, cols, threads):
            store(tops, j, int32(_NONE), _INT)
        cuda.syncthreads()
        for p in range(me, load(a_node, Node.NNZ, _WORD), threads):
            value = load(a, p, zero)
            if value != 0:
                k = column(a_node, p)
                own = exponent_of(value)
                if a_e != 0:
                    own += int64(load(a_e, k, _INT))
                atomic_max(powers, k, int32(own))
        cuda.syncthreads()
        for q in range(me, load(x_node, Node.NNZ, _WORD), threads):
            value = load(x, q, zero)
            if value != 0:
                by = int64(load(powers, row_of(x_node, q), _INT))
                if by != _NONE:
                    atomic_max(tops, column(x_node, q), int32(exponent_of(value) + by))
        cuda.syncthreads()
        for j in range(me, cols, threads):
            own = load(tops, j, _INT)
            if own != _NONE:
                cuda.atomic.max(span, 0, own)
                cuda.atomic.max(span, 1, -own)
        cuda.syncthreads()
        highest, together = int64(span[0]), int64(span[0]) + int64(span[1]) <= _APART
        cuda.syncthreads()
        for j in range(me, cols, threads):
            own = highest if together else int64(load(tops, j, _INT))
            if own != _NONE:
                own -= target
                store(tops, j, int32(own), _INT)
                if x_e != 0:
                    own += int64(load(x_e, j, _INT))
            else:
                own = int64(0)
            store(e, j, int32(own), _INT)
        if me == 0:
            one = together and (x_e == 0 or load(x_e, cols, _INT) == _ALL)
            store(e, cols, int32(_ALL if one else _EACH), _INT)
            span[0] = span[1] = _NONE
        cuda.syncthreads()
        for q in range(me, load(c_node, Node.NNZ, _WORD), threads):
            i, j = row_of(c_node, q), column(c_node, q)
            by, total, top = int64(load(tops, j, _INT)), zero, int64(_NONE)
            for summing in range(2):
                for p in range(row_start(a_node, i), row_start(a_node, i + 1)):
                    k = column(a_node, p)
                    r = entry_of(x_node, k, j)
                    if r >= 0:
                        value, entry = load(a, p, zero), load(x, r, zero)
                        if value != 0 and entry != 0:
                            own, others = exponent_of(value), exponent_of(entry)
                            power = own + others
                            if a_e != 0:
                                power += int64(load(a_e, k, _INT))
                            if summing == 0:
                                top = max(top, power)
                            else:
                                mantissas = scale(value, -own) * scale(entry, -others)
                                total += scale(mantissas, power - top)
            if total != 0:
                top += exponent_of(total)
                check_bits(run, top + int64(load(e, j, _INT)) - by, int64(load(e, j, _INT)))
                total = scale(total, top - exponent_of(total) - by)
            store(c, q, total, zero)
        cuda.syncthreads()

    # -- Matrix-matrix products -----------------------------------------------------------------

    @cuda.jit(device=True)
    def balanced_row(node, block, blocks):
        """First row of one of `blocks` parts with about the same number of entries each."""
        rows = load(node, Node.ROWS, _WORD)
        if block == blocks:
            return rows
        if load(node, Node.KIND, _WORD) != Kind.CSR:
            return rows * block // blocks
        wanted = load(node, Node.NNZ, _WORD) * block // blocks
        return lower_bound(load(node, Node.INDPTR, _WORD), int64(0), rows, wanted)

    @cuda.jit(device=True)
    def multiply_dense(a_node, a, x, c_node, c, first, last):
        """Rows of ``C = A X`` for dense `X`, a thread for each entry; how their range is."""
        me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        cols = load(c_node, Node.COLS, _WORD)
        dense = load(a_node, Node.KIND, _WORD) == Kind.DENSE
        found = _IN_BAND
        # Entry after entry of the rows, `threads` apart, without a division.
        i, j = first + me // cols, me % cols
        rows_on, cols_on = threads // cols, threads % cols
        while i < last:
            # Of an empty row of A there is one of zeros, if C is stored densely.
            place = row_start(c_node, i)
            if place < row_start(c_node, i + 1):
                total = zero
                start, stop = row_start(a_node, i), row_start(a_node, i + 1)
                for p in range(start, stop):
                    k = p - start if dense else column(a_node, p)
                    total += load(a, p, zero) * load(x, k * cols + j, zero)
                store(c, place + j, total, zero)
                found = max(found, range_of(total))
            i += rows_on
            j += cols_on
            if j >= cols:
                i += 1
                j -= cols
        return found

    @cuda.jit(device=True)
    def multiply_sparse(a_node, a, x_node, x, c_node, c, first, last, total):
        """Rows of ``C = A X`` for sparse `X`, by all threads together; how their range is.

        For one entry of `A` after the other, a row of `X` is added to the columns in `total`, which
        is shared memory.
        """
        factor = cuda.shared.array(THREADS, kind)
        starts = cuda.shared.array(THREADS, index_kind)
        stops = cuda.shared.array(THREADS, index_kind)
        places = cuda.local.array(_AHEAD, int64)
        terms = cuda.local.array(_AHEAD, kind)
        me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        cols = load(c_node, Node.COLS, _WORD)
        indices = load(x_node, Node.INDICES, _WORD)
        c_indices = load(c_node, Node.INDICES, _WORD)
        c_dense = load(c_node, Node.KIND, _WORD) == Kind.DENSE
        c_diagonal = load(c_node, Node.KIND, _WORD) == Kind.DIAGONAL
        a_dense = load(a_node, Node.KIND, _WORD) == Kind.DENSE
        found = _IN_BAND
        for j in range(me, min(cols, int64(tile_size)), threads):
            total[j] = zero
        for i in range(first, last):
            start, stop = row_start(a_node, i), row_start(a_node, i + 1)
            c_start, c_stop = row_start(c_node, i), row_start(c_node, i + 1)
            for base in range(int64(0), cols, int64(tile_size)):
                beyond = base + tile_size
                for group in range(start, stop, threads):
                    cuda.syncthreads()
                    p = group + me
                    if p < stop:
                        k = p - start if a_dense else column(a_node, p)
                        q_start, q_stop = row_start(x_node, k), row_start(x_node, k + 1)
                        if cols > tile_size:
                            q_start = lower_bound(indices, q_start, q_stop, base)
                            q_stop = lower_bound(indices, q_start, q_stop, beyond)
                        factor[me] = load(a, p, zero)
                        starts[me] = q_start
                        stops[me] = q_stop
                    cuda.syncthreads()
                    count = min(threads, stop - group)
                    for n in range(int64(0), count, int64(_AHEAD)):
                        # Some rows are read before the first of them is added.
                        for ahead in range(_AHEAD):
                            places[ahead] = -1
                            if n + ahead < count:
                                q = int64(starts[n + ahead]) + me
                                if q < int64(stops[n + ahead]):
                                    places[ahead] = int64(load(indices, q, no_index)) - base
                                    terms[ahead] = factor[n + ahead] * load(x, q, zero)
                        for ahead in range(_AHEAD):
                            if n + ahead < count:
                                if places[ahead] >= 0:
                                    total[places[ahead]] += terms[ahead]
                                q_start = int64(starts[n + ahead]) + me + threads
                                for q in range(q_start, int64(stops[n + ahead]), threads):
                                    j = int64(load(indices, q, no_index)) - base
                                    total[j] += factor[n + ahead] * load(x, q, zero)
                                cuda.syncthreads()
                q_start, q_stop = c_start, c_stop
                if c_dense:
                    q_start, q_stop = c_start + base, min(c_stop, c_start + beyond)
                elif c_diagonal:
                    q_start, q_stop = max(c_start, base), min(c_stop, beyond)
                elif cols > tile_size:
                    q_start = lower_bound(c_indices, c_start, c_stop, base)
                    q_stop = lower_bound(c_indices, q_start, c_stop, beyond)
                for q in range(q_start + me, q_stop, threads):
                    j = (q - c_start if c_dense else column(c_node, q)) - base
                    value = total[j]
                    total[j] = zero
                    store(c, q, value, zero)
                    found = max(found, range_of(value))
                cuda.syncthreads()
        return found

    @cuda.jit(device=True)
    def multiply(a_node, a, x_node, x, c_node, c, first, last, total):
        """Rows of ``C = A X``, plainly; how the range of what this thread made is."""
        me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        if load(c_node, Node.NNZ, _WORD) == 0:
            return _IN_BAND
        if load(x_node, Node.KIND, _WORD) == Kind.DIAGONAL:
            found = _IN_BAND
            for p in range(row_start(a_node, first) + me, row_start(a_node, last), threads):
                value = load(a, p, zero) * load(x, column(a_node, p), zero)
                store(c, p, value, zero)
                found = max(found, range_of(value))
            return found
        if load(a_node, Node.KIND, _WORD) == Kind.DIAGONAL:
            found = _IN_BAND
            for p in range(row_start(x_node, first) + me, row_start(x_node, last), threads):
                value = load(a, row_of(x_node, p), zero) * load(x, p, zero)
                store(c, p, value, zero)
                found = max(found, range_of(value))
            return found
        if load(x_node, Node.KIND, _WORD) == Kind.DENSE:
            return multiply_dense(a_node, a, x, c_node, c, first, last)
        return multiply_sparse(a_node, a, x_node, x, c_node, c, first, last, total)

    @cuda.jit(device=True)
    def range_in(values, first, last):
        """How the range of what this thread reads of ``values[first:last]`` is."""
        found = _IN_BAND
        for p in range(first + cuda.threadIdx.x, last, cuda.blockDim.x):
            found = max(found, range_of(load(values, p, zero)))
        return found

    @cuda.jit(device=True)
    def operand_in(book, node, values, part, sample, block, blocks, later):
        """How the range of an operand is, as far as this thread sees.

        Entries of products are in the band, unless their flag says otherwise. Exponents count where
        columns meet rows: those of the `later` operand, unless they are all one.
        """
        if load(node, Node.STORE, _WORD) != Store.CALLER:
            e = scaled_by(book, node, part, sample)
            if e == 0:
                return _IN_BAND
            flag = load(e, load(node, Node.COLS, _WORD), _INT)
            return _OUT_OF_BAND if flag == _WIDE or (later and flag == _EACH) else _IN_BAND
        nnz = load(node, Node.NNZ, _WORD)
        return range_in(values, nnz * block // blocks, nnz * (block + 1) // blocks)

    @cuda.jit(device=True)
    def product_local(run, book, a_node, a, a_e, x_node, c_node, part, sample, shared):
        """Local gradients of a product, ``A·local(X) + local(A)``, of one sample."""
        me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        x = local_of(run, book, x_node, part, sample)
        y = local_of(run, book, c_node, part, sample)
        local = local_of(run, book, a_node, part, sample)
        if x != 0:
            count = load(a_node, Node.TILE_COUNT, _WORD)
            matvec(run, a_node, a, a_e, x, y, local, int64(0), count, int64(1), shared)
        else:
            for i in range(me, load(c_node, Node.ROWS, _WORD), threads):
                finish(run, i, zero, y, local, int64(1))

    @cuda.jit(device=True)
    def product(run, book, op, part, sample, block, blocks, mode, shared):
        """A part of the rows of one product; the last part to be done settles the range.

        `Mode.CHECK` only looks at the operands, `Mode.SETTLE` does all but that and multiplying.
        """
        seen = cuda.shared.array(3, int32)
        span = cuda.shared.array(2, int32)
        me = int64(cuda.threadIdx.x)
        nodes = load(book, Book.NODES, _WORD)
        x_node = nodes + load(op, Op.LEFT, _WORD) * Node.WIDTH * 8
        a_node = nodes + load(op, Op.RIGHT, _WORD) * Node.WIDTH * 8
        c_node = nodes + load(op, Op.OUT, _WORD) * Node.WIDTH * 8
        x = values_of(run, book, x_node, part, sample)
        a = values_of(run, book, a_node, part, sample)
        c = values_of(run, book, c_node, part, sample)
        # What all parts have found of the operands and of the result, and how many are done.
        state = load(c_node, Node.STATE, _WORD) + 12 * sample
        if me < 3:
            seen[me] = 0
        if me < 2:
            span[me] = _NONE
        cuda.syncthreads()
        operands = _IN_BAND
        if mode != Mode.SETTLE:
            operands = operand_in(book, x_node, x, part, sample, block, blocks, False)
            found = operand_in(book, a_node, a, part, sample, block, blocks, True)
            found = max(operands, found)
            if found != _IN_BAND:
                cuda.atomic.max(seen, 0, int32(found))
            cuda.syncthreads()
            operands = seen[0]
        if mode == Mode.CHECK:
            if me == 0:
                atomic_max(state, 0, int32(operands))
            return
        first, last = balanced_row(a_node, block, blocks), balanced_row(a_node, block + 1, blocks)
        if mode == Mode.SETTLE:
            found = range_in(c, row_start(c_node, first), row_start(c_node, last))
            if found != _IN_BAND:
                cuda.atomic.max(seen, 1, int32(found))
        elif operands == _IN_BAND:
            found = multiply(a_node, a, x_node, x, c_node, c, first, last, shared[0])
            if found != _IN_BAND:
                cuda.atomic.max(seen, 1, int32(found))
        if blocks > 1 or mode == Mode.SETTLE:
            # What this part wrote must be there for the others before it says that it is done.
            cuda.threadfence()
            cuda.syncthreads()
            if me == 0:
                atomic_max(state, 0, int32(operands))
                atomic_max(state, 1, seen[1])
                cuda.threadfence()
                seen[2] = atomic_add(state, 2, int32(1))
                if seen[2] == blocks - 1:
                    cuda.threadfence()
                    seen[0] = atomic_max(state, 0, int32(0))
                    seen[1] = atomic_max(state, 1, int32(0))
                    for i in range(3):
                        store(state, i, int32(0), _INT)
            cuda.syncthreads()
            if seen[2] < blocks - 1:
                return
        cuda.syncthreads()
        e = exponents_of(book, c_node, part, sample)
        cols = load(c_node, Node.COLS, _WORD)
        a_e = scaled_by(book, a_node, part, sample)
        if seen[0] == _NOT_FINITE or (seen[0] == _IN_BAND and seen[1] == _NOT_FINITE):
            raise_flag(run)
        x_e = scaled_by(book, x_node, part, sample)
        if seen[0] == _OUT_OF_BAND:
            multiply_scaled(run, a_node, a, a_e, x_node, x, x_e, c_node, c, e, span)
        else:
            # The one exponent of all columns of A, and those of X.
            common = load(a_e, 0, _INT) if a_e != 0 else _INT
            for j in range(me, cols, cuda.blockDim.x):
                store(e, j, int32(common + (load(x_e, j, _INT) if x_e != 0 else _INT)), _INT)
            if me == 0:
                flag = int32(_UNSCALED if a_e == 0 else _ALL)
                if x_e != 0:
                    flag = load(x_e, cols, _INT)
                store(e, cols, flag, _INT)
            cuda.syncthreads()
        if seen[0] == _OUT_OF_BAND or (seen[0] == _IN_BAND and seen[1] == _OUT_OF_BAND):
            normalise(run, c_node, c, e, span)
        if load(book, Book.LOCAL, _WORD) != 0:
            cuda.syncthreads()
            # Samples that share a product do not share its local gradients.
            batched = load(c_node, Node.BATCHED, _WORD) != 0
            stop = sample + 1 if batched else load(book, Book.BATCH, _WORD)
            for b in range(sample, stop):
                product_local(run, book, a_node, a, a_e, x_node, c_node, part, b, shared)

    # -- Levels ---------------------------------------------------------------------------------

    @cuda.jit
    def vectors(run, book, units, batch, guarded):
        if guarded != 0 and load(run, Run.FLAG, _WORD) == 0:
            return
        stage = cuda.shared.array(STAGE, kind)
        partial = cuda.shared.array(THREADS, kind)
        tops = cuda.shared.array(THREADS, int32)
        shared = stage, partial, tops
        number, sample = int64(cuda.blockIdx.x) // batch, int64(cuda.blockIdx.x) % batch
        unit = units + number * Unit.WIDTH * 8
        ops = load(book, Book.OPS, _WORD)
        block, blocks = load(unit, Unit.BLOCK, _WORD), load(unit, Unit.BLOCKS, _WORD)
        for i in range(load(unit, Unit.FIRST, _WORD), load(unit, Unit.LAST, _WORD)):
            op = ops + i * Op.WIDTH * 8
            vector_operation(run, book, op, int64(0), sample, block, blocks, shared)
            cuda.syncthreads()

    @cuda.jit
    def level(run, book, units, batch, guarded):
        # Shared memory is given to functions: Numba cannot link one that has its own twice.
        columns = cuda.shared.array(tile_size, kind)
        partial = cuda.shared.array(THREADS, kind)
        tops = cuda.shared.array(THREADS, int32)
        shared = columns, partial, tops
        number, sample = int64(cuda.blockIdx.x) // batch, int64(cuda.blockIdx.x) % batch
        unit = units + number * Unit.WIDTH * 8
        ops = load(book, Book.OPS, _WORD)
        block, blocks = load(unit, Unit.BLOCK, _WORD), load(unit, Unit.BLOCKS, _WORD)
        part, mode = load(unit, Unit.PART, _WORD), load(unit, Unit.MODE, _WORD)
        for i in range(load(unit, Unit.FIRST, _WORD), load(unit, Unit.LAST, _WORD)):
            op = ops + i * Op.WIDTH * 8
            if load(op, Op.VECTOR, _WORD) != 0:
                vector_operation(run, book, op, part, sample, block, blocks, shared)
            else:
                out = load(op, Op.OUT, _WORD) * Node.WIDTH * 8
                node = load(book, Book.NODES, _WORD) + out
                if sample == 0 or load(node, Node.BATCHED, _WORD) != 0:
                    product(run, book, op, part, sample, block, blocks, mode, shared)
            cuda.syncthreads()

    return LevelKernels(vectors, level)
