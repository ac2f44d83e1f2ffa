"""Boxes: tensors in blocks on ranks, and what moves when other boxes of them are needed.

A box is a range of indices along every axis. Who owns a block sends of it what others need, which
is where the boxes intersect; so one rule moves a tensor between any two partitions, copies it,
gathers it, and brings the halo that the windows of a convolution reach into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..communicator import Communicator

__all__ = ["Box", "Redistribution", "blocks", "cut", "intersection", "shape_of", "volume"]

#: First index and the one behind the last, along every axis.
Box = tuple[tuple[int, int], ...]
Array = NDArray[Any]


def blocks(shape: Sequence[int], degrees: Sequence[int], ranks: int) -> list[Box]:
    """Blocks of almost equal size, so many along every axis; empty ones for the ranks left over."""
    boxes: list[Box] = []
    for place in np.ndindex(*degrees):
        axes = zip(place, shape, degrees, strict=True)
        boxes.append(tuple((i * n // d, (i + 1) * n // d) for i, n, d in axes))
    return boxes + [((0, 0),) * len(shape)] * (ranks - len(boxes))


def intersection(a: Box, b: Box) -> Box:
    """What is in both boxes; of volume 0 if nothing is."""
    return tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))


def volume(box: Box) -> int:
    """Entries of a box."""
    return math.prod(max(stop - start, 0) for start, stop in box)


class Redistribution:
    """From the blocks that ranks own of a tensor to the boxes of it that they need.

    Parameters
    ----------
    owned : sequence of Box
        The block of every rank; they do not overlap.
    needed : sequence of Box
        The box that every rank needs. It may reach beyond the tensor.

    Attributes
    ----------
    owned, needed : list of Box
        As given.

    Examples
    --------
    Two ranks, each with half of a signal, need one entry more on either side:

    >>> from sparsescan.parallel.strategies.boxes import Redistribution
    >>> halo = Redistribution([((0, 4),), ((4, 8),)], [((-1, 5),), ((3, 9),)])
    >>> halo.sent(0), halo.received(0)
    (1, 1)
    """

    def __init__(self, owned: Sequence[Box], needed: Sequence[Box]) -> None:
        self.owned, self.needed = list(owned), list(needed)
        self._known: dict[tuple[str, int], list[tuple[int, Box]]] = {}

    def sent(self, rank: int) -> int:
        """Entries that a rank sends to others; backward, that it receives from them."""
        return sum(volume(box) for other, box in self._given(rank) if other != rank)

    def received(self, rank: int) -> int:
        """Entries that a rank receives from others; backward, that it sends them."""
        return sum(volume(box) for other, box in self._taken(rank) if other != rank)

    def forward(
        self, communicator: Communicator, block: Array, dtype: DTypeLike, fill: float = 0.0
    ) -> Array:
        """The box that this rank needs; collective.

        Parameters
        ----------
        communicator : Communicator
            Of all ranks.
        block : ndarray
            What this rank owns.
        dtype : dtype
            Of the tensor.
        fill : float
            What lies around the tensor.
        """
        if self.owned == self.needed:
            return np.asarray(block, dtype)
        rank = communicator.rank
        found = np.full(shape_of(self.needed[rank]), fill, dtype)
        given = self._exchange(
            communicator,
            [(r, block[_at(box, self.owned[rank])]) for r, box in self._given(rank)],
            self._taken(rank),
            dtype,
        )
        for (_, box), part in zip(self._taken(rank), given, strict=True):
            found[_at(box, self.needed[rank])] = part
        return found

    def backward(self, communicator: Communicator, grad: Array, dtype: DTypeLike) -> Array:
        """Gradients of the block that this rank owns, summed in the order of ranks; collective.

        Parameters
        ----------
        communicator : Communicator
            Of all ranks.
        grad : ndarray
            Gradients of the box that this rank needed.
        dtype : dtype
            Of the gradients.
        """
        if self.owned == self.needed:
            return np.asarray(grad, dtype)
        rank = communicator.rank
        total = np.zeros(shape_of(self.owned[rank]), dtype)
        given = self._exchange(
            communicator,
            [(r, grad[_at(box, self.needed[rank])]) for r, box in self._taken(rank)],
            self._given(rank),
            dtype,
        )
        for (_, box), part in zip(self._given(rank), given, strict=True):
            total[_at(box, self.owned[rank])] += part
        return total

    def _given(self, rank: int) -> list[tuple[int, Box]]:
        """Whom a rank gives which part of its block, itself included."""
        return self._met("given", rank, self.owned[rank], self.needed)

    def _taken(self, rank: int) -> list[tuple[int, Box]]:
        """From whom a rank takes which part of what it needs, itself included."""
        return self._met("taken", rank, self.needed[rank], self.owned)

    def _met(self, way: str, rank: int, box: Box, others: Sequence[Box]) -> list[tuple[int, Box]]:
        """Which of the others a box meets, and where; found once."""
        if (way, rank) not in self._known:
            shared = [(k, intersection(box, other)) for k, other in enumerate(others)]
            self._known[way, rank] = [(k, part) for k, part in shared if volume(part)]
        return self._known[way, rank]

    def _exchange(
        self,
        communicator: Communicator,
        parts: list[tuple[int, Array]],
        boxes: list[tuple[int, Box]],
        dtype: DTypeLike,
    ) -> list[Array]:
        """Send parts to ranks, and what comes for each box; what stays here is not copied."""
        here = communicator.rank
        own = {rank: part for rank, part in parts if rank == here}
        found = [own[r] if r == here else np.empty(shape_of(box), dtype) for r, box in boxes]
        communicator.exchange(
            [(r, np.ascontiguousarray(part, dtype)) for r, part in parts if r != here],
            [(r, part) for (r, _), part in zip(boxes, found, strict=True) if r != here],
        )
        return found


def shape_of(box: Box) -> tuple[int, ...]:
    """Sizes of a box along every axis."""
    return tuple(stop - start for start, stop in box)


def _at(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where a box lies in the array of another one."""
    return tuple(
        slice(i - start, j - start) for (i, j), (start, _) in zip(part, whole, strict=True)
    )


def cut(tensor: Array, box: Box, fill: float = 0.0) -> Array:
    """A box of a tensor that is at hand; it may reach beyond, where it is filled."""
    whole: Box = tuple((0, size) for size in tensor.shape)
    inner, found = intersection(box, whole), np.full(shape_of(box), fill, tensor.dtype)
    if volume(inner):
        found[_at(inner, box)] = tensor[_at(inner, whole)]
    return found
