"""Training by stale weights, by the update rule as it is written: NumPy, one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from sparsescan.jacobians import Linear, Residual, Tanh
from sparsescan.jacobians.shared.operator import Operator

Array = Any
Params = dict[str, Array]


def transcription(
    ops: Sequence[Operator],
    start: Sequence[Params],
    registers: Sequence[int],
    batches: Sequence[tuple[Array, Array]],
    rate: float,
) -> list[Params]:
    """Return the weights behind all updates; without registers, those of SGD.

    Layer ``l`` is in stage ``i`` of ``K + 1``. Minibatch ``m`` goes through it forward in cycle
    ``m + i - 1`` and backward in cycle ``m + 2 K + 1 - i``, whose gradient it adds to the weights.
    Registers are numbers of layers.
    """
    k, layers = len(registers), ops
    stage = [1 + sum(p <= at for p in registers) for at in range(len(layers))]

    @cache
    def weights(layer: int, cycle: int) -> Params:
        """W(t)."""
        if cycle == 0:
            return start[layer]
        before = weights(layer, cycle - 1)
        m = cycle - 1 - (2 * k + 1 - stage[layer])
        if not 0 <= m < len(batches):
            return before
        grads = gradients(layer, m)[1]
        return {name: value - rate * grads[name] for name, value in before.items()}

    @cache
    def kept(layer: int, m: int) -> list[Array]:
        """Input and output, and what is between them."""
        x = kept(layer - 1, m)[-1] if layer else batches[m][0]
        return forward(layers[layer], weights(layer, m + stage[layer] - 1), x)

    @cache
    def gradients(layer: int, m: int) -> tuple[Array, Params]:
        """Return the loss's gradients in the input of a layer and in its parameters."""
        if layer + 1 < len(layers):
            delta = gradients(layer + 1, m)[0]
        else:
            delta = loss_of(kept(layer, m)[-1], batches[m][1])[1]
        current = weights(layer, m + 2 * k + 1 - stage[layer])
        return backward(layers[layer], current, kept(layer, m), delta)

    end = len(batches) + 2 * k + 1
    # Earlier cycles first, so that nothing recurs deeply.
    return [[weights(layer, t) for layer in range(len(layers))] for t in range(end + 1)][-1]


def start_of(ops: Sequence[Operator]) -> list[Params]:
    """Parameters of all layers in float64, copied; of a residual block, its linear layer's."""
    owners = [op.ops[0] if isinstance(op, Residual) else op for op in ops]
    return [{name: array.astype(np.float64) for name, array in op.params.items()} for op in owners]


def loss_of(y: Array, labels: Array) -> tuple[float, Array]:
    """Mean cross-entropy, and its gradient."""
    p = np.exp(y - y.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), labels]).mean()
    return float(loss), (p - np.eye(y.shape[1], dtype=y.dtype)[labels]) / len(y)


# -- Layers ---------------------------------------------------------------------------------------


def forward(op: Operator, params: Params, x: Array) -> list[Array]:
    """Return the input, the output, and between them what a backward pass reads."""
    if isinstance(op, Tanh):
        return [x, np.tanh(x)]
    if isinstance(op, Linear):
        return [x, x @ params["weight"].T + params["bias"]]
    f = np.tanh(x @ params["weight"].T + params["bias"])
    return [x, f, x + f]


def backward(op: Operator, params: Params, kept: list[Array], delta: Array) -> tuple[Array, Params]:
    """Gradients in the input and in the parameters."""
    x, y = kept[0], kept[-1]
    if isinstance(op, Tanh):
        return delta * (1 - y**2), {}
    if isinstance(op, Linear):
        return delta @ params["weight"], {"weight": delta.T @ x, "bias": delta.sum(axis=0)}
    inner = delta * (1 - kept[1] ** 2)
    grads = {"weight": inner.T @ x, "bias": inner.sum(axis=0)}
    return delta + inner @ params["weight"], grads
