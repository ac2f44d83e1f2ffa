"""Training that uses stale weights, cycle by cycle.

In cycle ``t`` stage ``s`` of ``K + 1``, counted from 0, runs minibatch ``t - s`` forward and
minibatch ``t - (2 K - s)`` backward, both by the weights that it has, and then updates these. So
the forward pass of a minibatch has not seen the last ``2 (K - s)`` updates, and its backward pass
meets activations that were made by weights as old as that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .stage import Gradients
from .strategy import cross_entropy

__all__ = ["Layers", "Pipelined", "Simulation", "Worker"]

Array = NDArray[Any]
Batch = tuple[Array, NDArray[np.int64]]


class Layers(Protocol):
    """What a pipeline needs of a stage; a :class:`Stage` is one."""

    def forward(self, x: Array) -> list[Array]:
        """What its backward pass needs, and the output."""

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Gradients of the input and of the parameters."""

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """An update."""

    @property
    def parameters(self) -> Gradients:
        """Of every layer, by name."""


class Worker:
    """A stage with the activations that wait for their gradients.

    Parameters
    ----------
    stage : Layers
        The layers.
    last : bool
        Whether the loss follows.
    batch : int
        Samples of a minibatch.
    learning_rate : float
        Of SGD.
    """

    def __init__(self, stage: Layers, last: bool, batch: int, learning_rate: float) -> None:
        self.stage = stage
        self._last, self._batch, self._learning_rate = last, batch, learning_rate
        self._kept: deque[list[Array]] = deque()

    def clear(self) -> None:
        """Forget the minibatches that are on their way."""
        self._kept.clear()

    def cycle(
        self, x: Array | None, labels: NDArray[np.int64] | None, grad: Array | None
    ) -> tuple[Array | None, Array | None, float]:
        """One cycle: a minibatch forward, an older one backward, if there are such.

        Returns
        -------
        y : ndarray or None
            The output for `x`.
        grad : ndarray or None
            The gradient of the input to which the gradient that was given belongs.
        loss : float
            nan unless this is the last stage.
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
        grad, found = self.stage.backward(self._kept.popleft(), grad)
        self.stage.descend(found, self._learning_rate)
        return y, grad, loss


class Pipelined(ABC):
    """What both ways to run a pipeline have in common: when minibatches are fed."""

    def __init__(self, registers: int, iterations: int | None) -> None:
        self._registers = registers
        self._left = math.inf if iterations is None else iterations
        self._active = 0

    def step(self, x: Array, labels: NDArray[np.int64]) -> float:
        """Feed a minibatch, and run one cycle; or all that it takes, once that is asked for.

        Returns
        -------
        float
            The loss of the minibatch that reaches the end: this one, if it is run alone.
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

    @abstractmethod
    def _run(self, feeds: Sequence[Batch | None]) -> float:
        """Cycles that are fed with these; the last loss that they make."""


class Simulation(Pipelined):
    """A pipeline whose stages all run in this process, one after the other in every cycle.

    Parameters
    ----------
    stages : sequence of Layers
        The network: ``K + 1`` stages for ``K`` pairs of registers; a :class:`Stage` each, a
        :class:`~.stage.RecurrentStage`, or something like them. They are trained, not copied.
    batch : int
        Samples of a minibatch.
    learning_rate : float
        Of SGD.
    iterations : int, optional
        How many minibatches are pipelined: those that follow are run alone (hybrid training).
        By default all are.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import Linear, Tanh
    >>> from sparsescan.parallel.strategies.stage import Stage
    >>> layers = Linear(3, 5, rng=0), Tanh(input_shape=(5,)), Linear(5, 2, rng=1)
    >>> pipeline = Simulation([Stage(layers[:2]), Stage(layers[2:])], 4, 0.1)
    >>> x, labels = np.ones((4, 3), np.float32), np.array([0, 1, 0, 0])
    >>> losses = [pipeline.step(x, labels) for _ in range(20)]
    >>> bool(np.isnan(losses[0])), losses[-1] < losses[1]
    (True, True)
    """

    def __init__(
        self,
        stages: Sequence[Layers],
        batch: int,
        learning_rate: float,
        iterations: int | None = None,
    ) -> None:
        super().__init__(len(stages) - 1, iterations)
        self._workers = [
            Worker(stage, k == len(stages) - 1, batch, learning_rate)
            for k, stage in enumerate(stages)
        ]
        # What stage s has written in the last cycle, for s + 1 and s - 1.
        self._forward: list[Array | None] = [None] * len(stages)
        self._backward: list[Array | None] = [None] * len(stages)
        self._labels: deque[NDArray[np.int64]] = deque()

    def parameters(self) -> Gradients:
        """Parameters of every layer, not copied."""
        return [params for worker in self._workers for params in worker.stage.parameters]

    def _run(self, feeds: Sequence[Batch | None]) -> float:
        loss = math.nan
        for feed in feeds:
            found = self._cycle(feed)
            loss = loss if math.isnan(found) else found
        return loss

    def _cycle(self, feed: Batch | None) -> float:
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
