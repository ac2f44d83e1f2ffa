"""Memory that each thread has for itself, in kernels run as compiled PTX."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

from numba import cuda, float32, int64  # noqa: E402
from ptx import FaultError, compile_kernel  # noqa: E402

from sparsescan.kernels.cuda.device import load, store  # noqa: E402

F4, I8 = np.float32(0), np.int64(0)
SIZE = 24


@cuda.jit
def picked(x, order, y):
    """Each thread's values in another order, by way of an array that is indexed by numbers."""
    values = cuda.local.array(SIZE, float32)
    i = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    for k in range(SIZE):
        values[k] = load(x, i * SIZE + k, F4)
    cuda.syncthreads()
    for k in range(SIZE):
        store(y, i * SIZE + k, values[load(order, i * SIZE + k, I8)], F4)


def launch(order: np.ndarray[Any, Any]) -> Any:
    blocks, threads = 3, 40
    x = np.random.default_rng(0).standard_normal((blocks * threads, SIZE)).astype(np.float32)
    y = np.full_like(x, np.nan)
    arrays = x, np.broadcast_to(order, x.shape).copy(), y
    program = compile_kernel(picked, 3)
    assert program.kernel.local
    memory = [(array.ctypes.data, array.nbytes) for array in arrays]
    traffic = program.launch(blocks, threads, [first for first, _ in memory], memory)
    np.testing.assert_array_equal(y, np.take_along_axis(*arrays[:2], axis=1))
    return traffic


def test_threads_have_arrays_of_their_own() -> None:
    """Across barriers, and without races."""
    order = np.argsort(np.random.default_rng(1).random((120, SIZE)), axis=1)
    traffic = launch(order)
    assert traffic.bytes["local"] == 2 * 120 * SIZE * 4
    assert traffic.bytes["global"] == 120 * SIZE * (4 + 8 + 4)
    assert traffic.bytes["shared"] == 0


@pytest.mark.parametrize("wrong", [SIZE, 1 << 20, -SIZE - 1])
def test_a_place_beyond_the_array_stops_a_launch(wrong: int) -> None:
    order = np.arange(SIZE)
    order[5] = wrong
    with pytest.raises(FaultError, match=r"(?s)picked, line .*an address outside"):
        launch(order)
