"""``bench/gpu.sh OUTDIR``: all that needs a GPU, in one run.

Every part is a process of its own, so that one that fails leaves the others alone. First, in 20
seconds, whether kernels can be compiled, launched and captured at all; if not, this ends. Then the
tests, compute-sanitizer and repeated runs, all at once; then the benchmarks, one after the other,
with the device to themselves. Writes one JSON file, the plots and a log, prints a table, and
returns 1 if a part failed or could not be run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from . import machine, plots
from .gpu_chains import repeat, sanitize
from .gpu_measure import measure
from .gpu_preflight import preflight, versions
from .gpu_races import RACES
from .gpu_table import table, wanted
from .peers import MissingPeerError
from .plots import sweep

_ROOT = Path(__file__).parent.parent
# Seconds: to see whether a kernel runs at all; for the checks, which run at once; for each
# benchmark; and for all of it.
PREFLIGHT = 20
CHECKS = 200
LIMITS = {"rnn": 140, "steps": 30, "jax": 60, "sparse": 60, "launches": 30}
TOTAL = 540
# Processes for the tests of a file, where one is not enough: `cuda_chunks` compiles 147 kernels, in
# 210 s.
WORKERS = {"cuda_chunks": 4, "cuda_recurrent": 3}
_FOUND = 77  # what compute-sanitizer exits with if it found something
_ENVIRONMENT = {
    "CUPY_TF32": "0",
    "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0",
    # Whatever a library asks for: nobody uses TF32.
    "NVIDIA_TF32_OVERRIDE": "0",
    "PYTHONUNBUFFERED": "1",
    "SPARSESCAN_ALL_TESTS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

# Its own process group, so that all that a part has started can be stopped with it.
_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)

Report = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="everything")
    run_parser.add_argument("folder", type=Path, metavar="OUTDIR")
    commands.add_parser(
        "sanitize", help="a few scans and training steps, to be run by compute-sanitizer"
    )
    part_parser = commands.add_parser("part", help="one part, into a file")
    part_parser.add_argument("name", choices=["preflight", "repeat", *RACES])
    part_parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "run":
        return run(options.folder)
    if options.command == "part" and options.name == "preflight":
        about = machine.describe_gpu()
        print(versions(about))
        summary = preflight()
        machine.save(options.file, {"gpu": about, "ok": True, "summary": summary})
        return 0
    from .gpu_device import Cuda

    if options.command == "sanitize":
        import cupy

        cupy.cuda.set_allocator(None)  # or an access past an array stays within the pool
        print(f"{sanitize(Cuda())} scans and training steps, all right")
        return 0
    return part(options.name, options.file, Cuda(), machine.describe_gpu())


# -- In the process of a part ---------------------------------------------------------------------


def part(name: str, file: Path, gpu: Any, about: Report) -> int:
    """Run one part; whatever it has found is in the file, even if it is stopped."""
    report: Report = {"gpu": about}
    if name == "repeat":

        def save(runs: Report) -> None:
            failed, done = len(runs["failed"]), runs["done"]
            summary = f"{done} of {runs['asked']} random chains, {runs['repetitions']} times each"
            ok = done == runs["asked"] and not failed
            machine.save(file, report | runs | {"ok": ok, "summary": f"{summary}: {failed} failed"})

        repeat(gpu, save=save)
        return 0
    ceilings = gpu.ceilings()
    broken: dict[str, str] = {}
    report |= {"ceilings": vars(ceilings), "races": [], "missing": {}, "failed": {}}
    for make in RACES[name]:
        sizes = [f"{key}={value}" for key, value in make.keywords.items()]
        what = " ".join([make.func.__name__, *sizes])
        print(what, flush=True)
        try:
            report["races"].append(measure(make(gpu), gpu, ceilings, broken))
        except MissingPeerError as missing:
            report["missing"][what] = str(missing)
        except Exception as error:
            traceback.print_exc()
            report["failed"][what] = f"{type(error).__name__}: {error}"[:500]
        gpu.free()
        done = len(report["races"]) + len(report["missing"])
        report["ok"] = done == len(RACES[name])
        why = dict.fromkeys([*report["missing"].values(), *report["failed"].values()])
        report["summary"] = "; ".join([f"{len(report['races'])} of {len(RACES[name])} races", *why])
        machine.save(file, report)
    return 0


# -- The parts, as processes ----------------------------------------------------------------------


def run_tests(test: Path, folder: Path, seconds: float) -> Report:
    """One file of tests by pytest, on the device."""
    results = folder / f"{test.stem}.xml"
    # A version of some library may deprecate something: no reason to fail here.
    options = ["-v", "-p", "no:cacheprovider", "-W", "default", f"--junitxml={results}"]
    options += ["-n", str(WORKERS.get(test.stem, 0)), "--dist", "load"]
    log = folder / f"{test.stem}.log"
    code, output = _process(["-m", "pytest", *options, str(test)], log, seconds)
    if not results.exists():
        return _outcomes(output) | {"ok": False, "summary": _ending(code, seconds, output)}
    bad, skipped, passed = [], Counter[str](), 0
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        outcomes = {outcome.tag: outcome.get("message", "") for outcome in case}
        if "failure" in outcomes or "error" in outcomes:
            said = outcomes.get("failure") or outcomes.get("error") or ""
            bad.append(f"{case.get('name')}: {said}"[:300])
        elif "skipped" in outcomes:
            skipped[outcomes["skipped"]] += 1
        else:
            passed += 1
    summary = f"{passed} passed, {len(bad)} failed, {skipped.total()} skipped"
    if skipped:
        summary += f" ({skipped.most_common(1)[0][0]})"
    ok = code == 0 and passed > 0
    return {"ok": ok, "summary": summary, "failed": bad, "skipped": dict(skipped)}


# A line for each test: with its outcome behind its name, or before it where there are workers.
_LINE = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:(PASSED|FAILED|SKIPPED|ERROR) (\S+::.*?)"
    r"|(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR).*?) *$",
    re.MULTILINE,
)


def _outcomes(output: str) -> Report:
    """Return what tests have said that were stopped before they could write their results."""
    ends: dict[str, list[str]] = {}
    for before, after_it, before_it, after in _LINE.findall(output):
        ends.setdefault(before or after, []).append((after_it or before_it).rpartition("::")[2])
    return {
        "passed": len(ends.get("PASSED", [])),
        "failed": ends.get("FAILED", []) + ends.get("ERROR", []),
    }


def run_sanitizer(tool: str, folder: Path, seconds: float) -> Report:
    """Run a few scans and training steps under compute-sanitizer."""
    program = find_sanitizer()
    if program is None:
        return {
            "ok": False,
            "summary": "MISSING: no compute-sanitizer on PATH, in CUDA_HOME, CUDA_PATH, "
            "/usr/local/cuda or NVIDIA's wheels",
        }
    options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--report-api-errors", "no"]
    # Behind every array some bytes that belong to none.
    options += ["--padding", "256"] * (tool == "memcheck")
    code, output = _process(
        ["-m", "bench.gpu", "sanitize"], folder / f"{tool}.log", seconds, [program, *options]
    )
    # The program may end well without the tool having looked at it.
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    scans = re.findall(r"\d+ scans and training steps, all right", output)
    clean = bool(summaries) and all(re.search(r": 0 (error|hazard)", line) for line in summaries)
    said = [*summaries, *scans] or [_ending(code, seconds, output)]
    return {
        "ok": code == 0 and clean and bool(scans),
        "summary": "; ".join(said),
        "program": program,
    }


def find_sanitizer() -> str | None:
    """compute-sanitizer: on PATH, in a CUDA toolkit, or in a wheel."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(toolkit) for toolkit in toolkits if toolkit]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += sorted(Path(root).iterdir())
    places = [folder / inner for folder in folders for inner in ("bin", "compute-sanitizer")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)])
    return shutil.which("compute-sanitizer", path=path)


def find_toolkit() -> Path | None:
    """Return the CUDA toolkit whose NVVM Numba is to use; None if a wheel has it, or there is none.

    Numba looks in ``CUDA_HOME``, for which some machines name no toolkit, or one without NVVM.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if any(Path(root).glob("*/nvvm/libdevice/*.bc")):
            return None
    compiler = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    named += [str(Path(compiler).resolve().parents[1])] if compiler else []
    places = [*map(Path, filter(None, named)), *_installed_toolkits()]
    return next((place for place in places if any(place.glob("nvvm/libdevice/*.bc"))), None)


def _installed_toolkits() -> list[Path]:
    """Where toolkits are usually installed, the newest first behind the one that is chosen."""
    folders = Path("/usr/local")
    return [folders / "cuda", *sorted(folders.glob("cuda-*"), reverse=True)]


def run_part(name: str, folder: Path, seconds: float) -> Report:
    """One of the parts of this module."""
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    code, output = _process(["-m", "bench.gpu", "part", name, str(file)], log, seconds)
    report: Report = json.loads(file.read_text()) if file.exists() else {"summary": "nothing done"}
    if code != 0:
        report["ok"] = False
        report["summary"] += f"; {_ending(code, seconds, output)}"
    return report


def _process(
    arguments: Sequence[str], log: Path, seconds: float, before: Sequence[str] = ()
) -> tuple[int | None, str]:
    """Run Python; its exit status, None if it was stopped after so many seconds; its output."""
    environment = os.environ | _ENVIRONMENT
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    if (toolkit := find_toolkit()) is not None:
        environment["CUDA_HOME"] = str(toolkit)
    command = [*before, sys.executable, *arguments]
    with log.open("w") as output:
        print("$", *command, flush=True, file=output)
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            **_GROUP,
        )
        try:
            code: int | None = process.wait(seconds)
        except BaseException as stop:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(stop, subprocess.TimeoutExpired):
                raise
            code = None
    return code, log.read_text(errors="replace")


def _ending(code: int | None, seconds: float, output: str) -> str:
    """How a process ended, and the last that it said."""
    how = f"stopped after {seconds:.0f} s" if code is None else f"exit status {code}"
    return f"{how}: {output.strip().splitlines()[-1][:200]}"


# -- The run --------------------------------------------------------------------------------------


def run(folder: Path) -> int:
    """Everything, into the folder; what has been found is written after every step."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    commit, reports, lock = _commit(), dict[str, Report](), Lock()
    with tempfile.TemporaryDirectory() as name, (folder / "gpu.log").open("w") as log:
        scratch = Path(name)

        def start(what: str, job: Callable[[float], Report], until: float) -> None:
            begin = time.monotonic()
            left = began + min(until, TOTAL) - begin
            try:
                report = job(left) if left > 1 else {"ok": False, "summary": "no time left"}
            except Exception as error:
                report = {"ok": False, "summary": f"{type(error).__name__}: {error}"}
            report["seconds"] = round(time.monotonic() - begin, 1)
            output = scratch / f"{Path(what).stem}.log"
            with lock:
                reports[what] = report
                print(_part_line(what, report), flush=True)
                if output.exists():
                    text = output.read_text(errors="replace")
                    print(f"===== {what}\n{text}", file=log, flush=True)

        start("preflight", partial(run_part, "preflight", scratch), PREFLIGHT)
        if not reports["preflight"]["ok"]:
            return _finish(_write(folder, commit, reports), reports)
        with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
            checks = _checks(scratch)
            until = time.monotonic() - began + CHECKS
            started = [pool.submit(start, what, job, until) for what, job in checks.items()]
            for check in started:
                check.result()
        path = _write(folder, commit, reports)
        for what, seconds in LIMITS.items():
            until = time.monotonic() - began + seconds
            start(what, partial(run_part, what, scratch), until)
            previous, path = path, _write(folder, commit, reports)
            if previous != path:
                previous.unlink()  # of a GPU that was not known yet
    return _finish(path, reports)


def _checks(scratch: Path) -> dict[str, Callable[[float], Report]]:
    """Return the parts that can run at once, since none is timed; the longest ones first."""
    tests = [*(_ROOT / "tests" / "gpu").glob("cuda_*.py")]
    tests.sort(key=lambda test: (-WORKERS.get(test.stem, 0), test))
    tests.append(_ROOT / "tests" / "jacobians" / "test_device.py")
    return {
        **{str(test.relative_to(_ROOT)): partial(run_tests, test, scratch) for test in tests},
        **{tool: partial(run_sanitizer, tool, scratch) for tool in ("memcheck", "racecheck")},
        "repeat": partial(run_part, "repeat", scratch),
    }


def _commit() -> tuple[str, bool]:
    """Return the commit, and whether files differ from it; from COMMIT where git does not say."""
    given = os.environ.get("COMMIT", "")
    if given or shutil.which("git") is None:
        return given.removesuffix("-dirty") or "unknown", given.endswith("-dirty")
    commit, dirty = machine.commit()
    return commit or "unknown", dirty


def _write(folder: Path, commit: tuple[str, bool], reports: dict[str, Report]) -> Path:
    """Write the JSON file, and return its path."""
    described = [report["gpu"] for report in reports.values() if "gpu" in report]
    gpu = described[-1] if described else {"device": {"gpu": "unknown"}, "versions": {}}
    parts = {
        what: {k: v for k, v in reports[what].items() if k not in ("gpu", "races")}
        for what in sorted(reports)
    }
    races = all_races(reports)
    results = {"parts": parts, "wanted": wanted(races), "races": races}
    return machine.write(folder, "gpu", "bench.gpu", commit, results, gpu)


def _finish(path: Path, reports: dict[str, Report]) -> int:
    """Write plots and a table; return 1 if anything failed."""
    races, bad = all_races(reports), [what for what, report in reports.items() if not report["ok"]]
    try:
        if sweep(races, "T"):
            plots.draw(races, path.with_suffix(".png"))
    except Exception as error:
        bad.append(f"plots ({type(error).__name__}: {error})")
    if races:
        print(*table(races), sep="\n")
    for report in reports.values():
        for what, why in report.get("missing", {}).items():
            print(f"    OPEN    not measured  {what}: {why}")
    print("\nParts:")
    for what, report in sorted(reports.items()):
        print(_part_line(what, report))
    print(f"\nWritten to {path}; " + (f"FAILED: {', '.join(bad)}" if bad else "nothing failed"))
    return int(bool(bad))


def _part_line(what: str, report: Report) -> str:
    state = "ok" if report["ok"] else "FAILED"
    return f"{what:<32} {state:<7} {report['seconds']:>6.1f} s  {report['summary'][:200]}"


def all_races(reports: dict[str, Report]) -> list[Report]:
    """Return the races of all parts."""
    return [race for part in LIMITS for race in reports.get(part, {}).get("races", [])]


if __name__ == "__main__":
    sys.exit(main())
