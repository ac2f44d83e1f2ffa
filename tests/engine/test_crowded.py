"""Replays on cores that other programs use: one thread, until two are as fast as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparsescan.execution import recording
from sparsescan.ops.operation import record
from sparsescan.ops.recurrence import RECURRENCE, Form

SHAPE = 64, 8, 4096  # two threads' work


def test_what_waits_for_others_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, with_threads: Callable[[int], None]
) -> None:
    with_threads(2)
    form = Form("diagonal", SHAPE[-1], False)
    recorded = record(RECURRENCE, form, (SHAPE, SHAPE, None), np.float32, False)
    assert recorded.recording.threads == 2
    now, slow, parts = [0.0], [False], list[int]()

    def replay(header: Any, arrays: Any, control: Any, count: int) -> None:
        control[:] = 0
        parts.append(count)
        now[0] += 0.1 if slow[0] and count > 1 else 0.001

    monkeypatch.setattr(recording, "replay", replay)
    monkeypatch.setattr(recording, "perf_counter", lambda: now[0])

    def run(count: int, is_slow: bool) -> list[int]:
        slow[0] = is_slow
        parts.clear()
        for _ in range(count):
            recorded.recording.run_at([0] * 4)
        return parts[:]

    assert run(3, False) == [2, 2, 2]
    # Alone for one call, for two, for four, …
    assert run(10, True) == [2, 1, 2, 1, 1, 2, 1, 1, 1, 1]
    assert run(3, False) == [2, 2, 2]
    assert run(3, True) == [2, 1, 2]
    assert max(len(each) for each in "".join(map(str, run(1000, True))).split("2")) == 64


def test_results_do_not_depend_on_it(with_threads: Callable[[int], None]) -> None:
    with_threads(2)
    rng = np.random.default_rng()
    form = Form("diagonal", SHAPE[-1], False)
    recorded = record(RECURRENCE, form, (SHAPE, SHAPE, None), np.float32, False)
    a, b = (rng.random(SHAPE, np.float32) for _ in range(2))
    found = []
    for alone in (0, 1):
        recorded.recording._alone = alone
        states = np.empty(SHAPE, np.float32)
        recorded.recording.run([np.empty(recorded.nbytes, np.uint8), a, b, states])
        found.append(states.tobytes())
    assert found[0] == found[1]
