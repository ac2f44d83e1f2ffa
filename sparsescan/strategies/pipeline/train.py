"""Pipelines over MPI ranks, one stage on each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel.communicator import Fault
from ..stage import Gradients, StageTraining
from ..strategy import Job, cross_entropy
from .simulation import Batch, Pipelined, Placement, Worker

Array = NDArray[Any]
Message = tuple[int, Array]


class _Neighbours(StageTraining):
    """Training of a stage by every rank, and the messages to and from the ranks beside it.

    Registers are those between ``network.ops``; a message has so many samples.
    """

    def __init__(self, job: Job, placement: Placement, samples: int) -> None:
        # The first rank has all steps of a cell.
        rank = job.communicator.rank
        super().__init__(job, placement.parts[rank], deep=rank > 0)
        self.first, self.last = rank == 0, rank == job.communicator.size - 1
        self._in, self._out = (samples, *self.input_shape), (samples, *self.output_shape)

    def forth(self, y: Array | None) -> Message:
        """Return a message of activations for the next rank; zeros if this one has failed."""
        return self.communicator.rank + 1, _message(y, self._out, self.dtypes[1])

    def back(self, grad: Array | None) -> Message:
        """Return a message of gradients for the rank before."""
        return self.communicator.rank - 1, _message(grad, self._in, self.dtypes[2])

    def activations(self) -> Message:
        """Return the rank before, and room for its activations."""
        return self.communicator.rank - 1, np.empty(self._in, self.dtypes[0])

    def gradients(self) -> Message:
        """Return the next rank, and room for its gradients."""
        return self.communicator.rank + 1, np.empty(self._out, self.dtypes[2])

    def agree(self, fault: Fault, loss: float) -> float:
        """Return the loss of the last rank, or raise if any rank has failed."""
        self.communicator.agree(fault.error)
        return float(self.communicator.broadcast(loss, self.communicator.size - 1))

    def parameters(self) -> Gradients:
        """Return parameters of every layer, on all ranks."""
        gathered = self.communicator.gather(self.stage.parameters)
        return [params for part in gathered for params in part]


class PipelineTraining(Pipelined, _Neighbours):
    """A pipeline with stale weights; see :class:`~.pipeline.predict.Pipeline`."""

    def __init__(self, job: Job, placement: Placement, iterations: int | None) -> None:
        Pipelined.__init__(self, len(placement.registers), iterations)
        _Neighbours.__init__(self, job, placement, job.batch)
        self._worker = Worker(self.stage, self.last, job.batch, job.rate)
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
        return super().step(*self.check(x, labels))

    def _run(self, feeds: Sequence[Batch | None]) -> float:
        self._fault = Fault()
        with self.communicator.ending("a training step"):
            loss = super()._run(feeds)
        try:
            return self.agree(self._fault, loss)
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

    def _cycle(self, feed: Batch | None) -> float:
        self._fed.appendleft(feed is not None)
        if feed is not None:
            self._labels.append(feed[1])
        if self.first:
            self._x = None if feed is None else feed[0]
        labels = self._labels.popleft() if self._fed[self.communicator.rank] else None
        y, grad, loss = None, None, math.nan
        with self._fault:
            y, grad, loss = self._worker.cycle(self._x, labels, self._grad)
        self._exchange(y, grad)
        return loss

    def _exchange(self, y: Array | None, grad: Array | None) -> None:
        """Send the outputs of this cycle, and receive those for the next, all at once.

        Which ranks send follows from when minibatches were fed: so a rank that has failed still
        sends, and none waits for it.
        """
        rank, last = self.communicator.rank, self._registers
        sends: list[Message] = []
        x = self.activations() if not self.first and self._fed[rank - 1] else None
        below = self.gradients() if not self.last and self._fed[2 * last - rank - 1] else None
        if not self.first and self._fed[2 * last - rank]:
            sends.append(self.back(grad))
        if not self.last and self._fed[rank]:
            sends.append(self.forth(y))
        self.communicator.exchange(sends, [room for room in (x, below) if room is not None])
        self._x, self._grad = (None if room is None else room[1] for room in (x, below))


class MicroBatchTraining(_Neighbours):
    """A pipeline of so many micro-batches; see :class:`~.pipeline.predict.MicroBatches`."""

    def __init__(self, job: Job, placement: Placement, count: int) -> None:
        super().__init__(job, placement, job.batch // count)
        self._count = count

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Run one training step; return the mean loss of the minibatch before it."""
        x, labels = self.check(x, labels)
        with self.communicator.ending("a training step"):
            fault, loss = self._run(x, labels)
        return self.agree(fault, loss)

    def _run(self, x: Array, labels: NDArray[np.int64]) -> tuple[Fault, float]:
        """Run the stage; return its fault, and the loss if it is the last."""
        xs, each = np.split(x, self._count), np.split(labels, self._count)
        forward, backward = self.stage.forward, self.stage.backward
        inputs, fault = [], Fault()
        for k in range(self._count):
            x = xs[k] if self.first else self._receive(self.activations())
            inputs.append(x)
            if not self.last:
                y = None
                with fault:
                    y = forward(x)[-1]
                self.communicator.exchange([self.forth(y)], [])
        loss, total = 0.0, None
        for x, wanted in zip(inputs, each, strict=True):
            grad = None if self.last else self._receive(self.gradients())
            back = None
            with fault:
                # Nothing but the input has been kept.
                activations = forward(x)
                if grad is None:
                    part, grad = cross_entropy(activations[-1], wanted, self.batch)
                    loss += part
                back, grads = backward(activations, grad)
                total = grads if total is None else _sum(total, grads)
            if not self.first:
                self.communicator.exchange([self.back(back)], [])
        if fault.error is None and total is not None:
            self.stage.descend(total, self.rate)
        return fault, loss

    def _receive(self, message: Message) -> Array:
        self.communicator.exchange([], [message])
        return message[1]


def _sum(a: Gradients, b: Gradients) -> Gradients:
    return [{name: x[name] + y[name] for name in x} for x, y in zip(a, b, strict=True)]


def _message(array: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in one piece, of the shape that is expected; zeros if there is none."""
    whole = np.zeros(shape) if array is None else array.reshape(shape)
    return np.ascontiguousarray(whole, dtype)
