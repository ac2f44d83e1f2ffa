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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._arrays import is_cupy, load_cupy
from ..errors import InputTypeError, RankError, SparseScanError
from .network import allreduce_messages

__all__ = ["Communicator", "Fault", "Traffic", "reads_device_memory"]

# Exceptions that are raised on all ranks as what they are.
_SHARED: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, SparseScanError)
}
_SHARED["MemoryError"] = MemoryError
# Of the tables that user communicators carry; made when the first one is seen.
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
    """What a rank has sent by one kind of call.

    Attributes
    ----------
    calls : int
        How often it was called.
    messages, bytes : int
        What this rank sent, as counted by :mod:`sparsescan.parallel.network` for a collective.
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


class Communicator:
    """A duplicate of an MPI communicator.

    All its methods are collective but `send`, `receive`, `exchange`, `machine` and `ending`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Owned by this object.
    traffic : dict, optional
        Where to count: by default in a table of its own.

    Attributes
    ----------
    rank, size : int
        As MPI has them.
    traffic : dict of str to Traffic
        What this rank has sent, by the name of the call; by those that were split off, too.

    Notes
    -----
    Ranks fail together: what a rank does on its own it does under a :class:`Fault`, it takes part
    in every call whatever has happened, and :meth:`agree` then raises on all or on none. An error
    of MPI itself leaves a communicator in no defined state, so it ends all ranks.
    """

    def __init__(self, comm: Any, traffic: dict[str, Traffic] | None = None) -> None:
        self._comm = comm
        self._parts: dict[Any, Communicator] = {}
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.traffic: dict[str, Traffic] = {} if traffic is None else traffic
        #: Algorithms of exclusive scans that have been observed, by the words of an element.
        self.algorithms: dict[int, str] = {}

    @classmethod
    def of(cls, comm: Any) -> Communicator:
        """The one that belongs to a caller's communicator, whose messages never meet its own."""
        global _keyval
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise InputTypeError(
                f"comm is {comm!r}; expected an intracommunicator of mpi4py, such as MPI.COMM_WORLD"
            )
        if _keyval is None:
            _keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, made: made.free())
        found: Any = comm.Get_attr(_keyval)
        if found is None:
            found = cls(comm.Dup())
            comm.Set_attr(_keyval, found)
        made: Communicator = found
        return made

    def split(self, color: int, key: int, name: Any) -> Communicator:
        """The ranks of one `color`, in the order of `key`; the same for the same `name` again."""
        if name not in self._parts:
            with self._calling("split"):
                self._parts[name] = Communicator(self._comm.Split(color, key), self.traffic)
        return self._parts[name]

    def machine(self) -> str:
        """Name of the machine that this rank is on."""
        from mpi4py import MPI

        name: str = MPI.Get_processor_name()
        return name

    def free(self) -> None:
        """Give the communicators back."""
        for part in self._parts.values():
            part.free()
        self._comm.Free()

    # -----------------------------------------------------------------------------------------
    # Failing together
    # -----------------------------------------------------------------------------------------

    def agree(self, error: BaseException | None = None, flag: int = 0) -> int:
        """The largest flag of all ranks; or, if any rank has an error, that of the lowest one.

        Raises
        ------
        Exception
            On every rank, of the same class and with the same text, which names the rank: errors
            of this package and a :class:`MemoryError` as what they are, others as
            :class:`RankError`. An interrupt is raised again where it was met.
        """
        lowest, highest = self.maximum([0 if error is None else self.size - self.rank, flag])
        if lowest == 0:
            return highest
        rank = self.size - lowest
        kind, text = self.broadcast(None if error is None else _described(error), rank)
        if error is not None and not isinstance(error, Exception):
            raise error
        raise _SHARED.get(kind, RankError)(f"rank {rank}: {text}") from error

    def maximum(self, values: list[int]) -> list[int]:
        """The largest of all ranks' values, one by one."""
        given = np.array(values, np.int64)
        found = np.empty_like(given)
        messages = allreduce_messages(self.size, self.rank)
        with self._calling("allreduce", messages, messages * given.nbytes):
            from mpi4py import MPI

            self._comm.Allreduce(given, found, MPI.MAX)
        return [int(value) for value in found]

    def minimum(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return -self.maximum([-value])[0]

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, on all of them."""
        with self._calling("allgather"):
            gathered: list[Any] = self._comm.allgather(value)
        return gathered

    def swap(self, values: list[Any]) -> list[Any]:
        """What every rank has for this one, where `values` are what this one has for each."""
        with self._calling("alltoall"):
            swapped: list[Any] = self._comm.alltoall(values)
        return swapped

    def broadcast(self, value: Any, root: int) -> Any:
        """What `root` has, on all ranks."""
        with self._calling("bcast"):
            return self._comm.bcast(value, root)

    # -----------------------------------------------------------------------------------------
    # Data
    # -----------------------------------------------------------------------------------------

    def exclusive_scan(
        self,
        given: NDArray[np.int64],
        found: NDArray[np.int64],
        combine: Callable[[NDArray[np.int64], NDArray[np.int64]], None],
        messages: int,
    ) -> None:
        """MPI's ``Exscan`` of one element a rank, under an operator that need not commute.

        Parameters
        ----------
        given, found : ndarray of int64
            The element of this rank, and what those of lower ranks combine to; on rank 0 it is left
            as it is.
        combine : callable
            ``combine(a, b)`` writes ``a ◇ b`` to `b`, with `a` of the lower ranks. It must not
            raise.
        messages : int
            That this rank sends, by the algorithm of the MPI library.
        """
        from mpi4py import MPI

        traffic = self.traffic.setdefault("exscan", Traffic())

        def operator(a: Any, b: Any, datatype: Any) -> None:
            traffic.operations += 1
            combine(np.frombuffer(a, np.int64), np.frombuffer(b, np.int64))

        with self._calling("exscan", messages, messages * given.nbytes):
            # One element, so that no library takes it apart.
            element = MPI.INT64_T.Create_contiguous(given.size).Commit()
            op = MPI.Op.Create(operator, commute=False)
            self._comm.Exscan([given, 1, element], [found, 1, element], op)
            op.Free()
            element.Free()

    def send(self, data: Any, rank: int) -> None:
        """Send an array of NumPy; or of CuPy, if MPI reads its memory."""
        with self._calling("send", 1, data.nbytes):
            _wait_for(data)
            self._comm.Send(data, rank)

    def receive(self, data: Any, rank: int) -> None:
        """Fill an array with one that is sent, which must be of its size."""
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
        """Send arrays to some ranks, and fill arrays with what others send, all at once."""
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
        """Count a call that sends so many messages and bytes; end all ranks if it fails."""
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
    """Wait until an array of CuPy has been written and read: MPI knows nothing of streams."""
    if is_cupy(data):
        load_cupy().cuda.get_current_stream().synchronize()


def _check_size(status: Any, data: Any) -> None:
    """Raise unless the message that was received fills an array."""
    from mpi4py import MPI

    if status.Get_count(MPI.BYTE) != data.nbytes:
        raise MPI.Exception(MPI.ERR_COUNT)


def _described(error: BaseException) -> tuple[str, str]:
    """Class and text of an exception, as other ranks are told."""
    name = type(error).__name__
    if _SHARED.get(name) is type(error):
        return name, str(error) or name
    if isinstance(error, MemoryError):
        # NumPy has a class of its own.
        return "MemoryError", str(error) or name
    return name, f"{name}: {error}" if str(error) else name
