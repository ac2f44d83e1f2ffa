"""Compare masks of pruned weights with their earlier contents."""

from __future__ import annotations

import numpy as np

from ..compile import njit


# No reference counting: threads that share arrays would wait for each other at every call.
@njit(nogil=True, cache=True, _nrt=False)
def count_changes(first, last, is_kept, mask, counts, k):
    """Count the entries of a part of a mask that differ from ``is_kept``.

    Parameters
    ----------
    first, last : int
        The part.
    is_kept : ndarray of int8
        Ones and zeros, one for each weight.
    mask : ndarray of float32 or float64, one axis
        The mask.
    counts : ndarray of int64
        Entry `k` is the result.
    """
    changes = 0
    # Unsigned indices: signed ones could count from the end, which prevents vectorisation.
    for i in range(np.uint64(first), np.uint64(last)):
        changes += mask[i] != is_kept[i]
    counts[k] = changes
