"""Partitioned: training in which every layer is divided between ranks in a way of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...jacobians import (
    AvgPool2d,
    Conv2d,
    Flatten,
    Linear,
    MaxPool2d,
    Operator,
    Sequential,
)
from ...jacobians.activations import Elementwise
from ..communicator import Communicator
from .boxes import Box, Redistribution, blocks, cut, volume
from .configurations import Configuration, Limits, box_needed, image_of
from .graph import Graph, Layer
from .stage import Stage
from .strategy import Training, cross_entropy

__all__ = ["Partitioned", "limits_of"]

Array = NDArray[Any]


def limits_of(op: Operator, layer: Layer, batch: int) -> Limits:
    """How many parts of a layer there may be along each axis, if this operator computes them."""
    channels, height, width = image_of(layer.shape)
    if isinstance(op, Elementwise) or _slides(op):
        return batch, channels, height, width
    if _is_flat(op):
        return batch, channels, 1, 1
    return batch, 1, 1, 1


def _slides(op: Operator) -> bool:
    """Whether windows slide over images, which tell all that there is to know of their borders."""
    if len(op.input_shape) != 3:
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


def _needed(op: Operator, layer: Layer, source: Layer, block: Box) -> Box:
    """The box of its input that an operator reads for a block."""
    if not volume(block):
        return block
    if isinstance(op, Elementwise) or _slides(op) or _is_flat(op):
        return box_needed(layer, source, block)
    return (block[0], *((0, size) for size in image_of(source.shape)))


class _Part:
    """What one rank computes of a layer: a block of its output, from a box of its input.

    Parameters
    ----------
    op : Operator
        The whole layer.
    needed, block : Box
        The box and the block.
    deep : bool
        Whether gradients of the input are needed.
    """

    def __init__(self, op: Operator, needed: Box, block: Box, deep: bool) -> None:
        self.channels = block[1][0]
        self.block = tuple(stop - start for start, stop in block)
        self._box = tuple(stop - start for start, stop in needed)
        self._deep = deep
        self._stage = Stage([_smaller(op, self._box, block)], deep)
        self._op = self._stage.network.layers[0]
        # Whole channels are flattened, of which the block may be a part.
        first = 0
        if isinstance(op, Flatten) and _is_flat(op):
            first = block[1][0] - needed[1][0] * math.prod(op.input_shape[1:])
        self._cut = slice(first, first + self.block[1])
        self._activations: list[Array] = []
        self.grads: dict[str, Array] = {}

    @property
    def params(self) -> dict[str, Array]:
        return self._stage.parameters[0]

    def forward(self, x: Array) -> Array:
        self._activations = self._stage.forward(x.reshape(len(x), *self._op.input_shape))
        y = self._activations[-1]
        found: Array = y.reshape(len(y), -1, *self.block[2:])[:, self._cut]
        return found

    def backward(self, grad: Array) -> Array:
        """Gradients of the box; if they are not needed, something else."""
        y = self._activations[-1]
        if y.size != grad.size:
            shape = len(y), y[0].size // math.prod(self.block[2:]), *self.block[2:]
            whole = np.zeros(shape, y.dtype)
            whole[:, self._cut] = grad
            grad = whole
        grad_x, (self.grads,) = self._stage.backward(self._activations, grad)
        self._activations = []
        return grad_x.reshape(self._box) if self._deep else grad

    def descend(self, learning_rate: float) -> None:
        self._stage.descend([self.grads], learning_rate)


def _smaller(op: Operator, box: tuple[int, ...], block: Box) -> Operator:
    """The operator that makes a block from a box of that size, with parameters of its own."""
    (start, stop), size = block[1], box[1:]
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
        setattr(made, name, np.array(getattr(op, name)[start:stop]))
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


class Partitioned(Training):
    """Training in which every layer is divided between the ranks in a way of its own.

    Parameters
    ----------
    communicator : Communicator
        The ranks.
    network : Sequential
        Layers one after the other.
    graph : Graph
        Input, the layers of `network`, and the loss.
    configurations : sequence of tuple of int
        Of every layer of `graph`.
    batch : int
        Samples of a step.
    learning_rate : float
        Of SGD.
    """

    def __init__(
        self,
        communicator: Communicator,
        network: Sequential,
        graph: Graph,
        configurations: Sequence[Configuration],
        batch: int,
        learning_rate: float,
    ) -> None:
        self._communicator, self._learning_rate = communicator, learning_rate
        self._shape, rank = (batch, *network.input_shape), communicator.rank
        self._parts: list[_Part | None] = []
        self._moves: list[Redistribution] = []
        self._replicas: list[_Replicas | None] = []
        owned: list[Box] = []
        for k, (layer, one) in enumerate(zip(graph.layers, configurations, strict=True)):
            made = blocks((batch, *image_of(layer.shape)), one, communicator.size)
            op = network.layers[k - 1] if 0 < k <= len(network.layers) else None
            if k > 0:
                source = graph.layers[k - 1]
                boxes = made if op is None else [_needed(op, layer, source, box) for box in made]
                # All ranks have the input: none sends any of it.
                self._moves.append(Redistribution(owned if k > 1 else boxes, boxes))
            if op is not None:
                box = made[rank]
                part = _Part(op, boxes[rank], box, k > 1) if volume(box) else None
                self._parts.append(part)
                self._replicas.append(_replicas(layer, op, made))
            owned = made
        self._fill = [-np.inf if isinstance(op, MaxPool2d) else 0.0 for op in network.layers]
        self._samples = slice(*owned[rank][0])
        self._dtype = np.result_type(
            np.float32, *(param for op in network.layers for param in op.params.values())
        )

    @property
    def communicator(self) -> Communicator:
        """Whose `traffic` says what this rank has sent."""
        return self._communicator

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """One training step; see :class:`Training`."""
        x, labels = np.asarray(x), np.asarray(labels)
        if x.shape != self._shape or labels.shape != self._shape[:1]:
            raise InputError(
                f"x and labels have shapes {x.shape} and {labels.shape}; expected {self._shape} "
                f"and {self._shape[:1]}"
            )
        communicator, batch = self._communicator, len(x)
        dtype = np.result_type(self._dtype, x)
        image = x.reshape(batch, *image_of(x.shape[1:])).astype(dtype, copy=False)
        y = cut(image, self._moves[0].needed[communicator.rank], self._fill[0])
        for k, part in enumerate(self._parts):
            if k > 0:
                y = self._moves[k].forward(communicator, y, dtype, self._fill[k])
            y = self._empty(k, dtype) if part is None else part.forward(y)
        y = self._moves[-1].forward(communicator, y, dtype)
        loss, grad = 0.0, y
        if y.size:
            loss, flat = cross_entropy(y.reshape(len(y), -1), labels[self._samples], batch)
            grad = flat.reshape(y.shape)
        losses = communicator.gather(loss)
        grad = self._moves[-1].backward(communicator, grad, dtype)
        for k, part in reversed(list(enumerate(self._parts))):
            if part is not None:
                grad = part.backward(grad)
            if k > 0:
                grad = self._moves[k].backward(communicator, grad, dtype)
        self._descend()
        return math.fsum(losses)

    def _empty(self, k: int, dtype: Any) -> Array:
        """What a rank without a part of a layer has of its output."""
        owned = self._moves[k + 1].owned[self._communicator.rank]
        return np.empty([stop - start for start, stop in owned], dtype)

    def _descend(self) -> None:
        for part, replicas in zip(self._parts, self._replicas, strict=True):
            if replicas is not None:
                grads = replicas.sum(self._communicator, {} if part is None else part.grads)
                if part is not None:
                    part.grads = grads
                    part.descend(self._learning_rate)

    def parameters(self) -> list[dict[str, Array]]:
        """Parameters of every layer, whole, on all ranks."""
        mine = [None if part is None else (part.channels, part.params) for part in self._parts]
        ranks = self._communicator.gather(mine)
        return [
            _joined([found for found in layer if found is not None])
            for layer in zip(*ranks, strict=True)
        ]


def _replicas(layer: Layer, op: Operator, made: Sequence[Box]) -> _Replicas | None:
    """Who has copies of the parameters of which channels; None without parameters."""
    total = sum(param.size for param in op.params.values())
    if not total:
        return None
    channels = image_of(layer.shape)[0]
    sizes = [total * (box[1][1] - box[1][0]) // channels if volume(box) else 0 for box in made]
    return _Replicas(sizes, [box[1][0] for box in made])


def _joined(parts: Sequence[tuple[int, dict[str, Array]]]) -> dict[str, Array]:
    """Parameters of all channels, from the first rank that has them."""
    first = dict(reversed(parts))
    return {
        name: np.concatenate([first[channel][name] for channel in sorted(first)])
        for name in parts[0][1]
    }
