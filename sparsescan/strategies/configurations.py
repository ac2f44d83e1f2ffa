"""Configurations: how the output of a layer is divided, and what moves between two layers.

DeePa, section 3: along samples, channels, height and width the output of a layer is cut into equal
parts; the numbers of parts are its configuration, and each worker computes one block. What a block
is computed from is a box of the layer's input, which may lie on other workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .boxes import Box, bounds
from .graph import Graph, Layer

__all__ = [
    "Configuration",
    "Configurations",
    "Moves",
    "allowed",
    "box_needed",
    "edges_of",
    "image_of",
    "limits",
    "reach",
]

#: Parts along samples, channels, height and width.
Configuration = tuple[int, int, int, int]
Limits = tuple[int, int, int, int]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Beyond so many workers, images are cut into parts that are as square as can be, and only so many
# workers are looked at to find the busiest.
_MANY = 16
# Along an axis, among all configurations; tables grow with its square.
_MOST_PARTS = 512


def image_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of one sample as channels, height and width."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (math.prod(shape), 1, 1)


def limits(layer: Layer, batch: int) -> Limits:
    """Return the most parts along each axis of the output of a layer."""
    channels, height, width = image_of(layer.shape)
    if layer.kind == "input":
        return 1, 1, 1, 1
    if layer.kind in ("norm", "softmax", "cell") or _moves_elements(layer):
        return batch, 1, 1, 1
    return batch, channels, height, width


def allowed(layer: Layer, most: Limits, configurations: Integers) -> NDArray[np.bool_]:
    """Tell which configurations a layer can have; groups of a convolution are not cut across."""
    channels = configurations[:, 1]
    apart = (layer.groups % channels == 0) | (channels % layer.groups == 0)
    chosen: NDArray[np.bool_] = np.all(configurations <= np.array(most), axis=1) & apart
    return chosen


def reach(
    layer: Layer, source: Layer, axis: int, start: Any, stop: Any, first: int = 0
) -> tuple[Any, Any]:
    """Return the range of the output of `source` that a range of the output of `layer` needs.

    Windows may reach beyond it.

    Parameters
    ----------
    layer, source : Layer
        The layer, and one that it reads.
    axis : int
        0 for samples, 1 for channels, 2 for height, 3 for width.
    start, stop : int or ndarray of int
        The range, or many.
    first : int
        In a concatenation, the first channel that is this source's.
    """
    size = (0, *image_of(source.shape))[axis]
    whole = 0 * start, 0 * stop + size
    if axis == 0:
        return start, stop
    if axis > 1 and layer.kind in ("conv", "pool"):
        k, s, p = (pair[axis - 2] for pair in (layer.kernel, layer.stride, layer.padding))
        return start * s - p, (stop - 1) * s - p + k
    if axis == 1 and layer.kind == "conv":
        outs, ins = layer.shape[0] // layer.groups, size // layer.groups
        return start // outs * ins, -(-stop // outs) * ins
    if axis == 1 and layer.kind == "flatten" and not _moves_elements(layer):
        area = math.prod(image_of(source.shape)[1:])
        return start // area, -(-stop // area)
    if layer.kind in ("linear", "flatten", "norm", "softmax", "cell"):
        return whole
    return start - first, stop - first


def _moves_elements(layer: Layer) -> bool:
    """Tell whether it changes the axes of images in another way than to join all of them."""
    return layer.kind == "flatten" and len(layer.shape) > 1


def box_needed(layer: Layer, source: Layer, block: Box) -> Box:
    """Return the box of its input that a block of the output of a layer needs."""
    return tuple(
        (int(i), int(j))
        for i, j in (
            reach(layer, source, axis, np.int64(start), np.int64(stop))
            for axis, (start, stop) in enumerate(block)
        )
    )


class Axis(NamedTuple):
    """Overlaps of the parts of an axis with the ranges of it that are needed.

    Attributes
    ----------
    size : int
        Length of the axis.
    parts, ranges : tuple of ndarray, shape (codes,)
        Bounds of every part, and of every range inside the axis.
    sent : ndarray, shape (codes, divisors)
        Sum of the overlaps of a part with all ranges of so many parts.
    messages : tuple of ndarray, shape (divisors, divisors)
        Most ranges that overlap with a part, and most parts that overlap with a range.
    """

    size: int
    parts: tuple[Integers, Integers]
    ranges: tuple[Integers, Integers]
    sent: Floats
    messages: tuple[Floats, Floats]

    @property
    def length(self) -> Floats:
        """Length of every range."""
        return (self.ranges[1] - self.ranges[0]).clip(0).astype(np.float64)

    def shared(self, a: Integers, b: Integers) -> Floats:
        """Return the length of the overlaps of parts and ranges, by code."""
        (i, j), (k, m) = self.parts, self.ranges
        lengths: Floats = np.maximum(np.minimum(j[a], m[b]) - np.maximum(i[a], k[b]), 0.0)
        return lengths


class Configurations:
    """Configurations of some workers, and the blocks of each worker.

    Parameters
    ----------
    workers : int
        Number of workers.
    given : sequence of tuple of int, optional
        The configurations; by default those whose number of blocks is a divisor of the workers,
        with at most 512 parts along an axis; of more than 16 workers, those in which the parts of
        an image are as square as can be.

    Attributes
    ----------
    all : ndarray of int64, shape (count, 4)
        The configurations.

    Notes
    -----
    A range along one axis has a code: the parts for every divisor of the workers one after the
    other, and one code more for the samples of a worker that is left over. Overlaps of ranges are
    looked up by their codes.
    """

    def __init__(self, workers: int, given: Sequence[Configuration] | None = None) -> None:
        self.workers = workers
        self._known: dict[tuple[int, bytes, bytes], Axis] = {}
        if given is None:
            most = min(workers, _MOST_PARTS)
            d = np.array([d for d in range(1, most + 1) if workers % d == 0])
        else:
            d = np.unique([1, *itertools.chain.from_iterable(given)])
        self.divisors = d
        self._starts = np.cumsum(d) - d
        self._part = np.concatenate([np.arange(k) for k in d])
        self._parts = np.repeat(d, d)
        self.all: Integers = self._every() if given is None else np.array(given)

    def _every(self) -> Integers:
        d = self.divisors
        grid: Integers = np.stack(np.meshgrid(d, d, d, d, indexing="ij"), axis=-1).reshape(-1, 4)
        grid = grid[self.workers % grid.prod(axis=1) == 0]
        if self.workers > _MANY:
            area, width = grid[:, 2] * grid[:, 3], grid[:, 3]
            best = {
                a: min((w for w in d.tolist() if a % w == 0), key=lambda w: abs(a / w - w))
                for a in set(area.tolist())
            }
            grid = grid[width == [min(best[a], a // best[a]) for a in area.tolist()]]
        return grid

    @property
    def codes(self) -> int:
        """Number of codes."""
        return len(self._part) + 1

    def bounds(self, size: int) -> tuple[Integers, Integers]:
        """Return the bounds of the parts of an axis, by code."""
        start, stop = bounds(size, self._part, self._parts)
        return np.append(start, 0), np.append(stop, 0)

    def axis(self, size: int, start: Integers, stop: Integers) -> Axis:
        """Return the overlaps of the parts of an axis with ranges that are needed, by code."""
        key = size, start.tobytes(), stop.tobytes()
        if key not in self._known:
            parts = self.bounds(size)
            ranges = np.clip(start, 0, size), np.clip(stop, 0, size)
            every = np.arange(self.codes)
            axis = Axis(size, parts, ranges, np.empty(0), (np.empty(0), np.empty(0)))
            shared = axis.shared(every[:, None], every)
            met = (shared > 0).astype(np.float64)
            sent = self.sums(shared)
            messages = self.maxima(self.sums(met)), self.maxima(self.sums(met.T)).T
            self._known[key] = axis._replace(sent=sent, messages=messages)
        return self._known[key]

    def sums(self, table: Floats) -> Floats:
        """Return sums over the codes on the last axis, for every divisor."""
        sums: Floats = np.add.reduceat(table[..., :-1], self._starts, axis=-1)
        return sums

    def maxima(self, table: Floats) -> Floats:
        """Return maxima over the codes on the first axis, for every divisor."""
        maxima: Floats = np.maximum.reduceat(table[:-1], self._starts, axis=0)
        return maxima

    def divisors_of(self, chosen: Integers) -> Integers:
        """Return numbers of the divisors along each axis, shape ``(len(chosen), 4)``."""
        numbers: Integers = self.divisors.searchsorted(self.all[chosen])
        return numbers

    def places(self, chosen: Integers, workers: Integers) -> Integers:
        """Return each worker's part along each axis, ``(len(chosen), len(workers), 4)``."""
        grid = self.all[chosen][:, None]
        inner = np.cumprod(grid[..., ::-1], axis=-1)[..., ::-1] // grid
        places: Integers = workers[:, None] // inner % grid
        return places

    def codes_of(self, chosen: Integers, workers: Integers) -> Integers:
        """Return codes of each worker's parts, ``(len(chosen), len(workers), 4)``."""
        starts = self._starts[self.divisors_of(chosen)]
        codes: Integers = starts[:, None] + self.places(chosen, workers)
        idle = workers >= self.all[chosen].prod(axis=1)[:, None]
        codes[..., 0][idle] = self.codes - 1
        return codes

    def lengths(self, shape: Sequence[int], chosen: Integers, workers: Integers) -> Integers:
        """Return sizes of each worker's block, ``(len(chosen), len(workers), 4)``."""
        codes = self.codes_of(chosen, workers)
        ends = [self.bounds(size) for size in shape]
        return np.stack([(j - i)[codes[..., k]] for k, (i, j) in enumerate(ends)], axis=-1)

    @cached_property
    def looked_at(self) -> Integers:
        """Workers of which one is assumed to be the busiest."""
        if self.workers <= _MANY:
            return np.arange(self.workers)
        return np.unique(np.linspace(0, self.workers - 1, _MANY).round().astype(np.int64))


class Moves:
    """Entries that move along an edge of a graph, for any two configurations of its ends.

    Parameters
    ----------
    configurations : Configurations
        Configurations of the workers.
    layer, source : Layer
        The edge: `layer` reads `source`.
    batch : int
        Samples.
    first : int
        In a concatenation, the first channel that is this source's.

    Attributes
    ----------
    axes : list of Axis
        Overlaps along each axis.
    size : int
        Entries of the output of the source.
    """

    def __init__(
        self,
        configurations: Configurations,
        layer: Layer,
        source: Layer,
        batch: int,
        first: int = 0,
    ) -> None:
        self._of = configurations
        inputs, outputs = (batch, *image_of(source.shape)), (batch, *image_of(layer.shape))
        self.axes = []
        for axis, (size, out) in enumerate(zip(inputs, outputs, strict=True)):
            start, stop = reach(layer, source, axis, *configurations.bounds(out), first)
            self.axes.append(configurations.axis(size, start, stop))
        self.size = math.prod(inputs)

    def needed(self, b: Integers, workers: Integers) -> Floats:
        """Count entries that workers need in configurations `b`, ``(len(b), len(workers))``."""
        codes = self._of.codes_of(b, workers)
        return _product(axis.length[codes[..., k]] for k, axis in enumerate(self.axes))

    def entries(self, a: Integers, b: Integers, workers: Integers) -> tuple[Floats, Floats]:
        """Count entries that workers send to others, and that they receive from them.

        Parameters
        ----------
        a, b : ndarray of int64
            Numbers of configurations of the source and of the layer.
        workers : ndarray of int64
            Numbers of the workers.

        Returns
        -------
        sent, received : ndarray, shape (len(a), len(workers), len(b))
        """
        first = self._of.codes_of(a, workers)[:, :, None]
        second = self._of.codes_of(b, workers).swapaxes(0, 1)
        divisors = self._of.divisors_of(b)
        kept = _product(
            axis.shared(first[..., k], second[..., k]) for k, axis in enumerate(self.axes)
        )
        sent = _product(
            axis.sent[first[:, :, 0, k]].take(divisors[:, k], axis=-1)
            for k, axis in enumerate(self.axes)
        )
        return sent - kept, self.needed(b, workers).T - kept

    def messages(self, a: Integers, b: Integers) -> Floats:
        """Return the most blocks that overlap with one, its own included, (len(a), len(b))."""
        of = self._of
        first, second = of.divisors_of(a)[:, None], of.divisors_of(b)
        sends, receives = (
            _product(
                table[first[..., k], second[:, k]]
                for k, table in enumerate(axis.messages[way] for axis in self.axes)
            )
            for way in (0, 1)
        )
        most: Floats = np.maximum(sends, receives)
        return most


def _product(factors: Iterable[Floats]) -> Floats:
    return reduce(np.multiply, factors)


def edges_of(graph: Graph) -> list[tuple[int, int, int]]:
    """Return edges: source, layer, and the source's first channel in a concatenation."""
    edges = []
    for k, layer in enumerate(graph.layers):
        first = 0
        for j in layer.inputs:
            edges.append((j, k, first))
            if layer.kind == "concat":
                first += graph.layers[j].shape[0]
    return edges
