"""Selective scans, ``h_t = exp(δ_t A) h_{t-1} + δ_t B_t u_t`` and ``y_t = C_t·h_t + D u_t``.

States are computed where they are used. A *block* is one sample and as many channels as a vector
has lanes. Its states, for one `n` at a time, stay in a register during the steps of a *segment*.
`B` and `C` are then numbers for all lanes, read in the order of time, and no sum over the states of
a channel crosses lanes. The inputs of a segment are transposed once for all states: from rows of
time, one per channel, to vectors of channels, one per step. The forward pass keeps the states
before each segment except the first, which are fewer numbers than `u` has. The backward pass starts
with the last segment, and recomputes states into scratch for one `n`.

Gradients in `B` and `C` are sums over channels. A *part* is some neighbouring blocks with their own
sums, to which the blocks add in order, a square of vectors at a time. The caller adds the sums of
all parts, in order. Parts depend only on shapes, so the number of threads changes no bit.

The floor, with a batch of `B` samples, `D` channels, `N` states, `L` steps and numbers of `s`
bytes: ``B·L·D·N`` exponentials forward and as many backward, where each is kept in scratch and used
twice (recomputing would make it two), of some twenty instructions per vector, plus 4 multiply-adds
forward and 12 backward. Memory: ``s·B·L·D`` each for `u`, `delta`, `z` and `out`, once forward;
backward for the gradient in `out` and for inputs and gradients of that size, once each; less than
one for states that are kept, once to write and once to read, and about one more each for the sums
of parts.

The caller has checked sizes, and holds the arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import njit
from .functions import exp, sigmoid, softplus
from .lanes import (
    add_to,
    fma,
    lane_count,
    less_or,
    load,
    load_full_square,
    load_some,
    number,
    splat,
    store,
    store_some,
    store_square,
    store_totals,
    transpose,
)

Array = Any

# Scratch has this many vectors per step of a segment, and this many per state.
FORWARD_TILES, BACKWARD_TILES, STATE_ROWS = 4, 13, 4


class SelectiveScan(NamedTuple):
    """A selective scan; arrays are contiguous and flat.

    Attributes
    ----------
    channels, states, length : int
        ``D``, ``N`` and ``L``.
    segment : int
        How many steps a segment has, a multiple of the lanes of a vector; the last one may have
        fewer.
    cells, blocks, parts : int
        The number of cells, which are groups of channels that share `B` and `C`; and the numbers of
        blocks and of parts of a cell.
    b_cells, c_cells : int
        How many cells share a group of `B` and of `C`; 0 if constant in time.
    softplus : int
        1 if softplus is applied to `delta`, else 0.
    u, delta, z : ndarray, shape (batch, channels, length)
        The inputs; `z` may be empty.
    rates : ndarray, shape (states, channels)
        `A`, transposed.
    b, c : ndarray, shape (batch, groups, states, length), or (states, channels) if constant
        `B` and `C`.
    skip, bias : ndarray, shape (channels,)
        `D`, and the bias of `delta`.
    start : ndarray, shape (batch, states, channels)
        The states before the first step; empty for zeros.
    """

    channels: int
    states: int
    length: int
    segment: int
    cells: int
    blocks: int
    parts: int
    b_cells: int
    c_cells: int
    softplus: int
    u: Array
    delta: Array
    z: Array
    rates: Array
    b: Array
    c: Array
    skip: Array
    bias: Array
    start: Array


class SelectiveGradients(NamedTuple):
    """Arrays that a backward pass writes; those that nobody needs are empty.

    Attributes
    ----------
    u, delta, z : ndarray, shape (batch, channels, length)
        Gradients in the inputs.
    b, c : ndarray, shape (batch, cells, parts, states, width)
        The gradients in `B` and `C`, summed over each part; `width` is the length, rounded up to
        whole vectors.
    b_constant, c_constant, rates : ndarray of float64, shape (batch, cells, blocks, states, lanes)
        Zeros, to which those in constant `B` and `C` are added, and in `A`.
    skip, bias : ndarray of float64, shape (batch, cells, blocks, lanes)
        Zeros, to which those in `D` are added, and in what is added to `delta`.
    start : ndarray, shape (batch, states, channels)
        Those in the states before the first step.
    width : int
        That of `b` and `c`.
    """

    u: Array
    delta: Array
    z: Array
    b: Array
    c: Array
    b_constant: Array
    c_constant: Array
    rates: Array
    skip: Array
    bias: Array
    start: Array
    width: int


# -- What both passes do ---------------------------------------------------------------------------


@njit(forceinline=True)
def _channels_of(s, cell, block):
    """Return the first channel of a block, and how many it has."""
    size, before = s.channels // s.cells, block * lane_count(s.u)
    return cell * size + before, min(lane_count(s.u), size - before)


@njit(forceinline=True)
def _bring(s, array, at, here, count, room, to):
    """Transpose the steps of a segment: to a vector for each step."""
    w = lane_count(s.u)
    for t in range(0, count, w):
        square = load_full_square(array, at + t, s.length, here, count - t)
        store_square(room, to + t * w, w, transpose(square), w, w)


@njit(forceinline=True)
def _take(s, array, at, here, count, room, start):
    """Transpose the vectors of a segment's steps back: what :func:`_bring` reads is written."""
    w = lane_count(s.u)
    for t in range(0, count, w):
        square = load_full_square(room, start + t * w, w, w, w)
        store_square(array, at + t, s.length, transpose(square), here, count - t)


@njit(forceinline=True)
def _bring_constants(s, channel, here, room, rates_at):
    """Copy the parameters of a block's channels: `A`, and `B` and `C` if they are constant."""
    w = lane_count(s.u)
    b_at, c_at = rates_at + s.states * w, rates_at + 2 * s.states * w
    for n in range(s.states):
        at = n * s.channels + channel
        store(room, rates_at + n * w, load_some(s.rates, at, here))
        if s.b_cells == 0:
            store(room, b_at + n * w, load_some(s.b, at, here))
        if s.c_cells == 0:
            store(room, c_at + n * w, load_some(s.c, at, here))


@njit(forceinline=True)
def _row(s, b, cell, cells):
    """Return the start of `B` or `C` for a sample and a cell; `cells` share a group, if not 0."""
    if cells == 0:
        return 0
    return (b * (s.cells // cells) + cell // cells) * s.states * s.length


@njit(forceinline=True)
def _step_size(s, delta):
    """Return ``δ``; like PyTorch's, softplus is the identity beyond 20."""
    if s.softplus:
        return less_or(number(s.u, 20.0), delta, delta, softplus(delta))
    return delta


# -- Forward ---------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def forward(s, first, last, out, final, kept, room):
    """Write the outputs of some blocks, their last states, and the states before segments.

    Parameters
    ----------
    s : SelectiveScan
        The scan.
    first, last : int
        Blocks `first` to ``last - 1``, of those of all samples and cells, are computed.
    out : ndarray, shape (batch, channels, length)
        The outputs.
    final : ndarray, shape (batch, states, channels)
        The states after the last step.
    kept : ndarray, shape (batch, segments - 1, states, channels)
        Those before each segment but the first; empty if they are not needed.
    room : ndarray
        Scratch.
    """
    w = lane_count(s.u)
    tile, states = s.segment * w, s.states * w
    delta_at, pushed_at, y_at, z_at, state_at = 0, tile, 2 * tile, 3 * tile, 4 * tile
    rates_at = state_at + states
    later = max(s.length - 1, 0) // s.segment
    zero = number(s.u, 0.0)
    for task in range(first, last):
        b, block = task // (s.cells * s.blocks), task % (s.cells * s.blocks)
        cell = block // s.blocks
        channel, here = _channels_of(s, cell, block % s.blocks)
        _bring_constants(s, channel, here, room, rates_at)
        skip, bias = load_some(s.skip, channel, here), load_some(s.bias, channel, here)
        b_row, c_row = _row(s, b, cell, s.b_cells), _row(s, b, cell, s.c_cells)
        states_at = b * s.states * s.channels + channel
        for n in range(s.states):
            state = zero
            if s.start.size > 0:
                state = load_some(s.start, states_at + n * s.channels, here)
            store(room, state_at + n * w, state)
        for begin in range(0, s.length, s.segment):
            count = min(s.segment, s.length - begin)
            at = (b * s.channels + channel) * s.length + begin
            if begin > 0 and kept.size > 0:
                to = (b * later + begin // s.segment - 1) * s.states * s.channels + channel
                for n in range(s.states):
                    state = load(room, state_at + n * w)
                    store_some(kept, to + n * s.channels, state, here)
            _bring(s, s.u, at, here, count, room, pushed_at)
            _bring(s, s.delta, at, here, count, room, delta_at)
            for t in range(count):
                u = load(room, pushed_at + t * w)
                delta = _step_size(s, load(room, delta_at + t * w) + bias)
                store(room, delta_at + t * w, delta)
                store(room, pushed_at + t * w, delta * u)
                store(room, y_at + t * w, skip * u)
            for n in range(s.states):
                _pass_states(s, n, count, b_row + begin, c_row + begin, room, tile, state_at)
            if s.z.size > 0:
                _bring(s, s.z, at, here, count, room, z_at)
                for t in range(count):
                    z = load(room, z_at + t * w)
                    store(room, y_at + t * w, load(room, y_at + t * w) * (z * sigmoid(z)))
            _take(s, out, at, here, count, room, y_at)
        for n in range(s.states):
            store_some(final, states_at + n * s.channels, load(room, state_at + n * w), here)


@njit(forceinline=True)
def _pass_states(s, n, count, b_at, c_at, room, tile, state_at):
    """Take state `n` of a block through the steps of a segment, and add it to the outputs."""
    w = lane_count(s.u)
    states = s.states * w
    own = state_at + n * w
    b_varies, c_varies = s.b_cells > 0, s.c_cells > 0
    rate, state = load(room, own + states), load(room, own)
    b, c = load(room, own + 2 * states), load(room, own + 3 * states)
    b_at, c_at = b_at + n * s.length, c_at + n * s.length
    for t in range(count):
        if b_varies:
            b = splat(s.b, b_at + t)
        if c_varies:
            c = splat(s.c, c_at + t)
        decay = exp(load(room, t * w) * rate)
        state = fma(decay, state, load(room, tile + t * w) * b)
        y = 2 * tile + t * w
        store(room, y, fma(c, state, load(room, y)))
    store(room, own, state)


# -- Backward --------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def backward(s, first, last, grads, grads_final, kept, into, room):
    """Write or add the gradients of some parts.

    Parameters
    ----------
    s : SelectiveScan
        The scan.
    first, last : int
        Parts `first` to ``last - 1``, of those of all samples and cells, are computed.
    grads : ndarray, shape (batch, channels, length)
        The gradients in the outputs.
    grads_final : ndarray, shape (batch, states, channels)
        Those in the states after the last step; empty for zeros.
    kept : ndarray, shape (batch, segments - 1, states, channels)
        What :func:`forward` has kept.
    into : SelectiveGradients
        What is written.
    room : ndarray
        Scratch.
    """
    for task in range(first, last):
        b, rest = task // (s.cells * s.parts), task % (s.cells * s.parts)
        cell, part = rest // s.parts, rest % s.parts
        sums = task * s.states * into.width
        begin, end = part * s.blocks // s.parts, (part + 1) * s.blocks // s.parts
        for block in range(begin, end):
            adds = block > begin
            _block_back(s, b, cell, block, grads, grads_final, kept, into, sums, adds, room)


@njit
def _block_back(s, b, cell, block, grads, grads_final, kept, into, sums, adds, room):
    """Write or add the gradients of one block; `sums` is the start of its part's sums."""
    w = lane_count(s.u)
    tile, states = s.segment * w, s.states * w
    delta_at, pushed_at, y_at, grad_at = 0, tile, 2 * tile, 3 * tile
    in_pushed_at, in_delta_at = 4 * tile, 5 * tile
    u_at, slope_at, above_at, z_at = 9 * tile, 10 * tile, 11 * tile, 12 * tile
    carry_at = 13 * tile
    later = max(s.length - 1, 0) // s.segment
    channel, here = _channels_of(s, cell, block)
    _bring_constants(s, channel, here, room, carry_at + states)
    skip, bias = load_some(s.skip, channel, here), load_some(s.bias, channel, here)
    b_row, c_row = _row(s, b, cell, s.b_cells), _row(s, b, cell, s.c_cells)
    zero, one = number(s.u, 0.0), number(s.u, 1.0)
    own = (b * s.cells + cell) * s.blocks + block
    for n in range(s.states):
        carry = zero
        if grads_final.size > 0:
            carry = load_some(grads_final, (b * s.states + n) * s.channels + channel, here)
        store(room, carry_at + n * w, carry)
    for segment in range(later, -1, -1):
        begin = segment * s.segment
        count = min(s.segment, s.length - begin)
        at = (b * s.channels + channel) * s.length + begin
        _bring(s, s.u, at, here, count, room, u_at)
        _bring(s, s.delta, at, here, count, room, delta_at)
        _bring(s, grads, at, here, count, room, above_at)
        if s.z.size > 0:
            _bring(s, s.z, at, here, count, room, z_at)
        for t in range(0, count * w, w):
            u = load(room, u_at + t)
            raw = load(room, delta_at + t) + bias
            delta, slope = _step_size(s, raw), one
            if s.softplus:
                slope = less_or(number(s.u, 20.0), raw, one, sigmoid(raw))
            grad = load(room, above_at + t)
            if s.z.size > 0:
                z = load(room, z_at + t)
                grad = grad * (z * sigmoid(z))
            store(room, delta_at + t, delta)
            store(room, pushed_at + t, delta * u)
            store(room, slope_at + t, slope)
            store(room, grad_at + t, grad)
            store(room, y_at + t, skip * u)
            store(room, in_pushed_at + t, zero)
            store(room, in_delta_at + t, zero)
        for n in range(s.states):
            state = zero
            if segment > 0:
                place = ((b * later + segment - 1) * s.states + n) * s.channels + channel
                state = load_some(kept, place, here)
            elif s.start.size > 0:
                state = load_some(s.start, (b * s.states + n) * s.channels + channel, here)
            at_b, at_c = b_row + n * s.length + begin, c_row + n * s.length + begin
            to = sums + n * into.width + begin
            to_own = (own * s.states + n) * w
            _states_again(s, n, count, state, at_b, at_c, into, to, to_own, adds, room)
            _states_back(s, n, count, at_b, at_c, into, to, to_own, adds, room)
        in_skip, in_bias = zero, zero
        for t in range(count):
            u, delta = load(room, u_at + t * w), load(room, delta_at + t * w)
            grad, in_pushed = load(room, grad_at + t * w), load(room, in_pushed_at + t * w)
            in_delta = fma(in_pushed, u, load(room, in_delta_at + t * w))
            in_delta = in_delta * load(room, slope_at + t * w)
            in_skip, in_bias = fma(grad, u, in_skip), in_bias + in_delta
            store(room, u_at + t * w, fma(in_pushed, delta, skip * grad))
            store(room, delta_at + t * w, in_delta)
        if into.skip.size > 0:
            add_to(into.skip, own * w, in_skip)
        if into.bias.size > 0:
            add_to(into.bias, own * w, in_bias)
        if into.u.size > 0:
            _take(s, into.u, at, here, count, room, u_at)
        if into.delta.size > 0:
            _take(s, into.delta, at, here, count, room, delta_at)
        if into.z.size > 0:
            for t in range(count):
                z = load(room, z_at + t * w)
                share = sigmoid(z)
                slope = share * fma(z, one - share, one)
                grad = load(room, above_at + t * w) * load(room, y_at + t * w)
                store(room, z_at + t * w, grad * slope)
            _take(s, into.z, at, here, count, room, z_at)
    if into.start.size > 0:
        for n in range(s.states):
            place = (b * s.states + n) * s.channels + channel
            store_some(into.start, place, load(room, carry_at + n * w), here)


@njit(forceinline=True)
def _states_again(s, n, count, state, b_at, c_at, into, to, to_own, adds, room):
    """Recompute state `n` before each step of a segment, and its decay; add the gradient in `C`.

    Outputs are computed if the gradient in `z` needs them.
    """
    w = lane_count(s.u)
    tile, states = s.segment * w, s.states * w
    decay_at, before_at, product_at = 6 * tile, 7 * tile, 8 * tile
    own = 13 * tile + n * w
    b_varies, c_varies = s.b_cells > 0, s.c_cells > 0
    needs_y = into.z.size > 0
    rate = load(room, own + states)
    b, c = load(room, own + 2 * states), load(room, own + 3 * states)
    for t in range(count):
        if b_varies:
            b = splat(s.b, b_at + t)
        decay = exp(load(room, t * w) * rate)
        store(room, decay_at + t * w, decay)
        store(room, before_at + t * w, state)
        state = fma(decay, state, load(room, tile + t * w) * b)
        store(room, product_at + t * w, state * load(room, 3 * tile + t * w))
        if needs_y:
            if c_varies:
                c = splat(s.c, c_at + t)
            y = 2 * tile + t * w
            store(room, y, fma(c, state, load(room, y)))
    _add_products(s, count, room, into.c, into.c_constant, to, to_own, adds)


@njit(forceinline=True)
def _states_back(s, n, count, b_at, c_at, into, to, to_own, adds, room):
    """Take the gradient in state `n` from the last step of a segment to before the first one."""
    w = lane_count(s.u)
    tile, states = s.segment * w, s.states * w
    decay_at, before_at, product_at = 6 * tile, 7 * tile, 8 * tile
    own = 13 * tile + n * w
    b_varies, c_varies = s.b_cells > 0, s.c_cells > 0
    rate, carry = load(room, own + states), load(room, own)
    b, c = load(room, own + 2 * states), load(room, own + 3 * states)
    in_rate = number(s.u, 0.0)
    for t in range(count - 1, -1, -1):
        if b_varies:
            b = splat(s.b, b_at + t)
        if c_varies:
            c = splat(s.c, c_at + t)
        v = t * w
        decay, read = load(room, decay_at + v), c * load(room, 3 * tile + v)
        grad = carry + read
        store(room, product_at + v, grad * load(room, tile + v))
        store(room, 4 * tile + v, fma(grad, b, load(room, 4 * tile + v)))
        # Computed from the gradient it would double the latency.
        carry = fma(decay, carry, decay * read)
        in_exponent = carry * load(room, before_at + v)
        store(room, 5 * tile + v, fma(in_exponent, rate, load(room, 5 * tile + v)))
        in_rate = fma(in_exponent, load(room, v), in_rate)
    store(room, own, carry)
    if into.rates.size > 0:
        add_to(into.rates, to_own, in_rate)
    _add_products(s, count, room, into.b, into.b_constant, to, to_own, adds)


@njit(forceinline=True)
def _add_products(s, count, room, sums, constant, to, to_own, adds):
    """Write or add the gradient in `B` or `C`: sums of products over channels, or over steps."""
    w = lane_count(s.u)
    start = 8 * s.segment * w
    if sums.size > 0:
        for t in range(count, (count + w - 1) // w * w):
            store(room, start + t * w, number(s.u, 0.0))
        for t in range(0, count, w):
            store_totals(sums, to + t, load_full_square(room, start + t * w, w, w, w), adds)
    if constant.size > 0:
        total = number(s.u, 0.0)
        for t in range(count):
            total = total + load(room, start + t * w)
        add_to(constant, to_own, total)


@njit(nogil=True, cache=True)
def add_up(s, sums, rows, out):
    """Write the sums over samples of the blocks' sums.

    Parameters
    ----------
    s : SelectiveScan
        The scan.
    sums : ndarray of float64, shape (batch, cells, blocks, rows, lanes)
        The sums of blocks.
    rows : int
        How many numbers a channel has.
    out : ndarray, shape (channels, rows)
        What is written.
    """
    w = lane_count(s.u)
    size, row = s.channels // s.cells, rows * w
    sample = s.cells * s.blocks * row
    for channel in range(s.channels):
        cell, own = channel // size, channel % size
        at = (cell * s.blocks + own // w) * row + own % w
        for n in range(rows):
            total = 0.0
            for place in range(at + n * w, len(sums), sample):
                total += sums[place]
            out[channel * rows + n] = total
