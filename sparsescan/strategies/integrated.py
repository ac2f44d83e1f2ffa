"""Integrated model, batch and domain parallelism (Gholami et al., SPAA 2018)."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from ..errors import InputError
from ..symbolic.schedule import check_count
from .equations import Volume, all_gather, all_reduce, halo
from .graph import MIXING, Graph
from .integrated_run import IntegratedTraining, whole_layers
from .machine import Machine
from .recurrent import Trainable, graph_of
from .sharding import STATES, Sharding, live, units
from .strategy import Prediction, Strategy, Training

__all__ = ["BatchParallel", "DomainParallel", "GridCosts", "Integrated", "ModelParallel", "Rules"]

_STATES = {"batch": "samples", "model": "channels", "domain": "rows"}
_PARTS = ("forward", "backward", "activations", "weights", "halo", "loss")
_ROWWISE = ("conv", "pool", "norm", "elementwise", "add", "concat")


class Rules(NamedTuple):
    """States that layers may have.

    Attributes
    ----------
    allowed : collection of str
        States that may be chosen, some of :data:`~.sharding.STATES`.
    together : collection of int
        Layers that are whole, or shared by samples only.
    rows_first : bool
        Whether no layer that can be shared by rows is shared by samples.
    """

    allowed: Collection[str]
    together: Collection[int] = ()
    rows_first: bool = False


class Integrated(Strategy):
    """The best ``P_r × P_c`` grid, with every layer by batch, by model or by domain.

    A column of ``P_r`` workers shares ``B/P_c`` samples. In a layer by model each worker has some
    output channels, and ``1/P_r`` of the weights; by domain some rows of the images, and all
    weights; by batch some of the samples. Dynamic programming over layers finds the fastest choice
    for every grid. Between layers that are shared differently equation 6 is paid, which the paper's
    equation 9 leaves out.

    Parameters
    ----------
    grid : tuple of two ints, optional
        ``(P_r, P_c)``; by default the best.
    modes : collection of {"batch", "model", "domain"}
        Ways to share a layer that may be chosen.
    machine : Machine
        The machine for which :meth:`start` chooses.

    Raises
    ------
    InputError
        If an argument is wrong.

    Examples
    --------
    >>> from sparsescan.strategies import Graph, Layer, Machine
    >>> from sparsescan.strategies.integrated import Integrated
    >>> graph = Graph("wide", [
    ...     Layer("x", "input", (), (4096,)),
    ...     Layer("fc", "linear", (0,), (4096,), 4096**2, 4096**2, 4096**2),
    ... ])
    >>> Integrated().predict(graph, Machine(), 16, 64).how
    '16 × 1, model in fc'
    """

    name = "integrated"
    _together: Collection[int] = ()
    _rows_first = False

    def __init__(
        self,
        grid: tuple[int, int] | None = None,
        modes: Collection[str] = ("batch", "model", "domain"),
        machine: Machine | None = None,
    ) -> None:
        if not modes or not set(modes) <= set(_STATES):
            raise InputError(f"modes is {modes!r}; expected some of {tuple(_STATES)}")
        if grid is not None:
            grid = check_count("grid[0]", grid[0], 1), check_count("grid[1]", grid[1], 1)
        self.grid, self.modes = grid, tuple(modes)
        self.machine = Machine() if machine is None else machine

    def predict(self, network: Graph, machine: Machine, workers: int, batch: int) -> Prediction:
        """Predict a step by the fastest sharding."""
        sharding, costs = self.choose(network, machine, workers, batch)
        times = costs.times(sharding.states)
        if any(layer.kind == "concat" for layer in network.layers):
            # An estimate: shares of the channels of layers that are joined are no shares of the
            # whole, which would have to be redistributed.
            sent = math.ceil(costs.words(sharding.states) * machine.itemsize)
        else:
            sent = int(sharding.sent(network, batch, machine.itemsize).max())
        how = sharding.describe(network)
        return Prediction(self.name, how, times, sent, costs.memory(sharding.states))

    def start(
        self, comm: Any, network: Trainable, batch: int, *, learning_rate: float = 0.1
    ) -> Training:
        """Train a network over ranks, by the sharding that is best for :attr:`machine`."""
        graph = graph_of(network)
        sharding, _ = self.of(network).choose(graph, self.machine, comm.size, batch)
        return IntegratedTraining(comm, network, graph, sharding, batch, learning_rate)

    def of(self, network: Trainable) -> Integrated:
        """Return this strategy for the operators of a network.

        Some of them can be shared by samples only, which a graph does not always tell; so
        :meth:`predict` then predicts the step that :meth:`start` runs.
        """
        strategy = copy.copy(self)
        strategy._together = whole_layers(network, graph_of(network))
        return strategy

    def choose(
        self, graph: Graph, machine: Machine, workers: int, batch: int
    ) -> tuple[Sharding, GridCosts]:
        """Return the fastest sharding, and the costs on its grid.

        Raises
        ------
        InputError
            If there is none.
        """
        workers = check_count("workers", workers, 1)
        batch = check_count("batch", batch, 1)
        best: tuple[float, Sharding, GridCosts] | None = None
        reasons: list[str] = []
        for rows, columns in self._grids(workers):
            if columns > batch:
                reasons.append(
                    f"a batch of {batch} cannot be shared by {columns} columns of workers"
                )
                continue
            # With one row there is nothing but batch parallelism.
            allowed = {_STATES[mode] for mode in self.modes if rows > 1} | {"whole"}
            rules = Rules(allowed, self._together, self._rows_first)
            costs = GridCosts(graph, machine, (rows, columns), batch, rules)
            total, states = costs.best()
            if math.isinf(total):
                reasons.append(costs.reason)
            elif best is None or total < best[0]:
                best = total, Sharding(rows, columns, states), costs
        if best is None:
            raise InputError(
                f"{self.name} cannot use {workers} workers for {graph.name!r}: {reasons[-1]}"
            )
        return best[1:]

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        if self.grid is None:
            return [(r, workers // r) for r in range(1, workers + 1) if workers % r == 0]
        if math.prod(self.grid) != workers:
            raise InputError(
                f"grid is {self.grid[0]} × {self.grid[1]}; expected {workers} workers in all"
            )
        return [self.grid]


class BatchParallel(Integrated):
    """Every worker has all weights and some of the samples: equation 4."""

    name = "batch"

    def __init__(self) -> None:
        super().__init__(modes=("batch",))

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        return [(1, workers)]


class ModelParallel(Integrated):
    """Every worker has all samples and some of the output channels of every layer: equation 3."""

    name = "model"

    def __init__(self, machine: Machine | None = None) -> None:
        super().__init__(modes=("model",), machine=machine)

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        return [(workers, 1)]


class DomainParallel(Integrated):
    """Every worker has all weights and some rows of the images of all samples: equation 7.

    Layers without images, or with fewer rows than there are workers, are by batch.
    """

    name = "domain"
    _rows_first = True

    def __init__(self, machine: Machine | None = None) -> None:
        super().__init__(modes=("domain", "batch"), machine=machine)

    def _grids(self, workers: int) -> list[tuple[int, int]]:
        return [(workers, 1)]

    def choose(
        self, graph: Graph, machine: Machine, workers: int, batch: int
    ) -> tuple[Sharding, GridCosts]:
        """Return the fastest sharding, if there are images of so many rows, and its costs."""
        sharding, costs = super().choose(graph, machine, workers, batch)
        if workers > 1 and "rows" not in sharding.states:
            raise InputError(
                f"domain cannot use {workers} workers for {graph.name!r}: no layer has images of "
                "so many rows"
            )
        return sharding, costs


class GridCosts:
    """Time, words and memory of every layer on one grid, in each state, and between states.

    Layers are taken in their order, and all activations that are read later are in one state; where
    that changes, all of them are redistributed; for a chain this is no restriction. An activation
    that several layers read by model is gathered once, for the first that multiplies it by weights.
    Cells share parameters, so they are in one state.

    Parameters
    ----------
    graph : Graph
        The network.
    machine : Machine
        A worker.
    grid : tuple of two ints
        ``P_r`` and ``P_c``.
    batch : int
        Samples.
    rules : Rules
        States that layers may have.
    """

    def __init__(
        self, graph: Graph, machine: Machine, grid: tuple[int, int], batch: int, rules: Rules
    ) -> None:
        self._graph, self._machine, self._batch, self._rules = graph, machine, batch, rules
        self._rows, self._columns = grid
        self._samples = batch / self._columns
        self._trained, self._units = graph.trained, units(graph)
        # For each layer, the first one that multiplies its output by weights.
        self._first = [0] * len(graph.layers)
        for k, layer in enumerate(graph.layers):
            for i in layer.inputs:
                if layer.kind in MIXING and not self._first[i]:
                    self._first[i] = k
        # For each layer, the first of those just before it that cost the same in every state.
        count = len(graph.layers)
        self._alike = graph.alike if graph.is_chain else tuple(range(count))
        self._live = live(graph)
        #: Why there is no way, where :meth:`best` returns an infinite time.
        self.reason = ""

    def best(self) -> tuple[float, tuple[str, ...]]:
        """Return the least time, infinite if there is no way, and the state of every layer."""
        cells = any(layer.kind == "cell" for layer in self._graph.layers)
        ways = [self._best(state) for state in (STATES if cells else STATES[:1])]
        return min(ways, key=lambda way: way[0])

    def _best(self, cells: str) -> tuple[float, tuple[str, ...]]:
        """Return the best with all cells in one state."""
        totals: dict[str, float] = {"whole": 0.0}
        # For each layer, the state before it by its own.
        paths: list[dict[str, str]] = []
        for k, layer in enumerate(self._graph.layers[1:], 1):
            if self._alike[k] == k:
                steps = self._steps(k, cells)
            reached: dict[str, float] = {}
            path: dict[str, str] = {}
            for state, (own, moved) in steps.items():
                total, before = min(
                    (total + moved[before], before) for before, total in totals.items()
                )
                reached[state], path[state] = total + own, before
            if not reached:
                self.reason = (
                    f"{layer.name} of shape {layer.shape} cannot be shared by {self._rows} rows "
                    f"of workers, with a batch of {self._batch} in {self._columns} columns"
                )
                return math.inf, ()
            totals = reached
            paths.append(path)
        ends = {state: total + self._time(self._end(state)) for state, total in totals.items()}
        state = min(ends, key=lambda state: ends[state])
        states = [state]
        for path in reversed(paths):
            states.append(path[states[-1]])
        return ends[state], tuple(reversed(states))

    def _steps(self, k: int, cells: str) -> dict[str, tuple[float, dict[str, float]]]:
        """Return the time of layer `k` in each state, and that of moves from each state before."""
        steps = {}
        for state in STATES if self._graph.layers[k].kind != "cell" else (cells,):
            if self.possible(k, state):
                own = sum(self._time(v) for v in self._layer(k, state).values())
                own += sum(self._compute(k, state))
                moved = {before: self._time(self._moved(k, before, state)) for before in STATES}
                steps[state] = own, moved
        return steps

    def times(self, states: tuple[str, ...]) -> dict[str, float]:
        """Return nanoseconds by part."""
        times = dict.fromkeys(_PARTS, 0.0)
        for (k, _, state), count in self._counts(states).items():
            forward, backward = self._compute(k, state)
            times["forward"] += count * forward
            times["backward"] += count * backward
        for part, volume in self.volumes(states).items():
            times[part] += self._time(volume)
        samples = self._samples / self._rows if states[-1] == "samples" else self._samples
        times["loss"] += self._machine.loss(samples)
        return times

    def words(self, states: tuple[str, ...]) -> float:
        """Count the numbers that a worker sends."""
        return sum(volume.words for volume in self.volumes(states).values())

    def memory(self, states: tuple[str, ...]) -> int:
        """Count bytes of a worker: weights, gradients, activations, also those gathered."""
        numbers = 0.0
        for k, (layer, state) in enumerate(zip(self._graph.layers, states, strict=True)):
            mine = state == "channels" and layer.kind in MIXING
            numbers += 2 * layer.weights / (self._rows if mine else 1)
            share = 1 if state == "whole" and k > 0 else self._rows
            numbers += self._samples * layer.size / share
            if mine:
                numbers += sum(self._samples * self._graph.layers[i].size for i in layer.inputs)
        return math.ceil(numbers) * self._machine.itemsize

    def volumes(self, states: tuple[str, ...]) -> dict[str, Volume]:
        """Return the volume that a worker sends, by part."""
        volumes = {part: Volume() for part in _PARTS[2:]}
        for (k, before, state), count in self._counts(states).items():
            for part, volume in self._layer(k, state).items():
                volumes[part] += volume * count
            volumes["activations"] += self._moved(k, before, state) * count
        volumes["activations"] += self._end(states[-1])
        volumes["loss"] = all_reduce(self._rows * self._columns, 1)
        return volumes

    def _counts(self, states: tuple[str, ...]) -> Counter[tuple[int, str, str]]:
        """Count layers that are alike, and in the same state behind the same state."""
        return Counter(zip(self._alike[1:], states[:-1], states[1:], strict=True))

    def _time(self, volume: Volume) -> float:
        return volume.time(self._machine.network, self._machine.itemsize)

    def _gather(self, k: int) -> Volume:
        """Return the volume of equation 6 for the output of layer `k`."""
        return all_gather(self._rows, self._samples * self._graph.layers[k].size)

    def possible(self, k: int, state: str) -> bool:
        """Tell whether a layer can be in a state, with a part for each worker."""
        layer = self._graph.layers[k]
        if state not in self._rules.allowed:
            return False
        if state == "samples":
            enough = self._batch >= self._rows * self._columns
            return enough and not (self._rules.rows_first and self.possible(k, "rows"))
        if state == "whole":
            # With weights it would be computed as often as there are rows.
            return layer.kind not in MIXING or self._rows == 1
        if k in self._rules.together:
            return False
        if state == "channels":
            kept = layer.kind in (*MIXING, *_ROWWISE, "flatten") and layer.kind != "norm"
            # The Jacobian of a cell whose state is more than its hidden units is not dense.
            dense = layer.kind != "cell" or layer.nnz == layer.size**2
            return kept and dense and self._units[k] >= self._rows
        read = [self._graph.layers[i] for i in layer.inputs]
        if layer.kind == "norm" and (layer.nnz, layer.shape) != (layer.size, read[0].shape):
            # It mixes the elements of a sample.
            return False
        shapes = [layer.shape, *(self._graph.layers[i].shape for i in self._live[k])]
        return layer.kind in _ROWWISE and all(
            len(shape) == 3 and shape[1] >= self._rows for shape in shapes
        )

    def _compute(self, k: int, state: str) -> tuple[float, float]:
        """Return nanoseconds forward and backward."""
        samples, share = self._samples / self._rows, 1.0
        if state == "whole":
            samples = self._samples
        elif state == "channels" and self._graph.layers[k].kind in MIXING:
            samples, share = self._samples, 1 / self._rows
        machine, graph = self._machine, self._graph
        # Every layer is a chain of its own.
        chain = machine.chain(graph, k, share)
        return (
            machine.forward(graph, k, samples, share),
            chain + machine.backward(graph, k, samples, share) + machine.update(graph, k, share),
        )

    def _layer(self, k: int, state: str) -> dict[str, Volume]:
        """Return the terms of equation 9 for weights and halos."""
        layer, volumes = self._graph.layers[k], {}
        if layer.weights and state in ("samples", "rows"):
            volumes["weights"] = all_reduce(self._rows * self._columns, layer.weights)
        elif layer.weights:
            share = self._rows if state == "channels" else 1
            volumes["weights"] = all_reduce(self._columns, layer.weights / share)
        windowed = layer.kind == "conv" or layer.kernel[0] > layer.stride[0]
        if state == "rows" and self._rows > 1 and layer.kind in ("conv", "pool") and windowed:
            channels, _, width = self._graph.input_shape(k)
            volume = halo(channels * width, layer.kernel[0], self._samples)
            if self._trained[layer.inputs[0]]:
                row = layer.shape[0] * layer.shape[2]
                volume += halo(row, layer.kernel[1], self._samples)
            volumes["halo"] = volume
        return volumes

    def _moved(self, k: int, before: str, state: str) -> Volume:
        """Return the volume of all-gathers and all-reduces before layer `k`."""
        volume, layer = Volume(), self._graph.layers[k]
        by_model = state == "channels" and layer.kind in MIXING
        if before == state and not by_model:
            return volume
        for i in self._live[k]:
            if by_model and i in layer.inputs:
                if before != state or self._first[i] == k:
                    volume += self._converted(i, before, "whole")
                    # The sum of gradients, those from later layers included.
                    volume += self._gather(i) * (2 * self._trained[i])
            elif before != state:
                volume += self._converted(i, before, state)
        return volume

    def _converted(self, k: int, before: str, state: str) -> Volume:
        """Return the volume of a gather where it is not whole, and of its gradient's."""
        volume = Volume()
        if before == state:
            return volume
        if before != "whole":
            volume += self._gather(k)
        if state != "whole" and self._trained[k]:
            volume += self._gather(k)
        return volume

    def _end(self, state: str) -> Volume:
        """Return the volume of the last gather, since the loss needs whole samples."""
        whole = state in ("whole", "samples")
        return Volume() if whole else self._gather(len(self._graph.layers) - 1)
