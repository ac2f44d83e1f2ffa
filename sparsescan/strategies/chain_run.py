"""Runs of a saved chain: its scan over MPI ranks in every way, beside predictions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..chains.chain import Chain
from ..chains.containers import BatchedCSR, CSRChain
from ..chains.files import Path
from ..chains.reading import length
from ..errors import InputError
from ..formatting import format_bytes
from ..parallel.api import plan
from ..parallel.communicator import Communicator
from ..parallel.exchange import allreduce_messages, exscan_messages
from ..parallel.forecast import CLOSE, OPEN
from ..parallel.grid import Grid
from ..parallel.maps import ScanTerms
from ..parallel.plan import ParallelPlan
from ..parallel.scan_file import Loaded, load_part
from ..plan.scan_plan import Gradients
from ..symbolic.pattern import Pattern
from .compare import Run, measure_here, measure_in_turns, strategies
from .machine import Machine
from .networks import from_chain
from .scan import Scan
from .strategy import Prediction

_SAMPLES = "scan, samples only"
_UNTRAINED = "a chain has no layers to train: only its scan is run"


def run_chain(comm: Any, path: Path, batch: int, machine: Machine | None = None) -> Run:
    """Scan a chain that is in a file in every way that ranks can share it; collective.

    Parts of the chain are combined by vectors, and by products; and if there are as many samples as
    ranks, each scans the whole chain for its share of them. These take turns.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    path : str or path-like
        Written by :func:`sparsescan.save_chain`.
    batch : int
        Samples of the gradient in the file; 1 if it has no batch axis.
    machine : Machine, optional
        Equal on all ranks, for the memory of each; by default that of
        :func:`~sparsescan.strategies.measure_here`.

    Returns
    -------
    Run
        Print it for a table. A step is an exclusive scan; its prediction is the forecast of its
        :class:`~sparsescan.parallel.ParallelPlan`, with the bytes of the Jacobians in the file,
        which samples may share.

    Raises
    ------
    InputError, RankError, MemoryError
        On all ranks, if the file cannot be read on any, or does not have so many samples.

    Notes
    -----
    BPPSA (Wang, Bai and Pekhimenko, MLSys 2020), section 3.6: ``n/p`` Jacobians on each of `p`
    ranks.
    """
    world = Communicator.of(comm)
    parts = Grid(world.size)
    loaded = load_part(world, parts, path, inclusive=False)
    samples = len(loaded.grad) if loaded.grad.ndim == 2 else 1
    if batch != samples:
        raise InputError(
            f"batch is {batch}, but the gradient in {os.fspath(path)} has shape "
            f"{loaded.grad.shape}; expected {samples}, its samples"
        )
    patterns, differ = _patterns(world, loaded.part)
    graph = from_chain(patterns, os.fspath(path))
    machine = measure_here(comm) if machine is None else machine
    reasons = {one.name: _UNTRAINED for one in strategies() if not isinstance(one, Scan)}
    ways = []
    for way in _ways(comm, path, loaded, reasons):
        prediction = way.prediction(differ)
        if prediction.memory > machine.memory:
            reasons[way.name] = f"a rank needs {format_bytes(prediction.memory)}"
        else:
            ways.append((prediction, way))
    return Run(graph, machine, world.size, batch, measure_in_turns(ways), reasons)


def _patterns(world: Communicator, part: Any) -> tuple[list[Pattern], bool]:
    """Return patterns of the whole chain, and whether any values differ between samples."""
    chain = Chain(length(part))
    every = world.gather((list(chain.read(part)), chain.batch is not None))
    return [pattern for own, _ in every for pattern in own], any(differ for _, differ in every)


class _Way:
    """One way to scan a chain over all ranks, with parts combined by `schedule`."""

    def __init__(self, comm: Any, name: str, grid: Grid, schedule: str, loaded: Loaded) -> None:
        self.name, self.communicator = name, Communicator.of(comm)
        rank, grad, self._part = self.communicator.rank, loaded.grad, loaded.part
        if grid.batch > 1:
            some = grid.samples(rank, len(grad))
            grad, self._part = grad[some], _samples_of(self._part, some)
        batch = len(grad) if grad.ndim == 2 else None
        self.plan: ParallelPlan = plan(
            comm, self._part, batch=batch, dtype=loaded.dtype, grid=grid, schedule=schedule
        )
        self._grad = grad if grid.position(rank) == 0 else None
        self._terms = ScanTerms(loaded.dtype, batch, False, False)

    def step(self, *_: Any) -> Gradients:
        """Scan; return this rank's gradients."""
        return self.plan.exclusive_scan(self._grad, self._part)

    def prediction(self, differ: bool) -> Prediction:
        """Return the forecast of the plan, where values of Jacobians differ by sample or not."""
        forecast, grid = self.plan.forecast, self.plan.grid
        times = {"scan": forecast.working, "messages": forecast.waiting}
        sent = _sent(self.plan, self._terms._replace(batched=differ))
        how = f"{grid.chain} parts × {grid.batch} groups of samples"
        return Prediction(self.name, how, times, sent, max(forecast.memory))


def _ways(comm: Any, path: Path, loaded: Loaded, reasons: dict[str, str]) -> Iterator[_Way]:
    """Yield the ways in which these ranks can scan the chain; add to `reasons` for others."""
    size = comm.size
    for schedule in ("vectors", "products"):
        way = _Way(comm, f"scan by {schedule}", Grid(size), schedule, loaded)
        if way.plan.schedule == schedule:
            yield way
        else:
            reasons[way.name] = way.plan.reason
    samples = len(loaded.grad) if loaded.grad.ndim == 2 else 1
    if samples >= size > 1:
        grid = Grid(1, size)
        whole = load_part(Communicator.of(comm), grid, path, inclusive=False)
        yield _Way(comm, _SAMPLES, grid, "vectors", whole)
    elif size > 1:
        reasons[_SAMPLES] = f"{samples} samples are too few for {size} ranks"


def _samples_of(part: Any, some: slice) -> Any:
    """Return the Jacobians of some samples."""
    if isinstance(part, CSRChain):
        data = part.data if part.batch is None else np.ascontiguousarray(part.data[:, some])
        return CSRChain.from_pattern(data, part.pattern)
    if isinstance(part, np.ndarray):
        return part if part.ndim == 3 else np.ascontiguousarray(part[:, some])
    return [_sample_of(step, some) for step in part]


def _sample_of(step: Any, some: slice) -> Any:
    if isinstance(step, BatchedCSR):
        return BatchedCSR.from_pattern(step.data[some], step.pattern)
    return step[some] if isinstance(step, np.ndarray) and step.ndim == 3 else step


def _sent(plan: ParallelPlan, terms: ScanTerms) -> int:
    """Count bytes of data that the busiest rank sends in a scan, without agreements."""
    forecast, grid = plan.forecast, plan.grid
    if forecast.algorithm is not None:
        messages = (exscan_messages(forecast.algorithm, grid.chain, k) for k in range(grid.chain))
        return 8 * forecast.capacity.words(terms) * max(messages)
    agreed = (
        8 * OPEN * allreduce_messages(grid.chain, grid.position(rank))
        + 8 * CLOSE * allreduce_messages(grid.size, rank)
        for rank in range(grid.size)
    )
    return max(nbytes - few for nbytes, few in zip(forecast.bytes, agreed, strict=True))
