"""The runner of compiled kernels: right ones give what they should, and every fault stops one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

from numba import cuda, float32, int32, int64  # noqa: E402
from ptx import FaultError, Traffic, compile_kernel, kept  # noqa: E402

from sparsescan.kernels.cuda.chunks import chunk_kernels  # noqa: E402
from sparsescan.kernels.cuda.device import atomic_add, atomic_max, load, store  # noqa: E402

F4, F8, I4, I8 = np.float32(0), np.float64(0), np.int32(0), np.int64(0)
SIZE = 64


def run(
    kernel: Any,
    blocks: int,
    threads: int,
    *arguments: Any,
    **options: Any,
) -> Traffic:
    """Launch a kernel on arrays and numbers; it may touch these arrays only."""
    places = [x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments]
    memory = [(x.ctypes.data, x.nbytes) for x in arguments if isinstance(x, np.ndarray)]
    program = compile_kernel(kernel, len(arguments))
    return program.launch(blocks, threads, places, memory, **options)


def stops(
    kernel: Any, why: str, blocks: int, threads: int, *arguments: Any, **options: Any
) -> None:
    """In whichever order."""
    for seed in range(6):
        given = [x.copy() if isinstance(x, np.ndarray) else x for x in arguments]
        with pytest.raises(FaultError, match=f"(?s){kernel.py_func.__name__}, line .*{why}"):
            run(kernel, blocks, threads, *given, seed=seed, **options)


@cuda.jit(device=True)
def thread() -> Any:
    return int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x


# ---------------------------------------------------------------------------------------------
# Right kernels
# ---------------------------------------------------------------------------------------------


@cuda.jit
def scaled(x, y, n, by):
    k = thread()
    if k < n:
        store(y, k, load(x, k, F4) * float32(by), F4)


@cuda.jit
def histogram(x, counts, tops, n):
    k = thread()
    if k < n:
        place = load(x, k, I4)
        atomic_add(counts, int64(place), int32(1))
        atomic_max(tops, int64(place), int32(k))


@given(st.integers(1, 500), st.integers(1, 9))
def test_atomic_operations_of_all_blocks(n: int, kinds: int) -> None:
    x = np.random.default_rng(n).integers(0, kinds, n).astype(np.int32)
    counts, tops = np.zeros(kinds, np.int32), np.full(kinds, -1, np.int32)
    run(histogram, -(-n // 96), 96, x, counts, tops, n)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=kinds))
    for kind in range(kinds):
        assert tops[kind] == max(np.flatnonzero(x == kind), default=-1)


@cuda.jit
def undefined(x, y, n):
    """Add what is in a register that a thread without a term has not set."""
    i = int64(cuda.threadIdx.x)
    shared = cuda.shared.array(64, float32)
    if i < n:
        shared[i] = load(x, i, F4)
    cuda.syncthreads()
    store(y, i, shared[i], F4)


def test_shared_memory_is_garbage_at_first() -> None:
    x, y = np.zeros((2, 64), np.float32)
    run(undefined, 1, 64, x, y, 0, seed=1)
    first = y.copy()
    run(undefined, 1, 64, x, y, 0, seed=2)
    assert (first.view(np.int32) != 0).sum() > 50
    assert (first.view(np.int32) != y.view(np.int32)).sum() > 50


# ---------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------


def arrays(count: int = SIZE) -> tuple[Any, Any]:
    return np.arange(count, dtype=np.float32), np.full(count, np.nan, np.float32)


@pytest.mark.parametrize("n", [SIZE - 1, SIZE, SIZE + 1])
def test_memory_ends_where_it_does(n: int) -> None:
    x, y = arrays()
    if n > SIZE:
        stops(scaled, f"thread {SIZE} of block 0: an address outside", 1, 96, x, y, n, 2)
    else:
        run(scaled, 1, 96, x, y, n, 2)
    small = np.empty(SIZE - 1, np.float32)
    if n >= SIZE:
        stops(scaled, "an address outside", 1, SIZE, x, small, SIZE, 2)


@cuda.jit
def doubles(x, y, skipped):
    i = int64(cuda.threadIdx.x)
    store(y + skipped, i, load(x, i, F8), F8)


def test_an_address_that_is_not_aligned() -> None:
    x, y = np.zeros(32), np.zeros(64)
    run(doubles, 1, 32, x, y, 8)
    stops(doubles, "a misaligned address", 1, 32, x, y, 4)


@cuda.jit
def beyond_shared(y, at):
    first = cuda.shared.array(SIZE, float32)
    second = cuda.shared.array(SIZE, float32)
    i = int64(cuda.threadIdx.x)
    first[i] = float32(i)
    second[i] = float32(-i)
    cuda.syncthreads()
    store(y, i, first[i + at] + second[i + at], F4)


@pytest.mark.parametrize(("at", "right"), [(0, True), (1, False), (3, False), (1 << 20, False)])
def test_shared_arrays_end_where_they_do(at: int, right: bool) -> None:
    y = np.full(SIZE, np.nan, np.float32)
    if right:
        run(beyond_shared, 1, SIZE, y, at)
        np.testing.assert_array_equal(y, np.zeros(SIZE))
    else:
        stops(beyond_shared, "an address outside", 1, SIZE, y, at)


@cuda.jit
def turned(x, y, n, waits):
    shared = cuda.shared.array(SIZE, float32)
    i = int64(cuda.threadIdx.x)
    shared[i] = load(x, i, F4)
    if waits:
        cuda.syncthreads()
    store(y, i, shared[n - 1 - i], F4)


def test_a_race_in_shared_memory() -> None:
    x, y = arrays()
    run(turned, 1, SIZE, x, y, SIZE, 1)
    np.testing.assert_array_equal(y, x[::-1])
    stops(turned, "a race between threads of a block", 1, SIZE, x, y, SIZE, 0)


@cuda.jit
def everyone_writes(y, differ):
    store(y, 0, int64(1) + differ * cuda.threadIdx.x, I8)


def test_threads_may_raise_a_flag_together() -> None:
    y = np.zeros(1, np.int64)
    run(everyone_writes, 1, SIZE, y, 0)
    run(everyone_writes, 9, SIZE, y, 0)
    assert y[0] == 1
    stops(everyone_writes, "a race between threads of a block", 1, SIZE, y, 1)
    stops(everyone_writes, "a race between", 5, SIZE, y, 1)


@cuda.jit
def warps_wait(y, n):
    """Warps wait for their own threads only."""
    shared = cuda.shared.array(SIZE, int64)
    i = int64(cuda.threadIdx.x)
    shared[i] = i
    cuda.syncwarp()
    store(y, i, shared[i // n * n + (i + 1) % n], I8)


def test_a_warp_waits_for_its_own_threads_only() -> None:
    y = np.zeros(SIZE, np.int64)
    run(warps_wait, 1, SIZE, y, 32)
    assert sorted(y) == list(range(SIZE))
    stops(warps_wait, "a race between threads of a block", 1, SIZE, y, SIZE)


@cuda.jit
def votes_wait(y, waits):
    """All vote, and then read what their neighbours wrote."""
    shared = cuda.shared.array(32, int64)
    i = int64(cuda.threadIdx.x)
    shared[i] = i
    holds = cuda.any_sync(0xFFFFFFFF, i == 5)
    if waits:
        cuda.syncwarp()
    store(y, i, shared[(i + 1) % 32] + int64(holds), I8)


def test_a_vote_orders_no_memory() -> None:
    y = np.zeros(32, np.int64)
    run(votes_wait, 1, 32, y, 1)
    np.testing.assert_array_equal(y, (np.arange(32) + 1) % 32 + 1)
    stops(votes_wait, "a race between threads of a block", 1, 32, y, 0)


@cuda.jit
def different_barriers(y, n):
    i = int64(cuda.threadIdx.x)
    if i < n:
        cuda.syncthreads()
        store(y, i, int64(1), I8)
    else:
        store(y, i, int64(2), I8)
        cuda.syncthreads()


@cuda.jit
def some_leave(y, n):
    i = int64(cuda.threadIdx.x)
    if i >= n:
        return
    cuda.syncthreads()
    store(y, i, i, I8)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(different_barriers, "different barriers"), (some_leave, "those that have left")],
)
def test_all_threads_wait_at_one_barrier(kernel: Any, why: str) -> None:
    y = np.zeros(SIZE, np.int64)
    run(kernel, 1, SIZE, y, SIZE)
    stops(kernel, f"threads that wait (at|for) {why}", 1, SIZE, y, 5)


@cuda.jit
def far_away(y, by, times):
    """Use the last bits of a product as a place, and all of it if it is negative."""
    i = int64(cuda.threadIdx.x)
    place = by * times
    store(y, i + (place & 7), i, I8)
    if place < 0:
        store(y + place * 8, i, i, I8)


def test_an_address_from_what_overflowed() -> None:
    y = np.zeros(SIZE, np.int64)
    run(far_away, 1, 32, y, 3, 5)
    run(far_away, 1, 32, y, 1 << 40, 1 << 22)
    stops(far_away, "an address from arithmetic that overflowed", 1, 32, y, 3, 1 << 62)


@cuda.jit
def ranges_of_blocks(y, n, by):
    store(y, int64(cuda.blockIdx.x) * by + cuda.threadIdx.x, int64(cuda.blockIdx.x), I8)


def test_a_race_between_blocks() -> None:
    y = np.zeros(8 * 32, np.int64)
    run(ranges_of_blocks, 8, 32, y, 0, 32)
    np.testing.assert_array_equal(y, np.repeat(np.arange(8), 32))
    stops(ranges_of_blocks, "a race between blocks", 8, 32, y, 0, 31)


def last_block(before: bool, waits: bool, after: bool, at_all: bool = True) -> Any:
    """Return a kernel whose last block adds up what all of them wrote, done rightly or not."""

    @cuda.jit
    def protocol(partial, state, total):
        last = cuda.shared.array(1, int32)
        i = int64(cuda.threadIdx.x)
        place = int64(cuda.blockIdx.x) * cuda.blockDim.x + i
        store(partial, place, place, I8)
        if before:
            cuda.threadfence()
        if waits:
            cuda.syncthreads()
        if i == 0:
            count = atomic_add(state, 0, int32(1)) if at_all else int32(cuda.gridDim.x - 1)
            if after:
                cuda.threadfence()
            last[0] = count == cuda.gridDim.x - 1
        cuda.syncthreads()
        if last[0] and i == 0:
            added = int64(0)
            for k in range(int64(cuda.gridDim.x) * cuda.blockDim.x):
                added += load(partial, k, I8)
            store(total, 0, added, I8)
            store(state, 0, int32(0), I4)

    return protocol


@pytest.mark.parametrize("wrong", ["", "before", "waits", "after", "at_all"])
def test_the_last_block_sees_what_others_wrote(wrong: str) -> None:
    steps = {"before": True, "waits": True, "after": True}
    kernel = last_block(**(steps | ({wrong: False} if wrong else {})))
    blocks, threads = 6, 32
    partial, total = np.zeros(blocks * threads, np.int64), np.zeros(1, np.int64)
    state = np.zeros(1, np.int32)
    if wrong:
        stops(kernel, "a race between", blocks, threads, partial, state, total)
        return
    for _ in range(3):
        run(kernel, blocks, threads, partial, state, total)
        assert total[0] == sum(range(blocks * threads))
        assert state[0] == 0


@cuda.jit
def endless(y, by):
    i = int64(1)
    while i < 1000:
        i *= by
    store(y, 0, i, I8)


def test_a_loop_must_end() -> None:
    y = np.zeros(1, np.int64)
    run(endless, 1, 1, y, 2, patience=1000)
    assert y[0] == 1024
    stops(endless, "a loop that does not end", 1, 1, y, 1, patience=1000)


# ---------------------------------------------------------------------------------------------
# Counts
# ---------------------------------------------------------------------------------------------


@cuda.jit
def strided(x, y, by):
    """Read a word of each thread, `by` words apart: in global, then in shared memory."""
    shared = cuda.shared.array(32 * 33, float32)
    i = int64(cuda.threadIdx.x)
    shared[i * by] = load(x, i * by, F4)
    cuda.syncthreads()
    store(y, i, shared[i * by], F4)


@pytest.mark.parametrize(("by", "ways"), [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1)])
def test_sectors_and_bank_conflicts(by: int, ways: int) -> None:
    room = np.zeros(32 * 33 + 8 + 32 + 8, np.float32)
    skipped = -room.ctypes.data % 32 // 4
    x, y = room[skipped:][: 32 * 33], room[skipped + 32 * 33 :][:32]
    x[:] = np.arange(len(x))
    traffic = run(strided, 1, 32, x, y, by, traffic=True)
    np.testing.assert_array_equal(y, x[::1][np.arange(32) * by])
    together = traffic.together
    assert traffic.bytes == {"global": 2 * 128, "shared": 2 * 128, "local": 0}
    assert traffic.barriers == 32
    assert traffic.instructions["bar.sync"] == 32
    assert together.requests == together.shared_requests == 2
    assert together.sectors == together.of_blocks == together.once == min(4 * by, 32) + 4
    assert together.turns == 2 * ways
    assert together.conflicts == 2 * (ways - 1)


# ---------------------------------------------------------------------------------------------
# On disk
# ---------------------------------------------------------------------------------------------


def test_kernels_are_kept_for_what_they_are_made_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for other constants, options or sources; and a file that was cut off is compiled anew."""
    compiled: list[str] = []
    monkeypatch.setattr(kept, "_FOLDER", tmp_path)

    def ask(size: int, options: Any = ()) -> str:
        kernel = chunk_kernels(size, size * size, np.dtype(np.float32)).sweep
        return str(
            kept.keep(kernel, options, lambda: compiled.append(f"{size} {options}") or compiled[-1])
        )

    for _ in range(2):
        assert [ask(2), ask(3), ask(2, 1)] == ["2 ()", "3 ()", "2 1"]
    assert compiled == ["2 ()", "3 ()", "2 1"]
    for file in tmp_path.glob("*.ptx"):
        file.write_bytes(file.read_bytes()[:-9])
    assert ask(2) == "2 ()"
    assert len(compiled) == 4
    monkeypatch.setattr(kept, "_origin", lambda modules: "another source")
    assert [ask(2), ask(2)] == ["2 ()", "2 ()"]
    assert len(compiled) == 5
    assert len(list(tmp_path.iterdir())) == 3
    assert kept.keep(scaled, (), lambda: "not kept") == "not kept"
    assert len(list(tmp_path.iterdir())) == 3
