"""A plan says what it is, and insists on the input that it is for."""

import numpy as np
import pytest
import scipy.sparse as sp

import sparsescan
from sparsescan import Pattern, Schedule
from sparsescan.plan.describe import levels_of
from sparsescan.symbolic.program import Program


def banded(rng: np.random.Generator, n: int, size: int) -> list[sp.csr_array]:
    """`n` tridiagonal Jacobians."""
    return [
        sp.diags_array(
            [rng.standard_normal(size - abs(k)) for k in (-1, 0, 1)], offsets=(-1, 0, 1)
        ).tocsr()
        for _ in range(n)
    ]


def pattern_of(matrix: sp.csr_array) -> Pattern:
    return Pattern(matrix.indptr, matrix.indices, matrix.shape)


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_costs_are_those_of_the_products_that_scipy_would_make(chunks: int) -> None:
    n, size = 12, 30
    jacobians = banded(np.random.default_rng(chunks), n, size)
    structures = [abs(matrix).sign() for matrix in jacobians]
    schedule = Schedule.chunked(n, chunks)
    program = Program([pattern_of(matrix) for matrix in jacobians], schedule)
    about = levels_of(program, 8)
    nodes = {(k + 1, k + 2): structure for k, structure in enumerate(structures)}
    for level, said in zip(schedule.levels, about, strict=True):
        macs, nnz_in, nnz_out, products = [], 0, 0, 0
        for start, mid, stop in level.ops.tolist():
            right = nodes[mid, stop]
            if start == 0:
                macs.append(right.nnz)
                continue
            left = nodes[start, mid]
            result = right @ left
            macs.append(int(result.sum()))  # of ones: how many terms each entry sums
            nodes[start, stop] = result.sign()
            nnz_in, nnz_out = nnz_in + left.nnz + right.nnz, nnz_out + result.nnz
            products += 1
        runs = [sum(macs[a:b]) for a, b in zip(level.runs[:-1], level.runs[1:], strict=True)]
        expected = {"name": level.name, "operations": len(macs), "products": products}
        expected |= {"multiply_adds": sum(macs), "nnz_in": nnz_in, "nnz_out": nnz_out}
        expected |= {"depth": level.depth, "critical": max(runs)}
        assert said == expected | {"bytes": said["bytes"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "fast"}, "schedule is 'fast'; expected 'auto', 'linear', 'blelloch'"),
        ({"schedule": Schedule.linear(3)}, r"Schedule.linear\(3\); expected one for 2 Jacobians"),
        ({"batch": 0}, "batch is 0; expected at least 1"),
        ({"batch": 1.5}, "batch is 1.5; expected an integer"),
        ({"dtype": "f2"}, "dtype is float16; expected float32 or float64"),
        ({"dtype": "nothing"}, "dtype is 'nothing'; expected float32 or float64"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"memory_limit": -1}, "memory_limit is -1; expected at least 0"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(sparsescan.SparseScanError, match=message):
        sparsescan.plan([Pattern.diagonal(2)] * 2, **options)
