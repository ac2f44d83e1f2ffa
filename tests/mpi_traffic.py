"""On some ranks of Open MPI: its own counts of messages and bytes are what was predicted.

``OMPI_MCA_pml_monitoring_enable=1 mpiexec -n RANKS python -m mpi4py mpi_traffic.py``
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product

import numpy as np
from mpi4py import MPI

from sparsescan import Pattern, parallel
from sparsescan.parallel import Communicator, Grid
from sparsescan.parallel.exchange import operations
from sparsescan.parallel.halo import take_rows
from sparsescan.pattern import of_mask

WORLD = MPI.COMM_WORLD


class Wire:
    """What this rank has sent: the library counts every message, those of collectives too."""

    def __init__(self) -> None:
        with open("/proc/self/maps", encoding="ascii") as file:
            path = next(line.split()[-1] for line in file if "libmpi.so" in line)
        self._mpi = ctypes.CDLL(path)
        self._call("init_thread", 0, ctypes.byref(ctypes.c_int()))
        self._session = ctypes.c_void_p()
        self._call("pvar_session_create", ctypes.byref(self._session))
        names = "pml_monitoring_messages_count", "pml_monitoring_messages_size"
        self._handles = [self._handle(name) for name in names]

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._mpi, f"MPI_T_{name}")(*arguments)
        assert code == 0, (name, code)

    def _handle(self, name: str) -> ctypes.c_void_p:
        index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        size_class = 2
        self._call("pvar_get_index", name.encode(), size_class, ctypes.byref(index))
        comm = ctypes.c_void_p(MPI._addressof(WORLD))
        self._call(
            "pvar_handle_alloc",
            self._session, index, comm, ctypes.byref(handle), ctypes.byref(count),
        )  # fmt: skip
        assert count.value == WORLD.size
        self._call("pvar_start", self._session, handle)
        return handle

    def read(self) -> np.ndarray:
        """Messages and bytes so far, to all ranks."""
        found = []
        for handle in self._handles:
            to = (ctypes.c_size_t * WORLD.size)()
            self._call("pvar_read", self._session, handle, to)
            found.append(sum(to))
        return np.array(found)


def counted() -> np.ndarray:
    """Messages, bytes, and calls of operators, by the wrapping communicator."""
    traffic = Communicator.of(WORLD).traffic.values()
    return np.sum([(each.messages, each.bytes, each.operations) for each in traffic], axis=0)


def check(wire: Wire, plan: parallel.ParallelPlan, scan: Callable[[], object]) -> None:
    """A scan sends what the forecast says, by the library's count and by our own."""
    scan()  # takes memory, about which the ranks agree, too
    before, own = wire.read(), counted()
    scan()
    sent, ours = wire.read() - before, counted() - own
    forecast, rank = plan.forecast, WORLD.rank
    expected = forecast.messages[rank], forecast.bytes[rank]
    assert tuple(sent) == expected, (rank, str(plan), sent, expected)
    assert tuple(ours[:2]) == expected, (rank, str(plan), ours, expected)
    if forecast.algorithm is not None:
        calls = operations(forecast.algorithm, plan.grid.chain, plan.position)
        assert ours[2] == calls, (rank, str(plan), ours, calls)


def grids(size: int) -> list[Grid]:
    """All of so many ranks."""
    found = product(range(1, size + 1), repeat=3)
    return [grid for axes in found if (grid := Grid(*axes)).size == size]


def main() -> None:
    library = MPI.Get_library_version().split(",")[0]
    if not library.startswith("Open MPI"):
        if WORLD.rank == 0:
            print(f"only Open MPI counts its messages; this is {library}")
        return
    wire = Wire()
    rng = np.random.default_rng(0)
    n, size = 20, 6
    band = of_mask(np.tri(size, dtype=bool) & ~np.tri(size, k=-2, dtype=bool))
    for grid in grids(WORLD.size):
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
                    told = parallel.predict(
                        [whole] * n, grid, batch=batch * grid.batch, dtype=dtype
                    )
                    assert told.messages == plan.forecast.messages
                    assert told.bytes == plan.forecast.bytes
    print(f"rank {WORLD.rank} is done", flush=True)


if __name__ == "__main__":
    main()
