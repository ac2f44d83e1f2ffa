"""Training of parts of a chain on ranks, with gradients by a scan over the Jacobians."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel.api import plan
from ...parallel.communicator import Fault
from ...parallel.grid import Grid
from ..collectives import Sums, descend
from ..recurrent import graph_of
from ..stage import Gradients, stage_of
from ..strategy import (
    Job,
    Training,
    check_samples,
    cross_entropy,
)
from .costs import parts_of

__all__ = ["ScanTraining"]

Array = NDArray[Any]


class ScanTraining(Training):
    """A part of a network on every rank, for a group of samples.

    Parameters
    ----------
    job : Job
        What is trained.
    grid : Grid
        Parts of the chain, and groups of samples.
    schedule : {"vectors", "products"}
        How parts are combined.
    """

    def __init__(self, job: Job, grid: Grid, schedule: str) -> None:
        self.communicator, fault = job.communicator, Fault()
        rank, network = self.communicator.rank, job.network
        self._grid, self._batch, self._rate = grid, job.batch, job.rate
        self._position = grid.position(rank)
        # Positions of the scan are numbered from the end of the chain on.
        span = parts_of(graph_of(network), grid.chain)[grid.chain - 1 - self._position]
        with fault:
            self._stage = stage_of(network.ops[span.start : span.stop])
        self.communicator.agree(fault.error)
        self._shape, self._classes = network.input_shape, math.prod(network.output_shape)
        self._entering = network.ops[span.start].input_shape
        # Activations between parts have the dtypes of the input and of all parameters so far.
        self._before, self._behind = (
            {param.dtype for op in network.ops[:end] for param in op.params.values()}
            for end in (span.start, span.stop)
        )
        sizes = [sum(p.size for p in layer.values()) for layer in self._stage.parameters]
        own = [r for r in range(grid.size) if grid.position(r) == self._position]
        shared = self._stage.shared
        # Some parameters are those of all parts.
        everywhere = sum(sizes[:shared]), range(grid.size)
        self._sums = Sums(self.communicator, [everywhere, (sum(sizes[shared:]), own)])
        sizes_of_grid = grid.chain, grid.batch
        self.plan = plan(job.comm, self._stage.patterns, grid=sizes_of_grid, schedule=schedule)

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Run one training step; see :meth:`.Training.step`."""
        x, labels = check_samples(x, labels, (self._batch, *self._shape), self._classes)
        stage, world, rank = self._stage, self.communicator, self.communicator.rank
        samples = self._grid.samples(rank, self._batch)
        x, labels = x[samples], labels[samples]
        loss, grad = 0.0, None
        following: Gradients = []
        with world.ending("a training step"):
            entering = None
            if self._position < self._grid.chain - 1:
                dtype = np.result_type(x, *self._before)
                entering = np.empty((len(x), *self._entering), dtype)
                world.receive(entering, rank + 1)
            activations = stage.forward(x, entering)
            if self._position > 0:
                dtype = np.result_type(x, *self._behind)
                world.send(np.ascontiguousarray(activations[-1], dtype), rank - 1)
            else:
                loss, grad = cross_entropy(activations[-1], labels, self._batch)
                grad, following = stage.leaving(activations, grad)
            values = stage.values(activations)
        gradients = self.plan.exclusive_scan(grad, values)
        with world.ending("a training step"):
            grads = stage.param_grads(activations, gradients, following)
            descend(stage.parameters, grads, self._rate, self._sums.total)
            return math.fsum(world.gather(loss))

    def parameters(self) -> list[dict[str, Array]]:
        """Return parameters of every layer, whole, on all ranks."""
        every = self.communicator.gather(self._stage.parameters)
        # Those of the first group, from the start of the chain on.
        held = every[: self._grid.chain][::-1]
        shared = self._stage.shared
        whole: list[dict[str, Array]] = held[0][:shared]
        return whole + [params for part in held for params in part[shared:]]
