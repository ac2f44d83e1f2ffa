"""Pipelines over MPI ranks, one stage on each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel.communicator import Fault
from ..stage import Gradients, stage_of
from ..strategy import Job, Training, check_samples, cross_entropy
from .schedule import Placement
from .simulation import Batch, Pipelined, Worker

__all__ = ["MicroBatchTraining", "PipelineTraining"]

Array = NDArray[Any]
Messages = list[tuple[int, Array]]


class _Rank:
    """The stage of this rank, and the messages that it sends and receives."""

    def __init__(self, job: Job, placement: Placement, samples: int) -> None:
        self.communicator, network = job.communicator, job.network
        part = placement.parts[self.communicator.rank]
        fault = Fault()
        with fault:
            # The first rank has all steps of a cell.
            self.stage = stage_of(network.ops[part], deep=not self.first)
        self.communicator.agree(fault.error)
        sides = network.ops[part.start].input_shape, network.ops[part.stop - 1].output_shape
        self._in, self._out = ((samples, *shape) for shape in sides)
        # Activations between stages have the dtypes of the input and of all parameters so far.
        before, behind, every = network.ops[: part.start], network.ops[: part.stop], network.ops
        self._dtypes = [
            {param.dtype for op in ops for param in op.params.values()}
            for ops in (before, behind, every)
        ]
        self._shape, self._classes = network.input_shape, math.prod(network.output_shape)

    @property
    def first(self) -> bool:
        return self.communicator.rank == 0

    @property
    def last(self) -> bool:
        return self.communicator.rank == self.communicator.size - 1

    def check(
        self, x: Array, labels: NDArray[np.int64], batch: int
    ) -> tuple[Array, NDArray[np.int64]]:
        """Check a minibatch, and note the dtype of its samples."""
        x, labels = check_samples(x, labels, (batch, *self._shape), self._classes)
        kinds = [np.result_type(x.dtype, *dtypes) for dtypes in self._dtypes]
        self._before, self._behind, self._every = kinds
        return x, labels

    def forth(self, y: Array | None) -> tuple[int, Array]:
        """Return a message of activations for the next rank; zeros if this one has failed."""
        return self.communicator.rank + 1, _message(y, self._out, self._behind)

    def back(self, grad: Array | None) -> tuple[int, Array]:
        """Return a message of gradients for the rank before."""
        return self.communicator.rank - 1, _message(grad, self._in, self._every)

    def activations(self) -> tuple[int, Array]:
        """Return the rank before, and room for its activations."""
        return self.communicator.rank - 1, np.empty(self._in, self._before)

    def gradients(self) -> tuple[int, Array]:
        """Return the next rank, and room for its gradients."""
        return self.communicator.rank + 1, np.empty(self._out, self._every)

    def agree(self, fault: Fault, loss: float) -> float:
        """Return the loss of the last rank, or raise if any rank has failed."""
        self.communicator.agree(fault.error)
        return float(self.communicator.broadcast(loss, self.communicator.size - 1))


class _RankTraining(Training):
    """Training by stages, of which this rank runs one."""

    _rank: _Rank

    def _start(self, job: Job, placement: Placement, samples: int) -> None:
        self._rank = _Rank(job, placement, samples)
        self.communicator = self._rank.communicator

    def parameters(self) -> Gradients:
        """Return parameters of every layer, on all ranks."""
        gathered = self.communicator.gather(self._rank.stage.parameters)
        return [params for part in gathered for params in part]


class PipelineTraining(Pipelined, _RankTraining):
    """A pipeline with stale weights; see :class:`~.pipeline.Pipeline`.

    Parameters
    ----------
    job : Job
        What is trained, with a rank for each stage.
    placement : Placement
        Registers in ``network.ops``; all steps of a recurrent network are in one stage.
    iterations : int or None
        As for a :class:`~.pipeline_run.Simulation`.
    """

    def __init__(self, job: Job, placement: Placement, iterations: int | None) -> None:
        super().__init__(len(placement.registers), iterations)
        self._start(job, placement, job.batch)
        self._batch = job.batch
        self._worker = Worker(self._rank.stage, self._rank.last, job.batch, job.rate)
        self._labels: deque[NDArray[np.int64]] = deque()
        # Activations and gradients that the neighbours have sent in the last cycle.
        self._x: Array | None = None
        self._grad: Array | None = None
        # Whether a minibatch was fed, in this cycle and those before it.
        age = 2 * self._registers + 1
        self._fed: deque[bool] = deque([False] * age, age)

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Feed a minibatch; return the loss of the one that reaches the end, or nan.

        After an error of a stage, which all ranks raise, the pipeline is empty; samples that are
        refused change nothing.
        """
        return super().step(*self._rank.check(x, labels, self._batch))

    def _run(self, feeds: Sequence[Batch | None]) -> float:
        fault, loss = Fault(), math.nan
        with self.communicator.ending("a training step"):
            for feed in feeds:
                latest = self._cycle(feed, fault)
                loss = loss if math.isnan(latest) else latest
        try:
            return self._rank.agree(fault, loss)
        except BaseException:
            self._clear()
            raise

    def _clear(self) -> None:
        """Forget the minibatches that are on their way, on all ranks."""
        self._worker.clear()
        self._labels.clear()
        self._x = self._grad = None
        self._fed.extend([False] * len(self._fed))
        self._active = 0

    def _cycle(self, feed: Batch | None, fault: Fault) -> float:
        self._fed.appendleft(feed is not None)
        if feed is not None:
            self._labels.append(feed[1])
        if self._rank.first:
            self._x = None if feed is None else feed[0]
        labels = self._labels.popleft() if self._fed[self.communicator.rank] else None
        y, grad, loss = None, None, math.nan
        with fault:
            y, grad, loss = self._worker.cycle(self._x, labels, self._grad)
        self._exchange(y, grad)
        return loss

    def _exchange(self, y: Array | None, grad: Array | None) -> None:
        """Send the outputs of this cycle, and receive those for the next, all at once.

        Which ranks send follows from when minibatches were fed: so a rank that has failed still
        sends, and none waits for it.
        """
        rank, last = self.communicator.rank, self._registers
        sends: Messages = []
        receives: Messages = []
        self._x = self._grad = None
        if not self._rank.first:
            if self._fed[2 * last - rank]:
                sends.append(self._rank.back(grad))
            if self._fed[rank - 1]:
                receives.append(self._rank.activations())
                self._x = receives[-1][1]
        if not self._rank.last:
            if self._fed[rank]:
                sends.append(self._rank.forth(y))
            if self._fed[2 * last - rank - 1]:
                receives.append(self._rank.gradients())
                self._grad = receives[-1][1]
        self.communicator.exchange(sends, receives)


class MicroBatchTraining(_RankTraining):
    """A pipeline of micro-batches; see :class:`~.pipeline.MicroBatches`.

    Parameters
    ----------
    job, placement
        As for a :class:`PipelineTraining`.
    count : int
        Number of micro-batches.
    """

    def __init__(self, job: Job, placement: Placement, count: int) -> None:
        self._start(job, placement, job.batch // count)
        self._batch, self._learning_rate, self._count = job.batch, job.rate, count

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Run one training step; return the mean loss of the minibatch before it."""
        x, labels = self._rank.check(x, labels, self._batch)
        with self.communicator.ending("a training step"):
            fault, loss = self._run(x, labels)
        return self._rank.agree(fault, loss)

    def _run(self, x: Array, labels: NDArray[np.int64]) -> tuple[Fault, float]:
        """Run the stage; return its fault, and the loss if it is the last."""
        xs, each = np.split(x, self._count), np.split(labels, self._count)
        forward, backward = self._rank.stage.forward, self._rank.stage.backward
        inputs, fault = [], Fault()
        for k in range(self._count):
            x = xs[k] if self._rank.first else self._receive(*self._rank.activations())
            inputs.append(x)
            if not self._rank.last:
                y = None
                with fault:
                    y = forward(x)[-1]
                self.communicator.exchange([self._rank.forth(y)], [])
        loss, total = 0.0, None
        for x, wanted in zip(inputs, each, strict=True):
            grad = None if self._rank.last else self._receive(*self._rank.gradients())
            back = None
            with fault:
                # Nothing but the input has been kept.
                activations = forward(x)
                if grad is None:
                    part, grad = cross_entropy(activations[-1], wanted, self._batch)
                    loss += part
                back, grads = backward(activations, grad)
                total = grads if total is None else _sum(total, grads)
            if not self._rank.first:
                self.communicator.exchange([self._rank.back(back)], [])
        if fault.error is None and total is not None:
            self._rank.stage.descend(total, self._learning_rate)
        return fault, loss

    def _receive(self, rank: int, place: Array) -> Array:
        self.communicator.exchange([], [(rank, place)])
        return place


def _sum(a: Gradients, b: Gradients) -> Gradients:
    return [{name: x[name] + y[name] for name in x} for x, y in zip(a, b, strict=True)]


def _message(array: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in one piece, of the shape that is expected; zeros if there is none."""
    if array is None:
        return np.zeros(shape, dtype)
    return np.ascontiguousarray(array.reshape(shape), dtype)
