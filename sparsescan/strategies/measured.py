"""Measurements of layers and exchanges while all ranks of this machine work.

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

from .. import api
from ..jacobians import Conv2d, Linear, Operator, Sequential
from ..parallel.communicator import Communicator
from ..parallel.exchange import observe
from .architectures import from_sequential
from .collectives import Sums
from .recurrent import Recurrent, Step, Trainable, operators
from .stage import RecurrentStage, Stage
from .strategy import cross_entropy
from .times import PARTS, Times

__all__ = ["measure_exchanges", "measure_times"]

Array = NDArray[Any]

# Halvings of the batch, steps before a measurement and in it.
_HALVINGS, _WARM, _STEPS = 4, 2, 15
# Steps of a recurrent network that are measured one by one; numbers sent, calls, and turns.
_CELLS = 8
_LARGE, _CALLS, _TURNS = 1 << 16, 15, 5
# Words of an element of an exclusive scan.
_WORDS = 1 << 10
_COLLECTIVES: dict[str, Callable[[Communicator], object]] = {
    "maximum": lambda communicator: communicator.maximum([0]),
    "broadcast": lambda communicator: communicator.broadcast(0.0, communicator.size - 1),
    "gather": lambda communicator: communicator.gather(0.0),
}


class _Clock:
    """A clock that returns the nanoseconds since its last call."""

    def __init__(self) -> None:
        self._last = time.perf_counter_ns()

    def __call__(self) -> int:
        before, self._last = self._last, time.perf_counter_ns()
        return self._last - before


def measure_exchanges(communicator: Communicator) -> tuple[float, float]:
    """Measure latency and inverse bandwidth of all-reduces, on at least two ranks; collective.

    Packing, Python and waiting are included: the time is what an all-reduce adds to a step of ranks
    that are never equally fast.
    """
    size = communicator.size
    rounds, shares = 2 * (size - 1).bit_length(), 2 * (size - 1) / size
    layer, x = Conv2d(4, 4, 3, input_shape=(4, 32, 32), rng=0), np.ones((4, 4, 32, 32), np.float32)

    def steps(count: int) -> float:
        data, sums = np.zeros(count, np.float32), Sums(communicator, [(count, range(size))])

        def several() -> None:
            for _ in range(_STEPS):
                layer.forward(x)
                if count:
                    sums.total(data)

        return _together(communicator, several) / _STEPS

    # They take turns, so that other work on the machine slows down all of them.
    turns = [[steps(count) for count in (0, size, _LARGE)] for _ in range(_TURNS)]
    alone, small, large = np.median(turns, axis=0).tolist()
    each = max(large - small, 1.0) / (shares * 4 * (_LARGE - size))
    return max(small - alone - shares * each * 4 * size, 0.0) / rounds, each


def measure_times(comm: Any, network: Trainable, batch: int) -> Times:
    """Measure the layers of a network on all ranks at once; collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    network : Sequential or Recurrent
        The network.
    batch : int
        The largest number of samples that is measured.
    """
    communicator = Communicator.of(comm)
    sizes = sorted({max(1, batch >> k) for k in range(_HALVINGS + 1)})
    if isinstance(network, Recurrent):
        times = _recurrent(communicator, network, sizes)
    else:
        times = _sequential(communicator, network, sizes)
    times.collectives = {
        name: _together(communicator, lambda call=call: call(communicator))  # type: ignore[misc]
        for name, call in _COLLECTIVES.items()
    }
    times.exscan = observe(communicator, np.zeros((2, _WORDS), np.int64))
    return times


def _together(communicator: Communicator, call: Callable[[], object]) -> float:
    """Return the median nanoseconds, on the slowest rank, of a call by all ranks together."""
    samples = []
    for _ in range(_CALLS):
        communicator.agree()
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return float(communicator.maximum([round(median(samples))])[0])


def _mean(communicator: Communicator, step: Callable[[], list[Any]]) -> Any:
    """Return the mean time of each part of a step on all ranks at once.

    Medians of parts leave out the time in which another rank has the core, so they are scaled to
    add up to the whole step.
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
    """Return the time of a step on all ranks at once over that on the first rank alone."""
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
    """A layer alone, each part of which is timed."""

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
        times = [clock()]
        grads = self._stage.product(grad, values)
        times.append(clock())
        params = self._stage.param_grads(self.kept, grads)
        times.append(clock())
        self._stage.descend(params, 0.0)
        times.append(clock())
        return grads[-1], times


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
        means = _mean(communicator, lambda: step(size))  # noqa: B023
        losses.append(means[-1])
        tables.append(means[:-1].reshape(len(layers), len(PARTS)))
    table = np.stack(tables, axis=-1)
    parts = {part: table[:, k] for k, part in enumerate(PARTS)}
    # The shortest product, of a layer that does next to nothing, is the time of the chain itself.
    sweep = float(parts["product"].min())
    parts["product"] = parts["product"] - sweep
    halves = _halves(communicator, [one for one in whole if one is not None])
    halves["product"] -= sweep
    contention = _contention(communicator, lambda: step(sizes[-1]), means.sum())
    return Times(layers, sizes, parts, halves, {}, np.array(losses), sweep, {}, contention)


def _step(
    layers: Sequence[_Timed | None], reads: Sequence[tuple[int, ...]], x: Array, labels: Any
) -> list[int]:
    """Return times of each part of each layer, and of the loss; None is a sum of its inputs."""
    clock, outputs = _Clock(), [x]
    times: list[list[int]] = []
    for layer, inputs in zip(layers, reads, strict=True):
        if layer is None:
            times.append([])
            outputs.append(sum((outputs[i] for i in inputs[1:]), outputs[inputs[0]]))
        else:
            times.append([layer.forward(outputs[inputs[0]], clock)])
            outputs.append(layer.kept[-1])
    clock()
    grads: list[Any] = [None] * len(layers) + [cross_entropy(outputs[-1], labels, len(x))[1]]
    loss = clock()
    for k, (layer, inputs) in reversed(list(enumerate(zip(layers, reads, strict=True)))):
        grad = grads[k + 1].reshape(len(x), -1)
        if layer is not None:
            grad, backward = layer.backward(grad, clock)
            times[k] += backward
        for i in inputs:
            grads[i] = grad if grads[i] is None else grads[i] + grad
    return [taken for own in times for taken in own] + [loss]


def _halves(communicator: Communicator, layers: Sequence[_Timed]) -> dict[str, NDArray[np.float64]]:
    """Return times of layers with weights, the whole beside half of their output channels."""
    table = np.full((len(PARTS), len(layers), 2), np.nan)
    for k, whole in enumerate(layers):
        op = whole.op
        if isinstance(op, (Conv2d, Linear)) and op.output_shape[0] > 1:
            half = op.restrict(op.input_shape, slice(0, op.output_shape[0] // 2))
            table[:, k] = _beside(communicator, whole, _Timed(half))
    return {part: table[k] for k, part in enumerate(PARTS)}


def _beside(communicator: Communicator, whole: _Timed, half: _Timed) -> NDArray[np.float64]:
    """Return times of each part of a layer and of half of it, in turns; (parts, 2)."""
    x = whole.kept[0]
    pairs = [(one, np.ones((len(x), *one.op.output_shape), np.float32)) for one in (whole, half)]

    def step() -> list[list[int]]:
        clock = _Clock()
        return [[one.forward(x, clock), *one.backward(grad, clock)[1]] for one, grad in pairs]

    times: NDArray[np.float64] = _mean(communicator, step).T
    return times


# -- Recurrent networks ---------------------------------------------------------------------------


def _recurrent(communicator: Communicator, network: Recurrent, sizes: Sequence[int]) -> Times:
    """Measure each step by itself, as most strategies run it, and all at once, as a scan does.

    The time of a chain of products by itself, and that of an update, are common to both.
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
    # Workers that share the readout's few classes are taken to share its work.
    halves = {part: np.stack([half[k], np.full(2, np.nan)]) for k, part in enumerate(PARTS)}
    layers = network.graph().layers
    known = layers[1], layers[-1]
    return Times(known, sizes, parts, halves, calls, losses, sweep, {}, contention)


def _apart(
    communicator: Communicator, network: Recurrent, sizes: Sequence[int]
) -> tuple[NDArray[np.float64], ...]:
    """Return times of a step, the readout and the loss by size, and of half of the cell."""
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
        means = _mean(communicator, lambda: _step(layers, reads, start, labels))  # noqa: B023
        tables.append(means[:-1].reshape(len(layers), len(PARTS)))
        losses.append(means[-1])
    table, half = np.stack(tables, axis=-1), np.full((len(PARTS), 2), np.nan)
    if cell.state_size == cell.hidden_size > 1:
        share = _Timed(Step(cell.restrict(slice(0, cell.hidden_size // 2)), 0))
        cast(Step, share.op).read(x)
        half = _beside(communicator, steps[0], share)
    return table[:-1].mean(axis=0), table[-1], np.array(losses), half


def _at_once(
    communicator: Communicator, network: Recurrent, sizes: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return times of a call for all steps, and of each, (parts, sizes), and contention."""
    counts = max(1, network.steps // 2), network.steps
    rng, tables = np.random.default_rng(communicator.rank), []
    for count in counts:
        # Half of the steps, as the first of two parts has, and all.
        part = RecurrentStage(network.ops[:count])
        plan = api.plan(part.patterns, schedule="linear")
        means = []
        for size in sizes:
            x = rng.standard_normal((size, *network.input_shape), np.float32)
            grad = np.ones((size, network.cell.state_size), np.float32)
            means.append(_mean(communicator, lambda: _cells(part, plan, x, grad)))  # noqa: B023
        tables.append(np.stack(means, axis=-1))
    few, many = tables
    each = np.maximum(many - few, 0) / max(counts[1] - counts[0], 1)
    call = np.maximum(many - counts[1] * each, 0)
    contention = _contention(communicator, lambda: _cells(part, plan, x, grad), many[:, -1].sum())
    return call, each, contention


def _cells(part: RecurrentStage, plan: Any, x: Array, grad: Array) -> list[int]:
    """Return nanoseconds of each part of all steps in one call."""
    clock = _Clock()
    activations = part.forward(x)
    times = [clock()]
    values = part.values(activations)
    times.append(clock())
    grads = list(plan.exclusive_scan(grad, values))
    times.append(clock())
    params = part.param_grads(activations, grads)
    times.append(clock())
    part.descend(params, 0.0)
    return [*times, clock()]
