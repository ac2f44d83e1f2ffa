"""Run recordings on tensors: their memory, results and threads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...execution import calls
from ...execution.calls import Calls, aligned_empty
from ...execution.recording import Recording, Result
from ...kernels.addresses import address_of
from .team import pytorchs_threads

# The most pieces of memory that are kept for the next pass.
_SCRATCHES = 4
# Unbound: looking up methods of each tensor would take longer. Who takes an address for a kernel
# asks whether a tensor is contiguous, since kernels see no strides.
is_contiguous, address_of_tensor = Tensor.is_contiguous, Tensor.data_ptr


class Room:
    """Work memory for one call at a time, and memory for its large results.

    Parameters
    ----------
    nbytes : int
        The size.

    Attributes
    ----------
    address : int
        The address of the memory.
    results : Calls
        Provides memory for large results.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory, self.results = aligned_empty((nbytes,), "u1"), Calls()
        self.address = address_of(self._memory)


class ResultTensor(NamedTuple):
    """A result of a recording, and a tensor for it.

    Attributes
    ----------
    result : Result
        The result.
    shape, strides : tuple of int
        Shape and strides of the tensor, whose axes may be in another order.
    dtype : dtype
        Its dtype.
    is_large : bool
        Whether its memory is reused once nobody holds it.
    """

    result: Result
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_large: bool

    @classmethod
    def of(
        cls,
        result: Result,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> ResultTensor:
        """Describe a result as a tensor; by default contiguous and in the result's shape."""
        shape = result.shape if shape is None else shape
        if strides is None:
            strides = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
        return cls(result, shape, strides, dtype, prod(shape) * dtype.itemsize >= calls.LARGE)

    def in_room(self, room: Room) -> Tensor:
        """Return a tensor in the memory that a room keeps for this result."""
        array = room.results.result(*self.result)
        steps = [each * array.itemsize for each in self.strides]
        return torch.from_numpy(np.lib.stride_tricks.as_strided(array, self.shape, steps))


def new_tensors(results: Sequence[ResultTensor], room: Room) -> list[Tensor]:
    """Return new tensors for results; a call in a room may use the room's memory."""
    made = []
    for each in results:
        if each.is_large:
            made.append(each.in_room(room))
        else:
            _, shape, strides, dtype, _ = each
            # The default device may be another one.
            made.append(torch.empty_strided(shape, strides, dtype=dtype, device="cpu"))
    return made


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors for kernels, which ignore strides; they are contiguous."""
    if not all(map(is_contiguous, tensors)):
        raise BufferError("a kernel cannot follow a tensor that is not contiguous")
    return list(map(address_of_tensor, tensors))


def run(
    recording: Recording, rooms: list[int], given: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    """Make the calls of a recording, on as many threads as PyTorch has.

    Parameters
    ----------
    recording : Recording
        The recording.
    rooms : list of int
        The addresses of the recording's memory.
    given : sequence of Tensor
        The contiguous tensors that the recording reads.
    results : sequence of Tensor
        The result of :func:`new_tensors`, in the order of the recording's results.
    """
    addresses = [*rooms, *addresses_of(given), *map(address_of_tensor, results)]
    if recording.threads == 1:
        recording.run_at(addresses)
    else:
        with pytorchs_threads():
            recording.run_at(addresses)


_scratches: list[NDArray[Any]] = []


def take_scratch(nbytes: int) -> NDArray[Any]:
    """Return uninitialised memory that nobody else uses."""
    try:
        scratch = _scratches.pop()
    except IndexError:
        return aligned_empty((nbytes,), "u1")
    return scratch if len(scratch) >= nbytes else aligned_empty((nbytes,), "u1")


def give_scratch(scratch: NDArray[Any]) -> None:
    """Return scratch memory for others to use."""
    if len(_scratches) < _SCRATCHES:
        _scratches.append(scratch)
