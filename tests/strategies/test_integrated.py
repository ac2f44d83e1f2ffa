"""Integrated model, batch and domain parallelism: its equations, its choices, and the paper's."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from deepa_paper import footprint
from hypothesis import given
from hypothesis import strategies as st
from integrated_paper import (
    Volume,
    all_gather,
    all_reduce,
    combined_equation,
    log,
    products,
)

from sparsescan import InputError
from sparsescan.jacobians import LayerNorm, Linear, Residual, Sequential
from sparsescan.parallel import Network
from sparsescan.recurrent import LSTMCell
from sparsescan.strategies import Machine, build
from sparsescan.strategies.graph import Graph
from sparsescan.strategies.integrated import (
    BatchParallel,
    DomainParallel,
    Integrated,
    ModelParallel,
)
from sparsescan.strategies.networks import Builder, Recurrent, graph_of
from sparsescan.strategies.per_layer.predict import PerLayer, with_loss
from sparsescan.strategies.strategy import sum_words

# Table 1 of the paper: 2 µs and 6 GB/s.
CORI = Network("Cori", latency=2000.0, inverse_bandwidth=1 / 6, exchange=0.0, call=0.0)
# A machine on which nothing but communication takes time.
SENDING = Machine(multiply_adds=math.inf, bandwidth=math.inf, overhead=0.0, network=CORI)


# -------------------------------------------------------------------------------------------------
# Equations
# -------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 40))
def test_what_a_sum_sends_in_all(length: int, ranks: int) -> None:
    """It needs each contribution once, and every rank receives what the others have summed."""
    sent = sum_words(length, np.arange(ranks), ranks)
    assert sent.sum() == 2 * (ranks - 1) * length
    assert (sum_words(6 * ranks, np.arange(ranks), ranks) == 12 * (ranks - 1)).all()


def even_chain(side: int) -> Graph:
    """Sizes that up to 4 rows and 4 columns divide."""
    builder = Builder("even", (8, side, side))
    for channels in (16, 32):
        builder.conv(channels, 3, padding=1)
        builder.elementwise()
    builder.pool(2)
    builder.conv(16, 5, padding=2)
    builder.flatten()
    for k, features in enumerate((64, 16)):
        if k:
            builder.elementwise()
        builder.linear(features)
    return builder.graph()


GRIDS_OF_EVEN = [(1, 4), (2, 2), (4, 1), (2, 4), (4, 4), (8, 2)]


@pytest.mark.parametrize(("rows", "columns"), GRIDS_OF_EVEN)
def test_costs_are_those_of_the_equations(rows: int, columns: int) -> None:
    """Where all sizes are multiples of the grid's: bytes of every worker, and nanoseconds.

    Equation 4 for the gradients of layers by batch, with the messages of one layer: all are summed
    in one. By model equation 8 gathers activations and sums their gradients on all workers of a
    column; as each of them goes on with its own channels, half of that sum is enough.
    """
    graph, batch, size = even_chain(32), 64, rows * columns
    layers, samples = products(graph), batch // columns

    def of(configuration: tuple[int, ...]) -> PerLayer:
        layers = with_loss(graph).layers
        whole = [(1, 1, 1, 1), *[configuration] * (len(layers) - 2), (size, 1, 1, 1)]
        sent = footprint(with_loss(graph), whole, size, batch)[0]
        prediction = PerLayer(whole).predict(graph, SENDING, size, batch)
        assert prediction.bytes == 4 * sent.max()
        return prediction, sent

    prediction, sent = of((size, 1, 1, 1))
    by_batch = all_reduce(size, graph.weights)
    assert (sent == by_batch.words).all()
    assert prediction.nanoseconds["weights"] == pytest.approx(by_batch.time(CORI))
    assert prediction.nanoseconds["activations"] == prediction.nanoseconds["halo"] == 0
    if rows == 1:
        return
    prediction, sent = of((columns, rows, 1, 1))
    gathers = [all_gather(rows, samples * layer.read) for layer in layers[1:]]
    last = samples * layers[-1].made * (rows - 1) / rows / rows
    weights = all_reduce(columns, graph.weights / rows)
    words = 2 * sum(each.words for each in gathers) + weights.words
    assert (sent == words + 2 * last).all()
    ours = (sum(gathers, Volume()) + Volume(log(rows), last)) * 2
    assert prediction.nanoseconds["activations"] == pytest.approx(ours.time(CORI))
    assert prediction.nanoseconds["weights"] == pytest.approx(weights.time(CORI))
    equation = combined_equation(layers, rows, columns, batch)
    # But for the loss, which needs all channels of some samples instead of all.
    both = equation.words - samples * layers[-1].made * (rows - 1) / rows
    assert both - weights.words == pytest.approx(1.5 * (words - weights.words), rel=0.05)


# -------------------------------------------------------------------------------------------------
# The choice
# -------------------------------------------------------------------------------------------------


def test_what_cannot_be_shared() -> None:
    graph = build("alexnet")
    with pytest.raises(InputError, match="batch of 4 cannot be shared by 8 columns"):
        BatchParallel().predict(graph, Machine(), 8, 4)
    with pytest.raises(InputError, match=r"conv1 of shape \(96, 55, 55\) cannot be shared by 128"):
        ModelParallel().predict(graph, Machine(), 128, 4)
    with pytest.raises(InputError, match="no layer has images of so many rows"):
        DomainParallel().predict(build("lenet5"), Machine(), 64, 64)
    with pytest.raises(InputError, match="grid is 2 × 3; expected 8 workers"):
        Integrated((2, 3)).predict(graph, Machine(), 8, 4)
    with pytest.raises(InputError, match="modes"):
        Integrated(modes=("channel",))
    block = Sequential([Residual(Linear(4, 4, rng=0), LayerNorm(4)), LayerNorm(4)])
    chosen = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), *[(2, 1, 1, 1)] * 3]
    with pytest.raises(InputError, match=r"layer norm1 .* at most \(8, 1, 1, 1\)"):
        PerLayer(chosen).predict(block, Machine(), 2, 8)
    cell = Recurrent(LSTMCell(2, 8, rng=0), Linear(16, 4, rng=0), 2)
    for strategy in (ModelParallel(), Integrated((4, 1), ("domain",))):
        for network in (cell, graph_of(cell)):
            with pytest.raises(InputError, match=r"cell1 of shape \(16,\) cannot be shared"):
                strategy.predict(network, Machine(), 4, 8)


def test_memory_of_weights_is_divided_by_rows() -> None:
    """Section 4: the 1.5D algorithm cuts the model by P_r, and replicates data.

    A parameter and its gradient, an activation and its own: two numbers each, in all rows of a
    table. Activations that are gathered have gradients, too.
    """
    graph = even_chain(16)
    whole = BatchParallel().predict(graph, SENDING, 4, 4).memory
    shared = ModelParallel().predict(graph, SENDING, 4, 4).memory
    activations = sum(layer.size for layer in graph.layers)
    assert whole == 4 * 2 * (graph.weights + activations)
    # Each worker has all of the input, a quarter of the others, and reads the rest.
    image = graph.layers[0].size
    gathered = sum(graph.layers[i].size for i in (2, 5, 7, 9)) * 3 // 4
    outputs = image + (activations - image) // 4
    logits = 4 * (16 - 4)
    numbers = graph.weights // 4 + 4 * (outputs + gathered)
    assert shared - 4 * 2 * numbers in (0, 4 * 2 * logits)
    assert Machine(state=2).needed(10, 0) == 2 * Machine().needed(10, 0)


# -------------------------------------------------------------------------------------------------
# The paper's figures
# -------------------------------------------------------------------------------------------------


def test_published_totals_agree_with_each_other() -> None:
    """2.1× in all with 5.0× in communication, and 2.5× with 9.7×: one computing time fits both.

    Computing times of Figure 4 are not given, so this is all that can be compared: with ``c`` that
    of a step in units of pure batch's communication, ``(c + 1) / (c + 1/r)`` is the speed-up.
    """
    ranges = []
    for total, sending in ((2.1, 5.0), (2.5, 9.7)):
        corners = [
            (1 - t / r) / (t - 1)
            for t, r in product((total - 0.05, total + 0.05), (sending - 0.05, sending + 0.05))
        ]
        ranges.append((min(corners), max(corners)))
    low, high = max(a for a, _ in ranges), min(b for _, b in ranges)
    assert low < high
    assert 0.48 < low < high < 0.53


def test_more_workers_than_samples() -> None:
    """B = 512 up to P = 4,096: each image in 2, 4, 8 slabs for convolutions, as in Figure 10."""
    graph = build("alexnet")
    layers = products(graph)
    with pytest.raises(InputError, match="cannot be shared by 1024 columns"):
        BatchParallel().predict(graph, SENDING, 1024, 512)
    totals = []
    for rows in (1, 2, 4, 8):
        volume = combined_equation(layers, rows, 512, 512, range(5) if rows > 1 else ())
        volume += all_gather(rows, layers[4].made)
        working = sum(
            Machine().forward(graph, k, 1 / rows) + Machine().backward(graph, k, 1 / rows)
            for k in range(1, len(graph.layers))
        )
        totals.append(volume.time(CORI) + working)
        best = Integrated().predict(graph, Machine(network=CORI), 512 * rows, 512)
        assert best.total <= totals[-1] * 1.01
    assert all(after < 0.75 * before for before, after in pairwise(totals))
    # With one sample a column, equation 9 itself is least by model in all layers but the first.
    for i in range(1, 5):
        others = set(range(5)) - {i}
        by_domain = combined_equation(layers, 8, 512, 512, set(range(5))).words
        assert combined_equation(layers, 8, 512, 512, others).words < by_domain
