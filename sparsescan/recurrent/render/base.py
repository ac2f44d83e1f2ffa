"""The base of renderers: expressions as assignments, named as in the definition."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal

from ..operations import OPERATIONS, Node
from ..program import CellProgram

# Characters of an expression beyond which its parts get names.
_LONG = 60


class Renderer:
    """Write expressions of a program as text.

    Parameters
    ----------
    program : CellProgram
        The program.
    """

    target: ClassVar[Literal["numpy", "cpu", "cuda"]]
    # Names that mean something else in the text, as a regular expression.
    reserved: ClassVar[str]

    def __init__(self, program: CellProgram) -> None:
        self.program = program
        self._names: dict[Node, str] = {}
        self._taken: set[str] = set()

    def number(self, value: float) -> str:
        """Return the text of a number, also of those for which Python has no literal."""
        return repr(value).replace("inf", "1e999").replace("nan", "(1e999 - 1e999)")

    def name_of(self, each: Node) -> str:
        """Return the name of a node, that of the definition if it has one."""
        if each not in self._names:
            given = self.program.names.get(each, "")
            if not given.isidentifier() or keyword.iskeyword(given):
                given = f"{each.operation[:1]}{each.about[0]}" if each.about else "t"
            self._names[each] = self._own_name(given)
        return self._names[each]

    def _own_name(self, given: str) -> str:
        """Return a name that nothing else has, or has had."""
        name, count = given, 1
        while name in self._taken or re.fullmatch(self.reserved, name):
            count += 1
            name = f"{given}_{count}"
        self._taken.add(name)
        return name

    def assignments(
        self, roots: Iterable[Node], known: Mapping[Node, str], load: Callable[[Node], str]
    ) -> tuple[list[str], dict[Node, str]]:
        """Return assignments that compute some nodes, and the text that stands for each.

        Parameters
        ----------
        roots : iterable of Node
            What is computed.
        known : mapping
            Texts of nodes that have been computed.
        load : callable
            It returns the text of a leaf, or of a node that is loaded; "" for what is computed.
        """
        roots = list(roots)
        lines: list[str] = []
        texts = dict(known)
        pruned = self._needed(roots, texts, load)
        uses = Counter(a for each in pruned for a in each.arguments)
        uses.update(roots)
        for each in pruned:
            if each.operation == "number":
                texts[each] = self.number(each.about[0])
                continue
            text = load(each)
            is_loaded = bool(text)
            if not is_loaded:
                template = getattr(OPERATIONS[each.operation], self.target)
                text = template.format(*(texts[a] for a in each.arguments))
            is_named = each in self.program.names or uses[each] > 1 or each in roots
            if is_loaded or is_named or len(text) > _LONG:
                name = self.name_of(each)
                lines.append(f"{name} = {_without_brackets(text)}")
                text = name
            texts[each] = text
        return lines, texts

    def _needed(
        self, roots: list[Node], known: Mapping[Node, str], load: Callable[[Node], str]
    ) -> list[Node]:
        """Return what is computed or loaded for some nodes, each behind what it reads."""
        order: dict[Node, None] = {}
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            each, is_done = stack.pop()
            if each in order or each in known:
                continue
            if is_done or not each.arguments or load(each):
                order[each] = None
                continue
            stack.append((each, True))
            stack += [(argument, False) for argument in reversed(each.arguments)]
        return list(order)


def _without_brackets(text: str) -> str:
    """Return an expression without brackets around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text
