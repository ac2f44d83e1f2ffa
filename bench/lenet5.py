"""``python -m bench.lenet5``: Figure 6 of the paper, LeNet-5 by the scan and by autograd.

One network is trained by PyTorch's autograd, one by the scan over sparse transposed Jacobians; both
start from the same parameters and see the same batches, with the paper's optimiser (SGD with
momentum 0.9, batches of 256). A third is trained by autograd with the images of each batch in
reverse order, which changes nothing but the rounding: so far may two equal trainings drift apart.
The images are scikit-learn's handwritten digits scaled up to 32×32, or CIFAR-10 from a local
folder. Writes the losses and the versions as JSON, and draws the curves.
"""

from __future__ import annotations

import argparse
import codecs
import pickle
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from sparsescan.jacobians import Sequential, from_torch

from . import machine
from .peers import THREADS

Array = NDArray[Any]

_RESULTS = Path(__file__).parent / "results"
# The paper's for CIFAR-10; on the digits, of which there are few, it would take all day.
_RATES = {"cifar10": 0.001, "digits": 0.005}
SIDE = 32
TEST_DIGITS = 360


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


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    machine.pin()
    commit = machine.commit()  # now: it is what has been imported
    torch.set_num_threads(THREADS)
    images = load_cifar10(options.cifar10) if options.cifar10 else load_digits()
    batch = min(options.batch, len(images.train))
    rate = options.rate or _RATES[images.name]
    found = run(images, options.epochs, batch, rate)
    differences = {
        name: {kind: _largest_difference(found, name, kind) for kind in Losses._fields}
        for name in ("scan", "reversed")
    }
    results = {
        "images": images.name,
        "epochs": options.epochs,
        "batch": batch,
        "learning_rate": rate,
        "largest_difference_from_autograd": differences,
        "losses": {name: losses._asdict() for name, losses in found.items()},
    }
    prefix = f"lenet5-{images.name}"
    path = machine.write(options.output, prefix, "bench.lenet5", commit, results)
    draw(found, images.name, path.with_suffix(".png"))
    for name, losses in found.items():
        print(f"{name:<9} train loss {losses.train[-1]:.4f}, test loss {losses.test[-1]:.4f}")
    print(f"largest difference of a loss from autograd's: {differences}; written to {path}")
    return 0


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


def run(images: Images, epochs: int, batch: int, rate: float, seed: int = 0) -> dict[str, Losses]:
    """Train both; the losses of each by its name."""
    trainers = {
        "autograd": _Autograd(images, rate, seed),
        "scan": _Scan(images, rate, seed),
        "reversed": _Autograd(images, rate, seed),
    }
    found = {name: Losses([], []) for name in trainers}
    rng = np.random.default_rng(seed)
    for _ in tqdm(range(epochs), unit=" epochs"):
        order = rng.permutation(len(images.train))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            for name, trainer in trainers.items():
                order_of = chosen[::-1] if name == "reversed" else chosen
                loss = trainer.learn(images.train[order_of], images.train_labels[order_of])
                found[name].train.append(loss)
        for name, trainer in trainers.items():
            found[name].test.append(trainer.test_loss(images))
    return found


def _largest_difference(found: dict[str, Losses], name: str, kind: str) -> float:
    """How far a loss is from autograd's at most."""
    losses = [getattr(found[which], kind) for which in (name, "autograd")]
    return float(np.abs(np.subtract(*losses)).max())


class _Autograd:
    """A network that learns by PyTorch's back-propagation."""

    def __init__(self, images: Images, rate: float, seed: int) -> None:
        self.module = lenet5(images.train.shape[1], seed)
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=rate, momentum=0.9)

    def learn(self, x: Array, labels: Array) -> float:
        self.optimiser.zero_grad()
        loss = nn.functional.cross_entropy(
            self.module(torch.from_numpy(x)), torch.from_numpy(labels)
        )
        loss.backward()
        self.optimiser.step()
        return loss.item()

    def test_loss(self, images: Images) -> float:
        with torch.no_grad():
            y = self.module(torch.from_numpy(images.test))
            return float(nn.functional.cross_entropy(y, torch.from_numpy(images.test_labels)))


class _Scan(_Autograd):
    """The same network, whose gradients are a scan over its Jacobians."""

    def __init__(self, images: Images, rate: float, seed: int) -> None:
        super().__init__(images, rate, seed)
        self.net = Sequential(from_torch(self.module, images.train.shape[1:]))
        self.plan = self.net.plan()
        self._values: list[Any] | None = None

    def learn(self, x: Array, labels: Array) -> float:
        activations = self.net.activations(x)
        y = torch.from_numpy(activations[-1]).requires_grad_()
        loss = nn.functional.cross_entropy(y, torch.from_numpy(labels))
        loss.backward()
        self._values = self.net.values(activations, out=self._values)
        grads = self.plan.exclusive_scan(y.grad.numpy(), self._values)
        # The operators share the module's parameters, so a step of its optimiser is all it takes.
        found = self.net.param_grads(activations, grads)
        ours = [grad for layer in found for grad in layer.values()]
        for parameter, grad in zip(self.module.parameters(), ours, strict=True):
            parameter.grad = torch.from_numpy(grad)
        self.optimiser.step()
        return loss.item()


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


def draw(found: dict[str, Losses], name: str, path: Path) -> None:
    """Training and test losses, the curves of the one over those of the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    per_epoch = len(found["scan"].train) // len(found["scan"].test)
    styles = {
        "autograd": {"color": "tab:blue", "lw": 5, "alpha": 0.5, "label": "PyTorch autograd"},
        "reversed": {"color": "black", "lw": 1, "ls": ":", "label": "autograd, batches reversed"},
        "scan": {"color": "tab:orange", "lw": 1.3, "label": "sparsescan"},
    }
    for axes, kind in zip(figure.subplots(1, 2), Losses._fields, strict=True):
        for contender, style in styles.items():
            losses = getattr(found[contender], kind)
            every = per_epoch if kind == "test" else 1
            axes.plot(every * np.arange(1, len(losses) + 1), losses, **style)
        axes.set(xlabel="iteration", ylabel=f"{kind} loss", ylim=(0, None))
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"LeNet-5 on {name}, by the scan and by autograd (Figure 6 of the paper)")
    figure.savefig(path, dpi=120)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.lenet5", description=__doc__)
    parser.add_argument("--epochs", type=int, default=60, help="passes over the images (60)")
    parser.add_argument("--batch", type=int, default=256, help="images of a batch (256)")
    parser.add_argument(
        "--rate", type=float, help="learning rate (0.001 on CIFAR-10, 0.005 on digits)"
    )
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER", help="cifar-10-batches-py")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder (bench/results)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
