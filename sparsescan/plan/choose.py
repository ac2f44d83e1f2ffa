"""The schedule of a plan: asked for, or chosen for what runs, within the limit of memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..chains.reading import name_of
from ..errors import DeviceError, InputError, MemoryLimitError, short
from ..formatting import exact_bytes
from ..symbolic.implicit import Step, solved_of
from ..symbolic.pattern import TooLargeError
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .choice import Choice, Kind
from .search import Search

# Entries that int64 can count, with room for sums of products.
_COUNTED = 1 << 55
_ASKED = "asked for"


def choose_schedule(
    patterns: Sequence[Step],
    schedule: Schedule | None,
    kind: Kind,
    memory_limit: int | None = None,
    measure: Callable[[Sequence[Choice]], Sequence[float]] | None = None,
) -> Choice:
    """Return the schedule that runs input of a kind, and why; None is ``"auto"``."""
    _check_counts(patterns, kind.batch)

    def fits(program: Program) -> bool:
        return memory_limit is None or kind.needed_bytes(program) <= memory_limit

    nbytes = math.inf if memory_limit is None else memory_limit
    search = Search(patterns, kind.model(), fits, nbytes)
    if schedule is None:
        more = _for_device(patterns, kind) if kind.on_device else ()
        return replace(search.choose(more, measure), kind=kind)
    if not patterns:
        return Choice(schedule, reason=_ASKED, kind=kind)
    try:
        dense, program = search.in_best_forms(schedule)
    except OverflowError:
        raise MemoryLimitError(
            f"products of {schedule} have more multiply-adds than int64 can count; expected "
            "another schedule"
        ) from None
    except TooLargeError:
        limit = f"memory_limit is {exact_bytes(memory_limit or 0)}"
        raise no_room(limit, f"{schedule} needs more", patterns, kind) from None
    return Choice(schedule, dense, _ASKED, kind=kind, program=program)


def no_room(limit: str, needs: str, patterns: Sequence[Step], kind: Kind) -> MemoryLimitError:
    """Return the error that says what is there, what a schedule needs, and what the least does."""
    linear = Schedule.linear(len(patterns))
    least = kind.needed_bytes(Program(patterns, linear))
    return MemoryLimitError(f"{limit}; {needs}, and the least, {linear}, {exact_bytes(least)}")


def check_solves(
    patterns: Sequence[Step], schedule: Schedule | None, on_device: bool, reverse: bool
) -> None:
    """Raise if a step is solved with, and the schedule multiplies steps or runs on a device.

    `reverse` says that the caller counts the steps from the end; None is ``"auto"``.
    """
    k = next((k for k, step in enumerate(patterns) if any(solved_of(step))), None)
    if k is None:
        return
    name = name_of(k, len(patterns), reverse)
    if schedule is not None and any(level.ops[:, 0].any() for level in schedule.levels):
        raise InputError(
            f"schedule is {schedule!r}, which multiplies Jacobians, but {name} is one to solve "
            "with, whose products would be dense; expected 'linear' or 'auto'"
        )
    if on_device:
        raise DeviceError(
            f"{name} is a step to solve with, which runs on the CPU only; expected host memory "
            "(cupy.asnumpy), and device=None or 'cpu'"
        )


def _check_counts(patterns: Sequence[Step], batch: int) -> None:
    """Raise if a chain is larger than any machine's memory, and than int64 can count."""
    entries = sum(
        count * (pattern.nnz + sum(pattern.shape)) for pattern, count in Counter(patterns).items()
    )
    if entries * batch > _COUNTED:
        raise MemoryLimitError(
            f"the scan of {short(batch)} samples has {entries:,} entries of Jacobians and "
            "gradients for each; expected no more than a machine can hold"
        )


def _for_device(patterns: Sequence[Step], kind: Kind) -> list[Schedule]:
    """Return chunks for small steps of one pattern, which have kernels of their own."""
    from ..execution.cuda.chunks import chunks_of

    n = len(patterns)
    chunks = chunks_of(patterns, kind.batch, kind.dtype) if patterns else None
    return [] if chunks is None else [Schedule.chunked(n, count) for count in sorted({1, chunks})]
