"""Kernels for whole sequences: what they move and wait for, counted as compiled."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from sampling import slow

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

import fake_cupy  # noqa: E402
import ptx.stand_in  # noqa: E402

from sparsescan.jacobians import GRU, LSTM, RNN  # noqa: E402

# Numbers that a step loads and stores of a unit, forward and backward.
MOVED = {"RNN": (1 + 1, 2 + 1), "GRU": (3 + 5, 6 + 4), "LSTM": (4 + 6, 7 + 4)}
BATCH = 2


def train(cupy: Any, net: Any, steps: int) -> None:
    """Run one training step, of two launches."""
    step = net.training_step()
    x = np.random.default_rng(0).standard_normal((steps, BATCH, net.input_size))
    output, _ = step.forward(cupy.asarray(x.astype(np.float32)))
    step.backward(output)


@pytest.mark.parametrize(
    ("kind", "units"), [("GRU", 20), *slow(("RNN", 20), ("LSTM", 64), ("LSTM", 100), ("GRU", 360))]
)
def test_a_step_has_one_barrier_and_moves_no_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch, kind: str, units: int
) -> None:
    launches = ptx.stand_in.count(monkeypatch)
    cupy = fake_cupy.cupy
    net = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}[kind](3, units, rng=0)
    for name, array in net.params.items():
        setattr(net, name, cupy.asarray(array))
    for steps in (4, 7):
        train(cupy, net, steps)
    for few, many, moved in zip(launches[:2], launches[2:], MOVED[kind], strict=True):
        _, blocks, threads, before = few
        *same, after = many
        assert same == list(few[:3])
        assert after.barriers - before.barriers == 3 * blocks * threads
        step = (after.bytes["global"] - before.bytes["global"]) / 3
        needed = 4 * moved * BATCH * units
        # Beyond the units whose weights are in registers each step reads them, for both samples.
        weights = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind] * units * units * 4
        if units <= 88:
            assert step == needed
        else:
            assert weights <= step - needed <= 1.3 * BATCH * weights
