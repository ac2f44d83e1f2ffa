"""Registers and turns of shared memory that kernels for chunks take of a multiprocessor.

Shared memory has 32 banks, of which each gives a warp one word of four bytes in a turn. An access
of 16 bytes by all threads of a warp takes four turns, of eight threads each; those that read the
same word do so together, and words of one bank take turns. Here the turns of a step are counted
from where threads read and write, as the kernels have it; the tests count those that compiled
kernels take.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .chained import layout_of
from .chunks import WARPS, sweeping_team
from .small_steps import ROWS, pitch_of, weighted_terms
from .tiles import tiles_of, weights_pitch_of

_BANKS = 32
# Registers of `multiply` by the size of a step, bytes of a number, terms and states; of others, by
# bytes of a number.
_REGISTERS = {
    (16, 4, 0, 1): 128,
    (20, 4, 0, 1): 128,
    (20, 4, 4, 1): 192,
    (64, 4, 1, 1): 208,
    (64, 8, 0, 1): 168,
}
_MOST_REGISTERS = {4: 168, 8: 192}
Places = NDArray[np.int64]


def registers_of(size: int, itemsize: int, terms: int = 0, states: int = 1) -> int:
    """Return registers of a thread of `multiply`, about as compiled for 9.0.

    It is no kernel that is asked: whether one has been compiled yet must not change what is chosen.
    """
    return _REGISTERS.get((size, itemsize, terms, states), _MOST_REGISTERS[itemsize])


class _Access:
    """Counts the turns of accesses to values of a size, given what each thread of a block does."""

    def __init__(self, itemsize: int) -> None:
        self._words = itemsize // 4

    def __call__(self, places: Places, values: int, present: NDArray[np.bool_]) -> int:
        """Return the turns in which the threads that are `present` get some values at places."""
        words = values * self._words
        threads = np.flatnonzero(present)
        if len(threads) == 0:
            return 0
        # As many threads take a turn as have words for all banks.
        turn = np.repeat(threads * words // _BANKS, words)
        word = (places[threads, None] * self._words + np.arange(words)).ravel()
        turn, word = np.unique(np.stack([turn, word]), axis=1)
        busy = np.bincount(turn * _BANKS + word % _BANKS)
        busy = np.pad(busy, (0, -len(busy) % _BANKS))
        return int(busy.reshape(-1, _BANKS).max(axis=1).sum())


@cache
def multiply_turns(size: int, itemsize: int, terms: int = 0, states: int = 1) -> float:
    """Return the turns of `multiply` for a step of a chain that is in range, dense or implicit."""
    tiles, take = tiles_of(size, itemsize, terms, states), _Access(itemsize)
    assert tiles is not None
    vector, units, vectors = 16 // itemsize, size // states, -(-size * itemsize // 16)
    groups, cols, stride, pitch = tiles.groups, tiles.cols, tiles.stride, tiles.pitch
    group, lane = np.divmod(np.arange(tiles.threads), stride)
    present = group < tiles.chains
    row, mine = lane % groups, lane // groups
    busy, light = present & (mine < tiles.column_groups), tiles.light
    base, matrix_size = group * tiles.room, tiles.dense * groups * pitch
    columns_at = base + matrix_size + mine * cols * pitch

    turns = vectors * tiles.dense * take(base + row * pitch, vector, busy)
    turns += vectors * cols * take(columns_at, vector, busy)
    turns += cols * ROWS * take(columns_at + row, 1, busy)
    # Light rows meet two entries of a column each.
    lights_at = base + matrix_size + cols * tiles.column_groups * pitch
    for r in range(units // groups if light else ROWS, ROWS):
        own = row + r * groups - units
        reached = busy & (own >= 0) & (own < light)
        for state in range(2):
            turns += take(lights_at + 2 * own + state, 1, reached)
            turns += cols * take(columns_at + state * units + own, 1, reached)
    if terms == 0:
        return (turns + _delivery(take, size, vector, stride, pitch, base, present)) / tiles.chains

    # What makes the next step: weights and slopes, read for each group of its values.
    weighted = weighted_terms(terms, states)
    weights_pitch = weights_pitch_of(pitch, units, states, vector)
    weights_at = tiles.chains * tiles.room
    slopes_at = weights_at + weighted * units * weights_pitch + group * terms * pitch
    unit = vector if units % vector == 0 else 1
    for m, there in _shared_out(units * size // unit, lane, stride, present):
        at, column = m * unit // size, m * unit % size
        source = at * weights_pitch + column % units
        turns += take(base + at * pitch + column, unit, there)
        turns += weighted * take(weights_at + source, unit, there)
        turns += weighted * take(slopes_at + column, unit, there)
    for m, there in _shared_out(terms * size, lane, stride, present):
        turns += take(slopes_at + m // size * pitch + m % size, 1, there)
    for m, there in _shared_out(2 * light, lane, stride, present):
        turns += take(slopes_at + (terms - 1) * pitch + m % 2 * units + m // 2, 1, there)
        turns += take(lights_at + m, 1, there)
    return turns / tiles.chains


@cache
def sweep_turns(size: int, itemsize: int, terms: int = 0, states: int = 1) -> float:
    """Return the turns of `sweep` for a step of a chain, dense or implicit."""
    take, vector, units = _Access(itemsize), 16 // itemsize, size // states
    vectors, pitch = -(-units // vector), pitch_of(units, vector)
    team, chains = sweeping_team(units)
    if terms == 0:
        stride, room = team // chains, (size + 2) * pitch
        group, lane = np.divmod(np.arange(team), stride)
        present, base = group < chains, group * room
        busy, now = present & (lane < size), base + size * pitch
        turns = _delivery(take, size, vector, stride, pitch, base, present)
        turns += vectors * (take(base + lane * pitch, vector, busy) + take(now, vector, busy))
        return (turns + take(now + lane, 1, busy)) / chains
    warps, weighted = WARPS if units <= 32 else 1, weighted_terms(terms, states)
    thread = np.arange(warps * team)
    one, lane = np.divmod(thread % team, team // chains)
    busy = (one < chains) & (lane < units)
    now = weighted * units * pitch + 2 * (thread // team * chains + one) * terms * pitch
    turns = vectors * (take(lane * pitch, vector, busy) + take(now, vector, busy))
    return weighted * (turns + take(now + lane, 1, busy)) / (warps * chains)


@cache
def chained_turns(size: int, itemsize: int) -> tuple[float, float]:
    """Return the turns of `chained` for a step of a chain: for its product, and for its sweep.

    Chunks are the longest ones.
    """
    layout, take = layout_of(size, itemsize), _Access(itemsize)
    assert layout is not None
    teams, stride, pitch, cols = layout.teams, layout.stride, layout.pitch, layout.cols
    vector, vectors = layout.vector, layout.padded // layout.vector
    team, lane = np.divmod(np.arange(layout.threads), stride)
    row, mine = lane % layout.groups, lane // layout.groups
    busy, every = mine < layout.column_groups, lane >= 0
    now = layout.columns + team * layout.room
    columns_at = now + mine * cols * pitch
    slopes_at = layout.slopes + team * -(-layout.longest // teams) * size

    product = vectors * ROWS * take(row * pitch, vector, busy)
    product += vectors * cols * take(columns_at, vector, busy)
    product += ROWS * take(slopes_at + row, 1, busy)
    product += ROWS * cols * take(columns_at + row, 1, busy)
    sweep = vectors * take(now, vector, every)
    for entry, there in _shared_out(size, lane, stride, every):
        # A row behind the last is the first one.
        sweep += vectors * take(np.where(there, entry, 0) * pitch, vector, every)
        # A slope is read, and replaced by an entry of a gradient.
        sweep += 2 * take(slopes_at + entry, 1, there) + take(now + entry, 1, there)
    # Slopes are copied there, and gradients from there, some rows by a warp.
    copied = take(np.arange(32), 1, np.arange(32) < layout.at_once * size)
    return product / teams, sweep / teams + 2 * copied / layout.at_once


def _shared_out(count: int, lane: Places, stride: int, present: NDArray[np.bool_]) -> Any:
    """Yield which of `count` things each thread has in turn, and whether it has one."""
    for first in range(0, count, stride):
        yield first + lane, present & (first + lane < count)


def _delivery(
    take: _Access,
    size: int,
    vector: int,
    stride: int,
    pitch: int,
    base: Places,
    present: NDArray[np.bool_],
) -> int:
    """Return the turns in which a dense step is stored."""
    unit, lane = vector if size % vector == 0 else 1, np.arange(len(base)) % stride
    return sum(
        take(base + m * unit // size * pitch + m * unit % size, unit, there)
        for m, there in _shared_out(size * size // unit, lane, stride, present)
    )
