"""Collectives made of messages, so that what each rank sends is known to the byte.

An all-gather is Bruck's: ⌈log₂ P⌉ messages a rank, and every block but one is sent by each. A
reduce-scatter is the reverse, and an all-reduce is one and then the other (Thakur,
Rabenseifner and Gropp, 2005, sections 4.1 and 4.4). So an all-gather of ``n`` numbers takes
``α⌈log P⌉ + β n (P - 1)/P``, and an all-reduce twice that, for any ``P``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel.communicator import Communicator
from .boxes import parts

__all__ = ["all_gather", "all_reduce", "descend", "gather_words", "lengths", "reduce_words"]

Array = NDArray[Any]


def lengths(length: int, count: int) -> NDArray[np.int64]:
    """Return the lengths of `count` parts of almost equal length."""
    return np.array([stop - start for start, stop in parts(length, count)], np.int64)


def _rounds(size: int) -> Iterator[tuple[int, int]]:
    """Yield the distance of the messages of each round, and the blocks in each of them."""
    far = 1
    while far < size:
        yield far, min(far, size - far)
        far *= 2


def gather_words(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the numbers each rank sends in an all-gather of blocks of these sizes (last axis)."""
    twice = np.concatenate([sizes, sizes], axis=-1)
    sums = np.concatenate([np.zeros_like(twice[..., :1]), twice.cumsum(axis=-1)], axis=-1)
    size = sizes.shape[-1]
    sent = np.zeros_like(sizes)
    for _, count in _rounds(size):
        sent += sums[..., count : count + size] - sums[..., :size]
    return sent


def reduce_words(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the numbers each rank sends in an all-reduce of an array with parts of these sizes."""
    sent: NDArray[np.int64] = sizes.sum(axis=-1, keepdims=True) - sizes + gather_words(sizes)
    return sent


def all_gather(communicator: Communicator, block: Array, sizes: Sequence[int]) -> list[Array]:
    """Return the blocks of all ranks, one axis each; `sizes` are their lengths."""
    rank, size = communicator.rank, communicator.size
    blocks = [np.empty(length, block.dtype) for length in sizes]
    blocks[rank] = np.ascontiguousarray(block).reshape(-1)
    for far, count in _rounds(size):
        there, back = (rank - far) % size, (rank + far) % size
        sent = [blocks[(rank + k) % size] for k in range(count)]
        arrived = [blocks[(back + k) % size] for k in range(count)]
        _swap(communicator, there, np.concatenate(sent), back, arrived)
    return blocks


def all_reduce(communicator: Communicator, array: Array) -> Array:
    """Return the sum of the arrays of all ranks, in one axis, with the same bits on all ranks."""
    rank, size = communicator.rank, communicator.size
    if size == 1:
        return array
    blocks = [array[a:b].copy() for a, b in parts(len(array), size)]
    for far, count in reversed(list(_rounds(size))):
        there, back = (rank + far) % size, (rank - far) % size
        sent = [blocks[(there + k) % size] for k in range(count)]
        arrived = [np.empty_like(blocks[(rank + k) % size]) for k in range(count)]
        _swap(communicator, there, np.concatenate(sent), back, arrived)
        for k, block in enumerate(arrived):
            blocks[(rank + k) % size] += block
    return np.concatenate(all_gather(communicator, blocks[rank], [len(b) for b in blocks]))


def _swap(
    communicator: Communicator, there: int, outgoing: Array, back: int, blocks: list[Array]
) -> None:
    """Send an array to one rank, and fill blocks with what another one sends."""
    incoming = np.empty(sum(map(len, blocks)), outgoing.dtype)
    sends = [(there, outgoing)] if len(outgoing) else []
    receives = [(back, incoming)] if len(incoming) else []
    communicator.exchange(sends, receives)
    start = 0
    for block in blocks:
        block[:] = incoming[start : start + len(block)]
        start += len(block)


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
