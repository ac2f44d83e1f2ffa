"""Time calls of recurrent modules by both kernels, for ``sparsescan calibrate``."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .calls.prepared import only
from .calls.times import INPUTS, TimeTable, name_of, save_table
from .recurrent import GRU, LSTM, RNN

_HIDDEN, _BATCH, _STEPS = [16, 32, 64, 128, 256, 512], [1, 4, 16, 64, 256], [1, 4, 16, 64, 256]
_MODULES: dict[str, Any] = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
_KERNELS = {"ours": "sparsescan", "theirs": "pytorch"}
# Rounds, calls of a round before those that are timed, seconds of these, and of a call beside which
# longer sequences are not measured.
_ROUNDS, _FIRST, _SECONDS, _LONG = 5, 3, 0.001, 0.02
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def calibrate() -> Path:
    """Measure how long calls of recurrent modules take here, and keep it; the path of the file."""
    return save_table(measure())


def measure() -> TimeTable:
    """Return how long calls of recurrent modules take; it takes some five minutes.

    Memory is kept, since PyTorch's kernels gain more by it: a module that calls its own where that
    is faster still is never the slower one.
    """
    keep_memory()
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
    return TimeTable(name, _HIDDEN, _BATCH, _STEPS, times)


def keep_memory() -> None:
    """Let glibc keep what this process frees: it else gives pages back and asks anew.

    PyTorch's tuning guide advises that for a CPU. It is done by mallopt.
    """
    with suppress(AttributeError, TypeError):  # another libc, or Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, 1 << 30)


def _times(kind: str, has_backward: bool, units: int, batch: int) -> dict[str, list[float]]:
    """Return seconds of a call for numbers of steps, by the contenders."""
    module = _MODULES[kind](INPUTS, units)
    found: dict[str, list[float]] = {name: [] for name in _KERNELS}
    for steps in _STEPS:
        seconds = _seconds(_call(module, has_backward, steps, batch))
        for name, each in seconds.items():
            found[name].append(float(f"{each:.3g}"))
        if max(seconds.values()) > _LONG:
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


def _seconds(call: Callable[[], Any]) -> dict[str, float]:
    """Return the least of a few rounds by each contender, in turns: others may use the cores."""
    found = dict.fromkeys(_KERNELS, float("inf"))
    for _ in range(_ROUNDS):
        for name, kernels in _KERNELS.items():
            with only(kernels):
                one = min(_timed(call, 1) for _ in range(_FIRST))
                found[name] = min(found[name], _timed(call, max(1, round(_SECONDS / one))))
        if max(found.values()) > _LONG:
            break
    return found


def _timed(call: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count
