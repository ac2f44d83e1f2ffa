"""Training by stale weights, by the update rule as it is written: NumPy, one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from sparsescan.jacobians import Linear, Operator, Residual, Tanh
from sparsescan.recurrent import GRUCell
from sparsescan.strategies.networks import Recurrent, Step, Trainable

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
    All steps of a recurrent network are one layer. Registers are numbers of operators.
    """
    k = len(registers)
    firsts = _firsts(ops)
    layers = [ops[at] for at in firsts]
    stage = [1 + sum(p <= at for p in registers) for at in firsts]

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
    layers = [ops[k] for k in _firsts(ops)]
    owners = [op.ops[0] if isinstance(op, Residual) else op for op in layers]
    return [{name: array.astype(np.float64) for name, array in op.params.items()} for op in owners]


def parameters(network: Trainable) -> list[Params]:
    """Parameters of all layers, of a cell once, not copied."""
    recurrent = isinstance(network, Recurrent)
    layers = [network.cell, network.readout] if recurrent else network.layers  # type: ignore[union-attr]
    return [layer.params for layer in layers]


def loss_of(y: Array, labels: Array) -> tuple[float, Array]:
    """Mean cross-entropy, and its gradient."""
    p = np.exp(y - y.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), labels]).mean()
    return float(loss), (p - np.eye(y.shape[1], dtype=y.dtype)[labels]) / len(y)


def sgd(network: Any, x: Any, labels: Any) -> tuple[float, list[dict[str, Any]]]:
    """Loss and gradients of one process, layer by layer and step by step."""
    if isinstance(network, Recurrent):
        cell, readout = network.cell, network.readout
        x = x.swapaxes(0, 1)
        states = cell.unroll(x)
        loss, grad = loss_of(readout.forward(states[-1]), labels)
        grads = [dict.fromkeys(cell.params, 0), readout.param_grads(states[-1], grad)]
        grad = grad @ readout.jacobian(states[-1][0]).toarray().T
        for before, now in zip(states[-2::-1], x[::-1], strict=True):
            for name, grad_now in cell.param_grads(now, before, grad).items():
                grads[0][name] = grads[0][name] + grad_now
            steps = zip(now, before, grad, strict=True)
            grad = np.stack([cell.jacobian(one, state) @ g for one, state, g in steps])
        return loss, grads
    xs = network.activations(x)
    loss, grad = loss_of(xs[-1], labels)
    samples = []
    for k in range(len(x)):
        gradients = [grad[k]]
        for jacobian in network.jacobians([array[k] for array in xs])[:-1]:
            gradients.append(jacobian @ gradients[-1])
        samples.append(gradients)
    return loss, network.param_grads(xs, [np.stack(step) for step in zip(*samples, strict=True)])


def _firsts(ops: Sequence[Operator]) -> list[int]:
    """Numbers of all operators, but of the steps behind the first."""
    return [k for k, op in enumerate(ops) if not (isinstance(op, Step) and op.t > 0)]


# -- Layers ---------------------------------------------------------------------------------------


def forward(op: Operator, params: Params, x: Array) -> list[Array]:
    """Return the input, the output, and between them what a backward pass reads."""
    if isinstance(op, Tanh):
        return [x, np.tanh(x)]
    if isinstance(op, Linear):
        return [x, x @ params["weight"].T + params["bias"]]
    if isinstance(op, Residual):
        f = np.tanh(x @ params["weight"].T + params["bias"])
        return [x, f, x + f]
    assert isinstance(op, Step)
    states = [np.zeros((len(x), op.cell.state_size))]
    for t in range(x.shape[1]):
        states.append(step(op, params, x[:, t], states[-1])[0])
    return [x, *states]


def backward(op: Operator, params: Params, kept: list[Array], delta: Array) -> tuple[Array, Params]:
    """Gradients in the input and in the parameters."""
    x, y = kept[0], kept[-1]
    if isinstance(op, Tanh):
        return delta * (1 - y**2), {}
    if isinstance(op, Linear):
        return delta @ params["weight"], {"weight": delta.T @ x, "bias": delta.sum(axis=0)}
    if isinstance(op, Residual):
        inner = delta * (1 - kept[1] ** 2)
        grads = {"weight": inner.T @ x, "bias": inner.sum(axis=0)}
        return delta + inner @ params["weight"], grads
    total = {name: np.zeros_like(value) for name, value in params.items()}
    for t in reversed(range(x.shape[1])):
        _, u, v, passed = step(op, params, x[:, t], kept[1 + t], delta)
        result = {
            "weight_ih": u.T @ x[:, t],
            "weight_hh": v.T @ kept[1 + t],
            "bias_ih": u.sum(axis=0),
            "bias_hh": v.sum(axis=0),
        }
        total = {name: total[name] + result[name] for name in total}
        delta = passed + v @ params["weight_hh"]
    return delta, total


def step(
    op: Step, params: Params, x: Array, h: Array, delta: Array = 0.0
) -> tuple[Array, Array, Array, Array]:
    """Return the next state, and gradients in ``W_ih x + b_ih``, ``W_hh h + b_hh`` and ``h``."""
    u = x @ params["weight_ih"].T + params["bias_ih"]
    v = h @ params["weight_hh"].T + params["bias_hh"]
    if not isinstance(op.cell, GRUCell):
        y = np.tanh(u + v)
        slope = delta * (1 - y**2)
        return y, slope, slope, np.zeros_like(h)
    (u_r, u_z, u_n), (v_r, v_z, v_n) = np.split(u, 3, axis=1), np.split(v, 3, axis=1)
    r, z = 1 / (1 + np.exp(-u_r - v_r)), 1 / (1 + np.exp(-u_z - v_z))
    n = np.tanh(u_n + r * v_n)
    in_n = delta * (1 - z) * (1 - n**2)
    in_r, in_z = in_n * v_n * r * (1 - r), delta * (h - n) * z * (1 - z)
    both = (
        np.concatenate([in_r, in_z, in_n], axis=1),
        np.concatenate([in_r, in_z, in_n * r], axis=1),
    )
    return (1 - z) * n + z * h, *both, delta * z
