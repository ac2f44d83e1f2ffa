"""Schedules: which neighbours of a chain are combined, and when, without any values.

The scanned elements are numbered as in the paper: element 0 is the gradient, element ``k`` the
``k``-th Jacobian of the chain. A node is an interval ``[start, stop)`` of elements, the product of
all of them; an operation ``(start, mid, stop)`` makes it from two neighbours,

    [start, stop) = [start, mid) ◇ [mid, stop),        A ◇ B = B·A.

Intervals that start at 0 contain the gradient and are vectors, all others are matrices. The scan's
results are the prefixes ``[0, 1), [0, 2), …, [0, n)``. A schedule is valid if each operand is an
element or was made before, and every prefix is made once.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import check_memory, host_array
from ..arrays.frozen import Frozen
from ..checks import check_count
from ..errors import Allocating, InputError, InputTypeError, short

# The most bytes of an operation while a schedule is made, and while one is checked.
_MADE, _CHECKED = 48, 400
# Schedules by name, with the number that some take.
_NAMED = re.compile(r"(linear|blelloch)|(?:(truncated|chunked):([0-9]{1,39}))")
_NAMES = "'auto', 'linear', 'blelloch', 'truncated:K' (K up-sweep levels) or 'chunked:C' (C chunks)"


@dataclass(frozen=True, eq=False)
class Level:
    """Runs that do not depend on each other; the operations of one run follow one another.

    A run makes prefixes, or one product, to which each operation adds an operand on the right. Only
    the next operation reads an intermediate result of such a product.

    Attributes
    ----------
    name : str
        The name of the level, as printed by a plan: ``"up-sweep 0"``, ``"linear"``, …
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
        """Operations of the longest run: the level's steps with unlimited workers."""
        return int(np.diff(self.runs).max(initial=0))


class Schedule(Frozen):
    """An order in which an exclusive scan over ``n`` Jacobians combines its elements.

    Make one with :meth:`linear`, :meth:`blelloch`, :meth:`truncated` or :meth:`chunked`, or build
    any schedule with :meth:`from_levels`.

    Attributes
    ----------
    n : int
        Number of Jacobians, which is the number of gradients an exclusive scan returns.
    levels : tuple of Level
        The levels, in the order in which they run.
    chunks : int or None
        Number of chunks of a chunked schedule.

    Notes
    -----
    The last Jacobian does not enter an exclusive scan, so no operation touches element ``n``; the
    products that Algorithm 1 of the paper writes to ``a[n]`` and then overwrites with the identity
    are left out. An inclusive scan appends one operation, ``[0, n + 1) = [0, n) ◇ [n, n + 1)``.
    """

    __slots__ = ("_key", "_text", "chunks", "levels", "n")

    n: int
    levels: tuple[Level, ...]
    chunks: int | None
    _text: str
    _key: str

    def __init__(self, *_: object, **__: object) -> None:
        raise InputTypeError(
            "a Schedule is made by Schedule.linear, .blelloch, .truncated, .chunked or .from_levels"
        )

    @classmethod
    def linear(cls, n: int) -> Schedule:
        """Return back-propagation: one matrix-vector product after the other, ``n - 1`` steps.

        Parameters
        ----------
        n : int
            Number of Jacobians.

        Returns
        -------
        Schedule

        Raises
        ------
        InputError, InputTypeError
            If `n` is not a valid number of Jacobians.
        MemoryLimitError
            If the operations take more memory than there is.

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.linear(8).depth
        7
        """
        n = check_count("n", n, 0)
        with _making(f"Schedule.linear({n})", n):
            return schedule_of(n, [level_of("linear", [_sweep(0, n)])], f"linear({n})")

    @classmethod
    def blelloch(cls, n: int) -> Schedule:
        """Return the paper's Algorithm 1: at most ``2⌈log₂(n + 1)⌉ - 1`` steps.

        Parameters
        ----------
        n : int
            Number of Jacobians.

        Returns
        -------
        Schedule

        Raises
        ------
        InputError, InputTypeError, MemoryLimitError
            As :meth:`linear`.

        Notes
        -----
        This is the modified Blelloch scan of BPPSA (MLSys 2020), Algorithm 1, for any ``n``. The
        down-sweep has only matrix-vector products, and never multiplies by the identity.

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.blelloch(1000).depth
        18
        """
        n = check_count("n", n, 0)
        with _making(f"Schedule.blelloch({n})", 2 * n):
            return schedule_of(n, _truncated_levels(n, _full_up_levels(n)), f"blelloch({n})")

    @classmethod
    def truncated(cls, n: int, up_levels: int) -> Schedule:
        """Return Algorithm 1 with only the first `up_levels` levels of the up-sweep.

        The products of these levels are scanned linearly, and the down-sweep starts from there. So
        fill-in stops after `up_levels` multiplications.

        Parameters
        ----------
        n : int
            Number of Jacobians.
        up_levels : int
            Levels of the up-sweep; 0 is the linear scan, ``⌈log₂(n + 1)⌉ - 1`` or more is Blelloch.

        Returns
        -------
        Schedule

        Raises
        ------
        InputError, InputTypeError, MemoryLimitError
            As :meth:`linear`.

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
        with _making(f"Schedule.truncated({n}, {up_levels})", 2 * n):
            levels = _truncated_levels(n, min(up_levels, _full_up_levels(n)))
            return schedule_of(n, levels, f"truncated({n}, {up_levels})")

    @classmethod
    def chunked(cls, n: int, chunks: int) -> Schedule:
        """Return three phases: multiply each chunk, scan the boundaries, sweep each chunk.

        The first chunk starts at the gradient, so it is swept at once and needs no product. The
        last chunk needs no product either, since nothing comes after it.

        Parameters
        ----------
        n : int
            Number of Jacobians.
        chunks : int
            Number of chunks, at least 1; more than ``n`` is the same as ``n``.

        Returns
        -------
        Schedule

        Raises
        ------
        InputError, InputTypeError, MemoryLimitError
            As :meth:`linear`.

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.chunked(1000, 32).depth
        93
        """
        n = check_count("n", n, 0)
        chunks = check_count("chunks", chunks, 1)
        used = max(1, min(chunks, n))
        with _making(f"Schedule.chunked({n}, {chunks})", 2 * n + 16 * used):
            levels = chunk_levels([n * c // used for c in range(used + 1)])
            return schedule_of(n, levels, f"chunked({n}, {chunks})", used)

    @classmethod
    def from_levels(cls, n: int, levels: Iterable[Level | tuple[str, Iterable[Any]]]) -> Schedule:
        """Check and return any schedule, given operation by operation.

        An operation ``(start, mid, stop)`` makes ``[start, stop) = [start, mid) ◇ [mid, stop)``,
        the product of elements ``start`` to ``stop - 1``; element 0 is the gradient, element ``k``
        the ``k``-th Jacobian of the chain, which are ``[0, 1)`` and ``[k, k + 1)``.

        Parameters
        ----------
        n : int
            Number of Jacobians.
        levels : iterable of (name, runs)
            The levels, in the order in which they run. `runs` is a sequence of runs, and each run a
            sequence of operations of three integers. A level of another schedule may stand in place
            of a pair. Levels and runs without operations are left out.

        Returns
        -------
        Schedule
            Two schedules made by this method are equal if their levels are. Schedules of the other
            constructors are compared by their arguments.

        Raises
        ------
        InputError
            If this is not a valid schedule for `n` Jacobians; the message names the operation.
            Every operand must be an element, or be made by an earlier level or earlier in the same
            run. No operation may touch element ``n``. No interval may be made twice, and every
            prefix ``[0, 2), …, [0, n)`` must be made once. A run of several operations must make
            only prefixes, or one product ``[start, stop)``, adding one operand after the other from
            the left; nothing else may read its intermediate results.
        InputTypeError
            If a type is wrong.

        Examples
        --------
        >>> import sparsescan
        >>> pairs = [[(0, 1, 2)], [(2, 3, 4)]]
        >>> schedule = sparsescan.Schedule.from_levels(
        ...     5, [("pairs", pairs), ("prefixes", [[(0, 2, 3)], [(0, 2, 4), (0, 4, 5)]])]
        ... )
        >>> schedule.depth
        3
        >>> schedule.scan("abcde", lambda a, b: a + b)
        ['a', 'ab', 'abc', 'abcd', 'abcde']
        """
        n = check_count("n", n, 0)
        text = f"Schedule.from_levels({n}, ...)"
        with _making(text, 0):
            given = [_read_level(i, level, n) for i, level in enumerate(_each(levels))]
            count = sum(len(level.ops) for level in given)
            check_memory(text, _CHECKED * count)
            _Operations(n, given).check()
            # Equal offsets have an empty run between them.
            kept = [Level(level.name, level.ops, np.unique(level.runs)) for level in given]
            kept = [level for level in kept if len(level.ops)]
            digest = hashlib.blake2b(str(n).encode(), digest_size=16)
            for level in kept:
                digest.update(f"\n{level.name}\n{len(level.runs)} {len(level.ops)}\n".encode())
                for array in (level.runs, level.ops):
                    digest.update(array.data)
            key = digest.hexdigest()
            text = f"from_levels({n}, <{len(kept)} levels, {count} operations, {key[:8]}>)"
            return schedule_of(n, kept, text, key=key)

    @property
    def depth(self) -> int:
        """Operations on the critical path, with as many workers as there are runs."""
        return sum(level.depth for level in self.levels)

    @property
    def operations(self) -> int:
        """Operations in all: the work complexity, in operations."""
        return sum(len(level.ops) for level in self.levels)

    def scan(self, items: Sequence[Any], combine: Callable[[Any, Any], Any]) -> list[Any]:
        """Run the schedule in any monoid. Kernels must agree with this definition.

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
        InputError, InputTypeError
            If there are fewer than ``n`` items, or they are no sequence.

        Examples
        --------
        >>> import sparsescan
        >>> sparsescan.Schedule.blelloch(4).scan("abcd", lambda a, b: a + b)
        ['a', 'ab', 'abc', 'abcd']
        """
        if not callable(combine):
            raise InputTypeError(f"combine is {short(combine)}; expected a function")
        try:
            count = len(items)
            nodes = {(k, k + 1): items[k] for k in range(min(self.n, count))}
        except Exception as error:  # of what is no sequence, or of a caller's own
            raise InputTypeError(f"items cannot be read: {error}; expected a sequence") from None
        if count < self.n:
            raise InputError(f"items has {count} elements; expected at least {self.n}")
        for level in self.levels:
            for start, mid, stop in level.ops.tolist():
                nodes[start, stop] = combine(nodes[start, mid], nodes[mid, stop])
        return [nodes[0, k + 1] for k in range(self.n)]

    def __reduce__(self) -> tuple[Any, ...]:
        return schedule_of, (self.n, self.levels, self._text, self.chunks, self._key)

    def __repr__(self) -> str:
        return f"Schedule.{self._text}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def schedule_of(
    n: int, levels: Iterable[Level], text: str, chunks: int | None = None, key: str | None = None
) -> Schedule:
    """Return the schedule with these levels, which must be valid and not shared.

    It prints as `text`, and equals schedules with the same key, by default the text.
    """
    schedule = object.__new__(Schedule)
    kept = tuple(level for level in levels if len(level.ops))
    for level in kept:
        # Kernels follow the operations, and check none.
        level.ops.setflags(write=False)
        level.runs.setflags(write=False)
    schedule._set(n=n, chunks=chunks, levels=kept)
    schedule._text, schedule._key = text, key or text
    return schedule


@contextmanager
def _making(what: str, operations: int) -> Iterator[None]:
    """Raise, before anything is made, if memory does not suffice for the operations."""
    check_memory(what, _MADE * operations)
    with Allocating(what):
        yield


def chunk_levels(bounds: Sequence[int]) -> list[Level]:
    """Return the levels of a chunked scan of elements ``bounds[c]`` to ``bounds[c + 1] - 1``."""
    used = len(bounds) - 1
    first = [_sweep(0, bounds[1])]
    first += [_reduction(bounds[c], bounds[c + 1]) for c in range(1, used - 1)]
    boundaries = [[(0, bounds[c], bounds[c + 1]) for c in range(1, used - 1)]]
    # A boundary is the last prefix of its chunk, so the sweep of that chunk stops before it.
    last = [_sweep(bounds[c], bounds[c + 1] - (c < used - 1), offset=1) for c in range(1, used)]
    return [level_of("chunks", first), level_of("boundaries", boundaries), level_of("sweeps", last)]


def read_schedule(schedule: Any, n: int) -> Schedule | None:
    """Return the given or named schedule for `n` Jacobians; None for ``"auto"``."""
    if isinstance(schedule, Schedule):
        if schedule.n != n:
            raise InputError(f"schedule is {short(schedule)}; expected one for {n} Jacobians")
        return schedule
    if not isinstance(schedule, str):
        raise InputError(f"schedule is {short(schedule)}; expected {_NAMES}, or a Schedule")
    if schedule == "auto":
        return None
    named = _NAMED.fullmatch(schedule)
    if named is None:
        raise InputError(f"schedule is {short(schedule)}; expected {_NAMES}")
    plain, numbered, number = named.groups()
    arguments = () if plain else (int(number),)
    schedule_by_name: Schedule = getattr(Schedule, plain or numbered)(n, *arguments)
    return schedule_by_name


def printed_schedule(text: str, n: int) -> Schedule | None:
    """Return the schedule for `n` Jacobians that prints as `text`; None for one without a name."""
    kind, _, arguments = text.removeprefix("Schedule.").removesuffix(")").partition("(")
    name = ":".join([kind, *arguments.split(", ")[1:]])
    return read_schedule(name, n) if _NAMED.fullmatch(name) else None


def level_of(name: str, runs: Iterable[ArrayLike]) -> Level:
    """Return the level with these runs, each a list or array of operations that may be empty."""
    parts = [np.reshape(run, (-1, 3)).astype(np.int64, copy=False) for run in runs]
    ops = np.concatenate([np.empty((0, 3), np.int64), *parts])
    counts = [len(part) for part in parts if len(part)]
    return Level(name, ops, np.cumsum([0, *counts], dtype=np.int64))


def _sweep(start: int, stop: int, offset: int = 0) -> NDArray[np.int64]:
    """Return prefixes up to `stop`, from the one up to ``start + 1 - offset``, one by one."""
    mid = np.arange(start + 1 - offset, stop, dtype=np.int64)
    return np.stack([np.zeros_like(mid), mid, mid + 1], axis=1)


def _reduction(start: int, stop: int) -> NDArray[np.int64]:
    """Return the operations of the product ``[start, stop)``, one element per step."""
    mid = np.arange(start + 1, stop, dtype=np.int64)
    return np.stack([np.full_like(mid, start), mid, mid + 1], axis=1)


def _full_up_levels(n: int) -> int:
    """Return ``⌈log₂(n + 1)⌉ - 1``, the up-sweep levels of Algorithm 1."""
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
    levels.append(level_of("linear", [linear]))
    for d in reversed(range(up_levels)):
        mid = np.arange(2 << d, n, 2 << d, dtype=np.int64)
        stop = mid + (1 << d)
        levels.append(_single(f"down-sweep {d}", np.zeros_like(mid), mid, stop, keep=stop <= n))
    return levels


def _single(name: str, *columns: NDArray[np.int64], keep: NDArray[np.bool_]) -> Level:
    """Return a level in which every run is one operation."""
    ops = np.stack(columns, axis=1)[keep]
    return Level(name, ops, np.arange(len(ops) + 1, dtype=np.int64))


def _each(levels: Any) -> Iterator[Any]:
    """Yield the levels, or raise an error."""
    try:
        if _is_table(levels):
            raise TypeError
        left = iter(levels)
    except Exception:  # of what is no iterable, or of a caller's own
        raise InputTypeError(f"levels is {short(levels)}; expected pairs (name, runs)") from None
    while True:
        try:
            level = next(left)
        except StopIteration:
            return
        except Exception as error:  # of a caller's own
            raise InputTypeError(f"levels cannot be read: {error}") from None
        yield level


def _is_table(value: Any) -> bool:
    """Return whether a value is masked or sparse, so that its rows cannot be read directly."""
    return isinstance(value, np.ma.MaskedArray) or sp.issparse(value)


def _listed(run: Any) -> Any:
    """Return a list of the operations of a run, or the argument itself if it cannot be one."""
    is_array = isinstance(run, np.ndarray) and run.dtype != object
    if _is_table(run) or (is_array and run.shape[1:] != (3,)):
        return run
    return list(run)


def _read_level(i: int, level: Any, n: int) -> Level:
    """Return the `i`-th level as new arrays, with operations on intervals within ``[0, n)``."""
    ops: Any
    if isinstance(level, Level):
        # Copies are made before anything is checked: the caller's arrays may change.
        ops = np.array(host_array(f"levels[{i}].ops", level.ops))
        runs = np.array(host_array(f"levels[{i}].runs", level.runs))
        name = level.name
        if ops.ndim == 0:
            raise InputError(f"levels[{i}].ops has shape (); expected (m, 3)")
        good = runs.dtype.kind in "iu" and runs.ndim == 1 and len(runs) > 0
        if not good or runs[0] != 0 or runs[-1] != len(ops) or (runs[1:] < runs[:-1]).any():
            raise InputError(
                f"levels[{i}].runs is {short(runs.tolist())}; expected integers that rise from 0 "
                f"to {len(ops)}, the number of operations"
            )
    else:
        try:
            name, given = level
            if _is_table(given):
                raise TypeError
            parts = []
            for run in given:
                parts.append(_listed(run))
                if not isinstance(parts[-1], list):
                    break  # There may be millions more of no use.
        except Exception:  # of what is no iterable, or of a caller's own
            raise InputTypeError(
                f"levels[{i}] is {short(level)}; expected (name, runs), each run a sequence of "
                "operations (start, mid, stop)"
            ) from None
        if parts and not isinstance(parts[-1], list):
            raise InputTypeError(
                f"run {len(parts) - 1} of levels[{i}] is {short(parts[-1])}; expected a sequence "
                "of operations (start, mid, stop)"
            )
        runs = np.cumsum([0] + [len(part) for part in parts])
        ops = list(itertools.chain.from_iterable(parts))
    if not isinstance(name, str):
        raise InputTypeError(f"levels[{i}] has the name {short(name)}; expected a string")
    if not name.isprintable():
        raise InputError(f"levels[{i}] has the name {short(name)}; expected printable characters")
    runs = runs.astype(np.int64)
    return Level(name, _read_ops(ops, n, lambda op: _where(i, name, runs, op)), runs)


def _read_ops(given: Any, n: int, where: Callable[[int], str]) -> NDArray[np.int64]:
    """Return a new array of operations, or raise an error that says `where` it is wrong."""
    if len(given) == 0:
        return np.empty((0, 3), np.int64)
    try:
        masked = isinstance(given, list) and any(map(_is_table, given))
        ops = np.empty(0) if masked else np.array(given, order="C")
    except Exception:  # of what is no array
        ops = np.empty(0)
    if ops.dtype.kind in "iu" and ops.shape == (len(given), 3):
        start, mid, stop = ops.T
        if ((start >= 0) & (start < mid) & (mid < stop) & (stop <= n)).all():
            return ops.astype(np.int64)
    checked = []
    for k, op in enumerate(given):
        try:
            if _is_table(op):
                raise TypeError
            start, mid, stop = map(operator.index, op)
        except Exception:  # of what are no integers
            raise InputTypeError(
                f"{where(k)} has operation {short(op)}; expected integers (start, mid, stop)"
            ) from None
        checked.append((start, mid, stop))
        if not 0 <= start < mid < stop <= n:
            raise InputError(
                f"{where(k)} has operation {short(checked[-1])}; expected "
                f"0 <= start < mid < stop <= {n}"
            )
    return np.array(checked, np.int64)


class _Operations:
    """The operations of all levels, on intervals within ``[0, n)``, and their validity check."""

    def __init__(self, n: int, levels: Sequence[Level]) -> None:
        none = np.empty((0, 3), np.int64)
        counts = np.array([len(level.ops) for level in levels], np.int64)
        lengths = np.concatenate([none[:, 0], *[np.diff(level.runs) for level in levels]])
        self._n = n
        self._levels = levels
        self._ops = np.concatenate([none, *[level.ops for level in levels]])
        self._level_of = np.repeat(np.arange(len(levels)), counts)
        self._run_of = np.repeat(np.arange(len(lengths)), lengths)

    def check(self) -> None:
        """Raise unless this is a schedule."""
        # Prefixes come first: from there on the square of `n` is an int64, since there are as many.
        self._check_prefixes()
        self._check_runs(self._count_readers())

    def _check_prefixes(self) -> None:
        ends = np.unique(self._ops[self._ops[:, 0] == 0, 2])
        if len(ends) < self._n - 1:
            gap = np.append(ends != np.arange(2, len(ends) + 2), True).argmax()
            raise InputError(
                f"levels make no [0, {gap + 2}); expected all prefixes, [0, 2) to [0, {self._n})"
            )

    def _count_readers(self) -> NDArray[np.int64]:
        """Return how many operations read each result; raise if an operand is made too late."""
        start, mid, stop = self._ops.T
        count = len(self._ops)
        intervals = start * (self._n + 1) + stop
        order = np.argsort(intervals, kind="stable")
        in_order = intervals[order]
        again = order[1:][in_order[1:] == in_order[:-1]]
        if len(again):
            op = int(again.min())
            raise self._error(op, f", but {self._result(op)} has been made before")

        left, right = np.concatenate([start, mid]), np.concatenate([mid, stop])
        products = np.flatnonzero(right - left > 1)
        wanted = left[products] * (self._n + 1) + right[products]
        reader = products % max(count, 1)
        maker = order[np.minimum(np.searchsorted(in_order, wanted), count - 1)]
        in_time = self._level_of[maker] < self._level_of[reader]
        in_time |= (self._run_of[maker] == self._run_of[reader]) & (maker < reader)
        fine = (intervals[maker] == wanted) & in_time
        if not fine.all():
            first = int(np.where(fine, count, reader).argmin())
            operand = f"[{left[products[first]]}, {right[products[first]]})"
            raise self._error(
                int(reader[first]),
                f", which reads {operand}; expected an element, or what an earlier level, or an "
                "earlier operation of the same run, makes",
            )
        return np.bincount(maker, minlength=count)

    def _check_runs(self, readers: NDArray[np.int64]) -> None:
        """Raise unless every run makes prefixes, or one product from the left to the right."""
        start, mid, stop = self._ops.T
        op = np.flatnonzero(self._run_of[1:] == self._run_of[:-1])
        mixed = op[(start[op] == 0) != (start[op + 1] == 0)]
        if len(mixed):
            raise self._error(
                int(mixed[0]) + 1, "; expected a run to make prefixes only, or other products only"
            )
        extends = (start[op + 1] == start[op]) & (mid[op + 1] == stop[op]) & (readers[op] == 1)
        broken = op[(start[op] > 0) & ~extends]
        if len(broken):
            raise self._error(
                int(broken[0]),
                f"; expected {self._result(int(broken[0]))} to be the left operand of the run's "
                "next operation, and of no other",
            )

    def _result(self, op: int) -> str:
        start, _, stop = self._ops[op]
        return f"[{start}, {stop})"

    def _error(self, op: int, fault: str) -> InputError:
        i = int(self._level_of[op])
        level = self._levels[i]
        where = _where(i, level.name, level.runs, op - int(np.searchsorted(self._level_of, i)))
        return InputError(f"{where} has operation {tuple(self._ops[op].tolist())}{fault}")


def _where(i: int, name: str, runs: NDArray[np.int64], op: int) -> str:
    """Return which run holds the operation `op` of a level."""
    return f"run {np.searchsorted(runs, op, side='right') - 1} of levels[{i}] ({name!r})"
