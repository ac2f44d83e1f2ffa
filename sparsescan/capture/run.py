"""Runs of a loop whose carries a cell computes: what is before it, the cell, and what is behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..ops.operation import Functions
from ..recurrent.arguments import Options
from .equations import Equation, Value, before, compute
from .loop import Plan
from .vectors import Part, Source, without


def execute(
    runner: type[Runner], own: Plan, arrays: Sequence[Any], length: int, is_reverse: bool
) -> list[Any]:
    """Return the last carries and all outputs of a loop, from its arguments."""
    body, flip = own.body, runner.xp.flip
    if is_reverse:
        count = len(arrays) - len(body.xs)
        arrays = [*arrays[:count], *(flip(each, (0,)) for each in arrays[count:])]
    last, ys = runner(own, arrays, length).run()
    return [*last, *(flip(each, (0,)) for each in ys)] if is_reverse else [*last, *ys]


class Runner:
    """Runs a loop with some arguments; a framework derives its own class, which computes.

    Attributes
    ----------
    xp : Functions
        The framework's functions.
    """

    xp: Functions

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
            begin = self.array(self.begin[k])
            known[body.carries[k]] = self.xp.concat([begin[None], each[:-1]], 0)
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
        if carries or not all(map(self.is_mapped, equations)):
            return self.loop(one, begin, list(rows.values()))
        if rows:
            return [], self.over(lambda *row: one([], row)[1], list(rows.values()))
        whole = map(self.as_array, one([], [])[1])
        return [], [self.xp.broadcast_to(each, (self.length, *each.shape)) for each in whole]

    def _cell(self, rows: Mapping[Part, Any]) -> tuple[list[Any], list[Any]]:
        """Return the states after all steps, or the first of them, and the last ones.

        `rows` are the inputs of all steps.
        """
        own, batch = self.own, math.prod(self.samples)
        if own.input is None:
            x = [self.zeros((self.length, batch, 1))]
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
        one, nothing = own.one, self.zeros(())
        begin = [
            arranged(self.xp, self.array(self.begin[k]), self._order, 0) for k in self.body.core
        ]
        state = self.xp.concat([each.reshape(batch, self.units) for each in begin], -1)
        params = [made.get(name, nothing) for name in one.shapes]
        options = Options(return_states=len(self.body.read) > 1)
        results = self.cell(options, params, self.xp.concat(x, -1), state[None])
        states, ends = (
            [
                self._back(array[..., k : k + self.units])
                for k in range(0, array.shape[-1], self.units)
            ]
            for array in results
        )
        return states, [each[0] for each in ends]

    @property
    def _order(self) -> tuple[int, ...]:
        """The axes of carries, that of units last."""
        rank, axis = len(self.body.carries[self.body.core[0]].shape), self.own.axis
        return (*without(range(rank), [axis]), axis) if rank else ()

    def _back(self, array: Any) -> Any:
        """Return carries, as the caller has them, of some steps."""
        if not self._order:
            return array.reshape(len(array))
        whole = array.reshape(len(array), *self.samples, self.units)
        return self.xp.moveaxis(whole, -1, 1 + self.own.axis)

    def _part(self, array: Any, part: Part) -> Any:
        """Return what the cell reads in all steps, as blocks of numbers of each sample."""
        batch, units, is_input = math.prod(self.samples), self.units, part == self.own.input
        rows = arranged(self.xp, self.array(array), part.order, 1)
        gates, size = rows.shape[-2:]
        rows = self.xp.broadcast_to(rows, (self.length, *self.samples, gates, size))
        if is_input:
            return rows.reshape(self.length, batch, 1, size)
        if part.order[-1] is None:
            rows = self.xp.broadcast_to(rows, (*rows.shape[:-1], units))
        return rows.reshape(self.length, batch, -1, units)

    def _parameter(self, source: Source, array: Any) -> Any:
        """Return a parameter of the cell."""
        units, array = self.units, arranged(self.xp, self.array(array), source.order, 0)
        if source.kind == "scalar":
            return array.reshape(())
        if source.kind == "vector":
            rows = array.reshape(source.blocks, -1)
            return self.xp.broadcast_to(rows, (source.blocks, units)).reshape(-1)
        if source.kind == "input":
            return array
        blocks = array.reshape(-1, units, array.shape[1] // units, units)
        return self.xp.moveaxis(blocks, 1, 2).reshape(-1, units)

    # -- What a framework does ---------------------------------------------------------------------

    def is_mapped(self, equation: Equation) -> bool:
        """Return whether an equation gives the same for all steps at once."""
        raise NotImplementedError

    def array(self, given: Any) -> Any:
        """Return an array of the dtype of states."""
        raise NotImplementedError

    def as_array(self, given: Any) -> Any:
        """Return an array of its own dtype."""
        raise NotImplementedError

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Return zeros."""
        raise NotImplementedError

    def loop(self, step: Any, begin: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the last states and stacked outputs of ``state, outputs = step(state, row)``."""
        raise NotImplementedError

    def over(self, function: Any, rows: list[Any]) -> list[Any]:
        """Return the results of a function of rows, for all of them."""
        raise NotImplementedError

    def cell(self, options: Options, params: list[Any], x: Any, state: Any) -> tuple[Any, Any]:
        """Return the outputs and last states of the cell."""
        raise NotImplementedError


def arranged(xp: Functions, array: Any, order: Sequence[int | None], lead: int) -> Any:
    """Return an array with its axes in an order, behind the leading ones.

    None in the order is an axis of length 1 that is put in; axes that are not in it have length 1.
    """
    own = [lead + k for k in order if k is not None]
    rest = [k for k in range(lead, array.ndim) if k not in own]
    sizes = [1 if k is None else array.shape[lead + k] for k in order]
    moved = xp.moveaxis(array, [*own, *rest], [*range(lead, array.ndim)])
    return moved.reshape((*array.shape[:lead], *sizes))
