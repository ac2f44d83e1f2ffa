"""Processes of a run on a GPU, which are stopped in time: tests, compute-sanitizer and parts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
# Processes for the tests of a file, where one is not enough: `cuda_chunks` compiles 147 kernels, in
# 210 s.
WORKERS = {"cuda_chunks": 4, "cuda_recurrent": 3, "cuda_cells": 3}
# Seconds from one look at what a process has done to the next, and those in which one that was
# killed ends: it may be stuck in the driver.
POLL, GRACE = 0.5, 5.0
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


class Job(NamedTuple):
    """What a process is given.

    Attributes
    ----------
    scratch : Path
        A folder for its files.
    seconds : float
        After how many it is stopped.
    rehearsed : bool
        Whether it runs on a stand-in for a GPU.
    tell : callable
        It takes what is known of the process so far, as often as that changes.
    log : callable
        It takes what the process has printed since the last call.
    """

    scratch: Path
    seconds: float
    rehearsed: bool = False
    tell: Callable[[Report], None] = lambda report: None
    log: Callable[[str], None] = lambda text: None


class _Ended(NamedTuple):
    """How a process ended: its exit status, None if it was stopped; what it printed; in words."""

    code: int | None
    output: str
    how: str


def run_part(name: str, job: Job) -> Report:
    """Run a part of :mod:`.gpu_parts`."""
    file = job.scratch / f"{name}.json"
    seen = b""

    def look() -> None:
        nonlocal seen
        found = file.read_bytes() if file.exists() else b""
        if found != seen:
            seen = found
            job.tell(json.loads(found))

    arguments = ["-m", "bench.gpu", "part", name, str(file)]
    ended = _process([*arguments, *["--rehearse"] * job.rehearsed], name, job, look)
    look()
    report: Report = json.loads(seen) if seen else {"ok": False, "summary": "nothing done"}
    if ended.code != 0:
        report["ok"] = False
        report["summary"] += f"; {ended.how}"
    return report


def run_tests(test: Path, job: Job) -> Report:
    """Run one file of tests by pytest, on the device; in a rehearsal a few."""
    results = job.scratch / f"{test.stem}.xml"
    # A version of some library may deprecate something: no reason to fail here.
    options = ["-v", "-p", "no:cacheprovider", "-W", "default", f"--junitxml={results}"]
    options += ["-n", str(WORKERS.get(test.stem, 0)), "--dist", "load"]
    options += ["-k", "Linear"] * job.rehearsed
    ended = _process(["-m", "pytest", *options, str(test)], test.stem, job)
    if not results.exists():
        return _outcomes(ended.output) | {"ok": False, "summary": ended.how}
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
    ok = ended.code == 0 and passed > 0
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


def run_sanitizer(tool: str, job: Job) -> Report:
    """Run a few scans and training steps under compute-sanitizer."""
    found = find_sanitizer()
    program = [found] if found else []
    if job.rehearsed:
        program = [sys.executable, "-m", "bench.gpu_rehearsal"]
    if not program:
        return {
            "ok": False,
            "summary": "MISSING: no compute-sanitizer on PATH, in CUDA_HOME, CUDA_PATH, "
            "/usr/local/cuda or NVIDIA's wheels",
        }
    options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--report-api-errors", "no"]
    # Behind every array some bytes that belong to none.
    options += ["--padding", "256"] * (tool == "memcheck")
    file = job.scratch / f"{tool}.json"
    arguments = ["-m", "bench.gpu", "part", "sanitize", str(file)]
    arguments += ["--rehearse"] * job.rehearsed
    ended = _process(arguments, tool, job, before=[*program, *options])
    cases = json.loads(file.read_text()) if file.exists() else {}
    # The program may end well without the tool having looked at it.
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", ended.output)
    clean = bool(summaries) and all(re.search(r": 0 (error|hazard)", line) for line in summaries)
    said = [*summaries, *([cases["summary"]] if cases else [])]
    if not summaries or ended.code is None:
        said.append(ended.how)
    return {
        **{key: cases[key] for key in ("cases", "failed") if key in cases},
        "ok": ended.code == 0 and clean and cases.get("ok", False),
        "summary": "; ".join(said),
        "program": program[0],
        # What it has found, without the rest of the log.
        "found": re.findall(r"^=========.*", ended.output, re.MULTILINE)[:200],
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


# -- Toolkits -------------------------------------------------------------------------------------


def toolkit_variables() -> dict[str, str | None]:
    """Return what the variables that name a CUDA toolkit are to be, None where they are unset.

    Numba looks for libnvvm where ``CUDA_PATH`` says, and for libdevice where ``CUDA_HOME`` does.
    Some machines name no toolkit there, or one without NVVM.
    """
    named = {name: os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")}
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if any(Path(root).glob("*/nvvm/libdevice/*.bc")):
            return {name: at if at and _has_nvvm(Path(at)) else None for name, at in named.items()}
    compiler = shutil.which("nvcc")
    places = [Path(at) for at in named.values() if at]
    places += [Path(compiler).resolve().parents[1]] if compiler else []
    found = next(filter(_has_nvvm, [*places, *_installed_toolkits()]), None)
    return dict.fromkeys(named, str(found)) if found else {}


def _has_nvvm(toolkit: Path) -> bool:
    return any(toolkit.glob("nvvm/libdevice/*.bc"))


def _installed_toolkits() -> list[Path]:
    """Where toolkits are usually installed, the newest first behind the one that is chosen."""
    folders = Path("/usr/local")
    return [folders / "cuda", *sorted(folders.glob("cuda-*"), reverse=True)]


# -- Processes ------------------------------------------------------------------------------------


def _process(
    arguments: Sequence[str],
    name: str,
    job: Job,
    look: Callable[[], None] = lambda: None,
    before: Sequence[str] = (),
) -> _Ended:
    """Run Python, and look at what it has done from time to time."""
    environment = os.environ | _ENVIRONMENT
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    if not job.rehearsed:
        environment["SPARSESCAN_ON_GPU"] = "1"  # no test runs in the simulator, and passes
    for variable, place in toolkit_variables().items():
        environment.pop(variable, None)
        environment |= {variable: place} if place else {}
    command = [*before, sys.executable, *arguments]
    log, printed = job.scratch / f"{name}.log", 0

    def read() -> None:
        nonlocal printed
        new = log.read_bytes()[printed:]
        if new:
            printed += len(new)
            job.log(new.decode(errors="replace"))

    end, code = time.monotonic() + job.seconds, None
    with log.open("w") as output:
        print("$", *command, flush=True, file=output)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            **_GROUP,
        )
        job.tell({"process": process.pid})
        _running.add(process)
        try:
            while code is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(max(0.0, min(POLL, end - time.monotonic())))
                look()
                read()
            how = (
                f"exit status {code}" if code is not None else f"stopped after {job.seconds:.0f} s"
            )
        finally:
            _running.discard(process)
            if code is None and not _stop(process):
                job.tell({"stuck": True})
    read()
    output_text = log.read_text(errors="replace")
    return _Ended(code, output_text, f"{how}: {output_text.strip().splitlines()[-1][:200]}")


_running: set[subprocess.Popen[bytes]] = set()


def stop_all() -> None:
    """Kill all processes that run, and all that they have started."""
    for process in list(_running):
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process and all that it has started; return whether it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return False
    return True
