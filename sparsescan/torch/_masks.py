"""Masks of pruned weights, compared by content, and the masked weights that a call leaves behind.

PyTorch's hook sets ``layer.weight`` to the product of mask and parameter before each call. Here it
is memory that is used again, unless somebody still has it: only kept weights are written, if the
mask is what it was, and nobody has changed the zeros around them. One pass over both tells.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..execution.calls import call_all
from ..kernels.cpu.masks import apply_mask

__all__ = ["Kept", "Masked", "Pruned", "apply_masks"]

Array = NDArray[Any]

# Words of a mask that are a task.
_TASK = 1 << 18
# Memory that is kept for the weight of each layer: of the graph that is built, and of the last one.
_ROOMS = 2


class Kept:
    """The places of the weights that a mask keeps.

    Attributes
    ----------
    places : ndarray of int
        Where they are among all, in order.
    parts : list of tuple
        Parts of all words, and the parts of `places` in them, for a task each.
    """

    def __init__(self, is_kept: NDArray[np.bool_]) -> None:
        words = is_kept.size
        places = np.flatnonzero(is_kept)
        self.places = places.astype(np.int32) if words < 1 << 31 else places
        self.shape = is_kept.shape
        ends = [*range(0, words, _TASK), words]
        entries = np.searchsorted(places, ends).tolist()
        spans = zip(ends[:-1], ends[1:], entries[:-1], entries[1:], strict=True)
        self.parts = [((a, b), (c, d)) for a, b, c, d in spans]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return the mask as a tensor of zeros and ones."""
        mask = torch.zeros(self.shape, dtype=dtype, device="cpu")
        mask.view(-1)[torch.from_numpy(self.places).long()] = 1
        return mask


# Equal masks have one object, as long as somebody holds it; by shape and bits.
_kept: weakref.WeakValueDictionary[Any, Kept] = weakref.WeakValueDictionary()


def _kept_of(mask: Array) -> Kept | None:
    """Return the places that a mask keeps; None if there is something other than 0 and 1."""
    is_kept = mask != 0
    if not (mask[is_kept] == 1).all():
        return None
    key = mask.shape, np.packbits(is_kept).tobytes()
    kept = _kept.get(key)
    if kept is None:
        kept = _kept.setdefault(key, Kept(is_kept))
    return kept


class Pruned(NamedTuple):
    """A layer whose weight is pruned, and what its mask was at the call before."""

    module: nn.Module
    mask: Tensor
    weight: Tensor
    before: Kept | None


class Masked(NamedTuple):
    """The masked weight of a layer at one call.

    Attributes
    ----------
    kept : Kept
        What the mask is now.
    room : ndarray
        The product of mask and weight.
    """

    kept: Kept
    room: Array


class _Room(NamedTuple):
    """One pass over the mask and the weight of a layer."""

    kept: Kept
    room: Array
    mask: Array
    weight: Array
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, kept: Kept, room: Array, mask: Array, weight: Array) -> _Room:
        return cls(kept, room, mask, weight, np.zeros((len(kept.parts), 4), np.int64))

    def tasks(self) -> list[Any]:
        room, mask, weight = (each.reshape(-1) for each in (self.room, self.mask, self.weight))
        bits = f"i{room.itemsize}"
        arrays = self.kept.places, mask, mask.view(bits), weight, room, room.view(bits)
        return [
            partial(apply_mask, *part, *arrays, counts)
            for part, counts in zip(self.kept.parts, self.counts, strict=True)
        ]

    def is_as_before(self) -> bool:
        """Return whether the mask is the one that is known."""
        in_mask, ones, _, _ = self.counts.sum(0).tolist()
        return bool(in_mask == ones == len(self.kept.places))

    def is_clean(self) -> bool:
        """Return whether there were zeros where nothing is kept."""
        _, _, everywhere, at_places = self.counts.sum(0).tolist()
        return bool(everywhere == at_places)


def apply_masks(layers: Sequence[Pruned]) -> list[Masked] | None:
    """Multiply weights by their masks; None if a mask has something other than 0 and 1."""
    passes: list[_Room] = []
    for layer in layers:
        weight = _array(layer.weight, layer.weight.dtype)
        mask = _array(layer.mask, layer.weight.dtype)
        kept = layer.before
        if kept is None or kept.shape != mask.shape:
            kept = _kept_of(mask)
            if kept is None:
                return None
        passes.append(_Room.of(kept, _take(layer.module, weight), mask, weight))
    call_all([task for each in passes for task in each.tasks()])
    for k, each in enumerate(passes):
        if not each.is_as_before():
            kept = _kept_of(each.mask)
            if kept is None:
                return None
            each.room[...] = 0
            passes[k] = each = _Room.of(kept, *each[1:4])
            call_all(each.tasks())
        if not each.is_clean():
            each.room[...] = 0
            call_all(each.tasks())
    return [Masked(each.kept, each.room) for each in passes]


def _array(tensor: Tensor, dtype: torch.dtype) -> Array:
    array: Array = tensor.detach().to(dtype).contiguous().numpy()
    return array


_lock = threading.Lock()
_rooms: weakref.WeakKeyDictionary[nn.Module, list[Array]] = weakref.WeakKeyDictionary()


def _references(rooms: list[Array]) -> int:
    """Return how many references there are to the array of a list, as :func:`_take` counts them."""
    room = rooms[0]
    return sys.getrefcount(room)


# Those of the list, and of the count itself.
_ALONE = _references([np.zeros(1)])


def _take(module: nn.Module, like: Array) -> Array:
    """Return memory for a masked weight that nobody else has; the module lets go of its last."""
    vars(module).pop("weight", None)
    with _lock:
        rooms = _rooms.setdefault(module, [])
        for k in range(len(rooms)):
            fits = rooms[k].shape == like.shape and rooms[k].dtype == like.dtype
            if fits and _references(rooms[k : k + 1]) == _ALONE + 1:
                return rooms[k]
        room = np.zeros(like.shape, like.dtype)
        rooms.append(room)
        del rooms[:-_ROOMS]
        return room
