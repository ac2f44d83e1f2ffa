"""Partitioned: training in which every layer is divided between ranks in a way of its own."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...errors import InputError
from ...jacobians import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Operator,
)
from ...jacobians.activations import Elementwise
from ...parallel.communicator import Communicator
from ..exchanges import (
    Box,
    GradientSums,
    Range,
    Redistribution,
    blocks,
    cut,
    descend,
    shape_of,
    volume,
)
from ..graph import Graph, Layer
from ..networks import Step
from ..stage import RecurrentStage, Stage, copies
from ..strategy import Job, Training, check_samples, cross_entropy
from .configurations import Configuration, Limits, box_needed, image_of, limits

Array = NDArray[Any]


def limits_of(op: Operator | None, layer: Layer, batch: int) -> Limits:
    """Return the most parts of a layer along each axis, if this operator computes them."""
    if getattr(op, "training", False):
        raise InputError(
            f"{layer.name} is {op!r} in training, which couples samples; expected layers that "
            "treat each sample alone"
        )
    whole = batch, 1, 1, 1
    if isinstance(op, Step):
        return limits(layer, batch) if op.cell.state_size == op.cell.hidden_size else whole
    way = "norm" if op is None else _way(op)
    if way == "norm":
        return limits(layer, batch)
    channels, height, width = image_of(layer.shape)
    image = batch, channels, height, width
    return {"entries": image, "windows": image, "channels": (batch, channels, 1, 1)}.get(way, whole)


def _way(op: Operator) -> str:
    """Return how the output of an operator can be divided, if not by "samples" alone.

    By "entries", each computed from the one in its place; by "windows" that slide over images, and
    depend on nothing but their entries; by places, whose channels a "norm" shifts and scales; or by
    the "channels" of a linear layer, or those of images that are flattened.
    """
    images = len(op.input_shape) == 3
    if isinstance(op, Elementwise) or (isinstance(op, Dropout) and op.mask is None):
        return "entries"
    if isinstance(op, BatchNorm2d):
        return "norm" if images else "samples"
    if isinstance(op, Flatten):
        return "channels" if images and len(op.output_shape) == 1 else "samples"
    if isinstance(op, Linear):
        return "channels" if len(op.input_shape) == 1 else "samples"
    if not isinstance(op, (Conv2d, MaxPool2d, AvgPool2d)) or not images:
        return "samples"
    if getattr(op, "dilation", (1, 1)) != (1, 1):
        return "samples"
    if isinstance(op, AvgPool2d) and any(op.padding) and not op.count_include_pad:
        return "samples"
    # The padding "same" may be unequal on both sides, and windows may reach beyond it.
    sizes = zip(op.input_shape[1:], op.kernel_size, op.stride, op.padding, strict=True)
    whole = op.output_shape[1:] == tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)
    return "windows" if whole else "samples"


def _needed(op: Operator | None, layer: Layer, source: Layer, block: Box) -> Box:
    """Return the box of its input that an operator, or a sum, reads for a block."""
    if op is None or not volume(block):
        return block
    if _way(op) != "samples":
        return box_needed(layer, source, block)
    return (block[0], *((0, size) for size in image_of(source.shape)))


def _restricted(op: Operator, needed: Box, block: Box) -> tuple[Operator, int]:
    """Return the operator that computes a block from the box that it needs.

    The block begins with the channel of its output that is returned, too: whole channels are
    flattened, of which the block may be a part.
    """
    way, size = _way(op), shape_of(needed)[1:]
    if way == "samples":
        return op, 0
    if isinstance(op, Conv2d):
        return op.restrict(size, slice(*block[1]), padding=0), 0
    if isinstance(op, Linear):
        return op.restrict(op.input_shape, slice(*block[1])), 0
    if way == "windows":
        return op.restrict(size, padding=0), 0
    first = 0
    if isinstance(op, Flatten):
        first = block[1][0] - needed[1][0] * math.prod(op.input_shape[1:])
    return op.restrict(size), first


class _Local:
    """A sum of layers, as one rank computes it; or a block without entries, as what it reads is."""

    def __init__(self, stage: Stage | None = None) -> None:
        self.params = {} if stage is None else stage.parameters[0]

    def forward(self, *xs: Array) -> Array:
        """Return the sum."""
        return reduce(np.add, xs)

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        """Return the gradient of each term, which is not to be written to, and of parameters."""
        return grad, {}


class _Block(_Local):
    """A block of the output of a layer; `op` computes it from the box `needed`.

    The block begins with channel `first` of the output of `op`.
    """

    def __init__(self, op: Operator, needed: Box, block: Box, first: int, deep: bool) -> None:
        self._op, self._deep, self._stage = op, deep, Stage([op], deep, copied=False)
        super().__init__(self._stage)
        self._needed, self._size = shape_of(needed)[1:], shape_of(block)
        self._cut = slice(first, first + self._size[1])

    def read(self, x: Array) -> None:
        """Take the inputs of these samples, if it is a step of a cell."""
        if isinstance(self._op, Step):
            self._op.read(x)

    def forward(self, *xs: Array) -> Array:
        (x,) = xs
        self._activations = self._stage.forward(x.reshape(len(x), *self._op.input_shape))
        y = self._activations[-1]
        block: Array = y.reshape(len(y), -1, *self._size[2:])[:, self._cut]
        return block

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        y = self._activations[-1]
        if y.size != grad.size:
            shape = len(y), y[0].size // math.prod(self._size[2:]), *self._size[2:]
            whole = np.zeros(shape, y.dtype)
            whole[:, self._cut] = grad
            grad = whole
        below, (grads, *_) = self._stage.backward(self._activations, grad)
        self._activations = []
        return below.reshape(-1, *self._needed) if self._deep else grad, grads


class _Cells(_Local):
    """All steps of a recurrent network, for the samples of a block."""

    def __init__(self, steps: Sequence[Operator], block: Box) -> None:
        self._stage = RecurrentStage(steps)
        super().__init__(self._stage)
        self._samples, self._size = slice(*block[0]), shape_of(block)

    def forward(self, *xs: Array) -> Array:
        self._activations = self._stage.forward(xs[0][self._samples])
        last: Array = self._activations[-1].reshape(self._size)
        return last

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        return grad, self._stage.backward(self._activations, grad)[1][0]


class _Edge(NamedTuple):
    """From the blocks of layer `source`, surrounded by `fill`, to the boxes that a layer reads.

    All ranks have all of the input, layer 0.
    """

    source: int
    moves: Redistribution
    fill: float

    def forward(
        self, communicator: Communicator, outputs: Mapping[int, Array], dtype: DTypeLike
    ) -> Array:
        """Return the box that this rank reads, from its blocks of the outputs of all layers."""
        block = outputs[self.source]
        if self.source == 0:
            return cut(block, self.moves.needed[communicator.rank], self.fill)
        return self.moves.forward(communicator, block, dtype, self.fill)


def _copies(
    layer: Layer, owned: Sequence[Box], communicator: Communicator
) -> tuple[int, list[int]]:
    """Return how many parameters of a layer this rank has, and all ranks that have them."""
    mine = owned[communicator.rank]
    if not volume(mine):
        return 0, []
    size = layer.weights * shape_of(mine)[1] // image_of(layer.shape)[0]
    return size, [rank for rank, box in enumerate(owned) if volume(box) and box[1] == mine[1]]


class Partitioned(Training):
    """Training in which every layer is divided between the ranks in a way of its own.

    The last layer of the graph is the loss; input, sums and the loss have no operator. Layers that
    share parameters have one configuration.
    """

    def __init__(
        self,
        job: Job,
        graph: Graph,
        ops: Sequence[Operator | None],
        chosen: Sequence[Configuration],
    ) -> None:
        batch, communicator = job.batch, job.communicator
        self.communicator, self._learning_rate = communicator, job.rate
        self._graph, self._shape = graph, (batch, *job.network.input_shape)
        owned = [
            blocks((batch, *image_of(layer.shape)), one, communicator.size)
            for layer, one in zip(graph.layers, chosen, strict=True)
        ]
        self._blocks = [boxes[communicator.rank] for boxes in owned]
        self._steps = [k for k, op in enumerate(ops) if isinstance(op, Step)]
        # If whole states are computed, the last step of a cell stands for all of them.
        self._at_once = bool(self._steps) and chosen[1][1] == 1
        before = set(self._steps[:-1]) if self._at_once else set()
        self._order = [k for k in range(1, len(ops)) if k not in before]
        apart = [k for k in self._order if not (self._at_once and k in self._steps)]
        self._edges: list[list[_Edge]] = [[] for _ in ops]
        for k in apart:
            op, layer = ops[k], graph.layers[k]
            fill = -np.inf if isinstance(op, MaxPool2d) else 0.0
            for j in layer.inputs:
                needed = [_needed(op, layer, graph.layers[j], box) for box in owned[k]]
                self._edges[k].append(_Edge(j, Redistribution(owned[j], needed), fill))
        self._weighted = [k for k, layer in enumerate(graph.layers) if layer.weights]
        self._sums = GradientSums(
            communicator, [_copies(graph.layers[k], owned[k], communicator) for k in self._weighted]
        )
        self._parts = self._local_layers(ops)
        own = [k for k, op in enumerate(ops) if op is not None]
        self._trained = [k for k in own if graph.layers[k].shares is None]
        self._dtype = np.result_type(
            np.float32, *(param for op in ops if op is not None for param in op.params.values())
        )

    def _local_layers(self, ops: Sequence[Operator | None]) -> list[_Local]:
        """Return this rank's block of every layer, with parameters of its own."""
        rank, local = self.communicator.rank, [_Local()] * len(ops)
        steps = [op for op in ops if isinstance(op, Step)]
        if self._at_once and volume(self._blocks[1]):
            local[self._steps[0]] = local[self._steps[-1]] = _Cells(steps, self._blocks[1])
        own: dict[int, tuple[Operator, Box, int]] = {}
        cell: Any = None
        for k, op in enumerate(ops):
            if op is None or not volume(self._blocks[k]) or not self._edges[k]:
                continue
            needed = self._edges[k][0].moves.needed[rank]
            if isinstance(op, Step):
                # All steps have the same part of the cell.
                if cell is None:
                    cell = op.cell.restrict(slice(*self._blocks[k][1]))
                own[k] = Step(cell, op.t), needed, 0
            else:
                part, first = _restricted(op, needed, self._blocks[k])
                own[k] = part, needed, first
        mine = copies([part for part, _, _ in own.values()])
        for (k, (_, needed, first)), part in zip(own.items(), mine, strict=True):
            deep = self._edges[k][0].source > 0
            local[k] = _Block(part, needed, self._blocks[k], first, deep)
        return local

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Run one training step; see :class:`Training`."""
        x, labels = check_samples(x, labels, self._shape, self._graph.layers[-1].size)
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
        own = [k for k in self._weighted if grads[k]]
        descend(
            [self._parts[k].params for k in own],
            [grads[k] for k in own],
            self._learning_rate,
            lambda flat: self._sums.total(flat.astype(dtype, copy=False)),
        )
        return math.fsum(losses)

    def _forward(self, x: Array) -> Array:
        """Return the block that this rank has of the last output."""
        outputs = {0: x.reshape(len(x), *image_of(x.shape[1:]))}
        if self._steps and not self._at_once:
            # Their first state.
            outputs[0] = np.zeros((len(x), *image_of(self._graph.layers[0].shape)), x.dtype)
        for k in self._order:
            edges, part = self._edges[k], self._parts[k]
            if edges and isinstance(part, _Block):
                part.read(x[slice(*self._blocks[k][0])])
            boxes = [edge.forward(self.communicator, outputs, x.dtype) for edge in edges]
            if not edges:
                # All steps of a cell at once, on ranks that have samples.
                boxes = [x if isinstance(part, _Cells) else np.empty((0,) * 4, x.dtype)]
            outputs[k] = part.forward(*boxes)
        return outputs[self._order[-1]]

    def _backward(self, grad: Array, dtype: DTypeLike) -> dict[int, dict[str, Array]]:
        """Return gradients of this rank's parameters by layer; of a cell, over all steps."""
        sums: dict[int, dict[str, Array]] = {}
        grads: dict[int, Array] = {len(self._parts) - 1: grad}
        for k in reversed(self._order):
            grad, own = self._parts[k].backward(grads.pop(k))
            owner = self._graph.owner(k)
            later = sums.get(owner)
            sums[owner] = own if later is None else {n: later[n] + g for n, g in own.items()}
            for j, moves, _ in self._edges[k]:
                if j > 0:
                    below = moves.backward(self.communicator, grad, dtype)
                    grads[j] = grads[j] + below if j in grads else below
        return sums

    def parameters(self) -> list[dict[str, Array]]:
        """Return parameters of every layer, whole, on all ranks; those of a cell once."""
        mine = [
            {self._blocks[k][1]: self._parts[k].params} if volume(self._blocks[k]) else {}
            for k in self._trained
        ]
        ranks = self.communicator.gather(mine)
        # Each channel is from the first rank that has it.
        return [
            _joined(reduce(operator.or_, reversed(layer))) for layer in zip(*ranks, strict=True)
        ]


def _joined(shares: Mapping[Range, dict[str, Array]]) -> dict[str, Array]:
    """Join parameters over channels, which have equal numbers of rows, such as one for a gate."""
    channels = sorted(shares)
    if len(channels) == 1:
        return shares[channels[0]]
    joined = {}
    for name, some in shares[channels[0]].items():
        rows = [shares[i, j][name].reshape(-1, j - i, *some.shape[1:]) for i, j in channels]
        joined[name] = np.concatenate(rows, axis=1).reshape(-1, *some.shape[1:])
    return joined
