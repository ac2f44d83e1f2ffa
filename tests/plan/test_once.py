"""Plans of single scans are kept for others like them, and change nothing but the time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from oracles import Chain, assert_within, chains, same_bits

import sparsescan
from sparsescan import BatchedCSR, CSRChain, SparseScanError
from sparsescan.plan import once
from sparsescan.symbolic.program import Program


@pytest.fixture(autouse=True)
def plans() -> Iterator[dict[Any, Any]]:
    """Begin with no plan kept."""
    once._plans.clear()
    yield once._plans
    once._plans.clear()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many Jacobians each program is made for."""
    made: list[int] = []
    begin = Program.__init__

    def counting(self: Program, patterns: Any, *arguments: Any, **options: Any) -> None:
        made.append(len(patterns))
        begin(self, patterns, *arguments, **options)

    monkeypatch.setattr(Program, "__init__", counting)
    return made


# Few lengths and sizes, so that many look alike and have other patterns.
ALIKE = chains(max_n=3, max_size=3, min_size=2)


@given(
    lives=st.lists(ALIKE, min_size=2, max_size=5), schedule=st.sampled_from(["auto", "blelloch"])
)
def test_any_scans_one_after_the_other_are_right(lives: list[Chain], schedule: str) -> None:
    for chain in [*lives, *lives[::-1]]:
        result = chain.scan(schedule=schedule)
        assert_within(result, chain.oracle(), chain.dtype)
        assert same_bits(chain.scan(schedule=schedule), result)


def csr(seed: int = 0, size: int = 6, count: int = 4) -> list[sp.csr_array]:
    """Chains of one length, shape and number of entries, and of other patterns for other seeds."""
    rng = np.random.default_rng(seed)
    where = [rng.permuted(np.arange(size * size) < 12).reshape(size, size) for _ in range(count)]
    return [sp.csr_array(each * rng.standard_normal((size, size))) for each in where]


def pattern_of(step: sp.csr_array) -> tuple[Any, ...]:
    return step.indices, step.indptr, step.shape


FORMS = {
    "csr_array": lambda: csr(),
    "csr_matrix": lambda: tuple(map(sp.csr_matrix, csr())),
    "dense": lambda: np.random.default_rng(0).standard_normal((4, 6, 6)),
    "list of dense": lambda: list(np.random.default_rng(0).standard_normal((4, 6, 6))),
    "CSRChain": lambda: CSRChain(np.ones((4, 12)), *pattern_of(csr()[0])),
    "BatchedCSR": lambda: [BatchedCSR(np.ones((2, 12)), *pattern_of(step)) for step in csr()],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", ["auto", "linear", sparsescan.Schedule.blelloch(4)])
def test_a_second_scan_makes_no_program(form: str, schedule: Any, programs: list[int]) -> None:
    grad = np.ones((2, 6) if form == "BatchedCSR" else 6)
    for scan in (sparsescan.exclusive_scan, sparsescan.inclusive_scan) * 2:
        scan(grad, FORMS[form](), schedule=schedule)
        assert programs == [4]


def test_values_and_indices_are_read_each_time() -> None:
    steps = csr()
    for seed in range(3):
        # The same arrays, and another pattern.
        other = csr(seed)[2]
        steps[2].indices[:], steps[2].indptr[:] = other.indices, other.indptr
        for _ in range(2):
            steps[1].data *= -3
            chain = Chain(np.ones(6), steps, None, np.dtype(np.float64), True, None)
            assert_within(chain.scan(), chain.oracle(), np.float64)


@pytest.mark.parametrize("schedule", ["auto", "blelloch"])
def test_errors_do_not_depend_on_scans_before(schedule: str, plans: dict[Any, Any]) -> None:
    steps, ones = csr(), np.ones(6)
    rectangular, outside = csr(), csr()
    rectangular[2] = sp.csr_array(rectangular[2][:, :5])
    outside[1].indices[3] = 6
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (np.ones(5), steps, {}),
        (ones, rectangular, {}),
        (ones, outside, {}),
        (ones, [*steps[:2], None, steps[3]], {}),
        (np.ones(6, int), steps, {}),
        (ones, steps, {"local_grads": [None] * 3}),
        (ones, steps, {"stream": 7}),
        (ones, steps, {"device": "gpu"}),
        (ones, steps, {"reverse": 2}),
    ]
    for grad, jacobians, options in calls:
        told = []
        for _ in range(2):
            with pytest.raises(SparseScanError) as caught:
                sparsescan.exclusive_scan(grad, jacobians, schedule=schedule, **options)
            told.append((caught.type, str(caught.value)))
            sparsescan.exclusive_scan(ones, steps, schedule=schedule)
        assert told[0] == told[1]
        plans.clear()
    for wrong in (["auto"], 3, "lineal"):
        with pytest.raises(SparseScanError, match="schedule is"):
            sparsescan.exclusive_scan(ones, steps, schedule=wrong)  # type: ignore[arg-type]


def test_few_plans_are_kept_and_only_small_ones(plans: dict[Any, Any]) -> None:
    for count in range(1, once._KEPT_PLANS + 5):
        sparsescan.exclusive_scan(np.ones(6), csr(count=count))
    assert len(plans) == once._KEPT_PLANS
    held = [sum(p.workspace_bytes for p in plans.values())]
    assert held[0] < once._KEPT_PLANS * once._BYTES
    plans.clear()
    large = np.zeros((2000, 12, 12))
    sparsescan.exclusive_scan(np.ones(12), large, schedule="blelloch")
    assert not plans
    one = sp.csr_array(sp.eye_array(once._BYTES, format="csr"))
    sparsescan.exclusive_scan(np.ones(once._BYTES), [one])
    assert not plans


def test_what_was_scanned_is_not_kept() -> None:
    steps, grad = csr(), np.ones(6)
    sparsescan.exclusive_scan(grad, steps)
    sparsescan.exclusive_scan(grad, steps)
    values = [weakref.ref(step.data) for step in steps] + [weakref.ref(grad)]
    del steps, grad
    gc.collect()
    assert [each() for each in values] == [None] * 5


def test_threads_have_slots_of_their_own(programs: list[int]) -> None:
    chain = Chain(np.ones(6), csr(), None, np.dtype(np.float64), False, None)
    first = chain.scan()
    del programs[:]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: chain.scan(), range(200)))
    assert all(same_bits(result, first) for result in results)
    assert not programs
