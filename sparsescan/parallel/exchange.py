"""Messages of MPI's collective calls, and which elements ranks combine in an exclusive scan.

Libraries make an all-reduce of a few words by recursive doubling. In an exclusive scan elements are
ranges ``[start, stop)`` of ranks; MPI leaves the algorithm to the library, and there are two.
*Doubling* (MPICH, and most others): in round `k` ranks that differ in bit `k` exchange the
combinations of their blocks of ``2^k``. *Linear* (Open MPI, unless told otherwise): each rank waits
for the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

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


def allreduce_rounds(size: int) -> int:
    """Return the messages of an ``Allreduce`` that follow each other.

    Where `size` is no power of two the ranks beyond one first send their values to a neighbour,
    and receive the result at the end (Thakur, Rabenseifner and Gropp, 2005, section 4.5).
    """
    return size.bit_length() - 1 + 2 * (size & (size - 1) > 0)


def allreduce_messages(size: int, rank: int) -> int:
    """Return the messages that one rank sends in an ``Allreduce``."""
    rounds = size.bit_length() - 1
    beyond = size - (1 << rounds)
    if rank < 2 * beyond:
        return 1 if rank % 2 == 0 else rounds + 1
    return rounds
