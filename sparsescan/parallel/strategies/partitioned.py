"""Partitioned: training in which every layer is divided between ranks in a way of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...jacobians import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Operator
from ...jacobians.activations import Elementwise
from ..communicator import Communicator
from .boxes import Box, Redistribution, blocks, cut, shape_of, volume
from .configurations import Configuration, Limits, box_needed, image_of, limits
from .graph import Graph, Layer
from .recurrent import Step
from .stage import RecurrentStage, Stage, copies
from .strategy import Training, check_samples, cross_entropy

__all__ = ["Partitioned", "limits_of"]

Array = NDArray[Any]


def limits_of(op: Operator | None, layer: Layer, batch: int) -> Limits:
    """How many parts of a layer there may be along each axis, if this operator computes them."""
    if op is None:
        return limits(layer, batch)
    channels, height, width = image_of(layer.shape)
    if isinstance(op, Elementwise) or _slides(op):
        return batch, channels, height, width
    if _is_flat(op):
        return batch, channels, 1, 1
    return batch, 1, 1, 1


def _slides(op: Operator) -> bool:
    """Whether windows slide over images, which tell all that there is to know of their borders."""
    if len(op.input_shape) != 3 or getattr(op, "dilation", (1, 1)) != (1, 1):
        return False
    return isinstance(op, (Conv2d, MaxPool2d)) or (isinstance(op, AvgPool2d) and _is_plain(op))


def _is_plain(op: AvgPool2d) -> bool:
    """Whether all windows are inside the image."""
    return not (any(op.padding) or op.ceil_mode)


def _is_flat(op: Operator) -> bool:
    """Whether it is a linear layer, or flattens images."""
    if isinstance(op, Flatten):
        return len(op.input_shape) == 3 and len(op.output_shape) == 1
    return isinstance(op, Linear) and len(op.input_shape) == 1


def _needed(op: Operator | None, layer: Layer, source: Layer, block: Box) -> Box:
    """The box of its input that an operator, or a sum, reads for a block."""
    if op is None or not volume(block):
        return block
    if isinstance(op, Elementwise) or _slides(op) or _is_flat(op):
        return box_needed(layer, source, block)
    return (block[0], *((0, size) for size in image_of(source.shape)))


class _Part:
    """What one rank computes of a layer: a block of its output, from boxes of what the layer reads.

    This one adds the boxes, each as large as the block, as sums do. The loss reads one layer, and a
    rank that is left over reads nothing and has nothing: both do the same.

    Attributes
    ----------
    params : dict of str to ndarray
        Its parameters, not copied.
    """

    def __init__(self) -> None:
        self.params: dict[str, Array] = {}

    def read(self, x: Array) -> None:
        """Take what a recurrent network reads of the sequences of all samples."""

    def forward(self, boxes: Sequence[Array]) -> Array:
        """The block."""
        return sum(boxes[1:], boxes[0])

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        """Gradients of every box, not to be written to, and of the parameters."""
        return grad, {}


class _Block(_Part):
    """A block of what an operator computes.

    Parameters
    ----------
    op : Operator
        What makes the block from the box; not copied.
    needed, block : Box
        The box and the block.
    first : int
        Channel of the operator's output with which the block begins.
    deep : bool
        Whether gradients of the box are needed.
    """

    def __init__(self, op: Operator, needed: Box, block: Box, first: int, deep: bool) -> None:
        self._stage, self._op, self._deep = Stage([op], deep, copied=False), op, deep
        self._box, self._size = shape_of(needed), shape_of(block)
        self._cut = slice(first, first + self._size[1])
        self._activations: list[Array] = []
        self.params = op.params

    def forward(self, boxes: Sequence[Array]) -> Array:
        (x,) = boxes
        self._activations = self._stage.forward(x.reshape(len(x), *self._op.input_shape))
        y = self._activations[-1]
        found: Array = y.reshape(len(y), -1, *self._size[2:])[:, self._cut]
        return found

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        y = self._activations[-1]
        if y.size != grad.size:
            shape = len(y), y[0].size // math.prod(self._size[2:]), *self._size[2:]
            whole = np.zeros(shape, y.dtype)
            whole[:, self._cut] = grad
            grad = whole
        grad_x, (grads,) = self._stage.backward(self._activations, grad)
        self._activations = []
        # Those of the network's input are not needed, and not there.
        return grad_x.reshape(self._box) if self._deep else grad, grads


class _Cells(_Part):
    """All steps of a recurrent network, for the samples of a block."""

    def __init__(self, steps: Sequence[Operator], block: Box) -> None:
        super().__init__()
        self._samples, self._size = slice(*block[0]), shape_of(block)
        self._stage = RecurrentStage(steps) if volume(block) else None
        if self._stage is not None:
            self.params = self._stage.parameters[0]

    def read(self, x: Array) -> None:
        self._x = x[self._samples]

    def forward(self, boxes: Sequence[Array]) -> Array:
        if self._stage is None:
            return np.empty(self._size, self._x.dtype)
        self._kept = self._stage.forward(self._x)
        last: Array = self._kept[-1].reshape(self._size)
        return last

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        if self._stage is None:
            return grad, {}
        found, (grads,) = self._stage.backward(self._kept, grad)
        return found, grads


def _first(op: Operator, needed: Box, block: Box) -> int:
    """The channel with which a block begins of what is computed from the box that it needs."""
    # Whole channels are flattened, of which the block may be a part.
    if isinstance(op, Flatten) and _is_flat(op):
        return block[1][0] - needed[1][0] * math.prod(op.input_shape[1:])
    return 0


def _smaller(op: Operator, needed: Box, block: Box) -> Operator:
    """The operator that makes a block from the box that it needs; it shares its parameters."""
    (start, stop), size = block[1], shape_of(needed)[1:]
    if isinstance(op, Conv2d) and _slides(op):
        groups = max(1, op.groups * (stop - start) // op.out_channels)
        mask = None if op._mask is None else op._mask.on(np)[start:stop]
        made: Any = Conv2d(
            size[0],
            stop - start,
            op.kernel_size,
            op.stride,
            0,
            op.dilation,
            groups,
            op.bias is not None,
            input_shape=size,
            weight_mask=mask,
        )
    elif isinstance(op, Linear) and _is_flat(op):
        mask = None if op._mask is None else op._mask.on(np)[start:stop]
        made = Linear(op.in_features, stop - start, op.bias is not None, weight_mask=mask)
    elif isinstance(op, MaxPool2d) and _slides(op):
        made = MaxPool2d(op.kernel_size, op.stride, 0, op.dilation, input_shape=size)
    elif isinstance(op, AvgPool2d) and _slides(op):
        override = op.divisor_override
        made = AvgPool2d(op.kernel_size, op.stride, divisor_override=override, input_shape=size)
    elif isinstance(op, Elementwise):
        made = _resized(op, size)
    elif isinstance(op, Flatten) and _is_flat(op):
        made = Flatten(input_shape=size)
    else:
        return op
    for name in made.params:
        setattr(made, name, getattr(op, name)[start:stop])
    smaller: Operator = made
    return smaller


def _resized(op: Operator, size: tuple[int, ...]) -> Operator:
    """The same elementwise operator for arrays of another shape."""
    made = copy.copy(op)
    for name in ("_made", "pattern", "nnz"):
        vars(made).pop(name, None)
    made._set_shapes(size, None)
    made._set_output(size)
    return made


class _Replicas:
    """Copies of the parameters of a layer on some ranks, whose gradients are summed.

    Every rank sums a piece of them in the order of ranks and gives it to the others, so that all
    copies stay equal to the last bit.
    """

    def __init__(self, sizes: Sequence[int], channels: Sequence[int]) -> None:
        pieces: list[Box] = [((0, 0),)] * len(sizes)
        wholes = list(pieces)
        start = 0
        for channel in sorted({c for c, size in zip(channels, sizes, strict=True) if size}):
            ranks = [r for r, c in enumerate(channels) if c == channel and sizes[r]]
            size = sizes[ranks[0]]
            for rank, ((i, j),) in zip(ranks, blocks([size], [len(ranks)], 0), strict=True):
                pieces[rank], wholes[rank] = ((start + i, start + j),), ((start, start + size),)
            start += size
        self._moves = Redistribution(pieces, wholes)

    def sum(self, communicator: Communicator, grads: dict[str, Array]) -> dict[str, Array]:
        """The sums of gradients; collective."""
        flat = np.concatenate([np.zeros(0), *(grad.ravel() for grad in grads.values())])
        dtype = np.result_type(np.float32, *grads.values())
        piece = self._moves.backward(communicator, flat.astype(dtype), dtype)
        whole = self._moves.forward(communicator, piece, dtype)
        found, start = {}, 0
        for name, grad in grads.items():
            found[name] = whole[start : start + grad.size].reshape(grad.shape)
            start += grad.size
        return found


class _Edge:
    """From the blocks of a layer to the boxes of it that another one reads.

    Parameters
    ----------
    source : int
        Number of the layer that is read. All ranks have all of the input, 0.
    owned, needed : sequence of Box
        Of every rank.
    fill : float
        What lies around the output of the layer.
    """

    def __init__(
        self, source: int, owned: Sequence[Box], needed: Sequence[Box], fill: float
    ) -> None:
        self.source, self.needed, self._fill = source, needed, fill
        self._moves = Redistribution(owned, needed)

    def forward(
        self, communicator: Communicator, outputs: Mapping[int, Array], dtype: DTypeLike
    ) -> Array:
        """The box that this rank reads, from what it has of the outputs of all layers."""
        block = outputs[self.source]
        if self.source == 0:
            return cut(block, self.needed[communicator.rank], self._fill)
        return self._moves.forward(communicator, block, dtype, self._fill)

    def backward(self, communicator: Communicator, grad: Array, dtype: DTypeLike) -> Array:
        """Gradients of the block that this rank owns, from those of the box."""
        return self._moves.backward(communicator, grad, dtype)


class Partitioned(Training):
    """Training in which every layer is divided between the ranks in a way of its own.

    Parameters
    ----------
    communicator : Communicator
        The ranks.
    ops : sequence of Operator or None
        What computes each layer of `graph`; None for the input, sums and the loss.
    graph : Graph
        The network, its last layer the loss.
    configurations : sequence of tuple of int
        Of every layer of `graph`; those that share parameters have the same.
    input_shape : tuple of int
        Of a sample: that of `graph`, or ``(steps, features)`` of a recurrent network.
    batch : int
        Samples of a step.
    learning_rate : float
        Of SGD.
    """

    def __init__(
        self,
        communicator: Communicator,
        ops: Sequence[Operator | None],
        graph: Graph,
        configurations: Sequence[Configuration],
        input_shape: tuple[int, ...],
        batch: int,
        learning_rate: float,
    ) -> None:
        self._communicator, self._learning_rate = communicator, learning_rate
        self._layers, self._shape = graph.layers, (batch, *input_shape)
        made = [
            blocks((batch, *image_of(layer.shape)), one, communicator.size)
            for layer, one in zip(graph.layers, configurations, strict=True)
        ]
        self._blocks = [boxes[communicator.rank] for boxes in made]
        # The last step of a cell stands for all, from sequences on.
        self._steps = [k for k, op in enumerate(ops) if isinstance(op, Step)]
        before = set(self._steps[:-1])
        self._order = [k for k in range(1, len(ops)) if k not in before]
        self._edges = [
            [] if isinstance(op, Step) else [_edge(graph, op, made, j, k) for j in layer.inputs]
            for k, (op, layer) in enumerate(zip(ops, graph.layers, strict=True))
        ]
        self._replicas = {
            k: _replicas(layer, made[k]) for k, layer in enumerate(graph.layers) if layer.weights
        }
        self._parts = self._own(ops)
        own = [k for k, op in enumerate(ops) if op is not None]
        self._trained = [k for k in own if graph.layers[k].shares is None]
        self._dtype = np.result_type(
            np.float32, *(param for op in ops if op is not None for param in op.params.values())
        )

    def _own(self, ops: Sequence[Operator | None]) -> list[_Part]:
        """What this rank computes of every layer, with parameters of its own."""
        rank, found = self._communicator.rank, [_Part() for _ in ops]
        own = {
            k: (op, self._edges[k][0].needed[rank], self._blocks[k])
            for k, op in enumerate(ops)
            if op is not None and not isinstance(op, Step) and volume(self._blocks[k])
        }
        made = copies([_smaller(*three) for three in own.values()])
        for (k, (op, needed, block)), smaller in zip(own.items(), made, strict=True):
            deep = self._edges[k][0].source > 0
            found[k] = _Block(smaller, needed, block, _first(op, needed, block), deep)
        if self._steps:
            steps = [op for op in ops if isinstance(op, Step)]
            cells = _Cells(steps, self._blocks[self._steps[0]])
            for k in self._steps:
                found[k] = cells
        return found

    @property
    def communicator(self) -> Communicator:
        """Whose `traffic` says what this rank has sent."""
        return self._communicator

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """One training step; see :class:`Training`."""
        classes = math.prod(self._layers[-1].shape)
        x, labels = check_samples(x, labels, self._shape, classes)
        with self._communicator.ending("a training step"):
            return self._step(x, labels)

    def _step(self, x: Array, labels: NDArray[np.int64]) -> float:
        dtype = np.result_type(self._dtype, x)
        y = self._forward(x.astype(dtype, copy=False))
        loss, grad = 0.0, y
        if y.size:
            mine = labels[slice(*self._blocks[-1][0])]
            loss, flat = cross_entropy(y, mine, len(x))
            grad = flat.reshape(y.shape)
        losses = self._communicator.gather(loss)
        self._descend(self._backward(grad, dtype))
        return math.fsum(losses)

    def _forward(self, x: Array) -> Array:
        """The block that this rank has of the last output."""
        outputs = {0: x.reshape(len(x), *image_of(x.shape[1:]))}
        for k in self._order:
            part = self._parts[k]
            part.read(x)
            edges = self._edges[k]
            boxes = [edge.forward(self._communicator, outputs, x.dtype) for edge in edges]
            outputs[k] = part.forward(boxes)
        return outputs[self._order[-1]]

    def _backward(self, grad: Array, dtype: DTypeLike) -> dict[int, dict[str, Array]]:
        """Gradients of the parameters that this rank has, by layer; of a cell, over all steps."""
        sums: dict[int, dict[str, Array]] = {}
        grads: dict[int, Array] = {len(self._parts) - 1: grad}
        for k in reversed(self._order):
            grad, found = self._parts[k].backward(grads.pop(k))
            shares = self._layers[k].shares
            owner = k if shares is None else shares
            later = sums.get(owner)
            sums[owner] = found if later is None else {n: later[n] + g for n, g in found.items()}
            for edge in self._edges[k]:
                j = edge.source
                if j > 0:
                    below = edge.backward(self._communicator, grad, dtype)
                    grads[j] = grads[j] + below if j in grads else below
        return sums

    def _descend(self, grads: dict[int, dict[str, Array]]) -> None:
        for k, replicas in self._replicas.items():
            params = self._parts[k].params
            for name, grad in replicas.sum(self._communicator, grads[k]).items():
                params[name] -= self._learning_rate * grad

    def parameters(self) -> list[dict[str, Array]]:
        """Parameters of every layer, whole, on all ranks; of all steps of a cell once."""
        mine = [
            (self._blocks[k][1][0], self._parts[k].params) if volume(self._blocks[k]) else None
            for k in self._trained
        ]
        ranks = self._communicator.gather(mine)
        return [
            _joined([found for found in layer if found is not None])
            for layer in zip(*ranks, strict=True)
        ]


def _edge(
    graph: Graph, op: Operator | None, made: Sequence[Sequence[Box]], source: int, k: int
) -> _Edge:
    """From one layer to another, between the blocks that are made of all."""
    needed = [_needed(op, graph.layers[k], graph.layers[source], box) for box in made[k]]
    return _Edge(source, made[source], needed, -np.inf if isinstance(op, MaxPool2d) else 0.0)


def _replicas(layer: Layer, made: Sequence[Box]) -> _Replicas:
    """Who has copies of the parameters of which channels."""
    channels = image_of(layer.shape)[0]
    widths = [box[1][1] - box[1][0] if volume(box) else 0 for box in made]
    sizes = [layer.weights * width // channels for width in widths]
    return _Replicas(sizes, [box[1][0] for box in made])


def _joined(parts: Sequence[tuple[int, dict[str, Array]]]) -> dict[str, Array]:
    """Parameters of all channels, from the first rank that has them."""
    first = dict(reversed(parts))
    return {
        name: np.concatenate([first[channel][name] for channel in sorted(first)])
        for name in parts[0][1]
    }
