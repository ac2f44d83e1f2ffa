"""Tests that a child runs are reported one by one, whatever becomes of the child."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fake_cupy
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


# Tests that --all runs as a run without options does, for longer, and alone.
MORE = """
import pytest
from hypothesis import given, settings, strategies as st
from sampling import examples, long_run

def test_alike():
    pass

@settings(max_examples=25)
@given(st.integers())
def test_fixed(x):
    pass

@settings(max_examples=examples(12))
@given(st.integers())
def test_fewer(x):
    pass

@given(st.integers())
def test_given(x):
    pass

@settings(max_examples=long_run(12, 3))
@given(st.integers())
def test_more_given(x):
    pass

def test_more_seeds(seeds):
    pass

@pytest.mark.slow
def test_only():
    pass

@pytest.mark.release
def test_release():
    pass
"""

# Which notes its seeds and cases, with the number of ranks.
SEEDS = """
import os
import pytest
from sampling import slow

def note(*words):
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        with open("noted", "a") as file:
            print(os.environ.get("OMPI_COMM_WORLD_SIZE", "no"), "ranks:", *words, file=file)

def test_seeds(seeds):
    note("seeds", *seeds(2, 5, 9))
    note("one seed", *seeds(1, 1, 9))

@pytest.mark.slow
def test_slow_seeds(seeds):
    note("slow seeds", *seeds(2, 5, 9))

@pytest.mark.parametrize("case", [1, *slow(2)])
def test_cases(case):
    note("case", case)
"""

# Which notes the worker that runs it, and whether CUDA kernels run in the simulator there.
CUDA = """
import os
import pytest

@pytest.mark.parametrize("case", range(8))
def test_where(case):
    names = "PYTEST_XDIST_WORKER", "NUMBA_ENABLE_CUDASIM"
    with open("noted", "a") as file:
        print(*(os.environ.get(name, "no") for name in names), file=file)
"""


def run_pytest(folder: Path, *options: str, tests: str = ".") -> str:
    """Return what is printed by pytest, with this folder's tests and these helpers."""
    shutil.copy(TESTS / "conftest.py", folder)
    path = os.pathsep.join([str(TESTS / "support"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", os.devnull, "--rootdir=.", tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "--color=no"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.mpi
def test_the_rest_is_what_all_adds(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(MORE)
    ranks = "pytestmark = pytest.mark.ranks(2, slow=(3,))\n"
    (tmp_path / "mpi_probe.py").write_text(MORE + ranks)
    alike, more, only = (
        {f"test_probe.py::test_{name}" for name in names}
        for names in (
            ["alike", "fixed", "fewer", "given"],
            ["more_given", "more_seeds"],
            ["only"],
        )
    )
    for tests in (alike, more):
        of_children = {test.replace("test_probe", "mpi_probe") for test in tests}
        only |= {f"{test}[3 ranks]" for test in of_children}
        tests |= {f"{test}[2 ranks]" for test in of_children}
    only |= {f"mpi_probe.py::test_only[{ranks} ranks]" for ranks in (2, 3)}
    release = {f"mpi_probe.py::test_release[{ranks} ranks]" for ranks in (2, 3)}
    release.add("test_probe.py::test_release")
    for options, expected in (
        ([], alike | more),
        (["--rest"], more | only),
        (["--all"], alike | more | only | release),
    ):
        # All of their names have "test" in them.
        printed = run_pytest(tmp_path, "--collect-only", "-q", "-k", "test", *options)
        assert {line for line in printed.splitlines() if "::" in line} == expected, printed


@pytest.mark.slow
@pytest.mark.mpi
def test_the_rest_repeats_no_seeds_and_cases(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(SEEDS)
    # One child, on two ranks, runs tests of both files.
    for name, ranks in (("probe", "1, slow=(2,)"), ("other", "2")):
        marks = f"pytestmark = pytest.mark.ranks({ranks})\n"
        (tmp_path / f"mpi_{name}.py").write_text(f"{SEEDS}{marks}")
    some = ["seeds 0 1", "one seed 0", "case 1"]
    rest = ["seeds 2 3 4", "one seed 0", "slow seeds 0 1 2 3 4", "case 2"]
    new = ["seeds 0 1 2 3 4", "one seed 0", "slow seeds 0 1 2 3 4", "case 1", "case 2"]
    for options, expected in (
        ([], {"no": some, "1": some, "2": some}),
        (["--rest"], {"no": rest, "1": rest, "2": rest + new}),
    ):
        printed = run_pytest(tmp_path, "-q", *options)
        noted = (tmp_path / "noted").read_text().splitlines()
        lines = [f"{ranks} ranks: {line}" for ranks in expected for line in expected[ranks]]
        assert sorted(noted) == sorted(lines), printed
        (tmp_path / "noted").unlink()


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("numba_cuda"), reason="numba-cuda is not installed")
def test_workers_and_no_children_run_tests_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU they fail there: in the simulator they would pass, and tell nothing."""
    (tmp_path / "cuda_probe.py").write_text(CUDA)

    def noted(*options: str) -> set[str]:
        printed = run_pytest(tmp_path, "-q", "-n", "2", *options, tests="cuda_probe.py")
        assert "1 passed" in printed or "8 passed" in printed, printed
        lines = (tmp_path / "noted").read_text().splitlines()
        (tmp_path / "noted").unlink()
        return {*lines}

    assert {line.split()[1] for line in noted("--dist", "loadfile")} == {"1"}
    monkeypatch.setenv("SPARSESCAN_ON_GPU", "1")
    assert noted("--dist", "load") == {"gw0 no", "gw1 no"}
    assert len(noted("--dist", "loadfile")) == 1
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 0))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert fake_cupy.real() is cupy  # which raises what is wrong
    monkeypatch.delenv("SPARSESCAN_ON_GPU")
    assert fake_cupy.real() is None


@pytest.mark.slow
@pytest.mark.mpi
def test_each_test_has_its_name_and_its_outcome(tmp_path: Path) -> None:
    (tmp_path / "mpi_probe.py").write_text(PROBE)
    printed = run_pytest(tmp_path, "-rA")
    outcomes = re.findall(r"^([A-Z]+) mpi_probe.py::test_(.*?) *(?:- |$)", printed, re.M)
    assert sorted(outcomes) == [
        ("FAILED", "cases[2 ranks]"),
        ("FAILED", "killed[2 ranks]"),
        ("FAILED", "one_rank_fails[2 ranks]"),
        ("PASSED", "good[2 ranks]"),
    ], printed
    for text in (
        "test_cases[2], rank 0, call: AssertionError: 2 is not 1",
        "rank 1, call: AssertionError: only here",
        "its last words",
    ):
        assert text in printed
    assert "3 failed, 1 passed, 1 skipped, 7 deselected" in printed
