"""Steps that a scan solves with, against back-propagation by dense solves in float64.

The oracle carries, beside each gradient, how far a scan may be from it. With ``A x = b`` by LU
factors, the backward error is at most ``g(n) eps |A|`` (Higham, Theorem 9.4, for the growth that
matrices with a large diagonal, in any order of rows, have), so

    |x̂ - x| ≤ |A⁻¹| (|b̂ - b| + g(n) eps |A| |x|).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest
import scipy.sparse as sp
from fresh_python import run_python
from hypothesis import given
from hypothesis import strategies as st
from oracles import mask, on_pattern, same_bits
from sampling import slow

import sparsescan
from sparsescan import (
    BatchedCSR,
    DeviceError,
    ImplicitChain,
    ImplicitPattern,
    ImplicitStep,
    InputError,
    InputTypeError,
    MemoryLimitError,
    Pattern,
    PatternMismatchError,
    ScanPlan,
    Schedule,
    SingularMatrixError,
    SolveStep,
)
from sparsescan.execution import solves
from sparsescan.symbolic import factorisation
from sparsescan.symbolic.factorisation import factorisation_of
from sparsescan.symbolic.pattern import of_mask

STRUCTURES = ("diagonal", "tridiagonal", "banded", "cyclic", "full", "turned", "scattered")


def where(rng: np.random.Generator, structure: str, n: int) -> np.ndarray:
    """Return where a square matrix has entries, for which there are regular ones."""
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    if structure == "full":
        return np.ones((n, n), bool)
    if structure in ("diagonal", "tridiagonal", "banded", "cyclic"):
        below, above = {"diagonal": (0, 0), "banded": (3, 2)}.get(structure, (1, 1))
        entries = (distance <= below) & (-distance <= above)
        if structure == "cyclic":
            entries[0, -1] = entries[-1, 0] = True
        return entries
    entries = (rng.random((n, n)) < 2 / n) | np.eye(n, dtype=bool)
    # No entry need be on the diagonal, so that rows are exchanged.
    return entries[rng.permutation(n)] if structure == "turned" else entries


def regular(rng: np.random.Generator, entries: np.ndarray, dtype: Any, *lead: int) -> np.ndarray:
    """Return dense matrices with entries there, far from singular."""
    n = len(entries)
    # A permutation within the pattern has the large entries.
    rows, cols = sp.csgraph.maximum_bipartite_matching(sp.csr_array(entries)), np.arange(n)
    values = rng.uniform(-1, 1, (*lead, n, n)) * entries
    large = np.zeros((n, n))
    large[rows, cols] = 1
    values += large * (np.abs(values).sum(-1, keepdims=True) + 1) * rng.choice([-1, 1], (n, 1))
    return values.astype(dtype)


def packed(dense: np.ndarray, entries: np.ndarray, form: str) -> Any:
    """Return matrices of a pattern in some form."""
    if form == "dense":
        return dense
    return on_pattern(np.ascontiguousarray(dense[..., entries]), of_mask(entries))


class Step:
    """A step of a chain, and the dense matrices that the oracle multiplies by or solves with."""

    def __init__(self, given: Any, dense: list[tuple[np.ndarray, bool]]) -> None:
        self.given, self.dense = given, dense

    def __call__(
        self, x: np.ndarray, error: np.ndarray, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        for matrix, is_solved in self.dense:
            a = matrix.astype(np.float64)
            n = a.shape[-1]
            if is_solved:
                inverse = np.linalg.inv(a)
                x = (inverse @ x[..., None])[..., 0]
                lost = np.abs(a) @ np.abs(x)[..., None]
                error = (np.abs(inverse) @ (error[..., None] + 20 * n * eps * lost))[..., 0]
            else:
                lost = (np.abs(a) @ np.abs(x)[..., None])[..., 0]
                error = (np.abs(a) @ error[..., None])[..., 0] + (n + 2) * eps * lost
                x = (a @ x[..., None])[..., 0]
        return x, error


def any_step(
    rng: np.random.Generator, kind: str, rows: int, cols: int, batch: int | None, dtype: Any
) -> Step:
    lead = () if batch is None or rng.random() < 0.4 else (batch,)
    form = rng.choice(["sparse", "dense"])
    if kind == "explicit":
        entries = mask(rng, "sparse", rows, cols)
        dense = (rng.uniform(-1, 1, (*lead, rows, cols)) * entries).astype(dtype)
        return Step(packed(dense, entries, form), [(dense, False)])
    entries = where(rng, str(rng.choice(STRUCTURES)), rows)
    solved = regular(rng, entries, dtype, *lead)
    if kind == "solve":
        given = SolveStep(packed(solved, entries, form))
        return Step(given, [(solved, True)])
    other = mask(rng, "sparse", rows, rows)
    dense = (rng.uniform(-1, 1, (*lead, rows, rows)) * other).astype(dtype)
    pairs = [(solved, entries, True), (dense, other, False)]
    pairs = pairs[::-1] if rng.random() < 0.5 else pairs
    pattern = ImplicitPattern(
        [of_mask(each) for _, each, _ in pairs],
        solved=[k for k, (_, _, is_solved) in enumerate(pairs) if is_solved],
    )
    values = [np.ascontiguousarray(array[..., each]) for array, each, _ in pairs]
    return Step(ImplicitStep(values, pattern), [(array, flag) for array, _, flag in pairs])


class Case:
    """A chain with solves, and how to scan it."""

    def __init__(self, rng: np.random.Generator) -> None:
        n, self.batch = int(rng.integers(1, 8)), rng.choice([None, None, 1, 3, 9])
        lead = () if self.batch is None else (int(self.batch),)
        dtypes = [["f4"], ["f8"], ["f4", "f8"]][rng.integers(3)]
        # SuperLU has the large ones.
        size = int(rng.choice([1, 2, 3, 5, 6, 12, 110]))
        kinds = ["solve", "solve", "implicit", "explicit"]
        self.steps, self.sizes = [], [size]
        for _ in range(n):
            kind = str(rng.choice(kinds))
            rows = int(rng.integers(1, 6)) if kind == "explicit" and size < 110 else size
            batch = None if self.batch is None else int(self.batch)
            self.steps.append(any_step(rng, kind, rows, size, batch, rng.choice(dtypes)))
            size = rows
            self.sizes.append(size)
        self.inclusive, self.reverse = (bool(flag) for flag in rng.integers(2, size=2))
        self.count = n + self.inclusive
        self.local = None
        if rng.random() < 0.5:
            self.local = [
                rng.standard_normal((*lead, size)).astype(rng.choice(dtypes))
                if rng.random() < 0.5
                else None
                for size in self.sizes[: self.count]
            ]
        self.grad = rng.standard_normal((*lead, self.sizes[0])).astype(rng.choice(dtypes))
        given = [array for array in self.local or () if array is not None]
        values = [matrix for step in self.steps for matrix, _ in step.dense]
        self.dtype = np.result_type(self.grad, *given, *values)

    def expected(self) -> list[tuple[np.ndarray, np.ndarray]]:
        eps = float(np.finfo(self.dtype).eps)
        x, gradients = self.grad.astype(np.float64), []
        error = np.zeros_like(x)
        for k in range(self.count):
            if k > 0:
                x, error = self.steps[k - 1](x, error, eps)
            if self.local is not None and self.local[k] is not None:
                x = x + self.local[k]
                error = error + eps * np.abs(x)
            gradients.append((x, error))
        return gradients

    def scan(self, plan: ScanPlan | None = None) -> Any:
        name = "inclusive_scan" if self.inclusive else "exclusive_scan"
        turn = slice(None, None, -1 if self.reverse else 1)
        options: dict[str, Any] = {} if plan is not None else {"reverse": self.reverse}
        return getattr(plan or sparsescan, name)(
            self.grad,
            [step.given for step in self.steps][turn],
            local_grads=None if self.local is None else self.local[turn],
            **options,
        )[turn]

    def check(self, result: Any) -> None:
        expected = self.expected()
        assert len(result) == len(expected)
        for k, (actual, (exact, error)) in enumerate(zip(result, expected, strict=True)):
            assert actual.dtype == self.dtype, k
            assert actual.shape == exact.shape, k
            tiny = np.finfo(self.dtype).tiny
            assert (np.abs(actual - exact) <= error + tiny).all(), (
                k,
                np.abs(actual - exact),
                error,
            )


# ---------------------------------------------------------------------------------------------
# Scans
# ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_scans_are_back_propagation(seed: int) -> None:
    case = Case(np.random.default_rng(seed))
    before = pickle.dumps([step.given for step in case.steps])
    case.check(case.scan())
    patterns = [getattr(step.given, "pattern", None) for step in case.steps]
    if None not in patterns and not case.reverse:
        plan = sparsescan.plan(patterns, schedule="linear")
    else:
        turn = slice(None, None, -1 if case.reverse else 1)
        steps = [step.given for step in case.steps][turn]
        plan = sparsescan.plan(steps, reverse=case.reverse)
    first = case.scan(plan)
    case.check(first)
    assert same_bits(first, case.scan(plan))
    assert pickle.dumps([step.given for step in case.steps]) == before


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_chains_in_a_few_arrays(seed: int, reverse: bool) -> None:
    """An ImplicitChain of ``[Mᵀ, Nᵀ]``, with the matrices of each step, of each sample, or one."""
    rng = np.random.default_rng(seed)
    n, size, batch = int(rng.integers(1, 7)), int(rng.integers(1, 8)), 3
    entries, other = where(rng, str(rng.choice(STRUCTURES)), size), np.ones((size, size), bool)
    lead = [(), (n,), (n, batch)][rng.integers(3)]
    solved = regular(rng, entries, "f8", *lead)
    dense = rng.uniform(-1, 1, (n, batch, size, size))
    pattern = ImplicitPattern([of_mask(entries), of_mask(other)], solved=[0])
    chain = ImplicitChain([solved[..., entries], dense.reshape(n, batch, -1)], pattern)
    grad = rng.standard_normal((batch, size))
    result = sparsescan.inclusive_scan(grad, chain, reverse=reverse)
    assert result.shape == (n + 1, batch, size)
    order = range(n)[::-1] if reverse else range(n)
    x, error, eps = grad, np.zeros_like(grad), np.finfo(float).eps
    for k, one in zip(order, result[::-1][1:] if reverse else result[1:], strict=True):
        step = Step(None, [(solved[k] if lead else solved, True), (dense[k], False)])
        x, error = step(x, error, eps)
        assert (np.abs(one - x) <= error).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, *slow(4, 9), 40, 130])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_method_solves(structure: str, size: int, dtype: Any) -> None:
    rng = np.random.default_rng(size)
    entries = where(rng, structure, size)
    matrix = regular(rng, entries, dtype)
    step = SolveStep(packed(matrix, entries, "sparse"))
    for samples in (1, 5):
        x = rng.standard_normal((samples, size)).astype(dtype)
        y = sparsescan.inclusive_scan(x, [step])[1]
        assert y.dtype == dtype
        exact, error = Step(None, [(matrix, True)])(
            x.astype(float), np.zeros(x.shape), np.finfo(dtype).eps
        )
        assert (np.abs(y - exact) <= error).all()


def test_the_methods_are_those_that_are_documented() -> None:
    rng = np.random.default_rng(0)

    def method(structure: str, size: int) -> str:
        return factorisation_of(of_mask(where(rng, structure, size))).method

    assert method("tridiagonal", 30) == method("tridiagonal", 2000) == "tridiagonal"
    assert method("banded", 30) == method("diagonal", 9) == "banded"
    assert method("full", 30) == method("full", 300) == method("cyclic", 30) == "dense"
    assert method("cyclic", 300) == method("scattered", 300) == "sparse"


def test_factors_of_a_pattern_take_as_much_as_is_said() -> None:
    """Fill-in and multiply-adds of sparse factors, for values that need no exchange of rows."""
    rng = np.random.default_rng(1)
    entries = where(rng, "cyclic", 300) | (rng.random((300, 300)) < 5e-4)
    form = factorisation_of(of_mask(entries))
    assert form.method == "sparse"
    # The rows in this order, and the columns in the order in which they get their pivots: those
    # of the same numbers, since the diagonal is large.
    lower = entries[np.ix_(form.order, form.order)]
    work = 0
    for k in range(300):
        rows, cols = np.flatnonzero(lower[k + 1 :, k]) + k + 1, np.flatnonzero(lower[k, k + 1 :])
        lower[np.ix_(rows, cols + k + 1)] = True
        # SuperLU has the transpose.
        work += len(cols) * (len(rows) + 1)
    assert form.multiply_adds == work
    # SuperLU stores the unit diagonal, and some zeros so that columns have one structure.
    count = np.count_nonzero(lower) + 300
    assert count <= form.entries <= 2 * count
    dense = factorisation_of(Pattern.dense((30, 30)))
    assert dense.entries == 900
    assert dense.multiply_adds == sum(k * (k + 1) for k in range(30))


# ---------------------------------------------------------------------------------------------
# Orderings and factorisations are kept
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count numeric factorisations, and patterns that are analysed."""
    counts = {"factorised": 0, "analysed": 0}

    def counting(module: Any, name: str, key: str) -> None:
        real = getattr(module, name)

        def call(*args: Any) -> Any:
            counts[key] += 1
            return real(*args)

        monkeypatch.setattr(module, name, call)

    counting(solves, "factorise", "factorised")
    counting(factorisation, "_analyse", "analysed")
    return counts


def random_steps(
    rng: np.random.Generator, n: int, structure: str = "scattered", size: int = 120
) -> tuple[np.ndarray, Pattern, np.ndarray]:
    """Return values of `n` matrices, their pattern, and where it has entries."""
    entries = where(rng, structure, size)
    values = np.ascontiguousarray(regular(rng, entries, "f8", n)[:, entries])
    return values, of_mask(entries), entries


def solve_steps(values: Any, pattern: Pattern) -> list[SolveStep]:
    return [SolveStep(BatchedCSR.from_pattern(one[None], pattern)) for one in values]


def test_a_pattern_is_ordered_once(counts: dict[str, int]) -> None:
    rng = np.random.default_rng(2)
    values, pattern, _ = random_steps(rng, 20)
    plan = sparsescan.plan([ImplicitPattern([pattern], solved=[0])] * 20)
    assert counts == {"factorised": 0, "analysed": 1}
    grad = rng.standard_normal((1, 120))
    plan.inclusive_scan(grad, solve_steps(values, pattern))
    assert counts == {"factorised": 20, "analysed": 1}
    plan.inclusive_scan(grad, solve_steps(2 * values, pattern))
    sparsescan.exclusive_scan(grad, solve_steps(3 * values, pattern))
    # The last step does not enter an exclusive scan.
    assert counts == {"factorised": 59, "analysed": 1}


def test_equal_matrices_are_factorised_once(counts: dict[str, int]) -> None:
    rng = np.random.default_rng(3)
    (a, b, c, d), pattern, _ = random_steps(rng, 4)
    plan = sparsescan.plan([ImplicitPattern([pattern], solved=[0])] * 8)
    grad = rng.standard_normal((1, 120))

    def factorised(*values: np.ndarray) -> int:
        before = counts["factorised"]
        result = plan.inclusive_scan(grad, solve_steps(values, pattern))
        once = sparsescan.plan([step.pattern for step in solve_steps(values, pattern)])
        count = counts["factorised"] - before
        assert same_bits(result, once.inclusive_scan(grad, solve_steps(values, pattern)))
        return count

    assert factorised(*[a] * 8) == 1  # one array
    assert factorised(*[a.copy() for _ in range(8)]) == 0  # equal values, in a later run
    assert factorised(b, c, b, c, c, b, b, c) == 2  # in turns
    assert factorised(*[d.copy(), a.copy()] * 4) == 1
    step = solve_steps([c * 2], pattern)[0]
    before = counts["factorised"]
    plan.inclusive_scan(grad, [step] * 8)
    assert counts["factorised"] == before + 1
    # Values that the caller has changed since.
    step.values[0][...] *= 3
    result = plan.inclusive_scan(grad, [step] * 8)
    assert counts["factorised"] == before + 2
    assert same_bits(result, sparsescan.inclusive_scan(grad, [step] * 8))


def test_more_matrices_than_are_kept(counts: dict[str, int]) -> None:
    rng = np.random.default_rng(5)
    values, pattern, entries = random_steps(rng, 40)
    order = rng.integers(0, 40, 200)
    steps = solve_steps(values, pattern)
    result = sparsescan.inclusive_scan(rng.standard_normal((1, 120)), [steps[k] for k in order])
    x = result[0][0]
    dense = np.zeros((40, 120, 120))
    dense[:, entries] = values
    inverses = np.linalg.inv(dense)
    for one, k in zip(result[1:], order, strict=True):
        x = inverses[k] @ x
        assert np.abs(one[0] - x).max() <= 1e-11 * np.abs(x).max()
        x = one[0]
    assert counts["analysed"] == 1


# ---------------------------------------------------------------------------------------------
# Range
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 120])
def test_gradients_are_finite_where_back_propagations_are(size: int) -> None:
    """Long chains that take the gradient to the ends of the range and back."""
    rng = np.random.default_rng(8)
    values, pattern, entries = random_steps(rng, 1, size=size)
    values = values / np.abs(values).max()
    scales = [1e-30, 1e-30, 1e30, 1e30] * 30
    steps = [solve_steps(values * scale, pattern)[0] for scale in scales]
    result = sparsescan.inclusive_scan(np.full((1, size), 1e-200), steps)
    dense = np.zeros((size, size))
    dense[entries] = values[0]
    x, inverse = np.full(size, 1e-200), np.linalg.inv(dense)
    for one, scale in zip(result[1:], scales, strict=True):
        x = inverse @ x / scale
        assert np.isfinite(x).all()
        assert np.abs(one[0] - x).max() <= 1e-9 * np.abs(x).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_not_finite_is_nan(structure: str, bad: float) -> None:
    rng = np.random.default_rng(9)
    values, pattern, _ = random_steps(rng, 2, structure)
    values[1, rng.integers(pattern.nnz)] = bad
    first, second = solve_steps(values, pattern)
    result = sparsescan.inclusive_scan(np.ones((1, 120)), [first, second, first])
    assert np.isfinite(result[1]).all()
    assert np.isnan(result[2]).all()
    assert np.isnan(result[3]).all()


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_singular_matrix_is_named(structure: str) -> None:
    rng = np.random.default_rng(10)
    for size in (1, 4, 130):
        entries = where(rng, structure, size)
        values = regular(rng, entries, "f8", 3)
        values[2, :, size // 2] = 0
        good, singular = (packed(values[k], entries, "sparse") for k in (0, 2))
        steps = [SolveStep(good)] * 4 + [SolveStep(singular)]
        plan = sparsescan.plan([steps[0].pattern] * 5)
        grad = np.ones((3, size))
        for scan in (plan.inclusive_scan, sparsescan.inclusive_scan):
            with pytest.raises(SingularMatrixError, match=r"^jacobians\[4\] is singular: ") as info:
                scan(grad, steps)
            assert isinstance(info.value, np.linalg.LinAlgError)
            assert isinstance(info.value, InputError)
        with pytest.raises(SingularMatrixError, match=r"^jacobians\[1\] is singular: "):
            sparsescan.inclusive_scan(grad, [good, SolveStep(singular), good], reverse=True)
        batch = SolveStep(packed(values, entries, "sparse"))
        with pytest.raises(SingularMatrixError, match=r"^jacobians\[0\] is singular in sample 2: "):
            sparsescan.inclusive_scan(grad, [batch])
        # It does not enter, and the plan goes on.
        plan.exclusive_scan(grad, steps)
        assert same_bits(
            plan.inclusive_scan(grad, steps[:4] + steps[:1]),
            sparsescan.inclusive_scan(grad, [steps[0]] * 5),
        )


def test_a_pattern_of_singular_matrices() -> None:
    """None of its matrices is regular, which the order of its columns cannot say."""
    entries = np.zeros((200, 200), bool)
    entries[0], entries[:, 0], entries[5, 5] = True, True, True
    step = SolveStep(sp.csr_array(entries.astype(float)))
    assert factorisation_of(step.pattern.factors[0]).method == "sparse"
    with pytest.raises(SingularMatrixError, match=r"jacobians\[0\]"):
        sparsescan.inclusive_scan(np.ones(200), [step])


def test_schedules_that_multiply_are_refused() -> None:
    eye = np.eye(3)
    chain = [eye, eye, SolveStep(eye), eye, eye, eye]
    for schedule in ("blelloch", "truncated:1", "chunked:3", Schedule.blelloch(6)):
        for reverse, at in ((False, 2), (True, 3)):
            steps = chain[::-1] if reverse else chain
            for call in (
                lambda s=steps, r=reverse, k=schedule: sparsescan.plan(s, schedule=k, reverse=r),
                lambda s=steps, r=reverse, k=schedule: sparsescan.exclusive_scan(
                    np.ones(3), s, schedule=k, reverse=r
                ),
            ):
                text = rf"schedule is Schedule\..*multiplies.*jacobians\[{at}\] is one to solve"
                with pytest.raises(InputError, match=text):
                    call()
    plan = sparsescan.plan(chain)
    assert plan.schedule == Schedule.linear(6)
    assert "inverse" in plan.reason
    for schedule in (
        "linear",
        "truncated:0",
        "chunked:1",
        Schedule.from_levels(6, [(f"step {k}", [[(0, k, k + 1)]]) for k in range(1, 6)]),
    ):
        result = sparsescan.inclusive_scan([1.0, 2.0, 3.0], chain, schedule=schedule)
        assert np.array_equal(result, [[1.0, 2.0, 3.0]] * 7)


def test_what_is_malformed_is_refused() -> None:
    for bad, kind in (
        (np.ones((2, 3)), InputError),
        (np.ones(3), InputError),
        (Pattern.diagonal(2), InputTypeError),
        (SolveStep(np.eye(2)), InputTypeError),
        (sp.coo_array(np.eye(2)), InputTypeError),
        (np.eye(2, dtype=int), InputTypeError),
        ("eye", InputTypeError),
        (None, InputTypeError),
    ):
        with pytest.raises(kind, match=r"^matrix "):
            SolveStep(bad)
    step, diagonal, patterns = SolveStep(np.eye(2)), Pattern.diagonal(2), ImplicitPattern
    plan, explicit = sparsescan.plan([step] * 2), sparsescan.plan([np.eye(2)] * 2)
    x, rectangle = np.ones(2), [Pattern.dense((2, 3))]
    for call, error, message in (
        (
            lambda: patterns(rectangle, solved=[0]),
            InputError,
            r"factors\[0\] has .*; expected a squ",
        ),
        (
            lambda: patterns([diagonal], solved=[1]),
            InputError,
            "solved has 1; expected positions f",
        ),
        (
            lambda: patterns([diagonal], solved=0),
            InputTypeError,
            "solved is 0; expected a sequence",
        ),
        (lambda: patterns([diagonal]), InputError, "at least two"),
        (
            lambda: explicit.inclusive_scan(x, [step] * 2),
            InputTypeError,
            r"jacobians\[0\] is a Sol",
        ),
        (lambda: setattr(step, "shape", (3, 3)), InputError, "cannot be changed"),
    ):
        with pytest.raises(error, match=message):
            call()
    for other in (np.eye(2), SolveStep(sp.csr_array(np.eye(2)))):
        with pytest.raises(PatternMismatchError, match=r"jacobians\[1\]"):
            plan.inclusive_scan(x, [step, other])
    plan.inclusive_scan(np.ones((1, 2)), [SolveStep(np.eye(2)[None])] * 2)


def test_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy.install(monkeypatch)
    steps = [np.eye(2), SolveStep(np.eye(2))]
    text = r"jacobians\[1\] is a step to solve with, which runs on the CPU only"
    with pytest.raises(DeviceError, match=text):
        sparsescan.plan(steps, device="cuda")
    with pytest.raises(DeviceError, match=text):
        sparsescan.plan([cupy.eye(2), SolveStep(cupy.eye(2))])


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def test_predicted_times_grow_with_the_work() -> None:
    """By factorisations, by solves, and by samples with matrices of their own."""

    def predicted(structure: str, size: int, batch: int = 1, shared: bool = False) -> float:
        entries = where(np.random.default_rng(0), structure, size)
        step = ImplicitPattern([of_mask(entries)], shared=[0] * shared, solved=[0])
        plan = sparsescan.plan([step] * 5, batch=batch)
        return sum(level["nanoseconds"] for level in plan.to_dict()["levels"])

    assert predicted("tridiagonal", 100) < predicted("tridiagonal", 4000)
    assert predicted("full", 20) < predicted("full", 200)
    assert predicted("cyclic", 200) < predicted("cyclic", 2000)
    assert predicted("cyclic", 200, 9, shared=True) < predicted("cyclic", 200, 9)


def test_copies_are_equal() -> None:
    step = SolveStep(sp.csr_array(np.eye(3) + np.diag([1.0, 2.0], 1)))
    for twin in (copy.copy(step), copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert isinstance(twin, SolveStep)
        assert twin.pattern == step.pattern
        assert hash(twin.pattern) == hash(step.pattern)
        assert repr(twin) == repr(step) == "SolveStep(Pattern((3, 3), nnz=5, general))"
        assert same_bits(
            sparsescan.inclusive_scan(np.ones(3), [twin]),
            sparsescan.inclusive_scan(np.ones(3), [step]),
        )
    factor = step.pattern.factors[0]
    assert step.pattern != ImplicitPattern([factor, factor], solved=[0])
    assert ImplicitPattern([factor] * 2, solved=[0]) != ImplicitPattern([factor] * 2, solved=[1])
    assert repr(step.pattern) == "ImplicitPattern((3, 3); (3, 3) general and solved)"
    assert step.pattern.jacobian is Pattern.dense((3, 3))


# ---------------------------------------------------------------------------------------------
# Memory and threads
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["tridiagonal", "banded", "full"])
@pytest.mark.parametrize("batch", [4, *slow(1)])
def test_memory_is_what_the_plan_says(structure: str, batch: int) -> None:
    """LAPACK's, which NumPy allocates. Nothing is made for gradients but what is returned."""
    rng = np.random.default_rng(12)
    size = 120 if structure == "full" else 2000
    entries = where(rng, structure, size)
    pattern = of_mask(entries)
    values = np.empty((12, batch, pattern.nnz))
    for k in range(12):
        values[k] = regular(rng, entries, "f8")[entries] * (1 + np.arange(batch))[:, None]
    steps = [SolveStep(BatchedCSR.from_pattern(one, pattern)) for one in values]
    grad = rng.standard_normal((batch, size))
    sparsescan.inclusive_scan(grad, steps)  # what is imported and compiled late
    gc.collect()
    tracemalloc.start()
    try:
        plan = sparsescan.plan([steps[0].pattern] * 12, batch=batch)
        tracemalloc.reset_peak()
        grads = plan.inclusive_scan(grad, steps)
        peak = tracemalloc.get_traced_memory()[1] - sum(array.nbytes for array in grads)
    finally:
        tracemalloc.stop()
    assert peak <= plan.workspace_bytes <= 6 * peak
    least = plan.workspace_bytes
    with pytest.raises(MemoryLimitError, match="memory_limit"):
        sparsescan.plan([steps[0].pattern] * 12, batch=batch, memory_limit=least - 1)
    held = sparsescan.plan([steps[0].pattern] * 12, batch=batch, memory_limit=least)
    assert same_bits(held.inclusive_scan(grad, steps), grads)


MEMORY = """
    import numpy as np, scipy.sparse as sp
    from sparsescan.execution.solves import factorise
    from sparsescan.symbolic.factorisation import factorisation_of
    from sparsescan.symbolic.pattern import of_mask, Pattern, rows_of

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    m = 90
    line = sp.diags_array([np.ones(m - 1), np.ones(m), np.ones(m - 1)], offsets=[-1, 0, 1])
    plane = sp.kron(sp.eye_array(m), line) + sp.kron(line, sp.eye_array(m))
    plane = sp.csr_array(plane)
    plane.sort_indices()
    pattern = Pattern(plane.indptr, plane.indices, plane.shape)
    form = factorisation_of(pattern)
    values = np.random.default_rng(0).uniform(0.5, 1, pattern.nnz)
    values[rows_of(pattern) == pattern.indices] += 10
    for dtype in ("f4", "f8"):
        given = values.astype(dtype)
        kept = [factorise(form, given)]
        before = resident()
        kept += [factorise(form, given) for _ in range(6)]
        print(form.method, (resident() - before) / 6, form.nbytes(given.itemsize))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say")
def test_superlu_takes_what_is_said(tmp_path: Path) -> None:
    for line in run_python(MEMORY, tmp_path).splitlines():
        method, taken, said = line.split()
        assert method == "sparse"
        assert 0.2 * float(said) < float(taken) <= float(said)


@pytest.mark.parametrize("least", [0, 10**9])
def test_bits_do_not_depend_on_threads(
    with_threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    counts: dict[str, int],
    least: int,
) -> None:
    """Nor does what is factorised, nor which error comes first, by one thread or by many."""
    monkeypatch.setattr(solves, "_LONG", least)
    rng = np.random.default_rng(13)
    values, pattern, _ = random_steps(rng, 30)
    other = rng.uniform(-0.1, 0.1, (120, 120))
    chain: list[Any] = []
    for k, step in enumerate(solve_steps(np.repeat(values, 2, axis=0), pattern)):
        chain += [step, other] if k % 3 else [step]
    grad = rng.standard_normal((1, 120))
    results = []
    for count in (1, 2, 3, 7):
        with_threads(count)
        before = counts["factorised"]
        results.append(sparsescan.inclusive_scan(grad, chain, schedule="linear"))
        assert counts["factorised"] == before + 30
    assert all(same_bits(results[0], other) for other in results[1:])
    singular = solve_steps([0 * values[0], 0 * values[1]], pattern)
    for count in (1, 3, 7):
        with_threads(count)
        with pytest.raises(SingularMatrixError, match=r"^jacobians\[2\] is singular"):
            sparsescan.inclusive_scan(grad, [*chain[:2], *singular])


def test_threads_share_a_plan() -> None:
    rng = np.random.default_rng(14)
    values, pattern, _ = random_steps(rng, 6)
    plan = sparsescan.plan([ImplicitPattern([pattern], solved=[0])] * 6)
    grad = rng.standard_normal((1, 120))
    chains = [solve_steps(values * scale, pattern) for scale in (1, 2, 3, 4)]
    expected = [sparsescan.inclusive_scan(grad, chain) for chain in chains]

    def is_right(k: int) -> bool:
        grads = [plan.inclusive_scan(grad, chains[k]) for _ in range(10)]
        return all(same_bits(each, expected[k]) for each in grads)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(4)))


def test_values_that_another_thread_changes_do_no_harm() -> None:
    """Each matrix is one that was there at some time, so a singular one may be seen."""
    rng = np.random.default_rng(15)
    values, pattern, _ = random_steps(rng, 1)
    step = solve_steps(values, pattern)[0]
    grad, array = rng.standard_normal((1, 120)), step.values[0]
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            for factor in (np.nan, 0.0, 1.0):
                array[...] = values * factor

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            with contextlib.suppress(SingularMatrixError):
                sparsescan.inclusive_scan(grad, [step] * 3)
    finally:
        ended.set()
        thread.join()
    array[...] = values
    fresh = sparsescan.inclusive_scan(grad, solve_steps(values.copy()[:1].repeat(3, 0), pattern))
    assert same_bits(sparsescan.inclusive_scan(grad, [step] * 3), fresh)
