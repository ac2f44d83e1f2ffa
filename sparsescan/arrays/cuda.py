"""The one door to ``numba.cuda``; in its simulator with ``NUMBA_ENABLE_CUDASIM=1``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from numba import config, cuda

from ..errors import DeviceError

__all__ = ["SIMULATED", "cuda", "current"]

SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]

# From this compute capability on Numba compiles for that very one.
_OWN_CODE = (9, 0)
_checked: set[int] = set()


def current(device: int) -> AbstractContextManager[Any]:
    """Return a context in which Numba works on a device, which CuPy does not tell it.

    Numba compiles, loads and launches kernels in it. The launch of a graph needs none.

    Raises
    ------
    DeviceError
        If Numba's compiler has no code for such a device.
    """
    if SIMULATED:
        return nullcontext()
    there: AbstractContextManager[Any] = cuda.gpus[device]
    if device not in _checked:
        _check_capability(device, tuple(there.compute_capability))  # type: ignore[attr-defined]
        _checked.add(device)
    return there


def _check_capability(device: int, capability: tuple[int, ...]) -> None:
    try:
        from numba.cuda.cudadrv.nvrtc import get_supported_ccs  # type: ignore[attr-defined]
    except ImportError:  # Numba's own CUDA target, which compiles for the nearest older one
        return
    known = sorted(map(tuple, get_supported_ccs()))
    if capability in known or known[0] < capability < _OWN_CODE:
        return
    first, last = (f"{major}.{minor}" for major, minor in (known[0], known[-1]))
    hint = (
        "sparsescan[cuda12] may have a compiler for it"
        if capability < known[0]
        else "a newer nvidia-cuda-nvrtc, or CUDA toolkit, may know it"
    )
    raise DeviceError(
        f"device {device} has compute capability {'.'.join(map(str, capability))}, which the "
        f"compiler of Numba's CUDA target does not know: it knows {first} to {last}; {hint}"
    )
