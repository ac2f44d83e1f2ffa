"""Vectors of a step that are known, for each unit, whatever input, state and parameters are.

A gate that multiplies what has no weights at all has no effect, so that its slopes, and entries of
a Jacobian, are always zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .expressions import evaluate
from .operations import ANY, OPERATIONS, Interval, Node, value_of
from .render.numpy import function_of


class Known(NamedTuple):
    """Knowledge of a vector.

    Attributes
    ----------
    where : ndarray of bool
        Units that always have one value.
    value : ndarray of float64
        That value, or anything.
    """

    where: NDArray[np.bool_]
    value: NDArray[np.float64]


def is_zero(given: Known) -> NDArray[np.bool_]:
    """Return which units of a vector are always zero."""
    zero: NDArray[np.bool_] = given.where & (given.value == 0)
    return zero


def known_of(roots: Iterable[Node], leaves: Mapping[Node, Known], size: int) -> dict[Node, Known]:
    """Return what is known of some vectors, and of all that they are computed from.

    Parameters
    ----------
    roots : iterable of Node
        The vectors.
    leaves : mapping of Node to Known
        What is known of leaves; of others nothing is.
    size : int
        How many units there are.
    """

    def rule(each: Node, given: list[Known]) -> Known:
        if each.operation in OPERATIONS:
            return _result(each.operation, given)
        value = value_of(each)
        return Known(np.full(size, value is not None), np.full(size, value or 0.0))

    return evaluate(roots, rule, leaves)


def _result(operation: str, given: Sequence[Known]) -> Known:
    """Return what is known of the result of an operation."""
    where = functools.reduce(np.logical_and, [each.where for each in given])
    with np.errstate(all="ignore"):
        value = function_of(operation)(*(each.value for each in given))
        value = np.broadcast_to(value, where.shape)
    if operation in ("multiply", "divide"):
        # Zero times anything, but for infinities, which have no place in a pattern.
        zero = is_zero(given[0])
        if operation == "multiply":
            zero = zero | is_zero(given[1])
        return Known(where | zero, np.where(zero, 0, value))
    if operation == "where":
        condition, a, b = given
        chosen = np.where(condition.value != 0, a.where, b.where)
        same = a.where & b.where & (a.value == b.value)
        return Known((condition.where & chosen) | same, np.where(same, a.value, value))
    return Known(where, value)


def intervals(roots: Iterable[Node]) -> dict[Node, Interval]:
    """Return between which bounds nodes are, whatever leaves are, NaN apart."""
    return evaluate(roots, _interval)


def _interval(each: Node, given: list[Interval]) -> Interval:
    value = value_of(each)
    if value is not None:
        return value, value
    if each.operation == "multiply" and each.arguments[0] is each.arguments[1]:
        return 0.0, max(abs(bound) for bound in given[0]) ** 2
    return OPERATIONS[each.operation].bounds(*given) if each.operation in OPERATIONS else ANY
