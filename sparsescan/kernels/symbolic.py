"""The symbolic phase: checks of index arrays, and patterns of products."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .compile import njit

# Faults of index arrays.
START, FALL, END, RANGE = 1, 2, 3, 4


class Rows(NamedTuple):
    """Row pointers and columns of a pattern; columns are left out where all entries are there."""

    indptr: Any
    indices: Any
    is_dense: bool


class Product(NamedTuple):
    """The patterns of ``C = A @ X``, and the columns of `C`."""

    a: Rows
    x: Rows
    c: Rows
    cols: int


@njit(nogil=True, cache=True)
def find_fault(indptr, indices, cols):
    """Return the kind and the place of the first fault of index arrays; 0 if they are safe."""
    if indptr[0] != 0:
        return START, 0
    for row in range(len(indptr) - 1):
        if indptr[row + 1] < indptr[row]:
            return FALL, row
    if indptr[-1] != len(indices):
        return END, 0
    for p in range(len(indices)):
        if indices[p] < 0 or indices[p] >= cols:
            return RANGE, p
    return 0, 0


@njit(nogil=True, cache=True)
def unsorted_row(indptr, indices):
    """Return the first row whose columns do not increase strictly, or -1."""
    for row in range(len(indptr) - 1):
        for p in range(indptr[row] + 1, indptr[row + 1]):
            if indices[p] <= indices[p - 1]:
                return row
    return -1


@njit(nogil=True, cache=True)
def is_diagonal(indptr, indices):
    """Return whether a square matrix with as many entries as rows is diagonal."""
    for row in range(len(indices)):
        if indptr[row] != row or indices[row] != row:
            return False
    return True


@njit(nogil=True, cache=True)
def product_indptr(a_indptr, a_indices, b_indptr, b_indices, cols):
    """Return the row pointers of ``A @ B``."""
    rows = len(a_indptr) - 1
    indptr = np.zeros(rows + 1, np.int64)
    seen = np.full(cols, -1, np.int64)
    for i in range(rows):
        count = np.int64(0)
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = b_indices[q]
                if seen[j] != i:
                    seen[j] = i
                    count += 1
        indptr[i + 1] = indptr[i] + count
    return indptr


@njit(nogil=True, cache=True)
def count_terms(a_indices, b_indptr):
    """Return how many terms ``A[i, k]·B[k, j]`` the product ``A @ B`` sums."""
    count = np.int64(0)
    for k in a_indices:
        count += b_indptr[k + 1] - b_indptr[k]
    return count


@njit(nogil=True, cache=True)
def count_entries(a_indptr, a_indices, b_indptr, b_indices, cols, rows):
    """Return how many entries these rows of ``A @ B`` have."""
    seen = np.full(cols, -1, np.int64)
    count = np.int64(0)
    for i in rows:
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = b_indices[q]
                if seen[j] != i:
                    seen[j] = i
                    count += 1
    return count


@njit(nogil=True, cache=True)
def product_indices(a_indptr, a_indices, b_indptr, b_indices, cols, indptr, indices):
    """Fill `indices` with the sorted columns of ``A @ B``, whose row pointers are known."""
    rows = len(a_indptr) - 1
    seen = np.full(cols, -1, np.int64)
    for i in range(rows):
        start, stop = indptr[i], indptr[i + 1]
        first, last, out = np.int64(cols), np.int64(-1), start
        for p in range(a_indptr[i], a_indptr[i + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                j = np.int64(b_indices[q])
                if seen[j] != i:
                    seen[j] = i
                    indices[out] = j
                    out += 1
                    first = min(first, j)
                    last = max(last, j)
        # A row that fills a good part of its span is read off the marks; a thin one is sorted.
        if (last - first) < 16 * (stop - start):
            out = start
            for column in range(first, last + 1):
                if seen[column] == i:
                    indices[out] = column
                    out += 1
        else:
            indices[start:stop].sort()


@njit(nogil=True, cache=True)
def hash_columns(starts, indices):
    """Return a hash of the columns of each segment, which begins at ``starts[n]`` in `indices`."""
    hashes = np.empty(len(starts) - 1, np.uint64)
    for n in range(len(hashes)):
        mixed = np.uint64(14695981039346656037)
        for e in range(starts[n], starts[n + 1]):
            mixed = (mixed ^ np.uint64(indices[e])) * np.uint64(1099511628211)
        hashes[n] = mixed
    return hashes


@njit(nogil=True, cache=True)
def first_alike(starts, indices, guesses):
    """Replace each guess of an earlier segment in the same columns by `n` itself if it is wrong."""
    for n in range(len(guesses)):
        other = guesses[n]
        if not _equal(indices, starts[n], starts[n + 1], indices, starts[other], starts[other + 1]):
            guesses[n] = n


@njit(nogil=True, cache=True)
def _equal(a, start, stop, b, other, other_stop):
    """Return whether a range of `a` and one of `b` have equal numbers."""
    if stop - start != other_stop - other:
        return False
    for p in range(stop - start):
        if a[start + p] != b[other + p]:
            return False
    return True


@njit(nogil=True, cache=True)
def _lower_bound(indices, first, last, value):
    """Return where `value` would stand among the sorted ``indices[first:last]``."""
    while first < last:
        middle = (first + last) // 2
        if indices[middle] < value:
            first = middle + 1
        else:
            last = middle
    return first


@njit(nogil=True, cache=True)
def _columns_of(start, stop, row_start, row_stop, c_indices, c_dense, cols):
    """Return the first column of a segment of a row of `C`, and that of the next segment."""
    low, high = np.int64(0), np.int64(cols)
    if start > row_start:
        low = start - row_start if c_dense else np.int64(c_indices[start])
    if stop < row_stop:
        high = stop - row_start if c_dense else np.int64(c_indices[stop])
    return low, high


@njit(nogil=True, cache=True)
def _entries_between(indptr, indices, k, low, high, cols):
    """Return where the entries of a row from column `low` on start, and those from `high` on."""
    first, last = np.int64(indptr[k]), np.int64(indptr[k + 1])
    if high - low < cols:
        first = _lower_bound(indices, first, last, low)
        last = _lower_bound(indices, first, last, high)
    return first, last


@njit(nogil=True, cache=True)
def _write_list(i, start, stop, product, place, out):
    """Write the slots of all terms of a segment; return how many numbers.

    A term that is not in `C` is written as -1, the end of a factor as the number of its entry in
    the row of `A`, from -2 downwards. `place` is -1 everywhere, before and after.
    """
    (a_indptr, a_indices, a_dense), (x_indptr, x_indices, _), c, cols = product
    c_indptr, c_indices, c_dense = c
    row_start, row_stop = np.int64(c_indptr[i]), np.int64(c_indptr[i + 1])
    low, high = _columns_of(start, stop, row_start, row_stop, c_indices, c_dense, cols)
    for e in range(start, stop):
        place[c_indices[e]] = e - start
    a_start, size = np.int64(a_indptr[i]), 0
    for p in range(a_start, np.int64(a_indptr[i + 1])):
        k = p - a_start if a_dense else np.int64(a_indices[p])
        first, last = _entries_between(x_indptr, x_indices, k, low, high, cols)
        if first == last:
            continue
        for q in range(first, last):
            out[size] = place[x_indices[q]]
            size += 1
        out[size] = a_start - p - 2
        size += 1
    for e in range(start, stop):
        place[c_indices[e]] = -1
    return size


@njit(nogil=True, cache=True)
def _room_for_list(a, x):
    """Return an array that is long enough for the list of any segment."""
    a_indptr, a_indices, a_dense = a
    x_indptr, _, _ = x
    most = np.int64(0)
    for i in range(len(a_indptr) - 1):
        size, a_start = np.int64(0), np.int64(a_indptr[i])
        for p in range(a_start, np.int64(a_indptr[i + 1])):
            k = p - a_start if a_dense else np.int64(a_indices[p])
            size += np.int64(x_indptr[k + 1]) - np.int64(x_indptr[k]) + 1
        most = max(most, size)
    return np.empty(most, np.int32)


@njit(nogil=True, cache=True)
def hash_lists(rows, starts, product):
    """Return a hash of the list of each segment: the slots of its terms, factor after factor.

    Parameters
    ----------
    rows, starts : ndarray
        Of each segment its row, and where it starts in `C`.
    product : Product
        The product; `C` is not dense.
    """
    hashes, place = np.empty(len(rows), np.uint64), np.full(product.cols, -1, np.int64)
    out = _room_for_list(product.a, product.x)
    for n in range(len(rows)):
        mixed = np.uint64(14695981039346656037)
        size = _write_list(rows[n], starts[n], starts[n + 1], product, place, out)
        for m in range(size):
            mixed = (mixed ^ np.uint64(np.int64(out[m]))) * np.uint64(1099511628211)
        hashes[n] = mixed
    return hashes


@njit(nogil=True, cache=True)
def first_listed(rows, starts, product, order, guesses):
    """Replace each guess of an earlier segment with an equal list by `n` itself if it is wrong.

    Segments with equal guesses are one after the other in `order`, that which is guessed first.
    """
    place = np.full(product.cols, -1, np.int64)
    own, first = _room_for_list(product.a, product.x), _room_for_list(product.a, product.x)
    size, other = 0, np.int64(-1)
    for n in order:
        length = _write_list(rows[n], starts[n], starts[n + 1], product, place, own)
        if guesses[n] != other:
            other, size = guesses[n], length
            own, first = first, own
        elif not _equal(own, 0, length, first, 0, size):
            guesses[n] = n


@njit(nogil=True, cache=True)
def lay_out_terms(segments, order, alike, lists, product, aligned, factors):
    """Lay out the terms of ``C = A @ X``, as :class:`~sparsescan.symbolic.terms.Terms` has them.

    Parameters
    ----------
    segments : tuple
        Of each segment its row, and where it starts in `C`; then arrays for where the row starts
        in `A`, for its first and last-plus-one factor, for the first of its starts in `X`, and for
        its number of terms.
    order : ndarray
        All segments, those in equal `lists`, and among them those that are `alike`, one after the
        other.
    alike : ndarray
        A number for each segment; the columns of those with equal numbers are equal.
    lists : ndarray
        A number for each segment; all factors of those with equal numbers are equal, but for where
        they start in `X`, and are laid out once. Empty where segments that are alike share slots,
        one row of `X` at a time.
    product : Product
        Where `A` has all entries and `C` has not, terms that are not in `C` are known to be zero,
        and left out.
    aligned : int
        A power of two: modulo that, slots start where their entries of `X` do, or at 0 in lists.
    factors : tuple
        Arrays for the entries, starts of slots, starts in `X`, counts and slots of all factors,
        which are filled unless the last is empty.

    Returns
    -------
    tuple of int
        How many factors, starts in `X` and slots there are.
    """
    rows, starts, a_starts, firsts, lasts, x_firsts, work = segments
    (a_indptr, a_indices, a_dense), (x_indptr, x_indices, _), c, cols = product
    c_indptr, c_indices, c_dense = c
    entries, slot_starts, x_starts, counts, slots = factors
    fill, in_lists, list_start = len(slots) > 0, len(lists) > 0, np.int64(0)
    of_row, at = np.full(len(x_indptr), -1, np.int64), np.empty(len(x_indptr), np.int64)
    # Which columns a segment has may be all that tells which terms there are.
    partial = a_dense and not c_dense
    place = np.full(0 if c_dense or not (fill or partial) else cols, -1, np.int64)
    factor, x_factor, slot, before = np.int64(0), np.int64(0), np.int64(0), np.int64(-1)
    for n in order:
        i, start, stop = rows[n], starts[n], starts[n + 1]
        a_start, a_stop = np.int64(a_indptr[i]), np.int64(a_indptr[i + 1])
        a_starts[n] = a_start
        is_first = in_lists and (before < 0 or lists[n] != lists[before])
        if before < 0 or alike[n] != alike[before]:
            if partial and before >= 0:
                for e in range(starts[before], starts[before + 1]):
                    place[c_indices[e]] = -1
            for e in range(start, stop if len(place) > 0 else start):
                place[c_indices[e]] = e - start
        else:
            other = a_starts[before]
            other_stop = np.int64(a_indptr[rows[before] + 1])
            if a_dense or _equal(a_indices, a_start, a_stop, a_indices, other, other_stop):
                firsts[n], lasts[n], work[n] = firsts[before], lasts[before], work[before]
                x_firsts[n] = x_firsts[before]
                continue
        row_start, row_stop = np.int64(c_indptr[i]), np.int64(c_indptr[i + 1])
        low, high = _columns_of(start, stop, row_start, row_stop, c_indices, c_dense, cols)
        x_firsts[n], terms = x_factor, np.int64(0)
        if is_first:
            list_start = slot
        in_list = list_start
        is_own = is_first or not in_lists
        firsts[n] = factor if is_own else firsts[before]
        for p in range(a_start, a_stop):
            k = p - a_start if a_dense else np.int64(a_indices[p])
            first, last = _entries_between(x_indptr, x_indices, k, low, high, cols)
            if first == last:
                continue
            is_new = is_first
            if in_lists:
                in_list += -in_list & (aligned - 1)
                at[k] = in_list
                in_list += last - first
            elif of_row[k] != alike[n]:
                slot += (first - slot) & (aligned - 1)
                of_row[k], at[k], is_new = alike[n], slot, True
                slot += last - first
            if is_new:
                for q in range(first, last if fill else first):
                    j = x_indices[q]
                    slots[at[k] + q - first] = j - low if c_dense else place[j]
            q, slots_at = first, at[k] - first
            while q < last:
                stop_at = last
                if partial:
                    while q < last and place[x_indices[q]] < 0:
                        q += 1
                    stop_at = q
                    while stop_at < last and place[x_indices[stop_at]] >= 0:
                        stop_at += 1
                if q < stop_at:
                    if fill:
                        x_starts[x_factor] = q
                    if fill and is_own:
                        entries[factor] = p - a_start
                        slot_starts[factor], counts[factor] = slots_at + q, stop_at - q
                    factor += is_own
                    x_factor += 1
                    terms += stop_at - q
                q = stop_at
        slot = max(slot, in_list)
        lasts[n] = factor if is_own else lasts[before]
        work[n], before = terms, n
    return factor, x_factor, slot
