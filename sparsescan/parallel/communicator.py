"""Communicator: an MPI communicator that counts what it sends, and whose ranks fail together."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..arrays.arrays import is_cupy, load_cupy
from ..errors import InputTypeError, RankError, SparseScanError, short
from .exchange import allreduce_messages

_T = TypeVar("_T")

# Exceptions that keep their class on all ranks.
_SHARED: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, SparseScanError)
}
_SHARED["MemoryError"] = MemoryError
# The key under which a caller's communicator keeps ours; created when it is first needed.
_keyval: int | None = None


def reads_device_memory() -> bool:
    """Whether the MPI library sends from, and receives to, the memory of CUDA devices."""
    from mpi4py import MPI

    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":  # Cray's
        return True
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False


@dataclass
class Traffic:
    """Counts of a rank's messages by one kind of call.

    Attributes
    ----------
    calls : int
        Number of calls.
    messages, bytes : int
        Messages and bytes that this rank sent; for a collective call, by its algorithm.
    operations : int
        Calls of the operator of an exclusive scan.
    """

    calls: int = 0
    messages: int = 0
    bytes: int = 0
    operations: int = 0


class Fault:
    """Keeps the first exception of the blocks that it guards, for :meth:`Communicator.agree`.

    Examples
    --------
    >>> from sparsescan.parallel.communicator import Fault
    >>> fault = Fault()
    >>> with fault:
    ...     1 / 0
    >>> fault.error
    ZeroDivisionError('division by zero')
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = self.error or error
        return True

    def passes(self, call: Callable[[], object]) -> bool:
        """Whether a call raises nothing."""
        with self:
            call()
            return True
        return False


def load_mpi(user: str) -> Any:
    """Return mpi4py's MPI, or raise an error that says who needs it and what to install."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"{user} needs mpi4py and an MPI library ({error}): pip install 'sparsescan[mpi]'"
        ) from None
    return MPI


class Communicator:
    """A duplicate of an MPI communicator, which counts messages and whose ranks fail together.

    All its methods are collective but `send`, `receive`, `exchange`, `machine` and `ending`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator, which this object owns.
    traffic : dict, optional
        Table in which to count; by default a new one.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    traffic : dict of str to Traffic
        Counts by the name of the call, including communicators that were split off.

    Notes
    -----
    Ranks fail together: a rank works inside :meth:`together`, or under a ``Fault``. Under a
    ``Fault`` it takes part in every collective call even after an exception, until :meth:`agree`
    raises on all or on none. After an error of MPI itself the communicator's state is undefined, so
    it ends all ranks.
    """

    def __init__(self, comm: Any, traffic: dict[str, Traffic] | None = None) -> None:
        self._comm = comm
        self._parts: dict[Any, Communicator] = {}
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.traffic: dict[str, Traffic] = {} if traffic is None else traffic
        # : Observed algorithms of exclusive scans, by the words of an element.
        self.algorithms: dict[int, str] = {}

    @classmethod
    def of(cls, comm: Any) -> Communicator:
        """Return the duplicate that belongs to a caller's communicator; created once."""
        global _keyval
        MPI = load_mpi("comm")
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise InputTypeError(
                f"comm is {short(comm)}; expected an intracommunicator of mpi4py, such as "
                "MPI.COMM_WORLD"
            )
        if _keyval is None:
            _keyval = MPI.Comm.Create_keyval(
                delete_fn=lambda comm, keyval, duplicate: duplicate.free()
            )
        kept: Any = comm.Get_attr(_keyval)
        if kept is None:
            kept = cls(comm.Dup())
            comm.Set_attr(_keyval, kept)
        duplicate: Communicator = kept
        return duplicate

    def split(self, color: int, key: int, name: Any) -> Communicator:
        """Return the ranks of one `color`, ordered by `key`; created once for each `name`."""
        if name not in self._parts:
            with self._calling("split"):
                self._parts[name] = Communicator(self._comm.Split(color, key), self.traffic)
        return self._parts[name]

    def machine(self) -> str:
        """Return the name of this rank's machine."""
        from mpi4py import MPI

        name: str = MPI.Get_processor_name()
        return name

    def free(self) -> None:
        """Free the communicators."""
        for part in self._parts.values():
            part.free()
        self._comm.Free()

    # -----------------------------------------------------------------------------------------
    # Failing together
    # -----------------------------------------------------------------------------------------

    def agree(self, error: BaseException | None = None, flag: int = 0) -> int:
        """Return the largest flag of all ranks; or raise the error of the lowest rank that has one.

        Raises
        ------
        Exception
            On every rank, of the same class and with the same text, which names the rank: errors
            of this package and a :class:`MemoryError` as what they are, others as
            :class:`RankError`. An interrupt is raised again on the rank that it has stopped.
        """
        lowest, highest = self.maximum([0 if error is None else self.size - self.rank, flag])
        if lowest == 0:
            return highest
        rank = self.size - lowest
        kind, text = self.broadcast(None if error is None else _described(error), rank)
        if error is not None and not isinstance(error, Exception):
            raise error
        raise _SHARED.get(kind, RankError)(f"rank {rank}: {text}") from error

    def together(self, call: Callable[[], _T]) -> _T:
        """Return the result of a call on this rank; raise on all ranks if it raises on any."""
        results: list[_T] = []
        error = None
        try:
            results.append(call())
        except BaseException as raised:
            error = raised
        self.agree(error)
        return results[0]

    def maximum(self, values: list[int]) -> list[int]:
        """Return the largest of all ranks' values, one by one."""
        given = np.array(values, np.int64)
        largest = np.empty_like(given)
        messages = allreduce_messages(self.size, self.rank)
        with self._calling("allreduce", messages, messages * given.nbytes):
            from mpi4py import MPI

            self._comm.Allreduce(given, largest, MPI.MAX)
        return [int(value) for value in largest]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        with self._calling("allgather"):
            gathered: list[Any] = self._comm.allgather(value)
        return gathered

    def swap(self, values: list[Any]) -> list[Any]:
        """Send each rank one of the values; return the values that they have sent to this one."""
        with self._calling("alltoall"):
            swapped: list[Any] = self._comm.alltoall(values)
        return swapped

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the value of `root` on all ranks."""
        with self._calling("bcast"):
            return self._comm.bcast(value, root)

    # -----------------------------------------------------------------------------------------
    # Data
    # -----------------------------------------------------------------------------------------

    def exclusive_scan(
        self,
        element: NDArray[np.int64],
        prefix: NDArray[np.int64],
        combine: Callable[[NDArray[np.int64], NDArray[np.int64]], None],
        messages: int,
    ) -> None:
        """Call MPI's ``Exscan`` with one element per rank; the operator need not commute.

        Parameters
        ----------
        element : ndarray of int64
            The element of this rank.
        prefix : ndarray of int64
            Filled with the combination of the elements of lower ranks; left as it is on rank 0.
        combine : callable
            ``combine(a, b)`` writes ``a ◇ b`` to `b`, with `a` of the lower ranks. It must not
            raise.
        messages : int
            Number of messages that this rank sends, by the algorithm of the MPI library.
        """
        from mpi4py import MPI

        traffic = self.traffic.setdefault("exscan", Traffic())

        def operator(a: Any, b: Any, datatype: Any) -> None:
            traffic.operations += 1
            combine(np.frombuffer(a, np.int64), np.frombuffer(b, np.int64))

        with self._calling("exscan", messages, messages * element.nbytes):
            # A type for the whole element, so that no library splits it.
            whole = MPI.INT64_T.Create_contiguous(element.size).Commit()
            op = MPI.Op.Create(operator, commute=False)
            self._comm.Exscan([element, 1, whole], [prefix, 1, whole], op)
            op.Free()
            whole.Free()

    def send(self, data: Any, rank: int) -> None:
        """Send a NumPy array; or a CuPy array, if MPI reads its memory."""
        with self._calling("send", 1, data.nbytes):
            _wait_for(data)
            self._comm.Send(data, rank)

    def receive(self, data: Any, rank: int) -> None:
        """Receive an array of the same size into this one."""
        from mpi4py import MPI

        status = MPI.Status()
        with self._calling("recv"):
            _wait_for(data)
            self._comm.Recv(data, rank, status=status)
            _check_size(status, data)

    def exchange(
        self,
        sends: Sequence[tuple[int, NDArray[np.int64]]],
        receives: Sequence[tuple[int, NDArray[np.int64]]],
    ) -> None:
        """Send arrays to some ranks and receive arrays from others, all at once."""
        from mpi4py import MPI

        nbytes = sum(data.nbytes for _, data in sends)
        with self._calling("exchange", len(sends), nbytes):
            requests = [self._comm.Irecv(data, rank) for rank, data in receives]
            requests += [self._comm.Isend(data, rank) for rank, data in sends]
            statuses = [MPI.Status() for _ in requests]
            MPI.Request.Waitall(requests, statuses)
            for (_, data), status in zip(receives, statuses, strict=False):
                _check_size(status, data)

    @contextmanager
    def _calling(self, name: str, messages: int = 0, nbytes: int = 0) -> Iterator[None]:
        """Count a call with its messages and bytes; end all ranks if it fails."""
        traffic = self.traffic.setdefault(name, Traffic())
        traffic.calls += 1
        traffic.messages += messages
        traffic.bytes += nbytes
        with self.ending(name):
            yield

    @contextmanager
    def ending(self, what: str) -> Iterator[None]:
        """End all ranks if this fails on one, since the others would wait for it."""
        try:
            yield
        except BaseException as error:
            if self.size == 1:
                raise
            traceback.print_exc()
            print(
                f"sparsescan: rank {self.rank} of {self.size}: {what} failed: {error}; all ranks "
                "are ended",
                file=sys.stderr,
                flush=True,
            )
            self._comm.Abort(1)


def _wait_for(data: Any) -> None:
    """Wait for all work on a CuPy array, since MPI uses no streams."""
    if is_cupy(data):
        load_cupy().cuda.get_current_stream().synchronize()


def _check_size(status: Any, data: Any) -> None:
    """Raise unless the received message fills an array."""
    from mpi4py import MPI

    if status.Get_count(MPI.BYTE) != data.nbytes:
        raise MPI.Exception(MPI.ERR_COUNT)


def _described(error: BaseException) -> tuple[str, str]:
    """Return the class and the text of an exception, for other ranks."""
    name = type(error).__name__
    if _SHARED.get(name) is type(error):
        return name, str(error) or name
    if isinstance(error, MemoryError):
        # NumPy has its own class.
        return "MemoryError", str(error) or name
    return name, f"{name}: {error}" if str(error) else name
