"""Sections of the report, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import page, pictures, plots
from .contests import OURS
from .experiment import Drawing, Results, Row
from .files import File
from .grid import ranked, ratios
from .page import Html, exactly, join, listed, significant, table, tag
from .resident import MIB

_TIMES = ["theirs, ms", "ours, ms"]


# -- Parts of all sections -------------------------------------------------------------------------


def origin(file: File) -> Html:
    """Return the line that says where numbers come from."""
    said = f"{file.place} · {file.day} · commit {file.commit} · "
    marks = join(" · ", state(file)) if file.marks else ""
    return tag("p", said, tag("code", file.path.name), marks, kind="soft")


def state(file: File) -> Html:
    """Say what is wrong with a run, or that it is complete."""
    return tag("span", ", ".join(file.marks), kind="warn") if file.marks else Html("complete")


def missing_peers(missing: Iterable[tuple[str, str, str]]) -> Html:
    """Return the list of missing peers, from the peer, the reason, and where it is missing."""
    places: dict[str, list[str]] = {}
    for peer, why, where in missing:
        places.setdefault(f"{peer}: {why}", []).append(where)
    said = [f"{peer} ({'; '.join(where)})" for peer, where in places.items()]
    return join(tag("p", "Missing:"), listed(said)) if said else Html("")


def row_table(rows: list[tuple[Row, str]]) -> Html:
    """Ours beside the peers, and where that was measured."""
    cells = [
        [
            *(row.work, row.peer, _ratio(row.theirs / row.ours), exactly(row.paper)),
            *(_ms(row.theirs), _ms(row.ours), where),
        ]
        for row, where in rows
    ]
    numbers = ["ratio", "the paper's", *_TIMES]
    return table(["work", "against", *numbers, "on"], cells, numbers, grouped=True)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else significant(1e3 * seconds)


def _ratio(x: float | None) -> str:
    return "" if x is None else f"{significant(x)}×"


def plain(value: Any) -> str:
    """Write a value from a JSON file for people."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {plain(x)}" for key, x in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


# -- The engine -----------------------------------------------------------------------------------


def of_engine(engine: list[tuple[File, Results]], startups: list[tuple[File, Results]]) -> Html:
    parts = [origin(file) for file in dict.fromkeys(file for file, _ in engine + startups)]
    if engine:
        parts += [page.figure(_engine_drawing([line for _, line in engine])), _contests(engine)]
    if startups:
        parts += [tag("h3", "What a new process pays"), _startups(startups)]
    return join(*parts)


def _engine_drawing(engine: list[Results]) -> Drawing:
    caption = (
        "How many times as long as ours each peer takes, on a logarithmic axis: the median of its "
        "samples, and their quartiles as a bar. Grey marks are the ratios asked for, which for "
        "Jacobian values by autograd are the paper's. Dotted lines are the floor: what must be "
        "moved and computed, at the rates measured in the same run."
    )
    return Drawing("The engine beside its peers", caption, pictures.engine(engine))


def _contests(engine: list[tuple[File, Results]]) -> Html:
    rows, missing = [], []
    for file, line in engine:
        work = join(line["work"], tag("span", f" · commit {file.commit}", kind="soft"))
        medians, ours = line["median_seconds"], line["median_seconds"][OURS]
        for peer, ratio in line["ratios"].items():
            if ratio["skipped"]:
                missing.append((peer, ratio["skipped"], line["work"]))
                continue
            asked, measured = ratio["required"], ratio["measured"]
            missed = asked is not None and measured < asked
            said = tag("span", "missed", kind="warn") if missed else ""
            times = [_ms(medians[peer]), _ms(ours)]
            rows.append([work, peer, _ratio(measured), exactly(asked), said, *times])
        floor = line["floor"]["seconds"]
        rows.append([work, "the floor", _ratio(floor / ours), "", "", _ms(floor), _ms(ours)])
    heads = ["work", "against", "ratio", "asked for", "", *_TIMES]
    shown = table(heads, rows, ["ratio", "asked for", *_TIMES], grouped=True)
    return join(shown, missing_peers(missing))


def _startups(startups: list[tuple[File, Results]]) -> Html:
    rows = [
        [line["work"], _ms(line["median_seconds"]), _ms(line["limit_seconds"]), file.commit]
        for file, line in startups
    ]
    return table(["what", "taken, ms", "limit, ms", "commit"], rows, ["taken, ms", "limit, ms"])


# -- Schedules and memory -------------------------------------------------------------------------


def of_grid(results: Results) -> Html:
    chains = results["chains"]
    right, pairs = results["pairs_in_order"]
    said = (
        f"{len(chains)} chains, each by auto and by several schedules. Of {pairs:,} pairs whose "
        f"times are a fifth or more apart, predictions rank {right:,} as the medians do"
        + (f": {right / pairs:.1%}." if pairs else ".")
    )
    picture = Drawing(
        "The schedule that auto chose",
        "Its time over that of the best schedule (left) and of the linear one (right) for each "
        "chain: the median of turns, and the quartiles of its samples as a bar. Every other turn "
        "says which is the best, the others how good it is. Below one auto is the faster; dashed "
        "lines are at 1.05 and 1.10.",
        pictures.schedules(chains),
    )
    rows = []
    for name, result in chains.items():
        medians = result["median_seconds"]
        relative = ratios(result["samples_seconds"])
        times = [_ms(medians[which]) for which in (relative["linear"], "auto", relative["best"])]
        times += [_ratio(relative[f"auto/{which}"]) for which in ("linear", "best")]
        order = "{} of {}".format(*ranked(result))
        names = [_schedule(schedule) for schedule in (result["auto is"], relative["best"])]
        rows.append([name, *times, *names, order])
    numbers = ["linear, ms", "auto, ms", "best, ms", "auto/linear", "auto/best", "in order"]
    heads = ["chain", *numbers[:5], "auto is", "best is", *numbers[5:]]
    return join(tag("p", said), page.figure(picture), table(heads, rows, numbers))


def _schedule(name: str) -> str:
    """Without what all have in common, on one line, and cut where a tree is long."""
    short = name.removeprefix("Schedule.").replace(" ", "\xa0")
    return short if len(short) <= 30 else short[:29] + "…"


def of_memory(results: Results) -> Html:
    rows = []
    for case in results["cases"]:
        sizes = [case[f"{what}_bytes"] / MIB for what in ("limit", "workspace", "taken")]
        over = "" if case["within_limit"] else tag("span", "over the limit", kind="warn")
        names = [case["chain"], _schedule(case["schedule"]), str(case["threads"])]
        rows.append([*names, *map(significant, sizes), over])
    numbers = ["threads", "limit, MiB", "counted, MiB", "taken, MiB"]
    said = (
        "Beside the Jacobians and the gradients that are returned: the limit, what the plan "
        "counts, and what planning and two runs really take at their peak."
    )
    return join(tag("p", said), table(["chain", "schedule", *numbers, ""], rows, numbers))


def of_intrinsics(results: Results) -> Html:
    """Show what code in LLVM's language gains over loops."""
    rows = []
    for case in results["intrinsics"]:
        medians = case["median_seconds"]
        times = [significant(1e6 * medians[which]) for which in ("loops", "intrinsic")]
        rows.append([case["name"], *times, _ratio(case["ratio"])])
    numbers = ["loops, µs", "LLVM's language, µs", "ratio"]
    said = "Kernels of the engine beside the same arithmetic in Numba's loops, on one thread."
    return join(tag("p", said), table(["kernel", *numbers], rows, numbers))


# -- On a GPU -------------------------------------------------------------------------------------


def of_gpu(results: Results) -> Html:
    races, parts = results["races"], results["parts"]
    shown = []
    if results["wanted"]:
        shown += [tag("h3", "What is asked for"), _wanted(results["wanted"])]
    if plots.sweep(races, "T"):
        shown.append(page.figure(Drawing(*_SWEEPS, plots.figure(races))))
    if races:
        shown += [tag("h3", "Races"), _races(races)]
    missing = [
        (peer, why, where)
        for where, peers in [
            *((what, part.get("missing", {})) for what, part in parts.items()),
            *((race["name"], race.get("skipped", {})) for race in races),
        ]
        for peer, why in peers.items()
    ]
    rows = [
        [what, _state(part), str(part.get("seconds", "")), part["summary"]]
        for what, part in parts.items()
    ]
    failed = [f"{what}: {why}" for what, part in parts.items() for why in _failures(part)]
    heads = ["part", "", "seconds", ""]
    shown += [missing_peers(missing), tag("h3", "Parts of the run"), table(heads, rows)]
    cases = [
        [what, case["name"], _state(case), case.get("why") or ""]
        for what, part in parts.items()
        for case in part.get("cases", [])
    ]
    if cases:
        shown += [tag("h3", "Cases that were compared"), table(["part", "case", "", ""], cases)]
    return join(*shown, listed(failed))


def _state(part: Results) -> Html | str:
    """Return how a part, or a case of one, has ended."""
    if part["ok"]:
        return "ok"
    if part.get("state") == "left":
        return "not run"
    return "noted" if part.get("informs") else tag("span", "failed", kind="warn")


def _failures(part: Results) -> list[str]:
    """List the tests, random chains or races of a part that failed."""
    failed = part.get("failed", [])
    failures = failed.items() if isinstance(failed, dict) else [(one,) for one in failed]
    return [": ".join(map(plain, one)) for one in failures]


_SWEEPS = (
    "Backward pass of a tanh RNN",
    "As in Figure 8 of the paper: times over the length T and the batch B, and how many times as "
    "fast as PyTorch: medians, with bars from the quartiles. The dashed line is the paper's best "
    "ratio, 108; dotted ones are the floor.",
)


def _wanted(wanted: list[Results]) -> Html:
    states = {
        True: "met",
        False: tag("span", "missed", kind="warn"),
        None: tag("span", "not measured", kind="warn"),
    }
    rows = []
    for line in wanted:
        asked = next(
            f"{sign} {exactly(line[key])}"
            for key, sign in (("at least", "≥"), ("at most", "≤"))
            if key in line
        )
        row = [line["what"], line["against"], _ratio(line["measured"]), asked]
        rows.append([*row, states[line["met"]]])
    return table(["what", "against", "measured", "asked for", ""], rows, ["measured", "asked for"])


def _races(races: list[Results]) -> Html:
    rows = []
    for race in races:
        for ratio in race["ratios"]:
            medians = race["median_seconds"].get(f"{ratio['clock']}, warm", {})
            times = [_ms(medians.get(ratio[which])) for which in ("theirs", "ours")]
            ratios = [_ratio(ratio["measured"].get(cache)) for cache in ("warm", "cold")]
            names = [ratio["theirs"], ratio["ours"], ratio["clock"]]
            rows.append([race["work"], *names, *ratios, *times])
        floor = race["floors"]["the work"]
        device = race["median_seconds"].get("device, warm", {}).get(OURS)
        over = _ratio(floor["seconds"] / device) if device else ""
        times = [_ms(floor["seconds"]), _ms(device)]
        rows.append([race["work"], "the floor", OURS, "device", over, "", *times])
    numbers = ["ratio, warm cache", "cold", *_TIMES]
    return table(["work", "against", "ours", "clock", *numbers], rows, numbers, grouped=True)
