"""Figure 6 of the paper: LeNet-5 by the scan and by autograd.

One network is trained by PyTorch's autograd, one by the scan over sparse transposed Jacobians; both
start from the same parameters and see the same batches, with the paper's optimiser (SGD with
momentum 0.9, batches of 256). A third is trained by autograd with the images of each batch in
reverse order, which changes nothing but the rounding: so far may two equal trainings drift apart.
The images are CIFAR-10 from a local folder, or scikit-learn's handwritten digits scaled up to
32×32.
"""

from __future__ import annotations

import codecs
import pickle
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from sparsescan._arrays import load_cupy
from sparsescan.jacobians import Sequential, from_torch

from .experiment import Drawing, Experiment, Options, Piece, Results
from .peers import THREADS

Array = NDArray[Any]

SIDE = 32
TEST_DIGITS = 360
AUTOGRAD, REVERSED, SCAN = "PyTorch autograd", "autograd, batches reversed", "sparsescan"

_BATCH, _MOMENTUM = 256, 0.9
# The paper's for CIFAR-10; on the digits, of which there are few, it would take all day.
_RATES = {"cifar10": 0.001, "digits": 0.005}
_EPOCHS = 60
# A quick run has no time for small steps.
_QUICK_EPOCHS, _QUICK_RATE = 28, 0.01
# Colours that everybody can tell apart (Okabe and Ito, 2008).
_STYLES: dict[str, dict[str, Any]] = {
    AUTOGRAD: {"color": "#56b4e9", "lw": 5, "alpha": 0.6},
    SCAN: {"color": "#d55e00", "lw": 1.3},
    REVERSED: {"color": "black", "lw": 1.2, "ls": ":"},
}


class Images(NamedTuple):
    """Images ``(count, channels, 32, 32)`` and what they show."""

    name: str
    train: Array
    train_labels: Array
    test: Array
    test_labels: Array


class Losses(NamedTuple):
    """Losses of every iteration on the batch it learns from, and of every epoch on test images."""

    train: list[float]
    test: list[float]


# -- The networks ---------------------------------------------------------------------------------


def lenet5(channels: int, seed: int) -> nn.Sequential:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling, for images of 32×32."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def train(
    contender: str, images: Images, epochs: int, rate: float, device: str = "cpu", seed: int = 0
) -> Losses:
    """Train one network; equal seeds are equal parameters and batches."""
    trainer = (_Scan if contender == SCAN else _Autograd)(images, rate, device, seed)
    found = Losses([], [])
    rng = np.random.default_rng(seed)
    batch = min(_BATCH, len(images.train))
    for _ in tqdm(range(epochs), unit=" epochs", desc=contender, leave=False):
        order = rng.permutation(len(images.train))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            if contender == REVERSED:
                chosen = chosen[::-1]
            found.train.append(trainer.learn(images.train[chosen], images.train_labels[chosen]))
        found.test.append(trainer.test_loss(images))
    return found


class _Autograd:
    """A network that learns by PyTorch's back-propagation."""

    def __init__(self, images: Images, rate: float, device: str, seed: int) -> None:
        self.device = device
        self.module = lenet5(images.train.shape[1], seed).to(device)
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=rate, momentum=_MOMENTUM)

    def put(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def learn(self, x: Array, labels: Array) -> float:
        self.optimiser.zero_grad()
        loss = nn.functional.cross_entropy(self.module(self.put(x)), self.put(labels))
        loss.backward()
        self.optimiser.step()
        return loss.item()

    def test_loss(self, images: Images) -> float:
        with torch.no_grad():
            y = self.module(self.put(images.test))
            return float(nn.functional.cross_entropy(y, self.put(images.test_labels)))


class _Scan(_Autograd):
    """The same network, whose gradients are a scan over its Jacobians."""

    def __init__(self, images: Images, rate: float, device: str, seed: int) -> None:
        super().__init__(images, rate, device, seed)
        self.xp = load_cupy() if device == "cuda" else np
        self.net = Sequential(from_torch(self.module, images.train.shape[1:]))
        self.plan = self.net.plan()
        self._values: list[Any] | None = None

    def learn(self, x: Array, labels: Array) -> float:
        activations = self.net.activations(self.xp.asarray(x))
        y = torch.as_tensor(activations[-1], device=self.device).requires_grad_()
        loss = nn.functional.cross_entropy(y, self.put(labels))
        loss.backward()
        self._values = self.net.values(activations, out=self._values)
        grads = self.plan.exclusive_scan(self.xp.asarray(y.grad), self._values)
        # The operators share the module's parameters, so a step of its optimiser is all it takes.
        found = self.net.param_grads(activations, grads)
        ours = [grad for layer in found for grad in layer.values()]
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


def _epochs_and_rate(options: Options, images: Images) -> tuple[int, float]:
    return (_QUICK_EPOCHS, _QUICK_RATE) if options.quick else (_EPOCHS, _RATES[images.name])


def _pieces(options: Options) -> list[Piece]:
    torch.set_num_threads(THREADS)
    images = cache(partial(load_images, options.data))

    def piece(contender: str) -> dict[str, Any]:
        epochs, rate = _epochs_and_rate(options, images())
        return train(contender, images(), epochs, rate, options.device)._asdict()

    return [Piece(contender, partial(piece, contender)) for contender in _STYLES]


def _about(options: Options) -> dict[str, Any]:
    images = load_images(options.data)
    epochs, rate = _epochs_and_rate(options, images)
    return {
        "images": images.name,
        "images to train on": len(images.train),
        "images to test on": len(images.test),
        "epochs": epochs,
        "batch": min(_BATCH, len(images.train)),
        "optimiser": f"SGD, momentum {_MOMENTUM}",
        "learning rate": rate,
        "dtype": "float32",
    }


def differences(pieces: Results, contender: str, kind: str) -> Array:
    """How far the losses of a contender are from autograd's."""
    ours, theirs = (pieces[name][kind] for name in (contender, AUTOGRAD))
    return np.abs(np.subtract(ours, theirs))


def _drawings(results: Results) -> list[Drawing]:
    """The curves of the one over those of the other, and how far they are apart."""
    from matplotlib.figure import Figure

    pieces = {name: results["pieces"][name] for name in _STYLES if name in results["pieces"]}
    if not pieces:
        return []
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    *curves, apart = figure.subplots(1, 3)
    for axes, kind in zip(curves, Losses._fields, strict=True):
        for name, losses in pieces.items():
            label = name if kind == "train" else None
            axes.plot(_iterations(losses, kind), losses[kind], label=label, **_STYLES[name])
        axes.set(xlabel="iteration", ylabel=f"{kind} loss", ylim=(0, None))
    caption = (
        f"LeNet-5 on {results['about']['images']}, trained by the scan and by PyTorch's autograd "
        "from the same parameters on the same batches: the paper's Figure 6, where the curves lie "
        "on each other as well. The dotted training is autograd's with the images of every batch "
        "in reverse order, so it differs by rounding alone, and training makes that grow as well."
    )
    others = [name for name in (SCAN, REVERSED) if name in pieces and AUTOGRAD in pieces]
    for name in others:
        found = differences(pieces, name, "train")
        apart.plot(np.maximum.accumulate(found), **_STYLES[name])
        caption += f" Train losses, {name} and autograd: {found.max():.1e} apart at most."
    if others:
        rounding = np.spacing(np.array(pieces[AUTOGRAD]["train"], np.float32))
        apart.plot(rounding, color="grey", ls="--", lw=1, label="spacing of float32 at the loss")
        apart.set(xlabel="iteration", ylabel="largest difference so far", yscale="log")
    else:
        apart.set_axis_off()
    for axes in (*curves, apart):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, handlelength=3)
    return [Drawing("Convergence of LeNet-5", caption, figure)]


def _iterations(losses: dict[str, list[float]], kind: str) -> Array:
    """After which iteration each loss was."""
    per_epoch = len(losses["train"]) // len(losses["test"])
    every = per_epoch if kind == "test" else 1
    return every * np.arange(1, len(losses[kind]) + 1)


EXPERIMENT = Experiment(
    name="lenet5",
    title="LeNet-5: does the scan change what is learnt?",
    pieces=_pieces,
    about=_about,
    drawings=_drawings,
    rows=lambda results: [],
)
