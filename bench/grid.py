"""Every schedule on chains of all kinds, beside what a plan predicts.

Schedules take turns, so that what disturbs one disturbs all, and each first fills the caches by a
call that does not count. A schedule that is predicted to take more than twenty times what the
linear one takes is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsescan
from sparsescan import Pattern, Schedule
from sparsescan.jacobians import Sequential, from_torch
from sparsescan.plan.calibrate import made_up
from sparsescan.plan.costs.cpu import CpuModel, load_cpu
from sparsescan.plan.search import Search
from sparsescan.symbolic.pattern import of_mask

from . import networks, workloads
from .experiment import Experiment, Piece, Results, Row, Table
from .page import significant
from .timing import seconds

_ROUNDS, _QUICK_ROUNDS = 25, 2
_QUICK = ("RNN 20, T=10, B=1", "banded 16, n=1000")
# How much slower than the linear one a schedule may be predicted to be, and be run all the same.
_HOPELESS = 20
# Threads of a machine that would profit from products, and how many of its schedules are tried.
_MANY, _TREES = 64, 3
# Entries of a step above which the samples share its values.
_SHARED = 100_000
# Pairs whose times differ by more than this must be predicted in their order.
_CLEAR = 1.2

Chain = tuple[list[Pattern], int]


def chains() -> dict[str, Callable[[], Chain]]:
    """Patterns from the last layer to the first, and a batch."""

    def dense(size: int, n: int, batch: int) -> Callable[[], Chain]:
        return lambda: ([Pattern.dense((size, size))] * n, batch)

    def masked(where: Callable[[], NDArray[np.bool_]], n: int, batch: int) -> Callable[[], Chain]:
        return lambda: ([of_mask(where())] * n, batch)

    rng = np.random.default_rng(0)

    def banded(size: int, width: int) -> Callable[[], NDArray[np.bool_]]:
        places = np.arange(size)
        return lambda: np.abs(places[:, None] - places) <= width

    def sparse(size: int, share: float) -> Callable[[], NDArray[np.bool_]]:
        return lambda: rng.random((size, size)) < share

    chain_by_name: dict[str, Callable[[], Chain]] = {}
    for steps in (10, 100, 1000):
        for batch in (1, 16):
            chain_by_name[f"RNN 20, T={steps}, B={batch}"] = dense(20, steps, batch)
    chain_by_name |= {
        "RNN 20, T=3000, B=4": dense(20, 3000, 4),
        "RNN 4, T=3000, B=1": dense(4, 3000, 1),
        "RNN 64, T=200, B=1": dense(64, 200, 1),
        "RNN 128, T=100, B=8": dense(128, 100, 8),
        "GRU 36, T=300, B=16": dense(36, 300, 16),
    }
    for size, n in ((16, 1000), (64, 500), (1024, 100), (4096, 40)):
        chain_by_name[f"banded {size}, n={n}"] = masked(banded(size, 2), n, 1)
    chain_by_name["banded 64, n=500, B=16"] = masked(banded(64, 2), 500, 16)
    for size, n, batch in ((16, 3000, 1), (256, 1000, 1), (256, 1000, 16), (65536, 50, 1)):
        chain_by_name[f"diagonal {size}, n={n}, B={batch}"] = lambda s=size, n=n, b=batch: (
            [Pattern.diagonal(s)] * n,
            b,
        )
    for size, share, n in ((64, 0.1, 300), (256, 0.05, 64), (1024, 0.005, 64)):
        chain_by_name[f"random {size}, {share:.1%}, n={n}"] = masked(sparse(size, share), n, 1)
    for size, n in ((32, 1000), (1024, 200)):
        order = rng.permutation(size)
        chain_by_name[f"permutation {size}, n={n}"] = masked(
            lambda s=size, o=order: np.eye(s, dtype=bool)[o], n, 1
        )
    chain_by_name |= {
        "dense and diagonal 32, n=200, B=4": lambda: (
            [Pattern.dense((32, 32)), Pattern.diagonal(32)] * 100,
            4,
        ),
        "rectangular mix, n=64": lambda: (
            [Pattern.dense((a, b)) for a, b in [(8, 64), (64, 8)] * 32],
            1,
        ),
        "LeNet-5, B=16": lambda: (
            Sequential(from_torch(networks.lenet5(), (1, 32, 32))).patterns,
            16,
        ),
        "VGG-11, pruned by 97%, B=1": lambda: (workloads.vgg11(0.97).patterns, 1),
        "VGG-11, pruned by 97%, B=16": lambda: (workloads.vgg11(0.97).patterns, 16),
        "VGG-11 at 8×8, B=1": lambda: (workloads.vgg11(0.0, 8, 4).patterns, 1),
    }
    return chain_by_name


def schedules(patterns: list[Pattern], batch: int) -> list[Schedule]:
    """One of each kind, the linear one first, and trees for a machine with many threads.

    For chains with large steps only the trees, since other products would fill the memory.
    """
    n = len(patterns)
    chosen = [Schedule.linear(n)]
    if max(pattern.nnz for pattern in patterns) <= 1_000_000:
        chosen += [Schedule.truncated(n, levels) for levels in (1, 3)]
        chosen += [Schedule.chunked(n, chunks) for chunks in (2, 4, 16) if chunks < n]
        chosen.append(Schedule.blelloch(n))
    model = CpuModel(load_cpu(), np.dtype(np.float32), batch, _MANY)
    search = Search(patterns, model, fits=lambda program: True)
    search.run()
    for candidate in sorted(search.candidates, key=lambda one: one.nanoseconds)[:_TREES]:
        if candidate.schedule not in chosen:
            chosen.append(candidate.schedule)
    return chosen


def measure(make: Callable[[], Chain], quick: bool) -> Results:
    """Time all schedules of one chain, and ``auto``."""
    patterns, batch = make()
    grad = np.random.default_rng(2).standard_normal((batch, patterns[0].shape[1])).astype("f4")
    values = made_up(patterns, grad.dtype, batch)
    # Samples share large steps.
    values = [v[0] if v.size > _SHARED * batch else v for v in values]
    options = {"batch": batch, "dtype": np.float32}
    plans = {"auto": sparsescan.plan(patterns, **options)}
    linear, *others = schedules(patterns, batch)
    plans[repr(linear)] = first = sparsescan.plan(patterns, schedule=linear, **options)
    for schedule in others:
        plan = sparsescan.plan(patterns, schedule=schedule, **options)
        if _predicted(plan) <= _HOPELESS * _predicted(first):
            plans[repr(schedule)] = plan
    samples: dict[str, list[float]] = {name: [] for name in plans}
    rng = np.random.default_rng(3)
    for _ in range(_QUICK_ROUNDS if quick else _ROUNDS):
        # In another order each time: what comes first follows the slowest, and is slower for it.
        for name in rng.permutation(list(plans)).tolist():
            samples[name] += seconds(partial(plans[name].exclusive_scan, grad, values), 1)
    return {
        "auto is": repr(plans["auto"].schedule),
        "predicted_seconds": {name: _predicted(plan) for name, plan in plans.items()},
        "median_seconds": {name: median(times) for name, times in samples.items()},
        "samples_seconds": samples,
    }


def ratios(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Time of ``auto`` over that of the linear scan and of the best schedule: medians of turns.

    Which is the best is said by every other turn, and how good it is by the others: the fastest of
    several would otherwise be the one that was lucky.
    """
    auto = np.array(samples["auto"])
    others = {name: np.array(times) for name, times in samples.items() if name != "auto"}
    linear = next(name for name in others if "linear" in name)
    best = min(others, key=lambda name: float(np.median(others[name][::2])))
    return {
        "auto/linear": float(np.median(auto / others[linear])),
        "auto/best": float(np.median((auto / others[best])[1::2])),
        "linear": linear,
        "best": best,
    }


def _predicted(plan: sparsescan.ScanPlan) -> float:
    said = plan.to_dict()
    return 1e-9 * (said["run_nanoseconds"] + sum(level["nanoseconds"] for level in said["levels"]))


def ranked(result: dict[str, Any]) -> tuple[int, int]:
    """Pairs of schedules whose times differ clearly: how many are predicted in order, and all."""
    times, said = result["median_seconds"], result["predicted_seconds"]
    pairs = [
        (times[a] < times[b]) == (said[a] < said[b])
        for a, b in combinations([name for name in times if name != "auto"], 2)
        if max(times[a], times[b]) > _CLEAR * min(times[a], times[b])
    ]
    return sum(pairs), len(pairs)


# -- The experiment -------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for name, make in chains().items():
        if name in _QUICK or not quick:
            yield Piece(name, partial(measure, make, quick))


def _about(quick: bool) -> Results:
    return {"rounds": _QUICK_ROUNDS if quick else _ROUNDS, "dtype": "float32"}


def _rows(results: Results) -> list[Row]:
    """Return all schedules beside the linear one."""
    return [
        Row(f"{chain}, by {name}", linear, medians[linear], medians[name])
        for chain, piece in results["pieces"].items()
        for medians in (piece["median_seconds"],)
        for linear in [name for name in medians if name.startswith("Schedule.linear")][:1]
        for name in medians
        if name != linear
    ]


def _tables(results: Results) -> list[Table]:
    rows, right, pairs = [], 0, 0
    for name, piece in results["pieces"].items():
        medians, relative = piece["median_seconds"], ratios(piece["samples_seconds"])
        ordered, clear = ranked(piece)
        right, pairs = right + ordered, pairs + clear
        which = relative["linear"], "auto", relative["best"]
        times = [significant(1e3 * medians[each]) for each in which]
        times += [f"{significant(relative[f'auto/{each}'])}×" for each in ("linear", "best")]
        names = [_short(each) for each in (piece["auto is"], relative["best"])]
        rows.append([name, *times, *names, f"{ordered} of {clear}"])
    rows.append(["all", *[""] * 7, f"{right} of {pairs}"])
    numbers = ["linear, ms", "auto, ms", "best, ms", "auto/linear", "auto/best"]
    order = "pairs, a fifth or more apart, that predictions rank as medians do"
    return [Table(["chain", *numbers, "auto is", "best is", order], rows, numbers)]


def _short(name: str) -> str:
    """Without what all have in common, on one line, and cut where a tree is long."""
    short = name.removeprefix("Schedule.").replace(" ", "\xa0")
    return short if len(short) <= 30 else short[:29] + "…"


EXPERIMENT = Experiment("grid", "Schedules", _pieces, _about, rows=_rows, tables=_tables)
