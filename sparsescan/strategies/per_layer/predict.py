"""DeePa: for every layer the configuration that makes a step of the whole network cheapest.

Every layer divides its output along samples, channels, height and width in a way of its own; where
two layers differ, data moves between workers. The time of a step is a sum over layers and edges
(DeePa, equation 1), whose least value node and edge elimination find. Batch, model, domain and
integrated parallelism are such plans, with fewer configurations to choose from.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..graph import MIXING, Graph, Layer
from ..machine import Machine
from ..strategy import LayerPlan, Prediction, Strategy, Work, sum_words
from .configurations import (
    Configuration,
    Configurations,
    Limits,
    Moves,
    allowed,
    edges_of,
    image_of,
    limits,
    on_grid,
)
from .elimination import minimise

Times = NDArray[np.float64]
Chosen = NDArray[np.int64]
# Weights of the backward pass, and of sums of gradients.
_Weights = tuple[float, float]
# The cost of a step, and the number of a configuration for each node.
_Plan = tuple[float, list[int]]

# Relative error of sums that are compared with each other.
_ROUNDING = 1e-9
# Configurations of a layer among which the best are searched: the cheapest, if there are more, and
# in further rounds those of all candidates that are the cheapest beside the plan that was found. If
# no layer has more than a few, all are searched at once.
_MOST, _FEW, _ROUNDS, _CANDIDATES = 64, 4, 3, 2048
# Most searches for the step in which the backward pass hides as much as can be.
_SEARCHES = 6


class LayerCosts:
    """Nanoseconds of layers and of transfers: ``compute``, ``update`` and ``xfer`` of the paper.

    Layers that differ by name alone may cost differently if `by_name` is set.
    """

    by_name = False

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def compute(self, graph: Graph, k: int, configurations: Chosen, batch: int) -> Times:
        """Return times of the forward and of the backward pass of a layer, ``(…, 2)``."""
        mixing = graph.layers[k].kind in MIXING
        n, c, h, w = configurations.T
        # Each worker of a layer with weights reads the whole input, and has some of the parameters.
        samples = -(-batch // n) / (h * w * (1 if mixing else c))
        work, which = np.unique(
            np.stack([samples, c if mixing else 1 + 0 * c]), axis=1, return_inverse=True
        )
        if graph.layers[k].kind != "cell":
            passes = np.stack(np.broadcast_arrays(*self._passes(graph, k, *work), work[0])[:2])
        else:
            passes = np.array([self._passes(graph, k, *one) for one in work.T.tolist()]).T
        taken: Times = passes.T[which.ravel()]
        return taken

    def _passes(self, graph: Graph, k: int, samples: Any, channels: Any) -> tuple[Any, Any]:
        """Return times of both passes; arrays are not for cells."""
        if graph.layers[k].kind == "softmax":
            return 0.0, 0.0
        work = graph, k, samples, 1 / channels
        return self.machine.forward(*work), self.machine.backward(*work)

    def update(self, layer: Layer, configurations: Chosen) -> Times:
        """Return times of the numbers in the sum of parameter gradients over their copies.

        All layers are summed in one message, whose latency is :meth:`fused`.
        """
        n, c, h, w = configurations.T
        # Images are cut between neighbours, then channels, then samples.
        node, area = self.machine.node, h * w
        near = np.minimum(area, node) * np.clip(node // (c * area), 1, n)
        nbytes = self.machine.itemsize * layer.weights / c
        times: Times = self.machine.summing(nbytes, n * area, near)
        return times

    def fused(self, copies: int) -> float:
        """Return the latency of the sum of all gradients, of which there are so many copies."""
        return self.machine.rounds(copies)

    def transfer(self, moves: Moves, of: Configurations, a: Chosen, b: Chosen) -> Times:
        """Return times of an edge, forward and backward, for any two of some configurations."""
        ways = moves.entries(a, b, of.looked_at)
        inside = moves.entries_within(a, b, of.looked_at, self.machine.node)
        size = self.machine.itemsize
        near = size * np.maximum(*inside)
        far = size * np.maximum(*(way - here for way, here in zip(ways, inside, strict=True)))
        messages = moves.messages(a, b)[:, None]
        times: Times = np.where(near + far > 0, self.machine.exchange(messages, far, near), 0.0)
        busiest: Times = 2 * times.max(axis=1)
        return busiest

    def least_transfer(self, moves: Moves, of: Configurations, b: Chosen) -> Times:
        """Return the least time of an edge in each configuration of its layer.

        Workers own no more of what they need than the output of the source.
        """
        needed = moves.needed(b, of.looked_at).sum(axis=-1) - moves.size
        nbytes = needed.clip(0) / len(of.looked_at) * self.machine.itemsize
        networks = self.machine.within or self.machine.network, self.machine.network
        times: Times = 2 * min(one.inverse_bandwidth for one in networks) * nbytes
        return times


def with_loss(graph: Graph) -> Graph:
    """Add the loss to a graph as its last layer, which needs whole outputs of samples."""
    last = graph.layers[-1]
    if last.kind == "softmax":
        return graph
    loss = Layer("loss", "softmax", (len(graph.layers) - 1,), last.shape)
    return Graph(graph.name, [*graph.layers, loss])


def optimise(
    graph: Graph, costs: LayerCosts, workers: int, batch: int, most: Sequence[Limits] | None = None
) -> tuple[list[Configuration], float]:
    """Return the configuration of every layer with which a step costs least, and its cost.

    The cost is equation 1, and the latency of the sum of all gradients. A layer may use some of the
    workers; `most` are the most parts of each layer along each axis. No plan of integrated
    parallelism costs less.
    """
    bounds = [limits(layer, batch) for layer in graph.layers] if most is None else most
    n, c, h, w = np.max(bounds, axis=0).tolist()
    model = NetworkCosts(graph, costs, Configurations(workers, most=(n, c, h, w)), batch)
    columns = model.of.divisors[model.of.divisors <= batch].tolist()
    grids: list[tuple[Any, ...]] = [(workers, 1, ("model",), True)]
    grids += [(workers, 1, ("domain", "batch"), True), *((workers // k, k) for k in columns)]
    ways = [on_grid(graph.layers, bounds, *grid) for grid in grids]
    choices = [
        np.flatnonzero(allowed(layer, bound, model.of.all))
        for layer, bound in zip(graph.layers, bounds, strict=True)
    ]
    return model.cheapest(model.numbered([way for way in ways if all(way)]), choices)


class Pairs:
    """A table for pairs of numbers below a count, computed in blocks when they are needed."""

    def __init__(self, count: int, compute: Callable[[Chosen, Chosen], Times]) -> None:
        self._places = np.full((2, count), -1, np.int32)
        self._values, self._compute = np.empty((0, 0)), compute

    def __call__(self, rows: Chosen, columns: Chosen) -> Times:
        """Return the entries of some rows in some columns."""
        at = self._at(0, rows)[:, None], self._at(1, columns)
        unknown = np.isnan(self._values[at])
        # Rows that are new, then what is new in others.
        new = unknown.all(axis=1)
        for own in (new, ~new & unknown.any(axis=1)):
            if own.any():
                others = unknown[own].any(axis=0)
                block = at[0][own], at[1][others]
                self._values[block] = self._compute(rows[own], columns[others])
        values: Times = self._values[at]
        return values

    def _at(self, axis: int, numbers: Chosen) -> NDArray[np.int32]:
        """Return the places of numbers along an axis, to which new ones are added."""
        places = self._places[axis]
        new = numbers[places[numbers] < 0]
        if len(new):
            room = np.zeros((2, 2), int)
            room[axis, 1] = len(new)
            places[new] = np.arange(len(new)) + self._values.shape[axis]
            self._values = np.pad(self._values, room, constant_values=np.nan)
        at: NDArray[np.int32] = places[numbers]
        return at


class NetworkCosts:
    """Costs of a network by numbers of configurations, computed once for layers that are alike.

    Layers that share parameters have one configuration: they are one node.
    """

    def __init__(self, graph: Graph, costs: LayerCosts, of: Configurations, batch: int) -> None:
        self.graph, self.costs, self.of, self.batch = graph, costs, of, batch
        owners = [graph.owner(k) for k in range(len(graph.layers))]
        place = {k: node for node, k in enumerate(sorted({*owners}))}
        self._node_of = [place[k] for k in owners]
        edges = [e for e in moves_of(graph, of, batch) if graph.layers[e[0]].kind != "input"]
        self._edges = Counter((self._node_of[j], self._node_of[k], m) for j, k, m in edges)
        # For each node its layers that differ, what each reads, and how many there are of each.
        reads: list[list[Moves]] = [[] for _ in owners]
        for _, k, moves in edges:
            reads[k].append(moves)
        first = dict[Any, int]()
        alike = [first.setdefault(self._key(k, reads[k]), k) for k in range(len(owners))]
        self._reads = reads
        self._layers = [Counter[int]() for _ in place]
        for k, node in enumerate(self._node_of):
            self._layers[node][alike[k]] += 1
        self._learns = [any(graph.layers[k].learns for k in own) for own in self._layers]
        self._copies = of.all.prod(axis=1) // of.all[:, 1]
        copies, which = np.unique(self._copies, return_inverse=True)
        self._latency = np.array([costs.fused(one) for one in copies.tolist()])[which]
        self._known: dict[Any, Times] = {}
        self._pairs: dict[Any, Pairs] = {}

    def _key(self, k: int, reads: Sequence[Moves]) -> Any:
        """Return what the costs of a layer depend on."""
        layers, layer = self.graph.layers, self.graph.layers[k]
        work = layer.kind, layer.shape, layer.weights, layer.multiply_adds, layer.shares is None
        inputs = tuple(layers[i].size for i in layer.inputs), self.graph.deep(k), tuple(reads)
        return work, inputs, self.costs.by_name and layer.name

    def numbered(self, ways: Sequence[Sequence[Sequence[Configuration]]]) -> list[list[Chosen]]:
        """Return configurations of each layer by number, for each of some ways."""
        number = {(n, c, h, w): k for k, (n, c, h, w) in enumerate(self.of.all.tolist())}
        known = {id(one): one for way in ways for one in way}
        chosen = {k: np.unique([number[one] for one in some]) for k, some in known.items()}
        return [[chosen[id(one)] for one in way] for way in ways]

    def _table(self, node: int, chosen: Chosen) -> Times:
        """Return times of a node in some configurations, ``(len(chosen), 4)``.

        These are forward, backward, the sum of the gradients of parameters, and the least of moves.
        """
        key = tuple(self._layers[node].items())
        if key not in self._known:
            self._known[key] = np.full((len(self.of.all), 4), np.nan)
        table = self._known[key]
        new = chosen[np.isnan(table[chosen, 0])]
        if len(new):
            table[new] = sum(count * self._layer(k, new) for k, count in key)
        times: Times = table[chosen]
        return times

    def _layer(self, k: int, chosen: Chosen) -> Times:
        """Return the columns of :meth:`_table` for one layer."""
        some = self.of.all[chosen]
        passes = self.costs.compute(self.graph, k, some, self.batch)
        sums = self.costs.update(self.graph.layers[k], some)
        least = [self.costs.least_transfer(moves, self.of, chosen) for moves in self._reads[k]]
        return np.column_stack([passes, sums, sum(least, np.zeros(len(chosen)))])

    def _transfer(self, moves: Moves, a: Chosen, b: Chosen) -> Times:
        """Return times of an edge, for any two of some configurations."""
        # One beside all others would make a table of few into one of all.
        key = moves, len(a) == 1, len(b) == 1
        if key not in self._pairs:
            self._pairs[key] = Pairs(len(self.of.all), partial(self.costs.transfer, moves, self.of))
        return self._pairs[key](a, b)

    def cheapest(
        self, ways: Sequence[Sequence[Chosen]], whole: Sequence[Chosen] | None = None
    ) -> tuple[list[Configuration], float]:
        """Return the cheapest configuration of every layer among some, and their cost.

        Each way has numbers of configurations of each layer; one more, `whole`, has all others.
        """
        best: _Plan = math.inf, []
        search = self._overlapped if self.costs.machine.overlap else self._by_copies
        for way in [*ways, *([] if whole is None else [whole])]:
            best = min([best, *search(self._by_node(way), best)])
        total, numbers = best
        chosen = self.of.all[[numbers[node] for node in self._node_of]]
        return [(int(n), int(c), int(h), int(w)) for n, c, h, w in chosen], total

    def _by_node(self, way: Sequence[Chosen]) -> list[Chosen]:
        """Return the choices of each node, which all its layers have."""
        own: list[list[Chosen]] = [[] for _ in self._layers]
        for node, choice in zip(self._node_of, way, strict=True):
            if not any(choice is one for one in own[node]):
                own[node].append(choice)
        return [one[0] if len(one) == 1 else reduce(np.intersect1d, one) for one in own]

    def _overlapped(self, choices: Sequence[Chosen], best: _Plan) -> Iterator[_Plan]:
        """Yield plans in which sums of gradients overlap with the backward pass.

        A step is then the longer of two sums over layers, and no less than any of their weighted
        means. The weight with which both are equally long is found by bisection.
        """
        low, high = 0.0, 1.0
        for _ in range(_SEARCHES):
            weight = (low + high) / 2
            ways = list(self._by_copies(choices, best, (weight, 1 - weight)))
            if not ways:
                return
            yield from ways
            best, parts = min([best, *ways]), self._parts(ways[0][1])
            low, high = (weight, high) if parts["backward"] > parts["weights"] else (low, weight)

    def _by_copies(
        self, choices: Sequence[Chosen], best: _Plan, weights: _Weights = (1.0, 1.0)
    ) -> Iterator[_Plan]:
        """Yield the best plan, and those with ever fewer rounds of the sum of all gradients.

        Its latency depends on the most copies of the parameters of any layer: a plan can be better
        only with fewer of them.
        """
        while all(map(len, choices)):
            total, numbers = self._search(choices, weights, best)
            if total >= best[0]:
                return
            plan = math.fsum(self.costs.machine.hidden(self._parts(numbers)).values()), numbers
            best = min(best, plan)
            yield plan
            few = self._latency < self._latency_of(numbers)
            choices = [
                choice[few[choice]] if learns else choice
                for choice, learns in zip(choices, self._learns, strict=True)
            ]

    def _latency_of(self, numbers: Sequence[int]) -> float:
        """Return the latency of the sum of all gradients."""
        learned = [one for one, learns in zip(numbers, self._learns, strict=True) if learns]
        most = max(learned, key=lambda one: self._copies[one], default=None)
        return self.costs.fused(1) if most is None else float(self._latency[most])

    def _search(
        self, choices: Sequence[Chosen], weights: _Weights, best: _Plan
    ) -> tuple[float, list[int]]:
        """Return the least sum of equation 1 and its plan, none if it is not below the best's."""
        tables = [self._table(node, choice) for node, choice in enumerate(choices)]
        nodes = [table[:, :3] @ (1, *weights) for table in tables]
        # The least that a layer and what it reads can cost.
        least = [node + table[:, 3] for node, table in zip(nodes, tables, strict=True)]
        lowest = math.fsum(cost.min() for cost in least)
        if lowest >= best[0]:
            return math.inf, []
        if max(map(len, choices)) <= _FEW:
            return self._eliminate(choices, nodes)
        # First the cheapest of each layer, those along samples alone, and those of the best.
        masks = [np.all(self.of.all[choice, 1:] == 1, axis=1) for choice in choices]
        for mask, cost in zip(masks, nodes, strict=True):
            mask[cost.argmin()] = True
        for mask, choice, one in zip(masks, choices, best[1], strict=False):
            mask |= choice == one
        total, seed = self._eliminate(_masked(choices, masks), _masked(nodes, masks))
        # A configuration is not in the best solution if it costs more than the total leaves for its
        # layer when all others cost least.
        left = total * (1 + _ROUNDING) - lowest
        masks = _near(choices, least, seed, _CANDIDATES, left)
        choices, nodes, least = (_masked(each, masks) for each in (choices, nodes, least))
        for _ in range(_ROUNDS):
            masks = _near(choices, least, seed, _MOST, left)
            before, (total, seed) = (
                total,
                self._eliminate(_masked(choices, masks), _masked(nodes, masks)),
            )
            if total >= before * (1 - _ROUNDING):
                break
            # Then those that cost least beside what the other layers have now.
            least, left = self._beside(seed, choices, nodes), math.inf
        return total, seed

    def _beside(
        self, plan: Sequence[int], choices: Sequence[Chosen], nodes: Sequence[Times]
    ) -> list[Times]:
        """Return what each layer's configurations cost if all other layers have those of a plan."""
        chosen = [np.array([one]) for one in plan]
        costs = [node.copy() for node in nodes]
        for (j, k, moves), count in self._edges.items():
            costs[j] += count * self._transfer(moves, choices[j], chosen[k])[:, 0]
            costs[k] += count * self._transfer(moves, chosen[j], choices[k])[0]
        return costs

    def _eliminate(self, choices: Sequence[Chosen], nodes: Sequence[Times]) -> _Plan:
        """Return the least sum of equation 1 over some configurations, and its plan."""
        edges = [
            (j, k, count * self._transfer(moves, choices[j], choices[k]))
            for (j, k, moves), count in self._edges.items()
        ]
        best, total = minimise(nodes, edges)
        return total, [int(one[k]) for one, k in zip(choices, best, strict=True)]

    def times(self, numbers: Sequence[Chosen]) -> dict[str, float]:
        """Return nanoseconds of a step by part, with one configuration for each layer."""
        chosen = dict(zip(self._node_of, [int(one[0]) for one in numbers], strict=True))
        return self.costs.machine.hidden(self._parts([chosen[node] for node in sorted(chosen)]))

    def _parts(self, numbers: Sequence[int]) -> dict[str, float]:
        """Return nanoseconds by part, if none is hidden behind another."""
        chosen = [np.array([one]) for one in numbers]
        nodes = np.array([self._table(node, one)[0] for node, one in enumerate(chosen)])
        parts = {
            "forward": math.fsum(nodes[:-1, 0]),
            "backward": math.fsum(nodes[:-1, 1]),
            "weights": math.fsum(nodes[:, 2]) + self._latency_of(numbers),
            "activations": 0.0,
            "halo": 0.0,
            # The last layer is the loss; that of all samples is a sum over workers.
            "loss": nodes[-1, :2].sum() + self.costs.machine.collective("gather", self.of.workers),
        }
        for (j, k, moves), count in self._edges.items():
            alike = numbers[j] == numbers[k] and self.of.all[numbers[k], 2:].prod() > 1
            part = "halo" if alike else "activations"
            parts[part] += count * float(self._transfer(moves, chosen[j], chosen[k])[0, 0])
        return parts


def _masked(arrays: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]]) -> list[Any]:
    return [array[mask] for array, mask in zip(arrays, masks, strict=True)]


def _near(
    choices: Sequence[Chosen], costs: Sequence[Times], plan: Sequence[int], most: int, left: float
) -> list[NDArray[np.bool_]]:
    """Tell which configurations are a plan's, or among the cheapest and within what is left."""
    return [
        (_cheapest(cost, most) & (cost <= cost.min() + left)) | (choice == one)
        for choice, cost, one in zip(choices, costs, plan, strict=True)
    ]


def _cheapest(costs: Times, count: int) -> NDArray[np.bool_]:
    """Tell which costs are the least, so many of them; of equal ones the first."""
    if len(costs) <= count:
        return np.ones(len(costs), bool)
    most = np.partition(costs, count - 1)[count - 1]
    some = np.flatnonzero(costs <= most)
    mask = np.zeros(len(costs), bool)
    mask[some[costs[some].argsort(kind="stable")[:count]]] = True
    return mask


def moves_of(graph: Graph, of: Configurations, batch: int) -> list[tuple[int, int, Moves]]:
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


# Most groups of layers in a description.
_WORDS = 4


class Divided(Strategy):
    """Every layer divided between workers by a configuration; exact."""

    costs: Callable[[Machine], LayerCosts] = LayerCosts

    def _predict(self, work: Work) -> Prediction:
        graph, (_, machine, workers, batch) = with_loss(work.graph), work
        bounds = [limits(layer, batch) for layer in graph.layers]
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
        return Prediction(self.name, how, times, *most, layers=tuple(layers))

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
