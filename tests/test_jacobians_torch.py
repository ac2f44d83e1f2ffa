"""Networks from PyTorch: the scan gives the gradients of autograd, in the module's own memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from autodiff import close
from torch import nn
from torch.nn.utils import prune

from sparsescan import InputError, InputTypeError
from sparsescan.jacobians import BatchNorm2d, Conv2d, Sequential, from_torch


def lenet5() -> nn.Sequential:
    """LeNet-5 (LeCun et al., 1998) for 32×32 images of three channels."""
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Identity(),
        nn.Sigmoid(),
        nn.Linear(84, 10),
    )


def vgg11() -> nn.Sequential:
    """VGG-11 (Simonyan and Zisserman, 2015) for 32×32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]:
        if width == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    head = nn.Sequential(nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(nn.Sequential(*layers), head)


def check_gradients(
    module: nn.Module, input_shape: tuple[int, ...], x: np.ndarray, schedule: str = "linear"
) -> Sequential:
    """All gradients of a network by the scan are those of autograd, in float64."""
    module = module.double()
    net = Sequential(from_torch(module, input_shape))
    rng = np.random.default_rng(1)
    xs = net.activations(x)
    x_torch = torch.tensor(x, requires_grad=True)
    y = module(x_torch)
    close(xs[-1], y.detach().numpy())
    grad = rng.standard_normal(y.shape)
    (y * torch.tensor(grad)).sum().backward()
    flat = grad.reshape(*x.shape[: x.ndim - len(input_shape)], -1)
    plan = net.plan(schedule=schedule)
    gradients = plan.inclusive_scan(flat, net.values(xs))
    close(gradients[-1].reshape(x.shape), x_torch.grad.numpy(), 1e5)
    found = net.param_grads(xs, gradients)
    ours = [
        (op.params[name], layer_grads[name])
        for op, layer_grads in zip(net.layers, found, strict=True)
        for name in op.params
    ]
    for (array, ours_grad), parameter in zip(ours, module.parameters(), strict=True):
        assert np.shares_memory(array, parameter.detach().numpy())
        close(ours_grad, parameter.grad.numpy(), 1e5)
    return net


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("schedule", ["linear", "blelloch"])
def test_lenet5(schedule: str) -> None:
    check_gradients(lenet5(), (3, 32, 32), images(4, 3, 32, 32), schedule)


def test_vgg11() -> None:
    net = check_gradients(vgg11(), (3, 32, 32), images(2, 3, 32, 32))
    assert len(net) == 23
    assert net.layers[0].pattern.nnz == 3 * 64 * 94 * 94


def test_every_layer_there_is() -> None:
    module = nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AvgPool2d(3, ceil_mode=True, count_include_pad=False),
        nn.ELU(0.5),
        nn.Conv2d(4, 6, 3, padding="same", groups=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d((4, None)),
        nn.GELU("tanh"),
        nn.Dropout(0.5),
        nn.Flatten(2),
        nn.Conv1d(6, 4, 3, stride=2, dilation=2),
        nn.Softplus(2.0, 10.0),
        nn.LayerNorm(14),
        nn.Hardtanh(-0.5, 2.0),
        nn.Linear(14, 3),
        nn.Softmax(1),
        nn.Flatten(),
        nn.GELU(),
        nn.Softmax(-1),
    ).eval()
    module[1].running_mean.copy_(torch.randn(4))
    module[1].running_var.copy_(torch.rand(4) + 0.5)
    check_gradients(module, (2, 5, 5), images(3, 2, 5, 5))


def test_batch_norm_in_training_couples_the_batch() -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    )
    batch = (4, 2, 3, 3)
    statistics = module[1].double().running_mean.clone()
    net = Sequential(from_torch(module.double(), batch))
    net.activations(images(*batch))
    np.testing.assert_array_equal(module[1].running_mean, statistics)
    check_gradients(module, batch, images(*batch))
    assert net.patterns[3].shape == (4 * 3 * 4, 4 * 3 * 4)
    with pytest.raises(InputError, match=r"module\[1\] \(BatchNorm2d\): .*\(N, C, H, W\)"):
        from_torch(module, batch[1:])


def test_pruned_weights_leave_the_pattern() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)).double()
    for layer in (module[0], module[3]):
        prune.l1_unstructured(layer, "weight", amount=0.8)
    net = Sequential(from_torch(module, (3, 5, 5)))
    kept = int(module[0].weight_mask.sum())
    assert net.layers[0].nnz == kept * 9
    assert net.layers[3].nnz == int(module[3].weight_mask.sum())
    x = images(2, 3, 5, 5)
    xs = net.activations(x)
    close(xs[-1], module(torch.tensor(x)).detach().numpy())
    grads = net.plan().exclusive_scan(np.ones((2, 4)), net.values(xs))
    module(torch.tensor(x)).sum().backward()
    found = net.param_grads(xs, grads)
    close(found[0]["weight"], module[0].weight_orig.grad.numpy())
    close(found[3]["weight"], module[3].weight_orig.grad.numpy())
    assert np.shares_memory(net.layers[0].weight, module[0].weight_orig.detach().numpy())


def test_what_an_optimiser_does_is_seen() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    (op,) = from_torch(module, (3,))
    x = np.ones(3, np.float32)
    before = op.forward(x)
    module(torch.from_numpy(x)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    np.testing.assert_allclose(op.forward(x), module(torch.from_numpy(x)).detach(), rtol=1e-6)
    assert (op.forward(x) != before).all()


def test_a_single_layer_and_nested_sequentials() -> None:
    assert len(from_torch(nn.ReLU(), (3,))) == 1
    nested = nn.Sequential(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Identity()), nn.Tanh())
    assert [type(op).__name__ for op in from_torch(nested, (2, 2))] == ["ReLU", "Tanh"]
    named = nn.Sequential()
    named.add_module("conv", nn.Conv2d(1, 1, 1))
    (conv,) = from_torch(named, (1, 2, 2))
    assert isinstance(conv, Conv2d)


def test_running_statistics_are_shared() -> None:
    module = nn.BatchNorm2d(3).eval()
    (op,) = from_torch(module, (3, 2, 2))
    assert isinstance(op, BatchNorm2d)
    assert np.shares_memory(op.running_mean, module.running_mean.numpy())
    assert np.shares_memory(op.running_var, module.running_var.numpy())


@pytest.mark.parametrize(
    ("module", "shape", "error", "words"),
    [
        (
            nn.Sequential(nn.ReLU(), nn.Sequential(nn.Bilinear(2, 2, 2))),
            (2,),
            InputError,
            r"module\[1\]\[0\] is a Bilinear, which has no operator; expected one of .*ReLU",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")),
            (1, 4, 4),
            InputError,
            r"module\[0\] \(Conv2d\): padding_mode is 'circular'",
        ),
        (nn.Sequential(nn.Dropout(0.5)), (2,), InputError, r"\(Dropout\): it draws its own mask"),
        (nn.MaxPool2d(2, return_indices=True), (1, 4, 4), InputError, "return_indices is True"),
        (nn.Linear(2, 2).half(), (2,), InputTypeError, "dtype float16; expected float32"),
        (nn.Linear(2, 2), (3,), InputError, r"module \(Linear\): input_shape is \(3,\)"),
        (nn.Linear(2, 2), 2.5, InputTypeError, "input_shape is 2.5"),
        (np.tanh, (2,), InputTypeError, "module is a ufunc; expected a torch.nn.Module"),
        (nn.Softmax(), (2,), InputTypeError, "dim is None"),
    ],
)
def test_what_is_wrong_is_named(
    module: Any, shape: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        from_torch(module, shape)


def test_pytorch_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys, sparsescan, sparsescan.jacobians; "
        "assert not {'torch', 'cupy', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
