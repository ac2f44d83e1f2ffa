"""Another user: without a home, or a folder to write to, and MPI as the pages print it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import mpi_launch
import numpy as np
import pytest

import sparsescan

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# It is in no /etc/passwd, as the user of ``docker run --user 1234``.
OTHER = 1234
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0

SCAN = """
    import warnings
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        import numpy as np, sparsescan
        from sparsescan.recurrent import RNN
        jacobians = [np.eye(3) / 2] * 4
        print(str(sparsescan.plan(jacobians)).partition("(")[0])
        if {whole}:
            print(sparsescan.exclusive_scan(np.ones(3), jacobians)[-1])
            step = RNN(3, 4).training_step()
            output, _ = step.forward(np.ones((5, 2, 3)))
            print(step.backward(np.ones_like(output)).input.shape)
    for each in warned:
        print(each.category.__name__, "NUMBA_CACHE_DIR" in str(each.message))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder that all users can read; pytest's own are for one user only."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def by_other(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Return what a command prints that another user runs, with nothing of our environment."""
    done = run([*other_user(), *command], folder, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@cache
def other_user() -> Sequence[str]:
    """Return the command that makes another user run what follows it, who can read our files.

    Where Python lies in the home of root, the user may read everything, but write nothing.
    """
    if not IS_ROOT or shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, and root, who can be another user")
    plain = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    version = [sys.executable, "-c", "import numba, sparsescan.errors, sys; print(sys.version)"]
    for user in (plain, [*plain, *reading]):
        done = run([*user, *version], Path("/"), {"NUMBA_CACHE_DIR": "/dev/null/folder"})
        if done.stdout.strip() == sys.version:
            return user
    pytest.skip(f"another user cannot run this Python: {done.stderr[-300:]}")


def run(
    command: Sequence[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command with no environment but this, a path, and this package."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    return subprocess.run(
        command,
        env={"PATH": path, "PYTHONPATH": str(ROOT), **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def scan(whole: bool) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(SCAN.format(whole=whole))]


@pytest.mark.slow
@pytest.mark.parametrize("named", ["nothing", "no such home", "a home of root", "a cache of root"])
def test_kernels_are_compiled_in_memory_where_nothing_can_be_written(
    folder: Path, named: str
) -> None:
    environment = {
        "nothing": {},
        "no such home": {"HOME": "/no/such/home"},
        "a home of root": {"HOME": str(folder)},
        "a cache of root": {"NUMBA_CACHE_DIR": str(folder)},
    }[named]
    whole = named == "nothing"
    results = ["[0.125 0.125 0.125]", "(5, 2, 3)"] if whole else []
    expected = ["ScanPlan", *results, "RuntimeWarning True"]
    assert by_other(scan(whole), folder, **environment).splitlines() == expected
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_cache_without_a_home(folder: Path) -> None:
    cache, here = folder / "cache", folder / "here"
    for each in (cache, here):
        each.mkdir()
        os.chmod(each, 0o777)
    printed = by_other(scan(False), here, NUMBA_CACHE_DIR=str(cache))
    assert printed.splitlines() == ["ScanPlan"]
    info = [sys.executable, "-m", "sparsescan", "info"]
    printed = by_other(info, here, NUMBA_CACHE_DIR=str(cache))
    assert f"Numba cache {cache}" in printed
    assert "calibration none" in printed
    printed = by_other(info, here)
    # Without a home Numba's folder would be one called ~, wherever the process is.
    assert "Numba cache none" in printed
    assert not list(here.iterdir())


# -- MPI as printed -------------------------------------------------------------------------------

COMMANDS = [
    (page, line)
    for page in ("start.md", "how/workers.md")
    for line in re.findall(r"^[^`\n]*mpiexec -n .*$", (DOCS / page).read_text(), re.MULTILINE)
]


def test_pages_print_commands_for_mpi() -> None:
    assert [page for page, _ in COMMANDS] == ["start.md", "how/workers.md"]
    for page, _ in COMMANDS:
        text = (DOCS / page).read_text()
        for said in (".venv/bin/mpiexec", "--map-by :OVERSUBSCRIBE", "--allow-run-as-root"):
            assert said in text, (page, said)


@pytest.mark.slow
@pytest.mark.skipif(not mpi_launch.IS_INSTALLED, reason="needs mpi4py and mpiexec")
@pytest.mark.parametrize(
    ("page", "command", "who"),
    [(*command, "this user") for command in COMMANDS] + [(*COMMANDS[0], "another user")],
)
def test_a_command_for_mpi_runs_as_it_is_printed(
    folder: Path, page: str, command: str, who: str
) -> None:
    here = folder / "here"
    here.mkdir()
    os.chmod(here, 0o777)
    (here / ".venv").symlink_to(sys.prefix)
    start = (DOCS / "start.md").read_text()
    (many,) = re.findall(r"`many\.py`:\n\n```[^\n]*\n(.*?)^```", start, re.DOTALL | re.MULTILINE)
    (here / "many.py").write_text(f"{many}\nprint('gradients', len(grads))\n")
    sparsescan.save_chain(here / "chain.npz", np.ones(3), [np.eye(3)] * 8)
    shell = ["bash", "-euo", "pipefail", "-c", command]
    if who == "another user":
        if "--ambient-caps=+dac_read_search" in other_user():
            pytest.skip("Open MPI finds out by itself that Python lies in the home of root")
        printed = by_other(shell, here, HOME=str(here), NUMBA_CACHE_DIR=str(here))
    else:
        kept = {"NUMBA_CACHE_DIR", "TMPDIR"} & os.environ.keys()
        done = run(shell, here, {name: os.environ[name] for name in kept} | {"HOME": str(here)})
        assert done.returncode == 0, done.stderr[-4000:]
        printed = done.stdout
    assert SHOWN[page] in printed


SHOWN = {
    "start.md": "\n".join(["gradients 250"] * 4),
    "how/workers.md": "8 gradients",
}
