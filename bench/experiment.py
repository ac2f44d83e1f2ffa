"""The frame of all experiments: results that outlive a run that is cut off.

An experiment is a list of *pieces*, such as one sequence length each. Measurements of a piece are
written at once; a run by the same commit on the same device goes on after the last one.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import machine
from .machine import RESULTS as RESULTS

Results = dict[str, Any]

# The module of each has an Experiment called EXPERIMENT; imported when it is asked for, since one
# does not need the peers of another.
NAMES = (
    *("step", "doors", "density", "rnn", "gru", "vgg11", "lenet5", "table1", "scaling", "pipeline"),
    *("strategies", "published", "cliffs", "cells", "map", "onnx", "streams", "ppo", "wide"),
    *("attention", "loops"),
    *("grid", "memory", "intrinsics", "simulate", "engine", "suites"),
)
# Columns of text beyond which heads are letters, with a legend.
_WIDE = 180


@dataclass(frozen=True)
class Piece:
    """A part that is measured on its own, by a key that is unique in the experiment.

    JSON can hold what it returns. Its key ``"missing"`` is a dict of peers that are not there, and
    why.
    """

    key: str
    measure: Callable[[], Results]


@dataclass(frozen=True)
class Drawing:
    """A matplotlib figure; the caption says what is seen, and what the dashed lines are."""

    title: str
    caption: str
    figure: Any


@dataclass(frozen=True)
class Row:
    """A line of the tables: ours beside one peer."""

    work: str  # that is timed, with its sizes
    peer: str
    theirs: float  # seconds, as ours: medians of samples that were taken in turns
    ours: float
    paper: float | None = None  # the ratio that the paper published for this, if any


@dataclass(frozen=True)
class Table:
    """A table of something else than times; rows of one first cell stand below it.

    Without rows it is not shown.
    """

    heads: list[str]
    rows: list[list[str]]
    numbers: list[str]  # heads of columns of numbers


@dataclass(frozen=True)
class Experiment:
    """An experiment that the command line runs by its name.

    Pieces, and what holds for all of them, are those of a quick run or of a full one; making them
    measures nothing. All that is shown is made from a file of however many pieces.
    """

    name: str
    title: str
    pieces: Callable[[bool], Iterable[Piece]]
    about: Callable[[bool], Results]
    drawings: Callable[[Results], list[Drawing]] = lambda results: []
    rows: Callable[[Results], list[Row]] = lambda results: []
    tables: Callable[[Results], list[Table]] = lambda results: []


def as_text(tables: Iterable[Table]) -> str:
    """Return tables that have rows as text, with a blank line after each; a first cell once."""
    lines = []
    for table in tables:
        if not table.rows:
            continue
        firsts = [None, *(row[0] for row in table.rows)]
        rows = [
            ["" if here == before else here, *row[1:]]
            for row, (before, here) in zip(table.rows, pairwise(firsts), strict=True)
        ]
        heads = table.heads
        if sum(max(map(len, column)) for column in zip(heads, *rows, strict=True)) > _WIDE:
            heads = [chr(97 + k) if h in table.numbers else h for k, h in enumerate(heads)]
        cells = [heads, *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines += [
            f"{new}: {old}" for new, old in zip(heads, table.heads, strict=True) if new != old
        ]
        lines.append("")
    return "\n".join(lines)


def load(name: str) -> Experiment:
    """Return the experiment of this name."""
    experiment: Experiment = importlib.import_module(f"bench.{name}").EXPERIMENT
    return experiment


def run(experiment: Experiment, quick: bool, folder: Path, only: str = "") -> Path:
    """Measure what has not been measured yet, of pieces with some words in their keys.

    The keys of the file: `experiment`, `title`, `quick`, `about`, `pieces` by their keys, `done`;
    and `commit`, `dirty`, `date`, `command`, `device`, `versions` as of all results.
    """
    machine.pin()
    commit = machine.commit()
    head, device = machine.head("bench", commit)
    name = machine.file_name(experiment.name + "-quick" * quick, device, commit)
    path, kept = _cut_off(folder, name) or (folder / name, {})
    if kept:
        print(f"going on with {path.name}, which has {len(kept)} pieces", file=sys.stderr)
    pieces = list(experiment.pieces(quick))
    words = re.compile(rf"(?<!\w){re.escape(only)}(?!\w)" if only else "")
    chosen = [piece for piece in pieces if words.search(piece.key)]
    if not chosen:
        raise SystemExit(f"{experiment.name} has no piece with {only!r} in its key")
    about = {"experiment": experiment.name, "title": experiment.title, "quick": quick}
    results = head | about | {"about": experiment.about(quick), "pieces": kept, "done": False}
    progress = tqdm(chosen, unit=" pieces", desc=experiment.name)
    for piece in progress:
        progress.set_postfix_str(piece.key)
        if piece.key not in kept:
            kept[piece.key] = piece.measure()
            _save(path, results)
    _save(path, results | {"done": all(piece.key in kept for piece in pieces)})
    return path


def _cut_off(folder: Path, name: str) -> tuple[Path, Results] | None:
    """Return a file of this name, whatever its date, that is not done; and its pieces."""
    names = re.sub(r"-\d{4}-\d\d-\d\d-", "-????-??-??-", name)
    for path in sorted(folder.glob(names), reverse=True):
        results = json.loads(path.read_text())
        if not results["done"]:
            return path, results["pieces"]
    return None


def _save(path: Path, results: Results) -> None:
    results["date"] = machine.now()
    machine.save(path, results)
