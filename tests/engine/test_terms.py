"""Where the terms of sparse products are added: SciPy's products, made by following the tables."""

from __future__ import annotations

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


def followed(terms: Terms, a: Any, x: Any, nnz: int, longest: int) -> Any:
    """Values of a product as the tables say, in numbers that are poisoned beforehand."""
    values = np.full(nnz, np.nan)
    for n, (start, stop) in enumerate(zip(terms.starts[:-1], terms.starts[1:], strict=True)):
        total, work = np.zeros(stop - start), 0
        assert 0 < len(total) <= longest
        for f in range(terms.firsts[n], terms.lasts[n]):
            count, q, slot = int(terms.counts[f]), terms.x_starts[f], terms.slot_starts[f]
            places = terms.slots[slot : slot + count]
            # Threads add them at the same time.
            assert len(set(places.tolist())) == count > 0
            total[places] += a[terms.a_starts[n] + terms.entries[f]] * x[q : q + count]
            work += count
        assert work == terms.work[n]
        values[start:stop] = total
    return values


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
    terms, counts = lay_out_terms(a, x, c, longest, dtype), count_terms(a, x, c, longest)
    own, others = rng.standard_normal(a.nnz), rng.standard_normal(x.nnz)
    computed = matrix(c, followed(terms, own, others, c.nnz, longest)).toarray()
    wanted = (matrix(a, own) @ matrix(x, others)).toarray()
    sizes_of_terms = (matrix(a, abs(own)) @ matrix(x, abs(others))).toarray()
    assert (abs(computed - wanted) <= 64 * np.finfo(F8).eps * sizes_of_terms).all()
    assert int(terms.work.sum()) == multiply_adds(a, x)
    assert counts == (len(terms.firsts), len(terms.entries), len(terms.slots))
    *arrays, _ = terms
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
    a, c, longest = Pattern.dense((rows, inner)), product(exact, x), data.draw(st.integers(1, 9))
    terms, counts = lay_out_terms(a, x, c, longest, I4), count_terms(a, x, c, longest)
    own, others = rng.standard_normal(exact.nnz), rng.standard_normal(x.nnz)
    wanted = matrix(exact, own) @ matrix(x, others)
    followed_values = followed(terms, matrix(exact, own).toarray().ravel(), others, c.nnz, longest)
    computed = matrix(c, followed_values).toarray()
    sizes_of_terms = (matrix(exact, abs(own)) @ matrix(x, abs(others))).toarray()
    assert (abs(computed - wanted.toarray()) <= 64 * np.finfo(F8).eps * sizes_of_terms).all()
    assert multiply_adds(exact, x) <= int(terms.work.sum()) <= multiply_adds(a, x)
    assert counts == (len(terms.firsts), len(terms.entries), len(terms.slots))


def test_rows_of_a_dense_product_share_slots() -> None:
    rng = np.random.default_rng()
    a, x = of_mask(rng.random((40, 30)) < 0.5), of_mask(rng.random((30, 20)) < 0.3)
    counts = count_terms(a, x, Pattern.dense((40, 20)), 64)
    assert counts.slots == x.nnz < multiply_adds(a, x)
    full = Pattern.dense((40, 30))
    counts = count_terms(full, x, product(full, x), 64)
    assert counts.slots == x.nnz
    assert counts.factors == np.count_nonzero(np.diff(x.indptr))


def test_slots_of_long_rows_are_aligned_as_their_entries_are() -> None:
    rng = np.random.default_rng()
    a, x = of_mask(rng.random((9, 12)) < 0.5), of_mask(rng.random((12, 200)) < 0.4)
    c = product(a, x)
    terms, counts = lay_out_terms(a, x, c, 80, I4), count_terms(a, x, c, 80)
    assert ((terms.slot_starts - terms.x_starts) % 16 == 0).all()
    assert counts.slots == len(terms.slots) > multiply_adds(a, x)
    own, others = rng.standard_normal(a.nnz), rng.standard_normal(x.nnz)
    computed = matrix(c, followed(terms, own, others, c.nnz, 80)).toarray()
    wanted = (matrix(a, own) @ matrix(x, others)).toarray()
    assert (abs(computed - wanted) <= 64 * np.finfo(F8).eps * 12 * 25).all()


def test_rows_of_a_block_share_slots() -> None:
    """Also if blocks take turns, as channels of an image do."""
    a = of_mask(np.kron(np.ones((3, 2)), np.eye(8)) > 0)
    x = of_mask(np.kron(np.ones((2, 5)), np.eye(8, k=1) + np.eye(8)) > 0)
    counts = count_terms(a, x, product(a, x), 64)
    assert counts.segments == 24
    assert counts.slots == multiply_adds(a, x) / 3
    assert counts.factors == a.nnz / 3


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
