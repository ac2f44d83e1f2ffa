"""Compare all strategies, in a table and a picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeAlias

from ..checks import check_count, check_packages
from ..errors import InputError
from ..formatting import align, format_bytes, format_time, wrap
from ..symbolic.pattern import Pattern
from .graph import Graph
from .integrated import BatchParallel, DomainParallel, Integrated, ModelParallel
from .machine import Machine
from .networks import AnyNetwork, built_in, from_chain, graph_of
from .per_layer.predict import PerLayer
from .pipeline import MicroBatches, Pipeline
from .scan import Scan
from .strategy import MOST_SAMPLES, MOST_WORKERS, Prediction, Strategy

if TYPE_CHECKING:
    from .pytorch import TorchPlan

_Path: TypeAlias = str | os.PathLike[str]
# Parts whose columns come first in a table; others follow.
_PARTS = ("forward", "backward", "Jacobians", "scan", "parameters", "activations", "weights")
# Strategies, with colours that everybody can tell apart (Okabe and Ito, 2008), and markers.
_STRATEGIES: tuple[tuple[type[Strategy], str, str], ...] = (
    (BatchParallel, "#0072b2", "o"),
    (ModelParallel, "#e69f00", "s"),
    (DomainParallel, "#b8a100", "h"),
    (Integrated, "#009e73", "^"),
    (PerLayer, "#cc79a7", "D"),
    (MicroBatches, "#999999", "v"),
    (Pipeline, "#56b4e9", "P"),
    (Scan, "#d55e00", "*"),
)


def strategies() -> list[Strategy]:
    """Return all strategies."""
    return [kind() for kind, _, _ in _STRATEGIES]


def named(chosen: Iterable[Strategy | str] | None) -> list[Strategy]:
    """Return strategies, some of which are given by name; by default all."""
    every: dict[str | Strategy, Strategy] = {each.name: each for each in strategies()}
    given = list(dict.fromkeys(every if chosen is None else chosen))
    for each in given:
        if not isinstance(each, Strategy) and each not in every:
            raise InputError(f"strategy is {each!r}; expected one of {'; '.join(map(str, every))}")
    return [each if isinstance(each, Strategy) else every[each] for each in given]


@dataclass(frozen=True)
class Comparison:
    """Predictions of all strategies for one network.

    Attributes
    ----------
    network : Graph
        The network.
    machine : Machine
        A worker.
    workers, batch : int
        Numbers of workers, and of samples of a step.
    single : Prediction
        The prediction for one worker.
    predictions : list of Prediction
        The best first; predictions that exceed a worker's memory come last.
    reasons : dict of str to str
        Why other strategies cannot be used, by name.
    strategies : list of Strategy
        The strategies that were compared.
    """

    network: Graph
    machine: Machine
    workers: int
    batch: int
    single: Prediction
    predictions: list[Prediction]
    reasons: dict[str, str]
    strategies: list[Strategy] = field(default_factory=list, repr=False)

    def fits(self, prediction: Prediction) -> bool:
        """Return whether a worker has enough memory."""
        return int(prediction.memory) <= self.machine.memory

    def to_dict(self) -> dict[str, Any]:
        """Return the predictions and their plans, layer by layer, as JSON can hold them."""
        return {
            "network": self.network.name,
            "machine": self.machine.to_dict(),
            "workers": self.workers,
            "batch": self.batch,
            "single": self.single.to_dict(),
            "predictions": [one.to_dict() for one in self.predictions],
            "reasons": self.reasons,
        }

    def to_torch(self, module: Any, strategy: str | None = None) -> TorchPlan:
        """Return a plan for a network of PyTorch as PyTorch takes it.

        Linear layers that are cut along channels become entries of ``parallelize_module`` on an
        axis of the mesh. A pipeline's registers become split points. All other layers share
        samples.

        Parameters
        ----------
        module : torch.nn.Module
            The network that was compared.
        strategy : str, optional
            The name of the strategy; by default the best one.

        Returns
        -------
        TorchPlan

        Raises
        ------
        InputError
            If the plan is not of this module, or is that of a scan, which PyTorch does not have.
        """
        from .pytorch import to_torch

        by_name = {one.strategy: one for one in reversed(self.predictions)}
        if strategy is not None and strategy not in by_name:
            raise InputError(f"strategy is {strategy!r}; expected one of {'; '.join(by_name)}")
        best = self.predictions[0] if strategy is None else by_name[strategy]
        return to_torch(best, module, self.workers)

    def plot(self, path: _Path) -> None:
        """Draw the predicted time of a step over powers of two of workers.

        Parameters
        ----------
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

        counts = sorted({1 << k for k in range(self.workers.bit_length())} | {self.workers})
        every = [
            compare(self.network, self.machine, count, self.batch, self.strategies)
            for count in counts
        ]
        points: dict[str, list[tuple[int, float, bool]]] = {}
        for one in every:
            for prediction in one.predictions:
                point = one.workers, prediction.total, one.fits(prediction)
                points.setdefault(prediction.strategy, []).append(point)
        figure = Figure(figsize=(7.5, 5), layout="constrained")
        axes = figure.subplots()
        draw_over_workers(axes, counts, points, every[0].single.total, 10)
        axes.set(xlabel="workers", ylabel="predicted time of a training step, ms")
        axes.set_title(
            f"{self.network.name}, {self.batch} samples a step ({self.machine.name})",
            fontsize="medium",
        )
        figure.legend(loc="outside right center", frameon=False, fontsize="small")
        figure.supxlabel(
            "hollow: more memory than a worker has; dashed: stale gradients", fontsize="small"
        )
        figure.savefig(path, format="png", dpi=150)

    def __str__(self) -> str:
        every = [self.single, *self.predictions]
        taken = {part for one in every for part, value in one.nanoseconds.items() if value > 0}
        known = dict.fromkeys([*_PARTS, *(part for one in every for part in one.nanoseconds)])
        parts = [part for part in known if part in taken]
        rows = [["strategy", "step", "sent", "memory", "gradients", *parts]]
        for one in every:
            times = [one.nanoseconds.get(part, 0) for part in parts]
            share = f"{one.stale:.0%}" if one.stale >= 0.005 else "<1%"
            stale = f"{share} stale" if one.stale else "exact"
            memory = format_bytes(one.memory) + (" !" if not self.fits(one) else "")
            cells = [format_time(value) if value else "–" for value in times]
            step = [one.strategy, format_time(one.total), format_bytes(one.bytes)]
            rows.append([*step, memory, stale, *cells])
        said = [] if all(map(self.fits, every)) else ["! more memory than a worker has"]
        head = (
            f"{self.network.name}, {self.workers} workers, {self.batch} samples a step; a worker "
            f"has {format_bytes(self.machine.memory)} ({self.machine.name})"
        )
        return _page(head, rows, said, self.predictions, self.reasons)


def _page(
    head: str,
    rows: Sequence[Sequence[str]],
    said: Sequence[str],
    predictions: Sequence[Prediction],
    reasons: Mapping[str, str],
) -> str:
    """Return a table as text for a terminal; columns that do not fit come below.

    Below it are configurations, and why some strategies cannot be used.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    lines = [
        *said,
        *(f"{one.strategy}: {shorten(one.how, 100, placeholder=' …')}" for one in predictions),
        *(f"without {'; '.join(those)}: {reason}" for reason, those in names.items()),
    ]
    wrapped = [part for line in lines for part in wrap(line, "  ")]
    return "\n".join([head, *align(rows, "  "), *wrapped])


def build(network: Any, input_shape: Sequence[int] | None = None) -> Graph:
    """Return the graph of a network, with layers, parameters and multiply-adds.

    Parameters
    ----------
    network : str, Sequential, torch.nn.Module or sequence of Pattern
        One of these:

        - the name of a built-in network: ``"lenet5"``, ``"alexnet"``, ``"alexnet-owt"``,
          ``"vgg11"``, ``"vgg16"``, ``"resnet-N"``, ``"inception-v3"``, ``"rnn:T"`` or ``"gru:T"``,
          for `N` layers or `T` time steps (see Notes);
        - a :class:`sparsescan.jacobians.Sequential`, whose operators become layers; a residual
          block becomes its layers, the layers of its shortcut, and a sum;
        - a PyTorch module with one input and one output, which `torch.fx` traces: convolutions,
          poolings, linear layers, normalisations, activations, sums and concatenations of channels,
          under the names of its modules;
        - the patterns of a chain, from the last Jacobian to the first: each becomes a linear layer,
          or an elementwise layer if the pattern is diagonal. Each entry of a linear layer counts as
          a parameter, since a chain does not know their number.
    input_shape : sequence of int, optional
        The shape of one sample, needed for a PyTorch module.

    Returns
    -------
    Graph
        It prints its name and the numbers of layers and weights; ``graph.layers`` has the layers.

    Raises
    ------
    InputError
        If there is no network of this name, or a layer cannot be read.
    InputTypeError
        If `network` is no network.

    Notes
    -----
    Built-in networks:

    lenet5
        LeCun et al. (1998) in today's form, for images of 32×32 with one channel.
    alexnet
        Krizhevsky et al. (2012): convolutions 2, 4 and 5 in two groups; 61.0 million
        parameters.
    alexnet-owt
        Krizhevsky (2014), "one weird trick", without groups; 61.1 million parameters.
    vgg11
        The convolutions of Simonyan and Zisserman (2014) for images of 32×32, and one linear
        layer.
    vgg16
        Their network of 16 layers, for images of 224×224.
    resnet-N
        He et al. (2016) for images of 32×32, whose shortcuts have no parameters: ``N = 6n + 2``
        layers with weights for `n` blocks of each width, such as resnet-20 or resnet-110.
    inception-v3
        Szegedy et al. (2016) for images of 299×299, without the auxiliary classifier.
    rnn:T, gru:T
        `T` steps of a recurrent network with 20 hidden units, and a linear layer. A step reads 1
        feature in rnn, 20 in gru. The input of the graph is the first state.

    In resnet-N and inception-v3, batch normalisations and the ReLUs after them are part of their
    convolutions.

    Examples
    --------
    >>> from sparsescan.strategies import build
    >>> build("lenet5")
    Graph('lenet5', 13 layers, 61706 weights)
    """
    if isinstance(network, str):
        return built_in(network)
    if isinstance(network, list | tuple):
        return from_chain(network)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(network, torch.nn.Module):
        from .pytorch import from_torch

        if input_shape is None:
            raise InputError(
                f"network is the module {type(network).__name__}, whose input_shape is None; "
                "expected the shape of one sample"
            )
        return from_torch(network, input_shape)
    return graph_of(network)


def compare(
    network: AnyNetwork | str | Sequence[Pattern],
    machine: Machine,
    workers: int,
    batch: int,
    chosen: Sequence[Strategy | str] | None = None,
) -> Comparison:
    """Predict a step of a network by all strategies.

    Parameters
    ----------
    network : str, Graph, Sequential or sequence of Pattern
        The network: any argument of :func:`build`, or its result.
    machine : Machine
        A worker, and the network between workers.
    workers : int
        Number of workers.
    batch : int
        Samples of a step, of all workers together.
    chosen : sequence of str or Strategy, optional
        Strategies to compare, by default all: ``"batch"``, ``"model"``, ``"domain"``,
        ``"integrated"``, ``"per layer"``, ``"pipeline, micro-batches"``,
        ``"pipeline, stale weights"`` and ``"scan"``, or objects of their classes, which have
        options.

    Returns
    -------
    Comparison
        Print it for a table. Its `predictions` come the best first, each with a plan, `layers`.
        ``comparison.plot(path)`` draws the time over the number of workers, and
        ``comparison.to_torch(module)`` returns the best plan in PyTorch's terms.

    Raises
    ------
    InputError, InputTypeError
        If there is no worker, or no sample, or `network` is no network.

    Examples
    --------
    >>> from sparsescan.strategies import Machine, compare
    >>> comparison = compare("lenet5", Machine(), workers=4, batch=64)
    >>> best, *others = comparison.predictions
    >>> all(best.total <= other.total for other in others)
    True
    """
    workers = check_count("workers", workers, 1, MOST_WORKERS)
    batch = check_count("batch", batch, 1, MOST_SAMPLES)
    graph, several = build(network), named(chosen)
    predictions, reasons = [], {}
    for strategy in several:
        try:
            predictions.append(strategy.predict(graph, machine, workers, batch))
        except InputError as error:
            reasons[strategy.name] = str(error)
    predictions.sort(key=lambda one: (one.memory > machine.memory, one.total))
    alone = PerLayer().predict(graph, machine, 1, batch)
    single = replace(alone, strategy="one worker", how="")
    return Comparison(graph, machine, workers, batch, single, predictions, reasons, several)


def plot_comparison(
    network: AnyNetwork, machine: Machine, workers: int, batch: int, path: _Path, *chosen: Any
) -> None:
    """Draw :meth:`Comparison.plot`; the last release's name for it."""
    compare(network, machine, workers, batch, *chosen).plot(path)


def styles() -> dict[str, dict[str, Any]]:
    """Return the colour, the marker and the line of every strategy, by its name."""
    return {
        kind.name: {"color": color, "marker": marker, "ls": "-" if kind.exact else "--"}
        for kind, color, marker in _STRATEGIES
    }


def draw_over_workers(
    axes: Any,
    counts: Sequence[int],
    points: Mapping[str, Sequence[tuple[int, float, bool]]],
    alone: float,
    size: float,
) -> None:
    """Draw the time of every strategy over the number of workers.

    A point is workers, nanoseconds, and whether a worker has the memory; `alone` are nanoseconds
    of one worker. The first marker has this size; others are smaller, since several may be at one
    place.
    """
    lowest: list[float] = []
    for k, (name, style) in enumerate(styles().items()):
        if name not in points:
            continue
        x, y = ([count for count, *_ in points[name]], [time / 1e6 for _, time, _ in points[name]])
        style["ms"] = size * (1 - 0.08 * k)
        axes.plot(x, y, mfc="white", label=name, zorder=2 + k, **style)
        inside = [(count, time / 1e6) for count, time, fits in points[name] if fits]
        if inside:
            axes.plot(*zip(*inside, strict=True), zorder=2.5 + k, **style | {"ls": ""})
        lowest.append(min(y))
    ideal = [alone / 1e6 / count for count in counts]
    axes.plot(counts, ideal, "k:", lw=1, label="one worker / workers")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7 * min(lowest, default=alone / 1e6))
    axes.set_xticks(counts, [str(count) for count in counts])
    _plain_ticks(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _plain_ticks(axis: Any) -> None:
    """Label a few places in every decade of a logarithmic axis by plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
