"""Pipelines do what their simulation does, bit for bit, and send what is predicted."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from oracles import same_bits
from update_rule import parameters, start_of, transcription

from sparsescan import InputError
from sparsescan.jacobians import AvgPool2d, Conv2d, Flatten, Linear, Residual, Sequential, Tanh
from sparsescan.parallel import Communicator, Network
from sparsescan.recurrent import GRUCell, RNNCell
from sparsescan.strategies import Machine, Strategy
from sparsescan.strategies.networks import Recurrent, Trainable, graph_of
from sparsescan.strategies.pipeline.predict import MicroBatches, Pipeline
from sparsescan.strategies.pipeline.simulation import Simulation
from sparsescan.strategies.stage import Gradients, Stage, stage_of

pytestmark = pytest.mark.ranks(2, slow=(1, 3), doubling=True)

WORLD = MPI.COMM_WORLD
BATCH, RATE = 4, 0.1
# Steps that share a cell are one stage, the readout is another.
CELLS = [RNNCell, GRUCell] if WORLD.size <= 2 else []


def images(rng: np.random.Generator, dtype: Any) -> Sequential:
    inner = Conv2d(3, 3, 3, padding=1, input_shape=(3, 6, 6), rng=rng, dtype=dtype)
    return Sequential(
        [
            Conv2d(1, 3, 3, input_shape=(1, 8, 8), rng=rng, dtype=dtype),
            Residual(inner, Tanh(input_shape=(3, 6, 6))),
            AvgPool2d(2, input_shape=(3, 6, 6)),
            Flatten(input_shape=(3, 3, 3)),
            Linear(27, 9, rng=rng, dtype=dtype),
            Tanh(input_shape=(9,)),
            Linear(9, 4, rng=rng, dtype=dtype),
        ]
    )


# Layers of its graph up to the end of each operator: a block has its own, and a sum.
ENDS = (0, 1, 4, 5, 6, 7, 8, 9)


def recurrent(kind: Any, rng: np.random.Generator, dtype: Any) -> Recurrent:
    cell = kind(2, 5, dtype=dtype, rng=rng)
    return Recurrent(cell, Linear(5, 4, dtype=dtype, rng=rng), int(rng.integers(1, 6)))


def random_network(kind: Any, rng: np.random.Generator) -> tuple[Trainable, Any, Any]:
    """Return a network, its dtype and that of its input."""
    dtype, x_dtype = rng.choice([np.float32, np.float64], 2)
    ops = images(rng, dtype) if kind is None else recurrent(kind, rng, dtype)
    return ops, dtype, x_dtype


def random_registers(
    rng: np.random.Generator, net: Trainable
) -> tuple[tuple[int, ...], list[Stage]]:
    """Behind some layers of the graph, and the stages that they make of the operators."""
    if isinstance(net, Recurrent):
        cuts = [net.steps] * (WORLD.size - 1)
        registers = tuple(cuts)
    else:
        cuts = sorted(rng.choice(np.arange(1, 7), WORLD.size - 1, replace=False).tolist())
        registers = tuple(ENDS[cut] for cut in cuts)
    bounds = itertools.pairwise([0, *cuts, len(net.ops)])
    return registers, [stage_of(net.ops[a:b]) for a, b in bounds]


def data(net: Trainable, rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    x = rng.standard_normal((BATCH, *net.input_shape)).astype(dtype)
    return x, rng.integers(4, size=BATCH)


def sent() -> int:
    traffic = Communicator.of(WORLD).traffic
    return traffic["exchange"].bytes if "exchange" in traffic else 0


def assert_same(actual: Gradients, wanted: Gradients) -> None:
    for a, b in zip(actual, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert same_bits([a[name]], [b[name]]), name


def assert_near(actual: Gradients, wanted: Gradients, dtype: Any) -> None:
    for a, b in zip(actual, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=0, atol=100 * np.finfo(dtype).eps)


def assert_sent(
    strategy: Strategy, net: Trainable, before: int, steps: int, dtype: Any, x_dtype: Any
) -> None:
    """Compare what the busiest rank has sent with the prediction, if all is of one dtype."""
    busiest = WORLD.allreduce(sent() - before, MPI.MAX)
    if dtype == x_dtype:
        machine = Machine(itemsize=np.dtype(dtype).itemsize)
        predicted = strategy.predict(graph_of(net), machine, WORLD.size, BATCH)
        assert busiest == steps * predicted.bytes, (busiest, steps, predicted)


def pipelined(kind: Any, rng: np.random.Generator) -> None:
    net, dtype, x_dtype = random_network(kind, rng)
    registers, stages = random_registers(rng, net)
    count = None if rng.random() < 0.5 else int(rng.integers(8))
    one = Simulation(stages, BATCH, RATE, count)
    strategy = Pipeline(registers, count)
    start = start_of(net.ops) if isinstance(net, Recurrent) else []
    before = sent()
    training = strategy.start(WORLD, net, BATCH, learning_rate=RATE)
    batches = [data(net, rng, x_dtype) for _ in range(int(rng.integers(1, 9)))]
    for x, labels in batches:
        loss = training.step(x, labels)
        assert same_bits([np.array(loss)], [np.array(one.step(x, labels))])
        # Also while some are on their way.
        assert_same(training.parameters(), one.parameters())
    training.drain()
    one.drain()
    assert_same(training.parameters(), one.parameters())
    assert_sent(strategy, net, before, len(batches), dtype, x_dtype)
    if isinstance(net, Recurrent) and count is None:
        wanted = transcription(net.ops, start, registers, batches, RATE)
        assert_near(training.parameters(), wanted, dtype)


def by_micro_batches(kind: Any, rng: np.random.Generator) -> None:
    """Exact: as one process, but for the order of its sums."""
    net, dtype, x_dtype = random_network(kind, rng)
    count = [None, 1, 2, 4][rng.integers(4)]
    plain = Simulation([stage_of(net.ops)], BATCH, RATE)
    strategy = MicroBatches(random_registers(rng, net)[0], count)
    start = start_of(net.ops) if isinstance(net, Recurrent) else []
    before = sent()
    training = strategy.start(WORLD, net, BATCH, learning_rate=RATE)
    batches = [data(net, rng, x_dtype) for _ in range(3)]
    for x, labels in batches:
        wanted = plain.step(x, labels)
        assert abs(training.step(x, labels) - wanted) < 100 * np.finfo(dtype).eps * (1 + wanted)
        assert_near(training.parameters(), plain.parameters(), dtype)
    assert_sent(strategy, net, before, 3, dtype, x_dtype)
    if isinstance(net, Recurrent):
        sgd = transcription(net.ops, start, (), batches, RATE)
        assert_near(training.parameters(), sgd, dtype)


KINDS = [
    *((pipelined, kind) for kind in (None, None, None, *CELLS)),
    *((by_micro_batches, kind) for kind in (None, *CELLS)),
]
CHECKS = [(k, *each) for k, each in enumerate(KINDS)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_what_is_predicted_is_run(rng: np.random.Generator) -> None:
    """With the registers of the machine that is given, of a network with a block."""
    net = images(rng, np.float32)
    for strategy, latency in itertools.product((Pipeline(), MicroBatches()), (0.0, 1e9)):
        # If messages are dear, few micro-batches and small activations between stages are chosen.
        machine = Machine(network=Network("", latency, 1.0, 0.0, 0.0))
        before = sent()
        training: Any = strategy.start(WORLD, net, BATCH, machine=machine)
        training.step(*data(net, rng, np.float32))
        predicted = strategy.predict(net, machine, WORLD.size, BATCH)
        parts = Counter(plan.devices[0] for plan in predicted.layers)
        assert parts[WORLD.rank] == len(graph_of(training.stage.network).layers) - 1
        if isinstance(strategy, MicroBatches):
            busiest = WORLD.allreduce(sent() - before, MPI.MAX)
            assert busiest == predicted.bytes
            assert predicted.how.startswith(f"{training._count} micro-batch")


@pytest.mark.parametrize("kind", [None, *CELLS])
def test_ranks_fail_together(kind: Any, rng: np.random.Generator) -> None:
    net = images(rng, np.float32) if kind is None else recurrent(kind, rng, np.float32)
    x, labels = data(net, rng, np.float32)
    for strategy in (Pipeline(), MicroBatches()):
        training: Any = strategy.start(WORLD, net, BATCH)
        training.step(x, labels)
        said = raises(InputError, lambda: training.step(x[:2], labels))  # noqa: B023
        assert said.startswith("x has shape (2, ")
        if WORLD.rank == WORLD.size - 1:
            training.stage.forward = broken
        said = raises(MemoryError, lambda: [training.step(x, labels) for _ in range(WORLD.size)])  # noqa: B023
        assert said == f"rank {WORLD.size - 1}: no more of it", said
        vars(training.stage).pop("forward", None)
        goes_on(strategy, training, net, rng)


def goes_on(strategy: Any, training: Any, net: Trainable, rng: np.random.Generator) -> None:
    """After an error it trains as a new pipeline does, and it keeps no array of the caller's."""
    again = copy.deepcopy(net)
    for params, trained in zip(parameters(again), training.parameters(), strict=True):
        for name, param in params.items():
            param[...] = trained[name]
    new = strategy.start(WORLD, again, BATCH)
    place_of_x, place = (np.empty_like(array) for array in data(net, rng, np.float32))
    for _ in range(2 * WORLD.size):
        x, labels = data(net, rng, np.float32)
        new.step(x, labels)
        place_of_x[...], place[...] = x, labels
        training.step(place_of_x, place)
    for one, other in zip(new.parameters(), training.parameters(), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def broken(x: Any) -> Any:
    raise MemoryError("no more of it")


def raises(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize(("k", "check", "kind"), CHECKS)
def test_training(seeds: Callable[..., range], k: int, check: Any, kind: Any) -> None:
    for seed in seeds(1, 1, 20):
        check(kind, np.random.default_rng([0, seed, k]))
