"""The base of renderers: expressions as assignments, named as in the definition."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import ClassVar, Literal

from ..expressions import topological
from ..operations import OPERATIONS, Node, formula_of

# Characters of an expression beyond which its parts get names.
LONG = 60


class Renderer:
    """Write expressions as text.

    Parameters
    ----------
    names : mapping of Node to str
        Names that some nodes have in what they were traced from.
    """

    target: ClassVar[Literal["numpy", "cpu", "cuda"]]
    # Names that mean something else in the text, beside those that operations have there.
    words: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Mapping[Node, str]) -> None:
        self.traced_names = names
        self._names: dict[Node, str] = {}
        self._taken: set[str] = set()

    @classmethod
    @cache
    def _reserved(cls) -> re.Pattern[str]:
        """Return what matches a name that means something else."""
        texts = [getattr(each, cls.target) for each in OPERATIONS.values()]
        names = [name for text in texts for name in re.findall(r"(?<![.\w])[a-z_]\w*", text)]
        return re.compile("|".join((*cls.words, *names)))

    def number(self, value: float) -> str:
        """Return the text of a number, also of those for which Python has no literal."""
        return repr(value).replace("inf", "1e999").replace("nan", "(1e999 - 1e999)")

    def name_of(self, each: Node) -> str:
        """Return the name of a node, that of what was traced if it has one."""
        if each not in self._names:
            name = self.traced_names.get(each, "")
            is_name = name.isidentifier() and not keyword.iskeyword(name)
            self._names[each] = self.new_name(name if is_name else self.default_name(each))
        return self._names[each]

    def default_name(self, each: Node) -> str:
        """Return a name for a node that has none in what was traced."""
        return f"{each.operation[:1]}{each.about[0]}" if each.about else "t"

    def new_name(self, given: str) -> str:
        """Return a name that nothing else has, or has had."""
        name, count = given, 1
        while name in self._taken or self._reserved().fullmatch(name):
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
        pruned = topological(roots, texts, load)
        uses = Counter(a for each in pruned for a in each.arguments)
        # A formula may read an argument several times.
        uses.update(a for each in pruned if formula_of(each, self.target) for a in each.arguments)
        uses.update(roots)
        for each in pruned:
            if each.operation == "number":
                texts[each] = self.number(each.about[0])
                continue
            text = load(each)
            is_loaded = bool(text)
            if not is_loaded:
                formula = formula_of(each, self.target)
                if formula is not None:
                    whole = formula(*each.arguments)
                    more, texts = self.assignments([whole], texts, load)
                    lines += more
                    texts[each] = texts[whole]
                    continue
                template = getattr(OPERATIONS[each.operation], self.target)
                text = template.format(*(texts[a] for a in each.arguments))
            is_named = each in self.traced_names or uses[each] > 1 or each in roots
            if is_loaded or is_named or len(text) > LONG:
                name = self.name_of(each)
                lines.append(f"{name} = {without_brackets(text)}")
                text = name
            texts[each] = text
        return lines, texts


def without_brackets(text: str) -> str:
    """Return an expression without brackets around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text
