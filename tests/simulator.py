"""Numba's CUDA simulator made fit for many small kernels, and stricter.

Its threads are threads of Python, which it watches in a busy loop; here those that reach a barrier
wait for each other. Shared memory is full of garbage at first, as on a device, not of zeros. What
overflows gives no warning, as on a device.
"""

from __future__ import annotations

import copy
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
from numba import types as numba_types
from numba.cuda.simulator import kernel, kernelapi
from numba.np import numpy_support

__all__ = ["install"]


class _Barrier:
    """Where the threads of a block meet; those that have returned are not waited for."""

    def __init__(self, threads: int) -> None:
        self._condition = threading.Condition()
        self._running, self._waiting, self._turn = threads, 0, 0

    def wait(self) -> None:
        with self._condition:
            self._waiting += 1
            turn = self._turn
            self._release()
            while self._turn == turn:
                self._condition.wait()

    def leave(self) -> None:
        with self._condition:
            self._running -= 1
            self._release()

    def _release(self) -> None:
        if self._waiting == self._running:
            self._waiting = 0
            self._turn += 1
            self._condition.notify_all()


class _Thread(kernel.BlockThread):
    barrier: _Barrier

    def run(self) -> None:
        with np.errstate(all="ignore"):
            super().run()
        self.barrier.leave()

    def syncthreads(self) -> None:
        self.barrier.wait()


def _run_block(self: Any, block: tuple[int, ...], *args: Any) -> None:
    places = list(np.ndindex(*self._block_dim))
    barrier = _Barrier(len(places))
    threads = [_Thread(lambda: self._f(*args), self, block, place, self._debug) for place in places]
    for thread in threads:
        thread.barrier = barrier
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.exception:
            raise thread.exception[0].with_traceback(thread.exception[1])


_lock = threading.Lock()


def _shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
    """One array for each place in the source."""
    frame = sys._getframe(1)
    place = frame.f_code, frame.f_lineno
    with _lock:
        array = self._allocations.get(place)
        if array is None:
            if isinstance(dtype, numba_types.Type):
                dtype = numpy_support.as_dtype(dtype)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            garbage = np.random.default_rng().bytes(size)
            array = np.frombuffer(bytearray(garbage), dtype).reshape(shape)
            self._allocations[place] = array
    return array


_launch = kernel.FakeCUDAKernel.__call__
_one_at_a_time = threading.Lock()


def _call(self: Any, *args: Any) -> Any:
    """A kernel, alone: its module is changed while it runs. Or a function that a kernel calls."""
    if self._device:
        return _launch(self, *args)
    with _one_at_a_time:
        return _launch(self, *args)


_configure = kernel.FakeCUDAKernel.__getitem__


def _configured(self: Any, configuration: Any) -> Any:
    """A kernel of its own for each grid, so that threads do not set each other's."""
    return _configure(copy.copy(self), configuration)


def reverse_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the last block first, until the test ends: no block may wait for one before."""
    backwards = types.SimpleNamespace(ndindex=lambda *shape: reversed(list(np.ndindex(*shape))))
    monkeypatch.setattr(kernel, "np", _Also(np, backwards))


class _Also:
    """A module, of which some names are others."""

    def __init__(self, module: Any, others: Any) -> None:
        self._module, self._others = module, others

    def __getattr__(self, name: str) -> Any:
        others = self._others
        return getattr(others if hasattr(others, name) else self._module, name)


def install() -> None:
    """Use these from now on."""
    kernel.BlockManager.run = _run_block
    kernel.FakeCUDAKernel.__call__ = _call
    kernel.FakeCUDAKernel.__getitem__ = _configured
    kernelapi.FakeCUDAShared.array = _shared_array
