"""Source of the device functions that CUDA kernels of a program call, for one unit of one sample.

The kernels of :mod:`sparsescan.recurrent.loops.cuda` have the loops over steps, samples, units and
stages, and move numbers between memory, shared memory and registers. What is between them follows
from the program, and is written here: which vectors meet which weights, what a stage computes, and
which number of a unit has which place. The text of all functions of a pass is a module, which
tracebacks show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from ...graph.expressions import topological
from ...graph.operations import Node, is_heavy
from ...graph.render.base import function_text, functions_of
from ...graph.render.cuda import CudaRenderer
from ..program import CellProgram


class CudaBlock(NamedTuple):
    """A gate of a matrix, or its transpose, as it multiplies in a step."""

    matrix: str
    gate: int
    is_transposed: bool


class Piece(NamedTuple):
    """A product of a block of weights and a vector: the numbers of both, and of the sum it is in.

    Forward vectors are the states that are multiplied, then arguments; backward gradients in sums.
    """

    block: int
    source: int
    sum: int


class Phase(NamedTuple):
    """The products before a stage; or backward behind it, with transposed blocks.

    Attributes
    ----------
    pieces : tuple of Piece
        The products, those with the same vector one after the other.
    sums : tuple of int
        Forward the slots that they are summed up in; backward what has them as gradients: states,
        in the order of kernels, then arguments.
    """

    pieces: tuple[Piece, ...]
    sums: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The numbers of the blocks of weights."""
        return tuple(dict.fromkeys(piece.block for piece in self.pieces))


class Sizes(NamedTuple):
    """Numbers in the text of functions that depend on units and threads.

    Attributes
    ----------
    units, samples : int
        Units, and samples of a block of threads.
    padded : int
        Numbers of a vector in shared memory.
    vector : int
        Numbers in 16 bytes.
    is_held : bool
        Whether registers hold all blocks of weights, not only those of a phase.
    one_round : bool
        Whether each thread has one unit.
    chains : tuple of int
        For each phase in how many parts a sum is added up.
    has_resets : bool
        Whether the states that steps read are behind those that were written.
    """

    units: int
    samples: int
    padded: int
    vector: int
    is_held: bool
    one_round: bool
    chains: tuple[int, ...]
    has_resets: bool


class CudaProgram:
    """A program as kernels run it: numbers for all that they move, and the source of functions.

    Parameters
    ----------
    program : CellProgram
        The program.

    Attributes
    ----------
    stages : int
        How many stages a step has.
    states : tuple of int
        The states in the order of kernels: those that matrices multiply come first.
    shared : int
        How many of them are multiplied.
    output : int
        Which of them is the output.
    slots, inputs : int
        Sums of products, and those with products of the input, which are the first.
    kept : tuple of Node
        What the forward pass keeps, beside arguments, in the order of stages.
    arguments : tuple of int
        The arguments in the order of stages, by their numbers in the program.
    argument_states : tuple of int or None
        Which new states the arguments are; others are stored apart.
    blocks : tuple of CudaBlock
        The blocks of weights that multiply vectors of units.
    forward, backward : tuple of Phase
        The phases of a step, by stage.
    rows, leaves : int
        Rows of parameters that elementwise operations read, and those that are not derived.
    mids, back_mids : int
        Numbers that stages hand on to others, forward and backward.
    gots : int
        Gradients by products that stages wait for: in arguments, then in states.
    loads : int
        Numbers that the backward pass loads.
    has_input_grad : bool
        Whether there is a gradient in the input beside that by products.
    keeps : bool
        Whether the forward pass writes anything but states.
    """

    def __init__(self, program: CellProgram) -> None:
        self.program = program
        self.stages, count = program.stages, program.states
        multiplied = program.multiplied
        self.states = (*multiplied, *(k for k in range(count) if k not in multiplied))
        self.shared, self.output = len(multiplied), self.states.index(0)
        self._state = {program_order: own for own, program_order in enumerate(self.states)}
        self.slots = len(program.slots)
        self.inputs = sum(
            any(term.argument.operation == "input" for term in slot.terms) for slot in program.slots
        )
        self.leaves = sum(row.operation != "derived" for row in program.rows)
        self.rows = len(program.rows)
        self._row = {row: k for k, row in enumerate(program.rows)}
        forward = topological([*program.outputs, *program.arguments, *program.kept])
        self._stage = {each: program.stage_of(each) for each in forward}
        stage_of = self._stage.__getitem__
        places = sorted(range(len(program.arguments)), key=lambda a: stage_of(program.arguments[a]))
        self.arguments = tuple(places)
        self._argument = {program.arguments[a]: own for own, a in enumerate(places)}
        # New states are stored anyway.
        after = {each: self._state[k] for k, each in enumerate(program.outputs)}
        self.argument_states = tuple(after.get(program.arguments[a]) for a in places)
        read = self._is_read()
        kept = [each for each in program.kept if each in read and each not in self._argument]
        self.kept = tuple(sorted(kept, key=self._turn))
        self._kept = {each: own for own, each in enumerate(self.kept)}
        self.has_input_grad = program.input_grad is not None
        self.keeps = bool(self.kept) or None in self.argument_states
        self._find_phases()
        text = _Text(self)
        self._advance = text.forward()
        self._retreat = text.backward()
        self._derive, self._pull = text.derived()
        self.mids, self.back_mids, self.loads = text.mids, text.back_mids, len(text.loads)
        self._loads, self._needed = text.loads, text.needed

    def _is_read(self) -> set[Node]:
        """Return which kept vectors gradients are computed from; arguments are kept themselves."""
        program = self.program
        known = {*program.kept, *(each for each in program.outputs if each.arguments)}
        return set(program.kept).intersection(topological(program.grads, (), known.__contains__))

    def _turn(self, each: Node) -> tuple[int, int, int]:
        """Return when a vector is computed: by stage, then those first that few sums are in."""
        sums = [one.details[0] for one in topological([each]) if one.operation == "slot"]
        return self._stage[each], len(sums), min(sums, default=0)

    def _find_phases(self) -> None:
        """Find the products of each stage."""
        program, blocks = self.program, dict[CudaBlock, int]()
        forward: list[Phase] = []
        # Which slots of a stage have products of vectors of units, whose gradients are multiplied.
        self.shares: list[list[int]] = []
        for stage in range(self.stages):
            pieces, slots = [], list[int]()
            for k, slot in enumerate(program.slots):
                terms = [term for term in slot.terms if term.argument.operation != "input"]
                if slot.stage != stage or not terms:
                    continue
                slots.append(k)
                for term in terms:
                    block = CudaBlock(term.matrix, term.gate, term.is_transposed)
                    number = blocks.setdefault(block, len(blocks))
                    pieces.append(Piece(number, self._source(term.argument), len(slots) - 1))
            pieces.sort(key=lambda piece: piece.source)
            forward.append(Phase(tuple(pieces), tuple(slots)))
            self.shares.append(slots)
        self.blocks, self.forward = tuple(blocks), tuple(forward)
        backward: list[Phase] = []
        for phase in forward:
            targets = [self._target(piece.source) for piece in phase.pieces]
            sums = sorted(set(targets))
            back = [
                Piece(piece.block, piece.sum, sums.index(target))
                for piece, target in zip(phase.pieces, targets, strict=True)
            ]
            back.sort(key=lambda piece: piece.source)
            backward.append(Phase(tuple(back), tuple(sums)))
        self.backward = tuple(backward)
        # Gradients in states by products of later stages wait for the first one.
        early = {each for phase in backward[1:] for each in phase.sums if each < len(self.states)}
        arguments = {len(self.states) + a for a in range(len(self.arguments))}
        self._got = {each: k for k, each in enumerate((*sorted(arguments), *sorted(early)))}
        self.gots = len(self._got)

    def _source(self, argument: Node) -> int:
        if argument.operation == "state":
            return self._state[argument.details[0]]
        return self.shared + self._argument[argument]

    def _target(self, source: int) -> int:
        """Return what a product has a gradient in: a state, or an argument behind all states."""
        return source if source < self.shared else len(self.states) + source - self.shared

    # -- Places -----------------------------------------------------------------------------------

    def kept_range(self, stage: int) -> tuple[int, int]:
        """Return where the kept vectors of a stage begin and end."""
        return _range([self._stage[each] for each in self.kept], stage)

    def argument_range(self, stage: int) -> tuple[int, int]:
        """Return where the arguments that a stage computes begin and end."""
        arguments = self.program.arguments
        return _range([self._stage[arguments[a]] for a in self.arguments], stage)

    def kept_rows(self, one_round: bool) -> list[int]:
        """Return in which row each kept vector is stored: that of a slot, or one behind them.

        The product with the input is in a slot's row before, and its gradient will be there. A
        thread with one unit has loaded all of a step by then. With several units it loads in each
        stage, so the product must have been read, and the gradient must come after the last load.
        """
        if one_round or self.stages == 1:
            return list(range(len(self.kept)))
        slots, free = self.program.slots, list(range(self.slots))
        rows, behind = [], self.slots
        for place, each in enumerate(self.kept):
            last = self._needed.get(("kept", place), self.stages)
            fit = [
                k
                for k in free
                if (k >= self.inputs or slots[k].stage <= self._stage[each])
                and slots[k].stage <= last
            ]
            if fit:
                free.remove(fit[0])
                rows.append(fit[0])
            else:
                rows.append(behind)
                behind += 1
        return rows

    def extra(self, one_round: bool) -> int:
        """Return how many rows there are behind those of slots: kept vectors, then arguments."""
        behind = max([*self.kept_rows(one_round), self.slots - 1]) + 1 - self.slots
        return behind + self.argument_states.count(None)

    def argument_row(self, argument: int, one_round: bool) -> int:
        """Return in which row behind those of slots an argument is stored, if it is."""
        before = self.argument_states[:argument].count(None)
        return self.extra(one_round) - self.argument_states.count(None) + before

    # -- Source -----------------------------------------------------------------------------------

    def source(self, sizes: Sizes, *, is_backward: bool) -> str:
        """Return the text of the functions of a pass."""
        parts = [
            f"UNITS, SAMPLES, PADDED, VECTOR = "
            f"{sizes.units}, {sizes.samples}, {sizes.padded}, {sizes.vector}"
        ]
        if self.rows > self.leaves:
            title = "Compute rows that depend on parameters alone."
            parts.append(_function("derive", "rows", title, self._derive))
        phases = self.backward if is_backward else self.forward
        for stage, phase in enumerate(phases):
            if phase.pieces:
                parts.append(self._add(stage, phase, sizes, is_backward))
        parts += self._back_parts(sizes) if is_backward else self._forward_parts(sizes)
        return "\n\n".join(parts)

    def _add(self, stage: int, phase: Phase, sizes: Sizes, is_backward: bool) -> str:
        """Return the function that multiplies a tile of weights by 16 bytes of some vectors."""
        blocks = range(len(self.blocks)) if sizes.is_held else phase.blocks
        tile, chains, before = list(blocks), sizes.chains[stage], -1
        lines = ["s = 0", "while s < SAMPLES:"]
        for piece in phase.pieces:
            if piece.source != before:
                place = self._vector_place(stage, piece.source, is_backward)
                lines.append(f"    read_vector(x, 0, pool, {place} * PADDED + at)")
                before = piece.source
            part = "" if chains == 1 else f" * {chains} + k % {chains}"
            to = f"s * {len(phase.sums)} + {piece.sum}"
            to = f"({to}){part}" if part else to
            number = tile.index(piece.block)
            name = self.blocks[piece.block]
            turned = ".T" if name.is_transposed != is_backward else ""
            lines.append(f"    for k in range(VECTOR):  # {name.matrix}[{name.gate}]{turned}")
            lines.append(f"        sums[{to}] += held[first + {number} * VECTOR + k] * x[k]")
        title = "Multiply a tile of weights by 16 bytes of each vector."
        given = "pool, old, at, held, first, sums, x"
        return _function(f"add_{stage}", given, title, [*lines, "    s += 1"])

    @property
    def swaps(self) -> bool:
        """Whether gradients in sums have two buffers in turn: a step has one barrier alone."""
        return sum(map(bool, self.shares)) == 1

    def _vector_place(self, stage: int, source: int, is_backward: bool) -> str:
        """Return the place of a vector of a sample in shared memory, as a multiple of its size."""
        if is_backward:
            first = 0 if self.swaps else sum(map(len, self.shares[:stage]))
            return f"old + ({first + source} * SAMPLES + s)"
        if source < self.shared:
            return f"old + ({source} * SAMPLES + s)"
        # Behind both buffers of the states that are multiplied, and the other states.
        return f"({len(self.states) + source} * SAMPLES + s)"

    def _forward_parts(self, sizes: Sizes) -> list[str]:
        """Return the functions of the forward pass that compute, and that store what is kept."""
        parts, rows = [], self.kept_rows(sizes.one_round)
        for stage, lines in enumerate(self._advance):
            given = "now, at, sums, first, bias, rows, state, mid, at_mid, kept, argument"
            parts.append(_function(f"advance_{stage}", given, f"Compute stage {stage}.", lines))
            begin, end = self.kept_range(stage)
            stores = [f"store({self._place(rows[k])}, kept[{k}], zero)" for k in range(begin, end)]
            if stores:
                given = "kept, products, rest, more, row, more_row, plane, unit"
                title = "Store what the backward pass reads."
                parts.append(_function(f"keep_{stage}", given, title, stores))
            moves = []
            for a in range(*self.argument_range(stage)):
                moves.append(f"put(pool, at + {a} * size, argument[{a}])")
                if self.argument_states[a] is None:
                    place = self._place(self.slots + self.argument_row(a, sizes.one_round))
                    moves.append(f"store({place}, argument[{a}], zero)")
            if moves:
                given = "argument, pool, at, size, more, more_row, plane, unit"
                title = "Show other threads what matrices multiply, and store it."
                parts.append(_function(f"give_{stage}", given, title, moves))
        return parts

    def _back_parts(self, sizes: Sizes) -> list[str]:
        """Return the functions of the backward pass that load, compute and store."""
        parts, rows = [], self.kept_rows(sizes.one_round)
        given = "now, at, products, rest, more, states, inputs, above, row, more_row, plane, "
        given += "before, after, state_bytes, above_at, input_at, unit"
        for name, call, title in (
            ("fetch", "now[at + {}] = load({}, zero)", "Load what a step needs."),
            ("warm", "prefetch({1}, zero)", "Bring what a step needs to the L2 cache."),
        ):
            lines = []
            for k, (kind, number) in enumerate(self._loads):
                if kind in ("kept", "argument"):
                    row = self.slots + self.argument_row(number, sizes.one_round)
                    place = self._place(rows[number] if kind == "kept" else row)
                elif kind in ("before", "after"):
                    is_apart = kind == "before" and sizes.has_resets
                    plane = number + is_apart * len(self.states)
                    place = f"states + {plane} * state_bytes, {kind}"
                else:
                    place = {"input": "inputs, input_at", "above": "above, above_at"}[kind]
                lines.append(call.format(k, place))
            parts.append(_function(name, given, title, lines))
        for stage in reversed(range(self.stages)):
            given = "now, at, later, got, at_got, rows, mid, at_mid, grads, totals"
            title = f"Compute the gradients of stage {stage}."
            lines = self._retreat[stage]
            parts.append(_function(f"retreat_{stage}", given, title, lines))
            shares = self.shares[stage]
            if shares:
                first = 0 if self.swaps else sum(map(len, self.shares[:stage]))
                lines = [
                    f"put(pool, at + {first + k} * size, grads[{slot}])"
                    for k, slot in enumerate(shares)
                ]
                title = "Show other threads the gradients that matrices multiply."
                parts.append(_function(f"share_{stage}", "pool, at, size, grads", title, lines))
                parts.append(self._collect(stage))
            lines = [
                f"store({self._place(k)}, grads[{k}], zero)"
                for k, slot in enumerate(self.program.slots)
                if slot.stage == stage
            ]
            if stage == 0 and self.has_input_grad:
                lines.append(f"store(direct, row * UNITS + unit, grads[{self.slots}], zero)")
            title = "Store gradients in sums."
            parts.append(
                _function(
                    f"store_{stage}", "grads, products, rest, direct, row, unit", title, lines
                )
            )
        if self.leaves:
            title = "Add gradients in parameters that others are derived from."
            parts.append(_function("pull", "rows, totals", title, self._pull))
        return parts

    def _collect(self, stage: int) -> str:
        """Return the function that takes gradients by products."""
        lines, phase = [], self.backward[stage]
        later = {target for each in self.backward[stage + 1 :] for target in each.sums}
        for k, target in enumerate(phase.sums):
            if stage == 0:
                place = f"pool, at + {target} * size"
                lines.append(f"put({place}, get({place}) + sums[first + {k}])")
            else:
                sign = "+=" if target in later else "="
                lines.append(f"got[at_got + {self._got[target]}] {sign} sums[first + {k}]")
        given = "pool, at, size, sums, first, got, at_got"
        return _function(f"collect_{stage}", given, "Take gradients by products.", lines)

    def _place(self, row: int) -> str:
        """Return the array and the index of a unit's number in a row of slots, or behind them."""
        if row < self.inputs:
            return f"products, (row * {self.inputs} + {row}) * UNITS + unit"
        if row < self.slots:
            return f"rest, (row * {self.slots - self.inputs} + {row - self.inputs}) * UNITS + unit"
        return f"more, (more_row + {row - self.slots} * plane) * UNITS + unit"


class _Text(CudaRenderer):
    """Assignments of all stages, with what stages hand on to each other.

    Attributes
    ----------
    mids, back_mids : int
        How many numbers they hand on, forward and backward.
    loads : list of (str, int)
        What the backward pass loads, in the order of its array.
    needed : dict
        The first stage, which is the last one backward, that reads each of `loads`.
    """

    words = (
        *(*CudaRenderer.words, "now", "at", "later", "got", "sums", "first", "bias", "rows", "t"),
        *("state", "mid", "kept", "argument", "grads", "totals", "at_mid", "at_got"),
    )

    def __init__(self, code: CudaProgram) -> None:
        super().__init__(code.program.names)
        self._code, self.program = code, code.program
        self._loaded_nodes = self._find_loaded()
        self.mids = self.back_mids = 0
        self.loads: list[tuple[str, int]] = []
        self.needed: dict[tuple[str, int], int] = {}

    def derived(self) -> tuple[list[str], list[str]]:
        """Return lines that compute rows from others, and take gradients back to these."""
        derive, pull = [], []
        program, leaves = self.program, self._code.leaves

        def load(each: Node) -> str:
            if each.operation == "gradient":
                return f"totals[{each.details[0]}]"
            return self._row(each)

        for k, row in enumerate(program.derived):
            lines, texts = self.assignments([row.value], {}, load)
            derive += [*lines, f"rows[{leaves + k}] = {texts[row.value]}"]
            lines, texts = self.assignments([grad for _, grad in row.grads], {}, load)
            pull += [*lines, *(f"totals[{r}] += {texts[grad]}" for r, grad in row.grads)]
        return derive, pull

    # -- Forward ----------------------------------------------------------------------------------

    def forward(self) -> list[list[str]]:
        """Return the lines of each stage."""
        code, program = self._code, self.program
        stage_of = code._stage
        roots: list[dict[Node, None]] = [{} for _ in range(program.stages)]
        for each in (*code.kept, *program.arguments):
            roots[stage_of[each]][each] = None
        roots[-1] |= dict.fromkeys(program.outputs)
        # What earlier stages compute, and later ones read.
        mids: dict[Node, int] = {}
        for stage in reversed(range(program.stages)):
            for each in self._from_before(roots[stage], stage):
                mids.setdefault(each, len(mids))
                roots[stage_of[each]][each] = None
        self.mids = len(mids)
        stages = []
        for stage, wanted in enumerate(roots):

            def load(each: Node, stage: int = stage) -> str:
                if each in mids and stage_of[each] < stage:
                    return f"mid[at_mid + {mids[each]}]"
                return self._forward_leaf(each)

            lines, texts = self.assignments(wanted, {}, load)
            for each in wanted:
                text = texts[each]
                if each in mids and stage_of[each] == stage:
                    lines.append(f"mid[at_mid + {mids[each]}] = {text}")
                if each in code._kept and stage_of[each] == stage:
                    lines.append(f"kept[{code._kept[each]}] = {text}")
                if each in code._argument and stage_of[each] == stage:
                    lines.append(f"argument[{code._argument[each]}] = {text}")
            if stage == program.stages - 1:
                lines += [
                    f"state[{code._state[k]}] = {texts[each]}"
                    for k, each in enumerate(program.outputs)
                ]
            stages.append(lines)
        return stages

    def _from_before(self, roots: Iterable[Node], stage: int) -> list[Node]:
        """Return what an earlier stage has computed from sums of products, and this one reads."""
        found, seen, stack = list[Node](), set[Node](), list(roots)
        stage_of = self._code._stage
        while stack:
            each = stack.pop()
            if each in seen:
                continue
            seen.add(each)
            if stage_of[each] < stage and self._has_sums(each):
                found.append(each)
            else:
                stack += each.arguments
        return found

    def _has_sums(self, each: Node) -> bool:
        return any(one.operation == "slot" for one in topological([each]))

    def _row(self, each: Node) -> str:
        return f"rows[{self._code._row[each]}]" if each in self._code._row else ""

    def _forward_leaf(self, each: Node) -> str:
        """Return the text of a leaf, or "" for what is computed."""
        code = self._code
        if each.operation == "slot":
            slot = each.details[0]
            parts = [f"now[at + {slot}]"] if slot < code.inputs else []
            parts.append(f"bias[{slot}]")
            shares = code.shares[self.program.slots[slot].stage]
            if slot in shares:
                parts.append(f"sums[first + {shares.index(slot)}]")
            return " + ".join(parts)
        if each.operation == "state":
            return f"state[{code._state[each.details[0]]}]"
        if each.operation == "input":
            return f"now[at + {code.inputs}]"
        return self._row(each)

    # -- Backward ---------------------------------------------------------------------------------

    def backward(self) -> list[list[str]]:
        """Return the lines of each stage."""
        code, program = self._code, self.program
        zero = self.number(0.0)
        roots: list[dict[Node, None]] = []
        for stage in range(program.stages):
            own = [
                grad
                for slot, grad in zip(program.slots, program.slot_grads, strict=True)
                if slot.stage == stage
            ]
            if stage == 0:
                own += [*program.state_grads, *program.row_grads, program.input_grad]
            roots.append(dict.fromkeys(each for each in own if each is not None))
        mids = self._handed_on(roots)
        self.back_mids = len(mids)
        stages: list[list[str]] = [[] for _ in roots]
        computed: set[Node] = set()
        for stage in reversed(range(program.stages)):
            before = frozenset(computed)

            def load(each: Node, stage: int = stage, before: frozenset[Node] = before) -> str:
                if each in mids and each in before:
                    return f"mid[at_mid + {mids[each]}]"
                return self._back_leaf(each, stage)

            here = self._computed(roots[stage], before & mids.keys())
            handed = [each for each in mids if each in here and each not in before]
            computed |= here
            lines, texts = self.assignments([*roots[stage], *handed], {}, load)
            lines += [f"mid[at_mid + {mids[each]}] = {texts[each]}" for each in handed]
            for k, (slot, grad) in enumerate(zip(program.slots, program.slot_grads, strict=True)):
                if slot.stage == stage:
                    lines.append(f"grads[{k}] = {zero if grad is None else texts[grad]}")
            if stage == 0:
                for place, k in enumerate(code.states):
                    grad, got = program.state_grads[k], code._got.get(place)
                    parts = [texts[grad]] if grad is not None else []
                    parts += [f"got[at_got + {got}]"] if got is not None else []
                    lines.append(f"later[{place}] = {' + '.join(parts) or zero}")
                for r, grad in enumerate(program.row_grads):
                    if grad is not None:
                        lines.append(f"totals[{r}] += {texts[grad]}")
                if program.input_grad is not None:
                    lines.append(f"grads[{code.slots}] = {texts[program.input_grad]}")
            stages[stage] = lines
        return stages

    def _handed_on(self, roots: Sequence[Iterable[Node]]) -> dict[Node, int]:
        """Return what a stage computes that is read by one that comes later, which is an earlier.

        What takes little from numbers that were loaded is computed again.
        """
        mids: dict[Node, int] = {}
        computed: set[Node] = set()
        for own in reversed(roots):
            stack, seen, here = list(own), set[Node](), set[Node]()
            while stack:
                each = stack.pop()
                if each in seen:
                    continue
                seen.add(each)
                if each in computed and self._is_worth_it(each):
                    mids.setdefault(each, len(mids))
                elif not self._is_loaded(each):
                    here.add(each)
                    stack += each.arguments
            computed |= here
        return mids

    def _computed(self, roots: Iterable[Node], known: Container[Node]) -> set[Node]:
        """Return what is computed for some nodes, but for what is known."""
        order = topological(roots, known, self._is_loaded)
        return {each for each in order if not self._is_loaded(each)}

    def _is_loaded(self, each: Node) -> bool:
        return not each.arguments or each in self._loaded_nodes

    def _find_loaded(self) -> dict[Node, tuple[str, int]]:
        """Return where the backward pass finds what is no leaf, or one that it cannot compute."""
        code, program = self._code, self.program
        found: dict[Node, tuple[str, int]] = {}
        for each in program.kept:
            if each in code._argument:
                found[each] = "argument", code._argument[each]
            elif each in code._kept:
                found[each] = "kept", code._kept[each]
        for k, each in enumerate(program.outputs):
            if each.arguments:
                found.setdefault(each, ("after", code._state[k]))
        return found

    def _is_worth_it(self, each: Node) -> bool:
        """Return whether a node has a gradient in it, or an operation that takes long."""
        return any(
            one.operation in ("gradient", "back") or (is_heavy(one) and not self._is_loaded(one))
            for one in topological([each], is_leaf=self._is_loaded)
        )

    def _back_leaf(self, each: Node, stage: int) -> str:
        """Return the text of a leaf or of what is loaded, or "" for what is computed."""
        code = self._code
        if each.operation == "gradient":
            own = code._state[each.details[0]]
            text = f"later[{own}]"
            return f"{text} + {self._loaded('above', 0, stage)}" if own == code.output else text
        if each.operation == "back":
            return f"got[at_got + {code._got[self._argument_target(each.details[0])]}]"
        if each.operation == "state":
            return self._loaded("before", code._state[each.details[0]], stage)
        if each.operation == "input":
            return self._loaded("input", 0, stage)
        if each in self._loaded_nodes:
            return self._loaded(*self._loaded_nodes[each], stage)
        return self._row(each)

    def _argument_target(self, argument: int) -> int:
        code = self._code
        return len(code.states) + code._argument[self.program.arguments[argument]]

    def _loaded(self, kind: str, number: int, stage: int) -> str:
        """Return the text of a number that the backward pass loads."""
        key = kind, number
        if key not in self.loads:
            self.loads.append(key)
        self.needed[key] = min(stage, self.needed.get(key, stage))
        return f"now[at + {self.loads.index(key)}]"


def _range(stages: Sequence[int], stage: int) -> tuple[int, int]:
    return sum(each < stage for each in stages), sum(each <= stage for each in stages)


def _function(name: str, parameters: str, title: str, lines: Sequence[str]) -> str:
    """Return the text of a device function."""
    text = function_text(name, parameters, title, lines or ["pass"])
    return f"@cuda.jit(device=True)\n{text}\n"


@cache
def cuda_program(program: CellProgram) -> CudaProgram:
    """Return a program as CUDA kernels run it: always the same one, by which they are kept."""
    return CudaProgram(program)


def functions(text: str, title: str, names: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions of a text, which are in a file that only tracebacks show.

    The file is named by the text and the dtype of `names`, so that kernels are known by it, too.
    """
    dtype = names["zero"].dtype
    digest = hashlib.sha256(f"{dtype} {text}".encode()).hexdigest()[:16]
    file = f"<{title}, {dtype}, {digest}>"
    space = functions_of(text, file, {"__name__": __name__, **names})
    return {name: each for name, each in space.items() if name not in names and name[0] != "_"}
