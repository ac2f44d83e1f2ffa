"""Options, what is run without any, and the fixtures that files share."""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child_tests
import pytest
import sampling
from child_tests import pytest_collect_file  # noqa: F401
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

import sparsescan.execution.stages
from sparsescan.execution import threads
from sparsescan.plan import once
from sparsescan.plan.costs import cpu
from sparsescan.plan.costs.cpu import Cpu, load_cpu

# Scripts and helpers: they hold no tests, and some run on several ranks only.
collect_ignore = ["support"]
# Files whose tests take longest, in the order in which they begin.
LONGEST = (
    *("cuda_*.py", "test_site.py", "test_tables.py", "test_conformance.py", "mpi_*.py"),
    *("test_torch_transforms.py", "test_compile_kernels.py", "test_strategies.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        default="SPARSESCAN_ALL_TESTS" in os.environ,
        help="slow tests, too, and long runs of others",
    )
    parser.addoption(
        "--rest",
        action="store_true",
        help="slow tests, but those before a release, and a quarter of the long runs",
    )
    parser.addoption(
        "--explore",
        action="store_true",
        help="all tests; many random examples, not a few fixed",
    )
    parser.addoption("--reports", metavar="FOLDER", help="of the process that runs this as a child")


def pytest_configure(config: pytest.Config) -> None:
    config.option.all = config.getoption("--all") or config.getoption("--rest")
    # None has a deadline: the first example that meets a kernel compiles it.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    settings.register_profile(
        "sample",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=sampling.EXAMPLES,
        suppress_health_check=slow,
    )
    settings.register_profile(
        "explore", deadline=None, max_examples=2000, suppress_health_check=slow, print_blob=True
    )
    settings.load_profile("explore" if config.getoption("--explore") else "sample")
    sampling.is_long = config.option.all or config.getoption("--explore")
    sampling.is_rest = config.getoption("--rest") and not config.getoption("--explore")
    if config.getoption("--reports"):
        config.pluginmanager.register(child_tests.Reporter(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here, and leave slow tests out unless they are asked for."""
    for item in items:
        if reason := child_tests.reason_to_skip(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--rest"):
        left = [item for item in items if is_slow(item) or child_tests.takes_more(item)]
        left = [item for item in left if not item.get_closest_marker("release")]
    elif any(config.getoption(name) for name in ("--all", "--explore", "-m")):
        left = items
    else:
        left = [item for item in items if not is_slow(item)]
    kept = set(left)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(left, key=turn_of)


def turn_of(item: pytest.Item) -> int:
    """Return when a test's file has its turn; nothing long is left to one process in the end."""
    turns = [turn for turn, name in enumerate(LONGEST) if item.path.match(name)]
    return min(turns, default=len(LONGEST))


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "release"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Give a test that is in the sample, too, other examples with ``--rest``."""
    function = getattr(item, "obj", None)
    is_given = getattr(function, "is_hypothesis_test", False)
    if not (is_given and item.config.getoption("--rest")) or is_slow(item):
        return (yield)
    with sampling.other_examples(function):
        return (yield)


class Scheduling(LoadFileScheduling):
    """A worker runs whole files, and all tests that the same children run."""

    def _split_scope(self, nodeid: str) -> str:
        return child_tests.scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    # Where tests are shared out one by one, pytest-xdist does it by itself.
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    # Imported objects stay: no collection has to look at them, and tests ask for many.
    gc.freeze()
    # What Numba compiled stays, too: few collections look at all of it.
    gc.set_threshold(20_000, 20, 100)


def pytest_sessionfinish() -> None:
    # Not again and again on the way out.
    gc.collect()
    gc.freeze()


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Callable[..., range]:
    """Return the seeds of some cases: a few and always the same, or many fresh ones.

    All ranks get the same.
    """

    def choose(few: int, usual: int, many: int) -> range:
        if not request.config.getoption("--explore"):
            if not request.config.getoption("--all"):
                return range(few)
            # Behind those that a run without options has, where --rest asks for more of them.
            has_run = request.config.getoption("--rest") and not is_slow(request.node)
            return range(few if has_run and few < usual else 0, usual)
        start = random.SystemRandom().randrange(1 << 30)
        mpi = sys.modules.get("mpi4py.MPI")
        start = mpi.COMM_WORLD.bcast(start) if mpi else start
        return range(start, start + many)

    return choose


@pytest.fixture
def with_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Set the number of threads, with as many workers, and work cut into the smallest pieces."""
    crews = []

    def set_threads(count: int) -> None:
        crews.append(threads.Crew(max(count - 1, 1)))
        monkeypatch.setattr(once, "_plans", {})
        # By name, because the function `sparsescan.plan` hides the module.
        for name in ("choice", "scan_plan"):
            module = importlib.import_module(f"sparsescan.plan.{name}")
            monkeypatch.setattr(module, "thread_count", lambda: count)
        monkeypatch.setattr(threads, "_crew", crews[-1])

    monkeypatch.setattr(sparsescan.execution.stages, "RUN_GRAIN", 1)
    monkeypatch.setattr(sparsescan.execution.stages, "ROW_GRAIN", 1)
    yield set_threads
    for crew in crews:
        crew.close()


@pytest.fixture
def as_if(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let plans be made for a machine with so many threads."""
    built_in = load_cpu(Path("no such file"))

    def set_machine(count: int, machine: Cpu = built_in) -> None:
        monkeypatch.setattr(once, "_plans", {})
        for name in ("choice", "scan_plan"):
            module = importlib.import_module(f"sparsescan.plan.{name}")
            monkeypatch.setattr(module, "thread_count", lambda: count)
        choice = importlib.import_module("sparsescan.plan.choice")
        monkeypatch.setattr(choice, "load_cpu", lambda: machine)

    return set_machine


@pytest.fixture
def small_grains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short chains of small steps are worth several threads too."""
    monkeypatch.setattr(cpu, "RUN_GRAIN", 1)
    monkeypatch.setattr(cpu, "ROW_GRAIN", 1000)
