"""Scans agree with back-propagation, whatever the schedule, the layout of the input or the plan."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    Chain,
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
    chain = data.draw(chains(**sizes))
    schedule = data.draw(schedules(len(chain.jacobians)))
    assert_within(chain.scan(schedule=schedule), chain.oracle(), chain.dtype)


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


def test_exclusive_and_inclusive_differ_by_the_last_gradient():
    rng = np.random.default_rng(0)
    jacobians, grad = rng.standard_normal((9, 4, 4)), rng.standard_normal(4)
    for schedule in every_schedule(9):
        shorter = sparsescan.exclusive_scan(grad, jacobians, schedule=schedule)
        longer = sparsescan.inclusive_scan(grad, jacobians, schedule=schedule)
        assert shorter.tobytes() == longer[:-1].tobytes()
        assert np.allclose(longer[-1], jacobians[-1] @ shorter[-1], rtol=1e-12)


def test_the_last_jacobian_does_not_enter_an_exclusive_scan():
    rng = np.random.default_rng(0)
    jacobians, grad = rng.standard_normal((9, 4, 4)), rng.standard_normal(4)
    changed = jacobians.copy()
    changed[-1] = np.nan
    for schedule in every_schedule(9):
        first, second = (
            sparsescan.exclusive_scan(grad, J, schedule=schedule) for J in (jacobians, changed)
        )
        assert first.tobytes() == second.tobytes()


def test_integers_are_summed_exactly():
    """Where no rounding happens every schedule gives the same numbers: no term lost or doubled."""
    rng = np.random.default_rng(11)
    n, size = 9, 6
    jacobians = [
        sp.csr_array(rng.integers(-2, 3, (size, size)) * mask(rng, "sparse", size, size) * 1.0)
        for _ in range(n)
    ]
    grad = rng.integers(-3, 4, size).astype(float)
    local = list(rng.integers(-3, 4, (n, size)).astype(float))
    expected = sequential(grad, jacobians, local).exact
    for schedule in every_schedule(n):
        result = sparsescan.exclusive_scan(grad, jacobians, local_grads=local, schedule=schedule)
        np.testing.assert_array_equal(result, expected)


# ---------------------------------------------------------------------------------------------
# Forms of the result
# ---------------------------------------------------------------------------------------------


@given(chains(max_n=6))
def test_stacked_in_stacked_out(chain):
    result = chain.scan()
    count = len(chain.jacobians) + chain.inclusive
    assert len(result) == count
    stacked = isinstance(chain.jacobians, (CSRChain, np.ndarray))
    one_size = len({array.shape for array in result}) == 1
    if stacked and one_size:
        assert isinstance(result, np.ndarray)
        assert result.shape == (count, *result[0].shape)
    if not stacked:
        assert isinstance(result, list)


def test_a_list_and_a_stack_give_the_same_bits():
    rng = np.random.default_rng(1)
    jacobians, grad = rng.standard_normal((30, 3, 5, 5)), rng.standard_normal((3, 5))
    for schedule in every_schedule(30):
        stacked = sparsescan.exclusive_scan(grad, jacobians, schedule=schedule)
        listed = sparsescan.exclusive_scan(grad, list(jacobians), schedule=schedule)
        assert isinstance(stacked, np.ndarray)
        assert isinstance(listed, list)
        assert same_bits(stacked, listed)


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


@pytest.mark.parametrize("n", [0, 1])
def test_the_shortest_chains(n):
    grad = np.array([1.0, 2.0, 3.0])
    jacobians = [np.arange(6.0).reshape(2, 3)][:n]
    for schedule in ("auto", "linear", "blelloch", Schedule.chunked(n, 3)):
        exclusive = sparsescan.exclusive_scan(grad, jacobians, schedule=schedule)
        inclusive = sparsescan.inclusive_scan(grad, jacobians, schedule=schedule)
        assert [g.tolist() for g in exclusive] == [[1, 2, 3]] * n
        assert [g.tolist() for g in inclusive] == [[1, 2, 3], [8, 26]][: n + 1]


def test_stacked_chains_without_steps():
    assert sparsescan.plan([]).exclusive_scan(np.ones(3), np.empty((0, 9))).shape == (0, 3)
    for empty in (np.empty((0, 3, 3)), CSRChain(np.empty((0, 2)), [0, 1], [0, 1, 2, 2], (3, 3))):
        assert sparsescan.exclusive_scan(np.ones(3), empty).shape == (0, 3)
        assert sparsescan.inclusive_scan(np.ones(3), empty).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_sums_over_nothing_are_zero(shape):
    rows, cols = shape
    back = np.ones((cols, rows))
    for middle in (np.ones(shape), sp.csr_array(shape), sp.csr_array(np.ones(shape))):
        for schedule in every_schedule(4):
            chain = [middle, back, middle, np.ones((2, rows))]
            result = sparsescan.inclusive_scan(np.ones(cols), chain, schedule=schedule)
            exact = sequential(np.ones(cols), chain, inclusive=True)
            assert_within(result, exact, np.float64)


def test_a_batch_of_none():
    for schedule in every_schedule(5):
        result = sparsescan.exclusive_scan(
            np.empty((0, 3)), np.ones((5, 0, 3, 3)), schedule=schedule
        )
        assert result.shape == (5, 0, 3)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_a_csr_array_gives_the_same_bits(layout, tmp_path):
    rng = np.random.default_rng(4)
    matrix = sp.csr_array(rng.random((6, 6)) * (rng.random((6, 6)) < 0.5))
    odd = matrix.copy()
    for name in ("data", "indices", "indptr"):
        (tmp_path / name).mkdir()
        setattr(odd, name, layouts(getattr(matrix, name), tmp_path / name)[layout])
    grad = rng.standard_normal(6)
    for schedule in every_schedule(7):
        expected = sparsescan.exclusive_scan(grad, [matrix] * 7, schedule=schedule)
        result = sparsescan.exclusive_scan(grad, [odd] * 7, schedule=schedule)
        assert same_bits(expected, result)


def arrays_of(chain: Chain) -> list[np.ndarray]:
    """Every array that a caller passes with a chain."""
    jacobians = chain.jacobians
    whole = isinstance(jacobians, (CSRChain, np.ndarray))
    arrays = [chain.grad, *(a for a in chain.local_grads or [] if a is not None)]
    for step in [jacobians] if whole else jacobians:
        dense = isinstance(step, np.ndarray)
        arrays += [step] if dense else [step.data, step.indices, step.indptr]
    return arrays


@given(st.data())
def test_the_callers_arrays_stay_as_they_are(data):
    chain = data.draw(chains())
    before = [array.tobytes() for array in arrays_of(chain)]
    for schedule in every_schedule(len(chain.jacobians)):
        chain.scan(schedule=schedule)
        chain.scan(sparsescan.plan(chain.jacobians, schedule=schedule))
    assert [array.tobytes() for array in arrays_of(chain)] == before


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


@pytest.mark.parametrize("batch", [(), (4,)], ids=["shared", "batched"])
def test_a_reversed_stack_is_not_copied(batch):
    rng = np.random.default_rng(5)
    in_time = rng.standard_normal((2000, *batch, 16, 16))
    grad = rng.standard_normal((*batch, 16))
    backwards = in_time[::-1]
    chain = CSRChain(
        in_time.reshape(2000, *batch, 256)[::-1], *indices_of(np.ones((16, 16), bool)), (16, 16)
    )
    plan = sparsescan.plan(backwards, schedule="linear")
    expected = sparsescan.exclusive_scan(grad, np.ascontiguousarray(backwards), schedule="linear")
    for jacobians in (backwards, chain):
        for call in (plan.exclusive_scan, sparsescan.exclusive_scan):
            call(grad, jacobians)
            result, extra = peak(lambda call=call, jacobians=jacobians: call(grad, jacobians))
            assert result.tobytes() == expected.tobytes()
            assert extra < in_time.nbytes / 4


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


def banded_plan(**options):
    pattern = Pattern([0, 2, 4], [0, 1, 1, 2], (2, 3))
    return sparsescan.plan([pattern, Pattern.dense((4, 2)), Pattern.diagonal(4)], **options)


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
    plan = banded_plan()
    expected = plan.inclusive_scan(np.ones(3), good)
    wrong = [*good]
    wrong[step] = other
    with pytest.raises(PatternMismatchError, match=rf"^jacobians\[{step}\] .*; expected Pattern"):
        plan.inclusive_scan(np.ones(3), wrong)
    assert same_bits(expected, plan.inclusive_scan(np.ones(3), good))


def test_another_stacked_pattern_is_refused():
    chain = CSRChain(np.ones((5, 2)), [0, 1], [0, 1, 2], (2, 2))
    plan = sparsescan.plan(chain)
    other = CSRChain(np.ones((5, 2)), [1, 0], [0, 1, 2], (2, 2))
    for wrong in (other, np.ones((5, 3)), np.ones((5, 2, 4))):
        with pytest.raises(PatternMismatchError, match=r"jacobians.* is .*; expected"):
            plan.exclusive_scan(np.ones(2), wrong)


def test_another_length_is_refused():
    plan = sparsescan.plan(np.ones((5, 2, 2)))
    with pytest.raises(InputError, match="jacobians has 4 steps; expected 5"):
        plan.exclusive_scan(np.ones(2), np.ones((4, 2, 2)))


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


def test_a_plan_prints_itself():
    plan = sparsescan.plan(np.ones((12, 3, 3)), schedule="blelloch")
    assert "blelloch" in str(plan)
    assert "12 Jacobians" in repr(plan)


# ---------------------------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["grad", "jacobian", "local"])
def test_mixed_input_promotes(which):
    """One float64 array makes the result, and all arithmetic behind it, float64."""
    rng = np.random.default_rng(9)
    arrays = {
        "grad": rng.standard_normal(4),
        "jacobian": rng.standard_normal((4, 4)),
        "local": rng.standard_normal(4),
    }
    for name in arrays:
        if name != which:
            arrays[name] = arrays[name].astype(np.float32)
    others = list(rng.standard_normal((8, 4, 4)).astype(np.float32))
    jacobians = [*others[:4], arrays["jacobian"], *others[4:]]
    local = [None] * 9
    local[5] = arrays["local"]
    expected = sequential(arrays["grad"], jacobians, local, dtype=np.float64)
    for schedule in every_schedule(9):
        result = sparsescan.exclusive_scan(
            arrays["grad"], jacobians, local_grads=local, schedule=schedule
        )
        assert_within(result, expected, np.float64)


def test_float32_stays_float32():
    for jacobians in (np.ones((3, 2, 2), "f4"), [np.ones((2, 2), ">f4")] * 3):
        assert sparsescan.exclusive_scan(np.ones(2, "f4"), jacobians)[2].dtype == np.float32


def test_plain_lists_are_float64():
    result = sparsescan.exclusive_scan([1.0, 2.0], [[[1.0, 0.0], [0.0, 2.0]]] * 3)
    assert [g.tolist() for g in result] == [[1, 2], [1, 4], [1, 8]]
