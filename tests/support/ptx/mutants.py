"""Kernels with a small fault, which a launch must tell from the right ones.

A mutation leaves out one barrier (of a block or a warp, without a vote) or one fence, or takes
``<`` for ``≤`` in one comparison of integers, which shifts a bound by one.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fake_cupy
import numpy as np
import pytest

from . import stand_in
from .runner import FaultError, Program, compile_kernel
from .translate import Mutation

KINDS = ("barrier", "fence", "bound")
# Launches in which a shifted bound may make a difference, after which it is given up.
_TRIES = 20


@dataclass
class Tried:
    """The mutations of a kernel, by number from 1 on, and what became of each."""

    program: Program
    left: dict[int, int] = field(init=False)  # launches that did not tell it from the right one
    told: dict[int, str] = field(default_factory=dict)  # by what: a fault, or other bits

    def __post_init__(self) -> None:
        self.left = dict.fromkeys(range(1, len(self.program.mutations) + 1), 0)

    def mutation(self, number: int) -> Mutation:
        return self.program.mutations[number - 1]

    def undetected(self, kind: str) -> list[int]:
        """Return mutations that made a difference where they stand, but never to a result."""
        return [k for k, tries in self.left.items() if tries and self.mutation(k).kind == kind]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return, by kind, how many mutations there are, and what became of them."""
        counts = {}
        for kind in KINDS:
            every = range(1, len(self.program.mutations) + 1)
            numbers = [k for k in every if self.mutation(k).kind == kind]
            choices = [self.is_choice(k) for k in self.undetected(kind)]
            ranges = [self.is_of_range(k) for k in self.undetected(kind)]
            counts[kind] = {
                "mutants": len(numbers),
                "detected": sum(k in self.told for k in numbers),
                "min or max": sum(choices),
                "range": sum(b and not a for a, b in zip(choices, ranges, strict=True)),
                "no difference": sum(self.left.get(k) == 0 for k in numbers),
            }
        return counts

    def is_choice(self, number: int) -> bool:
        """Return whether a comparison only chooses between the two numbers that it compares.

        Where they are equal both choices are.
        """
        compared, users = self._used(number)
        return bool(users) and all(
            x.parts[0] == "selp" and set(x.operands[1:3]) == set(compared) for x in users
        )

    def is_of_range(self, number: int) -> bool:
        """Return whether a comparison with 0 is one of those in Numba's ``range(a, b, step)``.

        Before a loop it compares ``b - a`` and the step, whose signs must be equal; at 0 there are
        no turns, whichever sign that has. In a turn it compares the number of those that are left:
        after the last one neither that nor the next number is looked at again.
        """
        compared, users = self._used(number)
        if not users or compared[1] != "0":
            return False
        chosen = [x for x in users if x.parts[0] == "selp"]
        others = [x for x in users if x.parts[0] != "selp"]
        if others:
            return all(x.parts[0] == "xor" for x in others)
        return all(x.operands[2] == "0" for x in chosen)

    def _used(self, number: int) -> tuple[tuple[str, ...], list[Any]]:
        """Return what is compared where a bound is shifted, and the instructions that read it."""
        line = self.mutation(number).line
        instructions = self.program.kernel.instructions()
        (one,) = (x for x in instructions if x.line == line)
        if one.parts[0] != "setp":
            return (), []
        target, *compared = one.operands
        return tuple(compared), [x for x in instructions if _reads(x, target)]

    def lines(self, kind: str) -> list[str]:
        """Return a few lines around each mutation that was not detected."""
        text = self.program.text.splitlines()
        return [
            f"{self.mutation(k)}:\n" + "\n".join(text[self.mutation(k).line - 9 :][:17])
            for k in self.undetected(kind)
            if not (self.is_choice(k) or self.is_of_range(k))
        ]


def _reads(one: Any, register: str) -> bool:
    """Return whether an instruction reads a predicate."""
    given = [*one.operands[1:], one.guard.lstrip("@")]
    return any(operand.lstrip("!") == register for operand in given)


class Mutants:
    """Launches that are repeated with every mutation that no launch has told yet.

    It is told by a fault, or by other bits in memory than those of the kernel itself. Only those
    are tried that make a difference where they stand: a barrier that is reached, a comparison of
    two equal numbers.

    Attributes
    ----------
    kernels : dict of str to Tried
        By the name of the kernel.
    about : str
        What follows it, where kernels of one name differ.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: dict[str, Tried] = {}
        self.about = ""
        monkeypatch.setattr(stand_in, "launch", self._launch)

    def _launch(self, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        # Memory that is freed meanwhile, in a cycle of references, would be written to again.
        gc.disable()
        try:
            self._launch_all(kernel, blocks, threads, *arguments)
        finally:
            gc.enable()

    def _launch_all(self, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        tried = self._tried(kernel, len(arguments))
        program, memory = tried.program, fake_cupy.state.memory()
        before = [ctypes.string_at(*span) for span in memory]
        program.launch(blocks, threads, arguments, memory)
        after = [ctypes.string_at(*span) for span in memory]
        different, patience = program.different.copy(), 4 * program.jumps + 100_000
        for number in self._to_try(tried, different):
            _restore(memory, before)
            try:
                program.launch(
                    blocks, threads, arguments, memory, mutation=number, patience=patience
                )
            except FaultError as fault:
                tried.told[number] = fault.kind
            else:
                if [ctypes.string_at(*span) for span in memory] != after:
                    tried.told[number] = "other bits"
            if number in tried.told:
                del tried.left[number]
            else:
                tried.left[number] += 1
        _restore(memory, after)

    def _tried(self, kernel: Any, count: int) -> Tried:
        """Return the mutations of a kernel; of the first of a name, whose others are left alone."""
        own = compile_kernel(kernel, count, mutable=True)
        known = self.kernels.setdefault(own.name + self.about, Tried(own))
        return known if known.program.text == own.text else Tried(compile_kernel(kernel, count))

    def _to_try(self, tried: Tried, different: np.ndarray[Any, Any]) -> Iterator[int]:
        for number, tries in list(tried.left.items()):
            bound = tried.mutation(number).kind == "bound"
            if different[number - 1] and (tries < _TRIES or not bound):
                yield number


def _restore(memory: list[tuple[int, int]], contents: list[bytes]) -> None:
    for (address, size), content in zip(memory, contents, strict=True):
        ctypes.memmove(address, content, size)
