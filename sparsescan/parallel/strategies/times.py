"""Times: what the layers of a network take, measured on the ranks that train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .graph import Graph, Layer

__all__ = ["PARTS", "Times"]

#: Of a layer: its output, the values of its Jacobian, the product of that with a gradient, the
#: gradients of its parameters, and their update.
PARTS = ("forward", "values", "product", "params", "update")

Floats = NDArray[np.float64]


class Times:
    """Nanoseconds of the layers of one network for some numbers of samples.

    Attributes
    ----------
    layers : dict of Layer to int
        The row of each layer in `parts`; of a recurrent network, the first step and the readout.
    samples : ndarray, shape (sizes,)
        How many, increasing; what lies between is interpolated.
    parts : dict of str to ndarray, shape (layers, sizes)
        For each of :data:`PARTS`.
    halves : dict of str to ndarray, shape (layers, 2)
        The same with the most samples, of the whole layer and of half of its output channels; nan
        where a worker that has half of the channels has half of the work.
    calls : dict of str to ndarray, shape (2, sizes)
        Of all steps of a cell as one call: what that takes by itself, and each of them.
    loss : ndarray, shape (sizes,)
        Of the loss and its gradient.
    sweep : float
        Of a chain of products beside what each of them takes.
    collectives : dict of str to float
        Of small calls of a :class:`~sparsescan.parallel.communicator.Communicator`, by its method.
    exscan : {"doubling", "linear"}
        How the MPI library makes an exclusive scan.
    contention : float
        How many times as long work takes on all ranks at once as on one of them alone: they may
        share cores, and memory.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        samples: Sequence[int],
        parts: Mapping[str, Floats],
        halves: Mapping[str, Floats],
        calls: Mapping[str, Floats],
        loss: Floats,
        sweep: float,
        collectives: Mapping[str, float],
        contention: float,
        exscan: str = "doubling",
    ) -> None:
        self.layers = {layer: row for row, layer in enumerate(layers)}
        self.samples = np.array(samples, float)
        self.parts, self.halves, self.calls = dict(parts), dict(halves), dict(calls)
        self.loss, self.sweep, self.collectives = loss, sweep, dict(collectives)
        self.contention, self.exscan = contention, exscan

    def row(self, graph: Graph, k: int) -> int | None:
        """Of layer `k`, or of the one whose parameters it shares; None if it was not measured."""
        layer = graph.layers[k]
        return self.layers.get(layer if layer.shares is None else graph.layers[layer.shares])

    def of(self, part: str, row: int, samples: float, share: float = 1.0) -> float:
        """Nanoseconds of a part of a layer, of which a worker has a share of the channels."""
        table = self.parts[part][row]
        whole, half = self.halves[part][row]
        if share == 1 or not whole > 0 or np.isnan(half):
            return self.at(table, samples * share)
        # What does not become less is overhead, and reading the whole input.
        kept = min(max(2 * float(half / whole) - 1, 0.0), 1.0)
        return self.at(table, samples) * (kept + (1 - kept) * share)

    def at(self, table: Floats, samples: float) -> float:
        """Between the samples that were measured, and on the same lines beyond them."""
        x = self.samples
        if len(x) == 1:
            return float(table[0] * samples / x[0])
        k = min(max(int(np.searchsorted(x, samples)), 1), len(x) - 1)
        slope = (table[k] - table[k - 1]) / (x[k] - x[k - 1])
        return max(float(table[k - 1] + slope * (samples - x[k - 1])), 0.0)
