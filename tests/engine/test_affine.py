"""Linear recurrences in the order of time, beside loops in float64, and their gradients."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import sparsescan
from sparsescan import CSRChain, InputError, InputTypeError, Pattern, affine_scan, affine_scan_vjp
from sparsescan.execution import threads
from sparsescan.ops import affine
from sparsescan.symbolic.pattern import of_mask

Array = NDArray[Any]


class Case(NamedTuple):
    """The arguments of a call, and the dense matrices that its steps apply."""

    matrices: Any
    options: dict[str, Any]
    offsets: Array | None
    initial: Array | None
    applied: Array  # (T, 1 or batch, size, size)
    batch: int | None
    dtype: np.dtype[Any]
    as_given: Callable[[Array], Array]  # what gradients (T, batch, size, size) are in its form

    def given(self, array: Array | None, shape: tuple[int, ...]) -> Array:
        """Return an array, or its default, for every sample, in double precision."""
        whole = np.zeros(shape) if array is None else array.astype(self.applied.dtype)
        missing = array is not None and array.ndim < len(shape)
        return np.broadcast_to(whole[..., None, :] if missing else whole, shape)

    def inputs(self) -> tuple[Array, Array]:
        steps, samples, size = self.steps, self.batch or 1, self.applied.shape[-1]
        offsets, initial = self.offsets, self.initial
        if self.batch is None:
            offsets = None if offsets is None else offsets[:, None]
            initial = None if initial is None else initial[None]
        return (
            self.given(offsets, (steps, samples, size)),
            self.given(initial, (samples, size)),
        )

    @property
    def steps(self) -> int:
        return len(self.applied)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    drawn = rng.standard_normal(shape)
    if dtype.kind == "c":
        drawn = drawn + 1j * rng.standard_normal(shape)
    return drawn.astype(dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # A transposed product takes columns eight by eight, the last of which may overlap.
    steps, size = draw(st.integers(0, 12)), draw(st.integers(1, 20) | st.sampled_from([33, 47, 65]))
    batch = draw(st.sampled_from([None, 1, 2, 3, 7, 8, 9, 17]))
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8", "c8", "c16"])))
    kind = draw(st.sampled_from(["dense", "diagonal", "number", "general"]))
    size = max(size, 2) if kind == "number" else size
    kept = {
        "dense": np.ones((size, size), bool),
        "diagonal": np.eye(size, dtype=bool),
        "number": np.eye(size, dtype=bool),
        "general": rng.random((size, size)) < draw(st.sampled_from([0.0, 0.1, 0.5])),
    }[kind]
    has_batch = batch is not None and draw(st.booleans())
    form = draw(st.sampled_from(["rows", "columns", "backwards", "broadcast", "double", "one"]))
    needs_offsets = form == "one" or kind == "number"

    def vectors(lead: tuple[int, ...], *, needed: bool = False) -> Array | None:
        choice = draw(st.sampled_from(["none", "shared", "each"][needed:]))
        if choice == "none":
            return None
        own = (batch,) if batch is not None and choice == "each" else ()
        return normal(rng, (*lead, *own, size), dtype)

    offsets, initial = vectors((steps,), needed=needs_offsets), vectors(())
    # One matrix for all steps of each sample has an axis of steps, too.
    lead: tuple[int, ...] = (1 if form == "one" else steps,)
    lead = (*lead, batch) if has_batch and batch is not None else lead
    if kind == "number":
        dense = normal(rng, (*lead, 1, 1), dtype) * kept * dtype.type(0.8)
    else:
        dense = normal(rng, (*lead, size, size), dtype) * kept
        dense = (dense / np.sqrt(max(kept.sum() / size, 1))).astype(dtype)
    if form == "columns":
        dense = np.ascontiguousarray(dense.swapaxes(-1, -2)).swapaxes(-1, -2)
    elif form == "backwards":
        dense = np.ascontiguousarray(dense[::-1])[::-1]
    elif form == "broadcast" and steps:
        dense = np.broadcast_to(dense[0], dense.shape)
    elif form == "double":
        dense = dense.astype(np.result_type(dtype, np.float64))
    options: dict[str, Any] = {}
    matrices, pattern = dense, of_mask(kept)
    is_values = kind != "dense"
    if kind == "number":
        matrices = dense[..., 0, 0]
        if has_batch or size == 1 or steps == size or draw(st.booleans()):
            matrices = matrices[..., None]
    elif kind != "dense" or draw(st.booleans()):
        is_values, matrices = True, dense[..., kept]
        if form == "broadcast" and steps:
            matrices = np.broadcast_to(matrices[0], matrices.shape)
        if form == "one" and not has_batch and draw(st.booleans()):
            matrices = matrices[0]
        # Shapes say what diagonals are, unless they are square.
        alike = {steps, batch or 1, size, len(dense)}
        if kind != "diagonal" or len(alike) < 4 or draw(st.booleans()):
            options["pattern"] = pattern
            may_be_chain = matrices.ndim > 1 and form != "one" and dtype.kind == "f"
            if may_be_chain and draw(st.booleans()):
                matrices = CSRChain.from_pattern(matrices, options.pop("pattern"))
    elif form == "one" and not has_batch and size > 1 and draw(st.booleans()):
        options["pattern"], matrices = pattern, matrices[0]
    elif size > 1 and (batch == size or draw(st.booleans())):
        options["pattern"] = pattern
    shape = getattr(matrices, "data", matrices).shape if is_values else matrices.shape
    transposed = draw(st.booleans())
    if transposed:
        options["transposed"] = True
    schedules = ["auto", "auto", "linear", *(["blelloch", "chunked:3"] * (dtype.kind == "f"))]
    options["schedule"] = draw(st.sampled_from(schedules))
    if steps < 3 and options["schedule"] == "chunked:3":
        del options["schedule"]

    if not has_batch and batch is not None:
        has = (offsets is not None and offsets.ndim == 3) or (
            initial is not None and initial.ndim == 2
        )
        batch = batch if has else None
    double = np.result_type(dtype, np.float64)
    applied = dense.astype(double)
    applied = applied if has_batch else applied[:, None]
    applied = np.broadcast_to(applied, (steps, *applied.shape[1:]))
    applied = applied.swapaxes(-1, -2) if transposed else applied

    def as_given(a: Array) -> Array:
        a = a.swapaxes(-1, -2) if transposed else a
        a = a if has_batch else a.sum(1)
        a = a.sum(0, keepdims=True) if form == "one" else a
        if kind == "number":
            return a[..., kept].sum(-1).reshape(shape)
        return (a[..., kept] if is_values else a).reshape(shape)

    wide = double if form == "double" else dtype
    return Case(matrices, options, offsets, initial, applied, batch, np.dtype(wide), as_given)


def apply(matrices: Array, x: Array) -> Array:
    product: Array = (matrices @ x[..., None])[..., 0]
    return product


def close(result: Array, exact: Array, magnitude: Array, case: Case) -> None:
    terms = 2 * case.steps * (case.applied.shape[-1] + 4)
    if case.options.get("schedule") not in (None, "auto", "linear"):
        terms *= 4
    if case.dtype.kind == "c":
        terms *= 4
    eps, tiny = np.finfo(case.dtype).eps, np.finfo(case.dtype).tiny
    assert result.shape == exact.shape
    assert result.dtype == case.dtype
    assert (np.abs(result - exact) <= eps * terms * magnitude + tiny).all()


@given(cases(), st.integers(0, 2**32))
def test_states_and_gradients(case: Case, seed: int) -> None:
    """As loops over the definition give them; the error is bounded by the sums of magnitudes."""
    offsets, state = case.inputs()
    steps, samples, size = offsets.shape
    states, magnitudes = [state], [np.abs(state)]
    for matrix, offset in zip(case.applied, offsets, strict=True):
        states.append(apply(matrix, states[-1]) + offset)
        magnitudes.append(apply(np.abs(matrix), magnitudes[-1]) + np.abs(offset))
    y, size_of = np.array(states), np.array(magnitudes)
    squeeze = (lambda a: a[:, 0]) if case.batch is None else (lambda a: a)
    result = affine_scan(case.matrices, case.offsets, case.initial, **case.options)
    close(result, squeeze(y[1:]), squeeze(size_of[1:]), case)

    loss = normal(np.random.default_rng(seed), (steps, samples, size), case.dtype)
    grads = affine_scan_vjp(
        case.matrices, initial=case.initial, states=result, grads=squeeze(loss), **case.options
    )
    g, size_of_g = np.zeros((samples, size)), np.zeros((samples, size))
    in_offsets, sizes = np.zeros((2, steps, samples, size), y.dtype)
    in_matrices, sizes_of_matrices = np.zeros((2, steps, samples, size, size), y.dtype)
    for t in range(steps)[::-1]:
        in_offsets[t] = g = g + loss[t]
        sizes[t] = size_of_g = size_of_g + np.abs(loss[t])
        in_matrices[t] = g[:, :, None] * y[t][:, None, :].conj()
        sizes_of_matrices[t] = size_of_g[:, :, None] * size_of[t][:, None, :]
        g = apply(case.applied[t].swapaxes(-1, -2).conj(), g)
        size_of_g = apply(np.abs(case.applied[t]).swapaxes(-1, -2), size_of_g)
    close(grads.offsets, squeeze(in_offsets), squeeze(sizes.real), case)
    close(grads.initial, squeeze(g[None])[0], squeeze(size_of_g[None])[0], case)
    exact, size_of_exact = case.as_given(in_matrices), case.as_given(sizes_of_matrices)
    many = 1 + steps * samples  # terms of sums over steps and samples
    close(grads.matrices, exact, many * size_of_exact.real, case)


@pytest.mark.parametrize("kind", ["dense", "diagonal", "general"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_bits_by_any_number_of_threads(
    kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    steps, batch, size = 300, 21, 40
    pattern = {
        "dense": Pattern.dense((size, size)),
        "diagonal": Pattern.diagonal(size),
        "general": of_mask(rng.random((size, size)) < 0.2),
    }[kind]
    lead = (steps,) if shared else (steps, batch)
    a = (rng.standard_normal((*lead, pattern.nnz)) / 7).astype(np.float32)
    b = rng.standard_normal((steps, batch, size)).astype(np.float32)
    results = []
    for count in (1, 2, 3, 5):
        monkeypatch.setattr(affine, "thread_count", lambda count=count: count)
        monkeypatch.setattr(threads, "thread_count", lambda count=count: count)
        y = affine_scan(a, b, pattern=pattern)
        results.append([y, *affine_scan_vjp(a, states=y, grads=b, pattern=pattern)])
    for other in results[1:]:
        for result, expected in zip(other, results[0], strict=True):
            assert result.tobytes() == expected.tobytes()


@given(st.integers(0, 2**32), st.sampled_from(["f4", "f8", "c16"]), st.booleans())
def test_sparse_matrices_come_in_a_list(seed: int, dtype: str, transposed: bool) -> None:
    """Or as one; gradients come back so, each on its own pattern."""
    rng = np.random.default_rng(seed)
    steps, size = rng.integers(1, 6), rng.integers(1, 9)
    masks = rng.random((rng.integers(1, 3), size, size)) < rng.choice([0.2, 0.6])
    kept = masks[rng.integers(len(masks), size=steps)]
    dense = normal(rng, (steps, size, size), np.dtype(dtype)) * kept
    b, loss = (normal(rng, (steps, size), np.dtype(dtype)) for _ in range(2))
    is_one = rng.random() < 0.3
    given = [sp.csr_array(each) for each in (dense[:1] if is_one else dense)]
    options = {"transposed": transposed}
    whole = np.broadcast_to(dense[:1] if is_one else dense, dense.shape)
    pattern = Pattern.dense((size, size)) if size > 1 else None
    y = affine_scan(whole, b, pattern=pattern, **options)
    exact = affine_scan_vjp(whole, states=y, grads=loss, pattern=pattern, **options).matrices
    matrices = given[0] if is_one else given
    bound = 100 * size * np.finfo(dtype).eps
    scale = np.abs(y).max(initial=1)
    assert np.abs(affine_scan(matrices, b, **options) - y).max() <= bound * scale
    found = affine_scan_vjp(matrices, states=y, grads=loss, **options).matrices
    exact = exact.sum(0, keepdims=True) if is_one else exact
    for one, own, other in zip([found] if is_one else found, given, exact, strict=True):
        assert sp.issparse(one)
        assert np.array_equal(one.indices, own.indices)
        assert np.array_equal(one.indptr, own.indptr)
        rows, columns = own.nonzero()
        scale = 1 + np.abs(other).max()
        assert np.abs(one.toarray() - other)[rows, columns].max(initial=0) <= bound * scale


def test_a_sample_that_is_not_finite_leaves_the_others_alone() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((20, 6, 6)) / 4, rng.standard_normal((20, 11, 6))
    clean = affine_scan(a, b)
    b[0, 5] = np.nan
    b[3, 7] = np.inf
    result = affine_scan(a, b)
    others = [k for k in range(11) if k not in (5, 7)]
    assert result[:, others].tobytes() == clean[:, others].tobytes()
    assert np.isnan(result[0, 5]).all()
    assert not np.isfinite(result[3, 7]).any()


@pytest.mark.parametrize("form", ["rows", "columns", "transposed", "backwards", "one"])
def test_nothing_of_the_callers_is_copied_or_changed(form: str) -> None:
    steps, batch, size = 500, 16, 20
    a = np.full((steps, batch, size, size), 0.01, np.float32)
    b = np.ones((steps, batch, size), np.float32)
    a.flags.writeable = b.flags.writeable = False
    matrices = {
        "rows": a,
        "columns": a.swapaxes(-1, -2),
        "transposed": a,
        "backwards": a[::-1],
        "one": np.broadcast_to(a[0], a.shape),
    }[form]
    options = {"transposed": True} if form == "transposed" else {}
    y = affine_scan(matrices, b, **options)
    affine_scan_vjp(matrices, states=y, grads=b, **options)
    tracemalloc.start()
    try:
        affine_scan(matrices, b, **options)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        affine_scan_vjp(matrices, states=y, grads=b, **options)
        back = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert forward < 1.1 * b.nbytes + 100_000
    assert back < 1.1 * (a.nbytes + b.nbytes) + 100_000
    assert (a == np.float32(0.01)).all()


@pytest.mark.parametrize("kind", ["dense", "diagonal", "general"])
def test_no_pattern_is_kept_that_may_take_much_memory(kind: str) -> None:
    mask = {"dense": np.ones, "diagonal": np.eye, "general": np.tri}[kind]
    square = (200, 200) if kind == "dense" else 200
    pattern = of_mask(mask(square).astype(bool))
    kept = weakref.ref(pattern)
    values = np.ones((3, pattern.nnz))
    affine_scan(values, np.ones((3, 200)), pattern=pattern, schedule="linear")
    del pattern
    gc.collect()
    assert kept() is None


def test_large_states_of_few_samples_run_by_a_plan() -> None:
    rng = np.random.default_rng(3)
    size, steps = 400, 4
    a, b = rng.standard_normal((steps, size, size)) / 20, rng.standard_normal((steps, size))
    y, expected = affine_scan(a, b), np.zeros(size)
    grads = affine_scan_vjp(a, states=y, grads=b)
    for t in range(steps):
        expected = a[t] @ expected + b[t]
        np.testing.assert_allclose(y[t], expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(grads.offsets[-2], b[-2] + a[-1].T @ b[-1], rtol=1e-11, atol=1e-11)
    schedule = sparsescan.Schedule.blelloch(steps)
    named = affine_scan(a, b, schedule=schedule)
    np.testing.assert_allclose(named, y, rtol=1e-11, atol=1e-11)
    same = affine_scan_vjp(a, states=y, grads=b, schedule=schedule)
    for result, exact in zip(same, grads, strict=True):
        np.testing.assert_allclose(result, exact, rtol=1e-11, atol=1e-11)


REFUSED: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    InputError: [
        ({"matrices": np.ones((5, 4, 3, 2))}, r"matrices has shape .*; expected matrices \(T, s"),
        ({"matrices": np.ones(5)}, r"matrices has shape \(5,\), one diagonal \(size,\) for all st"),
        (
            {"offsets": np.ones((5, 3, 3))},
            r"may be matrices \(T, size, size\) or diagonals \(T, batch, size\); expected pattern=",
        ),
        (
            {"matrices": np.ones((3, 3)), "offsets": np.ones((3, 3))},
            r"may be one matrix \(size, size\) or diagonals \(T, size\); expected pattern=",
        ),
        (
            {"matrices": np.ones(3), "offsets": np.ones((3, 3))},
            r"may be a number for each step .* or one diagonal .* shape \(3, 1\) or \(1, 3\)",
        ),
        ({"pattern": Pattern.diagonal(4)}, r"matrices has shape .* nnz = 4, as pattern says"),
        ({"pattern": Pattern.dense((3, 2))}, r"pattern has shape \(3, 2\); expected a square one"),
        ({"offsets": np.ones((4, 3))}, r"offsets has shape \(4, 3\); expected \(5, 3\) or \(5, ba"),
        ({"initial": np.ones(4)}, r"initial has shape \(4,\); expected \(3,\) or \(batch, 3\)"),
        (
            {"offsets": np.ones((5, 2, 3)), "initial": np.ones((4, 3))},
            "initial has 4 samples; expected 2, as offsets has",
        ),
        ({"schedule": "fast"}, "schedule is 'fast'"),
    ],
    InputTypeError: [
        ({"pattern": "diagonal"}, "pattern is 'diagonal'; expected a Pattern"),
        (
            {"matrices": np.ones((5, 3, 3), int)},
            "matrices has dtype int64; expected float32",
        ),
        ({"offsets": "b"}, "offsets has dtype"),
        (
            {"offsets": 1j * np.ones((5, 3)), "schedule": "blelloch"},
            "'auto' or 'linear', which comp",
        ),
    ],
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_cannot_be_is_refused(error: type[Exception]) -> None:
    for change, message in REFUSED[error]:
        with pytest.raises(error, match=message):
            affine_scan(**{"matrices": np.ones((5, 3, 3)), **change})


def test_gradients_need_the_states_of_the_call() -> None:
    a = np.ones((5, 2, 3, 3))
    y = affine_scan(a)
    with pytest.raises(InputError, match=r"grads has 1 samples; expected 2, as matrices has"):
        affine_scan_vjp(a, states=y, grads=y[:, :1])
    with pytest.raises(InputError, match=r"states has shape \(5, 3\); expected \(5, 2, 3\)"):
        affine_scan_vjp(a, states=y[:, 0], grads=y)
    chain = CSRChain.from_pattern(np.ones((4, 3)), Pattern.diagonal(3))
    with pytest.raises(InputError, match="pattern is given for a CSRChain"):
        affine_scan(chain, pattern=Pattern.diagonal(3))
