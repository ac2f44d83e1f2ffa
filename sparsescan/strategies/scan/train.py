"""Training of parts of a chain on ranks, with gradients by a scan over the Jacobians."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel.api import plan
from ...parallel.grid import Grid
from ..exchanges import Sums, descend
from ..recurrent import graph_of
from ..stage import Gradients, StageTraining
from ..strategy import Job, cross_entropy
from .costs import parts_of


class ScanTraining(StageTraining):
    """A part of a network on every rank, for a group of samples, combined by `schedule`."""

    def __init__(self, job: Job, grid: Grid, schedule: str) -> None:
        rank, self._grid = job.communicator.rank, grid
        self._position = grid.position(rank)
        # Positions of the scan are numbered from the end of the chain on.
        span = parts_of(graph_of(job.network), grid.chain)[grid.chain - 1 - self._position]
        super().__init__(job, slice(span.start, span.stop))
        sizes = [sum(p.size for p in layer.values()) for layer in self.stage.parameters]
        own = [r for r in range(grid.size) if grid.position(r) == self._position]
        shared = self.stage.shared
        # Some parameters are those of all parts.
        everywhere = sum(sizes[:shared]), range(grid.size)
        self._sums = Sums(self.communicator, [everywhere, (sum(sizes[shared:]), own)])
        self.plan = plan(
            job.comm, self.stage.patterns, grid=(grid.chain, grid.batch), schedule=schedule
        )

    def step(self, x: NDArray[Any], labels: NDArray[np.int64]) -> float:
        """Run one training step; see :meth:`.Training.step`."""
        x, labels = self.check(x, labels)
        before, behind, _ = self.dtypes
        stage, world, rank = self.stage, self.communicator, self.communicator.rank
        samples = self._grid.samples(rank, self.batch)
        x, labels = x[samples], labels[samples]
        loss, grad = 0.0, None
        following: Gradients = []
        with world.ending("a training step"):
            entering = None
            if self._position < self._grid.chain - 1:
                entering = np.empty((len(x), *self.input_shape), before)
                world.receive(entering, rank + 1)
            activations = stage.forward(x, entering)
            if self._position > 0:
                world.send(np.ascontiguousarray(activations[-1], behind), rank - 1)
            else:
                loss, grad = cross_entropy(activations[-1], labels, self.batch)
                grad, following = stage.leaving(activations, grad)
            values = stage.values(activations)
        gradients = self.plan.exclusive_scan(grad, values)
        with world.ending("a training step"):
            grads = stage.param_grads(activations, gradients, following)
            descend(stage.parameters, grads, self.rate, self._sums.total)
            return math.fsum(world.gather(loss))

    def parameters(self) -> Gradients:
        """Return parameters of every layer, whole, on all ranks."""
        # Those of the first group, from the start of the chain on.
        every = self.communicator.gather(self.stage.parameters)
        held: list[Gradients] = every[: self._grid.chain][::-1]
        shared = self.stage.shared
        return held[0][:shared] + [params for part in held for params in part[shared:]]
