"""Gradients of a chunk, or of a whole chain, by matrix-vector products: `sweep` and `repair`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, int32, int64

from ...arrays.cuda import cuda
from .device import load, store
from .small_steps import (
    jacobian_after,
    local_after,
    pitch_of,
    stacks_of,
    weighted_terms,
    weights_placer,
)
from .staging import copies_of
from .tables import Run, jacobian_at, local_at
from .vectors import barrier, block_index, get, put, read_vector, thread_index

_WORD, _INT = np.int64(0), np.int32(0)


def sweep_kernels(
    size: int, nnz: int, dtype: np.dtype[Any], threads: int, chains: int
) -> tuple[Any, Any]:
    """Return `sweep` and `repair` of :class:`~.chunks.ChunkKernels`, for steps with values."""
    stride = threads // chains

    @cuda.jit(device=True)
    def place_of(thread):
        """Return which chain of the block a thread works on, and its lane."""
        return thread // stride, thread % stride

    @cuda.jit(device=True)
    def expected(run, places, thread):
        """Return that all steps are such as `sweep` takes."""
        return True

    walks = (_walk(size, nnz, dtype, threads, chains, linear) for linear in (False, True))
    return _kernels(*walks, place_of, chains, expected)


def implicit_sweep_kernels(
    size: int, terms: int, states: int, dtype: np.dtype[Any], threads: int, chains: int
) -> tuple[Any, Any]:
    """Return those for implicit steps; a warp, or the block, has so many chains."""
    team = 32 if size // states <= 32 else threads
    stride, every = team // chains, threads // team * chains

    @cuda.jit(device=True)
    def place_of(thread):
        """Return which chain of the block a thread works on, past the last if none; its lane."""
        one = thread % team // stride
        group = thread // team * chains + one if one < chains else every
        return group, thread % team % stride

    walks = (
        _implicit_walk(size, terms, states, dtype, threads, every, linear)
        for linear in (False, True)
    )
    return _kernels(*walks, place_of, every, _expectation(size, terms, states, dtype, threads))


def _kernels(
    walk_chunk: Any, walk_all: Any, place_of: Any, chains: int, expected: Any
) -> tuple[Any, Any]:
    """Return `sweep` and `repair`, given how threads walk through steps; and what is expected."""

    @cuda.jit
    def sweep(run, places, columns, exponents, steps, batch, chunk, chunks):
        group, lane = place_of(thread_index())
        chain = block_index() * chains + group
        c, sample = chain // batch, chain % batch
        first, last = 0, 0
        if group < chains:
            # The gradient at the end of a chunk is the first of the next one, from `carry`. Behind
            # the last chunk no steps are left.
            first = c * chunk
            last = first + chunk - 1 if c < chunks - 1 else steps
        if block_index() == 0 and not expected(run, places, thread_index()):
            store(run, Run.FLAG, np.int64(1), _WORD)
        walk_chunk(run, places, steps, batch, first, last, chunk, sample, group, lane)

    @cuda.jit
    def repair(run, places, columns, exponents, steps, batch, chunk, chunks):
        if load(run, Run.FLAG, _WORD) == 0:
            return
        group, lane = place_of(thread_index())
        sample = block_index() * chains + group
        last = steps if group < chains and sample < batch else 0
        walk_all(run, places, steps, batch, 0, last, steps, sample, group, lane)

    return sweep, repair


def _walk(
    size: int, nnz: int, dtype: np.dtype[Any], threads: int, chains: int, linear: bool
) -> Any:
    """Return a device function: make the gradients after `first`, up to that after ``last - 1``.

    The linear scan of sparse steps passes over what they do not have: 0·∞ is not 0.
    """
    kind, zero = from_dtype(dtype), dtype.type(0)
    vector, warp = 16 // dtype.itemsize, threads == 32
    padded, pitch = -(-size // vector) * vector, pitch_of(size, vector)
    stride = threads // chains
    matrix_size, room = size * pitch, (size + 2) * pitch
    pool_size = chains * room
    slots, values, find, fetch, deliver = copies_of(size, nnz, dtype, stride, pitch)
    # Steps that are loaded ahead, into so many registers.
    depth = min(max(48 // (values * dtype.itemsize // 4), 1), 4)
    ring_size = depth * values
    masked = nnz < size * size and linear

    @cuda.jit(device=True)
    def mask_of(places, lane):
        """Return a bit for each value that a row has."""
        mask = np.int64(0)
        for m in range(nnz):
            place = load(places, m, _INT)
            if place // size == lane:
                mask |= 1 << place % size
        return mask

    @cuda.jit(device=True)
    def fetch_step(steps_of, who, d, step, held, ahead, local):
        """Load a step, and what is added behind it, to places `d`; return the next addresses."""
        run, stacks, sample, steps = steps_of
        lane, busy = who
        ring, added = held
        fetch(ahead, lane, ring, d * values)
        ahead = jacobian_after(run, stacks, ahead, step + 1, steps, sample)
        added[d] = zero
        if busy and local != 0:
            added[d] = load(local, sample * size + lane, zero)
        return ahead, local_after(run, stacks, local, step + 2, steps)

    @cuda.jit(device=True)
    def matvecs(run, places, steps, batch, first, last, count, sample, group, lane):
        pool = cuda.shared.array(pool_size, kind, alignment=16)
        left = cuda.local.array(vector, kind)
        right = cuda.local.array(vector, kind)
        sums = cuda.local.array(vector, kind)
        ring = cuda.local.array(ring_size, kind)
        added = cuda.local.array(depth, kind)
        offsets = cuda.local.array(slots, int32)
        held = ring, added
        present = first < last
        busy = present and lane < size
        base = group * room
        vectors = base + matrix_size
        row_at = base + lane * pitch
        out = load(run, Run.OUT, _WORD)
        mask = np.int64(0)
        if masked and busy:
            mask = mask_of(places, lane)

        stacks = stacks_of(run, sample)
        steps_of, who = (run, stacks, sample, steps), (lane, busy)
        ahead, local = np.int64(0), np.int64(0)
        if present:
            find(places, lane, offsets)
            ahead = jacobian_at(run, first, sample)
            local = local_at(run, first + 1)
            for m in range(lane, room, stride):
                put(pool, base + m, zero)
        barrier(warp)
        if busy:
            put(pool, vectors + lane, load(out, (first * batch + sample) * size + lane, zero))
        for d in range(depth):
            added[d] = zero
            if first + d < last:
                ahead, local = fetch_step(steps_of, who, d, first + d, held, ahead, local)
        # Two places for the gradient, by turns.
        now, then = vectors, vectors + pitch
        place = (first * batch + sample) * size + lane
        poison = zero

        for start in range(0, count, depth):
            for d in range(depth):
                step = first + start + d
                if step < last:
                    deliver(pool, base, lane, offsets, ring, d * values)
                barrier(warp)
                if step < last:
                    entry = added[d]
                    if step + depth < last:
                        ahead, local = fetch_step(
                            steps_of, who, d, step + depth, held, ahead, local
                        )
                    if busy:
                        for v in range(vector):
                            sums[v] = zero
                        for k in range(0, padded, vector):
                            read_vector(left, 0, pool, row_at + k)
                            read_vector(right, 0, pool, now + k)
                            for v in range(vector):
                                if not masked or (mask >> k + v) & 1:
                                    sums[v] += left[v] * right[v]
                        if vector == 4:
                            entry += sums[2] + sums[3]
                        entry += sums[0] + sums[1]
                        put(pool, then + lane, entry)
                        place += batch * size
                        store(out, place, entry, zero)
                        poison += entry * zero
                        now, then = then, now
                barrier(warp)
        if poison != zero:
            store(run, Run.FLAG, np.int64(1), _WORD)

    return matvecs


def _expectation(size: int, terms: int, states: int, dtype: np.dtype[Any], threads: int) -> Any:
    """Return a device function: whether those weights that `sweep` passes over are all zero."""
    zero, units, weighted = dtype.type(0), size // states, weighted_terms(terms, states)

    @cuda.jit(device=True)
    def expected(run, places, thread):
        address, right = load(run, Run.WEIGHTS, _WORD), True
        if states > 1:
            for m in range(thread, terms * size * units, threads):
                row, column = m // units, m % units
                k, row = row // size, row % size
                number = load(places, terms * size + m, _INT)
                passed_over = (
                    k >= weighted if row < units else k < weighted or row - units != column
                )
                if passed_over and number >= 0:
                    right = right & (load(address, np.int64(number), zero) == zero)
        return right

    return expected


def _implicit_walk(
    size: int, terms: int, states: int, dtype: np.dtype[Any], threads: int, every: int, linear: bool
) -> Any:
    """Return a device function: make the gradients after `first`, up to that after ``last - 1``.

    The linear scan passes over slopes and weights that are not there: 0·∞ is not 0. It reads all
    others.
    """
    kind, zero = from_dtype(dtype), dtype.type(0)
    vector, units, weighted = 16 // dtype.itemsize, size // states, weighted_terms(terms, states)
    warp, slopes = units <= 32, terms * states
    pitch = pitch_of(units, vector)
    # Behind the weights are two places for what a chain multiplies them by, used by turns.
    vectors_at, room = weighted * units * pitch, terms * pitch
    pool_size = vectors_at + 2 * every * room
    place_weights = weights_placer(size, terms, states, dtype, threads, pitch)
    # Steps whose slopes are loaded ahead.
    depth = 1 if linear else min(max(16 // (slopes * dtype.itemsize // 4), 1), 8)
    ring_size, added_size = depth * slopes, depth * states
    find, fetch = _slopes_ahead(size, terms, states, dtype, linear)
    multiply_row = _row_multiplier(size, terms, states, dtype, linear)

    @cuda.jit(device=True)
    def matvecs(run, places, steps, batch, first, last, count, sample, group, lane):
        pool = cuda.shared.array(pool_size, kind, alignment=16)
        ring = cuda.local.array(ring_size, kind)
        added = cuda.local.array(added_size, kind)
        entries = cuda.local.array(states, kind)
        own = cuda.local.array(terms, kind)
        numbers = cuda.local.array(slopes, int32)
        masks = cuda.local.array(terms, int64)
        held = numbers, ring, added
        busy = first < last and lane < units
        thread = thread_index()
        place_weights(run, places, pool, 0, thread)
        for m in range(thread, 2 * every * room, threads):
            put(pool, vectors_at + m, zero)
        out = load(run, Run.OUT, _WORD)
        stacks = stacks_of(run, sample)
        steps_of = run, stacks, sample, steps
        ahead, local = np.int64(0), np.int64(0)
        place = (first * batch + sample) * size + lane
        for m in range(slopes):
            numbers[m] = np.int32(-1)
        for k in range(terms):
            masks[k] = np.int64(0)
        for state in range(states):
            entries[state] = zero
        weight, weights_at = zero, load(run, Run.WEIGHTS, _WORD)
        if busy:
            ahead = jacobian_at(run, first, sample)
            local = local_at(run, first + 1)
            for state in range(states):
                entries[state] = load(out, place + state * units, zero)
            weight = find(places, weights_at, lane, numbers, masks)
        for d in range(depth):
            for state in range(states):
                added[d * states + state] = zero
            for m in range(slopes):
                ring[d * slopes + m] = zero
            if busy and first + d < last:
                ahead, local = fetch(steps_of, lane, d, first + d, held, ahead, local)
        cuda.syncthreads()
        now = vectors_at + 2 * group * room
        then = now + room
        poison = zero

        for start in range(0, count, depth):
            for d in range(depth):
                step = first + start + d
                if busy and step < last:
                    for k in range(terms):
                        own[k] = zero
                        for state in range(states):
                            m = k * states + state
                            if not linear or states == 1 or numbers[m] >= 0:
                                own[k] += ring[d * slopes + m] * entries[state]
                        if linear or k < weighted:
                            put(pool, now + k * pitch + lane, own[k])
                barrier(warp)
                if busy and step < last:
                    for state in range(states):
                        entries[state] = added[d * states + state]
                    if step + depth < last:
                        ahead, local = fetch(steps_of, lane, d, step + depth, held, ahead, local)
                    multiply_row(pool, now, lane, places, weights_at, masks, entries)
                    if states > 1 and not linear:
                        entries[states - 1] += weight * own[terms - 1]
                    place += batch * size
                    for state in range(states):
                        store(out, place + state * units, entries[state], zero)
                        poison += entries[state] * zero
                    now, then = then, now
        if poison != zero:
            store(run, Run.FLAG, np.int64(1), _WORD)

    return matvecs


def _slopes_ahead(
    size: int, terms: int, states: int, dtype: np.dtype[Any], linear: bool
) -> tuple[Any, Any]:
    """Return device functions that find which slopes and weights a lane has, and load slopes."""
    zero, units, weighted = dtype.type(0), size // states, weighted_terms(terms, states)
    slopes = terms * states

    @cuda.jit(device=True)
    def find(places, weights_at, lane, numbers, masks):
        """Note the slopes of a unit, and its weights; return the weight of its last term."""
        weight = zero
        for state in range(states):
            for k in range(terms):
                number = load(places, k * size + state * units + lane, _INT)
                numbers[k * states + state] = number
        if linear:
            for k in range(weighted):
                for j in range(units):
                    weight_at = terms * size + (k * size + lane) * units + j
                    if load(places, weight_at, _INT) >= 0:
                        masks[k] |= np.int64(1) << j
        elif states > 1:
            row = (terms - 1) * size + units + lane
            number = load(places, terms * size + row * units + lane, _INT)
            if number >= 0:
                weight = load(weights_at, np.int64(number), zero)
        return weight

    @cuda.jit(device=True)
    def fetch(steps_of, lane, d, step, held, ahead, local):
        """Load slopes, and what is added behind the step, to places `d`; return next addresses."""
        run, stacks, sample, steps = steps_of
        numbers, ring, added = held
        for m in range(slopes):
            if numbers[m] >= 0:
                ring[d * slopes + m] = load(ahead, np.int64(numbers[m]), zero)
        ahead = jacobian_after(run, stacks, ahead, step + 1, steps, sample)
        for state in range(states):
            added[d * states + state] = zero
            if local != 0:
                at = sample * size + state * units + lane
                added[d * states + state] = load(local, at, zero)
        return ahead, local_after(run, stacks, local, step + 2, steps)

    return find, fetch


def _row_multiplier(size: int, terms: int, states: int, dtype: np.dtype[Any], linear: bool) -> Any:
    """Return a device function that adds the products of a unit's weights to its entries."""
    kind, zero, vector = from_dtype(dtype), dtype.type(0), 16 // dtype.itemsize
    units, weighted = size // states, weighted_terms(terms, states)
    padded, pitch = -(-units // vector) * vector, pitch_of(units, vector)

    @cuda.jit(device=True)
    def multiply_row(pool, now, lane, places, weights_at, masks, entries):
        left = cuda.local.array(vector, kind)
        right = cuda.local.array(vector, kind)
        sums = cuda.local.array(vector, kind)
        for v in range(vector):
            sums[v] = zero
        for k in range(weighted):
            for j in range(0, padded, vector):
                read_vector(left, 0, pool, (k * units + lane) * pitch + j)
                read_vector(right, 0, pool, now + k * pitch + j)
                for v in range(vector):
                    if not linear or (masks[k] >> j + v) & 1:
                        sums[v] += left[v] * right[v]
        if vector == 4:
            entries[0] += sums[2] + sums[3]
        entries[0] += sums[0] + sums[1]
        if states > 1 and linear:
            for state in range(states):
                for k in range(terms):
                    for j in range(units if state > 0 or k >= weighted else 0):
                        row = k * size + state * units + lane
                        number = load(places, terms * size + row * units + j, _INT)
                        if number >= 0:
                            weight = load(weights_at, np.int64(number), zero)
                            entries[state] += weight * get(pool, now + k * pitch + j)

    return multiply_row
