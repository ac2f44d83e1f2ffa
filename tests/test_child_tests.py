"""Tests that a child runs are reported one by one, whatever becomes of the child."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROBE = """
import os, signal
import pytest
from mpi4py.MPI import COMM_WORLD as world

pytestmark = pytest.mark.ranks(2, slow=(3,))

def test_good():
    world.Barrier()

@pytest.mark.parametrize("k", [1, 2])
def test_cases(k):
    assert k == 1, f"{k} is not 1"

def test_one_rank_fails():
    assert world.rank == 0, "only here"
    world.Barrier()

def test_killed():
    print("its last words", flush=True)
    if world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    world.Barrier()

@pytest.mark.slow
def test_slow():
    pass

def test_skipped():
    pytest.skip("not here")
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_each_test_has_its_name_and_its_outcome(tmp_path: Path) -> None:
    (tmp_path / "mpi_probe.py").write_text(PROBE)
    shutil.copy(TESTS / "conftest.py", tmp_path)
    path = os.pathsep.join([str(TESTS / "support"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-c", os.devnull, "--rootdir=.", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "--color=no"},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = re.findall(r"^([A-Z]+) mpi_probe.py::test_(.*?) *(?:- |$)", done.stdout, re.M)
    assert sorted(outcomes) == [
        ("FAILED", "cases[2 ranks]"),
        ("FAILED", "killed[2 ranks]"),
        ("FAILED", "one_rank_fails[2 ranks]"),
        ("PASSED", "good[2 ranks]"),
    ], done.stdout + done.stderr
    for text in (
        "test_cases[2], rank 0, call: AssertionError: 2 is not 1",
        "rank 1, call: AssertionError: only here",
        "its last words",
    ):
        assert text in done.stdout
    assert "3 failed, 1 passed, 1 skipped, 7 deselected" in done.stdout
