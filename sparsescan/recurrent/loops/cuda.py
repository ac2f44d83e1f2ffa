"""Whole sequences of recurrent cells on a GPU: all states, and the gradients of all of them.

One launch runs all steps of both directions of a layer. A block has a few samples of one direction,
and waits for no other. `lanes` neighbouring threads share a unit: each multiplies a part of its
weights by the vectors of all samples of the block, which lie in shared memory; then they exchange
sums, so that each has whole ones, for other samples than its neighbours, and computes what is
elementwise for those alone.

A step has stages: products of all matrices whose vectors are known, what is elementwise, a barrier,
products of what that has computed, and so on; backward it has them in the reverse order. All of a
cell but these loops is a :class:`CudaProgram`, and functions that its source is compiled to.

The weights are in registers for the whole sequence where they fit: in float32 those of up to 176
units of one matrix, and of 88 of three or four; in float64 of 96, 64 and 48. Beyond, each step
reads them from the L2 cache, in tiles of 16 bytes a thread and matrix, a tile ahead of its use; as
one tile serves all samples of the block, a block then has up to eight.

Products with the inputs come from a matrix product over all steps, ``[direction][step][sample][slot
· unit]`` in `products`. Forward, what is kept takes their places, backward the gradients in sums;
sums without products of the input have theirs in `rest`. What is more, vectors that are kept
beside those and arguments of matrices, is in `more`, ``[direction][vector][step][sample][unit]``.

Where samples begin anew in the middle, kernels of their own have the states that the next step
reads behind those that steps have written, 0 for samples that are reset; and behind the lengths
``[step][sample]``, and a row more: whether the sample is reset when a direction goes to this step
from the one before in time, or back.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int64
from numpy.typing import NDArray

from ...arrays.cuda import SIMULATED, cuda, for_block
from ...kernels.cuda.device import load, prefetch, store
from ...kernels.cuda.elementwise import elementwise
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
from ..render.cuda import CudaProgram, Phase, Sizes, functions

# Bytes of shared memory that every block may have, and the registers of a multiprocessor.
_SHARED, _REGISTERS = 48 * 1024, 1 << 16
# Threads of a block, at most, and registers of each that hold weights, and sums.
_THREADS, _HELD, _SUMS = (12, 8, 32) if SIMULATED else (352, 96, 32)
# Where weights do not stay in registers: lanes of a unit, and samples of a block, at most.
_LANES, _SAMPLES = (2, 4) if SIMULATED else (8, 8)
_WARP = 1 if SIMULATED else 32
# How many steps before its use a number is brought to the L2 cache; it is loaded one step before.
_AHEAD = 8
_WORD, _FLAG = np.int64(0), np.uint16(0)
# Steps whose gradients in rows of parameters a thread adds up before it adds them to others.
_SUMMED = 63


class LoopLayout(NamedTuple):
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


def layout_of(blocks: int, units: int, dtype: np.dtype[Any]) -> LoopLayout:
    """Return how threads share the units of a cell with so many blocks of weights."""
    vector = 16 // dtype.itemsize
    whole = -(-units // vector)
    for lanes in (1, 2, 4, 8, 16, 32):
        vectors = -(-whole // lanes)
        threads = -(-units * lanes // _WARP) * _WARP
        if threads <= _THREADS and 4 * vectors * blocks <= _HELD:  # a vector takes four
            return LoopLayout(units, lanes, threads, 1, vectors, True)
    lanes = _LANES if blocks else 1
    while lanes > 1 and units * lanes > _THREADS:
        lanes //= 2
    # Rounds of about as many units: threads without one read weights, too.
    even = -(-units // -(-units * lanes // _THREADS))
    threads = -(-even * lanes // _WARP) * _WARP
    rounds = -(-units // (threads // lanes))
    return LoopLayout(units, lanes, threads, rounds, -(-whole // lanes), False)


def packing_order(
    code: CudaProgram,
    layout: LoopLayout,
    places: NDArray[np.integer[Any]],
    nothing: int,
    dtype: np.dtype[Any],
    back: bool,
) -> NDArray[np.integer[Any]]:
    """Return in which order threads read the weights of states and arguments, or their transposes.

    Parameters
    ----------
    places : ndarray of int, shape (blocks, units, units)
        Where each weight is.
    nothing : int
        Where there is a zero, which fills up vectors.
    """
    vector = 16 // dtype.itemsize
    units, lanes, threads, rounds, vectors, is_held = layout
    phases = code.backward if back else code.forward
    everything = tuple(range(len(code.blocks)))
    tiles = [everything] if is_held else [phase.blocks for phase in phases]
    # By phase, if each reads a tile of its own; by round, vector, block, thread, and element.
    thread = np.arange(threads)
    unit = np.arange(rounds)[:, None] * (threads // lanes) + thread // lanes
    column = (np.arange(vectors)[:, None] * lanes + thread % lanes)[..., None] * vector
    unit, column = unit[:, None, None, :, None], column[:, None] + np.arange(vector)
    padded = np.pad(places, ((0, 0), (0, 1), (0, 1)), constant_values=nothing)
    row, column = np.minimum(unit, units), np.minimum(column, units)
    orders = []
    for tile in tiles:
        block = np.array(tile, np.int64)[:, None, None]
        which = (block, column, row) if back else (block, row, column)
        orders.append(padded[np.broadcast_arrays(*which)].reshape(-1))
    order: NDArray[np.integer[Any]] = np.concatenate(orders)
    return order


class SequenceKernels(NamedTuple):
    """Compiled for one program, units, and a dtype.

    Attributes
    ----------
    run : callable
        Write the states of some steps, and what is kept.
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
    code: CudaProgram,
    layout: LoopLayout,
    dtype: np.dtype[Any],
    batch: int,
    directions: int,
    processors: int,
) -> int:
    """Return the samples of a block: as few as let all blocks run at once; 0 if none fits."""
    sums = max([1, *(len(phase.sums) for phase in (*code.forward, *code.backward))])
    most = layout.lanes if layout.is_held else _SAMPLES
    most = min(most, max(_SUMS * 4 // (sums * dtype.itemsize), 1))
    at_once = processors * max(_REGISTERS // (168 * layout.threads), 1)
    samples = 1
    while 2 * samples <= most and -(-batch // samples) * directions > at_once:
        samples *= 2
    while samples and _shared(code, layout, samples) > _SHARED:
        samples //= 2
    return samples


def _shared(code: CudaProgram, layout: LoopLayout, samples: int) -> int:
    """Return bytes of shared memory of the kernel that takes more."""
    vectors = max(_pool_vectors(code, layout, back=False), _pool_vectors(code, layout, back=True))
    return vectors * samples * layout.vectors * layout.lanes * 16


def _pool_vectors(code: CudaProgram, layout: LoopLayout, *, back: bool) -> int:
    """Return how many vectors of units a kernel has in shared memory."""
    states, is_long = len(code.states), layout.rounds > 1
    if back:
        shares = sum(map(len, code.shares)) * (1 + code.swaps)
        return shares + states + is_long * (code.gots + code.back_mids)
    return states + code.shared + len(code.arguments) + is_long * code.mids


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


# -- Products -------------------------------------------------------------------------------------


class _Products(NamedTuple):
    """How a block multiplies by its weights.

    Attributes
    ----------
    held, sums : int
        Sizes of the local arrays: of weights, and of sums.
    nbytes : int
        Bytes of the packed weights of a direction.
    begin : callable
        A device function: ``begin(weights, thread, held)`` before all steps.
    multiply : list of callable
        For each phase ``multiply(weights, round, pool, at, lane, thread, held, sums, x, scratch)``;
        None where nothing is multiplied.
    """

    held: int
    sums: int
    nbytes: int
    begin: Any
    multiply: list[Any]


def _chains(phase: Phase, dtype: np.dtype[Any], samples: int) -> int:
    """Return in how many parts a sum is added up, which do not wait for each other."""
    return min(16 // dtype.itemsize, max(1, 4 // (samples * max(len(phase.sums), 1))))


def _nothing(weights, thread, held):
    """Load no weights."""


def _no_pull(rows, totals):
    """Add no gradients."""


def _products(
    phases: tuple[Phase, ...],
    blocks: int,
    adds: list[Any],
    layout: LoopLayout,
    dtype: np.dtype[Any],
    samples: int,
) -> _Products:
    """Return how all phases multiply, each by one of `adds`, which takes a tile."""
    vector = 16 // dtype.itemsize
    _, _, threads, rounds, vectors, is_held = layout
    sums = max([1, *(_chains(p, dtype, samples) * samples * len(p.sums) for p in phases)])
    begin, multiply = cuda.jit(device=True)(_nothing), []
    if is_held:
        if blocks:
            fetch = _fetching(0, blocks, dtype, threads)

            @cuda.jit(device=True)
            def begin(weights, thread, held):
                for v in range(vectors):
                    fetch(weights, v, thread, held, v * blocks * vector)

        for phase, add in zip(phases, adds, strict=True):
            own = _multiply_held(phase, blocks, add, layout, dtype, samples)
            multiply.append(own if phase.pieces else None)
        nbytes = vectors * blocks * threads * 16
        return _Products(max(vectors * blocks * vector, 1), sums, nbytes, begin, multiply)

    # The next tile of each phase, and then the one that is multiplied by.
    tiles = [len(phase.blocks) * vector for phase in phases]
    current, nbytes, at = sum(tiles), 0, 0
    for phase, add, tile in zip(phases, adds, tiles, strict=True):
        if not phase.pieces:
            multiply.append(None)
            continue
        fetch = _fetching(nbytes, len(phase.blocks), dtype, threads)
        begin = _then_fetching(begin, fetch, at)
        multiply.append(
            _multiply_streamed(phase, add, fetch, (at, current), layout, dtype, samples)
        )
        nbytes += rounds * vectors * len(phase.blocks) * threads * 16
        at += tile
    return _Products(max(current + max(tiles), 1), sums, nbytes, begin, multiply)


def _fetching(first: int, blocks: int, dtype: np.dtype[Any], threads: int) -> Any:
    """Return a device function that loads a tile of weights, which lie `first` bytes on."""
    vector = 16 // dtype.itemsize

    @cuda.jit(device=True)
    def fetch(weights, index, thread, held, to):
        for g in range(blocks):
            load_vector(
                held,
                to + g * vector,
                weights + first,
                ((index * blocks + g) * threads + thread) * vector,
            )

    return fetch


def _then_fetching(before: Any, fetch: Any, to: int) -> Any:
    """Return a device function that does what comes before, and loads the first tile."""

    @cuda.jit(device=True)
    def begin(weights, thread, held):
        before(weights, thread, held)
        fetch(weights, 0, thread, held, to)

    return begin


def _finishing(phase: Phase, layout: LoopLayout, dtype: np.dtype[Any], samples: int) -> Any:
    """Return device functions that set sums to 0, and that add up their parts over all lanes."""
    chains, outs, zero = _chains(phase, dtype, samples), samples * len(phase.sums), dtype.type(0)
    fold = _folding(layout.lanes, samples, len(phase.sums))

    @cuda.jit(device=True)
    def clear(sums):
        for i in range(outs * chains):
            sums[i] = zero

    @cuda.jit(device=True)
    def finish(sums, lane, thread, scratch):
        for i in range(outs):
            total = sums[i * chains]
            for c in range(1, chains):
                total += sums[i * chains + c]
            sums[i] = total
        fold(sums, lane, thread, scratch)

    return clear, finish


def _multiply_held(
    phase: Phase, blocks: int, add: Any, layout: LoopLayout, dtype: np.dtype[Any], samples: int
) -> Any:
    """Return a device function that multiplies by weights in registers."""
    vector, lanes, vectors = 16 // dtype.itemsize, layout.lanes, layout.vectors
    clear, finish = _finishing(phase, layout, dtype, samples)
    together = max(1, 128 // max(samples * len(phase.pieces) * vector, 1))
    tile = blocks * vector

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
                add(pool, at, (v * lanes + lane) * vector, held, v * tile, sums, x)
            if then is not None:
                then(pool, at, lane, held, sums, x)

        return add_all

    add_all = adding(0)

    @cuda.jit(device=True)
    def multiply(weights, turn, pool, at, lane, thread, held, sums, x, scratch):
        clear(sums)
        add_all(pool, at, lane, held, sums, x)
        finish(sums, lane, thread, scratch)

    return multiply


def _multiply_streamed(
    phase: Phase,
    add: Any,
    fetch: Any,
    places: tuple[int, int],
    layout: LoopLayout,
    dtype: np.dtype[Any],
    samples: int,
) -> Any:
    """Return a device function that multiplies by weights that it loads, a tile ahead."""
    vector, lanes, vectors = 16 // dtype.itemsize, layout.lanes, layout.vectors
    tiles, tile = layout.rounds * vectors, len(phase.blocks) * vector
    clear, finish = _finishing(phase, layout, dtype, samples)
    ahead, current = places

    @cuda.jit(device=True)
    def multiply(weights, turn, pool, at, lane, thread, held, sums, x, scratch):
        clear(sums)
        index = turn * vectors
        v = 0
        while v < vectors:
            for i in range(tile):
                held[current + i] = held[ahead + i]
            # The next one, which may be the first of the next step.
            index += 1
            fetch(weights, index if index < tiles else 0, thread, held, ahead)
            add(pool, at, (v * lanes + lane) * vector, held, current, sums, x)
            v += 1
        finish(sums, lane, thread, scratch)

    return multiply


# -- Kernels --------------------------------------------------------------------------------------


@cache
def sequence_kernels(
    code: CudaProgram,
    layout: LoopLayout,
    dtype: np.dtype[Any],
    samples: int,
    has_resets: bool = False,
) -> SequenceKernels:
    """Return the kernels for a program, with so many samples in a block, with resets or without.

    Both take addresses of packed weights and parameters, then counts; both directions of what they
    have lie behind each other. They work on steps `begin` to `end` of each direction's own order.
    There are products and what is kept of `segment` steps, all or those; states, ``[state][step +
    2][sample][width]``, have one slot more before the first step and behind the last.
    """
    return SequenceKernels(
        for_block(_run(code, layout, dtype, samples, has_resets), layout.threads),
        for_block(_back(code, layout, dtype, samples, has_resets), layout.threads),
        layout.threads,
        samples,
    )


def sequence_source(
    code: CudaProgram,
    layout: LoopLayout,
    dtype: np.dtype[Any],
    samples: int,
    *,
    back: bool,
    has_resets: bool = False,
) -> str:
    """Return the text of the functions of a program that the kernel of a pass calls."""
    phases = code.backward if back else code.forward
    vector = 16 // dtype.itemsize
    sizes = Sizes(
        layout.units,
        samples,
        layout.vectors * layout.lanes * vector,
        vector,
        layout.is_held,
        layout.rounds == 1,
        tuple(_chains(phase, dtype, samples) for phase in phases),
        has_resets,
    )
    return code.source(sizes, is_backward=back)


def _functions(
    code: CudaProgram,
    layout: LoopLayout,
    dtype: np.dtype[Any],
    samples: int,
    *,
    back: bool,
    has_resets: bool,
) -> dict[str, Any]:
    """Return the functions of a program by their names."""
    text = sequence_source(code, layout, dtype, samples, back=back, has_resets=has_resets)
    moves = {
        "cuda": cuda,
        "get": get,
        "put": put,
        "load": load,
        "store": store,
        "prefetch": prefetch,
        "read_vector": read_vector,
    }
    return functions(text, ("forward", "backward")[back], elementwise(dtype) | moves)


def _starting(
    layout: LoopLayout, dtype: np.dtype[Any], samples: int, sizes: tuple[int, int, int]
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
    """Return the step of the `k`-th in its direction, and the row of its first sample."""
    t = steps - 1 - k if back else k
    first = (steps - end if back else begin) if segment < steps else 0
    return t, (back * segment + t - first) * batch


def _reading(code: CudaProgram, units: int, derive: Any, zero: Any) -> Any:
    """Return a device function that loads the rows of parameters of a unit, and computes others."""
    leaves = code.leaves

    @cuda.jit(device=True)
    def read(params, back, unit, into):
        for r in range(leaves):
            into[r] = zero
            if unit < units:
                into[r] = load(params, (back * leaves + r) * units + unit, zero)
        if derive is not None:
            derive(into)

    return read


@cuda.jit(device=True)
def _is_reset(ends, own, row, sample, batch):
    """Return whether a row of resets, whose address is behind the ends, has a sample."""
    return load(ends[own], row * batch + sample, _FLAG) != _FLAG


def _moving(count: int, zero: Any) -> tuple[Any, Any]:
    """Return device functions that copy numbers of a unit from shared memory, and back."""

    @cuda.jit(device=True)
    def take(pool, at, size, local, first):
        for i in range(count):
            local[first + i] = get(pool, at + i * size)

    @cuda.jit(device=True)
    def leave(pool, at, size, local, first):
        for i in range(count):
            put(pool, at + i * size, local[first + i])

    return take, leave


def _run(
    code: CudaProgram, layout: LoopLayout, dtype: np.dtype[Any], samples: int, has_resets: bool
) -> Any:
    real, zero = from_dtype(dtype), dtype.type(0)
    units, lanes, threads, rounds, vectors, _ = layout
    named = _functions(code, layout, dtype, samples, back=False, has_resets=has_resets)
    stages, blocks = code.stages, len(code.blocks)
    adds = [named.get(f"add_{stage}") for stage in range(stages)]
    held_size, sums_size, weight_bytes, begin_weights, multiply = _products(
        code.forward, blocks, adds, layout, dtype, samples
    )
    own, vector = max(samples // lanes, 1), 16 // dtype.itemsize
    padded = vectors * lanes * vector
    size = samples * padded
    # Two buffers of the states that are multiplied, the other states, arguments, and what stages
    # hand on to each other where a thread has several units.
    parts, shared, arguments = len(code.states), code.shared, len(code.arguments)
    half, fixed = shared * size, 2 * shared * size
    arguments_at = (parts + shared) * size
    mids_at = arguments_at + arguments * size
    pool_size = max(_pool_vectors(code, layout, back=False) * size, 1)
    scratch_size = threads if SIMULATED else 1
    inputs, slots = code.inputs, code.slots
    reads_input = int(code.program.uses_input)
    each = max(inputs + reads_input, 1)
    now_size = own * each
    one_warp, per_round, is_long = threads == 32, threads // lanes, rounds > 1
    ahead_size = 1 if is_long else now_size
    extra = code.extra(not is_long)
    kept_size, argument_size = max(len(code.kept), 1), max(arguments, 1)
    bias_size, rows_size, itemsize = max(slots, 1), max(code.rows, 1), dtype.itemsize
    mids, mid_size = code.mids, max(own * code.mids, 1)
    start = _starting(layout, dtype, samples, (pool_size, now_size, ahead_size))
    read_rows = _reading(code, units, named.get("derive"), zero)
    take_mids, leave_mids = _moving(mids, zero)
    # The states that steps read: those that were written, or behind them.
    first_read, ends_size = parts if has_resets else 0, own + has_resets

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

    fetch, warm = fetching(take), fetching(bring)

    @cuda.jit(device=True)
    def read_unit(bias, params, back, unit, biases, rows):
        """Load the biases of all slots of a unit, and rows of parameters."""
        for q in range(slots):
            biases[q] = zero
            if unit < units:
                biases[q] = load(bias, q * units + unit, zero)
        read_rows(params, back, unit, rows)

    def computing(stage: int) -> Any:
        """Return a device function that computes a stage of a step, and those that follow."""
        is_last = stage == stages - 1
        then = None if is_last else computing(stage + 1)
        advance, keep = named[f"advance_{stage}"], named.get(f"keep_{stage}")
        give = named.get(f"give_{stage}")
        multiply_by, per_sum = multiply[stage], len(code.forward[stage].sums)
        first, last = code.argument_range(stage)

        @cuda.jit(device=True)
        def compute(addresses, counts, where, pool, scratch, local, old, new):
            weights, bias, params, products, rest, more, states, inputs_at = addresses
            steps, batch, width, input_width, segment = counts
            t, row, back, lane, mine, sample, owns, thread = where
            held, sums, x, now, biases, rows, state, mid, kept, argument, ends = local
            plane, state_bytes = segment * batch, (steps + 2) * batch * width * itemsize
            more_row = row + back * (extra - 1) * plane
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
                            to = ((t + 1) * batch + sample + m) * width + back * units + unit
                            if has_resets:
                                # The next step reads what follows.
                                is_anew = _is_reset(ends, own, t + 1 - back, sample + m, batch)
                                for j in range(parts):
                                    store(states + j * state_bytes, to, state[j], zero)
                                    state[j] = zero if is_anew else state[j]
                            for j in range(parts):
                                at = new + j * size if j < shared else fixed + (j - shared) * size
                                put(pool, at + place, state[j])
                                store(states + (first_read + j) * state_bytes, to, state[j], zero)
                        if keep is not None:
                            keep(
                                *(kept, products, rest, more, row + sample + m),
                                *(more_row + sample + m, plane, unit),
                            )
                turn += 1
            if blocks:
                barrier(one_warp)
            if then is not None:
                then(addresses, counts, where, pool, scratch, local, old, new)

        return compute

    compute = computing(0)

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
        t, row = _rows(back, steps, batch, segment, begin, end, begin)
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
            t, row = _rows(back, steps, batch, segment, begin, end, k)
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
                if k + _AHEAD < end:
                    then = _AHEAD * after
                    warm(
                        *(ahead, (products, inputs_at), t + then, row + then * batch),
                        *(batch, input_width, sample, unit, present),
                    )
            where = t, row, back, lane, mine, sample, owns, thread
            compute(addresses, counts, where, pool, scratch, local, old, new)
            old, new = new, old
            k += 1

    return run


def _back(
    code: CudaProgram, layout: LoopLayout, dtype: np.dtype[Any], samples: int, has_resets: bool
) -> Any:
    real, zero = from_dtype(dtype), dtype.type(0)
    units, lanes, threads, rounds, vectors, _ = layout
    named = _functions(code, layout, dtype, samples, back=True, has_resets=has_resets)
    stages, blocks = code.stages, len(code.blocks)
    adds = [named.get(f"add_{stage}") for stage in range(stages)]
    held_size, sums_size, weight_bytes, begin_weights, multiply = _products(
        code.backward, blocks, adds, layout, dtype, samples
    )
    own, vector = max(samples // lanes, 1), 16 // dtype.itemsize
    padded = vectors * lanes * vector
    size = samples * padded
    # Gradients in sums that are multiplied, in two buffers where one barrier is all that a step
    # has; gradients in the states before; then, where a thread has several units, gradients that
    # stages wait for, and what they hand on to each other.
    parts, swaps = len(code.states), code.swaps
    shares = sum(map(len, code.shares)) * size
    carries = (1 + swaps) * shares
    gots_at = carries + parts * size
    mids_at = gots_at + code.gots * size
    pool_size = max(_pool_vectors(code, layout, back=True) * size, 1)
    scratch_size = threads if SIMULATED else 1
    each = max(code.loads, 1)
    now_size, itemsize = own * each, dtype.itemsize
    one_warp, per_round, is_long = threads == 32, threads // lanes, rounds > 1
    ahead_size = 1 if is_long else now_size
    extra, leaves, gots, mids = code.extra(not is_long), code.leaves, code.gots, code.back_mids
    got_size, mid_size = max(own * gots, 1), max(own * mids, 1)
    grads_size, rows_size = code.slots + 1, max(code.rows, 1)
    start = _starting(layout, dtype, samples, (pool_size, now_size, ahead_size))
    read_rows = _reading(code, units, named.get("derive"), zero)
    pull = named.get("pull", cuda.jit(device=True)(_no_pull))
    take_gots, leave_gots = _moving(gots, zero)
    ends_size = own + has_resets
    take_mids, leave_mids = _moving(mids, zero)

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

    fetch, warm = fetching(named["fetch"]), fetching(named["warm"])

    @cuda.jit(device=True)
    def flush(rows, totals, summed, back, batch, sample, unit, present):
        """Add gradients in rows of parameters to those of other steps."""
        pull(rows, totals)
        for r in range(leaves):
            if present and sample < batch:
                place = ((back * leaves + r) * batch + sample) * units + unit
                store(summed, place, load(summed, place, zero) + totals[r], zero)
        for r in range(rows_size):
            totals[r] = zero

    def computing(stage: int) -> Any:
        """Return a device function for a stage of a step, and those that follow: those before."""
        is_last, then = stage == 0, computing(stage - 1) if stage else None
        retreat, store_grads = named[f"retreat_{stage}"], named[f"store_{stage}"]
        share, collect = named.get(f"share_{stage}"), named.get(f"collect_{stage}")
        multiply_by = multiply[stage]
        per_sum = len(code.backward[stage].sums)

        @cuda.jit(device=True)
        def compute(addresses, counts, where, pool, scratch, local, now_at):
            weights, params, products, rest, direct, summed = addresses[:6]
            arrays, batch = addresses[2:4] + addresses[6:], counts[1]
            t, row, back, lane, mine, sample, owns, thread = where
            held, sums, x, now, later, rows, mid, got, grads, totals, ends = local
            turn = 0
            while turn < rounds:
                unit = turn * per_round + thread // lanes
                present = owns and unit < units
                if is_long:
                    fetch(now, arrays, counts, t, row, back, sample, unit, present)
                    read_rows(params, back, unit, rows)
                for m in range(own):
                    if present and sample + m < batch:
                        place = (mine + m) * padded + unit
                        for j in range(parts):
                            later[j] = get(pool, carries + j * size + place)
                        if is_long:
                            take_gots(pool, gots_at + place, size, got, m * gots)
                            take_mids(pool, mids_at + place, size, mid, m * mids)
                        if t < ends[m]:
                            retreat(
                                *(now, m * each, later, got, m * gots, rows),
                                *(mid, m * mids, grads, totals),
                            )
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
                if is_long and is_last and leaves > 0:
                    flush(rows, totals, summed, back, batch, sample, unit, present)
                turn += 1
            if multiply_by is not None:
                barrier(one_warp)
                turn = 0
                while turn < rounds:
                    unit = turn * per_round + thread // lanes
                    multiply_by(weights, turn, pool, now_at, lane, thread, held, sums, x, scratch)
                    for m in range(own):
                        if owns and unit < units and sample + m < batch:
                            place = (mine + m) * padded + unit
                            if is_long and not is_last:
                                take_gots(pool, gots_at + place, size, got, m * gots)
                            collect(
                                *(pool, carries + place, size, sums, m * per_sum),
                                *(got, m * gots),
                            )
                            if is_long and not is_last:
                                leave_gots(pool, gots_at + place, size, got, m * gots)
                    turn += 1
            if has_resets and is_last:
                turn = 0
                while turn < rounds:
                    unit = turn * per_round + thread // lanes
                    for m in range(own):
                        if (
                            owns
                            and unit < units
                            and sample + m < batch
                            and _is_reset(ends, own, t + back, sample + m, batch)
                        ):
                            for j in range(parts):
                                put(pool, carries + j * size + (mine + m) * padded + unit, zero)
                    turn += 1
            if then is not None:
                then(addresses, counts, where, pool, scratch, local, now_at)

        return compute

    compute = computing(stages - 1)

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
        weights += back * weight_bytes
        addresses = weights, params, products, rest, direct, summed, more, states, inputs_at, above
        begin_weights(weights, thread, held)
        for r in range(rows_size):
            totals[r] = zero
        t, row = _rows(back, steps, batch, segment, begin, end, end - 1)
        earlier = 1 if back else -1
        turn = 0
        while turn < rounds:
            unit = turn * per_round + thread // lanes
            for m in range(own):
                if owns and unit < units and sample + m < batch:
                    place = (back * batch + sample + m) * parts * units + unit
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
            t, row = _rows(back, steps, batch, segment, begin, end, k)
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
                if k - _AHEAD >= begin:
                    then = _AHEAD * earlier
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
                    place = (back * batch + sample + m) * parts * units + unit
                    at = carries + (mine + m) * padded + unit
                    for j in range(parts):
                        store(carry, place + j * units, get(pool, at + j * size), zero)
            turn += 1

    return back_sequence
