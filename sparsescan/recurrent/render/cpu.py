"""From the graph of a step to functions for a CPU, with samples or units as lanes of vectors.

A pass of a cell is one function, which the loops over steps call for each stage. Its loops run over
the units of all samples of a group, whatever the order they have in memory. What takes long has a
loop of its own: iterations of a short one do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...graph.expressions import evaluate, topological
from ...graph.operations import OPERATIONS, Node, symbol
from ...graph.render.cpu import LaneRenderer, heavy_first
from ...locks import cached_property
from ..program import CellProgram

# Arguments of each function.
ARGUMENTS = (
    *(
        "stage",
        "parts",
        "above",
        "x",
        "further",
        "h",
        "c",
        "new_h",
        "new_c",
        "kept",
        "rows",
        "lengths",
    ),
    *("grads", "row_grads", "carry", "t", "size", "part", "row_step", "plane", "carry_step"),
)
_INDENT = " " * 4
# The first line of a loop over what is the same for all units.
_SHARED = "shared = j"


class CPURenderer(LaneRenderer):
    """Write the functions of a cell for a CPU, and say what is where in memory.

    A vector of one number for each unit and sample of a group is ``size`` numbers. In ``parts``
    they are ``part`` apart: forward slots, then arguments, then others; backward what products
    return for arguments, then for states, then others. In ``grads`` there are the gradients in
    slots, then arguments. What is the same for all units of a sample stands where ``shared`` is:
    where samples are lanes it is computed and stored for the first vector of a row alone.

    Attributes
    ----------
    state_rows : dict of int to int
        For each state that products multiply, its row of `parts` backward.
    input_row : int or None
        The row of `parts` with the gradient in the input of each unit.
    further_rows : list of int
        For each further input likewise; -1 if the gradient is 0.
    parts : int
        Rows of `parts`.
    """

    words = (
        *(*LaneRenderer.words, *ARGUMENTS, "lanes", "lane_count", "at", "j", "left", "length"),
        *("range", "load", "load_either", "store_some", "store_both", "less_or"),
        *("shared", "once", "min", "plus", "minus"),
        # Gradients in states.
        *(r"later_\d+", "g_0"),
    )

    def __init__(self, program: CellProgram) -> None:
        super().__init__(program.names)
        self.program = program
        first = len(program.arguments)
        self.state_rows = {k: first + n for n, k in enumerate(program.multiplied)}
        self.input_row: int | None = None
        self._rows_back = first + len(program.multiplied)
        if program.input_grad is not None:
            self.input_row, self._rows_back = self._rows_back, self._rows_back + 1
        self.further_rows = [-1] * len(program.further_grads)
        for n, grad in enumerate(program.further_grads):
            if grad is not None:
                self.further_rows[n], self._rows_back = self._rows_back, self._rows_back + 1
        self._rows_forward = len(program.slots) + len(program.arguments)

    @property
    def parts(self) -> int:
        """Rows of ``parts``."""
        _ = self.forward, self.backward
        return max(1, self._rows_forward, self._rows_back)

    @cached_property
    def forward(self) -> str:
        """The function of the forward pass."""
        self.begin()
        where: dict[Node, str] = {}
        stages = [(s, self._forward_stage(s, where)) for s in range(self.program.stages)]
        if self.program.derived:
            stages.append((-1, self._derived()))
        return self._function("forward", stages)

    @cached_property
    def backward(self) -> str:
        """The function of the backward pass."""
        self.begin()
        where: dict[Node, str] = {}
        stages = [(s, self._backward_stage(s, where)) for s in reversed(range(self.program.stages))]
        if any(derived.grads for derived in self.program.derived):
            stages.append((-1, self._derived_grads()))
        return self._function("backward", stages)

    # -- Text ---------------------------------------------------------------------------------

    def template(self, vector: Node) -> str:
        """Return the text of an operation; what is compared is rounded alike in both passes."""
        word = {"add": "plus", "subtract": "minus"}.get(vector.operation)
        if word is None or vector not in self.program.compared:
            return super().template(vector)
        return f"{word}({{0}}, {{1}})"

    def _function(self, name: str, stages: list[tuple[int, list[list[str]]]]) -> str:
        body = [
            f"def {name}({', '.join(ARGUMENTS)}):",
            _INDENT + "lanes = lane_count(parts)",
            _INDENT + "at = number(parts, t)",
        ]
        body += [_INDENT + line for line in self.constants("parts")]
        if self.program.uniform:
            # There is more room where units are lanes.
            body.append(_INDENT + "once = size if part > size else min(size, lanes)")
        for stage, loops in stages:
            if not loops:
                continue
            body.append(f"{_INDENT}if stage == {stage}:")
            for lines in loops:
                count = "once" if lines[0] == _SHARED else "size"
                body.append(f"{2 * _INDENT}for j in range(0, {count}, lanes):")
                if count == "size" and any("shared" in line for line in lines):
                    body.append(f"{3 * _INDENT}shared = j if part > size else 0")
                if any("left" in line for line in lines):
                    body.append(f"{3 * _INDENT}left = size - j")
                if any("length" in line for line in lines):
                    body.append(f"{3 * _INDENT}length = load(lengths, j)")
                body += [3 * _INDENT + line for line in lines]
        return "\n".join(body) + "\n"

    def _leaf(self, each: Node) -> str:
        """Return the text that loads a leaf; "" for an operation."""
        if each.arguments or each.operation in OPERATIONS:
            return ""
        if each.operation == "input":
            return "load(x, j)"
        (which, *_) = each.details
        if each.operation == "further":
            return f"load(further, {_at(which, 'plane')})"
        if each.operation == "slot":
            return f"load(parts, {_at(which, 'part', self._index(each))})"
        if each.operation == "state":
            return "load(h, j)" if which == 0 else f"load(c, {_at(which - 1, 'plane')})"
        if each in self.program.rows:
            return f"load(rows, {_at(self.program.rows.index(each), 'row_step')})"
        return ""

    def _index(self, each: Node) -> str:
        """Return the text of where a vector begins in a row."""
        return "shared" if each in self.program.uniform else "j"

    def _once(
        self,
        roots: Iterable[Node],
        where: dict[Node, str],
        leaf: Callable[[Node], str],
        first: int,
        kept: Sequence[Node] = (),
    ) -> list[str]:
        """Return the loop that computes what is the same for all units, if others read it.

        It is stored in rows of ``parts`` from the first on, of which `where` is told, and what is
        `kept` there, too.
        """
        uniform, roots = self.program.uniform, list(roots)
        if not uniform:
            return []

        def load(each: Node) -> str:
            return where.get(each) or leaf(each)

        order = topological(roots, where, load)
        read = {a for each in order if each not in uniform for a in each.arguments}.union(roots)
        own = [each for each in order if each in uniform and each in read and not load(each)]
        kept_here = [each for each in roots if each in kept and each in uniform]
        lines, texts = self.assignments(dict.fromkeys([*own, *kept_here]), {}, load)
        for row, each in enumerate(own, start=first):
            lines.append(f"store_some(parts, {_at(row, 'part')}, {texts[each]}, part - j)")
            where[each] = f"load(parts, {_at(row, 'part', 'shared')})"
        for each in kept_here:
            at = _at(kept.index(each), "size")
            lines.append(f"store_some(kept, {at}, {texts[each]}, left)")
        return [_SHARED, *lines] if lines else []

    # -- Forward ------------------------------------------------------------------------------

    def _forward_stage(self, stage: int, where: dict[Node, str]) -> list[list[str]]:
        """Return the loops of a stage; `where` are texts that load what others have stored."""
        stores = self._stores(stage)
        later = self._crossing(stage)
        about = [*stores, *later], where, self._leaf, self._rows_forward, self.program.kept
        once = self._once(*about)
        self._rows_forward += sum("store_some(parts" in line for line in once)
        for each in self.program.uniform.intersection(stores):
            stores[each] = [at for at in stores[each] if at[0] != "kept"]
        stores = {each: places for each, places in stores.items() if places}
        later = [each for each in later if each not in where]
        roots = list(dict.fromkeys([*stores, *later]))
        heavy = heavy_first(roots, where, lambda each: where.get(each) or self._leaf(each))
        # One alone may as well wait in the loop that needs it.
        heavy = heavy if len(heavy) > 1 else []
        for each in (*heavy, *later):
            if each not in stores:
                stores[each] = [("parts", self._temporary(each, stage))]
        loops, stored = [once] if once else [], dict[Node, str]()
        for target in [*([each] for each in heavy), roots]:
            left = [each for each in target if each not in stored]
            if not left:
                continue
            known = where | stored

            def load(each: Node, known: dict[Node, str] = known) -> str:
                return known.get(each) or self._leaf(each)

            order = topological(left, {}, load)
            computed = [each for each in order if each in stores and each not in known]
            lines, texts = self.assignments(dict.fromkeys([*left, *computed]), {}, load)
            for each in dict.fromkeys([*computed, *left]):
                for place, row in stores[each]:
                    text, again = self._stored(place, row, texts[each])
                    if place == "kept" and target is not roots:
                        if each.arguments:
                            text, again = self._stored_twice(row, each, stage, texts[each])
                        else:
                            again = self._leaf(each)
                    lines.append(text)
                    stored.setdefault(each, again)
            loops.append(lines)
        where |= stored
        return loops

    def _stores(self, stage: int) -> dict[Node, list[tuple[str, int]]]:
        """Return what a stage writes for others, and where."""
        program = self.program
        stores: dict[Node, list[tuple[str, int]]] = {}
        for place, nodes in (
            ("kept", program.kept),
            ("parts", program.arguments),
            ("state", program.outputs),
        ):
            first = len(program.slots) if place == "parts" else 0
            for k, each in enumerate(nodes):
                if program.stage_of(each) == stage:
                    stores.setdefault(each, []).append((place, first + k))
        return stores

    def _crossing(self, stage: int) -> list[Node]:
        """Return what a stage computes, and later ones read, though it is kept nowhere else."""
        program = self.program
        order = topological([*program.outputs, *program.arguments])
        return [
            argument
            for argument in dict.fromkeys(
                argument
                for each in order
                for argument in each.arguments
                if program.stage_of(each) > stage and argument.arguments
            )
            if program.stage_of(argument) == stage
        ]

    def _temporary(self, each: Node, stage: int) -> int:
        """Return a row of ``parts`` for a node: of the slot that only it reads, or a new one."""
        program = self.program
        order = topological([*program.outputs, *program.arguments])
        (argument, *others) = each.arguments
        users = [one for one in order if argument in one.arguments]
        if (
            not others
            and argument.operation == "slot"
            and users == [each]
            and argument not in (*program.kept, *program.outputs, *program.arguments)
        ):
            return int(argument.details[0])
        self._rows_forward += 1
        return self._rows_forward - 1

    def _stored(self, place: str, row: int, text: str) -> tuple[str, str]:
        """Return the text that stores a vector, and that which loads it."""
        if place == "state":
            old = self._leaf(symbol("state", row))
            at = "new_h, j" if row == 0 else f"new_c, {_at(row - 1, 'plane')}"
            return f"store_some({at}, less_or(at, length, {text}, {old}), left)", f"load({at})"
        if place == "parts":
            # Rows are filled up where lanes are units.
            at = f"parts, {_at(row, 'part')}"
            return f"store_some({at}, {text}, part - j)", f"load({at})"
        at = f"{place}, {_at(row, 'size')}"
        return f"store_some({at}, {text}, left)", f"load({at})"

    def _stored_twice(self, row: int, each: Node, stage: int, text: str) -> tuple[str, str]:
        """Return the text that stores what is kept and loaded again at once, and that which loads.

        What was written with a mask is slow to read again.
        """
        at = f"kept, {_at(row, 'size')}, parts, {_at(self._temporary(each, stage), 'part')}"
        return f"store_both({at}, {text}, left, part - j)", f"load_either({at}, left)"

    def _derived(self) -> list[list[str]]:
        """Return the loop that computes rows from parameters."""
        first = len(self.program.rows) - len(self.program.derived)
        values = [each.value for each in self.program.derived]
        lines, texts = self.assignments(values, {}, self._leaf)
        lines += [
            f"store_some(rows, {_at(first + k, 'row_step')}, {texts[each]}, left)"
            for k, each in enumerate(values)
        ]
        return [lines]

    # -- Backward -----------------------------------------------------------------------------

    def _backward_stage(self, stage: int, where: dict[Node, str]) -> list[list[str]]:
        """Return the loop of a stage; `where` are texts that load what others have stored."""
        program = self.program
        last, back_stage = program.stages - 1, program.back_stage_of
        stores: list[tuple[str, Node | None]] = []
        for k, grad in enumerate(program.slot_grads):
            if (back_stage(grad) if grad is not None else last) == stage:
                stores.append((f"grads, {_at(k, 'size')}, less_or(at, length, {{}}, zero)", grad))
        for k, each in enumerate(program.arguments):
            if stage == last and each in program.weighed:
                at = _at(len(program.slots) + k, "size")
                stores.append((f"grads, {at}, less_or(at, length, {{}}, zero)", each))
        if program.input_grad is not None and back_stage(program.input_grad) == stage:
            at = f"parts, {_at(self.input_row or 0, 'part')}"
            stores.append((f"{at}, less_or(at, length, {{}}, zero)", program.input_grad))
        for row, grad in zip(self.further_rows, program.further_grads, strict=True):
            if grad is not None and back_stage(grad) == stage:
                at = f"parts, {_at(row, 'part')}"
                stores.append((f"{at}, less_or(at, length, {{}}, zero)", grad))
        for r, grad in enumerate(program.row_grads):
            if grad is not None and back_stage(grad) == stage:
                at = f"row_grads, {_at(r, 'row_step')}"
                added = f"load({at}) + less_or(at, length, {{}}, zero)"
                stores.append((f"{at}, {added}", grad))
        crossing = self._crossing_back(stage)
        seen = [each for _, each in stores if each is not None]
        states = [each for each in program.state_grads if each is not None] if stage == 0 else []
        once = self._once([*seen, *crossing, *states], where, self._load, self._rows_back)
        self._rows_back += sum("store_some(parts" in line for line in once)
        crossing = [each for each in crossing if each not in where]
        for each in crossing:
            stores.append((f"parts, {_at(self._rows_back, 'part')}, {{}}", each))
            self._rows_back += 1
        lines: list[str] = []
        known: dict[Node, str] = {}
        later: dict[int, str] = {}
        seeds = [symbol("gradient", k) for k in range(program.states)]
        roots = [each for _, each in stores if each is not None] + states
        read = set(topological(roots, where, lambda each: where.get(each) or self._load(each)))
        for k, seed in enumerate(seeds):
            carry = f"carry, {_at(k, 'carry_step')}"
            is_written = stage == 0 or (stage == last and k in self.state_rows)
            if not is_written and not (seed in read and seed not in where):
                continue
            text = f"load({carry})"
            if stage == last and k in self.state_rows:
                text += f" + load(parts, {_at(self.state_rows[k], 'part')})"
            lines.append(f"later_{k} = {text}")
            later[k] = f"later_{k}"
            if seed in read and seed not in where:
                known[seed] = later[k]
                if k == 0:
                    # Of the stages before the last one only those read it that it is stored for.
                    lines.append("g_0 = later_0 + load(above, j)")
                    known[seed] = "g_0"
        more, texts = self.assignments(
            dict.fromkeys(roots), known, lambda each: where.get(each) or self._load(each)
        )
        lines += more
        for text, grad in stores:
            whole = text.format("zero" if grad is None else texts[grad])
            whole = whole.replace("less_or(at, length, zero, zero)", "zero")
            lines.append(f"store_some({whole}, left)")
        for k, name in later.items():
            carry = f"carry, {_at(k, 'carry_step')}"
            if stage == 0:
                grad = program.state_grads[k]
                value = "zero" if grad is None else texts[grad]
                lines.append(f"store_some({carry}, less_or(at, length, {value}, {name}), left)")
            elif k in self.state_rows:
                lines.append(f"store_some({carry}, {name}, left)")
        first = self._rows_back - len(crossing)
        where |= {each: f"load(parts, {_at(first + k, 'part')})" for k, each in enumerate(crossing)}
        return [loop for loop in (once, lines) if loop]

    def _load(self, each: Node) -> str:
        """Return the text that loads what the backward pass does not compute; else ""."""
        program = self.program
        if each in program.kept:
            return f"load(kept, {_at(program.kept.index(each), 'size', self._index(each))})"
        if each.operation == "back":
            return f"load(parts, {_at(each.details[0], 'part', self._index(each))})"
        if each in program.outputs and each.operation not in ("state", "input", "number"):
            k = program.outputs.index(each)
            return "load(new_h, j)" if k == 0 else f"load(new_c, {_at(k - 1, 'plane')})"
        if each.operation == "gradient":
            return ""
        return self._leaf(each)

    def _crossing_back(self, stage: int) -> list[Node]:
        """Return the gradients that a stage computes, and those that run after it read."""
        program = self.program
        if stage == 0:
            return []
        order = topological(program.grads)
        has_grad = evaluate(
            order, lambda each, given: each.operation in ("gradient", "back") or any(given)
        )
        known: dict[Node, int] = {}
        stages = {each: program.back_stage_of(each) for each in order} if order else known
        read = [a for each in order if stages[each] < stage for a in each.arguments]
        read += [each for each in program.state_grads if each is not None]
        return [
            each
            for each in dict.fromkeys(read)
            if has_grad[each]
            and stages[each] == stage
            and not (each.operation == "gradient" and each.details[0] > 0)
            and each.operation != "back"
        ]

    def _derived_grads(self) -> list[list[str]]:
        """Return the loop that adds gradients in rows to those in what these were computed from."""
        pairs = [pair for each in self.program.derived for pair in each.grads]

        def load(each: Node) -> str:
            if each.operation == "gradient":
                return f"load(row_grads, {_at(each.details[0], 'row_step')})"
            return self._leaf(each)

        lines, texts = self.assignments(dict.fromkeys(grad for _, grad in pairs), {}, load)
        for row, grad in pairs:
            at = f"row_grads, {_at(row, 'row_step')}"
            lines.append(f"store_some({at}, load({at}) + {texts[grad]}, left)")
        return [lines]


def _at(row: int, step: str, index: str = "j") -> str:
    """Return the text of a place in a row of vectors."""
    return index if row == 0 else f"{step} + {index}" if row == 1 else f"{row} * {step} + {index}"
