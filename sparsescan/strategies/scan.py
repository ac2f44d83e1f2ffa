"""Scan: workers hold parts of the chain of layers; a scan over Jacobians gives gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import InputError
from ..formatting import quantity
from ..locks import cached_property
from ..parallel.exchange import exscan_messages
from ..parallel.forecast import CLOSE, OPEN
from ..parallel.grid import Grid, check_grid
from ..parallel.maps import Capacity, ScanTerms, vector_words
from .graph import Graph, blocks
from .machine import Machine
from .strategy import LayerPlan, Prediction, Strategy, Work, sum_words

#: Name of the strategy.
NAME = "scan"


def parts_of(network: Graph, count: int) -> list[range]:
    """Return the blocks of `count` parts of the chain with about equal entries of Jacobians.

    A recurrent network is cut between its steps only; its last part has the readout.
    """
    layers, units = network.layers, blocks(network)
    cells = [unit for unit in units if layers[unit[0]].kind == "cell"]
    done = np.cumsum([0, *(sum(layers[k].nnz for k in unit) for unit in cells or units)])
    last, bounds = len(done) - 1, [0]
    for part in range(1, count):
        # The end nearest to its share.
        wanted = int(done[-1]) * part // count
        end = int(np.searchsorted(done, wanted))
        if end > 0 and wanted - done[end - 1] < done[end] - wanted:
            end -= 1
        bounds.append(min(max(end, bounds[-1] + 1), last - count + part))
    return [range(a, b) for a, b in itertools.pairwise([*bounds, len(units)])]


def most_parts(network: Graph) -> int:
    """Return how many parts a chain can be cut into."""
    cells = sum(layer.kind == "cell" for layer in network.layers)
    return cells or len(blocks(network))


class Division:
    """Costs of a step by one grid, whose parts are numbered from the end of the chain on."""

    def __init__(self, network: Graph, machine: Machine, grid: Grid, batch: int) -> None:
        self._graph, self._machine, self._grid = network, machine, grid
        self._layers, self._batch = network.layers, batch
        # The largest group.
        self._samples = -(-batch // grid.batch)
        units = blocks(network)
        self._parts = [
            [k for unit in units[part.start : part.stop] for k in unit]
            for part in reversed(parts_of(network, grid.chain))
        ]
        self._sizes = [self._layers[part[-1]].size for part in self._parts[1:]]
        # Layers whose parameters others use, too.
        self._shared = {own for layer in self._layers if (own := layer.shares) is not None}

    def prediction(self, schedule: str) -> Prediction:
        """Predict a step in which parts are combined by vectors or products."""
        machine, network, grid = self._machine, self._machine.network, self._grid
        by_products = schedule == "products"
        working, waiting = self._products if by_products else self._vectors
        waiting += network.allreduce(grid.chain, 8 * OPEN) + network.allreduce(grid.size, 8 * CLOSE)
        reduced = [self._summed(part) for part in self._parts]
        # By products there are elements given and returned, those of the library and the operator.
        elements = 4 * self._message(self._samples) if by_products else 0
        held = [self._held(part) + elements for part in self._parts]
        forward, values, params = (
            [self._each(what, part) for part in self._parts]
            for what in ("forward", "values", "params")
        )
        nbytes = [self._samples * size * machine.itemsize for size in self._sizes]
        times = {
            # One part after the other, in each group; Jacobians of all parts at once.
            "forward": sum(forward),
            "activations": sum(map(network.message, nbytes)),
            "Jacobians": max(values),
            "scan": working + waiting,
            "parameters": max(params),
            "weights": max(map(self._summing, reduced)),
            "loss": machine.collective("gather", grid.size),
        }
        parts, groups = quantity(grid.chain, "part"), quantity(grid.batch, "group")
        how = f"{parts} × {groups} of samples, by {schedule}"
        sent = max(self._sent(rank, by_products, reduced) for rank in range(grid.size))
        plans = tuple(self._plans())
        return Prediction(NAME, how, machine.hidden(times), sent, max(held), layers=plans)

    def _plans(self) -> Iterator[LayerPlan]:
        """Yield what workers have of each layer, from the first on; parts alone send."""
        grid, machine = self._grid, self._machine
        one = (grid.batch, 1, 1, 1)
        for position, part in reversed(list(enumerate(self._parts))):
            for k in part:
                layer, leaves = self._layers[k], k == part[-1] and position > 0
                sent = self._samples * layer.size * machine.itemsize * leaves
                devices = range(position, grid.size, grid.chain)
                yield LayerPlan(layer.name, one, devices, sent, self._held([k]))

    def _each(self, part: str, layers: Sequence[int]) -> float:
        """Return nanoseconds of some layers; those that share parameters are one call."""
        graph, machine, samples = self._graph, self._machine, self._samples
        if part == "params":
            layers = [k for k in layers if self._layers[k].learns]
        # A forward pass has the overhead in every step.
        calls = machine.overhead * len(set(map(graph.owner, layers))) * (part != "forward")
        return calls + math.fsum(machine.part(part, graph, k, samples) for k in layers)

    def _summing(self, sums: Sequence[tuple[int, int]]) -> float:
        """Return nanoseconds of sums of parameter gradients."""
        machine, (groups, mine), (size, everywhere) = self._machine, *sums
        # Ranks of a part are as far apart as there are parts.
        near = machine.node // self._grid.chain
        return machine.all_reduce([(groups, near, mine), (size, machine.node, everywhere)])

    @cached_property
    def _sweeps(self) -> list[float]:
        """Nanoseconds in which each worker sweeps one gradient through its part."""
        return [
            self._machine.overhead
            + sum(self._machine.columns(self._graph, k, self._samples) for k in part)
            for part in self._parts
        ]

    @cached_property
    def _vectors(self) -> tuple[float, float]:
        """Nanoseconds of work and of messages, every part after the one before."""
        message = self._machine.network.message
        terms = self._terms(self._samples)
        waiting = sum(message(8 * vector_words(n, terms)) for n in self._sizes)
        return sum(self._sweeps), waiting

    @cached_property
    def _products(self) -> tuple[float, float]:
        """Nanoseconds of work and of messages: all parts are multiplied at once, then combined."""
        machine, network, count = self._machine, self._machine.network, self._grid.chain
        inner, reducing = self._parts[1:-1], []
        for part in inner:
            sizes = self._samples, self._layers[part[-1]].size
            taken = sum(machine.columns(self._graph, k, *sizes) for k in part)
            reducing.append(machine.overhead + taken)
        rounds = (count - 1).bit_length()
        size = max(self._sizes)
        # With three parts, only gradients are combined.
        columns = size if count > 3 else 1
        entries = self._samples * (size * size + 2 * size * columns if inner else 0)
        merging = max(
            self._samples * size * size * columns * bool(inner) / machine.multiply_adds,
            machine.itemsize * entries / machine.bandwidth,
        )
        work = max([self._sweeps[0], *reducing]) + rounds * (network.call + merging)
        work += max(self._sweeps[1:])
        return work, rounds * network.round(self._message(self._samples))

    def _terms(self, samples: int) -> ScanTerms:
        return ScanTerms(np.dtype(f"f{self._machine.itemsize}"), samples, True, False)

    def _message(self, samples: int) -> int:
        """Count the bytes of an element of the exclusive scan."""
        size = max(self._sizes)
        inner = len(self._parts) > 2
        return 8 * Capacity(size, size * inner, size * size * inner).words(self._terms(samples))

    def _summed(self, part: Sequence[int]) -> list[tuple[int, int]]:
        """Return ranks and numbers of each sum of gradients of the parameters of a part."""
        layers, grid, shared = self._layers, self._grid, self._shared
        mine = sum(layers[k].weights for k in part if k not in shared)
        everywhere = sum(layers[k].weights for k in shared)
        return [(grid.batch, mine), (grid.size, everywhere)]

    def _held(self, part: Sequence[int]) -> int:
        """Count bytes of Jacobians and their indices, activations, parameters, and gradients."""
        layers = [self._layers[k] for k in part]
        values = sum(int(layer.values(self._samples)) for layer in layers)
        entering = self._layers[part[0] - 1].size
        outputs = self._samples * (entering + sum(layer.size for layer in layers))
        weights = sum(count for _, count in self._summed(part))
        # Layers that share parameters share the pattern, too.
        indices = sum(layer.index_bytes for layer in layers if layer.shares is None)
        return self._machine.needed(weights, outputs, values) + indices

    def _sent(self, rank: int, by_products: bool, reduced: list[list[tuple[int, int]]]) -> int:
        """Count the bytes of data that a rank sends in a step, without small agreements."""
        grid, machine = self._grid, self._machine
        mine = grid.samples(rank, self._batch)
        samples = mine.stop - mine.start
        position, last = grid.position(rank), grid.chain - 1
        total = 0
        if position > 0:
            total += samples * self._sizes[position - 1] * machine.itemsize
        if by_products:
            total += exscan_messages("doubling", grid.chain, position) * self._message(samples)
        elif position < last:
            total += 8 * vector_words(self._sizes[position], self._terms(samples))
        (groups, own), (size, everywhere) = reduced[position]
        words = sum_words(own, grid.group(rank), groups) + sum_words(everywhere, rank, size)
        return total + machine.itemsize * int(words)


class Scan(Strategy):
    """Workers hold the parts of a chain, and scan its Jacobians; gradients are exact.

    The forward pass goes from part to part. Then all workers write the Jacobians of their parts at
    the same time, the scan gives every part its gradients, and all workers compute their gradients
    of parameters. With fewer parts than workers, groups of workers share the samples.

    Parameters
    ----------
    grid : tuple of int, optional
        Parts of the chain, and groups of samples. The default is the grid with the least predicted
        time and at least two parts, since one part is batch parallelism.
    schedule : {"vectors", "products"}, optional
        How parts are combined, see :func:`sparsescan.parallel.plan`; by default the way with the
        shorter predicted time.

    Notes
    -----
    BPPSA (Wang, Bai and Pekhimenko, MLSys 2020): with `n` layers and `p` workers
    ``Θ(n/p + log p)`` steps by products (equation 6), and ``Θ(max(n/p, 1))`` Jacobians a worker
    (section 3.6). Predictions assume that products of Jacobians are dense, and that MPI's exclusive
    scans are logarithmic. One call sweeps a part, whatever its number of steps.
    """

    name = NAME

    def __init__(self, grid: tuple[int, int] | None = None, schedule: str | None = None) -> None:
        self.grid = None if grid is None else Grid(*grid)
        if schedule not in (None, "vectors", "products"):
            raise InputError(f"schedule is {schedule!r}; expected 'vectors' or 'products'")
        self.schedule = schedule

    def _predict(self, work: Work) -> Prediction:
        """Return the best grid; if none fits, the one that needs least memory."""
        network, machine, workers, batch = work
        most, ways = most_parts(network), []
        chains = [n for n in range(min(workers, 2), workers + 1) if workers % n == 0]
        grids = [Grid(n, workers // n) for n in chains]
        for grid in grids if self.grid is None else [check_grid(self.grid, workers)]:
            if grid.chain > most or grid.batch > batch:
                continue
            division = Division(network, machine, grid, batch)
            for schedule in ("vectors", "products"):
                wanted = self.schedule in (None, schedule)
                if wanted and (schedule == "vectors" or grid.chain > 1):
                    ways.append(division.prediction(schedule))
        if not ways:
            raise InputError(
                f"workers is {workers}: {network.name} can be cut into {quantity(most, 'part')} at "
                f"most, and {quantity(batch, 'sample')} into {quantity(batch, 'group')}"
            )
        fitting = [one for one in ways if one.memory <= machine.memory]
        if not fitting:
            return min(ways, key=lambda one: one.memory)
        return min(fitting, key=lambda one: one.total)
