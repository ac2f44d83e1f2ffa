"""All strategies side by side: predicted in a table and a picture, and measured over MPI ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from ...describe import _aligned, _bytes, _time
from ...errors import InputError, InputTypeError
from ...plot import check_packages
from ...schedule import check_count
from ..communicator import Communicator
from ..network import measure as measure_network
from .architectures import sequential
from .deepa import PerLayer
from .graph import Graph
from .integrated import BatchParallel, DomainParallel, Integrated, ModelParallel
from .machine import Machine, measure_machine
from .measured import measure_exchanges, measure_times
from .pipeline import MicroBatches, Pipeline
from .recurrent import Network, Recurrent, graph_of
from .scan import Scan, ScanSamples
from .strategy import Prediction, Strategy, Training

__all__ = [
    "Comparison",
    "Measured",
    "Run",
    "Single",
    "compare",
    "measure_here",
    "measure_in_turns",
    "plain_ticks",
    "plot_comparison",
    "run",
    "strategies",
]

# Of a measurement: steps before it, seconds and steps that it takes, and steps of a turn.
_WARM, _SECONDS, _LEAST, _MOST, _IN_A_ROW = 2, 1.0, 5, 50, 3
_RATE = 0.01
# Times of two strategies whose order counts.
_DIFFER = 1.15
# Of the columns of a table, those that come first; others follow.
_PARTS = ("forward", "backward", "Jacobians", "scan", "parameters", "activations", "weights")
# Colours that everybody can tell apart (Okabe and Ito, 2008), and markers.
_STYLES = (
    ("#0072b2", "o"),
    ("#e69f00", "s"),
    ("#b8a100", "h"),
    ("#009e73", "^"),
    ("#cc79a7", "D"),
    ("#999999", "v"),
    ("#56b4e9", "P"),
    ("#d55e00", "*"),
    ("#000000", "d"),
)


class Single(Strategy):
    """One worker, whatever the number: what strategies are compared with."""

    name = "one worker"

    def predict(self, network: Graph, machine: Machine, workers: int, batch: int) -> Prediction:
        """Layer by layer, forward and backward."""
        layers = range(len(network.layers))
        numbers = 2 * (network.weights + batch * network.activations)
        return Prediction(
            self.name,
            "",
            {
                "forward": sum(machine.forward(network, k, batch) for k in layers),
                "backward": sum(machine.backward(network, k, batch) for k in layers),
            },
            0,
            machine.itemsize * numbers,
        )

    def start(
        self, comm: Any, network: Network, batch: int, *, learning_rate: float = 0.1
    ) -> Training:
        """As by batch, if there is one rank."""
        if comm.size > 1:
            raise InputError(f"comm has {comm.size} ranks; expected one")
        return BatchParallel().start(comm, network, batch, learning_rate=learning_rate)


def strategies(machine: Machine | None = None) -> list[Strategy]:
    """All there are.

    Parameters
    ----------
    machine : Machine, optional
        For which a configuration is chosen where they are started.
    """
    return [
        BatchParallel(),
        ModelParallel(machine=machine),
        DomainParallel(machine=machine),
        Integrated(machine=machine),
        PerLayer(machine=machine),
        MicroBatches(),
        Pipeline(),
        Scan(machine=machine),
        ScanSamples(machine=machine),
    ]


@dataclass(frozen=True)
class Comparison:
    """What all strategies are predicted to take for one network.

    Attributes
    ----------
    network : Graph
        The network.
    machine : Machine
        A worker.
    workers, batch : int
        How many workers, and samples of a step.
    single : Prediction
        Of one worker.
    predictions : list of Prediction
        The best first; those for which a worker has too little memory last.
    reasons : dict of str to str
        Why others cannot be used, by their names.
    """

    network: Graph
    machine: Machine
    workers: int
    batch: int
    single: Prediction
    predictions: list[Prediction]
    reasons: dict[str, str]

    def fits(self, prediction: Prediction) -> bool:
        """Whether a worker has the memory."""
        return int(prediction.memory) <= self.machine.memory

    def __str__(self) -> str:
        every = [self.single, *self.predictions]
        found = {part for one in every for part, value in one.nanoseconds.items() if value > 0}
        others = [part for one in every for part in one.nanoseconds if part in found]
        parts = [part for part in dict.fromkeys([*_PARTS, *others]) if part in found]
        rows = [["strategy", "step", *parts, "sent", "memory", "gradients"]]
        for one in every:
            times = [one.nanoseconds.get(part, 0) for part in parts]
            share = f"{one.stale:.0%}" if one.stale >= 0.005 else "<1%"
            stale = f"{share} stale" if one.stale else "exact"
            memory = _bytes(one.memory) + (" !" if not self.fits(one) else "")
            cells = [_time(value) if value else "–" for value in times]
            rows.append([one.strategy, _time(one.total), *cells, _bytes(one.bytes), memory, stale])
        lines = [
            f"{self.network.name}, {self.workers} workers, {self.batch} samples a step; a worker "
            f"has {_bytes(self.machine.memory)} ({self.machine.name})",
            *(line[2:] for line in _aligned(rows)),
        ]
        if not all(map(self.fits, every)):
            lines.append("  ! more memory than a worker has")
        lines += [f"  {one.strategy}: {_shortened(one.how)}" for one in self.predictions]
        lines += _without(self.reasons)
        return "\n".join(lines)


def _without(reasons: Mapping[str, str]) -> list[str]:
    """Lines that say why some cannot be used; those with one reason together."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"  without {'; '.join(found)}: {reason}" for reason, found in names.items()]


def _shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def compare(
    network: Graph,
    machine: Machine,
    workers: int,
    batch: int,
    chosen: Sequence[Strategy] | None = None,
) -> Comparison:
    """What all strategies are predicted to take.

    Parameters
    ----------
    network : Graph
        The network.
    machine : Machine
        A worker, and what connects them.
    workers : int
        How many.
    batch : int
        Samples of a step, of all workers together.
    chosen : sequence of Strategy, optional
        Those to be compared; by default all.

    Returns
    -------
    Comparison
        Print it for a table.

    Raises
    ------
    InputError, InputTypeError
        If there is no worker, or no sample, or `network` is no graph.

    Examples
    --------
    >>> from sparsescan.parallel.strategies import Machine, build, compare
    >>> found = compare(build("lenet5"), Machine(), workers=4, batch=64)
    >>> all(found.predictions[0].total <= other.total for other in found.predictions)
    True
    """
    workers, batch = check_count("workers", workers, 1), check_count("batch", batch, 1)
    if not isinstance(network, Graph):
        raise InputTypeError(
            f"network is a {type(network).__name__}; expected a Graph, such as build('lenet5') or "
            "from_sequential(…)"
        )
    predictions, reasons = [], {}
    for strategy in strategies() if chosen is None else chosen:
        try:
            predictions.append(strategy.predict(network, machine, workers, batch))
        except InputError as error:
            reasons[strategy.name] = str(error)
    predictions.sort(key=lambda one: (one.memory > machine.memory, one.total))
    single = Single().predict(network, machine, 1, batch)
    return Comparison(network, machine, workers, batch, single, predictions, reasons)


def plot_comparison(
    network: Graph, machine: Machine, workers: int, batch: int, path: str | os.PathLike[str]
) -> None:
    """Draw the predicted time of a step over the number of workers.

    Parameters
    ----------
    network, machine, batch
        As for :func:`compare`.
    workers : int
        The most; powers of two up to them are drawn.
    path : str or path-like
        The PNG file to write, under exactly this name.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    OSError
        If the file cannot be written.
    """
    check_packages("a picture", "plot", {"matplotlib": "matplotlib"})
    from matplotlib.figure import Figure

    counts = sorted({1 << k for k in range(workers.bit_length())} | {workers})
    found = [compare(network, machine, count, batch) for count in counts]
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    exact, lowest = {strategy.name: strategy.exact for strategy in strategies()}, []
    for k, (name, (color, marker)) in enumerate(zip(exact, _STYLES, strict=True)):
        points = [
            (one.workers, prediction.total / 1e6, one.fits(prediction))
            for one in found
            for prediction in one.predictions
            if prediction.strategy == name
        ]
        if not points:
            continue
        x, y = ([point[axis] for point in points] for axis in (0, 1))
        lowest.append(min(y))
        # Smaller and smaller, since several may be at one place.
        style: dict[str, Any] = {"color": color, "marker": marker, "ms": 10 - 0.8 * k}
        line = "-" if exact[name] else "--"
        axes.plot(x, y, ls=line, mfc="white", label=name, zorder=2 + k, **style)
        inside = [(a, b) for a, b, fits in points if fits]
        if inside:
            axes.plot(*zip(*inside, strict=True), ls="", zorder=2.5 + k, **style)
    alone = found[0].single.total / 1e6
    axes.plot(counts, [alone / n for n in counts], "k:", lw=1, label="one worker / workers")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7 * min(lowest, default=alone))
    axes.set_xticks(counts, [str(count) for count in counts])
    plain_ticks(axes.yaxis)
    axes.set(xlabel="workers", ylabel="predicted time of a training step, ms")
    axes.set_title(f"{network.name}, {batch} samples a step ({machine.name})", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    figure.supxlabel(
        "hollow: more memory than a worker has; dashed: stale gradients", fontsize="small"
    )
    figure.savefig(path, format="png", dpi=150)


def plain_ticks(axis: Any) -> None:
    """Numbers as they are written, a few in every decade of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


# -- Over the ranks of MPI ------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What a strategy took, beside what it was predicted to.

    Attributes
    ----------
    prediction : Prediction
        For this machine.
    nanoseconds : float
        Of a step, the median; of the slowest rank.
    bytes : int
        Of data that the busiest rank sent in a step.
    """

    prediction: Prediction
    nanoseconds: float
    bytes: int


def measure_here(comm: Any, name: str | None = None, batch: int = 64) -> Machine:
    """A worker of this computer while all ranks work, and the network between them; collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    name : str, optional
        Of a network that is built in, whose layers are to be measured one by one.
    batch : int
        Samples of a step, of all ranks together.

    Returns
    -------
    Machine
        The same on all ranks.

    Raises
    ------
    InputError
        If the network cannot be run, or there is too little memory.
    """
    communicator = Communicator.of(comm)
    batch, trained = check_count("batch", batch, 1), None if name is None else _runnable(name)
    network = measure_network(communicator)
    communicator.agree()
    every: list[Machine] = communicator.gather(measure_machine(network))
    found = replace(
        every[0],
        multiply_adds=min(one.multiply_adds for one in every),
        bandwidth=min(one.bandwidth for one in every),
        overhead=max(one.overhead for one in every),
        # They share it.
        memory=every[0].memory // communicator.size,
    )
    if communicator.size > 1:
        latency, inverse_bandwidth = measure_exchanges(communicator)
        network = replace(network, latency=latency, inverse_bandwidth=inverse_bandwidth)
        found = replace(found, network=network)
    if trained is None:
        return found
    _check_memory(graph_of(trained, str(name)), found, communicator.size, batch)
    times = communicator.broadcast(measure_times(comm, trained, batch), 0)
    return replace(found, times=times)


def _runnable(name: str) -> Network:
    """A network that is built in, to be run."""
    return Recurrent.named(name, 0) if ":" in name else sequential(name, 0)


def _check_memory(graph: Graph, machine: Machine, workers: int, batch: int) -> None:
    """Raise unless there is room for the Jacobians of all strategies, which take turns."""
    every = strategies()
    # Of the others, each worker has its part of the layers.
    whole = sum(isinstance(one, (BatchParallel, PerLayer, ScanSamples)) for one in every)
    values = sum(layer.values(batch) for layer in graph.layers) * machine.itemsize
    held = int(values) + sum(layer.index_bytes for layer in graph.layers)
    needed = held * whole + held * (len(every) - whole) // workers
    if needed > machine.memory:
        raise InputError(
            f"network is {graph.name}; the Jacobians of {len(every)} strategies take about "
            f"{_bytes(needed)} on each of {workers} ranks; expected at most the "
            f"{_bytes(machine.memory)} that it has"
        )


@dataclass(frozen=True)
class Run:
    """What strategies took over the ranks of a communicator.

    Attributes
    ----------
    network : Graph
        The network.
    machine : Machine
        For which steps were predicted.
    workers, batch : int
        Number of ranks, and samples of a step.
    measured : list of Measured
        The fastest first.
    reasons : dict of str to str
        Why others were not measured, by their names.
    """

    network: Graph
    machine: Machine
    workers: int
    batch: int
    measured: list[Measured]
    reasons: dict[str, str]

    @property
    def pairs(self) -> tuple[int, int]:
        """Of pairs of strategies that differ by more than 15%: how many as predicted, and all."""
        both = [(one.nanoseconds, one.prediction.total) for one in self.measured]
        differ = [(a, b) for a, b in combinations(sorted(both), 2) if b[0] > _DIFFER * a[0]]
        return sum(a[1] < b[1] for a, b in differ), len(differ)

    def __str__(self) -> str:
        right, pairs = self.pairs
        order = sorted(self.measured, key=lambda one: one.prediction.total)
        rows = [["strategy", "step", "predicted", "order predicted", "sent", "sent, predicted"]]
        for one in self.measured:
            times = _time(one.nanoseconds), _time(one.prediction.total), str(1 + order.index(one))
            sent = f"{one.bytes:,} B", f"{one.prediction.bytes:,} B"
            rows.append([one.prediction.strategy, *times, *sent])
        predictions = [one.prediction for one in self.measured]
        return "\n".join(
            [
                f"{self.network.name}, {self.workers} rank{'s' * (self.workers > 1)}, {self.batch} "
                "samples a step, measured",
                *(line[2:] for line in _aligned(rows)),
                f"  the order of {right} of the {pairs} pairs that differ by more than "
                f"{_DIFFER - 1:.0%} is as predicted",
                *(f"  {one.strategy}: {_shortened(one.how)}" for one in predictions),
                *_without(self.reasons),
            ]
        )


def run(comm: Any, name: str, machine: Machine, batch: int) -> Run:
    """Train a network that is built in by every strategy that can; collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    name : str
        Of the network.
    machine : Machine
        The same on all ranks.
    batch : int
        Samples of a step.

    Returns
    -------
    Run
        Print it for a table.

    Raises
    ------
    InputError
        If the network cannot be run, or there is too little memory.
    """
    network, rng = _runnable(name), np.random.default_rng(0)
    graph, batch = graph_of(network, name), check_count("batch", batch, 1)
    _check_memory(graph, machine, comm.size, batch)
    x = rng.standard_normal((batch, *network.input_shape), np.float32)
    labels = rng.integers(graph.layers[-1].size, size=batch)
    started: list[tuple[Prediction, Training]] = []
    reasons = {}
    for strategy in strategies(machine):
        try:
            configured = _configured(strategy, network, graph, machine, comm.size, batch)
            prediction = configured.predict(graph, machine, comm.size, batch)
            if prediction.memory > machine.memory:
                reasons[strategy.name] = f"a rank needs {_bytes(prediction.memory)}"
                continue
            # What is wrong is wrong on all ranks.
            training = configured.start(comm, network, batch, learning_rate=_RATE)
        except InputError as error:
            reasons[strategy.name] = str(error)
            continue
        started.append((prediction, training))
    times, sent = measure_in_turns([training for _, training in started], x, labels)
    found = [
        Measured(prediction, nanoseconds, nbytes)
        for (prediction, _), nanoseconds, nbytes in zip(started, times, sent, strict=True)
    ]
    found.sort(key=lambda one: one.nanoseconds)
    return Run(graph, machine, comm.size, batch, found, reasons)


def _configured(
    strategy: Strategy, network: Network, graph: Graph, machine: Machine, workers: int, batch: int
) -> Strategy:
    """With the choices that are predicted to be best, where it would make others to be run."""
    if isinstance(strategy, (Pipeline, MicroBatches)):
        return strategy.chosen(graph, machine, workers, batch)
    return strategy.of(network) if isinstance(strategy, Integrated) else strategy


def measure_in_turns(
    trainings: Sequence[Training], x: Any, labels: Any
) -> tuple[list[float], list[int]]:
    """Nanoseconds of a step of each, and bytes that the busiest rank sends in it.

    They take turns, so that what else the machine does meets all of them.
    """
    sent = []
    for training in trainings:
        communicator = training.communicator
        # A pipeline is full by then.
        for _ in range(_WARM + 2 * communicator.size):
            training.step(x, labels)
        before = _sent(communicator)
        training.step(x, labels)
        sent += communicator.maximum([_sent(communicator) - before])
    samples: list[list[int]] = [[] for _ in trainings]
    total = 0
    while samples and (
        len(samples[0]) < _LEAST
        or (len(samples[0]) < _MOST and total < _SECONDS * 1e9 * len(samples))
    ):
        for training, own in zip(trainings, samples, strict=True):
            # The first of a turn finds the caches as another has left them.
            for k in range(1 + _IN_A_ROW):
                training.communicator.agree()
                start = time.perf_counter_ns()
                training.step(x, labels)
                # The same on all ranks, so that all stop at once.
                taken = training.communicator.maximum([time.perf_counter_ns() - start])
                own += taken * (k > 0)
                total += taken[0]
    return [float(median(own)) for own in samples], sent


def _sent(communicator: Communicator) -> int:
    """Bytes of data: without the few by which ranks agree that nothing is wrong."""
    traffic = communicator.traffic
    return sum(made.bytes for kind, made in traffic.items() if kind != "allreduce")
