"""Recurrent networks over whole sequences on a CUDA device, beside the CPU and PyTorch."""

from __future__ import annotations

import sys
import threading
import types
from collections import OrderedDict
from typing import Any

import fake_cupy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import CELLS
from numpy.typing import NDArray
from on_device import IN_PYTHON, SIMULATED, cupy_or_stand_in, run_as_compiled_if
from recurrent_steps import KINDS, arguments_of, autograd, gradients_of, networks
from sampling import examples

import sparsescan.torch
from sparsescan.arrays.arrays import is_cupy
from sparsescan.errors import DeviceError, InputError, MemoryLimitError
from sparsescan.recurrent import GRU, LSTM, RNN
from sparsescan.recurrent import device as recurrent_device
from sparsescan.torch.calls import recurrent_op as op

Array = NDArray[Any]
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)

simulated = pytest.mark.skipif(not SIMULATED, reason="looks into the stand-in for CuPy")
# Units whose weights are in registers, with one lane and several; and are read in each step.
HELD, SHARED, STREAMED, ROUNDS = (1, 2, 5, 7) if IN_PYTHON else (20, 64, 130, 530)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


@pytest.fixture
def launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[fake_cupy.Launch]:
    return fake_cupy.watch(monkeypatch)


def put(cupy: Any, net: Any) -> None:
    """Move the parameters of a network to the device."""
    for name, array in net.params.items():
        setattr(net, name, cupy.asarray(array))


def on_device(cupy: Any, net: Any, arguments: Any, step: Any = None, **options: Any) -> Any:
    """Return outputs, states and gradients on the device, copied to the host."""
    put(cupy, net)
    x, state, lengths, above, carry, *resets = arguments
    given = (cupy.asarray(array) for array in (x, state, above, carry))
    x, state, above, carry = given
    resets[1:] = map(cupy.asarray, resets[1:])  # states that resets set
    step = net.training_step(**options) if step is None else step
    results = gradients_of(step, x, state, lengths, above, carry, *resets)
    assert all(is_cupy(array) for array in results.values())
    return {name: array.get() for name, array in results.items()}


def agree(actual: dict[str, Array], expected: dict[str, Array], dtype: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == dtype, name
        assert actual[name].shape == array.shape, name
        scale = np.max(np.abs(array), initial=1e-300)
        bound = 1e4 * np.finfo(dtype).eps * scale
        assert np.max(np.abs(actual[name] - array), initial=0) <= bound, name


@settings(max_examples=examples(60) if IN_PYTHON else 1)
@given(
    networks(units=7, inputs=5, layers=2),
    *(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 1 << 30)),
)
def test_gradients_are_those_of_autograd(
    net: Any, steps: int, batch: int, shorter: bool, seed: int
) -> None:
    arguments = arguments_of(np.random.default_rng(seed), net, steps, batch, F8, shorter)
    expected = autograd(net, *arguments, "float64")
    with pytest.MonkeyPatch.context() as patch:
        agree(on_device(cupy_or_stand_in(patch), net, arguments), expected, F8)


@pytest.mark.parametrize("units", [HELD, SHARED, STREAMED, ROUNDS])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_units_of_any_number(cupy: Any, kind: str, units: int) -> None:
    """Weights in registers or not, and several samples in a block."""
    rng = np.random.default_rng(units)
    small = units in (HELD, SHARED)
    run_as_compiled_if(
        (kind, units) in (("RNN", HELD), ("LSTM", SHARED), ("GRU", STREAMED), ("RNN", ROUNDS))
    )
    net = KINDS[kind](2, units, bidirectional=small, dtype=F4, rng=rng)
    batch = 5 if IN_PYTHON else 3
    arguments = arguments_of(rng, net, 3, batch, F4, shorter=True)
    expected = gradients_of(net.training_step(), *arguments)
    agree(on_device(cupy, net, arguments), expected, F4)


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_blocks_of_several_samples(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: str, samples: int
) -> None:
    """As many as lanes, fewer or more; and the same bits every time."""
    run_as_compiled_if((kind, samples) in (("RNN", 1), ("GRU", 2), ("LSTM", 4)))
    units = {1: (5, 3)[kind == "LSTM"], 2: 6, 4: 7}[samples] if IN_PYTHON else 40
    net = KINDS[kind](2, units, bidirectional=True, dtype=F8, rng=3)
    arguments = arguments_of(np.random.default_rng(0), net, 4, 7, F8, shorter=True)
    expected = gradients_of(net.training_step(), *arguments)
    monkeypatch.setattr(recurrent_device, "samples_of", lambda *about: samples)
    actual = on_device(cupy, net, arguments)
    agree(actual, expected, F8)
    again = on_device(cupy, net, arguments)
    assert all(actual[name].tobytes() == again[name].tobytes() for name in actual)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_gates_that_are_not_kept_are_computed_again(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("sparsescan.recurrent.step._SEGMENT", 3)
    net = KINDS[kind](2, 3, 2, bidirectional=True, dtype=F8, rng=0)
    arguments = arguments_of(np.random.default_rng(0), net, 7, 2, F8, shorter=True)
    expected = gradients_of(net.training_step(), *arguments)
    put(cupy, net)
    step = net.training_step()
    agree(on_device(cupy, net, arguments, step), expected, F8)
    assert step.keeps_gates
    smaller = net.training_step(memory_limit=step.nbytes - 1)
    agree(on_device(cupy, net, arguments, smaller), expected, F8)
    assert not smaller.keeps_gates
    assert smaller.nbytes < step.nbytes
    with pytest.raises(MemoryLimitError, match="memory_limit is 99 B"):
        on_device(cupy, net, arguments, memory_limit=99)


@pytest.mark.skipif(IN_PYTHON, reason="Python would take minutes")
def test_a_block_asks_for_more_shared_memory_than_others_have(cupy: Any) -> None:
    """LSTMs of so many units take more than 48 KiB, of one sample."""
    net, host = (LSTM(2, 620, dtype=F8, rng=0) for _ in range(2))
    arguments = arguments_of(np.random.default_rng(0), net, 2, 2, F8)
    expected = gradients_of(host.training_step(), *arguments)
    agree(on_device(cupy, net, arguments), expected, F8)


@simulated
def test_memory_is_what_is_said(cupy: Any) -> None:
    net = GRU(12, 3, 2, dtype=F8, rng=0)
    put(cupy, net)
    step, x = net.training_step(), cupy.asarray(np.zeros((9, 4, 12)))
    before = fake_cupy.state.used[0]
    step.forward(x)
    taken = fake_cupy.state.used[0] - before
    weights = [array for each in step._memory._packed for array in (*each.w_in, *each[1:])]
    orders = [order.on(cupy) for one in step._directions for order in one._orders]
    beside = sum(array.nbytes for array in (*weights, *orders))
    # The lengths, too; and memory is given in units.
    assert step.nbytes + beside <= taken <= step.nbytes + beside + 512 * 28


def test_memory_is_used_again_on_any_stream(cupy: Any) -> None:
    net = LSTM(3, 3, dtype=F8, rng=0)
    host = LSTM(3, 3, dtype=F8, rng=0)
    put(cupy, net)
    step = net.training_step()
    for seed in (0, 1, 0):
        arguments = arguments_of(np.random.default_rng(seed), net, 4 + seed, 2, F8)
        expected = gradients_of(host.training_step(), *arguments)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            actual = on_device(cupy, net, arguments, step)
        agree(actual, expected, F8)


@simulated
def test_a_step_waits_for_the_streams_that_it_was_on(cupy: Any) -> None:
    net = RNN(3, 3, dtype=F8, rng=0)
    put(cupy, net)
    step, x = net.training_step(), cupy.asarray(np.ones((3, 2, 3)))
    step.forward(x)
    home, other = cupy.cuda.get_current_stream(), cupy.cuda.Stream()
    fake_cupy.state.waited.clear()
    with other:
        step.backward(needs_input_grad=False)
    assert fake_cupy.state.waited == [(0, other.ptr), (0, home.ptr)]


@simulated
def test_weights_wait_for_the_stream_of_the_backward_pass(cupy: Any) -> None:
    """They were made on that of the forward pass, which was not the first one."""
    net = RNN(3, 3, dtype=F8, rng=0)
    put(cupy, net)
    step, x = net.training_step(), cupy.asarray(np.ones((3, 2, 3)))
    step.forward(x)
    home, forward, back = cupy.cuda.get_current_stream(), cupy.cuda.Stream(), cupy.cuda.Stream()
    with forward:
        step.forward(x)
    fake_cupy.state.waited.clear()
    with back:
        step.backward(needs_input_grad=False)
    first, *others = fake_cupy.state.waited
    assert first == (0, back.ptr)
    assert sorted(others) == sorted([(0, home.ptr), (0, forward.ptr)])


@simulated
def test_a_step_waits_for_what_it_did_in_another_thread(cupy: Any) -> None:
    """Both work on the default stream of their thread: two streams with one handle."""
    net = RNN(3, 3, dtype=F8, rng=0)
    put(cupy, net)
    step, x = net.training_step(), cupy.asarray(np.ones((3, 2, 3)))

    def forward() -> None:
        with cupy.cuda.Stream(ptds=True):
            step.forward(x)

    for _ in range(2):
        forward()
        fake_cupy.state.waited.clear()
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        assert fake_cupy.state.waited[:1] == [(0, 2)]


@simulated
def test_few_launches_however_many_steps(launches: list[fake_cupy.Launch], cupy: Any) -> None:
    net = GRU(2, 3, 2, bidirectional=True, dtype=F8, rng=0)
    put(cupy, net)
    step = net.training_step()
    stream = cupy.cuda.Stream()
    with stream:
        output, _ = step.forward(cupy.asarray(np.ones((9, 3, 2))))
        waits = fake_cupy.state.waits
        step.backward(output)
        assert fake_cupy.state.waits == waits
    assert [launch.kernel for launch in launches] == ["run"] * 2 + ["back_sequence"] * 2
    assert {launch.stream for launch in launches} == {stream.ptr}
    assert {launch.blocks for launch in launches} == {6}


def check_filling(cupy: Any, net: Any, rng: np.random.Generator) -> None:
    """Compare results whatever stands in steps that a sample does not have."""
    x, state, _, above, carry = arguments_of(rng, net, 5, 4, F8)
    lengths = np.array([5, 0, 3, 1])
    filling = np.arange(5)[:, None] >= lengths
    x[filling] = above[filling] = 0
    expected = on_device(cupy, net, (x, state, lengths, above, carry))
    x[filling] = above[filling] = np.nan
    actual = on_device(cupy, net, (x, state, lengths, above, carry))
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_what_fills_up_shorter_sequences_is_not_read(cupy: Any, kind: str) -> None:
    rng = np.random.default_rng()
    net = KINDS[kind](3, 3, num_layers=2, bidirectional=True, dtype=F8, rng=rng)
    check_filling(cupy, net, rng)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 1e30, -1e30])
@pytest.mark.parametrize("kind", ["RNN", "relu", "GRU", "LSTM"])
def test_special_input_has_the_outputs_of_pytorch(cupy: Any, kind: str, special: float) -> None:
    options = {"nonlinearity": "relu"} if kind == "relu" else {}
    rng = np.random.default_rng(3)
    net = KINDS[kind](2, 3, dtype=F8, rng=rng, **options)
    x, state, _, above, carry = arguments_of(rng, net, 4, 3, F8)
    x[0, 0, 0] = x[2, 2, 1] = state[0, 1, 0] = special
    expected = autograd(net, x, state, None, above, carry, "float64")
    put(cupy, net)
    output, last = net.training_step().forward(cupy.asarray(x), cupy.asarray(state))
    np.testing.assert_allclose(output.get(), expected["output"], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(last.get(), expected["last"], rtol=1e-12, atol=1e-12)


def test_without_an_axis_of_samples_or_gradients(cupy: Any) -> None:
    net = GRU(3, 3, dtype=F8, rng=0)
    x, state, _, above, carry = arguments_of(np.random.default_rng(0), net, 4, 1, F8)
    batched = on_device(cupy, net, (x, state, None, above, np.zeros_like(carry)))
    step = net.training_step()
    output, last = step.forward(cupy.asarray(x[:, 0]), cupy.asarray(state[:, 0]))
    np.testing.assert_array_equal(output.get(), batched["output"][:, 0])
    np.testing.assert_array_equal(last.get(), batched["last"][:, 0])
    grads = step.backward(cupy.asarray(above[:, 0]), needs_input_grad=False)
    assert grads.input is None
    np.testing.assert_array_equal(grads.state.get(), batched["state"][:, 0])
    for name, grad in grads.params.items():
        np.testing.assert_array_equal(grad.get(), batched[name])


def test_what_is_mixed_is_refused(cupy: Any) -> None:
    x = np.zeros((3, 2, 3))
    net = RNN(3, 3, dtype=F8, rng=0)
    step = net.training_step()
    with pytest.raises(DeviceError, match="expected input and parameters in one place"):
        step.forward(cupy.asarray(x))
    put(cupy, net)
    with pytest.raises(DeviceError, match="expected input and parameters in one place"):
        step.forward(x)
    with pytest.raises(DeviceError, match="expected input and parameters in one place"):
        step.forward(cupy.asarray(x), np.zeros((1, 2, 3)))
    step.forward(cupy.asarray(x))
    with pytest.raises(DeviceError, match="grad_output is in host memory, x on device 0"):
        step.backward(np.zeros((3, 2, 3)))


def test_what_only_hosts_have_is_refused(cupy: Any) -> None:
    net, x = LSTM(1, 2, dtype=F4, rng=0), cupy.asarray(np.zeros((9, 1, 1), F4))
    put(cupy, net)
    options: list[dict[str, Any]] = [{"truncate": 2}, {"return_states": True}]
    for each in options:
        with pytest.raises(InputError, match=r"return_states is .*, and x is on a device"):
            net.training_step(**each).forward(x)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dtype", [F4, F8])
@pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)
def test_unrolled_cells(cupy: Any, name: str, dtype: Any, lead: tuple[int, ...]) -> None:
    run_as_compiled_if(dtype == F4)
    rng = np.random.default_rng(0)
    host, device = CELLS[name](dtype), CELLS[name](dtype)
    for param, array in host.params.items():
        setattr(host, param, rng.standard_normal(array.shape).astype(dtype))
        setattr(device, param, cupy.asarray(getattr(host, param)))
    x = rng.standard_normal((5, *lead, host.input_size)).astype(dtype)
    state = rng.standard_normal((*lead, host.state_size)).astype(dtype)
    for actual, expected in (
        (device.unroll(cupy.asarray(x)), host.unroll(x)),
        (device.unroll(cupy.asarray(x), cupy.asarray(state)), host.unroll(x, state)),
        (device.unroll(cupy.asarray(x[:0]), cupy.asarray(state)), state[None]),
    ):
        agree({"states": actual.get()}, {"states": expected}, dtype)


@simulated
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_modules_of_pytorch(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, launches: list[fake_cupy.Launch], kind: str
) -> None:
    """With arrays on the device in the place of tensors, which lie there with a GPU only."""

    def array(tensor: Any) -> Any:
        return None if tensor is None else cupy.asarray(tensor.detach().numpy())

    monkeypatch.setattr(op, "array_of", array)
    monkeypatch.setattr(op, "tensor_of", lambda array: torch.from_numpy(array.get()))
    monkeypatch.setattr(op, "_steps", OrderedDict())
    torch.manual_seed(0)
    theirs, ours = (
        getattr(module, kind)(3, 3, 2, bidirectional=True, dtype=torch.float64)
        for module in (torch.nn, sparsescan.torch)
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (theirs, ours):
        given = torch.nn.utils.rnn.pack_padded_sequence(x, [4, 1, 3], enforce_sorted=False)
        output = module(given)[0].data
        for _ in range(2):
            sources = [x, *module.parameters()]
            grads = torch.autograd.grad((output**2).sum(), sources, retain_graph=True)
            results.append(
                {str(k): grad.numpy() for k, grad in enumerate([output.detach(), *grads])}
            )
    assert {launch.kernel for launch in launches} == {"run", "back_sequence"}
    for each in results[2:]:
        agree(each, results[0], F8)


@simulated
def test_which_tensors_of_a_device_have_kernels(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def has(units: int, place: str, mode: str = "LSTM", dtype: Any = torch.float32) -> bool:
        there = types.SimpleNamespace(type=place)
        return op.has_kernels(mode, units, types.SimpleNamespace(device=there, dtype=dtype))

    assert has(9999, "cpu")
    assert not has(1, "mps")
    assert has(2048, "cuda")
    assert has(9999, "cuda", "RNN_RELU")
    assert not has(9999, "cuda", dtype=torch.float64)
    # Without CuPy PyTorch computes.
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not has(20, "cuda")
