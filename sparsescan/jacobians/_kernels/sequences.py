"""Whole sequences of recurrent cells: all states, and the gradients of all of them.

Units are lanes: states are ``[step][sample][unit]``, as in the caller's arrays, and arrays are
flat. There is a slot of states for each step, and one before and behind for those with which the
two directions begin. Samples do not depend on each other, so threads share them, and each runs
through all steps without waiting for another.

A product takes 16 units of float32 at once, so a step has rows of all its products, filled up; what
is computed unit by unit takes them gate by gate instead, as ``[gate][sample][unit]``, so that no
lane is empty where `units` is no multiple of 16.

A step that a sample does not have, since its sequence is shorter, leaves its state as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...kernels.compile import njit
from .lanes import (
    TILE_ROWS,
    TILE_VECTORS,
    add_tile,
    add_to,
    fma,
    keep_positive,
    lane_count,
    less_or,
    load,
    load_some,
    load_square,
    number,
    sigmoid,
    splat,
    store,
    store_some,
    store_square,
    tanh,
    total,
    transpose,
)

__all__ = [
    "BLOCK",
    "Gates",
    "Matrix",
    "Sequence",
    "back_gru",
    "back_lstm",
    "back_rnn",
    "run_gru",
    "run_lstm",
    "run_rnn",
    "sum_products",
    "sum_sparse_products",
]

Array = Any
# Without counts of references: threads that share arrays would wait for each other at every call.
_kernel = njit(nogil=True, cache=True, _nrt=False)
_helper = njit(_nrt=False)
_inline = njit(_nrt=False, forceinline=True)
# Terms that are summed up before they are added to the others: of a step, and over steps.
_PART, _STEPS_PART = 64, 32


class Matrix(NamedTuple):
    """A matrix that multiplies the rows of all samples.

    Attributes
    ----------
    is_sparse : bool
        Whether only entries are stored.
    rows, cols, vectors : int
        Its shape, and how many vectors the rows are.
    blocks, block : int
        The columns are so many blocks of so many.
    values : ndarray
        Of a dense matrix `TILE_VECTORS` vectors of rows after as many others, and of those column
        by column; the last are filled up with zeros. Of a sparse one the entries.
    indices, indptr : ndarray of int64
        Of a sparse matrix, as in CSR; empty for a dense one.
    """

    is_sparse: bool
    rows: int
    cols: int
    vectors: int
    blocks: int
    block: int
    values: Array
    indices: Array
    indptr: Array


class Gates(NamedTuple):
    """The gates of some steps, ``[step][gate][sample][unit]`` for each group of samples.

    Attributes
    ----------
    values : ndarray
        The gates.
    steps, kept, units, samples : int
        How many steps, gates of a step, and units there are, and samples of all groups but the
        last, which may have less.
    step, gate : int
        The step and the gate that are the first ones here.
    """

    values: Array
    steps: int
    kept: int
    units: int
    samples: int
    step: int
    gate: int


class Sequence(NamedTuple):
    """Some samples of one direction of one layer.

    Attributes
    ----------
    steps : int
        Number of steps.
    back : int
        1 if the last step comes first, else 0.
    units : int
        Length of a state ``h``.
    batch, first, samples : int
        How many samples there are; the first of these, and how many they are.
    lengths : ndarray
        ``[sample][unit]``: how many steps the sample has, as a number of its dtype.
    states : ndarray
        ``[steps + 2][batch][width]``; the states of this direction from column `column` on.
    width, column : int
        Length of a row of states, and where those of this direction begin.
    cells : ndarray
        The cell states of an LSTM, in the same places.
    gates : ndarray
        What the backward pass needs of a step: ``[step][gate][sample][unit]`` for these samples,
        all of which are neighbours, since few things are as slow as memory.
    gates_at, begin, kept : int
        Where the gates of these samples begin, with which step, and how many gates a step has.
    products : ndarray
        ``[sample][products]``, the products of one step.
    stride : int
        From the products of a sample to those of the next.
    parts : ndarray
        ``[gate][sample][unit]``: the same, as it is computed with unit by unit.
    room : ndarray
        For products of sparse matrices.
    zeros : ndarray
        A row of zeros.
    """

    steps: int
    back: int
    units: int
    batch: int
    first: int
    samples: int
    lengths: Array
    states: Array
    width: int
    column: int
    cells: Array
    gates: Array
    gates_at: int
    begin: int
    kept: int
    products: Array
    stride: int
    parts: Array
    room: Array
    zeros: Array


@_inline
def _copy(x, at, out, to, count, room):
    """Copy some numbers, and whole vectors of them where there is room for what is too much."""
    lanes = lane_count(x)
    whole = -(-count // lanes) * lanes
    if whole > room:
        whole = count // lanes * lanes
    for i in range(0, whole, lanes):
        store(out, to + i, load(x, at + i))
    for i in range(whole, count):
        out[to + i] = x[at + i]


# -- Products --------------------------------------------------------------------------------------


@_inline
def _multiply(m, x, at, step, jump, bias, begins, out, to, stride, samples, room):
    """Write ``m x + bias`` to `out` if it begins a sum, else add ``m x`` to what is there.

    From a sample to the next it is `step` in `x`, and `stride` in `out`. The numbers of a sample
    are in blocks, as the columns of `m`, which begin `jump` apart.
    """
    if m.is_sparse:
        _multiply_sparse(m, x, at, step, jump, bias, begins, out, to, stride, samples, room)
    else:
        _multiply_dense(m, x, at, step, jump, bias, begins, out, to, stride, samples)


@_inline
def _multiply_dense(m, x, at, step, jump, bias, begins, out, to, stride, samples):
    lanes = lane_count(x)
    v = 0
    while v < m.vectors:
        width = min(TILE_VECTORS, m.vectors - v)
        b = 0
        while b < samples:
            place, first = to + b * stride + v * lanes, v * lanes * m.cols
            start, start_at, start_step = out, place, stride
            if begins:
                start, start_at, start_step = bias, v * lanes, 0
            add_tile(
                *(out, place, stride, start, start_at, start_step, m.values, first),
                *(x, at + b * step, step, 1, jump, m.blocks, m.block, _PART, width, samples - b),
            )
            b += TILE_ROWS
        v += TILE_VECTORS


@_inline
def _tile_width(vectors):
    """Return how many of the vectors that are left a tile takes: one by itself would be slow."""
    return 2 if vectors == 4 else min(TILE_VECTORS, vectors)


@_helper
def _multiply_sparse(m, x, at, step, jump, bias, begins, out, to, stride, samples, room):
    """Multiply with samples as lanes, in which every weight meets a vector.

    That takes a `room` of one more vector of columns, and of rows, than there are, times lanes.
    """
    lanes = lane_count(x)
    sums = (m.cols + lanes) * lanes
    for b in range(0, samples, lanes):
        for k in range(m.blocks):
            start = at + b * step + k * jump
            _turn(x, start, step, lanes, m.block, room, k * m.block * lanes, lanes)
        for row in range(m.rows):
            # Four sums, none of which waits for the one before.
            zero = number(x, 0.0)
            s0, s1, s2, s3 = zero, zero, zero, zero
            p, end = m.indptr[row], m.indptr[row + 1]
            while p + 4 <= end:
                s0 = fma(splat(m.values, p), load(room, m.indices[p] * lanes), s0)
                s1 = fma(splat(m.values, p + 1), load(room, m.indices[p + 1] * lanes), s1)
                s2 = fma(splat(m.values, p + 2), load(room, m.indices[p + 2] * lanes), s2)
                s3 = fma(splat(m.values, p + 3), load(room, m.indices[p + 3] * lanes), s3)
                p += 4
            while p < end:
                s0 = fma(splat(m.values, p), load(room, m.indices[p] * lanes), s0)
                p += 1
            store(room, sums + row * lanes, (s0 + s1) + (s2 + s3))
        for row in range(0, m.rows, lanes):
            square = transpose(load_square(room, sums + row * lanes, lanes))
            store_square(room, 0, lanes, square)
            for i in range(min(lanes, samples - b)):
                place = to + (b + i) * stride + row
                before = load(bias, row) if begins else load(out, place)
                added = before + load(room, i * lanes)
                store_some(out, place, added, m.rows - row)


# -- States ----------------------------------------------------------------------------------------


@_inline
def _places(s, k):
    """Return the `k`-th step in the direction, and where these begin.

    Its state, the state before, and its gates.
    """
    t = s.steps - 1 - k if s.back else k
    before = t + 2 if s.back else t
    here = ((t + 1) * s.batch + s.first) * s.width + s.column
    gates = s.gates_at + (t - s.begin) * s.kept * s.samples * s.units
    return t, here, (before * s.batch + s.first) * s.width + s.column, gates


@_inline
def _runs(s):
    """Return how many runs of neighbours the states of a step are, and how long each is."""
    if s.width == s.units:
        return 1, s.samples * s.units
    return s.samples, s.units


@_inline
def _part(s):
    """Return the numbers from one gate to the next in the parts: whole vectors, and one more."""
    lanes = lane_count(s.parts)
    return -(-s.samples * s.units // lanes) * lanes + lanes


@_inline
def _make_products(s, w_in, w_hidden, bias, x, t, before, gates):
    """Compute all products of a step: those that read the input come first, of states last."""
    lanes, rows = lane_count(x), gates * s.units
    at = ((t + 1) * s.batch + s.first) * w_in.cols
    _multiply(
        *(w_in, x, at, w_in.cols, 0),
        *(bias, True, s.products, 0, s.stride, s.samples, s.room),
    )
    # What is written beyond its rows is 0·x, which may be no number.
    for b in range(s.samples):
        for i in range(w_in.rows, rows, lanes):
            store(s.products, b * s.stride + i, load(bias, i))
    _multiply(
        *(w_hidden, s.states, before, s.width, 0),
        *(bias, False, s.products, rows - w_hidden.rows, s.stride, s.samples, s.room),
    )
    _take_apart(s, gates)


@_inline
def _take_apart(s, gates):
    """Put the products of a step in the order of the parts."""
    lanes, part = lane_count(s.parts), _part(s)
    for g in range(gates):
        for b in range(s.samples):
            for i in range(0, s.units, lanes):
                # What is written beyond the units is written again with the next sample.
                v = load(s.products, b * s.stride + g * s.units + i)
                store(s.parts, g * part + b * s.units + i, v)


@_inline
def _back_products(s, w_back, gates):
    """Compute the gradient in the state before from those in the products that read it."""
    _multiply(
        *(w_back, s.gates, gates, s.units, s.samples * s.units),
        *(s.zeros, True, s.products, 0, s.stride, s.samples, s.room),
    )
    _take_apart(s, 1)


@_inline
def _back_input(s, w, t, gates, below):
    """Write the gradients in the inputs of a step if `w`, which they are products with, has any."""
    if w.rows == 0:
        return
    _multiply(
        *(w, s.gates, gates, s.units, s.samples * s.units),
        *(s.zeros, True, s.products, 0, s.stride, s.samples, s.room),
    )
    at = (t * s.batch + s.first) * w.rows
    for b in range(s.samples):
        room = (s.samples - b) * w.rows
        _copy(s.products, b * s.stride, below, at + b * w.rows, w.rows, room)


@_inline
def _clear_parts(s):
    """Begin with no gradient from later steps."""
    zero = number(s.parts, 0.0)
    for i in range(0, s.samples * s.units, lane_count(s.parts)):
        store(s.parts, i, zero)


@_inline
def _add_parts(s, carry):
    """Add what was computed last to the gradient in the state."""
    lanes = lane_count(carry)
    for i in range(0, s.samples * s.units, lanes):
        store_some(carry, i, load(carry, i) + load(s.parts, i), s.samples * s.units - i)


@_kernel
def run_rnn(s, w_in, w_hidden, bias, x, relu, begin, end):
    """Write the states of some steps of an RNN."""
    lanes = lane_count(x)
    runs, size = _runs(s)
    for k in range(begin, end):
        t, here, before, _ = _places(s, k)
        at = number(x, t)
        _make_products(s, w_in, w_hidden, bias, x, t, before, 1)
        for r in range(runs):
            for i in range(0, size, lanes):
                j, n = r * size + i, r * s.width + i
                length, v = load(s.lengths, s.first * s.units + j), load(s.parts, j)
                h = keep_positive(v, v) if relu else tanh(v)
                h = less_or(at, length, h, load(s.states, before + n))
                store_some(s.states, here + n, h, size - i)


@_kernel
def back_rnn(s, w_back, w_in_back, above, below, carry, carry_c, relu, begin, end):
    """Write the gradients in the products and inputs of some steps of an RNN, the last step first.

    `above` holds the gradients in the outputs, `below` gets those in the inputs, and `carry` holds
    that in the state before, on entry and on return.
    """
    lanes = lane_count(carry)
    one, zero = number(carry, 1.0), number(carry, 0.0)
    runs, size = _runs(s)
    _clear_parts(s)
    for k in range(end - 1, begin - 1, -1):
        t, here, _, to = _places(s, k)
        at, top = number(carry, t), here - s.batch * s.width
        for r in range(runs):
            for i in range(0, size, lanes):
                j, n, left = r * size + i, r * s.width + i, size - i
                length, h = load(s.lengths, s.first * s.units + j), load(s.states, here + n)
                later = load(carry, j) + load(s.parts, j)
                g = later + load_some(above, top + n, left)
                in_a = keep_positive(h, g) if relu else g * (one - h * h)
                store_some(s.gates, to + j, less_or(at, length, in_a, zero), left)
                store_some(carry, j, less_or(at, length, zero, later), left)
        _back_products(s, w_back, to)
        _back_input(s, w_in_back, t, to, below)
    _add_parts(s, carry)


@_kernel
def run_gru(s, w_in, w_hidden, bias, x, relu, begin, end):
    """Write the states of some steps of a GRU, and its gates n, r, z, and v_n."""
    lanes = lane_count(x)
    runs, size = _runs(s)
    part, whole = _part(s), s.samples * s.units
    gate = s.samples * s.units
    for k in range(begin, end):
        t, here, before, to = _places(s, k)
        at = number(x, t)
        _make_products(s, w_in, w_hidden, bias, x, t, before, 4)
        # A loop for each function: what does not wait for each other is computed at once.
        for g in range(1, 3):
            for j in range(g * part, g * part + whole, lanes):
                store(s.parts, j, sigmoid(load(s.parts, j)))
        for j in range(0, whole, lanes):
            r, v = load(s.parts, part + j), load(s.parts, 3 * part + j)
            store(s.parts, j, tanh(fma(r, v, load(s.parts, j))))
        for run in range(runs):
            for i in range(0, size, lanes):
                j, n, left = run * size + i, run * s.width + i, size - i
                length, old = load(s.lengths, s.first * s.units + j), load(s.states, before + n)
                a, z = load(s.parts, j), load(s.parts, 2 * part + j)
                h = less_or(at, length, fma(z, old - a, a), old)
                store_some(s.states, here + n, h, left)
                store_some(s.gates, to + j, a, left)
                store_some(s.gates, to + gate + j, load(s.parts, part + j), left)
                store_some(s.gates, to + 2 * gate + j, z, left)
                store_some(s.gates, to + 3 * gate + j, load(s.parts, 3 * part + j), left)


@_kernel
def back_gru(s, w_back, w_in_back, above, below, carry, carry_c, relu, begin, end):
    """Write the gradients in the inputs of a GRU; gates become the gradients in products."""
    lanes = lane_count(carry)
    one, zero = number(carry, 1.0), number(carry, 0.0)
    runs, size = _runs(s)
    gate = s.samples * s.units
    _clear_parts(s)
    for k in range(end - 1, begin - 1, -1):
        t, here, before, to = _places(s, k)
        at, top = number(carry, t), here - s.batch * s.width
        for run in range(runs):
            for i in range(0, size, lanes):
                j, m, left = run * size + i, run * s.width + i, size - i
                length = load(s.lengths, s.first * s.units + j)
                later = load(carry, j) + load(s.parts, j)
                g = later + load_some(above, top + m, left)
                n, r = load(s.gates, to + j), load(s.gates, to + gate + j)
                z, v = load(s.gates, to + 2 * gate + j), load(s.gates, to + 3 * gate + j)
                rest = one - z
                in_n = g * rest * (one - n * n)
                in_z = g * (load(s.states, before + m) - n) * z * rest
                in_v = in_n * r
                in_r = in_v * v * (one - r)
                store_some(s.gates, to + j, less_or(at, length, in_n, zero), left)
                store_some(s.gates, to + gate + j, less_or(at, length, in_r, zero), left)
                store_some(s.gates, to + 2 * gate + j, less_or(at, length, in_z, zero), left)
                store_some(s.gates, to + 3 * gate + j, less_or(at, length, in_v, zero), left)
                store_some(carry, j, less_or(at, length, g * z, later), left)
        _back_products(s, w_back, to + gate)
        _back_input(s, w_in_back, t, to, below)
    _add_parts(s, carry)


@_kernel
def run_lstm(s, w_in, w_hidden, bias, x, relu, begin, end):
    """Write the states of some steps of an LSTM, and its gates i, f, g, o."""
    lanes = lane_count(x)
    runs, size = _runs(s)
    part, whole = _part(s), s.samples * s.units
    gate = s.samples * s.units
    for k in range(begin, end):
        t, here, before, to = _places(s, k)
        at = number(x, t)
        _make_products(s, w_in, w_hidden, bias, x, t, before, 4)
        # A loop for each function: what does not wait for each other is computed at once.
        for g in (0, 1, 3):
            for j in range(g * part, g * part + whole, lanes):
                store(s.parts, j, sigmoid(load(s.parts, j)))
        for j in range(2 * part, 2 * part + whole, lanes):
            store(s.parts, j, tanh(load(s.parts, j)))
        for r in range(runs):
            for i in range(0, size, lanes):
                j, n, left = r * size + i, r * s.width + i, size - i
                length, old = load(s.lengths, s.first * s.units + j), load(s.cells, before + n)
                added = load(s.parts, j) * load(s.parts, 2 * part + j)
                c = fma(load(s.parts, part + j), old, added)
                store_some(s.parts, 4 * part + j, c, left)
                store_some(s.cells, here + n, less_or(at, length, c, old), left)
        for j in range(4 * part, 4 * part + whole, lanes):
            store(s.parts, j, tanh(load(s.parts, j)))
        for r in range(runs):
            for i in range(0, size, lanes):
                j, n, left = r * size + i, r * s.width + i, size - i
                length, old = load(s.lengths, s.first * s.units + j), load(s.states, before + n)
                h = load(s.parts, 3 * part + j) * load(s.parts, 4 * part + j)
                store_some(s.states, here + n, less_or(at, length, h, old), left)
                for g in range(4):
                    store_some(s.gates, to + g * gate + j, load(s.parts, g * part + j), left)


@_kernel
def back_lstm(s, w_back, w_in_back, above, below, carry, carry_c, relu, begin, end):
    """Write the gradients in the inputs of an LSTM; gates become the gradients in products."""
    lanes = lane_count(carry)
    one, zero = number(carry, 1.0), number(carry, 0.0)
    runs, size = _runs(s)
    gate = s.samples * s.units
    _clear_parts(s)
    for k in range(end - 1, begin - 1, -1):
        t, here, before, to = _places(s, k)
        at, top = number(carry, t), here - s.batch * s.width
        for run in range(runs):
            for n in range(0, size, lanes):
                j, m, left = run * size + n, run * s.width + n, size - n
                length = load(s.lengths, s.first * s.units + j)
                later = load(carry, j) + load(s.parts, j)
                total_g = later + load_some(above, top + m, left)
                i, f = load(s.gates, to + j), load(s.gates, to + gate + j)
                g, o = load(s.gates, to + 2 * gate + j), load(s.gates, to + 3 * gate + j)
                tanh_c, g_c = tanh(load(s.cells, here + m)), load(carry_c, j)
                in_c = fma(total_g * o, one - tanh_c * tanh_c, g_c)
                in_i = in_c * g * i * (one - i)
                in_f = in_c * load(s.cells, before + m) * f * (one - f)
                in_g = in_c * i * (one - g * g)
                in_o = total_g * tanh_c * o * (one - o)
                store_some(s.gates, to + j, less_or(at, length, in_i, zero), left)
                store_some(s.gates, to + gate + j, less_or(at, length, in_f, zero), left)
                store_some(s.gates, to + 2 * gate + j, less_or(at, length, in_g, zero), left)
                store_some(s.gates, to + 3 * gate + j, less_or(at, length, in_o, zero), left)
                store_some(carry_c, j, less_or(at, length, in_c * f, g_c), left)
                store_some(carry, j, less_or(at, length, zero, later), left)
        _back_products(s, w_back, to)
        _back_input(s, w_in_back, t, to, below)
    _add_parts(s, carry)


# -- Parameters ------------------------------------------------------------------------------------

# Samples of steps that are summed up at once, in the cache. What is summed before is kept in double
# precision.
BLOCK = 256


@_kernel
def sum_products(
    gates,
    x,
    x_at,
    x_cols,
    x_rows,
    x_out,
    h,
    h_at,
    h_step,
    h_cols,
    h_first,
    h_out,
    row_sums,
    batch,
    steps,
    room,
    begin,
    end,
):
    """Add ``Σ a[t, n, i]·x[t, n, j]``, over some steps and all samples, to ``x_out[j, i]``.

    The same with `h` is added to `h_out`, and ``Σ a[t, n, i]`` to ``row_sums[i]``. That is for rows
    `i` of the gates ``a`` from `begin`, where a vector begins, to `end`. Those from `x_rows` on
    have no sums with `x`, and those before `h_first` none with `h`; what their vectors share with
    others is written, and means nothing. `h_step` is from the numbers of a sample in `h` to those
    of the next. Rows of all sums are filled up to vectors. `room` begins with a tile of zeros.
    """
    lanes, stride = lane_count(x), len(row_sums)
    block = max(1, BLOCK // batch)
    most = TILE_VECTORS * lanes
    together = (1 + TILE_ROWS) * most
    for start in range(0, steps, block):
        count = min(steps - start, block)
        terms, first = count * batch, start * batch
        i = begin
        while i < end:
            size = _tile_width(-(-(end - i) // lanes)) * lanes
            some = min(size, end - i)
            _take_together(gates, batch, start, count, i, some, room, together, most)
            _add_rows(room, together, terms, size, row_sums, i)
            # Of each factor whole vectors are left out that have no sums with it.
            at, stop = x_at + first * x_cols, min(size, -(-(x_rows - i) // lanes) * lanes)
            _add_columns(room, terms, 0, stop, x, at, x_cols, x_cols, x_out, i, stride)
            at, skip = h_at + first * h_step, max(0, h_first - i) // lanes * lanes
            _add_columns(room, terms, skip, size, h, at, h_step, h_cols, h_out, i, stride)
            i += size


@_helper
def _add_rows(room, at, terms, size, out, to):
    """Add the sums of some vectors of the gates, whose rows are in `room` from `at` on."""
    lanes = lane_count(room)
    step = TILE_VECTORS * lanes
    part = _STEPS_PART * step
    for i in range(0, size, lanes):
        begin, end = at + i, at + i + terms * step
        total_sum = number(room, 0.0)
        while begin < end:
            # Two sums, neither of which waits for the other.
            k, stop = begin, min(begin + part, end)
            s0, s1 = number(room, 0.0), number(room, 0.0)
            while k + step < stop:
                s0, s1 = s0 + load(room, k), s1 + load(room, k + step)
                k += 2 * step
            if k < stop:
                s0 = s0 + load(room, k)
            total_sum = total_sum + (s0 + s1)
            begin += part
        add_to(out, to + i, total_sum)


@_helper
def _add_columns(room, terms, begin, end, b, at, step, cols, out, to, stride):
    """Add products of columns of `b` and some vectors of the gates, whose rows are in `room`."""
    lanes = lane_count(b)
    most = TILE_VECTORS * lanes
    zeros, tile, together = 0, most, (1 + TILE_ROWS) * most
    for j in range(0, cols if begin < end else 0, TILE_ROWS):
        height = min(TILE_ROWS, cols - j)
        add_tile(
            *(room, tile, most, room, zeros, 0, room, together + begin),
            *(b, at + j, 1, step, 0, 1, terms, _STEPS_PART, (end - begin) // lanes, height),
        )
        for n in range(height):
            for k in range(0, end - begin, lanes):
                v = load(room, tile + n * most + k)
                add_to(out, to + begin + (j + n) * stride + k, v)


@_helper
def _take_together(gates, batch, start, steps, row, count, out, to, stride):
    """Write `count` rows of gates from `row` on, sample by sample, in rows of `stride`."""
    a, units, done = gates.values, gates.units, 0
    gate, unit = gates.gate + row // units, row % units
    while done < count:
        some = min(units - unit, count - done)
        place = to + done
        for t in range(gates.step + start, gates.step + start + steps):
            for first in range(0, batch, gates.samples):
                samples = min(gates.samples, batch - first)
                at = (first * gates.steps + t * samples) * gates.kept * units
                at += gate * samples * units + unit
                for _ in range(samples):
                    _copy(a, at, out, place, some, stride - done)
                    at += units
                    place += stride
        gate, unit, done = gate + 1, 0, done + some


@_kernel
def sum_sparse_products(
    gates,
    b,
    b_at,
    b_step,
    cols,
    batch,
    steps,
    indptr,
    indices,
    room,
    out,
    row_sums,
    begin,
    end,
):
    """Add the sums of :func:`sum_products` for the entries of a sparse matrix, and of its rows."""
    lanes, zero = lane_count(b), number(b, 0.0)
    block = max(1, BLOCK // batch)
    size = -(-(end - begin) // lanes) * lanes
    # The terms of a sum are lanes. Rows are no power of two apart, which caches are slow at.
    stride = -(-block * batch // lanes) * lanes + lanes
    turned_a = (stride + 1) * size
    turned_b = turned_a + size * stride
    for start in range(0, steps, block):
        count = min(steps - start, block)
        terms = count * batch
        _take_together(gates, batch, start, count, begin, end - begin, room, 0, size)
        _turn(room, 0, size, terms, size, room, turned_a, stride)
        _turn(b, b_at + start * batch * b_step, b_step, terms, cols, room, turned_b, stride)
        for i in range(begin, end):
            row, sums = turned_a + (i - begin) * stride, zero
            for k in range(0, terms, lanes):
                sums = sums + load(room, row + k)
            row_sums[i] += total(sums)
            p, last = indptr[i], indptr[i + 1]
            while p < last:
                # Beyond the end of the row the last entry is summed again, and not used.
                q, r, u = min(p + 1, last - 1), min(p + 2, last - 1), min(p + 3, last - 1)
                s0, s1, s2, s3 = zero, zero, zero, zero
                at0, at1 = turned_b + indices[p] * stride, turned_b + indices[q] * stride
                at2, at3 = turned_b + indices[r] * stride, turned_b + indices[u] * stride
                for k in range(0, terms, lanes):
                    v = load(room, row + k)
                    s0 = fma(v, load(room, at0 + k), s0)
                    s1 = fma(v, load(room, at1 + k), s1)
                    s2 = fma(v, load(room, at2 + k), s2)
                    s3 = fma(v, load(room, at3 + k), s3)
                out[p] += total(s0)
                if p + 1 < last:
                    out[p + 1] += total(s1)
                if p + 2 < last:
                    out[p + 2] += total(s2)
                if p + 3 < last:
                    out[p + 3] += total(s3)
                p += 4


@_helper
def _turn(x, at, step, rows, cols, out, to, stride):
    """Transpose some rows, and fill up what comes out with zeros to whole vectors."""
    lanes = lane_count(x)
    for k in range(0, rows, lanes):
        for j in range(0, cols, lanes):
            square = transpose(load_square(x, at + k * step + j, step))
            store_square(out, to + j * stride + k, stride, square)
    for j in range(cols):
        for k in range(rows, -(-rows // lanes) * lanes):
            out[to + j * stride + k] = 0
