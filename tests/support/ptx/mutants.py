"""Kernels without one of their barriers or fences, which a launch must tell from the right ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import fake_cupy
import pytest

from . import stand_in
from .runner import FaultError, Program, compile_kernel

__all__ = ["Mutants"]

_WAITS = ("bar.sync", "bar.warp.sync", "membar.gl")


def _without_waits(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each barrier and fence, and the text without it."""
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if line.strip().startswith(_WAITS):
            yield k + 1, "\n".join([*lines[:k], "", *lines[k + 1 :]])


class Mutants:
    """Launches that are repeated for every mutant of their kernel which no launch has told yet.

    A mutant is told by a fault, or by other bits in memory than those of the kernel itself.

    Attributes
    ----------
    left : dict of str to dict of int to Program
        By the name of the kernel and the line of the barrier: those that are not told.
    counts : dict of str to int
        How many mutants there were of each kernel.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[str, dict[int, Program]] = {}
        self.counts: dict[str, int] = {}
        monkeypatch.setattr(stand_in, "launch", self._launch)

    def _launch(self, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        program, memory = compile_kernel(kernel, len(arguments)), fake_cupy.state.memory()
        before = [ctypes.string_at(*span) for span in memory]
        program.launch(blocks, threads, arguments, memory)
        after = [ctypes.string_at(*span) for span in memory]
        if program.name not in self.left:
            mutants = {
                line: Program(text, program.name) for line, text in _without_waits(program.text)
            }
            self.left[program.name], self.counts[program.name] = mutants, len(mutants)
        left = self.left[program.name]
        for line, mutant in list(left.items()):
            _restore(memory, before)
            try:
                mutant.launch(blocks, threads, arguments, memory)
            except FaultError:
                del left[line]
                continue
            if [ctypes.string_at(*span) for span in memory] != after:
                del left[line]
        _restore(memory, after)

    def lines(self) -> dict[str, list[str]]:
        """Return what is left: a few lines of each kernel around the barrier."""
        return {
            name: [
                f"line {line}:\n" + "\n".join(mutant.text.splitlines()[line - 9 : line + 8])
                for line, mutant in left.items()
            ]
            for name, left in self.left.items()
            if left
        }


def _restore(memory: list[tuple[int, int]], contents: list[bytes]) -> None:
    for (address, size), content in zip(memory, contents, strict=True):
        ctypes.memmove(address, content, size)
