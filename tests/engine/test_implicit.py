"""Implicit steps, against back-propagation through their factors, and what is made of them."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    STRUCTURES,
    Gradients,
    assert_within,
    mask,
    on_pattern,
    same_bits,
    schedules,
    sequential,
)
from refusals import check_refusals
from trees import letters, random_levels

import sparsescan
from sparsescan import (
    ImplicitChain,
    ImplicitPattern,
    ImplicitStep,
    InputError,
    InputTypeError,
    Pattern,
    PatternMismatchError,
    ScanPlan,
    Schedule,
)
from sparsescan.kernels.cpu.tables import SLOTS, Op
from sparsescan.symbolic.implicit import refine
from sparsescan.symbolic.indexed import IndexedPattern
from sparsescan.symbolic.pattern import of_mask
from sparsescan.symbolic.program import Program

DIAGONAL, DENSE = Pattern.diagonal(2), Pattern.dense((2, 2))
STEP = ImplicitPattern([DIAGONAL, DENSE], shared=[1])
CHAIN = ImplicitChain([np.ones((3, 2)), np.ones(4)], STEP)


# ---------------------------------------------------------------------------------------------
# Schedules and programs
# ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_a_refined_schedule_gives_the_prefixes_in_the_free_monoid(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, n)
    starts = np.concatenate([[0], np.cumsum(counts)])
    word = letters(int(starts[-1]) + 1)
    for schedule in (
        Schedule.linear(n),
        Schedule.blelloch(n),
        Schedule.chunked(n, int(rng.integers(1, n + 2))),
        Schedule.from_levels(n, random_levels(rng, n)),
    ):
        nodes = {(k, k + 1): word[k] for k in range(len(word) - 1)}
        for level in refine(schedule, starts).levels:
            before = dict(nodes)
            for first, last in zip(level.runs[:-1], level.runs[1:], strict=True):
                run = dict(before)  # it reads nothing of the other runs
                for start, mid, stop in level.ops[first:last].tolist():
                    run[start, stop] = run[start, mid] + run[mid, stop]
                nodes |= run
        assert all(word[slice(*key)] == part for key, part in nodes.items())
        # An inclusive scan takes one operation more, by the last factor.
        assert {(0, 1 + start) for start in starts[:-1]} | {(0, starts[-1])} <= set(nodes)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_what_a_run_still_reads_keeps_its_slot(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    square = Pattern.dense((3, 3))
    steps = [
        ImplicitPattern([square] * k) if (k := int(rng.integers(1, 4))) > 1 else square
        for _ in range(n)
    ]
    program = Program(steps, Schedule.from_levels(n, random_levels(rng, n)))
    for _, runs in program.levels:
        for first, last in runs.tolist():
            held: dict[int, int] = {}
            for vector, left, right, out in program.ops[first:last].tolist():
                if vector:
                    assert right < program.n or program.slots[right - program.n] < 0
                    continue
                for node in (left, right):
                    if node >= program.n and (slot := program.slots[node - program.n]) >= 0:
                        assert held[slot] == node
                if (slot := program.slots[out - program.n]) >= 0:
                    assert slot < SLOTS
                    assert held.get(slot) not in (left, right)
                    held[slot] = out


def test_products_of_chunks_are_made_in_scratch() -> None:
    """The product of each chunk stays, and no Jacobian."""
    program = Program([STEP] * 40, Schedule.chunked(40, 4))
    assert (program.slots < 0).sum() == 2
    assert not (program.ops[:-1, Op.VECTOR] == 0).all()


# ---------------------------------------------------------------------------------------------
# Scans
# ---------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A chain with implicit steps, the list of all factors, and where each step starts in it."""

    chain: Any
    factors: list[Any]
    starts: list[int]
    grad: np.ndarray
    local: list[Any] | None
    inclusive: bool

    @property
    def n(self) -> int:
        return len(self.starts) - 1

    @property
    def dtype(self) -> Any:
        values = [step if isinstance(step, np.ndarray) else step.data for step in self.factors]
        local = [] if self.local is None else list(self.local)
        given = [array for array in local if array is not None]
        return np.result_type(self.grad, *values, *given)

    def expected(self) -> Gradients:
        local = None
        if self.local is not None:
            local = [None] * (len(self.factors) + self.inclusive)
            for place, array in zip(self.starts, self.local, strict=False):
                local[place] = array
        dtype = self.dtype
        whole = sequential(self.grad, self.factors, local, inclusive=self.inclusive, dtype=dtype)
        places = self.starts[: self.n + self.inclusive]
        return Gradients([whole.exact[k] for k in places], [whole.bounds[k] for k in places])

    def scan(self, plan: ScanPlan | None = None, **options: Any) -> Any:
        name = "inclusive_scan" if self.inclusive else "exclusive_scan"
        return getattr(plan or sparsescan, name)(
            self.grad, self.chain, local_grads=self.local, **options
        )


def with_index(rng: np.random.Generator, pattern: Pattern) -> IndexedPattern:
    """Few weights in many places; some rows have the weights of another one."""
    index = rng.integers(0, size := int(rng.integers(1, 9)), pattern.nnz)
    if rng.random() < 0.7:
        within = np.arange(pattern.nnz) - np.repeat(pattern.indptr[:-1], np.diff(pattern.indptr))
        index = within % size
    return IndexedPattern(pattern, index, size)


def matrix(values: np.ndarray, pattern: Pattern, index: IndexedPattern | None = None) -> Any:
    if index is not None:
        values = values[index.index]
    return on_pattern(values, pattern)


def size_of(factor: Pattern, index: IndexedPattern | None) -> int:
    return factor.nnz if index is None else index.size


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, batch = draw(st.integers(1, 9)), draw(st.sampled_from([None, None, 0, 1, 3, 9]))
    dtypes = draw(st.sampled_from([["f4"], ["f8"], ["f4", "f8"]]))
    lead = () if batch is None else (batch,)
    is_stack = draw(st.booleans())

    def values(*shape: int) -> np.ndarray:
        array = rng.standard_normal(shape).astype(rng.choice(dtypes))
        return np.repeat(array[::-1], 2, axis=0)[::-2] if rng.random() < 0.3 else array

    def pattern_of(rows: int, cols: int) -> Pattern:
        return of_mask(mask(rng, rng.choice(STRUCTURES), rows, cols))

    def implicit(rows: int, cols: int) -> ImplicitPattern:
        count = int(rng.integers(2 if is_stack else 1, 4))
        sizes = [cols, *rng.integers(1, 8, count - 1).tolist(), rows]
        factors: list[Any] = [pattern_of(b, a) for a, b in itertools.pairwise(sizes)]
        for k in range(is_stack, count):
            if count == 1 or rng.random() < 0.4:
                factors[k] = with_index(rng, factors[k])
        return ImplicitPattern(factors, np.flatnonzero(rng.random(count) < 0.4).tolist())

    size = int(rng.integers(1, 6))
    listed: list[Any] = []
    starts = [0]
    if is_stack:
        pattern = implicit(size, size)
        forms = [() if flag or rng.random() < 0.2 else (n, *lead) for flag in pattern.shared]
        forms[0] = (n, *(() if pattern.shared[0] else lead))
        arrays = [
            values(*form, size_of(factor, index))
            for form, factor, index in zip(forms, pattern.factors, pattern.indexed, strict=True)
        ]
        chain: Any = ImplicitChain(arrays, pattern)
        for step in range(n):
            listed += [
                matrix(array[step] if array.ndim > 1 else array, factor, index)
                for array, factor, index in zip(
                    arrays, pattern.factors, pattern.indexed, strict=True
                )
            ]
            starts.append(len(listed))
        sizes = [size] * (n + 1)
    else:
        chain, sizes = [], [size]
        for _ in range(n):
            sizes.append(int(rng.integers(1, 6)))
            rows, cols = sizes[-1], sizes[-2]
            if rng.random() < 0.4:
                factor = pattern_of(rows, cols)
                chain.append(
                    on_pattern(values(*(lead if rng.random() < 0.5 else ()), factor.nnz), factor)
                )
                listed.append(chain[-1])
            else:
                pattern = implicit(rows, cols)
                arrays = [
                    values(*(() if flag or rng.random() < 0.2 else lead), size_of(factor, index))
                    for flag, factor, index in zip(
                        pattern.shared, pattern.factors, pattern.indexed, strict=True
                    )
                ]
                chain.append(ImplicitStep(arrays, pattern))
                listed += map(matrix, arrays, pattern.factors, pattern.indexed)
            starts.append(len(listed))
    inclusive = draw(st.booleans())
    grad = rng.standard_normal((*lead, size)).astype(rng.choice(dtypes))
    local: Any = None
    if draw(st.booleans()):
        local = [
            rng.standard_normal((*lead, size)).astype(rng.choice(dtypes))
            if rng.random() < 0.7
            else None
            for size in sizes[: n + inclusive]
        ]
        if all(each is not None and each.shape == local[0].shape for each in local):
            local = np.stack(local)
    return Case(chain, listed, starts, grad, local, inclusive)


@given(case=cases(), data=st.data())
def test_gradients_are_those_of_the_factors(case: Case, data: Any) -> None:
    schedule = data.draw(schedules(case.n))
    expected, dtype = case.expected(), case.dtype
    before = pickle.dumps(case)
    result = case.scan(schedule=schedule)
    assert pickle.dumps(case) == before
    assert_within(result, expected, dtype)
    assert isinstance(result, np.ndarray if isinstance(case.chain, ImplicitChain) else list)
    plan = sparsescan.plan(case.chain, schedule=schedule)
    for _ in range(2):
        assert_within(case.scan(plan), expected, dtype)
    named = sparsescan.plan(list(plan.patterns), schedule=plan.schedule)
    assert same_bits(list(case.scan(plan)), list(case.scan(named)))


@given(case=cases(), data=st.data())
def test_the_order_of_time_is_the_other_one(case: Case, data: Any) -> None:
    options = {"schedule": data.draw(schedules(case.n))}
    expected = case.scan(**options)
    if isinstance(case.chain, ImplicitChain):
        turned = [v if v.ndim == 1 else v[::-1] for v in case.chain.values]
        case.chain = ImplicitChain(turned, case.chain.pattern)
    else:
        case.chain = case.chain[::-1]
    case.local = None if case.local is None else case.local[::-1]
    plan = sparsescan.plan(case.chain, reverse=True, **options)
    for result in (case.scan(reverse=True, **options), case.scan(plan)):
        assert same_bits(list(result)[::-1], list(expected))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["linear", "blelloch", "chunked:4"])
def test_bits_do_not_depend_on_threads(schedule: str, threads: int, with_threads: Any) -> None:
    rng = np.random.default_rng(0)
    pattern = ImplicitPattern([Pattern.diagonal(8), Pattern.dense((8, 8))], shared=[1])
    chain = ImplicitChain([rng.random((50, 5, 8)), rng.random(64) / 4], pattern)
    plan, grad = sparsescan.plan(chain, schedule=schedule), rng.random((5, 8))
    with_threads(4)
    expected = plan.exclusive_scan(grad, chain)
    with_threads(threads)
    assert same_bits(plan.exclusive_scan(grad, chain), expected)


def test_gradients_stay_finite_where_products_leave_the_range() -> None:
    pattern = ImplicitPattern([Pattern.diagonal(2), Pattern.dense((2, 2))], shared=[1])
    slopes = np.where(np.arange(64)[:, None] % 32 < 16, 1e10, 1e-10) * np.ones(2)
    chain = ImplicitChain([slopes.astype("f4"), np.array([0.5, 0.5, 0.5, 0.5], "f4")], pattern)
    grad = np.full(2, 1e-30, "f4")
    expected = sparsescan.exclusive_scan(grad, chain, schedule="linear")
    for schedule in ("blelloch", "chunked:3", "truncated:2"):
        result = sparsescan.exclusive_scan(grad, chain, schedule=schedule)
        fine = np.isfinite(expected)
        np.testing.assert_allclose(result[fine], expected[fine], rtol=1e-4)


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def test_the_planner_counts_what_samples_share_once(as_if: Any) -> None:
    as_if(2)
    factors = [Pattern.diagonal(64), Pattern.dense((64, 64))]
    options: dict[str, Any] = {"batch": 64, "dtype": np.float32, "schedule": "linear"}
    shared, own = (
        sparsescan.plan([ImplicitPattern(factors, positions)] * 200, **options)
        for positions in ([1], [])
    )
    times = [
        sum(level["nanoseconds"] for level in plan.to_dict()["levels"]) for plan in (shared, own)
    ]
    assert times[0] < times[1]


@given(cases())
def test_plans_are_saved_and_loaded(case: Case) -> None:
    import tempfile

    plan = sparsescan.plan(case.chain, schedule="blelloch")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.npz")
        plan.save(path)
        loaded = ScanPlan.load(path)
    assert loaded.patterns == plan.patterns
    assert str(loaded) == str(plan)
    assert same_bits(list(case.scan(loaded)), list(case.scan(plan)))


def test_the_pattern_of_the_jacobian_is_the_product() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((4, 3)) < 0.5, rng.random((5, 4)) < 0.5
    pattern = ImplicitPattern([of_mask(a), of_mask(b)])
    assert pattern.jacobian is of_mask(b.astype(int) @ a.astype(int) > 0)
    assert pattern.shape == (5, 3)


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------


def test_bad_steps_are_refused() -> None:
    pattern, step, chain = ImplicitPattern, ImplicitStep, ImplicitChain
    both, wide, narrow = [DENSE, DENSE], np.ones((3, 2)), np.ones(2)
    check_refusals(
        {
            "InputError: factors has 1 patterns; expected at least two": lambda: pattern([DENSE]),
            "InputTypeError: factors[1] is 3; expected a Pattern": lambda: pattern([DENSE, 3]),
            "InputTypeError: factors is 3; expected a sequence": lambda: pattern(3),
            "InputError: factors[1] has shape (2, 3); expected (·, 2)": (
                lambda: pattern([DENSE, Pattern.dense((2, 3))])
            ),
            "InputError: shared has 2; expected positions from 0": lambda: pattern(both, [2]),
            "InputTypeError: shared has 'a'; expected positions": lambda: pattern(both, ["a"]),
            "InputTypeError: shared has [1]; expected positions": lambda: pattern(both, [[1]]),
            "InputTypeError: shared has array … expected": lambda: pattern(both, np.array([[1]])),
            "InputError: shared has more than 10,000": lambda: pattern(both, itertools.count()),
            "InputError: shared has 0; expected none": lambda: pattern([], [0]),
            "InputError: values has 1 arrays; expected 2, one for each": (
                lambda: step([narrow], STEP)
            ),
            "InputError: values[0] has shape (3,)": lambda: step([np.ones(3), np.ones(4)], STEP),
            "InputError: values[1] has shape (3, 4); expected no batch axis": (
                lambda: step([wide, np.ones((3, 4))], STEP)
            ),
            "InputError: values[1] has shape (2, 4); expected a batch of 3": (
                lambda: step([wide, np.ones((2, 4))], pattern([DIAGONAL, DENSE]))
            ),
            "InputTypeError: pattern is Pattern": lambda: step([narrow, np.ones(4)], DENSE),
            "InputError: values has no steps": lambda: chain([narrow, np.ones(4)], STEP),
            "InputError: values has 1 arrays": lambda: chain([wide], STEP),
            "InputError: pattern is of Jacobians of shape (3, 2); expected square ones": (
                lambda: chain([], pattern([DENSE, Pattern.dense((3, 2))]))
            ),
            "InputError: values[1] has shape (3, 5, 4); expected no batch axis": (
                lambda: chain([wide, np.ones((3, 5, 4))], STEP)
            ),
            "InputTypeError: values[0] has dtype": (
                lambda: chain([np.ones((3, 2), int), np.ones(4)], STEP)
            ),
        }
    )


def test_chains_of_other_steps_are_refused_by_a_plan() -> None:
    plan, grad = sparsescan.plan(CHAIN), np.ones(2)
    own = ImplicitStep([np.ones(2), np.ones(4)], STEP)
    other = ImplicitStep([np.ones(2), np.ones(4)], ImplicitPattern([DIAGONAL, DENSE]))
    for chain, words in (
        ([own, other, own], r"jacobians\[1\] is ImplicitPattern\(.*; expected ImplicitPattern"),
        ([own, own, np.eye(2)], r"jacobians\[2\] is explicit; expected ImplicitPattern"),
        (np.ones((3, 2, 2)), r"jacobians\[0\] is explicit; expected ImplicitPattern"),
    ):
        with pytest.raises(PatternMismatchError, match=words):
            plan.exclusive_scan(grad, chain)
    with pytest.raises(InputError, match="jacobians has 2 steps; expected 3"):
        plan.exclusive_scan(grad, [own, own])
    explicit = sparsescan.plan([DENSE] * 3)
    with pytest.raises(
        PatternMismatchError, match=r"jacobians is ImplicitChain.*expected explicit"
    ):
        explicit.exclusive_scan(grad, CHAIN)
    with pytest.raises(InputTypeError, match=r"jacobians\[1\] is an ImplicitStep; expected an exp"):
        explicit.exclusive_scan(grad, [np.eye(2), own, np.eye(2)])


def test_errors_name_the_step_and_not_the_factor() -> None:
    step = ImplicitStep([np.ones((3, 2)), np.ones(4)], STEP)
    grad = np.ones((3, 2))
    with pytest.raises(InputError, match=r"jacobians\[2\] has a batch of 4, an earlier one of 3"):
        sparsescan.exclusive_scan(grad, [step, np.eye(2), np.ones((4, 2, 2))])
    with pytest.raises(InputError, match=r"jacobians\[2\] has shape .* jacobians\[1\] has 2 rows"):
        sparsescan.exclusive_scan(grad, [step, step, np.ones((3, 3))])
    with pytest.raises(InputError, match=r"local_grads\[1\] has shape \(5,\); expected \(3, 2\)"):
        sparsescan.exclusive_scan(grad, [step, step], local_grads=[None, np.ones(5)])
    with pytest.raises(InputError, match="local_grads has 4 entries; expected 2"):
        sparsescan.exclusive_scan(grad, [step, step], local_grads=[None] * 4)
    with pytest.raises(InputError, match=r"schedule is .* expected one for 2 Jacobians"):
        sparsescan.exclusive_scan(grad, [step, step], schedule=Schedule.linear(4))


def test_files_of_chains_hold_explicit_steps(tmp_path: Path) -> None:
    step = ImplicitStep([np.ones(2), np.ones(4)], STEP)
    for chain in ([step], CHAIN):
        with pytest.raises(InputTypeError, match=r"expected (an )?explicit Jacobians? here"):
            sparsescan.save_chain(tmp_path / "chain.npz", np.ones(2), chain)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shared", [[], [1]])
@pytest.mark.parametrize("in_a_list", [False, True])
def test_local_gradients_have_samples_that_factors_share(
    shared: list[int], in_a_list: bool
) -> None:
    pattern = ImplicitPattern([DIAGONAL, DENSE], shared=shared)
    slopes, weight = np.linspace(0.5, 1, 10).reshape(5, 2), np.arange(4.0)
    chain = ImplicitChain([slopes, weight if shared else np.tile(weight, (5, 1))], pattern)
    local = np.random.default_rng(0).standard_normal((5, 3, 2))
    given = list(local) if in_a_list else local
    expected = sparsescan.exclusive_scan(np.zeros((3, 2)), chain, local_grads=given)
    for scan in (sparsescan.exclusive_scan, sparsescan.plan(chain).exclusive_scan):
        assert np.array_equal(scan(None, chain, local_grads=given), expected)


def test_factors_by_weights_are_named_by_their_positions() -> None:
    signal = Pattern([0, 2, 4, 6], [0, 1, 1, 2, 2, 3], (3, 4))
    index = [0, 1, 0, 1, 0, 1]
    pattern = ImplicitPattern([signal, Pattern.diagonal(3)], indexed={0: (index, 2)})
    assert pattern.indexed == (IndexedPattern(signal, index, 2), None)
    assert pattern.shared == (True, False)
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    for indexed, words in (
        ({2: (index, 2)}, "indexed has 2; expected positions from 0 to 1"),
        ({"0": (index, 2)}, "indexed has '0'; expected positions"),
        ({0: index}, "factors\\[0\\] has \\[0, 1, 0, 1, 0, 1\\]; expected \\(index, size\\)"),
        ({0: 2}, "factors\\[0\\] has 2; expected \\(index, size\\)"),
        ({0: (index, 1)}, "index has 1; expected weights from 0 to 0"),
        (5, "indexed is 5; expected a sequence"),
    ):
        with pytest.raises((InputError, InputTypeError), match=words):
            ImplicitPattern([signal, Pattern.diagonal(3)], indexed=indexed)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="factors\\[0\\] is 3; expected a Pattern"):
        ImplicitPattern([3, signal], indexed={0: (index, 2)})  # type: ignore[list-item]
