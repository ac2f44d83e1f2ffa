"""Every script of the gallery runs to its end, in which its own claims hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mpi_launch
import pytest

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"
SCRIPTS = sorted(GALLERY.glob("plot_*.py"))

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


def test_there_are_scripts_and_each_has_a_title() -> None:
    assert len(SCRIPTS) >= 8
    for script in SCRIPTS:
        title, rule = script.read_text(encoding="utf-8").splitlines()[1:3]
        assert rule == "=" * len(title), script.name


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_without_a_warning(script: Path, tmp_path: Path) -> None:
    if script.stem == "plot_mpi" and not mpi_launch.IS_INSTALLED:
        pytest.skip("needs mpi4py and mpiexec")
    # Without a display matplotlib warns that it shows nothing.
    shown = "ignore:FigureCanvasAgg is non-interactive:UserWarning"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", shown, script],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    assert not list(tmp_path.iterdir())
