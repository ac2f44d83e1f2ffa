"""Products of two nodes, by one block or many."""

from __future__ import annotations

from numba import int32, int64

from ...arrays.cuda import cuda
from ..cpu.tables import Kind, Op
from .device import atomic_add, atomic_max, exponent_of, load, scale, store
from .matvec import finish, matvec
from .nodes import (
    INT,
    WORD,
    balanced_row,
    column,
    entry_of,
    exponents_of,
    local_of,
    lower_bound,
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
from .tables import Mode, Node, Plan

__all__ = ["product"]

# Rows that are read ahead of being added up.
_AHEAD = 4
# Columns whose largest entries are no more powers of two apart are given one exponent.
_APART = 30


@cuda.jit(device=True)
def multiply_dense(t, a_node, a, x, c_node, c, first, last):
    """Make rows of ``C = A X`` for dense `X`, an entry a thread; return how their range is."""
    me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
    cols = load(c_node, Node.COLS, WORD)
    dense = load(a_node, Node.KIND, WORD) == Kind.DENSE
    worst = IN_BAND
    # Entry after entry of the rows, `threads` apart, without a division.
    i, j = first + me // cols, me % cols
    rows_on, cols_on = threads // cols, threads % cols
    while i < last:
        # An empty row of A gives a row of zeros if C is stored densely.
        place = row_start(t, c_node, i)
        if place < row_start(t, c_node, i + 1):
            total = t.zero
            start, stop = row_start(t, a_node, i), row_start(t, a_node, i + 1)
            for p in range(start, stop):
                k = p - start if dense else column(t, a_node, p)
                total += load(a, p, t.zero) * load(x, k * cols + j, t.zero)
            store(c, place + j, total, t.zero)
            worst = max(worst, range_of(t, total))
        i += rows_on
        j += cols_on
        if j >= cols:
            i += 1
            j -= cols
    return worst


@cuda.jit(device=True)
def multiply_sparse(t, a_node, a, x_node, x, c_node, c, first, last, shared):
    """Make rows of ``C = A X`` for sparse `X`, all threads together; return how their range is.

    For one entry of `A` after the other, a row of `X` is added to the columns in shared memory.
    """
    total, factor, starts, stops = shared.columns, shared.factor, shared.starts, shared.stops
    places = cuda.local.array(_AHEAD, int64)
    terms = cuda.local.array(_AHEAD, total.dtype)
    me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
    cols = load(c_node, Node.COLS, WORD)
    indices = load(x_node, Node.INDICES, WORD)
    c_indices = load(c_node, Node.INDICES, WORD)
    c_dense = load(c_node, Node.KIND, WORD) == Kind.DENSE
    c_diagonal = load(c_node, Node.KIND, WORD) == Kind.DIAGONAL
    a_dense = load(a_node, Node.KIND, WORD) == Kind.DENSE
    worst = IN_BAND
    for j in range(me, min(cols, int64(t.tile_size)), threads):
        total[j] = t.zero
    for i in range(first, last):
        start, stop = row_start(t, a_node, i), row_start(t, a_node, i + 1)
        c_start, c_stop = row_start(t, c_node, i), row_start(t, c_node, i + 1)
        for base in range(int64(0), cols, int64(t.tile_size)):
            beyond = base + t.tile_size
            for group in range(start, stop, threads):
                cuda.syncthreads()
                p = group + me
                if p < stop:
                    k = p - start if a_dense else column(t, a_node, p)
                    q_start, q_stop = row_start(t, x_node, k), row_start(t, x_node, k + 1)
                    if cols > t.tile_size:
                        q_start = lower_bound(t, indices, q_start, q_stop, base)
                        q_stop = lower_bound(t, indices, q_start, q_stop, beyond)
                    factor[me] = load(a, p, t.zero)
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
                                places[ahead] = int64(load(indices, q, t.no_index)) - base
                                terms[ahead] = factor[n + ahead] * load(x, q, t.zero)
                    for ahead in range(_AHEAD):
                        if n + ahead < count:
                            if places[ahead] >= 0:
                                total[places[ahead]] += terms[ahead]
                            q_start = int64(starts[n + ahead]) + me + threads
                            for q in range(q_start, int64(stops[n + ahead]), threads):
                                j = int64(load(indices, q, t.no_index)) - base
                                total[j] += factor[n + ahead] * load(x, q, t.zero)
                            cuda.syncthreads()
            q_start, q_stop = c_start, c_stop
            if c_dense:
                q_start, q_stop = c_start + base, min(c_stop, c_start + beyond)
            elif c_diagonal:
                q_start, q_stop = max(c_start, base), min(c_stop, beyond)
            elif cols > t.tile_size:
                q_start = lower_bound(t, c_indices, c_start, c_stop, base)
                q_stop = lower_bound(t, c_indices, q_start, c_stop, beyond)
            for q in range(q_start + me, q_stop, threads):
                j = (q - c_start if c_dense else column(t, c_node, q)) - base
                value = total[j]
                total[j] = t.zero
                store(c, q, value, t.zero)
                worst = max(worst, range_of(t, value))
            cuda.syncthreads()
    return worst


@cuda.jit(device=True)
def multiply(t, a_node, a, x_node, x, c_node, c, first, last, shared):
    """Make rows of ``C = A X``, plainly; return how the range of this thread's entries is."""
    me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
    if load(c_node, Node.NNZ, WORD) == 0:
        return IN_BAND
    if load(x_node, Node.KIND, WORD) == Kind.DIAGONAL:
        worst = IN_BAND
        for p in range(row_start(t, a_node, first) + me, row_start(t, a_node, last), threads):
            value = load(a, p, t.zero) * load(x, column(t, a_node, p), t.zero)
            store(c, p, value, t.zero)
            worst = max(worst, range_of(t, value))
        return worst
    if load(a_node, Node.KIND, WORD) == Kind.DIAGONAL:
        worst = IN_BAND
        for p in range(row_start(t, x_node, first) + me, row_start(t, x_node, last), threads):
            value = load(a, row_of(t, x_node, p), t.zero) * load(x, p, t.zero)
            store(c, p, value, t.zero)
            worst = max(worst, range_of(t, value))
        return worst
    if load(x_node, Node.KIND, WORD) == Kind.DENSE:
        return multiply_dense(t, a_node, a, x, c_node, c, first, last)
    return multiply_sparse(t, a_node, a, x_node, x, c_node, c, first, last, shared)


@cuda.jit(device=True)
def multiply_scaled(t, run, a_node, a, a_e, x_node, x, x_e, c_node, c, e, span):
    """Make ``C diag(2^e) = A diag(2^a_e) X diag(2^x_e)`` for any range, by one block.

    An entry is summed relative to its largest term. `span` is as for `normalise`, before and
    afterwards.
    """
    me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
    inner, cols = load(a_node, Node.COLS, WORD), load(c_node, Node.COLS, WORD)
    # The largest exponent of every column of A, and of every column of what it is applied to
    # when those are taken out of A.
    tops, powers = e + 4 * (cols + 1), e + 4 * (3 * cols + 1)
    for k in range(me, inner, threads):
        store(powers, k, int32(NONE), INT)
    for j in range(me, cols, threads):
        store(tops, j, int32(NONE), INT)
    cuda.syncthreads()
    for p in range(me, load(a_node, Node.NNZ, WORD), threads):
        value = load(a, p, t.zero)
        if value != 0:
            k = column(t, a_node, p)
            own = exponent_of(value)
            if a_e != 0:
                own += int64(load(a_e, k, INT))
            atomic_max(powers, k, int32(own))
    cuda.syncthreads()
    for q in range(me, load(x_node, Node.NNZ, WORD), threads):
        value = load(x, q, t.zero)
        if value != 0:
            by = int64(load(powers, row_of(t, x_node, q), INT))
            if by != NONE:
                atomic_max(tops, column(t, x_node, q), int32(exponent_of(value) + by))
    cuda.syncthreads()
    for j in range(me, cols, threads):
        own = load(tops, j, INT)
        if own != NONE:
            cuda.atomic.max(span, 0, own)
            cuda.atomic.max(span, 1, -own)
    cuda.syncthreads()
    highest, together = int64(span[0]), int64(span[0]) + int64(span[1]) <= _APART
    cuda.syncthreads()
    for j in range(me, cols, threads):
        own = highest if together else int64(load(tops, j, INT))
        if own != NONE:
            own -= t.target
            store(tops, j, int32(own), INT)
            if x_e != 0:
                own += int64(load(x_e, j, INT))
        else:
            own = int64(0)
        store(e, j, int32(own), INT)
    if me == 0:
        one = together and (x_e == 0 or load(x_e, cols, INT) == ALL)
        store(e, cols, int32(ALL if one else EACH), INT)
        span[0] = span[1] = NONE
    cuda.syncthreads()
    for q in range(me, load(c_node, Node.NNZ, WORD), threads):
        i, j = row_of(t, c_node, q), column(t, c_node, q)
        by, total, top = int64(load(tops, j, INT)), t.zero, int64(NONE)
        for summing in range(2):
            for p in range(row_start(t, a_node, i), row_start(t, a_node, i + 1)):
                k = column(t, a_node, p)
                r = entry_of(t, x_node, k, j)
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
    cuda.syncthreads()


@cuda.jit(device=True)
def product_local(t, run, plan, a_node, a, a_e, x_node, c_node, part, sample, shared):
    """Make the local gradients of a product, ``A·local(X) + local(A)``, of one sample."""
    me, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
    x = local_of(t, run, plan, x_node, part, sample)
    y = local_of(t, run, plan, c_node, part, sample)
    local = local_of(t, run, plan, a_node, part, sample)
    if x != 0:
        count = load(a_node, Node.TILE_COUNT, WORD)
        matvec(t, run, a_node, a, a_e, x, y, local, int64(0), count, int64(1), shared)
    else:
        for i in range(me, load(c_node, Node.ROWS, WORD), threads):
            finish(t, run, i, t.zero, y, local, int64(1))


@cuda.jit(device=True)
def product(t, run, plan, op, part, sample, block, blocks, mode, shared):
    """Make a part of the rows of one product; the last part to be done settles the range.

    `Mode.CHECK` only looks at the operands, `Mode.SETTLE` does all but that and multiplying.
    """
    seen = cuda.shared.array(3, int32)
    span = cuda.shared.array(2, int32)
    me = int64(cuda.threadIdx.x)
    nodes = load(plan, Plan.NODES, WORD)
    x_node = nodes + load(op, Op.LEFT, WORD) * Node.WIDTH * 8
    a_node = nodes + load(op, Op.RIGHT, WORD) * Node.WIDTH * 8
    c_node = nodes + load(op, Op.OUT, WORD) * Node.WIDTH * 8
    x = values_of(run, plan, x_node, part, sample)
    a = values_of(run, plan, a_node, part, sample)
    c = values_of(run, plan, c_node, part, sample)
    # State: the worst range of the operands and of the result, and how many parts are done.
    state = load(c_node, Node.STATE, WORD) + 12 * sample
    if me < 3:
        seen[me] = 0
    if me < 2:
        span[me] = NONE
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
    first, last = balanced_row(t, a_node, block, blocks), balanced_row(t, a_node, block + 1, blocks)
    if mode == Mode.SETTLE:
        worst = range_in(t, c, row_start(t, c_node, first), row_start(t, c_node, last))
        if worst != IN_BAND:
            cuda.atomic.max(seen, 1, int32(worst))
    elif operands == IN_BAND:
        worst = multiply(t, a_node, a, x_node, x, c_node, c, first, last, shared)
        if worst != IN_BAND:
            cuda.atomic.max(seen, 1, int32(worst))
    if blocks > 1 or mode == Mode.SETTLE:
        # Every write of this part must be visible to the others before it counts as done.
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
        for j in range(me, cols, cuda.blockDim.x):
            store(e, j, int32(common + (load(x_e, j, INT) if x_e != 0 else INT)), INT)
        if me == 0:
            flag = int32(UNSCALED if a_e == 0 else ALL)
            if x_e != 0:
                flag = load(x_e, cols, INT)
            store(e, cols, flag, INT)
        cuda.syncthreads()
    if seen[0] == OUT_OF_BAND or (seen[0] == IN_BAND and seen[1] == OUT_OF_BAND):
        normalise(t, run, c_node, c, e, span)
    if load(plan, Plan.LOCAL, WORD) != 0:
        cuda.syncthreads()
        # Samples that share a product do not share its local gradients.
        batched = load(c_node, Node.BATCHED, WORD) != 0
        stop = sample + 1 if batched else load(plan, Plan.BATCH, WORD)
        for b in range(sample, stop):
            product_local(t, run, plan, a_node, a, a_e, x_node, c_node, part, b, shared)
