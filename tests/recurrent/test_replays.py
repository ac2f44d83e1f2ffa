"""Steps that are used again: the same bits as those of one that never was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import times

from sparsescan.execution import calls
from sparsescan.recurrent import GRU, LSTM, RNN


def bits(arrays: list[Any]) -> list[bytes]:
    return [each.tobytes() for each in arrays]


def passes(step: Any, given: tuple[Any, ...], grads: tuple[Any, ...], needs: bool) -> list[Any]:
    """Return all results of both passes."""
    results = list(step.forward(*given))
    gradients = step.backward(*grads, needs_input_grad=needs)
    assert (gradients.input is not None) == needs
    results += [gradients.state, *gradients.params.values()]
    return results + ([gradients.input] if needs else [])


@settings(max_examples=times(4))
@given(st.integers(0, 2**32))
def test_a_life(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind, dtype = (RNN, GRU, LSTM)[rng.integers(3)], (np.float32, np.float64)[rng.integers(2)]
    inputs, hidden = int(rng.integers(1, 6)), int(rng.integers(1, 24))
    shape = kind(1, hidden).params["weight_hh_l0"].shape
    masks = {"weight_hh_l0": rng.random(shape) < 0.2} if rng.random() < 0.4 else None
    two = rng.random() < 0.4
    net: Any = kind(
        *(inputs, hidden, 1 + two),
        bidirectional=bool(rng.random() < 0.4),
        bias=bool(rng.random() < 0.7),
        masks=masks,
        rng=rng,
        dtype=dtype,
    )
    steps, batch = int(rng.integers(1, 40)), int(rng.choice([1, 2, 5, 14, 17, 25]))
    layers, width = net.num_layers * (1 + net.bidirectional), hidden * (1 + net.bidirectional)

    def random(*shape: int, chance: float = 0.7) -> Any:
        return rng.standard_normal(shape).astype(dtype) if rng.random() < chance else None

    step, kept, is_large = net.training_step(), list[Any](), rng.random() < 0.7
    for _ in range(int(rng.integers(4, 9))):
        event = rng.random()
        if event < 0.1:
            step = pickle.loads(pickle.dumps(step)) if rng.random() < 0.5 else copy.deepcopy(step)
            net = step.network
        elif event < 0.2:
            steps = int(rng.integers(1, 40))
        elif event < 0.3:
            dtype = (np.float32, np.float64)[rng.integers(2)]
        for name, param in net.params.items():
            if rng.random() < 0.5:
                own = rng.standard_normal(param.shape).astype(dtype)
                setattr(net, name, own * (param != 0) if name == "weight_hh_l0" else own)
        x = random(steps, batch, inputs, chance=1)
        state = random(layers, batch, net.state_size)
        lengths = rng.integers(0, steps + 1, batch) if rng.random() < 0.4 else None
        resets = rng.random((steps, batch)) < 0.2 if rng.random() < 0.4 else None
        grads = random(steps, batch, width), random(layers, batch, net.state_size)
        given = x, state, lengths, resets
        arrays = [each for each in (*given, *grads) if each is not None]
        before = bits(arrays)
        needs = bool(rng.random() < 0.7)
        with pytest.MonkeyPatch.context() as patched:
            if is_large:
                patched.setattr(calls, "LARGE", 0)
            results = passes(step, given, grads, needs)
        expected = passes(net.training_step(), given, grads, needs)
        assert bits(results) == bits(expected)
        # Neither the caller's arrays, nor results that the caller has, are written again.
        assert bits(arrays) == before
        # Some of them, or views of some, while memory of the others is used again.
        for result, copied in zip(results, expected, strict=True):
            if rng.random() < 0.3:
                kept.append((result[..., ::2] if rng.random() < 0.5 else result, copied))
        del results, result
    for result, copied in kept:
        assert result.tobytes() in (copied.tobytes(), copied[..., ::2].tobytes())


def test_memory_of_results_is_used_again_when_nobody_has_them() -> None:
    """Neither the results of another step, nor views of any kind, are written again."""
    x = np.ones((100, 16, 20), np.float32)
    step, places, held = GRU(20, 20, rng=0).training_step(), set[int](), list[Any]()
    views = (lambda a: a[3:5, ::2], memoryview, lambda a: a.reshape(-1).view(np.uint8), list)
    for call in range(40):
        x[0, 0, 0] = call
        output, _ = step.forward(x)
        grad = step.backward(output).input
        assert grad is not None
        if call < 20:
            for each in (output, grad):
                held.append((view := views[call % 4](each), np.array(view)))
        else:
            places |= {output.ctypes.data, grad.ctypes.data}
    assert len(places) <= 4
    for view, copied in held:
        assert np.array(view).tobytes() == copied.tobytes()
