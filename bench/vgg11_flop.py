"""The FLOP of every step of a scan, by static analysis: from patterns, without any value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsescan import Pattern, Schedule
from sparsescan.jacobians import Conv2d, Operator, ReLU, Sequential
from sparsescan.symbolic.pattern import _EXACT, Products, multiply_adds

Interval = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """An operation of a schedule, ``[start, stop) = [start, mid) ◇ [mid, stop)``."""

    level: str  # of the schedule
    start: int  # elements as a Schedule numbers them
    mid: int
    stop: int
    label: str  # the layers of the product, or of what a vector is multiplied by
    flop: int  # twice its multiply-adds
    dense_flop: int  # its FLOP if no matrix were sparse
    critical: bool  # whether it is in that run of its level that has the most FLOP
    estimated: bool  # whether a product in it counts as full, so that `flop` may be too high

    @property
    def operands(self) -> tuple[Interval, Interval]:
        """The earlier elements, and those that they are multiplied by from the left."""
        return (self.start, self.mid), (self.mid, self.stop)

    @property
    def vector(self) -> bool:
        """Whether the gradient is in it."""
        return self.start == 0


class Analysis:
    """Counts the FLOP of schedules for a chain.

    A product that takes more than ten million multiply-adds and seems to be more than half full
    counts as full, since that is how it would be stored; here it takes no memory. Patterns and the
    names of layers go from the last layer to the first.
    """

    def __init__(self, patterns: Sequence[Pattern], names: Sequence[str]) -> None:
        # Patterns of the elements ``(k, k + 1)``, and of the products that schedules have so far.
        self.patterns = {(k, k + 1): pattern for k, pattern in enumerate(patterns, 1)}
        self._names = names
        self._full: set[Interval] = set()
        self._products = Products()

    def steps(self, schedule: Schedule) -> list[Step]:
        """All operations of a schedule, in their order."""
        steps = []
        for level in schedule.levels:
            ops = level.ops.tolist()
            flop = [2 * self._multiply_adds(*op) for op in ops]
            longest = int(np.add.reduceat(flop, level.runs[:-1]).argmax())
            critical = range(level.runs[longest], level.runs[longest + 1])
            for i, (start, mid, stop) in enumerate(ops):
                rows, inner = self.patterns[mid, stop].shape
                cols = 1 if start == 0 else self.patterns[start, mid].shape[1]
                steps.append(
                    Step(
                        level=level.name,
                        start=start,
                        mid=mid,
                        stop=stop,
                        label=self._label(start or mid, stop),
                        flop=flop[i],
                        dense_flop=2 * rows * inner * cols,
                        critical=i in critical,
                        estimated=bool(self._full & {(start, mid), (mid, stop)}),
                    )
                )
        return steps

    def _label(self, start: int, stop: int) -> str:
        first, last = self._names[stop - 2], self._names[start - 1]
        return first if first == last else f"{first}–{last}"

    def _multiply_adds(self, start: int, mid: int, stop: int) -> int:
        right = self.patterns[mid, stop]
        if start == 0:
            return right.nnz
        left = self.patterns[start, mid]
        work = multiply_adds(right, left)
        if (start, stop) not in self.patterns:
            out = self.patterns[start, stop] = self._products(right, left)
            counted = out.kind == "dense" and "diagonal" not in (left.kind, right.kind)
            if (work > _EXACT and counted) or self._full & {(start, mid), (mid, stop)}:
                self._full.add((start, stop))
        return work


def layer_names(net: Sequential) -> list[str]:
    """Names of the layers, from the last to the first: ``conv8``, ``relu8``, ``pool5``, …."""
    counts = {"conv": 0, "relu": 0, "pool": 0}
    names = []
    for op in net.layers:
        kind = {Conv2d: "conv", ReLU: "relu"}.get(type(op), "pool")
        counts[kind] += 1
        names.append(f"{kind}{counts[kind]}")
    return names[::-1]


def baseline(net: Sequential) -> list[dict[str, int | str]]:
    """Count back-propagation's FLOP in every layer but the first, from the last one on.

    Back-propagation multiplies by all weights, zero or not: a gradient operator has as many
    multiply-adds as the layer's Jacobian has entries before pruning.
    """
    return [
        {"label": name, "flop": 2 * _nnz_unpruned(op), "dense_flop": 2 * op.shape[0] * op.shape[1]}
        for name, op in zip(layer_names(net)[:-1], net.layers[:0:-1], strict=True)
    ]


def _nnz_unpruned(op: Operator) -> int:
    if not isinstance(op, Conv2d):
        return op.nnz
    full = Conv2d(op.in_channels, op.out_channels, 3, padding=1, input_shape=op.input_shape)
    return full.nnz
