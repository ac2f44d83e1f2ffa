"""Scans with ``device="cuda"`` by kernels as compiled; those of `cuda_scan.py` run so, too."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

import fake_cupy  # noqa: E402
import ptx.stand_in  # noqa: E402
from oracles import Gradients, assert_within, sequential  # noqa: E402
from ptx.runner import Traffic  # noqa: E402

import sparsescan  # noqa: E402
from sparsescan import ImplicitChain, ImplicitPattern, Pattern, Schedule  # noqa: E402
from sparsescan.execution.cuda import chunks as chunk_forms  # noqa: E402
from sparsescan.execution.cuda.chunks import H100, ChunkForm, chunk_count  # noqa: E402
from sparsescan.kernels.cuda.chained import layout_of  # noqa: E402
from sparsescan.kernels.cuda.checks import is_safe  # noqa: E402


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    ptx.stand_in.install(monkeypatch)
    return fake_cupy.install(monkeypatch)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, Traffic]]:
    """Return the kernel, blocks and threads of every launch, and what it did."""
    return ptx.stand_in.count(monkeypatch)


@pytest.fixture
def launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return fake_cupy.watch(monkeypatch)


def dense_chain(
    steps: int, batch: int, size: int, dtype: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return steps that neither grow nor decay much."""
    rng = np.random.default_rng(size)
    jacobians = rng.standard_normal((steps, batch, size, size)) / np.sqrt(size)
    return rng.standard_normal((batch, size)).astype(dtype), jacobians.astype(dtype)


def test_index_arrays_are_checked(cupy: Any) -> None:
    """By as many blocks as a large matrix has."""
    rng = np.random.default_rng(0)
    matrix = sp.random_array((3000, 500), density=0.02, rng=rng, format="csr")
    indptr, indices = (array.astype(np.int32) for array in (matrix.indptr, matrix.indices))
    assert is_safe(cupy.asarray(indptr), cupy.asarray(indices), 500)
    for array, place, value in (
        (indices, 29_999, 500),
        (indices, 4_000, -1),
        (indptr, 1_700, 40_000),
        (indptr, 0, 1),
    ):
        before, array[place] = array[place], value
        assert not is_safe(cupy.asarray(indptr), cupy.asarray(indices), 500)
        array[place] = before


def test_one_chunk_of_small_steps(launches: list[Any]) -> None:
    grad, steps = dense_chain(9, 70, 3, np.float32)
    schedule = Schedule.chunked(9, 1)
    gradients = sparsescan.exclusive_scan(grad, steps, schedule=schedule, device="cuda")
    assert {launch.kernel for launch in launches} == {"sweep", "repair"}
    assert_within(gradients, sequential(grad, steps, dtype=np.float32), np.float32)


def test_arrays_of_another_device(cupy: Any, launches: list[Any]) -> None:
    """Tensors of a library that has a current device of its own: work goes where they are."""
    grad, steps = dense_chain(9, 70, 3, np.float32)
    there = [fake_cupy.Tensor(array, 1) for array in (grad, steps)]
    assert cupy.cuda.Device().id == 0
    gradients = sparsescan.exclusive_scan(*there, schedule=Schedule.chunked(9, 1))
    assert {launch.device for launch in launches} == {1}
    assert {gradient.device.id for gradient in gradients} == {1}
    gradients = [gradient.get() for gradient in gradients]
    assert_within(gradients, sequential(grad, steps, dtype=np.float32), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype", "batch"), [(20, np.float32, 16), (20, np.float64, 5)])
def test_chunks_of_a_long_recurrence(
    launches: list[Any], size: int, dtype: Any, batch: int
) -> None:
    grad, steps = dense_chain(600, batch, size, dtype)
    schedule = Schedule.chunked(600, 25)
    gradients = sparsescan.exclusive_scan(grad, steps, schedule=schedule, device="cuda")
    assert {launch.kernel for launch in launches} == {"multiply", "carry", "sweep", "repair"}
    assert_within(gradients, sequential(grad, steps, dtype=dtype), dtype)


def scan_implicit_steps(size: int, batch: int, chunks: int, counts: tuple[int, ...]) -> None:
    """Scan chains of so many chunks, of each number of steps, by slopes and shared weights."""
    rng = np.random.default_rng()
    pattern = ImplicitPattern([Pattern.diagonal(size), Pattern.dense((size, size))], shared=[1])
    weights = np.linalg.qr(rng.standard_normal((size, size)))[0].ravel().astype(np.float32)
    for chunk in counts:
        slopes = rng.random((chunks * chunk, batch, size), np.float32)
        grad = rng.standard_normal((batch, size)).astype(np.float32)
        chain = ImplicitChain([slopes, weights], pattern)
        tree = Schedule.chunked(len(slopes), chunks)
        sparsescan.exclusive_scan(grad, chain, schedule=tree, device="cuda")


def test_one_launch_moves_slopes_and_gradients_once(
    traffic: list[tuple[str, int, int, Traffic]],
) -> None:
    """At most 100 MB of 30,000 steps of 20 units and 16 samples, of which each sample has rows."""
    size, batch, chunks, counts = 20, 16, 2, (6, 12)
    scan_implicit_steps(size, batch, chunks, counts)
    assert [name for name, *_ in traffic] == 2 * ["chained", "repair"]
    few, many = (did for name, _, _, did in traffic if name == "chained")
    step, more = 4 * batch * size, chunks * (counts[1] - counts[0])
    assert many.bytes["global"] - few.bytes["global"] == 2 * more * step
    # A row of 80 bytes takes three sectors, of one sample; half as many where others have it, too.
    assert many.together.sectors - few.together.sectors == 2 * more * batch * 3
    assert many.together.once - few.together.once == 2 * more * step // 32
    # As on a GPU, with as many chunks and steps: what does not grow with these is of each chunk.
    count = chunk_count(30_000, batch, ChunkForm(size, size, terms=1), H100)
    fixed = few.together.sectors - 6 * batch * (chunks * counts[0] - 1)
    moved = 32 * (6 * batch * 30_000 + fixed / chunks * count)
    print(f"{moved / 1e6:.1f} MB moved, {2 * 30_000 * step / 1e6:.1f} MB of slopes and gradients")
    assert 2 * 30_000 * step <= moved <= 100e6


@pytest.mark.slow
def test_the_longest_chunks_of_one_launch(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slopes fill shared memory, and nothing is written behind it."""
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: True)
    layout = layout_of(20, 4)
    assert layout is not None
    rng, steps = np.random.default_rng(), 2 * layout.longest
    pattern = ImplicitPattern([Pattern.diagonal(20), Pattern.dense((20, 20))], shared=[1])
    # Rows of one entry, so that bounds of so many steps are finite.
    weights = (np.eye(20)[rng.permutation(20)] * rng.choice([-1, 1], 20)).astype(np.float32)
    slopes = rng.uniform(0.9, 1.1, (steps, 1, 20)).astype(np.float32)
    grad = rng.standard_normal((1, 20)).astype(np.float32)
    chain, tree = ImplicitChain([slopes, weights.ravel()], pattern), Schedule.chunked(steps, 2)
    gradients = sparsescan.inclusive_scan(grad, chain, schedule=tree, device="cuda")
    assert [launch.kernel for launch in launches] == ["chained", "repair"]
    factors = [factor for row in slopes for factor in (row[:, :, None] * np.eye(20), weights)]
    expected = sequential(grad, factors, inclusive=True, dtype=np.float32)
    expected = Gradients(expected.exact[::2], expected.bounds[::2])
    assert_within(gradients, expected, np.float32)


@pytest.mark.slow
def test_more_blocks_than_a_device_runs_at_once(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take their chunks by tickets, which begin anew in each run."""
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: True)
    rng, size, batch, steps, chunks = np.random.default_rng(), 3, 16, 150, 75
    pattern = ImplicitPattern([Pattern.diagonal(size), Pattern.dense((size, size))], shared=[1])
    weights = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
    slopes = rng.uniform(0.9, 1.1, (steps, batch, size)).astype(np.float32)
    grad = rng.standard_normal((batch, size)).astype(np.float32)
    chain = ImplicitChain([slopes, weights.ravel()], pattern)
    plan = sparsescan.plan(chain, schedule=Schedule.chunked(steps, chunks), device="cuda")
    first, second = (plan.exclusive_scan(grad, chain) for _ in range(2))
    blocks = {launch.blocks for launch in launches if launch.kernel == "chained"}
    assert blocks == {chunks * batch}
    assert first.tobytes() == second.tobytes()
    exact = grad.astype(np.float64)
    for row, gradient in zip(slopes, first, strict=True):
        np.testing.assert_allclose(gradient, exact, atol=1e-4 * np.abs(exact).max())
        exact = (row * exact) @ weights.T


def test_implicit_steps_move_slopes_twice_and_gradients_once(
    traffic: list[tuple[str, int, int, Traffic]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No values, in three launches: of 30,000 steps not much more than that."""
    monkeypatch.setattr(chunk_forms, "in_one_launch", lambda *about, **more: False)
    size, batch, chunks, counts = 20, 16, 3, (4, 9)
    scan_implicit_steps(size, batch, chunks, counts)
    few, many = (
        {name: did.bytes["global"] for name, _, _, did in half}
        for half in (traffic[: len(traffic) // 2], traffic[len(traffic) // 2 :])
    )
    step, more = 4 * batch * size, counts[1] - counts[0]
    assert many["multiply"] - few["multiply"] == (chunks - 1) * more * step
    assert many["sweep"] - few["sweep"] == chunks * more * 2 * step
    assert many["carry"] == few["carry"]
    # As on a GPU, with as many chunks and steps: what does not grow with these is of each chunk.
    # There is room for twelve blocks, of two chains, on each multiprocessor.
    count = H100.number * 12 * 2 // batch
    ahead = -(-30_000 // count) - counts[0]
    asked = (few["multiply"] / (chunks - 1) + ahead * step) * (count - 1)
    asked += (few["sweep"] / chunks + ahead * 2 * step) * count
    asked += few["carry"] / (chunks - 1) * (count - 1)
    # Slopes twice, gradients once, and products, which are written and read.
    products = 2 * (count - 1) * (size + 2) * step
    needed = 3 * 30_000 * step + products
    print(f"{asked / 1e6:.1f} MB asked for, {needed / 1e6:.1f} MB needed")
    assert needed <= asked <= 1.2 * needed
    assert asked < 0.1 * 2 * 30_000 * size * step


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["linear", "blelloch", "chunked"])
def test_large_sparse_steps(launches: list[Any], schedule: str) -> None:
    """Several tiles, blocks that share the rows of a product, and rows longer than a tile."""
    rng = np.random.default_rng(4)
    sizes = [700, 2500, 900, 4100, 300, 800]
    steps = [
        sp.random_array((rows, cols), density=0.02, rng=rng, format="csr", dtype=np.float32)
        for cols, rows in itertools.pairwise(sizes)
    ]
    steps[2] = sp.vstack([steps[2][:-1], sp.csr_array(np.ones((1, 900), np.float32))]).tocsr()
    grad = rng.standard_normal((2, sizes[0])).astype(np.float32)
    tree = Schedule.chunked(5, 2) if schedule == "chunked" else schedule
    gradients = sparsescan.inclusive_scan(grad, steps, schedule=tree, device="cuda")
    assert max(launch.blocks for launch in launches) > 2
    assert {launch.threads for launch in launches} <= {32, 64, 128, 256}
    assert_within(gradients, sequential(grad, steps, inclusive=True, dtype=np.float32), np.float32)
