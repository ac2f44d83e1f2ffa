"""Whole sequences of recurrent cells: all states, and the gradients of all of them.

Samples are lanes: the states of a group of samples are ``[step][unit][lane]``, in one array. Arrays
are flat; the layer below, this one and the one above read and write the same arrays, so nothing is
copied between them. There is a slot for each step, and one before and behind for the states with
which the two directions begin.

A step that a sample does not have, since its sequence is shorter, leaves its state as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.compile import njit
from .lanes import (
    add_outer_products,
    add_products,
    add_rows,
    add_totals,
    fma,
    keep_less,
    keep_positive,
    lane_count,
    less_or,
    load,
    load_rows,
    load_square,
    number,
    sigmoid,
    splat,
    splat_rows,
    store,
    store_corner,
    store_rows,
    store_square,
    tanh,
    total,
    transpose,
)

__all__ = [
    "Matrix",
    "Rows",
    "Sequence",
    "back_gru",
    "back_lstm",
    "back_rnn",
    "multiply_steps",
    "pack",
    "run_gru",
    "run_lstm",
    "run_rnn",
    "sum_products",
    "sum_sparse_products",
    "unpack",
]

Array = Any
# Rows of a matrix that are multiplied at once, and that share each number that is loaded; and
# columns whose products are summed up before they are added to what there is.
ROWS = 8
_PART = 20


class Matrix(NamedTuple):
    """A matrix that multiplies the numbers of all samples.

    Attributes
    ----------
    rows, cols : int
        Its shape.
    values : ndarray
        Of a dense matrix eight rows after eight rows, column by column, the last of them filled up
        with zeros; of a sparse one the entries.
    indices, indptr : ndarray of int64
        Of a sparse matrix, as in CSR; empty for a dense one.
    """

    rows: int
    cols: int
    values: Array
    indices: Array
    indptr: Array


class Sequence(NamedTuple):
    """One direction of one layer, for one group of samples.

    Attributes
    ----------
    steps : int
        Number of steps.
    back : int
        1 if the last step comes first, else 0.
    units, products : int
        Length of a state ``h``, and number of products of a step.
    lengths : ndarray, shape (lanes,)
        How many steps each sample has, as numbers of its dtype.
    states : ndarray
        ``[steps + 2][width][lane]``; the states of this direction from row `row` on.
    width, row : int
        Rows of a slot, and where those of this direction begin.
    cells : ndarray
        The cell states of an LSTM, in the same places.
    gates : ndarray
        ``[step][gates · units][lane]``: what the backward pass needs of a step.
    first, stride : int
        The step whose gates come first, and the numbers between those of two steps.
    """

    steps: int
    back: int
    units: int
    products: int
    lengths: Array
    states: Array
    width: int
    row: int
    cells: Array
    gates: Array
    first: int
    stride: int


class Rows(NamedTuple):
    """Some columns of an array ``(steps, batch, width)`` of the caller, or of what he gets.

    Attributes
    ----------
    values : ndarray
        The array, flat.
    steps, batch, width : int
        Its shape.
    first : int
        The sample that is the first lane.
    column, size : int
        Where the columns begin, and how many there are.
    """

    values: Array
    steps: int
    batch: int
    width: int
    first: int
    column: int
    size: int


# -- Products --------------------------------------------------------------------------------------


@njit(inline="always")
def _multiply(m, x, at, out, to, bias, begins):
    """Write ``m x + bias`` to `out` if it begins a sum, else add ``m x`` to what is there."""
    if len(m.indptr) > 0:
        _multiply_sparse(m, x, at, out, to, bias, begins)
    else:
        _multiply_dense(m, x, at, out, to, bias, begins)


@njit
def _multiply_dense(m, x, at, out, to, bias, begins):
    lanes, zero, p = lane_count(x), number(x, 0.0), 0
    none = (zero, zero, zero, zero, zero, zero, zero, zero)
    for row in range(0, m.rows, ROWS):
        place = to + row * lanes
        sums = splat_rows(bias, row) if begins else load_rows(out, place, lanes)
        # Rounding is least where sums are short.
        for start in range(0, m.cols, _PART):
            part = none
            for j in range(start, min(start + _PART, m.cols)):
                part = add_products(m.values, p, load(x, at + j * lanes), part)
                p += ROWS
            sums = add_rows(sums, part)
        store_rows(out, place, lanes, sums, m.rows - row)


@njit
def _multiply_sparse(m, x, at, out, to, bias, begins):
    lanes = lane_count(x)
    for row in range(m.rows):
        # Four sums, none of which waits for the one before.
        a = splat(bias, row) if begins else load(out, to + row * lanes)
        zero = number(a, 0.0)
        b, c, d = zero, zero, zero
        p, end = m.indptr[row], m.indptr[row + 1]
        while p + 4 <= end:
            a = fma(splat(m.values, p), load(x, at + m.indices[p] * lanes), a)
            b = fma(splat(m.values, p + 1), load(x, at + m.indices[p + 1] * lanes), b)
            c = fma(splat(m.values, p + 2), load(x, at + m.indices[p + 2] * lanes), c)
            d = fma(splat(m.values, p + 3), load(x, at + m.indices[p + 3] * lanes), d)
            p += 4
        while p < end:
            a = fma(splat(m.values, p), load(x, at + m.indices[p] * lanes), a)
            p += 1
        store(out, to + row * lanes, (a + b) + (c + d))


@njit(nogil=True, cache=True)
def multiply_steps(m, x, x_at, x_step, out, out_at, out_step, steps):
    """Write the products of `m` with the vectors of some steps."""
    none = np.zeros(m.rows + ROWS, x.dtype)
    for t in range(steps):
        _multiply(m, x, x_at + t * x_step, out, out_at + t * out_step, none, True)


# -- States ----------------------------------------------------------------------------------------


@njit(inline="always")
def _places(s, k):
    """Return the `k`-th step in the direction, and where its state and the one before begin."""
    lanes = lane_count(s.states)
    t = s.steps - 1 - k if s.back else k
    before = t + 2 if s.back else t
    size = s.width * lanes
    return t, (t + 1) * size + s.row * lanes, before * size + s.row * lanes


@njit(inline="always")
def _make_products(s, w_in, w_hidden, bias, x, t, before, a):
    """Write all products of a step: those that read the input come first, those of states last."""
    lanes = lane_count(x)
    _multiply(w_in, x, (t + 1) * w_in.cols * lanes, a, 0, bias, True)
    first = s.products - w_hidden.rows
    for row in range(w_in.rows, s.products):
        store(a, row * lanes, splat(bias, row))
    _multiply(w_hidden, s.states, before, a, first * lanes, bias, False)


@njit(inline="always")
def _gradient(carry, i, above, copies, place):
    """Return the gradient in a state: what later steps carry, and what the layer above gives."""
    part = len(above) // copies
    g = load(carry, i) + load(above, place + i)
    for c in range(1, copies):
        g = g + load(above, c * part + place + i)
    return g


@njit(nogil=True, cache=True)
def run_rnn(s, w_in, w_hidden, bias, x, a, relu, begin, end):
    """Write the states of some steps of an RNN."""
    lanes = lane_count(x)
    length = load(s.lengths, 0)
    for k in range(begin, end):
        t, here, before = _places(s, k)
        at = number(length, t)
        _make_products(s, w_in, w_hidden, bias, x, t, before, a)
        for i in range(0, s.units * lanes, lanes):
            v = load(a, i)
            h = keep_positive(v, v) if relu else tanh(v)
            store(s.states, here + i, less_or(at, length, h, load(s.states, before + i)))


@njit(nogil=True, cache=True)
def back_rnn(s, w_back, above, copies, carry, carry_c, relu, begin, end):
    """Write the gradients in the products of some steps of an RNN, the last step first.

    `above` holds the gradients in the outputs, in so many parts that are added up; `carry` that in
    the state before, on entry and on return.
    """
    lanes = lane_count(carry)
    length, one, zero = load(s.lengths, 0), number(carry, 1.0), number(carry, 0.0)
    for k in range(end - 1, begin - 1, -1):
        t, here, _ = _places(s, k)
        at, to = number(length, t), (t - s.first) * s.stride
        for i in range(0, s.units * lanes, lanes):
            total_g = _gradient(carry, i, above, copies, here)
            h = load(s.states, here + i)
            in_a = keep_positive(h, total_g) if relu else total_g * (one - h * h)
            store(s.gates, to + i, less_or(at, length, in_a, zero))
            store(carry, i, less_or(at, length, zero, load(carry, i)))
        _multiply(w_back, s.gates, to, carry, 0, carry, False)


@njit(nogil=True, cache=True)
def run_gru(s, w_in, w_hidden, bias, x, a, relu, begin, end):
    """Write the states of some steps of a GRU, and its gates n, r, z, and v_n."""
    lanes = lane_count(x)
    length = load(s.lengths, 0)
    size = s.units * lanes
    for k in range(begin, end):
        t, here, before = _places(s, k)
        at, to = number(length, t), (t - s.first) * s.stride
        _make_products(s, w_in, w_hidden, bias, x, t, before, a)
        # A loop for each function: what does not wait for each other is computed at once.
        for i in range(size, 3 * size, lanes):
            store(s.gates, to + i, sigmoid(load(a, i)))
        for i in range(0, size, lanes):
            r, v = load(s.gates, to + size + i), load(a, 3 * size + i)
            store(s.gates, to + i, tanh(fma(r, v, load(a, i))))
            store(s.gates, to + 3 * size + i, v)
        for i in range(0, size, lanes):
            n, z = load(s.gates, to + i), load(s.gates, to + 2 * size + i)
            old = load(s.states, before + i)
            store(s.states, here + i, less_or(at, length, fma(z, old - n, n), old))


@njit(nogil=True, cache=True)
def back_gru(s, w_back, above, copies, carry, carry_c, relu, begin, end):
    """Write the gradients in the products of some steps of a GRU in the places of its gates."""
    lanes = lane_count(carry)
    length, one, zero = load(s.lengths, 0), number(carry, 1.0), number(carry, 0.0)
    size = s.units * lanes
    for k in range(end - 1, begin - 1, -1):
        t, here, before = _places(s, k)
        at, to = number(length, t), (t - s.first) * s.stride
        for i in range(0, size, lanes):
            total_g = _gradient(carry, i, above, copies, here)
            n, r = load(s.gates, to + i), load(s.gates, to + size + i)
            z, v = load(s.gates, to + 2 * size + i), load(s.gates, to + 3 * size + i)
            rest = one - z
            in_n = total_g * rest * (one - n * n)
            in_z = total_g * (load(s.states, before + i) - n) * z * rest
            in_v = in_n * r
            in_r = in_v * v * (one - r)
            store(s.gates, to + i, less_or(at, length, in_n, zero))
            store(s.gates, to + size + i, less_or(at, length, in_r, zero))
            store(s.gates, to + 2 * size + i, less_or(at, length, in_z, zero))
            store(s.gates, to + 3 * size + i, less_or(at, length, in_v, zero))
            store(carry, i, less_or(at, length, total_g * z, load(carry, i)))
        _multiply(w_back, s.gates, to + size, carry, 0, carry, False)


@njit(nogil=True, cache=True)
def run_lstm(s, w_in, w_hidden, bias, x, a, relu, begin, end):
    """Write the states of some steps of an LSTM, and its gates i, f, g, o, and tanh(c)."""
    lanes = lane_count(x)
    length = load(s.lengths, 0)
    size = s.units * lanes
    for k in range(begin, end):
        t, here, before = _places(s, k)
        at, to = number(length, t), (t - s.first) * s.stride
        _make_products(s, w_in, w_hidden, bias, x, t, before, a)
        # A loop for each function: what does not wait for each other is computed at once.
        for j in range(0, 2 * size, lanes):
            store(s.gates, to + j, sigmoid(load(a, j)))
        for j in range(2 * size, 3 * size, lanes):
            store(s.gates, to + j, tanh(load(a, j)))
        for j in range(3 * size, 4 * size, lanes):
            store(s.gates, to + j, sigmoid(load(a, j)))
        for j in range(0, size, lanes):
            i, f = load(s.gates, to + j), load(s.gates, to + size + j)
            old = load(s.cells, before + j)
            c = fma(f, old, i * load(s.gates, to + 2 * size + j))
            store(s.gates, to + 4 * size + j, tanh(c))
            store(s.cells, here + j, less_or(at, length, c, old))
        for j in range(0, size, lanes):
            h = load(s.gates, to + 3 * size + j) * load(s.gates, to + 4 * size + j)
            store(s.states, here + j, less_or(at, length, h, load(s.states, before + j)))


@njit(nogil=True, cache=True)
def back_lstm(s, w_back, above, copies, carry, carry_c, relu, begin, end):
    """Write the gradients in the products of some steps of an LSTM in the places of its gates."""
    lanes = lane_count(carry)
    length, one, zero = load(s.lengths, 0), number(carry, 1.0), number(carry, 0.0)
    size = s.units * lanes
    for k in range(end - 1, begin - 1, -1):
        t, here, before = _places(s, k)
        at, to = number(length, t), (t - s.first) * s.stride
        for j in range(0, size, lanes):
            total_g = _gradient(carry, j, above, copies, here)
            i, f = load(s.gates, to + j), load(s.gates, to + size + j)
            g, o = load(s.gates, to + 2 * size + j), load(s.gates, to + 3 * size + j)
            tanh_c, g_c = load(s.gates, to + 4 * size + j), load(carry_c, j)
            in_c = fma(total_g * o, one - tanh_c * tanh_c, g_c)
            in_i = in_c * g * i * (one - i)
            in_f = in_c * load(s.cells, before + j) * f * (one - f)
            in_g = in_c * i * (one - g * g)
            in_o = total_g * tanh_c * o * (one - o)
            store(s.gates, to + j, less_or(at, length, in_i, zero))
            store(s.gates, to + size + j, less_or(at, length, in_f, zero))
            store(s.gates, to + 2 * size + j, less_or(at, length, in_g, zero))
            store(s.gates, to + 3 * size + j, less_or(at, length, in_o, zero))
            store(carry_c, j, less_or(at, length, in_c * f, g_c))
            store(carry, j, less_or(at, length, zero, load(carry, j)))
        _multiply(w_back, s.gates, to, carry, 0, carry, False)


# -- Parameters ------------------------------------------------------------------------------------

# Steps whose vectors are summed up at once, in the cache. What is summed before is kept in double
# precision.
_BLOCK = 32


@njit
def _aligned(count, like):
    """Return an array that begins with a cache line."""
    room = np.empty(count + 64 // like.itemsize, like.dtype)
    start = (-room.ctypes.data % 64) // like.itemsize
    return room[start : start + count]


@njit(nogil=True, cache=True)
def sum_products(a, a_at, a_step, b, b_at, b_step, steps, cols, out, row_sums, begin, end):
    """Add ``Σ a[t, i]·b[t, j]``, over some steps and all lanes, to ``out[j, i]``.

    That is for rows `i` from `begin`, a multiple of eight, to `end`; ``Σ a[t, i]`` is added to
    ``row_sums[i]``. Rows of `out`, and `row_sums`, are filled up to multiples of eight.
    """
    lanes, zero = lane_count(a), number(a, 0.0)
    none = (zero, zero, zero, zero, zero, zero, zero, zero)
    pair = 2 * _BLOCK * lanes
    # Vectors of a block in the order in which they are read: they would else be pages apart.
    rows_of_a = _aligned(_BLOCK * ROWS * lanes, a)
    pairs_of_b = _aligned((cols + 1) // 2 * pair, b)
    for block in range(0, steps, _BLOCK):
        count = min(steps - block, _BLOCK)
        for j in range(cols):
            place = j // 2 * pair + j % 2 * lanes
            for t in range(count):
                v = load(b, b_at + (block + t) * b_step + j * lanes)
                store(pairs_of_b, place + 2 * t * lanes, v)
        for i in range(begin, end, ROWS):
            sums = none
            for t in range(count):
                rows = load_rows(a, a_at + (block + t) * a_step + i * lanes, lanes)
                store_rows(rows_of_a, t * ROWS * lanes, lanes, rows, ROWS)
                sums = add_rows(rows, sums)
            add_totals(row_sums, i, sums)
            for j in range(0, cols, 2):
                first, second, place = none, none, j // 2 * pair
                for t in range(count):
                    rows = load_rows(rows_of_a, t * ROWS * lanes, lanes)
                    first = add_outer_products(rows, load(pairs_of_b, place), first)
                    second = add_outer_products(rows, load(pairs_of_b, place + lanes), second)
                    place += 2 * lanes
                add_totals(out, j * out.shape[1] + i, first)
                if j + 1 < cols:
                    add_totals(out, (j + 1) * out.shape[1] + i, second)


@njit(nogil=True, cache=True)
def sum_sparse_products(
    a, a_at, a_step, b, b_at, b_step, steps, indptr, indices, out, row_sums, begin, end
):
    """Add the sums of :func:`sum_products` for the entries of a sparse matrix, and of its rows."""
    lanes, zero = lane_count(a), number(a, 0.0)
    for block in range(0, steps, _BLOCK):
        stop = min(steps, block + _BLOCK)
        for i in range(begin, end):
            sums = zero
            for t in range(block, stop):
                sums = sums + load(a, a_at + t * a_step + i * lanes)
            row_sums[i] += total(sums)
            p, last = indptr[i], indptr[i + 1]
            while p < last:
                # Beyond the end of the row the last entry is summed again, and not used.
                q, r, u = min(p + 1, last - 1), min(p + 2, last - 1), min(p + 3, last - 1)
                s0, s1, s2, s3 = zero, zero, zero, zero
                at0, at1 = b_at + indices[p] * lanes, b_at + indices[q] * lanes
                at2, at3 = b_at + indices[r] * lanes, b_at + indices[u] * lanes
                for t in range(block, stop):
                    v = load(a, a_at + t * a_step + i * lanes)
                    s0 = fma(v, load(b, at0 + t * b_step), s0)
                    s1 = fma(v, load(b, at1 + t * b_step), s1)
                    s2 = fma(v, load(b, at2 + t * b_step), s2)
                    s3 = fma(v, load(b, at3 + t * b_step), s3)
                out[p] += total(s0)
                if p + 1 < last:
                    out[p + 1] += total(s1)
                if p + 2 < last:
                    out[p + 2] += total(s2)
                if p + 3 < last:
                    out[p + 3] += total(s3)
                p += 4


# -- Between the caller's arrays and lanes ---------------------------------------------------------


@njit(nogil=True, cache=True)
def pack(rows, out, at, step):
    """Write samples to lanes, and zeros to lanes that have none."""
    lanes = lane_count(out)
    count = min(lanes, rows.batch - rows.first)
    values, width = rows.values, rows.width
    for t in range(rows.steps):
        place = at + t * step
        start = (t * rows.batch + rows.first) * width + rows.column
        i = 0
        if count == lanes and rows.size > 1:
            # What is loaded beyond the columns belongs to the next sample, and is not stored.
            while i < rows.size and start + (lanes - 1) * width + i + lanes <= len(values):
                square = transpose(load_square(values, start + i, width))
                store_square(out, place + i * lanes, lanes, square, rows.size - i)
                i += lanes
        for k in range(i, rows.size):
            for b in range(count):
                out[place + k * lanes + b] = values[start + b * width + k]
            for b in range(count, lanes):
                out[place + k * lanes + b] = 0


@njit(nogil=True, cache=True)
def unpack(a, at, step, lengths, rows):
    """Write lanes to samples; 0 in the steps that a sample does not have."""
    lanes = lane_count(a)
    count = min(lanes, rows.batch - rows.first)
    values, width = rows.values, rows.width
    for t in range(rows.steps):
        place = at + t * step
        start = (t * rows.batch + rows.first) * width + rows.column
        if rows.size > 1:
            now, length = number(a, t), load(lengths, 0)
            for i in range(0, rows.size, lanes):
                square = keep_less(now, length, load_square(a, place + i * lanes, lanes))
                store_corner(values, start + i, width, transpose(square), count, rows.size - i)
        else:
            for b in range(count):
                values[start + b * width] = a[place + b] if t < lengths[b] else 0
