"""A recurrent network learns to read digits, its backward pass through time a scan.

The network reads an image pixel by pixel, and a linear layer reads its last hidden state:

    h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh),        t = 1, …, 64,  h_0 = 0.

The transposed Jacobian of step ``t`` is ``W_hhᵀ diag(1 - h_t²)``, so back-propagation through time
is the exclusive scan of ``[∇h_64, J_64, …, J_1]``. One model is trained with the scan, a second one
with the loop that one would write in NumPy, from the same start and on the same batches.

``sparsescan demo`` calls :func:`run`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsescan import InputError, ScanPlan, Schedule, plan
from sparsescan.jacobians import Linear, RNNCell

__all__ = ["STEPS", "Figures", "run"]

STEPS = 64  # pixels of an image
CLASSES = 10
TEST_IMAGES = 360
LEARNING_RATE = 1e-3  # falls linearly to 0; with much more, rounding drives two equal runs apart
CLIP = 1.0  # largest norm of a gradient

Array = NDArray[np.floating[Any]]
Labels = NDArray[np.integer[Any]]


class Data(NamedTuple):
    """Images ``(count, STEPS)`` with pixels from 0 to 1, and the digits that they show."""

    train_images: Array
    train_labels: Labels
    test_images: Array
    test_labels: Labels


@dataclass(frozen=True)
class Figures:
    """Times, losses and accuracies of a run.

    Attributes
    ----------
    schedule : str
        The schedule that ran.
    batches : int
        Backward passes that were timed, for each model.
    jacobians_ms, scan_ms, sequential_ms : float
        Median milliseconds of computing the Jacobians of a batch, of scanning them, and of the
        sequential loop that gives the same gradients.
    gradient_difference : float
        Largest difference between the two gradients of a parameter on the same activations,
        relative to the largest entry of that parameter's gradient; over the whole training.
    scan_losses, sequential_losses : list of float
        Mean training loss of every epoch.
    scan_accuracy, sequential_accuracy : float
        Share of the test images, none of them used in training, that are read correctly.
    seconds : float
        Duration of the run, compilation included.
    """

    schedule: str
    batches: int
    jacobians_ms: float
    scan_ms: float
    sequential_ms: float
    gradient_difference: float
    scan_losses: list[float]
    sequential_losses: list[float]
    scan_accuracy: float
    sequential_accuracy: float
    seconds: float

    def __str__(self) -> str:
        total = self.jacobians_ms + self.scan_ms
        rows = [
            ("", "scan", "sequential"),
            ("backward pass through time, ms", f"{total:.3f}", f"{self.sequential_ms:.3f}"),
            ("    computing the Jacobians", f"{self.jacobians_ms:.3f}", "-"),
            ("    the scan alone", f"{self.scan_ms:.3f}", "-"),
            ("largest relative gradient difference", f"{self.gradient_difference:.1e}", ""),
            (
                "train loss, last epoch",
                f"{self.scan_losses[-1]:.4f}",
                f"{self.sequential_losses[-1]:.4f}",
            ),
            ("test accuracy", f"{self.scan_accuracy:.1%}", f"{self.sequential_accuracy:.1%}"),
        ]
        return "\n".join(f"{name:<38}{scan:>10}{loop:>12}".rstrip() for name, scan, loop in rows)


def load_data(seed: int) -> Data:
    """Return scikit-learn's handwritten digits, shuffled, with a part kept back for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images.reshape(-1, STEPS) / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Data(images[train], digits.target[train], images[test], digits.target[test])


class Model:
    """A recurrent cell and a linear layer whose parameters are views of one vector.

    Parameters
    ----------
    hidden : int
        Size of the hidden state.
    rng : numpy.random.Generator
        Source of the initial parameters.
    dtype : {float32, float64}, default float32
        Dtype of all arrays.
    """

    def __init__(
        self, hidden: int, rng: np.random.Generator, dtype: type[np.floating[Any]] = np.float32
    ) -> None:
        self.cell = RNNCell(1, hidden)
        self.readout = Linear(hidden, CLASSES)
        initial = {
            "weight_ih": rng.uniform(-1, 1, (hidden, 1)),
            "weight_hh": np.linalg.qr(rng.standard_normal((hidden, hidden)))[0],
            "weight": rng.standard_normal((CLASSES, hidden)) / np.sqrt(hidden),
        }
        layers = self.cell, self.readout
        size = sum(array.size for layer in layers for array in layer.params.values())
        self.vector = np.zeros(size, dtype)
        start = 0
        for layer in layers:
            for name, array in layer.params.items():
                view = self.vector[start : start + array.size].reshape(array.shape)
                view[...] = initial.get(name, 0)
                setattr(layer, name, view)
                start += array.size
        self.losses: list[float] = []

    def begin(self, images: Array, labels: Labels) -> None:
        """Do everything of a pass but the way back through time."""
        x = images.T[:, :, None]
        self.states = self.cell.unroll(x)
        self.slopes = 1 - self.states[1:] ** 2
        self.steps = self.cell.linearize(x, self.states[:-1])
        loss, self.logit_grads = cross_entropy(self.readout.forward(self.states[-1]), labels)
        self.last_grad = self.logit_grads @ self.readout.weight
        self.losses.append(loss)

    def jacobians(self, out: Array | None = None) -> Array:
        """Return the values of every transposed Jacobian, in the order of time."""
        return np.asarray(self.steps.values(out=out))

    def scan_backward(self, scan: ScanPlan, jacobians: Array) -> Array:
        """Return the gradients of ``h_1, …, h_64``, by a scan in the order of time."""
        return np.asarray(scan.exclusive_scan(self.last_grad, jacobians))

    def sequential_backward(self) -> Array:
        """Return the gradients of ``h_1, …, h_64`` step by step, which needs no Jacobians."""
        grads: Array = np.empty_like(self.slopes)
        grads[-1] = self.last_grad
        scratch = np.empty_like(self.last_grad)
        for t in range(len(grads) - 1, 0, -1):
            np.multiply(grads[t], self.slopes[t], out=scratch)
            np.matmul(scratch, self.cell.weight_hh, out=grads[t - 1])
        return grads

    def param_grads(self, state_grads: Array) -> list[Array]:
        """Return the gradient of every parameter, in the order of the vector."""
        of_cell = self.steps.param_grads(state_grads)
        of_readout = self.readout.param_grads(self.states[-1], self.logit_grads)
        return [*of_cell.values(), *of_readout.values()]

    def accuracy(self, images: Array, labels: Labels) -> float:
        """Return the share of images that are read correctly."""
        logits = self.readout.forward(self.cell.unroll(images.T[:, :, None])[-1])
        return float((logits.argmax(axis=1) == labels).mean())


def cross_entropy(logits: Array, labels: Labels) -> tuple[float, Array]:
    """Return the mean loss of a batch, and its gradient in the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    grad = np.exp(log_probabilities)
    grad[rows, labels] -= 1
    return -float(log_probabilities[rows, labels].mean()), grad / len(labels)


class Adam:
    """Adam (Kingma and Ba, 2015) on one vector, with the gradient clipped in norm."""

    def __init__(self, size: int) -> None:
        self._mean = np.zeros(size, np.float32)
        self._square = np.zeros(size, np.float32)
        self._steps = 0

    def update(self, vector: Array, grad: Array, rate: float) -> None:
        """Take a step, in place."""
        grad = grad * min(1.0, CLIP / max(float(np.linalg.norm(grad)), 1e-12))
        self._steps += 1
        self._mean += 0.1 * (grad - self._mean)
        self._square += 0.001 * (grad * grad - self._square)
        mean = self._mean / (1 - 0.9**self._steps)
        square = self._square / (1 - 0.999**self._steps)
        vector -= rate * mean / (np.sqrt(square) + 1e-8)


def run(
    *,
    hidden: int = 20,
    epochs: int = 100,
    batch: int = 16,
    schedule: Schedule | str = "auto",
    device: str | None = None,
    output: str | os.PathLike[str] = "demo.png",
    seed: int = 0,
) -> Figures:
    """Train the two models, print a table, and draw both loss curves.

    Parameters
    ----------
    hidden : int, default 20
        Size of the hidden state.
    epochs : int, default 100
        Passes over the training images.
    batch : int, default 16
        Images of a batch. Each epoch shuffles the images anew and leaves out the few that do not
        fill a batch.
    schedule : Schedule or str, default "auto"
        How the scan combines the Jacobians of the 64 steps.
    device : {None, "cpu", "cuda"}, optional
        Where the scan runs.
    output : str or path-like, default "demo.png"
        The PNG file to write.
    seed : int, default 0
        Seed of the split into training and test images, the initial parameters and the batches.

    Returns
    -------
    Figures
        The printed figures.

    Raises
    ------
    ImportError
        If matplotlib, scikit-learn or tqdm is missing: ``pip install 'sparsescan[demo]'``.
    InputError, InputTypeError, DeviceError
        If an option is wrong.
    OSError
        If `output` cannot be written.
    """
    start = time.perf_counter()
    from tqdm import tqdm

    data = load_data(seed)
    if batch > len(data.train_images):
        raise InputError(f"batch is {batch}; expected at most {len(data.train_images)}, all images")
    by_scan, by_loop = (Model(hidden, np.random.default_rng(seed)) for _ in range(2))
    scan = plan(
        [by_scan.cell.pattern] * STEPS,
        reverse=True,
        schedule=schedule,
        batch=batch,
        dtype=np.float32,
        device=device,
    )
    per_epoch = len(data.train_images) // batch
    race = _Race(scan, by_scan, by_loop, batch)
    with tqdm(total=epochs * per_epoch, unit=" batches", desc="compiling", mininterval=0.5) as bar:
        race.warm_up(data.train_images[:batch], data.train_labels[:batch])
        bar.set_description("training")
        for done, (images, labels) in enumerate(_batches(data, batch, epochs, seed)):
            race.step(images, labels, LEARNING_RATE * (1 - done / bar.total))
            bar.update()
    jacobians_ms, scan_ms, sequential_ms = np.median(race.times, axis=0) * 1e3
    figures = Figures(
        schedule=str(scan.schedule),
        batches=len(race.times),
        jacobians_ms=float(jacobians_ms),
        scan_ms=float(scan_ms),
        sequential_ms=float(sequential_ms),
        gradient_difference=max(race.differences),
        scan_losses=_means(by_scan.losses, per_epoch),
        sequential_losses=_means(by_loop.losses, per_epoch),
        scan_accuracy=by_scan.accuracy(data.test_images, data.test_labels),
        sequential_accuracy=by_loop.accuracy(data.test_images, data.test_labels),
        seconds=time.perf_counter() - start,
    )
    draw(figures, output)
    print(_report(figures, data, hidden, batch, output))
    return figures


class _Race:
    """Two models trained on the same batches, one by the scan, one by the loop; and their times."""

    def __init__(self, scan: ScanPlan, by_scan: Model, by_loop: Model, batch: int) -> None:
        self._scan, self._by_scan, self._by_loop = scan, by_scan, by_loop
        self._adam_scan, self._adam_loop = (Adam(len(m.vector)) for m in (by_scan, by_loop))
        self._buffer = np.empty((STEPS, batch, by_scan.cell.nnz), np.float32)
        self.times: list[NDArray[np.float64]] = []
        self.differences: list[float] = []

    def warm_up(self, images: Array, labels: Labels) -> None:
        """Run the scan once, which compiles its kernels."""
        model = self._by_scan
        model.begin(images, labels)
        model.scan_backward(self._scan, model.jacobians(out=self._buffer))
        model.losses.clear()

    def step(self, images: Array, labels: Labels, rate: float) -> None:
        """Train both models on a batch."""
        by_scan, by_loop = self._by_scan, self._by_loop
        by_scan.begin(images, labels)
        by_loop.begin(images, labels)
        clock = [time.perf_counter()]
        jacobians = by_scan.jacobians(out=self._buffer)
        clock.append(time.perf_counter())
        scan_grads = by_scan.scan_backward(self._scan, jacobians)
        clock.append(time.perf_counter())
        loop_grads = by_loop.sequential_backward()
        clock.append(time.perf_counter())
        self.times.append(np.diff(clock))
        grads = by_scan.param_grads(scan_grads)
        # The models drift apart by rounding, so the methods are compared on one of them.
        expected = by_scan.param_grads(by_scan.sequential_backward())
        self.differences.append(_difference(grads, expected))
        self._adam_scan.update(by_scan.vector, _joined(grads), rate)
        self._adam_loop.update(by_loop.vector, _joined(by_loop.param_grads(loop_grads)), rate)


def draw(figures: Figures, output: str | os.PathLike[str]) -> None:
    """Draw both loss curves as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    epochs = np.arange(1, len(figures.scan_losses) + 1)
    # The wide line shows on both sides of the dashed one that covers it.
    wide: dict[str, Any] = {"color": "tab:orange", "alpha": 0.6, "lw": 5, "markersize": 8}
    dashed: dict[str, Any] = {"color": "black", "ls": "--", "lw": 1.3, "markersize": 3}
    marker = "o" if len(epochs) == 1 else ""
    axes.plot(epochs, figures.scan_losses, label="scan", marker=marker, **wide)
    label = "sequential back-propagation"
    axes.plot(epochs, figures.sequential_losses, label=label, marker=marker, **dashed)
    highest = max(figures.scan_losses + figures.sequential_losses)
    axes.set(
        xlabel="epoch",
        ylabel="training loss (cross-entropy)",
        title="Tanh RNN reading digits pixel by pixel",
        xlim=(0, 1.02 * len(epochs)),
        ylim=(0, 1.05 * highest),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output, format="png", dpi=150)


def _report(
    figures: Figures, data: Data, hidden: int, batch: int, output: str | os.PathLike[str]
) -> str:
    ratio = (figures.jacobians_ms + figures.scan_ms) / figures.sequential_ms
    winner, factor = ("loop", ratio) if ratio > 1 else ("scan", 1 / ratio)
    return (
        f"Tanh RNN with {hidden} hidden units, {len(figures.scan_losses)} epochs in batches of "
        f"{batch};\n{len(data.train_images)} images of {STEPS} pixels for training, "
        f"{len(data.test_images)} others for testing.\n"
        f"The scan ran as {figures.schedule}. {figures.seconds:.0f} s in all.\n\n{figures}\n\n"
        f"Times are medians of {figures.batches} batches. The scan needs the Jacobians, the "
        f"sequential loop\ndoes without; here the {winner} was {factor:.1f} times as fast.\n"
        f"Both loss curves: {os.fspath(output)}"
    )


def _batches(data: Data, batch: int, epochs: int, seed: int) -> Iterator[tuple[Array, Labels]]:
    rng = np.random.default_rng([seed, 1])
    for _ in range(epochs):
        order = rng.permutation(len(data.train_images))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield data.train_images[chosen], data.train_labels[chosen]


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate([array.ravel() for array in arrays])


def _difference(grads: list[Array], expected: list[Array]) -> float:
    """Return the largest of max |gradient - expected| / max |expected| over the parameters."""
    pairs = zip(grads, expected, strict=True)
    return max(float(np.abs(g - e).max() / max(np.abs(e).max(), 1e-30)) for g, e in pairs)


def _means(losses: list[float], per_epoch: int) -> list[float]:
    return [float(mean) for mean in np.reshape(losses, (-1, per_epoch)).mean(axis=1)]
