"""DeePa: for every layer the configuration that makes a step of the whole network cheapest.

Every layer divides its output along samples, channels, height and width in a way of its own; where
two layers differ, data moves between workers. The time of a step is a sum over layers and edges
(DeePa, equation 1), whose least value node and edge elimination find. Batch, model, domain and
integrated parallelism are such plans, with fewer configurations to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...planning.elimination import minimise
from ..graph import MIXING, Graph, Layer
from ..machine import Machine
from .configurations import (
    MANY,
    Configuration,
    Configurations,
    Limits,
    Moves,
    allowed,
    edges_of,
    limits,
)

__all__ = ["Chosen", "LayerCosts", "NetworkCosts", "moves_of", "optimise", "with_loss"]

Times = NDArray[np.float64]
Chosen = NDArray[np.int64]

# Relative error of sums that are compared with each other.
_ROUNDING = 1e-9
# Configurations of a layer among which the best are searched: the cheapest, if there are more. If
# no layer has more than a few, all are searched at once.
_MOST, _FEW = 100, 4
# Most searches for the step in which the backward pass hides as much as can be.
_SEARCHES = 8


class LayerCosts:
    """Nanoseconds of layers and of transfers: ``compute``, ``update`` and ``xfer`` of the paper.

    Layers that differ by name alone may cost differently if `by_name` is set.
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
    graph: Graph,
    costs: LayerCosts,
    workers: int,
    batch: int,
    most: Sequence[Limits] | None = None,
) -> tuple[list[Configuration], float]:
    """Return the configuration of every layer with which a step costs least, and its cost.

    The cost is equation 1, and the latency of the sum of all gradients. A layer may use some of the
    workers; `most` are the most parts of each layer along each axis.
    """
    bounds = [limits(layer, batch) for layer in graph.layers] if most is None else most
    n, c, h, w = np.max(bounds, axis=0).tolist()
    model = NetworkCosts(graph, costs, Configurations(workers, most=(n, c, h, w)), batch)
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
        self.edges = [e for e in moves_of(graph, of, batch) if graph.layers[e[0]].kind != "input"]
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
        # Workers that have no work leave their cores to those of a configuration.
        blocks, contention = self.of.all[chosen].prod(axis=1), self.costs.machine.contention
        alone: Times = times * np.maximum(1 / contention, blocks / self.of.workers)[:, None]
        return alone

    def _once(self, key: Any, call: Callable[[], Times]) -> Times:
        """Return the result of the first call for a key."""
        if key not in self._known:
            self._known[key] = call()
        times: Times = self._known[key]
        return times

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
            ways = list(self._by_copies(choices, weight, 1 - weight))
            yield from ways
            corners = [self._both(best) for _, best in ways]
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
        if max(map(len, choices)) <= _FEW:
            best, total = self._best(choices, nodes)
            return total, best
        seed, total = min(self._seeds(choices, nodes), key=lambda way: way[1])
        # A configuration is not in the best solution if it costs more than the total leaves for its
        # layer when all others cost least.
        left = total * (1 + _ROUNDING) - lowest
        rest = [
            (cost <= cost.min() + left) & (cost.argsort(kind="stable").argsort() < _MOST)
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
        best = self._best(_masked(choices, cheap), _masked(nodes, cheap))
        yield best
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
            if math.fsum(cost.min() for cost in costs) < best[1]:
                best = min(best, self._best(_masked(choices, some), costs), key=lambda way: way[1])
                yield best

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
