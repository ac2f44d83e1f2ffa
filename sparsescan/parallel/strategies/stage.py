"""Stage: some layers that one worker runs forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ...jacobians import Operator, Sequential

__all__ = ["Stage", "copies"]

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
            grads = self.product(grad, self.network.values(activations))
        return grads[-1], self.network.param_grads(activations, grads)

    def product(self, grad: Array, values: list[Array]) -> list[Array]:
        """Gradients from that of the output on, by Jacobians with these values."""
        return list(self._scan(grad.reshape(len(grad), -1), values))

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """A step of SGD: ``θ ← θ − learning_rate · ∇θ``."""
        for params, found in zip(self.parameters, grads, strict=True):
            for name, grad in found.items():
                params[name] -= learning_rate * grad
