"""Start the scripts ``mpi_*.py`` on some ranks of this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

__all__ = ["Ended", "needs_mpi", "run"]

TESTS = Path(__file__).parent
# The one that was installed beside this Python comes first.
_FOLDERS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
MPIEXEC = shutil.which("mpiexec", path=_FOLDERS)
# Without a prefix the scan is linear in Open MPI, which is told so by these.
DOUBLING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_exscan_algorithm": "2",
}

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpi4py or mpiexec is not installed (the mpi extra)",
)


class Ended:
    """How a run ended.

    Attributes
    ----------
    code : int
        Exit code of ``mpiexec``.
    output : str
        Of all ranks, both streams.
    seconds : float
        How long it took.
    """

    def __init__(self, code: int, output: str, seconds: float) -> None:
        self.code, self.output, self.seconds = code, output, seconds


def run(size: int, script: str, *arguments: object, timeout: float = 120, **env: str) -> Ended:
    """Run a script on `size` ranks, each with one thread."""
    assert MPIEXEC is not None
    settings = {
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        # Open MPI asks for it where there are fewer cores than ranks, and of root.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [MPIEXEC, "-n", str(size), sys.executable, "-m", "mpi4py", str(TESTS / script)]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        env=os.environ | settings | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # It ends the ranks, which it would not if it were killed.
        process.terminate()
        output = f"{process.communicate()[0]}\nnot done after {timeout} s"
    return Ended(process.returncode, output, time.monotonic() - start)
