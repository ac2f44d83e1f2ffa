"""Streams: sequences in pieces of any length, beside one call and beside loops in float64."""

from __future__ import annotations

import copy
import pickle
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling import examples

from sparsescan.errors import InputError, InputTypeError
from sparsescan.jacobians import (
    ELU,
    Hardtanh,
    LayerNorm,
    LeakyReLU,
    Linear,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from sparsescan.recurrent import (
    GRU,
    LSTM,
    RNN,
    Cell,
    Given,
    GRUCell,
    Hidden,
    Initial,
    Input,
    LSTMCell,
    Recurrent,
    RNNCell,
    StepNumber,
    catalogue,
)
from sparsescan.recurrent.definition import sizes_of
from sparsescan.recurrent.short import cut, filled
from sparsescan.recurrent.stream_passes import StreamPasses

Array = NDArray[Any]
seeds = st.integers(0, 2**32 - 1)
CELLS = [getattr(catalogue, name) for name in catalogue.__all__]
CELLS = [kind for kind in CELLS if isinstance(kind, type)] + [RNNCell, GRUCell, LSTMCell]


class Begun(Cell):
    """Tanh of the state and the input, which begins with parameters."""

    weight_ih = Input()
    weight_hh = Hidden()
    h_0 = Initial()

    def step(self, x: Any, h: Any) -> Any:
        return np.tanh(self.weight_ih(x) + self.weight_hh(h))


class Driven(Begun):
    """The same, with a further input."""

    drive = Given()

    def step(self, x: Any, h: Any) -> Any:
        return np.tanh(self.weight_ih(x) + self.weight_hh(h) + self.drive)


class Clocked(Begun):
    """The same, with the number of the step."""

    t = StepNumber()

    def step(self, x: Any, h: Any) -> Any:
        return np.tanh(self.weight_ih(x) + self.weight_hh(h) + np.sin(self.t))


def looped(net: Any, x: Array, state: Array) -> tuple[Array, Array]:
    """Return outputs and last states, cell by cell and step by step, by NumPy."""
    lasts = []
    for (cell,), begin in zip(net.cells, state, strict=True):
        sizes = sizes_of(type(cell), cell.options, cell.hidden_size)
        states, rows = filled(np, begin, sizes, cell.hidden_size), []
        for row in x:
            states = cell.forward(row, states)
            rows.append(states[:, : sizes[0]])
        x = np.stack(rows) if rows else np.zeros((0, len(begin), sizes[0]))
        lasts.append(cut(np, states, sizes, cell.hidden_size))
    return x, np.stack(lasts)


def pieces_of(rng: np.random.Generator, x: Array) -> list[Array]:
    """Cut a sequence into blocks, some of them empty, and steps."""
    found = []
    while len(x):
        length = int(rng.choice([0, 1, 1, 2, 3, 7, 40, 300]))
        found.append(x[0] if length == 1 and rng.integers(2) else x[:length])
        x = x[length:]
    return found


def joined(outputs: list[Array], like: Array) -> Array:
    """Put outputs of pieces together."""
    width = outputs[0].shape[-1] if outputs else 1
    whole = [each.reshape(-1, like.shape[1], width) for each in outputs]
    return np.concatenate(whole) if whole else np.zeros((0, like.shape[1], width), like.dtype)


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", CELLS, ids=lambda kind: kind.__name__)
def test_every_cell_streams(kind: Any) -> None:
    rng = np.random.default_rng(0)
    net = Recurrent(kind, 8, 8, num_layers=2, dtype=np.float64, rng=rng)
    x = rng.standard_normal((12, 3, 8))
    stream = net.stream(3)
    whole = stream(x)
    state = stream.state
    begin = np.zeros_like(state)
    expected, last = looped(net, x, begin)
    np.testing.assert_allclose(whole, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=1e-10, atol=1e-12)
    stream.reset()
    assert same(joined([stream(x[:5]), stream(x[5]), stream(x[6:])], x), whole)
    assert same(stream.state, state)
    assert same(net.training_step().forward(x)[0], whole)


@given(seeds)
@settings(max_examples=examples(20))
def test_pieces_have_the_bits_of_one_call(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind = [RNN, GRU, LSTM][rng.integers(3)]
    batch, steps = int(rng.choice([1, 2, 5, 16, 32])), int(rng.integers(0, 700))
    dtype, layers = [np.float32, np.float64][rng.integers(2)], int(rng.integers(1, 4))
    inputs, units = int(rng.integers(1, 20)), int(rng.integers(1, 40))
    net = kind(inputs, units, layers, bool(rng.integers(2)), dtype=dtype, rng=rng)
    if rng.integers(3) == 0:
        masks = {"weight_hh_l0": rng.random(net.weight_hh_l0.shape) < 0.1}
        net = kind(inputs, units, layers, masks=masks, dtype=dtype, rng=rng)
    x = rng.standard_normal((steps, batch, inputs)).astype(dtype)
    stream = net.stream(batch)
    assert stream.dtype == dtype
    whole, state = stream(x), stream.state
    output, last = net.training_step().forward(x)
    assert same(whole, output)
    assert same(state, last)
    stream.reset()
    assert same(joined([stream(each) for each in pieces_of(rng, x)], x) if steps else whole, whole)
    assert same(stream.state, state)
    expected, _ = looped(net, x.astype(float), np.zeros(state.shape))
    eps = np.finfo(dtype).eps
    assert np.abs(whole - expected).max(initial=0) <= 1e4 * eps


HEADS = [
    lambda n: [Linear(n, 3, rng=1)],
    lambda n: [LayerNorm(n), Linear(n, 5, bias=False, rng=1), ReLU(input_shape=(5,))],
    lambda n: [Tanh(input_shape=(n,)), Softmax(-1, input_shape=(n,))],
    lambda n: [Linear(n, 4, rng=1), SiLU(input_shape=(4,)), Linear(4, 2, rng=2), LayerNorm(2)],
    lambda n: [ELU(input_shape=(n,)), Sigmoid(input_shape=(n,)), Linear(n, 1, rng=0)],
    lambda n: [Hardtanh(input_shape=(n,)), LeakyReLU(input_shape=(n,)), Softplus(input_shape=(n,))],
    lambda n: [Linear(n, 3, weight_mask=np.arange(3 * n).reshape(3, n) % 3 > 0, rng=0)],
]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_heads_read_the_outputs(head: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    net = GRU(2, 9, 2, dtype=dtype, rng=rng)
    layers = head(9)
    for layer in layers:
        for name, param in getattr(layer, "params", {}).items():
            setattr(layer, name, rng.standard_normal(param.shape).astype(dtype))
    x = rng.standard_normal((50, 4, 2)).astype(dtype)
    stream = net.stream(4, head=layers)
    whole = stream(x)
    y, _ = net.training_step().forward(x)
    expected = y.astype(float).reshape(-1, 9)
    for layer in layers:
        expected = layer.forward(expected)
    expected = expected.reshape(50, 4, -1)
    assert whole.dtype == dtype
    assert stream.outputs == whole.shape[-1]
    np.testing.assert_allclose(whole, expected, rtol=0, atol=2e3 * np.finfo(dtype).eps)
    stream.reset()
    assert same(joined([stream(each) for each in pieces_of(rng, x)], x), whole)


@given(seeds)
@settings(max_examples=examples(20))
def test_lives(seed: int) -> None:
    """Whatever is done between two calls, results are those of networks that are made then."""
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 3, 16]))
    net = [Recurrent(Begun, 3, 7, rng=rng), LSTM(3, 12, 2, rng=rng)][rng.integers(2)]
    head = [Linear(net.hidden_size, 2, rng=rng)] if rng.integers(2) else []
    stream, step = net.stream(batch, head=head), net.training_step()
    begin = lambda: step.forward(np.zeros((0, batch, 3), np.float32))[1]  # noqa: E731
    state = begin()
    for _ in range(12):
        event = rng.integers(9)
        name = list(net.params)[rng.integers(len(net.params))]
        if event == 0:
            setattr(net, name, rng.standard_normal(net.params[name].shape).astype(np.float32) / 4)
        elif event == 1:
            setattr(net, name, getattr(net, name).__imul__(np.float32(0.5)))
        elif event == 2:
            net.params[name][...] *= 0.5
            stream.update()
        elif event == 3:
            which = rng.random(batch) < 0.5
            stream.reset(which)
            state = np.where(which[:, None], begin(), state)
        elif event == 4:
            other = stream.clone()
            stream(rng.standard_normal((3, batch, 3)).astype(np.float32))
            stream = other
        elif event == 5:
            stream = pickle.loads(pickle.dumps(stream))
            net, head = stream._arguments[0], list(stream._arguments[2])
            step = net.training_step()
        elif event == 6:
            other = copy.copy(stream)
            other(rng.standard_normal((3, batch, 3)).astype(np.float32))
        elif event == 7:
            state = rng.standard_normal(state.shape).astype(np.float32)
            stream.state = state
            state = state.copy()
        elif head:
            head[0].weight = rng.standard_normal(head[0].weight.shape).astype(np.float32)
        x = rng.standard_normal((int(rng.integers(0, 20)), batch, 3)).astype(np.float32)
        y = stream(x)
        expected, state = step.forward(x, state)
        if head:
            np.testing.assert_allclose(
                y,
                head[0].forward(expected.reshape(-1, net.hidden_size)).reshape(y.shape),
                rtol=1e-4,
                atol=1e-5,
            )
        else:
            assert same(y, expected)
        assert same(stream.state, state)


def test_states_begin_with_parameters() -> None:
    net = Recurrent(Begun, 2, 5, 2, rng=0)
    stream = net.stream(3)
    expected = np.stack([np.tile(net.h_0_l0, (3, 1)), np.tile(net.h_0_l1, (3, 1))])
    assert same(stream.state, expected)
    stream(np.ones((2, 3, 2), np.float32))
    net.h_0_l0 = np.full(5, 0.25, np.float32)
    before = stream.state
    stream.reset([True, False, True])
    assert (stream.state[0, [0, 2]] == 0.25).all()
    assert same(stream.state[:, 1], before[:, 1])


def test_one_cell_streams() -> None:
    cell = LSTMCell(3, 6, rng=0)
    x = np.random.default_rng(0).standard_normal((9, 2, 3)).astype(np.float32)
    stream = cell.stream(2)
    assert same(stream(x), cell.unroll(x)[1:, :, :6])
    before = cell.weight_hh.copy()
    cell.weight_hh = 2 * before
    stream.reset()
    assert same(stream(x), cell.unroll(x)[1:, :, :6])


def test_threads_have_streams_of_their_own() -> None:
    net, rng = GRU(4, 30, 2, rng=0), np.random.default_rng(0)
    x = rng.standard_normal((4, 3000, 1, 4)).astype(np.float32)
    expected = [net.stream()(each) for each in x]
    found: list[Any] = [None] * 4

    def run(k: int) -> None:
        stream = net.stream()
        found[k] = np.concatenate([stream(x[k, t : t + 1 + k]) for t in range(0, 3000, 1 + k)])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(map(same, found, expected))


def test_threads_may_share_a_stream() -> None:
    """Calls wait for each other: every step is computed once, in some order."""
    net = RNN(1, 1, nonlinearity="relu", bias=False, rng=0)
    net.weight_ih_l0 = net.weight_hh_l0 = np.ones((1, 1), np.float32)
    stream, one = net.stream(), np.ones((1, 1), np.float32)
    threads = [
        threading.Thread(target=lambda: [stream(one) for _ in range(2000)]) for _ in range(3)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert stream.state == 6000


def test_wide_steps_are_shared_by_threads() -> None:
    net = LSTM(8, 1100, rng=0)
    stream, x = net.stream(), np.random.default_rng(0).standard_normal((5, 1, 8), np.float32)
    whole = stream(x)
    expected, _ = looped(net, x.astype(float), np.zeros((1, 1, 2200)))
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5)
    stream.reset()
    assert same(joined([stream(x[0]), stream(x[1:])], x), whole)


def test_results_are_the_callers() -> None:
    net = LSTM(2, 5, rng=0)
    stream, x = net.stream(), np.ones((1, 2), np.float32)
    first = stream(x)
    kept = first.copy()
    stream(x)
    assert same(first, kept)
    out = np.empty((1, 5), np.float32)
    twin = stream.clone()
    assert stream(x, out) is out
    assert same(out, twin(x, out=None))
    assert same(x, np.ones((1, 2), np.float32))


@pytest.mark.parametrize("how", ["strided", "readonly", "list", "fortran", "big-endian"])
def test_inputs_of_any_form(how: str) -> None:
    net = GRU(2, 5, dtype=np.float64, rng=0)
    stream, x = net.stream(3), np.random.default_rng(0).standard_normal((7, 3, 2))
    expected = net.stream(3)(x)
    given: Any = {
        "strided": np.repeat(x, 2, -1)[..., ::2],
        "list": x.tolist(),
        "fortran": np.asfortranarray(x),
        "big-endian": x.astype(">f8"),
    }.get(how, x)
    if how == "readonly":
        given.flags.writeable = False
    if how == "big-endian":
        with pytest.raises(InputTypeError, match="dtype >f8"):
            stream(given)
    else:
        assert same(stream(given), expected)


def test_what_is_refused() -> None:
    net, f4 = LSTM(2, 5, rng=0), np.float32
    stream = net.stream(3)
    state = stream.state
    for shape in [(3,), (2, 2), (3, 3), (4, 2, 2), (1, 4, 3, 2), (0, 2), ()]:
        with pytest.raises(InputError, match=r"x has shape .*; expected \(steps, 3, 2\) or \(3, 2"):
            stream(np.zeros(shape, f4))
    with pytest.raises(InputTypeError, match="x has dtype float64; expected float32"):
        stream(np.zeros((3, 2)))
    for out in (np.empty((3, 5)), np.empty((3, 4), f4), np.empty((3, 10), f4)[:, ::2]):
        with pytest.raises(InputError, match="out is an array of shape"):
            stream(np.zeros((3, 2), f4), out)
    room = np.zeros(100, f4)
    with pytest.raises(InputError, match="out shares memory"):
        stream(room[:6].reshape(3, 2), room[5:20].reshape(3, 5))
    for which in ([True], np.ones((3, 1), bool)):
        with pytest.raises(InputError, match="which has shape"):
            stream.reset(which)
    with pytest.raises(InputTypeError, match="which has dtype int64"):
        stream.reset([0, 1, 2])
    with pytest.raises(InputError, match="state has shape"):
        stream.state = state[0]
    with pytest.raises(InputTypeError, match="state has dtype float64"):
        stream.state = state.astype(float)
    assert same(stream.state, state)
    with pytest.raises(InputError, match="two directions"):
        GRU(2, 5, bidirectional=True).stream()
    for kind, name in ((Driven, "drive_l0"), (Clocked, "t_l0")):
        with pytest.raises(InputError, match=f"whose steps read {name}; expected steps"):
            Recurrent(kind, 2, 5).stream()
    with pytest.raises(InputError, match="batch is 0"):
        net.stream(0)
    with pytest.raises(InputError, match="behind 5 outputs; expected 4"):
        net.stream(head=[Linear(4, 1)])
    with pytest.raises(InputError, match="is behind 5 outputs"):
        net.stream(head=[LayerNorm(4)])
    with pytest.raises(InputTypeError, match="a layer is LSTM"):
        net.stream(head=[LSTM(5, 1)])


def test_a_long_block_takes_little_memory() -> None:
    passes = StreamPasses([(LSTM(1, 40, rng=0), [])], 1, np.float32)
    assert sum(each.nbytes for each in passes._rooms) < 1 << 20


def test_a_million_steps() -> None:
    net = RNN(1, 2, rng=0)
    stream, x = net.stream(), np.random.default_rng(0).standard_normal((10**6, 1, 1), np.float32)
    whole = stream(x)
    stream.reset()
    cuts = [0, 1, 3, 1000, 500_000, 999_999, 10**6]
    parts = [stream(x[a:b]) for a, b in pairwise(cuts)]
    assert same(np.concatenate(parts), whole)
