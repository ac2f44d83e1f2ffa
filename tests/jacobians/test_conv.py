"""Convolutions and linear layers are those of PyTorch, and so are their Jacobians."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from autodiff import check_operator, close, entries, share
from hypothesis import given
from hypothesis import strategies as st

from sparsescan import InputError, MemoryLimitError
from sparsescan.jacobians import Conv1d, Conv2d, ConvTranspose2d, Linear

seeds = st.integers(0, 2**32 - 1)


@st.composite
def hyper_parameters(draw: st.DrawFn, axes: int, *, transposed: bool = False) -> dict[str, Any]:
    """Arguments of a convolution that fit an image of at most 9 × 9."""

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(low, high)] * axes))

    groups = draw(st.integers(1, 3))
    arguments = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": sizes(1, 4),
        "stride": sizes(1, 3),
        "padding": sizes(0, 3),
        "dilation": sizes(1, 3),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    kernel, padding, dilation = (
        np.array(arguments[name]) for name in ("kernel_size", "padding", "dilation")
    )
    if transposed:
        highest = np.maximum(arguments["stride"], dilation) - 1
        arguments["output_padding"] = tuple(draw(st.integers(0, int(h))) for h in highest)
        least = 1 + (2 * padding) // np.array(arguments["stride"])
    else:
        least = np.maximum(1, dilation * (kernel - 1) + 1 - 2 * padding)
    image = tuple(draw(st.integers(int(low), max(int(low), 9))) for low in least)
    return arguments | {"input_shape": (arguments["in_channels"], *image)}


def masks(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Any:
    density = {"none": None, "some": 0.3, "nothing": 0.0}[kind]
    return None if density is None else rng.random(shape) < density


def check(
    operator: Any, module_type: Any, arguments: dict[str, Any], pruned: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    module = module_type(**{k: v for k, v in arguments.items() if k != "input_shape"})
    mask = masks(rng, tuple(module.weight.shape), pruned)
    op = operator(**arguments, weight_mask=mask, dtype=np.float64)
    if mask is not None:
        torch.nn.utils.parametrize.register_parametrization(module, "weight", Prune(mask))
        module = Shared(module)
    check_operator(op, module, rng)


class Prune(torch.nn.Module):
    """A weight that is zero where it is pruned."""

    def __init__(self, mask: np.ndarray) -> None:
        super().__init__()
        self.mask = torch.from_numpy(mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


class Shared(torch.nn.Module):
    """A module whose parametrised weight is called `weight`, as an operator's."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield ("weight" if name.endswith("original") else "bias"), parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


pruned = st.sampled_from(["none", "some", "nothing"])


@given(hyper_parameters(1), pruned, seeds)
def test_conv1d(arguments: dict[str, Any], pruned: str, seed: int) -> None:
    check(Conv1d, torch.nn.Conv1d, arguments, pruned, seed)


@given(hyper_parameters(2), pruned, seeds)
def test_conv2d(arguments: dict[str, Any], pruned: str, seed: int) -> None:
    check(Conv2d, torch.nn.Conv2d, arguments, pruned, seed)


@given(hyper_parameters(2, transposed=True), pruned, seeds)
def test_conv_transpose2d(arguments: dict[str, Any], pruned: str, seed: int) -> None:
    size = np.array(arguments["input_shape"][1:])
    out = (size - 1) * arguments["stride"] - 2 * np.array(arguments["padding"]) + 1
    out += np.array(arguments["dilation"]) * (np.array(arguments["kernel_size"]) - 1)
    if (out + arguments["output_padding"] < 1).any():
        with pytest.raises(InputError, match="too small for kernel_size"):
            ConvTranspose2d(**arguments)
        return
    check(ConvTranspose2d, torch.nn.ConvTranspose2d, arguments, pruned, seed)


@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), pruned, seeds)
def test_linear(ins: int, outs: int, bias: bool, pruned: str, seed: int) -> None:
    arguments = {"in_features": ins, "out_features": outs, "bias": bias}
    check(Linear, torch.nn.Linear, arguments, pruned, seed)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), seeds)
def test_same_padding(kernel: int, dilation: int, bias: bool, seed: int) -> None:
    options: dict[str, Any] = {"padding": "same", "dilation": dilation, "bias": bias}
    op = Conv2d(2, 3, (kernel, 2), **options, input_shape=(2, 5, 4), dtype=np.float64)
    assert op.output_shape == (3, 5, 4)
    module = torch.nn.Conv2d(2, 3, (kernel, 2), **options)
    check_operator(op, module, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (lambda s: Conv2d(2, 3, 2, input_shape=(4, *s)), torch.nn.Conv2d(2, 3, 2)),
        (lambda s: Linear(2, 3, input_shape=(4, 5, 2)), torch.nn.Linear(2, 3)),
    ],
)
def test_axes_before_those_of_the_layer_are_blocks(make: Any, module: torch.nn.Module) -> None:
    op = make((2, 4, 5))
    rng = np.random.default_rng(5)
    module = module.double()
    share(op, module)
    x = rng.standard_normal(op.input_shape)
    jacobian = torch.autograd.functional.jacobian(module, torch.tensor(x))
    expected = jacobian.reshape(op.shape[::-1]).numpy().T
    close(op.jacobian(x).toarray(), expected)
    close(op.forward(x), module(torch.tensor(x)).detach().numpy())
    rows, cols = entries(op)
    assert (expected[rows, cols] != 0).all()
    grad = rng.standard_normal(op.output_shape)
    batched = op.param_grads(x[None], grad[None])
    for name, actual in op.param_grads(x, grad).items():
        np.testing.assert_array_equal(actual, batched[name])


def test_vgg11_first_convolution_has_the_sparsity_of_table_1() -> None:
    op = Conv2d(3, 64, 3, padding=1, input_shape=(3, 32, 32))
    rows, cols = op.pattern.shape
    sparsity = 1 - op.pattern.nnz / (rows * cols)
    # Every output reads 94 of 96 rows and columns of a padded image on average: (94/32)² of 32².
    assert op.pattern.nnz == 3 * 64 * 94 * 94
    assert round(sparsity, 5) == 0.99157
    # The formula of the table leaves the border out, which the number in the table does not.
    assert round(1 - 3 * 3 / (32 * 32), 5) == 0.99121


def test_initial_parameters_are_drawn_as_pytorch_draws_them() -> None:
    op, module = Conv2d(8, 16, 3, input_shape=(8, 9, 9), rng=3), torch.nn.Conv2d(8, 16, 3)
    for name, theirs in module.named_parameters():
        ours = getattr(op, name)
        bound = 1 / np.sqrt(8 * 9)
        assert ours.shape == tuple(theirs.shape)
        assert ours.dtype == np.float32
        assert 0.5 * bound < np.abs(ours).max() <= bound
        assert theirs.detach().abs().max() <= bound
    again = Conv2d(8, 16, 3, input_shape=(8, 9, 9), rng=3)
    np.testing.assert_array_equal(op.weight, again.weight)


@pytest.mark.parametrize("height", [224, 2240])
def test_a_pattern_beyond_memory_is_refused_at_once(height: int) -> None:
    op = Conv2d(512, 512, 3, padding=1, input_shape=(512, height, 1000 * height))
    with pytest.raises(MemoryLimitError, match=r"would take [\d.]+ .iB; .* has [\d.]+ .iB left"):
        _ = op.pattern
    with pytest.raises(MemoryLimitError, match=r"for Conv2d\(.* would take [\d.]+ .iB"):
        op.values()
