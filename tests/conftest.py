"""Hypothesis profiles: the same examples every time, or with ``--explore`` many random ones."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

collect_ignore_glob = ["mpi_*.py"]  # scripts for mpiexec


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--explore",
        action="store_true",
        help="property tests: many random examples, not a few fixed",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Both without a deadline: the first example that meets a kernel compiles it.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    settings.register_profile(
        "ci",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=60,
        suppress_health_check=slow,
    )
    settings.register_profile(
        "explore", deadline=None, max_examples=2000, suppress_health_check=slow, print_blob=True
    )
    settings.load_profile("explore" if config.getoption("--explore") else "ci")


def pytest_collection_finish() -> None:
    # What has been imported stays: no collection has to look at it, of which tests ask for many.
    gc.freeze()
