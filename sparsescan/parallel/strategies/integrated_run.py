"""Integrated parallelism, run: the products of Figure 5, and halos, over MPI ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...jacobians import (
    AvgPool2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Operator,
    Sequential,
)
from ...jacobians.activations import Elementwise
from ..communicator import Communicator, Fault
from .collectives import all_gather, all_reduce, fetch, parts
from .equations import MIXING
from .graph import Graph, Layer
from .layout import Layout, Windows, split, units, windows
from .stage import Stage
from .strategy import Training, cross_entropy

__all__ = ["IntegratedTraining", "whole_layers"]

Array = NDArray[Any]
Shape = tuple[int, ...]


def whole_layers(network: Sequential) -> frozenset[int]:
    """Numbers of the layers of which workers can share nothing but samples, the first being 1.

    Raises
    ------
    InputError
        If layers are not one after the other, or couple samples.
    """
    if len(network) != len(network.layers):
        raise InputError(f"{network!r} has residual blocks; expected layers one after the other")
    for k, op in enumerate(network.layers):
        if getattr(op, "training", False):
            raise InputError(f"layers[{k}] is {op!r} in training, which couples samples")
    return frozenset(k for k, op in enumerate(network.layers, 1) if not _divisible(op))


def _divisible(op: Operator) -> bool:
    """Whether workers can share channels of it, and rows of images."""
    if isinstance(op, Conv2d):
        even = op._before == op._after and op.dilation == (1, 1)
        return op.groups == 1 and even and len(op.input_shape) == 3
    if isinstance(op, Linear):
        return len(op.input_shape) == 1
    if isinstance(op, (MaxPool2d, AvgPool2d)):
        even = getattr(op, "dilation", (1, 1)) == (1, 1) and not op.ceil_mode
        counted = getattr(op, "count_include_pad", True) or not any(op.padding)
        return even and counted and len(op.input_shape) == 3
    if isinstance(op, Dropout):
        return op.mask is None
    return isinstance(op, (Flatten, Elementwise))


def _like(op: Operator, shape: Shape, **changes: Any) -> Operator:
    """A layer without parameters, with the same arguments for an input of another shape."""
    names = [name for name in inspect.signature(type(op)).parameters if name != "input_shape"]
    arguments = {name: getattr(op, name) for name in names} | changes
    kind: Any = type(op)
    made: Operator = kind(**arguments, input_shape=shape)
    return made


def share_of(op: Any, chosen: slice, shape: Shape, padding: Any = None) -> Any:
    """Some output channels of a layer with weights; for a convolution of images of another size."""
    mask = None if op._mask is None else op._mask.on(np)[chosen]
    count = len(range(*chosen.indices(op.weight.shape[0])))
    made: Any
    if isinstance(op, Linear):
        made = Linear(op.in_features, count, op.bias is not None, weight_mask=mask)
    else:
        made = Conv2d(
            op.in_channels,
            count,
            op.kernel_size,
            op.stride,
            op.padding if padding is None else padding,
            op.dilation,
            bias=op.bias is not None,
            input_shape=shape,
            weight_mask=mask,
        )
    for name, param in op.params.items():
        setattr(made, name, param[chosen])
    return made


class _Layer:
    """A layer as one rank computes it, from the input that it needs."""

    def __init__(self, op: Operator, deep: bool) -> None:
        self.stage, self._deep = Stage([op], deep), deep
        self._shape = op.input_shape
        self._kept: list[Array] = []

    @property
    def params(self) -> dict[str, Array]:
        """Those of this rank, not copied."""
        return self.stage.parameters[0]

    def forward(self, x: Array) -> Array:
        """Its output."""
        self._kept = self.stage.forward(x)
        return self._kept[-1]

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        """Gradients of its input if they are needed, and of its parameters."""
        found, grads = self.stage.backward(self._kept, grad)
        return found.reshape(-1, *self._shape) if self._deep else grad, grads[0]


class _Rows(_Layer):
    """A convolution or pooling of which one rank makes some rows: it fetches its halo."""

    def __init__(self, op: Any, layer: Layer, column: Communicator, deep: bool) -> None:
        self._windows: Windows = windows(layer, op.input_shape[1], column.size)
        self._column, self._rank, self._op = column, column.rank, op
        super().__init__(self._window(self._windows.reads[self._rank]), deep)
        self._fill = -np.inf if isinstance(op, MaxPool2d) else 0.0
        self._back: Any = None
        start, stop = self._windows.asks[self._rank]
        if isinstance(op, Conv2d) and start < stop:
            # For gradients of the input, from those of other ranks' outputs, too.
            stride, padding = layer.stride[0], layer.padding[0]
            self._first = start * stride - padding
            last = (stop - 1) * stride - padding + layer.kernel[0]
            self._back = self._window((self._first, last))
            for name, param in self.params.items():
                setattr(self._back, name, param)
            self._plan = Sequential([self._back]).plan(schedule="linear")

    def _window(self, range_: tuple[int, int]) -> Any:
        """The layer on some rows of the input, among them what lies around the image."""
        op = self._op
        shape = (op.input_shape[0], range_[1] - range_[0], op.input_shape[2])
        padding = (0, op.padding[1])
        if isinstance(op, Conv2d):
            return share_of(op, slice(None), shape, padding)
        return _like(op, shape, padding=padding)

    def forward(self, x: Array) -> Array:
        found, rank = self._windows, self._rank
        needs = found.needs()
        (low, high), (start, stop) = found.reads[rank], needs[rank]
        rows = fetch(self._column, x, found.inputs, needs)
        around = [(0, 0), (0, 0), (start - low, high - stop), (0, 0)]
        y = super().forward(np.pad(rows, around, constant_values=self._fill))
        first, (a, b) = found.makes[rank][0], found.outputs[rank]
        return y[:, :, a - first : b - first]

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        found, rank = self._windows, self._rank
        start, stop = found.inputs[rank]
        shape = len(grad), self._op.input_shape[0], stop - start, self._op.input_shape[2]
        mine = np.zeros(shape, grad.dtype)
        grads: dict[str, Array] = {}
        if isinstance(self._op, Conv2d):
            grads = self.stage.network.layers[0].param_grads(self._kept[0], grad)
        if not self._deep:
            return mine, grads
        asked = fetch(self._column, grad, found.outputs, found.asks)
        if not isinstance(self._op, Conv2d):
            given, _ = self.stage.backward(self._kept, asked)
            first = found.reads[rank][0]
        elif self._back is not None:
            flat = asked.reshape(len(asked), -1)
            given = self._plan.inclusive_scan(flat, [self._back.values()])[-1]
            first = self._first
        else:
            return mine, grads
        rows = given.reshape(len(grad), shape[1], -1, shape[3])
        low, high = max(start, first), min(stop, first + rows.shape[2])
        mine[:, :, low - start : high - start] = rows[:, :, low - first : high - first]
        return mine, grads


class IntegratedTraining(Training):
    """A network whose layers are shared as a layout says.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    network : Sequential
        The same on all ranks.
    graph : Graph
        Its layers.
    layout : Layout
        Who has what.
    batch : int
        Samples.
    learning_rate : float
        Of SGD.
    """

    def __init__(
        self,
        comm: Any,
        network: Sequential,
        graph: Graph,
        layout: Layout,
        batch: int,
        learning_rate: float,
    ) -> None:
        self._comm = Communicator.of(comm)
        row, column = self._comm.rank % layout.rows, self._comm.rank // layout.rows
        grid = layout.rows, layout.columns
        self._column = self._comm.split(column, row, ("column", grid))
        self._row = self._comm.split(row, column, ("row", grid))
        self.layout, self._graph, self._rate = layout, graph, learning_rate
        self._batch, self._shape = batch, network.input_shape
        self._mine = slice(*parts(batch, layout.columns)[column])
        self._trained, self._units = graph.trained, units(graph)
        self._layers: list[_Layer] = []
        self._shapes = [network.input_shape, *(op.output_shape for op in network.layers)]
        fault = Fault()
        with fault:
            self._layers = [self._made(k, op) for k, op in enumerate(network.layers, 1)]
        self._comm.agree(fault.error)

    def _made(self, k: int, op: Operator) -> _Layer:
        """Layer `k` as this rank computes it."""
        state, kind, deep = self.layout.states[k], self._graph.layers[k].kind, self._trained[k - 1]
        if state == "rows" and kind in ("conv", "pool"):
            return _Rows(op, self._graph.layers[k], self._column, deep)
        if state in ("whole", "samples"):
            return _Layer(op, deep)
        if kind in MIXING:
            return _Layer(share_of(op, self._channels(k), op.input_shape), deep)
        return _Layer(_like(op, self._local(k - 1, state)), deep)

    @property
    def communicator(self) -> Communicator:
        """Whose `traffic` says what this rank has sent."""
        return self._comm

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """One training step: forward, backward, SGD."""
        if np.shape(x) != (self._batch, *self._shape) or np.shape(labels) != (self._batch,):
            raise InputError(
                f"x and labels have shapes {np.shape(x)} and {np.shape(labels)}; expected "
                f"{(self._batch, *self._shape)} and {(self._batch,)}"
            )
        y = np.asarray(x)[self._mine]
        labels = np.asarray(labels)[self._mine]
        for k, layer in enumerate(self._layers, 1):
            y = self._changed(y, k - 1, self.layout.states[k - 1], self.layout.need(self._graph, k))
            y = layer.forward(y)
        loss, grad = self._loss(y, labels)
        self._backward(grad)
        return loss

    def _loss(self, y: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
        """The mean over all samples, and the gradient of the output as this rank has it."""
        last, state = len(self._layers), self.layout.states[-1]
        shared = state in ("channels", "rows")
        y = self._changed(y, last, state, "whole") if shared else y
        if state == "samples":
            labels = labels[slice(*parts(len(labels), self.layout.rows)[self._column.rank])]
        flat = y.reshape(len(y), -1)
        loss, grad = cross_entropy(flat, labels, self._batch)
        # Where all of a column have the same samples, one of them counts.
        counted = state == "samples" or self._column.rank == 0
        total = all_reduce(self._comm, np.array([loss if counted else 0.0]))
        grad = grad.reshape(y.shape)
        return float(total[0]), self._changed(grad, last, "whole", state) if shared else grad

    def _backward(self, grad: Array) -> None:
        """Gradients from the last layer on, and a step of SGD."""
        for k, layer in reversed(list(enumerate(self._layers, 1))):
            if not self._trained[k]:
                return
            deep, need = self._trained[k - 1], self.layout.need(self._graph, k)
            grad, grads = layer.backward(grad)
            self._descend(k, layer, grads)
            if not deep:
                continue
            if need != self.layout.states[k]:
                # Figure 5: every rank of a column has a share of the sum.
                grad = all_reduce(self._column, grad.reshape(-1)).reshape(grad.shape)
            grad = self._changed(grad, k - 1, need, self.layout.states[k - 1])

    def _descend(self, k: int, layer: _Layer, grads: dict[str, Array]) -> None:
        """Sum gradients of parameters over all who have the same, and take the step."""
        if not grads:
            return
        shared = self.layout.states[k] in ("samples", "rows")
        flat = np.concatenate([grad.reshape(-1) for grad in grads.values()])
        total = all_reduce(self._comm if shared else self._row, flat)
        start = 0
        for name in grads:
            param = layer.params[name]
            param -= self._rate * total[start : start + param.size].reshape(param.shape)
            start += param.size

    def _changed(self, x: Array, k: int, before: str, state: str) -> Array:
        """The output of layer `k`, or its gradient, held in another way."""
        if before == state:
            return x
        if before != "whole":
            x = self._gathered(x, k, before)
        return x if state == "whole" else self._taken(x, k, state)

    def _gathered(self, x: Array, k: int, state: str) -> Array:
        """The whole of what the ranks of a column have."""
        samples = self._mine.stop - self._mine.start
        shape, axis = split(state, samples, self._shapes[k], self._units[k])
        ranges = parts(shape[axis], self._column.size)
        each = math.prod(shape) // shape[axis]
        blocks = all_gather(self._column, x, [each * (b - a) for a, b in ranges])
        return np.concatenate(
            [
                block.reshape(*shape[:axis], b - a, *shape[axis + 1 :])
                for block, (a, b) in zip(blocks, ranges, strict=True)
            ],
            axis=axis,
        ).reshape(samples, *self._shapes[k])

    def _taken(self, x: Array, k: int, state: str) -> Array:
        """What this rank has of it."""
        shape, axis = split(state, len(x), self._shapes[k], self._units[k])
        a, b = parts(shape[axis], self._column.size)[self._column.rank]
        taken = x.reshape(shape)[(slice(None),) * axis + (slice(a, b),)]
        return taken.reshape(-1, *self._local(k, state))

    def _channels(self, k: int) -> slice:
        return slice(*parts(self._units[k], self._column.size)[self._column.rank])

    def _local(self, k: int, state: str) -> Shape:
        """The shape of a sample of what this rank has of the output of layer `k`."""
        shape = self._shapes[k]
        if state == "rows":
            a, b = parts(shape[1], self._column.size)[self._column.rank]
            return shape[0], b - a, shape[2]
        if state == "channels":
            chosen = self._channels(k)
            return (shape[0] // self._units[k] * (chosen.stop - chosen.start), *shape[1:])
        return shape

    def parameters(self) -> list[dict[str, Array]]:
        """Parameters of every layer, whole, on all ranks."""
        found = []
        for k, layer in enumerate(self._layers, 1):
            params = {name: param.copy() for name, param in layer.params.items()}
            if self.layout.states[k] == "channels" and self._graph.layers[k].kind in MIXING:
                params = {name: self._joined(k, param) for name, param in params.items()}
            found.append(params)
        return found

    def _joined(self, k: int, param: Array) -> Array:
        """A parameter of which every rank of a column has some output channels."""
        ranges: Sequence[tuple[int, int]] = parts(self._units[k], self._column.size)
        each = param.size // len(param)
        blocks = all_gather(self._column, param, [each * (b - a) for a, b in ranges])
        return np.concatenate(blocks).reshape(self._units[k], *param.shape[1:])
