"""The engine beside SciPy, MKL, NumPy and JAX: every line of the table, contenders taking turns.

Beside them is what a new process pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from statistics import median

from . import contests, races, table1
from .contests import CONTESTS, OURS
from .experiment import Drawing, Experiment, Piece, Results, Row, Table
from .page import exactly, significant
from .startup import STARTUPS, Startup

_FLOOR = "the floor"
# Turns of each contender, and of new processes.
_ROUNDS, _STARTS = 15, 9


def _pieces(quick: bool) -> Iterable[Piece]:
    for contest in CONTESTS + table1.CONTESTS:
        run = partial(contests.measure, contest, 1 if quick else _ROUNDS, quick)
        yield Piece(contest.name, run)
    for name, startup in STARTUPS.items():
        yield Piece(name, partial(_startup, name, startup, 1 if quick else _STARTS))


def _startup(name: str, startup: Startup, rounds: int) -> Results:
    startup.seconds()  # fills the cache of compiled kernels
    samples = [startup.seconds() for _ in range(rounds)]
    return {
        "name": name,
        "work": startup.what,
        "limit_seconds": startup.limit,
        "median_seconds": median(samples),
        "samples_seconds": samples,
    }


def _about(quick: bool) -> Results:
    return {"rounds": 1 if quick else _ROUNDS, _FLOOR: "what must be moved and computed"}


# -- What is shown --------------------------------------------------------------------------------


def _lines(results: Results, key: str = "ratios") -> list[Results]:
    return [line for line in results["pieces"].values() if key in line]


def _rows(results: Results) -> list[Row]:
    return [
        Row(line["work"], peer, medians[peer], medians[OURS])
        for line in _lines(results)
        for medians in (line["median_seconds"],)
        for peer in line["ratios"]
        if peer in medians
    ]


def _tables(results: Results) -> list[Table]:
    """Return what is asked of contests, the floor last, and what new processes pay."""
    asked = {
        (line["work"], peer): ratio["required"]
        for line in _lines(results)
        for peer, ratio in line["ratios"].items()
    }
    floors = [
        Row(line["work"], _FLOOR, line["floor"]["seconds"], line["median_seconds"][OURS])
        for line in _lines(results)
    ]
    rows = []
    for row in [*_rows(results), *floors]:
        ratio, wanted = row.theirs / row.ours, asked.get((row.work, row.peer))
        said = [f"{significant(ratio)}×", exactly(wanted)]
        said.append("missed" * (wanted is not None and ratio < wanted))
        said += [significant(1e3 * taken) for taken in (row.theirs, row.ours)]
        rows.append([row.work, row.peer, *said])
    numbers = ["ratio", "asked for", "theirs, ms", "ours, ms"]
    heads = ["work", "against", *numbers[:2], "", *numbers[2:]]
    paid = ["what a new process pays", "taken, ms", "limit, ms", ""]
    starts = [
        [
            line["work"],
            *(significant(1e3 * line[key]) for key in ("median_seconds", "limit_seconds")),
            "missed" * (line["median_seconds"] > line["limit_seconds"]),
        ]
        for line in _lines(results, "limit_seconds")
    ]
    return [Table(heads, rows, numbers), Table(paid, starts, paid[1:3])]


def _drawings(results: Results) -> list[Drawing]:
    """Draw how long peers take in multiples of our time."""
    pieces = {}
    for line in _lines(results):
        wanted = {name: each["required"] for name, each in line["ratios"].items()}
        race = races.of_line(line, wanted)
        race["samples"][_FLOOR] = [line["floor"]["seconds"]]
        pieces[line["work"]] = race
    more = (
        "What is asked for Jacobian values by autograd are the paper's ratios. The floor is what "
        "must be moved and computed, at the rates measured in the same run."
    )
    return races.draw("The engine beside its peers", pieces, more)


EXPERIMENT = Experiment("engine", "The engine", _pieces, _about, _drawings, _rows, _tables)
