"""Exact derivatives of a user's function that was read once on symbols."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GradientError, InputError
from ..symbolic.pattern import Pattern, keys_of
from .derivatives import Arguments, Coloured, Differences, Function, Names, RenewedError
from .factors import Vector
from .rebuilt import Rebuilt, state_of
from .symbols import Symbols, elements
from .tape import Evaluation, Graph, RefusedError, Tape

# The most sets of branches of a function, and the most complex steps that are faster than its
# graph.
_MOST_GRAPHS, _MOST_STEPS = 64, 12
# A graph's values may differ from the function's by this many roundings. They are compared at the
# first `_FIRST` states of a backward pass, then at every `_EVERY`-th.
_ROUNDINGS, _FIRST, _EVERY = 16.0, 16, 32
# Complex steps count as exact if they agree with the graph's derivatives to this share.
_SAME = 1e-8


class Traced:
    """Derivatives of a function of NumPy that was read on symbols.

    The function is read again if it takes other branches. If it cannot be read, or the graph has
    other values, `others` computes the derivatives.

    Parameters
    ----------
    function : callable
        ``function(rebuilt, arguments)`` calls the user's function or its copy on symbols.
    user : callable
        The user's function.
    names : Names
        Names of the function and its arguments in errors.
    others : Differences
        Derivatives for functions that cannot be read.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        user: Function,
        names: Names,
        others: Differences,
    ) -> None:
        self._function, self._user, self._names, self._others = function, user, names, others
        # The graphs that runs have read, with the function's state then; and why reading failed.
        self._graphs: list[Graph] = []
        self._shared: dict[str, Any] = {"state": None, "refusal": None, "is told": False}
        self._evaluations: list[Evaluation] = []
        self.refusal: str | None = None
        self._is_known = True
        # The evaluation for the last arguments, and the arguments of its values.
        self._found: tuple[Arguments, Evaluation] | None = None
        self._at: Arguments | None = None
        self._calls = 0
        self.value, self.note = others.value, others.note

    def fresh(self) -> Traced:
        found = copy(self)
        found._others = self._others.fresh()
        found._evaluations, found._at, found._found = [], None, None
        found._calls, found._is_known = 0, True
        state = state_of(self._user)
        found.refusal = self._shared["refusal"]
        if state is not None and state == self._shared["state"]:
            found._evaluations, found._is_known = [Evaluation(each) for each in self._graphs], False
        else:
            self._graphs.clear()
        self._shared["state"] = state
        found.value, found.note = found._others.value, found._others.note
        return found

    # -- Reading -----------------------------------------------------------------------------------

    def _evaluation(self, arguments: Arguments) -> Evaluation | None:
        """Return the graph for the branches taken at these arguments, or None.

        Its values may belong to other arguments; :meth:`_there` updates them.
        """
        if self.refusal is not None:
            return None
        try:
            return self._known_or_read(arguments)
        except Exception as error:  # what the function raises on symbols is its own
            self._refuse(_told(error))
            return None

    def _known_or_read(self, arguments: Arguments) -> Evaluation:
        """Return what the function was read as, now or before, where it branches so."""
        if self._found is not None and self._found[0] is arguments:
            return self._found[1]
        self._at = None
        if not self._is_known:  # a graph of another run is right if its values are
            self._is_known = True
            if not all(map(partial(self._is_alike, arguments=arguments), self._evaluations)):
                self._evaluations = []
        for k, known in enumerate(self._evaluations):
            if known.holds(arguments):
                self._evaluations.insert(0, self._evaluations.pop(k))
                self._found = arguments, known
                return known
        found = self._read(arguments)
        self._evaluations.insert(0, found)
        self._found = arguments, found
        return found

    def _there(self, found: Evaluation, arguments: Arguments) -> Evaluation:
        """Return the evaluation at these arguments."""
        if self._at is not arguments:
            found.at(arguments)
            self._at = arguments
        return found

    def _refuse(self, why: str) -> None:
        self.refusal = self._shared["refusal"] = why
        self._at, self._found, self._evaluations = None, None, []
        if not self._shared["is told"]:
            self._shared["is told"] = True
            warnings.warn(
                f"{self._names.function} cannot be read: {self.refusal}. Its derivatives are found "
                f"by {self._others.origin}; derivatives='forward' asks for differences",
                stacklevel=2,
            )

    @property
    def origin(self) -> str:
        if self.refusal is not None:
            return f"{self._others.origin}: {self._names.function} cannot be read, {self.refusal}"
        return f"{self._names.function}, which was read"

    def _read(self, arguments: Arguments) -> Evaluation:
        """Read the function at these arguments, and compare the graph with it."""
        if len(self._evaluations) >= _MOST_GRAPHS:
            raise RefusedError(f"more than {_MOST_GRAPHS} outcomes of branches")
        tape = Tape()
        given = []
        for where, argument in enumerate(arguments):
            ids = tape.add(where, (), argument)
            ids.flags.writeable = False
            given.append(Symbols(tape, ids))
        found = self._function(Rebuilt(tape).function(self._user), tuple(given))
        results = np.asarray(elements(tape, found)).reshape(-1)
        if len(results) != len(arguments[0]):
            raise RefusedError(f"{len(results)} numbers for {len(arguments[0])}")
        graph = Graph(tape, results)
        for known in self._graphs:
            if known.is_like(graph):
                graph = known
                break
        else:
            self._graphs.append(graph)
            del self._graphs[:-_MOST_GRAPHS]
        evaluation = Evaluation(graph)
        moved = tuple(_moved(each, k) for k, each in enumerate(arguments))
        # A function with a state or random numbers differs from call to call.
        for each in (moved, arguments, arguments):
            if not self._is_alike(evaluation, each):
                raise RefusedError("values that differ from what was read")
        if not evaluation.holds(arguments):
            raise RefusedError("branches on what is not read")
        return evaluation

    def _is_alike(self, evaluation: Evaluation, arguments: Arguments) -> bool:
        """Return whether values are the function's, if it takes the branches that were read."""
        if not evaluation.holds(arguments):
            return True
        evaluation.at(arguments)
        expected, found = self.value(arguments), evaluation.results
        if (found == expected).all():
            return True
        with np.errstate(all="ignore"):
            is_alike = np.abs(found - expected) <= _ROUNDINGS * evaluation.rounding()
        is_alike |= found == expected
        return bool((is_alike | (np.isnan(found) & np.isnan(expected))).all())

    def patterns(self, arguments: Arguments, count: int) -> list[Pattern]:
        """Return the patterns in which the function depends on its first `count` arguments.

        Raises
        ------
        InputError
            If the function cannot be read.
        """
        try:
            graph = self._known_or_read(arguments).graph
        except Exception as error:
            raise InputError(
                f"pattern is None, and {self._names.function} cannot be read: {_told(error)}; "
                "expected a pattern"
            ) from error
        return [graph.pattern(where) for where in range(count)]

    # -- Compiled loops ----------------------------------------------------------------------------

    def graph(self, arguments: Arguments, patterns: list[Coloured]) -> Graph | None:
        """Return the graph for the branches taken at these arguments.

        None if the function cannot be read, or the user's patterns lack entries of its Jacobians.
        """
        found = self._evaluation(arguments)
        if found is None:
            return None
        pairs = enumerate(each.pattern for each in patterns)
        lacks = any(self._lack(found.graph, where, each) is not None for where, each in pairs)
        return None if lacks else found.graph

    def agrees(self, arguments: Arguments) -> bool:
        """Return whether the graph has the function's values; if not, stop using the graph."""
        found = self._evaluation(arguments)
        if found is not None and not self._is_alike(found, arguments):
            self._refuse("values that differ from what was read")
        return self.refusal is None

    # -- Derivatives -------------------------------------------------------------------------------

    def jacobian(
        self, arguments: Arguments, where: int, coloured: Coloured, exact: bool = True
    ) -> Vector:
        found = self._evaluation(arguments)
        if found is None:
            return self._others.jacobian(arguments, where, coloured, exact)
        lack = self._lack(found.graph, where, coloured.pattern)
        if lack is not None:
            return lack.jacobian(self._there(found, arguments), where, coloured, self._names)
        values = self._by_complex(found, arguments, where, coloured)
        if values is None:
            values = _compressed(self._there(found, arguments), where, coloured)
        return values

    def _by_complex(
        self, found: Evaluation, arguments: Arguments, where: int, coloured: Coloured | None
    ) -> Vector | None:
        """Return a derivative by complex steps, where they are exact and not many."""
        graph = found.graph
        if not graph.is_smooth or (coloured is not None and coloured.groups > _MOST_STEPS):
            return None
        values = self._others.by_complex(arguments, where, coloured)
        if values is None or ("complex", where) in graph.kept:
            return values
        # NumPy's functions may differ for complex numbers, such as those that conjugate.
        exact = _compressed(self._there(found, arguments), where, coloured)
        size = np.max(np.abs(exact), initial=0.0)
        if not np.allclose(values, exact, _SAME, _SAME * size, equal_nan=True):
            graph.is_smooth = False
            return None
        graph.kept["complex", where] = True
        return values

    def _lack(self, graph: Graph, where: int, pattern: Pattern) -> _Lack | None:
        """Return the entries of a graph's Jacobian that a pattern lacks, if any."""
        known = graph.kept.get(("lack", where))
        if known is None or known[0] is not pattern:
            own = self._exact(graph, where)
            has = np.isin(keys_of(own.pattern), keys_of(pattern), assume_unique=True)
            known = pattern, None if has.all() else _Lack(own, pattern, has)
            graph.kept["lack", where] = known
        lack: _Lack | None = known[1]
        return lack

    def along(self, arguments: Arguments, where: int) -> tuple[Vector, Vector]:
        found = self._evaluation(arguments)
        if found is None:
            return self._others.along(arguments, where)
        slope = self._by_complex(found, arguments, where, None)
        if slope is not None:
            return self._others.base(where), slope
        found = self._there(found, arguments)
        return found.results, _compressed(found, where, None)

    def in_params(self, arguments: Arguments, above: Vector) -> Vector:
        found, where = self._evaluation(arguments), len(arguments) - 1
        if found is None:
            return self._others.in_params(arguments, above)
        coloured = self._exact(found.graph, where)
        values = self._by_complex(found, arguments, where, coloured)
        if values is not None:
            return np.asarray(coloured.adjoint(values) @ above)
        return np.asarray(self._there(found, arguments).back(where, above))

    def _exact(self, graph: Graph, where: int) -> Coloured:
        """Return the pattern of a graph's Jacobian."""
        key = "coloured", where
        if key not in graph.kept:
            graph.kept[key] = Coloured(graph.pattern(where))
        found: Coloured = graph.kept[key]
        return found

    # -- Comparisons -------------------------------------------------------------------------------

    def confirm(self, arguments: Arguments, always: bool = False) -> None:
        """Compare values with the function's at some states: the function may have a state."""
        found = self._evaluation(arguments)
        if found is None:
            self._others.confirm(arguments, always)
            return
        self._calls += 1
        is_turn = self._calls <= _FIRST or not self._calls % _EVERY
        if is_turn and not self.agrees(arguments):
            raise RenewedError

    def renew(self, where: int) -> bool:
        if self.refusal is not None:
            return self._others.renew(where)
        self._refuse("wrong derivatives")
        return True

    def begin(self) -> None:
        self._others.begin()

    def settle(self) -> None:
        self._others.settle()


class _Lack:
    """The pattern of a graph that has entries outside the user's pattern.

    Parameters
    ----------
    own : Coloured
        The graph's pattern.
    given : Pattern
        The user's pattern.
    has : ndarray of bool
        Which entries of `own` are in `given`.
    """

    def __init__(self, own: Coloured, given: Pattern, has: NDArray[np.bool_]) -> None:
        self._coloured, self._has = own, has
        self._to = np.searchsorted(keys_of(given), keys_of(own.pattern)[has])

    def jacobian(self, found: Evaluation, where: int, coloured: Coloured, names: Names) -> Vector:
        """Return the values in the user's pattern; raise if an entry outside it is not 0."""
        values = _compressed(found, where, self._coloured)
        is_lost = ~self._has & (values != 0)
        if is_lost.any():
            entry = int(np.argmax(is_lost))
            number = names.number(where, int(self._coloured.pattern.indices[entry]))
            raise GradientError(
                f"{names.pattern(where)} lacks an entry: equation {self._coloured.rows[entry]} "
                f"depends on {number}; a pattern that was read holds for the first state"
            )
        kept = np.zeros(coloured.pattern.nnz)
        kept[self._to] = values[self._has]
        return kept


def _told(error: Exception) -> str:
    """Return why a function cannot be read, with the last line of the user's code."""
    why, own = (str(error) or type(error).__name__).splitlines()[0], Path(__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and path.parent != own and "site-packages" not in path.parts:
            return f"{why} ({path.name}, line {frame.lineno}: {frame.line!r})"
    return why


def _compressed(found: Evaluation, where: int, coloured: Coloured | None) -> Vector:
    """Return the values of a Jacobian from its products with the seed of each group."""
    if coloured is None:  # of a number
        return np.asarray(found.along(where, np.ones((1, 1)))[:, 0])
    columns = found.along(where, coloured.seeds.T.astype(np.float64))
    return np.asarray(columns.T.reshape(-1)[coloured.where])


def _moved(argument: object, seed: int) -> object:
    """Return a nearby argument."""
    x = np.asarray(argument, np.float64)
    by = 1 + 1e-3 * np.random.default_rng(seed).uniform(0.5, 1.0, x.shape)
    moved = x * by
    if not x.ndim:
        return float(moved)
    moved.flags.writeable = x.flags.writeable
    return moved
