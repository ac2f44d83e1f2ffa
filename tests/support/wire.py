"""Open MPI's own counts of messages."""

from __future__ import annotations

import ctypes

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


class Wire:
    """Messages that this rank has sent, counted by the library: those of collectives too."""

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
        result = []
        for handle in self._handles:
            to = (ctypes.c_size_t * WORLD.size)()
            self._call("pvar_read", self._session, handle, to)
            result.append(sum(to))
        return np.array(result)
