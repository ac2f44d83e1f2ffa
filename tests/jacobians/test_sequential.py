"""Networks: their chains, the gradients a scan makes of them, and residual blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from autodiff import check_network, check_operator, check_params, close, randomise, share
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsescan
from sparsescan import Pattern
from sparsescan.jacobians import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Linear,
    Pad,
    ReLU,
    Residual,
    Sequential,
    Tanh,
)
from sparsescan.strategies.networks import sequential

nn = torch.nn
SCHEDULES = ["linear", "blelloch"]
seeds = st.integers(0, 2**32 - 1)


class TorchResidual(nn.Module):
    """A residual block in PyTorch."""

    def __init__(self, *layers: nn.Module, shortcut: Any = ()) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.layers(x)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Names as an operator has them: places in the block, without "layers."."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("layers.", ""), parameter


class TorchPad(nn.Module):
    """Zeros around all axes but the batch."""

    def __init__(self, pad_width: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        # PyTorch begins with the last axis.
        self.widths = [width for pair in reversed(pad_width) for width in pair]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x, self.widths)


def share_all(ops: Any, modules: Any) -> None:
    """Let operators use the parameters and the statistics of modules."""
    for op, module in zip(ops, modules, strict=True):
        if isinstance(op, Residual):
            share_all(op.ops, module.layers)
            share_all(op.shortcut, module.shortcut)
        else:
            share(op, module)
        if isinstance(op, BatchNorm2d):
            op.running_mean = module.running_mean.numpy()
            op.running_var = module.running_var.numpy()


def twin(op: Any) -> nn.Module:
    """Return the module that an operator is named after, in evaluation, with its own parameters."""
    if isinstance(op, Residual):
        return TorchResidual(*map(twin, op.ops), shortcut=map(twin, op.shortcut))
    if isinstance(op, Conv2d):
        sizes = op.in_channels, op.out_channels, op.kernel_size, op.stride, op.padding
        return nn.Conv2d(*sizes, bias=op.bias is not None)
    if isinstance(op, Linear):
        return nn.Linear(op.in_features, op.out_features, op.bias is not None)
    if isinstance(op, BatchNorm2d):
        return nn.BatchNorm2d(op.num_features).eval()
    if isinstance(op, AvgPool2d):
        return nn.AvgPool2d(op.kernel_size, op.stride)
    if isinstance(op, Pad):
        return TorchPad(op.pad_width)
    return {"Flatten": nn.Flatten, "ReLU": nn.ReLU, "Tanh": nn.Tanh}[type(op).__name__]()


def twins(ops: Any, rng: np.random.Generator) -> nn.Sequential:
    """Modules in float64 with random parameters and statistics, which the operators then use."""
    module = nn.Sequential(*map(twin, ops)).double()
    randomise(module, rng)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.copy_(torch.tensor(rng.standard_normal(part.num_features)))
            part.running_var.copy_(torch.tensor(rng.uniform(0.5, 2, part.num_features)))
    share_all(ops, module)
    return module


def a_residual_net(size: int) -> list[Any]:
    """Layers inside, around and within residual blocks and their shortcuts."""
    shape = (size,)
    return [
        Linear(3, size),
        Residual(
            Linear(size, 4),
            Residual(Tanh(input_shape=(4,))),
            Residual(Linear(4, 2), Tanh(input_shape=(2,)), Linear(2, 4)),
            Linear(4, size, bias=False),
        ),
        Tanh(input_shape=shape),
        Residual(
            Residual(Linear(size, 3), shortcut=[Linear(size, 3)]),
            Tanh(input_shape=(3,)),
            shortcut=[
                Residual(Tanh(input_shape=shape)),
                Residual(Linear(size, 3, bias=False), shortcut=[Linear(size, 3)]),
            ],
        ),
        Residual(Tanh(input_shape=(3,))),
        Linear(3, 2),
    ]


def check_gradients(
    ops: Any, module: nn.Module, x: np.ndarray, rng: np.random.Generator, schedule: str
) -> None:
    """By a plan, and by the exclusive scan of the Jacobians, which have none."""
    net = Sequential(ops)
    xs, grad = check_network(net, module, x, rng, schedule)
    once = sparsescan.exclusive_scan(grad, net.jacobians(xs), schedule=schedule)
    check_params(net, module, net.param_grads(xs, once))


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.integers(1, 5), st.integers(0, 5), seeds)
def test_gradients_of_a_residual_net_are_those_of_autograd(
    schedule: str, size: int, batch: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ops = a_residual_net(size)
    x = rng.standard_normal((batch, 3) if batch else (3,))
    check_gradients(ops, twins(ops, rng), x, rng, schedule)


def random_layers(rng: np.random.Generator, ins: int, outs: int, depth: int) -> list[Any]:
    """Layers from so many entries to so many, and blocks of such layers."""
    ops: list[Any] = []
    count = int(rng.integers(1, 4))
    for k in range(count):
        end = outs if k == count - 1 else int(rng.integers(1, 5))
        if depth and rng.random() < 0.5:
            body = random_layers(rng, ins, end, depth - 1)
            around = ins != end or rng.random() < 0.3
            shortcut = random_layers(rng, ins, end, depth - 1) if around else ()
            ops.append(Residual(*body, shortcut=shortcut))
        elif ins == end and rng.random() < 0.5:
            ops.append(Tanh(input_shape=(ins,)))
        elif ins < end and rng.random() < 0.5:
            ops.append(Pad((0, end - ins), input_shape=(ins,)))
        else:
            ops.append(Linear(ins, end, bool(rng.integers(2))))
        ins = end
    return ops


@given(st.integers(0, 3), st.sampled_from(SCHEDULES), seeds)
def test_gradients_of_nested_blocks_are_those_of_autograd(
    batch: int, schedule: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ops = random_layers(rng, 3, 2, 3)
    x = rng.standard_normal((batch, 3) if batch else (3,))
    check_gradients(ops, twins(ops, rng), x, rng, schedule)


def a_basic_block(shortcut: str, shape: tuple[int, int, int] = (2, 5, 4)) -> Residual:
    """Return a block of ResNet-18 with a projection (option B), or of ResNet-20 (option A)."""
    outs = shape[0] + 1
    first = Conv2d(shape[0], outs, 3, 2, 1, bias=False, input_shape=shape)
    shape_out = first.output_shape
    norms = [BatchNorm2d(outs, input_shape=shape_out) for _ in range(3)]
    if shortcut == "projection":
        around = Conv2d(shape[0], outs, 1, 2, bias=False, input_shape=shape), norms[2]
    else:
        pool = AvgPool2d(1, 2, input_shape=shape)
        around = pool, Pad(((0, 1), (0, 0), (0, 0)), input_shape=pool.output_shape)
    second = Conv2d(outs, outs, 3, padding=1, bias=False, input_shape=shape_out)
    return Residual(first, norms[0], ReLU(input_shape=shape_out), second, norms[1], shortcut=around)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shortcut", ["projection", "zeros"])
@given(seed=seeds)
@settings(max_examples=10)
def test_gradients_of_a_basic_block_are_those_of_autograd(
    shortcut: str, schedule: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    block = a_basic_block(shortcut)
    ops = [block, ReLU(input_shape=block.output_shape)]
    x = rng.standard_normal((3, *block.input_shape))
    check_gradients(ops, twins(ops, rng), x, rng, schedule)


@pytest.mark.parametrize("shortcut", ["projection", "zeros"])
@given(seed=seeds)
@settings(max_examples=5)
def test_a_basic_block_is_an_operator(shortcut: str, seed: int) -> None:
    rng, block = np.random.default_rng(seed), a_basic_block(shortcut)
    # A ReLU may be 0 whatever the input is.
    check_operator(block, twins([block], rng)[0], rng, shared=True, exact=False)


@given(seeds)
def test_a_block_whose_values_do_not_depend_on_the_input(seed: int) -> None:
    rng = np.random.default_rng(seed)
    block = Residual(Linear(3, 5, rng=rng), shortcut=[Pad(1, input_shape=(3,))])
    assert not block._reads_input
    values = block.values(out=np.empty(block.nnz, np.float32))
    assert values.shape == (15,)
    expected = block.ops[0].weight.T + np.eye(5, dtype=np.float32)[1:4]
    np.testing.assert_array_equal(values.reshape(3, 5), expected)
    zeros = Residual(Pad((0, 2), input_shape=(3,)), shortcut=[Pad((2, 0), input_shape=(3,))])
    assert zeros.nnz == 6
    x = rng.standard_normal((4, 3), np.float32)
    np.testing.assert_array_equal(zeros.forward(x), x @ zeros.jacobian(x).toarray())


def test_parameters_are_named_by_their_places() -> None:
    block = Residual(
        Tanh(input_shape=(2,)),
        Residual(Linear(2, 3), shortcut=[Linear(2, 3, bias=False)]),
        shortcut=[Residual(Linear(2, 3), shortcut=[Linear(2, 3, bias=False)])],
    )
    inner = ["0.weight", "0.bias", "shortcut.0.weight"]
    names = [*(f"1.{name}" for name in inner), *(f"shortcut.0.{name}" for name in inner)]
    assert [*block.params] == [*block.param_grads(np.ones(2), np.ones(3))] == names
    assert block.params["1.shortcut.0.weight"] is block.ops[1].shortcut[0].weight
    # In a chain those of f come first, too.
    actual = [array for op in Sequential([block]).layers for array in op.params.values()]
    for array, expected in zip(actual, block.params.values(), strict=True):
        assert array is expected


def test_steps_of_a_block_with_a_shortcut() -> None:
    block = a_basic_block("projection")
    net = Sequential([block])
    assert net.layers == (*block.ops, *block.shortcut)
    size, size_out = block.shape
    carried = [size] * len(block.ops) + [size_out] * len(block.shortcut)
    steps = [op.nnz + beside for op, beside in zip(net.layers, carried, strict=True)]
    # Beside the layers: two copies, a permutation and a sum, which add no entries.
    fork, swap, join = 2 * size, size_out + size, 2 * size_out
    last = len(block.ops)
    actual = [pattern.nnz for pattern in reversed(net.patterns)]
    assert actual == [fork, *steps[:last], swap, *steps[last:], join]
    turned = net.patterns[len(block.shortcut) + 1]
    assert turned.shape == (swap, swap)
    assert sorted(turned.indices) == [*range(swap)]
    assert "_products" not in vars(block)


@given(seeds)
@settings(max_examples=1)
def test_gradients_of_a_whole_residual_network_are_those_of_autograd(seed: int) -> None:
    rng, net = np.random.default_rng(seed), sequential("resnet-8", 0)
    module = twins(net.ops, rng)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter /= math.sqrt(parameter[0].numel())
    x = rng.standard_normal((2, 3, 32, 32))
    check_gradients(net.ops, module, x, rng, "linear")


def test_no_step_of_a_residual_block_fills_in() -> None:
    conv = Conv2d(4, 4, 3, padding=1, input_shape=(4, 6, 6))
    block = Residual(conv, Tanh(input_shape=(4, 6, 6)), conv)
    net = Sequential([block])
    size = 4 * 36
    # The image that is carried beside a convolution adds a diagonal to its pattern.
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
    rng, block = np.random.default_rng(seed), Residual(*ops)
    check_operator(block, twins([block], rng)[0], rng, shared=True)


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


@given(seeds, st.floats(0.05, 0.6))
def test_pattern_of_a_shortcut_is_its_product(seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    shapes = (4, 5), (6, 4), (3, 5), (6, 3)
    masks = [rng.random(shape) < density for shape in shapes]
    ops = [Linear(*mask.shape[::-1], weight_mask=mask, rng=rng, dtype=np.float64) for mask in masks]
    block = Residual(*ops[:2], shortcut=ops[2:])
    f, s = (a.T.astype(int) @ b.T.astype(int) for a, b in (masks[:2], masks[2:]))
    expected = sp.csr_array(f + s)
    assert block.pattern is Pattern(expected.indptr, expected.indices, expected.shape)
    weights = [np.where(mask, op.weight, 0).T for mask, op in zip(masks, ops, strict=True)]
    close(block.jacobian().toarray(), weights[0] @ weights[1] + weights[2] @ weights[3])


def test_a_residual_block_is_printed_without_its_product() -> None:
    conv = Conv2d(64, 64, 3, padding=1, input_shape=(64, 56, 56))
    net = Sequential([Residual(conv, Tanh(input_shape=(64, 56, 56)), conv)])
    assert "nnz=1" in str(net)
    assert "pattern" not in vars(conv)
