"""DeePa: for every layer the configuration that makes a step of the whole network cheapest.

Every layer divides its output along samples, channels, height and width in a way of its own; where
two layers differ, data moves between workers. The time of a step is a sum over layers and edges
(DeePa, equation 1), whose least value node and edge elimination find. Batch, model, domain and
integrated parallelism are such plans, with fewer configurations to choose from.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..jacobians import Operator
from ..parallel.communicator import Fault
from ..planning.elimination import minimise
from ..symbolic.schedule import check_count
from .collectives import sum_words
from .configurations import (
    MANY,
    Configuration,
    Configurations,
    Limits,
    Moves,
    allowed,
    edges_of,
    image_of,
    limits,
)
from .graph import MIXING, Graph, Layer
from .machine import Machine
from .partitioned import Division, Partitioned, limits_of
from .recurrent import Trainable, as_graph, operators
from .strategy import Job, LayerPlan, Prediction, Strategy, Training

__all__ = [
    "Divided",
    "LayerCosts",
    "NetworkCosts",
    "PerLayer",
    "footprint",
    "optimise",
    "with_loss",
]

Times = NDArray[np.float64]
Chosen = NDArray[np.int64]

# Relative error of sums that are compared with each other.
_ROUNDING = 1e-9
# Most groups of layers in a description.
_WORDS = 4
# Configurations of a layer among which the best are searched: the cheapest, if there are more.
_MOST = 100
# Most searches for the step in which the backward pass hides as much as can be.
_SEARCHES = 8


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
        """Return times of the forward and of the backward pass of a layer, ``(…, 2)``."""
        mixing = graph.layers[k].kind in MIXING
        n, c, h, w = configurations.T
        # Each worker of a layer with weights reads the whole input, and has some of the parameters.
        samples = -(-batch // n) / (h * w * (1 if mixing else c))
        work, which = np.unique(
            np.stack([samples, c if mixing else 1 + 0 * c]), axis=1, return_inverse=True
        )
        if self.machine.times is None and graph.layers[k].kind != "cell":
            passes = np.stack(
                np.broadcast_arrays(*self._passes(graph, k, *work), work[0])[:2], axis=-1
            )
        else:
            passes = np.array([self._passes(graph, k, *one) for one in work.T.tolist()])
        taken: Times = passes.reshape(-1, 2)[which.ravel()]
        return taken

    def _passes(self, graph: Graph, k: int, samples: Any, channels: Any) -> tuple[Any, Any]:
        """Return times of both passes; arrays are for a machine without measured times."""
        machine, share = self.machine, 1 / channels
        if graph.layers[k].kind == "softmax":
            return machine.loss(samples), 0.0
        # Every layer is a chain of its own.
        chain = machine.chain(graph, k, share)
        backward = chain + machine.backward(graph, k, samples, share)
        return (
            machine.forward(graph, k, samples, share),
            backward + machine.update(graph, k, share),
        )

    def update(self, layer: Layer, configurations: Chosen) -> Times:
        """Return times of the numbers in the sum of parameter gradients over their copies.

        All layers are summed in one message, whose latency is :meth:`fused`.
        """
        copies = configurations.prod(axis=1) // configurations[:, 1]
        numbers = 2 * layer.weights / configurations[:, 1] * (copies - 1) / copies
        times: Times = self.machine.network.inverse_bandwidth * self.machine.itemsize * numbers
        return times

    def fused(self, copies: int) -> float:
        """Return the latency of the sum of all gradients, of which there are so many copies."""
        return float(2 * self.machine.exchange(copies, 0))

    def transfer(self, moves: Moves, of: Configurations, a: Chosen, b: Chosen) -> Times:
        """Return times of an edge, forward and backward, for any two of some configurations."""
        sent, received = moves.entries(a, b, of.looked_at)
        busiest = np.maximum(sent, received).max(axis=1)
        times = 2 * self.machine.exchange(moves.messages(a, b), busiest * self.machine.itemsize)
        return np.where(busiest > 0, times, 0.0)

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
        The cost, equation 1, and the latency of the sum of all gradients.
    """
    model = NetworkCosts(graph, costs, Configurations(workers), batch)
    bounds = [limits(layer, batch) for layer in graph.layers] if most is None else most
    choices = [
        np.flatnonzero(allowed(layer, bound, model.of.all))
        for layer, bound in zip(graph.layers, bounds, strict=True)
    ]
    return model.cheapest(choices)


def _masked(arrays: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]]) -> list[Any]:
    return [array[mask] for array, mask in zip(arrays, masks, strict=True)]


class NetworkCosts:
    """Costs of a network by numbers of configurations, computed once for layers that are alike."""

    def __init__(self, graph: Graph, costs: LayerCosts, of: Configurations, batch: int) -> None:
        self.graph, self.costs, self.of, self.batch = graph, costs, of, batch
        self.edges = [e for e in _edges(graph, of, batch) if graph.layers[e[0]].kind != "input"]
        self._copies = of.all.prod(axis=1) // of.all[:, 1]
        self._known: dict[Any, Any] = {}

    def compute(self, k: int, chosen: Chosen) -> Times:
        """Return times of a layer forward and backward, in each of some configurations."""
        layer, read = self.graph.layers[k], self.graph.layers
        work = layer.kind, layer.shape, layer.weights, layer.multiply_adds, layer.shares is None
        key: Any = *work, tuple(read[i].size for i in layer.inputs), chosen.tobytes()
        if self.costs.by_name:
            key = *key, layer.name
        return self._once(key, lambda: self._compute(k, chosen))

    def _compute(self, k: int, chosen: Chosen) -> Times:
        times = self.costs.compute(self.graph, k, self.of.all[chosen], self.batch)
        if self.costs.machine.times is None:
            return times
        # Workers that have no work leave their cores to those of a configuration.
        counts, workers = self.of.all[chosen].prod(axis=1).tolist(), self.of.workers
        shared = [self.costs.machine.shared([1.0] * n, workers) for n in counts]
        alone: Times = times * np.array(shared)[:, None]
        return alone

    def _once(self, key: Any, call: Callable[[], Times]) -> Times:
        """Return the result of the first call for a key."""
        if key not in self._known:
            self._known[key] = call()
        found: Times = self._known[key]
        return found

    def update(self, k: int, chosen: Chosen) -> Times:
        """Return times of the sum of its parameter gradients."""
        key = self.graph.layers[k].weights, chosen.tobytes()
        return self._once(key, lambda: self.costs.update(self.graph.layers[k], self.of.all[chosen]))

    def _node(self, k: int, chosen: Chosen, weights: tuple[float, float]) -> Times:
        """Return times of a layer, with its backward pass and the sum of its gradients weighted."""
        passes, (behind, summed) = self.compute(k, chosen), weights
        node: Times = passes[:, 0] + behind * passes[:, 1] + summed * self.update(k, chosen)
        return node

    def transfer(self, moves: Moves, a: Chosen, b: Chosen) -> Times:
        """Return times of an edge, for any two of some configurations."""
        key = id(moves), a.tobytes(), b.tobytes()
        return self._once(key, lambda: self.costs.transfer(moves, self.of, a, b))

    def cheapest(self, choices: Sequence[Chosen]) -> tuple[list[Configuration], float]:
        """Return the cheapest configuration of every layer among some, and their cost."""
        overlap = self.costs.machine.overlap
        total, best = min(self._overlapped(choices) if overlap else self._by_copies(choices, 1, 1))
        return [(int(n), int(c), int(h), int(w)) for n, c, h, w in self.of.all[best]], total

    def _overlapped(self, choices: Sequence[Chosen]) -> Iterator[tuple[float, list[int]]]:
        """Yield configurations with which sums of gradients overlap with the backward pass.

        A step is then the longer of two sums over layers. Of weighted means of both the least are
        the corners of a convex hull, among which the best is found by bisection.
        """
        ends: list[tuple[float, float]] = []
        weight = 1.0
        for _ in range(_SEARCHES):
            found = list(self._by_copies(choices, weight, 1 - weight))
            yield from found
            corners = [self._both(best) for _, best in found]
            corner = min(corners, key=lambda both: weight * both[0] + (1 - weight) * both[1])
            if corner in ends:
                return
            if len(ends) < 2:
                ends.append(corner)
            else:
                ends[corner[0] >= corner[1]] = corner
            if len(ends) < 2:
                weight = 0.0
                continue
            (backward, sums), (other, less) = ends
            if backward >= other or sums <= less:
                return
            weight = (sums - less) / (sums - less + other - backward)

    def _both(self, best: Sequence[int]) -> tuple[float, float]:
        """Return nanoseconds of a step without sums of gradients, and without a backward pass."""
        parts = self.parts([np.array([one]) for one in best])
        total = math.fsum(parts.values())
        return total - parts["weights"], total - parts["backward"]

    def _by_copies(
        self, choices: Sequence[Chosen], backward: float, sums: float
    ) -> Iterator[tuple[float, list[int]]]:
        """Yield the best configurations, and those with ever fewer copies of parameters.

        The sum of all gradients has a latency that depends on the most copies of any layer's: a
        plan can be better only with fewer of them.
        """
        least = math.inf
        while all(len(choice) for choice in choices):
            total, best = self._search(choices, (backward, sums), least)
            if total >= least:
                return
            step = math.fsum(self.times([np.array([one]) for one in best]).values())
            least = min(least, step)
            yield step, best
            copies = self._most_copies(best)
            rounds = (copies - 1).bit_length()
            if not rounds:
                return
            few = self._copies <= 1 << (rounds - 1)
            choices = [
                choice[few[choice]] if layer.weights or layer.shares is not None else choice
                for choice, layer in zip(choices, self.graph.layers, strict=True)
            ]

    def _most_copies(self, best: Sequence[int]) -> int:
        pairs = zip(best, self.graph.layers, strict=True)
        return max((int(self._copies[one]) for one, layer in pairs if layer.weights), default=1)

    def _search(
        self, choices: Sequence[Chosen], weights: tuple[float, float], most: float
    ) -> tuple[float, list[int]]:
        """Return the least sum of equation 1 and its configurations, none if it exceeds `most`."""
        nodes = [self._node(k, choice, weights) for k, choice in enumerate(choices)]
        # The least that a layer and its edges can cost.
        least = [cost.copy() for cost in nodes]
        for _, k, moves in self.edges:
            least[k] += self._least_transfer(moves, choices[k])
        lowest = math.fsum(cost.min() for cost in least)
        if lowest >= most:
            return math.inf, []
        seed, total = min(self._seeds(choices, nodes), key=lambda way: way[1])
        # A configuration is not in the best solution if it costs more than the total leaves for its
        # layer when all others cost least.
        left = total * (1 + _ROUNDING) - lowest
        rest = [
            (cost <= min(cost.min() + left, np.partition(cost, _MOST)[_MOST]))
            if len(cost) > _MOST
            else cost <= cost.min() + left
            for cost in least
        ]
        for mask, choice, one in zip(rest, choices, seed, strict=True):
            mask |= choice == one
        best, total = self._best(_masked(choices, rest), _masked(nodes, rest))
        return total, best

    def _seeds(
        self, choices: Sequence[Chosen], nodes: Sequence[Times]
    ) -> Iterator[tuple[list[int], float]]:
        """Yield the best among few configurations, and what it costs.

        These are the cheapest of each layer and those along samples alone; of many workers also
        those of integrated parallelism on each grid.
        """
        every = self.of.all
        few = [np.all(every[choice, 1:] == 1, axis=1) for choice in choices]
        cheap = [mask | (cost == cost.min()) for mask, cost in zip(few, nodes, strict=True)]
        found = self._best(_masked(choices, cheap), _masked(nodes, cheap))
        yield found
        if self.of.workers <= MANY:
            return
        for columns in self.of.divisors.tolist():
            rows = self.of.workers // columns
            grid = [(columns, rows, 1, 1), (columns, 1, rows, 1), (columns, 1, 1, 1)]
            grid.append((self.of.workers, 1, 1, 1))
            on = np.any([np.all(every == one, axis=1) for one in grid], axis=0) | (
                every.prod(axis=1) == 1
            )
            some = [on[choice] for choice in choices]
            if not all(mask.any() for mask in some):
                continue
            # Transfers are left out: what costs more without them is no better.
            costs = _masked(nodes, some)
            if math.fsum(cost.min() for cost in costs) < found[1]:
                found = min(
                    found, self._best(_masked(choices, some), costs), key=lambda way: way[1]
                )
                yield found

    def _least_transfer(self, moves: Moves, b: Chosen) -> Times:
        key = id(moves), b.tobytes()
        return self._once(key, lambda: self.costs.least_transfer(moves, self.of, b))

    def _best(self, choices: Sequence[Chosen], nodes: Sequence[Times]) -> tuple[list[int], float]:
        """Return the configurations that together cost least, by number, and their cost."""
        edges = [(j, k, self.transfer(moves, choices[j], choices[k])) for j, k, moves in self.edges]
        for k, layer in enumerate(self.graph.layers):
            if layer.shares is not None:
                # Layers that share parameters are on the same workers.
                same = choices[layer.shares][:, None] == choices[k]
                edges.append((layer.shares, k, np.where(same, 0.0, math.inf)))
        best, total = minimise(nodes, edges)
        return [int(one[k]) for one, k in zip(choices, best, strict=True)], total

    def times(self, numbers: Sequence[Chosen]) -> dict[str, float]:
        """Return nanoseconds of a step by part, with one configuration for each layer."""
        return self.costs.machine.hidden(self.parts(numbers))

    def parts(self, numbers: Sequence[Chosen]) -> dict[str, float]:
        """Return nanoseconds by part, if none is hidden behind another."""
        passes = np.array([self.compute(k, one)[0] for k, one in enumerate(numbers)])
        copies = self._most_copies([int(one[0]) for one in numbers])
        sums = [float(self.update(k, one)[0]) for k, one in enumerate(numbers)]
        parts = {
            "forward": math.fsum(passes[:-1, 0]),
            "backward": math.fsum(passes[:-1, 1]),
            "weights": math.fsum(sums) + self.costs.fused(copies),
            "activations": 0.0,
            "halo": 0.0,
            # The last layer is the loss; that of all samples is a sum over workers.
            "loss": passes[-1].sum() + self.costs.machine.collective("gather", self.of.workers),
        }
        for j, k, moves in self.edges:
            alike = numbers[j] == numbers[k] and self.of.all[numbers[k], 2:].prod() > 1
            part = "halo" if alike else "activations"
            parts[part] += float(self.transfer(moves, numbers[j], numbers[k])[0, 0])
        return parts


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


class Divided(Strategy):
    """Every layer divided between workers by a configuration; exact."""

    costs: Callable[[Machine], LayerCosts] = LayerCosts

    def predict(
        self, network: Graph | Trainable, machine: Machine, workers: int, batch: int
    ) -> Prediction:
        """Predict a step with the configurations that cost least; see :meth:`Strategy.predict`."""
        workers, batch = check_count("workers", workers, 1), check_count("batch", batch, 1)
        graph, _, bounds = _layers(network, batch)
        costs = self.costs(machine)
        chosen = self.choose(graph, costs, workers, batch, bounds)
        of, numbers = _numbered(workers, chosen)
        times = NetworkCosts(graph, costs, of, batch).times(numbers)
        sent, kept = np.zeros((2, workers), np.int64)
        layers = []
        for k, (moved, weights, activations) in _footprints(graph, chosen, workers, batch):
            needed = machine.needed(weights, activations)
            sent, kept = sent + moved * machine.itemsize, kept + needed
            layer, one = graph.layers[k], chosen[k]
            peaks = int(moved.max()) * machine.itemsize, int(np.max(needed))
            layers.append(LayerPlan(layer.name, one, range(math.prod(one)), *peaks))
        how = self.describe(graph, chosen)
        return Prediction(self.name, how, times, sent.max(), kept.max(), layers=tuple(layers))

    def _train(self, job: Job) -> Training:
        graph, ops, bounds = _layers(job.network, job.batch)
        workers, costs = job.communicator.size, self.costs(job.machine)
        chosen = self.choose(graph, costs, workers, job.batch, bounds)
        division, fault = Division(graph, ops, chosen, job.network.input_shape), Fault()
        with fault:
            training = Partitioned(job, division)
        job.communicator.agree(fault.error)
        return training

    @abstractmethod
    def choose(
        self, graph: Graph, costs: LayerCosts, workers: int, batch: int, bounds: Sequence[Limits]
    ) -> list[Configuration]:
        """Return the configuration of each layer of :func:`with_loss`'s graph.

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
        Parts along each axis for every layer of :func:`with_loss`'s graph; or a function of the
        graph, workers and batch that returns them. By default the cheapest.
    costs : callable, optional
        From a machine to the costs of layers and transfers, by default :class:`LayerCosts`.

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


def _layers(
    network: Graph | Trainable, batch: int
) -> tuple[Graph, list[Operator | None], list[Limits]]:
    """Return a graph with its loss, operators if there are such, and the most parts of layers."""
    plain = as_graph(network)
    graph = with_loss(plain)
    if isinstance(network, Graph):
        return graph, [], [limits(layer, batch) for layer in graph.layers]
    ops = operators(network, plain)
    ops += [None] * (len(graph.layers) - len(ops))
    bounds = [limits_of(op, layer, batch) for op, layer in zip(ops, graph.layers, strict=True)]
    return graph, ops, bounds


def footprint(
    graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the entries that every worker sends in a step, and its parameters and activations."""
    every = _footprints(graph, chosen, workers, batch)
    moved, weights, activations = np.sum([found for _, found in every], axis=0)
    return moved, weights + activations


def _footprints(
    graph: Graph, chosen: Sequence[Configuration], workers: int, batch: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield, for each layer, what every worker sends, and its parameters and activations.

    Activations are its block of the output, and what it needs of inputs that others have.
    """
    of, numbers = _numbered(workers, chosen)
    everyone, known = np.arange(workers), dict[Any, NDArray[np.int64]]()
    edges: list[list[tuple[int, Moves]]] = [[] for _ in graph.layers]
    for j, k, moves in _edges(graph, of, batch):
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
                found = np.stack([moved, 0 * moved, needed])
                known[key] = found.round().astype(np.int64)
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
    # Of the loss nothing is kept.
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
