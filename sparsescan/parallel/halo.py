"""Halos: which entries of a gradient ranks need, where each holds some rows of every step.

Each rank owns a range of the entries of every gradient: those that its rows of the step before
make. The other entries that its rows of the next step read are its halo, which their owners send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..symbolic.pattern import Pattern, trusted
from .communicator import Communicator

# Which of the entries that a rank owns.
Index = slice | NDArray[np.int64]


class Reach(NamedTuple):
    """The columns of a step that one rank's rows read, with all that the rank owns.

    Attributes
    ----------
    pattern : Pattern
        Pattern of the rank's rows, with columns numbered as in `columns`, in the same order.
    columns : ndarray of int64
        These columns, sorted.
    bounds : ndarray of int64, shape (ranks + 1,)
        Where the entries that each rank owns begin, and where the last one's end.
    ends : ndarray of int64, shape (ranks + 1,)
        Where the part of `columns` that each rank owns begins, and where the last one's ends.
    """

    pattern: Pattern
    columns: NDArray[np.int64]
    bounds: NDArray[np.int64]
    ends: NDArray[np.int64]

    def at(self, row: int) -> slice:
        """Return the part of `columns` that a rank owns."""
        return slice(int(self.ends[row]), int(self.ends[row + 1]))

    def wanted(self, row: int) -> Index | None:
        """Return which of the entries that a rank owns these are; None if there are none."""
        columns = self.columns[self.at(row)] - self.bounds[row]
        if not len(columns):
            return None
        first, last = int(columns[0]), int(columns[-1]) + 1
        return slice(first, last) if last - first == len(columns) else columns


@dataclass(frozen=True, eq=False)
class Halo:
    """Exchange of one rank before a step.

    Attributes
    ----------
    pattern : Pattern
        Pattern of its rows, with the columns that they read and those that it owns.
    own : slice
        The columns that it owns.
    sends : tuple of tuple
        Ranks, and the entries that they need of those that it owns.
    receives : tuple of tuple
        Ranks, and the columns that come from them.
    """

    pattern: Pattern
    own: slice
    sends: tuple[tuple[int, Index], ...]
    receives: tuple[tuple[int, slice], ...]


def length(index: Index) -> int:
    """Return the number of entries of an index."""
    return index.stop - index.start if isinstance(index, slice) else len(index)


def even(size: int, rows: int) -> NDArray[np.int64]:
    """Return the bounds of equal shares, as :meth:`Grid.entries` has them."""
    return size * np.arange(rows + 1) // rows


def take_rows(pattern: Pattern, first: int, last: int) -> Pattern:
    """Return the pattern of some rows, with all columns."""
    shape = last - first, pattern.shape[1]
    if pattern.kind == "dense":
        return Pattern.dense(shape)
    indptr = pattern.indptr[first : last + 1]
    return trusted(indptr - indptr[0], pattern.indices[indptr[0] : indptr[-1]], shape)


def reach_of(pattern: Pattern, bounds: NDArray[np.int64], row: int) -> Reach:
    """Return the columns that the rows of one rank read, if ranks own entries as `bounds` say."""
    rows, cols = pattern.shape
    if pattern.kind == "dense" and pattern.nnz:
        return Reach(pattern, np.arange(cols), bounds, bounds)
    first, last = int(bounds[row]), int(bounds[row + 1])
    indices = pattern.indices
    # Only the columns between the outermost ones have marks.
    low = min(first, int(indices.min(initial=cols)))
    high = max(last, int(indices.max(initial=-1)) + 1)
    marks = np.zeros(max(high - low, 0), bool)
    marks[indices - low] = True
    marks[first - low : last - low] = True
    columns = np.flatnonzero(marks) + low
    numbers = np.cumsum(marks) - 1
    compact = trusted(pattern.indptr, numbers[indices - low], (rows, len(columns)))
    return Reach(compact, columns, bounds, np.searchsorted(columns, bounds))


def find_halos(
    world: Communicator,
    sharers: Communicator,
    patterns: Sequence[Pattern],
    entering: NDArray[np.int64],
    reverse: bool,
) -> list[Halo]:
    """Find what this rank exchanges before each of its steps; owners are told what others need.

    Parameters
    ----------
    world : Communicator
        All ranks, which fail together.
    sharers : Communicator
        The ranks that share these steps.
    patterns : sequence of Pattern
        This rank's rows, as many steps as the others have.
    entering : ndarray of int64, shape (ranks + 1,)
        Bounds of the entries that the ranks own of the gradient that enters the first step.
    reverse : bool
        Whether the caller has the steps in the order of time, as errors have to count them.
    """
    shapes = np.array([pattern.shape for pattern in patterns], np.int64).reshape(-1, 2)
    everyone = np.array(sharers.gather(shapes))

    def find_reaches() -> tuple[list[Reach], list[int], list[dict[int, Index]]]:
        """Find different reaches, which of them each step has, and what each needs of each rank."""
        # A row for each gradient.
        bounds = np.zeros((len(patterns) + 1, sharers.size + 1), np.int64)
        bounds[0] = entering
        np.cumsum(everyone[:, :, 0].T, axis=1, out=bounds[1:, 1:])
        _check_columns(everyone, bounds, sharers.rank, world.rank, reverse)
        reaches: list[Reach] = []
        known: dict[Any, int] = {}
        numbers = []
        for pattern, owned in zip(patterns, bounds, strict=False):
            key = pattern, owned.tobytes()
            if key not in known:
                known[key] = len(reaches)
                reaches.append(reach_of(pattern, owned, sharers.rank))
            numbers.append(known[key])
        needed = [
            _needed_of(reaches, row) if row != sharers.rank else {} for row in range(sharers.size)
        ]
        return reaches, numbers, needed

    reaches, numbers, needed = world.together(find_reaches)
    asked = sharers.swap([(indices, numbers if indices else ()) for indices in needed])

    def find() -> list[Halo]:
        told = [(row, indices, steps) for row, (indices, steps) in enumerate(asked) if indices]
        halos: dict[Any, Halo] = {}
        keys = [(number, *(steps[k] for _, _, steps in told)) for k, number in enumerate(numbers)]
        for number, *others in dict.fromkeys(keys):
            reach = reaches[number]
            halos[(number, *others)] = Halo(
                reach.pattern,
                reach.at(sharers.rank),
                tuple(
                    (row, indices[other])
                    for (row, indices, _), other in zip(told, others, strict=True)
                    if other in indices
                ),
                tuple(
                    (row, reach.at(row)) for row, indices in enumerate(needed) if number in indices
                ),
            )
        return [halos[key] for key in keys]

    return world.together(find)


def _needed_of(reaches: Sequence[Reach], row: int) -> dict[int, Index]:
    """Return the entries that each reach needs of one rank, by the number of the reach."""
    indices = ((number, reach.wanted(row)) for number, reach in enumerate(reaches))
    return {number: index for number, index in indices if index is not None}


def _check_columns(
    everyone: NDArray[np.int64], bounds: NDArray[np.int64], row: int, rank: int, reverse: bool
) -> None:
    """Raise if columns differ from those of the first rank, or from the rows of the step before."""
    columns, head = everyone[:, :, 1], rank - row
    for k in np.flatnonzero(columns[row] != bounds[:-1, -1]).tolist():
        here, first = columns[row, k], columns[0, k]
        at, before = (columns.shape[1] - 1 - k, columns.shape[1] - k) if reverse else (k, k - 1)
        if here != first:
            raise InputError(
                f"jacobians[{at}] has {here} columns, but {first} on rank {head}; expected one "
                "number for all ranks that share its rows"
            )
        raise InputError(
            f"jacobians[{at}] has {here} columns, but jacobians[{before}] has {bounds[k, -1]} rows "
            f"on ranks {head} to {head + len(everyone) - 1} together; expected as many: pass this "
            "rank's rows of each Jacobian, with all columns, from the "
            + ("first layer to the last (reverse=True)" if reverse else "last layer to the first")
        )
