"""Halos: which entries of a gradient ranks need, where each holds some rows of every step.

Each rank owns a range of the entries of every gradient: of the one that leaves a step those that
its rows make. What else its rows of the next step read is its halo, which their owners send it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..pattern import Pattern, trusted
from .communicator import Communicator, Fault

__all__ = ["Halo", "Index", "Reach", "even", "find_halos", "length", "reach_of", "take_rows"]

# Some entries of what a rank owns.
Index = slice | NDArray[np.int64]


class Reach(NamedTuple):
    """The columns of a step that one rank's rows read, with all that the rank owns.

    Attributes
    ----------
    pattern : Pattern
        Of the rank's rows, its columns numbered as in `columns`: the entries keep their order.
    columns : ndarray of int64
        Which columns, sorted.
    bounds : ndarray of int64, shape (rows + 1,)
        Where the entries that each rank owns begin, and the last one's end.
    ends : ndarray of int64, shape (rows + 1,)
        Where those of `columns` that each rank owns begin, and the last one's end.
    """

    pattern: Pattern
    columns: NDArray[np.int64]
    bounds: NDArray[np.int64]
    ends: NDArray[np.int64]

    def at(self, row: int) -> slice:
        """Those of `columns` that a rank owns."""
        return slice(int(self.ends[row]), int(self.ends[row + 1]))

    def wanted(self, row: int) -> Index | None:
        """What they are among all that it owns; None if there are none."""
        columns = self.columns[self.at(row)] - self.bounds[row]
        if not len(columns):
            return None
        first, last = int(columns[0]), int(columns[-1]) + 1
        return slice(first, last) if last - first == len(columns) else columns


@dataclass(frozen=True, eq=False)
class Halo:
    """What one rank sends and receives before a step.

    Attributes
    ----------
    pattern : Pattern
        Of its rows, with the columns that they read and those that it owns.
    own : slice
        Those of its columns that it owns.
    sends : tuple of tuple
        Ranks, and which of the entries that it owns they need.
    receives : tuple of tuple
        Ranks, and which columns come from them.
    """

    pattern: Pattern
    own: slice
    sends: tuple[tuple[int, Index], ...]
    receives: tuple[tuple[int, slice], ...]


def length(index: Index) -> int:
    """How many entries they are."""
    return index.stop - index.start if isinstance(index, slice) else len(index)


def even(size: int, rows: int) -> NDArray[np.int64]:
    """Bounds of equal shares, those of :meth:`Grid.entries`."""
    return size * np.arange(rows + 1) // rows


def take_rows(pattern: Pattern, first: int, last: int) -> Pattern:
    """The pattern of some rows, with all columns."""
    shape = last - first, pattern.shape[1]
    if pattern.kind == "dense":
        return Pattern.dense(shape)
    indptr = pattern.indptr[first : last + 1]
    return trusted(indptr - indptr[0], pattern.indices[indptr[0] : indptr[-1]], shape)


def reach_of(pattern: Pattern, bounds: NDArray[np.int64], row: int) -> Reach:
    """What the rows of one rank read, if ranks own what `bounds` say."""
    rows, cols = pattern.shape
    if pattern.kind == "dense" and pattern.nnz:
        return Reach(pattern, np.arange(cols), bounds, bounds)
    first, last = int(bounds[row]), int(bounds[row + 1])
    indices = pattern.indices
    # Marks are made for the columns between the outermost ones only.
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
    rows: Communicator,
    patterns: Sequence[Pattern],
    entering: NDArray[np.int64],
    fault: Fault,
) -> list[Halo]:
    """What this rank exchanges before each of its steps: owners are told what others need of them.

    Parameters
    ----------
    world : Communicator
        All ranks, which fail together.
    rows : Communicator
        Those that share these steps.
    patterns : sequence of Pattern
        This rank's rows, as many steps as the others have.
    entering : ndarray of int64, shape (rows + 1,)
        Who owns what of the gradient that enters the first step.
    fault : Fault
        Keeps an error, on which the ranks have yet to agree.
    """
    shapes = np.array([pattern.shape for pattern in patterns], np.int64).reshape(-1, 2)
    everyone = np.array(rows.gather(shapes))
    reaches: list[Reach] = []
    numbers: list[int] = []
    wanted: list[dict[int, Index]] = []
    with fault:
        # A row for each gradient.
        bounds = np.zeros((len(patterns) + 1, rows.size + 1), np.int64)
        bounds[0] = entering
        np.cumsum(everyone[:, :, 0].T, axis=1, out=bounds[1:, 1:])
        _check_columns(everyone, bounds, rows.rank, world.rank)
        known: dict[Any, int] = {}
        for pattern, owned in zip(patterns, bounds, strict=False):
            key = pattern, owned.tobytes()
            if key not in known:
                known[key] = len(reaches)
                reaches.append(reach_of(pattern, owned, rows.rank))
            numbers.append(known[key])
        wanted = [_of_one(reaches, row) if row != rows.rank else {} for row in range(rows.size)]
    world.agree(fault.error)
    asked = rows.swap([(some, numbers if some else ()) for some in wanted])
    halos: list[Halo] = []
    with fault:
        told = [(row, some, steps) for row, (some, steps) in enumerate(asked) if some]
        made: dict[Any, Halo] = {}
        for k, number in enumerate(numbers):
            turns = number, *(steps[k] for _, _, steps in told)
            if turns not in made:
                reach = reaches[number]
                made[turns] = Halo(
                    reach.pattern,
                    reach.at(rows.rank),
                    tuple((j, some[steps[k]]) for j, some, steps in told if steps[k] in some),
                    tuple(
                        (row, reach.at(row)) for row, some in enumerate(wanted) if number in some
                    ),
                )
            halos.append(made[turns])
    return halos


def _of_one(reaches: Sequence[Reach], row: int) -> dict[int, Index]:
    """What is needed of one rank, by the number of the reach."""
    found = ((number, reach.wanted(row)) for number, reach in enumerate(reaches))
    return {number: index for number, index in found if index is not None}


def _check_columns(
    everyone: NDArray[np.int64], bounds: NDArray[np.int64], row: int, rank: int
) -> None:
    """Raise if this rank has other columns than the first one, or than rows before add up to."""
    columns, head = everyone[:, :, 1], rank - row
    for k in np.flatnonzero(columns[row] != bounds[:-1, -1]).tolist():
        here, first = columns[row, k], columns[0, k]
        if here != first:
            raise InputError(
                f"jacobians[{k}] has {here} columns, but {first} on rank {head}; expected one "
                "number for all ranks that share its rows"
            )
        raise InputError(
            f"jacobians[{k}] has {here} columns, but jacobians[{k - 1}] has {bounds[k, -1]} rows "
            f"on ranks {head} to {head + len(everyone) - 1} together; expected as many: pass this "
            "rank's rows of each Jacobian, with all columns, from the last layer to the first"
        )
