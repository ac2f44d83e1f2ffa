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

The images are CIFAR-10 from a local folder, or scikit-learn's handwritten digits scaled up to
32×32.
"""

from __future__ import annotations

import codecs
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from sparsescan.arrays.arrays import load_cupy
from sparsescan.jacobians import Sequential, from_torch

from . import drawing
from .drawing import ORANGE, SKY, legend
from .experiment import Drawing, Experiment, Options, Piece, Results
from .timing import THREADS

Array = NDArray[Any]

SIDE = 32
TEST_DIGITS = 360
AUTOGRAD, REVERSED, SCAN = "PyTorch autograd", "autograd, batches reversed", "sparsescan"

_RATE, _MOMENTUM = 0.001, 0.9
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


class Settings(NamedTuple):
    """How long a network is trained."""

    epochs: int
    batch: int


class Images(NamedTuple):
    """Images ``(count, channels, 32, 32)`` and what they show."""

    name: str
    train: Array
    train_labels: Array
    test: Array
    test_labels: Array


class Curves(NamedTuple):
    """How a training went.

    Losses of every iteration on the batch that it learns from, and of every epoch on the test
    images, with the share of these that is recognised.
    """

    train: list[float]
    test: list[float]
    accuracy: list[float]


NETWORKS = {
    "tanh and averages, float32": LayerTypes(nn.Tanh, nn.AvgPool2d, torch.float32),
    "ReLU and maxima, float64": LayerTypes(nn.ReLU, nn.MaxPool2d, torch.float64),
}
# The paper's batches, but for a quick run, which has no time for many epochs.
_FULL = {"cifar10": Settings(epochs=10, batch=256), "digits": Settings(epochs=60, batch=256)}
_QUICK = Settings(epochs=2, batch=32)


# -- The networks ---------------------------------------------------------------------------------


def lenet5(network: LayerTypes, channels: int) -> nn.Sequential:
    """LeNet-5 for images of 32×32, the same every time."""
    torch.manual_seed(0)
    activation, pool, dtype = network
    module = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        activation(),
        pool(2),
        nn.Conv2d(6, 16, 5),
        activation(),
        pool(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, 10),
    )
    # From PyTorch's own start, hundreds of steps of the paper's size change next to nothing.
    gain = nn.init.calculate_gain(activation.__name__.lower())
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return module.to(dtype)


def train(
    contender: str, network: LayerTypes, images: Images, settings: Settings, device: str
) -> Curves:
    """Train a network, from the same parameters on the same batches for all contenders."""
    trainer = (_Scan if contender == SCAN else _Autograd)(network, images, device)
    curves = Curves([], [], [])
    rng = np.random.default_rng(0)
    epochs, batch = settings
    for _ in tqdm(range(epochs), unit=" epochs", desc=contender, leave=False):
        order = rng.permutation(len(images.train))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            if contender == REVERSED:
                chosen = chosen[::-1]
            curves.train.append(trainer.learn(images.train[chosen], images.train_labels[chosen]))
        loss, accuracy = trainer.test(images)
        curves.test.append(loss)
        curves.accuracy.append(accuracy)
    return curves


class _Autograd:
    """A network that learns by PyTorch's back-propagation."""

    def __init__(self, network: LayerTypes, images: Images, device: str) -> None:
        self.device = device
        self.dtype = network.dtype
        self.module = lenet5(network, images.train.shape[1]).to(device)
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=_RATE, momentum=_MOMENTUM)

    def put(self, images: Array) -> torch.Tensor:
        return torch.from_numpy(images).to(self.device, self.dtype)

    def loss(self, y: torch.Tensor, labels: Array) -> torch.Tensor:
        return nn.functional.cross_entropy(y, torch.from_numpy(labels).to(self.device))

    def learn(self, images: Array, labels: Array) -> float:
        self.optimiser.zero_grad()
        loss = self.loss(self.module(self.put(images)), labels)
        loss.backward()
        self.optimiser.step()
        return loss.item()

    def test(self, images: Images) -> tuple[float, float]:
        with torch.no_grad():
            y = self.module(self.put(images.test))
            right = y.argmax(1).cpu().numpy() == images.test_labels
            return self.loss(y, images.test_labels).item(), float(right.mean())


class _Scan(_Autograd):
    """Such a network, whose gradients are a scan over its Jacobians."""

    def __init__(self, network: LayerTypes, images: Images, device: str) -> None:
        super().__init__(network, images, device)
        self.xp = load_cupy() if device == "cuda" else np
        self.net = Sequential(from_torch(self.module, images.train.shape[1:]))
        self.plan = self.net.plan(schedule="blelloch")
        self._values: list[Any] | None = None

    def learn(self, images: Array, labels: Array) -> float:
        activations = self.net.activations(self.xp.asarray(self.put(images)))
        y = torch.as_tensor(activations[-1], device=self.device).requires_grad_()
        loss = self.loss(y, labels)
        loss.backward()
        self._values = self.net.values(activations, out=self._values)
        grads = self.plan.exclusive_scan(self.xp.asarray(y.grad), self._values)
        # The operators share the module's parameters, so a step of its optimiser is all it takes.
        layers = self.net.param_grads(activations, grads)
        ours = [grad for layer in layers for grad in layer.values()]
        for parameter, grad in zip(self.module.parameters(), ours, strict=True):
            parameter.grad = torch.as_tensor(grad, device=self.device)
        self.optimiser.step()
        return loss.item()


# -- Images ---------------------------------------------------------------------------------------


def load_images(folder: Path | None) -> Images:
    """CIFAR-10 from its folder, or the digits without one."""
    return load_digits() if folder is None else load_cifar10(folder)


def load_digits() -> Images:
    """Scikit-learn's handwritten digits, 8×8, each pixel made 4×4."""
    from sklearn.datasets import load_digits as load

    digits = load()
    images = np.kron(digits.images / 16, np.ones((4, 4))).astype(np.float32)[:, None]
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order].astype(np.int64)
    test = slice(None, TEST_DIGITS), slice(TEST_DIGITS, None)
    return Images("digits", images[test[1]], labels[test[1]], images[test[0]], labels[test[0]])


def load_cifar10(folder: Path) -> Images:
    """CIFAR-10 (Krizhevsky, 2009) from the folder that its Python archive unpacks to."""
    train = [_cifar_batch(folder / f"data_batch_{k}") for k in range(1, 6)]
    test, test_labels = _cifar_batch(folder / "test_batch")
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return Images("cifar10", images, labels, test, test_labels)


class _Arrays(pickle.Unpickler):
    """Reads nothing but NumPy arrays and what is built in, since a pickle may run anything."""

    _ALLOWED: ClassVar = {
        # NumPy has moved the first of them, which the files know by its old place.
        "_reconstruct": np.empty(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "encode": codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return self._ALLOWED[name]
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR-10 file")


def _cifar_batch(path: Path) -> tuple[Array, Array]:
    with path.open("rb") as file:
        batch = _Arrays(file, encoding="bytes").load()
    images = np.asarray(batch[b"data"], np.float32).reshape(-1, 3, SIDE, SIDE) / 255
    return images, np.asarray(batch[b"labels"], np.int64)


# -- The experiment -------------------------------------------------------------------------------


def _settings(options: Options, images: Images) -> Settings:
    return _QUICK if options.quick else _FULL[images.name]


def _pieces(options: Options) -> list[Piece]:
    torch.set_num_threads(THREADS)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    images = cache(partial(load_images, options.data))

    def piece(network: LayerTypes) -> dict[str, Any]:
        settings = _settings(options, images())
        curves = {
            name: train(name, network, images(), settings, options.device)._asdict()
            for name in _STYLES
        }
        bound = rounding(curves[AUTOGRAD]["train"], torch.finfo(network.dtype).eps)
        apart = difference(curves, SCAN)
        if not apart <= bound:
            raise AssertionError(
                f"{SCAN} is wrong: its losses are up to {apart:.1e} from autograd's, of which "
                f"rounding explains {bound:.1e}"
            )
        return {"curves": curves, "bound": bound}

    return [Piece(name, partial(piece, network)) for name, network in NETWORKS.items()]


def rounding(losses: list[float], eps: float) -> float:
    """How far apart rounding may bring two trainings: some eps of a loss each time, at random."""
    return 4 * eps * max(losses) * len(losses) ** 0.5


def difference(curves: Results, contender: str) -> float:
    """How far the losses of a contender are from autograd's at most, on batches and test images."""
    return max(float(np.abs(_apart(curves, contender, kind)).max()) for kind in ("train", "test"))


def _apart(curves: Results, contender: str, kind: str) -> Array:
    return np.subtract(curves[contender][kind], curves[AUTOGRAD][kind])


def _about(options: Options) -> dict[str, Any]:
    images = load_images(options.data)
    epochs, batch = _settings(options, images)
    return {
        "images": images.name,
        "images to train on": len(images.train),
        "images to test on": len(images.test),
        "epochs": epochs,
        "batch": batch,
        "optimiser": f"SGD, learning rate {_RATE}, momentum {_MOMENTUM}",
    }


def _drawings(results: Results) -> list[Drawing]:
    """Return the curves of both trainings of each network, and how far they are apart."""
    pieces = results["pieces"]
    if not pieces:
        return []
    figure, rows = drawing.panels(len(pieces), 3, 12, 0.5 + 3.2 * len(pieces), sharex="row")
    said = []
    for (train, test, apart), (network, piece) in zip(rows, pieces.items(), strict=True):
        curves = piece["curves"]
        count, epochs = (len(curves[AUTOGRAD][kind]) for kind in ("train", "test"))
        iterations = np.arange(1, count + 1)
        ends = iterations.reshape(epochs, -1)[:, -1]
        for name in (AUTOGRAD, SCAN):
            train.plot(iterations, curves[name]["train"], label=name, **_STYLES[name])
            test.plot(ends, curves[name]["test"], **_STYLES[name])
        for name in (SCAN, REVERSED):
            largest = np.maximum.accumulate(np.abs(_apart(curves, name, "train")))
            apart.plot(iterations, largest, label=name, **_STYLES[name])
        apart.axhline(piece["bound"], color="grey", ls="--", lw=1, label="what rounding explains")
        train.set(ylabel="train loss", ylim=(0, None), title=network)
        test.set(ylabel="test loss", ylim=(0, None))
        apart.set(ylabel="largest difference so far", yscale="log")
        for axes in (train, test, apart):
            axes.set_xlabel("iteration")
            drawing.plain(axes)
        said.append(
            f"With {network}, the losses of {SCAN} are at most {difference(curves, SCAN):.1e} from "
            f"autograd's, those in reverse order {difference(curves, REVERSED):.1e}; in the end "
            f"{curves[SCAN]['accuracy'][-1]:.1%} of the test images are recognised, by autograd "
            f"{curves[AUTOGRAD]['accuracy'][-1]:.1%}."
        )
    legend(figure, [rows[0, 0], rows[0, 2]], handlelength=3)
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
    name="lenet5",
    title="LeNet-5: does the scan change what is learnt?",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=lambda results: [],
)
