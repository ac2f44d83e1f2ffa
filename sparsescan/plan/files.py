"""Plans on disk: an ``.npz`` archive of NumPy's, never pickle.

The file does not store what follows from patterns and schedule, such as the patterns of products:
loading a plan repeats its symbolic phase. Version 2 of the format:

================ =================================================================================
``version``      int, 2
``about``        string, JSON: ``schedule``, as it prints; ``levels``, their names; ``reason``;
                 ``alternatives``, schedules that the planner looked at, with steps, products and
                 predicted nanoseconds; ``options`` of the plan; and the ``kind`` of input that ran
                 last
``patterns``     the different patterns, with ``indptr_p`` and ``indices_p``, as in a file of a
                 chain
``steps``        int (n,): the pattern of each Jacobian; of implicit ones, of each factor
``factors``      int (n, 4): for each of ``steps`` the number of its step; 1 if all samples share
                 it; 1 if it is the inverse of a matrix; and the number of its index from 1 on, or
                 0; only if some are implicit
``row_starts_k`` int: of the k-th index where each row starts in its sources
``sources_k``    int: the weights of the rows that differ, one after the other
``weights_k``    int: the number of weights
``ops``          int (m, 5): level, run within it, and ``(start, mid, stop)`` of each operation
``dense``        int (d, 2): ``(start, stop)`` of the products that are stored densely, in numbers
                 of ``steps``
``differs``      int (n,): 1 for Jacobians that differ between samples; (0,) if all do
================ =================================================================================

The levels of a named schedule are stored too, and must agree with the name: a loaded plan runs what
was saved, or loading fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chains import files
from ..chains.containers import check_dtype
from ..chains.reading import check_chain
from ..checks import check_choice, check_count, check_count_or_none, check_flag
from ..errors import InputError
from ..symbolic import implicit
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.indexed import IndexedPattern, indexed
from ..symbolic.pattern import Pattern
from ..symbolic.schedule import Level, Schedule, printed_schedule
from .choice import Alternative, InputKind, PlanChoice, PlanOptions

_REMEDY = "expected a file written by ScanPlan.save"


# -- Writing ---------------------------------------------------------------------------------------


def save_plan(
    path: files.Path, patterns: Sequence[Step], options: PlanOptions, choice: PlanChoice
) -> None:
    """Write a plan to a file of exactly this name; see :meth:`.ScanPlan.save`."""
    path = files.check_path(path)
    listed = [factor for step in patterns for factor in implicit.factors_of(step)]
    unique = list(dict.fromkeys(listed))
    number = {pattern: p for p, pattern in enumerate(unique)}
    levels, kind = choice.schedule.levels, choice.kind
    about = {
        "schedule": repr(choice.schedule),
        "levels": [level.name for level in levels],
        "reason": choice.reason,
        "alternatives": choice.alternatives,
        "options": options._asdict(),
        "kind": {"batch": kind.batch, "dtype": kind.dtype, "on_device": kind.on_device},
    }
    ops = [np.empty((0, 5), np.int64)]
    for k, level in enumerate(levels):
        runs = np.repeat(np.arange(len(level.runs) - 1), np.diff(level.runs))
        ops.append(np.column_stack([np.full(len(runs), k), runs, level.ops]))
    arrays: dict[str, NDArray[Any]] = {
        # Dtypes by their names.
        "about": np.array(json.dumps(about, default=str)),
        "steps": _small([number[pattern] for pattern in listed]),
        "ops": _small(np.concatenate(ops)),
        "dense": np.array(sorted(choice.dense), np.int64).reshape(-1, 2),
        "differs": np.frombuffer(kind.differs or b"", np.uint8),
    }
    arrays |= files.pack_patterns(unique)
    if implicit.contains(patterns, ImplicitPattern):
        arrays |= _pack_factors(patterns)
    files.write_arrays(path, arrays)


def _small(numbers: Any) -> NDArray[Any]:
    """Return non-negative numbers in the smallest integer dtype that holds them."""
    array = np.asarray(numbers, np.int64)
    return array.astype(np.min_scalar_type(array.max(initial=0)))


def _pack_factors(patterns: Sequence[Step]) -> dict[str, NDArray[Any]]:
    numbers: dict[IndexedPattern | None, int] = {None: 0}
    rows = [
        (k, shared, solved, numbers.setdefault(index, len(numbers)))
        for k, step in enumerate(patterns)
        for shared, solved, index in zip(
            implicit.shared_of(step),
            implicit.solved_of(step),
            implicit.indexed_of(step),
            strict=True,
        )
    ]
    arrays = {"factors": _small(rows)}
    for index, number in numbers.items():
        if index is not None:
            arrays[f"row_starts_{number}"] = index.starts
            arrays[f"sources_{number}"] = index.sources
            arrays[f"weights_{number}"] = np.array(index.size)
    return arrays


# -- Reading ---------------------------------------------------------------------------------------


def load_plan(path: files.Path) -> tuple[Sequence[Step], PlanChoice, PlanOptions]:
    """Read what :func:`save_plan` has written; see :meth:`.ScanPlan.load`."""
    with files.open_arrays(path, _REMEDY) as arrays:
        return _unpack(arrays)


def _unpack(arrays: files.Arrays) -> tuple[Sequence[Step], PlanChoice, PlanOptions]:
    unique = files.unpack_patterns(arrays)
    numbers = arrays.integers("steps")
    files.check_range("steps", numbers, len(unique))
    listed = check_chain([unique[p] for p in numbers.tolist()])
    steps = _unpack_steps(arrays, listed) if "factors" in arrays else listed
    about = json.loads(arrays.scalar("about", "U", "one string"))
    schedule = _unpack_schedule(arrays, about, len(steps))
    given, seen = about["options"], about["kind"]
    options = PlanOptions(
        batch=check_count_or_none("batch", given["batch"], 1),
        dtype=None if given["dtype"] is None else check_dtype(given["dtype"]),
        device=given["device"] and check_choice("device", given["device"], "cpu", "cuda"),
        memory_limit=check_count_or_none("memory_limit", given["memory_limit"], 0),
        reverse=check_flag("reverse", given["reverse"]),
        auto=check_flag("auto", given["auto"]),
    )
    starts = implicit.factor_starts(steps)
    differs = arrays.integers("differs") != 0
    if len(differs) not in (0, starts[-1]):
        raise InputError(f"differs has {len(differs)} entries; expected {starts[-1]}, or none")
    kind = InputKind(
        check_count("batch", seen["batch"], 1),
        check_dtype(seen["dtype"]),
        check_flag("on_device", seen["on_device"]),
        differs.tobytes() or None,
    )
    dense = _unpack_dense(arrays, implicit.refine(schedule, starts))
    alternatives = [Alternative(*each) for each in about["alternatives"]]
    return steps, PlanChoice(schedule, dense, about["reason"], (*alternatives,), kind=kind), options


def _unpack_steps(arrays: files.Arrays, listed: Sequence[Pattern]) -> Sequence[Step]:
    """Return the steps that have these factors."""
    table = arrays.integers("factors", 4)
    if len(table) != len(listed):
        raise InputError(f"factors has {len(table)} entries; expected {len(listed)}")
    known: dict[tuple[int, Pattern], IndexedPattern] = {}
    steps: list[Step] = []
    for _, rows in groupby(zip(table.tolist(), listed, strict=True), lambda row: row[0][0]):
        (*columns,), patterns = zip(*rows, strict=True)
        factors: list[Pattern | IndexedPattern] = list(patterns)
        for j, (pattern, (*_, k)) in enumerate(zip(patterns, columns, strict=True)):
            if k and (k, pattern) not in known:
                size = check_count("weights", arrays.scalar(f"weights_{k}", "iu", "one integer"), 0)
                parts = arrays.integers(f"row_starts_{k}"), arrays.integers(f"sources_{k}")
                known[k, pattern] = indexed(pattern, *parts, size)
            factors[j] = known.get((k, pattern), pattern)
        shared, solved = ([j for j, row in enumerate(columns) if row[c]] for c in (1, 2))
        if len(factors) == 1 and isinstance(factors[0], Pattern) and not shared + solved:
            steps.append(factors[0])
        else:
            steps.append(ImplicitPattern(factors, shared, solved))
    return steps


def _unpack_schedule(arrays: files.Arrays, about: dict[str, Any], n: int) -> Schedule:
    names, text = about["levels"], about["schedule"]
    ops = arrays.integers("ops", 5).astype(np.int64)
    ends = np.searchsorted(ops[:, 0], np.arange(len(names) + 1))
    levels = []
    for name, first, last in zip(names, ends, ends[1:], strict=False):
        runs = np.flatnonzero(np.diff(ops[first:last, 1])) + 1
        levels.append(Level(name, ops[first:last, 2:], np.array([0, *runs, last - first])))
    # Operations out of order, or without a level, give other levels than the text says.
    stored = Schedule.from_levels(n, levels)
    schedule = printed_schedule(text, n) or stored
    if repr(schedule) != text or Schedule.from_levels(n, schedule.levels) != stored:
        raise InputError(f"schedule is {text!r}, but its levels are other ones")
    return schedule


def _unpack_dense(arrays: files.Arrays, schedule: Schedule) -> frozenset[tuple[int, int]]:
    dense = frozenset((start, stop) for start, stop in arrays.integers("dense", 2).tolist())
    ops = [op for level in schedule.levels for op in level.ops.tolist()]
    unknown = dense.difference((start, stop) for start, _, stop in ops if start > 0)
    if unknown:
        raise InputError(f"dense has {min(unknown)}; expected products of the schedule")
    return dense
