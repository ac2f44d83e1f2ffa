"""The one door to ``numba.cuda``; in its simulator with ``NUMBA_ENABLE_CUDASIM=1``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from numba import config, cuda

__all__ = ["SIMULATED", "cuda", "current"]

SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]


def current(device: int) -> AbstractContextManager[Any]:
    """Return a context in which Numba works on a device, which CuPy does not tell it."""
    return nullcontext() if SIMULATED else cuda.gpus[device]
