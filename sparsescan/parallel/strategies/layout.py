"""Layout: how a grid of workers shares every layer, and what each of them then sends."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .collectives import Range, gather_words, overlap, parts, reduce_words
from .equations import MIXING
from .graph import Graph, Layer

__all__ = ["STATES", "Layout", "Windows", "split", "units", "windows"]

#: How the workers of a column hold an activation of their samples: all of it each, some samples,
#: some channels (of a layer with weights: the model), or some rows of the images (the domain).
STATES = ("whole", "samples", "channels", "rows")
# The whole of a layer with weights is on every worker only if a column is a single one.
_WORDS = {"whole": "batch", "samples": "batch", "channels": "model", "rows": "domain"}


def units(graph: Graph) -> list[int]:
    """Of every layer, in how many parts at most its channels can be cut, flattened or not."""
    found: list[int] = []
    for layer in graph.layers:
        kept = layer.inputs and layer.kind not in (*MIXING, "concat")
        found.append(found[layer.inputs[0]] if kept else layer.shape[0])
    return found


def split(
    state: str, samples: int, shape: tuple[int, ...], channels: int
) -> tuple[tuple[int, ...], int]:
    """The shape in which an activation is cut into parts, and along which axis."""
    if state == "channels":
        return (samples, channels, int(np.prod(shape)) // channels), 1
    return (samples, *shape), 2 if state == "rows" else 0


class Windows(NamedTuple):
    """Rows of a convolution or pooling that workers share; one entry a worker.

    Attributes
    ----------
    inputs, outputs : list of tuple of int
        Those that it owns, of the input and of the output.
    makes : list of tuple of int
        Outputs that it computes: pooling, whose Jacobian depends on the input, those that read
        what it owns, too.
    reads : list of tuple of int
        Inputs from which it computes them, padding included.
    asks : list of tuple of int
        Outputs whose gradients it needs, for those of its inputs.
    """

    inputs: list[Range]
    outputs: list[Range]
    makes: list[Range]
    reads: list[Range]
    asks: list[Range]

    def needs(self) -> list[Range]:
        """Of `reads`, what is no padding."""
        return [overlap(range_, (0, self.inputs[-1][1])) for range_ in self.reads]


def windows(layer: Layer, height: int, workers: int) -> Windows:
    """Who computes which rows of a layer, from an input of this height."""
    kernel, stride, padding = layer.kernel[0], layer.stride[0], layer.padding[0]
    inputs, outputs = parts(height, workers), parts(layer.shape[1], workers)
    last = layer.shape[1]
    asks = [
        overlap((-(-(a + padding - kernel + 1) // stride), (b - 1 + padding) // stride + 1), whole)
        for a, b in inputs
        for whole in [(0, last)]
    ]
    makes = outputs
    if layer.kind == "pool":
        makes = [
            (min(a, c), max(b, d)) if c < d else (a, b)
            for (a, b), (c, d) in zip(outputs, asks, strict=True)
        ]
        asks = makes
    reads = [(a * stride - padding, (b - 1) * stride - padding + kernel) for a, b in makes]
    return Windows(inputs, outputs, makes, reads, asks)


class Layout(NamedTuple):
    """A grid, and how each layer is shared on it.

    Worker ``j·P_r + i`` has row ``i`` and column ``j``.

    Attributes
    ----------
    rows, columns : int
        ``P_r`` and ``P_c``.
    states : tuple of str
        Of every layer's output, one of :data:`STATES`; the input is whole.
    """

    rows: int
    columns: int
    states: tuple[str, ...]

    def need(self, graph: Graph, k: int) -> str:
        """How layer `k` must have its input: a share of the model needs the whole of it."""
        return self._needed(graph, k, self.states[k])

    @staticmethod
    def _needed(graph: Graph, k: int, state: str) -> str:
        mixing = graph.layers[k].kind in MIXING
        return "whole" if mixing and state == "channels" else state

    def describe(self, graph: Graph) -> str:
        """In a few words: the grid, and the layers with weights."""
        numbers = [k for k, layer in enumerate(graph.layers) if layer.kind in MIXING]
        words = []
        for state, group in groupby(numbers, lambda k: self.states[k]):
            names = [graph.layers[k].name for k in group]
            ends = names[0] if len(names) == 1 else f"{names[0]}–{names[-1]}"
            words.append(f"{_WORDS[state]} in {ends}")
        return ", ".join([f"{self.rows} × {self.columns}", *words])

    def sent(self, graph: Graph, batch: int, itemsize: int) -> NDArray[np.int64]:
        """Bytes that each worker sends in a step, of a chain; message by message."""
        found = np.zeros((self.columns, self.rows), np.int64)
        counts = [b - a for a, b in parts(batch, self.columns)]
        needed, cut, last = graph.trained, units(graph), len(graph.layers) - 1
        # Layers that are alike send the same.
        alike = Counter(zip(graph.alike[1:], self.states[:-1], self.states[1:], strict=True))
        for (k, before, state), times in alike.items():
            layer, read, need = graph.layers[k], graph.layers[k - 1], self._needed(graph, k, state)
            for column, samples in enumerate(counts):
                mine = np.zeros(self.rows, np.int64)
                if before != need:
                    mine += self._gather(before, samples, read, cut[k - 1])
                    if needed[k - 1]:
                        mine += self._gather(need, samples, read, cut[k - 1])
                if need != state and needed[k - 1]:
                    mine += reduce_words(_lengths(parts(samples * read.size, self.rows)))
                if need == "rows" and layer.kind in ("conv", "pool"):
                    mine += self._halo(layer, read, samples, needed[k - 1])
                found[column] += times * mine
            if layer.weights:
                found += times * self._weights(layer, state)
        if self.states[last] in ("channels", "rows"):
            for column, samples in enumerate(counts):
                found[column] += self._gather(
                    self.states[last], samples, graph.layers[last], cut[last]
                )
        loss = reduce_words(_lengths(parts(1, found.size))).reshape(found.shape)
        sent: NDArray[np.int64] = (found * itemsize + loss * 8).reshape(-1)
        return sent

    def _gather(self, state: str, samples: int, layer: Layer, channels: int) -> NDArray[np.int64]:
        """Numbers that each worker of a column sends so that all have the whole."""
        if state == "whole":
            return np.zeros(self.rows, np.int64)
        shape, axis = split(state, samples, layer.shape, channels)
        each = samples * layer.size // shape[axis]
        return gather_words(_lengths(parts(shape[axis], self.rows)) * each)

    def _halo(self, layer: Layer, read: Layer, samples: int, back: bool) -> NDArray[np.int64]:
        found = windows(layer, read.shape[1], self.rows)
        row = samples * read.size // read.shape[1]
        sent = row * _given(found.inputs, found.needs())
        if back:
            sent += samples * layer.size // layer.shape[1] * _given(found.outputs, found.asks)
        return sent

    def _weights(self, layer: Layer, state: str) -> NDArray[np.int64]:
        """Numbers that each worker sends for the sum of gradients of the parameters."""
        shape = self.columns, self.rows
        if state in ("samples", "rows"):
            return reduce_words(_lengths(parts(layer.weights, self.rows * self.columns))).reshape(
                shape
            )
        shares = [layer.weights] * self.rows
        if state == "channels":
            each = layer.weights // layer.shape[0]
            shares = [each * (b - a) for a, b in parts(layer.shape[0], self.rows)]
        sizes = np.array([_lengths(parts(share, self.columns)) for share in shares])
        return reduce_words(sizes).T


def _lengths(ranges: list[Range]) -> NDArray[np.int64]:
    return np.array([b - a for a, b in ranges], np.int64)


def _given(owned: list[Range], needed: list[Range]) -> NDArray[np.int64]:
    """How many rows each worker gives to others."""
    shared = np.zeros(len(owned), np.int64)
    for i, mine in enumerate(owned):
        ranges = [overlap(mine, other) for j, other in enumerate(needed) if j != i]
        shared[i] = sum(b - a for a, b in ranges)
    return shared
