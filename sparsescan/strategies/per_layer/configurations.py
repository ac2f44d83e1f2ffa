"""Configurations: how the output of a layer is divided, and what moves between two layers.

DeePa, section 3: along samples, channels, height and width the output of a layer is cut into equal
parts; the numbers of parts are its configuration, and each worker computes one block. A block is
computed from a box of the layer's input, which may lie on other workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel.grid import bounds
from ..graph import MIXING, Graph, Layer

#: Parts along samples, channels, height and width.
Configuration = tuple[int, int, int, int]
Limits = tuple[int, int, int, int]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Beyond so many workers, images are cut by rows or as square as can be, and only so many
# workers are looked at to find the busiest.
MANY = 16

#: Ways to share a layer on the grids of integrated parallelism.
MODES = "batch", "model", "domain"


def image_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of one sample as channels, height and width."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (math.prod(shape), 1, 1)


def limits(layer: Layer, batch: int) -> Limits:
    """Return the most parts along each axis of the output of a layer."""
    channels, height, width = image_of(layer.shape)
    if layer.kind == "input":
        return 1, 1, 1, 1
    if layer.kind == "cell":
        # A state that is more than the hidden units is not cut.
        return batch, channels if layer.nnz == channels**2 else 1, 1, 1
    if layer.kind == "norm" and layer.nnz == layer.size:
        # Each channel of an image is shifted and scaled by itself, with parameters of all.
        return batch, 1, height, width
    if layer.kind in ("norm", "softmax") or _moves_elements(layer):
        return batch, 1, 1, 1
    return batch, channels, height, width


def allowed(layer: Layer, most: Limits, configurations: Integers) -> NDArray[np.bool_]:
    """Tell which configurations a layer can have; groups of a convolution are not cut across."""
    channels = configurations[:, 1]
    apart = (layer.groups % channels == 0) | (channels % layer.groups == 0)
    chosen: NDArray[np.bool_] = np.all(configurations <= np.array(most), axis=1) & apart
    return chosen


def on_grid(
    layers: Sequence[Layer],
    bounds: Sequence[Limits],
    rows: int,
    columns: int,
    modes: Collection[str] = MODES,
    first: bool = False,
) -> list[list[Configuration]]:
    """Return what each layer can have on a grid of workers, of which each column shares samples.

    In a layer by model each worker of a column has some channels, by domain some rows of images, by
    batch some of the samples; or the first row has all. If `first` is set, a layer that can be
    shared in the first of the modes is.
    """
    shared: dict[str, Configuration] = {
        "batch": (rows * columns, 1, 1, 1),
        "model": (columns, rows, 1, 1),
        "domain": (columns, 1, rows, 1),
    }
    ways = [shared[mode] for mode in modes] if rows > 1 else []
    alone, known = (columns, 1, 1, 1), dict[Any, list[Configuration]]()

    def choices(layer: Layer, most: Limits) -> list[Configuration]:
        if layer.kind == "input":
            return [(1, 1, 1, 1)]
        # In other rows than the first nothing would be left to do.
        every = ways if layer.kind in MIXING and ways else [*ways, alone]
        can = allowed(layer, most, np.array(every))
        fits = list(dict.fromkeys(itertools.compress(every, can)))
        return fits[:1] if first and fits and fits[0] == every[0] else fits

    for layer, most in zip(layers, bounds, strict=True):
        key = layer.kind, layer.groups, most
        if key not in known:
            known[key] = choices(layer, most)
    return [known[one.kind, one.groups, most] for one, most in zip(layers, bounds, strict=True)]


def reach(
    layer: Layer, source: Layer, axis: int, start: Any, stop: Any, first: int = 0
) -> tuple[Any, Any]:
    """Return the range of the output of `source` that a range of the output of `layer` needs.

    Windows may reach beyond it. The axes are samples, channels, height and width. In a
    concatenation, `first` is the first channel that is this source's.
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
    if layer.kind in ("linear", "flatten", "softmax", "cell"):
        return whole
    if layer.kind == "norm" and (layer.nnz != layer.size or layer.shape != source.shape):
        return whole
    return start - first, stop - first


def _moves_elements(layer: Layer) -> bool:
    """Tell whether it changes the axes of images in another way than to join all of them."""
    return layer.kind == "flatten" and len(layer.shape) > 1


class Axis:
    """Overlaps of the parts of an axis with the ranges of it that are needed, by code.

    The ranges may reach beyond the axis; `length` is how long each is inside of it.
    """

    def __init__(self, of: Configurations, size: int, start: Integers, stop: Integers) -> None:
        self.size = size
        parts = of.bounds(size)
        ranges = np.clip(start, 0, size), np.clip(stop, 0, size)
        self.length: Floats = (ranges[1] - ranges[0]).clip(0).astype(np.float64)
        self._ends = *parts, *ranges
        # Starts of the divisors into which the axis, and what is needed of it, can be cut.
        own, needed = (of.starts[of.starts < len(ends[0])] for ends in (parts, ranges))
        self._sent, counts = _overlaps(parts, ranges, needed)
        ways = _overlaps(ranges, parts, own)[1]
        self._most = np.stack(
            [np.maximum.reduceat(counts, own), np.maximum.reduceat(ways, needed).T]
        )

    def shared(self, a: Integers, b: Integers) -> Integers:
        """Return the length of the overlaps of parts and ranges, by code."""
        i, j, k, m = self._ends
        lengths: Integers = np.minimum(j[a], m[b]) - np.maximum(i[a], k[b])
        return np.maximum(lengths, 0, out=lengths)

    def sent(self, codes: Integers, divisors: Integers) -> Integers:
        """Return sums of the overlaps of parts, by code, with all ranges of some divisors.

        The shape is ``(*codes.shape, len(divisors))``.
        """
        sums: Integers = self._sent[codes][..., divisors]
        return sums

    def messages(self, a: Integers, b: Integers) -> Integers:
        """Return the most ranges that overlap with a part, and parts with a range.

        `a` and `b` number divisors of parts and of ranges; the shape is ``(2, len(a), len(b))``.
        """
        most: Integers = self._most[:, a[:, None], b]
        return most


def _overlaps(
    own: tuple[Integers, Integers], others: tuple[Integers, Integers], starts: Integers
) -> tuple[Integers, Integers]:
    """Return lengths of the overlaps of each range with all other ranges of each divisor.

    Besides, their number; the shape of both is ``(len(own[0]), len(starts))``. The other ranges of
    a divisor lie from its start to the next, and do not decrease.
    """
    (i, j), (lengths, counts) = own, np.empty((2, len(own[0]), len(starts)), np.int64)
    for column, (first, last) in enumerate(pairwise([*starts.tolist(), len(others[0])])):
        start, stop = (ends[first:last] for ends in others)
        before, behind = (np.append(0, np.cumsum(ends)) for ends in (start, stop))
        # Those that overlap, then those of them that begin before the range, or end in it.
        low = stop.searchsorted(i, "right")
        high = np.maximum(start.searchsorted(j, "left"), low)
        begun = start.searchsorted(i, "right").clip(low, high)
        ended = stop.searchsorted(j, "right").clip(low, high)
        upper = behind[ended] - behind[low] + (high - ended) * j
        lower = before[high] - before[begun] + (begun - low) * i
        lengths[:, column], counts[:, column] = upper - lower, high - low
    return lengths, counts


class Configurations:
    """Configurations of some workers, ``all`` of shape ``(count, 4)``, and the blocks of each.

    If none are given, they are those whose number of blocks is a divisor of the workers, with at
    most so many parts along each axis; of more than 16 workers, those in which the parts of an
    image are rows, or as square as can be.

    A range along one axis has a code: 0 for the samples of a worker that is left over, then the
    parts for every divisor of the workers one after the other. Overlaps of ranges are looked up by
    their codes, up to those of as many parts as an axis has entries.
    """

    def __init__(
        self, workers: int, given: Sequence[Configuration] | None = None, most: Limits | None = None
    ) -> None:
        self.workers = workers
        # Workers of which one is assumed to be the busiest.
        self.looked_at = _spread(workers)
        self._known: dict[tuple[int, bytes, bytes], Axis] = {}
        most = most or (workers,) * 4
        if given is None:
            d = np.array([d for d in range(1, min(workers, max(most)) + 1) if workers % d == 0])
        else:
            d = np.unique([1, *itertools.chain.from_iterable(given)])
        self.divisors = d
        # The codes of the first parts of each divisor.
        self.starts = 1 + np.cumsum(d) - d
        self._part, self._parts = np.concatenate([np.arange(k) for k in d]), np.repeat(d, d)
        self.all: Integers = self._every(most) if given is None else np.array(given)

    def _every(self, most: Limits) -> Integers:
        samples, channels, rows, columns = (self.divisors[self.divisors <= k] for k in most)
        images = self._images(rows.tolist(), columns.tolist())
        every = [
            (n, c, h, w)
            for n in samples.tolist()
            for c in channels.tolist()
            for h, w in images
            if self.workers % (n * c * h * w) == 0
        ]
        return np.array(every)

    def _images(self, rows: Sequence[int], columns: Sequence[int]) -> list[tuple[int, int]]:
        """Return the rows and columns into which images are cut."""
        ways = [(h, w) for h in rows for w in columns if self.workers % (h * w) == 0]
        if self.workers <= MANY:
            return ways
        # As square as can be: fewer columns than rows, but more than with any other such cut.
        square = {h * w: (h, w) for h, w in sorted(ways, reverse=True) if h >= w}
        return sorted({*square.values(), *(way for way in ways if way[1] == 1)})

    def bounds(self, size: int) -> tuple[Integers, Integers]:
        """Return the bounds of the parts of an axis, by code."""
        some = slice(int(self._parts.searchsorted(size, "right")))
        start, stop = bounds(size, self._part[some], self._parts[some])
        return np.append(0, start), np.append(0, stop)

    def axis(self, size: int, start: Integers, stop: Integers) -> Axis:
        """Return the overlaps of the parts of an axis with ranges that are needed, by code."""
        key = size, start.tobytes(), stop.tobytes()
        if key not in self._known:
            self._known[key] = Axis(self, size, start, stop)
        return self._known[key]

    def divisors_of(self, chosen: Integers) -> Integers:
        """Return numbers of the divisors along each axis, shape ``(len(chosen), 4)``."""
        numbers: Integers = self.divisors.searchsorted(self.all[chosen])
        return numbers

    def places(self, chosen: Integers, workers: Integers) -> Integers:
        """Return each worker's part along each axis, ``(len(chosen), len(workers), 4)``."""
        # Division takes longest, and less of small integers, of which -128 is one, but not 128.
        grid = self.all[chosen][:, None].astype(np.min_scalar_type(~self.workers))
        inner = np.cumprod(grid[..., ::-1], axis=-1, dtype=grid.dtype)[..., ::-1] // grid
        places: Integers = workers[:, None].astype(grid.dtype) // inner % grid
        return places

    def codes_of(self, chosen: Integers, workers: Integers) -> Integers:
        """Return codes of each worker's parts, ``(len(chosen), len(workers), 4)``."""
        starts = self.starts[self.divisors_of(chosen)]
        codes: Integers = starts[:, None] + self.places(chosen, workers)
        idle = workers >= self.all[chosen].prod(axis=1)[:, None]
        codes[..., 0][idle] = 0
        return codes

    def lengths(self, shape: Sequence[int], chosen: Integers, workers: Integers) -> Integers:
        """Return sizes of each worker's block, ``(len(chosen), len(workers), 4)``."""
        codes = self.codes_of(chosen, workers)
        ends = [self.bounds(size) for size in shape]
        return np.stack([(j - i)[codes[..., k]] for k, (i, j) in enumerate(ends)], axis=-1)


def _spread(count: int) -> Integers:
    """Return all numbers below a count, or :data:`MANY` as far apart as can be."""
    if count <= MANY:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, MANY).round().astype(np.int64))


class Moves:
    """Entries that move along an edge of a graph, for any two configurations of its ends.

    The edge is that `layer` reads `source`, in a concatenation as the channels from `first` on. It
    has overlaps along each of the `axes`, and the `size` of the output of the source.
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

        `a` and `b` number configurations of the source and of the layer; the shape of both counts
        is ``(len(a), len(workers), len(b))``.
        """
        first, second = self._of.codes_of(a, workers), self._of.codes_of(b, workers)
        divisors, kept = self._of.divisors_of(b), self._overlaps(first, second)
        sent = _product(
            axis.sent(first[..., k], divisors[:, k]) for k, axis in enumerate(self.axes)
        )
        return sent - kept, self.needed(b, workers).T - kept

    def entries_within(
        self, a: Integers, b: Integers, workers: Integers, node: int
    ) -> tuple[Floats, Floats]:
        """Count entries of :meth:`entries` that workers send to, and receive from, their node."""
        sent = received = np.zeros((len(a), len(workers), len(b)))
        own = [self._of.codes_of(x, workers) for x in (a, b)]
        for place in range(1, node):
            mates = workers // node * node + (workers + place) % node
            others = mates < self._of.workers
            theirs = [self._of.codes_of(x, np.where(others, mates, workers)) for x in (a, b)]
            sent = sent + self._overlaps(own[0], theirs[1]) * others[:, None]
            received = received + self._overlaps(theirs[0], own[1]) * others[:, None]
        return sent, received

    def _overlaps(self, first: Integers, second: Integers) -> Floats:
        """Return the volumes of overlaps of blocks with boxes, by codes, of the same workers."""
        return _product(
            axis.shared(first[:, :, None, k], second.swapaxes(0, 1)[..., k])
            for k, axis in enumerate(self.axes)
        )

    def messages(self, a: Integers, b: Integers) -> Floats:
        """Return the most blocks that overlap with one, its own included, (len(a), len(b))."""
        first, second = self._of.divisors_of(a), self._of.divisors_of(b)
        axes = enumerate(self.axes)
        ways = _product(axis.messages(first[:, k], second[:, k]) for k, axis in axes)
        most: Floats = ways.max(axis=0)
        return most


def _product(factors: Iterable[Any]) -> Floats:
    """Return a product in float64, which all counts fit."""
    product: Floats = math.prod(factors, start=np.ones(()))
    return product


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
