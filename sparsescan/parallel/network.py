"""What communication costs: the α–β model, and the constants of a network.

A message of `m` bytes takes ``α + β·m`` nanoseconds. What a collective call takes follows from the
algorithm that MPI libraries use for it, and so does what each rank sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from ..costs import machine_file, read_constants, write_constants

if TYPE_CHECKING:
    from .communicator import Communicator

__all__ = [
    "Network",
    "allreduce_messages",
    "allreduce_rounds",
    "load_network",
    "measure",
    "network_file",
    "save_network",
]

# Of what is measured: bytes of large messages, and how often small and large ones are sent.
_LARGE, _OFTEN, _SELDOM = 1 << 20, 100, 10


@dataclass(frozen=True)
class Network:
    """Constants of a network.

    Attributes
    ----------
    name : str
        Where they come from.
    latency : float
        α: nanoseconds of a message beside its bytes.
    inverse_bandwidth : float
        β: nanoseconds a byte of a message.
    exchange : float
        The same of a round of an exclusive scan, in which ranks send and receive at once and copy.
    call : float
        Nanoseconds of a call of its operator, beside the arithmetic.
    """

    name: str
    latency: float
    inverse_bandwidth: float
    exchange: float
    call: float

    def message(self, nbytes: int) -> float:
        """Nanoseconds of a message."""
        return self.latency + self.inverse_bandwidth * nbytes

    def allreduce(self, size: int, nbytes: int) -> float:
        """Nanoseconds of an ``Allreduce`` over `size` ranks."""
        return allreduce_rounds(size) * self.message(nbytes)

    def round(self, nbytes: int) -> float:
        """Nanoseconds of a round of an ``Exscan``, beside its operators."""
        return self.latency + self.exchange * nbytes


def allreduce_rounds(size: int) -> int:
    """Messages of an ``Allreduce`` of few bytes, one after the other: recursive doubling.

    Where `size` is no power of two the ranks beyond one first give theirs to a neighbour, and get
    the result at the end (Thakur, Rabenseifner and Gropp, 2005, section 4.5).
    """
    return size.bit_length() - 1 + 2 * (size & (size - 1) > 0)


def allreduce_messages(size: int, rank: int) -> int:
    """Messages that one rank sends in it."""
    rounds = size.bit_length() - 1
    beyond = size - (1 << rounds)
    if rank < 2 * beyond:
        return 1 if rank % 2 == 0 else rounds + 1
    return rounds


def measure(communicator: Communicator) -> Network:
    """The constants between the ranks of a communicator; takes about a second.

    Messages go to and fro between the first and the last rank, the farthest apart where ranks are
    numbered node by node. The rest is explained by small and large exclusive scans.

    Parameters
    ----------
    communicator : Communicator
        All its ranks call this.

    Returns
    -------
    Network
        The same on all ranks; on a single one the constants that are built in.
    """
    if communicator.size == 1:
        return BUILT_IN
    small, large = _to_and_fro(communicator, 8, _OFTEN), _to_and_fro(communicator, _LARGE, _SELDOM)
    rounds = (communicator.size - 1).bit_length()
    tiny, huge = _scan(communicator, 8, _OFTEN), _scan(communicator, _LARGE, _SELDOM)
    found = Network(
        name=f"{communicator.size} ranks",
        latency=small,
        # Never nothing, which could not be kept.
        inverse_bandwidth=max(large - small, 1.0) / _LARGE,
        exchange=max(huge - tiny, 0.0) / rounds / _LARGE,
        call=max(tiny / rounds - small, 0.0),
    )
    made: Network = communicator.broadcast(found, 0)
    return made


def _to_and_fro(communicator: Communicator, nbytes: int, times: int) -> float:
    """Nanoseconds of a message between the first and the last rank."""
    data, last = np.zeros(nbytes // 8, np.int64), communicator.size - 1

    def there_and_back() -> None:
        if communicator.rank == 0:
            communicator.send(data, last)
            communicator.receive(data, last)
        elif communicator.rank == last:
            communicator.receive(data, 0)
            communicator.send(data, 0)

    return _median(communicator, there_and_back, times) / 2


def _scan(communicator: Communicator, nbytes: int, times: int) -> float:
    """Nanoseconds of an exclusive scan whose operator does next to nothing."""
    given, found = np.zeros((2, nbytes // 8), np.int64)

    def scan() -> None:
        communicator.exclusive_scan(given, found, lambda a, b: None, 0)

    return _median(communicator, scan, times)


def _median(communicator: Communicator, call: Callable[[], None], times: int) -> float:
    """Nanoseconds of a call that all ranks make together, as the slowest of them finds."""
    samples = []
    for _ in range(times):
        communicator.agree()
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return float(communicator.maximum([round(median(samples))])[0])


def network_file() -> Path:
    """Where the constants are kept: beside those of the machine."""
    return machine_file().with_name("network.json")


def load_network(path: Path | None = None) -> Network:
    """The constants that were measured, or those built in."""
    positive = ("latency", "inverse_bandwidth")
    found: Network | None = read_constants(path or network_file(), Network, {}, positive)
    return found or BUILT_IN


def save_network(network: Network, path: Path | None = None) -> Path:
    """Write constants to a file; the path."""
    return write_constants(network, path or network_file())


# Of InfiniBand between machines, 2 µs and 10 GB/s, and of the call of a function of Python.
BUILT_IN = Network("built in", 2000.0, 0.1, 0.2, 20_000.0)
