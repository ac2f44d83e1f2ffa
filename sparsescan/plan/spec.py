"""PlanSpec: what a plan is made of, as it was chosen or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..planning.search import Alternative
from ..symbolic.pattern import Pattern
from ..symbolic.schedule import Schedule

__all__ = ["PlanSpec"]


@dataclass(frozen=True)
class PlanSpec:
    """Patterns, the schedule for them, and what the caller asked for.

    Attributes
    ----------
    patterns : sequence of Pattern
        The pattern of every Jacobian, from the last layer to the first.
    schedule : Schedule
        For as many Jacobians.
    reason : str
        Why that schedule.
    batch, dtype, device, memory_limit : optional
        As for :func:`sparsescan.plan`.
    dense : frozenset of tuple
        The products ``(start, stop)`` that are stored densely although their patterns are sparse.
    alternatives : tuple of Alternative
        The schedules that the planner looked at.
    """

    patterns: Sequence[Pattern]
    schedule: Schedule
    reason: str = ""
    batch: int | None = None
    dtype: np.dtype[Any] | None = None
    device: str | None = None
    memory_limit: int | None = None
    dense: frozenset[tuple[int, int]] = frozenset()
    alternatives: tuple[Alternative, ...] = ()
