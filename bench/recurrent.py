"""A recurrent classifier in PyTorch, its backward pass by autograd or by the scan.

The forward pass is PyTorch's own. Backward, :class:`LastState` makes the transposed Jacobians of
all steps at once, as two factors each, scans, and sums up the gradients of the parameters.
:func:`measure` lets both ways take turns, and the parts they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import sparsescan
from sparsescan.recurrent import GRUCell, RNNCell

from . import peers, races
from .experiment import Drawing, Results
from .races import OURS
from .timing import THREADS, Call

TorchLayer = nn.RNN | nn.GRU

HIDDEN = 20

# Contenders, and the parts of an iteration, that are timed at each size.
AUTOGRAD = "PyTorch autograd"
GIVEN = "sparsescan, Jacobians given"
SCAN = "sparsescan, scan of whole Jacobians"
JAX_SCAN, JAX_ASSOCIATIVE = "jax.lax.scan", "jax.lax.associative_scan"
STEP, STEP_OURS = "training step, PyTorch autograd", "training step, sparsescan"
# Sizes with more rows than so many, one for each step and sample, have few rounds.
_LONG = 100_000


@dataclass(frozen=True)
class Model:
    """The classifier that is trained."""

    kind: Literal["RNN", "GRU"]  # the layer: PyTorch's, with HIDDEN units
    inputs: int  # length of an input
    classes: int
    rate: float  # of Adam

    def classifier(self, sizes: tuple[int, int] | None = None) -> Classifier:
        """Return a classifier with its initial parameters, backward by a scan if it has sizes."""
        torch.manual_seed(0)
        layer: TorchLayer = getattr(nn, self.kind)(self.inputs, HIDDEN)
        return Classifier(layer, self.classes, sizes)


# -- The backward pass by a scan ------------------------------------------------------------------


class Recurrence:
    """The cell and the plan of a layer's backward pass by a scan.

    The layer has one direction and takes time first; its parameters are shared, so it must stay
    where it is.
    """

    def __init__(self, layer: TorchLayer, steps: int, batch: int) -> None:
        self.layer = layer
        kind = {"RNN_TANH": RNNCell, "GRU": GRUCell}[layer.mode]
        self.cell = kind(layer.input_size, layer.hidden_size, layer.bias)
        for name in self.cell.params:
            setattr(self.cell, name, getattr(layer, f"{name}_l0").detach().numpy())
        patterns = [self.cell.implicit_pattern] * steps
        self.plan = sparsescan.plan(patterns, batch=batch, dtype=self.cell.weight_hh.dtype)

    def linearize(self, x: Tensor, outputs: Tensor) -> Any:
        """Return the layer at its inputs and outputs."""
        after = outputs.detach().numpy()
        return self.cell.linearize(x.detach().numpy(), np.pad(after, ((1, 0), (0, 0), (0, 0)))[:-1])

    def scan(self, grad: Any, jacobians: Any) -> Any:
        """Gradients of the states after all steps, from that of the last one."""
        return self.plan.exclusive_scan(grad, jacobians)[::-1]


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
        steps = ctx.recurrence.linearize(x, outputs)
        grads = ctx.recurrence.scan(grad.contiguous().numpy(), steps.implicit())
        of_x = torch.as_tensor(steps.input_grads(grads)) if ctx.needs_input_grad[0] else None
        return of_x, None, *map(torch.as_tensor, steps.param_grads(grads).values())


class Classifier(nn.Module):
    """A recurrent layer, and a linear map of its last state to the scores of the classes.

    Through inputs of some `sizes`, steps and samples, it scans backward; else autograd does.
    """

    def __init__(self, layer: TorchLayer, classes: int, sizes: tuple[int, int] | None) -> None:
        super().__init__()
        self.layer = layer
        self.linear = nn.Linear(layer.hidden_size, classes)
        self.recurrence = None if sizes is None else Recurrence(layer, *sizes)

    def last_state(self, x: Tensor) -> Tensor:
        """h_T, shape ``(batch, HIDDEN)``, from an input ``(steps, batch, inputs)``."""
        if self.recurrence is None:
            return self.layer(x)[1][0]
        return LastState.apply(x, self.recurrence, *self.layer.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.last_state(x))


# -- Times ----------------------------------------------------------------------------------------


def measure(model: Model, x: Tensor, labels: Tensor, quick: bool) -> Results:
    """Return the times of backward passes and of training steps, of one batch.

    The batch is an input ``(steps, batch, inputs)`` and labels ``(batch,)``. Beside the times are
    the ``differences`` of each gradient from autograd's, and of all states from JAX's.
    """
    torch.set_num_threads(THREADS)
    race = _Race(model, x, labels)
    few = race.steps * race.batch > _LONG
    piece = races.timed(race.contenders(), {}, quick, race.differences, few=few)
    return {"steps": race.steps, "batch": race.batch} | piece


class _Race:
    """The contenders for one batch."""

    def __init__(self, model: Model, x: Tensor, labels: Tensor) -> None:
        self.model, self.x, self.labels = model, x, labels
        self.steps, self.batch = sizes = x.shape[:2]
        self.theirs, self.ours = model.classifier(), model.classifier(sizes)
        # A gradient of the size that a loss has.
        rng = np.random.default_rng(0)
        self.grad = rng.standard_normal((self.batch, HIDDEN), np.float32) / self.batch
        self.recurrence = Recurrence(self.theirs.layer, *sizes)
        with torch.no_grad():
            self.outputs = self.theirs.layer(self.x)[0]
        self.linearized = self.recurrence.linearize(self.x, self.outputs)
        # The whole Jacobians, which JAX multiplies as well.
        self.chain = self.linearized.jacobian()

    def contenders(self) -> dict[str, peers.Variants]:
        """Functions that make the variants of each contender."""
        recurrence, grad, steps = self.recurrence, self.grad, self.linearized
        jacobians, plan = steps.implicit(), sparsescan.plan(self.chain)

        dense = np.ascontiguousarray(self.chain.data).reshape(
            self.steps, self.batch, HIDDEN, HIDDEN
        )
        return {
            OURS: lambda: peers.in_threads(self._backward(self.ours)),
            AUTOGRAD: lambda: peers.in_threads(self._backward(self.theirs)),
            GIVEN: lambda: {"plan": lambda: steps.param_grads(recurrence.scan(grad, jacobians))},
            SCAN: lambda: {"plan": partial(plan.exclusive_scan, grad, self.chain)},
            STEP_OURS: lambda: peers.in_threads(self._learn((self.steps, self.batch))),
            STEP: lambda: peers.in_threads(self._learn(None)),
            JAX_SCAN: lambda: peers.jax_scans(grad, dense),
            JAX_ASSOCIATIVE: lambda: peers.jax_associative_scans(grad, dense),
        }

    def _backward(self, classifier: Classifier) -> Call:
        last = classifier.last_state(self.x)
        parameters, above = list(classifier.layer.parameters()), torch.from_numpy(self.grad)
        return partial(torch.autograd.grad, last, parameters, above, retain_graph=True)

    def _learn(self, sizes: tuple[int, int] | None) -> Call:
        """Return an iteration of a training by Adam."""
        classifier = self.model.classifier(sizes)
        optimiser = torch.optim.Adam(classifier.parameters(), lr=self.model.rate)

        def learn() -> None:
            optimiser.zero_grad()
            nn.functional.cross_entropy(classifier(self.x), self.labels).backward()
            optimiser.step()

        return learn

    def differences(self, calls: dict[str, Call]) -> dict[str, float]:
        """How far gradients of parameters are from autograd's, and of all states from JAX's."""
        names = [name for name, _ in self.theirs.layer.named_parameters()]
        ours, theirs = (dict(zip(names, calls[who](), strict=True)) for who in (OURS, AUTOGRAD))
        found, states = races.apart(ours, theirs), calls[SCAN]()
        for name in (JAX_SCAN, JAX_ASSOCIATIVE):
            if name in calls:
                found |= races.apart({name: states}, {name: calls[name]()})
        return found


def about(kind: str) -> Results:
    """Describe the layer, and how it is timed, for the file of results."""
    return {
        "layer": f"torch.nn.{kind}, {HIDDEN} units, float32; a linear map of its last state",
        "Jacobians": "two factors of each: slopes, and weights that all steps and samples share",
        "memory": "glibc keeps what is freed (mallopt), for all contenders",
        "threads of PyTorch": "2 or 1, whichever were faster; see the variants in the file",
    }


def draw(
    results: Results,
    title: str,
    theirs: str,
    ours: str,
    published: Callable[[str], float],
    said: str,
) -> list[Drawing]:
    """Draw the ratio of two contenders at all sizes, and the one that the paper published."""
    pieces = {
        key: {
            "samples": {name: piece["samples"][name] for name in (theirs, ours)},
            "wanted": {theirs: published(key)},
        }
        for key, piece in races.races(results).items()
    }
    return races.draw(title, pieces, said, ours)


def at_best(pieces: Results, work: str, theirs: str, ours: str, paper: float) -> list[Any]:
    """Return the line of where we are ahead by most, of several sizes."""
    if len(pieces) < 2:
        return []
    key = max(pieces, key=lambda key: races.speedup(pieces[key], theirs, ours)[1])
    return races.row(f"{work}, at best: {key}", pieces[key], theirs, ours, paper)
