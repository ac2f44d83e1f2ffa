"""Strategy: the interface of all ways to spread a training step over workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import check_array, host_array
from ..checks import check_count, check_has_shape
from ..errors import InputError, InputTypeError
from ..parallel.communicator import Communicator
from .graph import Graph
from .machine import Machine, load_machine
from .networks import Trainable, graph_of

# Predictions for more would take minutes.
MOST_WORKERS, MOST_SAMPLES = 1 << 14, 1 << 24

Array = NDArray[Any]


class LayerPlan(NamedTuple):
    """A layer as a plan has it.

    Attributes
    ----------
    name : str
        Its name in the graph.
    configuration : tuple of int
        Parts along samples, channels, height and width.
    devices : range
        Numbers of the workers that compute it.
    bytes, memory : int
        Bytes that its busiest worker sends in a step, and that its fullest worker needs.
    """

    name: str
    configuration: tuple[int, int, int, int]
    devices: range
    bytes: int
    memory: int


@dataclass(frozen=True)
class Prediction:
    """A prediction of a training step.

    Attributes
    ----------
    strategy : str
        Name of the strategy.
    how : str
        The configuration that was chosen, in a few words.
    nanoseconds : dict of str to float
        Times of parts of the step, which add up to the whole; such as "forward", "backward",
        "weights" (their sum over workers), "activations", "halo", "idle".
    bytes : int
        Bytes that the busiest worker sends in a step.
    memory : int
        Bytes that the fullest worker needs: for parameters, activations, also those it gathers, the
        gradients of both, what the optimiser keeps, and Jacobians if it scans over them. Memory
        that only the layers here need, such as for indices of Jacobians, is left out.
    stale : float
        Share of the weights that are used after they have been updated elsewhere; 0 if gradients
        are exact.
    layers : tuple of LayerPlan
        The plan, layer by layer.
    """

    strategy: str
    how: str
    nanoseconds: dict[str, float]
    bytes: int
    memory: int
    stale: float = 0.0
    layers: tuple[LayerPlan, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        # JSON and exact comparisons need numbers of Python.
        for name in ("bytes", "memory"):
            object.__setattr__(self, name, int(getattr(self, name)))
        times = {part: float(taken) for part, taken in self.nanoseconds.items()}
        object.__setattr__(self, "nanoseconds", times)
        object.__setattr__(self, "stale", float(self.stale))

    @property
    def total(self) -> float:
        """Nanoseconds of the step."""
        return sum(self.nanoseconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction and its plan as JSON can hold them, devices as ranges."""
        layers = []
        for one in self.layers:
            devices = {end: getattr(one.devices, end) for end in ("start", "stop", "step")}
            layers.append(one._asdict() | {"devices": devices})
        return vars(self) | {"total": self.total, "layers": layers}


class Training(ABC):
    """A network that the ranks of a communicator train together, by plain SGD.

    All its methods are collective.

    Attributes
    ----------
    communicator : Communicator
        The ranks; its `traffic` tells the bytes that this rank has sent.
    """

    communicator: Communicator

    @abstractmethod
    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Run one training step.

        Parameters
        ----------
        x : ndarray of float32 or float64, shape ``(batch, *input_shape)``
            All samples, on every rank, which uses its own; for a recurrent network sequences,
            ``(batch, steps, features)``.
        labels : ndarray of int64, shape (batch,)
            Their classes, of which the outputs of the network are the logits.

        Returns
        -------
        float
            The mean cross-entropy of the batch, by the parameters before the step, on all ranks. A
            pipeline with stale weights returns that of the batch that reaches its end, and nan
            before there is one.

        Raises
        ------
        InputError, InputTypeError
            On all ranks, if samples or labels are not as expected. Other errors of a rank end all
            ranks, or are raised on all by a pipeline.
        """

    @abstractmethod
    def parameters(self) -> list[dict[str, Array]]:
        """Return parameters of every layer, whole, on all ranks; of a cell once."""


class Strategy(ABC):
    """A way to spread a training step over workers.

    Attributes
    ----------
    name : str
        Name that is printed.
    exact : bool
        Whether gradients are those of one worker.
    """

    name: str
    exact: bool = True

    def predict(
        self, network: Graph | Trainable, machine: Machine, workers: int, batch: int
    ) -> Prediction:
        """Predict a step with the best configuration of this strategy.

        Parameters
        ----------
        network : Graph, Sequential or Recurrent
            The network. Operators may be cut in fewer ways than a graph tells; with them the
            prediction is that of what :meth:`start` runs.
        machine : Machine
            A worker, and the network between workers.
        workers : int
            Number of workers.
        batch : int
            Samples of a step, of all workers together.

        Raises
        ------
        InputError
            If the strategy cannot use so many workers for it; the text says why.
        """
        return self._plan(Work.of(network, machine, workers, batch))[0]

    def start(
        self,
        comm: Any,
        network: Trainable,
        batch: int,
        *,
        learning_rate: float = 0.1,
        machine: Machine | None = None,
    ) -> Training:
        """Train a network over the ranks of a communicator, as is predicted; collective.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            The ranks.
        network : Sequential or Recurrent
            Equal on all ranks; each takes a copy of the parameters that it needs, the
            caller's are not changed.
        batch : int
            Samples of a step.
        learning_rate : float
            Learning rate of SGD.
        machine : Machine, optional
            The machine for which the plan is made; by default that of
            :func:`~sparsescan.strategies.load_machine` on the first rank.
        """
        communicator, batch = Communicator.of(comm), check_count("batch", batch, 1)
        if not isinstance(network, Trainable):
            raise InputTypeError(
                f"network is {network!r}; expected a Sequential or a Recurrent, to be trained"
            )
        own = communicator.together(lambda: load_machine() if machine is None else machine)
        work = Work.of(network, communicator.broadcast(own, 0), communicator.size, batch)
        return self._train(Job(comm, network, batch, learning_rate), self._plan(work)[1])

    @abstractmethod
    def _plan(self, work: Work) -> tuple[Prediction, Any]:
        """Return the prediction of the best plan, and all of it that :meth:`_train` needs."""

    @abstractmethod
    def _train(self, job: Job, plan: Any) -> Training:
        """Return the training of a job by a plan."""


class Work(NamedTuple):
    """A network that some workers train, as :meth:`Strategy.predict` describes it."""

    network: Graph | Trainable
    graph: Graph
    machine: Machine
    workers: int
    batch: int

    @classmethod
    def of(cls, network: Graph | Trainable, machine: Machine, workers: int, batch: int) -> Work:
        """Check numbers and the network; the machine's network becomes that of these workers."""
        workers = check_count("workers", workers, 1, MOST_WORKERS)
        batch = check_count("batch", batch, 1, MOST_SAMPLES)
        return cls(network, graph_of(network), machine.among(workers), workers, batch)


class Job(NamedTuple):
    """A network that ranks train, as :meth:`Strategy.start` describes it."""

    comm: Any
    network: Trainable
    batch: int
    rate: float

    @property
    def communicator(self) -> Communicator:
        """The ranks."""
        return Communicator.of(self.comm)


def check_samples(
    x: Array, labels: NDArray[np.int64], shape: tuple[int, ...], classes: int
) -> tuple[Array, NDArray[np.int64]]:
    """Check samples of this shape, batch first, and their classes; return them as arrays.

    All ranks have all of both, so they raise the same errors.
    """
    x, labels = check_array("x", x), host_array("labels", labels)
    check_has_shape("x", x, shape)
    if labels.dtype.kind not in "iu":
        raise InputTypeError(f"labels has dtype {labels.dtype}; expected integers")
    check_has_shape("labels", labels, shape[:1])
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise InputError(f"labels has {wrong[0]}; expected 0 to {classes - 1}")
    return x, labels


def cross_entropy(output: Array, labels: NDArray[np.int64], batch: int) -> tuple[float, Array]:
    """Return ``-Σ log softmax(output)[label] / batch`` of these samples, and its gradient.

    The outputs of a sample, of whatever shape, are logits; `batch` are the samples of a whole step.
    """
    output = output.reshape(len(output), -1)
    shifted = output - output.max(axis=1, keepdims=True)
    scale = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    logs = shifted - scale
    rows = np.arange(len(labels))
    grad = np.exp(logs)
    grad[rows, labels] -= 1
    grad /= batch
    return -float(logs[rows, labels].sum()) / batch, grad
