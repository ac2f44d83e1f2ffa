"""What a plan prints about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from .costs import Cost, level_costs
from .pattern import Pattern
from .planner import Alternative, model_for
from .tree import tree

if TYPE_CHECKING:
    from .plan import ScanPlan
    from .program import Program

__all__ = ["describe", "to_dict"]

# Patterns, and schedules that were looked at, that are spelled out.
_MOST = 8
# Characters of the tree.
_WIDTH = 90


def describe(plan: ScanPlan, program: Program | None) -> str:
    """The text of ``print(plan)``: what runs, what it costs, and why."""
    dtype = np.dtype(plan.dtype or np.float64)
    lines = [f"{plan!r}", f"  why: {plan.reason}"]
    lines += ["  Jacobians, from the last layer to the first:", *_patterns(plan.patterns)]
    if program is None:
        return "\n".join(lines)
    lines.append(f"  tree: {tree(plan.schedule, _WIDTH)}")
    if plan.dense:
        lines.append(f"  stored densely: {len(plan.dense):,} products whose patterns are sparse")
    costs = level_costs(program, dtype.itemsize)
    model = model_for(plan.device, dtype, plan.batch or 1)
    run, times = model.level_times(program)
    lines.append(f"  levels, for one sample of {dtype}:")
    lines += _table(costs, times)
    batch = f"a batch of {plan.batch}" if plan.batch else "one sample"
    lines.append(
        f"  predicted: {_time(run + sum(times))} for {batch} on {model.where}, of which "
        f"{_time(run)} are spent once a run"
    )
    lines.append(
        f"  memory: at most {_bytes(plan.workspace_bytes)} beside Jacobians and gradients, for "
        f"{batch} of {dtype}"
    )
    if plan.alternatives:
        lines += ["  looked at, when this was planned:", *_alternatives(plan.alternatives)]
    return "\n".join(lines)


def to_dict(plan: ScanPlan, program: Program | None) -> dict[str, Any]:
    """The same as lists, numbers and strings."""
    dtype = np.dtype(plan.dtype or np.float64)
    costs: list[Cost] = []
    run, times = 0.0, list[float]()
    if program is not None:
        costs = level_costs(program, dtype.itemsize)
        run, times = model_for(plan.device, dtype, plan.batch or 1).level_times(program)
    return {
        "n": plan.n,
        "schedule": repr(plan.schedule),
        "reason": plan.reason,
        "batch": plan.batch,
        "dtype": None if plan.dtype is None else plan.dtype.name,
        "device": plan.device,
        "workspace_bytes": plan.workspace_bytes,
        "memory_limit": plan.memory_limit,
        "dense": sorted([start, stop] for start, stop in plan.dense),
        "alternatives": [asdict(alternative) for alternative in plan.alternatives],
        "patterns": [
            {
                "count": count,
                "shape": list(pattern.shape),
                "nnz": pattern.nnz,
                "kind": pattern.kind,
            }
            for pattern, count in Counter(plan.patterns).items()
        ],
        "run_nanoseconds": run,
        "levels": [
            asdict(cost) | {"nanoseconds": time} for cost, time in zip(costs, times, strict=True)
        ],
    }


def _alternatives(alternatives: Sequence[Alternative]) -> list[str]:
    rows = [["schedule", "steps", "products", "predicted", "measured"]]
    for each in alternatives[:_MOST]:
        times = ["-" if time is None else _time(time) for time in (each.nanoseconds, each.measured)]
        rows.append([each.schedule, f"{each.steps:,}", f"{each.products:,}", *times])
    if len(alternatives) > _MOST:
        rows.append([f"and {len(alternatives) - _MOST:,} more", "", "", "", ""])
    return _aligned(rows)


def _patterns(patterns: Sequence[Pattern]) -> list[str]:
    counts = Counter(patterns)
    lines = [
        f"    {count:,} × {pattern.shape[0]:,}×{pattern.shape[1]:,} {pattern.kind}, "
        f"nnz {pattern.nnz:,} ({_density(pattern)} dense)"
        for pattern, count in counts.most_common(_MOST)
    ]
    if len(counts) > _MOST:
        lines.append(f"    and {len(counts) - _MOST:,} more patterns")
    return lines or ["    none"]


def _density(pattern: Pattern) -> str:
    size = pattern.shape[0] * pattern.shape[1]
    return f"{pattern.nnz / size:.3g}" if size else "0"


def _table(costs: Sequence[Cost], times: Sequence[float]) -> list[str]:
    header = ["level", "matvecs", "products", "steps", "nnz in", "nnz out", "fill-in", "FLOP"]
    header += ["critical", "bytes", "time"]
    rows = [header]
    for cost, time in zip(costs, times, strict=True):
        fill_in = f"{2 * cost.nnz_out / cost.nnz_in:.2f}" if cost.nnz_in else "-"
        rows.append(
            [
                cost.name,
                f"{cost.operations - cost.products:,}",
                f"{cost.products:,}",
                f"{cost.depth:,}",
                f"{cost.nnz_in:,}" if cost.products else "-",
                f"{cost.nnz_out:,}" if cost.products else "-",
                fill_in,
                _count(2 * cost.multiply_adds),
                _count(2 * cost.critical),
                _bytes(cost.bytes),
                _time(time),
            ]
        )
    total = [
        "all, and the critical path",
        f"{sum(cost.operations - cost.products for cost in costs):,}",
        f"{sum(cost.products for cost in costs):,}",
        f"{sum(cost.depth for cost in costs):,}",
        *("", "", ""),
        _count(2 * sum(cost.multiply_adds for cost in costs)),
        _count(2 * sum(cost.critical for cost in costs)),
        _bytes(sum(cost.bytes for cost in costs)),
        _time(sum(times)),
    ]
    rows.append(total)
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "    "
        + "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _count(number: int) -> str:
    return _scaled(number, 1000, ["", "k", "M", "G", "T", "P"])


def _bytes(number: int) -> str:
    return _scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"])


def _time(nanoseconds: float) -> str:
    return _scaled(round(nanoseconds), 1000, [" ns", " µs", " ms", " s"])


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    # What is rounded to the next unit is given in it.
    while max(number, float(f"{number:.3g}")) >= base and power < len(units) - 1:
        number /= base
        power += 1
    if power == 0:
        return f"{number}{units[0]}"
    return f"{number:.3g}{units[power]}" if number < 999.5 else f"{number:.0f}{units[power]}"
