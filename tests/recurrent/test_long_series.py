"""Gradients that flow at most to the segment before, and outputs that are all states."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fresh_python import run_python
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from network_oracle import autograd_of
from plain_networks import plain_run, truncated_grads
from sampling import examples, slow
from some_cells import CELLS, Driven, Unread
from test_resets import F4, F8, arguments_of, close, made, results_of, rows_for, with_states

from sparsescan.errors import InputError, InputTypeError, MemoryLimitError
from sparsescan.recurrent import (
    GRU,
    LSTM,
    RNN,
    Cell,
    GRUCell,
    LSTMCell,
    Recurrent,
    host_sizes,
    passes,
    truncated,
)
from sparsescan.recurrent import step as step_module

KINDS: dict[str, Any] = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
SEVERAL = [LSTMCell, *(cell for cell in CELLS.values() if Recurrent(cell, 2, 2).state_size > 2)]
seeds = st.integers(0, 2**32 - 1)

# -- Truncated gradients ---------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(seeds)
def test_gradients_flow_to_the_segment_before(seed: int) -> None:
    """Beside loops of PyTorch that detach states, in any number of windows at once."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(KINDS)))
    steps, batch, k = int(rng.integers(0, 40)), int(rng.integers(1, 5)), int(rng.integers(1, 9))
    net = KINDS[kind](int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.integers(1, 4)))
    whole: Any = (False, net.state_size > net.hidden_size, "layers")[rng.integers(3)]
    is_whole = whole == "layers"
    arguments, (above, carry) = arguments_of(rng, net, steps, batch, F8)
    if whole:
        lead = steps, batch, *[len(net.cells)] * is_whole
        above = rng.standard_normal((*lead, net.state_size))
    x, state, lengths, resets = arguments
    resets = resets if rng.integers(2) else None
    given = with_states(rng, (x, state, lengths, resets))
    step = net.training_step(truncate=k, return_states=whole)
    counts = np.full(batch, steps) if lengths is None else lengths
    tensors = [torch.tensor(each) for each in (x, state, counts)]
    flags = None if resets is None else torch.tensor(resets)
    leaves = [each.requires_grad_() for each in tensors[:2]]
    params = {
        name: torch.tensor(each, dtype=torch.float64).requires_grad_()
        for name, each in net.params.items()
    }
    about = kind, params, *leaves, tensors[2], flags
    anew = None if given[4] is None else torch.tensor(given[4]).requires_grad_()
    outputs, last = [torch.zeros(above.shape)], leaves[1]
    if steps:
        outputs, last = plain_run(*about, anew, all_layers=is_whole)
    expected = {"output": torch.cat(outputs[: 1 + bool(whole)], -1), "last": last}
    filled = np.concatenate([above, np.zeros((*above.shape[:-1], net.state_size))], -1)
    own = torch.tensor(filled[..., : net.state_size]), torch.tensor(carry)
    names = ["input", "state", *params, *([] if anew is None else ["reset_states"])]
    expected |= zip(names, truncated_grads(*about, k, *own, anew, all_layers=is_whole), strict=True)
    arrays = {name: each.detach().numpy() for name, each in expected.items()}
    with patch.object(truncated, "_SAMPLES", int(rng.choice([1, 6, 1024]))):
        for _ in range(3):
            given_grads = above, carry
            close(results_of(step, given, given_grads), arrays, F8)


@settings(max_examples=examples(20), deadline=None)
@given(seeds)
def test_windows_take_any_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    net = GRU(2, 4, 2)
    steps, batch, k = int(rng.integers(30, 60)), int(rng.integers(1, 4)), int(rng.integers(2, 9))
    given, grads = arguments_of(rng, net, steps, batch, F8)
    given = with_states(rng, given)
    free = net.training_step(truncate=k)
    with patch.object(step_module, "_SEGMENT", 2):
        expected = results_of(free, given, grads)
        limit = free.nbytes
        while True:
            step = net.training_step(truncate=k, memory_limit=limit)
            try:
                close(results_of(step, given, grads), expected, F8)
            except MemoryLimitError:
                break
            assert step.nbytes <= limit
            limit = step.nbytes - 1
    assert limit < free.nbytes - 1


def test_nothing_but_two_segments_is_kept() -> None:
    net, x = GRU(1, 16), np.zeros((50_000, 1, 1), np.float32)
    whole, cut = net.training_step(), net.training_step(truncate=100, memory_limit=1 << 20)
    for step in (whole, cut):
        step.forward(x)
    assert cut.nbytes < 1 << 20 < 10 << 20 < whole.nbytes


def test_bits_are_those_of_one_thread() -> None:
    rng = np.random.default_rng(0)
    net = GRU(2, 12, rng=rng)
    given, grads = arguments_of(rng, net, 900, 3, F4)
    found = []
    for count in (1, 2, 5):
        with (
            patch.object(passes, "thread_count", lambda count=count: count),
            patch.object(host_sizes, "thread_count", lambda count=count: count),
            patch.object(host_sizes, "_SMALL", 1),
        ):
            found.append(results_of(net.training_step(truncate=20), given, grads))
    for other in found[1:]:
        for name, array in found[0].items():
            np.testing.assert_array_equal(other[name], array)


def test_errors_name_truncate() -> None:
    net = GRU(2, 3)
    with pytest.raises(InputError, match="truncate is 0; expected"):
        net.training_step(truncate=0)
    with pytest.raises(InputTypeError, match="truncate is 'x'"):
        net.training_step(truncate="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="truncate is 5, and the network has two directions"):
        GRU(2, 3, bidirectional=True).training_step(truncate=5)
    with pytest.raises(InputTypeError, match="return_states is 3"):
        net.training_step(return_states=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="return_states is 'all'; expected 'layers'"):
        net.training_step(return_states="all")  # type: ignore[arg-type]
    step = GRUCell(2, 3).training_step(truncate=1)
    step.forward(np.zeros((5, 1, 2)))
    with pytest.raises(InputError, match="grad_output has shape"):
        step.backward(np.zeros((4, 1, 3)))


# -- All states ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F8, *slow(F4)], ids=str)
@settings(max_examples=examples(60), deadline=None)
@given(seeds)
def test_outputs_are_all_states(dtype: Any, seed: int) -> None:
    """Gradients in each of them count, also where steps without any are left out.

    They are those of the last layer, or those of all layers, of cells of one state, too.
    """
    rng = np.random.default_rng(seed)
    is_whole = bool(rng.integers(2))
    net = made(rng, None if is_whole else SEVERAL[rng.integers(len(SEVERAL))], dtype=dtype)
    steps, batch = int(rng.integers(1, 40)), int(rng.choice([1, 2, 5, 16, 17, 33]))
    given, (above, carry) = arguments_of(rng, net, steps, batch, dtype)
    x, state, lengths, resets = given
    resets = resets if rng.integers(2) else None
    several = net.state_size // net.hidden_size
    row = (len(state), net.state_size) if is_whole else (several * above.shape[2],)
    above = rng.standard_normal((*above.shape[:2], *row)).astype(dtype)
    above[rng.random(steps) < rng.choice([0, 0.9])] = 0
    above[..., : above.shape[-1] // several] *= rng.integers(2)
    expected = autograd_of(net, x, state, lengths, above, carry, resets)
    rows, segment = rows_for(rng, net, dtype), int(rng.integers(1, 9))
    with (
        patch.object(step_module, "rows_of_lanes", lambda *_: rows),
        patch.object(step_module, "_SEGMENT", segment),
    ):
        step = net.training_step(return_states="layers" if is_whole else True)
        before = above.copy()
        for _ in range(4):
            actual = results_of(step, (x, state, lengths, resets), (above, carry))
    assert np.array_equal(above, before)
    assume(expected.nearest > 1e-5)
    close(actual, expected, dtype)


def test_states_of_layers_of_one_sample_and_without_gradients() -> None:
    net = LSTM(3, 5, 2, bidirectional=True, rng=0)
    x = np.random.default_rng(0).standard_normal((7, 1, 3), np.float32)
    step, other = (net.training_step(return_states=each) for each in ("layers", False))
    whole, _ = step.forward(x)
    carry = np.ones((4, 1, 10), np.float32)
    found = step.backward(grad_state=carry)
    output, last = step.forward(x[:, 0])
    assert output.shape == (7, 4, 10)
    np.testing.assert_array_equal(output, whole[:, 0])
    # Forward in time the last row has the last states, backward in time the first.
    np.testing.assert_array_equal(output[[-1, 0, -1, 0], range(4)], last)
    expected, _ = other.forward(x)
    np.testing.assert_array_equal(output[:, 2:, :5].reshape(7, 10), expected[:, 0])
    close(found.params, other.backward(grad_state=carry).params, F4)
    step.forward(x[:, 0])
    with pytest.raises(InputError, match=r"grad_output has shape \(7, 1, 4, 10\); expected \(7, 4"):
        step.backward(whole)


# -- The memory of a process -----------------------------------------------------------------------


def test_a_process_stays_within_its_limits(tmp_path: Path) -> None:
    """In a new one: 400,000 steps add what the limit says, and inputs, outputs and gradients."""
    code = """
        from pathlib import Path

        import numpy as np

        from sparsescan.recurrent import GRU


        def memory(name):
            lines = Path("/proc/self/status").read_text().splitlines()
            (line,) = (each for each in lines if each.startswith(name))
            return 1024 * int(line.split()[1])


        net, x = GRU(4, 32, rng=0), np.zeros((400_000, 1, 4), np.float32)
        for options in ({"memory_limit": 80 << 20}, {"memory_limit": 30 << 20, "truncate": 500}):
            step = net.training_step(**options)
            step.forward(x[:2_000])
            step.backward()
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            before = memory("VmRSS")
            output, _ = step.forward(x)
            grads = step.backward(output)
            assert step.nbytes <= options["memory_limit"]
            print(memory("VmHWM") - before - output.nbytes - grads.input.nbytes)
            del step, output, grads
    """
    slack = 8 << 20
    whole, cut = map(int, run_python(code, tmp_path).split())
    if whole >= (80 << 20) + slack:  # a first process compiles, which takes memory of its own
        whole, cut = map(int, run_python(code, tmp_path).split())
    assert whole < (80 << 20) + slack
    assert cut < (30 << 20) + slack


# -- Further inputs -------------------------------------------------------------------------------


@settings(max_examples=examples(12), deadline=None)
@given(seeds, st.sampled_from([Driven, Unread]))
@example(0, Unread)
def test_further_inputs_of_long_series(seed: int, cell: type[Cell]) -> None:
    """Truncated, with all states, and with less memory, beside a loop."""
    rng = np.random.default_rng(seed)
    layers, steps, k = int(rng.integers(1, 3)), int(rng.integers(1, 30)), int(rng.integers(2, 9))
    batch, units = int(rng.choice([1, 3, 16])), int(rng.choice([3, 4]))
    net = Recurrent(cell, 2, units, layers, dtype=np.float64, rng=rng)
    whole: Any = (False, True, "layers")[rng.integers(3)]
    given, (above, carry) = arguments_of(rng, net, steps, batch, F8)
    x, state, lengths, resets = given
    counts = np.full(batch, steps) if lengths is None else lengths
    if whole:
        above = rng.standard_normal((steps, batch, *[layers] * (whole == "layers"), 2 * units))
    names = [f"{name}_l{layer}" for layer in range(layers) for name in ("drive", "clock", "drop")]
    further = {name: rng.standard_normal((steps, batch, units)) for name in names}
    leaves = {
        name: torch.tensor(each, dtype=torch.float64, requires_grad=True)
        for name, each in {"input": x, "state": state, **net.params, **further}.items()
    }
    params = {name: each for name, each in leaves.items() if name not in ("input", "state")}
    flags = None if resets is None else torch.tensor(resets)
    about = cell, params, leaves["input"], leaves["state"], torch.tensor(counts), flags
    outputs, last = plain_run(*about, all_layers=whole == "layers")
    filled = np.concatenate([above, np.zeros((*above.shape[:-1], 2 * units))], -1)
    own = torch.tensor(filled[..., : 2 * units]), torch.tensor(carry)
    grads = truncated_grads(*about, k, *own, all_layers=whole == "layers")
    expected = dict(zip(leaves, grads, strict=True))
    expected |= {"output": torch.cat(outputs[: 1 + bool(whole)], -1), "last": last}
    arrays = {name: each.detach().numpy() for name, each in expected.items()}
    limit = None
    for _ in range(2):
        step = net.training_step(truncate=k, return_states=whole, memory_limit=limit)
        with patch.object(step_module, "_SEGMENT", 2):
            try:
                output, end = step.forward(x, state, lengths, resets, **further)
            except MemoryLimitError:
                assert limit is not None
                break
        own_grads = step.backward(above, carry)
        assert own_grads.further is not None
        found = {"output": output, "last": end, "input": own_grads.input}
        found |= {"state": own_grads.state, **own_grads.params, **own_grads.further}
        close(found, arrays, F8)
        limit = step.nbytes - 1
