"""``python -m bench report``: all results there are, on one HTML page and in the README's table.

The page shows, for every experiment and device, the newest of the runs with the fewest flaws; it
lists the others. The site has a page for each of its sections.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import gpu_table, page
from .experiment import NAMES, Drawing, Results, Row, Table, load
from .files import File, has_all_parts, newest, read, together
from .page import Html, exactly, join, listed, significant, table, tag

_PAPER = "https://arxiv.org/abs/1907.10134"
_TITLES = {"gpu": "On a GPU"}
_ON_GPU = "bash bench/gpu.sh OUTDIR"
# Claims that only a run on a GPU can show.
_ON_A_GPU = (
    "RNN: the sweeps of the paper's Figure 8. The backward pass 16 times as fast as PyTorch's at "
    "T=1,000, B=16, and 108 times at best; the whole training 2.75 times at best.",
    "GRU: the paper's Figure 9. The backward pass 13.4 times as fast as PyTorch's, the whole "
    "training 2.36 times, at best.",
    "Products and sweeps of a pruned VGG-11 (the paper's Figure 10) beside cuSPARSE.",
    "The CUDA kernels, which have run in Numba's simulator, and as compiled code on a CPU.",
    "CuPy itself, CUDA graphs, cuBLAS and several streams.",
)
_BY_HAND = join(
    "No command runs these: several devices, ranks with a GPU each, and ",
    tag("code", "sparsescan calibrate --device cuda"),
    ".",
)


@dataclass(frozen=True)
class _Run:
    """What is shown of a file of an experiment, or why it cannot be."""

    file: File
    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    broken: str = ""


def write(results: Path, output: Path) -> Path:
    """Write the page about all JSON files in a folder; the page."""
    output.write_text(page.page("sparsescan, measured", _head(), _sections(results)))
    return output


def write_pages(results: Path, output: Path) -> list[Path]:
    """Write each section as a page of the site, in Markdown; those of a former call are removed."""
    output.mkdir(exist_ok=True)
    pages = []
    for title, section in _sections(results).items():
        path = output / f"{page.anchor(title)}.md"
        text = f"# {title}\n\n```{{raw}} html\n{tag('div', section, kind='measured')}\n```\n"
        # Sphinx reads what has changed.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        pages.append(path)
    for old in set(output.glob("*.md")) - set(pages):
        old.unlink()
    return pages


def _sections(results: Path) -> dict[str, Html]:
    """Return the sections of the page by their titles."""
    files, unread = read(results)
    of: dict[str, list[File]] = {kind: [] for kind in (*NAMES, *_TITLES)}
    for file in sorted(newest(files).values(), key=lambda file: (file.on_gpu, file.device)):
        of[file.kind].append(file)
    titles = {name: load(name).title for name in NAMES} | _TITLES
    runs = {name: [_run(file) for file in of[name]] for name in NAMES}
    bodies = {name: _experiment(runs[name]) for name in NAMES}
    bodies["gpu"] = _gpu(of["gpu"])
    whole = {
        "Overview": _overview(titles, of),
        "Unproven": _unproven(of["gpu"]),
        "Beside the paper": _beside_the_paper(runs.values()),
        **{titles[kind]: said or _not_yet(kind) for kind, said in bodies.items()},
        "Files": _files(files, {file for shown in of.values() for file in shown}, unread, titles),
    }
    return {title: section for title, section in whole.items() if section}


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
    """List where everything was measured."""
    rows = []
    for kind, title in titles.items():
        for file in of[kind]:
            day = tag("span", file.day, kind="tight")
            rows.append([title, _state(file), file.place, day, file.commit])
        if not of[kind]:
            rows.append([title, "not run yet", "", "", ""])
    return table(["what", "state", "on", "date", "commit"], rows)


def _not_yet(kind: str) -> Html:
    where = " on a machine that has a GPU" if kind == "gpu" else ""
    command = _ON_GPU if kind == "gpu" else f"python -m bench {kind}"
    return tag("p", "Not run yet: ", tag("code", command), f" measures it{where}.")


def _unproven(files: list[File]) -> Html:
    """List the claims that no full run of committed code on a GPU has shown."""
    clean = together(file for file in files if not file.marks)
    if any(map(has_all_parts, clean)):
        return listed([_BY_HAND])
    why = "No full run of committed code on a GPU has shown these yet ("
    return join(tag("p", why, tag("code", _ON_GPU), "):"), listed([*_ON_A_GPU, _BY_HAND]))


# -- Experiments ----------------------------------------------------------------------------------


def _run(file: File) -> _Run:
    try:
        one, results = load(file.kind), file.results
        return _Run(file, one.rows(results), one.tables(results), one.drawings(results))
    except Exception as error:
        why = f"{file.path.name} cannot be shown: {type(error).__name__}: {error}"
        print(why, file=sys.stderr)
        return _Run(file, broken=why)


def _beside_the_paper(runs: Iterable[list[_Run]]) -> Html:
    rows = [
        (row, ", ".join([run.file.device, *run.file.marks]))
        for of_name in runs
        for run in of_name
        for row in run.rows
        if row.paper
    ]
    if not rows:
        return Html("")
    said = (
        "The paper's RNN and GRU ran on an RTX 2070 or an RTX 2080 Ti, its Table 1 on a Ryzen "
        "Threadripper 1950X, with PyTorch 1.1 or 1.2; the last column is where ours did."
    )
    return join(tag("p", said), _row_table(rows))


def _experiment(runs: list[_Run]) -> Html:
    parts = []
    for run in runs:
        results = run.file.results
        terms = {key: plain(value) for key, value in results["about"].items()}
        if len(runs) > 1:
            parts.append(tag("h3", f"On {run.file.place}"))
        parts += [_origin(run.file), _terms(terms)]
        if run.broken:
            parts.append(tag("p", run.broken, kind="warn"))
        parts += map(page.figure, run.drawings)
        parts += [_row_table([(row, "") for row in run.rows]), *_tables(run.tables)]
        parts.append(_missing(results["pieces"]))
    return join(*parts)


def _missing(pieces: Results) -> Html:
    """List missing peers, why, and where."""
    places: dict[str, list[str]] = {}
    for key, piece in pieces.items():
        for peer, why in piece.get("missing", {}).items():
            places.setdefault(f"{peer}: {why}", []).append(key)
    said = [f"{peer} ({'; '.join(where)})" for peer, where in places.items()]
    return join(tag("p", "Missing:"), listed(said)) if said else Html("")


def _gpu(files: list[File]) -> Html:
    """Show runs; calls with the parts of one run are shown as one."""
    runs = together(files)
    shown = []
    for run in runs:
        if len(runs) > 1:
            shown.append(tag("h3", f"On {run[0].place}, commit {run[0].commit}"))
        races = list(
            {race["name"]: race for file in run for race in file.results["races"]}.values()
        )
        parts = {what: part for file in run for what, part in file.results["parts"].items()}
        skipped = {race["name"]: {"missing": race.get("skipped", {})} for race in races}
        shown += [*map(_origin, run), *map(page.figure, gpu_table.drawings(races))]
        shown += [_terms(gpu_table.WORDS) if races else Html("")]
        shown += [*_tables(gpu_table.tables(races, parts)), _missing(skipped)]
    return join(*shown)


# -- Parts of all sections ------------------------------------------------------------------------


def _origin(file: File) -> Html:
    """Return the line that says where numbers come from."""
    said = f"{file.place} · {file.day} · commit {file.commit} · "
    marks = join(" · ", _state(file)) if file.marks or file.only else ""
    return tag("p", said, tag("code", file.path.name), marks, kind="soft")


def _state(file: File) -> Html:
    """Say what is wrong with a run, or that it is complete; and which parts it has, if not all."""
    said = tag("span", ", ".join(file.marks), kind="warn") if file.marks else Html("complete")
    return join(said, " · ", tag("code", file.only, kind="tight")) if file.only else said


def _row_table(rows: list[tuple[Row, str]]) -> Html:
    """Ours beside the peers, and where that was measured."""
    cells = [
        [
            *(row.work, row.peer, f"{significant(row.theirs / row.ours)}×", exactly(row.paper)),
            *(significant(1e3 * taken) for taken in (row.theirs, row.ours)),
            where,
        ]
        for row, where in rows
    ]
    numbers = ["ratio", "the paper's", "theirs, ms", "ours, ms"]
    return table(["work", "against", *numbers, "on"], cells, numbers, grouped=True)


def _tables(tables: Iterable[Table]) -> list[Html]:
    return [table(one.heads, one.rows, one.numbers, grouped=len(one.heads) > 1) for one in tables]


def _terms(terms: dict[str, str]) -> Html:
    return tag("dl", *(join(tag("dt", key), tag("dd", said)) for key, said in terms.items()))


def plain(value: Any) -> str:
    """Write a value from a JSON file for people."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {plain(x)}" for key, x in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _files(
    files: list[File], shown: set[File], unread: dict[str, str], titles: dict[str, str]
) -> Html:
    """All files, and below them the machines and versions."""
    setups: dict[str, int] = {}
    rows = []
    for file in sorted(files, key=lambda file: file.path.name):
        about = file.results["device"] | file.results["versions"]
        setup = setups.setdefault(_setup(about), len(setups) + 1)
        state = "shown" if file in shown else "superseded"
        marks = join("; ", _state(file)) if file.marks else ""
        name = tag("code", file.path.name)
        rows.append([name, join(state, marks), titles[file.kind], str(setup)])
    rows += [[tag("code", name), "not shown", why, ""] for name, why in unread.items()]
    if not rows:
        return Html("")
    terms = {f"Setup {k}": said for said, k in setups.items()}
    heads = ["file", "state", "what", "setup"]
    return join(table(heads, rows), tag("h3", "Machines and versions"), _terms(terms))


def _setup(about: Results) -> str:
    """Describe a machine and the libraries on it; those that are missing come last."""
    there = [f"{key} {plain(value)}" for key, value in about.items() if value is not None]
    missing = [key for key, value in about.items() if value is None]
    return "; ".join(there) + (f"; without {', '.join(missing)}" if missing else "")
