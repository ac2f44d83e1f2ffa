"""Layout: how a grid of workers shares every layer, and what each of them then sends."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .collectives import Range, gather_words, overlap, parts, reduce_words
from .equations import MIXING
from .graph import Graph, Layer

__all__ = ["STATES", "Layout", "Moves", "Windows", "live", "split", "units", "windows"]

#: How the workers of a column hold an activation of their samples: all of it each, some samples,
#: some channels (of a layer with weights: the model), or some rows of the images (the domain).
STATES = ("whole", "samples", "channels", "rows")
# The whole of a layer with weights is on every worker only if a column is a single one.
_WORDS = {"whole": "batch", "samples": "batch", "channels": "model", "rows": "domain"}


def units(graph: Graph) -> list[int]:
    """Of every layer, in how many parts at most its channels can be cut, flattened or not.

    What is added is cut alike.
    """
    layers = graph.layers
    # Of every layer, an earlier one that is cut as it is; and of the first of them, in how many.
    alike, count = list(range(len(layers))), [layer.shape[0] for layer in layers]

    def first(k: int) -> int:
        while alike[k] != k:
            k = alike[k]
        return k

    for k, layer in enumerate(layers):
        kept = layer.kind not in (*MIXING, "concat")
        same = [i for i in layer.inputs if i == layer.inputs[0] or layers[i].shape == layer.shape]
        firsts = sorted({first(i) for i in same if kept and not layer.shape[0] % count[first(i)]})
        for i in firsts:
            alike[i] = firsts[0]
            count[firsts[0]] = math.gcd(count[firsts[0]], count[i])
        alike[k] = firsts[0] if firsts else k
    return [count[first(k)] for k in range(len(layers))]


def live(graph: Graph) -> list[list[int]]:
    """For every layer, those before it that it or a later one reads."""
    last = [0] * len(graph.layers)
    for k, layer in enumerate(graph.layers):
        for i in layer.inputs:
            last[i] = k
    found: list[list[int]] = [[]]
    for k in range(1, len(graph.layers)):
        found.append([i for i in (*found[-1], k - 1) if last[i] >= k])
    return found


def split(
    state: str, samples: int, shape: tuple[int, ...], channels: int
) -> tuple[tuple[int, ...], int]:
    """The shape in which an activation is cut into parts, and along which axis."""
    if state == "channels":
        return (samples, channels, math.prod(shape) // channels), 1
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


class Moves(NamedTuple):
    """What is held in another way from one layer on.

    Attributes
    ----------
    gathered : list of int
        Numbers of the layers whose output is made whole for a share of the model, and is kept so as
        long as layers are shared by model.
    changed : list of int
        Of those that are redistributed.
    """

    gathered: list[int]
    changed: list[int]


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

    def by_model(self, graph: Graph, k: int) -> bool:
        """Whether each worker has a share of the weights of layer `k`, which reads the whole."""
        return self.states[k] == "channels" and graph.layers[k].kind in MIXING

    def moves(self, graph: Graph) -> list[Moves]:
        """What changes before every layer: all that is read later is held as its output is."""
        found, whole = [Moves([], [])], set[int]()
        for k, now in enumerate(live(graph)[1:], 1):
            reads = graph.layers[k].inputs if self.by_model(graph, k) else ()
            gathered = [i for i in dict.fromkeys(reads) if i not in whole]
            differs = self.states[k - 1] != self.states[k]
            found.append(Moves(gathered, [i for i in now if differs and i not in gathered]))
            whole = whole.union(gathered) if self.states[k] == "channels" else set()
        return found

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
        """Bytes that each worker sends in a step, message by message."""
        layers, needed, cut = graph.layers, graph.trained, units(graph)
        # What is alike sends the same.
        gathers: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        sums: Counter[int] = Counter()
        for k, moves in enumerate(self.moves(graph)[1:], 1):
            for i in (*moves.gathered, *moves.changed):
                gathers[self.states[k - 1], layers[i].shape, cut[i]] += 1
            for i in moves.gathered:
                sums[layers[i].size] += needed[i]
            for i in moves.changed:
                gathers[self.states[k], layers[i].shape, cut[i]] += needed[i]
        if self.states[-1] in ("channels", "rows"):
            gathers[self.states[-1], layers[-1].shape, cut[-1]] += 1
        own = Counter(zip(graph.alike, self.states, cut, strict=True))

        counts = np.array([b - a for a, b in parts(batch, self.columns)])
        found = np.zeros((self.columns, self.rows), np.int64)
        for samples in set(counts.tolist()):
            mine = np.zeros(self.rows, np.int64)
            for (state, shape, channels), times in gathers.items():
                mine += times * self._gather(state, samples, shape, channels)
            for size, times in sums.items():
                mine += times * reduce_words(_lengths(parts(samples * size, self.rows)))
            for (k, state, _), times in own.items():
                if state == "rows" and layers[k].kind in ("conv", "pool"):
                    mine += times * self._halo(graph, k, samples)
            found[counts == samples] = mine
        for (k, state, channels), times in own.items():
            if layers[k].weights:
                found += times * self._weights(layers[k].weights, state, channels)
        loss = reduce_words(_lengths(parts(1, found.size))).reshape(found.shape)
        sent: NDArray[np.int64] = (found * itemsize + loss * 8).reshape(-1)
        return sent

    def _gather(
        self, state: str, samples: int, shape: tuple[int, ...], channels: int
    ) -> NDArray[np.int64]:
        """Numbers that each worker of a column sends so that all have the whole."""
        if state == "whole":
            return np.zeros(self.rows, np.int64)
        whole, axis = split(state, samples, shape, channels)
        each = math.prod(whole) // whole[axis]
        return gather_words(_lengths(parts(whole[axis], self.rows)) * each)

    def _halo(self, graph: Graph, k: int, samples: int) -> NDArray[np.int64]:
        layer, i = graph.layers[k], graph.layers[k].inputs[0]
        read = graph.layers[i]
        found = windows(layer, read.shape[1], self.rows)
        row = samples * read.size // read.shape[1]
        sent = row * _given(found.inputs, found.needs())
        if graph.trained[i]:
            sent += samples * layer.size // layer.shape[1] * _given(found.outputs, found.asks)
        return sent

    def _weights(self, weights: int, state: str, channels: int) -> NDArray[np.int64]:
        """Numbers that each worker sends for the sum of gradients of so many parameters."""
        shape = self.columns, self.rows
        if state in ("samples", "rows"):
            return reduce_words(_lengths(parts(weights, self.rows * self.columns))).reshape(shape)
        shares = [weights] * self.rows
        if state == "channels":
            shares = [weights // channels * (b - a) for a, b in parts(channels, self.rows)]
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
