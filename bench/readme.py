"""The README's tables: made of results that were measured in full, on what is committed.

A table stands between ``<!-- table: NAMES -->`` and ``<!-- end -->``; the names are "engine" and
those of experiments, with commas between them.
"""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path
from textwrap import fill

from .contests import OURS
from .experiment import Row, load
from .files import File, lines, newest, read
from .page import exactly, significant

_TABLE = re.compile(r"(<!-- table: ([\w, ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 130

# The engine's lines that are shown, and in which words.
_WORKS = {
    "spgemm-conv-64-128-256": "Product of two 97%-pruned convolutions (64→128→256, 16×16), "
    "pattern known, float32",
    "stencil-n=1000-unknowns=256-float64-plan": "1,000 steps of 256 unknowns (5-point stencil), "
    "`CSRChain`, plan reused, float64",
    "stencil-n=1000-unknowns=256-float64-list": "the same as a list of `csr_array`, one-shot",
    "stencil-n=100-unknowns=65536-float32-plan": "100 steps of 65,536 unknowns, plan reused, "
    "float32",
    "stencil-n=100-unknowns=65536-float64-plan": "the same in float64",
    "rnn-T=1000-B=16-H=20-float32": "RNN of 1,000 steps, batch 16, 20 hidden units, plan reused, "
    "float32",
    "vgg11-pruned-B=1-float32": "VGG-11 pruned by 97%, 32×32 images, plan reused, float32",
    "vgg11-pruned-B=16-float32": "the same, batch 16",
    "table1-conv-B=1": "Jacobian values of `Conv2d(3, 64, 3, padding=1)` on 3×32×32, float32",
    "table1-relu-B=16": "the same of ReLU on 16 × 64×32×32",
    "table1-maxpool-B=16": "the same of `MaxPool2d(2)` on 16 × 64×32×32",
}
_PEERS = {
    "SciPy @": "SciPy `@`",
    "jax.lax.scan": "`jax.lax.scan`, jitted",
    "jax.lax.associative_scan": "`jax.lax.associative_scan`, jitted",
    "PyTorch autograd by column, as CSR": "PyTorch autograd, column by column",
    "writing the values once": "writing the array once",
}


def update_readme(readme: Path, results: Path) -> None:
    """Replace what is between the markers, and nothing else.

    Parameters
    ----------
    readme : Path
        The file to change.
    results : Path
        The folder with the results.

    Raises
    ------
    ValueError
        If there are no markers, or no results for one of them.
    """
    files = [file for file in read(results)[0] if not file.marks]

    def replace(match: re.Match[str]) -> str:
        begin, names, end = match.groups()
        rows = [row for name in names.split(",") for row in _rows(name.strip(), files)]
        return f"{begin}{_table([row for _, row in rows])}\n{_sources(rows, readme)}\n{end}"

    text, count = _TABLE.subn(replace, readme.read_text())
    if not count:
        raise ValueError(f"{readme} has no table between <!-- table: NAMES --> and <!-- end -->")
    readme.write_text(text)


def _rows(name: str, files: list[File]) -> list[tuple[File, Row]]:
    if name == "engine":
        rows = _engine(files)
    else:
        chosen = [file for (kind, _), file in newest(files).items() if kind == name]
        rows = [(file, row) for file in chosen for row in load(name).rows(file.results)]
    if not rows:
        raise ValueError(f"<!-- table: {name} -->: no complete results without changed files")
    return rows


def _engine(files: list[File]) -> list[tuple[File, Row]]:
    measured = {line["name"]: (file, line) for file, line in lines(files, "engine")}
    rows = []
    for name, work in _WORKS.items():
        if name not in measured:
            continue
        file, line = measured[name]
        medians = line["median_seconds"]
        rows += [
            (file, Row(work, _PEERS.get(peer, peer), medians[peer], medians[OURS]))
            for peer, ratio in line["ratios"].items()
            if peer in medians and ratio["required"] is not None
        ]
    return rows


def _table(rows: list[Row]) -> str:
    """As Markdown; the paper's ratios only if it has any."""
    heads = ["work", "against", "theirs, ms", "ours, ms", "ratio", "the paper's"]
    cells, before = [heads, ["---"] * len(heads)], None
    for row in rows:
        work = "" if row.work == before else row.work
        times = [significant(1e3 * seconds) for seconds in (row.theirs, row.ours)]
        cells.append([work, row.peer, *times, _ratio(row.theirs / row.ours), exactly(row.paper)])
        before = row.work
    shown = len(heads) if any(row.paper is not None for row in rows) else len(heads) - 1
    return "".join(f"| {' | '.join(line[:shown])} |\n" for line in cells)


def _ratio(x: float) -> str:
    """Two digits, and three where they are before the point."""
    return f"{significant(x, 3 if 100 <= x < 1000 else 2)}×"


def _sources(rows: list[tuple[File, Row]], readme: Path) -> str:
    """The sentence with links to the files."""
    links: dict[str, list[str]] = {}
    first = 1
    for file, of_file in groupby(file for file, _ in rows):
        last = first + len(list(of_file)) - 1
        which = f"lines {first} to {last}" if last > first else f"line {first}"
        path = Path(os.path.relpath(file.path, readme.parent)).as_posix()
        links.setdefault(f"{file.place}, {file.day}", []).append(f"[{which}]({path})")
        first = last + 1
    said = ["Medians of calls that took turns; every sample and all versions are in the files."]
    said += [f"On {place}: {', '.join(which)}." for place, which in links.items()]
    return fill(" ".join(said), _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
