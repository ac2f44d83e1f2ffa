"""Linear recurrences over whole sequences, ``y_t = A_t y_{t-1} + b_t``, and their gradients.

All matrices have one pattern, so a step looks nothing up: addresses advance by constant strides.
The caller has checked sizes and strides, and holds the arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..addresses import data_address
from ..compile import njit
from .matvec import add_rows, csr_matvec, dense_matvec, dense_matvec_of_eight, interleave
from .memory import add_fused_term, array_at, eights_at, store, zero
from .tables import LANES, ZERO, Kind

Array = Any


class Stack(NamedTuple):
    """Arrays of all steps and samples, by their addresses.

    Attributes
    ----------
    at : int
        The address of the first array; 0 if there are none.
    step, sample : int
        Bytes to the next step and to the next sample; 0 if these share one array.
    """

    at: int
    step: int
    sample: int


class Steps(NamedTuple):
    """The steps of a recurrence.

    Attributes
    ----------
    count, size, nnz : int
        How many steps there are, the length of a state, and entries of a matrix.
    kind : int
        Dense, diagonal or CSR.
    transposed : int
        1 if a step applies the transposed matrix, else 0.
    indptr, indices : ndarray
        The pattern of a CSR matrix.
    values, offsets, states : Stack
        The matrices ``A_t``, the offsets, and the states to compute.
    start : Stack
        The state before the first step.
    like : ndarray
        Empty, of the dtype of all values.
    """

    count: int
    size: int
    nnz: int
    kind: int
    transposed: int
    indptr: Array
    indices: Array
    values: Stack
    offsets: Stack
    states: Stack
    start: Stack
    like: Array


@njit(inline="always")
def _vector(s, stack, t, b, size):
    """Return a stack's array for step `t` and sample `b`."""
    return array_at(stack.at + t * stack.step + b * stack.sample, size, s.like)


@njit(inline="always")
def _before(s, t, b):
    """Return the state that step `t` begins with."""
    if t == 0:
        return _vector(s, s.start, ZERO, b, s.size)
    return _vector(s, s.states, t - 1, b, s.size)


@njit(inline="always")
def _eight(s, m, p):
    """Return eight elements of an array, from `p` on."""
    return eights_at(np.uint64(data_address(m)) + p * np.uint64(s.like.itemsize), 1, s.like)


@njit
def _apply_transposed(s, m, x, y):
    """Set ``y = Mᵀ x``."""
    rows, eight = np.uint64(s.size), np.uint64(LANES)
    if s.kind == Kind.DENSE and rows >= eight:
        # Four times eight columns at once; the last group may overlap the one before.
        one, last, j = np.uint64(1), rows - eight, np.uint64(0)
        while j < rows:
            j0, j1 = min(j, last), min(j + eight, last)
            j2, j3 = min(j + np.uint64(2) * eight, last), min(j + np.uint64(3) * eight, last)
            t0 = t1 = t2 = t3 = zero(eights_at(data_address(m), 1, s.like))
            p = np.uint64(0)
            for i in range(rows):
                t0 = add_fused_term(t0, x, i, _eight(s, m, p + j0), np.uint64(0))
                t1 = add_fused_term(t1, x, i, _eight(s, m, p + j1), np.uint64(0))
                t2 = add_fused_term(t2, x, i, _eight(s, m, p + j2), np.uint64(0))
                t3 = add_fused_term(t3, x, i, _eight(s, m, p + j3), np.uint64(0))
                p += rows
            store(y, j0, t0, one, eight)
            store(y, j1, t1, one, eight)
            store(y, j2, t2, one, eight)
            store(y, j3, t3, one, eight)
            j += np.uint64(4) * eight
        return
    y[:] = 0
    if s.kind == Kind.DENSE:
        p = np.uint64(0)
        for i in range(rows):
            for j in range(rows):
                y[j] += m[p + j] * x[i]
            p += rows
        return
    p = np.uint64(s.indptr[0])
    for i in range(rows):
        factor, stop = x[i], np.uint64(s.indptr[i + np.uint64(1)])
        while p < stop:
            y[np.uint64(s.indices[p])] += m[p] * factor
            p += np.uint64(1)


@njit(nogil=True, cache=True)
def sweep(s, first, last):
    """Make all states of samples `first` to ``last - 1``, one after the other in each step."""
    for t in range(s.count):
        for b in range(first, last):
            m = _vector(s, s.values, t, b, s.nnz)
            x, y = _before(s, t, b), _vector(s, s.states, t, b, s.size)
            if s.transposed:
                _apply_transposed(s, m, x, y)
            elif s.kind == Kind.DENSE:
                dense_matvec(ZERO, s.size, s.size, m, x, y)
            else:
                csr_matvec(ZERO, s.size, s.indptr, s.indices, m, x, y, s.size, 1, None)
            if s.offsets.at:
                add_rows(ZERO, s.size, y, _vector(s, s.offsets, t, b, s.size))


@njit
def _transposed_of_eight(s, m, x, y):
    """Set ``y[:, l] = Mᵀ x[:, l]`` for eight samples."""
    y[:] = 0
    rows, p = np.uint64(s.size), np.uint64(0)
    for i in range(rows):
        x0, x1, x2, x3, x4, x5, x6, x7 = x[i]
        row = s.kind == Kind.DENSE
        stop = p + rows if row else np.uint64(s.indptr[i + np.uint64(1)])
        j = np.uint64(0)
        while p < stop:
            column = y[j if row else np.uint64(s.indices[p])]
            factor = m[p]
            column[0] += factor * x0
            column[1] += factor * x1
            column[2] += factor * x2
            column[3] += factor * x3
            column[4] += factor * x4
            column[5] += factor * x5
            column[6] += factor * x6
            column[7] += factor * x7
            p += np.uint64(1)
            j += np.uint64(1)


@njit
def _sweep_eight(s, first, count, room):
    """Make all states of up to eight samples that share the matrices; each is read once."""
    rows, lanes = s.size, np.uint64(LANES)
    x = eights_at(data_address(room), rows, s.like)
    sums = eights_at(data_address(room) + rows * LANES * s.like.itemsize, rows, s.like)
    for t in range(s.count):
        m = _vector(s, s.values, t, ZERO, s.nnz)
        y = _vector(s, s.states, t, first, count * rows)
        if t > 0:
            before = _vector(s, s.states, t - 1, first, count * rows)
            interleave(before, rows, count, x)
        else:
            for lane in range(lanes):
                b = first + min(np.int64(lane), count - 1)
                begin = _vector(s, s.start, ZERO, b, rows)
                for i in range(np.uint64(rows)):
                    x[i, lane] = begin[i]
        if s.transposed:
            _transposed_of_eight(s, m, x, sums)
            for i in range(np.uint64(rows)):
                for lane in range(np.uint64(count)):
                    y[lane * np.uint64(rows) + i] = sums[i, lane]
        elif s.kind == Kind.DENSE:
            dense_matvec_of_eight(ZERO, rows, rows, m, x, y, rows, count)
        else:
            csr_matvec(ZERO, rows, s.indptr, s.indices, m, x, y, rows, count, None)
        if s.offsets.at:
            for b in range(count):
                own = _vector(s, s.states, t, first + b, rows)
                add_rows(ZERO, rows, own, _vector(s, s.offsets, t, first + b, rows))


@njit(nogil=True, cache=True)
def sweep_shared(s, first, last, room):
    """Make all states of samples that share the matrices.

    It needs a `room` of 16 numbers per number of a state.
    """
    for b in range(first, last, LANES):
        _sweep_eight(s, b, min(np.int64(LANES), last - b), room)


@njit(fastmath={"contract"})
def _sweep_number(s):
    """Make all states of one sample if a state is one number, which stays in a register."""
    state = _vector(s, s.start, ZERO, ZERO, 1)[0]
    for t in range(s.count):
        state = _vector(s, s.values, t, ZERO, 1)[0] * state
        if s.offsets.at:
            state += _vector(s, s.offsets, t, ZERO, 1)[0]
        _vector(s, s.states, t, ZERO, 1)[0] = state


@njit(nogil=True, cache=True)
def sweep_columns(s, samples, first, last):
    """Make elements `first` to ``last - 1`` of all states, if the matrices are diagonal."""
    if samples == 1 and s.size == 1:
        _sweep_number(s)
        return
    begin, end = np.uint64(first), np.uint64(last)
    for t in range(s.count):
        for b in range(samples):
            m, x = _vector(s, s.values, t, b, s.size), _before(s, t, b)
            y = _vector(s, s.states, t, b, s.size)
            if s.offsets.at:
                added = _vector(s, s.offsets, t, b, s.size)
                for i in range(begin, end):
                    y[i] = m[i] * x[i] + added[i]
            else:
                for i in range(begin, end):
                    y[i] = m[i] * x[i]


@njit(inline="always")
def _operands(s, grads, t, b):
    """Return the vectors whose outer product is the gradient in the matrix of a step."""
    g, state = _vector(s, grads, t, b, s.size), _before(s, t, b)
    return (state, g) if s.transposed else (g, state)


@njit
def _add_outer(s, to, left, right, first, last, adds):
    """Write, or add, rows `first` to ``last - 1`` of an outer product, in the pattern only."""
    begin, end, rows = np.uint64(first), np.uint64(last), np.uint64(s.size)
    if s.kind == Kind.DIAGONAL:
        for i in range(begin, end):
            to[i] = left[i] * right[i] + (to[i] if adds else 0)
        return
    if s.kind == Kind.DENSE:
        p = begin * rows
        for i in range(begin, end):
            factor = left[i]
            if adds:
                for j in range(rows):
                    to[p + j] += factor * right[j]
            else:
                for j in range(rows):
                    to[p + j] = factor * right[j]
            p += rows
        return
    p = np.uint64(s.indptr[begin])
    for i in range(begin, end):
        factor, stop = left[i], np.uint64(s.indptr[i + np.uint64(1)])
        while p < stop:
            term = factor * right[np.uint64(s.indices[p])]
            to[p] = term + to[p] if adds else term
            p += np.uint64(1)


@njit(nogil=True, cache=True)
def outer_products(s, grads, out, samples, first, last):
    """Write the gradients in the matrices of steps `first` to ``last - 1``.

    `grads` are the gradients in the states. With ``y_t = A_t y_{t-1} + b_t`` the gradient in
    ``A_t[i, j]`` is ``g_t[i]·y_{t-1}[j]``, or ``y_{t-1}[i]·g_t[j]`` if a step applies the
    transposed matrix. If samples share the matrices, which `out` shows, gradients are summed over
    samples.
    """
    if samples == 1 and s.size == 1 and s.nnz == 1:
        for t in range(first, last):
            g = _vector(s, grads, t, ZERO, 1)[0]
            _vector(s, out, t, ZERO, 1)[0] = g * _before(s, t, ZERO)[0]
        return
    for t in range(first, last):
        for b in range(samples):
            left, right = _operands(s, grads, t, b)
            to = _vector(s, out, t, b, s.nnz)
            _add_outer(s, to, left, right, ZERO, s.size, out.sample == 0 and b > 0)


@njit(nogil=True, cache=True)
def outer_sums(s, grads, out, samples, first, last):
    """Write rows `first` to ``last - 1`` of the gradients in a matrix that all steps share.

    That is the sum over the steps of what :func:`outer_products` writes.
    """
    for t in range(s.count):
        for b in range(samples):
            left, right = _operands(s, grads, t, b)
            to = _vector(s, out, ZERO, b, s.nnz)
            _add_outer(s, to, left, right, first, last, t > 0 or (out.sample == 0 and b > 0))
