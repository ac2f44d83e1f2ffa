"""Open MPI's own counts of messages and bytes are what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI
from wire import Wire

from sparsescan import Pattern, parallel
from sparsescan.parallel import Grid
from sparsescan.parallel.communicator import Communicator
from sparsescan.parallel.exchange import rounds
from sparsescan.parallel.halo import take_rows
from sparsescan.parallel.plan import ParallelPlan
from sparsescan.symbolic.pattern import of_mask

WORLD = MPI.COMM_WORLD
IS_OPEN_MPI = MPI.Get_library_version().startswith("Open MPI")
pytestmark = [
    pytest.mark.ranks(slow=(2, 4), monitored=True),
    pytest.mark.ranks(slow=(6,), doubling=True, monitored=True),
    pytest.mark.skipif(not IS_OPEN_MPI, reason="only Open MPI counts its messages"),
]


def counted() -> np.ndarray:
    """Messages, bytes, and calls of operators, by the wrapping communicator."""
    traffic = Communicator.of(WORLD).traffic.values()
    return np.sum([(each.messages, each.bytes, each.operations) for each in traffic], axis=0)


def check(wire: Wire, plan: ParallelPlan, scan: Callable[[], object]) -> None:
    """Compare what a scan sends with the forecast, by the library's count and by our own."""
    scan()  # takes memory, about which the ranks agree, too
    before, own = wire.read(), counted()
    scan()
    sent, ours = wire.read() - before, counted() - own
    forecast, rank = plan.forecast, WORLD.rank
    expected = forecast.messages[rank], forecast.bytes[rank]
    assert tuple(sent) == expected, (rank, str(plan), sent, expected)
    assert tuple(ours[:2]) == expected, (rank, str(plan), ours, expected)
    if forecast.algorithm is not None:
        scan = rounds(forecast.algorithm, plan.grid.chain)
        calls = sum(len(merges[plan.position]) for merges in scan)
        assert ours[2] == calls, (rank, str(plan), ours, calls)


def grids(size: int) -> list[Grid]:
    """All of so many ranks."""
    sizes = product(range(1, size + 1), repeat=3)
    return [grid for axes in sizes if (grid := Grid(*axes)).size == size]


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@pytest.mark.parametrize("grid", grids(WORLD.size), ids=str)
def test_bytes_on_the_wire(wire: Wire, grid: Grid) -> None:
    """Each scan sends the messages and bytes that were predicted."""
    rng = np.random.default_rng(0)
    n, size = 20, 6
    band = of_mask(np.tri(size, dtype=bool) & ~np.tri(size, k=-2, dtype=bool))
    mine, own = grid.steps(WORLD.rank, n), grid.entries(WORLD.rank, size)
    for whole, dtype, batch in (
        (Pattern.dense((size, size)), "f4", 3),
        (Pattern.diagonal(size), "f8", 1),
        (band, "f8", 2),
    ):
        pattern = take_rows(whole, own.start, own.stop)
        patterns = [pattern] * (mine.stop - mine.start)
        values = rng.random((len(patterns), batch, pattern.nnz)).astype(dtype)
        for schedule in ("vectors", "products") if grid.rows == 1 else ("vectors",):
            plan = parallel.plan(
                WORLD, patterns, batch=batch, dtype=dtype, grid=grid, schedule=schedule
            )
            entries = own.stop - own.start
            grad = np.ones((batch, entries), dtype) if plan.position == 0 else None
            check(wire, plan, lambda p=plan, v=values, g=grad: p.exclusive_scan(g, v))
            if grid.rows > 1:
                told = parallel.predict([whole] * n, grid, batch=batch * grid.batch, dtype=dtype)
                assert told.messages == plan.forecast.messages
                assert told.bytes == plan.forecast.bytes
