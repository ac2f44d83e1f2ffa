"""Layers shared by batch, model and domain train as one process does, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from wire import Wire

from sparsescan import InputError
from sparsescan.jacobians import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    GRUCell,
    LayerNorm,
    Linear,
    LSTMCell,
    MaxPool2d,
    ReLU,
    Residual,
    RNNCell,
    Sequential,
    Tanh,
)
from sparsescan.strategies import Machine, Recurrent
from sparsescan.strategies.integrated import (
    BatchParallel,
    DomainParallel,
    GridCosts,
    Integrated,
    ModelParallel,
    Rules,
)
from sparsescan.strategies.integrated_run import IntegratedTraining, whole_layers
from sparsescan.strategies.recurrent import graph_of
from sparsescan.strategies.sharding import STATES, Sharding

pytestmark = pytest.mark.ranks(2, slow=(1, 3, 4), monitored=True)

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


def factors(op, params: dict[str, Array]) -> tuple[Array, Array]:
    """Mean, and factor, of every channel."""
    scale = params["weight"] / np.sqrt(op.running_var + op.eps)
    return op.running_mean[:, None, None], scale[:, None, None]


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
    if isinstance(op, BatchNorm2d):
        mean, scale = factors(op, params)
        return scale * (x - mean) + params["bias"][:, None, None]
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
    if isinstance(op, BatchNorm2d):
        mean, scale = factors(op, {"weight": np.ones(op.num_features)})
        weight = (dy * scale * (x - mean)).sum(axis=(0, 2, 3))
        dx = dy * scale * params["weight"][:, None, None]
        return dx, {"weight": weight, "bias": dy.sum(axis=(0, 2, 3))}
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


def through(ops: Sequence[Any], x: Array, params: Iterator[dict[str, Array]]):
    """What layers make of `x`, and what :func:`back` reads."""
    tape: list[Any] = []
    for op in ops:
        before = x
        if isinstance(op, Residual):
            x, inner = through(op.ops, before, params)
            around, outer = through(op.shortcut, before, params)
            x = x + around
            tape.append((inner, outer))
        else:
            own = next(params)
            x = forward(op, before, own)
            tape.append((op, before, x, own))
    return x, tape


def back(tape: list[Any], grad: Array):
    """Gradients of the input and of the parameters of every layer."""
    grads: list[dict[str, Array]] = []
    for entry in reversed(tape):
        if len(entry) == 2:
            (one, inner), (other, outer) = (back(branch, grad) for branch in entry)
            grad, found = one + other, [*inner, *outer]
        else:
            op, x, y, own = entry
            grad, made = backward(op, x, y, grad, own)
            found = [made]
        grads = found + grads
    return grad, grads


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def next_state(cell, x: Array, s: Array, p: dict[str, Array]):
    """The state behind, and gradients of ``W_ih x + b_ih``, ``W_hh h + b_hh`` and directly of the
    state before."""
    h = s[:, : cell.hidden_size]
    u, v = x @ p["weight_ih"].T + p["bias_ih"], h @ p["weight_hh"].T + p["bias_hh"]
    if isinstance(cell, RNNCell):
        if cell.nonlinearity == "relu":
            return np.maximum(u + v, 0), lambda dy: (dy * (u + v > 0), dy * (u + v > 0), 0 * s)
        y = np.tanh(u + v)
        return y, lambda dy: (dy * (1 - y * y), dy * (1 - y * y), 0 * s)
    if isinstance(cell, GRUCell):
        (r, z), v_n = np.split(sigmoid(u + v), 3, axis=1)[:2], np.split(v, 3, axis=1)[2]
        n = np.tanh(np.split(u, 3, axis=1)[2] + r * v_n)

        def gated(dy):
            dn, dz = dy * (1 - z) * (1 - n * n), dy * (s - n) * z * (1 - z)
            dr = dn * v_n * r * (1 - r)
            return np.hstack([dr, dz, dn]), np.hstack([dr, dz, dn * r]), dy * z

        return (1 - z) * n + z * s, gated
    c = s[:, cell.hidden_size :]
    (i, f, _, o), g = np.split(sigmoid(u + v), 4, axis=1), np.tanh(np.split(u + v, 4, axis=1)[2])
    new = f * c + i * g
    t = np.tanh(new)

    def long(dy):
        dh, dc = np.split(dy, 2, axis=1)
        dc = dc + dh * o * (1 - t * t)
        in_c = g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)
        da = np.hstack([*(dc * slope for slope in in_c), dh * t * o * (1 - o)])
        return da, da, np.hstack([0 * c, dc * f])

    return np.hstack([o * t, new]), long


def through_time(network: Recurrent, x: Array, params: list[dict[str, Array]]):
    """The output, and a function from its gradient to those of the parameters."""
    cell, (own, read) = network.cell, params
    state, tape = np.zeros((len(x), cell.state_size)), []
    for t in range(x.shape[1]):
        before = state
        state, slopes = next_state(cell, x[:, t], before, own)
        tape.append((x[:, t], before[:, : cell.hidden_size], slopes))

    def gradients(grad: Array):
        grads = [{name: 0 * param for name, param in own.items()}]
        grads.append({"weight": grad.T @ state, "bias": grad.sum(axis=0)})
        grad = grad @ read["weight"]
        for now, hidden, slopes in reversed(tape):
            du, dv, grad = slopes(grad)
            grads[0]["weight_ih"] += du.T @ now
            grads[0]["weight_hh"] += dv.T @ hidden
            grads[0]["bias_ih"] += du.sum(axis=0)
            grads[0]["bias_hh"] += dv.sum(axis=0)
            grad[:, : cell.hidden_size] += dv @ own["weight_hh"]
        return grads

    return state @ read["weight"].T + read["bias"], gradients


def owners(network: Any) -> list[Any]:
    """Who has parameters."""
    if isinstance(network, Recurrent):
        return [network.cell, network.readout]
    return [*network.layers]


def alone(network: Any, x: Array, labels: Array, steps: int):
    """Losses and parameters of SGD in one process."""
    params = [{name: p.copy() for name, p in op.params.items()} for op in owners(network)]
    losses = []
    for _ in range(steps):
        if isinstance(network, Recurrent):
            output, gradients = through_time(network, x, params)
        else:
            output, tape = through(network.ops, x, iter(params))
            gradients = lambda grad, tape=tape: back(tape, grad)[1]  # noqa: E731
        odds = np.exp(output)
        odds /= odds.sum(axis=1, keepdims=True)
        losses.append(-np.log(odds[np.arange(len(x)), labels]).mean())
        grads = gradients((odds - np.eye(odds.shape[1])[labels]) / len(x))
        params = [
            {name: param - RATE * found[name] for name, param in own.items()}
            for own, found in zip(params, grads, strict=True)
        ]
    return losses, params


# -------------------------------------------------------------------------------------------------
# Networks
# -------------------------------------------------------------------------------------------------


def exact(network: Any) -> Any:
    """The same with parameters of 64 bits."""
    for op in owners(network):
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

    def surround(start: int, *shortcut: Any) -> None:
        ops[start:] = [Residual(*ops[start:], shortcut=shortcut)]

    seed = int(rng.integers(1 << 30))
    kernel, stride, padding = [(3, 1, 1), (5, 2, 2), (4, 3, 0), (3, 1, 0), (1, 2, 0)][
        rng.integers(5)
    ]
    add(Conv2d, 2, int(rng.integers(4, 8)), kernel, 1, kernel // 2, rng=seed)
    if rng.random() < 0.7:
        add(BatchNorm2d, ops[-1].output_shape[0])
        for name, low in (("running_mean", -1), ("running_var", 0.5), ("weight", 0.5)):
            setattr(ops[-1], name, rng.uniform(low, 2, ops[-1].num_features))
    add(Tanh)
    if rng.random() < 0.3:
        # Of an input with fewer channels than there may be rows of workers.
        sizes, shape = (ops[-1].output_shape[0], kernel, 1, kernel // 2), (2, height, width)
        surround(0, Conv2d(2, *sizes, input_shape=shape, rng=seed + 8))
    if kernel % 2:
        # A block in a block, the same height and width.
        channels = ops[-1].output_shape[0]
        add(Conv2d, channels, channels, 3, 1, 1, rng=seed + 4)
        add(Conv2d, channels, channels, kernel, 1, kernel // 2, rng=seed + 5)
        add(Tanh)
        surround(len(ops) - int(rng.integers(1, 3)))
        if rng.random() < 0.5:
            surround(len(ops) - int(rng.integers(1, 3)))
    windows = [(3, 2, 1), (2, 2, 0), (2, 1, 0), (1, 1, 0), (3, 1, 1)]
    if favourite == "rows":
        add(MaxPool2d, *windows[int(rng.choice([0, 4]))])
    else:
        add([MaxPool2d, AvgPool2d][rng.integers(2)], *windows[rng.integers(5)])
    channels = ops[-1].output_shape[0]
    shape, start = ops[-1].output_shape, len(ops)
    add(Conv2d, channels, int(rng.integers(4, 7)), kernel, stride, padding, rng=seed + 1)
    add(ReLU)
    if rng.random() < 0.5:
        sizes = ops[-1].output_shape[0], kernel, stride, padding
        surround(start, Conv2d(channels, *sizes, input_shape=shape, rng=seed + 6))
    add(Flatten)
    features = ops[-1].output_shape[0]
    middle = int(rng.integers(4, 9))
    if rng.random() < 0.3:
        # What is flattened is added to features.
        ops.append(Residual(Linear(features, features, rng=seed + 7)))
    ops.append(Linear(features, middle, rng=seed + 2))
    ops.append(Tanh(input_shape=(middle,)))
    if rng.random() < 0.5:
        ops.append(LayerNorm(middle))
    ops.append(Linear(middle, 5, rng=seed + 3))
    return exact(Sequential(ops))


def sequences(rng: np.random.Generator) -> Recurrent:
    """A recurrent network of a few steps."""
    kind, hidden = rng.choice([RNNCell, GRUCell, LSTMCell]), int(rng.integers(4, 8))
    options = {"nonlinearity": "relu"} if kind is RNNCell and rng.random() < 0.3 else {}
    cell = kind(int(rng.integers(1, 4)), hidden, rng=rng, **options)
    return exact(Recurrent(cell, Linear(cell.state_size, 5, rng=rng), int(rng.integers(1, 5))))


def even() -> Sequential:
    """Every size is a multiple of 4: what each rank sends is just what the equations say."""
    return exact(Sequential([
        Conv2d(2, 8, 3, padding=1, input_shape=(2, 8, 8), rng=0),
        Tanh(input_shape=(8, 8, 8)),
        AvgPool2d(2, input_shape=(8, 8, 8)),
        Conv2d(8, 4, 3, padding=1, input_shape=(8, 4, 4), rng=1),
        Tanh(input_shape=(4, 4, 4)),
        Flatten(input_shape=(4, 4, 4)),
        Linear(64, 16, rng=2),
        Tanh(input_shape=(16,)),
        Linear(16, 8, rng=3),
    ]))  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Checks
# -------------------------------------------------------------------------------------------------


def check(training, network: Any, expected: Array, x, labels, wire: Wire | None) -> None:
    """Parameters and losses as in one process; bytes as predicted, and as Open MPI counts them."""
    steps = 2
    losses, params = alone(network, x, labels, steps)
    before = [{name: p.copy() for name, p in op.params.items()} for op in owners(network)]
    found = []
    for _ in range(steps):
        start, counted = (None if wire is None else wire.read()), traffic(training)
        found.append(training.step(x, labels))
        sent = traffic(training) - counted
        about = WORLD.rank, training.sharding, network
        assert sent[1] == expected[WORLD.rank], (about, sent, expected)
        if wire is not None:
            assert tuple(wire.read() - start) == tuple(sent), (about, sent)
    np.testing.assert_allclose(found, losses, rtol=1e-12, err_msg=str(about))
    made = training.parameters()
    for own, other, given, op in zip(made, params, before, owners(network), strict=True):
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


def random_sharding(
    rng: np.random.Generator, network: Any, rows: int, batch: int, favourite: str
) -> Sharding:
    """What is possible, most often the favourite; all cells in one state."""
    graph = graph_of(network)
    together, columns = whole_layers(network, graph), WORLD.size // rows
    costs = GridCosts(graph, Machine(), (rows, columns), batch, Rules(STATES, together))
    states = ["whole"]
    for k in range(1, len(graph.layers)):
        possible = [state for state in STATES if costs.possible(k, state)]
        likely = favourite in possible and rng.random() < 0.7
        state = favourite if likely else str(rng.choice(possible))
        shared = graph.layers[k].shares
        states.append(state if shared is None else states[shared])
    return Sharding(rows, columns, tuple(states))


def train(network: Any, sharding: Sharding, rng: np.random.Generator, batch: int, wire) -> None:
    graph = graph_of(network)
    training = IntegratedTraining(WORLD, network, graph, sharding, batch, RATE)
    # Parameters have 64 bits, and so has all that is sent.
    x = rng.standard_normal((batch, *network.input_shape)).astype(rng.choice([float, np.float32]))
    labels = rng.integers(0, network.output_shape[0], batch)
    check(training, network, sharding.sent(graph, batch, 8), x, labels, wire)


def start_and_check(
    strategy: Integrated, machine: Machine, network: Any, rng: np.random.Generator, batch: int, wire
) -> None:
    """What is predicted of the graph alone is what is done, be it to refuse."""
    graph, rows = graph_of(network), strategy._grids(WORLD.size)[0][0]
    if rows > 1 and strategy.modes == ("model",) and isinstance(owners(network)[0], LSTMCell):
        for call in (strategy.predict, lambda *_: strategy.start(WORLD, network, batch)):
            with pytest.raises(InputError, match=r"cell1 of shape \(.*\) cannot be shared"):
                call(graph, machine, WORLD.size, batch)
        return
    predicted = strategy.predict(graph, machine, WORLD.size, batch)
    training = strategy.start(WORLD, network, batch, learning_rate=RATE)
    x = rng.standard_normal((batch, *network.input_shape))
    expected = training.sharding.sent(graph, batch, 8)
    assert predicted.bytes == expected.max()
    check(training, network, expected, x, rng.integers(0, 5, batch), wire)


@pytest.fixture(scope="module")
def wire() -> Wire | None:
    return Wire() if MPI.Get_library_version().startswith("Open MPI") else None


GRIDS = [rows for rows in range(1, WORLD.size + 1) if WORLD.size % rows == 0]


@pytest.mark.parametrize("favourite", STATES[1:])
@pytest.mark.parametrize("rows", GRIDS)
def test_random_layouts(
    wire: Wire | None, seeds: Callable[..., range], rows: int, favourite: str
) -> None:
    for seed in seeds(1, 1, 30):
        rng = np.random.default_rng([seed, rows, STATES.index(favourite)])
        batch = int(rng.integers(WORLD.size, 3 * WORLD.size + 1))
        networks = [images(rng, favourite)]
        if favourite != "rows":
            networks.append(sequences(rng))
        for network in networks:
            sharding = random_sharding(rng, network, rows, batch, favourite)
            train(network, sharding, rng, batch, wire)


MACHINE = Machine(itemsize=8)
CHOSEN = [
    Integrated((rows, WORLD.size // rows), modes, MACHINE)
    for rows in GRIDS
    for modes in (("model",), ("domain", "model"), ("batch", "model"))
    if rows < WORLD.size or modes != ("model",)
]


@pytest.mark.parametrize(
    "strategy", [BatchParallel(), ModelParallel(MACHINE), DomainParallel(MACHINE), *CHOSEN]
)
def test_layouts_that_strategies_choose(wire: Wire | None, strategy: Integrated) -> None:
    rng = np.random.default_rng(0)
    domain = "domain" in strategy.modes
    for network in [images(rng, "rows")] if domain else [even(), sequences(rng)]:
        start_and_check(strategy, MACHINE, network, rng, 4 * WORLD.size, wire)


@pytest.mark.skipif(WORLD.size == 1, reason="there are not fewer samples than ranks")
def test_fewer_samples_than_ranks(wire: Wire | None) -> None:
    x, labels = np.random.default_rng(0).standard_normal((1, 2, 8, 8)), np.array([3])
    training = Integrated().start(WORLD, even(), 1, learning_rate=RATE)
    assert training.sharding.columns == 1
    check(training, even(), training.sharding.sent(graph_of(even()), 1, 8), x, labels, wire)
    with pytest.raises(InputError, match="cannot be shared"):
        BatchParallel().start(WORLD, even(), 1)
