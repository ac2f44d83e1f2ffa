"""Training with stale weights, against the update rule written out, and the memory it takes."""

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

from bench.stale_weights import Array, Gradients, Simulation, cross_entropy
from sparsescan.jacobians import Linear, Residual, Sequential, Tanh, from_torch
from sparsescan.jacobians.shared.operator import Operator
from sparsescan.strategies import Machine, build
from sparsescan.strategies.pipeline import MicroBatches, Pipeline, Placement

BATCH, RATE = 3, 0.2


class Stage:
    """Copies of layers, one after the other, which are trained."""

    def __init__(self, ops: Sequence[Operator]) -> None:
        self.network = Sequential(copy.deepcopy(list(ops)))
        self._plan = self.network.plan(schedule="linear")

    @property
    def parameters(self) -> Gradients:
        """Parameters of every layer, by name, not copied."""
        return [layer.params for layer in self.network.layers]

    def forward(self, x: Array) -> list[Array]:
        """Return the input of every layer, and the output of the last."""
        return self.network.activations(x)

    def product(self, grad: Array, activations: list[Array]) -> Any:
        """Return gradients of all activations from that of the output on, flattened."""
        values = self.network.values(activations)
        return self._plan.inclusive_scan(grad.reshape(len(grad), -1), values)

    def backward(self, activations: list[Array], grad: Array) -> tuple[Array, Gradients]:
        """Return gradients of the input of the stage, flattened, and of its parameters."""
        grads = self.product(grad, activations)
        return grads[-1], self.network.param_grads(activations, grads)

    def descend(self, grads: Gradients, learning_rate: float) -> None:
        """Take a step of SGD, ``θ ← θ − learning_rate · ∇θ``, in place."""
        for own, layer in zip(self.parameters, grads, strict=True):
            for name, grad in layer.items():
                own[name] -= learning_rate * grad.reshape(own[name].shape)


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
    piped = Simulation(stages(ops, registers), BATCH, RATE)
    losses = [piped.step(*batch) for batch in batches]
    assert [np.isnan(loss) for loss in losses] == [m < len(registers) for m in range(len(losses))]
    piped.drain()
    wanted = transcription(ops, start_of(ops), registers, batches, RATE)
    assert_close(piped.parameters(), wanted)
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
    piped = Simulation(stages(ops, registers), BATCH, RATE, iterations=count)
    losses = [piped.step(*batch) for batch in batches]
    piped.drain()
    middle = transcription(ops, start_of(ops), registers, batches[:count], RATE)
    assert_close(piped.parameters(), transcription(ops, middle, (), batches[count:], RATE))
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


@given(st.lists(st.integers(2, 9), min_size=3, max_size=7), st.sampled_from([1, 2, 4]), st.data())
def test_memory_predicted_is_that_of_the_arrays(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    """Weights and their gradients, and all arrays that a stage has when it has the most."""
    ops = [Linear(a, b, rng=0) for a, b in itertools.pairwise(sizes)]
    registers = tuple(sorted(data.draw(st.sets(st.integers(1, len(ops) - 1)))))
    batch, workers = 4, len(registers) + 1
    x, labels = np.ones((batch, sizes[0]), np.float32), np.zeros(batch, np.int64)
    piped = Simulation(stages(ops, registers), batch, RATE)
    for _ in range(3 * workers):
        piped.step(x, labels)
    stale, exact, inputs = [], [], np.split(x, count)
    for worker in piped._workers:
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
    graph, machine = build(Sequential(ops)), Machine()
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


@pytest.mark.slow
def test_stages_of_pytorch_learn_what_the_operators_do() -> None:
    pytest.importorskip("torch")
    from bench import lenet5, pipeline

    module, placement = lenet5.lenet5(pipeline.TANH), Placement(12, pipeline.GROUPS)
    ops = from_torch(module, (1, 32, 32))
    ours, theirs = (
        Simulation(stages, pipeline.BATCH, pipeline.RATE)
        for stages in (
            [Stage(ops[part]) for part in placement.parts],
            pipeline.stages_of(module, placement, 0.0),
        )
    )
    given = pipeline.batches(lenet5.load_digits(), 12, 0)
    losses = [[one.step(*batch) for batch in given][4:] for one in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
