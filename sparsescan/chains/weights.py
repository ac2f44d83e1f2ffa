"""Values of Jacobians that the caller passed as weights with an index."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import Mirrored, beside, check_memory, left_instead_of, namespace
from ..kernels import weights as kernels
from ..symbolic.indexed import IndexedPattern

# Indices of all entries, with their copies on devices, for as long as there are the patterns.
_indices: weakref.WeakKeyDictionary[IndexedPattern, Mirrored] = weakref.WeakKeyDictionary()


def gathered(index: IndexedPattern, weights: NDArray[Any], room: Any = None) -> NDArray[Any]:
    """Return the values of the rows that differ, in `room` if it is an array that suits them."""
    out = _room(index.distinct, weights.dtype, room, index)
    kernels.gather(weights, index.sources, out)
    return out


def spread(index: IndexedPattern, weights: Any, room: Any = None) -> Any:
    """Return the values of all entries, in `room` if it is an array that suits them."""
    if type(weights) is not np.ndarray:
        with beside(weights):
            xp = namespace(weights)
            if index not in _indices:
                _indices[index] = Mirrored(index.index)
            return xp.take(weights, _indices[index].on(xp))
    room = _room(index.nnz, weights.dtype, room, index)
    kernels.repeat_rows(index.pattern.indptr, index.starts, gathered(index, weights), room)
    return room


def _room(size: int, dtype: np.dtype[Any], room: Any, index: IndexedPattern) -> NDArray[Any]:
    if type(room) is np.ndarray and (room.shape, room.dtype) == ((size,), dtype):
        kept: NDArray[Any] = room
        return kept
    nbytes = size * dtype.itemsize
    if left_instead_of(nbytes) is not None:
        check_memory(f"the values of {index}", nbytes)
    return np.empty(size, dtype)
