"""Bring a product into range by a power of two for each column, by one block or many.

The work is done in phases. Many blocks do each of them in shares, which they take in turn from a
counter. A block waits for the shares of earlier phases only, which blocks have taken that run
already: so none waits for ever, however many run at once.
"""

from __future__ import annotations

from numba import int32, int64

from ...arrays.cuda import cuda
from .device import atomic_add, atomic_max, exponent_of, load, scale, store
from .nodes import INT, WORD, column, entry_of, row_of, row_start
from .scaling import ALL, EACH, NONE, UNSCALED, WIDE, check_bits
from .tables import Node, State
from .vectors import block_size, quotient, thread_index

# Products of what is in range begin with the exponents.
_CLEAR, _POWERS, _TOPS, _SPAN, _ENTRIES, _EXPONENTS = range(6)
_RANGE, _OUTSIDE, _LARGEST, _SHIFTS, _SHIFTED, _FLAG, _PHASES = range(6, 13)

# Columns whose largest entries are no more powers of two apart are given one exponent.
_APART = 30
# It is added to exponents, so that they are larger than zero.
_RAISED = 1 << 29


@cuda.jit(device=True)
def state_of(node, sample):
    """Return the address of the state of a product."""
    return load(node, Node.STATE, WORD) + 4 * State.WIDTH * sample


@cuda.jit(device=True)
def set_exponents(e, cols, a_e, x_e, own, step):
    """Write every `step`-th exponent of a product in range: the one of `A` plus those of `X`."""
    common = load(a_e, 0, INT) if a_e != 0 else INT
    if own == 0:
        flag = int32(UNSCALED if a_e == 0 else ALL)
        if x_e != 0:
            flag = load(x_e, cols, INT)
        store(e, cols, flag, INT)
    while own < cols:
        store(e, own, int32(common + (load(x_e, own, INT) if x_e != 0 else INT)), INT)
        own += step


@cuda.jit(device=True)
def note_span(state, slot, top, bottom, span):
    """Make two numbers of the state at least as large as those of any thread, if there are any."""
    me = thread_index()
    if me < 2:
        span[me] = NONE
    cuda.syncthreads()
    if top != NONE:
        cuda.atomic.max(span, 0, int32(top))
        cuda.atomic.max(span, 1, int32(bottom))
    cuda.syncthreads()
    if me < 2 and span[me] != NONE:
        atomic_max(state, slot + me, int32(span[me] + _RAISED))


@cuda.jit(device=True)
def noted(state, slot):
    """Return a number of the state, or `NONE`."""
    number = int64(load(state, slot, INT))
    return number - _RAISED if number > 0 else int64(NONE)


@cuda.jit(device=True)
def scaled_sum(t, left, a, a_e, right, x, i, j):
    """Return an entry of the product relative to its largest term, and the exponent of that."""
    total, top = t.zero, int64(NONE)
    for summing in range(2):
        for p in range(row_start(t, left, i), row_start(t, left, i + 1)):
            k = column(t, left, p)
            r = entry_of(t, right, k, j)
            if r >= 0:
                value, entry = load(a, p, t.zero), load(x, r, t.zero)
                if value != 0 and entry != 0:
                    own, others = exponent_of(value), exponent_of(entry)
                    power = own + others
                    if a_e != 0:
                        power += int64(load(a_e, k, INT))
                    if summing == 0:
                        top = max(top, power)
                    else:
                        mantissas = scale(value, -own) * scale(entry, -others)
                        total += scale(mantissas, power - top)
    return total, top


@cuda.jit(device=True)
def rescale_share(
    t, run, left, a, a_e, right, x, x_e, result, c, e, state, phase, own, step, scaled, span
):
    """Do every `step`-th part of a phase, from `own` on."""
    cols = result.cols
    # Behind the exponents and their flag are the largest exponent of each column, then by how much
    # it is shifted; whether it has an entry outside the band; and the largest exponent of each
    # column of A.
    tops, outside, powers = e + 4 * (cols + 1), e + 4 * (2 * cols + 1), e + 4 * (3 * cols + 1)
    if phase == _CLEAR:
        k = own
        while k < max(left.cols, cols):
            if k < left.cols:
                store(powers, k, int32(NONE), INT)
            if k < cols:
                store(tops, k, int32(NONE), INT)
            k += step
    elif phase == _POWERS:
        p = own
        while p < left.nnz:
            value = load(a, p, t.zero)
            if value != 0:
                k = column(t, left, p)
                power = exponent_of(value)
                if a_e != 0:
                    power += int64(load(a_e, k, INT))
                atomic_max(powers, k, int32(power))
            p += step
    elif phase == _TOPS:
        # The largest terms of each column of X times those.
        q = own
        while q < right.nnz:
            value = load(x, q, t.zero)
            if value != 0:
                by = int64(load(powers, row_of(t, right, q), INT))
                if by != NONE:
                    atomic_max(tops, column(t, right, q), int32(exponent_of(value) + by))
            q += step
    elif phase == _SPAN:
        top, bottom, j = int64(NONE), int64(NONE), own
        while j < cols:
            power = int64(load(tops, j, INT))
            if power != NONE:
                top, bottom = max(top, power), max(bottom, -power)
            j += step
        note_span(state, State.TOP, top, bottom, span)
    elif phase in (_ENTRIES, _EXPONENTS):
        top = noted(state, State.TOP)
        together = top + noted(state, State.BOTTOM) <= _APART
        if phase == _ENTRIES:
            q = own
            while q < result.nnz:
                i, j = row_of(t, result, q), column(t, result, q)
                total, power = scaled_sum(t, left, a, a_e, right, x, i, j)
                if total != 0:
                    by = (top if together else int64(load(tops, j, INT))) - t.target
                    exponent = by + (int64(load(x_e, j, INT)) if x_e != 0 else int64(0))
                    power += exponent_of(total)
                    check_bits(t, run, power + exponent - by, exponent)
                    total = scale(total, power - exponent_of(total) - by)
                store(c, q, total, t.zero)
                q += step
        else:
            if not scaled:
                set_exponents(e, cols, a_e, x_e, own, step)
            elif own == 0:
                one = together and (x_e == 0 or load(x_e, cols, INT) == ALL)
                store(e, cols, int32(ALL if one else EACH), INT)
            j = own
            while j < cols:
                if scaled:
                    power = top if together else int64(load(tops, j, INT))
                    exponent = int64(0)
                    if power != NONE:
                        exponent = power - t.target
                        if x_e != 0:
                            exponent += int64(load(x_e, j, INT))
                    store(e, j, int32(exponent), INT)
                store(tops, j, int32(NONE), INT)
                store(outside, j, INT, INT)
                j += step
    elif phase == _RANGE:
        top, bottom, p = int64(NONE), int64(NONE), own
        while p < result.nnz:
            value = load(c, p, t.zero)
            if value != 0:
                power = exponent_of(value)
                top, bottom = max(top, power), max(bottom, -power)
            p += step
        note_span(state, State.HIGHEST, top, bottom, span)
    else:
        # All columns by one power of two, if that will do: what a product is multiplied by then
        # needs no more care. Or every column with an entry outside the band, to the target.
        top, bottom = noted(state, State.HIGHEST), -noted(state, State.LOWEST)
        # The flag is read by the one that writes it, in its phase.
        if top == NONE or (phase == _FLAG and own != 0):
            return
        flag = load(e, cols, INT)
        together = flag != EACH and bottom - (top - t.target) >= t.low_exponent
        if phase in (_OUTSIDE, _LARGEST):
            p = result.nnz if together else own
            while p < result.nnz:
                value = load(c, p, t.zero)
                if value != 0:
                    j, power = column(t, result, p), exponent_of(value)
                    if phase == _LARGEST:
                        if load(outside, j, INT) != 0:
                            atomic_max(tops, j, int32(power))
                    elif power < t.low_exponent or power > t.high_exponent:
                        atomic_max(outside, j, int32(1))
                p += step
        elif phase == _SHIFTS:
            j = own
            while j < cols:
                shift = int64(0)
                if together:
                    shift = top - t.target
                elif load(outside, j, INT) != 0:
                    shift = int64(load(tops, j, INT)) - t.target
                store(tops, j, int32(shift), INT)
                store(e, j, int32(load(e, j, INT) + shift), INT)
                j += step
        elif phase == _SHIFTED:
            p, wide = own, False
            while p < result.nnz:
                j, value = column(t, result, p), load(c, p, t.zero)
                shift = int64(load(tops, j, INT))
                if shift != 0 and value != 0:
                    by, power = int64(load(e, j, INT)), exponent_of(value)
                    wide |= power - shift < t.low_exponent
                    check_bits(t, run, power + by - shift, by)
                    store(c, p, scale(value, -shift), t.zero)
                p += step
            if wide:
                atomic_max(state, State.WIDE, int32(1))
        else:
            flag = ALL if together else EACH
            store(e, cols, int32(WIDE if load(state, State.WIDE, INT) != 0 else flag), INT)


@cuda.jit(device=True)
def rescale_alone(t, run, left, a, a_e, right, x, x_e, result, c, e, state, scaled, span):
    """Make ``C diag(2^e)`` in the band, by one block.

    If `scaled`, it is ``A diag(2^a_e) X diag(2^x_e)`` for any range, of which an entry is summed
    relative to its largest term. Else it is there, and out of the band.
    """
    me, threads = thread_index(), block_size()
    phase = int64(_CLEAR) if scaled else int64(_EXPONENTS)
    while phase < _PHASES:
        rescale_share(
            t,
            run,
            left,
            a,
            a_e,
            right,
            x,
            x_e,
            result,
            c,
            e,
            state,
            phase,
            me,
            threads,
            scaled,
            span,
        )
        cuda.syncthreads()
        phase += 1
    if me == 0:
        reset(state)


@cuda.jit(device=True)
def reset(state):
    """Leave the state of a product as it was before the run."""
    for k in range(State.WIDTH):
        store(state, k, INT, INT)


@cuda.jit(device=True)
def rescale_together(
    t, run, left, a, a_e, right, x, x_e, result, c, e, state, blocks, scaled, seen, span
):
    """Do as :func:`rescale_alone`, by many blocks; return whether this is the last to leave."""
    me, threads = thread_index(), block_size()
    first = int64(_CLEAR) if scaled else int64(_EXPONENTS)
    while True:
        if me == 0:
            taken = int64(atomic_add(state, State.TAKEN, int32(1)))
            # A block leaves when all shares are taken; the last to do so, when all are done.
            phase, share = quotient(taken, blocks)
            if first + phase < _PHASES or share == blocks - 1:
                while int64(atomic_add(state, State.SHARES, INT)) < taken - share:
                    pass
            cuda.threadfence()
            seen[0] = taken
        cuda.syncthreads()
        phase, share = quotient(int64(seen[0]), blocks)
        phase += first
        if phase >= _PHASES:
            break
        own, step = share * threads + me, blocks * threads
        rescale_share(
            t, run, left, a, a_e, right, x, x_e, result, c, e, state, phase, own, step, scaled, span
        )
        cuda.syncthreads()
        if me == 0:
            cuda.threadfence()
            atomic_add(state, State.SHARES, int32(1))
    last = share == blocks - 1
    if last and me == 0:
        reset(state)
    return last
