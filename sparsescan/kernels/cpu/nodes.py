"""Read the tables of a run: places of values, exponents, gradients and rows."""

from __future__ import annotations

import numpy as np

from ..compile import njit
from .memory import array_at, load
from .tables import FINISHED, SLOTS, WORD, ZERO, Kind, Node, Op, Run, Store


@njit(inline="always")
def is_stopped(t):
    """Return whether another thread has failed, or an interrupt came: results are not needed."""
    return load(t.run, Run.STATUS) != FINISHED


@njit(inline="always")
def node_at(t, i):
    """Return row `i` of the node table."""
    return array_at(t.run[Run.NODES] + i * Node.WIDTH * WORD, Node.WIDTH, t.run)


@njit(inline="always")
def op_at(t, i):
    """Return row `i` of the operation table."""
    return array_at(t.run[Run.OPS] + i * Op.WIDTH * WORD, Op.WIDTH, t.run)


@njit(inline="always")
def gradient_of(t, k, b):
    """Return the `k`-th gradient of sample `b`."""
    offsets = array_at(t.run[Run.OFFSETS] + k * WORD, 2, t.run)
    size = offsets[1] - offsets[0]
    first = offsets[0] * t.run[Run.BATCH] + b * size
    return array_at(t.run[Run.OUT] + first * t.values.itemsize, size, t.values)


@njit(inline="always")
def indptr_of(t, node):
    """Return the row pointers of a node that is neither dense nor diagonal."""
    return array_at(node[Node.INDPTR], node[Node.ROWS] + 1, t.indices)


@njit(inline="always")
def indices_of(t, node):
    """Return the column indices of a node that is neither dense nor diagonal."""
    return array_at(node[Node.INDICES], node[Node.NNZ], t.indices)


@njit(inline="always")
def starts_of(t, node):
    """Return the start of each row's values, for a node whose equal rows share values."""
    return array_at(node[Node.STARTS], node[Node.ROWS], t.indices)


@njit
def _address(t, node, b, thread):
    """Return the address of the values of a node for sample `b`."""
    itemsize = t.values.itemsize
    if node[Node.STORE] == Store.CALLER:
        leaf = array_at(t.run[Run.LEAVES] + node[Node.VALUES] * 2 * WORD, 2, t.run)
        return leaf[0] + b * leaf[1]
    if node[Node.STORE] == Store.POOL:
        place = node[Node.VALUES] + b * node[Node.BATCHED] * node[Node.NNZ]
    else:
        slot = SLOTS * thread + node[Node.VALUES]
        place = t.run[Run.SCRATCH_VALUES] + slot * t.run[Run.SCRATCH_NNZ]
    return t.run[Run.POOL] + place * itemsize


@njit(inline="always")
def values_of(t, node, b, thread):
    """Return the values of a node for sample `b`."""
    return array_at(_address(t, node, b, thread), node[Node.NNZ], t.values)


@njit(inline="always")
def bits_of(t, node, b, thread):
    """Return the bit patterns of these values, as integers."""
    return array_at(_address(t, node, b, thread), node[Node.NNZ], t.bits)


@njit
def exponents_of(t, node, b, thread):
    """Return the exponents of a product for sample `b`; the last entry says whether to use them."""
    cols = node[Node.COLS]
    if node[Node.STORE] == Store.POOL:
        first = node[Node.EXPONENTS] + b * node[Node.BATCHED] * (cols + 1)
    else:
        slot = SLOTS * thread + node[Node.VALUES]
        first = t.run[Run.SCRATCH_EXPONENTS] + slot * (t.run[Run.SCRATCH_COLS] + 1)
    return t.exponents[first : first + cols + 1]


@njit
def local_of(t, node, b, thread):
    """Return the sum of a node's local gradients for sample `b`; empty if it has none."""
    rows = node[Node.ROWS]
    itemsize = t.values.itemsize
    if t.run[Run.LOCAL] == 0:
        return t.values
    if node[Node.STORE] == Store.CALLER:
        place = t.run[Run.LOCAL_GRADS] + (node[Node.VALUES] + 1) * WORD
        address = array_at(place, 1, t.run)[0]
        if address == 0:
            return t.values
        return array_at(address + b * rows * itemsize, rows, t.values)
    if node[Node.STORE] == Store.POOL:
        place = node[Node.LOCAL] + b * rows
    else:
        slot = (SLOTS * thread + node[Node.VALUES]) * t.run[Run.BATCH]
        place = t.run[Run.SCRATCH_LOCAL] + slot * t.run[Run.SCRATCH_ROWS] + b * rows
    return array_at(t.run[Run.LOCAL_POOL] + place * itemsize, rows, t.values)


@njit(inline="always")
def row_bounds(node, indptr, i):
    """Return the first and the last-plus-one entry of row `i`."""
    if node[Node.KIND] == Kind.DENSE:
        return np.uint64(i * node[Node.COLS]), np.uint64((i + 1) * node[Node.COLS])
    if node[Node.KIND] == Kind.DIAGONAL:
        return np.uint64(i), np.uint64(i + 1)
    return np.uint64(indptr[i]), np.uint64(indptr[i + 1])


@njit(inline="always")
def column_of(node, indices, p):
    """Return the column of entry `p`."""
    if node[Node.KIND] == Kind.DENSE:
        return np.uint64(p) % np.uint64(node[Node.COLS])
    if node[Node.KIND] == Kind.DIAGONAL:
        return np.uint64(p)
    return np.uint64(indices[p])


@njit
def balanced_row(t, node, block, blocks):
    """Return the first row of one of `blocks` blocks with about equally many entries."""
    rows = node[Node.ROWS]
    if block == blocks:
        return rows
    if node[Node.KIND] != Kind.CSR:
        # Even, since dense rows are taken in pairs, so that the order of sums is fixed.
        return rows * block // blocks // 2 * 2
    wanted = node[Node.NNZ] * block // blocks
    indptr = indptr_of(t, node)
    low, high = ZERO, rows
    while low < high:
        middle = (low + high) // 2
        if indptr[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def own_exponents_of(t, node, b, thread):
    """Return the exponents of a product, or zeros for a Jacobian."""
    if node[Node.STORE] == Store.CALLER:
        return np.zeros(node[Node.COLS] + 1, np.int32)
    return exponents_of(t, node, b, thread)
