"""Few samples of wide cells: threads share the products of a step, with the bits of one thread."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_steps import memory_of
from sampling import times

from sparsescan.execution import recording
from sparsescan.execution.threads import lent
from sparsescan.recurrent import (
    GRU,
    LSTM,
    GRUCell,
    LSTMCell,
    Recurrent,
    RNNCell,
    host_sizes,
)
from sparsescan.recurrent import passes as passes_module
from sparsescan.recurrent.catalogue import MGU


class Alone:
    """A team of the thread that calls: no helper ever comes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, work: Any) -> None:
        work()

    def call(self, function: int, argument: int) -> None:
        self.calls += 1
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


def with_threads(patch: pytest.MonkeyPatch, count: int) -> None:
    for module in (host_sizes, passes_module):
        patch.setattr(module, "thread_count", lambda: count)


def passes(step: Any, x: Any, state: Any, loss: Any) -> list[bytes]:
    output, last = step.forward(x, state)
    grads = step.backward(loss, last)
    arrays = [output, last, grads.input, grads.state, *grads.params.values()]
    return [each.tobytes() for each in arrays]


@settings(max_examples=times(2))
@given(st.integers(0, 2**32 - 1))
def test_bits_are_those_of_one_thread(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind: Any = (RNNCell, GRUCell, LSTMCell, MGU)[rng.integers(4)]
    # Products of 2¹⁵ entries and more are shared.
    inputs, units = int(rng.choice([3, 200])), int(rng.integers(190, 260))
    layers, dtype = int(rng.integers(1, 3)), (np.float32, np.float64)[rng.integers(2)]
    net = Recurrent(kind, inputs, units, layers, rng=rng, dtype=dtype)
    # So few samples are one group, which all threads share.
    steps, batch = int(rng.integers(1, 5)), int(rng.integers(1, host_sizes.TILE_ROWS // 2 + 1))
    x = rng.standard_normal((steps, batch, inputs)).astype(dtype)
    state = rng.standard_normal((layers, batch, net.state_size)).astype(dtype)
    loss = rng.standard_normal((steps, batch, units)).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_sizes, "_SMALL", 1)
        # Else a replay that was late on a busy machine lets the next ones have one thread.
        patch.setattr(recording, "_LATE", float("inf"))
        with_threads(patch, 1)
        expected = passes(net.training_step(), x, state, loss)
        for count in (2, 3, 5):
            with_threads(patch, count)
            step = net.training_step()
            found = [passes(step, x, state, loss) for _ in range(3)]
            assert memory_of(step).helpers == count - 1
            team = Alone()
            with lent(team):
                found.append(passes(step, x, state, loss))
            assert team.calls > 0
            assert all(each == expected for each in found)


@pytest.mark.parametrize(
    ("batch", "threads", "expected"),
    [(9, 2, [5, 4]), (17, 2, [9, 8]), (5, 2, [3, 2]), (4, 2, [4]), (40, 3, [14, 14, 12])],
)
def test_threads_have_as_many_samples(batch: int, threads: int, expected: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_sizes, "_SMALL", 1)
        with_threads(patch, threads)
        step = LSTM(3, 100, rng=0).training_step()
        step.forward(np.zeros((2, batch, 3), np.float32))
    if host_sizes.TILE_ROWS == 8:  # with AVX-512
        assert [samples for _, samples in memory_of(step)._spans()] == expected


def test_large_batches_have_no_helpers() -> None:
    net = GRU(3, 256, rng=0)
    for batch, expected in ((1, True), (300, False)):
        step = net.training_step()
        step.forward(np.zeros((200, batch, 3), np.float32))
        if host_sizes.thread_count() > 1:
            assert (memory_of(step).helpers > 0) == expected
