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
from .recurrent import Network, Recurrent
from .strategy import Prediction, Strategy, Training

__all__ = ["MicroBatches", "Pipeline", "balance"]

_Costs = NDArray[np.float64]

# Where registers can be, among which is chosen; tables grow with its square.
_PLACES = 4096


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
        # Layers that share their weights stay together.
        places = np.flatnonzero(np.isfinite(messages))
        found = self._given
        if found is not None:
            self._check(Placement(layers, found), workers)
        elif len(places) > _PLACES:
            raise InputError(
                f"{network.name} can be cut in {len(places) - 2} places; expected {_PLACES} at "
                "most, or registers that are given"
            )
        else:
            ends = np.concatenate([[0], np.cumsum(forward + backward)])[places]
            chosen = balance(_costs(ends, messages[places]), workers)
            found = None if chosen is None else tuple(int(places[k]) for k in chosen)
        if found is None or not np.isfinite(messages[list(found)]).all():
            raise InputError(
                f"workers is {workers}; expected no more than the stages that {network.name} can "
                f"be cut into, which are {len(places) - 1}: layers that share their weights stay "
                "together"
            )
        return Placement(layers, found)

    def start(
        self, comm: Any, network: Network, batch: int, *, learning_rate: float = 0.1
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
        if isinstance(network, Recurrent):
            raise InputError("network is recurrent; expected layers that share no parameters")
        workers = Communicator.of(comm).size
        if self._given is not None:
            placement = self._check(Placement(len(network.ops), self._given), workers)
        else:
            ends = np.concatenate([[0], np.cumsum(_work(network))])
            found = balance(_costs(ends, np.zeros(len(ends))), workers)
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
        work = [float((forward + backward)[part].sum()) + machine.sweep for part in parts]
        # As long as the slowest stage.
        slowest = max(range(workers), key=lambda k: work[k] + _beside(messages, parts[k]))
        part, cycle = parts[slowest], machine.shared(work, workers) / work[slowest]
        memory = [
            2 * sum(weights[part]) + batch * (2 + degree) * _kept(network, part)
            for part, degree in zip(parts, placement.degrees, strict=True)
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
        parts = placement.parts
        ahead = np.array([forward[part].sum() for part in parts])
        back = np.array([backward[part].sum() for part in parts]) + machine.sweep
        both = np.array([_beside(messages, part) for part in parts])
        # The last one runs forward once, just before it runs backward.
        first, second = ahead.copy(), ahead + back
        first[-1] = 0
        slowest = int((first + second + both * 2).argmax())
        # Those that wait leave their cores to others.
        work = count * (first + second)
        alone = machine.shared([1.0], workers)
        # Each way the first goes through all, the others follow one after the other.
        total = both.sum()
        for stages in (first, second):
            total += alone * stages.sum() + (count - 1) * (alone * stages + both).max()
        total = max(total, machine.shared(work.tolist(), workers) + 2 * count * both[slowest])
        parameters = [layer.weights for layer in network.layers[1:]]
        crossing = _crossing(network)
        memory = [
            2 * sum(parameters[part])
            + batch * crossing[part.start]
            + samples * 2 * _kept(network, part)
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
    numbers, same = np.unique(network.alike[1:], return_inverse=True)
    forward = np.array([machine.forward(network, k, samples) for k in numbers.tolist()])[same]
    backward = np.array(
        [
            machine.backward(network, k, samples) + machine.update(network, k)
            for k in numbers.tolist()
        ]
    )[same]
    forward[-1] += machine.loss(samples)
    sizes = samples * machine.itemsize * _crossing(network)
    messages = np.array(machine.network.latency + machine.network.inverse_bandwidth * sizes, float)
    messages[[0, -1]] = 0
    # From the first to the last that shares its weights.
    last = {layer.shares: k for k, layer in enumerate(network.layers) if layer.shares is not None}
    for first, k in last.items():
        messages[first:k] = np.inf
    return forward, backward, messages


def _crossing(network: Graph) -> NDArray[np.int64]:
    """Entries for one sample that are made up to each layer and read behind it."""
    sizes = np.zeros(len(network.layers), np.int64)
    reads = list(range(len(network.layers)))
    for k, layer in enumerate(network.layers):
        for i in layer.inputs:
            reads[i] = k
    for k, layer in enumerate(network.layers):
        sizes[k : reads[k]] += layer.size
    return sizes


def _costs(ends: _Costs, messages: _Costs) -> _Costs:
    """Of every stage there could be: its layers, and its messages on both sides.

    Parameters
    ----------
    ends : ndarray
        Of all layers before each place where a stage can begin or end.
    messages : ndarray
        At each of these places.
    """
    costs = ends - ends[:, None] + messages + messages[:, None]
    return np.where(np.arange(len(ends)) > np.arange(len(ends))[:, None], costs, np.inf)


def _agreeing(machine: Machine, workers: int) -> float:
    """Nanoseconds in which workers learn that nothing is wrong, and the loss."""
    return machine.collective("maximum", workers) + machine.collective("broadcast", workers)


def _beside(messages: _Costs, part: slice) -> float:
    """Nanoseconds of the messages on both sides of a stage."""
    return float(messages[part.start] + messages[part.stop])


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
