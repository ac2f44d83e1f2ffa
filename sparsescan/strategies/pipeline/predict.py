"""Pipelined back-propagation: with stale weights, and with micro-batches instead."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InputError
from ...formatting import quantity
from ..graph import Graph
from ..machine import Machine
from ..recurrent import Trainable, graph_of
from ..strategy import Job, Prediction, Strategy, Training, Work
from .costs import StageCosts, block_ends, place
from .schedule import Placement
from .train import MicroBatchTraining, PipelineTraining


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
        work = Work.of(network, machine, workers, batch)
        return self._placed(work, work.batch)

    def _placed(self, work: Work, samples: int) -> Placement:
        return place(work.graph, work.machine, work.workers, samples, self._given)


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

    def _plan(self, work: Work) -> tuple[Prediction, Placement]:
        """Return a step of a full pipeline."""
        _, network, machine, workers, batch = work
        placement = self._placed(work, batch)
        costs = StageCosts(network, machine, placement, batch)
        busy = costs.work.tolist()
        # Stages that wait leave their cores to others.
        cycle = machine.shared(busy, workers) / max(busy) if max(busy) else 1.0
        # A step takes as long as the slowest stage.
        slowest = int((cycle * costs.work + costs.messages).argmax())
        memory = [
            machine.needed(weights, batch * kept, batch * degree * kept)
            for weights, kept, degree in zip(
                costs.weights, costs.kept, placement.degrees, strict=True
            )
        ]
        times = {
            "forward": cycle * costs.forward[slowest],
            "backward": cycle * costs.backward[slowest],
            "activations": costs.messages[slowest],
            "loss": costs.agreeing,
        }
        stale = placement.stale([layer.weights for layer in network.layers[1:]])
        most, plans = (costs.sent(batch), max(memory)), tuple(costs.plans(batch))
        return Prediction(self.name, str(placement), times, *most, stale, plans), placement

    def _train(self, job: Job, plan: Placement) -> Training:
        return PipelineTraining(job, _of_operators(plan, job.network), self._iterations)


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

    def _train(self, job: Job, plan: tuple[Placement, int]) -> Training:
        placement, count = plan
        return MicroBatchTraining(job, _of_operators(placement, job.network), count)

    def _plan(self, work: Work) -> tuple[Prediction, tuple[Placement, int]]:
        """Return a step of the fastest count."""
        batch, given = work.batch, self._count
        if given is not None and (given < 1 or batch % given):
            raise InputError(f"count is {given}; expected a divisor of batch = {batch}")
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        ways = []
        for count in divisors if given is None else [given]:
            placement = self._placed(work, batch // count)
            ways.append((self._predict(work, placement, count), (placement, count)))
        return min(ways, key=lambda way: way[0].total)

    def _predict(self, work: Work, placement: Placement, count: int) -> Prediction:
        """Predict a step, with the bubble as "idle"."""
        _, network, machine, workers, batch = work
        samples = batch // count
        costs = StageCosts(network, machine, placement, samples)
        both = costs.messages
        # The last stage runs forward once, just before it runs backward.
        first, second = costs.forward.copy(), costs.forward + costs.backward
        first[-1] = 0
        slowest = int((first + second + both * 2).argmax())
        # Stages that wait leave their cores to others.
        taken = count * (first + second)
        alone = machine.shared([1.0], workers)
        # Each way the first micro-batch goes through all stages, and the others follow it.
        total = both.sum()
        for stages in (first, second):
            total += alone * stages.sum() + (count - 1) * (alone * stages + both).max()
        total = max(total, machine.shared(taken.tolist(), workers) + 2 * count * both[slowest])
        # A stage keeps all inputs, and activations and gradients of one micro-batch.
        memory = [
            machine.needed(weights, samples * kept, (batch - samples) * entering)
            for weights, kept, entering in zip(
                costs.weights, costs.kept, costs.entering, strict=True
            )
        ]
        how = f"{quantity(count, 'micro-batch', 'micro-batches')}; {placement}"
        times = {
            "forward": alone * count * costs.forward[slowest],
            "backward": alone * count * (first[slowest] + costs.backward[slowest]),
            "activations": count * 2 * both[slowest],
            "loss": costs.agreeing,
            "idle": total - alone * taken[slowest] - 2 * count * both[slowest],
        }
        most, plans = (costs.sent(batch), max(memory)), tuple(costs.plans(batch))
        return Prediction(self.name, how, times, *most, layers=plans)


def _of_operators(placement: Placement, network: Trainable) -> Placement:
    """Return registers between operators from those between layers: a block is one operator."""
    ends = block_ends(graph_of(network))
    return Placement(len(network.ops), tuple(map(ends.index, placement.registers)))
