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
``measured``     float (a,): the same as measured, or NaN
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
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chains.chain import check_chain
from ..chains.containers import check_dtype
from ..chains.files import (
    Arrays,
    Path,
    check_index,
    check_path,
    check_used,
    pack_patterns,
    read_arrays,
    refusing,
    unpack_patterns,
    write_arrays,
)
from ..errors import InputError, PlanFileError
from ..planning.search import Alternative
from ..symbolic.implicit import (
    ImplicitPattern,
    Step,
    contains,
    factor_starts,
    factors_of,
    indexed_of,
    refine,
    shared_of,
    solved_of,
)
from ..symbolic.indexed import IndexedPattern, indexed
from ..symbolic.pattern import Pattern
from ..symbolic.schedule import Level, Schedule, check_count
from .spec import Kind, PlanSpec

__all__ = ["load_spec", "save_spec"]

_VERSION = 1
_REMEDY = "expected a file written by ScanPlan.save"
_NAMED = re.compile(r"Schedule\.(linear|blelloch|truncated|chunked)\(([0-9]+)(?:, ([0-9]+))?\)")

# Arguments and attributes of a PlanSpec, and of the kind of input that it is for; a plan with one
# that is not known here is refused.
_OPTIONS: dict[str, type[int] | type[str]] = {
    "reason": str,
    "batch": int,
    "dtype": str,
    "device": str,
    "memory_limit": int,
    "reverse": int,
    "auto": int,
    "kind_batch": int,
    "kind_dtype": str,
    "kind_on_device": int,
}
_OPTIONAL = ("batch", "dtype", "device", "memory_limit")
_PREFIX = "option."


def save_spec(path: Path, spec: PlanSpec) -> None:
    """Write a plan to a file of exactly this name; see :meth:`.ScanPlan.save`."""
    path = check_path(path)
    listed = [factor for step in spec.patterns for factor in factors_of(step)]
    unique = list(dict.fromkeys(listed))
    number = {pattern: p for p, pattern in enumerate(unique)}
    steps = [number[pattern] for pattern in listed]
    arrays = pack_patterns(unique) | _pack_schedule(spec.schedule) | _pack_options(spec)
    arrays |= _pack_alternatives(spec.alternatives)
    arrays["differs"] = np.frombuffer(spec.kind.differs or b"", np.uint8)
    arrays["dense"] = np.array(sorted(spec.dense), np.int64).reshape(-1, 2)
    arrays["version"] = np.array(_VERSION)
    arrays["steps"] = np.array(steps, np.min_scalar_type(len(unique)))
    if contains(spec.patterns, ImplicitPattern):
        counts = np.diff(factor_starts(spec.patterns))
        arrays["factors"] = counts.astype(np.min_scalar_type(counts.max()))
        flags = [
            shared + 2 * solved
            for step in spec.patterns
            for shared, solved in zip(shared_of(step), solved_of(step), strict=True)
        ]
        arrays["shared"] = np.array(flags, np.uint8)
        arrays |= _pack_indices([each for step in spec.patterns for each in indexed_of(step)])
    write_arrays(path, arrays | {"digest": np.array(_digest(arrays))})


def load_spec(path: Path) -> PlanSpec:
    """Read what :func:`save_spec` has written; see :meth:`.ScanPlan.load`."""
    path = check_path(path)
    with open(path, "rb") as file, refusing(path, PlanFileError, _REMEDY):
        return _unpack(read_arrays(file))


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _pack_options(spec: PlanSpec) -> dict[str, NDArray[Any]]:
    options: dict[str, Any] = {
        name: value for name, value in vars(spec).items() if name in _OPTIONS
    }
    options["kind_batch"], options["kind_dtype"] = spec.kind.batch, spec.kind.dtype.name
    options["kind_on_device"] = spec.kind.on_device
    if spec.dtype is not None:
        options["dtype"] = spec.dtype.name
    if spec.memory_limit is not None:
        options["memory_limit"] = min(spec.memory_limit, np.iinfo(np.int64).max)
    return {
        _PREFIX + name: np.array(value, np.int64 if _OPTIONS[name] is int else np.str_)
        for name, value in options.items()
        if value is not None
    }


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
    def times(given: Iterable[float | None]) -> NDArray[np.float64]:
        return np.array([np.nan if time is None else time for time in given], np.float64)

    return {
        "alternatives": np.array([each.schedule for each in alternatives], np.str_),
        "counts": np.array(
            [(each.steps, each.products) for each in alternatives], np.int64
        ).reshape(-1, 2),
        "predicted": times(each.nanoseconds for each in alternatives),
        "measured": times(each.measured for each in alternatives),
    }


def _unpack(arrays: Arrays) -> PlanSpec:
    version = arrays.scalar("version", "iu", "one integer")
    if version != _VERSION:
        raise InputError(f"version is {version}; expected {_VERSION}, the format known here")
    digest = _digest({key: arrays[key] for key in arrays if key != "digest"})
    if arrays.scalar("digest", "U", "one string") != digest:
        raise InputError("the arrays are not those that were written: their checksum is wrong")
    unique = unpack_patterns(arrays)
    steps = arrays.integers("steps")
    for p in {steps.min(), steps.max()} if len(steps) else ():
        check_index("steps", int(p), len(unique))
    factors = check_chain([unique[p] for p in steps.tolist()])
    patterns = _unpack_steps(arrays, factors) if "factors" in arrays else factors
    schedule, options = _unpack_schedule(arrays, len(patterns)), _unpack_options(arrays)
    starts = factor_starts(patterns)
    options["ran"] = _unpack_kind(arrays, options, int(starts[-1]))
    options["dense"] = _unpack_dense(arrays, refine(schedule, starts))
    options["alternatives"] = _unpack_alternatives(arrays)
    return PlanSpec(patterns, schedule, **options)


def _unpack_steps(arrays: Arrays, factors: Sequence[Pattern]) -> Sequence[Step]:
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
    arrays: Arrays, factors: Sequence[Pattern]
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


def _unpack_kind(arrays: Arrays, options: dict[str, Any], n: int) -> Kind:
    """Take the kind of input that the schedule is for out of the options."""
    batch, dtype, on_device = (options.pop(f"kind_{name}") for name in Kind._fields[:3])
    check_count("option.kind_batch", batch, 1)
    differs = arrays.integers("differs") != 0
    if len(differs):
        check_used("differs", len(differs), n)
    return Kind(batch, check_dtype(dtype), bool(on_device), differs.tobytes() or None)


def _unpack_dense(arrays: Arrays, schedule: Schedule) -> frozenset[tuple[int, int]]:
    dense = frozenset((start, stop) for start, stop in arrays.integers("dense", 2).tolist())
    ops = [op for level in schedule.levels for op in level.ops.tolist()]
    unknown = dense.difference((start, stop) for start, _, stop in ops if start > 0)
    if unknown:
        raise InputError(f"dense has {min(unknown)}; expected products of the schedule")
    return dense


def _unpack_alternatives(arrays: Arrays) -> tuple[Alternative, ...]:
    names, columns = arrays["alternatives"], [arrays["predicted"], arrays["measured"]]
    for name, array, kind in zip(
        ("alternatives", "predicted", "measured"), (names, *columns), "Uff", strict=True
    ):
        if array.dtype.kind != kind or array.shape != (names.size,):
            raise InputError(
                f"{name} has dtype {array.dtype} and shape {array.shape}; expected one dimension "
                f"of {'strings' if kind == 'U' else 'floats'}, as long as alternatives"
            )
    counts = arrays.integers("counts", 2)
    check_used("counts", len(counts), len(names))
    rows = zip(
        names.tolist(), counts.tolist(), *(column.tolist() for column in columns), strict=True
    )
    return tuple(
        Alternative(name, *count, *(None if math.isnan(time) else time for time in times))
        for name, count, *times in rows
    )


def _unpack_options(arrays: Arrays) -> dict[str, Any]:
    options: dict[str, Any] = dict.fromkeys(_OPTIONS)
    for key in arrays:
        name = key.removeprefix(_PREFIX)
        if name == key:
            continue
        if name not in _OPTIONS:
            raise InputError(f"{key} is not known here; expected one of {', '.join(_OPTIONS)}")
        kinds, what = ("iu", "one integer") if _OPTIONS[name] is int else ("U", "one string")
        options[name] = arrays.scalar(key, kinds, what)
    for name, value in options.items():
        if value is None and name not in _OPTIONAL:
            raise InputError(f"the key '{_PREFIX}{name}' is missing")
    if options["memory_limit"] is not None:
        check_count("option.memory_limit", options["memory_limit"], 0)
    if options["batch"] is not None:
        check_count("option.batch", options["batch"], 1)
    if options["dtype"] is not None:
        options["dtype"] = check_dtype(options["dtype"])
    options["reverse"], options["auto"] = bool(options["reverse"]), bool(options["auto"])
    if options["device"] not in (None, "cpu", "cuda"):
        raise InputError(f"option.device is {options['device']!r}; expected 'cpu' or 'cuda'")
    return options


def _unpack_schedule(arrays: Arrays, n: int) -> Schedule:
    text = arrays.scalar("schedule", "U", "one string")
    stored = Schedule.from_levels(n, _unpack_levels(arrays))
    named = _NAMED.fullmatch(text)
    if named is None:
        if repr(stored) != text:
            raise InputError(f"schedule is {text!r}, but its levels are those of {stored!r}")
        return stored
    kind, *arguments = named.groups()
    if int(arguments[0]) != n:
        raise InputError(f"schedule is {text!r}; expected one for {n} Jacobians")
    schedule: Schedule = getattr(Schedule, kind)(*[int(a) for a in arguments if a is not None])
    if repr(schedule) != text or Schedule.from_levels(n, schedule.levels) != stored:
        raise InputError(f"schedule is {text!r}, but its levels are other ones")
    return schedule


def _unpack_levels(arrays: Arrays) -> list[Level]:
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


def _ends(arrays: Arrays, key: str, total: int) -> NDArray[np.int64]:
    """Return where parts of the lengths under a key end, from 0 to `total`."""
    return _sum_up(key, arrays.integers(key).tolist(), total)


def _sum_up(key: str, lengths: list[int], total: int) -> NDArray[np.int64]:
    if min(lengths, default=0) < 0 or sum(lengths) != total:
        raise InputError(f"{key} adds up to {sum(lengths)}; expected lengths of {total} in all")
    return np.cumsum([0, *lengths], dtype=np.int64)
