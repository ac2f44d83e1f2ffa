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
  multiply-adds: a thread holds several rows and columns of a product (:mod:`~.tiles`), 4×7 for
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
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int32

from ...arrays.cuda import SIMULATED, cuda
from .chained import Layout, chained_kernel, layout_of
from .device import load, store
from .multiply import multiply_kernel
from .small_steps import NONE, carrier
from .tables import Run
from .tiles import Tiles, tiles_of
from .vectors import barrier, block_index, put, thread_index
from .walks import implicit_sweep_kernels, sweep_kernels

# The largest step that these kernels take.
MAX_SIZE = 64

# Warps that sweep through implicit steps with one copy of the weights.
WARPS = 2 if SIMULATED else 4
# Slopes of a unit that a thread of `sweep` keeps in registers, for several steps.
_MOST_SLOPES = 16
_WORD, _INT = np.int64(0), np.int32(0)


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
    multiply = multiply_kernel(size, nnz, dtype, tiles, terms, states)
    carry = _carry(size, dtype, threads)
    if terms == 0:
        sweep, repair = sweep_kernels(size, nnz, dtype, threads, chains)
        return ChunkKernels(
            size, multiply, carry, sweep, repair, tiles, threads, threads, chains, None, 0
        )
    units = size // states
    team, chains = sweeping_team(units)
    # Warps that share the weights do not wait for each other.
    warps = WARPS if units <= 32 else 1
    sweep, repair = implicit_sweep_kernels(size, terms, states, dtype, warps * team, chains)
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
