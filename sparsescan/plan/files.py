"""Plans on disk: an ``.npz`` file, never pickle.

Whatever follows from patterns and schedule, such as the patterns of the products, is not stored: a
plan that is loaded has its symbolic phase done again. Version 1 of the format:

================ =================================================================================
``version``      int, 1
``digest``       string: BLAKE2b of all other arrays, their names, dtypes and shapes
``patterns``     the different patterns, with ``indptr`` and ``indices``, as in a file of a chain
``steps``        int (n,): the pattern of each Jacobian; of implicit ones, of each factor
``factors``      int (n,): the number of factors of each step; only if some are implicit
``shared``       int: for each of ``steps`` 1 if all samples share it, and 2 more if it is the
                 inverse of a matrix; beside ``factors``
``indexed``      int: for each of ``steps`` the number of its index from 1 on, or 0; beside
                 ``factors``, and the next ones beside it, only if some have one
``weights``      int (i, 2): of each index the number of weights and the length of its sources
``row_starts``   int: of each index where each row starts in its sources, one after the other
``sources``      int: of each index the weights of the rows that differ, one after the other
``schedule``     string: how the schedule prints
``level_names``  strings (l,): the name of each level
``level_runs``   int (l,): the number of its runs
``run_lengths``  int (r,): the number of operations of each run
``ops``          int (m, 3): ``(start, mid, stop)`` of each operation
``dense``        int (d, 2): ``(start, stop)`` of the products that are stored densely, in numbers
                 of ``steps``
``alternatives`` strings (a,): the schedules that the planner looked at
``counts``       int (a, 2): steps and products of each
``predicted``    float (a,): nanoseconds of each, or NaN
``differs``      int (n,): 1 for Jacobians that differ between samples; (0,) if all do
``option.*``     one integer or string for each option of the plan, such as ``option.batch``; none
                 for one that is None
================ =================================================================================

The levels of a schedule that is known by its name are stored too, and must agree with it: what runs
is what was saved, or nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chains import files
from ..chains.containers import check_dtype
from ..chains.files import check_index, check_used
from ..chains.reading import check_chain
from ..checks import check_choice, check_count
from ..errors import InputError, PlanFileError
from ..symbolic import implicit
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.indexed import IndexedPattern, indexed
from ..symbolic.pattern import Pattern
from ..symbolic.schedule import Level, Schedule, printed_schedule
from .choice import Alternative, InputKind, PlanChoice, PlanOptions

_VERSION = 1
_REMEDY = "expected a file written by ScanPlan.save"


# How the options of a plan and the kind of input that ran last are read, of integers or of strings.
# A plan with one that is not known here is refused.
_OPTIONS: dict[str, tuple[type[int] | type[str], Callable[[str, Any], Any]]] = {
    "reason": (str, lambda _, text: text),
    "batch": (int, partial(check_count, least=1)),
    "dtype": (str, lambda _, text: check_dtype(text)),
    "device": (str, lambda name, device: check_choice(name, device, "cpu", "cuda")),
    "memory_limit": (int, partial(check_count, least=0)),
    "reverse": (int, lambda _, flag: bool(flag)),
    "auto": (int, lambda _, flag: bool(flag)),
    "kind_batch": (int, partial(check_count, least=1)),
    "kind_dtype": (str, lambda _, text: check_dtype(text)),
    "kind_on_device": (int, lambda _, flag: bool(flag)),
}
_OPTIONAL = ("batch", "dtype", "device", "memory_limit")
_PREFIX, _KIND = "option.", "kind_"


# -- Writing ---------------------------------------------------------------------------------------


def save_plan(
    path: files.Path, patterns: Sequence[Step], options: PlanOptions, choice: PlanChoice
) -> None:
    """Write a plan to a file of exactly this name; see :meth:`.ScanPlan.save`."""
    path = files.check_path(path)
    listed = [factor for step in patterns for factor in implicit.factors_of(step)]
    unique = list(dict.fromkeys(listed))
    number = {pattern: p for p, pattern in enumerate(unique)}
    steps = [number[pattern] for pattern in listed]
    arrays = files.pack_patterns(unique) | _pack_schedule(choice.schedule)
    arrays |= _pack_options(options, choice) | _pack_alternatives(choice.alternatives)
    arrays["dense"] = np.array(sorted(choice.dense), np.int64).reshape(-1, 2)
    arrays["version"] = np.array(_VERSION)
    arrays["steps"] = np.array(steps, np.min_scalar_type(len(unique)))
    if implicit.contains(patterns, ImplicitPattern):
        counts = np.diff(implicit.factor_starts(patterns))
        arrays["factors"] = counts.astype(np.min_scalar_type(counts.max()))
        flags = [
            shared + 2 * solved
            for step in patterns
            for shared, solved in zip(
                implicit.shared_of(step), implicit.solved_of(step), strict=True
            )
        ]
        arrays["shared"] = np.array(flags, np.uint8)
        arrays |= _pack_indices([each for step in patterns for each in implicit.indexed_of(step)])
    files.write_arrays(path, arrays | {"digest": np.array(_digest(arrays))})


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _pack_options(options: PlanOptions, choice: PlanChoice) -> dict[str, NDArray[Any]]:
    given = options._asdict() | {"reason": choice.reason}
    given |= {_KIND + name: value for name, value in choice.kind._asdict().items()}
    if options.memory_limit is not None:
        given["memory_limit"] = min(options.memory_limit, np.iinfo(np.int64).max)
    packed: dict[str, NDArray[Any]] = {
        "differs": np.frombuffer(choice.kind.differs or b"", np.uint8)
    }
    for name, (form, _) in _OPTIONS.items():
        if given[name] is not None:
            packed[_PREFIX + name] = np.array(form(given[name]), np.int64 if form is int else None)
    return packed


def _pack_indices(indices: Sequence[IndexedPattern | None]) -> dict[str, NDArray[Any]]:
    unique = list(dict.fromkeys(index for index in indices if index is not None))
    if not unique:
        return {}
    number = {index: k + 1 for k, index in enumerate(unique)}
    numbers = [0 if index is None else number[index] for index in indices]
    return {
        "indexed": np.array(numbers, np.min_scalar_type(len(unique))),
        "weights": np.array([(index.size, index.distinct) for index in unique], np.int64),
        "row_starts": np.concatenate([index.starts for index in unique]),
        "sources": np.concatenate([index.sources for index in unique]),
    }


def _pack_schedule(schedule: Schedule) -> dict[str, NDArray[Any]]:
    levels = schedule.levels
    runs = [np.diff(level.runs) for level in levels]
    ops = np.concatenate([np.empty((0, 3), np.int64), *[level.ops for level in levels]])
    # No number in a schedule is larger.
    small = np.min_scalar_type(schedule.n)
    return {
        "schedule": np.array(repr(schedule)),
        "level_names": np.array([level.name for level in levels], np.str_),
        "level_runs": np.array([len(lengths) for lengths in runs], small),
        "run_lengths": np.concatenate([np.empty(0, np.int64), *runs]).astype(small),
        "ops": ops.astype(small),
    }


def _pack_alternatives(alternatives: Sequence[Alternative]) -> dict[str, NDArray[Any]]:
    counts = [(each.steps, each.products) for each in alternatives]
    return {
        "alternatives": np.array([each.schedule for each in alternatives], np.str_),
        "counts": np.array(counts, np.int64).reshape(-1, 2),
        # None becomes NaN.
        "predicted": np.array([each.nanoseconds for each in alternatives], np.float64),
    }


# -- Reading ---------------------------------------------------------------------------------------


def load_plan(path: files.Path) -> tuple[Sequence[Step], PlanChoice, PlanOptions]:
    """Read what :func:`save_plan` has written; see :meth:`.ScanPlan.load`."""
    path = files.check_path(path)
    with open(path, "rb") as file, files.refusing(path, PlanFileError, _REMEDY):
        return _unpack(files.read_arrays(file))


def _unpack(arrays: files.Arrays) -> tuple[Sequence[Step], PlanChoice, PlanOptions]:
    version = arrays.scalar("version", "iu", "one integer")
    if version != _VERSION:
        raise InputError(f"version is {version}; expected {_VERSION}, the format known here")
    digest = _digest({key: arrays[key] for key in arrays if key != "digest"})
    if arrays.scalar("digest", "U", "one string") != digest:
        raise InputError("the arrays are not those that were written: their checksum is wrong")
    unique = files.unpack_patterns(arrays)
    steps = arrays.integers("steps")
    for p in {steps.min(), steps.max()} if len(steps) else ():
        check_index("steps", int(p), len(unique))
    factors = check_chain([unique[p] for p in steps.tolist()])
    patterns = _unpack_steps(arrays, factors) if "factors" in arrays else factors
    schedule, options = _unpack_schedule(arrays, len(patterns)), _unpack_options(arrays)
    starts = implicit.factor_starts(patterns)
    differs = arrays.integers("differs") != 0
    if len(differs):
        check_used("differs", len(differs), int(starts[-1]))
    kind = {
        name: options.pop(_KIND + name) for name in InputKind._fields if _KIND + name in options
    }
    choice = PlanChoice(
        schedule,
        _unpack_dense(arrays, implicit.refine(schedule, starts)),
        options.pop("reason"),
        _unpack_alternatives(arrays),
        kind=InputKind(**kind, differs=differs.tobytes() or None),
    )
    return patterns, choice, PlanOptions(**options)


def _unpack_steps(arrays: files.Arrays, factors: Sequence[Pattern]) -> Sequence[Step]:
    """Return the steps whose factors these are."""
    counts, shared = arrays.integers("factors").tolist(), arrays.integers("shared").tolist()
    if min(counts, default=0) < 1 or sum(counts) != len(factors):
        raise InputError(f"factors adds up to {sum(counts)}; expected {len(factors)}, as steps has")
    check_used("shared", len(shared), len(factors))
    if not {0, 1, 2, 3}.issuperset(shared):
        raise InputError(f"shared has {max(shared)}; expected 0 to 3")
    given = _unpack_indices(arrays, factors) if "indexed" in arrays else factors
    patterns: list[Step] = []
    start = 0
    for count in counts:
        flags, step = shared[start : start + count], given[start : start + count]
        if flags == [0] and isinstance(step[0], Pattern):
            patterns.append(step[0])
        else:
            positions = ([k for k, flag in enumerate(flags) if flag & bit] for bit in (1, 2))
            patterns.append(ImplicitPattern(step, *positions))
        start += count
    return patterns


def _unpack_indices(
    arrays: files.Arrays, factors: Sequence[Pattern]
) -> Sequence[Pattern | IndexedPattern]:
    """Return the factors, those that have an index with it."""
    numbers, sizes = arrays.integers("indexed").tolist(), arrays.integers("weights", 2).tolist()
    check_used("indexed", len(numbers), len(factors))
    of: dict[int, Pattern] = {}
    for number, factor in zip(numbers, factors, strict=True):
        if number:
            check_index("indexed", number - 1, len(sizes))
            if of.setdefault(number, factor) is not factor:
                raise InputError(f"indexed has {number} for different patterns; expected one")
    check_used("weights", len(sizes), len(of))
    row_ends = np.cumsum([0, *(of[k + 1].shape[0] for k in range(len(sizes)))])
    source_ends = _sum_up("weights", [count for _, count in sizes], len(arrays.integers("sources")))
    row_starts = arrays.integers("row_starts")
    check_used("row_starts", len(row_starts), int(row_ends[-1]))
    by_number = {}
    for k, (size, _) in enumerate(sizes):
        starts = row_starts[row_ends[k] : row_ends[k + 1]]
        sources = arrays["sources"][source_ends[k] : source_ends[k + 1]]
        by_number[k + 1] = indexed(of[k + 1], starts, sources, check_count("weights", size, 0))
    return [by_number.get(number, factor) for number, factor in zip(numbers, factors, strict=True)]


def _unpack_dense(arrays: files.Arrays, schedule: Schedule) -> frozenset[tuple[int, int]]:
    dense = frozenset((start, stop) for start, stop in arrays.integers("dense", 2).tolist())
    ops = [op for level in schedule.levels for op in level.ops.tolist()]
    unknown = dense.difference((start, stop) for start, _, stop in ops if start > 0)
    if unknown:
        raise InputError(f"dense has {min(unknown)}; expected products of the schedule")
    return dense


def _unpack_alternatives(arrays: files.Arrays) -> tuple[Alternative, ...]:
    names = arrays["alternatives"]
    for key, form in (("alternatives", "strings"), ("predicted", "floats")):
        array = arrays[key]
        if array.dtype.kind != ("U" if form == "strings" else "f") or array.shape != (names.size,):
            raise InputError(
                f"{key} has dtype {array.dtype} and shape {array.shape}; expected one dimension "
                f"of {form}, as long as alternatives"
            )
    counts = arrays.integers("counts", 2)
    check_used("counts", len(counts), len(names))
    return tuple(
        Alternative(name, steps, products, None if math.isnan(time) else time)
        for name, (steps, products), time in zip(
            names.tolist(), counts.tolist(), arrays["predicted"].tolist(), strict=True
        )
    )


def _unpack_options(arrays: files.Arrays) -> dict[str, Any]:
    options: dict[str, Any] = dict.fromkeys(_OPTIONS)
    for key in arrays:
        name = key.removeprefix(_PREFIX)
        if name == key:
            continue
        if name not in _OPTIONS:
            raise InputError(f"{key} is not known here; expected one of {', '.join(_OPTIONS)}")
        form, read = _OPTIONS[name]
        what = ("iu", "one integer") if form is int else ("U", "one string")
        options[name] = read(key, arrays.scalar(key, *what))
    for name, value in options.items():
        if value is None and name not in _OPTIONAL:
            raise InputError(f"the key '{_PREFIX}{name}' is missing")
    return options


def _unpack_schedule(arrays: files.Arrays, n: int) -> Schedule:
    text = arrays.scalar("schedule", "U", "one string")
    stored = Schedule.from_levels(n, _unpack_levels(arrays))
    schedule = printed_schedule(text, n) or stored
    if repr(schedule) != text or Schedule.from_levels(n, schedule.levels) != stored:
        raise InputError(f"schedule is {text!r}, but its levels are other ones")
    return schedule


def _unpack_levels(arrays: files.Arrays) -> list[Level]:
    names = arrays["level_names"]
    if names.dtype.kind != "U" or names.ndim != 1:
        raise InputError(
            f"level_names has dtype {names.dtype} and shape {names.shape}; expected strings (·)"
        )
    ops = arrays.integers("ops", 3).astype(np.int64)
    run_ends = _ends(arrays, "run_lengths", len(ops))
    level_ends = _ends(arrays, "level_runs", len(run_ends) - 1)
    check_used("level_names", len(names), len(level_ends) - 1)
    levels = []
    for name, first, last in zip(names.tolist(), level_ends, level_ends[1:], strict=False):
        runs = run_ends[first : last + 1]
        levels.append(Level(name, ops[runs[0] : runs[-1]], runs - runs[0]))
    return levels


def _ends(arrays: files.Arrays, key: str, total: int) -> NDArray[np.int64]:
    """Return where parts of the lengths under a key end, from 0 to `total`."""
    return _sum_up(key, arrays.integers(key).tolist(), total)


def _sum_up(key: str, lengths: list[int], total: int) -> NDArray[np.int64]:
    if min(lengths, default=0) < 0 or sum(lengths) != total:
        raise InputError(f"{key} adds up to {sum(lengths)}; expected lengths of {total} in all")
    return np.cumsum([0, *lengths], dtype=np.int64)
