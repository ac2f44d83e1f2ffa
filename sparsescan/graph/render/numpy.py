"""Expressions on arrays of NumPy, or of a library that has its functions."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..expressions import topological
from ..operations import OPERATIONS, Node
from .base import LONG, Renderer, without_brackets

_COMPARISONS = ("less", "less_equal")
# Functions that write into an array: those that NumPy has under the name of the operation.
_INTO = {"sigmoid": "sigmoid"} | {
    name: f"xp.{name}"
    for name, vector in OPERATIONS.items()
    if vector.numpy.startswith((f"xp.{name}(", "(")) and name not in (*_COMPARISONS, "where")
}


def helpers(xp: Any) -> dict[str, Any]:
    """Return what texts call by name."""

    def sigmoid(a: Any, out: Any = None) -> Any:
        # The result is 0 where exp overflows. For float32 this is several times as fast as expit.
        y = xp.negative(a, out=out)
        if y.ndim == 0:
            return 1 / (1 + xp.exp(y))
        xp.exp(y, out=y)
        y += 1
        return xp.reciprocal(y, out=y)

    def softplus(a: Any) -> Any:
        return xp.maximum(a, zero) + xp.log1p(xp.exp(-abs(a)))

    zero = 0.0
    numbers = {"zero": zero, "inf": math.inf, "nan": math.nan}
    return {"xp": xp, "sigmoid": sigmoid, "softplus": softplus, **numbers}


@functools.cache
def function_of(operation: str) -> Callable[..., Any]:
    """Return a function that computes an operation of arrays of float64."""
    text = OPERATIONS[operation].numpy.format("a", "b", "c")
    text += " * 1.0" * (operation in _COMPARISONS)
    function: Callable[..., Any] = eval(f"lambda a, b=None, c=None: {text}", helpers(np))
    return function


class ArrayRenderer(Renderer):
    """Write one function of arrays.

    Parameters
    ----------
    names : mapping of Node to str
        Names that the traced function has for some nodes.
    roots : sequence of Node
        The nodes that the function computes.
    places : mapping of Node to list of str
        The texts of places to which nodes are written, such as ``new[0]``.
    """

    target = "numpy"
    words: ClassVar[tuple[str, ...]] = ("dtype", "inf", "nan")
    # How names of leaves begin, by their operations; their details follow.
    letters: ClassVar[Mapping[str, str]] = {}
    # Leaves whose arrays nothing else reads, and arrays of results that are strided.
    free: ClassVar[Sequence[str]] = ()
    strided: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        names: Mapping[Node, str],
        roots: Sequence[Node],
        places: Mapping[Node, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(names)
        self._places = dict(places or {})
        order = topological(roots)
        self._uses = Counter(argument for vector in order for argument in vector.arguments)
        self._uses.update(root for root in roots if root not in self._places)
        others = {root for root in roots if root not in self._places}
        for vector in order:
            others.update(vector.arguments[vector.operation == "where" :])
        # Comparisons that are only conditions need not be numbers.
        self._conditions = {
            vector for vector in order if vector.operation in _COMPARISONS and vector not in others
        }
        self._written: set[Node] = set()
        self._inline: set[Node] = set()

    def default_name(self, vector: Node) -> str:
        """Return a name for a node without one in the traced function."""
        parts = [self.letters.get(vector.operation, "t"), *map(str, vector.details)]
        return "_".join(part for part in parts if part)

    def assignments(
        self,
        roots: Iterable[Node],
        known: Mapping[Node, str],
        load: Callable[[Node], str] = lambda vector: "",
    ) -> tuple[list[str], dict[Node, str]]:
        """Return assignments that compute nodes, and for each node the text that stands for it.

        The last operation of a result that has a place writes it there.
        """
        roots = list(roots)
        lines: list[str] = []
        texts = dict(known)
        for vector in topological(roots, texts, load):
            is_named = vector.arguments and (vector in self.traced_names or self._uses[vector] > 1)
            name = self.name_of(vector) if is_named else ""
            text = load(vector) or self._expression(vector, texts)
            if vector in self._places:
                place, *more = self._places[vector]
                *before, last = self._into(vector, texts, place) or [""]
                lines += before
                if last and name:
                    last = f"{name} = {last}"
                lines.append(last or f"{place}[...] = {without_brackets(text)}")
                text = name if name and last else place
                lines += [f"{other}[...] = {text}" for other in more]
                self._written.add(vector)
            elif name or len(text) > LONG:
                name = name or self.name_of(vector)
                lines.append(f"{name} = {without_brackets(text)}")
                text = name
            elif vector.arguments:
                self._inline.add(vector)
            texts[vector] = text
        for root in dict.fromkeys(roots):
            if root in self._places and root not in self._written:
                lines += [f"{place}[...] = {texts[root]}" for place in self._places[root]]
                self._written.add(root)
        return lines, texts

    def _expression(self, vector: Node, texts: Mapping[Node, str]) -> str:
        """Return the text of a node."""
        operation = vector.operation
        if operation == "number":
            return self.number(vector.details[0])
        arguments = [texts[argument] for argument in vector.arguments]
        if operation in _COMPARISONS:
            text = OPERATIONS[operation].numpy.format(*arguments)
            return text if vector in self._conditions else f"{text}.astype(dtype)"
        bare = [without_brackets(text) for text in arguments]
        if operation == "where":
            condition, *chosen = vector.arguments
            for k, choice in enumerate(chosen, 1):
                if choice.operation == "number":
                    bare[k] = f"dtype({bare[k]})"
            if condition not in self._conditions:
                bare[0] = f"{arguments[0]} != 0"
            return f"xp.where({', '.join(bare)})"
        template = OPERATIONS[operation].numpy
        if template.startswith(("(", "{")):
            return template.format(*arguments)
        (first, *others) = vector.arguments
        # The result takes the memory of a leaf that nothing else reads.
        if first.operation in self.free and self._uses[first] == 1 and not others:
            return (self._into(vector, texts, arguments[0]) or [template.format(*bare)])[-1]
        return template.format(*bare)

    def _into(self, vector: Node, texts: Mapping[Node, str], place: str) -> list[str]:
        """Return calls of which the last one writes a node to a place; none if no function does.

        Calls before it write an argument to the same place, unless the place is strided.
        """
        if vector.operation not in _INTO:
            return []
        before: list[str] = []
        texts_read = [without_brackets(texts[argument]) for argument in vector.arguments]
        for k, argument in enumerate(vector.arguments):
            is_read = any(place in text for n, text in enumerate(texts_read) if n != k)
            if argument in self._inline and not (is_read or place.startswith(tuple(self.strided))):
                before = self._into(argument, texts, place)
                if before:
                    texts_read[k] = place
                    break
        return [*before, f"{_INTO[vector.operation]}({', '.join(texts_read)}, out={place})"]
