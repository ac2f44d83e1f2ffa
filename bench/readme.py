"""Tables of the README and the site: chosen lines of the latest full runs of what is committed.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``readme.json`` has, by their
names, the heads of their first columns, and of each line the first cells, and which row of an
experiment it shows: the work, and the peer, which is PyTorch, in either of its modes for subnormal
numbers, unless it is named. The site asks for single rows, and for all that are slower.
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
from .map import JAX, ODD_JAX, TORCHRECURRENT, groups, ratios
from .onnx import groups as onnx_groups
from .page import significant
from .peers import FLUSHING, PYTORCH

TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
_TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 130
# What stands beside our calls and is ours, too, or no program at all.
_NO_PEERS = "sparsescan", "Schedule", "kernels before", "writing the values"

Line = dict[str, Any]
Measured = dict[str, list[tuple[File, Row]]]


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
    measured = rows(results)

    def replace(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"<!-- table: {name} -->: expected one of {', '.join(TABLES)}")
        lines = TABLES[name]["lines"]
        found = [
            row(measured, line["work"], line.get("peer", ""), line["experiment"]) for line in lines
        ]
        table = _table(TABLES[name]["heads"], lines, [row for _, row in found])
        return f"{begin}{table}\n{_sources([file for file, _ in found], path)}\n{end}"

    text, count = _TABLE.subn(replace, path.read_text())
    if not count:
        raise ValueError(f"{path} has no table between <!-- table: NAME --> and <!-- end -->")
    path.write_text(text)


def rows(results: Path) -> Measured:
    """Return the rows of the newest full runs of what is committed, by the kinds of their files."""
    files = [file for file in read(results)[0] if not file.marks]
    measured: Measured = {}
    for file in newest(files).values():
        if file.kind in NAMES:
            of_file = [*load(file.kind).rows(file.results), *_points(file)]
            measured.setdefault(file.kind, []).extend((file, row) for row in of_file)
    return measured


def row(measured: Measured, work: str, peer: str = "", kind: str = "") -> tuple[File, Row]:
    """Return the latest row of some work, and its file.

    Parameters
    ----------
    measured : dict
        What :func:`rows` returns.
    work : str
        What is timed, as its experiment calls it.
    peer : str, optional
        Beside whom; PyTorch, in either of its modes for subnormal numbers, by default.
    kind : str, optional
        The experiment; all are searched by default.

    Raises
    ------
    ValueError
        If there is none.
    """
    peers = (peer,) if peer else (PYTORCH, FLUSHING)
    among = [kind] if kind else list(measured)
    found = [
        each
        for name in among
        for each in measured.get(name, [])
        if each[1].work == work and each[1].peer in peers
    ]
    if not found:
        raise ValueError(
            f"no complete results without changed files for {work!r} beside {peers[0]!r}; "
            f"expected them from {f'the experiment {kind!r}' if kind else 'any experiment'}"
        )
    return max(found, key=lambda each: each[0].results["date"])


def beside_others(measured: Measured, kind: str) -> list[tuple[File, Row]]:
    """Return the latest row of each work and peer of a kind, but for peers that are ours."""
    latest: dict[tuple[str, str], tuple[File, Row]] = {}
    for file, row in sorted(measured.get(kind, []), key=lambda each: each[0].results["date"]):
        if not row.peer.startswith(_NO_PEERS):
            latest[row.work, row.peer] = file, row
    return list(latest.values())


def _points(file: File) -> list[Row]:
    """Return the points of a map, of which only a few are among the rows of its experiment."""
    if file.kind == "onnx":
        every = ratios(file.results, onnx_groups(file.results["quick"]))
        names = [(each.group.call, each.group.of.peer) for each in every]
    elif file.kind == "map":
        every = ratios(file.results, groups(file.results["quick"]))
        names = [(each.group.key, _peer(each.group)) for each in every]
    else:
        return []
    return [
        Row(f"{name}, {each.point}", peer, each.theirs, each.ours)
        for each, (name, peer) in zip(every, names, strict=True)
    ]


def _peer(group: Any) -> str:
    if group.part in (JAX, ODD_JAX):
        return "jax.lax.scan"
    return "torchrecurrent" if group.name in TORCHRECURRENT else PYTORCH


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
    # Files of one machine and day are said together.
    said: dict[str, list[str]] = {}
    for file, which in links.items():
        where = Path(os.path.relpath(file.path, path.parent)).as_posix()
        name = "line" if which[0].isdigit() and len(which) == 1 else "lines"
        said.setdefault(f"{file.place}, {file.day}", []).append(
            f"[{name} {', '.join(which)}]({where})"
        )
    told = "; ".join(f"{', '.join(each)}: {place}" for place, each in said.items())
    text = f"Medians of calls that took turns, with every sample. {told}."
    return fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
