"""Pipelines with stale weights: what is used when, against the update rule written out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from update_rule import start_of, transcription

from sparsescan import InputError
from sparsescan.jacobians import Linear, Residual, Sequential, Tanh
from sparsescan.jacobians.shared.operator import Operator
from sparsescan.parallel import Network
from sparsescan.strategies import Machine
from sparsescan.strategies.graph import Graph, Layer
from sparsescan.strategies.networks import build, from_sequential
from sparsescan.strategies.pipeline.predict import MicroBatches, Pipeline, balance
from sparsescan.strategies.pipeline.simulation import (
    Gradients,
    Placement,
    Simulation,
    Stage,
    cross_entropy,
)

Array = Any
BATCH, RATE = 3, 0.2


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Sequence[Operator], tuple[int, ...], list[Any]]:
    """Draw a network in float64, registers between its operators, and minibatches."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    ops, shape, places = _layers(draw, rng)
    registers = draw(st.sets(st.sampled_from(places))) if places else set()
    classes = ops[-1].output_shape[0]
    batches = [
        (rng.standard_normal((BATCH, *shape)), rng.integers(classes, size=BATCH))
        for _ in range(draw(st.integers(1, 12)))
    ]
    return ops, tuple(sorted(registers)), batches


def _layers(draw: st.DrawFn, rng: np.random.Generator) -> tuple[list[Operator], Any, list[int]]:
    """Linear layers, tanh and residual blocks; registers are anywhere between them."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=2, max_size=5))
    ops: list[Operator] = []
    for before, behind in itertools.pairwise(sizes):
        if ops and draw(st.booleans()):
            inner = Linear(before, before, dtype=np.float64, rng=rng)
            ops.append(Residual(inner, Tanh(input_shape=(before,))))
        ops += [Tanh(input_shape=(before,))] if ops else []
        ops.append(Linear(before, behind, dtype=np.float64, rng=rng))
    return ops, sizes[:1], list(range(1, len(ops)))


def stages(ops: Sequence[Operator], registers: tuple[int, ...]) -> list[Stage]:
    """Return stages of layers that are trained in place of those given."""
    own = copy.deepcopy(list(ops))
    return [Stage(own[part]) for part in Placement(len(ops), registers).parts]


def with_weights(parameters: Gradients) -> Gradients:
    return [each for each in parameters if each]


def assert_close(actual: Gradients, wanted: Gradients, scale: float = 1e3) -> None:
    for a, b in zip(with_weights(actual), with_weights(wanted), strict=True):
        for name, array in b.items():
            bound = scale * np.finfo(array.dtype).eps * max(1.0, float(np.abs(array).max()))
            np.testing.assert_allclose(a[name], array, rtol=0, atol=bound)


def assert_same_bits(actual: Gradients, wanted: Gradients) -> None:
    for a, b in zip(with_weights(actual), with_weights(wanted), strict=True):
        for name, array in b.items():
            np.testing.assert_array_equal(a[name], array)


@given(problems())
def test_stale_weights_are_those_of_the_update_rule(problem: Any) -> None:
    ops, registers, batches = problem
    pipeline = Simulation(stages(ops, registers), BATCH, RATE)
    losses = [pipeline.step(*batch) for batch in batches]
    assert [np.isnan(loss) for loss in losses] == [m < len(registers) for m in range(len(losses))]
    pipeline.drain()
    wanted = transcription(ops, start_of(ops), registers, batches, RATE)
    assert_close(pipeline.parameters(), wanted)
    # It would have been seen if they were fresh.
    if registers and len(batches) > 2 * len(registers):
        fresh = transcription(ops, start_of(ops), (), batches, RATE)
        pairs = zip(wanted, fresh, strict=True)
        assert any(np.abs(a[name] - b[name]).max() > 1e-9 for a, b in pairs for name in a)


@given(problems(), st.data())
def test_hybrid_training_finishes_what_is_on_its_way_first(
    problem: Any, data: st.DataObject
) -> None:
    ops, registers, batches = problem
    count = data.draw(st.integers(0, len(batches)))
    pipeline = Simulation(stages(ops, registers), BATCH, RATE, iterations=count)
    losses = [pipeline.step(*batch) for batch in batches]
    pipeline.drain()
    middle = transcription(ops, start_of(ops), registers, batches[:count], RATE)
    assert_close(pipeline.parameters(), transcription(ops, middle, (), batches[count:], RATE))
    assert not np.isnan(losses[count:]).any()


@given(problems())
def test_without_stale_weights_it_is_sgd_bit_for_bit(problem: Any) -> None:
    """With no registers at all, and with registers but one minibatch at a time."""
    ops, registers, batches = problem
    (plain,) = stages(ops, ())
    losses = []
    for x, labels in batches:
        activations = plain.forward(x)
        loss, grad = cross_entropy(activations[-1], labels, BATCH)
        losses.append(loss)
        plain.descend(plain.backward(activations, grad)[1], RATE)
    none = Simulation(stages(ops, ()), BATCH, RATE)
    assert [none.step(*batch) for batch in batches] == losses
    assert_same_bits(none.parameters(), plain.parameters)
    alone = Simulation(stages(ops, registers), BATCH, RATE, iterations=0)
    assert [alone.step(*batch) for batch in batches] == losses
    assert_same_bits(alone.parameters(), plain.parameters)


# ---------------------------------------------------------------------------------------------
# The schedule
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registers", [(0,), (3,), (2, 1), (1, 1), (-1, 1)])
def test_registers_that_cannot_be(registers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected numbers of layers that increase, from 1 to 2"):
        Placement(3, registers)


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


# Table 9 of the journal: MB of activations of a sample, samples, MB of weights; by how many percent
# PipeDream and stale weights need more than one accelerator does.
TABLE_9 = {
    "LeNet-5": (0.06, 128, 0.24, 109, 97),
    "AlexNet": (0.88, 128, 88.87, 214, 37),
    "VGG-16": (3.30, 128, 58.16, 124, 75),
    "ResNet-20": (3.84, 128, 1.03, 61, 60),
    "VGG-16, ImageNet": (218.59, 32, 527.79, 105, 77),
}


@pytest.mark.parametrize("network", TABLE_9)
def test_what_weight_stashing_needs_more(network: str) -> None:
    """The difference of the columns is four copies of the weights."""
    activations, batch, weights, stashing, stale = TABLE_9[network]
    percent = 100 * 4 * weights / (activations * batch + weights)
    # Both are rounded.
    assert abs(percent - (stashing - stale)) <= 1


@given(st.lists(st.integers(2, 9), min_size=3, max_size=7), st.sampled_from([1, 2, 4]), st.data())
def test_memory_predicted_is_that_of_the_arrays(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    """Weights and their gradients, and all arrays that a stage has when it has the most."""
    ops = [Linear(a, b, rng=0) for a, b in itertools.pairwise(sizes)]
    registers = tuple(sorted(data.draw(st.sets(st.integers(1, len(ops) - 1)))))
    batch, workers = 4, len(registers) + 1
    x, labels = np.ones((batch, sizes[0]), np.float32), np.zeros(batch, np.int64)
    pipeline = Simulation(stages(ops, registers), batch, RATE)
    for _ in range(3 * workers):
        pipeline.step(x, labels)
    stale, exact, inputs = [], [], np.split(x, count)
    for worker in pipeline._workers:
        stage = worker.stage
        weights = 2 * entries(params.values() for params in stage.parameters)
        # One more has been run forward in the cycle before another is run backward.
        kept = [*worker._kept, stage.forward(np.concatenate(inputs))]
        stale.append(weights + entries(kept) + entries([gradients_of(stage, kept[-1])]))
        # The input of the one that is run again is among those that are kept.
        again = stage.forward(inputs[0])
        activations = entries([inputs, again[1:], gradients_of(stage, again)])
        exact.append(weights + activations)
        inputs = [stage.forward(one)[-1] for one in inputs]
    graph, machine = from_sequential(Sequential(ops)), Machine()
    prediction = Pipeline(registers).predict(graph, machine, workers, batch)
    assert prediction.memory == 4 * max(stale)
    prediction = MicroBatches(registers, count).predict(graph, machine, workers, batch)
    assert prediction.memory == 4 * max(exact)
    if workers == count == 1:
        assert stale == exact


def gradients_of(stage: Any, kept: list[Array]) -> list[Array]:
    """Gradients of all of them."""
    grads: list[Array] = stage.product(kept[-1], kept)
    return grads


def entries(lists: Any) -> int:
    return sum(array.size for arrays in lists for array in arrays)


# ---------------------------------------------------------------------------------------------
# Prediction
# ---------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 1 << 30))
def test_balance_is_the_best_of_all_placements(n: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = np.triu(rng.integers(1, 20, (n + 1, n + 1)).astype(float), 1)
    costs[(rng.random(costs.shape) < 0.2) | (np.tri(n + 1) > 0)] = np.inf

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(costs[a, b] for a, b in itertools.pairwise((0, *cuts, n)))

    every = [slowest(cuts) for cuts in itertools.combinations(range(1, n), count - 1)]
    best = min(every, default=np.inf)
    parts = balance(costs, count)
    assert (parts is None) == (best == np.inf)
    if parts is not None:
        assert slowest(parts) == best


def test_a_prediction_by_hand() -> None:
    """Two layers on two workers, with round numbers."""
    layers = [
        Layer("x", "input", (), (10,)),
        Layer("a", "linear", (0,), (20,), 200, 200),
        Layer("b", "linear", (1,), (5,), 100, 100),
    ]
    machine = Machine(
        multiply_adds=1, bandwidth=1e9, overhead=7, network=Network("", 100, 0.5, 0, 0)
    )
    prediction = Pipeline().predict(Graph("two", layers), machine, 2, 4)
    assert prediction.how == "4 stages, registers after layer 1"
    message = 100 + 0.5 * 4 * 20 * 4
    # A maximum there and back, and the loss.
    agreeing = 3 * 100
    assert prediction.nanoseconds == {
        "forward": 807,
        "backward": 1614,
        "activations": message,
        "loss": agreeing,
    }
    assert prediction.bytes == 4 * 20 * 4
    # The output of `a`, and its gradient.
    assert [layer.bytes for layer in prediction.layers] == [4 * 20 * 4, 4 * 20 * 4]
    # Weights and their gradients; the input and the output of three minibatches, and one gradient.
    assert prediction.memory == 4 * (2 * 200 + 4 * 4 * 30)
    assert prediction.stale == 200 / 300
    exact = MicroBatches(count=2).predict(Graph("two", layers), machine, 2, 4)
    message = 100 + 0.5 * 2 * 20 * 4
    # Forward on the first worker, both times; then both on the second, which runs forward but once,
    # and on the first, which runs forward again.
    ahead = 407 + message + 407 + message
    back = 207 + 2 * 207 + message + 407 + 2 * 407 + message + 407 + 2 * 407
    assert exact.total == ahead + back + agreeing
    own = 2 * (407 + 407 + 2 * 407 + 2 * message)
    assert exact.nanoseconds["idle"] == ahead + back - own
    assert exact.stale == 0
    alone = Pipeline().predict(Graph("two", layers), machine, 1, 4)
    assert (alone.bytes, alone.stale, alone.nanoseconds["activations"]) == (0, 0, 0)
    assert alone.nanoseconds["loss"] == 0


def test_steps_that_share_their_weights_stay_together() -> None:
    machine, graph = Machine(), build("rnn:50")
    prediction = Pipeline().predict(graph, machine, 2, 16)
    assert prediction.how == "4 stages, registers after layer 50"
    together = "(?m:layers that share their weights stay together$)"
    for kind in (Pipeline, MicroBatches):
        with pytest.raises(InputError, match=f"which are 2: {together}"):
            kind().predict(graph, machine, 3, 16)
        with pytest.raises(
            InputError, match=rf"is \(10,\); expected none after layer 10: {together}"
        ):
            kind((10,)).predict(graph, machine, 2, 16)
        # There are no more layers than that.
        with pytest.raises(InputError, match=r"(?m)workers is 52; .* be cut into, which are 2$"):
            kind().predict(graph, machine, 52, 16)
    with pytest.raises(InputError, match=r"(?m)lenet5 can be cut into, which are 12$"):
        Pipeline().predict(build("lenet5"), machine, 13, 16)
    with pytest.raises(InputError, match="expected 2 of them for 3 workers"):
        Pipeline((1,)).predict(build("lenet5"), machine, 3, 16)
    with pytest.raises(InputError, match="expected a divisor of batch = 16"):
        MicroBatches(count=3).predict(build("lenet5"), machine, 2, 16)
