"""``python -m bench report``: all results there are, on one HTML page and in the README's table.

The page shows, for every experiment and device, the newest of the runs with the fewest flaws; it
lists the others. The site has a page for each of its sections.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import page, sections
from .experiment import NAMES, Drawing, Results, Row, Table, load
from .files import File, has_all_parts, lines, newest, read, together
from .page import Html, join, listed, table, tag

_PAPER = "https://arxiv.org/abs/1907.10134"
_MAKERS = {
    "grid": sections.of_grid,
    "memory": sections.of_memory,
    "intrinsics": sections.of_intrinsics,
}
_TITLES = {
    "engine": "The engine",
    "grid": "Schedules",
    "memory": "Memory",
    "intrinsics": "Code in LLVM's language",
    "gpu": "On a GPU",
}
_COMMANDS = {
    "engine": "python -m bench.compare",
    "grid": "python -m bench.grid",
    "memory": "python -m bench.memory",
    "intrinsics": "python -m bench.intrinsics",
    "gpu": "bash bench/gpu.sh OUTDIR",
}
# Claims that only a run on a GPU can show; those of experiments are the paper's.
_ON_A_GPU = {
    "rnn": (
        "RNN: the sweeps of Figure 8. The backward pass 16 times as fast as PyTorch's at T=1,000, "
        "B=16, and 108 times at best; the whole training 2.75 times at best.",
    ),
    "gru": (
        "GRU: Figure 9. The backward pass 13.4 times as fast as PyTorch's, the whole training 2.36 "
        "times, at best.",
    ),
    "vgg11": ("Pruned VGG-11: the times of the steps in Figure 10 beside cuSPARSE.",),
    "gpu": (
        "The CUDA kernels, which have run in Numba's simulator, and as compiled code on a CPU.",
        "CuPy itself, CUDA graphs, cuBLAS and several streams.",
    ),
    "by hand": (
        join(
            "Neither command runs these: several devices, ranks with a GPU each, and ",
            tag("code", "sparsescan calibrate --device cuda"),
            ".",
        ),
    ),
}


@dataclass(frozen=True)
class _Run:
    """A file of an experiment and what its module makes of it, or why it cannot."""

    file: File
    rows: list[Row]
    tables: list[Table]
    drawings: list[Drawing]
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
    engine, startups = lines(files, "engine"), lines(files, "startup")
    of["engine"] = list(dict.fromkeys(file for file, _ in engine + startups))
    titles = {
        name: of[name][0].results["title"] if of[name] else load(name).title for name in NAMES
    }
    titles |= _TITLES

    runs = {name: [_run(file) for file in of[name]] for name in NAMES}
    bodies = {name: _experiment(runs[name]) for name in NAMES}
    bodies["engine"] = sections.of_engine(engine, startups)
    for kind, make in _MAKERS.items():
        bodies[kind] = join(
            *(part for file in of[kind] for part in (sections.origin(file), make(file.results)))
        )
    bodies["gpu"] = sections.of_gpu(of["gpu"])
    whole = {
        "Overview": _overview(titles, of),
        "Unproven": _unproven(of),
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
            rows.append([title, sections.state(file), file.place, day, file.commit])
        if not of[kind]:
            rows.append([title, "not run yet", "", "", ""])
    return table(["what", "state", "on", "date", "commit"], rows)


def _not_yet(kind: str) -> Html:
    command = _COMMANDS.get(kind, f"python -m bench {kind}")
    where = " on a machine that has a GPU" if kind == "gpu" else ""
    return tag("p", "Not run yet: ", tag("code", command), f" measures it{where}.")


def _unproven(of: dict[str, list[File]]) -> Html:
    """List the claims that no full run of committed code on a GPU has shown."""
    proven = {kind for kind, files in of.items() if any(f.on_gpu and not f.marks for f in files)}
    clean = together(file for file in of["gpu"] if not file.marks)
    proven = proven - {"gpu"} | ({"gpu"} if any(map(has_all_parts, clean)) else set())
    open_ = [line for kind, said in _ON_A_GPU.items() if kind not in proven for line in said]
    if not open_:
        return Html("")
    experiments, engine = tag("code", "python -m bench NAME --device cuda"), _COMMANDS["gpu"]
    why = "No full run of committed code on a GPU has shown these yet ("
    said = tag("p", why, experiments, ", ", tag("code", engine), "):")
    return join(said, listed(open_))


# -- Experiments ----------------------------------------------------------------------------------


def _run(file: File) -> _Run:
    try:
        one, results = load(file.kind), file.results
        return _Run(file, one.rows(results), one.tables(results), one.drawings(results))
    except Exception as error:
        why = f"{file.path.name} cannot be shown: {type(error).__name__}: {error}"
        print(why, file=sys.stderr)
        return _Run(file, [], [], [], why)


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
    return join(tag("p", said), sections.row_table(rows))


def _experiment(runs: list[_Run]) -> Html:
    parts = []
    for run in runs:
        results = run.file.results
        about = results["about"].items()
        terms = (join(tag("dt", key), tag("dd", sections.plain(value))) for key, value in about)
        if len(runs) > 1:
            parts.append(tag("h3", f"On {run.file.place}"))
        parts += [sections.origin(run.file), tag("dl", *terms)]
        if run.broken:
            parts.append(tag("p", run.broken, kind="warn"))
        parts += map(page.figure, run.drawings)
        parts.append(sections.row_table([(row, "") for row in run.rows]))
        parts += [table(one.heads, one.rows, one.numbers, grouped=True) for one in run.tables]
        parts.append(sections.missing_peers(_missing(results["pieces"])))
    return join(*parts)


def _missing(pieces: Results) -> list[tuple[str, str, str]]:
    return [
        (peer, why, key)
        for key, piece in pieces.items()
        for peer, why in piece.get("missing", {}).items()
    ]


# -- Files ----------------------------------------------------------------------------------------


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
        marks = join("; ", sections.state(file)) if file.marks else ""
        name = tag("code", file.path.name)
        rows.append([name, join(state, marks), titles[file.kind], str(setup)])
    rows += [[tag("code", name), "not shown", why, ""] for name, why in unread.items()]
    if not rows:
        return Html("")
    terms = (join(tag("dt", f"Setup {k}"), tag("dd", said)) for said, k in setups.items())
    heads = ["file", "state", "what", "setup"]
    return join(table(heads, rows), tag("h3", "Machines and versions"), tag("dl", *terms))


def _setup(about: Results) -> str:
    """Describe a machine and the libraries on it; those that are missing come last."""
    there = [f"{key} {sections.plain(value)}" for key, value in about.items() if value is not None]
    missing = [key for key, value in about.items() if value is None]
    return "; ".join(there) + (f"; without {', '.join(missing)}" if missing else "")
