"""Messages of MPI's all-reduce of a few words, which libraries make by recursive doubling."""

from __future__ import annotations

__all__ = ["allreduce_messages", "allreduce_rounds"]


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
