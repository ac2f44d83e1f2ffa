"""How the matrices of a pattern are factorised: the routine, the order and the size."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from .pattern import Pattern, rows_of

Method = Literal["tridiagonal", "banded", "dense", "sparse"]

# If LAPACK stores at most this many entries, it is always faster: SuperLU takes 50 microseconds for
# any matrix. Above, it is faster if it stores at most this many times the entries of sparse
# factors.
_SMALL, _FILL = 10_000, 3


@dataclass(frozen=True, eq=False)
class Factorisation:
    """How all matrices of one square pattern are factorised, ``P A Q = L U``.

    Attributes
    ----------
    method : {"tridiagonal", "banded", "dense", "sparse"}
        By LAPACK's ``gttrf``, ``gbtrf`` or ``getrf``, or by SuperLU.
    size : int
        Rows and columns.
    lower, upper : int
        Diagonals below and above the main one.
    entries : int
        Stored entries of both factors. For sparse factors this is the number without row exchanges,
        which may add entries.
    multiply_adds : int
        Multiply-adds of a factorisation, under the same assumption.
    places : ndarray of int64, shape (nnz,)
        The place of each value in LAPACK's storage; for SuperLU, the order of the values.
    order : ndarray of int64, shape (size,)
        The row that is eliminated first, second, …; empty unless "sparse".
    indptr, indices : ndarray of int32
        The sparse matrix ``A[order]``, row by row; empty unless "sparse".
    """

    method: Method
    size: int
    lower: int
    upper: int
    entries: int
    multiply_adds: int
    places: NDArray[np.int64]
    order: NDArray[np.int64]
    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]

    @property
    def is_compiled(self) -> bool:
        """Whether kernels solve with such matrices; SuperLU solves with others."""
        return self.method != "sparse"

    @property
    def solve_multiply_adds(self) -> int:
        """Multiply-adds of one solve."""
        return self.entries

    @property
    def table_bytes(self) -> int:
        """Bytes of the arrays that follow from the pattern."""
        arrays = self.places, self.order, self.indptr, self.indices
        return sum(array.nbytes for array in arrays)

    def nbytes(self, itemsize: int) -> int:
        """Return the predicted bytes of the factors of one matrix.

        SuperLU reserves more, but does not write to it, so it takes no memory.
        """
        if self.method != "sparse":
            return itemsize * self.entries + 8 * self.size
        return (itemsize + 4) * self.entries * 5 // 4 + 256 * self.size


# The factorisation of each pattern, as long as the pattern lives.
_known: weakref.WeakKeyDictionary[Pattern, Factorisation] = weakref.WeakKeyDictionary()


def factorisation_of(pattern: Pattern) -> Factorisation:
    """Return how matrices of a square pattern are factorised; it is found once per pattern.

    Examples
    --------
    >>> from sparsescan.symbolic.factorisation import factorisation_of
    >>> from sparsescan.symbolic.pattern import Pattern
    >>> factorisation_of(Pattern.dense((20, 20))).method
    'dense'
    """
    known = _known.get(pattern)
    if known is None:
        known = _known[pattern] = _analyse(pattern)
    return known


def _analyse(pattern: Pattern) -> Factorisation:
    n, nnz = pattern.shape[0], pattern.nnz
    lower = upper = n - 1
    if pattern.kind == "diagonal" or nnz == 0:
        lower = upper = 0
    elif pattern.kind == "general":
        below = rows_of(pattern).astype(np.int64) - pattern.indices
        lower, upper = max(int(below.max()), 0), max(-int(below.min()), 0)
    band = n * (2 * lower + upper + 1)
    least = min(n * n, band)
    if least > max(_SMALL, _FILL * nnz):
        sparse = _order(pattern, lower, upper)
        if least > _FILL * sparse.entries:
            return sparse
    if n * n <= band:
        return _for_lapack(pattern, "dense", lower, upper)
    thin = max(lower, upper) == 1
    return _for_lapack(pattern, "tridiagonal" if thin else "banded", lower, upper)


def _for_lapack(pattern: Pattern, method: Method, lower: int, upper: int) -> Factorisation:
    n = pattern.shape[0]
    rows, cols = rows_of(pattern).astype(np.int64), pattern.indices.astype(np.int64)
    width = 2 * lower + upper + 1
    if method == "tridiagonal":
        # The columns of the storage are the diagonals below, in and above the main one.
        places, entries, work = (cols - rows + 1) * n + np.minimum(rows, cols), 4 * n, 3 * n
    elif method == "banded":
        places, entries = cols * width + lower + upper + rows - cols, width * n
        work = n * (lower * (lower + upper) + lower)
    else:
        places, entries, work = cols * n + rows, n * n, (n**3 - n) // 3
    none = np.empty(0, np.int32)
    order = np.empty(0, np.int64)
    return Factorisation(method, n, lower, upper, entries, work, places, order, none, none)


def _order(pattern: Pattern, lower: int, upper: int) -> Factorisation:
    """Return SuperLU's order of columns, which it only returns for matrices with values.

    The values are made up, with a large diagonal, so that no rows are exchanged.
    """
    # Few programs solve.
    from scipy.sparse.linalg import splu

    n = pattern.shape[0]
    indptr, indices = pattern.indptr.astype(np.int32), pattern.indices.astype(np.int32)
    rows = rows_of(pattern)
    values = np.random.default_rng(0).uniform(0.5, 1.0, pattern.nnz)
    counts = np.diff(indptr)
    on_diagonal = rows == pattern.indices
    values[on_diagonal] += counts[rows[on_diagonal]] + np.bincount(indices, minlength=n).max()
    order, entries, work = np.arange(n), pattern.nnz, 0
    try:
        # A matrix in rows is its transpose in columns.
        factors = splu(sp.csc_array((values, indices, indptr), shape=(n, n)))
    except RuntimeError:
        # It is singular for all values; the numeric phase will say so.
        pass
    else:
        order, entries = np.argsort(factors.perm_c), int(factors.nnz)
        below = np.diff(factors.L.indptr).astype(np.int64) - 1
        work = int(below @ np.bincount(factors.U.indices, minlength=n))
    starts = np.concatenate([[0], np.cumsum(counts[order])])
    places = np.repeat(indptr[order] - starts[:-1], counts[order]) + np.arange(pattern.nnz)
    return Factorisation(
        "sparse",
        n,
        lower,
        upper,
        entries,
        work,
        places.astype(np.int64),
        order.astype(np.int64),
        starts.astype(np.int32),
        indices[places],
    )
