"""Memory of a CUDA device, piece by piece: taken, or only counted."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np

from ...arrays.addresses import array_at_address, kernel_address
from ...arrays.arrays import load_cupy
from ...errors import MemoryLimitError
from ...formatting import format_bytes
from ...symbolic.pattern import Pattern
from . import patterns
from .chunks import multiprocessors_of

# Bytes of which CuPy's memory pool gives a multiple.
_UNIT = 512


class TakenMemory:
    """Memory of the current device, kept as long as this object.

    Parameters
    ----------
    words : int
        Words of a run descriptor, for which memory is taken first of all.

    Attributes
    ----------
    processors : int
        Multiprocessors of the device.
    run_table : int
        Address of the run descriptor.
    """

    def __init__(self, words: int) -> None:
        self._cupy = cupy = load_cupy()
        self.processors = multiprocessors_of(cupy).number
        # The streams that the memory was made on.
        self._homes = [cupy.cuda.get_current_stream()]
        self._kept: list[Any] = []  # what tables and launches point into
        self._run = cupy.empty(words, np.int64)
        self.run_table = kernel_address(self._run)

    def place(self, array: Any) -> int:
        """Keep an array, uploaded if it is NumPy's; its address."""
        array = self._cupy.asarray(array)
        self._kept.append(array)
        return kernel_address(array)

    def room(self, what: str, size: int, dtype: Any, *, zeros: bool = False) -> Any:
        """Keep and return a new array of `size` values, or raise an error if there is no room."""
        array = self._allocated(size, dtype, zeros)
        if array is None:
            # Arrays in cycles of references keep theirs until those are collected.
            gc.collect()
            array = self._allocated(size, dtype, zeros)
        if array is None:
            needed = size * np.dtype(dtype).itemsize
            free = self._cupy.cuda.Device().mem_info[0]
            free += self._cupy.get_default_memory_pool().free_bytes()
            raise MemoryLimitError(
                f"{what} would take {format_bytes(needed)}; "
                f"the device has {format_bytes(free)} left"
            )
        self._kept.append(array)
        return array

    def _allocated(self, size: int, dtype: Any, zeros: bool) -> Any:
        """Return a new array, or None if there is no room."""
        make = self._cupy.zeros if zeros else self._cupy.empty
        try:
            return make(size, dtype)
        except self._cupy.cuda.memory.OutOfMemoryError:
            return None
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            # From the runtime itself, where CuPy has no memory pool (`set_allocator(None)`).
            if "cudaErrorMemoryAllocation" not in str(error):
                raise
            return None

    def keep(self, pattern: Pattern, index_dtype: np.dtype[Any]) -> tuple[int, ...]:
        """Keep a pattern, which may have been uploaded on another stream; return its addresses."""
        kept = patterns.keep(pattern, index_dtype)
        self._cupy.cuda.get_current_stream().wait_event(kept.ready)
        self._kept.append(kept)
        self._homes.append(kept.home)
        arrays = kept.indptr, kept.indices, kept.tiles
        return tuple(0 if array is None else kernel_address(array) for array in arrays)


class CountedMemory:
    """Memory that is not taken: its bytes are counted, and addresses in it say nothing.

    Parameters
    ----------
    words : int
        Words of a run descriptor.

    Attributes
    ----------
    nbytes : int
        Bytes that a device gives for all pieces.
    processors : int
        More than any device has.
    run_table : int
        0.
    """

    processors, run_table = sys.maxsize >> 8, 0

    def __init__(self, words: int) -> None:
        self.nbytes = 0
        self.count(8 * words)

    def count(self, *sizes: int) -> None:
        """Add pieces of so many bytes."""
        self.nbytes += sum(-(-size // _UNIT) * _UNIT for size in sizes)

    def place(self, array: Any) -> int:
        """Count an array."""
        self.count(array.nbytes)
        return 0

    def room(self, what: str, size: int, dtype: Any, *, zeros: bool = False) -> Any:
        """Count `size` values, and return what stands for them."""
        self.count(size * np.dtype(dtype).itemsize)
        return array_at_address(_UNIT, (size,), dtype)

    def keep(self, pattern: Pattern, index_dtype: np.dtype[Any]) -> tuple[int, ...]:
        """Count what kernels read of a pattern."""
        self.count(8 * len(patterns.tiles_of(pattern)))
        if pattern.kind == "general":
            self.count(*(index_dtype.itemsize * n for n in (pattern.shape[0] + 1, pattern.nnz)))
        return 0, 0, 0
