"""The form of every product: the choice is the cheapest one, and no choice changes a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    Chain,
    assert_within,
    chains,
    patterns_of,
    random_machine,
    random_patterns,
    same_bits,
)
from ranges import assert_reaches_as_in_the_linear_scan, of_alternating_scale, with_one_bad_value
from trees import any_schedule, products_of

from sparsescan import BatchedCSR, Pattern, ScanPlan, Schedule
from sparsescan.plan.choice import PlanChoice
from sparsescan.plan.costs.cpu import CpuModel
from sparsescan.plan.costs.operations import Operations
from sparsescan.plan.forms import choose_forms
from sparsescan.symbolic.program import Program

SEEDS = st.integers(0, 2**32 - 1)


# ---------------------------------------------------------------------------------------------
# The choice
# ---------------------------------------------------------------------------------------------


def sparse_products(program: Program) -> list[tuple[int, int]]:
    """Return the products that could also be stored densely."""
    none = np.empty((0, 3), np.int64)
    ops = np.concatenate([none, *[level.ops for level in program.schedule.levels]])
    intervals = ops[ops[:, 0] > 0, ::2].tolist()
    kinds = [pattern.kind for pattern in program.patterns[program.n :]]
    return [(a, b) for (a, b), kind in zip(intervals, kinds, strict=True) if kind == "general"]


def total(program: Program, model: CpuModel) -> float:
    """Time of all operations of an exclusive scan."""
    batched = np.full(program.n, model.batch > 1)
    operations = Operations.of(program, model.dtype.itemsize, model.batch, batched)
    return float(model.share(operations)[:-1].sum())


def all_totals(
    patterns: list[Pattern], schedule: Schedule, model: CpuModel
) -> dict[frozenset[tuple[int, int]], float]:
    """Return the time with every set of products stored densely."""
    sparse = sparse_products(Program(patterns, schedule))
    subsets = (itertools.combinations(sparse, count) for count in range(len(sparse) + 1))
    return {
        frozenset(dense): total(Program(patterns, schedule, dense=dense), model)
        for dense in itertools.chain.from_iterable(subsets)
    }


def draw_case(seed: int) -> tuple[list[Pattern], Schedule, CpuModel]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 9))
    # Products of these are seldom full.
    structures = "sparse", "empty rows", "empty rows", "banded", "diagonal"
    patterns = random_patterns(rng, n, 1, 30, structures)
    batch, threads = int(rng.choice([1, 3])), int(rng.choice([1, 4]))
    dtype = np.dtype(rng.choice(["f4", "f8"]))
    return patterns, any_schedule(rng, n), CpuModel(random_machine(rng), dtype, batch, threads)


@given(SEEDS)
def test_no_other_forms_take_less(seed: int) -> None:
    patterns, schedule, model = draw_case(seed)
    chosen = choose_forms(Program(patterns, schedule), model)
    totals = all_totals(patterns, schedule, model)
    assert total(Program(patterns, schedule, dense=chosen), model) <= min(totals.values()) * (
        1 + 1e-12
    )


# ---------------------------------------------------------------------------------------------
# Scans
# ---------------------------------------------------------------------------------------------


def random_plan(rng: np.random.Generator, patterns: Sequence[Pattern]) -> ScanPlan:
    """By any schedule, with any of its products stored densely."""
    n = len(patterns)
    schedule = any_schedule(rng, n)
    share = rng.choice([0.3, 0.7, 1])
    dense = frozenset(product for product in products_of(schedule) if rng.random() < share)
    return ScanPlan(patterns, PlanChoice(schedule, dense))


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: Any, with_threads: Any) -> int:
    """So many, with work cut into the smallest pieces."""
    with_threads(request.param)
    return int(request.param)


@given(data=st.data())
def test_a_scan_with_dense_products_is_back_propagation(threads: int, data: Any) -> None:
    chain = data.draw(chains())
    plan = random_plan(np.random.default_rng(data.draw(SEEDS)), patterns_of(chain.jacobians))
    result = chain.scan(plan)
    assert_within(result, chain.oracle(), chain.dtype)
    assert same_bits(chain.scan(plan), result)


@given(data=st.data())
def test_short_chains_of_larger_steps(threads: int, data: Any) -> None:
    chain = data.draw(chains(max_n=5, max_size=40, min_size=8))
    plan = random_plan(np.random.default_rng(data.draw(SEEDS)), patterns_of(chain.jacobians))
    assert_within(chain.scan(plan), chain.oracle(), chain.dtype)


@given(chain=of_alternating_scale(), seed=SEEDS)
def test_steps_of_alternating_scale(threads: int, chain: Chain, seed: int) -> None:
    plan = random_plan(np.random.default_rng(seed), patterns_of(chain.jacobians))
    assert_within(chain.scan(plan), chain.oracle(), chain.dtype)


@given(seed=SEEDS, dtype=st.sampled_from(["f4", "f8"]), inclusive=st.booleans())
def test_products_far_out_of_range(threads: int, seed: int, dtype: str, inclusive: bool) -> None:
    """Products of 1e±50 in float32 and 1e±400 in float64, where no gradient leaves its range."""
    rng = np.random.default_rng(seed)
    n, batch = int(rng.integers(4, 20)), int(rng.integers(1, 4))
    patterns = random_patterns(rng, n, 1, 12, ("sparse", "empty rows", "banded", "diagonal"))
    decades = int(rng.choice([-1, 1])) * (25 if dtype == "f4" else 200)
    steps, local, power = [], [], -decades
    for k, pattern in enumerate(patterns):
        size = batch, pattern.shape[1]
        local.append(rng.random(size) * 10.0**power if rng.random() < 0.3 else None)
        # Up, up, down, down, and so on.
        step = decades * (1 if k // 2 % 2 == 0 else -1)
        lengths = np.diff(pattern.indptr)
        data = rng.uniform(0.5, 1.5, (batch, pattern.nnz)) / np.repeat(lengths, lengths)
        steps.append(BatchedCSR.from_pattern((data * 10.0**step).astype(dtype), pattern))
        power += step
    local += [None] * inclusive
    local = [array if array is None else array.astype(dtype) for array in local]
    grad = (rng.uniform(0.5, 1, (batch, patterns[0].shape[1])) * 10.0**-decades).astype(dtype)
    chain = Chain(grad, steps, local, np.dtype(dtype), inclusive, batch)
    expected = chain.oracle()
    assert all(np.isfinite(exact.astype(dtype)).all() for exact in expected.exact)
    for _ in range(3):
        plan = random_plan(rng, patterns)
        assert_within(chain.scan(plan), expected, np.dtype(dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@given(data=st.data())
def test_nan_and_inf_reach_what_they_reach_in_the_linear_scan(bad: float, data: Any) -> None:
    """Not what the zeros of a product that is stored densely would let them reach."""
    chain = data.draw(with_one_bad_value(bad))
    rng = np.random.default_rng(data.draw(SEEDS))
    for _ in range(3):
        result = chain.scan(random_plan(rng, patterns_of(chain.jacobians)))
        assert_reaches_as_in_the_linear_scan(result, chain)


def test_any_number_of_threads_gives_the_same_bits(with_threads: Any) -> None:
    seen: list[set[bytes]] = [set() for _ in range(25)]
    for count in (1, 2, 3, 4, 1):
        with_threads(count)
        for seed, bits in enumerate(seen):
            rng = np.random.default_rng(seed)
            batch = int(rng.integers(1, 5))
            patterns = random_patterns(rng, int(rng.integers(4, 12)), 6, 25)
            values = [
                rng.standard_normal((batch, pattern.nnz)[rng.random() < 0.3 :]) / 3
                for pattern in patterns
            ]
            grad = rng.standard_normal((batch, patterns[0].shape[1]))
            plan = random_plan(rng, patterns)
            bits.add(b"".join(array.tobytes() for array in plan.exclusive_scan(grad, values)))
    assert all(len(bits) == 1 for bits in seen)
