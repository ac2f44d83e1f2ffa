"""Pipelined back-propagation: with stale weights, and with micro-batches instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...formatting import quantity
from ..graph import Graph
from ..machine import Machine
from ..recurrent import Trainable, as_graph, graph_of
from ..strategy import Job, Prediction, Strategy, Training
from .costs import (
    agreeing,
    balance,
    beside,
    block_ends,
    checked,
    inside_of,
    kept_entries,
    layer_plans,
    sent,
    stage_costs,
    times_of,
    why_together,
)
from .schedule import Placement
from .train import MicroBatchTraining, PipelineTraining

__all__ = ["MicroBatches", "Pipeline"]

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
        graph, machine = as_graph(network), machine.among(workers)
        forward, backward, messages = times_of(graph, machine, batch)
        return self._place(graph, forward + backward, messages, workers)

    def _place(self, network: Graph, work: _Costs, messages: _Costs, workers: int) -> Placement:
        """Return the registers that are given, checked, or those that balance the stages."""
        layers, inside = len(network.layers) - 1, inside_of(network)
        if self._given is not None:
            return checked(Placement(layers, self._given), workers, inside)
        places = np.flatnonzero(~np.logical_or.reduce([*inside.values()]))
        if len(places) > _PLACES:
            raise InputError(
                f"{network.name} can be cut in {len(places) - 2} places; expected {_PLACES} at "
                "most, or registers that are given"
            )
        ends = np.concatenate([[0], np.cumsum(work)])[places]
        chosen = balance(stage_costs(ends, messages[places]), workers)
        if chosen is None:
            raise InputError(
                f"workers is {workers}; expected no more than the stages that {network.name} can "
                f"be cut into, which are {len(places) - 1}"
                + (why_together(inside, slice(None)) if workers <= layers else "")
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
        network, machine = as_graph(network), machine.among(workers)
        placement = self.placement(network, machine, workers, batch)
        weights = [layer.weights for layer in network.layers[1:]]
        forward, backward, messages = times_of(network, machine, batch)
        parts = placement.parts
        work = [float((forward + backward)[part].sum()) + machine.sweep for part in parts]
        # Stages that wait leave their cores to others.
        cycle = machine.shared(work, workers) / max(work) if max(work) else 1.0
        # A step takes as long as the slowest stage.
        slowest = max(range(workers), key=lambda k: cycle * work[k] + beside(messages, parts[k]))
        part = parts[slowest]
        memory = [
            machine.needed(sum(weights[part]), batch * kept, batch * degree * kept)
            for part, degree in zip(parts, placement.degrees, strict=True)
            for kept in [kept_entries(network, part)]
        ]
        return Prediction(
            self.name,
            _how(placement),
            {
                "forward": cycle * float(forward[part].sum()),
                "backward": cycle * (float(backward[part].sum()) + machine.sweep),
                "activations": beside(messages, part),
                "loss": agreeing(machine, workers),
            },
            sent(network, machine, placement, batch),
            max(memory),
            placement.stale(weights),
            layer_plans(network, machine, placement, batch),
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
        machine = machine.among(workers)
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
        forward, backward, messages = times_of(network, machine, samples)
        parts = placement.parts
        ahead = np.array([forward[part].sum() for part in parts])
        back = np.array([backward[part].sum() for part in parts]) + machine.sweep
        both = np.array([beside(messages, part) for part in parts])
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
                samples * kept_entries(network, part),
                (batch - samples) * network.layers[part.start].size,
            )
            for part in parts
        ]
        return Prediction(
            self.name,
            f"{quantity(count, 'micro-batch', 'micro-batches')}; {_how(placement)}",
            {
                "forward": alone * count * float(ahead[slowest]),
                "backward": alone * count * float(first[slowest] + back[slowest]),
                "activations": count * 2 * float(both[slowest]),
                "loss": agreeing(machine, workers),
                "idle": float(total - alone * work[slowest] - 2 * count * both[slowest]),
            },
            sent(network, machine, placement, batch),
            max(memory),
            layers=layer_plans(network, machine, placement, batch),
        )


def _of_operators(placement: Placement, network: Trainable) -> Placement:
    """Return registers between operators from those between layers: a block is one operator."""
    ends = block_ends(graph_of(network))
    return Placement(len(network.ops), tuple(map(ends.index, placement.registers)))


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
