"""The frame of all experiments: options, and results that outlive a run that is cut off.

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
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import machine
from .machine import RESULTS as RESULTS

Results = dict[str, Any]

# The module of each has an Experiment called EXPERIMENT; imported when it is asked for, since one
# does not need the peers of another.
NAMES = (
    "step",
    "doors",
    "density",
    "rnn",
    "gru",
    "vgg11",
    "retrain",
    "lenet5",
    "table1",
    "scaling",
    "pipeline",
    "strategies",
    "published",
    "traffic",
    "cliffs",
    "cells",
    "map",
    "onnx",
    "ppo",
    "wide",
)


@dataclass(frozen=True)
class Options:
    """The user's choices."""

    quick: bool  # small sizes, to see that it works
    device: str  # "cpu" or "cuda"
    data: Path | None = None  # a folder with the data set, where there is one to be had
    only: str = ""  # words that the keys of pieces have; a later run without them does the rest


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
    """A table of something else than times; rows of one first cell stand below it."""

    heads: list[str]
    rows: list[list[str]]
    numbers: list[str]  # heads of columns of numbers


@dataclass(frozen=True)
class Experiment:
    """An experiment that the command line runs by its name."""

    name: str
    title: str
    pieces: Callable[[Options], Iterable[Piece]]  # making them measures nothing
    about: Callable[[Options], Results]  # what holds for all: sizes, settings, data
    drawings: Callable[[Results], list[Drawing]]  # from a file of however many pieces
    rows: Callable[[Results], list[Row]]
    tables: Callable[[Results], list[Table]] = lambda results: []
    summary: Callable[[Results], str] = lambda results: ""  # that the command line prints


def as_text(tables: Iterable[Table]) -> str:
    """Return tables as text, with a blank line after each; a first cell stands there once."""
    lines = []
    for table in tables:
        groups = [None, *(row[0] for row in table.rows)]
        cells = [table.heads]
        cells += [
            ["" if row[0] == before else row[0], *row[1:]]
            for before, row in zip(groups, table.rows, strict=False)
        ]
        widths = [max(len(row[k]) for row in cells) for k in range(len(table.heads))]
        lines += [
            "  ".join(each.ljust(w) for each, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        lines.append("")
    return "\n".join(lines)


def load(name: str) -> Experiment:
    """Return the experiment of this name."""
    experiment: Experiment = importlib.import_module(f"bench.{name}").EXPERIMENT
    return experiment


def cpu_only(name: str, options: Options, why: str = "") -> None:
    """Refuse to run on a GPU."""
    if options.device != "cpu":
        raise SystemExit(f"{name} is of the CPU{why}: run it without --device")


def run(experiment: Experiment, options: Options, folder: Path) -> Path:
    """Measure what has not been measured yet; the file with everything.

    The keys of the file: `experiment`, `title`, `quick`, `data`, `about`, `pieces` by their keys,
    `done`; and `commit`, `dirty`, `date`, `command`, `device`, `versions` as of all results.
    """
    machine.pin()
    commit = machine.commit()
    gpu = machine.describe_gpu() if options.device == "cuda" else None
    head, device = machine.head("bench", commit, gpu)
    name = machine.file_name(experiment.name + "-quick" * options.quick, device, commit)
    data = str(options.data) if options.data else None
    path, kept = _cut_off(folder, name, data) or (folder / name, {})
    if kept:
        print(f"going on with {path.name}, which has {len(kept)} pieces", file=sys.stderr)
    results = head | {
        "experiment": experiment.name,
        "title": experiment.title,
        "quick": options.quick,
        "data": data,
        "about": experiment.about(options),
        "pieces": kept,
        "done": False,
    }
    pieces = list(experiment.pieces(options))
    words = re.compile(rf"(?<!\w){re.escape(options.only)}(?!\w)" if options.only else "")
    chosen = [piece for piece in pieces if words.search(piece.key)]
    if not chosen:
        raise SystemExit(f"{experiment.name} has no piece with {options.only!r} in its key")
    progress = tqdm(chosen, unit=" pieces", desc=experiment.name)
    for piece in progress:
        progress.set_postfix_str(piece.key)
        if piece.key not in kept:
            kept[piece.key] = piece.measure()
            _save(path, results)
    _save(path, results | {"done": all(piece.key in kept for piece in pieces)})
    return path


def _cut_off(folder: Path, name: str, data: str | None) -> tuple[Path, Results] | None:
    """Return a file of the same data, whatever its date, that is not done; and its pieces."""
    names = re.sub(r"-\d{4}-\d\d-\d\d-", "-????-??-??-", name)
    for path in sorted(folder.glob(names), reverse=True):
        results = json.loads(path.read_text())
        if not results["done"] and results["data"] == data:
            return path, results["pieces"]
    return None


def _save(path: Path, results: Results) -> None:
    results["date"] = machine.now()
    machine.save(path, results)
