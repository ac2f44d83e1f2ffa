"""Linear recurrences of complex numbers, ``y_t = A_t y_{t-1} + b_t``, and their gradients.

They are those of :mod:`~sparsescan.kernels.cpu.recurrence`. Complex numbers are read as pairs of
real numbers, real part first, in vectors: Numba's loops over complex numbers do not become vectors.
`signs` is an array of one vector of real numbers that multiply imaginary parts: all -1 takes
conjugates.

A product of pairs takes two multiplications per number. A step of a diagonal recurrence reads and
writes four numbers: from memory, as many bytes per second as for real numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from ..compile import njit
from .lanes import lane_count, load, load_some, store, store_some
from .memory import array_at
from .tables import ZERO, Kind

Array = Any

_ONE, _TWO = np.uint64(1), np.uint64(2)

# Sums of many terms in any order; the order is the same in every call.
_sums = njit(fastmath={"contract", "reassoc"})
_inline = njit(_nrt=False, forceinline=True)


@intrinsic
def _add_product(typingctx, total, m, x, signs):
    """Return ``total + m·x`` for vectors of pairs; the sign of imaginary parts of `m` is given."""

    def codegen(context, builder, signature, args):
        total, m, x, signs = args
        count, i32 = m.type.count, ir.IntType(32)

        def chosen(vector, places):
            order = ir.Constant(ir.VectorType(i32, count), places)
            return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)

        flags = ("contract",)
        pairs = range(count)
        real = chosen(m, [k & ~1 for k in pairs])
        imaginary = builder.fmul(chosen(m, [k | 1 for k in pairs]), signs)
        other = chosen(x, [k ^ 1 for k in pairs])
        turned = ir.Constant(m.type, [-1.0 if k % 2 == 0 else 1.0 for k in pairs])
        second = builder.fmul(builder.fmul(imaginary, turned), other, flags=flags)
        first = builder.fadd(builder.fmul(real, x, flags=flags), total, flags=flags)
        return builder.fadd(first, second, flags=flags)

    return total(total, m, x, signs), codegen


@intrinsic
def _none(typingctx, like):
    """Return a vector of zeros."""

    def codegen(context, builder, signature, args):
        vector = context.get_value_type(like)
        return ir.Constant(vector, [0.0] * vector.count)

    return like(like), codegen


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


@_inline
def _advance(signs, m, x, added, y, first, last):
    """Set ``y = m x + added`` elementwise, for some of the real numbers of pairs."""
    width, by = lane_count(signs), load(signs, 0)
    k = first
    while k + width <= last:
        total = load(added, k)
        store(y, k, _add_product(total, load(m, k), load(x, k), by))
        k += width
    if k < last:
        rest = last - k
        total, factor = load_some(added, k, rest), load_some(m, k, rest)
        store_some(y, k, _add_product(total, factor, load_some(x, k, rest), by), rest)


@_inline
def _multiply(signs, m, x, y, first, last):
    """Set ``y = m x`` elementwise, for some of the real numbers of pairs."""
    width, by = lane_count(signs), load(signs, 0)
    k = first
    while k + width <= last:
        store(y, k, _add_product(_none(by), load(m, k), load(x, k), by))
        k += width
    if k < last:
        rest = last - k
        factor = load_some(m, k, rest)
        store_some(y, k, _add_product(_none(by), factor, load_some(x, k, rest), by), rest)


@njit(nogil=True, cache=True)
def sweep_columns(s, signs, samples, first, last):
    """Make elements `first` to ``last - 1`` of all states, if the matrices are diagonal."""
    for t in range(s.count):
        for b in range(samples):
            m, x = _vector(signs, s.values, t, b, s.size), _before(s, signs, t, b)
            y = _vector(signs, s.states, t, b, s.size)
            if s.offsets.at:
                added = _vector(signs, s.offsets, t, b, s.size)
                _advance(signs, m, x, added, y, 2 * first, 2 * last)
            else:
                _multiply(signs, m, x, y, 2 * first, 2 * last)


@njit(inline="always")
def _put(to, p, g, i, state, j, sign, adds):
    """Write, or add, the product of two numbers; the second is from a state."""
    re, im = state[_TWO * j], sign * state[_TWO * j + _ONE]
    a, b = g[_TWO * i], g[_TWO * i + _ONE]
    real, imaginary = a * re - b * im, a * im + b * re
    q = _TWO * p
    to[q] = real + to[q] if adds else real
    to[q + _ONE] = imaginary + to[q + _ONE] if adds else imaginary


@njit(fastmath={"contract"})
def _add_outer(s, signs, to, g, state, first, last, adds):
    """Write, or add, rows `first` to ``last - 1`` of an outer product, in the pattern only."""
    if s.kind == Kind.DIAGONAL:
        if adds:
            _advance(signs, state, g, to, to, 2 * first, 2 * last)
        else:
            _multiply(signs, state, g, to, 2 * first, 2 * last)
        return
    begin, end, rows, sign = np.uint64(first), np.uint64(last), np.uint64(s.size), signs[0]
    if s.kind == Kind.DENSE:
        for i in range(begin, end):
            for j in range(rows):
                k, n = (j, i) if s.transposed else (i, j)
                _put(to, i * rows + j, g, k, state, n, sign, adds)
        return
    p = np.uint64(s.indptr[begin])
    for i in range(begin, end):
        stop = np.uint64(s.indptr[i + _ONE])
        while p < stop:
            j = np.uint64(s.indices[p])
            k, n = (j, i) if s.transposed else (i, j)
            _put(to, p, g, k, state, n, sign, adds)
            p += _ONE


@njit(nogil=True, cache=True)
def outer_products(s, signs, grads, out, samples, first, last):
    """Write the gradients in the matrices of steps `first` to ``last - 1``."""
    for t in range(first, last):
        for b in range(samples):
            g, state = _vector(signs, grads, t, b, s.size), _before(s, signs, t, b)
            to = _vector(signs, out, t, b, s.nnz)
            adds = out.sample == 0 and b > 0
            _add_outer(s, signs, to, g, state, ZERO, s.size, adds)


@njit(nogil=True, cache=True)
def outer_sums(s, signs, grads, out, samples, first, last):
    """Write rows `first` to ``last - 1`` of the gradients in a matrix that all steps share."""
    for t in range(s.count):
        for b in range(samples):
            g, state = _vector(signs, grads, t, b, s.size), _before(s, signs, t, b)
            to = _vector(signs, out, ZERO, b, s.nnz)
            adds = t > 0 or (out.sample == 0 and b > 0)
            _add_outer(s, signs, to, g, state, first, last, adds)
