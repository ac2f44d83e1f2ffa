"""On the ranks of :mod:`bench.scaling`: what scans take.

``mpiexec -n RANKS python -m mpi4py -m bench.scaling_ranks OUT.json JSON``: rank 0 writes the
file. A rank makes its own part of a chain from a seed for each step, so that none holds the whole.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import sparsescan
from sparsescan import CSRChain, parallel
from sparsescan.plan.costs.cpu import load_cpu

from .scaling_model import ALONE, CHAINS

WORLD = MPI.COMM_WORLD
_WRONG = float(np.sqrt(np.finfo(np.float64).eps))


# -- Chains ---------------------------------------------------------------------------------------


def part(name: str, steps: slice, samples: slice | None = None) -> NDArray[Any] | CSRChain:
    """Return steps of a chain, for some of its samples."""
    about, every = CHAINS[name], range(steps.start, steps.stop)
    if about.kind == "dense":
        batch = (about.batch,) if about.batch else ()
        shape = *batch, about.size, about.size
        return np.stack([_dense(step, shape)[samples or ...] for step in every])
    pattern = about.pattern
    data = np.empty((len(every), pattern.nnz))
    for row, step in zip(data, every, strict=True):
        rng = np.random.default_rng([1, step])
        if about.kind == "diagonal":
            row[:] = rng.uniform(0.9, 1.1, pattern.nnz)
        else:
            row[:] = rng.standard_normal(pattern.nnz) / math.sqrt(3)
    return CSRChain(data, pattern.indices, pattern.indptr, pattern.shape)


def _dense(step: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a step that on the whole keeps the length of a gradient."""
    return np.random.default_rng([0, step]).standard_normal(shape) / math.sqrt(shape[-1])


def _gradient(size: int, batch: int | None = None) -> NDArray[np.float64]:
    return np.random.default_rng(2).standard_normal((batch, size) if batch else size)


def difference(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """How far gradients differ, relative to the largest entry of each, as scales are far apart."""
    if not len(actual):
        return 0.0
    axes = tuple(range(1, actual.ndim))
    scale = np.abs(expected).max(axis=axes)
    return float((np.abs(actual - expected).max(axis=axes) / scale).max())


# -- Times ----------------------------------------------------------------------------------------


def times(chains: list[tuple[str, int]], rounds: int, seconds: float) -> dict[str, Any]:
    """Time scans of these chains of so many steps, on all ranks, and of the whole on one."""
    network = parallel.Network.measure(WORLD)
    if WORLD.rank == 0:
        network.save()
    WORLD.Barrier()
    return {
        "network": asdict(network),
        "machine": asdict(load_cpu()),
        "scans": [_scan(name, n, rounds, seconds) for name, n in chains],
    }


def _scan(name: str, n: int, rounds: int, seconds: float) -> dict[str, Any]:
    about, size = CHAINS[name], WORLD.size
    grid = parallel.Grid(1, size) if about.batch else parallel.Grid(size)
    rank = WORLD.rank
    steps = grid.steps(rank, n)
    samples = grid.samples(rank, about.batch) if about.batch else None
    mine = part(name, steps, samples)
    whole = _gradient(about.size, about.batch)
    grad = whole[samples] if about.batch else whole if rank == 0 else None

    calls: dict[str, Callable[[], Any]] = {}
    predicted, forms = {}, {}
    alone = None
    if rank == 0:
        every = part(name, slice(0, n))
        plan = sparsescan.plan(every, batch=about.batch)
        said = plan.to_dict()
        taken = said["run_nanoseconds"] + sum(level["nanoseconds"] for level in said["levels"])
        predicted[ALONE] = 1e-9 * taken
        forms[ALONE] = repr(plan.schedule)
        calls[ALONE] = lambda: plan.exclusive_scan(whole, every)
        alone = calls[ALONE]()
    expected = WORLD.bcast(alone)[steps]
    expected = expected[:, samples] if about.batch else expected
    worst = 0.0
    for schedule in about.schedules:
        # A group of samples has the whole chain.
        options = {"batch": len(grad)} if about.batch else {"schedule": schedule}
        plan_here = parallel.plan(WORLD, mine, grid=grid, **options)
        calls[schedule] = lambda plan_here=plan_here: plan_here.exclusive_scan(grad, mine)
        forecast = plan_here.forecast
        predicted[schedule] = 1e-9 * forecast.nanoseconds
        forms[schedule] = ", ".join(filter(None, [plan_here.schedule, forecast.form]))
        worst = max(worst, difference(calls[schedule](), expected))
    worst = WORLD.allreduce(worst, MPI.MAX)
    if not worst < _WRONG:
        raise AssertionError(f"{name}, n={n}: gradients differ by {worst:.1e}")
    samples_taken = _race([ALONE, *about.schedules], calls, rounds, seconds)
    return {
        "chain": name,
        "n": n,
        "grid": list(grid),
        "is": forms,
        "difference": worst,
        "predicted_seconds": predicted,
        "median_seconds": {name: median(taken) for name, taken in samples_taken.items()},
        "samples_seconds": samples_taken,
    }


def _race(
    names: list[str], calls: dict[str, Callable[[], Any]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Time calls, which take turns in another order each time.

    A sample is of so many calls, one after the other, that they take some time; it ends when the
    last rank has it. Ranks that have no part in a call sleep.
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    repeats = dict.fromkeys(names, 1)
    rng = np.random.default_rng(3)
    for turn in range(-2, rounds):
        for name in rng.permutation(names).tolist():
            taken = 0.0
            _meet()
            if name in calls:
                if name != ALONE:
                    WORLD.Barrier()
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    calls[name]()
                taken = (time.perf_counter() - start) / repeats[name]
            _meet()
            taken = WORLD.allreduce(taken, MPI.MAX)
            if turn < 0:
                repeats[name] = max(1, min(round(seconds / taken), 1000))
            else:
                samples[name].append(taken)
    return samples


def _meet() -> None:
    """Wait asleep for all ranks: one that waits in MPI keeps a core busy."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def main(file: str, options: str) -> None:
    results = {"ranks": WORLD.size, "MPI": MPI.Get_library_version().splitlines()[0]}
    results |= times(**json.loads(options))
    if WORLD.rank == 0:
        Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
