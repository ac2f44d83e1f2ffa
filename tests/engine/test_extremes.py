"""Steps of every size, while gradients stay in range: every schedule is as right as the loop.

The products of such steps leave the range of floating point, come back into it, and have entries
further apart than a number of the dtype can hold. Most likely to go wrong is what comes back
exactly: so gradients here are, more often than not, as far from an earlier one as the ends of the
band in which products are kept.
"""

from __future__ import annotations

import numpy as np
import pytest
from extremes import (
    EXAMPLES,
    check_finite_wherever_back_propagation_is,
    check_steps_of_every_size,
    extreme_chains,
    needs_longer,
    oracle,
)
from hypothesis import given, settings
from oracles import assert_within, every_schedule, indices_of

import sparsescan
from sparsescan import CSRChain


@pytest.mark.parametrize("form", ["dense", "csr"])
def test_entries_of_a_column_that_no_exponent_holds_together(form):
    """1e30 and 1e-30 in one column of a product: float32 has room for 1e51 between them."""
    apart, back = [[1e30, 0], [1e-30, 0]], [[1e-30, 0], [0, 1e30]]
    steps = np.array([np.eye(2), apart, back, np.eye(2)], np.float32)
    grad = np.ones(2, np.float32)
    expected = oracle(grad, steps, None)
    if form == "csr":
        indices, indptr = indices_of(np.tri(2) != 0)
        steps = CSRChain(steps[:, np.tri(2) != 0], indices, indptr, (2, 2))
    for schedule in every_schedule(4):
        result = sparsescan.exclusive_scan(grad, steps, schedule=schedule)
        assert_within(list(result), expected, grad.dtype)


@needs_longer
@settings(max_examples=EXAMPLES)
@given(extreme_chains)
def test_steps_of_every_size(arguments):
    check_steps_of_every_size(arguments)


@settings(max_examples=EXAMPLES)
@given(extreme_chains)
def test_finite_wherever_back_propagation_is(arguments):
    check_finite_wherever_back_propagation_is(arguments)
