"""Graph: the layers of a network as the cost models see them, without weights or values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import InputError
from ..locks import cached_property

#: Kinds of layers. A "cell" is one time step of a recurrent network.
KINDS = (
    *("input", "conv", "pool", "linear", "cell", "norm", "elementwise", "flatten"),
    *("add", "concat", "softmax"),
)

#: Kinds of layers whose every output reads all channels of the input, through weights.
MIXING = ("conv", "linear", "cell")

# Layers whose Jacobians differ between samples; those of others are shared by all.
_DIFFER = ("cell", "elementwise", "pool", "softmax")
# Layers whose Jacobians need no index arrays.
_NO_INDEX = ("cell", "elementwise", "linear", "flatten")
_INDEX_BYTES = 4


@dataclass(frozen=True)
class Layer:
    """A layer of a network.

    Attributes
    ----------
    name : str
        Unique in its graph.
    kind : str
        One of ``sparsescan.strategies.graph.KINDS``.
    inputs : tuple of int
        Numbers of the layers that it reads.
    shape : tuple of int
        Shape of its output for one sample: ``(channels, height, width)`` or ``(features,)``.
    weights : int
        Number of its parameters, biases included.
    multiply_adds : int
        Multiply-adds of its forward pass for one sample.
    nnz : int
        Entries of its transposed Jacobian.
    kernel, stride, padding : tuple of int
        Sizes of a convolution or pooling, along height and width.
    groups : int
        Groups of a convolution.
    shares : int or None
        Number of the layer whose parameters this one uses; its own `weights` are then 0.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    weights: int = 0
    multiply_adds: int = 0
    nnz: int = 0
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    groups: int = 1
    shares: int | None = None

    @property
    def size(self) -> int:
        """Entries of its output for one sample."""
        return math.prod(self.shape)

    @property
    def learns(self) -> bool:
        """Whether it has parameters, be they its own or those of another layer."""
        return self.weights > 0 or self.shares is not None

    def values(self, samples: float) -> float:
        """Count the values of its Jacobian, or of one for each sample where they differ."""
        return self.nnz * (samples if self.kind in _DIFFER else 1)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index arrays of its Jacobian."""
        return 0 if self.kind in _NO_INDEX else _INDEX_BYTES * self.nnz


class Graph:
    """The layers of a network, each after those that it reads; the first is the input.

    Parameters
    ----------
    name : str
        Name of the network.
    layers : sequence of Layer
        From the input on.

    Attributes
    ----------
    name : str
        Name of the network.
    layers : tuple of Layer
        As given.

    Raises
    ------
    InputError
        If a layer reads one that does not come before it, or names are not unique.
    """

    def __init__(self, name: str, layers: Sequence[Layer]) -> None:
        self.name = name
        self.layers = tuple(layers)
        if not self.layers or self.layers[0].kind != "input":
            raise InputError("layers[0] is no input; expected a layer of kind 'input' first")
        for k, layer in enumerate(self.layers):
            if layer.kind not in KINDS:
                raise InputError(f"layers[{k}].kind is {layer.kind!r}; expected one of {KINDS}")
            if (k > 0 and not layer.inputs) or any(not 0 <= i < k for i in layer.inputs):
                raise InputError(f"layers[{k}].inputs is {layer.inputs}; expected earlier layers")
        if len({layer.name for layer in self.layers}) < len(self.layers):
            raise InputError("two layers have the same name; expected unique names")

    @property
    def weights(self) -> int:
        """Number of parameters."""
        return sum(layer.weights for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the forward pass for one sample."""
        return sum(layer.multiply_adds for layer in self.layers)

    @cached_property
    def trained(self) -> tuple[bool, ...]:
        """Whether gradients of the output of each layer lead to parameters."""
        trained: list[bool] = []
        for layer in self.layers:
            trained.append(layer.learns or any(trained[i] for i in layer.inputs))
        return tuple(trained)

    def deep(self, k: int) -> bool:
        """Tell whether gradients of the input of layer `k` lead to parameters."""
        return any(self.trained[i] for i in self.layers[k].inputs)

    def owner(self, k: int) -> int:
        """Return the number of the layer whose parameters layer `k` uses, be it that itself."""
        shares = self.layers[k].shares
        return k if shares is None else shares

    def read(self, k: int) -> int:
        """Count the entries that layer `k` reads for one sample."""
        return sum(self.layers[i].size for i in self.layers[k].inputs)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer, the first of those just before it that differ from it by name alone."""
        first, before = [0], None
        for k, layer in enumerate(self.layers[1:], 1):
            # Layers are compared by how far back they read, and what.
            reads = tuple((k - i, self.layers[i].shape) for i in layer.inputs)
            key = replace(layer, name="", inputs=()), reads, self.deep(k)
            first.append(first[-1] if key == before else k)
            before = key
        return tuple(first)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.layers)} layers, {self.weights} weights)"


def blocks(network: Graph) -> list[range]:
    """Return the layers between places where one output is all that later layers read."""
    count = len(network.layers)
    # For each layer, the earliest one that is read behind it.
    earliest, behind = count, [count] * count
    for k in range(count - 1, 0, -1):
        behind[k] = earliest
        earliest = min([earliest, *network.layers[k].inputs])
    ends = [0] + [k for k in range(1, count) if behind[k] >= k]
    return [range(a + 1, b + 1) for a, b in itertools.pairwise(ends)]
