"""DeePa: for every layer the configuration that makes a step of the whole network cheapest.

Every layer divides its output along samples, channels, height and width in a way of its own; where
two layers differ, data moves between workers. The time of a step is a sum over layers and edges
(DeePa, equation 1), whose least value node and edge elimination find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..parallel.communicator import Communicator, Fault
from ..planning.elimination import minimise
from ..symbolic.schedule import check_count
from .boxes import bounds
from .configurations import (
    Configuration,
    Configurations,
    Limits,
    Moves,
    allowed,
    edges_of,
    image_of,
    limits,
)
from .graph import Graph, Layer
from .machine import Machine
from .partitioned import Division, Partitioned, limits_of
from .recurrent import Trainable, graph_of, operators
from .strategy import Prediction, Strategy, Training

__all__ = ["LayerCosts", "PerLayer", "footprint", "optimise", "with_loss"]

Times = NDArray[np.float64]
Chosen = NDArray[np.int64]

# Relative error of sums that are compared with each other.
_ROUNDING = 1e-9
# Most groups of layers in a description.
_WORDS = 4


class LayerCosts:
    """Nanoseconds of layers and of transfers, by the constants of a machine.

    Parameters
    ----------
    machine : Machine
        A worker and the network between workers.

    Attributes
    ----------
    by_name : bool
        Whether layers that differ by name alone may cost differently.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.by_name = machine, machine.times is not None

    def compute(self, graph: Graph, k: int, configurations: Chosen, batch: int) -> Times:
        """Return times of forward and backward pass of a layer, by configuration."""
        known: dict[tuple[int, ...], float] = {}
        for n, c, h, w in configurations.tolist():
            if (n, c, h * w) not in known:
                known[n, c, h * w] = self._modelled(graph, k, -(-batch // n), c, h * w)
        return np.array([known[n, c, h * w] for n, c, h, w in configurations.tolist()])

    def _modelled(self, graph: Graph, k: int, samples: int, channels: int, area: int) -> float:
        machine, layer = self.machine, graph.layers[k]
        if layer.kind == "softmax":
            return machine.loss(samples)
        if machine.times is None:
            share = 1 / (channels * area)
            return machine.forward(graph, k, samples, share) + machine.backward(
                graph, k, samples, share
            )
        pixels, share = samples / area, 1 / channels
        # Every layer is a chain of its own.
        return (
            machine.forward(graph, k, pixels, share)
            + machine.chain(graph, k, share)
            + machine.backward(graph, k, pixels, share)
            + machine.update(graph, k, share)
        )

    def update(self, layer: Layer, configurations: Chosen) -> Times:
        """Return times of the sum of parameter gradients over workers that have the parameters.

        Each worker sends every other one a part, and then its sum: ``2 (r - 1)`` messages of
        ``1/r`` of the parameters.
        """
        channels = configurations[:, 1]
        replicas = configurations.prod(axis=1) // channels
        network = self.machine.network
        nbytes = layer.weights * self.machine.itemsize / channels / replicas
        times: Times = 2.0 * (replicas - 1) * (network.latency + network.inverse_bandwidth * nbytes)
        return times if layer.weights else np.zeros(len(times))

    def transfer(self, moves: Moves, of: Configurations, a: Chosen, b: Chosen) -> Times:
        """Return times of an edge, forward and backward, for any two of some configurations.

        The busiest worker sends or receives one message after the other.
        """
        network, workers = self.machine.network, of.looked_at
        sent, received = moves.entries(a, b, workers)
        busiest = np.maximum(sent, received).max(axis=1)
        nbytes = busiest * self.machine.itemsize
        latency = np.where(busiest > 0, network.latency * moves.messages(a, b), 0.0)
        times: Times = 2 * (latency + network.inverse_bandwidth * nbytes)
        return times

    def least_transfer(self, moves: Moves, of: Configurations, b: Chosen) -> Times:
        """Return the least time of an edge in each configuration of its layer.

        Workers own no more of what they need than the output of the source.
        """
        needed = moves.needed(b, of.looked_at).sum(axis=-1) - moves.size
        nbytes = needed.clip(0) / len(of.looked_at) * self.machine.itemsize
        times: Times = 2 * self.machine.network.inverse_bandwidth * nbytes
        return times


def with_loss(graph: Graph) -> Graph:
    """Add the loss to a graph as its last layer, which needs whole outputs of samples."""
    last = graph.layers[-1]
    if last.kind == "softmax":
        return graph
    loss = Layer("loss", "softmax", (len(graph.layers) - 1,), last.shape)
    return Graph(graph.name, [*graph.layers, loss])


def optimise(
    graph: Graph,
    costs: LayerCosts,
    workers: int,
    batch: int,
    most: Sequence[Limits] | None = None,
) -> tuple[list[Configuration], float]:
    """Return the configuration of every layer with which a step costs least, and its cost.

    Parameters
    ----------
    graph : Graph
        The network.
    costs : LayerCosts
        ``compute``, ``update`` and ``xfer`` of the paper.
    workers : int
        Number of workers; a layer may use some of them.
    batch : int
        Samples.
    most : sequence of tuple, optional
        For each layer, the most parts along each axis.

    Returns
    -------
    configurations : list of tuple of int
        Parts along samples, channels, height and width, for each layer.
    nanoseconds : float
        The cost, equation 1.
    """
    of = Configurations(workers)
    bounds = [limits(layer, batch) for layer in graph.layers] if most is None else most
    model = _Model(graph, costs, of, batch)
    choices = [
        np.flatnonzero(allowed(layer, bound, of.all))
        for layer, bound in zip(graph.layers, bounds, strict=True)
    ]
    nodes = [model.node(k, choice) for k, choice in enumerate(choices)]
    # A first total, from configurations along samples alone and the cheapest of each layer.
    few = [
        np.all(of.all[choice, 1:] == 1, axis=1) | (cost == cost.min())
        for choice, cost in zip(choices, nodes, strict=True)
    ]
    _, total = model.best(_masked(choices, few), _masked(nodes, few))
    # A configuration is not in the best solution if it costs more than the total leaves for its
    # layer when all others cost least.
    least = [cost.copy() for cost in nodes]
    for _, k, moves in model.edges:
        least[k] += model.least_transfer(moves, choices[k])
    left = total * (1 + _ROUNDING) - math.fsum(cost.min() for cost in least)
    rest = [cost <= cost.min() + left for cost in least]
    best, total = model.best(_masked(choices, rest), _masked(nodes, rest))
    return [(int(n), int(c), int(h), int(w)) for n, c, h, w in of.all[best]], total


def _masked(arrays: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]]) -> list[Any]:
    return [array[mask] for array, mask in zip(arrays, masks, strict=True)]


class _Model:
    """Costs of a network by numbers of configurations, computed once for layers that are alike."""

    def __init__(self, graph: Graph, costs: LayerCosts, of: Configurations, batch: int) -> None:
        self.graph, self.costs, self.of, self.batch = graph, costs, of, batch
        self.edges = [e for e in _edges(graph, of, batch) if graph.layers[e[0]].kind != "input"]
        self._known: dict[Any, Times] = {}

    def compute(self, k: int, chosen: Chosen) -> Times:
        """Return times of a layer in each of some configurations."""
        layer, read = self.graph.layers[k], self.graph.layers
        work = layer.kind, layer.shape, layer.weights, layer.multiply_adds, layer.shares is None
        key: Any = *work, tuple(read[i].size for i in layer.inputs), chosen.tobytes()
        if self.costs.by_name:
            key = *key, layer.name
        return self._once(key, lambda: self._compute(k, chosen))

    def _compute(self, k: int, chosen: Chosen) -> Times:
        times = self.costs.compute(self.graph, k, self.of.all[chosen], self.batch)
        return times if self.costs.machine.times is None else times * self._shared(chosen)

    def _once(self, key: Any, call: Callable[[], Times]) -> Times:
        """Return the result of the first call for a key."""
        if key not in self._known:
            self._known[key] = call()
        return self._known[key]

    def _shared(self, chosen: Chosen) -> Times:
        """Return the factor of times where only the workers of a configuration have work."""
        counts, workers = self.of.all[chosen].prod(axis=1).tolist(), self.of.workers
        return np.array([self.costs.machine.shared([1.0] * n, workers) for n in counts])

    def update(self, k: int, chosen: Chosen) -> Times:
        """Return times of the sum of its parameter gradients."""
        key = self.graph.layers[k].weights, chosen.tobytes()
        return self._once(key, lambda: self.costs.update(self.graph.layers[k], self.of.all[chosen]))

    def node(self, k: int, chosen: Chosen) -> Times:
        """Return times of a layer and of the sum of its parameter gradients."""
        return self.compute(k, chosen) + self.update(k, chosen)

    def transfer(self, moves: Moves, a: Chosen, b: Chosen) -> Times:
        """Return times of an edge, for any two of some configurations."""
        key = id(moves), a.tobytes(), b.tobytes()
        return self._once(key, lambda: self.costs.transfer(moves, self.of, a, b))

    def least_transfer(self, moves: Moves, b: Chosen) -> Times:
        """Return the least times of an edge."""
        key = id(moves), b.tobytes()
        return self._once(key, lambda: self.costs.least_transfer(moves, self.of, b))

    def best(self, choices: Sequence[Chosen], nodes: Sequence[Times]) -> tuple[list[int], float]:
        """Return the configurations that together cost least, by number, and their cost."""
        edges = [(j, k, self.transfer(moves, choices[j], choices[k])) for j, k, moves in self.edges]
        for k, layer in enumerate(self.graph.layers):
            if layer.shares is not None:
                # Layers that share parameters are on the same workers.
                same = choices[layer.shares][:, None] == choices[k]
                edges.append((layer.shares, k, np.where(same, 0.0, math.inf)))
        best, total = minimise(nodes, edges)
        return [int(one[k]) for one, k in zip(choices, best, strict=True)], total


def _edges(graph: Graph, of: Configurations, batch: int) -> list[tuple[int, int, Moves]]:
    """Return edges and their moves, one object for those that are alike."""
    known: dict[Any, Moves] = {}
    edges = []
    for j, k, first in edges_of(graph):
        source, layer = graph.layers[j], graph.layers[k]
        windows = layer.kernel, layer.stride, layer.padding, layer.groups
        alike = layer.kind, windows, first, source.shape, layer.shape
        if alike not in known:
            known[alike] = Moves(of, layer, source, batch, first)
        edges.append((j, k, known[alike]))
    return edges


class PerLayer(Strategy):
    """A configuration for every layer, along samples, channels, height and width; exact.

    Parameters
    ----------
    configurations : sequence of tuple of int, or callable, optional
        Parts along each axis for every layer of :func:`with_loss`'s graph; or a function of the
        graph, workers and batch that returns them. By default the cheapest.
    costs : callable, optional
        From a machine to the costs of layers and transfers, by default :class:`LayerCosts`.
    machine : Machine, optional
        The machine for which :meth:`start` chooses configurations.

    Notes
    -----
    DeePa (Jia, Lin, Qi and Aiken, 2018). All workers have the samples of a step. All steps of a
    cell have one configuration, along samples. The memory is that of parameters and their
    gradients, of outputs, and of the boxes of inputs that are needed.
    """

    name = "per layer"

    def __init__(
        self,
        configurations: Sequence[Configuration]
        | Callable[[Graph, int, int], list[Configuration]]
        | None = None,
        costs: Callable[[Machine], LayerCosts] = LayerCosts,
        machine: Machine | None = None,
    ) -> None:
        self.configurations = configurations
        self.costs = costs
        self.machine = Machine() if machine is None else machine

    def predict(self, network: Graph, machine: Machine, workers: int, batch: int) -> Prediction:
        """Predict a step with the configurations that cost least, or with those given."""
        workers, batch = check_count("workers", workers, 1), check_count("batch", batch, 1)
        graph, costs = with_loss(network), self.costs(machine)
        bounds = [limits(layer, batch) for layer in graph.layers]
        chosen = self._chosen(graph, costs, workers, batch, bounds)
        of, numbers = _numbered(workers, chosen)
        model = _Model(graph, costs, of, batch)
        parts = {
            "compute": math.fsum(float(model.compute(k, one)[0]) for k, one in enumerate(numbers)),
            "weights": math.fsum(float(model.update(k, one)[0]) for k, one in enumerate(numbers)),
            "activations": math.fsum(
                float(model.transfer(moves, numbers[j], numbers[k])[0, 0])
                for j, k, moves in model.edges
            ),
        }
        # The sum of losses.
        parts["loss"] = machine.collective("gather", workers)
        moved, kept = footprint(graph, chosen, workers, batch)
        return Prediction(
            self.name,
            _described(graph, chosen),
            parts,
            int(moved.max()) * machine.itemsize,
            int(kept.max()) * machine.itemsize,
        )

    def start(
        self, comm: Any, network: Trainable, batch: int, *, learning_rate: float = 0.1
    ) -> Training:
        """Train over the ranks of a communicator; see :meth:`Strategy.start`."""
        batch = check_count("batch", batch, 1)
        plain, communicator = graph_of(network), Communicator.of(comm)
        graph, ops = with_loss(plain), operators(network, plain)
        ops += [None] * (len(graph.layers) - len(ops))
        bounds = [limits_of(op, layer, batch) for op, layer in zip(ops, graph.layers, strict=True)]
        costs = self.costs(self.machine)
        chosen = self._chosen(graph, costs, communicator.size, batch, bounds)
        division, fault = Division(graph, ops, chosen, network.input_shape), Fault()
        with fault:
            training = Partitioned(communicator, division, batch, learning_rate)
        communicator.agree(fault.error)
        return training

    def _chosen(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
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


def footprint(
    graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the entries that every worker sends in a step, and those that it keeps."""
    of, numbers = _numbered(workers, chosen)
    everyone, known = np.arange(workers), {}
    total = np.zeros((2, workers), np.int64)
    for k, layer in enumerate(graph.layers):
        key: Any = layer.shape, layer.weights, int(numbers[k][0])
        if layer.kind != "input":
            if key not in known:
                known[key] = _own(of, layer, numbers[k], batch)
            total += known[key]
    for j, k, moves in _edges(graph, of, batch):
        sends = graph.layers[j].kind != "input"
        key = id(moves), sends, int(numbers[j][0]), int(numbers[k][0])
        if key not in known:
            sent, received = moves.entries(numbers[j], numbers[k], everyone)
            # Every entry that is received comes back as a gradient.
            moved = sends * (sent + received)[0, :, 0]
            needed = moves.needed(numbers[k], everyone)[0]
            known[key] = np.stack([moved, needed]).round().astype(np.int64)
        total += known[key]
    return total[0], total[1]


def _own(of: Configurations, layer: Layer, number: Chosen, batch: int) -> NDArray[np.int64]:
    """Count the entries that every worker sends of parameters, and keeps of them and outputs."""
    everyone, image = np.arange(of.workers), image_of(layer.shape)
    lengths = of.lengths((batch, *image), number, everyone)[0]
    n, _, h, w = of.all[number[0]].tolist()
    weights = layer.weights * lengths[:, 1] // image[0] * (lengths[:, 0] > 0)
    # Gradients are summed in as many pieces as there are copies.
    places, copies = of.places(number, everyone)[0], n * h * w
    place = (places[:, 0] * h + places[:, 2]) * w + places[:, 3]
    start, stop = bounds(weights, place, copies)
    piece = stop - start
    moved = weights - piece + piece * (copies - 1)
    return np.stack([moved, 2 * weights + lengths.prod(axis=-1)])


def _numbered(workers: int, chosen: Sequence[Configuration]) -> tuple[Configurations, list[Chosen]]:
    """Return the different configurations, and for each layer the number of its own."""
    different = list(dict.fromkeys(chosen))
    number = {one: np.array([k]) for k, one in enumerate(different)}
    return Configurations(workers, different), [number[one] for one in chosen]


def _described(graph: Graph, chosen: Sequence[Configuration]) -> str:
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


def _name(configuration: Configuration) -> str:
    parts = zip("nchw", configuration, strict=True)
    return " ".join(f"{axis}={d}" for axis, d in parts if d > 1) or "one worker"
