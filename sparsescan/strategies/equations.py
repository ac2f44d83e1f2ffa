"""Terms of what integrated parallelism sends (Gholami et al., SPAA 2018, equations 3 to 9)."""

from __future__ import annotations

from typing import NamedTuple

from ..parallel.network import Network

__all__ = ["Volume", "all_gather", "all_reduce", "halo"]


class Volume(NamedTuple):
    """Messages that a worker sends one after the other, and the numbers in them."""

    messages: float = 0.0
    words: float = 0.0

    def __add__(self, other: Volume) -> Volume:  # type: ignore[override]
        return Volume(self.messages + other.messages, self.words + other.words)

    def __mul__(self, factor: float) -> Volume:  # type: ignore[override]
        return Volume(self.messages * factor, self.words * factor)

    def time(self, network: Network, itemsize: int = 4) -> float:
        """Return ``α·messages + β·words·itemsize``, in nanoseconds."""
        each = network.inverse_bandwidth * itemsize
        return network.latency * self.messages + each * self.words


def all_gather(workers: int, words: float) -> Volume:
    """Return ``α⌈log P⌉ + β n (P - 1)/P``, for `words` numbers in all: equation 6."""
    return Volume((workers - 1).bit_length(), words * (workers - 1) / workers)


def all_reduce(workers: int, words: float) -> Volume:
    """Return ``2 (α⌈log P⌉ + β n (P - 1)/P)``, as equation 4 has it of each layer's weights."""
    return all_gather(workers, words) * 2


def halo(row: int, size: int, samples: float) -> Volume:
    """Return ``α + β B X_W X_C ⌊k/2⌋``, to one neighbour; nothing for a kernel of 1: equation 7."""
    rows = size // 2
    return Volume(1, samples * row * rows) if rows else Volume()
