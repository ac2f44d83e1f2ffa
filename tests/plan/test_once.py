"""Plans of single scans are kept for others like them, and change nothing but the time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from oracles import Chain, assert_within, chains, same_bits

import sparsescan
from sparsescan import (
    BatchedCSR,
    CSRChain,
    ImplicitChain,
    ImplicitPattern,
    ImplicitStep,
    Pattern,
    ScanPlan,
    SolveStep,
    SparseScanError,
)
from sparsescan.chains.containers import PeriodicChain
from sparsescan.plan import once, search
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


TRIDIAGONAL = sp.csr_array(np.eye(6) * 4 + np.eye(6, k=1) + np.eye(6, k=-1))
TWO = ImplicitPattern([Pattern.diagonal(6), Pattern.dense((6, 6))], shared=[1])
FORMS = {
    "csr_array": lambda: csr(),
    "csr_matrix": lambda: tuple(map(sp.csr_matrix, csr())),
    "dense": lambda: np.random.default_rng(0).standard_normal((4, 6, 6)),
    "list of dense": lambda: list(np.random.default_rng(0).standard_normal((4, 6, 6))),
    "CSRChain": lambda: CSRChain(np.ones((4, 12)), *pattern_of(csr()[0])),
    "BatchedCSR": lambda: [BatchedCSR(np.ones((2, 12)), *pattern_of(step)) for step in csr()],
    "dense and sparse": lambda: [np.ones((6, 6)), *csr()[1:]],
    "PeriodicChain": lambda: PeriodicChain([np.ones((2, 6)), np.ones((2, 36))], TWO.factors),
    "ImplicitChain": lambda: ImplicitChain([np.ones((4, 6)), np.ones(36)], TWO),
    "ImplicitStep": lambda: [ImplicitStep([np.ones(6), np.ones(36)], TWO)] * 4,
    "SolveStep": lambda: [SolveStep(TRIDIAGONAL * k) for k in range(1, 5)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", ["auto", "linear", sparsescan.Schedule.linear(4)])
def test_a_second_scan_makes_no_program(form: str, schedule: Any, programs: list[int]) -> None:
    grad = np.ones((2, 6) if form == "BatchedCSR" else 6)
    for scan in (sparsescan.exclusive_scan, sparsescan.inclusive_scan) * 2:
        scan(grad, FORMS[form](), schedule=schedule)
        assert programs == [4]


@pytest.mark.parametrize("as_one", [False, True])
def test_nor_with_losses_at_steps_alone(as_one: bool, programs: list[int]) -> None:
    for seed in range(3):
        losses = np.random.default_rng(seed).standard_normal((4, 6))
        steps = csr(3)
        terms = losses if as_one else [*losses[:3], None]
        actual = sparsescan.exclusive_scan(None, steps, local_grads=terms)
        expected = sparsescan.plan(steps).exclusive_scan(None, steps, local_grads=terms)
        assert same_bits(actual, expected)
    assert len(programs) == 4


def test_a_named_schedule_has_the_same_bits_whatever_was_scanned_before(
    plans: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which form products are stored depends on the dtype, and on what samples share."""

    def by_kind(program: Program, model: Any) -> frozenset[tuple[int, int]]:
        is_large = model.dtype == np.float64 or model.differs is not None
        return frozenset({(2, 4)} if is_large else ())

    monkeypatch.setattr(search, "choose_forms", by_kind)
    single = [step.astype(np.float32) for step in csr(size=8)]
    mixed = [single[0], csr(1, size=8)[1], *single[2:]]
    pattern = ImplicitPattern([Pattern(step) for step in single[:2]])
    each, shared = ([np.ones((*batch, 12), np.float32)] * 2 for batch in ((2,), ()))
    whole = [ImplicitStep(each, pattern)] * 4
    partly = [whole[0], ImplicitStep(shared, pattern), *whole[2:]]
    for first, second in ((single, mixed), (whole, partly)):
        grad = np.ones((2, 8) if first is whole else 8, np.float32)
        forms = []
        for steps in (first, second, second, first):
            sparsescan.exclusive_scan(grad, steps, schedule="blelloch")
            (kept,) = plans.values()
            forms.append(len(kept.plan.dense))
        assert forms == [0, 1, 1, 0]
        plans.clear()


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
    broken = csr()
    broken[0].data = None
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (np.ones(5), steps, {}),
        (ones, rectangular, {}),
        (ones, outside, {}),
        (ones, broken, {}),
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


def test_few_plans_are_kept(plans: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(1, once._KEPT + 5):
        sparsescan.exclusive_scan(np.ones(6), csr(count=count), schedule="linear")
    assert len(plans) == once._KEPT
    assert min(each.plan.n for each in plans.values()) == 5
    held = {each.plan.n: each.nbytes for each in plans.values()}
    assert all(each.plan.workspace_bytes <= each.nbytes for each in plans.values())
    # The oldest go where there is no room for all.
    monkeypatch.setattr(once, "_BYTES", held[5] + held[6] + held[7])
    for count in (5, 6, 7, 6, 7):
        sparsescan.exclusive_scan(np.ones(6), csr(count=count)[:], schedule="truncated:0")
        assert sum(each.nbytes for each in plans.values()) <= once._BYTES
    sparsescan.exclusive_scan(np.ones(12), np.zeros((300, 12, 12)), schedule="blelloch")
    assert max(each.plan.n for each in plans.values()) == 7
    monkeypatch.setattr(once, "_BYTES", held[5])
    one = sp.eye_array(50_000, format="csr")
    sparsescan.exclusive_scan(np.ones(50_000), [one])
    assert min(each.plan.n for each in plans.values()) > 1


def taken(plans: dict[Any, Any]) -> int:
    """Return the bytes of arrays that the workspaces of all kept plans hold."""
    slots = [slot for each in plans.values() for slot in each.plan._idle]
    spaces = [space for slot in slots for space in slot.workspaces.values()]
    return sum(array.nbytes for space in spaces for array in space._arrays.values())


def test_workspaces_of_other_input_and_of_threads_count(
    plans: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    meet, run = Barrier(4), ScanPlan.run

    def together(self: ScanPlan, *arguments: Any, **options: Any) -> Any:
        meet.wait()
        return run(self, *arguments, **options)

    steps = np.zeros((50, 24, 24))
    scan = partial(sparsescan.exclusive_scan, np.ones(24), steps, schedule="blelloch")
    for terms in (None, np.ones((50, 24), np.float32)):
        scan(local_grads=terms)
    (one,) = plans.values()
    assert max(taken(plans), 2 * one.plan.workspace_bytes) <= one.nbytes
    monkeypatch.setattr(once, "_BYTES", 2 * one.nbytes)
    monkeypatch.setattr(ScanPlan, "run", together)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            done = [pool.submit(scan) for _ in range(4)]
            assert all(len(each.result()) == 50 for each in done)
            (one,) = plans.values()
            assert one.plan._idle
            assert taken(plans) <= one.nbytes <= once._BYTES


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
