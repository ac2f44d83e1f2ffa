"""Steps of a backward pass that have no gradient: left out where that changes nothing, beside
PyTorch's autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles import assert_within, every_schedule, sequential
from recurrent_steps import autograd, gradients_of, kept
from sampling import examples, slow
from scipy.ndimage import maximum_filter1d

import sparsescan
from sparsescan.execution.calls import Calls
from sparsescan.jacobians import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell, _recurrent_step
from sparsescan.jacobians._kernels import sequences

Array = NDArray[Any]
KINDS: dict[str, Any] = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)
GATES = {"RNN": 1, "relu": 1, "GRU": 3, "LSTM": 4}


def decaying(net: Any) -> Any:
    """Let gradients decay within 40 steps in float32, and 300 in float64."""
    units = net.hidden_size
    for name, array in net.params.items():
        changed = array / 20 if name.startswith("weight_hh") else array.copy()
        if name.startswith("bias_hh") and len(array) > units:
            # Of the gates with which a GRU and an LSTM keep the state.
            changed[units : 2 * units] -= 5
        setattr(net, name, changed)
    return net


def network(
    rng: np.random.Generator,
    kind: str,
    inputs: int,
    units: int,
    dtype: Any,
    *,
    layers: int = 1,
    both: bool = False,
    densities: Sequence[float | None] = (None, None),
    bias: bool = True,
) -> Any:
    """Return a network whose gradients decay, in which so much of the weights is kept."""
    widths = {"weight_hh_l0": units, "weight_ih_l0": inputs}
    if layers > 1:
        widths = {"weight_hh_l0": units, "weight_ih_l1": units * (1 + both)}
    masks = {
        name: rng.random((GATES[kind] * units, width)) < density
        for (name, width), density in zip(widths.items(), densities, strict=True)
        if density is not None
    }
    options = {"nonlinearity": "relu"} if kind == "relu" else {}
    net = KINDS.get(kind, RNN)(
        *(inputs, units, layers, bias),
        **options,
        bidirectional=both,
        masks=masks,
        dtype=dtype,
        rng=rng,
    )
    return decaying(net)


def gradients_in(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, how: str
) -> Array | None:
    """Return gradients in outputs, ``[step][sample][unit]``, that are mostly 0."""
    steps, batch, _ = shape
    if how == "none":
        return None
    grads = rng.standard_normal(shape)
    has = np.zeros((steps, batch), bool)
    if how == "last":
        has[-1] = True
    elif how == "points":
        # Each sample has its own steps, and some have none.
        for _ in range(int(rng.integers(1, 5))):
            has[rng.integers(steps), rng.integers(batch)] = True
    elif how == "bursts":
        for _ in range(2):
            begin = int(rng.integers(steps))
            has[begin : begin + int(rng.integers(1, 9)), rng.random(batch) < 0.7] = True
    elif how == "subnormal":
        # Which count as 0.
        has[rng.integers(steps)] = True
        grads *= float(np.finfo(dtype).tiny) / 100
    elif how == "dense":
        has[:] = True
    grads[~has] = 0
    if how == "units":
        # A direction of a layer has its own units.
        grads[int(rng.integers(steps)), :, int(rng.integers(shape[2]))] = 1
    return grads.astype(dtype)


def gradients_in_states(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, how: str
) -> Array | None:
    """Return gradients in last states, ``[direction][sample][unit]``."""
    if how == "none":
        return None
    grads = rng.standard_normal(shape)
    if how == "zeros":
        grads[:] = 0
    elif how == "sample":
        grads[:, np.arange(shape[1]) != rng.integers(shape[1])] = 0
    elif how == "c":
        grads[:, :, : shape[2] // 2] = 0
    return grads.astype(dtype)


ABOVE = "none", "zeros", "last", "points", "bursts", "subnormal", "dense", "units"
CARRY = "none", "zeros", "dense", "sample", "c"


def backward(
    step: Any, x: Array, state: Array, lengths: Any, above: Array | None, carry: Array | None
) -> dict[str, Array]:
    """Return all results of a training step; gradients may be left out."""
    results = gradients_of(step, x, state, lengths, above, carry)
    assert all(array is not None for array in results.values())
    return results


def filled(net: Any, x: Array, above: Array | None, carry: Array | None) -> tuple[Array, Array]:
    """Return gradients in both results, zeros where there are none."""
    both = 1 + net.bidirectional
    above = np.zeros((*x.shape[:2], net.hidden_size * both), x.dtype) if above is None else above
    states = net.num_layers * both, x.shape[1], net.state_size
    return above, np.zeros(states, x.dtype) if carry is None else carry


def assert_close(
    actual: dict[str, Array], expected: dict[str, Array], dtype: Any, *given: Array
) -> None:
    """All are close, and in float64 small ones in inputs, too, beside those of five steps.

    Gradients that are small since what they are made of cancels have the errors of these: of the
    ones that were given.
    """
    least = 1e-3 * max((float(np.max(np.abs(each))) for each in given), default=0.0)
    eps, tiny = (float(getattr(np.finfo(dtype), name)) for name in ("eps", "tiny"))
    for name, exact in expected.items():
        assert actual[name].dtype == dtype
        error = np.abs(actual[name] - exact)
        scale = np.max(np.abs(exact), initial=least)
        assert (error <= 1e4 * (eps * scale + tiny)).all(), name
        if name == "input" and dtype == F8:
            near = np.max(np.abs(exact), axis=-1, keepdims=True)
            near = maximum_filter1d(near, 5, axis=0, mode="constant")
            assert (error <= 1e-3 * near + 1e4 * tiny).all(), name


def limited(net: Any, x: Array) -> Any:
    """Return a training step that does not keep the gates of all steps."""
    step = net.training_step()
    step.forward(x)
    step = net.training_step(memory_limit=step.nbytes - 1)
    step.forward(x)
    assert not step.keeps_gates
    return step


def flags(step: Any, k: int = 0) -> Array:
    """Return which steps a direction has done, ``[group][step]``."""
    memory = step._memory
    assert memory.has_grads[k].dtype == np.uint8
    return np.asarray(memory.has_grads[k].reshape(memory.padded, memory.segment)[:: memory.group])


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many threads share networks of any size."""

    def set_threads(count: int) -> None:
        monkeypatch.setattr(_recurrent_step, "thread_count", lambda: count)

    monkeypatch.setattr(_recurrent_step, "_SMALL", 0)
    return set_threads


# -- What is left out changes nothing --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@settings(max_examples=examples(240))
@given(data=st.data())
def test_gradients_are_those_of_autograd(
    dtype: Any, data: Any, many_threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients that become subnormal, then 0, and numbers again at other steps."""
    draw = data.draw
    # A unit whose input is 0 but for rounding would be on in one of both.
    kind = draw(st.sampled_from([*KINDS] if dtype == F4 else [*GATES]))
    units = draw(st.one_of(st.integers(1, 9), st.integers(10, 40)))
    inputs, layers = draw(st.integers(1, 7)), draw(st.integers(1, 2))
    both, bias = draw(st.booleans()), draw(st.booleans())
    batch, steps = draw(st.integers(1, 20)), draw(st.integers(1, 200 if dtype == F4 else 300))
    density = st.sampled_from([None, None, 0.9, 0.1])
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    net = network(
        *(rng, kind, inputs, units, dtype),
        layers=layers,
        both=both,
        densities=(draw(density), draw(density)),
        bias=bias,
    )
    x = rng.standard_normal((steps, batch, inputs)).astype(dtype)
    states = layers * (1 + both), batch, net.state_size
    state = rng.standard_normal(states).astype(dtype)
    lengths = rng.integers(1, steps + 1, batch) if draw(st.booleans()) else None
    outputs = steps, batch, units * (1 + both)
    above = gradients_in(rng, outputs, dtype, draw(st.sampled_from(ABOVE)))
    carry = gradients_in_states(rng, states, dtype, draw(st.sampled_from(CARRY)))
    many_threads(draw(st.integers(1, 3)))
    step = net.training_step()
    if steps > 128 and draw(st.booleans()):
        monkeypatch.setattr(_recurrent_step, "_SEGMENT", draw(st.sampled_from([32, 64])))
        step = limited(net, x)
    given = x, state, lengths
    grads = filled(net, x, above, carry)
    expected = autograd(net, *given, *grads, "float64")
    assert_close(backward(step, *given, above, carry), expected, dtype, *grads)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("dtype", [F4, *slow(F8)], ids=str)
def test_no_small_gradient_is_left_out(kind: str, batch: int, dtype: Any) -> None:
    """Loss and gradients have one scale: what is subnormal at one is not at another."""
    rng = np.random.default_rng(1)
    net = network(rng, kind, 3, 10, dtype)
    steps, power = (60, 90) if dtype == F4 else (400, 900)
    x = rng.standard_normal((steps, batch, 3)).astype(dtype)
    state = rng.standard_normal((1, batch, net.state_size)).astype(dtype)
    above = gradients_in(rng, (steps, batch, 10), dtype, "last")
    assert above is not None
    step = net.training_step()
    _, carry = filled(net, x, above, None)
    actual = backward(step, x, state, None, above, carry)["input"]
    done = int(flags(step).sum())
    scaled = backward(step, x, state, None, np.ldexp(above, power), carry)["input"]
    # The scaled ones live longer, and none of them is subnormal where the others end.
    assert done < flags(step).sum() < flags(step).size
    exact = np.ldexp(scaled.astype(np.longdouble), -power)
    tiny, eps = (float(getattr(np.finfo(dtype), name)) for name in ("tiny", "eps"))
    count = int((np.abs(exact).max((1, 2)) > 1e6 * tiny).sum())
    assert 0 < count <= done
    assert (np.abs(actual - exact) <= 8 * eps * np.abs(exact) + 1e4 * tiny).all()
