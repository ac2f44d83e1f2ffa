"""Pipelined training with stale weights, as Zhang and Abdelrahman (2021) simulate it.

Their Table 2, Table 4 and Figure 6 on scikit-learn's handwritten digits: the accuracy of LeNet-5 in
pipelines of 4 to 10 stages, in hybrid training, and over the share of the weights that are stale,
for weights of different ages; and of ResNet-20, with batch normalisation, momentum and weight
decay. Digits are cut into folds, each of which is tested by networks that train on the others, so
that every image counts.

Stages are run by PyTorch, since thousands of iterations are needed: a first piece shows that it
learns what the operators of sparsescan learn in the same pipeline, and how long each takes. One
simulation says for both which weights are used when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median, stdev
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

from . import drawing
from .experiment import Drawing, Experiment, Options, Piece, Results
from .lenet5 import NETWORKS, SIDE, Images, lenet5, load_digits
from .space_time import draw

Array = NDArray[Any]

# Behind which layers of LeNet-5 the paper's pipelines have registers: one pair more each time, from
# the front on, behind the five groups of layers that have weights.
GROUPS = (3, 6, 9, 11)
LAYERS, BATCH, RATE, MOMENTUM = 12, 32, 0.01, 0.9
PLAIN, CHECK = "not pipelined", "operators"
HYBRID, LATE = "10 stages, hybrid", "10 stages, after 1/12 without"
_STAGES = {f"{2 * k + 2} stages": GROUPS[:k] for k in range(1, 5)}
# One share of stale weights, but registers behind the last of these layers only, or behind every
# layer up to it.
_SLIDING = {f"one pair, behind layer {p}": (p,) for p in GROUPS[2:]}
_EVERY = {f"every layer up to {p}": tuple(range(1, p + 1)) for p in GROUPS[2:]}
# Drops of LeNet-5 in Table 2, as the text has them.
_PAPER_DROP = 0.5
# ResNet-20 (appendix A): rates without a pipeline and with one, and the weight decay. Registers
# stand behind blocks, which the paper's layers 7; 3, 5, 7; and about 5, 12, 17 end.
_RESNET, _RESNET_RATES, _DECAY = "ResNet-20, ", (0.1, 0.01), 1e-4
_RESNET_STAGES = {
    "4 stages, layer 7": (4,),
    "8 stages, layers 3, 5, 7": (2, 3, 4),
    "8 stages, layers 5, 13, 17": (3, 7, 9),
}

_STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "black", "ls": "--"},
    "4 stages": {"color": "#56b4e9"},
    "6 stages": {"color": "#009e73"},
    "8 stages": {"color": "#e69f00"},
    "10 stages": {"color": "#d55e00"},
    HYBRID: {"color": "#0072b2", "ls": ":"},
    LATE: {"color": "#cc79a7", "ls": "-."},
}


class Settings(NamedTuple):
    """Iterations of LeNet-5 and of ResNet-20, and folds."""

    iterations: int
    deep: int
    folds: int


class Way(NamedTuple):
    """Registers, which twelfths of the iterations are pipelined or not, and repetitions."""

    registers: tuple[int, ...]
    phases: tuple[tuple[int, bool], ...] = ((12, True),)
    repeats: int = 1


_FULL, _QUICK = Settings(804, 156, 5), Settings(24, 12, 2)
# Those whose differences are told are repeated from other parameters.
_WAYS = {
    # It goes on for as long as hybrid training does.
    PLAIN: Way((), ((16, False),), 2),
    **{name: Way(at, repeats=1 + (name[:2] in ("4 ", "10"))) for name, at in _STAGES.items()},
    HYBRID: Way(GROUPS, ((8, True), (8, False)), 2),
    LATE: Way(GROUPS, ((1, False), (11, True))),
    **{name: Way(at, repeats=1 + (at[-1] == 9)) for name, at in (_SLIDING | _EVERY).items()},
}


# -- Stages of PyTorch ----------------------------------------------------------------------------


class TorchStage:
    """Layers of PyTorch as a stage of a pipeline, which learn by SGD with momentum.

    Autograd keeps activations, and refers to the weights: a step that it does not see changes them,
    so a backward pass meets the weights of its own cycle.
    """

    def __init__(self, layers: Sequence[nn.Module], momentum: float, decay: float = 0.0) -> None:
        self.module = nn.Sequential(*layers)
        self._momentum, self._decay = momentum, decay
        self._velocities = [torch.zeros_like(p) for p in self.module.parameters()]

    @property
    def parameters(self) -> list[dict[str, Array]]:
        """Return the parameters of every layer."""
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
        """Take a step of SGD with momentum and weight decay."""
        for p, v, grad in zip(self.module.parameters(), self._velocities, grads, strict=True):
            v.mul_(self._momentum).add_(grad[""]).add_(p.data, alpha=self._decay)
            p.data.sub_(v, alpha=learning_rate)


def _stages(module: nn.Sequential, placement: Placement, *how: float) -> list[TorchStage]:
    layers = list(module)
    return [TorchStage(layers[part], *how) for part in placement.parts]


def network(seed: int) -> nn.Sequential:
    """LeNet-5 with tanh and averages, from other parameters each time."""
    module = lenet5(NETWORKS["tanh and averages, float32"], 1)
    torch.manual_seed(seed)
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("tanh"))
    return module


class _Block(nn.Module):
    """A residual block, whose shortcut has no parameters."""

    def __init__(self, entering: int, channels: int, stride: int) -> None:
        super().__init__()
        self._stride, self._more = stride, channels - entering
        self._inner = nn.Sequential(
            nn.Conv2d(entering, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x[:, :, :: self._stride, :: self._stride]
        around = nn.functional.pad(around, (0, 0, 0, 0, 0, self._more))
        return torch.relu(self._inner(x) + around)


def resnet20(seed: int) -> nn.Sequential:
    """ResNet-20 for CIFAR's images, from other parameters each time: stem, nine blocks, head."""
    torch.manual_seed(seed)
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [_Block(a, b, 1 + (a < b)) for a, b in pairwise(widths)]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(nn.Sequential(*stem), *blocks, nn.Sequential(*head))


def batches(images: Images, count: int, seed: int) -> list[tuple[Array, NDArray[np.int64]]]:
    """Minibatches of all images in random order, again and again."""
    rng, size = np.random.default_rng(seed), len(images.train) // BATCH
    orders = [rng.permutation(len(images.train)) for _ in range(-(-count // size))]
    chosen = [order[k * BATCH : (k + 1) * BATCH] for order in orders for k in range(size)]
    return [(images.train[some], images.train_labels[some]) for some in chosen[:count]]


def folds(images: Images, count: int) -> list[Images]:
    """All images, each once among those to test on."""
    x = np.concatenate([images.train, images.test])
    labels = np.concatenate([images.train_labels, images.test_labels])
    parts = []
    for part in np.array_split(np.arange(len(x)), count):
        rest = np.delete(np.arange(len(x)), part)
        parts.append(Images(images.name, x[rest], labels[rest], x[part], labels[part]))
    return parts


def coloured(images: Images) -> Images:
    """Images of 16×16 with three equal channels."""
    train, test = (np.repeat(x[:, :, ::2, ::2], 3, axis=1) for x in (images.train, images.test))
    return images._replace(train=train, test=test)


def train(
    module: nn.Sequential,
    way: Way,
    images: Images,
    iterations: int,
    seed: int,
    rate: float = RATE,
    decay: float = 0.0,
) -> dict[str, Any]:
    """Train once; the loss and the accuracy on the test images after every twelfth.

    After each phase it also says how training images fare, how far the parameters have moved in
    it, and which share of the outputs of hyperbolic tangents is next to 1 or -1.
    """
    placement = Placement(len(module), way.registers)
    stages = _stages(module, placement, MOMENTUM, decay)
    lengths = [iterations * twelfths // 12 for twelfths, _ in way.phases]
    given = iter(tqdm(batches(images, sum(lengths), seed), leave=False))
    history: dict[str, Any] = {"iterations": [], "loss": [], "accuracy": [], "phases": []}
    done, every = 0, iterations // 12
    for length, (_, piped) in zip(lengths, way.phases, strict=True):
        before = nn.utils.parameters_to_vector(module.parameters()).detach()
        pipeline = Simulation(stages, BATCH, rate, None if piped else 0)
        for k in range(1, length + 1):
            pipeline.step(*next(given))
            if k == length:
                pipeline.drain()
            if (done + k) % every == 0:
                loss, accuracy = _test(module, images.test, images.test_labels)
                for name, value in (("iterations", done + k), ("loss", loss)):
                    history[name].append(value)
                history["accuracy"].append(accuracy)
        done += length
        moved = nn.utils.parameters_to_vector(module.parameters()).detach() - before
        loss, accuracy = _test(module, images.train, images.train_labels)
        history["phases"].append(
            {
                "iterations": done,
                "train_loss": loss,
                "train_accuracy": accuracy,
                "moved": float(moved.norm() / before.norm()),
                "saturated": _saturated(module, images.test),
            }
        )
    return history


def _test(module: nn.Module, x: Array, labels: NDArray[np.int64]) -> tuple[float, float]:
    module.eval()
    with torch.no_grad():
        y, wanted = module(torch.from_numpy(x)), torch.from_numpy(labels)
    module.train()
    right = (y.argmax(1) == wanted).double().mean()
    return nn.functional.cross_entropy(y, wanted).item(), right.item()


def _saturated(module: nn.Sequential, x: Array) -> float | None:
    """Share of the outputs of hyperbolic tangents beyond 0.97, where a slope is below 0.06."""
    y, large, count = torch.from_numpy(x), 0, 0
    with torch.no_grad():
        for layer in module if any(isinstance(one, nn.Tanh) for one in module) else ():
            y = layer(y)
            if isinstance(layer, nn.Tanh):
                large, count = large + int((y.abs() > 0.97).sum()), count + y.numel()
    return large / count if count else None


def check(images: Images, iterations: int) -> Results:
    """Return the operators in the pipeline of ten stages, and PyTorch in the same, by plain SGD.

    Raises
    ------
    AssertionError
        If their losses are further apart than rounding explains.
    """
    module = network(0)
    placement = Placement(LAYERS, GROUPS)
    ops = from_torch(module, (1, SIDE, SIDE))
    pipelines = {
        "sparsescan": Simulation([Stage(ops[part]) for part in placement.parts], BATCH, RATE),
        "torch": Simulation(_stages(module, placement, 0.0), BATCH, RATE),
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


def _pieces(options: Options) -> list[Piece]:
    # Two threads gain next to nothing on layers as small as these.
    torch.set_num_threads(1)
    settings, digits = _settings(options), load_digits()
    parts = folds(digits, settings.folds)

    def runs(name: str, way: Way, one: Callable[[Images, int], Results]) -> Piece:
        def measure() -> Results:
            start = time.perf_counter()
            every = [
                one(images, k * len(parts) + fold)
                for k in range(way.repeats)
                for fold, images in enumerate(parts)
            ]
            taken = time.perf_counter() - start
            phases = [list(each) for each in way.phases]
            return {
                "registers": list(way.registers),
                "phases": phases,
                "runs": every,
                "took": taken,
            }

        return Piece(name, measure)

    def shallow(way: Way, images: Images, seed: int) -> Results:
        return train(network(seed), way, images, settings.iterations, seed)

    def deep(way: Way, rate: float, images: Images, seed: int) -> Results:
        images = coloured(images)
        return train(resnet20(seed), way, images, settings.deep, seed, rate, _DECAY)

    residual = {f"{PLAIN}, rate {rate}": (Way(()), rate) for rate in _RESNET_RATES}
    residual |= {name: (Way(at), _RESNET_RATES[1]) for name, at in _RESNET_STAGES.items()}
    return [
        Piece(CHECK, lambda: check(digits, 12 if options.quick else 50)),
        *(runs(name, way, partial(shallow, way)) for name, way in _WAYS.items()),
        *(runs(_RESNET + name, how[0], partial(deep, *how)) for name, how in residual.items()),
    ]


def _about(options: Options) -> dict[str, Any]:
    settings = _settings(options)
    images = load_digits()
    return {
        "network": "LeNet-5, tanh and averages; ResNet-20; float32, stages by PyTorch",
        "images": f"{images.name}: {len(images.train) + len(images.test)} in {settings.folds} "
        "folds, each of which is tested by networks that train on the others",
        "iterations": settings.iterations,
        "iterations of ResNet-20": settings.deep,
        "batch": BATCH,
        "optimiser": f"SGD, learning rate {RATE}, momentum {MOMENTUM}; ResNet-20: "
        f"{_RESNET_RATES[0]} and pipelined {_RESNET_RATES[1]}, weight decay {_DECAY}",
        "folds": settings.folds,
        "weights of the layers": weights(),
    }


def weights() -> list[int]:
    """Return how many parameters each layer has."""
    return [sum(p.numel() for p in layer.parameters()) for layer in network(0)]


def _drawings(results: Results) -> list[Drawing]:
    pieces = results["pieces"]
    trained = {name: piece for name, piece in pieces.items() if name in _WAYS}
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
    drawings = [diagram, _curves(trained, pieces.get(CHECK), results), _shares(trained, results)]
    residual = {name: piece for name, piece in pieces.items() if name.startswith(_RESNET)}
    return [*drawings, *([_deep(residual, results)] if residual else [])]


def _curves(trained: Results, checked: Results | None, results: Results) -> Drawing:
    figure, panels = drawing.panels(1, 2, 11, 4.4, width_ratios=(3, 2))
    left, right = panels[0]
    shown = {name: trained[name] for name in _STYLES if name in trained}
    for k, (name, piece) in enumerate(shown.items()):
        middle = np.mean([run["accuracy"] for run in piece["runs"]], axis=0)
        left.plot(piece["runs"][0]["iterations"], 100 * middle, label=name, **_STYLES[name])
        ends = _ends(piece)
        color = _STYLES[name]["color"]
        right.plot([min(ends), max(ends)], [k, k], color=color, lw=2, alpha=0.5)
        right.plot(ends, [k] * len(ends), "o", mfc="none", ms=5, color=color)
        right.plot(fmean(ends), k, "o", ms=8, color=color)
    worst = min(fmean(_ends(piece)) for piece in shown.values())
    left.set(xlabel="iteration", ylabel="test accuracy, %", ylim=(min(80, worst - 2), 100))
    right.set(xlabel="test accuracy in the end, %", ylim=(len(shown) - 0.5, -0.5))
    right.set_yticks(range(len(shown)), list(shown))
    for axes in (left, right):
        drawing.plain(axes, "both")
    drawing.legend(figure, [left])
    about = results["about"]
    said = "; ".join(f"{name} {_said(piece)}" for name, piece in shown.items())
    caption = (
        f"LeNet-5 on {about['images']}; means of all runs, in which batches and parameters to "
        "begin with differ (left); all of them, and their range (right). Registers stand behind "
        "the first, the first two, three and four groups of layers. Hybrid training is pipelined "
        f"for two thirds of {about['iterations']} iterations, and goes on without a pipeline for "
        f"as many. Accuracies in the end, with their standard error: {said}.{_losing(shown)} The "
        "paper has "
        f"LeNet-5 on MNIST within {_PAPER_DROP}% of training without a pipeline, after 30,000 "
        f"iterations (Table 2). {_recovery(trained)}"
    )
    if checked:
        ours, theirs = (1e3 * checked["seconds"][name] for name in ("sparsescan", "torch"))
        caption += (
            f" Stages are PyTorch's, which takes {theirs:.1f} ms an iteration; those of the "
            f"operators take {ours:.1f} ms, and their losses are the same within "
            f"{checked['apart']:.1e} over {checked['iterations']} iterations."
        )
    return Drawing("Accuracy of pipelined training", caption, figure)


def _losing(shown: Results) -> str:
    if PLAIN not in shown:
        return ""
    said = [
        f"{name} {_lost(piece, shown[PLAIN])}" for name, piece in shown.items() if name != PLAIN
    ]
    return f" Points lost to {PLAIN} after as many iterations: {'; '.join(said)}."


def _recovery(trained: Results) -> str:
    """Describe what is left to learn after two thirds in a pipeline, and what moves then."""
    if not {PLAIN, HYBRID} <= trained.keys():
        return ""

    def mean(name: str, phase: int, what: str) -> float:
        return fmean(run["phases"][phase][what] for run in trained[name]["runs"])

    return (
        f"Hybrid training has {mean(HYBRID, 0, 'train_accuracy'):.1%} of its training images right "
        f"when the pipeline ends, with a loss of {mean(HYBRID, 0, 'train_loss'):.3f}. Parameters "
        f"have moved by {mean(HYBRID, 0, 'moved'):.0%} of their norm until then, and move by "
        f"{mean(HYBRID, 1, 'moved'):.1%} after it. {mean(HYBRID, 0, 'saturated'):.0%} of the "
        f"hyperbolic tangents are next to ±1 by then and {mean(HYBRID, 1, 'saturated'):.0%} in the "
        f"end, without a pipeline {mean(PLAIN, 0, 'saturated'):.0%}."
    )


def _deep(residual: Results, results: Results) -> Drawing:
    """Test accuracy of ResNet-20 over the iterations."""
    figure, panels = drawing.panels(1, 1, 8, 4)
    axes = panels[0, 0]
    for name, piece in residual.items():
        middle = np.mean([run["accuracy"] for run in piece["runs"]], axis=0)
        label = name.removeprefix(_RESNET)
        axes.plot(piece["runs"][0]["iterations"], 100 * middle, label=label)
    axes.set(xlabel="iteration", ylabel="test accuracy, %")
    drawing.plain(axes, "both")
    drawing.legend(figure, [axes], 2)
    said = "; ".join(f"{name.removeprefix(_RESNET)} {_said(one)}" for name, one in residual.items())
    caption = (
        "ResNet-20 on the digits as 3×16×16, with batch normalisation in training, momentum and "
        f"weight decay; pipelined at a rate of {_RESNET_RATES[1]}. Accuracies after "
        f"{results['about']['iterations of ResNet-20']} iterations: {said}. On CIFAR-10 the paper "
        "loses up to 3.5% with 4 and 6 stages and 8.5% with 8, after 100,000 iterations."
    )
    return Drawing("Pipelined training of ResNet-20", caption, figure)


def _shares(trained: Results, results: Results) -> Drawing:
    """Error over the share of stale weights; weights of the same share have several ages."""
    figure, every = drawing.panels(1, 2, 11, 4.4)
    panels = list(every.flat)
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
            axes.axhline(fmean(measured(trained[PLAIN])), color="black", ls="--", lw=1, label=PLAIN)
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
            middle = [fmean(end) for end in ends]
            spread = [stdev(end) / len(end) ** 0.5 for end in ends]
            style = {"color": color, "marker": marker, "capsize": 3}
            axes.errorbar(shares, middle, spread, label=name, **style)
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
        drawing.plain(axes, "both")
        axes.set_yscale("log")
        drawing.decades(axes.yaxis, "{:.3g}")
    drawing.legend(figure, panels[:1])
    caption = (
        "The paper's Figure 6, for LeNet-5: error and loss over the share of the weights that "
        "are stale, which the last pair of registers decides. Numbers are how many updates the "
        "oldest of them are behind. Marks are means, bars their standard errors. Where the "
        "curves lie on each other the share decides, as the paper found for ResNet-20; where they "
        f"part at the same share, age does. {_ages(trained)}"
    )
    return Drawing("What hurts: how many weights are stale, or how old they are", caption, figure)


def _ages(trained: Results) -> str:
    """Describe what our runs lose by age, at two shares."""
    said = []
    for last in GROUPS[2:]:
        count = GROUPS.index(last) + 1
        names = {
            2: f"one pair, behind layer {last}",
            2 * count: f"{2 * count + 2} stages",
            2 * last: f"every layer up to {last}",
        }
        lost = [
            f"{age} updates behind, {_lost(trained[name], trained[PLAIN])}"
            for age, name in names.items()
            if name in trained and PLAIN in trained
        ]
        if len(lost) == len(names):
            said.append(f"the last registers behind layer {last}, {'; '.join(lost)}")
    return "".join(f" Points lost with {one}." for one in said).strip()


def _ends(piece: Results) -> list[float]:
    return [100 * run["accuracy"][-1] for run in piece["runs"]]


def _errors(piece: Results) -> list[float]:
    return [100 - end for end in _ends(piece)]


def _losses(piece: Results) -> list[float]:
    return [run["loss"][-1] for run in piece["runs"]]


def _said(piece: Results) -> str:
    ends = _ends(piece)
    return f"{fmean(ends):.2f} ± {stdev(ends) / len(ends) ** 0.5:.2f}%"


def _lost(piece: Results, plain: Results) -> str:
    """Describe the mean difference in points between runs on the same images, batch by batch."""
    lost = []
    for one, other in zip(piece["runs"], plain["runs"], strict=False):
        beside = other["accuracy"][len(one["accuracy"]) - 1]
        lost.append(100 * (beside - one["accuracy"][-1]))
    return f"{fmean(lost):.2f} ± {stdev(lost) / len(lost) ** 0.5:.2f}"


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
