"""Choose the form of every product, its own pattern or dense, for the least work in all."""

from __future__ import annotations

import itertools
from array import array

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.tables import Op
from ..symbolic.pattern import Pattern, multiply_adds
from ..symbolic.program import Program, stored
from .costs.operations import Model, Operands, Operations

# A way to make a product: whether its left operand, right operand and result are dense.
_Way = tuple[bool, bool, bool]


def choose_forms(program: Program, model: Model) -> frozenset[tuple[int, int]]:
    """Return which products ``[start, stop)`` are better stored densely than in their own pattern.

    Kernels take operands of any form, so nothing is ever converted: the form of a product changes
    only the times of the kernels that make and read it. This is dynamic programming. From the first
    product to the last, each form of a product gets the least time to make it and its operands,
    plus the time of the vectors that read it. From the last to the first, the forms of the least
    total are read off. The result is optimal if no product is an operand of two others, as in every
    named schedule.

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
    n, patterns = program.n, program.patterns
    if all(pattern.kind != "general" for pattern in patterns[n:]):
        return frozenset()
    rows = np.flatnonzero(program.ops[:-1, Op.VECTOR] == 0)
    operands = program.ops[rows, 1:3].tolist()
    ways = _ways(program, operands)
    # For each form the least time, and the forms of the operands that give it.
    least: list[dict[bool, tuple[float, bool, bool]]] = [{False: (0.0, False, False)}] * n
    times = iter(_times(program, operands, ways, model).tolist())
    for (left, right), some in zip(operands, ways, strict=True):
        known: dict[bool, tuple[float, bool, bool]] = {}
        for a, b, out in some:
            total = next(times) + least[left][a][0] + least[right][b][0]
            if out not in known or total < known[out][0]:
                known[out] = total, a, b
        least.append(known)
    chosen: dict[int, bool] = {}
    for node in reversed(range(n, len(patterns))):
        # A product that no other product reads takes its fastest form.
        form = chosen.setdefault(node, min(least[node], key=lambda form: least[node][form][0]))
        chosen |= zip(operands[node - n], least[node][form][1:], strict=True)
    intervals = np.concatenate([level.ops[:, ::2] for level in program.schedule.levels])
    return frozenset(
        (start, stop)
        for node, (start, stop) in enumerate(intervals[rows].tolist(), n)
        if chosen[node] and patterns[node].kind == "general"
    )


def _ways(program: Program, operands: list[list[int]]) -> list[list[_Way]]:
    """Return the ways to make each product; a Jacobian has its own form only."""
    forms: list[list[bool]] = [[False]] * program.n
    ways: list[list[_Way]] = []
    for node, (left, right) in enumerate(operands, program.n):
        kinds = [program.patterns[k].kind for k in (left, right, node)]
        some: list[_Way] = []
        for a, b in itertools.product(forms[left], forms[right]):
            # A product by a diagonal matrix is stored as the other operand is.
            if kinds[1] == "diagonal":
                some.append((a, b, a))
            elif kinds[0] == "diagonal":
                some.append((a, b, b))
            else:
                some += [(a, b, out) for out in (False, True)[: 1 + (kinds[2] == "general")]]
        ways.append(some)
        forms.append(sorted({out for *_, out in some}))
    return ways


def _times(
    program: Program, operands: list[list[int]], ways: list[list[_Way]], model: Model
) -> NDArray[np.float64]:
    """Return the time of every way to make each product, and vectors of it."""
    n = program.n
    # Stored patterns that differ, and whether they are those of Jacobians, by their numbers.
    numbers: dict[tuple[Pattern, bool], int] = {}
    work: dict[tuple[Pattern, Pattern], int] = {}

    def in_form(node: int, dense: bool) -> Pattern:
        pattern = program.patterns[node]
        return Pattern.dense(pattern.shape) if dense else pattern

    table = array("q")  # arrays: lists of so many tuples would take four times as much
    for node, ((left, right), some) in enumerate(zip(operands, ways, strict=True), n):
        for a, b, dense in some:
            pair = in_form(right, b), in_form(left, a)
            if pair not in work:
                work[pair] = multiply_adds(*pair)
            made = stored(*pair, program.patterns[node], dense=dense)
            keys = (pair[1], left < n), (pair[0], right < n), (made, False)
            numbered = [numbers.setdefault(key, len(numbers)) for key in keys]
            table.extend((0, *numbered, work[pair], 1, 0, numbered[2], 0, made.nnz))
    ops = np.frombuffer(table, np.int64).reshape(-1, 5)
    stores, jacobian = zip(*numbers, strict=True)
    matrices = Operands(stores, np.array(jacobian), np.full(len(stores), model.batch > 1))
    itemsize, batch = model.dtype.itemsize, model.batch
    times = model.share(Operations.count(ops[:, :4], ops[:, 4], matrices, itemsize, batch))
    # How many vectors are made of each product.
    vectors = program.ops[:-1][program.ops[:-1, Op.VECTOR] == 1]
    read = np.bincount(vectors[:, Op.RIGHT], minlength=len(program.patterns))
    total: NDArray[np.float64] = (
        times[::2] + np.repeat(read[n:], list(map(len, ways))) * times[1::2]
    )
    return total
