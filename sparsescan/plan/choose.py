"""The schedule of a plan: asked for, or chosen for what runs, within the limit of memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..arrays.arrays import left_instead_of
from ..chains.reading import name_of
from ..errors import DeviceError, InputError, MemoryLimitError, short
from ..formatting import exact_bytes, quantity
from ..symbolic.implicit import Step, solved_of
from ..symbolic.pattern import TooLargeError
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .choice import InputKind, PlanChoice
from .search import Search

# Entries that int64 can count, with room for sums of products.
_COUNTED = 1 << 55
_ASKED = "asked for"


def choose_schedule(
    patterns: Sequence[Step],
    schedule: Schedule | None,
    kind: InputKind,
    memory_limit: int | None = None,
) -> PlanChoice:
    """Return the schedule that runs input of a kind, and why; None is ``"auto"``."""
    _check_counts(patterns, kind.batch)

    def fits(program: Program) -> bool:
        return Lack.of(program, kind, memory_limit) is None

    nbytes = math.inf if memory_limit is None else memory_limit
    search = Search(patterns, kind.model(), fits, nbytes)
    if schedule is None:
        more = _for_device(patterns, kind) if kind.on_device else ()
        return replace(search.choose(more), kind=kind)
    if not patterns:
        return PlanChoice(schedule, reason=_ASKED, kind=kind)
    try:
        dense, program = search.in_best_forms(schedule)
    except OverflowError:
        raise MemoryLimitError(
            f"products of {schedule} have more multiply-adds than int64 can count; expected "
            "another schedule"
        ) from None
    except TooLargeError:
        least = _least(patterns, kind)
        message = f"{_limit(memory_limit)}; {schedule} needs more, and {least}"
        raise MemoryLimitError(message) from None
    return PlanChoice(schedule, dense, _ASKED, kind=kind, program=program)


class Lack(NamedTuple):
    """A lack of memory for a program and a run of it.

    Attributes
    ----------
    program : Program
        The program.
    kind : InputKind
        The input.
    limit : str
        What there is, as an error says it.
    needed : int
        Bytes that are needed.
    gradients : int
        Those among them that gradients take, if they count.
    """

    program: Program
    kind: InputKind
    limit: str
    needed: int
    gradients: int = 0

    @classmethod
    def of(
        cls, program: Program, kind: InputKind, memory_limit: int | None, *, whole: bool = True
    ) -> Lack | None:
        """Return what lacks within the limit, if there is one, or of what this machine has left.

        The limit does not count gradients. A linear scan without a limit takes little but them and
        the values that it writes.
        """
        if memory_limit is None and kind.on_device:
            return None
        if memory_limit is not None or program.products:
            needed = kind.needed_bytes(program, whole=whole)
        else:
            needed = kind.dtype.itemsize * program.gathered
        if memory_limit is not None and needed > memory_limit:
            return cls(program, kind, _limit(memory_limit), needed)
        if kind.on_device:
            return None
        gradients = kind.gradient_bytes(program)
        left = left_instead_of(needed + gradients)
        if left is None:
            return None
        here = f"this machine has {exact_bytes(left)} left"
        return cls(program, kind, here, needed + gradients, gradients)

    def error(self) -> MemoryLimitError:
        """Return the error that says what is there, what is needed, and what the least does."""
        more = ""
        if self.gradients:
            samples = quantity(self.kind.batch, "sample")
            more = f" with {exact_bytes(self.gradients)} of gradients of {samples}"
        needs = f"{self.program.schedule} needs {exact_bytes(self.needed)}{more}"
        least = _least(self.program.steps, self.kind, self.gradients)
        return MemoryLimitError(f"{self.limit}; {needs}, and {least}")


def _limit(memory_limit: int | None) -> str:
    return f"memory_limit is {exact_bytes(memory_limit or 0)}"


def _least(patterns: Sequence[Step], kind: InputKind, gradients: int = 0) -> str:
    """Return what the least of all schedules needs, with so many bytes of gradients."""
    linear = Schedule.linear(len(patterns))
    needed = kind.needed_bytes(Program(patterns, linear)) + gradients
    return f"the least, {linear}, {exact_bytes(needed)}"


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


def _for_device(patterns: Sequence[Step], kind: InputKind) -> list[Schedule]:
    """Return chunks for small steps of one pattern, which have kernels of their own."""
    from ..execution.cuda.chunks import chunks_of

    n = len(patterns)
    chunks = chunks_of(patterns, kind.batch, kind.dtype) if patterns else None
    return [] if chunks is None else [Schedule.chunked(n, count) for count in sorted({1, chunks})]
