"""How DeePa's paper counts and divides: its link, and the strategies that it compares with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparsescan.strategies import Machine
from sparsescan.strategies.graph import Graph, Layer
from sparsescan.strategies.per_layer.configurations import (
    Configuration,
    Configurations,
    Moves,
    edges_of,
)
from sparsescan.strategies.per_layer.predict import LayerCosts, footprints


class MeasuredCosts(LayerCosts):
    """Compute times by the name of a layer and its configuration come before the model."""

    def __init__(
        self, machine: Machine, measured: Mapping[tuple[str, Configuration], float] | None = None
    ) -> None:
        super().__init__(machine)
        self.measured = measured or {}
        self.by_name = bool(measured)

    def compute(self, graph, k, configurations, batch):
        times = super().compute(graph, k, configurations, batch)
        keys = [(graph.layers[k].name, tuple(one)) for one in configurations.tolist()]
        known = [(i, self.measured[key]) for i, key in enumerate(keys) if key in self.measured]
        for i, both in known:
            times[i] = both, 0
        return times


class SharedLink(MeasuredCosts):
    """Table 2's costs: the size of all data over one bandwidth.

    A layer whose parameters have ``r > 1`` copies moves ``2 r`` times their size, and a layer whose
    configuration is not that of its input the input that each of its workers needs, forward and
    backward, be it there already or not, and without a halo.

    The paper says that nothing moves where the configurations are the same. To the letter that
    would make it free to divide all layers along channels, of which convolutions and linear layers
    need all; here nothing moves if, besides, no part of the input is needed twice.
    """

    def compute(self, graph, k, configurations, batch):
        # Where costs are equal, configurations along samples are taken, which have no halo.
        others = configurations[:, 1:].prod(axis=1, keepdims=True)
        return super().compute(graph, k, configurations, batch) * (1 + 1e-12 * others)

    def fused(self, copies):
        return 0.0

    def update(self, layer, configurations):
        channels = configurations[:, 1]
        replicas = configurations.prod(axis=1) // channels
        nbytes = layer.weights * self.machine.itemsize
        each = self.machine.network.inverse_bandwidth * nbytes
        return np.where(replicas > 1, 2.0 * replicas * each, 0.0)

    def transfer(self, moves, of, a, b):
        needed = without_halo(moves, of, b)
        move = np.any(of.all[a][:, None] != of.all[b], axis=-1) | (needed > moves.size)
        nbytes = needed * self.machine.itemsize
        return np.where(move, 2 * self.machine.network.inverse_bandwidth * nbytes, 0.0)

    def least_transfer(self, moves, of, b):
        return np.zeros(len(b))


def without_halo(moves: Moves, of: Configurations, b):
    """Entries that all workers need together, no place of an image counted twice."""
    divisors, product = of.divisors_of(b), 1
    starts = 1 + np.cumsum(of.divisors) - of.divisors
    for k, axis in enumerate(moves.axes):
        # An axis is cut into no more parts than it has entries.
        total = np.zeros(len(starts), int)
        cut = starts < len(axis.length)
        total[cut] = np.add.reduceat(axis.length, starts[cut])
        product = product * (np.minimum(total, axis.size) if k > 1 else total)[divisors[:, k]]
    return product


def image_parallelism(graph: Graph, workers: int, batch: int) -> list[Configuration]:
    """All layers divided along samples alone."""
    whole = _largest(workers, batch)
    return [(1 if layer.kind == "input" else whole, 1, 1, 1) for layer in graph.layers]


def one_weird_trick(graph: Graph, workers: int, batch: int) -> list[Configuration]:
    """Image parallelism, but linear layers and activations behind them along their outputs."""

    def trick(layer: Layer) -> bool:
        behind = layer.kind == "elementwise" and graph.layers[layer.inputs[0]].kind == "linear"
        return behind or layer.kind == "linear"

    pairs = zip(graph.layers, image_parallelism(graph, workers, batch), strict=True)
    return [
        (1, _largest(workers, layer.shape[0]), 1, 1) if trick(layer) else image
        for layer, image in pairs
    ]


def _largest(workers: int, most: int) -> int:
    return max(d for d in range(1, min(workers, most) + 1) if workers % d == 0)


def transfers(
    graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int
) -> tuple[int, int]:
    """Entries of parameters, ``2 r`` times for `r` copies, and of outputs forward, in a step."""
    copies = [n * h * w for n, _, h, w in chosen]
    layers = zip(graph.layers, copies, strict=True)
    parameters = sum(2 * r * layer.weights for layer, r in layers if r > 1)
    of = Configurations(workers, chosen)
    number = [np.flatnonzero((of.all == one).all(axis=1))[:1] for one in chosen]
    received = [
        Moves(of, graph.layers[k], graph.layers[j], batch, first)
        .entries(number[j], number[k], np.arange(workers))[1]
        .sum()
        for j, k, first in edges_of(graph)
        if graph.layers[j].kind != "input"
    ]
    return parameters, round(math.fsum(received))


def footprint(graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int):
    """Entries that every worker sends in a step, and its parameters and activations."""
    every = [counts for _, counts in footprints(graph, chosen, workers, batch)]
    moved, weights, activations = np.sum(every, axis=0)
    return moved, weights + activations
