"""The loops of a forward pass, as three traces of few steps have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...capture.equations import NotCaptured
from ..capture.functions import CUSTOM
from .unrolled import CAT, STACK, Cut, Edge, Op, Unrolled, is_number

# The lengths of traces, in steps.
LENGTHS = (4, 5, 6)
_JOINS = (STACK, CAT)


class Affine(NamedTuple):
    """A number that is affine in the length.

    Attributes
    ----------
    begin, growth : float
        The number at the first of `LENGTHS`, and what each further step adds.
    """

    begin: float
    growth: int

    def at(self, length: int) -> Any:
        """Return the number."""
        return self.begin + self.growth * (length - LENGTHS[0]) if self.growth else self.begin


class Place(NamedTuple):
    """A tensor among those that a program computes; numbers in it may be affine.

    Attributes
    ----------
    base : tuple
        ``("input", k)``, ``("outside", k)``, ``("constant", k)``, ``("op", k, item)`` or
        ``("loop", k, position, item)``.
    step : number or None
        The step of a loop.
    cuts : tuple of Cut
        The parts that are taken of it.
    """

    base: tuple[Any, ...]
    step: Any
    cuts: tuple[Cut, ...]

    @property
    def numbers(self) -> list[Any]:
        """The step, and where parts begin."""
        return [*([] if self.step is None else [self.step]), *(each.begin for each in self.cuts)]

    def with_numbers(self, numbers: Sequence[Any]) -> Place:
        """Return the same place with other numbers."""
        rest = iter(numbers)
        step = None if self.step is None else next(rest)
        return Place(self.base, step, tuple(each._replace(begin=next(rest)) for each in self.cuts))

    @property
    def common(self) -> Any:
        """What places have in common that differ in their numbers."""
        return self.with_numbers([0] * len(self.numbers))


class Segment(NamedTuple):
    """Places whose numbers change by the same from one to the next.

    Attributes
    ----------
    place : Place
        The first.
    slopes : tuple of int
        What its numbers change by.
    count : int
        How many there are; it may be affine.
    """

    place: Place
    slopes: tuple[int, ...]
    count: Any


class In(NamedTuple):
    """What an operator of a body reads.

    Attributes
    ----------
    kind : str
        ``"body"``, ``"slot"``, ``"row"`` or ``"fixed"``.
    number : int
        Which operator of the body, carry, input of each step, or tensor that does not change.
    item : int or None
        Which result of an operator.
    cuts : tuple of Cut
        The parts that are taken.
    """

    kind: str
    number: int
    item: int | None = None
    cuts: tuple[Cut, ...] = ()


class Call(NamedTuple):
    """An operator before, between or behind loops.

    Attributes
    ----------
    op : Op
        The operator.
    leaves : list
        Its arguments: a :class:`Place`, a number that may be affine, or others.
    rows : list of Segment
        What it joins, if that grows.
    """

    op: Op
    leaves: list[Any]
    rows: list[Segment]


class Loop(NamedTuple):
    """A loop.

    Attributes
    ----------
    body : list of (Op, list)
        The operators of a step, and the arguments of each: an :class:`In`, a number that may be
        affine in the length, or others.
    slots : list of (Place, In, tuple)
        What a carry begins with, what it becomes in a step, and its shape and dtype.
    rows : list of list of Segment
        What differs in each step.
    fixed : list of Place
        What does not.
    steps : int
        How many steps there are; it may be affine.
    """

    body: list[tuple[Op, list[Any]]]
    slots: list[tuple[Place, In, Any]]
    rows: list[list[Segment]]
    fixed: list[Place]
    steps: Any


def segments(places: Sequence[Place]) -> list[Segment]:
    """Return places in a row as few segments."""
    found: list[Segment] = []
    for each in places:
        if found and found[-1].place.common == each.common:
            first, slopes, count = found[-1]
            pairs = list(zip(first.numbers, each.numbers, strict=True))
            if count == 1:
                slopes = tuple(b - a for a, b in pairs)
            if all(b == a + count * d for (a, b), d in zip(pairs, slopes, strict=True)):
                found[-1] = Segment(first, slopes, count + 1)
                continue
        found.append(Segment(each, (0,) * len(each.numbers), 1))
    return found


# -- Traces side by side ---------------------------------------------------------------------------


class Reading:
    """Reads three traces side by side.

    Attributes
    ----------
    items : list of Call or Loop
        What to compute, in this order.
    results : list of Place or None
        What to return.
    """

    def __init__(self, traces: Sequence[Unrolled]) -> None:
        self.traces = traces
        self._check_constants()
        self._keys = [[op.key() for op in each.ops] for each in traces]
        sizes = [len(each.ops) for each in traces]
        self._growth = sizes[1] - sizes[0]
        if self._growth <= 0:
            raise NotCaptured("there are no more operators in more steps")
        if sizes[2] - sizes[1] != self._growth:
            raise NotCaptured(f"{sizes} operators in {[*LENGTHS]} steps: no even growth")
        self._where: list[dict[int, tuple[Any, ...]]] = [{}, {}, {}]
        self.items: list[Call | Loop] = []
        self._at = [0, 0, 0]
        self._why: NotCaptured | None = None
        while any(at < size for at, size in zip(self._at, sizes, strict=True)):
            if not self._loop():
                self._call()
        if self._growth:
            raise self._why or NotCaptured("no steps that repeat")
        rows = zip(*(each.results for each in traces), strict=True)
        self.results = [self._fit_edges(row) for row in rows]

    def _check_constants(self) -> None:
        columns = zip(*(each.constants for each in self.traces), strict=False)
        for first, *others in columns:
            if not all(first.dtype == each.dtype and torch.equal(first, each) for each in others):
                raise self._differs("tensors made of numbers")

    def _differs(self, what: str) -> NotCaptured:
        return self._why or NotCaptured(f"{what} that differ from length to length")

    # -- Operators of no loop ----------------------------------------------------------------------

    def _call(self) -> None:
        """Read an operator that is in no loop."""
        pairs = list(zip(self.traces, self._at, strict=True))
        if any(at >= len(trace.ops) for trace, at in pairs):
            raise self._differs("operators behind the loop")
        ops = [trace.ops[at] for trace, at in pairs]
        keys = {keys[at] for keys, at in zip(self._keys, self._at, strict=True)}
        if len(keys) == 1:
            columns = zip(*(op.leaves for op in ops), strict=True)
            call = Call(ops[0], [self._fit(column) for column in columns], [])
        elif all(op.target in _JOINS and op.target is ops[0].target for op in ops):
            rest = [[each for each in op.leaves if not isinstance(each, Edge)] for op in ops]
            if rest[0] != rest[1] or rest[0] != rest[2]:
                raise self._differs("axes")
            rows = [
                segments([self._place(m, each) for each in op.edges]) for m, op in enumerate(ops)
            ]
            call = Call(ops[0], [*rest[0], 0][:1], self._fit_segments(rows))
        else:
            raise self._differs(f"arguments of {ops[0].target} or {ops[2].target}")
        for m in range(3):
            self._where[m][self._at[m]] = "op", len(self.items)
            self._at[m] += 1
        self.items.append(call)

    def _place(self, m: int, edge: Edge) -> Place:
        if edge.kind != "op":
            return Place((edge.kind, edge.number), None, edge.cuts)
        kind, item, *step = self._where[m][edge.number]
        if kind == "op":
            return Place((kind, item, edge.item), None, edge.cuts)
        return Place((kind, item, step[0], edge.item), step[1], edge.cuts)

    def _fit_edges(self, edges: Sequence[Edge | None]) -> Place | None:
        if any(each is None for each in edges):
            return None
        places = [self._place(m, each) for m, each in enumerate(edges) if each is not None]
        return self._fit_places(places)

    def _fit_places(self, places: Sequence[Place]) -> Place:
        if len({each.common for each in places}) > 1:
            raise self._differs("arguments")
        columns = zip(*(each.numbers for each in places), strict=True)
        return places[0].with_numbers([self._affine(column) for column in columns])

    def _fit(self, leaves: Sequence[Any]) -> Any:
        if isinstance(leaves[0], Edge):
            return self._fit_edges(leaves)
        return self._affine(leaves) if is_number(leaves[0]) else leaves[0]

    def _affine(self, numbers: Sequence[Any]) -> Affine:
        a, b, c = numbers
        if a == b == c or (a != a and b != b and c != c):
            return Affine(a, 0)
        if not all(isinstance(each, int) for each in numbers) or b - a != c - b:
            raise NotCaptured(f"{a}, {b}, {c} in {[*LENGTHS]} steps: no integer affine in them")
        return Affine(a, b - a)

    def _fit_segments(self, rows: Sequence[Sequence[Segment]]) -> list[Segment]:
        if len({len(each) for each in rows}) > 1:
            raise self._differs("lists of tensors")
        found = []
        for column in zip(*rows, strict=True):
            slopes = {each.slopes for each in column if each.count > 1} or {column[0].slopes}
            if len(slopes) > 1:
                raise self._differs("lists of tensors")
            (slope,) = slopes
            if sum(map(bool, slope)) > 1:
                raise NotCaptured("tensors of a list that differ in two ways")
            place = self._fit_places([each.place for each in column])
            found.append(Segment(place, slope, self._affine([each.count for each in column])))
        return found

    # -- Loops -------------------------------------------------------------------------------------

    def _loop(self) -> bool:
        """Read a loop that begins here, if one does."""
        for period in range(1, self._growth + 1):
            lengths = [self._stretch(m, period) for m in range(3)]
            is_even = lengths[1] - lengths[0] == lengths[2] - lengths[1] == period
            if not is_even or lengths[0] // period < LENGTHS[0] - 2:
                continue
            found = list(self._candidates(period, lengths))
            if not found:
                continue
            _, skipped, ends, loop = min(found, key=lambda each: each[0])
            for _ in range(skipped):
                self._call()
            # The calls before it have numbers now.
            self._at, begins = list(ends), list(self._at)
            loop = self._read(period, begins, ends)
            self._mark(period, begins, ends)
            self.items.append(loop)
            self._growth -= period
            return True
        return False

    def _stretch(self, m: int, period: int) -> int:
        """Return how many operators from here on repeat with a period."""
        keys, begin = self._keys[m], self._at[m]
        k = begin
        while k + period < len(keys) and keys[k] == keys[k + period]:
            k += 1
        return k - begin + period if k > begin else 0

    def _candidates(self, period: int, lengths: Sequence[int]) -> Iterator[Any]:
        """Yield, for each place where steps may begin and end, how much they read and carry."""
        for skipped in range(2 * period):
            for dropped in range(2):
                counts = [(each - skipped) // period - dropped for each in lengths]
                if counts[0] < 2:
                    continue
                begins = [at + skipped for at in self._at]
                ends = [b + period * n for b, n in zip(begins, counts, strict=True)]
                where = [dict(each) for each in self._where]
                for m in range(3):  # as they will be
                    for k in range(skipped):
                        self._where[m][self._at[m] + k] = "op", len(self.items) + k
                try:
                    loop = self._read(period, begins, ends)
                except NotCaptured as error:
                    self._why = self._why or error
                else:
                    cost = len(loop.rows) + len(loop.slots), skipped + dropped * period
                    yield cost, skipped, ends, loop
                finally:
                    self._where = where

    def _mark(self, period: int, begins: Sequence[int], ends: Sequence[int]) -> None:
        for m in range(3):
            for k in range(begins[m], ends[m]):
                step, position = divmod(k - begins[m], period)
                self._where[m][k] = "loop", len(self.items), position, step

    def _read(self, period: int, starts: Sequence[int], ends: Sequence[int]) -> Loop:
        bodies = [_Steps(self, m, starts[m], ends[m], period) for m in range(3)]
        if len({each.common for each in bodies}) > 1:
            raise NotCaptured("steps that differ from length to length")
        first, columns = bodies[0], zip(*(each.numbers for each in bodies), strict=True)
        numbers = iter([self._affine(column) for column in columns])
        body = [
            (op, [next(numbers) if each is _NUMBER else each for each in leaves])
            for op, leaves in first.body
        ]
        begins = zip(*([begin for begin, *_ in each.slots] for each in bodies), strict=True)
        slots = [
            (self._fit_places(begin), new, shape)
            for (_, new, shape), begin in zip(first.slots, begins, strict=True)
        ]
        rows = [*map(self._fit_segments, zip(*(each.rows for each in bodies), strict=True))]
        fixed = [*map(self._fit_places, zip(*(each.fixed for each in bodies), strict=True))]
        return Loop(body, slots, rows, fixed, self._affine([each.steps for each in bodies]))


# Stands for a number, which may depend on the length.
_NUMBER = In("number", 0)


class _Steps:
    """The steps of a loop in one trace."""

    def __init__(self, reading: Reading, m: int, begin: int, end: int, period: int) -> None:
        self.reading, self.m, self.begin, self.end, self.period = reading, m, begin, end, period
        ops = reading.traces[m].ops[begin:end]
        self.steps = len(ops) // period
        self.slots: list[tuple[Place, In, Any]] = []
        self.rows: list[list[Segment]] = []
        self.fixed: list[Place] = []
        self.numbers: list[float] = []
        self.body: list[tuple[Op, list[Any]]] = []
        self._ops = ops
        for position in range(period):
            same = ops[position::period]
            if any(op.shapes != same[-1].shapes for op in same):
                raise NotCaptured(f"{same[0].target}, whose shapes change from step to step")
            columns = zip(*(op.leaves for op in same), strict=True)
            leaves = [self._leaf(same[-1], column) for column in columns]
            edges = [each for each in leaves if isinstance(each, In) and each is not _NUMBER]
            if same[-1].target is CUSTOM and any(each.kind != "body" for each in edges):
                raise NotCaptured("a function that begins in one step and ends in another")
            self.body.append((same[-1], leaves))

    @property
    def common(self) -> Any:
        """Return what traces of all lengths have in common."""
        body = tuple((op.target, str(op.shapes), tuple(leaves)) for op, leaves in self.body)
        slots = tuple((begin.common, new, shape) for begin, new, shape in self.slots)
        return body, slots, len(self.rows), len(self.fixed)

    def _leaf(self, op: Op, column: Sequence[Any]) -> Any:
        """Return an argument of a step, from that of each of them."""
        if is_number(column[0]):
            if any(each != column[0] and each == each for each in column):
                raise NotCaptured(f"{op.target}, which reads a number that depends on the step")
            self.numbers.append(column[0])
            return _NUMBER
        return self._edge(op, column) if isinstance(column[0], Edge) else column[0]

    def _edge(self, op: Op, edges: Sequence[Edge]) -> In:
        from_last = self._inside(edges[-1])
        if from_last is None:
            return self._from_outside(op, edges)
        step, position, own = from_last
        lag = self.steps - 1 - step
        for k, edge in enumerate(edges[lag:]):
            if self._inside(edge) != (k, position, own):
                raise NotCaptured(f"{op.target}, which reads other tensors in other steps")
        if lag == 0:
            return own
        if any(self._inside(edge) is not None for edge in edges[:lag]):
            raise NotCaptured(f"{op.target}, which reads other tensors in its first steps")
        begins = [self.reading._place(self.m, edge) for edge in edges[:lag]]
        return In("slot", self._slot(own, begins, self._shape(own, edges[-1])))

    def _inside(self, edge: Edge) -> tuple[int, int, In] | None:
        """Return the step and the position of what an edge reads, if that is in the loop."""
        if edge.kind != "op" or not self.begin <= edge.number < self.end:
            if edge.kind == "op" and edge.number >= self.end:
                raise NotCaptured("a step that reads what comes behind it")
            return None
        step, position = divmod(edge.number - self.begin, self.period)
        return step, position, In("body", position, edge.item, edge.cuts)

    def _shape(self, own: In, edge: Edge) -> Any:
        found = self._ops[edge.number - self.begin].shapes
        shape, dtype = found if own.item is None else found[own.item]
        for cut in own.cuts:
            middle = () if cut.size is None else (cut.size,)
            shape = (*shape[: cut.axis], *middle, *shape[cut.axis + 1 :])
        return tuple(shape), dtype

    def _slot(self, own: In, begins: Sequence[Place], shape: Any) -> int:
        """Return the number of the carry that holds what was computed some steps before."""
        # Carries of fewer steps before are those that this one becomes.
        new = own if len(begins) == 1 else In("slot", self._slot(own, begins[1:], shape))
        slot = begins[0], new, shape
        if slot not in self.slots:
            self.slots.append(slot)
        return self.slots.index(slot)

    def _from_outside(self, op: Op, edges: Sequence[Edge]) -> In:
        if any(self._inside(edge) is not None for edge in edges):
            raise NotCaptured(f"{op.target}, which reads other tensors in its last steps")
        places = [self.reading._place(self.m, edge) for edge in edges]
        if all(each == places[0] for each in places):
            if places[0] not in self.fixed:
                self.fixed.append(places[0])
            return In("fixed", self.fixed.index(places[0]))
        found = segments(places)
        if len(found) > 2:
            raise NotCaptured(f"{op.target}, which reads other tensors in each step")
        if found not in self.rows:
            self.rows.append(found)
        return In("row", self.rows.index(found))
