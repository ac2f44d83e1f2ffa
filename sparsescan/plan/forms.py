"""The form of every product, its own sparse one or dense, at the least work in all."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.tables import Op
from ..symbolic.pattern import Pattern, multiply_adds
from ..symbolic.program import Program, stored
from .costs.operations import Model, Operands, Operations
from .elimination import minimise

_OWN, _DENSE = 0, 1


class _Forms(NamedTuple):
    """Forms of the operands and of the result of a product."""

    left: int
    right: int
    out: int


def choose_forms(program: Program, model: Model) -> frozenset[tuple[int, int]]:
    """Return which products ``[start, stop)`` are better stored densely than in their own pattern.

    Kernels take operands of any form, so nothing is ever converted: what another form would save is
    in the times of the kernels that read it. Every product is a node of a graph whose choices are
    the forms of its operands and its own, at the time that it then takes, and that of the matrix-
    vector products that read it; on the edge to a product that reads it, all choices cost infinity
    in which the two disagree. The least is found by node and edge elimination.

    Parameters
    ----------
    program : Program
        With all products in their own patterns.
    model : Model
        Times of operations.

    Returns
    -------
    frozenset of tuple
        The argument `dense` of a :class:`Program`.
    """
    if all(pattern.kind != "general" for pattern in program.patterns[program.n :]):
        return frozenset()
    graph = _Graph(program)
    choices, _ = minimise(graph.node_costs(model), graph.edges())
    chosen = [ways[choice] for ways, choice in zip(graph.ways, choices.tolist(), strict=True)]
    intervals = np.concatenate([level.ops[:, ::2] for level in program.schedule.levels])
    return frozenset(
        (start, stop)
        for (start, stop), way, pattern in zip(
            intervals[graph.rows].tolist(), chosen, graph.patterns, strict=True
        )
        if way.out == _DENSE and pattern.kind == "general"
    )


# Many products have the same ways: they share one tuple, and one table.
@functools.cache
def _ways(
    lefts: tuple[int, ...], rights: tuple[int, ...], left: str, right: str, out: str
) -> tuple[_Forms, ...]:
    """Return the ways to make a product: forms of its operands, and kinds of all three patterns."""
    ways: list[_Forms] = []
    for a, b in itertools.product(lefts, rights):
        # A product by a diagonal matrix is stored as the other operand is.
        if right == "diagonal":
            ways.append(_Forms(a, b, a))
        elif left == "diagonal":
            ways.append(_Forms(a, b, b))
        else:
            ways += [_Forms(a, b, c) for c in ((_OWN, _DENSE) if out == "general" else (_OWN,))]
    return tuple(ways)


@functools.cache
def _disagreement(
    made: tuple[_Forms, ...], read: tuple[_Forms, ...], side: str
) -> NDArray[np.float64]:
    """Return infinity where a product is read in another form than it was made in, else zero."""
    outputs = np.array([way.out for way in made])
    taken = np.array([getattr(way, side) for way in read])
    return np.where(outputs[:, None] == taken, 0.0, np.inf)


class _Graph:
    """The products of a program, in the order in which they are made, and the ways to make them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.rows = np.flatnonzero(program.ops[:-1, Op.VECTOR] == 0)
        self.patterns = program.patterns[program.n :]
        self.ways: list[tuple[_Forms, ...]] = []
        for row in self.rows.tolist():
            left, right, out = program.ops[row, 1:].tolist()
            kinds = (program.patterns[node].kind for node in (left, right, out))
            self.ways.append(_ways(self._forms(left), self._forms(right), *kinds))

    def _forms(self, node: int) -> tuple[int, ...]:
        """Return the forms in which a node can be read."""
        if node < self._program.n:
            return (_OWN,)
        return tuple(sorted({way.out for way in self.ways[node - self._program.n]}))

    def _pattern(self, node: int, form: int) -> Pattern:
        pattern = self._program.patterns[node]
        return Pattern.dense(pattern.shape) if form == _DENSE else pattern

    def node_costs(self, model: Model) -> list[NDArray[np.float64]]:
        """Return the times of every way to make each product, and vectors of it."""
        program = self._program
        # Stored patterns that differ, and whether they are those of Jacobians, by their numbers.
        numbers: dict[tuple[Pattern, bool], int] = {}
        work: dict[tuple[Pattern, Pattern], int] = {}
        table = []
        for row, ways in zip(self.rows.tolist(), self.ways, strict=True):
            left, right, out = program.ops[row, 1:].tolist()
            for way in ways:
                pair = self._pattern(right, way.right), self._pattern(left, way.left)
                if pair not in work:
                    work[pair] = multiply_adds(*pair)
                made = stored(*pair, program.patterns[out], dense=way.out == _DENSE)
                keys = (pair[1], left < program.n), (pair[0], right < program.n), (made, False)
                a, b, c = (numbers.setdefault(key, len(numbers)) for key in keys)
                table += [(0, a, b, c, work[pair]), (1, 0, c, 0, made.nnz)]
        ops = np.array(table, np.int64)
        stores, jacobian = zip(*numbers, strict=True)
        matrices = Operands(stores, np.array(jacobian), np.full(len(stores), model.batch > 1))
        itemsize, batch = model.dtype.itemsize, model.batch
        times = model.share(Operations.count(ops[:, :4], ops[:, 4], matrices, itemsize, batch))
        # How many vectors are made of each product.
        ops = program.ops[:-1]
        read = np.bincount(ops[ops[:, Op.VECTOR] == 1, Op.RIGHT], minlength=len(program.patterns))
        counts = np.repeat(read[program.n :], [len(ways) for ways in self.ways])
        total = times[::2] + counts * times[1::2]
        return np.split(total, np.cumsum([len(ways) for ways in self.ways])[:-1])

    def edges(self) -> list[tuple[int, int, NDArray[np.float64]]]:
        """Return infinity wherever a product is read in another form than it was made in."""
        n, tables = self._program.n, []
        for p, row in enumerate(self.rows.tolist()):
            for side, node in zip(("left", "right"), self._program.ops[row, 1:3], strict=True):
                if node >= n:
                    disagree = _disagreement(self.ways[node - n], self.ways[p], side)
                    tables.append((int(node) - n, p, disagree))
        return tables
