"""Programs of a step: its operations in order, and what its backward pass needs.

A step has products with matrices and reductions over units, which are products with constants; all
its other operations are elementwise. Products that are only added to each other share a *slot*, a
vector of sums. A product may multiply what the same step has computed, so a step has *stages*:
sums, elementwise operations, sums, elementwise operations, …. Each stage reads the stages before
it.

Gradients run back through the same stages. They are expressions, too, with two more kinds of
leaves: gradients in the states after a step (``gradient``), and gradients that products return
(``back``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..graph.derivatives import gradients, quotients_of
from ..graph.expressions import bare, evaluate, replaced, topological, with_arguments
from ..graph.kept import least_kept
from ..graph.operations import Node, Reduction, node, symbol, value_of
from ..locks import cached_property

INPUT = node("input")
# Up to this many slots, all orders are tried.
_MOST_ORDERS = 7


class Term(NamedTuple):
    """A product of a gate of a matrix, or of its transpose, and a vector.

    Attributes
    ----------
    matrix : str or Reduction
        Name of the matrix, or a reduction in its place.
    gate : int
        Which block of its rows.
    is_transposed : bool
        Whether the transpose multiplies.
    argument : Node
        ``INPUT``, a state, or a vector of an earlier stage.
    """

    matrix: Any
    gate: int
    is_transposed: bool
    argument: Node


class Slot(NamedTuple):
    """A sum of products.

    Attributes
    ----------
    terms : tuple of Term
        The products.
    vectors : tuple of (str, int)
        Vectors of parameters to add, by name and gate, in addition to the matrices' biases.
    stage : int
        The stage that reads the complete sum.
    """

    terms: tuple[Term, ...]
    vectors: tuple[tuple[str, int], ...]
    stage: int

    @property
    def weighed(self) -> list[Term]:
        """The products with matrices of parameters, which have gradients."""
        return [each for each in self.terms if not isinstance(each.matrix, Reduction)]


class Derived(NamedTuple):
    """A vector that depends only on parameters, and is computed once for all steps.

    Attributes
    ----------
    value : Node
        The vector.
    grads : tuple of (int, Node)
        Gradients in rows of parameters, in terms of the ``gradient`` in the vector's own row.
    """

    value: Node
    grads: tuple[tuple[int, Node], ...]


@dataclass(frozen=True, eq=False)
class CellProgram:
    """A step and its derivatives, analysed.

    Leaves of the expressions are ``number``, ``input`` (the input of each unit), ``further`` (a
    further input, by number), ``state`` (before the step, by number), ``vector`` and ``scalar``
    (parameters), ``derived`` (by number), ``slot`` (by number), and backward ``gradient`` (in a
    state after the step, by number) and ``back`` (in an argument, by number).

    Attributes
    ----------
    states : int
        How many states there are; the first is the output.
    stages : int
        How many stages a step has.
    slots : tuple of Slot
        The sums, in the order in which they are stored: those with products of the input first.
    outputs : tuple of Node
        The states after a step.
    arguments : tuple of Node
        Vectors other than the input and the states that products multiply.
    rows : tuple of Node
        The parameters that elementwise operations read, then those derived from them.
    derived : tuple of Derived
        The derived ones.
    kept : tuple of Node
        Vectors that the backward pass reads in addition to states and inputs, since it cannot
        compute them. It recomputes the arguments that gradients of weights read.
    slot_grads, state_grads, row_grads : tuple of Node or None
        Gradients in slots, in states before the step without the part from products, and in rows of
        parameters; None means zeros.
    input_grad : Node or None
        Gradient in the input of each unit, without the part from products.
    further_grads : tuple of Node or None
        Gradients in further inputs.
    uses_input : bool
        Whether elementwise operations read the input, which then has one number per unit.
    names : dict of Node to str
        Names from the definition.
    traced : tuple of Node
        The traced states after a step, with a node ``product`` for each product, and with
        surrogates.
    partial : dict of str to tuple of int
        For matrices that are not plain square matrices: the heads of a gate, and its rows and
        columns, where 0 means as many as units.
    """

    states: int
    stages: int
    slots: tuple[Slot, ...]
    outputs: tuple[Node, ...]
    arguments: tuple[Node, ...]
    rows: tuple[Node, ...]
    derived: tuple[Derived, ...]
    kept: tuple[Node, ...]
    slot_grads: tuple[Node | None, ...]
    state_grads: tuple[Node | None, ...]
    row_grads: tuple[Node | None, ...]
    input_grad: Node | None
    further_grads: tuple[Node | None, ...]
    uses_input: bool
    names: dict[Node, str]
    traced: tuple[Node, ...]
    partial: dict[str, tuple[int, int, int]]

    def __deepcopy__(self, memo: object) -> CellProgram:
        return self

    @property
    def grads(self) -> list[Node]:
        """All nonzero gradients; those in inputs come last."""
        own = *self.slot_grads, *self.state_grads, *self.row_grads
        grads = *own, self.input_grad, *self.further_grads
        return [each for each in grads if each is not None]

    @property
    def multiplied(self) -> list[int]:
        """The states that matrices multiply."""
        arguments = [term.argument for slot in self.slots for term in slot.terms]
        return sorted({each.details[0] for each in arguments if each.operation == "state"})

    def heads_of(self, matrix: str) -> int:
        """Return how many heads a matrix has."""
        return self.partial.get(matrix, (1, 0, 0))[0]

    @cached_property
    def weighed(self) -> set[Node]:
        """The vectors that matrices of parameters multiply; their gradients read these."""
        return _weighed(self.slots)

    @cached_property
    def uniform(self) -> set[Node]:
        """Vectors that are equal for all units of a sample: reductions, and functions of these."""
        roots = *self.outputs, *self.arguments, *self.grads
        return _uniform(roots, self.slots, self.arguments)

    @cached_property
    def begun(self) -> int:
        """How many slots begin with biases; slots after them hold only a reduction."""
        alone = itertools.takewhile(_is_reduction, reversed(self.slots))
        return len(self.slots) - len(list(alone))

    @cached_property
    def reductions(self) -> set[Reduction]:
        """The reductions over units."""
        terms = [term for slot in self.slots for term in slot.terms]
        return {each.matrix for each in terms if isinstance(each.matrix, Reduction)}

    @cached_property
    def compared(self) -> set[Node]:
        """The nodes of each vector that is compared with its own maximum.

        A unit equals the maximum only if both passes round these nodes in the same way.
        """
        largest = {
            symbol("slot", k): slot.terms[0].argument
            for k, slot in enumerate(self.slots)
            if _is_reduction(slot) and not slot.terms[0].matrix.is_linear
        }
        roots = []
        for each in topological([*self.outputs, *self.arguments, *self.grads]):
            if each.operation == "less_equal" and each.arguments[0] in largest:
                roots += [each.arguments[1], largest[each.arguments[0]]]
        return set(topological(roots))

    def readers(self, argument: Node) -> list[int]:
        """Return the numbers of the slots that have products of an argument."""
        return [
            k
            for k, slot in enumerate(self.slots)
            if any(term.argument is argument for term in slot.terms)
        ]

    def stage_of(self, each: Node) -> int:
        """Return the stage whose sums a forward node needs."""
        return _stage_of(each, self.slots)

    def back_stage_of(self, each: Node) -> int:
        """Return the stage in whose backward part a gradient can be computed.

        For a node without gradients it is the last stage, which comes first.
        """

        def rule(one: Node, later: list[int]) -> int:
            if one.operation != "back":
                return min([self.stages - 1, *later])
            # It is known once all sums that read the argument have their gradients.
            readers = self.readers(self.arguments[one.details[0]])
            return min(self.slots[k].stage for k in readers) - 1

        return evaluate([each], rule)[each]


# -- Stages ---------------------------------------------------------------------------------------


def _stage_of(each: Node, slots: Sequence[Slot]) -> int:
    def rule(one: Node, before: list[int]) -> int:
        return max([slots[one.details[0]].stage if one.operation == "slot" else 0, *before])

    return evaluate([each], rule)[each]


# -- Analysis -------------------------------------------------------------------------------------


def analyse(
    outputs: Sequence[Node],
    names: dict[Node, str] | None = None,
    partial: dict[str, tuple[int, int, int]] | None = None,
    further: int = 0,
) -> CellProgram:
    """Return the program of a step with these new states.

    Parameters
    ----------
    outputs : sequence of Node
        The new states. A product is a node ``product`` of a vector; its details are the name of a
        matrix, a gate and whether it is transposed. A parameter is a node ``vector`` or ``scalar``;
        its details are a name and a gate.
    names : dict of Node to str, optional
        Names from the definition.
    partial : dict of str to tuple of int, optional
        Heads, rows and columns of matrices that are not plain square matrices.
    further : int, default 0
        How many further inputs there are.
    """
    step = _ordered(_with_slots(outputs, names or {}))
    hoisted, rows, derived = _hoisted(step.roots)
    step = step.changed(lambda roots: replaced(roots, hoisted))
    step = step.changed(lambda roots: _without_quotients(roots, _uniform(roots, step.slots)))
    arguments = list(
        dict.fromkeys(
            term.argument
            for each in step.slots
            for term in each.terms
            if term.argument.operation not in ("input", "state")
        )
    )
    seeds = [(each, symbol("gradient", k)) for k, each in enumerate(step.outputs)]
    backs = {each: symbol("back", k) for k, each in enumerate(arguments)}
    quotients = quotients_of([*step.outputs, *arguments], step.outputs)
    slots = [symbol("slot", k) for k in range(len(step.slots))]
    states = [symbol("state", k) for k in range(len(outputs))]
    inputs = [INPUT, *(symbol("further", k) for k in range(further))]
    while True:
        adjoints = gradients([*seeds, *backs.items()], quotients)
        # For example, a product that only a condition reads has no gradient.
        graded = [each for slot, each in zip(slots, step.slots, strict=True) if slot in adjoints]
        read = {term.argument for each in graded for term in each.terms}
        if read.issuperset(backs):
            break
        backs = {each: back for each, back in backs.items() if each in read}
    found = [leaf for leaf in (*slots, *states, *rows, *inputs) if leaf in adjoints]
    backward = bare([adjoints[leaf] for leaf in found])
    uniform = _uniform([*backward, *step.roots, *arguments], step.slots, arguments)
    backward = _without_quotients(backward, uniform)
    grads = dict(zip(found, backward, strict=True))
    apart = dict(zip(arguments, _told_apart(bare(arguments)), strict=True))
    step = step.changed(bare, apart)
    weighed = _weighed(step.slots)
    needed = [*backward, *(each for each in apart.values() if each in weighed)]
    forward = topological([*step.outputs, *apart.values()])
    # Slopes of surrogates may read other sums.
    read_back = set(topological(needed)).difference(forward)
    forward += [each for each in slots if each in read_back]
    uniform = _uniform(forward, step.slots)
    kept = least_kept(forward, needed, step.outputs, slots, uniform)
    return CellProgram(
        states=len(outputs),
        stages=1 + max([each.stage for each in step.slots], default=0),
        slots=tuple(step.slots),
        outputs=tuple(step.outputs),
        arguments=tuple(apart.values()),
        rows=tuple(rows),
        derived=tuple(derived),
        kept=tuple(sorted(kept, key=uniform.__contains__)),
        slot_grads=tuple(map(grads.get, slots)),
        state_grads=tuple(map(grads.get, states)),
        row_grads=tuple(map(grads.get, rows)),
        input_grad=grads.get(INPUT),
        further_grads=tuple(map(grads.get, inputs[1:])),
        uses_input=INPUT in topological([*step.outputs, *apart.values(), *needed]),
        names=step.names,
        traced=tuple(outputs),
        partial=partial or {},
    )


def _is_reduction(slot: Slot) -> bool:
    """Return whether a sum consists of a single reduction."""
    (first, *others) = slot.terms
    return isinstance(first.matrix, Reduction) and not others and not slot.vectors


def _is_of_all(term: Term) -> bool:
    """Return whether a product is a reduction over all units, so that all units are equal."""
    return isinstance(term.matrix, Reduction) and term.matrix.heads == 1


def _uniform(
    roots: Iterable[Node], slots: Sequence[Slot], arguments: Sequence[Node] = ()
) -> set[Node]:
    """Return the nodes, among some and their arguments, that are equal for all units.

    It includes the gradients that products return for `arguments`.
    """

    def is_leaf_uniform(each: Node) -> bool:
        if each.operation == "slot":
            slot = slots[each.details[0]]
            return not slot.vectors and all(map(_is_of_all, slot.terms))
        if each.operation == "back" and arguments:
            argument = arguments[each.details[0]]
            terms = [term for slot in slots for term in slot.terms]
            return all(_is_of_all(term) for term in terms if term.argument is argument)
        return False

    def rule(each: Node, given: list[bool | None]) -> bool | None:
        if each.operation == "number":
            return None
        if not each.arguments:
            return is_leaf_uniform(each)
        return False if False in given else True in given or None

    return {each for each, is_uniform in evaluate(roots, rule).items() if is_uniform}


def _without_quotients(roots: list[Node], uniform: set[Node]) -> list[Node]:
    """Return expressions that multiply by inverses of nodes that are equal for all units.

    The inverses are computed once for all units. If there are any, divisors that are powers of two
    become factors too, which changes no bit.
    """
    if not uniform:
        return roots

    def rule(each: Node, given: list[Node]) -> Node:
        if each.operation == "divide":
            value = value_of(each.arguments[1])
            if value and abs(math.frexp(value)[0]) == 0.5:
                return given[0] * (1 / value)
            if each.arguments[1] in uniform and value_of(each.arguments[0]) is None:
                return given[0] * (1 / given[1])
        return with_arguments(each, given)

    made = evaluate(roots, rule)
    return [made[root] for root in roots]


def _weighed(slots: Sequence[Slot]) -> set[Node]:
    """Return the vectors that matrices of parameters multiply; their gradients read these."""
    return {each.argument for slot in slots for each in slot.weighed}


class _Step(NamedTuple):
    """New states, the sums that they read, and names of vectors."""

    outputs: list[Node]
    slots: list[Slot]
    names: dict[Node, str]

    @property
    def roots(self) -> list[Node]:
        """The nodes that states and products are computed from."""
        return [*self.outputs, *(term.argument for each in self.slots for term in each.terms)]

    def changed(
        self,
        change: Callable[[list[Node]], list[Node]],
        arguments: Mapping[Node, Node] | None = None,
    ) -> _Step:
        """Return a step with changed expressions; `arguments` replaces the products' vectors."""
        roots = [*self.roots, *self.names]
        new = dict(zip(roots, change(roots), strict=True))
        read = new | dict(arguments or {})
        slots = [
            each._replace(terms=tuple(t._replace(argument=read[t.argument]) for t in each.terms))
            for each in self.slots
        ]
        # The first of several names is used.
        names = {new[each]: name for each, name in reversed(self.names.items())}
        return _Step([new[each] for each in self.outputs], slots, names)


class _Sum(NamedTuple):
    """An unfinished sum: its products, vectors of parameters, and other terms."""

    terms: tuple[Term, ...]
    vectors: tuple[tuple[str, int], ...]
    rest: tuple[Node, ...]


def _with_slots(outputs: Sequence[Node], names: Mapping[Node, str]) -> _Step:
    """Return a step with slots in place of sums of products."""
    order = topological(outputs)
    uses = Counter(argument for each in order for argument in each.arguments)
    uses.update(outputs)
    slots: list[Slot] = []
    open_sums: dict[Node, _Sum] = {}
    made: dict[Node, Node] = {}

    def close(each: Node) -> Node:
        """Return the new node for a node; a sum with products becomes a slot."""
        sums = open_sums.pop(each, None)
        if sums is not None:
            read = [term.argument for term in sums.terms]
            later = [a for a in read if a.operation not in ("input", "state")]
            stage = max([1 + _stage_of(argument, slots) for argument in later], default=0)
            made[each] = symbol("slot", len(slots))
            slots.append(Slot(sums.terms, sums.vectors, stage))
            for other in sums.rest:
                made[each] = made[each] + other
        return made[each]

    for each in order:
        if each.operation == "product":
            (argument,) = each.arguments
            term = Term._make((*each.details, close(argument)))
            open_sums[each] = _Sum((term,), (), ())
            if isinstance(term.matrix, Reduction) and not term.matrix.is_linear:
                close(each)  # to which no product is added
        elif each.operation == "add" and any(a in open_sums for a in each.arguments):
            parts = []
            for argument in each.arguments:
                if argument in open_sums:
                    parts.append(open_sums.pop(argument))
                elif argument.operation == "vector":
                    parts.append(_Sum((), (argument.details,), ()))
                else:
                    parts.append(_Sum((), (), (made[argument],)))
            a, b = parts
            open_sums[each] = _Sum(a.terms + b.terms, a.vectors + b.vectors, a.rest + b.rest)
        else:
            made[each] = with_arguments(each, [close(argument) for argument in each.arguments])
        if each in open_sums and uses[each] > 1:
            close(each)
    new = [close(each) for each in outputs]
    return _Step(new, slots, {made[each]: name for each, name in names.items() if each in made})


def _ordered(step: _Step) -> _Step:
    """Return a step whose slots are in the order in which they are stored."""
    order = _order(step.slots)
    place = {symbol("slot", old): symbol("slot", k) for k, old in enumerate(order)}
    step = step.changed(lambda roots: replaced(roots, place))
    return step._replace(slots=[step.slots[old] for old in order])


def _runs(order: Sequence[int], members: Sequence[set[int]]) -> int:
    """Return the total number of runs of neighbours that sets of slots form in an order."""
    return sum(
        place == 0 or order[place - 1] not in readers
        for readers in members
        for place, slot in enumerate(order)
        if slot in readers
    )


def _order(slots: Sequence[Slot]) -> list[int]:
    """Return an order of slots: readers of the input first, readers of one vector together."""
    readers: dict[Node, set[int]] = {}
    for k, each in enumerate(slots):
        for term in each.terms:
            readers.setdefault(term.argument, set()).add(k)
    of_input = readers.get(INPUT, set())
    declared = sorted(range(len(slots)), key=lambda k: slots[k].terms[0][1])
    first = [k for k in declared if k in of_input]
    later = [k for k in declared if k not in of_input]
    if any(isinstance(each.terms[0].matrix, Reduction) for each in slots):
        # Products of one vector are neighbours; reductions come last.
        places = list(readers)
        later.sort(key=lambda k: _group_of(slots[k], places))
    members = list(readers.values())
    best, fewest = [*first, *later], _runs([*first, *later], members)
    if fewest > len(members) and len(slots) <= _MOST_ORDERS:
        for a, b in itertools.product(itertools.permutations(first), itertools.permutations(later)):
            runs = _runs([*a, *b], members)
            if runs < fewest:
                best, fewest = [*a, *b], runs
    return best


def _group_of(slot: Slot, arguments: list[Node]) -> tuple[bool, int, int]:
    """Return the sort key of a slot: whether it is a reduction, and which vector it multiplies."""
    first = slot.terms[0]
    return isinstance(first.matrix, Reduction), slot.stage, arguments.index(first.argument)


def _told_apart(values: Iterable[Node]) -> list[Node]:
    """Return a separate node for each of some values that are no states or inputs.

    Vectors of equal value may have different gradients.
    """
    apart: dict[Node, None] = {}
    for each in values:
        while each in apart or each.operation in ("input", "state"):
            each = node("stop_gradient", each)
        apart[each] = None
    return list(apart)


def _hoisted(roots: Sequence[Node]) -> tuple[dict[Node, Node], list[Node], list[Derived]]:
    """Find the expressions that depend only on parameters, to compute them once for all steps.

    Returns
    -------
    leaves : dict of Node to Node
        A leaf ``derived`` for each such expression.
    rows : list of Node
        The parameters that elementwise operations read, then these leaves.
    derived : list of Derived
        The expressions.
    """
    order = topological(roots)
    rows = [each for each in order if each.operation in ("vector", "scalar")]
    alone = set(rows)
    for each in order:
        is_operation = bool(each.arguments) and alone.issuperset(each.arguments)
        if each.operation == "number" or is_operation:
            alone.add(each)
    read = {a for each in order if each not in alone for a in each.arguments}.union(roots)
    tops = [each for each in order if each in alone and each in read and each.arguments]
    derived = []
    for k, each in enumerate(tops):
        adjoints = gradients([(each, symbol("gradient", len(rows) + k))])
        places = [r for r, row in enumerate(rows) if row in adjoints]
        value, *grads = bare([each, *(adjoints[rows[r]] for r in places)])
        derived.append(Derived(value, tuple(zip(places, grads, strict=True))))
    leaves = {each: symbol("derived", k) for k, each in enumerate(tops)}
    return leaves, [*rows, *leaves.values()], derived
