"""Products of Jacobians leave the range of floating point where no gradient does; scans do not.

Where entries are not negative nothing cancels, so gradients have a relative error of ``m·eps``
however long the chain. Elsewhere steps are orthogonal but for a factor, and the error is relative
to the norm.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    Gradients,
    apply,
    assert_within,
    every_schedule,
    indices_of,
    sequential,
)
from ranges import (
    F4,
    FORMS,
    KINDS,
    as_dense,
    check_an_exploding_block_leaves_the_decaying_one_right,
    check_finite_wherever_the_linear_scan_is,
    check_nan_and_inf_reach_what_they_reach_in_the_linear_scan,
    check_steps_of_alternating_scale,
    check_subnormal_values,
    check_what_is_not_finite_stays_where_no_entry_leads_on,
    linear_length,
    of_alternating_scale,
    positive_steps,
    two_blocks,
    waves,
)
from sampling import slow

import sparsescan
from sparsescan import CSRChain, Pattern, ScanPlan, Schedule

LONG = 10_000


def long_schedules(n: int = LONG) -> list[Schedule]:
    return [
        Schedule.linear(n),
        Schedule.blelloch(n),
        Schedule.truncated(n, 5),
        Schedule.chunked(n, 2),
        Schedule.chunked(n, 100),
    ]


SCHEDULES = pytest.mark.parametrize("schedule", long_schedules(), ids=repr)


# ---------------------------------------------------------------------------------------------
# Long chains
# ---------------------------------------------------------------------------------------------


@cache
def long_plans(pattern: Pattern, n: int) -> list[ScanPlan]:
    """One of each schedule, for steps of equal patterns."""
    return [sparsescan.plan([pattern] * n, schedule=each, dtype=F4) for each in long_schedules(n)]


@pytest.mark.parametrize("kind", ["dense", *slow("csr", "diagonal")])
@pytest.mark.parametrize("radius", [1.01, *slow(0.1, 0.99, 10.0)])
def test_any_spectral_radius(kind, radius):
    """10,000 steps, or as many as the linear scan stays finite for: finite, and accurate."""
    chain = positive_steps(kind, np.full(LONG, radius), 6)
    grad = np.full(6, 1e-30 if radius > 1 else 1e30, F4)
    n = linear_length(grad, chain)
    assert n == LONG if radius <= 1 else n > 60
    chain = CSRChain(chain.data[:n], chain.indices, chain.indptr, chain.shape)
    expected = sequential(grad, as_dense(chain), dtype=F4)
    for plan in long_plans(chain.pattern, n):
        result = plan.exclusive_scan(grad, chain)
        assert np.isfinite(result).all()
        assert_within(result, expected, F4)


@cache
def up_and_down(kind: str, dtype: str, decades: float) -> tuple[Any, CSRChain, Gradients]:
    """Return a gradient, a chain that takes it up and down, and the oracle's gradients."""
    radii = waves(LONG, 61, decades)
    chain = positive_steps(kind, radii, 5, dtype)
    if kind == "diagonal":
        chain.data[:] = radii[:, None]
    grad = np.full(5, 10.0 ** (-decades / 2), dtype)
    return grad, chain, sequential(grad, as_dense(chain), dtype=dtype)


@SCHEDULES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "decades"), [("f4", 60), *slow(("f8", 500))])
def test_segments_beyond_the_range_while_gradients_stay_inside(kind, schedule, dtype, decades):
    """Products of 61 steps reach 1e±60 (1e±500), gradients only 1e±30 (1e±250)."""
    grad, chain, expected = up_and_down(kind, dtype, decades)
    largest = max(float(g.max()) for g in expected.exact)
    assert abs(np.log10(largest) - decades / 2) < 1
    result = sparsescan.exclusive_scan(grad, chain, schedule=schedule)
    assert np.isfinite(result).all()
    assert_within(result, expected, np.dtype(dtype))


@SCHEDULES
def test_signs_and_cancellation_over_a_long_chain(schedule):
    """Orthogonal steps times a wave of factors: the error is relative to the norm."""
    rng = np.random.default_rng(1)
    turns, _ = np.linalg.qr(rng.standard_normal((LONG, 6, 6)))
    steps = (turns * waves(LONG, 37, 50)[:, None, None]).astype(F4)
    grad = np.full(6, 1e-25, F4)
    result = sparsescan.exclusive_scan(grad, steps, schedule=schedule)
    x = grad.astype(np.longdouble)
    for k in range(LONG):
        if k % 500 == 0 or k == LONG - 1:
            error = np.linalg.norm((result[k] - x).astype(float))
            assert error <= 4 * (k + 1) ** 0.5 * 8 * F4.type(1e-7) * np.linalg.norm(x.astype(float))
        x = apply(steps[k], x)


# ---------------------------------------------------------------------------------------------
# Uncoupled blocks
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True], ids=["csr", "dense with zeros"])
@pytest.mark.parametrize("zero", [0.0, *slow(1e-30)])
def test_a_block_that_explodes_out_of_sight(dense, zero):
    """The exploding block gets no gradient, or next to none: only the products see it."""
    n = 2000
    chain = two_blocks(n, 1.3 if zero == 0 else 1.03, 0.999)
    jacobians = as_dense(chain) if dense else chain
    grad = np.repeat([zero, 1.0], 3).astype(F4)
    expected = sequential(grad, jacobians, dtype=F4)
    assert all(g[3:].min() > 0 for g in expected.exact)
    for schedule in every_schedule(n, chunks=(3, 40)):
        result = sparsescan.exclusive_scan(grad, jacobians, schedule=schedule)
        assert_within(result, expected, F4)


@pytest.mark.parametrize("form", ["diagonal", *slow("csr"), "dense"])
def test_rows_that_grow_apart(form):
    """Rows of a diagonal chain, each growing at a pace of its own: no shared exponent fits."""
    n, factors = 3000, np.array([1.02, 1 / 1.02, 1.0, 1.2, 0.1, 1.002, 0.998])
    size = len(factors)
    grad = np.array([1e-25, 1e25, 1.0, 0.0, 1.0, 1e-3, 1e3], F4)
    data = np.repeat(factors[None].astype(F4), n, axis=0)
    jacobians = CSRChain(data, np.arange(size), np.arange(size + 1), (size, size))
    if form == "csr":  # one entry more, that is zero, makes the pattern general
        where = np.eye(size, dtype=bool)
        where[3, 4] = True
        indices, indptr = indices_of(where)
        data = np.insert(data, 4, 0, axis=1)
        jacobians = CSRChain(data, indices, indptr, (size, size))
    if form == "dense":
        jacobians = as_dense(jacobians)
    expected = sequential(grad, jacobians, dtype=F4)
    for schedule in every_schedule(n, chunks=(3, 40)):
        result = sparsescan.exclusive_scan(grad, jacobians, schedule=schedule)
        assert_within(result, expected, F4)


# ---------------------------------------------------------------------------------------------
# Huge and tiny numbers
# ---------------------------------------------------------------------------------------------


def test_exponents_add_up_over_any_length():
    """10,000 doublings and halvings: exponents of ±10,000, exactly undone."""
    n = LONG
    powers = np.where(np.arange(n) < n // 2, 1, -1)
    data = np.exp2(np.stack([powers, -powers, 0 * powers], axis=1)).astype(F4)
    chain = CSRChain(data, np.arange(3), np.arange(4), (3, 3))
    grad = np.array([0, 0, 1.5], F4)
    for jacobians in (chain, as_dense(chain)):
        for schedule in long_schedules():
            result = sparsescan.inclusive_scan(grad, jacobians, schedule=schedule)
            assert (result == grad).all()


# ---------------------------------------------------------------------------------------------
# NaN and infinity
# ---------------------------------------------------------------------------------------------


def test_overflow_of_the_linear_scan_is_never_a_wrong_number():
    """Where the linear scan overflows a scan gives what is not finite, or the true gradient."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        factors = 10.0 ** rng.integers(-20, 21, (24, 1))
        chain = positive_steps("csr", np.ones(24), 4)
        chain = CSRChain(
            (chain.data * factors).astype(F4), chain.indices, chain.indptr, chain.shape
        )
        grad = np.ones(4, F4)
        expected = sequential(grad, chain, dtype=F4)
        linear = sparsescan.exclusive_scan(grad, chain, schedule="linear")
        for schedule in every_schedule(24):
            result = sparsescan.exclusive_scan(grad, chain, schedule=schedule)
            assert np.isfinite(result)[np.isfinite(linear)].all()
            for k in range(24):
                off = np.abs(result[k] - expected.exact[k]) > expected.bounds[k]
                assert not (np.isfinite(result[k]) & off).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("up", "down"), [(10, 0.1), (0.1, 10), (2, 1), (1, 0.5), (1e6, 1e-6)])
def test_an_exploding_block_leaves_the_decaying_one_right(form, up, down):
    check_an_exploding_block_leaves_the_decaying_one_right(form, up, down)


@given(of_alternating_scale())
def test_steps_of_alternating_scale(chain):
    check_steps_of_alternating_scale(chain)


@pytest.mark.parametrize("kind", KINDS)
def test_subnormal_values(kind):
    check_subnormal_values(kind, count=False)


@given(st.data())
def test_finite_wherever_the_linear_scan_is(data):
    check_finite_wherever_the_linear_scan_is(data)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@given(data=st.data())
def test_nan_and_inf_reach_what_they_reach_in_the_linear_scan(bad, data):
    check_nan_and_inf_reach_what_they_reach_in_the_linear_scan(bad, data)


@pytest.mark.parametrize("form", ["csr", "diagonal", "dense"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_where_no_entry_leads_on(form, bad):
    check_what_is_not_finite_stays_where_no_entry_leads_on(form, bad)
