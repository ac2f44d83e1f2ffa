"""How calls are timed, and how long they must take at least."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Call = Callable[[], Any]

THREADS = 2
# OpenMP threads spin for 200 ms before they sleep, on a core that the next contender needs.
PAUSE = 0.25


@dataclass(frozen=True)
class Ceilings:
    """The best rates that were measured on a device."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, moved: int, flops: int) -> float:
        """Return the floor: the longer of moving so many bytes and computing so many FLOPs."""
        return max(moved / self.bytes_per_second, flops / self.flops_per_second)


def seconds(call: Call, times: int) -> list[float]:
    """How long each of some calls takes, after one that is not timed."""
    call()
    samples = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def fastest(variants: dict[str, Call], trials: int = 3) -> tuple[str, Call]:
    """Return the variant with the shortest call, and its name; the first one without trials."""
    if len(variants) == 1 or trials == 0:
        return next(iter(variants.items()))
    return min(variants.items(), key=lambda item: min(seconds(item[1], trials)))


def finished(device: Any, call: Call) -> Any:
    """Call, and wait until the device is idle; what the call returned."""
    result = call()
    device.synchronize()
    return result


def calls_in(length: float, device: Any, call: Call, fewest: int, most: int) -> int:
    """How many calls take so many seconds, within bounds."""
    once = min(seconds(partial(finished, device, call), 2))
    return max(fewest, min(most, round(length / once)))


def rounded(samples: list[float]) -> list[float]:
    """Round samples to the nanosecond, which makes files shorter."""
    return [round(taken, 9) for taken in samples]
