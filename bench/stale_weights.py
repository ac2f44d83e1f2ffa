"""Training that uses stale weights, cycle by cycle.

In cycle ``t`` stage ``s`` of ``K + 1``, counted from 0, runs minibatch ``t - s`` forward and
minibatch ``t - (2 K - s)`` backward, both by the weights that it has, and then updates these. So
the forward pass of a minibatch has not seen the last ``2 (K - s)`` updates, and its backward pass
uses activations of weights as old as that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Gradients = list[dict[str, Array]]
Batch = tuple[Array, NDArray[np.int64]]


def cross_entropy(output: Array, labels: NDArray[np.int64], batch: int) -> tuple[float, Array]:
    """Return ``-Σ log softmax(output)[label] / batch`` of these samples, and its gradient.

    The outputs of a sample, of whatever shape, are logits; `batch` are the samples of a whole step.
    """
    output = output.reshape(len(output), -1)
    shifted = output - output.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    grad = np.exp(logs)
    grad[rows, labels] -= 1
    grad /= batch
    return -float(logs[rows, labels].sum()) / batch, grad


class Worker:
    """A stage of layers, with activations that wait for gradients."""

    def __init__(self, stage: Any, last: bool, batch: int, learning_rate: float) -> None:
        self.stage = stage
        self._last, self._batch, self._learning_rate = last, batch, learning_rate
        self._kept: deque[list[Array]] = deque()

    def cycle(
        self, x: Array | None, labels: NDArray[np.int64] | None, grad: Array | None
    ) -> tuple[Array | None, Array | None, float]:
        """Run one cycle: a minibatch forward, and an older one backward, if there are such.

        Return the output for `x`, the gradient of the input of the older one, and the loss, which
        is nan unless this is the last stage.
        """
        y, loss = None, math.nan
        if x is not None:
            self._kept.append(self.stage.forward(x))
            y = self._kept[-1][-1]
            if self._last:
                assert labels is not None
                loss, grad = cross_entropy(y, labels, self._batch)
        if grad is None:
            return y, None, loss
        grad, grads = self.stage.backward(self._kept.popleft(), grad)
        self.stage.descend(grads, self._learning_rate)
        return y, grad, loss


class Simulation:
    """A pipeline whose stages all run in this process, one after the other in every cycle.

    Its ``K + 1`` stages for ``K`` pairs of registers, as for a :class:`Worker`, are trained, not
    copied. Minibatches behind the first `iterations` are run alone (hybrid training).
    """

    def __init__(
        self, stages: Sequence[Any], batch: int, learning_rate: float, iterations: int | None = None
    ) -> None:
        self._registers = len(stages) - 1
        self._left = math.inf if iterations is None else iterations
        self._active = 0
        self._workers = [
            Worker(stage, k == len(stages) - 1, batch, learning_rate)
            for k, stage in enumerate(stages)
        ]
        # Outputs of each stage in the last cycle, for the next one and for the one before.
        self._forward: list[Array | None] = [None] * len(stages)
        self._backward: list[Array | None] = [None] * len(stages)
        self._labels: deque[NDArray[np.int64]] = deque()

    def parameters(self) -> Gradients:
        """Return parameters of every layer, not copied."""
        return [params for worker in self._workers for params in worker.stage.parameters]

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Feed a minibatch and run one cycle, or all its cycles if it is run alone.

        Return the loss of the minibatch that reaches the end, or nan.
        """
        fed: list[Batch | None] = [(np.array(x), np.array(labels))]
        empty: list[Batch | None] = [None] * (2 * self._registers)
        if self._left > 0:
            self._left -= 1
            self._active = len(empty)
            return self._run(fed)
        # Minibatches that are on their way are finished first.
        before, self._active = empty[: self._active], 0
        return self._run([*before, *fed, *empty])

    def drain(self) -> None:
        """Finish the minibatches that are on their way."""
        self._run([None] * self._active)
        self._active = 0

    def _run(self, feeds: Sequence[Batch | None]) -> float:
        """Run a cycle for each feed; return the last loss."""
        loss = math.nan
        for feed in feeds:
            latest = self._cycle(feed)
            loss = loss if math.isnan(latest) else latest
        return loss

    def _cycle(self, feed: Batch | None) -> float:
        """Run one cycle; return the loss of the minibatch that reaches the end, or nan."""
        x = None
        if feed is not None:
            x, labels = feed
            self._labels.append(labels)
        given: list[Array | None] = [x, *self._forward[:-1]]
        grads: list[Array | None] = [*self._backward[1:], None]
        loss = math.nan
        for k, worker in enumerate(self._workers):
            ends = k == self._registers and given[k] is not None
            wanted = self._labels.popleft() if ends else None
            self._forward[k], self._backward[k], loss = worker.cycle(given[k], wanted, grads[k])
        return loss
