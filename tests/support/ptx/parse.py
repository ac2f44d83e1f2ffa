"""Read a kernel of PTX, as NVVM writes it: one statement a line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple


class PtxError(Exception):
    """PTX that the runner does not model."""


class Instruction(NamedTuple):
    """One instruction, with its line in the text.

    ``operands`` are registers, numbers and names; ``[%rd1+8]`` is one operand, and so is a vector
    ``{%f1, %f2}``. ``guard`` is ``@%p1`` or ``@!%p1`` or empty.
    """

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def parts(self) -> list[str]:
        """The opcode, cut at its dots."""
        return self.opcode.split(".")


@dataclass
class Block:
    """Instructions of which all are executed or none; where it goes on is its last one's."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[str] = field(default_factory=list)


class Array(NamedTuple):
    """An array that the threads of a block share, or that each thread has."""

    name: str
    size: int
    alignment: int


@dataclass
class Kernel:
    """A kernel: the name that Python gave it, its parameters, and its control flow."""

    name: str
    parameters: dict[str, int]
    shared: list[Array]
    local: list[Array]
    registers: dict[str, str]
    blocks: list[Block]
    text: list[str]

    def instructions(self) -> list[Instruction]:
        """All instructions, in the order of the text."""
        return [one for block in self.blocks for one in block.instructions]


_ARRAY = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+?)<(\d+)>")
_TEMPORARY = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+)")
_PARAMETER = re.compile(r"\.param\s+\.[usbf](\d+)\s+([\w$]+)")
_INSTRUCTION = re.compile(r"(@!?%\w+)?\s*([a-z][\w.:]*)\s*(.*)")


def _split(text: str) -> tuple[str, ...]:
    """Return operands that commas separate outside of braces and brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^]]*\]|[^,|])+", text)
    return tuple(part.strip() for part in parts if part.strip())


def parse(text: str) -> Kernel:
    """Read the one kernel of a module."""
    lines = text.splitlines()
    name, parameters = "", {}
    arrays: dict[str, list[Array]] = {"shared": [], "local": []}
    registers: dict[str, str] = {}
    blocks = [Block("$entry")]
    inside = False
    scope: dict[str, str] = {}  # registers that are declared in braces, and a name for each
    for number, raw in enumerate(lines, 1):
        line = raw.split("//")[0].strip().rstrip(";").strip()
        for short, own in scope.items():
            line = re.sub(rf"{short}\b", own, line)
        if match := _ARRAY.search(line):
            arrays[match[1]].append(Array(match[3], int(match[4]), int(match[2])))
        elif ".entry" in line:
            if name:
                raise PtxError("a module with two kernels")
            name = line.split(".entry")[1].strip().rstrip("(")
        elif ".func" in line:
            raise PtxError(f"line {number}: a function that is called: {line}")
        elif match := _PARAMETER.match(line):
            parameters[match[2]] = int(match[1])
        elif line == "{":
            inside = True
        elif match := _REGISTERS.match(line):
            for k in range(int(match[3])):
                registers[f"{match[2]}{k}"] = match[1]
        elif match := _TEMPORARY.fullmatch(line):
            scope[match[2]] = f"%temporary{number}"
            registers[scope[match[2]]] = match[1]
        elif not inside or not line or line == "}" or line.startswith(".pragma"):
            scope = {} if line == "}" else scope
        elif line.endswith(":"):
            blocks.append(Block(line[:-1]))
        elif match := _INSTRUCTION.fullmatch(line):
            instruction = Instruction(number, match[1] or "", match[2], _split(match[3]))
            if _ends(blocks[-1]):
                blocks.append(Block(f"$after{number}"))
            blocks[-1].instructions.append(instruction)
        else:
            raise PtxError(f"line {number}: {line}")
    kernel = Kernel(name, parameters, **arrays, registers=registers, blocks=blocks, text=lines)
    _connect(kernel)
    return kernel


def _ends(block: Block) -> bool:
    """Return whether a block's last instruction leaves it."""
    if not block.instructions:
        return False
    last = block.instructions[-1].parts[0]
    return last in ("bra", "ret", "exit", "bar", "vote", "shfl", "barrier")


def _connect(kernel: Kernel) -> None:
    """Find the successors of every block."""
    for block, after in zip(kernel.blocks, [*kernel.blocks[1:], None], strict=True):
        last = block.instructions[-1] if block.instructions else None
        kind = last.parts[0] if last else ""
        if last and kind == "bra":
            block.successors.append(last.operands[0])
        if kind in ("ret", "exit") and last and not last.guard:
            continue
        if not (last and kind == "bra" and not last.guard):
            if after is None:
                raise PtxError("the end of a kernel without ret")
            block.successors.append(after.label)
