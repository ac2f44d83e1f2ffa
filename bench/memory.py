"""``python -m bench.memory``: what plans and runs really take, beside their ``memory_limit``.

Every line is a process of its own, which first makes Jacobians and compiles kernels, and then notes
by how much its resident memory is larger at the peak of planning and of two runs. The gradients
that are returned are no part of that. Linux only. Writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import sparsescan
from sparsescan.execution.threads import thread_count
from sparsescan.plan.measure import made_up

from . import children, grid, machine
from .machine import RESULTS
from .resident import GIVE_BACK, MIB, growth

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


def measure(name: str, schedule: str, limit: float) -> dict[str, Any]:
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.memory", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--only", default="", help="chains whose name contains this")
    parser.add_argument("--case", nargs=3, metavar=("NAME", "SCHEDULE", "MIB"), help="just measure")
    options = parser.parse_args(arguments)
    if options.case:
        name, schedule, limit = options.case
        print(json.dumps(measure(name, schedule, float(limit))))
        return 0
    commit, results, over = machine.commit(), [], 0
    line = "{:<30}{:<24}{:>8}{:>12}{:>12}{:>12}"
    print(line.format("chain", "schedule", "threads", "limit MiB", "counted", "taken"))
    for name, schedule, threads, limit in CASES:
        if options.only not in name:
            continue
        command = [sys.executable, "-m", "bench.memory", "--case", name, schedule, str(limit)]
        answer = children.run(command, {"NUMBA_NUM_THREADS": str(threads)} | GIVE_BACK)
        case = {"chain": name, "asked": schedule} | json.loads(answer)
        case["taken_bytes"] = case["peak_bytes"] - case["gradient_bytes"]
        case["within_limit"] = case["taken_bytes"] <= case["limit_bytes"]
        over += not case["within_limit"]
        results.append(case)
        numbers = [limit, case["workspace_bytes"] / MIB, case["taken_bytes"] / MIB]
        print(
            line.format(name, case["schedule"][9:], threads, *(f"{x:.2f}" for x in numbers)),
            "" if case["within_limit"] else "over",
            flush=True,
        )
    print(machine.write(options.output, "memory", "bench.memory", commit, {"cases": results}))
    return over


if __name__ == "__main__":
    sys.exit(main())
