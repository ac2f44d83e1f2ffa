"""Layers as objects: what may change, copies and pickles, and what initial parameters depend on."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from layers import CELLS, OPERATORS

import sparsescan.jacobians as jacobians
from sparsescan import InputError, InputTypeError, MemoryLimitError, recurrent
from sparsescan.arrays import arrays
from sparsescan.jacobians import (
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    Linear,
    Residual,
    Sequential,
    Tanh,
)
from sparsescan.jacobians.shared.operator import Operator
from sparsescan.recurrent import GRU, LSTM, RNN, GRUCell, Recurrent

IMAGE = (2, 4, 4)
MAKERS: dict[str, Callable[[], Any]] = {
    "Sequential": lambda: Sequential(
        [Linear(3, 3, rng=0), Residual(Linear(3, 3, rng=1), Tanh(input_shape=(3,)))]
    ),
    **{name: lambda make=make: make(np.float64) for name, make in (OPERATORS | CELLS).items()},
    "RNN": lambda: RNN(3, 4, nonlinearity="relu", dtype=np.float64, rng=0),
    "GRU": lambda: GRU(3, 4, 2, masks={"weight_hh_l1": MASK}, dtype=np.float64, rng=0),
    "LSTM": lambda: LSTM(3, 4, bidirectional=True, dtype=np.float64, rng=0),
}
MASK = np.arange(48).reshape(12, 4) % 7 == 0
RANDOM = ["Conv1d", "Conv2d", "ConvTranspose2d", "GRUCell", "LSTMCell", "Linear", "RNNCell"]
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda op: pickle.loads(pickle.dumps(op)),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MAKERS[request.param]


def results(op: Any) -> list[np.ndarray]:
    """Everything that a layer, a cell or a chain computes, for one input."""
    rng = np.random.default_rng(7)
    if isinstance(op, Sequential):
        xs = op.activations(rng.standard_normal((5, *op.input_shape)))
        return [*xs, *op.values(xs), *(p.indices for p in op.patterns)]
    if isinstance(op, Recurrent):
        step = op.training_step()
        output, state = step.forward(rng.standard_normal((5, 2, op.input_size)))
        grads = step.backward(output, state)
        return [output, state, grads.input, grads.state, *grads.params.values()]
    if isinstance(op, Operator):
        inputs: tuple[np.ndarray, ...] = (rng.standard_normal((5, *op.input_shape)),)
    else:
        inputs = tuple(rng.standard_normal((5, n)) for n in (op.input_size, op.state_size))
    y = op.forward(*inputs)
    param_grads = op.param_grads(*inputs, y).values()
    pattern = op.pattern
    return [y, op.values(*inputs), *param_grads, pattern.indptr, pattern.indices]


def same(actual: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(actual) == len(expected) and all(map(np.array_equal, actual, expected))


def layers(op: Any) -> list[Any]:
    """Return the layer itself, or those of which it is made."""
    if not hasattr(op, "ops"):
        return [op]
    return [part for inner in (*op.ops, *getattr(op, "shortcut", ())) for part in layers(inner)]


def test_every_layer_is_among_the_examples() -> None:
    classes = {name for name in jacobians.__all__ if inspect.isclass(getattr(jacobians, name))}
    others = {"NetworkGradients", "NetworkStep", "Operator"}
    examples = {name.partition("-")[0] for name in MAKERS}
    assert classes - others == examples - set(recurrent.__all__)


# -- Copies and pickles ---------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_computes_the_same_and_is_independent(
    make: Callable[[], Any], kind: str, used: bool
) -> None:
    op = make()
    expected = results(op if used else make())
    copied = COPIES[kind](op)
    assert same(results(copied), expected)
    for part in layers(copied):
        for name, param in part.params.items():
            param += 1
            setattr(part, name, param * 2)
    if any(part.params for part in layers(op)):
        assert not same(results(copied), expected)
    assert same(results(op), expected)


def test_a_copy_refuses_what_the_layer_refuses() -> None:
    for copied in (kind(Linear(3, 2)) for kind in COPIES.values()):
        with pytest.raises(InputError, match="cannot be changed"):
            copied.in_features = 4


def test_a_shallow_copy_shares_arrays_until_one_is_set() -> None:
    layer = Linear(3, 2, rng=0)
    weight = layer.weight
    shallow = copy.copy(layer)
    assert shallow.weight is weight
    shallow.weight = np.zeros((2, 3))
    assert layer.weight is weight


# -- What cannot change ---------------------------------------------------------------------------


def test_no_public_attribute_can_be_set_but_parameters_and_masks(make: Callable[[], Any]) -> None:
    settable = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "mask"}
    settable |= {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
    for op in layers(make()):
        expected = results(op)
        names = {name for name in dir(op) if not name.startswith("_")}
        # A cell says by `bias` whether it has biases.
        fixed = names - settable | ({"bias"} if hasattr(op, "state_size") else set())
        for name in [*fixed, "weight_mask"]:
            with pytest.raises(InputError, match=f"^{type(op).__name__}.{name} cannot be changed"):
                setattr(op, name, None)
        assert same(results(op), expected)


def test_counted_batches_can_be_set() -> None:
    layer = BatchNorm2d(2, momentum=None, input_shape=(3, *IMAGE), training=True)
    layer.num_batches_tracked = 3
    layer.update_running_stats(np.ones((3, *IMAGE)))
    assert layer.num_batches_tracked == 4
    np.testing.assert_allclose(layer.running_mean, 1 / 4)
    with pytest.raises(InputError, match="num_batches_tracked is -1; expected at least 0"):
        layer.num_batches_tracked = -1
    with pytest.raises(InputTypeError, match=r"num_batches_tracked is 0\.5; expected an integer"):
        layer.num_batches_tracked = 0.5  # type: ignore[assignment]


# -- Parameters -----------------------------------------------------------------------------------


def test_an_array_that_was_reshaped_in_place_reaches_no_kernel(make: Callable[[], Any]) -> None:
    for op in layers(make()):
        for name, param in op.params.items():
            array = param.copy()
            setattr(op, name, array)
            array.resize((20, 30), refcheck=False)
            expected = rf"{name} has become an array of shape \(20, 30\); expected"
            with pytest.raises(InputError, match=expected):
                results(op)
            setattr(op, name, param)


def test_running_statistics_that_were_reshaped_in_place_are_refused() -> None:
    layer = BatchNorm2d(2, input_shape=IMAGE)
    layer.running_var.resize((1,), refcheck=False)
    with pytest.raises(InputError, match=r"running_var has become an array of shape \(1,\)"):
        layer.values()


@pytest.mark.parametrize("name", RANDOM)
def test_initial_parameters_do_not_depend_on_the_order_of_reading(name: str) -> None:
    expected = MAKERS[name]().params
    backwards = MAKERS[name]()
    for key in reversed(expected):
        np.testing.assert_array_equal(getattr(backwards, key), expected[key])
    arrays = [array.reshape(-1)[:2].tolist() for array in expected.values()]
    assert all(arrays.count(array) == 1 for array in arrays), "two parameters are drawn alike"


def test_without_rng_layers_differ_but_copies_do_not() -> None:
    layer = Linear(3, 2)
    np.testing.assert_array_equal(copy.deepcopy(layer).weight, layer.weight)
    assert not np.array_equal(Linear(3, 2).weight, layer.weight)


def test_threads_that_read_first_at_once_get_the_same_array() -> None:
    count = 8
    barrier = Barrier(count)

    def read(layer: Linear) -> Any:
        barrier.wait()
        return layer.weight

    with ThreadPoolExecutor(count) as pool:
        for _ in range(20):
            layer = Linear(200, 200)
            actual = list(pool.map(read, [layer] * count))
            assert all(array is layer.weight for array in actual)


@pytest.mark.parametrize(
    "make", [lambda rng: Linear(3, 2, rng=rng), lambda rng: GRUCell(3, 2, rng=rng)]
)
def test_a_wrong_rng_is_named(make: Callable[[Any], Any]) -> None:
    with pytest.raises(
        InputError, match=r"^rng is -1; expected a numpy\.random\.Generator, an int"
    ):
        make(-1)
    with pytest.raises(InputTypeError, match=r"^rng is 'a'; expected a numpy\.random\.Gen"):
        make("a")
    with pytest.raises(InputTypeError, match=r"^rng is 0\.5; expected a numpy\.random\.Gen"):
        make(0.5)


def test_parameters_that_no_memory_holds_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(4096, 4096, rng=0)
    monkeypatch.setattr(arrays, "memory_left", lambda: 8 * 4096**2 - 1)
    with pytest.raises(MemoryLimitError, match=r"of shape \(4096, 4096\), would take 128 MiB"):
        _ = layer.weight
    monkeypatch.setattr(arrays, "memory_left", lambda: 8 * 4096**2)
    assert layer.weight.shape == (4096, 4096)


# -- Parts of layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        Linear(3, 4, weight_mask=np.arange(12).reshape(4, 3) % 3 > 0, rng=0),
        Linear(3, 4, bias=False, input_shape=(2, 3), rng=0),
        Conv2d(2, 4, (3, 2), stride=(1, 2), padding=1, input_shape=(2, 5, 4), rng=0),
        Conv1d(2, 4, 2, bias=False, input_shape=(2, 5), rng=0),
        BatchNorm2d(4, affine=False, input_shape=(4, 2, 3)),
        BatchNorm1d(4, eps=0.5, input_shape=(3, 4), training=True),
    ],
)
def test_a_part_computes_some_channels_with_the_same_parameters(op: Any) -> None:
    axis = op.output_shape.index(4)
    whole, some = [slice(None)] * len(op.output_shape), slice(1, 3)
    whole[axis] = some
    x = np.random.default_rng(0).standard_normal(op.input_shape)
    given = x[tuple(whole)] if isinstance(op, BatchNorm1d | BatchNorm2d) else x
    part = op.restrict(given.shape, some)
    np.testing.assert_array_equal(part.forward(given), op.forward(x)[tuple(whole)])
    assert all(np.shares_memory(part.params[name], array) for name, array in op.params.items())
