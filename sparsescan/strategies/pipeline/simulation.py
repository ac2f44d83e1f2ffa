"""Training that uses stale weights, cycle by cycle.

In cycle ``t`` stage ``s`` of ``K + 1``, counted from 0, runs minibatch ``t - s`` forward and
minibatch ``t - (2 K - s)`` backward, both by the weights that it has, and then updates these. So
the forward pass of a minibatch has not seen the last ``2 (K - s)`` updates, and its backward pass
uses activations of weights as old as that.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...jacobians import Sequential as Layers
from ...jacobians.shared.operator import Operator


@dataclass(frozen=True)
class Placement:
    """A pipeline placement vector: after which layers there is a pair of pipeline registers.

    ``K`` pairs make ``K + 1`` forward stages, FS1 to FS(K+1), and as many backward stages, BKS1 to
    BKS(K+1), of which BKS1 has the layers of FS(K+1). Forward stage ``i`` has the layers from
    ``p_(i-1) + 1`` to ``p_i``.

    Attributes
    ----------
    layers : int
        Layers of the network, without its input.
    registers : tuple of int
        ``(p_1, …, p_K)``: numbers of layers, counted from 1, that increase.

    Raises
    ------
    InputError
        If there is no such layer, or none behind it.

    Notes
    -----
    Zhang and Abdelrahman (2021), section 4.1.

    Examples
    --------
    >>> placement = Placement(12, (3, 6))
    >>> placement.stages, placement.parts
    (6, (slice(0, 3, None), slice(3, 6, None), slice(6, 12, None)))
    >>> placement.degrees  # of staleness
    (4, 2, 0)
    >>> placement.stale([1] * 12)  # share of the weights
    0.5
    """

    layers: int
    registers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        bounds = (0, *self.registers, self.layers)
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise InputError(
                f"registers is {self.registers}; expected numbers of layers that increase, from 1 "
                f"to {self.layers - 1}"
            )

    def __str__(self) -> str:
        where = ", ".join(map(str, self.registers))
        behind = f", registers after layer{'s' * (len(self.registers) > 1)} {where}"
        return f"{self.stages} stages" + behind * bool(where)

    @property
    def stages(self) -> int:
        """Forward and backward stages: ``2 (K + 1)``."""
        return 2 * len(self.registers) + 2

    @property
    def parts(self) -> tuple[slice, ...]:
        """Layers of each forward stage, counted from 0."""
        bounds = (0, *self.registers, self.layers)
        return tuple(slice(a, b) for a, b in itertools.pairwise(bounds))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degree of staleness of stage ``i``: its weights are ``2 (K - i + 1)`` cycles old."""
        return tuple(range(self.stages - 2, -1, -2))

    def stale(self, weights: Sequence[int]) -> float:
        """Return the share of weights that are stale: those before the last pair of registers.

        Parameters
        ----------
        weights : sequence of int
            Number of weights of each layer.
        """
        last = self.registers[-1] if self.registers else 0
        return sum(weights[:last]) / max(sum(weights), 1)


Array = NDArray[Any]
Gradients = list[dict[str, Array]]
Batch = tuple[Array, NDArray[np.int64]]


class Stage:
    """Copies of layers, one after the other, which are trained."""

    def __init__(self, ops: Sequence[Operator]) -> None:
        self.network = Layers(copy.deepcopy(list(ops)))
        self._plan = self.network.plan(schedule="linear")

    @property
    def parameters(self) -> Gradients:
        """Parameters of every layer, by name, not copied."""
        return [layer.params for layer in self.network.layers]

    def forward(self, x: Array) -> list[Array]:
        """Return the input of every layer, and the output of the last."""
        return self.network.activations(x)

    def product(self, grad: Array, activations: list[Array]) -> Any:
        """Return gradients of all activations from that of the output on, flattened."""
        values = self.network.values(activations)
        return self._plan.inclusive_scan(grad.reshape(len(grad), -1), values)

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return gradients of the input of the stage, flattened, and of its parameters."""
        grads = self.product(grad, activations)
        return grads[-1], self.network.param_grads(activations, grads)

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """Take a step of SGD, ``θ ← θ − learning_rate · ∇θ``, in place."""
        for own, layer in zip(self.parameters, grads, strict=True):
            for name, grad in layer.items():
                own[name] -= learning_rate * grad.reshape(own[name].shape)


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
    """A :class:`Stage`, or what has its methods, with activations that wait for gradients."""

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

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import Linear, Tanh
    >>> from sparsescan.strategies.pipeline.simulation import Simulation, Stage
    >>> layers = Linear(3, 5, rng=0), Tanh(input_shape=(5,)), Linear(5, 2, rng=1)
    >>> pipeline = Simulation([Stage(layers[:2]), Stage(layers[2:])], 4, 0.1)
    >>> x, labels = np.ones((4, 3), np.float32), np.array([0, 1, 0, 0])
    >>> losses = [pipeline.step(x, labels) for _ in range(20)]
    >>> bool(np.isnan(losses[0])), losses[-1] < losses[1]
    (True, True)
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
