"""Costs of communication: the α–β model, and the constants of a network.

A message of `m` bytes takes ``α + β·m`` nanoseconds. The time of a collective call, and the
messages that each rank sends, follow from the algorithm that MPI libraries use for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan.costs.constants import machine_file, read_constants, write_constants
from .communicator import Communicator
from .exchange import ALGORITHMS, Merge, allreduce_rounds, rounds

# Bytes of large messages, and how often small and large ones are sent, to measure a network.
_LARGE, _OFTEN, _SELDOM = 1 << 20, 100, 10


@dataclass(frozen=True)
class Network:
    """Constants of a network.

    Attributes
    ----------
    name : str
        Where the constants come from.
    latency : float
        α: nanoseconds of a message without its bytes.
    inverse_bandwidth : float
        β: nanoseconds per byte of a message.
    exchange : float
        Nanoseconds per byte of a round of an exclusive scan, in which ranks send, receive and copy.
    call : float
        Nanoseconds of a call of the scan's operator, without the arithmetic.
    """

    name: str
    latency: float
    inverse_bandwidth: float
    exchange: float
    call: float

    @classmethod
    def measure(cls, comm: Any) -> Network:
        """Measure the constants between the ranks of a communicator; takes about a second.

        The first and the last rank, which are the farthest apart if ranks are numbered node by
        node, send messages to and fro. The other constants follow from small and large exclusive
        scans.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            All its ranks call this.

        Returns
        -------
        Network
            Equal on all ranks; for a single rank the constants that are built in.
        """
        communicator = comm if isinstance(comm, Communicator) else Communicator.of(comm)
        if communicator.size == 1:
            return BUILT_IN
        small = _to_and_fro(communicator, 8, _OFTEN)
        large = _to_and_fro(communicator, _LARGE, _SELDOM)
        rounds = (communicator.size - 1).bit_length()
        tiny, huge = _scan(communicator, 8, _OFTEN), _scan(communicator, _LARGE, _SELDOM)
        network = cls(
            name=f"{communicator.size} ranks",
            latency=small,
            # A file of constants holds none that is zero.
            inverse_bandwidth=max(large - small, 1.0) / _LARGE,
            exchange=max(huge - tiny, 0.0) / rounds / _LARGE,
            call=max(tiny / rounds - small, 0.0),
        )
        agreed: Network = communicator.broadcast(network, 0)
        return agreed

    @classmethod
    def load(cls, path: Path | None = None) -> Network:
        """Return the constants that were measured and saved, or the built-in ones."""
        return read_constants(path or network_file(), BUILT_IN, ("latency", "inverse_bandwidth"))

    def save(self, path: Path | None = None) -> Path:
        """Write the constants to a file, by default where :meth:`load` finds them; return it."""
        return write_constants(self, path or network_file())

    def message(self, nbytes: int) -> float:
        """Return the nanoseconds of a message."""
        return self.latency + self.inverse_bandwidth * nbytes

    def allreduce(self, size: int, nbytes: int) -> float:
        """Return the nanoseconds of an ``Allreduce`` over `size` ranks."""
        return allreduce_rounds(size) * self.message(nbytes)

    def round(self, nbytes: int) -> float:
        """Return the nanoseconds of a round of an ``Exscan``, without its operators."""
        return self.latency + self.exchange * nbytes


def _to_and_fro(communicator: Communicator, nbytes: int, times: int) -> float:
    """Return the nanoseconds of a message between the first and the last rank."""
    data, last = np.zeros(nbytes // 8, np.int64), communicator.size - 1

    def there_and_back() -> None:
        if communicator.rank == 0:
            communicator.send(data, last)
            communicator.receive(data, last)
        elif communicator.rank == last:
            communicator.receive(data, 0)
            communicator.send(data, 0)

    return time_together(communicator, there_and_back, times) / 2


def _scan(communicator: Communicator, nbytes: int, times: int) -> float:
    """Return the nanoseconds of an exclusive scan whose operator does nothing."""
    element, prefix = np.zeros((2, nbytes // 8), np.int64)

    def scan() -> None:
        communicator.exclusive_scan(element, prefix, lambda a, b: None, 0)

    return time_together(communicator, scan, times)


def time_together(communicator: Communicator, call: Callable[[], object], times: int) -> float:
    """Return the median nanoseconds of a call that all ranks make, on the slowest of them."""
    samples = []
    for _ in range(times):
        communicator.agree()
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return float(communicator.maximum([round(median(samples))])[0])


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
        scan = rounds(algorithm, communicator.size)
        if everywhere == [sorted(chain(*each)) for each in zip(*scan, strict=True)]:
            return algorithm
    # A vendor may have another one, which will not be worse than the usual.
    return ALGORITHMS[0]


def network_file() -> Path | None:
    """Return the file of the constants, which is beside that of the machine."""
    beside = machine_file()
    return beside and beside.with_name("network.json")


# Constants of InfiniBand between machines, 2 µs and 10 GB/s, and of a call of a Python function.
BUILT_IN = Network("built in", 2000.0, 0.1, 0.2, 20_000.0)
