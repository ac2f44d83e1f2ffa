"""Run ``mpi_*.py`` on the ranks of mpiexec and ``cuda_*.py`` without a GPU, test by test.

The latter run in Numba's simulator; and once more, as slow tests, with their kernels as compiled
(:mod:`ptx`), but no more examples than by default.

Both take processes of their own. The parent reads the names and marks of their tests from the
source, starts one child for all tests that are run in one way (on so many ranks, in the simulator),
whatever their files, and passes the reports of the child's tests on as its own, so that each has
its name, its outcome and its traceback; the cases of one test are reported as one. If a test ends
the child, the tests behind it are run by another child. With pytest-xdist those on ranks
belong to one worker, and those of CUDA kernels to one (:func:`scope_of`), as they share children.

Marks of the tests in ``mpi_*.py``, or ``pytestmark`` for a whole file:

``pytest.mark.ranks(3, slow=(2, 4), doubling=False, monitored=False)``
    Run on 3 ranks, and on 2 and 4 as a slow test; with recursive doubling in Open MPI's scans; with
    its counts of messages.
``pytest.mark.cudasim``
    Run in the simulator.
"""

from __future__ import annotations

import ast
import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mpi_launch
import pytest
import sampling

# Seconds without the report of any test behind which a child hangs; many examples take longer.
PATIENCE, PATIENCE_EXPLORING = 200, 1200
# Seconds in which other ranks may report that they have failed, too.
GRACE = 1.0
# In the simulator a sample has one case of a function in so many.
ONE_CASE_IN = 3
# The file, beside the reports, of the functions that the child takes to be slow.
SLOW = "slow"


# ---------------------------------------------------------------------------------------------
# Collection, in the parent
# ---------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Any:
    collectors = yield
    if is_run_in_a_child(file_path, parent):
        return [ChildFile.from_parent(parent, path=file_path)]
    return collectors


def is_run_in_a_child(path: Path, parent: pytest.Collector) -> bool:
    """Return False for what this process runs itself: as the child, or on a GPU.

    With ``SPARSESCAN_ON_GPU`` tests of CUDA kernels run on the GPU, or fail.
    """
    is_cuda = path.match("cuda_*.py")
    if parent.config.getoption("--reports") or not (is_cuda or path.match("mpi_*.py")):
        return False
    if is_cuda and "SPARSESCAN_ON_GPU" in os.environ:
        return False
    return not (is_cuda and parent.session.isinitpath(path) and cuda_is_here())


def scope_of(nodeid: str) -> str:
    """Return the tests among which one is that a worker of pytest-xdist runs together."""
    file = nodeid.partition("::")[0]
    kind = Path(file).name.partition("_")[0]
    return kind if kind in ("mpi", "cuda") else file


def cuda_is_here() -> bool:
    """Return whether there is a GPU, or the simulator has been asked for."""
    from numba import cuda

    return bool(cuda.is_available())


class Variant(NamedTuple):
    """How a child is started."""

    ranks: int | None = None  # without mpiexec
    simulator: bool = False
    ptx: bool = False
    doubling: bool = False
    monitored: bool = False


# The children of a session: one for each way in which tests are run.
CHILDREN = pytest.StashKey["dict[Variant, Child]"]()


class ChildFile(pytest.File):
    """A file whose tests are run by children."""

    def collect(self) -> Iterator[ChildTest]:
        tree = ast.parse(self.path.read_text())
        shared = [
            mark
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for mark in marks_of(getattr(node.value, "elts", [node.value]))
        ]
        children = self.session.stash.setdefault(CHILDREN, {})
        for node in tree.body:
            if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
                continue
            own = marks_of(node.decorator_list)
            ranks = [mark for mark in own if mark.name == "ranks"]
            others = [mark for mark in own + shared if mark.name != "ranks"]
            ranks = ranks or [mark for mark in shared if mark.name == "ranks"]
            more = any(argument.arg == "seeds" for argument in node.args.args)
            decorators = [ast.unparse(each) for each in node.decorator_list]
            more |= any(re.search(r"\b(slow|long_run)\(", text) for text in decorators)
            for variant, slow in self._variants(ranks, others):
                child = children.setdefault(variant, Child(variant))
                name = node.name if variant.ranks is None else f"{node.name}[{variant.ranks} ranks]"
                name += "[PTX]" * variant.ptx
                test = ChildTest.from_parent(
                    self, name=name, child=child, line=node.lineno, more=more, new=slow
                )
                for mark in others:
                    test.add_marker(mark.name)
                for name, marked in (
                    ("mpi", variant.ranks is not None),
                    ("cudasim", variant.simulator),
                    ("ptx", variant.ptx),
                    ("slow", slow),
                ):
                    if marked:
                        test.add_marker(name)
                yield test

    def _variants(
        self, ranks: list[pytest.Mark], others: list[pytest.Mark]
    ) -> Iterator[tuple[Variant, bool]]:
        """Yield how a test is run, and whether that is slow."""
        if self.path.match("cuda_*.py"):
            asked = "SPARSESCAN_PTX" in os.environ
            if not asked:
                yield Variant(simulator=True), False
            yield Variant(ptx=True), not asked
        simulator = any(mark.name == "cudasim" for mark in others)
        for mark in ranks:
            options = dict(mark.kwargs)
            slow = options.pop("slow", ())
            for size in (*mark.args, *slow):
                yield Variant(size, simulator, **options), size in slow


def marks_of(nodes: list[ast.expr]) -> list[pytest.Mark]:
    """Return the marks among some decorators whose arguments are literals."""
    names = tuple(f"pytest.mark.{name}" for name in ("ranks", "slow", "release", "cudasim"))
    texts = [text for text in map(ast.unparse, nodes) if text.startswith(names)]
    return [eval(text, {"pytest": pytest}).mark for text in texts]


class FailedInChildError(Exception):
    """A test failed in the child, which said this of its cases."""


class ChildTest(pytest.Item):
    """A test function of a file that a child runs; it may have several cases."""

    def __init__(self, *, child: Child, line: int, more: bool, new: bool, **options: Any) -> None:
        super().__init__(**options)
        self.child, self.takes_more, self._line = child, more, line
        # Whether it is run in this way as a slow test only: all of its cases belong to the rest.
        self.is_new = new
        path = self.path.relative_to(self.config.rootpath).as_posix()
        self.function_id = f"{path}::{self.name.partition('[')[0]}"

    def runtest(self) -> None:
        """Fail, be skipped or pass as all cases did that the child ran."""
        failures, skipped = self.child.results(self)
        if failures:
            raise FailedInChildError("\n\n".join(failures))
        if skipped:
            pytest.skip(skipped)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, FailedInChildError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self._line, self.name


def takes_more(item: pytest.Item) -> bool:
    """Return whether a test runs longer with ``--all``, by `long_run` or the fixture ``seeds``.

    A function that a child runs may have more cases, too.
    """
    if isinstance(item, ChildTest):
        return item.takes_more
    function = getattr(item, "obj", None)
    if getattr(function, "is_hypothesis_test", False) and sampling.added_examples(function):
        return True
    return "seeds" in getattr(item, "fixturenames", ())


# ---------------------------------------------------------------------------------------------
# The child, seen from the parent
# ---------------------------------------------------------------------------------------------


class Child:
    """How tests are run, and what has been heard of those that were; each is a file::function."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._was_run = False
        # Functions that are run in this way as slow tests only: the rest has all of their cases.
        self._new: set[str] = set()
        # The output of the child that ran a function.
        self._outputs: dict[str, str] = {}
        # Reports of each rank by the child's ids, and the ids of tests that ended on it.
        size = variant.ranks or 1
        self._reports: list[dict[str, list[pytest.TestReport]]] = [{} for _ in range(size)]
        self._ended: list[set[str]] = [set() for _ in range(size)]

    def results(self, test: ChildTest) -> tuple[list[str], str]:
        """Return what is shown of failures, and why all cases were skipped, if they were.

        The first call runs all tests that were selected.
        """
        if not self._was_run:
            self._was_run = True
            tests = [item for item in test.session.items if getattr(item, "child", None) is self]
            self._new = {item.function_id for item in tests if item.is_new}
            self._run_all(test.config, [item.function_id for item in tests])
        ids = dict.fromkeys(nodeid for rank in self._reports for nodeid in rank)
        cases = [nodeid for nodeid in ids if function_of(nodeid) == test.function_id]
        if not cases:
            return [f"it was not run:\n{self._outputs[test.function_id]}"], ""
        reasons = [
            report.longrepr[2]
            for nodeid in cases
            for report in self._reports[0].get(nodeid, [])
            if report.skipped and isinstance(report.longrepr, tuple)
        ]
        failures = [text for nodeid in cases for text in self._failures(nodeid)]
        return failures, reasons[0] if len(reasons) == len(cases) else ""

    def _failures(self, nodeid: str) -> list[str]:
        """Return what is shown of each rank on which a case failed."""
        texts = []
        for rank, reports in enumerate(self._reports):
            for report in reports.get(nodeid, []):
                if report.failed:
                    crash = getattr(report.longrepr, "reprcrash", None)
                    what = f"{nodeid}, rank {rank}, {report.when}"
                    title = f"{what}: {crash.message if crash else ''}"
                    sections = [f"---- {title} ----\n{text}" for title, text in report.sections]
                    texts.append("\n".join([title, report.longreprtext, *sections]))
        if not texts and not all(nodeid in ended for ended in self._ended):
            output = self._outputs[function_of(nodeid)]
            texts = [f"{nodeid}: its process ended, or hung:\n{output}"]
        return texts

    def _run_all(self, config: pytest.Config, functions: list[str]) -> None:
        """Run test functions; those behind one that ends the child in another child."""
        while functions:
            finished = self._run(config, functions)
            reported = {function_of(nodeid) for rank in self._reports for nodeid in rank}
            left = [name for name in functions if name not in reported]
            if not finished or len(left) == len(functions):
                break
            functions = left

    def _run(self, config: pytest.Config, functions: list[str]) -> bool:
        """Start the child, read what it reports, and return False if it was stopped."""
        patient = config.getoption("--explore") or self.variant.ptx
        patience = PATIENCE_EXPLORING if patient else PATIENCE
        with tempfile.TemporaryDirectory() as name, open(f"{name}/output", "w+") as output:
            arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--reports={name}"]
            arguments += [f"--rootdir={config.rootpath}"]
            every = config.getoption("--all") or config.getoption("-m")
            rest = config.getoption("--rest")
            Path(name, SLOW).write_text("\n".join(self._new))
            if self.variant.ptx:
                # All tests, but few examples, as each may have kernels of its own.
                arguments += ["-m", "slow or not slow"]
            elif every:
                arguments += ["--rest" if rest else "--all"]
            arguments += ["--explore"] * config.getoption("--explore")
            arguments += ["--capture=tee-sys", "-o", "addopts="]
            arguments += ["-o", f"faulthandler_timeout={patience - 10}"]
            arguments += functions
            start = time.monotonic()
            process = self._start(arguments, config.rootpath, output)
            heard = 0
            try:
                while process.poll() is None and time.monotonic() < start + patience:
                    time.sleep(0.05)
                    size = sum(file.stat().st_size for file in Path(name).glob("*.jsonl"))
                    if size != heard:
                        heard, start = size, time.monotonic()
                finished = process.poll() is not None
            finally:
                # It ends the ranks, which it would not if it were killed.
                process.terminate()
                process.wait()
            output.seek(0)
            said = output.read()[-20_000:]
            if not finished:
                said += f"\nno news for {patience} s"
            self._outputs |= dict.fromkeys(functions, said)
            for rank in range(len(self._reports)):
                self._read(config, rank, Path(name, f"{rank}.jsonl"))
        return finished

    def _start(self, arguments: list[str], folder: Path, output: Any) -> subprocess.Popen[str]:
        env = {"NUMBA_ENABLE_CUDASIM": "1"} if self.variant.simulator else {}
        env |= {"SPARSESCAN_PTX": "1"} if self.variant.ptx else {}
        command = [sys.executable, *arguments]
        if self.variant.ranks is not None:
            command = mpi_launch.command(self.variant.ranks, *arguments)
            env |= mpi_launch.settings()
            env |= mpi_launch.DOUBLING if self.variant.doubling else {}
            env |= mpi_launch.MONITORING if self.variant.monitored else {}
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )

    def _read(self, config: pytest.Config, rank: int, file: Path) -> None:
        for line in file.read_text().splitlines() if file.exists() else ():
            kind, content = json.loads(line)
            if kind == "started":
                self._reports[rank][content] = []
            elif kind == "ended":
                self._ended[rank].add(content)
            else:
                report = config.hook.pytest_report_from_serializable(config=config, data=content)
                if isinstance(report.longrepr, list):
                    report.longrepr = tuple(report.longrepr)  # why a test is skipped, and where
                self._reports[rank][report.nodeid].append(report)


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


# ---------------------------------------------------------------------------------------------
# In the child
# ---------------------------------------------------------------------------------------------


class Reporter:
    """Write what becomes of each test to a file, one for each rank.

    Where a test fails on one rank, the others may wait for that rank in vain, and all are ended.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._folder = config, Path(config.getoption("--reports"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark tests as slow that the parent runs in this way as slow tests.

        In the simulator a sample has few cases of each; all of them run as compiled in the rest.
        """
        names = set((self._folder / SLOW).read_text().splitlines())
        for item in items:
            if function_of(item.nodeid) in names:
                item.add_marker("slow")
        if "NUMBA_ENABLE_CUDASIM" in os.environ and not any(
            self._config.getoption(name) for name in ("--all", "--explore")
        ):
            functions = map(function_of, [item.nodeid for item in items])
            earlier: collections.Counter[str] = collections.Counter()
            kept = []
            for item, name in zip(items, functions, strict=True):
                if earlier[name] % ONE_CASE_IN == 0:
                    kept.append(item)
                earlier[name] += 1
            items[:] = kept

    def _world(self) -> Any:
        """Return all ranks, None without MPI; a test file has imported it, or not."""
        mpi = sys.modules.get("mpi4py.MPI")
        return mpi and mpi.COMM_WORLD

    def _write(self, kind: str, content: Any) -> None:
        world = self._world()
        with open(self._folder / f"{world.rank if world else 0}.jsonl", "a") as file:
            print(json.dumps([kind, content]), file=file)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("ended", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook, world = self._config.hook, self._world()
        content = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write("report", content)
        if report.failed and world and world.size > 1:
            time.sleep(GRACE)
            world.Abort(1)


def reason_to_skip(item: pytest.Item) -> str | None:
    """Return what a test needs that is not installed."""
    if item.get_closest_marker("mpi") and not mpi_launch.IS_INSTALLED:
        return "mpi4py or mpiexec is not installed (the mpi extra)"
    on_device = item.get_closest_marker("cudasim") or item.get_closest_marker("ptx")
    if on_device and importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed (the test extra installs it on Linux)"
    return None
