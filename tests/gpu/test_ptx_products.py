"""Sparse products as compiled: what their kernel moves, beside what it must move."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the test extra installs numba-cuda on Linux only"
)
pytest.importorskip("numba_cuda")

import ptx.stand_in  # noqa: E402
from oracles import assert_within, sequential  # noqa: E402
from ptx.runner import Traffic  # noqa: E402

import sparsescan  # noqa: E402
from sparsescan import Pattern, Schedule  # noqa: E402
from sparsescan.execution.cuda import shares  # noqa: E402
from sparsescan.symbolic.pattern import multiply_adds, product  # noqa: E402

SECTOR = 32


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, Traffic]]:
    """Return the kernel, blocks and threads of every launch, and what it did."""
    return ptx.stand_in.count(monkeypatch)


def scattered(rng: np.random.Generator, rows: int, cols: int, in_row: int) -> Any:
    """Return a matrix with about as many entries in each row, anywhere."""
    counts = rng.integers(in_row // 2, in_row + in_row // 2 + 1, rows)
    columns = [np.sort(rng.choice(cols, count, replace=False)) for count in counts]
    indptr = np.concatenate([[0], np.cumsum(counts)])
    values = rng.standard_normal(indptr[-1])
    return sp.csr_array((values, np.concatenate(columns), indptr), shape=(rows, cols))


def scan(rng: np.random.Generator, pair: list[Any], dtype: Any) -> None:
    """Check gradients that are made by the product of two steps between identities."""
    cols, rows = pair[0].shape[1], pair[1].shape[0]
    steps = [sp.eye_array(cols), *pair, sp.eye_array(rows)]
    steps = [sp.csr_array(matrix).astype(dtype) for matrix in steps]
    grad = rng.standard_normal(cols).astype(dtype)
    levels = [
        ("product", [[(2, 3, 4)]]),
        ("first", [[(0, 1, 2)]]),
        ("others", [[(0, 2, 3)], [(0, 2, 4)]]),
    ]
    schedule = Schedule.from_levels(4, levels)
    gradients = sparsescan.exclusive_scan(grad, steps, schedule=schedule, device="cuda")
    assert_within(gradients, sequential(grad, steps, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_products_of_pruned_layers_move_little_more_than_they_must(
    traffic: list[tuple[str, int, int, Traffic]], dtype: Any
) -> None:
    """Rows as those of convolutions of which 97% are pruned: 1.3 terms for each entry."""
    rng = np.random.default_rng()
    a, x = scattered(rng, 96, 200, 32), scattered(rng, 200, 4096, 64)
    scan(rng, [x, a], dtype)
    name, blocks, threads, did = traffic[0]
    assert name == "level"
    assert blocks > 8
    # A term reads an entry of X, and where it is added, two bytes; and once each: the entries of A,
    # with two numbers more and a count, and those of C; and again A and X, to see their range.
    patterns = [Pattern(matrix.indptr, matrix.indices, matrix.shape) for matrix in (a, x)]
    terms, entries = multiply_adds(*patterns), product(*patterns).nnz
    size = np.dtype(dtype).itemsize
    needed = terms * (size + 2) + a.nnz * (size + 14) + entries * size + (a.nnz + x.nnz) * size
    print(f"{did.together.sectors * SECTOR / needed:.3f} times the bytes needed")
    assert did.together.sectors <= 1.3 * needed / SECTOR
    # Five before and behind the rows of a block, and one more of the last one to be done.
    assert did.instructions["bar.sync"] == (5 * blocks + 1) * threads
    # The next launch leaves alone what is in range.
    name, blocks, threads, did = traffic[1]
    assert name == "rescale"
    assert blocks > 8
    assert did.barriers == 0
    assert sum(did.instructions.values()) < 100 * blocks * threads


def convolution(rng: np.random.Generator, channels: tuple[int, int], places: int) -> Any:
    """Return a one-dimensional convolution of three weights, some of them pruned."""
    parts = [
        sp.kron(rng.standard_normal(channels) * (rng.random(channels) < 0.3), np.eye(places, k=k))
        for k in (-1, 0, 1)
    ]
    matrix = sp.csr_array(sum(parts))
    matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix


def test_products_of_convolutions_have_a_list_of_slots_for_each_channel(
    traffic: list[tuple[str, int, int, Traffic]],
) -> None:
    """Which a block reads from its cache, as it does rows of the other operand."""
    rng = np.random.default_rng()
    a, x = convolution(rng, (4, 8), 64), convolution(rng, (8, 48), 64)
    scan(rng, [x, a], np.float32)
    name, _, _, did = traffic[0]
    assert name == "level"
    patterns = [Pattern(matrix.indptr, matrix.indices, matrix.shape) for matrix in (a, x)]
    terms, entries = multiply_adds(*patterns), product(*patterns).nnz
    # Values, and for each entry of A where its row of X starts, a row of C each; the other numbers
    # of factors, and the slots of their terms, a few times for each channel.
    needed = 4 * (2 * a.nnz + x.nnz + entries + 6 * a.shape[0])
    others = SECTOR * did.together.once - needed
    print(f"{others / terms:.3f} bytes for each term, beside values and where rows start")
    assert others < (2 * terms + 10 * a.nnz) / 3


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inner", [64, 63])
def test_a_dense_product_loads_an_entry_once_for_several_rows(
    traffic: list[tuple[str, int, int, Traffic]], inner: int, dtype: Any
) -> None:
    """And those of the left operand by 16 bytes, where its rows are as long as that allows."""
    rng = np.random.default_rng()
    a, x = (sp.csr_array(rng.standard_normal(shape)) for shape in ((90, inner), (inner, 72)))
    scan(rng, [x, a], dtype)
    name, blocks, _, did = traffic[0]
    assert name == "level"
    assert blocks > 8
    size = np.dtype(dtype).itemsize
    at_once, kind = 16 // size, f"f{8 * size}"
    scalars = did.instructions[f"ld.global.{kind}"]
    vectors = did.instructions[f"ld.global.v{at_once}.{kind}"]
    # Four multiply-adds for an entry of X, and one for an entry of A; the rows of the last of these
    # are loaded though there are none. Then both operands, for their range.
    terms = inner * 72 * 92
    others = terms // 4 + a.nnz + x.nnz
    if inner == 64:
        assert (vectors, scalars) == (terms // at_once, others)
    else:
        assert (vectors, scalars) == (0, terms + others)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["an operand", "the result"])
def test_many_blocks_bring_a_product_into_range(
    monkeypatch: pytest.MonkeyPatch,
    traffic: list[tuple[str, int, int, Traffic]],
    which: str,
    dtype: Any,
) -> None:
    """Each takes shares of every phase, whether terms are scaled before they are added or not."""
    monkeypatch.setattr(shares, "GRAIN", 512)
    rng = np.random.default_rng()
    a, x = scattered(rng, 24, 50, 10), scattered(rng, 50, 400, 24)
    tiny = 2.0 ** -(50 if dtype == np.float32 else 400)
    if which == "an operand":
        x.data[rng.integers(x.nnz)] *= tiny**2
    else:
        # Entries of both are in the band, those of the product below it.
        for matrix in (a, x):
            matrix.data = tiny * rng.uniform(1, 2, matrix.nnz)
    scan(rng, [x, a], dtype)
    name, blocks, threads, did = traffic[1]
    assert name == "rescale"
    assert blocks > 4
    # Two for each share, two more where the block notes exponents, and one at the end.
    phases, noting = (12, 2) if which == "an operand" else (7, 1)
    assert did.instructions["bar.sync"] == (2 * phases + 2 * noting + 1) * blocks * threads
