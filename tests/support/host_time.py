"""How long the host takes for a call of a plan on a device, on the stand-in for CuPy.

``python tests/support/host_time.py`` prints, for some forms of input, microseconds of Python in a
replay (the median of many), where its result lies where that of the replay before did, and where
it does not; and how often the latter asks CuPy for what. Kernels are not launched, and a graph of
none does nothing, so that only the host's work is left: that of `sparsescan`, and that of the
stand-in, which differs from CuPy's. A call of Python that does nothing stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from typing import Any

import fake_cupy
import numpy as np
import ptx.stand_in
import pytest

import sparsescan
from sparsescan import ImplicitChain, ImplicitPattern, Pattern
from sparsescan.kernels.cuda import device as _device

# Calls that are timed, and seconds after which there are no more.
CALLS, SECONDS = 4000, 0.5


def replays(cupy: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what each call scans, and the call."""
    grad, stack = cupy.asarray(np.ones((4, 8))), cupy.asarray(np.ones((1000, 4, 8, 8)))
    plan = sparsescan.plan([Pattern.dense((8, 8))] * 1000, schedule="chunked:4")
    yield "stack of 1,000 dense steps", lambda: plan.exclusive_scan(grad, stack)
    stream = cupy.cuda.Stream(non_blocking=True)
    yield "the same, stream=", lambda: plan.exclusive_scan(grad, stack, stream=stream)
    steps = list(stack[:100])
    of_list = sparsescan.plan([Pattern.dense((8, 8))] * 100, schedule="chunked:4")
    yield "list of 100 dense steps", lambda: of_list.exclusive_scan(grad, steps)
    slopes, weights = Pattern.diagonal(8), Pattern.dense((8, 8))
    pattern = ImplicitPattern([slopes, weights], shared=[1])
    implicit = sparsescan.plan([pattern] * 30_000, schedule="chunked:4")
    values = cupy.asarray(np.ones((30_000, 4, 8))), cupy.asarray(np.ones(64))
    chain = ImplicitChain(values, pattern)
    yield "30,000 implicit steps", lambda: implicit.exclusive_scan(grad, chain)


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median of many calls of an idle device."""
    taken: list[int] = []
    while len(taken) < CALLS and sum(taken[-1:]) * len(taken) < 1e9 * SECONDS:
        fake_cupy.state.waits += 1
        begin = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begin)
    return median(taken) / 1000


def _in_turns(cupy: Any, places: int) -> Callable[..., Any]:
    """Return what makes arrays of one size, in so many places in turn: as CuPy's pool does."""
    empty = cupy.empty
    rooms: dict[Any, Iterator[Any]] = {}

    def make(shape: Any, dtype: Any) -> Any:
        if (shape, dtype) not in rooms:
            rooms[shape, dtype] = cycle([empty(shape, dtype) for _ in range(places)])
        return next(rooms[shape, dtype])

    return make


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        ptx.stand_in.install(patch)
        cupy = fake_cupy.install(patch)
        patch.setattr(_device, "launch", lambda *arguments: None)
        print(f"{microseconds(lambda: None):8.2f} µs  nothing")
        for name, call in replays(cupy):
            for _ in range(3):
                call()
            taken = []
            for places in (1, 2):
                with pytest.MonkeyPatch.context() as one:
                    one.setattr(cupy, "empty", _in_turns(cupy, places))
                    taken.append(microseconds(call))
            print("{:8.2f} and {:.2f} µs  {}".format(*taken, name))
        counts = fake_cupy.count(patch)
        for name, call in replays(cupy):
            results = [call() for _ in range(3)]
            fake_cupy.state.waits += 1
            counts.clear()
            results.append(call())
            print(f"{name}:", ", ".join(f"{what} {n}" for what, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
