"""Passes of a training step that are made again and again: recorded, and then made without Python.

Beside the kernels of a small network, what calls them takes as long. So after a few passes over the
same memory its kernel calls are recorded, and compiled code makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import calls
from .calls import LINE, Calls, aligned_empty
from .recording import Recorder, Recording, Space

Array = NDArray[Any]


class Callers(Protocol):
    """A caller of kernels through an object that may note the calls instead."""

    calls: Calls


class _Replay:
    """A recording, so many bytes of memory that only it works in, and what gives more."""

    def __init__(self, recording: Recording, nbytes: int, direct: Calls) -> None:
        self._calls, self._recording, self._room = direct, recording, aligned_empty((nbytes,), "u1")
        # Where small results begin in memory that they share; None where it is a large one's own.
        self._places, self._shared = list[int | None](), 0
        for each in recording.results:
            size = math.prod(each.shape) * each.dtype.itemsize
            is_small = size < calls.LARGE
            self._places.append(self._shared if is_small else None)
            if is_small:
                self._shared += -(-size // LINE) * LINE

    def run(self, given: list[Array]) -> dict[str, Array]:
        """Make the calls with these arrays, and return the results by their names."""
        shared = aligned_empty((self._shared,), "u1")
        results = {
            each.name: self._calls.result(each.name, each.shape, each.dtype)
            if place is None
            else np.ndarray(each.shape, each.dtype, shared, place)
            for each, place in zip(self._recording.results, self._places, strict=True)
        }
        self._recording.run([self._room, *given, *results.values()])
        return results


class Replays:
    """The recorded passes over a memory, which they belong to.

    Parameters
    ----------
    memory : Callers
        The memory, whose arrays stay where they are.
    """

    def __init__(self, memory: Callers) -> None:
        self._memory, self._made = memory, dict[Any, _Replay]()

    def run(
        self, key: tuple[Any, ...], given: list[Array | None], call: Callable[..., object]
    ) -> dict[str, Array]:
        """Make the calls that ``call(*given)`` makes, and return the results by their names.

        Parameters
        ----------
        key : tuple
            Which of the passes it is.
        given : list of ndarray or None
            Contiguous arrays, always of the same shapes; None, an empty array and other dtypes make
            another pass.
        call : callable
            It makes kernel calls through ``memory.calls``, and reads no numbers of the arrays.
        """
        key += tuple(None if each is None or not each.size else each.dtype.char for each in given)
        there = [each for each in given if each is not None]
        replay = self._made.get(key)
        if replay is None:
            replay = self._made[key] = self._record(given, call, 1 + len(there))
        return replay.run(there)

    def _record(
        self, given: list[Array | None], call: Callable[..., object], first: int
    ) -> _Replay:
        space, memory, number = Space(0), self._memory, 0
        recorder, stand_ins = Recorder(space, first), list[Array | None]()
        for each in given:
            number += each is not None
            stand_ins.append(
                None if each is None else recorder.array(number, each.shape, each.dtype)
            )
        direct, memory.calls = memory.calls, recorder
        try:
            call(*stand_ins)
        finally:
            memory.calls = direct
        return _Replay(recorder.recording(), space.nbytes, direct)
