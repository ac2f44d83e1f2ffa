"""Kalman filters: the log-likelihood of series, its gradients, and filtered and smoothed states.

    y_t = H_t x_t + d_t + v_t,    x_{t+1} = F_t x_t + c_t + w_t,    v_t ~ N(0, R_t), w_t ~ N(0, Q_t)

With ``m`` and ``P`` before an observation it is ``S = H P Hᵀ + R``, ``K = P Hᵀ S⁻¹``, and after it
``m + K (y - d - H m)`` and, as Joseph has it, ``(I - K H) P (I - K H)ᵀ + K R Kᵀ``: two updates of
low rank, of which the second is rounding if the first is exact. Rows of ``H`` whose numbers are
missing are left out. `L` is the inverse of the Cholesky factor of ``S``.

Backward, ``r`` is the gradient in ``m``, and ``(r rᵀ - N) / 2`` that in ``P``. From those after a
transition, ``q = Fᵀ r``, ``A = Fᵀ N F``, ``u = S⁻¹ (y - d - H m) - Kᵀ q``, and before it

    r = q + Hᵀ u,    N = (I - K H)ᵀ A (I - K H) + Hᵀ S⁻¹ H

(de Jong, 1989; Koopman and Shephard, 1992). All gradients follow from these, and from the smoothed
means ``m⁺ + P⁺ q``. Smoothed covariances are ``P⁺ - P⁺ A P⁺``, and those of a state with the one
before ``(I - P N) F P⁺``, with `P` and `N` after the transition (de Jong and MacKinnon, 1988).

Rows of matrices are padded to whole vectors, and a tile of four rows is kept in registers. Scratch
is of float64. The forward pass keeps ``m`` and ``P`` before each segment of steps; the backward
pass computes a segment again. Where matrices are those of all steps and nothing is missing, `P`
comes to a halt, and so does `N`: a step then costs two products of a matrix and a vector forward,
and as many and outer products backward.

The floor of a step of ``n`` states and ``p`` observed numbers, in multiply-adds: ``2 n³ + 4 n² p``
forward, ``3 n³ + 6 n² p`` backward; at a halt ``n² + 2 n p`` and ``4 n² + 3 n p``.

The caller has checked sizes, and holds the arrays.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..compile import njit
from .padded import add_scaled, clear, copy, dot, product

Array = Any

# Steps after which covariances are compared, and by how many roundings they may have changed.
_WINDOW, _ROUNDINGS = 16, 4
_TINY = (_ROUNDINGS * float(np.finfo(np.float64).eps)) ** 2
# Places of strides.
_F, _H, _Q, _R, _C, _D, _M, _P = range(8)


class Model(NamedTuple):
    """A state space and its series; arrays are flat, and empty if they are not given.

    Attributes
    ----------
    steps, series, states, observed : int
        ``T``, ``N``, ``n`` and ``p``.
    segment : int
        How many steps a segment has; the last one may have fewer.
    is_fixed : int
        1 if the matrices are those of all steps, else 0.
    in_time, in_series : tuple of int
        How far it is in `f`, `h`, `q`, `r`, `c`, `d`, `m` and `p` from a step to the next, and from
        a series to the next; 0 if they share numbers.
    y : ndarray, shape (steps, series, observed)
        The observations; NaN is missing.
    f, h, q, r : ndarray
        The matrices.
    c, d : ndarray
        The offsets of states and of observations.
    m, p : ndarray
        Mean and covariance of the first states.
    """

    steps: int
    series: int
    states: int
    observed: int
    segment: int
    is_fixed: int
    in_time: tuple[int, ...]
    in_series: tuple[int, ...]
    y: Array
    f: Array
    h: Array
    q: Array
    r: Array
    c: Array
    d: Array
    m: Array
    p: Array


class ModelGradients(NamedTuple):
    """Arrays to which a backward pass adds; those that nobody needs are empty.

    Attributes
    ----------
    y, f, h, q, r, c, d, m, p : ndarray
        Gradients in the arrays of a :class:`Model`, in their shapes. Of what series share there is
        one for each range of series, one behind the other.
    """

    y: Array
    f: Array
    h: Array
    q: Array
    r: Array
    c: Array
    d: Array
    m: Array
    p: Array


class Moments(NamedTuple):
    """Means and covariances of states, of shape (steps, series, ...); empty if nobody needs them.

    Attributes
    ----------
    means, covariances : ndarray
        Those of states after an observation, or given all observations.
    predicted_means, predicted_covariances : ndarray
        Those before an observation.
    cross_covariances : ndarray, shape (steps - 1, series, states, states)
        The covariances of each state but the first with the one before, given all observations.
    """

    means: Array
    covariances: Array
    predicted_means: Array
    predicted_covariances: Array
    cross_covariances: Array


# What is in scratch, and how large it is: the matrices of a step, of all observed numbers and (`h`,
# `ht`, `r`) of those that are there; what an update computes; what a step back does; gradients.
_SCRATCH = {
    "f": "square",
    "ft": "square",
    "q": "square",
    "c": "row",
    "d": "side",
    "hs": "wide",
    "rs": "small",
    "h": "wide",
    "ht": "tall",
    "r": "small",
    "y": "side",
    "index": "side",
    "whole": "lanes",
    "m": "row",
    "p": "square",
    "before": "square",
    "hp": "wide",
    "s": "small",
    "z": "side",
    "v": "wide",
    "w": "square",
    "in_m": "row",
    "q_m": "row",
    "u": "side",
    "smooth": "row",
    "in_p": "square",
    "in_next": "square",
    "nf": "square",
    "a": "square",
    "nfp": "square",
    "ka": "wide",
    "kap": "wide",
    "kak": "small",
    "sum_f": "square",
    "sum_h": "wide",
    "sum_q": "square",
    "sum_r": "small",
    "sum_c": "row",
    "sum_d": "side",
}
# What an update leaves: covariance after it, -Kᵀ, S⁻¹, L, Lᵀ and the logarithm of |S|.
_GAIN = {"k": "wide", "s": "small", "l": "small", "lt": "small", "log": "lanes"}
Room = NamedTuple(
    "Room",
    [
        (name, int)
        for name in (
            *("row", "side", "gain", "mean"),
            *(f"g_{name}" for name in _GAIN),
            *_SCRATCH,
            *("frozen", "means", "gains", "size"),
        )
    ],
)


def layout(states: int, observed: int, kept: int, lanes: int) -> Room:
    """Return where things are in scratch that holds `kept` steps, with vectors of so many lanes.

    There are sizes of rows, of what an update leaves and of what a mean is; places in the second;
    places of all things, of what steps share at a halt, and of what each of them has.
    """
    row, side = (-(-each // lanes) * lanes for each in (states, observed))
    sizes = {
        "lanes": lanes,
        "row": row,
        "side": side,
        "square": states * row,
        "wide": observed * row,
        "tall": states * side,
        "small": observed * side,
    }
    places, gain, end = {}, states * row, 0
    for name, kind in _GAIN.items():
        places[f"g_{name}"] = gain
        gain += sizes[kind]
    for name, kind in _SCRATCH.items():
        places[name] = end
        end += sizes[kind]
    mean = row + side
    means = end + gain
    gains = means + kept * mean
    size = gains + kept * gain
    about = {"row": row, "side": side, "gain": gain, "mean": mean}
    return Room(**about, **places, frozen=end, means=means, gains=gains, size=size)


# -- Covariances -----------------------------------------------------------------------------------


@njit(_nrt=False)
def _symmetrise(room, at, n, row):
    """Replace a matrix by the half of its sum with the transposed one."""
    for i in range(n):
        for j in range(i):
            x, y = at + i * row + j, at + j * row + i
            mean = 0.5 * (room[x] + room[y])
            room[x], room[y] = mean, mean


@njit(_nrt=False)
def _is_at_halt(room, new, old, n, row):
    """Return whether a covariance has changed by rounding only, compared with its diagonal."""
    for i in range(n):
        for j in range(i + 1):
            change = room[new + i * row + j] - room[old + i * row + j]
            most = room[new + i * row + i] * room[new + j * row + j]
            if not change * change <= _TINY * most:
                return False
    return True


# -- Between arrays and scratch --------------------------------------------------------------------


@njit(_nrt=False)
def _bring(array, at, rows, columns, room, to, step):
    """Copy a matrix to scratch, where its rows are `step` apart."""
    for i in range(rows):
        for j in range(columns):
            room[to + i * step + j] = array[at + i * columns + j]


@njit(_nrt=False)
def _write(array, at, rows, columns, sign, room, place, step):
    """Copy a matrix with a sign from scratch, where its rows are `step` apart."""
    for i in range(rows):
        for j in range(columns):
            array[at + i * columns + j] = sign * room[place + i * step + j]


@njit(_nrt=False, forceinline=True)
def _bring_step(s, r, room, n, t, is_first):
    """Copy what belongs to a step of a series to scratch, unless steps share it and it is there."""
    row, side, size = r.row, r.side, s.states
    if is_first or s.in_time[_F] > 0:
        at = t * s.in_time[_F] + n * s.in_series[_F]
        _bring(s.f, at, size, size, room, r.f, row)
        for i in range(size):
            for j in range(size):
                room[r.ft + j * row + i] = room[r.f + i * row + j]
    if is_first or s.in_time[_H] > 0:
        at = t * s.in_time[_H] + n * s.in_series[_H]
        _bring(s.h, at, s.observed, size, room, r.hs, row)
        room[r.whole] = 0.0
    if is_first or s.in_time[_Q] > 0:
        _bring(s.q, t * s.in_time[_Q] + n * s.in_series[_Q], size, size, room, r.q, row)
    if is_first or s.in_time[_R] > 0:
        at = t * s.in_time[_R] + n * s.in_series[_R]
        _bring(s.r, at, s.observed, s.observed, room, r.rs, side)
        _symmetrise(room, r.rs, s.observed, side)
        room[r.whole] = 0.0
    if s.c.size > 0 and (is_first or s.in_time[_C] > 0):
        _bring(s.c, t * s.in_time[_C] + n * s.in_series[_C], 1, size, room, r.c, row)
    if s.d.size > 0 and (is_first or s.in_time[_D] > 0):
        _bring(s.d, t * s.in_time[_D] + n * s.in_series[_D], 1, s.observed, room, r.d, side)


@njit(_nrt=False, forceinline=True)
def _is_complete(s, n, begin, count):
    for t in range(begin, begin + count):
        for i in range(s.observed):
            y = s.y[(t * s.series + n) * s.observed + i]
            if y != y:
                return False
    return True


@njit(_nrt=False, forceinline=True)
def _observe(s, r, room, n, t):
    """Bring the numbers that are there, without offsets, and what of matrices belongs to them.

    Return how many there are.
    """
    at, k = (t * s.series + n) * s.observed, 0
    for i in range(s.observed):
        y = s.y[at + i]
        if y == y:
            room[r.y + k] = y - room[r.d + i]
            room[r.index + k] = i
            k += 1
    if k == s.observed and room[r.whole] == 1.0:
        return k
    for i in range(k):
        own = int(room[r.index + i])
        for j in range(s.states):
            h = room[r.hs + own * r.row + j]
            room[r.h + i * r.row + j] = h
            room[r.ht + j * r.side + i] = h
        for j in range(k):
            room[r.r + i * r.side + j] = room[r.rs + own * r.side + int(room[r.index + j])]
    room[r.whole] = 1.0 if k == s.observed else 0.0
    return k


# -- Steps forward ---------------------------------------------------------------------------------


@njit(_nrt=False, forceinline=True, error_model="numpy")
def _factor(r, room, k, gain):
    """Write ``S⁻¹``, the inverse of the Cholesky factor, transposed too, and ``log |S|``."""
    side, s, low, high = r.side, r.s, gain + r.g_l, gain + r.g_lt
    _symmetrise(room, s, k, side)
    log_det = 0.0
    for j in range(k):
        for i in range(j, k):
            x = room[s + i * side + j]
            for m in range(j):
                x -= room[s + i * side + m] * room[s + j * side + m]
            if i == j:
                log_det += math.log(x)
                x = math.sqrt(x)
            else:
                x /= room[s + j * side + j]
            room[s + i * side + j] = x
    for j in range(k):
        for i in range(k):
            x = 0.0
            if i >= j:
                x = 1.0 if i == j else 0.0
                for m in range(j, i):
                    x -= room[s + i * side + m] * room[low + m * side + j]
                x /= room[s + i * side + i]
            room[low + i * side + j] = x
            room[high + j * side + i] = x
    for i in range(k):
        for j in range(i + 1):
            x = 0.0
            for m in range(i, k):
                x += room[low + m * side + i] * room[low + m * side + j]
            room[gain + r.g_s + i * side + j] = x
            room[gain + r.g_s + j * side + i] = x
    room[gain + r.g_log] = log_det


@njit(_nrt=False, forceinline=True)
def _update(s, r, room, k, gain):
    """Write what of a step does not depend on the `k` numbers that are observed."""
    n, row, side = s.states, r.row, r.side
    if k == 0:
        copy(room, gain, r.p, n * row)
        room[gain + r.g_log] = 0.0
        return
    down = gain + r.g_k
    product(room, r.hp, -1, (r.h, row, 1), r.p, k, n, row)
    product(room, r.s, r.r, (r.hp, row, 1), r.ht, k, n, side)
    _factor(r, room, k, gain)
    product(room, r.v, -1, (gain + r.g_l, side, 1), r.hp, k, k, row)
    product(room, down, -1, (gain + r.g_lt, side, 1), r.v, k, k, row)
    for j in range(k * row):
        room[down + j] = -room[down + j]
    product(room, r.w, r.p, (down, 1, row), r.hp, n, k, row)
    product(room, r.v, -1, (r.h, row, 1), r.w, k, n, row)
    product(room, r.v, r.v, (r.r, side, 1), down, k, k, row)
    product(room, gain, r.w, (down, 1, row), r.v, n, k, row)


@njit(_nrt=False, forceinline=True)
def _observe_mean(s, r, room, k, gain, mean):
    """Write the mean after an observation and ``S⁻¹ (y - H m)``; return the log-likelihood."""
    row, side, square, low = r.row, r.side, 0.0, gain + r.g_l
    for i in range(k):
        room[r.y + i] -= dot(room, r.h + i * row, r.m, row)
    for i in range(k):
        z = 0.0
        for j in range(i + 1):
            z += room[low + i * side + j] * room[r.y + j]
        room[r.z + i] = z
        square += z * z
    for i in range(k):
        e = 0.0
        for j in range(i, k):
            e += room[low + j * side + i] * room[r.z + j]
        room[mean + row + i] = e
    copy(room, mean, r.m, row)
    for i in range(k):
        add_scaled(room, mean, gain + r.g_k + i * row, -room[r.y + i], row)
    return -0.5 * (square + room[gain + r.g_log] + k * math.log(2 * math.pi))


@njit(_nrt=False, forceinline=True)
def _segment(s, r, room, n, begin, count, halted, keeps, filtered):
    """Take a series through steps, and return their log-likelihood; `keeps` what each has."""
    likelihood, size, row = 0.0, s.states, r.row
    for i in range(count):
        t = begin + i
        _bring_step(s, r, room, n, t, False)
        k = _observe(s, r, room, n, t)
        gain = r.frozen if halted else r.gains + i * keeps * r.gain
        mean = r.means + i * keeps * r.mean
        if not halted:
            _update(s, r, room, k, gain)
        likelihood += _observe_mean(s, r, room, k, gain, mean)
        if filtered.means.size > 0:
            at = (t * s.series + n) * size
            _symmetrise(room, gain, size, row)
            _write(filtered.predicted_means, at, 1, size, 1.0, room, r.m, row)
            _write(filtered.predicted_covariances, at * size, size, size, 1.0, room, r.p, row)
            _write(filtered.means, at, 1, size, 1.0, room, mean, row)
            _write(filtered.covariances, at * size, size, size, 1.0, room, gain, row)
        if i == count - 1 and keeps:
            break
        product(room, r.m, r.c, (mean, 0, 1), r.ft, 1, size, row)
        if not halted:
            product(room, r.w, -1, (r.f, row, 1), gain, size, size, row)
            product(room, r.p, r.q, (r.w, row, 1), r.ft, size, size, row)
            _symmetrise(room, r.p, size, row)
    return likelihood


@njit(_nrt=False, forceinline=True)
def _begin(s, r, room, n):
    """Bring what steps share, and the first mean and covariance."""
    clear(room, 0, r.frozen)
    _bring_step(s, r, room, n, 0, True)
    if s.m.size > 0:
        _bring(s.m, n * s.in_series[_M], 1, s.states, room, r.m, r.row)
    _bring(s.p, n * s.in_series[_P], s.states, s.states, room, r.p, r.row)
    _symmetrise(room, r.p, s.states, r.row)


@njit(_nrt=False, forceinline=True)
def _freeze(s, r, room, n, t):
    """Compute what steps share from now on."""
    _update(s, r, room, _observe(s, r, room, n, t), r.frozen)


@njit(nogil=True, cache=True, _nrt=False)
def forward(s, r, first, last, out, kept, filtered, room):
    """Write the log-likelihoods of some series, and what is before segments.

    Parameters
    ----------
    s : Model
        The state space.
    r : Room
        What :func:`layout` returns of one step.
    first, last : int
        Series `first` to ``last - 1`` are computed.
    out : ndarray, shape (series,)
        The log-likelihoods.
    kept : ndarray, shape (segments, series, states * (states + 1) + 1)
        Means and covariances before segments, and a number that segments share for which the
        covariance has come to the same halt, 0 before any; empty if they are not needed.
    filtered : Moments
        What is written, besides `cross_covariances`.
    room : ndarray of float64
        Scratch.
    """
    size, row = s.states, r.row
    for n in range(first, last):
        _begin(s, r, room, n)
        likelihood, halt, since = 0.0, 0, -1
        for begin in range(0, s.steps, s.segment):
            count = min(s.segment, s.steps - begin)
            if s.is_fixed:
                is_complete = _is_complete(s, n, begin, count)
                if not is_complete:
                    halt, since = 0, -1
                elif halt == 0 and (since < 0 or begin - since >= _WINDOW):
                    if since >= 0 and _is_at_halt(room, r.p, r.before, size, row):
                        halt = begin
                        _freeze(s, r, room, n, begin)
                    copy(room, r.before, r.p, size * row)
                    since = begin
            if kept.size > 0:
                at = (begin // s.segment * s.series + n) * (size * (size + 1) + 1)
                for i in range(size):
                    kept[at + i] = room[r.m + i]
                    for j in range(size):
                        kept[at + size * (i + 1) + j] = room[r.p + i * row + j]
                kept[at + size * (size + 1)] = halt
            likelihood += _segment(s, r, room, n, begin, count, halt > 0, 0, filtered)
        out[n] = likelihood


# -- Steps back ------------------------------------------------------------------------------------


@njit(_nrt=False, forceinline=True)
def _pull_covariance(s, r, room, k, gain, needs_f):
    """Write `N` before a step, from that after it, and what gradients have of it."""
    n, row, side, down = s.states, r.row, r.side, gain + r.g_k
    product(room, r.nf, -1, (r.in_p, row, 1), r.f, n, n, row)
    product(room, r.a, -1, (r.f, 1, row), r.nf, n, n, row)
    if needs_f:
        product(room, r.nfp, -1, (r.nf, row, 1), gain, n, n, row)
    product(room, r.ka, -1, (down, row, 1), r.a, k, n, row)
    product(room, r.kap, -1, (r.ka, row, 1), gain, k, n, row)
    for i in range(k):
        for j in range(k):
            room[r.kak + i * side + j] = room[gain + r.g_s + i * side + j] + dot(
                room, r.ka + i * row, down + j * row, row
            )
    product(room, r.w, r.a, (r.ka, 1, row), r.h, n, k, row)
    product(room, r.v, -1, (down, row, 1), r.w, k, n, row)
    product(room, r.v, r.v, (gain + r.g_s, side, 1), r.h, k, k, row)
    product(room, r.in_next, r.w, (r.h, 1, row), r.v, n, k, row)
    _symmetrise(room, r.in_next, n, row)


@njit(_nrt=False, forceinline=True)
def _add_covariance(s, r, room, k, gain, times):
    """Add what `N` gives to gradients in matrices, for so many steps."""
    row, side, square = r.row, r.side, s.states * r.row
    add_scaled(room, r.sum_f, r.nfp, -times, square)
    add_scaled(room, r.sum_q, r.in_p, -times, square)
    for i in range(k):
        own = int(room[r.index + i])
        add_scaled(room, r.sum_h + own * row, gain + r.g_k + i * row, times, row)
        add_scaled(room, r.sum_h + own * row, r.kap + i * row, -times, row)
        for j in range(k):
            to = r.sum_r + own * side + int(room[r.index + j])
            room[to] -= times * room[r.kak + i * side + j]


@njit(_nrt=False, forceinline=True)
def _pull_mean(s, r, room, k, gain, mean):
    """Write `r` before a step and `u`, and add to gradients in matrices what they give."""
    n, row, side = s.states, r.row, r.side
    product(room, r.q_m, -1, (r.in_m, 0, 1), r.f, 1, n, row)
    product(room, r.smooth, mean, (r.q_m, 0, 1), gain, 1, n, row)
    product(room, r.sum_f, r.sum_f, (r.in_m, 1, 0), r.smooth, n, 1, row)
    product(room, r.sum_q, r.sum_q, (r.in_m, 1, 0), r.in_m, n, 1, row)
    add_scaled(room, r.sum_c, r.in_m, 1.0, row)
    for i in range(k):
        room[r.u + i] = room[mean + row + i] + dot(room, gain + r.g_k + i * row, r.q_m, row)
    for i in range(k):
        own, u = int(room[r.index + i]), room[r.u + i]
        room[r.sum_d + own] += u
        add_scaled(room, r.sum_h + own * row, r.smooth, u, row)
        for j in range(k):
            room[r.sum_r + own * side + int(room[r.index + j])] += u * room[r.u + j]
    product(room, r.in_m, r.q_m, (r.u, 0, 1), r.h, 1, k, row)


@njit(_nrt=False)
def _put(array, at, rows, columns, factor, room, place, step):
    """Add a multiple of a gradient to an array, if that is needed, and clear it."""
    for i in range(rows):
        for j in range(columns):
            if array.size > 0:
                array[at + i * columns + j] += factor * room[place + i * step + j]
            room[place + i * step + j] = 0.0


@njit(_nrt=False, forceinline=True)
def _place(s, bases, k, n, t):
    """Return where the gradients of a step of a series are in an array."""
    return bases[k] + t * s.in_time[k] + n * s.in_series[k]


@njit(_nrt=False, forceinline=True)
def _smooth(s, r, room, n, t, gain, smoothed):
    """Write the moments of a state given all observations, once `A`, `N` and its mean are there."""
    size, row, at = s.states, r.row, (t * s.series + n) * s.states
    square = size * row
    _write(smoothed.means, at, 1, size, 1.0, room, r.smooth, row)
    if t < s.steps - 1:
        product(room, r.w, -1, (r.f, row, 1), gain, size, size, row)
        product(room, r.nf, r.q, (r.w, row, 1), r.ft, size, size, row)
        _symmetrise(room, r.nf, size, row)
        product(room, r.in_next, -1, (r.nf, row, 1), r.nfp, size, size, row)
        add_scaled(room, r.in_next, r.w, -1.0, square)
        into = smoothed.cross_covariances
        _write(into, at * size, size, size, -1.0, room, r.in_next, row)
    product(room, r.w, -1, (r.a, row, 1), gain, size, size, row)
    product(room, r.nf, -1, (gain, row, 1), r.w, size, size, row)
    add_scaled(room, r.nf, gain, -1.0, square)
    _symmetrise(room, r.nf, size, row)
    _write(smoothed.covariances, at * size, size, size, -1.0, room, r.nf, row)


@njit(_nrt=False, forceinline=True)
def _put_all(s, r, room, into, bases, n, t, is_end, g):
    """Write the gradients in what belongs to a step, or at the end in what steps share."""
    row, side, size, observed = r.row, r.side, s.states, s.observed
    if (s.in_time[_F] > 0) != is_end:
        _put(into.f, _place(s, bases, _F, n, t), size, size, g, room, r.sum_f, row)
    if (s.in_time[_H] > 0) != is_end:
        _put(into.h, _place(s, bases, _H, n, t), observed, size, g, room, r.sum_h, row)
    if (s.in_time[_Q] > 0) != is_end:
        _put(into.q, _place(s, bases, _Q, n, t), size, size, 0.5 * g, room, r.sum_q, row)
    if (s.in_time[_R] > 0) != is_end:
        at = _place(s, bases, _R, n, t)
        _put(into.r, at, observed, observed, 0.5 * g, room, r.sum_r, side)
    if (s.in_time[_C] > 0) != is_end:
        _put(into.c, _place(s, bases, _C, n, t), 1, size, g, room, r.sum_c, row)
    if (s.in_time[_D] > 0) != is_end:
        _put(into.d, _place(s, bases, _D, n, t), 1, observed, g, room, r.sum_d, side)


@njit(nogil=True, cache=True, _nrt=False)
def backward(s, r, first, last, grads, kept, into, bases, nothing, smoothed, room):
    """Add the gradients of the log-likelihoods of some series, and write smoothed states.

    Parameters
    ----------
    s : Model
        The state space.
    r : Room
        What :func:`layout` returns of the steps of a segment.
    first, last : int
        Series `first` to ``last - 1`` are computed.
    grads : ndarray, shape (series,)
        The gradients in the log-likelihoods.
    kept : ndarray, shape (segments, series, states * (states + 1) + 1)
        What :func:`forward` has kept.
    into : ModelGradients
        What is written.
    bases : tuple of int
        Where the gradients of these series begin in `f` to `p`.
    nothing : Moments
        Empty arrays.
    smoothed : Moments
        What is written, besides what is predicted.
    room : ndarray of float64
        Scratch.
    """
    size, row, square = s.states, r.row, s.states * r.row
    for n in range(first, last):
        _begin(s, r, room, n)
        g, halt, is_still, still, since = grads[n], 0, False, 0, 0
        for segment in range((s.steps - 1) // s.segment, -1, -1):
            begin = segment * s.segment
            count = min(s.segment, s.steps - begin)
            at = (segment * s.series + n) * (size * (size + 1) + 1)
            _bring(kept, at, 1, size, room, r.m, row)
            flag = int(kept[at + size * (size + 1)])
            if flag == 0 or flag != halt:
                _bring(kept, at + size, size, size, room, r.p, row)
            if flag != halt:
                if is_still:
                    _add_covariance(s, r, room, s.observed, r.frozen, still)
                halt, is_still, still, since = flag, False, 0, -1
                if halt > 0:
                    _freeze(s, r, room, n, begin)
            _segment(s, r, room, n, begin, count, halt > 0, 1, nothing)
            if halt > 0 and not is_still and (since < 0 or since - begin >= _WINDOW):
                is_still = since >= 0 and _is_at_halt(room, r.in_p, r.before, size, row)
                copy(room, r.before, r.in_p, square)
                since = begin
            for i in range(count - 1, -1, -1):
                t = begin + i
                _bring_step(s, r, room, n, t, False)
                k = _observe(s, r, room, n, t)
                gain = r.frozen if halt > 0 else r.gains + i * r.gain
                if not is_still:
                    needs_f = into.f.size > 0 or smoothed.means.size > 0
                    _pull_covariance(s, r, room, k, gain, needs_f)
                    _add_covariance(s, r, room, k, gain, 1.0)
                    copy(room, r.in_p, r.in_next, square)
                still += is_still
                _pull_mean(s, r, room, k, gain, r.means + i * r.mean)
                if smoothed.means.size > 0:
                    _smooth(s, r, room, n, t, gain, smoothed)
                if into.y.size > 0:
                    to = (t * s.series + n) * s.observed
                    for j in range(k):
                        into.y[to + int(room[r.index + j])] = -g * room[r.u + j]
                _put_all(s, r, room, into, bases, n, t, False, g)
        if is_still:
            _add_covariance(s, r, room, s.observed, r.frozen, still)
        _put_all(s, r, room, into, bases, n, 0, True, g)
        product(room, r.sum_q, -1, (r.in_m, 1, 0), r.in_m, size, 1, row)
        add_scaled(room, r.sum_q, r.in_p, -1.0, square)
        _put(into.p, _place(s, bases, _P, n, 0), size, size, 0.5 * g, room, r.sum_q, row)
        _put(into.m, _place(s, bases, _M, n, 0), 1, size, g, room, r.in_m, row)
