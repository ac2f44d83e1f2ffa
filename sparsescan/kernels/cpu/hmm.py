"""Hidden Markov models: the log-likelihood of series, posteriors as its gradients, and best paths.

With ``e`` the log-likelihoods of emissions, ``x_j`` the logarithm of the probability of state ``j``
and of all observations so far, apart from what all states have in common, and ``y_j`` that of all
later observations given the state, a step is

    x_j ← e_j + log Σ_i a_ij exp(x_i),    y_i ← log Σ_j a_ij exp(e_j + y_j)

after each of which the largest number is subtracted. So a step takes as many exponentials and
logarithms as there are states, and the sums are a product of a matrix and a vector. Where a sum is
so small that it may lack terms that have underflowed, it is computed again term by term by
logarithms: no sequence is too improbable. Zeros are impossible, and take part in nothing.

The posterior of a state is ``exp(x + y)``, divided by the sum over states; it is the gradient in
``e``. The gradient in ``a_ij`` is ``exp(x_i + e_j + y_j)``, divided by the same.

Scratch is of float64, whose rows are padded to whole vectors. The caller has checked sizes and
indices, and holds the arrays.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..compile import njit
from .functions import exp, log
from .lanes import lane_count, load, store
from .padded import clear, product

Array = Any

# Sums below the first may lack terms, if an exponent is below the second or a number of a matrix
# below the third. Factors of outer products may lack terms if their product is below the fourth.
_LOW, _FAINT, _TINY, _FAR = 1e-200, -200.0, 1e-100, -300.0


class HiddenChain(NamedTuple):
    """A hidden Markov model and its series; arrays are flat, and some may be empty.

    Attributes
    ----------
    steps, series, states : int
        Sizes.
    in_time, in_series : int
        How far it is in `a` from a step to the next, and from a series to the next; 0 if shared.
    in_first : int
        How far it is in `first` from a series to the next; 0 if they share it.
    e : ndarray, shape (steps, series, states)
        The logarithms of what states say of observations.
    first : ndarray, shape (..., states)
        The probabilities of the first states.
    a : ndarray, shape (..., states, states) or (..., entries)
        Those of transitions, or the entries of a sparse matrix of them.
    lengths : ndarray, shape (series,)
        How many steps a series has; empty if all have all.
    indptr, indices : ndarray of int
        The pattern of a sparse matrix; empty if matrices are dense.
    """

    steps: int
    series: int
    states: int
    in_time: int
    in_series: int
    in_first: int
    e: Array
    first: Array
    a: Array
    lengths: Array
    indptr: Array
    indices: Array


class HiddenGradients(NamedTuple):
    """Arrays to which a backward pass adds; those that nobody needs are empty.

    Attributes
    ----------
    e, first, a : ndarray
        Gradients in the arrays of a :class:`HiddenChain`. Of what series share there is one for
        each range of series, one behind the other.
    """

    e: Array
    first: Array
    a: Array


# What is in scratch, and how large it is.
_SCRATCH = {
    "a": "matrix",
    "at": "matrix",
    "sums": "entries",
    **dict.fromkeys(("x", "w", "p", "y", "u", "v", "b", "top", "exact"), "row"),
}
Room = NamedTuple("Room", [(name, int) for name in ("row", *_SCRATCH, "size")])


def layout(states: int, entries: int, lanes: int) -> Room:
    """Return where things are in scratch; `entries` is 0 for dense matrices."""
    row = -(-states // lanes) * lanes
    matrix = 0 if entries else states * row
    sizes = {"row": row, "matrix": matrix, "entries": -(-entries // lanes) * lanes or matrix}
    places, end = {}, 0
    for name, kind in _SCRATCH.items():
        places[name] = end
        end += sizes[kind]
    return Room(row=row, **places, size=end)


# -- Products --------------------------------------------------------------------------------------


@njit(_nrt=False, forceinline=True)
def _bring(s, r, room, n, t):
    """Copy a dense matrix to scratch; return where the values begin, and whether any is tiny."""
    base, is_tiny = t * s.in_time + n * s.in_series, False
    is_dense, size = s.indptr.size == 0, s.states
    for i in range(size):
        begin, end = _row(s, i)
        for k in range(begin, end):
            a = s.a[base + k]
            is_tiny |= 0.0 < a < _TINY
            if is_dense:
                room[r.a + i * r.row + k - begin] = a
                room[r.at + (k - begin) * r.row + i] = a
    return base, is_tiny


@njit(_nrt=False, forceinline=True)
def _row(s, i):
    """Return where the values of a row begin and end."""
    if s.indptr.size == 0:
        return i * s.states, (i + 1) * s.states
    return s.indptr[i], s.indptr[i + 1]


@njit(_nrt=False, forceinline=True)
def _column(s, i, k):
    """Return the column of a value."""
    return k - i * s.states if s.indptr.size == 0 else s.indices[k]


@njit(_nrt=False, forceinline=True)
def _pass_on(s, r, room, base, forwards, x, to):
    """Write sums over states before a transition, or after it, of what these have."""
    size = s.states
    if s.indptr.size == 0:
        matrix = r.a if forwards else r.at
        product(room, to, -1, (x, 0, 1), matrix, 1, size, r.row)
        return
    clear(room, to, size)
    for i in range(size):
        begin, end = _row(s, i)
        if forwards:
            w = room[x + i]
            for k in range(begin, end):
                room[to + s.indices[k]] += w * s.a[base + k]
        else:
            w = 0.0
            for k in range(begin, end):
                w += s.a[base + k] * room[x + s.indices[k]]
            room[to + i] = w


@njit(_nrt=False)
def _pass_on_exactly(s, r, room, base, forwards, x, to):
    """Write logarithms of small sums again, whose terms may have underflowed."""
    size = s.states
    for i in range(size):
        room[r.top + i] = -math.inf
        room[r.exact + i] = 0.0
    for sweep in range(2):
        for i in range(size):
            begin, end = _row(s, i)
            for k in range(begin, end):
                a, j = s.a[base + k], _column(s, i, k)
                source, target = (i, j) if forwards else (j, i)
                y = room[x + source]
                if a > 0.0 and y > -math.inf and room[r.p + target] < _LOW:
                    y += math.log(a)
                    if sweep == 0:
                        room[r.top + target] = max(room[r.top + target], y)
                    else:
                        room[r.exact + target] += math.exp(y - room[r.top + target])
    for i in range(size):
        if room[r.exact + i] > 0.0:
            room[to + i] = room[r.top + i] + math.log(room[r.exact + i])


@njit(_nrt=False, forceinline=True)
def _sums(s, r, room, base, forwards, x, w, is_small, to):
    """Write logarithms of sums over states of exponentials of `x`, which `w` is written for."""
    for j in range(0, r.row, lane_count(room)):
        store(room, w + j, exp(load(room, x + j)))
    _pass_on(s, r, room, base, forwards, w, r.p)
    is_low = False
    for j in range(s.states):
        is_low |= room[r.p + j] < _LOW
    for j in range(0, r.row, lane_count(room)):
        store(room, to + j, log(load(room, r.p + j)))
    if is_low and is_small:
        _pass_on_exactly(s, r, room, base, forwards, x, to)


@njit(_nrt=False, forceinline=True)
def _emit(s, room, n, t, x, to):
    """Write what emissions add to logarithms, less the largest, which is returned.

    NaN is returned if there is any. Return also whether an exponent is faint.
    """
    at, most, is_faint = (t * s.series + n) * s.states, -math.inf, False
    for j in range(s.states):
        y = room[x + j] + s.e[at + j]
        room[to + j] = y
        most = y if y > most or y != y else most
        if y != y:
            break
    if most != most or most == math.inf:
        for j in range(s.states):
            room[to + j] = math.nan
        return math.nan, False
    if most > -math.inf:
        for j in range(s.states):
            y = room[to + j] - most
            room[to + j] = y
            is_faint |= -math.inf < y < _FAINT
    return most, is_faint


@njit(_nrt=False, forceinline=True)
def _length(s, n):
    if s.lengths.size == 0:
        return s.steps
    return int(min(max(s.lengths[n], 0), s.steps))


# -- Passes ----------------------------------------------------------------------------------------


@njit(nogil=True, cache=True, _nrt=False)
def forward(s, r, first, last, out, kept, room):
    """Write the log-likelihoods of some series, and what is known of states.

    Parameters
    ----------
    s : HiddenChain
        The model.
    r : Room
        What :func:`layout` returns.
    first, last : int
        Series `first` to ``last - 1`` are computed.
    out : ndarray, shape (series,)
        The log-likelihoods.
    kept : ndarray, shape (steps, series, states)
        The logarithms ``x``; empty if they are not needed. They are -inf for all states from a step
        on that is impossible, and NaN from one on that has NaN.
    room : ndarray of float64
        Scratch.
    """
    size = s.states
    clear(room, 0, r.size)
    for n in range(first, last):
        found, is_faint, is_tiny, base, length = 0.0, False, False, 0, _length(s, n)
        for t in range(length):
            if t == 0:
                for j in range(size):
                    x = s.first[n * s.in_first + j]
                    room[r.y + j] = math.log(x) if x != 0.0 else -math.inf
            elif found - found == 0.0:
                if t == 1 or s.in_time > 0:
                    base, is_tiny = _bring(s, r, room, n, t - 1)
                _sums(s, r, room, base, True, r.x, r.w, is_faint or is_tiny, r.y)
            if found - found == 0.0:
                most, is_faint = _emit(s, room, n, t, r.y, r.x)
                found += most
            if found - found != 0.0:
                for j in range(size):
                    room[r.x + j] = found
            if kept.size > 0:
                for j in range(size):
                    kept[(t * s.series + n) * size + j] = room[r.x + j]
        if length > 0 and found - found == 0.0:
            total = 0.0
            for j in range(size):
                total += math.exp(room[r.x + j])
            found += math.log(total)
        out[n] = found


@njit(nogil=True, cache=True, _nrt=False)
def backward(s, r, first, last, grads, kept, into, base_first, base_a, room):
    """Add the gradients of the log-likelihoods of some series; they are 0 for impossible ones.

    Parameters
    ----------
    s : HiddenChain
        The model.
    r : Room
        What :func:`layout` returns.
    first, last : int
        Series `first` to ``last - 1`` are computed.
    grads : ndarray, shape (series,)
        The gradients in the log-likelihoods.
    kept : ndarray, shape (steps, series, states)
        What :func:`forward` has kept.
    into : HiddenGradients
        What is written.
    base_first, base_a : int
        Where the gradients of these series begin in the last two.
    room : ndarray of float64
        Scratch.
    """
    size = s.states
    clear(room, 0, r.size)
    for n in range(first, last):
        g, length = grads[n], _length(s, n)
        is_faint, is_tiny, base = False, False, 0
        to_a = base_a + n * s.in_series
        likely = -math.inf
        for j in range(size):
            x = kept[((length - 1) * s.series + n) * size + j] if length > 0 else -math.inf
            likely = x if x > likely or x != x else likely
        if likely == -math.inf or g == 0.0:
            continue
        for t in range(length - 1, -1, -1):
            at = (t * s.series + n) * size
            for j in range(size):
                room[r.x + j] = kept[at + j]
                room[r.y + j] = 0.0
            if t < length - 1:
                if t == length - 2 or s.in_time > 0:
                    base, is_tiny = _bring(s, r, room, n, t)
                _sums(s, r, room, base, False, r.v, r.b, is_faint or is_tiny, r.y)
            most = _posterior(r, room, size)
            if into.e.size > 0:
                for j in range(size):
                    into.e[at + j] = g * room[r.u + j]
            if into.a.size > 0 and t < length - 1:
                _add_transition(s, r, room, most)
                if s.in_time > 0:
                    _put(s, r, room, into.a, to_a + t * s.in_time, g)
            _, is_faint = _emit(s, room, n, t, r.y, r.v)
        if into.a.size > 0 and s.in_time == 0:
            _put(s, r, room, into.a, to_a, g)
        if into.first.size > 0:
            at = n * s.in_first
            for j in range(size):
                x = s.first[at + j]
                room[r.y + j] = room[r.v + j] + (math.log(x) if x != 0.0 else -math.inf)
                room[r.x + j] = 0.0
            most = _posterior(r, room, size)
            for j in range(size):
                into.first[base_first + at + j] += g * math.exp(room[r.v + j] - most)


@njit(_nrt=False, forceinline=True, error_model="numpy")
def _posterior(r, room, size):
    """Write ``exp(x + y)`` over its sum, and return the logarithm of that."""
    most, total = -math.inf, 0.0
    for j in range(size):
        room[r.u + j] = room[r.x + j] + room[r.y + j]
        y = room[r.u + j]
        most = y if y > most or y != y else most
    for j in range(size):
        room[r.u + j] -= most
    for j in range(0, r.row, lane_count(room)):
        store(room, r.w + j, exp(load(room, r.x + j)))
        store(room, r.u + j, exp(load(room, r.u + j)))
    for j in range(size):
        total += room[r.u + j]
    for j in range(size):
        room[r.u + j] /= total
    return most + math.log(total)


@njit(_nrt=False, forceinline=True)
def _add_transition(s, r, room, most):
    """Add ``exp(x_i + v_j - most)`` for a transition, whose first factors are in `w` and `b`."""
    is_far = not most > _FAR
    factor = 0.0 if is_far else math.exp(-most)
    if not is_far and s.indptr.size == 0:
        for i in range(s.states):
            room[r.w + i] *= factor
        product(room, r.sums, r.sums, (r.w, 1, 0), r.b, s.states, 1, r.row)
        return
    for i in range(s.states):
        begin, end = _row(s, i)
        if is_far:
            for k in range(begin, end):
                j = _column(s, i, k)
                to = r.sums + (i * r.row + j if s.indptr.size == 0 else k)
                room[to] += math.exp(room[r.x + i] + room[r.v + j] - most)
        else:
            w = room[r.w + i] * factor
            for k in range(begin, end):
                room[r.sums + k] += w * room[r.b + s.indices[k]]


@njit(_nrt=False)
def _put(s, r, room, array, at, g):
    """Add a multiple of the gradient in a matrix to an array, and clear it."""
    for i in range(s.states):
        begin, end = _row(s, i)
        for k in range(begin, end):
            place = r.sums + (i * r.row + k - begin if s.indptr.size == 0 else k)
            array[at + k] += g * room[place]
            room[place] = 0.0
        if s.indptr.size == 0:
            clear(room, r.sums + i * r.row, r.row)


# -- The best path ---------------------------------------------------------------------------------


@njit(nogil=True, cache=True, _nrt=False)
def viterbi(s, first, last, path, out, score, back):
    """Write the most likely paths of some series, and their log-likelihoods.

    Parameters
    ----------
    s : HiddenChain
        The model, with logarithms in place of probabilities.
    first, last : int
        Series `first` to ``last - 1`` are computed.
    path : ndarray of int64, shape (steps, series)
        The states, -1 behind the end of a series, and where all paths are impossible.
    out : ndarray of float64, shape (series,)
        Log-likelihoods of paths.
    score : ndarray of float64, shape (2, states)
        Scratch.
    back : ndarray of int32, shape (steps, states)
        Scratch.
    """
    size = s.states
    for n in range(first, last):
        length = _length(s, n)
        for t in range(length):
            at, base = (t * s.series + n) * size, (t - 1) * s.in_time + n * s.in_series
            old, new = (t + 1) % 2 * size, t % 2 * size
            for j in range(size):
                score[new + j] = s.first[n * s.in_first + j] if t == 0 else -math.inf
                back[t * size + j] = 0
            for i in range(size if t > 0 else 0):
                begin, end = _row(s, i)
                for k in range(begin, end):
                    j, y = _column(s, i, k), score[old + i] + s.a[base + k]
                    if y > score[new + j]:
                        score[new + j] = y
                        back[t * size + j] = i
            for j in range(size):
                score[new + j] += s.e[at + j]
        best, state, end = 0.0 if length == 0 else -math.inf, -1, (length - 1) % 2 * size
        for j in range(size if length > 0 else 0):
            if score[end + j] > best:
                best, state = score[end + j], j
        out[n] = best
        for t in range(s.steps - 1, -1, -1):
            path[t * s.series + n] = state if t < length else -1
            if 0 < t < length and state >= 0:
                state = back[t * size + state]
