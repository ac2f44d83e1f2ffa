"""Pipelined training with stale weights, as Zhang and Abdelrahman (2021) simulate it.

Their Table 2, Table 4 and Figure 6 on scikit-learn's handwritten digits: the accuracy of LeNet-5 in
pipelines of 4 to 10 stages, in hybrid training, and over the share of the weights that are stale,
for weights of different ages; and of ResNet-20, with batch normalisation, momentum and weight
decay. Digits are cut into folds, each of which is tested by networks that train on the others, so
that every image counts.

Stages are run by PyTorch, since thousands of iterations are needed; a test shows that it learns
what the operators of sparsescan learn in the same pipeline. One simulation says for both which
weights are used when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from sparsescan.strategies.pipeline import Placement

from . import drawing
from .experiment import Drawing, Experiment, Piece, Results, Table
from .lenet5 import NETWORKS, Images, lenet5, load_digits
from .networks import Block, normalised
from .stale_weights import Simulation

Array = NDArray[Any]

# Behind which layers of LeNet-5 the paper's pipelines have registers: one pair more each time, from
# the front on, behind the five groups of layers that have weights.
GROUPS = (3, 6, 9, 11)
LAYERS, BATCH, RATE, MOMENTUM = 12, 32, 0.01, 0.9
PLAIN = "not pipelined"
# ResNet-20 (appendix A): rates without a pipeline and with one, and the weight decay. Registers
# stand behind blocks, which the paper's layers 7; 3, 5, 7; and about 5, 12, 17 end.
_RESNET, _RATES, _DECAY = "ResNet-20, ", (0.1, 0.01), 1e-4
TANH = NETWORKS["tanh and averages, float32"]


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
# Those whose differences are told are repeated from other parameters. Training without a pipeline
# goes on for as long as hybrid training does. At the end are those with one share of stale weights,
# whose registers are behind the last of these layers only, or behind every layer up to it.
_WAYS = {
    PLAIN: Way((), ((16, False),), 2),
    "4 stages": Way(GROUPS[:1], repeats=2),
    "6 stages": Way(GROUPS[:2]),
    "8 stages": Way(GROUPS[:3]),
    "10 stages": Way(GROUPS, repeats=2),
    "10 stages, hybrid": Way(GROUPS, ((8, True), (8, False)), 2),
    "10 stages, after 1/12 without": Way(GROUPS, ((1, False), (11, True))),
    "one pair, behind layer 9": Way((9,), repeats=2),
    "one pair, behind layer 11": Way((11,)),
    "every layer up to 9": Way(tuple(range(1, 10)), repeats=2),
    "every layer up to 11": Way(tuple(range(1, 12))),
}
_DEEP = {
    **{f"{PLAIN}, rate {rate}": (Way(()), rate) for rate in _RATES},
    "4 stages, layer 7": (Way((4,)), _RATES[1]),
    "8 stages, layers 3, 5, 7": (Way((2, 3, 4)), _RATES[1]),
    "8 stages, layers 5, 13, 17": (Way((3, 7, 9)), _RATES[1]),
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


def stages_of(module: nn.Sequential, placement: Placement, *how: float) -> list[TorchStage]:
    layers = list(module)
    return [TorchStage(layers[part], *how) for part in placement.parts]


class _Padded(nn.Module):
    """A shortcut without parameters: every other pixel, and channels of zeros."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self._more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self._more))


def resnet20(seed: int) -> nn.Sequential:
    """ResNet-20 for CIFAR's images, from other parameters each time: stem, nine blocks, head."""
    torch.manual_seed(seed)
    widths = [16] * 4 + [32] * 3 + [64] * 3
    shortcuts = [_Padded(b - a) if a < b else nn.Identity() for a, b in pairwise(widths)]
    blocks = [
        nn.Sequential(Block(*pair, shortcut), nn.ReLU())
        for pair, shortcut in zip(pairwise(widths), shortcuts, strict=True)
    ]
    stem = *normalised(nn.Conv2d(3, 16, 3, padding=1, bias=False)), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(nn.Sequential(*stem), *blocks, nn.Sequential(*head))


# -- Training -------------------------------------------------------------------------------------


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
        parts.append(Images(x[rest], labels[rest], x[part], labels[part]))
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
    stages = stages_of(module, Placement(len(module), way.registers), MOMENTUM, decay)
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
                for name, value in zip(history, (done + k, loss, accuracy), strict=False):
                    history[name].append(value)
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


# -- The experiment -------------------------------------------------------------------------------


def _measure(way: Way, parts: int, one: Callable[[Images, int], Results]) -> Results:
    # Two threads gain next to nothing on layers as small as these.
    torch.set_num_threads(1)
    start, images = time.perf_counter(), folds(load_digits(), parts)
    runs = [one(images[k % parts], k) for k in range(way.repeats * parts)]
    taken, phases = time.perf_counter() - start, [list(each) for each in way.phases]
    return {"registers": list(way.registers), "phases": phases, "runs": runs, "took": taken}


def _pieces(quick: bool) -> Iterable[Piece]:
    settings = _QUICK if quick else _FULL

    def shallow(way: Way, images: Images, seed: int) -> Results:
        return train(lenet5(TANH, seed), way, images, settings.iterations, seed)

    def deep(way: Way, rate: float, images: Images, seed: int) -> Results:
        given = coloured(images), settings.deep, seed, rate, _DECAY
        return train(resnet20(seed), way, *given)

    for name, way in _WAYS.items():
        yield Piece(name, partial(_measure, way, settings.folds, partial(shallow, way)))
    for name, (way, rate) in _DEEP.items():
        run = partial(_measure, way, settings.folds, partial(deep, way, rate))
        yield Piece(_RESNET + name, run)


def _about(quick: bool) -> Results:
    settings = _QUICK if quick else _FULL
    return {
        "network": "LeNet-5, tanh and averages; ResNet-20; float32, stages by PyTorch",
        "images": f"digits: all in {settings.folds} folds, each of which is tested by networks "
        "that train on the others",
        "iterations": settings.iterations,
        "iterations of ResNet-20": settings.deep,
        "batch": BATCH,
        "optimiser": f"SGD, learning rate {RATE}, momentum {MOMENTUM}; ResNet-20: {_RATES[0]} and "
        f"pipelined {_RATES[1]}, weight decay {_DECAY}",
        "folds": settings.folds,
    }


def _drawings(results: Results) -> list[Drawing]:
    """Draw the accuracy of all runs over the iterations: of LeNet-5, and of ResNet-20."""
    trained = {name: piece for name, piece in results["pieces"].items() if "runs" in piece}
    if not trained:
        return []
    figure, [panels] = drawing.panels(1, 2, 12, 5)
    for axes, is_deep in zip(panels, (False, True), strict=True):
        for name, piece in trained.items():
            if name.startswith(_RESNET) == is_deep:
                middle = np.mean([run["accuracy"] for run in piece["runs"]], axis=0)
                label = name.removeprefix(_RESNET)
                axes.plot(piece["runs"][0]["iterations"], 100 * middle, label=label)
        axes.set(xlabel="iteration", ylabel="test accuracy, %")
        axes.set_title("ResNet-20" if is_deep else "LeNet-5", fontsize="medium")
        axes.legend(frameon=False, fontsize="small", loc="lower right")
        drawing.plain(axes, "both")
    caption = (
        "LeNet-5 and ResNet-20 on handwritten digits: means of all runs, in which batches and "
        "parameters to begin with differ. Registers stand behind the first, the first two, three "
        "and four groups of layers. Hybrid training is pipelined for two thirds of the iterations, "
        "and goes on without a pipeline for as many. The paper has LeNet-5 on MNIST within 0.5% of "
        "training without a pipeline (Table 2), and ResNet-20 on CIFAR-10 within 3.5% with 4 and 6 "
        "stages and 8.5% with 8."
    )
    return [Drawing("Accuracy of pipelined training", caption, figure)]


def _tables(results: Results) -> list[Table]:
    """Return accuracies in the end, what is lost, and what the last phase of a pipeline found."""
    pieces = results["pieces"]
    plain, deep = pieces.get(PLAIN), pieces.get(f"{_RESNET}{PLAIN}, rate {_RATES[1]}")
    rows = []
    for name, piece in pieces.items():
        if "runs" not in piece:
            continue
        beside = deep if name.startswith(_RESNET) else plain
        ends = [100 * run["accuracy"][-1] for run in piece["runs"]]
        first = [run["phases"][0] for run in piece["runs"]]
        tanh = [each["saturated"] for each in first if each["saturated"] is not None]
        is_plain = PLAIN in name or beside is None
        moved = f"{fmean(each['moved'] for each in first):.0%}"
        saturated = f"{fmean(tanh):.0%}" if tanh else ""
        lost = "" if is_plain else _lost(piece, beside)
        rows.append([name, str(len(ends)), _mean(ends), lost, moved, saturated])
    heads = ["training", "runs", "right in the end, %", "points lost"]
    heads += ["parameters moved in the first phase", "tangents next to ±1 after it"]
    return [Table(heads, rows, heads[1:2])]


def _mean(values: list[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values) / len(values) ** 0.5:.2f}"


def _lost(piece: Results, plain: Results) -> str:
    """Describe the mean difference in points between runs on the same images, batch by batch."""
    lost = []
    for one, other in zip(piece["runs"], plain["runs"], strict=False):
        beside = other["accuracy"][len(one["accuracy"]) - 1]
        lost.append(100 * (beside - one["accuracy"][-1]))
    return _mean(lost)


EXPERIMENT = Experiment(
    "pipeline",
    "Pipelined training with stale weights",
    _pieces,
    _about,
    _drawings,
    tables=_tables,
)
