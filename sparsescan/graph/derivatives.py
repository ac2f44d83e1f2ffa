"""Derivatives of expressions, as expressions: gradients (reverse mode), slopes (forward)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from .expressions import evaluate, topological
from .functions import where
from .operations import OPERATIONS, Node, apply, is_heavy, linear_map, number, value_of

# A node, and its derivative in a direction.
WithSlope: TypeAlias = "tuple[Node, Node | None]"


def gradients(
    seeds: Sequence[tuple[Node, Node]], same: Mapping[Node, Node] | None = None
) -> dict[Node, Node]:
    """Return the gradient in each node, by reverse mode.

    Parameters
    ----------
    seeds : sequence of (Node, Node)
        Results, and the gradients in them.
    same : mapping of Node to Node, optional
        Nodes with the same values that derivatives read instead of some nodes.
    """
    grads: dict[Node, Node] = {}
    same = same or {}

    def add(to: Node, grad: Node) -> None:
        grads[to] = grads[to] + grad if to in grads else grad

    for vector, seed in seeds:
        add(vector, seed)
    for vector in reversed(topological([vector for vector, _ in seeds])):
        if vector not in grads or not vector.arguments:
            continue
        if vector.operation == "product":
            *matrix, is_transposed = vector.details
            add(vector.arguments[0], linear_map(matrix, grads[vector], not is_transposed))
            continue
        y, *arguments = (same.get(node, node) for node in (vector, *vector.arguments))
        pulled = OPERATIONS[vector.operation].pull(grads[vector], y, *arguments)
        for argument, grad in zip(vector.arguments, pulled, strict=True):
            if grad is not None and value_of(argument) is None:
                add(argument, grad)
    return grads


def with_slopes(
    roots: Sequence[Node], rule: Callable[[Node, Sequence[WithSlope]], WithSlope | None]
) -> list[WithSlope]:
    """Return nodes and their slopes, by forward mode; a slope of None is 0.

    Parameters
    ----------
    roots : sequence of Node
        The nodes.
    rule : callable
        ``rule(node, arguments)`` returns a node and its slope, from its arguments and their slopes.
        It may return None for elementwise operations, and for products with constant matrices.
    """

    def either(vector: Node, arguments: list[WithSlope]) -> WithSlope:
        if vector.operation == "number":
            return vector, None
        found = rule(vector, arguments)
        if found is None and vector.operation == "product":
            *matrix, is_transposed = vector.details
            value, slope = arguments[0]
            slope = None if slope is None else linear_map(matrix, slope, is_transposed)
            return linear_map(matrix, value, is_transposed), slope
        return found or _elementwise(vector.operation, arguments)

    values = evaluate(roots, either)
    return [values[root] for root in roots]


def _elementwise(operation: str, pairs: Sequence[WithSlope]) -> WithSlope:
    """Return an elementwise operation and its slope."""
    values = [value for value, _ in pairs]
    slopes = [slope for _, slope in pairs]
    y = apply(operation, *values)
    if operation == "where":
        _, a, b = (0 if slope is None else slope for slope in slopes)
        has_slope = slopes[1] is not None or slopes[2] is not None
        return y, where(values[0], a, b) if has_slope else None
    whole: Node | None = None
    for k, slope in enumerate(slopes):
        if slope is not None:
            # An elementwise derivative is a diagonal matrix, which is its own transpose.
            part = OPERATIONS[operation].pull(slope, y, *values)[k]
            if part is not None:
                whole = part if whole is None else whole + part
    return y, whole


def quotients_of(roots: Sequence[Node], outputs: Sequence[Node]) -> dict[Node, Node]:
    """Return quotients that equal factors of outputs, and are cheaper to compute.

    For ``h = o·tanh(c)``, `h` is kept and the backward pass needs ``o``, so it may compute
    ``tanh(c)`` as ``h/o``. If ``o`` is 0, any number will do: only `h` reads ``tanh(c)``, so each
    use of it in a gradient is multiplied by ``o``. So is its use in the gradient of ``o``, since
    the derivative of a sigmoid or an exponential has the factor ``o``. Square roots are excluded,
    since their derivative divides by them.
    """
    uses = Counter(argument for vector in topological(roots) for argument in vector.arguments)
    uses.update(roots)
    found: dict[Node, Node] = {}
    for vector in outputs:
        if vector.operation != "multiply":
            continue
        for other, factor in (vector.arguments, vector.arguments[::-1]):
            is_alone = uses[factor] == 1 and factor.operation != "sqrt"
            if is_heavy(factor) and is_alone and other.operation in ("sigmoid", "exp"):
                found[factor] = where(other <= 0, 0, vector / other)
                break
    return found


def coefficients(vector: Node, leaves: Collection[Node]) -> dict[Node, Node]:
    """Return the factor of each leaf in a node that is linear in them, such as a gradient."""
    found: dict[Node, Node] = {}
    for leaf in topological([vector], (), leaves.__contains__):
        if leaf in leaves:
            rule = partial(_towards, leaf, leaves)
            ((_, slope),) = with_slopes([vector], rule)
            assert slope is not None
            found[leaf] = slope
    return found


def _towards(
    leaf: Node, leaves: Collection[Node], vector: Node, _: Sequence[WithSlope]
) -> WithSlope | None:
    """Return a leaf and its slope, 1 or 0."""
    if vector in leaves or not vector.arguments:
        return vector, number(1) if vector is leaf else None
    return None
