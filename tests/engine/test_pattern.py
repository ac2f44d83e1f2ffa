"""The symbolic phase: patterns, and the patterns of products."""

from __future__ import annotations

import gc
import math
import tracemalloc
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from oracles import STRUCTURES, assert_within, chains, indices_of, mask, schedules, sequential

import sparsescan.symbolic.pattern
import sparsescan.symbolic.program
from sparsescan import CSRChain, InputError, InputTypeError, Pattern, Schedule
from sparsescan.symbolic.pattern import (
    PatternProducts,
    TooLargeError,
    keys_of,
    multiply_adds,
    of_keys,
    of_mask,
    places_in,
    product,
    product_nnz,
    union,
)

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(0, 12)


def random_pattern(rng: np.random.Generator, structure: str, rows: int, cols: int) -> Pattern:
    return Pattern(*indices_of(mask(rng, structure, rows, cols))[::-1], (rows, cols))


def ones(pattern: Pattern) -> sp.csr_array:
    """Return the matrix of ones on a pattern: sums of its products never cancel."""
    parts = np.ones(pattern.nnz), pattern.indices, pattern.indptr
    return sp.csr_array(parts, shape=pattern.shape)


def assert_canonical(pattern: Pattern) -> None:
    """Rows increase strictly, sizes agree, nobody can write."""
    indptr, indices = pattern.indptr, pattern.indices
    assert indptr.shape == (pattern.shape[0] + 1,)
    assert indices.shape == (pattern.nnz,)
    assert indptr[0] == 0
    assert indptr[-1] == pattern.nnz
    rows = np.repeat(np.arange(pattern.shape[0]), np.diff(indptr))
    assert (np.diff(rows * (pattern.shape[1] + 1) + indices) > 0).all()
    assert not indptr.flags.writeable
    assert not indices.flags.writeable
    assert indptr.dtype == indices.dtype == pattern.index_dtype


@given(*[st.sampled_from(STRUCTURES)] * 2, st.tuples(SIZES, SIZES, SIZES), st.booleans(), SEEDS)
def test_product_is_the_structural_product(left, right, sizes, square, seed):
    """Of entries that SciPy's product of ones has, which never cancel."""
    rng = np.random.default_rng(seed)
    m, k, n = (sizes[0],) * 3 if square else sizes
    a, b = random_pattern(rng, left, m, k), random_pattern(rng, right, k, n)
    c = product(a, b)
    assert_canonical(c)
    assert c.shape == (m, n)
    np.testing.assert_array_equal(ones(c).toarray() > 0, (ones(a) @ ones(b)).toarray() > 0)
    assert product(a, b) is c
    assert Pattern(c.indptr, c.indices, c.shape) is c
    meetings = sum(int(b.indptr[k + 1] - b.indptr[k]) for k in a.indices)
    assert multiply_adds(a, b) == meetings == int((ones(a) @ ones(b)).sum())


def test_a_product_keeps_entries_that_cancel():
    a, b = Pattern.dense((1, 2)), Pattern.dense((2, 1))
    assert product(a, b).nnz == 1  # [1, 1] @ [1, -1] is 0, its pattern is not


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        (np.eye(4), "diagonal"),
        (np.ones((4, 4)), "dense"),
        (np.ones((2, 5)), "dense"),
        (np.ones((1, 1)), "diagonal"),
        (np.zeros((0, 0)), "diagonal"),
        (np.eye(4)[::-1], "general"),
        (np.eye(4, 5), "general"),
        (np.eye(4) * [1, 1, 0, 1], "general"),
        (np.zeros((3, 3)), "general"),
    ],
)
def test_kinds(where, kind):
    indices, indptr = indices_of(where > 0)
    assert Pattern(indptr, indices, where.shape).kind == kind


def test_patterns_nobody_holds_are_forgotten():
    pattern = random_pattern(np.random.default_rng(1), "sparse", 9, 11)
    gone = weakref.ref(pattern)
    del pattern
    gc.collect()
    assert gone() is None


def test_patterns_copy_what_they_are_made_from():
    indptr, indices = np.array([0, 1, 3], np.int32), np.array([0, 0, 1], np.int32)
    pattern = Pattern(indptr, indices, (2, 2))
    indices[0] = 1
    assert pattern.indices.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("indptr", "indices", "shape", "message"),
    [
        ([1, 1, 2], [0, 1], (2, 2), "indptr that starts at 1; expected 0"),
        ([0, 2, 1], [0, 1], (2, 2), "indptr that falls after row 1"),
        ([0, 1, 3], [0, 1], (2, 2), "indptr that ends at 3; expected 2"),
        ([0, 1], [0], (2, 2), "pattern has an indptr of 2 entries; expected 3 for 2 rows"),
        ([0, 1, 2], [0, 2], (2, 2), "index 2 in row 1; expected columns 0 to 1"),
        ([0, 1, 2], [0, -1], (2, 2), "index -1 in row 1; expected columns 0 to 1"),
        ([0, 2, 2], [1, 0], (2, 2), "pattern has unsorted or duplicate columns in row 0"),
        ([0, 0, 2], [1, 1], (2, 2), "pattern has unsorted or duplicate columns in row 1"),
        ([[0, 1, 2]], [0, 1], (2, 2), "pattern has indptr of shape (1, 3); expected one dimension"),
        ([0, 0, 0], [], (2, -2), "pattern has shape (2, -2); expected sizes of at least 0"),
        (
            np.array([0, 0, 2**63], np.uint64),
            [0, 1],
            (2, 2),
            "pattern has indptr beyond the range of int64",
        ),
    ],
)
def test_what_is_no_pattern(indptr, indices, shape, message):
    with pytest.raises(InputError) as caught:
        Pattern(indptr, indices, shape)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csr_matrix])
def test_a_matrix_has_a_pattern(kind):
    matrix = kind(sp.random(5, 7, 0.3, random_state=0))
    expected = Pattern(matrix.indptr, matrix.indices, matrix.shape)
    assert Pattern(matrix) is expected
    matrix.indices[:] = 0
    assert Pattern(expected.indptr, expected.indices, (5, 7)) is expected


@pytest.mark.parametrize("given", [([0, 1],), (sp.csc_array((2, 2)),), (sp.csr_array((2, 2)), [0])])
def test_a_pattern_needs_all_of_its_parts(given):
    with pytest.raises(InputTypeError, match=r"pattern is made of .* alone; expected a CSR matrix"):
        Pattern(*given)


def test_products_must_chain():
    with pytest.raises(InputError, match=r"\(2, 3\) and \(2, 3\); the inner must agree"):
        product(Pattern.dense((2, 3)), Pattern.dense((2, 3)))


# ---------------------------------------------------------------------------------------------
# 64-bit indices, with the limit patched down to where they are needed
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_int32(monkeypatch):
    """No index beyond 3 fits, and no pattern from before is found again."""
    monkeypatch.setattr(sparsescan.symbolic.pattern, "INT32_MAX", 3)
    monkeypatch.setattr(sparsescan.symbolic.pattern, "_interned", weakref.WeakValueDictionary())


@given(st.data())
def test_int64_scans(tiny_int32, data):
    chain = data.draw(chains(max_n=8))
    schedule = data.draw(schedules(len(chain.jacobians)))
    assert_within(chain.scan(schedule=schedule), chain.oracle(), chain.dtype)


# ---------------------------------------------------------------------------------------------
# The symbolic phase is done once
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """Collect the pairs of patterns that the symbolic phase multiplies."""
    calls = []

    def counting(a, b):
        calls.append((a, b))
        return product(a, b)

    monkeypatch.setattr(sparsescan.symbolic.pattern, "product", counting)
    return calls


def test_one_symbolic_product_per_level(counted):
    """10,000 steps over one pattern cost one product per level of the up-sweep, not 5,000."""
    n = 10_000
    pattern = random_pattern(np.random.default_rng(2), "banded", 50, 50)
    plan = sparsescan.plan([pattern] * n, schedule="blelloch")
    ups = sum(level.name.startswith("up-sweep") for level in plan.schedule.levels)
    assert ups == 13
    assert len(counted) <= ups
    assert len(set(counted)) == len(counted)


def test_a_plan_multiplies_patterns_once_and_values_each_time(counted):
    rng = np.random.default_rng(4)
    pattern = random_pattern(rng, "sparse", 8, 8)
    plan = sparsescan.plan([pattern] * 20, schedule=Schedule.chunked(20, 4))
    done = len(counted)
    for _ in range(3):
        data = rng.standard_normal((20, pattern.nnz))
        grad = rng.standard_normal(8)
        chain = CSRChain(data, pattern.indices, pattern.indptr, (8, 8))
        assert_within(plan.exclusive_scan(grad, data), sequential(grad, chain), np.float64)
    assert len(counted) == done


# ---------------------------------------------------------------------------------------------
# Products with dense operands, estimates, and limits
# ---------------------------------------------------------------------------------------------


def structure(a, b):
    """Where SciPy has entries in a product, and how many terms they sum; by ones, exactly."""
    product = ones(a) @ ones(b)
    return product.toarray() > 0, round(float(product.sum()))


@given(st.sampled_from(STRUCTURES), st.sampled_from(STRUCTURES), st.integers(0, 64), SEEDS)
def test_entries_of_a_product_of_up_to_64_rows_are_counted(left, right, rows, seed):
    rng = np.random.default_rng(seed)
    a = random_pattern(rng, left, rows, int(rng.integers(1, 40)))
    b = random_pattern(rng, right, a.shape[1], int(rng.integers(1, 40)))
    assert product_nnz(a, b) == structure(a, b)[0].sum()


@given(SEEDS)
def test_entries_of_a_larger_product_are_estimated(seed):
    """From 64 rows out of up to 2000, whose lengths vary: within six standard errors and 2 %."""
    rng = np.random.default_rng(seed)
    rows, inner, cols = rng.integers(100, 2000, 3).tolist()
    a, b = (
        of_mask(rng.random(shape) < rng.uniform(0, 20, (shape[0], 1)) / shape[1])
        for shape in ((rows, inner), (inner, cols))
    )
    product = ones(a) @ ones(b)
    product.sum_duplicates()
    lengths = np.diff(product.indptr)
    estimate = product_nnz(a, b)
    assert estimate == product_nnz(a, b)
    error = 6 * rows * lengths.std() / 64**0.5
    assert abs(estimate - product.nnz) <= error + 0.02 * product.nnz


def column_and_row(n):
    """Square patterns with `n` entries, whose product is full."""
    column = Pattern(np.arange(n + 1), np.zeros(n, int), (n, n))
    return column, Pattern([0] + [n] * n, np.arange(n), (n, n))


def test_an_estimate_takes_no_memory_that_grows_with_the_product():
    """A row and a column of 30,000 entries: their product would have 900 million."""
    n = 30_000
    column, row = column_and_row(n)
    product_nnz(column, row)
    tracemalloc.start()
    assert product_nnz(column, row) == n * n
    assert tracemalloc.get_traced_memory()[1] < 20 * n
    tracemalloc.stop()


def no_product(a, b):
    raise AssertionError("it was worked out")


def test_products_beyond_the_work_allowed_are_not_worked_out(monkeypatch):
    rng = np.random.default_rng(8)
    a, b = random_pattern(rng, "sparse", 30, 30), random_pattern(rng, "sparse", 30, 30)
    work = multiply_adds(a, b)
    assert PatternProducts(work)(a, b) is product(a, b)
    monkeypatch.setattr(sparsescan.symbolic.pattern, "product", no_product)
    with pytest.raises(TooLargeError):
        PatternProducts(work - 1)(a, b)


def test_what_is_given_up_leaves_the_work_to_others():
    """All products are made that the work allowed suffices for."""
    rng = np.random.default_rng(9)
    small, large = random_pattern(rng, "sparse", 10, 10), random_pattern(rng, "sparse", 10, 1000)
    products = PatternProducts(2 * multiply_adds(small, small))
    with pytest.raises(TooLargeError):
        products(small, large)
    assert products(small, small) is product(small, small)


def test_a_product_is_worked_out_and_counted_once(counted):
    rng = np.random.default_rng(10)
    a, b = random_pattern(rng, "sparse", 30, 30), random_pattern(rng, "sparse", 30, 30)
    products = PatternProducts(multiply_adds(a, b))
    assert products(a, b) is products(a, b)
    assert counted == [(a, b)]
    with pytest.raises(TooLargeError):
        products(b, a)


def test_products_with_too_many_entries_take_no_memory():
    n = 5000
    column, row = column_and_row(n)
    with pytest.raises(TooLargeError):
        PatternProducts(nbytes=40)(column, row)
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        PatternProducts(nbytes=4 * (n * n - 1))(column, row)
    assert tracemalloc.get_traced_memory()[1] < 100 * n
    tracemalloc.stop()


@pytest.mark.parametrize("nbytes", [math.inf, 1e9])
def test_a_large_product_that_seems_to_be_more_than_half_full_is_taken_to_be_full(
    monkeypatch, nbytes
):
    rng = np.random.default_rng(12)
    size = 300
    thin, thick = (
        of_mask(np.eye(size, dtype=bool) | (rng.random((size, size)) < share))
        for share in (0.005, 0.1)
    )
    for a, b in ((thin, thin), (thick, thick)):
        assert product(a, b).kind == "general"
        assert PatternProducts(nbytes=nbytes)(a, b) is product(a, b)
    monkeypatch.setattr(sparsescan.symbolic.pattern, "_EXACT", multiply_adds(thin, thin) - 1)
    assert PatternProducts(nbytes=nbytes)(thin, thin) is product(thin, thin)
    monkeypatch.setattr(sparsescan.symbolic.pattern, "product", no_product)
    assert PatternProducts(nbytes=nbytes)(thick, thick) is Pattern.dense((size, size))


@given(shape=st.tuples(SIZES, SIZES), count=st.integers(1, 4), seed=SEEDS)
def test_unions_have_the_entries_of_all(shape: tuple[int, int], count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(shape) < rng.random() for _ in range(count)]
    parts = [Pattern(sp.csr_array(own, dtype=float)) for own in masks]
    whole = union(parts)
    assert whole is Pattern(sp.csr_array(np.any(masks, axis=0), dtype=float))
    for own, part in zip(masks, parts, strict=True):
        assert keys_of(part).tolist() == np.flatnonzero(own).tolist()
        assert of_keys(keys_of(part), shape) is part
        found = np.zeros(whole.nnz, bool)
        found[places_in(whole, part)] = True
        assert found.tolist() == own[np.any(masks, axis=0)].tolist()
