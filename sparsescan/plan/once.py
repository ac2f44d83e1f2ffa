"""Plans of single scans: the latest plans, and the choices of more, are kept for like calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from ..chains.chain import Chain
from ..chains.containers import BatchedCSR, CSRChain, PeriodicChain
from ..chains.grads import placed
from ..chains.implicit import ImplicitChain, ImplicitStep
from ..chains.solve import SolveStep
from ..errors import SparseScanError
from ..execution.threads import thread_count
from ..symbolic.implicit import Step, factors_of
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .choice import InputKind, PlanChoice
from .scan_plan import ScanPlan, ScanSlot
from .search import choose_schedule


class _Kept(NamedTuple):
    """A plan, the workspaces that wait in it for the next run, and the bytes of all of these."""

    plan: ScanPlan
    waiting: list[tuple[Program, InputKind]]
    nbytes: int


# Choices of "auto" by the keys of their patterns, and plans by the form of what they scanned.
_choices: dict[Any, PlanChoice] = {}
_plans: dict[Any, _Kept] = {}
_KEPT = 64
# Bytes that all kept plans may take.
_BYTES = 16 << 20
_KNOWN = {np.ndarray, sp.csr_array, sp.csr_matrix, BatchedCSR, ImplicitStep, SolveStep}


def form_of(
    grad: Any,
    jacobians: Any,
    local_grads: Any,
    reverse: bool,
    schedule: Schedule | str,
    device: str | None,
) -> Hashable:
    """Return what can be seen of arguments without reading them; None where no plan is kept."""
    _, array = placed(grad, local_grads)
    is_named = isinstance(schedule, (str, Schedule))
    seen = _look_at(jacobians) if type(array) is np.ndarray and is_named else None
    if seen is None or device == "cuda":
        return None
    return seen, grad is None, array.shape, array.dtype, reverse, schedule, device, thread_count()


def _look_at(jacobians: Any) -> Hashable:
    """Return what can be seen of Jacobians without reading them; None for other forms.

    Dense Jacobians show all their shapes: to a plan, an array may also be a batch of values.
    """
    if type(jacobians) is np.ndarray:
        return jacobians.shape, jacobians.dtype
    if type(jacobians) is CSRChain:
        return jacobians.pattern, jacobians.data.shape, jacobians.data.dtype
    if type(jacobians) is ImplicitChain:
        return len(jacobians), jacobians.pattern, jacobians.batch
    if type(jacobians) is PeriodicChain:
        return len(jacobians), tuple(jacobians.patterns), jacobians.batch
    steps = tuple(jacobians) if type(jacobians) in (list, tuple) else ()
    types = tuple(map(type, steps))
    if not steps or not _KNOWN.issuperset(types):
        return None
    dense = tuple(step.shape for step in steps if type(step) is np.ndarray)
    return types, dense, _look_at_step(steps[0]), _look_at_step(steps[-1])


def _look_at_step(step: Any) -> Hashable:
    if isinstance(step, ImplicitStep):
        return step.pattern, step.batch
    data = step if type(step) is np.ndarray else step.data
    return (step.shape, data.shape, data.dtype) if type(data) is np.ndarray else None


def lend(
    form: Hashable, grad: Any, jacobians: Any, local_grads: Any
) -> tuple[ScanPlan, ScanSlot, Any] | None:
    """Return the plan that is kept for a form, with what :meth:`.ScanPlan.lend` returns.

    Return None if there is none, if these Jacobians have other patterns, or if their kind is not
    the one that a named schedule chose its forms for. Only reading the Jacobians tells this.
    """
    known = _plans.get(form)
    if known is None:
        return None
    plan = known.plan
    try:
        slot, first = plan.lend(grad, jacobians, local_grads)
    except SparseScanError:
        return None
    if plan.auto or plan.kind == kind_of(slot.chain, first):
        return plan, slot, first
    plan.take_back(slot)
    return None


def kind_of(chain: Chain, first: Any, on_device: bool = False) -> InputKind:
    """Return the kind of input that a scan is planned for, without local gradients."""
    batch = len(first) if first.ndim == 2 else 1
    dtype = np.result_type(chain.dtype, first.dtype)
    return InputKind(max(batch, 1), dtype, on_device, chain.differs() if batch > 1 else None)


def keep(form: Hashable, plan: ScanPlan) -> None:
    """Keep a plan that has scanned arguments of this form, in place of the oldest."""
    if form is None:
        return
    known = _plans.get(form)
    if known is not None and known.plan is plan:
        waiting = plan.waiting()
        if waiting == known.waiting or Counter(waiting) <= Counter(known.waiting):
            return
    patterns = sum(map(pattern_bytes, set(plan.patterns)))
    waiting, nbytes = plan.hold(_BYTES - patterns)
    nbytes += patterns
    _plans.pop(form, None)
    if nbytes > _BYTES:
        return
    while len(_plans) >= _KEPT or nbytes + sum(each.nbytes for each in [*_plans.values()]) > _BYTES:
        _plans.pop(next(iter([*_plans]), None), None)
    _plans[form] = _Kept(plan, waiting, nbytes)


def pattern_bytes(step: Step) -> int:
    """Return a bound on the bytes of the index arrays of a step."""
    return sum(8 * (factor.nnz + factor.shape[0] + 1) for factor in factors_of(step))


def choose(schedule: Schedule | None, patterns: Sequence[Step], kind: InputKind) -> PlanChoice:
    """Choose for one scan, and remember what "auto" chose for such a chain."""
    if schedule is not None:
        return choose_schedule(patterns, schedule, kind)
    numbers: dict[Step, int] = {}
    steps = [numbers.setdefault(pattern, len(numbers)) for pattern in patterns]
    chain = tuple(pattern.key for pattern in numbers), np.array(steps).tobytes()
    key = chain, kind, kind.model().workers
    choice = _choices.get(key)
    if choice is None:
        while len(_choices) >= _KEPT:
            _choices.pop(next(iter(_choices)), None)
        choice = choose_schedule(patterns, None, kind)
        # The program would keep the patterns.
        _choices[key] = replace(choice, program=None)
    return choice
