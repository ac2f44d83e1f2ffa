"""A recurrent classifier in PyTorch, its backward pass by autograd or by the scan.

The forward pass is PyTorch's own, cuDNN's on a GPU. Backward, :class:`LastState` makes the
transposed Jacobians of all steps at once, scans, and sums up the gradients of the parameters.
:func:`measure` lets both ways take turns, and the parts they are made of; :func:`train` lets both
learn from the same batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import sparsescan
from sparsescan import CSRChain, ImplicitChain
from sparsescan.arrays.arrays import load_cupy
from sparsescan.arrays.streams import place
from sparsescan.recurrent import GRUCell, RNNCell
from sparsescan.recurrent.cell import Linearization
from sparsescan.torch.calibrate import keep_memory

from . import drawing, machine, peers
from .drawing import BLUE, ORANGE, Spread
from .experiment import Options, Results, Row
from .gpu_device import device_of
from .peers import MissingPeerError
from .timing import PAUSE, THREADS, Call, fastest, finished, rounded

TorchLayer = nn.RNN | nn.GRU
Batch = tuple[Tensor, Tensor]

HIDDEN = 20

# Contenders, and the parts of an iteration, that are timed at each size.
FORWARD = "forward"
RECORDED = "forward, recorded for autograd"
AUTOGRAD = "PyTorch autograd"
CHAIN = "PyTorch autograd, no parameters"
OURS = "sparsescan"
GIVEN = "sparsescan, Jacobians given"
VALUES = "sparsescan, no parameters"
SCAN = "sparsescan, scan of whole Jacobians"
JAX_SCAN, JAX_ASSOCIATIVE = "jax.lax.scan", "jax.lax.associative_scan"
STEP, STEP_OURS = "training step, PyTorch autograd", "training step, sparsescan"

# The trainings, and how they are drawn.
REVERSED = "autograd, batches reversed"
TRAINING_LABELS = "training loss", "largest distance from autograd so far"
_TRAININGS: dict[str, dict[str, Any]] = {
    AUTOGRAD: {"color": BLUE, "lw": 1.6},
    OURS: {"color": ORANGE, "lw": 1.6},
    REVERSED: {"color": "black", "lw": 1, "ls": ":"},
}

# Seconds: the pause in which the threads of one contender fall asleep; and how long the next one
# warms up, and is then timed.
_TURN = 0.1
_QUICK_PAUSE, _QUICK_TURN = 0.1, 0.05
# How often they take turns, and how many calls tell which variant is fastest; and of more rows than
# so many, one for each step and sample.
_ROUNDS, _TRIALS = 7, 3
_FEW_ROUNDS, _FEW_TRIALS, _LONG = 3, 1, 100_000
# How many times the control's distance from autograd a training by the scan may have.
_DRIFT = 10
# Iterations for which a training has the machine for itself.
_BLOCK = 50


@dataclass(frozen=True)
class Model:
    """The classifier that is trained, and the device."""

    kind: Literal["RNN", "GRU"]  # the layer: PyTorch's, with HIDDEN units
    inputs: int  # length of an input
    classes: int
    rate: float  # of Adam
    device: str  # "cpu" or "cuda"

    def classifier(self, sizes: tuple[int, int] | None = None) -> Classifier:
        """Return a classifier with its initial parameters, backward by a scan if it has sizes."""
        torch.manual_seed(0)
        layer: TorchLayer = getattr(nn, self.kind)(self.inputs, HIDDEN)
        return Classifier(layer, self.classes).to(self.device).by_scan(sizes)

    def trainer(self, sizes: tuple[int, int] | None = None) -> Trainer:
        """Such a classifier, to learn."""
        return Trainer(self.classifier(sizes), self.rate)


# -- The backward pass by a scan ------------------------------------------------------------------


class Recurrence:
    """The cell and the plan of a layer's backward pass by a scan.

    On a GPU the scan is over the Jacobians of the steps. On the CPU, where it is the linear one, it
    is over the two factors of each. The layer has one direction and takes time first; its
    parameters are shared, so it must stay where it is.
    """

    def __init__(self, layer: TorchLayer, steps: int, batch: int) -> None:
        weight = layer.weight_hh_l0
        self.layer = layer
        self.device: torch.device = weight.device
        self.xp: Any = load_cupy() if weight.is_cuda else np
        kind = {"RNN_TANH": RNNCell, "GRU": GRUCell}[layer.mode]
        self.cell = kind(layer.input_size, layer.hidden_size, layer.bias)
        for name in self.cell.params:
            setattr(self.cell, name, self.array(getattr(layer, f"{name}_l0")))
        pattern = self.cell.implicit_pattern if self.xp is np else self.cell.pattern
        self.plan = sparsescan.plan(
            [pattern] * steps,
            batch=batch,
            dtype=self.cell.weight_hh.dtype,
            device=None if self.xp is np else "cuda",
        )

    def array(self, tensor: Tensor) -> Any:
        """Return the tensor's memory as an array of NumPy or CuPy."""
        return self.xp.asarray(tensor.detach())

    def tensor(self, array: Any) -> Tensor:
        """Return the array's memory as a tensor."""
        return torch.as_tensor(array, device=self.device)

    def host(self, array: Any) -> NDArray[Any]:
        """Return the array for NumPy."""
        return np.asarray(array if self.xp is np else self.xp.asnumpy(array))

    def linearize(self, x: Tensor, outputs: Tensor) -> Linearization:
        """Return the layer at its inputs and outputs."""
        after = self.array(outputs)
        before = self.xp.zeros_like(after)
        before[1:] = after[:-1]
        return self.cell.linearize(self.array(x), before)

    def jacobians(self, steps: Linearization) -> ImplicitChain | CSRChain:
        """Return the Jacobians, as the plan takes them."""
        return steps.implicit() if self.xp is np else steps.jacobian()

    def scan(self, grad: Any, jacobians: ImplicitChain | CSRChain) -> Any:
        """Gradients of the states after all steps, from that of the last one."""
        return self.plan.exclusive_scan(grad, jacobians)[::-1]

    def on_stream(self) -> AbstractContextManager[Any]:
        """Let CuPy work on PyTorch's device and current stream."""
        stream = None if self.xp is np else torch.cuda.current_stream(self.device)
        return place("weight_hh", self.cell.weight_hh, None, stream)


def about(kind: str, options: Options) -> Results:
    """Describe the layer, and how it is timed, for the file of results."""
    two = "two factors of each: slopes, and weights that all steps and samples share"
    whole = "multiplied out: a dense one for each step and sample"
    return {
        "layer": f"torch.nn.{kind}, {HIDDEN} units, float32; a linear map of its last state",
        "Jacobians": two if options.device == "cpu" else whole,
        "memory": "glibc keeps what is freed (mallopt), for all contenders",
        "threads of PyTorch": "2 or 1, whichever were faster; see the variants in the file",
    }


def in_random_order(
    rng: np.random.Generator, samples: int, batch: int, count: int
) -> list[NDArray[np.int64]]:
    """Return the indices of so many batches, from as many epochs as that takes."""
    epochs = -(-count * batch // samples)
    order = np.concatenate([rng.permutation(samples) for _ in range(epochs)])
    return [order[k * batch : (k + 1) * batch] for k in range(count)]


class LastState(torch.autograd.Function):
    """The last state of a layer: ``LastState.apply(x, recurrence, *parameters)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recurrence: Recurrence, *parameters: Tensor) -> Tensor:
        outputs, last = recurrence.layer(x)
        ctx.recurrence = recurrence
        # The parameters are not read here, but PyTorch then tells if one has changed meanwhile.
        ctx.save_for_backward(x, outputs, *parameters)
        return last[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, outputs, *_ = ctx.saved_tensors
        recurrence = ctx.recurrence
        with recurrence.on_stream():
            steps = recurrence.linearize(x, outputs)
            jacobians = recurrence.jacobians(steps)
            grads = recurrence.scan(recurrence.array(grad.contiguous()), jacobians)
            param_grads = map(recurrence.tensor, steps.param_grads(grads).values())
            x_grad = (
                recurrence.tensor(steps.input_grads(grads)) if ctx.needs_input_grad[0] else None
            )
            return x_grad, None, *param_grads


class Classifier(nn.Module):
    """A recurrent layer, and a linear map of its last state to the scores of the classes."""

    def __init__(self, layer: TorchLayer, classes: int) -> None:
        super().__init__()
        self.layer = layer
        self.linear = nn.Linear(layer.hidden_size, classes)
        self.recurrence: Recurrence | None = None

    def by_scan(self, sizes: tuple[int, int] | None) -> Classifier:
        """Scan backward, through inputs of these sizes, or leave it to autograd."""
        self.recurrence = None if sizes is None else Recurrence(self.layer, *sizes)
        return self

    def last_state(self, x: Tensor) -> Tensor:
        """h_T, shape ``(batch, HIDDEN)``, from an input ``(steps, batch, inputs)``."""
        if self.recurrence is None:
            return self.layer(x)[1][0]
        return LastState.apply(x, self.recurrence, *self.layer.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.last_state(x))


class Trainer:
    """A classifier that learns by Adam; PyTorch uses so many `threads`."""

    def __init__(self, classifier: Classifier, rate: float) -> None:
        self.classifier = classifier
        self.optimiser = torch.optim.Adam(classifier.parameters(), lr=rate)
        self.threads = THREADS

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, with its gradients left in the parameters."""
        torch.set_num_threads(self.threads)
        self.optimiser.zero_grad()
        loss = nn.functional.cross_entropy(self.classifier(x), labels)
        loss.backward()
        return loss

    def learn(self, x: Tensor, labels: Tensor) -> float:
        """One iteration; the loss before it."""
        loss = self.loss(x, labels)
        self.optimiser.step()
        return loss.item()


# -- Times ----------------------------------------------------------------------------------------


def measure(model: Model, batch: Batch, *, quick: bool, jax: bool = True) -> Results:
    """Return the times of forward and backward passes and of training steps, of one batch.

    The batch is an input ``(steps, batch, inputs)`` and labels ``(batch,)``. A quick run takes
    fewer samples. Without `jax`, JAX is left out, which compiles its variants first.

    Returns
    -------
    dict
        For each contender its ``samples`` in seconds and the ``variant`` that was fastest;
        ``missing`` peers, ``floors`` in seconds, ``cores_others_used`` in each round, and the
        ``largest_difference`` of each gradient from autograd's, relative to its largest entry.
    """
    torch.set_num_threads(THREADS)
    keep_memory()
    race, device = _Race(model, *batch), device_of(model.device)
    contenders: dict[str, Callable[[], dict[str, Call]]] = race.contenders()
    missing: dict[str, str] = {}
    if jax:
        contenders |= {name: partial(race.jax, name) for name in (JAX_SCAN, JAX_ASSOCIATIVE)}
    else:
        missing = dict.fromkeys((JAX_SCAN, JAX_ASSOCIATIVE), "left out of this size with --quick")
    few = quick or race.steps * race.batch > _LONG

    def waiting(make: Callable[[], dict[str, Call]]) -> dict[str, Call]:
        return {key: partial(finished, device, call) for key, call in make().items()}

    makers = {name: partial(waiting, make) for name, make in contenders.items()}
    calls, chosen = peers.fastest_of_each(makers, _FEW_TRIALS if few else _TRIALS)
    differences = race.differences(calls)
    pause, turn = (_QUICK_PAUSE, _QUICK_TURN) if quick else (PAUSE, _TURN)
    samples, others = take_turns(calls, _FEW_ROUNDS if few else _ROUNDS, pause, turn)
    return {
        "steps": race.steps,
        "batch": race.batch,
        "samples": samples,
        "variants": chosen["variants"],
        "missing": missing | chosen["missing"],
        "floors": floors(model, race.steps, race.batch),
        "largest_difference": differences,
        "cores_others_used": others,
    }


class _Race:
    """The contenders for one batch."""

    def __init__(self, model: Model, x: Tensor, labels: Tensor) -> None:
        self.model, self.x, self.labels = model, x.to(model.device), labels.to(model.device)
        self.steps, self.batch = x.shape[:2]
        sizes = self.steps, self.batch
        self.theirs, self.ours = model.classifier(), model.classifier(sizes)
        self.trainers = model.trainer(), model.trainer(sizes)
        # A gradient of the size that a loss has.
        rng = np.random.default_rng(0)
        grad = rng.standard_normal((self.batch, HIDDEN), np.float32) / self.batch
        self.grad = torch.from_numpy(grad).to(model.device)
        self.recurrence = Recurrence(self.theirs.layer, *sizes)
        with torch.no_grad():
            self.outputs = self.theirs.layer(self.x)[0]
        # The whole Jacobians, which JAX multiplies as well.
        self.chain = self.recurrence.linearize(self.x, self.outputs).jacobian()

    def contenders(self) -> dict[str, Callable[[], dict[str, Call]]]:
        """Functions that make the variants of each contender."""
        layer, recurrence = self.theirs.layer, self.recurrence
        grad = recurrence.array(self.grad)
        steps = recurrence.linearize(self.x, self.outputs)
        jacobians = recurrence.jacobians(steps)
        plan = sparsescan.plan(self.chain)

        def state_grads() -> Any:
            with recurrence.on_stream():
                steps = recurrence.linearize(self.x, self.outputs)
                return recurrence.scan(grad, recurrence.jacobians(steps))

        def scan() -> Any:
            with recurrence.on_stream():
                return plan.exclusive_scan(grad, self.chain)

        def param_grads() -> Any:
            with recurrence.on_stream():
                return steps.param_grads(recurrence.scan(grad, jacobians))

        def forward() -> Any:
            with torch.no_grad():
                return layer(self.x)

        frozen = self.model.classifier().layer.requires_grad_(False)
        start = torch.zeros(1, self.batch, HIDDEN, device=self.x.device, requires_grad=True)
        last = frozen(self.x, start)[1][0]
        of_start = partial(torch.autograd.grad, last, start, self.grad, retain_graph=True)

        def step(trainer: Trainer) -> dict[str, Call]:
            def learn(threads: int) -> float:
                trainer.threads = threads
                return trainer.learn(self.x, self.labels)

            return {f"{n} threads": partial(learn, n) for n in self._thread_counts()}

        return {
            OURS: lambda: self._threaded(self._backward(self.ours)),
            AUTOGRAD: lambda: self._threaded(self._backward(self.theirs)),
            CHAIN: lambda: self._threaded(of_start),
            GIVEN: lambda: {"plan": param_grads},
            VALUES: lambda: {"plan": state_grads},
            SCAN: lambda: {"plan": scan},
            FORWARD: lambda: self._threaded(forward),
            RECORDED: lambda: self._threaded(lambda: layer(self.x)),
            STEP_OURS: lambda: step(self.trainers[1]),
            STEP: lambda: step(self.trainers[0]),
        }

    def jax(self, name: str) -> dict[str, Call]:
        """Return the pure chain: the gradients of all states from dense Jacobians."""
        if self.model.device == "cuda":
            # Or it takes most of the device's memory for itself.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        jax = peers.load_jax()
        try:
            (device, *_) = jax.devices(device_of(self.model.device).jax_name)
        except RuntimeError as error:
            raise MissingPeerError(f"jax does not compute there: {error}") from None
        jax.config.update("jax_default_matmul_precision", "highest")
        make = peers.jax_scans if name == JAX_SCAN else peers.jax_associative_scans
        values = np.ascontiguousarray(self.recurrence.host(self.chain.data))
        dense = values.reshape(*values.shape[:2], HIDDEN, HIDDEN)
        with jax.default_device(device):
            return make(self.grad.cpu().numpy(), dense)

    def differences(self, calls: dict[str, Call]) -> dict[str, float]:
        """How far our gradients are from theirs, relative to the largest entry of each.

        Gradients of every parameter are compared with autograd's, and of all states with JAX's.
        It raises AssertionError if rounding does not explain a difference.
        """
        differences = {}
        names = [name for name, _ in self.theirs.layer.named_parameters()]
        for name, ours, theirs in zip(names, calls[OURS](), calls[AUTOGRAD](), strict=True):
            differences[name] = float((ours - theirs).abs().max() / theirs.abs().max())
        ours = self.recurrence.host(calls[SCAN]())
        for name in (JAX_SCAN, JAX_ASSOCIATIVE):
            if name in calls:
                error = np.abs(ours - np.asarray(calls[name]())).max()
                differences[f"states, {name}"] = float(error / np.abs(ours).max())
        for name, difference in differences.items():
            if not difference < np.sqrt(np.finfo(np.float32).eps):
                raise AssertionError(f"{name}: the relative difference is {difference:.1e}")
        return differences

    def _backward(self, classifier: Classifier) -> Call:
        last = classifier.last_state(self.x)
        parameters = list(classifier.layer.parameters())
        return partial(torch.autograd.grad, last, parameters, self.grad, retain_graph=True)

    def _thread_counts(self) -> tuple[int, ...]:
        return (THREADS,) if self.model.device == "cuda" else (THREADS, 1)

    def _threaded(self, call: Call) -> dict[str, Call]:
        """With PyTorch on two threads or one: steps may be too small to share."""

        def run(threads: int) -> Any:
            torch.set_num_threads(threads)
            return call()

        return {f"{n} threads": partial(run, n) for n in self._thread_counts()}


def floors(model: Model, steps: int, batch: int) -> dict[str, float]:
    """Seconds that must pass at least, at the rates measured on this device.

    The whole backward pass reads inputs and states, recomputes products, multiplies them by
    gradients, and sums up into those of the parameters. The scan reads Jacobians and writes
    gradients.
    """
    rows, gates = steps * batch, {"RNN": 1, "GRU": 3}[model.kind]
    jacobians, row = rows * HIDDEN**2, model.inputs + 1 + HIDDEN
    work = {
        SCAN: (4 * (jacobians + rows * HIDDEN), 2 * jacobians),
        OURS: (4 * rows * row, 2 * gates * rows * HIDDEN * (2 * row + HIDDEN)),
    }
    device = device_of(model.device)
    return {
        name: device.ceilings(moved).seconds(moved, flops) for name, (moved, flops) in work.items()
    }


def take_turns(
    calls: dict[str, Call], rounds: int, pause: float, turn: float, before: Call | None = None
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of all calls, and how many cores others used in each round.

    What has to run `before` each of the calls is not timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    others = []
    for _ in range(rounds):
        start, others_start = time.perf_counter(), machine.others()
        for name, call in calls.items():
            time.sleep(pause)
            call_for(call, turn, before)
            samples[name] += rounded(call_for(call, turn, before))
        others.append((machine.others() - others_start) / (time.perf_counter() - start))
    return samples, others


def call_for(call: Call, length: float, before: Call | None) -> list[float]:
    """Seconds of each of as many calls as fit, at least one."""
    samples: list[float] = []
    while not samples or sum(samples) < length:
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


# -- Training -------------------------------------------------------------------------------------


def train(model: Model, batches: Sequence[Callable[[], Batch]], sizes: tuple[int, int]) -> Results:
    """Train by autograd and by the scan, from the same parameters, on the same batches.

    A third training is autograd's with the samples of every batch in reverse order, which differs
    by rounding alone. They take turns, a block of iterations each. The `sizes` are the steps and
    samples of a batch.

    Returns
    -------
    dict
        ``losses`` and ``seconds`` of every iteration by training, and the ``largest_difference``
        of a loss from autograd's.

    Raises
    ------
    AssertionError
        If the losses by the scan differ from autograd's by more than rounding makes of them.
    """
    torch.set_num_threads(THREADS)
    keep_memory()
    trainers = {
        AUTOGRAD: model.trainer(),
        OURS: model.trainer(sizes),
        REVERSED: model.trainer(),
    }
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for block in _blocks(batches, model.device):
        for name, trainer in trainers.items():
            if not losses[name]:
                _choose_threads(trainer, block[0], model.device)
            time.sleep(_QUICK_PAUSE)
            trainer.loss(*block[0])  # warms up
            for x, labels in block:
                batch = (x.flip(1), labels.flip(0)) if name == REVERSED else (x, labels)
                start = time.perf_counter()
                losses[name].append(trainer.learn(*batch))
                seconds[name].append(round(time.perf_counter() - start, 9))
    difference = {
        name: float(np.abs(np.subtract(losses[name], losses[AUTOGRAD])).max())
        for name in (OURS, REVERSED)
    }
    # Rounding, of which there may be none in the control by chance, and what training makes of it.
    allowed = _DRIFT * (difference[REVERSED] + np.finfo(np.float32).eps * max(losses[AUTOGRAD]))
    if not difference[OURS] <= allowed:
        raise AssertionError(f"losses differ by {difference[OURS]:.1e}; rounding: {allowed:.1e}")
    return {
        "steps": sizes[0],
        "batch": sizes[1],
        "losses": losses,
        "seconds": seconds,
        "largest_difference": difference,
    }


def _blocks(batches: Sequence[Callable[[], Batch]], device: str) -> Iterator[list[Batch]]:
    for first in range(0, len(batches), _BLOCK):
        block = [make() for make in batches[first : first + _BLOCK]]
        yield [(x.to(device), labels.to(device)) for x, labels in block]


def _choose_threads(trainer: Trainer, batch: Batch, device: str) -> None:
    """Set the number of threads that is fastest, before the trainer has learnt anything."""

    def gradients(threads: int) -> None:
        trainer.threads = threads
        trainer.loss(*batch)

    if device == "cpu":
        options: dict[str, Call] = {str(n): partial(gradients, n) for n in (THREADS, 1)}
        trainer.threads = int(fastest(options)[0])


# -- What is shown --------------------------------------------------------------------------------


def speedup(piece: Results, theirs: str, ours: str) -> Spread:
    """Return the ratio of medians, and between how low and how high it may be, by quartiles."""
    return drawing.ratio(quartiles(piece, theirs), quartiles(piece, ours))


def quartiles(piece: Results, name: str, unit: float = 1) -> Spread:
    """Return the quartiles of a contender's samples, the median in the middle."""
    return drawing.quartiles(piece["samples"][name], unit)


def row(
    what: str, piece: Results, theirs: str, ours: str, paper: float | None = None
) -> Row | None:
    """Return a line of a table, if this peer is there."""
    if theirs not in piece["samples"]:
        return None
    their_median, our_median = (quartiles(piece, name)[1] for name in (theirs, ours))
    return Row(what, theirs.removeprefix("training step, "), their_median, our_median, paper)


def plot_with_spread(axes: Any, points: Mapping[Any, Spread], **style: Any) -> None:
    drawing.plot_with_spread(axes, points, **{"ms": 4.5, "lw": 1.2, "elinewidth": 1} | style)


def plot_training(losses: Any, differences: Any, training: Results) -> None:
    """Losses over the time they took; how far they have been from autograd's, over iterations."""
    for name, style in _TRAININGS.items():
        values, passed = training["losses"][name], np.cumsum(training["seconds"][name])
        if name != REVERSED:
            losses.plot(passed, values, lw=0.5, alpha=0.25, color=style["color"])
            losses.plot(passed, _smooth(values), label=name, **style)
        if name != AUTOGRAD:
            apart = np.abs(np.subtract(values, training["losses"][AUTOGRAD]))
            largest = np.maximum.accumulate(apart)
            differences.plot(1 + np.arange(len(apart)), largest, label=name, **style)
    losses.set(xlabel="seconds", xlim=(0, None))
    # A difference of nothing is drawn at the bottom.
    differences.set_yscale("symlog", linthresh=1e-8, linscale=0.3)
    differences.set(xlabel="iteration", ylim=(0, None))


def said_of_losses(training: Results) -> str:
    """How far they are apart, for a caption."""
    apart = training["largest_difference"]
    ours, theirs = (f"{apart[name]:.1e}" if apart[name] else "0" for name in (OURS, REVERSED))
    return (
        f"Losses of the scan differ from autograd's by at most {ours}; autograd's own, with the "
        f"samples of every batch in reverse order, by at most {theirs}."
    )


def said_of_seconds(training: Results) -> str:
    """How long both took, for a caption."""
    theirs, ours = (sum(training["seconds"][name]) for name in (AUTOGRAD, OURS))
    return f"autograd took {theirs:.3g} s, the scan {ours:.3g} s, a ratio of {theirs / ours:.2f}"


def _smooth(losses: Sequence[float]) -> NDArray[Any]:
    """Means over a window of a tenth of the run, which is shorter at its ends."""
    half = len(losses) // 20
    total = np.concatenate([[0], np.cumsum(losses)])
    middle = np.arange(len(losses))
    start, stop = np.maximum(middle - half, 0), np.minimum(middle + half + 1, len(losses))
    return np.asarray((total[stop] - total[start]) / (stop - start))
