"""``python -m bench.compare``: every line of the table in one run, contenders taking turns."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from . import machine, table1, turns
from .contests import CONTESTS, OURS
from .startup import STARTUPS, Startup

_LINE = "{:<78} {:<25} {:>10} {:>9} {:>7} {:>9} {:>7}  {}"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    machine.pin()
    rounds = 1 if options.reduced else options.rounds
    heads = "work", "against", "theirs ms", "ours ms", "ratio", "(minima)", "wanted", ""
    print(_LINE.format(*heads))
    commit = machine.commit()  # now: it is what has been imported
    load = [os.getloadavg()]
    engine, missed = [], 0
    for contest in CONTESTS + table1.CONTESTS:
        if options.only in contest.name:
            engine.append(turns.measure(contest, rounds, options.reduced))
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
    path = machine.write(options.output, "cpu", "bench.compare", commit, results)
    print(f"\n{missed} lines missed; written to {path}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.compare", description=__doc__)
    parser.add_argument("--reduced", action="store_true", help="small data, once, no file written")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (15)")
    parser.add_argument("--only", default="", metavar="TEXT", help="lines whose name contains it")
    parser.add_argument(
        "--output", type=Path, default=machine.RESULTS, help="folder (bench/results)"
    )
    return parser.parse_args(arguments)


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
    quiet = sum(turns.quiet(result["cores_others_used"]))
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
