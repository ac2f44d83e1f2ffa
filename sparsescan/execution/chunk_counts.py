"""Into how many chunks a device cuts a chain of small steps, by estimates in cycles.

Products of chunks are made at once, gradients are taken over the chunks one after the other. A step
of a chain takes as long as its instructions depend on each other; or, where a multiprocessor has
many chains, as its warps take to issue theirs, or its shared memory to answer, whichever is longer.

What is chosen follows from the chain and the device alone, and from nothing that has been compiled
or measured: so results have the same bits in the first run and in later ones.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..kernels.cuda.chunk_costs import chained_turns, multiply_turns, registers_of, sweep_turns
from ..kernels.cuda.chunks import chained_layout, tiles_of

__all__ = ["H100", "Multiprocessors", "chunk_count", "in_one_launch", "multiprocessors_of"]


class Multiprocessors(NamedTuple):
    """The multiprocessors of a device, and what the blocks of each share.

    Attributes
    ----------
    number : int
        How many there are.
    registers, threads, blocks : int
        The most that one has.
    shared, reserved : int
        Bytes of its shared memory, and of those that every block takes beside its own.
    """

    number: int
    registers: int = 1 << 16
    threads: int = 2048
    blocks: int = 32
    shared: int = 228 * 1024
    reserved: int = 1024

    def at_once(self, threads: int, registers: int, shared: int) -> int:
        """Return how many blocks of a kernel one multiprocessor runs at once, at least 1.

        A block has so many threads, with registers each, and bytes of shared memory.
        """
        # A warp gets registers by 256, in one of four parts of the multiprocessor.
        warps, of_warp = -(-threads // 32), -(-registers // 8) * 256
        of_block = -(-shared // 128) * 128 + self.reserved
        by_registers = self.registers // 4 // of_warp * 4 // warps
        by_size = min(self.threads // threads, self.shared // of_block)
        return max(min(by_registers, by_size, self.blocks), 1)


# Chains run in one launch or in three on all devices as they do on this one.
H100 = Multiprocessors(132)
_ATTRIBUTES = {
    "number": "MultiProcessorCount",
    "registers": "MaxRegistersPerMultiprocessor",
    "threads": "MaxThreadsPerMultiProcessor",
    "blocks": "MaxBlocksPerMultiprocessor",
    "shared": "MaxSharedMemoryPerMultiprocessor",
    "reserved": "ReservedSharedMemoryPerBlock",
}
_known: dict[int, Multiprocessors] = {}


def multiprocessors_of(cupy: Any) -> Multiprocessors:
    """Return the multiprocessors of the current device."""
    device = cupy.cuda.Device()
    if device.id not in _known:
        # CuPy asks for all attributes at once, which takes a while; which there are, depends on
        # the version of CUDA.
        about = device.attributes
        asked = {field: int(about[name]) for field, name in _ATTRIBUTES.items() if name in about}
        _known[device.id] = Multiprocessors(**asked)
    return _known[device.id]


class _Cycles:
    """Estimates of how long the scan of a chain takes a GPU, as the code for float32 has it."""

    # Two launches; and to tell another block that a gradient is there.
    LAUNCHES, HOP = 6000, 1500

    def __init__(
        self, size: int, itemsize: int, batch: int, device: Multiprocessors, terms: int, states: int
    ) -> None:
        self._form = form = size, itemsize, terms, states
        tiles = tiles_of(size, 4, terms, states)
        assert tiles is not None
        self._batch, self._device, self.layout = batch, device, chained_layout(*form)
        # As if rows were shorter where some are light.
        padded = -(-size // 4) * tiles.dense
        # Cycles from one step to the next where nothing else goes on.
        self.multiply = 8 * tiles.cols * padded + 300
        self.carry, self.sweep = 4 * size + 150, 6 * size + 100
        # Cycles of a multiprocessor for each chain that it has: four instructions each, or a turn
        # of shared memory, or 20 bytes of memory.
        issued = (5 * tiles.cols * padded + 250) * tiles.threads / 32 / tiles.chains / 4
        self.product_work = max(issued, multiply_turns(*form))
        read = (terms or size) * size * 4 / 20
        self.sweep_work = max(read, sweep_turns(*form))
        if self.layout is not None:
            cols, stride = self.layout.cols, self.layout.stride
            issued = (5 * cols * padded + 250) * stride / 32 / 4
            products, sweeps = chained_turns(size, itemsize)
            self.chained_work = max(issued, products), max(read, sweeps)

    @property
    def most(self) -> int:
        """The most chunks whose products a device makes at once."""
        tiles = tiles_of(*self._form)
        assert tiles is not None
        registers = registers_of(*self._form)
        blocks = self._device.at_once(tiles.threads, registers, tiles.shared)
        chains = self._device.number * blocks * tiles.chains // tiles.parts
        return chains // self._batch

    def of_phases(self, steps: int, chunks: int) -> float:
        """Return the cycles of three launches, or of one through all steps."""
        depth, chains = steps / chunks, self._batch * chunks / self._device.number
        swept = depth * max(self.sweep, chains * self.sweep_work)
        if chunks == 1:
            return swept
        products = depth * max(self.multiply, chains * self.product_work)
        return swept + products + chunks * self.carry + self.LAUNCHES

    def of_chained(self, steps: int, chunks: int) -> float:
        """Return the cycles of one launch, which are infinite where slopes do not fit."""
        if self.layout is None or chunks == 1 or -(-steps // chunks) > self.layout.longest:
            return math.inf
        teams, (product_work, sweep_work) = self.layout.teams, self.chained_work
        depth, chains = steps / chunks / teams, self._batch * chunks * teams / self._device.number
        products = depth * max(self.multiply, chains * product_work)
        swept = depth * max(self.sweep, chains * sweep_work)
        behind = chunks * (self.HOP + teams * self.carry)
        return max(products + swept, behind + depth * (self.multiply + self.sweep))

    def of(self, steps: int, chunks: int) -> float:
        """Return the cycles of what takes less."""
        return min(self.of_phases(steps, chunks), self.of_chained(steps, chunks))


def in_one_launch(
    size: int,
    dtype: np.dtype[Any],
    steps: int,
    batch: int,
    chunk: int,
    *,
    terms: int = 0,
    states: int = 1,
) -> bool:
    """Return whether a chain takes less in one launch than in three, if it can be in one.

    It is the same for all devices, so that what is planned is what runs: as for an H100.
    """
    layout = chained_layout(size, dtype.itemsize, terms, states)
    if layout is None or chunk > layout.longest:
        return False
    cycles, chunks = _Cycles(size, dtype.itemsize, batch, H100, terms, states), -(-steps // chunk)
    return cycles.of_chained(steps, chunks) < cycles.of_phases(steps, chunks)


def chunk_count(
    steps: int,
    batch: int,
    size: int,
    device: Multiprocessors,
    *,
    terms: int = 0,
    states: int = 1,
    itemsize: int = 4,
) -> int:
    """Return the number of chunks into which to cut a chain; 1 if products do not pay.

    Its steps are dense, or implicit ones as :func:`~.chunks.chunk_kernels` has them.
    """
    cycles = _Cycles(size, itemsize, batch, device, terms, states)
    # As many chunks as make depth and carries take the same time; but no more than there is room
    # for at once.
    best = math.isqrt(steps * (cycles.multiply + cycles.sweep) // cycles.carry)
    counts = [1, max(min(best, cycles.most, steps), 1)]
    layout = cycles.layout
    if layout is not None and steps > 1:
        # One launch does as much, where chunks are no longer than there is room for.
        behind = layout.teams * (cycles.HOP + layout.teams * cycles.carry)
        best = math.isqrt(steps * (cycles.multiply + cycles.sweep) // behind)
        counts.append(min(max(best, -(-steps // layout.longest), 2), steps))
    return min(counts, key=lambda count: cycles.of(steps, count))
