"""Kernels for a chain of small dense steps on a GPU, in three phases: ``Schedule.chunked``.

Each block multiplies up the steps of its chunk, for one sample; then one block a sample carries the
gradient over the chunk boundaries; then each block sweeps its chunk with matrix-vector products.
The number of launches does not depend on the number of steps.

In a chunk the columns of the product evolve independently, ``p ← J p``, so a thread owns a column,
with an exponent of its own, and reads `J` from shared memory, where all threads read one place at a
time. One column more is what local gradients add. A gradient or a product that is not finite raises
a flag, upon which a last kernel lets the linear scan decide, as on the CPU.

Arrays of steps are given by address, as in :mod:`sparsescan.kernels.cpu`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, int32

from ._device import cuda, load

__all__ = ["MAX_SIZE", "ChunkKernels", "chunk_kernels"]

# The largest step that these kernels take, and bytes of shared memory that every block may have.
MAX_SIZE, _SHARED = 64, 48 * 1024

# For the largest entry of a column: the band in which it stays, and the exponent to which it is
# brought back. Steps may have entries up to 2^-48 of the largest number, or 2^-310.
_BANDS = {np.dtype(np.float32): (1.0, 2.0**40, 30), np.dtype(np.float64): (1.0, 2.0**300, 200)}


class ChunkKernels(NamedTuple):
    """Compiled for steps of one size and dtype.

    All take ``(leaves, local, shape, out, …)``: `leaves`, int64 ``(n, 2)``, holds the address of
    each Jacobian and the bytes from one sample to the next; `local`, int64 ``(n + 1,)``, the
    address of each local gradient, or 0; `shape`, int64, is ``(steps, batch, chunk)``; `out` is
    flat ``(steps + 1, batch, size)``, the first gradient in place.

    Attributes
    ----------
    multiply : callable
        Grid ``(chunks - 1, batch)``: products of all chunks but the last, into `columns`, flat
        ``(batch, chunks - 1, size + 1, size)``, and `exponents`, flat ``(batch, chunks - 1, size +
        1)``.
    carry : callable
        Grid ``batch``: the first gradient of every chunk.
    sweep : callable
        Grid ``(chunks, batch)``: all other gradients.
    repair : callable
        Grid ``batch``: all gradients by the linear scan, if the flag is raised.
    threads : int
        Threads of a block, for all of them.
    """

    multiply: Any
    carry: Any
    sweep: Any
    repair: Any
    threads: int


@cache
def chunk_kernels(size: int, dtype: np.dtype[Any]) -> ChunkKernels:
    """The kernels for ``(size, size)`` steps."""
    low, high, aim = _BANDS[dtype]
    real, kind = dtype.type, from_dtype(dtype)
    entries = size * size
    width = size + 1  # of a row of columns, the last one what local gradients add
    # Rows of a matrix start in different banks.
    pitch = size + 1 - size % 2
    twice, padded = 2 * size, size * pitch
    room = _SHARED // dtype.itemsize
    # New columns stand beside the steps if there is room, else in local memory; a step is fetched
    # while the one before is used, if there is room for two.
    shares_columns = entries + size * width <= room
    fresh_entries = size * width if shares_columns else size
    stride = width if shares_columns else 1
    buffers = 2 if 2 * entries + shares_columns * size * width <= room else 1
    sweep_buffers = 2 if 2 * (padded + size) <= room else 1
    steps_shared, sweep_shared = buffers * entries, sweep_buffers * padded

    @cuda.jit(device=True)
    def fetch(leaves, step, sample, to, place, row, like):  # type: ignore[no-untyped-def]
        """Copy a step to shared memory, its rows `row` apart; all threads take part."""
        address = leaves[step, 0] + sample * leaves[step, 1]
        for m in range(cuda.threadIdx.x, entries, cuda.blockDim.x):
            to[place + m // size * row + m % size] = load(address, m, like)

    @cuda.jit(device=True)
    def local_entry(local, step, sample, i, like):  # type: ignore[no-untyped-def]
        if local[step] == 0:
            return real(0)
        return load(local[step], sample * size + i, like)

    @cuda.jit
    def multiply(leaves, local, shape, out, columns, exponents, flag):  # type: ignore[no-untyped-def]
        matrix = cuda.shared.array(steps_shared, kind)
        if shares_columns:
            fresh = cuda.shared.array(fresh_entries, kind)
        else:
            fresh = cuda.local.array(fresh_entries, kind)
        column = cuda.local.array(size, kind)
        j, sample = cuda.threadIdx.x, cuda.blockIdx.y
        chunk = cuda.blockIdx.x
        chunks = cuda.gridDim.x
        first = chunk * shape[2]
        last = first + shape[2]
        own = j if shares_columns else 0
        for i in range(size):
            column[i] = real(1) if i == j else real(0)
        exponent = 0
        fetch(leaves, first, sample, matrix, 0, size, out)
        cuda.syncthreads()
        for step in range(first, last):
            now = (step - first) % buffers * entries
            if buffers == 2 and step + 1 < last:
                fetch(leaves, step + 1, sample, matrix, entries - now, size, out)
            if j < width:
                largest = real(0)
                finite = True
                for i in range(size):
                    entry = real(0)
                    for k in range(size):
                        entry += matrix[now + i * size + k] * column[k]
                    if j == size:
                        # What is added has the exponent of the column.
                        added = local_entry(local, step + 1, sample, i, out)
                        entry += math.ldexp(added, -exponent)
                    fresh[i * stride + own] = entry
                    largest = max(largest, abs(entry))
                    finite = finite and math.isfinite(entry)
                if not finite:
                    flag[0] = 1
                elif largest > 0 and (largest < low or largest > high):
                    shift = aim - math.frexp(largest)[1]
                    exponent -= shift
                    for i in range(size):
                        fresh[i * stride + own] = math.ldexp(fresh[i * stride + own], shift)
                for i in range(size):
                    column[i] = fresh[i * stride + own]
            cuda.syncthreads()
            if buffers == 1 and step + 1 < last:
                fetch(leaves, step + 1, sample, matrix, 0, size, out)
                cuda.syncthreads()
        if j < width:
            place = (sample * chunks + chunk) * width + j
            exponents[place] = exponent
            for i in range(size):
                columns[place * size + i] = column[i]

    @cuda.jit
    def carry(leaves, local, shape, out, columns, exponents, flag, chunks):  # type: ignore[no-untyped-def]
        mantissas = cuda.shared.array(width, kind)
        powers = cuda.shared.array(width, int32)
        i, sample = cuda.threadIdx.x, cuda.blockIdx.x
        batch = shape[1]
        x = real(0)
        if i < size:
            x = out[sample * size + i]
        for chunk in range(chunks):
            place = (sample * chunks + chunk) * width
            if i < width:
                mantissa, power = math.frexp(x if i < size else real(1))
                mantissas[i] = mantissa
                powers[i] = power + exponents[place + i]
            cuda.syncthreads()
            if i < size:
                # Relative to the largest term, so that none overflows and none that counts is lost.
                top = -(1 << 30)
                for j in range(width):
                    if mantissas[j] != 0:
                        top = max(top, powers[j])
                total = real(0)
                for j in range(width):
                    if mantissas[j] != 0:
                        term = math.ldexp(mantissas[j], int(powers[j] - top))
                        total += columns[(place + j) * size + i] * term
                x = real(math.ldexp(total, int(top)))
                out[((chunk + 1) * shape[2] * batch + sample) * size + i] = x
                if not math.isfinite(x):
                    flag[0] = 1
            cuda.syncthreads()

    @cuda.jit(device=True)
    def matvecs(leaves, local, shape, out, first, last, sample, flag):  # type: ignore[no-untyped-def]
        """Gradients after `first`, up to and including that after step ``last - 1``."""
        matrix = cuda.shared.array(sweep_shared, kind)
        vector = cuda.shared.array(twice, kind)
        i = cuda.threadIdx.x
        batch = shape[1]
        if i < size:
            vector[i] = out[(first * batch + sample) * size + i]
        if first < last:
            fetch(leaves, first, sample, matrix, 0, pitch, out)
        cuda.syncthreads()
        for step in range(first, last):
            now = (step - first) % 2
            place = now * padded if sweep_buffers == 2 else 0
            if sweep_buffers == 2 and step + 1 < last:
                fetch(leaves, step + 1, sample, matrix, padded - place, pitch, out)
            if i < size:
                entry = local_entry(local, step + 1, sample, i, out)
                for k in range(size):
                    entry += matrix[place + i * pitch + k] * vector[now * size + k]
                vector[(1 - now) * size + i] = entry
                out[((step + 1) * batch + sample) * size + i] = entry
                if not math.isfinite(entry):
                    flag[0] = 1
            cuda.syncthreads()
            if sweep_buffers == 1 and step + 1 < last:
                fetch(leaves, step + 1, sample, matrix, 0, pitch, out)
                cuda.syncthreads()

    @cuda.jit
    def sweep(leaves, local, shape, out, flag):  # type: ignore[no-untyped-def]
        first = cuda.blockIdx.x * shape[2]
        # The gradient at the end of a chunk is the first of the next one, which `carry` wrote.
        last = min(first + shape[2] - 1, shape[0])
        if cuda.blockIdx.x == cuda.gridDim.x - 1:
            last = shape[0]
        matvecs(leaves, local, shape, out, first, last, cuda.blockIdx.y, flag)

    @cuda.jit
    def repair(leaves, local, shape, out, flag):  # type: ignore[no-untyped-def]
        if flag[0]:
            matvecs(leaves, local, shape, out, 0, shape[0], cuda.blockIdx.x, flag)

    return ChunkKernels(multiply, carry, sweep, repair, -(-width // 32) * 32)
