"""Programs, run in the order that kernels run them in, with no more than what these have.

Slow and in float64: every expression is computed node by node, from what there is at its stage.
What is missing raises, so that a run shows that slots, stages and what is kept are right, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from cell_oracle import Runs
from scipy.linalg import block_diag
from scipy.special import expit

from sparsescan.graph.operations import OPERATIONS, Node, Reduction
from sparsescan.recurrent.program import CellProgram, Term

Array = Any

_OTHERS: dict[str, Callable[..., Array]] = {
    "sigmoid": expit,
    "softplus": lambda a: np.logaddexp(0, a),
    "relu": lambda a: np.maximum(a, 0),
    "less": lambda a, b: np.float64(1) * (a < b),
    "less_equal": lambda a, b: np.float64(1) * (a <= b),
    "where": lambda condition, a, b: np.where(condition != 0, a, b),
    # As values they are their first argument.
    "stop_gradient": lambda a: a,
    "surrogate": lambda value, *_: value,
}
FUNCTIONS = {name: _OTHERS.get(name) or getattr(np, name) for name in OPERATIONS}


class MissingError(AssertionError):
    """An expression reads what is not there when it is computed."""


def evaluate(each: Node, known: Mapping[Node, Array], memo: dict[Node, Array]) -> Array:
    """Return the value of an expression, from those of some nodes, whichever it meets first."""
    if each in known:
        return known[each]
    if each not in memo:
        if each.operation == "number":
            memo[each] = np.float64(each.details[0])
        elif each.operation not in FUNCTIONS:
            raise MissingError(f"{each} is not there")
        else:
            arguments = [evaluate(argument, known, memo) for argument in each.arguments]
            with np.errstate(all="ignore"):
                memo[each] = FUNCTIONS[each.operation](*arguments)
    return memo[each]


def run_program(
    program: CellProgram,
    biased: Mapping[str, Sequence[int]],
    params: Mapping[str, Array],
    x: Array,
    states: Sequence[Array],
    cotangents: Sequence[Array],
) -> Runs:
    """Run a program over a sequence, and back.

    Parameters
    ----------
    program : CellProgram
        The program.
    biased : mapping of str to sequence of int
        For each matrix, the gates that have a bias.
    params : mapping of str to ndarray
        Parameters by name; the bias of ``weight_NAME`` is ``bias_NAME``, and of another ``NAME``
        ``NAME_bias``.
    x, states, cotangents
        As for :meth:`cell_oracle.Reference.run`.
    """
    run = _Run(program, biased, params, states[0].shape)
    before, kept, outputs = [], [], []
    now = list(states)
    for each in x:
        before.append(now)
        now, values = run.forward(each, now)
        kept.append(values)
        outputs.append(now)
    grads = [np.zeros_like(each) for each in states]
    input_grads = np.zeros_like(x)
    for t in reversed(range(len(x))):
        grads = [grad + each[t] for grad, each in zip(grads, cotangents, strict=True)]
        grads, input_grads[t] = run.backward(x[t], before[t], outputs[t], kept[t], grads)
    run.finish()
    by_state = [np.stack([now[k] for now in outputs]) for k in range(len(states))]
    return Runs(by_state, input_grads, grads, run.grads, np.inf)


class _Run:
    """Parameters of a program, and their gradients so far."""

    def __init__(
        self,
        program: CellProgram,
        biased: Mapping[str, Sequence[int]],
        params: Mapping[str, Array],
        shape: tuple[int, int],
    ) -> None:
        self.program, self.biased, self.params, self.shape = program, biased, params, shape
        self.grads = {name: np.zeros_like(each) for name, each in params.items()}
        self.back_of = {each: k for k, each in enumerate(program.arguments)}
        assert len(self.back_of) == len(program.arguments), "an argument stands twice"
        self.rows: dict[Node, Array] = {}
        for row in program.rows:
            if row.operation != "derived":
                self.rows[row] = self._row(params, row)
        leaves = dict(self.rows)
        for k, each in enumerate(program.derived):
            row = program.rows[len(program.rows) - len(program.derived) + k]
            assert row.operation == "derived"
            assert row.details == (k,)
            value = evaluate(each.value, leaves, {})
            self.rows[row] = np.broadcast_to(value, shape[-1:])
        self.row_grads = [np.zeros(shape[-1]) for _ in program.rows]

    def _row(self, arrays: Mapping[str, Array], row: Node) -> Array:
        name, gate = row.details
        return arrays[name] if row.operation == "scalar" else self._block(arrays[name], gate)

    def _block(self, array: Array, gate: int) -> Array:
        units = self.shape[-1]
        return array[gate * units : (gate + 1) * units]

    def _bias(self, arrays: Mapping[str, Array], term: Term) -> Array | None:
        if isinstance(term.matrix, Reduction):
            return None
        kind, _, rest = term.matrix.partition("_")
        name = f"bias_{rest}" if kind == "weight" and rest else f"{term.matrix}_bias"
        if name not in arrays or term.is_transposed or term.gate not in self.biased[term.matrix]:
            return None
        return self._block(arrays[name], self.biased[term.matrix].index(term.gate))

    def _leaves(self, x: Array, states: Sequence[Array]) -> dict[Node, Array]:
        """Return what both passes read of a step, as the leaves that stand for it."""
        known = dict(self.rows)
        for each in _leaves_of(self.program):
            if each.operation == "state":
                known[each] = states[each.details[0]]
            elif each.operation == "input" and self.program.uses_input:
                known[each] = x
        return known

    def _product_input(self, term: Term, x: Array, states: Sequence[Array]) -> Array | None:
        """Return what a product multiplies, unless it is computed in the step."""
        if term.argument in self.back_of:
            return None
        if term.argument.operation == "input":
            return x
        assert term.argument.operation == "state", f"nothing computes {term.argument}"
        return states[term.argument.details[0]]

    def _own(self, arrays: Mapping[str, Array], term: Term) -> Array:
        """Return a gate of a matrix."""
        _, rows, _ = self.program.partial.get(term.matrix, (1, 0, 0))
        rows = rows or self.shape[-1]
        return arrays[term.matrix][term.gate * rows : (term.gate + 1) * rows]

    def _weight(self, term: Term) -> Array:
        """Return the matrix of a product, or of a reduction over units."""
        if not isinstance(term.matrix, Reduction):
            block, heads = self._own(self.params, term), self.program.heads_of(term.matrix)
            if heads > 1:
                return block_diag(*np.split(block, heads))
            if term.matrix not in self.program.partial:
                return block
            return np.pad(block, [(0, self.shape[-1] - size) for size in block.shape])
        units = self.shape[-1]
        heads = np.repeat(np.arange(term.matrix.heads), units // term.matrix.heads)
        same = 1.0 * (heads[:, None] == heads)
        return same / same.sum(0) if term.matrix.operation == "mean" else same

    # -- Passes -----------------------------------------------------------------------------------

    def forward(self, x: Array, states: list[Array]) -> tuple[list[Array], dict[Node, Array]]:
        """Return the states after a step, and what is kept of it."""
        program = self.program
        known = self._leaves(x, states)
        slots = {each.details[0]: each for each in _leaves_of(program) if each.operation == "slot"}
        arguments: dict[Node, Array] = {}
        outputs: dict[Node, Array] = {}
        for stage in range(program.stages):
            for k, slot in enumerate(program.slots):
                if slot.stage != stage:
                    continue
                total = np.zeros(self.shape)
                for term in slot.terms:
                    given = self._product_input(term, x, states)
                    if given is None:
                        if term.argument not in arguments:
                            raise MissingError(f"slot {k} of stage {stage} reads {term.argument}")
                        given = arguments[term.argument]
                    if isinstance(term.matrix, Reduction) and term.matrix.operation == "maximum":
                        parts = given.reshape(len(given), term.matrix.heads, -1)
                        total = total + parts.max(-1).repeat(parts.shape[-1], axis=-1)
                        continue
                    weight = self._weight(term)
                    total = total + given @ (weight if term.is_transposed else weight.T)
                    bias = self._bias(self.params, term)
                    if bias is not None:
                        total = total + bias
                for name, gate in slot.vectors:
                    total = total + self._block(self.params[name], gate)
                if k in slots:
                    known[slots[k]] = total
            memo: dict[Node, Array] = {}
            for group, values in ((program.arguments, arguments), (program.outputs, outputs)):
                for each in group:
                    if program.stage_of(each) == stage:
                        value = evaluate(each, known, memo)
                        values[each] = np.broadcast_to(value, self.shape)
        memo = {}
        kept = {each: evaluate(each, known, memo) for each in program.kept}
        return [outputs[each] for each in program.outputs], kept

    def backward(
        self,
        x: Array,
        before: list[Array],
        after: list[Array],
        kept: dict[Node, Array],
        grads: list[Array],
    ) -> tuple[list[Array], Array]:
        """Return the gradients in the states before a step and in its input."""
        program = self.program
        known = self._leaves(x, before)
        known |= dict(zip(program.outputs, after, strict=True))
        known |= kept
        new = [np.zeros(self.shape) for _ in before]
        input_grad = np.zeros_like(x)
        back = [np.zeros(self.shape) for _ in program.arguments]
        parts = (
            *((each, "slot", k) for k, each in enumerate(program.slot_grads)),
            *((each, "state", k) for k, each in enumerate(program.state_grads)),
            *((each, "row", k) for k, each in enumerate(program.row_grads)),
            (program.input_grad, "input", 0),
        )
        symbols = {
            each: each.details[0]
            for each in _backward_leaves(program)
            if each.operation in ("gradient", "back")
        }
        slot_grads: dict[int, Array] = {}
        for stage in reversed(range(program.stages)):
            for each, k in symbols.items():
                if each.operation == "gradient":
                    known[each] = grads[k]
                elif program.back_stage_of(each) >= stage:
                    known.setdefault(each, back[k].copy())
            memo: dict[Node, Array] = {}
            for each, kind, k in parts:
                if each is None or program.back_stage_of(each) != stage:
                    continue
                value = np.broadcast_to(evaluate(each, known, memo), self.shape)
                if kind == "slot":
                    slot_grads[k] = value
                elif kind == "state":
                    new[k] = new[k] + value
                elif kind == "row":
                    self.row_grads[k] += value.sum(0)
                else:
                    input_grad = input_grad + value
            for k, slot in enumerate(program.slots):
                if slot.stage != stage or program.slot_grads[k] is None:
                    continue
                if k not in slot_grads:
                    raise MissingError(f"the gradient of slot {k} is late")
                grad = slot_grads[k]
                for term in slot.terms:
                    weight = self._weight(term)
                    given = self._product_input(term, x, before)
                    result = grad @ (weight.T if term.is_transposed else weight)
                    is_reduction = isinstance(term.matrix, Reduction)
                    if given is None:
                        back[self.back_of[term.argument]] += result
                    if given is None and not is_reduction:
                        given = evaluate(term.argument, known, {})
                        given = np.broadcast_to(given, self.shape)
                    elif given is None:
                        continue
                    elif term.argument.operation == "input":
                        input_grad = input_grad + result
                    else:
                        new[term.argument.details[0]] += result
                    if is_reduction:
                        continue
                    pair = (given, grad) if term.is_transposed else (grad, given)
                    own = self._own(self.grads, term)
                    rows = np.split(pair[0].T @ pair[1], self.program.heads_of(term.matrix))
                    blocks = [np.split(each, len(rows), axis=1)[k] for k, each in enumerate(rows)]
                    own += np.concatenate(blocks)[: own.shape[0], : own.shape[1]]
                    bias = self._bias(self.grads, term)
                    if bias is not None:
                        bias += grad.sum(0)
                for name, gate in slot.vectors:
                    self._block(self.grads[name], gate)[:] += grad.sum(0)
        # What is added to a sum after it was read would be lost.
        for each, k in symbols.items():
            if each.operation == "back":
                assert np.array_equal(known[each], back[k]), f"back {k} was read too early"
        return new, input_grad

    def finish(self) -> None:
        """Add the gradients of rows to those of the parameters."""
        program = self.program
        sums = list(self.row_grads)
        first = len(program.rows) - len(program.derived)
        leaves = {row: self.rows[row] for row in program.rows[:first]}
        for k, each in enumerate(program.derived):
            for row, grad in each.grads:
                known = dict(leaves)
                for leaf in _leaves_under([grad]):
                    if leaf.operation == "gradient":
                        assert leaf.details == (first + k,)
                        known[leaf] = self.row_grads[first + k]
                value = np.broadcast_to(evaluate(grad, known, {}), self.shape[-1:])
                sums[row] = sums[row] + value
        for row, total in zip(program.rows[:first], sums, strict=False):
            if row.operation == "scalar":
                self.grads[row.details[0]] += total.sum()
            else:
                self._row(self.grads, row)[:] += total


def _leaves_under(roots: Sequence[Node | None]) -> set[Node]:
    found, stack = set[Node](), [each for each in roots if each is not None]
    while stack:
        each = stack.pop()
        if each not in found:
            found.add(each)
            stack += each.arguments
    return {each for each in found if not each.arguments}


def _backward_leaves(program: CellProgram) -> set[Node]:
    return _leaves_under(
        [*program.slot_grads, *program.state_grads, *program.row_grads, program.input_grad]
    )


def _leaves_of(program: CellProgram) -> set[Node]:
    return _leaves_under([*program.outputs, *program.arguments]) | _backward_leaves(program)
