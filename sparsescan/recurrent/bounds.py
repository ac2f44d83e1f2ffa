"""Bounds of a step's numbers, by which a backward pass leaves steps out.

A step without gradients is left out if no factor of a gradient in it can be infinite or NaN: 0·NaN
is NaN. That is known of all steps before one if an infinite or NaN state cannot be followed by
finite ones, or of one step when all its numbers have been looked at, or it is not known.
"""

from __future__ import annotations

import math

from ..graph.expressions import topological
from ..graph.known import intervals
from ..graph.operations import OPERATIONS, Interval, Node
from .loops.pauses import BOUNDED, NEVER, STRICT
from .program import CellProgram

# Numbers that are not large, and how many of those that were looked at a product may have: below
# 2¹⁶ each, and with some weights, it does not overflow.
_LARGE, _MOST_FACTORS = 1e6, 6


def pauses_of(program: CellProgram) -> int:
    """Return which steps of a cell a backward pass may leave out, as kernels read it."""
    most = _most_factors(program, [*program.grads, *program.arguments])
    if most > _MOST_FACTORS:
        return NEVER
    return BOUNDED if most <= 2 and _tells_of_before(program) else STRICT


def _most_factors(program: CellProgram, roots: list[Node]) -> float:
    """Return how many numbers that are looked at a factor of a gradient is at most a product of."""
    bounds = intervals([*roots, *program.outputs])
    looked_at = {*program.outputs, *program.kept}
    count: dict[Node, float] = {}
    for each in topological(roots):
        lowest, highest = bounds[each]
        own = [count[argument] for argument in each.arguments]
        if each.operation in ("gradient", "back") or -_LARGE <= lowest <= highest <= _LARGE:
            count[each] = 0
            # What it is computed from must be finite, too, but for functions that bound it.
            if each.operation in ("add", "subtract", "multiply", "divide", "where"):
                count[each] = math.inf if math.inf in own else 0
        elif each in looked_at or not each.arguments:
            count[each] = 1
        elif each.operation == "multiply":
            count[each] = sum(own)
        elif each.operation == "divide":
            count[each] = own[0] if _is_divisor(each, program, bounds) else math.inf
        else:
            # A function that is not known to be finite may give an infinity for a large number.
            largest = OPERATIONS[each.operation].bounds(*[(-_LARGE, _LARGE)] * len(own))
            count[each] = max(own) if all(map(math.isfinite, largest)) else math.inf
    return max((count[root] for root in roots), default=0)


def _is_divisor(each: Node, program: CellProgram, bounds: dict[Node, Interval]) -> bool:
    """Return whether a quotient is no larger than its first number, but for a factor of it."""
    whole, part = each.arguments
    lowest, highest = bounds[part]
    if lowest >= 1e-3 or highest <= -1e-3:
        return True
    # The other factor of a state.
    return whole in program.outputs and whole.operation == "multiply" and part in whole.arguments


def _tells_of_before(program: CellProgram) -> bool:
    """Return whether states that are finite say that those before and all that is kept are."""
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
    """Return whether a node is surely NaN where a state is, or not finite where that is not."""
    found: dict[Node, bool] = {}
    for each in topological([root]):
        own = [found[argument] for argument in each.arguments]
        if each.operation == "state":
            found[each] = each.about[0] == state
        elif each.operation == "slot":
            found[each] = any(
                term.argument.operation == "state" and term.argument.about[0] == state
                for term in program.slots[each.about[0]].terms
            )
        elif each.operation in ("add", "subtract", "multiply", "negative"):
            found[each] = any(own)
        elif each.operation == "divide":
            found[each] = any(own) if is_nan else own[0]
        elif each.operation == "where":
            found[each] = own[1] and own[2]
        elif each.operation in ("less", "less_equal") or not each.arguments:
            found[each] = False
        else:
            found[each] = is_nan and any(own)
    return found[root]
