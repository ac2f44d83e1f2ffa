"""On some ranks: layers shared by batch, model and domain train as one process does, byte by byte.

``mpiexec -n RANKS python -m mpi4py mpi_integrated.py SEED ROUNDS [monitored]``
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from mpi_traffic import Wire

from sparsescan import InputError
from sparsescan.jacobians import (
    AvgPool2d,
    Conv2d,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    Sequential,
    Tanh,
)
from sparsescan.parallel.strategies import Machine
from sparsescan.parallel.strategies.architectures import from_sequential
from sparsescan.parallel.strategies.integrated import (
    BatchParallel,
    Costs,
    Integrated,
    ModelParallel,
)
from sparsescan.parallel.strategies.integrated_run import IntegratedTraining, whole_layers
from sparsescan.parallel.strategies.layout import STATES, Layout

WORLD = MPI.COMM_WORLD
RATE = 0.5
Array = np.ndarray[Any, Any]


# -------------------------------------------------------------------------------------------------
# One process, in plain NumPy
# -------------------------------------------------------------------------------------------------


def taps(op, x: Array, fill: float):
    """Padded images, and for every tap of a window where its inputs lie in them."""
    (py, px), (ky, kx), (sy, sx) = op.padding, op.kernel_size, op.stride
    padded = np.pad(x, [(0, 0), (0, 0), (py, py), (px, px)], constant_values=fill)
    height, width = op.output_shape[1:]
    places = [
        (v, u, np.s_[:, :, v : v + sy * (height - 1) + 1 : sy, u : u + sx * (width - 1) + 1 : sx])
        for v in range(ky)
        for u in range(kx)
    ]
    return padded, places


def unpadded(op, x: Array) -> Array:
    py, px = op.padding
    return x[:, :, py : x.shape[2] - py, px : x.shape[3] - px]


def forward(op, x: Array, params: dict[str, Array]) -> Array:
    if isinstance(op, Linear):
        return x @ params["weight"].T + params["bias"]
    if isinstance(op, Conv2d):
        padded, places = taps(op, x, 0.0)
        y = sum(np.einsum("oc,nchw->nohw", params["weight"][:, :, v, u], padded[at])
                for v, u, at in places)  # fmt: skip
        return y + params["bias"][:, None, None]
    if isinstance(op, (MaxPool2d, AvgPool2d)):
        padded, places = taps(op, x, -np.inf if isinstance(op, MaxPool2d) else 0.0)
        stacked = np.stack([padded[at] for _, _, at in places])
        return stacked.max(axis=0) if isinstance(op, MaxPool2d) else stacked.mean(axis=0)
    if isinstance(op, LayerNorm):
        mean, var = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
        return (x - mean) / np.sqrt(var + op.eps) * params["weight"] + params["bias"]
    return {
        Tanh: lambda: np.tanh(x),
        ReLU: lambda: np.where(x > 0, x, 0),
        Flatten: lambda: x.reshape(len(x), -1),
    }[type(op)]()


def backward(op, x: Array, y: Array, dy: Array, params: dict[str, Array]):
    if isinstance(op, Linear):
        return dy @ params["weight"], {"weight": dy.T @ x, "bias": dy.sum(axis=0)}
    if isinstance(op, Conv2d):
        padded, places = taps(op, x, 0.0)
        dx, dw = np.zeros_like(padded), np.zeros_like(params["weight"])
        for v, u, at in places:
            dx[at] += np.einsum("oc,nohw->nchw", params["weight"][:, :, v, u], dy)
            dw[:, :, v, u] = np.einsum("nohw,nchw->oc", dy, padded[at])
        return unpadded(op, dx), {"weight": dw, "bias": dy.sum(axis=(0, 2, 3))}
    if isinstance(op, (MaxPool2d, AvgPool2d)):
        largest = isinstance(op, MaxPool2d)
        padded, places = taps(op, x, -np.inf if largest else 0.0)
        dx = np.zeros_like(padded)
        # No two inputs of a window are equal here, but for those cut off by a ReLU.
        left = np.ones(y.shape, bool)
        for _, _, at in places:
            hit = (padded[at] == y) & left if largest else 1 / len(places)
            dx[at] += dy * hit
            left &= ~hit if largest else True
        return unpadded(op, dx), {}
    if isinstance(op, LayerNorm):
        mean, std = x.mean(axis=1, keepdims=True), np.sqrt(x.var(axis=1, keepdims=True) + op.eps)
        normal, inner = (x - mean) / std, dy * params["weight"]
        dx = inner - inner.mean(axis=1, keepdims=True)
        dx -= normal * (inner * normal).mean(axis=1, keepdims=True)
        return dx / std, {"weight": (dy * normal).sum(axis=0), "bias": dy.sum(axis=0)}
    return {
        Tanh: lambda: dy * (1 - y * y),
        ReLU: lambda: np.where(x > 0, dy, 0),
        Flatten: lambda: dy.reshape(x.shape),
    }[type(op)](), {}


def alone(network: Sequential, x: Array, labels: Array, steps: int):
    """Losses and parameters of SGD in one process."""
    params = [{name: p.copy() for name, p in op.params.items()} for op in network.layers]
    losses = []
    for _ in range(steps):
        xs = [x]
        for op, own in zip(network.layers, params, strict=True):
            xs.append(forward(op, xs[-1], own))
        odds = np.exp(xs[-1])
        odds /= odds.sum(axis=1, keepdims=True)
        losses.append(-np.log(odds[np.arange(len(x)), labels]).mean())
        grad = (odds - np.eye(odds.shape[1])[labels]) / len(x)
        for k in reversed(range(len(params))):
            op = network.layers[k]
            grad, found = backward(op, xs[k], xs[k + 1], grad, params[k])
            for name in params[k]:
                params[k][name] = params[k][name] - RATE * found[name]
    return losses, params


# -------------------------------------------------------------------------------------------------
# Networks
# -------------------------------------------------------------------------------------------------


def drawn(ops: list[Any]) -> Sequential:
    network = Sequential(ops)
    for op in network.layers:
        for name, param in op.params.items():
            setattr(op, name, param.astype(np.float64))
    return network


def images(rng: np.random.Generator, favourite: str) -> Sequential:
    """Windows of all kinds, in rows padded maxima, on heights that no number of ranks divides."""
    height, width = int(rng.integers(13, 18)), int(rng.integers(9, 12))
    ops: list[Any] = []

    def add(kind: Any, *arguments: Any, **options: Any) -> None:
        shape = ops[-1].output_shape if ops else (2, height, width)
        ops.append(kind(*arguments, input_shape=shape, **options))

    seed = int(rng.integers(1 << 30))
    kernel, stride, padding = [(3, 1, 1), (5, 2, 2), (4, 3, 0), (3, 1, 0), (1, 2, 0)][
        rng.integers(5)
    ]
    add(Conv2d, 2, int(rng.integers(4, 8)), kernel, 1, kernel // 2, rng=seed)
    add(Tanh)
    windows = [(3, 2, 1), (2, 2, 0), (2, 1, 0), (1, 1, 0), (3, 1, 1)]
    if favourite == "rows":
        add(MaxPool2d, *windows[int(rng.choice([0, 4]))])
    else:
        add([MaxPool2d, AvgPool2d][rng.integers(2)], *windows[rng.integers(5)])
    channels = ops[-1].output_shape[0]
    add(Conv2d, channels, int(rng.integers(4, 7)), kernel, stride, padding, rng=seed + 1)
    add(ReLU)
    add(Flatten)
    features = ops[-1].output_shape[0]
    middle = int(rng.integers(4, 9))
    ops.append(Linear(features, middle, rng=seed + 2))
    ops.append(Tanh(input_shape=(middle,)))
    if rng.random() < 0.5:
        ops.append(LayerNorm(middle))
    ops.append(Linear(middle, 5, rng=seed + 3))
    return drawn(ops)


def even() -> Sequential:
    """Every size is a multiple of 4: what each rank sends is just what the equations say."""
    return drawn([
        Conv2d(2, 8, 3, padding=1, input_shape=(2, 8, 8), rng=0),
        Tanh(input_shape=(8, 8, 8)),
        AvgPool2d(2, input_shape=(8, 8, 8)),
        Conv2d(8, 4, 3, padding=1, input_shape=(8, 4, 4), rng=1),
        Tanh(input_shape=(4, 4, 4)),
        Flatten(input_shape=(4, 4, 4)),
        Linear(64, 16, rng=2),
        Tanh(input_shape=(16,)),
        Linear(16, 8, rng=3),
    ])  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Checks
# -------------------------------------------------------------------------------------------------


def check(training, network: Sequential, expected: Array, x, labels, wire: Wire | None) -> None:
    """Parameters and losses as in one process; bytes as predicted, and as Open MPI counts them."""
    steps = 3
    losses, params = alone(network, x, labels, steps)
    before = [{name: p.copy() for name, p in op.params.items()} for op in network.layers]
    found = []
    for _ in range(steps):
        start, counted = (None if wire is None else wire.read()), traffic(training)
        found.append(training.step(x, labels))
        sent = traffic(training) - counted
        about = WORLD.rank, training.layout, network
        assert sent[1] == expected[WORLD.rank], (about, sent, expected)
        if wire is not None:
            assert tuple(wire.read() - start) == tuple(sent), (about, sent)
    np.testing.assert_allclose(found, losses, rtol=1e-12, err_msg=str(about))
    made = training.parameters()
    for own, other, given, op in zip(made, params, before, network.layers, strict=True):
        assert own.keys() == other.keys() == op.params.keys()
        for name in own:
            bound = 1e-11 * max(1.0, np.abs(other[name]).max())
            np.testing.assert_allclose(
                own[name], other[name], rtol=0, atol=bound, err_msg=str(about)
            )
            # The caller's are left as they were.
            assert (op.params[name] == given[name]).all()
    words = [param.tobytes() for own in made for param in own.values()]
    assert len(set(WORLD.allgather(b"".join(words)))) == 1, about
    assert len(set(WORLD.allgather(tuple(found)))) == 1, about


def traffic(training) -> Array:
    """Messages and bytes."""
    table = training.communicator.traffic.values()
    return np.sum([(each.messages, each.bytes) for each in table] or [(0, 0)], axis=0)


def random_layout(
    rng: np.random.Generator, network: Sequential, rows: int, batch: int, favourite: str
) -> Layout:
    """What is possible, most often the favourite."""
    graph, together = from_sequential(network), whole_layers(network)
    columns = WORLD.size // rows
    costs = Costs(graph, Machine(), (rows, columns), batch, STATES, together)
    states = ["whole"]
    for k in range(1, len(graph.layers)):
        possible = [state for state in STATES if costs._possible(k, state)]
        likely = favourite in possible and rng.random() < 0.7
        states.append(favourite if likely else str(rng.choice(possible)))
    return Layout(rows, columns, tuple(states))


def train(network: Sequential, layout: Layout, rng: np.random.Generator, batch: int, wire) -> None:
    graph = from_sequential(network)
    training = IntegratedTraining(WORLD, network, graph, layout, batch, RATE)
    x = rng.standard_normal((batch, *network.input_shape))
    labels = rng.integers(0, network.output_shape[0], batch)
    check(training, network, layout.sent(graph, batch, 8), x, labels, wire)


def main(seed: int, rounds: int, monitored: str = "") -> None:
    wire = Wire() if monitored and "Open MPI" in MPI.Get_library_version() else None
    rng = np.random.default_rng(seed)
    grids = [rows for rows in range(1, WORLD.size + 1) if WORLD.size % rows == 0]
    for _, rows, favourite in product(range(rounds), grids, STATES[1:]):
        network, batch = images(rng, favourite), int(rng.integers(WORLD.size, 3 * WORLD.size + 1))
        layout = random_layout(rng, network, rows, batch, favourite)
        train(network, layout, rng, batch, wire)
    # As the strategies choose, of fewer samples than ranks, too.
    for strategy in (
        BatchParallel(),
        ModelParallel(),
        *(Integrated((rows, WORLD.size // rows), modes)
          for rows in grids for modes in (("model",), ("domain", "model"), ("batch", "model"))),
    ):  # fmt: skip
        network, batch = even(), 4 * WORLD.size
        x = rng.standard_normal((batch, *network.input_shape))
        labels = rng.integers(0, 8, batch)
        training = strategy.start(WORLD, network, batch, learning_rate=RATE)
        graph = from_sequential(network)
        predicted = strategy.predict(graph, Machine(itemsize=8), WORLD.size, batch)
        expected = training.layout.sent(graph, batch, 8)
        assert predicted.bytes == expected.max()
        check(training, network, expected, x, labels, wire)
    if WORLD.size > 1:
        x, labels = rng.standard_normal((1, 2, 8, 8)), np.array([3])
        training = Integrated().start(WORLD, even(), 1, learning_rate=RATE)
        assert training.layout.columns == 1
        check(training, even(), training.layout.sent(graph, 1, 8), x, labels, wire)
        with pytest.raises(InputError, match="cannot be shared"):
            BatchParallel().start(WORLD, even(), 1)
    print(f"rank {WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
