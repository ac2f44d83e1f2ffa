"""Programs of users pass type checkers, and assert what these know of results."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "support" / "typed"


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_programs_of_users_pass(checker: str, tmp_path: Path) -> None:
    command = {
        "mypy": [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path)],
        "pyright": ["pyright", "--pythonpath", sys.executable],
    }[checker]
    if checker == "pyright" and shutil.which("pyright") is None:
        pytest.skip("no pyright")
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    # Outside the repository, whose settings are not a user's.
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    names = sorted(path.name for path in FOLDER.glob("*.py"))
    run = subprocess.run([*command, *names], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
