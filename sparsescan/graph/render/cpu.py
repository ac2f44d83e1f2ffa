"""Expressions on vectors of a CPU, which are called lanes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import ClassVar

from ..expressions import topological
from ..operations import Node, is_heavy
from .base import Renderer


class LaneRenderer(Renderer):
    """Write expressions on vectors of a CPU. Each number is a vector, made once for a function."""

    target = "cpu"
    words: ClassVar[tuple[str, ...]] = ("number", "zero", "one", "half", r"k\d+")

    def __init__(self, names: Mapping[Node, str]) -> None:
        super().__init__(names)
        self._constants: dict[float, str] = {}

    def begin(self) -> None:
        """Begin another function, in which all names are free."""
        self._names, self._taken, self._constants = {}, set(), {}

    def number(self, value: float) -> str:
        """Return the name of a vector of one number."""
        known = {0.0: "zero", 1.0: "one", 0.5: "half"}
        self._constants.setdefault(value, known.get(value, f"k{len(self._constants)}"))
        return self._constants[value]

    def constants(self, like: str) -> list[str]:
        """Return assignments of the vectors of one number, of the kind that an array has."""
        self.number(0.0)
        return [
            f"{name} = number({like}, {super(LaneRenderer, self).number(value)})"
            for value, name in self._constants.items()
        ]


def heavy_first(
    roots: Iterable[Node], known: Container[Node], is_leaf: Callable[[Node], object]
) -> list[Node]:
    """Return the operations that take long of those that some nodes are, in order of dependence."""
    order = topological(roots, known, is_leaf)
    level: dict[Node, int] = {}
    for vector in order:
        before = max([level.get(argument, 0) for argument in vector.arguments], default=0)
        level[vector] = before + is_heavy(vector)
    return sorted(filter(is_heavy, order), key=level.__getitem__)
