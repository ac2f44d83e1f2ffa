"""What a plan prints about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from .costs import Operations, level_times, load_machine
from .kernels._threads import thread_count
from .pattern import Pattern

if TYPE_CHECKING:
    from .plan import ScanPlan
    from .program import Cost, Program

__all__ = ["describe", "to_dict"]

# Lines of patterns, or of levels of one name, that are spelled out.
_MOST = 8


def describe(plan: ScanPlan, program: Program | None) -> str:
    """The text of ``print(plan)``: what runs, what it costs, and why."""
    dtype = np.dtype(plan.dtype or np.float64)
    lines = [f"{plan!r}", f"  why: {plan.reason}"]
    lines += ["  Jacobians, from the last layer to the first:", *_patterns(plan.patterns)]
    if program is None:
        return "\n".join(lines)
    costs = program.costs(dtype.itemsize)
    run, times = _times(plan, program)
    lines.append(f"  levels, for one sample of {dtype}:")
    lines += _table(costs, times)
    batch = f"a batch of {plan.batch}" if plan.batch else "one sample"
    if times is not None:
        threads = thread_count()
        lines.append(
            f"  predicted: {_time(run + sum(times))} for {batch} on {threads} "
            f"thread{'s' * (threads > 1)}, of which {_time(run)} are spent once a run"
        )
    lines.append(f"  workspace: {_bytes(plan.workspace_bytes)} of products, for {batch} of {dtype}")
    return "\n".join(lines)


def to_dict(plan: ScanPlan, program: Program | None) -> dict[str, Any]:
    """The same as lists, numbers and strings."""
    dtype = np.dtype(plan.dtype or np.float64)
    costs = program.costs(dtype.itemsize) if program is not None else []
    run, times = _times(plan, program) if program is not None else (0.0, [])
    return {
        "n": plan.n,
        "schedule": repr(plan.schedule),
        "reason": plan.reason,
        "batch": plan.batch,
        "dtype": None if plan.dtype is None else plan.dtype.name,
        "device": plan.device,
        "workspace_bytes": plan.workspace_bytes,
        "patterns": [
            {
                "count": count,
                "shape": list(pattern.shape),
                "nnz": pattern.nnz,
                "kind": pattern.kind,
            }
            for pattern, count in Counter(plan.patterns).items()
        ],
        "run_nanoseconds": None if times is None else run,
        "levels": [
            asdict(cost) | {"nanoseconds": None if times is None else times[k]}
            for k, cost in enumerate(costs)
        ],
    }


def _times(plan: ScanPlan, program: Program) -> tuple[float, list[float] | None]:
    """Predicted nanoseconds of a run itself, and of each level; None on a device."""
    if plan.device == "cuda":
        return 0.0, None
    dtype, batch = np.dtype(plan.dtype or np.float64), plan.batch or 1
    batched = np.full(program.n, batch > 1)
    operations = Operations.of(program, dtype.itemsize, batch, batched)
    return level_times(program, operations, load_machine(), dtype, batch, thread_count())


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


def _table(costs: Sequence[Cost], times: list[float] | None) -> list[str]:
    header = ["level", "matvecs", "products", "steps", "nnz in", "nnz out", "fill-in", "FLOP"]
    header += ["critical", "bytes", *["time"] * (times is not None)]
    rows = [header]
    for k, cost in enumerate(costs):
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
                *([] if times is None else [_time(times[k])]),
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
        *([] if times is None else [_time(sum(times))]),
    ]
    rows.append(total)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
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
    while number >= base and power < len(units) - 1:
        number /= base
        power += 1
    return f"{number:.3g}{units[power]}" if power else f"{number}{units[0]}"
