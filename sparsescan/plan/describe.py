"""Descriptions of plans: a dictionary, and the text that prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..formatting import COLUMNS, align, format_bytes, format_count, format_time, wrap
from ..kernels.cpu.tables import Op
from ..symbolic.factorisation import factorisation_of
from ..symbolic.implicit import ImplicitPattern, Step, count, factor_starts, factors_of, indexed_of
from ..symbolic.pattern import Pattern
from ..symbolic.program import Program
from ..symbolic.tree import tree
from .choice import InputKind, PlanChoice, PlanOptions
from .costs.operations import Operations

# The description of a pattern, a level, or a plan.
_About: TypeAlias = dict[str, Any]
# How many kinds of Jacobians, and how many alternative schedules, the text lists.
_MOST = 8
_INDENT, _TREE = "  ", "tree: "


# -- As a dictionary -------------------------------------------------------------------------------


def to_dict(patterns: Sequence[Step], options: PlanOptions, choice: PlanChoice) -> _About:
    """Return what a plan prints as lists, numbers and strings."""
    kind, program = choice.kind, choice.program
    levels: list[_About] = []
    run = 0.0
    if program is not None:
        levels = levels_of(program, kind.dtype.itemsize)
        run, times = kind.model().level_times(program)
        levels = [level | {"nanoseconds": time} for level, time in zip(levels, times, strict=True)]
    return {
        "n": len(patterns),
        "schedule": repr(choice.schedule),
        "reason": choice.reason,
        "batch": options.batch,
        "dtype": None if options.dtype is None else options.dtype.name,
        "device": options.device,
        "predicted_for": {"batch": kind.batch, "dtype": kind.dtype.name},
        "workspace_bytes": choice.workspace_bytes,
        "memory_limit": options.memory_limit,
        "reverse": options.reverse,
        "dense": sorted([start, stop] for start, stop in choice.dense),
        "alternatives": [each._asdict() for each in choice.alternatives],
        "patterns": [
            {"count": times} | _pattern(pattern) for pattern, times in Counter(patterns).items()
        ],
        "implicit": None if program is None else _saving(patterns, kind, program),
        "run_nanoseconds": run,
        "levels": levels,
    }


def levels_of(program: Program, itemsize: int) -> list[_About]:
    """Return what every level does, for one sample with values of `itemsize` bytes.

    ``critical`` counts the multiply-adds of the longest run of the level. ``nnz_in`` and
    ``nnz_out`` count entries of the operands of products, and of the products. ``bytes`` counts
    what its operations read and write if nothing stays in a cache.
    """
    nnz = np.array([pattern.nnz for pattern in program.patterns], np.int64)
    moved = Operations.of(program, itemsize, 1, None).bytes
    levels = []
    for name, runs in program.levels:
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        ops, macs = program.ops[first:last], program.work[first:last]
        products = ops[ops[:, Op.VECTOR] == 0]
        level = {
            "name": name,
            "operations": last - first,
            "depth": int((runs[:, 1] - runs[:, 0]).max()),
            "products": len(products),
            "multiply_adds": int(macs.sum()),
            "critical": int(np.add.reduceat(macs, runs[:, 0] - first).max()),
            "nnz_in": int(nnz[products[:, [Op.LEFT, Op.RIGHT]]].sum()),
            "nnz_out": int(nnz[products[:, Op.OUT]].sum()),
            "bytes": int(moved[first:last].sum()),
        }
        levels.append(level)
    return levels


def _pattern(step: Step) -> _About:
    about: _About = {"shape": list(step.shape), "nnz": step.nnz}
    if isinstance(step, Pattern):
        return about | {"kind": step.kind}
    factors = []
    for factor, shared, solved, index in zip(
        step.factors, step.shared, step.solved, step.indexed, strict=True
    ):
        form = factorisation_of(factor) if solved else None
        solve = form and {
            "factors": form.method,
            "entries": form.entries,
            "multiply_adds": form.multiply_adds,
        }
        weights = None if index is None else index.size
        factors.append(_pattern(factor) | {"shared": shared, "solved": solve, "weights": weights})
    return about | {"kind": "implicit", "factors": factors}


def _saving(steps: Sequence[Step], kind: InputKind, program: Program) -> _About | None:
    """Return bytes of values as they are, and as explicit steps; None if no step is implicit.

    For factors given by weights, which exist in any case, only the values that a run writes count.
    Equal implicit steps share the factors that samples share.
    """
    implicit = sum(isinstance(step, ImplicitPattern) for step in steps)
    if implicit == 0:
        return None
    starts = factor_starts(steps).tolist()
    differs = [kind.batch > 1] * starts[-1]
    if kind.differs is not None:
        differs = np.frombuffer(kind.differs, np.bool_).tolist()
    stored, explicit, known = 0, 0, set[Any]()
    for step, first in zip(steps, starts, strict=False):
        parts = list(zip(factors_of(step), indexed_of(step), strict=True))
        for k, (factor, index) in enumerate(parts, first):
            if index is not None:
                stored += factor.nnz if kind.on_device else program.gathered_of(k, index)
            elif differs[k] or isinstance(step, Pattern):
                stored += factor.nnz * (kind.batch if differs[k] else 1)
            elif (step, k - first) not in known:
                known.add((step, k - first))
                stored += factor.nnz
        differ = any(differs[first : first + len(parts)])
        explicit += count(step).nnz * (kind.batch if differ else 1)
    size = kind.dtype.itemsize
    return {"steps": implicit, "bytes": size * stored, "explicit_bytes": size * explicit}


# -- As text ---------------------------------------------------------------------------------------


def describe(patterns: Sequence[Step], options: PlanOptions, choice: PlanChoice) -> str:
    """Return the text of ``print(plan)``: what runs, what it costs, and why."""
    about, kind = to_dict(patterns, options, choice), choice.kind
    lines = wrap(f"ScanPlan({about['n']} Jacobians, {about['schedule']})", "")
    lines += _said(f"why: {about['reason']}")
    if about["reverse"]:
        lines += _said("input and gradients are in the order of time (reverse)")
    lines += ["  Jacobians, from the last layer to the first:", *_patterns(about["patterns"])]
    if not patterns:
        return "\n".join(lines)
    if (saving := about["implicit"]) is not None:
        lines += _said(
            f"implicit: {saving['steps']:,} of {about['n']:,}; values take "
            f"{format_bytes(saving['bytes'])} where explicit ones take "
            f"{format_bytes(saving['explicit_bytes'])}"
        )
    factors = [(p["count"], each) for p in about["patterns"] for each in p.get("factors", ())]
    solves = sum(times for times, factor in factors if factor["solved"])
    if solves:
        lines += _said(
            f"solves: {solves:,}; times and memory are as if no two matrices were equal, whose "
            "factors are made once"
        )
    lines += _said(f"{_TREE}{tree(choice.schedule, COLUMNS - len(_INDENT + _TREE))}")
    if about["dense"]:
        lines += _said(f"stored densely, though sparse: {len(about['dense']):,} of the products")
    batch = f"a batch of {kind.batch}" if options.batch or kind.batch > 1 else "one sample"
    lines += _said(f"levels, counts for one sample of {kind.dtype}, times for {batch}:")
    lines += _table(about["levels"])
    run = about["run_nanoseconds"]
    time = run + sum(level["nanoseconds"] for level in about["levels"])
    lines += _said(
        f"predicted: {format_time(time)} for {batch} on {kind.model().where}, of which "
        f"{format_time(run)} are spent once a run"
    )
    lines += _said(
        f"memory: at most {format_bytes(about['workspace_bytes'])} beside Jacobians and "
        f"gradients, for {batch} of {kind.dtype}"
    )
    if about["alternatives"]:
        lines += ["  looked at, when this was planned:", *_alternatives(about["alternatives"])]
    return "\n".join(lines)


def _said(sentence: str) -> list[str]:
    return wrap(sentence, _INDENT)


def _patterns(patterns: Sequence[_About]) -> list[str]:
    """Return a line for all Jacobians of one shape and kind; the most frequent come first."""
    kinds: dict[Any, list[_About]] = {}
    for pattern in patterns:
        kinds.setdefault(_alike(pattern), []).append(pattern)
    counted = [(sum(each["count"] for each in alike), alike) for alike in kinds.values()]
    counted.sort(key=lambda kind: -kind[0])
    lines = []
    for times, alike in counted[:_MOST]:
        differ = f"; {len(alike):,} patterns" if len(alike) > 1 else ""
        lines += wrap(f"{times:,} × {_pattern_text(alike)}{differ}", "    ")
    if len(counted) > _MOST:
        rest = sum(times for times, _ in counted[_MOST:])
        lines.append(f"    and {rest:,} of {len(counted) - _MOST:,} other shapes or kinds")
    return lines or ["    none"]


def _alike(pattern: _About) -> tuple[Any, ...]:
    """Return the shape of a step, and what its factors are."""
    factors = [
        (*_alike(each), each["shared"], each["solved"] is None, each["weights"] is None)
        for each in pattern.get("factors", ())
    ]
    return (*pattern["shape"], pattern["kind"], *factors)


def _pattern_text(alike: Sequence[_About]) -> str:
    """Describe patterns of one shape and kind."""
    (rows, cols), kind = alike[0]["shape"], alike[0]["kind"]
    if kind != "implicit":
        size = rows * cols
        nnz = _span([each["nnz"] for each in alike], ",")
        density = _span([each["nnz"] / size if size else 0.0 for each in alike], ".3g")
        return f"{rows:,}×{cols:,} {kind}, nnz {nnz} ({density} dense)"
    texts = []
    for factors in zip(*(each["factors"] for each in alike), strict=True):
        text, first = _pattern_text(factors), factors[0]
        if first["weights"] is not None:
            text += f", {_span([each['weights'] for each in factors], ',')} weights"
        if first["shared"]:
            text += ", shared by all samples"
        if first["solved"]:
            methods = " or ".join(dict.fromkeys(each["solved"]["factors"] for each in factors))
            entries = _span([each["solved"]["entries"] for each in factors], ",")
            text += f", solved with ({methods} factors, {entries} entries)"
        texts.append(text)
    return f"{rows:,}×{cols:,} implicit: {'; then '.join(texts)}"


def _span(numbers: Sequence[float], form: str) -> str:
    """Return the one number if all are equal, or the least and the largest."""
    ends = [f"{end:{form}}" for end in (min(numbers), max(numbers))]
    return " to ".join(dict.fromkeys(ends))


def _alternatives(alternatives: Sequence[_About]) -> list[str]:
    rows = [["schedule", "steps", "products", "predicted"]]
    for each in alternatives[:_MOST]:
        time = "-" if each["nanoseconds"] is None else format_time(each["nanoseconds"])
        rows.append([each["schedule"], f"{each['steps']:,}", f"{each['products']:,}", time])
    if len(alternatives) > _MOST:
        rows.append([f"and {len(alternatives) - _MOST:,} more", "", "", ""])
    return align(rows)


def _table(levels: Sequence[_About]) -> list[str]:
    header = ["level", "matvecs", "products", "steps", "nnz in", "nnz out", "fill-in", "FLOP"]
    header += ["critical", "bytes", "time"]
    rows = [header]
    for level in levels:
        nnz_in, nnz_out = level["nnz_in"], level["nnz_out"]
        fill_in = f"{2 * nnz_out / nnz_in:.2f}" if nnz_in else "-"
        nnz = [f"{entries:,}" if level["products"] else "-" for entries in (nnz_in, nnz_out)]
        rows.append(_row(level["name"], [level], [*nnz, fill_in]))
    rows.append(_row("all", levels, ["", "", ""]))
    return align(rows)


def _row(name: str, levels: Sequence[_About], filling: list[str]) -> list[str]:
    """Return a row for some levels together; `filling` has the cells about their products."""

    def total(what: str) -> Any:
        return sum(level[what] for level in levels)

    return [
        name,
        f"{total('operations') - total('products'):,}",
        f"{total('products'):,}",
        f"{total('depth'):,}",
        *filling,
        format_count(2 * total("multiply_adds")),
        format_count(2 * total("critical")),
        format_bytes(total("bytes")),
        format_time(total("nanoseconds")),
    ]
