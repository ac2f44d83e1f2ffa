"""Chains in which a few patterns take turns, against the same chain as a list."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed import Liar
from oracles import STRUCTURES, assert_within, mask, on_pattern, same_bits, schedules, sequential

import sparsescan
from sparsescan import InputError, InputTypeError, Pattern
from sparsescan.chains.containers import PeriodicChain
from sparsescan.errors import PatternMismatchError
from sparsescan.symbolic.pattern import of_mask


@dataclass
class Case:
    """A chain, the same as a list, a gradient, and local gradients in both ways."""

    chain: PeriodicChain
    listed: list[Any]
    grad: np.ndarray
    local: list[Any] | None
    local_listed: list[Any] | None
    inclusive: bool

    def scans(self, **options: Any) -> tuple[Any, Any]:
        run = sparsescan.inclusive_scan if self.inclusive else sparsescan.exclusive_scan
        return (
            run(self.grad, self.chain, local_grads=self.local, **options),
            run(self.grad, self.listed, local_grads=self.local_listed, **options),
        )

    def in_turns(self, result: Any) -> list[Any]:
        """Return a result as a list, in the order of the chain."""
        period = len(self.chain.patterns)
        stacks = [result] if period == 1 and isinstance(result, np.ndarray) else result
        if period == 1 and isinstance(result, list):
            return result
        count = sum(map(len, stacks))
        return [np.ascontiguousarray(stacks[k % period][k // period]) for k in range(count)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    period, steps = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    batch = draw(st.sampled_from([None, None, 0, 1, 3, 9]))
    dtypes = draw(st.sampled_from([["f4"], ["f8"], ["f4", "f8"]]))
    sizes = [draw(st.integers(1, 6)) for _ in range(period)]
    sizes.append(sizes[0])
    forms = [draw(st.sampled_from(["shared", "steps", "batched"])) for _ in range(period)]
    forms[draw(st.integers(0, period - 1))] = "steps" if batch is None else "batched"
    patterns, values = [], []
    for turn, form in enumerate(forms):
        structure = draw(st.sampled_from(STRUCTURES))
        patterns.append(of_mask(mask(rng, structure, sizes[turn + 1], sizes[turn])))
        shape = {"shared": (), "steps": (steps,), "batched": (steps, batch)}[form]
        if batch is None:
            shape = shape[:1]
        array = rng.standard_normal((*shape, patterns[-1].nnz)).astype(rng.choice(dtypes))
        if form != "shared" and draw(st.booleans()):
            array = np.repeat(array[::-1], 2, axis=0)[::-2]  # the same, with strides
        values.append(array)
    chain = PeriodicChain(values, patterns)
    listed = [
        on_pattern(values[turn] if forms[turn] == "shared" else values[turn][step], patterns[turn])
        for step in range(steps)
        for turn in range(period)
    ]
    inclusive = draw(st.booleans())
    lead = () if batch is None else (batch,)
    grad = rng.standard_normal((*lead, sizes[0])).astype(rng.choice(dtypes))
    local = local_listed = None
    if draw(st.booleans()):
        local = [
            rng.standard_normal((steps + (inclusive and turn == 0), *lead, sizes[turn])).astype(
                rng.choice(dtypes)
            )
            if draw(st.booleans())
            else None
            for turn in range(period)
        ]
        count = steps * period + inclusive
        local_listed = [
            None if local[k % period] is None else local[k % period][k // period]
            for k in range(count)
        ]
        if period == 1:
            local = local[0]
    return Case(chain, listed, grad, local, local_listed, inclusive)


@given(case=cases(), data=st.data())
def test_it_is_the_same_chain_as_a_list(case: Case, data: Any) -> None:
    schedule = data.draw(schedules(len(case.listed)))
    before = pickle.dumps(case)
    result, listed = case.scans(schedule=schedule)
    assert pickle.dumps(case) == before
    assert same_bits(case.in_turns(result), listed)
    local = case.local_listed
    dtype = listed[0].dtype
    expected = sequential(case.grad, case.listed, local, inclusive=case.inclusive, dtype=dtype)
    assert_within(case.in_turns(result), expected, dtype)


@given(case=cases(), data=st.data())
def test_a_plan_runs_again(case: Case, data: Any) -> None:
    plan = sparsescan.plan(case.chain, schedule=data.draw(schedules(len(case.listed))))
    run = plan.inclusive_scan if case.inclusive else plan.exclusive_scan
    listed = run(case.grad, case.listed, local_grads=case.local_listed)
    for _ in range(2):
        result = run(case.grad, case.chain, local_grads=case.local)
        assert same_bits(case.in_turns(result), listed)
    again = run(case.grad, case.listed, local_grads=case.local_listed)
    assert same_bits(again, listed)


DENSE, WIDE = Pattern.dense((2, 2)), Pattern.dense((2, 3))


@pytest.mark.parametrize(
    ("values", "patterns", "words"),
    [
        ([], [], "values has 0 arrays and patterns has 0; expected as many, at least one"),
        ([np.ones((3, 4))], [DENSE, DENSE], "values has 1 arrays and patterns has 2"),
        ([np.ones(4)], [DENSE], "values has no steps, or only arrays that all"),
        ([np.ones((3, 5))], [DENSE], r"values\[0\] has shape \(3, 5\); expected .* nnz = 4"),
        ([np.ones((1, 2, 3, 4))], [DENSE], r"values\[0\] has shape \(1, 2, 3, 4\)"),
        (
            [np.ones((3, 4)), np.ones((2, 4))],
            [DENSE, DENSE],
            r"values\[1\] has shape \(2, 4\); expected steps = 3, as values\[0\] has",
        ),
        (
            [np.ones((3, 2, 4)), np.ones((3, 1, 4))],
            [DENSE, DENSE],
            r"values\[1\] has shape \(3, 1, 4\); expected batch = 2, as values\[0\] has",
        ),
        (
            [np.ones((1, 4)), np.ones((1, 6))],
            [DENSE, WIDE],
            r"patterns\[1\] has shape \(2, 3\); expected \(·, 2\)",
        ),
        # Its last gradient would be of another size than the first.
        ([np.ones((1, 6))], [WIDE], r"patterns\[0\] has shape \(2, 3\); expected \(·, 2\), as"),
        (Liar(2, [np.ones((3, 2))]), [DENSE], "values gave other than 2 entries; expected 2, its"),
    ],
)
def test_bad_sizes_are_named(values: Any, patterns: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}"):
        PeriodicChain(values, patterns)


@pytest.mark.parametrize(
    ("values", "patterns", "words"),
    [
        (3, 4, "patterns is 4; expected a list"),
        (None, [DENSE], "values is None; expected a list"),
        ([np.ones((3, 4))], None, "patterns is None; expected a list"),
        ("ab", [DENSE], "values is 'ab'; expected a list"),
        ({0: 1}, [DENSE], "values is {0: 1}; expected a list"),
        (np.array(1.0), [DENSE], "values cannot be read: "),
        ([np.ones((1, 4))], [np.eye(2)], r"patterns\[0\] is a ndarray; expected a Pattern"),
        ([np.ones((1, 4), int)], [DENSE], r"values\[0\] has dtype int64"),
    ],
)
def test_bad_types_are_named(values: Any, patterns: Any, words: str) -> None:
    with pytest.raises(InputTypeError, match=f"^{words}"):
        PeriodicChain(values, patterns)


def test_a_chain_is_no_step_of_a_list() -> None:
    chain = PeriodicChain([np.ones((1, 4))], [DENSE])
    with pytest.raises(InputTypeError, match=r"jacobians\[0\] is a PeriodicChain; expected one"):
        sparsescan.exclusive_scan([1.0, 1.0], [chain])


def test_a_chain_of_other_patterns_is_refused_by_a_plan() -> None:
    diagonal = Pattern.diagonal(2)
    chain = PeriodicChain([np.ones((3, 2)), np.ones(4)], [diagonal, DENSE])
    other = PeriodicChain([np.ones((3, 4)), np.ones(2)], [DENSE, diagonal])
    plan = sparsescan.plan(chain)
    plan.exclusive_scan([1.0, 1.0], chain)
    with pytest.raises(PatternMismatchError, match=r"jacobians\[0\] is Pattern\(\(2, 2\), nnz=4"):
        plan.exclusive_scan([1.0, 1.0], other)
    with pytest.raises(InputError, match="jacobians is one array, but the plan has several"):
        plan.exclusive_scan([1.0, 1.0], np.ones((6, 2, 2)))
    longer = PeriodicChain([np.ones((4, 2)), np.ones(4)], [diagonal, DENSE])
    with pytest.raises(InputError, match="jacobians has 8 steps; expected 6"):
        plan.exclusive_scan([1.0, 1.0], longer)


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ([None], "local_grads has 1 entries; expected 2, one for each pattern"),
        ([None, np.ones((2, 2))], r"local_grads\[1\] has shape \(2, 2\); expected \(3, 2\)"),
    ],
)
def test_bad_local_grads_are_named(local: Any, words: str) -> None:
    chain = PeriodicChain([np.ones((3, 2)), np.ones(4)], [Pattern.diagonal(2), DENSE])
    with pytest.raises(InputError, match=words):
        sparsescan.exclusive_scan([1.0, 1.0], chain, local_grads=local)


def test_several_patterns_make_a_chain_in_which_they_take_turns() -> None:
    patterns = [Pattern.diagonal(2), Pattern.dense((2, 2))]
    values = [np.ones((5, 2)), np.arange(4.0)]
    chain = sparsescan.CSRChain.from_pattern(values, patterns)
    assert type(chain) is PeriodicChain
    assert chain.patterns == patterns
    assert type(sparsescan.CSRChain.from_pattern(values[0], patterns[0])) is sparsescan.CSRChain
    with pytest.raises(InputTypeError, match="pattern is a set; expected a Pattern"):
        sparsescan.CSRChain.from_pattern(values, set(patterns))
