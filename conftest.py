"""In how many processes tests run, whichever folders are asked for, and what these share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Set what all processes of the tests share.

    Bytecode is kept, as kernels are, even where Python is told not to: some 40 processes import the
    same modules, and each would compile them anew. Ranks are on one machine: to find out that it
    needs nothing else takes Open MPI a second. Threads of PyTorch sleep between its loops, and do
    not spin on the cores of other processes.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OMPI_MCA_btl", "self,sm")
    if not config.getoption("benchmark_only"):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Let two processes share whole folders; a few files, and benchmarks, take one."""
    alone = config.getoption("benchmark_only")
    return 0 if alone or not all(Path(path).is_dir() for path in config.args) else 2
