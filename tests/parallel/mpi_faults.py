"""An error on one rank is raised on all of them, and the next scan works."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from ranks import GRAD, RANK, SIZE, STEPS, WORLD, Broken, D, fails, on, scan

import sparsescan
from sparsescan import InputError, InputTypeError, Pattern, PatternMismatchError, parallel
from sparsescan.errors import RankError
from sparsescan.parallel.maps import Merger
from sparsescan.parallel.part import Reduction

pytestmark = pytest.mark.ranks(4)

LAST, MIDDLE = SIZE - 1, SIZE // 2
SCHEDULES = ("vectors", "products")


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Compile what scans run, for which ten seconds may not suffice."""
    for schedule in SCHEDULES:
        scan(schedule, local_grads=[None] * len(STEPS))


def test_input() -> None:
    csc, batch = [sp.eye_array(D).tocsc()], np.ones((5, 3, D, D))
    for schedule in SCHEDULES:
        for given, error, text in (
            ({"grad": on(0, np.ones(D + 1), GRAD)}, InputError, "rank 0: grad has shape (5,); exp"),
            ({"grad": None}, InputError, "rank 0: grad is None"),
            ({"grad": on(LAST, np.ones(D), GRAD)}, InputError, f"rank {LAST}: grad is given"),
            (
                {"steps": on(MIDDLE, csc, STEPS)},
                InputTypeError,
                f"rank {MIDDLE}: jacobians[0] is a",
            ),
            ({"steps": on(LAST, batch, STEPS)}, InputError, "from no batch axis to a batch of 3"),
        ):
            fails(lambda s=schedule, g=given: scan(s, **g), error, text)
        for where, local, error, text in (
            (MIDDLE, [None] * 4, InputError, " has 4 entries; expected 5"),
            (MIDDLE, [np.ones(D + 1)] * 5, InputError, "[0] has shape (5,)"),
            (MIDDLE, 5, InputTypeError, " is a int"),
            (LAST, np.ones((5, D), complex), InputTypeError, "[0] has dtype complex128"),
        ):
            own = on(where, local, None)
            said = f"rank {where}: local_grads{text}"
            fails(lambda s=schedule, g=own: scan(s, local_grads=g), error, said)
        # The lowest rank that has failed is the one that is heard of.
        fails(lambda s=schedule: scan(s, local_grads=[None]), InputError, "rank 0: local_grads")


def test_plans_without_steps() -> None:
    """One of them, whose ranks do not know the length of the gradient, beside another plan."""
    empty, plan = parallel.plan(WORLD, []), parallel.plan(WORLD, STEPS)
    mine, steps = (empty, []) if RANK == 0 else (plan, STEPS)
    fails(lambda: mine.exclusive_scan(GRAD, steps), InputError, "scans of different plans")
    assert len(plan.exclusive_scan(GRAD, STEPS)) == len(STEPS)


def test_planning() -> None:
    odd = [np.ones((D, D)), np.ones((D + 1, D))]
    fails(
        lambda: scan(steps=on(0, odd, STEPS)),
        InputError, "jacobians[0] of rank 1 has 4 columns, but the last of rank 0 has 5 rows",
    )  # fmt: skip
    fails(lambda: scan(grid=(SIZE + 1, 1)), InputError, f"expected {SIZE} ranks")
    fails(lambda: scan(grid=(1, SIZE) if RANK else (SIZE, 1)), InputError, "grid is")
    fails(lambda: scan(on(LAST, "fast", "auto")), InputError, f"rank {LAST}: schedule is 'fast'")
    fails(
        lambda: parallel.plan(WORLD, STEPS, batch=on(LAST, 3, 2)), InputError, "batch is 3 on rank"
    )
    fails(lambda: parallel.plan(WORLD, STEPS, dtype=on(1, "i4", None)), InputTypeError, "rank 1")
    other = on(LAST, Pattern.diagonal(D), Pattern.dense((D, D)))
    fails(
        lambda: parallel.plan(WORLD, [other], grid=(1, SIZE)),
        InputError, f"rank {LAST} has other patterns than rank 0",
    )  # fmt: skip
    for schedule in SCHEDULES:
        plan = parallel.plan(WORLD, STEPS, schedule=schedule)
        again = parallel.plan(WORLD, [Pattern.dense((D, D))] * 5, schedule=schedule, batch=2)
        fails(
            lambda p=plan: p.exclusive_scan(GRAD, on(LAST, [sp.eye_array(D).tocsr()] * 5, STEPS)),
            PatternMismatchError, f"rank {LAST}: jacobians[0] is",
        )  # fmt: skip
        fails(
            lambda p=plan: (p.inclusive_scan if RANK else p.exclusive_scan)(GRAD, STEPS),
            InputError, "ranks call different scans",
        )  # fmt: skip
        fails(
            lambda p=plan, q=again: on(LAST, q, p).exclusive_scan(GRAD, STEPS),
            InputError, "ranks call different scans, or scans of different plans",
        )  # fmt: skip
        fails(lambda q=again: q.exclusive_scan(GRAD, STEPS), InputError, "the plan's")


def test_exceptions() -> None:
    """In a sweep, while the data is on its way; in a product; in MPI's callback."""

    def with_broken(owner: Any, name: str, rank: int, error: BaseException, plan: Any) -> Any:
        def call() -> None:
            with Broken(owner, name, rank, error):
                plan.exclusive_scan(GRAD, STEPS)

        return call

    for schedule in SCHEDULES:
        plan = parallel.plan(WORLD, STEPS, schedule=schedule)
        for rank in {0, MIDDLE, LAST}:
            for error, kind, text in (
                (ZeroDivisionError("oh"), RankError, f"rank {rank}: ZeroDivisionError: oh"),
                (MemoryError("no more"), MemoryError, f"rank {rank}: no more"),
                (sparsescan.DeviceError("gone"), sparsescan.DeviceError, f"rank {rank}: gone"),
            ):
                fails(with_broken(type(plan), "_sweep", rank, error, plan), kind, text)
        rank = MIDDLE
        kind = KeyboardInterrupt if rank == RANK else RankError
        fails(with_broken(type(plan), "_sweep", rank, KeyboardInterrupt(), plan), kind)
    if SIZE > 2:
        plan = parallel.plan(WORLD, STEPS, schedule="products")
        for owner, name in ((Merger, "_merge"), (Reduction, "run")):
            fails(
                with_broken(owner, name, 1, ZeroDivisionError("oh"), plan),
                RankError, "rank 1: ZeroDivisionError: oh",
            )  # fmt: skip


def with_little_memory(call: Callable[[], Any]) -> None:
    """Run it, on the last rank with 20 MB more than is taken already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if RANK == LAST:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (20 << 20), hard))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_memory() -> None:
    """A rank that has too little, in the middle of a scan: its gradients are 960 MB."""
    size, n = 30_000, on(LAST, 4000, 1)
    values = [np.ones(size)] * n
    grad = np.ones(size) if RANK == 0 else None
    for schedule in SCHEDULES:
        plan = parallel.plan(WORLD, [Pattern.diagonal(size)] * n, schedule=schedule)
        fails(
            lambda p=plan: with_little_memory(lambda: p.exclusive_scan(grad, values)),
            MemoryError, f"rank {LAST}: Unable to allocate",
        )  # fmt: skip
