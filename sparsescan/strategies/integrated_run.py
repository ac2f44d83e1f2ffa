"""Integrated parallelism, run: the products of Figure 5, and halos, over MPI ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..jacobians import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Operator,
    Sequential,
)
from ..jacobians.activations import Elementwise
from ..parallel.communicator import Communicator, Fault
from .architectures import output_size
from .boxes import Box, Range, Redistribution, parts
from .collectives import all_gather, all_reduce, descend
from .graph import Graph, Layer
from .recurrent import Step, Trainable, operators
from .sharding import Sharding, live, split, units, windows
from .stage import LocalLayer, LocalSum, RecurrentStage, Stage
from .strategy import Training, check_samples, cross_entropy

__all__ = ["IntegratedTraining", "whole_layers"]

Array = NDArray[Any]
Shape = tuple[int, ...]


def whole_layers(network: Trainable, graph: Graph) -> frozenset[int]:
    """Return the layers of a network's graph that workers can share by samples only.

    Raises
    ------
    InputError
        If a layer couples samples.
    """
    ops = operators(network, graph)
    for layer, op in zip(graph.layers, ops, strict=True):
        if getattr(op, "training", False):
            raise InputError(
                f"{layer.name} is {op!r} in training, which couples samples; expected layers that "
                "treat each sample alone"
            )
    return frozenset(k for k, op in enumerate(ops) if op is not None and not _divisible(op))


def _divisible(op: Operator) -> bool:
    """Tell whether workers can share channels of it, and rows of images."""
    if isinstance(op, Step):
        return bool(op.cell.state_size == op.cell.hidden_size)
    if isinstance(op, Conv2d):
        if op.groups > 1 or op.dilation != (1, 1) or len(op.input_shape) != 3:
            return False
        # The padding "same" may be unequal on both sides.
        height, width = op.input_shape[1:]
        sizes = [(size[0], size[1]) for size in (op.kernel_size, op.stride, op.padding)]
        return op.output_shape[1:] == output_size((1, height, width), *sizes)
    if isinstance(op, Linear):
        return len(op.input_shape) == 1
    if isinstance(op, (MaxPool2d, AvgPool2d)):
        even = getattr(op, "dilation", (1, 1)) == (1, 1) and not op.ceil_mode
        counted = getattr(op, "count_include_pad", True) or not any(op.padding)
        return even and counted and len(op.input_shape) == 3
    if isinstance(op, Dropout):
        return op.mask is None
    if isinstance(op, BatchNorm2d):
        return len(op.input_shape) == 3
    return isinstance(op, (Flatten, Elementwise))


class _Rows(LocalLayer):
    """A convolution or pooling of which one rank computes some rows, fetching its halo."""

    def __init__(
        self, op: Any, layer: Layer, column: Communicator, samples: int, deep: bool
    ) -> None:
        self._windows = shared = windows(layer, op.input_shape[1], column.size)
        self._column, self._rank, self._op = column, column.rank, op
        window = self._window(shared.reads[self._rank])
        super().__init__(Stage([window], deep), window.input_shape if deep else None)
        self._fill = -np.inf if isinstance(op, MaxPool2d) else 0.0
        inputs, outputs = (samples, *op.input_shape), (samples, *op.output_shape)
        self._inputs = Redistribution(_slabs(inputs, shared.inputs), _slabs(inputs, shared.reads))
        self._grads = Redistribution(_slabs(outputs, shared.outputs), _slabs(outputs, shared.asks))
        self._back: Any = None
        start, stop = shared.asks[self._rank]
        if isinstance(op, Conv2d) and start < stop:
            # For gradients of the input, from those of other ranks' outputs, too.
            stride, padding = layer.stride[0], layer.padding[0]
            self._first = start * stride - padding
            last = (stop - 1) * stride - padding + layer.kernel[0]
            self._back = self._window((self._first, last))
            for name, param in self.params.items():
                setattr(self._back, name, param)
            self._plan = Sequential([self._back]).plan(schedule="linear")

    def _window(self, rows: Range) -> Any:
        """Return the layer on some rows of the input, among them those around the image."""
        channels, _, width = self._op.input_shape
        return self._op.restrict(
            (channels, rows[1] - rows[0], width), padding=(0, self._op.padding[1])
        )

    def forward(self, *xs: Array) -> Array:
        (x,) = xs
        y: Array = super().forward(self._inputs.forward(self._column, x, x.dtype, self._fill))
        first, (a, b) = self._windows.makes[self._rank][0], self._windows.outputs[self._rank]
        return y[:, :, a - first : b - first]

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        start, stop = self._windows.inputs[self._rank]
        channels, _, width = self._op.input_shape
        mine = np.zeros((len(grad), channels, stop - start, width), grad.dtype)
        grads: dict[str, Array] = {}
        is_conv = isinstance(self._op, Conv2d)
        if is_conv:
            (grads,) = self.stage.param_grads(self.activations, [grad.reshape(len(grad), -1)])
        if self.shape is None:
            return mine, grads
        asked = self._grads.forward(self._column, grad, grad.dtype)
        if not is_conv:
            below, _ = self.stage.backward(self.activations, asked)
            first = self._windows.reads[self._rank][0]
        elif self._back is not None:
            flat = asked.reshape(len(asked), -1)
            below = self._plan.inclusive_scan(flat, [self._back.values()])[-1]
            first = self._first
        else:
            return mine, grads
        rows = below.reshape(len(grad), channels, -1, width)
        low, high = max(start, first), min(stop, first + rows.shape[2])
        mine[:, :, low - start : high - start] = rows[:, :, low - first : high - first]
        return mine, grads


def _slabs(shape: Shape, rows: list[Range]) -> list[Box]:
    """Return the boxes of images of this shape with the rows of every rank."""
    samples, channels, _, width = shape
    return [((0, samples), (0, channels), own, (0, width)) for own in rows]


class IntegratedTraining(Training):
    """A network whose layers are shared as a sharding says.

    Parameters
    ----------
    comm, network, batch, learning_rate
        As for :meth:`.Strategy.start`.
    graph : Graph
        The layers of `network`.
    sharding : Sharding
        How ranks share them.
    """

    def __init__(
        self,
        comm: Any,
        network: Trainable,
        graph: Graph,
        sharding: Sharding,
        batch: int,
        learning_rate: float,
    ) -> None:
        self.communicator = Communicator.of(comm)
        row, column = (
            self.communicator.rank % sharding.rows,
            self.communicator.rank // sharding.rows,
        )
        grid = sharding.rows, sharding.columns
        self._column = self.communicator.split(column, row, ("column", grid))
        self._row = self.communicator.split(row, column, ("row", grid))
        self.sharding, self._graph, self._rate = sharding, graph, learning_rate
        self._batch, self._shape = batch, network.input_shape
        self._mine = slice(*parts(batch, sharding.columns)[column])
        self._trained, self._units = graph.trained, units(graph)
        self._shapes = [layer.shape for layer in graph.layers]
        self._reshards, self._live = (
            sharding.reshards(graph),
            [*live(graph), [len(graph.layers) - 1]],
        )
        self._layers: dict[int, LocalSum] = {}
        ops, fault = operators(network, graph), Fault()
        steps = [op for op in ops if isinstance(op, Step)]
        # Steps that are shared by model run one by one.
        self._steps: list[Step] = []
        with fault:
            if sharding.by_model(graph, 1) and steps:
                cell = steps[0].cell.restrict(self._channels(1))
                self._steps = [Step(cell, step.t) for step in steps]
                ops[1 : 1 + len(steps)] = self._steps
            elif steps:
                self._layers[len(steps)] = LocalLayer(RecurrentStage(steps), None)
            for k in range(1 + max(self._layers, default=0), len(ops)):
                self._layers[k] = self._local_layer(k, ops[k])
        self.communicator.agree(fault.error)
        params = [param for op in ops if op is not None for param in op.params.values()]
        self._dtype = np.result_type(np.float32, *params)

    def _local_layer(self, k: int, op: Operator | None) -> LocalSum:
        """Return layer `k` as this rank computes it."""
        layer, state = self._graph.layers[k], self.sharding.states[k]
        deep = any(self._trained[i] for i in layer.inputs)
        if op is None:
            return LocalSum()
        if isinstance(op, Step):
            return LocalLayer.of(op, deep, copied=False)
        if state == "rows" and layer.kind in ("conv", "pool"):
            samples = self._mine.stop - self._mine.start
            return _Rows(op, layer, self._column, samples, deep)
        if self.sharding.by_model(self._graph, k):
            op = op.restrict(op.input_shape, self._channels(k))
        elif state not in ("whole", "samples"):
            op = op.restrict(self._local(layer.inputs[0], state))
        return LocalLayer.of(op, deep)

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Run one training step: forward, backward, SGD."""
        classes = math.prod(self._shapes[-1])
        x, labels = check_samples(x, labels, (self._batch, *self._shape), classes)
        with self.communicator.ending("a training step"):
            # All ranks send arrays of one dtype.
            x = x[self._mine].astype(np.result_type(self._dtype, x), copy=False)
            loss, grad = self._loss(self._forward(self._start(x)), labels[self._mine])
            self._backward(grad)
        return loss

    def _start(self, x: Array) -> dict[int, Array]:
        """Return the input of the first layer that is run alone, by its number.

        For steps that are run one by one it is the first state, zeros; all steps at once are run.
        """
        k, layer = next(iter(self._layers.items()))
        if isinstance(layer, LocalLayer) and isinstance(layer.stage, RecurrentStage):
            return {k: layer.forward(x[self._samples(self.sharding.states[k], len(x))])}
        for step in self._steps:
            step.read(x)
        return {0: np.zeros((len(x), *self._shapes[0]), x.dtype) if self._steps else x}

    def _samples(self, state: str, count: int) -> slice:
        """Return the samples of its column that this rank has."""
        shares = self.sharding.rows if state == "samples" else 1
        return slice(*parts(count, shares)[self._column.rank % shares])

    def _forward(self, held: dict[int, Array]) -> Array:
        """Return this rank's part of the output, from what :meth:`_start` returns."""
        start, whole = max(held), dict[int, Array]()
        for k, layer in self._layers.items():
            if k <= start:
                continue
            before, state = self.sharding.states[k - 1 : k + 1]
            reshards, now = self._reshards[k], self._live[k + 1]
            for i in reshards.gathered:
                whole[i] = self._changed(held[i], i, before, "whole")
                if before != state:
                    held[i] = self._changed(whole[i], i, "whole", state)
            for i in reshards.changed:
                held[i] = self._changed(held[i], i, before, state)
            given = whole if self.sharding.by_model(self._graph, k) else held
            held[k] = layer.forward(*(given[i] for i in self._graph.layers[k].inputs))
            held = {i: held[i] for i in now}
            whole = {i: whole[i] for i in now if i in whole and state == "channels"}
        return held[k]

    def _loss(self, y: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
        """Return the mean loss of all samples, and this rank's part of the output's gradient."""
        last, state = len(self._shapes) - 1, self.sharding.states[-1]
        shared = state in ("channels", "rows")
        y = self._changed(y, last, state, "whole") if shared else y
        loss, grad = cross_entropy(y, labels[self._samples(state, len(labels))], self._batch)
        # Where all ranks of a column have the same samples, the first of them counts.
        counted = state == "samples" or self._column.rank == 0
        total = all_reduce(self.communicator, np.array([loss if counted else 0.0]))
        grad = grad.reshape(y.shape)
        return float(total[0]), self._changed(grad, last, "whole", state) if shared else grad

    def _backward(self, grad: Array) -> None:
        """Take gradients from the last layer to the first, and a step of SGD."""
        held, whole = {len(self._shapes) - 1: grad}, dict[int, Array]()
        grads: dict[int, dict[str, Array]] = {}
        for k, layer in reversed(self._layers.items()):
            one = self._graph.layers[k]
            if self._trained[k]:
                given = whole if self.sharding.by_model(self._graph, k) else held
                grad_x, own = layer.backward(held.pop(k))
                for i in one.inputs:
                    if self._trained[i]:
                        _add(given, {i: grad_x})
                owner = self._owner(k)
                _add(grads.setdefault(owner, {}), own)
                if owner == k and layer.params:
                    self._descend(k, layer.params, grads.pop(k))
            self._undo(k, held, whole)

    def _owner(self, k: int) -> int:
        """Return the layer that has the parameters that layer `k` uses."""
        shares = self._graph.layers[k].shares
        return shares if shares in self._layers else k

    def _undo(self, k: int, held: dict[int, Array], whole: dict[int, Array]) -> None:
        """Take gradients back through the changes before layer `k`.

        That of an activation that was gathered is a sum over the ranks of a column: Figure 5.
        """
        before, state = self.sharding.states[k - 1 : k + 1]
        for i in self._reshards[k].changed:
            if i in held:
                held[i] = self._changed(held[i], i, state, before)
        for i in self._reshards[k].gathered:
            if i in whole:
                total = whole.pop(i)
                if i in held:
                    total = total + self._placed(held[i], i)
                total = all_reduce(self._column, total.reshape(-1)).reshape(total.shape)
                held[i] = self._changed(total, i, "whole", before)

    def _descend(self, k: int, params: dict[str, Array], grads: dict[str, Array]) -> None:
        """Sum gradients of parameters over all ranks that have them, and take the step."""
        everywhere = self.sharding.states[k] in ("samples", "rows")
        ranks = self.communicator if everywhere else self._row
        descend([params], [grads], self._rate, partial(all_reduce, ranks))

    def _changed(self, x: Array, k: int, before: str, state: str) -> Array:
        """Convert the output of layer `k`, or its gradient, from one state to another."""
        if before == state:
            return x
        if before != "whole":
            x = self._gathered(x, k, before)
        return x if state == "whole" else self._taken(x, k, state)

    def _gathered(self, x: Array, k: int, state: str) -> Array:
        """Gather the parts of the ranks of a column."""
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
        """Return this rank's part of an activation."""
        shape, axis = split(state, len(x), self._shapes[k], self._units[k])
        a, b = parts(shape[axis], self._column.size)[self._column.rank]
        taken = x.reshape(shape)[(slice(None),) * axis + (slice(a, b),)]
        return taken.reshape(len(taken), *self._local(k, state))

    def _placed(self, x: Array, k: int) -> Array:
        """Place this rank's channels among zeros for those of others."""
        whole = np.zeros((len(x), *self._shapes[k]), x.dtype)
        whole[:, self._channels(k)] = x
        return whole

    def _channels(self, k: int) -> slice:
        """Return the channels of the output of layer `k` that this rank has."""
        a, b = parts(self._units[k], self._column.size)[self._column.rank]
        each = self._shapes[k][0] // self._units[k]
        return slice(each * a, each * b)

    def _local(self, k: int, state: str) -> Shape:
        """Return the shape of this rank's part of a sample of the output of layer `k`."""
        shape = self._shapes[k]
        if state == "rows":
            a, b = parts(shape[1], self._column.size)[self._column.rank]
            return shape[0], b - a, shape[2]
        if state == "channels":
            chosen = self._channels(k)
            return (chosen.stop - chosen.start, *shape[1:])
        return shape

    def parameters(self) -> list[dict[str, Array]]:
        """Return parameters of every layer, whole, on all ranks."""
        every = []
        for k, layer in self._layers.items():
            if isinstance(layer, LocalLayer) and self._owner(k) == k:
                params = {name: param.copy() for name, param in layer.params.items()}
                if self.sharding.by_model(self._graph, k):
                    params = {name: self._joined(k, param) for name, param in params.items()}
                every.append(params)
        return every

    def _joined(self, k: int, param: Array) -> Array:
        """Join a parameter whose output channels the ranks of a column share, gate by gate."""
        count, chosen = self._shapes[k][0], self._channels(k)
        each, gates = count // self._units[k], len(param) // (chosen.stop - chosen.start)
        rows = [each * (b - a) for a, b in parts(self._units[k], self._column.size)]
        row = param.size // (chosen.stop - chosen.start)
        blocks = all_gather(self._column, param, [row * length for length in rows])
        shares = [
            block.reshape(gates, length, -1) for block, length in zip(blocks, rows, strict=True)
        ]
        return np.concatenate(shares, axis=1).reshape(gates * count, *param.shape[1:])


def _add(total: dict[Any, Array], terms: dict[Any, Array]) -> None:
    """Add arrays to those of the same name, not in place."""
    for name, array in terms.items():
        total[name] = total[name] + array if name in total else array
