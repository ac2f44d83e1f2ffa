"""All states of some steps, and what is kept: one launch for both directions of a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import from_dtype, int64

from ....arrays.cuda import SIMULATED, cuda
from ....kernels.cuda.device import load, prefetch, store
from ....kernels.cuda.vectors import barrier, get, put, thread_index
from .layout import pool_vectors
from .parts import AHEAD, Pass, is_reset, movers, reader, rows_of, starter


class _Places(NamedTuple):
    """Where vectors begin in shared memory.

    Two buffers of the states that are multiplied, each `half`; the other states, arguments, and
    what stages hand on to each other where a thread has several units.
    """

    half: int
    fixed: int
    arguments: int
    mids: int


def _places_of(p: Pass) -> _Places:
    half = p.code.shared * p.size
    arguments = len(p.code.states) * p.size + half
    return _Places(half, 2 * half, arguments, arguments + len(p.code.arguments) * p.size)


class _Loads(NamedTuple):
    """Device functions that load `each` numbers of a step, bring them to the cache, and biases."""

    each: int
    fetch: Any
    warm: Any
    read_unit: Any


def _loads_of(p: Pass) -> _Loads:
    zero, units, own, read_rows = p.zero, p.units, p.own, reader(p)
    inputs, slots, reads_input = p.code.inputs, p.code.slots, p.code.program.uses_input
    each = max(inputs + int(reads_input), 1)

    def fetching(take: Any) -> Any:
        @cuda.jit(device=True)
        def fetch(now, arrays, t, row, batch, input_width, sample, unit, present):
            """Take the products with the inputs of a step, and the inputs if they are read."""
            products, inputs_at = arrays
            for m in range(own):
                if present and sample + m < batch:
                    for g in range(inputs):
                        place = ((row + sample + m) * inputs + g) * units + unit
                        take(now, m * each + g, products, place)
                    if reads_input:
                        place = (t * batch + sample + m) * input_width + unit
                        take(now, m * each + inputs, inputs_at, place)

        return fetch

    @cuda.jit(device=True)
    def take(now, i, address, place):
        now[i] = load(address, place, zero)

    @cuda.jit(device=True)
    def bring(now, i, address, place):
        prefetch(address, place, zero)

    @cuda.jit(device=True)
    def read_unit(bias, params, back, unit, biases, rows):
        """Load the biases of all slots of a unit, and rows of parameters."""
        for q in range(slots):
            biases[q] = zero
            if unit < units:
                biases[q] = load(bias, q * units + unit, zero)
        read_rows(params, back, unit, rows)

    return _Loads(each, fetching(take), fetching(bring), read_unit)


def _advancing(p: Pass, stage: int, each: int) -> Any:
    """Return a device function for what is elementwise in a stage, of a sample and a unit."""
    zero, own, units, padded, size = p.zero, p.own, p.units, p.padded, p.size
    _, fixed, arguments_at, mids_at = _places_of(p)
    code, is_long, itemsize, has_resets = p.code, p.rounds > 1, p.dtype.itemsize, p.has_resets
    parts, shared, inputs, mids = len(code.states), code.shared, code.inputs, code.mids
    extra, kept_size = code.extra(not is_long), max(len(code.kept), 1)
    is_last = stage == code.stages - 1
    per_sum, (first, last) = len(code.forward[stage].sums), code.argument_range(stage)
    advance, keep = p.named[f"advance_{stage}"], p.named.get(f"keep_{stage}")
    give = p.named.get(f"give_{stage}")
    take_mids, leave_mids = movers(mids)
    # The states that steps read: those that were written, or behind them.
    first_read = parts if has_resets else 0

    @cuda.jit(device=True)
    def write_states(states, counts, where, pool, place, unit, m, state, ends, new):
        """Write the new states, which the next step reads in shared memory."""
        steps, batch, width, _, _ = counts
        t, _, back, _, _, sample, _, _ = where
        state_bytes = (steps + 2) * batch * width * itemsize
        to = ((t + 1) * batch + sample + m) * width + back * units + unit
        if has_resets:
            # The next step reads what follows. What resets set is in the slot that no step reads.
            is_anew = is_reset(ends, own, t + 1 - back, sample + m, batch)
            for j in range(parts):
                store(states + j * state_bytes, to, state[j], zero)
            if is_anew:
                given = to + ((-1 if back else steps) - t) * batch * width
                for j in range(parts):
                    state[j] = load(states + (first_read + j) * state_bytes, given, zero)
        for j in range(parts):
            at = new + j * size if j < shared else fixed + (j - shared) * size
            put(pool, at + place, state[j])
            store(states + (first_read + j) * state_bytes, to, state[j], zero)

    @cuda.jit(device=True)
    def advance_sample(addresses, counts, where, pool, local, unit, m, old, new):
        _, _, _, products, rest, more, states, _ = addresses
        _, batch, _, _, segment = counts
        t, row, back, _, mine, sample, _, _ = where
        _, sums, _, now, biases, rows, state, mid, kept, argument, ends = local
        plane = segment * batch
        more_row = row + back * (extra - 1) * plane
        place = (mine + m) * padded + unit
        for j in range(shared):
            state[j] = get(pool, old + j * size + place)
        for j in range(parts - shared):
            state[shared + j] = get(pool, fixed + j * size + place)
        if is_long and mids > 0:
            take_mids(pool, mids_at + place, size, mid, m * mids)
        if t < ends[m]:
            advance(
                *(now, m * each, sums, m * per_sum, biases, rows, state),
                *(mid, m * mids, kept, argument),
            )
        else:
            # Numbers that are there, and none that is there from a step before.
            for i in range(kept_size):
                kept[i] = now[m * each + i] if i < inputs else zero
            for a in range(first, last):
                argument[a] = zero
            for i in range(mids):
                mid[m * mids + i] = zero
        if is_long and mids > 0 and not is_last:
            leave_mids(pool, mids_at + place, size, mid, m * mids)
        if give is not None:
            give(
                *(argument, pool, arguments_at + place, size, more),
                *(more_row + sample + m, plane, unit),
            )
        if is_last:
            write_states(states, counts, where, pool, place, unit, m, state, ends, new)
        if keep is not None:
            keep(
                *(kept, products, rest, more, row + sample + m),
                *(more_row + sample + m, plane, unit),
            )

    return advance_sample


def _computing(p: Pass, loads: _Loads, stage: int) -> Any:
    """Return a device function that computes a stage of a step, and those that follow."""
    then = None if stage == p.code.stages - 1 else _computing(p, loads, stage + 1)
    units, lanes, rounds, own, blocks = p.units, p.lanes, p.rounds, p.own, len(p.code.blocks)
    one_warp, per_round, is_long = p.threads == 32, p.threads // lanes, rounds > 1
    multiply_by, advance_sample = p.products.multiply[stage], _advancing(p, stage, loads.each)
    fetch, read_unit = loads.fetch, loads.read_unit

    @cuda.jit(device=True)
    def compute(addresses, counts, where, pool, scratch, local, old, new):
        weights, bias, params, products, _, _, _, inputs_at = addresses
        _, batch, _, input_width, _ = counts
        t, row, back, lane, _, sample, owns, thread = where
        held, sums, x, now, biases, rows, _, _, _, _, _ = local
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            present = owns and unit < units
            if is_long:
                fetch(
                    *(now, (products, inputs_at), t, row, batch, input_width),
                    *(sample, unit, present),
                )
                read_unit(bias, params, back, unit, biases, rows)
            if multiply_by is not None:
                multiply_by(weights, turn, pool, old, lane, thread, held, sums, x, scratch)
            for m in range(own):
                if present and sample + m < batch:
                    advance_sample(addresses, counts, where, pool, local, unit, m, old, new)
            turn += 1
        if blocks:
            barrier(one_warp)
        if then is not None:
            then(addresses, counts, where, pool, scratch, local, old, new)

    return compute


def run_kernel(p: Pass) -> Any:
    """Return `run` of :class:`~.kernels.SequenceKernels`."""
    code, real, zero = p.code, from_dtype(p.dtype), p.zero
    units, lanes, rounds, own, padded, size = p.units, p.lanes, p.rounds, p.own, p.padded, p.size
    held_size, sums_size, weight_bytes, begin_weights, _ = p.products
    one_warp, per_round, is_long = p.threads == 32, p.threads // lanes, rounds > 1
    half, fixed, _, _ = _places_of(p)
    pool_size = max(pool_vectors(code, is_long, back=False) * size, 1)
    scratch_size, vector = p.threads if SIMULATED else 1, 16 // p.dtype.itemsize
    parts, shared, slots = len(code.states), code.shared, code.slots
    loads = _loads_of(p)
    _, fetch, warm, read_unit = loads
    now_size = own * loads.each
    ahead_size = 1 if is_long else now_size
    kept_size, argument_size = max(len(code.kept), 1), max(len(code.arguments), 1)
    bias_size, rows_size, itemsize = max(slots, 1), max(code.rows, 1), p.dtype.itemsize
    blocks, mid_size, has_resets = len(code.blocks), max(own * code.mids, 1), p.has_resets
    first_read, ends_size = parts if has_resets else 0, own + has_resets
    start = starter(p, pool_size, now_size, ahead_size)
    compute = _computing(p, loads, 0)

    @cuda.jit
    def run(
        weights, bias, params, products, rest, more, states, inputs_at, lengths,
        steps, batch, width, input_width, segment, begin, end,
    ):  # fmt: skip
        pool = cuda.shared.array(pool_size, real, alignment=16)
        scratch = cuda.shared.array(scratch_size, real)
        held, sums = cuda.local.array(held_size, real), cuda.local.array(sums_size, real)
        x = cuda.local.array(vector, real)
        now, ahead = cuda.local.array(now_size, real), cuda.local.array(ahead_size, real)
        biases, rows = cuda.local.array(bias_size, real), cuda.local.array(rows_size, real)
        state, mid = cuda.local.array(parts, real), cuda.local.array(mid_size, real)
        kept, argument = cuda.local.array(kept_size, real), cuda.local.array(argument_size, real)
        ends = cuda.local.array(ends_size, int64)
        local = held, sums, x, now, biases, rows, state, mid, kept, argument, ends
        counts = steps, batch, width, input_width, segment
        thread = thread_index()
        back, lane, mine, sample, owns = start(pool, now, ahead, ends, lengths, batch)
        if has_resets:
            ends[own] = lengths + batch * 8
        weights += back * weight_bytes
        bias += back * slots * units * itemsize
        addresses = weights, bias, params, products, rest, more, states, inputs_at
        begin_weights(weights, thread, held)
        t, row = rows_of(back, steps, batch, segment, begin, end, begin)
        # From the slot of a step to that before it in the direction.
        before, after = (t + 2, -1) if back else (t, 1)
        state_bytes = (steps + 2) * batch * width * itemsize
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if owns and unit < units and sample + m < batch:
                    place = (before * batch + sample + m) * width + back * units + unit
                    for j in range(parts):
                        at = j * size if j < shared else fixed + (j - shared) * size
                        value = load(states + (first_read + j) * state_bytes, place, zero)
                        put(pool, at + (mine + m) * padded + unit, value)
            if not is_long:
                present = owns and unit < units
                fetch(
                    *(ahead, (products, inputs_at), t, row, batch, input_width),
                    *(sample, unit, present),
                )
                read_unit(bias, params, back, unit, biases, rows)
            turn += 1
        if blocks:
            barrier(one_warp)

        old, new = 0, half
        k = begin
        while k < end:
            t, row = rows_of(back, steps, batch, segment, begin, end, k)
            if not is_long:
                unit = thread // lanes
                present = owns and unit < units
                for i in range(now_size):
                    now[i] = ahead[i]
                if k + 1 < end:
                    fetch(
                        *(ahead, (products, inputs_at), t + after, row + after * batch),
                        *(batch, input_width, sample, unit, present),
                    )
                if k + AHEAD < end:
                    then = AHEAD * after
                    warm(
                        *(ahead, (products, inputs_at), t + then, row + then * batch),
                        *(batch, input_width, sample, unit, present),
                    )
            where = t, row, back, lane, mine, sample, owns, thread
            compute(addresses, counts, where, pool, scratch, local, old, new)
            old, new = new, old
            k += 1

    return run
