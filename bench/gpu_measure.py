"""Races on a GPU: contenders for one piece of work take turns in one run, by device events."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

from .contests import OURS, Work
from .timing import Call, Ceilings, calls_in, rounded

ROUNDS = 3
# See :meth:`~bench.gpu_device.Cuda.samples`.
_CLOCKS = "call", "device"
# Seconds that a contender's turn is meant to take, and how many calls it may be.
_SECONDS_A_TURN = 0.03
_FEWEST, _MOST = 2, 30


@dataclass(frozen=True)
class Ratio:
    """The time of a contender over that of ours, by one of the clocks; at least `required`."""

    theirs: str
    ours: str = OURS
    clock: str = "call"
    required: float | None = None


@dataclass(frozen=True, kw_only=True)
class Race(Work):
    """A piece of work and what is asked of our time for it."""

    name: str
    work: str  # in words
    about: Mapping[str, int] = field(default_factory=dict)  # the sizes that a sweep varies
    ratios: tuple[Ratio, ...]  # the lines of the table
    # Bytes of the input; the calls are timed with a cold cache as well if it would hold them.
    size: int
    # Floors beside that of the work, ``(bytes, flops)``: of one way to do it.
    floors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # Remarks on a contender, by its name: work that it does beside what is asked for.
    notes: Mapping[str, str] = field(default_factory=dict)


def measure(
    race: Race, gpu: Any, ceilings: Ceilings, broken: dict[str, str], rounds: int = ROUNDS
) -> dict[str, Any]:
    """Run a race; what it gave, and why contenders were skipped.

    A peer that fails, or is missing, goes into `broken` and is not tried again.
    Under "captures" is how often graphs of our launches were captured, or why they were not.
    """
    captured_before = _captures()
    calls, variants = race.start(gpu, 3, broken)
    waiting = [name for name, call in calls.items() if gpu.waits_inside(call)]
    samples = _take_turns(race, gpu, calls, rounds)
    medians = {
        mode: {name: median(chain(*taken)) for name, taken in turns.items()}
        for mode, turns in samples.items()
    }
    floors = {"the work": (race.bytes, race.flops), **race.floors}
    captures, notes = _captures() - captured_before, dict(race.notes)
    if failed := [reason for reason in captures if reason != "captured"]:
        notes[OURS] = f"launches kernels one by one, as no graph was captured: {'; '.join(failed)}"
    return {
        "name": race.name,
        "work": race.work,
        "about": dict(race.about),
        "input_bytes": race.size,
        "median_seconds": medians,
        "ratios": [_ratio(ratio, medians, broken) for ratio in race.ratios],
        "floors": {name: _floor(*work, medians, ceilings) for name, work in floors.items()},
        "variants": variants,
        "waits_inside": waiting,
        "captures": dict(captures),
        "notes": notes,
        "skipped": {name: reason for name, reason in broken.items() if name in race.contenders},
        "samples_seconds": samples,
    }


def _captures() -> Counter[str]:
    """Return how captures of our launches have ended so far, in any workspace on a device."""
    engine = sys.modules.get("sparsescan.execution.cuda.workspace")
    return Counter() if engine is None else Counter(engine.DeviceWorkspace.captures)


def _take_turns(
    race: Race, gpu: Any, calls: Mapping[str, Call], rounds: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Return samples by clock and state of the cache, of each contender and round."""
    times = {
        name: calls_in(_SECONDS_A_TURN, gpu, call, _FEWEST, _MOST) for name, call in calls.items()
    }
    caches = ("warm", "cold") if race.size <= gpu.cache else ("warm",)
    samples: dict[str, dict[str, list[list[float]]]] = {
        f"{clock}, {cache}": {name: [] for name in calls} for clock in _CLOCKS for cache in caches
    }
    for _ in range(rounds):
        for mode, turns in samples.items():
            clock, cache = mode.split(", ")
            for name, call in calls.items():
                turn = gpu.samples(call, times[name], clock, cache == "cold")
                turns[name].append(rounded(turn))
    return samples


def _ratio(
    ratio: Ratio, medians: dict[str, dict[str, float]], skipped: dict[str, str]
) -> dict[str, Any]:
    """Theirs over ours in each state of the cache; what is required goes by the warm one."""
    measured = {
        mode.split(", ")[1]: of[ratio.theirs] / of[ratio.ours]
        for mode, of in medians.items()
        if mode.startswith(ratio.clock) and ratio.theirs in of and ratio.ours in of
    }
    reasons = [skipped[name] for name in (ratio.theirs, ratio.ours) if name in skipped]
    return {
        "theirs": ratio.theirs,
        "ours": ratio.ours,
        "clock": ratio.clock,
        "required": ratio.required,
        "measured": measured,
        "skipped": "; ".join(reasons) or None,
    }


def _floor(
    moved: int, flops: int, medians: dict[str, dict[str, float]], ceilings: Ceilings
) -> dict[str, Any]:
    """Return the floor, and which multiple of it each contender of ours takes in each mode."""
    least = ceilings.seconds(moved, flops)
    multiples = {
        mode: {name: taken / least for name, taken in of.items() if name.startswith(OURS)}
        for mode, of in medians.items()
    }
    return {"bytes": moved, "flops": flops, "seconds": least, "multiple": multiples}
