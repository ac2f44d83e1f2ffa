"""Networks: their chains, the gradients a scan makes of them, and residual blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from autodiff import check_operator, close, share
from hypothesis import given
from hypothesis import strategies as st

import sparsescan
from sparsescan import BatchedCSR, InputError, InputTypeError, MemoryLimitError, Pattern
from sparsescan.jacobians import Conv2d, Dropout, Linear, Residual, Sequential, Tanh

SCHEDULES = ["linear", "blelloch"]
seeds = st.integers(0, 2**32 - 1)


class TorchResidual(torch.nn.Module):
    """What a residual block is in PyTorch."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Names as an operator has them: places in the block, without "layers."."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("layers.", ""), parameter


def share_all(ops: Any, modules: Any) -> None:
    """Let operators use the parameters of modules."""
    for op, module in zip(ops, modules, strict=True):
        if isinstance(op, Residual):
            share_all(op.ops, module.layers)
        else:
            share(op, module)


def a_residual_net(size: int) -> tuple[list[Any], torch.nn.Sequential]:
    """Layers inside, around and within residual blocks."""
    shape = (size,)
    ops = [
        Linear(3, size),
        Residual(
            Linear(size, 4),
            Residual(Tanh(input_shape=(4,))),
            Residual(Linear(4, 2), Tanh(input_shape=(2,)), Linear(2, 4)),
            Linear(4, size, bias=False),
        ),
        Tanh(input_shape=shape),
        Residual(Tanh(input_shape=shape)),
        Linear(size, 2),
    ]
    nn = torch.nn
    module = nn.Sequential(
        nn.Linear(3, size),
        TorchResidual(
            nn.Linear(size, 4),
            TorchResidual(nn.Tanh()),
            TorchResidual(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4)),
            nn.Linear(4, size, bias=False),
        ),
        nn.Tanh(),
        TorchResidual(nn.Tanh()),
        nn.Linear(size, 2),
    ).double()
    share_all(ops, module)
    return ops, module


def grads_of(layers: Any, found: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """All parameter gradients in the order of the layers."""
    return [grads[name] for op, grads in zip(layers, found, strict=True) for name in op.params]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.integers(1, 5), st.integers(0, 5), seeds)
def test_gradients_of_a_residual_net_are_those_of_autograd(
    schedule: str, size: int, batch: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ops, module = a_residual_net(size)
    net = Sequential(ops)
    x = rng.standard_normal((batch, 3) if batch else (3,))
    grad = rng.standard_normal((*x.shape[:-1], 2))
    xs = net.activations(x)
    x_torch = torch.tensor(x, requires_grad=True)
    y = module(x_torch)
    close(xs[-1], y.detach().numpy())
    (y * torch.tensor(grad)).sum().backward()
    plan = net.plan(schedule=schedule)
    assert plan.n == len(net) == len(net.patterns)
    gradients = plan.inclusive_scan(grad, net.values(xs))
    close(gradients[-1], x_torch.grad.numpy())
    found = grads_of(net.layers, net.param_grads(xs, gradients))
    expected = [p.grad.numpy() for p in module.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, 1e5)
    # The same from the exclusive scan of the Jacobians, which have no plan.
    once = sparsescan.exclusive_scan(grad, net.jacobians(xs), schedule=schedule)
    for ours, theirs in zip(grads_of(net.layers, net.param_grads(xs, once)), expected, strict=True):
        close(ours, theirs, 1e5)


def test_no_step_of_a_residual_block_fills_in() -> None:
    conv = Conv2d(4, 4, 3, padding=1, input_shape=(4, 6, 6))
    block = Residual(conv, Tanh(input_shape=(4, 6, 6)), conv)
    net = Sequential([block])
    size = 4 * 36
    # Of the conv's, what is carried beside it adds a diagonal.
    assert max(pattern.nnz for pattern in net.patterns) == conv.nnz + size
    assert block.nnz > 2 * conv.nnz
    assert [p.shape for p in net.patterns] == [
        (2 * size, size),
        (2 * size, 2 * size),
        (2 * size, 2 * size),
        (2 * size, 2 * size),
        (size, 2 * size),
    ]


@given(st.integers(1, 4), st.integers(1, 3), seeds)
def test_residual_is_an_operator(size: int, inner: int, seed: int) -> None:
    ops = [Linear(size, inner), Tanh(input_shape=(inner,)), Linear(inner, size)]
    module = TorchResidual(
        torch.nn.Linear(size, inner), torch.nn.Tanh(), torch.nn.Linear(inner, size)
    ).double()
    share_all(ops, module.layers)
    check_operator(Residual(*ops), module, np.random.default_rng(seed), shared=True)


@given(seeds, st.floats(0.05, 0.6))
def test_pattern_of_a_residual_is_the_identity_and_the_product(seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    masks = rng.random((2, 6, 6)) < density
    ops = [Linear(6, 6, weight_mask=mask, rng=rng, dtype=np.float64) for mask in masks]
    product = masks[0].T.astype(int) @ masks[1].T.astype(int) + np.eye(6, dtype=int)
    expected = sp.csr_array(product)
    block = Residual(*ops)
    assert block.pattern is Pattern(expected.indptr, expected.indices, expected.shape)
    assert not block._reads_input
    jacobian = block.jacobian()
    assert isinstance(jacobian, sp.csr_array)
    weights = [np.where(mask, op.weight, 0) for mask, op in zip(masks, ops, strict=True)]
    close(jacobian.toarray(), np.eye(6) + weights[0].T @ weights[1].T)


def test_residual_of_one_layer_and_of_nothing_but_zeros() -> None:
    tanh = Residual(Tanh(input_shape=(3,)))
    assert tanh.pattern is Pattern.diagonal(3)
    x = np.array([0.0, 1.0, -2.0])
    close(tanh.values(x), 2 - np.tanh(x) ** 2)
    pruned = Residual(*[Linear(3, 3, weight_mask=np.zeros((3, 3), bool), dtype=np.float64)] * 2)
    assert pruned.pattern is Pattern.diagonal(3)
    np.testing.assert_array_equal(pruned.values(), np.ones(3))


def test_buffers_are_used_again() -> None:
    ops, _ = a_residual_net(4)
    net = Sequential(ops)
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 5, 3))
    buffers = net.values(net.activations(first))
    expected = [values.copy() for values in net.values(net.activations(second))]
    for buffer in buffers:
        buffer.fill(np.nan)
    again = net.values(net.activations(second), out=buffers)
    for values, buffer, wanted in zip(again, buffers, expected, strict=True):
        assert values is buffer
        np.testing.assert_array_equal(values, wanted)


def test_jacobians_are_csr_or_batched_and_of_the_patterns() -> None:
    net = Sequential([Linear(3, 4), Tanh(input_shape=(4,))])
    xs = net.activations(np.ones((2, 3), np.float32))
    tanh, linear = net.jacobians(xs)
    assert isinstance(tanh, BatchedCSR)
    assert isinstance(linear, sp.csr_array)
    assert tanh.dtype == linear.dtype == np.float32
    assert net.patterns == [Pattern.diagonal(4), Pattern.dense((3, 4))]
    assert net.forward(np.ones(3)).shape == (4,)
    assert repr(net) == "Sequential((3,) → (4,), 2 steps)"
    assert "Tanh" in str(net)


def test_a_residual_block_is_printed_without_its_product() -> None:
    conv = Conv2d(64, 64, 3, padding=1, input_shape=(64, 56, 56))
    net = Sequential([Residual(conv, Tanh(input_shape=(64, 56, 56)), conv)])
    assert "nnz=1" in str(net)
    assert "pattern" not in vars(conv)


@pytest.mark.parametrize("size", [3, 60_000])
def test_masks_in_a_residual_block_may_change(size: int) -> None:
    drop = Dropout(input_shape=(size,))
    block = Residual(drop)
    assert block.values(out=np.empty(size)).shape == (size,)
    drop.mask = np.random.default_rng(0).random((50, size)) < 0.5
    x = np.ones((50, size), np.float32)
    np.testing.assert_array_equal(block.values(x), 1 + 2 * drop.mask)
    drop.mask = None
    np.testing.assert_array_equal(block.values(x), np.full(size, 2))


def test_an_operator_may_stand_twice() -> None:
    linear = Linear(3, 3, rng=0, dtype=np.float64)
    tanh = Tanh(input_shape=(3,))
    net = Sequential([linear, tanh, linear, tanh])
    x = np.random.default_rng(0).standard_normal((2, 3))
    xs = net.activations(x)
    grads = net.plan().exclusive_scan(np.ones((2, 3)), net.values(xs))
    found = net.param_grads(xs, grads)
    weight = torch.tensor(linear.weight, requires_grad=True)
    bias = torch.tensor(linear.bias)
    y = torch.tensor(x)
    for _ in range(2):
        y = torch.tanh(y @ weight.T + bias)
    y.sum().backward()
    close(found[0]["weight"] + found[2]["weight"], weight.grad.numpy())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Sequential(Linear(2, 3)), InputTypeError, "ops is a Linear; expected a list"),
        (lambda: Sequential([Linear(2, 3)]).values(5), InputTypeError, "activations is a int"),
        (
            lambda: Sequential([Linear(2, 3)]).values([np.ones(2), np.ones(3)], out=5),
            InputTypeError,
            "out is a int; expected a list",
        ),
        (
            lambda: Sequential([Linear(2, 3)]).param_grads([np.ones(2), np.ones(3)], 5),
            InputTypeError,
            "gradients is a int",
        ),
        (
            lambda: Sequential([Linear(2, 3)]).param_grads([np.ones(2), np.ones(3)], [np.ones(9)]),
            InputError,
            r"a gradient has shape \(9,\); expected \(·, 3\)",
        ),
        (lambda: Sequential([]), InputError, "ops is empty"),
        (lambda: Sequential([Linear(2, 3), "x"]), InputTypeError, r"ops\[1\] is a str"),
        (
            lambda: Sequential([Linear(2, 3), Linear(2, 3)]),
            InputError,
            r"ops\[1\] has input_shape \(2,\); expected \(3,\), the output of ops\[0\]",
        ),
        (lambda: Residual(Linear(2, 3)), InputError, r"output_shape \(3,\); expected \(2,\)"),
        (
            lambda: Sequential([Linear(2, 3)]).values([np.ones(2)]),
            InputError,
            "activations has 1 entries; expected 2",
        ),
        (
            lambda: Sequential([Linear(2, 3)]).param_grads([np.ones(2), np.ones(3)], []),
            InputError,
            "gradients has 0 entries; expected 1",
        ),
        (
            lambda: Sequential([Linear(2, 3)]).values([np.ones(2), np.ones(3)], out=[]),
            InputError,
            "out has 0 entries; expected 1",
        ),
        (
            lambda: Sequential([Conv2d(512, 512, 3, input_shape=(512, 2240, 2240))]).plan(),
            MemoryLimitError,
            r"the patterns of Sequential\(.* would take [\d,]+ bytes",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
