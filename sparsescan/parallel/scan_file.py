"""A scan from file to file, of which every rank holds its part: ``sparsescan scan --mpi``."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..io import ChainFile, Path
from ..npz import header, write_members
from ..plan import Gradients
from .api import plan
from .communicator import Communicator, Fault
from .grid import Grid

__all__ = ["Loaded", "Summary", "load_part", "naming", "scan_file"]

# Bytes that are sent at once, or one gradient, if that is larger.
_BLOCK = 1 << 24


class Summary(NamedTuple):
    """What a scan did.

    Attributes
    ----------
    gradients : int
        How many; or, where patterns take turns, arrays of them.
    dtype : dtype
        Of the gradients.
    seconds : float
        For the scan and its plan.
    schedule : str
        How parts were combined.
    """

    gradients: int
    dtype: np.dtype[Any]
    seconds: float
    schedule: str


class Loaded(NamedTuple):
    """The chain, this rank's part of it, and the form of the output."""

    n: int
    grad: NDArray[Any]
    dtype: np.dtype[Any]
    part: Any
    # How many gradients there are, and in how many arrays they take turns; 0 if each has its own.
    total: int
    period: int
    # Length of a gradient in each of these arrays, on rank 0.
    sizes: NDArray[np.int64]

    def members(self) -> Iterator[tuple[str, range]]:
        """The arrays of the output, and which gradients are in each."""
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

    All ranks call this together. Each reads its part of the chain, and takes memory for that; the
    gradients go to rank 0 in blocks, which writes what ``sparsescan scan`` does.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    path : str or path-like
        Written by :func:`sparsescan.save_chain`.
    output : str or path-like
        The ``.npz`` file to write.
    inclusive : bool
        Whether the gradient of the first layer's input is wanted, too.
    schedule : {"auto", "vectors", "products"}
        As for :func:`sparsescan.parallel.plan`.
    device : {"cpu", "cuda"}
        The same.

    Returns
    -------
    Summary
        What was done.

    Raises
    ------
    InputError, DeviceError, RankError, MemoryError
        On all ranks, if anything is wrong on any of them.
    """
    world = Communicator.of(comm)
    grid = Grid(world.size)
    loaded = load_part(world, grid, path, inclusive)
    start = time.perf_counter()
    made = plan(
        comm,
        loaded.part,
        batch=(len(loaded.grad) or None) if loaded.grad.ndim == 2 else None,
        dtype=loaded.dtype,
        schedule=schedule,
        device=device,
    )
    scan = made.inclusive_scan if inclusive else made.exclusive_scan
    gradients = scan(loaded.grad if world.rank == 0 else None, loaded.part)
    seconds = time.perf_counter() - start
    starts = [grid.steps(rank, loaded.n).start for rank in range(world.size)]
    _Output(world, loaded, gradients, [*starts, loaded.total]).write(output)
    many = loaded.period if loaded.period > 1 else loaded.total
    return Summary(many, loaded.dtype, seconds, made.schedule)


def load_part(world: Communicator, grid: Grid, path: Path, inclusive: bool) -> Loaded:
    """Read this rank's part, and check its share of the file; raise on all what is wrong on any."""
    fault = Fault()
    loaded, sums = None, None
    with ExitStack() as stack:
        with fault, naming(path):
            file = stack.enter_context(ChainFile(path))
            steps = grid.steps(world.rank, file.n)
            part = file.part(steps.start, steps.stop)
            period = 0 if inclusive and _is_rectangular(file) else file.period
            sizes = _sizes(file, period, inclusive) if world.rank == 0 else np.empty(0, np.int64)
            total = file.n + inclusive
            loaded = Loaded(file.n, file.grad, file.dtype, part, total, period, sizes)
            sums = file.sums(world.rank, world.size)
        world.agree(fault.error)
        every = world.gather(sums)
        with fault:
            file.check(every)
        world.agree(fault.error)
    assert loaded is not None
    return loaded


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make one error of this package of what the system says of a file."""
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


def _sizes(file: ChainFile, period: int, inclusive: bool) -> NDArray[np.int64]:
    """Length of a gradient in each array of the output."""
    if file.n == 0:
        return np.array([file.grad.shape[-1]])
    entering = file.shapes(0, period or file.n)[:, 1]
    leaving = file.shapes(file.n - 1, file.n)[:, 0]
    return np.concatenate([entering, leaving]) if inclusive and not period else entering


class _Output:
    """Brings the gradients of all ranks to rank 0, a block at a time, which writes them.

    Blocks come array by array, and within one in the order of the ranks.
    """

    def __init__(
        self, world: Communicator, loaded: Loaded, gradients: Gradients, bounds: list[int]
    ) -> None:
        self._world = world
        self._loaded = loaded
        self._gradients = gradients
        # Where the gradients of each rank start, and where the last ones end.
        self._bounds = bounds
        self._batch_shape = loaded.grad.shape[:-1]
        self._block = np.empty(0, np.int64)

    def write(self, output: Path) -> None:
        """Write the file, on rank 0; raise on all ranks if that fails."""
        fault = Fault()
        with ExitStack() as stack:
            file = None
            with fault, naming(output):
                self._block = np.empty(_words(max(self._largest(), _BLOCK)), np.int64)
                if self._world.rank == 0:
                    file = stack.enter_context(open(output, "wb"))
            self._world.agree(fault.error)
            if file is None:
                self._send()
            else:
                pieces = self._pieces()
                with fault, naming(output), file:
                    write_members(file, pieces)
                # The other ranks send all, whatever has happened here.
                for _ in pieces:
                    pass
        self._world.agree(fault.error)

    def _largest(self) -> int:
        """Bytes of the largest gradient that passes through here."""
        if self._world.rank > 0:
            return max((gradient.nbytes for gradient in self._gradients), default=0)
        return self._row_bytes(int(self._loaded.sizes.max(initial=0)))

    def _row_bytes(self, size: int) -> int:
        return math.prod(self._batch_shape) * size * self._loaded.dtype.itemsize

    def _send(self) -> None:
        """What rank 0 takes, in the order of :meth:`_pieces`."""
        for _, gradients in self._loaded.members():
            own = self._own(gradients, self._world.rank)
            if own:
                row_bytes = self._gradients[own[0] - self._bounds[self._world.rank]].nbytes
                for block in _blocks(own, row_bytes):
                    self._world.send(self._fill(block, row_bytes), 0)

    def _pieces(self) -> Iterator[tuple[str, Any]]:
        """What rank 0 writes, as :func:`write_members` takes it."""
        for size, (name, gradients) in zip(
            self._loaded.sizes.tolist(), self._loaded.members(), strict=False
        ):
            shape = (*self._batch_shape, size)
            if self._loaded.period:
                shape = (len(gradients), *shape)
            yield name, header(shape, self._loaded.dtype)
            row_bytes = self._row_bytes(size)
            for rank in self._holders(gradients):
                for block in _blocks(self._own(gradients, rank), row_bytes):
                    if rank == 0:
                        words = self._fill(block, row_bytes)
                    else:
                        words = self._block[: _words(len(block) * row_bytes)]
                        self._world.receive(words, rank)
                    yield name, words.view(np.uint8)[: len(block) * row_bytes]

    def _holders(self, gradients: range) -> range:
        """Ranks that may hold some of these."""
        if not gradients:
            return range(0)
        first, last = (
            bisect_right(self._bounds, k, hi=self._world.size) - 1
            for k in (gradients[0], gradients[-1])
        )
        return range(first, last + 1)

    def _own(self, gradients: range, rank: int) -> range:
        """Those of them that a rank holds."""
        start, stop = (
            len(range(gradients.start, min(end, gradients.stop), gradients.step))
            for end in self._bounds[rank : rank + 2]
        )
        return gradients[start:stop]

    def _fill(self, block: range, row_bytes: int) -> NDArray[np.int64]:
        """These gradients of this rank, one after the other."""
        start = self._bounds[self._world.rank]
        rows = self._gradients[block.start - start : block.stop - start : block.step]
        words = self._block[: _words(len(block) * row_bytes)]
        places = words.view(self._loaded.dtype)[: len(block) * rows[0].size]
        places = places.reshape(len(block), *rows[0].shape)
        if isinstance(rows, np.ndarray):
            places[...] = rows
        else:
            for place, row in zip(places, rows, strict=True):
                place[...] = row
        return words


def _blocks(gradients: range, row_bytes: int) -> Iterator[range]:
    """Cut them into blocks that are sent at once; none if there is nothing in them."""
    if row_bytes == 0:
        return
    count = max(_BLOCK // row_bytes, 1)
    for first in range(0, len(gradients), count):
        yield gradients[first : first + count]


def _words(nbytes: int) -> int:
    return -(-nbytes // 8)
