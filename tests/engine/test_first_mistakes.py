"""What a newcomer does wrong first, and the error that says so and leads to the page that helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsescan
import sparsescan.torch
from sparsescan import (
    DeviceError,
    GradientError,
    InputError,
    InputTypeError,
    PatternMismatchError,
    SparseScanError,
    exclusive_scan,
)
from sparsescan.graph.functions import tanh
from sparsescan.recurrent import GRU, Cell, Hidden, Input

RNG = np.random.default_rng(0)
# A network of 3, 4 and 2 units: transposed Jacobians, from the last layer to the first.
LAST, FIRST = (sp.csr_array(RNG.random(shape)) for shape in ((4, 2), (3, 4)))
GRAD = np.ones(2)
SQUARE = RNG.random((5, 3, 3))
BATCH = RNG.random((5, 16, 3, 3))
X = RNG.random((50, 16, 12), np.float32)  # (T, batch, features)
WEIGHTS = RNG.standard_normal((5, 3, 3)) / 2


def loss(x: Any) -> Any:
    for weight in WEIGHTS:
        x = np.tanh(weight @ x)
    return (x**2).sum()


def checked(transposed: bool, reverse: bool) -> None:
    """Check the gradient of that loss, by Jacobians in the order of time."""
    last, jacobians = np.ones(3), []
    for weight in WEIGHTS:
        last = np.tanh(weight @ last)
        jacobian = (1 - last**2)[:, None] * weight
        jacobians.append(jacobian.T if transposed else jacobian)
    sparsescan.check_grad(loss, np.ones(3), 2 * last, jacobians, reverse=reverse)


def with_an_entry_less() -> None:
    plan = sparsescan.plan([LAST, FIRST])
    pruned = LAST.toarray()
    pruned[0, 0] = 0
    plan.exclusive_scan(GRAD, [sp.csr_array(pruned), FIRST])


def with_one_more_step() -> None:
    sparsescan.plan(SQUARE).exclusive_scan(np.ones(3), np.concatenate([SQUARE, SQUARE[:1]]))


def backward_of(grad: Any) -> None:
    step = GRU(12, 20).training_step()
    step.forward(X)
    step.backward(grad)


def branching() -> None:
    class Branching(Cell):
        weight_ih = Input("n")
        weight_hh = Hidden("n")

        def step(self, x: Any, h: Any) -> Any:
            if h > 0:
                return h
            return tanh(self.weight_ih.n(x) + self.weight_hh.n(h))


def with_functions_of_torch() -> None:
    class OfTorch(Cell):
        weight_ih = Input("n")
        weight_hh = Hidden("n")

        def step(self, x: Any, h: Any) -> Any:
            return torch.tanh(self.weight_ih.n(x) + self.weight_hh.n(h))


class OnDevice:
    """What a tensor of PyTorch on a GPU has, where there is no CuPy."""

    __cuda_array_interface__ = {"data": (0, False), "shape": (3,), "typestr": "<f4", "version": 3}  # noqa: RUF012


# What was done; the error, and what its message has; what the page of that error says of it.
MISTAKES: dict[str, tuple[Callable[[], object], type[SparseScanError], str, str]] = {
    "in the order of time": (
        lambda: exclusive_scan(GRAD, [FIRST, LAST]),
        InputError,
        r"jacobians\[1\] has shape \(4, 2\), but jacobians\[0\] has 3 rows; expected \(·, 3\): all "
        "fit if each is transposed, or with reverse=True if they are in the order of time$",
        "Jacobians are in the order of time. Pass ``reverse=True``",
    ),
    "from the last layer, with reverse=True": (
        lambda: exclusive_scan(GRAD, [LAST, FIRST], reverse=True),
        InputError,
        r"jacobians\[0\] has shape \(4, 2\), but jacobians\[1\] has 3 rows; expected \(·, 3\): all "
        "fit if each is transposed, or without reverse=True if they begin with the last layer$",
        "or list them from the last layer",
    ),
    "not transposed": (
        lambda: exclusive_scan(GRAD, [LAST.T.tocsr(), FIRST.T.tocsr()]),
        InputError,
        r"jacobians\[1\] has shape \(4, 3\), but jacobians\[0\] has 2 rows; expected \(·, 2\): all "
        "fit if each is transposed",
        "Jacobians are not transposed",
    ),
    "not transposed, and in the order of time": (
        lambda: exclusive_scan(GRAD, [FIRST.T.tocsr(), LAST.T.tocsr()]),
        InputError,
        r"grad has shape \(2,\); expected \(3,\) or \(batch, 3\): the last layer's Jacobian, "
        "transposed, has 3 columns$",
        "Jacobians are not transposed",
    ),
    "square, not transposed": (
        lambda: checked(transposed=False, reverse=True),
        GradientError,
        "the gradient is wrong: .* All fits once the Jacobians are transposed: pass J.T",
        "Jacobians are not transposed. Square ones pass every check of shapes.",
    ),
    "square, in the order of time": (
        lambda: checked(transposed=True, reverse=False),
        GradientError,
        "the gradient is wrong: .* All fits in the other order: pass reverse=True",
        "Jacobians are in the order of time. Pass ``reverse=True``",
    ),
    "the transpose of a CSR array": (
        lambda: exclusive_scan(GRAD, [LAST.T.tocsr().T, FIRST]),
        InputTypeError,
        r"jacobians\[0\] is a csc_array; expected CSR: convert it with .tocsr\(\)$",
        "the transpose of a CSR array is a CSC array",
    ),
    "one matrix": (
        lambda: exclusive_scan(GRAD, LAST),
        InputTypeError,
        "jacobians is a csr_array; expected a sequence of Jacobians, such as a list of one$",
        "One Jacobian stands where a list of them is expected",
    ),
    "shapes in the place of Jacobians": (
        lambda: sparsescan.plan((5, 3, 3)),
        InputTypeError,
        r"jacobians\[0\] is the number 5; expected a matrix$",
        "One Jacobian stands where a list of them is expected",
    ),
    "a forgotten batch axis": (
        lambda: exclusive_scan(np.ones(3), BATCH),
        InputError,
        r"grad has shape \(3,\); expected \(16, 3\): the Jacobians have a batch of 16 and 3 col",
        "Arrays have a batch axis in one place and none",
    ),
    "the batch axis last": (
        lambda: exclusive_scan(np.ones((3, 16)), BATCH),
        InputError,
        r"grad has shape \(3, 16\); expected \(16, 3\): the Jacobians have a batch of 16 and 3 col",
        "Arrays have a batch axis in one place and none, or one of another length",
    ),
    "integers": (
        lambda: exclusive_scan(np.array([1, 2]), [LAST, FIRST]),
        InputTypeError,
        r"grad has dtype int64; expected float32 or float64: convert it with .astype\(float\)$",
        "Integers, booleans, complex numbers or float16. ``.astype(float)`` makes float64 of them",
    ),
    "half precision": (
        lambda: exclusive_scan(np.ones(3), SQUARE.astype(np.float16)),
        InputTypeError,
        "jacobians has dtype float16; expected float32 or float64: convert it with "
        r".astype\(float\)$",
        "or float16. ``.astype(float)`` makes float64 of them",
    ),
    "local_grads for the input, too": (
        lambda: exclusive_scan(None, SQUARE, local_grads=np.ones((6, 3))),
        InputError,
        "local_grads has 6 entries; expected 5, one for each returned gradient: that of ∇x_0 is "
        "for inclusive_scan$",
        "``local_grads`` has an entry for ``∇x_0``, which an exclusive scan does not return",
    ),
    "a plan for another pattern": (
        with_an_entry_less,
        PatternMismatchError,
        r"jacobians\[0\] is Pattern\(\(4, 2\), nnz=7, general\); expected Pattern\(\(4, 2\), "
        r"nnz=8, dense\), as the plan was made for: keep explicit zeros, or make another plan$",
        "Zeros are dropped, so that the pattern follows the values",
    ),
    "a plan for fewer steps": (
        with_one_more_step,
        InputError,
        "jacobians has 6 steps; expected 5, as the plan was made for$",
        "A plan was made for another number of Jacobians",
    ),
    "a misspelt schedule": (
        lambda: exclusive_scan(GRAD, [LAST, FIRST], schedule="bleloch"),
        InputError,
        "schedule is 'bleloch'; expected 'auto', 'linear', 'blelloch', 'truncated:K'",
        'A string such as ``"truncated:2"`` fits any number',
    ),
    "CUDA without CuPy": (
        lambda: exclusive_scan(GRAD, [LAST, FIRST], device="cuda"),
        DeviceError,
        r"a CUDA device was asked for, but CuPy cannot be imported \(.*\): pip install "
        r"'sparsescan\[cuda13\]', or \[cuda12\]$",
        "CuPy or Numba's CUDA target is not installed: ``sparsescan[cuda13]`` has both",
    ),
    "a tensor on the GPU without CuPy": (
        lambda: exclusive_scan(OnDevice(), SQUARE),
        DeviceError,
        "grad is a .*OnDevice on a CUDA device, but CuPy cannot be imported: pip install "
        r"'sparsescan\[cuda13\]'",
        "CuPy or Numba's CUDA target is not installed",
    ),
    "a tensor that requires a gradient": (
        lambda: exclusive_scan(torch.ones(3, requires_grad=True), SQUARE),
        InputTypeError,
        "grad is not an array: .*requires grad. Use tensor.detach",
        "A tensor of PyTorch that requires a gradient. ``.detach()`` it",
    ),
    "a tensor of Jacobians": (
        lambda: exclusive_scan(np.ones(3), torch.ones(5, 3, 3)),
        InputTypeError,
        r"jacobians is a Tensor; expected a sequence .*: .detach\(\).numpy\(\) makes one, without",
        "``.detach()`` it, or use :mod:`sparsescan.torch`",
    ),
    "a sequence with its axes in another order": (
        lambda: GRU(12, 20).training_step().forward(X.transpose(1, 2, 0)),
        InputError,
        r"x has shape \(16, 12, 50\); expected \(T, batch, 12\) or \(T, 12\)$",
        "Sequences have their axes in another order",
    ),
    "gradients of the last step alone": (
        lambda: backward_of(np.ones((16, 20), np.float32)),
        InputError,
        r"grad_output has shape \(16, 20\); expected \(50, 16, 20\)$",
        "Sequences have their axes in another order",
    ),
    "no forward pass": (
        lambda: GRU(12, 20).training_step().backward(np.ones((50, 16, 20), np.float32)),
        SparseScanError,
        "backward was called without a forward pass before it$",
        "",
    ),
    "a class in the place of a module": (
        lambda: sparsescan.torch.convert(torch.nn.GRU),
        InputTypeError,
        r"model is <class '.*GRU'>; expected a torch.nn.Module$",
        "A class stands where an object of it is expected",
    ),
    "a module in the place of a cell": (
        lambda: sparsescan.torch.module(torch.nn.GRU),
        InputTypeError,
        "cell is <class '.*GRU'>; expected a class of cells, with a step$",
        "A class stands where an object of it is expected, or the other way round",
    ),
    "a cell that branches": (
        branching,
        InputTypeError,
        r"test_first_mistakes.py, line \d+: 'if h > 0:.*' has a branch on a number that only a "
        r"step has, which cannot be traced: .*; write np.where\(condition, a, b\)$",
        "A cell's step calls what works on numbers",
    ),
    "a cell of PyTorch's functions": (
        with_functions_of_torch,
        InputTypeError,
        "has a call of PyTorch, which cannot be traced: .* write NumPy's functions "
        r"of one number a unit, such as np.tanh\(a\), or .* of sparsescan.recurrent$",
        "A cell's step calls what works on numbers",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_says_what_is_wrong_and_where_help_is(name: str) -> None:
    call, kind, message, cause = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text
    assert len(text) < 400
    raised = type(caught.value)
    assert caught.value.__notes__ == [
        f"For usual causes see help(sparsescan.errors.{raised.__name__})."
    ]
    assert cause in " ".join((raised.__doc__ or "").split())
    page = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
    assert f"autoexception:: sparsescan.{raised.__name__}\n" in page.read_text()


def test_float64_beside_float32_is_no_mistake() -> None:
    mixed = exclusive_scan(np.ones(3, np.float32), SQUARE)
    assert mixed.dtype == np.float64
    np.testing.assert_array_equal(mixed, exclusive_scan(np.ones(3), SQUARE))
    output, _ = GRU(12, 20, rng=0).training_step().forward(X.astype(np.float64))
    expected, _ = GRU(12, 20, rng=0).training_step().forward(X)
    np.testing.assert_allclose(output, expected, atol=1e-6)
