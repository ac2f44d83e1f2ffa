"""Times of scans by some plans, measured with made-up values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.arrays import load_cupy
from ..chains.implicit import ImplicitStep
from ..plan.scan_plan import ScanPlan
from ..plan.spec import PlanSpec
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.pattern import Pattern

if TYPE_CHECKING:
    from ..planning.search import Candidate

__all__ = ["made_up", "measure"]

# Seconds for all rounds together, and how many there are at least.
_SECONDS, _ROUNDS = 1.0, 5


def measure(
    patterns: Sequence[Step],
    dtype: np.dtype[Any],
    batch: int,
    device: str | None,
    candidates: Sequence[Candidate],
) -> list[float]:
    """Return nanoseconds of an exclusive scan by each candidate: the median of many.

    They take turns, so that what disturbs one disturbs all.
    """
    xp: Any = load_cupy() if device == "cuda" else np
    values = made_up(patterns, dtype, batch, xp)
    grad = xp.ones((batch, patterns[0].shape[1]), dtype)
    plans = [
        ScanPlan(PlanSpec(patterns, each.schedule, device=device, dense=each.dense))
        for each in candidates
    ]
    samples: list[list[float]] = [[] for _ in plans]
    deadline = 0.0
    while len(samples[0]) < _ROUNDS or time.perf_counter() < deadline:
        for plan, taken in zip(plans, samples, strict=True):
            # The first fills the caches, and in the first rounds compiles and makes workspaces.
            for count in range(2):
                start = time.perf_counter_ns()
                plan.exclusive_scan(grad, values)
                if xp is not np:
                    xp.cuda.get_current_stream().synchronize()
                if count and deadline:
                    taken.append(time.perf_counter_ns() - start)
        deadline = deadline or time.perf_counter() + _SECONDS
    return [median(taken) for taken in samples]


def made_up(steps: Sequence[Step], dtype: np.dtype[Any], batch: int, xp: Any = np) -> list[Any]:
    """Return values of each step and sample, whose rows sum to about one: nothing grows."""
    rng = np.random.default_rng(0)

    def draw(pattern: Pattern, *shape: int) -> Any:
        per_row = max(pattern.nnz / max(pattern.shape[0], 1), 1)
        drawn = rng.random(shape, np.float32)
        return xp.asarray(((drawn + 0.5) / per_row).astype(dtype))

    values: list[Any] = []
    for step in steps:
        if isinstance(step, ImplicitPattern):
            factors = zip(step.factors, step.shared, step.indexed, strict=True)
            drawn = [
                draw(factor, *[batch] * (not shared), factor.nnz if index is None else index.size)
                for factor, shared, index in factors
            ]
            values.append(ImplicitStep(drawn, step))
        else:
            values.append(draw(step, batch, step.nnz))
    return values
