"""Products of weights and vectors, by all threads of a block, one phase after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....arrays.cuda import cuda
from ....kernels.cuda.vectors import exchange, load_vector
from ...render.cuda import Phase
from .layout import LoopLayout


class Products(NamedTuple):
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


def chains_of(phase: Phase, dtype: np.dtype[Any], samples: int) -> int:
    """Return in how many parts a sum is added up, which do not wait for each other."""
    return min(16 // dtype.itemsize, max(1, 4 // (samples * max(len(phase.sums), 1))))


def _nothing(weights, thread, held):
    """Load no weights."""


def products_of(
    phases: tuple[Phase, ...],
    blocks: int,
    adds: list[Any],
    layout: LoopLayout,
    dtype: np.dtype[Any],
    samples: int,
) -> Products:
    """Return how all phases multiply, each by one of `adds`, which takes a tile."""
    vector = 16 // dtype.itemsize
    _, _, threads, rounds, vectors, is_held = layout
    sums = max([1, *(chains_of(p, dtype, samples) * samples * len(p.sums) for p in phases)])
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
        return Products(max(vectors * blocks * vector, 1), sums, nbytes, begin, multiply)

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
    return Products(max(current + max(tiles), 1), sums, nbytes, begin, multiply)


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
    chains, outs, zero = chains_of(phase, dtype, samples), samples * len(phase.sums), dtype.type(0)
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
