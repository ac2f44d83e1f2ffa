"""Kernels for a chain of small square steps on a GPU, in three phases: ``Schedule.chunked``.

*multiply* makes the product of the steps of each chunk, for each sample; *carry* takes the gradient
over the chunk boundaries; *sweep* goes through each chunk with matrix-vector products. The number
of launches does not depend on the number of steps.

In a chunk the columns of the product evolve independently, ``p ← J p``, each with an exponent of
its own; one column more is what local gradients add, which stays in the range that gradients have.
A gradient or a product that is not finite raises a flag, and so does a column whose entries are too
far apart for one exponent; upon which a last kernel lets the linear scan decide, as on the CPU.

The floor is memory: each step is read twice. For 30,000 steps of 16 samples, 20×20 in float32, that
is 1.5 GB, 0.32 ms at the 4.8 TB/s of an H200; the multiply-adds of the products alone would take
0.12 ms at 67 TFLOP/s. What can keep kernels from the floor, and what is done about it:

* Latency of memory: steps are loaded ahead into registers, 16 bytes at a time if they are aligned,
  and stored to shared memory when the step before is done with.
* Shared memory, which delivers 16 bytes to every thread of a warp in the time of eight to sixteen
  multiply-adds: a thread holds several rows and columns of a product (`Tiles`), 4×7 for
  20×20, so that eleven such reads make 112 multiply-adds.
* Threads of a warp that have nothing to do: a block works on as many chains, each a chunk of a
  sample, as its warps have room for. A block of one warp needs no barriers.
* Work on every step that is seldom needed: exponents are looked at when something leaves a band,
  or is small.

An implicit step ``J_t = Σ_k W_k D_tk`` of a recurrent cell is `terms` matrices of weights that all
steps share, each by a diagonal matrix of slopes. Weights stay in shared memory. *multiply* makes
each step there from its slopes, *sweep* applies one factor after the other, and no values of steps
are written: a step is as many slopes. A state ``[h, c]`` of an LSTM is two unknowns for each unit,
with a slope for each: then ``c`` has no weights but those of its own unit's last term, by which
`multiply` makes half of the rows of a product from two entries each. Weights that are stored as a
dense matrix may say otherwise; that raises the flag as well. Where a unit has one slope, and slopes
of a chunk fit into shared memory, all three phases are one launch: see :mod:`~.chained`.

Steps and gradients are given by address: see :mod:`sparsescan.kernels.cuda.tables`.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int32, int64

from ...arrays.cuda import SIMULATED, cuda
from .chained import Layout, chained_kernel, layout_of
from .device import load, store
from .small_steps import (
    NONE,
    ROWS,
    SHARED,
    SMALL,
    carrier,
    jacobian_after,
    local_after,
    peak_finder,
    pitch_of,
    rescaler,
    smaller,
    stacks_of,
    weighted_terms,
    weights_placer,
)
from .tables import Run, jacobian_at, local_at
from .vectors import (
    barrier,
    block_index,
    get,
    load_vector,
    put,
    read_vector,
    thread_index,
    vote,
    write_vector,
)

# The largest step that these kernels take.
MAX_SIZE = 64

# Warps that sweep through implicit steps with one copy of the weights.
WARPS = 2 if SIMULATED else 4
# Slopes of a unit that a thread of `sweep` keeps in registers, for several steps.
_MOST_SLOPES = 16
_WORD, _INT = np.int64(0), np.int32(0)


class Tiles(NamedTuple):
    """How the threads of a block share products.

    A chain has ``groups × column_groups`` threads; thread ``(g, c)`` has rows ``g, g + groups, …``
    and columns ``c·cols, c·cols + 1, …``. Each chain has `stride` threads, the last of which may be
    idle, and each of the `parts` blocks of a chain has `width` columns. The first `dense` rows of a
    thread meet all of a column, others may meet two entries; a step has values of `light` rows.
    A block has `shared` bytes of shared memory.
    """

    groups: int
    cols: int
    column_groups: int
    width: int
    parts: int
    stride: int
    chains: int
    threads: int
    pitch: int
    dense: int
    light: int
    shared: int = 0

    @property
    def room(self) -> int:
        """Values of shared memory for each chain: a step, row by row, columns, and light rows."""
        rows = self.dense * self.groups + self.cols * self.column_groups
        return rows * self.pitch + -(-2 * self.light // 4) * 4


@cache
def tiles_of(size: int, itemsize: int, terms: int, states: int) -> Tiles | None:
    """Return the cheapest tiles that fit into shared memory, in as few parts as possible."""
    vector, units = 16 // itemsize, size // states
    groups = -(-size // ROWS)
    pitch = pitch_of(ROWS * groups, vector)
    weights = weighted_terms(terms, states) * units * weights_pitch_of(pitch, units, states, vector)
    light = size - units
    dense = -(-units // groups) if light else ROWS
    for parts in range(1, size + 2):
        width = -(-(size + 1) // parts)
        fitting = []
        for cols, warps in product(range(1, 9), range(1, 9)):
            column_groups = -(-width // cols)
            chains = 32 * warps // (groups * column_groups)
            if chains == 0:
                continue
            stride = 32 * warps // chains
            tiles = Tiles(
                groups,
                cols,
                column_groups,
                width,
                parts,
                stride,
                chains,
                32 * warps,
                pitch,
                dense,
                light,
            )
            # Registers of a thread: its part of a product, and values and places of the next step.
            unit = 1 if units % vector else vector
            registers = itemsize // 4 * ROWS * cols
            slot = unit * itemsize // 4 + 2 * states - 1
            registers += -(-units * size // (unit * stride)) * slot
            registers += -(-terms * size // stride) * (itemsize // 4 + 1)
            registers += -(-2 * light // stride) * (itemsize // 2 + 1)
            shared = chains * (tiles.room * itemsize + 4 * cols * column_groups)
            shared += tiles.threads * itemsize
            # Weights, and the slopes of a step of each chain.
            shared += (weights + terms * chains * pitch) * itemsize
            if shared > SHARED or registers > 104:
                continue
            # Multiply-adds, and reads of shared memory, which take longer; then barriers.
            cost = (4 * dense * cols + 8 * (dense + cols)) * warps / chains
            tiles = tiles._replace(shared=shared)
            fitting.append((cost if warps == 1 else 1.1 * cost, warps, tiles))
        if fitting:
            return min(fitting)[-1]
    return None


def weights_pitch_of(pitch: int, units: int, states: int, vector: int) -> int:
    """Return the pitch of weights beside steps: theirs, if a step has an entry for each weight."""
    return pitch if states == 1 else pitch_of(units, vector)


def takes(size: int, dtype: np.dtype[Any], *, terms: int = 0, states: int = 1) -> bool:
    """Return whether there are kernels for steps of this size, as :func:`chunk_kernels` has it."""
    if not 0 < size <= MAX_SIZE or terms * states > _MOST_SLOPES:
        return False
    return tiles_of(size, dtype.itemsize, terms, states) is not None


class ChunkKernels(NamedTuple):
    """Compiled for steps of one pattern and dtype.

    All take ``(run, places, columns, exponents, steps, batch, chunk, chunks)``, the first four
    addresses: of the run table; of ``row·size + column`` for each value of a step, int32, unless
    all steps are dense; and of scratch memory. They apply `steps` Jacobians to the first gradient,
    in ``chunks = ⌈steps / chunk⌉`` chunks of `chunk` steps.

    Where steps are implicit the run table has the address of their slopes, and of the weights.
    `places`, int32, are then the numbers of the slopes, ``(terms, size)``, and of the weights,
    ``(terms, size, units)``, or -1 where there is none.

    Attributes
    ----------
    size : int
        Rows, and columns, of a step.
    multiply : callable
        Products of all chunks but the last, into `columns`, ``(chunks - 1, batch, size + 1,
        size)``, and `exponents`, ``(chunks - 1, batch, size)``. The last column is what local
        gradients add.
    carry : callable
        The first gradient of every chunk, a block for each sample.
    sweep : callable
        All other gradients.
    repair : callable
        All gradients by the linear scan, if the flag is raised.
    tiles : Tiles
        How blocks of `multiply` share the work.
    threads : int
        Threads of a block of `carry`.
    sweep_threads : int
        Threads of a block of `sweep`, and of `repair`.
    chains : int
        Samples, or chunks of samples, of a block of `sweep`, or of `repair`.
    chained : callable or None
        All of the three phases, of implicit steps with one slope for each unit, where slopes fit
        into shared memory: see :mod:`~.chained`.
    chained_threads : int
        Threads of a block of `chained`.
    """

    size: int
    multiply: Any
    carry: Any
    sweep: Any
    repair: Any
    tiles: Tiles
    threads: int
    sweep_threads: int
    chains: int
    chained: Any
    chained_threads: int


def scratch(size: int, steps: int, batch: int, chunk: int, one: bool) -> tuple[int, int]:
    """Return values and exponents of scratch memory that are needed, in `one` launch or in three.

    That of one launch is zero before its first run.
    """
    products = max(-(-steps // chunk) - 1, 0) * batch
    if one:
        return 0, products + 1
    return products * (size + 1) * size, products * size


def launches(
    kernels: ChunkKernels,
    run: int,
    places: int,
    columns: int,
    exponents: int,
    steps: int,
    batch: int,
    chunk: int,
    one: bool = False,
) -> list[tuple[Any, int, int, tuple[int, ...]]]:
    """Return the kernels to start in turn, with blocks, threads of a block, and arguments."""
    chunks = -(-steps // chunk)
    arguments = run, places, columns, exponents, steps, batch, chunk, chunks
    tiles, threads, chains = kernels.tiles, kernels.sweep_threads, kernels.chains
    products = -(-(chunks - 1) * batch // tiles.chains) * tiles.parts
    repair = kernels.repair, -(-batch // chains), threads, arguments
    if chunks == 1:
        phases = [(kernels.sweep, -(-batch // chains), threads, arguments)]
    elif one:
        phases = [(kernels.chained, chunks * batch, kernels.chained_threads, arguments)]
    else:
        phases = [
            (kernels.multiply, products, tiles.threads, arguments),
            (kernels.carry, batch, kernels.threads, arguments),
            (kernels.sweep, -(-chunks * batch // chains), threads, arguments),
        ]
    return [*phases, repair]


def chained_layout(size: int, itemsize: int, terms: int, states: int) -> Layout | None:
    """Return how a block of `chained` shares a chunk, or None if there is no such kernel."""
    return layout_of(size, itemsize) if terms == states == 1 else None


def teams_of(size: int, dtype: np.dtype[Any]) -> int:
    """Return the pieces of a chunk in one launch."""
    layout = layout_of(size, dtype.itemsize)
    assert layout is not None
    return layout.teams


class _Staging(NamedTuple):
    """Device functions by which the `stride` threads of a chain copy a step to shared memory.

    A thread keeps `slots` numbers of places in an int32 array, and `values` values in registers.
    """

    slots: int
    values: int
    find: Any
    fetch: Any
    deliver: Any


def _staging(size: int, nnz: int, dtype: np.dtype[Any], stride: int, pitch: int) -> _Staging:
    dense, vector, zero = nnz == size * size, 16 // dtype.itemsize, dtype.type(0)
    # Dense rows that are whole vectors are copied as such.
    unit = vector if dense and size % vector == 0 else 1
    units = nnz // unit
    slots = max(1, -(-units // stride))

    @cuda.jit(device=True)
    def find(places, lane, offsets):
        """Return where in shared memory a thread puts its values."""
        for slot in range(slots):
            m = lane + slot * stride
            if m < units:
                place = m * unit if dense else np.int64(load(places, m, _INT))
                offsets[slot] = place // size * pitch + place % size

    @cuda.jit(device=True)
    def fetch(address, lane, staged, at):
        """Load the values of a thread to places `at` and after in registers."""
        if unit > 1 and address & 15 == 0:
            for slot in range(slots):
                m = lane + slot * stride
                if (slot + 1) * stride <= units or m < units:
                    load_vector(staged, at + slot * unit, address, m * unit)
        else:
            for slot in range(slots):
                m = lane + slot * stride
                if (slot + 1) * stride <= units or m < units:
                    for v in range(unit):
                        staged[at + slot * unit + v] = load(address, m * unit + v, zero)

    @cuda.jit(device=True)
    def deliver(pool, base, lane, offsets, staged, at):
        """Store them to the step that begins at `base`."""
        for slot in range(slots):
            m = lane + slot * stride
            if m < units:
                if unit > 1:
                    write_vector(pool, base + offsets[slot], staged, at + slot * unit)
                else:
                    put(pool, base + offsets[slot], staged[at + slot])

    return _Staging(slots, slots * unit, find, fetch, deliver)


class _Making(NamedTuple):
    """Device functions by which the `stride` threads of a chain make implicit steps.

    A thread keeps the numbers of `count` slopes in an int32 array, and as many slopes; in two such
    arrays where `slots` groups of its values are to go, and their weights come from; in others the
    slopes of its `lights` values of light rows, and their weights.
    """

    count: int
    slots: int
    lights: int
    values: int
    find: Any
    find_slopes: Any
    fetch: Any
    deliver: Any
    deliver_slopes: Any
    make: Any


def _making(
    size: int, terms: int, states: int, dtype: np.dtype[Any], tiles: Tiles, weights_at: int
) -> _Making:
    kind, vector, zero = from_dtype(dtype), 16 // dtype.itemsize, dtype.type(0)
    stride, pitch, units = tiles.stride, tiles.pitch, size // states
    least_normal = dtype.type(np.finfo(dtype).tiny)
    every, weighted = terms * size, weighted_terms(terms, states)
    weights_pitch = weights_pitch_of(pitch, units, states, vector)
    count = max(1, -(-every // stride))
    # As `_staging` has it for dense steps.
    unit = vector if units % vector == 0 else 1
    groups = units * size // unit
    slots, lights = max(1, -(-groups // stride)), max(1, -(-2 * tiles.light // stride))
    light_count, first_light = 2 * tiles.light, slots * unit
    lights_at = (tiles.dense * tiles.groups + tiles.cols * tiles.column_groups) * pitch

    @cuda.jit(device=True)
    def find_slopes(places, lane, numbers):
        """Note which slopes a thread loads; -1 where there is none."""
        for slot in range(count):
            m = lane + slot * stride
            numbers[slot] = load(places, m, _INT) if m < every else np.int32(-1)

    @cuda.jit(device=True)
    def find(run, places, lane, offsets, sources, light_sources, light_weights):
        """Note where the values of a thread go, and come from; return the least light weight."""
        for slot in range(slots):
            m = (lane + slot * stride) * unit
            row, column = m // size, m % size
            offsets[slot] = row * pitch + column
            if states > 1:
                sources[slot] = row * weights_pitch + column % units
        least = dtype.type(1)
        address = load(run, Run.WEIGHTS, _WORD)
        for slot in range(lights):
            light_sources[slot], light_weights[slot] = _INT, zero
            m = lane + slot * stride
            if m < light_count:
                # Two values for each unit: by its own two slopes.
                own, state = m // 2, m % 2
                light_sources[slot] = (terms - 1) * pitch + state * units + own
                at = every + ((terms - 1) * size + units + own) * units + own
                number = load(places, at, _INT)
                if number >= 0:
                    light_weights[slot] = load(address, np.int64(number), zero)
                least = smaller(least, light_weights[slot])
        return least

    @cuda.jit(device=True)
    def fetch(address, numbers, slopes):
        """Load the slopes of a thread."""
        for slot in range(count):
            slopes[slot] = zero
            if numbers[slot] >= 0:
                slopes[slot] = load(address, np.int64(numbers[slot]), zero)

    @cuda.jit(device=True)
    def deliver_slopes(pool, base, lane, slopes, least_weight):
        """Store them to shared memory; return whether a weight may make one no normal number."""
        lost = False
        for slot in range(count):
            m = lane + slot * stride
            if m < every:
                put(pool, base + m // size * pitch + m % size, slopes[slot])
                size_of = abs(slopes[slot])
                lost = lost | ((size_of > zero) & (size_of * least_weight < least_normal))
        return lost

    @cuda.jit(device=True)
    def make(pool, base, lane, offsets, sources, light_sources, light_weights, staged):
        """Make the values of a thread of a step whose slopes begin at `base`."""
        some_weights = cuda.local.array(vector, kind)
        some_slopes = cuda.local.array(vector, kind)
        for slot in range(slots):
            m = lane + slot * stride
            if (slot + 1) * stride <= groups or m < groups:
                place = np.int64(offsets[slot])
                source = place if states == 1 else np.int64(sources[slot])
                for v in range(unit):
                    staged[slot * unit + v] = zero
                for k in range(weighted):
                    weight_at = weights_at + k * units * weights_pitch + source
                    slope_at = base + k * pitch + place % pitch
                    if unit > 1:
                        read_vector(some_weights, 0, pool, weight_at)
                        read_vector(some_slopes, 0, pool, slope_at)
                    else:
                        some_weights[0] = get(pool, weight_at)
                        some_slopes[0] = get(pool, slope_at)
                    for v in range(unit):
                        staged[slot * unit + v] += some_weights[v] * some_slopes[v]
        if light_count > 0:
            for slot in range(lights):
                slope = get(pool, base + np.int64(light_sources[slot]))
                staged[first_light + slot] = light_weights[slot] * slope

    @cuda.jit(device=True)
    def deliver(pool, base, lane, offsets, staged):
        """Store them to the step that begins at `base`."""
        for slot in range(slots):
            if lane + slot * stride < groups:
                if unit > 1:
                    write_vector(pool, base + offsets[slot], staged, slot * unit)
                else:
                    put(pool, base + offsets[slot], staged[slot])
        if light_count > 0:
            for slot in range(lights):
                m = lane + slot * stride
                if m < light_count:
                    put(pool, base + lights_at + m, staged[first_light + slot])

    values = slots * unit + (lights if light_count else 0)
    return _Making(
        count,
        slots,
        lights,
        values,
        find,
        find_slopes,
        fetch,
        deliver,
        deliver_slopes,
        make,
    )


def sweeping_team(rows: int) -> tuple[int, int]:
    """Return threads that sweep together, with a lane for each of so many rows; their chains."""
    return (32, 32 // rows) if rows <= 32 else (128, 1)


@cache
def chunk_kernels(
    size: int, nnz: int, dtype: np.dtype[Any], *, terms: int = 0, states: int = 1
) -> ChunkKernels:
    """Return the kernels for ``(size, size)`` steps with `nnz` values each, dense if all are.

    Parameters
    ----------
    size, nnz : int
        Rows, and values; of implicit steps ``size²``.
    dtype : dtype
        float32 or float64.
    terms : int, default 0
        Rows of slopes for each unit, if steps are implicit.
    states : int, default 1
        Unknowns of a unit, of implicit steps: of two the second ones are behind all first ones, and
        of the weights each of them has one, that of the last term of its own unit.
    """
    tiles = tiles_of(size, dtype.itemsize, terms, states)
    assert tiles is not None
    threads, chains = sweeping_team(size)
    multiply = _multiply(size, nnz, dtype, tiles, terms, states)
    carry = _carry(size, dtype, threads)
    if terms == 0:
        sweep, repair = _sweeps(size, nnz, dtype, threads, chains)
        return ChunkKernels(
            size, multiply, carry, sweep, repair, tiles, threads, threads, chains, None, 0
        )
    units = size // states
    team, chains = sweeping_team(units)
    # Warps that share the weights do not wait for each other.
    warps = WARPS if units <= 32 else 1
    sweep, repair = _implicit_sweeps(size, terms, states, dtype, warps * team, chains)
    layout = chained_layout(size, dtype.itemsize, terms, states)
    return ChunkKernels(
        size,
        multiply,
        carry,
        sweep,
        repair,
        tiles,
        threads,
        warps * team,
        warps * chains,
        None if layout is None else chained_kernel(size, dtype),
        0 if layout is None else layout.threads,
    )


def _multiply(
    size: int, nnz: int, dtype: np.dtype[Any], tiles: Tiles, terms: int, states: int
) -> Any:
    kind, real, zero, one = from_dtype(dtype), dtype.type, dtype.type(0), dtype.type(1)
    small_step = real(SMALL[dtype][1])
    vector = 16 // dtype.itemsize
    groups, cols, column_groups, width, parts, stride, chains, threads, *rows, _ = tiles
    pitch, dense, light = rows
    warp, units = threads == 32, size // states
    room, matrix_size = tiles.room, dense * groups * pitch
    tile_size, left_size = ROWS * cols, ROWS * vector
    # Rows of a thread from which on some are light, and where the values of those are.
    first_light = units // groups if light else ROWS
    lights_at = matrix_size + cols * column_groups * pitch
    # Behind the chains are weights, and the slopes of a step of each chain.
    weights_at = chains * room
    weights_pitch = weights_pitch_of(pitch, units, states, vector)
    slopes_at = weights_at + weighted_terms(terms, states) * units * weights_pitch
    pool_size = slopes_at + chains * terms * pitch
    right_size, span = cols * vector, cols * column_groups
    powers_size = chains * span
    padded = -(-size // vector) * vector
    # The thread, of which block, that has the column of local gradients.
    local_part, rest = divmod(size, width)
    local_group, local_column = divmod(rest, cols)
    staging = _staging(size, nnz, dtype, stride, pitch)
    making = _making(size, terms, states, dtype, tiles, weights_at)
    implicit = terms > 0
    slots = making.slots if implicit else staging.slots
    stage_size = making.values if implicit else staging.values
    find, fetch, deliver = staging.find, staging.fetch, staging.deliver
    slope_count, make, lights = making.count, making.make, making.lights
    find_values, find_slopes, fetch_slopes = making.find, making.find_slopes, making.fetch
    deliver_values, deliver_slopes = making.deliver, making.deliver_slopes
    place_weights = weights_placer(size, terms, states, dtype, threads, weights_pitch)
    find_peaks = peak_finder(dtype, cols, local_column)
    rescale = rescaler(dtype, groups, cols, stride, pitch, local_column, warp)

    @cuda.jit
    def multiply(run, places, columns, exponents, steps, batch, chunk, chunks):
        pool = cuda.shared.array(pool_size, kind, alignment=16)
        tile = cuda.local.array(tile_size, kind)
        left = cuda.local.array(left_size, kind)
        right = cuda.local.array(right_size, kind)
        peaks = cuda.local.array(cols, kind)
        powers = cuda.shared.array(powers_size, int32)
        leasts = cuda.shared.array(threads, kind)
        added = cuda.local.array(ROWS, kind)
        staged = cuda.local.array(stage_size, kind)
        offsets = cuda.local.array(slots, int32)
        sources = cuda.local.array(slots, int32)
        light_sources = cuda.local.array(lights, int32)
        light_weights = cuda.local.array(lights, kind)
        slopes = cuda.local.array(slope_count, kind)
        numbers = cuda.local.array(slope_count, int32)
        thread, block = thread_index(), block_index()
        group, lane = thread // stride, thread % stride
        part = block % parts
        chain = block // parts * chains + group
        present = group < chains and chain < (chunks - 1) * batch
        if not present:
            chain = 0
        sample = chain % batch
        first = chain // batch * chunk
        row, mine = lane % groups, lane // groups
        busy = present and mine < column_groups
        owner = busy and part == local_part and mine == local_group
        base = group * room
        rows_at = base + row * pitch
        columns_at = base + matrix_size + mine * cols * pitch

        stacks = stacks_of(run, sample)
        ahead = jacobian_at(run, first, sample)
        local = local_at(run, first + 1)
        least_weight, lost = one, False
        own_slopes = slopes_at + group * terms * pitch
        for m in range(stage_size):
            staged[m] = zero
        if implicit:
            least_weight = place_weights(run, places, pool, weights_at, thread)
        if present:
            if implicit:
                least = find_values(
                    run, places, lane, offsets, sources, light_sources, light_weights
                )
                least_weight = smaller(least_weight, least)
                find_slopes(places, lane, numbers)
                fetch_slopes(ahead, numbers, slopes)
            else:
                find(places, lane, offsets)
                fetch(ahead, lane, staged, 0)
            for m in range(lane, room, stride):
                put(pool, base + m, zero)
        if implicit:
            put(leasts, thread, least_weight)
        barrier(warp)
        if implicit:
            # The slopes of a step are stored while the one before is multiplied, and those of the
            # next are on their way.
            for m in range(threads):
                least_weight = smaller(least_weight, get(leasts, m))
            if present:
                lost = deliver_slopes(pool, own_slopes, lane, slopes, least_weight)
            barrier(warp)
            if present:
                make(pool, own_slopes, lane, offsets, sources, light_sources, light_weights, staged)
                ahead = jacobian_after(run, stacks, ahead, first + 1, steps, sample)
                if chunk > 1:
                    fetch_slopes(ahead, numbers, slopes)
            barrier(warp)
            if present and chunk > 1:
                lost = lost | deliver_slopes(pool, own_slopes, lane, slopes, least_weight)
                ahead = jacobian_after(run, stacks, ahead, first + 2, steps, sample)
                if chunk > 2:
                    fetch_slopes(ahead, numbers, slopes)
        if present:
            if implicit:
                deliver_values(pool, base, lane, offsets, staged)
            else:
                deliver(pool, base, lane, offsets, staged, 0)
            for c in range(lane, span, stride):
                put(powers, group * span + c, _INT)
                if c < width and part * width + c < size:
                    put(pool, base + matrix_size + c * pitch + part * width + c, one)
        if not implicit:
            ahead = jacobian_after(run, stacks, ahead, first + 1, steps, sample)
        barrier(warp)

        for step in range(first, first + chunk):
            more = present and step + 1 < first + chunk
            if more and implicit:
                make(pool, own_slopes, lane, offsets, sources, light_sources, light_weights, staged)
            elif more:
                fetch(ahead, lane, staged, 0)
                ahead = jacobian_after(run, stacks, ahead, step + 2, steps, sample)
            outside = False
            if busy:
                for r in range(ROWS):
                    added[r] = zero
                if owner and local != 0:
                    for r in range(ROWS):
                        if (r + 1) * groups <= size or row + r * groups < size:
                            added[r] = load(local, sample * size + row + r * groups, zero)
                local = local_after(run, stacks, local, step + 2, steps)
                for m in range(tile_size):
                    tile[m] = zero
                k = 0
                while k < padded:
                    for r in range(dense):
                        read_vector(left, r * vector, pool, rows_at + r * groups * pitch + k)
                    for n in range(cols):
                        read_vector(right, n * vector, pool, columns_at + n * pitch + k)
                    # NVVM for 10.0 and 12.0 does not unroll this one as range(), upon which it
                    # keeps the tile in memory.
                    n = 0
                    while n < cols:
                        for v in range(vector):
                            for r in range(dense):
                                tile[n * ROWS + r] += left[r * vector + v] * right[n * vector + v]
                        n += 1
                    k += vector
                if light > 0:
                    for r in range(first_light, ROWS):
                        own = row + r * groups - units
                        if 0 <= own < light:
                            for state in range(2):
                                value = get(pool, base + lights_at + 2 * own + state)
                                entry_at = columns_at + state * units + own
                                for n in range(cols):
                                    entry = get(pool, entry_at + n * pitch)
                                    tile[n * ROWS + r] += value * entry
                for r in range(ROWS):
                    tile[local_column * ROWS + r] += added[r]
                outside = outside | find_peaks(tile, peaks, owner)
            if more:
                for m in range(stage_size):
                    size_of = abs(staged[m])
                    outside = outside | ((size_of < small_step) & (size_of > zero))
            if vote(outside, warp):
                step_least = one
                if more:
                    for m in range(stage_size):
                        step_least = smaller(step_least, staged[m])
                rescale(
                    run,
                    pool,
                    powers,
                    leasts,
                    tile,
                    peaks,
                    columns_at,
                    group * span + mine * cols,
                    row,
                    thread,
                    group * stride,
                    busy,
                    owner,
                    step_least,
                )
            if busy:
                for n in range(cols):
                    for r in range(ROWS):
                        put(pool, columns_at + n * pitch + row + r * groups, tile[n * ROWS + r])
            if present and not implicit:
                deliver(pool, base, lane, offsets, staged, 0)
            if present and implicit:
                deliver_values(pool, base, lane, offsets, staged)
                if step + 2 < first + chunk:
                    lost = lost | deliver_slopes(pool, own_slopes, lane, slopes, least_weight)
                    ahead = jacobian_after(run, stacks, ahead, step + 3, steps, sample)
                    if step + 3 < first + chunk:
                        fetch_slopes(ahead, numbers, slopes)
            barrier(warp)

        if lost:
            store(run, Run.FLAG, np.int64(1), _WORD)
        if busy:
            poison = zero
            for n in range(cols):
                c = mine * cols + n
                j = part * width + c
                if c < width and j <= size:
                    for r in range(ROWS):
                        poison += tile[n * ROWS + r] * zero
                    if row == 0 and j < size:
                        store(exponents, chain * size + j, get(powers, group * span + c), _INT)
            if poison != zero:
                store(run, Run.FLAG, np.int64(1), _WORD)
        if present:
            # The columns, one after the other as they are stored: threads write beside each other.
            place = (chain * (size + 1) + part * width) * size
            m, c, i = lane, lane // size, lane % size
            while c < width and part * width + c <= size:
                entry = get(pool, base + matrix_size + c * pitch + i)
                store(columns, place + m, entry, zero)
                m += stride
                c, i = m // size, m % size

    return multiply


@cache
def _carry(size: int, dtype: np.dtype[Any], threads: int) -> Any:
    kind, zero, none = from_dtype(dtype), dtype.type(0), np.int32(NONE)
    vector, width = 16 // dtype.itemsize, size + 1
    padded, padded_powers = -(-size // vector) * vector, -(-size // 4) * 4
    warp = threads == 32
    # Products that are loaded ahead, into so many registers.
    depth = min(max(100 // (width * dtype.itemsize // 4), 1), 2)
    ring_size = depth * width
    carried = carrier(size, dtype, warp)

    @cuda.jit
    def carry(run, places, columns, exponents, steps, batch, chunk, chunks):
        terms = cuda.shared.array(padded, kind, alignment=16)
        powers = cuda.shared.array(padded_powers, int32, alignment=16)
        ring = cuda.local.array(ring_size, kind)
        ring_powers = cuda.local.array(depth, int32)
        i, sample = thread_index(), block_index()
        out = load(run, Run.OUT, _WORD)
        x = zero
        # Places in gradients, and in exponents and columns of the product to load next.
        place = sample * size + i
        at_power, at_column = place, sample * width * size + i
        to_power, to_column = batch * size, batch * width * size
        if i < size:
            x = load(out, place, zero)
            for d in range(depth):
                if d < chunks - 1:
                    ring_powers[d] = load(exponents, at_power, _INT)
                    for j in range(width):
                        ring[d * width + j] = load(columns, at_column + j * size, zero)
                    at_power, at_column = at_power + to_power, at_column + to_column
        for j in range(i, padded, threads):
            put(terms, j, zero)
        for j in range(i, padded_powers, threads):
            put(powers, j, none)
        barrier(warp)
        poison = zero

        for start in range(0, chunks - 1, depth):
            for d in range(depth):
                step = start + d
                if step < chunks - 1:
                    x, lost = carried(i, x, ring, d * width, ring_powers[d], terms, powers)
                    if i < size:
                        poison += lost
                        if step + depth < chunks - 1:
                            ring_powers[d] = load(exponents, at_power, _INT)
                            for j in range(width):
                                ring[d * width + j] = load(columns, at_column + j * size, zero)
                            at_power, at_column = at_power + to_power, at_column + to_column
                        place += chunk * batch * size
                        store(out, place, x, zero)
                        poison += x * zero
                    barrier(warp)
        if poison != zero:
            store(run, Run.FLAG, np.int64(1), _WORD)

    return carry


def _sweeps(
    size: int, nnz: int, dtype: np.dtype[Any], threads: int, chains: int
) -> tuple[Any, Any]:
    kind, zero = from_dtype(dtype), dtype.type(0)
    vector, warp = 16 // dtype.itemsize, threads == 32
    padded, pitch = -(-size // vector) * vector, pitch_of(size, vector)
    stride = threads // chains
    matrix_size, room = size * pitch, (size + 2) * pitch
    pool_size = chains * room
    staging = _staging(size, nnz, dtype, stride, pitch)
    slots, values = staging.slots, staging.values
    find, fetch, deliver = staging.find, staging.fetch, staging.deliver
    # Steps that are loaded ahead, into so many registers.
    depth = min(max(48 // (values * dtype.itemsize // 4), 1), 4)
    ring_size = depth * values
    sparse = nnz < size * size

    def walk(linear: bool) -> Any:
        """Make the gradients after `first`, up to that after step ``last - 1``.

        The linear scan of sparse steps passes over what they do not have: 0·∞ is not 0.
        """
        masked = sparse and linear

        @cuda.jit(device=True)
        def matvecs(run, places, steps, batch, first, last, count, sample, group, lane):
            pool = cuda.shared.array(pool_size, kind, alignment=16)
            left = cuda.local.array(vector, kind)
            right = cuda.local.array(vector, kind)
            sums = cuda.local.array(vector, kind)
            ring = cuda.local.array(ring_size, kind)
            added = cuda.local.array(depth, kind)
            offsets = cuda.local.array(slots, int32)
            present = first < last
            busy = present and lane < size
            base = group * room
            vectors = base + matrix_size
            row_at = base + lane * pitch
            out = load(run, Run.OUT, _WORD)
            mask = np.int64(0)
            if masked and busy:
                for m in range(nnz):
                    place = load(places, m, _INT)
                    if place // size == lane:
                        mask |= 1 << place % size

            stacks = stacks_of(run, sample)
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
                    fetch(ahead, lane, ring, d * values)
                    ahead = jacobian_after(run, stacks, ahead, first + d + 1, steps, sample)
                    if busy and local != 0:
                        added[d] = load(local, sample * size + lane, zero)
                    local = local_after(run, stacks, local, first + d + 2, steps)
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
                            fetch(ahead, lane, ring, d * values)
                            ahead = jacobian_after(
                                run, stacks, ahead, step + depth + 1, steps, sample
                            )
                            added[d] = zero
                            if busy and local != 0:
                                added[d] = load(local, sample * size + lane, zero)
                            local = local_after(run, stacks, local, step + depth + 2, steps)
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

    walk_chunk, walk_all = walk(False), walk(True)

    @cuda.jit
    def sweep(run, places, columns, exponents, steps, batch, chunk, chunks):
        thread = thread_index()
        group, lane = thread // stride, thread % stride
        chain = block_index() * chains + group
        c, sample = chain // batch, chain % batch
        first, last = 0, 0
        if group < chains:
            # The gradient at the end of a chunk is the first of the next one, from `carry`. Behind
            # the last chunk no steps are left.
            first = c * chunk
            last = first + chunk - 1 if c < chunks - 1 else steps
        walk_chunk(run, places, steps, batch, first, last, chunk, sample, group, lane)

    @cuda.jit
    def repair(run, places, columns, exponents, steps, batch, chunk, chunks):
        if load(run, Run.FLAG, _WORD) == 0:
            return
        thread = thread_index()
        group, lane = thread // stride, thread % stride
        sample = block_index() * chains + group
        last = steps if group < chains and sample < batch else 0
        walk_all(run, places, steps, batch, 0, last, steps, sample, group, lane)

    return sweep, repair


def _implicit_sweeps(
    size: int, terms: int, states: int, dtype: np.dtype[Any], threads: int, chains: int
) -> tuple[Any, Any]:
    """Return `sweep` and `repair` for implicit steps; a warp, or the block, has so many chains."""
    kind, zero = from_dtype(dtype), dtype.type(0)
    vector, units, weighted = 16 // dtype.itemsize, size // states, weighted_terms(terms, states)
    warp = units <= 32
    team = 32 if warp else threads
    padded, pitch = -(-units // vector) * vector, pitch_of(units, vector)
    stride, every, slopes = team // chains, threads // team * chains, terms * states
    # Behind the weights are two places for what a chain multiplies them by, used by turns.
    vectors_at, room = weighted * units * pitch, terms * pitch
    pool_size = vectors_at + 2 * every * room
    place_weights = weights_placer(size, terms, states, dtype, threads, pitch)
    most_ahead = min(max(16 // (slopes * dtype.itemsize // 4), 1), 8)

    @cuda.jit(device=True)
    def expected(run, places, thread):
        """Return whether those weights that `sweep` passes over are all zero."""
        address, right = load(run, Run.WEIGHTS, _WORD), True
        for m in range(thread, terms * size * units, threads):
            row, column = m // units, m % units
            k, row = row // size, row % size
            number = load(places, terms * size + m, _INT)
            passed_over = k >= weighted if row < units else k < weighted or row - units != column
            if passed_over and number >= 0:
                right = right & (load(address, np.int64(number), zero) == zero)
        return right

    def walk(linear: bool) -> Any:
        """Make the gradients after `first`, up to that after step ``last - 1``.

        The linear scan passes over slopes and weights that are not there: 0·∞ is not 0. It reads
        all others.
        """
        # Steps whose slopes are loaded ahead.
        depth = 1 if linear else most_ahead
        ring_size, added_size = depth * slopes, depth * states

        @cuda.jit(device=True)
        def matvecs(run, places, steps, batch, first, last, count, sample, group, lane):
            pool = cuda.shared.array(pool_size, kind, alignment=16)
            left = cuda.local.array(vector, kind)
            right = cuda.local.array(vector, kind)
            sums = cuda.local.array(vector, kind)
            ring = cuda.local.array(ring_size, kind)
            added = cuda.local.array(added_size, kind)
            entries = cuda.local.array(states, kind)
            own = cuda.local.array(terms, kind)
            numbers = cuda.local.array(slopes, int32)
            masks = cuda.local.array(terms, int64)
            busy = first < last and lane < units
            thread = thread_index()
            place_weights(run, places, pool, 0, thread)
            for m in range(thread, 2 * every * room, threads):
                put(pool, vectors_at + m, zero)
            out = load(run, Run.OUT, _WORD)
            stacks = stacks_of(run, sample)
            ahead, local = np.int64(0), np.int64(0)
            place = (first * batch + sample) * size + lane
            weight, weights_at = zero, load(run, Run.WEIGHTS, _WORD)
            for m in range(slopes):
                numbers[m] = np.int32(-1)
            for k in range(terms):
                masks[k] = np.int64(0)
            for state in range(states):
                entries[state] = zero
            if busy:
                ahead = jacobian_at(run, first, sample)
                local = local_at(run, first + 1)
                for state in range(states):
                    entries[state] = load(out, place + state * units, zero)
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
            for d in range(depth):
                for state in range(states):
                    added[d * states + state] = zero
                for m in range(slopes):
                    ring[d * slopes + m] = zero
                if busy and first + d < last:
                    for m in range(slopes):
                        if numbers[m] >= 0:
                            ring[d * slopes + m] = load(ahead, np.int64(numbers[m]), zero)
                    ahead = jacobian_after(run, stacks, ahead, first + d + 1, steps, sample)
                    if local != 0:
                        for state in range(states):
                            at = sample * size + state * units + lane
                            added[d * states + state] = load(local, at, zero)
                    local = local_after(run, stacks, local, first + d + 2, steps)
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
                            for m in range(slopes):
                                if numbers[m] >= 0:
                                    ring[d * slopes + m] = load(ahead, np.int64(numbers[m]), zero)
                            ahead = jacobian_after(
                                run, stacks, ahead, step + depth + 1, steps, sample
                            )
                            for state in range(states):
                                added[d * states + state] = zero
                                if local != 0:
                                    at = sample * size + state * units + lane
                                    added[d * states + state] = load(local, at, zero)
                            local = local_after(run, stacks, local, step + depth + 2, steps)
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
                                        at = terms * size + row * units + j
                                        number = load(places, at, _INT)
                                        if number >= 0:
                                            weight = load(weights_at, np.int64(number), zero)
                                            term = get(pool, now + k * pitch + j)
                                            entries[state] += weight * term
                        elif states > 1:
                            entries[states - 1] += weight * own[terms - 1]
                        place += batch * size
                        for state in range(states):
                            store(out, place + state * units, entries[state], zero)
                            poison += entries[state] * zero
                        now, then = then, now
            if poison != zero:
                store(run, Run.FLAG, np.int64(1), _WORD)

        return matvecs

    walk_chunk, walk_all = walk(False), walk(True)

    @cuda.jit(device=True)
    def place_of(thread):
        """Return which chain of the block a thread works on, past the last if none; its lane."""
        one = thread % team // stride
        group = thread // team * chains + one if one < chains else every
        return group, thread % team % stride

    @cuda.jit
    def sweep(run, places, columns, exponents, steps, batch, chunk, chunks):
        group, lane = place_of(thread_index())
        chain = block_index() * every + group
        c, sample = chain // batch, chain % batch
        first, last = 0, 0
        if group < every:
            # The first gradient of the next chunk is there, and behind the last are no steps.
            first = c * chunk
            last = first + chunk - 1 if c < chunks - 1 else steps
        if states > 1 and block_index() == 0 and not expected(run, places, thread_index()):
            store(run, Run.FLAG, np.int64(1), _WORD)
        walk_chunk(run, places, steps, batch, first, last, chunk, sample, group, lane)

    @cuda.jit
    def repair(run, places, columns, exponents, steps, batch, chunk, chunks):
        if load(run, Run.FLAG, _WORD) == 0:
            return
        group, lane = place_of(thread_index())
        sample = block_index() * every + group
        last = steps if group < every and sample < batch else 0
        walk_all(run, places, steps, batch, 0, last, steps, sample, group, lane)

    return sweep, repair
