"""Where the tables of a run say that things are: values, exponents, gradients, rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import int64

from ...arrays.cuda import cuda
from ..cpu.tables import BAND, Kind, Store
from .device import load, store
from .tables import Node, Plan, Run, jacobian_at, local_at

# Zeros whose types select what is loaded.
WORD, INT, HALF = np.int64(0), np.int32(0), np.uint16(0)


class Dtypes(NamedTuple):
    """Constants that follow from the dtypes of a plan: the first argument ``t`` of functions here.

    Attributes
    ----------
    zero, no_index : scalar
        Zeros of the dtypes of values and of index arrays, which select what is loaded.
    itemsize : int
        Bytes of a value.
    low, high : scalar
        The ends of the band, powers of two.
    high_exponent, low_exponent, target, normal, negligible : int
        The band, as in :data:`sparsescan.kernels.cpu.tables.BAND`.
    """

    zero: Any
    no_index: Any
    itemsize: int
    low: Any
    high: Any
    high_exponent: int
    low_exponent: int
    target: int
    normal: int
    negligible: int


def dtypes_of(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> Dtypes:
    """Return what depends on the dtypes of values and of index arrays."""
    high, low, *others = (int(number) for number in BAND[dtype][3:])
    ends = dtype.type(2.0**low), dtype.type(2.0**high)
    zeros = dtype.type(0), index_dtype.type(0)
    return Dtypes(*zeros, dtype.itemsize, *ends, high, low, *others)


class Shared(NamedTuple):
    """Shared memory of a block, an entry a thread.

    Attributes
    ----------
    columns : array
        Segments of rows that are added up, or terms of the rows of a tile; as many as those have.
    partial, tops : array
        Sums of values, and largest exponents.
    factor, starts, slot_starts, counts : array
        Factors of a segment: entries of a row, where the entries begin that they are multiplied by,
        and the slots of those, and how many there are.
    """

    columns: Any
    partial: Any
    tops: Any
    factor: Any
    starts: Any
    slot_starts: Any
    counts: Any


class NodeMatrix(NamedTuple):
    """Columns of the node table that loops read, loaded once: no store can change them."""

    kind: Any
    rows: Any
    cols: Any
    nnz: Any
    indptr: Any
    indices: Any


@cuda.jit(device=True)
def unit_and_sample(batch):
    """Return which unit this block works on, and for which sample."""
    number = np.uint32(cuda.blockIdx.x) // np.uint32(batch)
    return int64(number), int64(np.uint32(cuda.blockIdx.x) - number * np.uint32(batch))


@cuda.jit(device=True)
def matrix_at(node):
    """Return the matrix of a node."""
    return NodeMatrix(
        load(node, Node.KIND, WORD),
        load(node, Node.ROWS, WORD),
        load(node, Node.COLS, WORD),
        load(node, Node.NNZ, WORD),
        load(node, Node.INDPTR, WORD),
        load(node, Node.INDICES, WORD),
    )


@cuda.jit(device=True)
def row_start(t, matrix, i):
    """Return the first entry of row `i`."""
    if matrix.kind == Kind.DENSE:
        return i * matrix.cols
    if matrix.kind == Kind.DIAGONAL:
        return i
    return int64(load(matrix.indptr, i, t.no_index))


@cuda.jit(device=True)
def column(t, matrix, p):
    """Return the column of entry `p`."""
    if matrix.kind == Kind.DENSE:
        return p % matrix.cols
    if matrix.kind == Kind.DIAGONAL:
        return p
    return index_at(t, matrix, p)


@cuda.jit(device=True)
def index_at(t, matrix, p):
    """Return the column of entry `p` of a matrix that is neither dense nor diagonal."""
    return int64(load(matrix.indices, p, t.no_index))


@cuda.jit(device=True)
def lower_bound(t, array, first, last, value):
    """Return where `value` would stand among sorted indices ``array[first:last]``."""
    while first < last:
        middle = (first + last) >> 1
        if int64(load(array, middle, t.no_index)) < value:
            first = middle + 1
        else:
            last = middle
    return first


@cuda.jit(device=True)
def row_of(t, matrix, p):
    """Return the row of entry `p`."""
    if matrix.kind == Kind.DENSE:
        return p // matrix.cols
    if matrix.kind == Kind.DIAGONAL:
        return p
    return lower_bound(t, matrix.indptr, int64(0), matrix.rows + 1, p + 1) - 1


@cuda.jit(device=True)
def seat(node, plan, part, sample):
    """Return which product of its node this is: by sample; for one in scratch, by run as well."""
    if load(node, Node.STORE, WORD) == Store.SCRATCH:
        return part * load(plan, Plan.BATCH, WORD) + sample
    return sample


@cuda.jit(device=True)
def values_of(run, plan, node, part, sample):
    """Return the address of the values of a node."""
    first = load(node, Node.VALUES, WORD)
    if load(node, Node.STORE, WORD) == Store.CALLER:
        return jacobian_at(run, first, sample)
    own = sample * load(node, Node.BATCHED, WORD)
    return first + seat(node, plan, part, own) * load(node, Node.VALUES_STEP, WORD)


@cuda.jit(device=True)
def exponents_of(plan, node, part, sample):
    """Return the address of the exponents of a product."""
    own = sample * load(node, Node.BATCHED, WORD)
    at = seat(node, plan, part, own) * load(node, Node.EXPONENTS_STEP, WORD)
    return load(node, Node.EXPONENTS, WORD) + at


@cuda.jit(device=True)
def scaled_by(plan, node, part, sample):
    """Return the address of the exponents of a node, or 0 if it has none."""
    if load(node, Node.STORE, WORD) == Store.CALLER:
        return int64(0)
    at = exponents_of(plan, node, part, sample)
    return at if load(at, load(node, Node.COLS, WORD), INT) != 0 else int64(0)


@cuda.jit(device=True)
def local_of(t, run, plan, node, part, sample):
    """Return the address of the summed local gradients of a node, or 0 if there are none."""
    if load(plan, Plan.LOCAL, WORD) == 0:
        return int64(0)
    rows = load(node, Node.ROWS, WORD)
    if load(node, Node.STORE, WORD) == Store.CALLER:
        at = local_at(run, load(node, Node.VALUES, WORD) + 1)
        return at + sample * rows * t.itemsize if at != 0 else at
    at = load(node, Node.LOCAL, WORD)
    return at + seat(node, plan, part, sample) * load(node, Node.LOCAL_STEP, WORD)


@cuda.jit(device=True)
def gradient_at(t, run, plan, k, sample):
    """Return the address of gradient `k`."""
    offsets = load(plan, Plan.OFFSETS, WORD)
    first, last = load(offsets, k, WORD), load(offsets, k + 1, WORD)
    place = first * load(plan, Plan.BATCH, WORD) + sample * (last - first)
    return load(run, Run.OUT, WORD) + place * t.itemsize


@cuda.jit(device=True)
def raise_flag(run):
    """Let the linear scan decide."""
    store(run, Run.FLAG, int64(1), WORD)


@cuda.jit(device=True)
def entry_of(t, matrix, k, j):
    """Return the place of entry ``(k, j)`` of a matrix, or -1."""
    start, stop = row_start(t, matrix, k), row_start(t, matrix, k + 1)
    if matrix.kind == Kind.DENSE:
        return start + j
    if matrix.kind == Kind.DIAGONAL:
        return start if k == j else int64(-1)
    p = lower_bound(t, matrix.indices, start, stop, j)
    if p < stop and int64(load(matrix.indices, p, t.no_index)) == j:
        return p
    return int64(-1)
