"""What a run on a GPU has found: the ratios that were asked for, tables, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from . import races
from .contests import OURS
from .experiment import Drawing, Table
from .files import ended
from .gpu_races import AIM, CUDNN, RECORD, VALUES
from .page import exactly, significant

# At this T the engine is to be within this multiple of the floor.
FLOOR_STEPS, FLOOR_MULTIPLE = 30_000, 4
# Words of the table of races.
WORDS = {
    "call": "the time of one call, from an idle device until its work is done, with all launches",
    "device": "the time of the work alone, which begins when all of it has been launched",
    "cold": "the ratio where the L2 cache was filled with other data before each call; none where "
    "the input is larger than the cache",
    "with values": "ours makes the values of the Jacobians in the call, as cuDNN's backward pass "
    "does; otherwise they are there before it",
    "implicit": "ours writes no Jacobian: each is made from weights and slopes where it is used; "
    "with slopes, these are made in the call, too",
    "the floor": "the time to move and compute what must be, at rates measured in the same run",
}

Report = dict[str, Any]


def sweep(every: Sequence[Report], axis: str) -> list[Report]:
    """Return the races against PyTorch along T (B=16) or B (T=1,000), to the first state."""
    other, fixed = ("B", 16) if axis == "T" else ("T", 1000)
    along = [
        race
        for race in every
        if race["name"].startswith("rnn T=") and race["about"][other] == fixed
    ]
    return sorted(along, key=lambda race: race["about"][axis])


# -- What is asked --------------------------------------------------------------------------------


def wanted(every: Sequence[Report]) -> list[Report]:
    """List the ratios that are asked of the engine, and those that were measured."""
    lines = []
    # With the values of the Jacobians, which cuDNN's backward pass makes for itself.
    ratios = [
        (ratio["measured"]["warm"], race["about"]["T"])
        for race in sweep(every, "T")
        for ratio in race["ratios"]
        if (ratio["theirs"], ratio["ours"], ratio["clock"]) == (CUDNN, VALUES, "call")
        and ratio["measured"]
    ]
    if ratios:
        best, steps = max(ratios)
        what = (
            f"backward of a tanh RNN: {VALUES}, at the best T that was run, {steps:,} "
            f"({RECORD}× is the paper's best, our aim is {AIM}×)"
        )
        lines.append(_wanted(what, CUDNN, best, RECORD))
    for race in sweep(every, "T"):
        if race["about"]["T"] == FLOOR_STEPS:
            multiple = race["floors"]["the work"]["multiple"]["device, warm"][OURS]
            what = f"time over that of the floor, {race['work']}"
            lines.append(_wanted(what, "the floor", multiple, FLOOR_MULTIPLE, at_most=True))
    for race in every:
        for ratio in race["ratios"]:
            if ratio["required"] is not None:
                measured = ratio["measured"].get("warm")
                lines.append(_wanted(race["work"], ratio["theirs"], measured, ratio["required"]))
                lines[-1]["skipped"] = ratio["skipped"]
    return lines


def _wanted(
    what: str, against: str, measured: float | None, required: float, *, at_most: bool = False
) -> Report:
    met = None
    if measured is not None:
        met = measured <= required if at_most else measured >= required
    return {
        "what": what,
        "against": against,
        "measured": measured,
        "at most" if at_most else "at least": required,
        "met": met,
    }


# -- Tables ---------------------------------------------------------------------------------------


def tables(every: Sequence[Report], parts: dict[str, Report]) -> list[Table]:
    """Return what was asked for, the races, and how parts of the run ended."""
    states = {True: "met", False: "MISSED", None: "not measured"}
    asked = [
        [line["what"], line["against"], states[line["met"]], _ratio(line["measured"]), bound]
        for line in wanted(every)
        for bound in [
            f"{sign} {exactly(line[key])}"
            for key, sign in (("at least", "≥"), ("at most", "≤"))
            if key in line
        ]
    ]
    ended_parts = [
        [what, ended(part), part["summary"], str(part.get("seconds", ""))]
        for what, part in parts.items()
    ]
    failures = [
        [what, why]
        for what, part in parts.items()
        for why in [*_failures(part), *map(": ".join, part.get("missing", {}).items())]
    ]
    cases = [
        [what, case["name"], ended(case), case.get("why") or ""]
        for what, part in parts.items()
        for case in part.get("cases", [])
    ]
    races_heads = ["work", "against", "clock", "ratio", "cold", "theirs, ms", "ours, ms", ""]
    return [
        Table(["asked for", "against", "state", "measured", "bound"], asked, ["measured", "bound"]),
        Table(races_heads, list(_races(every)), races_heads[3:7]),
        Table(["remarks"], [[note] for note in notes(every)], []),
        Table(["part of the run", "state", "summary", "seconds"], ended_parts, ["seconds"]),
        Table(["failed or missing", "why"], failures, []),
        Table(["compared", "case", "state", "why"], cases, []),
    ]


def _failures(part: Report) -> list[str]:
    """List the tests, random chains or races of a part that failed."""
    failed = part.get("failed", [])
    if isinstance(failed, dict):
        return list(map(": ".join, failed.items()))
    return [one if isinstance(one, str) else "; ".join(map(str, one.values())) for one in failed]


def _races(every: Sequence[Report]) -> Iterator[list[str]]:
    """Yield theirs over ours by each clock, and the floor over ours."""
    for race in every:
        medians = race["median_seconds"]
        for ratio in race["ratios"]:
            taken = medians.get(f"{ratio['clock']}, warm", {})
            times = [_ms(taken.get(ratio[which])) for which in ("theirs", "ours")]
            ratios = [_ratio(ratio["measured"].get(cache)) for cache in ("warm", "cold")]
            star = "*" * (ratio["theirs"] in race.get("waits_inside", ()))
            names = [_beside(ratio["theirs"] + star, ratio["ours"]), ratio["clock"]]
            yield [race["work"], *names, *ratios, *times, ratio["skipped"] or ""]
        floor = race["floors"]["the work"]["seconds"]
        taken = medians["device, warm"]
        ours = next((name for name in taken if name.startswith(OURS)), OURS)
        over = _ratio(floor / taken[ours]) if ours in taken else ""
        times = [_ms(floor), _ms(taken.get(ours))]
        yield [race["work"], _beside("the floor", ours), "device", over, "", *times, ""]


def _beside(peer: str, ours: str) -> str:
    """Name a peer, and what ours does beside the scan."""
    more = ours.removeprefix(OURS).removeprefix(", ")
    return f"{peer} · ours {more}" if more else peer


def notes(every: Sequence[Report]) -> list[str]:
    """Say what the marks mean, and what contenders do beside the work."""
    said = [f"{name} {note}." for race in every for name, note in race.get("notes", {}).items()]
    marked = any(race.get("waits_inside") for race in every)
    star = [
        "* waits for the device inside, or launches for more than 20 ms, so that its device time "
        "has launches too."
    ] * marked
    return [*star, *dict.fromkeys(said)]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else significant(1e3 * seconds)


def _ratio(x: float | None) -> str:
    return "" if x is None else f"{significant(x)}×"


# -- The picture ----------------------------------------------------------------------------------


def drawings(every: Sequence[Report]) -> list[Drawing]:
    """Draw the sweeps over T and B, as in Figure 8 of the paper, if any were run."""
    pieces = {
        race["work"]: {
            "samples": {name: [*chain(*turns)] for name, turns in taken.items()},
            "wanted": {CUDNN: RECORD},
        }
        for race in [*sweep(every, "T"), *sweep(every, "B")]
        if OURS in (taken := race["samples_seconds"]["call, warm"])
    }
    more = f"Launches are included. What is aimed at is the paper's best ratio, {RECORD}."
    return races.draw("Backward pass of a tanh RNN", pieces, more)
