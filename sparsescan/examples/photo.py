"""A recurrent network learns to predict the next pixel of a photograph, three ways side by side.

A GRU reads the rows of scikit-learn's two photographs, 640 pixels each. From the pixel ``x_t`` and
the one above the next, a linear layer on its state ``h_t`` predicts the change to the next pixel:

    h_t = GRU(x_t, h_{t-1}),    d_t = V h_t + c ≈ x_{t+1} - x_t,        t = 1, …, 639,  h_0 = 0.

The loss is the mean of ``(d_t - (x_{t+1} - x_t))²``, relative to that of repeating the last pixel.
The network is trained by sparsescan, by the loop that one would write in NumPy, and by PyTorch if
it is installed: from the same parameters, on the same rows.

``sparsescan demo`` calls :func:`run`.
"""

from __future__ import annotations

import importlib.util
import os
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsescan import InputError
from sparsescan.recurrent import GRU

TEST_ROWS = 150
INPUTS, COLOURS = 6, 3
RATE = 1e-2  # falls linearly to 0; much more drives equal runs apart by rounding
SPARSESCAN, LOOP, PYTORCH = "sparsescan", "NumPy loop", "PyTorch"
PARTS = ("forward", "backward", "Adam")

Array = NDArray[np.floating[Any]]
Params = dict[str, Array]


class Rows(NamedTuple):
    """Inputs ``(T, rows, 6)``, and the changes to predict, ``(T, rows, 3)``, of variance 1."""

    inputs: Array
    changes: Array

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Return some of the rows."""
        return Rows(*(np.ascontiguousarray(array[:, rows]) for array in self))


def load_rows(seed: int) -> tuple[Rows, Rows]:
    """Return the rows of both photographs for training, and those that are kept back."""
    from sklearn.datasets import load_sample_images

    parts = []
    for image in load_sample_images().images:
        pixels = image.astype(np.float32) / 255 - 0.5
        here, above = pixels[1:, :-1], pixels[:-1, 1:]
        parts.append((np.concatenate([here, above], -1), pixels[1:, 1:] - here))
    inputs, changes = (np.concatenate(part).transpose(1, 0, 2) for part in zip(*parts, strict=True))
    every = Rows(inputs, changes / changes.std(dtype=np.float64).astype(np.float32))
    order = np.random.default_rng(seed).permutation(inputs.shape[1])
    return every.take(order[TEST_ROWS:]), every.take(order[:TEST_ROWS])


# -- Three ways to train ---------------------------------------------------------------------------


class Way(Protocol):
    """A network that is trained."""

    def step(self, rows: Rows, rate: float) -> tuple[float, list[float]]:
        """Take a training step: return the loss, and when each part of it had begun or ended."""


def initial_params(hidden: int, seed: int) -> Params:
    """Return parameters to begin with: the GRU's, by PyTorch's names, and the linear layer's."""
    params: Params = GRU(INPUTS, hidden, rng=seed).params
    rng = np.random.default_rng([seed, 1])
    bound = 1 / np.sqrt(hidden)
    params["weight"] = rng.uniform(-bound, bound, (COLOURS, hidden)).astype(np.float32)
    params["bias"] = np.zeros(COLOURS, np.float32)
    return {name: param.copy() for name, param in params.items()}


class Adam:
    """Adam (Kingma and Ba, 2015), in place."""

    def __init__(self, params: Params) -> None:
        self._moments = {name: np.zeros((2, *param.shape), "f") for name, param in params.items()}
        self._steps = 0

    def update(self, params: Params, grads: Params, rate: float) -> None:
        """Take a step."""
        self._steps += 1
        first, second = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        for name, param in params.items():
            grad, (mean, square) = grads[name], self._moments[name]
            mean += 0.1 * (grad - mean)
            square += 0.001 * (grad * grad - square)
            param -= rate * (mean / first) / (np.sqrt(square / second) + 1e-8)


class _OnNumPy:
    """A GRU, and in NumPy all that stands around it."""

    def __init__(self, params: Params) -> None:
        self.params = {name: param.copy() for name, param in params.items()}
        self._adam = Adam(params)

    def forward(self, x: Array) -> Array:
        """Return the states of all steps."""
        raise NotImplementedError

    def backward(self, grads: Array) -> Params:
        """Return the gradients in the GRU's parameters, from those in all states."""
        raise NotImplementedError

    def step(self, rows: Rows, rate: float) -> tuple[float, list[float]]:
        """Take a training step."""
        clock, weight = [time.perf_counter()], self.params["weight"]
        states = self.forward(rows.inputs)
        errors = states @ weight.T
        errors += self.params["bias"]
        errors -= rows.changes
        loss = float(np.mean(np.square(errors), dtype=np.float64))
        clock.append(time.perf_counter())
        errors *= 2 / errors.size
        flat = errors.reshape(-1, COLOURS)
        grads = self.backward(errors @ weight)
        grads["weight"], grads["bias"] = flat.T @ states.reshape(len(flat), -1), flat.sum(0)
        clock.append(time.perf_counter())
        self._adam.update(self.params, grads, rate)
        clock.append(time.perf_counter())
        return loss, clock


class BySparsescan(_OnNumPy):
    """The GRU by its training step, a compiled loop over all steps."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        network = GRU(INPUTS, params["weight"].shape[1])
        for name in network.params:
            setattr(network, name, self.params[name])
        self._step = network.training_step()

    def forward(self, x: Array) -> Array:
        """Return the states of all steps."""
        return self._step.forward(x)[0]

    def backward(self, grads: Array) -> Params:
        """Return the gradients in the GRU's parameters."""
        return self._step.backward(grads, needs_input_grad=False).params


class ByLoop(_OnNumPy):
    """The GRU step by step: products of the inputs, and gradients of weights, of all at once."""

    def forward(self, x: Array) -> Array:
        """Return the states of all steps."""
        p, (steps, batch, _) = self.params, x.shape
        hidden = p["weight_hh_l0"].shape[1]
        of_inputs = x @ p["weight_ih_l0"].T + p["bias_ih_l0"]
        weight, bias = np.ascontiguousarray(p["weight_hh_l0"].T), p["bias_hh_l0"]
        self._x, self._gates = x, np.empty((4, steps, batch, hidden), np.float32)
        self._states = np.zeros((steps + 1, batch, hidden), np.float32)
        two, h = 2 * hidden, self._states[0]
        for t in range(steps):
            of_state = h @ weight + bias
            gates = 1 / (1 + np.exp(-(of_inputs[t, :, :two] + of_state[:, :two])))
            r, z, v = gates[:, :hidden], gates[:, hidden:], of_state[:, two:]
            n = np.tanh(of_inputs[t, :, two:] + r * v)
            h = n + z * (h - n)
            self._gates[:, t], self._states[t + 1] = (r, z, n, v), h
        return self._states[1:]

    def backward(self, grads: Array) -> Params:
        """Return the gradients in the GRU's parameters."""
        weight, (r, z, n, v) = self.params["weight_hh_l0"], self._gates
        steps, batch, hidden = grads.shape
        of_n = (1 - z) * (1 - n * n)
        of_z = (self._states[:-1] - n) * z * (1 - z)
        of_r = v * r * (1 - r)
        of_inputs = np.empty((steps, batch, 3 * hidden), np.float32)
        of_states = np.empty((steps, batch, 3 * hidden), np.float32)
        g = np.zeros((batch, hidden), np.float32)
        for t in range(steps)[::-1]:
            g = g + grads[t]
            in_n = g * of_n[t]
            in_v = in_n * r[t]
            of_states[t] = np.concatenate([in_n * of_r[t], g * of_z[t], in_v], 1)
            of_inputs[t, :, 2 * hidden :] = in_n
            g = g * z[t] + of_states[t] @ weight
        of_inputs[:, :, : 2 * hidden] = of_states[:, :, : 2 * hidden]
        flat_inputs, flat_states = (a.reshape(-1, 3 * hidden) for a in (of_inputs, of_states))
        return {
            "weight_ih_l0": flat_inputs.T @ self._x.reshape(-1, INPUTS),
            "weight_hh_l0": flat_states.T @ self._states[:-1].reshape(-1, hidden),
            "bias_ih_l0": flat_inputs.sum(0),
            "bias_hh_l0": flat_states.sum(0),
        }


class ByPyTorch:
    """The network, in PyTorch."""

    def __init__(self, params: Params) -> None:
        import torch

        self._torch = torch
        self._gru = torch.nn.GRU(INPUTS, params["weight"].shape[1])
        self._linear = torch.nn.Linear(params["weight"].shape[1], COLOURS)
        with torch.no_grad():
            for module in (self._gru, self._linear):
                for name, param in module.named_parameters():
                    param.copy_(torch.from_numpy(params[name]))
        both = [*self._gru.parameters(), *self._linear.parameters()]
        self._adam = torch.optim.Adam(both, eps=1e-8)

    def step(self, rows: Rows, rate: float) -> tuple[float, list[float]]:
        """Take a training step."""
        torch, clock = self._torch, [time.perf_counter()]
        changes = self._linear(self._gru(torch.from_numpy(rows.inputs))[0])
        loss = torch.nn.functional.mse_loss(changes, torch.from_numpy(rows.changes))
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        self._adam.zero_grad()
        clock.append(time.perf_counter())
        return loss.item(), clock


# -- The race --------------------------------------------------------------------------------------


@dataclass
class Race:
    """Losses and times of one way.

    Attributes
    ----------
    losses : list of float
        The loss of each batch, before its update.
    times : list of list of float
        Seconds of each part of each training step.
    """

    losses: list[float]
    times: list[list[float]]

    @property
    def median_ms(self) -> NDArray[np.float64]:
        """Milliseconds of the parts of a training step, and of all of it: medians."""
        times = np.array(self.times)
        together = np.concatenate([times, times.sum(1, keepdims=True)], 1)
        return np.asarray(np.median(together, 0) * 1e3)


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Attributes
    ----------
    races : dict of str to Race
        For each way to train.
    difference : float
        How far the losses of any two ways are apart at most, relative to the loss.
    test_loss : float
        The loss of sparsescan's network for rows that were kept back.
    seconds : float
        Duration of the run, compilation included.
    """

    races: dict[str, Race]
    difference: float
    test_loss: float
    seconds: float

    def ratio(self, name: str) -> float:
        """Return how many times as long as sparsescan another way takes for a training step."""
        return float(self.races[name].median_ms[-1] / self.races[SPARSESCAN].median_ms[-1])

    def __str__(self) -> str:
        races = self.races.values()
        rows = [["a training step, ms", *self.races]]
        medians = [race.median_ms for race in races]
        for k, part in enumerate((*PARTS, "all")):
            rows.append([part, *(f"{median[k]:.2f}" for median in medians)])
        rows.append(["times as long", *(f"{self.ratio(name):.1f}" for name in self.races)])
        rows.append(["loss, last 20 batches", *(f"{np.mean(r.losses[-20:]):.5f}" for r in races)])
        return "\n".join(
            f"{name:<24}" + "".join(f"{each:>13}" for each in row) for name, *row in rows
        )


def run(
    *,
    hidden: int = 20,
    batches: int = 200,
    batch: int = 16,
    output: str | os.PathLike[str] = "demo.png",
    seed: int = 0,
) -> Figures:
    """Train the network each way, print a table, and draw the losses over wall-clock time.

    Parameters
    ----------
    hidden : int, default 20
        Units of the GRU.
    batches : int, default 200
        Training steps.
    batch : int, default 16
        Rows of a batch.
    output : str or path-like, default "demo.png"
        The PNG file to write.
    seed : int, default 0
        The seed of parameters and batches.

    Returns
    -------
    Figures
        The printed figures.

    Raises
    ------
    ImportError
        If matplotlib, scikit-learn or tqdm is missing: ``pip install 'sparsescan[demo]'``.
    InputError
        If a batch has more rows than there are.
    OSError
        If `output` cannot be written.
    """
    start = time.perf_counter()
    from tqdm import tqdm

    train, test = load_rows(seed)
    count = train.inputs.shape[1]
    if batch > count:
        raise InputError(f"batch is {batch}; expected at most {count}, all rows")
    params = initial_params(hidden, seed)
    ways: dict[str, Way] = {SPARSESCAN: BySparsescan(params), LOOP: ByLoop(params)}
    if importlib.util.find_spec("torch") is not None:
        ways[PYTORCH] = ByPyTorch(params)
    races = {name: Race([], []) for name in ways}
    with tqdm(total=batches, unit="batch", desc="compiling", ncols=80, mininterval=0.5) as bar:
        for way in ways.values():
            way.step(train.take(np.arange(batch)), 0.0)
        bar.set_description("training")
        for done, rows in enumerate(_batches(count, batch, batches, seed)):
            for name, way in ways.items():
                loss, clock = way.step(train.take(rows), RATE * (1 - done / batches))
                races[name].losses.append(loss)
                races[name].times.append(np.diff(clock).tolist())
            bar.update()
    losses = np.array([race.losses for race in races.values()])
    trained = ways[SPARSESCAN]
    figures = Figures(
        races=races,
        difference=float((np.ptp(losses, 0) / losses.min(0)).max()),
        test_loss=trained.step(test, 0.0)[0],
        seconds=time.perf_counter() - start,
    )
    draw(figures, output)
    print(_report(figures, count, hidden, batch, output))
    return figures


def _batches(count: int, batch: int, batches: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Return the rows of each batch; each pass over all leaves out the few that fill none."""
    rng = np.random.default_rng([seed, 2])
    per_pass = count // batch
    for done in range(batches):
        if done % per_pass == 0:
            order = rng.permutation(count)
        yield order[done % per_pass * batch :][:batch]


def draw(figures: Figures, output: str | os.PathLike[str]) -> None:
    """Draw the losses over the time that each way has taken, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    colours = {SPARSESCAN: "tab:orange", LOOP: "tab:blue", PYTORCH: "black"}
    for name, race in figures.races.items():
        seconds, losses = np.cumsum(np.sum(race.times, 1)), np.array(race.losses)
        width = min(10, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, "valid")
        axes.plot(seconds[width - 1 :], smooth, color=colours[name], lw=1.8, label=name)
        axes.plot(seconds[-1], smooth[-1], "o", color=colours[name], ms=5)
    axes.axhline(1, color="0.6", lw=1, ls="--")
    right = axes.get_xlim()[1]
    axes.text(right, 1.01, "repeating the last pixel", ha="right", va="bottom", color="0.4")
    axes.set(
        xlabel="seconds of training",
        ylabel="loss, mean of 10 batches",
        title="A GRU predicts the next pixel, 639 steps a row",
        xlim=(0, right),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output, format="png", dpi=150)


def _compared(name: str, ratio: float) -> str:
    peer = name if name == PYTORCH else f"the {name}"
    if ratio >= 1:
        return f"{ratio:.1f} times as fast as {peer}"
    return f"slower than {peer}, which took {ratio:.2f} of the time"


def _report(
    figures: Figures, count: int, hidden: int, batch: int, output: str | os.PathLike[str]
) -> str:
    batches = len(figures.races[SPARSESCAN].losses)
    ratios = {name: figures.ratio(name) for name in figures.races if name != SPARSESCAN}
    ours, loop = (figures.races[name].median_ms for name in (SPARSESCAN, LOOP))
    saved = loop[:2].sum() - ours[:2].sum()
    where = (
        f"Beside the loop, {saved:.1f} ms of a step are saved in forward and backward, which run "
        "as one compiled loop over all steps, with no call of Python or BLAS inside; nothing is "
        "saved in Adam, which is NumPy in both."
        if ratios[LOOP] > 1.1
        else "Nothing is gained beside the loop: products this large keep BLAS busy step by step."
    )
    paragraphs = [
        f"A GRU of {hidden} units reads photographs row by row, 639 steps a row, and predicts the "
        f"change to the next pixel: {batches} batches of {batch} of {count} rows, float32.",
        str(figures),
        f"sparsescan was {' and '.join(_compared(*each) for each in ratios.items())}.",
        where,
        f"The losses of all are the same but for rounding: at most {figures.difference:.0e} apart. "
        f"For {TEST_ROWS} other rows the loss is {figures.test_loss:.3f}, where repeating the last "
        f"pixel has about 1.",
    ]
    filled = [each if "\n" in each else textwrap.fill(each, 80) for each in paragraphs]
    ending = f"{figures.seconds:.0f} s in all. Losses over time: {os.fspath(output)}"
    return "\n\n".join([*filled, ending])
