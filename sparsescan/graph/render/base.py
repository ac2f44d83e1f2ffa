"""The base of renderers: expressions as assignments, with names of the traced function."""

from __future__ import annotations

import keyword
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal

from ..expressions import topological
from ..operations import OPERATIONS, Node, formula_of

# Characters of an expression beyond which its parts get names.
LONG = 60


class Renderer:
    """Write expressions as text.

    Parameters
    ----------
    names : mapping of Node to str
        Names that the traced function has for some nodes.
    """

    target: ClassVar[Literal["numpy", "cpu", "cuda", "c"]]
    # How a name is given to a text.
    assignment: ClassVar[str] = "{} = {}"
    # Names that mean something else in the text, beside those that operations have there.
    words: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Mapping[Node, str]) -> None:
        self.traced_names = names
        self._names: dict[Node, str] = {}
        self._taken: set[str] = set()

    @classmethod
    @cache
    def _reserved(cls) -> re.Pattern[str]:
        """Return a pattern of names that mean something else in the text."""
        texts = [getattr(vector, cls.target) for vector in OPERATIONS.values()]
        names = [name for text in texts for name in re.findall(r"(?<![.\w])[a-z_]\w*", text)]
        return re.compile("|".join((*cls.words, *names)))

    def number(self, value: float) -> str:
        """Return the text of a number, also of those for which Python has no literal."""
        return repr(value).replace("inf", "1e999").replace("nan", "(1e999 - 1e999)")

    def name_of(self, vector: Node) -> str:
        """Return the name of a node: if it can, the one that the traced function has for it."""
        if vector not in self._names:
            name = self.traced_names.get(vector, "")
            is_name = name.isidentifier() and not keyword.iskeyword(name)
            self._names[vector] = self.new_name(name if is_name else self.default_name(vector))
        return self._names[vector]

    def default_name(self, vector: Node) -> str:
        """Return a name for a node without one in the traced function."""
        return f"{vector.operation[:1]}{vector.details[0]}" if vector.details else "t"

    def template(self, vector: Node) -> str:
        """Return the text of an operation, with places for its arguments."""
        found: str = getattr(OPERATIONS[vector.operation], self.target)
        return found

    def new_name(self, wanted: str) -> str:
        """Return a name that no other node has: the wanted one, maybe with a number."""
        name, count = wanted, 1
        while name in self._taken or self._reserved().fullmatch(name):
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name

    def assignments(
        self, roots: Iterable[Node], known: Mapping[Node, str], load: Callable[[Node], str]
    ) -> tuple[list[str], dict[Node, str]]:
        """Return assignments that compute nodes, and for each node the text that stands for it.

        Parameters
        ----------
        roots : iterable of Node
            The nodes to compute.
        known : mapping
            Texts of nodes that have been computed before.
        load : callable
            ``load(node)`` returns the text that loads a node, or "" for a node to compute.
        """
        roots = list(roots)
        lines: list[str] = []
        texts = dict(known)
        pruned = topological(roots, texts, load)
        uses = Counter(argument for vector in pruned for argument in vector.arguments)
        for vector in pruned:
            if formula_of(vector, self.target):  # which may read an argument several times
                uses.update(vector.arguments)
        uses.update(roots)
        for vector in pruned:
            if vector.operation == "number":
                texts[vector] = self.number(vector.details[0])
                continue
            text = load(vector)
            is_loaded = bool(text)
            if not is_loaded:
                formula = formula_of(vector, self.target)
                if formula is not None:
                    whole = formula(*vector.arguments)
                    more, texts = self.assignments([whole], texts, load)
                    lines += more
                    texts[vector] = texts[whole]
                    continue
                text = self.template(vector).format(*(texts[a] for a in vector.arguments))
            is_named = vector in self.traced_names or uses[vector] > 1 or vector in roots
            if is_loaded or is_named or len(text) > LONG:
                name = self.name_of(vector)
                lines.append(self.assignment.format(name, without_brackets(text)))
                text = name
            texts[vector] = text
        return lines, texts


def function_text(name: str, parameters: str, title: str, lines: Iterable[str]) -> str:
    """Return the text of a function."""
    body = "\n".join(f"    {line}" for line in (f'"""{title}"""', *lines))
    return f"def {name}({parameters}):\n{body}"


def functions_of(text: str, file: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a text defines, and `names`, which it reads; tracebacks show the text."""
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    space = dict(names)
    exec(compile(text, file, "exec"), space)
    return space


def without_brackets(text: str) -> str:
    """Return an expression without the brackets around the whole of it, if there are any."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text
