"""``python -m bench.grid``: every schedule on chains of all kinds, beside what a plan predicts.

Schedules take turns, so that what disturbs one disturbs all, and each first fills the caches by a
call that does not count. A schedule that is predicted to take
more than twenty times what the linear one takes is not run. Writes every sample to a JSON file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsescan
from sparsescan import Pattern, Schedule
from sparsescan.jacobians import Conv2d, Flatten, Linear, MaxPool2d, ReLU
from sparsescan.plan.costs.cpu import CpuModel, load_cpu
from sparsescan.plan.measure import made_up
from sparsescan.plan.search import Search
from sparsescan.symbolic.pattern import of_mask

from . import machine, workloads

_RESULTS = Path(__file__).parent / "results"
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
        "LeNet-5, B=16": lambda: (_lenet5(), 16),
        "VGG-11, pruned by 97%, B=1": lambda: (workloads.vgg11(0.97).patterns, 1),
        "VGG-11, pruned by 97%, B=16": lambda: (workloads.vgg11(0.97).patterns, 16),
        "VGG-11 at 8×8, B=1": lambda: (workloads.vgg11(0.0, 8, 4).patterns, 1),
    }
    return chain_by_name


def _lenet5() -> list[Pattern]:
    layers: list[Any] = [
        Conv2d(1, 6, 5, padding=2, input_shape=(1, 28, 28)),
        ReLU(input_shape=(6, 28, 28)),
        MaxPool2d(2, input_shape=(6, 28, 28)),
        Conv2d(6, 16, 5, input_shape=(6, 14, 14)),
        ReLU(input_shape=(16, 10, 10)),
        MaxPool2d(2, input_shape=(16, 10, 10)),
        Flatten(input_shape=(16, 5, 5)),
        Linear(400, 120),
        ReLU(input_shape=(120,)),
        Linear(120, 84),
        ReLU(input_shape=(84,)),
        Linear(84, 10),
    ]
    return [layer.pattern for layer in reversed(layers)]


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


def measure(make: Callable[[], Chain], rounds: int, device: str) -> dict[str, Any]:
    """Time all schedules of one chain, and ``auto``."""
    patterns, batch = make()
    grad = np.random.default_rng(2).standard_normal((batch, patterns[0].shape[1])).astype("f4")
    values = made_up(patterns, grad.dtype, batch)
    # Samples share large steps.
    values = [v[0] if v.size > _SHARED * batch else v for v in values]
    if device == "cuda":
        import cupy

        grad, values = cupy.asarray(grad), [cupy.asarray(array) for array in values]

    def scan(plan: sparsescan.ScanPlan) -> None:
        plan.exclusive_scan(grad, values)
        if device == "cuda":
            cupy.cuda.get_current_stream().synchronize()

    options = {"batch": batch, "dtype": np.float32, "device": device}
    contenders = {"auto": sparsescan.plan(patterns, **options)}
    linear = None
    for schedule in schedules(patterns, batch):
        plan = sparsescan.plan(patterns, schedule=schedule, **options)
        predicted = _predicted(plan)
        linear = predicted if linear is None else linear
        if predicted <= _HOPELESS * linear:
            contenders[repr(schedule)] = plan
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    rng = np.random.default_rng(3)
    for turn in range(rounds + 1):
        # In another order each time: what comes first follows the slowest, and is slower for it.
        for name in rng.permutation(list(contenders)).tolist():
            plan = contenders[name]
            scan(plan)
            start = time.perf_counter()
            scan(plan)
            if turn:
                samples[name].append(time.perf_counter() - start)
    return {
        "auto is": repr(contenders["auto"].schedule),
        "predicted_seconds": {name: _predicted(plan) for name, plan in contenders.items()},
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.grid", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder for the JSON file")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="chains whose name contains this")
    options = parser.parse_args(arguments)
    machine.pin()
    commit = machine.commit()
    results: dict[str, Any] = {}
    right = pairs = 0
    print(f"{'chain':<36}{'linear ms':>10}{'auto/linear':>13}{'auto/best':>11}  best")
    for name, make in chains().items():
        if options.only not in name:
            continue
        result = results[name] = measure(make, options.rounds, options.device)
        times = result["median_seconds"]
        ordered, clear = ranked(result)
        right, pairs = right + ordered, pairs + clear
        ratio = ratios(result["samples_seconds"])
        print(
            f"{name:<36}{1e3 * times[ratio['linear']]:>10.3f}{ratio['auto/linear']:>13.2f}"
            f"{ratio['auto/best']:>11.2f}  {ratio['best']}",
            flush=True,
        )
    print(f"{right} of {pairs} pairs of schedules are predicted in their order")
    everything = {"pairs_in_order": [right, pairs], "chains": results}
    gpu = machine.describe_gpu() if options.device == "cuda" else None
    print(machine.write(options.output, "grid", "bench.grid", commit, everything, gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
