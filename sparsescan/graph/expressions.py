"""Walk through expressions, and change them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from .operations import Node, apply


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


def with_arguments(each: Node, arguments: Sequence[Node]) -> Node:
    """Return the operation of other arguments, simplified."""
    same = all(a is b for a, b in zip(arguments, each.arguments, strict=True))
    return each if same else apply(each.operation, *arguments)


def replaced(roots: Sequence[Node], new: Mapping[Node, Node]) -> list[Node]:
    """Return expressions in which some nodes are replaced by others."""
    made: dict[Node, Node] = {}
    for each in topological(roots):
        made[each] = (
            new[each] if each in new else with_arguments(each, [made[a] for a in each.arguments])
        )
    return [made[root] for root in roots]


def bare(roots: Sequence[Node]) -> list[Node]:
    """Return expressions in which what is differentiated as something else is only its value."""
    made: dict[Node, Node] = {}
    for each in topological(roots):
        arguments = [made[argument] for argument in each.arguments]
        is_value = each.operation in ("stop_gradient", "surrogate")
        made[each] = arguments[0] if is_value else with_arguments(each, arguments)
    return [made[root] for root in roots]
