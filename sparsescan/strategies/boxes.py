"""Ranges and boxes: what of an axis or a tensor each rank has, and what moves between ranks.

A box is a range of indices along every axis. The owner of a block sends of it what others need, the
intersections of boxes; so one rule moves a tensor between any two partitions, copies it, gathers
it, and brings the halo that the windows of a convolution reach into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..parallel.communicator import Communicator

__all__ = [
    "Box",
    "Range",
    "Redistribution",
    "blocks",
    "bounds",
    "cut",
    "intersection",
    "parts",
    "shape_of",
    "volume",
]

#: First index, and the one behind the last.
Range = tuple[int, int]
#: A range along every axis.
Box = tuple[Range, ...]
Array = NDArray[Any]


def bounds(length: Any, part: Any, count: Any) -> tuple[Any, Any]:
    """Return the range of one of `count` parts of almost equal length; of integers or arrays."""
    return length * part // count, length * (part + 1) // count


def parts(length: int, count: int) -> list[Range]:
    """Return the ranges of all `count` parts."""
    return [bounds(length, part, count) for part in range(count)]


def blocks(shape: Sequence[int], degrees: Sequence[int], ranks: int) -> list[Box]:
    """Cut a shape into so many blocks along every axis; ranks that are left over get empty ones."""
    boxes: list[Box] = [
        tuple(bounds(*axis) for axis in zip(shape, place, degrees, strict=True))
        for place in np.ndindex(*degrees)
    ]
    return boxes + [((0, 0),) * len(shape)] * (ranks - len(boxes))


def intersection(a: Box, b: Box) -> Box:
    """Return the box that two boxes share, of volume 0 if there is none."""
    lows = [max(i, k) for (i, _), (k, _) in zip(a, b, strict=True)]
    highs = [min(j, m) for (_, j), (_, m) in zip(a, b, strict=True)]
    return tuple((low, max(low, high)) for low, high in zip(lows, highs, strict=True))


def volume(box: Box) -> int:
    """Return the number of entries of a box."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the size of a box along every axis."""
    return tuple(stop - start for start, stop in box)


class Redistribution:
    """From the blocks that ranks own of a tensor to the boxes of it that they need.

    Parameters
    ----------
    owned : sequence of Box
        The block of every rank; they do not overlap.
    needed : sequence of Box
        The box that every rank needs. It may reach beyond the tensor.

    Examples
    --------
    Two ranks, each with half of a signal, need one entry more on either side:

    >>> from sparsescan.strategies.boxes import Redistribution
    >>> halo = Redistribution([((0, 4),), ((4, 8),)], [((-1, 5),), ((3, 9),)])
    >>> halo.sent(0), halo.received(0)
    (1, 1)
    """

    def __init__(self, owned: Sequence[Box], needed: Sequence[Box]) -> None:
        self.owned, self.needed = list(owned), list(needed)
        self._shared: dict[tuple[str, int], list[tuple[int, Box]]] = {}

    def sent(self, rank: int) -> int:
        """Count the entries that a rank sends to others; backward, that it receives from them."""
        return sum(volume(box) for other, box in self._outgoing(rank) if other != rank)

    def received(self, rank: int) -> int:
        """Count the entries that a rank receives from others; backward, that it sends them."""
        return sum(volume(box) for other, box in self._incoming(rank) if other != rank)

    def forward(
        self, communicator: Communicator, block: Array, dtype: DTypeLike, fill: float = 0.0
    ) -> Array:
        """Return the box that this rank needs; collective.

        Parameters
        ----------
        communicator : Communicator
            The ranks.
        block : ndarray
            The block that this rank owns.
        dtype : dtype
            Dtype of the tensor.
        fill : float
            Value around the tensor.
        """
        if self.owned == self.needed:
            return np.asarray(block, dtype)
        rank = communicator.rank
        whole = np.full(shape_of(self.needed[rank]), fill, dtype)
        outgoing = [(r, block[_at(box, self.owned[rank])]) for r, box in self._outgoing(rank)]
        incoming = self._incoming(rank)
        arrived = self._exchange(communicator, outgoing, incoming, dtype)
        for (_, box), part in zip(incoming, arrived, strict=True):
            whole[_at(box, self.needed[rank])] = part
        return whole

    def backward(self, communicator: Communicator, grad: Array, dtype: DTypeLike) -> Array:
        """Return gradients of the block that this rank owns, summed in the order of ranks.

        Collective; `grad` are gradients of the box that this rank needed.
        """
        if self.owned == self.needed:
            return np.asarray(grad, dtype)
        rank = communicator.rank
        total = np.zeros(shape_of(self.owned[rank]), dtype)
        outgoing = [(r, grad[_at(box, self.needed[rank])]) for r, box in self._incoming(rank)]
        incoming = self._outgoing(rank)
        arrived = self._exchange(communicator, outgoing, incoming, dtype)
        for (_, box), part in zip(incoming, arrived, strict=True):
            total[_at(box, self.owned[rank])] += part
        return total

    def _outgoing(self, rank: int) -> list[tuple[int, Box]]:
        """Return which ranks need part of the block of a rank, itself included, and which part."""
        return self._intersections("owned", rank, self.owned[rank], self.needed)

    def _incoming(self, rank: int) -> list[tuple[int, Box]]:
        """Return which ranks own part of the box that a rank needs, and which part."""
        return self._intersections("needed", rank, self.needed[rank], self.owned)

    def _intersections(
        self, side: str, rank: int, box: Box, others: Sequence[Box]
    ) -> list[tuple[int, Box]]:
        if (side, rank) not in self._shared:
            shared = [(k, intersection(box, other)) for k, other in enumerate(others)]
            self._shared[side, rank] = [(k, part) for k, part in shared if volume(part)]
        return self._shared[side, rank]

    def _exchange(
        self,
        communicator: Communicator,
        outgoing: list[tuple[int, Array]],
        incoming: list[tuple[int, Box]],
        dtype: DTypeLike,
    ) -> list[Array]:
        """Send arrays, and return one for each incoming box; what stays here is not copied."""
        here = communicator.rank
        own = {rank: part for rank, part in outgoing if rank == here}
        arrays = [own[r] if r == here else np.empty(shape_of(box), dtype) for r, box in incoming]
        communicator.exchange(
            [(r, np.ascontiguousarray(part, dtype)) for r, part in outgoing if r != here],
            [(r, part) for (r, _), part in zip(incoming, arrays, strict=True) if r != here],
        )
        return arrays


def _at(part: Box, whole: Box) -> tuple[slice, ...]:
    """Return where a box lies in the array of another one."""
    return tuple(
        slice(i - start, j - start) for (i, j), (start, _) in zip(part, whole, strict=True)
    )


def cut(tensor: Array, box: Box, fill: float = 0.0) -> Array:
    """Return a box of a tensor; where it reaches beyond the tensor it is filled."""
    whole: Box = tuple((0, size) for size in tensor.shape)
    inner, part = intersection(box, whole), np.full(shape_of(box), fill, tensor.dtype)
    if volume(inner):
        part[_at(inner, box)] = tensor[_at(inner, whole)]
    return part
