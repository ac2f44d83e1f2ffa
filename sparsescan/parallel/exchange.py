"""Which elements each rank combines in an exclusive scan of MPI, and which it sends.

Elements are ranges ``[start, stop)`` of ranks. MPI leaves the algorithm to the library, and there
are two. *Doubling* (MPICH, and most others): in round `k` ranks that differ in bit `k`
exchange the combinations of their blocks of ``2^k``. *Linear* (Open MPI, unless told otherwise):
each rank waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .communicator import Communicator

__all__ = ["ALGORITHMS", "Merge", "exscan_messages", "observe", "rounds"]

ALGORITHMS = ("doubling", "linear")


class Merge(NamedTuple):
    """``[start, stop) = [start, mid) ◇ [mid, stop)``."""

    start: int
    mid: int
    stop: int


def rounds(algorithm: str, size: int) -> list[list[list[Merge]]]:
    """Return the merges of each rank in each round, after it has received."""
    return _doubling(size) if algorithm == "doubling" else _linear(size)


def _doubling(size: int) -> list[list[list[Merge]]]:
    blocks = [(rank, rank + 1) for rank in range(size)]
    prefixes: list[tuple[int, int] | None] = [None] * size
    all_rounds = []
    bit = 1
    while bit < size:
        merges: list[list[Merge]] = [[] for _ in range(size)]
        after = list(blocks)
        for rank in range(size):
            partner = rank ^ bit
            if partner >= size:
                continue
            mine, other = blocks[rank], blocks[partner]
            first, second = (other, mine) if partner < rank else (mine, other)
            merges[rank].append(Merge(first[0], second[0], second[1]))
            after[rank] = first[0], second[1]
            if partner < rank:
                prefix = prefixes[rank]
                if prefix is not None:
                    merges[rank].append(Merge(other[0], prefix[0], prefix[1]))
                prefixes[rank] = other[0], rank
        blocks = after
        all_rounds.append(merges)
        bit *= 2
    return all_rounds


def _linear(size: int) -> list[list[list[Merge]]]:
    all_rounds = []
    for rank in range(1, size):
        merges: list[list[Merge]] = [[] for _ in range(size)]
        if rank < size - 1:
            merges[rank].append(Merge(0, rank, rank + 1))
        all_rounds.append(merges)
    return all_rounds


def exscan_messages(algorithm: str, size: int, rank: int) -> int:
    """Return the messages that one rank sends."""
    if algorithm == "linear":
        return int(rank < size - 1)
    return sum((rank ^ (1 << k)) < size for k in range((size - 1).bit_length()))


def observe(communicator: Communicator, buffers: NDArray[np.int64]) -> str:
    """Return the algorithm that the MPI library runs for elements of this size, after one scan.

    `buffers` are two, of two words or more.
    """
    element, prefix = buffers
    element[:2] = communicator.rank, communicator.rank + 1
    seen: list[Merge] = []

    def note(a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
        seen.append(Merge(int(a[0]), int(b[0]), int(b[1])))
        b[0] = a[0]

    communicator.exclusive_scan(element, prefix, note, 0)
    everywhere: Sequence[list[Merge]] = communicator.gather(sorted(seen))
    for algorithm in ALGORITHMS:
        if everywhere == _in_order(rounds(algorithm, communicator.size)):
            return algorithm
    # A vendor may have another one, which will not be worse than the usual.
    return ALGORITHMS[0]


def _in_order(scan: Sequence[Sequence[Sequence[Merge]]]) -> list[list[Merge]]:
    """Return the merges of every rank in all rounds of a scan, sorted."""
    size = len(scan[0]) if scan else 1
    return [sorted(merge for merges in scan for merge in merges[rank]) for rank in range(size)]


def total(time: Callable[[Merge], float], scan: Sequence[Sequence[Sequence[Merge]]]) -> float:
    """Return the time of all rounds, if in each the slowest rank holds up the others."""
    return sum(
        max((sum(time(merge) for merge in merges) for merges in ranks), default=0.0)
        for ranks in scan
    )
