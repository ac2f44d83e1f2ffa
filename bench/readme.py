"""Tables of the README and the site: chosen lines of the latest full runs of what is committed.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``readme.json`` has, by their
names, the heads of their first columns, and of each line the first cells, and which row of an
experiment it shows: the work, and the peer, which is PyTorch, in either of its modes for subnormal
numbers, unless it is named.
"""

from __future__ import annotations

import json
import os
import re
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from .experiment import NAMES, Row, load
from .files import File, newest, read
from .page import significant
from .peers import FLUSHING, PYTORCH

TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
_TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 130

Line = dict[str, Any]


def update_tables(path: Path, results: Path) -> None:
    """Replace the tables of a Markdown file, and nothing else.

    Parameters
    ----------
    path : Path
        The file to change.
    results : Path
        The folder with the results.

    Raises
    ------
    ValueError
        If there are no markers, or no table or no results for one of them.
    """
    files = newest(file for file in read(results)[0] if not file.marks)
    measured: dict[str, list[tuple[File, Row]]] = {}
    for file in files.values():
        if file.kind in NAMES:
            rows = load(file.kind).rows(file.results)
            measured.setdefault(file.kind, []).extend((file, row) for row in rows)

    def replace(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"<!-- table: {name} -->: expected one of {', '.join(TABLES)}")
        lines = TABLES[name]["lines"]
        found = [_row(line, measured.get(line["experiment"], [])) for line in lines]
        table = _table(TABLES[name]["heads"], lines, [row for _, row in found])
        return f"{begin}{table}\n{_sources([file for file, _ in found], path)}\n{end}"

    text, count = _TABLE.subn(replace, path.read_text())
    if not count:
        raise ValueError(f"{path} has no table between <!-- table: NAME --> and <!-- end -->")
    path.write_text(text)


def _row(line: Line, measured: list[tuple[File, Row]]) -> tuple[File, Row]:
    """Return the latest row of a line, and its file."""
    peers = (line["peer"],) if "peer" in line else (PYTORCH, FLUSHING)
    rows = [each for each in measured if each[1].work == line["work"] and each[1].peer in peers]
    if not rows:
        raise ValueError(
            f"no complete results without changed files for {line['work']!r} beside {peers[0]!r}; "
            f"expected them from the experiment {line['experiment']!r}"
        )
    return max(rows, key=lambda each: each[0].results["date"])


def _table(heads: list[str], lines: list[Line], rows: list[Row]) -> str:
    """Return a table as Markdown; ratios come second, where a narrow screen shows them."""
    work, *more = heads
    first = [work, "ratio", *more, "against", "theirs, ms", "ours, ms"]
    shown = [first, ["---"] * len(first)]
    for line, row in zip(lines, rows, strict=True):
        work, *more = line["cells"]
        times = [significant(1e3 * seconds) for seconds in (row.theirs, row.ours)]
        shown.append([work, ratio(row.theirs / row.ours), *more, row.peer, *times])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)


def ratio(x: float) -> str:
    """Return a ratio with two digits, and three where they are before the point."""
    return f"{significant(x, 3 if 100 <= x < 1000 else 2)}×"


def _sources(files: list[File], path: Path) -> str:
    """Return the sentence with links to the files."""
    links: dict[File, list[str]] = {}
    first = 1
    for file, of_file in groupby(files):
        last = first + len(list(of_file)) - 1
        links.setdefault(file, []).append(f"{first}–{last}" if last > first else f"{first}")
        first = last + 1
    said = []
    for file, which in links.items():
        name = "line" if which[0].isdigit() and len(which) == 1 else "lines"
        where = Path(os.path.relpath(file.path, path.parent)).as_posix()
        said.append(f"[{name} {', '.join(which)}]({where}), {file.place}, {file.day}")
    text = f"Medians of calls that took turns, with every sample: {'; '.join(said)}."
    return fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
