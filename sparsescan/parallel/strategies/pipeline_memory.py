"""Memory of a pipeline with stale weights, beside weight stashing and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .pipeline_schedule import Placement

__all__ = ["Memory"]


@dataclass(frozen=True)
class Memory:
    """What training takes, counted as in the paper: activations, their gradients, and weights.

    Optimisers, gradients of weights and workspaces are left out.

    Attributes
    ----------
    placement : Placement
        Of the registers.
    outputs : sequence of int
        Entries of each layer's output for one sample.
    weights : sequence of int
        Number of each layer's.
    batch : int
        Samples of a minibatch.
    itemsize : int
        Bytes of a number.

    Notes
    -----
    Zhang and Abdelrahman (2021), section 6.6 and appendix D: PipeDream keeps as many copies of the
    weights as minibatches are active, which they count as four in a pipeline of four stages. GPipe
    keeps the inputs of its stages, and computes one micro-batch's activations again.
    """

    placement: Placement
    outputs: Sequence[int]
    weights: Sequence[int]
    batch: int
    itemsize: int = 4

    @property
    def one(self) -> int:
        """Bytes without a pipeline: every activation and its gradient, and the weights."""
        return self.itemsize * (2 * self.batch * sum(self.outputs) + sum(self.weights))

    @property
    def stale(self) -> int:
        """Bytes with stale weights: a copy of a stage's activations for each cycle they wait."""
        kept = sum(
            degree * sum(self.outputs[part])
            for degree, part in zip(self.placement.degrees, self.placement.parts, strict=True)
        )
        return self.one + self.itemsize * self.batch * kept

    @property
    def stashing(self) -> int:
        """Bytes with weight stashing (PipeDream): the same, and copies of the weights."""
        return self.stale + self.itemsize * self.placement.stages * sum(self.weights)

    def micro_batches(self, count: int) -> float:
        """Bytes with so many micro-batches (GPipe)."""
        between = sum(self.outputs[p - 1] for p in self.placement.registers)
        activations = self.batch * between + 2 * self.batch / count * sum(self.outputs)
        return self.itemsize * (activations + sum(self.weights))
