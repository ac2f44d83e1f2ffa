"""Use PyTorch's own threads as helpers of the kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...execution.threads import Team, lent

_Call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# The process in which PyTorch was imported: GNU OpenMP must not be used after a fork.
_home = os.getpid()


def pytorchs_threads() -> AbstractContextManager[None]:
    """Return a context in which PyTorch's threads help the kernels.

    PyTorch's threads spin between its loops, on the cores that the kernels need. If PyTorch has
    only one thread, so have the kernels. If its threads are not GNU OpenMP's, or after a fork, the
    kernels use their own threads.
    """
    if torch.get_num_threads() == 1:
        return lent(ALONE)
    return lent(_team() if os.getpid() == _home else None)


@cache
def _team() -> Team | None:
    library = _openmp()
    if library is None:
        return None
    return _Threads(library)


class _Threads(Team):
    """As many GNU OpenMP threads as PyTorch has; another number would start or end threads."""

    def __init__(self, library: Any) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None

    def __call__(self, work: Callable[[], None]) -> None:
        self._parallel(_Call(lambda _: work()), None, torch.get_num_threads(), 0)

    def call(self, function: int, argument: int) -> None:
        self._parallel(function, argument, torch.get_num_threads(), 0)


class _Alone(Team):
    """Only the calling thread."""

    def __call__(self, work: Callable[[], None]) -> None:
        work()

    def call(self, function: int, argument: int) -> None:
        _Call(function)(argument)


ALONE = _Alone()


def _openmp() -> Any:
    """Return the GNU OpenMP library that PyTorch uses, if it uses one."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    # Other packages may load their own library.
    home = str(Path(torch.__file__).parent)
    paths = {path for path in paths if path.startswith(home)} or paths
    if len(paths) != 1:
        return None
    library = ctypes.CDLL(paths.pop())
    return library if hasattr(library, "GOMP_parallel") else None
