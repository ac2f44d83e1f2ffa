"""Whole sequences of recurrent cells on a GPU: all states, and the gradients of all of them.

One launch runs all steps of both directions of a layer. A block has a few samples of one direction,
waits for no other, and has one barrier in each step. `lanes` neighbouring threads share a unit:
each multiplies a part of its weights by the states of all samples of the block, which lie in shared
memory; then they exchange sums, so that each has whole ones, for other samples than its neighbours,
and computes gates for those alone.

The weights are in registers for the whole sequence where they fit: in float32 those of up to 176
units of an RNN, and of 88 of a GRU or an LSTM; in float64 of 96, 64 and 48. Beyond, each step reads
them from the L2 cache, in tiles of 16 bytes a thread and gate, a tile ahead of its use; as one tile
serves all samples of the block, a block then has up to eight.

Products with the inputs come from a matrix product over all steps, ``[direction][step][sample][gate
· unit]`` in PyTorch's order of the gates. Forward, the gates take their places, backward the
gradients in the products; those of a GRU in the last one, ``v_n``, have an array of their own.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int64
from numpy.typing import NDArray

from ...arrays.cuda import SIMULATED, cuda
from ...kernels.cuda.device import load, prefetch, store
from ...kernels.cuda.vectors import (
    barrier,
    block_index,
    exchange,
    get,
    load_vector,
    put,
    read_vector,
    thread_index,
)

__all__ = [
    "Layout",
    "SequenceKernels",
    "layout_of",
    "packing_order",
    "samples_of",
    "sequence_kernels",
]

# Bytes of shared memory that every block may have, and the registers of a multiprocessor.
_SHARED, _REGISTERS = 48 * 1024, 1 << 16
# Threads of a block, at most, and registers of each that hold weights, and sums.
_THREADS, _HELD, _SUMS = (12, 8, 32) if SIMULATED else (352, 96, 32)
# Where weights do not stay in registers: lanes of a unit, and samples of a block, at most.
_LANES, _SAMPLES = (2, 4) if SIMULATED else (8, 8)
_WARP = 1 if SIMULATED else 32
# How many steps before its use a number is brought to the L2 cache; it is loaded one step before.
_AHEAD = 8
_WORD = np.int64(0)
# Gates of a cell, products of a step, and vectors of its state.
_GATES = {"tanh": (1, 1, 1), "relu": (1, 1, 1), "gru": (3, 4, 1), "lstm": (4, 4, 2)}
_tanh, _exp = (np.tanh, np.exp) if SIMULATED else (math.tanh, math.exp)


class Layout(NamedTuple):
    """How the threads of a block share the units of a cell.

    Attributes
    ----------
    units : int
        Hidden units.
    lanes : int
        Threads that share a unit, a power of two.
    threads : int
        Threads of a block.
    rounds : int
        How many units a thread has, one after the other.
    vectors : int
        Vectors of 16 bytes of a row of weights that each lane multiplies by.
    is_held : bool
        Whether registers hold the weights.
    """

    units: int
    lanes: int
    threads: int
    rounds: int
    vectors: int
    is_held: bool


def layout_of(kind: str, units: int, dtype: np.dtype[Any]) -> Layout:
    """Return how threads share the units of a cell of a kind, such as ``"tanh"`` or ``"lstm"``."""
    gates, vector = _GATES[kind][0], 16 // dtype.itemsize
    whole = -(-units // vector)
    for lanes in (1, 2, 4, 8, 16, 32):
        vectors = -(-whole // lanes)
        threads = -(-units * lanes // _WARP) * _WARP
        if threads <= _THREADS and 4 * vectors * gates <= _HELD:  # a vector takes four
            return Layout(units, lanes, threads, 1, vectors, True)
    lanes = _LANES
    while lanes > 1 and units * lanes > _THREADS:
        lanes //= 2
    # Rounds of about as many units: threads without one read weights, too.
    even = -(-units // -(-units * lanes // _THREADS))
    threads = -(-even * lanes // _WARP) * _WARP
    rounds = -(-units // (threads // lanes))
    return Layout(units, lanes, threads, rounds, -(-whole // lanes), False)


def packing_order(
    kind: str, layout: Layout, kept: NDArray[np.bool_], dtype: np.dtype[Any], back: bool
) -> NDArray[np.int32]:
    """Return in which order threads read ``weight_hh``, or its transpose.

    A weight that is pruned, or fills up a vector, is the one behind the last.

    Parameters
    ----------
    kept : ndarray of bool, shape (gates · units, units)
        Which weights are not pruned.
    """
    gates, vector, (units, lanes, threads, rounds, vectors, _) = (
        _GATES[kind][0],
        16 // dtype.itemsize,
        layout,
    )
    # By round, vector, gate, thread, and element.
    thread = np.arange(threads)
    unit = np.arange(rounds)[:, None] * (threads // lanes) + thread // lanes
    column = (np.arange(vectors)[:, None] * lanes + thread % lanes)[..., None] * vector
    unit, column = unit[:, None, None, :, None], column[:, None] + np.arange(vector)
    gate = np.arange(gates)[:, None, None]
    row, column = (column, unit) if back else (unit, column)
    inside = (row < units) & (column < units) & (gate >= 0)
    place = np.where(inside, (gate * units + row) * units + column, kept.size)
    places = np.where(kept, np.arange(kept.size).reshape(kept.shape), kept.size)
    order: NDArray[np.int32] = np.append(places, kept.size).astype(np.int32)[place.reshape(-1)]
    return order


class SequenceKernels(NamedTuple):
    """Compiled for one kind of cell, its units, and a dtype.

    Attributes
    ----------
    run : callable
        Write the states of some steps, and their gates.
    back : callable
        Write the gradients in the products of some steps, the last step first.
    threads, samples : int
        Threads of a block, and samples.
    """

    run: Any
    back: Any
    threads: int
    samples: int

    def blocks(self, batch: int, directions: int) -> int:
        """Return how many blocks there are."""
        return -(-batch // self.samples) * directions


def samples_of(
    kind: str, layout: Layout, dtype: np.dtype[Any], batch: int, directions: int, processors: int
) -> int:
    """Return the samples of a block: as few as let all blocks run at once; 0 if none fits."""
    most = layout.lanes if layout.is_held else _SAMPLES
    most = min(most, _SUMS * 4 // (_GATES[kind][0] * dtype.itemsize))
    at_once = processors * max(_REGISTERS // (168 * layout.threads), 1)
    samples = 1
    while 2 * samples <= most and -(-batch // samples) * directions > at_once:
        samples *= 2
    while samples and _shared(kind, layout, samples) > _SHARED:
        samples //= 2
    return samples


def _shared(kind: str, layout: Layout, samples: int) -> int:
    """Return bytes of shared memory of the backward kernel, which takes more."""
    gates, _, parts = _GATES[kind]
    return (2 * gates + parts) * samples * layout.vectors * layout.lanes * 16


def _folding(lanes: int, samples: int, each: int) -> Any:
    """Return a device function by which lanes exchange sums, `each` for every sample.

    Each lane ends up with the whole sums of its own samples, in the first places; where there are
    more lanes than samples some have the same.
    """
    if lanes == 1:

        @cuda.jit(device=True)
        def nothing(sums, lane, thread, scratch):
            pass

        return nothing
    d, half = lanes // 2, samples // 2 * each
    then = _folding(d, max(samples // 2, 1), each)

    @cuda.jit(device=True)
    def fold(sums, lane, thread, scratch):
        if half > 0:
            for i in range(half):
                a, b = sums[i], sums[half + i]
                upper = lane & d != 0
                sums[i] = (b if upper else a) + exchange(a if upper else b, d, thread, scratch)
        else:
            for i in range(each):
                sums[i] += exchange(sums[i], d, thread, scratch)
        then(sums, lane, thread, scratch)

    return fold


class _Products(NamedTuple):
    """How a block multiplies by its weights.

    Attributes
    ----------
    held, sums : int
        Sizes of the local arrays: of weights, and of sums.
    own : int
        Samples of a thread.
    begin, multiply : callable
        Device functions: ``begin(weights, thread, held)`` before all steps; ``multiply(weights,
        round, pool, at, lane, thread, held, sums, x, scratch)``.
    """

    held: int
    sums: int
    own: int
    begin: Any
    multiply: Any


def _products(
    kind: str, layout: Layout, dtype: np.dtype[Any], samples: int, back: bool
) -> _Products:
    gates, vector, zero = _GATES[kind][0], 16 // dtype.itemsize, dtype.type(0)
    _, lanes, threads, rounds, vectors, is_held = layout
    padded, each = vectors * lanes * vector, 1 if back else gates
    # Sums that do not wait for each other.
    chains = min(vector, max(1, 4 // (samples * each)))
    outs = samples * each
    tile = gates * vector
    tiles = rounds * vectors
    together = max(1, 128 // (samples * tile))
    fold = _folding(lanes, samples, each)

    @cuda.jit(device=True)
    def add(pool, at, held, first, sums, x):
        """Add the products with a vector of each row."""
        # NVVM for 10.0 and 12.0 unrolls these, not range().
        s = 0
        while s < samples:
            g = 0
            while g < gates:
                if back or g == 0:
                    read_vector(x, 0, pool, at + ((g * samples + s) if back else s) * padded)
                for k in range(vector):
                    out = (s if back else s * gates + g) * chains + k % chains
                    sums[out] += held[first + g * vector + k] * x[k]
                g += 1
            s += 1

    @cuda.jit(device=True)
    def finish(sums, lane, thread, scratch):
        for i in range(outs):
            total = sums[i * chains]
            for c in range(1, chains):
                total += sums[i * chains + c]
            sums[i] = total
        fold(sums, lane, thread, scratch)

    @cuda.jit(device=True)
    def fetch(weights, index, thread, held, to):
        for g in range(gates):
            load_vector(
                held, to + g * vector, weights, ((index * gates + g) * threads + thread) * vector
            )

    def adding(first: int) -> Any:
        """Return a device function that adds the products with all vectors from `first` on.

        It has a few in a loop of its own, since long ones are not unrolled, upon which weights
        would not be in registers.
        """
        last = min(first + together, vectors)
        then = adding(last) if last < vectors else None

        @cuda.jit(device=True)
        def add_all(pool, at, lane, held, sums, x):
            for v in range(first, last):
                add(pool, at + (v * lanes + lane) * vector, held, v * tile, sums, x)
            if then is not None:
                then(pool, at, lane, held, sums, x)

        return add_all

    if is_held:
        add_all = adding(0)

        @cuda.jit(device=True)
        def begin(weights, thread, held):
            for v in range(vectors):
                fetch(weights, v, thread, held, v * tile)

        @cuda.jit(device=True)
        def multiply(weights, turn, pool, at, lane, thread, held, sums, x, scratch):
            for i in range(outs * chains):
                sums[i] = zero
            add_all(pool, at, lane, held, sums, x)
            finish(sums, lane, thread, scratch)

    else:

        @cuda.jit(device=True)
        def begin(weights, thread, held):
            fetch(weights, 0, thread, held, tile)

        @cuda.jit(device=True)
        def multiply(weights, turn, pool, at, lane, thread, held, sums, x, scratch):
            for i in range(outs * chains):
                sums[i] = zero
            index = turn * vectors
            v = 0
            while v < vectors:
                for i in range(tile):
                    held[i] = held[tile + i]
                # The next one, which may be the first of the next step.
                index += 1
                fetch(weights, index if index < tiles else 0, thread, held, tile)
                add(pool, at + (v * lanes + lane) * vector, held, 0, sums, x)
                v += 1
            finish(sums, lane, thread, scratch)

    held_size = vectors * tile if is_held else 2 * tile
    return _Products(held_size, outs * chains, max(samples // lanes, 1), begin, multiply)


def _functions(kind: str, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return device functions for one unit: from products to gates and state, and back.

    ``advance(now, at, sums, j, bias, state)`` has the products with the input in `now` and leaves
    the gates there; `state` is that before, and then that after. ``retreat(now, at, later, in_c)``
    has what was kept of a step, and the gradient in its output last, and leaves the gradients in
    the products there; it returns the gradients in the states before, but for those by products.
    """
    real, zero, one = dtype.type, dtype.type(0), dtype.type(1)

    @cuda.jit(device=True)
    def sigmoid(v):
        return one / (one + real(_exp(-v)))

    @cuda.jit(device=True)
    def tanh(v):
        return real(_tanh(v))

    if kind in ("tanh", "relu"):
        is_relu = kind == "relu"

        @cuda.jit(device=True)
        def advance(now, at, sums, j, bias, state):
            v = now[at] + bias[0] + sums[j]
            if is_relu:
                state[0] = zero if v <= zero else v
            else:
                state[0] = tanh(v)

        @cuda.jit(device=True)
        def retreat(now, at, later, in_c):
            h, g = now[at], later + now[at + 1]
            if is_relu:
                now[at] = zero if h <= zero else g
            else:
                now[at] = g * (one - h * h)
            return zero, zero

    elif kind == "gru":

        @cuda.jit(device=True)
        def advance(now, at, sums, j, bias, state):
            r = sigmoid(now[at] + bias[0] + sums[j])
            z = sigmoid(now[at + 1] + bias[1] + sums[j + 1])
            v = sums[j + 2] + bias[3]
            n = tanh(now[at + 2] + bias[2] + r * v)
            state[0] = n + z * (state[0] - n)
            now[at], now[at + 1], now[at + 2], now[at + 3] = r, z, n, v

        @cuda.jit(device=True)
        def retreat(now, at, later, in_c):
            r, z, n, v = now[at], now[at + 1], now[at + 2], now[at + 3]
            g, rest = later + now[at + 5], one - z
            in_n = g * rest * (one - n * n)
            in_v = in_n * r
            now[at] = in_v * v * (one - r)
            now[at + 1] = g * (now[at + 4] - n) * z * rest
            now[at + 2], now[at + 3] = in_n, in_v
            return g * z, zero

    else:

        @cuda.jit(device=True)
        def advance(now, at, sums, j, bias, state):
            i = sigmoid(now[at] + bias[0] + sums[j])
            f = sigmoid(now[at + 1] + bias[1] + sums[j + 1])
            g = tanh(now[at + 2] + bias[2] + sums[j + 2])
            o = sigmoid(now[at + 3] + bias[3] + sums[j + 3])
            c = f * state[1] + i * g
            state[0], state[1] = o * tanh(c), c
            now[at], now[at + 1], now[at + 2], now[at + 3] = i, f, g, o

        @cuda.jit(device=True)
        def retreat(now, at, later, in_c):
            i, f, g, o = now[at], now[at + 1], now[at + 2], now[at + 3]
            tanh_c, total = tanh(now[at + 5]), later + now[at + 6]
            in_c += total * o * (one - tanh_c * tanh_c)
            now[at] = in_c * g * i * (one - i)
            now[at + 1] = in_c * now[at + 4] * f * (one - f)
            now[at + 2] = in_c * i * (one - g * g)
            now[at + 3] = total * tanh_c * o * (one - o)
            return zero, in_c * f

    return advance, retreat


@cache
def sequence_kernels(
    kind: str, layout: Layout, dtype: np.dtype[Any], samples: int
) -> SequenceKernels:
    """Return the kernels for a kind of cell, with so many samples in a block.

    Both take addresses of packed weights, then counts; both directions of what they have lie behind
    each other. They work on steps `begin` to `end` of each direction's own order. There are
    products and gates of `segment` steps, all or those; states, ``[step + 2][sample][width]``,
    have one slot more before the first step and behind the last.
    """
    return SequenceKernels(
        _run(kind, layout, dtype, samples),
        _back(kind, layout, dtype, samples),
        layout.threads,
        samples,
    )


def _taking(zero: Any) -> tuple[Any, Any]:
    """Return device functions that load a number into a local array, or only into the L2 cache."""

    @cuda.jit(device=True)
    def take(now, i, address, place):
        now[i] = load(address, place, zero)

    @cuda.jit(device=True)
    def warm(now, i, address, place):
        prefetch(address, place, zero)

    return take, warm


def _starting(
    layout: Layout, dtype: np.dtype[Any], samples: int, sizes: tuple[int, int, int]
) -> Any:
    """Return a device function that all threads of a block begin with.

    It clears shared memory and the numbers of a step, of `sizes`; and returns the direction of the
    block, the lane, its first sample in the block and in all, and whether it is the one lane that
    has them.
    """
    lanes, threads, zero = layout.lanes, layout.threads, dtype.type(0)
    pool_size, now_size, ahead_size = sizes
    shared, own = max(lanes // samples, 1), max(samples // lanes, 1)

    @cuda.jit(device=True)
    def start(pool, now, ahead, ends, lengths, batch):
        thread, block = thread_index(), block_index()
        groups = (batch + samples - 1) // samples
        lane = thread % lanes
        mine = lane // shared * own
        sample = block % groups * samples + mine
        i = thread
        while i < pool_size:
            put(pool, i, zero)
            i += threads
        for i in range(now_size):
            now[i] = zero
        for i in range(ahead_size):
            ahead[i] = zero
        for m in range(own):
            ends[m] = _WORD
            if sample + m < batch:
                ends[m] = load(lengths, sample + m, _WORD)
        barrier(threads == 32)
        return block // groups, lane, mine, sample, lane % shared == 0

    return start


@cuda.jit(device=True)
def _rows(back, steps, batch, segment, begin, end, k):
    """Return the step of the `k`-th in its direction, and the row of its first sample in gates."""
    t = steps - 1 - k if back else k
    first = (steps - end if back else begin) if segment < steps else 0
    return t, (back * segment + t - first) * batch


def _run(kind: str, layout: Layout, dtype: np.dtype[Any], samples: int) -> Any:
    real, zero = from_dtype(dtype), dtype.type(0)
    units, lanes, threads, rounds, vectors, _ = layout
    gates, products_of, parts = _GATES[kind]
    held_size, sums_size, own, begin_weights, multiply = _products(
        kind, layout, dtype, samples, False
    )
    advance, _ = _functions(kind, dtype)
    vector = 16 // dtype.itemsize
    padded = vectors * lanes * vector
    half = samples * padded  # of the two buffers of states; then cell states
    pool_size = (1 + parts) * half
    scratch_size = threads if SIMULATED else 1
    now_size, itemsize = own * products_of, dtype.itemsize
    weight_bytes = rounds * vectors * gates * threads * 16
    one_warp, per_round, keeps = threads == 32, threads // lanes, kind in ("gru", "lstm")
    ahead_size = now_size if rounds == 1 else 1
    start = _starting(layout, dtype, samples, (pool_size, now_size, ahead_size))

    def fetching(take: Any) -> Any:
        @cuda.jit(device=True)
        def fetch(now, products, row, batch, sample, unit, present):
            """Take the products with the inputs of a step."""
            for m in range(own):
                if present and sample + m < batch:
                    for g in range(gates):
                        place = ((row + sample + m) * gates + g) * units + unit
                        take(now, m * products_of + g, products, place)

        return fetch

    fetch, warm = map(fetching, _taking(zero))

    @cuda.jit
    def run(
        weights, bias, products, last, states, cells, lengths,
        steps, batch, width, segment, begin, end,
    ):  # fmt: skip
        pool = cuda.shared.array(pool_size, real, alignment=16)
        scratch = cuda.shared.array(scratch_size, real)
        held, sums = cuda.local.array(held_size, real), cuda.local.array(sums_size, real)
        x = cuda.local.array(vector, real)
        now, ahead = cuda.local.array(now_size, real), cuda.local.array(ahead_size, real)
        biases, state = cuda.local.array(products_of, real), cuda.local.array(2, real)
        ends = cuda.local.array(own, int64)
        thread = thread_index()
        back, lane, mine, sample, owns = start(pool, now, ahead, ends, lengths, batch)
        weights += back * weight_bytes
        bias += back * products_of * units * itemsize
        begin_weights(weights, thread, held)
        t, row = _rows(back, steps, batch, segment, begin, end, begin)
        # From the slot of a step to that before it in the direction.
        before, after = (t + 2, -1) if back else (t, 1)
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if owns and unit < units and sample + m < batch:
                    place = (before * batch + sample + m) * width + back * units + unit
                    put(pool, (mine + m) * padded + unit, load(states, place, zero))
                    if parts == 2:
                        at_cell = 2 * half + (mine + m) * padded + unit
                        put(pool, at_cell, load(cells, place, zero))
            if rounds == 1:
                present = owns and unit < units
                fetch(ahead, products, row, batch, sample, unit, present)
                for q in range(products_of):
                    biases[q] = zero
                    if unit < units:
                        biases[q] = load(bias, q * units + unit, zero)
            turn += 1
        barrier(one_warp)

        old, new = 0, half
        k = begin
        while k < end:
            t, row = _rows(back, steps, batch, segment, begin, end, k)
            turn = 0
            while turn < rounds:
                unit = turn * per_round + thread // lanes
                present = owns and unit < units
                if rounds == 1:
                    for i in range(now_size):
                        now[i] = ahead[i]
                    if k + 1 < end:
                        fetch(ahead, products, row + after * batch, batch, sample, unit, present)
                    if k + _AHEAD < end:
                        then = row + _AHEAD * after * batch
                        warm(ahead, products, then, batch, sample, unit, present)
                else:
                    fetch(now, products, row, batch, sample, unit, present)
                    for q in range(products_of):
                        biases[q] = zero
                        if unit < units:
                            biases[q] = load(bias, q * units + unit, zero)
                multiply(weights, turn, pool, old, lane, thread, held, sums, x, scratch)
                for m in range(own):
                    if present and sample + m < batch:
                        place = (mine + m) * padded + unit
                        state[0] = get(pool, old + place)
                        if parts == 2:
                            state[1] = get(pool, 2 * half + place)
                        if t < ends[m]:
                            advance(now, m * products_of, sums, m * gates, biases, state)
                        put(pool, new + place, state[0])
                        to = ((t + 1) * batch + sample + m) * width + back * units + unit
                        store(states, to, state[0], zero)
                        if parts == 2:
                            put(pool, 2 * half + place, state[1])
                            store(cells, to, state[1], zero)
                        if keeps:
                            for g in range(gates):
                                to = ((row + sample + m) * gates + g) * units + unit
                                store(products, to, now[m * products_of + g], zero)
                        if products_of > gates:
                            to = (row + sample + m) * units + unit
                            store(last, to, now[m * products_of + gates], zero)
                turn += 1
            old, new = new, old
            barrier(one_warp)
            k += 1

    return run


def _back(kind: str, layout: Layout, dtype: np.dtype[Any], samples: int) -> Any:
    real, zero = from_dtype(dtype), dtype.type(0)
    units, lanes, threads, rounds, vectors, _ = layout
    gates, products_of, parts = _GATES[kind]
    held_size, sums_size, own, begin_weights, multiply = _products(
        kind, layout, dtype, samples, True
    )
    _, retreat = _functions(kind, dtype)
    vector = 16 // dtype.itemsize
    padded = vectors * lanes * vector
    # Two buffers of gradients in products, then the gradients in the states before.
    half, carries = gates * samples * padded, 2 * gates * samples * padded
    cell_carries = carries + samples * padded
    pool_size = carries + parts * samples * padded
    scratch_size = threads if SIMULATED else 1
    # Gates, what a slope reads beside them, and the gradient in the output.
    kept = {"gru": 6, "lstm": 7}.get(kind, 2)
    now_size = own * kept
    ahead_size = now_size if rounds == 1 else 1
    start = _starting(layout, dtype, samples, (pool_size, now_size, ahead_size))
    weight_bytes = rounds * vectors * gates * threads * 16
    one_warp, per_round = threads == 32, threads // lanes
    is_gru, is_lstm = kind == "gru", kind == "lstm"

    def fetching(take: Any) -> Any:
        @cuda.jit(device=True)
        def fetch(now, arrays, t, row, batch, width, back, sample, unit, present):
            """Take what was kept of a step, and the gradient in its output."""
            products, last, states, cells, above = arrays
            for m in range(own):
                if present and sample + m < batch:
                    column = back * units + unit
                    here = ((t + 1) * batch + sample + m) * width + column
                    before = ((t + 2 * back) * batch + sample + m) * width + column
                    take(now, m * kept + kept - 1, above, here - batch * width)
                    if is_gru or is_lstm:
                        for g in range(gates):
                            place = ((row + sample + m) * gates + g) * units + unit
                            take(now, m * kept + g, products, place)
                    if is_gru:
                        take(now, m * kept + 3, last, (row + sample + m) * units + unit)
                        take(now, m * kept + 4, states, before)
                    elif is_lstm:
                        take(now, m * kept + 4, cells, before)
                        take(now, m * kept + 5, cells, here)
                    else:
                        take(now, m * kept, states, here)

        return fetch

    fetch, warm = map(fetching, _taking(zero))

    @cuda.jit
    def back_sequence(
        weights, products, last, states, cells, lengths, above, carry,
        steps, batch, width, segment, begin, end,
    ):  # fmt: skip
        pool = cuda.shared.array(pool_size, real, alignment=16)
        scratch = cuda.shared.array(scratch_size, real)
        held, sums = cuda.local.array(held_size, real), cuda.local.array(sums_size, real)
        x = cuda.local.array(vector, real)
        now, ahead = cuda.local.array(now_size, real), cuda.local.array(ahead_size, real)
        ends = cuda.local.array(own, int64)
        arrays = products, last, states, cells, above
        thread = thread_index()
        back, lane, mine, sample, owns = start(pool, now, ahead, ends, lengths, batch)
        weights += back * weight_bytes
        begin_weights(weights, thread, held)
        t, row = _rows(back, steps, batch, segment, begin, end, end - 1)
        earlier = 1 if back else -1
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if owns and unit < units and sample + m < batch:
                    place = (back * batch + sample + m) * parts * units + unit
                    at_state = (mine + m) * padded + unit
                    put(pool, carries + at_state, load(carry, place, zero))
                    if parts == 2:
                        put(pool, cell_carries + at_state, load(carry, place + units, zero))
            if rounds == 1:
                present = owns and unit < units
                fetch(ahead, arrays, t, row, batch, width, back, sample, unit, present)
            turn += 1

        now_at, then_at = 0, half
        k = end - 1
        while k >= begin:
            t, row = _rows(back, steps, batch, segment, begin, end, k)
            turn = 0
            while turn < rounds:
                unit = turn * per_round + thread // lanes
                present = owns and unit < units
                if rounds == 1:
                    for i in range(now_size):
                        now[i] = ahead[i]
                    if k > begin:
                        fetch(
                            *(ahead, arrays, t + earlier, row + earlier * batch),
                            *(batch, width, back, sample, unit, present),
                        )
                    if k - _AHEAD >= begin:
                        then = _AHEAD * earlier
                        warm(
                            *(ahead, arrays, t + then, row + then * batch),
                            *(batch, width, back, sample, unit, present),
                        )
                else:
                    fetch(now, arrays, t, row, batch, width, back, sample, unit, present)
                for m in range(own):
                    if present and sample + m < batch:
                        at_state = (mine + m) * padded + unit
                        later, in_c = get(pool, carries + at_state), zero
                        if parts == 2:
                            in_c = get(pool, cell_carries + at_state)
                        if t < ends[m]:
                            later, in_c = retreat(now, m * kept, later, in_c)
                        else:
                            for g in range(products_of):
                                now[m * kept + g] = zero
                        put(pool, carries + at_state, later)
                        if parts == 2:
                            put(pool, cell_carries + at_state, in_c)
                        for g in range(gates):
                            # The state enters the last product of a GRU by `v_n`.
                            which = 3 if is_gru and g == 2 else g
                            place = now_at + g * samples * padded + at_state
                            put(pool, place, now[m * kept + which])
                            to = ((row + sample + m) * gates + g) * units + unit
                            store(products, to, now[m * kept + g], zero)
                        if products_of > gates:
                            to = (row + sample + m) * units + unit
                            store(last, to, now[m * kept + gates], zero)
                turn += 1
            barrier(one_warp)
            turn = 0
            while turn < rounds:
                unit = turn * per_round + thread // lanes
                multiply(weights, turn, pool, now_at, lane, thread, held, sums, x, scratch)
                for m in range(own):
                    if owns and unit < units and sample + m < batch:
                        at_state = carries + (mine + m) * padded + unit
                        put(pool, at_state, get(pool, at_state) + sums[m])
                turn += 1
            now_at, then_at = then_at, now_at
            k -= 1

        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if owns and unit < units and sample + m < batch:
                    place = (back * batch + sample + m) * parts * units + unit
                    at_state = (mine + m) * padded + unit
                    store(carry, place, get(pool, carries + at_state), zero)
                    if parts == 2:
                        store(carry, place + units, get(pool, cell_carries + at_state), zero)
            turn += 1

    return back_sequence
