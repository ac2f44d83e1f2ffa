"""Strategy: the interface of all ways to spread a training step over workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..checks import check_count
from ..parallel.grid import bounds
from .graph import Graph
from .machine import Machine
from .networks import AnyNetwork, graph_of

# With more workers, predictions would take minutes.
MOST_WORKERS, MOST_SAMPLES = 1 << 14, 1 << 24


class LayerPlan(NamedTuple):
    """The plan for one layer.

    Attributes
    ----------
    name : str
        Its name in the graph.
    configuration : tuple of int
        Parts along samples, channels, height and width.
    devices : range
        Numbers of the workers that compute it.
    bytes, memory : int
        The most bytes that one worker sends in a step, and the most that one worker needs.
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
        Times of the parts of a step, which add up to the total, such as "forward", "backward",
        "weights" (their sum over workers), "activations", "halo", "idle".
    bytes : int
        The most bytes that one worker sends in a step.
    memory : int
        The most bytes that one worker needs, for parameters, activations (gathered ones too), the
        gradients of both, the optimiser's numbers, and Jacobians if it scans them. Memory that only
        this package's layers need, such as indices of Jacobians, is left out.
    stale : float
        Share of the weights that are out of date when they are used; 0 if gradients are exact.
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
        """Return the prediction and its plan in JSON's types, with devices as ranges."""
        layers = []
        for one in self.layers:
            devices = {end: getattr(one.devices, end) for end in ("start", "stop", "step")}
            layers.append(one._asdict() | {"devices": devices})
        return vars(self) | {"total": self.total, "layers": layers}


class Strategy(ABC):
    """A way to spread a training step over workers.

    Attributes
    ----------
    name : str
        Name that is printed.
    exact : bool
        Whether gradients equal those of one worker.
    """

    name: str
    exact: bool = True

    def predict(
        self, network: AnyNetwork, machine: Machine, workers: int, batch: int
    ) -> Prediction:
        """Predict a step with the best configuration of this strategy.

        Parameters
        ----------
        network : Graph, Sequential or Recurrent
            The network.
        machine : Machine
            A worker, and the network between workers.
        workers : int
            Number of workers.
        batch : int
            Samples of a step, for all workers together.

        Raises
        ------
        InputError
            If the strategy cannot use this many workers for the network; the text says why.
        """
        return self._predict(Work.of(network, machine, workers, batch))

    @abstractmethod
    def _predict(self, work: Work) -> Prediction:
        """Return the prediction of the best plan."""


class Work(NamedTuple):
    """What is predicted, as :meth:`Strategy.predict` describes it."""

    graph: Graph
    machine: Machine
    workers: int
    batch: int

    @classmethod
    def of(cls, network: AnyNetwork, machine: Machine, workers: int, batch: int) -> Work:
        """Check numbers and the network; the machine's network becomes that of these workers."""
        workers = check_count("workers", workers, 1, MOST_WORKERS)
        batch = check_count("batch", batch, 1, MOST_SAMPLES)
        return cls(graph_of(network), machine.among(workers), workers, batch)


def sum_words(length: Any, place: Any, copies: Any) -> Any:
    """Count the numbers that one of some ranks sends where these sum an array; or many such.

    Each sums a piece, and gives it to the others.
    """
    start, stop = bounds(length, place, copies)
    return length + (stop - start) * (copies - 2)
