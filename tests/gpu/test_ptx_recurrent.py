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
from some_cells import CELLS  # noqa: E402

from sparsescan.recurrent import GRUCell, LSTMCell, Recurrent, RNNCell  # noqa: E402

KINDS = CELLS | {"RNN": RNNCell, "GRU": GRUCell, "LSTM": LSTMCell}
# Numbers that a step loads and stores of a unit, forward and backward: products, inputs and kept
# vectors, states, outputs' gradients; states, kept vectors and arguments; gradients.
MOVED = {
    "RNN": (1 + 1, 2 + 1),
    "GRU": (3 + 5, 6 + 4),
    "LSTM": (4 + 6, 7 + 4),
    "MGU": (2 + 4, 4 + 2),
    "PeepholeLSTM": (4 + 6, 8 + 4),
    "SCRN": (2 + 4, 7 + 3),
    "Diagonal": (1 + 1, 3 + 1),
    "Leaky": (1 + 2, 4 + 1),
}
# Barriers of a step, where there are others than one in each pass.
BARRIERS = {"MGU": (2, 2), "SCRN": (3, 2), "Diagonal": (0, 0), "Leaky": (0, 0)}
BATCH = 2


def train(cupy: Any, net: Any, steps: int) -> None:
    """Run one training step, of two launches."""
    step = net.training_step()
    x = np.random.default_rng(0).standard_normal((steps, BATCH, net.input_size))
    output, _ = step.forward(cupy.asarray(x.astype(np.float32)))
    step.backward(output)


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        *(("GRU", 20), ("MGU", 20), ("Leaky", 20)),
        *slow(("RNN", 20), ("LSTM", 64), ("LSTM", 100), ("RNN", 356)),
        *slow(("PeepholeLSTM", 20), ("SCRN", 20), ("Diagonal", 20), ("MGU", 356)),
    ],
)
def test_a_step_has_a_barrier_a_stage_and_moves_no_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch, kind: str, units: int
) -> None:
    launches = ptx.stand_in.count(monkeypatch)
    cupy = fake_cupy.cupy
    net = Recurrent(KINDS[kind], units if kind == "Leaky" else 3, units, rng=0)
    for name, array in net.params.items():
        setattr(net, name, cupy.asarray(array))
    for steps in (2, 3):
        train(cupy, net, steps)
    for few, many, moved, waits in zip(
        launches[:2], launches[2:], MOVED[kind], BARRIERS.get(kind, (1, 1)), strict=True
    ):
        _, blocks, threads, before = few
        *same, after = many
        assert same == list(few[:3])
        assert after.barriers - before.barriers == waits * blocks * threads
        step = after.bytes["global"] - before.bytes["global"]
        needed = 4 * moved * BATCH * units
        # Beyond the units whose weights are in registers each step reads them, for both samples.
        weights = {"GRU": 3, "LSTM": 4, "MGU": 2}.get(kind, 1) * units * units * 4
        if units <= 88:
            assert step == needed
        else:
            assert weights <= step - needed <= 1.3 * BATCH * weights
