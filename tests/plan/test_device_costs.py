"""Predicted times of scans on a GPU: by hand for simple ones, and in the right order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import chains, every_schedule, patterns_of
from sampling import examples

pytest.importorskip("numba.cuda")

import device_memory
import fake_cupy

from sparsescan import ImplicitPattern, Pattern, Schedule
from sparsescan.execution.cuda import chunks as chunk_forms
from sparsescan.execution.cuda import workspace
from sparsescan.kernels.cuda.chunk_costs import chained_turns, multiply_turns
from sparsescan.kernels.cuda.chunks import teams_of
from sparsescan.plan import calibrate_device
from sparsescan.plan.costs import cuda as device_costs
from sparsescan.plan.costs.cuda import Gpu, GpuModel, gpu_file, load_gpu, save_gpu
from sparsescan.plan.costs.operations import FAMILIES, Operations
from sparsescan.symbolic.pattern import of_mask
from sparsescan.symbolic.program import Program

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)
BUILT_IN = load_gpu(Path("no such file"))
TABLES = "families", "product_step", "vector_step", "matmul"


def predicted(
    patterns: Sequence[Pattern],
    schedule: Schedule,
    batch: int = 1,
    dtype: np.dtype[Any] = F4,
    gpu: Gpu = BUILT_IN,
) -> float:
    """Nanoseconds of a scan without those of a run."""
    run, times = GpuModel(gpu, dtype, batch).level_times(Program(patterns, schedule))
    assert len(times) == len(schedule.levels)
    return run - gpu.run + sum(times)


def constants(family: str, dtype: np.dtype[Any] = F4) -> list[float]:
    return BUILT_IN.families[dtype.name][FAMILIES.index(family)]


def stencil(side: int) -> Pattern:
    """Five points of a grid."""
    line = sp.diags_array([np.ones(side - abs(k)) for k in (-1, 0, 1)], offsets=(-1, 0, 1))
    whole = sp.kron(line, sp.eye_array(side)) + sp.kron(sp.eye_array(side), line)
    matrix = sp.csr_array(whole)
    matrix.sort_indices()
    return Pattern(matrix.indptr, matrix.indices, matrix.shape)


# ---------------------------------------------------------------------------------------------
# Levels
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@pytest.mark.parametrize(
    ("family", "pattern"),
    [
        ("dense·x", Pattern.dense((20, 20))),
        ("diagonal·x", Pattern.diagonal(30)),
        ("csr·x", of_mask(np.tri(9) > 0)),
    ],
)
def test_one_block_does_one_small_step_after_the_other(
    family: str, pattern: Pattern, dtype: np.dtype[Any]
) -> None:
    a, b, c = constants(family, dtype)
    step = a * pattern.nnz + b * pattern.shape[0] + c
    for n in (2, 7, 100):
        expected = BUILT_IN.launch + (n - 1) * step
        assert predicted([pattern] * n, Schedule.linear(n), 1, dtype) == pytest.approx(expected)
        # A block each; as many again have to wait.
        samples = int(BUILT_IN.blocks)
        for batch, times in ((samples, 1), (8 * samples, 8)):
            result = predicted([pattern] * n, Schedule.linear(n), batch, dtype)
            expected = BUILT_IN.launch + times * (n - 1) * step
            assert result == pytest.approx(expected, rel=1e-3)


def test_blocks_share_the_rows_of_large_steps_launch_by_launch() -> None:
    pattern = Pattern.diagonal(100 * 1024)
    a, _, c = constants("diagonal·x")
    expected = 9 * (BUILT_IN.launch + a * 1024 + c)
    assert predicted([pattern] * 10, Schedule.linear(10)) == pytest.approx(expected)


def test_a_level_is_one_launch_as_long_as_its_longest_run() -> None:
    """Chunks of a chain that has no kernels of its own."""
    n, size = 30, 8
    gpu = replace(BUILT_IN, blocks=1e9)
    chain = [Pattern.dense((size, size))] * (n - 1) + [Pattern.diagonal(size)]
    vector, product = constants("dense·x"), constants("dense·dense")
    one = vector[0] * size**2 + vector[2]
    # All entries of the product and of two Jacobians; of one in the steps after the first.
    first, later = (
        product[0] * size**3 + product[1] * entries * size**2 + product[2] for entries in (3, 2)
    )
    program = Program(chain, Schedule.chunked(n, 3))
    run, times = GpuModel(gpu, F4, 1).level_times(program)
    assert times == pytest.approx(
        [gpu.launch + first + 8 * later, gpu.launch + one, gpu.launch + 10 * one]
    )
    assert run == gpu.run + gpu.launch  # of the scan that waits for what is not finite


def test_large_dense_products_are_those_of_cublas() -> None:
    """Between two graphs: the call of each, and the start of the second."""
    gpu = replace(BUILT_IN, launch=0, plain=1e9, blocks=1e9)
    pattern = Pattern.dense((256, 256))
    levels = [
        ("product", [[(2, 3, 4)]]),
        ("linear", [[(0, 1, 2), (0, 2, 4)]]),
        ("last", [[(0, 2, 3)]]),
    ]
    schedule = Schedule.from_levels(4, levels)
    _, times = GpuModel(gpu, F4, 1).level_times(Program([pattern] * 4, schedule))
    assert times[0] == 2e9
    slow = replace(gpu, plain=0, matmul={"float32": 1.0})
    _, times = GpuModel(slow, F4, 10).level_times(Program([pattern] * 4, schedule))
    assert times[0] == pytest.approx(10 * 256**3, rel=0.01)


def test_values_that_no_cache_holds_come_from_memory() -> None:
    n, size = 50, 2_000_000
    gpu = replace(BUILT_IN, blocks=1e9)
    moved = (n - 1) * 3 * size * 4
    for cache in (moved - 1, moved):
        result = predicted(
            [Pattern.diagonal(size)] * n, Schedule.linear(n), gpu=replace(gpu, cache=cache)
        )
        assert (result >= moved / gpu.bandwidth) == (cache < moved)


@given(st.data())
def test_any_schedule_takes_some_time_and_more_samples_no_less(data: Any) -> None:
    chain = data.draw(chains(max_n=12, min_size=1))
    if not len(chain.jacobians):
        return
    patterns = patterns_of(chain.jacobians)
    for schedule in every_schedule(len(patterns)):
        program = Program(patterns, schedule)
        times = [
            np.array(GpuModel(BUILT_IN, F4, batch).level_times(program)[1])
            for batch in (1, 16, 10_000)
        ]
        assert (times[0] >= BUILT_IN.launch).all()
        assert (times[1] >= times[0]).all()
        assert (times[2] >= times[1]).all()


# ---------------------------------------------------------------------------------------------
# Chunks
# ---------------------------------------------------------------------------------------------


def test_chunks_of_small_steps_take_four_launches() -> None:
    """With few chains every step waits for the one before; with many the device is the limit."""
    n, size, chunks = 100, 6, 5
    a, b, c = BUILT_IN.product_step["float32"]
    vector = BUILT_IN.vector_step["float32"][0] * size + BUILT_IN.vector_step["float32"][1]
    program = Program([Pattern.dense((size, size))] * n, Schedule.chunked(n, chunks))
    _, times = GpuModel(BUILT_IN, F4, 1).level_times(program)
    launch = BUILT_IN.launch
    assert times == pytest.approx(
        [launch + 20 * (b * size + c), launch + 4 * vector, 2 * launch + 20 * vector]
    )
    batch = 100_000
    _, times = GpuModel(replace(BUILT_IN, cache=1e99), F4, batch).level_times(program)
    assert times[0] == pytest.approx(launch + a * batch * 4 * 20 * size * size * (size + 1))
    _, times = GpuModel(BUILT_IN, F4, batch).level_times(program)
    assert times[2] >= 99 * batch * 4 * size * (size + 1) / BUILT_IN.bandwidth


def test_one_chunk_is_swept_without_products() -> None:
    n, size = 50, 20
    chain = [Pattern.dense((size, size))] * n
    vector = BUILT_IN.vector_step["float32"][0] * size + BUILT_IN.vector_step["float32"][1]
    expected = 2 * BUILT_IN.launch + 49 * vector
    assert predicted(chain, Schedule.chunked(n, 1)) == pytest.approx(expected)


def test_one_launch_of_implicit_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples wait for the gradients of chunks, many for multiply-adds; it takes less."""
    n, size = 30_000, 20
    step = ImplicitPattern([Pattern.diagonal(size), Pattern.dense((size, size))], shared=[1])
    a, b, c = BUILT_IN.product_step["float32"]
    vector = BUILT_IN.vector_step["float32"][0] * size + BUILT_IN.vector_step["float32"][1]
    program, launch = Program([step] * n, Schedule.chunked(n, 75)), BUILT_IN.launch
    teams = teams_of(size, F4)
    _, (*others, last) = GpuModel(replace(BUILT_IN, cache=1e99), F4, 8).level_times(program)
    assert not any(others)
    piece, behind = 400 / teams, 74 * (12 * BUILT_IN.vector_step["float32"][1] + teams * vector)
    assert last == pytest.approx(2 * launch + piece * (b * size + c + vector) + behind)
    _, (*_, last) = GpuModel(replace(BUILT_IN, cache=1e99), F4, 64).level_times(program)
    multiply_adds = 64 * 74 * 400 * size * size * (size + 1)
    made = a * multiply_adds * chained_turns(size, 4)[0] / multiply_turns(size, 4)
    assert last == pytest.approx(2 * launch + made + piece * vector)
    _, moved = GpuModel(replace(BUILT_IN, cache=0, bandwidth=1.0), F4, 16).level_times(program)
    assert sum(moved) == pytest.approx(2 * launch + 2 * (n - 1) * 16 * size * 4)
    one = sum(GpuModel(BUILT_IN, F4, 16).level_times(program)[1])
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: False)
    assert one < sum(GpuModel(BUILT_IN, F4, 16).level_times(program)[1])


def test_the_estimates_are_those_from_the_instructions_of_the_kernels() -> None:
    """H = 20 and 16 samples: 0.42 to 0.55 ms for 30,000 steps; 30 µs and launches for 1,000."""
    step = Pattern.dense((20, 20))
    assert 0.42e6 < predicted([step] * 30_000, Schedule.chunked(30_000, 264), 16) < 0.55e6
    launches = 4 * BUILT_IN.launch
    assert 20e3 < predicted([step] * 1000, Schedule.chunked(1000, 84), 16) - launches < 40e3


# ---------------------------------------------------------------------------------------------
# Which is faster
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@pytest.mark.parametrize(("n", "chunks"), [(1000, 84), (30_000, 264)])
def test_long_chains_of_small_steps_are_cut_into_chunks(
    n: int, chunks: int, dtype: np.dtype[Any]
) -> None:
    chain = [Pattern.dense((20, 20))] * n
    cut = predicted(chain, Schedule.chunked(n, chunks), 16, dtype)
    assert cut < 0.2 * predicted(chain, Schedule.linear(n), 16, dtype)


@pytest.mark.parametrize("dtype", [F4, F8], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_short_chains_are_scanned_linearly(n: int, dtype: np.dtype[Any]) -> None:
    for pattern in (Pattern.dense((20, 20)), Pattern.diagonal(20), stencil(8), stencil(32)):
        chain = [pattern] * n
        for batch in (1, 16):
            linear = predicted(chain, Schedule.linear(n), batch, dtype)
            for schedule in every_schedule(n, (1, 2, 3)):
                assert linear <= predicted(chain, schedule, batch, dtype)


# ---------------------------------------------------------------------------------------------
# Single operations
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    "pattern", [Pattern.dense((400, 400)), stencil(200), Pattern.diagonal(1 << 20)]
)
def test_steps_add_up_to_a_linear_scan(pattern: Pattern, batch: int) -> None:
    program = Program([pattern] * 30, Schedule.linear(30))
    model = GpuModel(replace(BUILT_IN, cache=1e99), F4, batch)
    operations = Operations.of(program, 4, batch, np.full(30, batch > 1))
    _, times = model.level_times(program)
    assert model.step(operations)[:-1].sum() == pytest.approx(sum(times), rel=0.1)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("pattern", [Pattern.dense((20, 20)), of_mask(np.tri(50) > 0)])
def test_shares_add_up_to_a_level_for_all_blocks(pattern: Pattern, batch: int) -> None:
    n = 20_000
    program = Program([pattern] * n, Schedule.truncated(n, 1))
    model = GpuModel(replace(BUILT_IN, cache=1e99), F4, batch)
    operations = Operations.of(program, 4, batch, np.full(n, batch > 1))
    _, times = model.level_times(program)
    first, last = program.levels[0][1][[0, -1], [0, 1]]
    assert model.share(operations)[first:last].sum() == pytest.approx(times[0], rel=0.05)
    assert model.workers == max(BUILT_IN.blocks // batch, 1)


# ---------------------------------------------------------------------------------------------
# Calibration
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_constants_are_found_from_times_that_follow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that takes exactly what is predicted, up to twice what is built in."""
    fake_cupy.install(monkeypatch)
    rng = np.random.default_rng()

    def other(constants: Any) -> Any:
        if isinstance(constants, dict):
            return {name: other(table) for name, table in constants.items()}
        return (np.array(constants) * rng.uniform(1, 2, np.shape(constants))).tolist()

    tables = {name: other(getattr(BUILT_IN, name)) for name in TABLES}
    numbers = {name: other(getattr(BUILT_IN, name)) for name in ("blocks", "run", "launch")}
    known = replace(BUILT_IN, **tables, **numbers)

    def time(program: Program, dtype: np.dtype[Any], batch: int) -> float:
        run, times = GpuModel(known, dtype, batch).level_times(program)
        return run + sum(times)

    def matmul(dtype: np.dtype[Any], rows: int, calls: int) -> float:
        return known.plain if calls > 1 else known.matmul[dtype.name] * rows**3

    monkeypatch.setattr(calibrate_device, "_time", time)
    monkeypatch.setattr(calibrate_device, "_matmul", matmul)
    monkeypatch.setattr(calibrate_device, "_bandwidth", lambda: known.bandwidth)
    actual = calibrate_device.calibrate_device()
    for name in (*tables, *numbers, "plain", "bandwidth"):
        if name != "families":
            expected = getattr(known, name)
            values = expected.items() if isinstance(expected, dict) else [("", expected)]
            for dtype, value in values:
                result = getattr(actual, name)
                result = result[dtype] if dtype else result
                assert result == pytest.approx(value, rel=1e-4), name
    for dtype, rows in known.families.items():
        for family, expected, result in zip(FAMILIES, rows, actual.families[dtype], strict=True):
            if family == "diagonal·x":
                # It has as many multiply-adds as entries.
                expected = [expected[0] + expected[1], 0, expected[2]]
                result = [result[0] + result[1], 0, result[2]]
            if not family.startswith("shared") and family != "csr·csr, dense":
                assert result == pytest.approx(expected, rel=1e-4, abs=1e-6), family


# ---------------------------------------------------------------------------------------------
# Constants, and memory
# ---------------------------------------------------------------------------------------------


def test_constants_on_disk(tmp_path: Path) -> None:
    path = save_gpu(replace(BUILT_IN, name="mine"), tmp_path / "folder" / "gpu.json")
    assert load_gpu(path) == replace(BUILT_IN, name="mine")
    content = json.loads(path.read_text())
    for damaged in (
        "",
        "[]",
        "{",
        json.dumps(content | {"launch": -1}),
        json.dumps(content | {"launch": "2500"}),
        json.dumps(content | {"more": 1}),
        json.dumps(content | {"blocks": 0}),
        json.dumps(content | {"bandwidth": 0}),
        json.dumps(content | {"cache": float("nan")}),
        json.dumps(content | {"matmul": {"float32": 1}}),
        json.dumps(content | {"vector_step": content["product_step"]}),
        json.dumps(content | {"families": {"float32": [], "float64": []}}),
        json.dumps({key: value for key, value in content.items() if key != "plain"}),
    ):
        path.write_text(damaged)
        assert load_gpu(path) == BUILT_IN


def test_every_gpu_has_constants_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_costs, "machine_file", lambda: tmp_path / "machine.json")
    fake_cupy.install(monkeypatch)
    save_gpu(replace(BUILT_IN, name="Another GPU"))
    assert load_gpu() == BUILT_IN
    mine = replace(BUILT_IN, name="Stand-in GPU", launch=1.0)
    path = save_gpu(mine)
    assert path == gpu_file("Stand-in GPU") == tmp_path / "gpu-Stand-in-GPU.json"
    assert load_gpu() == mine


def test_without_a_gpu_the_constants_are_those_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy.install(monkeypatch)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    assert load_gpu() == BUILT_IN


@settings(max_examples=examples(20))
@given(device_memory.seeds, st.integers(1, 5))
def test_a_program_takes_no_more_memory_than_was_said(seed: int, batch: int) -> None:
    """As in tests/gpu/cuda_costs.py, with the blocks of real devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "current", lambda number: contextlib.nullcontext())
        cupy = fake_cupy.install(patch)
        device_memory.check_memory(cupy, device_memory.random_plan(seed, 20, 150), batch)
