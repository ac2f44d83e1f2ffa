"""Steps of a backward pass that have no gradient: to leave them out changes nothing."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles import assert_within, every_schedule, sequential
from plain_networks import plain_run
from recurrent_steps import array_in, autograd, gradients_of, memory_of
from sampling import examples, slow
from scipy.ndimage import maximum_filter1d
from some_cells import Faded

import sparsescan
from sparsescan import MemoryLimitError
from sparsescan.execution.calls import Calls, aligned_empty
from sparsescan.recurrent import (
    GRU,
    LSTM,
    RNN,
    GRUCell,
    LSTMCell,
    Recurrent,
    RNNCell,
    host,
    host_sizes,
    passes,
)
from sparsescan.recurrent import step as training_step
from sparsescan.recurrent.loops import sequences

torch = pytest.importorskip("torch")

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
    """Return a training step that keeps the gates of as few steps as it can."""
    with pytest.raises(MemoryLimitError) as error:
        net.training_step(memory_limit=0).forward(x)
    (least,) = re.findall(r"need .* \(([\d,]+) bytes\)", str(error.value))
    step = net.training_step(memory_limit=int(least.replace(",", "")))
    step.forward(x)
    assert not step.keeps_gates
    return step


def flags(step: Any, k: int = 0) -> Array:
    """Return which steps a direction has done, ``[group][step]``."""
    memory = memory_of(step)
    found = array_in(step, memory.has_grads[k])
    assert found.dtype == np.uint8
    return found.reshape(memory.padded, memory.segment)[:: memory.group]


@pytest.fixture(autouse=True)
def rooms_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the memory of passes hold NaN, as it may: it changes no step that is left out."""

    def room_of_nan(shape: Any, dtype: Any) -> Array:
        room = aligned_empty(shape, dtype)
        room.view(np.uint8)[...] = 255
        return room

    monkeypatch.setattr(passes, "aligned_empty", room_of_nan)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many threads share networks of any size."""

    def set_threads(count: int) -> None:
        for module in (host_sizes, passes):
            monkeypatch.setattr(module, "thread_count", lambda: count)

    monkeypatch.setattr(host_sizes, "_SMALL", 0)
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
    batch, steps = draw(st.integers(1, 16)), draw(st.integers(1, 200 if dtype == F4 else 300))
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
        monkeypatch.setattr(training_step, "_SEGMENT", draw(st.sampled_from([32, 64])))
        step = limited(net, x)
    given = x, state, lengths
    grads = filled(net, x, above, carry)
    expected = autograd(net, *given, *grads, "float64")
    assert_close(backward(step, *given, above, carry), expected, dtype, *grads)


@pytest.mark.parametrize("form", ["explicit", "implicit", "diagonal"])
@pytest.mark.parametrize("kind", [GRUCell, LSTMCell, RNNCell])
def test_every_schedule_comes_out_of_the_subnormal_range(kind: Any, form: str) -> None:
    """Chains of cells, whose gradient is subnormal between two steps that have their own."""
    rng = np.random.default_rng(2)
    cell = kind(3, 4, rng=rng, dtype=F4)
    cell.weight_hh = cell.weight_hh / 20
    bias = cell.bias_hh.copy()
    bias[4:8] -= 5
    cell.bias_hh = bias
    x = rng.standard_normal((150, 5, 3)).astype(F4)
    steps = cell.linearize(x, cell.unroll(x)[:-1])
    chain: Any = steps.jacobian()
    if form == "diagonal":
        factors = rng.uniform(0.05, 0.2, (150, 5, 4)).astype(F4)
        chain = sparsescan.CSRChain.from_pattern(factors, sparsescan.Pattern.diagonal(4))
    size = chain.shape[0]
    local: list[Any] = [None] * 150
    for k in (0, 70, 71, 140):
        # Of some samples, in the order of the scan.
        local[k] = np.where(rng.random((5, 1)) < 0.7, rng.standard_normal((5, size)), 0).astype(F4)
    grad = np.zeros((5, size), F4)
    expected = sequential(grad, chain, local, dtype=F4)
    size_of = np.array([np.abs(each).max() for each in expected.exact])
    assert ((size_of > 0) & (size_of < np.finfo(F4).tiny)).any()
    assert size_of[71] > 1e-3
    assert size_of[140] > 1e-3
    given = steps.implicit() if form == "implicit" else chain
    for schedule in ["auto", *every_schedule(150, chunks=(2, 5, 40))]:
        result = sparsescan.exclusive_scan(grad, given, local_grads=local, schedule=schedule)
        assert_within(list(result), expected, F4)


# -- What is not finite spreads --------------------------------------------------------------------

MOST = {F4: float(np.finfo(F4).max), F8: float(np.finfo(F8).max)}


def put(array: Array | None, place: Any, number: float) -> None:
    assert array is not None
    array[place] = number


def put_param(net: Any, name: str, place: Any, number: float) -> None:
    array = net.params[name].copy()
    array[place] = number
    setattr(net, name, array)


def overflow(net: Any, x: Array) -> None:
    """Let a product of the last gate with the state overflow, and no state."""
    most = MOST[x.dtype]
    put_param(net, "bias_hh_l0", -1, most)
    put_param(net, "weight_hh_l0", (-1, 0), most)


# What is put into a network, its inputs, states, and the gradients in both results. The steps from
# the 5th on have no gradient when that goes back, but for one of the last. Sample 1 has it.
SPECIAL: dict[str, Callable[..., None]] = {
    "input": lambda net, x, state, above, carry, bad: put(x, (5, 1, 0), bad),
    "input of the last step": lambda net, x, state, above, carry, bad: put(x, (-1, 1, 0), bad),
    "first state": lambda net, x, state, above, carry, bad: put(state, (0, 1, 0), bad),
    "first cell state": lambda net, x, state, above, carry, bad: put(state, (0, 1, -1), bad),
    "gradient": lambda net, x, state, above, carry, bad: put(above, (5, 1, 0), bad),
    "last gradient": lambda net, x, state, above, carry, bad: put(carry, (0, 1, 0), bad),
    "weight of inputs": lambda net, x, *rest: put_param(net, "weight_ih_l0", (-1, 0), rest[-1]),
    "weight of states": lambda net, x, *rest: put_param(net, "weight_hh_l0", (-1, 0), rest[-1]),
    "bias": lambda net, x, *rest: put_param(net, "bias_ih_l0", 0, rest[-1]),
    "bias of states": lambda net, x, *rest: put_param(net, "bias_hh_l0", -1, rest[-1]),
}


def put_state(net: Any, state: Array, place: int) -> None:
    """Let a product with a state overflow."""
    state[0, 1, place] = MOST[state.dtype]
    put_param(net, "weight_hh_l0", (-1, [0, -1]), 8)


# Numbers whose products overflow.
HUGE: dict[str, Callable[..., None]] = {
    "huge bias": lambda net, x, *rest: overflow(net, x),
    "huge input": lambda net, x, *rest: put(x, (5, 1), MOST[x.dtype]),
    "huge state": lambda net, x, state, *rest: put_state(net, state, 0),
    "huge cell state": lambda net, x, state, *rest: put_state(net, state, -1),
}


def arguments(
    rng: np.random.Generator, net: Any, steps: int, batch: int, dtype: Any
) -> tuple[Array, Array, Array, Array]:
    """Return random inputs and states, and gradients in the last outputs and no last states."""
    both = 1 + net.bidirectional
    states = net.num_layers * both, batch, net.state_size
    x = rng.standard_normal((steps, batch, net.input_size)).astype(dtype)
    above = gradients_in(rng, (steps, batch, net.hidden_size * both), dtype, "last")
    assert above is not None
    return x, rng.standard_normal(states).astype(dtype), above, np.zeros(states, dtype)


def assert_spread(actual: dict[str, Array], expected: dict[str, Array], infinite: bool) -> None:
    """NaN are where they are expected, and what is finite is close.

    Gradients that are infinite may become NaN one operation sooner or later.
    """
    for name, array in expected.items():
        finite = np.isfinite(array)
        np.testing.assert_array_equal(np.isfinite(actual[name]), finite, err_msg=name)
        if not infinite:
            np.testing.assert_array_equal(np.isnan(actual[name]), np.isnan(array), err_msg=name)
        scale = np.max(np.abs(array[finite]), initial=1e-30)
        error = np.abs(actual[name][finite] - array[finite])
        assert np.max(error, initial=0) <= 1e4 * np.finfo(array.dtype).eps * scale, name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", SPECIAL | HUGE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "batch", "units", "layers"), [(F4, 3, 6, 1), (F4, 28, 9, 1), *slow((F8, 20, 8, 2))]
)
def test_what_is_not_finite_spreads_as_in_pytorch(
    kind: str, where: str, bad: float, dtype: Any, batch: int, units: int, layers: int
) -> None:
    """Also through steps that have no gradient but 0 times that."""
    rng = np.random.default_rng(5)
    net = network(rng, kind, 2, units, dtype, layers=layers, both=layers > 1)
    steps = 60 if dtype == F4 else 270  # more than a segment
    x, state, above, carry = arguments(rng, net, steps, batch, dtype)
    (SPECIAL | HUGE)[where](net, x, state, above, carry, bad)
    with np.errstate(all="ignore"):
        expected = autograd(net, x, state, None, above, carry, str(dtype))
    # Gates of infinite biases are 0 and 1, so that all may be finite.
    if where in SPECIAL and ("bias" not in where or np.isnan(bad)):
        assert not all(np.isfinite(array).all() for array in expected.values())
    for step in (net.training_step(), *([limited(net, x)] if layers > 1 else [])):
        actual = backward(step, x, state, None, above, carry)
        assert_spread(actual, expected, bool(np.isinf(bad)) and "gradient" in where)


# -- Threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False], ids=["gates kept", "gates again"])
@pytest.mark.parametrize(
    ("kind", "batch", "units", "density"),
    [
        ("GRU", 7, 12, None),
        ("LSTM", 28, 9, None),
        ("RNN", 28, 20, None),
        *slow(
            ("LSTM", 11, 13, None), ("GRU", 37, 8, None), ("GRU", 20, 9, 0.1), ("RNN", 6, 7, None)
        ),
    ],
)
def test_any_number_of_threads_gives_the_same_bits(
    kind: str, batch: int, units: int, density: float | None, keeps: bool, many_threads: Any
) -> None:
    """Also where one sample of a group has a gradient, and the others of it have none."""
    rng = np.random.default_rng(8)
    about = {"layers": 2, "both": True, "densities": (density, density)}
    net = network(rng, kind, 3, units, F4, **about)
    x, state, _, carry = arguments(rng, net, 300, batch, F4)
    above = gradients_in(rng, (300, batch, 2 * units), F4, "points")
    carry[:, batch // 2, 0] = 1
    carry[:, 0, 0] = -0.0
    lengths = rng.integers(1, 301, batch)
    results, done = [], []
    for count in (1, 2, 3):
        many_threads(count)
        step = net.training_step() if keeps else limited(net, x)
        results.append(backward(step, x, state, lengths, above, carry))
        assert memory_of(step).threads == count
        done.append(flags(step).mean())
    assert min(done) < 1
    for other in results[1:]:
        for name, array in results[0].items():
            assert array.tobytes() == other[name].tobytes(), name
    assert not np.signbit(results[0]["state"][results[0]["state"] == 0]).any()
    assert not np.signbit(results[0]["input"][results[0]["input"] == 0]).any()


# -- How much is left out --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [3, 28])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_a_gradient_are_left_out(kind: str, both: bool, batch: int) -> None:
    """Those before the 250 last ones, with weights as they are at first; and none of others."""
    rng = np.random.default_rng(10)
    net = KINDS[kind](4, 20, dtype=F4, bidirectional=both, rng=rng)
    x, state, above, carry = arguments(rng, net, 1000, batch, F4)
    step = net.training_step()
    actual = backward(step, x, state, None, above, carry)
    for k in range(1 + both):
        done = flags(step, k)
        if k == 0:
            assert done[:, -1].all()
            assert not done[:, :-250].any()
        else:
            # The last step in time is the first that the other direction has run.
            assert done[:, :-1].sum() == 0
            assert done[:, -1].all()
    left = actual["input"][:-250]
    assert left.tobytes() == np.zeros_like(left).tobytes()
    assert actual["input"][-1].all()
    assert not actual["state"][0].any()
    above[:] = rng.standard_normal(above.shape)
    backward(step, x, state, None, above, carry)
    for k in range(1 + both):
        assert flags(step, k).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_gradient_nothing_is_done(kind: str) -> None:
    net = KINDS[kind](4, 20, 2, dtype=F4, bidirectional=True, rng=0)
    x, state, above, carry = arguments(np.random.default_rng(0), net, 50, 28, F4)
    for grads in ((None, None), (above * 0, None), (None, carry), (-0.0 * above, carry)):
        step = net.training_step()
        actual = backward(step, x, state, None, *grads)
        assert not any(flags(step, k).any() for k in range(4))
        for name in ("input", "state", *net.params):
            assert actual[name].tobytes() == np.zeros_like(actual[name]).tobytes()


@pytest.mark.parametrize("batch", [3, 28])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_gates_are_not_computed_again_for_nothing(
    kind: str, batch: int, many_threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are not kept, those of steps before the last that has a gradient are."""
    net = KINDS[kind](4, 20, dtype=F4, rng=0)
    x, state, above, carry = arguments(np.random.default_rng(0), net, 1000, batch, F4)
    above[:] = 0
    above[300] = 1
    many_threads(1)
    directions = passes.directions_of(net, F4, passes.rows_of_lanes(net, F4, batch))
    memory = host.HostMemory(net, directions, host_sizes.Extent(1000, batch, 256), Calls())
    memory.allocate()
    memory.forward([list(net.params.values())], x, state, None)
    steps, find = [], sequences.find_ends

    def find_ends(s: Any, *about: Any) -> None:
        find(s, *about)
        ends, begin = about[3], about[4]
        steps.append(max(ends[first] for first in range(s.first, s.first + s.count, s.samples)))
        steps[-1] -= begin

    monkeypatch.setattr(host.kernels, "find_ends", find_ends)
    memory.backward(above, carry, needs_input_grad=True)
    # Segments of 256 steps, the last one first.
    assert steps == [0, 0, 45, 256]


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_in_outputs_takes_no_array(kind: str) -> None:
    """Neither in the first call, nor in later ones."""
    steps, batch, units = 400, 16, 64
    net = KINDS[kind](2, units, rng=0)
    step, x = net.training_step(), np.ones((steps, batch, 2), np.float32)
    zeros = np.zeros((steps, batch, units), np.float32)
    last = np.ones((1, batch, net.state_size), np.float32)
    peaks = []
    for _ in range(12):
        step.forward(x)
        tracemalloc.start()
        step.backward(None, last, needs_input_grad=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The first call, and the first that is recorded, may compile.
    assert sorted(peaks)[-3] < zeros.nbytes / 2, peaks


def test_the_door_of_pytorch_passes_on_that_there_is_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = pytest.importorskip("sparsescan.torch")
    prepared = pytest.importorskip("sparsescan.torch.calls.prepared")
    given: list[tuple[bool, ...]] = []
    backward = prepared.Prepared.backward

    def watched(self: Any, room: Any, above: Any, carry: Any, needs_x: bool) -> Any:
        given.append((above is None, carry == (None,)))
        return backward(self, room, above, carry, needs_x)

    monkeypatch.setattr(prepared.Prepared, "backward", watched)
    net = door.GRU(3, 5)
    net(torch.randn(6, 2, 3))[1].sum().backward()
    net(torch.randn(6, 2, 3))[0][-1].sum().backward()
    assert given == [(True, False), (False, True)]


@pytest.mark.parametrize(("batch", "units"), [(16, 4), (16, 5), (3, 5)])
def test_further_inputs_of_steps_that_are_left_out(batch: int, units: int) -> None:
    """Their gradients are zeros, whatever was there before, and NaN behind a NaN."""
    rng = np.random.default_rng(0)
    net = Recurrent(Faded, 2, units, 2, dtype=np.float64, rng=rng)
    x = rng.standard_normal((400, batch, 2))
    further = {f"drive_l{k}": rng.standard_normal((400, batch, units)) for k in (0, 1)}
    step = net.training_step()
    for bad in (1.0, np.nan):
        further["drive_l0"][100, 0, 1] = bad
        for above in (np.full((400, batch, units), 1e3), np.eye(400, 1, -399)[:, :, None]):
            step.forward(x, **further)
            found = step.backward(np.broadcast_to(above, (400, batch, units)))
        assert found.further is not None
        assert found.input is not None
        grads = {"x": found.input, **found.further}
        arrays = {"x": x, **net.params, **further}
        leaves = {key: torch.tensor(each) for key, each in arrays.items()}
        own = {key: each for key, each in leaves.items() if key != "x"}
        for name in grads:
            leaves[name].requires_grad_()
        begin = torch.zeros(2, batch, units, dtype=torch.float64)
        outputs, _ = plain_run(Faded, own, leaves["x"], begin, torch.full((batch,), 400))
        expected = torch.autograd.grad(outputs[0][-1].sum(), [leaves[name] for name in grads])
        for name, each in zip(grads, expected, strict=True):
            np.testing.assert_allclose(grads[name], each.numpy(), 1e-9, 1e-12)
            assert (grads[name][120:250, 1:] == 0).all()
