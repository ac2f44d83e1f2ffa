"""``python -m bench.compare``: every line of the table in one run, contenders taking turns.

A round times each contender once more: a pause in which the threads of the one before go to sleep,
calls for as long as it takes to warm up, then some that count. A ratio is one of medians over
the rounds in which nobody else used the machine, as far as there are any; every sample is kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import chain, compress
from pathlib import Path
from statistics import median
from typing import Any

from . import machine, table1
from .contests import CONTESTS, OURS, Contest
from .peers import Call, MissingPeerError, fastest, seconds
from .startup import STARTUPS, Startup

_RESULTS = Path(__file__).parent / "results"
# OpenMP threads spin for 200 ms before they sleep, on a core that the next contender needs.
_PAUSE = 0.25
_WARM_UP = 0.2
_SECONDS_A_TURN = 0.1
# Cores that others may use in a round that counts, and how many rounds to try for one.
_QUIET = 0.15
_PATIENCE = 4
_LINE = "{:<78} {:<25} {:>10} {:>9} {:>7} {:>9} {:>7}  {}"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    machine.pin()
    rounds = 1 if options.reduced else options.rounds
    print(
        _LINE.format("work", "against", "theirs ms", "ours ms", "ratio", "(minima)", "wanted", "")
    )
    commit, dirty = machine.commit()  # now: it is what has been imported
    load = [os.getloadavg()]
    engine, missed = [], 0
    for contest in CONTESTS + table1.CONTESTS:
        if options.only in contest.name:
            engine.append(_contest(contest, rounds, options.reduced))
            missed += _print_contest(engine[-1])
    startups = []
    for name, startup in STARTUPS.items():
        if options.only in name:
            startups.append(_startup(name, startup, 1 if options.reduced else 9))
            missed += _print_startup(startups[-1])
    if options.reduced:
        print("\nOn reduced data the numbers mean nothing.")
        return 0
    load.append(os.getloadavg())
    results = {"load_before_and_after": load, "engine": engine, "startup": startups}
    path = machine.write(options.output, "cpu", "bench.compare", (commit, dirty), results)
    print(f"\n{missed} lines missed; written to {path}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.compare", description=__doc__)
    parser.add_argument("--reduced", action="store_true", help="small data, once, no file written")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (15)")
    parser.add_argument("--only", default="", metavar="TEXT", help="lines whose name contains it")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder (bench/results)")
    return parser.parse_args(arguments)


def _contest(
    contest: Contest, rounds: int, reduced: bool, patience: int = _PATIENCE
) -> dict[str, Any]:
    """All that the contenders took; up to `patience` times as many rounds if others disturb."""
    work = contest.make(reduced)
    calls: dict[str, Call] = {}
    variants, skipped = {}, {}
    for contender, make in work.contenders.items():
        try:
            made = make()
        except MissingPeerError as missing:
            skipped[contender] = str(missing)
            continue
        variants[contender], calls[contender] = fastest(made, trials=1 if reduced else 5)
        for call in made.values():
            work.check(contender, call())
    times = {name: _calls_a_turn(call) for name, call in calls.items()}
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    cores: dict[str, list[float]] = {name: [] for name in calls}
    others: list[float] = []
    while len(others) < rounds * patience and _quiet(others).count(True) < rounds:
        start, others_start = time.perf_counter(), machine.others()
        for name, call in calls.items():
            time.sleep(0 if reduced else _PAUSE)
            _warm_up(call)
            turn, cpu = time.perf_counter(), time.process_time()
            part = work.repeats.get(name, 1)
            samples[name].append([part * taken for taken in seconds(call, times[name])])
            cores[name].append((time.process_time() - cpu) / (time.perf_counter() - turn))
        others.append((machine.others() - others_start) / (time.perf_counter() - start))
    for name, call in calls.items():
        work.check(name, call())  # no call may have changed what the next one reads
    quiet = _quiet(others)
    counted = quiet if any(quiet) else [True] * len(quiet)
    kept = {name: [*chain(*compress(turns, counted))] for name, turns in samples.items()}
    medians = {name: median(kept[name]) for name in calls}
    minima = {name: min(kept[name]) for name in calls}
    floor = {
        "bytes": work.bytes,
        "bytes per second": machine.bandwidth(work.bytes),
        "flops": work.flops,
        "flops per second": machine.flop_rate(work.dtype),
    }
    floor["seconds"] = max(
        work.bytes / floor["bytes per second"], work.flops / floor["flops per second"]
    )
    return {
        "name": contest.name,
        "work": contest.work,
        "median_seconds": medians,
        "minimum_seconds": minima,
        "ratios": {
            name: {
                "required": required,
                "measured": medians[name] / medians[OURS] if name in medians else None,
                "of_minima": minima[name] / minima[OURS] if name in medians else None,
                "skipped": skipped.get(name),
            }
            for name, required in contest.required.items()
        },
        "floor": floor,
        "multiple_of_floor": medians[OURS] / floor["seconds"],
        "variants": variants,
        "parts_of_which_one_was_timed": dict(work.repeats),
        "cores_used": {name: median(compress(cores[name], counted)) for name in calls},
        "cores_others_used": others,
        "rounds_that_count": counted,
        "samples_seconds": samples,
    }


def _quiet(others: list[float]) -> list[bool]:
    return [cores < _QUIET for cores in others]


def _warm_up(call: Call) -> None:
    """Bring data back into the caches and the processor back to speed, after a pause."""
    stop = time.perf_counter() + _WARM_UP
    while time.perf_counter() < stop:
        call()


def _calls_a_turn(call: Call) -> int:
    once = min(seconds(call, 2))
    return max(1, min(100, round(_SECONDS_A_TURN / once)))


def _startup(name: str, startup: Startup, rounds: int) -> dict[str, Any]:
    startup.seconds()  # fills the cache of compiled kernels
    samples = [startup.seconds() for _ in range(rounds)]
    return {
        "name": name,
        "work": startup.what,
        "limit_seconds": startup.limit,
        "median_seconds": median(samples),
        "samples_seconds": samples,
    }


def _print_contest(result: dict[str, Any]) -> int:
    """Print the lines of a contest; how many miss what is required."""
    missed = 0
    work, medians = result["work"], result["median_seconds"]
    for peer, ratio in result["ratios"].items():
        if ratio["skipped"]:
            print(_LINE.format(work, peer, "", "", "", "", "", f"skipped: {ratio['skipped']}"))
            continue
        miss = ratio["required"] is not None and ratio["measured"] < ratio["required"]
        missed += miss
        print(
            _LINE.format(
                work,
                peer,
                f"{medians[peer] * 1e3:.3f}",
                f"{medians[OURS] * 1e3:.3f}",
                f"{ratio['measured']:.2f}×",
                f"({ratio['of_minima']:.2f}×)",
                f"{ratio['required']}×" if ratio["required"] else "",
                "MISSED" if miss else "",
            )
        )
        work = ""
    multiple = f"{result['multiple_of_floor']:.1f}×"
    floor = f"{result['floor']['seconds'] * 1e3:.3f}"
    rounds = result["rounds_that_count"]
    quiet = sum(_quiet(result["cores_others_used"]))
    note = f"of the floor; {quiet} of {len(rounds)} rounds were quiet"
    print(_LINE.format("", "the floor", floor, "", multiple, "", "", note), flush=True)
    return missed


def _print_startup(result: dict[str, Any]) -> int:
    limit, taken = result["limit_seconds"], result["median_seconds"]
    miss = taken > limit
    wanted = f"≤ {limit * 1e3:.0f}"
    note = "MISSED" if miss else ""
    print(
        _LINE.format(result["work"], "", "", f"{taken * 1e3:.0f}", "", "", wanted, note), flush=True
    )
    return int(miss)


if __name__ == "__main__":
    sys.exit(main())
