"""Make LLVM IR of a kernel: a function that runs one thread until it waits at a barrier.

``i64 kernel(frame, machine)`` goes on where the frame's first word says, with the registers that
the frame's other words hold: those that live there. It returns 0 at its end, or the number of the
barrier that it waits at, plus 1; or -1, with the fault in the machine.

Beside every integer register that an address may be made of, there is another which says whether
arithmetic overflowed on the way to it: the number of the instruction plus 1, or 0. It stops nothing
until an address is used, as a compiler may compute addresses that are not.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from .machine import EXCHANGE, LOCAL_WINDOW, WINDOW, Fault, Slot, Space
from .parse import Block, Instruction, Kernel, PtxError

ATOMICS = ("add", "max", "min", "exch", "cas", "and", "or", "xor")
_SPECIAL = {
    "%tid.x": Slot.THREAD,
    "%ctaid.x": Slot.BLOCK,
    "%ntid.x": Slot.THREADS,
    "%nctaid.x": Slot.BLOCKS,
}
_ZERO = ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z")
_ONE = ("%ntid.y", "%ntid.z", "%nctaid.y", "%nctaid.z")
# Instructions at which threads wait for others.
_WAITS = ("bar", "vote", "shfl", "barrier")
_REGISTER = re.compile(r"%[a-z]+\d+")
_INTEGERS = {"u", "s", "b"}
# Comparisons of floats: ordered, or also true with a NaN.
_FLOAT_COMPARISONS = {
    **{name: "o" + name for name in ("eq", "lt", "le", "gt", "ge")},
    **{name + "u": "u" + name for name in ("eq", "lt", "le", "gt", "ge")},
    "ne": "one",
    "neu": "une",
    "num": "ord",
    "nan": "uno",
}


class Site(NamedTuple):
    """An access to memory, or another place where a launch may stop."""

    line: int
    width: int
    space: int
    opcode: str


class Mutation(NamedTuple):
    """A small change of a program: a barrier or a fence that is left out, or a bound off by one."""

    line: int
    kind: str  # "barrier", "fence" or "bound"


class Translation(NamedTuple):
    """A kernel as LLVM IR, and what its numbers mean."""

    ir: str
    sites: list[Site]
    waits: list[tuple[int, int, int]]  # rows as `machine.Wait`
    frame: int  # words
    garbage: int  # words after the first that a thread may read before it writes
    opcodes: list[dict[str, int]]  # instructions of each piece of the program
    shared: dict[str, int]
    shared_size: int
    gaps: list[int]  # words of shared memory that are in no array
    local_size: int  # bytes of a thread
    mutations: list[Mutation]  # that a launch may make, by number from 1 on


def translate(kernel: Kernel, gap: int, *, mutable: bool = False) -> Translation:
    """Translate a kernel; `gap` bytes lie between its shared arrays.

    Launches of a `mutable` one may leave out a barrier or a fence, or take ``<`` for ``≤``.
    """
    return _Translator(kernel, gap, mutable).translate()


def _llvm(kind: str) -> str:
    """Return the type of a register or an operation, such as ``b32`` or ``f64``."""
    if kind == "pred":
        return "i1"
    return {"f32": "float", "f64": "double"}.get(kind, "i" + kind[1:])


def _bits(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


class _Translator:
    def __init__(self, kernel: Kernel, gap: int, mutable: bool) -> None:
        self._kernel, self._mutable = kernel, mutable
        self._mutations: list[Mutation] = []
        self._lines: list[str] = []
        self._count = 0
        self._sites: list[Site] = []
        self._waits: list[tuple[int, int, int]] = []
        self._declared: set[str] = set()
        self._shared: dict[str, int] = {}
        self._gaps: list[int] = []
        at = 0
        for array in kernel.shared:
            start = -(-at // array.alignment) * array.alignment
            self._gaps += range(-(-at // 4), start // 4)
            self._shared[array.name] = start
            at = start + array.size
            self._gaps += range(-(-at // 4), (at + gap) // 4)
            at = (at + gap) // 4 * 4
        self._shared_size = at
        self._local: dict[str, int] = {}
        self._local_size = 0
        for array in kernel.local:
            start = -(-self._local_size // array.alignment) * array.alignment
            self._local[array.name], self._local_size = start, start + array.size
        self._tracked = self._address_registers()
        self._names = {block.label: f"L{k}" for k, block in enumerate(kernel.blocks)}
        self._position = {block.label: k for k, block in enumerate(kernel.blocks)}
        self._live = self._live_registers()

    # -- What the text says of registers ---------------------------------------------------------

    def _address_registers(self) -> set[str]:
        """Return the integer registers that an address may be made of."""
        made_of: dict[str, set[str]] = {}
        names: set[str] = set()
        for one in self._kernel.instructions():
            kind = one.parts[0]
            if kind in ("ld", "st", "atom", "red"):
                for operand in one.operands:
                    if operand.startswith("["):
                        names |= set(_REGISTER.findall(operand))
            elif kind in ("add", "sub", "mul", "mad", "shl", "mov", "selp", "cvt", "min", "max"):
                kinds = one.parts[1:]
                if not any(part.startswith("f") or part == "pred" for part in kinds):
                    target, sources = one.operands[0], " ".join(one.operands[1:])
                    made_of.setdefault(target, set()).update(
                        name for name in _REGISTER.findall(sources) if not name.startswith("%p")
                    )
        left = list(names)
        while left:
            for name in made_of.get(left.pop(), ()):
                if name not in names:
                    names.add(name)
                    left.append(name)
        return names

    def _uses(self, one: Instruction) -> tuple[set[str], set[str]]:
        """Return the registers that an instruction reads, and those that it writes."""
        kind = one.parts[0]
        if kind in ("st", "bra", "red", "membar", "prefetch", "ret", "exit", "fence"):
            written, read = "", " ".join(one.operands)
        elif kind == "bar" and one.parts[1] != "red":
            written = read = ""
        elif kind == "shfl":
            written, read = one.operands[0], one.operands[-4]
        else:
            written, read = one.operands[0], " ".join(one.operands[1:])
        reads = set(_REGISTER.findall(read)) | set(_REGISTER.findall(one.guard))
        if one.guard and kind not in ("bra", "ret", "exit"):
            reads |= set(_REGISTER.findall(written))  # where the guard does not hold, it stays
        return reads, set(_REGISTER.findall(written))

    def _live_registers(self) -> dict[str, list[str]]:
        """Return the registers that are read after the start of each block, before written."""
        number = {name: k for k, name in enumerate(self._kernel.registers)}

        def mask(names: set[str]) -> int:
            return sum(1 << number[name] for name in names)

        blocks = self._kernel.blocks
        needs, makes = {}, {}
        for block in blocks:
            read, written = 0, 0
            for one in block.instructions:
                reads, writes = self._uses(one)
                read |= mask(reads) & ~written
                written |= mask(writes)
            needs[block.label], makes[block.label] = read, written
        live, changed = dict(needs), True
        while changed:
            changed = False
            for block in reversed(blocks):
                out = 0
                for label in block.successors:
                    out |= live[label]
                now = needs[block.label] | (out & ~makes[block.label])
                changed |= now != live[block.label]
                live[block.label] = now
        # Those of blocks in which a thread starts, or goes on behind a barrier.
        resumed = [blocks[0].label]
        for block in blocks:
            if block.instructions and block.instructions[-1].parts[0] in ("bar", "vote", "shfl"):
                resumed += block.successors
        names = list(self._kernel.registers)
        return {
            label: [
                name
                for name, bit in zip(names, reversed(f"{live[label]:b}"), strict=False)
                if bit == "1"
            ]
            for label in resumed
        }

    # -- Text ------------------------------------------------------------------------------------

    def _emit(self, line: str) -> None:
        self._lines.append("  " + line)

    def _new(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _let(self, expression: str) -> str:
        """Name the value of an expression."""
        name = self._new()
        self._emit(f"{name} = {expression}")
        return name

    def _label(self) -> str:
        self._count += 1
        return f"M{self._count}"

    def _intrinsic(self, name: str, kind: str, *arguments: str) -> str:
        """Call an intrinsic whose arguments and result are of one type."""
        listed = ", ".join(f"{kind} {argument}" for argument in arguments)
        self._declared.add(f"declare {kind} @{name}({', '.join([kind] * len(arguments))})")
        return self._let(f"call {kind} @{name}({listed})")

    def _slot(self, slot: int) -> str:
        return self._let(f"getelementptr i64, ptr %machine, i64 {slot}")

    def _get_slot(self, slot: int) -> str:
        return self._let(f"load i64, ptr {self._slot(slot)}")

    def _set_slot(self, slot: int, value: str) -> None:
        self._emit(f"store i64 {value}, ptr {self._slot(slot)}")

    def _site(self, one: Instruction, width: int = 0, space: int = 0) -> int:
        self._sites.append(Site(one.line, width, space, one.opcode))
        return len(self._sites) - 1

    def _fault_if(self, condition: str, fault: int, site: int | str, other: str = "0") -> None:
        """Stop the launch where a condition holds."""
        stop, on = self._label(), self._label()
        self._emit(f"br i1 {condition}, label %{stop}, label %{on}, !prof !0")
        self._lines.append(f"{stop}:")
        self._set_slot(Slot.FAULT, str(fault))
        self._set_slot(Slot.SITE, str(site))
        self._set_slot(Slot.OTHER, other)
        self._emit("ret i64 -1")
        self._lines.append(f"{on}:")

    def _mutant(self, one: Instruction, kind: str, differs: str = "true") -> str:
        """Return whether a launch makes this mutation; count where it makes a difference, if so."""
        counts = self._let(f"inttoptr i64 {self._get_slot(Slot.DIFFERENT)} to ptr")
        place = self._let(f"getelementptr i64, ptr {counts}, i64 {len(self._mutations)}")
        more = self._let(f"zext i1 {differs} to i64")
        more = self._let(f"add i64 {self._let(f'load i64, ptr {place}')}, {more}")
        self._emit(f"store i64 {more}, ptr {place}")
        self._mutations.append(Mutation(one.line, kind))
        return self._let(f"icmp eq i64 {self._get_slot(Slot.MUTANT)}, {len(self._mutations)}")

    def _helper(self, slot: int, *arguments: str) -> str:
        """Call a helper of the machine, and stop where it returns 0."""
        function = self._let(f"inttoptr i64 {self._get_slot(slot)} to ptr")
        listed = "".join(f", i64 {argument}" for argument in arguments)
        result = self._let(f"call i64 {function}(ptr %machine{listed})")
        stop, on = self._label(), self._label()
        failed = self._let(f"icmp eq i64 {result}, 0")
        self._emit(f"br i1 {failed}, label %{stop}, label %{on}, !prof !0")
        self._lines.append(f"{stop}:")
        self._emit("ret i64 -1")
        self._lines.append(f"{on}:")
        return result

    # -- Operands --------------------------------------------------------------------------------

    def _convert(self, value: str, source: str, target: str) -> str:
        """Return the same bits as another type; fewer bits, or with zeros."""
        a, b = _llvm(source), _llvm(target)
        if a == b:
            return value
        wide = {"float": "i32", "double": "i64"}
        if a in wide:
            value, a = self._let(f"bitcast {a} {value} to {wide[a]}"), wide[a]
        inner = wide.get(b, b)
        if int(a[1:]) < int(inner[1:]):
            value = self._let(f"zext {a} {value} to {inner}")
        elif int(a[1:]) > int(inner[1:]):
            value = self._let(f"trunc {a} {value} to {inner}")
        return self._let(f"bitcast {inner} {value} to {b}") if b in wide else value

    def _read(self, operand: str, kind: str) -> str:
        """Return an operand as a value of the type of an operation."""
        registers = self._kernel.registers
        if operand.startswith("!"):
            return self._let(f"xor i1 {self._read(operand[1:], kind)}, true")
        if operand in registers:
            own = registers[operand]
            return self._convert(self._let(f"load {_llvm(own)}, ptr {operand}.p"), own, kind)
        if operand in _SPECIAL:
            return self._convert(self._get_slot(_SPECIAL[operand]), "b64", kind)
        if operand in _ZERO or operand in _ONE:
            return "1" if operand in _ONE else "0"
        if operand == "%laneid":
            lane = self._let(f"and i64 {self._get_slot(Slot.THREAD)}, 31")
            return self._convert(lane, "b64", kind)
        if operand in self._shared or operand in self._local:
            return str((self._shared | self._local)[operand])
        if operand.startswith("0f"):
            (single,) = struct.unpack(">f", bytes.fromhex(operand[2:]))
            (bits,) = struct.unpack(">Q", struct.pack(">d", single))
            if kind == "f32" and single == single:
                return f"0x{bits:016X}"
            return self._convert(str(int(operand[2:], 16)), "b32", kind)
        if operand.startswith("0d"):
            return f"0x{operand[2:]}" if kind == "f64" else str(int(operand[2:], 16))
        if re.fullmatch(r"-?\d+U?|-?0x[0-9A-Fa-f]+", operand):
            number = int(operand.rstrip("U"), 0)
            return str(number & 1) if kind == "pred" else str(number)
        raise PtxError(f"operand {operand}")

    def _write(self, target: str, value: str, kind: str, overflow: str = "0") -> None:
        """Set a register, and where what is in it overflowed."""
        own = self._kernel.registers[target]
        self._emit(f"store {_llvm(own)} {self._convert(value, kind, own)}, ptr {target}.p")
        if target in self._tracked:
            self._emit(f"store i32 {overflow}, ptr {target}.o")

    def _overflow(self, *operands: str) -> str:
        """Return where any of some operands overflowed, or 0."""
        values = [
            self._let(f"load i32, ptr {operand}.o")
            for operand in operands
            if operand in self._tracked
        ]
        if not values:
            return "0"
        where = values[0]
        for value in values[1:]:
            where = self._intrinsic("llvm.umax.i32", "i32", where, value)
        return where

    def _address(self, operand: str, one: Instruction) -> str:
        """Return the address that ``[%rd1+8]`` means; it must not have overflowed."""
        match = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand)
        if not match:
            raise PtxError(f"line {one.line}: address {operand}")
        base = self._read(match[1], "b64")
        if match[1] in self._tracked:
            overflow = self._overflow(match[1])
            bad = self._let(f"icmp ne i32 {overflow}, 0")
            where = self._let(f"zext i32 {overflow} to i64")
            self._fault_if(bad, Fault.OVERFLOW, self._site(one), where)
        return self._let(f"add i64 {base}, {match[2] or 0}")

    # -- The function ----------------------------------------------------------------------------

    def translate(self) -> Translation:
        kernel = self._kernel
        slots: dict[str, int] = {}

        def frame_words(label: str) -> Iterator[tuple[str, int, int]]:
            """Yield the registers that live in a block, and their places in the frame."""
            for name in self._live[label]:
                at = slots.setdefault(name, 1 + 2 * len(slots))
                yield name, at, at + 1

        entry = kernel.blocks[0].label
        resumes = [("R0", entry, "")]
        list(frame_words(entry))
        garbage = 2 * len(slots)
        for number, block in enumerate(kernel.blocks):
            self._lines.append(f"{self._names[block.label]}:")
            self._count_block(number)
            for one in block.instructions:
                try:
                    self._instruction(one, block, number, resumes, frame_words)
                except (KeyError, ValueError, IndexError) as error:
                    raise PtxError(
                        f"line {one.line}: {kernel.text[one.line - 1].strip()}: {error!r}"
                    ) from error
            last = block.instructions[-1].parts[0] if block.instructions else ""
            if block.successors and last not in ("bra", *_WAITS):
                self._emit(f"br label %{self._names[block.successors[-1]]}")
        body, self._lines = self._lines, []
        for label, block_label, vote in resumes:
            self._lines.append(f"{label}:")
            for name, at, flag in frame_words(block_label):
                if name != vote:
                    self._load_register(name, at, flag, garbage=label == "R0")
            if vote:
                result = self._get_slot(Slot.VOTE)
                if kernel.registers[vote] == "pred":
                    result = self._let(f"icmp ne i64 {result}, 0")
                    self._write(vote, result, "pred")
                else:
                    self._write(vote, result, "b64")
            self._emit(f"br label %{self._names[block_label]}")
        head = ["define i64 @kernel(ptr %frame, ptr %machine) {", "start:"]
        for name, kind in kernel.registers.items():
            head.append(f"  {name}.p = alloca {_llvm(kind)}")
            if name in self._tracked:
                head.append(f"  {name}.o = alloca i32")
        head.append("  %resume = load i64, ptr %frame")
        cases = " ".join(f"i64 {k}, label %{label}" for k, (label, *_) in enumerate(resumes))
        head.append(f"  switch i64 %resume, label %wrong [{cases}]")
        head += ["wrong:", "  unreachable"]
        lines = [*head, *self._lines, *body, "}", *sorted(self._declared)]
        lines.append('!0 = !{!"branch_weights", i32 1, i32 100000}')
        opcodes = []
        for block in kernel.blocks:
            counts: dict[str, int] = {}
            for one in block.instructions:
                counts[one.opcode] = counts.get(one.opcode, 0) + 1
            opcodes.append(counts)
        return Translation(
            "\n".join(lines),
            self._sites,
            self._waits,
            1 + 2 * len(slots),
            garbage,
            opcodes,
            self._shared,
            self._shared_size,
            self._gaps,
            self._local_size,
            self._mutations,
        )

    def _load_register(self, name: str, at: int, flag: int, *, garbage: bool) -> None:
        kind = self._kernel.registers[name]
        word = self._let(f"load i64, ptr {self._frame(at)}")
        self._emit(f"store {_llvm(kind)} {self._convert(word, 'b64', kind)}, ptr {name}.p")
        if name in self._tracked:
            overflow = "0"
            if not garbage:
                word = self._let(f"load i64, ptr {self._frame(flag)}")
                overflow = self._let(f"trunc i64 {word} to i32")
            self._emit(f"store i32 {overflow}, ptr {name}.o")

    def _frame(self, at: int) -> str:
        return self._let(f"getelementptr i64, ptr %frame, i64 {at}")

    def _count_block(self, number: int) -> None:
        counts = self._let(f"inttoptr i64 {self._get_slot(Slot.COUNTS)} to ptr")
        place = self._let(f"getelementptr i64, ptr {counts}, i64 {number}")
        more = self._let(f"add i64 {self._let(f'load i64, ptr {place}')}, 1")
        self._emit(f"store i64 {more}, ptr {place}")

    def _instruction(
        self, one: Instruction, block: Block, number: int, resumes: Any, frame_words: Any
    ) -> None:
        kind = one.parts[0]
        if kind == "bra":
            self._branch(one, block, number)
        elif kind in ("ret", "exit"):
            if one.guard:
                on = self._label()
                self._emit(f"br i1 {self._guard(one)}, label %{on}r, label %{on}")
                self._lines.append(f"{on}r:")
                self._emit("ret i64 0")
                self._lines.append(f"{on}:")
            else:
                self._emit("ret i64 0")
        elif kind in _WAITS:
            self._wait(one, block, resumes, frame_words)
        elif one.guard:
            do, on = self._label(), self._label()
            self._emit(f"br i1 {self._guard(one)}, label %{do}, label %{on}")
            self._lines.append(f"{do}:")
            self._do(one)
            self._emit(f"br label %{on}")
            self._lines.append(f"{on}:")
        else:
            self._do(one)

    def _do(self, one: Instruction) -> None:
        model = getattr(self, f"_do_{one.parts[0]}", None)
        if model is None:
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        model(one)

    def _guard(self, one: Instruction) -> str:
        return self._read(one.guard[1:], "pred")

    def _branch(self, one: Instruction, block: Block, number: int) -> None:
        target = one.operands[0]
        name = self._names[target]
        if self._position[target] <= number:
            # A loop: it must end.
            left = self._let(f"sub i64 {self._get_slot(Slot.PATIENCE)}, 1")
            self._set_slot(Slot.PATIENCE, left)
            endless = self._let(f"icmp slt i64 {left}, 0")
            self._fault_if(endless, Fault.ENDLESS, self._site(one))
        if one.guard:
            on = self._names[block.successors[-1]]
            self._emit(f"br i1 {self._guard(one)}, label %{name}, label %{on}")
        else:
            self._emit(f"br label %{name}")

    def _wait(self, one: Instruction, block: Block, resumes: Any, frame_words: Any) -> None:
        """Leave the function at a barrier, and give it a place to go on."""
        parts, operands = one.parts, one.operands
        if one.guard:
            raise PtxError(f"line {one.line}: a barrier under a guard")
        vote, target, warp = 0, "", int(parts[0] in ("vote", "shfl") or parts[1] == "warp")
        if parts[:2] == ["bar", "red"]:
            target, vote = operands[0], {"or": 1, "and": 2}[parts[2]]
            source, rest = operands[2], operands[1]
        elif parts[0] == "vote":
            target, vote = operands[0], {"any": 1, "all": 2}[parts[2]]
            source, rest = operands[1], operands[2]
        elif parts[0] == "shfl":
            target, (source, distance, clamp, rest) = operands[0], operands[-4:]
            bit = self._constant(distance)
            if parts[1:] != ["sync", "bfly", "b32"] or self._constant(clamp) != 31 or bit is None:
                raise PtxError(f"line {one.line}: no model of {one.opcode} {operands}")
            vote, operands = EXCHANGE + bit, (target, source, rest)
        else:
            source, rest = "", operands[0]
        # Barrier 0, or the mask of a whole warp, which may be in a register.
        everyone = self._constant(rest) in ((-1, 0xFFFFFFFF) if warp else (0,))
        if len(operands) != 1 + 2 * bool(vote) or not everyone:
            raise PtxError(f"line {one.line}: not all threads: {one.opcode} {operands}")
        self._waits.append((warp, vote, one.line))
        label, after = f"R{len(resumes)}", block.successors[-1]
        if self._mutable and not vote:
            left_out, wait = self._mutant(one, "barrier"), self._label()
            self._emit(f"br i1 {left_out}, label %{self._names[after]}, label %{wait}")
            self._lines.append(f"{wait}:")
        if vote:
            kind = "b32" if vote >= EXCHANGE else "pred"
            value = self._let(f"zext {_llvm(kind)} {self._read(source, kind)} to i64")
            self._set_slot(Slot.VOTE, value)
        for name, at, flag in frame_words(after):
            kind = self._kernel.registers[name]
            value = self._convert(self._read(name, kind), kind, "b64")
            self._emit(f"store i64 {value}, ptr {self._frame(at)}")
            if name in self._tracked:
                overflow = self._let(f"zext i32 {self._overflow(name)} to i64")
                self._emit(f"store i64 {overflow}, ptr {self._frame(flag)}")
        self._emit(f"store i64 {len(resumes)}, ptr %frame")
        self._emit(f"ret i64 {len(resumes)}")
        resumes.append((label, after, target))

    def _constant(self, operand: str) -> int | None:
        """Return a number, or the one that a register gets, or None."""
        if operand in self._kernel.registers:
            writers = [
                one
                for one in self._kernel.instructions()
                if one.operands and one.operands[0] == operand and one.parts[0] != "st"
            ]
            operand = writers[0].operands[1] if [one.parts[0] for one in writers] == ["mov"] else ""
        return int(operand) if re.fullmatch(r"-?\d+", operand) else None

    # -- Memory ----------------------------------------------------------------------------------

    def _space(self, one: Instruction) -> int:
        if "const" in one.parts:
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        if "shared" in one.parts or "local" in one.parts:
            return Space.SHARED if "shared" in one.parts else Space.LOCAL
        return Space.GLOBAL if "global" in one.parts else Space.GENERIC

    def _do_ld(self, one: Instruction) -> None:
        kind = one.parts[-1]
        if "param" in one.parts:
            index = list(self._kernel.parameters).index(one.operands[1].strip("[]"))
            table = self._let(f"inttoptr i64 {self._get_slot(Slot.PARAMETERS)} to ptr")
            place = self._let(f"getelementptr i64, ptr {table}, i64 {index}")
            word = self._let(f"load i64, ptr {place}")
            self._write(one.operands[0], self._convert(word, "b64", kind), kind)
            return
        targets = re.findall(r"%\w+", one.operands[0])
        size = self._size(kind, one, 2 if "global" in one.parts else 4)
        width = size * len(targets)
        space = self._space(one)
        address = self._address(one.operands[1], one)
        site = self._site(one, width, space)
        arguments = str(site), str(space), address, str(width)
        place = self._let(f"inttoptr i64 {self._helper(Slot.LOAD, *arguments)} to ptr")
        for k, target in enumerate(targets):
            own = self._let(f"getelementptr i8, ptr {place}, i64 {k * size}")
            value = self._let(f"load {_llvm(kind)}, ptr {own}, align {min(size, 4)}")
            if _llvm(kind).startswith("i"):
                value = self._widen(value, kind, self._kernel.registers[target])
                self._write(target, value, self._kernel.registers[target])
            else:
                self._write(target, value, kind)

    def _do_st(self, one: Instruction) -> None:
        kind = one.parts[-1]
        sources = [part.strip() for part in one.operands[1].strip("{}").split(",")]
        size = self._size(kind, one)
        width = size * len(sources)
        words = ["0", "0"]
        for k, source in enumerate(sources):
            value = self._convert(self._read(source, kind), kind, "b64")
            which, shift = divmod(k * size * 8, 64)
            value = self._let(f"shl i64 {value}, {shift}")
            words[which] = self._let(f"or i64 {words[which]}, {value}")
        space, address = self._space(one), self._address(one.operands[0], one)
        site = self._site(one, width, space)
        arguments = str(site), str(space), address, str(width)
        self._helper(Slot.STORE, *arguments, *words)

    def _do_atom(self, one: Instruction) -> None:
        self._atomic(one, one.operands[0], one.operands[1:])

    def _do_red(self, one: Instruction) -> None:
        self._atomic(one, "", one.operands)

    def _atomic(self, one: Instruction, target: str, operands: tuple[str, ...]) -> None:
        kind = one.parts[-1]
        (operation,) = set(one.parts) & set(ATOMICS)
        if kind[0] not in _INTEGERS or (kind[0] == "u" and operation in ("max", "min")):
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        size = self._size(kind, one)
        address = self._address(operands[0], one)
        values = [self._widen(self._read(x, kind), "s" + kind[1:], "b64") for x in operands[1:]]
        if operation == "cas":
            values.reverse()  # what to leave, then what to compare with
        values += ["0"] * (2 - len(values))
        space = self._space(one)
        site = self._site(one, size, space)
        number = str(ATOMICS.index(operation))
        self._helper(Slot.ATOMIC, str(site), str(space), address, str(size), number, *values)
        if target:
            self._write(target, self._convert(self._get_slot(Slot.RESULT), "b64", kind), kind)

    def _size(self, kind: str, one: Instruction, least: int = 4) -> int:
        size = _bits(kind) // 8
        if size < least:
            raise PtxError(f"line {one.line}: no model of an access to {size} bytes")
        return size

    def _do_prefetch(self, one: Instruction) -> None:
        """Change nothing, whatever the address."""

    def _do_membar(self, one: Instruction) -> None:
        if not (one.parts[1] in ("gl", "sys") or "gpu" in one.parts):
            return
        if not self._mutable:
            self._helper(Slot.FENCE)
            return
        left_out, do, on = self._mutant(one, "fence"), self._label(), self._label()
        self._emit(f"br i1 {left_out}, label %{on}, label %{do}")
        self._lines.append(f"{do}:")
        self._helper(Slot.FENCE)
        self._emit(f"br label %{on}")
        self._lines.append(f"{on}:")

    _do_fence = _do_membar

    def _do_cvta(self, one: Instruction) -> None:
        value = self._read(one.operands[1], "b64")
        if "shared" in one.parts or "local" in one.parts:
            sign = "sub" if "to" in one.parts else "add"
            window = WINDOW if "shared" in one.parts else LOCAL_WINDOW
            value = self._let(f"{sign} i64 {value}, {window}")
        self._write(one.operands[0], value, "b64", self._overflow(one.operands[1]))

    # -- Integers and floats ---------------------------------------------------------------------

    def _widen(self, value: str, source: str, target: str) -> str:
        """Return an integer as one of at least as many bits, by its sign if it has one."""
        if _bits(target) <= _bits(source):
            return self._convert(value, source, target)
        how = "sext" if source[0] == "s" else "zext"
        return self._let(f"{how} {_llvm(source)} {value} to i{_bits(target)}")

    def _do_mov(self, one: Instruction) -> None:
        target, source = one.operands
        kind = one.parts[1]
        if target.startswith("{"):
            parts = re.findall(r"%\w+|_", target)
            part = _bits(kind) // len(parts)
            whole = self._read(source, "b" + kind[1:])
            for k, name in enumerate(parts):
                moved = self._let(f"lshr i{_bits(kind)} {whole}, {k * part}")
                if name != "_":
                    self._write(name, self._convert(moved, "b" + kind[1:], f"b{part}"), f"b{part}")
        elif source.startswith("{"):
            parts = [name.strip() for name in source.strip("{}").split(",")]
            part = _bits(kind) // len(parts)
            whole = "0"
            for k, name in enumerate(parts):
                value = self._convert(self._read(name, f"b{part}"), f"b{part}", "b" + kind[1:])
                value = self._let(f"shl i{_bits(kind)} {value}, {k * part}")
                whole = self._let(f"or i{_bits(kind)} {whole}, {value}")
            self._write(target, whole, "b" + kind[1:])
        else:
            self._write(target, self._read(source, kind), kind, self._overflow(source))

    def _checked(self, one: Instruction, name: str, kind: str, a: str, b: str) -> tuple[str, str]:
        """Return a sum, difference or product, and 1 plus its site if it overflows."""
        llvm = _llvm(kind)
        if one.operands[0] not in self._tracked:
            return self._let(f"{name} {llvm} {a}, {b}"), "0"
        function = f"llvm.s{name}.with.overflow.{llvm}"
        self._declared.add(f"declare {{{llvm}, i1}} @{function}({llvm}, {llvm})")
        pair = self._let(f"call {{{llvm}, i1}} @{function}({llvm} {a}, {llvm} {b})")
        bad = self._let(f"extractvalue {{{llvm}, i1}} {pair}, 1")
        site = self._site(one) + 1
        overflow = self._let(f"select i1 {bad}, i32 {site}, i32 0")
        return self._let(f"extractvalue {{{llvm}, i1}} {pair}, 0"), overflow

    def _either(self, a: str, b: str) -> str:
        if "0" in (a, b):
            return b if a == "0" else a
        return self._intrinsic("llvm.umax.i32", "i32", a, b)

    def _arithmetic(self, one: Instruction, name: str) -> None:
        kind, (target, *sources) = one.parts[-1], one.operands
        a, b = (self._read(source, kind) for source in sources)
        if kind[0] == "f":
            self._write(target, self._let(f"f{name} {_llvm(kind)} {a}, {b}"), kind)
            return
        value, overflow = self._checked(one, name, kind, a, b)
        if kind == "s64" and name == "add" and sources[1] == str(-(1 << 63)):
            overflow = "0"  # It flips the sign bit, as compilers do and undo.
        self._write(target, value, kind, self._either(overflow, self._overflow(*sources)))

    def _check_float(self, one: Instruction, allowed: tuple[str, ...] = ("rn",)) -> None:
        """Refuse roundings that the host does not have."""
        for part in one.parts[1:-1]:
            if part not in allowed:
                raise PtxError(f"line {one.line}: no model of {one.opcode}")

    def _do_add(self, one: Instruction) -> None:
        if one.parts[1:] == ["rz", "f32"]:
            a, b = (self._read(source, "f32") for source in one.operands[1:])
            self._write(one.operands[0], self._added_towards_zero(a, b), "f32")
            return
        self._check_float(one)
        self._arithmetic(one, "add")

    def _do_sub(self, one: Instruction) -> None:
        self._check_float(one)
        self._arithmetic(one, "sub")

    def _do_mul(self, one: Instruction) -> None:
        kind, (target, *sources) = one.parts[-1], one.operands
        if kind[0] == "f":
            self._check_float(one)
        if kind[0] == "f" or one.parts[1] == "lo":
            self._arithmetic(one, "mul")
            return
        value = self._wide_product(kind, sources[0], sources[1])
        bits = _bits(kind)
        if one.parts[1] == "hi":
            value = self._let(f"lshr i{2 * bits} {value}, {bits}")
            self._write(target, self._let(f"trunc i{2 * bits} {value} to i{bits}"), kind)
        else:
            self._write(target, value, f"b{2 * bits}", self._overflow(*sources))

    def _wide_product(self, kind: str, a: str, b: str) -> str:
        bits, how = _bits(kind), "sext" if kind[0] == "s" else "zext"
        wide = [self._let(f"{how} i{bits} {self._read(x, kind)} to i{2 * bits}") for x in (a, b)]
        return self._let(f"mul i{2 * bits} {wide[0]}, {wide[1]}")

    def _do_mad(self, one: Instruction) -> None:
        kind, (target, a, b, c) = one.parts[-1], one.operands
        if one.parts[1] == "wide":
            wide = f"{kind[0]}{2 * _bits(kind)}"
            product, overflow = self._wide_product(kind, a, b), "0"
            kind = wide
        elif one.parts[1] == "lo" and one.parts[2] == "cc":
            # The sum with a carry, which the next instruction adds.
            product = self._let(f"mul i32 {self._read(a, kind)}, {self._read(b, kind)}")
            total = self._let(f"add i32 {product}, {self._read(c, kind)}")
            self._carry = self._let(f"icmp ult i32 {total}, {product}")
            self._write(target, total, kind)
            return
        elif one.parts[1] == "lo":
            product, overflow = self._checked(
                one, "mul", kind, self._read(a, kind), self._read(b, kind)
            )
        else:
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        value, also = self._checked(one, "add", kind, product, self._read(c, kind))
        overflow = self._either(self._either(overflow, also), self._overflow(a, b, c))
        self._write(target, value, kind, overflow)

    def _do_madc(self, one: Instruction) -> None:
        target, a, b, c = one.operands
        if one.parts[1:] != ["hi", "u32"]:
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        high = self._let(f"lshr i64 {self._wide_product('u32', a, b)}, 32")
        high = self._let(f"trunc i64 {high} to i32")
        carry = self._let(f"zext i1 {self._carry} to i32")
        total = self._let(f"add i32 {high}, {self._read(c, 'u32')}")
        self._write(target, self._let(f"add i32 {total}, {carry}"), "u32")

    def _added_towards_zero(self, a: str, b: str) -> str:
        """Return ``a + b`` of two floats, rounded towards 0."""
        down = self._rounded_down(a, "1.0", b)
        turned = [self._let(f"fneg float {value}") for value in (a, b)]
        up = self._let(f"fneg float {self._rounded_down(turned[0], '1.0', turned[1])}")
        near = self._let(f"fadd float {a}, {b}")
        is_negative = self._let(f"fcmp olt float {near}, 0.0")
        return self._let(f"select i1 {is_negative}, float {up}, float {down}")

    def _do_fma(self, one: Instruction) -> None:
        kind = one.parts[-1]
        values = [self._read(source, kind) for source in one.operands[1:]]
        if one.parts[1:] == ["rm", "f32"]:
            self._write(one.operands[0], self._rounded_down(*values), kind)
            return
        self._check_float(one)
        value = self._intrinsic(f"llvm.fma.{kind}", _llvm(kind), *values)
        self._write(one.operands[0], value, kind)

    def _rounded_down(self, a: str, b: str, c: str) -> str:
        """Return ``a·b + c`` of three floats, rounded towards -∞."""
        x, y, z = (self._let(f"fpext float {value} to double") for value in (a, b, c))
        product = self._let(f"fmul double {x}, {y}")  # exact
        total = self._let(f"fadd double {product}, {z}")
        # The part of the sum that rounding has lost.
        part = self._let(f"fsub double {total}, {product}")
        rest = self._let(f"fsub double {total}, {part}")
        rest = self._let(f"fsub double {product}, {rest}")
        lost = self._let(f"fadd double {rest}, {self._let(f'fsub double {z}, {part}')}")
        near = self._let(f"fptrunc double {total} to float")
        wide = self._let(f"fpext float {near} to double")
        above = self._let(f"fcmp ogt double {wide}, {total}")
        same = self._let(f"fcmp oeq double {wide}, {total}")
        less = self._let(f"fcmp olt double {lost}, 0.0")
        above = self._let(f"or i1 {above}, {self._let(f'and i1 {same}, {less}')}")
        bits = self._let(f"bitcast float {near} to i32")
        # The next smaller one: of a positive number by fewer bits, of a negative one by more.
        sign = self._let(f"icmp slt i32 {bits}, 0")
        zero = self._let(f"fcmp oeq float {near}, 0.0")
        step = self._let(f"select i1 {sign}, i32 1, i32 -1")
        below = self._let(f"add i32 {bits}, {step}")
        below = self._let(f"select i1 {zero}, i32 {(1 << 31) + 1}, i32 {below}")
        bits = self._let(f"select i1 {above}, i32 {below}, i32 {bits}")
        return self._let(f"bitcast i32 {bits} to float")

    def _do_ex2(self, one: Instruction) -> None:
        """Raise 2 to a power; exactly rounded, which a device is not."""
        self._check_float(one, ("approx", "ftz"))
        kind = one.parts[-1]
        value = self._intrinsic(f"llvm.exp2.{kind}", _llvm(kind), self._read(one.operands[1], kind))
        self._write(one.operands[0], self._flushed(one, value), kind)

    def _do_rcp(self, one: Instruction) -> None:
        """Divide 1; exactly rounded, which an approximation on a device is not."""
        self._check_float(one, ("rn", "approx", "ftz"))
        kind = one.parts[-1]
        value = self._let(f"fdiv {_llvm(kind)} 1.0, {self._read(one.operands[1], kind)}")
        self._write(one.operands[0], self._flushed(one, value), kind)

    def _flushed(self, one: Instruction, value: str) -> str:
        """Return a float, or 0 of its sign in place of a subnormal one where those are flushed."""
        if one.parts[-2:] != ["ftz", "f32"]:
            return value
        size = self._intrinsic("llvm.fabs.f32", "float", value)
        small = self._let(f"fcmp olt float {size}, 0x3810000000000000")
        zero = self._intrinsic("llvm.copysign.f32", "float", "0.0", value)
        return self._let(f"select i1 {small}, float {zero}, float {value}")

    def _do_copysign(self, one: Instruction) -> None:
        """Give a number the sign of another, which comes first."""
        kind, (target, sign, size) = one.parts[1], one.operands
        values = self._read(size, kind), self._read(sign, kind)
        value = self._intrinsic(f"llvm.copysign.{kind}", _llvm(kind), *values)
        self._write(target, value, kind)

    def _do_div(self, one: Instruction) -> None:
        self._divide(one, "div")

    def _do_rem(self, one: Instruction) -> None:
        self._divide(one, "rem")

    def _divide(self, one: Instruction, name: str) -> None:
        kind, (target, a, b) = one.parts[-1], one.operands
        x, y = self._read(a, kind), self._read(b, kind)
        llvm = _llvm(kind)
        if kind[0] == "f":
            self._check_float(one)
            self._write(target, self._let(f"f{name} {llvm} {x}, {y}"), kind)
            return
        bad = self._let(f"icmp eq {llvm} {y}, 0")
        if kind[0] == "s":
            least = self._let(f"icmp eq {llvm} {x}, {-(1 << (_bits(kind) - 1))}")
            minus = self._let(f"icmp eq {llvm} {y}, -1")
            bad = self._let(f"or i1 {bad}, {self._let(f'and i1 {least}, {minus}')}")
        self._fault_if(bad, Fault.DIVISION, self._site(one))
        self._write(target, self._let(f"{kind[0]}{name} {llvm} {x}, {y}"), kind)

    def _do_shl(self, one: Instruction) -> None:
        self._shift(one, "shl")

    def _do_shr(self, one: Instruction) -> None:
        self._shift(one, "ashr" if one.parts[1][0] == "s" else "lshr")

    def _shift(self, one: Instruction, name: str) -> None:
        """Shift by any number of bits: what is beyond the width is as if shifted out."""
        kind, (target, source, by) = one.parts[1], one.operands
        bits = _bits(kind)
        value, amount = self._read(source, kind), self._read(by, "b32")
        wide = self._let(f"icmp uge i32 {amount}, {bits}")
        most = bits - 1 if name == "ashr" else 0
        inside = self._let(f"select i1 {wide}, i32 {most}, i32 {amount}")
        inside = self._convert(inside, "b32", kind)
        shifted = self._let(f"{name} i{bits} {value}, {inside}")
        if name != "ashr":
            shifted = self._let(f"select i1 {wide}, i{bits} 0, i{bits} {shifted}")
        overflow = "0"
        if name == "shl" and target in self._tracked:
            back = self._let(f"ashr i{bits} {shifted}, {inside}")
            bad = self._let(f"icmp ne i{bits} {back}, {value}")
            overflow = self._let(f"select i1 {bad}, i32 {self._site(one) + 1}, i32 0")
            overflow = self._either(overflow, self._overflow(source))
        self._write(target, shifted, kind, overflow)

    def _logic(self, one: Instruction, name: str) -> None:
        kind = one.parts[1]
        a, b = (self._read(source, kind) for source in one.operands[1:])
        self._write(one.operands[0], self._let(f"{name} {_llvm(kind)} {a}, {b}"), kind)

    def _do_and(self, one: Instruction) -> None:
        self._logic(one, "and")

    def _do_or(self, one: Instruction) -> None:
        self._logic(one, "or")

    def _do_xor(self, one: Instruction) -> None:
        self._logic(one, "xor")

    def _do_not(self, one: Instruction) -> None:
        kind = one.parts[1]
        value = self._read(one.operands[1], kind)
        self._write(one.operands[0], self._let(f"xor {_llvm(kind)} {value}, -1"), kind)

    def _do_neg(self, one: Instruction) -> None:
        kind = one.parts[1]
        value, llvm = self._read(one.operands[1], kind), _llvm(kind)
        negated = f"fneg {llvm} {value}" if kind[0] == "f" else f"sub {llvm} 0, {value}"
        self._write(one.operands[0], self._let(negated), kind)

    def _do_abs(self, one: Instruction) -> None:
        kind = one.parts[1]
        value, llvm = self._read(one.operands[1], kind), _llvm(kind)
        if kind[0] == "f":
            self._write(one.operands[0], self._intrinsic(f"llvm.fabs.{kind}", llvm, value), kind)
            return
        minus = self._let(f"sub {llvm} 0, {value}")
        below = self._let(f"icmp slt {llvm} {value}, 0")
        result = self._let(f"select i1 {below}, {llvm} {minus}, {llvm} {value}")
        self._write(one.operands[0], result, kind)

    def _do_max(self, one: Instruction) -> None:
        self._extreme(one, "gt")

    def _do_min(self, one: Instruction) -> None:
        self._extreme(one, "lt")

    def _extreme(self, one: Instruction, order: str) -> None:
        kind, (target, *sources) = one.parts[-1], one.operands
        a, b = (self._read(source, kind) for source in sources)
        llvm = _llvm(kind)
        if kind[0] != "f":
            sign = "s" if kind[0] == "s" else "u"
            first = self._let(f"icmp {sign}{order} {llvm} {a}, {b}")
            result = self._let(f"select i1 {first}, {llvm} {a}, {llvm} {b}")
            self._write(target, result, kind, self._overflow(*sources))
            return
        self._check_float(one, ())
        # A number if one is not a NaN; zeros are in order of their signs.
        bits = f"i{_bits(kind)}"
        x, y = (self._let(f"bitcast {llvm} {value} to {bits}") for value in (a, b))
        both = self._let(f"{'and' if order == 'gt' else 'or'} {bits} {x}, {y}")
        same = self._let(f"fcmp oeq {llvm} {a}, {b}")
        first = self._let(f"fcmp o{order} {llvm} {a}, {b}")
        nan_b = self._let(f"fcmp uno {llvm} {b}, {b}")
        first = self._let(f"or i1 {first}, {nan_b}")
        result = self._let(f"select i1 {first}, {bits} {x}, {bits} {y}")
        result = self._let(f"select i1 {same}, {bits} {both}, {bits} {result}")
        self._write(target, result, f"b{_bits(kind)}")

    def _do_setp(self, one: Instruction) -> None:
        if len(one.parts) != 3 or len(one.operands) != 3:
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        _, comparison, kind = one.parts
        a, b = (self._read(source, kind) for source in one.operands[1:])
        if kind[0] == "f":
            name = _FLOAT_COMPARISONS[comparison]
            value = self._let(f"fcmp {name} {_llvm(kind)} {a}, {b}")
        else:
            signs = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
            sign = "s" if kind[0] == "s" else "u"
            name = signs.get(comparison, comparison)
            if name in ("lt", "le", "gt", "ge"):
                name = sign + name
            value = self._let(f"icmp {name} {_llvm(kind)} {a}, {b}")
            if self._mutable and name[0] in "su":
                equal = self._let(f"icmp eq {_llvm(kind)} {a}, {b}")
                changed = self._let(f"and i1 {self._mutant(one, 'bound', equal)}, {equal}")
                value = self._let(f"xor i1 {value}, {changed}")
        self._write(one.operands[0], value, "pred")

    def _do_selp(self, one: Instruction) -> None:
        kind, (target, a, b, p) = one.parts[1], one.operands
        llvm, chosen = _llvm(kind), self._read(p, "pred")
        x, y = self._read(a, kind), self._read(b, kind)
        overflow, other = self._overflow(a), self._overflow(b)
        if overflow != other:
            overflow = self._let(f"select i1 {chosen}, i32 {overflow}, i32 {other}")
        value = self._let(f"select i1 {chosen}, {llvm} {x}, {llvm} {y}")
        self._write(target, value, kind, overflow)

    def _do_cvt(self, one: Instruction) -> None:
        *modes, to, source = one.parts[1:]
        target, operand = one.operands
        value = self._read(operand, source)
        a, b = _llvm(source), _llvm(to)
        whole = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        if set(modes) - {"rn", "sat", *whole}:
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        if source[0] != "f" and to[0] != "f":
            if "sat" in modes:
                raise PtxError(f"line {one.line}: no model of {one.opcode}")
            # Bits beyond the width of the target are those of its register: by the sign of it.
            own = self._kernel.registers[target]
            if _bits(to) <= _bits(source):
                narrow = self._convert(value, source, to)
                overflow = self._overflow(operand) if _bits(to) == _bits(source) else "0"
                self._write(target, self._widen(narrow, to, own), own, overflow)
            else:
                wide = self._widen(value, source, to)
                self._write(target, self._widen(wide, to, own), own, self._overflow(operand))
        elif source[0] != "f":
            how = "sitofp" if source[0] == "s" else "uitofp"
            self._write(target, self._let(f"{how} {a} {value} to {b}"), to)
        elif to[0] != "f":
            (mode,) = modes
            value = self._intrinsic(f"llvm.{whole[mode]}.{source}", a, value)
            how = "fptosi" if to[0] == "s" else "fptoui"
            name = f"llvm.{how}.sat.{b}.{source}"
            self._declared.add(f"declare {b} @{name}({a})")
            self._write(target, self._let(f"call {b} @{name}({a} {value})"), to)
        elif a == b:
            if "sat" in modes:
                # NaN becomes 0.
                value = self._intrinsic(f"llvm.maxnum.{source}", a, value, "0.0")
                value = self._intrinsic(f"llvm.minnum.{source}", a, value, "1.0")
            for mode in set(modes) - {"sat"}:
                value = self._intrinsic(f"llvm.{whole[mode]}.{source}", a, value)
            self._write(target, value, to)
        else:
            how = "fpext" if _bits(to) > _bits(source) else "fptrunc"
            self._write(target, self._let(f"{how} {a} {value} to {b}"), to)

    def _do_bfi(self, one: Instruction) -> None:
        """Put the low bits of one number into another, at some place."""
        kind, (target, a, b, at, length) = one.parts[1], one.operands
        bits, llvm = _bits(kind), _llvm(kind)
        start = self._let(f"and i32 {self._read(at, 'b32')}, 255")
        count = self._let(f"and i32 {self._read(length, 'b32')}, 255")
        ones = self._let(f"shl i128 1, {self._convert(self._capped(count, bits), 'b32', 'b128')}")
        ones = self._let(f"sub i128 {ones}, 1")
        place = self._convert(self._capped(start, bits), "b32", "b128")
        mask = self._convert(self._let(f"shl i128 {ones}, {place}"), "b128", kind)
        wide = self._convert(self._read(a, kind), kind, "b128")
        moved = self._convert(self._let(f"shl i128 {wide}, {place}"), "b128", kind)
        inside = self._let(f"and {llvm} {moved}, {mask}")
        outside = self._let(f"xor {llvm} {mask}, -1")
        outside = self._let(f"and {llvm} {self._read(b, kind)}, {outside}")
        self._write(target, self._let(f"or {llvm} {inside}, {outside}"), kind)

    def _do_bfe(self, one: Instruction) -> None:
        """Take some bits of a number."""
        kind, (target, a, at, length) = one.parts[1], one.operands
        if kind[0] == "s":
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        bits = _bits(kind)
        start = self._let(f"and i32 {self._read(at, 'b32')}, 255")
        count = self._let(f"and i32 {self._read(length, 'b32')}, 255")
        place = self._convert(self._capped(start, bits), "b32", "b128")
        wide = self._convert(self._read(a, kind), kind, "b128")
        ones = self._let(f"shl i128 1, {self._convert(self._capped(count, bits), 'b32', 'b128')}")
        ones = self._let(f"sub i128 {ones}, 1")
        value = self._let(f"and i128 {self._let(f'lshr i128 {wide}, {place}')}, {ones}")
        self._write(target, self._convert(value, "b128", kind), kind)

    def _capped(self, amount: str, most: int) -> str:
        return self._intrinsic("llvm.umin.i32", "i32", amount, str(most))

    def _do_dp2a(self, one: Instruction) -> None:
        """Add two products, of a half word and a byte each."""
        target, a, b, c = one.operands
        if one.parts[1:] != ["lo", "u32", "u32"]:
            raise PtxError(f"line {one.line}: no model of {one.opcode}")
        x, y, total = (self._read(source, "u32") for source in (a, b, c))
        for half, byte in ((0, 0), (16, 8)):
            left = self._let(f"and i32 {self._let(f'lshr i32 {x}, {half}')}, 65535")
            right = self._let(f"and i32 {self._let(f'lshr i32 {y}, {byte}')}, 255")
            total = self._let(f"add i32 {total}, {self._let(f'mul i32 {left}, {right}')}")
        self._write(target, total, "u32")

    def _do_popc(self, one: Instruction) -> None:
        kind = one.parts[1]
        value = self._read(one.operands[1], kind)
        value = self._intrinsic(f"llvm.ctpop.{_llvm(kind)}", _llvm(kind), value)
        self._write(one.operands[0], self._convert(value, kind, "b32"), "b32")

    def _do_sqrt(self, one: Instruction) -> None:
        self._check_float(one)
        kind = one.parts[-1]
        value = self._intrinsic(f"llvm.sqrt.{kind}", _llvm(kind), self._read(one.operands[1], kind))
        self._write(one.operands[0], value, kind)
