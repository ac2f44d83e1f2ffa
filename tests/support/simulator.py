"""Numba's CUDA simulator made fit for many small kernels, and stricter.

Its threads are threads of Python, which it starts anew for each block and watches in a busy loop;
here one runs at a time, and they are kept. Shared memory is full of garbage at first, as on a
device, not of zeros. Overflow gives no warning, as on a device.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import types
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numba import types as numba_types
from numba.cuda.simulator import kernel, kernelapi
from numba.np import numpy_support


class _Worker(kernel.BlockThread):
    """A thread of Python, which is one thread of a block after the other, while it is its turn."""

    def __init__(self) -> None:
        threading.Thread.__init__(self, daemon=True)
        self.abort = self.debug = False
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                self.turn.acquire()
                self.block.work(self)

    def syncthreads(self) -> None:
        self.block.waiting.append(self)
        self.block.hand_on()
        self.turn.acquire()


_idle: list[_Worker] = []


class _Block:
    """The threads of a block take turns, in a random order: each until a barrier, or its end.

    At a barrier those that have returned are not waited for.
    """

    def __init__(self, manager: Any, index: tuple[int, ...], args: tuple[Any, ...]) -> None:
        self._manager, self._index, self._args = manager, kernelapi.Dim3(*index), args
        self._places = list(np.ndindex(*manager._block_dim))  # of threads that have not begun
        random.shuffle(self._places)
        self._ready: list[_Worker] = []
        self.waiting: list[_Worker] = []
        self.failure: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()

    def work(self, worker: _Worker) -> None:
        """Begin threads until none is left."""
        worker._manager, worker.blockIdx = self._manager, self._index
        while self._places:
            worker.threadIdx = kernelapi.Dim3(*self._places.pop())
            try:
                self._manager._f(*self._args)
            except BaseException as error:
                self.failure = self.failure or error
        _idle.append(worker)
        self.hand_on()

    def hand_on(self) -> None:
        """Let another one run: all have begun before one goes on behind a barrier."""
        if self._places:
            if not _idle:
                _idle.append(_Worker())
                _idle[-1].start()
            worker = _idle.pop()
            worker.block = self
        else:
            if not self._ready:
                self._ready, self.waiting = self.waiting, self._ready
                random.shuffle(self._ready)
            if not self._ready:
                self.ended.release()
                return
            worker = self._ready.pop()
        worker.turn.release()


def _run_block(self: Any, index: tuple[int, ...], *args: Any) -> None:
    block = _Block(self, index, args)
    block.hand_on()
    block.ended.acquire()
    if block.failure:
        raise block.failure


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
_changed: ExitStack


def _call(self: Any, *args: Any) -> Any:
    """Run a kernel, alone since modules are changed while it runs, or a function that it calls."""
    global _changed
    if self._device:
        simulated = kernel._get_kernel_context()
        if self.fn.__globals__.get("cuda") is not simulated:
            _changed.enter_context(kernel.swapped_cuda_module(self.fn, simulated))
        return self.fn(*args)
    with _one_at_a_time, ExitStack() as _changed:
        return _launch(self, *args)


_configure = kernel.FakeCUDAKernel.__getitem__


def _configured(self: Any, configuration: Any) -> Any:
    """Return a kernel of its own for each grid, so that threads do not set each other's."""
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
