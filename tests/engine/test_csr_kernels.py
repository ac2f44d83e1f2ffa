"""CSR matrices times vectors on the CPU: rows of any length, for one sample and for many."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import same_bits
from sampling import examples

import sparsescan
from sparsescan import BatchedCSR
from sparsescan.kernels.cpu.matvec import csr_matvec, single_matvec

BATCHES = [None, *range(1, 21)]
SEEDS = st.integers(0, 2**32 - 1)


@numba.njit
def multiply(*arguments: Any) -> None:
    csr_matvec(*arguments)


@numba.njit
def multiply_single(*arguments: Any) -> None:
    single_matvec(*arguments)


@pytest.fixture(params=[np.float32, np.float64])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[np.int32, np.int64])
def index_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both that patterns may have, the wider one for small matrices too."""
    if request.param is np.int64:
        monkeypatch.setattr(sparsescan.symbolic.pattern, "INT32_MAX", 3)
    return request.param


# Whole scans are compiled for these only, which takes long; kernels by themselves for all four.
scanned = pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [(np.float32, np.int32), (np.float32, np.int64), (np.float64, np.int32)],
    indirect=True,
)


def matrix(rng: np.random.Generator, lengths: Any, cols: int, dtype: Any) -> sp.csr_array:
    """Return a random matrix with so many entries in its rows."""
    columns = [np.sort(rng.choice(cols, k, replace=False)) for k in lengths]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    data = rng.standard_normal(indptr[-1]).astype(dtype)
    return sp.csr_array((data, np.concatenate(columns), indptr), shape=(len(lengths), cols))


def of_any_length(rng: np.random.Generator, dtype: Any) -> sp.csr_array:
    """Return a matrix with one row of each length from 0 to 40."""
    return matrix(rng, rng.permutation(41), int(rng.integers(40, 60)), dtype)


def vectors(rng: np.random.Generator, batch: int | None, size: int, dtype: Any) -> np.ndarray:
    return rng.standard_normal((size,) if batch is None else (batch, size)).astype(dtype)


def product(jacobian: Any, x: np.ndarray) -> np.ndarray:
    """``J x``, as a plan for these very indices computes it."""
    plan = sparsescan.plan([jacobian], schedule="linear")
    return plan.inclusive_scan(x, [jacobian])[1]


def rounded_as_written(jacobian: sp.csr_array, x: np.ndarray) -> np.ndarray:
    """``J x`` in NumPy, every product and every sum rounded, in the order of the kernel."""
    y = np.zeros((*x.shape[:-1], jacobian.shape[0]), x.dtype)
    for i in range(jacobian.shape[0]):
        entries = slice(*jacobian.indptr[i : i + 2])
        terms = jacobian.data[entries] * x[..., jacobian.indices[entries]]
        sums = np.zeros((*x.shape[:-1], 4), x.dtype)
        whole = terms.shape[-1] // 4 * 4
        for k in range(0, whole, 4):
            sums += terms[..., k : k + 4]
        total = (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])
        for k in range(whole, terms.shape[-1]):
            total = total + terms[..., k]
        y[..., i] = total
    return y


# ---------------------------------------------------------------------------------------------
# Rows of any length
# ---------------------------------------------------------------------------------------------


@scanned
@pytest.mark.parametrize("batch", BATCHES)
def test_every_sample_is_plain_floating_point(batch, dtype, index_dtype):
    """The sum is equal, to the last bit, whatever the batch and the processor."""
    rng = np.random.default_rng(batch or 0)
    jacobian = of_any_length(rng, dtype)
    assert sparsescan.plan([jacobian]).patterns[0].index_dtype == index_dtype
    x = vectors(rng, batch, jacobian.shape[1], dtype)
    assert same_bits([product(jacobian, x)], [rounded_as_written(jacobian, x)])


@given(seed=SEEDS, batch=st.sampled_from(BATCHES))
def test_values_that_are_not_finite_are_scipys(seed, batch, dtype):
    """Zero times infinity too; and no sample changes another."""
    rng = np.random.default_rng(seed)
    jacobian = of_any_length(rng, dtype)
    x = vectors(rng, batch, jacobian.shape[1], dtype)
    for array in (jacobian.data, x):
        array[rng.random(array.shape) < 0.05] = 0
        where = rng.random(array.shape) < 0.02
        array[where] = rng.choice([np.inf, -np.inf, np.nan], where.sum())
    with np.errstate(all="ignore"):
        expected = (jacobian @ x.T).T
    result = product(jacobian, x)
    assert np.array_equal(np.isnan(result), np.isnan(expected))
    infinite = np.isinf(result) | np.isinf(expected)
    assert np.array_equal(result[infinite], expected[infinite])


# ---------------------------------------------------------------------------------------------
# Blocks of rows, and what is around them
# ---------------------------------------------------------------------------------------------


def guarded(values: Any, poison: float, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Copy an array, with 64 bytes of poison around; return the copy, and all of it."""
    around = np.full(values.size + 2 * (guard := 64 // np.dtype(dtype).itemsize), poison, dtype)
    inside = around[guard:-guard].reshape(values.shape)
    inside[...] = values
    return inside, around


@settings(max_examples=examples(24))
@given(seed=SEEDS)
def test_a_block_of_rows_has_the_same_bits_and_touches_no_others(seed, dtype, index_dtype):
    """For one sample, and for one to eight that are interleaved beside lanes of NaN."""
    rng = np.random.default_rng(seed)
    jacobian = of_any_length(rng, dtype)
    (rows, cols), samples = jacobian.shape, int(rng.integers(1, 9))
    first, last = np.sort(rng.integers(0, rows + 1, 2))
    x = vectors(rng, samples, cols, dtype)
    lanes = np.full((cols, 8), np.nan, dtype)
    lanes[:, :samples] = x.T
    m, _ = guarded(jacobian.data, np.nan, dtype)
    pattern = jacobian.indptr.astype(index_dtype), jacobian.indices.astype(index_dtype)
    for read, count in ((x[0], 1), (lanes, samples)):
        expected = np.full((count, rows), 7, dtype)
        expected[:, first:last] = rounded_as_written(jacobian, x[:count])[:, first:last]
        read, _ = guarded(read, np.nan, dtype)
        y, around = guarded(np.full(count * rows, 7), 7, dtype)
        multiply(first, last, *pattern, m, read, y, rows, count, None)
        assert same_bits([y.reshape(count, rows)], [expected])
        y[:] = 7
        assert (around == 7).all()


@given(seed=SEEDS)
def test_a_block_of_rows_with_one_entry_each(seed, dtype, index_dtype):
    rng = np.random.default_rng(seed)
    rows, cols = rng.integers(1, 50, 2)
    first, last = np.sort(rng.integers(0, rows + 1, 2))
    indices = rng.integers(0, cols, rows).astype(index_dtype)
    m, _ = guarded(vectors(rng, None, rows, dtype), np.nan, dtype)
    x, _ = guarded(vectors(rng, None, cols, dtype), np.nan, dtype)
    y, around = guarded(np.full(rows, 7), 7, dtype)
    multiply_single(first, last, indices, m, x, y)
    expected = np.full(rows, 7, dtype)
    expected[first:last] = (m * x[indices])[first:last]
    assert same_bits([y], [expected])
    y[:] = 7
    assert (around == 7).all()


# ---------------------------------------------------------------------------------------------
# One entry in every row
# ---------------------------------------------------------------------------------------------


def moves(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Return the column of the entry of each row."""
    return rng.permutation(size) if kind == "permutation" else rng.integers(0, size, size)


@scanned
@pytest.mark.parametrize("kind", ["permutation", "pooling"])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_product_of_one_entry_in_a_row_is_rounded_once(kind, batch, dtype, index_dtype):
    rng = np.random.default_rng(batch or 0)
    columns, indptr = moves(rng, 23, kind), np.arange(24)
    x = vectors(rng, batch, 23, dtype)
    data = vectors(rng, None, 23, dtype)
    shared = sp.csr_array((data, columns, indptr), shape=(23, 23))
    assert same_bits([product(shared, x)], [data * x[..., columns]])
    if batch is not None:
        data = vectors(rng, batch, 23, dtype)
        own = BatchedCSR(data, columns, indptr, (23, 23))
        assert same_bits([product(own, x)], [data * x[:, columns]])


def test_an_empty_sum_is_added_to_whatever_the_row():
    """So that a product that is -0 gives 0, in rows of one entry and of more, as in SciPy."""
    for lengths in ([1, 1, 1], [1, 2, 3]):
        jacobian = matrix(np.random.default_rng(0), lengths, 3, np.float64)
        jacobian.data[:] = -1
        for batch in (None, 3):
            x = np.zeros(3) if batch is None else np.zeros((batch, 3))
            assert not np.signbit(product(jacobian, x)).any()


@given(seed=SEEDS, batch=st.sampled_from([None, 2, 3, 9]))
def test_as_many_entries_as_rows_are_not_one_in_each(seed, batch):
    rng = np.random.default_rng(seed)
    jacobian = matrix(rng, rng.permutation([0, 0, 0, 1, 1, 2, 3]), 20, np.float64)
    assert jacobian.nnz == jacobian.shape[0]
    x = vectors(rng, batch, 20, np.float64)
    assert same_bits([product(jacobian, x)], [rounded_as_written(jacobian, x)])
