"""Equations of a body as operations of vectors of units: the graph of a cell.

An array of a step has axes of samples, an axis of units, of which there may be several blocks one
after the other, and an axis of gates, which are blocks, too. Along other axes it is constant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..graph.expressions import topological
from ..graph.operations import Node, apply, linear_map, number, symbol
from ..recurrent.program import INPUT
from .elementwise import ELEMENTWISE, is_truth
from .equations import Equation, NotCaptured, Value, before

# Labels of axes beside those of samples, which are 0, 1, …
UNITS, GATES = -1, -2
Labels = tuple["int | None", ...]
Order = tuple["int | None", ...]
Shape = tuple[int, ...]


class Vector(NamedTuple):
    """An array of a step.

    Attributes
    ----------
    labels : tuple of int or None
        What each axis is; None where the array is constant along it.
    blocks : ndarray of int, shape (gates, blocks)
        Which node of the reader each block of units is.
    """

    labels: Labels
    blocks: NDArray[np.int64]


class Source(NamedTuple):
    """What a parameter of the cell is made of, or further inputs are.

    Attributes
    ----------
    kind : str
        "scalar", "vector", "hidden" or "input", a matrix; or "given" for further inputs.
    blocks : int
        How many blocks it has.
    value : Value
        The array; for "given" that of the part.
    order : tuple of int or None
        Its axes in the order in which they are read; None for one of length 1 that is put in.
    part : Part or None
        What an "input" multiplies, or what is "given".
    """

    kind: str
    blocks: int
    value: Value
    order: Order
    part: Part | None = None


class Part(NamedTuple):
    """What the cell reads in each step.

    Attributes
    ----------
    value : Value
        The array.
    order : tuple of int or None
        Its axes of samples, of gates and of numbers.
    """

    value: Value
    order: Order


class Reader:
    """Reads equations as operations of vectors.

    Parameters
    ----------
    samples : tuple of int
        The axes of samples.
    units : int
        How many units there are.
    dtype : dtype
        Of all numbers.
    core : set of int
        The carries that are states; what depends on no other carries is known before the loop.
    only : Part, optional
        What alone matrices may multiply beside vectors of units.

    Attributes
    ----------
    sources : dict of str to Source
        What the parameters of the cell are made of, by their names.
    """

    def __init__(
        self,
        samples: tuple[int, ...],
        units: int,
        dtype: Any,
        core: frozenset[int],
        only: Part | None = None,
    ) -> None:
        self.samples, self.units, self.dtype = samples, units, np.dtype(dtype)
        self._core, self._only = core, only
        self.sources: dict[str, Source] = {}
        self._vectors: dict[Value, Vector] = {}
        self._refused: dict[Value, NotCaptured] = {}
        self._nodes: list[Node] = []
        self._places: dict[Node, int] = {}
        self._parts: dict[Value, frozenset[str]] = {}

    def waits(self, value: Value) -> bool:
        """Return whether a value depends on states."""
        return bool(value.carries & self._core)

    def set_state(self, value: Value, which: int, labels: Labels) -> None:
        """Say that a value is a state before the step."""
        self._vectors[value] = Vector(labels, self._blocks([symbol("state", which)]))

    def state(self, value: Value, labels: Labels) -> Node:
        """Return the node of a new state."""
        found = self._vector(value, labels)
        if any(own not in (label, None) for own, label in zip(found.labels, labels, strict=True)):
            raise NotCaptured("a carry whose axes change places")
        node: Node = self._nodes[found.blocks[0, 0]]
        return node

    def read(self, equation: Equation) -> None:
        """Read an equation that depends on states."""
        try:
            outputs = self._apply(equation, None)
        except NotCaptured as error:
            # A product may read a concatenation piece by piece, and a slice a part of a reshape.
            if equation.name not in ("concatenate", "reshape"):
                raise
            self._refused[equation.outputs[0]] = error
            return
        self._vectors.update(zip(equation.outputs, outputs, strict=True))

    def used(self, outputs: Sequence[Node]) -> dict[str, Source]:
        """Return the sources of new states."""
        order = topological(outputs)
        names = {each.details[0] for each in order if each.details}
        return {name: each for name, each in self.sources.items() if name in names}

    # -- Nodes -------------------------------------------------------------------------------------

    def _blocks(self, nodes: Iterable[Node], gates: int = 1) -> NDArray[np.int64]:
        """Return the numbers of nodes."""
        found = []
        for each in nodes:
            if each not in self._places:
                self._places[each] = len(self._nodes)
                self._nodes.append(each)
            found.append(self._places[each])
        return np.array(found, np.int64).reshape(gates, -1)

    def _name(self, source: Source) -> str:
        """Return the name of a parameter."""
        for name, known in self.sources.items():
            if known == source:
                return name
        name = f"{source.kind}_{len(self.sources)}"
        self.sources[name] = source
        return name

    # -- Values ------------------------------------------------------------------------------------

    def _vector(self, value: Value, labels: Labels) -> Vector:
        """Return a value as a vector; `labels` are for the axes of one that depends on no state."""
        if value in self._vectors:
            return self._vectors[value]
        if value in self._refused:
            raise self._refused[value]
        if self.waits(value):
            assert value.equation is not None
            outputs = self._apply(value.equation, None)
            self._vectors.update(zip(value.equation.outputs, outputs, strict=True))
            return self._vectors[value]
        return self._outside(value, labels)

    def _apply(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return the results of an equation.

        `labels` are for the axes of its results if it does not depend on states.
        """
        if equation.name in ELEMENTWISE:
            compute = ELEMENTWISE[equation.name]
            return [self._elementwise(equation, labels, lambda *own: compute(equation, *own))]
        custom = equation.custom()
        if custom is not None:
            return [self._elementwise(equation, labels, custom)]
        opened = equation.opened()
        if opened is not None:
            return [self._derived(each, labels) for each in opened]
        rule = _RULES.get(equation.name)
        if rule is None:
            equation.refuse("no operation of cells")
        return rule(self, equation, labels)

    def _elementwise(
        self, equation: Equation, labels: Labels | None, compute: Callable[..., Node]
    ) -> Vector:
        """Return an elementwise operation."""
        for each in equation.inputs:
            if each.aval.dtype != self.dtype and each.number is None and not is_truth(each):
                equation.refuse(f"{each.aval.dtype} among {self.dtype}")
        shape = equation.outputs[0].shape
        rank = len(shape)
        if labels is None:
            known = [each for each in equation.inputs if each in self._vectors]
            spread = [_spread(self._vectors[each], each.shape, shape) for each in known]
            labels = self._likely(_joined(spread, rank, equation), shape)
        given = []
        for each in equation.inputs:
            own = _spread(Vector(labels, self._blocks([])), shape, each.shape).labels
            given.append(_spread(self._vector(each, own), each.shape, shape))
        try:
            blocks = np.broadcast_arrays(*(each.blocks for each in given))
        except ValueError:
            equation.refuse("vectors of different lengths")
        pairs = zip(*(each.reshape(-1).tolist() for each in blocks), strict=True)
        made = [compute(*(self._nodes[k] for k in places)) for places in pairs]
        return Vector(_joined(given, rank, equation), self._blocks(made, blocks[0].shape[0]))

    def _likely(self, labels: Labels, shape: tuple[int, ...]) -> Labels:
        """Return labels in which axes along which states are constant have likely ones."""
        own = list(labels)
        for axis, size in reversed(list(enumerate(shape))):
            if own[axis] is None and size > 1:
                free = [k for k, n in enumerate(self.samples) if k not in own and n == size]
                if UNITS not in own and size % self.units == 0:
                    own[axis] = UNITS
                elif free:
                    own[axis] = free[-1]
                elif GATES not in own:
                    own[axis] = GATES
        return tuple(own)

    # -- Values that depend on no state ------------------------------------------------------------

    def _outside(self, value: Value, labels: Labels) -> Vector:
        """Return a value that depends on no state; `labels` say what its axes would be."""
        known = value.number
        if known is not None:
            return Vector((None,) * len(value.shape), self._blocks([number(known)]))
        labels = tuple(
            None if size == 1 and label != UNITS else label
            for size, label in zip(value.shape, labels, strict=True)
        )
        equation = value.equation
        if equation is not None and (
            equation.name in _SHAPES or self._is_product(value) or self._is_spread(value, labels)
        ):
            before = dict(self.sources)
            try:
                return self._apply(equation, labels)[equation.outputs.index(value)]
            except NotCaptured:
                self.sources = before
        return self._leaf(value, labels)

    def _is_product(self, value: Value) -> bool:
        """Return whether a value is computed from products of inputs, by what cells compute.

        A value that sums such products over units is not one: it is computed before the loop.
        """
        return self._made_of(value) == {"product"}

    def _made_of(self, value: Value) -> frozenset[str]:
        """Return which of products of inputs and sums of these a value is computed from."""
        known = self._parts.get(value)
        if known is None:
            equation, found = value.equation, frozenset[str]()
            if equation is not None and not value.is_fixed and not self.waits(value):
                opened = equation.opened()
                read = equation.inputs if opened is None else opened
                if equation.name == "dot_general":
                    found = frozenset(["product"] if any(each.is_fixed for each in read) else [])
                elif opened is not None or equation.name in ELEMENTWISE or equation.name in _RULES:
                    found = found.union(*map(self._made_of, read))
                if found and equation.name.startswith("reduce_"):
                    found |= {"sum"}
            known = self._parts[value] = found
        return known

    @staticmethod
    def _is_spread(value: Value, labels: Labels) -> bool:
        """Return whether parameters were spread over samples, before some operation."""
        assert value.equation is not None
        is_elementwise = value.is_fixed and value.equation.name in ELEMENTWISE
        return is_elementwise and any(label is not None and label >= 0 for label in labels)

    def _leaf(self, value: Value, labels: Labels) -> Vector:
        """Return an array as a parameter, or as a part of the input."""
        if value.aval.dtype not in (self.dtype, np.dtype(bool)):
            _refuse(value, f"{value.aval.dtype} among {self.dtype}")
        if any(n > 1 and label is None for n, label in zip(value.shape, labels, strict=True)):
            _refuse(value, "an axis that is none of samples or units")
        places = {label: axis for axis, label in enumerate(labels) if label is not None}
        samples = tuple(places.get(k) for k in range(len(self.samples)))
        order = places.get(GATES), places.get(UNITS)
        gates, size = (1 if axis is None else value.shape[axis] for axis in order)
        if order[1] is not None and size % self.units:
            _refuse(value, f"{size} numbers for {self.units} units")
        count = gates * (1 if order[1] is None else size // self.units)
        if not value.is_fixed or any(axis is not None for axis in samples):
            part = Part(value, (*samples, *order))
            name = self._name(Source("given", count, value, order, part))
            nodes = [symbol("given", name, k) for k in range(count)]
        elif order == (None, None):
            nodes = [symbol("scalar", self._name(Source("scalar", 1, value, ())), 0)]
        else:
            name = self._name(Source("vector", count, value, order))
            nodes = [symbol("vector", name, k) for k in range(count)]
        return Vector(labels, self._blocks(nodes, gates))

    # -- Rules -------------------------------------------------------------------------------------

    def product(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return a product with a matrix that is the same in all steps."""
        (contracted, batched), inputs = equation.options["dimension_numbers"], equation.inputs
        if batched[0] or any(len(axes) != 1 for axes in contracted):
            equation.refuse("no product of vectors with one matrix")
        fixed = [each.is_fixed for each in inputs]
        if sum(fixed) != 1:
            equation.refuse("a product in which no matrix is the same in all steps")
        which = fixed.index(True)
        weight, other = inputs[which], inputs[1 - which]
        (inner,), (axis,) = contracted[which], contracted[1 - which]
        kinds = {each.aval.dtype for each in (*inputs, *equation.outputs)}
        is_column = len(weight.shape) == 1 or weight.shape[1 - inner] == 1 != self.units
        if is_column and kinds == {self.dtype} and self.waits(other):
            return [self._derived(_column(equation, weight, which, other, axis), labels)]
        if len(weight.shape) != 2 or kinds != {self.dtype}:
            equation.refuse(f"a product with {weight.aval.str_short()}; expected a matrix")
        joined = other.equation
        is_joined = joined is not None and joined.name == "concatenate"
        if joined is not None and is_joined and joined.options["dimension"] == axis:
            return self._piecewise(equation, joined, which, labels)
        rows = weight.shape[1 - inner]
        if rows % self.units:
            equation.refuse(f"a matrix for {rows} numbers, among carries of {self.units}")
        if self.waits(other):
            kept, nodes = self._of_states(equation, other, weight, inner, axis)
        else:
            assert labels is not None
            own = labels[1:] if which == 0 else labels[:-1]
            kept, nodes = self._of_inputs(equation, other, weight, inner, axis, own)
        label = (UNITS,) if rows > 1 or self.units == 1 else (None,)
        whole = (*label, *kept) if which == 0 else (*kept, *label)
        return [Vector(whole, self._blocks(nodes))]

    def _of_states(
        self, equation: Equation, other: Value, weight: Value, inner: int, axis: int
    ) -> tuple[Labels, list[Node]]:
        """Return a product of a matrix and what depends on states: axes that stay, and blocks."""
        given = self._vector(other, ())
        if GATES in given.labels or given.labels[axis] != UNITS:
            equation.refuse("a product that is not over units")
        count, blocks = weight.shape[1 - inner] // self.units, given.blocks[0].tolist()
        name = self._name(Source("hidden", count * len(blocks), weight, (1 - inner, inner)))
        nodes = []
        for k in range(count):
            total = None
            for b, place in enumerate(blocks):
                part = linear_map((name, k * len(blocks) + b), self._nodes[place])
                total = part if total is None else total + part
            assert total is not None
            nodes.append(total)
        return without(given.labels, [axis]), nodes

    def _of_inputs(
        self,
        equation: Equation,
        other: Value,
        weight: Value,
        inner: int,
        axis: int,
        labels: Labels,
    ) -> tuple[Labels, list[Node]]:
        """Return a product of a matrix and a part of the input."""
        axes = [k for k in range(len(other.shape)) if k != axis]
        kept = tuple(
            label if other.shape[k] > 1 else None for k, label in zip(axes, labels, strict=True)
        )
        places = {label: k for k, label in zip(axes, kept, strict=True) if label is not None}
        if any(label in places for label in (UNITS, GATES)) or any(
            other.shape[k] > 1 and label is None for k, label in zip(axes, kept, strict=True)
        ):
            equation.refuse("an axis that is none of samples")
        samples = tuple(places.get(k) for k in range(len(self.samples)))
        part = Part(other, (*samples, None, axis))
        if self._only not in (None, part):
            equation.refuse("a second input")
        count = weight.shape[1 - inner] // self.units
        name = self._name(Source("input", count, weight, (1 - inner, inner), part))
        return kept, [linear_map((name, k), INPUT) for k in range(count)]

    def _piecewise(
        self, equation: Equation, joined: Equation, which: int, labels: Labels | None
    ) -> list[Vector]:
        """Return a product of concatenated vectors: a sum of products."""
        contracted, _ = equation.options["dimension_numbers"]
        (inner,) = contracted[which]
        sizes = [each.shape[joined.options["dimension"]] for each in joined.inputs]
        ends = np.cumsum(sizes).tolist()

        numbers, total = equation.options["dimension_numbers"], None
        for piece, size, end in zip(joined.inputs, sizes, ends, strict=True):
            about = {"start_index": end - size, "limit_index": end, "axis": inner}
            own = equation.derived("slice", [equation.inputs[which]], **about)
            pair = (own, piece) if which == 0 else (piece, own)
            one = equation.derived("dot_general", pair, dimension_numbers=numbers)
            total = one if total is None else equation.derived("add", [total, one])
        assert total is not None
        return [self._derived(total, labels)]

    def reduced(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return a sum over axes, or an extreme, of which all numbers share the gradient."""
        axes = equation.options["axes"]
        if labels is not None:
            equation.refuse("a reduction of inputs")
        (value,) = equation.inputs
        given = self._vector(value, ())
        blocks, is_sum = given.blocks, equation.name == "reduce_sum"
        turn, back = _TURNS.get(equation.name, (None, None))
        if turn is not None:
            blocks = self._mapped(blocks, turn)
        for axis in axes:
            label, size = given.labels[axis], value.shape[axis]
            if label is None and is_sum and size > 1:
                blocks = self._mapped(blocks, functools.partial(apply, "multiply", number(size)))
            elif label == GATES:
                blocks = self._joined(blocks, is_sum)
            elif label == UNITS:
                blocks = self._joined(blocks.T, is_sum).T
                blocks = self._mapped(blocks, Node.sum if is_sum else Node.max)
            elif label is not None:
                equation.refuse("a reduction over samples")
        if back is not None:
            blocks = self._mapped(blocks, back)
        return [Vector(without(given.labels, axes), blocks)]

    def _mapped(
        self, blocks: NDArray[np.int64], change: Callable[[Node], Node]
    ) -> NDArray[np.int64]:
        nodes = [change(self._nodes[k]) for k in blocks.reshape(-1).tolist()]
        return self._blocks(nodes, blocks.shape[0])

    def _joined(self, blocks: NDArray[np.int64], is_sum: bool) -> NDArray[np.int64]:
        """Return the sums, or the largest numbers, of columns."""
        joined = []
        for column in blocks.T.tolist():
            total = self._nodes[column[0]]
            for k in column[1:]:
                total = apply("add" if is_sum else "maximum", total, self._nodes[k])
            joined.append(total)
        return self._blocks(joined)

    def shaped(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return an array with other axes."""
        (value,), options = equation.inputs, equation.options
        move = _SHAPES[equation.name]
        old, new = value.shape, equation.outputs[0].shape
        inner: Labels = ()
        if labels is not None:
            inner = move(equation, new, old, labels, options, True)
        given = self._vector(value, inner)
        if not value.shape:
            return [Vector((None,) * len(new), given.blocks)]
        made = move(equation, old, new, given.labels, options, False)
        for label, size in [*zip(made, new, strict=True), *zip(inner, old, strict=False)]:
            if label == UNITS and size % self.units:
                equation.refuse("a part of the units")
        blocks = given.blocks
        if GATES in made and GATES not in given.labels:
            blocks = blocks.reshape(new[made.index(GATES)], -1) if blocks.size > 1 else blocks
        elif GATES in given.labels and GATES not in made:
            blocks = blocks.reshape(1, -1)
        return [Vector(made, blocks)]

    def cut(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return slices."""
        (value,), options = equation.inputs, equation.options
        if equation.name == "slice" and self.waits(value):
            part = self._part_of(equation, value)
            if part is not None:
                return [self._derived(part, labels)]
        given = self._vector(value, () if labels is None else labels)
        if equation.name == "slice":
            if any(step != 1 for step in options["strides"] or ()):
                equation.refuse("a slice with strides")
            ranges = [list(zip(options["start_indices"], options["limit_indices"], strict=True))]
        else:
            ends = np.cumsum(options["sizes"]).tolist()
            whole = [(0, size) for size in value.shape]
            axis = options["axis"]
            ranges = [
                [*whole[:axis], (end - size, end), *whole[axis + 1 :]]
                for size, end in zip(options["sizes"], ends, strict=True)
            ]
        return [self._slice(equation, value, given, each) for each in ranges]

    def _slice(
        self, equation: Equation, value: Value, given: Vector, ranges: Sequence[tuple[int, int]]
    ) -> Vector:
        blocks = given.blocks
        for (begin, end), size, label in zip(ranges, value.shape, given.labels, strict=True):
            if label is None or (begin, end) == (0, size):
                continue
            if label == GATES:
                blocks = blocks[begin:end]
            elif label == UNITS and begin % self.units == end % self.units == 0:
                blocks = blocks[:, begin // self.units : end // self.units]
            else:
                equation.refuse("a slice of samples, or of a part of the units")
        return Vector(given.labels, blocks)

    def _part_of(self, equation: Equation, value: Value) -> Value | None:
        """Return a slice that no blocks of units are, by equations of parts of their arguments."""
        options = equation.options
        steps = options["strides"] or (1,) * len(value.shape)
        whole = zip(options["start_indices"], options["limit_indices"], steps, strict=True)
        cuts = [
            (k, *cut)
            for k, (cut, size) in enumerate(zip(whole, value.shape, strict=True))
            if cut != (0, size, 1)
        ]
        if len(cuts) != 1:
            return None
        axis, begin, end, step = cuts[0]
        last, before = len(value.shape) - 1, value.equation
        if value in self._refused:  # gates that are an axis behind that of units
            assert before is not None
            if before.name != "reshape" or axis != last or end - begin != 1:
                return None
            (flat,) = before.inputs
            *lead, units, gates = value.shape
            if flat.shape != (*lead, units * gates):
                return None
            part = self._strided(equation, flat, begin, units * gates, gates, last - 1)
            return equation.derived("expand_dims", [part], dimensions=(last,))
        is_block = begin % self.units == end % self.units == 0
        label = self._vector(value, ()).labels[axis]
        if label != UNITS or (step == 1 and is_block):
            return None
        if len(range(begin, end, step)) % self.units:
            equation.refuse("a slice of a part of the units")
        return self._strided(equation, value, begin, end, step, axis)

    def _strided(
        self, equation: Equation, value: Value, begin: int, end: int, step: int, axis: int
    ) -> Value:
        """Return some columns of a value, from those of what it is computed from."""
        cut, before = (begin, end, step), value.equation
        if not self.waits(value):
            return equation.strided(value, *cut, axis)
        assert before is not None
        if before.name in ELEMENTWISE:
            size = value.shape[axis]
            return before.again(
                [
                    self._strided(equation, each, *cut, axis)
                    if each.shape and each.shape[axis] == size
                    else each
                    for each in before.inputs
                ]
            )
        if before.name != "dot_general":
            equation.refuse("a slice of a part of the units")
        (contracted, batched), pair = before.options["dimension_numbers"], list(before.inputs)
        which = 0 if pair[0].is_fixed else 1
        is_its = axis == (0 if which == 0 else len(value.shape) - 1)
        if batched[0] or len(pair[which].shape) != 2 or not pair[which].is_fixed or not is_its:
            equation.refuse("a slice of a part of the units")
        pair[which] = equation.strided(pair[which], *cut, 1 - contracted[which][0])
        return before.again(pair)

    def stacked(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return vectors along a new axis, of gates."""
        axis = equation.options["axis"]
        rows = [
            equation.derived("expand_dims", [each], dimensions=(axis,)) for each in equation.inputs
        ]
        return [self._derived(equation.derived("concatenate", rows, dimension=axis), labels)]

    def unstacked(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return the gates of an axis."""
        axis, found = equation.options["axis"], []
        if labels is not None:
            equation.refuse("an unstacked input")
        for k in range(len(equation.outputs)):
            about = {"start_index": k, "limit_index": k + 1, "axis": axis}
            one = equation.derived("slice", equation.inputs, **about)
            found.append(
                self._derived(equation.derived("squeeze", [one], dimensions=(axis,)), None)
            )
        return found

    def _derived(self, value: Value, labels: Labels | None) -> Vector:
        """Return a value that other equations compute."""
        for each in before([value], lambda each: not self.waits(each) or each in self._vectors):
            self.read(each)
        if labels is None:
            labels = self._likely((None,) * len(value.shape), value.shape)
        return self._vector(value, labels)

    def joined(self, equation: Equation, labels: Labels | None) -> list[Vector]:
        """Return vectors one after the other."""
        axis, inputs = equation.options["dimension"], equation.inputs
        if labels is None:
            known = [self._vectors[each] for each in inputs if each in self._vectors]
            labels = _joined(known, len(inputs[0].shape), equation)
            labels = self._likely(labels, inputs[0].shape)
        given = [self._vector(each, labels) for each in inputs]
        own = {each.labels[axis] for each in given}
        if own == {None} and all(each.shape[axis] == 1 for each in inputs):
            label, place = GATES, 0
        elif own in ({GATES}, {UNITS}):
            label = own.pop()
            place = 0 if label == GATES else 1
        else:
            equation.refuse("a concatenation that is none of blocks of units")
        rest = [Vector(without(each.labels, [axis]), each.blocks) for each in given]
        outer = _joined(rest, len(labels) - 1, equation)
        if label in outer:
            equation.refuse("a concatenation along two axes")
        try:
            blocks = np.concatenate([each.blocks for each in given], axis=place)
        except ValueError:
            equation.refuse("vectors of different lengths")
        return [Vector((*outer[:axis], label, *outer[axis:]), blocks)]


def _column(equation: Equation, weight: Value, which: int, other: Value, axis: int) -> Value:
    """Return a product with a matrix of one column, or a vector, as a sum over units."""
    shape = [1] * len(other.shape)
    shape[axis] = other.shape[axis]
    row = equation.derived("reshape", [weight], new_sizes=tuple(shape))
    total = equation.derived("reduce_sum", [equation.derived("mul", [other, row])], axes=(axis,))
    if len(weight.shape) == 1:
        return total
    place = 0 if which == 0 else len(total.shape)
    return equation.derived("expand_dims", [total], dimensions=(place,))


# What extremes over units are the largest numbers of, and what is done with these.
_TURNS: dict[str, tuple[Callable[[Node], Node], Callable[[Node], Node]]] = {
    "reduce_min": (lambda a: -a, lambda a: -a),
    "reduce_and": (lambda a: 1 - a, lambda a: 1 - a),
}


def _refuse(value: Value, why: str) -> NoReturn:
    if value.equation is not None:
        value.equation.refuse(why)
    raise NotCaptured(f"{value.aval.str_short()}, an argument: {why}")


def _spread(vector: Vector, old: Shape, new: Shape) -> Vector:
    """Return an array as one of another shape, along whose other axes it is constant."""
    if len(old) != len(new):  # one of them is a number
        return Vector((None,) * len(new), vector.blocks)
    pairs = zip(vector.labels, old, new, strict=True)
    return Vector(tuple(label if a == b else None for label, a, b in pairs), vector.blocks)


def without(labels: Sequence[Any], axes: Iterable[int]) -> tuple[Any, ...]:
    """Return what belongs to all axes but these."""
    return tuple(each for k, each in enumerate(labels) if k not in axes)


def _joined(vectors: Sequence[Vector], rank: int, equation: Equation) -> Labels:
    """Return the labels of arrays of the same shape."""
    found = []
    for axis in range(rank):
        own = {each.labels[axis] for each in vectors} - {None}
        if len(own) > 1:
            equation.refuse("axes of different kinds")
        found.append(own.pop() if own else None)
    named = [each for each in found if each is not None]
    if len(set(named)) < len(named):
        equation.refuse("two axes of one kind")
    return tuple(found)


# -- Shapes ----------------------------------------------------------------------------------------
#
# Each returns the labels of an array of the shape `new` from those of one of the shape `old`, or
# the other way round if `is_back`: then `old` is the shape of the result.


def _broadcast(
    equation: Equation, old: Shape, new: Shape, labels: Labels, options: Any, is_back: bool
) -> Labels:
    axes = options["broadcast_dimensions"]
    if is_back:
        return tuple(labels[axis] if old[axis] == new[k] else None for k, axis in enumerate(axes))
    found: list[int | None] = [None] * len(new)
    for k, axis in enumerate(axes):
        found[axis] = labels[k] if old[k] == new[axis] else None
    return tuple(found)


def _transpose(
    equation: Equation, old: Shape, new: Shape, labels: Labels, options: Any, is_back: bool
) -> Labels:
    order = options["permutation"]
    if is_back:
        return tuple(labels[order.index(k)] for k in range(len(order)))
    return tuple(labels[k] for k in order)


def _reshape(
    equation: Equation, old: Shape, new: Shape, labels: Labels, options: Any, is_back: bool
) -> Labels:
    """Map axes of other lengths than 1 onto each other."""
    if equation.name == "reshape" and options["dimensions"] is not None:
        equation.refuse("a reshape in another order")
    found: list[int | None] = [None] * len(new)
    own = [k for k, size in enumerate(old) if size != 1]
    to = [k for k, size in enumerate(new) if size != 1]
    while own and to:
        if old[own[0]] == new[to[0]]:
            found[to.pop(0)] = labels[own.pop(0)]
            continue
        if len(to) > 1 and new[to[0]] * new[to[1]] == old[own[0]]:
            label = labels[own.pop(0)]
            if label not in (None, UNITS) or GATES in labels:
                equation.refuse("a reshape of samples")
            if label == UNITS:
                found[to[0]], found[to[1]] = GATES, UNITS
            del to[:2]
            continue
        if len(own) > 1 and old[own[0]] * old[own[1]] == new[to[0]]:
            pair = labels[own[0]], labels[own[1]]
            if pair not in ((None, None), (GATES, UNITS)):
                equation.refuse("a reshape of samples")
            found[to.pop(0)] = pair[1]
            del own[:2]
            continue
        equation.refuse("a reshape that is none of gates")
    return tuple(found)


_SHAPES: dict[str, Callable[..., Labels]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    "expand_dims": _reshape,
}
_RULES: dict[str, Callable[[Reader, Equation, Labels | None], list[Vector]]] = {
    **dict.fromkeys(_SHAPES, Reader.shaped),
    "dot_general": Reader.product,
    "reduce_sum": Reader.reduced,
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_or", "reduce_and"), Reader.reduced),
    "slice": Reader.cut,
    "split": Reader.cut,
    "concatenate": Reader.joined,
    "stack": Reader.stacked,
    "unstack": Reader.unstacked,
}
