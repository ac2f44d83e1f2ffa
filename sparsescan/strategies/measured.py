"""Measurements of layers and exchanges while all ranks of this machine work.

Layers are timed as they run in a training step, one after the other on all ranks at once: run again
and again on its own, a layer would find its data in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jacobians import Conv2d, Operator, Sequential
from ..parallel.communicator import Communicator
from ..parallel.network import observe, time_together
from .exchanges import GradientSums
from .machine import PARTS, Times, usual
from .networks import Recurrent, Step, Trainable, graph_of, operators
from .stage import RecurrentStage, Stage
from .strategy import cross_entropy

Array = NDArray[Any]
Floats = NDArray[np.float64]

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


def measure_exchanges(communicator: Communicator) -> tuple[float, float]:
    """Measure latency and inverse bandwidth of all-reduces, on at least two ranks; collective.

    Packing, Python and waiting are included: the time is what an all-reduce adds to a step of ranks
    that are never equally fast.
    """
    size = communicator.size
    rounds, shares = 2 * (size - 1).bit_length(), 2 * (size - 1) / size
    layer, x = Conv2d(4, 4, 3, input_shape=(4, 32, 32), rng=0), np.ones((4, 4, 32, 32), np.float32)

    def steps(count: int) -> float:
        data, sums = np.zeros(count, np.float32), GradientSums(communicator, [(count, range(size))])

        def several() -> None:
            for _ in range(_STEPS):
                layer.forward(x)
                if count:
                    sums.total(data)

        return time_together(communicator, several, _CALLS) / _STEPS

    # They take turns, so that other work on the machine slows down all of them.
    turns = [[steps(count) for count in (0, size, _LARGE)] for _ in range(_TURNS)]
    alone, small, large = np.median(turns, axis=0).tolist()
    each = max(large - small, 1.0) / (shares * 4 * (_LARGE - size))
    return max(small - alone - shares * each * 4 * size, 0.0) / rounds, each


def measure_times(comm: Any, network: Trainable, batch: int) -> Times:
    """Measure the layers of a network on all ranks at once, up to a batch; collective."""
    communicator = Communicator.of(comm)
    sizes = sorted({max(1, batch >> k) for k in range(_HALVINGS + 1)})
    if isinstance(network, Recurrent):
        times = _recurrent(communicator, network, sizes)
    else:
        times = _sequential(communicator, network, sizes)
    times.collectives = {
        name: time_together(communicator, lambda call=call: call(communicator), _CALLS)  # type: ignore[misc]
        for name, call in _COLLECTIVES.items()
    }
    times.exscan = observe(communicator, np.zeros((2, _WORDS), np.int64))
    return times


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
    alone = communicator.broadcast(usual(step, _STEPS) if communicator.rank == 0 else 1.0, 0)
    return float(min(max(together / alone, 1.0), communicator.size))


# -- Layers one after the other -------------------------------------------------------------------


class _Timed:
    """A stage, each part of which is timed."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.kept: list[Array] = []

    @property
    def op(self) -> Operator:
        """The layer, if it is one alone."""
        return self._stage.network.layers[0]

    def forward(self, x: Array) -> int:
        start = time.perf_counter_ns()
        self.kept = self._stage.forward(x)
        return time.perf_counter_ns() - start

    def backward(self, grad: Array) -> tuple[Array, list[int]]:
        ends = [time.perf_counter_ns()]
        values = self._stage.values(self.kept)
        ends.append(time.perf_counter_ns())
        grads = self._stage.product(grad, values)
        ends.append(time.perf_counter_ns())
        params = self._stage.param_grads(self.kept, grads)
        ends.append(time.perf_counter_ns())
        self._stage.descend(params, 0.0)
        ends.append(time.perf_counter_ns())
        return grads[-1], np.diff(ends).tolist()

    def parts(self, x: Array, grad: Array) -> list[int]:
        """Return nanoseconds of each of :data:`PARTS`."""
        return [self.forward(x), *self.backward(grad)[1]]


def _sequential(communicator: Communicator, network: Sequential, sizes: Sequence[int]) -> Times:
    graph = graph_of(network)
    ops = operators(network, graph)[1:]
    whole = [None if op is None else _Timed(Stage([op])) for op in ops]
    reads = [layer.inputs for layer in graph.layers[1:]]
    rng, classes = np.random.default_rng(communicator.rank), network.output_shape[0]
    data = rng.standard_normal((sizes[-1], *network.input_shape), np.float32)
    labels = rng.integers(classes, size=sizes[-1])
    batches = [(data[:size], labels[:size]) for size in sizes]
    table, losses = _apart(communicator, whole, reads, batches)
    parts = {part: table[:, k] for k, part in enumerate(PARTS)}
    # The shortest product, of a layer that does next to nothing, is the time of the chain itself.
    sweep = float(parts["product"].min())
    parts["product"] = parts["product"] - sweep
    total = table[..., -1].sum() + losses[-1]
    contention = _contention(communicator, lambda: _step(whole, reads, data, labels), total)
    layers = [layer for layer, op in zip(graph.layers[1:], ops, strict=True) if op is not None]
    return Times(layers, sizes, parts, {}, losses, sweep, {}, contention)


def _apart(
    communicator: Communicator,
    layers: Sequence[_Timed | None],
    reads: Sequence[tuple[int, ...]],
    batches: Iterable[tuple[Array, Array]],
) -> tuple[Floats, Floats]:
    """Return times of the parts of each layer, (layers, parts, batches), and of the loss."""
    means = [
        _mean(communicator, lambda: _step(layers, reads, x, labels))  # noqa: B023
        for x, labels in batches
    ]
    parts = [mean[:-1].reshape(-1, len(PARTS)) for mean in means]
    return np.stack(parts, axis=-1), np.array([mean[-1] for mean in means])


def _step(
    layers: Sequence[_Timed | None], reads: Sequence[tuple[int, ...]], x: Array, labels: Any
) -> list[int]:
    """Return times of each part of each layer, and of the loss; None is a sum of its inputs."""
    outputs, times = [x], list[list[int]]()
    for layer, inputs in zip(layers, reads, strict=True):
        if layer is None:
            times.append([])
            outputs.append(sum((outputs[i] for i in inputs[1:]), outputs[inputs[0]]))
        else:
            times.append([layer.forward(outputs[inputs[0]])])
            outputs.append(layer.kept[-1])
    start = time.perf_counter_ns()
    grads: list[Any] = [None] * len(layers) + [cross_entropy(outputs[-1], labels, len(x))[1]]
    loss = time.perf_counter_ns() - start
    for k, (layer, inputs) in reversed(list(enumerate(zip(layers, reads, strict=True)))):
        grad = grads[k + 1].reshape(len(x), -1)
        if layer is not None:
            grad, backward = layer.backward(grad)
            times[k] += backward
        for i in inputs:
            grads[i] = grad if grads[i] is None else grads[i] + grad
    return [taken for own in times for taken in own] + [loss]


# -- Recurrent networks ---------------------------------------------------------------------------


def _recurrent(communicator: Communicator, network: Recurrent, sizes: Sequence[int]) -> Times:
    """Measure each step by itself, as most strategies run it, and all at once, as a scan does.

    The time of a chain of products by itself, and that of an update, are common to both.
    """
    rng, cell = np.random.default_rng(communicator.rank), network.cell
    shape = network.input_shape
    samples = {size: rng.standard_normal((size, *shape), np.float32) for size in sizes}
    ops = [op for op in network.ops if isinstance(op, Step)][:_CELLS]
    steps = [_Timed(Stage([op])) for op in ops]

    def batches() -> Iterable[tuple[Array, Array]]:
        for size in sizes:
            for one in steps:
                one.op.read(samples[size])  # type: ignore[attr-defined]
            start = np.zeros((size, cell.state_size), np.float32)
            yield start, rng.integers(network.output_shape[0], size=size)

    layers = [*steps, _Timed(Stage([network.readout]))]
    table, losses = _apart(communicator, layers, [(k,) for k in range(len(layers))], batches())
    one, readout = table[:-1].mean(axis=0), table[-1]
    call, each, contention = _at_once(communicator, network, samples)
    product = PARTS.index("product")
    sweep = float(call[product].mean())
    call[product] = 0
    one[product] = np.maximum(one[product] - sweep, 0)
    parts = {part: np.stack([one[k], readout[k]]) for k, part in enumerate(PARTS)}
    calls = {part: np.stack([call[k], each[k]]) for k, part in enumerate(PARTS)}
    graph = network.graph().layers
    return Times((graph[1], graph[-1]), sizes, parts, calls, losses, sweep, {}, contention)


def _at_once(
    communicator: Communicator, network: Recurrent, samples: Mapping[int, Array]
) -> tuple[Floats, Floats, float]:
    """Return times of a call for all steps, and of each, (parts, sizes), and contention."""
    counts, tables = (max(1, network.steps // 2), network.steps), []
    for count in counts:
        # Half of the steps, as the first of two parts has, and all.
        part = _Timed(RecurrentStage(network.ops[:count]))

        def step(size: int) -> list[int]:
            grad = np.ones((size, network.cell.state_size), np.float32)
            return part.parts(samples[size], grad)  # noqa: B023

        means = [_mean(communicator, lambda: step(size)) for size in samples]  # noqa: B023
        tables.append(np.stack(means, axis=-1))
    few, many = tables
    each = np.maximum(many - few, 0) / max(counts[1] - counts[0], 1)
    call = np.maximum(many - counts[1] * each, 0)
    contention = _contention(communicator, lambda: step(max(samples)), many[:, -1].sum())
    return call, each, contention
