"""Costs of scans on a CUDA device, by the launches of :mod:`~.execution.cuda`.

A launch takes as long as its longest block, or as all of its blocks take those that work at once,
or as memory takes to move what no cache holds, whichever is longest. A block does one operation
after the other, each for ``a·m + b·o + c`` nanoseconds (:mod:`~.costs.operations`); of one that is
alone in its run it may do a part, for ``(a·m + b·o) / parts + c``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays.arrays import load_cupy
from ...errors import DeviceError
from ...execution.cuda import chunks as forms
from ...execution.cuda.shares import BLAS_SIZE, GRAIN, LARGE, Shares
from ...kernels.cpu.tables import LANES, Op
from ...kernels.cuda.chunk_costs import chained_turns, multiply_turns
from ...kernels.cuda.chunks import teams_of
from ...kernels.cuda.levels import THREADS
from ...kernels.cuda.matvec import STAGE
from ...symbolic.program import Program
from .constants import built_in, machine_file, read_constants, write_constants
from .operations import FAMILIES, Operations

# Vectors come before products.
_DENSE, _CSR, _SHARED_CSR, _SHARED_DENSE = map(
    FAMILIES.index, ("dense·x", "csr·x", "shared csr·x", "shared dense·x")
)
_DENSE_PRODUCT = FAMILIES.index("dense·dense")
# Products whose terms are laid out beforehand, in two bytes each.
_SPARSE_PRODUCTS = tuple(map(FAMILIES.index, ("dense·csr", "csr·csr", "csr·csr, dense")))
_TERM = 2
# Steps without entries, `c` of `vector_step`, until another block has read what one has written: an
# estimate.
_HOP = 12
# The kernel of products takes up to 128 registers, that of vectors up to 64: of blocks of the same
# size half as many fit beside each other.
_FEWER = 2


@dataclass(frozen=True)
class Gpu:
    """Constants of a GPU.

    Attributes
    ----------
    name : str
        Its name, or where the constants come from.
    families : dict of str to list
        For ``"float32"`` and ``"float64"`` a row ``(a, b, c)`` for each of
        :data:`~sparsescan.plan.costs.operations.FAMILIES`, in nanoseconds of one block.
    product_step : dict of str to list
        For each dtype ``(a, b, c)``: in the product of a chunk of steps of size `H` one step comes
        ``b·H + c`` nanoseconds after the other, and in those of many chunks every multiply-add of
        dense steps takes the device `a`; implicit steps take more, as they need more turns of
        shared memory.
    vector_step : dict of str to list
        For each dtype ``(b, c)``, the same of matrix-vector products in chunks.
    matmul : dict of str to float
        For each dtype nanoseconds of a multiply-add by cuBLAS.
    blocks : float
        Blocks of matrix-vector products that work at once; of products half as many do.
    run : float
        Nanoseconds of a run beside its launches.
    launch, plain : float
        Nanoseconds of a launch in a graph beside its work; and from one call of cuBLAS, or start of
        a graph, to the next, with its work where that takes no longer.
    cache : float
        Bytes beyond which values come from memory.
    bandwidth : float
        Bytes a nanosecond that memory gives.
    """

    name: str
    families: dict[str, list[list[float]]] = field(repr=False)
    product_step: dict[str, list[float]]
    vector_step: dict[str, list[float]]
    matmul: dict[str, float]
    blocks: float
    run: float
    launch: float
    plain: float
    cache: float
    bandwidth: float


def gpu_file(name: str) -> Path | None:
    """Return where ``sparsescan calibrate --device cuda`` keeps the constants of GPUs of a name."""
    beside = machine_file()
    return beside and beside.with_name(f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json")


def load_gpu(path: Path | None = None) -> Gpu:
    """Return the constants that were measured, by default on a GPU like the current one.

    Where none were measured, or none can be, they are estimates for an H200, from its data sheet
    and the instructions of the kernels.
    """
    if path is None and (name := _current_name()) is not None:
        path = gpu_file(name)
    default: Gpu = built_in(Gpu, "cuda.json")
    return read_constants(path, default, ("blocks", "bandwidth"))


def save_gpu(gpu: Gpu, path: Path | None = None) -> Path:
    """Write constants to a file; the path."""
    return write_constants(gpu, path or gpu_file(gpu.name))


def _current_name() -> str | None:
    """Return the name of the current device, if there is one."""
    try:
        runtime = load_cupy().cuda.runtime
    except DeviceError:
        return None
    device = runtime.getDevice()
    if device not in _names:
        _names[device] = runtime.getDeviceProperties(device)["name"].decode()
    return _names[device]


_names: dict[int, str] = {}


class _Times(NamedTuple):
    """Times of operations, in nanoseconds."""

    divided: NDArray[np.float64]  # of one block, for one sample, and what more blocks share
    each: NDArray[np.float64]  # of every block
    samples: NDArray[np.float64]
    matmul: NDArray[np.float64]  # of cuBLAS, for all samples
    at_once: NDArray[np.float64]  # blocks

    def in_blocks(self, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time of all blocks, if each operation is divided among so many."""
        return (self.divided + blocks * self.each) * self.samples / self.at_once


@dataclass(frozen=True)
class GpuModel:
    """The CUDA engine's :class:`~sparsescan.plan.costs.operations.Model`."""

    gpu: Gpu
    dtype: np.dtype[Any]
    batch: int
    differs: NDArray[np.bool_] | None = None

    @property
    def where(self) -> str:
        """Which GPU."""
        return f"a GPU ({self.gpu.name})"

    @property
    def workers(self) -> int:
        """Blocks for each sample."""
        return max(int(self.gpu.blocks) // self.batch, 1)

    def leaves_idle(self, steps: int, entries: int) -> bool:
        """Return whether samples alone do not keep all blocks busy."""
        return self.workers > 1

    def step(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time of each in a launch of its own, rows divided among all blocks."""
        shares = _shares(operations)
        work = self._work(operations, shares.blas)
        longest = work.divided / shares.blocks + work.each
        longest = np.maximum(longest, work.in_blocks(shares.blocks))
        # Before and after cuBLAS, blocks look at the range.
        return longest + work.matmul + self.gpu.launch * np.where(shares.blas, 3, shares.large)

    def share(self, operations: Operations) -> NDArray[np.float64]:
        """Return the time of all blocks of each, divided by those that work at once."""
        shares = _shares(operations)
        work = self._work(operations, shares.blas)
        return work.in_blocks(shares.blocks) + work.matmul

    def level_times(self, program: Program) -> tuple[float, list[float]]:
        """Return the times of a launch for each level, or for each large operation."""
        form = forms.form_of(program, self.dtype)
        if form is not None and program.chunks is not None:
            return self.gpu.run, self._chunked(program, program.chunks, form)
        operations = Operations.of(program, self.dtype.itemsize, self.batch, self.differs)
        shares = Shares.of(program)
        work = self._work(operations, shares.blas)
        sparse = np.isin(operations.family, _SPARSE_PRODUCTS)
        moved = (operations.bytes + _TERM * sparse * program.work) / self.gpu.bandwidth
        if operations.bytes[:-1].sum() <= self.gpu.cache:
            moved[:] = 0
        is_product = program.ops[:, Op.VECTOR] == 0
        times = [self._level(runs, work, shares, moved, is_product) for _, runs in program.levels]
        # The linear scan in the end, which waits for a value that is not finite.
        guard = self.gpu.launch if program.products else 0.0
        return self.gpu.run + guard, times

    def _level(
        self,
        runs: NDArray[np.int64],
        work: _Times,
        shares: Shares,
        moved: NDArray[np.float64],
        is_product: NDArray[np.bool_],
    ) -> float:
        """Return nanoseconds of a level, of which memory takes `moved`."""
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        level, starts, length = slice(first, last), runs[:, 0] - first, runs[:, 1] - runs[:, 0]
        # A launch does one large operation of each run, so that none has to wait.
        apart = length.max() > 1 and bool(shares.large[level].any())
        alone = np.repeat((length == 1) | apart, length)
        blocks = np.where(alone, shares.blocks[level], 1)
        work = _Times(*(column[level] for column in work))
        longest = work.divided / blocks + work.each
        if apart:
            launch = np.arange(last - first) - np.repeat(starts, length)
        else:
            launch, longest = np.zeros(last - first, np.int64), np.add.reduceat(longest, starts)
        total = np.bincount(launch, work.in_blocks(blocks))
        times = np.maximum(total, np.bincount(launch, moved[level]))
        np.maximum.at(times, launch[: len(longest)], longest)
        calls = np.bincount(launch, shares.blas[level] & alone)
        # A product that many blocks share is brought into range, if need be, by another launch.
        later = np.bincount(launch, (blocks > 1) & is_product[level])
        launches = 1 + calls + (calls > 0) + (later > 0)
        times += np.bincount(launch, work.matmul) + launches * self.gpu.launch
        # Calls of cuBLAS are between graphs, of which the next one is started after them.
        starts = calls + (calls > 0)
        return float(np.maximum(times, starts * self.gpu.plain).sum())

    def _chunked(self, program: Program, chunks: int, form: forms.ChunkForm) -> list[float]:
        """Return the times of the launches of small steps; the last two are one level."""
        n, size = len(program.steps), form.size
        gpu, dtype, steps = self.gpu, self.dtype.name, n - 1
        chunk = -(-n // chunks)
        products = max(-(-steps // chunk) - 1, 0)
        a, b, c = gpu.product_step[dtype]
        vector = gpu.vector_step[dtype][0] * size + gpu.vector_step[dtype][1]
        values = self.batch * self.dtype.itemsize
        read, written = steps * form.entries, products * (size + 1) * size

        def from_memory(count: int) -> float:
            return count * values / gpu.bandwidth if read * values > gpu.cache else 0.0

        # Multiply-adds of dense steps, and how many turns of shared memory such a step takes.
        multiply_adds = products * chunk * self.batch * size * size * (size + 1)
        itemsize, count = self.dtype.itemsize, len(program.levels)
        dense = multiply_turns(size, itemsize)
        if products and forms.in_one_launch(form, self.dtype, n, self.batch, chunk):
            # A block takes the gradient over its pieces, and the next one waits for it.
            teams = teams_of(size, self.dtype)
            piece = -(-chunk // teams)
            alone = piece * (b * size + c + vector)
            behind = products * (_HOP * gpu.vector_step[dtype][1] + teams * vector)
            moved = from_memory(read + steps * size)
            made = a * multiply_adds * chained_turns(size, itemsize)[0] / dense
            one = max(alone + behind, made + piece * vector, moved)
            return [*[0.0] * (count - 1), 2 * gpu.launch + one]
        made = a * multiply_adds * multiply_turns(size, itemsize, form.terms, form.states) / dense
        multiply = max(chunk * (b * size + c), made, from_memory(read + written))
        carry = max(products * vector, from_memory(written))
        sweep = max(min(chunk, steps) * vector, from_memory(read + steps * size))
        times = [gpu.launch + multiply, gpu.launch + carry] if products else []
        times += [2 * gpu.launch + sweep, 0.0, 0.0]
        # A level without products of cuBLAS, or with nothing else, has fewer launches.
        return [*times[: count - 1], sum(times[count - 1 :])] if count else []

    def _work(self, operations: Operations, blas: NDArray[np.bool_]) -> _Times:
        a, b, c = np.array(self.gpu.families[self.dtype.name])[operations.family].T
        macs, entries, samples = _of_a_sample(operations)
        divided = np.where(blas, 0.0, a * macs) + b * entries
        matmul = np.where(blas, self.gpu.matmul[self.dtype.name] * macs * samples, 0.0)
        at_once = self.gpu.blocks / np.where(operations.family > _SHARED_DENSE, _FEWER, 1)
        return _Times(divided, c, samples, matmul, at_once)


def _of_a_sample(operations: Operations) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return multiply-adds and entries of one sample, and how many samples there are.

    A CPU multiplies a matrix that samples share by several of them at once, a device by each.
    """
    macs, entries, times = operations.counts.T
    samples = np.maximum(times, 1)
    shared = np.isin(operations.family, (_SHARED_CSR, _SHARED_DENSE))
    passes = np.where(shared, np.ceil(samples / LANES), samples)
    return macs / passes, entries / samples, samples


def _shares(operations: Operations) -> Shares:
    """Return how blocks share operations, as far as their counts tell."""
    family = operations.family
    macs, entries, _ = _of_a_sample(operations)
    # A tile has as many entries, but no more rows than threads, and at most a warp for each.
    sparse, dense = np.isin(family, (_CSR, _SHARED_CSR)), np.isin(family, (_DENSE, _SHARED_DENSE))
    tiles = np.maximum(macs / STAGE, np.where(sparse, entries / THREADS, 0.0))
    tiles = np.minimum(tiles, np.where(dense, entries * 32 / THREADS, np.inf))
    blas = (family == _DENSE_PRODUCT) & (macs >= BLAS_SIZE**3)
    blocks = np.maximum(np.where(family > _SHARED_DENSE, macs // GRAIN, tiles), 1).astype(np.int64)
    return Shares(blocks, (blocks > LARGE) | blas, blas)
