"""Training steps whose parameters are given at each call, and belong to that call alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sequential import Sequential
from ..shared.operator import Operator
from .network_step import NetworkGradients, NetworkStep

Array = NDArray[Any]


def without_arrays(layers: Sequence[Operator]) -> list[Operator]:
    """Return copies of layers that have zeros, which take no memory, in place of parameters."""
    copies = [copy.copy(layer) for layer in layers]
    for layer in copies:
        _let_go(layer)
    return copies


def _let_go(layer: Operator) -> None:
    for name in getattr(layer, "parameter_names", ()):
        array = getattr(layer, name)
        vars(layer)[name] = np.broadcast_to(array.dtype.type(0), array.shape)


class BoundStep:
    """Run a training step of layers with parameters that are given at each call.

    Parameters
    ----------
    layers : sequence of Operator
        The layers. They are copied without their arrays, so steps do not disturb each other.
    """

    def __init__(self, layers: Sequence[Operator]) -> None:
        self._layers = without_arrays(layers)
        self._step: NetworkStep = Sequential(self._layers).training_step()

    def forward(self, x: Array, arrays: Mapping[tuple[int, str], Array]) -> Array:
        """Compute the output of the last layer.

        Parameters
        ----------
        x : ndarray, shape ``(batch, *input_shape)``
            The inputs.
        arrays : dict of (int, str) to ndarray
            Parameters, running statistics and counts of batches, by the number of their layer and
            their names in PyTorch; not copied.
        """
        for (k, name), array in arrays.items():
            # A read of a parameter checks its shape.
            own = "_batches" if name == "num_batches_tracked" else name
            vars(self._layers[k])[own] = array
        return self._step.forward(x)

    def kept_weights(self, k: int) -> Array:
        """Return a copy of the kept weights of a layer, as the last forward pass has read them."""
        return self._step.kept_weights(str(k))

    def update_running_stats(self) -> None:
        """Let running statistics take in the batch that has run forward."""
        self._step.update_running_stats()

    def backward(self, grad_output: Array, *, needs_input_grad: bool) -> NetworkGradients:
        """Return the gradients, as :meth:`NetworkStep.backward` does."""
        return self._step.backward(grad_output, needs_input_grad=needs_input_grad)

    def release(self) -> None:
        """Let go of the arrays of the last call."""
        for layer in self._layers:
            _let_go(layer)
