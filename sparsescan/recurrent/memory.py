"""Both passes of a training step, in memory on the host or on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def beside(xp: Any, state: Any, reset_states: Any) -> Any:
    """Join initial states with the states that resets set, direction by direction.

    Both are arrays ``(layers · directions, batch, …)`` of any package. The result, and its
    gradients, are ``(2 · layers · directions, batch, …)``.
    """
    return xp.stack([state, reset_states], 1).reshape(2 * len(state), *state.shape[1:])


def has_reset_states(state: Any, directions: int) -> bool:
    """Return whether initial states are joined with states that resets set."""
    first = state[0] if isinstance(state, list) else state
    return first is not None and len(first) > directions


class Memory(ABC):
    """The memory of a training step for inputs of one shape.

    `weights` is the result of :meth:`weights`; `ks` are the directions of a layer.

    Attributes
    ----------
    directions : list
        The directions of all layers, in order.
    per_layer : int
        How many directions a layer has.
    widths : list of int
        The widths of the input and of each layer's output.
    steps, batch, dtype
        Those of the inputs.
    nbytes : int
        The size.
    keeps_gates : bool
        Whether it keeps the gates of all steps.
    """

    directions: list[Any]
    per_layer: int
    widths: list[int]
    steps: int
    batch: int
    dtype: np.dtype[Any]
    nbytes: int
    keeps_gates: bool

    @property
    def layers(self) -> list[range]:
        """The directions of each layer."""
        width = self.per_layer
        return [range(k, k + width) for k in range(0, len(self.directions), width)]

    def forward(
        self,
        params: list[list[Array]],
        x: Array,
        state: Any,
        lengths: NDArray[np.int64] | None,
        resets: NDArray[np.uint8] | None = None,
    ) -> tuple[Array, Array]:
        """Return outputs and last states.

        By default initial states are zeros, and samples have all steps. Before a step where
        `resets` is not 0, the state of a sample is set to zeros, or to the state :func:`beside` its
        initial state.
        """
        self._packed: list[Any] | None = self.weights(params)
        self.read(x, state, lengths, resets)
        for ks in self.layers:
            self.run(ks, self._packed)
        return self.results(lengths)

    def backward(
        self, above: Array, carry: Array, needs_input_grad: bool
    ) -> tuple[Array | None, Array, list[dict[str, Array]]]:
        """Return gradients in the input, in the initial states, and in each direction's parameters.

        `above` and `carry` are the gradients in outputs and last states. On the host an empty array
        means zeros.
        """
        weights, self._packed = self._packed, None
        return self.backward_of(weights, above, carry, needs_input_grad)

    def backward_of(
        self, weights: Any, above: Array, carry: Any, needs_input_grad: bool
    ) -> tuple[Array | None, Array, list[dict[str, Array]]]:
        """Do :meth:`backward` with the parameters of the last forward pass."""
        self.read_carry(carry)
        input_grad = self.input_grad() if needs_input_grad else None
        params: dict[int, dict[str, Array]] = {}
        for ks in reversed(self.layers):
            below = self.below(ks.start) if ks.start > 0 else input_grad
            params |= zip(ks, self.back(ks, weights, above, below), strict=True)
            if below is not None and ks.start > 0:
                above = self.above(ks, above, below)
        return input_grad, self.state_grad(), [params[k] for k in range(len(self.directions))]

    def above(self, ks: range, above: Array, below: Array) -> Array:
        """Return the gradients in the outputs of the layer below; `below` are those in its readers.

        The gradients in all outputs are `above`.
        """
        return below

    @abstractmethod
    def allocate(self) -> None:
        """Take the memory."""

    @abstractmethod
    def weights(self, params: list[list[Array]]) -> list[Any]:
        """Return packed parameters for kernels; the next call may overwrite them."""

    @abstractmethod
    def read(
        self,
        x: Array,
        state: Any,
        lengths: NDArray[np.int64] | None,
        resets: NDArray[np.uint8] | None = None,
    ) -> None:
        """Read inputs, initial states, lengths and resets."""

    @abstractmethod
    def run(self, ks: range, weights: Any) -> None:
        """Compute all states of the directions of a layer."""

    @abstractmethod
    def results(self, lengths: NDArray[np.int64] | None) -> tuple[Array, Array]:
        """Return outputs and last states."""

    @abstractmethod
    def read_carry(self, carry: Any) -> None:
        """Take over the gradients in the last states."""

    @abstractmethod
    def state_grad(self) -> Array:
        """Return the gradients in the initial states."""

    @abstractmethod
    def input_grad(self) -> Array:
        """Return a new array for the gradients in the input."""

    @abstractmethod
    def below(self, k: int) -> Array:
        """Return the array for the gradients in the input of the layer of a direction."""

    @abstractmethod
    def back(
        self, ks: range, weights: Any, above: Array, below: Array | None
    ) -> list[dict[str, Array]]:
        """Return the gradients in the parameters of each direction of a layer.

        `above` holds the gradients in its outputs, and `below` gets those in its inputs.
        """
