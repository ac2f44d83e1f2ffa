"""A recurrent network that learns to read digits, its backward pass through time a scan.

The network reads an image pixel by pixel, and a linear layer reads its last hidden state:

    h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh),        t = 1, …, 64,  h_0 = 0.

The transposed Jacobian of step ``t`` is ``W_hhᵀ diag(1 - h_t²)``, so back-propagation through time
is the exclusive scan of ``[∇h_64, J_64, …, J_1]``. One model is trained with the scan, a second one
with the loop that one would write in NumPy, from the same start and on the same batches.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .api import plan
from .errors import InputError
from .pattern import Pattern
from .plan import ScanPlan
from .plot import check_packages
from .schedule import Schedule, check_count

__all__ = ["STEPS", "Figures", "check_output", "run"]

STEPS = 64  # pixels of an image
CLASSES = 10
TEST_IMAGES = 360
LEARNING_RATE = 1e-3  # falls linearly to 0; with much more, rounding drives two equal runs apart
CLIP = 1.0  # largest norm of a gradient

_PACKAGES = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}

Array = NDArray[np.floating[Any]]


class Data(NamedTuple):
    """Images ``(count, STEPS)`` with pixels from 0 to 1, and what they show."""

    train_images: Array
    train_labels: NDArray[np.integer[Any]]
    test_images: Array
    test_labels: NDArray[np.integer[Any]]


class Parameters(NamedTuple):
    """What is learnt; every array is a view of one vector."""

    w_ih: Array
    b_ih: Array
    w_hh: Array
    b_hh: Array
    w_out: Array
    b_out: Array


@dataclass(frozen=True)
class Figures:
    """What a run measured.

    Attributes
    ----------
    schedule : str
        The schedule that ran.
    batches : int
        Backward passes that were timed, for each model.
    jacobians_ms, scan_ms, sequential_ms : float
        Median milliseconds of making the Jacobians of a batch, of scanning them, and of the
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
            ("    making the Jacobians", f"{self.jacobians_ms:.3f}", "-"),
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
    """Scikit-learn's handwritten digits, shuffled, with a part kept back for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images.reshape(-1, STEPS) / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Data(images[train], digits.target[train], images[test], digits.target[test])


def initial_vector(hidden: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Parameters to start from, as one vector; the recurrent weights are orthogonal."""
    parts = Parameters(
        w_ih=rng.uniform(-1, 1, (hidden, 1)),
        b_ih=np.zeros(hidden),
        w_hh=np.linalg.qr(rng.standard_normal((hidden, hidden)))[0],
        b_hh=np.zeros(hidden),
        w_out=rng.standard_normal((CLASSES, hidden)) / np.sqrt(hidden),
        b_out=np.zeros(CLASSES),
    )
    return np.concatenate([part.ravel() for part in parts])


def split(vector: Array, hidden: int) -> Parameters:
    """The parameters in a vector, as views."""
    shapes = [(hidden, 1), (hidden,), (hidden, hidden), (hidden,), (CLASSES, hidden), (CLASSES,)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    parts = np.split(vector, ends[:-1])
    return Parameters(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))


def forward(p: Parameters, images: Array) -> tuple[Array, Array]:
    """Hidden states ``h_0, …, h_64``, shape ``(STEPS + 1, batch, hidden)``, and the logits."""
    states = np.zeros((STEPS + 1, len(images), len(p.b_ih)), images.dtype)
    np.multiply(images.T[:, :, None], p.w_ih[:, 0], out=states[1:])
    states[1:] += p.b_ih + p.b_hh
    for before, state in itertools.pairwise(states):
        state += before @ p.w_hh.T
        np.tanh(state, out=state)
    return states, states[-1] @ p.w_out.T + p.b_out


def cross_entropy(logits: Array, labels: NDArray[np.integer[Any]]) -> tuple[float, Array]:
    """Mean loss of a batch, and its gradient in the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    grad = np.exp(log_probabilities)
    grad[rows, labels] -= 1
    return -float(log_probabilities[rows, labels].mean()), grad / len(labels)


def make_jacobians(p: Parameters, slopes: Array, out: Array) -> Array:
    """``W_hhᵀ diag(1 - h_t²)`` of every step and sample, in the order of time."""
    return np.multiply(p.w_hh.T, slopes[:, :, None, :], out=out)


def scan_backward(scan: ScanPlan, last_grad: Array, jacobians: Array) -> Array:
    """Gradients of ``h_1, …, h_64``, by the scan."""
    # A scan goes from the last step to the first; a reversed view is no copy.
    return np.asarray(scan.exclusive_scan(last_grad, jacobians[::-1]))[::-1]


def sequential_backward(p: Parameters, last_grad: Array, slopes: Array) -> Array:
    """The same step by step, which needs no Jacobians."""
    grads = np.empty_like(slopes)
    grads[-1] = last_grad
    scratch = np.empty_like(last_grad)
    for t in range(len(slopes) - 1, 0, -1):
        np.multiply(grads[t], slopes[t], out=scratch)
        np.matmul(scratch, p.w_hh, out=grads[t - 1])
    return grads


def parameter_grads(
    images: Array, states: Array, slopes: Array, state_grads: Array, logit_grads: Array
) -> Array:
    """The gradient in all parameters, as one vector, from those in the states and the logits."""
    hidden = states.shape[-1]
    inner = (state_grads * slopes).reshape(-1, hidden)
    bias = inner.sum(axis=0)
    parts = Parameters(
        w_ih=inner.T @ images.T.reshape(-1, 1),
        b_ih=bias,
        w_hh=inner.T @ states[:-1].reshape(-1, hidden),
        b_hh=bias,
        w_out=logit_grads.T @ states[-1],
        b_out=logit_grads.sum(axis=0),
    )
    return np.concatenate([part.ravel() for part in parts])


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


class _Model:
    """Parameters in training, and the pass of one batch."""

    def __init__(self, hidden: int, seed: int) -> None:
        self.vector = initial_vector(hidden, np.random.default_rng(seed)).astype(np.float32)
        self.parameters = split(self.vector, hidden)
        self.losses: list[float] = []
        self._adam = Adam(len(self.vector))

    def begin(self, images: Array, labels: NDArray[np.integer[Any]]) -> None:
        """All of a pass but the way back through time."""
        self.images = images
        self.states, logits = forward(self.parameters, images)
        self.slopes = 1 - self.states[1:] ** 2
        loss, self.logit_grads = cross_entropy(logits, labels)
        self.last_grad = self.logit_grads @ self.parameters.w_out
        self.losses.append(loss)

    def grads(self, state_grads: Array) -> Array:
        return parameter_grads(self.images, self.states, self.slopes, state_grads, self.logit_grads)

    def learn(self, grads: Array, rate: float) -> None:
        self._adam.update(self.vector, grads, rate)

    def accuracy(self, images: Array, labels: NDArray[np.integer[Any]]) -> float:
        logits = forward(self.parameters, images)[1]
        return float((logits.argmax(axis=1) == labels).mean())


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
        What was printed.

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
    for name, value, least in (("hidden", hidden, 1), ("epochs", epochs, 1), ("batch", batch, 1)):
        check_count(name, value, least)
    check_count("seed", seed, 0)
    check_packages("the demo", "demo", _PACKAGES)
    check_output(output)
    from tqdm import tqdm

    data = load_data(seed)
    if batch > len(data.train_images):
        raise InputError(f"batch is {batch}; expected at most {len(data.train_images)}, all images")
    scan = plan(
        [Pattern.dense((hidden, hidden))] * STEPS,
        schedule=schedule,
        batch=batch,
        dtype=np.float32,
        device=device,
    )
    buffer = np.zeros((STEPS, batch, hidden, hidden), np.float32)
    by_scan, by_loop = _Model(hidden, seed), _Model(hidden, seed)
    times, differences = [], []
    per_epoch = len(data.train_images) // batch
    batches = _batches(data, batch, epochs, seed)
    with tqdm(total=epochs * per_epoch, unit=" batches", desc="compiling", mininterval=0.5) as bar:
        scan_backward(scan, np.zeros((batch, hidden), np.float32), buffer)
        bar.set_description("training")
        for done, (images, labels) in enumerate(batches):
            rate = LEARNING_RATE * (1 - done / bar.total)
            by_scan.begin(images, labels)
            by_loop.begin(images, labels)
            clock = [time.perf_counter()]
            jacobians = make_jacobians(by_scan.parameters, by_scan.slopes, out=buffer)
            clock.append(time.perf_counter())
            scan_grads = scan_backward(scan, by_scan.last_grad, jacobians)
            clock.append(time.perf_counter())
            loop_grads = sequential_backward(by_loop.parameters, by_loop.last_grad, by_loop.slopes)
            clock.append(time.perf_counter())
            times.append(np.diff(clock))
            grads = by_scan.grads(scan_grads)
            # The models drift apart by rounding, so the methods are compared on one of them.
            same = sequential_backward(by_scan.parameters, by_scan.last_grad, by_scan.slopes)
            differences.append(_difference(grads, by_scan.grads(same), hidden))
            by_scan.learn(grads, rate)
            by_loop.learn(by_loop.grads(loop_grads), rate)
            bar.update()
    jacobians_ms, scan_ms, sequential_ms = np.median(times, axis=0) * 1e3
    figures = Figures(
        schedule=str(scan.schedule),
        batches=len(times),
        jacobians_ms=float(jacobians_ms),
        scan_ms=float(scan_ms),
        sequential_ms=float(sequential_ms),
        gradient_difference=max(differences),
        scan_losses=_means(by_scan.losses, per_epoch),
        sequential_losses=_means(by_loop.losses, per_epoch),
        scan_accuracy=by_scan.accuracy(data.test_images, data.test_labels),
        sequential_accuracy=by_loop.accuracy(data.test_images, data.test_labels),
        seconds=time.perf_counter() - start,
    )
    draw(figures, output)
    print(_report(figures, data, hidden, batch, output))
    return figures


def draw(figures: Figures, output: str | os.PathLike[str]) -> None:
    """Both loss curves as a PNG."""
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
        f"Times are medians of {figures.batches} batches. The scan has to make the Jacobians, the "
        f"sequential loop\ndoes without; here the {winner} was {factor:.1f} times as fast.\n"
        f"Both loss curves: {os.fspath(output)}"
    )


def _batches(
    data: Data, batch: int, epochs: int, seed: int
) -> Iterator[tuple[Array, NDArray[np.integer[Any]]]]:
    rng = np.random.default_rng([seed, 1])
    for _ in range(epochs):
        order = rng.permutation(len(data.train_images))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield data.train_images[chosen], data.train_labels[chosen]


def _difference(found: Array, expected: Array, hidden: int) -> float:
    """The largest over the parameters of max |found - expected| / max |expected|."""
    pairs = zip(split(found, hidden), split(expected, hidden), strict=True)
    return max(float(np.abs(f - e).max() / max(np.abs(e).max(), 1e-30)) for f, e in pairs)


def _means(losses: list[float], per_epoch: int) -> list[float]:
    return [float(mean) for mean in np.reshape(losses, (-1, per_epoch)).mean(axis=1)]


def check_output(output: str | os.PathLike[str]) -> None:
    """Find out before the training what would go wrong after it."""
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        code = errno.EISDIR
    elif not os.path.isdir(folder):
        code = errno.ENOENT
    elif not os.access(output if os.path.exists(output) else folder, os.W_OK):
        code = errno.EACCES
    else:
        return
    raise OSError(code, os.strerror(code), os.fspath(output))
