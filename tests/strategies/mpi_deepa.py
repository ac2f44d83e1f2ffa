"""Layers divided in ways of their own train as one process does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from deepa_paper import footprint, image_parallelism
from mpi4py import MPI
from update_rule import parameters, sgd

from sparsescan.jacobians import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2d,
    Operator,
    Permute,
    ReLU,
    Residual,
    Sequential,
    Tanh,
)
from sparsescan.parallel.communicator import Communicator
from sparsescan.recurrent import GRUCell, RNNCell
from sparsescan.strategies import (
    BatchParallel,
    DomainParallel,
    Integrated,
    Machine,
    ModelParallel,
)
from sparsescan.strategies.exchanges import Box, Redistribution, blocks, cut, volume
from sparsescan.strategies.networks import Recurrent, graph_of, operators
from sparsescan.strategies.per_layer.configurations import Configurations, allowed
from sparsescan.strategies.per_layer.predict import Divided, PerLayer, with_loss
from sparsescan.strategies.per_layer.train import limits_of
from sparsescan.strategies.strategy import Training

pytestmark = pytest.mark.ranks(2, slow=(3,), doubling=True)

WORLD = MPI.COMM_WORLD
RATE = 0.5
EPS = np.finfo(np.float64).eps

Params = list[dict[str, Any]]

# -------------------------------------------------------------------------------------------------
# One process
# -------------------------------------------------------------------------------------------------


def one_process(network: Any, batches: list[Any]) -> tuple[list[float], Params]:
    """Losses, and parameters behind the first step, by Jacobians of each sample."""
    # They are drawn before they are copied.
    losses, wanted = [], parameters(network)[:0]
    one = copy.deepcopy(network)
    for x, labels in batches:
        loss, grads = sgd(one, x, labels)
        losses.append(loss)
        for params, grad in zip(parameters(one), grads, strict=True):
            for name, param in params.items():
                param -= RATE * grad[name]
        wanted = wanted or copy.deepcopy(parameters(one))
    return losses, wanted


# -------------------------------------------------------------------------------------------------
# Networks, and how they are divided
# -------------------------------------------------------------------------------------------------


def random_network(rng: np.random.Generator) -> Sequential:
    """Convolutions, pools and activations of any size, and linear layers."""
    shape = int(rng.choice([2, 4])), int(rng.integers(7, 12)), int(rng.integers(7, 12))
    ops: list[Operator] = []

    def add(op: Operator) -> None:
        nonlocal shape
        ops.append(op)
        shape = op.output_shape  # type: ignore[assignment]

    for _ in range(int(rng.integers(1, 4))):
        kind = int(rng.integers(6))
        kernel = tuple(int(k) for k in rng.integers(1, min(4, *shape[1:]) + 1, 2))
        stride = tuple(int(s) for s in rng.integers(1, 3, 2))
        half = tuple(int(rng.integers(k // 2 + 1)) for k in kernel)
        if kind <= 2:
            groups = int(rng.choice([1, 1, 2])) if shape[0] % 2 == 0 else 1
            outs = groups * int(rng.integers(1, 4))
            mask = rng.random((outs, shape[0] // groups, *kernel)) < 0.8
            conv = Conv2d(
                shape[0],
                outs,
                kernel,
                stride,
                half,
                groups=groups,
                bias=bool(rng.random() < 0.7),
                input_shape=shape,
                weight_mask=mask if rng.random() < 0.3 else None,
                dtype=np.float64,
                rng=rng,
            )
            add(conv)
        elif kind == 3:
            add(MaxPool2d(kernel, stride, half, input_shape=shape))
        elif kind == 4:
            add(AvgPool2d(kernel, stride, half if rng.random() < 0.5 else 0, input_shape=shape))
        else:
            add(AdaptiveAvgPool2d((2, 3), input_shape=shape))
        add(Tanh(input_shape=shape) if rng.random() < 0.7 else ReLU(input_shape=shape))
    if rng.random() < 0.3:
        add(Permute((0, 2, 3, 1), input_shape=shape))
    add(Flatten(input_shape=shape))
    if rng.random() < 0.3:
        add(LayerNorm(shape[0], dtype=np.float64))
    for outs in (int(rng.integers(3, 9)), 5):
        add(Linear(shape[0], outs, dtype=np.float64, rng=rng))
        if outs != 5:
            add(Tanh(input_shape=shape))
    return Sequential(ops)


def random_residual(rng: np.random.Generator) -> Sequential:
    """Residual blocks, one in the other, maybe at the start or with layers in the shortcut."""
    shape = int(rng.choice([2, 2, 4])), int(rng.integers(3, 6)), int(rng.integers(3, 6))
    channels = shape[0]

    def layers(outs: int) -> list[Operator]:
        kernel = int(rng.choice([1, 3]))
        conv = random_conv(rng, (channels, *shape[1:]), outs, kernel, int(rng.choice([1, 2])))
        act = rng.choice([Tanh, ReLU])  # type: ignore[arg-type]
        return [conv, act(input_shape=conv.output_shape)]

    ops: list[Operator] = []
    if rng.random() < 0.5:
        ops, channels = layers(outs := int(rng.choice([2, 2, 4]))), outs
    inner = Residual(*layers(channels))
    ops += [Residual(*layers(channels), inner), *layers(channels)]
    if rng.random() < 0.5:
        ops.append(Residual(*layers(channels), *layers(channels), shortcut=layers(channels)))
    if rng.random() < 0.7:
        ops.append(MaxPool2d(3, 2, 1, input_shape=ops[-1].output_shape))
    ops.append(Flatten(input_shape=ops[-1].output_shape))
    ops.append(Linear(*ops[-1].output_shape, 3, dtype=np.float64, rng=rng))
    return Sequential(ops)


def random_conv(
    rng: np.random.Generator, shape: tuple[int, ...], outs: int, kernel: int, groups: int = 1
) -> Conv2d:
    """One that keeps the size of images."""
    sizes = shape[0], outs, kernel, 1, kernel // 2
    return Conv2d(*sizes, groups=groups, input_shape=shape, dtype=np.float64, rng=rng)


def random_recurrent(rng: np.random.Generator) -> Recurrent:
    cell, features, hidden = rng.choice([RNNCell, GRUCell]), *rng.integers(1, 5, 2).tolist()
    readout = Linear(hidden, 4, rng.random() < 0.7, dtype=np.float64, rng=rng)
    steps = int(rng.integers(1, 6))
    return Recurrent(cell(features, hidden, dtype=np.float64, rng=rng), readout, steps)


def random_configurations(
    rng: np.random.Generator, network: Any, batch: int
) -> list[tuple[int, ...]]:
    """Return random configurations of a network, and of the loss."""
    graph, every = graph_of(network), Configurations(WORLD.size).all
    ops, layers = [*operators(network, graph), None], with_loss(graph).layers
    configurations: list[tuple[int, ...]] = []
    for op, layer in zip(ops, layers, strict=True):
        possible = every[allowed(layer, limits_of(op, layer, batch), every)]
        one = tuple(int(d) for d in rng.choice(possible))
        configurations.append(one if layer.shares is None else configurations[layer.shares])
    return configurations


def data(rng: np.random.Generator, network: Any, batch: int) -> list[Any]:
    return [
        (
            rng.standard_normal((batch, *network.input_shape)),
            rng.integers(math.prod(network.output_shape), size=batch),
        )
        for _ in range(2)
    ]


# -------------------------------------------------------------------------------------------------
# Checks
# -------------------------------------------------------------------------------------------------


def check(
    training: Training,
    given: Params,
    batches: list[Any],
    expected: tuple[list[float], Params],
    rtol: float,
    moved: int | None = None,
) -> None:
    """Losses, parameters behind the first step, and how many entries were sent in all."""
    losses, wanted = expected
    before = copy.deepcopy(given)
    traffic = training.communicator.traffic
    sent = traffic["exchange"].bytes if "exchange" in traffic else 0
    steps = []
    for (x, labels), loss in zip(batches, losses, strict=True):
        np.testing.assert_allclose(training.step(x, labels), loss, rtol=rtol)
        steps.append(training.parameters())
    for params, ours, theirs, old in zip(given, steps[0], wanted, before, strict=True):
        assert set(ours) == set(theirs)
        for name in theirs:
            scale = np.abs(theirs[name]).max() + np.abs(theirs[name] - old[name]).max()
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=rtol * scale)
            # The caller's are as they were.
            np.testing.assert_array_equal(params[name], old[name])
    digest = [p.tobytes() for step in steps for layer in step for p in layer.values()]
    assert all(other == digest for other in WORLD.allgather(digest)), "ranks differ"
    if moved is not None:
        sent = traffic["exchange"].bytes - sent
        assert sent == len(batches) * batches[0][0].itemsize * moved, (sent, moved)


def check_network(
    network: Any, choices: Sequence[Any], batches: list[Any], rtol: float, exact: bool = True
) -> None:
    """Compare a network in some configurations, or functions that give them, with one process."""
    graph, batch = with_loss(graph_of(network)), len(batches[0][0])
    params, expected = parameters(network), one_process(network, batches)
    machine = Machine(itemsize=batches[0][0].itemsize)
    for choice in choices:
        strategy = choice if isinstance(choice, Divided) else PerLayer(choice)
        training = strategy.start(WORLD, network, batch, learning_rate=RATE, machine=machine)
        predicted = strategy.predict(network, machine, WORLD.size, batch)
        chosen = [(1, 1, 1, 1), *(layer.configuration for layer in predicted.layers)]
        moved = footprint(graph, chosen, WORLD.size, batch)[0][WORLD.rank]
        assert predicted.bytes == max(WORLD.allgather(moved)) * machine.itemsize
        check(training, params, batches, expected, rtol, moved if exact else None)


def pools_inside(network: Sequential) -> bool:
    """Whether the box that every pool needs follows from its windows alone."""
    return not any(isinstance(op, AvgPool2d) and any(op.padding) for op in network.layers)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(WORLD.size)


def test_redistributions(rng: np.random.Generator) -> None:
    """Any boxes from any blocks, and back: the transposed map."""
    communicator, size = Communicator.of(WORLD), WORLD.size
    for _ in range(10):
        axes = int(rng.integers(1, 4))
        shape = [int(n) for n in rng.integers(1, 7, axes)]
        degrees = [1] * axes
        degrees[int(rng.integers(axes))] = int(rng.integers(1, size + 1))
        owned = blocks(shape, degrees, size)
        needed: list[Box] = []
        for _ in range(size):
            ends = [np.sort(rng.integers(-2, n + 3, 2)) for n in shape]
            needed.append(tuple((int(i), int(j)) for i, j in ends))
        tensor, grads = (
            rng.standard_normal(shape),
            [rng.standard_normal([j - i for i, j in box]) for box in needed],
        )
        moves, fill = Redistribution(owned, needed), float(rng.standard_normal())
        block = tensor[tuple(slice(*ends) for ends in owned[WORLD.rank])]
        received = moves.forward(communicator, block, np.float64, fill)
        padded = np.pad(tensor, 3, constant_values=fill)
        at = tuple(slice(i + 3, j + 3) for i, j in needed[WORLD.rank])
        np.testing.assert_array_equal(received, padded[at])
        np.testing.assert_array_equal(cut(tensor, needed[WORLD.rank], fill), padded[at])
        total = np.zeros(padded.shape)
        for box, grad in zip(needed, grads, strict=True):
            total[tuple(slice(i + 3, j + 3) for i, j in box)] += grad
        back = moves.backward(communicator, grads[WORLD.rank], np.float64)
        inner = total[tuple(slice(3, 3 + n) for n in shape)]
        at = tuple(slice(*ends) for ends in owned[WORLD.rank])
        np.testing.assert_array_equal(back, inner[at])
        assert sum(moves.sent(r) for r in range(size)) == sum(
            moves.received(r) for r in range(size)
        )
        assert volume(owned[WORLD.rank]) == back.size


@pytest.mark.parametrize("make", [random_network, random_recurrent, random_residual])
def test_random_networks(seeds: Callable[..., range], make: Any) -> None:
    for seed in seeds(2, 4, 50):
        rng = np.random.default_rng([WORLD.size, seed])
        network, batch = make(rng), int(rng.integers(1, 7))
        choices = [image_parallelism, random_configurations(rng, network, batch), None]
        exact = isinstance(network, Recurrent) or pools_inside(network)
        check_network(network, choices, data(rng, network, batch), 1e4 * EPS, exact)


def images(rng: np.random.Generator) -> Sequential:
    """Layers of all kinds that can be cut by rows, and some that cannot."""
    norm = BatchNorm2d(8, input_shape=(8, 9, 8), dtype=np.float64)
    for name, low in (("running_mean", -1), ("running_var", 0.5), ("weight", 0.5), ("bias", -1)):
        setattr(norm, name, rng.uniform(low, 2, 8))
    double = {"dtype": np.float64, "rng": rng}
    return Sequential(
        [
            Conv2d(2, 8, (3, 1), padding=(1, 0), input_shape=(2, 9, 8), **double),
            norm,
            Tanh(input_shape=(8, 9, 8)),
            AvgPool2d(3, 2, 1, input_shape=(8, 9, 8)),
            Dropout(0.5, input_shape=(8, 5, 4)),
            Conv2d(8, 4, 3, padding=1, input_shape=(8, 5, 4), **double),
            MaxPool2d(3, 1, 1, input_shape=(4, 5, 4)),
            Flatten(input_shape=(4, 5, 4)),
            LayerNorm(80, dtype=np.float64),
            Linear(80, 8, **double),
            ReLU(input_shape=(8,)),
            Linear(8, 5, **double),
        ]
    )


def cells(rng: np.random.Generator) -> Recurrent:
    cell = GRUCell(3, 4, dtype=np.float64, rng=rng)
    return Recurrent(cell, Linear(4, 4, dtype=np.float64, rng=rng), 3)


ROWS = [rows for rows in range(1, WORLD.size + 1) if WORLD.size % rows == 0]
GRIDS = [
    Integrated((rows, WORLD.size // rows), modes)
    for rows in ROWS
    for modes in (("model",), ("domain", "model"), ("batch", "model"))
]


@pytest.mark.parametrize("strategy", [BatchParallel(), ModelParallel(), DomainParallel(), *GRIDS])
def test_integrated_parallelism(strategy: Any, rng: np.random.Generator) -> None:
    """A plan is run as it is predicted, on any grid."""
    by_rows = isinstance(strategy, DomainParallel) and WORLD.size > 1
    for network in [images(rng)] if by_rows else [images(rng), cells(rng)]:
        batches = data(rng, network, 2 * WORLD.size)
        check_network(network, [strategy], batches, 1e5 * EPS)
