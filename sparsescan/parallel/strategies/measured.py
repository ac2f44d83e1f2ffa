"""Measured: what a worker of this machine takes while all ranks work, layer by layer.

Layers are timed as they run in a training step, one after the other on all ranks at once: run again
and again on its own, a layer would find its data in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ... import api
from ...jacobians import Conv2d, Linear, Operator, Sequential
from ..communicator import Communicator
from ..exchange import observe
from .architectures import from_sequential
from .cell_share import CellShare, StepShare
from .collectives import all_reduce
from .integrated_run import share_of
from .recurrent import Network, Recurrent, Step, operators
from .scan import Steps
from .stage import Stage
from .strategy import cross_entropy
from .times import PARTS, Times

__all__ = ["measure_exchanges", "measure_times"]

Array = NDArray[Any]

# Of a measurement: halvings of the batch, steps before it and in it; what is sent, and how often.
_HALVINGS, _WARM, _STEPS = 4, 2, 15
# Steps of a recurrent network that are measured one by one.
_CELLS = 8
_LARGE, _CALLS, _TURNS = 1 << 16, 15, 5
# Of an element of an exclusive scan.
_WORDS = 1 << 10
_COLLECTIVES: dict[str, Callable[[Communicator], object]] = {
    "maximum": lambda communicator: communicator.maximum([0]),
    "broadcast": lambda communicator: communicator.broadcast(0.0, communicator.size - 1),
    "gather": lambda communicator: communicator.gather(0.0),
}


class _Clock:
    """Nanoseconds between what follows each other."""

    def __init__(self) -> None:
        self._last = time.perf_counter_ns()

    def __call__(self) -> int:
        before, self._last = self._last, time.perf_counter_ns()
        return self._last - before


def measure_exchanges(communicator: Communicator) -> tuple[float, float]:
    """Latency and inverse bandwidth as an all-reduce has them, on at least two ranks; collective.

    With packing and unpacking, with what Python takes, and with waiting: it is what a step takes
    longer if ranks, which are never equally fast, meet in it.
    """
    size = communicator.size
    rounds, shares = 2 * (size - 1).bit_length(), 2 * (size - 1) / size
    layer, x = Conv2d(4, 4, 3, input_shape=(4, 32, 32), rng=0), np.ones((4, 4, 32, 32), np.float32)

    def steps(count: int) -> float:
        data = np.zeros(count, np.float32)

        def several() -> None:
            for _ in range(_STEPS):
                layer.forward(x)
                if count:
                    all_reduce(communicator, data)

        return _together(communicator, several) / _STEPS

    # In turns, so that what else the machine does meets all of them.
    turns = [[steps(count) for count in (0, size, _LARGE)] for _ in range(_TURNS)]
    alone, small, large = np.median(turns, axis=0).tolist()
    each = max(large - small, 1.0) / (shares * 4 * (_LARGE - size))
    return max(small - alone - shares * each * 4 * size, 0.0) / rounds, each


def measure_times(comm: Any, network: Network, batch: int) -> Times:
    """What the layers of a network take on all ranks at once; collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    network : Sequential or Recurrent
        The network.
    batch : int
        The most samples that are measured.
    """
    communicator = Communicator.of(comm)
    sizes = sorted({max(1, batch >> k) for k in range(_HALVINGS + 1)})
    if isinstance(network, Recurrent):
        found = _recurrent(communicator, network, sizes)
    else:
        found = _sequential(communicator, network, sizes)
    found.collectives = {
        name: _together(communicator, lambda call=call: call(communicator))  # type: ignore[misc]
        for name, call in _COLLECTIVES.items()
    }
    found.exscan = observe(communicator, np.zeros((2, _WORDS), np.int64))
    return found


def _together(communicator: Communicator, call: Callable[[], object]) -> float:
    """Nanoseconds of a call that all ranks make together: of the slowest, the median."""
    samples = []
    for _ in range(_CALLS):
        communicator.agree()
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return float(communicator.maximum([round(median(samples))])[0])


def _mean(communicator: Communicator, step: Callable[[], list[Any]]) -> Any:
    """What a step takes by part on all ranks at once, the mean over them, so that it adds up.

    The median of a part knows nothing of the time in which another rank had the core.
    """
    for _ in range(_WARM):
        step()
    communicator.agree()
    start, samples = time.perf_counter_ns(), [step() for _ in range(_STEPS)]
    whole = (time.perf_counter_ns() - start) / _STEPS
    every = communicator.gather((np.median(np.array(samples, float), axis=0), whole))
    mean = np.mean([one[0] for one in every], axis=0)
    return mean * (np.mean([one[1] for one in every]) / mean.sum())


def _contention(communicator: Communicator, step: Callable[[], object], together: float) -> float:
    """How many times as long a step takes on all ranks at once as on the first of them alone."""
    communicator.agree()
    samples = [1]
    if communicator.rank == 0:
        samples = []
        for _ in range(_STEPS):
            start = time.perf_counter_ns()
            step()
            samples.append(time.perf_counter_ns() - start)
    alone = communicator.broadcast(median(samples), 0)
    return float(min(max(together / alone, 1.0), communicator.size))


# -- Layers one after the other -------------------------------------------------------------------


class _Timed:
    """A layer alone, and what each of its parts takes."""

    def __init__(self, op: Operator) -> None:
        self._stage = Stage([op])
        self.kept: list[Array] = []

    @property
    def op(self) -> Operator:
        """The layer."""
        return self._stage.network.layers[0]

    def forward(self, x: Array, clock: _Clock) -> int:
        clock()
        self.kept = self._stage.forward(x)
        return clock()

    def backward(self, grad: Array, clock: _Clock) -> tuple[Array, list[int]]:
        clock()
        values = self._stage.values(self.kept)
        found = [clock()]
        grads = self._stage.product(grad, values)
        found.append(clock())
        params = self._stage.network.param_grads(self.kept, grads)
        found.append(clock())
        self._stage.descend(params, 0.0)
        found.append(clock())
        return grads[-1], found


def _sequential(communicator: Communicator, network: Sequential, sizes: Sequence[int]) -> Times:
    graph = from_sequential(network)
    ops = operators(network, graph)[1:]
    whole = [None if op is None else _Timed(op) for op in ops]
    reads = [layer.inputs for layer in graph.layers[1:]]
    rng, classes = np.random.default_rng(communicator.rank), network.output_shape[0]
    data = rng.standard_normal((sizes[-1], *network.input_shape), np.float32)
    labels = rng.integers(classes, size=sizes[-1])
    layers = [layer for layer, op in zip(graph.layers[1:], ops, strict=True) if op is not None]
    tables, losses = [], []

    def step(size: int) -> list[int]:
        return _step(whole, reads, data[:size], labels[:size])

    for size in sizes:
        found = _mean(communicator, lambda: step(size))  # noqa: B023
        losses.append(found[-1])
        tables.append(found[:-1].reshape(len(layers), len(PARTS)))
    table = np.stack(tables, axis=-1)
    parts = {part: table[:, k] for k, part in enumerate(PARTS)}
    # Of layers that do next to nothing, all that is left is what a chain takes by itself.
    sweep = float(parts["product"].min())
    parts["product"] = parts["product"] - sweep
    halves = _halves(communicator, [one for one in whole if one is not None])
    halves["product"] -= sweep
    contention = _contention(communicator, lambda: step(sizes[-1]), found.sum())
    return Times(layers, sizes, parts, halves, {}, np.array(losses), sweep, {}, contention)


def _step(
    layers: Sequence[_Timed | None], reads: Sequence[tuple[int, ...]], x: Array, labels: Any
) -> list[int]:
    """What each part of each layer takes, and the loss; None is a sum of what it reads."""
    clock, made = _Clock(), [x]
    found: list[list[int]] = []
    for layer, inputs in zip(layers, reads, strict=True):
        if layer is None:
            found.append([])
            made.append(sum((made[i] for i in inputs[1:]), made[inputs[0]]))
        else:
            found.append([layer.forward(made[inputs[0]], clock)])
            made.append(layer.kept[-1])
    clock()
    grads: list[Any] = [None] * len(layers) + [cross_entropy(made[-1], labels, len(x))[1]]
    loss = clock()
    for k, (layer, inputs) in reversed(list(enumerate(zip(layers, reads, strict=True)))):
        grad = grads[k + 1].reshape(len(x), -1)
        if layer is not None:
            grad, times = layer.backward(grad, clock)
            found[k] += times
        for i in inputs:
            grads[i] = grad if grads[i] is None else grads[i] + grad
    return [taken for times in found for taken in times] + [loss]


def _halves(communicator: Communicator, layers: Sequence[_Timed]) -> dict[str, NDArray[np.float64]]:
    """Of layers with weights, the whole beside half of their output channels."""
    found = np.full((len(PARTS), len(layers), 2), np.nan)
    for k, whole in enumerate(layers):
        op = whole.op
        if isinstance(op, (Conv2d, Linear)) and op.output_shape[0] > 1:
            half = share_of(op, slice(0, op.output_shape[0] // 2), op.input_shape)
            found[:, k] = _beside(communicator, whole, _Timed(half))
    return {part: found[k] for k, part in enumerate(PARTS)}


def _beside(communicator: Communicator, whole: _Timed, half: _Timed) -> NDArray[np.float64]:
    """Each part of a layer, and of half of it, by turns; (parts, 2)."""
    x = whole.kept[0]
    pairs = [(one, np.ones((len(x), *one.op.output_shape), np.float32)) for one in (whole, half)]

    def step() -> list[list[int]]:
        clock = _Clock()
        return [[one.forward(x, clock), *one.backward(grad, clock)[1]] for one, grad in pairs]

    found: NDArray[np.float64] = _mean(communicator, step).T
    return found


# -- Recurrent networks ---------------------------------------------------------------------------


def _recurrent(communicator: Communicator, network: Recurrent, sizes: Sequence[int]) -> Times:
    """Each step by itself, as most strategies run it, and as one of all that a scan runs at once.

    What a chain of products takes by itself, and an update, is the same for both.
    """
    cell, readout, losses, half = _apart(communicator, network, sizes)
    call, each, contention = _at_once(communicator, network, sizes)
    product = PARTS.index("product")
    sweep = float(call[product].mean())
    call[product] = 0
    for table in (cell, half):
        table[product] = np.maximum(table[product] - sweep, 0)
    parts = {part: np.stack([cell[k], readout[k]]) for k, part in enumerate(PARTS)}
    calls = {part: np.stack([call[k], each[k]]) for k, part in enumerate(PARTS)}
    # Workers that share the readout's few classes are taken to have less of it each.
    halves = {part: np.stack([half[k], np.full(2, np.nan)]) for k, part in enumerate(PARTS)}
    layers = network.graph().layers
    known = layers[1], layers[-1]
    return Times(known, sizes, parts, halves, calls, losses, sweep, {}, contention)


def _apart(
    communicator: Communicator, network: Recurrent, sizes: Sequence[int]
) -> tuple[NDArray[np.float64], ...]:
    """Of a step and the readout, (parts, sizes); of the loss; of half of the cell, (parts, 2)."""
    rng, cell = np.random.default_rng(communicator.rank), network.cell
    steps = [_Timed(op) for op in network.ops[: min(network.steps, _CELLS)]]
    layers, tables, losses = [*steps, _Timed(network.readout)], [], []
    reads = [(k,) for k in range(len(layers))]
    for size in sizes:
        x = rng.standard_normal((size, *network.input_shape), np.float32)
        for step in steps:
            cast(Step, step.op).read(x)
        start = np.zeros((size, cell.state_size), np.float32)
        labels = rng.integers(network.output_shape[0], size=size)
        found = _mean(communicator, lambda: _step(layers, reads, start, labels))  # noqa: B023
        tables.append(found[:-1].reshape(len(layers), len(PARTS)))
        losses.append(found[-1])
    table, half = np.stack(tables, axis=-1), np.full((len(PARTS), 2), np.nan)
    if cell.state_size == cell.hidden_size > 1:
        share = _Timed(StepShare(CellShare(cell, slice(0, cell.hidden_size // 2)), 0))
        cast(Step, share.op).read(x)
        half = _beside(communicator, steps[0], share)
    return table[:-1].mean(axis=0), table[-1], np.array(losses), half


def _at_once(
    communicator: Communicator, network: Recurrent, sizes: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Of all steps in one call: what that takes, and each of them, (parts, sizes); contention."""
    counts = max(1, network.steps // 2), network.steps
    rng, tables = np.random.default_rng(communicator.rank), []
    for count in counts:
        # As of the first of two parts, and as of one that is all.
        part = Steps(network, range(count))
        plan = api.plan(part.jacobians, schedule="linear")
        found = []
        for size in sizes:
            x = rng.standard_normal((size, *network.input_shape), np.float32)
            grad = np.ones((size, network.cell.state_size), np.float32)
            found.append(_mean(communicator, lambda: _cells(part, plan, x, grad)))  # noqa: B023
        tables.append(np.stack(found, axis=-1))
    few, many = tables
    each = np.maximum(many - few, 0) / max(counts[1] - counts[0], 1)
    call = np.maximum(many - counts[1] * each, 0)
    contention = _contention(communicator, lambda: _cells(part, plan, x, grad), many[:, -1].sum())
    return call, each, contention


def _cells(part: Steps, plan: Any, x: Array, grad: Array) -> list[int]:
    clock = _Clock()
    part.forward(x, None)
    found = [clock()]
    values = part.values()
    found.append(clock())
    grads = list(plan.exclusive_scan(grad, values))
    found.append(clock())
    (params,) = part.param_grads(grads)
    found.append(clock())
    for name, gradient in params.items():
        part.parameters[0][name] -= 0.0 * gradient
    return [*found, clock()]
