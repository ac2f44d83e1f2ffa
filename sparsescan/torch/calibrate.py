"""Time calls of recurrent modules by both kernels, for ``sparsescan calibrate``."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ._prepared import only
from ._times import INPUTS, Table, name_of, save_table
from .recurrent import GRU, LSTM, RNN

__all__ = ["calibrate", "measure"]

_HIDDEN, _BATCH, _STEPS = [16, 32, 64, 128, 256, 512], [1, 4, 16, 64, 256], [1, 4, 16, 64, 256]
_MODULES = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
_KERNELS = {"ours": "sparsescan", "theirs": "pytorch"}
# Calls before those that are timed, rounds, seconds of a round, and of a call beside which longer
# sequences are not measured.
_FIRST, _ROUNDS, _SECONDS, _LONG = 4, 5, 0.001, 0.02


def calibrate() -> Path:
    """Measure how long calls of recurrent modules take here, and keep it; the path of the file."""
    return save_table(measure())


def measure() -> Table:
    """Return how long calls of recurrent modules take; it takes some three minutes."""
    before, times = torch.get_num_threads(), {}
    try:
        for threads in dict.fromkeys((1, before)):
            torch.set_num_threads(threads)
            for kind in _MODULES:
                for has_backward in (False, True):
                    part = [[_times(kind, has_backward, h, b) for b in _BATCH] for h in _HIDDEN]
                    times[name_of(kind, has_backward, threads)] = {
                        name: [[each[name] for each in row] for row in part] for name in _KERNELS
                    }
    finally:
        torch.set_num_threads(before)
    name = f"{platform.processor() or platform.machine()}, PyTorch {torch.__version__}"
    return Table(name, _HIDDEN, _BATCH, _STEPS, times)


def _times(kind: str, has_backward: bool, units: int, batch: int) -> dict[str, list[float]]:
    """Return seconds of a call for numbers of steps, by the contenders."""
    module = _MODULES[kind](INPUTS, units)
    found: dict[str, list[float]] = {name: [] for name in _KERNELS}
    for steps in _STEPS:
        longest = 0.0
        for name, kernels in _KERNELS.items():
            with only(kernels):
                seconds = _seconds(_call(module, has_backward, steps, batch))
            found[name].append(float(f"{seconds:.3g}"))
            longest = max(longest, seconds)
        if longest > _LONG:
            break
    return found


def _call(module: nn.RNNBase, has_backward: bool, steps: int, batch: int) -> Callable[[], Any]:
    x = torch.randn(steps, batch, INPUTS, requires_grad=has_backward)
    above = torch.randn(steps, batch, module.hidden_size)

    def infer() -> None:
        with torch.no_grad():
            module(x)

    def train() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x)[0].backward(above)

    return train if has_backward else infer


def _seconds(call: Callable[[], Any]) -> float:
    """Return the least of a few rounds: others may use the cores, too."""
    for _ in range(_FIRST):
        begin = time.perf_counter()
        call()
        one = time.perf_counter() - begin
    count, rounds = max(1, round(_SECONDS / one)), []
    for _ in range(_ROUNDS if one < _LONG else 1):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - begin) / count)
    return min(rounds)
