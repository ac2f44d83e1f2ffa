"""Stages: layers that one worker runs forward and backward, and trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import api
from ..jacobians import Operator, Sequential
from ..locks import cached_property
from ..parallel.communicator import Fault
from .exchanges import descend
from .networks import Step
from .strategy import Job, Training, check_samples

Array = Any
Gradients = list[dict[str, Array]]


def copies(ops: Sequence[Operator]) -> list[Operator]:
    """Return layers with parameters of their own; those that share some still do."""
    # Parameters that are drawn when they are first read would be drawn twice.
    for op in ops:
        _ = op.params
    return copy.deepcopy(list(ops))


class Stage:
    """Layers one after the other, with parameters of their own; unless `copied`, those given.

    If `deep`, the gradient of the input is needed.
    """

    #: Number of the first layers whose parameters all stages have.
    shared = 0

    def __init__(self, ops: Sequence[Operator], deep: bool = True, *, copied: bool = True) -> None:
        self.network = Sequential(copies(ops) if copied else ops)
        plan = self.network.plan(schedule="linear")
        self._scan: Any = plan.inclusive_scan if deep else plan.exclusive_scan
        self._scans = deep or len(self.network) > 1
        self._values: list[Array] | None = None
        self._kind: tuple[int, np.dtype[Any]] | None = None

    @property
    def patterns(self) -> Any:
        """Patterns of the Jacobians, from the last to the first."""
        return self.network.patterns

    @property
    def parameters(self) -> Gradients:
        """Parameters of every layer, by name, not copied."""
        return [layer.params for layer in self.network.layers]

    def forward(self, x: Array, entering: Array | None = None) -> list[Array]:
        """Return the input of every layer, and the output of the last.

        The layers read `entering`, the output of the stage before, or else the samples `x`.
        """
        return self.network.activations(x if entering is None else entering)

    def leaving(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return the gradient with which the chain of Jacobians starts, and those of what follows.

        These are empty: no layer follows the chain.
        """
        return grad, []

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return gradients of the input of the stage, flattened, and of the parameters of layers.

        If the gradient of the input is not needed, it is that of the output of the first layer.
        """
        grad, following = self.leaving(activations, grad)
        grads = [grad.reshape(len(grad), -1)]
        if self._scans:
            grads = self.product(grad, self.values(activations))
        return grads[-1], self.param_grads(activations, grads, following)

    def values(self, activations: list[Array]) -> list[Array]:
        """Return values of the Jacobians, from the last to the first, until the next call.

        They are written over those before: the system takes as long to give new memory as it takes
        to write them.
        """
        kind = len(activations[0]), activations[0].dtype
        out = self._values if kind == self._kind else None
        self._values, self._kind = self.network.values(activations, out=out), kind
        return self._values

    def product(self, grad: Array, values: list[Array]) -> Any:
        """Return gradients from that of the output on, by Jacobians with these values."""
        return self._scan(grad.reshape(len(grad), -1), values)

    def param_grads(
        self, activations: list[Array], grads: Any, following: Sequence[dict[str, Array]] = ()
    ) -> Gradients:
        """Return gradients of the parameters from those of a scan, and those of what follows."""
        return [*self.network.param_grads(activations, grads), *following]

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """Take a step of SGD: ``θ ← θ − learning_rate · ∇θ``."""
        descend(self.parameters, grads, learning_rate)


class RecurrentStage(Stage):
    """Steps of a recurrent network, and the layer that reads the last state if it follows.

    Back-propagation through time, by one call for all steps of each of its parts. The backward pass
    computes the gates again from the states that were kept, by the weights that it finds: those of
    the forward pass, unless they are stale. The layers, of which the first is a step, are copied.
    """

    shared = 1
    _scans = True

    def __init__(self, ops: Sequence[Operator]) -> None:
        layers = copies(ops)
        steps = [op for op in layers if isinstance(op, Step)]
        self._cell, self._count = steps[0].cell, len(steps)
        self._steps = slice(steps[0].t, steps[-1].t + 1)
        behind = layers[len(steps) :]
        self._readout = Stage(behind, copied=False) if behind else None

    @property
    def patterns(self) -> Any:
        """Patterns of the Jacobians of the steps."""
        return [self._cell.pattern] * self._count

    @property
    def parameters(self) -> Gradients:
        """Parameters of the cell, then of the readout, by name, not copied."""
        behind = [] if self._readout is None else self._readout.parameters
        return [self._cell.params, *behind]

    def forward(self, x: Array, entering: Array | None = None) -> list[Array]:
        """Return the inputs of all steps, the states, the last of them, and the output.

        Sequences have the shape ``(batch, all steps, features)``; the state `entering` is zeros by
        default.
        """
        inputs = np.ascontiguousarray(x[:, self._steps].swapaxes(0, 1))
        states = self._cell.unroll(inputs, entering)
        last = [states[-1]] if self._readout is None else self._readout.forward(states[-1])
        return [inputs, states, *last]

    def leaving(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return the gradient of the last state, and those of the parameters of the readout."""
        if self._readout is None:
            return grad, []
        return self._readout.backward(activations[2:], grad)

    def values(self, activations: list[Array]) -> Any:
        """Return values of the Jacobians, from the last to the first."""
        inputs, states = activations[:2]
        self._derivatives = self._cell.linearize(inputs, states[:-1])
        return self._derivatives.values()[::-1]

    @cached_property
    def _scan(self) -> Any:
        return api.plan(self.patterns, schedule="linear").exclusive_scan

    def param_grads(
        self, activations: list[Array], grads: Any, following: Sequence[dict[str, Array]] = ()
    ) -> Gradients:
        """Return gradients of the cell from those of its states, last first, and the following."""
        return [self._derivatives.param_grads(np.asarray(grads)[::-1]), *following]


def stage_of(ops: Sequence[Operator], deep: bool = True) -> Stage:
    """Return the stage of some layers of a network, with parameters of its own."""
    return RecurrentStage(ops) if isinstance(ops[0], Step) else Stage(ops, deep)


class StageTraining(Training):
    """Training of layers that follow each other, of which this rank has a part of ``network.ops``.

    If `deep`, the gradient of the part's input is needed.
    """

    def __init__(self, job: Job, part: slice, deep: bool = True) -> None:
        self.communicator, network, fault = job.communicator, job.network, Fault()
        self.batch, self.rate = job.batch, job.rate
        with fault:
            self.stage = stage_of(network.ops[part], deep)
        self.communicator.agree(fault.error)
        self.input_shape = network.ops[part.start].input_shape
        self.output_shape = network.ops[part.stop - 1].output_shape
        self._shape, self._classes = network.input_shape, math.prod(network.output_shape)
        # Activations have the dtypes of the input and of all parameters so far.
        ends = part.start, part.stop, len(network.ops)
        self._kinds = [
            {p.dtype for op in network.ops[:k] for p in op.params.values()} for k in ends
        ]

    def check(self, x: Array, labels: NDArray[np.int64]) -> tuple[Array, NDArray[np.int64]]:
        """Check a batch, and note the dtypes of what enters and leaves, and of the output."""
        x, labels = check_samples(x, labels, (self.batch, *self._shape), self._classes)
        self.dtypes = [np.result_type(x.dtype, *kinds) for kinds in self._kinds]
        return x, labels
