"""Figure 6 of the paper: LeNet-5 by the scan and by autograd.

A network is trained by PyTorch's autograd, and by a Blelloch scan over sparse transposed Jacobians,
from the same parameters on the same batches, with the paper's optimiser. A third training is
autograd's with the images of each batch in reverse order, which changes nothing but the rounding.
The run stops if the losses of the scan are further from autograd's than rounding explains.

That is done twice. The network of LeCun et al. (1998) has tanh and averages, so what little float32
rounds off stays little. ReLU and max-pooling, which the paper has Jacobians of, have kinks: where
two entries are all but equal, rounding decides which of them gets all of the gradient, and from
then on two trainings differ by far more than rounding, be they both autograd's. So the network with
these is trained in float64, in which that hardly ever happens.

The images are scikit-learn's handwritten digits scaled up to 32×32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from sparsescan.jacobians import Sequential, from_torch

from . import drawing, networks
from .drawing import ORANGE, SKY, legend
from .experiment import Drawing, Experiment, Piece, Results
from .timing import THREADS

Array = NDArray[Any]

SIDE = 32
TEST_DIGITS = 360
AUTOGRAD, REVERSED, SCAN = "PyTorch autograd", "autograd, batches reversed", "sparsescan"

_RATE, _MOMENTUM = 0.001, 0.9
# Epochs, and the samples of a batch, as in the paper but for a quick run.
_FULL, _QUICK = (60, 256), (2, 32)
_STYLES: dict[str, dict[str, Any]] = {
    AUTOGRAD: {"color": SKY, "lw": 5, "alpha": 0.6},
    SCAN: {"color": ORANGE, "lw": 1.3},
    REVERSED: {"color": "black", "lw": 1.2, "ls": ":"},
}


class LayerTypes(NamedTuple):
    """The layers that LeNet-5 is made of, and its type of numbers."""

    activation: type[nn.Module]
    pool: Callable[[int], nn.Module]
    dtype: torch.dtype


class Images(NamedTuple):
    """Images ``(count, channels, 32, 32)`` and what they show."""

    train: Array
    train_labels: Array
    test: Array
    test_labels: Array


NETWORKS = {
    "tanh and averages, float32": LayerTypes(nn.Tanh, nn.AvgPool2d, torch.float32),
    "ReLU and maxima, float64": LayerTypes(nn.ReLU, nn.MaxPool2d, torch.float64),
}


def lenet5(network: LayerTypes, seed: int = 0) -> nn.Sequential:
    """LeNet-5 for images of 32×32, the same every time."""
    activation, pool, dtype = network
    module = networks.lenet5(activation, pool)
    torch.manual_seed(seed)
    # From PyTorch's own start, hundreds of steps of the paper's size change next to nothing.
    gain = nn.init.calculate_gain(activation.__name__.lower())
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return module.to(dtype)


def load_digits() -> Images:
    """Scikit-learn's handwritten digits, 8×8, each pixel made 4×4."""
    from sklearn.datasets import load_digits as load

    digits = load()
    images = np.kron(digits.images / 16, np.ones((4, 4))).astype(np.float32)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order].astype(np.int64)
    test, train = slice(None, TEST_DIGITS), slice(TEST_DIGITS, None)
    return Images(images[train], labels[train], images[test], labels[test])


# -- Training -------------------------------------------------------------------------------------


def train(
    contender: str, network: LayerTypes, images: Images, epochs: int, batch: int
) -> dict[str, list[float]]:
    """Train a network, from the same parameters on the same batches for all contenders.

    Losses of every iteration on the batch that it learns from, and of every epoch on the test
    images, with the share of these that is recognised.
    """
    trainer = (_Scan if contender == SCAN else _Autograd)(network)
    curves: dict[str, list[float]] = {"train": [], "test": [], "accuracy": []}
    rng = np.random.default_rng(0)
    for _ in tqdm(range(epochs), unit=" epochs", desc=contender, leave=False):
        order = rng.permutation(len(images.train))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            if contender == REVERSED:
                chosen = chosen[::-1]
            loss = trainer.learn(images.train[chosen], images.train_labels[chosen])
            curves["train"].append(loss)
        with torch.no_grad():
            y = trainer.module(trainer.put(images.test))
        curves["test"].append(trainer.loss(y, images.test_labels).item())
        curves["accuracy"].append(float((y.argmax(1).numpy() == images.test_labels).mean()))
    return curves


class _Autograd:
    """A network that learns by PyTorch's back-propagation."""

    def __init__(self, network: LayerTypes) -> None:
        self.dtype = network.dtype
        self.module = lenet5(network)
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=_RATE, momentum=_MOMENTUM)

    def put(self, images: Array) -> torch.Tensor:
        return torch.from_numpy(images).to(self.dtype)

    def loss(self, y: torch.Tensor, labels: Array) -> torch.Tensor:
        return nn.functional.cross_entropy(y, torch.from_numpy(labels))

    def learn(self, images: Array, labels: Array) -> float:
        self.optimiser.zero_grad()
        loss = self.loss(self.module(self.put(images)), labels)
        loss.backward()
        self.optimiser.step()
        return loss.item()


class _Scan(_Autograd):
    """Such a network, whose gradients are a scan over its Jacobians."""

    def __init__(self, network: LayerTypes) -> None:
        super().__init__(network)
        self.net = Sequential(from_torch(self.module, (1, SIDE, SIDE)))
        self.plan = self.net.plan(schedule="blelloch")
        self._values: list[Any] | None = None

    def learn(self, images: Array, labels: Array) -> float:
        activations = self.net.activations(self.put(images).numpy())
        y = torch.as_tensor(activations[-1]).requires_grad_()
        loss = self.loss(y, labels)
        loss.backward()
        self._values = self.net.values(activations, out=self._values)
        assert y.grad is not None
        grads = self.plan.exclusive_scan(y.grad.numpy(), self._values)
        # The operators share the module's parameters, so a step of its optimiser is all it takes.
        layers = self.net.param_grads(activations, grads)
        ours = [grad for layer in layers for grad in layer.values()]
        for parameter, grad in zip(self.module.parameters(), ours, strict=True):
            parameter.grad = torch.as_tensor(grad)
        self.optimiser.step()
        return loss.item()


# -- The experiment -------------------------------------------------------------------------------


def measure(network: LayerTypes, epochs: int, batch: int) -> Results:
    """Train by all contenders; AssertionError if the scan's losses differ by more than rounding."""
    torch.set_num_threads(THREADS)
    images = load_digits()
    curves = {name: train(name, network, images, epochs, batch) for name in _STYLES}
    losses = curves[AUTOGRAD]["train"]
    # Some eps of a loss each time, at random.
    bound = 4 * torch.finfo(network.dtype).eps * max(losses) * len(losses) ** 0.5
    far = difference(curves, SCAN)
    if not far <= bound:
        raise AssertionError(
            f"{SCAN} is wrong: its losses are up to {far:.1e} from autograd's, of which "
            f"rounding explains {bound:.1e}"
        )
    return {"curves": curves, "bound": bound}


def difference(curves: Results, contender: str) -> float:
    """How far the losses of a contender are from autograd's at most, on batches and test images."""
    return max(float(np.abs(_apart(curves, contender, kind)).max()) for kind in ("train", "test"))


def _apart(curves: Results, contender: str, kind: str) -> Array:
    return np.subtract(curves[contender][kind], curves[AUTOGRAD][kind])


def _pieces(quick: bool) -> Iterable[Piece]:
    for name, network in NETWORKS.items():
        yield Piece(name, partial(measure, network, *(_QUICK if quick else _FULL)))


def _about(quick: bool) -> Results:
    epochs, batch = _QUICK if quick else _FULL
    return {
        "images": "digits",
        "epochs": epochs,
        "batch": batch,
        "optimiser": f"SGD, learning rate {_RATE}, momentum {_MOMENTUM}",
    }


def _drawings(results: Results) -> list[Drawing]:
    """Return the curves of both trainings of each network, and how far they are apart."""
    pieces = results["pieces"]
    if not pieces:
        return []
    figure, rows = drawing.panels(len(pieces), 2, 10, 0.5 + 3.2 * len(pieces), sharex="row")
    said = []
    for (loss, apart), (network, piece) in zip(rows, pieces.items(), strict=True):
        curves = piece["curves"]
        iterations = np.arange(1, len(curves[AUTOGRAD]["train"]) + 1)
        for name in (AUTOGRAD, SCAN):
            loss.plot(iterations, curves[name]["train"], label=name, **_STYLES[name])
        for name in (SCAN, REVERSED):
            largest = np.maximum.accumulate(np.abs(_apart(curves, name, "train")))
            apart.plot(iterations, largest, label=name, **_STYLES[name])
        apart.axhline(piece["bound"], color="grey", ls="--", lw=1, label="what rounding explains")
        loss.set(ylabel="train loss", ylim=(0, None), title=network, xlabel="iteration")
        apart.set(ylabel="largest difference so far", yscale="log", xlabel="iteration")
        drawing.plain(loss)
        drawing.plain(apart)
        said.append(
            f"With {network}, the losses of {SCAN} are at most {difference(curves, SCAN):.1e} from "
            f"autograd's, those in reverse order {difference(curves, REVERSED):.1e}; in the end "
            f"{curves[SCAN]['accuracy'][-1]:.1%} of the test images are recognised, by autograd "
            f"{curves[AUTOGRAD]['accuracy'][-1]:.1%}."
        )
    legend(figure, rows[0], handlelength=3)
    caption = (
        f"LeNet-5 on {results['about']['images']}, trained by a Blelloch scan and by PyTorch's "
        "autograd from the same parameters on the same batches: the paper's Figure 6, where the "
        "curves lie on each other as well. The dotted line is a training by autograd with the "
        "images of every batch in reverse order, so it differs by rounding alone. The dashed line "
        "is where the run would have stopped: 4 √n eps times the largest loss, n being the number "
        f"of iterations. {' '.join(said)}"
    )
    return [Drawing("Convergence of LeNet-5", caption, figure)]


EXPERIMENT = Experiment(
    "lenet5", "LeNet-5: does the scan change what is learnt?", _pieces, _about, _drawings
)
