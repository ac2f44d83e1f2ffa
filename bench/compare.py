"""``python -m bench.compare``: every line of the table in one run, contenders taking turns."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from . import contests, machine, races, table1
from .contests import CONTESTS, OURS
from .experiment import Drawing, Results, Table, as_text
from .page import exactly, significant
from .startup import STARTUPS, Startup

_FLOOR = "the floor"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.compare", description=__doc__)
    parser.add_argument("--reduced", action="store_true", help="small data, once, no file written")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (15)")
    parser.add_argument("--only", default="", metavar="TEXT", help="lines whose name contains it")
    parser.add_argument("--output", type=Path, default=machine.RESULTS, help="folder")
    options = parser.parse_args(arguments)
    machine.pin()
    rounds = 1 if options.reduced else options.rounds
    commit = machine.commit()  # now: it is what has been imported
    load = [os.getloadavg()]
    chosen = [each for each in CONTESTS + table1.CONTESTS if options.only in each.name]
    engine = [contests.measure(each, rounds, options.reduced) for each in tqdm(chosen)]
    startups = [
        _startup(name, startup, 1 if options.reduced else 9)
        for name, startup in STARTUPS.items()
        if options.only in name
    ]
    print(as_text(tables(engine, startups)))
    if options.reduced:
        print("On reduced data the numbers mean nothing.")
        return 0
    load.append(os.getloadavg())
    results = {"load_before_and_after": load, "engine": engine, "startup": startups}
    print(machine.write(options.output, "cpu", "bench.compare", commit, results))
    return 0


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


# -- What is shown --------------------------------------------------------------------------------


def tables(engine: Sequence[Results], startups: Sequence[Results]) -> list[Table]:
    """Return the lines of contests, the floor last, and what new processes pay."""
    times = ["theirs, ms", "ours, ms"]
    rows = []
    for line in engine:
        medians = line["median_seconds"]
        asked = {name: each["required"] for name, each in line["ratios"].items()}
        theirs = {name: medians[name] for name in asked if name in medians}
        for peer, taken in (theirs | {_FLOOR: line["floor"]["seconds"]}).items():
            ratio, wanted = taken / medians[OURS], asked.get(peer)
            missed = wanted is not None and ratio < wanted
            ms = [significant(1e3 * each) for each in (taken, medians[OURS])]
            said = [f"{significant(ratio)}×", exactly(wanted), "missed" * missed, *ms]
            rows.append([line["work"], peer, *said])
    numbers = ["ratio", "asked for", *times]
    lines = Table(["work", "against", "ratio", "asked for", "", *times], rows, numbers)
    heads = ["what a new process pays", "taken, ms", "limit, ms", ""]
    rows = [
        [
            line["work"],
            *(significant(1e3 * line[key]) for key in ("median_seconds", "limit_seconds")),
            "missed" * (line["median_seconds"] > line["limit_seconds"]),
        ]
        for line in startups
    ]
    return [lines, Table(heads, rows, heads[1:3])]


def drawings(engine: Sequence[Results]) -> list[Drawing]:
    """Draw how long peers take in multiples of our time."""
    pieces = {}
    for line in engine:
        wanted = {name: each["required"] for name, each in line["ratios"].items()}
        race = races.of_line(line, wanted)
        race["samples"][_FLOOR] = [line["floor"]["seconds"]]
        pieces[line["work"]] = race
    more = (
        "What is asked for Jacobian values by autograd are the paper's ratios. The floor is what "
        "must be moved and computed, at the rates measured in the same run."
    )
    return races.draw("The engine beside its peers", pieces, more)


if __name__ == "__main__":
    sys.exit(main())
