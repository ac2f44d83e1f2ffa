"""Walk through expressions, and change them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from .operations import Node, Reduction, apply

Value = TypeVar("Value")


def topological(
    roots: Iterable[Node],
    known: Container[Node] = (),
    is_leaf: Callable[[Node], object] = lambda vector: False,
) -> list[Node]:
    """Return some nodes and everything they depend on, each after its arguments.

    Parameters
    ----------
    roots : iterable of Node
        The nodes.
    known : container of Node
        Nodes to omit, with everything that only they depend on.
    is_leaf : callable
        ``is_leaf(node)`` says whether to omit the arguments of a node.
    """
    order: dict[Node, None] = {}
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        vector, is_done = stack.pop()
        if vector in order or vector in known:
            continue
        if is_done or not vector.arguments or is_leaf(vector):
            order[vector] = None
            continue
        stack.append((vector, True))
        stack += [(argument, False) for argument in reversed(vector.arguments)]
    return list(order)


def evaluate(
    roots: Iterable[Node],
    rule: Callable[[Node, list[Value]], Value],
    known: Mapping[Node, Value] | None = None,
) -> dict[Node, Value]:
    """Return a value for each root and for each node it depends on.

    Parameters
    ----------
    roots : iterable of Node
        The nodes.
    rule : callable
        ``rule(node, values)`` returns the value of a node, from the values of its arguments.
    known : mapping of Node, optional
        Values of nodes for which the rule is not called.
    """
    values = dict(known or {})
    for vector in topological(roots, values):
        values[vector] = rule(vector, [values[argument] for argument in vector.arguments])
    return values


def with_arguments(vector: Node, arguments: Sequence[Node]) -> Node:
    """Return the same operation on other arguments, simplified."""
    same = all(a is b for a, b in zip(arguments, vector.arguments, strict=True))
    return vector if same else apply(vector.operation, *arguments)


def replaced(roots: Sequence[Node], new: Mapping[Node, Node]) -> list[Node]:
    """Return expressions with some nodes replaced."""
    made = evaluate(roots, with_arguments, new)
    return [made[root] for root in roots]


def bare(roots: Sequence[Node]) -> list[Node]:
    """Return expressions with surrogates and stopped gradients replaced by their values."""

    def rule(vector: Node, arguments: list[Node]) -> Node:
        is_value = vector.operation in ("stop_gradient", "surrogate")
        return arguments[0] if is_value else with_arguments(vector, arguments)

    made = evaluate(roots, rule)
    return [made[root] for root in roots]


def is_linear(roots: Sequence[Node], kinds: Container[str]) -> bool:
    """Return whether expressions are jointly linear, without offset, in all leaves of some kinds.

    If the rules of sums, products and choices do not show it, the answer is False.
    """

    def rule(vector: Node, degrees: list[float]) -> float:
        """Return 1 if a vector is linear, 0 if it reads no such leaf, -1 if it is 0; else 2."""
        operation = vector.operation
        if operation == "number":
            return -1 if vector.details[0] == 0 else 0
        if operation in kinds or 2 in degrees:
            return 1 if operation in kinds else 2
        if 1 not in degrees:
            return 0
        if operation in ("add", "subtract"):
            return 2 if 0 in degrees else 1
        if operation == "where":
            return 2 if degrees[0] == 1 or 0 in degrees[1:] else 1
        if operation == "divide":
            return 2 if degrees[1] == 1 else 1
        if operation == "product" and isinstance(vector.details[0], Reduction):
            return 1 if vector.details[0].is_linear else 2
        return 1 if operation in ("multiply", "negative", "product") and sum(degrees) <= 1 else 2

    degrees = evaluate(roots, rule)
    return all(degrees[root] in (1, -1) for root in roots)
