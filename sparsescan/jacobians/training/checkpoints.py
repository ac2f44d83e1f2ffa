"""Which activations of a training step are kept, and which are computed again by backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# How many sizes of the memory that segments share are tried.
_TRIED = 64


def needed_bytes(ends: Sequence[int], maps: NDArray[np.int64], kept: NDArray[np.int64]) -> int:
    """Return the bytes of segments that share memory, but for what each leaves to the next.

    Parameters
    ----------
    ends : sequence of int
        Behind which stage each segment ends.
    maps, kept : ndarray of int64
        Bytes of what each stage writes, and of what it keeps beside that.
    """
    last = np.array(ends, np.int64) - 1
    shared = [
        int(maps[a : b - 1].sum() + kept[a:b].sum()) for a, b in pairwise([0, *map(int, ends)])
    ]
    return int(maps[last].sum()) + max(shared, default=0)


def choose_segments(
    maps: NDArray[np.int64], kept: NDArray[np.int64], may_end: NDArray[np.bool_], limit: int
) -> list[int]:
    """Return segments that need no more bytes than a limit, and the least to compute again.

    All segments but the last one are run twice, so that is the longest. If the limit is too low for
    any, those are returned that need the fewest bytes.

    Parameters
    ----------
    maps, kept : ndarray of int64
        As for :func:`needed_bytes`.
    may_end : ndarray of bool
        Whether a segment may end behind a stage, since nothing but its result is read later.
    limit : int
        Bytes.

    Returns
    -------
    list of int
        Behind which stage each segment ends.

    Notes
    -----
    Checkpoints as in T. Chen et al., "Training deep nets with sublinear memory cost", 2016, chosen
    by dynamic programming: for each size of the memory that segments share, the fewest bytes of the
    results that are kept between them.
    """
    count = len(maps)
    whole = [count] if count else []
    if needed_bytes(whole, maps, kept) <= limit:
        return whole
    # Bytes that the stages up to each need if they are in one segment.
    before = np.concatenate([[0], np.cumsum(maps + kept)])
    found = [whole]
    for shared in _sizes(before, maps, may_end):
        least, came_from = _least(before, maps, may_end, shared)
        for first in range(count):
            # A last segment that is longer leaves less to compute again.
            if before[count] - before[first] - maps[-1] > shared or least[first] == np.inf:
                continue
            ends, end = [count], first
            while end > 0:
                ends.append(end)
                end = int(came_from[end])
            found.append(ends[::-1])

    def rank(ends: list[int]) -> tuple[bool, int, int]:
        """Return whether segments do not fit, and what they compute again, or need."""
        needs, again = needed_bytes(ends, maps, kept), ends[-2] if len(ends) > 1 else 0
        return (True, needs, 0) if needs > limit else (False, again, needs)

    return min(found, key=rank)


def _sizes(
    before: NDArray[np.int64], maps: NDArray[np.int64], may_end: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return sizes of shared memory to try, from the least that is enough for any segments."""
    ends = np.flatnonzero(may_end) + 1
    starts = np.concatenate([[0], ends[:-1]])
    fewest = int((before[ends] - before[starts] - maps[ends - 1]).max(initial=1))
    most = max(int(before[-1]), fewest)
    return np.unique(np.ceil(np.geomspace(max(fewest, 1), max(most, 1), _TRIED)).astype(np.int64))


def _least(
    before: NDArray[np.int64], maps: NDArray[np.int64], may_end: NDArray[np.bool_], shared: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the fewest bytes between segments up to each stage, and where its segment begins."""
    least = np.full(len(maps) + 1, np.inf)
    came_from = np.zeros(len(maps) + 1, np.int64)
    least[0] = 0
    for end in np.flatnonzero(may_end) + 1:
        fits = before[end] - before[:end] - maps[end - 1] <= shared
        bytes_between = np.where(fits, least[:end], np.inf)
        came_from[end] = bytes_between.argmin()
        least[end] = bytes_between.min() + maps[end - 1]
    return least, came_from
