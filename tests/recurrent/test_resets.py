"""States that begin anew in the middle, beside autograd of episodes that are apart."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from network_oracle import autograd_of
from numpy.typing import NDArray
from random_cells import RandomCell, random_cells
from sampling import examples, long_run, slow
from some_cells import CELLS, Elementwise, Leaky

from sparsescan.errors import InputError, InputTypeError, MemoryLimitError
from sparsescan.kernels.cpu.lanes import lanes, sample_lanes
from sparsescan.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, Recurrent, RNNCell
from sparsescan.recurrent import step as step_module
from sparsescan.recurrent.loops.pauses import NEVER

Array = NDArray[Any]
F4, F8 = np.dtype(np.float32), np.dtype(np.float64)
KINDS = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
ANY = [RNNCell, GRUCell, LSTMCell, *CELLS.values()]
READ_UNITS = (Leaky, Elementwise)
seeds = st.integers(0, 2**32 - 1)


def results_of(step: Any, given: tuple[Any, ...], grads: tuple[Any, ...]) -> dict[str, Array]:
    """Return all results of both passes."""
    output, last = step.forward(*given)
    found = step.backward(*grads)
    own = {"output": output, "last": last, "input": found.input, "state": found.state}
    if found.reset_states is not None:
        own["reset_states"] = found.reset_states
    return own | found.params


def made(rng: np.random.Generator, cell: Any = None, dtype: Any = F8) -> Any:
    """Return a network of any cells, directions and layers, some of whose weights are pruned."""
    cell = ANY[rng.integers(len(ANY))] if cell is None else cell
    inputs, units, layers = (int(rng.integers(1, most)) for most in (6, 20, 4))
    both = bool(rng.integers(2))
    if cell in READ_UNITS:
        inputs, layers, both = units, 1, both
    about = inputs, units, layers, bool(rng.integers(2))
    shapes = {k: v.shape for k, v in Recurrent(cell, *about).params.items() if v.ndim == 2}
    masks = {}
    if "weight_hh_l0" in shapes and rng.integers(3) == 0:
        masks["weight_hh_l0"] = rng.random(shapes["weight_hh_l0"]) < rng.choice([0.1, 0.8])
    return Recurrent(cell, *about, bidirectional=both, masks=masks, dtype=dtype, rng=rng)


def arguments_of(rng: np.random.Generator, net: Any, steps: int, batch: int, dtype: Any) -> Any:
    """Return what both passes take, the resets last."""
    directions = len(net.cells) * len(net.cells[0])
    states = directions, batch, net.state_size
    width = len(net.cells[0]) * net.cells[0][0].hidden_size
    shapes = (steps, batch, net.input_size), states, (steps, batch, width), states
    x, state, above, carry = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    lengths = rng.integers(0, steps + 1, batch) if rng.integers(2) else None
    if rng.integers(2):
        above[rng.random(steps) < 0.8] = 0
    resets = rng.random((steps, batch)) < rng.choice([0.05, 0.3, 1.0])
    return (x, state, lengths, resets), (above, carry)


def with_states(rng: np.random.Generator, given: Any) -> Any:
    """Return the arguments of a forward pass with states that resets set, or none in one of two."""
    state = given[1]
    anew = rng.standard_normal(state.shape).astype(state.dtype)
    return *given, anew if given[3] is not None and rng.integers(2) else None


def close(actual: dict[str, Array], expected: dict[str, Array], dtype: Any) -> None:
    for name, array in expected.items():
        scale = np.max(np.abs(array), initial=1)
        bound = 1e4 * float(np.finfo(dtype).eps) * scale
        assert np.max(np.abs(actual[name] - array), initial=0) <= bound, name
        assert actual[name].dtype == dtype


def rows_for(rng: np.random.Generator, net: Any, dtype: Any) -> int:
    """Return whether lanes are units, or how many rows' samples, if they may be."""
    if any(mask is not None for row in net.cells for one in row for mask in one.masks.values()):
        return 1
    rows = [0, 1]
    if net.cells[0][0].hidden_size % 2 == 0 and sample_lanes(dtype) != lanes(dtype):
        rows.append(2)
    return int(rng.choice(rows))


@pytest.mark.parametrize("dtype", [F8, *slow(F4)], ids=str)
@settings(max_examples=examples(60))
@given(seeds)
def test_episodes_are_sequences_of_their_own(dtype: Any, seed: int) -> None:
    """In calls with and without resets by turns, and with less memory.

    They begin with zeros, or with states that are given and have gradients.
    """
    rng = np.random.default_rng(seed)
    net = made(rng, dtype=dtype)
    steps, batch = int(rng.integers(1, 40)), int(rng.choice([1, 2, 5, 16, 17, 33]))
    rows, segment, is_less = rows_for(rng, net, dtype), int(rng.integers(1, 9)), rng.integers(3)
    with (
        patch.object(step_module, "rows_of_lanes", lambda *_: rows),
        patch.object(step_module, "_SEGMENT", segment),
    ):
        step = net.training_step()
        if is_less == 0:
            given, grads = arguments_of(rng, net, steps, batch, dtype)
            results_of(step, given, grads)
            smaller = net.training_step(memory_limit=step.nbytes - 1)
            with suppress(MemoryLimitError):  # some keep nothing of their gates
                smaller.forward(*given)
                step = smaller
        for call in range(4):
            given, grads = arguments_of(rng, net, steps, batch, dtype)
            if call == rng.integers(8):
                given = *given[:3], None
            given = with_states(rng, given)
            before = [None if each is None else each.copy() for each in (*given, *grads)]
            actual = results_of(step, given, grads)
            for array, old in zip((*given, *grads), before, strict=True):
                assert array is None or np.array_equal(array, old)
            if call in (0, 3):
                expected = autograd_of(net, *given[:3], *grads, *given[3:])
                assume(expected.nearest > 1e-5)
                close(actual, dict(expected), dtype)


# Smaller examples would be compiled, too.
@settings(max_examples=long_run(10, 2), phases=[Phase.generate])
@given(random_cells(size=4), seeds, st.booleans())
def test_random_cells(drawn: RandomCell, seed: int, both: bool) -> None:
    rng = np.random.default_rng(seed)
    net = Recurrent(
        *(drawn.cls, drawn.input_size, drawn.hidden_size, 1, drawn.bias),
        bidirectional=both,
        rng=rng,
        dtype=F8,
        **drawn.options,
    )
    for rows in (0, 1):
        given, grads = arguments_of(rng, net, 7, 5, F8)
        given = with_states(rng, given)
        expected = autograd_of(net, *given[:3], *grads, *given[3:])
        largest = max(float(np.abs(each).max(initial=0)) for each in expected.values())
        assume(expected.nearest > 1e-7 and largest < 1e6)
        with patch.object(step_module, "rows_of_lanes", lambda *_, rows=rows: rows):
            actual = results_of(net.training_step(), given, grads)
        for name, array in expected.items():
            assert np.abs(actual[name] - array).max(initial=0) <= 1e-9 * max(1, largest), name


@pytest.mark.parametrize("kind", KINDS)
def test_no_reset_changes_no_bit(kind: str) -> None:
    """Nor are results other ones in memory that has just run with resets."""
    net = KINDS[kind](3, 6, 2, bidirectional=True, dtype=F4, rng=0)
    rng = np.random.default_rng()
    (x, state, _, resets), grads = arguments_of(rng, net, 20, 14, F4)
    step = net.training_step()
    expected = results_of(step, (x, state), grads)
    none = np.zeros_like(resets)
    for flags in (none, resets, none, resets, None, *[none, None] * 9):
        actual = results_of(step, (x, state, None, flags), grads)
        if flags is not resets:
            for name, array in expected.items():
                np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(
    kind: str, with_threads: Callable[[int], None]
) -> None:
    net = KINDS[kind](7, 33, 2, bidirectional=True, dtype=F4, rng=0)
    given, grads = arguments_of(np.random.default_rng(0), net, 200, 40, F4)
    results = []
    for count in (1, 2, 5):
        with_threads(count)
        results.append(results_of(net.training_step(), given, grads))
    for other in results[1:]:
        for name, array in results[0].items():
            assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("batch", [3, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_does_not_see_another(kind: str, batch: int) -> None:
    """NaN and infinite numbers stay in theirs, in both directions and both passes."""
    net = KINDS[kind](3, 6, 2, bidirectional=True, dtype=F8, rng=0)
    rng = np.random.default_rng(1)
    (x, state, _, _), (above, carry) = arguments_of(rng, net, 12, batch, F8)
    resets = np.zeros((12, batch), bool)
    resets[[4, 8]] = True
    expected = results_of(net.training_step(), (x, state, None, resets), (above, carry))
    for special in (np.nan, np.inf):
        x[5, 1, 0] = special
        actual = results_of(net.training_step(), (x, state, None, resets), (above, carry))
        assert np.isinf(special) or np.isnan(actual["output"][4:8, 1]).any()
        np.testing.assert_array_equal(actual["last"], expected["last"])
        np.testing.assert_array_equal(actual["state"], expected["state"])
        for name in ("output", "input"):
            for some in (slice(0, 4), slice(8, 12)):
                np.testing.assert_array_equal(actual[name][some], expected[name][some])
            others = np.arange(batch) != 1
            np.testing.assert_array_equal(actual[name][:, others], expected[name][:, others])
    # What is not used has no gradient, even where it is no number.
    resets[0], x[5, 1, 0] = True, 0
    state[:] = np.nan
    net = KINDS[kind](3, 6, dtype=F8, rng=0)
    given = x, state[:1], None, resets
    actual = results_of(net.training_step(), given, (above[..., :6], carry[:1]))
    assert all(np.isfinite(each).all() for each in actual.values())
    assert not actual["state"].any()


@settings(max_examples=examples(60))
@given(seeds)
def test_steps_that_are_left_out_change_nothing(seed: int) -> None:
    """Where gradients have gone, and where some numbers are infinite or NaN."""
    rng = np.random.default_rng(seed)
    net = made(rng)
    for name, param in net.params.items():
        setattr(net, name, param / 30)
    steps, batch = int(rng.integers(1, 40)), int(rng.choice([1, 5, 17]))
    (x, state, lengths, resets), (above, carry) = arguments_of(rng, net, steps, batch, F8)
    above[: int(rng.integers(steps + 1))] = 0
    carry *= rng.integers(2)
    for _ in range(rng.integers(3)):
        x.reshape(-1)[rng.integers(x.size)] = rng.choice([np.nan, np.inf, 1e300])
    if rng.integers(4) == 0:
        state.reshape(-1)[rng.integers(state.size)] = np.nan
    results, rows = [], rows_for(rng, net, F8)
    with patch.object(step_module, "rows_of_lanes", lambda *_: rows):
        for never in (True, False):
            step = net.training_step()
            step.forward(x, state)
            for one in step._directions:
                one.pauses = NEVER if never else one.pauses
            results.append(results_of(step, (x, state, lengths, resets), (above, carry)))
    for name, array in results[0].items():
        with np.errstate(invalid="ignore"):  # of infinity and infinity
            same = np.abs(results[1][name] - array) <= 1e-12 * (1 + np.abs(array))
        same |= ~np.isfinite(array) & ~np.isfinite(results[1][name])
        assert same.all(), name


def test_memory_is_what_is_said() -> None:
    net = LSTM(12, 20, dtype=F4, rng=0)
    x, resets = np.zeros((2000, 16, 12), F4), np.zeros((2000, 16), bool)
    resets[::100] = True
    step = net.training_step()
    output, _ = step.forward(x[:2], resets=resets[:2])
    step.backward(output)
    step.forward(x)
    without = step.nbytes
    step = net.training_step()
    tracemalloc.start()
    output, _ = step.forward(x, resets=resets)
    grads = step.backward(output)
    assert grads.input is not None
    peak = tracemalloc.get_traced_memory()[1] - output.nbytes - grads.input.nbytes
    tracemalloc.stop()
    assert 0.9 * step.nbytes <= peak <= step.nbytes + (1 << 20)
    # Both states of each step once more.
    assert step.nbytes - without >= 2 * 2000 * 16 * 20 * 4
    small = net.training_step(memory_limit=without)
    small.forward(x)
    assert small.keeps_gates
    expected, _ = step.forward(x, resets=resets)
    np.testing.assert_array_equal(small.forward(x, resets=resets)[0], expected)
    assert not small.keeps_gates
    least = small.nbytes
    with pytest.raises(MemoryLimitError, match="memory_limit is"):
        net.training_step(memory_limit=least - 1).forward(x, resets=resets)


def test_without_an_axis_of_samples() -> None:
    net = GRU(3, 4, rng=0)
    (x, state, _, resets), (above, carry) = arguments_of(np.random.default_rng(0), net, 6, 1, F4)
    batched = results_of(net.training_step(), (x, state, None, resets), (above, carry))
    single = x[:, 0], state[:, 0], None, resets[:, 0]
    actual = results_of(net.training_step(), single, (above[:, 0], carry[:, 0]))
    for name in ("output", "last", "input", "state"):
        assert np.array_equal(actual[name], batched[name][:, 0])
    listed = results_of(net.training_step(), (x, state, None, resets.tolist()), (above, carry))
    assert np.array_equal(listed["input"], batched["input"])


@pytest.mark.parametrize(("steps", "batch"), [(0, 3), (4, 0), (0, 0)])
def test_nothing(steps: int, batch: int) -> None:
    net = LSTM(3, 4, 2, bidirectional=True, rng=0)
    x, resets = np.ones((steps, batch, 3), F4), np.ones((steps, batch), bool)
    for flags in (resets, resets.tolist() if steps else resets):
        output, last = net.training_step().forward(x, resets=flags)
        assert output.shape == (steps, batch, 8)
        assert not last.any()


def test_resets_of_the_caller_may_change_between_the_passes() -> None:
    net = GRU(3, 4, rng=0)
    (x, state, _, resets), grads = arguments_of(np.random.default_rng(0), net, 9, 2, F4)
    expected = results_of(net.training_step(), (x, state, None, resets), grads)
    for form in (np.asfortranarray, lambda flags: flags.copy()[::-1][::-1]):
        step, own = net.training_step(), form(resets)
        step.forward(x, state, None, own)
        own[:] = ~own
        assert np.array_equal(step.backward(*grads).input, expected["input"])


X = np.zeros((5, 2, 3), F4)
FLAGS = np.zeros((5, 2), bool)


@pytest.mark.parametrize(
    ("x", "resets", "error", "said"),
    [
        (
            X,
            FLAGS[:4],
            InputError,
            r"resets has shape \(4, 2\); expected \(5, 2\), as x but for its last axis",
        ),
        (X, FLAGS[:, 0], InputError, r"resets has shape \(5,\); expected \(5, 2\)"),
        (X[:, 0], FLAGS, InputError, r"resets has shape \(5, 2\); expected \(5,\), as x"),
        (
            X,
            FLAGS.astype(int),
            InputTypeError,
            "resets has dtype int64; expected bool: resets != 0",
        ),
        (X, FLAGS.astype(F4), InputTypeError, "resets has dtype float32; expected bool"),
        (X, "ab", InputTypeError, "resets has dtype <U2; expected bool"),
        (X, [[True], [True, False]], InputTypeError, "resets is not an array"),
        (X, np.ma.array(FLAGS, mask=True), InputTypeError, "resets has a mask"),
        (X[0, 0], FLAGS, InputError, r"x has shape \(3,\); expected"),
    ],
)
def test_what_is_wrong_is_said(x: Any, resets: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        RNN(3, 4, rng=0).training_step().forward(x, resets=resets)


@pytest.mark.parametrize(
    ("resets", "anew", "error", "said"),
    [
        (None, np.zeros((1, 2, 4), F4), InputError, "reset_states is given, and resets is None"),
        (
            FLAGS,
            np.zeros((2, 4), F4),
            InputError,
            r"reset_states has shape \(2, 4\); expected \(1, ",
        ),
        (FLAGS, np.zeros((2, 2, 4), F4), InputError, r"reset_states has shape \(2, 2, 4\)"),
        (FLAGS, "a", InputTypeError, "reset_states"),
    ],
)
def test_what_is_wrong_with_states_is_said(
    resets: Any, anew: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        RNN(3, 4, rng=0).training_step().forward(X, resets=resets, reset_states=anew)


@pytest.mark.parametrize("code", np.typecodes["AllInteger"])
def test_lengths_are_any_integers_and_resets_may_have_an_axis_of_one(code: str) -> None:
    rng = np.random.default_rng()
    net, x = GRU(3, 4, rng=rng), rng.standard_normal((200, 9, 3), F4)
    lengths, resets = rng.integers(0, 128, 9), rng.random((200, 9)) < 0.1
    step = net.training_step()
    expected = step.forward(x, None, lengths, resets)[0].copy()
    found, _ = step.forward(x, None, lengths.astype(code), resets[:, :, None])
    assert np.array_equal(found, expected)
    one = step.forward(x[:, 0], resets=resets[:, 0])[0].copy()
    assert np.array_equal(step.forward(x[:, 0], resets=resets[:, :1])[0], one)
    with pytest.raises(InputTypeError, match="expected bool: resets != 0"):
        step.forward(x, resets=resets.astype(code))
    for wrong in (lengths > 3, lengths.astype(F4)):
        with pytest.raises(InputTypeError, match="lengths"):
            step.forward(x, lengths=wrong)
