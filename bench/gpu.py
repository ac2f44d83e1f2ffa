"""``bench/gpu.sh OUTDIR``: all that needs a GPU, in parts, those first that tell most.

Every part is a process of its own with a limit, so that one that fails or hangs leaves the others
alone. What it has found is in the one JSON file within a second: stopped at any moment, that says
what ran, what failed and what is left. Parts that are not timed run at once. Prints a table at the
end, and returns 1 if a part failed or could not be run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from . import gpu_parts, gpu_table, machine
from .experiment import as_text
from .files import ended
from .gpu_processes import ROOT, WORKERS, Job, run_part, run_sanitizer, run_tests, stop_all
from .gpu_races import RACES

Report = dict[str, Any]


class Part(NamedTuple):
    """A part of a run.

    Attributes
    ----------
    name : str
        What it is called.
    seconds : float
        Its limit.
    together : str
        Neighbours with the same word here run at once; "" for one that runs alone.
    informs : bool
        Whether it only tells something, and nothing has failed if it is not ok.
    """

    name: str
    seconds: float
    together: str = ""
    informs: bool = False


# What a machine that is lent for minutes runs first, in 150 seconds; then, if that has gone well,
# in 400 seconds, the rest. Limits are for parts that hang.
FIRST = (
    Part("environment", 10),
    Part("preflight", 90),
    Part("families", 60, "first checks"),
    Part("chained", 60, "first checks"),
    Part("rnn", 60),
    Part("pair", 30),
)
SECOND = (
    Part("tests", 200, "checks"),
    Part("memcheck", 200, "checks"),
    Part("repeat", 200, "checks"),
    Part("steps", 60),
    Part("affine", 30),
    Part("sweeps", 40),
    Part("level", 30),
    Part("sizes", 90),
    # The compiler may leave out barriers of a warp, and be right: what it finds need be no race.
    Part("racecheck", 60, informs=True),
)
PARTS = (*FIRST, *SECOND)
CALLS = {"first": FIRST, "second": SECOND}
# Seconds of a run, unless others are given, and those for plots and tables at its end.
TOTAL, END = 540, 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="all parts, or some")
    run_parser.add_argument("folder", type=Path, metavar="OUTDIR")
    run_parser.add_argument("--seconds", type=float, default=TOTAL, help=f"default {TOTAL}")
    names = [*CALLS, *(part.name for part in PARTS)]
    run_parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}"
    )
    part_parser = commands.add_parser("part", help="one part, into a file")
    part_parser.add_argument("name", choices=gpu_parts.NAMES)
    part_parser.add_argument("file", type=Path)
    for each in (run_parser, part_parser):
        each.add_argument("--rehearse", action="store_true", help="small, on a stand-in for a GPU")
    options = parser.parse_args(arguments)
    if options.command == "part":
        gpu_parts.run(options.name, options.file, options.rehearse)
        return 0
    signal.signal(signal.SIGTERM, _stop)
    return run(options.folder, options.seconds, options.only or list(CALLS), options.rehearse)


def _stop(*_: Any) -> None:
    """End, and all that was started with it."""
    stop_all()
    sys.exit("stopped")


# -- What is known --------------------------------------------------------------------------------


class Record:
    """What is known of a run, in a file that is written with every change, and the log beside it.

    Parameters
    ----------
    folder : Path
        Where these are.
    about : dict
        What was asked for.
    parts : iterable of Part
        What is to run.
    """

    def __init__(self, folder: Path, about: Report, parts: Iterable[Part]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._about, self._commit = folder, about, _commit()
        self.reports: dict[str, Report] = {
            part.name: {
                "state": "left",
                "ok": False,
                "summary": "not run",
                "limit_seconds": part.seconds,
                "informs": part.informs,
            }
            for part in parts
        }
        self._lock, self._log = Lock(), (folder / "gpu.log").open("w", errors="replace")
        self._logged = ""
        self.path: Path | None = None
        self._save()

    def tell(self, name: str, report: Report) -> None:
        """Add to what is known of a part."""
        with self._lock:
            self.reports[name] |= report
            self._save()

    def _save(self) -> None:
        described = [each["gpu"] for each in self.reports.values() if "gpu" in each]
        gpu = described[-1] if described else {"device": {"gpu": "unknown"}, "versions": {}}
        parts = {
            what: {k: v for k, v in each.items() if k not in ("gpu", "races")}
            for what, each in self.reports.items()
        }
        races = all_races(self.reports)
        results = self._about | {"parts": parts, "wanted": gpu_table.wanted(races), "races": races}
        before = self.path
        prefix = "gpu-rehearsal" if self._about["rehearsal"] else "gpu"
        self.path = machine.write(self._folder, prefix, "bench.gpu", self._commit, results, gpu)
        if before not in (None, self.path):
            before.unlink(missing_ok=True)  # of a GPU that was not known yet

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def log(self, name: str, text: str) -> None:
        """Add to what a part has printed."""
        with self._lock:
            if name != self._logged:
                self._logged = name
                print(f"===== {name}", file=self._log)
            print(text, end="", file=self._log, flush=True)


def _commit() -> tuple[str, bool]:
    """Return the commit, and whether files differ from it; from COMMIT where git does not say."""
    given = os.environ.get("COMMIT", "")
    if given or shutil.which("git") is None:
        return given.removesuffix("-dirty") or "unknown", given.endswith("-dirty")
    commit, dirty = machine.commit()
    return commit or "unknown", dirty


def all_races(reports: dict[str, Report]) -> list[Report]:
    """Return the races of all parts."""
    return [race for part in RACES for race in reports.get(part, {}).get("races", [])]


# -- The run --------------------------------------------------------------------------------------


def run(folder: Path, seconds: float, only: list[str], rehearsed: bool = False) -> int:
    """Run parts, into the folder, until the time is up."""
    end = time.monotonic() + seconds - END
    chosen = {part.name for name in only for part in CALLS.get(name, ())} | {*only}
    parts = [each for part in PARTS if part.name in chosen for each in _files_of(part, rehearsed)]
    about = {"asked": {"seconds": seconds, "parts": only}, "rehearsal": rehearsed}
    with (
        closing(Record(folder, about, parts)) as record,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
    ):
        scratch = Path(name)
        for together, some in groupby(parts, lambda part: part.together or part.name):
            print(f"-- {together}", flush=True)
            group = list(some)
            with ThreadPoolExecutor(len(group)) as pool:
                for _ in pool.map(partial(_start, record, scratch, end, rehearsed), group):
                    pass
    return _finish(record)


def _files_of(part: Part, rehearsed: bool) -> list[Part]:
    """Return a part for each file of tests, the longest ones first, or the part."""
    if part.name != "tests":
        return [part]
    tests = [*(ROOT / "tests" / "gpu").glob("cuda_*.py")]
    tests.sort(key=lambda test: (-WORKERS.get(test.stem, 0), test))
    tests.append(ROOT / "tests" / "jacobians" / "test_device.py")
    if rehearsed:
        tests = tests[-1:]
    return [part._replace(name=str(test.relative_to(ROOT))) for test in tests]


def _start(record: Record, scratch: Path, end: float, rehearsed: bool, part: Part) -> None:
    """Run a part, if there is time, and note how it went."""
    begin = time.monotonic()
    seconds = min(part.seconds, end - begin)
    if seconds <= 1:
        record.tell(part.name, {"summary": "no time left"})
    else:
        record.tell(part.name, {"state": "running", "began": time.time()})
        job = Job(
            scratch,
            seconds,
            rehearsed,
            partial(record.tell, part.name),
            partial(record.log, part.name),
        )
        try:
            report = _job_of(part)(job)
        except Exception as error:
            report = {"ok": False, "summary": f"{type(error).__name__}: {error}"}
        took = {"seconds": round(time.monotonic() - begin, 1)}
        record.tell(part.name, report | took | {"state": "done"})
    print(_part_line(part.name, record.reports[part.name]), flush=True)


def _job_of(part: Part) -> Callable[[Job], Report]:
    """Return what runs a part."""
    if part.name.endswith(".py"):
        return partial(run_tests, ROOT / part.name)
    if part.name in ("memcheck", "racecheck"):
        return partial(run_sanitizer, part.name)
    return partial(run_part, part.name)


def _finish(record: Record) -> int:
    """Write plots and a table; return 1 if anything failed."""
    reports, path = record.reports, record.path
    assert path is not None
    races = all_races(reports)
    bad = [what for what, report in reports.items() if not (report["ok"] or report["informs"])]
    try:
        for drawing in gpu_table.drawings(races):
            drawing.figure.savefig(path.with_suffix(".png"), dpi=120)
    except Exception as error:
        bad.append(f"plots ({type(error).__name__}: {error})")
    print(as_text(gpu_table.tables(races, reports)))
    print(f"Written to {path}; " + (f"FAILED: {', '.join(bad)}" if bad else "nothing failed"))
    return int(bool(bad))


def _part_line(what: str, report: Report) -> str:
    seconds = report.get("seconds", 0.0)
    return f"{what:<32} {ended(report):<7} {seconds:>6.1f} s  {report['summary'][:200]}"


if __name__ == "__main__":
    sys.exit(main())
