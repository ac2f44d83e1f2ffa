"""Equations 3 to 9 of integrated parallelism (Gholami et al., SPAA 2018), layer by layer."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from sparsescan.parallel import Network
from sparsescan.strategies.graph import MIXING, Graph


class Volume(NamedTuple):
    """Messages that a worker sends one after the other, and the numbers in them."""

    messages: float = 0.0
    words: float = 0.0

    def __add__(self, other: Volume) -> Volume:  # type: ignore[override]
        return Volume(self.messages + other.messages, self.words + other.words)

    def __mul__(self, factor: float) -> Volume:  # type: ignore[override]
        return Volume(self.messages * factor, self.words * factor)

    def time(self, network: Network, itemsize: int = 4) -> float:
        return network.latency * self.messages + network.inverse_bandwidth * itemsize * self.words


def log(count: int) -> int:
    """Return the logarithm to the base of two, rounded up."""
    return next(k for k in range(64) if 1 << k >= count)


def all_gather(workers: int, words: float) -> Volume:
    """``α⌈log P⌉ + β n (P - 1)/P``: equation 6."""
    return Volume(log(workers), words * (workers - 1) / workers)


def all_reduce(workers: int, words: float) -> Volume:
    """``2 (α⌈log P⌉ + β n (P - 1)/P)``: equation 4."""
    return all_gather(workers, words) * 2


def halo(row: int, size: int, samples: float) -> Volume:
    """``α + β B X_W X_C ⌊k/2⌋``; nothing for a kernel of 1: equation 7."""
    return Volume(1, samples * row * (size // 2)) if size > 1 else Volume()


class Product(NamedTuple):
    """A layer that multiplies by weights: ``|W|``, ``d_{i-1}``, ``d_i``, entries of image rows."""

    weights: int
    read: int
    made: int
    input_row: int = 0
    output_row: int = 0
    kernel: tuple[int, int] = (1, 1)
    output_rows: int = 1


def products(graph: Graph) -> list[Product]:
    """Those of a chain; a layer's outputs are read behind activations and pooling."""
    assert all(layer.inputs == (k,) for k, layer in enumerate(graph.layers[1:]))
    layers, multiplied = graph.layers, []
    numbers = [k for k, layer in enumerate(layers) if layer.kind in MIXING]
    for k, after in pairwise([*numbers, len(layers)]):
        layer, shape = layers[k], layers[layers[k].inputs[0]].shape
        sizes = layer.weights, math.prod(shape), layers[after - 1].size
        rows = (shape[0] * shape[2], layer.shape[0] * layer.shape[2]) if len(shape) == 3 else (0, 0)
        height = layer.shape[1] if len(shape) == 3 else 1
        multiplied.append(Product(*sizes, *rows, layer.kernel, height))
    return multiplied


def combined_equation(layers, rows: int, columns: int, batch: int, domain=()) -> Volume:
    """Equation 9: layers in `domain` by domain, others by model and batch."""
    samples, volume = batch / columns, Volume()
    for i, layer in enumerate(layers):
        if i in domain:
            volume += halo(layer.input_row, layer.kernel[0], samples)
            volume += halo(layer.output_row, layer.kernel[1], samples)
            volume += all_reduce(rows * columns, layer.weights)
        else:
            volume += all_gather(rows, samples * layer.made)
            volume += all_reduce(rows, samples * layer.read) * (i > 0)
            volume += all_reduce(columns, layer.weights / rows)
    return volume
