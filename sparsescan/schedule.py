"""Schedules: which pairs of a chain meet, and when. No numbers and no arrays of them.

The scanned elements are numbered as in the paper: element 0 is the gradient, element ``k`` the
``k``-th Jacobian of the chain. A node is an interval ``[start, stop)`` of elements, the product of
all of them; an operation ``(start, mid, stop)`` makes it from two neighbours,

    [start, stop) = [start, mid) ◇ [mid, stop),        A ◇ B = B·A.

Intervals that start at 0 contain the gradient and are vectors, all others are matrices. The scan's
results are the prefixes ``[0, 1), [0, 2), …, [0, n)``. Nothing else needs to be said about a
schedule: an operand is an element or has been made before, and every prefix is made once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError, InputTypeError

__all__ = ["Level", "Schedule", "check_count"]


@dataclass(frozen=True, eq=False)
class Level:
    """Runs that do not depend on each other; the operations of one run follow one another.

    Attributes
    ----------
    name : str
        What the level does, as printed by a plan: ``"up-sweep 0"``, ``"linear"``, …
    ops : ndarray of int64, shape (m, 3)
        ``(start, mid, stop)`` of every operation.
    runs : ndarray of int64, shape (r + 1,)
        Run ``i`` is ``ops[runs[i]:runs[i + 1]]``.
    """

    name: str
    ops: NDArray[np.int64]
    runs: NDArray[np.int64]

    @property
    def depth(self) -> int:
        """Operations of the longest run: the level's steps when workers are unlimited."""
        return int(np.diff(self.runs).max(initial=0))


class Schedule:
    """An order in which an exclusive scan over ``n`` Jacobians combines its elements.

    Make one with :meth:`linear`, :meth:`blelloch`, :meth:`truncated` or :meth:`chunked`.

    Attributes
    ----------
    n : int
        Number of Jacobians, which is the number of gradients an exclusive scan returns.
    levels : tuple of Level
        The levels, in the order in which they run.
    chunks : int or None
        Number of chunks, of a chunked schedule.

    Notes
    -----
    The last Jacobian does not enter an exclusive scan, so no operation touches element ``n``; the
    products that Algorithm 1 of the paper writes to ``a[n]`` and then overwrites with the identity
    are left out. An inclusive scan appends one operation, ``[0, n + 1) = [0, n) ◇ [n, n + 1)``.
    """

    __slots__ = ("_text", "chunks", "levels", "n")

    def __init__(
        self, n: int, levels: Iterable[Level], text: str, chunks: int | None = None
    ) -> None:
        self.n = n
        self.chunks = chunks
        self.levels = tuple(level for level in levels if len(level.ops))
        self._text = text

    @classmethod
    def linear(cls, n: int) -> Schedule:
        """Back-propagation: one matrix-vector product after the other, ``n - 1`` steps.

        Parameters
        ----------
        n : int
            Number of Jacobians.

        Returns
        -------
        Schedule

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.linear(8).depth
        7
        """
        n = check_count("n", n, 0)
        return cls(n, [_level("linear", [_sweep(0, n)])], f"linear({n})")

    @classmethod
    def blelloch(cls, n: int) -> Schedule:
        """The paper's Algorithm 1: at most ``2⌈log₂(n + 1)⌉ - 1`` steps.

        Parameters
        ----------
        n : int
            Number of Jacobians.

        Returns
        -------
        Schedule

        Notes
        -----
        Modified Blelloch scan of BPPSA (MLSys 2020), Algorithm 1, for any ``n``. The down-sweep
        multiplies vectors only, and the identity is never multiplied.

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.blelloch(1000).depth
        18
        """
        n = check_count("n", n, 0)
        return cls(n, _truncated_levels(n, _full_up_levels(n)), f"blelloch({n})")

    @classmethod
    def truncated(cls, n: int, up_levels: int) -> Schedule:
        """Algorithm 1 with only the first `up_levels` levels of the up-sweep.

        The products that those levels leave are scanned linearly, and the down-sweep starts from
        there, so fill-in stops after `up_levels` multiplications.

        Parameters
        ----------
        n : int
            Number of Jacobians.
        up_levels : int
            Levels of the up-sweep; 0 is the linear scan, ``⌈log₂(n + 1)⌉ - 1`` or more is Blelloch.

        Returns
        -------
        Schedule

        Notes
        -----
        BPPSA (MLSys 2020), section 5.3.

        Examples
        --------
        >>> import sparsescan
        >>> [level.name for level in sparsescan.Schedule.truncated(12, 1).levels]
        ['up-sweep 0', 'linear', 'down-sweep 0']
        """
        n = check_count("n", n, 0)
        up_levels = check_count("up_levels", up_levels, 0)
        levels = _truncated_levels(n, min(up_levels, _full_up_levels(n)))
        return cls(n, levels, f"truncated({n}, {up_levels})")

    @classmethod
    def chunked(cls, n: int, chunks: int) -> Schedule:
        """Three phases: chunks are multiplied up, their boundaries scanned, each chunk swept.

        The first chunk needs no product, since it starts at the gradient, and is swept at once; the
        last needs none, since nothing comes after it.

        Parameters
        ----------
        n : int
            Number of Jacobians.
        chunks : int
            Number of chunks, at least 1; more than ``n`` is the same as ``n``.

        Returns
        -------
        Schedule

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.chunked(1000, 32).depth
        93
        """
        n = check_count("n", n, 0)
        chunks = check_count("chunks", chunks, 1)
        used = max(1, min(chunks, n))
        bounds = [n * c // used for c in range(used + 1)]
        first = [_sweep(0, bounds[1])]
        first += [_reduction(bounds[c], bounds[c + 1]) for c in range(1, used - 1)]
        boundaries = [(0, bounds[c], bounds[c + 1]) for c in range(1, used - 1)]
        # A boundary is the last prefix of its chunk, so the sweep of that chunk stops before it.
        last = [_sweep(bounds[c], bounds[c + 1] - (c < used - 1), offset=1) for c in range(1, used)]
        levels = [
            _level("chunks", first),
            _level("boundaries", [np.array(boundaries, np.int64).reshape(-1, 3)]),
            _level("sweeps", last),
        ]
        return cls(n, levels, f"chunked({n}, {chunks})", used)

    @property
    def depth(self) -> int:
        """Operations on the critical path, with as many workers as there are runs."""
        return sum(level.depth for level in self.levels)

    @property
    def operations(self) -> int:
        """Operations in all: the work complexity, in operations."""
        return sum(len(level.ops) for level in self.levels)

    def scan(self, items: Sequence[Any], combine: Callable[[Any, Any], Any]) -> list[Any]:
        """Run the schedule in any monoid: the definition that the kernels must agree with.

        Parameters
        ----------
        items : sequence
            At least ``n`` elements; the first is the gradient.
        combine : callable
            ``combine(a, b)`` is ``a ◇ b``, with `a` the earlier element.

        Returns
        -------
        list
            The ``n`` prefixes ``items[0]``, ``items[0] ◇ items[1]``, ….

        Raises
        ------
        InputError
            If there are fewer than ``n`` items.

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.blelloch(4).scan("abcd", lambda a, b: a + b)
        ['a', 'ab', 'abc', 'abcd']
        """
        if len(items) < self.n:
            raise InputError(f"items has {len(items)} elements; expected at least {self.n}")
        nodes = {(k, k + 1): items[k] for k in range(self.n)}
        for level in self.levels:
            for start, mid, stop in level.ops.tolist():
                nodes[start, stop] = combine(nodes[start, mid], nodes[mid, stop])
        return [nodes[0, k + 1] for k in range(self.n)]

    def __repr__(self) -> str:
        return f"Schedule.{self._text}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


def check_count(name: str, value: int, least: int) -> int:
    """`value` as an integer of at least `least`, or an error that names it."""
    try:
        value = operator.index(value)
    except TypeError:
        raise InputTypeError(f"{name} is {value!r}; expected an integer") from None
    if value < least:
        raise InputError(f"{name} is {value}; expected at least {least}")
    return value


def _level(name: str, runs: list[NDArray[np.int64]]) -> Level:
    runs = [run for run in runs if len(run)]
    ops = np.concatenate([np.empty((0, 3), np.int64), *runs])
    return Level(name, ops, np.cumsum([0] + [len(run) for run in runs], dtype=np.int64))


def _sweep(start: int, stop: int, offset: int = 0) -> NDArray[np.int64]:
    """Prefixes up to `stop` from the one up to ``start + 1 - offset``, one element a step."""
    mid = np.arange(start + 1 - offset, stop, dtype=np.int64)
    return np.stack([np.zeros_like(mid), mid, mid + 1], axis=1)


def _reduction(start: int, stop: int) -> NDArray[np.int64]:
    """The product ``[start, stop)``, one element a step."""
    mid = np.arange(start + 1, stop, dtype=np.int64)
    return np.stack([np.full_like(mid, start), mid, mid + 1], axis=1)


def _full_up_levels(n: int) -> int:
    """``⌈log₂(n + 1)⌉ - 1``, the up-sweep levels of Algorithm 1."""
    return max(n.bit_length() - 1, 0)


def _truncated_levels(n: int, up_levels: int) -> list[Level]:
    levels = []
    for d in range(up_levels):
        start = np.arange(0, n, 2 << d, dtype=np.int64)
        mid = start + (1 << d)
        # r = min(i + 2^(d+1) - 1, n) in the paper; a node that would hold element n is not needed.
        stop = start + (2 << d)
        levels.append(_single(f"up-sweep {d}", start, mid, stop, keep=stop <= n))
    mid = np.arange(1 << up_levels, n, 1 << up_levels, dtype=np.int64)
    stop = mid + (1 << up_levels)
    keep = stop <= n
    linear = np.stack([np.zeros_like(mid), mid, stop], axis=1)[keep]
    levels.append(_level("linear", [linear]))
    for d in reversed(range(up_levels)):
        mid = np.arange(2 << d, n, 2 << d, dtype=np.int64)
        stop = mid + (1 << d)
        levels.append(_single(f"down-sweep {d}", np.zeros_like(mid), mid, stop, keep=stop <= n))
    return levels


def _single(name: str, *columns: NDArray[np.int64], keep: NDArray[np.bool_]) -> Level:
    """A level in which every run is one operation."""
    ops = np.stack(columns, axis=1)[keep]
    return Level(name, ops, np.arange(len(ops) + 1, dtype=np.int64))
