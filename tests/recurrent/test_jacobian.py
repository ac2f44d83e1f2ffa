"""Jacobians and gradients of random cells against autograd of their definitions."""

from __future__ import annotations

import copy
import pickle
import types
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from cell_oracle import Reference, Runs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import on_pattern
from random_cells import RandomCell, random_cells
from sampling import long_run
from test_programs import HARD, hard_cell

import sparsescan
from sparsescan import InputError
from sparsescan.graph.functions import tanh
from sparsescan.recurrent import Cell, Hidden, Input, Scalar, Vector, catalogue, jacobian, sigmoid
from sparsescan.recurrent.definition import width_of
from sparsescan.recurrent.step import OneCell

STEPS, BATCH = 4, 3
seeds = st.integers(0, 2**32 - 1)


class Case(NamedTuple):
    """A cell with random parameters, its masks, and inputs, states and gradients of some steps."""

    drawn: RandomCell
    cell: Any
    masks: dict[str, np.ndarray]
    x: np.ndarray
    state: np.ndarray
    rng: np.random.Generator
    near: float

    def run(self, x: np.ndarray, state: np.ndarray, grads: np.ndarray) -> Runs:
        """Return what PyTorch says of a sequence; states and their gradients side by side."""
        states = np.split(state, self.cell.program.states, axis=-1)
        cotangents = np.split(grads, self.cell.program.states, axis=-1)
        options = self.drawn.options
        reference = Reference(self.drawn.cls, options)
        runs = reference.run(self.cell.params, x, states, cotangents, self.masks)
        arrays = [*runs.outputs, runs.input_grad, *runs.state_grads, *runs.param_grads.values()]
        # Neither what explodes, nor what is at a point where a function jumps.
        assume(all((np.abs(each) < 1e6).all() for each in arrays) and runs.nearest >= self.near)
        return runs

    def jacobian(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Return the transposed Jacobian of one step: a sample for each number after it."""
        size = self.cell.state_size
        runs = self.run(np.tile(x, (1, size, 1)), np.tile(state, (size, 1)), np.eye(size)[None])
        return np.concatenate(runs.state_grads, axis=-1).T


def case_of(drawn: RandomCell, seed: int, near: float = 1e-7) -> Case:
    rng = np.random.default_rng(seed)
    cell, masks = drawn.make(rng), drawn.masks(rng)
    masks = {name: mask.on(np) for name, mask in cell.masks.items() if mask is not None}
    for name, each in cell.params.items():
        setattr(cell, name, rng.uniform(-1, 1, each.shape))
    x = rng.standard_normal((STEPS, BATCH, width_of(OneCell(cell))))
    state = rng.uniform(-1, 1, (STEPS, BATCH, cell.state_size))
    for array in (x, state, *cell.params.values()):
        array.setflags(write=False)
    return Case(drawn, cell, masks, x, state, rng, near)


def close(found: Any, expected: Any, scale: float = 1e6) -> None:
    """Equal up to rounding, at the scale of the largest number."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    largest = max(1.0, float(np.abs(expected).max(initial=0)))
    bound = scale * np.finfo(found.dtype).eps * largest
    assert np.abs(found - expected).max(initial=0) <= bound, (found, expected)


def dense(values: np.ndarray, pattern: sparsescan.Pattern) -> np.ndarray:
    return on_pattern(values, pattern).toarray()


def other_numpy() -> Any:
    """Return a library that is not NumPy by name, as CuPy is not."""
    other = types.ModuleType("other")
    other.__dict__.update(np.__dict__)
    event = types.SimpleNamespace(record=lambda stream: None, done=True)
    other.cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(id=0),
        get_current_stream=lambda: types.SimpleNamespace(ptr=0, is_capturing=lambda: False),
        Event=lambda disable_timing: event,
    )
    return other


OTHER = other_numpy()
# Blocks of rows, numbers at once, and the share of entries from which products are dense.
settings_of_blocks = st.tuples(
    st.sampled_from([1, 5, 8192]), st.sampled_from([1, 1 << 17]), st.sampled_from([0, 0.35, 2])
)


def patched(patch: pytest.MonkeyPatch, blocks: tuple[int, int, float], on_device: bool) -> None:
    """Take other blocks, and the functions of another library."""
    rows, at_once, share = blocks
    patch.setattr(jacobian, "_ROWS", rows)
    patch.setattr(jacobian, "_AT_ONCE", at_once)
    patch.setattr(jacobian, "DENSE", share)
    patch.setattr(jacobian, "_ROWS_OF_TILE", min(rows, 3))
    patch.setattr(jacobian, "_ONE_THREAD", 16 * rows)
    if on_device:
        patch.setattr(jacobian, "namespace", lambda *arrays: OTHER)


def check_jacobian(case: Case, blocks: Any, on_device: bool) -> None:
    """Compare values, and products of factors, with the Jacobian of autograd."""
    cell, x, state = case.cell, case.x, case.state
    with pytest.MonkeyPatch.context() as patch:
        patched(patch, blocks, on_device)
        steps = cell.linearize(x, state)
        chain, values = steps.implicit(reverse=True), steps.values()
        out = np.full_like(values, np.nan)
        assert cell.values(x, state, out=out) is out
    np.testing.assert_array_equal(out, values)
    assert values.shape == (STEPS, BATCH, cell.nnz)
    factors = cell.implicit_pattern.factors
    assert cell.implicit_pattern.shape == cell.pattern.shape == (cell.state_size,) * 2
    assert cell.implicit_pattern.shared == (False, True) * (len(factors) // 2)
    for t, b in ((0, 0), (STEPS - 1, BATCH - 1)):
        expected = case.jacobian(x[t : t + 1, b : b + 1], state[t, b : b + 1])
        close(dense(values[t, b], cell.pattern), expected)
        whole = np.eye(cell.state_size)
        for factor, array in zip(factors, chain.values, strict=True):
            whole = dense(array if array.ndim == 1 else array[t, b], factor) @ whole
        close(whole, expected)


def check_gradients(case: Case, blocks: Any, on_device: bool) -> None:
    """Compare the states after a step, and all gradients, with those of autograd."""
    cell, x, state = case.cell, case.x, case.state
    grad = case.rng.standard_normal(state.shape)
    grad.setflags(write=False)
    flat = [array.reshape(1, STEPS * BATCH, -1) for array in (x, state, grad)]
    expected = case.run(flat[0], flat[1][0], flat[2])
    after = np.concatenate(expected.outputs, axis=-1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patched(patch, blocks, on_device)
        close(cell.forward(x, state).reshape(after.shape), after)
        steps = cell.linearize(x, state)
        steps.values()
        for params, inputs in (
            (steps.param_grads(grad), steps.input_grads(grad)),
            (cell.param_grads(x, state, grad), cell.input_grads(x, state, grad)),
        ):
            assert list(params) == list(cell.params)
            for name, each in params.items():
                close(each, expected.param_grads[name])
                assert each.flags.c_contiguous
            close(inputs.reshape(flat[0].shape), expected.input_grad)


@settings(max_examples=long_run(200, 60))
@given(random_cells(has_further=True), seeds, settings_of_blocks, st.booleans())
def test_values_and_factors_are_the_jacobian(
    drawn: RandomCell, seed: int, blocks: Any, on_device: bool
) -> None:
    check_jacobian(case_of(drawn, seed), blocks, on_device)


@settings(max_examples=long_run(200, 60))
@given(random_cells(has_further=True), seeds, settings_of_blocks, st.booleans())
def test_gradients_are_those_of_autograd(
    drawn: RandomCell, seed: int, blocks: Any, on_device: bool
) -> None:
    check_gradients(case_of(drawn, seed), blocks, on_device)


MORE = {
    "a slot of a middle stage with a gradient of its own, and one from behind": """
        v = tanh(self.weight_hh.a(sigmoid(h)) + self.inner(sin(c)))
        late = tanh(self.inner(where(v < c, v, h)))
        return cos(self.weight_hh.a(v) + self.weight_hh.b(h)), v * c + late
    """,
    "a number that is differentiated as parameters": """
        return softsign(surrogate(lambda a: 0.37, lambda a: 1 / (1 + a * a))(self.u) + 0.1), h
    """,
    "a product whose gradients cancel": """
        v = cos(self.weight_hh.a(h))
        w = self.weight_hh.b(tanh(c)) + (self.weight_hh.a(c) - self.inner(v)) + self.inner(v)
        return tanh(w), tanh(self.weight_hh.a(where(v < c, w, c)))
    """,
}


@pytest.mark.parametrize("body", (HARD | MORE).values(), ids=HARD | MORE)
@settings(max_examples=long_run(12, 3))
@given(seed=seeds, blocks=settings_of_blocks, on_device=st.booleans())
def test_hard_steps(body: str, seed: int, blocks: Any, on_device: bool) -> None:
    check_jacobian(case_of(hard_cell(body), seed, near=0), blocks, on_device)
    check_gradients(case_of(hard_cell(body), seed, near=0), blocks, on_device)


@settings(max_examples=long_run(150, 30))
@given(random_cells(has_further=True), seeds, st.sampled_from(["linear", "blelloch", "chunked"]))
def test_scans_are_back_propagation(drawn: RandomCell, seed: int, name: str) -> None:
    """Over explicit and over implicit steps."""
    cell, x = (case := case_of(drawn, seed)).cell, case.x
    local = case.rng.standard_normal(case.state.shape)
    expected = case.run(x, case.state[0], local)
    states = np.concatenate([case.state[:1], np.concatenate(expected.outputs, axis=-1)])[:-1]
    steps = cell.linearize(x, states)
    schedules = {
        "linear": sparsescan.Schedule.linear(STEPS),
        "blelloch": sparsescan.Schedule.blelloch(STEPS),
        "chunked": sparsescan.Schedule.chunked(STEPS, 2),
    }
    zero = np.zeros_like(local[:1])
    for chain in (steps.jacobian(), steps.implicit()):
        grads = sparsescan.inclusive_scan(
            zero[0],
            chain,
            local_grads=np.concatenate([local[::-1], zero]),
            schedule=schedules[name],
        )
        close(grads[-1], np.concatenate(expected.state_grads, axis=-1), 1e8)
        params = steps.param_grads(np.ascontiguousarray(grads[:-1][::-1]))
        for each, grad in params.items():
            close(grad, expected.param_grads[each], 1e8)


@settings(max_examples=long_run(90, 20))
@given(random_cells(), seeds)
def test_float32_is_float64_but_for_rounding(drawn: RandomCell, seed: int) -> None:
    case = case_of(drawn, seed)
    grad = case.rng.standard_normal(case.state.shape)
    flat = [array.reshape(1, STEPS * BATCH, -1) for array in (case.x, case.state, grad)]
    assume(case.run(flat[0], flat[1][0], flat[2]).nearest > 1e-3)
    found = []
    for dtype in (np.float32, np.float64):
        x, state, grads = (each.astype(dtype) for each in (case.x, case.state, grad))
        cell = copied(case, dtype)
        steps = cell.linearize(x, state)
        found.append(
            {
                "forward": cell.forward(x, state),
                "values": steps.values(),
                "slopes": steps.implicit().values[0],
                "input": steps.input_grads(grads),
                **steps.param_grads(grads),
            }
        )
    for name, expected in found[1].items():
        assert found[0][name].dtype == np.float32
        assert expected.dtype == np.float64
        close(found[0][name], expected.astype(np.float32), 1e5)


def copied(case: Case, dtype: type) -> Any:
    """Return the same cell with parameters of another dtype."""
    cell = type(case.cell)(
        *(case.cell.input_size, case.cell.hidden_size, case.cell.bias),
        **case.cell.options,
        **{f"{name}_mask": mask for name, mask in case.masks.items()},
    )
    for name, each in case.cell.params.items():
        setattr(cell, name, each.astype(dtype))
    return cell


@settings(max_examples=long_run(90, 20))
@given(random_cells(), seeds)
def test_factors_have_all_entries_and_texts_say_what_is_computed(
    drawn: RandomCell, seed: int
) -> None:
    cell = case_of(drawn, seed).cell
    product = np.eye(cell.state_size)
    for factor in cell.implicit_pattern.factors:
        product = (dense(np.ones(factor.nnz), factor) @ product > 0).astype(float)
    assert (product >= dense(np.ones(cell.nnz), cell.pattern)).all()
    assert str(cell).startswith(repr(cell))
    assert "def forward" in cell.source("numpy", "forward")
    assert "def linearize" in cell.source("numpy", "backward")
    for which in ("forward", "backward"):
        assert f"def {which}(" in cell.source("cpu", which)
    texts = []
    with suppress(InputError):  # there are no kernels of a GPU for maxima over units
        texts = [cell.source("cuda", which) for which in ("forward", "backward")]
    assert texts or "max(" in drawn.source or "logsumexp" in drawn.source
    for text, name in zip(texts, ("advance_0", "retreat_0"), strict=False):
        assert f"def {name}(" in text


@given(seeds)
def test_rows_of_other_lengths_may_be_where_equal_ones_would_be(seed: int) -> None:
    """The rows of ``c`` have three entries and two, and those of a block are the last of each."""
    kept = np.array([[1, 0], [0, 0], [1, 1], [1, 1]], bool)
    drawn = RandomCell(
        """
class Drawn(Cell):
    weight_ih = Input()
    weight_hh = Hidden("a", "b")

    def step(self, x, h, c):
        return tanh(self.weight_hh.a(c)), tanh(self.weight_ih(x) + self.weight_hh.b(c))
""",
        *(1, 2, True),
        masked={"weight_hh": kept},
    )
    check_jacobian(case_of(drawn, seed), (8192, 1 << 17, 0), True)


def test_a_copy_computes_the_same() -> None:
    """What is compiled is no part of a pickle."""
    cell = catalogue.MGU(3, 4, rng=0)
    x, state = np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)
    values = cell.values(x, state)
    for other in (pickle.loads(pickle.dumps(cell)), copy.deepcopy(cell)):
        assert other.pattern is cell.pattern
        np.testing.assert_array_equal(other.values(x, state), values)


# -- Steps that are chosen ------------------------------------------------------------------------


class Independent(Cell):
    """One weight a unit (IndRNN), and a second state that is only passed on."""

    weight_ih = Input()
    u = Vector()
    states = 2

    def step(self, x: Any, h: Any, before: Any) -> Any:
        return tanh(self.weight_ih(x) + self.u * h), 0.5 * before


class Plain(Cell):
    """No product of a state."""

    weight_ih = Input()
    u = Vector()

    def step(self, x: Any, h: Any) -> Any:
        return tanh(self.weight_ih(x) + self.u * h)


class Twice(Cell):
    """A matrix that multiplies twice, once turned, and both states."""

    weight_ih = Input()
    weight_hh = Hidden()
    alpha = Scalar(0.5)

    def step(self, x: Any, h: Any, c: Any) -> Any:
        a = self.weight_ih(x) + self.weight_hh(h) + self.weight_hh.T(h) + self.weight_hh(c)
        return tanh(a), sigmoid(self.alpha) * c + h


class Elementwise(Cell):
    """An input that is read by units."""

    weight_hh = Hidden()
    u = Vector()

    def step(self, x: Any, h: Any) -> Any:
        return h * sigmoid(x + self.u) + tanh(self.weight_hh(h))


def test_patterns_of_steps() -> None:
    assert Plain(3, 4).pattern is sparsescan.Pattern.diagonal(4)
    assert Plain(3, 4).implicit_pattern.jacobian is sparsescan.Pattern.diagonal(4)
    both = Independent(3, 4).pattern
    assert both.nnz == 8
    assert both is sparsescan.Pattern.diagonal(8)
    assert Twice(3, 4).nnz == 3 * 16 + 4 - 16 + 4
    for name, stages, nnz in (("MGU", 2, 400), ("LEM", 2, 1220), ("Leaky", 1, 40)):
        cell = getattr(catalogue, name)(20, 20)
        assert len(cell.implicit_pattern.factors) == 2 * stages
        assert cell.nnz == nnz
    masked = catalogue.MGU(3, 4, weight_hh_mask=np.tile(np.eye(4, dtype=bool), (2, 1)))
    assert masked.pattern is sparsescan.Pattern.diagonal(4)


def test_values_are_not_written_over_what_they_are_made_of() -> None:
    cell = catalogue.MGU(20, 4, dtype=np.float64, rng=0)
    x, state = np.zeros((1, 20)), np.zeros((1, 4))
    steps = cell.linearize(x, state)
    weights = cell.params["weight_ih"]
    calls = (x, partial(cell.values, x, state)), (weights, steps.values)
    for used, call in calls:
        kept = used.copy()
        with pytest.raises(sparsescan.InputError, match="out shares memory"):
            call(out=used.reshape(-1)[: cell.nnz].reshape(1, -1))
        np.testing.assert_array_equal(used, kept)


@pytest.mark.parametrize("size", [1, 5, 9])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "cls", [catalogue.UGRNN, catalogue.IndRNN, catalogue.LightRU, Elementwise], ids=repr
)
def test_some_units_of_a_cell(cls: Any, masked: bool, size: int) -> None:
    rng = np.random.default_rng(size)
    cell = cls(size, size, dtype=np.float64, rng=rng)
    names = [name for name in cell.masks if masked]
    masks = {f"{name}_mask": rng.random(cell.shapes[name]) < 0.5 for name in names}
    other = cls(size, size, dtype=np.float64, rng=1, **masks)
    x, state, grad = (rng.standard_normal((7, size)) for _ in range(3))
    values = np.stack([dense(each, other.pattern) for each in other.values(x, state)])
    params = other.param_grads(x, state, grad)
    for units in (slice(0, size), slice(size // 2, size), slice(0, 1)):
        part = other.restrict(units)
        close(part.forward(x, state), other.forward(x, state)[:, units])
        out = np.full((7, part.nnz), np.nan)
        part.values(x, state, out=out)
        close(out.reshape(7, size, -1), values[:, :, units])
        for name, each in part.param_grads(x, state, grad[:, units]).items():
            gates = params[name].reshape(-1, size, *params[name].shape[1:])[:, units]
            close(each, gates.reshape(each.shape))


class Heads(Cell):
    """A unit reads its own head alone."""

    weight_ih, weight_hh = Input(), Hidden(heads=2)

    def step(self, x: Any, h: Any) -> Any:
        return tanh(self.weight_ih(x) + self.weight_hh(h))


UNDIVIDED = catalogue.MGU, catalogue.LEM, catalogue.FastRNN, Twice, Heads


@pytest.mark.parametrize("cls", UNDIVIDED, ids=repr)
def test_cells_that_are_not_divided(cls: Any) -> None:
    with pytest.raises(InputError, match=r"cannot be restricted; expected a state of hidden units"):
        cls(4, 4).restrict(slice(0, 2))


def test_a_cell_whose_units_read_the_input_has_as_many() -> None:
    with pytest.raises(InputError, match="input_size is 3 and hidden_size 4; expected equal ones"):
        Elementwise(3, 4)


def test_sources_of_targets() -> None:
    cell = catalogue.MGU(3, 4)
    with pytest.raises(InputError, match="'fpga'"):
        cell.source("fpga", "forward")
    with pytest.raises(InputError, match="'sideways'; expected 'forward' or 'backward'"):
        cell.source("numpy", "sideways")
    assert str(cell).splitlines() == [
        "MGU(3, 4, nnz=16)",
        "  stage 1 of 2:",
        "    s_0 = weight_ih.f(x) + weight_hh.f(h)",
        "    f = sigmoid(s_0)",
        "    t = f * h",
        "  stage 2 of 2:",
        "    s_1 = weight_ih.n(x) + weight_hh.n(t)",
        "    n = tanh(s_1)",
        "    t_2 = n - h",
        "    new h = h + (f * t_2)",
        "  kept for the backward pass, beside states and inputs: f, n",
        "  computed again by it: t, t_2",
    ]


def test_a_slope_beside_a_pruned_weight_may_be_infinite() -> None:
    """Entries that have no weight of a gate do not read its slope."""

    class Steep(Cell):
        weight_hh = Hidden("a", "b")

        def step(self, x: Any, h: Any, c: Any) -> Any:
            return tanh(self.weight_hh.a(h)) / x, self.weight_hh.b(h) + c

    mask = np.concatenate([np.eye(2, dtype=bool), np.ones((2, 2), bool)])
    cell = Steep(2, 2, dtype=np.float64, rng=0, weight_hh_mask=mask)
    values = cell.values(np.zeros(2), np.ones(4))
    whole = dense(values, cell.pattern)
    assert np.isinf(whole[:2, :2][np.eye(2, dtype=bool)]).all()
    np.testing.assert_array_equal(whole[:2, 2:], cell.weight_hh[2:].T)
    np.testing.assert_array_equal(whole[2:, 2:], np.eye(2))
