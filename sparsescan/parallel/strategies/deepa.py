"""DeePa: for every layer the configuration that makes a step of the whole network cheapest.

Every layer divides its output along samples, channels, height and width, as it likes best; where
two layers differ, data moves between workers. What a step takes is a sum over layers and edges
(DeePa, equation 1), whose least value node and edge elimination find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...elimination import minimise
from ...errors import InputError
from ...schedule import check_count
from ..communicator import Communicator, Fault
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
from .partitioned import Partitioned, limits_of
from .recurrent import Network, graph_of, operators
from .strategy import Prediction, Strategy, Training

__all__ = [
    "Costs",
    "PerLayer",
    "SharedLink",
    "footprint",
    "image_parallelism",
    "one_weird_trick",
    "optimise",
    "transfers",
    "with_loss",
]

Times = NDArray[np.float64]
Chosen = NDArray[np.int64]

# Of sums that are compared with each other.
_ROUNDING = 1e-9
# Groups of layers in a description.
_WORDS = 4


class Costs:
    """Nanoseconds of layers and of transfers, as a machine's constants have them.

    Parameters
    ----------
    machine : Machine
        A worker and the network between workers.
    measured : mapping, optional
        What was measured: by the name of a layer and a configuration, nanoseconds of its forward
        and backward pass for the whole batch on the workers of that configuration.
    """

    def __init__(
        self,
        machine: Machine,
        measured: Mapping[tuple[str, Configuration], float] | None = None,
    ) -> None:
        self.machine = machine
        self.measured = {} if measured is None else measured

    def compute(self, graph: Graph, k: int, configurations: Chosen, batch: int) -> Times:
        """Of forward and backward pass of a layer, for each of some configurations."""
        name, known = graph.layers[k].name, {}
        found = np.empty(len(configurations))
        for place, (n, c, h, w) in enumerate(configurations.tolist()):
            given = self.measured.get((name, (n, c, h, w)))
            if given is None:
                parts = n, c, h * w
                if parts not in known:
                    known[parts] = self._modelled(graph, k, -(-batch // n), c, h * w)
                given = known[parts]
            found[place] = given
        return found

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
        """Of the sum of parameter gradients over the workers that have the same parameters.

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
        """Of an edge, forward and backward, for any two of some configurations.

        The busiest worker sends or receives, one message after the other.
        """
        network, workers = self.machine.network, of.looked_at
        sent, received = moves.entries(a, b, workers)
        busiest = np.maximum(sent, received).max(axis=1)
        nbytes = busiest * self.machine.itemsize
        latency = np.where(busiest > 0, network.latency * moves.messages(a, b), 0.0)
        times: Times = 2 * (latency + network.inverse_bandwidth * nbytes)
        return times

    def least_transfer(self, moves: Moves, of: Configurations, b: Chosen) -> Times:
        """What an edge takes at least in each configuration of its layer.

        Of what workers need, they can have no more than the output that the edge is about.
        """
        needed = moves.needed(b, of.looked_at).sum(axis=-1) - moves.size
        nbytes = needed.clip(0) / len(of.looked_at) * self.machine.itemsize
        times: Times = 2 * self.machine.network.inverse_bandwidth * nbytes
        return times


class SharedLink(Costs):
    """Costs as DeePa estimates them: the size of all data over one bandwidth.

    It is what Table 2 of the paper is made of: a layer whose parameters have ``r > 1`` copies moves
    ``2 r`` times their size, and a layer whose configuration is not that of its input the input
    that each of its workers needs, forward and backward, be it there already or not, and without a
    halo.

    The paper says that nothing moves where the configurations are the same. To the letter that
    would make it free to divide all layers along channels, of which convolutions and linear layers
    need all; here nothing moves if, besides, no part of the input is needed twice.
    """

    def update(self, layer: Layer, configurations: Chosen) -> Times:
        """Of gradients to the parameters and back."""
        channels = configurations[:, 1]
        replicas = configurations.prod(axis=1) // channels
        nbytes = layer.weights * self.machine.itemsize / channels
        each = self.machine.network.inverse_bandwidth * nbytes * channels
        times: Times = np.where(replicas > 1, 2.0 * replicas * each, 0.0)
        return times

    def transfer(self, moves: Moves, of: Configurations, a: Chosen, b: Chosen) -> Times:
        """Of an edge, for any two of some configurations."""
        needed = moves.without_halo(b)
        move = np.any(of.all[a][:, None] != of.all[b], axis=-1) | (needed > moves.size)
        nbytes = needed * self.machine.itemsize
        times: Times = np.where(move, 2 * self.machine.network.inverse_bandwidth * nbytes, 0.0)
        return times

    def least_transfer(self, moves: Moves, of: Configurations, b: Chosen) -> Times:
        """Nothing, where the configurations are the same."""
        return np.zeros(len(b))


def with_loss(graph: Graph) -> Graph:
    """The graph with the loss as its last layer, which needs whole outputs of samples."""
    last = graph.layers[-1]
    if last.kind == "softmax":
        return graph
    loss = Layer("loss", "softmax", (len(graph.layers) - 1,), last.shape)
    return Graph(graph.name, [*graph.layers, loss])


def optimise(
    graph: Graph,
    costs: Costs,
    workers: int,
    batch: int,
    most: Sequence[Limits] | None = None,
) -> tuple[list[Configuration], float]:
    """The configuration of every layer with which a step costs least, and what it costs.

    Parameters
    ----------
    graph : Graph
        The network.
    costs : Costs
        ``compute``, ``update`` and ``xfer`` of the paper.
    workers : int
        How many there are; a layer may use some of them.
    batch : int
        Samples.
    most : sequence of tuple, optional
        For each layer, how many parts there may be along each axis.

    Returns
    -------
    configurations : list of tuple of int
        Parts along samples, channels, height and width, for each layer.
    nanoseconds : float
        Equation 1.
    """
    of = Configurations(workers)
    bounds = [limits(layer, batch) for layer in graph.layers] if most is None else most
    model = _Model(graph, costs, of, batch)
    choices = [
        np.flatnonzero(allowed(layer, bound, of.all))
        for layer, bound in zip(graph.layers, bounds, strict=True)
    ]
    nodes = [model.node(k, choice) for k, choice in enumerate(choices)]
    # Among those along samples alone, and the cheapest of each layer, there is one total.
    few = [
        np.all(of.all[choice, 1:] == 1, axis=1) | (cost == cost.min())
        for choice, cost in zip(choices, nodes, strict=True)
    ]
    _, total = model.best(_masked(choices, few), _masked(nodes, few))
    # What costs more in one layer than is left of it when all others cost least, cannot be in the
    # best.
    least = [cost.copy() for cost in nodes]
    for _, k, moves in model.edges:
        least[k] += model.least_transfer(moves, choices[k])
    left = total * (1 + _ROUNDING) - math.fsum(cost.min() for cost in least)
    rest = [cost <= cost.min() + left for cost in least]
    found, total = model.best(_masked(choices, rest), _masked(nodes, rest))
    return [(int(n), int(c), int(h), int(w)) for n, c, h, w in of.all[found]], total


def _masked(arrays: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]]) -> list[Any]:
    return [array[mask] for array, mask in zip(arrays, masks, strict=True)]


class _Model:
    """Costs of a network by numbers of configurations; what is alike is computed once."""

    def __init__(self, graph: Graph, costs: Costs, of: Configurations, batch: int) -> None:
        self.graph, self.costs, self.of, self.batch = graph, costs, of, batch
        self.edges = [e for e in _edges(graph, of, batch) if graph.layers[e[0]].kind != "input"]
        self._known: dict[Any, Times] = {}

    def compute(self, k: int, chosen: Chosen) -> Times:
        """Of a layer, in each of some configurations."""
        layer, read = self.graph.layers[k], self.graph.layers
        work = layer.kind, layer.shape, layer.weights, layer.multiply_adds, layer.shares is None
        key: Any = *work, tuple(read[i].size for i in layer.inputs), chosen.tobytes()
        if self.costs.measured or self.costs.machine.times is not None:
            key = *key, layer.name
        if key not in self._known:
            found = self.costs.compute(self.graph, k, self.of.all[chosen], self.batch)
            if self.costs.machine.times is not None:
                found = found * self._shared(chosen)
            self._known[key] = found
        return self._known[key]

    def _shared(self, chosen: Chosen) -> Times:
        """What work takes if only the workers of some configurations have any."""
        counts, workers = self.of.all[chosen].prod(axis=1).tolist(), self.of.workers
        return np.array([self.costs.machine.shared([1.0] * n, workers) for n in counts])

    def update(self, k: int, chosen: Chosen) -> Times:
        """The same of the sum of its gradients."""
        key = self.graph.layers[k].weights, chosen.tobytes()
        if key not in self._known:
            self._known[key] = self.costs.update(self.graph.layers[k], self.of.all[chosen])
        return self._known[key]

    def node(self, k: int, chosen: Chosen) -> Times:
        """Both together."""
        return self.compute(k, chosen) + self.update(k, chosen)

    def transfer(self, moves: Moves, a: Chosen, b: Chosen) -> Times:
        """Of an edge, for any two of some configurations."""
        key = id(moves), a.tobytes(), b.tobytes()
        if key not in self._known:
            self._known[key] = self.costs.transfer(moves, self.of, a, b)
        return self._known[key]

    def least_transfer(self, moves: Moves, b: Chosen) -> Times:
        """What an edge takes at least."""
        key = id(moves), b.tobytes()
        if key not in self._known:
            self._known[key] = self.costs.least_transfer(moves, self.of, b)
        return self._known[key]

    def best(self, choices: Sequence[Chosen], nodes: Sequence[Times]) -> tuple[list[int], float]:
        """The numbers that together cost least, and what they cost."""
        edges = [(j, k, self.transfer(moves, choices[j], choices[k])) for j, k, moves in self.edges]
        for k, layer in enumerate(self.graph.layers):
            if layer.shares is not None:
                # One set of parameters, on the same workers.
                same = choices[layer.shares][:, None] == choices[k]
                edges.append((layer.shares, k, np.where(same, 0.0, math.inf)))
        found, total = minimise(nodes, edges)
        return [int(one[k]) for one, k in zip(choices, found, strict=True)], total


def _edges(graph: Graph, of: Configurations, batch: int) -> list[tuple[int, int, Moves]]:
    """Edges, and what moves along them: one object for those that are alike."""
    known: dict[Any, Moves] = {}
    found = []
    for j, k, first in edges_of(graph):
        source, layer = graph.layers[j], graph.layers[k]
        windows = layer.kernel, layer.stride, layer.padding, layer.groups
        alike = layer.kind, windows, first, source.shape, layer.shape
        if alike not in known:
            known[alike] = Moves(of, layer, source, batch, first)
        found.append((j, k, known[alike]))
    return found


def image_parallelism(graph: Graph, workers: int, batch: int) -> list[Configuration]:
    """All layers divided along samples alone."""
    whole = _largest(workers, batch)
    return [(1 if layer.kind == "input" else whole, 1, 1, 1) for layer in graph.layers]


def one_weird_trick(graph: Graph, workers: int, batch: int) -> list[Configuration]:
    """Image parallelism, but for linear layers, which are divided along their outputs.

    What follows a linear layer elementwise is divided as it is (Krizhevsky, 2014).
    """
    found = image_parallelism(graph, workers, batch)
    for k, layer in enumerate(graph.layers):
        behind = layer.kind == "elementwise" and graph.layers[layer.inputs[0]].kind == "linear"
        if layer.kind == "linear" or behind:
            found[k] = 1, _largest(workers, layer.shape[0]), 1, 1
    return found


def _largest(workers: int, most: int) -> int:
    """The largest divisor of the workers that is at most so large."""
    return max(d for d in range(1, min(workers, most) + 1) if workers % d == 0)


class PerLayer(Strategy):
    """A configuration for every layer, along samples, channels, height and width; exact.

    Parameters
    ----------
    configurations : sequence of tuple of int, or callable, optional
        For every layer of :func:`with_loss`'s graph; or a function of the graph, workers and batch
        that gives them, such as :func:`image_parallelism`. By default those that cost least.
    costs : callable, optional
        From a machine to what layers and transfers cost, by default :class:`Costs`.
    machine : Machine, optional
        For which :meth:`start` chooses configurations.

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
        costs: Callable[[Machine], Costs] = Costs,
        machine: Machine | None = None,
    ) -> None:
        self.configurations = configurations
        self.costs = costs
        self.machine = Machine() if machine is None else machine

    def predict(self, network: Graph, machine: Machine, workers: int, batch: int) -> Prediction:
        """What a step takes with the configurations that cost least, or with those given."""
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
        self, comm: Any, network: Network, batch: int, *, learning_rate: float = 0.1
    ) -> Training:
        """Train over the ranks of a communicator; see :meth:`Strategy.start`.

        Parameters
        ----------
        comm, batch, learning_rate
            As there.
        network : Sequential or Recurrent
            The same on all ranks; a Sequential may have residual blocks. Each rank takes a copy of
            the parameters of its blocks.
        """
        batch = check_count("batch", batch, 1)
        plain, communicator = graph_of(network), Communicator.of(comm)
        graph, ops = with_loss(plain), operators(network, plain)
        ops += [None] * (len(graph.layers) - len(ops))
        bounds = [limits_of(op, layer, batch) for op, layer in zip(ops, graph.layers, strict=True)]
        costs = self.costs(self.machine)
        chosen = self._chosen(graph, costs, communicator.size, batch, bounds)
        shape, fault = network.input_shape, Fault()
        with fault:
            made = Partitioned(communicator, ops, graph, chosen, shape, batch, learning_rate)
        communicator.agree(fault.error)
        return made

    def _chosen(
        self, graph: Graph, costs: Costs, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        given = self.configurations
        if given is None:
            return optimise(graph, costs, workers, batch, bounds)[0]
        found = list(given(graph, workers, batch) if callable(given) else given)
        if len(found) != len(graph.layers):
            raise InputError(
                f"configurations has {len(found)} entries; expected {len(graph.layers)}, one for "
                "each layer, the input and the loss included"
            )
        for layer, most, one in zip(graph.layers, bounds, found, strict=True):
            if workers % math.prod(one) or not allowed(layer, most, np.array([one]))[0]:
                raise InputError(
                    f"layer {layer.name} has the configuration {one}; expected parts of which "
                    f"{workers} is a multiple, at most {most}"
                )
            if layer.shares is not None and one != found[layer.shares]:
                raise InputError(
                    f"layer {layer.name} has the configuration {one}; expected "
                    f"{found[layer.shares]}, that of {graph.layers[layer.shares].name}, whose "
                    "parameters it uses"
                )
        return found


def transfers(
    graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int
) -> tuple[int, int]:
    """Entries that all workers move in a step, as DeePa counts them.

    Parameters
    ----------
    graph : Graph
        The network.
    chosen : sequence of tuple of int
        Configuration of every layer.
    workers : int
        How many there are.
    batch : int
        Samples.

    Returns
    -------
    parameters : int
        Gradients to where parameters are kept and back: ``2 r`` times their size for ``r > 1``
        copies.
    activations : int
        What workers need of the outputs of others, forward alone.
    """
    of, numbers = _numbered(workers, chosen)
    copies = [n * h * w for n, _, h, w in chosen]
    layers = zip(graph.layers, copies, strict=True)
    parameters = sum(2 * r * layer.weights for layer, r in layers if r > 1)
    moved = 0.0
    for j, k, moves in _edges(graph, of, batch):
        if graph.layers[j].kind != "input":
            moved += moves.entries(numbers[j], numbers[k], np.arange(workers))[1].sum()
    return parameters, round(moved)


def footprint(
    graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Entries that every worker sends in a step, and those that it keeps."""
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
            # What is received comes back as a gradient.
            moved = sends * (sent + received)[0, :, 0]
            needed = moves.needed(numbers[k], everyone)[0]
            known[key] = np.stack([moved, needed]).round().astype(np.int64)
        total += known[key]
    return total[0], total[1]


def _own(of: Configurations, layer: Layer, number: Chosen, batch: int) -> NDArray[np.int64]:
    """What every worker sends of parameters, and keeps of them and of the output."""
    everyone, image = np.arange(of.workers), image_of(layer.shape)
    lengths = of.lengths((batch, *image), number, everyone)[0]
    n, _, h, w = of.all[number[0]].tolist()
    weights = layer.weights * lengths[:, 1] // image[0] * (lengths[:, 0] > 0)
    # They are summed in as many pieces as there are copies.
    places, copies = of.places(number, everyone)[0], n * h * w
    place = (places[:, 0] * h + places[:, 2]) * w + places[:, 3]
    piece = (place + 1) * weights // copies - place * weights // copies
    moved = weights - piece + piece * (copies - 1)
    return np.stack([moved, 2 * weights + lengths.prod(axis=-1)])


def _numbered(workers: int, chosen: Sequence[Configuration]) -> tuple[Configurations, list[Chosen]]:
    """The configurations of all layers without repetition, and for each layer its number."""
    different = list(dict.fromkeys(chosen))
    number = {one: np.array([k]) for k, one in enumerate(different)}
    return Configurations(workers, different), [number[one] for one in chosen]


def _described(graph: Graph, chosen: Sequence[Configuration]) -> str:
    """Configurations of layers with parameters, those that are equal joined."""
    found: list[str] = []
    pairs = zip(graph.layers, chosen, strict=True)
    names = [_name(one) for layer, one in pairs if layer.weights]
    for name, group in groupby(names):
        count = len(list(group))
        found.append(name if count == 1 else f"{count}x {name}")
    if len(found) > _WORDS:
        found[2:-1] = ["…"]
    return ", ".join(found)


def _name(configuration: Configuration) -> str:
    parts = zip("nchw", configuration, strict=True)
    return " ".join(f"{axis}={d}" for axis, d in parts if d > 1) or "one worker"
