"""Pipelines: where registers may be, and what steps are predicted to take."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsescan import InputError
from sparsescan.parallel import Network
from sparsescan.strategies import Machine, build
from sparsescan.strategies.graph import Graph, Layer
from sparsescan.strategies.pipeline import MicroBatches, Pipeline, Placement, balance

# ---------------------------------------------------------------------------------------------
# The schedule
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registers", [(0,), (3,), (2, 1), (1, 1), (-1, 1)])
def test_registers_that_cannot_be(registers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected numbers of layers that increase, from 1 to 2"):
        Placement(3, registers)


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
