"""Linear attention: matrices as states, with decay, outer products and the delta rule.

    S_t = diag(w_t) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ,    o_t = S_tᵀ q_t

Columns of a state are independent. So a *block* of columns, one vector or two, passes the steps of
a *segment* alone. Its part of the state stays in the first-level cache, numbers of keys are
broadcast along rows, and no sum of the forward pass crosses lanes. Rows are taken in fours with
separate sums, since each addition to a sum waits for the last one.

The forward pass keeps the states before each segment except the first. The backward pass starts
with the last segment. There it recomputes the states before each step, into scratch that fits the
second-level cache. Then it takes the gradient in the state back through the steps. Gradients in
vectors of keys are sums over columns: over the lanes of four rows at a time, then over blocks.

Rows of a head are far apart in arrays, and copies to scratch would wait for memory as long as a
pass computes. So the first block prefetches the rows of the next segment, or the memory to write.

The floor, for each step and head, in multiply-adds of ``K·V`` numbers: 3 forward (decay, outer
product, output) and 2 more with the delta rule; backward 2 for the states again, and 5 for
gradients (output, state, `q`, `k`, `v`), with one for that in decay, and the delta rule takes 2
and 5 more. Lanes of each row are summed 2 to 5 times, by about 4 instructions.

The caller has checked sizes, and holds the arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import njit
from .lanes import (
    fma,
    lane_count,
    load,
    load_some,
    load_wide,
    number,
    prefetch,
    splat,
    splat_wide,
    store,
    store_some,
    store_totals,
    total,
)

Array = Any

# Rows of a state that a loop takes at once; numbers per key and step: q, k, w, a and b.
_FOUR, _KINDS = 4, 5
_Q, _K, _W, _A, _B = range(_KINDS)


class Attention(NamedTuple):
    """A call of linear attention; arrays are contiguous and flat, and empty if not given.

    Attributes
    ----------
    heads, keys, values, length : int
        ``H``, ``K``, ``V`` and ``T``.
    segment : int
        How many steps a segment has; the last one may have fewer.
    decays : int
        How many numbers `w` has at a step and head: 0, 1 or ``K``.
    reads_before : int
        1 if outputs read the states before a step, else 0.
    q, k, a, b : ndarray, shape (batch, length, heads, keys)
        The queries, the keys, and the vectors by which the delta rule reads and writes.
    v : ndarray, shape (batch, length, heads, values)
        The values.
    w : ndarray, shape (batch, length, heads) or (batch, length, heads, keys)
        The decay.
    bonus : ndarray, shape (heads, keys)
        The weight of a step's own value in its output.
    start : ndarray, shape (batch, heads, keys, values)
        The states before the first step.
    """

    heads: int
    keys: int
    values: int
    length: int
    segment: int
    decays: int
    reads_before: int
    q: Array
    k: Array
    a: Array
    b: Array
    v: Array
    w: Array
    bonus: Array
    start: Array


class AttentionGradients(NamedTuple):
    """Arrays that a backward pass writes; arrays that nobody needs are empty.

    Attributes
    ----------
    q, k, v, w, a, b, start : ndarray
        Gradients in the inputs, in their shapes.
    bonus : ndarray of float64, shape (batch, heads, keys)
        Zeros, to which those in the bonus are added.
    """

    q: Array
    k: Array
    v: Array
    w: Array
    a: Array
    b: Array
    start: Array
    bonus: Array


class _Room(NamedTuple):
    """The layout of scratch.

    Attributes
    ----------
    keys, row, values : int
        ``K``, rounded up to four rows, and to whole vectors, and ``V`` likewise.
    state, carry : int
        The states, or the gradients in them: one block of columns after the other.
    v, out : int
        For each step of a segment, the values; and the outputs, or the gradients in them.
    in_v : int
        The gradients in the values.
    read : int
        What the delta rule has read at each step, for one block.
    before : int
        The states before each step and after the last one, for one block.
    rows, in_rows : int
        For each step the numbers of keys, and their gradients.
    """

    keys: int
    row: int
    values: int
    state: int
    carry: int
    v: int
    out: int
    in_v: int
    read: int
    before: int
    rows: int
    in_rows: int


def room_size(keys: int, values: int, segment: int, lanes: int, is_back: bool) -> int:
    """Return how many numbers of scratch a pass takes, for vectors with a number of lanes."""
    rows = -(-keys // _FOUR) * _FOUR
    row, columns = (-(-each // lanes) * lanes for each in (keys, values))
    size = 2 * rows * columns + 3 * segment * columns + 2 * segment * (lanes + _KINDS * row)
    return size + 2 * (segment + 1) * rows * lanes * is_back


@njit(_nrt=False, forceinline=True)
def _room(s, w):
    """Return the places in scratch; those of the backward pass come last."""
    keys = (s.keys + _FOUR - 1) // _FOUR * _FOUR
    row, values = (s.keys + w - 1) // w * w, (s.values + w - 1) // w * w
    state, steps, rows = keys * values, s.segment * values, s.segment * _KINDS * row
    v, read = 2 * state, 2 * state + 3 * steps
    first = read + s.segment * 2 * w
    return _Room(
        keys=keys,
        row=row,
        values=values,
        state=0,
        carry=state,
        v=v,
        out=v + steps,
        in_v=v + 2 * steps,
        read=read,
        rows=first,
        in_rows=first + rows,
        before=first + 2 * rows,
    )


# -- Between arrays and scratch --------------------------------------------------------------------


@njit(_nrt=False)
def _bring(array, at, stride, size, count, room, to, step):
    """Copy rows to scratch, `step` apart, padded with zeros to whole vectors."""
    for t in range(count):
        for i in range(0, size, lane_count(room)):
            store(room, to + t * step + i, load_some(array, at + t * stride + i, size - i))


@njit(_nrt=False)
def _take(array, at, stride, size, count, room, to, step):
    """Copy rows back from scratch, if the array is needed."""
    if array.size > 0:
        for t in range(count):
            for i in range(0, size, lane_count(room)):
                store_some(array, at + t * stride + i, load(room, to + t * step + i), size - i)


@njit(_nrt=False)
def _bring_rows(s, r, b, h, begin, count, room):
    """Copy a segment's numbers of keys and values to scratch; without a decay, it is 1."""
    at, stride, step = (b * s.length + begin) * s.heads + h, s.heads, _KINDS * r.row
    first, wide = at * s.keys, stride * s.keys
    _bring(s.q, first, wide, s.keys, count, room, r.rows + _Q * r.row, step)
    _bring(s.k, first, wide, s.keys, count, room, r.rows + _K * r.row, step)
    if s.a.size > 0:
        _bring(s.a, first, wide, s.keys, count, room, r.rows + _A * r.row, step)
        _bring(s.b, first, wide, s.keys, count, room, r.rows + _B * r.row, step)
    if s.decays > 1:
        _bring(s.w, first, wide, s.keys, count, room, r.rows + _W * r.row, step)
    else:
        for t in range(count):
            decay = splat(s.w, at + t * stride) if s.decays else number(s.q, 1.0)
            for i in range(0, r.row, lane_count(room)):
                store(room, r.rows + t * step + _W * r.row + i, decay)
    _bring(s.v, at * s.values, stride * s.values, s.values, count, room, r.v, r.values)


@njit(_nrt=False, forceinline=True)
def _ask_for(s, array, at, size):
    """Prefetch a row of an array, if it is given."""
    if array.size > 0:
        for i in range(0, size, lane_count(s.q)):
            prefetch(array, at * size + i)


@njit(_nrt=False, forceinline=True)
def _ask_for_rows(s, arrays, other, at):
    """Prefetch everything of a step and head, so that copies do not wait for memory."""
    _ask_for(s, arrays.q, at, s.keys)
    _ask_for(s, arrays.k, at, s.keys)
    _ask_for(s, arrays.a, at, s.keys)
    _ask_for(s, arrays.b, at, s.keys)
    _ask_for(s, arrays.w, at, s.decays)
    _ask_for(s, arrays.v, at, s.values)
    _ask_for(s, other, at, s.values)


@njit(_nrt=False)
def _move_block(s, r, array, at, room, to, column, lanes, is_read):
    """Copy a block of a state to scratch, padded with zeros, or back from there."""
    here = min(lanes, s.values - column)
    for i in range(s.keys):
        own, other = to + i * lanes, at + i * s.values + column
        for j in range(here):
            if is_read:
                room[own + j] = array[other + j]
            else:
                array[other + j] = room[own + j]


@njit(_nrt=False)
def _lanes_at(r, column, w):
    """Return the number of lanes of the block that begins at a column."""
    return 2 * w if r.values - column >= 2 * w else w


@njit(_nrt=False)
def _move_state(s, r, array, at, room, to, w, is_read):
    """Copy a state to scratch, block by block, or back from there, if there is an array."""
    column = 0
    while column < r.values and array.size > 0:
        lanes = _lanes_at(r, column, w)
        _move_block(s, r, array, at, room, to + r.keys * column, column, lanes, is_read)
        column += lanes


@njit(_nrt=False)
def _clear(room, at, count):
    for i in range(at, at + count):
        room[i] = 0


# -- Blocks of columns -----------------------------------------------------------------------------


def _passes(load, splat):
    """Return both passes of a block through a segment, for vectors of one width."""

    @njit(_nrt=False, forceinline=True)
    def row_on(s, room, at, to, k, row, v, read, out):
        """Write a row of the next state; return the sum of outputs plus this row's part."""
        before = load(room, at)
        after = fma(splat(room, k), v, splat(room, k + (_W - _K) * row) * before)
        if s.a.size > 0:
            after = fma(splat(room, k + (_B - _K) * row), read, after)
        store(room, to, after)
        return fma(splat(room, k + (_Q - _K) * row), before if s.reads_before else after, out)

    @njit(_nrt=False)
    def forward(s, r, count, room, state, move, out, column, lanes, other, ahead):
        """Take a block through the steps; the states before them are `move` numbers apart.

        The first block prefetches what comes next, from a step and head on.
        """
        row, zero = r.row, number(load(room, 0), 0.0)
        for t in range(count):
            if column == 0:
                _ask_for_rows(s, s, other, ahead + t * s.heads)
            at, to = state + t * move, state + (t + 1) * move
            first = r.rows + t * _KINDS * row
            read = zero
            if s.a.size > 0:
                r0, r1, r2, r3 = zero, zero, zero, zero
                for i in range(0, r.keys, _FOUR):
                    a, place = first + _A * row + i, at + i * lanes
                    r0 = fma(splat(room, a), load(room, place), r0)
                    r1 = fma(splat(room, a + 1), load(room, place + lanes), r1)
                    r2 = fma(splat(room, a + 2), load(room, place + 2 * lanes), r2)
                    r3 = fma(splat(room, a + 3), load(room, place + 3 * lanes), r3)
                read = (r0 + r1) + (r2 + r3)
                store(room, r.read + t * lanes, read)
            v = load(room, r.v + t * r.values + column)
            even, odd = zero, zero
            for i in range(0, r.keys, _FOUR):
                k, x, y = first + _K * row + i, at + i * lanes, to + i * lanes
                even = row_on(s, room, x, y, k, row, v, read, even)
                odd = row_on(s, room, x + lanes, y + lanes, k + 1, row, v, read, odd)
                x, y, k = x + 2 * lanes, y + 2 * lanes, k + 2
                even = row_on(s, room, x, y, k, row, v, read, even)
                odd = row_on(s, room, x + lanes, y + lanes, k + 1, row, v, read, odd)
            store(room, out + t * r.values + column, even + odd)

    @njit(_nrt=False, forceinline=True)
    def grad_at(s, room, at, q, in_out):
        """Return the gradient in a row of the state after a step."""
        grad = load(room, at)
        return grad if s.reads_before else fma(splat(room, q), in_out, grad)

    @njit(_nrt=False, forceinline=True)
    def put_back(s, room, to, q, row, grad, in_read, in_out):
        """Write the gradient in a row of the state before a step."""
        grad = splat(room, q + (_W - _Q) * row) * grad
        if s.a.size > 0:
            grad = fma(splat(room, q + (_A - _Q) * row), in_read, grad)
        store(room, to, fma(splat(room, q), in_out, grad) if s.reads_before else grad)

    @njit(_nrt=False, forceinline=True)
    def products(room, at, lanes, x):
        """Return the products of four rows with a vector."""
        return (
            load(room, at) * x,
            load(room, at + lanes) * x,
            load(room, at + 2 * lanes) * x,
            load(room, at + 3 * lanes) * x,
        )

    @njit(_nrt=False)
    def back(s, r, count, room, column, lanes, into, at):
        """Take the gradient of a block from the last step to before the first one.

        The first block prefetches the memory for gradients, from a step and head on.
        """
        row, zero, carry = r.row, number(load(room, 0), 0.0), r.carry + r.keys * column
        erases, adds = s.a.size > 0, column > 0
        for t in range(count - 1, -1, -1):
            if column == 0:
                _ask_for_rows(s, into, into.v, at + t * s.heads)
            before = r.before + t * r.keys * lanes
            seen = before if s.reads_before else before + r.keys * lanes
            first, sums = r.rows + t * _KINDS * row, r.in_rows + t * _KINDS * row
            place = t * r.values + column
            v, in_out = load(room, r.v + place), load(room, r.out + place)
            read, in_v, in_read, in_w = zero, zero, zero, zero
            if erases:
                read = load(room, r.read + t * lanes)
            for i in range(0, r.keys, _FOUR):
                q, k, x = first + _Q * row + i, first + _K * row + i, carry + i * lanes
                g0 = grad_at(s, room, x, q, in_out)
                g1 = grad_at(s, room, x + lanes, q + 1, in_out)
                g2 = grad_at(s, room, x + 2 * lanes, q + 2, in_out)
                g3 = grad_at(s, room, x + 3 * lanes, q + 3, in_out)
                in_v = fma(splat(room, k), g0, in_v)
                in_v = fma(splat(room, k + 1), g1, in_v)
                in_v = fma(splat(room, k + 2), g2, in_v)
                in_v = fma(splat(room, k + 3), g3, in_v)
                in_q = products(room, seen + i * lanes, lanes, in_out)
                store_totals(room, sums + _Q * row + i, in_q, adds)
                store_totals(room, sums + _K * row + i, (g0 * v, g1 * v, g2 * v, g3 * v), adds)
                if s.decays > 0:
                    y = before + i * lanes
                    w0, w1 = g0 * load(room, y), g1 * load(room, y + lanes)
                    w2, w3 = g2 * load(room, y + 2 * lanes), g3 * load(room, y + 3 * lanes)
                    if s.decays > 1:
                        store_totals(room, sums + _W * row + i, (w0, w1, w2, w3), adds)
                    else:
                        in_w = in_w + ((w0 + w1) + (w2 + w3))
                if erases:
                    b = first + _B * row + i
                    in_read = fma(splat(room, b), g0, in_read)
                    in_read = fma(splat(room, b + 1), g1, in_read)
                    in_read = fma(splat(room, b + 2), g2, in_read)
                    in_read = fma(splat(room, b + 3), g3, in_read)
                    in_b = g0 * read, g1 * read, g2 * read, g3 * read
                    store_totals(room, sums + _B * row + i, in_b, adds)
                    store(room, x, g0)
                    store(room, x + lanes, g1)
                    store(room, x + 2 * lanes, g2)
                    store(room, x + 3 * lanes, g3)
                else:
                    put_back(s, room, x, q, row, g0, zero, in_out)
                    put_back(s, room, x + lanes, q + 1, row, g1, zero, in_out)
                    put_back(s, room, x + 2 * lanes, q + 2, row, g2, zero, in_out)
                    put_back(s, room, x + 3 * lanes, q + 3, row, g3, zero, in_out)
            if erases:
                for i in range(0, r.keys, _FOUR):
                    in_a = products(room, before + i * lanes, lanes, in_read)
                    store_totals(room, sums + _A * row + i, in_a, adds)
                    q, x = first + _Q * row + i, carry + i * lanes
                    for _ in range(_FOUR):
                        put_back(s, room, x, q, row, load(room, x), in_read, in_out)
                        q, x = q + 1, x + lanes
            store(room, r.in_v + place, in_v)
            if s.decays == 1:
                to = sums + _W * row
                room[to] = total(in_w) + (room[to] if adds else 0)

    return forward, back


_forward_wide, _back_wide = _passes(load_wide, splat_wide)
_forward_one, _back_one = _passes(load, splat)


# -- Both passes -----------------------------------------------------------------------------------


@njit(_nrt=False)
def _bonus_at(s, r, room, h, t):
    """Return the weight of the values of a step in its own output."""
    q, weight = r.rows + t * _KINDS * r.row, 0.0
    for i in range(s.keys):
        weight += room[q + i] * room[q + r.row + i] * s.bonus[h * s.keys + i]
    return weight


@njit(_nrt=False)
def _add_bonus(s, r, room, h, count):
    """Add to outputs the values of their own steps."""
    for t in range(count):
        weight, at = room.dtype.type(_bonus_at(s, r, room, h, t)), t * r.values
        for j in range(s.values):
            room[r.out + at + j] += weight * room[r.v + at + j]


@njit(_nrt=False)
def _add_bonus_back(s, r, room, h, count, in_bonus, to):
    """Add the gradients of the values that steps add to their own outputs."""
    for t in range(count):
        weight, at, along = room.dtype.type(_bonus_at(s, r, room, h, t)), t * r.values, 0.0
        for j in range(s.values):
            along += room[r.v + at + j] * room[r.out + at + j]
            room[r.in_v + at + j] += weight * room[r.out + at + j]
        first, sums = t * _KINDS * r.row + r.rows, t * _KINDS * r.row + r.in_rows
        for i in range(s.keys):
            q, k = room[first + i], room[first + r.row + i]
            u = along * s.bonus[h * s.keys + i]
            room[sums + i] += u * k
            room[sums + r.row + i] += u * q
            if in_bonus.size > 0:
                in_bonus[to + i] += along * q * k


@njit(_nrt=False, forceinline=True)
def _first_of(s, task):
    """Return the place of the first step of a sample's head, among all steps and heads."""
    return task // s.heads * s.length * s.heads + task % s.heads


@njit(nogil=True, cache=True, _nrt=False)
def forward(s, first, last, out, final, kept, room):
    """Write the outputs of some samples' heads, their last states, and the states before segments.

    Parameters
    ----------
    s : Attention
        The call.
    first, last : int
        Heads `first` to ``last - 1``, of those of all samples, are computed.
    out : ndarray, shape (batch, length, heads, values)
        The outputs.
    final : ndarray, shape (batch, heads, keys, values)
        The states after the last step.
    kept : ndarray, shape (batch, heads, segments - 1, keys, values)
        Those before each segment but the first; empty if they are not needed.
    room : ndarray
        Scratch.
    """
    w, size = lane_count(room), s.keys * s.values
    r, later = _room(s, w), max(s.length - 1, 0) // s.segment
    for task in range(first, last):
        b, h = task // s.heads, task % s.heads
        _clear(room, r.state, r.keys * r.values)
        _move_state(s, r, s.start, task * size, room, r.state, w, True)
        for begin in range(0, s.length, s.segment):
            count = min(s.segment, s.length - begin)
            if begin > 0:
                at = (task * later + begin // s.segment - 1) * size
                _move_state(s, r, kept, at, room, r.state, w, False)
            _bring_rows(s, r, b, h, begin, count, room)
            ahead = (b * s.length + begin + s.segment) * s.heads + h
            if begin + s.segment >= s.length:
                ahead = _first_of(s, task + 1)
            column = 0
            while column < r.values:
                lanes, state = _lanes_at(r, column, w), r.state + r.keys * column
                if lanes > w:
                    _forward_wide(s, r, count, room, state, 0, r.out, column, lanes, out, ahead)
                else:
                    _forward_one(s, r, count, room, state, 0, r.out, column, lanes, out, ahead)
                column += lanes
            if s.bonus.size > 0:
                _add_bonus(s, r, room, h, count)
            at, stride = ((b * s.length + begin) * s.heads + h) * s.values, s.heads * s.values
            _take(out, at, stride, s.values, count, room, r.out, r.values)
        _move_state(s, r, final, task * size, room, r.state, w, False)


@njit(nogil=True, cache=True, _nrt=False)
def backward(s, first, last, grads, grads_final, kept, into, room):
    """Write the gradients of some samples' heads.

    Parameters
    ----------
    s : Attention
        The call.
    first, last : int
        Heads `first` to ``last - 1``, of those of all samples, are computed.
    grads : ndarray, shape (batch, length, heads, values)
        The gradients in the outputs.
    grads_final : ndarray, shape (batch, heads, keys, values)
        Those in the states after the last step.
    kept : ndarray, shape (batch, heads, segments - 1, keys, values)
        What :func:`forward` has kept.
    into : AttentionGradients
        What is written.
    room : ndarray
        Scratch.
    """
    w, size = lane_count(room), s.keys * s.values
    r, later = _room(s, w), max(s.length - 1, 0) // s.segment
    for task in range(first, last):
        b, h = task // s.heads, task % s.heads
        _clear(room, r.carry, r.keys * r.values)
        _move_state(s, r, grads_final, task * size, room, r.carry, w, True)
        for segment in range(later, -1, -1):
            begin = segment * s.segment
            count = min(s.segment, s.length - begin)
            at, stride = (b * s.length + begin) * s.heads + h, s.heads
            wide, step = stride * s.values, _KINDS * r.row
            _bring_rows(s, r, b, h, begin, count, room)
            _bring(grads, at * s.values, wide, s.values, count, room, r.out, r.values)
            ahead = at - s.segment * s.heads
            if segment == 0:
                ahead = _first_of(s, task + 1) + later * s.segment * s.heads
            column = 0
            while column < r.values:
                lanes = _lanes_at(r, column, w)
                _clear(room, r.before, r.keys * lanes)
                if segment > 0:
                    own = (task * later + segment - 1) * size
                    _move_block(s, r, kept, own, room, r.before, column, lanes, True)
                elif s.start.size > 0:
                    _move_block(s, r, s.start, task * size, room, r.before, column, lanes, True)
                move = r.keys * lanes
                if lanes > w:
                    _forward_wide(
                        s, r, count, room, r.before, move, r.in_v, column, lanes, grads, ahead
                    )
                    _back_wide(s, r, count, room, column, lanes, into, at)
                else:
                    _forward_one(
                        s, r, count, room, r.before, move, r.in_v, column, lanes, grads, ahead
                    )
                    _back_one(s, r, count, room, column, lanes, into, at)
                column += lanes
            if s.bonus.size > 0:
                _add_bonus_back(s, r, room, h, count, into.bonus, task * s.keys)
            wide, rows = stride * s.keys, r.in_rows
            _take(into.q, at * s.keys, wide, s.keys, count, room, rows + _Q * r.row, step)
            _take(into.k, at * s.keys, wide, s.keys, count, room, rows + _K * r.row, step)
            _take(into.a, at * s.keys, wide, s.keys, count, room, rows + _A * r.row, step)
            _take(into.b, at * s.keys, wide, s.keys, count, room, rows + _B * r.row, step)
            own = s.decays
            _take(into.w, at * own, stride * own, own, count, room, rows + _W * r.row, step)
            wide = stride * s.values
            _take(into.v, at * s.values, wide, s.values, count, room, r.in_v, r.values)
        _move_state(s, r, into.start, task * size, room, r.carry, w, False)
