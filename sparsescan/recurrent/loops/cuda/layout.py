"""How the threads of a block share the units of a cell, and the samples of a block."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....arrays.cuda import SIMULATED
from ...render.cuda import CudaProgram

# Bytes of shared memory that every block has without asking, and registers of a multiprocessor.
_SHARED, _REGISTERS = 48 * 1024, 1 << 16
# Threads of a block, at most, and registers of each that hold weights, and sums.
_THREADS, _HELD, _SUMS = (12, 8, 32) if SIMULATED else (352, 96, 32)
# Where weights do not stay in registers: lanes of a unit, and samples of a block, at most.
_LANES, _SAMPLES = (2, 4) if SIMULATED else (8, 8)
_WARP = 1 if SIMULATED else 32


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


def samples_of(
    code: CudaProgram,
    layout: LoopLayout,
    dtype: np.dtype[Any],
    batch: int,
    directions: int,
    processors: int,
    most_shared: int = _SHARED,
) -> int:
    """Return the samples of a block: as few as let all blocks run at once; 0 if none fits.

    A block asks for more shared memory than others have, `most_shared` bytes at most, only where
    one sample takes that.
    """
    sums = max([1, *(len(phase.sums) for phase in (*code.forward, *code.backward))])
    most = layout.lanes if layout.is_held else _SAMPLES
    most = min(most, max(_SUMS * 4 // (sums * dtype.itemsize), 1))
    at_once = processors * max(_REGISTERS // (168 * layout.threads), 1)
    samples = 1
    while 2 * samples <= most and -(-batch // samples) * directions > at_once:
        samples *= 2
    room = _SHARED if _shared(code, layout, 1) <= _SHARED else most_shared
    while samples and _shared(code, layout, samples) > room:
        samples //= 2
    return samples


def _shared(code: CudaProgram, layout: LoopLayout, samples: int) -> int:
    """Return bytes of shared memory of the kernel that takes more."""
    vectors = max(pool_vectors(code, layout.rounds > 1, back=back) for back in (False, True))
    return vectors * samples * layout.vectors * layout.lanes * 16


def pool_vectors(code: CudaProgram, is_long: bool, *, back: bool) -> int:
    """Return how many vectors of units a kernel has in shared memory, `is_long` in rounds."""
    states = len(code.states)
    if back:
        shares = sum(map(len, code.shares)) * (1 + code.swaps)
        return shares + states + is_long * (code.gots + code.back_mids)
    return states + code.shared + len(code.arguments) + is_long * code.mids
