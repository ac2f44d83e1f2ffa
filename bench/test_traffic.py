"""Counts of what kernels move: a quick run, beside what follows from the sizes, and its section."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from . import report, traffic, workloads
from .experiment import Options, Results, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(traffic.EXPERIMENT, Options(quick=True, device="cpu"), tmp_path_factory.mktemp("x"))


@pytest.fixture(scope="module")
def results(file: Path) -> Results:
    results: Results = json.loads(file.read_text())
    return results


def test_every_kernel_moves_what_must_move(results: Results) -> None:
    floors = set()
    for piece in results["pieces"].values():
        for name, kept in piece["kernels"].items():
            assert 32 * kept["requests"] >= kept["sectors"] >= kept["requests"]
            assert kept["sectors"] >= kept["in blocks"] >= kept["once"] > 0
            assert kept["turns"] >= kept["conflicts"] >= 0
            if kept["floor"] is not None:
                floors.add(name)
                assert 32 * kept["sectors"] >= kept["floor"] > 0
                assert kept["global"] >= kept["floor"]
    assert {
        "check_indices",
        "sweep_steps",
        "vectors",
        "multiply",
        "carry",
        "sweep",
        "chained",
    } < floors


def test_bytes_of_a_kernel_are_those_of_its_loads(results: Results) -> None:
    """Rows are read in pairs, the first and the last pointer once more, each index once."""
    pair = [workloads.with_indices(x, np.int32) for x in workloads.conv_pair(6, (4, 8, 16))]
    read = sum(2 + 2 * matrix.shape[0] + matrix.nnz for matrix in pair)
    piece = next(iter(results["pieces"].values()))
    counted = piece["kernels"]["check_indices"]
    assert counted["global"] == 4 * read
    assert counted["launches"] == len(pair)
    assert counted["shared"] == counted["block barriers"] == counted["warp barriers"] == 0


def test_the_report_has_a_section(file: Path, results: Results, tmp_path: Path) -> None:
    page = report.write(file.parent, tmp_path / "report.html").read_text()
    section = page[page.index(f">{traffic.EXPERIMENT.title}</h2>") :]
    for text in ("moved / floor", "bank conflicts", *results["pieces"]):
        assert text in section
    (drawing,) = traffic.EXPERIMENT.drawings(results)
    drawing.figure.savefig(tmp_path / "picture.png")
    assert traffic.EXPERIMENT.drawings(results | {"pieces": {}}) == []


def test_nothing_is_counted_on_a_gpu() -> None:
    with pytest.raises(SystemExit, match="traffic is of the CPU"):
        list(traffic.EXPERIMENT.pieces(Options(quick=True, device="cuda")))
