"""Stages: layers that one worker runs forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ... import api
from ...jacobians import Operator, Sequential
from ...jacobians._cell import Linearization
from .recurrent import Step

__all__ = ["RecurrentStage", "Stage", "copies"]

Array = Any
Gradients = list[dict[str, Array]]


def copies(ops: Sequence[Operator]) -> list[Operator]:
    """Layers with parameters of their own; those that share some still do."""
    # What is drawn when it is first read would be drawn twice.
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
    """

    def __init__(self, ops: Sequence[Operator], deep: bool = True, *, copied: bool = True) -> None:
        self.network = Sequential(copies(ops) if copied else ops)
        plan = self.network.plan(schedule="linear")
        self._scan = plan.inclusive_scan if deep else plan.exclusive_scan
        self._scans = deep or len(self.network) > 1
        self._values: list[Array] | None = None
        self._kind: tuple[int, np.dtype[Any]] | None = None

    @property
    def parameters(self) -> Gradients:
        """Parameters of every layer, by name, not copied."""
        return [layer.params for layer in self.network.layers]

    def forward(self, x: Array) -> list[Array]:
        """The input of every step, and the output of the last."""
        return self.network.activations(x)

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Gradients of the input of the stage, flattened, and of its parameters.

        Parameters
        ----------
        activations : list of ndarray
            What :meth:`forward` returned.
        grad : ndarray, shape (batch, outputs)
            Of the output.

        Returns
        -------
        grad : ndarray
            If it is not needed, that of the output of the first layer.
        grads : list of dict of str to ndarray
            Of each layer.
        """
        grads = [grad.reshape(len(grad), -1)]
        if self._scans:
            grads = self.product(grad, self.values(activations))
        return grads[-1], self.network.param_grads(activations, grads)

    def values(self, activations: list[Array]) -> list[Array]:
        """Values of the Jacobians, from the last to the first, until the next call.

        They are in the memory of those before: the system takes as long to give new memory as it
        takes to write them.
        """
        kind = len(activations[0]), activations[0].dtype
        out = self._values if kind == self._kind else None
        self._values, self._kind = self.network.values(activations, out=out), kind
        return self._values

    def product(self, grad: Array, values: list[Array]) -> list[Array]:
        """Gradients from that of the output on, by Jacobians with these values."""
        return list(self._scan(grad.reshape(len(grad), -1), values))

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """A step of SGD: ``θ ← θ − learning_rate · ∇θ``."""
        _descend(self.parameters, grads, learning_rate)


class RecurrentStage:
    """Steps of a recurrent network, and what reads the last state if that follows.

    Back-propagation through time, by one call for all steps of each of its parts.

    Parameters
    ----------
    ops : sequence of Operator
        Some of a :class:`~.recurrent.Recurrent`, one after the other, the first a step; copied.

    Attributes
    ----------
    jacobians : list of Pattern
        Of the steps.

    Notes
    -----
    The backward pass reads the states that were kept, and makes the gates again from them by the
    weights that it finds: those of the forward pass, unless they are stale.
    """

    def __init__(self, ops: Sequence[Operator]) -> None:
        layers = copies(ops)
        steps = [op.cell for op in layers if isinstance(op, Step)]
        self._cell = steps[0]
        self.jacobians = [self._cell.pattern] * len(steps)
        behind = layers[len(steps) :]
        self._readout = Stage(behind, copied=False) if behind else None

    @property
    def parameters(self) -> Gradients:
        """Those of the cell, then of the readout, by name, not copied."""
        behind = [] if self._readout is None else self._readout.parameters
        return [self._cell.params, *behind]

    def forward(self, x: Array, state: Array | None = None) -> list[Array]:
        """The inputs of all steps, the states, the last of them, and the output.

        Parameters
        ----------
        x : ndarray, shape (batch, steps, features)
            Sequences.
        state : ndarray, shape (batch, state_size), optional
            Before the first step; by default zeros.
        """
        inputs = np.ascontiguousarray(x.swapaxes(0, 1))
        states = self._cell.unroll(inputs, state)
        last = [states[-1]] if self._readout is None else self._readout.forward(states[-1])
        return [inputs, states, *last]

    def leaving(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """From the gradient of the output that of the last state, and those of what reads it."""
        if self._readout is None:
            return grad, []
        return self._readout.backward(activations[2:], grad)

    def linearize(self, activations: list[Array]) -> Linearization:
        """The derivatives of all steps."""
        inputs, states = activations[:2]
        return self._cell.linearize(inputs, states[:-1])

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Gradients of the state behind the first step, and of parameters.

        Parameters
        ----------
        activations : list of ndarray
            What :meth:`forward` returned.
        grad : ndarray, shape (batch, outputs)
            Of the output.
        """
        grad, behind = self.leaving(activations, grad)
        steps = self.linearize(activations)
        grads = np.asarray(self._scan(grad.reshape(len(grad), -1), steps.values()[::-1]))
        return grads[-1], [steps.param_grads(grads[::-1]), *behind]

    @cached_property
    def _scan(self) -> Any:
        return api.plan(self.jacobians, schedule="linear").exclusive_scan

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """As :meth:`Stage.descend`."""
        _descend(self.parameters, grads, learning_rate)


def _descend(parameters: Gradients, grads: Gradients, learning_rate: float) -> None:
    for params, found in zip(parameters, grads, strict=True):
        for name, grad in found.items():
            params[name] -= learning_rate * grad
