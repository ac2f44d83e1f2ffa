"""A loop whose carries of floats a cell computes: what runs before it, the cell, and what after."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..graph.expressions import evaluate, topological, with_arguments
from ..graph.operations import Node, linear_map, symbol
from ..recurrent import Cell, Given, Hidden, Input, Scalar, Vector
from .equations import NotCaptured, Value, before, depends
from .vectors import UNITS, Labels, Part, Reader, Source, without


class Explanation(NamedTuple):
    """How a loop runs.

    Attributes
    ----------
    is_captured : bool
        Whether kernels run its carries.
    text : str
        What they compute; or which equation is in the way, and its line.
    """

    is_captured: bool
    text: str

    def __str__(self) -> str:
        return self.text


class Body:
    """The body of a loop: its equations, and which carries run when.

    Parameters
    ----------
    values, results : list of Value
        Its arguments, which are constants, carries, and what is different in each step; and its
        results.
    consts, count : int
        How many constants and how many carries there are.

    Attributes
    ----------
    fixed : dict of Value to int
        Arguments that are the same in all steps, by their numbers among those of the loop:
        constants, and carries that do not change.
    carries, new : list of Value
        The carries before and after a step.
    xs, ys : list of Value
        What is different in each step, and its results.
    core, first, last : list of int
        The carries that a cell computes, those that run before it, and those that run after it.
    read : set of int
        The carries of the core that others read in all steps. If there is one, it is the first.
    """

    def __init__(
        self, values: Sequence[Value], results: Sequence[Value], consts: int, count: int
    ) -> None:
        self.carries, self.xs = values[consts : consts + count], values[consts + count :]
        self.new, self.ys = results[:count], results[count:]
        self.fixed = {each: k for k, each in enumerate(values[: consts + count]) if each.is_fixed}
        moving = [k for k, each in enumerate(self.carries) if not each.is_fixed]
        self.core, self.first, self.last = self._parts(moving)
        self.read = self._read()
        self.core.sort(key=lambda k: k not in self.read)

    def _parts(self, moving: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return which carries a cell computes, which run before it, and which after it."""
        sizes: dict[Any, int] = {}
        for k in moving:
            aval = self.carries[k].aval
            if aval.dtype in ("float32", "float64"):
                kind = aval.shape, aval.dtype
                sizes[kind] = sizes.get(kind, 0) + max(1, math.prod(aval.shape))
        if not sizes:
            raise NotCaptured("no carries of float32 or float64")
        best = max(sizes, key=lambda kind: sizes[kind])
        core = [
            k for k in moving if (self.carries[k].aval.shape, self.carries[k].aval.dtype) == best
        ]
        reads = list(depends(self.new))
        read = frozenset[int]().union(*(reads[k] for k in core))
        first = [k for k in moving if k in read and k not in core]
        for k in first:
            if reads[k].intersection(core):
                aval, own = self.carries[k].aval, self.carries[core[0]].aval
                raise NotCaptured(
                    f"a carry of {aval.str_short()}, which depends on carries of "
                    f"{own.str_short()} and they on it"
                )
        return core, first, [k for k in moving if k not in core and k not in first]

    def _read(self) -> set[int]:
        """Return which carries of the core are read by what runs behind it."""
        pairs = [(each, k) for k in self.core for each in (self.carries[k], self.new[k])]
        places = dict(pairs)
        leaves = {*self.fixed, *self.xs, *self.carries, *places}
        roots = [*(self.new[k] for k in self.last), *self.ys]
        equations = before(roots, leaves.__contains__)
        read = {each for equation in equations for each in equation.inputs}.union(roots)
        return {k for each, k in pairs if each in read}


class Plan(NamedTuple):
    """How kernels run a body.

    Attributes
    ----------
    body : Body
        The body.
    cell : type
        The class of the cell.
    sources : dict of str to Source
        What its parameters are made of.
    input : Part or None
        What matrices multiply in each step.
    further : dict of Part to list of int
        What elementwise operations read, and which blocks of units of it.
    axis : int
        The axis of units of its carries.
    """

    body: Body
    cell: type[Cell]
    sources: dict[str, Source]
    input: Part | None
    further: dict[Part, list[int]]
    axis: int

    @property
    def states(self) -> list[Any]:
        """The shapes and dtypes of the carries that kernels run."""
        return [self.body.carries[k].aval for k in self.body.core]

    @property
    def samples(self) -> tuple[int, ...]:
        """The axes of samples of carries."""
        return without(self.states[0].shape, [self.axis])

    @property
    def units(self) -> int:
        """How many units there are."""
        shape = self.states[0].shape
        return shape[self.axis] if shape else 1

    @property
    def one(self) -> Cell:
        """A cell of its class."""
        inputs = 1 if self.input is None else self.input.value.shape[self.input.order[-1] or 0]
        return _cell_of(self.cell, inputs, self.units, self.states[0].dtype.name)


def plan(body: Body, fewest: Mapping[str, int] | None = None) -> Plan:
    """Return how kernels run a body; raise if they do not.

    `fewest` says from how many numbers of a carry on kernels are faster than the framework's loop,
    with products of states (``hidden``), of inputs (``input``), or without.
    """
    rank = len(body.carries[body.core[0]].shape)
    if 0 in body.carries[body.core[0]].shape:
        raise NotCaptured("empty carries")
    first: NotCaptured | None = None
    for axis in range(max(rank, 1))[::-1]:
        try:
            return _plan(body, axis if rank else 0, fewest or {})
        except NotCaptured as error:
            first = first or error
    assert first is not None
    raise first


def _plan(body: Body, axis: int, fewest: Mapping[str, int], only: Part | None = None) -> Plan:
    states = [body.carries[k] for k in body.core]
    shape = states[0].shape
    labels: Labels = tuple(UNITS if k == axis else k - (k > axis) for k in range(len(shape)))
    samples, units = without(shape, [axis]), shape[axis] if shape else 1
    reader = Reader(samples, units, states[0].aval.dtype, frozenset(body.core), only)
    for which, each in enumerate(states):
        reader.set_state(each, which, labels)
    new = [body.new[k] for k in body.core]
    for equation in before(new, lambda each: not reader.waits(each)):
        reader.read(equation)
    outputs = [reader.state(each, labels) for each in new]
    sources = reader.used(outputs)
    blocks: dict[Part, int] = {}
    for source in sources.values():
        if source.kind == "input" and source.part is not None:
            blocks[source.part] = blocks.get(source.part, 0) + source.blocks
    if len(blocks) > 1:  # of others, products are made before the loop
        return _plan(body, axis, fewest, max(blocks, key=lambda part: blocks[part]))
    read = {each for each in topological(outputs) if each.operation == "given"}
    given = sorted(read, key=lambda each: ([*sources].index(each.details[0]), each.details[1]))
    places = {each: symbol("further", k) for k, each in enumerate(given)}
    outputs = _with(outputs, places)
    own = {name: each for name, each in sources.items() if each.kind != "given"}
    kinds = {each.kind for each in own.values()} | {""}
    least = min((count for kind, count in fewest.items() if kind in kinds), default=0)
    if units * math.prod(samples) < least:
        raise NotCaptured(f"{states[0].aval.str_short()} has so few numbers that a loop is as fast")
    spec = tuple((name, each.kind, each.blocks) for name, each in own.items())
    cell = cell_class(tuple(outputs), spec or ((_NOTHING, "scalar", 1),), len(given))
    further: dict[Part, list[int]] = {}
    for name, block in (each.details for each in given):
        part = sources[name].part
        assert part is not None
        further.setdefault(part, []).append(block)
    return Plan(body, cell, own, next(iter(blocks), None), further, axis)


def _with(outputs: Sequence[Node], new: Mapping[Node, Node]) -> list[Node]:
    """Return expressions in which some leaves are other nodes."""

    def rule(each: Node, arguments: list[Node]) -> Node:
        if each.operation == "product":
            return linear_map(each.details[:2], arguments[0], each.details[2])
        return with_arguments(each, arguments)

    made = evaluate(outputs, rule, new)
    return [made[each] for each in outputs]


# A parameter of cells that have no others.
_NOTHING = "nothing"
_KINDS = {"scalar": Scalar, "vector": Vector, "hidden": Hidden, "input": Input}


@functools.lru_cache(maxsize=256)
def cell_class(
    outputs: tuple[Node, ...], spec: tuple[tuple[str, str, int], ...], further: int
) -> type[Cell]:
    """Return the class of cells whose new states are these, with so many further inputs."""
    attributes: dict[str, Any] = {"states": len(outputs), "_trains_all": False}
    for name, kind, count in spec:
        gates = [f"gate_{k}" for k in range(count)] if count > 1 else []
        about: dict[str, Any] = {"bias": False} if kind in ("hidden", "input") else {}
        made = Scalar(0.0) if kind == "scalar" else _KINDS[kind](*gates, **about)
        attributes[name] = made
    attributes |= {f"given_{k}": Given() for k in range(further)}

    def step(self: Any, x: Any, *h: Any) -> Any:
        return outputs

    return type("Body", (Cell,), {**attributes, "step": step})


@functools.lru_cache(maxsize=256)
def _cell_of(cell: type[Cell], inputs: int, units: int, dtype: str) -> Cell:
    """Return a cell of a class."""
    return cell(inputs, units, bias=False, dtype=dtype, rng=0)
