"""Walk through expressions, and change them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from .operations import Node, apply

Value = TypeVar("Value")


def topological(
    roots: Iterable[Node],
    known: Container[Node] = (),
    is_leaf: Callable[[Node], object] = lambda each: False,
) -> list[Node]:
    """Return some nodes and all that they are computed from, each behind its arguments.

    Parameters
    ----------
    roots : iterable of Node
        The nodes.
    known : container of Node
        Nodes that are left out, with what only they are computed from.
    is_leaf : callable
        Whether a node with arguments is there without them.
    """
    order: dict[Node, None] = {}
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        each, is_done = stack.pop()
        if each in order or each in known:
            continue
        if is_done or not each.arguments or is_leaf(each):
            order[each] = None
            continue
        stack.append((each, True))
        stack += [(argument, False) for argument in reversed(each.arguments)]
    return list(order)


def evaluate(
    roots: Iterable[Node],
    rule: Callable[[Node, list[Value]], Value],
    known: Mapping[Node, Value] | None = None,
) -> dict[Node, Value]:
    """Return the value of each node that some are computed from, and of these.

    Parameters
    ----------
    roots : iterable of Node
        The nodes.
    rule : callable
        ``rule(node, values)`` is the value of a node, from those of its arguments.
    known : mapping of Node, optional
        Values that are known.
    """
    values = dict(known or {})
    for each in topological(roots, values):
        values[each] = rule(each, [values[argument] for argument in each.arguments])
    return values


def with_arguments(each: Node, arguments: Sequence[Node]) -> Node:
    """Return the operation of other arguments, simplified."""
    same = all(a is b for a, b in zip(arguments, each.arguments, strict=True))
    return each if same else apply(each.operation, *arguments)


def replaced(roots: Sequence[Node], new: Mapping[Node, Node]) -> list[Node]:
    """Return expressions in which some nodes are replaced by others."""
    made = evaluate(roots, with_arguments, new)
    return [made[root] for root in roots]


def bare(roots: Sequence[Node]) -> list[Node]:
    """Return expressions in which what is differentiated as something else is only its value."""

    def rule(each: Node, arguments: list[Node]) -> Node:
        is_value = each.operation in ("stop_gradient", "surrogate")
        return arguments[0] if is_value else with_arguments(each, arguments)

    made = evaluate(roots, rule)
    return [made[root] for root in roots]
