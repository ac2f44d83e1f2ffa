"""Integrated model, batch and domain parallelism (Gholami et al., SPAA 2018)."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection
from typing import Any

from ...errors import InputError
from ...schedule import check_count
from .equations import MIXING, Volume, all_gather, all_reduce, halo
from .graph import Graph
from .integrated_run import IntegratedTraining, whole_layers
from .layout import STATES, Layout, live, units
from .machine import Machine
from .recurrent import Network, graph_of
from .strategy import Prediction, Strategy, Training

__all__ = ["BatchParallel", "DomainParallel", "Integrated", "ModelParallel"]

_STATES = {"batch": "samples", "model": "channels", "domain": "rows"}
_PARTS = ("forward", "backward", "activations", "weights", "halo", "loss")
_ROWWISE = ("conv", "pool", "norm", "elementwise", "add", "concat")


class Integrated(Strategy):
    """The best ``P_r × P_c`` grid, with every layer by batch, by model or by domain.

    A column of ``P_r`` workers shares ``B/P_c`` samples. In a layer by model each worker has some
    output channels, and ``1/P_r`` of the weights; by domain some rows of the images, and all
    weights; by batch some of the samples. Of every grid, and of the ways to choose for each layer,
    the fastest is found by dynamic programming over layers. Between layers that are shared
    differently equation 6 is paid, which the paper's equation 9 leaves out.

    Parameters
    ----------
    grid : tuple of two ints, optional
        ``(P_r, P_c)``; by default the best.
    modes : collection of {"batch", "model", "domain"}
        What layers may be.
    machine : Machine
        For which :meth:`start` chooses.

    Raises
    ------
    InputError
        If an argument is wrong.

    Examples
    --------
    >>> from sparsescan.parallel.strategies import Graph, Layer, Machine
    >>> from sparsescan.parallel.strategies.integrated import Integrated
    >>> graph = Graph("wide", [
    ...     Layer("x", "input", (), (4096,)),
    ...     Layer("fc", "linear", (0,), (4096,), 4096**2, 4096**2, 4096**2),
    ... ])
    >>> Integrated().predict(graph, Machine(), 16, 64).how
    '16 × 1, model in fc'
    """

    name = "integrated"
    _together: Collection[int] = ()
    # Whether what can be by domain is not by batch.
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
        """What a step takes in the fastest layout."""
        layout, costs = self.choose(network, machine, workers, batch)
        times = costs.times(layout.states)
        if any(layer.kind == "concat" for layer in network.layers):
            # Shares of channels of what is joined are no shares of the whole, which would have to
            # be redistributed: an estimate.
            sent = math.ceil(costs.words(layout.states) * machine.itemsize)
        else:
            sent = int(layout.sent(network, batch, machine.itemsize).max())
        how = layout.describe(network)
        return Prediction(self.name, how, times, sent, costs.memory(layout.states))

    def start(
        self, comm: Any, network: Network, batch: int, *, learning_rate: float = 0.1
    ) -> Training:
        """Train a network over ranks, in the layout that is best for :attr:`machine`."""
        graph = graph_of(network)
        layout, _ = self.of(network).choose(graph, self.machine, comm.size, batch)
        return IntegratedTraining(comm, network, graph, layout, batch, learning_rate)

    def of(self, network: Network) -> Integrated:
        """The same for the operators of a network, some of which only samples can be shared of.

        A graph does not tell all of them: :meth:`predict` then predicts what :meth:`start` runs,
        which knows them anyway.
        """
        made = copy.copy(self)
        made._together = whole_layers(network, graph_of(network))
        return made

    def choose(
        self, graph: Graph, machine: Machine, workers: int, batch: int
    ) -> tuple[Layout, Costs]:
        """The fastest layout, and its costs.

        Raises
        ------
        InputError
            If there is none.
        """
        workers = check_count("workers", workers, 1)
        batch = check_count("batch", batch, 1)
        best: tuple[float, Layout, Costs] | None = None
        reasons: list[str] = []
        for rows, columns in self._grids(workers):
            if columns > batch:
                reasons.append(
                    f"a batch of {batch} cannot be shared by {columns} columns of workers"
                )
                continue
            # With one row there is nothing but batch parallelism.
            allowed = {_STATES[mode] for mode in self.modes if rows > 1} | {"whole"}
            costs = Costs(
                graph,
                machine,
                (rows, columns),
                batch,
                allowed,
                self._together,
                self._rows_first,
            )
            total, states = costs.best()
            if math.isinf(total):
                reasons.append(costs.reason)
            elif best is None or total < best[0]:
                best = total, Layout(rows, columns, states), costs
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
    ) -> tuple[Layout, Costs]:
        """The layout and its costs; if there are images of so many rows."""
        layout, costs = super().choose(graph, machine, workers, batch)
        if workers > 1 and "rows" not in layout.states:
            raise InputError(
                f"domain cannot use {workers} workers for {graph.name!r}: no layer has images of "
                "so many rows"
            )
        return layout, costs


class Costs:
    """What every layer costs on one grid, in each state, and between them.

    Layers are taken in their order, and all that is read later is in one state; where that changes,
    all of it is redistributed; for a chain this is no restriction. What several layers read by
    model is gathered once, which is taken to be for the first that multiplies it by weights. Cells
    share parameters, so they are in one state.

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
    allowed : collection of str
        States that may be chosen.
    together : collection of int
        Layers that are whole or shared by samples only.
    rows_first : bool
        Whether what can be shared by rows is not by samples.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        grid: tuple[int, int],
        batch: int,
        allowed: Collection[str],
        together: Collection[int],
        rows_first: bool = False,
    ) -> None:
        self._graph, self._machine, self._batch = graph, machine, batch
        self._rows, self._columns = grid
        self._samples = batch / self._columns
        self._allowed, self._together, self._rows_first = allowed, together, rows_first
        self._trained, self._units = graph.trained, units(graph)
        # Who is the first to multiply each layer by weights.
        self._first = [0] * len(graph.layers)
        for k, layer in enumerate(graph.layers):
            for i in layer.inputs:
                if layer.kind in MIXING and not self._first[i]:
                    self._first[i] = k
        # Of each layer, the first of those just before it that cost the same in every state.
        count = len(graph.layers)
        self._alike = graph.alike if graph.is_chain else tuple(range(count))
        self._live = live(graph)
        #: Why :meth:`best` has found nothing.
        self.reason = ""

    def best(self) -> tuple[float, tuple[str, ...]]:
        """The least time, infinite if there is no way, and the state of every layer."""
        cells = any(layer.kind == "cell" for layer in self._graph.layers)
        ways = [self._best(state) for state in (STATES if cells else STATES[:1])]
        return min(ways, key=lambda way: way[0])

    def _best(self, cells: str) -> tuple[float, tuple[str, ...]]:
        """The same with all cells in one state."""
        totals: dict[str, float] = {"whole": 0.0}
        # For each layer, from its state the one before.
        paths: list[dict[str, str]] = []
        for k, layer in enumerate(self._graph.layers[1:], 1):
            if self._alike[k] == k:
                steps = self._steps(k, cells)
            found: dict[str, float] = {}
            path: dict[str, str] = {}
            for state, (own, moved) in steps.items():
                total, before = min(
                    (total + moved[before], before) for before, total in totals.items()
                )
                found[state], path[state] = total + own, before
            if not found:
                self.reason = (
                    f"{layer.name} of shape {layer.shape} cannot be shared by {self._rows} rows "
                    f"of workers, with a batch of {self._batch} in {self._columns} columns"
                )
                return math.inf, ()
            totals = found
            paths.append(path)
        ends = {state: total + self._time(self._end(state)) for state, total in totals.items()}
        state = min(ends, key=lambda state: ends[state])
        states = [state]
        for path in reversed(paths):
            states.append(path[states[-1]])
        return ends[state], tuple(reversed(states))

    def _steps(self, k: int, cells: str) -> dict[str, tuple[float, dict[str, float]]]:
        """In each state that layer `k` may have, what it takes, and what moves from each before."""
        found = {}
        for state in STATES if self._graph.layers[k].kind != "cell" else (cells,):
            if self._possible(k, state):
                own = sum(self._time(v) for v in self._layer(k, state).values())
                own += sum(self._compute(k, state))
                moved = {before: self._time(self._moved(k, before, state)) for before in STATES}
                found[state] = own, moved
        return found

    def times(self, states: tuple[str, ...]) -> dict[str, float]:
        """Nanoseconds by part."""
        found = dict.fromkeys(_PARTS, 0.0)
        for (k, _, state), count in self._counts(states).items():
            forward, backward = self._compute(k, state)
            found["forward"] += count * forward
            found["backward"] += count * backward
        for part, volume in self._volumes(states).items():
            found[part] += self._time(volume)
        samples = self._samples / self._rows if states[-1] == "samples" else self._samples
        found["loss"] += self._machine.loss(samples)
        return found

    def words(self, states: tuple[str, ...]) -> float:
        """Numbers that a worker sends."""
        return sum(volume.words for volume in self._volumes(states).values())

    def memory(self, states: tuple[str, ...]) -> int:
        """Bytes of a worker: weights and their gradients, activations, what is gathered."""
        numbers = 0.0
        for k, (layer, state) in enumerate(zip(self._graph.layers, states, strict=True)):
            mine = state == "channels" and layer.kind in MIXING
            numbers += 2 * layer.weights / (self._rows if mine else 1)
            share = 1 if state == "whole" and k > 0 else self._rows
            numbers += self._samples * layer.size / share
            if mine:
                numbers += sum(self._samples * self._graph.layers[i].size for i in layer.inputs)
        return math.ceil(numbers) * self._machine.itemsize

    def _volumes(self, states: tuple[str, ...]) -> dict[str, Volume]:
        found = {part: Volume() for part in _PARTS[2:]}
        for (k, before, state), count in self._counts(states).items():
            for part, volume in self._layer(k, state).items():
                found[part] += volume * count
            found["activations"] += self._moved(k, before, state) * count
        found["activations"] += self._end(states[-1])
        found["loss"] = all_reduce(self._rows * self._columns, 1)
        return found

    def _counts(self, states: tuple[str, ...]) -> Counter[tuple[int, str, str]]:
        """How many layers are like one, and in a state, as is what comes before them."""
        return Counter(zip(self._alike[1:], states[:-1], states[1:], strict=True))

    def _time(self, volume: Volume) -> float:
        return volume.time(self._machine.network, self._machine.itemsize)

    def _gather(self, k: int) -> Volume:
        """Equation 6."""
        return all_gather(self._rows, self._samples * self._graph.layers[k].size)

    def _possible(self, k: int, state: str) -> bool:
        """Whether a layer can be in a state, each worker with something of it."""
        layer = self._graph.layers[k]
        if state not in self._allowed:
            return False
        if state == "samples":
            enough = self._batch >= self._rows * self._columns
            return enough and not (self._rows_first and self._possible(k, "rows"))
        if state == "whole":
            # With weights it would be computed as often as there are rows.
            return layer.kind not in MIXING or self._rows == 1
        if k in self._together:
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
        """Nanoseconds forward and backward."""
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
        """Weights and halo: the terms of equation 9 but those of activations."""
        layer, found = self._graph.layers[k], {}
        if layer.weights and state in ("samples", "rows"):
            found["weights"] = all_reduce(self._rows * self._columns, layer.weights)
        elif layer.weights:
            share = self._rows if state == "channels" else 1
            found["weights"] = all_reduce(self._columns, layer.weights / share)
        windowed = layer.kind == "conv" or layer.kernel[0] > layer.stride[0]
        if state == "rows" and self._rows > 1 and layer.kind in ("conv", "pool") and windowed:
            channels, _, width = self._graph.input_shape(k)
            volume = halo(channels * width, layer.kernel[0], self._samples)
            if self._trained[layer.inputs[0]]:
                row = layer.shape[0] * layer.shape[2]
                volume += halo(row, layer.kernel[1], self._samples)
            found["halo"] = volume
        return found

    def _moved(self, k: int, before: str, state: str) -> Volume:
        """All-gathers and all-reduces between two layers that follow each other."""
        volume, layer = Volume(), self._graph.layers[k]
        by_model = state == "channels" and layer.kind in MIXING
        if before == state and not by_model:
            return volume
        for i in self._live[k]:
            if by_model and i in layer.inputs:
                if before != state or self._first[i] == k:
                    volume += self._converted(i, before, "whole")
                    # The sum of gradients, among them those of what later layers read.
                    volume += self._gather(i) * (2 * self._trained[i])
            elif before != state:
                volume += self._converted(i, before, state)
        return volume

    def _converted(self, k: int, before: str, state: str) -> Volume:
        """Gathered where it is not whole, forward; and its gradient on the way back."""
        volume = Volume()
        if before == state:
            return volume
        if before != "whole":
            volume += self._gather(k)
        if state != "whole" and self._trained[k]:
            volume += self._gather(k)
        return volume

    def _end(self, state: str) -> Volume:
        """The loss needs whole samples."""
        whole = state in ("whole", "samples")
        return Volume() if whole else self._gather(len(self._graph.layers) - 1)
