"""Matrix-vector products, by Jacobians and by products of them."""

from __future__ import annotations

import math

import numpy as np

from ..addresses import data_address
from ..compile import njit
from .memory import add_fused_term, add_term, array_at, dot_two_rows, eights_at, plus, store, zero
from .nodes import (
    column_of,
    exponents_of,
    gradient_of,
    indices_of,
    indptr_of,
    local_of,
    row_bounds,
    starts_of,
    values_of,
)
from .scaling import all_finite, exponent_of, ldexp
from .tables import FINISHED, ONE, UNDECIDED, WORD, ZERO, Kind, Node, Run


@njit(fastmath={"reassoc", "contract"})
def dense_matvec(first, last, cols, m, x, y):
    """Make rows of ``y = M x`` for a dense matrix."""
    i, stop, size = np.uint64(first), np.uint64(last), np.uint64(cols)
    row = i * size
    # Two rows at a time if they are short; long rows are better read one after the other.
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
def _ahead(starts, i, p):
    """Return how far the values of row `i` are behind entry `p`, modulo 2^64; 0 without starts."""
    if starts is None:
        return np.uint64(0)
    return np.uint64(starts[i]) - p


@njit
def csr_matvec(first, last, indptr, indices, m, x, y, rows, samples, starts):
    """Make rows of ``y = M x``, or of ``y[l] = M x[:, l]`` for up to eight samples.

    One function for both, so that a sample has the same bits. It has four partial sums, since an
    addition waits for the previous one. In rows of fewer than four entries, unused sums are zero.

    `starts` is None, or has the start of each row's values in `m`.
    """
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    p = np.uint64(indptr[first])
    for i in range(np.uint64(first), np.uint64(last)):
        stop = np.uint64(indptr[i + one])
        d = _ahead(starts, i, p)
        t0 = t1 = t2 = t3 = zero(x)
        while p + four <= stop:
            t0 = add_term(t0, m, p + d, x, np.uint64(indices[p]))
            t1 = add_term(t1, m, p + one + d, x, np.uint64(indices[p + one]))
            t2 = add_term(t2, m, p + two + d, x, np.uint64(indices[p + two]))
            t3 = add_term(t3, m, p + three + d, x, np.uint64(indices[p + three]))
            p += four
        total = plus(plus(t0, t1), plus(t2, t3))
        # At most three more: the compiler would unroll a loop as if there were many.
        if p < stop:
            total = add_term(total, m, p + d, x, np.uint64(indices[p]))
            if p + one < stop:
                total = add_term(total, m, p + one + d, x, np.uint64(indices[p + one]))
                if p + two < stop:
                    total = add_term(total, m, p + two + d, x, np.uint64(indices[p + two]))
        store(y, i, total, np.uint64(rows), np.uint64(samples))
        p = stop


@njit
def dense_matvec_of_eight(first, last, cols, m, x, y, rows, samples):
    """Make rows of ``y[l] = M x[:, l]`` for a dense matrix and up to eight samples."""
    one, four, size = np.uint64(1), np.uint64(4), np.uint64(cols)
    # Four rows at a time, since an addition waits for the previous one.
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
def single_matvec(first, last, indices, m, x, y):
    """Make rows as :func:`csr_matvec` does, if every row has one entry."""
    for i in range(np.uint64(first), np.uint64(last)):
        # A sum, unlike a product, is never -0.
        y[i] = m.dtype.type(0) + m[i] * x[np.uint64(indices[i])]


@njit
def interleave(x, cols, samples, interleaved):
    """Set ``interleaved[j, l] = x[l, j]`` for up to eight samples, contiguous in `x`."""
    for j in range(np.uint64(cols)):
        for lane in range(np.uint64(samples)):
            interleaved[j, lane] = x[lane * np.uint64(cols) + j]
        for lane in range(np.uint64(samples), np.uint64(8)):
            interleaved[j, lane] = 0


@njit(inline="always")
def matvec(t, node, first, last, m, x, y):
    """Make rows `first` to `last` of ``y = M x``."""
    if node[Node.KIND] == Kind.DENSE:
        dense_matvec(first, last, node[Node.COLS], m, x, y)
    elif node[Node.KIND] == Kind.DIAGONAL:
        for i in range(np.uint64(first), np.uint64(last)):
            y[i] = m[i] * x[i]
    elif node[Node.SINGLE]:
        single_matvec(first, last, indices_of(t, node), m, x, y)
    else:
        _sparse_matvec(t, node, first, last, m, x, y, node[Node.ROWS], ONE)


@njit(inline="always")
def _sparse_matvec(t, node, first, last, m, x, y, rows, samples):
    """Make rows as :func:`csr_matvec` does."""
    indptr, indices = indptr_of(t, node), indices_of(t, node)
    if node[Node.STARTS]:
        starts = starts_of(t, node)
        csr_matvec(first, last, indptr, indices, m, x, y, rows, samples, starts)
    else:
        csr_matvec(first, last, indptr, indices, m, x, y, rows, samples, None)


@njit
def add_rows(first, last, y, x):
    """Add rows `first` to `last` of `x` to `y`."""
    for i in range(np.uint64(first), np.uint64(last)):
        y[i] += x[i]


@njit
def _scaled_matvec(t, node, first, last, m, e, x, y):
    """Make rows of ``y = M diag(2^e) x``, each summed relative to its own largest term."""
    indptr, indices = indptr_of(t, node), indices_of(t, node)
    for i in range(first, last):
        start, stop = row_bounds(node, indptr, i)
        top = -(1 << 60)
        for p in range(start, stop):
            j = column_of(node, indices, p)
            if m[p] != 0 and x[j] != 0:
                top = max(top, exponent_of(m[p]) + exponent_of(x[j]) + e[j])
        total = 0.0
        for p in range(start, stop):
            j = column_of(node, indices, p)
            if m[p] != 0 and x[j] != 0:
                m_mantissa, m_exponent = math.frexp(m[p])
                x_mantissa, x_exponent = math.frexp(x[j])
                total += ldexp(
                    np.float64(m_mantissa) * x_mantissa, m_exponent + x_exponent + e[j] - top
                )
        y[i] = ldexp(total, top) if total != 0 else 0.0


@njit
def apply_product(t, node, b, thread, first, last, x, y):
    """Make rows `first` to `last` of ``y = P x + local`` for a product; return the status."""
    if not all_finite(x, ZERO, len(x)):
        return UNDECIDED
    m, e = values_of(t, node, b, thread), exponents_of(t, node, b, thread)
    if e[node[Node.COLS]]:
        _scaled_matvec(t, node, first, last, m, e, x, y)
    else:
        matvec(t, node, first, last, m, x, y)
    local = local_of(t, node, b, thread)
    if len(local):
        add_rows(first, last, y, local)
    return FINISHED if all_finite(y, first, last) else UNDECIDED


@njit
def apply_jacobian(t, node, first, last, first_sample, last_sample, left, out, thread):
    """Make rows `first` to `last` of gradient `out` from gradient `left`, through a Jacobian."""
    leaf = array_at(t.run[Run.LEAVES] + node[Node.VALUES] * 2 * WORD, 2, t.run)
    # The bits of a dense product must not depend on how samples are divided.
    dense = node[Node.KIND] == Kind.DENSE
    samples = t.run[Run.BATCH] if dense else last_sample - first_sample
    shared = leaf[1] == 0 and samples > 2
    if shared and node[Node.KIND] != Kind.DIAGONAL and not node[Node.SINGLE]:
        # Samples share the Jacobian: read it once for eight samples.
        rows, cols = node[Node.ROWS], node[Node.COLS]
        m = array_at(leaf[0], node[Node.NNZ], t.values)
        lanes = t.run[Run.LANES]
        place = t.run[Run.INTERLEAVED] + thread * 8 * lanes * t.values.itemsize
        interleaved = eights_at(place, lanes, t.values)
        for b in range(first_sample, last_sample, 8):
            samples = min(np.int64(8), last_sample - b)
            x = array_at(data_address(gradient_of(t, left, b)), samples * cols, t.values)
            y = array_at(data_address(gradient_of(t, out, b)), samples * rows, t.values)
            interleave(x, cols, samples, interleaved)
            if dense:
                dense_matvec_of_eight(first, last, cols, m, interleaved, y, rows, samples)
            else:
                _sparse_matvec(t, node, first, last, m, interleaved, y, rows, samples)
    elif (
        node[Node.KIND] == Kind.DIAGONAL
        and last - first == node[Node.ROWS]
        and leaf[1] == node[Node.ROWS] * t.values.itemsize
    ):
        # Samples are contiguous: one long diagonal.
        rows = node[Node.ROWS]
        size = (last_sample - first_sample) * rows
        m = array_at(leaf[0] + first_sample * leaf[1], size, t.values)
        x = array_at(data_address(gradient_of(t, left, first_sample)), size, t.values)
        y = array_at(data_address(gradient_of(t, out, first_sample)), size, t.values)
        for i in range(np.uint64(size)):
            y[i] = m[i] * x[i]
    else:
        rows, cols, nnz = node[Node.ROWS], node[Node.COLS], node[Node.NNZ]
        m_at = leaf[0] + first_sample * leaf[1]
        x_at = np.int64(data_address(gradient_of(t, left, first_sample)))
        y_at = np.int64(data_address(gradient_of(t, out, first_sample)))
        for _ in range(first_sample, last_sample):
            m = array_at(m_at, nnz, t.values)
            x, y = array_at(x_at, cols, t.values), array_at(y_at, rows, t.values)
            matvec(t, node, first, last, m, x, y)
            m_at += leaf[1]
            x_at += cols * t.values.itemsize
            y_at += rows * t.values.itemsize
    if t.run[Run.LOCAL]:
        for b in range(first_sample, last_sample):
            local = local_of(t, node, b, thread)
            if len(local):
                add_rows(first, last, gradient_of(t, out, b), local)
