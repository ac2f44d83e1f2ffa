"""Partitioned: training in which every layer is divided between ranks in a way of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..jacobians import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Operator
from ..jacobians.activations import Elementwise
from ..parallel.communicator import Communicator
from .boxes import Box, Redistribution, blocks, cut, parts, shape_of, volume
from .collectives import descend
from .configurations import Configuration, Limits, box_needed, image_of, limits
from .graph import Graph, Layer
from .recurrent import Step
from .stage import LocalLayer, LocalSum, RecurrentStage, Stage, copies
from .strategy import Training, check_samples, cross_entropy

__all__ = ["Division", "Partitioned", "limits_of"]

Array = NDArray[Any]


def limits_of(op: Operator | None, layer: Layer, batch: int) -> Limits:
    """Return the most parts of a layer along each axis, if this operator computes them."""
    if op is None:
        return limits(layer, batch)
    channels, height, width = image_of(layer.shape)
    if isinstance(op, Elementwise) or _slides(op):
        return batch, channels, height, width
    if _is_flat(op):
        return batch, channels, 1, 1
    return batch, 1, 1, 1


def _slides(op: Operator) -> bool:
    """Tell whether its windows slide over images, and depend on nothing but their entries."""
    if len(op.input_shape) != 3 or getattr(op, "dilation", (1, 1)) != (1, 1):
        return False
    return isinstance(op, (Conv2d, MaxPool2d)) or (isinstance(op, AvgPool2d) and _is_plain(op))


def _is_plain(op: AvgPool2d) -> bool:
    """Tell whether all windows are inside the image."""
    return not (any(op.padding) or op.ceil_mode)


def _is_flat(op: Operator) -> bool:
    """Tell whether it is a linear layer, or flattens images."""
    if isinstance(op, Flatten):
        return len(op.input_shape) == 3 and len(op.output_shape) == 1
    return isinstance(op, Linear) and len(op.input_shape) == 1


def _needed(op: Operator | None, layer: Layer, source: Layer, block: Box) -> Box:
    """Return the box of its input that an operator, or a sum, reads for a block."""
    if op is None or not volume(block):
        return block
    if isinstance(op, Elementwise) or _slides(op) or _is_flat(op):
        return box_needed(layer, source, block)
    return (block[0], *((0, size) for size in image_of(source.shape)))


class Division(NamedTuple):
    """A network, and how ranks divide it.

    Attributes
    ----------
    graph : Graph
        The network, its last layer the loss.
    ops : sequence of Operator or None
        The operator of each layer of `graph`; None for the input, sums and the loss.
    configurations : sequence of tuple of int
        Parts of each layer along every axis; the same for layers that share parameters.
    input_shape : tuple of int
        Shape of a sample: that of `graph`, or ``(steps, features)`` of a recurrent network.
    """

    graph: Graph
    ops: Sequence[Operator | None]
    configurations: Sequence[Configuration]
    input_shape: tuple[int, ...]


class _Block(LocalLayer):
    """A block of the output of a layer; `op` computes it from the box `needed`.

    The block begins with channel `first` of the output of `op`.
    """

    def __init__(self, op: Operator, needed: Box, block: Box, first: int, deep: bool) -> None:
        shape = shape_of(needed)[1:] if deep else None
        super().__init__(Stage([op], deep, copied=False), shape)
        self._op_shape, self._size = op.input_shape, shape_of(block)
        self._cut = slice(first, first + self._size[1])

    def forward(self, *xs: Array) -> Array:
        (x,) = xs
        y = super().forward(x.reshape(len(x), *self._op_shape))
        block: Array = y.reshape(len(y), -1, *self._size[2:])[:, self._cut]
        return block

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        y = self.activations[-1]
        if y.size != grad.size:
            shape = len(y), y[0].size // math.prod(self._size[2:]), *self._size[2:]
            whole = np.zeros(shape, y.dtype)
            whole[:, self._cut] = grad
            grad = whole
        grads = super().backward(grad)
        self.activations = []
        return grads


class _Cells(LocalLayer):
    """All steps of a recurrent network, for the samples of a block."""

    def __init__(self, steps: Sequence[Operator], block: Box) -> None:
        super().__init__(RecurrentStage(steps), None)
        self._samples, self._size = slice(*block[0]), shape_of(block)

    def forward(self, *xs: Array) -> Array:
        last: Array = super().forward(xs[0][self._samples]).reshape(self._size)
        return last


class _Idle(LocalSum):
    """A block without entries, on a rank that is left over."""

    def __init__(self, block: Box) -> None:
        super().__init__()
        self._size = shape_of(block)

    def forward(self, *xs: Array) -> Array:
        return np.empty(self._size, xs[0].dtype)


def _first(op: Operator, needed: Box, block: Box) -> int:
    """Return the channel with which a block begins in the output computed from its box."""
    # Whole channels are flattened, of which the block may be a part.
    if isinstance(op, Flatten) and _is_flat(op):
        return block[1][0] - needed[1][0] * math.prod(op.input_shape[1:])
    return 0


def _restricted(op: Operator, needed: Box, block: Box) -> Operator:
    """Return the operator that computes a block from the box that it needs."""
    size = shape_of(needed)[1:]
    if isinstance(op, Conv2d) and _slides(op):
        return op.restrict(size, slice(*block[1]), padding=0)
    if isinstance(op, Linear) and _is_flat(op):
        return op.restrict(op.input_shape, slice(*block[1]))
    if _slides(op):
        return op.restrict(size, padding=0)
    if isinstance(op, Elementwise) or _is_flat(op):
        return op.restrict(size)
    return op


class _Replicas:
    """Copies of the parameters of a layer on some ranks, whose gradients are summed.

    Every rank sums a piece of them in the order of ranks and gives it to the others, so that all
    copies stay equal to the last bit.
    """

    def __init__(self, communicator: Communicator, layer: Layer, owned: Sequence[Box]) -> None:
        self._communicator = communicator
        channels = image_of(layer.shape)[0]
        sizes = [
            layer.weights * (box[1][1] - box[1][0]) // channels if volume(box) else 0
            for box in owned
        ]
        pieces: list[Box] = [((0, 0),)] * len(sizes)
        wholes = list(pieces)
        start = 0
        for channel in sorted({box[1][0] for box, size in zip(owned, sizes, strict=True) if size}):
            ranks = [r for r, box in enumerate(owned) if box[1][0] == channel and sizes[r]]
            size = sizes[ranks[0]]
            for rank, (i, j) in zip(ranks, parts(size, len(ranks)), strict=True):
                pieces[rank], wholes[rank] = ((start + i, start + j),), ((start, start + size),)
            start += size
        self._moves = Redistribution(pieces, wholes)

    def total(self, flat: Array) -> Array:
        """Return the sum of gradients over copies; collective."""
        piece = self._moves.backward(self._communicator, flat, flat.dtype)
        return self._moves.forward(self._communicator, piece, flat.dtype)


class _Edge:
    """From the blocks of layer `source` to the boxes of it that another layer reads.

    All ranks have all of the input, layer 0. The output of the layer is surrounded by `fill`.
    """

    def __init__(
        self, source: int, owned: Sequence[Box], needed: Sequence[Box], fill: float
    ) -> None:
        self.source, self.needed, self._fill = source, needed, fill
        self._moves = Redistribution(owned, needed)

    def forward(
        self, communicator: Communicator, outputs: Mapping[int, Array], dtype: DTypeLike
    ) -> Array:
        """Return the box that this rank reads, from its blocks of the outputs of all layers."""
        block = outputs[self.source]
        if self.source == 0:
            return cut(block, self.needed[communicator.rank], self._fill)
        return self._moves.forward(communicator, block, dtype, self._fill)

    def backward(self, communicator: Communicator, grad: Array, dtype: DTypeLike) -> Array:
        """Return gradients of the block that this rank owns, from those of the box."""
        return self._moves.backward(communicator, grad, dtype)


class Partitioned(Training):
    """Training in which every layer is divided between the ranks in a way of its own.

    Parameters
    ----------
    communicator : Communicator
        The ranks.
    division : Division
        The network, and how they divide it.
    batch : int
        Samples of a step.
    learning_rate : float
        Learning rate of SGD.
    """

    def __init__(
        self, communicator: Communicator, division: Division, batch: int, learning_rate: float
    ) -> None:
        graph, ops = division.graph, division.ops
        self.communicator, self._learning_rate = communicator, learning_rate
        self._layers, self._shape = graph.layers, (batch, *division.input_shape)
        owned = [
            blocks((batch, *image_of(layer.shape)), one, communicator.size)
            for layer, one in zip(graph.layers, division.configurations, strict=True)
        ]
        self._blocks = [boxes[communicator.rank] for boxes in owned]
        # The last step of a cell stands for all of them, and reads sequences.
        self._steps = [k for k, op in enumerate(ops) if isinstance(op, Step)]
        before = set(self._steps[:-1])
        self._order = [k for k in range(1, len(ops)) if k not in before]
        self._edges = [
            [] if isinstance(op, Step) else [_edge(graph, op, owned, j, k) for j in layer.inputs]
            for k, (op, layer) in enumerate(zip(ops, graph.layers, strict=True))
        ]
        self._replicas = {
            k: _Replicas(communicator, layer, owned[k])
            for k, layer in enumerate(graph.layers)
            if layer.weights
        }
        self._parts = self._local_layers(ops)
        own = [k for k, op in enumerate(ops) if op is not None]
        self._trained = [k for k in own if graph.layers[k].shares is None]
        self._dtype = np.result_type(
            np.float32, *(param for op in ops if op is not None for param in op.params.values())
        )

    def _local_layers(self, ops: Sequence[Operator | None]) -> list[LocalSum]:
        """Return this rank's block of every layer, with parameters of its own."""
        rank = self.communicator.rank
        local = [LocalSum() if volume(block) else _Idle(block) for block in self._blocks]
        own = {
            k: (op, self._edges[k][0].needed[rank], self._blocks[k])
            for k, op in enumerate(ops)
            if op is not None and not isinstance(op, Step) and volume(self._blocks[k])
        }
        restricted = copies([_restricted(*three) for three in own.values()])
        for (k, (op, needed, block)), part in zip(own.items(), restricted, strict=True):
            deep = self._edges[k][0].source > 0
            local[k] = _Block(part, needed, block, _first(op, needed, block), deep)
        if self._steps and volume(self._blocks[self._steps[0]]):
            steps = [op for op in ops if isinstance(op, Step)]
            cells = _Cells(steps, self._blocks[self._steps[0]])
            for k in self._steps:
                local[k] = cells
        return local

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Run one training step; see :class:`Training`."""
        classes = math.prod(self._layers[-1].shape)
        x, labels = check_samples(x, labels, self._shape, classes)
        with self.communicator.ending("a training step"):
            return self._step(x, labels)

    def _step(self, x: Array, labels: NDArray[np.int64]) -> float:
        dtype = np.result_type(self._dtype, x)
        y = self._forward(x.astype(dtype, copy=False))
        loss, grad = 0.0, y
        if y.size:
            mine = labels[slice(*self._blocks[-1][0])]
            loss, flat = cross_entropy(y, mine, len(x))
            grad = flat.reshape(y.shape)
        losses = self.communicator.gather(loss)
        grads = self._backward(grad, dtype)
        for k, replicas in self._replicas.items():
            params = self._parts[k].params
            descend([params], [grads[k]], self._learning_rate, replicas.total)
        return math.fsum(losses)

    def _forward(self, x: Array) -> Array:
        """Return the block that this rank has of the last output."""
        outputs = {0: x.reshape(len(x), *image_of(x.shape[1:]))}
        for k in self._order:
            edges = self._edges[k]
            boxes = [edge.forward(self.communicator, outputs, x.dtype) for edge in edges]
            outputs[k] = self._parts[k].forward(*boxes or [x])
        return outputs[self._order[-1]]

    def _backward(self, grad: Array, dtype: DTypeLike) -> dict[int, dict[str, Array]]:
        """Return gradients of this rank's parameters by layer; of a cell, over all steps."""
        sums: dict[int, dict[str, Array]] = {}
        grads: dict[int, Array] = {len(self._parts) - 1: grad}
        for k in reversed(self._order):
            grad, own = self._parts[k].backward(grads.pop(k))
            shares = self._layers[k].shares
            owner = k if shares is None else shares
            later = sums.get(owner)
            sums[owner] = own if later is None else {n: later[n] + g for n, g in own.items()}
            for edge in self._edges[k]:
                j = edge.source
                if j > 0:
                    below = edge.backward(self.communicator, grad, dtype)
                    grads[j] = grads[j] + below if j in grads else below
        return sums

    def parameters(self) -> list[dict[str, Array]]:
        """Return parameters of every layer, whole, on all ranks; those of a cell once."""
        mine = [
            (self._blocks[k][1][0], self._parts[k].params) if volume(self._blocks[k]) else None
            for k in self._trained
        ]
        ranks = self.communicator.gather(mine)
        return [
            _joined([shares for shares in layer if shares is not None])
            for layer in zip(*ranks, strict=True)
        ]


def _edge(
    graph: Graph, op: Operator | None, owned: Sequence[Sequence[Box]], source: int, k: int
) -> _Edge:
    """Return the edge from layer `source` to layer `k`, whose blocks ranks own."""
    needed = [_needed(op, graph.layers[k], graph.layers[source], box) for box in owned[k]]
    return _Edge(source, owned[source], needed, -np.inf if isinstance(op, MaxPool2d) else 0.0)


def _joined(shares: Sequence[tuple[int, dict[str, Array]]]) -> dict[str, Array]:
    """Join parameters over channels, each from the first rank that has them."""
    first = dict(reversed(shares))
    return {
        name: np.concatenate([first[channel][name] for channel in sorted(first)])
        for name in shares[0][1]
    }
