"""What plans and runs really take, beside their ``memory_limit``.

Every line is a process of its own, which first makes Jacobians and compiles kernels, and then notes
by how much its resident memory is larger at the peak of planning and of two runs. The gradients
that are returned are no part of that. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import sparsescan
from sparsescan.execution.threads import thread_count
from sparsescan.plan.calibrate import made_up

from . import children, grid
from .experiment import Experiment, Piece, Results, Table
from .page import significant

MIB = 1 << 20
# The environment in which freed memory goes back at once; else peaks would hold it.
GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}
# Chain of the grid, schedule, threads, and limit in MiB.
CASES: list[tuple[str, str, int, float]] = [
    ("VGG-11, pruned by 97%, B=1", "auto", 2, 1),
    ("VGG-11, pruned by 97%, B=16", "auto", 2, 8),
    ("VGG-11, pruned by 97%, B=1", "truncated:1", 2, 128),
    ("banded 64, n=500", "auto", 64, 8),
    ("banded 64, n=500", "auto", 64, 3),
    ("banded 1024, n=100", "blelloch", 2, 64),
    ("permutation 1024, n=200", "auto", 64, 8),
    ("permutation 1024, n=200", "auto", 64, 3),
    ("RNN 128, T=100, B=8", "blelloch", 2, 48),
]


def growth(call: Callable[[], Any]) -> tuple[int, Any]:
    """Call; by how many bytes resident memory grew at the peak, and the result."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = _status("VmRSS")
    result = call()
    return _status("VmHWM") - before, result


def _status(key: str) -> int:
    """Bytes of this process, such as ``VmRSS``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def measure(name: str, schedule: str, limit: float) -> Results:
    """Measure one case, in this process."""
    patterns, batch = grid.chains()[name]()
    n, dtype = len(patterns), np.dtype(np.float32)
    values = made_up(patterns, dtype, batch)
    grad = np.ones((batch, patterns[0].shape[1]), dtype)
    kind, _, count = schedule.partition(":")
    asked = getattr(sparsescan.Schedule, kind)(n, int(count)) if count else schedule
    _warm_up(dtype)

    def plan_and_scan() -> tuple[sparsescan.ScanPlan, Any]:
        plan = sparsescan.plan(
            patterns, schedule=asked, batch=batch, dtype=dtype, memory_limit=int(limit * MIB)
        )
        plan.exclusive_scan(grad, values)
        return plan, plan.exclusive_scan(grad, values)

    peak, (plan, gradients) = growth(plan_and_scan)
    return {
        "schedule": repr(plan.schedule),
        "threads": thread_count(),
        "limit_bytes": plan.memory_limit,
        "workspace_bytes": plan.workspace_bytes,
        "peak_bytes": peak,
        "gradient_bytes": sum(gradient.nbytes for gradient in gradients),
    }


def _warm_up(dtype: np.dtype[Any]) -> None:
    """Scan a chain with every kind of step, which compiles all kernels and starts all threads."""
    size, batch = 2000, 4
    places = np.arange(size)
    columns = np.stack([places, (places + 1) % size], axis=1)
    columns.sort(axis=1)
    band = sparsescan.Pattern(2 * np.arange(size + 1), columns.ravel(), (size, size))
    patterns = [band, sparsescan.Pattern.diagonal(size)] * 10
    for schedule in ("auto", "blelloch"):
        sparsescan.plan(patterns, schedule=schedule, batch=batch, memory_limit=1 << 40)
        for scanned in (dtype, np.float64):
            plan = sparsescan.plan(patterns, schedule=schedule, memory_limit=1 << 40)
            plan.exclusive_scan(np.ones((batch, size), scanned), made_up(patterns, scanned, batch))


# -- The experiment -------------------------------------------------------------------------------


def _in_child(name: str, schedule: str, threads: int, limit: float) -> Results:
    """Measure a case in a process of its own."""
    code = "import json; from bench import memory; "
    code += f"print(json.dumps(memory.measure({name!r}, {schedule!r}, {limit!r})))"
    environment = GIVE_BACK | {"NUMBA_NUM_THREADS": str(threads)}
    case: Results = json.loads(children.run([sys.executable, "-c", code], environment))
    taken = case["peak_bytes"] - case["gradient_bytes"]
    return case | {"chain": name, "taken_bytes": taken}


def _pieces(quick: bool) -> Iterable[Piece]:
    for name, schedule, threads, limit in CASES[:1] if quick else CASES:
        run = partial(_in_child, name, schedule, threads, limit)
        yield Piece(f"{name}, {schedule}, {threads} threads, {limit:g} MiB", run)


def _about(quick: bool) -> Results:
    return {
        "taken": "what planning and two runs take at their peak, beside the Jacobians and the "
        "gradients that are returned",
        "counted": "what the plan says that it needs",
    }


def _tables(results: Results) -> list[Table]:
    rows = []
    for case in results["pieces"].values():
        sizes = [case[f"{what}_bytes"] / MIB for what in ("limit", "workspace", "taken")]
        schedule = case["schedule"].removeprefix("Schedule.")
        over = "over the limit" * (sizes[2] > sizes[0])
        rows.append([case["chain"], schedule, str(case["threads"]), *map(significant, sizes), over])
    numbers = ["threads", "limit, MiB", "counted, MiB", "taken, MiB"]
    return [Table(["chain", "schedule", *numbers, ""], rows, numbers)]


EXPERIMENT = Experiment("memory", "Memory", _pieces, _about, tables=_tables)
