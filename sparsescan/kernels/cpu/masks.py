"""Masks of pruned weights: compared with what is known of them, and applied, in one pass."""

from __future__ import annotations

import numpy as np

from ..compile import njit

__all__ = ["apply_mask"]

# Without counts of references: threads that share arrays would wait for each other at every call.
_kernel = njit(nogil=True, cache=True, _nrt=False)


@_kernel
def apply_mask(words, entries, kept, mask, mask_words, full, out, out_words, counts):
    """Write kept weights, and count what tells whether mask and memory are what they were.

    Counted are the words of the mask that are not 0, those of them at kept places that are exactly
    1, and the words of `out` that are not 0, in all and at kept places, before they are written.

    Parameters
    ----------
    words, entries : tuple of int
        The part of the arrays, and the part of `kept` that lies in it.
    kept : ndarray of int
        Places of the kept weights, in order.
    mask, full, out : ndarray, one axis
        The mask, the weights, and the memory of kept weights among zeros.
    mask_words, out_words : ndarray of int
        Mask and memory, bit for bit.
    counts : ndarray of int64, shape (4,)
        The four counts.
    """
    # Numbers without a sign: others could count from the end, and would be looked at one by one.
    in_mask = in_out = 0
    for i in range(np.uint64(words[0]), np.uint64(words[1])):
        in_mask += mask_words[i] != 0
        in_out += out_words[i] != 0
    ones = kept_before = 0
    for k in range(np.uint64(entries[0]), np.uint64(entries[1])):
        place = np.uint64(kept[k])
        ones += mask[place] == 1
        kept_before += out_words[place] != 0
        out[place] = full[place]
    counts[0] = in_mask
    counts[1] = ones
    counts[2] = in_out
    counts[3] = kept_before
