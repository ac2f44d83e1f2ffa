"""Integrated model, batch and domain parallelism: its equations, its choices, and the paper's."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import compress, pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from sparsescan import InputError
from sparsescan.jacobians import (
    BatchNorm2d,
    GRUCell,
    LayerNorm,
    Linear,
    LSTMCell,
    Residual,
    RNNCell,
    Sequential,
)
from sparsescan.parallel import Network
from sparsescan.strategies import Graph, Layer, Machine, Recurrent
from sparsescan.strategies.architectures import Builder, build
from sparsescan.strategies.collectives import gather_words, lengths, reduce_words
from sparsescan.strategies.equations import Volume, all_gather, all_reduce, halo
from sparsescan.strategies.graph import MIXING
from sparsescan.strategies.integrated import (
    BatchParallel,
    DomainParallel,
    GridCosts,
    Integrated,
    ModelParallel,
    Rules,
)
from sparsescan.strategies.integrated_run import whole_layers
from sparsescan.strategies.recurrent import Step, graph_of
from sparsescan.strategies.sharding import STATES, Sharding, units, windows

# Table 1 of the paper: 2 µs and 6 GB/s.
CORI = Network("Cori", latency=2000.0, inverse_bandwidth=1 / 6, exchange=0.0, call=0.0)
# A machine on which nothing but communication takes time.
SENDING = Machine(multiply_adds=math.inf, bandwidth=math.inf, overhead=0.0, network=CORI)


# -------------------------------------------------------------------------------------------------
# Equations
# -------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A layer that multiplies by weights: ``|W|``, ``d_{i-1}``, ``d_i``, entries of image rows."""

    weights: int
    read: int
    made: int
    input_row: int = 0
    output_row: int = 0
    kernel: tuple[int, int] = (1, 1)
    output_rows: int = 1


def products(graph: Graph) -> list[Product]:
    """Those of a chain; a layer's outputs are read behind activations and pooling."""
    assert graph.is_chain
    layers, found = graph.layers, []
    numbers = [k for k, layer in enumerate(layers) if layer.kind in MIXING]
    for k, after in pairwise([*numbers, len(layers)]):
        layer, shape = layers[k], graph.input_shape(k)
        sizes = layer.weights, math.prod(shape), layers[after - 1].size
        rows = (shape[0] * shape[2], layer.shape[0] * layer.shape[2]) if len(shape) == 3 else (0, 0)
        height = layer.shape[1] if len(shape) == 3 else 1
        found.append(Product(*sizes, *rows, layer.kernel, height))
    return found


def combined_equation(layers, rows: int, columns: int, batch: int, domain=()) -> Volume:
    """Equation 9: layers in `domain` by domain, others by model and batch."""
    samples, volume = batch / columns, Volume()
    for i, layer in enumerate(layers):
        if i in domain:
            volume += halo(layer.input_row, layer.kernel[0], samples)
            volume += halo(layer.output_row, layer.kernel[1], samples)
            volume += all_reduce(rows * columns, layer.weights)
        else:
            volume += all_gather(rows, samples * layer.made)
            volume += all_reduce(rows, samples * layer.read) * (i > 0)
            volume += all_reduce(columns, layer.weights / rows)
    return volume


def log(count: int) -> int:
    """⌈log₂⌉"""
    return next(k for k in range(64) if 1 << k >= count)


counts = st.integers(1, 70)
layers_ = st.lists(
    st.builds(
        Product, counts, counts, counts, counts, counts,
        st.tuples(st.integers(2, 9), st.integers(2, 9)),
    ), min_size=1, max_size=5,
)  # fmt: skip


@given(layers_, st.integers(1, 20), st.integers(1, 20), st.integers(1, 99), st.data())
def test_equations_term_by_term(layers, rows: int, columns: int, batch: int, data) -> None:
    """3, 4, 7, 8 and 9 as they stand in the paper, in exact arithmetic."""
    workers, samples = rows * columns, Fraction(batch, columns)

    def share(count: int) -> Fraction:
        return Fraction(count - 1, count)

    def check(found: Volume, messages: int, words: Fraction) -> None:
        assert found.messages == messages
        assert math.isclose(found.words, words, rel_tol=1e-12)

    count = len(layers)
    made, read = sum(layer.made for layer in layers), sum(layer.read for layer in layers[1:])
    weights = sum(layer.weights for layer in layers)
    check(
        combined_equation(layers, workers, 1, batch),
        (count + 2 * (count - 1)) * log(workers),
        batch * share(workers) * (made + 2 * read),
    )
    check(
        combined_equation(layers, 1, workers, batch),
        2 * count * log(workers),
        2 * share(workers) * weights,
    )
    check(
        combined_equation(layers, rows, columns, batch),
        (3 * count - 2) * log(rows) + 2 * count * log(columns),
        samples * share(rows) * (made + 2 * read) + 2 * share(columns) * Fraction(weights, rows),
    )
    halos = sum(
        layer.input_row * (layer.kernel[0] // 2) + layer.output_row * (layer.kernel[1] // 2)
        for layer in layers
    )
    check(
        combined_equation(layers, workers, 1, batch, range(count)),
        2 * count + 2 * count * log(workers),
        batch * halos + 2 * share(workers) * weights,
    )
    domain = data.draw(st.sets(st.integers(0, count - 1)))
    messages, words = 0, Fraction(0)
    for i, layer in enumerate(layers):
        if i in domain:
            messages += 2 + 2 * log(workers)
            words += samples * layer.input_row * (layer.kernel[0] // 2)
            words += samples * layer.output_row * (layer.kernel[1] // 2)
            words += 2 * share(workers) * layer.weights
        else:
            messages += (1 + 2 * (i > 0)) * log(rows) + 2 * log(columns)
            words += samples * share(rows) * (layer.made + 2 * (i > 0) * layer.read)
            words += 2 * share(columns) * Fraction(layer.weights, rows)
    check(combined_equation(layers, rows, columns, batch, domain), messages, words)
    check(all_gather(rows, made * batch), log(rows), batch * share(rows) * made)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_what_collectives_send_in_all(sizes: list[int]) -> None:
    """Every rank receives each block of another once; a sum needs each contribution once."""
    sent, reduced = gather_words(np.array(sizes)), reduce_words(np.array(sizes))
    assert sent.sum() == (len(sizes) - 1) * sum(sizes)
    assert reduced.sum() == 2 * (len(sizes) - 1) * sum(sizes)
    even = np.full(len(sizes), 6)
    assert (gather_words(even) == 6 * (len(sizes) - 1)).all()


@given(st.data())
def test_every_row_is_made_from_what_is_fetched(data: st.DataObject) -> None:
    kernel, stride = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    padding = data.draw(st.integers(0, kernel // 2))
    height = data.draw(st.integers(max(kernel, 2), 40))
    outputs = (height + 2 * padding - kernel) // stride + 1
    workers = data.draw(st.integers(1, outputs))
    kind = data.draw(st.sampled_from(["conv", "pool"]))
    layer = Layer(
        "w", kind, (0,), (1, outputs, 1), kernel=(kernel, 1), stride=(stride, 1),
        padding=(padding, 0),
    )  # fmt: skip
    found = windows(layer, height, workers)
    reads = [range(o * stride - padding, o * stride - padding + kernel) for o in range(outputs)]
    for rank in range(workers):
        own, (low, high) = range(*found.inputs[rank]), found.reads[rank]
        asked = [o for o in range(outputs) if any(i in own for i in reads[o])]
        assert set(asked) <= set(range(*found.asks[rank]))
        if kind == "conv":
            assert asked == list(range(*found.asks[rank]))
        makes = range(*found.makes[rank])
        assert set(range(*found.outputs[rank])) <= set(makes)
        assert low == min(reads[makes[0]])
        assert high == max(reads[makes[-1]]) + 1


def even_chain(side: int) -> Graph:
    """Sizes that up to 4 rows and 4 columns divide."""
    made = Builder("even", (8, side, side))
    for channels in (16, 32):
        made.conv(channels, 3, padding=1)
        made.elementwise()
    made.pool(2)
    made.conv(16, 5, padding=2)
    made.flatten()
    for k, features in enumerate((64, 16)):
        if k:
            made.elementwise()
        made.linear(features)
    return made.graph()


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (2, 2), (4, 1), (2, 4), (4, 4), (8, 2)])
def test_bytes_are_those_of_the_equations(rows: int, columns: int) -> None:
    """Every worker's, exactly, where all sizes are multiples of the grid's; beside the loss."""
    graph, batch, samples = even_chain(32), 64, 64 // columns
    layers, size = products(graph), rows * columns
    loss = 8 * reduce_words(lengths(1, size)).reshape(columns, rows)

    def sent(states: dict[str, str], first: str) -> np.ndarray:
        chosen = ["whole", *(states.get(layer.name, first) for layer in graph.layers[1:])]
        found = Sharding(rows, columns, tuple(chosen)).sent(graph, batch, 4)
        return found.reshape(columns, rows) - loss

    by_model = combined_equation(layers, rows, columns, batch)
    assert (sent({}, "channels") == by_model.words * 4).all()
    assert (sent({}, "samples") == combined_equation(layers, 1, size, batch).words * 4).all()

    states = dict.fromkeys(("linear1", "linear2", "elementwise3"), "channels")
    by_domain = sent({"flatten1": "whole"} | states, "rows")
    terms = combined_equation(layers, rows, columns, batch, {0, 1, 2})
    terms += all_gather(rows, samples * layers[2].made)
    # The data need no gradient, which the equation's halos leave out of account.
    halos = samples * sum(
        one.input_row * (one.kernel[0] // 2) + (i > 0) * one.output_row * (one.kernel[1] // 2)
        for i, one in enumerate(layers[:3])
    )
    back = samples * layers[0].output_row * (layers[0].kernel[1] // 2)
    # It counts one neighbour; of a slab in the middle there are two.
    neighbours = np.array([(row > 0) + (row < rows - 1) for row in range(rows)])
    assert (by_domain == 4 * (terms.words - back + (neighbours - 1) * halos)).all()


@given(st.data())
def test_bytes_of_blocks_are_those_that_costs_count(data: st.DataObject) -> None:
    """What moves around residual blocks, where all sizes are multiples of the grid's."""
    rows, columns = data.draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (4, 2)]))
    made = Builder("blocks", (8, 8, 8))
    for _ in range(data.draw(st.integers(1, 3))):
        start = made.last
        for _ in range(data.draw(st.integers(1, 2))):
            made.conv(8, 3, padding=1)
            made.elementwise()
        made.sum(made.last, start)
    made.flatten()
    made.linear(16)
    graph = made.graph()
    costs = GridCosts(graph, SENDING, (rows, columns), 32, Rules(STATES[:3]))
    states = ["whole"]
    for k in range(1, len(graph.layers)):
        possible = [state for state in STATES if costs.possible(k, state)]
        states.append(data.draw(st.sampled_from(possible)))
    sharding = Sharding(rows, columns, tuple(states))
    loss = 8 * reduce_words(lengths(1, rows * columns))
    volumes = costs.volumes(sharding.states)
    words = sum(volume.words for part, volume in volumes.items() if part != "loss")
    assert (sharding.sent(graph, 32, 4) - loss == 4 * words).all()


# -------------------------------------------------------------------------------------------------
# The choice
# -------------------------------------------------------------------------------------------------


def images(data: st.DataObject) -> Graph:
    made = Builder("drawn", (3, 8, 8))
    made.conv(data.draw(st.integers(4, 64)), 3, padding=1)
    made.pool(2)
    made.conv(data.draw(st.integers(4, 64)), 3, padding=1)
    made.flatten()
    made.linear(data.draw(st.integers(4, 2000)))
    return made.graph()


def blocks(data: st.DataObject) -> Graph:
    """Two residual blocks, one with a shortcut."""
    made = Builder("drawn", (3, 8, 8))
    for channels in (made.layers[0].shape[0], data.draw(st.integers(4, 64))):
        start = made.last
        shortcut = start if channels == 3 else made.conv(channels, 1, x=start)
        made.sum(made.conv(channels, 3, padding=1, x=start), shortcut)
    made.flatten()
    made.linear(data.draw(st.integers(4, 2000)))
    return made.graph()


def sequence(data: st.DataObject) -> Graph:
    made = Builder("drawn", (data.draw(st.integers(4, 64)),))
    for _ in range(4):
        made.cell(3, data.draw(st.integers(1, 99)), made.layers[0].size)
    made.linear(data.draw(st.integers(4, 64)))
    return made.graph()


@settings(max_examples=examples(15))
@given(st.data())
def test_the_best_of_all_choices(data: st.DataObject) -> None:
    """Dynamic programming finds what trying everything finds."""
    pick = st.floats(0.01, 1e4)
    machine = Machine(
        multiply_adds=data.draw(pick), bandwidth=data.draw(pick), overhead=data.draw(pick),
        network=Network("drawn", data.draw(pick), data.draw(pick), 0.0, 0.0),
    )  # fmt: skip
    graph = data.draw(st.sampled_from([images, blocks, sequence]))(data)
    grid = data.draw(st.sampled_from([(2, 2), (4, 1), (1, 4), (4, 4)]))
    batch = data.draw(st.integers(grid[1], 40))
    costs = GridCosts(graph, machine, grid, batch, Rules(STATES))
    total, states = costs.best()
    # Whatever is chosen, the loss is summed.
    spare = costs.times(states)["loss"]
    assert math.isclose(total + spare, sum(costs.times(states).values()), rel_tol=1e-9)
    possible = [
        [state for state in STATES if costs.possible(k, state)] for k in range(1, len(graph.layers))
    ]
    cells = [layer.kind == "cell" for layer in graph.layers[1:]]
    ways = [
        ("whole", *way)
        for way in product(*possible)
        # Cells share their parameters.
        if len(set(compress(way, cells))) <= 1
    ]
    assert states in ways
    every = [sum(costs.times(way).values()) - spare for way in ways]
    assert math.isclose(total, min(every), rel_tol=1e-9)


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "inception-v3", "resnet-110", "gru:20"])
def test_the_best_grid_is_no_worse_than_any(name: str) -> None:
    graph = build(name)
    best = Integrated().predict(graph, Machine(), 16, 64)
    tried = 0
    for rows in (1, 2, 4, 8, 16):
        for modes in (("batch",), ("model",), ("domain", "model"), ("batch", "model")):
            try:
                other = Integrated((rows, 16 // rows), modes).predict(graph, Machine(), 16, 64)
            except InputError:
                continue
            tried += 1
            assert best.total <= other.total * (1 + 1e-12)
    assert tried > 5
    assert best.memory > 0
    assert best.bytes > 0
    assert not best.stale


@settings(max_examples=examples(20))
@given(
    st.sampled_from([RNNCell, GRUCell]), st.integers(1, 4), st.integers(2, 9), st.booleans(),
    st.booleans(), st.sampled_from([np.float32, np.float64]), st.integers(0, 1 << 30),
)  # fmt: skip
def test_a_share_of_a_cell(kind, features, hidden, bias, pruned, dtype, seed) -> None:
    """Outputs, columns of the Jacobian and parameters' gradients of some units of the whole."""
    rng = np.random.default_rng(seed)
    gates = 3 if kind is GRUCell else 1
    masks = {
        f"weight_{name}_mask": rng.random((gates * hidden, size)) < 0.7 if pruned else None
        for name, size in (("ih", features), ("hh", hidden))
    }
    options = {"nonlinearity": "relu"} if kind is RNNCell and rng.random() < 0.5 else {}
    cell = kind(features, hidden, bias, dtype=dtype, rng=rng, **masks, **options)
    start, stop = sorted(rng.choice(hidden + 1, 2, replace=False).tolist())
    rows = np.arange(gates * hidden).reshape(gates, hidden)[:, start:stop].reshape(-1)
    before = {name: param.copy() for name, param in cell.params.items()}
    network = Recurrent(cell, Linear(hidden, 2, rng=0), 3)
    x = rng.standard_normal((5, *network.input_shape)).astype(dtype)
    state = rng.uniform(-1, 1, (5, hidden)).astype(dtype)
    grad = rng.standard_normal((5, stop - start)).astype(dtype)
    found = Step(cell.restrict(slice(start, stop)), 1)
    found.read(x)
    tolerance = {"rtol": 0, "atol": 30 * np.finfo(dtype).eps * (hidden + features)}
    made = found.forward(state)
    np.testing.assert_allclose(made, cell.forward(x[:, 1], state)[:, start:stop], **tolerance)
    jacobians = found.values(state).reshape(5, hidden, -1)
    for k in range(5):
        whole = cell.jacobian(x[k, 1], state[k]).toarray()
        np.testing.assert_allclose(jacobians[k], whole[:, start:stop], **tolerance)
    full = np.zeros_like(state)
    full[:, start:stop] = grad
    expected = cell.param_grads(x[:, 1], state, full)
    grads = found.param_grads(state, grad)
    assert grads.keys() == expected.keys() == found.params.keys()
    for name, one in expected.items():
        assert made.dtype == jacobians.dtype == grads[name].dtype == dtype
        np.testing.assert_allclose(grads[name], one[rows], **tolerance)
        assert not np.delete(one, rows, axis=0).any()
        np.testing.assert_array_equal(found.params[name], before[name][rows])
        # They are its own.
        found.params[name] += 1
        np.testing.assert_array_equal(cell.params[name], before[name])


def test_what_is_added_is_cut_alike() -> None:
    """In as many parts as each of the terms can be; a chain behind them, too."""
    made = Builder("drawn", (6, 2, 2))
    first = made.elementwise()
    flat = made.flatten()
    linear = made.linear(24)
    made.sum(linear, flat)
    made.elementwise()
    other = made.linear(10)
    assert units(made.graph()) == [6] * 6 + [10]
    made.sum(made.linear(10), other)
    assert [first, flat, linear] == [1, 2, 3]
    assert units(made.graph())[-2:] == [10, 10]


def test_what_cannot_be_shared() -> None:
    graph = build("alexnet")
    with pytest.raises(InputError, match="batch of 4 cannot be shared by 8 columns"):
        BatchParallel().predict(graph, Machine(), 8, 4)
    with pytest.raises(InputError, match=r"conv1 of shape \(96, 55, 55\) cannot be shared by 128"):
        ModelParallel().predict(graph, Machine(), 128, 4)
    with pytest.raises(InputError, match="grid is 2 × 3; expected 8 workers"):
        Integrated((2, 3)).predict(graph, Machine(), 8, 4)
    with pytest.raises(InputError, match="modes"):
        Integrated(modes=("channel",))
    norm = Sequential([BatchNorm2d(2, input_shape=(4, 2, 3, 3), training=True)])
    with pytest.raises(InputError, match=r"norm1 is BatchNorm2d.* couples samples; expected"):
        whole_layers(norm, graph_of(norm))
    # Numbers are those of the graph, in which layer 3 adds.
    block = Sequential([Residual(Linear(3, 3, rng=0), LayerNorm(3)), LayerNorm(3)])
    assert whole_layers(block, graph_of(block)) == {2, 4}
    cell = Recurrent(LSTMCell(2, 8, rng=0), Linear(16, 4, rng=0), 2)
    assert whole_layers(cell, graph_of(cell)) == {1, 2}
    for strategy in (ModelParallel(), Integrated((4, 1), ("domain",))):
        with pytest.raises(InputError, match=r"cell1 of shape \(16,\) cannot be shared"):
            strategy.predict(graph_of(cell), Machine(), 4, 8)


def test_memory_of_weights_is_divided_by_rows() -> None:
    """Section 4: the 1.5D algorithm cuts the model by P_r, and replicates data."""
    graph = even_chain(16)
    whole = BatchParallel().predict(graph, SENDING, 4, 4).memory
    shared = ModelParallel().predict(graph, SENDING, 4, 4).memory
    per_sample = 4 * graph.activations
    assert abs(whole - 8 * graph.weights - per_sample) <= 8
    read = sum(graph.layers[i].size for i in (0, 2, 5, 7, 9))
    assert abs(shared - 2 * graph.weights - per_sample - 16 * read) <= 8


# -------------------------------------------------------------------------------------------------
# The paper's figures
# -------------------------------------------------------------------------------------------------


def test_equation_5() -> None:
    """3×3 filters on 13×13×384: the equation gives 13.6, where the text says 12."""
    made = Builder("13", (384, 13, 13))
    made.add(
        Layer("conv", "conv", (0,), (384, 13, 13), weights=9 * 384 * 384, kernel=(3, 3),
              padding=(1, 1))
    )  # fmt: skip
    layer = products(made.graph())[0]
    crossover = 2 * layer.weights / (3 * layer.output_row * layer.output_rows)
    assert math.isclose(crossover, 2 * 9 * 384 / (3 * 13 * 13))
    assert abs(crossover - 12) < 0.15 * 12
    # Below it model parallelism sends less: one layer of many, so with the gradient of its input.
    for batch in range(1, 30):
        by_model = 3 * batch * layer.made
        assert (by_model < 2 * layer.weights) == (batch < crossover)


GROUPED = [96 * 363, 256 * 1200, 384 * 2304, 384 * 1728, 256 * 1728]
WHOLE = [96 * 363, 256 * 2400, 384 * 2304, 384 * 3456, 256 * 3456]
ONE_TOWER = [64 * 363, 192 * 1600, 384 * 1728, 256 * 3456, 256 * 2304]
LINEAR = [4096 * 9216, 4096 * 4096, 1000 * 4096]
# Of the paper's section 2: ⌈X/s⌉, for pooling as well.
SIDES = {
    "before pooling": (55, 27, 13, 13, 13),
    "after pooling": (27, 13, 13, 13, 6),
    "⌈X/s⌉ after pooling": (28, 14, 14, 14, 7),
}
NETWORKS = {
    "in groups": (GROUPED, (96, 256, 384, 384, 256)),
    "no groups": (WHOLE, (96, 256, 384, 384, 256)),
    "one tower": (ONE_TOWER, (64, 192, 384, 256, 256)),
}
GRIDS = [(2**k, 512 >> k) for k in range(1, 8)]


def readings() -> dict[tuple[object, ...], tuple[float, dict[int, float], dict[int, float]]]:
    """What equations 4 and 8 may mean for AlexNet: milliseconds of pure batch, and speed-ups.

    For each: the parameters of convolutions; which activations are sent; how often they are sent
    forward and back (the equation has 1 and 2); whether outputs of the last layer are; bytes of a
    number; whether messages have a latency. Speed-ups by ``P_r``, with all layers by model, and
    with the linear ones alone (the first of which then reads what is redistributed).
    """
    found = {}
    terms = (1, 2), (1, 1), (1, 0), (0, 1), (0, 2), (2, 2)
    for net, sides, sent, last, itemsize, latency in product(
        NETWORKS, SIDES, terms, (True, False), (2, 4, 8), (2000.0, 0.0)
    ):
        network = Network("reading", latency, 1 / 6, 0.0, 0.0)
        convolutions, channels = NETWORKS[net]
        weights = convolutions + LINEAR
        made = [c * s * s for c, s in zip(channels, SIDES[sides], strict=True)]
        made += [4096, 4096, 1000 if last else 0]
        read = [0, *made[:4], 9216, *made[5:7]]

        def total(rows: int, by_model: int, weights=weights, made=made, read=read, sent=sent,
                  itemsize=itemsize, network=network) -> float:  # fmt: skip
            columns, volume = 512 // rows, Volume()
            for i in range(8):
                layer = Product(weights[i], 0, 0)
                if i < by_model:
                    volume += combined_equation([layer], 1, 512, 1)
                    continue
                volume += combined_equation([layer], 1, columns, 1) * (1 / rows)
                volume += Volume(2 * log(columns) * (1 - 1 / rows))
                volume += all_gather(rows, made[i] * 2048 / columns) * sent[0]
                volume += all_gather(rows, read[i] * 2048 / columns) * (sent[1] * (i > 0))
            return volume.time(network, itemsize)

        batch = total(1, 8)
        found[net, sides, sent, last, itemsize, latency] = (
            batch / 1e6,
            {rows: batch / total(rows, 0) for rows, _ in GRIDS},
            {rows: batch / total(rows, 5) for rows, _ in GRIDS},
        )
    return found


def test_no_reading_gives_the_published_speedups() -> None:
    """B = 2,048 and P = 512: 5.0× on 16 × 32, and 9.7× by model in linear layers only.

    Equation 8 as it stands gives 2.2× (3.3× on 8 × 64, the best) and 8.2× (8.7× on 32 × 16).
    """
    found = readings()
    print()
    for reading, (batch, every, linear) in found.items():
        if reading[4:] == (4, 2000.0):
            both = ", ".join(f"{every[rows]:.1f}/{linear[rows]:.1f}" for rows, _ in GRIDS)
            print(*reading[:4], f"{batch:.1f} ms: {both}")
    batch, every, linear = found["in groups", "after pooling", (1, 2), True, 4, 2000.0]
    assert abs(batch - 81.4) < 0.1
    assert abs(every[16] - 2.23) < 0.01
    assert (max(every, key=every.__getitem__), round(max(every.values()), 1)) == (8, 3.3)
    assert abs(linear[16] - 8.21) < 0.01
    assert (max(linear, key=linear.__getitem__), round(max(linear.values()), 1)) == (32, 8.7)
    # The functions above agree with the graph, whose layers have biases as well.
    layers = products(build("alexnet"))
    ours = combined_equation(layers, 1, 512, 1).time(CORI)
    assert abs(ours / 1e6 - batch) < 0.02
    both = ours / combined_equation(layers, 16, 32, 2048).time(CORI)
    assert abs(both - every[16]) < 0.01
    near = [
        reading
        for reading, (_, every, linear) in found.items()
        if abs(every[16] - 5.0) <= 0.05 and any(abs(x - 9.7) <= 0.05 for x in linear.values())
    ]
    assert near == []
    # Nearest: activations gathered forward, and nothing sent back.
    _, every, linear = found["in groups", "after pooling", (1, 0), False, 4, 2000.0]
    assert (round(every[16], 1), round(linear[16], 1)) == (5.2, 9.7)


def test_published_grid_is_not_the_one_that_sends_least() -> None:
    """If 16 × 32 sends a fifth of pure batch, 8 × 64 sends less, whatever activations are."""
    weights = sum(GROUPED + LINEAR)
    batch = 2 * weights * 511 / 512

    def shared(rows: int, activations: float) -> float:
        columns = 512 // rows
        words = 2 * weights / rows * (columns - 1) / columns
        return words + activations * 2048 / columns * (rows - 1) / rows

    activations = (batch / 5.0 - shared(16, 0)) / (shared(16, 1) - shared(16, 0))
    assert math.isclose(shared(16, activations), batch / 5.0)
    assert shared(8, activations) < 0.96 * shared(16, activations)


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


def test_pure_domain_parallelism_has_rows_of_all_images_that_are_high_enough() -> None:
    """Equation 7, whatever else would be faster."""
    made = Builder("images", (3, 32, 32))
    for stride in (1, 2, 4):
        made.conv(8, 3, stride, padding=1)
        made.elementwise()
    made.flatten()
    made.linear(10)
    graph, machine = made.graph(), Machine(network=CORI)
    sharding, _ = DomainParallel().choose(graph, machine, 8, 16)
    # 32, 16 and 4 rows for 8 workers.
    assert sharding.states[1:5] == ("rows",) * 4
    assert "rows" not in sharding.states[5:]
    found = DomainParallel().predict(graph, machine, 8, 16)
    assert found.how == "8 × 1, domain in conv1–conv2, batch in conv3–linear1"
    # The first reads the input, which has no gradient; others are halos of one row.
    halos = [3 * 32, 8 * 32, 8 * 16]
    time = len(halos) * CORI.latency + 4 * CORI.inverse_bandwidth * 16 * sum(halos)
    assert found.nanoseconds["halo"] == pytest.approx(time)
    with pytest.raises(InputError, match="no layer has images of so many rows"):
        DomainParallel().predict(graph, machine, 64, 64)
    assert DomainParallel().predict(graph, machine, 1, 16).nanoseconds["halo"] == 0


def test_domain_where_it_pays() -> None:
    """Large images, few weights, and fewer samples than workers."""
    made = Builder("wide", (3, 256, 256))
    for _ in range(3):
        made.conv(32, 3, padding=1)
        made.elementwise()
    made.pool(32)
    made.flatten()
    made.linear(512)
    found = Integrated().predict(made.graph(), Machine(network=CORI), 8, 2)
    assert found.how == "8 × 1, domain in conv1–conv3, model in linear1"
    assert found.nanoseconds["halo"] > 0
