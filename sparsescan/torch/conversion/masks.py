"""Masks of pruned weights, compared by content at each call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...execution.calls import call_all
from ...kernels.cpu.masks import count_changes
from ...locks import cached_property

# Entries of a mask that are a task.
_TASK = 1 << 18


class Kept:
    """The weights that a mask keeps.

    Attributes
    ----------
    shape : tuple of int
        Shape of the weights.
    """

    def __init__(self, is_kept: NDArray[np.bool_]) -> None:
        self.shape = is_kept.shape
        self._is_kept = is_kept.reshape(-1).astype(np.int8)

    @cached_property
    def count(self) -> int:
        """How many are kept."""
        return int(np.count_nonzero(self._is_kept))

    @cached_property
    def places(self) -> Tensor:
        """Where kept weights are among all, in order."""
        return torch.from_numpy(np.flatnonzero(self._is_kept))

    def full(self, values: Tensor | float, dtype: torch.dtype) -> Tensor:
        """Return an array of the weights' shape with these values among zeros."""
        array = torch.zeros(self.shape, dtype=dtype, device="cpu")
        array.view(-1)[self.places] = values
        return array

    def changes(self, mask: NDArray[Any]) -> tuple[list[partial[None]], NDArray[np.int64]]:
        """Return tasks that compare a mask, and where they count changes."""
        ends = range(0, mask.size, _TASK)
        counts, entries = np.zeros(len(ends), np.int64), mask.reshape(-1)
        return [
            partial(count_changes, a, min(a + _TASK, mask.size), self._is_kept, entries, counts, k)
            for k, a in enumerate(ends)
        ], counts


# Equal masks have one object, as long as somebody holds it; by shape and bits.
_kept: weakref.WeakValueDictionary[Any, Kept] = weakref.WeakValueDictionary()


def kept_now(
    masks: Sequence[Tensor], dtype: torch.dtype, before: Sequence[Kept | None]
) -> list[Kept] | None:
    """Return what masks keep; None if one of them has something other than 0 and 1.

    Parameters
    ----------
    masks : sequence of Tensor
        The masks.
    dtype : dtype
        That of the weights, to which masks are converted.
    before : sequence of Kept or None
        What they kept at the call before, which is found again fastest.
    """
    arrays = [each.detach().to(dtype).contiguous().numpy() for each in masks]
    changes = [
        known.changes(array) if known is not None and known.shape == array.shape else ([], None)
        for array, known in zip(arrays, before, strict=True)
    ]
    call_all([task for tasks, _ in changes for task in tasks])
    kept: list[Kept] = []
    for array, known, (_, counts) in zip(arrays, before, changes, strict=True):
        own = known if counts is not None and not counts.any() else _kept_of(array)
        if own is None:
            return None
        kept.append(own)
    return kept


def _kept_of(mask: NDArray[Any]) -> Kept | None:
    is_kept = mask != 0
    if not (mask[is_kept] == 1).all():
        return None
    key = mask.shape, np.packbits(is_kept).tobytes()
    kept = _kept.get(key)
    return _kept.setdefault(key, Kept(is_kept)) if kept is None else kept
