"""Terms of sparse products: where each is added, worked out once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels import symbolic as kernels
from .pattern import Pattern

__all__ = ["ALIGNED", "LONG", "TermCounts", "Terms", "count_terms", "lay_out_terms"]

# Mean entries of the rows of `X` above which their slots are aligned as they are, modulo this.
LONG, ALIGNED = 32, 16


class TermCounts(NamedTuple):
    """How many segments, factors and slots the terms of a product have."""

    segments: int
    factors: int
    slots: int

    def nbytes(self, itemsize: int) -> list[int]:
        """Return the bytes of each array of :class:`Terms` but `work`, with such an index."""
        segments, factors = self.segments * itemsize, self.factors * itemsize
        return (
            [segments] * 3
            + [segments + itemsize]
            + [factors] * 3
            + [
                2 * self.factors,
                2 * self.slots,
            ]
        )


class Terms(NamedTuple):
    """Where each term ``A[i, k]·X[k, j]`` of a sparse product ``C = A X`` is added.

    A *segment* is a row of `C`, or one of the equal parts of a row that is too long. A *factor* of
    it is an entry of `A` with the entries of `X` that it is multiplied by: those of a row that lie
    in the columns of the segment, one after the other. The *slot* of each of those is the place in
    the segment of the entry of `C` to which the term is added.

    Slots depend on the columns of the segment and the row of `X` only. So segments in equal columns
    share them: all rows of a dense `C`, or those of a block. If their rows of `A` have equal
    columns as well, they share factors. Where rows of `X` are long, there are gaps before slots, so
    that threads which read aligned entries read aligned slots.

    Attributes
    ----------
    a_starts : ndarray of int64, shape (segments,)
        Where the segment's row starts in `A`.
    firsts, lasts : ndarray of int64, shape (segments,)
        Its first factor, and the one after the last.
    starts : ndarray of int64, shape (segments + 1,)
        Where each segment starts in `C`, of which it has what comes before the next one.
    entries : ndarray of int64, shape (factors,)
        Which entry of the row of `A` a factor is.
    x_starts, slot_starts : ndarray of int64, shape (factors,)
        Where its entries of `X`, and their slots, start.
    counts : ndarray of uint16, shape (factors,)
        How many there are: one or more.
    slots : ndarray of uint16, shape (slots,)
        Places in a segment.
    work : ndarray of int64, shape (segments,)
        Terms of each segment.
    """

    a_starts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    starts: NDArray[np.int64]
    entries: NDArray[np.int64]
    x_starts: NDArray[np.int64]
    slot_starts: NDArray[np.int64]
    counts: NDArray[np.uint16]
    slots: NDArray[np.uint16]
    work: NDArray[np.int64]


def count_terms(a: Pattern, x: Pattern, c: Pattern, longest: int) -> TermCounts:
    """Count what :func:`lay_out_terms` lays out, in memory that does not grow with the terms."""
    nothing = _columns(TermCounts(0, 0, 0), np.int32)
    return _lay_out(a, x, c, longest, nothing)[1]


def lay_out_terms(a: Pattern, x: Pattern, c: Pattern, longest: int, dtype: np.dtype[Any]) -> Terms:
    """Lay out the terms of ``C = A X`` in segments of at most `longest` entries.

    Parameters
    ----------
    a, x, c : Pattern
        `A` is general or dense, `X` general; `C` has the entries of their product, or all.
    longest : int
        At most 65536.
    dtype : dtype
        Of index arrays: int64 if int32 does not hold the number of slots.
    """
    columns = _columns(count_terms(a, x, c, longest), dtype.type)
    segments, _, work = _lay_out(a, x, c, longest, columns)
    arrays: list[NDArray[Any]] = [array.astype(dtype, copy=False) for array in segments]
    return Terms(*[*arrays, *columns, work])


def _columns(counts: TermCounts, dtype: type[np.integer[Any]]) -> tuple[NDArray[Any], ...]:
    """Return arrays for entries, starts in `X`, starts of slots, counts; and for slots."""
    factors = (np.empty(counts.factors, kind) for kind in (dtype, dtype, dtype, np.uint16))
    return *factors, np.zeros(counts.slots, np.uint16)


def _lay_out(
    a: Pattern, x: Pattern, c: Pattern, longest: int, columns: tuple[NDArray[Any], ...]
) -> tuple[tuple[NDArray[np.int64], ...], TermCounts, NDArray[np.int64]]:
    """Fill `columns` if they have room; return the columns of segments, counts, and their work."""
    c_indptr, c_indices, c_dense = whole = _rows(c)
    lengths = np.diff(c_indptr)
    parts = -(-lengths // longest)
    rows = np.repeat(np.arange(len(lengths)), parts)
    of_row = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.append(c_indptr[rows] + lengths[rows] * of_row // parts[rows], c_indptr[-1])
    if c_dense:
        alike = of_row
    else:
        hashes = kernels.hash_columns(starts, c_indices)
        _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        alike = first[group]
        kernels.first_alike(starts, c_indices, alike)
    order = np.argsort(alike, kind="stable")
    a_starts, firsts, lasts, work = (np.empty(len(rows), np.int64) for _ in range(4))
    *factors, slots = columns
    factor_count, slot_count = kernels.lay_out_terms(
        (rows, starts, a_starts, firsts, lasts),
        order,
        alike,
        _rows(a),
        _rows(x),
        whole,
        c.shape[1],
        ALIGNED if x.nnz > LONG * x.shape[0] else 1,
        tuple(factors),
        slots,
        work,
    )
    counts = TermCounts(len(rows), factor_count, slot_count)
    return (a_starts, firsts, lasts, starts), counts, work


def _rows(pattern: Pattern) -> tuple[NDArray[Any], NDArray[Any], bool]:
    """Return row pointers and columns, which are left out of a dense pattern; whether it is."""
    if pattern.kind == "dense":
        rows, cols = pattern.shape
        return cols * np.arange(rows + 1), np.empty(0, np.int32), True
    return pattern.indptr, pattern.indices, False
