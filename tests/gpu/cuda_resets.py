"""States that begin anew in the middle, on a CUDA device, beside autograd of each episode."""

from __future__ import annotations

from typing import Any

import fake_cupy
import numpy as np
import pytest
from cuda_cells import CELLS, HELD, ROUNDS, STREAMED, network, run_in_python_or_if
from cuda_recurrent import agree, on_device, put, simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from network_oracle import autograd_of
from on_device import IN_PYTHON, cupy_or_stand_in
from recurrent_steps import arguments_of, networks
from sampling import examples

from sparsescan.errors import DeviceError, InputError, InputTypeError
from sparsescan.recurrent import GRU, LSTM, RNN
from sparsescan.recurrent import device as recurrent_device

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


def flags_of(rng: np.random.Generator, x: Any) -> Any:
    return rng.random(x.shape[:2]) < rng.choice([0.2, 0.5, 1.0], p=[0.5, 0.4, 0.1])


def anew_of(rng: np.random.Generator, state: Any) -> list[Any]:
    """Return the states that resets set, or nothing in one of two."""
    return [rng.standard_normal(state.shape)] * int(rng.integers(2))


@settings(max_examples=examples(40) if IN_PYTHON else 1)
@given(
    networks(units=7, inputs=5, layers=2),
    *(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 1 << 30)),
)
def test_episodes_are_sequences_of_their_own(
    net: Any, steps: int, batch: int, shorter: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arguments = arguments_of(rng, net, steps, batch, F8, shorter)
    resets = flags_of(rng, arguments[0])
    anew = anew_of(rng, arguments[1])
    expected = autograd_of(net, *arguments, resets, *anew)
    with pytest.MonkeyPatch.context() as patch:
        given_arrays = *arguments, resets, *anew
        agree(on_device(cupy_or_stand_in(patch), net, given_arrays), dict(expected), F8)


@pytest.mark.parametrize("samples", [0, 1, 2, 4])
@pytest.mark.parametrize("units", [HELD, STREAMED, ROUNDS])
@pytest.mark.parametrize("name", CELLS)
def test_any_cell(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str, units: int, samples: int
) -> None:
    """Of one stage and of several, with several units for a thread and samples for a block."""
    run_in_python_or_if(
        (name, units, samples) in (("MGU", HELD, 0), ("SCRN", STREAMED, 2), ("Diagonal", HELD, 1))
    )
    rng = np.random.default_rng(units)
    net = network(name, units, F8, rng, bidirectional=units == HELD)
    arguments = arguments_of(rng, net, 5, 5 if samples else 3, F8, shorter=True)
    resets = flags_of(rng, arguments[0])
    if samples:
        monkeypatch.setattr(recurrent_device, "samples_of", lambda *about: samples)
    anew = anew_of(rng, arguments[1])
    expected = autograd_of(net, *arguments, resets, *anew)
    agree(on_device(cupy, net, (*arguments, cupy.asarray(resets), *anew)), dict(expected), F8)


@pytest.mark.parametrize("kind", [RNN, GRU, LSTM])
def test_with_and_without_by_turns(cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """In one memory, or two if the first has no room; and with gates that are computed again."""
    run_in_python_or_if(kind is GRU)
    monkeypatch.setattr("sparsescan.recurrent.step._SEGMENT", 3)
    rng = np.random.default_rng(0)
    net = kind(2, 3, 2, bidirectional=True, dtype=F8, rng=0)
    host = kind(2, 3, 2, bidirectional=True, dtype=F8, rng=0)
    put(cupy, net)
    step, expected = net.training_step(), []
    for has in (False, True, False, True):
        arguments = arguments_of(rng, net, 7, 2, F8, shorter=True)
        resets = [flags_of(rng, arguments[0]), *anew_of(rng, arguments[1])] if has else []
        expected.append((arguments, resets, autograd_of(host, *arguments, *resets)))
        agree(on_device(cupy, net, (*arguments, *resets), step), dict(expected[-1][2]), F8)
        nbytes = step.nbytes
    smaller = net.training_step(memory_limit=nbytes - 1)
    for arguments, resets, results in expected:
        agree(on_device(cupy, net, (*arguments, *resets), smaller), dict(results), F8)
    assert not smaller.keeps_gates


@simulated
def test_memory_is_what_is_said(cupy: Any) -> None:
    net = GRU(12, 3, 2, dtype=F8, rng=0)
    put(cupy, net)
    step, x = net.training_step(), cupy.asarray(np.zeros((90, 4, 12)))
    resets = np.ones((90, 4), bool)
    before = fake_cupy.state.used[0]
    step.forward(x, resets=resets)
    taken = fake_cupy.state.used[0] - before
    weights = [array for each in step._memory._packed for array in (*each.w_in, *each[1:])]
    orders = [order.on(cupy) for one in step._directions for order in one._orders]
    beside = sum(array.nbytes for array in (*weights, *orders))
    assert step.nbytes + beside <= taken <= step.nbytes + beside + 512 * 28


def test_an_episode_does_not_see_another(cupy: Any) -> None:
    rng = np.random.default_rng(1)
    net = GRU(3, 3, 2, bidirectional=True, dtype=F8, rng=0)
    x, state, _, above, carry = arguments_of(rng, net, 6, 3, F8)
    resets = np.zeros((6, 3), bool)
    resets[[2, 4]] = True
    expected = on_device(cupy, net, (x, state, None, above, carry, resets))
    x[3, 1, 0] = np.nan
    actual = on_device(cupy, net, (x, state, None, above, carry, resets))
    assert np.isnan(actual["output"][2:4, 1]).any()
    for name in ("output", "input"):
        for some in (slice(0, 2), slice(4, 6)):
            np.testing.assert_array_equal(actual[name][some], expected[name][some])
    np.testing.assert_array_equal(actual["last"], expected["last"])
    np.testing.assert_array_equal(actual["state"], expected["state"])


def test_what_is_wrong_is_said(cupy: Any) -> None:
    x, net = np.zeros((3, 2, 3), F4), RNN(3, 4, rng=0)
    flags = cupy.asarray(np.zeros((3, 2), bool))
    with pytest.raises(DeviceError, match="resets is on device 0, x in host memory"):
        net.training_step().forward(x, resets=flags)
    put(cupy, net)
    step, x = net.training_step(), cupy.asarray(x)
    with pytest.raises(InputTypeError, match="resets has dtype int64; expected bool"):
        step.forward(x, resets=flags.astype(np.int64))
    with pytest.raises(InputError, match=r"resets has shape \(2, 2\); expected \(3, 2\)"):
        step.forward(x, resets=flags[:2])
    with pytest.raises(DeviceError, match="some arrays are CuPy's and some NumPy's"):
        step.forward(x, resets=flags, reset_states=np.zeros((1, 2, 4), F4))
