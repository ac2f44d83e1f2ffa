"""Gradients of a step as sums of slopes times gradients, and the factors of a Jacobian.

A slot is a sum of products. The gradient in a slot is linear in the incoming gradients: those in
the states after the step, and those that the step's own products return. The factors, called
slopes, are computed once from the step's input and state. They serve the Jacobian and any number of
gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ..graph.derivatives import coefficients
from ..graph.expressions import replaced, topological
from ..graph.operations import Node, Reduction, number, symbol, value_of
from .program import INPUT, CellProgram, Term

# A block of a matrix, and whether it is transposed.
Key = tuple[str | Reduction, int, bool]
# A slope that is 1 everywhere.
ONE = -1


class BackStage(NamedTuple):
    """A stage of the backward pass: the slots whose gradients it computes, and what follows.

    Attributes
    ----------
    slots : tuple of int
        The slots.
    arguments : tuple of int
        The arguments for which all products have then returned their gradients.
    """

    slots: tuple[int, ...]
    arguments: tuple[int, ...]


class LinearProgram(NamedTuple):
    """The gradients of a program, by slopes.

    Leaves of the gradients are ``gradient`` and ``back``, as in the program, ``slope`` (by number),
    parameters, and the ``input`` and ``state`` that multiply a gradient in a parameter.

    Attributes
    ----------
    slopes : tuple of Node
        Vectors that are computed from a step's input, states and slots.
    columns : tuple of Node
        Products of slopes that are factors of a Jacobian, numbered behind the slopes.
    slot_grads, row_grads : tuple of Node or None
        Gradients in slots and in rows of parameters.
    input_grad : Node or None
        Gradient in the input of each unit, without the part from products.
    further_grads : tuple of Node or None
        Gradients in further inputs.
    slot_columns, state_columns : tuple of dict of Node to int
        For gradients in slots, and in states without the part from products: the slope or column
        that multiplies each incoming gradient.
    stages : tuple of BackStage
        The order of the backward pass.
    """

    slopes: tuple[Node, ...]
    columns: tuple[Node, ...]
    slot_grads: tuple[Node | None, ...]
    row_grads: tuple[Node | None, ...]
    input_grad: Node | None
    further_grads: tuple[Node | None, ...]
    slot_columns: tuple[dict[Node, int], ...]
    state_columns: tuple[dict[Node, int], ...]
    stages: tuple[BackStage, ...]


def linear(program: CellProgram) -> LinearProgram:
    """Return the gradients of a program in terms of slopes.

    If several gradients are multiples of one sum, that sum is added up once, such as the gradient
    in the new ``c`` of an LSTM. Products return no gradient to an argument if none of their slots
    has one: the argument is only used in a condition, or its gradients cancel.
    """
    readers = [*map(program.readers, program.arguments)]
    zeros = set[int]()
    while True:
        found = _linear(program, zeros)
        now = {b for b, own in enumerate(readers) if all(found.slot_grads[k] is None for k in own)}
        if now <= zeros:
            return found
        zeros |= now


def _linear(program: CellProgram, zeros: Collection[int]) -> LinearProgram:
    """Return the gradients in slopes, if the products of some arguments return nothing."""
    plain = _without_quotients(program, zeros)
    slots, states = len(program.slots), program.states
    slot_roots, state_roots = plain[:slots], plain[slots : slots + states]
    leaves = _gradients(program)
    slopes: dict[Node, Node] = {}

    def factor(whole: Node, may_be_read: bool) -> Node:
        """Return the slope for a factor, or the factor itself if it needs none.

        With `may_be_read`, the functions that use it may read inputs and states.
        """
        kinds = {each.operation for each in topological([whole])}
        is_same = kinds.isdisjoint(("input", "further", "state", "slot"))
        if is_same or (may_be_read and whole.operation in ("input", "state")):
            return whole
        return slopes.setdefault(whole, symbol("slope", len(slopes)))

    written = {each: each for each in leaves}

    def write(root: Node | None, sources: Iterable[Node], may_read: bool = False) -> Node | None:
        """Return a gradient as a sum of written sources, each times a factor."""
        total: Node | None = None
        found = {} if root is None else coefficients(root, list(sources))
        for source, whole in found.items():
            if value_of(whole) != 0:
                term = written[source] * factor(whole, may_read)
                total = term if total is None else total + term
        return total

    sources = dict.fromkeys(leaves)
    roots = [each for each in (*slot_roots, *state_roots) if each is not None]
    for base in _shared_sums(roots, leaves):
        whole = write(base, sources)
        if whole is not None:
            written[base] = whole
            sources[base] = None
    slot_grads = [write(root, sources) for root in slot_roots]
    state_grads = [write(root, sources) for root in state_roots]
    # Gradients in parameters are written as multiples of gradients in slots where possible.
    for root, grad in zip(slot_roots, slot_grads, strict=True):
        if root is not None and grad is not None:
            written[root] = grad
            sources[root] = None
    others = [write(root, sources, True) for root in plain[slots + states :]]
    rows = len(program.row_grads)
    row_grads, (input_grad, *further_grads) = others[:rows], others[rows:]
    columns: dict[Node, int] = {}

    def numbers(grad: Node | None) -> dict[Node, int]:
        found = {} if grad is None else coefficients(grad, leaves)
        return {
            leaf: int(slope.details[0])
            if slope.operation == "slope"
            else len(slopes) + columns.setdefault(slope, len(columns))
            for leaf, slope in found.items()
        }

    slot_columns = [
        numbers(grad if any(term.argument is not INPUT for term in slot.terms) else None)
        for slot, grad in zip(program.slots, slot_grads, strict=True)
    ]
    state_columns = [numbers(grad) for grad in state_grads]
    return LinearProgram(
        slopes=tuple(slopes),
        columns=tuple(columns),
        slot_grads=tuple(slot_grads),
        row_grads=tuple(row_grads),
        input_grad=input_grad,
        further_grads=tuple(further_grads),
        slot_columns=tuple(slot_columns),
        state_columns=tuple(state_columns),
        stages=_stages(program, slot_grads),
    )


def _gradients(program: CellProgram) -> list[Node]:
    """Return the incoming gradients."""
    leaves = [symbol("gradient", k) for k in range(program.states)]
    return leaves + [symbol("back", k) for k in range(len(program.arguments))]


def _without_quotients(program: CellProgram, zeros: Collection[int]) -> list[Node | None]:
    """Return all gradients, where arguments in `zeros` get no gradient.

    A backward pass may divide a state by one factor to find the other, in order to keep one vector
    less. These gradients read that factor itself, which was just computed.
    """
    forward = topological([*program.outputs, *program.arguments])
    inputs = program.input_grad, *program.further_grads
    roots = [*program.slot_grads, *program.state_grads, *program.row_grads, *inputs]
    given = [each for each in roots if each is not None]
    # The vectors of the forward pass do not change.
    plain = {each: each for each in forward}
    plain |= {symbol("back", b): number(0) for b in zeros}
    for each in topological(given):
        if each.operation == "where" and each.arguments[2].operation == "divide":
            whole, gate = each.arguments[2].arguments
            if each not in plain and whole in program.outputs and gate in whole.arguments:
                a, b = whole.arguments
                plain[each] = b if a is gate else a
    new = dict(zip(given, replaced(given, plain), strict=True))
    return [None if each is None else new[each] for each in roots]


def _shared_sums(roots: Sequence[Node], leaves: Sequence[Node]) -> list[Node]:
    """Return the sums of several gradients from which several others are computed."""
    order = topological(roots)
    uses = Counter(argument for each in order for argument in each.arguments)
    uses.update(set(roots))
    sources: dict[Node, set[Node]] = {each: {each} for each in leaves}
    shared: list[Node] = []
    for each in order:
        if each not in sources:
            sources[each] = set[Node]().union(*(sources[argument] for argument in each.arguments))
        if len(sources[each]) > 1 and uses[each] > 1:
            shared.append(each)
            sources[each] = {each}
    return shared


def _stages(program: CellProgram, slot_grads: Sequence[Node | None]) -> tuple[BackStage, ...]:
    """Return the order of the backward pass: the slots of the step, from the last on.

    A surrogate's value may be known before the vector by which it is differentiated. Slots that
    contain its gradient then come after the gradients of everything computed from it.
    """
    readers = [*map(program.readers, program.arguments)]
    stages = [slot.stage for slot in program.slots]
    reads = [
        {
            each.details[0]
            for each in topological([] if grad is None else [grad])
            if each.operation == "back"
        }
        for grad in slot_grads
    ]
    returned: list[int] = []
    for _ in range(1 + len(program.slots)):
        returned = [min(stages[k] for k in own) for own in readers]
        stages = [
            min([stage, *(returned[b] - 1 for b in own)])
            for stage, own in zip(stages, reads, strict=True)
        ]
    order = sorted({*stages, *(stage - 1 for stage in returned)} or {0}, reverse=True)
    return tuple(
        BackStage(
            tuple(k for k, own in enumerate(stages) if own == stage),
            tuple(b for b, own in enumerate(returned) if own == stage),
        )
        for stage in order
    )


# -- Factors of a Jacobian ------------------------------------------------------------------------


class Block(NamedTuple):
    """A vector between slopes and weights: the gradient in a slot, or one that weights pass on.

    Attributes
    ----------
    slopes : tuple of (int, int)
        Places of vectors before the slopes, and the number of the slope or column, or `ONE`.
    weights : tuple of (int, tuple of Key)
        Places of vectors after the weights, and the matrices that lead there; none if it is passed
        on.
    """

    slopes: tuple[tuple[int, int], ...]
    weights: tuple[tuple[int, tuple[Key, ...]], ...]

    @property
    def is_slot(self) -> bool:
        """Whether weights multiply it."""
        return any(keys for _, keys in self.weights)


class Factors(NamedTuple):
    """Two factors of a Jacobian, slopes and weights, for a stage of the backward pass.

    Attributes
    ----------
    given, returned : tuple of Node
        The vectors before and after both: gradients in states after the step (``gradient``), in
        arguments (``back``), and in states before the step (``state``).
    blocks : tuple of Block
        The vectors between them.
    """

    given: tuple[Node, ...]
    blocks: tuple[Block, ...]
    returned: tuple[Node, ...]


def factors(program: CellProgram, linear: LinearProgram) -> list[Factors]:
    """Return the factors of a Jacobian, in the order in which they are applied to a gradient."""
    states = [symbol("state", k) for k in range(program.states)]
    given = _gradients(program)[: program.states]
    found = []
    for n, stage in enumerate(linear.stages):
        later = [linear.slot_columns[k] for each in linear.stages[n + 1 :] for k in each.slots]
        needed = set(states).union(*later, *linear.state_columns)
        slots = [k for k in stage.slots if linear.slot_columns[k]]
        terms = {k: [t for t in program.slots[k].terms if t.argument is not INPUT] for k in slots}
        reached = {k: [_to(program, term) for term in own] for k, own in terms.items()}
        touched = [each for own in reached.values() for each in own]
        if stage is linear.stages[-1]:
            returned, passed = states, []
            for r, (each, column) in enumerate(zip(states, linear.state_columns, strict=True)):
                slopes = [(given.index(leaf), which) for leaf, which in column.items()]
                slopes += [(given.index(each), ONE)] if each in given else []
                passed += [Block(tuple(sorted(slopes)), ((r, ()),))] if slopes else []
        else:
            returned = [each for each in dict.fromkeys([*given, *touched]) if each in needed]
            passed = [
                Block(((given.index(each), ONE),), ((r, ()),))
                for r, each in enumerate(returned)
                if each in given
            ]
        blocks = []
        for k in slots:
            column = linear.slot_columns[k]
            slopes = sorted((given.index(leaf), which) for leaf, which in column.items())
            keys = [
                tuple(key_of(t) for t, own in zip(terms[k], reached[k], strict=True) if own is to)
                for to in returned
            ]
            weights = tuple((r, own) for r, own in enumerate(keys) if own)
            blocks += [Block(tuple(slopes), weights)] if weights else []
        found.append(Factors(tuple(given), (*blocks, *passed), tuple(returned)))
        given = returned
    return found


def key_of(term: Term) -> Key:
    """Return the matrix of a product, as a key."""
    return term.matrix, term.gate, term.is_transposed


def _to(program: CellProgram, term: Term) -> Node:
    """Return the gradient in what a product multiplies."""
    if term.argument.operation == "state":
        return term.argument
    return symbol("back", program.arguments.index(term.argument))
