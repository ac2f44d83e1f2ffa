"""Pipelined back-propagation: with stale weights, and with micro-batches instead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .graph import Graph, blocks
from .machine import Machine
from .pipeline_ranks import MicroBatchTraining, PipelineTraining
from .pipeline_schedule import Placement
from .recurrent import Trainable, as_graph, graph_of
from .strategy import Job, LayerPlan, Prediction, Strategy, Training

__all__ = ["MicroBatches", "Pipeline", "balance"]

_Costs = NDArray[np.float64]

# Most places for registers among which the best are chosen; tables grow with its square.
_PLACES = 4096


class _Stages(Strategy):
    """A pipeline with a stage of the network on each worker."""

    def __init__(self, registers: Sequence[int] | None = None) -> None:
        self._given = None if registers is None else tuple(registers)

    def placement(
        self, network: Graph | Trainable, machine: Machine, workers: int, batch: int
    ) -> Placement:
        """Place the registers: by dynamic programming, if they are not given.

        They are where one output is all that later layers read, and not between layers that share
        their weights: so a recurrent network has two stages at most, its steps and its readout.

        Parameters
        ----------
        network, machine, workers, batch
            As for :meth:`predict`.

        Raises
        ------
        InputError
            If there are more workers than stages, or registers where none can be.
        """
        graph = as_graph(network)
        forward, backward, messages = _times(graph, machine, batch)
        return self._place(graph, forward + backward, messages, workers)

    def _place(self, network: Graph, work: _Costs, messages: _Costs, workers: int) -> Placement:
        """Return the registers that are given, checked, or those that balance the stages."""
        layers, inside = len(network.layers) - 1, _inside(network)
        if self._given is not None:
            return _checked(Placement(layers, self._given), workers, inside)
        places = np.flatnonzero(~np.logical_or.reduce([*inside.values()]))
        if len(places) > _PLACES:
            raise InputError(
                f"{network.name} can be cut in {len(places) - 2} places; expected {_PLACES} at "
                "most, or registers that are given"
            )
        ends = np.concatenate([[0], np.cumsum(work)])[places]
        chosen = balance(_costs(ends, messages[places]), workers)
        if chosen is None:
            raise InputError(
                f"workers is {workers}; expected no more than the stages that {network.name} can "
                f"be cut into, which are {len(places) - 1}"
                + (_why(inside, slice(None)) if workers <= layers else "")
            )
        return Placement(layers, tuple(int(places[k]) for k in chosen))


class Pipeline(_Stages):
    """Pipelined back-propagation with stale weights: no bubbles, and not exact.

    Each worker has a forward stage and the backward stage of the same layers. In every cycle a
    minibatch is fed, so a step takes as long as the slowest stage.

    Parameters
    ----------
    registers : sequence of int, optional
        The pipeline placement vector: layers of the graph behind which there are pipeline
        registers, one less than workers. By default the slowest stage is as fast as can be.
    iterations : int, optional
        Number of minibatches that are pipelined. Those that follow are run one at a time (hybrid
        training). By default all are pipelined.

    Notes
    -----
    Zhang and Abdelrahman, Pipelined Training with Stale Weights in Deep Convolutional Neural
    Networks (2021).

    Examples
    --------
    >>> from sparsescan.strategies import Graph, Layer, Machine
    >>> layers = [Layer(f"l{k}", "linear", (k - 1,), (100,), 10100, 10000) for k in range(1, 9)]
    >>> network = Graph("deep", [Layer("x", "input", (), (100,)), *layers])
    >>> prediction = Pipeline().predict(network, Machine(), workers=4, batch=32)
    >>> prediction.how, prediction.stale, prediction.bytes
    ('8 stages, registers after layers 2, 4, 6', 0.75, 25600)
    """

    name = "pipeline, stale weights"
    exact = False

    def __init__(
        self, registers: Sequence[int] | None = None, iterations: int | None = None
    ) -> None:
        super().__init__(registers)
        self._iterations = iterations

    def predict(
        self, network: Graph | Trainable, machine: Machine, workers: int, batch: int
    ) -> Prediction:
        """Predict a step of a full pipeline."""
        network = as_graph(network)
        placement = self.placement(network, machine, workers, batch)
        weights = [layer.weights for layer in network.layers[1:]]
        forward, backward, messages = _times(network, machine, batch)
        parts = placement.parts
        work = [float((forward + backward)[part].sum()) + machine.sweep for part in parts]
        # Stages that wait leave their cores to others.
        cycle = machine.shared(work, workers) / max(work) if max(work) else 1.0
        # A step takes as long as the slowest stage.
        slowest = max(range(workers), key=lambda k: cycle * work[k] + _beside(messages, parts[k]))
        part = parts[slowest]
        memory = [
            machine.needed(sum(weights[part]), batch * kept, batch * degree * kept)
            for part, degree in zip(parts, placement.degrees, strict=True)
            for kept in [_kept(network, part)]
        ]
        return Prediction(
            self.name,
            _how(placement),
            {
                "forward": cycle * float(forward[part].sum()),
                "backward": cycle * (float(backward[part].sum()) + machine.sweep),
                "activations": _beside(messages, part),
                "loss": _agreeing(machine, workers),
            },
            _sent(network, machine, placement, batch),
            max(memory),
            placement.stale(weights),
            _layers(network, machine, placement, batch),
        )

    def _train(self, job: Job) -> Training:
        placement = self.placement(job.network, job.machine, job.communicator.size, job.batch)
        return PipelineTraining(job, _of_operators(placement, job.network), self._iterations)


class MicroBatches(_Stages):
    """A pipeline of micro-batches (GPipe): exact, with a bubble of ``P - 1`` of them.

    A minibatch is cut into micro-batches, which go through the pipeline one after the other; the
    weights change when all are done. Workers keep the inputs of their stage, and run it forward
    again before they run it backward.

    Parameters
    ----------
    registers : sequence of int, optional
        As for :class:`Pipeline`.
    count : int, optional
        Number of micro-batches, a divisor of the batch. By default the fastest.

    Notes
    -----
    Huang et al., GPipe (2019).
    """

    name = "pipeline, micro-batches"

    def __init__(self, registers: Sequence[int] | None = None, count: int | None = None) -> None:
        super().__init__(registers)
        self._count = count

    def predict(
        self, network: Graph | Trainable, machine: Machine, workers: int, batch: int
    ) -> Prediction:
        """Predict a step, with the bubble as "idle"."""
        return self._best(as_graph(network), machine, workers, batch)[2]

    def _train(self, job: Job) -> Training:
        graph, workers = graph_of(job.network), job.communicator.size
        placement, count, _ = self._best(graph, job.machine, workers, job.batch)
        return MicroBatchTraining(job, _of_operators(placement, job.network), count)

    def _best(
        self, network: Graph, machine: Machine, workers: int, batch: int
    ) -> tuple[Placement, int, Prediction]:
        counts = _divisors(batch) if self._count is None else [_check_count(self._count, batch)]
        ways = []
        for count in counts:
            placement = self.placement(network, machine, workers, batch // count)
            prediction = self._predict(network, machine, placement, batch, count)
            ways.append((placement, count, prediction))
        return min(ways, key=lambda way: way[2].total)

    def _predict(
        self, network: Graph, machine: Machine, placement: Placement, batch: int, count: int
    ) -> Prediction:
        samples, workers = batch // count, len(placement.parts)
        forward, backward, messages = _times(network, machine, samples)
        parts = placement.parts
        ahead = np.array([forward[part].sum() for part in parts])
        back = np.array([backward[part].sum() for part in parts]) + machine.sweep
        both = np.array([_beside(messages, part) for part in parts])
        # The last stage runs forward once, just before it runs backward.
        first, second = ahead.copy(), ahead + back
        first[-1] = 0
        slowest = int((first + second + both * 2).argmax())
        # Stages that wait leave their cores to others.
        work = count * (first + second)
        alone = machine.shared([1.0], workers)
        # Each way the first micro-batch goes through all stages, and the others follow it.
        total = both.sum()
        for stages in (first, second):
            total += alone * stages.sum() + (count - 1) * (alone * stages + both).max()
        total = max(total, machine.shared(work.tolist(), workers) + 2 * count * both[slowest])
        parameters = [layer.weights for layer in network.layers[1:]]
        # A stage keeps all inputs, and activations and gradients of one micro-batch.
        memory = [
            machine.needed(
                sum(parameters[part]),
                samples * _kept(network, part),
                (batch - samples) * network.layers[part.start].size,
            )
            for part in parts
        ]
        return Prediction(
            self.name,
            f"{count} micro-batches; {_how(placement)}",
            {
                "forward": alone * count * float(ahead[slowest]),
                "backward": alone * count * float(first[slowest] + back[slowest]),
                "activations": count * 2 * float(both[slowest]),
                "loss": _agreeing(machine, workers),
                "idle": float(total - alone * work[slowest] - 2 * count * both[slowest]),
            },
            _sent(network, machine, placement, batch),
            max(memory),
            layers=_layers(network, machine, placement, batch),
        )


def balance(costs: _Costs, stages: int) -> tuple[int, ...] | None:
    """Cut a chain into stages of which the most expensive is as cheap as can be.

    Parameters
    ----------
    costs : ndarray of float64, shape (n + 1, n + 1)
        Cost of a stage of layers ``a`` to ``b - 1``, for ``a < b``; inf where there can be none.
    stages : int
        Number of stages.

    Returns
    -------
    tuple of int or None
        First layer of each stage but the first; None if there is no way.

    Examples
    --------
    >>> sizes = np.array([3, 1, 1, 1, 3.0])
    >>> ends = np.concatenate([[0], np.cumsum(sizes)])
    >>> balance(np.where(ends > ends[:, None], ends - ends[:, None], np.inf), 3)
    (1, 4)
    """
    n = len(costs) - 1
    best = costs[0]
    choices = []
    for _ in range(stages - 1):
        # Cost of the slowest stage up to b, if the last of them begins at a.
        slowest = np.maximum(best[:, None], costs)
        choices.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    if not np.isfinite(best[n]):
        return None
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


# -- Costs of a stage -----------------------------------------------------------------------------


def _times(network: Graph, machine: Machine, samples: int) -> tuple[_Costs, _Costs, _Costs]:
    """Return nanoseconds of each layer forward and backward, and of a message behind each."""
    numbers, same = np.unique(network.alike[1:], return_inverse=True)
    forward = np.array([machine.forward(network, k, samples) for k in numbers.tolist()])[same]
    backward = np.array(
        [
            machine.backward(network, k, samples) + machine.update(network, k)
            for k in numbers.tolist()
        ]
    )[same]
    forward[-1] += machine.loss(samples)
    sizes = samples * machine.itemsize * np.array([layer.size for layer in network.layers])
    messages = np.array(machine.network.latency + machine.network.inverse_bandwidth * sizes, float)
    messages[[0, -1]] = 0
    return forward, backward, messages


def _ends(network: Graph) -> list[int]:
    """Return the last layer of each block, from the input on."""
    return [0, *(block.stop - 1 for block in blocks(network))]


def _inside(network: Graph) -> dict[str, NDArray[np.bool_]]:
    """Return, by the reason, whether there can be no register behind each layer."""
    shared, block = np.zeros(len(network.layers), bool), np.ones(len(network.layers), bool)
    last = {layer.shares: k for k, layer in enumerate(network.layers) if layer.shares is not None}
    for first, k in last.items():
        shared[first:k] = True
    block[_ends(network)] = False
    return {"layers that share their weights": shared, "layers of a block": block}


def _why(inside: dict[str, NDArray[np.bool_]], where: Any) -> str:
    """Say which layers stay together there."""
    names = " and ".join(which for which, layers in inside.items() if layers[where].any())
    return f": {names} stay together" if names else ""


def _checked(placement: Placement, workers: int, inside: dict[str, NDArray[np.bool_]]) -> Placement:
    """Check that there is a stage for each worker, and no register inside a block."""
    registers = placement.registers
    if len(placement.parts) != workers:
        raise InputError(
            f"registers is {registers}; expected {workers - 1} of them for {workers} workers"
        )
    wrong = [p for p in registers if any(layers[p] for layers in inside.values())]
    if wrong:
        raise InputError(
            f"registers is {registers}; expected none after layer {wrong[0]}"
            + _why(inside, wrong[0])
        )
    return placement


def _costs(ends: _Costs, messages: _Costs) -> _Costs:
    """Return costs of every possible stage: its layers, and its messages on both sides.

    `ends` are sums over all layers before each place where a stage can begin or end, `messages` the
    costs of a message there.
    """
    costs = ends - ends[:, None] + messages + messages[:, None]
    return np.where(np.arange(len(ends)) > np.arange(len(ends))[:, None], costs, np.inf)


def _agreeing(machine: Machine, workers: int) -> float:
    """Return nanoseconds in which workers agree that nothing is wrong, and on the loss."""
    return machine.collective("maximum", workers) + machine.collective("broadcast", workers)


def _beside(messages: _Costs, part: slice) -> float:
    """Return nanoseconds of the messages on both sides of a stage."""
    return float(messages[part.start] + messages[part.stop])


def _kept(network: Graph, part: slice) -> int:
    """Count entries, for one sample, of the input of a stage and of the outputs of its layers."""
    return sum(layer.size for layer in network.layers[part.start : part.stop + 1])


def _layers(
    network: Graph, machine: Machine, placement: Placement, batch: int
) -> tuple[LayerPlan, ...]:
    """Return what each layer sends, and what it needs for one minibatch."""
    plans, last = [], len(placement.parts) - 1
    for stage, part in enumerate(placement.parts):
        for k in range(part.start + 1, part.stop + 1):
            layer = network.layers[k]
            size = layer.size * (k == part.stop and stage < last)
            size += network.layers[part.start].size * (k == part.start + 1 and stage > 0)
            sent = batch * machine.itemsize * size
            memory = machine.needed(layer.weights, batch * layer.size)
            stages = range(stage, stage + 1)
            plans.append(LayerPlan(layer.name, (1, 1, 1, 1), stages, sent, memory))
    return tuple(plans)


def _of_operators(placement: Placement, network: Trainable) -> Placement:
    """Return registers between operators from those between layers: a block is one operator."""
    ends = _ends(graph_of(network))
    return Placement(len(network.ops), tuple(map(ends.index, placement.registers)))


def _sent(network: Graph, machine: Machine, placement: Placement, batch: int) -> int:
    """Count bytes that the busiest worker sends: activations forward, gradients backward."""
    cuts = [0, *(network.layers[p].size for p in placement.registers), 0]
    return machine.itemsize * batch * max(a + b for a, b in itertools.pairwise(cuts))


def _how(placement: Placement) -> str:
    where = ", ".join(map(str, placement.registers))
    s = "s" * (len(placement.registers) > 1)
    return f"{placement.stages} stages" + (f", registers after layer{s} {where}" if where else "")


def _divisors(batch: int) -> list[int]:
    return [d for d in range(1, batch + 1) if batch % d == 0]


def _check_count(count: int, batch: int) -> int:
    if count < 1 or batch % count:
        raise InputError(f"count is {count}; expected a divisor of batch = {batch}")
    return count
