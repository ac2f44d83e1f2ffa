"""Pipelined training of LeNet-5 with stale weights, as Zhang and Abdelrahman (2021) simulate it.

Their Table 2, Table 4 and Figure 6 on scikit-learn's handwritten digits: the accuracy of pipelines
of 4 to 10 stages, of hybrid training, and over the share of the weights that are stale, for weights
of different ages.

Stages are run by PyTorch, since thousands of iterations are needed: a first piece shows that it
learns what the operators of sparsescan learn in the same pipeline, and how long each takes. What is
used when is left to the same simulation for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from sparsescan.jacobians import from_torch
from sparsescan.strategies.pipeline.schedule import Placement
from sparsescan.strategies.pipeline.simulation import Simulation
from sparsescan.strategies.stage import Stage

from .experiment import Drawing, Experiment, Options, Piece, Results
from .lenet5 import NETWORKS, SIDE, Images, lenet5, load_digits
from .space_time import draw

Array = NDArray[Any]

# Behind which layers of LeNet-5 the paper's pipelines have registers: one pair more each time, from
# the front on, behind the five groups of layers that have weights.
GROUPS = (3, 6, 9, 11)
LAYERS, BATCH, RATE, MOMENTUM = 12, 32, 0.01, 0.9
PLAIN, CHECK = "not pipelined", "operators"
_STAGES = {f"{2 * k + 2} stages": GROUPS[:k] for k in range(1, 5)}
# The same share of stale weights, but registers behind the last of these layers only, or behind
# every layer up to it.
_SLIDING = {f"one pair, behind layer {p}": (p,) for p in GROUPS[1:]}
_EVERY = {f"every layer up to {p}": tuple(range(1, p + 1)) for p in GROUPS}
_HYBRID = {
    # Which parts of the iterations are pipelined, and run one at a time.
    "10 stages, hybrid 2/3 + 1/3": (2, 1),
    "10 stages, hybrid 2/3 + 2/3": (2, 2),
}
# Drops of LeNet-5 in Table 2, as the text has them.
_PAPER_DROP = 0.5

_STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "black", "ls": "--"},
    "4 stages": {"color": "#56b4e9"},
    "6 stages": {"color": "#009e73"},
    "8 stages": {"color": "#e69f00"},
    "10 stages": {"color": "#d55e00"},
    "10 stages, hybrid 2/3 + 1/3": {"color": "#cc79a7", "ls": "-."},
    "10 stages, hybrid 2/3 + 2/3": {"color": "#0072b2", "ls": ":"},
}


class Settings(NamedTuple):
    """How long, how often from other parameters, and how often it is looked at."""

    iterations: int
    seeds: int
    tests: int


_FULL, _QUICK = Settings(1200, 5, 30), Settings(60, 2, 6)


# -- Stages of PyTorch ----------------------------------------------------------------------------


class TorchStage:
    """Layers of PyTorch as a stage of a pipeline, which learn by SGD with momentum.

    Autograd keeps activations, and refers to the weights: a step that it does not see changes them,
    so a backward pass meets the weights of its own cycle.
    """

    def __init__(self, layers: Sequence[nn.Module], momentum: float) -> None:
        self.module = nn.Sequential(*layers)
        self._momentum = momentum
        self._velocities = [torch.zeros_like(p) for p in self.module.parameters()]

    @property
    def parameters(self) -> list[dict[str, Array]]:
        """Of every layer."""
        return [
            {name: p.detach().numpy() for name, p in layer.named_parameters()}
            for layer in self.module
        ]

    def forward(self, x: Array) -> list[Any]:
        """Input and output of autograd's, and the output as an array."""
        given = torch.from_numpy(x).requires_grad_()
        y = self.module(given)
        return [given, y, y.detach().numpy()]

    def backward(self, activations: list[Any], grad: Array) -> tuple[Array, list[dict[str, Array]]]:
        """Gradient of the input, and of each parameter."""
        x, y, _ = activations
        parameters = list(self.module.parameters())
        grads = torch.autograd.grad(y, [x, *parameters], torch.from_numpy(grad).reshape(y.shape))
        return grads[0].numpy(), [{"": grad} for grad in grads[1:]]

    def descend(self, grads: list[dict[str, Any]], learning_rate: float) -> None:
        """A step of SGD with momentum."""
        for p, v, grad in zip(self.module.parameters(), self._velocities, grads, strict=True):
            v.mul_(self._momentum).add_(grad[""])
            p.data.sub_(v, alpha=learning_rate)


def network(seed: int) -> nn.Sequential:
    """LeNet-5 with tanh and averages, from other parameters each time."""
    module = lenet5(NETWORKS["tanh and averages, float32"], 1)
    torch.manual_seed(seed)
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("tanh"))
    return module


def batches(images: Images, count: int, seed: int) -> list[tuple[Array, NDArray[np.int64]]]:
    """Minibatches of all images in random order, again and again."""
    rng, size = np.random.default_rng(seed), len(images.train) // BATCH
    orders = [rng.permutation(len(images.train)) for _ in range(-(-count // size))]
    chosen = [order[k * BATCH : (k + 1) * BATCH] for order in orders for k in range(size)]
    return [(images.train[some], images.train_labels[some]) for some in chosen[:count]]


def train(
    registers: Sequence[int], images: Images, settings: Settings, seed: int, parts: tuple[int, int]
) -> dict[str, Any]:
    """Train once; the loss and the accuracy on the test images now and then.

    `parts` are the thirds of the iterations that are pipelined, and that are not.
    """
    module = network(seed)
    placement = Placement(LAYERS, tuple(registers))
    stages = [TorchStage(module[part], MOMENTUM) for part in placement.parts]
    piped, count = (third * settings.iterations // 3 for third in (parts[0], sum(parts)))
    pipeline = Simulation(stages, BATCH, RATE, piped)
    every = settings.iterations // settings.tests
    history: dict[str, Any] = {"iterations": [], "loss": [], "accuracy": []}
    for k, batch in enumerate(tqdm(batches(images, count, seed), leave=False), 1):
        pipeline.step(*batch)
        if k == count:
            pipeline.drain()
        if k % every == 0:
            loss, accuracy = _test(module, images)
            for name, value in (("iterations", k), ("loss", loss), ("accuracy", accuracy)):
                history[name].append(value)
    return history


def _test(module: nn.Module, images: Images) -> tuple[float, float]:
    with torch.no_grad():
        y, labels = module(torch.from_numpy(images.test)), torch.from_numpy(images.test_labels)
        right = (y.argmax(1) == labels).double().mean()
        return nn.functional.cross_entropy(y, labels).item(), right.item()


def check(images: Images, iterations: int) -> Results:
    """The operators in the pipeline of ten stages, and PyTorch in the same, by plain SGD.

    Raises
    ------
    AssertionError
        If their losses are further apart than rounding explains.
    """
    module = network(0)
    parts = Placement(LAYERS, GROUPS).parts
    ops = from_torch(module, (1, SIDE, SIDE))
    pipelines = {
        "sparsescan": Simulation([Stage(ops[part]) for part in parts], BATCH, RATE),
        "torch": Simulation([TorchStage(module[part], 0.0) for part in parts], BATCH, RATE),
    }
    losses: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for name, pipeline in pipelines.items():
        samples, losses[name] = [], []
        for batch in batches(images, iterations, 0):
            start = time.perf_counter()
            losses[name].append(pipeline.step(*batch))
            samples.append(time.perf_counter() - start)
        seconds[name] = median(samples)
    full = slice(len(GROUPS), None)
    ours, theirs = (np.array(each[full]) for each in losses.values())
    apart = float(np.abs(ours - theirs).max())
    bound = float(4 * np.finfo(np.float32).eps * theirs.max() * len(theirs) ** 0.5)
    if not apart <= bound:
        raise AssertionError(
            f"PyTorch's stages are wrong: losses are up to {apart:.1e} from those of the "
            f"operators, of which rounding explains {bound:.1e}"
        )
    return {"seconds": seconds, "apart": apart, "bound": bound, "iterations": iterations}


# -- The experiment -------------------------------------------------------------------------------


def _settings(options: Options) -> Settings:
    return _QUICK if options.quick else _FULL


def _configurations() -> dict[str, tuple[tuple[int, ...], tuple[int, int]]]:
    """Registers, and how many thirds of the iterations are pipelined and are not."""
    always = {PLAIN: ()} | _STAGES | _SLIDING | _EVERY
    hybrid = {name: (GROUPS, parts) for name, parts in _HYBRID.items()}
    return {name: (registers, (3, 0)) for name, registers in always.items()} | hybrid


def _pieces(options: Options) -> list[Piece]:
    # Two threads gain next to nothing on layers as small as these.
    torch.set_num_threads(1)
    settings, images = _settings(options), cache(load_digits)

    def piece(registers: tuple[int, ...], parts: tuple[int, int]) -> Results:
        start = time.perf_counter()
        runs = [train(registers, images(), settings, seed, parts) for seed in range(settings.seeds)]
        taken = time.perf_counter() - start
        return {"registers": list(registers), "parts": list(parts), "runs": runs, "took": taken}

    first = Piece(CHECK, lambda: check(images(), 12 if options.quick else 50))
    return [
        first,
        *(Piece(name, partial(piece, *how)) for name, how in _configurations().items()),
    ]


def _about(options: Options) -> dict[str, Any]:
    iterations, seeds, _ = _settings(options)
    images = load_digits()
    return {
        "network": "LeNet-5, tanh and averages, float32, stages by PyTorch",
        "images": f"{images.name}: {len(images.train)} to train on, {len(images.test)} to test on",
        "iterations": iterations,
        "batch": BATCH,
        "optimiser": f"SGD, learning rate {RATE}, momentum {MOMENTUM}",
        "seeds": seeds,
        "weights of the layers": weights(),
    }


def weights() -> list[int]:
    """Number of each layer's."""
    return [sum(p.numel() for p in layer.parameters()) for layer in network(0)]


def _drawings(results: Results) -> list[Drawing]:
    pieces = results["pieces"]
    trained = {name: piece for name, piece in pieces.items() if name != CHECK}
    if not trained:
        return []
    diagram = Drawing(
        "The pipeline of ten stages",
        "Which minibatch each of nine accelerators works on, in the first cycles: one minibatch at "
        "a time (above), and pipelined (below). Blue is forward, orange backward. Behind a "
        "minibatch stands how many updates its forward pass misses (−), and how many the weights "
        "have had when its backward pass uses them (+).",
        draw(Placement(LAYERS, GROUPS), 10),
    )
    return [diagram, _curves(trained, pieces.get(CHECK), results), _shares(trained, results)]


def _curves(trained: Results, checked: Results | None, results: Results) -> Drawing:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = {name: trained[name] for name in _STYLES if name in trained}
    lines = []
    for k, (name, piece) in enumerate(shown.items()):
        middle = np.median([run["accuracy"] for run in piece["runs"]], axis=0)
        lines += left.plot(
            piece["runs"][0]["iterations"], 100 * middle, label=name, **_STYLES[name]
        )
        ends = _ends(piece)
        color = _STYLES[name]["color"]
        right.plot([min(ends), max(ends)], [k, k], color=color, lw=2, alpha=0.5)
        right.plot(ends, [k] * len(ends), "o", mfc="none", ms=5, color=color)
        right.plot(median(ends), k, "o", ms=8, color=color)
    worst = min(median(_ends(piece)) for piece in shown.values())
    left.set(xlabel="iteration", ylabel="test accuracy, %", ylim=(min(80, worst - 2), 100))
    right.set(xlabel="test accuracy in the end, %", ylim=(len(shown) - 0.5, -0.5))
    right.set_yticks(range(len(shown)), list(shown))
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False)
    said = "; ".join(f"{name} {_said(piece)}" for name, piece in shown.items())
    caption = (
        f"LeNet-5 on {results['about']['images']}; medians of {results['about']['seeds']} runs "
        "from other parameters and batches (left); all of them, and their range (right). Registers "
        "stand behind the first, the first two, three and four groups of layers. Hybrid training "
        "is pipelined for two thirds of the iterations, and goes on without a pipeline for one or "
        f"two thirds. Accuracies in the end, with their range: {said}. The paper has LeNet-5 on "
        f"MNIST within {_PAPER_DROP}% of training without a pipeline, after 30,000 iterations "
        "(Table 2)."
    )
    if checked:
        ours, theirs = (1e3 * checked["seconds"][name] for name in ("sparsescan", "torch"))
        caption += (
            f" Stages are PyTorch's, which takes {theirs:.1f} ms an iteration; those of the "
            f"operators take {ours:.1f} ms, and their losses are the same within "
            f"{checked['apart']:.1e} over {checked['iterations']} iterations."
        )
    return Drawing("Accuracy of pipelined training", caption, figure)


def _shares(trained: Results, results: Results) -> Drawing:
    """Error over the share of stale weights; weights of the same share have several ages."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    numbers = results["about"]["weights of the layers"]
    first = next(iter(_STAGES))
    curves = {
        "sliding: one pair of registers": ({first: GROUPS[:1]} | _SLIDING, "#0072b2", "s"),
        "increasing stages": (_STAGES, "#d55e00", "o"),
        "registers behind every layer": (_EVERY, "#009e73", "^"),
    }
    measures: list[tuple[Callable[[Results], list[float]], str]] = [
        (_errors, "test error in the end, %"),
        (_losses, "test loss in the end"),
    ]
    for axes, (measured, label) in zip(panels, measures, strict=True):
        if PLAIN in trained:
            axes.axhline(
                median(measured(trained[PLAIN])), color="black", ls="--", lw=1, label=PLAIN
            )
        # Numbers of several curves that meet stand beside each other.
        places = ((-4, 8), (4, 8), (4, -14))
        for (name, (cuts, color, marker)), place in zip(curves.items(), places, strict=True):
            points = [
                (100 * _stale(cuts[key], numbers), measured(trained[key]), cuts[key])
                for key in cuts
                if key in trained
            ]
            if not points:
                continue
            shares, ends, registers = zip(*points, strict=True)
            middle = [median(end) for end in ends]
            spread = np.abs([[m - min(e), max(e) - m] for m, e in zip(middle, ends, strict=True)])
            style = {"color": color, "marker": marker, "capsize": 3}
            axes.errorbar(shares, middle, spread.T, label=name, **style)
            for share, m, placed in zip(shares, middle, registers, strict=True):
                axes.annotate(
                    f"{2 * len(placed)}",
                    (share, m),
                    xytext=place,
                    ha="right" if place[0] < 0 else "left",
                    textcoords="offset points",
                    fontsize="small",
                    color=color,
                )
        axes.set(xlabel="share of stale weights, %", ylabel=label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    caption = (
        "The paper's Figure 6, for LeNet-5: error and loss over the share of the weights that "
        "are stale, which the last pair of registers decides. Numbers are how many updates the "
        "oldest of them are behind. Marks are medians, bars the range of all runs. Where the "
        "curves lie on each other the share decides, as the paper found for ResNet-20; where they "
        f"part at the same share, age does. {_ages(trained)}"
    )
    return Drawing("What hurts: how many weights are stale, or how old they are", caption, figure)


def _ages(trained: Results) -> str:
    """What our runs say: the largest share at each age."""
    last = GROUPS[-1]
    names = [f"one pair, behind layer {last}", "10 stages", f"every layer up to {last}"]
    ages = [2, 2 * len(GROUPS), 2 * last]
    said = [
        f"{age} updates behind, {_said(trained[name])}"
        for name, age in zip(names, ages, strict=True)
        if name in trained
    ]
    if len(said) < len(names):
        return ""
    return f"Here, at the same largest share: {'; '.join(said)}."


def _ends(piece: Results) -> list[float]:
    return [100 * run["accuracy"][-1] for run in piece["runs"]]


def _errors(piece: Results) -> list[float]:
    return [100 - end for end in _ends(piece)]


def _losses(piece: Results) -> list[float]:
    return [run["loss"][-1] for run in piece["runs"]]


def _said(piece: Results) -> str:
    ends = _ends(piece)
    return f"{median(ends):.1f}% ({min(ends):.1f} to {max(ends):.1f})"


def _stale(registers: Sequence[int], numbers: Sequence[int]) -> float:
    return Placement(LAYERS, tuple(registers)).stale(numbers)


EXPERIMENT = Experiment(
    name="pipeline",
    title="Pipelined training with stale weights",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=lambda results: [],
)
