"""The calls: check, plan, run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .chain import Chain, check_chain, length, pattern_of
from .containers import CSRChain
from .errors import DeviceError, InputError, InputTypeError
from .pattern import Pattern
from .plan import Gradients, ScanPlan
from .schedule import Schedule

__all__ = ["exclusive_scan", "inclusive_scan", "plan"]


def exclusive_scan(
    grad: ArrayLike,
    jacobians: Any,
    *,
    local_grads: Any = None,
    schedule: Schedule | str = "auto",
    device: str | None = None,
) -> Gradients:
    return _one_shot(jacobians, schedule, device).exclusive_scan(
        grad, jacobians, local_grads=local_grads
    )


def inclusive_scan(
    grad: ArrayLike,
    jacobians: Any,
    *,
    local_grads: Any = None,
    schedule: Schedule | str = "auto",
    device: str | None = None,
) -> Gradients:
    return _one_shot(jacobians, schedule, device).inclusive_scan(
        grad, jacobians, local_grads=local_grads
    )


def plan(
    jacobians: Any,
    *,
    schedule: Schedule | str = "auto",
    batch: int | None = None,
    dtype: DTypeLike | None = None,
    device: str | None = None,
    memory_limit: int | None = None,
) -> ScanPlan:
    _check_device(device)
    patterns = _patterns(jacobians)
    chosen, reason = _choose(schedule, len(patterns))
    return ScanPlan(patterns, chosen, reason=reason, batch=batch, dtype=None if dtype is None else np.dtype(dtype), memory_limit=memory_limit)


def _one_shot(jacobians, schedule, device):
    return plan(jacobians, schedule=schedule, device=device)


def _patterns(jacobians: Any):
    n = length(jacobians)
    if not isinstance(jacobians, (CSRChain, np.ndarray)) and any(isinstance(j, Pattern) for j in jacobians):
        return check_chain([pattern_of(k, j) for k, j in enumerate(jacobians)])
    return Chain(n).read(jacobians)


def _choose(schedule, n):
    if isinstance(schedule, Schedule):
        if schedule.n != n:
            raise InputError(f"schedule is {schedule}; expected one for {n} Jacobians")
        return schedule, "asked for"
    if schedule == "blelloch":
        return Schedule.blelloch(n), "asked for"
    if schedule == "linear":
        return Schedule.linear(n), "asked for"
    if schedule == "auto":
        return Schedule.linear(n), "auto"
    raise InputError(f"schedule is {schedule!r}")


def _check_device(device):
    if device not in (None, "cpu"):
        raise DeviceError(f"device is {device!r}")
