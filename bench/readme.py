"""Tables of the README and the site: chosen lines of the latest full runs of what is committed.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from textwrap import fill

from .experiment import NAMES, Row, load
from .files import File, newest, read
from .page import significant
from .peers import FLUSHING, PYTORCH

_TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 130


@dataclass(frozen=True)
class Line:
    """A line of a table: its first cells, and which row of an experiment it shows.

    Attributes
    ----------
    peer : str
        The row's; PyTorch may be in either of its modes for subnormal numbers.
    is_optional : bool
        Whether the table is without this line while there are no results for it.
    """

    cells: tuple[str, ...]
    experiment: str
    work: str
    peer: str = PYTORCH
    is_optional: bool = False

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that a row may name."""
        return (PYTORCH, FLUSHING) if self.peer == PYTORCH else (self.peer,)

    def at_last(self) -> Line:
        """Return the line of a loss at the last step."""
        (first, *more), last = self.cells, ", loss at the last step"
        star = " *" * first.endswith(" *")
        cells = f"{first.removesuffix(star)}{last}{star}", *more
        return replace(self, cells=cells, work=self.work + last, is_optional=True)


@dataclass(frozen=True)
class Table:
    """A table: the heads of its first columns, and its lines."""

    heads: tuple[str, ...]
    lines: tuple[Line, ...]


_DOOR, _STEP, _LAYER = "Front door: ", "Training step: ", "A layer's step: "
_GRU = Line(("GRU, 20 units, T=1,000",), "doors", f"{_DOOR}GRU(12, 20), B=16, T=1,000")
_GRU_64 = Line(("GRU, 64 units, T=1,000",), "doors", f"{_DOOR}GRU(12, 64), B=16, T=1,000")
_LSTM = Line(("LSTM, 20 units, T=1,000",), "doors", f"{_DOOR}LSTM(12, 20), B=16, T=1,000")
_LSTM_128 = Line(("LSTM, 128 units, T=1,000 *",), "step", f"{_STEP}LSTM, H=128, B=16, T=1,000")
_SCANNED = Line(
    ("GRU, 20 units, T=1,000, in JAX *",),
    "doors",
    f"{_DOOR}GRU(12, 20) in JAX, B=16, T=1,000",
    "jax.lax.scan",
)
_VGG = Line(("VGG-11, pruned by 97%",), "doors", f"{_DOOR}VGG-11, pruned by 97%, B=16")
_VGG_ONE = Line(("one image at a time",), "doors", f"{_DOOR}VGG-11, pruned by 97%, B=1")
_MLP = Line(("MLP, pruned by 98%, B=64",), "doors", f"{_DOOR}MLP, pruned by 98%, B=64")
_DENSE = Line(
    ("Dense convolution, 256 channels, 8×8 *",),
    "density",
    f"{_LAYER}256 → 256 channels, 8×8, B=16, 1",
)
_LINEAR = Line(
    ("Linear recurrence, 64 numbers, T=100,000, B=1",),
    "doors",
    f"{_DOOR}affine_scan, diagonal 64×64, B=1, T=100,000",
    "jax.lax.scan",
)
_RANKS = Line(
    ("States of an RNN, T=4,096, B=1, on 2 ranks",),
    "scaling",
    "tanh RNN, dense 20×20, n=4,096: 2 ranks",
    "one process",
)
_MODULE, _JITTED = "`sparsescan.torch`", "`sparsescan.jax.recurrent`"


def _chosen(line: Line, have: str, use: str) -> Line:
    return replace(line, cells=(have, use))


def _both(line: Line, have: str, use: str) -> tuple[Line, Line]:
    """Return the lines of losses at every step and at the last step."""
    chosen = _chosen(line, have, use)
    return chosen, chosen.at_last()


TABLES = {
    "README": Table(
        ("training step, B=16",),
        (
            *(_GRU, _GRU.at_last(), _SCANNED, _GRU_64, _GRU_64.at_last()),
            *(_LSTM, _LSTM.at_last(), _LSTM_128, _LSTM_128.at_last()),
            *(_VGG, _MLP, _DENSE, _LINEAR, _RANKS),
        ),
    ),
    "is it for me": Table(
        ("you have", "use"),
        (
            *_both(_GRU, "a GRU of 20 units over 1,000 steps, in PyTorch", _MODULE),
            *_both(_GRU_64, "one of 64 units", _MODULE),
            *_both(_LSTM, "an LSTM of 20 units over 1,000 steps, in PyTorch", _MODULE),
            Line(
                ("two layers, both directions, sequences of 100 to 1,000 steps", _MODULE),
                "doors",
                f"{_DOOR}LSTM(12, 20), two layers, both directions, B=16, T=100 to 1,000",
            ),
            *_both(_LSTM_128, "an LSTM of 128 units", "`recurrent.LSTM.training_step`"),
            _chosen(_SCANNED, "a GRU of 20 units over 1,000 steps, in JAX", _JITTED),
            *(
                Line(
                    (have, f"`catalogue.{kind}.training_step`"),
                    "cells",
                    f"Cell: {kind}, H=20, B=16, T=1,000, {peer}",
                    peer,
                )
                for have, kind, peer in (
                    ("an MGU of torchrecurrent over 1,000 steps", "MGU", "torchrecurrent"),
                    ("the same as a loop in JAX", "MGU", "jax.lax.scan"),
                    ("20 spiking neurons of snnTorch over 1,000 steps", "Leaky", "snnTorch"),
                )
            ),
            Line(
                (
                    "an RNN of 512 units with 95% of its weights pruned",
                    "`recurrent.RNN.training_step`",
                ),
                "step",
                f"{_STEP}RNN, H=512, B=16, T=1,000, 95% of the hidden weights pruned",
            ),
            Line(
                ("a short sequence: 10 steps, Jacobians made and scanned", "PyTorch"),
                "rnn",
                "Backward pass of a tanh RNN, 20 units, float32, T=10, B=16",
                "PyTorch autograd",
            ),
            _chosen(_VGG, "a convolutional network pruned by 97%, 16 images", _MODULE),
            _chosen(_VGG_ONE, "the same, one image at a time", _MODULE),
            Line(
                ("pruned by 90%, 16 images", _MODULE),
                "doors",
                f"{_DOOR}VGG-11, pruned by 90%, B=16",
            ),
            Line(
                ("a convolution with half of its weights", "PyTorch"),
                "density",
                f"{_LAYER}256 → 256 channels, 8×8, B=16, 0.5",
            ),
            _chosen(_DENSE, "a dense convolution", "PyTorch"),
            Line(
                ("a pruned network whose Jacobians are written out, one image", "PyTorch"),
                "vgg11",
                "pruned VGG-11, B=1: gradients",
                "PyTorch, dense",
            ),
            _chosen(
                _LINEAR,
                "a linear recurrence: filter, smoother, state space",
                "`sparsescan.jax.affine_scan`",
            ),
            Line(
                ("one with 20×20 matrices, 16 samples", "`sparsescan.jax.affine_scan`"),
                "doors",
                f"{_DOOR}affine_scan, dense 20×20, B=16, T=1,000",
                "jax.lax.scan",
            ),
            Line(
                ("one right-hand side, scanned by Blelloch's tree", '`schedule="auto"`'),
                "grid",
                "RNN 20, T=1000, B=1, by Schedule.blelloch(1000)",
                "Schedule.linear(1000)",
            ),
            _chosen(_RANKS, "two ranks on one machine for 4,096 small steps", "one process"),
        ),
    ),
}


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
        If there are no markers, or no table or no results for one of them. Lines that are optional
        are left out without results.
    """
    files = newest(file for file in read(results)[0] if not file.marks)
    measured: dict[str, list[tuple[File, Row]]] = {}
    for file in files.values():
        if file.kind in (*NAMES, "grid"):
            measured.setdefault(file.kind, []).extend((file, row) for row in _rows(file))

    def replace(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"<!-- table: {name} -->: expected one of {', '.join(TABLES)}")
        lines = TABLES[name].lines
        found = [(line, _row(line, measured.get(line.experiment, []))) for line in lines]
        shown = [(line, *row) for line, row in found if row]
        table = _table(TABLES[name].heads, [(line, row) for line, _, row in shown])
        return f"{begin}{table}\n{_sources([file for _, file, _ in shown], path)}\n{end}"

    text, count = _TABLE.subn(replace, path.read_text())
    if not count:
        raise ValueError(f"{path} has no table between <!-- table: NAME --> and <!-- end -->")
    path.write_text(text)


def _rows(file: File) -> list[Row]:
    if file.kind != "grid":
        return load(file.kind).rows(file.results)
    rows = []
    for chain, result in file.results["chains"].items():
        medians = result["median_seconds"]
        linear = next((name for name in medians if name.startswith("Schedule.linear")), None)
        rows += [
            Row(f"{chain}, by {name}", linear, medians[linear], medians[name])
            for name in medians
            if linear and name != linear
        ]
    return rows


def _row(line: Line, measured: list[tuple[File, Row]]) -> tuple[File, Row] | None:
    """Return the latest row of a line, and its file; None if it is optional and there is none."""
    rows = [
        (file, row) for file, row in measured if row.work == line.work and row.peer in line.peers
    ]
    if not rows and line.is_optional:
        return None
    if not rows:
        raise ValueError(
            f"no complete results without changed files for {line.work!r} beside {line.peer!r}; "
            f"expected them from the experiment {line.experiment!r}"
        )
    return max(rows, key=lambda each: each[0].results["date"])


def _table(heads: tuple[str, ...], rows: list[tuple[Line, Row]]) -> str:
    """Return a table as Markdown; ratios come second, where a narrow screen shows them."""
    work, *more = heads
    first = [work, "ratio", *more, "against", "theirs, ms", "ours, ms"]
    lines = [first, ["---"] * len(first)]
    for line, row in rows:
        work, *more = line.cells
        times = [significant(1e3 * seconds) for seconds in (row.theirs, row.ours)]
        lines.append([work, ratio(row.theirs / row.ours), *more, row.peer, *times])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
