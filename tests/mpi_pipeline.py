"""On some ranks: pipelines do what their simulation does, bit for bit, and send what is predicted.

``mpiexec -n RANKS python -m mpi4py mpi_pipeline.py SEED CASES``
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from oracles import same_bits
from update_rule import start_of, transcription

from sparsescan import InputError
from sparsescan.jacobians import (
    AvgPool2d,
    Conv2d,
    Flatten,
    GRUCell,
    Linear,
    Operator,
    Residual,
    RNNCell,
    Sequential,
    Tanh,
)
from sparsescan.parallel import Communicator
from sparsescan.parallel.strategies import Machine, Strategy
from sparsescan.parallel.strategies.pipeline import MicroBatches, Pipeline
from sparsescan.parallel.strategies.pipeline_run import Simulation
from sparsescan.parallel.strategies.recurrent import Network, Recurrent, Step, graph_of
from sparsescan.parallel.strategies.stage import Gradients, RecurrentStage, Stage

WORLD = MPI.COMM_WORLD
BATCH, RATE = 4, 0.1


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


def random_network(kind: Any, rng: np.random.Generator) -> tuple[Network, Any, Any]:
    """A network, its dtype and that of its input."""
    dtype, x_dtype = rng.choice([np.float32, np.float64], 2)
    made = images(rng, dtype) if kind is None else recurrent(kind, rng, dtype)
    return made, dtype, x_dtype


def random_registers(rng: np.random.Generator, net: Network) -> tuple[tuple[int, ...], list[Stage]]:
    """Behind some layers of the graph, and the stages that they make of the operators."""
    if isinstance(net, Recurrent):
        cuts = [net.steps] * (WORLD.size - 1)
        registers = tuple(cuts)
    else:
        cuts = sorted(rng.choice(np.arange(1, 7), WORLD.size - 1, replace=False).tolist())
        registers = tuple(ENDS[cut] for cut in cuts)
    bounds = itertools.pairwise([0, *cuts, len(net.ops)])
    return registers, [stage_of(net.ops[a:b]) for a, b in bounds]


def stage_of(ops: Sequence[Operator]) -> Stage:
    return RecurrentStage(ops) if isinstance(ops[0], Step) else Stage(ops)


def data(net: Network, rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    x = rng.standard_normal((BATCH, *net.input_shape)).astype(dtype)
    return x, rng.integers(4, size=BATCH)


def sent() -> int:
    traffic = Communicator.of(WORLD).traffic
    return traffic["exchange"].bytes if "exchange" in traffic else 0


def assert_same(found: Gradients, wanted: Gradients) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert same_bits([a[name]], [b[name]]), name


def assert_near(found: Gradients, wanted: Gradients, dtype: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=0, atol=100 * np.finfo(dtype).eps)


def assert_sent(
    strategy: Strategy, net: Network, before: int, steps: int, dtype: Any, x_dtype: Any
) -> None:
    """The busiest rank has sent what was predicted, if all is of one dtype."""
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


def what_is_chosen_can_be_run(rng: np.random.Generator) -> None:
    """With the registers that are predicted, of a network with a block; without any, too."""
    net, machine = images(rng, np.float32), Machine()
    for strategy in (Pipeline(), MicroBatches()):
        chosen = strategy.chosen(graph_of(net), machine, WORLD.size, BATCH)
        before = sent()
        chosen.start(WORLD, net, BATCH).step(*data(net, rng, np.float32))
        if isinstance(chosen, MicroBatches):
            assert_sent(chosen, net, before, 1, np.float32, np.float32)
        assert strategy.start(WORLD, net, BATCH).parameters()


def what_cannot_be(rng: np.random.Generator) -> None:
    """The same is refused where it is predicted and where it is run."""
    size, cells = WORLD.size, recurrent(RNNCell, rng, np.float32)
    both = [(images(rng, np.float32), "layers of a block stay together")]
    both.append((Recurrent(cells.cell, cells.readout, 9), "layers that share their weights stay"))
    for net, why in both:
        for kind in (Pipeline, MicroBatches):
            strategies = [kind((1,) * size), kind(range(1, 1 + size))]
            wrong = [kind(range(2, 1 + size))] if size > 1 else []
            if isinstance(net, Recurrent) and size > 2:
                wrong.append(kind())
            for strategy in strategies + wrong:
                said = [
                    raises(InputError, lambda: strategy.start(WORLD, net, BATCH)),  # noqa: B023
                    raises(InputError, lambda: strategy.predict(graph_of(net), Machine(), size, 4)),  # noqa: B023
                ]
                assert said[0] == said[1], said
                assert "expected" in said[0]
                assert strategy not in wrong or why in said[0], said


def fail_together(net: Network, rng: np.random.Generator) -> None:
    x, labels = data(net, rng, np.float32)
    for strategy in (Pipeline(), MicroBatches()):
        training: Any = strategy.start(WORLD, net, BATCH)
        training.step(x, labels)
        said = raises(InputError, lambda: training.step(x[:2], labels))  # noqa: B023
        assert said.startswith("x has shape (2, ")
        if WORLD.rank == WORLD.size - 1:
            training._rank.stage.forward = broken
        said = raises(MemoryError, lambda: [training.step(x, labels) for _ in range(WORLD.size)])  # noqa: B023
        assert said == f"rank {WORLD.size - 1}: no more of it", said
        vars(training._rank.stage).pop("forward", None)
        goes_on(strategy, training, net, rng)


def goes_on(strategy: Any, training: Any, net: Network, rng: np.random.Generator) -> None:
    """After an error it trains as a new pipeline does, and it keeps no array of the caller's."""
    again = copy.deepcopy(net)
    for params, found in zip(parameters(again), training.parameters(), strict=True):
        for name, param in params.items():
            param[...] = found[name]
    new = strategy.start(WORLD, again, BATCH)
    place_of_x, place = (np.empty_like(array) for array in data(net, rng, np.float32))
    for _ in range(2 * WORLD.size):
        x, labels = data(net, rng, np.float32)
        new.step(x, labels)
        place_of_x[...], place[...] = x, labels
        training.step(place_of_x, place)
    for one, other in zip(new.parameters(), training.parameters(), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def parameters(net: Network) -> list[dict[str, Any]]:
    layers = [net.cell, net.readout] if isinstance(net, Recurrent) else net.layers
    return [layer.params for layer in layers]


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
    # Steps that share a cell are one stage, the readout is another.
    cells = [RNNCell, GRUCell] if WORLD.size <= 2 else []
    kinds = [None, None, None, *cells]
    for case in range(cases):
        checks = [(pipelined, kind) for kind in kinds]
        checks += [(by_micro_batches, kind) for kind in (None, *cells)]
        for k, (check, kind) in enumerate(checks):
            rng = np.random.default_rng([seed, case, k])
            try:
                check(kind, rng)
            except BaseException:
                print(f"seed {[seed, case, k]}", flush=True)
                raise
    rng = np.random.default_rng(seed)
    what_is_chosen_can_be_run(rng)
    what_cannot_be(rng)
    for net in (images(rng, np.float32), *(recurrent(kind, rng, np.float32) for kind in cells)):
        fail_together(net, rng)
    WORLD.Barrier()
    print(f"rank {WORLD.rank} is done", flush=True)


main()
