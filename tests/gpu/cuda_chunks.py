"""The chunked kernels by themselves, in the simulator or on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_device import SIMULATED, cupy_or_stand_in, run_as_compiled_if
from oracles import assert_within, indices_of, mask, sequential
from sampling import slow

import sparsescan
from sparsescan import CSRChain
from sparsescan.execution.cuda.chunks import (
    H100,
    ChunkForm,
    chunk_count,
    in_one_launch,
    multiprocessors_of,
)
from sparsescan.kernels.cuda.chained import layout_of
from sparsescan.kernels.cuda.chunk_costs import registers_of
from sparsescan.kernels.cuda.chunks import chunk_kernels, launches, scratch
from sparsescan.kernels.cuda.device import launch
from sparsescan.kernels.cuda.tables import Run

DTYPES = (np.float32, np.float64)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cupy_or_stand_in(monkeypatch)


class Device:
    """Memory of the device, by address."""

    def __init__(self, cupy: Any) -> None:
        self._cupy, self._kept = cupy, []

    def place(self, array: np.ndarray) -> int:
        if array.size == 0:
            return 0
        self._kept.append(self._cupy.asarray(array))
        return int(self._kept[-1].data.ptr)

    def room(self, count: int, value: Any) -> int:
        """Poisoned, so that what is read has to have been written."""
        return self.place(np.full(max(count, 1), value))


def scan(
    cupy: Any,
    grad: np.ndarray,
    chain: CSRChain,
    chunk: int,
    local_grads: list[Any] | None = None,
    *,
    tables: bool = False,
    backwards: bool = False,
    misaligned: bool = False,
) -> tuple[np.ndarray, bool]:
    """Run an inclusive scan in three phases; return whether it had to be repaired, too.

    Addresses of steps and local gradients come from a table, or are computed; the last step lies
    first in memory, or the first.
    """
    device = Device(cupy)
    data = chain.data if chain.batch is not None else chain.data[:, None]
    steps, samples, nnz = data.shape
    batch, size = grad.shape
    dtype, itemsize = chain.dtype, chain.dtype.itemsize
    order = slice(None, None, -1) if backwards else slice(None)
    stored = np.concatenate([np.full(int(misaligned), np.nan, dtype), data[order].ravel()])
    to_step, to_sample = samples * nnz * itemsize, nnz * itemsize if samples > 1 else 0
    base = device.place(stored) + misaligned * itemsize
    if backwards:
        base, to_step = base + (steps - 1) * to_step, -to_step
    kernels = chunk_kernels(size, nnz, dtype)

    run = np.zeros(Run.WIDTH + 2 * steps + steps + 1, np.int64)
    if tables:
        rows = run[Run.WIDTH : Run.WIDTH + 2 * steps].reshape(steps, 2)
        rows[:, 0], rows[:, 1] = base + to_step * np.arange(steps), to_sample
    else:
        run[[Run.BASE, Run.STEP, Run.SAMPLE]] = base, to_step, to_sample
    out = np.full((steps + 1, batch, size), np.nan, dtype)
    out[0] = grad
    if local_grads is not None:
        # That of the first gradient is in it already.
        out[0] += 0 if local_grads[0] is None else local_grads[0]
        if tables:
            run[Run.LOCALS] = Run.WIDTH + 2 * steps
            run[Run.WIDTH + 2 * steps :] = [
                0 if array is None else device.place(array) for array in local_grads
            ]
        else:
            stacked = np.stack(local_grads[::-1] if backwards else local_grads)
            run[Run.LOCAL_BASE], run[Run.LOCAL_STEP] = device.place(stacked), stacked[0].nbytes
            if backwards:
                run[Run.LOCAL_BASE] += steps * stacked[0].nbytes
                run[Run.LOCAL_STEP] *= -1
    run[Run.OUT] = device.place(out)
    gradients = device._kept[-1]

    places = 0
    if nnz < size * size:
        rows = np.repeat(np.arange(size), np.diff(chain.indptr))
        places = device.place((rows * size + chain.indices).astype(np.int32))
    values, exponents = scratch(size, steps, batch, chunk, False)
    columns = device.room(values, dtype.type(np.nan))
    powers = device.room(exponents, np.int32(99))
    table = device.place(run)
    flag = device._kept[-1]
    prepared = launches(kernels, table, places, columns, powers, steps, batch, chunk)
    assert len(prepared) == (4 if chunk < steps else 2)
    for kernel, blocks, threads, arguments in prepared:
        launch(kernel, blocks, threads, 0, *arguments)
    return gradients.get(), bool(flag.get()[Run.FLAG])


def chain_of(
    structure: str, steps: int, batch: int | None, size: int, dtype: Any, seed: int
) -> tuple[np.ndarray, CSRChain]:
    """Return a gradient, and steps that neither grow nor decay much.

    Steps of one structure and size have one pattern, as each number of entries has its kernels.
    """
    where = np.ones((size, size), bool)
    if structure != "dense":
        where = mask(np.random.default_rng([size, 11]), structure, size, size)
    indices, indptr = indices_of(where)
    rng = np.random.default_rng([seed, steps, size])
    shape = (steps, len(indices)) if batch is None else (steps, batch, len(indices))
    data = rng.standard_normal(shape) / np.sqrt(max(len(indices) / size, 1))
    grad = rng.standard_normal((2 if batch is None else batch, size))
    return grad.astype(dtype), CSRChain(data.astype(dtype), indices, indptr, (size, size))


def locals_of(steps: int, grad: np.ndarray, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(grad.shape).astype(grad.dtype) for _ in range(steps + 1)]


def check(
    result: tuple[np.ndarray, bool], grad: np.ndarray, chain: CSRChain, local: Any = None
) -> None:
    gradients, repaired = result
    assert not repaired
    expected = sequential(grad, chain, local, inclusive=True, dtype=chain.dtype)
    assert_within(gradients, expected, chain.dtype)


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("batch", [None, 3])
def test_where_arrays_are(cupy: Any, tables: bool, backwards: bool, batch: int | None) -> None:
    """In tables or stacks, reversed ones too; of each sample or shared by all."""
    grad, chain = chain_of("dense", 7, batch, 3, np.float32, 0)
    local = locals_of(7, grad)
    if tables:
        local[1] = local[4] = local[7] = None
    result = scan(cupy, grad, chain, 3, local, tables=tables, backwards=backwards)
    check(result, grad, chain, local)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4, 20])
def test_whole_vectors_and_single_values_are_loaded(cupy: Any, dtype: Any, size: int) -> None:
    run_as_compiled_if((size, dtype) == (20, np.float32))
    grad, chain = chain_of("dense", 5, 2, size, dtype, 1)
    aligned, misaligned = (
        scan(cupy, grad, chain, 2, misaligned=misaligned)[0] for misaligned in (False, True)
    )
    check((aligned, False), grad, chain)
    np.testing.assert_array_equal(aligned, misaligned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("structure", ["sparse", "empty rows", "banded", "diagonal", "permutation"])
def test_patterns(cupy: Any, dtype: Any, structure: str) -> None:
    run_as_compiled_if(
        (structure, dtype)
        in (("empty rows", np.float32), ("diagonal", np.float64), ("permutation", np.float64))
    )
    grad, chain = chain_of(structure, 7, 3, 9, dtype, 2)
    local = locals_of(7, grad)
    check(scan(cupy, grad, chain, 3, local), grad, chain, local)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 20, 21, *slow(2, 9, 16, 33)])
def test_sizes(cupy: Any, size: int, dtype: Any) -> None:
    """Many chains to a warp, one, or one for several warps; rows that are no whole vectors."""
    run_as_compiled_if((size, dtype) in ((1, np.float32), (20, np.float64)))
    grad, chain = chain_of("dense", 5, 3, size, dtype, 3)
    local = locals_of(5, grad)
    check(scan(cupy, grad, chain, 2, local), grad, chain, local)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("structure", ["dense", "banded"])
def test_the_largest_size(cupy: Any, structure: str, dtype: Any) -> None:
    """In float64 its columns are those of several blocks."""
    run_as_compiled_if((structure, dtype) in (("dense", np.float64), ("banded", np.float32)))
    grad, chain = chain_of(structure, 3, 1, 64, dtype, 4)
    local = locals_of(3, grad)
    check(scan(cupy, grad, chain, 2, local), grad, chain, local)


# ---------------------------------------------------------------------------------------------
# Range
# ---------------------------------------------------------------------------------------------

# Beyond the range of the dtype when taken to the fourth power.
FAR = {np.float32: 1e12, np.float64: 1e90}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("size", [3, 9])
def test_products_beyond_the_range_of_a_dtype(
    cupy: Any, dtype: Any, inverse: bool, size: int
) -> None:
    """Gradients stay in range, the product of a chunk does not."""
    run_as_compiled_if(size == 3)
    scale = 1 / FAR[dtype] if inverse else FAR[dtype]
    grad, chain = chain_of("dense", 8, 2, size, dtype, 5)
    chain.data[0:3:2] *= dtype(scale)
    chain.data[1:4:2] *= dtype(1 / scale)
    chain.data[4:6] *= dtype(scale)
    grad *= dtype(1 / np.sqrt(scale))
    check(scan(cupy, grad, chain, 4), grad, chain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("structure", ["dense", "banded", "permutation"])
@pytest.mark.parametrize("factor", [2.0**-9, 2.0**9])
def test_decay_and_growth(cupy: Any, dtype: Any, structure: str, factor: float) -> None:
    """Columns are brought back into their band every few steps, one or two in each chunk.

    The gradient keeps its size: every other chunk does the opposite of the one before.
    """
    run_as_compiled_if(structure != "banded" and dtype is np.float64)
    grad, chain = chain_of(structure, 96, 1, 9, dtype, 6)
    chunks = np.arange(96) // 24
    chain.data[chunks % 2 == 0] *= dtype(factor)
    chain.data[chunks % 2 == 1] /= dtype(factor)
    grad *= dtype(factor**-12)
    check(scan(cupy, grad, chain, 24), grad, chain)


def test_columns_may_explode_and_decay_beside_each_other(cupy: Any) -> None:
    _, chain = chain_of("dense", 40, 1, 3, np.float32, 0)
    chain.data[:] = np.diag([8.0, 0.125, 1.0]).ravel()
    grad = np.array([[2.0**-126, 1.0, 0.0]], np.float32)
    gradients, repaired = scan(cupy, grad, chain, 20)
    assert not repaired
    powers = 3 * np.arange(41)
    np.testing.assert_array_equal(gradients[:, 0, 0], np.ldexp(np.float32(1), powers - 126))
    np.testing.assert_array_equal(gradients[:, 0, 1], np.ldexp(np.float32(1), -powers))


def test_a_local_gradient_after_long_decay(cupy: Any) -> None:
    """Gradients from before are far below the range by then, and no reason to repair anything."""
    grad, chain = chain_of("dense", 40, 1, 3, np.float32, 7)
    chain.data[:] *= np.float32(2.0**-9)
    local: list[Any] = [None] * 41
    local[2] = local[19] = local[35] = np.ones_like(grad)
    check(scan(cupy, grad, chain, 20, local, tables=True), grad, chain, local)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("structure", ["dense", "banded", "diagonal", "permutation"])
@pytest.mark.parametrize("step", [2, 5])
def test_what_is_not_finite_is_left_to_the_linear_scan(
    cupy: Any, structure: str, bad: float, step: int
) -> None:
    """Also where a pattern has no entry, which is not reached; in a product, or after the last."""
    run_as_compiled_if(structure != "banded")
    grad, chain = chain_of(structure, 6, 2, 9, np.float64, 8)
    chain.data[step, 1, 0] = bad
    gradients, repaired = scan(cupy, grad, chain, 2)
    assert repaired
    with np.errstate(all="ignore"):
        expected = np.asarray(sparsescan.inclusive_scan(grad, chain, schedule="linear"))
    np.testing.assert_allclose(gradients, expected, rtol=1e-13, atol=1e-13)


def test_overflow_that_only_products_see(cupy: Any) -> None:
    """Steps too large for the band overflow in a product; the gradients are right all the same."""
    grad, chain = chain_of("dense", 6, 1, 3, np.float32, 9)
    chain.data[0] *= np.float32(1e-37)
    chain.data[1] *= np.float32(1e36)
    chain.data[2] *= np.float32(1e36)
    grad[:] = 0
    grad[0, 0] = 1e-30
    gradients, _ = scan(cupy, grad, chain, 3)
    expected = sequential(grad, chain, inclusive=True, dtype=chain.dtype)
    assert_within(gradients, expected, chain.dtype)


# ---------------------------------------------------------------------------------------------
# Into how many chunks
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 20, 64])
def test_chunk_count(size: int) -> None:
    form = ChunkForm(size, size * size)
    for steps in (1, 2, 10, 100, 1000, 30_000):
        for batch in (1, 16, 256, 10_000):
            count = chunk_count(steps, batch, form, H100)
            assert 1 <= count <= steps
    assert chunk_count(10, 16, form, H100) == 1
    # Enough samples to fill a device: products would only make more work.
    assert chunk_count(1000, 10_000, form, H100) == 1
    # More steps never make fewer chunks.
    counts = [chunk_count(steps, 4, form, H100) for steps in (10, 100, 1000, 10_000, 100_000)]
    assert counts == sorted(counts)
    assert counts[-1] > 10


def test_blocks_at_once() -> None:
    """As NVIDIA's calculator of occupancy has it."""
    # Registers, of which a warp has 256 at a time, and four warps as many.
    assert H100.at_once(32, 128, 0) == 16
    assert H100.at_once(32, 129, 0) == H100.at_once(32, 168, 0) == 12
    assert H100.at_once(256, 128, 0) == 2
    # Threads, blocks, and shared memory.
    assert H100.at_once(1024, 16, 0) == 2
    assert H100.at_once(32, 32, 0) == 32
    assert H100.at_once(128, 96, 48 * 1024) == 4
    small = H100._replace(shared=100 * 1024, threads=1536, blocks=24)
    assert small.at_once(128, 96, 48 * 1024) == 2
    assert H100.at_once(1024, 255, 1 << 20) == 1


def test_a_device_has_as_many_chunks_as_it_has_room_for(cupy: Any) -> None:
    """All that fit at once, of 16 samples and 30,000 steps: two chains to a block."""
    form = ChunkForm(20, 400)
    assert chunk_count(30_000, 16, form, H100) == 132 * 16 * 2 // 16
    assert chunk_count(30_000, 16, form, H100._replace(registers=1 << 15)) == 132 * 8 * 2 // 16
    assert chunk_count(30_000, 16, form, H100._replace(shared=64 * 1024)) == 132 * 8 * 2 // 16
    own = multiprocessors_of(cupy)
    assert own.number == cupy.cuda.Device().attributes["MultiProcessorCount"]
    assert own.registers >= 1 << 16
    assert 1 <= chunk_count(30_000, 16, form, own) <= 30_000


@pytest.mark.skipif(SIMULATED, reason="there is no code for a device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_registers_are_those_of_the_code_that_is_loaded(cupy: Any, dtype: Any) -> None:
    """Or as many blocks fit beside each other."""
    grad, chain = chain_of("dense", 5, 2, 20, dtype, 1)
    check(scan(cupy, grad, chain, 2), grad, chain)
    kernels = chunk_kernels(20, 400, np.dtype(dtype))
    ask = getattr(kernels.multiply, "get_regs_per_thread", None)
    if ask is None:
        pytest.skip("the kernel does not say")
    (registers,) = ask().values()
    tiles, own = kernels.tiles, multiprocessors_of(cupy)
    blocks = [
        own.at_once(tiles.threads, count, tiles.shared)
        for count in (registers, registers_of(20, grad.itemsize))
    ]
    assert blocks[0] == blocks[1], f"{registers} registers"


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_one_launch(dtype: Any) -> None:
    """As long as slopes fit, where samples keep a device busy while gradients are passed on."""
    dtype, n = np.dtype(dtype), 30_000
    layout = layout_of(20, dtype.itemsize)
    assert layout is not None

    def one(batch: int, chunk: int, size: int = 20, terms: int = 1, states: int = 1) -> bool:
        return in_one_launch(ChunkForm(size, size, terms, states), dtype, n, batch, chunk)

    for batch, expected in ((16, True), (64, True), (1, False)):
        count = chunk_count(n, batch, ChunkForm(20, 20, terms=1), H100, itemsize=dtype.itemsize)
        assert one(batch, -(-n // count)) is expected
    assert one(16, layout.longest)
    assert not one(16, layout.longest + 1)
    assert not one(16, 100, terms=0)
    assert not one(16, 100, terms=4)
    assert not one(16, 100, size=40, terms=2, states=2)
    assert not one(16, 100, size=33)
