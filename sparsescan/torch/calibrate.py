"""Time recurrent modules with our kernels and PyTorch's, for ``sparsescan calibrate``."""

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
# Rounds; untimed calls of a round; seconds of its timed calls; and the seconds of a call from which
# on longer sequences are not measured.
_ROUNDS, _FIRST, _SECONDS, _LONG = 5, 3, 0.001, 0.02
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def calibrate() -> Path:
    """Time calls of recurrent modules here, save the times, and return the path of the file."""
    return save_table(measure())


def measure() -> TimeTable:
    """Return the times of calls of recurrent modules; this takes about five minutes.

    The allocator keeps freed memory, as this favours PyTorch's kernels: where they are faster even
    then, a module calls them, so it is never slower than PyTorch's.
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
    """Let glibc keep memory that this process frees, in place of returning the pages.

    PyTorch's tuning guide for CPUs advises this. It calls mallopt.
    """
    with suppress(AttributeError, TypeError):  # another libc, or Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, 1 << 30)


def _times(kind: str, has_backward: bool, units: int, batch: int) -> dict[str, list[float]]:
    """Return seconds of a call for several numbers of steps, for each contender."""
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
    """Return each contender's least time of a few alternating rounds, as cores may be busy."""
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
