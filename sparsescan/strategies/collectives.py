"""Sums over ranks, made of messages so that what each rank sends is known to the byte.

A reduce-scatter and an all-gather: each rank receives, and sends, all but its own piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel.communicator import Communicator
from .boxes import bounds, parts

__all__ = ["Sums", "descend", "sum_words"]

Array = NDArray[Any]


def sum_words(length: Any, place: Any, copies: Any) -> Any:
    """Count the numbers that one of some ranks sends where these sum an array; or many such."""
    start, stop = bounds(length, place, copies)
    return length + (stop - start) * (copies - 2)


class Sums:
    """Sums of arrays over the ranks that have them, of all arrays in two exchanges.

    Every rank sums a piece of each array in the order of ranks and gives it to the others, so that
    all have the same bits.

    Parameters
    ----------
    communicator : Communicator
        The ranks.
    arrays : sequence of tuple
        Of each array that this rank has, the length and the ranks that have it, in order.
    """

    def __init__(
        self, communicator: Communicator, arrays: Iterable[tuple[int, Sequence[int]]]
    ) -> None:
        self._communicator, start = communicator, 0
        # By rank, where the pieces lie that it sums for this one, and those summed here for it.
        theirs: dict[int, list[Array]] = {}
        own: dict[int, list[Array]] = {}
        for size, ranks in arrays:
            pieces = [start + np.arange(*piece) for piece in parts(size, len(ranks))]
            for rank, piece in zip(ranks, pieces, strict=True):
                theirs.setdefault(rank, []).append(piece)
                own.setdefault(rank, []).append(pieces[ranks.index(communicator.rank)])
            start += size
        self._theirs = {rank: np.concatenate(theirs[rank]) for rank in sorted(theirs)}
        self._own = {rank: np.concatenate(own[rank]) for rank in sorted(own)}

    def total(self, flat: Array) -> Array:
        """Return the sums of all arrays, which lie one behind the other; collective."""
        total = np.zeros_like(flat)
        given = {rank: flat[where] for rank, where in self._theirs.items()}
        for rank, part in self._exchanged(given, self._own).items():
            total[self._own[rank]] += part
        given = {rank: total[where] for rank, where in self._own.items()}
        for rank, part in self._exchanged(given, self._theirs).items():
            total[self._theirs[rank]] = part
        return total

    def _exchanged(
        self, parts: Mapping[int, Array], places: Mapping[int, Array]
    ) -> dict[int, Array]:
        """Give each rank its part, and return what each gives, which is as long as its place."""
        here = self._communicator.rank
        found = {
            rank: parts[rank] if rank == here else np.empty(len(place), parts[rank].dtype)
            for rank, place in places.items()
        }
        self._communicator.exchange(
            [(rank, part) for rank, part in parts.items() if rank != here and len(part)],
            [(rank, part) for rank, part in found.items() if rank != here and len(part)],
        )
        return found


def descend(
    parameters: Sequence[dict[str, Array]],
    grads: Sequence[dict[str, Array]],
    learning_rate: float,
    total: Callable[[Array], Array] | None = None,
) -> None:
    """Take a step of SGD, ``θ ← θ − learning_rate · ∇θ``.

    Parameters
    ----------
    parameters, grads : sequence of dict of str to ndarray
        Parameters of every layer, which are changed in place, and their gradients.
    learning_rate : float
        The factor.
    total : callable, optional
        Sums an array of all gradients, in one axis, over the ranks with the same parameters.
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
