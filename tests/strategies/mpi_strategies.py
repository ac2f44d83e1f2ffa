"""Strategies train as one process does, and send what they say."""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from oracles import same_bits
from update_rule import loss_of, parameters, sgd, start_of, transcription

from sparsescan import InputError
from sparsescan.jacobians import AvgPool2d, Conv2d, Flatten, Linear, Residual, Sequential, Tanh
from sparsescan.parallel import Communicator, Grid, Network
from sparsescan.recurrent import GRUCell, RNNCell
from sparsescan.strategies import (
    Graph,
    Machine,
    MicroBatches,
    Pipeline,
    Recurrent,
    Scan,
    Strategy,
    Training,
    from_sequential,
    measure_here,
    run,
)
from sparsescan.strategies.compare import strategies
from sparsescan.strategies.measured import measure_times
from sparsescan.strategies.networks import Trainable, graph_of
from sparsescan.strategies.pipeline.simulation import Simulation
from sparsescan.strategies.stage import Gradients, Stage, stage_of

pytestmark = pytest.mark.ranks(2, slow=(3,), doubling=True)

WORLD = MPI.COMM_WORLD
BATCH, RATE, STEPS = 4, 0.1, 3
# Steps that share a cell are one stage, the readout is another.
CELLS = [RNNCell, GRUCell] if WORLD.size <= 2 else []
PIPELINES = Pipeline.name, MicroBatches.name
# Times whose order is clear whatever else the machine does.
CLEAR = 4.0


def grids() -> list[Grid]:
    return [Grid(WORLD.size // k, k) for k in range(1, WORLD.size + 1) if WORLD.size % k == 0]


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


def recurrent(rng: np.random.Generator, dtype: Any) -> Recurrent:
    cell = rng.choice([RNNCell, GRUCell])(2, 5, dtype=dtype, rng=rng)
    readout = Linear(5, 4, dtype=dtype, rng=rng, weight_mask=rng.random((4, 5)) < 0.8)
    # Weights that are pruned count as 0, whatever they are.
    readout.weight = rng.uniform(-1, 1, (4, 5)).astype(dtype)
    return Recurrent(cell, readout, int(rng.integers(4, 20)))


def sent(training: Training) -> int:
    """Bytes of data; not those by which ranks agree that nothing is wrong."""
    traffic = training.communicator.traffic
    return sum(traffic[kind].bytes for kind in traffic if kind != "allreduce")


def data(network: Any, rng: np.random.Generator, batch: int, dtype: Any) -> tuple[Any, Any]:
    x = rng.standard_normal((batch, *network.input_shape)).astype(rng.choice([np.float32, dtype]))
    return x, rng.integers(4, size=batch)


def check(strategy: Any, network: Any, rng: np.random.Generator, dtype: Any) -> None:
    """Compare the parameters after some steps with those of one process, on every rank."""
    batch = int(rng.integers(WORLD.size, 10))
    training = strategy.start(WORLD, network, batch, learning_rate=RATE)
    before = [{k: v.copy() for k, v in params.items()} for params in parameters(network)]
    expected = before
    eps = np.finfo(dtype).eps
    losses = []
    for _ in range(STEPS):
        x, labels = data(network, rng, batch, dtype)
        losses.append(training.step(x, labels))
        # One process goes on from where it is itself.
        for params, values in zip(parameters(network), expected, strict=True):
            for name, value in values.items():
                params[name][...] = value
        loss, grads = sgd(network, x.astype(dtype), labels)
        assert abs(losses[-1] - loss) < 300 * eps * max(1, loss), (losses, loss)
        expected = [
            {name: value - RATE * grad[name] for name, value in values.items()}
            for values, grad in zip(expected, grads, strict=True)
        ]
    for params, values, start in zip(training.parameters(), expected, before, strict=True):
        assert params.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_allclose(params[name], value, rtol=0, atol=500 * eps)
            assert not np.array_equal(value, start[name]), "nothing was learned"
    bits = [{k: v.tobytes() for k, v in params.items()} for params in training.parameters()]
    assert all(one == [losses, bits] for one in WORLD.allgather([losses, bits]))


def test_refusals(rng: np.random.Generator) -> None:
    """All ranks raise the error, before any of them sends."""
    x, labels = np.zeros((8, 1, 8, 8), np.float32), np.zeros(8, int)
    wrong = [
        (x[:, :, :5], labels, "x has shape (8, 1, 5, 8); expected (8, 1, 8, 8)"),
        (x, labels[:3], "labels has shape (3,); expected (8,)"),
        (x, labels + 4, "labels has 4; expected 0 to 3"),
        (x, labels - 1, "labels has -1; expected 0 to 3"),
    ]
    for strategy in strategies():
        try:
            training = strategy.start(WORLD, images(rng, np.float32), 8)
        except InputError:
            continue
        for *given, why in wrong:
            with pytest.raises(InputError, match=f"(?m)^{re.escape(why)}$"):
                training.step(*given)


def test_outputs_of_any_shape(rng: np.random.Generator) -> None:
    """Outputs of any shape are logits, the same for all."""
    conv = Conv2d(1, 3, 3, input_shape=(1, 4, 4), dtype=np.float64, rng=rng)
    x, labels = rng.standard_normal((8, 1, 4, 4)), rng.integers(12, size=8)
    losses = {}
    for strategy in strategies():
        try:
            training = strategy.start(WORLD, Sequential([conv]), 8)
        except InputError:
            continue
        losses[strategy.name] = training.step(x, labels)
    expected = loss_of(conv.forward(x).reshape(8, -1), labels)[0]
    np.testing.assert_allclose([*losses.values()], expected, rtol=1e-12)
    assert {"batch", "per layer"} <= losses.keys()


def check_bytes(network: Any, rng: np.random.Generator, schedule: str) -> None:
    """Compare what the busiest rank sends in a step with what was predicted."""
    graph = network.graph() if isinstance(network, Recurrent) else from_sequential(network)
    for grid in grids():
        if schedule == "products" and grid.chain == 1:
            continue
        strategy, batch = Scan(grid[:2], schedule), int(rng.integers(WORLD.size, 10))
        training = strategy.start(WORLD, network, batch)
        x, labels = data(network, rng, batch, np.float32)
        training.step(x, labels)
        before = sent(training)
        training.step(x, labels)
        taken = max(WORLD.allgather(sent(training) - before))
        expected = strategy.predict(graph, Machine(), WORLD.size, batch)
        assert taken == expected.bytes, (grid, schedule, taken, expected)


def check_times(graph: Graph, machine: Machine) -> None:
    """Every layer was measured, and the same is known on all ranks."""
    assert 1 <= machine.times.contention <= WORLD.size
    for k in range(1, len(graph.layers)):
        # Sums are no layers of their own to be measured.
        known = machine.times.knows(graph, k)
        assert known == (graph.layers[k].kind != "add")
        # A step of a cell is the difference of two times, which may vanish in their noise.
        assert machine.forward(graph, k, 8) + machine.part("product", graph, k, 8) >= 0
    whole = sum(machine.forward(graph, k, 8) for k in range(1, len(graph.layers)))
    assert whole > 0
    assert all(one == whole for one in WORLD.allgather(whole))
    assert machine.loss(8) > 0


def check_run(name: str, batch: int) -> None:
    """Every strategy is measured or says why not; bytes are exact, and clear orders right."""
    machine = measure_here(WORLD, name, batch)
    results = run(WORLD, name, machine, batch)
    check_times(results.network, machine)
    for one in results.measured:
        assert one.bytes == one.prediction.bytes, one
        assert one.nanoseconds > 0
    names = {one.prediction.strategy for one in results.measured}
    every = {strategy.name for strategy in strategies()}
    assert names | results.reasons.keys() == every
    assert not names & results.reasons.keys()
    images = ":" not in name
    # A recurrent network has no images, and two stages.
    others = {} if WORLD.size == 1 else {"domain"} if WORLD.size == 2 else {"domain", *PIPELINES}
    assert results.reasons.keys() == (set() if images else set(others)), results.reasons
    ranks = "1 rank" if WORLD.size == 1 else f"{WORLD.size} ranks"
    assert str(results).startswith(f"{name}, {ranks}, {batch} samples")
    right, pairs = results.pairs
    assert 0 <= right <= pairs <= len(names) * (len(names) - 1) / 2
    wrong = disordered(results)
    # On a busy machine ranks may have waited for a core, while layers were measured or in a step of
    # one strategy, but not every time.
    for _ in range(2):
        wrong = wrong and disordered(run(WORLD, name, measure_here(WORLD, name, batch), batch))
    assert not wrong, wrong


def disordered(results: Any) -> list[str]:
    """Pairs of which the second took less time, although far more was predicted, on any rank."""
    pairs = [
        f"{a}, {b}"
        for a, b in permutations(results.measured, 2)
        if b.prediction.total > CLEAR * a.prediction.total and b.nanoseconds <= a.nanoseconds
    ]
    return [pair for own in WORLD.allgather(pairs) for pair in own]


@pytest.fixture
def rng(seeds: Callable[..., range]) -> np.random.Generator:
    (seed,) = seeds(1, 1, 1)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [images, recurrent])
@pytest.mark.parametrize("grid", grids(), ids=str)
def test_scans_train(rng: np.random.Generator, grid: Grid, make: Any, dtype: Any) -> None:
    check(Scan(grid[:2]), make(rng, dtype), rng, dtype)


def test_bytes(rng: np.random.Generator) -> None:
    check_bytes(images(rng, np.float32), rng, "vectors")
    for schedule in ("vectors", "products"):
        check_bytes(recurrent(rng, np.float32), rng, schedule)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[run.__module__], "_SECONDS", 0.0)
    monkeypatch.setattr(sys.modules[measure_times.__module__], "_STEPS", 5)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.ranks(slow=(1, 4), doubling=True)
@pytest.mark.parametrize("name", ["lenet5", "gru:30"])
def test_runs(name: str) -> None:
    check_run(name, 8)


@pytest.mark.ranks(slow=(1, 2), doubling=True)
@pytest.mark.usefixtures("few_steps")
def test_run_of_a_residual_network() -> None:
    check_run("resnet-8", 8)


# -- Pipelines ------------------------------------------------------------------------------------


def plain(kind: Any, rng: np.random.Generator, dtype: Any) -> Recurrent:
    cell = kind(2, 5, dtype=dtype, rng=rng)
    return Recurrent(cell, Linear(5, 4, dtype=dtype, rng=rng), int(rng.integers(1, 6)))


def minibatch(net: Trainable, rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    x = rng.standard_normal((BATCH, *net.input_shape)).astype(dtype)
    return x, rng.integers(4, size=BATCH)


def exchanged() -> int:
    traffic = Communicator.of(WORLD).traffic
    return traffic["exchange"].bytes if "exchange" in traffic else 0


def random_network(kind: Any, rng: np.random.Generator) -> tuple[Trainable, Any, Any]:
    """Return a network, its dtype and that of its input."""
    dtype, x_dtype = rng.choice([np.float32, np.float64], 2)
    ops = images(rng, dtype) if kind is None else plain(kind, rng, dtype)
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
    busiest = WORLD.allreduce(exchanged() - before, MPI.MAX)
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
    before = exchanged()
    training = strategy.start(WORLD, net, BATCH, learning_rate=RATE)
    batches = [minibatch(net, rng, x_dtype) for _ in range(int(rng.integers(1, 9)))]
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
    before = exchanged()
    training = strategy.start(WORLD, net, BATCH, learning_rate=RATE)
    batches = [minibatch(net, rng, x_dtype) for _ in range(3)]
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


def test_what_is_predicted_is_run(rng: np.random.Generator) -> None:
    """With the registers of the machine that is given, of a network with a block."""
    net = images(rng, np.float32)
    for strategy, latency in itertools.product((Pipeline(), MicroBatches()), (0.0, 1e9)):
        # If messages are dear, few micro-batches and small activations between stages are chosen.
        machine = Machine(network=Network("", latency, 1.0, 0.0, 0.0))
        before = exchanged()
        training: Any = strategy.start(WORLD, net, BATCH, machine=machine)
        training.step(*minibatch(net, rng, np.float32))
        predicted = strategy.predict(net, machine, WORLD.size, BATCH)
        parts = Counter(plan.devices[0] for plan in predicted.layers)
        assert parts[WORLD.rank] == len(graph_of(training.stage.network).layers) - 1
        if isinstance(strategy, MicroBatches):
            busiest = WORLD.allreduce(exchanged() - before, MPI.MAX)
            assert busiest == predicted.bytes
            assert predicted.how.startswith(f"{training._count} micro-batch")


@pytest.mark.parametrize("kind", [None, *CELLS])
def test_ranks_fail_together(kind: Any, rng: np.random.Generator) -> None:
    net = images(rng, np.float32) if kind is None else plain(kind, rng, np.float32)
    x, labels = minibatch(net, rng, np.float32)
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
    place_of_x, place = (np.empty_like(array) for array in minibatch(net, rng, np.float32))
    for _ in range(2 * WORLD.size):
        x, labels = minibatch(net, rng, np.float32)
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


@pytest.mark.parametrize(("k", "check", "kind"), [(k, *each) for k, each in enumerate(KINDS)])
def test_pipelines_train(seeds: Callable[..., range], k: int, check: Any, kind: Any) -> None:
    for seed in seeds(1, 1, 20):
        check(kind, np.random.default_rng([0, seed, k]))
