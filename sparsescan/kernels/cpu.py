"""The CPU engine: one compiled call runs a whole plan.

A plan is a sequence of *stages*. The units of a stage do not depend on each other; a stage starts
when every unit before it is done. Threads claim units from a counter, so a thread that comes late,
or never, delays nobody, and the arithmetic of a unit does not depend on who claims it: the result
has the same bits whatever the number of threads.

Range. Products of many Jacobians leave the range of floating point where a gradient would not, so
a matrix node is ``M·diag(2^e)``: mantissas `M`, and an exponent for each column, since columns
evolve independently of each other. Scaling by a power of two is exact. Nodes whose entries lie
within a *band* have no exponents and take the plain kernels; only columns that leave it are
brought back, by one thread, since that is rare. Two things stop a run, and the caller lets the
linear scan decide: a value that is not finite, and a column whose entries are so far apart that one
exponent cannot hold them all at full precision.

Indices are unsigned in the inner loops: Numba would test a signed one for wrapping around.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ._memory import (
    add_fused_term,
    add_term,
    array_at,
    dot_two_rows,
    eights_at,
    fetch_add,
    load,
    plus,
    relax,
    store,
    zero,
)

__all__ = [
    "BAND",
    "FINISHED",
    "UNDECIDED",
    "Book",
    "Kind",
    "Node",
    "Op",
    "Stage",
    "Store",
    "Tables",
    "Work",
    "abort",
    "run",
    "run_vectors",
]

# Statuses of a run; what it leaves undecided the linear scan has to say.
FINISHED, UNDECIDED, ABORTED = 0, 1, 1 << 32

# What a check of the range finds: one of these, or UNDECIDED.
_IN_BAND, _OUT_OF_BAND = 0, 2

# In place of the exponent of a column that is zero.
_EMPTY = -(1 << 30)

# A plain literal would compile each kernel that takes it a second time, for that literal.
_ZERO, _ONE = np.int64(0), np.int64(1)
_WORD = 8


class _Kind(NamedTuple):
    """Which kernels a matrix gets."""

    DENSE: int = 0
    CSR: int = 1
    DIAGONAL: int = 2


Kind = _Kind()


class _Store(NamedTuple):
    """Where the values of a node are: with the caller, in the pool, or in a thread's two slots."""

    CALLER: int = 0
    POOL: int = 1
    SCRATCH: int = 2


Store = _Store()


class _Node(NamedTuple):
    """Columns of the node table: one row for each Jacobian, then one for each product."""

    KIND: int = 0
    ROWS: int = 1
    COLS: int = 2
    NNZ: int = 3
    # addresses; not followed for dense and diagonal nodes
    INDPTR: int = 4
    INDICES: int = 5
    # whether it is CSR with exactly one entry in every row
    SINGLE: int = 6
    STORE: int = 7
    BATCHED: int = 8
    # the Jacobian, the place in the pool, or the slot
    VALUES: int = 9
    # places in those arrays
    EXPONENTS: int = 10
    LOCAL: int = 11
    WIDTH: int = 12


Node = _Node()


class _Op(NamedTuple):
    """Columns of the operation table: ``out = left ◇ right``.

    Of a vector operation, `LEFT` and `OUT` number gradients; all else numbers nodes.
    """

    VECTOR: int = 0
    LEFT: int = 1
    RIGHT: int = 2
    OUT: int = 3
    WIDTH: int = 4


Op = _Op()


class _Stage(NamedTuple):
    """Columns of the stage table. A stage has `BLOCKS` units, for each of its runs."""

    KIND: int = 0
    FIRST: int = 1
    BLOCKS: int = 2
    SAMPLE: int = 3
    WIDTH: int = 4


Stage = _Stage()


class _Work(NamedTuple):
    """Kinds of a stage: whole runs, or one operation with its rows shared out."""

    # Runs from FIRST on, their samples in blocks.
    RUNS: int = 0
    # The operation FIRST makes a gradient, for all samples.
    VECTOR: int = 1
    # The operation FIRST makes a product for one SAMPLE, in three stages.
    CHECK: int = 2
    MULTIPLY: int = 3
    SETTLE: int = 4


Work = _Work()


class _Book(NamedTuple):
    """Slots of the book: counters, sizes, limits, and the addresses of all tables.

    One array of integers, because every array that a kernel is passed costs it seven arguments.
    """

    # Counters that threads share, each on a cache line of its own.
    NEXT: int = 0
    DONE: int = 16
    STATUS: int = 32
    OPERANDS: int = 48
    RESULT: int = 64
    BATCH: int = 80
    LOCAL: int = 81
    # Whether a gradient that is not finite stops the run.
    CHECKED: int = 82
    UNITS: int = 83
    STAGE_COUNT: int = 84
    # Columns of a thread's accumulator, and those of which it can interleave eight samples.
    ACCUMULATOR: int = 85
    LANES: int = 86
    # Sizes of a scratch slot, and where thread 0 has its own in the pool, exponents, local pool.
    SCRATCH_NNZ: int = 87
    SCRATCH_COLS: int = 88
    SCRATCH_ROWS: int = 89
    SCRATCH_VALUES: int = 90
    SCRATCH_EXPONENTS: int = 91
    SCRATCH_LOCAL: int = 92
    # Bit patterns of infinity and of the ends of the band, the exponents of those, and the exponent
    # to which a column is brought that has left the band. Then the exponents of the smallest normal
    # number, and of an entry so small that no gradient in range can show it.
    INFINITY: int = 93
    HIGH: int = 94
    LOW: int = 95
    HIGH_EXPONENT: int = 96
    LOW_EXPONENT: int = 97
    TARGET: int = 98
    NORMAL: int = 99
    NEGLIGIBLE: int = 100
    # Addresses of tables of int64: (stages + 1,), (stages, Stage.WIDTH), (runs, 2): first and
    # last-plus-one operation, (operations, Op.WIDTH), (nodes, Node.WIDTH), (n, 2): of each Jacobian
    # the address and the bytes between samples, (n + 1,): address of each local gradient or 0,
    # (n + 2,): where each gradient starts in `out`, for one sample.
    FIRST_UNIT: int = 101
    STAGES: int = 102
    RUNS: int = 103
    OPS: int = 104
    NODES: int = 105
    LEAVES: int = 106
    LOCAL_GRADS: int = 107
    OFFSETS: int = 108
    # Addresses of values: gradients, products, what local gradients inside a product add up to, a
    # row for each thread that is zero between uses, and one for interleaved samples.
    OUT: int = 109
    POOL: int = 110
    LOCAL_POOL: int = 111
    ACCUMULATORS: int = 112
    INTERLEAVED: int = 113
    WIDTH: int = 114


Book = _Book()


class Tables(NamedTuple):
    """All that a run reads and writes; :class:`sparsescan.program.Workspace` fills it."""

    book: NDArray[np.int64]
    exponents: NDArray[np.int32]  # of each node and sample: one for each column, then their flag
    values: NDArray[np.floating[Any]]  # empty, of the dtype of the values
    bits: NDArray[np.integer[Any]]  # empty, of the integer dtype as wide as a value
    indices: NDArray[np.integer[Any]]  # empty, of the dtype of the index arrays


def _band(dtype: type, high: int, low: int, target: int) -> NDArray[np.int64]:
    bits = np.int32 if dtype is np.float32 else np.int64
    limits = np.array([np.inf, 2.0**high, 2.0**low], dtype).view(bits)
    info = np.finfo(dtype)
    # As `frexp` counts. An entry times the largest gradient is less than the smallest number.
    normal, negligible = info.minexp + 1, info.minexp - info.nmant - info.maxexp
    return np.array([*limits, high, low, target, normal, negligible], np.int64)


# From Book.INFINITY on. Entries in the band multiply without overflow and without underflow. The
# target is high, so that a column keeps what is far below its largest entry: at full precision what
# is at least 2^-170 of it in float32, and 2^-1490 in float64.
BAND = {
    np.dtype(np.float32): _band(np.float32, 50, -60, 46),
    np.dtype(np.float64): _band(np.float64, 480, -500, 470),
}


# ---------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------


@njit(inline="always")
def _node(t, i):
    return array_at(t.book[Book.NODES] + i * Node.WIDTH * _WORD, Node.WIDTH, t.book)


@njit(inline="always")
def _op(t, i):
    return array_at(t.book[Book.OPS] + i * Op.WIDTH * _WORD, Op.WIDTH, t.book)


@njit(inline="always")
def _gradient(t, k, b):
    """The `k`-th gradient of sample `b`."""
    offsets = array_at(t.book[Book.OFFSETS] + k * _WORD, 2, t.book)
    size = offsets[1] - offsets[0]
    first = offsets[0] * t.book[Book.BATCH] + b * size
    return array_at(t.book[Book.OUT] + first * t.values.itemsize, size, t.values)


@njit(inline="always")
def _indptr(t, node):
    return array_at(node[Node.INDPTR], node[Node.ROWS] + 1, t.indices)


@njit(inline="always")
def _indices(t, node):
    return array_at(node[Node.INDICES], node[Node.NNZ], t.indices)


@njit
def _address(t, node, b, thread):
    """Where the values of a node are for sample `b`."""
    itemsize = t.values.itemsize
    if node[Node.STORE] == Store.CALLER:
        leaf = array_at(t.book[Book.LEAVES] + node[Node.VALUES] * 2 * _WORD, 2, t.book)
        return leaf[0] + b * leaf[1]
    if node[Node.STORE] == Store.POOL:
        place = node[Node.VALUES] + b * node[Node.BATCHED] * node[Node.NNZ]
    else:
        slot = 2 * thread + node[Node.VALUES]
        place = t.book[Book.SCRATCH_VALUES] + slot * t.book[Book.SCRATCH_NNZ]
    return t.book[Book.POOL] + place * itemsize


@njit(inline="always")
def _values(t, node, b, thread):
    return array_at(_address(t, node, b, thread), node[Node.NNZ], t.values)


@njit(inline="always")
def _bits(t, node, b, thread):
    return array_at(_address(t, node, b, thread), node[Node.NNZ], t.bits)


@njit
def _exponents(t, node, b, thread):
    """The exponents of a product for sample `b`; the last entry says whether there are any."""
    cols = node[Node.COLS]
    if node[Node.STORE] == Store.POOL:
        first = node[Node.EXPONENTS] + b * node[Node.BATCHED] * (cols + 1)
    else:
        slot = 2 * thread + node[Node.VALUES]
        first = t.book[Book.SCRATCH_EXPONENTS] + slot * (t.book[Book.SCRATCH_COLS] + 1)
    return t.exponents[first : first + cols + 1]


@njit
def _local(t, node, b, thread):
    """What a node's local gradients add up to, for sample `b`; empty if it has none."""
    rows = node[Node.ROWS]
    itemsize = t.values.itemsize
    if t.book[Book.LOCAL] == 0:
        return t.values
    if node[Node.STORE] == Store.CALLER:
        place = t.book[Book.LOCAL_GRADS] + (node[Node.VALUES] + 1) * _WORD
        address = array_at(place, 1, t.book)[0]
        if address == 0:
            return t.values
        return array_at(address + b * rows * itemsize, rows, t.values)
    if node[Node.STORE] == Store.POOL:
        place = node[Node.LOCAL] + b * rows
    else:
        slot = (2 * thread + node[Node.VALUES]) * t.book[Book.BATCH]
        place = t.book[Book.SCRATCH_LOCAL] + slot * t.book[Book.SCRATCH_ROWS] + b * rows
    return array_at(t.book[Book.LOCAL_POOL] + place * itemsize, rows, t.values)


@njit(inline="always")
def _row(node, indptr, i):
    """First and last-plus-one entry of row `i`."""
    if node[Node.KIND] == Kind.DENSE:
        return np.uint64(i * node[Node.COLS]), np.uint64((i + 1) * node[Node.COLS])
    if node[Node.KIND] == Kind.DIAGONAL:
        return np.uint64(i), np.uint64(i + 1)
    return np.uint64(indptr[i]), np.uint64(indptr[i + 1])


@njit(inline="always")
def _column(node, indices, p):
    """Column of entry `p`."""
    if node[Node.KIND] == Kind.DENSE:
        return np.uint64(p) % np.uint64(node[Node.COLS])
    if node[Node.KIND] == Kind.DIAGONAL:
        return np.uint64(p)
    return np.uint64(indices[p])


@njit
def _balanced_row(t, node, block, blocks):
    """First row of one of `blocks` blocks with about the same number of entries each."""
    rows = node[Node.ROWS]
    if block == blocks:
        return rows
    if node[Node.KIND] != Kind.CSR:
        # Even, since dense rows are taken in pairs: each is summed in the same way in every block.
        return rows * block // blocks // 2 * 2
    wanted = node[Node.NNZ] * block // blocks
    indptr = _indptr(t, node)
    low, high = _ZERO, rows
    while low < high:
        middle = (low + high) // 2
        if indptr[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


# ---------------------------------------------------------------------------------------------
# Matrix-vector products
# ---------------------------------------------------------------------------------------------


@njit(fastmath={"reassoc", "contract"})
def _dense_matvec(first, last, cols, m, x, y):
    i, stop, size = np.uint64(first), np.uint64(last), np.uint64(cols)
    row = i * size
    # Two rows at a time while they are short; long ones are better read one after the other.
    if size <= np.uint64(128):
        while i + np.uint64(2) <= stop:
            dot_two_rows(m, row, size, x, y, i)
            i += np.uint64(2)
            row += np.uint64(2) * size
    while i < stop:
        total = m.dtype.type(0)
        for j in range(size):
            total += m[row + j] * x[j]
        y[i] = total
        row += size
        i += np.uint64(1)


@njit
def _csr_matvec(first, last, indptr, indices, m, x, y, rows, samples):
    """Rows of ``y = M x``; or of ``y[l] = M x[:, l]`` for up to eight samples, if `x` has eight.

    One function, so that a sample has the same bits in both. Four sums, since an addition waits for
    the one before; they are zero, and change nothing, in rows of fewer than four entries.
    """
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    p = np.uint64(indptr[first])
    for i in range(np.uint64(first), np.uint64(last)):
        stop = np.uint64(indptr[i + one])
        t0 = t1 = t2 = t3 = zero(x)
        while p + four <= stop:
            t0 = add_term(t0, m, p, x, np.uint64(indices[p]))
            t1 = add_term(t1, m, p + one, x, np.uint64(indices[p + one]))
            t2 = add_term(t2, m, p + two, x, np.uint64(indices[p + two]))
            t3 = add_term(t3, m, p + three, x, np.uint64(indices[p + three]))
            p += four
        total = plus(plus(t0, t1), plus(t2, t3))
        # Three more at most: a loop is slower, which the compiler unrolls as if they were many.
        if p < stop:
            total = add_term(total, m, p, x, np.uint64(indices[p]))
            if p + one < stop:
                total = add_term(total, m, p + one, x, np.uint64(indices[p + one]))
                if p + two < stop:
                    total = add_term(total, m, p + two, x, np.uint64(indices[p + two]))
        store(y, i, total, np.uint64(rows), np.uint64(samples))
        p = stop


@njit
def _dense_matvec_of_eight(first, last, cols, m, x, y, rows, samples):
    """Rows of ``y[l] = M x[:, l]`` for up to eight samples, `x` of eight; four rows at a time."""
    one, four, size = np.uint64(1), np.uint64(4), np.uint64(cols)
    i, stop = np.uint64(first), np.uint64(last)
    height, count = np.uint64(rows), np.uint64(samples)
    p0 = i * size
    while i + four <= stop:
        p1, p2, p3 = p0 + size, p0 + size + size, p0 + size + size + size
        t0 = t1 = t2 = t3 = zero(x)
        for j in range(size):
            t0 = add_fused_term(t0, m, p0 + j, x, j)
            t1 = add_fused_term(t1, m, p1 + j, x, j)
            t2 = add_fused_term(t2, m, p2 + j, x, j)
            t3 = add_fused_term(t3, m, p3 + j, x, j)
        store(y, i, t0, height, count)
        store(y, i + one, t1, height, count)
        store(y, i + one + one, t2, height, count)
        store(y, i + one + one + one, t3, height, count)
        i += four
        p0 = p3 + size
    while i < stop:
        t0 = zero(x)
        for j in range(size):
            t0 = add_fused_term(t0, m, p0 + j, x, j)
        store(y, i, t0, height, count)
        i += one
        p0 += size


@njit
def _single_matvec(first, last, indices, m, x, y):
    """As :func:`_csr_matvec`, if every row has one entry."""
    for i in range(np.uint64(first), np.uint64(last)):
        # As a sum, which is never -0.
        y[i] = m.dtype.type(0) + m[i] * x[np.uint64(indices[i])]


@njit
def _interleave(x, cols, samples, interleaved):
    """``interleaved[j, l] = x[l, j]`` for up to eight samples that lie end to end in `x`."""
    for j in range(np.uint64(cols)):
        for lane in range(np.uint64(samples)):
            interleaved[j, lane] = x[lane * np.uint64(cols) + j]
        for lane in range(np.uint64(samples), np.uint64(8)):
            interleaved[j, lane] = 0


@njit(inline="always")
def _matvec(t, node, first, last, m, x, y):
    """Rows `first` to `last` of ``y = M x``."""
    if node[Node.KIND] == Kind.DENSE:
        _dense_matvec(first, last, node[Node.COLS], m, x, y)
    elif node[Node.KIND] == Kind.DIAGONAL:
        for i in range(np.uint64(first), np.uint64(last)):
            y[i] = m[i] * x[i]
    elif node[Node.SINGLE]:
        _single_matvec(first, last, _indices(t, node), m, x, y)
    else:
        indptr, indices = _indptr(t, node), _indices(t, node)
        _csr_matvec(first, last, indptr, indices, m, x, y, node[Node.ROWS], _ONE)


@njit
def _add(first, last, y, x):
    for i in range(np.uint64(first), np.uint64(last)):
        y[i] += x[i]


@njit
def _exponent(value):
    """``floor(log2 |value|) + 1`` of a finite value other than 0."""
    return np.int64(math.frexp(value)[1])


@njit
def _ldexp(value, exponent):
    """``value·2^exponent`` for any exponent."""
    return math.ldexp(value, np.int32(min(max(exponent, -10000), 10000)))


@njit
def _scaled_matvec(t, node, first, last, m, e, x, y):
    """Rows of ``y = M diag(2^e) x``, each summed relative to its own largest term."""
    indptr, indices = _indptr(t, node), _indices(t, node)
    for i in range(first, last):
        start, stop = _row(node, indptr, i)
        top = -(1 << 60)
        for p in range(start, stop):
            j = _column(node, indices, p)
            if m[p] != 0 and x[j] != 0:
                top = max(top, _exponent(m[p]) + _exponent(x[j]) + e[j])
        total = 0.0
        for p in range(start, stop):
            j = _column(node, indices, p)
            if m[p] != 0 and x[j] != 0:
                m_mantissa, m_exponent = math.frexp(m[p])
                x_mantissa, x_exponent = math.frexp(x[j])
                total += _ldexp(
                    np.float64(m_mantissa) * x_mantissa, m_exponent + x_exponent + e[j] - top
                )
        y[i] = _ldexp(total, top) if total != 0 else 0.0


@njit(fastmath={"reassoc"})
def _finite(x, first, last):
    poison = x.dtype.type(0)
    for i in range(np.uint64(first), np.uint64(last)):
        poison += x[i] * x.dtype.type(0)
    return poison == 0


@njit
def _apply_product(t, node, b, thread, first, last, x, y):
    """Rows `first` to `last` of ``y = P x + local`` for a product; the status."""
    if not _finite(x, _ZERO, len(x)):
        return UNDECIDED
    m, e = _values(t, node, b, thread), _exponents(t, node, b, thread)
    if e[node[Node.COLS]]:
        _scaled_matvec(t, node, first, last, m, e, x, y)
    else:
        _matvec(t, node, first, last, m, x, y)
    local = _local(t, node, b, thread)
    if len(local):
        _add(first, last, y, local)
    return FINISHED if _finite(y, first, last) else UNDECIDED


@njit
def _apply_jacobian(t, node, first, last, first_sample, last_sample, left, out, thread):
    """Rows `first` to `last` of gradient `out` from gradient `left`, through a Jacobian."""
    leaf = array_at(t.book[Book.LEAVES] + node[Node.VALUES] * 2 * _WORD, 2, t.book)
    # The bits of a dense one must not depend on how samples are cut up.
    dense = node[Node.KIND] == Kind.DENSE
    samples = t.book[Book.BATCH] if dense else last_sample - first_sample
    shared = leaf[1] == 0 and samples > 2
    if shared and node[Node.KIND] != Kind.DIAGONAL and not node[Node.SINGLE]:
        # The samples share the Jacobian: read it once for eight of them.
        rows, cols = node[Node.ROWS], node[Node.COLS]
        m = array_at(leaf[0], node[Node.NNZ], t.values)
        lanes = t.book[Book.LANES]
        place = t.book[Book.INTERLEAVED] + thread * 8 * lanes * t.values.itemsize
        interleaved = eights_at(place, lanes, t.values)
        for b in range(first_sample, last_sample, 8):
            samples = min(np.int64(8), last_sample - b)
            x = array_at(_gradient(t, left, b).ctypes.data, samples * cols, t.values)
            y = array_at(_gradient(t, out, b).ctypes.data, samples * rows, t.values)
            _interleave(x, cols, samples, interleaved)
            if dense:
                _dense_matvec_of_eight(first, last, cols, m, interleaved, y, rows, samples)
            else:
                indptr, indices = _indptr(t, node), _indices(t, node)
                _csr_matvec(first, last, indptr, indices, m, interleaved, y, rows, samples)
    elif (
        node[Node.KIND] == Kind.DIAGONAL
        and last - first == node[Node.ROWS]
        and leaf[1] == node[Node.ROWS] * t.values.itemsize
    ):
        # The samples lie end to end: one long diagonal.
        rows = node[Node.ROWS]
        size = (last_sample - first_sample) * rows
        m = array_at(leaf[0] + first_sample * leaf[1], size, t.values)
        x = array_at(_gradient(t, left, first_sample).ctypes.data, size, t.values)
        y = array_at(_gradient(t, out, first_sample).ctypes.data, size, t.values)
        for i in range(np.uint64(size)):
            y[i] = m[i] * x[i]
    else:
        rows, cols, nnz = node[Node.ROWS], node[Node.COLS], node[Node.NNZ]
        m_at = leaf[0] + first_sample * leaf[1]
        x_at = np.int64(_gradient(t, left, first_sample).ctypes.data)
        y_at = np.int64(_gradient(t, out, first_sample).ctypes.data)
        for _ in range(first_sample, last_sample):
            m = array_at(m_at, nnz, t.values)
            x, y = array_at(x_at, cols, t.values), array_at(y_at, rows, t.values)
            _matvec(t, node, first, last, m, x, y)
            m_at += leaf[1]
            x_at += cols * t.values.itemsize
            y_at += rows * t.values.itemsize
    if t.book[Book.LOCAL]:
        for b in range(first_sample, last_sample):
            local = _local(t, node, b, thread)
            if len(local):
                _add(first, last, _gradient(t, out, b), local)


# ---------------------------------------------------------------------------------------------
# Matrix-matrix products
# ---------------------------------------------------------------------------------------------


@njit(fastmath={"contract"})
def _add_dense_row(row, alpha, b, start, cols):
    for j in range(np.uint64(cols)):
        row[j] += alpha * b[start + j]


@njit(fastmath={"contract"})
def _add_csr_row(row, alpha, b, indices, start, stop):
    for q in range(start, stop):
        row[np.uint64(indices[q])] += alpha * b[q]


@njit
def _add_product_row(t, row, i, a_node, a, b_node, b):
    """Add row `i` of ``A B`` to `row`, neither of them diagonal."""
    a_indices, b_indptr, b_indices = _indices(t, a_node), _indptr(t, b_node), _indices(t, b_node)
    start, stop = _row(a_node, _indptr(t, a_node), i)
    cols = np.uint64(b_node[Node.COLS])
    a_dense, b_dense = a_node[Node.KIND] == Kind.DENSE, b_node[Node.KIND] == Kind.DENSE
    for p in range(start, stop):
        k = p - start if a_dense else np.uint64(a_indices[p])
        if b_dense:
            _add_dense_row(row, a[p], b, k * cols, cols)
        else:
            last = np.uint64(b_indptr[k + np.uint64(1)])
            _add_csr_row(row, a[p], b, b_indices, np.uint64(b_indptr[k]), last)


@njit
def _multiply(t, a_node, a, b_node, b, c_node, c, c_bits, first, last, thread):
    """Rows `first` to `last` of ``C = A B``, plainly; how their range is.

    The pattern of `C` holds every entry that the product meets, so a row needs no hash and no sort:
    it is added up in an accumulator with a place for every column, and picked up at the columns
    that `C` has.
    """
    size = t.book[Book.ACCUMULATOR]
    place = t.book[Book.ACCUMULATORS] + thread * size * t.values.itemsize
    accumulator = array_at(place, size, t.values)
    a_indices, c_indptr, c_indices = _indices(t, a_node), _indptr(t, c_node), _indices(t, c_node)
    cols = c_node[Node.COLS]
    if first >= last:
        return _IN_BAND
    highest, lowest = _ZERO, t.book[Book.INFINITY]
    unchecked, stop = _row(c_node, c_indptr, first)
    stop = unchecked
    for i in range(first, last):
        start, stop = _row(c_node, c_indptr, i)
        if a_node[Node.KIND] == Kind.DIAGONAL:
            alpha = a[i]
            for q in range(start, stop):
                c[q] = alpha * b[q]
        elif b_node[Node.KIND] == Kind.DIAGONAL:
            for p in range(start, stop):
                c[p] = a[p] * b[_column(a_node, a_indices, p)]
        elif c_node[Node.KIND] == Kind.DENSE:
            row = array_at(c.ctypes.data + np.int64(start) * c.itemsize, cols, t.values)
            for j in range(np.uint64(cols)):
                row[j] = 0
            _add_product_row(t, row, i, a_node, a, b_node, b)
        else:
            _add_product_row(t, accumulator, i, a_node, a, b_node, b)
            for q in range(start, stop):
                j = _column(c_node, c_indices, q)
                c[q] = accumulator[j]
                accumulator[j] = 0
        # Checked while it is in the cache, but not in pieces that are too small to vectorise.
        if stop - unchecked > np.uint64(1024):
            highest, lowest = _extremes(c_bits, unchecked, stop, highest, lowest)
            unchecked = stop
    highest, lowest = _extremes(c_bits, unchecked, stop, highest, lowest)
    return _range(t, highest, lowest)


# ---------------------------------------------------------------------------------------------
# Range
# ---------------------------------------------------------------------------------------------


@njit
def _extremes(bits, start, stop, highest, lowest):
    """Bit patterns of the largest magnitude and of the smallest other than 0."""
    mask = 0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF
    for p in range(np.uint64(start), np.uint64(stop)):
        magnitude = np.int64(bits[p]) & mask
        highest = max(highest, magnitude)
        lowest = min(lowest, magnitude if magnitude > 0 else 0x7FFFFFFFFFFFFFFF)
    return highest, lowest


@njit
def _range(t, highest, lowest):
    if highest >= t.book[Book.INFINITY]:
        return UNDECIDED
    if highest > t.book[Book.HIGH] or lowest < t.book[Book.LOW]:
        return _OUT_OF_BAND
    return _IN_BAND


@njit
def _normalise(t, node, values, e):
    """Bring every column with an entry outside the band to the target; by how much is in `e`.

    Returns the exponent of the smallest entry then, and whether bits of an entry were lost.
    """
    indices = _indices(t, node)
    cols = node[Node.COLS]
    largest = np.zeros(cols, values.dtype)
    smallest = np.full(cols, np.inf, values.dtype)
    for p in range(node[Node.NNZ]):
        if values[p] != 0:
            j = _column(node, indices, p)
            largest[j] = max(largest[j], abs(values[p]))
            smallest[j] = min(smallest[j], abs(values[p]))
    shift = np.zeros(cols, np.int64)
    least = t.book[Book.TARGET]
    e[cols] = 0
    for j in range(cols):
        if largest[j] == 0:
            e[j] = 0
            continue
        if (
            _exponent(largest[j]) > t.book[Book.HIGH_EXPONENT]
            or _exponent(smallest[j]) < t.book[Book.LOW_EXPONENT]
        ):
            shift[j] = _exponent(largest[j]) - t.book[Book.TARGET]
        least = min(least, _exponent(smallest[j]) - shift[j])
        # An entry may be outside the band still, even if the exponents cancel.
        if e[j] != 0 or shift[j] != 0:
            e[cols] = 1
    lost = False
    if e[cols]:
        for p in range(node[Node.NNZ]):
            j = _column(node, indices, p)
            if shift[j] != 0 and values[p] != 0:
                lost = lost or _loses_bits(t, _exponent(values[p]) + e[j], e[j] + shift[j])
                values[p] = _ldexp(values[p], -shift[j])
        for j in range(cols):
            e[j] += shift[j]
    return least, lost


@njit
def _loses_bits(t, exponent, by):
    """Whether an entry that some gradient may show is no normal number once scaled by ``2^-by``."""
    return exponent - by < t.book[Book.NORMAL] and exponent > t.book[Book.NEGLIGIBLE]


@njit
def _mark_empty_columns(t, node, values, e):
    """Columns that are zero have no exponent: the rows that they multiply do not count."""
    indices, cols = _indices(t, node), node[Node.COLS]
    empty = np.ones(cols, np.bool_)
    for p in range(node[Node.NNZ]):
        if values[p] != 0:
            empty[_column(node, indices, p)] = False
    for j in range(cols):
        if empty[j]:
            e[j] = _EMPTY


@njit
def _prescale(t, node, values, e, by):
    """``diag(2^by) M diag(2^e)`` as new mantissas, the columns at the target, and new exponents.

    Returns the exponent of the smallest of the mantissas, too, as it would be without rounding.
    """
    indptr, indices = _indptr(t, node), _indices(t, node)
    cols = node[Node.COLS]
    none = -(1 << 60)
    top = np.full(cols, none, np.int64)
    for k in range(node[Node.ROWS]):
        if by[k] == _EMPTY:
            continue
        start, stop = _row(node, indptr, k)
        for q in range(start, stop):
            if values[q] != 0:
                j = _column(node, indices, q)
                top[j] = max(top[j], _exponent(values[q]) + by[k] - t.book[Book.TARGET])
    scaled = np.zeros_like(values)
    least = t.book[Book.TARGET]
    for k in range(node[Node.ROWS]):
        if by[k] == _EMPTY:
            continue
        start, stop = _row(node, indptr, k)
        for q in range(start, stop):
            if values[q] != 0:
                j = _column(node, indices, q)
                least = min(least, _exponent(values[q]) + by[k] - top[j])
                scaled[q] = _ldexp(values[q], by[k] - top[j])
    scaled_e = e.copy()
    for j in range(cols):
        scaled_e[j] = e[j] + top[j] if top[j] != none else 0
    return scaled, scaled_e, least


@njit
def _own_exponents(t, node, b, thread):
    """Exponents of a product, or zeros for a Jacobian."""
    if node[Node.STORE] == Store.CALLER:
        return np.zeros(node[Node.COLS] + 1, np.int32)
    return _exponents(t, node, b, thread)


# ---------------------------------------------------------------------------------------------
# One product
# ---------------------------------------------------------------------------------------------


@njit
def _multiply_scaled(t, left, right, out, b, thread):
    """The product of two nodes of any range, not normalised; how its range is."""
    y = _values(t, right, b, thread).copy()
    y_e = _own_exponents(t, right, b, thread).copy()
    y_least, _ = _normalise(t, right, y, y_e)
    _mark_empty_columns(t, right, y, y_e)
    x, x_e = _values(t, left, b, thread), _own_exponents(t, left, b, thread)
    x, x_e, x_least = _prescale(t, left, x, x_e, y_e)
    e = _exponents(t, out, b, thread)
    for j in range(len(e)):
        e[j] = x_e[j]
    if min(x_least, y_least, x_least + y_least) <= t.book[Book.NORMAL]:
        # An entry, or a product of two, might be no normal number.
        return _multiply_apart(t, left, right, out, b, thread)
    c, bits = _values(t, out, b, thread), _bits(t, out, b, thread)
    return _multiply(t, right, y, left, x, out, c, bits, _ZERO, out[Node.ROWS], thread)


@njit
def _multiply_apart(t, left, right, out, b, thread):
    """The same for entries however far apart, each summed relative to its own largest term.

    The exponents of the product are those that `_prescale` found.
    """
    indptr, indices = _indptr(t, left), _indices(t, left)
    a_indptr, a_indices = _indptr(t, right), _indices(t, right)
    c_indptr, c_indices = _indptr(t, out), _indices(t, out)
    x, x_e = _values(t, left, b, thread), _own_exponents(t, left, b, thread)
    y, y_e = _values(t, right, b, thread), _own_exponents(t, right, b, thread)
    c, e = _values(t, out, b, thread), _exponents(t, out, b, thread)
    cols, none = out[Node.COLS], -(1 << 60)
    totals, tops = np.zeros(cols, np.float64), np.full(cols, none, np.int64)
    for i in range(out[Node.ROWS]):
        start, stop = _row(right, a_indptr, i)
        for summing in (False, True):
            for p in range(start, stop):
                if y[p] == 0:
                    continue
                k = _column(right, a_indices, p)
                y_mantissa, y_exponent = math.frexp(y[p])
                first, last = _row(left, indptr, k)
                for q in range(first, last):
                    if x[q] == 0:
                        continue
                    j = _column(left, indices, q)
                    x_mantissa, x_exponent = math.frexp(x[q])
                    power = y_exponent + y_e[k] + x_exponent + x_e[j]
                    if summing:
                        mantissa = np.float64(y_mantissa) * x_mantissa
                        totals[j] += _ldexp(mantissa, power - tops[j])
                    else:
                        tops[j] = max(tops[j], power)
        start, stop = _row(out, c_indptr, i)
        for q in range(start, stop):
            j = _column(out, c_indices, q)
            c[q] = 0
            if totals[j] != 0:
                c[q] = _ldexp(totals[j], tops[j] - e[j])
                if _loses_bits(t, _exponent(totals[j]) + tops[j], np.int64(e[j])):
                    return UNDECIDED
            totals[j], tops[j] = 0, none
    return _OUT_OF_BAND


@njit
def _operands(t, left, right, b, thread, block, blocks):
    """How the range of both operands is, in one block of their entries."""
    worst = _IN_BAND
    for node in (left, right):
        if node[Node.STORE] == Store.CALLER:
            nnz = node[Node.NNZ]
            highest, lowest = _extremes(
                _bits(t, node, b, thread),
                nnz * block // blocks,
                nnz * (block + 1) // blocks,
                _ZERO,
                t.book[Book.INFINITY],
            )
            found = _range(t, highest, lowest)
            if found == UNDECIDED:
                return UNDECIDED
            worst = max(worst, found)
        elif _exponents(t, node, b, thread)[node[Node.COLS]]:
            worst = _OUT_OF_BAND
    return worst


@njit
def _multiply_rows(t, left, right, out, b, thread, block, blocks):
    """A block of the rows of a product whose operands are in the band; how its range is."""
    x, y = _values(t, left, b, thread), _values(t, right, b, thread)
    c, bits = _values(t, out, b, thread), _bits(t, out, b, thread)
    first = _balanced_row(t, right, block, blocks)
    last = _balanced_row(t, right, block + 1, blocks)
    return _multiply(t, right, y, left, x, out, c, bits, first, last, thread)


@njit
def _settle(t, left, right, out, b, thread, operands, result):
    """What follows the rows of a product: exponents where needed, local gradients; the status."""
    if operands == _OUT_OF_BAND:
        result = _multiply_scaled(t, left, right, out, b, thread)
        in_band = False
    else:
        e = _exponents(t, out, b, thread)
        for j in range(len(e)):
            e[j] = 0
        in_band = result == _IN_BAND
    if operands == UNDECIDED or result == UNDECIDED:
        return UNDECIDED
    if not in_band:
        e = _exponents(t, out, b, thread)
        _, lost = _normalise(t, out, _values(t, out, b, thread), e)
        if lost:
            return UNDECIDED
    if t.book[Book.LOCAL]:
        return _product_local(t, left, right, out, b, thread)
    return FINISHED


@njit
def _product_local(t, left, right, out, sample, thread):
    """Local gradients of a product: ``B·local(A) + local(B)``, with `A` the earlier node.

    Those of one sample; or of all, if the samples share the product.
    """
    shared = out[Node.BATCHED] == 0
    first = _ZERO if shared else sample
    last = t.book[Book.BATCH] if shared else sample + 1
    rows = out[Node.ROWS]
    for b in range(first, last):
        x, y = _local(t, left, b, thread), _local(t, out, b, thread)
        if len(x) and right[Node.STORE] != Store.CALLER:
            if _apply_product(t, right, b, thread, _ZERO, rows, x, y) != FINISHED:
                return UNDECIDED
            continue
        if len(x):
            _matvec(t, right, _ZERO, rows, _values(t, right, b, thread), x, y)
        else:
            for i in range(rows):
                y[i] = 0
        local = _local(t, right, b, thread)
        if len(local):
            _add(_ZERO, rows, y, local)
        if not _finite(y, _ZERO, rows):
            return UNDECIDED
    return FINISHED


@njit
def _product(t, op, b, thread):
    """One product for sample `b`; the status."""
    left, right, out = _node(t, op[Op.LEFT]), _node(t, op[Op.RIGHT]), _node(t, op[Op.OUT])
    operands = _operands(t, left, right, b, thread, _ZERO, _ONE)
    result = _IN_BAND
    if operands == _IN_BAND:
        result = _multiply_rows(t, left, right, out, b, thread, _ZERO, _ONE)
    return _settle(t, left, right, out, b, thread, operands, result)


# ---------------------------------------------------------------------------------------------
# Units
# ---------------------------------------------------------------------------------------------


@njit
def _vector_operation(t, op, block, blocks, first_sample, last_sample, thread):
    """A block of the rows of one gradient, for a range of samples; the status."""
    node = _node(t, op[Op.RIGHT])
    first = _balanced_row(t, node, block, blocks)
    last = _balanced_row(t, node, block + 1, blocks)
    left, out = op[Op.LEFT], op[Op.OUT]
    if node[Node.STORE] == Store.CALLER:
        _apply_jacobian(t, node, first, last, first_sample, last_sample, left, out, thread)
        if t.book[Book.CHECKED]:
            for b in range(first_sample, last_sample):
                if not _finite(_gradient(t, out, b), first, last):
                    return UNDECIDED
        return FINISHED
    for b in range(first_sample, last_sample):
        x, y = _gradient(t, left, b), _gradient(t, out, b)
        if _apply_product(t, node, b, thread, first, last, x, y) != FINISHED:
            return UNDECIDED
    return FINISHED


@njit
def _run_range(t, run, block, blocks):
    """Operations of a run, and the samples of a block of it."""
    bounds = array_at(t.book[Book.RUNS] + run * 2 * _WORD, 2, t.book)
    last_op = _op(t, bounds[1] - 1)
    width = t.book[Book.BATCH]
    if not last_op[Op.VECTOR] and not _node(t, last_op[Op.OUT])[Node.BATCHED]:
        width = _ONE
    return bounds[0], bounds[1], width * block // blocks, width * (block + 1) // blocks


@njit
def _vector_run(t, run, block, blocks, thread):
    """One run of vector operations, for one block of the samples; the status."""
    first_op, last_op, first, last = _run_range(t, run, block, blocks)
    for i in range(first_op, last_op):
        status = _vector_operation(t, _op(t, i), _ZERO, _ONE, first, last, thread)
        if status != FINISHED:
            return status
    return FINISHED


@njit
def _product_run(t, run, block, blocks, thread):
    """One run of products, for one block of the samples; the status."""
    first_op, last_op, first, last = _run_range(t, run, block, blocks)
    # Sample by sample, so that the scratch of this thread holds one.
    for b in range(first, last):
        for i in range(first_op, last_op):
            status = _product(t, _op(t, i), b, thread)
            if status != FINISHED:
                return status
    return FINISHED


@njit
def _vector_unit(t, stage, unit, thread):
    """One unit of a stage of vector operations; the status."""
    blocks = stage[Stage.BLOCKS]
    run, block = unit // blocks, unit % blocks
    if stage[Stage.KIND] == Work.RUNS:
        return _vector_run(t, stage[Stage.FIRST] + run, block, blocks, thread)
    op = _op(t, stage[Stage.FIRST])
    return _vector_operation(t, op, block, blocks, _ZERO, t.book[Book.BATCH], thread)


@njit
def _product_unit(t, stage, unit, thread):
    """One unit of a stage of products; the status."""
    blocks = stage[Stage.BLOCKS]
    run, block = unit // blocks, unit % blocks
    if stage[Stage.KIND] == Work.RUNS:
        return _product_run(t, stage[Stage.FIRST] + run, block, blocks, thread)
    op = _op(t, stage[Stage.FIRST])
    left, right, out = _node(t, op[Op.LEFT]), _node(t, op[Op.RIGHT]), _node(t, op[Op.OUT])
    b = stage[Stage.SAMPLE]
    if stage[Stage.KIND] == Work.CHECK:
        _report(t, Book.OPERANDS, _operands(t, left, right, b, thread, block, blocks))
        return FINISHED
    operands = _reported(t, Book.OPERANDS)
    if stage[Stage.KIND] == Work.MULTIPLY:
        if operands == _IN_BAND:
            found = _multiply_rows(t, left, right, out, b, thread, block, blocks)
            _report(t, Book.RESULT, found)
        return FINISHED
    result = _reported(t, Book.RESULT)
    t.book[Book.OPERANDS] = 0
    t.book[Book.RESULT] = 0
    return _settle(t, left, right, out, b, thread, operands, result)


@njit
def _report(t, slot, found):
    """Tell the threads of a later stage what this one found."""
    if found != _IN_BAND:
        fetch_add(t.book, slot, 1 if found == UNDECIDED else 1 << 32)


@njit
def _reported(t, slot):
    """The worst that was reported."""
    reports = load(t.book, slot)
    if reports & 0xFFFFFFFF:
        return UNDECIDED
    return _OUT_OF_BAND if reports else _IN_BAND


@njit
def _makes_vectors(t, stage, unit):
    if stage[Stage.KIND] == Work.RUNS:
        run = stage[Stage.FIRST] + unit // stage[Stage.BLOCKS]
        return _op(t, array_at(t.book[Book.RUNS] + run * 2 * _WORD, 2, t.book)[0])[Op.VECTOR] != 0
    return stage[Stage.KIND] == Work.VECTOR


# ---------------------------------------------------------------------------------------------
# The whole run
# ---------------------------------------------------------------------------------------------


@njit
def _claim(t, at):
    """The next unit and its stage, which may start now; -1 if none is left, or the run failed.

    `at` is a stage at or before it.
    """
    first_unit = array_at(t.book[Book.FIRST_UNIT], t.book[Book.STAGE_COUNT] + 1, t.book)
    while True:
        unit = fetch_add(t.book, Book.NEXT, 1)
        if unit >= t.book[Book.UNITS]:
            return _ZERO - 1, at
        while unit >= first_unit[at + 1]:
            at += 1
        spins = 0
        while load(t.book, Book.DONE) < first_unit[at]:
            relax(spins)
            spins += 1
        if load(t.book, Book.STATUS) == FINISHED:
            return unit - first_unit[at], at
        fetch_add(t.book, Book.DONE, 1)


@njit
def _complete(t, status):
    if status != FINISHED:
        fetch_add(t.book, Book.STATUS, status)
    fetch_add(t.book, Book.DONE, 1)


def abort(t: Tables) -> None:
    """Let no unit start and nobody wait: a thread has failed and will not do its own."""
    t.book[Book.STATUS] = ABORTED
    t.book[Book.NEXT] = t.book[Book.DONE] = 1 << 62


@njit(nogil=True, cache=True)
def run_vectors(t, thread):
    """Work on a plan without products as thread number `thread` until no unit is left.

    The same as :func:`run`, which takes longer to compile.
    """
    at = _ZERO
    while True:
        unit, at = _claim(t, at)
        if unit < 0:
            return
        stage = array_at(t.book[Book.STAGES] + at * Stage.WIDTH * _WORD, Stage.WIDTH, t.book)
        _complete(t, _vector_unit(t, stage, unit, thread))


@njit(nogil=True, cache=True)
def run(t, thread):
    """Work on a plan as thread number `thread` until no unit is left."""
    at = _ZERO
    while True:
        unit, at = _claim(t, at)
        if unit < 0:
            return
        stage = array_at(t.book[Book.STAGES] + at * Stage.WIDTH * _WORD, Stage.WIDTH, t.book)
        if _makes_vectors(t, stage, unit):
            _complete(t, _vector_unit(t, stage, unit, thread))
        else:
            _complete(t, _product_unit(t, stage, unit, thread))
