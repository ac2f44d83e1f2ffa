"""Resident memory of this process, as Linux tells it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

MIB = 1 << 20
# The environment in which freed memory goes back at once; else peaks would hold it.
GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}

_T = TypeVar("_T")


def growth(call: Callable[[], _T]) -> tuple[int, _T]:
    """Call; by how many bytes resident memory grew at the peak, and the result."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = status("VmRSS")
    result = call()
    return status("VmHWM") - before, result


def status(key: str) -> int:
    """Bytes of this process, such as ``VmRSS``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
