"""Grid: how ranks share a chain, a batch, and the rows of each step."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from ..checks import check_count
from ..errors import InputError, short


class Grid(NamedTuple):
    """``chain × batch × rows`` ranks: parts of the chain, groups of samples, shares of each step.

    Consecutive ranks share the rows of the same steps; the next ranks hold the next part of the
    chain. Rank ``r`` has share ``r % rows`` of part ``r // rows % chain``, for the samples of group
    ``r // (rows * chain)``.

    Attributes
    ----------
    chain : int
        Parts of the chain.
    batch : int
        Groups of samples.
    rows : int
        Ranks that share the rows of each step; use more than one if a step is too large for a rank.

    Examples
    --------
    >>> from sparsescan.parallel import Grid
    >>> grid = Grid(chain=2, batch=3)
    >>> grid.size
    6
    >>> grid.steps(3, 101), grid.samples(3, 16)  # of rank 3
    (slice(50, 101, None), slice(5, 10, None))
    >>> grid = Grid(chain=2, rows=4)
    >>> grid.steps(3, 101), grid.entries(3, 1000)
    (slice(0, 50, None), slice(750, 1000, None))
    """

    chain: int
    batch: int = 1
    rows: int = 1

    def __str__(self) -> str:
        return " × ".join(map(str, self if self.rows > 1 else self[:2]))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.batch * self.group_size

    @property
    def group_size(self) -> int:
        """Ranks of a group: those that work on the same samples."""
        return self.chain * self.rows

    def position(self, rank: int) -> int:
        """Return which part of the chain a rank holds."""
        return rank // self.rows % self.chain

    def group(self, rank: int) -> int:
        """Return which group of samples a rank works on."""
        return rank // self.group_size

    def row(self, rank: int) -> int:
        """Return which share of the rows of its steps a rank holds."""
        return rank % self.rows

    def steps(self, rank: int, n: int) -> slice:
        """Return a rank's part of `n` Jacobians in equal parts."""
        return slice(*bounds(n, self.position(rank), self.chain))

    def samples(self, rank: int, batch: int) -> slice:
        """Return a rank's samples, of `batch` in equal groups."""
        return slice(*bounds(batch, self.group(rank), self.batch))

    def entries(self, rank: int, d: int) -> slice:
        """Return a rank's entries or rows, of `d` in equal shares."""
        return slice(*bounds(d, self.row(rank), self.rows))


def bounds(length: Any, part: Any, count: Any) -> tuple[Any, Any]:
    """Return the bounds of one of `count` parts of almost equal length; takes arrays too."""
    return length * part // count, length * (part + 1) // count


def check_grid(grid: Any, size: int | None) -> Grid:
    """Return a grid for `size` ranks, if that is known; by default all share the chain."""
    if grid is None and size is not None:
        return Grid(size)
    try:
        checked = Grid(*itertools.islice(grid, 4))
    except Exception:  # if it is no sequence, or one of another length
        raise InputError(
            f"grid is {short(grid)}; expected (chain, batch) or (chain, batch, rows)"
        ) from None
    counts = (check_count(f"grid.{name}", getattr(checked, name), 1) for name in Grid._fields)
    checked = Grid(*counts)
    if size not in (None, checked.size):
        raise InputError(f"grid is {checked}; expected {size} ranks in all")
    return checked
