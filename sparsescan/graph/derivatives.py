"""Derivatives of expressions, which are expressions: of gradients, and of slopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from .expressions import topological
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
    roots: Sequence[Node], rule: Callable[[Node, Mapping[Node, WithSlope]], WithSlope | None]
) -> list[WithSlope]:
    """Return some nodes and their slopes, by forward mode; a slope of None is 0.

    ``rule(node, known)`` returns a leaf or a linear map and its slope, from what is known of its
    arguments; None for a number or an elementwise operation.
    """
    known: dict[Node, WithSlope] = {}
    for each in topological(roots):
        if each.operation == "number":
            known[each] = each, None
        else:
            given = [known[argument] for argument in each.arguments]
            known[each] = rule(each, known) or _elementwise(each.operation, given)
    return [known[root] for root in roots]


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


def coefficients(each: Node, leaves: Sequence[Node]) -> dict[Node, Node]:
    """Return the factor of each leaf in a node that is linear in them, such as a gradient."""
    factors: dict[Node, dict[Node, Node]] = {}
    for one in topological([each]):
        if one in leaves:
            factors[one] = {one: number(1)}
            continue
        own = [factors[argument] for argument in one.arguments]
        if not any(own):
            factors[one] = {}
        elif one.operation in ("add", "subtract"):
            a, b = own
            second = b if one.operation == "add" else {k: -v for k, v in b.items()}
            factors[one] = {
                leaf: a[leaf] + second[leaf]
                if leaf in a and leaf in second
                else a.get(leaf, second.get(leaf))  # type: ignore[misc]
                for leaf in (*a, *(leaf for leaf in second if leaf not in a))
            }
        elif one.operation == "negative":
            factors[one] = {leaf: -factor for leaf, factor in own[0].items()}
        elif one.operation == "where":
            condition, zero = one.arguments[0], number(0)
            _, a, b = own
            factors[one] = {
                leaf: where(condition, a.get(leaf, zero), b.get(leaf, zero))
                for leaf in dict.fromkeys((*a, *b))
            }
        elif one.operation == "multiply":
            which = 0 if own[0] else 1
            other = one.arguments[1 - which]
            factors[one] = {leaf: factor * other for leaf, factor in own[which].items()}
        elif one.operation == "divide" and own[0]:
            factors[one] = {leaf: f / one.arguments[1] for leaf, f in own[0].items()}
        else:
            raise AssertionError(f"{one.operation} is not linear")
    return factors[each]
