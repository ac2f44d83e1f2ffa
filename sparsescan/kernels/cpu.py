"""The CPU engine: one compiled call runs a whole plan.

A plan is a sequence of *stages*. The units of a stage do not depend on each other; a stage starts
when every unit before it is done. Threads claim units from a counter, so a thread that comes late,
or never, delays nobody, and the arithmetic of a unit does not depend on who claims it: the result
has the same bits whatever the number of threads.

Range. Products of many Jacobians leave the range of floating point where a gradient would not, so
a matrix node is stored as ``M·diag(2^e)``: mantissas `M`, and one exponent for each column, which
evolves independently of the others. Scaling by a power of two is exact. Nodes whose entries lie
within the *band* have no exponents and take the plain kernels; only what leaves the band is
normalised. A value that is not finite stops the run with the status `NOT_FINITE`, and the caller
lets the linear scan decide what it reaches.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ._memory import array_at, fetch_add, load, relax

__all__ = [
    "BAND",
    "FINISHED",
    "NOT_FINITE",
    "Kind",
    "Node",
    "Op",
    "Size",
    "Stage",
    "State",
    "Store",
    "Tables",
    "Work",
    "multiply",
    "run",
]

# Statuses of a run.
FINISHED, NOT_FINITE = 0, 1

# A plain literal would compile each kernel that takes it a second time, for that literal.
_ZERO, _ONE = np.int64(0), np.int64(1)

# What a check of the range finds: one of these, or NOT_FINITE.
_IN_BAND, _OUT_OF_BAND = 0, 2


class Kind(IntEnum):
    """Which kernels a matrix gets."""

    DENSE, CSR, DIAGONAL = range(3)


class Store(IntEnum):
    """Where the values of a node are: with the caller, in the pool, or in a thread's two slots."""

    CALLER, POOL, SCRATCH = range(3)


class Node(IntEnum):
    """Columns of the node table: one row for each Jacobian, then one for each product."""

    KIND, ROWS, COLS, NNZ = range(4)
    INDPTR, INDICES = 4, 5  # addresses; not followed for dense and diagonal nodes
    STORE, BATCHED = 6, 7
    VALUES = 8  # the Jacobian, the place in the pool, or the slot
    EXPONENTS, FLAGS, LOCAL = 9, 10, 11  # places in those arrays


class Op(IntEnum):
    """Columns of the operation table: ``out = left ◇ right``.

    Of a vector operation, `LEFT` and `OUT` number gradients; all else numbers nodes.
    """

    VECTOR, LEFT, RIGHT, OUT = range(4)


class Stage(IntEnum):
    """Columns of the stage table. A stage has `BLOCKS` units, for each of its runs."""

    KIND, FIRST, BLOCKS, SAMPLE = range(4)


class Work(IntEnum):
    """Kinds of a stage: whole runs, or one operation with its rows shared out."""

    # Runs from FIRST on, their samples in blocks.
    RUNS = 0
    # The operation FIRST makes a gradient, for all samples.
    VECTOR = 1
    # The operation FIRST makes a product for one SAMPLE, in three stages.
    CHECK, MULTIPLY, SETTLE = 2, 3, 4


class State(IntEnum):
    """Slots of the state array, each on a cache line of its own."""

    NEXT, DONE, STATUS, OPERANDS, RESULT = range(0, 80, 16)


class Size(IntEnum):
    """Slots of the size array."""

    BATCH, LOCAL, SCRATCH_NNZ, SCRATCH_COLS, SCRATCH_ROWS = range(5)
    # Where the scratch of thread 0 starts in the pool, the exponents, the flags, the local pool.
    SCRATCH_VALUES, SCRATCH_EXPONENTS, SCRATCH_FLAGS, SCRATCH_LOCAL = range(5, 9)


class Tables(NamedTuple):
    """All that a run reads and writes; see :mod:`sparsescan.plan`, which fills it."""

    state: NDArray[np.int64]
    sizes: NDArray[np.int64]
    first_unit: NDArray[np.int64]  # (stages + 1,)
    stages: NDArray[np.int64]  # (stages, 4)
    runs: NDArray[np.int64]  # (runs, 2): first and last-plus-one operation
    ops: NDArray[np.int64]  # (operations, 4)
    nodes: NDArray[np.int64]  # (nodes, 12)
    leaves: NDArray[np.int64]  # (n, 2): address of each Jacobian's values, bytes between samples
    local_grads: NDArray[np.int64]  # (n + 1,): address of each local gradient, or 0
    offsets: NDArray[np.int64]  # (n + 2,): where each gradient starts in `out`, for one sample
    out: NDArray[np.floating]  # the gradients
    pool: NDArray[np.floating]  # values of the products
    local_pool: NDArray[np.floating]  # what the local gradients inside a product add up to
    exponents: NDArray[np.int32]
    flags: NDArray[np.uint8]  # does a node, for a sample, have exponents
    accumulators: NDArray[np.floating]  # (threads, cols), zero between uses
    band: NDArray[np.int64]
    index_like: NDArray[np.integer]  # empty, of the dtype of the index arrays
    bits_like: NDArray[np.integer]  # empty, of the integer dtype as wide as a value


def _band(dtype: type, high: int, low: int) -> NDArray[np.int64]:
    """Bit patterns of infinity, ``2^high`` and ``2^low``; then the two exponents."""
    bits = np.int32 if dtype is np.float32 else np.int64
    values = np.array([np.inf, 2.0**high, 2.0**low], dtype).view(bits)
    return np.array([*values, high, low], np.int64)


# Two nodes in the band multiply without overflow and, but for entries far below the largest of
# their column, without underflow.
BAND = {
    np.dtype(np.float32): _band(np.float32, 48, -40),
    np.dtype(np.float64): _band(np.float64, 400, -400),
}


# ---------------------------------------------------------------------------------------------
# Matrix-vector products
# ---------------------------------------------------------------------------------------------


@njit(fastmath={"reassoc", "contract"})
def _dense_matvec(first, last, cols, m, x, y):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        total = m.dtype.type(0)
        row = i * cols
        for j in range(cols):
            total += m[row + j] * x[j]
        y[i] = total


@njit
def _csr_matvec(first, last, indptr, indices, m, x, y):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        total = m.dtype.type(0)
        for p in range(indptr[i], indptr[i + 1]):
            total += m[p] * x[indices[p]]
        y[i] = total


@njit
def _matvec(node, first, last, m, x, y, index_like):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of ``y = M x``."""
    if node[Node.KIND] == Kind.DENSE:
        _dense_matvec(first, last, node[Node.COLS], m, x, y)
    elif node[Node.KIND] == Kind.DIAGONAL:
        for i in range(first, last):
            y[i] = m[i] * x[i]
    else:
        indptr = array_at(node[Node.INDPTR], node[Node.ROWS] + 1, index_like)
        indices = array_at(node[Node.INDICES], node[Node.NNZ], index_like)
        _csr_matvec(first, last, indptr, indices, m, x, y)


@njit
def _exponent(value):  # type: ignore[no-untyped-def]
    """``floor(log2 |value|) + 1`` of a finite value other than 0."""
    return math.frexp(value)[1]


@njit
def _scaled_matvec(node, first, last, m, e, x, y, index_like):  # type: ignore[no-untyped-def]
    """``y = M diag(2^e) x``, each row summed relative to its own largest term."""
    indptr = array_at(node[Node.INDPTR], node[Node.ROWS] + 1, index_like)
    indices = array_at(node[Node.INDICES], node[Node.NNZ], index_like)
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
                mantissa_m, exponent_m = math.frexp(m[p])
                mantissa_x, exponent_x = math.frexp(x[j])
                total += _ldexp(mantissa_m * mantissa_x, exponent_m + exponent_x + e[j] - top)
        y[i] = _ldexp(total, top) if total != 0 else 0.0


# ---------------------------------------------------------------------------------------------
# Matrix-matrix products
# ---------------------------------------------------------------------------------------------


@njit(inline="always")
def _row(node, indptr, i):  # type: ignore[no-untyped-def]
    """First and last-plus-one entry of row `i`."""
    kind = node[Node.KIND]
    if kind == Kind.DENSE:
        return i * node[Node.COLS], (i + 1) * node[Node.COLS]
    if kind == Kind.DIAGONAL:
        return i, i + 1
    return np.int64(indptr[i]), np.int64(indptr[i + 1])


@njit(inline="always")
def _column(node, indices, p):  # type: ignore[no-untyped-def]
    """Column of entry `p`."""
    kind = node[Node.KIND]
    if kind == Kind.DENSE:
        return p % node[Node.COLS]
    if kind == Kind.DIAGONAL:
        return p
    return np.int64(indices[p])


@njit(fastmath={"contract"})
def _add_dense_row(acc, alpha, b, start, cols):  # type: ignore[no-untyped-def]
    for j in range(cols):
        acc[j] += alpha * b[start + j]


@njit(fastmath={"contract"})
def _add_csr_row(acc, alpha, b, indices, start, stop):  # type: ignore[no-untyped-def]
    for q in range(start, stop):
        acc[indices[q]] += alpha * b[q]


@njit
def _add_product_row(acc, i, a_node, a_indptr, a_indices, a, b_node, b_indptr, b_indices, b):  # type: ignore[no-untyped-def]
    """Add row `i` of ``A B`` to `acc`, neither of them diagonal."""
    start, stop = _row(a_node, a_indptr, i)
    cols = b_node[Node.COLS]
    dense = a_node[Node.KIND] == Kind.DENSE
    for p in range(start, stop):
        k = p - start if dense else np.int64(a_indices[p])
        if b_node[Node.KIND] == Kind.DENSE:
            _add_dense_row(acc, a[p], b, k * cols, cols)
        else:
            _add_csr_row(acc, a[p], b, b_indices, b_indptr[k], b_indptr[k + 1])


@njit
def multiply(a_node, a, b_node, b, c_node, c, first, last, acc, bits, band, index_like):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of ``C = A B``, plainly; how their range is.

    The pattern of `C` holds every entry that the product meets, so a row needs no hash and no sort:
    it is added up in `acc`, which has a place for every column, and picked up at the columns that
    `C` has. `acc` is zero before and after.
    """
    a_indptr = array_at(a_node[Node.INDPTR], a_node[Node.ROWS] + 1, index_like)
    a_indices = array_at(a_node[Node.INDICES], a_node[Node.NNZ], index_like)
    b_indptr = array_at(b_node[Node.INDPTR], b_node[Node.ROWS] + 1, index_like)
    b_indices = array_at(b_node[Node.INDICES], b_node[Node.NNZ], index_like)
    c_indptr = array_at(c_node[Node.INDPTR], c_node[Node.ROWS] + 1, index_like)
    c_indices = array_at(c_node[Node.INDICES], c_node[Node.NNZ], index_like)
    cols = c_node[Node.COLS]
    highest, lowest = _ZERO, band[0]
    unchecked = _row(c_node, c_indptr, first)[0]
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
            row = c[start:stop]
            for j in range(cols):
                row[j] = 0
            _add_product_row(
                row, i, a_node, a_indptr, a_indices, a, b_node, b_indptr, b_indices, b
            )
        else:
            _add_product_row(
                acc, i, a_node, a_indptr, a_indices, a, b_node, b_indptr, b_indices, b
            )
            for q in range(start, stop):
                j = _column(c_node, c_indices, q)
                c[q] = acc[j]
                acc[j] = 0
        # Checked while it is in the cache, but not in pieces that are too small to vectorise.
        if stop - unchecked > 1024:
            highest, lowest = _extremes(bits, unchecked, stop, highest, lowest)
            unchecked = stop
    highest, lowest = _extremes(bits, unchecked, stop, highest, lowest)
    return _range(highest, lowest, band)


# ---------------------------------------------------------------------------------------------
# Range
# ---------------------------------------------------------------------------------------------


@njit
def _extremes(bits, start, stop, highest, lowest):  # type: ignore[no-untyped-def]
    """Bit patterns of the largest magnitude and of the smallest other than 0."""
    mask = 0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF
    for p in range(start, stop):
        magnitude = np.int64(bits[p]) & mask
        highest = max(highest, magnitude)
        lowest = min(lowest, magnitude if magnitude > 0 else 0x7FFFFFFFFFFFFFFF)
    return highest, lowest


@njit
def _range(highest, lowest, band):  # type: ignore[no-untyped-def]
    if highest >= band[0]:
        return NOT_FINITE
    if highest > band[1] or lowest < band[2]:
        return _OUT_OF_BAND
    return _IN_BAND


@njit
def _check(bits, start, stop, band):  # type: ignore[no-untyped-def]
    highest, lowest = _extremes(bits, start, stop, _ZERO, band[0])
    return _range(highest, lowest, band)


@njit
def _ldexp(value, exponent):  # type: ignore[no-untyped-def]
    """``value·2^exponent`` for any int64 exponent."""
    return math.ldexp(value, np.int32(min(max(exponent, -10000), 10000)))


@njit
def _normalise(node, values, e, band, index_like):  # type: ignore[no-untyped-def]
    """Bring every column whose largest entry is outside the band to about 1, and note it in `e`.

    Returns whether any column has an exponent now.
    """
    indices = array_at(node[Node.INDICES], node[Node.NNZ], index_like)
    cols = node[Node.COLS]
    largest = np.zeros(cols, values.dtype)
    for p in range(node[Node.NNZ]):
        j = _column(node, indices, p)
        largest[j] = max(largest[j], abs(values[p]))
    shift = np.zeros(cols, np.int64)
    scaled = False
    for j in range(cols):
        if largest[j] > 0:
            exponent = _exponent(largest[j])
            if exponent > band[3] or exponent < band[4]:
                shift[j] = exponent
                e[j] += exponent
        if e[j] != 0:
            scaled = True
    if scaled:
        for p in range(node[Node.NNZ]):
            j = _column(node, indices, p)
            if shift[j] != 0:
                values[p] = _ldexp(values[p], -shift[j])
    return scaled


@njit
def _prescale(node, b, b_e, a_e, index_like):  # type: ignore[no-untyped-def]
    """``diag(2^a_e) B diag(2^b_e)`` as a new `B`, its columns at most 1, and new exponents."""
    indptr = array_at(node[Node.INDPTR], node[Node.ROWS] + 1, index_like)
    indices = array_at(node[Node.INDICES], node[Node.NNZ], index_like)
    cols = node[Node.COLS]
    none = -(1 << 60)
    top = np.full(cols, none, np.int64)
    for k in range(node[Node.ROWS]):
        start, stop = _row(node, indptr, k)
        for q in range(start, stop):
            if b[q] != 0:
                j = _column(node, indices, q)
                top[j] = max(top[j], _exponent(b[q]) + a_e[k])
    scaled = np.zeros_like(b)
    for k in range(node[Node.ROWS]):
        start, stop = _row(node, indptr, k)
        for q in range(start, stop):
            if b[q] != 0:
                j = _column(node, indices, q)
                scaled[q] = _ldexp(b[q], a_e[k] - top[j])
    e = np.zeros(cols, np.int32)
    for j in range(cols):
        if top[j] != none:
            e[j] = b_e[j] + top[j]
    return scaled, e


# ---------------------------------------------------------------------------------------------
# One operation
# ---------------------------------------------------------------------------------------------


@njit
def _values(t, node, b, thread):  # type: ignore[no-untyped-def]
    """The values of a node for sample `b`, and their bits."""
    nnz = node[Node.NNZ]
    itemsize = t.out.itemsize
    if node[Node.STORE] == Store.CALLER:
        leaf = node[Node.VALUES]
        address = t.leaves[leaf, 0] + b * t.leaves[leaf, 1]
    elif node[Node.STORE] == Store.POOL:
        first = node[Node.VALUES] + b * node[Node.BATCHED] * nnz
        address = t.pool.ctypes.data + first * itemsize
    else:
        slot = 2 * thread + node[Node.VALUES]
        first = t.sizes[Size.SCRATCH_VALUES] + slot * t.sizes[Size.SCRATCH_NNZ]
        address = t.pool.ctypes.data + first * itemsize
    return array_at(address, nnz, t.out), array_at(address, nnz, t.bits_like)


@njit
def _scale(t, node, b, thread):  # type: ignore[no-untyped-def]
    """The exponents of a product for sample `b`, and the index of its flag."""
    cols = node[Node.COLS]
    if node[Node.STORE] == Store.POOL:
        b = b * node[Node.BATCHED]
        first = node[Node.EXPONENTS] + b * cols
        flag = node[Node.FLAGS] + b
    else:
        slot = 2 * thread + node[Node.VALUES]
        first = t.sizes[Size.SCRATCH_EXPONENTS] + slot * t.sizes[Size.SCRATCH_COLS]
        flag = t.sizes[Size.SCRATCH_FLAGS] + slot
    return t.exponents[first : first + cols], flag


@njit
def _local(t, node, b, thread):  # type: ignore[no-untyped-def]
    """What a node's local gradients add up to, for sample `b`; empty if it has none."""
    rows = node[Node.ROWS]
    if t.sizes[Size.LOCAL] == 0:
        return t.local_pool[:0]
    if node[Node.STORE] == Store.CALLER:
        address = t.local_grads[node[Node.VALUES] + 1]
        if address == 0:
            return t.local_pool[:0]
        return array_at(address + b * rows * t.out.itemsize, rows, t.out)
    if node[Node.STORE] == Store.POOL:
        first = node[Node.LOCAL] + b * rows
    else:
        slot = (2 * thread + node[Node.VALUES]) * t.sizes[Size.BATCH]
        first = t.sizes[Size.SCRATCH_LOCAL] + slot * t.sizes[Size.SCRATCH_ROWS] + b * rows
    return t.local_pool[first : first + rows]


@njit
def _finite(x):  # type: ignore[no-untyped-def]
    for value in x:
        if not math.isfinite(value):
            return False
    return True


@njit
def _apply(t, node, b, thread, first, last, x, y):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of ``y = A x + local`` for the node `A`; the status."""
    m, _ = _values(t, node, b, thread)
    product = node[Node.STORE] != Store.CALLER
    scaled = False
    if product:
        if not _finite(x):
            return NOT_FINITE
        e, flag = _scale(t, node, b, thread)
        scaled = t.flags[flag] != 0
        if scaled:
            _scaled_matvec(node, first, last, m, e, x, y, t.index_like)
    if not scaled:
        _matvec(node, first, last, m, x, y, t.index_like)
    local = _local(t, node, b, thread)
    if len(local):
        for i in range(first, last):
            y[i] += local[i]
    if product and not _finite(y[first:last]):
        return NOT_FINITE
    return FINISHED


@njit
def _gradient(t, k, b):  # type: ignore[no-untyped-def]
    """The `k`-th gradient of sample `b`."""
    size = t.offsets[k + 1] - t.offsets[k]
    first = t.offsets[k] * t.sizes[Size.BATCH] + b * size
    return t.out[first : first + size]


@njit
def _vector_rows(t, op, block, blocks, first_sample, last_sample, thread):  # type: ignore[no-untyped-def]
    """A block of the rows of one gradient, for a range of samples."""
    node = t.nodes[t.ops[op, Op.RIGHT]]
    first, last = _block_of_rows(node, block, blocks, t.index_like)
    for b in range(first_sample, last_sample):
        x = _gradient(t, t.ops[op, Op.LEFT], b)
        y = _gradient(t, t.ops[op, Op.OUT], b)
        status = _apply(t, node, b, thread, first, last, x, y)
        if status != FINISHED:
            return status
    return FINISHED


@njit
def _block_of_rows(node, block, blocks, index_like):  # type: ignore[no-untyped-def]
    """Rows of one of `blocks` blocks with about the same number of entries each."""
    return (
        _balanced_row(node, block, blocks, index_like),
        _balanced_row(node, block + 1, blocks, index_like),
    )


@njit
def _balanced_row(node, block, blocks, index_like):  # type: ignore[no-untyped-def]
    rows = node[Node.ROWS]
    if block == 0 or block == blocks or node[Node.KIND] != Kind.CSR:
        return rows * block // blocks
    indptr = array_at(node[Node.INDPTR], rows + 1, index_like)
    return np.int64(np.searchsorted(indptr, node[Node.NNZ] * block // blocks))


@njit
def _product_local(t, left, right, out, sample, thread):  # type: ignore[no-untyped-def]
    """Local gradients of a product: ``B·local(A) + local(B)``, with `A` the earlier node.

    Those of one sample; or of all, if the samples share the product.
    """
    shared = out[Node.BATCHED] == 0
    first = _ZERO if shared else sample
    last = t.sizes[Size.BATCH] if shared else sample + 1
    for b in range(first, last):
        x = _local(t, left, b, thread)
        y = _local(t, out, b, thread)
        if len(x):
            status = _apply(t, right, b, thread, _ZERO, right[Node.ROWS], x, y)
            if status != FINISHED:
                return status
        else:
            local = _local(t, right, b, thread)
            for i in range(len(y)):
                y[i] = local[i] if len(local) else 0
    return FINISHED


@njit
def _operand(t, node, b, thread):  # type: ignore[no-untyped-def]
    """Values in the band, exponents, and whether there are any: a copy where one is needed."""
    values, bits = _values(t, node, b, thread)
    if node[Node.STORE] != Store.CALLER:
        e, flag = _scale(t, node, b, thread)
        return values, e, t.flags[flag] != 0
    e = np.zeros(node[Node.COLS], np.int32)
    if _check(bits, _ZERO, len(bits), t.band) == _IN_BAND:
        return values, e, False
    values = values.copy()
    return values, e, _normalise(node, values, e, t.band, t.index_like)


@njit
def _multiply_scaled(t, left, right, out, b, thread):  # type: ignore[no-untyped-def]
    """The product of two nodes of any range; the status."""
    x, x_e, x_scaled = _operand(t, left, b, thread)
    y, y_e, y_scaled = _operand(t, right, b, thread)
    if y_scaled:
        x, x_e = _prescale(left, x, x_e, y_e, t.index_like)
    c, bits = _values(t, out, b, thread)
    e, flag = _scale(t, out, b, thread)
    for j in range(len(e)):
        e[j] = x_e[j]
    found = multiply(
        right, y, left, x, out, c, _ZERO, out[Node.ROWS], t.accumulators[thread], bits, t.band,
        t.index_like,
    )  # fmt: skip
    if found == NOT_FINITE:
        return NOT_FINITE
    t.flags[flag] = _normalise(out, c, e, t.band, t.index_like)
    return FINISHED


@njit
def _operands_in_band(t, left, right, b, thread, block, blocks):  # type: ignore[no-untyped-def]
    """How the range of both operands is, in one block of their entries."""
    worst = _IN_BAND
    for node in (left, right):
        if node[Node.STORE] == Store.CALLER:
            _, bits = _values(t, node, b, thread)
            first, last = len(bits) * block // blocks, len(bits) * (block + 1) // blocks
            found = _check(bits, first, last, t.band)
        else:
            _, flag = _scale(t, node, b, thread)
            found = _OUT_OF_BAND if t.flags[flag] else _IN_BAND
        if found == NOT_FINITE:
            return NOT_FINITE
        worst = max(worst, found)
    return worst


@njit
def _multiply_rows(t, left, right, out, b, thread, block, blocks):  # type: ignore[no-untyped-def]
    """A block of the rows of a product whose operands are in the band; how its range is."""
    x, _ = _values(t, left, b, thread)
    y, _ = _values(t, right, b, thread)
    c, bits = _values(t, out, b, thread)
    first, last = _block_of_rows(right, block, blocks, t.index_like)
    return multiply(
        right, y, left, x, out, c, first, last, t.accumulators[thread], bits, t.band, t.index_like
    )


@njit
def _settle(t, left, right, out, b, thread, operands, result):  # type: ignore[no-untyped-def]
    """What follows the rows of a product: exponents where needed, local gradients; the status."""
    if operands == NOT_FINITE or result == NOT_FINITE:
        return NOT_FINITE
    if operands == _OUT_OF_BAND:
        if _multiply_scaled(t, left, right, out, b, thread) == NOT_FINITE:
            return NOT_FINITE
    else:
        e, flag = _scale(t, out, b, thread)
        t.flags[flag] = 0
        if result == _OUT_OF_BAND:
            for j in range(len(e)):
                e[j] = 0
            values, _ = _values(t, out, b, thread)
            t.flags[flag] = _normalise(out, values, e, t.band, t.index_like)
    if t.sizes[Size.LOCAL]:
        return _product_local(t, left, right, out, b, thread)
    return FINISHED


@njit
def _product(t, op, b, thread):  # type: ignore[no-untyped-def]
    """One product for sample `b`; the status."""
    left = t.nodes[t.ops[op, Op.LEFT]]
    right = t.nodes[t.ops[op, Op.RIGHT]]
    out = t.nodes[t.ops[op, Op.OUT]]
    operands = _operands_in_band(t, left, right, b, thread, _ZERO, _ONE)
    result = _IN_BAND
    if operands == _IN_BAND:
        result = _multiply_rows(t, left, right, out, b, thread, _ZERO, _ONE)
    return _settle(t, left, right, out, b, thread, operands, result)


# ---------------------------------------------------------------------------------------------
# Stages
# ---------------------------------------------------------------------------------------------


@njit
def _run_of_operations(t, run, block, blocks, thread):  # type: ignore[no-untyped-def]
    """One run, for one block of the samples; the status."""
    first_op, last_op = t.runs[run, 0], t.runs[run, 1]
    batch = t.sizes[Size.BATCH]
    if t.ops[first_op, Op.VECTOR]:
        for op in range(first_op, last_op):
            first, last = batch * block // blocks, batch * (block + 1) // blocks
            status = _vector_rows(t, op, _ZERO, _ONE, first, last, thread)
            if status != FINISHED:
                return status
        return FINISHED
    # Sample by sample, so that the scratch of this thread holds one.
    width = batch if t.nodes[t.ops[last_op - 1, Op.OUT], Node.BATCHED] else 1
    for b in range(width * block // blocks, width * (block + 1) // blocks):
        for op in range(first_op, last_op):
            status = _product(t, op, b, thread)
            if status != FINISHED:
                return status
    return FINISHED


@njit
def _unit(t, stage, unit, thread):  # type: ignore[no-untyped-def]
    """One unit of a stage; the status."""
    work = t.stages[stage, Stage.KIND]
    op = t.stages[stage, Stage.FIRST]
    blocks = t.stages[stage, Stage.BLOCKS]
    block = unit % blocks
    batch = t.sizes[Size.BATCH]
    if work == Work.RUNS:
        return _run_of_operations(t, op + unit // blocks, block, blocks, thread)
    if work == Work.VECTOR:
        return _vector_rows(t, op, block, blocks, _ZERO, batch, thread)
    left = t.nodes[t.ops[op, Op.LEFT]]
    right = t.nodes[t.ops[op, Op.RIGHT]]
    out = t.nodes[t.ops[op, Op.OUT]]
    b = t.stages[stage, Stage.SAMPLE]
    if work == Work.CHECK:
        _report(t, State.OPERANDS, _operands_in_band(t, left, right, b, thread, block, blocks))
        return FINISHED
    operands = _reported(t, State.OPERANDS)
    if work == Work.MULTIPLY:
        if operands == _IN_BAND:
            found = _multiply_rows(t, left, right, out, b, thread, block, blocks)
            _report(t, State.RESULT, found)
        return FINISHED
    result = _reported(t, State.RESULT)
    t.state[State.OPERANDS] = 0
    t.state[State.RESULT] = 0
    return _settle(t, left, right, out, b, thread, operands, result)


@njit
def _report(t, slot, found):  # type: ignore[no-untyped-def]
    """Tell the threads of a later stage what this one found."""
    if found != _IN_BAND:
        fetch_add(t.state, slot, 1 if found == NOT_FINITE else 1 << 32)


@njit
def _reported(t, slot):  # type: ignore[no-untyped-def]
    """The worst that was reported."""
    reports = load(t.state, slot)
    if reports & 0xFFFFFFFF:
        return NOT_FINITE
    return _OUT_OF_BAND if reports else _IN_BAND


@njit(nogil=True, cache=True)
def run(t, thread):  # type: ignore[no-untyped-def]
    """Work on the plan in `t` as thread number `thread` until no unit is left."""
    units = t.first_unit[-1]
    stage = 0
    while True:
        unit = fetch_add(t.state, State.NEXT, 1)
        if unit >= units:
            return
        while unit >= t.first_unit[stage + 1]:
            stage += 1
        spins = 0
        while load(t.state, State.DONE) < t.first_unit[stage]:
            relax(spins)
            spins += 1
        if load(t.state, State.STATUS) == FINISHED:
            status = _unit(t, stage, unit - t.first_unit[stage], thread)
            if status != FINISHED:
                fetch_add(t.state, State.STATUS, status)
        fetch_add(t.state, State.DONE, 1)
