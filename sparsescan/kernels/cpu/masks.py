"""Masks of pruned weights, compared with what they were."""

from __future__ import annotations

import numpy as np

from ..compile import njit


# Without counts of references: threads that share arrays would wait for each other at every call.
@njit(nogil=True, cache=True, _nrt=False)
def count_changes(first, last, is_kept, mask, counts, k):
    """Count the entries of a part of a mask that are not 1 where weights are kept, and 0 elsewhere.

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
    # Numbers without a sign: others could count from the end, and would be looked at one by one.
    for i in range(np.uint64(first), np.uint64(last)):
        changes += mask[i] != is_kept[i]
    counts[k] = changes
