"""Times of scans by some plans, measured with made-up values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np

from ..arrays.arrays import load_cupy
from ..chains.implicit import ImplicitStep
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.pattern import Pattern
from .choice import InputKind, PlanChoice, PlanOptions
from .scan_plan import ScanPlan

# Seconds for all rounds together, and how many there are at least.
_SECONDS, _ROUNDS = 1.0, 5
_Result = TypeVar("_Result")


def measure(
    patterns: Sequence[Step], kind: InputKind, choices: Sequence[PlanChoice]
) -> list[float]:
    """Return nanoseconds of an exclusive scan of such input by each choice: the median of many.

    They take turns, so that what disturbs one disturbs all.
    """
    xp: Any = load_cupy() if kind.on_device else np
    values = made_up(patterns, kind.dtype, kind.batch, xp)
    grad = xp.ones((kind.batch, patterns[0].shape[1]), kind.dtype)
    options = PlanOptions(device="cuda" if kind.on_device else None)
    plans = [ScanPlan(patterns, replace(choice, kind=kind), options) for choice in choices]

    def scan(plan: ScanPlan) -> None:
        plan.exclusive_scan(grad, values)
        if kind.on_device:
            xp.cuda.get_current_stream().synchronize()

    def turn() -> list[float]:
        # The first of two scans fills the caches.
        return [nanoseconds(partial(scan, plan)) for plan in plans for _ in range(2)][1::2]

    turn()  # compiles, and makes workspaces
    return list(map(median, zip(*repeated(turn, _SECONDS, _ROUNDS), strict=True)))


def nanoseconds(call: Callable[[], object]) -> float:
    """Return the time that a call takes."""
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def repeated(call: Callable[[], _Result], seconds: float, times: int) -> list[_Result]:
    """Return what a call returns that is made for so long, and so often at least."""
    results: list[_Result] = []
    deadline = time.perf_counter() + seconds
    while len(results) < times or time.perf_counter() < deadline:
        results.append(call())
    return results


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
