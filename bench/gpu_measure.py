"""Races on a GPU: contenders for one piece of work take turns in one run, by device events."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from .contests import OURS, Work
from .peers import Call, MissingPeerError, fastest, seconds

ROUNDS = 3
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
    """A piece of work and what is asked of our time for it.

    Attributes
    ----------
    name, work : str
        In short, and in words.
    about : dict
        The sizes that a sweep varies.
    ratios : tuple of Ratio
        The lines of the table.
    size : int
        Bytes of the input; the calls are timed with a cold cache as well if it would hold them.
    floors : dict
        Floors beside ``(bytes, flops)``: of one way to do the work.
    clocks : tuple
        Which clocks are read; see :meth:`~bench.gpu_device.Cuda.samples`.
    """

    name: str
    work: str
    about: Mapping[str, int] = field(default_factory=dict)
    ratios: tuple[Ratio, ...]
    size: int
    floors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    clocks: tuple[str, ...] = ("call", "device")


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do at best."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, moved: int, flops: int) -> float:
        """How long that takes at least: the longer of the two."""
        return max(moved / self.bytes_per_second, flops / self.flops_per_second)


def measure(
    race: Race, gpu: Any, ceilings: Ceilings, broken: dict[str, str], rounds: int = ROUNDS
) -> dict[str, Any]:
    """Run a race; what a contender that did not start said.

    A peer that fails, other than by not being there, goes into `broken` and is not tried again.
    """
    calls: dict[str, Call] = {}
    variants, skipped = {}, dict(broken)
    for contender, make in race.contenders.items():
        if contender in broken:
            continue
        try:
            options = make()
            name, _ = fastest({key: partial(_done, gpu, call) for key, call in options.items()})
            result = options[name]()
        except MissingPeerError as missing:
            skipped[contender] = str(missing)
            continue
        except Exception as error:
            if contender.startswith(OURS):
                raise
            traceback.print_exc()
            broken[contender] = skipped[contender] = f"{type(error).__name__}: {error}"[:200]
            continue
        race.check(contender, result)
        calls[contender], variants[contender] = options[name], name
    times = {name: _calls_a_turn(partial(_done, gpu, call)) for name, call in calls.items()}
    caches = ("warm", "cold") if race.size <= gpu.cache else ("warm",)
    samples: dict[str, dict[str, list[list[float]]]] = {
        f"{clock}, {cache}": {name: [] for name in calls}
        for clock in race.clocks
        for cache in caches
    }
    for _ in range(rounds):
        for mode, turns in samples.items():
            clock, cache = mode.split(", ")
            for name, call in calls.items():
                turns[name].append(gpu.samples(call, times[name], clock, cache == "cold"))
    medians = {
        mode: {name: median(chain(*turns[name])) for name in calls}
        for mode, turns in samples.items()
    }
    return {
        "name": race.name,
        "work": race.work,
        "about": dict(race.about),
        "input_bytes": race.size,
        "median_seconds": medians,
        "ratios": [_ratio(ratio, medians, skipped) for ratio in race.ratios],
        "floors": {
            name: _floor(moved, flops, medians, ceilings)
            for name, (moved, flops) in {
                "the work": (race.bytes, race.flops),
                **race.floors,
            }.items()
        },
        "variants": variants,
        "skipped": {name: reason for name, reason in skipped.items() if name in race.contenders},
        "samples_seconds": {
            mode: {name: [[round(s, 9) for s in turn] for turn in turns[name]] for name in calls}
            for mode, turns in samples.items()
        },
    }


def _done(gpu: Any, call: Call) -> Any:
    result = call()
    gpu.synchronize()
    return result


def _calls_a_turn(call: Call) -> int:
    return max(_FEWEST, min(_MOST, round(_SECONDS_A_TURN / min(seconds(call, 2)))))


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
    """The floor, and which multiple of it each contender of ours takes in each mode."""
    least = ceilings.seconds(moved, flops)
    multiples = {
        mode: {name: taken / least for name, taken in of.items() if name.startswith(OURS)}
        for mode, of in medians.items()
    }
    return {"bytes": moved, "flops": flops, "seconds": least, "multiple": multiples}
