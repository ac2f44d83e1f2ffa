"""How calls are timed: in turns, warm, in rounds in which nobody else used the cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

Call = Callable[[], Any]

THREADS = 2
# OpenMP threads spin for 200 ms before they sleep, on a core that the next contender needs.
PAUSE = 0.25
# Cores that others may use in a round that counts.
_QUIET = 0.15
# A pause ends once all threads of this process sleep.
_LOOK, _ASLEEP = 0.002, 0.25


@dataclass(frozen=True)
class Ceilings:
    """The best rates that were measured on a device."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, moved: int, flops: int) -> float:
        """Return the floor: the longer of moving so many bytes and computing so many FLOPs."""
        return max(moved / self.bytes_per_second, flops / self.flops_per_second)


# -- Calls ----------------------------------------------------------------------------------------


def seconds(call: Call, times: int) -> list[float]:
    """Time each of some calls, after one that is not timed."""
    call()
    return [_timed(call) for _ in range(times)]


def call_for(call: Call, length: float, before: Call | None = None) -> list[float]:
    """Time each of as many calls as fit, at least one; what runs `before` each is not timed."""
    samples: list[float] = []
    while not samples or sum(samples) < length:
        if before is not None:
            before()
        samples.append(_timed(call))
    return samples


def _timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fastest(variants: Mapping[str, Call], trials: int = 3) -> tuple[str, Call]:
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
    """Return how many calls take so many seconds, within bounds."""
    once = min(seconds(partial(finished, device, call), 2))
    return max(fewest, min(most, round(length / once)))


def rounded(samples: list[float]) -> list[float]:
    """Round samples to the nanosecond, which makes files shorter."""
    return [round(taken, 9) for taken in samples]


# -- Rounds ---------------------------------------------------------------------------------------


def take_rounds(run: Callable[[list[float]], Any], rounds: int, patience: int = 1) -> list[float]:
    """Run quiet rounds, up to `patience` times as many if others disturb.

    Each is given how many cores others used in those before; that of all is returned.
    """
    used: list[float] = []
    while len(used) < rounds * patience and sum(quiet(used)) < rounds:
        start, before = time.perf_counter(), others()
        run(used)
        used.append((others() - before) / (time.perf_counter() - start))
    return used


def take_turns(
    calls: Mapping[str, Call], rounds: int, pause: float, turn: float
) -> tuple[dict[str, list[float]], list[float]]:
    """Time calls in turns of so many seconds; return samples, and the cores that others used.

    Before its turn each has a pause, and warms up for as long.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def take(_: list[float]) -> None:
        for name, call in calls.items():
            time.sleep(pause)
            call_for(call, turn)
            samples[name] += rounded(call_for(call, turn))

    return samples, take_rounds(take, rounds)


def quiet(used: Sequence[float]) -> list[bool]:
    """Return which rounds nobody disturbed, from the cores that others used in each."""
    return [cores < _QUIET for cores in used]


def that_count(used: Sequence[float]) -> list[bool]:
    """Return which rounds count: the quiet ones, or all if there are none."""
    calm = quiet(used)
    return calm if any(calm) else [True] * len(calm)


def counting(turns: Sequence[Any], counted: Sequence[bool]) -> list[Any]:
    """Return the turns of rounds that count, without those that were left out; else all."""
    kept = [taken for taken in compress(turns, counted) if taken is not None]
    return kept or [taken for taken in turns if taken is not None]


def sleep() -> None:
    """Wait until all threads of this process sleep, as those of the contender before soon do."""
    stop = time.perf_counter() + PAUSE
    while time.perf_counter() < stop:
        cpu = time.process_time()
        time.sleep(_LOOK)
        if time.process_time() - cpu < _ASLEEP * _LOOK:
            return


def others() -> float:
    """CPU seconds since an arbitrary moment, on all CPUs, that this process did not use.

    Other processes used them, or the host of a virtual machine took them; 0 where Linux does not
    say.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
