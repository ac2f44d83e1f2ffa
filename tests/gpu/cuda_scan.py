"""Scans on a CUDA device, through the public API."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import extremes
import numpy as np
import pytest
import ranges
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import (
    IN_PYTHON,
    SIMULATED,
    chain_on,
    cupy_or_stand_in,
    jacobians_on,
    to_host,
)
from oracles import (
    Chain,
    assert_within,
    chains,
    every_schedule,
    patterns_of,
    same_bits,
    schedules,
    sequential,
    values_only,
)
from sampling import examples, slow

import sparsescan
from sparsescan import (
    BatchedCSR,
    CSRChain,
    DeviceError,
    ImplicitChain,
    ImplicitPattern,
    ImplicitStep,
    InputError,
    InputTypeError,
    MemoryLimitError,
    Pattern,
    ScanPlan,
    Schedule,
    SolveStep,
)
from sparsescan.chains.containers import PeriodicChain
from sparsescan.execution.cuda.shares import BLAS_SIZE
from sparsescan.execution.cuda.workspace import DeviceWorkspace
from sparsescan.jacobians import Linear, Residual, Tanh
from sparsescan.kernels.cuda.tables import Run
from sparsescan.plan.choice import PlanChoice
from sparsescan.symbolic.indexed import IndexedPattern
from sparsescan.symbolic.pattern import of_mask

simulated = pytest.mark.skipif(not SIMULATED, reason="looks into the stand-in for CuPy")
in_python = pytest.mark.skipif(not IN_PYTHON, reason="looks into the simulator")


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


@pytest.fixture(autouse=True)
def launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All launches, in the simulator, where launches can only be captured by this."""
    if not SIMULATED:
        return []
    import fake_cupy

    return fake_cupy.watch(monkeypatch)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return for each run whether a value was not finite, and the scan was run again, linearly."""
    flags: list[int] = []
    run = DeviceWorkspace.run

    def watched(self: DeviceWorkspace, *arguments: Any, **options: Any) -> None:
        run(self, *arguments, **options)
        flags.append(int(self._run[Run.FLAG : Run.FLAG + 1].get()[0]))

    monkeypatch.setattr(DeviceWorkspace, "run", watched)
    return flags


def call_of(chain: Chain) -> Any:
    return sparsescan.inclusive_scan if chain.inclusive else sparsescan.exclusive_scan


# ---------------------------------------------------------------------------------------------
# Results of scans
# ---------------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(st.data())
def test_any_chain_under_any_schedule(cupy: Any, flags: list[int], data: Any) -> None:
    chain = data.draw(chains(max_n=8, max_size=9))
    schedule = data.draw(schedules(len(chain.jacobians)))
    grad, jacobians, local = chain_on(cupy, chain)
    result = call_of(chain)(grad, jacobians, local_grads=local, schedule=schedule)
    stacked = isinstance(result, cupy.ndarray)
    assert stacked or all(isinstance(gradient, cupy.ndarray) for gradient in result)
    assert_within(to_host(result), chain.oracle(), chain.dtype)
    assert not any(flags)


@settings(max_examples=examples(50))
@given(st.data())
def test_a_plan_runs_again_with_new_values(cupy: Any, data: Any) -> None:
    """Plainly at first, then by a graph; from Jacobians, then from bare values."""
    chain = data.draw(chains(max_n=6, max_size=6))
    schedule = data.draw(schedules(len(chain.jacobians)))
    plan = sparsescan.plan(chain.jacobians, schedule=schedule)
    run = plan.inclusive_scan if chain.inclusive else plan.exclusive_scan
    for scale in (1.0, 0.5, 0.25):
        chain.grad = (chain.grad * scale).astype(chain.grad.dtype)
        grad, jacobians, local = chain_on(cupy, chain)
        result = to_host(run(grad, jacobians, local_grads=local))
        assert_within(result, chain.oracle(), chain.dtype)
    bare = values_only(chain.jacobians)
    on_device = jacobians_on(cupy, bare)
    assert same_bits(to_host(run(grad, on_device, local_grads=local)), result)


@settings(max_examples=examples(60))
@given(st.data())
def test_any_products_may_be_stored_densely(cupy: Any, flags: list[int], data: Any) -> None:
    chain = data.draw(chains(max_n=7, max_size=8, min_size=1))
    n = len(chain.jacobians)
    if n == 0:
        return
    patterns = patterns_of(chain.jacobians)
    schedule = data.draw(st.sampled_from([*every_schedule(n)]))
    products = [(a, b) for level in schedule.levels for a, _, b in level.ops.tolist() if a > 0]
    dense = frozenset(interval for interval in products if data.draw(st.booleans()))
    plan = ScanPlan(patterns, PlanChoice(schedule, dense))
    grad, jacobians, local = chain_on(cupy, chain)
    run = plan.inclusive_scan if chain.inclusive else plan.exclusive_scan
    result = run(grad, jacobians, local_grads=local)
    assert_within(to_host(result), chain.oracle(), chain.dtype)
    assert not any(flags)


@pytest.mark.parametrize("schedule", ["linear", "blelloch"])
@pytest.mark.parametrize("batch", [None, 3])
def test_patterns_that_take_turns(cupy: Any, schedule: str, batch: int | None) -> None:
    rng = np.random.default_rng(batch or 0)
    lead = () if batch is None else (batch,)
    values = [rng.standard_normal((4, *lead, 5)), rng.standard_normal(15), rng.standard_normal(15)]
    patterns = [Pattern.diagonal(5), Pattern.dense((3, 5)), Pattern.dense((5, 3))]
    grad, local = rng.standard_normal((*lead, 5)), [None, rng.standard_normal((4, *lead, 5)), None]
    expected = sparsescan.inclusive_scan(
        grad, PeriodicChain(values, patterns), local_grads=local, schedule="linear"
    )
    plan = sparsescan.plan(PeriodicChain(values, patterns), schedule=schedule, device="cuda")
    chain = PeriodicChain([cupy.asarray(array) for array in values], patterns)
    there = [None, cupy.asarray(local[1]), None]
    on_device = plan.inclusive_scan(cupy.asarray(grad), chain, local_grads=there)
    there_and_back = plan.inclusive_scan(grad, PeriodicChain(values, patterns), local_grads=local)
    for actual in (to_host(on_device), there_and_back):
        for array, exact in zip(actual, expected, strict=True):
            np.testing.assert_allclose(array, exact, rtol=1e-12, atol=1e-12, strict=True)


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "chunked:3"])
@pytest.mark.parametrize(("batch", "size"), [(None, 25), (3, 25), *slow((None, 4)), (3, 4)])
def test_implicit_steps(cupy: Any, schedule: str, batch: int | None, size: int) -> None:
    """The second factor has so many weights, which are read through an index if they are few."""
    rng = np.random.default_rng(batch or 0)
    lead = () if batch is None else (batch,)
    second: Any = Pattern.dense((5, 5))
    if size < 25:
        second = IndexedPattern(second, rng.integers(0, size, 25), size)
    pattern = ImplicitPattern([Pattern.diagonal(5), second], shared=[1])
    values = [rng.standard_normal((9, *lead, 5)), rng.standard_normal(size)]
    grad, local = rng.standard_normal((*lead, 5)), rng.standard_normal((10, *lead, 5))
    chain = ImplicitChain(values, pattern)
    expected = sparsescan.inclusive_scan(grad, chain, local_grads=local, schedule="linear")
    plan = sparsescan.plan(chain, schedule=schedule, device="cuda")
    there = ImplicitChain([cupy.asarray(array) for array in values], pattern)
    steps = [ImplicitStep([there.values[0][k], there.values[1]], pattern) for k in range(9)]
    for steps_there in (there, steps):
        gradients = plan.inclusive_scan(
            cupy.asarray(grad), steps_there, local_grads=list(map(cupy.asarray, local))
        )
        np.testing.assert_allclose(to_host(list(gradients)), expected, rtol=1e-12, atol=1e-12)
    gradients = plan.inclusive_scan(grad, chain, local_grads=local)
    np.testing.assert_allclose(gradients, expected, rtol=1e-12, atol=1e-12, strict=True)


@settings(max_examples=examples(30))
@given(st.data())
def test_numpy_goes_there_and_back(data: Any) -> None:
    chain = data.draw(chains(max_n=5, max_size=5))
    result = call_of(chain)(
        chain.grad, chain.jacobians, local_grads=chain.local_grads, device="cuda"
    )
    assert all(isinstance(gradient, np.ndarray) for gradient in result)
    assert_within(result, chain.oracle(), chain.dtype)


@pytest.mark.parametrize(
    "schedule", ["linear", *slow("blelloch"), Schedule.chunked(6, 3)], ids=repr
)
@pytest.mark.parametrize("batch", [2, *slow(None)])
def test_rows_of_all_lengths(cupy: Any, schedule: Any, batch: int | None) -> None:
    """Rows longer than a block has room for, short ones and empty ones; several blocks each."""
    rng = np.random.default_rng(1)
    size = 23
    where = rng.random((size, size)) < 0.08
    where[3] = where[:, 17] = True
    where[5] = False
    indptr = np.concatenate([[0], np.cumsum(where.sum(1))])
    data = rng.standard_normal((6, *([batch] if batch else []), int(indptr[-1]))) * 0.7
    jacobians = CSRChain(data, np.nonzero(where)[1], indptr, (size, size))
    grad = rng.standard_normal((*([batch] if batch else []), size))
    expected = sequential(grad, jacobians)
    plan = sparsescan.plan([jacobians.pattern] * 6, schedule=schedule)
    for steps in (jacobians_on(cupy, jacobians), [cupy.asarray(step) for step in data]):
        result = plan.exclusive_scan(cupy.asarray(grad), steps)
        assert_within(to_host(result), expected, np.float64)


def test_runs_that_begin_with_steps_that_samples_share(
    monkeypatch: pytest.MonkeyPatch, cupy: Any
) -> None:
    """Each sample's block makes what it reads, whichever block comes first."""
    if IN_PYTHON:
        import simulator

        simulator.reverse_blocks(monkeypatch)
    rng = np.random.default_rng(9)
    steps = [rng.standard_normal((2, 3, 3)) for _ in range(9)]
    for k in (2, 3, 6):
        steps[k] = steps[k][0]
    # One of another pattern, so that the chain has no kernels of its own.
    steps[8] = sp.csr_array(np.tri(3))
    grad = rng.standard_normal((2, 3))
    plan = sparsescan.plan(steps, schedule=Schedule.chunked(9, 3))
    on_device = cupy.asarray(grad), jacobians_on(cupy, steps)
    for _ in range(3):
        result = plan.exclusive_scan(*on_device)
        assert_within(to_host(result), sequential(grad, steps), np.float64)


def test_layers_back_propagate_on_the_device(cupy: Any) -> None:
    """A residual block, whose parameter gradients need a scan inside it, and a recurrent cell."""
    rng = np.random.default_rng(4)
    x, grad = rng.standard_normal((2, 3)), rng.standard_normal((2, 3))
    host = Residual(Linear(3, 4, rng=rng), Tanh(input_shape=(4,)), Linear(4, 3, rng=rng))
    device = copy.deepcopy(host)
    for op in device.ops:
        for name, array in op.params.items():
            setattr(op, name, cupy.asarray(array))
    gradients = device.param_grads(cupy.asarray(x), cupy.asarray(grad))
    for name, expected in host.param_grads(x, grad).items():
        np.testing.assert_allclose(gradients[name].get(), expected, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# Range, as in tests/engine/test_range.py
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def scans_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exclusive_scan", "inclusive_scan"):
        call = getattr(sparsescan, name)
        monkeypatch.setattr(
            sparsescan, name, lambda *a, _call=call, **k: _call(*a, device="cuda", **k)
        )


on_device = pytest.mark.usefixtures("scans_on_device")


@on_device
@settings(max_examples=examples(15))
@given(st.data())
def test_finite_wherever_the_linear_scan_is(data: Any) -> None:
    ranges.check_finite_wherever_the_linear_scan_is(data)


@pytest.mark.slow
@on_device
@extremes.needs_longer
@settings(max_examples=examples(100))
@given(extremes.extreme_chains)
def test_steps_of_every_size(arguments: Any) -> None:
    extremes.check_steps_of_every_size(arguments)


@on_device
@settings(max_examples=examples(20))
@given(extremes.extreme_chains)
def test_finite_wherever_back_propagation_is(arguments: Any) -> None:
    extremes.check_finite_wherever_back_propagation_is(arguments)


@on_device
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@settings(max_examples=examples(15))
@given(data=st.data())
def test_nan_and_inf(bad: float, data: Any) -> None:
    ranges.check_nan_and_inf_reach_what_they_reach_in_the_linear_scan(bad, data)


# ---------------------------------------------------------------------------------------------
# Launches, graphs and streams
# ---------------------------------------------------------------------------------------------


def scan_often(cupy: Any, launches: list[Any], schedule: Schedule, size: int, runs: int = 1) -> Any:
    """Return the launches of each of some runs of a plan with dense steps."""
    plan = sparsescan.plan([Pattern.dense((size, size))] * schedule.n, schedule=schedule)
    grad, values = cupy.asarray(np.ones(size)), cupy.asarray(np.ones((schedule.n, size**2)))
    for _ in range(runs):
        launches.clear()
        plan.exclusive_scan(grad, values)
        yield list(launches)


@simulated
@pytest.mark.parametrize("n", [12, 50, 100])
@pytest.mark.parametrize("largest", [1, 64])
def test_launches_of_chunks(
    monkeypatch: pytest.MonkeyPatch, cupy: Any, launches: Any, n: int, largest: int
) -> None:
    """Steps with kernels of their own, and others: four, whatever `n`."""
    monkeypatch.setattr("sparsescan.kernels.cuda.chunks.MAX_SIZE", largest)
    (log,) = scan_often(cupy, launches, Schedule.chunked(n, 5), 2)
    assert len(log) == 4


@in_python
@pytest.mark.parametrize("inclusive", [False, True])
def test_values_of_the_next_large_step_are_brought_to_the_cache(
    monkeypatch: pytest.MonkeyPatch, cupy: Any, launches: Any, inclusive: bool
) -> None:
    """By all blocks of a launch together; unless there is none, or it has another pattern."""
    read: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "sparsescan.kernels.cuda.matvec.prefetch",
        lambda address, p, like: read.append((len(launches), address + 8 * p)),
    )
    kept = np.abs(np.subtract.outer(np.arange(80), np.arange(80))) < 2
    band, other = of_mask(kept), of_mask(kept[::-1])
    rng = np.random.default_rng(0)
    steps = [
        BatchedCSR.from_pattern(cupy.asarray(rng.standard_normal((2, p.nnz))), p)
        for p in (band, band, other, band, band, band)
    ]
    grad = cupy.asarray(rng.standard_normal((2, 80)))
    call = sparsescan.inclusive_scan if inclusive else sparsescan.exclusive_scan
    call(grad, steps, schedule="linear")
    assert [launch.kernel for launch in launches] == ["vectors"] * (5 + inclusive)
    assert all(launch.blocks > 2 for launch in launches)
    for k in range(5 + inclusive):
        places = np.array([at for launch, at in read if launch == k + 1])
        if k in (0, 3, 4) and k + 1 < 5 + inclusive:
            data = steps[k + 1].data
            sectors = np.unique((places - data.data.ptr) // 32)
            np.testing.assert_array_equal(sectors, np.arange(-(-data.nbytes // 32)))
        else:
            assert len(places) == 0


@simulated
def test_the_second_run_is_one_graph(cupy: Any, launches: Any) -> None:
    import fake_cupy

    first, second, third = scan_often(cupy, launches, Schedule.blelloch(9), 2, runs=3)
    assert len(first) > 3
    assert not any(launch.captured for launch in first)
    assert [launch for launch in second if not launch.captured] == third
    assert [launch.kernel for launch in third] == ["graph"]
    assert fake_cupy.state.waits == 0


BAND = of_mask(np.abs(np.subtract.outer(np.arange(80), np.arange(80))) < 2)
TANH = ImplicitPattern([Pattern.diagonal(3), Pattern.dense((3, 3))], shared=[1])
GRAPHED = {
    "small steps": (Pattern.dense((2, 2)), Schedule.linear(9), {"sweep_steps"}),
    "large steps": (BAND, Schedule.linear(4), {"vectors"}),
    "products of large steps": (BAND, Schedule.blelloch(4), {"level", "rescale"}),
    "chunks": (Pattern.dense((2, 2)), Schedule.chunked(9, 3), {"multiply", "carry"}),
    "implicit steps in chunks": (TANH, Schedule.chunked(9, 3), {"chained"}),
    "implicit steps": (TANH, Schedule.blelloch(9), {"level"}),
}


@simulated
@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("what", GRAPHED)
def test_every_kernel_is_part_of_the_graph(
    cupy: Any, launches: Any, what: str, inclusive: bool
) -> None:
    step, schedule, kernels = GRAPHED[what]
    rng, n, logs, results = np.random.default_rng(0), schedule.n, [], []
    if isinstance(step, ImplicitPattern):
        slopes, weights = (rng.standard_normal(shape) / 2 for shape in ((n, 2, 3), 9))
        steps: Any = ImplicitChain([cupy.asarray(slopes), cupy.asarray(weights)], step)
    else:
        steps = CSRChain.from_pattern(cupy.asarray(rng.standard_normal((n, 2, step.nnz))), step)
    grad = cupy.asarray(rng.standard_normal((2, step.shape[1])))
    plan = sparsescan.plan(steps, schedule=schedule)
    for _ in range(3):
        launches.clear()
        scan = plan.inclusive_scan if inclusive else plan.exclusive_scan
        results.append(to_host(scan(grad, steps)))
        logs.append([launch.kernel for launch in launches if not launch.captured])
    first, *others = logs
    # As compiled, these are small steps.
    assert not IN_PYTHON or kernels <= set(first)
    assert others == [["graph"]] * 2
    for later in results[1:]:
        np.testing.assert_array_equal(later, results[0])


@simulated
def test_calls_of_cublas_are_between_graphs(
    monkeypatch: pytest.MonkeyPatch, cupy: Any, launches: Any
) -> None:
    """No stream captures them; what comes before, between and after them is a graph each."""
    rng, called = np.random.default_rng(), []
    multiply = cupy.matmul
    monkeypatch.setattr(cupy, "matmul", lambda *a, out: called.append(a) or multiply(*a, out=out))
    steps = rng.standard_normal((8, 2, BLAS_SIZE, BLAS_SIZE)) / np.sqrt(BLAS_SIZE)
    plan = sparsescan.plan(cupy.asarray(steps), schedule=Schedule.blelloch(8))
    counts = []
    for run in range(3):
        launches.clear(), called.clear()
        grad, values = rng.standard_normal((2, BLAS_SIZE)), steps * 0.5**run
        gradients = plan.exclusive_scan(cupy.asarray(grad), cupy.asarray(values))
        assert_within(to_host(gradients), sequential(grad, values), np.float64)
        counts.append(([launch.kernel for launch in launches if not launch.captured], len(called)))
    (first, products), *others = counts
    assert "graph" not in first
    # The up-sweep has levels of three products and of one; the down-sweep has vectors only.
    assert products == 4
    assert others == [(["graph"] * 3, products)] * 2


@simulated
def test_where_nothing_can_be_captured_kernels_are_launched(
    monkeypatch: pytest.MonkeyPatch, cupy: Any, launches: Any
) -> None:
    def refuse(self: Any, mode: Any = None) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError("not permitted")

    monkeypatch.setattr(cupy.cuda.Stream, "begin_capture", refuse)
    first, second, third = scan_often(cupy, launches, Schedule.blelloch(9), 2, runs=3)
    assert first == second == third


@simulated
def test_nothing_waits_for_the_device(cupy: Any) -> None:
    """Once a plan is there: neither values nor the matrices of a training loop wait."""
    import fake_cupy
    from cupyx.scipy.sparse import csr_matrix

    rng = np.random.default_rng(5)
    where = np.tri(4, dtype=bool)
    indices, indptr = np.nonzero(where)[1].astype(np.int32), np.array([0, 1, 3, 6, 10], np.int32)
    steps = [
        csr_matrix(
            tuple(cupy.asarray(part) for part in (rng.standard_normal(10), indices, indptr)),
            shape=(4, 4),
        )
        for _ in range(6)
    ]
    grad = cupy.asarray(np.ones(4))
    plan = sparsescan.plan(steps, schedule="blelloch")
    plan.exclusive_scan(grad, steps)
    waits = fake_cupy.state.waits
    for _ in range(3):
        for step in steps:
            step.data = step.data * 0.5
        plan.exclusive_scan(grad, steps)
        plan.inclusive_scan(grad, [step.data for step in steps])
    assert fake_cupy.state.waits == waits


@simulated
def test_the_callers_stream(cupy: Any, launches: Any) -> None:
    grad, steps = cupy.asarray(np.ones(2)), cupy.asarray(np.ones((5, 2, 2)))
    own, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with own:
        sparsescan.exclusive_scan(grad, steps)
    assert {launch.stream for launch in launches} == {own.ptr}

    class OfPyTorch:
        cuda_stream = other.ptr

    class OfAnyone:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, other.ptr

    for stream in (other, OfPyTorch(), OfAnyone(), other.ptr):
        launches.clear()
        sparsescan.exclusive_scan(grad, steps, stream=stream)
        assert {launch.stream for launch in launches} == {other.ptr}


@simulated
def test_work_is_done_where_the_data_is(cupy: Any, launches: Any) -> None:
    steps = np.random.default_rng(6).standard_normal((5, 3, 3))
    plan = sparsescan.plan([Pattern.dense((3, 3))] * 5, schedule="blelloch")
    for device in (1, 0, 1):
        launches.clear()
        with cupy.cuda.Device(device):
            grad, on_device = cupy.asarray(np.ones(3)), cupy.asarray(steps)
        result = plan.exclusive_scan(grad, on_device)
        assert {launch.device for launch in launches} == {device}
        assert result.device.id == device
        assert_within(to_host(result), sequential(np.ones(3), steps), np.float64)


def test_threads_share_a_plan(cupy: Any) -> None:
    rng = np.random.default_rng(7)
    plan = sparsescan.plan([Pattern.dense((2, 2))] * 5, schedule="blelloch")
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            own = np.random.default_rng(seed)
            for _ in range(3):
                steps, grad = own.standard_normal((5, 2, 2)), own.standard_normal(2)
                # All on one stream: another would not wait for the uploads.
                with cupy.cuda.Stream(non_blocking=True) as stream:
                    there = cupy.asarray(grad), cupy.asarray(steps)
                    result = to_host(plan.exclusive_scan(*there, stream=stream))
                assert_within(result, sequential(grad, steps), np.float64)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in rng.integers(0, 99, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_same_bits_every_time(cupy: Any) -> None:
    rng = np.random.default_rng(8)
    steps, grad = rng.standard_normal((9, 2, 4, 4)), rng.standard_normal((2, 4))
    for schedule in every_schedule(9):
        plan = sparsescan.plan([Pattern.dense((4, 4))] * 9, schedule=schedule)
        results = [
            to_host(plan.exclusive_scan(cupy.asarray(grad), cupy.asarray(steps))) for _ in range(4)
        ]
        assert all(same_bits(result, results[0]) for result in results)


# ---------------------------------------------------------------------------------------------
# Which schedule, and errors
# ---------------------------------------------------------------------------------------------


def test_auto_takes_chunks_for_small_steps_of_one_pattern(cupy: Any) -> None:
    small = sparsescan.plan([Pattern.dense((2, 2))] * 1000, device="cuda")
    assert small.schedule.chunks is not None
    assert small.device == "cuda"
    unlike = sparsescan.plan([Pattern.dense((2, 2)), Pattern.diagonal(2)] * 500, device="cuda")
    predicted = {each.schedule: each.nanoseconds for each in unlike.alternatives}
    assert predicted[repr(unlike.schedule)] < 0.5 * predicted["Schedule.linear(1000)"]
    large = sparsescan.plan([Pattern.diagonal(1_000_000)] * 9, device="cuda")
    assert large.schedule == Schedule.linear(9)
    assert sparsescan.plan([Pattern.dense((2, 2))] * 1000).schedule == Schedule.linear(1000)
    on_device = sparsescan.plan(cupy.asarray(np.ones((1000, 2, 2))))
    assert on_device.device == "cuda"


@simulated
def test_no_device(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(DeviceError, match="no CUDA device can be used"):
        sparsescan.exclusive_scan(np.ones(2), np.ones((3, 2, 2)), device="cuda")


def test_errors_name_what_is_where(cupy: Any) -> None:
    grad, steps = np.ones(2), np.ones((3, 2, 2))
    on_device = cupy.asarray(grad), cupy.asarray(steps)
    with pytest.raises(DeviceError, match="device is 'cpu', but grad is on a CUDA device"):
        sparsescan.exclusive_scan(*on_device, device="cpu")
    with pytest.raises(DeviceError, match="device is 'gpu'; expected None, 'cpu' or 'cuda'"):
        sparsescan.plan(steps, device="gpu")
    with pytest.raises(DeviceError, match="device is 'cpu', but jacobians are on a CUDA device"):
        sparsescan.plan(on_device[1], device="cpu")
    with pytest.raises(DeviceError, match="grad"):
        sparsescan.exclusive_scan(grad, on_device[1])
    with pytest.raises(DeviceError, match="grad"):
        sparsescan.exclusive_scan(on_device[0], steps)
    with pytest.raises(DeviceError, match="local_grads"):
        sparsescan.exclusive_scan(*on_device, local_grads=[None, np.ones(2), None])
    with pytest.raises(InputError, match="stream is 5, but grad is in host memory"):
        sparsescan.exclusive_scan(grad, steps, stream=5)
    with pytest.raises(InputTypeError, match="stream is a str"):
        sparsescan.exclusive_scan(*on_device, stream="fast")


@simulated
def test_a_stream_that_captures(cupy: Any) -> None:
    grad, steps = cupy.asarray(np.ones(2)), cupy.asarray(np.ones((3, 2, 2)))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(DeviceError, match="the stream is capturing a graph"):
            sparsescan.exclusive_scan(grad, steps)
        stream.end_capture()


@simulated
@pytest.mark.parametrize("schedule", ["blelloch", Schedule.chunked(8, 3)], ids=repr)
def test_memory_that_the_device_does_not_have(cupy: Any, launches: Any, schedule: Any) -> None:
    import fake_cupy

    steps, grad = cupy.asarray(np.ones((8, 20, 20))), cupy.asarray(np.ones(20))
    plan = sparsescan.plan(steps, schedule=schedule)
    fake_cupy.state.free[0] = 3000
    words = r"would take [\d.]+ KiB; the device has 2.93 KiB left"
    with pytest.raises(MemoryLimitError, match=words):
        plan.exclusive_scan(grad, steps)
    assert not launches


@pytest.mark.parametrize("schedule", ["blelloch", Schedule.chunked(8, 3)], ids=repr)
def test_a_workspace_is_in_no_cycle(cupy: Any, schedule: Any) -> None:
    """Its memory is free at once, without a collection of cycles; cuBLAS multiplies, too."""
    steps = cupy.asarray(np.ones((8, BLAS_SIZE, BLAS_SIZE)))
    plan = sparsescan.plan(steps, schedule=schedule)
    plan.exclusive_scan(cupy.asarray(np.ones(BLAS_SIZE)), steps)
    shape = plan._latest.program, np.dtype(np.float64), 1, np.zeros(8, bool), True, None
    workspace = DeviceWorkspace(*shape)
    workspace._actions[0] = workspace._launches.actions(False)
    alive = weakref.ref(workspace)
    gc.disable()
    try:
        del workspace
        assert alive() is None
    finally:
        gc.enable()


@in_python
@pytest.mark.parametrize("pooled", [True, False])
def test_memory_that_garbage_holds_is_collected(cupy: Any, pooled: bool) -> None:
    """CuPy without a pool, as by ``cupy.cuda.set_allocator(None)``, raises another error."""
    import fake_cupy

    class Cycle:
        def __init__(self) -> None:
            self.array, self.cycle = cupy.empty(1 << 20, np.float64), self

    steps, grad = cupy.asarray(np.ones((8, 20, 20))), cupy.asarray(np.ones(20))
    plan = sparsescan.plan(steps, schedule="blelloch")
    state = fake_cupy.state
    state.pooled = pooled
    gc.disable()
    try:
        Cycle()
        state.room[0] = state.used[0] + 3000
        plan.exclusive_scan(grad, steps)
    finally:
        gc.enable()
    state.room[0] = state.used[0] + 3000
    with pytest.raises(MemoryLimitError, match=r"would take .*; the device has "):
        sparsescan.plan(steps, schedule="blelloch").exclusive_scan(grad, steps)


@in_python
def test_memory_is_given_back_on_its_device(cupy: Any) -> None:
    """Streams wait for the last run; a null stream is that of the current device."""
    import fake_cupy

    with cupy.cuda.Device(1):
        steps, grad = cupy.asarray(np.ones((8, 3, 3))), cupy.asarray(np.ones(3))
    plan = sparsescan.plan([Pattern.dense((3, 3))] * 8, schedule="blelloch")
    plan.exclusive_scan(grad, steps)
    gc.collect()
    fake_cupy.state.waited.clear()
    del plan
    gc.collect()
    assert set(fake_cupy.state.waited) == {(1, 0)}


@in_python
def test_a_plan_that_goes_does_not_spoil_a_capture(cupy: Any) -> None:
    steps, grad = cupy.asarray(np.ones((8, 3, 3))), cupy.asarray(np.ones(3))
    stream = cupy.cuda.Stream(non_blocking=True)
    plan = sparsescan.plan([Pattern.dense((3, 3))] * 8, schedule="blelloch")
    with stream:
        plan.exclusive_scan(grad, steps)
        stream.begin_capture()
        del plan
        gc.collect()
        stream.end_capture()


def test_two_large_steps_that_samples_share(cupy: Any) -> None:
    """Operands of cuBLAS have one sample, and its products none."""
    rng = np.random.default_rng(8)
    size = BLAS_SIZE + 1
    steps = [rng.standard_normal((size, size)) / size for _ in range(6)]
    grad = rng.standard_normal((3, size))
    result = sparsescan.exclusive_scan(
        cupy.asarray(grad), [cupy.asarray(step) for step in steps], schedule="blelloch"
    )
    assert_within(to_host(result), sequential(grad, steps), np.float64)


def test_a_plan_chooses_for_where_the_data_is(cupy: Any) -> None:
    """One of bare patterns runs in both places, and prints what it is predicted to take there."""
    rng = np.random.default_rng(5)
    jacobians = rng.standard_normal((12, 2, 3, 3)).astype(np.float32)
    grad = np.ones((2, 3), np.float32)
    expected = sequential(grad, jacobians, dtype=np.float32)
    plan = sparsescan.plan([Pattern.dense((3, 3))] * 12)
    for _ in range(2):
        assert_within(plan.exclusive_scan(grad, jacobians), expected, np.float32)
        assert " thread" in str(plan)
        there = plan.exclusive_scan(cupy.asarray(grad), cupy.asarray(jacobians))
        assert_within(to_host(there), expected, np.float32)
        assert "for a batch of 2 on a GPU" in str(plan)
        told = sparsescan.plan(cupy.asarray(jacobians), batch=2, dtype=np.float32)
        assert (plan.schedule, plan.reason) == (told.schedule, told.reason)


def test_steps_to_solve_with_are_refused(cupy: Any) -> None:
    text = r"jacobians\[1\] is a step to solve with, which runs on the CPU only"
    steps = [np.eye(2), SolveStep(np.eye(2))]
    there = [cupy.eye(2), SolveStep(cupy.eye(2))]
    plan = sparsescan.plan([Pattern.dense((2, 2)), steps[1].pattern])
    for call in (
        lambda: sparsescan.exclusive_scan(np.ones(2), steps, device="cuda"),
        lambda: sparsescan.exclusive_scan(cupy.ones(2), there),
        lambda: plan.inclusive_scan(cupy.ones(2), there),
    ):
        with pytest.raises(DeviceError, match=text):
            call()
