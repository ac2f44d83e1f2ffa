"""Sweeps of compiled solves: their accuracy where rows are exchanged, threads, and kept factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import same_bits

import sparsescan
from sparsescan import (
    BatchedCSR,
    ImplicitPattern,
    Pattern,
    SingularMatrixError,
    SolveStep,
)
from sparsescan.execution import workspace
from sparsescan.execution.sweeps import Sweeps
from sparsescan.symbolic.factorisation import factorisation_of
from sparsescan.symbolic.pattern import of_mask

SHAPES = {"tridiagonal": (1, 1), "banded": (2, 3), "dense": (99, 99)}


def pattern_of(method: str, size: int) -> tuple[Pattern, np.ndarray]:
    """Return a pattern whose matrices are factorised so, and where it has entries."""
    below, above = SHAPES[method]
    distance = np.subtract.outer(np.arange(size), np.arange(size))
    entries = (distance <= below) & (-distance <= above)
    pattern = of_mask(entries)
    assert factorisation_of(pattern).method == method
    return pattern, entries


def steps_of(values: np.ndarray, pattern: Pattern) -> list[Any]:
    """Return a step for each array of values ``(batch, nnz)``."""
    return [SolveStep(BatchedCSR.from_pattern(one, pattern)) for one in values]


def dominant(rng: np.random.Generator, lead: tuple[int, ...], entries: np.ndarray) -> np.ndarray:
    """Return values of matrices with a large diagonal."""
    size = len(entries)
    dense = rng.uniform(-1, 1, (*lead, size, size)) + 6 * np.eye(size)
    return np.ascontiguousarray(dense[..., entries])


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[Sweeps]:
    """Return a list of the sweeps that are made from now on."""
    sweeps: list[Sweeps] = []

    def make(*arguments: Any) -> Sweeps:
        sweeps.append(Sweeps(*arguments))
        return sweeps[-1]

    monkeypatch.setattr(workspace, "Sweeps", make)
    return sweeps


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["f4", "f8"]),
    st.sampled_from([*SHAPES]),
    st.sampled_from([1, 2, 3, 11]),
)
def test_solves_are_backward_stable_where_rows_are_exchanged(
    seed: int, dtype: str, method: str, batch: int
) -> None:
    """``|A x - b| <= c n eps ‖A‖ ‖x‖``: pivots are no larger than partial pivoting makes them."""
    rng = np.random.default_rng(seed)
    pattern, entries = pattern_of(method, int(rng.integers(9, 40)))
    size, lead = len(entries), [(), (batch,)][rng.integers(2)]
    dense = (rng.standard_normal((*lead, size, size)) * entries).astype(dtype)
    # Small pivots, and zeros on the diagonal, ask for exchanges.
    dense *= rng.choice([0, 1e-6, 1], (*lead, size, 1)) * np.eye(size) + (1 - np.eye(size))
    dense = dense.astype(dtype)
    x = rng.standard_normal((batch, size)).astype(dtype)
    values = np.ascontiguousarray(dense[..., entries])
    step = SolveStep(BatchedCSR.from_pattern(values if lead else values[None], pattern))
    if not lead:
        step = SolveStep(np.ascontiguousarray(dense)) if method == "dense" else shared(step, values)
    if not np.all(np.linalg.cond(dense.astype("f8")) < 0.01 / np.finfo(dtype).eps):
        return
    y = sparsescan.inclusive_scan(x, [step])[1].astype("f8")
    exact = dense.astype("f8")
    residual = (exact @ y[..., None])[..., 0] - x
    norm = np.abs(exact).sum(-1).max(-1) * np.abs(y).max(-1) + np.abs(x).max(-1)
    assert (np.abs(residual).max(-1) <= 20 * size * np.finfo(dtype).eps * norm).all()


def shared(step: SolveStep, values: np.ndarray) -> Any:
    """Return a step that all samples share."""
    return sparsescan.ImplicitStep([values], step.pattern)


@pytest.mark.parametrize("method", SHAPES)
@pytest.mark.parametrize("between", [False, True])
def test_bits_do_not_depend_on_threads(
    with_threads: Callable[[int], None], method: str, between: bool
) -> None:
    """Nor do they on how many samples run at once; and the first singular matrix is named."""
    rng = np.random.default_rng(1)
    pattern, entries = pattern_of(method, 30)
    values = dominant(rng, (12, 7), entries)
    chain: list[Any] = steps_of(values, pattern)
    if between:
        wide, shared_step = rng.standard_normal((2, 30, 30))
        chain = [each for step in chain for each in (step, wide, shared_step)]
    local = [rng.standard_normal((7, 30)) for _ in range(len(chain) + 1)]
    grad = rng.standard_normal((7, 30))
    results = []
    for count in (1, 2, 3, 9):
        with_threads(count)
        plan = sparsescan.plan(chain)
        results.append(plan.inclusive_scan(grad, chain, local_grads=local))
        assert same_bits(results[0], plan.inclusive_scan(grad, chain, local_grads=local))
    assert all(same_bits(results[0], other) for other in results[1:])
    alone = [
        sparsescan.inclusive_scan(
            grad[b : b + 1],
            [
                SolveStep(BatchedCSR.from_pattern(step.values[0][b : b + 1], pattern))
                if isinstance(step, SolveStep)
                else step
                for step in chain
            ],
            local_grads=[each[b : b + 1] for each in local],
        )
        for b in range(7)
    ]
    if not between:
        # Dense matrices that samples share are multiplied by eight of them at once.
        for k, result in enumerate(results[0]):
            assert same_bits(result, [one[k][0] for one in alone])
    values[3, 5] = values[8, 1] = values[3, 6] = 0
    chain[3 * (2 * between + 1)] = steps_of(values[3:4], pattern)[0]
    chain[8 * (2 * between + 1)] = steps_of(values[8:9], pattern)[0]
    text = rf"^jacobians\[{3 * (2 * between + 1)}\] is singular in sample 5: "
    for count in (1, 2, 9):
        with_threads(count)
        with pytest.raises(SingularMatrixError, match=text):
            sparsescan.inclusive_scan(grad, chain)


@pytest.mark.parametrize("method", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_equal_matrices_keep_their_factors(sweeps: list[Sweeps], method: str, batch: int) -> None:
    """Factors that are spoilt are those of matrices with equal values, and of no others."""
    rng = np.random.default_rng(2)
    pattern, entries = pattern_of(method, 20)
    values = dominant(rng, (40, batch), entries)
    plan = sparsescan.plan([ImplicitPattern([pattern], solved=[0])] * 8)
    grad = rng.standard_normal((batch, 20))

    def is_spoilt(*numbers: int) -> list[bool]:
        """Return after which steps gradients are not those of a fresh plan."""
        steps = steps_of(values[list(numbers)], pattern)
        result = plan.inclusive_scan(grad, steps)
        count = len(sweeps)
        fresh = sparsescan.plan([step.pattern for step in steps]).inclusive_scan(grad, steps)
        del sweeps[count:]
        return [not same_bits(a, b) for a, b in zip(result[1:], fresh[1:], strict=True)]

    assert not any(is_spoilt(0, 1, 2, 3, 0, 1, 2, 3))
    (kept,) = sweeps
    kept._tables.factors[...] = 0.5
    assert is_spoilt(5, 6, 7, 2, 8, 9, 5, 8) == [False] * 3 + [True] * 5
    # Eight others have been used since those that were spoilt.
    assert not any(is_spoilt(*range(20, 28)))
    assert not any(is_spoilt(0, 1, 2, 3, 0, 1, 2, 3))


def test_one_array_is_read_once_in_a_run(sweeps: list[Sweeps]) -> None:
    rng = np.random.default_rng(3)
    pattern, entries = pattern_of("tridiagonal", 10)
    values = dominant(rng, (9, 1), entries)
    a, b = steps_of(values[:2], pattern)
    plan = sparsescan.plan([a.pattern] * 5)
    plan.inclusive_scan(np.ones((1, 10)), [a, b, a, b, a])
    slots = sweeps[0]._tables.slots[0]
    assert np.count_nonzero(slots[:, 0]) == 2
    # A matrix of samples, and one that they share, are not taken for each other.
    three = steps_of(np.repeat(values[:1], 3, axis=1), pattern)[0]
    one = shared(a, np.ascontiguousarray(values[0, 0]))
    result = sparsescan.inclusive_scan(np.ones((3, 10)), [three, one, three, one])
    alone = sparsescan.inclusive_scan(np.ones((1, 10)), [a] * 4)
    for x, y in zip(result, alone, strict=True):
        assert same_bits(x, np.repeat(y, 3, axis=0))
