"""A sweep through small steps: what it moves, and how often it waits, counted as compiled."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

import ptx.stand_in  # noqa: E402
from oracles import assert_within, sequential  # noqa: E402
from ptx.runner import Traffic  # noqa: E402

import sparsescan  # noqa: E402
from sparsescan import CSRChain, Pattern  # noqa: E402
from sparsescan.kernels.cuda.tables import Sweep  # noqa: E402

SECTOR, UNKNOWNS, THREADS = 32, 256, 256


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, Traffic]]:
    """Return the kernel, blocks and threads of every launch, and what it did."""
    return ptx.stand_in.count(monkeypatch)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_has_two_barriers_and_moves_its_values_and_gradient(
    traffic: list[tuple[str, int, int, Traffic]], dtype: Any
) -> None:
    """Steps of 256 unknowns that share a pattern, of which indices are loaded once."""
    rng = np.random.default_rng()
    around = [-16, -1, 0, 1, 16]
    stencil = sp.diags_array([np.ones(UNKNOWNS - abs(k)) for k in around], offsets=around).tocsr()
    pattern = Pattern(stencil.indptr, stencil.indices, stencil.shape)
    grad = rng.standard_normal(UNKNOWNS).astype(dtype)
    counts = 30, 50
    for steps in counts:
        data = (rng.standard_normal((steps + 1, pattern.nnz)) / 2).astype(dtype)
        chain = CSRChain.from_pattern(data, pattern)
        gradients = sparsescan.exclusive_scan(grad, chain, schedule="linear", device="cuda")
        each = [sp.csr_array((row, stencil.indices, stencil.indptr), stencil.shape) for row in data]
        assert_within(gradients, sequential(grad, each, dtype=dtype), dtype)
    more = counts[1] - counts[0]
    assert [launched for *launched, _ in traffic] == 2 * [["sweep_steps", 1, THREADS]]
    few, many = (did for *_, did in traffic)
    assert many.barriers - few.barriers == 2 * THREADS * more
    size = np.dtype(dtype).itemsize
    # Values and the gradient; then a row of the table, and five words of the run's, which say
    # where values and local gradients are.
    needed = (pattern.nnz + UNKNOWNS) * size + 8 * Sweep.WIDTH + 5 * SECTOR
    moved = (many.together.sectors - few.together.sectors) * SECTOR / more
    print(f"{moved / needed:.3f} times the bytes needed")
    assert needed <= moved + SECTOR
    # A warp shares a sector of what it reads with another one, unless that is aligned.
    assert moved <= 1.2 * needed
