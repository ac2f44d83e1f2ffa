"""What is known about vectors for any values of their leaves: constant units, and bounds."""

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
    """What is known about a vector.

    Attributes
    ----------
    where : ndarray of bool
        Which units are constant.
    value : ndarray of float64
        The value of these units; anything for others.
    """

    where: NDArray[np.bool_]
    value: NDArray[np.float64]


def is_zero(known: Known) -> NDArray[np.bool_]:
    """Return which units of a vector are always zero."""
    zero: NDArray[np.bool_] = known.where & (known.value == 0)
    return zero


def known_of(roots: Iterable[Node], leaves: Mapping[Node, Known], size: int) -> dict[Node, Known]:
    """Return what is known about vectors and everything they depend on.

    Parameters
    ----------
    roots : iterable of Node
        The vectors.
    leaves : mapping of Node to Known
        What is known about leaves; nothing is known about missing ones.
    size : int
        How many units there are.
    """

    def rule(vector: Node, arguments: list[Known]) -> Known:
        if vector.operation in OPERATIONS:
            return _result(vector.operation, arguments)
        value = value_of(vector)
        return Known(np.full(size, value is not None), np.full(size, value or 0.0))

    return evaluate(roots, rule, leaves)


def _result(operation: str, arguments: Sequence[Known]) -> Known:
    """Return what is known about the result of an operation."""
    where = functools.reduce(np.logical_and, [known.where for known in arguments])
    with np.errstate(all="ignore"):
        value = function_of(operation)(*(known.value for known in arguments))
        value = np.broadcast_to(value, where.shape)
    if operation in ("multiply", "divide"):
        # Zero times anything is zero: patterns hold for finite numbers.
        zero = is_zero(arguments[0])
        if operation == "multiply":
            zero = zero | is_zero(arguments[1])
        return Known(where | zero, np.where(zero, 0, value))
    if operation == "where":
        condition, a, b = arguments
        chosen = np.where(condition.value != 0, a.where, b.where)
        same = a.where & b.where & (a.value == b.value)
        return Known((condition.where & chosen) | same, np.where(same, a.value, value))
    return Known(where, value)


def intervals(roots: Iterable[Node]) -> dict[Node, Interval]:
    """Return an interval for each node and everything it depends on, ignoring NaN."""
    return evaluate(roots, _interval)


def _interval(vector: Node, intervals: list[Interval]) -> Interval:
    value = value_of(vector)
    if value is not None:
        return value, value
    if vector.operation == "multiply" and vector.arguments[0] is vector.arguments[1]:
        return 0.0, max(abs(bound) for bound in intervals[0]) ** 2
    return (
        OPERATIONS[vector.operation].bounds(*intervals) if vector.operation in OPERATIONS else ANY
    )
