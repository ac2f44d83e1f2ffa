"""Measured: what a worker of this machine takes while all ranks work, layer by layer.

Layers are timed as they run in a training step, one after the other on all ranks at once: run again
and again on its own, a layer would find its data in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import api
from ...jacobians import Conv2d, Linear, Operator, Sequential
from ..communicator import Communicator
from .architectures import from_sequential
from .collectives import all_reduce
from .integrated_run import share_of
from .recurrent import Network, Recurrent
from .scan import Steps
from .stage import Stage
from .strategy import cross_entropy
from .times import PARTS, Times

__all__ = ["measure_exchanges", "measure_times"]

Array = NDArray[Any]

# Of a measurement: halvings of the batch, steps before it and in it; what is sent, and how often.
_HALVINGS, _WARM, _STEPS = 4, 2, 15
_LARGE, _CALLS, _TURNS = 1 << 16, 15, 5
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

    def forward(self, x: Array, clock: _Clock) -> int:
        clock()
        self.kept = self._stage.forward(x)
        return clock()

    def backward(self, grad: Array, clock: _Clock) -> tuple[Array, list[int]]:
        clock()
        values = self._stage.network.values(self.kept)
        found = [clock()]
        grads = self._stage.product(grad, values)
        found.append(clock())
        params = self._stage.network.param_grads(self.kept, grads)
        found.append(clock())
        self._stage.descend(params, 0.0)
        found.append(clock())
        return grads[-1], found


def _sequential(communicator: Communicator, network: Sequential, sizes: Sequence[int]) -> Times:
    layers = from_sequential(network).layers[1:]
    whole = [_Timed(op) for op in network.layers]
    rng, classes = np.random.default_rng(communicator.rank), network.output_shape[0]
    data = rng.standard_normal((sizes[-1], *network.input_shape), np.float32)
    labels = rng.integers(classes, size=sizes[-1])
    tables, losses = [], []
    for size in sizes:
        found = _mean(communicator, lambda: _step(whole, data[:size], labels[:size]))  # noqa: B023
        losses.append(found[-1])
        tables.append(found[:-1].reshape(len(layers), len(PARTS)))
    table = np.stack(tables, axis=-1)
    parts = {part: table[:, k] for k, part in enumerate(PARTS)}
    # Of layers that do next to nothing, all that is left is what a chain takes by itself.
    sweep = float(parts["product"].min())
    parts["product"] = parts["product"] - sweep
    halves = _halves(communicator, network, data)
    halves["product"] -= sweep
    contention = _contention(communicator, lambda: _step(whole, data, labels), found.sum())
    return Times(layers, sizes, parts, halves, {}, np.array(losses), sweep, {}, contention)


def _step(layers: Sequence[_Timed], x: Array, labels: Any) -> list[int]:
    clock, found = _Clock(), []
    for layer in layers:
        found.append([layer.forward(x, clock)])
        x = layer.kept[-1]
    clock()
    grad: Array = cross_entropy(x, labels, len(x))[1]
    loss = clock()
    for layer, times in zip(reversed(layers), reversed(found), strict=True):
        grad, more = layer.backward(grad, clock)
        times += more
    return [taken for times in found for taken in times] + [loss]


def _halves(
    communicator: Communicator, network: Sequential, data: Array
) -> dict[str, NDArray[np.float64]]:
    """Of layers with weights, the whole beside half of their output channels."""
    found = np.full((len(PARTS), len(network.layers), 2), np.nan)
    xs = network.activations(data)
    for k, (op, x) in enumerate(zip(network.layers, xs[:-1], strict=True)):
        if not isinstance(op, (Conv2d, Linear)) or op.output_shape[0] < 2:
            continue
        half = slice(0, op.output_shape[0] // 2)
        pair = [_Timed(op), _Timed(share_of(op, half, op.input_shape))]
        grad = np.ones((len(x), *op.output_shape), np.float32)
        both = [grad, np.ascontiguousarray(grad[:, half])]

        def step(pair: list[_Timed] = pair, x: Array = x, both: list[Array] = both) -> list[Any]:
            clock, times = _Clock(), []
            for one, grad in zip(pair, both, strict=True):
                times.append([one.forward(x, clock), *one.backward(grad, clock)[1]])
            return times

        found[:, k] = _mean(communicator, step).T
    return {part: found[k] for k, part in enumerate(PARTS)}


# -- Recurrent networks ---------------------------------------------------------------------------


def _recurrent(communicator: Communicator, network: Recurrent, sizes: Sequence[int]) -> Times:
    graph = network.graph()
    layers = graph.layers[1], graph.layers[-1]
    counts = (max(1, network.steps // 2), network.steps)
    rng = np.random.default_rng(communicator.rank)
    classes = network.readout.out_features
    tables = []
    for count in counts:
        # As of the first of two parts, and as of one that is all.
        part = Steps(network, range(count))
        plan = api.plan(part.jacobians, schedule="linear")
        found = []
        for size in sizes:
            x0 = rng.standard_normal((size, *network.input_shape), np.float32)
            grad = np.ones((size, network.cell.state_size), np.float32)
            found.append(_mean(communicator, lambda: _cells(part, plan, x0, grad)))  # noqa: B023
        tables.append(np.stack(found, axis=-1))
    few, many = tables
    each = np.maximum(many - few, 0) / max(counts[1] - counts[0], 1)
    call = np.maximum(many - counts[1] * each, 0)
    reading = _Timed(network.readout)
    found = []
    for size in sizes:
        x = rng.standard_normal((size, network.cell.state_size), np.float32)
        labels = rng.integers(classes, size=size)
        found.append(_mean(communicator, lambda: _step([reading], x, labels)))  # noqa: B023
    readout = np.stack(found, axis=-1)
    parts = {part: np.stack([each[k], readout[k]]) for k, part in enumerate(PARTS)}
    sweep = float(call[PARTS.index("product")].mean())
    parts["product"][1] = 0
    # An update is one of all steps together.
    parts["update"][0] = call[-1] + counts[1] * each[-1]
    calls = {part: call[k] for k, part in enumerate(PARTS)}
    nothing = {part: np.full((2, 2), np.nan) for part in PARTS}
    contention = _contention(communicator, lambda: _cells(part, plan, x0, grad), many[:, -1].sum())
    return Times(layers, sizes, parts, nothing, calls, readout[-1], sweep, {}, contention)


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
