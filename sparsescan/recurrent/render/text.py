"""A step in words: what it computes, in which stages, and what its backward pass needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from ...graph.expressions import topological
from ...graph.operations import Node, symbol
from ...graph.render.base import without_brackets
from .numpy import ArrayCode, Writer

# What the text for arrays has beside the mathematics.
_ARRAYS = re.compile(r"\bxp\.|\.astype\(dtype\)|, out=\w+| != 0(?=,)|\bdtype\(([^()]*)\)")


def describe(code: ArrayCode) -> list[str]:
    """Return lines that say what a step computes, what is kept of it, and what is made again."""
    program = code.program
    again = _made_again(code)
    writer = Writer(code.names, [*program.arguments, *program.outputs, *program.kept, *again])
    states = [symbol("state", k) for k in range(program.states)]
    texts: dict[Node, str] = {}
    lines = []

    def compute(roots: Sequence[Node], indent: str = "    ") -> list[str]:
        """Write what computes some vectors, and return their texts."""
        nonlocal texts
        derived = [each for each in topological(roots) if each.operation == "derived"]
        for each in derived:
            value = program.derived[each.details[0]].value
            if each not in texts:
                texts[each] = writer.name_of(each)
                (text,) = compute([value])
                lines.append(f"{indent}{texts[each]} = {text}")
        leaves = [each for each in topological(roots) if not each.arguments]
        named = {e: writer.name_of(e) for e in leaves if e.operation not in ("number", "derived")}
        more, texts = writer.assignments(roots, named | texts)
        lines.extend(indent + line for line in more)
        return [without_brackets(texts[each]) for each in roots]

    for stage in range(program.stages):
        if program.stages > 1:
            lines.append(f"  stage {stage + 1} of {program.stages}:")
        for k, slot in enumerate(program.slots):
            if slot.stage == stage:
                leaf = symbol("slot", k)
                texts[leaf] = writer.name_of(leaf)
                about = code.describe(slot, partial(writer.text_of, texts))
                lines.append(f"    {texts[leaf]} = {about}")
        compute([each for each in program.arguments if program.stage_of(each) == stage])
    new = compute(program.outputs)
    names = [writer.name_of(each) for each in states]
    lines += [f"    new {name} = {text}" for name, text in zip(names, new, strict=True)]
    kept = ", ".join(compute(program.kept)) or "nothing"
    lines.append(f"  kept for the backward pass, beside states and inputs: {kept}")
    lines.append(f"  computed again by it: {', '.join(compute(again)) or 'nothing'}")
    return [_ARRAYS.sub(lambda match: match[1] or "", line) for line in lines]


def _made_again(code: ArrayCode) -> list[Node]:
    """Return what the backward pass computes a second time."""
    program = code.program
    forward = set(topological([*program.outputs, *program.arguments]))
    stack = [*program.grads, *(each for each in program.arguments if each in program.weighed)]
    seen, found = {*program.kept, *program.outputs}, dict[Node, None]()
    while stack:
        each = stack.pop()
        if each not in seen:
            seen.add(each)
            stack += each.arguments
            if each in forward and each.arguments:
                found[each] = None
    return list(found)
