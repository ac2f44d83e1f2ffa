"""The results of a run on a GPU as lines to read, and the ratios that were asked for."""

from __future__ import annotations

from typing import Any

from .contests import OURS
from .gpu_races import AIM, CUDNN, CUDNN_GRAPH, IMPLICIT, PARAMETERS, RECORD, SLOPES, VALUES
from .plots import sweep

# At this T the engine is to be within this multiple of the floor.
FLOOR_STEPS, FLOOR_MULTIPLE = 30_000, 4

Report = dict[str, Any]


def wanted(races: list[Report]) -> list[Report]:
    """List the ratios that are asked of the engine, and those that were measured."""
    lines = []
    # With the values of the Jacobians, which cuDNN's backward pass makes for itself.
    ratios = [
        (ratio["measured"]["warm"], race["about"]["T"])
        for race in sweep(races, "T")
        for ratio in race["ratios"]
        if _is(ratio, CUDNN, VALUES) and ratio["measured"]
    ]
    if ratios:
        best, steps = max(ratios)
        what = (
            f"backward of a tanh RNN: {VALUES}, at the best T that was run, {steps:,} "
            f"({RECORD}× is the paper's best, our aim is {AIM}×)"
        )
        lines.append(_wanted(what, CUDNN, best, RECORD))
    for race in sweep(races, "T"):
        if race["about"]["T"] == FLOOR_STEPS:
            multiple = race["floors"]["the work"]["multiple"]["device, warm"][OURS]
            what = f"time over that of the floor, {race['work']}"
            lines.append(_wanted(what, "the floor", multiple, FLOOR_MULTIPLE, at_most=True))
    for race in races:
        for ratio in race["ratios"]:
            if ratio["required"] is not None:
                measured = ratio["measured"].get("warm")
                lines.append(_wanted(race["work"], ratio["theirs"], measured, ratio["required"]))
                lines[-1]["skipped"] = ratio["skipped"]
    return lines


def _is(ratio: Report, theirs: str, ours: str) -> bool:
    """Whether a ratio is that of two contenders by the time of a call."""
    return (ratio["theirs"], ratio["ours"], ratio["clock"]) == (theirs, ours, "call")


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


def table(races: list[Report]) -> list[str]:
    """Return the lines to print."""
    heads = (
        "T B cuDNN graphed ours +values implicit +slopes ratio +values implicit /graphed +params "
        "device floor ×warm ×cold"
    )
    row = "{:>6} {:>4} {:>9} {:>9}" + 11 * " {:>8}" + 2 * " {:>6}"
    lines = [
        "",
        "Backward of a tanh RNN, H=20, float32: milliseconds with launches, and theirs over ours;",
        "then ours without launches, the floor, and our multiple of it with a warm and a cold L2.",
        row.format(*heads.split()),
    ]
    for race in [*sweep(races, "T"), *sweep(races, "B")]:
        calls = race["median_seconds"]["call, warm"]
        floor = race["floors"]["the work"]
        params = [r for r in races if r["name"] == race["name"].replace("rnn", "rnn parameters")]
        lines.append(
            row.format(
                *race["about"].values(),
                *(
                    _ms(calls.get(name))
                    for name in (CUDNN, CUDNN_GRAPH, OURS, VALUES, IMPLICIT, SLOPES)
                ),
                _times(race, CUDNN, OURS),
                _times(race, CUDNN, VALUES),
                _times(race, CUDNN, IMPLICIT),
                _times(race, CUDNN_GRAPH, OURS),
                _times(params[0], CUDNN, PARAMETERS) if params else "-",
                _ms(race["median_seconds"]["device, warm"][OURS]),
                _ms(floor["seconds"]),
                *(
                    f"{floor['multiple'][mode][OURS]:.1f}" if mode in floor["multiple"] else "-"
                    for mode in ("device, warm", "device, cold")
                ),
            )
        )
    lines += [
        "",
        "The others: theirs over ours by the clock that is named, with a warm and a cold L2.",
    ]
    for race in races:
        if race["name"].startswith("rnn"):
            continue
        lines.append(race["work"])
        for ratio in race["ratios"]:
            measured = ", ".join(f"{x:.2f}× {cache}" for cache, x in ratio["measured"].items())
            times, theirs = _both_times(race, ratio), ratio["theirs"]
            lines.append(
                f"    {theirs + mark(race, theirs):<30} {ratio['clock']:<6} {times:<24} "
                f"{measured or 'skipped: ' + str(ratio['skipped'])}"
            )
        floor = race["floors"]["the work"]
        multiples = [
            f"{of[OURS]:.1f}× {mode}" for mode, of in floor["multiple"].items() if OURS in of
        ]
        lines.append(f"    the floor, {_ms(floor['seconds'])} ms: {'; '.join(multiples)}")
    lines += ["", *notes(races), "", "Wanted:"]
    for line in wanted(races):
        bound = f"≥ {line['at least']}" if "at least" in line else f"≤ {line['at most']}"
        measured = "not measured" if line["measured"] is None else f"{line['measured']:.2f}×"
        state = {True: "met", False: "MISSED", None: "OPEN"}[line["met"]]
        lines.append(f"    {state:<7} {measured:>12}, {bound:<6} {line['against']}: {line['what']}")
    return lines


def mark(race: Report, contender: str) -> str:
    """Return what stands behind the name of a contender that waits for the device."""
    return "*" if contender in race.get("waits_inside", ()) else ""


def notes(races: list[Report]) -> list[str]:
    """Say what the marks mean, and what contenders do beside the work."""
    said = [f"{name} {note}." for race in races for name, note in race.get("notes", {}).items()]
    marked = any(race.get("waits_inside") for race in races)
    star = ["* waits for the device inside, so that its device time has its launches too."] * marked
    told = dict.fromkeys(said)
    # What a longer note begins with is said there.
    return [*star, *(n for n in told if not any(m != n and m.startswith(n[:-1]) for m in told))]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _times(race: Report, theirs: str, ours: str) -> str:
    for ratio in race["ratios"]:
        if _is(ratio, theirs, ours) and ratio["measured"]:
            return f"{ratio['measured']['warm']:.1f}×{mark(race, theirs)}"
    return "-"


def _both_times(race: Report, ratio: Report) -> str:
    medians = race["median_seconds"][f"{ratio['clock']}, warm"]
    return " : ".join(_ms(medians.get(ratio[name])) for name in ("theirs", "ours")) + " ms"
