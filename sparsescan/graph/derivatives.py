"""Derivatives of expressions, which are expressions: of gradients, and of slopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from .expressions import evaluate, topological
from .functions import where
from .operations import OPERATIONS, Node, apply, is_heavy, number, value_of

# A node, and its derivative in a direction.
WithSlope: TypeAlias = "tuple[Node, Node | None]"


def gradients(
    seeds: Sequence[tuple[Node, Node]], same: Mapping[Node, Node] | None = None
) -> dict[Node, Node]:
    """Return the gradients in all nodes, from those in some; derivatives read what is the same."""
    grads: dict[Node, Node] = {}
    same = same or {}

    def add(to: Node, grad: Node) -> None:
        grads[to] = grads[to] + grad if to in grads else grad

    for each, seed in seeds:
        add(each, seed)
    for each in reversed(topological([each for each, _ in seeds])):
        if each not in grads or not each.arguments:
            continue
        y, *arguments = (same.get(one, one) for one in (each, *each.arguments))
        pulled = OPERATIONS[each.operation].pull(grads[each], y, *arguments)
        for argument, grad in zip(each.arguments, pulled, strict=True):
            if grad is not None and value_of(argument) is None:
                add(argument, grad)
    return grads


def with_slopes(
    roots: Sequence[Node], rule: Callable[[Node, Sequence[WithSlope]], WithSlope | None]
) -> list[WithSlope]:
    """Return some nodes and their slopes, by forward mode; a slope of None is 0.

    ``rule(node, arguments)`` returns a leaf or a linear map and its slope, from its arguments and
    their slopes; None for a number or an elementwise operation.
    """

    def either(each: Node, arguments: list[WithSlope]) -> WithSlope:
        if each.operation == "number":
            return each, None
        return rule(each, arguments) or _elementwise(each.operation, arguments)

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
            # The derivative in an argument is a number a unit, so that its transpose is the same.
            part = OPERATIONS[operation].pull(slope, y, *values)[k]
            if part is not None:
                whole = part if whole is None else whole + part
    return y, whole


def quotients_of(roots: Sequence[Node], outputs: Sequence[Node]) -> dict[Node, Node]:
    """Return quotients of states that the backward pass takes for their factors, instead of these.

    Of ``h = o·tanh(c)`` the state is kept and ``o`` is needed, so that ``tanh(c) = h/o``, and
    anything where ``o`` is 0: each of its uses is multiplied by ``o``, since ``h`` is the only one
    that reads it, and the derivative of ``o``, a sigmoid or an exponential, has the factor ``o``.
    A root is left out: its derivative divides by it.
    """
    uses = Counter(argument for each in topological(roots) for argument in each.arguments)
    uses.update(roots)
    found: dict[Node, Node] = {}
    for each in outputs:
        if each.operation != "multiply":
            continue
        for gate, factor in (each.arguments, each.arguments[::-1]):
            is_alone = uses[factor] == 1 and factor.operation != "sqrt"
            if is_heavy(factor) and is_alone and gate.operation in ("sigmoid", "exp"):
                found[factor] = where(gate <= 0, 0, each / gate)
                break
    return found


def coefficients(each: Node, leaves: Collection[Node]) -> dict[Node, Node]:
    """Return the factor of each leaf in a node that is linear in them, such as a gradient."""
    found: dict[Node, Node] = {}
    for leaf in topological([each], (), leaves.__contains__):
        if leaf in leaves:
            rule = partial(_towards, leaf, leaves)
            ((_, slope),) = with_slopes([each], rule)
            assert slope is not None
            found[leaf] = slope
    return found


def _towards(
    leaf: Node, leaves: Collection[Node], each: Node, _: Sequence[WithSlope]
) -> WithSlope | None:
    """Return a leaf and its slope, 1 or 0."""
    if each in leaves or not each.arguments:
        return each, number(1) if each is leaf else None
    return None
