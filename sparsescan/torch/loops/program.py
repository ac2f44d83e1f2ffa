"""Runs of a forward pass whose loops are known, for any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture.functions import call
from ..capture.run import mapped
from ..scan import scan
from .bodies import Affine, Call, In, Loop, Place, Reading, Segment
from .unrolled import STACK, Cut


class Program:
    """A forward pass whose loops are known.

    Parameters
    ----------
    reading : Reading
        What is to be computed.
    constants : list of Tensor
        Tensors that it makes of numbers.
    """

    def __init__(self, reading: Reading, constants: Sequence[Tensor]) -> None:
        self.items, self.results, self.constants = reading.items, reading.results, constants
        self.read = {each for item in self.items for each in _states_read(item, self.items)}
        for each in self.results:
            self.read.update(_states_of(each, self.items))

    def run(
        self,
        length: int,
        inputs: Sequence[Tensor],
        outside: Sequence[Tensor],
        see: Callable[..., None] = lambda *_: None,
    ) -> list[Tensor | None]:
        """Return the results.

        Parameters
        ----------
        length : int
            How many steps there are.
        inputs, outside : list of Tensor
            The inputs, and the tensors that it closes over.
        see : callable, optional
            Is called with the arguments of each scan.
        """
        run = _Run(self, length, {"input": inputs, "outside": outside, "constant": self.constants})
        for number, item in enumerate(self.items):
            if isinstance(item, Call):
                run.operator(number, item)
            else:
                run.loop(number, item, see)
        return [None if each is None else run.tensor(each) for each in self.results]


def _states_read(item: Call | Loop, items: Sequence[Any]) -> Any:
    """Yield which states of loops an item reads in other steps than the last."""
    if isinstance(item, Call):
        places = [each for each in item.leaves if isinstance(each, Place)]
        rows = item.rows
    else:
        places = [*item.fixed, *(begin for begin, _, _ in item.slots)]
        rows = [each for row in item.rows for each in row]
    for each in places:
        yield from _states_of(each, items)
    for segment in rows:
        if segment.place.base[0] == "loop":
            yield segment.place.base


def _states_of(place: Place | None, items: Sequence[Any]) -> Any:
    if place is not None and place.base[0] == "loop":
        _, number, position, item = place.base
        steps = items[number].steps
        is_last = place.step == steps._replace(begin=steps.begin - 1)
        if not is_last or _carry(items[number], position, item) is None:
            yield place.base


def _carry(loop: Loop, position: int, item: int | None) -> int | None:
    """Return which carry has a result of the body."""
    for k, (_, new, _) in enumerate(loop.slots):
        if new == In("body", position, item):
            return k
    return None


class _Run:
    """One run of a program."""

    def __init__(self, program: Program, length: int, given: dict[str, Sequence[Tensor]]) -> None:
        self.program, self.length, self.given = program, length, given
        self.values: dict[Any, Any] = {}

    def number(self, leaf: Any) -> Any:
        """Return a number for the length of the run; others stay."""
        return leaf.at(self.length) if isinstance(leaf, Affine) else leaf

    def base(self, base: tuple[Any, ...]) -> Any:
        """Return what places are parts of."""
        kind, number, *_ = base
        if kind in self.given:
            return self.given[kind][number]
        if kind == "op":
            found = self.values[number]
            return found if base[2] is None else found[base[2]]
        return self.values[base]

    def tensor(self, place: Place) -> Tensor:
        """Return the tensor of a place."""
        step = self.number(place.step)
        if step is None:
            return cut(self.base(place.base), self.cuts(place))
        last = self.values.get((*place.base, "last"))
        if last is not None and step == last[0] - 1:
            return cut(last[1], self.cuts(place))
        return cut(self.base(place.base)[step], self.cuts(place))

    def cuts(self, place: Place) -> list[Cut]:
        """Return the parts that a place takes."""
        return [each._replace(begin=self.number(each.begin)) for each in place.cuts]

    def rows(self, segment: Segment) -> Tensor:
        """Return the tensors of a segment, along a first axis."""
        place, slopes, count = segment.place, list(segment.slopes), self.number(segment.count)
        if count == 1 and not any(slopes):
            return self.tensor(place)[None]
        if not any(slopes):
            whole = self.tensor(place)
            return whole.expand(count, *whole.shape)
        found, cuts = self.base(place.base), self.cuts(place)
        if place.step is not None:
            slope = slopes.pop(0)
            if slope:
                found = _along(found, Cut(0, self.number(place.step), None), slope, count)
                return _cut_rows(found, cuts)
            found = found[self.number(place.step)]
        k = next(k for k, slope in enumerate(slopes) if slope)
        found = _along(cut(found, cuts[:k]), cuts[k], slopes[k], count)
        return _cut_rows(found, cuts[k + 1 :])

    def operator(self, number: int, own: Call) -> None:
        """Run an operator."""
        op = own.op
        if own.rows:
            parts = [*map(self.rows, own.rows)]
            rank = parts[0].dim() - (op.target is not STACK)
            axis = own.leaves[0] % rank
            moved = [each.movedim(0, axis) for each in parts]
            if op.target is not STACK:
                moved = [each.flatten(axis, axis + 1) for each in moved]
            whole = moved[0].contiguous() if len(moved) == 1 else torch.cat(moved, axis)
            self.values[number] = whole
            return
        leaves = [
            self.tensor(each) if isinstance(each, Place) else self.number(each)
            for each in own.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, op.spec)
        self.values[number] = call(op.target, *args, **kwargs)

    def loop(self, number: int, loop: Loop, see: Callable[..., None]) -> None:
        """Run a loop."""
        count = self.number(loop.steps)
        fixed = [*map(self.tensor, loop.fixed)]
        init = [self.tensor(begin).expand(shape) for begin, _, (shape, _) in loop.slots]
        parts = [[*map(self.rows, row)] for row in loop.rows]
        xs = [each[0] if len(each) == 1 else torch.cat(each) for each in parts]
        read = [each[2:] for each in self.program.read if each[:2] == ("loop", number)]
        body = [(op, [self.number(each) for each in leaves]) for op, leaves in loop.body]

        def step(carry: Any, row: Any) -> Any:
            own = {"slot": carry, "row": row, "fixed": fixed, "body": list[Any]()}

            def value(leaf: Any) -> Any:
                if not isinstance(leaf, In):
                    return leaf
                found = own[leaf.kind][leaf.number]
                return cut(found if leaf.item is None else found[leaf.item], leaf.cuts)

            for op, leaves in body:
                args, kwargs = pytree.tree_unflatten([*map(value, leaves)], op.spec)
                own["body"].append(call(op.target, *args, **kwargs))
            ys = [value(In("body", *each)) for each in read]
            return [value(new) for _, new, _ in loop.slots], ys

        if loop.slots:
            xs = xs or [torch.zeros(count)]
            see(step, init, xs)
            carry, ys = scan(step, init, xs)
        else:
            carry, ys = [], mapped(lambda *row: step([], row)[1], xs)
        for each, states in zip(read, ys, strict=True):
            self.values[("loop", number, *each)] = states
        for (_, new, _), last in zip(loop.slots, carry, strict=True):
            if new.kind == "body" and not new.cuts:
                self.values["loop", number, new.number, new.item, "last"] = count, last


def cut(tensor: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Return a part of a tensor."""
    for axis, begin, size in cuts:
        tensor = tensor.select(axis, begin) if size is None else tensor.narrow(axis, begin, size)
    return tensor


def _cut_rows(rows: Tensor, cuts: Sequence[Cut]) -> Tensor:
    return cut(rows, [each._replace(axis=each.axis + 1) for each in cuts])


def _along(tensor: Tensor, first: Cut, slope: int, count: int) -> Tensor:
    """Return so many parts of a tensor along a first axis; each begins further by a slope."""
    axis, begin, size = first
    if size is None and slope == 1:
        return tensor.narrow(axis, begin, count).movedim(axis, 0)
    if size is None and slope == -1:
        return tensor.narrow(axis, begin - count + 1, count).flip(axis).movedim(axis, 0)
    places = torch.arange(count) * slope + begin
    if size is None:
        return tensor.index_select(axis, places).movedim(axis, 0)
    parts = tensor.movedim(axis, 0)[places[:, None] + torch.arange(size)]
    return parts.movedim(1, axis + 1)
