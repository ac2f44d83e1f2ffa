"""How the threads of a block share the products of small steps."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

from .small_steps import ROWS, SHARED, pitch_of, weighted_terms


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
