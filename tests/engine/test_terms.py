"""Where the terms of sparse products are added: SciPy's products, made by following the tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import STRUCTURES, mask
from sampling import examples

from sparsescan import Pattern
from sparsescan.kernels import symbolic as kernels
from sparsescan.symbolic.pattern import multiply_adds, of_mask, product
from sparsescan.symbolic.terms import Terms, count_terms, lay_out_terms

I4, I8 = np.dtype(np.int32), np.dtype(np.int64)
F8 = np.float64


def matrix(pattern: Pattern, values: Any) -> Any:
    return sp.csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape)


def sizes_of(terms: Terms) -> tuple[int, ...]:
    return tuple(len(x) for x in (terms.firsts, terms.entries, terms.x_starts, terms.slots))


def followed(terms: Terms, a: Any, x: Any, nnz: int, longest: int) -> Any:
    """Values of a product as the tables say, in numbers that are poisoned beforehand."""
    values = np.full(nnz, np.nan)
    for n, (start, stop) in enumerate(zip(terms.starts[:-1], terms.starts[1:], strict=True)):
        total, work = np.zeros(stop - start), 0
        assert 0 < len(total) <= longest
        for k, f in enumerate(range(terms.firsts[n], terms.lasts[n])):
            q = terms.x_starts[terms.x_firsts[n] + k]
            count, slot = int(terms.counts[f]), terms.slot_starts[f]
            places = terms.slots[slot : slot + count]
            # Threads add them at the same time.
            assert len(set(places.tolist())) == count > 0
            total[places] += a[terms.a_starts[n] + terms.entries[f]] * x[q : q + count]
            work += count
        assert work == terms.work[n]
        values[start:stop] = total
    return values


def agree(
    a: Pattern, x: Pattern, c: Pattern, longest: int, exact: Pattern, dtype: np.dtype[Any] = I4
) -> Terms:
    """Check the product of random matrices, of which `A` has the entries `exact`."""
    rng = np.random.default_rng()
    terms, counts = lay_out_terms(a, x, c, longest, dtype), count_terms(a, x, c, longest)
    assert counts == sizes_of(terms)
    own, others = matrix(exact, rng.standard_normal(exact.nnz)), rng.standard_normal(x.nnz)
    values = own.data if a is exact else own.toarray().ravel()
    computed = matrix(c, followed(terms, values, others, c.nnz, longest)).toarray()
    wanted = (own @ matrix(x, others)).toarray()
    sizes = (abs(own) @ matrix(x, abs(others))).toarray()
    assert (abs(computed - wanted) <= 64 * np.finfo(F8).eps * sizes).all()
    return terms


@settings(max_examples=examples(200))
@given(st.data())
def test_products_that_follow_the_tables(data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sizes = [data.draw(st.integers(0, 14)) for _ in range(3)]
    kinds = [data.draw(st.sampled_from(STRUCTURES)) for _ in range(2)]
    a, x = (
        of_mask(mask(rng, kind, rows, cols))
        for kind, rows, cols in zip(kinds, sizes[:-1], sizes[1:], strict=True)
    )
    if a.kind == "diagonal" or x.kind != "general":
        return
    c = Pattern.dense((sizes[0], sizes[2])) if data.draw(st.booleans()) else product(a, x)
    longest, dtype = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([I4, I8]))
    terms = agree(a, x, c, longest, a, dtype)
    assert int(terms.work.sum()) == multiply_adds(a, x)
    *arrays, _, _ = terms
    counts = count_terms(a, x, c, longest)
    assert counts.nbytes(dtype.itemsize) == [array.nbytes for array in arrays]


@settings(max_examples=examples(100))
@given(st.data())
def test_terms_of_zeros_that_are_stored_are_left_out(data: Any) -> None:
    """Where `A` is stored densely, though not all of it is an entry, and `C` is not."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, inner, cols = (data.draw(st.integers(1, 14)) for _ in range(3))
    exact, x = (
        of_mask(mask(rng, data.draw(st.sampled_from(STRUCTURES)), *shape))
        for shape in ((rows, inner), (inner, cols))
    )
    if exact.kind == "diagonal" or x.kind != "general":
        return
    a, longest = Pattern.dense((rows, inner)), data.draw(st.integers(1, 9))
    terms = agree(a, x, product(exact, x), longest, exact)
    assert multiply_adds(exact, x) <= int(terms.work.sum()) <= multiply_adds(a, x)


def convolution(rng: np.random.Generator, channels: tuple[int, int], places: int) -> Any:
    """Which entries a one-dimensional convolution of three weights has, some of them pruned."""
    weights = [np.kron(rng.random(channels) < 0.5, np.eye(places, k=k)) for k in (-1, 0, 1)]
    return sum(weights) > 0


@settings(max_examples=examples(50))
@given(st.data())
def test_rows_of_equal_structure_share_a_list(data: Any) -> None:
    """Rows of convolutions, wherever they are cut, and where `A` is stored densely."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    channels = [data.draw(st.integers(1, 4)) for _ in range(3)]
    places, longest = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 60))
    a, x = (of_mask(convolution(rng, pair, places)) for pair in pairwise(channels))
    if a.kind == "diagonal" or x.kind != "general":
        return
    stored = Pattern.dense(a.shape) if data.draw(st.booleans()) else a
    agree(stored, x, product(a, x), longest, a)


@pytest.mark.parametrize("outputs", [2, 40])
def test_rows_away_from_the_border_have_one_list(outputs: int) -> None:
    """Aligned where rows are long; equal in every row of a channel but two at each end.

    Each row has entries, of the middle weights: those without have no list.
    """
    rng, places = np.random.default_rng(), 50
    a, x = (
        of_mask(convolution(rng, pair, places) | np.kron(np.eye(*pair) > 0, np.eye(places) > 0))
        for pair in ((3, 6), (6, outputs))
    )
    c = product(a, x)
    terms = agree(a, x, c, 4096, a)
    lists = [
        [
            terms.slots[terms.slot_starts[f] :][: terms.counts[f]].tolist()
            for f in range(terms.firsts[n], terms.lasts[n])
        ]
        for n in range(c.shape[0])
    ]
    for channel in range(3):
        inner = range(channel * places + 2, (channel + 1) * places - 2)
        assert all(lists[n] == lists[inner[0]] for n in inner)
        assert len({int(terms.firsts[n]) for n in inner}) == 1
    assert len(terms.slots) <= multiply_adds(a, x) / 5
    assert terms.aligned == 1
    if x.nnz > 32 * x.shape[0]:
        assert (terms.slot_starts % 16 == 0).all()


def test_equal_hashes_of_other_lists_are_told_apart() -> None:
    rng = np.random.default_rng()
    a, x = (of_mask(convolution(rng, (2, 2), 6)) for _ in range(2))
    c = product(a, x)
    kept = np.flatnonzero(np.diff(c.indptr))
    starts = np.append(c.indptr[kept], c.nnz).astype(np.int64)
    rows = (kernels.Rows(p.indptr, p.indices, False) for p in (a, x, c))
    patterns = kernels.Product(*rows, c.shape[1])
    lists = np.zeros(len(kept), np.int64)
    kernels.first_listed(kept, starts, patterns, np.arange(len(kept)), lists)
    hashes = kernels.hash_lists(kept, starts, patterns)
    assert [n for n in range(len(kept)) if lists[n] == 0] == np.flatnonzero(
        hashes == hashes[:1]
    ).tolist()
    assert all(n in (0, k) for k, n in enumerate(lists.tolist()))


def test_equal_hashes_of_other_columns_are_told_apart() -> None:
    starts, columns = np.array([0, 2, 4, 6, 7, 9]), np.array([1, 5, 1, 6, 1, 5, 1, 1, 6])
    alike = np.array([0, 0, 0, 0, 1])
    kernels.first_alike(starts, columns, alike)
    assert alike.tolist() == [0, 1, 0, 3, 1]
    hashes = kernels.hash_columns(starts, columns)
    assert hashes[0] == hashes[2] != hashes[1] == hashes[4]
    assert hashes[3] not in hashes[[0, 1]]


@pytest.mark.parametrize("longest", [7, 65536])
def test_long_rows_are_cut_into_equal_parts(longest: int) -> None:
    a, x = Pattern.dense((2, 3)), of_mask(np.arange(3)[:, None] == np.arange(90_000) % 3)
    terms = lay_out_terms(a, x, product(a, x), longest, I4)
    lengths = np.diff(terms.starts)
    assert lengths.max() <= longest
    assert lengths.max() - lengths.min() <= 1
    ones = np.ones(max(a.nnz, x.nnz))
    assert (followed(terms, ones, ones, 180_000, longest) == 1).all()
