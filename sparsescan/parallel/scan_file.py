"""A scan from file to file, of which every rank holds its part: ``sparsescan scan --mpi``."""

from __future__ import annotations

import math
import os
import time
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..chains.files import ChainFile, Path, open_chain
from ..errors import InputError
from ..plan.scan_plan import Gradients
from .api import plan
from .communicator import Communicator, Fault
from .grid import Grid

# Bytes that are sent at once, or one gradient, if that is larger.
_BLOCK = 1 << 24

# Name and shape of an array, and some of its bytes.
_Piece = tuple[str, tuple[int, ...], Any]


class Summary(NamedTuple):
    """The file that a scan wrote, and how long it took.

    Attributes
    ----------
    gradients : int
        Number of gradients; or, where patterns take turns, of arrays of them.
    dtype : dtype
        Dtype of the gradients.
    seconds : float
        Time of the plan and the scan.
    schedule : str
        How parts were combined.
    """

    gradients: int
    dtype: np.dtype[Any]
    seconds: float
    schedule: str


class Loaded(NamedTuple):
    """A rank's part of a chain in a file, and the form of the output.

    Attributes
    ----------
    n : int
        Jacobians of the whole chain.
    grad : ndarray
        Gradient at the end of the chain.
    dtype : dtype
        Dtype of the gradients.
    part : list, CSRChain or ndarray
        Jacobians of this rank.
    total : int
        Gradients of the whole chain.
    period : int
        Number of arrays in which gradients take turns; 0 if each is an array of its own.
    sizes : list of int
        Length of a gradient in each of these arrays.
    """

    n: int
    grad: NDArray[Any]
    dtype: np.dtype[Any]
    part: Any
    total: int
    period: int
    sizes: list[int]

    def members(self) -> Iterator[tuple[str, range]]:
        """Yield the name of each array of the output, and which gradients it holds."""
        if self.period == 1:
            yield "gradients", range(self.total)
        for k in range(0 if self.period == 1 else self.period or self.total):
            yield f"gradient_{k}", range(k, self.total if self.period else k + 1, self.period or 1)


def scan_file(
    comm: Any,
    path: Path,
    output: Path,
    *,
    inclusive: bool = False,
    schedule: str = "auto",
    device: str = "cpu",
) -> Summary:
    """Scan a chain that is in a file, and write the gradients to another one.

    All ranks call this together. Each reads its part of the chain, and takes memory for that. They
    send their gradients in blocks to rank 0, which writes the file that ``sparsescan scan`` writes.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    path : str or path-like
        Written by :func:`sparsescan.save_chain`.
    output : str or path-like
        The ``.npz`` file to write.
    inclusive : bool
        Whether to write the gradient of the first layer's input, too.
    schedule : {"auto", "vectors", "products"}
        As for :func:`sparsescan.parallel.plan`.
    device : {"cpu", "cuda"}
        As for :func:`sparsescan.parallel.plan`.

    Returns
    -------
    Summary
        On all ranks.

    Raises
    ------
    InputError, DeviceError, RankError, MemoryError
        On all ranks, if anything is wrong on any of them.
    """
    world = Communicator.of(comm)
    grid = Grid(world.size)
    loaded = load_part(world, grid, path, inclusive)
    start = time.perf_counter()
    parallel_plan = plan(
        comm,
        loaded.part,
        batch=(len(loaded.grad) or None) if loaded.grad.ndim == 2 else None,
        dtype=loaded.dtype,
        schedule=schedule,
        device=device,
    )
    scan = parallel_plan.inclusive_scan if inclusive else parallel_plan.exclusive_scan
    gradients = scan(loaded.grad if world.rank == 0 else None, loaded.part)
    seconds = time.perf_counter() - start
    starts = [grid.steps(rank, loaded.n).start for rank in range(world.size)]
    world.together(lambda: _Output(world, loaded, gradients, [*starts, loaded.total])).write(output)
    arrays = loaded.period if loaded.period > 1 else loaded.total
    return Summary(arrays, loaded.dtype, seconds, parallel_plan.schedule)


def load_part(world: Communicator, grid: Grid, path: Path, inclusive: bool) -> Loaded:
    """Read this rank's part of the file; raise on all ranks if one fails."""

    def load() -> Loaded:
        with naming(path), open_chain(path) as file:
            steps = grid.steps(world.rank, file.n)
            part = file.part(steps.start, steps.stop)
            period = 0 if inclusive and _is_rectangular(file) else file.period
            sizes = _sizes(file, period, inclusive)
            return Loaded(file.n, file.grad, file.dtype, part, file.n + inclusive, period, sizes)

    return world.together(load)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one of this package that names the file."""
    try:
        yield
    except OSError as error:
        what = error.strerror or error
        raise InputError(f"{os.fspath(path)}: {what}; give a path that works") from error


def _is_rectangular(file: ChainFile) -> bool:
    """Whether a chain in one array is one step whose gradients differ in length."""
    if file.period != 1 or file.n != 1:
        return False
    rows, cols = file.shapes(0, 1)[0]
    return bool(rows != cols)


def _sizes(file: ChainFile, period: int, inclusive: bool) -> list[int]:
    """Return the length of a gradient in each array of the output."""
    if file.n == 0:
        return [file.grad.shape[-1]]
    sizes: list[int] = file.shapes(0, period or file.n)[:, 1].tolist()
    if inclusive and not period:
        sizes.append(int(file.shapes(file.n - 1, file.n)[0, 0]))
    return sizes


class _Output:
    """Brings the gradients of all ranks to rank 0, which writes them, block by block.

    Parameters
    ----------
    world : Communicator
        The ranks.
    loaded : Loaded
        The form of the output.
    gradients : list of ndarray, or ndarray
        Gradients of this rank.
    bounds : list of int
        The first gradient of each rank, and the total number.
    """

    def __init__(
        self, world: Communicator, loaded: Loaded, gradients: Gradients, bounds: list[int]
    ) -> None:
        self._world = world
        self._loaded = loaded
        self._gradients = gradients
        self._bounds = bounds
        self._batch_shape = loaded.grad.shape[:-1]
        largest = math.prod(self._batch_shape) * max(loaded.sizes, default=0)
        self._buffer = np.empty(max(largest, _BLOCK // loaded.dtype.itemsize), loaded.dtype)

    def write(self, output: Path) -> None:
        """Write the file, on rank 0; raise on all ranks if that fails."""

        def open_on_first() -> BinaryIO | None:
            with naming(output):
                return open(output, "wb") if self._world.rank == 0 else None

        file = self._world.together(open_on_first)
        pieces = self._pieces()
        fault = Fault()
        if file is not None:
            with fault, naming(output), file:
                _write_arrays(file, pieces, self._loaded.dtype)
        # The other ranks send all blocks, even if rank 0 has failed to write one.
        for _ in pieces:
            pass
        self._world.agree(fault.error)

    def _pieces(self) -> Iterator[_Piece]:
        """Yield the blocks of all arrays on rank 0; send this rank's blocks on others."""
        rank, itemsize = self._world.rank, self._loaded.dtype.itemsize
        for size, (name, numbers) in zip(self._loaded.sizes, self._loaded.members(), strict=False):
            row_shape = *self._batch_shape, size
            shape = (len(numbers), *row_shape) if self._loaded.period else row_shape
            yield name, shape, b""
            row_size = math.prod(row_shape)
            if row_size == 0:
                continue
            count = max(_BLOCK // (row_size * itemsize), 1)
            for owner in self._owners(numbers) if rank == 0 else [rank]:
                own = self._owned(numbers, owner)
                for first in range(0, len(own), count):
                    some = own[first : first + count]
                    block = self._buffer[: len(some) * row_size].reshape(len(some), *row_shape)
                    if owner == rank:
                        self._fill(block, some)
                    if rank > 0:
                        self._world.send(block, 0)
                        continue
                    if owner > 0:
                        self._world.receive(block, owner)
                    yield name, shape, block

    def _owners(self, numbers: range) -> range:
        """Return the ranks that may hold some of these gradients."""
        if not numbers:
            return range(0)
        first, last = (
            bisect_right(self._bounds, k, hi=self._world.size) - 1
            for k in (numbers[0], numbers[-1])
        )
        return range(first, last + 1)

    def _owned(self, numbers: range, rank: int) -> range:
        """Return the gradients in a range that a rank holds."""
        start, stop = (
            len(range(numbers.start, min(end, numbers.stop), numbers.step))
            for end in self._bounds[rank : rank + 2]
        )
        return numbers[start:stop]

    def _fill(self, block: NDArray[Any], numbers: range) -> None:
        """Copy these gradients of this rank to a block."""
        start = self._bounds[self._world.rank]
        rows = self._gradients[numbers.start - start : numbers.stop - start : numbers.step]
        for place, row in zip(block, rows, strict=True):
            place[...] = row


def _write_arrays(file: BinaryIO, pieces: Iterable[_Piece], dtype: np.dtype[Any]) -> None:
    """Write an ``.npz`` file as :func:`numpy.savez` does, from arrays that come in pieces."""
    descr = np.lib.format.dtype_to_descr(dtype)
    with zipfile.ZipFile(file, "w") as archive:
        for (name, shape), group in groupby(pieces, itemgetter(0, 1)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                described = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, described)
                for *_, block in group:
                    member.write(block)
