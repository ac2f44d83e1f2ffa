"""Plans of single scans: the latest are kept for others like them, and what was chosen for more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..chains.containers import BatchedCSR, CSRChain
from ..errors import SparseScanError
from ..execution.threads import thread_count
from ..symbolic.implicit import Step
from ..symbolic.schedule import Schedule
from .choice import InputKind, PlanChoice
from .choose import choose_schedule
from .scan_plan import ScanPlan, ScanSlot

# Choices of "auto" by the keys of their patterns, and plans by the form of what they scanned.
_choices: dict[Any, PlanChoice] = {}
_plans: dict[Any, ScanPlan] = {}
_KEPT_CHOICES, _KEPT_PLANS = 64, 16
# Bytes that a kept plan may take. To plan a scan that takes more is little beside the scan.
_BYTES = 1 << 20
_SPARSE = {sp.csr_array, sp.csr_matrix, BatchedCSR}


def form_of(
    grad: Any, jacobians: Any, reverse: bool, schedule: Schedule | str, device: str | None
) -> Hashable:
    """Return what is seen of arguments before they are read; None where no plan is kept."""
    is_named = isinstance(schedule, (str, Schedule))
    seen = _look_at(jacobians) if type(grad) is np.ndarray and is_named else None
    if seen is None or device == "cuda":
        return None
    return seen, grad.shape, grad.dtype, reverse, schedule, device, thread_count()


def _look_at(jacobians: Any) -> Hashable:
    """Return what is seen of Jacobians; None if they are in no form of host memory known here.

    Dense ones show all their shapes: for a plan, an array may also be a batch of values.
    """
    if type(jacobians) is np.ndarray:
        return jacobians.shape, jacobians.dtype
    if type(jacobians) is CSRChain:
        data = jacobians.data
        return (jacobians.pattern, data.shape, data.dtype) if type(data) is np.ndarray else None
    steps = tuple(jacobians) if type(jacobians) in (list, tuple) else ()
    types = set(map(type, steps))
    if types == {np.ndarray}:
        return tuple(step.shape for step in steps), steps[0].dtype
    if not steps or not types <= _SPARSE:
        return None
    first, last = steps[0].data, steps[-1].data
    if not type(first) is type(last) is np.ndarray:
        return None
    return len(steps), steps[0].shape, first.shape, last.shape, first.dtype


def lend(
    form: Hashable, grad: Any, jacobians: Any, local_grads: Any
) -> tuple[ScanPlan, ScanSlot, Any] | None:
    """Return the plan that is kept for a form, with what :meth:`.ScanPlan.lend` returns.

    None if there is none, or if these Jacobians are not of its patterns: reading tells.
    """
    plan = _plans.get(form)
    if plan is None:
        return None
    try:
        return plan, *plan.lend(grad, jacobians, local_grads)
    except SparseScanError:
        return None


def keep(form: Hashable, plan: ScanPlan) -> None:
    """Keep a plan that has scanned arguments of this form, if it is small."""
    if form is None or _plans.get(form) is plan:
        return
    held = sum(12 * (each.nnz + each.shape[0]) for each in set(plan.patterns))
    if held <= _BYTES and held + plan.workspace_bytes <= _BYTES:
        while len(_plans) >= _KEPT_PLANS:
            _plans.pop(next(iter(_plans)), None)
        _plans[form] = plan


def choose(schedule: Schedule | None, patterns: Sequence[Step], kind: InputKind) -> PlanChoice:
    """Choose for one scan, and remember what "auto" said of such a chain."""
    if schedule is not None:
        return choose_schedule(patterns, schedule, kind)
    numbers: dict[Step, int] = {}
    steps = [numbers.setdefault(pattern, len(numbers)) for pattern in patterns]
    chain = tuple(pattern.key for pattern in numbers), np.array(steps).tobytes()
    key = chain, kind, kind.model().workers
    choice = _choices.get(key)
    if choice is None:
        while len(_choices) >= _KEPT_CHOICES:
            _choices.pop(next(iter(_choices)), None)
        choice = choose_schedule(patterns, None, kind)
        # The program would keep the patterns.
        _choices[key] = replace(choice, program=None)
    return choice
