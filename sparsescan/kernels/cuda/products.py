"""Products of two nodes, by one block or many."""

from __future__ import annotations

from numba import int32, int64

from ...arrays.cuda import SIMULATED, cuda
from ..cpu.tables import Kind, Op
from .device import atomic_add, atomic_max, load, store
from .matvec import finish, matvec
from .nodes import (
    HALF,
    INT,
    WORD,
    column,
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
from .rescale import rescale_alone, rescale_together, set_exponents, state_of
from .scaling import IN_BAND, NOT_FINITE, OUT_OF_BAND, operand_in, range_in, range_of
from .tables import Mode, Node, Plan, State, Terms
from .vectors import (
    any_of,
    barrier,
    block_size,
    get,
    load_vector,
    put,
    quotient,
    thread_index,
    vote,
)

# Threads of a warp. The simulator knows none; its blocks have no more threads than one.
WARP = 8 if SIMULATED else 32
# Rows of a dense product that a thread makes at once.
DENSE_ROWS = 4
# Values of those rows that it loads at once: 16 bytes of each, at most so many.
_PART = 4 * DENSE_ROWS
# Factors whose terms are read ahead of being added up.
_AHEAD = 4


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
            # Entries that are known to be zero may be stored in the operands, but not in C.
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
def multiply_full(t, left, a, x, product, c, first, last, shared):
    """Make rows of ``C = A X``, all of them dense, some of a column a thread.

    A value of `X` is loaded once for all of them, and `A` by 16 bytes if its rows are aligned.
    """
    columns = shared.columns
    some = cuda.local.array(_PART, columns.dtype)
    totals = cuda.local.array(DENSE_ROWS, columns.dtype)
    me, threads, vector = thread_index(), block_size(), 16 // t.itemsize
    cols, inner = product.cols, left.cols
    aligned = inner & (vector - 1) == 0 and a & 15 == 0
    worst = IN_BAND
    groups_on, cols_on = quotient(threads, cols)
    group, j = quotient(me, cols)
    while first + group * DENSE_ROWS < last:
        i = first + group * DENSE_ROWS
        for r in range(DENSE_ROWS):
            totals[r] = t.zero
        k = int64(0)
        while k < inner:
            for r in range(DENSE_ROWS):
                # The last row stands for those behind it, which are not stored.
                at = min(i + r, last - 1) * inner + k
                if aligned:
                    load_vector(some, r * vector, a, at)
                else:
                    for v in range(vector):
                        some[r * vector + v] = t.zero
                        if k + v < inner:
                            some[r * vector + v] = load(a, at + v, t.zero)
            for v in range(vector):
                if k + v < inner:
                    entry = load(x, (k + v) * cols + j, t.zero)
                    for r in range(DENSE_ROWS):
                        totals[r] += some[r * vector + v] * entry
            k += vector
        for r in range(DENSE_ROWS):
            if i + r < last:
                store(c, (i + r) * cols + j, totals[r], t.zero)
                worst = max(worst, range_of(t, totals[r]))
        group += groups_on
        j += cols_on
        if j >= cols:
            group += 1
            j -= cols
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
    x_firsts = load(terms, Terms.X_FIRSTS, WORD)
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
        f = stop = a_start = x_first = int64(0)
        if n < last:
            f, stop = int64(load(firsts, n, t.no_index)), int64(load(lasts, n, t.no_index))
            a_start = int64(load(a_starts, n, t.no_index))
            x_first = int64(load(x_firsts, n, t.no_index))
        while any_of(f < stop):
            count = min(lanes, stop - f)
            if lane < count:
                entry = a_start + int64(load(entries, f + lane, t.no_index))
                put(factor, me, load(a, entry, t.zero))
                put(starts, me, load(x_starts, x_first + lane, t.no_index))
                put(slot_starts, me, load(slots_at, f + lane, t.no_index))
                put(counts, me, int32(load(counts_at, f + lane, HALF)))
            barrier(True)
            f, x_first = f + lanes, x_first + lanes
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
    if right.kind == Kind.DENSE and left.kind == Kind.DENSE:
        product = matrix_at(c_node)
        if product.kind == Kind.DENSE:
            return multiply_full(t, left, a, x, product, c, first, last, shared)
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
def product_locals(t, run, plan, a_node, a, a_e, x_node, c_node, part, sample, shared):
    """Make the local gradients of a product, of all samples that share it."""
    if load(plan, Plan.LOCAL, WORD) == 0:
        return
    # Samples that share a product do not share its local gradients.
    batched = load(c_node, Node.BATCHED, WORD) != 0
    stop = sample + 1 if batched else load(plan, Plan.BATCH, WORD)
    for b in range(sample, stop):
        product_local(t, run, plan, a_node, a, a_e, x_node, c_node, part, b, shared)


@cuda.jit(device=True)
def product(t, run, plan, op, part, sample, block, blocks, start, stop, mode, shared):
    """Make a part of the rows or segments of a product; the last one done settles the range.

    `Mode.CHECK` only looks at the operands, `Mode.SETTLE` does all but that and multiplying. What
    many blocks find to be out of range is left to :func:`product_together`.
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
    state = state_of(c_node, sample)
    if me < 2:
        seen[me] = 0
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
            atomic_max(state, State.OPERANDS, int32(operands))
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
            if operands != IN_BAND:
                atomic_max(state, State.OPERANDS, int32(operands))
            if seen[1] != IN_BAND:
                atomic_max(state, State.RESULT, seen[1])
            # Both must be visible to the last block before this one counts as done.
            cuda.threadfence()
            seen[2] = atomic_add(state, State.DONE, int32(1))
            if seen[2] == blocks - 1:
                cuda.threadfence()
                seen[0] = load(state, State.OPERANDS, INT)
                seen[1] = load(state, State.RESULT, INT)
                store(state, State.DONE, INT, INT)
        cuda.syncthreads()
        if seen[2] < blocks - 1:
            return
    cuda.syncthreads()
    # The linear scan decides on values that are not finite.
    finite = seen[0] != NOT_FINITE and (seen[0] == OUT_OF_BAND or seen[1] != NOT_FINITE)
    outside = finite and (seen[0] == OUT_OF_BAND or seen[1] == OUT_OF_BAND)
    if not finite:
        raise_flag(run)
    if outside and blocks > 1:
        return
    e = exponents_of(plan, c_node, part, sample)
    a_e, x_e = scaled_by(plan, a_node, part, sample), scaled_by(plan, x_node, part, sample)
    if outside:
        left, right, result = matrix_at(a_node), matrix_at(x_node), matrix_at(c_node)
        scaled = seen[0] == OUT_OF_BAND
        rescale_alone(t, run, left, a, a_e, right, x, x_e, result, c, e, state, scaled, span)
    else:
        set_exponents(e, load(c_node, Node.COLS, WORD), a_e, x_e, me, block_size())
        if me < State.DONE:
            store(state, me, INT, INT)
    product_locals(t, run, plan, a_node, a, a_e, x_node, c_node, part, sample, shared)


@cuda.jit(device=True)
def product_together(t, run, plan, op, part, sample, blocks, shared):
    """Bring a product into range that many blocks have left out of it, by `blocks` of them."""
    seen = cuda.shared.array(1, int64)
    span = cuda.shared.array(2, int32)
    nodes = load(plan, Plan.NODES, WORD)
    c_node = nodes + load(op, Op.OUT, WORD) * Node.WIDTH * 8
    state = state_of(c_node, sample)
    scaled = load(state, State.OPERANDS, INT) == OUT_OF_BAND
    if not scaled and load(state, State.RESULT, INT) != OUT_OF_BAND:
        return
    x_node = nodes + load(op, Op.LEFT, WORD) * Node.WIDTH * 8
    a_node = nodes + load(op, Op.RIGHT, WORD) * Node.WIDTH * 8
    x = values_of(run, plan, x_node, part, sample)
    a = values_of(run, plan, a_node, part, sample)
    c = values_of(run, plan, c_node, part, sample)
    e = exponents_of(plan, c_node, part, sample)
    a_e, x_e = scaled_by(plan, a_node, part, sample), scaled_by(plan, x_node, part, sample)
    left, right, result = matrix_at(a_node), matrix_at(x_node), matrix_at(c_node)
    if rescale_together(
        t, run, left, a, a_e, right, x, x_e, result, c, e, state, blocks, scaled, seen, span
    ):
        product_locals(t, run, plan, a_node, a, a_e, x_node, c_node, part, sample, shared)
