"""Chains with steps of every size whose gradients stay in range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import Gradients, assert_within, every_schedule, indices_of, sequential
from ranges import as_dense, finite_count
from sampling import times

import sparsescan
from sparsescan import CSRChain
from sparsescan.kernels.cpu.tables import BAND

# Exponents of the smallest and the largest entry of a step, or of a gradient.
LIMITS = {"f4": (-120, 124), "f8": (-1000, 1020)}
Arguments = tuple[np.ndarray, Any, "np.ndarray | None"]


def extreme_chain(rng: np.random.Generator) -> Arguments:
    """Return a gradient, steps that take it from one size to the next, and maybe local gradients.

    Where gradients have entries of about ``2^g_k`` before a step and of ``2^h_i`` after it, entries
    of the step are at most ``2^(h_i - g_k)``, those on the diagonal about that.
    """
    dtype = str(rng.choice(["f4", "f8"]))
    size, n = int(rng.choice([1, 1, 2, 3])), int(rng.integers(3, 14))
    where = [np.ones((size, size)), np.tri(size), np.eye(size)][rng.integers(3)] != 0
    form = str(rng.choice(["dense", "csr", "batched csr"]))
    reach = rng.choice([1.0, 1.0, 0.5])
    low, high = (int(reach * limit) for limit in LIMITS[dtype])
    *ends, target = BAND[np.dtype(dtype)][3:6]
    back = int(rng.integers(2, 7))
    sizes = [rng.integers(low, high, size, endpoint=True)]
    for _ in range(n):
        new = rng.integers(low, high, size, endpoint=True)
        if rng.random() < 0.7:
            new = sizes[-min(back, len(sizes))] + rng.choice([0, target, target, *ends], size)
            new += rng.integers(-1, 1, size, endpoint=True)
        sizes.append(np.where(rng.random(size) < 0.8, new, sizes[-1]).clip(low, high))

    steps = np.zeros((n, size, size))
    for step, before, after in zip(steps, sizes[:-1], sizes[1:], strict=True):
        less = rng.integers(0, (high - low) // 2, (size, size)) * (rng.random((size, size)) < 0.7)
        np.fill_diagonal(less, 0)
        power = (after[:, None] - before - less).clip(*LIMITS[dtype])
        numbers = rng.uniform(0.7, 1.4, (size, size)) * rng.choice([-1, 1, 1], (size, size))
        kept = (rng.random((size, size)) < 0.8) | np.eye(size, dtype=bool)
        step[where & kept] = np.ldexp(numbers, power)[where & kept]
    steps = steps.astype(dtype)
    grad = np.ldexp(rng.uniform(0.5, 1, size), sizes[0]).astype(dtype)
    local = None
    if rng.random() < 0.3:
        numbers = rng.uniform(-0.5, 0.5, (n, size)) * (rng.random((n, size)) < 0.5)
        local = np.ldexp(numbers, sizes[:-1]).astype(dtype)
    if form == "dense":
        return grad, steps, local
    indices, indptr = indices_of(where)
    data = steps[:, where]
    if form == "batched csr":
        data = np.stack([data, data[::-1]], axis=1)
        grad = np.stack([grad, grad])
        local = local if local is None else np.stack([local, local], axis=1)
    return grad, CSRChain(data, indices, indptr, (size, size)), local


extreme_chains = st.integers(0, 2**32 - 1).map(
    lambda seed: extreme_chain(np.random.default_rng(seed))
)


def oracle(grad: np.ndarray, steps: Any, local: Any) -> Gradients:
    """Return the loop in the longest floating-point numbers there are, with bounds for `grad`'s."""
    if isinstance(steps, np.ndarray):
        steps = list(steps)
    return sequential(grad, steps, local, dtype=grad.dtype, precision=np.longdouble)


# Five times as many examples as other tests have; ten thousand with --explore.
EXAMPLES = times(5)
# Whether there are floating-point numbers of a larger range than float64's.
LONGER = np.finfo(np.longdouble).maxexp > np.finfo(np.float64).maxexp
needs_longer = pytest.mark.skipif(not LONGER, reason="no numbers of a larger range than float64")


def looped(grad: np.ndarray, steps: Any, local: Any) -> np.ndarray:
    """Back-propagation in the dtype of its input, as a caller would write it."""
    dense = as_dense(steps) if isinstance(steps, CSRChain) else steps
    gradients = [grad if local is None else grad + local[0]]
    for k, step in enumerate(dense[:-1], 1):
        x = (step * gradients[-1][..., None, :]).sum(-1)
        gradients.append(x if local is None else x + local[k])
    return np.array(gradients)


def check_steps_of_every_size(arguments):
    grad, steps, local = arguments
    expected = oracle(*arguments)
    options: dict[str, Any] = {"local_grads": local}
    count = finite_count(sparsescan.exclusive_scan(grad, steps, schedule="linear", **options))
    expected = Gradients(expected.exact[:count], expected.bounds[:count])
    for schedule in every_schedule(len(steps), chunks=(2, 3, 5)):
        result = sparsescan.exclusive_scan(grad, steps, schedule=schedule, **options)
        assert_within(list(result[:count]), expected, grad.dtype)


def check_finite_wherever_back_propagation_is(arguments):
    grad, steps, local = arguments
    with np.errstate(over="ignore", invalid="ignore"):
        loop = looped(grad, steps, local)
    count = finite_count(loop)
    for schedule in ["auto", *every_schedule(len(steps), chunks=(2, 3, 5))]:
        result = sparsescan.exclusive_scan(grad, steps, local_grads=local, schedule=schedule)
        assert finite_count(result) >= count
