"""Recurrent cells against PyTorch: one step, and whole sequences by the scan."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from autodiff import close, randomise, share
from hypothesis import given
from hypothesis import strategies as st
from oracles import on_pattern
from refusals import check_refusals

import sparsescan
from sparsescan import BatchedCSR, CSRChain
from sparsescan.recurrent.cells import Cell, GRUCell, LSTMCell, RNNCell

KINDS = ["tanh", "relu", "gru", "lstm"]
CELLS = {"gru": (GRUCell, torch.nn.GRUCell), "lstm": (LSTMCell, torch.nn.LSTMCell)}
GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
LAYERS = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}


def cell_of(kind: str, inputs: int, hidden: int, bias: bool = True, **more: Any) -> Cell:
    if kind in CELLS:
        return CELLS[kind][0](inputs, hidden, bias, **more)
    return RNNCell(inputs, hidden, bias, kind, **more)


def module_of(kind: str, inputs: int, hidden: int, bias: bool = True) -> torch.nn.Module:
    if kind in CELLS:
        return CELLS[kind][1](inputs, hidden, bias).double()
    return torch.nn.RNNCell(inputs, hidden, bias, kind).double()


def layer_of(kind: str, inputs: int, hidden: int) -> torch.nn.Module:
    if kind in LAYERS:
        return LAYERS[kind](inputs, hidden).double()
    return torch.nn.RNN(inputs, hidden, nonlinearity=kind).double()


class Case(NamedTuple):
    """A cell, the same of PyTorch with normal weights, its masks, and some input."""

    cell: Cell
    module: torch.nn.Module
    masks: dict[str, torch.Tensor]
    x: np.ndarray
    state: np.ndarray
    rng: np.random.Generator

    def step(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the new state ``(n, state_size)`` by PyTorch."""
        parameters = {
            name: parameter * self.masks[name] if name in self.masks else parameter
            for name, parameter in self.module.named_parameters()
        }
        lstm = isinstance(self.module, torch.nn.LSTMCell)
        before = tuple(state.tensor_split(2, dim=-1)) if lstm else state
        after = torch.func.functional_call(self.module, parameters, (x, before))
        return torch.cat(after, dim=-1) if lstm else after

    def jacobian(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Return the transposed Jacobian of one step by PyTorch."""
        actual = torch.autograd.functional.jacobian(
            lambda s: self.step(torch.tensor(x)[None], s[None])[0], torch.tensor(state)
        )
        return actual.numpy().T


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(KINDS))
    inputs, hidden = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    bias = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    masks = {}
    for name, columns in (("weight_ih", inputs), ("weight_hh", hidden)):
        if draw(st.booleans()):
            density = draw(st.sampled_from([0, 0.2, 0.5, 1]))
            masks[name] = rng.random((GATES[kind] * hidden, columns)) < density
    lead = draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 2), (0, 2)]))
    module = module_of(kind, inputs, hidden, bias)
    randomise(module, rng)
    cell = cell_of(
        kind, inputs, hidden, bias, **{f"{name}_mask": mask for name, mask in masks.items()}
    )
    share(cell, module)
    x = rng.standard_normal((*lead, inputs))
    state = rng.standard_normal((*lead, cell.state_size))
    x.setflags(write=False)
    state.setflags(write=False)
    return Case(
        cell, module, {name: torch.tensor(mask) for name, mask in masks.items()}, x, state, rng
    )


def rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def dense(values: np.ndarray, pattern: sparsescan.Pattern) -> np.ndarray:
    return on_pattern(values, pattern).toarray()


@given(cases())
def test_one_step_is_that_of_pytorch(case: Case) -> None:
    cell = case.cell
    expected = case.step(torch.tensor(rows(case.x)), torch.tensor(rows(case.state)))
    actual = cell.forward(case.x, case.state)
    assert actual.shape == case.state.shape
    close(rows(actual), expected.detach().numpy())


@given(cases())
def test_values_are_the_jacobian_of_pytorch_and_the_pattern_misses_nothing(case: Case) -> None:
    cell = case.cell
    values = cell.values(case.x, case.state)
    assert values.shape == (*case.state.shape[:-1], cell.nnz)
    for row, x, state in zip(rows(values), rows(case.x), rows(case.state), strict=True):
        close(dense(row, cell.pattern), case.jacobian(x, state))
    out = np.full_like(values, np.nan)
    assert cell.values(case.x, case.state, out=out) is out
    np.testing.assert_array_equal(out, values)


@given(cases())
def test_gradients_in_parameters_and_input_are_those_of_pytorch(case: Case) -> None:
    cell = case.cell
    grad = case.rng.standard_normal(case.state.shape)
    x = torch.tensor(rows(case.x), requires_grad=True)
    loss = (case.step(x, torch.tensor(rows(case.state))) * torch.tensor(rows(grad))).sum()
    names = [name for name, _ in case.module.named_parameters()]
    *expected, expected_x = torch.autograd.grad(loss, [*case.module.parameters(), x])
    actual = cell.param_grads(case.x, case.state, grad)
    assert list(actual) == list(cell.params) == names
    for name, array in zip(names, expected, strict=True):
        close(actual[name], array.numpy(), 1e5)
        assert actual[name].flags.c_contiguous
    found_x = cell.input_grads(case.x, case.state, grad)
    assert found_x.shape == case.x.shape
    close(rows(found_x), expected_x.numpy())


@given(cases())
def test_every_entry_of_the_pattern_is_nonzero_for_some_input_and_parameters(case: Case) -> None:
    cell, rng = case.cell, case.rng
    seen = np.zeros(cell.nnz, bool)
    for _ in range(40):
        for name, parameter in cell.params.items():
            setattr(cell, name, rng.standard_normal(parameter.shape))
        x = rng.standard_normal((20, cell.input_size))
        state = rng.standard_normal((20, cell.state_size))
        seen |= (cell.values(x, state) != 0).any(axis=0)
    assert seen.all()


def test_patterns_as_the_equations_say() -> None:
    kept = np.array([[True, False], [False, False]])
    none = np.zeros((2, 2), bool)

    def entries(kind: str, *gates: np.ndarray, **more: Any) -> list[list[int]]:
        pattern = cell_of(kind, 1, 2, weight_hh_mask=np.concatenate(gates), **more).pattern
        return dense(np.ones(pattern.nnz), pattern).astype(int).tolist()

    assert entries("tanh", kept.T | [[False, True], [False, False]]) == [[1, 0], [1, 0]]
    assert entries("gru", none, kept, none) == [[1, 0], [0, 1]]
    only_r = np.array([[False, True], [False, False]])
    assert entries("gru", only_r, none, none) == [[1, 0], [1, 1]]
    # Without a bias W_n h is 0, so that r has no effect.
    assert entries("gru", only_r, none, none, bias=False) == [[1, 0], [0, 1]]
    diagonals = [[1, 0, 1, 0], [0, 1, 0, 1]]
    only_o = entries("lstm", none, none, none, kept)
    assert only_o == [[1, 0, 0, 0], [0, 0, 0, 0], *diagonals]
    only_i = entries("lstm", kept, none, none, none)
    assert only_i == [[1, 0, 1, 0], [0, 0, 0, 0], *diagonals]
    # Without a bias and an input g is 0, so that i has no effect.
    unread = np.repeat([True, True, False, True], 2)[:, None]
    no_i = entries("lstm", kept, none, none, none, bias=False, weight_ih_mask=unread)
    assert no_i == [[0, 0, 0, 0], [0, 0, 0, 0], *diagonals]


def torch_states(layer: torch.nn.Module, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``h_1, …, h_T`` from a layer of PyTorch and the states of the last step, ``(1, B, S)``."""
    if isinstance(layer, torch.nn.LSTM):
        h, c = (part.contiguous() for part in state[None].tensor_split(2, dim=-1))
        out, last = layer(x, (h, c))
        return out, torch.cat(last, dim=-1)
    return layer(x, state[None])


@pytest.mark.parametrize("kind", KINDS)
def test_unroll_is_the_layer_of_pytorch(kind: str) -> None:
    rng = np.random.default_rng(1)
    layer, cell = layer_of(kind, 3, 5), cell_of(kind, 3, 5)
    for name in cell.params:
        setattr(cell, name, getattr(layer, f"{name}_l0").detach().numpy())
    x = rng.standard_normal((7, 4, 3))
    first = rng.standard_normal((4, cell.state_size))
    for state in (first, None):
        before = np.zeros_like(first) if state is None else state
        expected, last = torch_states(layer, torch.tensor(x), torch.tensor(before))
        states = cell.unroll(x, state)
        np.testing.assert_array_equal(states[0], before)
        close(states[1:, :, :5], expected.detach().numpy())
        close(states[-1], last[0].detach().numpy())
    states = cell.unroll(x, first)
    close(cell.unroll(x[:, 1], first[1]), states[:, 1])
    close(cell.unroll(x.reshape(7, 2, 2, 3), first.reshape(2, 2, -1)).reshape(states.shape), states)
    for t in range(7):
        close(cell.forward(x[t], states[t]), states[t + 1])
    np.testing.assert_array_equal(cell.unroll(x[:0], first), first[None])


@pytest.mark.parametrize("kind", KINDS)
def test_jacobian_is_the_matrix_of_a_step_a_batch_or_a_chain(kind: str) -> None:
    rng = np.random.default_rng(3)
    cell = cell_of(kind, 2, 3, dtype=np.float64, rng=rng)
    x = rng.standard_normal((5, 4, 2))
    states = cell.unroll(x)
    values = cell.values(x, states[:-1])
    matrix = cell.jacobian(x[1, 2], states[1, 2])
    assert isinstance(matrix, sp.csr_array)
    close(matrix.toarray(), dense(values[1, 2], cell.pattern))
    batched = cell.jacobian(x[1], states[1])
    assert isinstance(batched, BatchedCSR)
    close(batched[2].toarray(), matrix.toarray())
    chain = cell.jacobian(x, states[:-1])
    assert isinstance(chain, CSRChain)
    grad = rng.standard_normal(states[0].shape)
    grads = sparsescan.exclusive_scan(grad, chain)
    close(grads[0], grad)
    for t in range(4, 0, -1):
        grad = np.stack([dense(v, cell.pattern) @ g for v, g in zip(values[t], grad, strict=True)])
        close(grads[5 - t], grad)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 5e-324])
@pytest.mark.parametrize("kind", KINDS)
def test_special_input_is_treated_as_by_pytorch(kind: str, special: float) -> None:
    rng = np.random.default_rng(6)
    module = module_of(kind, 2, 3)
    randomise(module, rng)
    cell = cell_of(kind, 2, 3)
    share(cell, module)
    x = rng.standard_normal((4, 2))
    x[::2, 1] = special
    state = rng.standard_normal((4, cell.state_size))
    case = Case(cell, module, {}, x, state, rng)
    expected = case.step(torch.tensor(x), torch.tensor(state)).detach().numpy()
    np.testing.assert_allclose(cell.forward(x, state), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(cell.unroll(x[None], state)[1], expected, rtol=1e-12, atol=1e-12)
    # Beside the pattern PyTorch has 0·NaN.
    entries = dense(np.ones(cell.nnz), cell.pattern).nonzero()
    for row, a, b in zip(cell.values(x, state), x, state, strict=True):
        np.testing.assert_allclose(row, case.jacobian(a, b)[entries], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_parameters_are_uniform_up_to_the_root_of_the_size(kind: str) -> None:
    cell = cell_of(kind, 50, 25, rng=7)
    again = cell_of(kind, 50, 25, rng=7)
    for name, parameter in cell.params.items():
        assert parameter.dtype == np.float32
        assert 0.15 < np.abs(parameter).max() <= np.float32(1 / 5)
        np.testing.assert_array_equal(parameter, again.params[name])
    assert cell.weight_ih.shape == (GATES[kind] * 25, 50)
    assert cell_of(kind, 2, 3, dtype=np.float64).weight_hh.dtype == np.float64
    without = cell_of(kind, 2, 3, bias=False)
    assert list(without.params) == ["weight_ih", "weight_hh"]
    assert without.bias_ih is None


@pytest.mark.parametrize("kind", KINDS)
def test_empty_arrays(kind: str) -> None:
    cell = cell_of(kind, 2, 3)
    x, state = np.zeros((5, 0, 2)), np.zeros((5, 0, cell.state_size))
    assert cell.unroll(x).shape == (6, 0, cell.state_size)
    assert cell.values(x, state).shape == (5, 0, cell.nnz)
    assert cell.input_grads(x, state, state).shape == x.shape
    for name, grad in cell.param_grads(x, state, state).items():
        np.testing.assert_array_equal(grad, np.zeros_like(cell.params[name]))


def test_a_cell_without_hidden_weights_has_an_empty_pattern() -> None:
    cell = RNNCell(2, 3, weight_hh_mask=np.zeros((3, 3), bool))
    assert cell.nnz == 0
    assert cell.values(np.ones((4, 2)), np.ones((4, 3))).shape == (4, 0)
    assert not cell.jacobian(np.ones(2), np.ones(3)).toarray().any()


def test_a_change_of_a_shared_weight_is_seen() -> None:
    cell = LSTMCell(1, 2)
    cell.weight_hh = weight = np.ones((8, 2))
    x, state = np.ones(1), np.ones(4)
    before = cell.values(x, state)
    weight *= 0
    after = cell.values(x, state)
    assert before[:8].all()
    assert not after[:8].any()


def test_what_is_wrong_is_named() -> None:
    cell, x, state = LSTMCell(2, 3), np.ones((4, 2)), np.ones((4, 6))
    inputs = np.ones((7, 4, 2))
    steps = cell.linearize(x, state)
    check_refusals(
        {
            "InputError: nonlinearity is 'sin'; expected 'tanh' or 'relu'": (
                lambda: RNNCell(2, 3, nonlinearity="sin")
            ),
            "InputError: input_size": lambda: GRUCell(0, 3),
            "InputTypeError: hidden_size": lambda: GRUCell(2, 3.5),
            "InputTypeError: dtype is int64": lambda: GRUCell(2, 3, dtype=int),
            "InputError: … weight_ih_mask has shape (3, 2); expected (12, 2)": (
                lambda: LSTMCell(2, 3, weight_ih_mask=np.ones((3, 2), bool))
            ),
            "InputTypeError: … weight_hh_mask has dtype float64; expected bool": (
                lambda: LSTMCell(2, 3, weight_hh_mask=np.ones((12, 3)))
            ),
            "InputError: x has … (…, 2)": lambda: cell.forward(np.ones((4, 3)), state),
            "InputError: x has shape (); expected": lambda: cell.forward(1.0, state[0]),
            "InputError: state has shape (5, 6); expected (4, 6), as x has shape (4, 2)": (
                lambda: cell.values(x, np.ones((5, 6)))
            ),
            "InputError: grad_state has shape (4, 3); expected (4, 6)": (
                lambda: cell.param_grads(x, state, np.ones((4, 3)))
            ),
            "InputError: grad_state has shape (6,)": lambda: cell.input_grads(x, state, state[0]),
            "InputTypeError: x has dtype int64": lambda: cell.forward(np.ones(2, int), state[0]),
            "InputError: x has … expected (T, …, 2)": lambda: cell.unroll(x[0]),
            "InputError: state has shape (1, 6); expected (4, 6), as x has shape (7, 4, 2)": (
                lambda: cell.unroll(inputs, state[:1])
            ),
            "InputError: out is an array of shape (3,)": (
                lambda: cell.values(x[0], state[0], out=np.empty(3))
            ),
            "InputError: state has 4 axes; expected at most": (
                lambda: cell.jacobian(np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 6)))
            ),
            "InputError: grad_state has shape (5, 6); expected (4, 6)": (
                lambda: steps.param_grads(np.ones((5, 6)))
            ),
            "InputError: the steps have the axes (); expected (T,) or (T, batch)": (
                lambda: cell.linearize(x[0], state[0]).implicit()
            ),
            "InputError: LSTMCell.weight_hh … (3, 3); expected (12, 3)": (
                lambda: setattr(cell, "weight_hh", np.ones((3, 3)))
            ),
        }
    )
