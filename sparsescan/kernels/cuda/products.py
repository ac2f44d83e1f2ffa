"""Products of two nodes, by one block or many."""

from __future__ import annotations

from numba import int32, int64

from ...arrays.cuda import SIMULATED, cuda
from ..cpu.tables import Kind, Op
from .device import atomic_add, atomic_max, exponent_of, load, scale, store
from .matvec import finish, matvec
from .nodes import (
    HALF,
    INT,
    WORD,
    column,
    entry_of,
    exponents_of,
    index_at,
    local_of,
    matrix_at,
    raise_flag,
    row_of,
    row_start,
    scaled_by,
    values_of,
)
from .scaling import (
    ALL,
    EACH,
    IN_BAND,
    NONE,
    NOT_FINITE,
    OUT_OF_BAND,
    UNSCALED,
    check_bits,
    normalise,
    operand_in,
    range_in,
    range_of,
)
from .tables import Mode, Node, Plan, Terms
from .vectors import any_of, barrier, block_size, get, put, quotient, thread_index, vote

__all__ = ["WARP", "product"]

# Threads of a warp. The simulator knows none; its blocks have no more threads than one.
WARP = 8 if SIMULATED else 32
# Factors whose terms are read ahead of being added up.
_AHEAD = 4
# Columns whose largest entries are no more powers of two apart are given one exponent.
_APART = 30


@cuda.jit(device=True)
def multiply_dense(t, a_node, a, x, c_node, c, first, last):
    """Make rows of ``C = A X`` for dense `X`, an entry a thread; return how their range is."""
    me, threads = thread_index(), block_size()
    left, product = matrix_at(a_node), matrix_at(c_node)
    cols, dense = product.cols, left.kind == Kind.DENSE
    worst = IN_BAND
    # Place after place of the rows, `threads` apart, with one division.
    rows_on, cols_on = quotient(threads, cols)
    i, n = quotient(me, cols)
    i += first
    while i < last:
        place = row_start(t, product, i) + n
        if place < row_start(t, product, i + 1):
            # What is known to be zero may be stored in the operands, and not in C.
            j = n
            if product.kind == Kind.CSR:
                j = index_at(t, product, place)
            elif product.kind == Kind.DIAGONAL:
                j = place
            total = t.zero
            start, stop = row_start(t, left, i), row_start(t, left, i + 1)
            for p in range(start, stop):
                k = p - start if dense else index_at(t, left, p)
                total += load(a, p, t.zero) * load(x, k * cols + j, t.zero)
            store(c, place, total, t.zero)
            worst = max(worst, range_of(t, total))
        i += rows_on
        n += cols_on
        if n >= cols:
            i += 1
            n -= cols
    return worst


@cuda.jit(device=True)
def moved(t, total, place, c, q):
    """Store a sum as entry `q`, and leave zero in its place; return how its range is."""
    value = get(total, place)
    put(total, place, t.zero)
    store(c, q, value, t.zero)
    return range_of(t, value)


@cuda.jit(device=True)
def multiply_sparse(t, terms, a, x, c, first, last, shared):
    """Make segments of rows of ``C = A X`` for sparse `X`; return how their range is.

    Some lanes of a warp make a segment: they add the terms of one factor after the other to its
    slots, which are in shared memory. Warps do not wait for each other.
    """
    total, factor, starts = shared.columns, shared.factor, shared.starts
    slot_starts, counts = shared.slot_starts, shared.counts
    places = cuda.local.array(_AHEAD, int64)
    values = cuda.local.array(_AHEAD, total.dtype)
    a_starts, firsts = load(terms, Terms.A_STARTS, WORD), load(terms, Terms.FIRSTS, WORD)
    lasts, c_starts = load(terms, Terms.LASTS, WORD), load(terms, Terms.STARTS, WORD)
    entries, x_starts = load(terms, Terms.ENTRIES, WORD), load(terms, Terms.X_STARTS, WORD)
    slots_at, counts_at = load(terms, Terms.SLOT_STARTS, WORD), load(terms, Terms.COUNTS, WORD)
    slots, longest = load(terms, Terms.SLOTS, WORD), load(terms, Terms.LONGEST, WORD)
    shift, aligned = load(terms, Terms.SHIFT, WORD), load(terms, Terms.ALIGNED, WORD)
    me, lanes = thread_index(), int64(1) << shift
    group, lane = me >> shift, me & (lanes - 1)
    groups = min(block_size() >> shift, load(terms, Terms.GROUPS, WORD))
    # The first thread of the group, and its first place in shared memory.
    head, base = group << shift, group * longest
    # Lanes begin where a sector of memory does, so that none is read or written twice.
    x_skew, sector = (x // t.itemsize) & aligned, 32 // t.itemsize
    worst, n = IN_BAND, last
    if group < groups:
        n = first + group
        j = lane
        while j < longest:
            put(total, base + j, t.zero)
            j += lanes
    # The groups of a warp take as many turns as the one that needs most.
    while vote(n < last, True):
        f = stop = a_start = int64(0)
        if n < last:
            f, stop = int64(load(firsts, n, t.no_index)), int64(load(lasts, n, t.no_index))
            a_start = int64(load(a_starts, n, t.no_index))
        while any_of(f < stop):
            count = min(lanes, stop - f)
            if lane < count:
                entry = a_start + int64(load(entries, f + lane, t.no_index))
                put(factor, me, load(a, entry, t.zero))
                put(starts, me, load(x_starts, f + lane, t.no_index))
                put(slot_starts, me, load(slots_at, f + lane, t.no_index))
                put(counts, me, int32(load(counts_at, f + lane, HALF)))
            barrier(True)
            f += lanes
            k = int64(0)
            while any_of(k < count):
                for ahead in range(_AHEAD):
                    places[ahead] = -1
                    if k + ahead < count:
                        of = head + k + ahead
                        q = int64(get(starts, of))
                        m = lane - ((q + x_skew) & aligned)
                        if 0 <= m < int64(get(counts, of)):
                            place = load(slots, int64(get(slot_starts, of)) + m, HALF)
                            places[ahead] = base + int64(place)
                            values[ahead] = get(factor, of) * load(x, q + m, t.zero)
                for ahead in range(_AHEAD):
                    # Two terms of one factor have no slot in common; those of two may have.
                    if places[ahead] >= 0:
                        put(total, places[ahead], get(total, places[ahead]) + values[ahead])
                    if k + ahead < count:
                        of = head + k + ahead
                        q, own = int64(get(starts, of)), int64(get(slot_starts, of))
                        m, value = lane - ((q + x_skew) & aligned) + lanes, get(factor, of)
                        while m < int64(get(counts, of)):
                            place = base + int64(load(slots, own + m, HALF))
                            put(total, place, get(total, place) + value * load(x, q + m, t.zero))
                            m += lanes
                    barrier(True)
                k += _AHEAD
        if n < last:
            start = int64(load(c_starts, n, t.no_index))
            stop = int64(load(c_starts, n + 1, t.no_index))
            q = start + lane
            if lanes == WARP:
                q -= (start + c // t.itemsize) & (sector - 1)
            if start <= q < stop:
                worst = max(worst, moved(t, total, base + q - start, c, q))
            q += lanes
            while q < stop:
                worst = max(worst, moved(t, total, base + q - start, c, q))
                q += lanes
        n += groups
    return worst


@cuda.jit(device=True)
def multiply(t, a_node, a, x_node, x, c_node, c, first, last, shared):
    """Make rows or segments of ``C = A X``, plainly; return how this thread's entries are."""
    me, threads = thread_index(), block_size()
    if load(c_node, Node.NNZ, WORD) == 0:
        return IN_BAND
    terms = load(c_node, Node.TERMS, WORD)
    if terms != 0:
        last = min(last, load(terms, Terms.SEGMENTS, WORD))
        return multiply_sparse(t, terms, a, x, c, first, last, shared)
    left, right = matrix_at(a_node), matrix_at(x_node)
    last = min(last, left.rows)
    if right.kind == Kind.DENSE and left.kind != Kind.DIAGONAL:
        return multiply_dense(t, a_node, a, x, c_node, c, first, last)
    worst = IN_BAND
    by_diagonal = right.kind == Kind.DIAGONAL
    rows = left if by_diagonal else right
    p, stop = row_start(t, rows, first) + me, row_start(t, rows, last)
    while p < stop:
        own = p if by_diagonal else row_of(t, right, p)
        other = column(t, left, p) if by_diagonal else p
        value = load(a, own, t.zero) * load(x, other, t.zero)
        store(c, p, value, t.zero)
        worst = max(worst, range_of(t, value))
        p += threads
    return worst


@cuda.jit(device=True)
def multiply_scaled(t, run, a_node, a, a_e, x_node, x, x_e, c_node, c, e, span):
    """Make ``C diag(2^e) = A diag(2^a_e) X diag(2^x_e)`` for any range, by one block.

    An entry is summed relative to its largest term. `span` is as for `normalise`, before and
    afterwards; that begins with the entries that this thread has made.
    """
    me, threads = thread_index(), block_size()
    left, right, made = matrix_at(a_node), matrix_at(x_node), matrix_at(c_node)
    cols = made.cols
    # The largest exponent of every column of A, and of every column of what it is applied to
    # when those are taken out of A.
    tops, powers = e + 4 * (cols + 1), e + 4 * (3 * cols + 1)
    k = me
    while k < left.cols:
        store(powers, k, int32(NONE), INT)
        k += threads
    j = me
    while j < cols:
        store(tops, j, int32(NONE), INT)
        j += threads
    cuda.syncthreads()
    p = me
    while p < left.nnz:
        value = load(a, p, t.zero)
        if value != 0:
            k = column(t, left, p)
            own = exponent_of(value)
            if a_e != 0:
                own += int64(load(a_e, k, INT))
            atomic_max(powers, k, int32(own))
        p += threads
    cuda.syncthreads()
    q = me
    while q < right.nnz:
        value = load(x, q, t.zero)
        if value != 0:
            by = int64(load(powers, row_of(t, right, q), INT))
            if by != NONE:
                atomic_max(tops, column(t, right, q), int32(exponent_of(value) + by))
        q += threads
    cuda.syncthreads()
    j = me
    while j < cols:
        own = load(tops, j, INT)
        if own != NONE:
            cuda.atomic.max(span, 0, own)
            cuda.atomic.max(span, 1, -own)
        j += threads
    cuda.syncthreads()
    highest, together = int64(span[0]), int64(span[0]) + int64(span[1]) <= _APART
    cuda.syncthreads()
    j = me
    while j < cols:
        own = highest if together else int64(load(tops, j, INT))
        if own != NONE:
            own -= t.target
            store(tops, j, int32(own), INT)
            if x_e != 0:
                own += int64(load(x_e, j, INT))
        else:
            own = int64(0)
        store(e, j, int32(own), INT)
        j += threads
    if me == 0:
        one = together and (x_e == 0 or load(x_e, cols, INT) == ALL)
        store(e, cols, int32(ALL if one else EACH), INT)
        span[0] = span[1] = NONE
    cuda.syncthreads()
    q = me
    while q < made.nnz:
        i, j = row_of(t, made, q), column(t, made, q)
        by, total, top = int64(load(tops, j, INT)), t.zero, int64(NONE)
        for summing in range(2):
            for p in range(row_start(t, left, i), row_start(t, left, i + 1)):
                k = column(t, left, p)
                r = entry_of(t, right, k, j)
                if r >= 0:
                    value, entry = load(a, p, t.zero), load(x, r, t.zero)
                    if value != 0 and entry != 0:
                        own, others = exponent_of(value), exponent_of(entry)
                        power = own + others
                        if a_e != 0:
                            power += int64(load(a_e, k, INT))
                        if summing == 0:
                            top = max(top, power)
                        else:
                            mantissas = scale(value, -own) * scale(entry, -others)
                            total += scale(mantissas, power - top)
        if total != 0:
            top += exponent_of(total)
            check_bits(t, run, top + int64(load(e, j, INT)) - by, int64(load(e, j, INT)))
            total = scale(total, top - exponent_of(total) - by)
        store(c, q, total, t.zero)
        q += threads


@cuda.jit(device=True)
def product_local(t, run, plan, a_node, a, a_e, x_node, c_node, part, sample, shared):
    """Make the local gradients of a product, ``A·local(X) + local(A)``, of one sample."""
    x = local_of(t, run, plan, x_node, part, sample)
    y = local_of(t, run, plan, c_node, part, sample)
    local = local_of(t, run, plan, a_node, part, sample)
    if x != 0:
        count = load(a_node, Node.TILE_COUNT, WORD)
        matvec(t, run, a_node, a, a_e, x, y, local, int64(0), count, int64(1), shared)
    else:
        i, rows = thread_index(), load(c_node, Node.ROWS, WORD)
        while i < rows:
            finish(t, run, i, t.zero, y, local, int64(1))
            i += block_size()


@cuda.jit(device=True)
def product(t, run, plan, op, part, sample, block, blocks, start, stop, mode, shared):
    """Make a part of the rows or segments of a product; the last one done settles the range.

    `Mode.CHECK` only looks at the operands, `Mode.SETTLE` does all but that and multiplying.
    """
    seen = cuda.shared.array(3, int32)
    span = cuda.shared.array(2, int32)
    me = thread_index()
    nodes = load(plan, Plan.NODES, WORD)
    x_node = nodes + load(op, Op.LEFT, WORD) * Node.WIDTH * 8
    a_node = nodes + load(op, Op.RIGHT, WORD) * Node.WIDTH * 8
    c_node = nodes + load(op, Op.OUT, WORD) * Node.WIDTH * 8
    x = values_of(run, plan, x_node, part, sample)
    a = values_of(run, plan, a_node, part, sample)
    c = values_of(run, plan, c_node, part, sample)
    # State: the worst range of the operands and of the result, and how many parts are done.
    state = load(c_node, Node.STATE, WORD) + 12 * sample
    if me < 2:
        seen[me], span[me] = 0, NONE
    cuda.syncthreads()
    operands = IN_BAND
    if mode != Mode.SETTLE:
        operands = operand_in(t, plan, x_node, x, part, sample, block, blocks, False)
        worst = operand_in(t, plan, a_node, a, part, sample, block, blocks, True)
        worst = max(operands, worst)
        if worst != IN_BAND:
            cuda.atomic.max(seen, 0, int32(worst))
        cuda.syncthreads()
        operands = seen[0]
    if mode == Mode.CHECK:
        if me == 0:
            atomic_max(state, 0, int32(operands))
        return
    if mode == Mode.SETTLE:
        # It is dense.
        cols, stop = load(c_node, Node.COLS, WORD), min(stop, load(c_node, Node.ROWS, WORD))
        worst = range_in(t, c, start * cols + me, stop * cols, block_size())
        if worst != IN_BAND:
            cuda.atomic.max(seen, 1, int32(worst))
    elif operands == IN_BAND:
        worst = multiply(t, a_node, a, x_node, x, c_node, c, start, stop, shared)
        if worst != IN_BAND:
            cuda.atomic.max(seen, 1, int32(worst))
    if blocks > 1 or mode == Mode.SETTLE:
        cuda.syncthreads()
        if me == 0:
            atomic_max(state, 0, int32(operands))
            atomic_max(state, 1, seen[1])
            # All that this block wrote must be visible to the others before it counts as done.
            cuda.threadfence()
            seen[2] = atomic_add(state, 2, int32(1))
            if seen[2] == blocks - 1:
                cuda.threadfence()
                seen[0] = atomic_max(state, 0, int32(0))
                seen[1] = atomic_max(state, 1, int32(0))
                for i in range(3):
                    store(state, i, int32(0), INT)
        cuda.syncthreads()
        if seen[2] < blocks - 1:
            return
    cuda.syncthreads()
    e = exponents_of(plan, c_node, part, sample)
    cols = load(c_node, Node.COLS, WORD)
    a_e = scaled_by(plan, a_node, part, sample)
    if seen[0] == NOT_FINITE or (seen[0] == IN_BAND and seen[1] == NOT_FINITE):
        raise_flag(run)
    x_e = scaled_by(plan, x_node, part, sample)
    if seen[0] == OUT_OF_BAND:
        multiply_scaled(t, run, a_node, a, a_e, x_node, x, x_e, c_node, c, e, span)
    else:
        # The one exponent of all columns of A, and those of X.
        common = load(a_e, 0, INT) if a_e != 0 else INT
        j = me
        while j < cols:
            store(e, j, int32(common + (load(x_e, j, INT) if x_e != 0 else INT)), INT)
            j += block_size()
        if me == 0:
            flag = int32(UNSCALED if a_e == 0 else ALL)
            if x_e != 0:
                flag = load(x_e, cols, INT)
            store(e, cols, flag, INT)
        cuda.syncthreads()
    if seen[0] == OUT_OF_BAND or (seen[0] == IN_BAND and seen[1] == OUT_OF_BAND):
        normalise(t, run, matrix_at(c_node), c, e, span)
    if load(plan, Plan.LOCAL, WORD) != 0:
        # Samples that share a product do not share its local gradients.
        batched = load(c_node, Node.BATCHED, WORD) != 0
        stop = sample + 1 if batched else load(plan, Plan.BATCH, WORD)
        for b in range(sample, stop):
            product_local(t, run, plan, a_node, a, a_e, x_node, c_node, part, b, shared)
