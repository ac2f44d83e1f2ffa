"""Measure the constants of :mod:`~.plan.costs.cpu` here, for ``sparsescan calibrate``."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ..arrays.addresses import kernel_address
from ..execution.threads import share, thread_count
from ..execution.workspace import Workspace
from ..symbolic.pattern import Pattern, of_mask, trusted
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .costs.cpu import Cpu
from .costs.operations import FAMILIES, Operations

# Seconds for which a measurement is repeated, and the least number of repetitions.
_SECONDS, _TIMES = 0.03, 5
# Steps of a chain at most.
_STEPS = 2000

DTYPES: tuple[np.dtype[Any], ...] = np.dtype(np.float32), np.dtype(np.float64)


class Trial(NamedTuple):
    """A scan of a chain.

    `shared`: samples share the values, and so do steps of one pattern; `dense`: products are
    stored densely.
    """

    program: Program
    batch: int = 1
    shared: bool = False
    dense: bool = False

    @property
    def batched(self) -> NDArray[np.bool_]:
        """Which Jacobians differ between samples."""
        return np.full(self.program.n, self.batch > 1 and not self.shared)


def calibrate() -> Cpu:
    """Measure the constants of this machine, from scans of all kinds; it takes ten seconds.

    Returns
    -------
    Cpu

    Notes
    -----
    Times of one thread are explained by counts of multiply-adds, entries and operations.
    """
    chains = list(trials(_STEPS))
    rows = [_features(chain) for chain in chains]
    constants = fit(rows, lambda k, dtype: _time(chains[k], dtype, 1))
    families = constants[:, 1:].reshape(len(DTYPES), len(FAMILIES), 3).tolist()
    cache, bandwidth, memory_threads = _memory()
    wake, meet = _meetings() if thread_count() > 1 else (0.0, 0.0)
    return Cpu(
        name=platform.processor() or platform.machine(),
        families={dtype.name: table for dtype, table in zip(DTYPES, families, strict=True)},
        run=float(constants[:, 0].mean()),
        wake=wake,
        meet=meet,
        cache=cache,
        bandwidth=bandwidth,
        memory_threads=memory_threads,
    )


def fit(
    rows: Sequence[NDArray[np.float64]], time: Callable[[int, np.dtype[Any]], float]
) -> NDArray[np.float64]:
    """Return the constants for each dtype; the k-th time is their sum, weighted by ``rows[k]``.

    A least squares problem in relative errors, with constants that are not negative.
    """
    fitted = []
    for dtype in DTYPES:
        times = np.array([time(k, dtype) for k in range(len(rows))])
        fitted.append(nnls(np.array(rows) / times[:, None], np.ones(len(times)))[0])
    return np.array(fitted)


def trials(steps: int) -> Iterator[Trial]:
    """Return chains of at most so many steps; each family does much of the work at some size."""
    rng = np.random.default_rng(0)

    def sparse(size: int, share: float) -> Pattern:
        return of_mask(rng.random((size, size)) < share)

    def banded(size: int) -> Pattern:
        return of_mask(np.abs(np.subtract.outer(np.arange(size), np.arange(size))) <= 2)

    patterns = [Pattern.dense((size, size)) for size in (2, 8, 20, 48, 128)]
    patterns += [Pattern.diagonal(size) for size in (4, 64, 1024, 8192)]
    patterns += [banded(size) for size in (8, 64, 512, 2048)]
    patterns += [sparse(64, 0.2), sparse(512, 0.05)]
    for step in patterns:
        # Chains are as long as real ones, whose tables of operations leave the near caches.
        n = min(max(100_000 // step.nnz, 16), steps)
        linear, once = Schedule.linear(n), Schedule.truncated(n, 1)
        for batch in (1, 8):
            yield Trial(Program([step] * n, linear), batch)
        if step.kind != "diagonal":
            yield Trial(Program([step] * n, linear), 16, shared=True)
        if step.shape[0] <= 512:
            yield Trial(Program([step] * n, once))
            yield Trial(Program([step] * n, Schedule.truncated(n, 2)), 4)
        if step.kind == "general" and step.shape[0] <= 512:
            products = {(a, b) for a, _, b in once.levels[0].ops.tolist()}
            yield Trial(Program([step] * n, once, dense=products), dense=True)
    for size in (8, 48, 200):
        kinds = [Pattern.dense((size, size)), Pattern.diagonal(size), banded(size)]
        for a, b in permutations(kinds, 2):
            yield Trial(Program([a, b] * 16, Schedule.truncated(32, 1)))


def _features(chain: Trial) -> NDArray[np.float64]:
    """Return the factor of each constant: first that of a run, then those of the families."""
    operations = Operations.of(chain.program, 4, chain.batch, chain.batched)
    table = np.zeros((len(FAMILIES), 3))
    np.add.at(table, operations.family[:-1], operations.counts[:-1])
    return np.concatenate([[1.0], table.ravel()])


def _time(chain: Trial, dtype: np.dtype[Any], threads: int) -> float:
    """Return nanoseconds of an exclusive scan: the median of many."""
    program, batched = chain.program, chain.batched
    steps = program.patterns[: program.n]
    if chain.shared:
        different = list(dict.fromkeys(steps))
        known = dict(zip(different, made_up(different, dtype, 1), strict=True))
        values = [known[step] for step in steps]
    else:
        values = made_up(steps, dtype, chain.batch)
    leaves = np.array(
        [(kernel_address(array), array.strides[0] * batched[0]) for array in values], np.int64
    )
    workspace = Workspace(program, leaves, dtype, chain.batch, batched, False, threads)
    out = np.ones(chain.batch * int(program.offsets[-1]), dtype)
    scan = partial(workspace.run, out, False)
    scan()
    return usual(partial(nanoseconds, scan))


def made_up(patterns: Sequence[Pattern], dtype: np.dtype[Any], batch: int) -> list[NDArray[Any]]:
    """Return values of each Jacobian and sample; rows sum to about one, so that nothing grows."""
    rng = np.random.default_rng(0)
    values = []
    for pattern in patterns:
        per_row = max(pattern.nnz / max(pattern.shape[0], 1), 1)
        drawn = rng.random((batch, pattern.nnz), np.float32)
        values.append(((drawn + 0.5) / per_row).astype(dtype))
    return values


def nanoseconds(call: Callable[[], object]) -> float:
    """Return the time that a call takes."""
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def usual(timed: Callable[[], float]) -> float:
    """Return the median of repeated measurements of a time."""
    times: list[float] = []
    deadline = time.perf_counter() + _SECONDS
    while len(times) < _TIMES or time.perf_counter() < deadline:
        times.append(timed())
    return median(times)


def _memory() -> tuple[float, float, float]:
    """Measure bytes of caches, and bytes a nanosecond from memory to one thread and to many."""
    large = np.ones(1 << 25, np.float32)

    def read(parts: int, array: NDArray[Any]) -> float:
        pieces = np.array_split(array, parts)
        call = partial(share, lambda i: pieces[i].max(), parts)
        return array.nbytes / usual(partial(nanoseconds, call))

    alone, together = read(1, large), read(thread_count(), large)
    cache = 1 << 20
    while cache < large.nbytes // 2 and read(1, large[: cache // 4]) > 1.3 * alone:
        cache *= 2
    return float(cache), alone, max(together / alone, 1.0)


def _meetings() -> tuple[float, float]:
    """Measure nanoseconds to start helpers, and of a barrier, by steps with shared rows."""
    threads, dtype = thread_count(), np.dtype(np.float64)
    # Blocks of two: enough work for a thread, in few cache lines.
    size = 20_000
    columns = np.repeat(np.arange(size).reshape(-1, 2), 2, axis=0)
    step = trusted(np.arange(0, 2 * size + 1, 2), columns.ravel(), (size, size))
    lost = []
    for n in (3, 33):
        chain = Trial(Program([step] * n, Schedule.linear(n)), shared=True)
        lost.append(_time(chain, dtype, threads) - _time(chain, dtype, 1) / threads)
    meet = max(lost[1] - lost[0], 0.0) / 30
    return max(lost[0] - 2 * meet, 0.0), meet
