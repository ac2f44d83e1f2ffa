"""Sections of the report, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import gpu_table, page, pictures, plots
from .contests import OURS
from .experiment import Drawing, Results, Row
from .files import File, ended, together
from .gpu_races import STEPS
from .gpu_table import wanted
from .grid import ranked, ratios
from .page import Html, exactly, join, listed, significant, table, tag
from .resident import MIB

_TIMES = ["theirs, ms", "ours, ms"]


# -- Parts of all sections -------------------------------------------------------------------------


def origin(file: File) -> Html:
    """Return the line that says where numbers come from."""
    said = f"{file.place} · {file.day} · commit {file.commit} · "
    marks = join(" · ", state(file)) if file.marks or file.only else ""
    return tag("p", said, tag("code", file.path.name), marks, kind="soft")


def state(file: File) -> Html:
    """Say what is wrong with a run, or that it is complete; and which parts it has, if not all."""
    said = tag("span", ", ".join(file.marks), kind="warn") if file.marks else Html("complete")
    return join(said, " · ", tag("code", file.only, kind="tight")) if file.only else said


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


def of_gpu(files: list[File]) -> Html:
    """Show runs; calls with the parts of one run are shown as one."""
    runs = together(files)
    shown = []
    for run in runs:
        if len(runs) > 1:
            shown.append(tag("h3", f"On {run[0].place}, commit {run[0].commit}"))
        head = "h4" if len(runs) > 1 else "h3"
        races = {race["name"]: race for file in run for race in file.results["races"]}
        parts = {what: part for file in run for what, part in file.results["parts"].items()}
        shown += [*map(origin, run), _gpu_run([*races.values()], parts, head)]
    return join(*shown)


def _gpu_run(races: list[Results], parts: dict[str, Results], head: str) -> Html:
    """Show what a run has found, below headings of this level."""
    shown = []
    if asked := wanted(races):
        shown += [tag(head, "What is asked for"), _wanted(asked)]
    if plots.sweep(races, "T"):
        shown.append(page.figure(Drawing(*_SWEEPS, plots.figure(races))))
    if races:
        shown += [tag(head, "Races"), _words(), _races([r for r in races if not _of_sizes(r)])]
    if sizes := [race for race in races if _of_sizes(race)]:
        summary = tag("summary", f"The RNN in other sizes: {len(sizes)} races")
        shown.append(tag("details", summary, _races(sizes)))
    if notes := gpu_table.notes(races):
        shown += [tag("p", "Remarks:"), listed(notes)]
    missing = [
        (peer, why, where)
        for where, peers in [
            *((what, part.get("missing", {})) for what, part in parts.items()),
            *((race["name"], race.get("skipped", {})) for race in races),
        ]
        for peer, why in peers.items()
    ]
    rows = [
        [what, _state(part), part["summary"], str(part.get("seconds", ""))]
        for what, part in parts.items()
    ]
    heads = ["part", "state", "summary", "seconds"]
    shown += [missing_peers(missing), tag(head, "Parts of the run"), table(heads, rows, heads[3:])]
    if failed := [f"{what}: {why}" for what, part in parts.items() for why in _failures(part)]:
        shown += [tag(head, "Failures"), listed(failed)]
    cases = [
        [what, case["name"], _state(case), case.get("why") or ""]
        for what, part in parts.items()
        for case in part.get("cases", [])
    ]
    if cases:
        heads = ["part", "case", "state", "why"]
        shown += [tag(head, "Cases that were compared"), table(heads, cases, grouped=True)]
    return join(*shown)


def _state(part: Results) -> Html:
    """Return how a part, or a case of one, has ended."""
    how = ended(part)
    bad = how in ("failed", "cut off")
    return tag("span", how, kind="warn tight" if bad else "tight")


def _failures(part: Results) -> list[str]:
    """List the tests, random chains or races of a part that failed."""
    failed = part.get("failed", [])
    failures = failed.items() if isinstance(failed, dict) else [(one,) for one in failed]
    return [": ".join(map(plain, one)) for one in failures]


_SWEEPS = (
    "Backward pass of a tanh RNN",
    "As in Figure 8 of the paper: times above, and below how many times as fast as PyTorch: "
    "medians, with bars from the quartiles. The dashed line is the paper's best ratio, 108; dotted "
    "ones are the floor.",
)


# Words of the table of races.
_WORDS = {
    "call": "the time of one call, from an idle device until its work is done, with all launches",
    "device": "the time of the work alone, which begins when all of it has been launched",
    "host": "the time of one call by the clock of the host",
    "cold": "the ratio where the L2 cache was filled with other data before each call; none where "
    "the input is larger than the cache",
    "with values": "ours makes the values of the Jacobians in the call, as cuDNN's backward pass "
    "does; otherwise they are there before it",
    "implicit": "ours writes no Jacobian: each is made from weights and slopes where it is used; "
    "with slopes, these are made in the call, too",
    "the floor": "the time to move and compute what must be, at rates measured in the same run",
}


def _words() -> Html:
    """Say what the words of the table of races mean."""
    said = (
        "A ratio is the time of the peer over ours: above one, ours is faster. Times are medians, "
        "with a warm cache."
    )
    terms = (join(tag("dt", word), tag("dd", meaning)) for word, meaning in _WORDS.items())
    return join(tag("p", said), tag("dl", *terms))


def _of_sizes(race: Results) -> bool:
    """Whether a race is of the sweeps over sizes, but for the two that are asked about."""
    about = race.get("about", {})
    is_rnn = race["name"].startswith("rnn ")
    return is_rnn and (about["B"] != 16 or about["T"] not in STEPS[:2])


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
        row = [line["what"], line["against"], states[line["met"]]]
        rows.append([*row, _ratio(line["measured"]), asked])
    heads = ["what", "against", "state", "measured", "asked for"]
    return table(heads, rows, heads[3:], grouped=True)


def _races(races: list[Results]) -> Html:
    rows = []
    for race in races:
        medians = race["median_seconds"]
        for ratio in race["ratios"]:
            taken = medians.get(f"{ratio['clock']}, warm", {})
            times = [_ms(taken.get(ratio[which])) for which in ("theirs", "ours")]
            ratios = [_ratio(ratio["measured"].get(cache)) for cache in ("warm", "cold")]
            peer = ratio["theirs"] + gpu_table.mark(race, ratio["theirs"])
            peer = peer if ratio["measured"] else f"{peer}, missing"
            names = [_beside(peer, ratio["ours"]), ratio["clock"]]
            rows.append([race["work"], *names, *ratios, *times])
        floor = race["floors"]["the work"]
        clock = "device" if "device, warm" in medians else "host"
        taken = medians.get(f"{clock}, warm", {})
        ours = next((name for name in taken if name.startswith(OURS)), OURS)
        over = _ratio(floor["seconds"] / taken[ours]) if ours in taken else ""
        times = [_ms(floor["seconds"]), _ms(taken.get(ours))]
        rows.append([race["work"], _beside("the floor", ours), clock, over, "", *times])
    numbers = ["ratio", "cold", *_TIMES]
    return table(["work", "against", "clock", *numbers], rows, numbers, grouped=True)


def _beside(peer: str, ours: str) -> Html | str:
    """Name a peer, and what ours does beside the scan."""
    more = ours.removeprefix(OURS).removeprefix(", ")
    return join(peer, tag("span", f" · ours {more}", kind="soft")) if more else peer
