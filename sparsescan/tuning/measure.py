"""Times of scans by some plans, measured with made-up values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import load_cupy
from ..plan.scan_plan import ScanPlan
from ..plan.spec import PlanSpec
from ..symbolic.pattern import Pattern

if TYPE_CHECKING:
    from ..planning.search import Candidate

__all__ = ["made_up", "measure"]

# Seconds for all rounds together, and how many there are at least.
_SECONDS, _ROUNDS = 1.0, 5


def measure(
    patterns: Sequence[Pattern],
    dtype: np.dtype[Any],
    batch: int,
    device: str | None,
    candidates: Sequence[Candidate],
) -> list[float]:
    """Return nanoseconds of an exclusive scan by each candidate: the median of many.

    They take turns, so that what disturbs one disturbs all.
    """
    values = made_up(patterns, dtype, batch)
    grad = np.ones((batch, patterns[0].shape[1]), dtype)
    xp: Any = np
    if device == "cuda":
        xp = load_cupy()
        values, grad = [xp.asarray(array) for array in values], xp.asarray(grad)
    plans = [
        ScanPlan(PlanSpec(patterns, made.schedule, device=device, dense=made.dense))
        for made in candidates
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


def made_up(
    patterns: Sequence[Pattern], dtype: np.dtype[Any], batch: int
) -> list[NDArray[np.floating[Any]]]:
    """Return values for each pattern and sample, whose rows sum to about one: nothing grows."""
    rng = np.random.default_rng(0)
    values = []
    for pattern in patterns:
        per_row = max(pattern.nnz / max(pattern.shape[0], 1), 1)
        drawn = rng.random((batch, pattern.nnz), np.float32)
        values.append(((drawn + 0.5) / per_row).astype(dtype))
    return values
