"""Predicted times, calibration and memory of scans on a CUDA device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_memory import check_memory, gradients, random_plan, values
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import SIMULATED, cupy_or_stand_in, run_as_compiled_if
from sampling import examples

from sparsescan import ImplicitChain, ImplicitPattern, Pattern, Schedule
from sparsescan.cli.main import main
from sparsescan.execution.cuda.workspace import device_bytes
from sparsescan.kernels.cuda import device
from sparsescan.plan import calibrate, calibrate_device
from sparsescan.plan.calibrate import Trial
from sparsescan.plan.choice import PlanChoice, PlanOptions
from sparsescan.plan.costs import cpu as costs
from sparsescan.plan.costs import cuda as device_costs
from sparsescan.plan.costs.cuda import Gpu, GpuModel, gpu_file, load_gpu
from sparsescan.plan.costs.operations import FAMILIES
from sparsescan.plan.scan_plan import ScanPlan
from sparsescan.symbolic.pattern import of_mask
from sparsescan.symbolic.program import Program

simulated = pytest.mark.skipif(not SIMULATED, reason="looks into the stand-in for CuPy")

F4 = np.dtype(np.float32)
seeds = st.integers(0, 2**32 - 1)
# Nothing takes any time but launches.
LAUNCHES = Gpu(
    name="",
    families={"float32": np.zeros((len(FAMILIES), 3)).tolist()},
    product_step={"float32": [0, 0, 0]},
    vector_step={"float32": [0, 0]},
    matmul={"float32": 0},
    blocks=1,
    run=0,
    launch=1,
    plain=1,
    cache=np.inf,
    bandwidth=1,
)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


@simulated
@settings(max_examples=examples(100))
@given(seeds, st.integers(1, 3))
def test_predicted_launches_are_those_that_are_made(cupy: Any, seed: int, batch: int) -> None:
    """Kernels and cuBLAS are counted, whatever the blocks compute."""
    plan = random_plan(seed, 10, 12)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        multiply = cupy.matmul
        patch.setattr(device, "launch", lambda *arguments: calls.append(arguments))
        patch.setattr(cupy, "matmul", lambda *a, out: calls.append(a) or multiply(*a, out=out))
        (grad,) = gradients(cupy, plan, batch, 1)
        plan.exclusive_scan(grad, values(cupy, plan, batch))
    run, times = GpuModel(LAUNCHES, F4, batch).level_times(plan._latest.program)
    assert run + sum(times) == len(calls)
    assert len(times) == len(plan.schedule.levels)


@simulated
@settings(max_examples=examples(50))
@given(seeds, st.integers(1, 5))
def test_a_program_takes_no_more_memory_than_was_said(cupy: Any, seed: int, batch: int) -> None:
    check_memory(cupy, random_plan(seed, 20, 12), batch)


@simulated
@pytest.mark.parametrize(
    ("steps", "chunks", "kernels"),
    [(24, 2, ["chained", "repair"]), (24, 12, ["multiply", "carry", "sweep", "repair"])],
)
def test_implicit_steps_are_in_one_launch_where_that_takes_less(
    cupy: Any, steps: int, chunks: int, kernels: list[str]
) -> None:
    """As predicted, and no more memory than was said."""
    from fake_cupy import state

    pattern = ImplicitPattern([Pattern.diagonal(3), Pattern.dense((3, 3))], shared=[1])
    choice = PlanChoice(Schedule.chunked(steps, chunks))
    plan = ScanPlan([pattern] * steps, choice, PlanOptions(device="cuda"))
    chain = ImplicitChain([cupy.ones((steps, 2, 3), F4), cupy.ones(9, F4)], pattern)
    grad, calls = cupy.ones((2, 3), F4), []
    gc.collect()
    before = state.peak[0] = state.used[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "launch", lambda *about: calls.append(about[0]))
        gradients = plan.exclusive_scan(grad, chain)
    assert [kernel.py_func.__name__ for kernel in calls] == kernels
    program = plan._latest.program
    run, times = GpuModel(LAUNCHES, F4, 2).level_times(program)
    assert run + sum(times) == len(kernels)
    assert len(times) == len(plan.schedule.levels)
    taken = state.peak[0] - before - gradients.nbytes
    assert taken <= device_bytes(program, F4, 2) <= taken + 2048


@pytest.mark.slow
def test_a_device_is_calibrated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few short chains here, so that nothing can be said of the numbers but that they are."""
    run_as_compiled_if(False)
    monkeypatch.setattr(costs, "machine_file", lambda: tmp_path / "machine.json")
    monkeypatch.setattr(device_costs, "machine_file", costs.machine_file)
    kinds = [Pattern.dense((3, 3)), Pattern.diagonal(3), of_mask(np.tri(3) > 0)]
    once, linear = Schedule.truncated(4, 1), Schedule.linear(3)
    trials = [Trial(Program([a, b] * 2, once)) for a in kinds for b in kinds]
    trials += [Trial(Program([kind] * 3, linear)) for kind in kinds]
    monkeypatch.setattr(calibrate_device, "trials", lambda steps: trials)
    small = {
        "_CHUNKED": 4,
        "_SIZES": (1, 2),
        "_SAMPLES": 3,
        "_CHUNKS": 2,
        "_ROWS": 8,
        "_CALLS": 2,
        "_COPIED": 4096,
    }
    for name, value in small.items():
        monkeypatch.setattr(calibrate_device, name, value)
    monkeypatch.setattr(calibrate, "_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "_TIMES", 1)
    assert load_gpu().name == "H200, estimated"
    assert main(["calibrate", "--device", "cuda"]) == 0
    rows = [line[:16].strip() for line in capsys.readouterr().out.splitlines()]
    assert all(rows.count(family) == 2 for family in FAMILIES)
    gpu = load_gpu()
    assert gpu_file(gpu.name).parent == tmp_path
    assert gpu_file(gpu.name).exists()
    assert gpu.name != "H200, estimated"
    assert gpu.bandwidth > 0
    assert gpu.blocks >= 1
    assert gpu.plain > 0
