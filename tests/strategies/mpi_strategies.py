"""Strategies train as one process does, and send what they say."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from update_rule import loss_of, parameters, sgd

from sparsescan import InputError
from sparsescan.jacobians import (
    Conv2d,
    Flatten,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
    Tanh,
)
from sparsescan.parallel import Grid
from sparsescan.recurrent import GRUCell, RNNCell
from sparsescan.strategies import (
    Graph,
    Machine,
    MicroBatches,
    Pipeline,
    Recurrent,
    Scan,
    Training,
    from_sequential,
    measure_here,
    run,
)
from sparsescan.strategies.compare import strategies
from sparsescan.strategies.measured import measure_times

pytestmark = pytest.mark.ranks(2, slow=(1, 4), doubling=True)

WORLD = MPI.COMM_WORLD
RATE, STEPS = 0.1, 3
PIPELINES = Pipeline.name, MicroBatches.name
# Times whose order is clear whatever else the machine does.
CLEAR = 4.0


def grids() -> list[Grid]:
    return [Grid(WORLD.size // k, k) for k in range(1, WORLD.size + 1) if WORLD.size % k == 0]


def images(rng: np.random.Generator, dtype: Any) -> Sequential:
    """Return a small network with a residual block, which no part is cut inside."""
    inner = Conv2d(2, 2, 3, padding=1, input_shape=(2, 6, 6), dtype=dtype, rng=rng)
    return Sequential(
        [
            Conv2d(1, 2, 3, padding=1, input_shape=(1, 6, 6), dtype=dtype, rng=rng),
            Residual(inner, Tanh(input_shape=(2, 6, 6))),
            ReLU(input_shape=(2, 6, 6)),
            MaxPool2d(2, input_shape=(2, 6, 6)),
            Flatten(input_shape=(2, 3, 3)),
            Linear(18, 4, dtype=dtype, rng=rng),
        ]
    )


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
    x, labels = np.zeros((8, 1, 6, 6), np.float32), np.zeros(8, int)
    wrong = [
        (x[:, :, :5], labels, "x has shape (8, 1, 5, 6); expected (8, 1, 6, 6)"),
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
@pytest.mark.ranks(slow=(1, 2, 4), doubling=True)
@pytest.mark.parametrize("name", ["lenet5", "gru:30"])
def test_runs(name: str) -> None:
    check_run(name, 8)


@pytest.mark.ranks(slow=(1, 2), doubling=True)
@pytest.mark.usefixtures("few_steps")
def test_run_of_a_residual_network() -> None:
    check_run("resnet-8", 8)
