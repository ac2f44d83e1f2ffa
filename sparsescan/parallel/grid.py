"""Grid: how ranks share a chain and a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import InputError
from ..schedule import check_count

__all__ = ["Grid", "check_grid"]


class Grid(NamedTuple):
    """``chain × batch`` ranks: so many parts of the chain, for each of so many groups of samples.

    Ranks that follow each other hold parts that follow each other: rank ``r`` holds part
    ``r % chain`` for the samples of group ``r // chain``.

    Attributes
    ----------
    chain : int
        Parts of the chain.
    batch : int
        Groups of samples.

    Examples
    --------
    >>> from sparsescan.parallel import Grid
    >>> grid = Grid(chain=2, batch=3)
    >>> grid.size
    6
    >>> grid.steps(3, 101), grid.samples(3, 16)  # of rank 3
    (slice(50, 101, None), slice(5, 10, None))
    """

    chain: int
    batch: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.chain * self.batch

    def position(self, rank: int) -> int:
        """Which part of the chain a rank holds."""
        return rank % self.chain

    def group(self, rank: int) -> int:
        """Which group of samples a rank works on."""
        return rank // self.chain

    def steps(self, rank: int, n: int) -> slice:
        """The part of a rank, of `n` Jacobians in equal parts."""
        return _part(self.position(rank), self.chain, n)

    def samples(self, rank: int, batch: int) -> slice:
        """The samples of a rank, of `batch` in equal groups."""
        return _part(self.group(rank), self.batch, batch)


def _part(index: int, count: int, length: int) -> slice:
    return slice(length * index // count, length * (index + 1) // count)


def check_grid(grid: Any, size: int) -> Grid:
    """A grid for `size` ranks, by default all on the chain; or an error."""
    if grid is None:
        return Grid(size)
    try:
        made = Grid(*grid)
    except TypeError:
        raise InputError(f"grid is {grid!r}; expected (chain, batch)") from None
    made = Grid(*(check_count(f"grid.{name}", getattr(made, name), 1) for name in Grid._fields))
    if made.size != size:
        raise InputError(f"grid is {made.chain} × {made.batch}; expected {size} ranks in all")
    return made
