"""Machine: what the cost models know of one worker and the network between workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..network import BUILT_IN, Network
from .graph import Graph, Layer

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """A worker, and the network that connects it to others of its kind.

    Attributes
    ----------
    name : str
        Of the machine.
    multiply_adds : float
        Of dense products in float32, per nanosecond.
    bandwidth : float
        Bytes of memory per nanosecond.
    overhead : float
        Nanoseconds of a layer beside its arithmetic.
    memory : int
        Bytes of a worker.
    network : Network
        α and β.
    itemsize : int
        Bytes of a number.
    """

    name: str = "built in"
    multiply_adds: float = 1000.0
    bandwidth: float = 200.0
    overhead: float = 10_000.0
    memory: int = 16 << 30
    network: Network = field(default=BUILT_IN)
    itemsize: int = 4

    def forward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """Nanoseconds of the forward pass of layer `k`.

        Parameters
        ----------
        graph : Graph
            The network.
        k : int
            Number of the layer.
        samples : float
            How many.
        share : float
            Of its output that is computed.
        """
        layer = graph.layers[k]
        if layer.kind in ("input", "flatten"):
            return 0.0
        return self.overhead + self._work(layer, graph, k, samples, share)

    def backward(self, graph: Graph, k: int, samples: float = 1.0, share: float = 1.0) -> float:
        """The same of its backward pass: as long for each of its input and its parameters."""
        layer = graph.layers[k]
        if layer.kind in ("input", "flatten"):
            return 0.0
        products = 1 + (layer.weights > 0 or layer.shares is not None)
        return products * (self.overhead + self._work(layer, graph, k, samples, share))

    def _work(self, layer: Layer, graph: Graph, k: int, samples: float, share: float) -> float:
        """What takes longer, arithmetic or memory."""
        read = sum(graph.layers[i].size for i in layer.inputs)
        entries = samples * (read + share * layer.size) + share * layer.weights
        arithmetic = samples * share * layer.multiply_adds / self.multiply_adds
        return max(arithmetic, entries * self.itemsize / self.bandwidth)
