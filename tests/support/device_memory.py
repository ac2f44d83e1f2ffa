"""Random plans for a CUDA device, and what they take of its memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import STRUCTURES, every_schedule, mask

from sparsescan.execution.cuda.patterns import kept_patterns
from sparsescan.execution.cuda.workspace import device_bytes
from sparsescan.kernels.cuda import device
from sparsescan.plan.choice import PlanChoice, PlanOptions
from sparsescan.plan.scan_plan import ScanPlan
from sparsescan.symbolic.pattern import of_mask

F4 = np.dtype(np.float32)
seeds = st.integers(0, 2**32 - 1)


def random_plan(seed: int, most: int, largest: int) -> ScanPlan:
    """For at most so many steps of at most this size, all alike or each of its own kind."""
    rng = np.random.default_rng(seed)
    n, alike, square = int(rng.integers(2, most + 1)), rng.random() < 0.4, rng.random() < 0.7
    sizes = rng.integers(1, largest + 1, n + 1)
    if alike or square:
        sizes[:] = sizes[0]
    kinds = rng.choice(["full", *STRUCTURES], n)
    patterns = [of_mask(mask(rng, kinds[k], sizes[k + 1], sizes[k])) for k in range(n)]
    if alike:
        patterns = patterns[:1] * n
    schedule = rng.choice(np.array(every_schedule(n, (2, 3, 5)), object))
    return ScanPlan(patterns, PlanChoice(schedule), PlanOptions(device="cuda"))


def values(cupy: Any, plan: ScanPlan, batch: int) -> list[Any]:
    return [cupy.ones((batch, pattern.nnz), np.float32) for pattern in plan.patterns]


def gradients(cupy: Any, plan: ScanPlan, batch: int, count: int) -> list[Any]:
    sizes = [plan.patterns[0].shape[1], *(pattern.shape[0] for pattern in plan.patterns)]
    return [cupy.ones((batch, size), np.float32) for size in sizes[:count]]


def check_memory(cupy: Any, plan: ScanPlan, batch: int) -> None:
    """And not much less, as all Jacobians differ and there are local gradients."""
    from fake_cupy import UNIT, state

    n = plan.n
    kept_patterns.clear()
    gc.collect()  # workspaces of plans that were
    steps, local = values(cupy, plan, batch), gradients(cupy, plan, batch, n + 1)
    before = state.peak[0] = state.used[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "launch", lambda *arguments: None)
        for run, count in ((plan.exclusive_scan, n), (plan.inclusive_scan, n + 1)):
            run(local[0], steps, local_grads=local[:count]).clear()
    returned = -(-sum(array.nbytes for array in local) // UNIT) * UNIT
    taken = state.peak[0] - before - returned
    said = device_bytes(plan._latest.program, F4, batch)
    assert taken <= said <= 1.25 * taken + 4096
