"""Measure the constants of :mod:`~.plan.costs.cuda`, as ``sparsescan calibrate`` may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import load_cupy
from ..execution.cuda.shares import BLAS_SIZE, Shares
from ..symbolic.pattern import Pattern
from ..symbolic.program import Program
from ..symbolic.schedule import Schedule
from .calibrate import DTYPES, fit, made_up, trials, usual
from .choice import InputKind, PlanChoice, PlanOptions
from .costs.cuda import Gpu, GpuModel
from .costs.operations import FAMILIES, Operations, run_time
from .scan_plan import ScanPlan

# The most steps of a chain, since each may be a launch; of chains in chunks, and their sizes.
_STEPS, _CHUNKED, _SIZES = 200, 1000, (4, 20, 64)
# Samples, and samples and chunks, that keep all of a device busy.
_SAMPLES, _CHUNKS = 4096, 128
# Rows of a matrix that keeps cuBLAS busy, how often it is called, and bytes that are copied.
_ROWS, _CALLS, _COPIED = 2048, 100, 1 << 30


def calibrate_device() -> Gpu:
    """Return the constants of the current CUDA device, from scans of chains of all kinds.

    Takes some minutes, half of them to compile.

    Returns
    -------
    Gpu

    Raises
    ------
    DeviceError
        If there is no device.

    Notes
    -----
    If one block does all operations one after the other, a time is a sum of constants, each times a
    count. The other constants follow from chains and calls that keep the whole device busy.
    """
    cupy = load_cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    programs = _programs()
    rows = [_row(program) for program in programs]
    gpu = replace(
        _gpu(fit(rows, lambda k, dtype: _time(programs[k], dtype, 1))),
        name=properties["name"].decode(),
        matmul={dtype.name: _matmul(dtype, _ROWS, 1) / _ROWS**3 for dtype in DTYPES},
        plain=median(_matmul(dtype, BLAS_SIZE, _CALLS) for dtype in DTYPES),
        cache=float(properties["l2CacheSize"]),
        bandwidth=_bandwidth(),
    )
    gpu = replace(gpu, blocks=_blocks(gpu))
    return replace(gpu, product_step={dtype.name: _product_step(gpu, dtype) for dtype in DTYPES})


# -- One block, one operation after the other ------------------------------------------------------


def _programs() -> list[Program]:
    """Return scans in which no launch has more than one run."""
    programs = []
    for program, batch, _, dense in trials(_STEPS):
        if batch > 1 or dense:
            continue
        n, steps, levels = program.n, program.steps, program.schedule.levels
        apart = [(level.name, [[op]]) for level in levels for op in level.ops.tolist()]
        programs.append(Program(steps, Schedule.from_levels(n, apart)))
        if len(levels) == 1:
            programs.append(program)
    programs = [program for program in programs if not Shares.of(program).blas.any()]
    for size in _SIZES:
        steps = [Pattern.dense((size, size))] * _CHUNKED
        programs += [Program(steps, Schedule.chunked(_CHUNKED, chunks)) for chunks in (1, 2)]
    return programs


def _gpu(constants: NDArray[np.float64]) -> Gpu:
    """Return a GPU of these constants for each dtype, in the order of `_row`, without limits."""
    families = constants[:, 6:].reshape(len(DTYPES), len(FAMILIES), 3)
    # On a device nothing is special about these.
    for family, like in (
        ("shared csr·x", "csr·x"),
        ("shared dense·x", "dense·x"),
        ("csr·csr, dense", "csr·csr"),
    ):
        families[:, FAMILIES.index(family)] = families[:, FAMILIES.index(like)]
    names = [dtype.name for dtype in DTYPES]
    return Gpu(
        name="",
        families=dict(zip(names, families.tolist(), strict=True)),
        product_step={
            name: [0.0, *row[4:6].tolist()] for name, row in zip(names, constants, strict=True)
        },
        vector_step={name: row[2:4].tolist() for name, row in zip(names, constants, strict=True)},
        matmul=dict.fromkeys(names, 0.0),
        blocks=np.inf,
        run=float(constants[:, 0].mean()),
        launch=float(constants[:, 1].mean()),
        plain=0.0,
        cache=np.inf,
        bandwidth=np.inf,
    )


def _row(program: Program) -> NDArray[np.float64]:
    """Return how often each constant is part of the time of a scan.

    The constants are those of a run and a launch, two each of `vector_step` and `product_step`, and
    those of the families.
    """
    operations = Operations.of(program, 4, 1, np.zeros(program.n, bool))
    families = np.unique(operations.family[:-1])
    row = np.zeros(6 + 3 * len(FAMILIES))
    for k in range(len(row)):
        if k < 6 or (k - 6) // 3 in families:
            unit = np.zeros((len(DTYPES), len(row)))
            unit[:, k] = 1
            row[k] = _predicted(_gpu(unit), program, DTYPES[0], 1)
    return row


def _predicted(gpu: Gpu, program: Program, dtype: np.dtype[Any], batch: int) -> float:
    return run_time(GpuModel(gpu, dtype, batch), program)


def _time(program: Program, dtype: np.dtype[Any], batch: int) -> float:
    """Return nanoseconds of an exclusive scan."""
    cupy, patterns = load_cupy(), program.patterns[: program.n]
    choice = PlanChoice(program.schedule, kind=InputKind(batch, dtype, True), program=program)
    plan = ScanPlan(patterns, choice, PlanOptions(device="cuda"))
    host = made_up(patterns, dtype, batch)
    one = len(set(patterns)) == 1
    values = cupy.asarray(np.stack(host)) if one else [cupy.asarray(array) for array in host]
    grad = cupy.ones((batch, patterns[0].shape[1]), dtype)
    return _elapsed(lambda: plan.exclusive_scan(grad, values))


def _elapsed(call: Callable[[], Any]) -> float:
    """Return the nanoseconds that a call takes an idle device: the median of many."""
    cupy = load_cupy()
    first, last = cupy.cuda.Event(), cupy.cuda.Event()

    def timed() -> float:
        cupy.cuda.get_current_stream().synchronize()
        first.record()
        call()
        last.record()
        last.synchronize()
        return 1e6 * float(cupy.cuda.get_elapsed_time(first, last))

    # The first run of a plan compiles, the second makes a graph.
    call()
    call()
    return usual(timed)


# -- All of the device -----------------------------------------------------------------------------


def _blocks(gpu: Gpu) -> float:
    """Return blocks that work at once, from scans of many samples."""
    counts = []
    for step in (Pattern.dense((8, 8)), Pattern.dense((20, 20)), Pattern.diagonal(64)):
        program = Program([step] * _SIZES[1], Schedule.linear(_SIZES[1]))
        for dtype in DTYPES:
            once = gpu.run + gpu.launch
            work = _predicted(replace(gpu, blocks=1), program, dtype, _SAMPLES) - once
            counts.append(work / max(_time(program, dtype, _SAMPLES) - once, 1.0))
    return max(median(counts), 1.0)


def _product_step(gpu: Gpu, dtype: np.dtype[Any]) -> list[float]:
    """Return the time of a multiply-add of the whole device, from many samples and chunks."""
    size = _SIZES[1]
    schedule = Schedule.chunked(_CHUNKED, _CHUNKS)
    program = Program([Pattern.dense((size, size))] * _CHUNKED, schedule)
    _, *chain = gpu.product_step[dtype.name]

    def predicted(multiply_add: float) -> float:
        steps = gpu.product_step | {dtype.name: [multiply_add, *chain]}
        return _predicted(replace(gpu, product_step=steps), program, dtype, _CHUNKS)

    taken = _time(program, dtype, _CHUNKS)
    # If a multiply-add took so long, it would hide all other work.
    work = (predicted(2 * taken) - predicted(taken)) / taken
    others = predicted(taken) - taken * work
    return [max(taken - others, 0.0) / work, *chain]


def _matmul(dtype: np.dtype[Any], rows: int, calls: int) -> float:
    """Return nanoseconds from one product of cuBLAS to the next."""
    cupy = load_cupy()
    left, right, out = (cupy.ones((rows, rows), dtype) for _ in range(3))

    def multiply() -> None:
        for _ in range(calls):
            cupy.matmul(left, right, out=out)

    return _elapsed(multiply) / calls


def _bandwidth() -> float:
    """Return bytes a nanosecond, read and written, of a large copy."""
    cupy = load_cupy()
    source = cupy.zeros(_COPIED // 4, np.float32)
    target = cupy.zeros(_COPIED // 4, np.float32)
    return 2 * int(source.nbytes) / _elapsed(lambda: cupy.copyto(target, source))
