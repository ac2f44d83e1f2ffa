"""On some ranks: layers divided in ways of their own train as one process does.

``mpiexec -n RANKS python -m mpi4py mpi_deepa.py SEED CASES``
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from sparsescan import InputError
from sparsescan.jacobians import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    Conv2d,
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
from sparsescan.parallel.strategies.architectures import from_sequential, sequential
from sparsescan.parallel.strategies.boxes import Box, Redistribution, blocks, cut, volume
from sparsescan.parallel.strategies.configurations import Configurations, allowed
from sparsescan.parallel.strategies.deepa import (
    PerLayer,
    footprint,
    image_parallelism,
    one_weird_trick,
    with_loss,
)
from sparsescan.parallel.strategies.partitioned import limits_of
from sparsescan.parallel.strategies.stage import Stage
from sparsescan.parallel.strategies.strategy import cross_entropy

WORLD = MPI.COMM_WORLD


def one_process(
    network: Sequential, batches: list[Any], learning_rate: float
) -> tuple[list[float], list[dict[str, Any]]]:
    """Plain SGD, without any of what is tested but the layers."""
    stage, losses = Stage(network.ops), []
    for x, labels in batches:
        activations = stage.forward(x)
        loss, grad = cross_entropy(activations[-1], labels, len(x))
        losses.append(loss)
        stage.descend(stage.backward(activations, grad)[1], learning_rate)
    return losses, stage.parameters


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


def random_configurations(
    rng: np.random.Generator, network: Sequential, batch: int
) -> list[tuple[int, ...]]:
    graph, every = with_loss(from_sequential(network)), Configurations(WORLD.size).all
    found = [(1, 1, 1, 1)]
    for op, layer in zip(network.layers, graph.layers[1:], strict=False):
        most = limits_of(op, layer, batch)
        possible = every[allowed(layer, most, every)]
        found.append(tuple(int(d) for d in rng.choice(possible)))
    samples = [d for d in range(1, batch + 1) if WORLD.size % d == 0]
    return [*found, (int(rng.choice(samples)), 1, 1, 1)]


def data(rng: np.random.Generator, network: Sequential, batch: int, dtype: Any) -> list[Any]:
    classes = math.prod(network.output_shape)
    return [
        (
            rng.standard_normal((batch, *network.input_shape)).astype(dtype),
            rng.integers(classes, size=batch),
        )
        for _ in range(2)
    ]


def check(
    strategy: PerLayer,
    network: Sequential,
    batches: list[Any],
    rtol: float,
    chosen: list[Any] | None = None,
) -> None:
    """Losses, parameters, and what was sent, against one process and the prediction."""
    batch, rate = len(batches[0][0]), 0.5
    losses, wanted = one_process(network, batches, rate)
    before = [{name: p.copy() for name, p in op.params.items()} for op in network.layers]
    training = strategy.start(WORLD, network, batch, learning_rate=rate)
    traffic = training.communicator.traffic
    sent = traffic["exchange"].bytes if "exchange" in traffic else 0
    for (x, labels), loss in zip(batches, losses, strict=True):
        np.testing.assert_allclose(training.step(x, labels), loss, rtol=rtol)
    found = training.parameters()
    for op, ours, theirs, old in zip(network.layers, found, wanted, before, strict=True):
        assert set(ours) == set(theirs)
        for name in theirs:
            scale = np.abs(theirs[name]).max() + np.abs(theirs[name] - old[name]).max()
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=rtol * scale)
            # The caller's are as they were.
            np.testing.assert_array_equal(op.params[name], old[name])
    digest = [param.tobytes() for layer in found for param in layer.values()]
    assert all(other == digest for other in WORLD.allgather(digest)), "ranks differ"
    if chosen is not None:
        graph, itemsize = with_loss(from_sequential(network)), batches[0][0].itemsize
        moved, _ = footprint(graph, chosen, WORLD.size, batch)
        sent = traffic["exchange"].bytes - sent
        assert sent == len(batches) * itemsize * moved[WORLD.rank], (sent, moved, chosen)


def pools_inside(network: Sequential) -> bool:
    """Whether the box that every pool needs follows from its windows alone."""
    return not any(isinstance(op, AvgPool2d) and any(op.padding) for op in network.layers)


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
        found = moves.forward(communicator, block, np.float64, fill)
        padded = np.pad(tensor, 3, constant_values=fill)
        at = tuple(slice(i + 3, j + 3) for i, j in needed[WORLD.rank])
        np.testing.assert_array_equal(found, padded[at])
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


def test_errors() -> None:
    network = sequential("lenet5", 0)
    for chosen, message in (
        ([(1, 1, 1, 1)] * 3, "configurations has 3 entries; expected 14"),
        ([(1, 1, 1, 1)] * 13 + [(1, WORLD.size, 1, 1)], "layer loss has the configuration"),
        ([(1, 1, 1, 1)] * 13 + [(WORLD.size + 1, 1, 1, 1)], "layer loss has the configuration"),
    ):
        with pytest.raises(InputError, match=message):
            PerLayer(chosen).start(WORLD, network, 4)
    shape = (4,)
    block = Residual(Linear(4, 4, rng=0), Tanh(input_shape=shape))
    with pytest.raises(InputError, match="network has residual blocks"):
        PerLayer().start(WORLD, Sequential([block]), 4)


def main() -> None:
    seed, cases = map(int, sys.argv[1:])
    rng = np.random.default_rng(seed)
    test_redistributions(rng)
    if WORLD.size > 1:
        test_errors()
    eps = np.finfo(np.float64).eps
    for _ in range(cases):
        network, batch = random_network(rng), int(rng.integers(1, 7))
        chosen = random_configurations(rng, network, batch)
        batches = data(rng, network, batch, np.float64)
        exact = chosen if pools_inside(network) else None
        check(PerLayer(chosen), network, batches, 1e4 * eps, exact)
    network = sequential("lenet5", 0)
    graph, batch = with_loss(from_sequential(network)), 8
    batches = data(rng, network, batch, np.float32)
    for strategy in (image_parallelism, one_weird_trick):
        chosen = strategy(graph, WORLD.size, batch)
        check(PerLayer(strategy), network, batches, 1e-4, chosen)
    check(PerLayer(), network, batches, 1e-4)
    print(f"rank {WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    main()
