"""Values that are weights, each at many places, most of them in rows that repeat."""

from __future__ import annotations

import numpy as np

from .compile import njit


@njit(nogil=True, cache=True)
def gather(weights, sources, out):
    """Write ``weights[sources]``."""
    for p in range(np.uint64(len(sources))):
        out[p] = weights[np.uint64(sources[p])]


@njit(nogil=True, cache=True)
def repeat_rows(indptr, starts, values, out):
    """Write all rows of a matrix; the one of row `i` begins at ``values[starts[i]]``."""
    for row in range(np.uint64(len(starts))):
        first, last = np.uint64(indptr[row]), np.uint64(indptr[row + np.uint64(1)])
        start = np.uint64(starts[row])
        for q in range(last - first):
            out[first + q] = values[start + q]
