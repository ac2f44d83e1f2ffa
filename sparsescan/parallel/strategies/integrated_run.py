"""Integrated parallelism, run: the products of Figure 5, and halos, over MPI ranks."""

from __future__ import annotations

import inspect
import math
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    Sequential,
)
from ...jacobians.activations import Elementwise
from ..communicator import Communicator, Fault
from .cell_share import CellShare, StepShare
from .collectives import all_gather, all_reduce, fetch, parts
from .graph import Graph, Layer
from .layout import Layout, Windows, live, split, units, windows
from .recurrent import Network, Step, operators
from .stage import RecurrentStage, Stage
from .strategy import Training, check_samples, cross_entropy

__all__ = ["IntegratedTraining", "whole_layers"]

Array = NDArray[Any]
Shape = tuple[int, ...]


def whole_layers(network: Network, graph: Graph) -> frozenset[int]:
    """Numbers of the layers of its graph of which workers can share nothing but samples.

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
    """Whether workers can share channels of it, and rows of images."""
    if isinstance(op, Step):
        return op.cell.state_size == op.cell.hidden_size
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
    if isinstance(op, BatchNorm2d):
        return len(op.input_shape) == 3
    return isinstance(op, (Flatten, Elementwise))


def _like(op: Operator, shape: Shape, **changes: Any) -> Operator:
    """A layer of every place alone, with the same arguments for an input of another shape."""
    if isinstance(op, BatchNorm2d):
        return _norm_like(op, shape)
    names = [name for name in inspect.signature(type(op)).parameters if name != "input_shape"]
    arguments = {name: getattr(op, name) for name in names} | changes
    kind: Any = type(op)
    made: Operator = kind(**arguments, input_shape=shape)
    return made


def _norm_like(op: BatchNorm2d, shape: Shape) -> BatchNorm2d:
    affine, tracked = op.weight is not None, op.track_running_stats
    made = BatchNorm2d(op.num_features, op.eps, op.momentum, affine, tracked, input_shape=shape)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(op, name) is not None:
            setattr(made, name, getattr(op, name))
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


class _Sum:
    """A sum of layers, as one rank computes it."""

    def forward(self, *xs: Array) -> Array:
        """The sum."""
        total: Array = reduce(np.add, xs)
        return total

    def backward(self, grad: Array) -> tuple[Array, dict[str, Array]]:
        """The gradient of each input, and of no parameters."""
        return grad, {}


class _Layer:
    """A layer, or all steps of a cell, as one rank computes it from the input that it needs."""

    def __init__(self, stage: Stage | RecurrentStage, shape: Shape | None) -> None:
        """`shape` is that of a sample of the input, None if nobody needs its gradient."""
        self.stage, self._shape = stage, shape
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
        return grad if self._shape is None else found.reshape(-1, *self._shape), grads[0]


def _alone(op: Operator, deep: bool, *, copied: bool = True) -> _Layer:
    """A layer whose input is in one piece."""
    return _Layer(Stage([op], deep, copied=copied), op.input_shape if deep else None)


class _Rows(_Layer):
    """A convolution or pooling of which one rank makes some rows: it fetches its halo."""

    def __init__(self, op: Any, layer: Layer, column: Communicator, deep: bool) -> None:
        self._windows: Windows = windows(layer, op.input_shape[1], column.size)
        self._column, self._rank, self._op = column, column.rank, op
        window = self._window(self._windows.reads[self._rank])
        stage = Stage([window], deep)
        super().__init__(stage, window.input_shape if deep else None)
        (self._own,) = stage.network.layers
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
            grads = self._own.param_grads(self._kept[0], grad)
        if self._shape is None:
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
    network : Sequential or Recurrent
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
        network: Network,
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
        self._shapes = [layer.shape for layer in graph.layers]
        self._moves, self._live = layout.moves(graph), [*live(graph), [len(graph.layers) - 1]]
        self._layers: dict[int, _Layer | _Sum] = {}
        ops, fault = operators(network, graph), Fault()
        steps = [op for op in ops if isinstance(op, Step)]
        # Of steps by model, each by itself.
        self._steps: list[StepShare] = []
        with fault:
            if layout.by_model(graph, 1) and steps:
                share = CellShare(steps[0].cell, self._channels(1))
                self._steps = [StepShare(share, step.t) for step in steps]
                ops[1 : 1 + len(steps)] = self._steps
            elif steps:
                self._layers[len(steps)] = _Layer(RecurrentStage(steps), None)
            for k in range(1 + max(self._layers, default=0), len(ops)):
                self._layers[k] = self._made(k, ops[k])
        self._comm.agree(fault.error)
        params = [param for op in ops if op is not None for param in op.params.values()]
        self._dtype = np.result_type(np.float32, *params)

    def _made(self, k: int, op: Operator | None) -> _Layer | _Sum:
        """Layer `k` as this rank computes it."""
        layer, state = self._graph.layers[k], self.layout.states[k]
        deep = any(self._trained[i] for i in layer.inputs)
        if op is None:
            return _Sum()
        if isinstance(op, StepShare):
            return _alone(op, deep, copied=False)
        if state == "rows" and layer.kind in ("conv", "pool"):
            return _Rows(op, layer, self._column, deep)
        if state in ("whole", "samples"):
            return _alone(op, deep)
        if self.layout.by_model(self._graph, k):
            return _alone(share_of(op, self._channels(k), op.input_shape), deep)
        return _alone(_like(op, self._local(layer.inputs[0], state)), deep)

    @property
    def communicator(self) -> Communicator:
        """Whose `traffic` says what this rank has sent."""
        return self._comm

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """One training step: forward, backward, SGD."""
        classes = math.prod(self._shapes[-1])
        x, labels = check_samples(x, labels, (self._batch, *self._shape), classes)
        with self._comm.ending("a training step"):
            # Ranks must send what others expect.
            x = x[self._mine].astype(np.result_type(self._dtype, x), copy=False)
            loss, grad = self._loss(self._forward(self._start(x)), labels[self._mine])
            self._backward(grad)
        return loss

    def _start(self, x: Array) -> dict[int, Array]:
        """What the first layer reads: of steps a first state of zeros; or what all of them make."""
        k, layer = next(iter(self._layers.items()))
        if isinstance(layer, _Layer) and isinstance(layer.stage, RecurrentStage):
            return {k: layer.forward(x[self._samples(self.layout.states[k], len(x))])}
        for step in self._steps:
            step.read(x)
        return {0: np.zeros((len(x), *self._shapes[0]), x.dtype) if self._steps else x}

    def _samples(self, state: str, count: int) -> slice:
        """Which of the samples of its column this rank has."""
        shares = self.layout.rows if state == "samples" else 1
        return slice(*parts(count, shares)[self._column.rank % shares])

    def _forward(self, held: dict[int, Array]) -> Array:
        """The output, as this rank has it, from that of the first of its layers or the input."""
        start, whole = max(held), dict[int, Array]()
        for k, layer in self._layers.items():
            if k <= start:
                continue
            before, state = self.layout.states[k - 1 : k + 1]
            moves, now = self._moves[k], self._live[k + 1]
            for i in moves.gathered:
                whole[i] = self._changed(held[i], i, before, "whole")
                if before != state:
                    held[i] = self._changed(whole[i], i, "whole", state)
            for i in moves.changed:
                held[i] = self._changed(held[i], i, before, state)
            given = whole if self.layout.by_model(self._graph, k) else held
            held[k] = layer.forward(*(given[i] for i in self._graph.layers[k].inputs))
            held = {i: held[i] for i in now}
            whole = {i: whole[i] for i in now if i in whole and state == "channels"}
        return held[k]

    def _loss(self, y: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
        """The mean over all samples, and the gradient of the output as this rank has it."""
        last, state = len(self._shapes) - 1, self.layout.states[-1]
        shared = state in ("channels", "rows")
        y = self._changed(y, last, state, "whole") if shared else y
        loss, grad = cross_entropy(y, labels[self._samples(state, len(labels))], self._batch)
        # Where all of a column have the same samples, one of them counts.
        counted = state == "samples" or self._column.rank == 0
        total = all_reduce(self._comm, np.array([loss if counted else 0.0]))
        grad = grad.reshape(y.shape)
        return float(total[0]), self._changed(grad, last, "whole", state) if shared else grad

    def _backward(self, grad: Array) -> None:
        """Gradients from the last layer on, and a step of SGD."""
        held, whole = {len(self._shapes) - 1: grad}, dict[int, Array]()
        grads: dict[int, dict[str, Array]] = {}
        for k, layer in reversed(self._layers.items()):
            one = self._graph.layers[k]
            if self._trained[k]:
                given = whole if self.layout.by_model(self._graph, k) else held
                grad_x, found = layer.backward(held.pop(k))
                for i in one.inputs:
                    if self._trained[i]:
                        _add(given, {i: grad_x})
                owner = self._owner(k)
                _add(grads.setdefault(owner, {}), found)
                if owner == k and isinstance(layer, _Layer):
                    self._descend(k, layer.params, grads.pop(k))
            self._undo(k, held, whole)

    def _owner(self, k: int) -> int:
        """Which of the layers has the parameters that layer `k` uses."""
        shares = self._graph.layers[k].shares
        return shares if shares in self._layers else k

    def _undo(self, k: int, held: dict[int, Array], whole: dict[int, Array]) -> None:
        """Make of gradients behind the moves of layer `k` those of what was there before.

        Those of what was gathered are sums over the ranks of a column: Figure 5.
        """
        before, state = self.layout.states[k - 1 : k + 1]
        for i in self._moves[k].changed:
            if i in held:
                held[i] = self._changed(held[i], i, state, before)
        for i in self._moves[k].gathered:
            if i in whole:
                total = whole.pop(i)
                if i in held:
                    total = total + self._placed(held[i], i)
                total = all_reduce(self._column, total.reshape(-1)).reshape(total.shape)
                held[i] = self._changed(total, i, "whole", before)

    def _descend(self, k: int, params: dict[str, Array], grads: dict[str, Array]) -> None:
        """Sum gradients of parameters over all who have the same, and take the step."""
        if not grads:
            return
        shared = self.layout.states[k] in ("samples", "rows")
        flat = np.concatenate([grad.reshape(-1) for grad in grads.values()])
        total = all_reduce(self._comm if shared else self._row, flat)
        start = 0
        for name in grads:
            param = params[name]
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
        return taken.reshape(len(taken), *self._local(k, state))

    def _placed(self, x: Array, k: int) -> Array:
        """The channels of this rank, and zeros for those of others."""
        whole = np.zeros((len(x), *self._shapes[k]), x.dtype)
        whole[:, self._channels(k)] = x
        return whole

    def _channels(self, k: int) -> slice:
        """Those of the output of layer `k` that this rank has."""
        a, b = parts(self._units[k], self._column.size)[self._column.rank]
        each = self._shapes[k][0] // self._units[k]
        return slice(each * a, each * b)

    def _local(self, k: int, state: str) -> Shape:
        """The shape of a sample of what this rank has of the output of layer `k`."""
        shape = self._shapes[k]
        if state == "rows":
            a, b = parts(shape[1], self._column.size)[self._column.rank]
            return shape[0], b - a, shape[2]
        if state == "channels":
            chosen = self._channels(k)
            return (chosen.stop - chosen.start, *shape[1:])
        return shape

    def parameters(self) -> list[dict[str, Array]]:
        """Parameters of every layer, whole, on all ranks; of a recurrent network see Training."""
        found = []
        for k, layer in self._layers.items():
            if isinstance(layer, _Layer) and self._owner(k) == k:
                params = {name: param.copy() for name, param in layer.params.items()}
                if self.layout.by_model(self._graph, k):
                    params = {name: self._joined(k, param) for name, param in params.items()}
                found.append(params)
        return found

    def _joined(self, k: int, param: Array) -> Array:
        """A parameter of which every rank of a column has some output channels; gate by gate."""
        count, chosen = self._shapes[k][0], self._channels(k)
        each, gates = count // self._units[k], len(param) // (chosen.stop - chosen.start)
        rows = [each * (b - a) for a, b in parts(self._units[k], self._column.size)]
        row = param.size // (chosen.stop - chosen.start)
        blocks = all_gather(self._column, param, [row * length for length in rows])
        shares = [
            block.reshape(gates, length, -1) for block, length in zip(blocks, rows, strict=True)
        ]
        return np.concatenate(shares, axis=1).reshape(gates * count, *param.shape[1:])


def _add(total: dict[Any, Array], found: dict[Any, Array]) -> None:
    """Add arrays to those of the same name, not in place."""
    for name, array in found.items():
        total[name] = total[name] + array if name in total else array
