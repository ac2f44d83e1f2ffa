"""Sharding: how a grid of workers shares every layer, and the bytes that each of them sends."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .boxes import Range, Redistribution, overlap, parts
from .collectives import gather_words, lengths, reduce_words
from .graph import MIXING, Graph, Layer

__all__ = ["STATES", "Reshards", "Sharding", "Windows", "live", "split", "units", "windows"]

#: The part of an activation of its column's samples that a worker has: all of it, some samples,
#: some channels (with weights: the model), or some rows of the images (the domain).
STATES = ("whole", "samples", "channels", "rows")
# A layer with weights is whole on every worker only if a column has one worker.
_WORDS = {"whole": "batch", "samples": "batch", "channels": "model", "rows": "domain"}


def units(graph: Graph) -> list[int]:
    """Return the most parts in which the channels of every layer can be cut, flattened or not.

    All terms of a sum are cut alike.
    """
    layers = graph.layers
    # For every layer, an earlier one that is cut alike; for the first of these, the most parts.
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
    """Return, for every layer, those before it that it or a later one reads."""
    last = [0] * len(graph.layers)
    for k, layer in enumerate(graph.layers):
        for i in layer.inputs:
            last[i] = k
    read: list[list[int]] = [[]]
    for k in range(1, len(graph.layers)):
        read.append([i for i in (*read[-1], k - 1) if last[i] >= k])
    return read


def split(
    state: str, samples: int, shape: tuple[int, ...], channels: int
) -> tuple[tuple[int, ...], int]:
    """Return the shape in which an activation is cut into parts, and the axis of the cut."""
    if state == "channels":
        return (samples, channels, math.prod(shape) // channels), 1
    return (samples, *shape), 2 if state == "rows" else 0


class Windows(NamedTuple):
    """Rows of a convolution or pooling that workers share; one range a worker.

    Attributes
    ----------
    inputs, outputs : list of tuple of int
        Rows of the input and of the output that it owns.
    makes : list of tuple of int
        Outputs that it computes: with pooling, whose Jacobian depends on the input, also all those
        that read rows it owns.
    reads : list of tuple of int
        Inputs from which it computes them, padding included.
    asks : list of tuple of int
        Outputs whose gradients it needs for those of its inputs.
    """

    inputs: list[Range]
    outputs: list[Range]
    makes: list[Range]
    reads: list[Range]
    asks: list[Range]


def windows(layer: Layer, height: int, workers: int) -> Windows:
    """Return the rows of a layer that each worker computes, from an input of this height."""
    kernel, stride, padding = layer.kernel[0], layer.stride[0], layer.padding[0]
    inputs, outputs = parts(height, workers), parts(layer.shape[1], workers)
    whole = 0, layer.shape[1]
    asks = [
        overlap((-(-(a + padding - kernel + 1) // stride), (b - 1 + padding) // stride + 1), whole)
        for a, b in inputs
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


class Reshards(NamedTuple):
    """Layers whose output changes its state before some layer.

    Attributes
    ----------
    gathered : list of int
        Layers whose output is made whole for a share of the model, and is kept so as long as layers
        are shared by model.
    changed : list of int
        Layers whose output is redistributed.
    """

    gathered: list[int]
    changed: list[int]


class Sharding(NamedTuple):
    """A grid, and how each layer is shared on it.

    Worker ``j·P_r + i`` has row ``i`` and column ``j``.

    Attributes
    ----------
    rows, columns : int
        ``P_r`` and ``P_c``.
    states : tuple of str
        State of every layer's output, one of :data:`STATES`; the input is whole.
    """

    rows: int
    columns: int
    states: tuple[str, ...]

    def by_model(self, graph: Graph, k: int) -> bool:
        """Tell whether each worker has a share of the weights of layer `k`, which reads all."""
        return self.states[k] == "channels" and graph.layers[k].kind in MIXING

    def reshards(self, graph: Graph) -> list[Reshards]:
        """Return the changes before every layer: all that is read later is held as its output."""
        every, whole = [Reshards([], [])], set[int]()
        for k, now in enumerate(live(graph)[1:], 1):
            reads = graph.layers[k].inputs if self.by_model(graph, k) else ()
            gathered = [i for i in dict.fromkeys(reads) if i not in whole]
            differs = self.states[k - 1] != self.states[k]
            every.append(Reshards(gathered, [i for i in now if differs and i not in gathered]))
            whole = whole.union(gathered) if self.states[k] == "channels" else set()
        return every

    def describe(self, graph: Graph) -> str:
        """Describe the grid, and the layers with weights, in a few words."""
        numbers = [k for k, layer in enumerate(graph.layers) if layer.kind in MIXING]
        words = []
        for state, group in groupby(numbers, lambda k: self.states[k]):
            names = [graph.layers[k].name for k in group]
            ends = names[0] if len(names) == 1 else f"{names[0]}–{names[-1]}"
            words.append(f"{_WORDS[state]} in {ends}")
        return ", ".join([f"{self.rows} × {self.columns}", *words])

    def sent(self, graph: Graph, batch: int, itemsize: int) -> NDArray[np.int64]:
        """Count the bytes that each worker sends in a step, message by message."""
        layers, cut = graph.layers, units(graph)
        gathers, sums = self._collectives(graph, cut)
        # Layers that are alike send as much.
        own = Counter(zip(graph.alike, self.states, cut, strict=True))
        words = np.zeros((self.columns, self.rows), np.int64)
        counts = lengths(batch, self.columns)
        for samples in set(counts.tolist()):
            mine = np.zeros(self.rows, np.int64)
            for (state, shape, channels), times in gathers.items():
                mine += times * self._gather(state, samples, shape, channels)
            for size, times in sums.items():
                mine += times * reduce_words(lengths(samples * size, self.rows))
            for (k, state, _), times in own.items():
                if state == "rows" and layers[k].kind in ("conv", "pool"):
                    mine += times * self._halo(graph, k, samples)
            words[counts == samples] = mine
        for (k, state, channels), times in own.items():
            if layers[k].weights:
                words += times * self._weights(layers[k].weights, state, channels)
        loss = reduce_words(lengths(1, words.size)).reshape(words.shape)
        sent: NDArray[np.int64] = (words * itemsize + loss * 8).reshape(-1)
        return sent

    def _collectives(
        self, graph: Graph, cut: list[int]
    ) -> tuple[Counter[tuple[str, tuple[int, ...], int]], Counter[int]]:
        """Count all-gathers of activations by state, shape and channels; all-reduces by size."""
        layers, trained = graph.layers, graph.trained
        gathers: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        sums: Counter[int] = Counter()
        for k, reshards in enumerate(self.reshards(graph)[1:], 1):
            for i in (*reshards.gathered, *reshards.changed):
                gathers[self.states[k - 1], layers[i].shape, cut[i]] += 1
            for i in reshards.gathered:
                sums[layers[i].size] += trained[i]
            for i in reshards.changed:
                gathers[self.states[k], layers[i].shape, cut[i]] += trained[i]
        if self.states[-1] in ("channels", "rows"):
            gathers[self.states[-1], layers[-1].shape, cut[-1]] += 1
        return gathers, sums

    def _gather(
        self, state: str, samples: int, shape: tuple[int, ...], channels: int
    ) -> NDArray[np.int64]:
        """Count the numbers that each worker of a column sends in an all-gather."""
        if state == "whole":
            return np.zeros(self.rows, np.int64)
        whole, axis = split(state, samples, shape, channels)
        each = math.prod(whole) // whole[axis]
        return gather_words(lengths(whole[axis], self.rows) * each)

    def _halo(self, graph: Graph, k: int, samples: int) -> NDArray[np.int64]:
        """Count the numbers that each worker of a column sends for the halos of layer `k`."""
        layer, i = graph.layers[k], graph.layers[k].inputs[0]
        read = graph.layers[i]
        shared = windows(layer, read.shape[1], self.rows)
        sent = samples * read.size // read.shape[1] * _rows_sent(shared.inputs, shared.reads)
        if graph.trained[i]:
            rows = _rows_sent(shared.outputs, shared.asks)
            sent += samples * layer.size // layer.shape[1] * rows
        return sent

    def _weights(self, weights: int, state: str, channels: int) -> NDArray[np.int64]:
        """Count the numbers that each worker sends for the sum of gradients of parameters."""
        shape = self.columns, self.rows
        if state in ("samples", "rows"):
            return reduce_words(lengths(weights, self.rows * self.columns)).reshape(shape)
        shares = [weights] * self.rows
        if state == "channels":
            shares = [weights // channels * own for own in lengths(channels, self.rows).tolist()]
        return reduce_words(np.array([lengths(share, self.columns) for share in shares])).T


def _rows_sent(owned: list[Range], needed: list[Range]) -> NDArray[np.int64]:
    """Count the rows that each worker sends to others."""
    moves = Redistribution([(own,) for own in owned], [(read,) for read in needed])
    return np.array([moves.sent(rank) for rank in range(len(owned))], np.int64)
