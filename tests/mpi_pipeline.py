"""On some ranks: pipelines do what their simulation does, bit for bit, and send what is predicted.

``mpiexec -n RANKS python -m mpi4py mpi_pipeline.py SEED CASES``
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from oracles import same_bits

from sparsescan import InputError
from sparsescan.jacobians import AvgPool2d, Conv2d, Flatten, Linear, Sequential, Tanh
from sparsescan.parallel import Communicator
from sparsescan.parallel.strategies import Machine, Strategy
from sparsescan.parallel.strategies.architectures import from_sequential
from sparsescan.parallel.strategies.pipeline import MicroBatches, Pipeline
from sparsescan.parallel.strategies.pipeline_run import Simulation
from sparsescan.parallel.strategies.pipeline_schedule import Placement
from sparsescan.parallel.strategies.stage import Gradients, Stage

WORLD = MPI.COMM_WORLD
BATCH, RATE = 4, 0.1


def network(rng: np.random.Generator, dtype: Any) -> Sequential:
    return Sequential(
        [
            Conv2d(1, 3, 3, input_shape=(1, 8, 8), rng=rng, dtype=dtype),
            Tanh(input_shape=(3, 6, 6)),
            AvgPool2d(2, input_shape=(3, 6, 6)),
            Flatten(input_shape=(3, 3, 3)),
            Linear(27, 9, rng=rng, dtype=dtype),
            Tanh(input_shape=(9,)),
            Linear(9, 4, rng=rng, dtype=dtype),
        ]
    )


def random_registers(rng: np.random.Generator, net: Sequential) -> tuple[int, ...]:
    places = rng.choice(np.arange(1, len(net.ops)), WORLD.size - 1, replace=False)
    return tuple(sorted(places.tolist()))


def sent() -> int:
    traffic = Communicator.of(WORLD).traffic
    return traffic["exchange"].bytes if "exchange" in traffic else 0


def assert_same(found: Gradients, wanted: Gradients) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert same_bits([a[name]], [b[name]]), name


def assert_sent(
    strategy: Strategy, net: Sequential, before: int, steps: int, dtype: Any, x_dtype: Any
) -> None:
    """The busiest rank has sent what was predicted, if all is of one dtype."""
    busiest = WORLD.allreduce(sent() - before, MPI.MAX)
    if dtype == x_dtype:
        machine = Machine(itemsize=np.dtype(dtype).itemsize)
        predicted = strategy.predict(from_sequential(net), machine, WORLD.size, BATCH)
        assert busiest == steps * predicted.bytes, (busiest, steps, predicted)


def pipelined(rng: np.random.Generator) -> None:
    dtype, x_dtype = rng.choice([np.float32, np.float64], 2)
    net = network(rng, dtype)
    registers = random_registers(rng, net)
    count = None if rng.random() < 0.5 else int(rng.integers(8))
    parts = Placement(len(net.ops), registers).parts
    one = Simulation([Stage(net.ops[part]) for part in parts], BATCH, RATE, count)
    strategy = Pipeline(registers, count)
    before = sent()
    training = strategy.start(WORLD, net, BATCH, learning_rate=RATE)
    steps = int(rng.integers(1, 9))
    for _ in range(steps):
        x = rng.standard_normal((BATCH, 1, 8, 8)).astype(x_dtype)
        labels = rng.integers(4, size=BATCH)
        loss = training.step(x, labels)
        assert same_bits([np.array(loss)], [np.array(one.step(x, labels))])
        # Also while some are on their way.
        assert_same(training.parameters(), one.parameters())
    training.drain()
    one.drain()
    assert_same(training.parameters(), one.parameters())
    assert_sent(strategy, net, before, steps, dtype, x_dtype)


def by_micro_batches(rng: np.random.Generator) -> None:
    """Exact: as one process, but for the order of its sums."""
    dtype, x_dtype = rng.choice([np.float32, np.float64], 2)
    net = network(rng, dtype)
    count = [None, 1, 2, 4][rng.integers(4)]
    plain = Simulation([Stage(net.ops)], BATCH, RATE)
    registers = random_registers(rng, net)
    strategy = MicroBatches(registers, count)
    before = sent()
    training = strategy.start(WORLD, net, BATCH, learning_rate=RATE)
    eps = np.finfo(dtype).eps
    for _ in range(3):
        x = rng.standard_normal((BATCH, 1, 8, 8)).astype(x_dtype)
        labels = rng.integers(4, size=BATCH)
        wanted = plain.step(x, labels)
        assert abs(training.step(x, labels) - wanted) < 100 * eps * (1 + wanted)
        for a, b in zip(training.parameters(), plain.parameters(), strict=True):
            for name in b:
                np.testing.assert_allclose(a[name], b[name], rtol=0, atol=100 * eps)
    assert_sent(strategy, net, before, 3, dtype, x_dtype)


def fail_together(rng: np.random.Generator) -> None:
    net, x, labels = network(rng, np.float32), np.zeros((BATCH, 1, 8, 8), np.float32), np.arange(4)
    for strategy in (Pipeline(), MicroBatches()):
        training: Any = strategy.start(WORLD, net, BATCH)
        training.step(x, labels)
        assert raises(InputError, lambda: training.step(x[:2], labels)).startswith("x and labels")  # noqa: B023
        if WORLD.rank == WORLD.size - 1:
            training._rank.stage.forward = broken
        said = raises(MemoryError, lambda: [training.step(x, labels) for _ in range(WORLD.size)])  # noqa: B023
        assert said == f"rank {WORLD.size - 1}: no more of it", said
    too_many = [Pipeline((1,) * WORLD.size), Pipeline(range(1, 1 + WORLD.size))]
    for strategy in too_many:
        assert "expected" in raises(InputError, lambda: strategy.start(WORLD, net, BATCH))  # noqa: B023


def broken(x: Any) -> Any:
    raise MemoryError("no more of it")


def raises(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    seed, cases = map(int, sys.argv[1:])
    for case in range(cases):
        for k, check in enumerate((pipelined, pipelined, pipelined, by_micro_batches)):
            rng = np.random.default_rng([seed, case, k])
            try:
                check(rng)
            except BaseException:
                print(f"seed {[seed, case, k]}", flush=True)
                raise
    fail_together(np.random.default_rng(seed))
    WORLD.Barrier()
    print(f"rank {WORLD.rank} is done", flush=True)


main()
