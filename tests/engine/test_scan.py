"""Scans agree with back-propagation, whatever the schedule, the layout of the input or the plan."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    assert_within,
    chains,
    every_schedule,
    indices_of,
    mask,
    on_pattern,
    patterns_of,
    same_bits,
    schedules,
    sequential,
    values_only,
)
from sampling import slow

import sparsescan
from sparsescan import (
    BatchedCSR,
    CSRChain,
    InputError,
    InputTypeError,
    MemoryLimitError,
    Pattern,
    PatternMismatchError,
    Schedule,
)

# ---------------------------------------------------------------------------------------------
# Against the oracle
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [{}, {"max_n": 70, "max_size": 3}, {"max_n": 5, "max_size": 40, "min_size": 8}],
    ids=["any", "long", "large steps"],
)
@given(data=st.data())
def test_a_scan_is_back_propagation(sizes, data):
    """Stacks give stacks, and the caller's arrays stay as they are."""
    chain = data.draw(chains(**sizes))
    schedule = data.draw(schedules(len(chain.jacobians)))
    before = pickle.dumps(chain)
    result = chain.scan(schedule=schedule)
    assert_within(result, chain.oracle(), chain.dtype)
    assert pickle.dumps(chain) == before
    if len(result):
        is_stack = isinstance(chain.jacobians, CSRChain | np.ndarray)
        has_one_size = len({array.shape for array in result}) == 1
        assert isinstance(result, np.ndarray if is_stack and has_one_size else list)


@given(st.data())
def test_a_plan_gives_the_bits_of_a_one_shot_scan(data):
    """From Jacobians or from bare patterns; with Jacobians or bare values; again and again."""
    chain = data.draw(chains())
    schedule = data.draw(schedules(len(chain.jacobians)))
    once = chain.scan(schedule=schedule)
    assert same_bits(once, chain.scan(schedule=schedule))
    for source in (chain.jacobians, patterns_of(chain.jacobians)):
        plan = sparsescan.plan(source, schedule=schedule)
        values = values_only(chain.jacobians) if len(chain.jacobians) else chain.jacobians
        for jacobians in (chain.jacobians, values, chain.jacobians):
            again = chain.scan(plan, jacobians)
            assert type(again) is type(once)
            assert same_bits(once, again)


@given(st.data())
def test_one_plan_runs_any_values_dtype_and_batch(data):
    first = data.draw(chains(max_n=8))
    plan = sparsescan.plan(first.jacobians, schedule=data.draw(schedules(len(first.jacobians))))
    rng = np.random.default_rng(7)
    sizes = [p.shape[1] for p in plan.patterns[:1]] + [p.shape[0] for p in plan.patterns]
    for batch, dtype in [(None, "f4"), (2, "f8"), (3, "f4"), (None, "f8"), (2, "f4")]:
        leading = () if batch is None else (batch,)
        shared = rng.random(plan.n) < 0.4
        values = [
            rng.standard_normal((*leading * (not shared[k]), pattern.nnz)).astype(dtype)
            for k, pattern in enumerate(plan.patterns)
        ]
        jacobians = list(map(on_pattern, values, plan.patterns))
        grad = rng.standard_normal((*leading, sizes[0] if sizes else 3)).astype(dtype)
        expected = sequential(grad, jacobians, dtype=dtype)
        assert_within(plan.exclusive_scan(grad, values), expected, np.dtype(dtype))


@pytest.mark.parametrize("n", range(18))
def test_every_small_length_and_schedule(n):
    rng = np.random.default_rng(n)
    jacobians = rng.standard_normal((n, 2, 3, 3))
    grad = rng.standard_normal((2, 3))
    local = rng.standard_normal((n + 1, 2, 3))
    schedules = [Schedule.truncated(n, k) for k in range(5)]
    schedules += [Schedule.chunked(n, c) for c in range(1, n + 3)]
    for schedule in (Schedule.linear(n), Schedule.blelloch(n), *schedules):
        result = sparsescan.inclusive_scan(grad, jacobians, local_grads=local, schedule=schedule)
        assert_within(result, sequential(grad, jacobians, local, inclusive=True), np.float64)
        assert result.shape == (n + 1, 2, 3)


# ---------------------------------------------------------------------------------------------
# Forms of the result
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9, 21])
def test_samples_that_share_dense_jacobians(batch, rows, dtype):
    """Eight of them at once, and four rows; next to diagonals that differ between samples."""
    rng = np.random.default_rng(rows)
    cols = rows + 2
    jacobians = [
        rng.standard_normal((rows, cols)).astype(dtype),
        rng.standard_normal((batch, rows)).astype(dtype),
        rng.standard_normal((cols, rows)).astype(dtype),
    ]
    jacobians[1] = BatchedCSR(jacobians[1], np.arange(rows), np.arange(rows + 1), (rows, rows))
    grad = rng.standard_normal((batch, cols)).astype(dtype)
    result = sparsescan.inclusive_scan(grad, jacobians, schedule="linear")
    assert_within(result, sequential(grad, jacobians, inclusive=True, dtype=dtype), dtype)


def test_results_are_the_callers():
    """Later runs of a plan do not touch what an earlier one returned."""
    rng = np.random.default_rng(2)
    jacobians, grad = rng.standard_normal((10, 4, 4)), rng.standard_normal(4)
    plan = sparsescan.plan(jacobians, schedule="blelloch")
    first = plan.exclusive_scan(grad, jacobians)
    kept = first.copy()
    second = plan.exclusive_scan(2 * grad, jacobians)
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, grad)
    np.testing.assert_array_equal(first, kept)
    first[...] = 0


# ---------------------------------------------------------------------------------------------
# The caller's arrays
# ---------------------------------------------------------------------------------------------


def layouts(array: np.ndarray, folder: Any) -> dict[str, np.ndarray]:
    """Equal numbers, as a caller may hold them."""
    frozen = array.copy()
    frozen.setflags(write=False)
    mapped = np.memmap(folder / "values", array.dtype, "w+", shape=array.shape)
    mapped[...] = array
    mapped.flush()
    raw = np.empty(array.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    strided = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    strided[...] = array
    return {
        "read-only": frozen,
        "memory-mapped": np.memmap(folder / "values", array.dtype, "r", shape=array.shape),
        "big-endian": array.astype(array.dtype.newbyteorder(">")),
        "Fortran order": np.asfortranarray(array),
        "reversed": array[::-1].copy()[::-1],
        "reversed inside": array[..., ::-1].copy()[..., ::-1],
        "strided": strided,
        "unaligned": unaligned,
    }


LAYOUTS = (
    "read-only",
    "memory-mapped",
    "big-endian",
    "Fortran order",
    "reversed",
    "reversed inside",
    "strided",
    "unaligned",
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_any_layout_gives_the_same_bits(layout, dtype, tmp_path):
    rng = np.random.default_rng(3)
    n, batch, size = 11, 3, 4

    def arrange(name, array):
        folder = tmp_path / name
        folder.mkdir()
        return layouts(array, folder)[layout]

    where = mask(rng, "sparse", size, size)
    indices, indptr = indices_of(where)
    grad = rng.standard_normal((batch, size)).astype(dtype)
    dense = rng.standard_normal((n, batch, size, size)).astype(dtype)
    data = rng.standard_normal((n, batch, len(indices))).astype(dtype)
    local = rng.standard_normal((n, batch, size)).astype(dtype)
    chain = CSRChain(data, indices, indptr, (size, size))
    odd = CSRChain(
        arrange("data", data), arrange("indices", indices), arrange("indptr", indptr), (size, size)
    )
    pairs = [
        (dense, arrange("dense", dense)),
        (list(dense), list(arrange("list", dense))),
        (list(dense[:, 0]), list(arrange("shared", dense)[:, 0])),
        (chain, odd),
    ]
    odd_grad, odd_local = arrange("grad", grad), arrange("local", local)
    for schedule in every_schedule(n):
        for plain, other in pairs:
            expected = sparsescan.exclusive_scan(grad, plain, local_grads=local, schedule=schedule)
            result = sparsescan.exclusive_scan(
                odd_grad, other, local_grads=odd_local, schedule=schedule
            )
            assert same_bits(expected, result)
            assert result[0].dtype.isnative


def peak(work: Any) -> tuple[Any, int]:
    """Return the result of a call, and the most bytes it held beyond that."""
    gc.collect()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        result = work()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return result, most - max(kept, start)


@pytest.mark.parametrize("form", ["stack", "CSRChain", "values", "csr list", "dense list"])
@pytest.mark.parametrize("local", [True, *slow(False)])
@pytest.mark.parametrize("schedule", [Schedule.chunked(10_000, 50), *slow(Schedule.linear(10_000))])
def test_the_second_run_of_a_plan_allocates_only_its_result(form, local, schedule):
    """Nothing grows with the chain; of arrays that come one by one, at most a view of each."""
    n, size = schedule.n, 6
    rng = np.random.default_rng(6)
    stack = 0.3 * rng.standard_normal((n, size, size))
    grad = rng.standard_normal(size)
    where = indices_of(np.ones((size, size), bool))
    jacobians = {
        "stack": stack,
        "CSRChain": CSRChain(stack.reshape(n, -1), *where, (size, size)),
        "values": stack.reshape(n, -1),
        "csr list": [sp.csr_array((step.ravel(), *where), (size, size)) for step in stack],
        "dense list": list(stack),
    }[form]
    local_grads = rng.standard_normal((n, size)) if local else None
    plan = sparsescan.plan([Pattern.dense((size, size))] * n, schedule=schedule)

    def run():
        return plan.exclusive_scan(grad, jacobians, local_grads=local_grads)

    first = run()
    second, extra = peak(run)
    assert same_bits(first, second)
    views = local + (form == "dense list")
    assert extra < (2 + 150 * views) * n


# ---------------------------------------------------------------------------------------------
# A plan insists on its chain
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "other"),
    [
        (0, sp.csr_array(np.ones((2, 3)))),
        (0, sp.csr_array(np.array([[1.0, 0, 1], [0, 1, 1]]))),
        (0, np.ones((2, 3))),
        (0, np.ones(5)),
        (0, BatchedCSR(np.ones((1, 4)), [0, 1, 0, 2], [0, 2, 4], (2, 3))),
        (1, sp.csr_array(np.eye(4, 2))),
        (1, np.ones((2, 4))),
        (1, np.ones((4, 3))),
        (2, sp.csr_array(np.ones((4, 4)))),
        (2, sp.csr_array(np.eye(5))),
        (2, np.ones((4, 5))),
        (2, np.ones(5)),
    ],
)
def test_another_pattern_is_refused_by_step(step, other):
    good = [
        sp.csr_array(np.array([[1.0, 1, 0], [0, 1, 1]])),
        np.ones((4, 2)),
        sp.csr_array(np.eye(4)),
    ]
    banded = Pattern([0, 2, 4], [0, 1, 1, 2], (2, 3))
    plan = sparsescan.plan([banded, Pattern.dense((4, 2)), Pattern.diagonal(4)])
    expected = plan.inclusive_scan(np.ones(3), good)
    wrong = [*good]
    wrong[step] = other
    with pytest.raises(PatternMismatchError, match=rf"^jacobians\[{step}\] .*; expected Pattern"):
        plan.inclusive_scan(np.ones(3), wrong)
    assert same_bits(expected, plan.inclusive_scan(np.ones(3), good))


def test_a_plan_insists_on_its_batch():
    plan = sparsescan.plan(np.ones((5, 2, 2)), batch=3)
    assert plan.exclusive_scan(np.ones((3, 2)), np.ones((5, 2, 2))).shape == (5, 3, 2)
    for shape in [(2,), (2, 2), (1, 2)]:
        with pytest.raises(InputError, match=r"grad has shape .*; expected \(3, "):
            plan.exclusive_scan(np.ones(shape), np.ones((5, 2, 2)))


@pytest.mark.parametrize("dtype", [np.float32, "float64"])
def test_a_plan_insists_on_its_dtype(dtype):
    plan = sparsescan.plan(np.ones((5, 2, 2)), dtype=dtype)
    other = "f8" if np.dtype(dtype) == np.float32 else "f4"
    ours = np.ones((5, 2, 2), dtype)
    assert plan.exclusive_scan(np.ones(2, dtype), ours).dtype == dtype
    with pytest.raises(InputTypeError, match=r"is of dtype float.*; expected float.*, the plan's"):
        plan.exclusive_scan(np.ones(2, other), ours.astype(other))


def test_a_plan_keeps_to_its_memory_limit():
    jacobians = np.ones((64, 8, 8))
    need = sparsescan.plan(jacobians, schedule="blelloch").workspace_bytes
    least = sparsescan.plan(jacobians, schedule="linear").workspace_bytes
    assert need > least > 0
    sparsescan.plan(jacobians, schedule="blelloch", memory_limit=need)
    with pytest.raises(
        MemoryLimitError,
        match=rf"(?m)memory_limit is .* KiB \({need - 1:,} bytes\); Schedule.blelloch\(64\) needs "
        rf".* \({need:,} bytes\), and the least, Schedule.linear\(64\), .* \({least:,} bytes\)$",
    ):
        sparsescan.plan(jacobians, schedule="blelloch", memory_limit=need - 1)
    assert sparsescan.plan(jacobians, memory_limit=least).schedule == Schedule.linear(64)
    with pytest.raises(MemoryLimitError, match=rf"needs .* \({least:,} bytes\), and the least"):
        sparsescan.plan(jacobians, memory_limit=least - 1)
    # A run of more samples is held to it too.
    plan = sparsescan.plan(jacobians, schedule="blelloch", memory_limit=need)
    plan.exclusive_scan(np.ones(8), jacobians)
    with pytest.raises(MemoryLimitError, match=rf"memory_limit is .* \({need:,} bytes\)"):
        plan.exclusive_scan(np.ones((9, 8)), jacobians)


def test_a_failed_run_leaves_the_plan_as_it_was():
    rng = np.random.default_rng(8)
    jacobians, grad = rng.standard_normal((20, 4, 4)), rng.standard_normal(4)
    plan = sparsescan.plan(jacobians, schedule="blelloch")
    expected = plan.exclusive_scan(grad, jacobians)
    spoilt = jacobians.copy()
    spoilt[7, 1, 2] = np.nan
    for _ in range(3):
        plan.exclusive_scan(grad, spoilt)
        assert plan.exclusive_scan(grad, jacobians).tobytes() == expected.tobytes()
        with pytest.raises(InputError):
            plan.exclusive_scan(grad[:3], jacobians)
        assert plan.exclusive_scan(grad, jacobians).tobytes() == expected.tobytes()
