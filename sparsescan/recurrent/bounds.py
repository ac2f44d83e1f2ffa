"""Bounds of a step's numbers, which tell whether a backward pass may skip steps.

The backward pass skips a step without gradients if no factor of a gradient in it can be infinite or
NaN, since 0·NaN is NaN. There are three cases. In some cells finite states never follow an infinite
or NaN one, so one check covers all earlier steps. In others all numbers of each step must be
checked. In the rest nothing is known.
"""

from __future__ import annotations

import math

from ..graph.expressions import evaluate
from ..graph.known import intervals
from ..graph.operations import OPERATIONS, Interval, Node
from .loops.pauses import BOUNDED, NEVER, STRICT
from .program import CellProgram

# The bound of numbers that are not large, and the most checked numbers in a product: with numbers
# below 2¹⁶ and some weights it does not overflow.
_LARGE, _MOST_FACTORS = 1e6, 6


def pauses_of(program: CellProgram) -> int:
    """Return the rule for skipping steps of a cell in a backward pass, in the form of kernels."""
    most = _most_factors(program, [*program.grads, *program.arguments])
    if most > _MOST_FACTORS:
        return NEVER
    is_bounded = most <= 2 and not program.further_grads and _tells_of_before(program)
    return BOUNDED if is_bounded else STRICT


def _most_factors(program: CellProgram, roots: list[Node]) -> float:
    """Return the most checked numbers whose product is a factor of a gradient."""
    bounds = intervals([*roots, *program.outputs])
    looked_at = {*program.outputs, *program.kept}

    def rule(each: Node, given: list[float]) -> float:
        lowest, highest = bounds[each]
        if each.operation in ("gradient", "back") or -_LARGE <= lowest <= highest <= _LARGE:
            # Its arguments must be finite too, except for functions with bounded results.
            is_read = each.operation in ("add", "subtract", "multiply", "divide", "where")
            return math.inf if is_read and math.inf in given else 0
        if each in looked_at or not each.arguments:
            return 1
        if each.operation == "multiply":
            return sum(given)
        if each.operation == "divide":
            return given[0] if _is_divisor(each, program, bounds) else math.inf
        # An unbounded function may return infinity for a large number.
        largest = OPERATIONS[each.operation].bounds(*[(-_LARGE, _LARGE)] * len(given))
        return max(given) if all(map(math.isfinite, largest)) else math.inf

    count = evaluate(roots, rule)
    return max((count[root] for root in roots), default=0)


def _is_divisor(each: Node, program: CellProgram, bounds: dict[Node, Interval]) -> bool:
    """Return whether a quotient is at most its numerator, up to a factor of the numerator."""
    whole, part = each.arguments
    lowest, highest = bounds[part]
    if lowest >= 1e-3 or highest <= -1e-3:
        return True
    # The other factor of a state.
    return whole in program.outputs and whole.operation == "multiply" and part in whole.arguments


def _tells_of_before(program: CellProgram) -> bool:
    """Return whether finite states imply that earlier states and kept vectors are finite."""
    bounds = intervals([*program.outputs, *program.kept])
    slots = {each for each in program.kept if each.operation == "slot"}
    if any(term.argument in program.arguments for slot in program.slots for term in slot.terms):
        return False
    for each in program.kept:
        if each not in slots and not all(map(math.isfinite, bounds[each])):
            return False
    for k, own in enumerate(program.outputs):
        passes_nan = any(_passes(program, k, each, is_nan=True) for each in program.outputs)
        is_bounded = all(map(math.isfinite, bounds[own]))
        passes = is_bounded or any(
            _passes(program, k, each, is_nan=False) for each in program.outputs
        )
        if not (passes_nan and passes):
            return False
    return True


def _passes(program: CellProgram, state: int, root: Node, *, is_nan: bool) -> bool:
    """Return whether a node must be NaN where a state is NaN, and non-finite where it is."""

    def rule(each: Node, given: list[bool]) -> bool:
        if each.operation == "state":
            return bool(each.details[0] == state)
        if each.operation == "slot":
            return any(
                term.argument.operation == "state" and term.argument.details[0] == state
                for term in program.slots[each.details[0]].terms
            )
        if each.operation in ("add", "subtract", "multiply", "negative"):
            return any(given)
        if each.operation == "divide":
            return any(given) if is_nan else given[0]
        if each.operation == "where":
            return given[1] and given[2]
        return is_nan and any(given) and each.operation not in ("less", "less_equal")

    return evaluate([root], rule)[root]
