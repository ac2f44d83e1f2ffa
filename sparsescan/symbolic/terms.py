"""Terms of sparse products: the place to which each is added, computed once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels import symbolic as kernels
from ..kernels.symbolic import Product, Rows
from .pattern import Pattern

# Mean entries of the rows of `X` above which their slots are aligned as they are, modulo this.
LONG, ALIGNED = 32, 16


class TermCounts(NamedTuple):
    """How many segments, factors, starts in `X` and slots the terms of a product have."""

    segments: int
    factors: int
    starts: int
    slots: int

    def nbytes(self, itemsize: int) -> list[int]:
        """Return the bytes of each array of :class:`Terms` but `work`, with such an index."""
        segments, factors = self.segments * itemsize, self.factors * itemsize
        sizes = [segments] * 4 + [segments + itemsize] + [factors] * 2
        return [*sizes, self.starts * itemsize, 2 * self.factors, 2 * self.slots]


class Terms(NamedTuple):
    """Where each term ``A[i, k]·X[k, j]`` of a sparse product ``C = A X`` is added.

    A *segment* is a row of `C`, or one of the equal parts of a long row. A *factor* of a segment is
    an entry of `A` together with the entries of `X` that it multiplies: the consecutive entries of
    one row in the columns of the segment. The *slot* of such an entry is the place, within the
    segment, of the entry of `C` to which the term is added.

    Slots depend only on the columns of the segment and the row of `X`. So segments with equal
    columns share them: all rows of a dense `C`, or those of a block. If their rows of `A` have
    equal columns too, they share factors. In another layout, segments share their factors except
    for the starts in `X`, as rows of a convolution do that differ only in their position away from
    the image's border. This layout is chosen if it has at most half as many slots.

    If rows of `X` are long, there are gaps before slots: the slots of a factor start where its
    entries of `X` start, modulo :data:`ALIGNED`. So threads that read aligned entries also read
    aligned slots. If segments that share slots start differently, slots start at a multiple of it.

    Attributes
    ----------
    a_starts : ndarray of int64, shape (segments,)
        Where the segment's row starts in `A`.
    firsts, lasts : ndarray of int64, shape (segments,)
        Its first factor, and the one after the last.
    x_firsts : ndarray of int64, shape (segments,)
        Which of `x_starts` is that of its first factor; the others follow.
    starts : ndarray of int64, shape (segments + 1,)
        Where each segment starts in `C`, of which it has what comes before the next one.
    entries : ndarray of int64, shape (factors,)
        Which entry of the row of `A` a factor is.
    slot_starts : ndarray of int64, shape (factors,)
        Where its slots start.
    x_starts : ndarray of int64
        Where the entries of `X` start that go with a factor of a segment.
    counts : ndarray of uint16, shape (factors,)
        How many there are: one or more.
    slots : ndarray of uint16, shape (slots,)
        Places in a segment.
    work : ndarray of int64, shape (segments,)
        Terms of each segment.
    aligned : int
        Modulo what slots start where their entries of `X` do: 1 if that does not matter.
    """

    a_starts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    x_firsts: NDArray[np.int64]
    starts: NDArray[np.int64]
    entries: NDArray[np.int64]
    slot_starts: NDArray[np.int64]
    x_starts: NDArray[np.int64]
    counts: NDArray[np.uint16]
    slots: NDArray[np.uint16]
    work: NDArray[np.int64]
    aligned: int


def count_terms(a: Pattern, x: Pattern, c: Pattern, longest: int) -> TermCounts:
    """Count what :func:`lay_out_terms` lays out, in memory that does not grow with the terms."""
    return _Layout.of(a, x, c, longest).counts


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
    layout = _Layout.of(a, x, c, longest)
    _, size, starts, slots_size = layout.counts
    sizes = ((size, dtype), (size, dtype), (starts, dtype), (size, np.uint16))
    factors = [*(np.empty(*size_and_type) for size_and_type in sizes), np.zeros(slots_size, "u2")]
    segments, work, _ = layout.fill(factors)
    arrays = [array.astype(dtype, copy=False) for array in segments]
    aligned = 1 if len(layout.lists) else layout.aligned
    columns: list[Any] = [*arrays, *factors, work, aligned]
    return Terms(*columns)


class _Layout(NamedTuple):
    """Which segments of a product share what.

    Attributes
    ----------
    product : Product
        The patterns.
    rows, starts : ndarray of int64
        The row of each segment, and its first entry in `C`. A segment ends where the next starts.
    alike, lists : ndarray of int64
        Segments with equal numbers have equal columns; and equal factors, apart from where these
        start in `X`. `lists` is empty if segments do not share factors.
    aligned : int
        Slots start at multiples of this number.
    counts : TermCounts
        How many terms and slots there are.
    """

    product: Product
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    alike: NDArray[np.int64]
    lists: NDArray[np.int64]
    aligned: int
    counts: TermCounts

    @classmethod
    def of(cls, a: Pattern, x: Pattern, c: Pattern, longest: int) -> _Layout:
        """Return that which takes fewer slots, as :class:`Terms` says."""
        c_indptr, c_indices, c_dense = _rows(c)
        lengths = np.diff(c_indptr)
        parts = -(-lengths // longest)
        rows = np.repeat(np.arange(len(lengths)), parts)
        of_row = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = np.append(c_indptr[rows] + lengths[rows] * of_row // parts[rows], c_indptr[-1])
        alike = of_row
        if not c_dense:
            alike = _first_of_each(kernels.hash_columns(starts, c_indices))
            kernels.first_alike(starts, c_indices, alike)
        product = Product(_rows(a), _rows(x), _rows(c), c.shape[1])
        aligned, lists = ALIGNED if x.nnz > LONG * x.shape[0] else 1, np.empty(0, np.int64)
        none = TermCounts(0, 0, 0, 0)
        layout = cls(product, rows, starts, alike, lists, aligned, none)._counted()
        if c_dense:
            return layout
        lists = _first_of_each(kernels.hash_lists(rows, starts, product))
        if 2 * len(np.unique(lists)) > len(lists):
            return layout
        order = np.argsort(lists, kind="stable")
        kernels.first_listed(rows, starts, product, order, lists)
        other = layout._replace(lists=lists)._counted()
        return other if 2 * other.counts.slots <= layout.counts.slots else layout

    def _counted(self) -> _Layout:
        """Return the layout with its counts."""
        nothing, short = np.empty(0, np.int32), np.empty(0, np.uint16)
        *_, counts = self.fill([nothing] * 3 + [short] * 2)
        return self._replace(counts=counts)

    def fill(
        self, factors: list[NDArray[Any]]
    ) -> tuple[tuple[NDArray[np.int64], ...], NDArray[np.int64], TermCounts]:
        """Fill `factors` if they have room; return segments, their work, and counts."""
        size = len(self.rows)
        keys = (self.alike, self.lists) if len(self.lists) else (self.alike,)
        a_starts, firsts, lasts, x_firsts, work = (np.empty(size, np.int64) for _ in range(5))
        counted = kernels.lay_out_terms(
            (self.rows, self.starts, a_starts, firsts, lasts, x_firsts, work),
            np.lexsort(keys),
            self.alike,
            self.lists,
            self.product,
            self.aligned,
            tuple(factors),
        )
        return (a_starts, firsts, lasts, x_firsts, self.starts), work, TermCounts(size, *counted)


def _first_of_each(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each hash the place of the first that equals it."""
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    return np.asarray(first[group], np.int64)


def _rows(pattern: Pattern) -> Rows:
    """Return the rows of a pattern as kernels read them."""
    if pattern.kind == "dense":
        rows, cols = pattern.shape
        return Rows(cols * np.arange(rows + 1), np.empty(0, np.int32), True)
    return Rows(pattern.indptr, pattern.indices, False)
