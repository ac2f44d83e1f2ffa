"""Per layer: every layer divided between workers by a configuration, predicted and started."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...jacobians import Operator
from ...parallel.communicator import Fault
from ..exchanges import sum_words
from ..graph import Graph, Layer
from ..machine import Machine
from ..recurrent import operators
from ..strategy import Job, LayerPlan, Prediction, Strategy, Training, Work
from .configurations import (
    Configuration,
    Configurations,
    Limits,
    Moves,
    allowed,
    image_of,
    limits,
)
from .costs import Chosen, LayerCosts, NetworkCosts, moves_of, optimise, with_loss
from .train import Partitioned, limits_of

# Most groups of layers in a description.
_WORDS = 4


class Divided(Strategy):
    """Every layer divided between workers by a configuration; exact."""

    costs: Callable[[Machine], LayerCosts] = LayerCosts

    def _plan(self, work: Work) -> tuple[Prediction, tuple[Any, ...]]:
        graph, ops, bounds = _layers(work)
        _, _, machine, workers, batch = work
        costs = self.costs(machine)
        chosen = self.choose(graph, costs, workers, batch, bounds)
        of, numbers = _numbered(workers, chosen)
        times = NetworkCosts(graph, costs, of, batch).times(numbers)
        sent, kept = np.zeros((2, workers), np.int64)
        layers = []
        for k, (moved, weights, activations) in footprints(graph, chosen, workers, batch):
            needed = machine.needed(weights, activations)
            sent, kept = sent + moved * machine.itemsize, kept + needed
            layer, one = graph.layers[k], chosen[k]
            peaks = int(moved.max()) * machine.itemsize, int(np.max(needed))
            layers.append(LayerPlan(layer.name, one, range(math.prod(one)), *peaks))
        most, how = (sent.max(), kept.max()), self.describe(graph, chosen)
        prediction = Prediction(self.name, how, times, *most, layers=tuple(layers))
        return prediction, (graph, ops, chosen)

    def _train(self, job: Job, plan: tuple[Any, ...]) -> Training:
        fault = Fault()
        with fault:
            training = Partitioned(job, *plan)
        job.communicator.agree(fault.error)
        return training

    @abstractmethod
    def choose(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        """Return the configuration of each layer of the graph, its loss included.

        Parameters
        ----------
        graph, costs, workers, batch, bounds
            As for :func:`optimise`.
        """

    def describe(self, graph: Graph, chosen: Sequence[Configuration]) -> str:
        """Describe the configurations of layers with parameters, joining those that are equal."""
        groups: list[str] = []
        pairs = zip(graph.layers, chosen, strict=True)
        names = [_name(one) for layer, one in pairs if layer.weights]
        for name, group in groupby(names):
            count = len(list(group))
            groups.append(name if count == 1 else f"{count}x {name}")
        if len(groups) > _WORDS:
            groups[2:-1] = ["…"]
        return ", ".join(groups)


class PerLayer(Divided):
    """A configuration for every layer, along samples, channels, height and width.

    Parameters
    ----------
    configurations : sequence of tuple of int, or callable, optional
        Parts along each axis for every layer of the graph, its loss included; or a function of the
        graph, workers and batch that returns them. By default the cheapest.
    costs : callable, optional
        From a machine to the costs of layers and transfers, by default ``LayerCosts``.

    Notes
    -----
    DeePa (Jia, Lin, Qi and Aiken, 2018). All workers have the samples of a step. All steps of a
    cell have one configuration.
    """

    name = "per layer"

    def __init__(
        self,
        configurations: Sequence[Configuration]
        | Callable[[Graph, int, int], list[Configuration]]
        | None = None,
        costs: Callable[[Machine], LayerCosts] = LayerCosts,
    ) -> None:
        self.configurations, self.costs = configurations, costs

    def choose(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        """Return the configurations that cost least, or those given if they can be."""
        given = self.configurations
        if given is None:
            return optimise(graph, costs, workers, batch, bounds)[0]
        chosen = list(given(graph, workers, batch) if callable(given) else given)
        if len(chosen) != len(graph.layers):
            raise InputError(
                f"configurations has {len(chosen)} entries; expected {len(graph.layers)}, one for "
                "each layer, the input and the loss included"
            )
        for layer, most, one in zip(graph.layers, bounds, chosen, strict=True):
            if workers % math.prod(one) or not allowed(layer, most, np.array([one]))[0]:
                raise InputError(
                    f"layer {layer.name} has the configuration {one}; expected parts of which "
                    f"{workers} is a multiple, at most {most}"
                )
            if layer.shares is not None and one != chosen[layer.shares]:
                raise InputError(
                    f"layer {layer.name} has the configuration {one}; expected "
                    f"{chosen[layer.shares]}, that of {graph.layers[layer.shares].name}, whose "
                    "parameters it uses"
                )
        return chosen


def _layers(work: Work) -> tuple[Graph, list[Operator | None], list[Limits]]:
    """Return a graph with its loss, operators if there are such, and the most parts of layers."""
    graph, batch = with_loss(work.graph), work.batch
    if isinstance(work.network, Graph):
        return graph, [], [limits(layer, batch) for layer in graph.layers]
    ops = operators(work.network, work.graph)
    ops += [None] * (len(graph.layers) - len(ops))
    bounds = [limits_of(op, layer, batch) for op, layer in zip(ops, graph.layers, strict=True)]
    return graph, ops, bounds


def footprints(
    graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield, for each layer, what every worker sends, and its parameters and activations.

    Activations are its block of the output, and what it needs of inputs that others have.
    """
    of, numbers = _numbered(workers, chosen)
    everyone, known = np.arange(workers), dict[Any, NDArray[np.int64]]()
    edges: list[list[tuple[int, Moves]]] = [[] for _ in graph.layers]
    for j, k, moves in moves_of(graph, of, batch):
        edges[k].append((j, moves))
    for k, layer in enumerate(graph.layers[1:], 1):
        key: Any = layer.shape, layer.weights, layer.kind == "softmax", int(numbers[k][0])
        if key not in known:
            known[key] = _own(of, layer, numbers[k], batch)
        total = known[key].copy()
        for j, moves in edges[k]:
            deep = graph.layers[j].kind != "input"
            key = id(moves), deep, int(numbers[j][0]), int(numbers[k][0])
            if key not in known:
                sent, received = moves.entries(numbers[j], numbers[k], everyone)
                moved, needed = (sent + received)[0, :, 0], received[0, :, 0]
                if not deep:
                    # All workers have the samples, and read what they need.
                    moved, needed = 0 * moved, moves.needed(numbers[k], everyone)[0]
                # Every entry that is received comes back as a gradient.
                entries = np.stack([moved, 0 * moved, needed])
                known[key] = entries.round().astype(np.int64)
            total += known[key]
        yield k, total


def _own(of: Configurations, layer: Layer, number: Chosen, batch: int) -> NDArray[np.int64]:
    """Count the entries that every worker sends of parameters, and keeps of them and outputs."""
    everyone, image = np.arange(of.workers), image_of(layer.shape)
    lengths = of.lengths((batch, *image), number, everyone)[0]
    n, _, h, w = of.all[number[0]].tolist()
    weights = layer.weights * lengths[:, 1] // image[0] * (lengths[:, 0] > 0)
    # Gradients are summed in as many pieces as there are copies.
    places, copies = of.places(number, everyone)[0], n * h * w
    place = (places[:, 0] * h + places[:, 2]) * w + places[:, 3]
    moved = sum_words(weights, place, copies)
    # Nothing of the loss is kept.
    outputs = lengths.prod(axis=-1) * (layer.kind != "softmax")
    return np.stack([moved, weights, outputs])


def _numbered(workers: int, chosen: Sequence[Configuration]) -> tuple[Configurations, list[Chosen]]:
    """Return the different configurations, and for each layer the number of its own."""
    different = list(dict.fromkeys(chosen))
    number = {one: np.array([k]) for k, one in enumerate(different)}
    return Configurations(workers, different), [number[one] for one in chosen]


def _name(configuration: Configuration) -> str:
    parts = zip("nchw", configuration, strict=True)
    return " ".join(f"{axis}={d}" for axis, d in parts if d > 1) or "one worker"
