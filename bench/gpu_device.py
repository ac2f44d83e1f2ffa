"""The CUDA device of the benchmarks: arrays, clocks, and how fast it moves and computes at best."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .timing import Call, Ceilings

# Kernels for the floor and the clocks, compiled by CuPy.
_SOURCE = Path(__file__).with_suffix(".cu").read_text()
_THREADS = 256
_STEPS = 4096
_COPIED = 1 << 30
# Seconds of calls before those that are timed.
_WARM_UP = 0.01
# A call whose launches take longer than this is not hidden behind a kernel that waits.
_LONGEST_WAIT = 0.02


class Cuda:
    """The current device, through CuPy.

    Attributes
    ----------
    xp : module
        CuPy.
    device : str
        The `device` that plans are given.
    torch_name : str
        The name that PyTorch has for such a device.
    cache : int
        Bytes of the L2 cache.
    """

    device = "cuda"
    torch_name = "cuda"

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._ceilings: Ceilings | None = None
        runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.cache = int(properties["l2CacheSize"])
        self._processors = int(properties["multiProcessorCount"])
        module = cupy.RawModule(code=_SOURCE)
        self._multiply_add, self._wait, self._read = map(
            module.get_function, ("multiply_add", "wait", "read")
        )
        # Four times the cache, read before a call that is to find nothing in it. Reading leaves
        # nothing behind that has to be written back.
        self._large = cupy.ones(4 * max(self.cache, 1 << 20) // 4, np.float32)
        self._sink = cupy.empty(self._processors * 32 * _THREADS, np.float32)

    # -- Arrays ---------------------------------------------------------------------------------

    def put(self, array: Any) -> Any:
        """Return a copy on the device."""
        return self.xp.asarray(array)

    def get(self, array: Any) -> NDArray[Any]:
        """Return a copy on the host, of an array of any library."""
        return self.xp.asnumpy(self.xp.asarray(array))

    def csr(self, matrix: Any) -> Any:
        """Return a SciPy CSR array as one of CuPy."""
        from cupyx.scipy.sparse import csr_matrix

        return csr_matrix(matrix)

    def spgemm(self, a: Any, b: Any) -> Any:
        """CuPy's product of two CSR matrices, by cuSPARSE's SpGEMM."""
        from cupyx.cusparse import spgemm

        return spgemm(a, b)

    def spmv(self, a: Any, x: Any) -> Any:
        """CuPy's product of a CSR matrix and a vector, by cuSPARSE's SpMV."""
        from cupyx.cusparse import spmv

        return spmv(a, x)

    def free(self) -> None:
        """Give memory back that no array uses."""
        gc.collect()
        self.synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    # -- Clocks ---------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self.xp.cuda.runtime.deviceSynchronize()

    def samples(self, call: Call, times: int, clock: str, cold: bool) -> list[float]:
        """Seconds of each of some calls, after a few that are not timed.

        Parameters
        ----------
        call : callable
            The call that is timed.
        times : int
            How often.
        clock : {"call", "device"}
            By device events: "call" from an idle device until the work is done, so it has what
            Python and the launches cost. "device" is the work alone: it is queued up behind a
            kernel that waits until all of it has been launched, but no longer than 20 ms: the time
            of a call with more launches has the rest of these, too.
        cold : bool
            Whether the L2 cache holds nothing of use when the call begins.
        """
        stop = time.perf_counter() + _WARM_UP
        while True:
            call()
            self.synchronize()
            if time.perf_counter() > stop:
                break
        begin = time.perf_counter()
        call()
        launching = min(2 * (time.perf_counter() - begin) + 20e-6, _LONGEST_WAIT)
        self.synchronize()
        first, last = self.xp.cuda.Event(), self.xp.cuda.Event()
        samples = []
        for _ in range(times):
            if cold:
                self._empty_cache()
            if clock == "device":
                self._wait((1,), (1,), (np.uint64(launching * 1e9),))
            else:
                self.synchronize()
            first.record()
            call()
            last.record()
            self.synchronize()
            samples.append(self.xp.cuda.get_elapsed_time(first, last) / 1e3)
        return samples

    def waits_inside(self, call: Call) -> bool:
        """Whether a call waits for the device before it returns, or launches for more than 20 ms.

        Its work then cannot be queued up behind a kernel that waits, and its device time has what
        Python and the launches cost.
        """
        call()
        self.synchronize()
        behind = self.xp.cuda.Event()
        self._wait((1,), (1,), (np.uint64(_LONGEST_WAIT * 1e9),))
        behind.record()
        begin = time.perf_counter()
        call()
        # A call that takes as long by itself tells nothing, and is not hidden behind it either.
        waited: bool = behind.done or time.perf_counter() - begin > _LONGEST_WAIT
        self.synchronize()
        return waited

    def _empty_cache(self) -> None:
        size = self._large.size // 4
        blocks = self._processors * 8
        self._read((blocks,), (_THREADS,), (self._large, np.int64(size), self._sink))

    # -- Ceilings -------------------------------------------------------------------------------

    def ceilings(self, moved: int = 0) -> Ceilings:
        """Return the best rates, which do not depend on how much is moved."""
        if self._ceilings is None:
            flops_per_second = self._flop_rate()  # first, which gets the clocks up
            self._ceilings = Ceilings(self._bandwidth(), flops_per_second)
        return self._ceilings

    def _bandwidth(self) -> float:
        """Bytes read and written per second by a large copy."""
        free, _ = self.xp.cuda.runtime.memGetInfo()
        source = self.xp.arange(min(_COPIED, free // 4) // 4, dtype=np.float32)
        target = self.xp.empty_like(source)
        copying = self.samples(lambda: self.xp.copyto(target, source), 50, "device", cold=False)
        return 2 * source.nbytes / min(copying)

    def _flop_rate(self) -> float:
        """FLOPs per second of float32 multiply-adds in registers."""
        blocks = self._sink.size // _THREADS
        arguments = self._sink, np.float32(0.999), np.float32(0.001), np.int32(_STEPS)
        computing = self.samples(
            lambda: self._multiply_add((blocks,), (_THREADS,), arguments), 200, "device", cold=False
        )
        return 2 * 8 * _STEPS * self._sink.size / min(computing)
