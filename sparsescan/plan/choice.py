"""Choice: a schedule for a kind of input, the form of each product, the reason, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import left_instead_of
from ..chains.reading import name_of
from ..errors import DeviceError, InputError, MemoryLimitError
from ..execution.threads import thread_count
from ..execution.workspace import workspace_bytes
from ..formatting import exact_bytes, quantity
from ..symbolic.implicit import ImplicitPattern, Step, contains, shared_of, solved_of
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .costs.cpu import CpuModel, load_cpu
from .costs.operations import Model


class InputKind(NamedTuple):
    """A kind of input: what the time of a scan depends on, apart from patterns and schedule.

    Attributes
    ----------
    batch : int
        Number of samples, at least 1.
    dtype : dtype
        float32 or float64.
    on_device : bool
        Whether it runs on a CUDA device.
    differs : bytes or None
        Which Jacobians differ between samples, as an array of bool; None if all do.
    """

    batch: int
    dtype: np.dtype[Any]
    on_device: bool = False
    differs: bytes | None = None

    @classmethod
    def of(
        cls, patterns: Sequence[Step], batch: int, dtype: np.dtype[Any], on_device: bool
    ) -> InputKind:
        """Return the kind that a plan can expect before a run: which factors samples will share."""
        shared = np.zeros(0, bool)
        if batch > 1 and contains(patterns, ImplicitPattern):
            shared = np.array([flag for step in patterns for flag in shared_of(step)])
        return cls(batch, dtype, on_device, (~shared).tobytes() if shared.any() else None)

    def model(self) -> Model:
        """Return the cost model for such input on this machine."""
        differs = None if self.differs is None else np.frombuffer(self.differs, np.bool_)
        if self.on_device:
            from .costs.cuda import GpuModel, load_gpu

            return GpuModel(load_gpu(), self.dtype, self.batch, differs)
        return CpuModel(load_cpu(), self.dtype, self.batch, thread_count(), differs)

    def needed_bytes(self, program: Program, *, whole: bool = True) -> int:
        """Return a bound on the bytes of a program and a run, without Jacobians and gradients.

        On a device implicit steps run `whole` or factor by factor.
        """
        if self.on_device:
            from ..execution.cuda.workspace import device_bytes

            return device_bytes(program, self.dtype, self.batch, whole=whole)
        return workspace_bytes(program, self.dtype, self.batch, thread_count())


ONE_SAMPLE = InputKind(1, np.dtype(np.float64))


class PlanOptions(NamedTuple):
    """Options of a plan, as :func:`sparsescan.plan` takes them.

    `auto` says whether another schedule may run input of another kind.
    """

    batch: int | None = None
    dtype: np.dtype[Any] | None = None
    device: str | None = None
    memory_limit: int | None = None
    reverse: bool = False
    auto: bool = False


class Alternative(NamedTuple):
    """A schedule that the planner looked at.

    Attributes
    ----------
    schedule : str
        How it prints.
    steps : int
        Length of the longest sequence of dependent operations.
    products : int
        Matrix-matrix products.
    nanoseconds : float or None
        The predicted time of a scan; None if its products were given up.
    """

    schedule: str
    steps: int
    products: int
    nanoseconds: float | None


@dataclass(frozen=True, eq=False)
class PlanChoice:
    """A schedule, the form of each product, and why they were chosen.

    Attributes
    ----------
    schedule : Schedule
        For as many Jacobians as the chain has.
    dense : frozenset of tuple
        The products ``(start, stop)`` that are stored densely although their patterns are sparse.
        An implicit step counts as one element per factor.
    reason : str
        Why this schedule.
    alternatives : tuple of Alternative
        The schedules that the planner looked at.
    nanoseconds : float
        The predicted time of a scan, where the planner has looked at it.
    kind : InputKind
        The input that the choice is for; by default one sample of float64.
    program : Program or None
        The program that runs, if it has been made.
    """

    schedule: Schedule
    dense: frozenset[tuple[int, int]] = frozenset()
    reason: str = ""
    alternatives: tuple[Alternative, ...] = ()
    nanoseconds: float = 0.0
    kind: InputKind = ONE_SAMPLE
    program: Program | None = None

    @property
    def workspace_bytes(self) -> int:
        """A bound on the bytes of the program and a run, without Jacobians and gradients."""
        return 0 if self.program is None else self.kind.needed_bytes(self.program)


# -- Limits ----------------------------------------------------------------------------------------


def lack_of(
    program: Program, kind: InputKind, memory_limit: int | None, *, whole: bool = True
) -> tuple[str, int, int] | None:
    """Return the exceeded limit, as errors say it, and the bytes needed; None if all is well.

    The last number is the bytes of gradients among them. The caller's limit does not count
    gradients; the free memory of this machine has to hold them too. A linear scan without a limit
    takes little more than gradients and the values that it writes.
    """
    if memory_limit is None and kind.on_device:
        return None
    if memory_limit is not None or program.products:
        needed = kind.needed_bytes(program, whole=whole)
    else:
        needed = kind.dtype.itemsize * program.gathered
    if memory_limit is not None and needed > memory_limit:
        return said_limit(memory_limit), needed, 0
    if kind.on_device:
        return None
    gradients = kind.dtype.itemsize * kind.batch * int(program.offsets[-2])
    left = left_instead_of(needed + gradients)
    if left is None:
        return None
    return f"this machine has {exact_bytes(left)} left", needed + gradients, gradients


def admit(
    program: Program, kind: InputKind, memory_limit: int | None, *, whole: bool = True
) -> None:
    """Raise if a program and a run need more than the limit, or more memory than there is."""
    lack = lack_of(program, kind, memory_limit, whole=whole)
    if lack is not None:
        there, needed, gradients = lack
        needs = f"{program.schedule} needs {exact_bytes(needed)}"
        if gradients:
            samples = quantity(kind.batch, "sample")
            needs += f" with {exact_bytes(gradients)} of gradients of {samples}"
        least = said_least(program.steps, kind, gradients)
        raise MemoryLimitError(f"{there}; {needs}, and {least}")


def said_limit(memory_limit: int | None) -> str:
    """Return what an error says of a limit."""
    return f"memory_limit is {exact_bytes(memory_limit or 0)}"


def said_least(patterns: Sequence[Step], kind: InputKind, gradients: int = 0) -> str:
    """Return what the cheapest schedule needs, with so many bytes of gradients."""
    linear = Schedule.linear(len(patterns))
    needed = kind.needed_bytes(Program(patterns, linear)) + gradients
    return f"the least, {linear}, {exact_bytes(needed)}"


def check_solves(
    patterns: Sequence[Step], schedule: Schedule | None, on_device: bool, reverse: bool
) -> None:
    """Raise if a chain has a SolveStep, and the schedule multiplies steps or runs on a device.

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
