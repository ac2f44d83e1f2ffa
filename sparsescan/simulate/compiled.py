"""Run the steps of small systems in one compiled loop, if the user's function was read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.marching import (
    RESIDUAL,
    Adjoints,
    March,
    Method,
    Pace,
    Rules,
    Trajectory,
    Work,
    length_of_step,
    pull_steps_back,
    take_steps,
    take_steps_to,
)
from ..kernels.cpu.tapes import CODES, Tables, Values
from .derivatives import RenewedError
from .factors import WIDE, Vector
from .newton import FAR, MARGIN, MOST, OWN, SLOW, Tolerance
from .schemes import Grads, Place, Scheme, place_of
from .tape import FLAT, SELECTIONS, Graph, real_part
from .traced import Traced

# The most unknowns of a sample, for dense factors, and the most numbers of all samples.
_SIZE, _NUMBERS = 32, 100_000
# Numbers of states that one loop has room for, where it chooses the lengths of steps.
_ROOM = 1 << 17
# A loop first takes this many steps, then more, as long as it runs no longer than this time.
_FIRST, _SECONDS = 16, 0.02
# After a step that a loop could not solve, this many run without it, at first and at most.
_APART = 64


class _Form(NamedTuple):
    """A function that was read, in the form that loops need, and its constants."""

    tables: Tables
    first: Vector
    slopes: Vector
    tangents: int


def _form_of(graph: Graph, size: int) -> _Form | None:
    """Return a graph in the form that loops need; None if they cannot run it.

    `size` is the size of matrices, 0 for explicit methods.
    """
    kept = graph.kept.get(("form", size))
    if kept is None:
        kept = graph.kept["form", size] = (_read(graph, size),)
    form: _Form | None = kept[0]
    return form


def _read(graph: Graph, size: int) -> _Form | None:
    parts, count = graph.parts, len(graph.first)
    arguments = {part.function: part for part in parts if isinstance(part.function, int)}
    places = [0, 1, 2, 3, 4] if len(arguments) == 5 else [0, None, 1, None, 2]
    leaves = [(0, 0) if k is None else arguments[k][2:] for k in places]
    depends = np.any([graph.depends(k) for k in arguments], 0)
    moves = np.zeros(len(parts), bool)
    operations: list[tuple[list[int], bool]] = []
    reads, slopes, edges, begin, at = [np.empty(0, np.int64)], [np.empty(0)], [], 0, 0
    own = [k for k in arguments if k < len(arguments) - 1]
    # The tangents of elements: their first place, and their number and first of unknowns.
    widths, firsts = np.zeros(count, np.int64), np.zeros(count, np.int64)
    leaf = arguments[0]
    widths[leaf.own], firsts[leaf.own] = 1, np.arange(leaf.size)
    columns, sums, terms, tangents = [np.arange(leaf.size)], [], [], leaf.size
    for number, part in enumerate(parts):
        if part.is_leaf:
            moves[number] = part.function in own
            continue
        moves[number] = any(moves[np.unique(graph.owners(ids))].any() for ids in part.inputs)
        m, inputs, code = part.size, list(part.inputs), CODES["product"]
        pointers = [begin, begin, begin]
        if part.is_linear:
            matrix = part.function
            rows = np.repeat(np.arange(m), np.diff(matrix.indptr))
            read = [(rows, inputs[0][matrix.indices], at + np.arange(matrix.nnz))]
            more = [read[0][1], matrix.indptr]
            slopes.append(matrix.data)
        else:
            name = (
                "positive" if part.function is real_part else getattr(part.function, "__name__", "")
            )
            if name not in CODES:
                return None
            code, more = CODES[name], inputs
            read = [(np.arange(m), ids, at + c * m + np.arange(m)) for c, ids in enumerate(inputs)]
            constant = np.ones(3 * m)
            constant[m : 2 * m] = -1.0 if name == "subtract" else 1.0
            slopes.append(-constant if name == "negative" else constant)
        for c, each in enumerate(more):
            pointers[c] = begin
            reads.append(each)
            begin += len(each)
        operations.append(([code, part.begin, m, *pointers, at], bool(moves[number])))
        at += len(slopes[-1])
        if not part.is_linear and part.function in FLAT:
            continue
        rows, ids, by = (np.concatenate(each) for each in zip(*read, strict=True))
        is_read = depends[graph.owners(ids)]
        rows, ids, by = rows[is_read], ids[is_read], by[is_read]
        edges.append(np.stack([part.begin + rows, by, ids], 1))
        if not size:
            continue
        repeats = widths[ids]
        source = np.repeat(firsts[ids], repeats) + _counting(repeats)
        all_columns = np.concatenate(columns)
        columns = [all_columns]
        keys = np.repeat(rows, repeats) * leaf.size + all_columns[source]
        is_choice = not part.is_linear and part.function in SELECTIONS
        order = np.argsort(keys, kind="stable")
        found, starts = np.unique(keys[order], return_index=True)
        choices = np.full(len(source), is_choice)
        terms.append(np.stack([np.repeat(by, repeats), source, choices], 1)[order])
        sums.append(starts + sum(map(len, terms[:-1])))
        columns.append(found % leaf.size)
        widths[part.own] = np.bincount(found // leaf.size, minlength=m)
        firsts[part.own] = tangents + np.cumsum(widths[part.own]) - widths[part.own]
        tangents += len(found)
        if tangents > 50 * _NUMBERS:
            return None
    results = graph.results
    repeats = widths[results]
    source = np.repeat(firsts[results], repeats) + _counting(repeats)
    rows, column = np.repeat(np.arange(len(results)), repeats), np.concatenate(columns)[source]
    to = rows * size + column % max(size, 1)
    operations.sort(key=lambda each: each[1])
    ends = [np.array([sum(map(len, terms))])]
    tables = Tables(
        np.array([each for each, _ in operations], np.uint64).reshape(-1, 7),
        np.concatenate(reads).astype(np.uint32),
        np.concatenate([*sums, *ends]).astype(np.uint64),
        np.concatenate([*terms, np.empty((0, 3), np.int64)]).astype(np.uint64),
        np.stack([source, to], 1).astype(np.uint64),
        np.concatenate([*edges, np.empty((0, 3), np.int64)]).astype(np.uint64),
        results.astype(np.uint64),
        graph.guards.astype(np.uint64),
        graph.expected,
        np.array(leaves, np.int64),
        sum(not moving for _, moving in operations),
    )
    return _Form(tables, graph.first, np.concatenate(slopes), tangents)


def _counting(repeats: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``0, …, r - 1`` for each `r`."""
    return np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)


class Steps(NamedTuple):
    """Steps that were taken.

    Attributes
    ----------
    times : list of float
        The times of all states.
    lengths : list of float
        The lengths of steps.
    states : list of ndarray
        The initial state, and the state after each step; only the last two if not all are kept.
    inner : list of ndarray
        The states within each step.
    newton : list of int
        Newton's iterations of each step.
    keeps_all : bool
        Whether all states, and the states within steps, are kept.
    """

    times: list[float]
    lengths: list[float]
    states: list[Vector]
    inner: list[Vector]
    newton: list[int]
    keeps_all: bool

    @classmethod
    def of(cls, t0: float, u0: Vector, keeps_all: bool) -> Steps:
        """Return a record without steps."""
        return cls([t0], [], [u0], [], [], keeps_all)

    def add(self, times: Any, lengths: Any, newton: Any, states: Any, inner: Any) -> None:
        """Add steps: the times and states that they end at, and so on."""
        self.times.extend(times)
        self.lengths.extend(lengths)
        self.newton.extend(newton)
        self.states.extend(states)
        if self.keeps_all:
            self.inner.extend(inner)
        else:
            del self.states[:-2]


def _size_of(scheme: Scheme, samples: int, n: int) -> int:
    """Return the size of the matrices of a step; 0 for methods that solve for nothing."""
    return n // samples if np.diag(scheme.form.a).any() else 0


def _can_run(scheme: Scheme, size: int, n: int) -> bool:
    """Return whether loops can take steps of so many numbers, with matrices of a size."""
    return isinstance(scheme.source, Traced) and size <= _SIZE and n <= _NUMBERS


class Loops:
    """The compiled loops of a run.

    Parameters
    ----------
    scheme : Scheme
        The equations of a step.
    samples : int
        How many samples there are.
    run : Trajectory
        The arrays of the run.
    tolerance : Tolerance
        How exact states are.

    Attributes
    ----------
    factorisations : int
        How many matrices were factorised.
    """

    def __init__(self, scheme: Scheme, samples: int, run: Trajectory, tolerance: Tolerance) -> None:
        equations, n = scheme.form, run.states.shape[1]
        self._scheme, self._run = scheme, run
        self._size = size = _size_of(scheme, samples, n)
        self._waits, self._apart, self._length, self._known = 0, 1, _FIRST, np.zeros(4)
        self._can = _can_run(scheme, size, n)
        if not self._can:
            return
        mass = equations.mass
        rows, columns = np.repeat(np.arange(n), np.diff(mass.indptr)), mass.indices
        places = rows * size + columns % max(size, 1)
        entries = np.stack([rows, columns, places], 1).astype(np.uint64)
        inner = np.array(equations.inner, np.int64)
        self._method = Method(
            *(equations.kind, equations.a, equations.c, inner, entries, mass.data),
            np.array(equations.estimates),
        )
        cost = float(scheme.matrices.cost)
        self._rules = Rules(*tolerance, MARGIN, FAR, SLOW, OWN, cost, MOST, WIDE)
        self._work = Work(
            np.zeros((samples, size, size)),
            np.zeros((samples, size, size)),
            np.zeros((samples, size), np.uint64),
            np.zeros((9, n)),
            np.zeros((len(inner) + 1, n)),
            self._known,
        )
        self._march: tuple[Graph, March | None] | None = None

    @classmethod
    def to_choose_lengths(
        cls, scheme: Scheme, samples: int, u0: Vector, params: Vector, tolerance: Tolerance
    ) -> Loops | None:
        """Return loops that :meth:`march`, with room for some steps; None if they cannot."""
        n, stages = len(u0), scheme.stages
        # Before there is any memory: systems may be too large for loops.
        if scheme.form.kind == RESIDUAL or not _can_run(scheme, _size_of(scheme, samples, n), n):
            return None
        count = max(_FIRST, _ROOM // (n * (1 + stages)))
        run = Trajectory(
            np.empty((count + 2, n)),
            np.empty((count, stages, n)),
            np.empty(count + 1),
            np.empty(count),
            np.empty(count, np.int64),
            params,
        )
        return cls(scheme, samples, run, tolerance)

    @property
    def factorisations(self) -> int:
        """How many matrices were factorised."""
        return int(self._known[3])

    def _waits_on(self) -> bool:
        """Return whether the next step must run without a loop."""
        if not self._waits:
            return not self._can
        self._waits -= 1
        return True

    def _march_at(self, place: Place) -> March | None:
        """Return the arguments of loops, for the branches that the function takes at the end."""
        source: Traced = self._scheme.source  # type: ignore[assignment]
        arguments = self._scheme.arguments(place)
        if self._march is None:
            source.value(arguments)  # errors of the user's function pass unchanged
        graph = source.graph(arguments, self._scheme.patterns)
        self._can = source.refusal is None
        if graph is not None and (self._march is None or self._march[0] is not graph):
            self._march = graph, self._march_of(graph)
        march = None if graph is None or self._march is None else self._march[1]
        if march is None:
            self._note(0.0, 0, is_solved=False)
        return march

    def _march_of(self, graph: Graph) -> March | None:
        form = _form_of(graph, self._size)
        if form is None:
            return None
        count = len(form.first)
        values = Values(
            form.first.copy(), form.slopes.copy(), np.ones(form.tangents), np.empty(count)
        )
        return March(form.tables, values, self._method, self._work, self._rules, self._run)

    def _is_right(self, place: Place) -> bool:
        """Return whether the graph has the function's values at the end of a step."""
        source: Traced = self._scheme.source  # type: ignore[assignment]
        self._can = source.agrees(self._scheme.arguments(place))
        return self._can

    def _note(self, seconds: float, steps: int, is_solved: bool) -> None:
        """Choose the length of the next loop, and how many steps run before it."""
        if seconds < _SECONDS and steps >= self._length:
            self._length *= 2
        self._apart = 1 if steps else min(2 * self._apart, _APART)
        if not is_solved:
            self._waits = self._apart

    def advance(self, k: int, end: int, pace: Pace | None = None) -> int:
        """Take steps from `k` on; return the first step that is left.

        With a `pace`, the loop chooses their lengths, up to a time.
        """
        if self._waits_on():
            return k
        at = place_of(self._run, k, 0)
        march = self._march_at(at._replace(states=at.states[[-1, -1]]))
        if march is None:
            return k
        start, last = time.perf_counter(), min(end, k + self._length)
        if pace is None:
            reached = take_steps(march, k, last)
            is_solved = reached == last
        else:
            reached = take_steps_to(march, k, last, pace)
            is_solved = reached == last or self._run.times[reached] == pace.stop
        self._note(time.perf_counter() - start, reached - k, is_solved)
        return reached if reached > k and self._is_right(place_of(self._run, reached - 1, 1)) else k

    def march(self, found: Steps, pace: Pace) -> bool:
        """Take steps whose lengths are chosen, and add them to others; return whether it did."""
        run, k = self._run, min(len(found.lengths), 1)
        if k == 0 and len(self._scheme.algebraic):
            return False  # whether algebraic equations hold at first is seen by `Scheme.error`
        # The step before is there, too, if there is one.
        run.states[k : k + 2] = found.states[-2:]
        run.times[: k + 1] = found.times[-1 - k :]
        run.dt[:k] = found.lengths[-1:]
        wished = min(pace.next[0], pace.longest)
        run.dt[k] = pace.ahead * length_of_step(found.times[-1], pace.stop, wished)[0]
        reached = self.advance(k, len(run.dt), pace)
        if reached == k:
            return False
        own = slice(k, reached)
        found.add(
            run.times[k + 1 : reached + 1].tolist(),
            run.dt[own].tolist(),
            run.newton[own].tolist(),
            run.states[k + 2 : reached + 2].copy(),
            run.inner[own].copy(),
        )
        return True

    def pull_back(
        self,
        k: int,
        own: Callable[[int, int], Vector],
        grads: Grads,
        in_dt: Vector,
    ) -> int:
        """Go back from the end of step ``k - 1``; return the step whose end was reached."""
        march = None if self._waits_on() else self._march_at(place_of(self._run, k - 1, 1))
        if march is None:
            return k
        n, losses = grads.old.shape
        march = march._replace(
            work=self._work._replace(rates=np.empty((losses * len(self._method.a), n)))
        )
        first = begin = max(0, k - self._length)
        above = own(begin + 1, k + 1)
        start, reached = time.perf_counter(), -1
        while reached != begin:
            if reached >= 0:
                # The loop stopped at an unsolved step: go back only to that step.
                above, begin = above[reached - begin :], reached
            trial = Adjoints(*(getattr(grads, name).copy() for name in Adjoints._fields))
            reached = pull_steps_back(march, begin, above.copy(), trial, in_dt)
        self._note(time.perf_counter() - start, k - reached, begin == first)
        if reached == k:
            return k
        if not self._is_right(place_of(self._run, reached, 1)):
            raise RenewedError
        for name, found in trial._asdict().items():
            setattr(grads, name, found)
        return reached
