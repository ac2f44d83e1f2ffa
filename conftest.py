"""In how many processes tests run, whichever folders are asked for, and how their threads wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let threads of PyTorch sleep between its loops, not spin on the cores of other processes."""
    if not config.getoption("benchmark_only"):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Let two processes share whole folders; a few files, and benchmarks, take one."""
    alone = config.getoption("benchmark_only")
    return 0 if alone or not all(Path(path).is_dir() for path in config.args) else 2
