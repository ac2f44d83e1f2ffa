"""``python -m bench report``: all results there are, on one HTML page and in the README's tables.

Of every experiment and device the run with the least to be said against it is shown, and of these
the newest; the others are listed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import page, sections
from .experiment import NAMES, Drawing, Experiment, Results, Row, load
from .files import OTHERS, File, lines, newest, read
from .page import Html, join, table, tag
from .readme import update_readme
from .sections import TIMES

__all__ = ["update_readme", "write"]

_PAPER = "https://arxiv.org/abs/1907.10134"
_MAKERS = {"grid": sections.of_grid, "memory": sections.of_memory, "gpu": sections.of_gpu}
_TITLES = {"engine": "The engine", "grid": "Schedules", "memory": "Memory", "gpu": "On a GPU"}
_COMMANDS = {
    "engine": "python -m bench.compare",
    "grid": "python -m bench.grid",
    "memory": "python -m bench.memory",
    "gpu": "bash bench/gpu.sh OUTDIR",
}
# What the paper measured on GPUs.
_ON_A_GPU = {
    "rnn": "the backward pass 16 times as fast as PyTorch's at T=1,000, B=16, and 108 times at "
    "best; the whole training 2.75 times at best",
    "gru": "the backward pass 13.4 times as fast as PyTorch's, the whole training 2.36 times, at "
    "best",
}


@dataclass(frozen=True)
class _Run:
    """A file of an experiment, what its module makes of it, and what it cannot."""

    file: File
    rows: list[Row]
    drawings: list[Drawing]
    broken: list[str]


def write(results: Path, output: Path) -> Path:
    """Write the page about all JSON files in a folder.

    Parameters
    ----------
    results : Path
        The folder.
    output : Path
        The HTML file to write.

    Returns
    -------
    Path
        That file.
    """
    files, unread = read(results)
    shown = newest(files)
    by_device = sorted(shown.values(), key=lambda file: (file.on_gpu, file.device))
    of = {kind: [file for file in by_device if file.kind == kind] for kind, _ in shown}
    engine, startups = lines(files, "engine"), lines(files, "startup")
    of["engine"] = list(dict.fromkeys(file for file, _ in engine + startups))
    names = [*NAMES, *(kind for kind in of if kind not in (*NAMES, *OTHERS))]
    experiments = {name: _load(name) for name in names}
    runs = {
        name: [_run(experiment, file) for file in of.get(name, [])]
        for name, experiment in experiments.items()
    }
    titles = {name: _title(name, experiments[name], runs[name]) for name in names} | _TITLES

    whole = {"Overview": _overview(titles, of)}
    published = [
        (run, row) for name in names for run in runs[name] for row in run.rows if row.paper
    ]
    if published:
        whole["Beside the paper"] = _beside_the_paper(published)
    for name in names:
        whole[titles[name]] = _experiment(name, experiments[name], runs[name])
    whole[titles["engine"]] = sections.of_engine(engine, startups) if engine else _not_yet("engine")
    for kind, make in _MAKERS.items():
        found = [join(sections.origin(file), make(file.results)) for file in of.get(kind, [])]
        whole[titles[kind]] = join(*found) if found else _not_yet(kind)
    is_shown = {file.path for chosen in of.values() for file in chosen}
    whole["Files"] = _files(files, is_shown, unread, titles)
    output.write_text(page.page("sparsescan, measured", _head(), whole))
    return output


def _head() -> Html:
    return tag(
        "p",
        "Gradients of chains of layers by a scan over sparse transposed Jacobians (",
        tag("a", "BPPSA, MLSys 2020", href=_PAPER),
        "), beside other ways to compute them, and beside the numbers of the paper. A ratio is the "
        "peer's time over ours: above one, ours is faster. Times are medians of samples that were "
        "taken in turns. Every number comes from a file that is named beside it, where all samples "
        "are.",
    )


def _overview(titles: dict[str, str], of: dict[str, list[File]]) -> Html:
    """What was measured where."""
    rows = []
    for kind, title in titles.items():
        for file in of.get(kind, []):
            place, day = (tag("span", said, kind="tight") for said in (file.place, file.day))
            rows.append([title, place, day, file.commit, sections.state(file)])
        if not of.get(kind):
            rows.append([title, "–", "", "", "not run yet"])
    found = table(["what", "on", "date", "commit", "state"], rows)
    if any(file.on_gpu for files in of.values() for file in files):
        return found
    return join(found, tag("p", "No GPU has run this yet."))


def _not_yet(kind: str) -> Html:
    said = "No GPU has run this yet: " if kind == "gpu" else "Not run yet: "
    return tag("p", said, tag("code", _COMMANDS.get(kind, f"python -m bench {kind}")), ".")


# -- Experiments ----------------------------------------------------------------------------------


def _load(name: str) -> Experiment | str:
    """An experiment, or why it cannot be had."""
    if name not in NAMES:
        return f"There is no experiment {name!r}."
    try:
        return load(name)
    except Exception as error:
        return _said(f"bench.{name} cannot be imported", error)


def _said(what: str, error: Exception) -> str:
    """A line for the page, and for whoever makes it."""
    said = f"{what}: {type(error).__name__}: {error}"
    print(said, file=sys.stderr)
    return said


def _run(experiment: Experiment | str, file: File) -> _Run:
    run = _Run(file, [], [], [])
    if "losses" in file.results:
        run.drawings.append(sections.old_lenet5(file.results))
    elif isinstance(experiment, Experiment):
        try:
            run.rows.extend(experiment.rows(file.results))
            run.drawings.extend(experiment.drawings(file.results))
        except Exception as error:
            run.broken.append(_said(f"{file.path.name} cannot be shown in full", error))
    return run


def _title(name: str, experiment: Experiment | str, runs: list[_Run]) -> str:
    if isinstance(experiment, Experiment):
        return experiment.title
    return next((run.file.results["title"] for run in runs if "title" in run.file.results), name)


def _beside_the_paper(rows: list[tuple[_Run, Row]]) -> Html:
    cells = [
        [*sections.cells(row), ", ".join([run.file.device, *run.file.marks])] for run, row in rows
    ]
    said = "The paper measured on an RTX 2070 and an RTX 2080 Ti, with PyTorch 1.1 and 1.2."
    return join(
        tag("p", said), table(["work", "against", *TIMES, "on"], cells, TIMES, grouped=True)
    )


def _experiment(name: str, experiment: Experiment | str, runs: list[_Run]) -> Html:
    parts = [] if isinstance(experiment, Experiment) else [tag("p", experiment, kind="warn")]
    for run in runs:
        results = run.file.results
        if len(runs) > 1:
            parts.append(tag("h3", f"On {run.file.place}"))
        parts += [sections.origin(run.file), *(tag("p", why, kind="warn") for why in run.broken)]
        if results.get("about"):
            about = results["about"].items()
            parts.append(
                tag("dl", *(join(tag("dt", k), tag("dd", sections.plain(v))) for k, v in about))
            )
        parts += map(page.figure, run.drawings)
        if run.rows:
            shown = 6 if any(row.paper for row in run.rows) else 5
            cells = [sections.cells(row)[:shown] for row in run.rows]
            heads = ["work", "against", *TIMES][:shown]
            parts.append(table(heads, cells, TIMES, grouped=True))
        parts.append(sections.missing_peers(_missing(results.get("pieces", {}))))
    if not runs:
        parts.append(_not_yet(name))
    if name in _ON_A_GPU and not any(run.file.on_gpu and not run.file.marks for run in runs):
        parts.append(tag("p", f"Unproven, as no GPU has run it in full: {_ON_A_GPU[name]}."))
    return join(*parts)


def _missing(pieces: Results) -> dict[str, list[str]]:
    """Peers that are missing and the reason; the pieces that miss them."""
    found: dict[str, list[str]] = {}
    for key, piece in pieces.items():
        for peer, reason in piece.get("missing", {}).items():
            found.setdefault(f"{peer}: {reason}", []).append(key)
    return {peer: [] if len(keys) == len(pieces) else keys for peer, keys in found.items()}


# -- Files ----------------------------------------------------------------------------------------


def _files(
    files: list[File], is_shown: set[Path], unread: dict[str, str], titles: dict[str, str]
) -> Html:
    """All files, and below them the machines and versions."""
    setups: dict[str, int] = {}
    rows = []
    for file in sorted(files, key=lambda file: file.path.name):
        about = {**file.results["device"], **file.results["versions"]}
        setup = setups.setdefault(_setup(about), len(setups) + 1)
        state = "shown" if file.path in is_shown else "superseded"
        marks = join("; ", sections.state(file)) if file.marks else ""
        name = tag("code", file.path.name)
        day = tag("span", file.day, kind="tight")
        rows.append([name, titles[file.kind], day, str(setup), join(state, marks)])
    rows += [[tag("code", name), why, "", "", "not shown"] for name, why in unread.items()]
    heads = ["file", "what", "date", "setup", "state"]
    found = [table(heads, rows)] if rows else [tag("p", "There are none.")]
    if setups:
        terms = [join(tag("dt", f"Setup {k}"), tag("dd", said)) for said, k in setups.items()]
        found += [tag("h3", "Machines and versions"), tag("dl", *terms)]
    return join(*found)


def _setup(about: dict[str, Any]) -> str:
    """What a machine is and what is installed; at the end what is not."""
    there = [f"{key} {sections.plain(value)}" for key, value in about.items() if value is not None]
    missing = [key for key, value in about.items() if value is None]
    return "; ".join(there) + (f"; without {', '.join(missing)}" if missing else "")
