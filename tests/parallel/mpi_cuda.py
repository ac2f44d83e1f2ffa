"""Scans of chains whose parts lie on a CUDA device of each rank agree with the sequential ones.

In Numba's simulator devices are the host's memory, which any MPI reads. So gradients go from device
to device on three ranks, and by way of the host on four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from on_device import SIMULATED, cupy_or_stand_in, jacobians_on, to_host
from oracles import assert_within, patterns_of, same_bits, values_only
from ranks import grids, random_part

from sparsescan import DeviceError, parallel
from sparsescan.parallel import planning
from sparsescan.parallel.communicator import Communicator, Traffic

pytestmark = [pytest.mark.ranks(slow=(3, 4)), pytest.mark.cudasim]

WORLD = MPI.COMM_WORLD
TRAFFIC = Communicator.of(WORLD).traffic


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    if SIMULATED:
        monkeypatch.setattr(planning, "reads_device_memory", lambda: WORLD.size == 3)
    return cupy_or_stand_in(monkeypatch)


def test_random_chains(cupy: Any, seeds: Callable[..., range]) -> None:
    for seed in seeds(2, 12, 12):
        check(cupy, WORLD.size + seed)


def check(cupy: Any, seed: int) -> None:
    """Scan one random chain in random parts, by both schedules, from a device and the host."""
    rng = np.random.default_rng(seed)
    grid = grids()[seed % len(grids())]
    batch = [None, int(rng.integers(grid.batch, grid.batch + 3))][grid.batch > 1 or seed % 2]
    mine, expected, cuts = random_part(rng, grid, batch)
    grad, name = mine.grad, "inclusive_scan" if mine.inclusive else "exclusive_scan"
    there = jacobians_on(cupy, mine.jacobians)
    grad_there = None if grad is None else cupy.asarray(grad)
    local_there = mine.local_grads
    if local_there is not None:
        local_there = [None if array is None else cupy.asarray(array) for array in local_there]
    for schedule in ("vectors", "products"):
        options = {"grid": grid, "schedule": schedule}
        patterns = patterns_of(mine.jacobians)
        plan = parallel.plan(WORLD, patterns, device="cuda", **options)
        assert plan.device == "cuda"
        sent = TRAFFIC.get("send", Traffic()).calls
        result = getattr(plan, name)(
            grad_there, jacobians_on(cupy, values_only(mine.jacobians)), local_grads=local_there
        )
        if plan.schedule == "products" and cuts[-1]:
            assert TRAFFIC.get("send", Traffic()).calls == sent, "fell back to vectors"
        if isinstance(result, list):
            assert all(isinstance(array, cupy.ndarray) for array in result) or not len(there)
        host = [array.get() if isinstance(array, cupy.ndarray) else array for array in result]
        try:
            assert_within(host, expected, mine.dtype)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {options}, cuts {cuts}") from error
        again = getattr(parallel, name)(
            WORLD,
            grad,
            mine.jacobians,
            local_grads=mine.local_grads,
            device="cuda",
            **options,
        )
        assert all(isinstance(array, np.ndarray) for array in again)
        assert same_bits(list(again), host), (seed, options)


def test_places(cupy: Any) -> None:
    """Input that is in two places, or not where the plan scans, is an error on all ranks."""
    steps = np.ones((3, 2, 2))
    first = WORLD.rank == 0
    for device, grad, jacobians, words in (
        ("cuda", np.ones(2), cupy.asarray(steps), "jacobians is on device 0, grad in host memory"),
        ("cpu", np.ones(2), cupy.asarray(steps), "on a CUDA device"),
        ("cpu", cupy.asarray(np.ones(2)), steps, "on a CUDA device"),
    ):
        plan = parallel.plan(WORLD, steps, device=device)
        with pytest.raises(DeviceError, match=words):
            plan.exclusive_scan(grad if first else None, jacobians)
    with pytest.raises(DeviceError, match="device is 'cpu', but jacobians is on a CUDA device"):
        parallel.plan(WORLD, cupy.asarray(steps), device="cpu")
    plan = parallel.plan(WORLD, cupy.asarray(steps) if first else [])
    assert plan.device == "cuda"
    to_host(
        plan.exclusive_scan(
            cupy.asarray(np.ones(2)) if first else None, cupy.asarray(steps) if first else []
        )
    )
