"""The text that a plan prints about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..formatting import COLUMNS, align, format_bytes, format_count, format_time, wrap
from ..planning.costs.cpu import Cost, level_costs, run_time
from ..planning.search import Alternative
from ..symbolic.factorisation import factorisation_of
from ..symbolic.implicit import ImplicitPattern, Step, count, factor_starts, factors_of, indexed_of
from ..symbolic.pattern import Pattern
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from ..symbolic.tree import tree
from .spec import Kind, PlanSpec

__all__ = ["describe", "to_dict"]

# Kinds of Jacobians, and schedules that were looked at, that are spelled out.
_MOST = 8
_INDENT, _TREE = "  ", "tree: "


def describe(spec: PlanSpec, program: Program | None, workspace_bytes: int) -> str:
    """Return the text of ``print(plan)``: what runs, what it costs, and why."""
    kind = spec.kind
    head = wrap(f"ScanPlan({len(spec.patterns)} Jacobians, {spec.schedule})", "")
    lines = _said([f"why: {spec.reason}"])
    if spec.reverse:
        lines += _said(["input and gradients are in the order of time (reverse)"])
    lines += ["  Jacobians, from the last layer to the first:", *_patterns(spec.patterns)]
    if program is None:
        return "\n".join(head + lines)
    said = []
    if (saving := _saving(spec, program)) is not None:
        said.append(_saved(spec, saving))
    if program.solved:
        said.append(
            f"solves: {len(program.solved):,}; times and memory are as if no two matrices were "
            "equal, whose factors are made once"
        )
    said.append(f"{_TREE}{tree(spec.schedule, COLUMNS - len(_INDENT + _TREE))}")
    if spec.dense:
        said.append(f"stored densely, though sparse: {len(spec.dense):,} of the products")
    costs = level_costs(program, kind.dtype.itemsize)
    model = kind.model()
    run, times = model.level_times(program)
    batch = f"a batch of {kind.batch}" if spec.batch or kind.batch > 1 else "one sample"
    said.append(f"levels, counts for one sample of {kind.dtype}, times for {batch}:")
    lines += [*_said(said), *_table(costs, times)]
    lines += _said(
        [
            f"predicted: {format_time(run + sum(times))} for {batch} on {model.where}, of which "
            f"{format_time(run)} are spent once a run",
            f"memory: at most {format_bytes(workspace_bytes)} beside Jacobians and gradients, for "
            f"{batch} of {kind.dtype}",
        ]
    )
    if spec.alternatives:
        lines += ["  looked at, when this was planned:", *_alternatives(spec.alternatives)]
    return "\n".join(head + lines)


def _said(sentences: Sequence[str]) -> list[str]:
    return [line for sentence in sentences for line in wrap(sentence, _INDENT)]


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
        "reverse": spec.reverse,
        "dense": sorted([start, stop] for start, stop in spec.dense),
        "alternatives": [asdict(alternative) for alternative in spec.alternatives],
        "patterns": [
            {"count": times} | _pattern_dict(pattern)
            for pattern, times in Counter(spec.patterns).items()
        ],
        "implicit": None if program is None else _saving(spec, program),
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


def _patterns(patterns: Sequence[Step]) -> list[str]:
    """Return a line for all Jacobians of one shape and kind; the most frequent come first."""
    kinds: dict[Any, Counter[Step]] = {}
    for pattern, times in Counter(patterns).items():
        kinds.setdefault(_kind_of(pattern), Counter())[pattern] = times
    ordered = sorted(kinds.values(), key=lambda alike: -alike.total())
    lines = []
    for alike in ordered[:_MOST]:
        differ = f"; {len(alike):,} patterns" if len(alike) > 1 else ""
        lines += wrap(f"{alike.total():,} × {_pattern_text(list(alike))}{differ}", "    ")
    if len(ordered) > _MOST:
        rest = sum(alike.total() for alike in ordered[_MOST:])
        lines.append(f"    and {rest:,} of {len(ordered) - _MOST:,} other shapes or kinds")
    return lines or ["    none"]


def _kind_of(pattern: Step) -> tuple[Any, ...]:
    """Return the shape of a step, and what its factors are."""
    if isinstance(pattern, Pattern):
        return pattern.shape, pattern.kind
    weights = tuple(index is not None for index in pattern.indexed)
    kinds = tuple(map(_kind_of, pattern.factors))
    return pattern.shape, kinds, pattern.shared, pattern.solved, weights


def _pattern_text(alike: Sequence[Step]) -> str:
    """Describe patterns of one shape and kind."""
    rows, cols = alike[0].shape
    implicit = [each for each in alike if isinstance(each, ImplicitPattern)]
    explicit = [each for each in alike if isinstance(each, Pattern)]
    if explicit:
        size = rows * cols
        nnz = _span([each.nnz for each in explicit], ",")
        density = _span([each.nnz / size if size else 0.0 for each in explicit], ".3g")
        return f"{rows:,}×{cols:,} {explicit[0].kind}, nnz {nnz} ({density} dense)"
    factors = []
    for j, (shared, solved) in enumerate(zip(implicit[0].shared, implicit[0].solved, strict=True)):
        text = _pattern_text([each.factors[j] for each in implicit])
        sizes = [index.size for each in implicit if (index := each.indexed[j]) is not None]
        if sizes:
            text += f", {_span(sizes, ',')} weights"
        if shared:
            text += ", shared by all samples"
        if solved:
            text += _solve_text([each.factors[j] for each in implicit])
        factors.append(text)
    return f"{rows:,}×{cols:,} implicit: {'; then '.join(factors)}"


def _span(numbers: Sequence[float], form: str) -> str:
    """Return a number that all are, or the least and the largest."""
    ends = [f"{end:{form}}" for end in (min(numbers), max(numbers))]
    return " to ".join(dict.fromkeys(ends))


def _solve_text(patterns: Sequence[Pattern]) -> str:
    forms = list(map(factorisation_of, patterns))
    methods = " or ".join(dict.fromkeys(form.method for form in forms))
    entries = _span([form.entries for form in forms], ",")
    return f", solved with ({methods} factors, {entries} entries)"


def _pattern_dict(pattern: Step) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(pattern.shape), "nnz": pattern.nnz}
    if isinstance(pattern, Pattern):
        return described | {"kind": pattern.kind}
    factors = [
        _pattern_dict(factor)
        | {
            "shared": shared,
            "solved": _solve_dict(factor) if solved else None,
            "weights": None if index is None else index.size,
        }
        for factor, shared, solved, index in zip(
            pattern.factors, pattern.shared, pattern.solved, pattern.indexed, strict=True
        )
    ]
    return described | {"kind": "implicit", "factors": factors}


def _solve_dict(pattern: Pattern) -> dict[str, Any]:
    form = factorisation_of(pattern)
    return {"factors": form.method, "entries": form.entries, "multiply_adds": form.multiply_adds}


def _saving(spec: PlanSpec, program: Program) -> dict[str, Any] | None:
    """Return bytes of values, and times of a linear scan, as steps are and if all were explicit.

    None if no step is implicit. Those that come as weights, which are there in any case, count with
    the values that a run writes of them.
    """
    steps, kind = spec.patterns, spec.kind
    implicit = sum(isinstance(step, ImplicitPattern) for step in steps)
    if implicit == 0:
        return None
    starts = factor_starts(steps)
    differs = np.full(int(starts[-1]), kind.batch > 1)
    if kind.differs is not None:
        differs = np.frombuffer(kind.differs, np.bool_)
    written = list(map(count, steps))
    any_differs = np.logical_or.reduceat(differs, starts[:-1])
    widths = np.where(any_differs, kind.batch, 1).tolist()
    explicit = sum(each.nnz * width for each, width in zip(written, widths, strict=True))
    as_explicit = kind._replace(differs=None if any_differs.all() else any_differs.tobytes())
    return {
        "steps": implicit,
        "bytes": kind.dtype.itemsize * _stored(steps, kind, differs.tolist(), program),
        "explicit_bytes": kind.dtype.itemsize * explicit,
        "linear_nanoseconds": _linear_time(steps, kind),
        "explicit_linear_nanoseconds": _linear_time(written, as_explicit),
    }


def _stored(steps: Sequence[Step], kind: Kind, differs: Sequence[bool], program: Program) -> int:
    """Return the values of all steps; implicit ones that are equal share what samples share."""
    total, k, known = 0, 0, set[Any]()
    for step in steps:
        for j, (factor, index) in enumerate(zip(factors_of(step), indexed_of(step), strict=True)):
            if index is not None:
                total += factor.nnz if kind.on_device else program.gathered_of(k, index)
            elif differs[k] or isinstance(step, Pattern):
                total += factor.nnz * (kind.batch if differs[k] else 1)
            elif (step, j) not in known:
                known.add((step, j))
                total += factor.nnz
            k += 1
    return total


def _linear_time(steps: Sequence[Step], kind: Kind) -> float:
    return run_time(kind.model(), Program(steps, Schedule.linear(len(steps))))


def _saved(spec: PlanSpec, saving: dict[str, Any]) -> str:
    """Return the line about implicit steps."""
    return (
        f"implicit: {saving['steps']:,} of {len(spec.patterns):,}; values take "
        f"{format_bytes(saving['bytes'])} where explicit ones take "
        f"{format_bytes(saving['explicit_bytes'])}, a linear scan "
        f"{format_time(saving['linear_nanoseconds'])} where it takes "
        f"{format_time(saving['explicit_linear_nanoseconds'])}"
    )


def _table(costs: Sequence[Cost], times: Sequence[float]) -> list[str]:
    header = ["level", "matvecs", "products", "steps", "nnz in", "nnz out", "fill-in", "FLOP"]
    header += ["critical", "bytes", "time"]
    rows = [header]
    for cost, time in zip(costs, times, strict=True):
        fill_in = f"{2 * cost.nnz_out / cost.nnz_in:.2f}" if cost.nnz_in else "-"
        nnz = [f"{entries:,}" if cost.products else "-" for entries in (cost.nnz_in, cost.nnz_out)]
        rows.append(_row(cost.name, [cost], time, [*nnz, fill_in]))
    rows.append(_row("all", costs, sum(times), ["", "", ""]))
    return align(rows)


def _row(name: str, costs: Sequence[Cost], time: float, filling: list[str]) -> list[str]:
    """Return what some levels cost together; `filling` are the cells about their products."""
    return [
        name,
        f"{sum(cost.operations - cost.products for cost in costs):,}",
        f"{sum(cost.products for cost in costs):,}",
        f"{sum(cost.depth for cost in costs):,}",
        *filling,
        format_count(2 * sum(cost.multiply_adds for cost in costs)),
        format_count(2 * sum(cost.critical for cost in costs)),
        format_bytes(sum(cost.bytes for cost in costs)),
        format_time(time),
    ]
