"""A step and its derivatives as Python functions on arrays of NumPy or CuPy.

Arrays have a row for each step and sample, and a column for each unit. What is not elementwise, the
sums of products, comes from two callbacks: ``sums(stage, *arguments)`` returns those of a stage,
and ``back(stage)`` the gradients that its products return.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from ...graph.expressions import topological
from ...graph.operations import Node, symbol
from ...graph.render.base import function_text, functions_of, without_brackets
from ...graph.render.numpy import ArrayRenderer, helpers
from ..linear import LinearProgram, linear
from ..program import INPUT, CellProgram, Slot

_numbers = itertools.count()


class Writer(ArrayRenderer):
    """Write one function of a step."""

    words = (
        *(*ArrayRenderer.words, "back", "further", "grads", "new", "out", "rows"),
        *("slopes", "states", "sums", "x"),
    )
    letters: ClassVar[Mapping[str, str]] = {
        "slot": "s",
        "gradient": "g",
        "back": "b",
        "state": "h",
        "slope": "d",
        "derived": "p",
        "further": "m",
    }
    free, strided = ("slot",), ("new",)

    def name_of(self, each: Node) -> str:
        """Return the name of a node, that of the definition if it has one."""
        return "x" if each is INPUT else super().name_of(each)

    def text_of(self, texts: Mapping[Node, str], each: Node) -> str:
        """Return the text of what a product multiplies."""
        return without_brackets(texts.get(each) or self.name_of(each))


class ArrayCode:
    """Functions of a step on arrays, as text, and compiled once for each library.

    Parameters
    ----------
    program : CellProgram
        The program.
    title : str
        What docstrings call it: the name of the cell.
    gates : mapping of str to tuple of str
        For the name of each parameter those of its gates.
    states, further : sequence of str, optional
        Names of states, and of further inputs.

    Attributes
    ----------
    linear : LinearProgram
        Its gradients.
    names : dict of Node to str
        Names of vectors.
    """

    def __init__(
        self,
        program: CellProgram,
        title: str,
        gates: Mapping[str, tuple[str, ...]],
        states: Sequence[str] = (),
        further: Sequence[str] = (),
    ) -> None:
        self.program, self._title, self._gates = program, title, gates
        self.linear: LinearProgram = linear(program)
        self.names = dict(program.names)
        self.names |= {symbol("state", k): name for k, name in enumerate(states)}
        self.names |= {symbol("further", k): name for k, name in enumerate(further)}
        self.names |= {
            row: self._gate(*row.details).replace(".", "_")
            for row in program.rows
            if row.operation != "derived"
        }
        self._made: dict[Any, dict[str, Any]] = {}

    def __deepcopy__(self, memo: Any) -> ArrayCode:
        return self

    def on(self, xp: Any) -> dict[str, Any]:
        """Return the functions, by their names, for a library."""
        functions = self._made.get(xp)
        if functions is None:
            text = "\n\n\n".join(self.text(which) for which in ("forward", "backward"))
            file = f"<{self._title} on arrays, {next(_numbers)}>"
            functions = self._made[xp] = functions_of(text, file, helpers(xp))
        return functions

    def text(self, which: str) -> str:
        """Return the text of the functions of a pass, ``forward`` or ``backward``."""
        if which == "forward":
            parts = [self._derived(), self._forward()]
        else:
            parts = [self._linearize(), self._columns(), self._param_grads()]
            parts += [self._input_grads(), self._derived_grads()]
        return "\n\n\n".join(part for part in parts if part)

    def describe(self, slot: Slot, name_of: Callable[[Node], str]) -> str:
        """Return a sum of products in words, such as ``weight_ih.f(x) + weight_hh.f(h)``."""
        terms = [
            f"{self._gate(term.matrix, term.gate)}{'.T' * term.is_transposed}"
            f"({name_of(term.argument)})"
            for term in slot.terms
        ]
        return " + ".join([*terms, *(self._gate(*vector) for vector in slot.vectors)])

    def _gate(self, name: str, which: int) -> str:
        gates = self._gates.get(name)
        return f"{name}.{gates[which]}" if gates else name

    # -- The functions --------------------------------------------------------------------------

    def _forward(self) -> str:
        return self._of_a_step("forward", "states after", "new", self.program.outputs)

    def _linearize(self) -> str:
        return self._of_a_step("linearize", "slopes of", "slopes", self.linear.slopes)

    def _of_a_step(self, name: str, what: str, into: str, roots: Sequence[Node]) -> str:
        """Return a function that writes what a step computes, after all sums."""
        writer = Writer(
            self.names, [*self.program.arguments, *roots], _places(into, enumerate(roots))
        )
        lines, texts = self._stages(writer, roots)
        lines += writer.assignments(roots, texts)[0]
        doc = f"Write the {what} a step of {self._title}."
        parameters = f"sums, x, further, states, rows, {into}, dtype"
        return function_text(name, parameters, doc, lines)

    def _columns(self) -> str:
        columns, first = self.linear.columns, len(self.linear.slopes)
        lines, _ = self._written(columns, _places("slopes", enumerate(columns, first)))
        doc = "Write the products of slopes that are factors of a Jacobian."
        return function_text("columns", "slopes, rows, dtype", doc, lines)

    def _param_grads(self) -> str:
        slots, grads = range(len(self.program.slots)), self.linear.row_grads
        return self._grads("param_grads", "parameters of each unit", slots, grads)

    def _input_grads(self) -> str:
        slots = [
            k
            for k, slot in enumerate(self.program.slots)
            if self.program.stages > 1 or any(term.argument is INPUT for term in slot.terms)
        ]
        grads = self.linear.input_grad, *self.linear.further_grads
        return self._grads("input_grads", "the input of each unit", slots, grads)

    def _derived(self) -> str:
        values = [each.value for each in self.program.derived]
        if not values:
            return ""
        lines, texts = self._written(values)
        lines.append(f"return [{', '.join(without_brackets(texts[each]) for each in values)}]")
        doc = "Return what depends on parameters alone."
        return function_text("derived", "rows, dtype", doc, lines)

    def _derived_grads(self) -> str:
        grads = [pair for each in self.program.derived for pair in each.grads]
        if not self.program.derived:
            return ""
        lines, texts = self._written([grad for _, grad in grads])
        pairs = (f"({row}, {without_brackets(texts[grad])})" for row, grad in grads)
        lines.append(f"return [{', '.join(pairs)}]")
        doc = "Return gradients in parameters, by number, from those in what depends on them."
        return function_text("derived_grads", "rows, grads, dtype", doc, lines)

    # -- Their parts ----------------------------------------------------------------------------

    def _written(
        self, roots: Sequence[Node], places: Mapping[Node, list[str]] | None = None
    ) -> tuple[list[str], dict[Node, str]]:
        """Return lines that compute nodes from leaves, and the text of each node."""
        writer = Writer(self.names, roots, places)
        lines, texts = self._leaves(writer, roots)
        more, texts = writer.assignments(roots, texts)
        return lines + more, texts

    def _leaves(self, writer: Writer, roots: Iterable[Node]) -> tuple[list[str], dict[Node, str]]:
        """Return what reads the leaves of expressions from arguments, and their names."""
        lines, texts = [], {INPUT: "x"}
        arrays = {"state": "states", "gradient": "grads", "slope": "slopes", "further": "further"}
        rows = {row: k for k, row in enumerate(self.program.rows)}
        for each in topological(roots):
            if each in rows:
                text = f"rows[{rows[each]}]"
            elif each.operation in arrays:
                text = f"{arrays[each.operation]}[{each.details[0]}]"
            else:
                continue
            texts[each] = writer.name_of(each)
            lines.append(f"{texts[each]} = {text}")
        return lines, texts

    def _stages(self, writer: Writer, roots: Sequence[Node]) -> tuple[list[str], dict[Node, str]]:
        """Return what computes the sums of all stages, and the names of what is known then."""
        program = self.program
        lines, texts = self._leaves(writer, [*roots, *program.arguments])
        read_slots = {each.details[0] for each in topological(roots) if each.operation == "slot"}
        for stage in range(program.stages):
            slots = [k for k, each in enumerate(program.slots) if each.stage == stage]
            is_last = stage == program.stages - 1
            arguments = [each for each in program.arguments if program.stage_of(each) == stage - 1]
            if not slots or (is_last and not arguments and read_slots.isdisjoint(slots)):
                continue
            more, texts = writer.assignments(arguments, texts)
            lines += more
            leaves = [symbol("slot", k) for k in slots]
            texts |= {leaf: writer.name_of(leaf) for leaf in leaves}
            for k, leaf in zip(slots, leaves, strict=True):
                about = self.describe(program.slots[k], partial(writer.text_of, texts))
                lines.append(f"# {texts[leaf]} = {about}")
            given = [str(stage), *(without_brackets(texts[each]) for each in arguments)]
            names = [texts[leaf] for leaf in leaves]
            lines.append(f"{_target(names)} = sums({', '.join(given)})")
        return lines, texts

    def _grads(
        self, name: str, what: str, slots: Iterable[int], others: Iterable[Node | None]
    ) -> str:
        """Return a function that writes the gradients in some slots, stage by stage, and others."""
        grads = {k: self.linear.slot_grads[k] for k in slots}
        places = _places("out", ((k, grad) for k, grad in grads.items() if grad is not None))
        found = (grad for grad in others if grad is not None)
        last = _places("out", enumerate(found, len(self.program.slots)))
        for each, more in last.items():
            places[each] = places.get(each, []) + more
        writer = Writer(self.names, list(places), places)
        lines, texts = self._leaves(writer, places)
        read = {each.details[0] for each in topological(places) if each.operation == "back"}
        for number, (own, returned) in enumerate(self.linear.stages):
            own_grads = [grads.get(k) for k in own]
            more_lines, texts = writer.assignments([g for g in own_grads if g is not None], texts)
            lines += more_lines
            lines += [f"out[{k}][...] = 0" for k in own if k in grads and grads[k] is None]
            if not read.isdisjoint(returned):
                leaves = [symbol("back", k) for k in returned]
                texts |= {leaf: writer.name_of(leaf) for leaf in leaves}
                lines.append(f"{_target([texts[leaf] for leaf in leaves])} = back({number})")
        lines += writer.assignments(last, texts)[0]
        parameters = "back, slopes, x, states, rows, grads, out, dtype"
        return function_text(
            name, parameters, f"Write the gradients in sums, and in {what}.", lines
        )


def _target(names: Sequence[str]) -> str:
    """Return names that a sequence is assigned to."""
    return ", ".join(names) if len(names) > 1 else f"({names[0]},)"


def _places(array: str, numbered: Iterable[tuple[int, Node]]) -> dict[Node, list[str]]:
    """Return where each node is written: a node may have several places in an array."""
    places: dict[Node, list[str]] = {}
    for k, each in numbered:
        places.setdefault(each, []).append(f"{array}[{k}]")
    return places
