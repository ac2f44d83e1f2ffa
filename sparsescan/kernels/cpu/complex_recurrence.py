"""Linear recurrences of complex numbers, ``y_t = A_t y_{t-1} + b_t``, and their gradients.

As in :mod:`~sparsescan.kernels.cpu.recurrence`. Numbers are read as pairs of real ones, real part
first: loops over pairs become vectors, loops over Numba's complex numbers do not. `signs` is an
array of one real number, by which imaginary parts are multiplied: -1 takes the conjugate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compile import njit
from .memory import array_at
from .tables import ZERO, Kind

__all__ = ["outer_products", "outer_sums", "sweep", "sweep_columns"]

Array = Any

_ONE, _TWO = np.uint64(1), np.uint64(2)

# Sums of many terms in any order, which is the same in every call.
_sums = njit(fastmath={"contract", "reassoc"})


@njit(inline="always")
def _vector(signs, stack, t, b, size):
    """Return the pairs that a stack has for step `t` and sample `b`."""
    return array_at(stack.at + t * stack.step + b * stack.sample, 2 * size, signs)


@njit(inline="always")
def _before(s, signs, t, b):
    """Return the state that step `t` begins with."""
    if t == 0:
        return _vector(signs, s.start, ZERO, b, s.size)
    return _vector(signs, s.states, t - 1, b, s.size)


@_sums
def _apply_dense(s, sign, m, x, y):
    """Set ``y = M x``."""
    size, p = np.uint64(s.size), np.uint64(0)
    for i in range(size):
        re = im = sign * 0
        for j in range(size):
            k, q = _TWO * j, p + _TWO * j
            a, b = m[q], sign * m[q + _ONE]
            re += a * x[k] - b * x[k + _ONE]
            im += a * x[k + _ONE] + b * x[k]
        y[_TWO * i], y[_TWO * i + _ONE] = re, im
        p += _TWO * size


@njit(fastmath={"contract"})
def _apply_transposed(s, sign, m, x, y):
    """Set ``y = Mᵀ x``, if the matrix is dense."""
    size, p = np.uint64(s.size), np.uint64(0)
    y[:] = 0
    for i in range(size):
        re, im = x[_TWO * i], x[_TWO * i + _ONE]
        for j in range(size):
            k, q = _TWO * j, p + _TWO * j
            a, b = m[q], sign * m[q + _ONE]
            y[k] += a * re - b * im
            y[k + _ONE] += a * im + b * re
        p += _TWO * size


@njit(fastmath={"contract"})
def _apply_sparse(s, sign, m, x, y):
    """Set ``y = M x`` or ``y = Mᵀ x``."""
    p = np.uint64(s.indptr[0])
    y[:] = 0
    for i in range(np.uint64(s.size)):
        stop = np.uint64(s.indptr[i + _ONE])
        while p < stop:
            j = np.uint64(s.indices[p])
            to, read = (_TWO * j, _TWO * i) if s.transposed else (_TWO * i, _TWO * j)
            a, b = m[_TWO * p], sign * m[_TWO * p + _ONE]
            y[to] += a * x[read] - b * x[read + _ONE]
            y[to + _ONE] += a * x[read + _ONE] + b * x[read]
            p += _ONE


@njit(nogil=True, cache=True)
def sweep(s, signs, first, last):
    """Make all states of samples `first` to ``last - 1``, one after the other in each step."""
    sign = signs[0]
    for t in range(s.count):
        for b in range(first, last):
            m = _vector(signs, s.values, t, b, s.nnz)
            x, y = _before(s, signs, t, b), _vector(signs, s.states, t, b, s.size)
            if s.kind != Kind.DENSE:
                _apply_sparse(s, sign, m, x, y)
            elif s.transposed:
                _apply_transposed(s, sign, m, x, y)
            else:
                _apply_dense(s, sign, m, x, y)
            if s.offsets.at:
                added = _vector(signs, s.offsets, t, b, s.size)
                for i in range(np.uint64(2 * s.size)):
                    y[i] += added[i]


@njit(nogil=True, cache=True, fastmath={"contract"})
def sweep_columns(s, signs, samples, first, last):
    """Make elements `first` to ``last - 1`` of all states, if the matrices are diagonal."""
    sign, begin, end = signs[0], np.uint64(first), np.uint64(last)
    for t in range(s.count):
        for b in range(samples):
            m, x = _vector(signs, s.values, t, b, s.size), _before(s, signs, t, b)
            y = _vector(signs, s.states, t, b, s.size)
            if s.offsets.at:
                added = _vector(signs, s.offsets, t, b, s.size)
                for i in range(begin, end):
                    k = _TWO * i
                    re, im = m[k], sign * m[k + _ONE]
                    y[k] = re * x[k] - im * x[k + _ONE] + added[k]
                    y[k + _ONE] = re * x[k + _ONE] + im * x[k] + added[k + _ONE]
            else:
                for i in range(begin, end):
                    k = _TWO * i
                    re, im = m[k], sign * m[k + _ONE]
                    y[k] = re * x[k] - im * x[k + _ONE]
                    y[k + _ONE] = re * x[k + _ONE] + im * x[k]


@njit(inline="always")
def _add_product(to, p, g, i, state, j, sign, adds):
    """Write, or add, the product of two numbers, of which the second is a state's."""
    re, im = state[_TWO * j], sign * state[_TWO * j + _ONE]
    a, b = g[_TWO * i], g[_TWO * i + _ONE]
    real, imaginary = a * re - b * im, a * im + b * re
    q = _TWO * p
    to[q] = real + to[q] if adds else real
    to[q + _ONE] = imaginary + to[q + _ONE] if adds else imaginary


@njit(fastmath={"contract"})
def _add_outer(s, sign, to, g, state, first, last, adds):
    """Write, or add, rows `first` to ``last - 1`` of an outer product, where the pattern is."""
    begin, end, rows = np.uint64(first), np.uint64(last), np.uint64(s.size)
    if s.kind == Kind.DIAGONAL:
        for i in range(begin, end):
            _add_product(to, i, g, i, state, i, sign, adds)
        return
    if s.kind == Kind.DENSE:
        for i in range(begin, end):
            for j in range(rows):
                k, n = (j, i) if s.transposed else (i, j)
                _add_product(to, i * rows + j, g, k, state, n, sign, adds)
        return
    p = np.uint64(s.indptr[begin])
    for i in range(begin, end):
        stop = np.uint64(s.indptr[i + _ONE])
        while p < stop:
            j = np.uint64(s.indices[p])
            k, n = (j, i) if s.transposed else (i, j)
            _add_product(to, p, g, k, state, n, sign, adds)
            p += _ONE


@njit(nogil=True, cache=True)
def outer_products(s, signs, grads, out, samples, first, last):
    """Write the gradients in the matrices of steps `first` to ``last - 1``."""
    for t in range(first, last):
        for b in range(samples):
            g, state = _vector(signs, grads, t, b, s.size), _before(s, signs, t, b)
            to = _vector(signs, out, t, b, s.nnz)
            adds = out.sample == 0 and b > 0
            _add_outer(s, signs[0], to, g, state, ZERO, s.size, adds)


@njit(nogil=True, cache=True)
def outer_sums(s, signs, grads, out, samples, first, last):
    """Write rows `first` to ``last - 1`` of the gradients in a matrix that all steps share."""
    for t in range(s.count):
        for b in range(samples):
            g, state = _vector(signs, grads, t, b, s.size), _before(s, signs, t, b)
            to = _vector(signs, out, ZERO, b, s.nnz)
            adds = t > 0 or (out.sample == 0 and b > 0)
            _add_outer(s, signs[0], to, g, state, first, last, adds)
