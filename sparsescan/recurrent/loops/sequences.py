"""Whole sequences of recurrent cells: all states, and the gradients of all of them.

Arrays are flat. There is a slot of states for each step, and one before and behind for those with
which the two directions begin. Samples do not depend on each other, so threads share them, and each
runs through all steps without waiting for another.

Lanes of vectors are samples or units. Where samples are lanes, states are ``[group][step][unit]``
of vectors of a group's samples: every weight is multiplied by a vector, and no lane is empty
but for those that fill up the last group. With AVX-512 such a vector has two units, or any two rows
that are neighbours, ``[group][step][pair][sample][2]``: twice the samples would leave half of the
threads without work. Steps are copied from and to the caller's arrays, and summed up, `STEPS` at a
time, while they are in the cache.

A batch that is too small for that has units as lanes, and states ``[step][sample][unit]``, as in
the caller's arrays. A product takes 16 units of float32 at once, so a step has rows of all its
products, filled up; what is computed unit by unit takes them gate by gate instead, as
``[gate][sample][unit]``, so that no lane is empty where `units` is no multiple of 16.

A step that a sample does not have, since its sequence is shorter, leaves its state as it is.

A backward pass leaves out steps that have no gradient, as :mod:`.pauses` says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.compile import njit
from ...kernels.cpu.lanes import (
    SUM_COLUMNS,
    SUM_ROWS,
    TILE_ROWS,
    TILE_VECTORS,
    add_pair_products,
    add_pair_tile,
    add_sample_products,
    add_sample_tile,
    add_tile,
    add_to,
    fma,
    keep_positive,
    lane_count,
    less_or,
    load,
    load_samples,
    number,
    sample_count,
    sigmoid,
    splat_samples,
    store,
    store_some,
    tanh,
    total,
)
from .callers import (
    copy_some,
    row_of,
    turn_row_in,
    turn_row_out,
    turn_slots_out,
    turn_steps_in,
)
from .pauses import UNKNOWN, all_zero, bound_of, clear, has_step, no_grads_above, zero_times

__all__ = [
    "BLOCK",
    "STEPS",
    "Gates",
    "Matrix",
    "Sequence",
    "Sums",
    "back_gru",
    "back_lstm",
    "back_rnn",
    "find_ends",
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
    """A matrix that multiplies the vectors of all samples.

    Attributes
    ----------
    is_sparse : bool
        Whether only entries are stored; then samples are lanes.
    rows, cols, vectors : int
        Its shape, and how many vectors the rows are, where units are lanes.
    blocks, block : int
        The columns are so many blocks of so many.
    tile : int
        Rows that are neighbours in a column.
    values : ndarray
        A dense matrix is stored `tile` rows after as many others, each column by column; the last
        rows are filled up with zeros. Only the entries of a sparse matrix are stored.
    indices, indptr : ndarray of int64
        Those of a sparse matrix, as in CSR; empty for a dense one.
    """

    is_sparse: bool
    rows: int
    cols: int
    vectors: int
    blocks: int
    block: int
    tile: int
    values: Array
    indices: Array
    indptr: Array


class Gates(NamedTuple):
    """The gates of some steps, ``[step][gate]`` for each group of samples, as in a sequence.

    Attributes
    ----------
    values : ndarray
        The gates.
    steps, kept, units, samples : int
        How many steps, gates of a step, and units there are, and samples of all groups but the
        last, which may have less.
    step, gate : int
        The step and the gate that are the first ones here.
    has_grads : ndarray of uint8
        Whether there are gradients in the place of the gates, as in a sequence.
    """

    values: Array
    steps: int
    kept: int
    units: int
    samples: int
    step: int
    gate: int
    has_grads: Array


class Sequence(NamedTuple):
    """Some samples of one direction of one layer, in groups that are computed one after another.

    Attributes
    ----------
    steps : int
        Number of steps.
    back : int
        1 if the last step comes first, else 0.
    units : int
        Length of a state ``h``.
    batch, given : int
        How many samples there are, filled up to whole groups, and how many the caller has.
    first, count, samples : int
        The first of these samples, how many they are, and how many are computed at once.
    sample_lanes, pairs : bool
        Whether lanes are samples, or units; and whether vectors of samples have those of two rows.
    lengths : ndarray
        ``[sample][unit]``, or the order in which states have samples as lanes: how many steps the
        sample has, as a number of its dtype.
    states : ndarray
        ``[steps + 2][batch][units]``, or that for each group.
    width : int
        Length of a row of the outputs of both directions.
    cols, block : int
        Length of an input here, and how much of it is the state of one direction of the layer
        below.
    jump : int
        From the states of one direction of the layer below to those of the other, in its input.
    cells : ndarray
        The cell states of an LSTM, in the same places; empty for others.
    gates : ndarray
        What the backward pass needs of a step, as ``[step][gate]`` of each group's samples, all of
        which are neighbours, since few things are as slow as memory.
    segment, begin, kept : int
        How many steps there are gates of, the first of them, and how many gates a step has.
    grads : ndarray
        The gradients in the products of the last `STEPS` steps, or those of all, which then take
        the place of the gates.
    grad_step : int
        From those of a step to the next; 0 in the place of the gates.
    has_grads : ndarray of uint8
        ``[sample][step]``, for the first sample of each group and the steps that there are gates
        of: 1 if the backward pass has not left out the step, whose gradients in products are then 0
        and not written unless they are summed up with those of others.
    products : ndarray
        ``[sample][products]``, the products of one step, where units are lanes; otherwise gradients
        in the states and inputs of one.
    stride : int
        From the products of a sample to those of the next.
    parts : ndarray
        The products gate by gate, as they are computed with unit by unit.
    zeros : ndarray
        Zeros for a product to begin with.
    """

    steps: int
    back: int
    units: int
    batch: int
    given: int
    first: int
    count: int
    samples: int
    sample_lanes: bool
    pairs: bool
    lengths: Array
    states: Array
    width: int
    cols: int
    block: int
    jump: int
    cells: Array
    gates: Array
    segment: int
    begin: int
    kept: int
    grads: Array
    grad_step: int
    has_grads: Array
    products: Array
    stride: int
    parts: Array
    zeros: Array


class Caller(NamedTuple):
    """The caller's arrays, where lanes are samples, whose rows are those of a step and sample.

    Attributes
    ----------
    x : ndarray
        The inputs; empty where others have taken them over.
    cols : int
        Length of a row of them.
    is_shorter : bool
        Whether some samples have less than all steps.
    output : ndarray
        Where the outputs go, if they are those of one direction; otherwise empty.
    ends : ndarray of int64
        For the first sample of each group, before which step a backward pass needs gates; empty if
        all steps are run.
    """

    x: Array
    cols: int
    is_shorter: bool
    output: Array
    ends: Array


class Sums(NamedTuple):
    """Sums of gradients of weights over steps and samples, where samples are lanes.

    Attributes
    ----------
    rows, stride : int
        How many products of a step have sums, and how many numbers there are for them.
    x_cols, x_rows : int
        How many columns of the weights of the input have sums, and up to which product.
    h_cols, h_first : int
        Those of the state, and from which product on.
    lot : int
        Samples whose sums are added up, in this order; each lot has sums of its own.
    x_out, h_out, row_sums : ndarray of float64
        The sums for weights, ``[lot][column][product]``, and for biases.
    ones : ndarray
        A one for each sample of a group.
    """

    rows: int
    stride: int
    x_cols: int
    x_rows: int
    h_cols: int
    h_first: int
    lot: int
    x_out: Array
    h_out: Array
    row_sums: Array
    ones: Array


# -- Products --------------------------------------------------------------------------------------


@_inline
def _multiply(m, x, at, step, jump, bias, begins, out, to, stride, samples):
    """Write ``m x + bias`` to `out` if it begins a sum, else add ``m x``, with units as lanes.

    From a sample to the next it is `step` in `x`, and `stride` in `out`. The numbers of a sample
    are in blocks, as the columns of `m`, which begin `jump` apart.
    """
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


@_inline
def _multiply_samples(m, x, at, jump, start, start_at, out, to, pairs):
    """Write ``start + m x`` with samples as lanes; `start` may be `out`.

    The numbers of a sample are in blocks, as the columns of `m`, which begin `jump` apart; they are
    neighbours if `jump` is 0. Of a sparse `m`, `indices` are places in `x`.
    """
    samples, part = sample_count(x), min(_PART, m.block)
    if m.is_sparse:
        _multiply_sparse(m, x, at, start, start_at, out, to)
        return
    cols = m.block if jump > 0 else m.cols
    for first in range(0, m.cols, cols):
        for row in range(0, m.rows, m.tile):
            place, own_start = to + row * samples, start_at + row * samples
            values = row * m.cols + first * m.tile
            if pairs:
                add_pair_tile(
                    *(out, place, start, own_start, x, at, m.values, values),
                    *(cols // 2, part // 2, m.tile // 2),
                )
            else:
                add_sample_tile(
                    *(out, place, start, own_start, x, at, m.values, values),
                    *(cols, part, m.tile),
                )
        at += jump
        start, start_at = out, to


@_helper
def _multiply_sparse(m, x, at, start, start_at, out, to):
    samples = sample_count(x)
    for row in range(m.rows):
        # Four sums, none of which waits for the one before.
        zero = number(load_samples(start, start_at), 0.0)
        s0, s1, s2, s3 = zero, zero, zero, zero
        p, end = m.indptr[row], m.indptr[row + 1]
        while p + 4 <= end:
            x0 = load_samples(x, at + m.indices[p] * samples)
            x1 = load_samples(x, at + m.indices[p + 1] * samples)
            x2 = load_samples(x, at + m.indices[p + 2] * samples)
            x3 = load_samples(x, at + m.indices[p + 3] * samples)
            s0 = fma(splat_samples(m.values, p), x0, s0)
            s1 = fma(splat_samples(m.values, p + 1), x1, s1)
            s2 = fma(splat_samples(m.values, p + 2), x2, s2)
            s3 = fma(splat_samples(m.values, p + 3), x3, s3)
            p += 4
        while p < end:
            x0 = load_samples(x, at + m.indices[p] * samples)
            s0 = fma(splat_samples(m.values, p), x0, s0)
            p += 1
        before = load_samples(start, start_at + row * samples)
        store(out, to + row * samples, before + ((s0 + s1) + (s2 + s3)))


# -- States ----------------------------------------------------------------------------------------


@_inline
def _begin_block(s, caller, first, cols, x, k, begin, end):
    """Take over the inputs of a block of steps if the `k`-th in the direction begins it."""
    if len(caller.x) > 0 and (k == begin or k % STEPS == 0):
        stop = min((k // STEPS + 1) * STEPS, end)
        t = s.steps - stop if s.back else k
        turn_steps_in(caller, s, first, cols, x, t, t + stop - k)


@_inline
def _end_block(s, caller, first, k, begin, end):
    """Write the outputs of a block of steps if the `k`-th in the direction ends it."""
    if len(caller.output) > 0 and (k + 1 == end or (k + 1) % STEPS == 0):
        start = max(k // STEPS * STEPS, begin)
        slot = s.steps - k if s.back else start + 1
        stop = slot + k + 1 - start
        turn_slots_out(s.states, s, first, slot, stop, caller.output, 1, s.units, 0)


@_inline
def _places(s, first, k):
    """Return the `k`-th step in the direction, and where these begin.

    Its state, the state before, and its gates.
    """
    t = s.steps - 1 - k if s.back else k
    before = t + 2 if s.back else t
    here = row_of(s, first, t + 1) * s.units
    gates = (first * s.segment + (t - s.begin) * s.samples) * s.kept * s.units
    return t, here, row_of(s, first, before) * s.units, gates


@_inline
def _grads_at(s, k, gates):
    """Return where the gradients in the products of the `k`-th step begin."""
    return k % STEPS * s.grad_step if s.grad_step > 0 else gates


@_inline
def _part(s):
    """Return the numbers from one gate to the next in the parts.

    Where units are lanes, whole vectors, and one more.
    """
    if s.sample_lanes:
        return s.samples * s.units
    lanes = lane_count(s.parts)
    return -(-s.samples * s.units // lanes) * lanes + lanes


@_inline
def _make_products(s, first, w_in, w_hidden, bias, x, t, before, gates):
    """Compute all products of a step: those that read the input come first, of states last."""
    lanes, rows = lane_count(x), gates * s.units
    at = row_of(s, first, t + 1) * w_in.block
    hidden = rows - w_hidden.rows
    if s.sample_lanes:
        _multiply_samples(w_in, x, at, s.jump, bias, 0, s.parts, 0, s.pairs)
        for i in range(w_in.rows * s.samples, rows * s.samples, lanes):
            store(s.parts, i, load(bias, i))
        place = hidden * s.samples
        _multiply_samples(w_hidden, s.states, before, 0, s.parts, place, s.parts, place, s.pairs)
        return
    _multiply(
        *(w_in, x, at, w_in.block, s.jump),
        *(bias, True, s.products, 0, s.stride, s.samples),
    )
    # Beyond the rows of `w_in`, 0·x was written, which may be NaN.
    for b in range(s.samples):
        for i in range(w_in.rows, rows, lanes):
            store(s.products, b * s.stride + i, load(bias, i))
    _multiply(
        *(w_hidden, s.states, before, s.units, 0),
        *(bias, False, s.products, hidden, s.stride, s.samples),
    )
    _take_apart(s, gates)


@_inline
def _take_apart(s, gates):
    """Put the products of a step in the order of the parts."""
    lanes, part = lane_count(s.parts), _part(s)
    for g in range(gates):
        for b in range(s.samples):
            for i in range(0, s.units, lanes):
                # Lanes beyond the units are written again with the next sample.
                v = load(s.products, b * s.stride + g * s.units + i)
                store(s.parts, g * part + b * s.units + i, v)


@_inline
def _take_above(s, first, above, t):
    """Put the gradients in the states of a step that are not of later steps where products are."""
    at = (t * s.given + first) * s.width + s.back * s.units
    if len(above) == 0:
        clear(s.products, 0, s.samples * s.units)
        return
    if s.sample_lanes:
        left = s.given - first
        turn_row_in(above, at, s.width, left, s.units, s.products, 0, s.pairs)
        return
    for b in range(s.samples):
        room = (s.samples - 1 - b) * s.width + s.units
        copy_some(above, at + b * s.width, s.products, b * s.units, s.units, room)


@_inline
def _back_products(s, w_back, grads):
    """Compute the gradient in the state before from those in the products that read it."""
    if s.sample_lanes:
        _multiply_samples(w_back, s.grads, grads, 0, s.zeros, 0, s.parts, 0, s.pairs)
        return
    _multiply(
        *(w_back, s.grads, grads, s.units, s.samples * s.units),
        *(s.zeros, True, s.products, 0, s.stride, s.samples),
    )
    _take_apart(s, 1)


@_inline
def _back_input(s, first, w, t, grads, below):
    """Write the gradients in the inputs of a step if `w`, which they are products with, has any."""
    if w.rows == 0:
        return
    at = (t * s.given + first) * w.rows
    if s.sample_lanes:
        left = s.given - first
        _multiply_samples(w, s.grads, grads, 0, s.zeros, 0, s.products, 0, s.pairs)
        turn_row_out(s.products, 0, w.rows, below, at, w.rows, left, s.pairs)
        return
    _multiply(
        *(w, s.grads, grads, s.units, s.samples * s.units),
        *(s.zeros, True, s.products, 0, s.stride, s.samples),
    )
    for b in range(s.samples):
        room = (s.samples - b) * w.rows
        copy_some(s.products, b * s.stride, below, at + b * w.rows, w.rows, room)


@_inline
def _add_parts(s, carry, carry_c, own):
    """Add what was computed last to the gradient in the state; no 0 is negative."""
    lanes, zero = lane_count(carry), number(carry, 0.0)
    for i in range(0, s.samples * s.units, lanes):
        left = s.samples * s.units - i
        store_some(carry, own + i, load(carry, own + i) + load(s.parts, i), left)
        if len(s.cells) > 0:
            store_some(carry_c, own + i, load(carry_c, own + i) + zero, left)


@_inline
def _rests(s, first, carry, carry_c):
    """Return whether the gradient in a state that later steps have left is 0."""
    own, count = first * s.units, s.samples * s.units
    # What is mostly not 0 comes first.
    rests = all_zero(s.parts, 0, count) and all_zero(carry, own, count)
    return rests and (len(s.cells) == 0 or all_zero(carry_c, own, count))


@_inline
def _pauses(s, first, w, w_in, bias, x, above, relu, k, bound):
    """Return whether a step that gets no gradient from later ones is left out, and a bound.

    That is one of states, infinite if no step is left out, which the step before asks with.
    """
    t, here, before, _ = _places(s, first, k)
    count = s.samples * s.units
    if not no_grads_above(s, first, above, t):
        return False, bound
    if bound == UNKNOWN:
        bound = bound_of(w.values, w_in.values, bias)
        begin = row_of(s, first, s.steps + 1 if s.back else 0) * s.units
        finite = zero_times(s.states, here, count, bound)
        finite = finite and zero_times(s.states, begin, count, bound)
        if len(s.cells) > 0:
            finite = finite and zero_times(s.cells, here, count, 1.0)
        if not finite:
            bound = np.inf
    pauses = bound < np.inf
    if pauses and (relu or w.is_sparse):
        pauses = zero_times(s.states, here, count, bound)
        pauses = pauses and zero_times(s.states, before, count, bound)
        if len(s.cells) > 0:
            pauses = pauses and zero_times(s.cells, before, count, 1.0)
    at, size = row_of(s, first, t + 1) * s.block, s.samples * s.block
    for b in range(s.cols // s.block):
        pauses = pauses and zero_times(x, at + b * s.jump, size, 1.0)
    return pauses, bound


@_helper
def _leave_out(s, first, w, w_in, bias, x, sums, above, below, relu, k, begin, bound, last):
    """Leave out steps from the `k`-th on; return the first that is not, and what it is told.

    `last` is the last step of a block that was not left out. Zeros are written where others read
    them.
    """
    while k >= begin:
        pauses, bound = _pauses(s, first, w, w_in, bias, x, above, relu, k, bound)
        if not pauses:
            break
        t, _, _, gates = _places(s, first, k)
        s.has_grads[first * s.segment + t - s.begin] = False
        if w_in.rows > 0:
            samples = min(s.samples, s.given - first)
            clear(below, (t * s.given + first) * w_in.rows, samples * w_in.rows)
        if s.sample_lanes and last // STEPS == k // STEPS:
            clear(s.grads, _grads_at(s, k, gates), s.kept * s.samples * s.units)
            _add_block(s, sums, x, first, k, begin, last)
        k -= 1
    return k, bound


@_inline
def _next_step(
    s, first, w, w_in, bias, x, sums, above, below, carry, carry_c, relu, k, begin, bound, last
):
    """Return the first step from the `k`-th on that is not left out, and what the next is told."""
    if _rests(s, first, carry, carry_c):
        about = s, first, w, w_in, bias, x, sums, above, below, relu
        k, bound = _leave_out(*about, k, begin, bound, last)
    if k >= begin:
        t, _, _, _ = _places(s, first, k)
        s.has_grads[first * s.segment + t - s.begin] = True
    return k, bound, last if last // STEPS == k // STEPS else k


@_inline
def _stop_of(caller, first, end):
    """Return before which step a group stops."""
    return min(end, caller.ends[first]) if len(caller.ends) > 0 else end


@_kernel
def find_ends(s, w_back, w_in_back, bias, x, above, carry, carry_c, ends, relu, begin, end):
    """Write before which of some steps a backward pass needs gates, for each group."""
    for first in range(s.first, s.first + s.count, s.samples):
        clear(s.parts, 0, s.samples * s.units)
        pauses, bound, stop = _rests(s, first, carry, carry_c), UNKNOWN, end
        while pauses and stop > begin:
            pauses, bound = _pauses(
                s, first, w_back, w_in_back, bias, x, above, relu, stop - 1, bound
            )
            stop -= pauses
        ends[first] = stop


@_kernel
def run_rnn(s, w_in, w_hidden, bias, x, caller, relu, begin, end):
    """Write the states of some steps of an RNN."""
    lanes = lane_count(x)
    size = s.samples * s.units
    for first in range(s.first, s.first + s.count, s.samples):
        own = first * s.units
        stop = _stop_of(caller, first, end)
        for k in range(begin, stop):
            _begin_block(s, caller, first, w_in.cols, x, k, begin, end)
            t, here, before, _ = _places(s, first, k)
            at = number(x, t)
            _make_products(s, first, w_in, w_hidden, bias, x, t, before, 1)
            for j in range(0, size, lanes):
                length, v = load(s.lengths, own + j), load(s.parts, j)
                h = keep_positive(v, v) if relu else tanh(v)
                h = less_or(at, length, h, load(s.states, before + j))
                store_some(s.states, here + j, h, size - j)
            _end_block(s, caller, first, k, begin, end)


@_kernel
def back_rnn(s, w_back, w_in_back, bias, x, sums, above, below, carry, carry_c, relu, begin, end):
    """Write the gradients in the products and inputs of some steps of an RNN, the last step first.

    `above` holds the gradients in the outputs, `below` gets those in the inputs, and `carry` holds
    that in the state before, on entry and on return.
    """
    lanes = lane_count(carry)
    one, zero = number(carry, 1.0), number(carry, 0.0)
    size = s.samples * s.units
    for first in range(s.first, s.first + s.count, s.samples):
        own = first * s.units
        clear(s.parts, 0, size)
        k, bound, last = end - 1, UNKNOWN, end + STEPS
        while True:
            k, bound, last = _next_step(
                *(s, first, w_back, w_in_back, bias, x, sums, above, below, carry, carry_c, relu),
                *(k, begin, bound, last),
            )
            if k < begin:
                break
            t, here, _, gates = _places(s, first, k)
            at, to = number(carry, t), _grads_at(s, k, gates)
            _take_above(s, first, above, t)
            for j in range(0, size, lanes):
                left = size - j
                length, h = load(s.lengths, own + j), load(s.states, here + j)
                later = load(carry, own + j) + load(s.parts, j)
                g = later + load(s.products, j)
                in_a = keep_positive(h, g) if relu else g * (one - h * h)
                store_some(s.grads, to + j, less_or(at, length, in_a, zero), left)
                store_some(carry, own + j, less_or(at, length, zero, later), left)
            _back_products(s, w_back, to)
            _back_input(s, first, w_in_back, t, to, below)
            _add_block(s, sums, x, first, k, begin, last)
            k -= 1
        _add_parts(s, carry, carry_c, own)


@_kernel
def run_gru(s, w_in, w_hidden, bias, x, caller, relu, begin, end):
    """Write the states of some steps of a GRU, and its gates n, r, z, and v_n."""
    lanes = lane_count(x)
    part, size = _part(s), s.samples * s.units
    for first in range(s.first, s.first + s.count, s.samples):
        own = first * s.units
        stop = _stop_of(caller, first, end)
        for k in range(begin, stop):
            _begin_block(s, caller, first, w_in.cols, x, k, begin, end)
            t, here, before, to = _places(s, first, k)
            at = number(x, t)
            _make_products(s, first, w_in, w_hidden, bias, x, t, before, 4)
            # A loop for each function: what does not wait for each other is computed at once.
            for g in range(1, 3):
                for j in range(0, size, lanes):
                    v = sigmoid(load(s.parts, g * part + j))
                    store_some(s.parts, g * part + j, v, part - j)
            for j in range(0, size, lanes):
                r, v = load(s.parts, part + j), load(s.parts, 3 * part + j)
                store_some(s.parts, j, tanh(fma(r, v, load(s.parts, j))), part - j)
            for j in range(0, size, lanes):
                left = size - j
                length, old = load(s.lengths, own + j), load(s.states, before + j)
                a, z = load(s.parts, j), load(s.parts, 2 * part + j)
                h = less_or(at, length, fma(z, old - a, a), old)
                store_some(s.states, here + j, h, left)
                store_some(s.gates, to + j, a, left)
                store_some(s.gates, to + size + j, load(s.parts, part + j), left)
                store_some(s.gates, to + 2 * size + j, z, left)
                store_some(s.gates, to + 3 * size + j, load(s.parts, 3 * part + j), left)
            _end_block(s, caller, first, k, begin, end)


@_kernel
def back_gru(s, w_back, w_in_back, bias, x, sums, above, below, carry, carry_c, relu, begin, end):
    """Write the gradients in the inputs of a GRU; gates become the gradients in products."""
    lanes = lane_count(carry)
    one, zero = number(carry, 1.0), number(carry, 0.0)
    size = s.samples * s.units
    for first in range(s.first, s.first + s.count, s.samples):
        own = first * s.units
        clear(s.parts, 0, size)
        k, bound, last = end - 1, UNKNOWN, end + STEPS
        while True:
            k, bound, last = _next_step(
                *(s, first, w_back, w_in_back, bias, x, sums, above, below, carry, carry_c, relu),
                *(k, begin, bound, last),
            )
            if k < begin:
                break
            t, _, before, gates = _places(s, first, k)
            at, to = number(carry, t), _grads_at(s, k, gates)
            _take_above(s, first, above, t)
            for j in range(0, size, lanes):
                left = size - j
                length = load(s.lengths, own + j)
                later = load(carry, own + j) + load(s.parts, j)
                g = later + load(s.products, j)
                kept = gates + j
                n, r = load(s.gates, kept), load(s.gates, kept + size)
                z, v = load(s.gates, kept + 2 * size), load(s.gates, kept + 3 * size)
                rest = one - z
                in_n = g * rest * (one - n * n)
                in_z = g * (load(s.states, before + j) - n) * z * rest
                in_v = in_n * r
                in_r = in_v * v * (one - r)
                store_some(s.grads, to + j, less_or(at, length, in_n, zero), left)
                store_some(s.grads, to + size + j, less_or(at, length, in_r, zero), left)
                store_some(s.grads, to + 2 * size + j, less_or(at, length, in_z, zero), left)
                store_some(s.grads, to + 3 * size + j, less_or(at, length, in_v, zero), left)
                store_some(carry, own + j, less_or(at, length, g * z, later), left)
            _back_products(s, w_back, to + size)
            _back_input(s, first, w_in_back, t, to, below)
            _add_block(s, sums, x, first, k, begin, last)
            k -= 1
        _add_parts(s, carry, carry_c, own)


@_kernel
def run_lstm(s, w_in, w_hidden, bias, x, caller, relu, begin, end):
    """Write the states of some steps of an LSTM, and its gates i, f, g, o."""
    lanes = lane_count(x)
    part, size = _part(s), s.samples * s.units
    for first in range(s.first, s.first + s.count, s.samples):
        own = first * s.units
        stop = _stop_of(caller, first, end)
        for k in range(begin, stop):
            _begin_block(s, caller, first, w_in.cols, x, k, begin, end)
            t, here, before, to = _places(s, first, k)
            at = number(x, t)
            _make_products(s, first, w_in, w_hidden, bias, x, t, before, 4)
            # A loop for each function: what does not wait for each other is computed at once.
            for g in (0, 1, 3):
                for j in range(0, size, lanes):
                    v = sigmoid(load(s.parts, g * part + j))
                    store_some(s.parts, g * part + j, v, part - j)
            for j in range(0, size, lanes):
                v = tanh(load(s.parts, 2 * part + j))
                store_some(s.parts, 2 * part + j, v, part - j)
            for j in range(0, size, lanes):
                left = size - j
                length, old = load(s.lengths, own + j), load(s.cells, before + j)
                added = load(s.parts, j) * load(s.parts, 2 * part + j)
                c = fma(load(s.parts, part + j), old, added)
                store_some(s.parts, 4 * part + j, c, left)
                store_some(s.cells, here + j, less_or(at, length, c, old), left)
            for j in range(4 * part, 4 * part + size, lanes):
                store(s.parts, j, tanh(load(s.parts, j)))
            for j in range(0, size, lanes):
                left = size - j
                length, old = load(s.lengths, own + j), load(s.states, before + j)
                h = load(s.parts, 3 * part + j) * load(s.parts, 4 * part + j)
                store_some(s.states, here + j, less_or(at, length, h, old), left)
                for g in range(4):
                    store_some(s.gates, to + g * size + j, load(s.parts, g * part + j), left)
            _end_block(s, caller, first, k, begin, end)


@_kernel
def back_lstm(s, w_back, w_in_back, bias, x, sums, above, below, carry, carry_c, relu, begin, end):
    """Write the gradients in the inputs of an LSTM; gates become the gradients in products."""
    lanes = lane_count(carry)
    one, zero = number(carry, 1.0), number(carry, 0.0)
    size = s.samples * s.units
    for first in range(s.first, s.first + s.count, s.samples):
        own = first * s.units
        clear(s.parts, 0, size)
        k, bound, last = end - 1, UNKNOWN, end + STEPS
        while True:
            k, bound, last = _next_step(
                *(s, first, w_back, w_in_back, bias, x, sums, above, below, carry, carry_c, relu),
                *(k, begin, bound, last),
            )
            if k < begin:
                break
            t, here, before, gates = _places(s, first, k)
            at, to = number(carry, t), _grads_at(s, k, gates)
            _take_above(s, first, above, t)
            for j in range(0, size, lanes):
                left = size - j
                length = load(s.lengths, own + j)
                later = load(carry, own + j) + load(s.parts, j)
                total_g = later + load(s.products, j)
                kept = gates + j
                i, f = load(s.gates, kept), load(s.gates, kept + size)
                g, o = load(s.gates, kept + 2 * size), load(s.gates, kept + 3 * size)
                h, g_c = load(s.states, here + j), load(carry_c, own + j)
                # h = o·tanh(c), and 0 where o is 0.
                tanh_c = less_or(zero, o, h / o, zero)
                in_c = fma(total_g, o - h * tanh_c, g_c)
                in_i = in_c * g * i * (one - i)
                in_f = in_c * load(s.cells, before + j) * f * (one - f)
                in_g = in_c * i * (one - g * g)
                in_o = total_g * h * (one - o)
                store_some(s.grads, to + j, less_or(at, length, in_i, zero), left)
                store_some(s.grads, to + size + j, less_or(at, length, in_f, zero), left)
                store_some(s.grads, to + 2 * size + j, less_or(at, length, in_g, zero), left)
                store_some(s.grads, to + 3 * size + j, less_or(at, length, in_o, zero), left)
                store_some(carry_c, own + j, less_or(at, length, in_c * f, g_c), left)
                store_some(carry, own + j, less_or(at, length, zero, later), left)
            _back_products(s, w_back, to)
            _back_input(s, first, w_in_back, t, to, below)
            _add_block(s, sums, x, first, k, begin, last)
            k -= 1
        _add_parts(s, carry, carry_c, own)


# -- Parameters ------------------------------------------------------------------------------------

# Samples of steps that are summed up at once, in the cache, and steps of a group whose lanes are
# samples. Sums of these are then added up in double precision.
BLOCK, STEPS = 256, 32


@_kernel
def sum_products(
    gates,
    x,
    x_at,
    x_cols,
    x_block,
    jump,
    x_rows,
    x_out,
    h,
    h_at,
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

    Likewise, sums with `h` are added to `h_out`, and ``Σ a[t, n, i]`` to ``row_sums[i]``, for rows
    `i` of the gates ``a`` from `begin`, where a vector begins, to `end`. Rows from `x_rows` on have
    no sums with `x`, and rows before `h_first` none with `h`; where such a row shares a vector with
    others, its sums are written, too, and mean nothing. Columns of `x` are in blocks of `x_block`,
    which begin `jump` apart. Rows of all sums are filled up to vectors. `room` begins with a tile
    of zeros.
    """
    lanes, stride = lane_count(x), len(row_sums)
    block = max(1, BLOCK // batch)
    most = TILE_VECTORS * lanes
    together = (1 + TILE_ROWS) * most
    for start in range(0, steps, block):
        count = min(steps - start, block)
        if not _has_grads(gates, batch, start, count):
            continue
        terms, first = count * batch, start * batch
        i = begin
        while i < end:
            size = _tile_width(-(-(end - i) // lanes)) * lanes
            some = min(size, end - i)
            _take_together(gates, batch, start, count, i, some, room, together, most)
            _add_rows(room, together, terms, size, row_sums, i)
            # Whole vectors of rows that have no sums with a factor are left out.
            at, stop = x_at + first * x_block, min(size, -(-(x_rows - i) // lanes) * lanes)
            for j in range(0, x_cols, x_block):
                _add_columns(room, terms, 0, stop, x, at, x_block, x_out, i + j * stride, stride)
                at += jump
            at, skip = h_at + first * h_cols, max(0, h_first - i) // lanes * lanes
            _add_columns(room, terms, skip, size, h, at, h_cols, h_out, i, stride)
            i += size


@_inline
def _has_grads(gates, batch, start, count):
    """Return whether any of some steps has gradients."""
    for first in range(0, batch, gates.samples):
        for t in range(start, start + count):
            if has_step(gates, first, t):
                return True
    return False


@_inline
def _add_block(s, sums, x, first, k, begin, last):
    """Add the sums over a block of steps if the `k`-th in the direction begins it.

    `last` is the last of them that has gradients.
    """
    if s.sample_lanes and (k == begin or k % STEPS == 0):
        _add_steps(s, sums, x, first, k, last + 1 - k)


@_helper
def _add_steps(s, sums, x, first, k, count):
    """Add the sums over so many steps from the `k`-th on, of a group whose lanes are samples."""
    samples, stride, lot, ahead = s.samples, sums.stride, first // sums.lot, 1 - 2 * s.back
    t, _, before, gates = _places(s, first, k)
    place, step = _grads_at(s, k, gates), s.grad_step
    if step == 0:
        step = ahead * samples * s.kept * s.units
    x_at, x_step = row_of(s, first, t + 1) * s.block, ahead * samples * s.block
    h_step = ahead * samples * s.units
    a, h, pairs = s.grads, s.states, s.pairs
    columns = 2 * SUM_COLUMNS if pairs else SUM_COLUMNS
    for i in range(0, sums.rows, SUM_ROWS):
        at, out = place + i * samples, lot * stride + i
        _add_products(pairs, sums.row_sums, out, 0, a, at, step, sums.ones, 0, 0, count, 1)
        for block in range(0, sums.x_cols if i < sums.x_rows else 0, s.block):
            beside = x_at + block // s.block * s.jump
            for j in range(0, s.block, columns):
                out, left = (lot * sums.x_cols + block + j) * stride + i, s.block - j
                b = beside + j * samples
                _add_products(
                    *(pairs, sums.x_out, out, stride, a, at, step, x, b, x_step, count, left)
                )
        for j in range(0, sums.h_cols if i + SUM_ROWS > sums.h_first else 0, columns):
            out, left = (lot * sums.h_cols + j) * stride + i, sums.h_cols - j
            b = before + j * samples
            _add_products(pairs, sums.h_out, out, stride, a, at, step, h, b, h_step, count, left)


@_inline
def _add_products(pairs, out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width):
    """Add products with samples as lanes to some sums, of the vectors that there are."""
    if pairs:
        add_pair_products(out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width)
    else:
        add_sample_products(out, out_at, out_step, a, a_at, a_step, b, b_at, b_step, count, width)


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
def _add_columns(room, terms, begin, end, b, at, cols, out, to, stride):
    """Add products of columns of `b` and some vectors of the gates, whose rows are in `room`."""
    lanes = lane_count(b)
    most = TILE_VECTORS * lanes
    zeros, tile, together = 0, most, (1 + TILE_ROWS) * most
    for j in range(0, cols if begin < end else 0, TILE_ROWS):
        height = min(TILE_ROWS, cols - j)
        add_tile(
            *(room, tile, most, room, zeros, 0, room, together + begin),
            *(b, at + j, 1, cols, 0, 1, terms, _STEPS_PART, (end - begin) // lanes, height),
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
        for t in range(start, start + steps):
            for first in range(0, batch, gates.samples):
                samples = min(gates.samples, batch - first)
                at = (first * gates.steps + (gates.step + t) * samples) * gates.kept * units
                at += gate * samples * units + unit
                has_grads = has_step(gates, first, t)
                for _ in range(samples):
                    if has_grads:
                        copy_some(a, at, out, place, some, stride - done)
                    else:
                        clear(out, place, some)
                    at += units
                    place += stride
        gate, unit, done = gate + 1, 0, done + some


@_kernel
def sum_sparse_products(
    gates,
    b,
    b_at,
    cols,
    block,
    jump,
    slots,
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
    """Add the sums of a sparse matrix's entries, and of its rows, with samples as lanes.

    Its columns, and those of `b`, are in blocks of so many; in `b` these begin `jump` apart.
    """
    lanes, samples, zero = lane_count(b), gates.samples, number(b, 0.0)
    together = max(1, BLOCK // batch)
    gate_step = gates.kept * gates.units * samples
    # The terms of a sum are neighbours. Rows are no power of two apart, which caches are slow at.
    stride = -(-together * batch // lanes) * lanes + lanes
    turned = (end - begin) * stride
    for start in range(0, steps, together):
        count = min(steps - start, together)
        if not _has_grads(gates, batch, start, count):
            continue
        terms = count * batch
        for first in range(0, batch, samples):
            at = first * gates.steps * gates.kept * gates.units + (gates.step + start) * gate_step
            at += (gates.gate * gates.units + begin) * samples
            to = first * count
            _put_in_rows(gates.values, at, gate_step, count, end - begin, room, to, stride)
            for t in range(count):
                if not has_step(gates, first, start + t):
                    _clear_columns(room, to + t * samples, samples, end - begin, stride)
            at = b_at + (first * slots + start * samples) * block
            for j in range(0, cols, block):
                rows = turned + j * stride + to
                _put_in_rows(b, at, samples * block, count, block, room, rows, stride)
                at += jump
        for row in range(end - begin + cols):
            for k in range(terms, -(-terms // lanes) * lanes):
                room[row * stride + k] = 0
        for i in range(begin, end):
            row, sums = (i - begin) * stride, zero
            for k in range(0, terms, lanes):
                sums = sums + load(room, row + k)
            row_sums[i] += total(sums)
            p, last = indptr[i], indptr[i + 1]
            while p < last:
                # Beyond the end of the row the last entry is summed again, and not used.
                q, r, u = min(p + 1, last - 1), min(p + 2, last - 1), min(p + 3, last - 1)
                s0, s1, s2, s3 = zero, zero, zero, zero
                at0, at1 = turned + indices[p] * stride, turned + indices[q] * stride
                at2, at3 = turned + indices[r] * stride, turned + indices[u] * stride
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
def _put_in_rows(x, at, step, steps, cols, out, to, stride):
    """Write the vectors of samples of some steps one after the other, in a row for each column."""
    samples = sample_count(x)
    for t in range(steps):
        for j in range(cols):
            v = load_samples(x, at + t * step + j * samples)
            store(out, to + j * stride + t * samples, v)


@_helper
def _clear_columns(out, at, samples, rows, stride):
    """Clear the vectors of samples of a step in all rows."""
    for j in range(rows):
        for k in range(samples):
            out[at + j * stride + k] = 0
