"""PlanSpec: what a plan is made of, as it was chosen or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..planning.costs.cpu import Model
from ..planning.search import Alternative, Choice, model_for
from ..symbolic.implicit import ImplicitPattern, Step, contains, shared_of
from ..symbolic.schedule import Schedule

__all__ = ["Kind", "PlanSpec"]


class Kind(NamedTuple):
    """A kind of input: what the time of a scan depends on beside patterns and schedule.

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
    ) -> Kind:
        """Return what is known of input before it comes: which factors samples will share."""
        shared = np.zeros(0, bool)
        if batch > 1 and contains(patterns, ImplicitPattern):
            shared = np.array([flag for step in patterns for flag in shared_of(step)])
        return cls(batch, dtype, on_device, (~shared).tobytes() if shared.any() else None)

    @property
    def device(self) -> str | None:
        """The device as calls name it."""
        return "cuda" if self.on_device else None

    def model(self) -> Model:
        """Return what predicts times of such input on this machine."""
        differs = None if self.differs is None else np.frombuffer(self.differs, np.bool_)
        return model_for(self.device, self.dtype, self.batch, differs)


@dataclass(frozen=True)
class PlanSpec:
    """Patterns, the schedule for them, and what the caller asked for.

    Attributes
    ----------
    patterns : sequence of Pattern or ImplicitPattern
        The pattern of every Jacobian, from the last layer to the first.
    schedule : Schedule
        For as many Jacobians.
    reason : str
        Why that schedule.
    batch, dtype, device, memory_limit, reverse : optional
        As for :func:`sparsescan.plan`.
    dense : frozenset of tuple
        The products ``(start, stop)`` that are stored densely although their patterns are sparse.
        A step that is implicit counts as many elements as it has factors.
    alternatives : tuple of Alternative
        The schedules that the planner looked at.
    auto : bool
        Whether another schedule may run input of another kind.
    ran : Kind or None
        The input that the schedule ran last; None if it has run none.
    """

    patterns: Sequence[Step]
    schedule: Schedule
    reason: str = ""
    batch: int | None = None
    dtype: np.dtype[Any] | None = None
    device: str | None = None
    memory_limit: int | None = None
    reverse: bool = False
    dense: frozenset[tuple[int, int]] = frozenset()
    alternatives: tuple[Alternative, ...] = ()
    auto: bool = False
    ran: Kind | None = None

    def chooses_for(self, kind: Kind) -> bool:
        """Return whether another schedule may run this input, by predicted times.

        One that was measured stays for the batch and the dtype that it was measured with.
        """
        measured = any(each.measured for each in self.alternatives)
        return self.auto and not (measured and kind[:3] == self.kind[:3])

    def with_choice(self, choice: Choice) -> PlanSpec:
        """Return these patterns and options with what the planner chose for them."""
        return replace(
            self,
            schedule=choice.schedule,
            reason=choice.reason,
            dense=choice.dense,
            alternatives=choice.alternatives,
        )

    @cached_property
    def kind(self) -> Kind:
        """The input that the schedule is for: until one has run, what the caller asked for."""
        dtype = np.dtype(self.dtype or np.float64)
        return self.ran or Kind.of(self.patterns, self.batch or 1, dtype, self.device == "cuda")
