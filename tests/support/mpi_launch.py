"""Start Python on some ranks of this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

SUPPORT = Path(__file__).parent
# The one that was installed beside this Python comes first.
_FOLDERS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
MPIEXEC = shutil.which("mpiexec", path=_FOLDERS)
IS_INSTALLED = MPIEXEC is not None and importlib.util.find_spec("mpi4py") is not None
_SETTINGS = {
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # Open MPI asks for it where there are fewer cores than ranks, and of root.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(SUPPORT.parent.parent), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    ),
}
# Without a prefix the scan is linear in Open MPI, which is told so by these.
DOUBLING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_exscan_algorithm": "2",
}
# It counts its messages.
MONITORING = {"OMPI_MCA_pml_monitoring_enable": "1"}
# Open MPI calls it between two looks for a message: a rank that waits takes half a core from those
# that compute. One that sleeps leaves it to them: beside others, tests take two thirds as long.
_SLEEP = """
#include <time.h>
int sched_yield(void) { struct timespec pause = {0, 100000}; return nanosleep(&pause, 0); }
"""


@cache
def sleeping() -> dict[str, str]:
    """Return the environment of ranks that sleep while they wait, where C can be compiled."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        return {}
    library = SUPPORT / "__pycache__" / "sleep.so"
    library.parent.mkdir(exist_ok=True)
    own = library.with_suffix(f".{os.getpid()}")
    options = ["-x", "c", "-", "-shared", "-fPIC", "-o", str(own)]
    compiled = subprocess.run([compiler, *options], input=_SLEEP, text=True, capture_output=True)
    if compiled.returncode:
        return {}
    own.replace(library)
    return {"LD_PRELOAD": str(library)}


def settings() -> dict[str, str]:
    """Return the environment of ranks."""
    return _SETTINGS | sleeping()


class Ended(NamedTuple):
    """How a run ended: mpiexec's exit code, and both streams of all ranks."""

    code: int
    output: str


def command(ranks: int, *arguments: str) -> list[str]:
    """Return the command that starts Python with these arguments, with one thread a rank."""
    assert MPIEXEC is not None
    return [MPIEXEC, "-n", str(ranks), sys.executable, *arguments]


def run(ranks: int, *arguments: object, timeout: float = 300) -> Ended:
    """Run Python on some ranks, until it ends."""
    process = subprocess.Popen(
        command(ranks, *map(str, arguments)),
        env=os.environ | settings(),
        stdin=subprocess.DEVNULL,
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
    return Ended(process.returncode, output)
