"""Benchmarks are collected for ``pytest --benchmark-only`` only, their own tests otherwise."""

from __future__ import annotations

from pathlib import Path

import mpi_launch
import pytest

from . import machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reduced",
        action="store_true",
        help="run every benchmark once, on small data: does it work at all?",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("benchmark_only"):
        machine.pin()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    kind = "bench_" if config.getoption("benchmark_only") else "test_"
    wanted = collection_path.is_dir() or collection_path.name.startswith(kind)
    return None if wanted else True


@pytest.fixture(scope="session")
def reduced(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("reduced"))


@pytest.fixture
def sleeping_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks sleep while they wait: how long they take is not looked at."""
    for name, value in mpi_launch.sleeping().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _all_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process on the CPUs that it has."""
    monkeypatch.setattr(machine, "pin", lambda: None)
