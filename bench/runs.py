"""Runs of experiments, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .experiment import Experiment, Options, Results, run


def interrupt(*arguments: Any, **named: Any) -> Any:
    raise KeyboardInterrupt


def cut_off(
    experiment: Experiment,
    options: Options,
    folder: Path,
    where: Any,
    name: str,
    value: Any = interrupt,
) -> Path:
    """Run an experiment until an attribute that is changed for the time cuts it off; the file."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(where, name, value)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, options, folder)
    (file,) = folder.glob("*.json")
    return file


def go_on(experiment: Experiment, options: Options, folder: Path, file: Path) -> Results:
    """Run the rest of an experiment that was cut off, and check that the file keeps all of it."""
    first: Results = json.loads(file.read_text())
    assert not first["done"]
    assert run(experiment, options, folder) == file
    last: Results = json.loads(file.read_text())
    assert last["done"]
    assert {key: last["pieces"][key] for key in first["pieces"]} == first["pieces"]
    return last


def draw(experiment: Experiment, results: Results, folder: Path) -> list[Any]:
    """Return the drawings of results, all of which can be saved."""
    drawings = experiment.drawings(results)
    for drawing in drawings:
        drawing.figure.savefig(folder / "picture.png")
    return drawings
