"""Device functions that the kernels of both passes begin with, and move numbers by."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....arrays.cuda import cuda
from ....kernels.cuda.device import load, prefetch, store
from ....kernels.cuda.elementwise import elementwise
from ....kernels.cuda.vectors import barrier, block_index, get, put, read_vector, thread_index
from ...render.cuda import CudaProgram, Sizes, functions
from .layout import LoopLayout
from .products import chains_of, products_of

# How many steps before its use a number is brought to the L2 cache; it is loaded one step before.
AHEAD = 8
_WORD, _FLAG = np.int64(0), np.uint16(0)


class Pass:
    """Constants and functions that the kernel of a pass is compiled from.

    Attributes
    ----------
    code : CudaProgram
        The program.
    named : dict
        Its functions by their names.
    products : Products
        How a block multiplies by its weights.
    dtype, zero
        Type of all numbers, and a zero.
    units, lanes, threads, rounds : int
        As :class:`LoopLayout` has them.
    samples, own : int
        Samples of a block, and of a thread.
    padded, size : int
        Numbers of a vector in shared memory, and of the vectors of all samples.
    has_resets : bool
        Whether samples begin anew in the middle.
    """

    def __init__(
        self,
        code: CudaProgram,
        layout: LoopLayout,
        dtype: np.dtype[Any],
        samples: int,
        has_resets: bool,
        *,
        back: bool,
    ) -> None:
        self.code, self.dtype, self.zero, self.has_resets = code, dtype, dtype.type(0), has_resets
        self.units, self.lanes, self.threads, self.rounds, vectors, _ = layout
        self.samples, self.own = samples, max(samples // self.lanes, 1)
        self.padded = vectors * self.lanes * (16 // dtype.itemsize)
        self.size = samples * self.padded
        text = sequence_source(code, layout, dtype, samples, back=back, has_resets=has_resets)
        moves = {"cuda": cuda, "get": get, "put": put, "load": load, "store": store}
        moves |= {"prefetch": prefetch, "read_vector": read_vector}
        title, phases = ("backward", code.backward) if back else ("forward", code.forward)
        self.named = functions(text, title, elementwise(dtype) | moves)
        adds = [self.named.get(f"add_{stage}") for stage in range(code.stages)]
        self.products = products_of(phases, len(code.blocks), adds, layout, dtype, samples)


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
        tuple(chains_of(phase, dtype, samples) for phase in phases),
        has_resets,
    )
    return code.source(sizes, is_backward=back)


def starter(p: Pass, pool_size: int, now_size: int, ahead_size: int) -> Any:
    """Return a device function that all threads of a block begin with.

    It clears shared memory and the numbers of a step; and returns the direction of the block, the
    lane, its first sample in the block and in all, and whether it is the one lane that has them.
    """
    zero, lanes, threads, samples, own = p.zero, p.lanes, p.threads, p.samples, p.own
    shared = max(lanes // samples, 1)

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
def rows_of(back, steps, batch, segment, begin, end, k):
    """Return the step of the `k`-th in its direction, and the row of its first sample."""
    t = steps - 1 - k if back else k
    first = (steps - end if back else begin) if segment < steps else 0
    return t, (back * segment + t - first) * batch


def reader(p: Pass) -> Any:
    """Return a device function that loads the rows of parameters of a unit, and computes others."""
    zero, units, leaves, derive = p.zero, p.units, p.code.leaves, p.named.get("derive")

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
def is_reset(ends, own, row, sample, batch):
    """Return whether a row of resets, whose address is behind the ends, has a sample."""
    return load(ends[own], row * batch + sample, _FLAG) != _FLAG


def movers(count: int) -> tuple[Any, Any]:
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
