"""Pipelined back-propagation: with stale weights, and with micro-batches instead."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...jacobians import Sequential
from ..communicator import Communicator
from .graph import Graph
from .machine import Machine
from .pipeline_ranks import MicroBatchTraining, PipelineTraining
from .pipeline_schedule import Placement
from .strategy import Prediction, Strategy, Training

__all__ = ["MicroBatches", "Pipeline", "balance"]

_Costs = NDArray[np.float64]


class _Stages(Strategy):
    """What both have in common: a stage of the network on each worker.

    Parameters
    ----------
    registers : sequence of int, optional
        After which layers there are pipeline registers: one less than there are workers. By default
        the slowest stage is as fast as can be.
    """

    def __init__(self, registers: Sequence[int] | None = None) -> None:
        self._given = None if registers is None else tuple(registers)

    def placement(self, network: Graph, machine: Machine, workers: int, batch: int) -> Placement:
        """Where the registers are: by dynamic programming, if they are not given.

        Parameters
        ----------
        network, machine, workers, batch
            As for :meth:`predict`.

        Raises
        ------
        InputError
            If there are more workers than layers that a register may follow.
        """
        layers = len(network.layers) - 1
        forward, backward, messages = _times(network, machine, batch)
        found = self._given
        if found is None:
            found = balance(_costs(forward + backward, messages), workers)
        else:
            self._check(Placement(layers, found), workers)
        if found is None or not np.isfinite(messages[list(found)]).all():
            raise InputError(
                f"workers is {workers}; expected no more than the stages that {network.name} can "
                f"be cut into, which are {1 + int(np.isfinite(messages[1:-1]).sum())}: layers that "
                "share their weights stay together"
            )
        return Placement(layers, found)

    def start(
        self, comm: Any, network: Sequential, batch: int, *, learning_rate: float = 0.1
    ) -> Training:
        """Train over the ranks; registers are between the operators of the network.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            The ranks.
        network : Sequential
            The same on all ranks; copied.
        batch : int
            Samples of a step.
        learning_rate : float
            Of SGD.
        """
        workers = Communicator.of(comm).size
        if self._given is not None:
            placement = self._check(Placement(len(network.ops), self._given), workers)
        else:
            found = balance(_costs(_work(network), np.zeros(len(network.ops) + 1)), workers)
            if found is None:
                raise InputError(
                    f"comm has {workers} ranks; expected no more than the {len(network.ops)} layers"
                )
            placement = Placement(len(network.ops), found)
        return self._train(comm, network, placement, batch, learning_rate)

    @abstractmethod
    def _train(
        self, comm: Any, network: Sequential, placement: Placement, batch: int, rate: float
    ) -> Training: ...

    @staticmethod
    def _check(placement: Placement, workers: int) -> Placement:
        if len(placement.parts) != workers:
            raise InputError(
                f"registers is {placement.registers}; expected {workers - 1} of them for {workers} "
                "workers"
            )
        return placement


class Pipeline(_Stages):
    """Pipelined back-propagation with stale weights: no bubbles, and not exact.

    Each worker has a forward stage and the backward stage of the same layers. In every cycle a
    minibatch is fed, so a step takes as long as the slowest stage.

    Parameters
    ----------
    registers : sequence of int, optional
        The pipeline placement vector: after which layers there are pipeline registers, one less
        than there are workers. By default the slowest stage is as fast as can be; of a network that
        is trained by the nonzeros of its Jacobians.
    iterations : int, optional
        How many minibatches are pipelined. Those that follow are run one at a time (hybrid
        training). By default all are.

    Notes
    -----
    Zhang and Abdelrahman, Pipelined Training with Stale Weights in Deep Convolutional Neural
    Networks (2021).

    Examples
    --------
    >>> from sparsescan.parallel.strategies import Graph, Layer, Machine
    >>> layers = [Layer(f"l{k}", "linear", (k - 1,), (100,), 10100, 10000) for k in range(1, 9)]
    >>> network = Graph("deep", [Layer("x", "input", (), (100,)), *layers])
    >>> found = Pipeline().predict(network, Machine(), workers=4, batch=32)
    >>> found.how, found.stale, found.bytes
    ('8 stages, registers after layers 2, 4, 6', 0.75, 25600)
    """

    name = "pipeline, stale weights"
    exact = False

    def __init__(
        self, registers: Sequence[int] | None = None, iterations: int | None = None
    ) -> None:
        super().__init__(registers)
        self._iterations = iterations

    def predict(self, network: Graph, machine: Machine, workers: int, batch: int) -> Prediction:
        """What a step of a full pipeline takes."""
        placement = self.placement(network, machine, workers, batch)
        weights = [layer.weights for layer in network.layers[1:]]
        forward, backward, messages = _times(network, machine, batch)
        parts = placement.parts
        # As long as the slowest stage.
        part = max(parts, key=lambda part: _cycle(forward + backward, messages, part))
        memory = [
            2 * sum(weights[part]) + batch * (2 + degree) * _kept(network, part)
            for part, degree in zip(parts, placement.degrees, strict=True)
        ]
        return Prediction(
            self.name,
            _how(placement),
            {
                "forward": float(forward[part].sum()),
                "backward": float(backward[part].sum()),
                "activations": float(messages[part.start] + messages[part.stop]),
            },
            _sent(network, machine, placement, batch),
            machine.itemsize * max(memory),
            placement.stale(weights),
        )

    def chosen(self, network: Graph, machine: Machine, workers: int, batch: int) -> Pipeline:
        """The pipeline whose step :meth:`predict` predicts, with its registers."""
        placement = self.placement(network, machine, workers, batch)
        return Pipeline(placement.registers, self._iterations)

    def _train(
        self, comm: Any, network: Sequential, placement: Placement, batch: int, rate: float
    ) -> Training:
        return PipelineTraining(comm, network, placement, batch, rate, self._iterations)


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
        Number of micro-batches, a divisor of the batch. By default the fastest; of a network that
        is trained, the largest up to four times the workers.

    Notes
    -----
    Huang et al., GPipe (2019).
    """

    name = "pipeline, micro-batches"

    def __init__(self, registers: Sequence[int] | None = None, count: int | None = None) -> None:
        super().__init__(registers)
        self._count = count

    def predict(self, network: Graph, machine: Machine, workers: int, batch: int) -> Prediction:
        """What a step takes, the bubble as "idle"."""
        return self._best(network, machine, workers, batch)[1]

    def chosen(self, network: Graph, machine: Machine, workers: int, batch: int) -> MicroBatches:
        """The pipeline whose step :meth:`predict` predicts, with registers and count."""
        return self._best(network, machine, workers, batch)[0]

    def _best(
        self, network: Graph, machine: Machine, workers: int, batch: int
    ) -> tuple[MicroBatches, Prediction]:
        counts = _divisors(batch) if self._count is None else [_check_count(self._count, batch)]
        found = []
        for count in counts:
            placement = self.placement(network, machine, workers, batch // count)
            prediction = self._predict(network, machine, placement, batch, count)
            found.append((MicroBatches(placement.registers, count), prediction))
        return min(found, key=lambda one: one[1].total)

    def _predict(
        self, network: Graph, machine: Machine, placement: Placement, batch: int, count: int
    ) -> Prediction:
        samples, workers = batch // count, len(placement.parts)
        forward, backward, messages = _times(network, machine, samples)
        again = forward if workers > 1 else np.zeros_like(forward)
        parts = placement.parts
        part = max(parts, key=lambda part: _cycle(forward + again + backward, messages, part))
        parameters = [layer.weights for layer in network.layers[1:]]
        memory = [
            2 * sum(parameters[part])
            + batch * _crossing(network)[part.start]
            + samples * 2 * _kept(network, part)
            for part in parts
        ]
        slowest = _cycle(forward + again + backward, messages, part)
        return Prediction(
            self.name,
            f"{count} micro-batches; {_how(placement)}",
            {
                "forward": count * float(forward[part].sum()),
                "backward": count * float((again + backward)[part].sum()),
                "activations": count * float(messages[part.start] + messages[part.stop]),
                "idle": (workers - 1) * slowest,
            },
            _sent(network, machine, placement, batch),
            machine.itemsize * max(memory),
        )

    def _train(
        self, comm: Any, network: Sequential, placement: Placement, batch: int, rate: float
    ) -> Training:
        most = 4 * len(placement.parts)
        count = self._count or max(d for d in _divisors(batch) if d <= most)
        return MicroBatchTraining(comm, network, placement, batch, rate, _check_count(count, batch))


def balance(costs: _Costs, stages: int) -> tuple[int, ...] | None:
    """Where to cut, so that the most expensive of some stages is as cheap as can be.

    Parameters
    ----------
    costs : ndarray of float64, shape (n + 1, n + 1)
        Of a stage of layers ``a`` to ``b - 1``, for ``a < b``; inf where there can be none.
    stages : int
        How many.

    Returns
    -------
    tuple of int or None
        Where all stages but the first begin; None if there is no way.

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
        # The slowest of the stages up to b, if the last of them begins at a.
        slowest = np.maximum(best[:, None], costs)
        choices.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    if not np.isfinite(best[n]):
        return None
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


# -- What a stage takes ---------------------------------------------------------------------------


def _times(network: Graph, machine: Machine, samples: int) -> tuple[_Costs, _Costs, _Costs]:
    """Nanoseconds of each layer forward and backward, and of a message after each, from none on."""
    numbers = range(1, len(network.layers))
    forward = np.array([machine.forward(network, k, samples) for k in numbers])
    backward = np.array([machine.backward(network, k, samples) for k in numbers])
    sizes = samples * machine.itemsize * _crossing(network)
    messages = np.array([machine.network.message(int(size)) for size in sizes])
    messages[[0, -1]] = 0
    for k, layer in enumerate(network.layers):
        if layer.shares is not None:
            messages[layer.shares : k] = np.inf
    return forward, backward, messages


def _crossing(network: Graph) -> NDArray[np.int64]:
    """Entries for one sample that are made up to each layer and read behind it."""
    sizes = np.zeros(len(network.layers), np.int64)
    for k, layer in enumerate(network.layers):
        reads = max((j for j, other in enumerate(network.layers) if k in other.inputs), default=k)
        sizes[k:reads] += layer.size
    return sizes


def _costs(times: _Costs, messages: _Costs) -> _Costs:
    """Of every stage there could be: its layers, and its messages on both sides."""
    ends = np.concatenate([[0], np.cumsum(times)])
    costs = ends - ends[:, None] + messages + messages[:, None]
    return np.where(np.arange(len(ends)) > np.arange(len(ends))[:, None], costs, np.inf)


def _cycle(times: _Costs, messages: _Costs, part: slice) -> float:
    return float(times[part].sum() + messages[part.start] + messages[part.stop])


def _work(network: Sequential) -> _Costs:
    """Nonzeros that each layer's passes go over, forward, backward and for its parameters."""
    return np.array(
        [
            sum((2 + bool(layer.params)) * layer.nnz for layer in Sequential([op]).layers)
            for op in network.ops
        ],
        float,
    )


def _kept(network: Graph, part: slice) -> int:
    """Entries for one sample of what enters a stage and what its layers make."""
    made = sum(layer.size for layer in network.layers[1:][part])
    return int(_crossing(network)[part.start]) + made


def _sent(network: Graph, machine: Machine, placement: Placement, batch: int) -> int:
    """Bytes that the busiest worker sends: activations to the next, gradients to the one before."""
    sizes = _crossing(network)
    cuts = [0, *(int(sizes[p]) for p in placement.registers), 0]
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
