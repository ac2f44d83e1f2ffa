"""Gradients in the products of some steps, the last one first: one launch for both directions."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import from_dtype, int64

from ....arrays.cuda import SIMULATED, cuda
from ....kernels.cuda.device import load, store
from ....kernels.cuda.vectors import barrier, get, put, thread_index
from .layout import pool_vectors
from .parts import AHEAD, Pass, is_reset, movers, reader, rows_of, starter

# Steps whose gradients in rows of parameters a thread adds up before it adds them to others.
_SUMMED = 63


class _Places(NamedTuple):
    """Where vectors begin in shared memory.

    Gradients in sums that are multiplied, in two buffers of so many `shares` where one barrier is
    all that a step has; gradients in the states before; then, where a thread has several units,
    gradients that stages wait for, and what they hand on to each other.
    """

    shares: int
    carries: int
    gots: int
    mids: int


def _places_of(p: Pass) -> _Places:
    code = p.code
    shares = sum(map(len, code.shares)) * p.size
    carries = (1 + code.swaps) * shares
    gots = carries + len(code.states) * p.size
    return _Places(shares, carries, gots, gots + code.gots * p.size)


class _Moves(NamedTuple):
    """Device functions that load `each` numbers of a step, bring them to the cache, and others.

    `read` loads rows of parameters, and `flush` adds gradients in them to those of other steps.
    """

    each: int
    fetch: Any
    warm: Any
    read: Any
    flush: Any


def _no_pull(rows, totals):
    """Add no gradients."""


def _moves_of(p: Pass) -> _Moves:
    zero, units, own, itemsize, code = p.zero, p.units, p.own, p.dtype.itemsize, p.code
    each, leaves, rows_size = max(code.loads, 1), code.leaves, max(code.rows, 1)
    extra, pull = code.extra(p.rounds == 1), p.named.get("pull", cuda.jit(device=True)(_no_pull))

    def fetching(take: Any) -> Any:
        @cuda.jit(device=True)
        def fetch(now, arrays, counts, t, row, back, sample, unit, present):
            """Take what was kept of a step, and the gradient in its output."""
            products, rest, more, states, inputs_at, above = arrays
            steps, batch, width, input_width, segment = counts
            plane = segment * batch
            for m in range(own):
                if present and sample + m < batch:
                    column = back * units + unit
                    here = ((t + 1) * batch + sample + m) * width + column
                    before = ((t + 2 * back) * batch + sample + m) * width + column
                    at = row + sample + m
                    take(
                        *(now, m * each, products, rest, more, states, inputs_at, above, at),
                        *(at + back * (extra - 1) * plane, plane, before, here),
                        *((steps + 2) * batch * width * itemsize, here - batch * width),
                        *((t * batch + sample + m) * input_width + unit, unit),
                    )

        return fetch

    @cuda.jit(device=True)
    def flush(rows, totals, summed, back, batch, sample, unit, present):
        pull(rows, totals)
        for r in range(leaves):
            if present and sample < batch:
                place = ((back * leaves + r) * batch + sample) * units + unit
                store(summed, place, load(summed, place, zero) + totals[r], zero)
        for r in range(rows_size):
            totals[r] = zero

    return _Moves(each, fetching(p.named["fetch"]), fetching(p.named["warm"]), reader(p), flush)


def _retreating(p: Pass, stage: int, each: int) -> Any:
    """Return a device function for what is elementwise in a stage, of a sample and a unit."""
    zero, padded, size, code = p.zero, p.padded, p.size, p.code
    _, carries, gots_at, mids_at = _places_of(p)
    parts, gots, mids, is_long = len(code.states), code.gots, code.back_mids, p.rounds > 1
    grads_size, is_last = code.slots + 1, stage == 0
    retreat, store_grads = p.named[f"retreat_{stage}"], p.named[f"store_{stage}"]
    share = p.named.get(f"share_{stage}")
    take_gots, _ = movers(gots)
    take_mids, leave_mids = movers(mids)

    @cuda.jit(device=True)
    def retreat_sample(addresses, where, pool, local, unit, m, now_at):
        _, _, products, rest, direct = addresses[:5]
        t, row, _, _, mine, sample, _, _ = where
        _, _, _, now, later, rows, mid, got, grads, totals, ends = local
        place = (mine + m) * padded + unit
        for j in range(parts):
            later[j] = get(pool, carries + j * size + place)
        if is_long:
            take_gots(pool, gots_at + place, size, got, m * gots)
            take_mids(pool, mids_at + place, size, mid, m * mids)
        if t < ends[m]:
            retreat(*(now, m * each, later, got, m * gots, rows), *(mid, m * mids, grads, totals))
        else:
            for i in range(grads_size):
                grads[i] = zero
            for i in range(mids):
                mid[m * mids + i] = zero
        if is_last:
            for j in range(parts):
                put(pool, carries + j * size + place, later[j])
        elif is_long:
            leave_mids(pool, mids_at + place, size, mid, m * mids)
        if share is not None:
            share(pool, now_at + place, size, grads)
        store_grads(grads, products, rest, direct, row + sample + m, unit)

    return retreat_sample


def _gathering(p: Pass, stage: int) -> Any:
    """Return a device function that multiplies the gradients in a stage's sums, and takes more."""
    units, lanes, rounds, own, padded, size = p.units, p.lanes, p.rounds, p.own, p.padded, p.size
    _, carries, gots_at, _ = _places_of(p)
    gots, keeps_gots = p.code.gots, rounds > 1 and stage > 0
    one_warp, per_round = p.threads == 32, p.threads // lanes
    multiply_by, collect = p.products.multiply[stage], p.named.get(f"collect_{stage}")
    per_sum = len(p.code.backward[stage].sums)
    take_gots, leave_gots = movers(gots)

    @cuda.jit(device=True)
    def gather(weights, batch, where, pool, scratch, local, now_at):
        _, _, _, lane, mine, sample, owns, thread = where
        held, sums, x, _, _, _, _, got, _, _, _ = local
        if multiply_by is not None:
            barrier(one_warp)
            turn = 0
            while turn < rounds:
                unit = turn * per_round + thread // lanes
                multiply_by(weights, turn, pool, now_at, lane, thread, held, sums, x, scratch)
                for m in range(own):
                    if owns and unit < units and sample + m < batch:
                        place = (mine + m) * padded + unit
                        if keeps_gots:
                            take_gots(pool, gots_at + place, size, got, m * gots)
                        collect(*(pool, carries + place, size, sums, m * per_sum), *(got, m * gots))
                        if keeps_gots:
                            leave_gots(pool, gots_at + place, size, got, m * gots)
                turn += 1

    return gather


def _clearing(p: Pass) -> Any:
    """Return a device function that moves the gradients in states that samples do not read.

    They are in the states that resets set, behind those in the initial states.
    """
    zero, units, lanes, rounds, own = p.zero, p.units, p.lanes, p.rounds, p.own
    padded, size, parts = p.padded, p.size, len(p.code.states)
    carries, per_round = _places_of(p).carries, p.threads // lanes
    itemsize = p.dtype.itemsize

    @cuda.jit(device=True)
    def clear(batch, where, pool, ends):
        t, _, back, _, mine, sample, owns, thread = where
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if (
                    owns
                    and unit < units
                    and sample + m < batch
                    and is_reset(ends, own, t + back, sample + m, batch)
                ):
                    of_resets = ends[own + 1] + batch * parts * units * itemsize
                    to = (2 * back * batch + sample + m) * parts * units + unit
                    for j in range(parts):
                        at = carries + j * size + (mine + m) * padded + unit
                        total = load(of_resets, to + j * units, zero) + get(pool, at)
                        store(of_resets, to + j * units, total, zero)
                        put(pool, at, zero)
            turn += 1

    return clear


def _computing(p: Pass, moves: _Moves, stage: int) -> Any:
    """Return a device function for a stage of a step, and those that follow: those before."""
    is_last, then = stage == 0, _computing(p, moves, stage - 1) if stage else None
    units, lanes, rounds, own = p.units, p.lanes, p.rounds, p.own
    per_round, is_long, has_resets = p.threads // lanes, rounds > 1, p.has_resets
    leaves = p.code.leaves
    _, fetch, _, read_rows, flush = moves
    retreat_sample, gather = _retreating(p, stage, moves.each), _gathering(p, stage)
    clear = _clearing(p)

    @cuda.jit(device=True)
    def compute(addresses, counts, where, pool, scratch, local, now_at):
        params, summed = addresses[1], addresses[5]
        arrays, batch = addresses[2:4] + addresses[6:], counts[1]
        t, row, back, _, _, sample, owns, thread = where
        _, _, _, now, _, rows, _, _, _, totals, ends = local
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            present = owns and unit < units
            if is_long:
                fetch(now, arrays, counts, t, row, back, sample, unit, present)
                read_rows(params, back, unit, rows)
            for m in range(own):
                if present and sample + m < batch:
                    retreat_sample(addresses, where, pool, local, unit, m, now_at)
            if is_long and is_last and leaves > 0:
                flush(rows, totals, summed, back, batch, sample, unit, present)
            turn += 1
        gather(addresses[0], batch, where, pool, scratch, local, now_at)
        if has_resets and is_last:
            clear(batch, where, pool, ends)
        if then is not None:
            then(addresses, counts, where, pool, scratch, local, now_at)

    return compute


def back_kernel(p: Pass) -> Any:
    """Return `back` of :class:`~.kernels.SequenceKernels`."""
    code, real, zero = p.code, from_dtype(p.dtype), p.zero
    units, lanes, rounds, own, padded, size = p.units, p.lanes, p.rounds, p.own, p.padded, p.size
    held_size, sums_size, weight_bytes, begin_weights, _ = p.products
    per_round, is_long = p.threads // lanes, rounds > 1
    shares, carries, _, _ = _places_of(p)
    pool_size = max(pool_vectors(code, is_long, back=True) * size, 1)
    scratch_size, vector = p.threads if SIMULATED else 1, 16 // p.dtype.itemsize
    moves = _moves_of(p)
    each, fetch, warm, read_rows, flush = moves
    now_size = own * each
    ahead_size = 1 if is_long else now_size
    parts, swaps, leaves, gots = len(code.states), code.swaps, code.leaves, code.gots
    got_size, mid_size = max(own * gots, 1), max(own * code.back_mids, 1)
    grads_size, rows_size = code.slots + 1, max(code.rows, 1)
    has_resets, ends_size = p.has_resets, own + 2 * p.has_resets
    # With resets the gradients in the states that they set are behind those of each direction.
    each_carry = 1 + has_resets
    start = starter(p, pool_size, now_size, ahead_size)
    compute = _computing(p, moves, code.stages - 1)

    @cuda.jit
    def back_sequence(
        weights, params, products, rest, more, states, inputs_at, lengths, above, carry, direct,
        summed, steps, batch, width, input_width, segment, begin, end,
    ):  # fmt: skip
        pool = cuda.shared.array(pool_size, real, alignment=16)
        scratch = cuda.shared.array(scratch_size, real)
        held, sums = cuda.local.array(held_size, real), cuda.local.array(sums_size, real)
        x = cuda.local.array(vector, real)
        now, ahead = cuda.local.array(now_size, real), cuda.local.array(ahead_size, real)
        later, rows = cuda.local.array(parts, real), cuda.local.array(rows_size, real)
        mid, got = cuda.local.array(mid_size, real), cuda.local.array(got_size, real)
        grads, totals = cuda.local.array(grads_size, real), cuda.local.array(rows_size, real)
        ends = cuda.local.array(ends_size, int64)
        local = held, sums, x, now, later, rows, mid, got, grads, totals, ends
        counts = steps, batch, width, input_width, segment
        arrays = products, rest, more, states, inputs_at, above
        thread = thread_index()
        back, lane, mine, sample, owns = start(pool, now, ahead, ends, lengths, batch)
        if has_resets:
            ends[own] = lengths + batch * 8
            ends[own + 1] = carry
        weights += back * weight_bytes
        addresses = weights, params, products, rest, direct, summed, more, states, inputs_at, above
        begin_weights(weights, thread, held)
        for r in range(rows_size):
            totals[r] = zero
        t, row = rows_of(back, steps, batch, segment, begin, end, end - 1)
        earlier = 1 if back else -1
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if owns and unit < units and sample + m < batch:
                    place = (each_carry * back * batch + sample + m) * parts * units + unit
                    at = carries + (mine + m) * padded + unit
                    for j in range(parts):
                        put(pool, at + j * size, load(carry, place + j * units, zero))
            if not is_long:
                present = owns and unit < units
                fetch(ahead, arrays, counts, t, row, back, sample, unit, present)
                read_rows(params, back, unit, rows)
            turn += 1

        now_at, then_at = 0, shares if swaps else 0
        k = end - 1
        while k >= begin:
            t, row = rows_of(back, steps, batch, segment, begin, end, k)
            unit = thread // lanes
            present = owns and unit < units
            if not is_long:
                for i in range(now_size):
                    now[i] = ahead[i]
                if k > begin:
                    fetch(
                        *(ahead, arrays, counts, t + earlier, row + earlier * batch),
                        *(back, sample, unit, present),
                    )
                if k - AHEAD >= begin:
                    then = AHEAD * earlier
                    warm(
                        *(ahead, arrays, counts, t + then, row + then * batch),
                        *(back, sample, unit, present),
                    )
            for i in range(own * gots):
                got[i] = zero
            where = t, row, back, lane, mine, sample, owns, thread
            compute(addresses, counts, where, pool, scratch, local, now_at)
            if leaves > 0 and not is_long and (k - begin) & _SUMMED == 0:
                flush(rows, totals, summed, back, batch, sample, unit, present)
            now_at, then_at = then_at, now_at
            k -= 1

        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if owns and unit < units and sample + m < batch:
                    place = (each_carry * back * batch + sample + m) * parts * units + unit
                    at = carries + (mine + m) * padded + unit
                    for j in range(parts):
                        store(carry, place + j * units, get(pool, at + j * size), zero)
            turn += 1

    return back_sequence
