"""Times the contenders of a contest in turns.

A round times each contender once more: a pause in which the threads of the one before go to sleep,
calls for as long as it takes to warm up, then some that count. A ratio is one of medians over
the rounds in which nobody else used the machine, as far as there are any; every sample is kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import chain, compress
from statistics import median
from typing import Any

from . import machine
from .contests import OURS, Contest, Work
from .machine import Cpu
from .peers import MissingPeerError
from .timing import PAUSE, Call, calls_in, seconds

_WARM_UP = 0.2
_SECONDS_A_TURN = 0.1
# Cores that others may use in a round that counts, and how many rounds to try for one.
_QUIET = 0.15
_PATIENCE = 4


def measure(
    contest: Contest, rounds: int, reduced: bool, patience: int = _PATIENCE
) -> dict[str, Any]:
    """All that the contenders took; up to `patience` times as many rounds if others disturb."""
    work = contest.make(reduced)
    variants: dict[str, str] = {}
    calls: dict[str, Call] = {}
    skipped: dict[str, str] = {}
    for contender in work.contenders:
        try:
            variants[contender], calls[contender] = work.variant(
                contender, Cpu(), trials=1 if reduced else 5
            )
        except MissingPeerError as missing:
            skipped[contender] = str(missing)
    samples, cores, others = _take_turns(work, calls, rounds, patience, 0 if reduced else PAUSE)
    for contender, call in calls.items():
        work.check(contender, call())  # no call may have changed what the next one reads
    calm = quiet(others)
    counted = calm if any(calm) else [True] * len(calm)
    kept = {name: counting(turns, counted) for name, turns in samples.items()}
    medians = {name: median(taken) for name, taken in kept.items()}
    floor = _floor(work)
    return {
        "name": contest.name,
        "work": contest.work,
        "median_seconds": medians,
        "minimum_seconds": {name: min(taken) for name, taken in kept.items()},
        "ratios": {
            name: {
                "required": required,
                "measured": medians[name] / medians[OURS] if name in medians else None,
                "of_minima": min(kept[name]) / min(kept[OURS]) if name in kept else None,
                "skipped": skipped.get(name),
            }
            for name, required in contest.required.items()
        },
        "floor": floor,
        "multiple_of_floor": medians[OURS] / floor["seconds"],
        "variants": variants,
        "parts_of_which_one_was_timed": dict(work.repeats),
        "cores_used": {name: median(compress(used, counted)) for name, used in cores.items()},
        "cores_others_used": others,
        "rounds_that_count": counted,
        "samples_seconds": samples,
    }


def _take_turns(
    work: Work, calls: Mapping[str, Call], rounds: int, patience: int, pause: float
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]], list[float]]:
    """By contender the samples and the cores it used in each round; the cores that others used."""
    times = {name: calls_in(_SECONDS_A_TURN, Cpu(), call, 1, 100) for name, call in calls.items()}
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    cores: dict[str, list[float]] = {name: [] for name in calls}
    others: list[float] = []
    while len(others) < rounds * patience and quiet(others).count(True) < rounds:
        start, others_start = time.perf_counter(), machine.others()
        for name, call in calls.items():
            time.sleep(pause)
            _warm_up(call)
            turn, cpu = time.perf_counter(), time.process_time()
            parts = work.repeats.get(name, 1)
            samples[name].append([parts * taken for taken in seconds(call, times[name])])
            cores[name].append((time.process_time() - cpu) / (time.perf_counter() - turn))
        others.append((machine.others() - others_start) / (time.perf_counter() - start))
    return samples, cores, others


def quiet(others: list[float]) -> list[bool]:
    """Which rounds nobody disturbed, from the cores that others used in each."""
    return [cores < _QUIET for cores in others]


def counting(turns: list[list[float]], counted: list[bool]) -> list[float]:
    """Return the samples of the rounds that count."""
    return [*chain(*compress(turns, counted))]


def _warm_up(call: Call) -> None:
    """Bring data back into the caches and the processor back to speed, after a pause."""
    stop = time.perf_counter() + _WARM_UP
    while time.perf_counter() < stop:
        call()


def _floor(work: Work) -> dict[str, float]:
    ceilings = Cpu().ceilings(work.bytes, work.dtype)
    return {
        "bytes": work.bytes,
        "bytes per second": ceilings.bytes_per_second,
        "flops": work.flops,
        "flops per second": ceilings.flops_per_second,
        "seconds": ceilings.seconds(work.bytes, work.flops),
    }
