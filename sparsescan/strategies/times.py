"""Times: the layers of a network, measured on the ranks that train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .graph import Graph, Layer

#: Parts of a layer's work: its output, the values of its Jacobian, the product of that with a
#: gradient, the gradients of its parameters, and their update.
PARTS = ("forward", "values", "product", "params", "update")

Floats = NDArray[np.float64]


@dataclass
class Times:
    """Nanoseconds of the layers of one network for some numbers of samples.

    Attributes
    ----------
    layers : sequence of Layer
        The layers of the rows of `parts`; of a recurrent network, the first step and the readout.
    samples : sequence of int
        Numbers of samples, increasing; between them times are interpolated.
    parts : dict of str to ndarray, shape (layers, sizes)
        Times of each of :data:`PARTS`.
    halves : dict of str to ndarray, shape (layers, 2)
        Times with the most samples, of the whole layer and of half of its output channels; nan
        where half of the channels are half of the work.
    calls : dict of str to ndarray, shape (2, sizes)
        Times of one call for all steps of a cell: of the call itself, and of each step.
    loss : ndarray, shape (sizes,)
        Times of the loss and its gradient.
    sweep : float
        Time of a chain of products beside those of the products.
    collectives : dict of str to float
        Times of small calls of a :class:`~sparsescan.parallel.Communicator`, by method.
    contention : float
        Time of work on all ranks at once over that on one rank alone: they may share cores and
        memory.
    exscan : {"doubling", "linear"}
        Algorithm of the MPI library's exclusive scan.
    """

    layers: Sequence[Layer]
    samples: Sequence[int]
    parts: Mapping[str, Floats]
    halves: Mapping[str, Floats]
    calls: Mapping[str, Floats]
    loss: Floats
    sweep: float
    collectives: Mapping[str, float]
    contention: float
    exscan: str = "doubling"

    def __post_init__(self) -> None:
        self._rows = {layer: row for row, layer in enumerate(self.layers)}

    def knows(self, graph: Graph, k: int) -> bool:
        """Tell whether layer `k`, or the one whose parameters it shares, was measured."""
        return graph.layers[graph.owner(k)] in self._rows

    def of(
        self, part: str, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0
    ) -> float:
        """Return nanoseconds of a part of a layer that was measured."""
        row = self._rows[graph.layers[graph.owner(k)]]
        table, (whole, half) = self.parts[part][row], self.halves[part][row]
        if share == 1 or not whole > 0 or np.isnan(half):
            return self.at(table, samples * share)
        # Overhead and reading the whole input do not become less.
        kept = min(max(2 * float(half / whole) - 1, 0.0), 1.0)
        return self.at(table, samples) * (kept + (1 - kept) * share)

    def at(self, table: Floats, samples: float) -> float:
        """Interpolate a table between the samples that were measured, and beyond them."""
        x = self.samples
        if len(x) == 1:
            return float(table[0] * samples / x[0])
        k = min(max(int(np.searchsorted(x, samples)), 1), len(x) - 1)
        slope = (table[k] - table[k - 1]) / (x[k] - x[k - 1])
        return max(float(table[k - 1] + slope * (samples - x[k - 1])), 0.0)
