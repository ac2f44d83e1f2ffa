"""Exchanges between ranks: boxes of tensors, and sums of gradients, known to the byte.

A box is a range of indices along every axis. The owner of a block sends the parts of it that others
need, the intersections of boxes; so one rule moves a tensor between any two partitions, copies it,
gathers it, and brings the halo that the windows of a convolution reach into. A sum is a
reduce-scatter and an all-gather: each rank receives, and sends, all but its own piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..parallel.communicator import Communicator
from ..parallel.grid import bounds

#: First index, and the one behind the last.
Range = tuple[int, int]
#: A range along every axis.
Box = tuple[Range, ...]
Array = NDArray[Any]


# -- Boxes ----------------------------------------------------------------------------------------


def blocks(shape: Sequence[int], degrees: Sequence[int], ranks: int) -> list[Box]:
    """Cut a shape into so many blocks along every axis; ranks that are left over get empty ones."""
    boxes: list[Box] = [
        tuple(bounds(*axis) for axis in zip(shape, place, degrees, strict=True))
        for place in np.ndindex(*degrees)
    ]
    return boxes + [((0, 0),) * len(shape)] * (ranks - len(boxes))


def intersection(a: Box, b: Box) -> Box:
    """Return the box that two boxes share, of volume 0 if there is none."""
    ends = [(max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True)]
    return tuple((low, max(low, high)) for low, high in ends)


def volume(box: Box) -> int:
    """Return the number of entries of a box."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the size of a box along every axis."""
    return tuple(stop - start for start, stop in box)


def cut(tensor: Array, box: Box, fill: float = 0.0) -> Array:
    """Return a box of a tensor, itself if that is all; beyond the tensor it is filled."""
    whole: Box = tuple((0, size) for size in tensor.shape)
    if box == whole:
        return tensor
    inner, part = intersection(box, whole), np.full(shape_of(box), fill, tensor.dtype)
    if volume(inner):
        part[_at(inner, box)] = tensor[_at(inner, whole)]
    return part


def _at(part: Box, whole: Box) -> tuple[slice, ...]:
    """Return where a box lies in the array of another one."""
    return tuple(
        slice(i - start, j - start) for (i, j), (start, _) in zip(part, whole, strict=True)
    )


class Redistribution:
    """From the blocks that ranks own of a tensor, which do not overlap, to boxes that they need.

    A box may reach beyond the tensor.

    Examples
    --------
    Two ranks, each with half of a signal, need one entry more on either side:

    >>> from sparsescan.strategies.exchanges import Redistribution
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
        """Return the box that this rank needs, filled around the tensor; collective."""
        if self.owned == self.needed:
            return np.asarray(block, dtype)
        rank = communicator.rank
        whole = np.full(shape_of(self.needed[rank]), fill, dtype)
        outgoing = [(r, block[_at(box, self.owned[rank])]) for r, box in self._outgoing(rank)]
        for box, part in _exchanged(communicator, outgoing, self._incoming(rank), dtype):
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
        for box, part in _exchanged(communicator, outgoing, self._outgoing(rank), dtype):
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


def _exchanged(
    communicator: Communicator,
    outgoing: Sequence[tuple[int, Array]],
    incoming: Sequence[tuple[int, Box]],
    dtype: DTypeLike,
) -> list[tuple[Box, Array]]:
    """Send arrays, and return one for each incoming box; what stays here is not copied."""
    here = communicator.rank
    own = {rank: part for rank, part in outgoing if rank == here}
    arrays = [own[r] if r == here else np.empty(shape_of(box), dtype) for r, box in incoming]
    communicator.exchange(
        [(r, np.ascontiguousarray(part, dtype)) for r, part in outgoing if r != here and part.size],
        [
            (r, part)
            for (r, _), part in zip(incoming, arrays, strict=True)
            if r != here and part.size
        ],
    )
    return [(box, part) for (_, box), part in zip(incoming, arrays, strict=True)]


# -- Sums -----------------------------------------------------------------------------------------


def sum_words(length: Any, place: Any, copies: Any) -> Any:
    """Count the numbers that one of some ranks sends where these sum an array; or many such."""
    start, stop = bounds(length, place, copies)
    return length + (stop - start) * (copies - 2)


class GradientSums:
    """Sums of arrays over the ranks that have them, of all arrays in two exchanges.

    For each array that this rank has, `arrays` tells the length and the ranks that have it, in
    order. Every rank sums a piece of each array in the order of ranks and gives it to the others,
    so that all have the same bits.
    """

    def __init__(
        self, communicator: Communicator, arrays: Iterable[tuple[int, Sequence[int]]]
    ) -> None:
        self._communicator, start = communicator, 0
        # By rank, where the pieces lie that it sums for this one, and those summed here for it.
        theirs: dict[int, list[slice]] = {}
        own: dict[int, list[slice]] = {}
        for size, ranks in arrays:
            ends = [bounds(size, place, len(ranks)) for place in range(len(ranks))]
            pieces = [slice(start + low, start + high) for low, high in ends]
            for rank, piece in zip(ranks, pieces, strict=True):
                theirs.setdefault(rank, []).append(piece)
                own.setdefault(rank, []).append(pieces[ranks.index(communicator.rank)])
            start += size
        self._theirs, self._own = dict(sorted(theirs.items())), dict(sorted(own.items()))

    def total(self, flat: Array) -> Array:
        """Return the sums of all arrays, which lie one behind the other; collective."""
        if self._theirs.keys() <= {self._communicator.rank}:
            return flat
        total = np.zeros_like(flat)
        for where, part in self._given(flat, self._theirs, self._own):
            total[where] += part
        for where, part in self._given(total, self._own, self._theirs):
            total[where] = part
        return total

    def _given(
        self, array: Array, to: Mapping[int, list[slice]], places: Mapping[int, list[slice]]
    ) -> Iterator[tuple[slice, Array]]:
        """Give each rank its pieces of an array; yield those of each, and their places."""
        outgoing = [(rank, np.concatenate([array[i] for i in own])) for rank, own in to.items()]
        lengths = {rank: [i.stop - i.start for i in own] for rank, own in places.items()}
        incoming = [(rank, ((0, sum(each)),)) for rank, each in lengths.items()]
        arrived = _exchanged(self._communicator, outgoing, incoming, array.dtype)
        for (rank, own), (_, part) in zip(places.items(), arrived, strict=True):
            yield from zip(own, np.split(part, np.cumsum(lengths[rank])[:-1]), strict=True)


def descend(
    parameters: Sequence[dict[str, Array]],
    grads: Sequence[dict[str, Array]],
    learning_rate: float,
    total: Callable[[Array], Array] | None = None,
) -> None:
    """Take a step of SGD, ``θ ← θ − learning_rate · ∇θ``, in place, layer by layer.

    `total` sums an array of all gradients, in one axis, over the ranks with the same parameters.
    """
    pairs = [
        (own[name], grad)
        for own, layer in zip(parameters, grads, strict=True)
        for name, grad in layer.items()
    ]
    if total is None or not pairs:
        sums = [grad for _, grad in pairs]
    else:
        flat = total(np.concatenate([grad.ravel() for _, grad in pairs]))
        sums = np.split(flat, np.cumsum([grad.size for _, grad in pairs])[:-1])
    for (param, _), grad in zip(pairs, sums, strict=True):
        param -= learning_rate * grad.reshape(param.shape)
