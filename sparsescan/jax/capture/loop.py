"""A loop whose carries of floats a cell computes: what runs before it, the cell, and what after."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...graph.expressions import evaluate, topological, with_arguments
from ...graph.operations import Node, linear_map, symbol
from ...recurrent import Cell, Given, Hidden, Input, Scalar, Vector
from ...recurrent.arguments import Options
from ...recurrent.step import OneCell
from ..ffi.calls import together
from ..ffi.primitives import TracedNetwork, run
from .elementwise import ELEMENTWISE
from .equations import NotCaptured, Value, before, compute, depends, opened, read_equations
from .vectors import UNITS, Labels, Part, Reader, Source

# Operations that give the same for all steps at once, beside elementwise ones.
_MAPPED = {
    *ELEMENTWISE,
    *("broadcast_in_dim", "concatenate", "custom_jvp_call", "custom_vjp_call", "dot_general"),
    *("erf", "exp2", "expand_dims", "iota", "is_finite", "log1p", "log_softmax", "pow"),
    *("reduce_max", "reduce_min", "reduce_sum", "reshape", "round", "floor", "ceil", "slice"),
    *("split", "squeeze", "transpose", "argmax", "argmin", "erf_inv", "gather", "pad", "cumsum"),
}


class Body:
    """The body of a ``lax.scan``: its equations, and which carries run when.

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

    def __init__(self, equation: Any) -> None:
        options = equation.params
        jaxpr, constants = opened(options["jaxpr"])
        if jaxpr.effects:
            raise NotCaptured("effects, such as prints and callbacks")
        consts, count = options["num_consts"], options["num_carry"]
        outputs = jaxpr.outvars[:count]
        values = []
        for k, each in enumerate(jaxpr.invars):
            carry = k - consts
            is_carry = 0 <= carry < count and outputs[carry] is not each
            carries = frozenset([carry] if is_carry else [])
            values.append(Value(each.aval, carries=carries, is_step=carry >= count))
        _, results = read_equations(jaxpr, constants, values)
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
        return _without(self.states[0].shape, self.axis)

    @property
    def units(self) -> int:
        """How many units there are."""
        shape = self.states[0].shape
        return shape[self.axis] if shape else 1

    @property
    def network(self) -> TracedNetwork:
        """A network of one cell."""
        inputs = 1 if self.input is None else self.input.value.shape[self.input.order[-1] or 0]
        return network_of(self.cell, inputs, self.units, self.states[0].dtype.name)


def plan(body: Body) -> Plan:
    """Return how kernels run a body; raise if they do not."""
    rank = len(body.carries[body.core[0]].shape)
    if 0 in body.carries[body.core[0]].shape:
        raise NotCaptured("empty carries")
    first: NotCaptured | None = None
    for axis in range(max(rank, 1))[::-1]:
        try:
            return _plan(body, axis if rank else 0)
        except NotCaptured as error:
            first = first or error
    assert first is not None
    raise first


def _plan(body: Body, axis: int, only: Part | None = None) -> Plan:
    states = [body.carries[k] for k in body.core]
    shape = states[0].shape
    labels: Labels = tuple(UNITS if k == axis else k - (k > axis) for k in range(len(shape)))
    samples, units = _without(shape, axis), shape[axis] if shape else 1
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
        return _plan(body, axis, max(blocks, key=lambda part: blocks[part]))
    read = {each for each in topological(outputs) if each.operation == "given"}
    given = sorted(read, key=lambda each: ([*sources].index(each.details[0]), each.details[1]))
    places = {each: symbol("further", k) for k, each in enumerate(given)}
    outputs = _with(outputs, places)
    own = {name: each for name, each in sources.items() if each.kind != "given"}
    kinds = {each.kind for each in own.values()}
    fewest = min(count for kind, count in _FEWEST.items() if kind in kinds | {""})
    if units * math.prod(samples) < fewest:
        raise NotCaptured(
            f"{states[0].aval.str_short()} has so few numbers that a loop of JAX is as fast"
        )
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


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


# From how many numbers of a carry on kernels are faster than loops that XLA compiles, with products
# of states, of inputs, or none.
_FEWEST = {"hidden": 4, "input": 16, "": 256}
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
def network_of(cell: type[Cell], inputs: int, units: int, dtype: str) -> TracedNetwork:
    """Return a network of one cell of a class."""
    return TracedNetwork(OneCell(cell(inputs, units, bias=False, dtype=dtype, rng=0)))


# -- Runs -----------------------------------------------------------------------------------------


def execute(own: Plan, arrays: Sequence[Any], length: int, is_reverse: bool) -> list[Any]:
    """Return the last carries and all outputs of a loop, from its arguments."""
    body = own.body
    if is_reverse:
        count = len(arrays) - len(body.xs)
        arrays = [*arrays[:count], *(jnp.flip(each, 0) for each in arrays[count:])]
    runner = _Runner(own, arrays, length)
    last, ys = runner.run()
    return [*last, *(jnp.flip(each, 0) for each in ys)] if is_reverse else [*last, *ys]


class _Runner:
    """Runs a loop with some arguments."""

    def __init__(self, own: Plan, arrays: Sequence[Any], length: int) -> None:
        self.own, self.body, self.length = own, own.body, length
        body = own.body
        self.fixed = {each: arrays[k] for each, k in body.fixed.items()}
        consts = len(arrays) - len(body.xs) - len(body.carries)
        self.begin = list(arrays[consts : consts + len(body.carries)])
        self.xs = list(arrays[consts + len(body.carries) :])
        self.samples, self.units, self.dtype = own.samples, own.units, own.states[0].dtype

    def run(self) -> tuple[list[Any], list[Any]]:
        """Return the last carries, and all outputs."""
        body = self.body
        parts = [*([] if self.own.input is None else [self.own.input]), *self.own.further]
        values = [each.value for each in parts]
        last, mapped = self._steps(body.first, values, {})
        before_first = mapped[: len(body.first)]
        final = list(self.begin)
        for k, each in zip(body.first, last, strict=True):
            final[k] = each
        rows = dict(zip(parts, mapped[len(body.first) :], strict=True))
        states, ends = self._cell(rows)
        for k, end in zip(body.core, ends, strict=True):
            final[k] = end
        known = {body.carries[k]: each for k, each in zip(body.first, before_first, strict=True)}
        for k, each in zip(body.core, states, strict=False):
            begin = jnp.asarray(self.begin[k], each.dtype)
            known[body.carries[k]] = jnp.concatenate([begin[None], each[:-1]])
            known.setdefault(body.new[k], each)
        last, ys = self._steps(body.last, body.ys, known)
        for k, each in zip(body.last, last, strict=True):
            final[k] = each
        return final, ys[len(body.last) :]

    def _steps(
        self, carries: Sequence[int], values: Sequence[Value], known: Mapping[Value, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return last carries, those before all steps, and values of all steps.

        `known` are values of all steps.
        """
        body = self.body
        new = [body.new[k] for k in carries]
        own = {body.carries[k] for k in carries}
        leaves = {*self.fixed, *body.xs, *known, *own}
        equations = before([*new, *values], leaves.__contains__)
        rows = dict(zip(body.xs, self.xs, strict=True)) | dict(known)
        read = {each for equation in equations for each in equation.inputs} | {*new, *values}
        rows = {each: array for each, array in rows.items() if each in read}

        def one(state: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            arrays = self.fixed | dict(zip(rows, row, strict=True))
            arrays |= {body.carries[k]: each for k, each in zip(carries, state, strict=True)}
            found = compute([*new, *values], arrays)
            return found[: len(new)], [*state, *found[len(new) :]]

        begin = [self.begin[k] for k in carries]
        if carries or not all(each.name in _MAPPED for each in equations):
            last, found = jax.lax.scan(one, begin, list(rows.values()), self.length)
            return last, found
        if rows:
            return [], jax.vmap(lambda *row: one([], row)[1])(*rows.values())
        whole = [jnp.asarray(each) for each in one([], [])[1]]
        return [], [jnp.broadcast_to(each, (self.length, *each.shape)) for each in whole]

    def _cell(self, rows: Mapping[Part, Any]) -> tuple[list[Any], list[Any]]:
        """Return the states after all steps, or the first of them, and the last ones.

        `rows` are the inputs of all steps.
        """
        own, batch = self.own, math.prod(self.samples)
        if own.input is None:
            x = [jnp.zeros((self.length, batch, 1), self.dtype)]
        else:
            x = [self._part(rows[own.input], own.input)[..., 0, :]]
        x += [
            self._part(rows[part], part)[..., k, :]
            for part, blocks in own.further.items()
            for k in blocks
        ]
        arrays = compute([each.value for each in own.sources.values()], self.fixed)
        made = {
            name: self._parameter(source, array)
            for (name, source), array in zip(own.sources.items(), arrays, strict=True)
        }
        network, nothing = own.network, jnp.zeros((), self.dtype)
        begin = [
            arranged(jnp.asarray(self.begin[k], self.dtype), self._order, 0) for k in self.body.core
        ]
        state = jnp.concatenate([each.reshape(batch, self.units) for each in begin], -1)
        params = [made.get(name, nothing) for name in network.network.params]
        options = Options(return_states=len(self.body.read) > 1)
        params, whole, state = together((params, jnp.concatenate(x, -1), state[None]))
        output, last = run(network, options, params, whole, state, lengths=None, resets=None)
        states, ends = (
            [self._back(each) for each in jnp.split(array, array.shape[-1] // self.units, -1)]
            for array in (output, last)
        )
        return states, [each[0] for each in ends]

    @property
    def _order(self) -> tuple[int, ...]:
        """The axes of carries, that of units last."""
        rank, axis = len(self.body.carries[self.body.core[0]].shape), self.own.axis
        return (*_without(range(rank), axis), axis) if rank else ()

    def _back(self, array: Any) -> Any:
        """Return carries, as the caller has them, of some steps."""
        if not self._order:
            return array.reshape(len(array))
        whole = array.reshape(len(array), *self.samples, self.units)
        return jnp.moveaxis(whole, -1, 1 + self.own.axis)

    def _part(self, array: Any, part: Part) -> Any:
        """Return what the cell reads in all steps, as blocks of numbers of each sample."""
        batch, units, is_input = math.prod(self.samples), self.units, part == self.own.input
        rows = arranged(array.astype(self.dtype), part.order, 1)
        gates, size = rows.shape[-2:]
        rows = jnp.broadcast_to(rows, (self.length, *self.samples, gates, size))
        if is_input:
            return rows.reshape(self.length, batch, 1, size)
        if part.order[-1] is None:
            rows = jnp.broadcast_to(rows, (*rows.shape[:-1], units))
        return rows.reshape(self.length, batch, -1, units)

    def _parameter(self, source: Source, array: Any) -> Any:
        """Return a parameter of the cell."""
        units, array = self.units, arranged(array.astype(self.dtype), source.order, 0)
        if source.kind == "scalar":
            return array.reshape(())
        if source.kind == "vector":
            rows = array.reshape(source.blocks, -1)
            return jnp.broadcast_to(rows, (source.blocks, units)).reshape(-1)
        if source.kind == "input":
            return array
        blocks = array.reshape(-1, units, array.shape[1] // units, units)
        return blocks.transpose(0, 2, 1, 3).reshape(-1, units)


def arranged(array: Any, order: Sequence[int | None], lead: int) -> Any:
    """Return an array with its axes in an order, behind the leading ones.

    None in the order is an axis of length 1 that is put in; axes that are not in it have length 1.
    """
    own = [lead + k for k in order if k is not None]
    rest = [k for k in range(lead, array.ndim) if k not in own]
    sizes = [1 if k is None else array.shape[lead + k] for k in order]
    moved = array.transpose(*range(lead), *own, *rest)
    return moved.reshape(*array.shape[:lead], *sizes)
