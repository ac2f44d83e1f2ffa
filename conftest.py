"""In how many processes tests run, whichever folders are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Let two processes share whole folders; a few files, and benchmarks, take one."""
    alone = config.getoption("benchmark_only")
    return 0 if alone or not all(Path(path).is_dir() for path in config.args) else 2
