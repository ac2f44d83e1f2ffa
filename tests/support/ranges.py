"""Chains whose products leave the range of floating point, and what must hold for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from oracles import (
    Chain,
    apply,
    assert_within,
    chains,
    every_schedule,
    indices_of,
    mask,
    sequential,
    steps_of,
)

import sparsescan
from sparsescan import BatchedCSR, CSRChain

KINDS = ("dense", "csr", "diagonal")
F4 = np.dtype(np.float32)


def positive_steps(kind: str, radii: np.ndarray, size: int, dtype=F4, seed: int = 0) -> CSRChain:
    """Return steps without negative entries whose rows sum to `radii`: their spectral radii.

    A diagonal has its radius in one place and less in the others.
    """
    rng = np.random.default_rng(seed)
    where = np.ones((size, size), bool) if kind == "dense" else np.eye(size, dtype=bool)
    if kind == "csr":
        where |= mask(rng, "sparse", size, size)
    indices, indptr = indices_of(where)
    data = rng.uniform(0.5, 1.5, (len(radii), len(indices)))
    sums = np.add.reduceat(data, indptr[:-1], axis=1)
    if kind != "diagonal":
        data *= np.repeat(radii[:, None] / sums, np.diff(indptr), axis=1)
    else:
        data *= (radii / data.max(1))[:, None]
    return CSRChain(data.astype(dtype), indices, indptr, (size, size))


def as_dense(chain: CSRChain) -> np.ndarray:
    """Return the chain as a dense array, with its zeros in place."""
    dense = np.zeros((*chain.data.shape[:-1], *chain.shape), chain.dtype)
    rows = np.repeat(np.arange(chain.shape[0]), np.diff(chain.indptr))
    dense[..., rows, chain.indices] = chain.data
    return dense


def linear_length(grad, jacobians) -> int:
    """How many gradients the linear scan gives before one is not finite."""
    return finite_count(sparsescan.exclusive_scan(grad, jacobians, schedule="linear"))


def finite_count(gradients: np.ndarray) -> int:
    """Count the gradients before the first that is not finite."""
    finite = np.isfinite(gradients).reshape(len(gradients), -1).all(axis=1)
    return len(finite) if finite.all() else int(finite.argmin())


def waves(n: int, period: int, decades: float) -> np.ndarray:
    """Factors that take a gradient up by some powers of ten, down again, and so on."""
    return 10.0 ** (decades / period * np.where(np.arange(n) // period % 2 == 0, 1, -1))


def two_blocks(n: int, up: float, down: float, size: int = 3) -> CSRChain:
    """Block diagonal steps: the first block grows by `up` a step, the second by `down`."""
    rng = np.random.default_rng(2)
    where = np.kron(np.eye(2), np.ones((size, size))) > 0
    indices, indptr = indices_of(where)
    data = rng.uniform(0.5, 1.5, (n, 2 * size, size))
    data *= np.repeat([up, down], size)[:, None] / data.sum(2, keepdims=True)
    return CSRChain(data.reshape(n, -1).astype(F4), indices, indptr, (2 * size, 2 * size))


def shuffled(chain: CSRChain) -> CSRChain:
    """Return the steps with rows and columns permuted: blocks that no pattern shows at once."""
    order = np.random.default_rng(3).permutation(chain.shape[0])
    where = np.zeros(chain.shape, bool)
    rows = np.repeat(np.arange(chain.shape[0]), np.diff(chain.indptr))
    where[rows, chain.indices] = True
    indices, indptr = indices_of(where[np.ix_(order, order)])
    dense = as_dense(chain)[:, order][:, :, order]
    rows = np.repeat(np.arange(chain.shape[0]), np.diff(indptr))
    return CSRChain(dense[:, rows, indices], indices, indptr, chain.shape)


FORMS = {
    "csr": lambda chain: chain,
    "shuffled csr": shuffled,
    "dense": as_dense,
    "list of csr": steps_of,
    "batched csr": lambda chain: [
        BatchedCSR(np.stack([data, data]), chain.indices, chain.indptr, chain.shape)
        for data in chain.data
    ],
}


def reference(chain):
    """Return the linear scan in the chain's own dtype, by SciPy and NumPy."""
    x = np.asarray(chain.grad).astype(chain.dtype)
    steps = list(chain.jacobians)[: len(chain.jacobians) - (not chain.inclusive)]
    local = chain.local_grads or [None] * (len(steps) + 1)
    results = []
    with np.errstate(all="ignore"):
        for k in range(len(steps) + 1):
            x = apply(steps[k - 1], x) if k else x
            x = x if local[k] is None else x + local[k].astype(chain.dtype)
            results.append(x)
    return results


def check_an_exploding_block_leaves_the_decaying_one_right(form, up, down):
    """Check blocks whose products are 1e600 apart, finite with a gradient that is 1e30 apart."""
    n = {10: 60, 2: 200, 1: 140, 1e6: 11}[max(up, down)]
    jacobians = FORMS[form](two_blocks(n, up, down))
    grad = np.repeat([1e-30 if up > 1 else 1e30, 1e30 if up >= 1 else 1e-30], 3).astype(F4)
    if (up, down) == (0.1, 10):
        grad = np.repeat([1e30, 1e-30], 3).astype(F4)
    if form == "shuffled csr":
        grad = grad[np.random.default_rng(3).permutation(6)]
    if form == "batched csr":
        grad = np.stack([grad, grad])
    expected = sequential(grad, jacobians, dtype=F4)
    for schedule in every_schedule(n):
        result = sparsescan.exclusive_scan(grad, jacobians, schedule=schedule)
        assert_within(result, expected, F4)


@st.composite
def of_alternating_scale(draw: Any) -> Chain:
    """Any list of steps, times 2^60 and 2^-60 by turns: pairs come back into range."""
    chain = draw(chains(max_n=10, min_size=1).filter(lambda c: isinstance(c.jacobians, list)))
    power = draw(st.sampled_from([-60, 60]))
    for k, step in enumerate(chain.jacobians):
        array = step if isinstance(step, np.ndarray) else step.data
        array *= array.dtype.type(2.0 ** (power * (-1) ** k))
    return chain


def check_steps_of_alternating_scale(chain: Chain) -> None:
    for schedule in every_schedule(len(chain.jacobians)):
        assert_within(chain.scan(schedule=schedule), chain.oracle(), chain.dtype)


def check_subnormal_values(kind, *, count):
    """Subnormal values of Jacobians `count`, or are zeros."""
    tiny = float(np.finfo(F4).smallest_subnormal)
    chain = positive_steps(kind, np.full(12, 64 * tiny), 4)
    mixed = chain.data.copy()
    mixed[::2] = 1 / mixed[::2].clip(1e-38)
    for data in (chain.data, mixed, mixed[::-1]):
        steps = CSRChain(data, chain.indices, chain.indptr, chain.shape)
        grad = np.full(4, 1.0, F4)
        n = linear_length(grad, steps)
        steps = CSRChain(data[:n], chain.indices, chain.indptr, chain.shape)
        seen = data[:n] if count else np.where(np.abs(data[:n]) < np.finfo(F4).tiny, 0, data[:n])
        seen = CSRChain(seen, chain.indices, chain.indptr, chain.shape)
        expected = sequential(grad, seen, dtype=F4)
        for schedule in every_schedule(n):
            result = sparsescan.exclusive_scan(grad, steps, schedule=schedule)
            assert np.isfinite(result).all()
            assert_within(result, expected, F4)


def check_finite_wherever_the_linear_scan_is(data):
    """Entries of any size at all: what the linear scan keeps finite stays finite."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    n, size = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 5))
    where = mask(rng, data.draw(st.sampled_from(["sparse", "full", "diagonal"])), size, size)
    indices, indptr = indices_of(where)
    spread = data.draw(st.sampled_from([5, 20, 38]))
    values = rng.standard_normal((n, len(indices))) * 10.0 ** rng.integers(
        -spread, spread, (n, len(indices)), endpoint=True
    )
    chain = CSRChain(np.clip(values, -1e38, 1e38).astype(F4), indices, indptr, (size, size))
    grad = (rng.standard_normal(size) * 10.0 ** rng.integers(-30, 30, size)).astype(F4)
    linear = sparsescan.inclusive_scan(grad, chain, schedule="linear")
    for schedule in every_schedule(n):
        result = sparsescan.inclusive_scan(grad, chain, schedule=schedule)
        assert np.isfinite(result)[np.isfinite(linear)].all()


@st.composite
def with_one_bad_value(draw: Any, bad: float) -> Chain:
    """Return a list of steps with this value in a Jacobian, the gradient, or a local gradient."""
    chain = draw(
        chains(max_n=9, min_size=1).filter(
            lambda c: isinstance(c.jacobians, list) and c.jacobians and c.batch != 0
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    places = [chain.grad, *(a for a in chain.local_grads or [] if a is not None)]
    places += [s.data if not isinstance(s, np.ndarray) else s for s in chain.jacobians]
    places = [array for array in places if array.size]
    place = places[draw(st.integers(0, len(places) - 1))]
    place.flat[rng.integers(place.size)] = bad
    return chain


def assert_reaches_as_in_the_linear_scan(result: Any, chain: Chain) -> None:
    """Compare with the linear scan: what is not finite is in its places, all else about equal."""
    for actual, exact in zip(result, reference(chain), strict=True):
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(exact))
        np.testing.assert_array_equal(actual[np.isinf(exact)], exact[np.isinf(exact)])
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(np.isfinite(actual), finite)
        np.testing.assert_allclose(actual[finite], exact[finite], rtol=1e-2, atol=1e-2)


def check_nan_and_inf_reach_what_they_reach_in_the_linear_scan(bad, data):
    chain = data.draw(with_one_bad_value(bad))
    for schedule in every_schedule(len(chain.jacobians)):
        assert_reaches_as_in_the_linear_scan(chain.scan(schedule=schedule), chain)


def check_what_is_not_finite_stays_where_no_entry_leads_on(form, bad):
    """Behind an empty row nothing is reached; in a dense Jacobian a zero is an entry."""
    n, size = 9, 4
    if form == "diagonal":
        chain = CSRChain(np.ones((n, size)), np.arange(size), np.arange(size + 1), (size, size))
        chain.data[2, 1] = bad
    else:
        where = np.tri(size, dtype=bool)
        where[3] = False  # row 3 is structurally empty: it is 0 whatever comes
        indices, indptr = indices_of(where)
        chain = CSRChain(np.ones((n, len(indices))), indices, indptr, (size, size))
        chain.data[2, 1] = bad  # entry (1, 0)
    jacobians = as_dense(chain) if form == "dense" else chain
    reached = {
        "diagonal": [[1]] * 6,
        "csr": [[1]] + [[1, 2]] * 5,
        "dense": [[1]] + [[0, 1, 2, 3]] * 5,
    }[form]
    for schedule in every_schedule(n):
        result = sparsescan.exclusive_scan(np.ones(size), jacobians, schedule=schedule)
        assert np.isfinite(result[:3]).all()
        for k in range(6):
            assert np.flatnonzero(~np.isfinite(result[3 + k])).tolist() == reached[k], k
