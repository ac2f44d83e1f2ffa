"""The text that a plan prints about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..formatting import align, format_bytes, format_count, format_time
from ..planning.costs.cpu import Cost, level_costs
from ..planning.search import Alternative
from ..symbolic.pattern import Pattern
from ..symbolic.program import Program
from ..symbolic.tree import tree
from .spec import PlanSpec

__all__ = ["describe", "to_dict"]

# Patterns, and schedules that were looked at, that are spelled out.
_MOST = 8
# Characters of the tree.
_WIDTH = 90


def describe(spec: PlanSpec, program: Program | None, workspace_bytes: int) -> str:
    """Return the text of ``print(plan)``: what runs, what it costs, and why."""
    kind = spec.kind
    lines = [f"ScanPlan({len(spec.patterns)} Jacobians, {spec.schedule})", f"  why: {spec.reason}"]
    lines += ["  Jacobians, from the last layer to the first:", *_patterns(spec.patterns)]
    if program is None:
        return "\n".join(lines)
    lines.append(f"  tree: {tree(spec.schedule, _WIDTH)}")
    if spec.dense:
        lines.append(f"  stored densely: {len(spec.dense):,} products whose patterns are sparse")
    costs = level_costs(program, kind.dtype.itemsize)
    model = kind.model()
    run, times = model.level_times(program)
    batch = f"a batch of {kind.batch}" if spec.batch or kind.batch > 1 else "one sample"
    lines.append(f"  levels, counts for one sample of {kind.dtype}, times for {batch}:")
    lines += _table(costs, times)
    lines.append(
        f"  predicted: {format_time(run + sum(times))} for {batch} on {model.where}, of which "
        f"{format_time(run)} are spent once a run"
    )
    lines.append(
        f"  memory: at most {format_bytes(workspace_bytes)} beside Jacobians and gradients, for "
        f"{batch} of {kind.dtype}"
    )
    if spec.alternatives:
        lines += ["  looked at, when this was planned:", *_alternatives(spec.alternatives)]
    return "\n".join(lines)


def to_dict(spec: PlanSpec, program: Program | None, workspace_bytes: int) -> dict[str, Any]:
    """Return what is printed as lists, numbers and strings."""
    kind = spec.kind
    costs: list[Cost] = []
    run, times = 0.0, list[float]()
    if program is not None:
        costs = level_costs(program, kind.dtype.itemsize)
        run, times = kind.model().level_times(program)
    return {
        "n": len(spec.patterns),
        "schedule": repr(spec.schedule),
        "reason": spec.reason,
        "batch": spec.batch,
        "dtype": None if spec.dtype is None else spec.dtype.name,
        "device": spec.device,
        "predicted_for": {"batch": kind.batch, "dtype": kind.dtype.name},
        "workspace_bytes": workspace_bytes,
        "memory_limit": spec.memory_limit,
        "dense": sorted([start, stop] for start, stop in spec.dense),
        "alternatives": [asdict(alternative) for alternative in spec.alternatives],
        "patterns": [
            {
                "count": count,
                "shape": list(pattern.shape),
                "nnz": pattern.nnz,
                "kind": pattern.kind,
            }
            for pattern, count in Counter(spec.patterns).items()
        ],
        "run_nanoseconds": run,
        "levels": [
            asdict(cost) | {"nanoseconds": time} for cost, time in zip(costs, times, strict=True)
        ],
    }


def _alternatives(alternatives: Sequence[Alternative]) -> list[str]:
    rows = [["schedule", "steps", "products", "predicted", "measured"]]
    for each in alternatives[:_MOST]:
        times = [
            "-" if time is None else format_time(time) for time in (each.nanoseconds, each.measured)
        ]
        rows.append([each.schedule, f"{each.steps:,}", f"{each.products:,}", *times])
    if len(alternatives) > _MOST:
        rows.append([f"and {len(alternatives) - _MOST:,} more", "", "", "", ""])
    return align(rows)


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
                format_count(2 * cost.multiply_adds),
                format_count(2 * cost.critical),
                format_bytes(cost.bytes),
                format_time(time),
            ]
        )
    total = [
        "all, and the critical path",
        f"{sum(cost.operations - cost.products for cost in costs):,}",
        f"{sum(cost.products for cost in costs):,}",
        f"{sum(cost.depth for cost in costs):,}",
        *("", "", ""),
        format_count(2 * sum(cost.multiply_adds for cost in costs)),
        format_count(2 * sum(cost.critical for cost in costs)),
        format_bytes(sum(cost.bytes for cost in costs)),
        format_time(sum(times)),
    ]
    rows.append(total)
    return align(rows)
