"""Patterns on devices: their index arrays, and the tiles in which rows are read."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays.arrays import load_cupy
from ...kernels.cuda.levels import THREADS
from ...kernels.cuda.matvec import STAGE
from ...symbolic.pattern import Pattern


class KeptPattern(NamedTuple):
    """A pattern on a device, and when it is there."""

    indptr: Any
    indices: Any
    tiles: Any
    home: Any  # the stream it was made on
    ready: Any


# Uploaded patterns, by device and index dtype.
kept_patterns: weakref.WeakKeyDictionary[Pattern, dict[Any, KeptPattern]] = (
    weakref.WeakKeyDictionary()
)
_tiles: weakref.WeakKeyDictionary[Pattern, NDArray[np.int64]] = weakref.WeakKeyDictionary()


def keep(pattern: Pattern, index_dtype: np.dtype[Any]) -> KeptPattern:
    """Return what kernels read of a pattern, on the current device."""
    cupy = load_cupy()
    known = kept_patterns.setdefault(pattern, {})
    key = cupy.cuda.Device().id, index_dtype
    if key not in known:
        indptr = indices = None
        if pattern.kind == "general":
            indptr = cupy.asarray(pattern.indptr.astype(index_dtype, copy=False))
            indices = cupy.asarray(pattern.indices.astype(index_dtype, copy=False))
        tiles = cupy.asarray(tiles_of(pattern))
        home, ready = cupy.cuda.get_current_stream(), cupy.cuda.Event(disable_timing=True)
        ready.record(home)
        known[key] = KeptPattern(indptr, indices, tiles, home, ready)
    return known[key]


def tiles_of(pattern: Pattern) -> NDArray[np.int64]:
    """Return the first row of every tile, and the number of rows."""
    if pattern not in _tiles:
        _tiles[pattern] = _cut(pattern)
    return _tiles[pattern]


def _cut(pattern: Pattern) -> NDArray[np.int64]:
    rows, cols = pattern.shape
    if pattern.kind != "general":
        step = 4 * THREADS
        if pattern.kind == "dense":
            # A row gets as many threads as have a few entries each, 32 at most.
            lanes = 1
            while lanes < 32 and 8 * lanes <= cols:
                lanes *= 2
            step = max(1, THREADS // lanes)
        return np.append(np.arange(0, rows, step, dtype=np.int64), rows)
    indptr, tiles = pattern.indptr, [0]
    while tiles[-1] < rows:
        first = tiles[-1]
        last = int(np.searchsorted(indptr, int(indptr[first]) + STAGE, side="right")) - 1
        tiles.append(min(max(last, first + 1), first + THREADS, rows))
    return np.array(tiles, np.int64)
