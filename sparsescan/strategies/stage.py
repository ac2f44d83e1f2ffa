"""Stages: layers that one worker runs forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .. import api
from ..jacobians import Operator, Sequential
from .collectives import descend
from .recurrent import Step

__all__ = ["RecurrentStage", "Stage", "copies", "stage_of"]

Array = Any
Gradients = list[dict[str, Array]]


def copies(ops: Sequence[Operator]) -> list[Operator]:
    """Return layers with parameters of their own; those that share some still do."""
    # Parameters that are drawn when they are first read would be drawn twice.
    for op in ops:
        _ = op.params
    return copy.deepcopy(list(ops))


class Stage:
    """Layers one after the other, with parameters of their own.

    Parameters
    ----------
    ops : sequence of Operator
        The layers.
    deep : bool
        Whether the gradient of the input is needed.
    copied : bool
        Whether to copy the layers with their parameters; those that share some still do.

    Attributes
    ----------
    network : Sequential
        The layers.
    shared : int
        Number of its first layers whose parameters all stages have.
    """

    shared = 0

    def __init__(self, ops: Sequence[Operator], deep: bool = True, *, copied: bool = True) -> None:
        self.network = Sequential(copies(ops) if copied else ops)
        plan = self.network.plan(schedule="linear")
        self._scan = plan.inclusive_scan if deep else plan.exclusive_scan
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

        Parameters
        ----------
        x : ndarray
            Samples.
        entering : ndarray, optional
            The output of the stage before, which this one then reads in place of the samples.
        """
        return self.network.activations(x if entering is None else entering)

    def leaving(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return the gradient with which the chain of Jacobians starts, and those of what follows.

        These are empty: no layer follows the chain.
        """
        return grad, []

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return gradients of the input of the stage, flattened, and of its parameters.

        Parameters
        ----------
        activations : list of ndarray
            What :meth:`forward` returned.
        grad : ndarray, shape (batch, outputs)
            Gradient of the output.

        Returns
        -------
        grad : ndarray
            If it is not needed, that of the output of the first layer.
        grads : list of dict of str to ndarray
            Gradients of the parameters of each layer.
        """
        grads = [grad.reshape(len(grad), -1)]
        if self._scans:
            grads = self.product(grad, self.values(activations))
        return grads[-1], self.param_grads(activations, grads)

    def values(self, activations: list[Array]) -> list[Array]:
        """Return values of the Jacobians, from the last to the first, until the next call.

        They are written over those before: the system takes as long to give new memory as it takes
        to write them.
        """
        kind = len(activations[0]), activations[0].dtype
        out = self._values if kind == self._kind else None
        self._values, self._kind = self.network.values(activations, out=out), kind
        return self._values

    def product(self, grad: Array, values: list[Array]) -> list[Array]:
        """Return gradients from that of the output on, by Jacobians with these values."""
        return list(self._scan(grad.reshape(len(grad), -1), values))

    def param_grads(
        self, activations: list[Array], grads: Any, following: Sequence[dict[str, Array]] = ()
    ) -> Gradients:
        """Return gradients of the parameters from those of a scan, and those of what follows."""
        return [*self.network.param_grads(activations, grads), *following]

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """Take a step of SGD: ``θ ← θ − learning_rate · ∇θ``."""
        descend(self.parameters, grads, learning_rate)


class RecurrentStage:
    """Steps of a recurrent network, and the layer that reads the last state if it follows.

    Back-propagation through time, by one call for all steps of each of its parts. The methods are
    those of :class:`Stage`; the backward pass computes the gates again from the states that were
    kept, by the weights that it finds: those of the forward pass, unless they are stale.

    Parameters
    ----------
    ops : sequence of Operator
        Some of a :class:`~.recurrent.Recurrent`, one after the other, the first a step; copied.
    """

    shared = 1

    def __init__(self, ops: Sequence[Operator]) -> None:
        layers = copies(ops)
        steps = [op for op in layers if isinstance(op, Step)]
        self._cell = steps[0].cell
        self._steps = slice(steps[0].t, steps[-1].t + 1)
        self.patterns = [self._cell.pattern] * len(steps)
        behind = layers[len(steps) :]
        self._readout = Stage(behind, copied=False) if behind else None

    @property
    def parameters(self) -> Gradients:
        """Parameters of the cell, then of the readout, by name, not copied."""
        behind = [] if self._readout is None else self._readout.parameters
        return [self._cell.params, *behind]

    def forward(self, x: Array, entering: Array | None = None) -> list[Array]:
        """Return the inputs of all steps, the states, the last of them, and the output.

        Parameters
        ----------
        x : ndarray, shape (batch, all steps, features)
            Sequences.
        entering : ndarray, shape (batch, state_size), optional
            The state before the first step; by default zeros.
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

    def param_grads(
        self, activations: list[Array], grads: Any, following: Sequence[dict[str, Array]] = ()
    ) -> Gradients:
        """Return gradients of the cell from those of its states, last first, and the following."""
        return [self._derivatives.param_grads(np.asarray(grads)[::-1]), *following]

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return gradients of the state behind the first step, and of parameters."""
        grad, following = self.leaving(activations, grad)
        values = self.values(activations)
        grads = np.asarray(self._scan(grad.reshape(len(grad), -1), values))
        return grads[-1], self.param_grads(activations, grads, following)

    @cached_property
    def _scan(self) -> Any:
        return api.plan(self.patterns, schedule="linear").exclusive_scan

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """Take a step of SGD, as :meth:`Stage.descend`."""
        descend(self.parameters, grads, learning_rate)


def stage_of(ops: Sequence[Operator], deep: bool = True) -> Stage | RecurrentStage:
    """Return the stage of some layers of a network, with parameters of its own."""
    return RecurrentStage(ops) if isinstance(ops[0], Step) else Stage(ops, deep)
