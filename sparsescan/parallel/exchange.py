"""Who combines what in an exclusive scan of MPI, and what each rank sends.

Elements are ranges ``[start, stop)`` of ranks. MPI says what comes out, not how; libraries do one
of two things. *Doubling* (MPICH, and most others): in round `k` ranks that differ in bit `k`
exchange what their blocks of ``2^k`` combine to. *Linear* (Open MPI, unless told otherwise): each
rank waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .communicator import Communicator

__all__ = ["ALGORITHMS", "Merge", "exscan_messages", "observe", "operations", "rounds"]

ALGORITHMS = ("doubling", "linear")


class Merge(NamedTuple):
    """``[start, stop) = [start, mid) ◇ [mid, stop)``."""

    start: int
    mid: int
    stop: int


def rounds(algorithm: str, size: int) -> list[list[list[Merge]]]:
    """What each rank combines in each round, after it has received."""
    return _doubling(size) if algorithm == "doubling" else _linear(size)


def _doubling(size: int) -> list[list[list[Merge]]]:
    blocks = [(rank, rank + 1) for rank in range(size)]
    prefixes: list[tuple[int, int] | None] = [None] * size
    found = []
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
        found.append(merges)
        bit *= 2
    return found


def _linear(size: int) -> list[list[list[Merge]]]:
    found = []
    for rank in range(1, size):
        merges: list[list[Merge]] = [[] for _ in range(size)]
        if rank < size - 1:
            merges[rank].append(Merge(0, rank, rank + 1))
        found.append(merges)
    return found


def operations(algorithm: str, size: int, rank: int) -> int:
    """Calls of the operator on one rank."""
    return sum(len(merges[rank]) for merges in rounds(algorithm, size))


def exscan_messages(algorithm: str, size: int, rank: int) -> int:
    """Messages that one rank sends."""
    if algorithm == "linear":
        return int(rank < size - 1)
    return sum((rank ^ (1 << k)) < size for k in range((size - 1).bit_length()))


def observe(communicator: Communicator, buffers: NDArray[np.int64]) -> str:
    """Which algorithm the MPI library runs for elements as large as these: one scan that looks.

    `buffers` are two, of two words or more.
    """
    given, found = buffers
    given[:2] = communicator.rank, communicator.rank + 1
    seen: list[Merge] = []

    def note(a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
        seen.append(Merge(int(a[0]), int(b[0]), int(b[1])))
        b[0] = a[0]

    communicator.exclusive_scan(given, found, note, 0)
    everywhere: Sequence[list[Merge]] = communicator.gather(sorted(seen))
    for algorithm in ALGORITHMS:
        if everywhere == _in_order(rounds(algorithm, communicator.size)):
            return algorithm
    # Another one, of a vendor maybe: it will not be worse than the usual.
    return ALGORITHMS[0]


def _in_order(made: Sequence[Sequence[Sequence[Merge]]]) -> list[list[Merge]]:
    """All merges of every rank, sorted."""
    size = len(made[0]) if made else 1
    return [sorted(merge for merges in made for merge in merges[rank]) for rank in range(size)]


def total(time: Callable[[Merge], float], made: Sequence[Sequence[Sequence[Merge]]]) -> float:
    """What the merges of all rounds take, if in each round the slowest rank holds up the others."""
    return sum(
        max((sum(time(merge) for merge in merges) for merges in ranks), default=0.0)
        for ranks in made
    )
