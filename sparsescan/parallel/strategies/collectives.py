"""Collectives made of messages, so that what each rank sends is known to the byte.

An all-gather is Bruck's: ⌈log₂ P⌉ messages a rank, and every block but one is sent by each. A
reduce-scatter is the same backwards, and an all-reduce is one and then the other (Thakur,
Rabenseifner and Gropp, 2005, sections 4.1 and 4.4). So an all-gather of ``n`` numbers takes
``α⌈log P⌉ + β n (P - 1)/P``, and an all-reduce twice that, for any ``P``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..communicator import Communicator

__all__ = [
    "all_gather",
    "all_reduce",
    "fetch",
    "gather_words",
    "overlap",
    "parts",
    "reduce_words",
]

Array = NDArray[Any]
Range = tuple[int, int]


def parts(length: int, count: int) -> list[Range]:
    """Begin and end of `count` parts of almost equal length."""
    return [(length * k // count, length * (k + 1) // count) for k in range(count)]


def overlap(a: Range, b: Range) -> Range:
    """What lies in both ranges."""
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return low, max(low, high)


def _rounds(size: int) -> Iterator[tuple[int, int]]:
    """How far the messages of each round go, and how many blocks each of them is."""
    far = 1
    while far < size:
        yield far, min(far, size - far)
        far *= 2


def gather_words(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers that each rank sends in an all-gather of blocks of these sizes (the last axis)."""
    twice = np.concatenate([sizes, sizes], axis=-1)
    sums = np.concatenate([np.zeros_like(twice[..., :1]), twice.cumsum(axis=-1)], axis=-1)
    size = sizes.shape[-1]
    sent = np.zeros_like(sizes)
    for _, count in _rounds(size):
        sent += sums[..., count : count + size] - sums[..., :size]
    return sent


def reduce_words(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same of an all-reduce of an array whose parts have these sizes."""
    sent: NDArray[np.int64] = sizes.sum(axis=-1, keepdims=True) - sizes + gather_words(sizes)
    return sent


def all_gather(communicator: Communicator, block: Array, sizes: Sequence[int]) -> list[Array]:
    """The blocks of all ranks, one axis each; `sizes` are their lengths."""
    rank, size = communicator.rank, communicator.size
    blocks = [np.empty(length, block.dtype) for length in sizes]
    blocks[rank] = np.ascontiguousarray(block).reshape(-1)
    for far, count in _rounds(size):
        there, back = (rank - far) % size, (rank + far) % size
        sent = [blocks[(rank + k) % size] for k in range(count)]
        got = [blocks[(back + k) % size] for k in range(count)]
        _swap(communicator, there, np.concatenate(sent), back, got)
    return blocks


def all_reduce(communicator: Communicator, array: Array) -> Array:
    """The sum of the arrays of all ranks, in one axis: the same bits on all of them."""
    rank, size = communicator.rank, communicator.size
    if size == 1:
        return array
    blocks = [array[a:b].copy() for a, b in parts(len(array), size)]
    for far, count in reversed(list(_rounds(size))):
        there, back = (rank + far) % size, (rank - far) % size
        sent = [blocks[(there + k) % size] for k in range(count)]
        got = [np.empty_like(blocks[(rank + k) % size]) for k in range(count)]
        _swap(communicator, there, np.concatenate(sent), back, got)
        for k, block in enumerate(got):
            blocks[(rank + k) % size] += block
    return np.concatenate(all_gather(communicator, blocks[rank], [len(b) for b in blocks]))


def _swap(
    communicator: Communicator, there: int, given: Array, back: int, blocks: list[Array]
) -> None:
    """Send an array to one rank, and fill blocks with what another one sends."""
    found = np.empty(sum(map(len, blocks)), given.dtype)
    sends = [(there, given)] if len(given) else []
    receives = [(back, found)] if len(found) else []
    communicator.exchange(sends, receives)
    start = 0
    for block in blocks:
        block[:] = found[start : start + len(block)]
        start += len(block)


def fetch(
    communicator: Communicator, rows: Array, owned: Sequence[Range], needed: Sequence[Range]
) -> Array:
    """The rows that a rank needs, where each rank has some of them.

    Parameters
    ----------
    communicator : Communicator
        The ranks.
    rows : ndarray, shape (samples, channels, rows, width)
        Those of this rank.
    owned, needed : sequence of tuple of int
        Of every rank, from where to where.
    """
    rank = communicator.rank
    first, (start, stop) = owned[rank][0], needed[rank]
    found = np.empty((*rows.shape[:2], stop - start, rows.shape[3]), rows.dtype)
    sends, receives = [], []
    for other in range(communicator.size):
        low, high = overlap(owned[rank], needed[other])
        wanted = rows[:, :, low - first : high - first]
        if other == rank:
            found[:, :, low - start : high - start] = wanted
        elif wanted.size:
            sends.append((other, np.ascontiguousarray(wanted)))
        low, high = overlap(owned[other], needed[rank])
        if other != rank and low < high:
            buffer = np.empty_like(found[:, :, low - start : high - start], order="C")
            receives.append((other, low, buffer))
    communicator.exchange(sends, [(other, buffer) for other, _, buffer in receives])
    for _, low, buffer in receives:
        found[:, :, low - start : low - start + buffer.shape[2]] = buffer
    return found
