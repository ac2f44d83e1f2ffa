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

# Nothing of the package, nor what imports that: if something of that fails, the file says so.
from . import machine
from .experiment import as_text
from .files import ended
from .gpu_environment import environment
from .gpu_processes import ROOT, WORKERS, Job, run_part, run_sanitizer, run_tests, stop_all

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


# What a machine that is lent for ten minutes runs, in the order of what it tells. A part that hangs
# is stopped so early that those behind it have their limits.
PARTS = (
    Part("environment", 30),
    Part("preflight", 45),
    Part("families", 130, "first checks"),
    Part("chained", 130, "first checks"),
    Part("memcheck", 130, "first checks"),
    Part("rnn", 40),
    Part("steps", 75),
    Part("pair", 20),
    Part("tests", 130, "checks"),
    Part("repeat", 130, "checks"),
    # The compiler may leave out barriers of a warp, and be right: what it finds need be no race.
    Part("racecheck", 130, "checks", informs=True),
    Part("affine", 15),
    Part("sweeps", 20),
    Part("level", 15),
    Part("sizes", 45),
)
# Seconds of a run, unless others are given, and those for plots and tables at its end.
TOTAL, END = 570, 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="all parts, or some")
    run_parser.add_argument("folder", type=Path, metavar="OUTDIR")
    run_parser.add_argument("--seconds", type=float, default=TOTAL, help=f"default {TOTAL}")
    names = [part.name for part in PARTS]
    run_parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}"
    )
    part_parser = commands.add_parser("part", help="one part, into a file")
    part_parser.add_argument("name")
    part_parser.add_argument("file", type=Path)
    for each in (run_parser, part_parser):
        each.add_argument("--rehearse", action="store_true", help="small, on a stand-in for a GPU")
    options = parser.parse_args(arguments)
    if options.command == "part":
        run_here(options.name, options.file, options.rehearse)
        return 0
    signal.signal(signal.SIGTERM, _stop)
    return run(options.folder, options.seconds, options.only or [], options.rehearse)


def run_here(name: str, file: Path, rehearsed: bool) -> None:
    """Run a part in this process, into a file."""
    if name == "environment":
        machine.save(file, environment())
        return
    from . import gpu_parts

    gpu_parts.run(name, file, rehearsed)


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
        wanted = _table().wanted(races) if races else []
        results = self._about | {"parts": parts, "wanted": wanted, "races": races}
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
    return [race for report in reports.values() for race in report.get("races", [])]


def _table() -> Any:
    """Return the module of tables, which imports the package."""
    from . import gpu_table

    return gpu_table


# -- The run --------------------------------------------------------------------------------------


def run(folder: Path, seconds: float, only: list[str], rehearsed: bool = False) -> int:
    """Run parts, all of them by default, into the folder, until the time is up."""
    end = time.monotonic() + seconds - END
    chosen = [part for part in PARTS if not only or part.name in only]
    parts = [each for part in chosen for each in _files_of(part, rehearsed)]
    about = {"asked": {"seconds": seconds, "parts": only}, "rehearsal": rehearsed}
    with (
        closing(Record(folder, about, parts)) as record,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
    ):
        scratch, groups = Path(name), groups_of(parts)
        left = sum(seconds for seconds, _ in groups)
        for limit, group in groups:
            print(f"-- {', '.join(part.name for part in group)}", flush=True)
            left -= limit
            # What those before have left over is at its disposal, but not what is for those behind.
            stop = min(max(end - left, time.monotonic() + limit), end)
            with ThreadPoolExecutor(len(group)) as pool:
                for _ in pool.map(partial(_start, record, scratch, stop, rehearsed), group):
                    pass
    return _finish(record)


def groups_of(parts: Iterable[Part]) -> list[tuple[float, list[Part]]]:
    """Return parts that run at once, and their limit."""
    groups = [list(some) for _, some in groupby(parts, lambda part: part.together or part.name)]
    return [(max(part.seconds for part in group), group) for group in groups]


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


def _start(record: Record, scratch: Path, stop: float, rehearsed: bool, part: Part) -> None:
    """Run a part, if there is time, and note how it went."""
    begin = time.monotonic()
    seconds = stop - begin
    if seconds <= 1:
        record.tell(part.name, {"summary": "no time left"})
    else:
        known = {"state": "running", "began": time.time(), "limit_seconds": round(seconds)}
        record.tell(part.name, known)
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
        print(as_text(_table().tables(races, reports)))
        for drawing in _table().drawings(races):
            drawing.figure.savefig(path.with_suffix(".png"), dpi=120)
    except Exception as error:
        bad.append(f"tables or plots ({type(error).__name__}: {error})")
    print(f"Written to {path}; " + (f"FAILED: {', '.join(bad)}" if bad else "nothing failed"))
    return int(bool(bad))


def _part_line(what: str, report: Report) -> str:
    seconds = report.get("seconds", 0.0)
    return f"{what:<32} {ended(report):<7} {seconds:>6.1f} s  {report['summary'][:200]}"


if __name__ == "__main__":
    sys.exit(main())
