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
    for name, each in OPERATIONS.items()
    if each.numpy.startswith((f"xp.{name}(", "(")) and name not in (*_COMPARISONS, "where")
}


def helpers(xp: Any) -> dict[str, Any]:
    """Return what texts call by name."""

    def sigmoid(a: Any, out: Any = None) -> Any:
        # It is 0 where exp overflows; for float32 several times as fast as expit.
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
    """Return the function of NumPy that an operation is, of arrays of float64."""
    text = OPERATIONS[operation].numpy.format("a", "b", "c")
    text += " * 1.0" * (operation in _COMPARISONS)
    function: Callable[..., Any] = eval(f"lambda a, b=None, c=None: {text}", helpers(np))
    return function


class ArrayRenderer(Renderer):
    """Write one function of arrays.

    Parameters
    ----------
    names : mapping of Node to str
        Names that some nodes have in what they were traced from.
    roots : sequence of Node
        All that the function computes.
    places : mapping of Node to list of str
        Where results are written, such as ``new[0]``.
    """

    target = "numpy"
    words: ClassVar[tuple[str, ...]] = ("dtype", "inf", "nan")
    # Names of leaves without one, beside their numbers.
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
        self._uses = Counter(argument for each in order for argument in each.arguments)
        self._uses.update(root for root in roots if root not in self._places)
        others = {root for root in roots if root not in self._places}
        for each in order:
            others.update(each.arguments[each.operation == "where" :])
        # Comparisons that are only conditions need not be numbers.
        self._conditions = {
            each for each in order if each.operation in _COMPARISONS and each not in others
        }
        self._written: set[Node] = set()
        self._inline: set[Node] = set()

    def default_name(self, each: Node) -> str:
        """Return a name for a node that has none in what was traced."""
        parts = [self.letters.get(each.operation, "t"), *map(str, each.about)]
        return "_".join(part for part in parts if part)

    def assignments(
        self,
        roots: Iterable[Node],
        known: Mapping[Node, str],
        load: Callable[[Node], str] = lambda each: "",
    ) -> tuple[list[str], dict[Node, str]]:
        """Return assignments that compute some nodes, and the text that stands for each.

        Results with a place are written there by their last operation.
        """
        roots = list(roots)
        lines: list[str] = []
        texts = dict(known)
        for each in topological(roots, texts, load):
            is_named = each.arguments and (each in self.traced_names or self._uses[each] > 1)
            name = self.name_of(each) if is_named else ""
            text = load(each) or self._expression(each, texts)
            if each in self._places:
                place, *more = self._places[each]
                *before, last = self._into(each, texts, place) or [""]
                lines += before
                if last and name:
                    last = f"{name} = {last}"
                lines.append(last or f"{place}[...] = {without_brackets(text)}")
                text = name if name and last else place
                lines += [f"{other}[...] = {text}" for other in more]
                self._written.add(each)
            elif name or len(text) > LONG:
                name = name or self.name_of(each)
                lines.append(f"{name} = {without_brackets(text)}")
                text = name
            elif each.arguments:
                self._inline.add(each)
            texts[each] = text
        for root in dict.fromkeys(roots):
            if root in self._places and root not in self._written:
                lines += [f"{place}[...] = {texts[root]}" for place in self._places[root]]
                self._written.add(root)
        return lines, texts

    def _expression(self, each: Node, texts: Mapping[Node, str]) -> str:
        """Return the text of a node."""
        operation = each.operation
        if operation == "number":
            return self.number(each.about[0])
        given = [texts[argument] for argument in each.arguments]
        if operation in _COMPARISONS:
            text = OPERATIONS[operation].numpy.format(*given)
            return text if each in self._conditions else f"{text}.astype(dtype)"
        bare = [without_brackets(one) for one in given]
        if operation == "where":
            condition, *chosen = each.arguments
            for k, one in enumerate(chosen, 1):
                if one.operation == "number":
                    bare[k] = f"dtype({bare[k]})"
            if condition not in self._conditions:
                bare[0] = f"{given[0]} != 0"
            return f"xp.where({', '.join(bare)})"
        template = OPERATIONS[operation].numpy
        if template.startswith(("(", "{")):
            return template.format(*given)
        (first, *others) = each.arguments
        # A leaf that nothing else reads makes room for what is computed of it.
        if first.operation in self.free and self._uses[first] == 1 and not others:
            return (self._into(each, texts, given[0]) or [template.format(*bare)])[-1]
        return template.format(*bare)

    def _into(self, each: Node, texts: Mapping[Node, str], place: str) -> list[str]:
        """Return calls, the last of which writes a node to a place; none if no function does.

        What it is computed from is written there before, unless results are strided.
        """
        if each.operation not in _INTO:
            return []
        before: list[str] = []
        given = [without_brackets(texts[argument]) for argument in each.arguments]
        for k, argument in enumerate(each.arguments):
            is_read = any(place in text for n, text in enumerate(given) if n != k)
            if argument in self._inline and not (is_read or place.startswith(tuple(self.strided))):
                before = self._into(argument, texts, place)
                if before:
                    given[k] = place
                    break
        return [*before, f"{_INTO[each.operation]}({', '.join(given)}, out={place})"]
