"""A recording with memory for its results, which is reused once nobody holds them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import calls
from .calls import LINE, Calls, aligned_empty
from .recording import Recording

Array = NDArray[Any]


class Replay:
    """A recording whose results are arrays by their names.

    Parameters
    ----------
    recording : Recording
        The recording.
    direct : Calls
        Provides memory for large results.
    """

    def __init__(self, recording: Recording, direct: Calls) -> None:
        self._calls, self._recording = direct, recording
        # Where small results begin in their shared memory; None for large ones.
        self._places, self._shared = list[int | None](), 0
        for each in recording.results:
            size = math.prod(each.shape) * each.dtype.itemsize
            is_small = size < calls.LARGE
            self._places.append(self._shared if is_small else None)
            if is_small:
                self._shared += -(-size // LINE) * LINE

    def run(self, given: list[Array]) -> dict[str, Array]:
        """Make the calls with the arrays before the results, and return these."""
        shared = aligned_empty((self._shared,), "u1")
        results = {
            each.name: self._calls.result(each.name, each.shape, each.dtype)
            if place is None
            else np.ndarray(each.shape, each.dtype, shared, place)
            for each, place in zip(self._recording.results, self._places, strict=True)
        }
        self._recording.run([*given, *results.values()])
        return results
